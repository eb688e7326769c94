/* SPDX-License-Identifier: Apache-2.0 */
/* What a handoff costs a byte, on one thread: pages to wire form, wire form to pages, digests.
 *
 *     bench_kv [-q]
 *
 * The cache of qwen3-0.6b after 2048 tokens (28 layers, 8 heads of 128, bf16). The floor is memcpy
 * of the same bytes in the same run. Each number is the best of several rounds, in GB/s of cache;
 * the median stands beside it. Then copy and digest in one pass, as a handoff does it, beside the
 * copy alone, slot by slot in turn: the ratio of the times. -q: two rounds instead of seven.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/base.h"
#include "kv/kv.h"

enum { LAYERS = 28, HEADS = 8, DIM = 128, TOKENS = 2048, MAX_ROUNDS = 7 };

struct bench {
    const struct baton_kv_view *pages; /* [LAYERS] */
    uint8_t *wire, *other;             /* dense slots, f32 large */
    size_t slot;                       /* bytes, bf16 */
};

static void check(int rc, const struct baton_error *e)
{
    if (rc) {
        fprintf(stderr, "bench_kv: %s\n", e->text);
        exit(3);
    }
}

enum what { FLOOR, EXPORT, IMPORT, WIDEN, DIGEST, EXPORT_DIGEST, N_WHAT };
static const char *const names[N_WHAT] = {"memcpy (floor)",  "pages -> wire",
                                          "wire -> pages",   "pages -> wire in f32",
                                          "digest of pages", "pages -> wire, digest"};

static void digest(const struct baton_kv_view *v, uint32_t layer, enum kv_which which)
{
    struct baton_error e;
    struct kv_digest *d;
    uint8_t out[32];
    check(kv_digest_open(&d, layer, which, BATON_BF16, HEADS, DIM, 0, TOKENS, &e), &e);
    check(kv_digest_update(d, v, 0, TOKENS, &e), &e);
    check(kv_digest_final(d, out, &e), &e);
    kv_digest_close(d);
}

static void one_slot(struct bench *b, enum what what, uint32_t i)
{
    struct baton_error e;
    struct baton_kv_layout l;
    enum kv_which which = (enum kv_which)(i % 2);
    uint8_t *at = b->wire + i * b->slot;
    const struct baton_kv_view *page = &b->pages[i / 2];
    struct baton_kv_view dense = kv_dense_view(&l, BATON_BF16, HEADS, DIM, at, at, 0, TOKENS);
    if (what == FLOOR)
        memcpy(b->wire + (i + LAYERS) % (2 * LAYERS) * b->slot, at, b->slot);
    else if (what == IMPORT)
        check(kv_copy(page, &dense, which, 0, TOKENS, &e), &e);
    if (what == WIDEN)
        dense = kv_dense_view(&l, BATON_F32, HEADS, DIM, b->other, b->other, 0, TOKENS);
    if (what == EXPORT || what == EXPORT_DIGEST || what == WIDEN)
        check(kv_copy(&dense, page, which, 0, TOKENS, &e), &e);
    if (what == DIGEST || what == EXPORT_DIGEST)
        digest(page, i / 2, which);
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(struct bench *b, enum what what, int rounds)
{
    double gbs[MAX_ROUNDS];
    for (int r = 0; r < rounds; r++) {
        uint64_t begin = base_now_ns();
        for (uint32_t i = 0; i < 2 * LAYERS; i++)
            one_slot(b, what, i);
        gbs[r] = 2 * LAYERS * (double)b->slot / (double)(base_now_ns() - begin);
    }
    qsort(gbs, (size_t)rounds, sizeof *gbs, by_size);
    printf("%-22s %8.2f %8.2f\n", names[what], gbs[rounds - 1], gbs[rounds / 2]);
}

/* Export: digest of the pages. Import: digest of what arrives. */
static void one_pass(struct bench *b, bool import, uint32_t i)
{
    struct baton_error e;
    struct baton_kv_layout l;
    struct kv_digest *d;
    uint8_t out[32], *at = b->wire + i * b->slot;
    enum kv_which which = (enum kv_which)(i % 2);
    const struct baton_kv_view *page = &b->pages[i / 2];
    struct baton_kv_view dense = kv_dense_view(&l, BATON_BF16, HEADS, DIM, at, at, 0, TOKENS);
    check(kv_digest_open(&d, i / 2, which, BATON_BF16, HEADS, DIM, 0, TOKENS, &e), &e);
    check(import ? kv_digest_copy(d, KV_DIGEST_COPY, page, &dense, 0, TOKENS, &e)
                 : kv_digest_copy(d, KV_DIGEST_SOURCE, &dense, page, 0, TOKENS, &e),
          &e);
    check(kv_digest_final(d, out, &e), &e);
    kv_digest_close(d);
}

/* Of this thread: a ratio of two is worth something beside other work too. */
static uint64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void measure_one_pass(struct bench *b, bool import, int rounds)
{
    double ratio[MAX_ROUNDS];
    for (int r = 0; r < rounds; r++) {
        uint64_t copy = 0, both = 0;
        for (uint32_t i = 0; i < 2 * LAYERS; i++) {
            uint64_t t0 = cpu_ns();
            one_slot(b, import ? IMPORT : EXPORT, i);
            uint64_t t1 = cpu_ns();
            one_pass(b, import, i);
            copy += t1 - t0;
            both += cpu_ns() - t1;
        }
        ratio[r] = (double)both / (double)copy;
    }
    qsort(ratio, (size_t)rounds, sizeof *ratio, by_size);
    printf("%s, one pass with digest: %.2f times the copy alone (median; best %.2f)\n",
           import ? names[IMPORT] : names[EXPORT], ratio[rounds / 2], ratio[0]);
}

int main(int argc, char **argv)
{
    struct baton_error e;
    struct kv_geometry g = {
        .n_layers = LAYERS, .kv_heads = HEADS, .head_dim = DIM, .dtype = BATON_BF16};
    struct kv_pool *pool;
    struct kv_seq *seq;
    struct bench b;
    int rounds = argc > 1 && strcmp(argv[1], "-q") == 0 ? 2 : MAX_ROUNDS;
    check(kv_pool_open(&pool, &g, TOKENS, 1, TOKENS, &e), &e);
    check(kv_seq_open(pool, &seq, &e), &e);
    check(kv_seq_reserve(seq, TOKENS, &e), &e);
    kv_seq_advance(seq, TOKENS);
    b.pages = kv_seq_views(seq);
    b.slot = kv_piece_bytes(BATON_BF16, HEADS, DIM, TOKENS);
    b.wire = base_map_alloc(2 * LAYERS * b.slot, false, &e);
    b.other = base_map_alloc(2 * b.slot, false, &e);
    check(b.wire && b.other ? 0 : BATON_ERR_NOMEM, &e);
    memset(b.wire, 0x3C, 2 * LAYERS * b.slot);
    memset(b.other, 0, 2 * b.slot);
    for (uint32_t i = 0; i < 2 * LAYERS; i++)
        one_slot(&b, IMPORT, i);
    printf("%-22s %8s %8s  GB/s\n", "", "best", "median");
    for (int what = 0; what < N_WHAT; what++)
        measure(&b, (enum what)what, rounds);
    measure_one_pass(&b, false, rounds);
    measure_one_pass(&b, true, rounds);
    base_map_free(b.other, 2 * b.slot);
    base_map_free(b.wire, 2 * LAYERS * b.slot);
    kv_seq_close(seq);
    kv_pool_close(pool);
    return 0;
}
