/* SPDX-License-Identifier: Apache-2.0 */
/* Slot digests: the documented bytes, the same from every layout and every split, and no two
 * slots that differ in anything alike. */
#include <xxhash.h>

#include "shapes.h"

static uint64_t seed;

struct slot {
    uint32_t layer, dtype, heads, dim, first, n;
    enum kv_which which;
};

static struct slot random_slot(void)
{
    struct slot s = {.layer = test_range(&seed, 0, 40), .dtype = random_dtype(&seed)};
    s.which = (enum kv_which)test_range(&seed, 0, 1);
    s.heads = test_range(&seed, 1, 4);
    s.dim = test_range(&seed, 0, 5) ? test_range(&seed, 1, 20) : test_range(&seed, 500, 600);
    s.first = test_range(&seed, 0, 2) ? test_range(&seed, 0, 1000) : 0;
    s.n = test_range(&seed, 1, s.dim < 100 ? MAX_POSITIONS : 70);
    return s;
}

static struct kv_digest *digest_open(const struct slot *s)
{
    struct baton_error e;
    struct kv_digest *d;
    test_ok(kv_digest_open(&d, s->layer, s->which, s->dtype, s->heads, s->dim, s->first, s->n, &e),
            &e);
    return d;
}

static void digest_whole(const struct slot *s, const struct baton_kv_view *v, uint8_t out[32])
{
    struct baton_error e;
    struct kv_digest *d = digest_open(s);
    test_ok(kv_digest_update(d, v, s->first, s->n, &e), &e);
    test_ok(kv_digest_final(d, out, &e), &e);
    kv_digest_close(d);
}

/* ---- the documented bytes, put together once more ------------------------------------------ */

static uint8_t *put(uint8_t *to, uint32_t x)
{
    for (int i = 0; i < 4; i++)
        *to++ = (uint8_t)(x >> 8 * i);
    return to;
}

static void model_digest(const struct slot *s, const struct shape *x, uint8_t out[32])
{
    uint32_t end = s->first + s->n, bytes = shape_bytes(s->dtype), n_leaves = 0;
    uint8_t *leaf = malloc(16 + 64u * s->heads * s->dim * bytes);
    uint8_t *all = malloc(36 + 16 * (s->n / 64 + 2)), *at = all + 36;
    for (uint32_t f = s->first, next; f < end; f = next, n_leaves++) {
        next = f / 64 * 64 + 64 < end ? f / 64 * 64 + 64 : end;
        uint8_t *p = put(put(put(put(leaf, s->layer), s->which), f), next - f);
        for (uint32_t h = 0; h < s->heads; h++)
            for (uint32_t i = f; i < next; i++)
                for (uint32_t d = 0; d < s->dim; d++, p += bytes)
                    memcpy(p, shape_at(x, s->which, i, h, d), bytes);
        XXH128_hash_t hash = XXH3_128bits(leaf, (size_t)(p - leaf));
        for (int i = 0; i < 8; i++) {
            at[i] = (uint8_t)(hash.high64 >> (56 - 8 * i));
            at[8 + i] = (uint8_t)(hash.low64 >> (56 - 8 * i));
        }
        at += 16;
    }
    uint8_t *p = put(put(put(put(all, 1), s->layer), s->which), s->dtype);
    put(put(put(put(put(p, s->heads), s->dim), s->first), s->n), n_leaves);
    base_sha256(all, (size_t)(at - all), out);
    free(leaf);
    free(all);
}

static void documented_bytes_from_every_layout(void **state)
{
    struct baton_error e;
    for (int round = 0; round < 300; round++) {
        struct slot s = random_slot();
        struct shape x = shape_open(s.dtype, s.heads, s.dim, s.first, s.n, &seed);
        struct shape y = shape_open(s.dtype, s.heads, s.dim, s.first, s.n, &seed);
        uint8_t want[32], got[32];
        x.view.layout = &x.l;
        y.view.layout = &y.l;
        model_digest(&s, &x, want);
        digest_whole(&s, &x.view, got);
        assert_memory_equal(got, want, 32);
        test_ok(kv_copy(&y.view, &x.view, s.which, s.first, s.n, &e), &e);
        digest_whole(&s, &y.view, got);
        assert_memory_equal(got, want, 32);
        shape_close(&x);
        shape_close(&y);
    }
}

/* Cut at random leaf borders, the pieces in random order. */
static void split_updates(void **state)
{
    struct baton_error e;
    for (int round = 0; round < 200; round++) {
        struct slot s = random_slot();
        struct shape x = shape_open(s.dtype, s.heads, s.dim, s.first, s.n, &seed);
        uint32_t cut[MAX_POSITIONS], n_cuts = 0, end = s.first + s.n;
        uint8_t want[32], got[32];
        x.view.layout = &x.l;
        digest_whole(&s, &x.view, want);
        cut[n_cuts++] = s.first;
        for (uint32_t p = s.first / 64 * 64 + 64; p < end; p += 64)
            if (test_range(&seed, 0, 1))
                cut[n_cuts++] = p;
        cut[n_cuts] = end;
        struct kv_digest *d = digest_open(&s);
        uint32_t start = test_range(&seed, 0, n_cuts - 1);
        for (uint32_t i = 0; i < n_cuts; i++) {
            uint32_t j = (start + i) % n_cuts;
            test_fails(kv_digest_final(d, got, &e), BATON_ERR_INTEGRITY, "leaf", &e);
            test_ok(kv_digest_update(d, &x.view, cut[j], cut[j + 1] - cut[j], &e), &e);
        }
        test_ok(kv_digest_final(d, got, &e), &e);
        assert_memory_equal(got, want, 32);
        test_ok(kv_digest_final(d, got, &e), &e);
        assert_memory_equal(got, want, 32);
        kv_digest_close(d);
        shape_close(&x);
    }
}

/* ---- differences -------------------------------------------------------------------------- */

static void every_bit_counts(void **state)
{
    struct slot s = {
        .layer = 3, .dtype = BATON_BF16, .heads = 2, .dim = 3, .first = 50, .n = 90, .which = KV_V};
    uint8_t data[2 * 90 * 3 * 2], want[32], got[32];
    struct baton_kv_layout l;
    struct baton_kv_view v = kv_dense_view(&l, s.dtype, s.heads, s.dim, NULL, data, s.first, s.n);
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)test_random(&seed);
    digest_whole(&s, &v, want);
    for (size_t bit = 0; bit < 8 * sizeof data; bit++) {
        data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        digest_whole(&s, &v, got);
        assert_memory_not_equal(got, want, 32);
        data[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    digest_whole(&s, &v, got);
    assert_memory_equal(got, want, 32);
}

/* The same bytes under other coordinates are another slot. */
static void coordinates_count(void **state)
{
    uint8_t data[4 * 128 * 4 * 2] = {0}, seen[7][32];
    const struct slot slots[7] = {
        {3, BATON_BF16, 4, 4, 64, 128, KV_K}, {4, BATON_BF16, 4, 4, 64, 128, KV_K},
        {3, BATON_F16, 4, 4, 64, 128, KV_K},  {3, BATON_BF16, 2, 8, 64, 128, KV_K},
        {3, BATON_BF16, 4, 4, 0, 128, KV_K},  {3, BATON_BF16, 4, 4, 64, 128, KV_V},
        {3, BATON_BF16, 4, 4, 64, 127, KV_K},
    };
    for (int i = 0; i < 7; i++) {
        const struct slot *s = &slots[i];
        struct baton_kv_layout l;
        struct baton_kv_view v = kv_dense_view(&l, s->dtype, s->heads, s->dim, data, data, s->first,
                                               s->n);
        digest_whole(s, &v, seen[i]);
        for (int j = 0; j < i; j++)
            assert_memory_not_equal(seen[i], seen[j], 32);
    }
}

/* Swapping two positions, or two leaves of equal size, is seen. */
static void order_counts(void **state)
{
    struct slot s = {.layer = 0, .dtype = BATON_F32, .heads = 1, .dim = 2, .first = 0, .n = 128};
    float data[128][2], row[64][2];
    uint8_t want[32], got[32];
    struct baton_kv_layout l;
    struct baton_kv_view v = kv_dense_view(&l, s.dtype, 1, 2, data, NULL, 0, 128);
    for (int i = 0; i < 128; i++)
        data[i][0] = data[i][1] = test_normal(&seed);
    digest_whole(&s, &v, want);
    memcpy(row, data, sizeof row);
    memcpy(data, data + 64, sizeof row);
    memcpy(data + 64, row, sizeof row);
    digest_whole(&s, &v, got);
    assert_memory_not_equal(got, want, 32);
    memcpy(data + 64, data, sizeof row);
    memcpy(data, row, sizeof row);
    digest_whole(&s, &v, got);
    assert_memory_equal(got, want, 32);
    memcpy(row, data[5], sizeof *row);
    memcpy(data[5], data[6], sizeof *row);
    memcpy(data[6], row, sizeof *row);
    digest_whole(&s, &v, got);
    assert_memory_not_equal(got, want, 32);
}

static void refusals(void **state)
{
    struct baton_error e;
    uint8_t data[2 * 200 * 4 * 2] = {0}, out[32];
    struct baton_kv_layout l, other;
    struct slot s = {.layer = 7, .dtype = BATON_F16, .heads = 2, .dim = 4, .first = 10, .n = 190};
    struct baton_kv_view v = kv_dense_view(&l, BATON_F16, 2, 4, data, NULL, 0, 200);
    struct kv_digest *d = digest_open(&s);
    test_fails(kv_digest_final(d, out, &e), BATON_ERR_INTEGRITY, "position 10", &e);
    test_fails(kv_digest_update(d, &v, 9, 55, &e), BATON_ERR_USAGE, "[9, 64)", &e);
    test_fails(kv_digest_update(d, &v, 11, 53, &e), BATON_ERR_USAGE, "cut", &e);
    test_fails(kv_digest_update(d, &v, 10, 53, &e), BATON_ERR_USAGE, "cut", &e);
    test_fails(kv_digest_update(d, &v, 128, 73, &e), BATON_ERR_USAGE, "cut", &e);
    test_fails(kv_digest_update(d, &v, 4294967232u, 64, &e), BATON_ERR_USAGE, "cut", &e);
    test_ok(kv_digest_update(d, &v, 128, 72, &e), &e);
    test_ok(kv_digest_update(d, &v, 10, 54, &e), &e);
    test_ok(kv_digest_update(d, &v, 10, 0, &e), &e);
    test_fails(kv_digest_update(d, &v, 10, 118, &e), BATON_ERR_USAGE, "twice", &e);
    test_fails(kv_digest_final(d, out, &e), BATON_ERR_INTEGRITY,
               "layer 7 K lacks the leaf at "
               "position 64",
               &e);
    struct baton_kv_view bf = kv_dense_view(&other, BATON_BF16, 2, 4, data, NULL, 0, 200);
    test_fails(kv_digest_update(d, &bf, 64, 64, &e), BATON_ERR_MISMATCH, "dtype", &e);
    bf = kv_dense_view(&other, BATON_F16, 4, 2, data, NULL, 0, 200);
    test_fails(kv_digest_update(d, &bf, 64, 64, &e), BATON_ERR_MISMATCH, "heads", &e);
    bf = kv_dense_view(&other, BATON_F16, 2, 4, data, NULL, 0, 100);
    test_fails(kv_digest_update(d, &bf, 64, 64, &e), BATON_ERR_USAGE, "[0, 100)", &e);
    test_ok(kv_digest_update(d, &v, 64, 64, &e), &e);
    test_ok(kv_digest_final(d, out, &e), &e);
    kv_digest_close(d);
    kv_digest_close(NULL);
    d = NULL;
    test_fails(kv_digest_open(&d, 0, KV_K, BATON_I8, 1, 1, 0, 1, &e), BATON_ERR_UNSUPPORTED, "4",
               &e);
    test_fails(kv_digest_open(&d, 0, KV_K, BATON_F16, 1, 1, 0, 0, &e), BATON_ERR_USAGE, "", &e);
    test_fails(kv_digest_open(&d, 0, KV_K, BATON_F16, 1, 1, UINT32_MAX, 1, &e), BATON_ERR_USAGE, "",
               &e);
    assert_null(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(documented_bytes_from_every_layout),
        cmocka_unit_test(split_updates),
        cmocka_unit_test(every_bit_counts),
        cmocka_unit_test(coordinates_count),
        cmocka_unit_test(order_counts),
        cmocka_unit_test(refusals),
    };
    seed = test_seed();
    return cmocka_run_group_tests_name("kv digest", tests, NULL, NULL);
}
