/* SPDX-License-Identifier: Apache-2.0 */
/* The landing region at the ends of requests and connections: aborts at every piece, descriptors
 * that must not pile up, a producer that was stopped and writes late. */
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "landing.h"

/* Both ends, with a region so small that pieces wait for credits. */
struct pair {
    struct end p, c;
    struct truth truth;
    struct cache from, into;
    int32_t ids[200];
};

static void pair_open(struct pair *x, uint32_t n)
{
    const struct handoff_options po = {.producer = true};
    const struct handoff_options co = {.landing_slots = test_range(&seed, 1, 3),
                                       .landing_slot_bytes = SLOT_BYTES};
    struct transport *t[2];
    struct kv_geometry g;
    memset(x, 0, sizeof *x);
    geometry_small(&g);
    truth_open(&x->truth, &g, n, &seed);
    cache_open(&x->from, &g, n, n);
    cache_prefill(&x->from, &x->truth);
    cache_open(&x->into, &g, n, 1);
    cache_import(&x->into, n);
    unix_pair(t);
    rig_auth = 1;
    end_open_with(&x->p, t[0], &po);
    end_open_with(&x->c, t[1], &co);
    for (int i = 0; i < RIG_IDS; i++)
        x->c.into[i] = &x->into;
}

static void pair_close(struct pair *x)
{
    end_close(&x->p);
    end_close(&x->c);
    truth_close(&x->truth);
    cache_close(&x->from);
    cache_close(&x->into);
}

static void pair_offer(struct pair *x, uint64_t id)
{
    struct baton_error e;
    struct handoff_offer o;
    const struct handoff_commit m = {.argmax = 1, .margin = 1};
    offer_fill(&o, id, &x->truth.g, x->ids, x->truth.n, true);
    test_ok(handoff_offer(x->p.conn, &o, &e), &e);
    queue_all(x->p.conn, id, &x->from, x->truth.n);
    test_ok(handoff_commit(x->p.conn, id, &m, &e), &e);
}

static void pair_works(struct pair *x, uint64_t id)
{
    pair_offer(x, id);
    both_until(&x->p, &x->c, x->p.ends[id] && x->c.ends[id]);
    assert_int_equal(x->p.why[id].code, 0);
    assert_int_equal(x->c.commits[id], 1);
    assert_true(x->c.result[id].landed_bytes == x->c.result[id].bytes);
    assert_true(cache_equals(&x->into, &x->truth));
}

/* Given up after any number of steps, by either side: every slot of the region comes back, and
 * nothing that was under way lands in the next request. */
static void test_abort_at_every_piece(void **state)
{
    for (int side = 0; side < 2; side++)
        for (int at = 0, over = 0; !over; at++) {
            struct pair x;
            pair_open(&x, 200);
            pair_offer(&x, 0);
            both_step(&x.p, &x.c, at);
            over = x.p.ends[0] && x.c.ends[0];
            handoff_abort(side ? x.c.conn : x.p.conn, 0, NULL);
            kv_pool_poison(x.into.pool);
            pair_works(&x, 1);
            assert_int_equal(x.p.ends[0], 1);
            assert_int_equal(x.p.rc + x.c.rc, 0);
            pair_close(&x);
        }
}

/* Requests and connections leave no descriptor, whatever way they end. */
static void test_descriptors_come_back(void **state)
{
    int before = n_fds();
    for (int i = 0; i < 40; i++) {
        struct pair x;
        pair_open(&x, 100);
        int open_now = n_fds();
        pair_works(&x, 0);
        assert_int_equal(n_fds(), open_now); /* mapped at both ends; no descriptor stays */
        pair_offer(&x, 1);
        both_step(&x.p, &x.c, (int)test_range(&seed, 0, 12));
        pair_close(&x);
        assert_int_equal(n_fds(), before);
    }
}

/* The producer process of the test below: it stops in the middle of a request, and goes on where it
 * was once it is continued: it fills the region and sends the rest. */
static void stopped_producer(int fd)
{
    struct scene s = {.w.capacity = 1u << 16};
    struct baton_error e;
    struct transport_landing *l = NULL;
    uint8_t buf[4096];
    size_t moved;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    s.w.data = malloc(s.w.capacity);
    if (transport_fd_open(fd, &s.peer, &e) || !transport_passes_fds(s.peer, true))
        _exit(2);
    wire_hello(&s.w, 1, 1, 1, 20000000u, 10000000000u);
    wire_offer(&s.w, 0, N, false);
    struct iovec iov = {s.w.data, s.w.n};
    transport_send(s.peer, &iov, 1, &moved, &e);
    while (!l) {
        if (transport_recv(s.peer, buf, sizeof buf, &moved, &e))
            _exit(3);
        int got = transport_take_fd(s.peer);
        if (got >= 0 && transport_landing_map(got, (size_t)SLOTS * SLOT_BYTES, &l, &e))
            _exit(4);
    }
    memset(transport_landing_data(l), 1, 20);
    s.w.n = 0;
    wire_placed(&s.w, 0, 0, 0, 0, 5, 1, 0);
    iov = (struct iovec){s.w.data, s.w.n};
    transport_send(s.peer, &iov, 1, &moved, &e);
    raise(SIGSTOP);
    s.w.n = 0;
    for (int i = 0; i < 1000; i++) {
        memset(transport_landing_data(l), 0xEE, (size_t)SLOTS * SLOT_BYTES);
        wire_placed(&s.w, 0, 0, 1, 0, 5, 1, SLOT_BYTES);
        iov = (struct iovec){s.w.data, s.w.n};
        if (i == 0 && transport_send(s.peer, &iov, 1, &moved, &e) == 0)
            _exit(5); /* the stream must be over */
        s.w.n = 0;
    }
    _exit(0);
}

/* Its consumer gives up after dead_ns; the pages go to another request over another connection; the
 * late writes hit nothing of it. */
static void test_late_writes(void **state)
{
    struct baton_error e;
    int fds[2], status = 0;
    struct pair x;
    struct end c;
    const struct handoff_options co = {
        .dead_ns = 150000000u, .landing_slots = SLOTS, .landing_slot_bytes = SLOT_BYTES};
    struct transport *t;
    test_ok(transport_socketpair(fds, &e), &e);
    pid_t pid = fork();
    if (pid == 0) {
        close(fds[0]);
        stopped_producer(fds[1]);
    }
    close(fds[1]);
    test_ok(transport_fd_open(fds[0], &t, &e), &e);
    pair_open(&x, N);
    rig_auth = 0;
    end_open_with(&c, t, &co);
    c.into[0] = &x.into; /* the same pages as the second request's */
    while (!c.rc) {
        uint64_t wait;
        struct pollfd p[2];
        int n = handoff_conn_poll(c.conn, p, &wait);
        poll(p, (nfds_t)n, (int)(wait / 1000000) + 1);
        end_step(&c);
    }
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
    assert_true(WIFSTOPPED(status));
    assert_non_null(strstr(c.death.text, "silent"));
    assert_int_equal(c.ends[0], 1);
    pair_offer(&x, 1);
    both_step(&x.p, &x.c, 6);
    assert_int_equal(x.p.reserves[1], 1);
    kill(pid, SIGCONT);
    both_until(&x.p, &x.c, x.p.ends[1] && x.c.ends[1]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status))
        fail_msg("the stopped producer ended with status %x", (unsigned)status);
    assert_int_equal(x.c.commits[1], 1);
    assert_true(cache_equals(&x.into, &x.truth));
    end_close(&c);
    pair_close(&x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_abort_at_every_piece),
        cmocka_unit_test(test_descriptors_come_back),
        cmocka_unit_test(test_late_writes),
    };
    seed = test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
