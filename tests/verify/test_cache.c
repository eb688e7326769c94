/* SPDX-License-Identifier: Apache-2.0 */
/* Read-back and comparison against caches that are known element by element, with planted faults.
 */
#include <float.h>

#include "base/base.h"
#include "tests/test.h"
#include "verify/verify.h"

#define CHUNK 32u

static uint64_t seed;

/* A cache with random content in a pool of its own, and that content in dense form. */
struct scene {
    struct kv_geometry g;
    struct kv_pool *pool;
    struct kv_seq *seq;
    struct baton_caps caps;
    uint32_t n;
    struct baton_kv_view views[8]; /* copies that a test may spoil */
    int32_t *tables[8];
    float *dense[16]; /* [kv_heads, n - first, head_dim] of slot s */
};

static uint32_t first_of(const struct kv_geometry *g, uint32_t layer, uint32_t n)
{
    return g->local[layer] && n + 1 > g->window ? n + 1 - g->window : 0;
}

static void fill_slot(struct scene *s, uint32_t slot, float scale)
{
    struct baton_error e;
    struct baton_kv_layout layout;
    uint32_t layer = slot / 2, first = first_of(&s->g, layer, s->n), rows = s->n - first;
    size_t count = (size_t)s->g.kv_heads * rows * s->g.head_dim;
    s->dense[slot] = calloc(count + 1, sizeof(float));
    for (size_t i = 0; i < count; i++)
        s->dense[slot][i] = test_normal(&seed) * scale;
    struct baton_kv_view dense = kv_dense_view(&layout, BATON_F32, s->g.kv_heads, s->g.head_dim,
                                               s->dense[slot], s->dense[slot], first, rows);
    if (rows)
        test_ok(
            kv_copy(&kv_seq_views(s->seq)[layer], &dense, slot % 2 ? KV_V : KV_K, first, rows, &e),
            &e);
}

static void scene_open(struct scene *s, uint32_t dtype, uint32_t n, uint32_t window)
{
    struct baton_error e;
    memset(s, 0, sizeof *s);
    s->n = n;
    s->g = (struct kv_geometry){.n_layers = test_range(&seed, 2, 6),
                                .kv_heads = test_range(&seed, 1, 3),
                                .head_dim = test_range(&seed, 2, 20),
                                .dtype = dtype,
                                .window = window};
    for (uint32_t l = 0; l < s->g.n_layers; l++)
        s->g.local[l] = window > 0 && l % 3 != 2;
    test_ok(kv_pool_open(&s->pool, &s->g, 2 * n, 2, CHUNK, &e), &e);
    kv_pool_poison(s->pool);
    test_ok(kv_seq_open(s->pool, &s->seq, &e), &e);
    test_ok(kv_seq_reserve_import(s->seq, n, &e), &e);
    snprintf(s->caps.numerics, sizeof s->caps.numerics, "test-%u", dtype);
    for (uint32_t i = 0; i < 2 * s->g.n_layers; i++)
        fill_slot(s, i, 3);
    for (uint32_t l = 0; l < s->g.n_layers; l++) {
        s->views[l] = kv_seq_views(s->seq)[l];
        s->tables[l] = malloc((s->views[l].n_blocks + 1) * sizeof(int32_t));
        memcpy(s->tables[l], s->views[l].blocks, s->views[l].n_blocks * sizeof(int32_t));
        s->views[l].blocks = s->tables[l];
    }
}

static void scene_close(struct scene *s)
{
    for (uint32_t l = 0; l < s->g.n_layers; l++)
        free(s->tables[l]);
    for (uint32_t i = 0; i < 2 * s->g.n_layers; i++)
        free(s->dense[i]);
    kv_seq_close(s->seq);
    kv_pool_close(s->pool);
}

static struct verify_cache *read_scene(struct scene *s, enum baton_role role)
{
    struct baton_error e;
    struct verify_cache *c = NULL;
    const struct engine_look look = {
        .role = role, .caps = &s->caps, .geometry = &s->g, .views = s->views, .n_tokens = s->n};
    test_ok(verify_cache_read(&look, &c, &e), &e);
    return c;
}

/* The scene's content as a float32 cache, as a producer would hold it. */
static struct verify_cache *wanted(struct scene *s)
{
    struct verify_cache *c = read_scene(s, BATON_CONSUMER);
    c->dtype = BATON_F32;
    for (uint32_t i = 0; i < 2 * c->n_layers; i++) {
        size_t bytes = (size_t)c->kv_heads * c->slots[i].n * c->head_dim * sizeof(float);
        free(c->slots[i].data);
        c->slots[i].data = malloc(bytes + 1);
        memcpy(c->slots[i].data, s->dense[i], bytes);
    }
    return c;
}

static struct verify_diff compare(const struct verify_cache *have, const struct verify_cache *want)
{
    struct baton_error e;
    struct verify_diff d;
    memset(&d, 0xEE, sizeof d);
    test_ok(verify_cache_compare(have, want, &d, &e), &e);
    return d;
}

static uint32_t random_dtype(void)
{
    const uint32_t all[] = {BATON_F32, BATON_F16, BATON_BF16};
    return all[test_range(&seed, 0, 2)];
}

/* ---- content ------------------------------------------------------------------------------ */

/* What was put in through the kv room comes out of the pages where it belongs, once rounded. */
static void reads_what_is_there(void **state)
{
    for (int round = 0; round < 60; round++) {
        struct scene s;
        uint32_t n = test_range(&seed, 1, 300), window = test_range(&seed, 0, 1) ? 70 : 0;
        scene_open(&s, random_dtype(), n, window);
        struct verify_cache *have = read_scene(&s, BATON_CONSUMER), *want = wanted(&s);
        assert_true(have->positions_ok);
        assert_string_equal(have->positions_why, "");
        for (uint32_t l = 0; l < s.g.n_layers; l++) {
            assert_int_equal(have->slots[2 * l].first, first_of(&s.g, l, n));
            assert_int_equal(have->slots[2 * l + 1].first + have->slots[2 * l + 1].n, n);
        }
        struct verify_diff d = compare(have, want);
        assert_int_equal(d.slots_total, 2 * s.g.n_layers);
        assert_int_equal(d.slots_exact, d.slots_total);
        assert_true(d.finite && d.positions_ok && !d.found);
        double budget = verify_conversion_budget(BATON_F32, s.g.dtype);
        assert_true(d.k_rel_rms <= budget && d.v_rel_rms <= budget);
        assert_true(s.g.dtype == BATON_F32 || (d.k_rel_rms > 0 && d.v_rel_rms > 0));
        verify_cache_free(have);
        verify_cache_free(want);
        scene_close(&s);
    }
}

/* Any bit of any element, in the pages: found, named, and nothing else reported. */
static void finds_a_flip(void **state)
{
    for (int round = 0; round < 100; round++) {
        struct scene s;
        uint32_t n = test_range(&seed, 1, 200);
        scene_open(&s, random_dtype(), n, test_range(&seed, 0, 1) ? 64 : 0);
        struct verify_cache *want = read_scene(&s, BATON_CONSUMER);
        struct verify_place p = {.layer = test_range(&seed, 0, s.g.n_layers - 1),
                                 .which = test_range(&seed, 0, 1) ? KV_V : KV_K,
                                 .head = test_range(&seed, 0, s.g.kv_heads - 1),
                                 .dim = test_range(&seed, 0, s.g.head_dim - 1)};
        p.position = test_range(&seed, first_of(&s.g, p.layer, n), n - 1);
        const struct baton_kv_view *v = &s.views[p.layer];
        const struct baton_kv_layout *l = v->layout;
        uint32_t bit = test_range(&seed, 0, s.g.dtype == BATON_F32 ? 31 : 15);
        uint8_t *at = (p.which == KV_K ? v->k : v->v) +
                      v->blocks[p.position / 64] * l->stride_block + p.head * l->stride_head +
                      p.position % 64 * l->stride_position + p.dim * l->stride_dim;
        at[bit / 8] ^= (uint8_t)(1u << bit % 8);
        struct verify_cache *have = read_scene(&s, BATON_CONSUMER);
        struct verify_diff d = compare(have, want);
        assert_int_equal(d.slots_exact, d.slots_total - 1);
        assert_true(d.found && d.elements == 1 && d.positions_ok);
        assert_int_equal(d.first.layer, p.layer);
        assert_int_equal(d.first.which, p.which);
        assert_int_equal(d.first.position, p.position);
        assert_int_equal(d.first.head, p.head);
        assert_int_equal(d.first.dim, p.dim);
        double hit = p.which == KV_K ? d.k_rel_rms : d.v_rel_rms;
        assert_true(hit > 0 && (p.which == KV_K ? d.v_rel_rms : d.k_rel_rms) == 0);
        verify_cache_free(have);
        verify_cache_free(want);
        scene_close(&s);
    }
}

static float float_of(uint32_t bits)
{
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* The room's own rounding and the kv room's agree on values where rounding is hard; one unit away
 * is found. */
static void rounds_once(void **state)
{
    struct scene s;
    const uint32_t dtypes[] = {BATON_F16, BATON_BF16};
    for (int k = 0; k < 2; k++) {
        scene_open(&s, dtypes[k], 200, 0);
        size_t count = (size_t)s.g.kv_heads * s.n * s.g.head_dim;
        for (uint32_t i = 0; i < 2 * s.g.n_layers; i++) {
            for (size_t j = 0; j < count; j++) {
                uint32_t r = (uint32_t)test_random(&seed);
                uint32_t exponent = dtypes[k] == BATON_F16 ? 127 - 26 + r % 41 : r % 254;
                uint32_t low = (r >> 8) % 3 == 0 ? 0x1000 : (r >> 8) % 3 == 1 ? 0x8000 : r >> 20;
                s.dense[i][j] = float_of((r & 0x80000000u) | exponent << 23 | (r >> 9 & 0x7e0000) |
                                         low);
            }
            struct baton_error e;
            struct baton_kv_layout layout;
            struct baton_kv_view dense = kv_dense_view(
                &layout, BATON_F32, s.g.kv_heads, s.g.head_dim, s.dense[i], s.dense[i], 0, s.n);
            test_ok(kv_copy(&kv_seq_views(s.seq)[i / 2], &dense, i % 2 ? KV_V : KV_K, 0, s.n, &e),
                    &e);
        }
        struct verify_cache *have = read_scene(&s, BATON_CONSUMER), *want = wanted(&s);
        struct verify_diff d = compare(have, want);
        if (d.found)
            fail_msg("dtype %u: layer %u %d position %u head %u dim %u", dtypes[k], d.first.layer,
                     d.first.which, d.first.position, d.first.head, d.first.dim);
        assert_int_equal(d.slots_exact, d.slots_total);
        have->slots[1].data[2 * 7] ^= 1; /* element 7 is one unit off */
        d = compare(have, want);
        assert_true(d.found && d.elements == 1 && d.first.layer == 0 && d.first.which == KV_V);
        verify_cache_free(have);
        verify_cache_free(want);
        scene_close(&s);
    }
}

static void not_finite(void **state)
{
    struct scene s;
    scene_open(&s, BATON_BF16, 100, 0);
    struct verify_cache *have = read_scene(&s, BATON_CONSUMER);
    memset(have->slots[3].data + 10, 0xFF, 2);
    struct verify_diff d = compare(have, have); /* even where both hold it */
    assert_false(d.finite);
    assert_true(isinf(d.v_rel_rms) && d.k_rel_rms == 0);
    verify_cache_free(have);
    scene_close(&s);
}

/* ---- positions ---------------------------------------------------------------------------- */

static void expect_bad(struct scene *s, enum baton_role role, const char *word)
{
    struct verify_cache *have = read_scene(s, role);
    if (have->positions_ok || !strstr(have->positions_why, word))
        fail_msg("'%s' instead of '%s'", have->positions_why, word);
    struct verify_diff d = compare(have, have);
    assert_false(d.positions_ok);
    assert_true(d.slots_exact < d.slots_total);
    verify_cache_free(have);
}

static void wrong_positions(void **state)
{
    struct scene s;
    scene_open(&s, BATON_BF16, 200, 70);
    const struct baton_kv_view local = s.views[1], global = s.views[0];
    assert_int_equal(local.first, 131);
    s.views[1].first++;
    expect_bad(&s, BATON_CONSUMER, "layer 1 holds positions [132, 200), not [131, 200)");
    expect_bad(&s, BATON_BOTH, "layer 1 holds positions [132");
    s.views[1].first = 128; /* where pages begin: fine where it was computed, not in an import */
    expect_bad(&s, BATON_CONSUMER, "layer 1 holds positions [128, 200)");
    struct verify_cache *c = read_scene(&s, BATON_BOTH);
    assert_true(c->positions_ok && c->slots[2].first == 131);
    verify_cache_free(c);
    s.views[1] = local;
    s.views[0].end--;
    expect_bad(&s, BATON_CONSUMER, "layer 0 holds positions [131, 199)");
    s.views[0] = global;
    int32_t kept = s.tables[1][2];
    s.tables[1][2] = -1;
    expect_bad(&s, BATON_CONSUMER, "layer 1 has no block for position 131");
    s.tables[1][2] = s.tables[1][3];
    expect_bad(&s, BATON_CONSUMER, "layer 1 has one block for two places");
    s.tables[1][2] = kept;
    s.views[1].n_blocks = 3;
    expect_bad(&s, BATON_CONSUMER, "layer 1 has no block for position 192");
    s.views[1] = local;
    c = read_scene(&s, BATON_CONSUMER);
    assert_true(c->positions_ok);
    verify_cache_free(c);
    scene_close(&s);
}

/* ---- rings and slid windows --------------------------------------------------------------- */

/* Local layer 1 of a scene, in one region of rows as devices keep it. */
struct window {
    struct baton_kv_layout layout;
    uint8_t *memory;
    size_t row, bytes; /* of one position, all heads; of K */
};

/* Moves the layer's pages there; rows that hold nothing are 0xCC. */
static void window_open(struct window *w, struct scene *s, enum baton_kv_kind kind, uint32_t rows)
{
    struct baton_error e;
    const uint32_t width = s->g.dtype == BATON_F32 ? 4 : 2, pad = test_range(&seed, 0, 3);
    const struct baton_kv_view from = s->views[1];
    uint32_t dim = s->g.head_dim + pad;
    bool token_major = test_range(&seed, 0, 1);
    w->row = (size_t)s->g.kv_heads * dim * width;
    w->bytes = rows * w->row;
    w->memory = malloc(2 * w->bytes);
    memset(w->memory, 0xCC, 2 * w->bytes);
    w->layout = (struct baton_kv_layout){
        .version = 1,
        .dtype = (uint8_t)s->g.dtype,
        .kind = (uint8_t)kind,
        .joint = 1,
        .alignment = 1,
        .kv_heads = s->g.kv_heads,
        .head_dim = s->g.head_dim,
        .head_dim_padded = dim,
        .rows = rows,
        .stride_kv = (int64_t)w->bytes,
        .stride_head = (int64_t)dim * width * (token_major ? 1 : rows),
        .stride_position = (int64_t)dim * width * (token_major ? s->g.kv_heads : 1),
        .stride_dim = width,
    };
    s->views[1] = (struct baton_kv_view){.layout = &w->layout,
                                         .k = w->memory,
                                         .v = w->memory + w->bytes,
                                         .first = from.first,
                                         .end = s->n};
    for (int which = 0; which < 2; which++)
        test_ok(kv_copy(&s->views[1], &from, which, from.first, s->n - from.first, &e), &e);
}

/* What lies in the row that follows moves into each row: all positions off by one. */
static void window_turn(struct window *w, const struct scene *s)
{
    uint32_t rows = w->layout.rows;
    size_t step = (size_t)w->layout.stride_position;
    bool token_major = step == w->row;
    uint32_t heads = token_major ? 2 : 2 * s->g.kv_heads; /* runs of rows, K and V */
    size_t run = token_major ? w->bytes : step * rows;
    for (uint32_t i = 0; i < heads; i++) {
        uint8_t *p = w->memory + i * run, *first = malloc(step);
        memcpy(first, p, step);
        memmove(p, p + step, run - step);
        memcpy(p + run - step, first, step);
        free(first);
    }
}

static void reads_windows(void **state)
{
    for (int round = 0; round < 60; round++) {
        struct scene s;
        struct window w;
        uint32_t n = test_range(&seed, 1, 300);
        enum baton_kv_kind kind = round % 2 ? BATON_KV_RING : BATON_KV_SLID;
        scene_open(&s, random_dtype(), n, 70);
        /* one row for each retained position at least; more, as a chunk's first query needs */
        uint32_t least = n - first_of(&s.g, 1, n), rows = least + test_range(&seed, 0, 40);
        struct verify_cache *want = read_scene(&s, BATON_CONSUMER);
        window_open(&w, &s, kind, rows);
        struct verify_cache *have = read_scene(&s, BATON_CONSUMER);
        struct verify_diff d = compare(have, want);
        assert_true(have->positions_ok && d.positions_ok && !d.found);
        assert_int_equal(d.slots_exact, d.slots_total);
        verify_cache_free(have);
        /* every row in another's place: the positions say nothing, the content does */
        window_turn(&w, &s);
        have = read_scene(&s, BATON_CONSUMER);
        d = compare(have, want);
        if (rows > 1 && !(d.found && d.first.layer == 1 && d.slots_exact == d.slots_total - 2))
            fail_msg("kind %d, %u rows, %u tokens: a turned window passes", kind, rows, n);
        verify_cache_free(have);
        verify_cache_free(want);
        free(w.memory);
        scene_close(&s);
    }
}

/* A ring of one row too few has overwritten its oldest position; one whose view says more or less
 * than it must is refused by name. */
static void wrong_windows(void **state)
{
    const enum baton_kv_kind kinds[] = {BATON_KV_RING, BATON_KV_SLID};
    for (int i = 0; i < 2; i++) {
        struct scene s;
        struct window w;
        scene_open(&s, BATON_BF16, 200, 70);
        window_open(&w, &s, kinds[i], 69);
        struct verify_cache *c = read_scene(&s, BATON_CONSUMER);
        assert_true(c->positions_ok && c->slots[2].first == 131 && c->slots[2].n == 69);
        verify_cache_free(c);
        w.layout.rows = 68;
        expect_bad(&s, BATON_CONSUMER, "layer 1 has 68 rows for positions [131, 200)");
        w.layout.rows = 69;
        s.views[1].end++;
        expect_bad(&s, BATON_CONSUMER, "layer 1 holds positions [131, 201), not [131, 200)");
        s.views[1].end--;
        s.views[1].first = 130;
        expect_bad(&s, BATON_CONSUMER, "layer 1 holds positions [130, 200)");
        s.views[1].first = 131;
        c = read_scene(&s, BATON_CONSUMER);
        /* position 140: in row 140 % 69 of a ring, in row 140 - 131 of a window that slid */
        uint32_t row = kinds[i] == BATON_KV_RING ? 2 : 9;
        w.memory[row * w.layout.stride_position] ^= 1;
        struct verify_cache *have = read_scene(&s, BATON_CONSUMER);
        struct verify_diff d = compare(have, c);
        assert_true(d.found && d.elements == 1 && d.first.layer == 1 && d.first.position == 140);
        assert_true(d.first.which == KV_K && d.first.head == 0 && d.first.dim == 0);
        verify_cache_free(have);
        verify_cache_free(c);
        free(w.memory);
        scene_close(&s);
    }
}

/* Two blocks of a table exchanged: every position is there, at another place. */
static void exchanged_blocks(void **state)
{
    struct scene s;
    scene_open(&s, BATON_F16, 190, 0);
    struct verify_cache *want = read_scene(&s, BATON_CONSUMER);
    int32_t t = s.tables[1][0];
    s.tables[1][0] = s.tables[1][1];
    s.tables[1][1] = t;
    struct verify_cache *have = read_scene(&s, BATON_CONSUMER);
    struct verify_diff d = compare(have, want);
    assert_true(d.positions_ok); /* the content tells */
    assert_int_equal(d.slots_exact, d.slots_total - 2);
    assert_true(d.found && d.first.layer == 1 && d.first.which == KV_K && d.first.position == 0);
    assert_true(d.k_rel_rms > 0.1 && d.v_rel_rms > 0.1);
    verify_cache_free(have);
    verify_cache_free(want);
    scene_close(&s);
}

static void other_models(void **state)
{
    struct baton_error e;
    struct verify_diff d;
    struct scene s;
    scene_open(&s, BATON_BF16, 65, 0);
    struct verify_cache *a = read_scene(&s, BATON_CONSUMER), b = *a;
    b.kv_heads++;
    test_fails(verify_cache_compare(a, &b, &d, &e), BATON_ERR_MISMATCH, "heads", &e);
    s.g.head_dim++;
    struct verify_cache *c = NULL;
    const struct engine_look look = {
        .caps = &s.caps, .geometry = &s.g, .views = s.views, .n_tokens = s.n};
    test_fails(verify_cache_read(&look, &c, &e), BATON_ERR_MISMATCH, "layout", &e);
    s.g.head_dim--;
    struct baton_kv_layout other = *s.views[0].layout;
    other.kind = 4;
    s.views[0].layout = &other;
    test_fails(verify_cache_read(&look, &c, &e), BATON_ERR_UNSUPPORTED, "slid windows", &e);
    other.kind = BATON_KV_RING; /* of no rows */
    test_fails(verify_cache_read(&look, &c, &e), BATON_ERR_UNSUPPORTED, "slid windows", &e);
    assert_null(c);
    verify_cache_free(a);
    verify_cache_free(NULL);
    scene_close(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_what_is_there), cmocka_unit_test(finds_a_flip),
        cmocka_unit_test(rounds_once),         cmocka_unit_test(not_finite),
        cmocka_unit_test(wrong_positions),     cmocka_unit_test(exchanged_blocks),
        cmocka_unit_test(reads_windows),       cmocka_unit_test(wrong_windows),
        cmocka_unit_test(other_models)};
    seed = test_seed();
    return cmocka_run_group_tests_name("verify cache", tests, NULL, NULL);
}
