/* SPDX-License-Identifier: Apache-2.0 */
/* A handoff that fails before COMMIT, at a consumer that may compute the prompt itself: the same
 * bits as native whatever went wrong, nothing of what came is used, and the record says so. */
#include <signal.h>
#include <sys/wait.h>

#include "relay.h"
#include "rig.h"

#define CTX 256u

static uint32_t vocab_of(const struct baton_model *m)
{
    return baton_model_vocab(m);
}

static struct baton_request_options ask(int32_t *ids, uint32_t n_ids, uint64_t id)
{
    return (struct baton_request_options){.struct_size = sizeof(struct baton_request_options),
                                          .ids = ids,
                                          .n_ids = n_ids,
                                          .max_tokens = 6,
                                          .ignore_eos = true,
                                          .want_logits = true,
                                          .local_prefill = true,
                                          .request_id = id,
                                          .mode = id % 2 ? BATON_STREAM : BATON_WHOLE};
}

/* It answers as if there had never been a producer, and says why there was none. */
static void check_local(struct baton_request *r, const struct rig_run *native, uint32_t vocab,
                        const char *verdict, const char *word)
{
    struct rig_run run;
    struct baton_error e;
    test_ok(rig_pull(r, &run, vocab, &e), &e);
    rig_equal(&run, native, vocab, verdict);
    struct baton_stats s = rig_stats(r);
    assert_int_equal(s.finish, BATON_LENGTH);
    assert_string_equal(s.verdict, verdict);
    if (!strstr(s.reason, word))
        fail_msg("'%s' does not speak of '%s'", s.reason, word);
    assert_int_equal(s.slots + s.pieces + s.bytes, 0);
    assert_string_equal(s.digest, "");
    assert_true(s.prefill_ns > 0);
    rig_run_free(&run);
    baton_request_close(r);
}

/* ---- refusals ----------------------------------------------------------------------------- */

static void test_refused(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    struct baton_model *m = rig_model("qwen3-tiny"), *other = rig_model("qwen3-small");
    uint32_t n = test_range(&seed, 2, 100);
    int32_t ids[100], others[100];
    struct rig_run native;
    struct baton_error e;
    struct baton_token t;
    int fds[2];
    rig_prompt(&seed, vocab_of(m) < vocab_of(other) ? vocab_of(m) : vocab_of(other), ids, n);
    memcpy(others, ids, sizeof ids);
    others[n / 2] ^= 1;
    for (int i = 0; i < 2; i++) { /* another model; another prompt */
        struct rig_pair p = {.vocab = vocab_of(m)};
        struct baton_request_options o = ask(ids, n, (uint64_t)i + 1), po = o;
        assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
        p.producer = rig_engine(i ? m : other, BATON_PRODUCER, rig_device(), 1, CTX, 0, fds[0]);
        p.consumer = rig_engine(m, BATON_CONSUMER, rig_device(), 1, CTX, 33, fds[1]);
        rig_alone(m, rig_device(), CTX, 0, &o, &native);
        po.ids = i ? others : ids;
        po.mode = BATON_STREAM;
        struct baton_request *c = rig_submit(p.consumer, &o), *r = rig_submit(p.producer, &po);
        check_local(c, &native, p.vocab, "local-prefill: mismatch",
                    i ? "token ids differ" : "weights");
        test_fails(baton_next(r, &t, -1, &e), BATON_ERR_MISMATCH, "differ", &e);
        assert_true(strlen(rig_stats(r).reason) > 0);
        baton_request_close(r);
        rig_run_free(&native);
        rig_pair_close(&p);
    }
    baton_model_close(other);
    baton_model_close(m);
}

/* ---- a stream that is damaged or cut -------------------------------------------------------- */

/* Three requests through one damaged stream; those that it did not touch are handed over. */
static void damaged(const char *model, enum relay_fault fault, uint64_t *seed)
{
    enum { N = 3 };
    struct baton_model *m = rig_model(model);
    uint32_t vocab = vocab_of(m), local = 0;
    int32_t ids[N][120];
    struct rig_run native[N];
    struct baton_request *c[N], *r[N];
    struct baton_error e;
    struct relay relay;
    relay_open(&relay, fault, test_range(seed, 1, 2 * N * baton_model_layers(m)), *seed);
    struct baton_engine *producer = rig_engine(m, BATON_PRODUCER, rig_device(), 2, CTX, 32,
                                               relay.producer);
    struct baton_engine *consumer = rig_engine(m, BATON_CONSUMER, rig_device(), 2, CTX, 32,
                                               relay.consumer);
    for (int i = 0; i < N; i++) {
        uint32_t n = test_range(seed, 1, 120);
        rig_prompt(seed, vocab, ids[i], n);
        struct baton_request_options o = ask(ids[i], n, (uint64_t)i + 1);
        rig_alone(m, rig_device(), CTX, 0, &o, &native[i]);
        c[i] = rig_submit(consumer, &o);
        r[i] = rig_submit(producer, &o);
    }
    for (int i = 0; i < N; i++) {
        struct baton_token t;
        struct rig_run run;
        test_ok(rig_pull(c[i], &run, vocab, &e), &e);
        rig_equal(&run, &native[i], vocab, "through a damaged stream");
        rig_run_free(&run);
        struct baton_stats s = rig_stats(c[i]);
        bool verified = !strcmp(s.verdict, "verified");
        local += !verified;
        if (fault == RELAY_FLIP && !verified) {
            assert_int_equal(relay.request, i + 1);
            assert_string_equal(s.verdict, "local-prefill: integrity");
            assert_non_null(strstr(s.reason, "layer"));
        } else if (!verified) {
            assert_string_equal(s.verdict, "local-prefill: peer");
            assert_non_null(strstr(s.reason, "producer"));
        }
        int rc = baton_next(r[i], &t, -1, &e);
        assert_true(rc == 0 ? verified || fault == RELAY_CUT : rc == e.code);
        baton_request_close(c[i]);
        baton_request_close(r[i]);
        rig_run_free(&native[i]);
    }
    assert_true(fault == RELAY_CUT ? local >= 1 : local == 1);
    assert_int_equal(engine_blocks_used(producer), 0);
    assert_int_equal(engine_blocks_used(consumer), 0);
    baton_engine_close(producer);
    baton_engine_close(consumer);
    relay_close(&relay);
    baton_model_close(m);
}

static void test_damaged(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    for (int i = 0; i < (RIG_SHORT ? 2 : 8); i++)
        damaged(i % 4 < 2 ? "gemma3-tiny" : "koni-tiny", i % 2 ? RELAY_FLIP : RELAY_CUT, &seed);
}

/* Without the policy the same is an error. */
static void test_default_fails(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    struct baton_model *m = rig_model("qwen3-tiny");
    int32_t ids[90];
    struct rig_run run;
    struct baton_error e;
    rig_prompt(&seed, vocab_of(m), ids, 90);
    for (int i = 0; i < 2; i++) {
        struct relay relay;
        struct baton_request_options o = ask(ids, 90, (uint64_t)i + 1);
        o.local_prefill = false;
        relay_open(&relay, i ? RELAY_FLIP : RELAY_CUT, 2, seed);
        struct rig_pair p = {.vocab = vocab_of(m)};
        p.producer = rig_engine(m, BATON_PRODUCER, rig_device(), 1, CTX, 0, relay.producer);
        p.consumer = rig_engine(m, BATON_CONSUMER, rig_device(), 1, CTX, 0, relay.consumer);
        struct baton_request *c = rig_submit(p.consumer, &o), *r = rig_submit(p.producer, &o);
        assert_int_equal(rig_pull(c, &run, p.vocab, &e), i ? BATON_ERR_INTEGRITY : BATON_ERR_PEER);
        assert_int_equal(run.n, 0);
        struct baton_stats s = rig_stats(c);
        assert_int_equal(s.finish, BATON_FAILED);
        assert_string_equal(s.verdict, i ? "failed: integrity" : "failed: peer");
        assert_string_equal(s.reason, e.text);
        baton_request_close(c);
        baton_request_close(r);
        rig_pair_close(&p);
        relay_close(&relay);
    }
    baton_model_close(m);
}

/* ---- a producer that is gone or gives up ---------------------------------------------------- */

static void test_gone(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    struct baton_model *m = rig_model("koni-tiny");
    struct rig_pair p;
    struct rig_run native;
    int32_t ids[3][100];
    rig_pair_open(&p, m, rig_device(), 2, CTX, 16);
    struct baton_request_options o[3];
    for (int i = 0; i < 3; i++) {
        rig_prompt(&seed, p.vocab, ids[i], 100);
        o[i] = ask(ids[i], 100, (uint64_t)i + 1);
    }
    /* It gives one up: an offer that nobody answered, so before COMMIT for certain. */
    struct baton_request *r = rig_submit(p.producer, &o[0]);
    baton_cancel(r);
    struct baton_request *c = rig_submit(p.consumer, &o[0]);
    baton_request_close(r);
    /* It ends, with one that it never offered, and one that comes later. */
    struct baton_request *waits = rig_submit(p.consumer, &o[1]);
    baton_engine_close(p.producer);
    p.producer = NULL;
    struct baton_request *late = rig_submit(p.consumer, &o[2]);
    struct baton_request *all[] = {c, waits, late};
    for (int i = 0; i < 3; i++) {
        rig_alone(m, rig_device(), CTX, 0, &o[i], &native);
        /* The first was withdrawn before or after it was paired. */
        if (i == 0) {
            struct rig_run run;
            struct baton_error e;
            test_ok(rig_pull(c, &run, p.vocab, &e), &e);
            rig_equal(&run, &native, p.vocab, "given up");
            assert_int_equal(strncmp(rig_stats(c).verdict, "local-prefill: ", 15), 0);
            rig_run_free(&run);
            baton_request_close(c);
        } else {
            check_local(all[i], &native, p.vocab, "local-prefill: peer", "producer");
        }
        rig_run_free(&native);
    }
    rig_pair_close(&p);
    baton_model_close(m);
}

/* One that falls back while a handoff has the pages starts when that one is over, which may be at
 * its first token, before any step. */
static void test_waits(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    struct baton_model *m = rig_model("qwen3-tiny");
    int32_t large[CTX - 6], small[60], other[CTX - 6];
    struct rig_pair p;
    struct rig_run native, run;
    struct baton_error e;
    rig_pair_open(&p, m, rig_device(), 1, CTX, 4);
    rig_prompt(&seed, p.vocab, large, CTX - 6);
    rig_prompt(&seed, p.vocab, small, 60);
    memcpy(other, large, sizeof large);
    other[0] ^= 1;
    struct baton_request_options a = ask(large, CTX - 6, 1), b = ask(small, 60, 2), pa = a;
    pa.ids = other;
    b.max_tokens = 1;
    rig_alone(m, rig_device(), CTX, 0, &a, &native);
    struct baton_request *ca = rig_submit(p.consumer, &a), *cb = rig_submit(p.consumer, &b);
    struct baton_request *rb = rig_submit(p.producer, &b), *ra = rig_submit(p.producer, &pa);
    check_local(ca, &native, p.vocab, "local-prefill: mismatch", "token ids differ");
    test_ok(rig_pull(cb, &run, p.vocab, &e), &e);
    assert_int_equal(run.n, 1);
    rig_run_free(&run);
    rig_run_free(&native);
    baton_request_close(cb);
    baton_request_close(ra);
    baton_request_close(rb);
    rig_pair_close(&p);
    baton_model_close(m);
}

/* The consumer's own cancel is obeyed, before the fall and after it. */
static void test_cancelled(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    struct baton_model *m = rig_model("qwen3-tiny");
    struct rig_pair p;
    struct baton_error e;
    struct rig_run run;
    int32_t ids[200];
    rig_pair_open(&p, m, rig_device(), 1, CTX, 1);
    rig_prompt(&seed, p.vocab, ids, 200);
    baton_engine_close(p.producer);
    p.producer = NULL;
    for (int i = 0; i < 6; i++) {
        struct baton_request_options o = ask(ids, 200, (uint64_t)i + 1);
        struct baton_request *c = rig_submit(p.consumer, &o);
        base_sleep_ns(test_random(&seed) % 20000000);
        baton_cancel(c);
        assert_int_equal(rig_pull(c, &run, p.vocab, &e), 0);
        rig_run_free(&run);
        if (run.n < 6)
            assert_int_equal(rig_stats(c).finish, BATON_CANCELLED);
        baton_request_close(c);
        assert_int_equal(engine_blocks_used(p.consumer), 0);
    }
    rig_pair_close(&p);
    baton_model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused), cmocka_unit_test(test_default_fails),
        cmocka_unit_test(test_gone),    cmocka_unit_test(test_cancelled),
        cmocka_unit_test(test_damaged), cmocka_unit_test(test_waits),
    };
    return cmocka_run_group_tests_name("engine: fallback", tests, NULL, NULL);
}
