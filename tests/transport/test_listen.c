/* SPDX-License-Identifier: Apache-2.0 */
/* Addresses, listeners, connecting: what works, and what each failure says. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "ends.h"

#define SECOND 1000000000ull

static char folder[40];
static char path[80], address[100];

static int folder_open(void **state)
{
    snprintf(folder, sizeof folder, "/tmp/baton-test-XXXXXX");
    if (!mkdtemp(folder))
        return -1;
    snprintf(path, sizeof path, "%s/s", folder);
    snprintf(address, sizeof address, "unix:%s", path);
    return 0;
}

static int folder_close(void **state)
{
    unlink(path);
    return rmdir(folder);
}

static void bad_addresses(void **state)
{
    static const char *const bad[] = {
        "",
        ":",
        "localhost",
        "localhost:",
        ":80",
        "127.0.0.1:65536",
        "127.0.0.1:-1",
        "127.0.0.1:+1",
        "127.0.0.1: 1",
        "127.0.0.1:1x",
        "127.0.0.1:99999999999999999999",
        "::1:80",
        "[::1]",
        "[::1]80",
        "[::1:80",
        "[]:80",
        "unix:",
        "host.invalid:80",
    };
    struct baton_error e;
    struct transport_listener *l = NULL;
    struct transport *t = NULL;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char word[80];
        snprintf(word, sizeof word, "'%s'", bad[i]);
        test_fails(transport_listen(bad[i], &l, &e), BATON_ERR_USAGE, word, &e);
        test_fails(transport_connect(bad[i], SECOND, &t, &e), BATON_ERR_USAGE, word, &e);
    }
    char longest[400];
    memset(longest, 'x', sizeof longest);
    memcpy(longest, "unix:/", 6);
    longest[sizeof longest - 1] = 0;
    test_fails(transport_listen(longest, &l, &e), BATON_ERR_USAGE, "too long", &e);
    memset(longest, 'x', 390);
    memcpy(longest + 390, ":80", 4);
    test_fails(transport_connect(longest, SECOND, &t, &e), BATON_ERR_USAGE, "no host", &e);
    assert_null(l);
    assert_null(t);
}

static void round_trip(const char *where, const char *prefix)
{
    struct baton_error e;
    struct ends x;
    struct transport_listener *l;
    struct transport *none = NULL;
    char word[4];
    size_t got;
    test_ok(transport_listen(where, &l, &e), &e);
    assert_int_equal(strncmp(transport_listener_address(l), prefix, strlen(prefix)), 0);
    test_fails(transport_accept(l, &none, &e), BATON_ERR_BUSY, prefix, &e);
    test_ok(transport_connect(transport_listener_address(l), 10 * SECOND, &x.a, &e), &e);
    struct pollfd p = {.fd = transport_listener_fd(l), .events = POLLIN};
    assert_int_equal(poll(&p, 1, HANG_MS), 1);
    test_ok(transport_accept(l, &x.b, &e), &e);
    test_ok(ends_send(x.a, "ping", 4, &e), &e);
    test_ok(ends_recv(x.b, word, 4, &got, &e), &e);
    assert_memory_equal(word, "ping", 4);
    transport_listener_close(l);
    test_ok(ends_send(x.b, "pong", 4, &e), &e); /* outlives its listener */
    test_ok(ends_recv(x.a, word, 4, &got, &e), &e);
    assert_memory_equal(word, "pong", 4);
    ends_close(&x);
}

static void port_zero_picks_one(void **state)
{
    round_trip("127.0.0.1:0", "127.0.0.1:");
    round_trip("localhost:0", "localhost:");
}

static void ipv6(void **state)
{
    struct sockaddr_in6 sa = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = socket(AF_INET6, SOCK_STREAM, 0);
    bool there = fd >= 0 && bind(fd, (struct sockaddr *)&sa, sizeof sa) == 0;
    if (fd >= 0)
        close(fd);
    if (!there) {
        print_message("SKIP: no IPv6 loopback on this host\n");
        skip();
    }
    round_trip("[::1]:0", "[::1]:");
}

static void unix_path_goes_with_its_listener(void **state)
{
    struct stat st;
    round_trip(address, address);
    assert_int_not_equal(lstat(path, &st), 0);
}

static void path_in_use(void **state)
{
    struct baton_error e;
    struct transport_listener *l, *second = NULL;
    struct stat st;
    test_ok(transport_listen(address, &l, &e), &e);
    test_fails(transport_listen(address, &second, &e), BATON_ERR_IO, address, &e);
    assert_int_equal(lstat(path, &st), 0);
    /* A file that took the path's place is not ours. */
    unlink(path);
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fclose(f);
    transport_listener_close(l);
    assert_int_equal(lstat(path, &st), 0);
    test_fails(transport_listen(address, &second, &e), BATON_ERR_IO, address, &e);
    assert_int_equal(lstat(path, &st), 0);
    unlink(path);
}

static void stale_path_is_taken_over(void **state)
{
    struct sockaddr_un sa = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    snprintf(sa.sun_path, sizeof sa.sun_path, "%s", path);
    assert_int_equal(bind(fd, (struct sockaddr *)&sa, sizeof sa), 0);
    close(fd);
    round_trip(address, address);
}

static void port_in_use(void **state)
{
    struct baton_error e;
    struct transport_listener *l, *second = NULL;
    test_ok(transport_listen("127.0.0.1:0", &l, &e), &e);
    test_fails(transport_listen(transport_listener_address(l), &second, &e), BATON_ERR_IO,
               transport_listener_address(l), &e);
    transport_listener_close(l);
    transport_listener_close(NULL);
}

static void nobody_listens(void **state)
{
    struct baton_error e;
    struct transport_listener *l;
    struct transport *t = NULL;
    char was[80];
    test_ok(transport_listen("127.0.0.1:0", &l, &e), &e);
    snprintf(was, sizeof was, "%s", transport_listener_address(l));
    transport_listener_close(l);
    test_fails(transport_connect(was, 60 * SECOND, &t, &e), BATON_ERR_IO, was, &e);
    test_fails(transport_connect(address, 60 * SECOND, &t, &e), BATON_ERR_IO, address, &e);
    assert_null(t);
}

/* A listener that accepts nobody: its queue fills up, and a further connection gets no answer. */
static void full_queue(int family, struct sockaddr *sa, socklen_t n, const char *where)
{
    struct baton_error e;
    struct transport *t = NULL;
    int fill[64], n_fill = 0, fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK, 0);
    assert_int_equal(bind(fd, sa, n), 0);
    assert_int_equal(listen(fd, 0), 0);
    assert_int_equal(getsockname(fd, sa, &n), 0);
    char named[160];
    if (family == AF_INET)
        snprintf(named, sizeof named, "127.0.0.1:%u", ntohs(((struct sockaddr_in *)sa)->sin_port));
    else
        snprintf(named, sizeof named, "%s", where);
    for (bool full = false; !full && n_fill < 64; n_fill++) {
        fill[n_fill] = socket(family, SOCK_STREAM | SOCK_NONBLOCK, 0);
        full = connect(fill[n_fill], sa, n) != 0 && errno == EAGAIN;
        struct pollfd p = {.fd = fill[n_fill], .events = POLLOUT};
        full = full || poll(&p, 1, 50) == 0;
    }
    uint64_t begin = base_now_ns();
    test_fails(transport_connect(named, SECOND / 5, &t, &e), BATON_ERR_TIMEOUT, named, &e);
    assert_true(base_now_ns() - begin >= SECOND / 5);
    assert_null(t);
    while (n_fill > 0)
        close(fill[--n_fill]);
    close(fd);
}

static void no_answer(void **state)
{
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    full_queue(AF_INET, (struct sockaddr *)&in, sizeof in, NULL);
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    snprintf(un.sun_path, sizeof un.sun_path, "%s", path);
    full_queue(AF_UNIX, (struct sockaddr *)&un, sizeof un, address);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_addresses), cmocka_unit_test(port_zero_picks_one),
        cmocka_unit_test(ipv6),          cmocka_unit_test(unix_path_goes_with_its_listener),
        cmocka_unit_test(path_in_use),   cmocka_unit_test(stale_path_is_taken_over),
        cmocka_unit_test(port_in_use),   cmocka_unit_test(nobody_listens),
        cmocka_unit_test(no_answer),
    };
    return cmocka_run_group_tests_name("transport listen", tests, folder_open, folder_close);
}
