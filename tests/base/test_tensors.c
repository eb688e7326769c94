/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors written in pieces and read back; what is not finished leaves the old file. Damaged
 * headers are in tests/model/test_safetensors.c, which goes through the same reader. */
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "tests/temp.h"

static uint64_t seed;

static const char *const metadata[] = {"a", "1", "quote\"d", "\xED\x95\x9C\n", NULL};

/* Bytes that go to tensors of any shape in any pieces come back. */
static void round_trips(void **state)
{
    static const char *const dtypes[] = {"I64", "F32", "I32", "BF16", "F16", "I8"};
    struct baton_error e;
    for (int round = 0; round < 40; round++) {
        struct base_tensors_out *o;
        struct base_tensors *t;
        char name[16];
        uint64_t shape[6][3];
        size_t total = 0, at = 0;
        uint32_t n_dims = test_range(&seed, 0, 3), big = round % 8 == 7 ? 2000 : 1;
        test_ok(base_tensors_create(&o, path, round % 3 ? metadata : NULL, &e), &e);
        for (int i = 0; i < 6; i++) {
            size_t bytes = base_tensors_width(dtypes[i]);
            for (uint32_t d = 0; d < n_dims; d++)
                bytes *= shape[i][d] = test_range(&seed, 0, 12) * (d ? 1 : big);
            snprintf(name, sizeof name, "t%d", i);
            test_ok(base_tensors_declare(o, name, dtypes[i], n_dims, shape[i], &e), &e);
            total += bytes;
        }
        uint8_t *data = malloc(total + 1);
        for (size_t i = 0; i < total; i++)
            data[i] = (uint8_t)(test_random(&seed) >> 30);
        while (at < total) {
            size_t piece = 1 + test_random(&seed) % (total - at);
            test_ok(base_tensors_write(o, data + at, piece, &e), &e);
            at += piece;
        }
        test_fails(base_tensors_write(o, data, 1, &e), BATON_ERR_USAGE, "more bytes", &e);
        test_ok(base_tensors_commit(o, &e), &e);
        base_tensors_discard(o);
        assert_int_equal(folder_count(), 1);
        test_ok(base_tensors_open(path, &t, &e), &e);
        assert_int_equal(base_tensors_count(t), 6);
        at = 0;
        for (int i = 0; i < 6; i++) {
            const struct base_tensor *x = base_tensors_at(t, (size_t)i);
            snprintf(name, sizeof name, "t%d", i);
            assert_ptr_equal(x, base_tensors_find(t, name));
            assert_string_equal(x->dtype, dtypes[i]);
            assert_int_equal(x->n_dims, n_dims);
            assert_memory_equal(x->shape, shape[i], n_dims * sizeof **shape);
            assert_memory_equal(x->data, data + at, x->bytes);
            at += x->bytes;
        }
        assert_int_equal(at, total);
        const char *value = base_tensors_metadata(t, "quote\"d");
        assert_true(round % 3 ? !strcmp(value, "\xED\x95\x9C\n") : !value);
        uint64_t header; /* tensors lie aligned in the file */
        memcpy(&header, base_tensors_file(t)->data, sizeof header);
        assert_int_equal(header % 8, 0);
        base_tensors_close(t);
        free(data);
    }
}

static void expect_old(void)
{
    struct baton_error e;
    char *text;
    size_t n;
    test_ok(base_file_read(path, 1000, &text, &n, &e), &e);
    assert_string_equal(text, "old");
    free(text);
    assert_int_equal(folder_count(), 1);
}

static struct base_tensors_out *begin(uint64_t elements)
{
    struct baton_error e;
    struct base_tensors_out *o;
    test_ok(base_tensors_create(&o, path, metadata, &e), &e);
    test_ok(base_tensors_declare(o, "t", "F32", 1, &elements, &e), &e);
    return o;
}

static void failures_keep_the_old_file(void **state)
{
    struct baton_error e;
    struct base_tensors_out *o;
    static uint8_t zeros[4u << 20];
    const uint64_t huge[] = {UINT64_C(1) << 40, UINT64_C(1) << 40};
    static const char *const not_text[] = {"key", "\xff", NULL};
    struct rlimit old, small = {100000, 100000};
    char nowhere[160];
    test_ok(base_file_write(path, "old", 3, &e), &e);
    o = begin(10); /* given up */
    test_ok(base_tensors_write(o, zeros, 20, &e), &e);
    test_fails(base_tensors_commit(o, &e), BATON_ERR_USAGE, "20 of 40", &e);
    base_tensors_discard(o);
    expect_old();
    o = begin(1);
    test_fails(base_tensors_declare(o, "u", "F64", 0, NULL, &e), BATON_ERR_USAGE, "tensor u", &e);
    test_fails(base_tensors_declare(o, "u", "F32", 2, huge, &e), BATON_ERR_USAGE, "tensor u", &e);
    test_fails(base_tensors_declare(o, "\xff", "F32", 0, NULL, &e), BATON_ERR_USAGE, "UTF-8", &e);
    test_ok(base_tensors_write(o, zeros, 4, &e), &e);
    test_fails(base_tensors_declare(o, "u", "F32", 0, NULL, &e), BATON_ERR_USAGE, "tensor u", &e);
    base_tensors_discard(o);
    expect_old();
    o = begin(1u << 20);
    signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes stands for a full disk */
    getrlimit(RLIMIT_FSIZE, &old);
    small.rlim_max = old.rlim_max;
    setrlimit(RLIMIT_FSIZE, &small);
    int rc = base_tensors_write(o, zeros, sizeof zeros, &e);
    setrlimit(RLIMIT_FSIZE, &old);
    assert_int_equal(rc, BATON_ERR_IO);
    base_tensors_discard(o);
    expect_old();
    test_fails(base_tensors_create(&o, path, not_text, &e), BATON_ERR_USAGE, "UTF-8", &e);
    expect_old();
    snprintf(nowhere, sizeof nowhere, "%s/no/where", folder);
    test_fails(base_tensors_create(&o, nowhere, NULL, &e), BATON_ERR_IO, "no/where", &e);
    test_fails(base_tensors_create(&o, folder, NULL, &e), BATON_ERR_IO, "folder", &e);
    base_tensors_discard(NULL);
}

/* A device is written, not replaced; behind a link the file is replaced, not the link. */
static void special_files(void **state)
{
    struct baton_error e;
    struct base_tensors_out *o;
    struct stat st;
    char link[160];
    test_ok(base_tensors_create(&o, "/dev/null", NULL, &e), &e);
    test_ok(base_tensors_commit(o, &e), &e);
    base_tensors_discard(o);
    assert_int_equal(stat("/dev/null", &st), 0);
    assert_true(S_ISCHR(st.st_mode));
    test_ok(base_tensors_create(&o, "/dev/full", NULL, &e), &e);
    test_fails(base_tensors_commit(o, &e), BATON_ERR_IO, "No space", &e);
    base_tensors_discard(o);
    snprintf(link, sizeof link, "%s/link", folder);
    assert_int_equal(symlink(path, link), 0);
    test_ok(base_file_write(path, "old", 3, &e), &e);
    test_ok(base_tensors_create(&o, link, NULL, &e), &e);
    test_ok(base_tensors_commit(o, &e), &e);
    base_tensors_discard(o);
    assert_int_equal(lstat(link, &st), 0);
    assert_true(S_ISLNK(st.st_mode));
    assert_int_equal(stat(path, &st), 0);
    assert_true(st.st_size > 3);
    assert_int_equal(folder_count(), 2);
    unlink(link);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trips),
        cmocka_unit_test(failures_keep_the_old_file),
        cmocka_unit_test(special_files),
    };
    seed = test_seed();
    return cmocka_run_group_tests_name("base tensors", tests, folder_open, folder_close);
}
