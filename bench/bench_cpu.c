/* SPDX-License-Identifier: Apache-2.0 */
/* How fast the cpu device's kernels are, beside what the machine can do at all, in the same run.
 *
 * bench_cpu [-t THREADS] [-i ISA] [-q]
 *
 * Floors: bytes read per second from a buffer too large for any cache; multiply-adds per second of
 * a loop that touches registers alone (float32 FMA, and bf16 dot products where there are any).
 * Then linear maps and attention on the shapes of qwen3-0.6b and gemma-3-1b through the verbs, so
 * packing and scheduling count. Each number is the best of several rounds, for other work on the
 * machine only ever makes it worse; the median stands beside it. -q: two rounds instead of five.
 */
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench_floor.h"
#include "device/device_priv.h"

enum { MAX_ROUNDS = 5, MAX_COPIES = 64, PAST = 2048 };

struct bench {
    unsigned n_threads, rounds;
    const char *isa;
    struct base_pool *pool; /* of the floors */
    struct device *device;
    struct device_program *program;
    double fma, bandwidth; /* floors: FLOP/s of the arithmetic in use, bytes/s */
    void (*body)(struct bench *b, const struct device_verbs *v, struct device_run *r);
    /* the case under way */
    struct device_weight *w[MAX_COPIES];
    uint32_t n_w, m, k, n;
    struct device_attn attn;
    double seconds; /* of the timed verbs */
};

static void die(const char *what, const struct baton_error *e)
{
    fprintf(stderr, "bench_cpu: %s: %s\n", what, e->text);
    exit(3);
}

/* ---- the device --------------------------------------------------------------------------- */

static int forward(const void *ctx, struct device_run *r, struct baton_error *e)
{
    struct bench *b = (struct bench *)(uintptr_t)ctx;
    b->body(b, device_run_verbs(r), r);
    return device_run_end(r, e);
}

static void open_device(struct bench *b)
{
    char name[64];
    struct baton_error e;
    struct device_graph g = {forward, b, 1, 1, 20000, 8192};
    snprintf(name, sizeof name, b->isa ? "cpu,isa=%s" : "cpu", b->isa);
    if (device_open(name, &b->device, &e) || device_start(b->device, b->n_threads, &e) ||
        device_program_open(b->device, &g, &b->program, &e))
        die(name, &e);
}

/* A cache of one layer whose pages hold small numbers. */
struct cache {
    struct baton_kv_layout layout;
    struct baton_kv_view view;
    uint16_t *memory;
    int32_t blocks[PAST / 64];
};

static void cache_open(struct cache *c, uint32_t heads, uint32_t dim)
{
    int64_t page = 64 * 2 * (int64_t)dim * heads;
    *c = (struct cache){.layout = {.version = 1,
                                   .dtype = BATON_BF16,
                                   .kind = BATON_KV_PAGED,
                                   .alignment = 64,
                                   .kv_heads = heads,
                                   .head_dim = dim,
                                   .head_dim_padded = dim,
                                   .block = 64,
                                   .stride_block = page,
                                   .stride_head = 64 * 2 * (int64_t)dim,
                                   .stride_position = 2 * (int64_t)dim,
                                   .stride_dim = 2}};
    c->memory = aligned_alloc(64, (size_t)page * 2 * (PAST / 64));
    for (size_t i = 0; i < (size_t)page * (PAST / 64); i++)
        c->memory[i] = device_f32_to_bf16((float)(i * 2654435761u % 255u) / 128.0f - 1.0f);
    for (int32_t i = 0; i < PAST / 64; i++)
        c->blocks[i] = i;
    c->view = (struct baton_kv_view){&c->layout,
                                     (uint8_t *)c->memory,
                                     (uint8_t *)c->memory + page * (PAST / 64),
                                     c->blocks,
                                     PAST / 64,
                                     0,
                                     0};
}

/* One submission of m rows at `position`, run by b->body. */
static void submit(struct bench *b, struct cache *c, uint32_t m, uint32_t position)
{
    static const int32_t ids[512];
    struct baton_error e = {0};
    struct baton_span span = {0, m, position, 0, &c->view};
    struct baton_batch batch = {.ids = ids, .n_rows = m, .spans = &span, .n_spans = 1};
    c->view.end = position;
    if (device_submit(b->program, &batch, NULL, &e))
        die("submit", &e);
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Best and median seconds of the body. */
static void measure(struct bench *b, struct cache *c, uint32_t m, uint32_t position, double *best,
                    double *median)
{
    double t[MAX_ROUNDS];
    submit(b, c, m, position); /* memory is touched, clocks are up */
    for (unsigned i = 0; i < b->rounds; i++) {
        submit(b, c, m, position);
        t[i] = b->seconds;
    }
    qsort(t, b->rounds, sizeof *t, by_size);
    *best = t[0];
    *median = t[b->rounds / 2];
}

/* ---- linear maps -------------------------------------------------------------------------- */

static void fill(struct device_array a)
{
    for (size_t i = 0; i < (size_t)a.rows * a.cols; i++)
        ((float *)a.data)[i] = (float)(i * 2654435761u % 1021u) / 512.0f - 1.0f;
}

static void linear_body(struct bench *b, const struct device_verbs *v, struct device_run *r)
{
    struct device_array x = v->array(r, b->k), y = v->array(r, b->n);
    fill(x);
    uint64_t start = base_now_ns();
    for (uint32_t i = 0; i < b->n_w; i++)
        v->linear(r, y, x, b->w[i], NULL);
    b->seconds = (double)(base_now_ns() - start) * 1e-9;
}

/* As many copies of [n, k] as make about `bytes`. */
static void bind(struct bench *b, uint32_t n, uint32_t k, double bytes)
{
    uint16_t *source = malloc((size_t)n * k * sizeof *source);
    struct baton_tensor t = {"bench", BATON_BF16, 2, {n, k}, {2 * (int64_t)k, 2}, source};
    struct baton_error e;
    double copies = ceil(bytes / (2.0 * n * k));
    b->n = n;
    b->k = k;
    b->n_w = copies < MAX_COPIES ? (uint32_t)copies : MAX_COPIES;
    for (size_t i = 0; i < (size_t)n * k; i++)
        source[i] = device_f32_to_bf16((float)(i * 2654435761u % 2039u) / 1024.0f - 1.0f);
    for (uint32_t i = 0; i < b->n_w; i++)
        if (device_weight_bind(b->device, &t, DEVICE_MATRIX, &b->w[i], &e))
            die("weights", &e);
    free(source);
}

static void unbind(struct bench *b)
{
    for (uint32_t i = 0; i < b->n_w; i++)
        device_weight_close(b->device, b->w[i]);
    b->n_w = 0;
}

struct shape {
    const char *model, *name;
    uint32_t n, k;
};

static void bench_linear(struct bench *b, const struct shape *s, struct cache *c)
{
    static const uint32_t rows[] = {1, 4, 8, 64, 512};
    b->body = linear_body;
    bind(b, s->n, s->k, 96e6);
    for (unsigned i = 0; i < sizeof rows / sizeof *rows; i++) {
        double best, median, copies = b->n_w, m = rows[i];
        uint32_t all = b->n_w;
        if (rows[i] >= 64)
            b->n_w = copies = all < 2 ? all : 2;
        measure(b, c, rows[i], 0, &best, &median);
        double flops = 2.0 * m * s->n * s->k * copies, bytes = 2.0 * s->n * s->k * copies;
        printf("%-11s %-12s M=%-4u %5u x %-5u %7.1f GFLOP/s %3.0f%%   %5.1f GB/s %3.0f%%   "
               "(median %.1f)\n",
               s->model, s->name, rows[i], s->n, s->k, flops / best * 1e-9,
               100 * flops / best / b->fma, bytes / best * 1e-9, 100 * bytes / best / b->bandwidth,
               flops / median * 1e-9);
        fflush(stdout);
        b->n_w = all;
    }
    unbind(b);
}

/* ---- attention ---------------------------------------------------------------------------- */

static void attend_body(struct bench *b, const struct device_verbs *v, struct device_run *r)
{
    uint32_t cols = b->attn.q_heads * b->attn.head_dim;
    struct device_array q = v->array(r, cols), o = v->array(r, cols);
    fill(q);
    uint64_t start = base_now_ns();
    for (int i = 0; i < 4; i++)
        v->attend(r, o, q, &b->attn);
    b->seconds = (double)(base_now_ns() - start) * 1e-9 / 4;
}

/* m queries up to position `end`; counted is what the window lets them see. */
static void bench_attend(struct bench *b, const char *model, struct device_attn a, uint32_t m,
                         uint32_t end)
{
    struct cache c;
    double best, median, seen = 0;
    cache_open(&c, a.kv_heads, a.head_dim);
    b->body = attend_body;
    b->attn = a;
    for (uint32_t p = end - m; p < end; p++)
        seen += a.window && p + 1 > a.window ? a.window : p + 1;
    measure(b, &c, m, end - m, &best, &median);
    double flops = 4.0 * seen * a.q_heads * a.head_dim;
    double last = a.window && end > a.window ? a.window : end;
    double bytes = 4.0 * last * a.kv_heads * a.head_dim;
    printf("%-11s attention    M=%-4u to %-5u w %-4u %7.1f GFLOP/s %3.0f%%   %5.1f GB/s %3.0f%%   "
           "%.3f ms (median %.3f)\n",
           model, m, end, a.window, flops / best * 1e-9, 100 * flops / best / b->fma,
           bytes / best * 1e-9, 100 * bytes / best / b->bandwidth, best * 1e3, median * 1e3);
    fflush(stdout);
    free(c.memory);
}

/* ---- all ---------------------------------------------------------------------------------- */

static void floors(struct bench *b)
{
    struct baton_error e;
    if (base_pool_open(&b->pool, b->n_threads, &e))
        die("threads", &e);
    b->bandwidth = bench_read_bandwidth(b->pool, &e);
    double f32 = bench_fma_peak(b->pool), bf16 = bench_dot_peak(b->pool);
    if (b->bandwidth == 0)
        die("bandwidth", &e);
    const char *numerics = device_caps(b->device)->numerics;
    b->fma = strstr(numerics, "bf16") ? bf16 : f32;
    printf("# %s\n# %u threads: reads %.1f GB/s, float32 FMA %.1f GFLOP/s, bf16 dot %.1f GFLOP/s\n",
           device_caps(b->device)->detail, b->n_threads, b->bandwidth * 1e-9, f32 * 1e-9,
           bf16 * 1e-9);
    base_pool_close(b->pool);
}

static void run(struct bench *b)
{
    static const struct shape shapes[] = {
        {"qwen3-0.6b", "q", 2048, 1024},        {"qwen3-0.6b", "k, v", 1024, 1024},
        {"qwen3-0.6b", "o", 1024, 2048},        {"qwen3-0.6b", "gate, up", 3072, 1024},
        {"qwen3-0.6b", "down", 1024, 3072},     {"gemma-3-1b", "q", 1024, 1152},
        {"gemma-3-1b", "k, v", 256, 1152},      {"gemma-3-1b", "o", 1152, 1024},
        {"gemma-3-1b", "gate, up", 6912, 1152}, {"gemma-3-1b", "down", 1152, 6912},
    };
    struct device_attn qwen = {0, 16, 8, 128, 0.088f, 0}, gemma = {0, 4, 1, 256, 0.0625f, 0};
    struct cache c;
    cache_open(&c, 1, 8);
    for (unsigned i = 0; i < sizeof shapes / sizeof *shapes; i++)
        bench_linear(b, &shapes[i], &c);
    free(c.memory);
    for (uint32_t end = 512; end <= PAST; end *= 4) {
        bench_attend(b, "qwen3-0.6b", qwen, 512, end);
        bench_attend(b, "qwen3-0.6b", qwen, 1, end);
        bench_attend(b, "gemma-3-1b", gemma, 512, end);
        bench_attend(b, "gemma-3-1b", gemma, 1, end);
    }
    gemma.window = 512;
    bench_attend(b, "gemma-3-1b", gemma, 512, PAST);
    bench_attend(b, "gemma-3-1b", gemma, 1, PAST);
}

int main(int argc, char **argv)
{
    struct bench b = {.rounds = MAX_ROUNDS};
    cpu_set_t set;
    int c;
    b.n_threads = sched_getaffinity(0, sizeof set, &set) == 0 ? (unsigned)CPU_COUNT(&set) : 1;
    while ((c = getopt(argc, argv, "t:i:q")) != -1) {
        if (c == 't')
            b.n_threads = (unsigned)atoi(optarg);
        else if (c == 'i')
            b.isa = optarg;
        else if (c == 'q')
            b.rounds = 2;
        else
            return 2;
    }
    open_device(&b);
    floors(&b);
    run(&b);
    device_program_close(b.program);
    device_close(b.device);
    return 0;
}
