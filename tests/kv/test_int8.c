/* SPDX-License-Identifier: Apache-2.0 */
/* int8 rows with scales: random layouts to and from float, each element within its budget, nothing
 * beside the rows touched. */
#include "shapes.h"

static uint64_t seed;

static float element(const struct shape *s, enum kv_which which, uint32_t p, uint32_t h, uint32_t d)
{
    const uint8_t *at = shape_at(s, which, p, h, d);
    if (s->l.dtype == BATON_F32) {
        float x;
        memcpy(&x, at, 4);
        return x;
    }
    if (s->l.dtype == BATON_BF16) {
        uint32_t bits = (uint32_t)(at[0] | at[1] << 8) << 16;
        float x;
        memcpy(&x, &bits, 4);
        return x;
    }
    float scale;
    memcpy(&scale, shape_at(s, which, p, h, 0) + shape_scale(&s->l, d), 4);
    return (float)(int8_t)*at * scale;
}

static void put(struct shape *s, enum kv_which which, uint32_t p, uint32_t h, uint32_t d, float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (s->l.dtype == BATON_BF16)
        bits >>= 16;
    memcpy(shape_at(s, which, p, h, d), &bits, shape_bytes(s->l.dtype));
}

/* Rows of very different sizes: zero, subnormal, near the largest. */
static void fill(struct shape *s, enum kv_which which, uint32_t first, uint32_t n)
{
    static const float sizes[] = {0.0f, 1e-40f, 1e-20f, 1.0f, 1.0f, 1.0f, 40.0f, 1e37f};
    for (uint32_t p = first; p < first + n; p++)
        for (uint32_t h = 0; h < s->l.kv_heads; h++) {
            float size = sizes[test_range(&seed, 0, 7)];
            for (uint32_t d = 0; d < s->l.head_dim; d++)
                put(s, which, p, h, d, size * test_normal(&seed));
            if (test_range(&seed, 0, 9) == 0)
                put(s, which, p, h, test_range(&seed, 0, s->l.head_dim - 1), 3.4028235e38f);
        }
}

static float largest(const struct shape *s, enum kv_which which, uint32_t p, uint32_t h,
                     uint32_t d0, uint32_t d1)
{
    float most = 0;
    for (uint32_t d = d0; d < d1 && d < s->l.head_dim; d++)
        most = fmaxf(most, fabsf(element(s, which, p, h, d)));
    return most;
}

/* Every element of dst (int8) within half a scale, the scale the block's largest / 127, padding
 * zero; marks what belongs to the row in `before`. */
static void expect_row(const struct shape *dst, const struct shape *src, enum kv_which which,
                       uint32_t p, uint32_t h, uint8_t *const before[2])
{
    const struct baton_kv_layout *l = &dst->l;
    int r;
    size_t at = shape_offset(dst, which, p, h, 0, &r);
    const uint8_t *row = dst->memory[r] + at;
    for (uint32_t d = 0; d < l->head_dim_padded; d++) {
        float scale, step;
        uint32_t block = d / l->scale_block * l->scale_block;
        memcpy(&scale, row + shape_scale(l, d), 4);
        if (d >= l->head_dim) {
            assert_int_equal(row[d], 0);
            if (block >= l->head_dim)
                assert_true(scale == 0.0f);
            continue;
        }
        float most = largest(src, which, p, h, block, block + l->scale_block);
        step = most > 0 ? fmaxf(most / 127, 0x1p-126f) : 0;
        assert_true(fabsf(scale - step) <= step * 0x1p-22f);
        double x = element(src, which, p, h, d), y = element(dst, which, p, h, d);
        if (!(fabs(x - y) <= 0.50002 * (double)scale))
            fail_msg("position %u head %u dim %u: %g became %g, scale %g", p, h, d, x, y,
                     (double)scale);
    }
    size_t bytes = shape_scale(l, l->head_dim_padded - 1) + 4;
    memcpy(before[r] + at, row, bytes);
}

static void floats_to_int8_and_back(void **state)
{
    struct baton_error e;
    for (int round = 0; round < 300; round++) {
        uint32_t heads = test_range(&seed, 1, 4), first = test_range(&seed, 0, 700);
        uint32_t dim = test_range(&seed, 1, 70), n = test_range(&seed, 1, 120);
        uint32_t dtype = test_range(&seed, 0, 1) ? BATON_F32 : BATON_BF16;
        enum kv_which which = (enum kv_which)test_range(&seed, 0, 1);
        struct shape src = shape_open(dtype, heads, dim, first, n, &seed);
        struct shape dst = shape_open(BATON_I8, heads, dim, first, n, &seed);
        struct shape back = shape_open(BATON_F32, heads, dim, first, n, &seed);
        uint8_t *before[2] = {NULL, NULL};
        src.view.layout = &src.l;
        dst.view.layout = &dst.l;
        back.view.layout = &back.l;
        fill(&src, which, first, n);
        for (int r = 0; r < 2; r++)
            if (dst.bytes[r]) {
                before[r] = malloc(dst.bytes[r]);
                memcpy(before[r], dst.memory[r], dst.bytes[r]);
            }
        test_ok(kv_layout_check(&dst.l, &e), &e);
        test_ok(kv_copy(&dst.view, &src.view, which, first, n, &e), &e);
        for (uint32_t p = first; p < first + n; p++)
            for (uint32_t h = 0; h < heads; h++)
                expect_row(&dst, &src, which, p, h, before);
        for (int r = 0; r < 2; r++)
            assert_true(!before[r] || !memcmp(before[r], dst.memory[r], dst.bytes[r]));
        test_ok(kv_copy(&back.view, &dst.view, which, first, n, &e), &e);
        for (uint32_t p = first; p < first + n; p++)
            for (uint32_t h = 0; h < heads; h++)
                for (uint32_t d = 0; d < dim; d++)
                    assert_true(element(&back, which, p, h, d) == element(&dst, which, p, h, d));
        for (int r = 0; r < 2; r++)
            free(before[r]);
        shape_close(&src);
        shape_close(&dst);
        shape_close(&back);
    }
}

/* Equal blocks of scales: the same bytes. Other blocks: within the new scale's budget. */
static void int8_to_int8(void **state)
{
    struct baton_error e;
    for (int round = 0; round < 200; round++) {
        uint32_t dim = test_range(&seed, 1, 70), n = test_range(&seed, 1, 60);
        struct shape x = shape_open(BATON_F32, 2, dim, 5, n, &seed);
        struct shape a = shape_open(BATON_I8, 2, dim, 5, n, &seed);
        struct shape b = shape_open(BATON_I8, 2, dim, 5, n, &seed);
        bool same = test_range(&seed, 0, 1);
        if (same) { /* one and the same record */
            shape_close(&b);
            b = a;
            for (int r = 0; r < 2; r++)
                b.memory[r] = a.bytes[r] ? malloc(a.bytes[r]) : NULL;
            b.view.k = b.memory[0] + (a.view.k - a.memory[0]);
            b.view.v = b.memory[a.l.joint ? 0 : 1] + (a.view.v - a.memory[a.l.joint ? 0 : 1]);
        }
        x.view.layout = &x.l;
        a.view.layout = &a.l;
        b.view.layout = &b.l;
        fill(&x, KV_V, 5, n);
        test_ok(kv_copy(&a.view, &x.view, KV_V, 5, n, &e), &e);
        test_ok(kv_copy(&b.view, &a.view, KV_V, 5, n, &e), &e);
        for (uint32_t p = 5; p < 5 + n; p++)
            for (uint32_t h = 0; h < 2; h++)
                for (uint32_t d = 0; d < dim; d++) {
                    float scale, from = element(&a, KV_V, p, h, d), to = element(&b, KV_V, p, h, d);
                    memcpy(&scale, shape_at(&b, KV_V, p, h, 0) + shape_scale(&b.l, d), 4);
                    if (same ? from != to : fabs((double)from - to) > 0.50002 * (double)scale)
                        fail_msg("position %u head %u dim %u: %g became %g, scale %g", p, h, d,
                                 (double)from, (double)to, (double)scale);
                }
        if (same)
            b.blocks = NULL;
        shape_close(&x);
        shape_close(&a);
        shape_close(&b);
    }
}

/* A byte can say neither infinity nor NaN: its scale is NaN, and who reads the block sees it. */
static void not_finite(void **state)
{
    struct baton_error e;
    float x[8] = {1, 2, INFINITY, 4, 5, 6, 7, 8}, y[8];
    uint8_t bytes[16];
    struct baton_kv_layout lx, ly, li;
    struct baton_kv_view vx = kv_dense_view(&lx, BATON_F32, 1, 8, x, NULL, 0, 1);
    struct baton_kv_view vy = kv_dense_view(&ly, BATON_F32, 1, 8, y, NULL, 0, 1);
    struct baton_kv_view vi = kv_dense_view(&li, BATON_F32, 1, 8, bytes, NULL, 0, 1);
    li.dtype = BATON_I8;
    li.scale_block = 4;
    li.stride_dim = 1;
    li.stride_position = li.stride_head = 16;
    test_ok(kv_copy(&vi, &vx, KV_K, 0, 1, &e), &e);
    test_ok(kv_copy(&vy, &vi, KV_K, 0, 1, &e), &e);
    for (int i = 0; i < 4; i++)
        assert_true(isnan(y[i]));
    for (int i = 4; i < 8; i++)
        assert_true(fabsf(y[i] - x[i]) <= 4.0f / 127);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(floats_to_int8_and_back),
        cmocka_unit_test(int8_to_int8),
        cmocka_unit_test(not_finite),
    };
    seed = test_seed();
    return cmocka_run_group_tests_name("kv-int8", tests, NULL, NULL);
}
