/* SPDX-License-Identifier: Apache-2.0 */
/* Connected pairs of every kind, for the tests of this room. */
#ifndef TESTS_TRANSPORT_ENDS_H
#define TESTS_TRANSPORT_ENDS_H

#include <poll.h>
#include <sys/uio.h>
#include <unistd.h>

#include "../test.h"
#include "base/base.h"
#include "transport/transport.h"

enum kind { INPROC, UNIX, TCP, LISTENER, N_KINDS };

struct ends {
    struct transport *a, *b;
};

static inline void ends_of_fds(struct ends *x, const int fds[2])
{
    struct baton_error e;
    test_ok(transport_fd_open(fds[0], &x->a, &e), &e);
    test_ok(transport_fd_open(fds[1], &x->b, &e), &e);
}

static inline void ends_of_listener(struct ends *x, const char *address)
{
    struct baton_error e;
    struct transport_listener *l;
    test_ok(transport_listen(address, &l, &e), &e);
    test_ok(transport_connect(transport_listener_address(l), 10000000000ull, &x->a, &e), &e);
    struct pollfd p = {.fd = transport_listener_fd(l), .events = POLLIN};
    assert_int_equal(poll(&p, 1, 60000), 1);
    test_ok(transport_accept(l, &x->b, &e), &e);
    transport_listener_close(l);
}

/* `capacity`: of the in-process kind. */
static inline struct ends ends_open(enum kind kind, size_t capacity, bool cut_short, uint64_t *seed)
{
    struct baton_error e;
    struct ends x;
    int fds[2];
    if (kind == INPROC) {
        test_ok(transport_inproc_pair(capacity, &x.a, &x.b, &e), &e);
    } else if (kind == LISTENER) {
        ends_of_listener(&x, "127.0.0.1:0");
    } else {
        test_ok((kind == UNIX ? transport_socketpair : transport_tcp_pair)(fds, &e), &e);
        ends_of_fds(&x, fds);
    }
    if (cut_short) {
        test_ok(transport_faulty_open(x.a, TRANSPORT_FAULT_SHORT, test_range(seed, 0, 5000),
                                      test_random(seed), &x.a, &e),
                &e);
        test_ok(transport_faulty_open(x.b, TRANSPORT_FAULT_SHORT, 0, test_random(seed), &x.b, &e),
                &e);
    }
    return x;
}

static inline void ends_close(struct ends *x)
{
    transport_close(x->a);
    transport_close(x->b);
}

/* What one poll() says now (or within ms): bit 0 = some descriptor is ready. */
static inline bool ends_ready(struct transport *t, bool want_write, int ms)
{
    struct pollfd fds[2];
    int n = transport_poll(t, want_write, fds);
    int got = poll(fds, (nfds_t)n, ms);
    assert_true(got >= 0);
    return got > 0;
}

/* Room to write, asked for without the reading side. */
static inline bool ends_writable(struct transport *t)
{
    struct pollfd fds[2];
    int n = transport_poll(t, true, fds);
    if (n == 1)
        fds[0].events = POLLOUT;
    return poll(&fds[n - 1], 1, 0) > 0;
}

/* Deadlocks are found by the wait that never ends; the limit only gives them a name. */
#define HANG_MS 120000

static inline int ends_send(struct transport *t, const void *data, size_t n, struct baton_error *e)
{
    for (const uint8_t *p = data; n > 0;) {
        struct iovec v = {(void *)p, n};
        size_t moved = 0;
        int rc = transport_send(t, &v, 1, &moved, e);
        if (rc)
            return rc;
        p += moved;
        n -= moved;
        if (moved == 0 && !ends_writable(t))
            usleep(100);
    }
    return 0;
}

/* Read until n bytes came or the stream ended; *got tells. */
static inline int ends_recv(struct transport *t, void *data, size_t n, size_t *got,
                            struct baton_error *e)
{
    *got = 0;
    while (*got < n) {
        size_t moved = 0;
        int rc = transport_recv(t, (uint8_t *)data + *got, n - *got, &moved, e);
        *got += moved;
        if (rc)
            return rc;
        if (moved == 0 && !ends_ready(t, false, HANG_MS))
            fail_msg("no event for %d ms with %zu of %zu bytes read", HANG_MS, *got, n);
    }
    return 0;
}

#endif
