/* SPDX-License-Identifier: Apache-2.0 */
/* Cancellation and death: at every state, from either side, and everything comes back. */
#include "rig.h"

#define N_IDS 90u

static void prepare(struct baton_request_options *o, int32_t *ids, uint32_t vocab, uint64_t *seed)
{
    rig_prompt(seed, vocab, ids, N_IDS);
    *o = (struct baton_request_options){.struct_size = sizeof *o,
                                        .ids = ids,
                                        .n_ids = N_IDS,
                                        .max_tokens = 30,
                                        .ignore_eos = true,
                                        .mode = test_range(seed, 0, 1) ? BATON_STREAM : BATON_WHOLE,
                                        .request_id = test_random(seed)};
}

static int drain(struct baton_request *r, uint32_t *n, struct baton_error *e)
{
    struct baton_token t;
    int rc;
    *n = 0;
    memset(e, 0, sizeof *e);
    while ((rc = baton_next(r, &t, -1, e)) == 1)
        (*n)++;
    return rc;
}

/* After whatever happened, the pair still hands over a request with the right bits. */
static void still_works(struct rig_pair *p, const char *device, uint64_t *seed)
{
    struct baton_request_options o;
    struct rig_run native, run;
    struct baton_error e;
    struct baton_token t;
    int32_t ids[N_IDS];
    prepare(&o, ids, p->vocab, seed);
    o.max_tokens = 3;
    rig_alone(p->model, device, 128, 0, &o, &native);
    struct baton_request *c = rig_submit(p->consumer, &o), *r = rig_submit(p->producer, &o);
    test_ok(rig_pull(c, &run, p->vocab, &e), &e);
    test_ok(baton_next(r, &t, -1, &e), &e);
    rig_equal(&run, &native, p->vocab, "after a cancel");
    baton_request_close(c);
    baton_request_close(r);
}

/* One side gives up after a random time; the other side hears of it, or was done before. */
static void cancel_round(struct rig_pair *p, bool at_producer, bool first, uint64_t most_ns,
                         uint64_t *seed, uint32_t seen[3])
{
    struct baton_request_options o;
    struct baton_request *c = NULL, *r;
    struct baton_error e;
    int32_t ids[N_IDS];
    uint32_t n;
    prepare(&o, ids, p->vocab, seed);
    if (first)
        c = rig_submit(p->consumer, &o);
    r = rig_submit(p->producer, &o);
    if (!first)
        c = rig_submit(p->consumer, &o);
    base_sleep_ns(test_random(seed) % most_ns);
    baton_cancel(at_producer ? r : c);
    int rp = drain(r, &n, &e);
    assert_true(rp == 0 || rp == BATON_ERR_CANCELLED);
    assert_int_equal(rig_stats(r).finish, rp ? BATON_CANCELLED : BATON_STOP);
    int rc = drain(c, &n, &e);
    struct baton_stats s = rig_stats(c);
    /* The consumer's own cancel is no error; the producer's is one, unless the ACK had left. */
    assert_true(rc == 0 || (at_producer && rp && rc == BATON_ERR_CANCELLED));
    if (rc == 0 && at_producer)
        assert_int_equal(s.finish, BATON_LENGTH);
    assert_true(s.finish == BATON_CANCELLED || (n == 30 && s.finish == BATON_LENGTH));
    seen[rp ? 0 : n < 30 ? 1 : 2]++;
    baton_request_close(r);
    baton_request_close(c);
    assert_int_equal(engine_blocks_used(p->producer), 0);
    assert_int_equal(engine_blocks_used(p->consumer), 0);
}

static void test_cancel_any_time(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    struct baton_model *m = rig_model("koni-tiny");
    struct rig_pair p;
    uint32_t seen[3] = {0};
    rig_pair_open(&p, m, rig_device(), 2, 128, 32);
    still_works(&p, rig_device(), &seed);
    /* As long as one whole request takes here. */
    uint64_t start = base_now_ns();
    struct baton_request_options o;
    int32_t ids[N_IDS];
    prepare(&o, ids, p.vocab, &seed);
    struct baton_request *c = rig_submit(p.consumer, &o), *r = rig_submit(p.producer, &o);
    struct baton_error e;
    uint32_t n;
    assert_int_equal(drain(c, &n, &e), 0);
    uint64_t most = (base_now_ns() - start) * 5 / 4 + 1;
    baton_request_close(c);
    baton_request_close(r);
    for (int i = 0; i < 48; i++)
        cancel_round(&p, i & 1, i & 2, i & 4 ? most : most / 8 + 1, &seed, seen);
    print_message("cancelled before COMMIT %u, while decoding %u, after the end %u\n", seen[0],
                  seen[1], seen[2]);
    assert_true(seen[0] > 0);
    still_works(&p, rig_device(), &seed);
    rig_pair_close(&p);
    baton_model_close(m);
}

/* A consumer that gives up before the offer: the offer is refused when it comes. */
static void test_cancel_before_offer(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    struct baton_model *m = rig_model("qwen3-tiny");
    struct baton_request_options o;
    struct baton_error e;
    struct rig_pair p;
    int32_t ids[N_IDS];
    uint32_t n;
    rig_pair_open(&p, m, rig_device(), 1, 128, 0);
    prepare(&o, ids, p.vocab, &seed);
    struct baton_request *c = rig_submit(p.consumer, &o);
    baton_request_close(c);
    struct baton_request *r = rig_submit(p.producer, &o);
    assert_int_equal(drain(r, &n, &e), BATON_ERR_CANCELLED);
    baton_request_close(r);
    /* The same id asked for anew is served. */
    c = rig_submit(p.consumer, &o);
    baton_request_close(c);
    c = rig_submit(p.consumer, &o);
    r = rig_submit(p.producer, &o);
    assert_int_equal(drain(c, &n, &e), 0);
    assert_int_equal(n, 30);
    assert_int_equal(drain(r, &n, &e), 0);
    baton_request_close(r);
    baton_request_close(c);
    rig_pair_close(&p);
    baton_model_close(m);
}

/* A producer that gives up while nobody asked for its request. */
static void test_cancel_unpaired_offer(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    struct baton_model *m = rig_model("qwen3-tiny");
    struct baton_request_options o;
    struct baton_error e;
    struct rig_pair p;
    struct baton_token t;
    int32_t ids[N_IDS];
    rig_pair_open(&p, m, rig_device(), 1, 128, 0);
    for (int i = 0; i < 4; i++) {
        prepare(&o, ids, p.vocab, &seed);
        struct baton_request *r = rig_submit(p.producer, &o);
        assert_int_equal(baton_next(r, &t, test_range(&seed, 0, 1) ? 30000000 : 0, &e),
                         BATON_ERR_TIMEOUT);
        baton_cancel(r);
        assert_int_equal(baton_next(r, &t, -1, &e), BATON_ERR_CANCELLED);
        baton_request_close(r);
        assert_int_equal(engine_blocks_used(p.producer), 0);
    }
    still_works(&p, rig_device(), &seed);
    rig_pair_close(&p);
    baton_model_close(m);
}

/* The same, and then somebody asks: told at once that no offer is to come, and served when the same
 * id is offered again. */
static void test_asked_after_withdrawal(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    struct baton_model *m = rig_model("qwen3-tiny");
    struct baton_request_options o;
    struct baton_error e;
    struct rig_pair p;
    struct baton_token t;
    int32_t ids[N_IDS];
    uint32_t n;
    rig_pair_open(&p, m, rig_device(), 1, 128, 0);
    prepare(&o, ids, p.vocab, &seed);
    struct baton_request *r = rig_submit(p.producer, &o);
    struct baton_stats stats = {.struct_size = sizeof stats};
    while (stats.prefilled_tokens < o.n_ids) { /* it was offered before it was computed */
        assert_int_equal(baton_next(r, &t, 1000000, &e), BATON_ERR_TIMEOUT);
        baton_request_stats(r, &stats);
    }
    baton_cancel(r);
    assert_int_equal(drain(r, &n, &e), BATON_ERR_CANCELLED);
    baton_request_close(r);
    uint64_t id = o.request_id;
    o.request_id = id + 1; /* what comes after it was seen by the consumer, so was it */
    r = rig_submit(p.producer, &o);
    struct baton_request *c = rig_submit(p.consumer, &o);
    assert_int_equal(drain(c, &n, &e), 0);
    assert_int_equal(drain(r, &n, &e), 0);
    baton_request_close(r);
    baton_request_close(c);
    o.request_id = id;
    c = rig_submit(p.consumer, &o);
    test_fails(drain(c, &n, &e), BATON_ERR_CANCELLED, "withdrew", &e);
    baton_request_close(c);
    c = rig_submit(p.consumer, &o);
    r = rig_submit(p.producer, &o);
    assert_int_equal(drain(c, &n, &e), 0);
    assert_int_equal(drain(r, &n, &e), 0);
    baton_request_close(r);
    baton_request_close(c);
    rig_pair_close(&p);
    baton_model_close(m);
}

/* One engine is closed while requests are in every state; the other names which role ended. */
static void peer_closes(bool producer_ends, uint64_t most_ns, uint64_t *seed)
{
    enum { N = 4 };
    struct baton_model *m = rig_model("qwen3-tiny");
    struct baton_request_options o[N];
    struct baton_request *c[N], *r[N];
    struct baton_error e;
    struct rig_pair p;
    int32_t ids[N][N_IDS];
    uint32_t n;
    rig_pair_open(&p, m, rig_device(), 2, 128, 8);
    for (int i = 0; i < N; i++) {
        prepare(&o[i], ids[i], p.vocab, seed);
        c[i] = rig_submit(p.consumer, &o[i]);
        r[i] = rig_submit(p.producer, &o[i]);
    }
    base_sleep_ns(test_random(seed) % most_ns);
    baton_engine_close(producer_ends ? p.producer : p.consumer);
    for (int i = 0; i < N; i++) {
        struct baton_request *lost = producer_ends ? c[i] : r[i];
        int rc = drain(lost, &n, &e);
        /* What was committed before goes on; what was not is the peer's fault or its cancel. */
        if (rc != 0 && rc != BATON_ERR_PEER && rc != BATON_ERR_CANCELLED)
            fail_msg("the peer's end is reported as %d %s", rc, e.text);
        if (rc == BATON_ERR_PEER)
            assert_non_null(strstr(e.text, producer_ends ? "producer" : "consumer"));
        if (rc == 0 && producer_ends)
            assert_int_equal(n, 30);
        rc = drain(producer_ends ? r[i] : c[i], &n, &e);
        assert_true(rc == 0 || rc == BATON_ERR_CANCELLED);
    }
    /* Later submits are told at once. */
    struct baton_request *late = rig_submit(
        producer_ends ? p.consumer : p.producer,
        &(struct baton_request_options){.struct_size = sizeof *o,
                                        .ids = ids[0],
                                        .n_ids = 5,
                                        .max_tokens = 2,
                                        .mode = BATON_WHOLE,
                                        .request_id = 1});
    assert_int_equal(drain(late, &n, &e), BATON_ERR_PEER);
    assert_non_null(strstr(e.text, producer_ends ? "producer" : "consumer"));
    baton_request_close(late);
    for (int i = 0; i < N; i++) {
        baton_request_close(c[i]);
        baton_request_close(r[i]);
    }
    if (producer_ends)
        p.producer = NULL;
    else
        p.consumer = NULL;
    rig_pair_close(&p);
    baton_model_close(m);
}

static void test_peer_closes(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    for (int i = 0; i < 8; i++)
        peer_closes(i & 1, i & 2 ? 150000000u : 15000000u, &seed);
}

/* A peer that is nobody's engine: garbage, then silence and the end of the stream. */
static void test_garbage_peer(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    struct baton_model *m = rig_model("qwen3-tiny");
    for (int role = BATON_PRODUCER; role <= BATON_CONSUMER; role++) {
        int fds[2];
        uint8_t junk[512];
        int32_t ids[N_IDS];
        struct baton_request_options o;
        struct baton_error e;
        uint32_t n;
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
        struct baton_engine *en = rig_engine(m, (enum baton_role)role, rig_device(), 1, 128, 0,
                                             fds[0]);
        prepare(&o, ids, baton_model_vocab(m), &seed);
        struct baton_request *r = rig_submit(en, &o);
        for (size_t i = 0; i < sizeof junk; i++)
            junk[i] = (uint8_t)test_random(&seed);
        assert_int_equal(write(fds[1], junk, sizeof junk), sizeof junk);
        assert_true(drain(r, &n, &e) < 0);
        print_message("garbage: %d %s\n", e.code, e.text);
        assert_true(strlen(e.text) > 0);
        baton_request_close(r);
        assert_int_equal(engine_blocks_used(en), 0);
        close(fds[1]);
        baton_engine_close(en);
    }
    baton_model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cancel_before_offer),
        cmocka_unit_test(test_cancel_unpaired_offer),
        cmocka_unit_test(test_asked_after_withdrawal),
        cmocka_unit_test(test_garbage_peer),
        cmocka_unit_test(test_peer_closes),
        cmocka_unit_test(test_cancel_any_time),
    };
    return cmocka_run_group_tests_name("engine: cancel", tests, NULL, NULL);
}
