/* SPDX-License-Identifier: Apache-2.0 */
/* kv_copy between random layouts against an element-wise model; kv_layout_check. */
#include "shapes.h"

static uint64_t seed;

/* ---- the model of an element: through double, by the definition of the formats ------------- */

struct format {
    int mantissa, exponent_min, exponent_max;
};

static struct format format_of(uint32_t dtype)
{
    if (dtype == BATON_F16)
        return (struct format){10, -14, 15};
    return (struct format){dtype == BATON_BF16 ? 7 : 23, -126, 127};
}

static double decode(uint32_t bits, uint32_t dtype)
{
    struct format f = format_of(dtype);
    int width = (int)shape_bytes(dtype) * 8;
    uint32_t rest = bits & (uint32_t)((1ull << (width - 1)) - 1);
    uint32_t exponent = rest >> f.mantissa, mantissa = rest & ((1u << f.mantissa) - 1);
    double x;
    if ((int)exponent == 2 * f.exponent_max + 1)
        x = mantissa ? NAN : INFINITY;
    else if (exponent == 0)
        x = ldexp(mantissa, f.exponent_min - f.mantissa);
    else
        x = ldexp(mantissa + (1u << f.mantissa), (int)exponent - 1 + f.exponent_min - f.mantissa);
    return bits >> (width - 1) & 1 ? -x : x;
}

/* Nearest even, by rint() in units of the last place. NaN gives a quiet one. */
static uint32_t encode(double x, uint32_t dtype)
{
    struct format f = format_of(dtype);
    uint32_t sign = (uint32_t)(signbit(x) != 0) << (shape_bytes(dtype) * 8 - 1);
    uint32_t infinity = (uint32_t)(2 * f.exponent_max + 1) << f.mantissa;
    if (isnan(x))
        return sign | infinity | 1u << (f.mantissa - 1);
    if (isinf(x))
        return sign | infinity;
    if (x == 0)
        return sign;
    int exponent = ilogb(x) > f.exponent_min ? ilogb(x) : f.exponent_min;
    double units = rint(ldexp(fabs(x), f.mantissa - exponent));
    uint64_t bits = (uint64_t)units; /* a hidden bit or a carry moves into the exponent */
    bits += (uint64_t)(exponent - f.exponent_min) << f.mantissa;
    return sign | (bits > infinity ? infinity : (uint32_t)bits);
}

static uint32_t load(const uint8_t *p, uint32_t dtype)
{
    uint32_t x = 0;
    memcpy(&x, p, shape_bytes(dtype));
    return x;
}

static bool same_element(const uint8_t *got, uint32_t want, uint32_t dtype, bool converted)
{
    uint32_t bits = load(got, dtype);
    return bits == want || (converted && isnan(decode(bits, dtype)) && isnan(decode(want, dtype)));
}

/* ---- random pairs ------------------------------------------------------------------------- */

struct pair {
    uint32_t heads, dim, first, n;
    enum kv_which which;
};

static struct pair random_pair(void)
{
    struct pair p;
    p.heads = test_range(&seed, 1, 4);
    p.dim = test_range(&seed, 0, 9) ? test_range(&seed, 1, 20) : test_range(&seed, 60, 140);
    p.first = test_range(&seed, 0, 3) ? test_range(&seed, 0, 2000) : 0;
    p.n = test_range(&seed, 0, 3) ? test_range(&seed, 1, 150) : test_range(&seed, 1, MAX_POSITIONS);
    p.which = (enum kv_which)test_range(&seed, 0, 1);
    return p;
}

/* Values that rounding cares about: now and then a tie, a subnormal, an infinity, NaN. */
static void plant_values(struct shape *s, const struct pair *p)
{
    static const uint32_t planted[] = {0x3f808000, 0x3f818000, 0x33800000, 0x33000000, 0x33000001,
                                       0x477fefff, 0x477ff000, 0x7f800000, 0xff800000, 0x7f7fffff,
                                       0x7fc00000, 0x7f800001, 0x00000001, 0x80000000, 0x387fffff};
    for (uint32_t i = p->first; i < p->first + p->n; i++)
        for (uint32_t h = 0; h < p->heads; h++)
            for (uint32_t d = 0; d < p->dim; d++) {
                float x = test_normal(&seed);
                uint32_t bits;
                memcpy(&bits, &x, 4);
                if (test_range(&seed, 0, 9) == 0)
                    bits = planted[test_range(&seed, 0, sizeof planted / 4 - 1)];
                if (s->l.dtype != BATON_F32)
                    bits = encode(decode(bits, BATON_F32), s->l.dtype);
                memcpy(shape_at(s, p->which, i, h, d), &bits, shape_bytes(s->l.dtype));
            }
}

static void report(const struct shape *s, const char *name)
{
    const struct baton_kv_layout *l = &s->l;
    print_error("%s: dtype %u kind %u joint %u heads %u dim %u/%u block %u rows %u strides kv %lld "
                "block %lld head %lld position %lld dim %lld, holds [%u, %u)\n",
                name, l->dtype, l->kind, l->joint, l->kv_heads, l->head_dim, l->head_dim_padded,
                l->block, l->rows, (long long)l->stride_kv, (long long)l->stride_block,
                (long long)l->stride_head, (long long)l->stride_position, (long long)l->stride_dim,
                s->view.first, s->view.end);
}

/* Compare what lies in dst's memory, byte by byte, with the model: elements of the range, zeros in
 * their padding, and nothing else touched. `before` is its memory before the copy. */
static void expect_copied(const struct shape *dst, uint8_t *const before[2],
                          const struct shape *src, const struct pair *p, uint32_t first, uint32_t n)
{
    uint32_t bytes = shape_bytes(dst->l.dtype);
    bool converted = dst->l.dtype != src->l.dtype;
    for (uint32_t i = first; i < first + n; i++)
        for (uint32_t h = 0; h < p->heads; h++)
            for (uint32_t d = 0; d < dst->l.head_dim_padded; d++) {
                uint32_t want = 0;
                int r;
                size_t at = shape_offset(dst, p->which, i, h, d, &r);
                if (d < p->dim)
                    want = load(shape_at(src, p->which, i, h, d), src->l.dtype);
                if (d < p->dim && converted)
                    want = encode(decode(want, src->l.dtype), dst->l.dtype);
                if (!same_element(dst->memory[r] + at, want, dst->l.dtype, converted)) {
                    report(src, "src");
                    report(dst, "dst");
                    fail_msg("position %u head %u dim %u: %x, wanted %x", i, h, d,
                             load(dst->memory[r] + at, dst->l.dtype), want);
                }
                memcpy(before[r] + at, dst->memory[r] + at, bytes);
            }
    for (int r = 0; r < 2; r++)
        for (size_t i = 0; i < dst->bytes[r]; i++)
            if (before[r][i] != dst->memory[r][i]) {
                report(src, "src");
                report(dst, "dst");
                fail_msg("region %d: byte %zu of %zu was touched", r, i, dst->bytes[r]);
            }
}

static void copy_and_expect(struct shape *dst, struct shape *src, const struct pair *p)
{
    struct baton_error e;
    uint8_t *before[2] = {NULL, NULL};
    uint32_t skip = test_range(&seed, 0, p->n - 1), n = test_range(&seed, 0, p->n - skip);
    if (test_range(&seed, 0, 1)) {
        skip = 0;
        n = p->n;
    }
    for (int r = 0; r < 2; r++)
        if (dst->bytes[r]) {
            before[r] = malloc(dst->bytes[r]);
            memcpy(before[r], dst->memory[r], dst->bytes[r]);
        }
    test_ok(kv_layout_check(&dst->l, &e), &e);
    test_ok(kv_copy(&dst->view, &src->view, p->which, p->first + skip, n, &e), &e);
    expect_copied(dst, before, src, p, p->first + skip, n);
    free(before[0]);
    free(before[1]);
}

static void random_pairs(void **state)
{
    for (int round = 0; round < 800; round++) {
        struct pair p = random_pair();
        struct shape src = shape_open(random_dtype(&seed), p.heads, p.dim, p.first, p.n, &seed);
        struct shape dst = shape_open(random_dtype(&seed), p.heads, p.dim, p.first, p.n, &seed);
        src.view.layout = &src.l;
        dst.view.layout = &dst.l;
        plant_values(&src, &p);
        copy_and_expect(&dst, &src, &p);
        shape_close(&src);
        shape_close(&dst);
    }
}

/* src -> a chain of layouts that lose nothing -> the same elements. */
static void round_trips(void **state)
{
    struct baton_error e;
    for (int round = 0; round < 300; round++) {
        struct pair p = random_pair();
        uint32_t dtype = random_dtype(&seed);
        struct shape s[4];
        for (int i = 0; i < 4; i++) {
            bool wide = i > 0 && i < 3 && test_range(&seed, 0, 1);
            s[i] = shape_open(wide ? BATON_F32 : dtype, p.heads, p.dim, p.first, p.n, &seed);
            s[i].view.layout = &s[i].l;
        }
        plant_values(&s[0], &p);
        for (int i = 0; i < 3; i++)
            test_ok(kv_copy(&s[i + 1].view, &s[i].view, p.which, p.first, p.n, &e), &e);
        for (uint32_t i = p.first; i < p.first + p.n; i++)
            for (uint32_t h = 0; h < p.heads; h++)
                for (uint32_t d = 0; d < p.dim; d++) {
                    uint32_t want = load(shape_at(&s[0], p.which, i, h, d), dtype);
                    assert_true(same_element(shape_at(&s[3], p.which, i, h, d), want, dtype, true));
                }
        for (int i = 0; i < 4; i++)
            shape_close(&s[i]);
    }
}

/* One long row: f16 and bf16 completely, f32 where rounding decides. */
static void convert_row(const void *in, uint32_t from, void *out, uint32_t to, uint32_t n)
{
    struct baton_error e;
    struct baton_kv_layout ls, ld;
    struct baton_kv_view s = kv_dense_view(&ls, from, 1, 64, (void *)in, NULL, 0, n / 64);
    struct baton_kv_view d = kv_dense_view(&ld, to, 1, 64, out, NULL, 0, n / 64);
    test_ok(kv_copy(&d, &s, KV_K, 0, n / 64, &e), &e);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t x = load((const uint8_t *)in + i * shape_bytes(from), from);
        uint8_t *got = (uint8_t *)out + i * shape_bytes(to);
        if (!same_element(got, encode(decode(x, from), to), to, true))
            fail_msg("dtype %u %x -> dtype %u %x, wanted %x", from, x, to, load(got, to),
                     encode(decode(x, from), to));
    }
}

static void every_half(void **state)
{
    enum { N = 65536 };
    uint16_t *in = malloc(N * 2);
    uint32_t *out = malloc(N * 4), *mid = malloc(N * 4);
    for (uint32_t i = 0; i < N; i++)
        in[i] = (uint16_t)i;
    convert_row(in, BATON_F16, out, BATON_F32, N);
    convert_row(in, BATON_F16, out, BATON_BF16, N);
    convert_row(in, BATON_BF16, out, BATON_F32, N);
    convert_row(in, BATON_BF16, out, BATON_F16, N);
    for (int delta = -1; delta <= 1; delta++) { /* both sides of every border between two f16 */
        for (uint32_t i = 0; i < N; i++) {
            float x = (float)((decode(i, BATON_F16) + decode((i + 1) & 0xffff, BATON_F16)) / 2);
            memcpy(&mid[i], &x, 4);
            mid[i] += (uint32_t)delta;
        }
        convert_row(mid, BATON_F32, out, BATON_F16, N);
        for (uint32_t i = 0; i < N; i++)
            mid[i] = (i << 16 | 0x8000u) + (uint32_t)delta;
        convert_row(mid, BATON_F32, out, BATON_BF16, N);
    }
    for (uint32_t i = 0; i < N; i++)
        mid[i] = (uint32_t)(test_random(&seed) >> 32);
    convert_row(mid, BATON_F32, out, BATON_F16, N);
    convert_row(mid, BATON_F32, out, BATON_BF16, N);
    free(in);
    free(out);
    free(mid);
}

/* ---- refusals ----------------------------------------------------------------------------- */

static void copy_refusals(void **state)
{
    struct baton_error e;
    uint8_t a[4 * 3 * 8 * 2], b[4 * 3 * 8 * 2];
    struct baton_kv_layout la, lb;
    struct baton_kv_view x = kv_dense_view(&la, BATON_BF16, 3, 8, a, a, 10, 4);
    struct baton_kv_view y = kv_dense_view(&lb, BATON_BF16, 3, 8, b, NULL, 10, 4);
    memset(b, 0x11, sizeof b);
    test_fails(kv_copy(&y, &x, KV_K, 9, 2, &e), BATON_ERR_USAGE, "[9, 11)", &e);
    test_fails(kv_copy(&y, &x, KV_K, 13, 2, &e), BATON_ERR_USAGE, "[13, 15)", &e);
    test_fails(kv_copy(&y, &x, KV_K, 4294967295u, 2, &e), BATON_ERR_USAGE, "4294967297", &e);
    test_fails(kv_copy(&y, &x, KV_V, 10, 1, &e), BATON_ERR_USAGE, "without V", &e);
    lb.dtype = BATON_I8;
    test_fails(kv_copy(&y, &x, KV_K, 10, 1, &e), BATON_ERR_INPUT, "scales of 0", &e);
    y = kv_dense_view(&lb, BATON_BF16, 4, 6, b, NULL, 10, 4);
    test_fails(kv_copy(&y, &x, KV_K, 10, 1, &e), BATON_ERR_MISMATCH, "3 heads of 8", &e);
    y = kv_dense_view(&lb, BATON_BF16, 3, 8, b, NULL, 10, 4);
    int32_t table[4] = {0, 0, 0, -1};
    lb.block = 4;
    lb.stride_block = sizeof b;
    y.blocks = table;
    y.n_blocks = 4;
    test_fails(kv_copy(&y, &x, KV_K, 11, 2, &e), BATON_ERR_USAGE, "position 12", &e);
    y.n_blocks = 2;
    test_fails(kv_copy(&y, &x, KV_K, 11, 2, &e), BATON_ERR_USAGE, "position 11", &e);
    for (size_t i = 0; i < sizeof b; i++)
        assert_int_equal(b[i], 0x11);
}

/* What the strides have no room for would lie on other heads. */
static void more_than_the_strides_hold(void **state)
{
    struct baton_error e;
    uint8_t a[2 * 3 * 8 * 6], b[sizeof a];
    struct baton_kv_layout la, lb;
    int32_t table[2] = {1, 2};
    struct baton_kv_view x = kv_dense_view(&la, BATON_BF16, 3, 8, a, NULL, 0, 6);
    struct baton_kv_view y = kv_dense_view(&lb, BATON_BF16, 3, 8, b, NULL, 0, 6);
    memset(a, 0x22, sizeof a);
    memset(b, 0x11, sizeof b);
    test_ok(kv_copy(&y, &x, KV_K, 0, 6, &e), &e);
    memset(b, 0x11, sizeof b);
    y.end = 7;
    test_fails(kv_copy(&y, &x, KV_K, 0, 6, &e), BATON_ERR_USAGE, "room for 6", &e);
    lb.block = 2; /* [head][block][row][dim]: three blocks a head */
    lb.stride_block = 2 * lb.stride_position;
    y.blocks = table;
    y.n_blocks = 2;
    test_ok(kv_copy(&y, &x, KV_K, 0, 4, &e), &e);
    memset(b, 0x11, sizeof b);
    table[1] = 3;
    test_fails(kv_copy(&y, &x, KV_K, 0, 4, &e), BATON_ERR_USAGE, "room for 3", &e);
    for (size_t i = 0; i < sizeof b; i++)
        assert_int_equal(b[i], 0x11);
}

/* A sequence of one position may lie under any axis, also one that steps as far as it does. */
static void one_position_under_another_axis(void **state)
{
    struct baton_kv_layout l = {.version = 1,
                                .dtype = BATON_F32,
                                .kind = BATON_KV_PAGED,
                                .alignment = 1,
                                .kv_heads = 1,
                                .head_dim = 12,
                                .head_dim_padded = 12,
                                .stride_dim = 80,
                                .stride_position = 80,
                                .stride_head = 960};
    struct baton_error e;
    uint8_t a[12 * 80] = {0}, b[12 * 4];
    struct baton_kv_layout lb;
    struct baton_kv_view x = {.layout = &l, .k = a, .end = 1, .n_blocks = 1};
    struct baton_kv_view y = kv_dense_view(&lb, BATON_F32, 1, 12, b, NULL, 0, 1);
    int32_t table[1] = {0};
    x.blocks = table;
    test_ok(kv_copy(&y, &x, KV_K, 0, 1, &e), &e);
    x.end = 2;
    test_fails(kv_copy(&y, &x, KV_K, 0, 1, &e), BATON_ERR_USAGE, "room for 1", &e);
}

/* Rings and slid windows hold the newest rows alone. */
static void windows_hold_the_newest(void **state)
{
    struct baton_error e;
    uint8_t a[2 * 100], ring[2 * 5] = {0};
    struct baton_kv_layout la, lr;
    for (uint32_t i = 0; i < sizeof a; i++)
        a[i] = (uint8_t)(i / 2);
    struct baton_kv_view x = kv_dense_view(&la, BATON_BF16, 1, 1, a, NULL, 0, 100);
    struct baton_kv_view r = kv_dense_view(&lr, BATON_BF16, 1, 1, ring, NULL, 0, 5);
    lr.kind = BATON_KV_RING;
    lr.rows = 5;
    r.end = 12;
    test_fails(kv_copy(&r, &x, KV_K, 6, 1, &e), BATON_ERR_USAGE, "[7, 12)", &e);
    test_fails(kv_copy(&x, &r, KV_K, 6, 1, &e), BATON_ERR_USAGE, "[7, 12)", &e);
    test_fails(kv_copy(&x, &r, KV_K, 11, 2, &e), BATON_ERR_USAGE, "[7, 12)", &e);
    test_fails(kv_copy(&r, &x, KV_K, 12, 6, &e), BATON_ERR_USAGE, "[13, 18)", &e);
    r.first = 9;
    test_fails(kv_copy(&x, &r, KV_K, 8, 1, &e), BATON_ERR_USAGE, "[9, 12)", &e);
    r.first = 0;
    r.end = 6; /* position 0 was the first to fall out */
    test_fails(kv_copy(&x, &r, KV_K, 0, 1, &e), BATON_ERR_USAGE, "[1, 6)", &e);
    r.end = 5;
    test_ok(kv_copy(&x, &r, KV_K, 0, 1, &e), &e);
    r.end = 12;
    test_ok(kv_copy(&r, &x, KV_K, 12, 5, &e), &e);
    for (uint32_t p = 12; p < 17; p++)
        assert_int_equal(ring[2 * (p % 5)], p);
    lr.kind = BATON_KV_SLID;
    r.end = 20;
    test_fails(kv_copy(&r, &x, KV_K, 20, 1, &e), BATON_ERR_USAGE, "[15, 20)", &e);
    test_ok(kv_copy(&r, &x, KV_K, 15, 5, &e), &e);
    for (uint32_t p = 15; p < 20; p++)
        assert_int_equal(ring[2 * (p - 15)], p);
    r.end = 3; /* younger than its window: the rows behind hold nothing */
    test_ok(kv_copy(&r, &x, KV_K, 0, 3, &e), &e);
    assert_int_equal(ring[2 * 0], 0);
    assert_int_equal(ring[2 * 2], 2);
    assert_int_equal(ring[2 * 3], 18);
}

/* Whatever record passes has no two elements that share a byte. */
static void accepted_records_do_not_overlap(void **state)
{
    int passed = 0;
    for (int round = 0; round < 20000; round++) {
        struct baton_kv_layout l = {
            .version = 1, .dtype = BATON_BF16, .kind = BATON_KV_PAGED, .alignment = 2};
        l.kv_heads = test_range(&seed, 1, 3);
        l.head_dim = test_range(&seed, 1, 3);
        l.head_dim_padded = l.head_dim + test_range(&seed, 0, 1);
        l.block = test_range(&seed, 1, 3);
        l.joint = (uint8_t)test_range(&seed, 0, 1);
        l.stride_kv = l.joint ? 2 * test_range(&seed, 0, 40) : 0;
        l.stride_block = 2 * test_range(&seed, 0, 60);
        l.stride_head = 2 * test_range(&seed, 0, 20);
        l.stride_position = 2 * test_range(&seed, 0, 20);
        l.stride_dim = 2 * test_range(&seed, 0, 8);
        if (kv_layout_check(&l, NULL))
            continue;
        passed++;
        /* As many blocks as fit below the next axis outward; two of them at most here. */
        int64_t outward = INT64_MAX;
        if (l.joint && l.stride_kv >= l.stride_block)
            outward = l.stride_kv;
        if (l.kv_heads > 1 && l.stride_head >= l.stride_block && l.stride_head < outward)
            outward = l.stride_head;
        if (l.block > 1 && l.stride_position >= l.stride_block && l.stride_position < outward)
            outward = l.stride_position;
        if (l.head_dim_padded > 1 && l.stride_dim >= l.stride_block && l.stride_dim < outward)
            outward = l.stride_dim;
        uint32_t n_blocks = outward < 2 * l.stride_block ? 1 : 2;
        uint8_t seen[2000] = {0};
        for (uint32_t b = 0; b < n_blocks; b++)
            for (uint32_t kv = 0; kv < 1u + l.joint; kv++)
                for (uint32_t h = 0; h < l.kv_heads; h++)
                    for (uint32_t p = 0; p < l.block; p++)
                        for (uint32_t d = 0; d < l.head_dim_padded; d++) {
                            int64_t at = b * l.stride_block + kv * l.stride_kv + h * l.stride_head +
                                         p * l.stride_position + d * l.stride_dim;
                            assert_int_equal(seen[at]++, 0);
                        }
    }
    assert_true(passed > 20);
}

static void bad_records(void **state)
{
    struct baton_error e;
    struct baton_kv_layout good, l;
    kv_dense_view(&good, BATON_F16, 2, 8, NULL, NULL, 0, 100);
    test_ok(kv_layout_check(&good, &e), &e);
#define BAD(change, code, word)                                                                    \
    l = good;                                                                                      \
    change;                                                                                        \
    test_fails(kv_layout_check(&l, &e), code, word, &e)
    BAD(l.version = 2, BATON_ERR_UNSUPPORTED, "version 2");
    BAD(l.dtype = BATON_I8, BATON_ERR_INPUT, "scales of 0");
    BAD((l.dtype = BATON_I8, l.scale_block = 1025), BATON_ERR_INPUT, "scales of 1025");
    BAD((l.dtype = BATON_I8, l.scale_block = 8), BATON_ERR_INPUT, "stride_dim 2");
    BAD((l.dtype = BATON_I8, l.scale_block = 8, l.stride_dim = 1, l.stride_position = 8),
        BATON_ERR_INPUT, "stride_position 8 overlaps 12");
    BAD(l.scale_block = 8, BATON_ERR_INPUT, "scales of 8");
    BAD(l.dtype = 0, BATON_ERR_INPUT, "dtype 0");
    BAD(l.dtype = 5, BATON_ERR_INPUT, "dtype 5");
    BAD(l.kind = 0, BATON_ERR_INPUT, "kind 0");
    BAD(l.kind = 4, BATON_ERR_INPUT, "kind 4");
    BAD(l.joint = 2, BATON_ERR_INPUT, "joint 2");
    BAD(l.zero_fill = 2, BATON_ERR_INPUT, "zero_fill 2");
    BAD(l.alignment = 0, BATON_ERR_INPUT, "alignment 0");
    BAD(l.alignment = 48, BATON_ERR_INPUT, "alignment 48");
    BAD(l.kv_heads = 0, BATON_ERR_INPUT, "0 heads");
    BAD(l.kv_heads = 0x80000000u, BATON_ERR_INPUT, "2147483648 heads");
    BAD(l.head_dim = 0, BATON_ERR_INPUT, "head_dim 0");
    BAD(l.head_dim_padded = 7, BATON_ERR_INPUT, "padded to 7");
    BAD(l.head_dim_padded = 4294967295u, BATON_ERR_INPUT, "padded to");
    BAD(l.block = 1025, BATON_ERR_INPUT, "block 1025");
    BAD(l.rows = 1, BATON_ERR_INPUT, "1 rows");
    BAD(l.kind = BATON_KV_RING, BATON_ERR_INPUT, "0 rows");
    BAD(l.scale_block = 32, BATON_ERR_INPUT, "scales");
    BAD(l.stride_kv = 64, BATON_ERR_INPUT, "stride_kv");
    BAD(l.joint = 1, BATON_ERR_INPUT, "stride_kv 0");
    BAD(l.stride_head = -2, BATON_ERR_INPUT, "stride_head -2");
    BAD(l.stride_head = INT64_MAX - 1, BATON_ERR_INPUT, "stride_head");
    BAD(l.stride_position = 15, BATON_ERR_INPUT, "stride_position 15");
    BAD(l.stride_position = 14, BATON_ERR_INPUT, "overlaps");
    BAD((l.block = 16, l.alignment = 64, l.stride_block = 4032 + 32), BATON_ERR_INPUT,
        "alignment 64");
    BAD((l.block = 1024, l.stride_block = 8192), BATON_ERR_INPUT, "overlaps");
#undef BAD
    assert_int_equal(kv_piece_bytes(BATON_BF16, 4, 64, 100), 4 * 64 * 100 * 2);
    assert_int_equal(kv_piece_bytes(BATON_F32, 4294967295u, 4294967295u, 4294967295u), SIZE_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_pairs),
        cmocka_unit_test(round_trips),
        cmocka_unit_test(every_half),
        cmocka_unit_test(copy_refusals),
        cmocka_unit_test(more_than_the_strides_hold),
        cmocka_unit_test(one_position_under_another_axis),
        cmocka_unit_test(windows_hold_the_newest),
        cmocka_unit_test(accepted_records_do_not_overlap),
        cmocka_unit_test(bad_records),
    };
    seed = test_seed();
    return cmocka_run_group_tests_name("kv layout", tests, NULL, NULL);
}
