/* SPDX-License-Identifier: Apache-2.0 */
/* Heap forms, arena, large maps, errors. */
#include <errno.h>
#include <inttypes.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "../test.h"

static void arithmetic_overflow(void **state)
{
    size_t r = 77;
    assert_true(base_mul(3, 5, &r));
    assert_int_equal(r, 15);
    assert_false(base_mul(SIZE_MAX / 2, 3, &r));
    assert_int_equal(r, 15);
    assert_true(base_mul(0, SIZE_MAX, &r));
    assert_int_equal(r, 0);
    assert_true(base_add(SIZE_MAX - 1, 1, &r));
    assert_true(r == SIZE_MAX);
    assert_false(base_add(SIZE_MAX, 1, &r));
    assert_true(r == SIZE_MAX);
}

static void refused_sizes(void **state)
{
    struct baton_error e = {0};
    assert_null(base_try_alloc(SIZE_MAX / 4, 8, &e));
    assert_int_equal(e.code, BATON_ERR_NOMEM);
    assert_non_null(strstr(e.text, "8 bytes"));
    assert_null(base_try_alloc((size_t)PTRDIFF_MAX + 1, 1, &e));
    assert_null(base_try_alloc(1, (size_t)1 << 60, NULL));
    uint8_t *p = base_try_alloc(0, 8, &e);
    assert_non_null(p);
    uint8_t *q = base_try_realloc(p, 16, 1, &e);
    assert_non_null(q);
    memset(q, 0x5a, 16);
    assert_null(base_try_realloc(q, SIZE_MAX, 2, &e));
    assert_int_equal(q[15], 0x5a); /* the old array stays */
    free(q);
}

static void zeroed_and_copied(void **state)
{
    struct baton_error e;
    uint8_t *p = base_try_alloc(1000, 3, &e);
    for (int i = 0; i < 3000; i++)
        assert_int_equal(p[i], 0);
    free(p);
    char *s = base_try_strdup("caf\xc3\xa9", &e);
    assert_string_equal(s, "caf\xc3\xa9");
    free(s);
    s = base_try_strndup("abcdef", 3, &e);
    assert_string_equal(s, "abc");
    free(s);
    s = base_try_strndup(NULL, 0, &e);
    assert_string_equal(s, "");
    free(s);
    assert_null(base_try_strndup("a", SIZE_MAX, &e));
}

static void arena_blocks_do_not_overlap(void **state)
{
    enum { N = 3000 };
    static struct {
        uint8_t *p;
        size_t n;
        uint8_t fill;
    } blocks[N];
    uint64_t seed = test_seed();
    struct baton_error e;
    struct base_arena *a = NULL;
    size_t asked = 0;
    test_ok(base_arena_open(&a, &e), &e);
    for (int i = 0; i < N; i++) {
        size_t n = test_range(&seed, 0, i % 50 == 0 ? 20000 : 90);
        blocks[i].p = base_arena_alloc(a, n, 1, &e);
        blocks[i].n = n;
        blocks[i].fill = (uint8_t)test_random(&seed);
        asked += n;
        assert_non_null(blocks[i].p);
        assert_int_equal((uintptr_t)blocks[i].p % 16, 0);
        for (size_t k = 0; k < n; k++)
            assert_int_equal(blocks[i].p[k], 0);
        memset(blocks[i].p, blocks[i].fill, n);
    }
    for (int i = 0; i < N; i++)
        for (size_t k = 0; k < blocks[i].n; k++)
            if (blocks[i].p[k] != blocks[i].fill)
                fail_msg("block %d of %zu bytes was overwritten at %zu", i, blocks[i].n, k);
    assert_true(base_arena_bytes(a) >= asked && base_arena_bytes(a) <= asked + 16 * N);
    assert_string_equal(base_arena_strdup(a, "name", &e), "name");
    size_t before = base_arena_bytes(a);
    assert_null(base_arena_alloc(a, SIZE_MAX / 2, 3, &e));
    assert_null(base_arena_alloc(a, SIZE_MAX - 3, 1, &e));
    assert_null(base_arena_alloc(a, SIZE_MAX - 40, 1, &e));
    assert_int_equal(e.code, BATON_ERR_NOMEM);
    assert_int_equal(base_arena_bytes(a), before);
    base_arena_close(a);
    base_arena_close(NULL);
}

static void maps_are_zero_aligned_and_freed(void **state)
{
    struct baton_error e = {0};
    static const size_t sizes[] = {1, 4096, 100001, (2u << 20) - 1, 2u << 20, (6u << 20) + 5};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        uint8_t *p = base_map_alloc(sizes[i], false, &e);
        assert_non_null(p);
        if (sizes[i] >= 2u << 20)
            assert_int_equal((uintptr_t)p % (2u << 20), 0);
        for (size_t k = 0; k < sizes[i]; k += 509)
            assert_int_equal(p[k], 0);
        memset(p, 0xaa, sizes[i]);
        base_map_free(p, sizes[i]);
        unsigned char in[1];
        assert_int_equal(mincore((void *)((uintptr_t)p & ~(uintptr_t)4095), 1, in), -1);
    }
    base_map_free(NULL, 5);
}

static void map_refuses_more_than_there_is(void **state)
{
    struct baton_error e = {0};
    uint64_t available = base_memory_available();
    assert_true(available > 0);
    assert_null(base_map_alloc((size_t)available * 3, false, &e));
    assert_int_equal(e.code, BATON_ERR_NOMEM);
    char asked[32];
    snprintf(asked, sizeof asked, "%" PRIu64 " bytes asked", available * 3);
    assert_non_null(strstr(e.text, asked));
    assert_non_null(strstr(e.text, "available"));
    assert_null(base_map_alloc(SIZE_MAX, true, &e));
    assert_null(base_map_alloc(SIZE_MAX - 100, true, NULL));
}

static void shared_map_is_seen_after_fork(void **state)
{
    struct baton_error e;
    uint32_t *shared = base_map_alloc(64, true, &e), *own = base_map_alloc(64, false, &e);
    pid_t pid = fork();
    if (pid == 0) {
        shared[3] = 7;
        own[3] = 7;
        _exit(0);
    }
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_int_equal(shared[3], 7);
    assert_int_equal(own[3], 0);
    base_map_free(shared, 64);
    base_map_free(own, 64);
}

static void use_is_measured(void **state)
{
    uint64_t peak = 0, before = 0, after = 0;
    size_t bytes = 64u << 20;
    base_memory_used(&peak, &before);
    uint8_t *p = base_map_alloc(bytes, false, NULL);
    memset(p, 1, bytes);
    base_memory_used(&peak, &after);
    assert_true(after >= before + bytes - (8u << 20));
    assert_true(peak >= bytes);
    base_map_free(p, bytes);
    base_memory_used(NULL, &after);
    assert_true(after < before + bytes / 2);
}

static void errors_are_cut_on_utf8_borders(void **state)
{
    struct baton_error e;
    char text[600];
    for (int pad = 0; pad < 4; pad++) { /* one of them cuts inside the two-byte letters */
        memset(text, 'x', (size_t)pad);
        for (int i = 0; i < 200; i++)
            memcpy(text + pad + 2 * i, "\xc3\xa9", 3);
        assert_int_equal(base_fail(&e, BATON_ERR_PEER, "%s", text), BATON_ERR_PEER);
        size_t n = strlen(e.text);
        assert_true(n >= sizeof e.text - 3 && n < sizeof e.text);
        assert_int_equal((n - (size_t)pad) % 2, 0);
    }
    base_fail(&e, BATON_ERR_IO, "a\xff\n\x1b[1m\xc3\xa9\xc0\x80\xed\xa0\x80\xe2\x82\xac\xf0\x9f");
    assert_string_equal(e.text, "a???[1m\xc3\xa9?????\xe2\x82\xac??");
    assert_int_equal(base_fail(NULL, BATON_ERR_IO, "x"), BATON_ERR_IO);
    assert_int_equal(base_fail_errno(&e, BATON_ERR_IO, EMFILE, "f"), BATON_ERR_NOMEM);
    assert_int_equal(e.code, BATON_ERR_NOMEM);
    base_fail_errno(&e, BATON_ERR_IO, 2, "file %d", 5);
    assert_string_equal(e.text, "file 5: No such file or directory");
    assert_string_equal(base_code_name(BATON_ERR_INTERNAL), "internal");
    assert_string_equal(base_code_name(0), "ok");
    assert_string_equal(base_code_name(-99), "unknown");
    assert_string_equal(base_code_name(5), "unknown");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(arithmetic_overflow),
        cmocka_unit_test(refused_sizes),
        cmocka_unit_test(zeroed_and_copied),
        cmocka_unit_test(arena_blocks_do_not_overlap),
        cmocka_unit_test(maps_are_zero_aligned_and_freed),
        cmocka_unit_test(map_refuses_more_than_there_is),
        cmocka_unit_test(shared_map_is_seen_after_fork),
        cmocka_unit_test(use_is_measured),
        cmocka_unit_test(errors_are_cut_on_utf8_borders),
    };
    return cmocka_run_group_tests_name("base-memory", tests, NULL, NULL);
}
