/* SPDX-License-Identifier: Apache-2.0 */
/* One suite over all kinds of ends: bytes, order, end of stream, back-pressure, poll. */
#include <fcntl.h>
#include <pthread.h>

#include "ends.h"

static uint64_t seed;

/* Every kind, plain and with a wrapper that moves less than it could. */
struct variant {
    enum kind kind;
    bool cut_short;
};

static struct ends variant_open(void **state, size_t capacity)
{
    const struct variant *v = *state;
    return ends_open(v->kind, capacity, v->cut_short, &seed);
}

/* ---- both ways at once -------------------------------------------------------------------- */

struct talker {
    struct transport *t;
    uint64_t send_seed, recv_seed, choice;
    size_t to_send, to_recv;
    char why[160]; /* "" = well: assertions belong to the main thread */
};

static void fill(uint64_t *s, uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)(test_random(s) >> 32);
}

/* Send from `p` in up to five pieces of random size, empty ones too. */
static int send_some(struct talker *k, const uint8_t *p, size_t n, size_t *moved,
                     struct baton_error *e)
{
    struct iovec iov[5];
    int n_iov = (int)test_range(&k->choice, 1, 5);
    for (int i = 0; i < n_iov; i++) {
        size_t m = test_range(&k->choice, 0, 1u << test_range(&k->choice, 0, 18));
        iov[i] = (struct iovec){(void *)p, m < n ? m : n};
        p += iov[i].iov_len;
        n -= iov[i].iov_len;
    }
    return transport_send(k->t, iov, n_iov, moved, e);
}

static bool recv_some(struct talker *k, uint8_t *buf, size_t size, size_t *moved)
{
    struct baton_error e = {0};
    size_t want = test_range(&k->choice, 1, (uint32_t)size);
    memset(buf, 0xA5, size);
    if (transport_recv(k->t, buf, want, moved, &e)) {
        snprintf(k->why, sizeof k->why, "recv: %.100s", e.text);
        return false;
    }
    for (size_t i = 0; i < *moved; i++)
        if (buf[i] != (uint8_t)(test_random(&k->recv_seed) >> 32)) {
            snprintf(k->why, sizeof k->why, "byte %zu before the end differs", k->to_recv - i);
            return false;
        }
    for (size_t i = *moved; i < size; i++)
        if (buf[i] != 0xA5) {
            snprintf(k->why, sizeof k->why, "wrote past what it moved");
            return false;
        }
    return true;
}

static void *talk(void *arg)
{
    struct talker *k = arg;
    struct baton_error e = {0};
    static _Thread_local uint8_t buf[100000];
    uint8_t *out = malloc(k->to_send + 1);
    size_t sent = 0, moved;
    fill(&k->send_seed, out, k->to_send);
    while ((sent < k->to_send || k->to_recv > 0) && !k->why[0]) {
        size_t left = k->to_send - sent + k->to_recv;
        if (sent < k->to_send) {
            if (send_some(k, out + sent, k->to_send - sent, &moved, &e))
                snprintf(k->why, sizeof k->why, "send: %.100s", e.text);
            sent += moved;
        }
        if (k->to_recv > 0 && !k->why[0]) {
            if (recv_some(k, buf, sizeof buf, &moved))
                k->to_recv -= moved;
        }
        bool idle = left == k->to_send - sent + k->to_recv;
        if (idle && !ends_ready(k->t, sent < k->to_send, HANG_MS))
            snprintf(k->why, sizeof k->why, "no event with %zu sent, %zu to come", sent,
                     k->to_recv);
    }
    free(out);
    return NULL;
}

static void both_ways(void **state)
{
    static const size_t capacities[] = {1, 7, 4096, 1u << 20};
    for (int round = 0; round < 4; round++) {
        struct ends x = variant_open(state, capacities[round]);
        size_t most = capacities[round] < 100 ? 5000 : 1u << test_range(&seed, 0, 21);
        size_t n = test_range(&seed, 0, (uint32_t)most), m = test_range(&seed, 0, (uint32_t)most);
        uint64_t s = test_random(&seed) | 1, t = test_random(&seed) | 1;
        struct talker a = {x.a, s, t, test_random(&seed) | 1, n, m, ""};
        struct talker b = {x.b, t, s, test_random(&seed) | 1, m, n, ""};
        pthread_t thread;
        assert_int_equal(pthread_create(&thread, NULL, talk, &a), 0);
        talk(&b);
        pthread_join(thread, NULL);
        ends_close(&x);
        if (a.why[0] || b.why[0])
            fail_msg("%zu and %zu bytes: a '%s', b '%s'", n, m, a.why, b.why);
    }
}

/* ---- the end ------------------------------------------------------------------------------ */

/* a says 1000 bytes and goes, with `unread` bytes of b's that it never looked at. */
static void says_and_goes(void **state, size_t unread)
{
    struct ends x = variant_open(state, 5000);
    struct baton_error e;
    uint8_t out[1000], in[2000];
    size_t got, moved;
    fill(&seed, out, sizeof out);
    memset(in, 0x5A, sizeof in);
    test_ok(ends_send(x.b, in, unread, &e), &e);
    if (unread)
        assert_true(ends_ready(x.a, false, HANG_MS));
    test_ok(ends_send(x.a, out, sizeof out, &e), &e);
    transport_close(x.a);
    test_fails(ends_recv(x.b, in, sizeof in, &got, &e), BATON_ERR_PEER, "closed", &e);
    assert_int_equal(got, sizeof out);
    assert_memory_equal(in, out, sizeof out);
    for (int i = 0; i < 3; i++) { /* and so it stays */
        assert_true(ends_ready(x.b, false, 0));
        test_fails(transport_recv(x.b, in, 1, &moved, &e), BATON_ERR_PEER, "closed", &e);
        assert_int_equal(moved, 0);
    }
    transport_close(x.b);
}

static void end_after_the_last_byte(void **state)
{
    says_and_goes(state, 0);
    says_and_goes(state, 300);
}

/* Send until nothing moves any more; returns how much went in. */
static uint64_t send_to_the_brim(struct transport *t)
{
    static uint8_t block[1 << 16];
    struct baton_error e;
    uint64_t in = 0;
    for (int idle = 0; idle < 20;) {
        struct iovec v = {block, sizeof block};
        size_t moved;
        test_ok(transport_send(t, &v, 1, &moved, &e), &e);
        in += moved;
        idle = moved ? 0 : idle + 1;
        if (moved == 0)
            usleep(1000);
        assert_true(in < 1u << 30);
    }
    return in;
}

/* What the system still has to deliver arrives, though the end that sent it left input unread. */
static void end_after_a_full_buffer(void **state)
{
    struct ends x = variant_open(state, 5000);
    struct baton_error e;
    size_t got;
    test_ok(ends_send(x.b, "unread", 6, &e), &e);
    assert_true(ends_ready(x.a, false, HANG_MS));
    uint64_t in = send_to_the_brim(x.a);
    uint8_t *all = malloc(in + 1);
    transport_close(x.a);
    test_fails(ends_recv(x.b, all, in + 1, &got, &e), BATON_ERR_PEER, "closed", &e);
    assert_int_equal(got, in);
    free(all);
    transport_close(x.b);
}

/* Whoever waits, for input or for room, wakes when the other end goes: either of the two. */
static void end_wakes_whoever_waits(void **state)
{
    for (int side = 0; side < 2; side++) {
        struct ends x = variant_open(state, 100);
        struct transport *stays = side ? x.a : x.b, *goes = side ? x.b : x.a;
        struct iovec v = {"x", 1};
        struct baton_error e;
        size_t moved;
        send_to_the_brim(stays);
        assert_false(ends_ready(stays, true, 0));
        transport_close(goes);
        assert_true(ends_ready(stays, false, HANG_MS));
        assert_true(ends_writable(stays));
        test_fails(transport_send(stays, &v, 1, &moved, &e), BATON_ERR_PEER, "closed", &e);
        transport_close(stays);
    }
}

/* A sender learns of the end, without SIGPIPE, and can still read what came before it. */
static void end_while_sending(void **state)
{
    struct ends x = variant_open(state, 64);
    struct baton_error e;
    uint8_t buf[16] = "last words";
    size_t got;
    test_ok(ends_send(x.a, buf, 10, &e), &e);
    transport_close(x.a);
    int rc;
    uint8_t more[4096] = {0};
    while ((rc = ends_send(x.b, more, sizeof more, &e)) == 0)
        ;
    assert_int_equal(rc, BATON_ERR_PEER);
    assert_true(ends_writable(x.b));
    memset(buf, 0, sizeof buf);
    test_fails(ends_recv(x.b, buf, sizeof buf, &got, &e), BATON_ERR_PEER, "", &e);
    /* A TCP reset that answers b's bytes may come with nothing lost before it: a had sent first. */
    assert_int_equal(got, 10);
    assert_string_equal((char *)buf, "last words");
    transport_close(x.b);
}

/* ---- back-pressure and poll --------------------------------------------------------------- */

static void backpressure(void **state)
{
    struct ends x = variant_open(state, 1000);
    struct baton_error e;
    static uint8_t block[1 << 16];
    uint64_t in = send_to_the_brim(x.a), out = 0;
    assert_false(ends_writable(x.a));
    assert_false(ends_writable(x.a));
    while (out < in) {
        size_t moved;
        test_ok(transport_recv(x.b, block, sizeof block, &moved, &e), &e);
        out += moved;
        if (moved == 0)
            assert_true(ends_ready(x.b, false, HANG_MS));
    }
    assert_true(ends_ready(x.a, true, HANG_MS));
    assert_false(ends_ready(x.b, false, 0));
    ends_close(&x);
}

static void poll_is_level_triggered(void **state)
{
    struct ends x = variant_open(state, 16);
    struct baton_error e;
    uint8_t buf[2];
    size_t moved;
    for (int round = 0; round < 50; round++) {
        assert_false(ends_ready(x.b, false, 0));
        assert_true(ends_ready(x.b, true, 0));
        assert_true(ends_ready(x.b, true, 0));
        test_ok(ends_send(x.a, "xy", 2, &e), &e);
        assert_true(ends_ready(x.b, false, HANG_MS));
        assert_true(ends_ready(x.b, false, 0));
        size_t got = 0;
        test_ok(transport_recv(x.b, buf, 1, &got, &e), &e);
        assert_int_equal(got, 1);
        while (got < 2) {
            assert_true(ends_ready(x.b, false, HANG_MS));
            test_ok(transport_recv(x.b, buf, 1, &moved, &e), &e);
            got += moved;
        }
        test_ok(transport_recv(x.b, buf, 1, &moved, &e), &e);
        assert_int_equal(moved, 0);
        test_ok(transport_recv(x.b, buf, 0, &moved, &e), &e);
    }
    ends_close(&x);
}

/* ---- what cannot be wrapped --------------------------------------------------------------- */

static void refusals(void **state)
{
    struct baton_error e;
    struct transport *t = NULL, *u = NULL;
    int fds[2];
    assert_int_equal(pipe(fds), 0);
    test_fails(transport_fd_open(fds[0], &t, &e), BATON_ERR_USAGE, "no stream socket", &e);
    test_fails(transport_fd_open(-1, &t, &e), BATON_ERR_USAGE, "-1", &e);
    test_fails(transport_inproc_pair(0, &t, &u, &e), BATON_ERR_USAGE, "capacity", &e);
    test_fails(transport_inproc_pair(SIZE_MAX / 2, &t, &u, &e), BATON_ERR_NOMEM, "", &e);
    assert_null(t);
    close(fds[0]);
    close(fds[1]);
    transport_close(NULL);
}

static void descriptors_do_not_leak_into_children(void **state)
{
    struct ends x = variant_open(state, 100);
    struct pollfd fds[2];
    int n = transport_poll(x.a, true, fds);
    for (int i = 0; i < n; i++) {
        assert_true(fcntl(fds[i].fd, F_GETFD) & FD_CLOEXEC);
        assert_true(fcntl(fds[i].fd, F_GETFL) & O_NONBLOCK);
    }
    ends_close(&x);
}

/* ---- faults ------------------------------------------------------------------------------- */

static void flip_changes_one_bit(void **state)
{
    struct baton_error e;
    uint8_t out[500], in[500];
    for (int round = 0; round < 20; round++) {
        uint32_t at = test_range(&seed, 0, sizeof out - 1), wrong = 0;
        size_t got;
        struct ends x = variant_open(state, 1000);
        test_ok(transport_faulty_open(x.a, TRANSPORT_FAULT_FLIP, at, test_random(&seed), &x.a, &e),
                &e);
        fill(&seed, out, sizeof out);
        test_ok(ends_send(x.a, out, sizeof out, &e), &e);
        test_ok(ends_recv(x.b, in, sizeof in, &got, &e), &e);
        for (uint32_t i = 0; i < sizeof out; i++)
            if (in[i] != out[i]) {
                wrong++;
                assert_int_equal(i, at);
                assert_int_equal(__builtin_popcount(in[i] ^ out[i]), 1);
            }
        assert_int_equal(wrong, 1);
        ends_close(&x);
    }
}

static void cut_ends_both_sides(void **state)
{
    struct baton_error e;
    uint8_t buf[400] = {0};
    size_t got, moved;
    struct ends x = variant_open(state, 1000);
    test_ok(transport_faulty_open(x.a, TRANSPORT_FAULT_CUT, 123, 1, &x.a, &e), &e);
    test_fails(ends_send(x.a, buf, sizeof buf, &e), BATON_ERR_PEER, "closed", &e);
    test_fails(transport_recv(x.a, buf, 1, &moved, &e), BATON_ERR_PEER, "closed", &e);
    assert_true(ends_ready(x.a, false, 0));
    test_fails(ends_recv(x.b, buf, sizeof buf, &got, &e), BATON_ERR_PEER, "closed", &e);
    assert_int_equal(got, 123);
    ends_close(&x);
}

static void stall_moves_nothing(void **state)
{
    struct baton_error e;
    uint8_t buf[400] = {0};
    size_t got, moved;
    struct ends x = variant_open(state, 1000);
    test_ok(transport_faulty_open(x.a, TRANSPORT_FAULT_STALL, 123, 1, &x.a, &e), &e);
    test_ok(ends_send(x.a, buf, 123, &e), &e);
    test_ok(ends_send(x.b, buf, 10, &e), &e);
    struct iovec v = {buf, 10};
    struct pollfd fds[2];
    for (int i = 0; i < 3; i++) {
        test_ok(transport_send(x.a, &v, 1, &moved, &e), &e);
        assert_int_equal(moved, 0);
        test_ok(transport_recv(x.a, buf, 10, &moved, &e), &e);
        assert_int_equal(moved, 0);
        assert_int_equal(transport_poll(x.a, true, fds), 0);
    }
    test_ok(ends_recv(x.b, buf, 123, &got, &e), &e);
    assert_false(ends_ready(x.b, false, 20));
    ends_close(&x);
}

#define VARIANTS(f)                                                                                \
    {#f " inproc", f, NULL, NULL, &variants[0]}, {#f " unix", f, NULL, NULL, &variants[1]},        \
        {#f " tcp", f, NULL, NULL, &variants[2]}, {#f " listener", f, NULL, NULL, &variants[3]},   \
        {#f " inproc, short", f, NULL, NULL, &variants[4]},                                        \
        {#f " unix, short", f, NULL, NULL, &variants[5]},                                          \
    {                                                                                              \
#f " tcp, short", f, NULL, NULL, &variants[6]                                              \
    }

int main(void)
{
    static struct variant variants[] = {{INPROC, false},   {UNIX, false},  {TCP, false},
                                        {LISTENER, false}, {INPROC, true}, {UNIX, true},
                                        {TCP, true}};
    const struct CMUnitTest tests[] = {
        VARIANTS(both_ways),
        VARIANTS(end_after_the_last_byte),
        VARIANTS(end_after_a_full_buffer),
        VARIANTS(end_wakes_whoever_waits),
        VARIANTS(end_while_sending),
        VARIANTS(backpressure),
        VARIANTS(poll_is_level_triggered),
        VARIANTS(descriptors_do_not_leak_into_children),
        VARIANTS(flip_changes_one_bit),
        VARIANTS(cut_ends_both_sides),
        VARIANTS(stall_moves_nothing),
        cmocka_unit_test(refusals),
    };
    seed = test_seed();
    return cmocka_run_group_tests_name("transport stream", tests, NULL, NULL);
}
