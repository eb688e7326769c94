/* SPDX-License-Identifier: Apache-2.0 */
/* The network between producer and consumer is cut, in each state of a handoff: both ends say so by
 * themselves, nothing of the request stays, and the pages serve the next one over a new connection.
 */
#include "landing.h"
#include "tests/netns.h"

#define DEAD_NS 1500000000u
#define TOKENS 200u

/* Where the request stands when the network is cut. */
enum at {
    AT_OFFER,      /* the offer is not with the consumer yet */
    AT_RESERVE,    /* offered, not answered */
    AT_LAYERS,     /* one layer of two has landed */
    BEFORE_COMMIT, /* all layers have */
    BEFORE_ACK,    /* verified and delivered at the consumer */
    N_AT
};
static const char *const at_names[N_AT] = {"at OFFER", "at RESERVE", "between layers",
                                           "before COMMIT", "before ACK"};

struct ways {
    struct net net;
    struct end p, c;
    struct truth truth;
    struct cache from, into;
    int32_t ids[TOKENS];
    uint64_t dead_ns;
    int cut_in_commit; /* this side's link goes down inside on_commit; -1 = none does */
};

static struct ways ways;

static void watch(struct end *end, uint64_t id, bool commit)
{
    if (commit && ways.cut_in_commit >= 0)
        net_link(&ways.net, ways.cut_in_commit, false);
}

static void join(struct ways *x, uint64_t dead_ns)
{
    const struct handoff_options po = {.producer = true, .dead_ns = dead_ns};
    const struct handoff_options co = {.dead_ns = dead_ns};
    struct baton_error e;
    struct transport *t[2];
    int fds[2];
    net_connect(&x->net, fds);
    for (int i = 0; i < 2; i++)
        test_ok(transport_fd_open(fds[i], &t[i], &e), &e);
    end_open_with(&x->p, t[0], &po);
    end_open_with(&x->c, t[1], &co);
    for (int i = 0; i < RIG_IDS; i++)
        x->c.into[i] = &x->into;
    x->c.watch = watch;
    x->dead_ns = dead_ns;
    x->cut_in_commit = -1;
}

static void part(struct ways *x)
{
    end_close(&x->p);
    end_close(&x->c);
}

static void ways_open(struct ways *x)
{
    struct kv_geometry g;
    geometry_small(&g);
    truth_open(&x->truth, &g, TOKENS, &seed);
    cache_open(&x->from, &g, TOKENS, TOKENS);
    cache_prefill(&x->from, &x->truth);
    cache_open(&x->into, &g, TOKENS, 1);
    cache_import(&x->into, TOKENS);
}

static void ways_close(struct ways *x)
{
    truth_close(&x->truth);
    cache_close(&x->from);
    cache_close(&x->into);
}

/* Both ends as their owners run them: never later than poll says, and poll never says later than
 * what is left of the limit. */
static void step_both(struct ways *x, int most_ms)
{
    struct end *ends[2] = {&x->p, &x->c};
    struct pollfd fds[4];
    uint64_t least = (uint64_t)most_ms * 1000000;
    int n = 0;
    for (int i = 0; i < 2; i++) {
        uint64_t wait;
        n += handoff_conn_poll(ends[i]->conn, fds + n, &wait);
        if (!ends[i]->rc)
            assert_true(wait <= x->dead_ns);
        least = !ends[i]->rc && wait < least ? wait : least;
    }
    poll(fds, (nfds_t)n, (int)((least + 999999) / 1000000));
    end_step(&x->p);
    end_step(&x->c);
}

#define until(x, condition)                                                                        \
    for (int spins_ = 0; !(condition); spins_++) {                                                 \
        if (spins_ > 200000)                                                                       \
            fail_msg("never: %s (%s | %s)", #condition, (x)->p.death.text, (x)->c.death.text);     \
        step_both(x, 50);                                                                          \
    }

static void layer(struct ways *x, uint64_t id, uint32_t l)
{
    struct baton_error e;
    test_ok(handoff_layer(x->p.conn, id, l, &kv_seq_views(x->from.seq)[l], 0, TOKENS, &e), &e);
}

/* Until every byte that is on its way has been read: nothing to write, and rounds in which nothing
 * comes. */
static void settle(struct ways *x)
{
    until(x, !handoff_conn_busy(x->p.conn));
    for (int i = 0; i < 20; i++)
        step_both(x, 1);
}

static void offer(struct ways *x, uint64_t id)
{
    struct baton_error e;
    struct handoff_offer o;
    offer_fill(&o, id, &x->truth.g, x->ids, TOKENS, true);
    test_ok(handoff_offer(x->p.conn, &o, &e), &e);
}

static void commit(struct ways *x, uint64_t id)
{
    struct baton_error e;
    const struct handoff_commit m = {.argmax = 1, .margin = 1};
    test_ok(handoff_commit(x->p.conn, id, &m, &e), &e);
}

/* Bring a request to `at`, cut the network there by one side's link, and go on with it. */
static void cut_at(struct ways *x, enum at at, int side)
{
    settle(x); /* HELLO is over */
    x->c.answer = at == AT_RESERVE ? RIG_WAIT : RIG_RESERVE;
    if (at == AT_OFFER)
        net_link(&x->net, side, false);
    offer(x, 0);
    if (at >= AT_LAYERS) {
        until(x, x->p.reserves[0] == 1);
        layer(x, 0, 0);
        if (at >= BEFORE_COMMIT)
            layer(x, 0, 1);
    }
    if (at != AT_OFFER)
        settle(x);
    if (at == BEFORE_ACK)
        x->cut_in_commit = side;
    else if (at != AT_OFFER)
        net_link(&x->net, side, false);
    if (at == AT_RESERVE)
        end_reserve(&x->c, 0);
    if (at <= AT_LAYERS)
        layer(x, 0, 1);
    if (at <= AT_RESERVE)
        return; /* its layers never leave */
    commit(x, 0);
}

static void says(const struct end *end, const char *who)
{
    char want[32];
    snprintf(want, sizeof want, "%s silent for", who);
    if (end->rc != BATON_ERR_PEER || !strstr(end->death.text, want))
        fail_msg("died with %d '%s', wanted '%s'", end->rc, end->death.text, want);
}

/* A request over a new connection, into the same pages. */
static void works(struct ways *x)
{
    kv_pool_poison(x->into.pool);
    join(x, 20000000000u);
    offer(x, 1);
    layer(x, 1, 0);
    layer(x, 1, 1);
    commit(x, 1);
    until(x, x->p.ends[1] && x->c.ends[1]);
    assert_int_equal(x->p.why[1].code, 0);
    assert_int_equal(x->c.commits[1], 1);
    assert_true(cache_equals(&x->into, &x->truth));
    part(x);
}

static void cut(struct ways *x, enum at at, int side)
{
    int before = n_fds();
    join(x, DEAD_NS);
    cut_at(x, at, side);
    until(x, x->p.rc && x->c.rc);
    print_message("%s, by the %s's link: %s | %s\n", at_names[at], side ? "consumer" : "producer",
                  x->p.death.text, x->c.death.text);
    says(&x->p, "consumer");
    says(&x->c, "producer");
    bool arrived = at != AT_OFFER, delivered = at == BEFORE_ACK;
    assert_int_equal(x->c.offers[0], arrived);
    assert_int_equal(x->c.commits[0], delivered);
    assert_int_equal(x->p.ends[0], 1);
    assert_int_equal(x->c.ends[0], arrived);
    assert_int_equal(x->p.why[0].code, BATON_ERR_PEER);
    /* What was delivered stays so, whether or not its producer got to know. */
    assert_int_equal(x->c.why[0].code, arrived && !delivered ? BATON_ERR_PEER : 0);
    if (delivered)
        assert_true(cache_equals(&x->into, &x->truth));
    part(x);
    net_link(&x->net, side, true);
    works(x);
    assert_int_equal(n_fds(), before);
}

static void test_cut(void **state)
{
    struct ways *x = &ways;
    if (!net_open(&x->net))
        skip();
    ways_open(x);
    for (int at = 0; at < N_AT; at++)
        for (int side = 0; side < 2; side++)
            cut(x, (enum at)at, side);
    ways_close(x);
    net_close(&x->net);
}

/* A cut that is mended before the limit costs nothing but time. */
static void test_mended(void **state)
{
    struct ways *x = &ways;
    if (!net_open(&x->net))
        skip();
    ways_open(x);
    for (int at = AT_OFFER; at < N_AT; at++) {
        int side = (int)test_range(&seed, 0, 1);
        join(x, 60000000000u);
        kv_pool_poison(x->into.pool);
        cut_at(x, (enum at)at, side);
        if (at <= AT_RESERVE) {
            layer(x, 0, 0);
            commit(x, 0);
        }
        if (at == BEFORE_ACK)
            until(x, x->c.commits[0]);
        for (int i = 0; i < 5; i++)
            step_both(x, 50);
        net_link(&x->net, side, true);
        until(x, x->p.ends[0] && x->c.ends[0]);
        assert_int_equal(x->p.why[0].code, 0);
        assert_int_equal(x->c.commits[0], 1);
        assert_true(cache_equals(&x->into, &x->truth));
        part(x);
    }
    ways_close(x);
    net_close(&x->net);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cut),
        cmocka_unit_test(test_mended),
    };
    seed = test_seed();
    return cmocka_run_group_tests_name("handoff: the network is cut", tests, NULL, NULL);
}
