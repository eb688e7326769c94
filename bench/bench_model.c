/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens a second of whole models through the public API, beside the floors of the same run.
 *
 *     bench_model [-t THREADS] [-d DEVICE] [-p PROMPT] [-c CONTEXT] [-n NEW] [-r ROUNDS] MODEL...
 *
 * Random weights of real shapes by default (shape:qwen3-0.6b and shape:gemma-3-1b). Prefill counts
 * all FLOPs against the arithmetic peak of the instruction set in use; decode counts bytes (weights
 * once and the KV of the context a token) against the read bandwidth. Medians of ROUNDS; the floors
 * are measured before and after each model and the better is taken.
 */
#include <baton/baton.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench_floor.h"
#include "device/device.h"
#include "engine/engine.h"

enum { MAX_ROUNDS = 31 };

struct bench {
    unsigned threads, prompt, context, n_new, rounds;
    const char *device;
    struct base_pool *pool;
    double flops, bandwidth; /* floors */
};

static void die(const char *what, const struct baton_error *e)
{
    fprintf(stderr, "bench_model: %s: %s\n", what, e->text);
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

static void measure_floors(struct bench *b)
{
    struct baton_error e;
    bool dots = b->device && strstr(b->device, "isa=avx2") == NULL;
    double bandwidth = bench_read_bandwidth(b->pool, &e);
    double flops = dots ? bench_dot_peak(b->pool) : 0;
    if (flops == 0)
        flops = bench_fma_peak(b->pool);
    b->bandwidth = bandwidth > b->bandwidth ? bandwidth : b->bandwidth;
    b->flops = flops > b->flops ? flops : b->flops;
}

/* One request of `n_prompt` random tokens and `n_new` generated ones. */
static struct baton_stats generate(struct bench *b, struct baton_model *m,
                                   struct baton_engine *engine, unsigned n_prompt, unsigned n_new)
{
    struct baton_error e = {0};
    struct baton_request *request;
    struct baton_token token;
    struct baton_stats s = {.struct_size = sizeof s};
    int32_t *ids = malloc(n_prompt * sizeof *ids);
    for (unsigned i = 0; i < n_prompt; i++)
        ids[i] = (int32_t)((uint64_t)random() % baton_model_vocab(m));
    struct baton_request_options ro = {.struct_size = sizeof ro,
                                       .ids = ids,
                                       .n_ids = n_prompt,
                                       .max_tokens = n_new,
                                       .ignore_eos = true};
    if (baton_submit(engine, &ro, &request, &e))
        die("submit", &e);
    int rc;
    while ((rc = baton_next(request, &token, -1, &e)) == 1)
        continue;
    if (rc)
        die("next", &e);
    baton_request_stats(request, &s);
    baton_request_close(request);
    free(ids);
    (void)b;
    return s;
}

static void report(const struct bench *b, const struct model_config *c, unsigned prompt,
                   unsigned n_new, unsigned context, double prefill, double decode)
{
    double flops = model_prefill_flops(c, prompt);
    double bytes = model_decode_bytes(c, context + n_new / 2, 2, 2);
    double need = flops / prompt * prefill, moved = bytes * decode;
    printf("  prefill %5u   %8.1f tokens/s  %7.1f GFLOP/s  %5.1f %% of %7.1f GFLOP/s\n", prompt,
           prefill, need / 1e9, 100 * need / b->flops, b->flops / 1e9);
    printf("  decode @%-5u  %8.1f tokens/s  %7.1f GB/s     %5.1f %% of %7.1f GB/s\n", context,
           decode, moved / 1e9, 100 * moved / b->bandwidth, b->bandwidth / 1e9);
    fflush(stdout);
}

static void run_model(struct bench *b, const char *path)
{
    struct baton_error e = {0};
    struct baton_model *m;
    struct baton_engine *engine;
    double prefill[MAX_ROUNDS], decode[MAX_ROUNDS];
    struct baton_model_options mo = {.struct_size = sizeof mo, .path = path};
    struct baton_engine_options eo = {.struct_size = sizeof eo,
                                      .device = b->device,
                                      .lanes = 1,
                                      .threads = b->threads,
                                      .peer_fd = -1};
    unsigned longest = b->prompt > b->context ? b->prompt : b->context;
    eo.ctx = longest + b->n_new + 1;
    uint64_t start = base_now_ns();
    if (baton_model_open(&mo, &m, &e) || baton_model_prepare(m, b->device, &e))
        die(path, &e);
    printf("%s on %s, %u threads (made and packed in %.1f s)\n", path, b->device, b->threads,
           (double)(base_now_ns() - start) / 1e9);
    measure_floors(b);
    if (baton_engine_open(m, &eo, &engine, &e))
        die("engine", &e);
    generate(b, m, engine, 64, 4); /* warm up */
    for (unsigned i = 0; i < b->rounds; i++) {
        struct baton_stats s = generate(b, m, engine, b->prompt, 1);
        prefill[i] = b->prompt / ((double)s.prefill_ns / 1e9);
        s = generate(b, m, engine, b->context ? b->context : 1, b->n_new);
        decode[i] = (b->n_new - 1) / ((double)s.decode_ns / 1e9);
    }
    measure_floors(b);
    report(b, model_config_of(engine_model(m)), b->prompt, b->n_new, b->context,
           median(prefill, b->rounds), median(decode, b->rounds));
    baton_engine_close(engine);
    baton_model_close(m);
}

int main(int argc, char **argv)
{
    struct bench b = {.prompt = 512, .context = 0, .n_new = 64, .rounds = 3, .device = "cpu"};
    struct baton_error e;
    cpu_set_t set;
    sched_getaffinity(0, sizeof set, &set);
    b.threads = (unsigned)CPU_COUNT(&set);
    for (int opt; (opt = getopt(argc, argv, "t:d:p:c:n:r:")) != -1;) {
        unsigned v = optarg ? (unsigned)strtoul(optarg, NULL, 10) : 0;
        switch (opt) {
        case 't':
            b.threads = v;
            break;
        case 'd':
            b.device = optarg;
            break;
        case 'p':
            b.prompt = v;
            break;
        case 'c':
            b.context = v;
            break;
        case 'n':
            b.n_new = v;
            break;
        case 'r':
            b.rounds = v < MAX_ROUNDS ? v : MAX_ROUNDS;
            break;
        default:
            fprintf(stderr, "usage: bench_model [-t THREADS] [-d DEVICE] [-p PROMPT] [-c CONTEXT] "
                            "[-n NEW] [-r ROUNDS] MODEL...\n");
            return 2;
        }
    }
    if (!b.threads || !b.prompt || b.n_new < 2 || !b.rounds ||
        base_pool_open(&b.pool, b.threads, &e))
        return 2;
    static char *defaults[] = {"shape:qwen3-0.6b", "shape:gemma-3-1b"};
    bool given = optind < argc;
    for (int i = 0; i < (given ? argc - optind : 2); i++)
        run_model(&b, given ? argv[optind + i] : defaults[i]);
    base_pool_close(b.pool);
    return 0;
}
