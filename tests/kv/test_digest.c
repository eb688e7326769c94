/* SPDX-License-Identifier: Apache-2.0 */
/* Slot digests: the documented bytes, the same from every layout and every split, and no two
 * slots that differ in anything alike. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
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

/* ---- copy and digest in one pass ------------------------------------------------------------ */

static void digest_copy(const struct slot *s, enum kv_digest_side side,
                        const struct baton_kv_view *dst, const struct baton_kv_view *src,
                        uint8_t out[32])
{
    struct baton_error e;
    struct kv_digest *d = digest_open(s);
    uint32_t end = s->first + s->n, mid = (s->first + test_range(&seed, 0, s->n)) / 64 * 64;
    mid = mid > s->first ? mid : s->first;
    test_ok(kv_digest_copy(d, side, dst, src, s->first, mid - s->first, &e), &e);
    test_ok(kv_digest_copy(d, side, dst, src, mid, end - mid, &e), &e);
    test_ok(kv_digest_final(d, out, &e), &e);
    kv_digest_close(d);
}

static void regions_copy(uint8_t *to[2], uint8_t *const from[2], const size_t bytes[2])
{
    for (int r = 0; r < 2; r++)
        if (bytes[r])
            memcpy(to[r], from[r], bytes[r]);
}

/* Between any two layouts and dtypes: the bytes that kv_copy leaves, the digest of the source. */
static void one_pass_is_two(void **state)
{
    struct baton_error e;
    for (int round = 0; round < 400; round++) {
        struct slot s = random_slot();
        struct shape x = shape_open(s.dtype, s.heads, s.dim, s.first, s.n, &seed);
        struct shape y = shape_open(random_dtype(&seed), s.heads, s.dim, s.first, s.n, &seed);
        uint8_t want[32], got[32], *before[2], *copied[2];
        x.view.layout = &x.l;
        y.view.layout = &y.l;
        for (int r = 0; r < 2; r++) {
            before[r] = malloc(y.bytes[r] + 1);
            copied[r] = malloc(y.bytes[r] + 1);
        }
        regions_copy(before, y.memory, y.bytes);
        digest_whole(&s, &x.view, want);
        test_ok(kv_copy(&y.view, &x.view, s.which, s.first, s.n, &e), &e);
        regions_copy(copied, y.memory, y.bytes);
        for (int side = KV_DIGEST_SOURCE; side <= KV_DIGEST_COPY; side++) {
            regions_copy(y.memory, before, y.bytes);
            digest_copy(&s, (enum kv_digest_side)side, &y.view, &x.view, got);
            assert_memory_equal(got, want, 32);
            for (int r = 0; r < 2; r++)
                if (y.bytes[r])
                    assert_memory_equal(y.memory[r], copied[r], y.bytes[r]);
        }
        for (int r = 0; r < 2; r++) {
            free(before[r]);
            free(copied[r]);
        }
        shape_close(&x);
        shape_close(&y);
    }
}

/* Another process writes to the source all the time: the digest is that of what arrived, whatever
 * that is. `wide`: converted on the way, which widening undoes exactly. */
static void racing_source(bool wide, uint8_t *shared, size_t bytes)
{
    struct slot s = {.layer = 1, .dtype = BATON_BF16, .heads = 4, .dim = 64, .n = 128};
    struct baton_kv_layout sl, dl, nl;
    struct baton_kv_view src = kv_dense_view(&sl, BATON_BF16, 4, 64, shared, NULL, 0, 128);
    uint8_t *to = malloc(2 * bytes), *narrow = malloc(bytes), got[32], want[32], last[32] = {0};
    struct baton_kv_view dst = kv_dense_view(&dl, wide ? BATON_F32 : BATON_BF16, 4, 64, to, NULL, 0,
                                             128);
    struct baton_kv_view back = kv_dense_view(&nl, BATON_BF16, 4, 64, narrow, NULL, 0, 128);
    struct baton_error e;
    int changes = 0;
    for (int i = 0; i < 3000 || (changes < 2 && i < 3000000); i++) {
        digest_copy(&s, KV_DIGEST_COPY, &dst, &src, got);
        test_ok(kv_copy(&back, &dst, KV_K, 0, 128, &e), &e);
        digest_whole(&s, &back, want);
        assert_memory_equal(got, want, 32);
        changes += memcmp(got, last, 32) != 0;
        memcpy(last, got, 32);
    }
    assert_true(changes >= 2); /* else nobody wrote */
    free(to);
    free(narrow);
}

static void a_changing_source(void **state)
{
    size_t bytes = 4 * 128 * 64 * 2;
    uint8_t *shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(shared != MAP_FAILED);
    memset(shared, 0x3C, bytes);
    pid_t pid = fork();
    if (pid == 0)
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* an assertion that fails here must not leave it */
    if (pid == 0)                         /* small numbers only: NaNs lose bits in a conversion */
        for (volatile uint8_t *p = shared;; p = p + 2 < shared + bytes ? p + 2 : shared)
            *p = (uint8_t)(*p + 1);
    racing_source(false, shared, bytes);
    racing_source(true, shared, bytes);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    munmap(shared, bytes);
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
    d = digest_open(&s);
    uint8_t small[2 * 100 * 4 * 4];
    struct baton_kv_view to = kv_dense_view(&other, BATON_F32, 2, 4, small, NULL, 0, 100);
    test_fails(kv_digest_copy(d, KV_DIGEST_COPY, &to, &v, 10, 118, &e), BATON_ERR_USAGE,
               "[10, 128)", &e);
    test_fails(kv_digest_copy(d, KV_DIGEST_COPY, &to, &v, 10, 53, &e), BATON_ERR_USAGE, "cut", &e);
    to = kv_dense_view(&other, BATON_F32, 1, 4, small, NULL, 0, 100);
    test_fails(kv_digest_copy(d, KV_DIGEST_COPY, &to, &v, 10, 54, &e), BATON_ERR_MISMATCH, "heads",
               &e);
    to = kv_dense_view(&other, BATON_BF16, 2, 4, small, NULL, 0, 100);
    test_fails(kv_digest_copy(d, KV_DIGEST_COPY, &v, &to, 10, 54, &e), BATON_ERR_MISMATCH, "dtype",
               &e);
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
        cmocka_unit_test(one_pass_is_two),
        cmocka_unit_test(a_changing_source),
        cmocka_unit_test(every_bit_counts),
        cmocka_unit_test(coordinates_count),
        cmocka_unit_test(order_counts),
        cmocka_unit_test(refusals),
    };
    seed = test_seed();
    return cmocka_run_group_tests_name("kv digest", tests, NULL, NULL);
}
