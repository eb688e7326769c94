/* SPDX-License-Identifier: Apache-2.0 */
/* Files: mapping, reading with a limit, atomic writing, joining. */
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "../test.h"

static char dir[] = "/tmp/baton-test-file-XXXXXX";

static const char *in_dir(const char *name)
{
    static char buf[4][512];
    static unsigned turn;
    char *p = buf[turn++ % 4];
    snprintf(p, sizeof *buf, "%s/%s", dir, name);
    return p;
}

static unsigned entries(void)
{
    unsigned n = 0;
    DIR *d = opendir(dir);
    for (struct dirent *ent; (ent = readdir(d));)
        n += ent->d_name[0] != '.';
    closedir(d);
    return n;
}

static int make_dir(void **state)
{
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_dir(void **state)
{
    DIR *d = opendir(dir);
    for (struct dirent *ent; (ent = readdir(d));)
        if (ent->d_name[0] != '.')
            unlink(in_dir(ent->d_name));
    closedir(d);
    return rmdir(dir);
}

static void written_is_read_and_mapped(void **state)
{
    uint64_t seed = test_seed();
    struct baton_error e;
    static uint8_t data[70001];
    static const size_t sizes[] = {0, 1, 4095, 4096, 4097, 70001};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t n = sizes[i], got = 12345;
        for (size_t k = 0; k < n; k++)
            data[k] = (uint8_t)test_random(&seed);
        test_ok(base_file_write(in_dir("a"), data, n, &e), &e);
        char *text = NULL;
        test_ok(base_file_read(in_dir("a"), n, &text, &got, &e), &e);
        assert_int_equal(got, n);
        assert_memory_equal(text, data, n);
        assert_int_equal(text[n], 0);
        free(text);
        struct base_file f = {0};
        test_ok(base_file_open(&f, in_dir("a"), &e), &e);
        assert_int_equal(f.size, n);
        assert_int_equal(f.data == NULL, n == 0);
        base_file_drop(&f, 0, n); /* content comes back from the file */
        base_file_drop(&f, 100, SIZE_MAX);
        base_file_drop(&f, n + 5, 10);
        if (n)
            assert_memory_equal(f.data, data, n);
        int fd = f.fd;
        base_file_close(&f);
        assert_int_equal(fcntl(fd, F_GETFD), -1);
        if (n > 0)
            test_fails(base_file_read(in_dir("a"), n - 1, &text, &got, &e), BATON_ERR_INPUT,
                       "larger than", &e);
    }
    struct base_file zero = {0};
    base_file_close(&zero);
    assert_int_equal(entries(), 1); /* no temporary name is left */
}

static void unreadable_files_are_named(void **state)
{
    struct baton_error e;
    struct base_file f = {0};
    char *text;
    size_t n;
    test_fails(base_file_open(&f, "/nonexistent/x", &e), BATON_ERR_IO, "/nonexistent/x: No such",
               &e);
    test_fails(base_file_open(&f, dir, &e), BATON_ERR_IO, "not a regular file", &e);
    test_fails(base_file_open(&f, "", &e), BATON_ERR_IO, "empty", &e);
    test_fails(base_file_write("", "x", 1, &e), BATON_ERR_IO, "empty", &e);
    unsigned before = entries();
    test_ok(base_file_try(in_dir("to come"), &e), &e);
    test_ok(base_file_try("/dev/full", &e), &e);
    test_fails(base_file_try("", &e), BATON_ERR_IO, "empty", &e);
    test_fails(base_file_try(dir, &e), BATON_ERR_IO, "folder", &e);
    test_fails(base_file_try(in_dir("none/at all"), &e), BATON_ERR_IO, "none/at all", &e);
    assert_int_equal(entries(), before);
    test_fails(base_file_read(dir, 100, &text, &n, &e), BATON_ERR_IO, "not a regular", &e);
    test_fails(base_file_read("/dev/zero", 100, &text, &n, &e), BATON_ERR_IO, "not a regular", &e);
    test_fails(base_stream_read(dir, 100, &text, &n, &e), BATON_ERR_IO, "directory", &e);
    test_fails(base_stream_read("/dev/zero", 100, &text, &n, &e), BATON_ERR_INPUT, "100 bytes", &e);
    assert_int_equal(mkfifo(in_dir("fifo"), 0600), 0);
    test_fails(base_file_read(in_dir("fifo"), 100, &text, &n, &e), BATON_ERR_IO, "not a regular",
               &e);
    test_fails(base_file_open(&f, in_dir("fifo"), &e), BATON_ERR_IO, "not a regular", &e);
    unlink(in_dir("fifo"));
    test_ok(base_file_read("/proc/self/status", 1 << 20, &text, &n, &e), &e); /* size unknown */
    assert_true(n > 100 && strlen(text) == n);
    free(text);
}

static void full_disk_leaves_the_old_file(void **state)
{
    struct baton_error e;
    struct rlimit old, small;
    char *big = base_try_alloc(1 << 20, 1, &e), *text;
    size_t n;
    test_ok(base_file_write(in_dir("keep"), "old content", 11, &e), &e);
    unsigned before = entries();
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &old);
    small = (struct rlimit){.rlim_cur = 65536, .rlim_max = old.rlim_max};
    setrlimit(RLIMIT_FSIZE, &small);
    int rc = base_file_write(in_dir("keep"), big, 1 << 20, &e);
    setrlimit(RLIMIT_FSIZE, &old);
    signal(SIGXFSZ, handler);
    assert_int_equal(rc, BATON_ERR_IO);
    assert_non_null(strstr(e.text, "keep"));
    test_ok(base_file_read(in_dir("keep"), 100, &text, &n, &e), &e);
    assert_string_equal(text, "old content");
    assert_int_equal(entries(), before);
    free(text);
    free(big);
    /* the file in use is /dev/full: every write says "no space" */
    test_fails(base_file_write("/dev/full", "x", 1, &e), BATON_ERR_IO, "No space", &e);
}

static void devices_and_links_survive(void **state)
{
    struct baton_error e;
    struct stat st;
    char *text;
    size_t n;
    test_ok(base_file_write("/dev/null", "x", 1, &e), &e);
    assert_int_equal(stat("/dev/null", &st), 0);
    assert_true(S_ISCHR(st.st_mode));
    test_fails(base_file_write(dir, "x", 1, &e), BATON_ERR_IO, "folder", &e);
    test_fails(base_file_write("/nonexistent/x", "x", 1, &e), BATON_ERR_IO, "/nonexistent/x", &e);
    test_ok(base_file_write(in_dir("target"), "1", 1, &e), &e);
    assert_int_equal(symlink("target", in_dir("link")), 0);
    test_ok(base_file_write(in_dir("link"), "22", 2, &e), &e);
    assert_int_equal(lstat(in_dir("link"), &st), 0);
    assert_true(S_ISLNK(st.st_mode));
    test_ok(base_file_read(in_dir("target"), 10, &text, &n, &e), &e);
    assert_string_equal(text, "22");
    free(text);
    mode_t mask = umask(027);
    test_ok(base_file_write(in_dir("masked"), "1", 1, &e), &e);
    umask(mask);
    assert_int_equal(stat(in_dir("masked"), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0640);
}

static void names_stay_inside(void **state)
{
    static const char *const bad[] = {"", "/etc/passwd", "..", "../x", "a/../../x", "a/..", "/"};
    static const char *const good[][2] = {
        {"x", "d/x"}, {"a/b", "d/a/b"}, {"..x", "d/..x"}, {"x..", "d/x.."}, {"...", "d/..."}};
    struct baton_error e;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_null(base_path_join("d", bad[i], &e));
        assert_int_equal(e.code, BATON_ERR_INPUT);
    }
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        char *p = base_path_join("d", good[i][0], &e);
        assert_string_equal(p, good[i][1]);
        free(p);
        p = base_path_join("d/", good[i][0], &e);
        assert_string_equal(p, good[i][1]);
        free(p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(written_is_read_and_mapped),
        cmocka_unit_test(unreadable_files_are_named),
        cmocka_unit_test(full_disk_leaves_the_old_file),
        cmocka_unit_test(devices_and_links_survive),
        cmocka_unit_test(names_stay_inside),
    };
    return cmocka_run_group_tests_name("base-file", tests, make_dir, remove_dir);
}
