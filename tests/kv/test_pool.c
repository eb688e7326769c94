/* SPDX-License-Identifier: Apache-2.0 */
/* Pool and sequences against a model, windows at their edges, what was promised to fit. */
#include "kv/kv_priv.h"
#include "shapes.h"

#define BLOCK 64u

static uint64_t seed;

static struct kv_geometry geometry(uint32_t n_layers, uint32_t window)
{
    struct kv_geometry g = {.n_layers = n_layers,
                            .kv_heads = test_range(&seed, 1, 3),
                            .head_dim = test_range(&seed, 1, 9),
                            .window = window,
                            .dtype = random_dtype(&seed)};
    for (uint32_t l = 0; l < n_layers; l++)
        g.local[l] = window > 0 && l % 3 != 2;
    return g;
}

static struct kv_pool *pool_open(const struct kv_geometry *g, uint32_t n_tokens, uint32_t n_seqs,
                                 uint32_t chunk)
{
    struct baton_error e;
    struct kv_pool *p;
    test_ok(kv_pool_open(&p, g, n_tokens, n_seqs, chunk, &e), &e);
    return p;
}

static void bad_geometry(void **state)
{
    struct baton_error e;
    struct kv_pool *p = NULL;
    struct kv_geometry good = geometry(3, 64), g;
#define BAD(change, code, word)                                                                    \
    g = good;                                                                                      \
    change;                                                                                        \
    test_fails(kv_pool_open(&p, &g, 100, 1, 64, &e), code, word, &e)
    BAD(g.n_layers = 0, BATON_ERR_USAGE, "0 layers");
    BAD(g.n_layers = KV_MAX_LAYERS + 1, BATON_ERR_USAGE, "513 layers");
    BAD(g.kv_heads = 0, BATON_ERR_USAGE, "0 heads");
    BAD(g.head_dim = 1u << 31, BATON_ERR_USAGE, "dimension");
    BAD(g.dtype = BATON_I8, BATON_ERR_UNSUPPORTED, "dtype 4");
    BAD(g.dtype = 77, BATON_ERR_UNSUPPORTED, "dtype 77");
    BAD(g.window = 0, BATON_ERR_USAGE, "window");
#undef BAD
    test_fails(kv_pool_open(&p, &good, 0, 1, 64, &e), BATON_ERR_USAGE, "0 positions", &e);
    test_fails(kv_pool_open(&p, &good, 100, 0, 64, &e), BATON_ERR_USAGE, "0 sequences", &e);
    test_fails(kv_pool_open(&p, &good, 100, 1, 0, &e), BATON_ERR_USAGE, "chunks of 0", &e);
    g = good;
    g.kv_heads = g.head_dim = 65535;
    test_fails(kv_pool_open(&p, &g, 2000000000, 1, 64, &e), BATON_ERR_NOMEM, "available", &e);
    test_fails(kv_pool_open(&p, &g, 2000000000, 4000000000u, 64, &e), BATON_ERR_NOMEM, "", &e);
    assert_null(p);
    kv_pool_close(NULL);
    kv_seq_close(NULL);
}

/* ---- retention ---------------------------------------------------------------------------- */

static void retained_first(void **state)
{
    struct kv_geometry g = geometry(3, 512);
    for (uint32_t n = 0; n < 2000; n++) {
        /* Brute force: the first position that the query at n sees, itself being n. */
        uint32_t want = 0;
        while (n - want >= g.window)
            want++;
        assert_int_equal(kv_retained_first(&g, 0, n), want);
        assert_int_equal(kv_retained_first(&g, 2, n), 0);
    }
}

static void expect_window(struct kv_pool *p, struct kv_seq *s, uint32_t window, uint32_t reserved)
{
    const struct baton_kv_view *v = kv_seq_views(s);
    uint32_t n = kv_seq_length(s), need = n >= window ? n - window + 1 : 0;
    assert_int_equal(v[0].end, n);
    assert_int_equal(v[2].first, 0);
    assert_true(v[0].first <= need);
    for (uint32_t i = 0; i < v[0].n_blocks; i++) {
        bool held = i >= need / BLOCK;
        assert_int_equal(v[0].blocks[i] >= 0, held);
        assert_int_equal(kv_seq_generation(s, 0, i * BLOCK) != 0, held);
        assert_int_equal(kv_seq_generation(s, 1, i * BLOCK + 63) != 0, held);
    }
    assert_int_equal(v[2].n_blocks, (n + reserved + BLOCK - 1) / BLOCK);
    assert_int_equal(kv_seq_generation(s, 0, v[0].n_blocks * BLOCK), 0);
    assert_true(kv_pool_used(p) >= v[2].n_blocks);
}

/* One length, reached by steps of `chunk` and by an import. */
static void at_length(uint32_t window, uint32_t length, uint32_t chunk)
{
    struct baton_error e;
    struct kv_geometry g = geometry(4, window);
    struct kv_pool *p = pool_open(&g, length + chunk, 1, chunk);
    struct kv_seq *s;
    test_ok(kv_seq_open(p, &s, &e), &e);
    for (uint32_t n = 0; n < length;) {
        uint32_t step = length - n < chunk ? length - n : chunk;
        test_ok(kv_seq_reserve(s, step, &e), &e);
        expect_window(p, s, window, step);
        kv_seq_advance(s, step);
        n += step;
        assert_int_equal(kv_seq_length(s), n);
    }
    test_ok(kv_seq_reserve(s, 1, &e), &e);
    expect_window(p, s, window, 1);
    kv_seq_close(s);
    assert_int_equal(kv_pool_used(p), 0);
    test_ok(kv_seq_open(p, &s, &e), &e);
    test_ok(kv_seq_reserve_import(s, length, &e), &e);
    assert_int_equal(kv_seq_length(s), length);
    assert_int_equal(kv_seq_views(s)[0].first, kv_retained_first(&g, 0, length));
    expect_window(p, s, window, 0);
    if (length)
        test_fails(kv_seq_reserve_import(s, length, &e), BATON_ERR_USAGE, "empty", &e);
    test_ok(kv_seq_reserve(s, chunk, &e), &e);
    expect_window(p, s, window, chunk);
    kv_seq_close(s);
    assert_int_equal(kv_pool_used(p), 0);
    kv_pool_close(p);
}

static void window_edges(void **state)
{
    static const uint32_t windows[] = {1, 2, 63, 64, 65, 100, 128, 512};
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++) {
        uint32_t w = windows[i];
        uint32_t lengths[] = {0,   w - 1, w,      w + 1,  2 * w,  63,
                              64,  65,    127,    128,    129,    639,
                              640, 641,   w + 62, w + 63, w + 64, test_range(&seed, 1, 3000)};
        for (size_t j = 0; j < sizeof lengths / sizeof *lengths; j++)
            at_length(w, lengths[j], test_range(&seed, 0, 1) ? 64 : test_range(&seed, 1, 300));
    }
}

/* ---- memory ------------------------------------------------------------------------------- */

static void write_slot(const struct baton_kv_view *v, uint32_t layer, enum kv_which which,
                       uint32_t first, uint32_t n, uint32_t salt, bool check)
{
    struct baton_error e;
    const struct baton_kv_layout *l = v->layout;
    size_t bytes = kv_piece_bytes(l->dtype, l->kv_heads, l->head_dim, n);
    uint8_t *want = malloc(bytes + 1), *got = malloc(bytes + 1);
    struct baton_kv_layout lw, lg;
    struct baton_kv_view w = kv_dense_view(&lw, l->dtype, l->kv_heads, l->head_dim, want, want,
                                           first, n);
    struct baton_kv_view d = kv_dense_view(&lg, l->dtype, l->kv_heads, l->head_dim, got, got, first,
                                           n);
    uint32_t width = shape_bytes(l->dtype) * l->head_dim;
    for (uint32_t h = 0; h < l->kv_heads; h++)
        for (uint32_t i = 0; i < n; i++) {
            uint64_t x = (((salt * 131ull + layer) * 2 + which) * 7 + h) * 100003ull + first + i;
            for (uint32_t b = 0; b < width; b++)
                want[(h * n + i) * width + b] = (uint8_t)(x * 2654435761u >> (b % 24));
        }
    if (check) {
        test_ok(kv_copy(&d, v, which, first, n, &e), &e);
        assert_memory_equal(got, want, bytes);
    } else {
        test_ok(kv_copy(v, &w, which, first, n, &e), &e);
    }
    free(want);
    free(got);
}

static void touch_all(struct kv_seq *s, const struct kv_geometry *g, uint32_t first, uint32_t n,
                      uint32_t salt, bool check)
{
    const struct baton_kv_view *v = kv_seq_views(s);
    for (uint32_t l = 0; l < g->n_layers; l++) {
        uint32_t from = check ? kv_retained_first(g, l, kv_seq_length(s)) : first;
        if (check && n == 0)
            continue;
        write_slot(&v[l], l, KV_K, from, first + n - from, salt, check);
        write_slot(&v[l], l, KV_V, from, first + n - from, salt, check);
    }
}

/* ---- random operations against a model ---------------------------------------------------- */

enum { N_SEQS = 4, MAX_BLOCKS = 4096 };

struct model {
    struct kv_pool *pool;
    struct kv_geometry g;
    uint32_t n_tokens, chunk;
    struct kv_seq *seq[N_SEQS];
    uint32_t length[N_SEQS], salt[N_SEQS];
    int32_t owner[2][MAX_BLOCKS];       /* sequence + 1, 0 = free */
    uint32_t generation[2][MAX_BLOCKS]; /* last seen */
};

/* Look at every table: nobody shares a block, a block that changed hands has a new generation. */
static void model_look(struct model *m)
{
    static int32_t owner[2][MAX_BLOCKS];
    uint32_t used = 0;
    memset(owner, 0, sizeof owner);
    for (int i = 0; i < N_SEQS; i++)
        for (uint32_t l = 0; m->seq[i] && l < m->g.n_layers; l++) {
            const struct baton_kv_view *v = &kv_seq_views(m->seq[i])[l];
            int group = m->g.local[l];
            assert_int_equal(v->end, m->length[i]);
            for (uint32_t b = 0; b < v->n_blocks; b++) {
                if (v->blocks[b] < 0)
                    continue;
                int32_t *o = &owner[group][v->blocks[b]];
                uint32_t gen = kv_seq_generation(m->seq[i], l, b * BLOCK);
                uint32_t *last = &m->generation[group][v->blocks[b]];
                assert_true(*o == 0 || *o == i + 1);
                used += *o == 0;
                assert_true(gen >= *last && gen > 0);
                assert_true(m->owner[group][v->blocks[b]] == i + 1 || *o || gen > *last);
                *o = i + 1;
                *last = gen;
            }
        }
    memcpy(m->owner, owner, sizeof owner);
    assert_int_equal(kv_pool_used(m->pool), used);
}

/* A refused reserve leaves tables, length and use as they were. */
static void model_refused(struct model *m, int i, uint32_t n)
{
    struct baton_error e;
    const struct baton_kv_view *v = kv_seq_views(m->seq[i]);
    struct baton_kv_view before[8];
    uint32_t used = kv_pool_used(m->pool);
    memcpy(before, v, m->g.n_layers * sizeof *v);
    test_fails(kv_seq_reserve(m->seq[i], n, &e), BATON_ERR_BUSY, "blocks", &e);
    assert_memory_equal(before, kv_seq_views(m->seq[i]), m->g.n_layers * sizeof *v);
    assert_int_equal(kv_pool_used(m->pool), used);
    assert_int_equal(kv_seq_length(m->seq[i]), m->length[i]);
}

static void model_append(struct model *m, int i)
{
    uint32_t n = test_range(&seed, 1, m->chunk);
    struct baton_error e;
    if (kv_seq_reserve(m->seq[i], n, &e)) {
        assert_int_equal(e.code, BATON_ERR_BUSY);
        model_refused(m, i, n);
        return;
    }
    model_look(m);
    touch_all(m->seq[i], &m->g, m->length[i], n, m->salt[i], false);
    kv_seq_advance(m->seq[i], n);
    m->length[i] += n;
}

static void model_step(struct model *m)
{
    struct baton_error e;
    int i = (int)test_range(&seed, 0, N_SEQS - 1);
    uint32_t what = test_range(&seed, 0, 19);
    if (!m->seq[i]) {
        test_ok(kv_seq_open(m->pool, &m->seq[i], &e), &e);
        m->length[i] = 0;
        m->salt[i] = test_range(&seed, 0, 1000);
        uint32_t n = test_range(&seed, 1, m->n_tokens / 2);
        if (what < 8 && kv_seq_reserve_import(m->seq[i], n, &e) == 0) {
            m->length[i] = n;
            for (uint32_t l = 0; l < m->g.n_layers; l++) {
                uint32_t from = kv_retained_first(&m->g, l, n);
                write_slot(&kv_seq_views(m->seq[i])[l], l, KV_K, from, n - from, m->salt[i], false);
                write_slot(&kv_seq_views(m->seq[i])[l], l, KV_V, from, n - from, m->salt[i], false);
            }
        }
    } else if (what == 0) {
        kv_seq_close(m->seq[i]);
        m->seq[i] = NULL;
    } else if (what == 1) {
        model_refused(m, i, UINT32_MAX);
        kv_pool_poison(m->pool);
    } else {
        model_append(m, i);
    }
    model_look(m);
    for (int j = 0; j < N_SEQS; j++)
        if (m->seq[j])
            touch_all(m->seq[j], &m->g, 0, m->length[j], m->salt[j], true);
}

static void random_operations(void **state)
{
    static struct model m;
    for (int round = 0; round < 12; round++) {
        memset(&m, 0, sizeof m);
        uint32_t window = round % 3 == 0 ? 0 : test_range(&seed, 1, 200);
        m.g = geometry(test_range(&seed, 3, 5), window);
        if (round % 3 == 1)
            memset(m.g.local, 1, m.g.n_layers); /* no global layer at all */
        m.n_tokens = test_range(&seed, 100, 1500);
        m.chunk = test_range(&seed, 1, 200);
        m.pool = pool_open(&m.g, m.n_tokens, test_range(&seed, 1, N_SEQS), m.chunk);
        assert_true(kv_pool_capacity(m.pool) < MAX_BLOCKS);
        for (int step = 0; step < 150; step++)
            model_step(&m);
        for (int i = 0; i < N_SEQS; i++)
            kv_seq_close(m.seq[i]);
        assert_int_equal(kv_pool_used(m.pool), 0);
        kv_pool_close(m.pool);
    }
}

/* However n_tokens are dealt out to n_seqs sequences that advance by chunks: it fits. */
static void what_was_asked_for_fits(void **state)
{
    struct baton_error e;
    for (int round = 0; round < 40; round++) {
        uint32_t window = test_range(&seed, 1, 300), chunk = test_range(&seed, 1, 200);
        uint32_t n_seqs = test_range(&seed, 1, 5), n_tokens = test_range(&seed, n_seqs, 3000);
        struct kv_geometry g = geometry(3, window);
        struct kv_pool *p = pool_open(&g, n_tokens, n_seqs, chunk);
        struct kv_seq *s[5];
        uint32_t left = n_tokens, share[5];
        for (uint32_t i = 0; i < n_seqs; i++) {
            test_ok(kv_seq_open(p, &s[i], &e), &e);
            share[i] = i == n_seqs - 1 ? left : test_range(&seed, 0, left);
            left -= share[i];
        }
        for (bool more = true; more;) {
            more = false;
            for (uint32_t i = 0; i < n_seqs; i++) {
                uint32_t n = test_range(&seed, 1, chunk);
                n = n < share[i] ? n : share[i];
                test_ok(kv_seq_reserve(s[i], n, &e), &e);
                kv_seq_advance(s[i], n);
                share[i] -= n;
                more = more || share[i] > 0;
            }
        }
        for (uint32_t i = 0; i < n_seqs; i++)
            kv_seq_close(s[i]);
        kv_pool_close(p);
    }
}

static bool block_is_poison(const struct baton_kv_view *v, int32_t id)
{
    const uint8_t *p = v->k + id * v->layout->stride_block;
    size_t n = kv_piece_bytes(v->layout->dtype, v->layout->kv_heads, v->layout->head_dim, BLOCK);
    for (size_t i = 0; i < 2 * n; i++) /* K, then V */
        if (p[i] != 0xFF)
            return false;
    return true;
}

static void poison(void **state)
{
    struct baton_error e;
    struct kv_geometry g = geometry(3, 100);
    struct kv_pool *p = pool_open(&g, 640, 2, 64);
    struct kv_seq *s, *t;
    test_ok(kv_seq_open(p, &s, &e), &e);
    test_ok(kv_seq_reserve_import(s, 300, &e), &e);
    for (uint32_t l = 0; l < g.n_layers; l++)
        write_slot(&kv_seq_views(s)[l], l, KV_V, g.local[l] ? 201 : 0, g.local[l] ? 99 : 300, 1,
                   false);
    kv_pool_poison(p);
    test_ok(kv_seq_open(p, &t, &e), &e);
    test_ok(kv_seq_reserve(t, 64, &e), &e);
    for (uint32_t l = 0; l < g.n_layers; l++) {
        const struct baton_kv_view *a = &kv_seq_views(s)[l], *b = &kv_seq_views(t)[l];
        write_slot(a, l, KV_V, g.local[l] ? 201 : 0, g.local[l] ? 99 : 300, 1, true);
        assert_true(block_is_poison(b, b->blocks[0]));
        assert_false(block_is_poison(a, a->blocks[4]));
    }
    kv_seq_close(t);
    kv_seq_close(s);
    kv_pool_close(p);
}

/* A block with two owners outlives the first, and letting go of it makes no room. */
static void shared_blocks(void **state)
{
    struct baton_error e;
    struct kv_geometry g = geometry(3, 64);
    struct kv_pool *p = pool_open(&g, 1280, 1, 64);
    struct kv_blocks *local = &p->group[KV_LOCAL];
    struct kv_seq *s;
    test_ok(kv_seq_open(p, &s, &e), &e);
    test_ok(kv_seq_reserve(s, 64, &e), &e);
    kv_seq_advance(s, 64);
    int32_t id = kv_seq_views(s)[0].blocks[0];
    uint32_t generation = kv_seq_generation(s, 0, 0);
    kv_blocks_share(local, id);
    test_ok(kv_seq_reserve(s, 64, &e), &e);
    kv_seq_advance(s, 64); /* position 1 is the first of the window: block 0 is still needed */
    while (local->n_free > 0)
        assert_true(kv_blocks_take(local) >= 0);
    test_fails(kv_seq_reserve(s, 64, &e), BATON_ERR_BUSY, "local", &e);
    assert_int_equal(kv_seq_views(s)[0].blocks[0], id);
    assert_int_equal(kv_seq_generation(s, 0, 0), generation);
    kv_blocks_put(local, id); /* the other owner goes: now there is room, in this very block */
    test_ok(kv_seq_reserve(s, 64, &e), &e);
    assert_int_equal(kv_seq_views(s)[0].blocks[2], id);
    assert_true(kv_seq_generation(s, 0, 128) > generation);
    kv_seq_close(s);
    for (int32_t i = 0; i < (int32_t)local->n_blocks; i++)
        if (local->refs[i] > 0)
            kv_blocks_put(local, i);
    assert_int_equal(kv_pool_used(p), 0);
    kv_pool_close(p);
}

/* A page is what device.h's formula says, aligned to what the record promises. */
static void page_layout(void **state)
{
    struct baton_error e;
    struct kv_geometry g = geometry(5, 100);
    struct kv_pool *p = pool_open(&g, 640, 1, 64);
    struct kv_seq *s;
    uint64_t global_block, local_block,
        slot = 64ull * g.kv_heads * g.head_dim * shape_bytes(g.dtype);
    kv_geometry_bytes(&g, &global_block, &local_block);
    assert_int_equal(global_block, 2 * slot * 1);
    assert_int_equal(local_block, 2 * slot * 4);
    assert_int_equal(kv_pool_bytes(p) % 64, 0);
    assert_memory_equal(kv_pool_geometry(p), &g, sizeof g);
    test_ok(kv_seq_open(p, &s, &e), &e);
    test_ok(kv_seq_reserve(s, 64, &e), &e);
    for (uint32_t l = 0; l < 5; l++) {
        const struct baton_kv_view *v = &kv_seq_views(s)[l];
        test_ok(kv_layout_check(v->layout, &e), &e);
        assert_int_equal(v->layout->block, 64);
        assert_int_equal(v->layout->alignment, 64);
        assert_int_equal((uintptr_t)v->k % 64, 0);
        assert_int_equal((uintptr_t)v->v % 64, 0);
        assert_int_equal(v->layout->stride_block, g.local[l] ? local_block : global_block);
        assert_int_equal(v->layout->stride_dim, shape_bytes(g.dtype));
        assert_int_equal(v->layout->stride_position, shape_bytes(g.dtype) * g.head_dim);
        assert_int_equal(v->layout->stride_head, 64 * shape_bytes(g.dtype) * g.head_dim);
    }
    kv_seq_close(s);
    kv_pool_close(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_geometry),
        cmocka_unit_test(retained_first),
        cmocka_unit_test(window_edges),
        cmocka_unit_test(random_operations),
        cmocka_unit_test(what_was_asked_for_fits),
        cmocka_unit_test(poison),
        cmocka_unit_test(shared_blocks),
        cmocka_unit_test(page_layout),
    };
    seed = test_seed();
    return cmocka_run_group_tests_name("kv pool", tests, NULL, NULL);
}
