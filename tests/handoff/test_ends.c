/* SPDX-License-Identifier: Apache-2.0 */
/* How requests end: abort, refuse, close and death in every state, from either side, exactly once;
 * and what a caller gets for asking for the impossible. */
#include "rig.h"

static uint64_t seed;

#define N_TOKENS 200u
#define VOCAB 300000u /* more than one LOGITS frame, and more than the stream holds at once */

struct scene {
    struct truth truth;
    struct cache from, into;
    struct end p, c;
    int32_t ids[N_TOKENS];
    float *logits;
};

static void scene_open(struct scene *s, size_t capacity)
{
    struct baton_error e;
    struct transport *a, *b;
    struct kv_geometry g = {.n_layers = 3,
                            .kv_heads = 2,
                            .head_dim = 8,
                            .dtype = BATON_F32,
                            .window = 70,
                            .local = {1, 0, 1}};
    memset(s, 0, sizeof *s);
    truth_open(&s->truth, &g, N_TOKENS, &seed);
    cache_open(&s->from, &g, N_TOKENS, N_TOKENS);
    cache_prefill(&s->from, &s->truth);
    cache_open(&s->into, &g, N_TOKENS, 1);
    cache_import(&s->into, N_TOKENS);
    s->logits = calloc(VOCAB, sizeof(float));
    test_ok(transport_inproc_pair(capacity, &a, &b, &e), &e);
    end_open(&s->p, a, true, 0);
    end_open(&s->c, b, false, 0);
    for (int i = 0; i < RIG_IDS; i++)
        s->c.into[i] = &s->into;
    s->c.want_logits = true;
}

static void scene_close(struct scene *s)
{
    end_close(&s->p);
    end_close(&s->c);
    truth_close(&s->truth);
    cache_close(&s->from);
    cache_close(&s->into);
    free(s->logits);
}

static void offer(struct scene *s, uint64_t id)
{
    struct baton_error e;
    struct handoff_offer o;
    offer_fill(&o, id, &s->truth.g, s->ids, N_TOKENS, true);
    test_ok(handoff_offer(s->p.conn, &o, &e), &e);
}

static void commit(struct scene *s, uint64_t id)
{
    struct baton_error e;
    const struct handoff_commit m = {.argmax = 2, .margin = 0, .logits = s->logits, .vocab = VOCAB};
    test_ok(handoff_commit(s->p.conn, id, &m, &e), &e);
}

/* The same connection still carries a request to its good end. */
static void works(struct scene *s, uint64_t id)
{
    s->c.answer = RIG_RESERVE;
    s->c.abort_in_commit = false;
    s->p.ends[id] = s->c.ends[id] = s->c.commits[id] = 0;
    kv_pool_poison(s->into.pool);
    offer(s, id);
    queue_all(s->p.conn, id, &s->from, N_TOKENS);
    commit(s, id);
    both_until(&s->p, &s->c, s->p.ends[id] && s->c.ends[id]);
    assert_int_equal(s->p.why[id].code, 0);
    assert_int_equal(s->c.why[id].code, 0);
    assert_int_equal(s->c.commits[id], 1);
    assert_true(cache_equals(&s->into, &s->truth));
}

/* An abort after so many steps of a whole request, from either side: every state is met, frames
 * half written and half read included. */
static void test_abort_everywhere(void **state)
{
    struct baton_error why;
    int late = 0, total = 0;
    base_fail(&why, BATON_ERR_NOMEM, "out of patience");
    for (int side = 0; side < 2; side++)
        for (int at = 0;; at += at < 60 ? 1 : (int)test_range(&seed, 1, 9)) {
            struct scene s;
            bool over = false;
            scene_open(&s, 4096);
            s.c.answer = at % 2 ? RIG_RESERVE : RIG_WAIT;
            offer(&s, 0);
            queue_all(s.p.conn, 0, &s.from, N_TOKENS);
            if (at % 3)
                commit(&s, 0);
            for (int i = 0; i < at && !over; i++) {
                both_step(&s.p, &s.c, 1);
                if (i == 6 && s.c.answer == RIG_WAIT && s.c.offers[0])
                    end_reserve(&s.c, 0);
                over = s.p.ends[0] && s.c.ends[0];
            }
            struct end *me = side ? &s.c : &s.p, *other = side ? &s.p : &s.c;
            int before = me->ends[0];
            bool known = side == 0 || s.c.offers[0];
            handoff_abort(me->conn, 0, &why);
            if (known)
                assert_int_equal(me->ends[0], 1); /* at once */
            if (known && !before)
                assert_int_equal(me->why[0].code, BATON_ERR_NOMEM);
            /* gone from this end: pages may be reused, nothing may be read or written there */
            if (!before && known && side == 0)
                kv_seq_close(s.from.seq), s.from.seq = NULL;
            both_step(&s.p, &s.c, 2000);
            if (known) {
                assert_int_equal(other->ends[0], other == &s.p || s.c.offers[0]);
                if (!before && other->ends[0] && other->why[0].code) {
                    assert_int_equal(other->why[0].code, BATON_ERR_NOMEM);
                    assert_string_equal(other->why[0].text, "out of patience");
                }
            } else {
                handoff_abort(s.p.conn, 0, NULL);
                both_step(&s.p, &s.c, 50);
            }
            late += before;
            total++;
            assert_int_equal(s.p.rc, 0);
            assert_int_equal(s.c.rc, 0);
            cache_close(&s.from);
            cache_open(&s.from, &s.truth.g, N_TOKENS, N_TOKENS);
            cache_prefill(&s.from, &s.truth);
            works(&s, 1);
            works(&s, 0); /* the id is free again */
            scene_close(&s);
            if (over)
                break;
        }
    print_message("%d places, %d after the end\n", total, late);
    assert_true(total > 60);
}

/* Both abort at the same time: each had not heard of the other's. */
/* So many bytes of one value, one after the other. */
static bool holds_run(const struct cache *c, int value, size_t most)
{
    const uint8_t *p = kv_pool_memory(c->pool);
    size_t n = 0;
    for (size_t i = 0; i < kv_pool_bytes(c->pool) && n < most; i++)
        n = p[i] == value ? n + 1 : 0;
    return n == most;
}

/* Pieces are sent from the pages. Once the request is over these may be another's: a frame that is
 * half written goes on with zeros. */
static void test_pages_of_another(void **state)
{
    int half_written = 0;
    for (int at = 0;; at++) {
        struct scene s;
        scene_open(&s, 4096);
        memset(kv_pool_memory(s.into.pool), 0xDD, kv_pool_bytes(s.into.pool));
        offer(&s, 0);
        queue_all(s.p.conn, 0, &s.from, N_TOKENS);
        both_step(&s.p, &s.c, at);
        bool over = s.p.ends[0];
        if (at > 100)
            over = true; /* all pieces went, and wait for COMMIT */
        handoff_abort(s.p.conn, 0, NULL);
        memset(kv_pool_memory(s.from.pool), 0xEE, kv_pool_bytes(s.from.pool));
        both_until(&s.p, &s.c, s.c.ends[0] || s.c.offers[0] == 0);
        assert_false(holds_run(&s.into, 0xEE, 16));
        half_written += holds_run(&s.into, 0, 16);
        assert_int_equal(s.p.rc + s.c.rc, 0);
        scene_close(&s);
        if (over)
            break;
    }
    assert_true(half_written > 0);
}

static void test_abort_crossing(void **state)
{
    for (int at = 1; at < 30; at++) {
        struct scene s;
        scene_open(&s, 4096);
        offer(&s, 0);
        queue_all(s.p.conn, 0, &s.from, N_TOKENS);
        both_step(&s.p, &s.c, at);
        handoff_abort(s.p.conn, 0, NULL);
        handoff_abort(s.c.conn, 0, NULL);
        both_step(&s.p, &s.c, 200);
        assert_int_equal(s.p.ends[0], 1);
        assert_int_equal(s.c.ends[0], s.c.offers[0]);
        assert_int_equal(s.p.why[0].code, BATON_ERR_CANCELLED);
        works(&s, 0);
        scene_close(&s);
    }
}

static void test_refuse(void **state)
{
    struct scene s;
    struct baton_error e, why;
    scene_open(&s, 1 << 16);
    s.c.answer = RIG_REFUSE;
    offer(&s, 0);
    queue_all(s.p.conn, 0, &s.from, N_TOKENS);
    both_until(&s.p, &s.c, s.p.ends[0]);
    assert_int_equal(s.c.ends[0], 1);
    assert_int_equal(s.p.why[0].code, BATON_ERR_BUSY);
    assert_string_equal(s.p.why[0].text, "no pages for request 0");
    test_fails(handoff_layer(s.p.conn, 0, 0, kv_seq_views(s.from.seq), 0, 1, &e),
               BATON_ERR_CANCELLED, "request 0 is over", &e);
    s.c.answer = RIG_WAIT; /* refused later, in a crossing with the producer's abort */
    offer(&s, 1);
    both_until(&s.p, &s.c, s.c.offers[1]);
    base_fail(&why, BATON_ERR_MISMATCH, "identity: weights differs");
    handoff_abort(s.p.conn, 1, NULL);
    test_ok(handoff_refuse(s.c.conn, 1, &why, &e), &e);
    test_fails(handoff_refuse(s.c.conn, 1, &why, &e), BATON_ERR_CANCELLED, "over", &e);
    both_step(&s.p, &s.c, 20);
    assert_int_equal(s.p.why[1].code, BATON_ERR_CANCELLED);
    works(&s, 1);
    scene_close(&s);
}

/* The owner may change its mind while it is told of the commit. */
static void test_abort_in_commit(void **state)
{
    struct scene s;
    scene_open(&s, 1 << 16);
    s.c.abort_in_commit = true;
    offer(&s, 0);
    queue_all(s.p.conn, 0, &s.from, N_TOKENS);
    commit(&s, 0);
    both_until(&s.p, &s.c, s.p.ends[0] && s.c.ends[0]);
    assert_int_equal(s.c.commits[0], 1);
    assert_int_equal(s.c.why[0].code, BATON_ERR_CANCELLED);
    assert_int_equal(s.p.why[0].code, BATON_ERR_CANCELLED);
    works(&s, 1);
    scene_close(&s);
}

/* One end closes its connection in any state: the other is told, and by whom. */
static void test_close_everywhere(void **state)
{
    for (int side = 0; side < 2; side++)
        for (int at = 0; at < 60; at++) {
            struct scene s;
            scene_open(&s, 4096);
            offer(&s, 0);
            queue_all(s.p.conn, 0, &s.from, N_TOKENS);
            commit(&s, 0);
            both_step(&s.p, &s.c, at);
            struct end *me = side ? &s.c : &s.p, *other = side ? &s.p : &s.c;
            int before = me->ends[0];
            handoff_conn_close(me->conn);
            me->conn = NULL;
            assert_int_equal(me->ends[0], side == 0 || s.c.offers[0]);
            if (!before && me->ends[0])
                assert_int_equal(me->why[0].code, BATON_ERR_CANCELLED);
            for (int i = 0; i < 500 && !other->rc; i++)
                end_step(other);
            assert_int_equal(other->rc, BATON_ERR_PEER);
            assert_non_null(strstr(other->death.text, side ? "consumer" : "producer"));
            assert_int_equal(other->ends[0], other == &s.p || s.c.offers[0]);
            assert_false(handoff_conn_busy(other->conn));
            scene_close(&s);
        }
}

/* Many requests at once die with the connection; calls on a dead one say why. */
static void test_death(void **state)
{
    struct scene s;
    struct baton_error e;
    struct handoff_offer o;
    uint64_t wait;
    struct pollfd fds[2];
    scene_open(&s, 4096);
    for (int i = 0; i < RIG_IDS; i++)
        offer(&s, (uint64_t)i);
    both_step(&s.p, &s.c, 20);
    handoff_conn_close(s.c.conn);
    s.c.conn = NULL;
    for (int i = 0; i < 500 && !s.p.rc; i++)
        end_step(&s.p);
    assert_int_equal(s.p.rc, BATON_ERR_PEER);
    for (int i = 0; i < RIG_IDS; i++) {
        assert_int_equal(s.p.ends[i], 1);
        assert_int_equal(s.p.why[i].code, BATON_ERR_PEER);
        assert_int_equal(s.c.ends[i], s.c.offers[i]);
    }
    offer_fill(&o, 1, &s.truth.g, s.ids, N_TOKENS, true);
    test_fails(handoff_offer(s.p.conn, &o, &e), BATON_ERR_PEER, "consumer", &e);
    assert_int_equal(handoff_conn_poll(s.p.conn, fds, &wait), 0);
    handoff_abort(s.p.conn, 0, NULL);
    scene_close(&s);
    handoff_conn_close(NULL);
}

/* Idle for long: heartbeats keep both alive, and nothing else is sent. */
static void test_heartbeats(void **state)
{
    struct baton_error e;
    struct transport *t[2];
    struct end p, c;
    int fds[2];
    const uint64_t dead = 80000000u;
    test_ok(transport_socketpair(fds, &e), &e);
    test_ok(transport_fd_open(fds[0], &t[0], &e), &e);
    test_ok(transport_fd_open(fds[1], &t[1], &e), &e);
    end_open(&p, t[0], true, dead);
    end_open(&c, t[1], false, dead);
    int wakeups = 0;
    for (uint64_t t0 = base_now_ns(); base_now_ns() - t0 < 6 * dead; wakeups++) {
        struct pollfd pfd[4];
        uint64_t a, b;
        int n = handoff_conn_poll(p.conn, pfd, &a);
        n += handoff_conn_poll(c.conn, pfd + n, &b);
        a = a < b ? a : b;
        poll(pfd, (nfds_t)n, (int)(a / 1000000) + 1);
        both_step(&p, &c, 1);
        assert_int_equal(p.rc, 0);
        assert_int_equal(c.rc, 0);
    }
    assert_true(wakeups < 400); /* nobody spins */
    /* Both stopped for long, as a suspended job is: neither takes its own absence for death. */
    base_sleep_ns(2 * dead);
    both_step(&p, &c, 3);
    assert_int_equal(p.rc, 0);
    assert_int_equal(c.rc, 0);
    end_close(&p);
    end_close(&c);
}

/* Over plain descriptors: the connection's on success, the caller's on failure. */
static void test_descriptors(void **state)
{
    struct baton_error e;
    struct handoff_options o = {.producer = true, .heartbeat_ns = 6, .dead_ns = 10};
    const struct handoff_callbacks cb = {0};
    struct handoff_conn *p = NULL, *c = NULL;
    int fds[2];
    test_ok(transport_socketpair(fds, &e), &e);
    test_fails(handoff_conn_open_fd(fds[0], &o, &cb, &p, &e), BATON_ERR_USAGE, "heartbeats", &e);
    assert_null(p);
    o = (struct handoff_options){.producer = true};
    test_ok(handoff_conn_open_fd(fds[0], &o, &cb, &p, &e), &e);
    o.producer = false;
    test_ok(handoff_conn_open_fd(fds[1], &o, &cb, &c, &e), &e);
    for (int i = 0; i < 4; i++) {
        test_ok(handoff_conn_step(p, &e), &e);
        test_ok(handoff_conn_step(c, &e), &e);
    }
    handoff_conn_close(p);
    test_fails(handoff_conn_step(c, &e), BATON_ERR_PEER, "producer closed the connection", &e);
    handoff_conn_close(c);
}

static void test_usage(void **state)
{
    struct scene s;
    struct baton_error e;
    struct handoff_offer o;
    struct handoff_commit m = {.argmax = 2, .margin = 1};
    scene_open(&s, 1 << 16);
    s.c.answer = RIG_WAIT;
    const struct baton_kv_view *v = kv_seq_views(s.from.seq), *into = kv_seq_views(s.into.seq);
    int32_t bad[2] = {1, -1};
    offer_fill(&o, 0, &s.truth.g, bad, 2, true);
    test_fails(handoff_offer(s.p.conn, &o, &e), BATON_ERR_USAGE, "token id -1", &e);
    o.n_ids = 0;
    test_fails(handoff_offer(s.p.conn, &o, &e), BATON_ERR_USAGE, "0 token ids", &e);
    offer_fill(&o, 0, &s.truth.g, s.ids, N_TOKENS, true);
    o.geometry.dtype = BATON_I8;
    test_fails(handoff_offer(s.p.conn, &o, &e), BATON_ERR_USAGE, "dtype", &e);
    test_fails(handoff_offer(s.c.conn, &o, &e), BATON_ERR_USAGE, "consumer offers nothing", &e);
    offer(&s, 0);
    o.geometry.dtype = BATON_F32;
    test_fails(handoff_offer(s.p.conn, &o, &e), BATON_ERR_BUSY, "request 0 is open", &e);
    test_fails(handoff_layer(s.p.conn, 5, 0, v, 0, 1, &e), BATON_ERR_CANCELLED, "5 is over", &e);
    test_fails(handoff_layer(s.p.conn, 0, 3, v, 0, 1, &e), BATON_ERR_USAGE, "layer 3", &e);
    test_fails(handoff_layer(s.p.conn, 0, 0, v, 199, 2, &e), BATON_ERR_USAGE, "2 positions", &e);
    test_fails(handoff_layer(s.p.conn, 0, 0, v, UINT32_MAX, 2, &e), BATON_ERR_USAGE, "layer", &e);
    test_fails(handoff_layer(s.p.conn, 0, 1, &v[1], 1, 2, &e), BATON_ERR_USAGE, "0 is due", &e);
    test_ok(handoff_layer(s.p.conn, 0, 0, v, 0, 140, &e), &e); /* partly out of the window */
    test_fails(handoff_layer(s.p.conn, 0, 0, v, 139, 61, &e), BATON_ERR_USAGE, "139 queued", &e);
    test_ok(handoff_layer(s.p.conn, 0, 2, &v[2], 0, 131, &e), &e); /* wholly */
    test_ok(handoff_layer(s.p.conn, 0, 1, &v[1], 0, 131, &e), &e);
    test_fails(handoff_layer(s.p.conn, 0, 1, &v[1], 0, 131, &e), BATON_ERR_USAGE, "twice", &e);
    test_fails(handoff_commit(s.p.conn, 0, &m, &e), BATON_ERR_USAGE, "layer 0 queued up to", &e);
    both_until(&s.p, &s.c, s.c.offers[0]);
    test_fails(handoff_reserve(s.c.conn, 0, into, N_TOKENS, false, &e), BATON_ERR_USAGE, "held",
               &e);
    struct baton_kv_view few[3] = {into[0], into[1], into[2]};
    few[1].n_blocks = 2;
    test_fails(handoff_reserve(s.c.conn, 0, few, 0, true, &e), BATON_ERR_USAGE, "2 blocks", &e);
    few[1] = into[1];
    few[0].blocks = (const int32_t[]){-1, -1, -1, -1};
    test_fails(handoff_reserve(s.c.conn, 0, few, 0, true, &e), BATON_ERR_USAGE, "no page", &e);
    test_ok(handoff_reserve(s.c.conn, 0, into, 0, true, &e), &e);
    test_fails(handoff_reserve(s.c.conn, 0, into, 0, true, &e), BATON_ERR_USAGE, "answered", &e);
    both_until(&s.p, &s.c, s.p.reserves[0]);
    test_ok(handoff_layer(s.p.conn, 0, 0, v, 140, 60, &e), &e);
    test_ok(handoff_layer(s.p.conn, 0, 1, &v[1], 131, 69, &e), &e);
    test_ok(handoff_layer(s.p.conn, 0, 2, &v[2], 131, 69, &e), &e);
    test_fails(handoff_commit(s.p.conn, 0, &m, &e), BATON_ERR_USAGE, "without the logits", &e);
    m.margin = NAN;
    m.logits = s.logits;
    m.vocab = 3;
    test_fails(handoff_commit(s.p.conn, 0, &m, &e), BATON_ERR_USAGE, "margin", &e);
    m.margin = 1;
    m.argmax = 3;
    test_fails(handoff_commit(s.p.conn, 0, &m, &e), BATON_ERR_USAGE, "argmax 3", &e);
    m.argmax = 2;
    test_ok(handoff_commit(s.p.conn, 0, &m, &e), &e);
    test_fails(handoff_commit(s.p.conn, 0, &m, &e), BATON_ERR_USAGE, "committed already", &e);
    test_fails(handoff_layer(s.p.conn, 0, 0, v, 0, 1, &e), BATON_ERR_USAGE, "committed", &e);
    both_until(&s.p, &s.c, s.p.ends[0] && s.c.ends[0]);
    assert_int_equal(s.p.why[0].code, 0);
    assert_true(cache_equals(&s.into, &s.truth));
    scene_close(&s);
}

/* A commit queued before RESERVE, without the row that RESERVE then wants. */
static void test_logits_missing(void **state)
{
    struct scene s;
    struct baton_error e;
    const struct handoff_commit m = {.argmax = 2, .margin = 1};
    scene_open(&s, 1 << 16);
    offer(&s, 0);
    queue_all(s.p.conn, 0, &s.from, N_TOKENS);
    test_ok(handoff_commit(s.p.conn, 0, &m, &e), &e);
    both_until(&s.p, &s.c, s.p.ends[0] && s.c.ends[0]);
    assert_int_equal(s.p.why[0].code, BATON_ERR_USAGE);
    assert_int_equal(s.c.why[0].code, BATON_ERR_USAGE);
    assert_int_equal(s.c.commits[0], 0);
    works(&s, 1);
    scene_close(&s);
}

/* The pair that other rooms get: it carries a request like any stream. An end that no connection
 * took is closed alone, and the connection at the other end is told. */
static void test_link(void **state)
{
    (void)state;
    struct scene s;
    struct baton_error e;
    struct transport *a, *b;
    scene_open(&s, 4096);
    end_close(&s.p);
    end_close(&s.c);
    test_ok(handoff_link_pair(&a, &b, &e), &e);
    end_open(&s.p, a, true, 0);
    end_open(&s.c, b, false, 0);
    for (int i = 0; i < RIG_IDS; i++)
        s.c.into[i] = &s.into;
    s.c.want_logits = true;
    works(&s, 0);
    scene_close(&s);

    scene_open(&s, 4096);
    end_close(&s.p);
    test_ok(handoff_link_pair(&a, &b, &e), &e);
    end_open(&s.p, a, true, 0);
    offer(&s, 0);
    end_step(&s.p); /* HELLO and OFFER lie in the pair, unread */
    handoff_link_close(b);
    for (int i = 0; i < 10 && !s.p.rc; i++)
        end_step(&s.p);
    assert_int_equal(s.p.rc, BATON_ERR_PEER);
    assert_int_equal(s.p.ends[0], 1);
    assert_int_equal(s.p.why[0].code, BATON_ERR_PEER);
    scene_close(&s);

    test_ok(handoff_link_pair(&a, &b, &e), &e); /* neither end was taken: nothing leaks */
    handoff_link_close(b);
    handoff_link_close(a);
    handoff_link_close(NULL);
}

static void test_many(void **state)
{
    struct scene s;
    struct baton_error e;
    struct handoff_offer o;
    scene_open(&s, 1 << 16);
    offer_fill(&o, 0, &s.truth.g, s.ids, 1, true);
    for (uint64_t i = 0; i < HANDOFF_MAX_REQUESTS; i++) {
        o.request = i;
        test_ok(handoff_offer(s.p.conn, &o, &e), &e);
    }
    o.request = 5000;
    test_fails(handoff_offer(s.p.conn, &o, &e), BATON_ERR_BUSY, "1024 requests", &e);
    s.c.answer = RIG_REFUSE;
    both_until(&s.p, &s.c, s.p.ends[RIG_IDS - 1] == HANDOFF_MAX_REQUESTS / RIG_IDS);
    both_step(&s.p, &s.c, 4);
    memset(s.p.ends, 0, sizeof s.p.ends);
    memset(s.c.ends, 0, sizeof s.c.ends);
    memset(s.c.commits, 0, sizeof s.c.commits);
    works(&s, 3);
    scene_close(&s);
}

static void test_identity(void **state)
{
    struct handoff_identity a, b;
    struct baton_error e;
    for (int part = 0; part < 4; part++) {
        static const char *const names[] = {"arch", "weights", "numerics", "tokenizer"};
        memset(&a, 7, sizeof a);
        b = a;
        test_ok(handoff_identity_check(&a, &b, &e), &e);
        ((uint8_t *)&b)[32 * part + test_range(&seed, 0, 31)] ^= 1;
        test_fails(handoff_identity_check(&a, &b, &e), BATON_ERR_MISMATCH, names[part], &e);
        memset((uint8_t *)&b + 32 * part, 0, 32);
        test_fails(handoff_identity_check(&a, &b, &e), BATON_ERR_MISMATCH, "at the peer", &e);
        test_fails(handoff_identity_check(&b, &a, &e), BATON_ERR_MISMATCH, "at this end", &e);
        memset((uint8_t *)&a + 32 * part, 0, 32);
        test_ok(handoff_identity_check(&a, &b, &e), &e);
    }
    struct kv_geometry g, h;
    geometry_small(&g);
    h = g;
    test_ok(handoff_geometry_check(&g, &h, &e), &e);
    h.local[0] = 1;
    test_fails(handoff_geometry_check(&g, &h, &e), BATON_ERR_MISMATCH, "layer 0 is global", &e);
    h = g;
    h.window++;
    test_fails(handoff_geometry_check(&g, &h, &e), BATON_ERR_MISMATCH, "window is 3 here, 4", &e);
    h = g;
    h.dtype = BATON_F32;
    test_fails(handoff_geometry_check(&g, &h, &e), BATON_ERR_MISMATCH, "KV dtype", &e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_abort_everywhere),
        cmocka_unit_test(test_pages_of_another),
        cmocka_unit_test(test_abort_crossing),
        cmocka_unit_test(test_refuse),
        cmocka_unit_test(test_abort_in_commit),
        cmocka_unit_test(test_close_everywhere),
        cmocka_unit_test(test_death),
        cmocka_unit_test(test_heartbeats),
        cmocka_unit_test(test_descriptors),
        cmocka_unit_test(test_link),
        cmocka_unit_test(test_usage),
        cmocka_unit_test(test_logits_missing),
        cmocka_unit_test(test_many),
        cmocka_unit_test(test_identity),
    };
    seed = test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
