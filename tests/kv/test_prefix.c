/* SPDX-License-Identifier: Apache-2.0 */
/* The prefix index: what a hit holds is what its ids say, how long it is, who gives way to whom,
 * and that nothing is left. */
#include "kv/kv_priv.h"
#include "tests/test.h"

#define PAGE KV_BLOCK
#define MAX_IDS 2048u

static uint64_t seed;
static const uint8_t origin[32] = {1}, other_origin[32] = {2};

static struct kv_geometry geometry(uint32_t window)
{
    struct kv_geometry g = {
        .n_layers = 3, .kv_heads = 1, .head_dim = 2, .dtype = BATON_F32, .window = window};
    g.local[0] = g.local[2] = window > 0;
    return g;
}

static struct kv_pool *pool_open(const struct kv_geometry *g, uint32_t n_tokens, uint32_t n_seqs,
                                 uint32_t chunk, struct kv_prefix **x)
{
    struct baton_error e;
    struct kv_pool *p;
    test_ok(kv_pool_open(&p, g, n_tokens, n_seqs, chunk, &e), &e);
    test_ok(kv_prefix_open(p, x, &e), &e);
    return p;
}

/* Nothing is in use, and without the index nothing is out. */
static void pool_close(struct kv_pool *p, struct kv_prefix *x)
{
    assert_int_equal(kv_pool_used(p), 0);
    kv_prefix_close(x);
    assert_int_equal(kv_pool_idle(p), 0);
    for (int g = 0; g < KV_N_GROUPS; g++)
        assert_int_equal(p->group[g].n_free, p->group[g].n_blocks);
    kv_pool_close(p);
}

/* What a row holds: a number of the layer and of all ids up to its position. */
static uint64_t row_of(uint32_t layer, uint64_t before, int32_t id)
{
    uint64_t h = (before ^ (uint64_t)(uint32_t)id) * 0x9E3779B97F4A7C15ull;
    return h ^ h >> 29 ^ (uint64_t)layer << 56;
}

static uint64_t *row_at(const struct baton_kv_view *v, uint8_t *base, uint32_t p)
{
    return (uint64_t *)(base + v->blocks[p / PAGE] * v->layout->stride_block +
                        p % PAGE * v->layout->stride_position);
}

/* Write, or compare, the rows [first, n) as far as each layer retains them at length n. */
static void rows(struct kv_seq *s, const int32_t *ids, uint32_t first, uint32_t n, bool check)
{
    const struct kv_geometry *g = kv_seq_geometry(s);
    for (uint32_t l = 0; l < g->n_layers; l++) {
        const struct baton_kv_view *v = &kv_seq_views(s)[l];
        uint32_t from = check ? kv_retained_first(g, l, n) : first;
        uint64_t h = 0;
        for (uint32_t p = 0; p < n; p++) {
            h = row_of(l, h, ids[p]);
            if (p < from || p < first)
                continue;
            assert_true(p / PAGE < v->n_blocks && v->blocks[p / PAGE] >= 0);
            if (!check)
                *row_at(v, v->k, p) = *row_at(v, v->v, p) = h;
            else if (*row_at(v, v->k, p) != h || *row_at(v, v->v, p) != h)
                fail_msg("layer %u, position %u of %u: not what its ids say", l, p, n);
        }
    }
}

/* Append up to n positions in chunks, indexing each. */
static void append(struct kv_prefix *x, struct kv_seq *s, const int32_t *ids, uint32_t n,
                   uint32_t chunk)
{
    struct baton_error e;
    while (kv_seq_length(s) < n) {
        uint32_t at = kv_seq_length(s), k = n - at < chunk ? n - at : chunk;
        test_ok(kv_seq_reserve(s, k, &e), &e);
        rows(s, ids, at, at + k, false);
        kv_seq_advance(s, k);
        kv_prefix_put(x, s, origin, ids, at + k);
    }
}

static struct kv_seq *begin(struct kv_pool *p, struct kv_prefix *x, const int32_t *ids, uint32_t n,
                            uint32_t *hit)
{
    struct baton_error e;
    struct kv_seq *s;
    test_ok(kv_seq_open(p, &s, &e), &e);
    *hit = kv_prefix_take(x, s, origin, ids, n - 1, PAGE);
    assert_int_equal(kv_seq_length(s), *hit);
    assert_int_equal(*hit % PAGE, 0);
    assert_true(*hit < n);
    rows(s, ids, 0, *hit, true);
    return s;
}

static void random_ids(int32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)test_range(&seed, 0, 1);
}

/* With room for all: a hit ends at the last page border before the prompts part. */
static void lengths(void **state)
{
    static int32_t a[MAX_IDS], b[MAX_IDS];
    (void)state;
    for (int round = 0; round < 40; round++) {
        struct kv_geometry g = geometry(round % 2 ? test_range(&seed, 1, 200) : 0);
        struct kv_prefix *x;
        struct kv_pool *p = pool_open(&g, 2 * MAX_IDS, 2, MAX_IDS, &x);
        static const int near[] = {-1, 0, 1};
        uint32_t n = test_range(&seed, 2, 8) * PAGE + (uint32_t)near[test_range(&seed, 0, 2)];
        uint32_t same = test_range(&seed, 0, n / PAGE) * PAGE + (uint32_t)near[round % 3] + 1;
        uint32_t m = test_range(&seed, 1, MAX_IDS - 1), hit;
        same = same > m ? m : same > n ? n : same;
        random_ids(a, n);
        random_ids(b, m);
        memcpy(b, a, same * sizeof *a);
        if (same < m)
            b[same] = 1 - (same < n ? a[same] : 0);
        struct kv_seq *s = begin(p, x, a, n, &hit);
        assert_int_equal(hit, 0);
        append(x, s, a, n, n); /* in one go: every local page is there when it is indexed */
        if (round % 4 < 2)
            kv_seq_close(s);
        struct kv_seq *t = begin(p, x, b, m, &hit);
        assert_int_equal(hit, (same < m ? same : m - 1) / PAGE * PAGE);
        append(x, t, b, m, test_range(&seed, 1, 300));
        rows(t, b, 0, m, true);
        if (round % 4 >= 2) {
            rows(s, a, 0, n, true); /* nobody wrote into what is shared */
            kv_seq_close(s);
        }
        kv_seq_close(t);
        pool_close(p, x);
    }
}

/* Which local pages a hit needs, and that others than the local ones do not shorten it. */
static void windows(void **state)
{
    static const uint32_t sizes[] = {1, 2, 63, 64, 65, 66, 128, 129, 200};
    static int32_t ids[MAX_IDS];
    (void)state;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        struct kv_geometry g = geometry(sizes[i]);
        struct kv_prefix *x;
        uint32_t hit, n = 10 * PAGE + 1;
        struct kv_pool *p = pool_open(&g, 2 * MAX_IDS, 2, MAX_IDS, &x);
        random_ids(ids, n);
        struct kv_seq *s = begin(p, x, ids, n, &hit);
        append(x, s, ids, n, n);
        kv_seq_close(s);
        s = begin(p, x, ids, n, &hit);
        assert_int_equal(hit, 10 * PAGE);
        kv_seq_close(s);
        /* forget the local page with the first position that a query at the end sees */
        struct kv_blocks *local = &p->group[KV_LOCAL];
        uint32_t first = (10 * PAGE - sizes[i] + 1) / PAGE;
        s = begin(p, x, ids, n, &hit);
        int32_t block = first < 10 ? kv_seq_page(s, KV_LOCAL, first) : -1;
        kv_seq_close(s);
        if (block >= 0)
            kv_prefix_evict(x, local, block);
        s = begin(p, x, ids, n, &hit);
        uint32_t want = block < 0 ? 10 : 0; /* the longest whose local pages are all there */
        for (uint32_t m = 1; m <= 10 && block >= 0; m++) {
            uint32_t need = m * PAGE < sizes[i] ? 0 : (m * PAGE - sizes[i] + 1) / PAGE;
            if (need > first || m <= first)
                want = m;
        }
        assert_int_equal(hit, want * PAGE);
        kv_seq_close(s);
        pool_close(p, x);
    }
}

/* An import is held to the end of its own window, not of the hit's. */
static void imports(void **state)
{
    static int32_t ids[MAX_IDS];
    struct baton_error e;
    (void)state;
    for (int round = 0; round < 40; round++) {
        struct kv_geometry g = geometry(round % 3 ? test_range(&seed, 2, 300) : 0);
        struct kv_prefix *x;
        struct kv_pool *p = pool_open(&g, 2 * MAX_IDS, 2, 64, &x);
        uint32_t n = test_range(&seed, 1, 1000), m = test_range(&seed, 1, MAX_IDS - 1);
        struct kv_seq *s;
        random_ids(ids, MAX_IDS);
        test_ok(kv_seq_open(p, &s, &e), &e);
        test_ok(kv_seq_reserve_import(s, n, &e), &e);
        for (uint32_t l = 0; l < g.n_layers; l++) { /* as a handoff fills it */
            const struct baton_kv_view *v = &kv_seq_views(s)[l];
            uint64_t h = 0;
            for (uint32_t q = 0; q < n; q++) {
                h = row_of(l, h, ids[q]);
                if (q >= kv_retained_first(&g, l, n))
                    *row_at(v, v->k, q) = *row_at(v, v->v, q) = h;
            }
        }
        kv_prefix_put(x, s, origin, ids, n);
        kv_seq_close(s);
        test_ok(kv_seq_open(p, &s, &e), &e);
        uint32_t held = kv_prefix_take_import(x, s, origin, ids, m);
        assert_true(held < m && held % PAGE == 0);
        if (!g.window || (m >= g.window && m - g.window + 1 >= n))
            assert_int_equal(held, (n < m ? n : m - 1) / PAGE * PAGE);
        test_ok(kv_seq_reserve_import(s, m, &e), &e);
        assert_int_equal(kv_seq_length(s), m);
        for (uint32_t l = 0; l < g.n_layers; l++) {
            const struct baton_kv_view *v = &kv_seq_views(s)[l];
            assert_int_equal(v->first, kv_retained_first(&g, l, m));
            uint64_t h = 0;
            for (uint32_t q = 0; q < m; q++) {
                h = row_of(l, h, ids[q]);
                if (q < v->first)
                    continue;
                assert_true(v->blocks[q / PAGE] >= 0);
                if (q < held)
                    assert_true(*row_at(v, v->k, q) == h);
            }
        }
        kv_seq_close(s);
        pool_close(p, x);
    }
}

/* Pages of another origin, and prompts that differ early, are nobody's prefix; a grain rounds. */
static void strangers(void **state)
{
    static int32_t ids[MAX_IDS];
    struct kv_geometry g = geometry(0);
    struct kv_prefix *x;
    struct kv_seq *s;
    struct baton_error e;
    uint32_t hit;
    (void)state;
    struct kv_pool *p = pool_open(&g, MAX_IDS, 2, 64, &x);
    random_ids(ids, 600);
    s = begin(p, x, ids, 600, &hit);
    append(x, s, ids, 600, 600);
    kv_seq_close(s);
    test_ok(kv_seq_open(p, &s, &e), &e);
    assert_int_equal(kv_prefix_take(x, s, other_origin, ids, 599, PAGE), 0);
    assert_int_equal(kv_prefix_take(x, s, origin, ids, 599, 4 * PAGE), 8 * PAGE);
    kv_seq_close(s);
    test_ok(kv_seq_open(p, &s, &e), &e);
    assert_int_equal(kv_prefix_take(x, s, origin, ids, 599, 16 * PAGE), 0);
    ids[0] ^= 1;
    assert_int_equal(kv_prefix_take(x, s, origin, ids, 599, PAGE), 0);
    kv_seq_close(s);
    pool_close(p, x);
}

/* A small pool: what was used last survives, and what a sequence has is never taken from it. */
static void eviction(void **state)
{
    static int32_t a[MAX_IDS], b[MAX_IDS], c[MAX_IDS];
    struct kv_geometry g = geometry(0);
    struct kv_prefix *x;
    struct baton_error e;
    uint32_t hit, n = 8 * PAGE;
    (void)state;
    struct kv_pool *p = pool_open(&g, 20 * PAGE, 1, PAGE, &x);
    uint32_t blocks = kv_pool_capacity(p);
    random_ids(a, n + 1);
    random_ids(b, n + 1);
    random_ids(c, n + 1);
    b[0] = 2, c[0] = 3;
    struct kv_seq *s = begin(p, x, a, n + 1, &hit);
    append(x, s, a, n, 100);
    kv_seq_close(s);
    s = begin(p, x, b, n + 1, &hit);
    append(x, s, b, n, 100);
    kv_seq_close(s);
    assert_int_equal(kv_pool_idle(p), 16);
    s = begin(p, x, a, n + 1, &hit); /* used again: now b is the older one */
    assert_int_equal(hit, n);
    struct kv_seq *t = begin(p, x, c, n + 1, &hit);
    append(x, t, c, n, 100); /* takes what is free and the rest from b, its end first */
    kv_seq_close(t);
    t = begin(p, x, b, n + 1, &hit);
    assert_int_equal(hit, n - (8 - (blocks - 16)) * PAGE);
    kv_seq_close(t);
    test_ok(kv_seq_open(p, &t, &e), &e);
    test_ok(kv_seq_reserve(t, (blocks - 8) * PAGE, &e), &e); /* all but what s has */
    assert_int_equal(kv_pool_idle(p), 0);
    test_fails(kv_seq_reserve(t, (blocks - 7) * PAGE, &e), BATON_ERR_BUSY, "global", &e);
    rows(s, a, 0, n, true);
    kv_seq_close(t);
    kv_seq_close(s);
    s = begin(p, x, a, n + 1, &hit);
    assert_int_equal(hit, n);
    kv_seq_close(s);
    pool_close(p, x);
}

/* Random prompts of a tree in a pool that is too small for all, several at once, some given up. */
static void churn(void **state)
{
    enum { SEQS = 3 };
    static int32_t base[4][MAX_IDS], ids[SEQS][MAX_IDS];
    uint64_t hits = 0;
    (void)state;
    for (int round = 0; round < 6; round++) {
        struct kv_geometry g = geometry(round % 2 ? test_range(&seed, 1, 300) : 0);
        struct kv_prefix *x;
        struct kv_seq *s[SEQS] = {NULL};
        uint32_t n[SEQS] = {0}, hit, chunk = test_range(&seed, 1, 300);
        struct kv_pool *p = pool_open(&g, SEQS * 700, SEQS, chunk, &x);
        for (int i = 0; i < 4; i++) {
            random_ids(base[i], 700);
            memcpy(base[i], base[0], test_range(&seed, 0, 300) * sizeof **base);
        }
        for (int k = 0; k < 400; k++) {
            uint32_t i = test_range(&seed, 0, SEQS - 1);
            if (!s[i]) {
                n[i] = test_range(&seed, 1, 700);
                uint32_t keep = test_range(&seed, 0, n[i]);
                random_ids(ids[i], n[i]);
                memcpy(ids[i], base[test_range(&seed, 0, 3)], keep * sizeof **ids);
                s[i] = begin(p, x, ids[i], n[i], &hit);
                hits += hit > 0;
            } else if (kv_seq_length(s[i]) < n[i] && test_range(&seed, 0, 9)) {
                uint32_t to = kv_seq_length(s[i]) + test_range(&seed, 1, chunk);
                append(x, s[i], ids[i], to < n[i] ? to : n[i], chunk);
            } else {
                rows(s[i], ids[i], 0, kv_seq_length(s[i]), true);
                kv_seq_close(s[i]);
                s[i] = NULL;
            }
        }
        for (int i = 0; i < SEQS; i++)
            kv_seq_close(s[i]);
        pool_close(p, x);
    }
    assert_true(hits > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lengths),   cmocka_unit_test(windows),  cmocka_unit_test(imports),
        cmocka_unit_test(strangers), cmocka_unit_test(eviction), cmocka_unit_test(churn),
    };
    seed = test_seed();
    return cmocka_run_group_tests_name("kv: prefixes", tests, NULL, NULL);
}
