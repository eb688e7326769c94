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
    struct baton_kv_layout ring = *s.views[0].layout;
    ring.kind = BATON_KV_RING;
    s.views[0].layout = &ring;
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
        cmocka_unit_test(other_models)};
    seed = test_seed();
    return cmocka_run_group_tests_name("verify cache", tests, NULL, NULL);
}
