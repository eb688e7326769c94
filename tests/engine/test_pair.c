/* SPDX-License-Identifier: Apache-2.0 */
/* Producer and consumer engines over a socket: the same bits as native, whatever the mode, chunk,
 * length and order of submits; refusals; many requests at once; a fork. */
#include <sys/wait.h>

#include "rig.h"

#define OUTPUT 6u

struct both {
    struct baton_request *producer, *consumer;
};

static void submit_both(struct rig_pair *p, const struct baton_request_options *o, bool first,
                        struct both *b)
{
    struct baton_request_options c = *o;
    c.mode = BATON_NATIVE; /* ignored there */
    if (first)
        b->consumer = rig_submit(p->consumer, &c);
    b->producer = rig_submit(p->producer, o);
    if (!first)
        b->consumer = rig_submit(p->consumer, &c);
}

static void close_both(struct both *b)
{
    baton_request_close(b->producer);
    baton_request_close(b->consumer);
}

static void check_stats(const struct rig_pair *p, const struct both *b, uint32_t n_ids)
{
    const struct model_config *c = model_config_of(engine_model(p->model));
    struct baton_stats s = rig_stats(b->consumer), mine = rig_stats(b->producer);
    assert_int_equal(s.layers, c->n_layers);
    assert_int_equal(s.slots, 2 * c->n_layers);
    assert_true(s.pieces >= s.slots && s.bytes > 0);
    assert_int_equal(s.global_first, 0);
    assert_int_equal(s.global_last, (int)n_ids - 1);
    if (c->window) {
        assert_int_equal(s.local_first, n_ids < c->window ? 0 : (int)(n_ids - c->window + 1));
        assert_int_equal(s.local_last, (int)n_ids - 1);
    } else {
        assert_int_equal(s.local_first, -1);
    }
    assert_string_equal(s.verdict, "verified");
    assert_int_equal(strlen(s.digest), 64);
    assert_true(s.prefill_ns > 0);
    assert_int_equal(s.prefill_ns, mine.prefill_ns);
    assert_int_equal(mine.finish, BATON_STOP);
    assert_string_equal(mine.verdict, "verified");
}

/* One request through a pair, compared with `native`. */
static void handover(struct rig_pair *p, const struct baton_request_options *o, bool first,
                     const struct rig_run *native, const char *what)
{
    struct both b;
    struct rig_run run;
    struct baton_error e;
    struct baton_token t;
    submit_both(p, o, first, &b);
    test_ok(rig_pull(b.consumer, &run, p->vocab, &e), &e);
    test_ok(baton_next(b.producer, &t, -1, &e), &e);
    rig_equal(&run, native, p->vocab, what);
    check_stats(p, &b, (uint32_t)o->n_ids);
    close_both(&b);
    rig_run_free(&run);
    assert_int_equal(engine_blocks_used(p->producer), 0);
    assert_int_equal(engine_blocks_used(p->consumer), 0);
}

static void equal_native(const char *model, const char *device, uint32_t n_ids, uint32_t chunk,
                         uint64_t *seed)
{
    struct baton_model *m = rig_model(model);
    uint32_t vocab = baton_model_vocab(m), ctx = n_ids + OUTPUT;
    int32_t *ids = calloc(n_ids, sizeof *ids);
    struct rig_run native;
    struct rig_pair p;
    char what[96];
    rig_prompt(seed, vocab, ids, n_ids);
    struct baton_request_options o = {
        .struct_size = sizeof o,
        .ids = ids,
        .n_ids = n_ids,
        .max_tokens = OUTPUT,
        .ignore_eos = true,
        .want_logits = true,
    };
    rig_alone(m, device, ctx, 0, &o, &native);
    rig_pair_open(&p, m, device, 1, ctx, chunk);
    for (int i = 0; i < 4; i++) {
        o.mode = i & 1 ? BATON_STREAM : BATON_WHOLE;
        o.request_id = test_random(seed);
        o.want_logits = test_range(seed, 0, 3) > 0;
        snprintf(what, sizeof what, "%s, %u tokens, chunks of %u, %s", model, n_ids, chunk,
                 i & 1 ? "stream" : "whole");
        handover(&p, &o, i & 2, &native, what);
    }
    rig_pair_close(&p);
    rig_run_free(&native);
    free(ids);
    baton_model_close(m);
}

static void test_equal_native(void **state)
{
    (void)state;
    static const uint32_t chunks[] = {1, 7, 64, 128, 512};
    uint64_t seed = test_seed();
    bool fast = !strcmp(rig_device(), "cpu");
    for (int i = 0; i < RIG_MODELS; i++)
        for (int k = 0; k < 5; k++) {
            uint32_t most = !fast ? 140 : chunks[k] < 64 ? 200 : 700;
            if (RIG_SHORT && k != i + 1)
                continue;
            most = RIG_SHORT ? 100 : most;
            equal_native(rig_models[i], rig_device(), test_range(&seed, 1, most), chunks[k], &seed);
        }
}

/* Lengths around pages and Gemma's window. */
static void test_edges(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 2, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1023, 1025};
    uint64_t seed = test_seed();
    bool fast = !strcmp(rig_device(), "cpu");
    uint32_t most = RIG_SHORT ? 65 : fast ? UINT32_MAX : 200;
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths && lengths[i] <= most; i++)
        equal_native("gemma3-tiny", rig_device(), lengths[i], test_range(&seed, 1, 200), &seed);
}

/* Sampling with every parameter that makes the consumer ask for the row. */
static void test_sampling(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    struct baton_model *m = rig_model("qwen3-small");
    const int32_t force[] = {5, 6, 7};
    int32_t ids[33];
    struct rig_run native;
    struct rig_pair p;
    rig_prompt(&seed, baton_model_vocab(m), ids, 33);
    struct baton_request_options o = {
        .struct_size = sizeof o, .ids = ids, .n_ids = 33, .max_tokens = 12, .mode = BATON_STREAM};
    rig_pair_open(&p, m, rig_device(), 1, 64, 16);
    for (int i = 0; i < 4; i++) {
        o.request_id = (uint64_t)i;
        o.temperature = i == 0 ? 1.3f : 0;
        o.seed = test_random(&seed);
        o.min_tokens = i == 1 ? 5 : 0;
        o.force = i >= 2 ? force : NULL;
        o.n_force = i >= 2 ? 3 : 0;
        o.want_logits = i == 3;
        rig_alone(m, rig_device(), 64, 0, &o, &native);
        handover(&p, &o, i & 1, &native, "sampled");
        rig_run_free(&native);
    }
    rig_pair_close(&p);
    baton_model_close(m);
}

/* More requests than lanes and pages, submitted in opposite orders at the two ends. */
static void test_opposite_orders(void **state)
{
    (void)state;
    enum { N = 9 };
    uint64_t seed = test_seed();
    struct baton_model *m = rig_model("koni-tiny");
    int32_t ids[N][60];
    struct rig_run native[N], run;
    struct baton_request_options o[N];
    struct both b[N];
    struct rig_pair p;
    struct baton_error e;
    struct baton_token t;
    for (uint32_t lanes = 1; lanes <= 2; lanes++) {
        rig_pair_open(&p, m, rig_device(), lanes, 64, 16);
        for (int i = 0; i < N; i++) {
            uint32_t n = test_range(&seed, 1, 60);
            rig_prompt(&seed, p.vocab, ids[i], n);
            o[i] = (struct baton_request_options){.struct_size = sizeof o[i],
                                                  .ids = ids[i],
                                                  .n_ids = n,
                                                  .max_tokens = 4,
                                                  .ignore_eos = true,
                                                  .request_id = (uint64_t)i,
                                                  .mode = i % 2 ? BATON_STREAM : BATON_WHOLE};
            rig_alone(m, rig_device(), 64, 0, &o[i], &native[i]);
        }
        for (int i = 0; i < N; i++)
            b[i].producer = rig_submit(p.producer, &o[i]);
        for (int i = N - 1; i >= 0; i--) {
            b[i].consumer = rig_submit(p.consumer, &o[i]);
            base_sleep_ns(test_range(&seed, 0, 5000000));
        }
        for (int i = 0; i < N; i++) {
            test_ok(rig_pull(b[i].consumer, &run, p.vocab, &e), &e);
            test_ok(baton_next(b[i].producer, &t, -1, &e), &e);
            rig_equal(&run, &native[i], p.vocab, "one of many");
            close_both(&b[i]);
        }
        rig_pair_close(&p);
    }
    baton_model_close(m);
}

/* What does not agree is refused, and named at both ends. */
static void test_refusals(void **state)
{
    (void)state;
    struct baton_model *m = rig_model("qwen3-tiny");
    struct rig_pair p;
    struct both b;
    struct baton_error e;
    struct baton_token t;
    const int32_t ids[] = {1, 2, 3, 4}, others[] = {1, 2, 9, 4};
    struct baton_request_options o = {.struct_size = sizeof o,
                                      .ids = ids,
                                      .n_ids = 4,
                                      .max_tokens = 2,
                                      .mode = BATON_WHOLE,
                                      .request_id = 77};
    struct baton_request_options c = o;
    rig_pair_open(&p, m, rig_device(), 1, 64, 0);
    for (int i = 0; i < 2; i++) {
        c.ids = i ? ids : others;
        c.n_ids = i ? 3 : 4;
        o.request_id = c.request_id = 77u + (unsigned)i;
        b.producer = rig_submit(p.producer, &o);
        b.consumer = rig_submit(p.consumer, &c);
        test_fails(baton_next(b.consumer, &t, -1, &e), BATON_ERR_MISMATCH, "token ids", &e);
        test_fails(baton_next(b.producer, &t, -1, &e), BATON_ERR_MISMATCH, "token ids", &e);
        assert_int_equal(rig_stats(b.consumer).finish, BATON_FAILED);
        close_both(&b);
    }
    struct baton_request *r = rig_submit(p.producer, &o), *again = NULL;
    test_fails(baton_submit(p.producer, &o, &again, &e), BATON_ERR_USAGE, "in use", &e);
    baton_request_close(r);
    o.mode = BATON_NATIVE;
    test_fails(baton_submit(p.producer, &o, &again, &e), BATON_ERR_USAGE, "mode", &e);
    rig_pair_close(&p);

    /* Two models. */
    struct baton_model *other = rig_model("qwen3-small");
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    p.producer = rig_engine(m, BATON_PRODUCER, rig_device(), 1, 64, 0, fds[0]);
    p.consumer = rig_engine(other, BATON_CONSUMER, rig_device(), 1, 64, 0, fds[1]);
    o.mode = BATON_STREAM;
    submit_both(&p, &o, true, &b);
    test_fails(baton_next(b.consumer, &t, -1, &e), BATON_ERR_MISMATCH, "weights", &e);
    test_fails(baton_next(b.producer, &t, -1, &e), BATON_ERR_MISMATCH, "weights", &e);
    close_both(&b);
    rig_pair_close(&p);
    baton_model_close(other);
    baton_model_close(m);
}

/* The saved cache of an import is the saved cache of a native prefill, bit for bit. */
static void test_saved_equal(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    struct baton_model *m = rig_model("gemma3-tiny");
    bool fast = !strcmp(rig_device(), "cpu");
    uint32_t n = test_range(&seed, fast ? 520 : 65, fast ? 640 : 90);
    int32_t *ids = calloc(n, sizeof *ids);
    char paths[2][64], *bytes[2];
    size_t size[2];
    struct rig_run native;
    struct rig_pair p;
    struct baton_error e;
    rig_prompt(&seed, baton_model_vocab(m), ids, n);
    struct baton_request_options o = {.struct_size = sizeof o,
                                      .ids = ids,
                                      .n_ids = n,
                                      .max_tokens = 1,
                                      .mode = BATON_STREAM,
                                      .ignore_eos = true};
    for (int i = 0; i < 2; i++)
        snprintf(paths[i], sizeof paths[i], "/tmp/baton-test-pair-%d-%d", (int)getpid(), i);
    o.kv_save = paths[0];
    rig_alone(m, rig_device(), n + 1, 0, &o, &native);
    rig_pair_open(&p, m, rig_device(), 1, n + 1, 33);
    struct both b;
    o.kv_save = NULL;
    b.producer = rig_submit(p.producer, &o);
    o.kv_save = paths[1];
    b.consumer = rig_submit(p.consumer, &o);
    struct rig_run run;
    test_ok(rig_pull(b.consumer, &run, p.vocab, &e), &e);
    rig_equal(&run, &native, p.vocab, "saved");
    close_both(&b);
    for (int i = 0; i < 2; i++) {
        test_ok(base_file_read(paths[i], 1u << 30, &bytes[i], &size[i], &e), &e);
        unlink(paths[i]);
    }
    assert_int_equal(size[0], size[1]);
    assert_memory_equal(bytes[0], bytes[1], size[0]);
    free(bytes[0]);
    free(bytes[1]);
    rig_pair_close(&p);
    free(ids);
    baton_model_close(m);
}

/* As a command line does it: weights prepared once, then fork; the child produces. */
static void test_fork(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    struct baton_error e;
    struct baton_model *m = NULL;
    struct baton_model_options mo = {.struct_size = sizeof mo,
                                     .path = test_path("models/gemma3-tiny")};
    test_ok(baton_model_open(&mo, &m, &e), &e);
    test_ok(baton_model_prepare(m, rig_device(), &e), &e);
    int32_t ids[70];
    struct rig_run native, run;
    rig_prompt(&seed, baton_model_vocab(m), ids, 70);
    struct baton_request_options o = {.struct_size = sizeof o,
                                      .ids = ids,
                                      .n_ids = 70,
                                      .max_tokens = 4,
                                      .mode = BATON_STREAM,
                                      .ignore_eos = true,
                                      .want_logits = true};
    int fds[2], status;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    pid_t pid = fork();
    if (pid == 0) {
        struct baton_token t;
        close(fds[1]);
        struct baton_engine *en = rig_engine(m, BATON_PRODUCER, rig_device(), 1, 128, 16, fds[0]);
        struct baton_request *r = rig_submit(en, &o);
        int rc = baton_next(r, &t, -1, &e);
        baton_request_close(r);
        baton_engine_close(en);
        baton_model_close(m);
        _exit(rc ? 9 : 0);
    }
    close(fds[0]);
    struct baton_engine *en = rig_engine(m, BATON_CONSUMER, rig_device(), 1, 128, 0, fds[1]);
    struct baton_request *r = rig_submit(en, &o);
    test_ok(rig_pull(r, &run, baton_model_vocab(m), &e), &e);
    baton_request_close(r);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    baton_engine_close(en);
    rig_alone(m, rig_device(), 128, 0, &o, &native);
    rig_equal(&run, &native, baton_model_vocab(m), "across a fork");
    rig_run_free(&run);
    rig_run_free(&native);
    baton_model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fork),         cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_sampling),     cmocka_unit_test(test_opposite_orders),
        cmocka_unit_test(test_saved_equal),  cmocka_unit_test(test_edges),
        cmocka_unit_test(test_equal_native),
    };
    return cmocka_run_group_tests_name("engine: pair", tests, NULL, NULL);
}
