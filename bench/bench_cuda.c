/* SPDX-License-Identifier: Apache-2.0 */
/* Times of the cuda device beside the ceilings of the same run: prefill, decode steps, the cache's
 * way to the host.
 *
 *     bench_cuda [-d DEVICE] [-r ROUNDS] [-j FILE] [-w WHAT] [MODEL...]
 *
 * WHAT: p, e, d, c for prefill, prefill with export, decode, copies; default all of them.
 *
 * At the level of device_submit: a step is tokens in, logits out, host's clock around it, so launch
 * and the logits' way to the host are in. Floors as in docs/results: the larger of FLOPs over the
 * matrix rate and weights once over the copy rate; a decode step's weights and KV over the copy
 * rate. Medians. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "device/device_priv.h"
#include "engine/engine.h"
#include "kv/kv.h"
#include "model/model.h"

enum { MAX_ROUNDS = 101, LANES = 4, LONGEST = 8192, STEPS = 40 };

struct bench {
    const char *device_name, *what;
    unsigned rounds;
    FILE *json;
    struct device_ceilings top;
    /* the model under test */
    const char *name;
    const struct model_config *config;
    struct device *device;
    struct device_program *program;
    struct kv_pool *pool;
    float *logits;
};

static void die(const char *what, const struct baton_error *e)
{
    fprintf(stderr, "bench_cuda: %s: %s\n", what, e->text);
    exit(3);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v, unsigned n)
{
    qsort(v, n, sizeof *v, by_value);
    return v[n / 2];
}

static void put(struct bench *b, const char *what, unsigned lanes, unsigned tokens, double ms,
                double floor_ms, double amount, double ceiling)
{
    printf("%-22s %-14s B%u %5u  %9.3f ms  floor %8.3f ms  %5.2f x  %5.1f %% of the ceiling\n",
           b->name, what, lanes, tokens, ms, floor_ms, ms / floor_ms,
           100 * amount / (ms / 1e3) / ceiling);
    fflush(stdout);
    if (b->json)
        fprintf(b->json,
                "{\"model\":\"%s\",\"what\":\"%s\",\"lanes\":%u,\"tokens\":%u,\"ms\":%.4f,"
                "\"floor_ms\":%.4f,\"of_ceiling\":%.4f}\n",
                b->name, what, lanes, tokens, ms, floor_ms, amount / (ms / 1e3) / ceiling);
}

/* ---- batches ------------------------------------------------------------------------------ */

static void count_layer(void *ctx, uint32_t layer)
{
    (void)layer;
    ++*(unsigned *)ctx;
}

/* n random tokens behind what the sequence holds; seconds. */
static double prefill(struct bench *b, struct kv_seq *s, uint32_t n, unsigned *exported)
{
    struct baton_error e;
    int32_t *ids = malloc(n * sizeof *ids);
    uint32_t last = n - 1;
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)((uint64_t)random() % b->config->vocab);
    if (kv_seq_reserve(s, n, &e))
        die("pages", &e);
    struct baton_span span = {.n_rows = n, .position = kv_seq_length(s), .kv = kv_seq_views(s)};
    struct baton_batch batch = {.ids = ids,
                                .n_rows = n,
                                .spans = &span,
                                .n_spans = 1,
                                .logit_rows = &last,
                                .n_logits = 1,
                                .logits = b->logits,
                                .layer_done = exported ? count_layer : NULL,
                                .ctx = exported};
    uint64_t start = base_now_ns(), id;
    if (device_submit(b->program, &batch, &id, &e) || device_wait(b->program, id, UINT64_MAX, &e))
        die("prefill", &e);
    uint64_t end = base_now_ns();
    kv_seq_advance(s, n);
    free(ids);
    return (double)(end - start) / 1e9;
}

static double step(struct bench *b, struct kv_seq **s, unsigned lanes)
{
    struct baton_error e;
    struct baton_span spans[LANES];
    int32_t ids[LANES];
    uint32_t rows[LANES];
    for (unsigned i = 0; i < lanes; i++) {
        if (kv_seq_reserve(s[i], 1, &e))
            die("pages", &e);
        ids[i] = (int32_t)((uint64_t)random() % b->config->vocab);
        rows[i] = i;
        spans[i] = (struct baton_span){.row = i,
                                       .n_rows = 1,
                                       .position = kv_seq_length(s[i]),
                                       .lane = i,
                                       .kv = kv_seq_views(s[i])};
    }
    struct baton_batch batch = {.ids = ids,
                                .n_rows = lanes,
                                .spans = spans,
                                .n_spans = lanes,
                                .logit_rows = rows,
                                .n_logits = lanes,
                                .logits = b->logits};
    uint64_t start = base_now_ns(), id;
    if (device_submit(b->program, &batch, &id, &e) || device_wait(b->program, id, UINT64_MAX, &e))
        die("decode", &e);
    uint64_t end = base_now_ns();
    for (unsigned i = 0; i < lanes; i++)
        kv_seq_advance(s[i], 1);
    return (double)(end - start) / 1e9;
}

static struct kv_seq *open_seq(struct bench *b)
{
    struct baton_error e;
    struct kv_seq *s;
    if (kv_seq_open(b->pool, &s, &e))
        die("sequence", &e);
    return s;
}

/* ---- measurements ------------------------------------------------------------------------- */

static double weight_bytes(const struct bench *b)
{
    return model_decode_bytes(b->config, 0, 2, 2);
}

/* The last prefill's copies by the device's timestamps: what share of their time lies before the
 * end of computing, and by `exposed` the milliseconds behind it. */
static double hidden_share(struct bench *b, double *exposed)
{
    static struct device_layer_time t[KV_MAX_LAYERS];
    uint64_t end = 0;
    double all = 0, behind = 0;
    uint32_t n = device_layer_times(b->program, t, KV_MAX_LAYERS, &end);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t from = t[i].copy_ns > end ? t[i].copy_ns : end;
        all += (double)(t[i].copied_ns - t[i].copy_ns);
        behind += t[i].copied_ns > from ? (double)(t[i].copied_ns - from) : 0;
    }
    *exposed = behind / 1e6;
    return all > 0 ? 1 - behind / all : 0;
}

static void put_hidden(struct bench *b, uint32_t n, double share, double exposed)
{
    printf("%-22s %-14s B1 %5u  %9.3f ms  behind the end of computing, %5.1f %% of the copies "
           "hidden\n",
           b->name, "export exposed", n, exposed, 100 * share);
    if (b->json)
        fprintf(b->json,
                "{\"model\":\"%s\",\"what\":\"export exposed\",\"tokens\":%u,\"ms\":%.4f,"
                "\"hidden\":%.4f}\n",
                b->name, n, exposed, share);
}

static void time_prefill(struct bench *b, uint32_t n, bool exports)
{
    double t[MAX_ROUNDS], share[MAX_ROUNDS], exposed[MAX_ROUNDS];
    double flops = model_prefill_flops(b->config, n);
    double by_flops = 1e3 * flops / b->top.matrix_flops_s;
    double by_bytes = 1e3 * weight_bytes(b) / b->top.copy_bytes_s;
    unsigned layers = 0;
    for (unsigned i = 0; i < b->rounds + 2; i++) {
        struct kv_seq *s = open_seq(b);
        double seconds = prefill(b, s, n, exports ? &layers : NULL);
        if (i >= 2)
            t[i - 2] = seconds;
        if (i >= 2 && exports)
            share[i - 2] = hidden_share(b, &exposed[i - 2]);
        kv_seq_close(s);
    }
    if (exports)
        put_hidden(b, n, median(share, b->rounds), median(exposed, b->rounds));
    put(b, exports ? "prefill+export" : "prefill", 1, n, 1e3 * median(t, b->rounds),
        by_flops > by_bytes ? by_flops : by_bytes, flops, b->top.matrix_flops_s);
}

static void time_decode(struct bench *b, unsigned lanes, uint32_t context)
{
    double t[STEPS];
    struct kv_seq *s[LANES];
    for (unsigned i = 0; i < lanes; i++) {
        s[i] = open_seq(b);
        prefill(b, s[i], context, NULL);
    }
    for (int i = -4; i < STEPS; i++) {
        double seconds = step(b, s, lanes);
        if (i >= 0)
            t[i] = seconds;
    }
    for (unsigned i = 0; i < lanes; i++)
        kv_seq_close(s[i]);
    double kv = model_decode_bytes(b->config, context + STEPS / 2, 2, 2) - weight_bytes(b);
    double bytes = weight_bytes(b) + lanes * kv;
    put(b, "decode", lanes, context, 1e3 * median(t, STEPS), 1e3 * bytes / b->top.copy_bytes_s,
        bytes, b->top.copy_bytes_s);
}

/* The whole cache of n tokens to the host and back. */
static void time_copies(struct bench *b, uint32_t n)
{
    struct baton_error e;
    double out[MAX_ROUNDS], in[MAX_ROUNDS];
    struct kv_seq *s = open_seq(b);
    const struct kv_geometry *g = kv_pool_geometry(b->pool);
    uint32_t first[KV_MAX_LAYERS];
    double bytes = 0;
    for (uint32_t l = 0; l < g->n_layers; l++) {
        first[l] = kv_retained_first(g, l, n);
        bytes += 2.0 * kv_piece_bytes(g->dtype, g->kv_heads, g->head_dim, n - first[l]);
    }
    prefill(b, s, n, NULL);
    for (unsigned i = 0; i < b->rounds; i++)
        for (int back = 0; back < 2; back++) {
            uint64_t start = base_now_ns();
            const struct baton_kv_view *v = kv_seq_views(s);
            if (back ? device_kv_write(b->device, 0, v, g->n_layers, first, n, &e)
                     : device_kv_read(b->device, 0, v, g->n_layers, first, n, &e))
                die("copy", &e);
            (back ? in : out)[i] = (double)(base_now_ns() - start) / 1e9;
        }
    put(b, "kv to host", 1, n, 1e3 * median(out, b->rounds), 1e3 * bytes / b->top.to_host_bytes_s,
        bytes, b->top.to_host_bytes_s);
    put(b, "kv to device", 1, n, 1e3 * median(in, b->rounds),
        1e3 * bytes / b->top.to_device_bytes_s, bytes, b->top.to_device_bytes_s);
    kv_seq_close(s);
}

static void measure(struct bench *b)
{
    static const uint32_t lengths[] = {128, 2048, 8192}, contexts[] = {512, 8192};
    for (int i = 0; i < 3 && strchr(b->what, 'p'); i++)
        time_prefill(b, lengths[i], false);
    for (int i = 0; i < 3 && strchr(b->what, 'e'); i++)
        time_prefill(b, lengths[i], true);
    for (unsigned lanes = 1; lanes <= LANES && strchr(b->what, 'd'); lanes += LANES - 1)
        for (int i = 0; i < 2; i++)
            time_decode(b, lanes, contexts[i]);
    for (uint32_t n = 2048; n <= 8192 && strchr(b->what, 'c'); n *= 4)
        time_copies(b, n);
}

static void run_model(struct bench *b, const char *path)
{
    struct baton_error e = {0};
    struct model *m;
    struct model_bound *bound;
    struct kv_geometry g;
    uint64_t start = base_now_ns();
    b->name = path;
    if (model_open(path, &m, &e) || device_open(b->device_name, &b->device, &e) ||
        device_start(b->device, 0, &e) || model_bind(m, b->device, NULL, NULL, &bound, &e) ||
        device_program_open(b->device, model_graph(bound), &b->program, &e))
        die(path, &e);
    b->config = model_config_of(m);
    engine_geometry(b->config, BATON_BF16, &g);
    if (kv_pool_open(&b->pool, &g, LANES * (LONGEST + 128), LANES, LONGEST, &e) ||
        device_kv_open(b->device,
                       &(struct device_kv_pool){kv_pool_memory(b->pool),
                                                (size_t)kv_pool_bytes(b->pool), LONGEST + 128,
                                                LANES},
                       &e))
        die("KV pool", &e);
    b->logits = malloc((size_t)LANES * b->config->vocab * sizeof(float));
    device_pin(b->device, b->logits, (size_t)LANES * b->config->vocab * sizeof(float));
    printf("%s: %.2f GB of weights, ready in %.1f s\n", path, weight_bytes(b) / 1e9,
           (double)(base_now_ns() - start) / 1e9);
    measure(b);
    device_unpin(b->device, b->logits);
    free(b->logits);
    device_program_close(b->program);
    device_kv_close(b->device);
    kv_pool_close(b->pool);
    model_unbind(bound);
    device_close(b->device);
    model_close(m);
}

int main(int argc, char **argv)
{
    static char *defaults[] = {"shape:qwen3-0.6b", "shape:gemma-3-1b", "shape:qwen3-4b",
                               "shape:llama-3.1-8b"};
    struct bench b = {.device_name = "cuda", .what = "pedc", .rounds = 7};
    struct baton_error e = {0};
    char why[128] = "";
    for (int opt; (opt = getopt(argc, argv, "d:r:j:w:")) != -1;) {
        if (opt == 'd')
            b.device_name = optarg;
        else if (opt == 'r')
            b.rounds = (unsigned)strtoul(optarg, NULL, 10);
        else if (opt == 'w')
            b.what = optarg;
        else if (opt == 'j')
            b.json = fopen(optarg, "w");
        else
            return 2;
    }
    if (b.rounds == 0 || b.rounds > MAX_ROUNDS)
        b.rounds = 7;
    const struct device_library *l = device_cuda_library(why);
    if (!l) {
        fprintf(stderr, "bench_cuda: %s\n", why);
        return 3;
    }
    if (l->ceilings(0, &b.top, &e))
        die("ceilings", &e);
    printf("ceilings: copy %.0f GB/s, bf16 product %.0f TFLOP/s, to device %.1f GB/s, to host %.1f "
           "GB/s\n",
           b.top.copy_bytes_s / 1e9, b.top.matrix_flops_s / 1e12, b.top.to_device_bytes_s / 1e9,
           b.top.to_host_bytes_s / 1e9);
    if (b.json)
        fprintf(b.json,
                "{\"copy_bytes_s\":%.0f,\"matrix_flops_s\":%.0f,\"to_device_bytes_s\":%.0f,"
                "\"to_host_bytes_s\":%.0f}\n",
                b.top.copy_bytes_s, b.top.matrix_flops_s, b.top.to_device_bytes_s,
                b.top.to_host_bytes_s);
    bool given = optind < argc;
    for (int i = 0; i < (given ? argc - optind : 4); i++)
        run_model(&b, given ? argv[optind + i] : defaults[i]);
    if (b.json)
        fclose(b.json);
    return 0;
}
