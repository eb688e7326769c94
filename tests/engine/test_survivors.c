/* SPDX-License-Identifier: Apache-2.0 */
/* Many lanes at both ends, and everything that can happen to a neighbour: cancels from either side,
 * handoffs that are refused, a process that is killed. Who was not touched has the bits of an
 * undisturbed run, lanes and pages come back and take new requests. */
#include <signal.h>
#include <sys/wait.h>

#include "rig.h"

#define PROMPTS 5u
#define MOST 110u
#define OUTPUT 10u
#define CTX 128u

/* Prompts and what they give when nobody disturbs. */
struct pool {
    uint32_t n[PROMPTS];
    int32_t ids[PROMPTS][MOST];
    struct rig_run native[PROMPTS];
};

static struct baton_request_options ask(const struct pool *p, uint32_t k, uint64_t id)
{
    return (struct baton_request_options){.struct_size = sizeof(struct baton_request_options),
                                          .ids = p->ids[k],
                                          .n_ids = p->n[k],
                                          .max_tokens = OUTPUT,
                                          .ignore_eos = true,
                                          .want_logits = true,
                                          .request_id = id,
                                          .mode = id % 2 ? BATON_STREAM : BATON_WHOLE};
}

static void pool_fill(struct pool *p, uint32_t vocab, uint64_t *seed)
{
    for (uint32_t k = 0; k < PROMPTS; k++) {
        p->n[k] = test_range(seed, 2, MOST);
        rig_prompt(seed, vocab, p->ids[k], p->n[k]);
    }
}

static void pool_run(struct pool *p, struct baton_model *m)
{
    struct baton_engine *en = rig_engine(m, BATON_BOTH, rig_device(), 1, CTX, 0, -1);
    struct baton_error e;
    for (uint32_t k = 0; k < PROMPTS; k++) {
        struct baton_request_options o = ask(p, k, 0);
        struct baton_request *r = rig_submit(en, &o);
        test_ok(rig_pull(r, &p->native[k], baton_model_vocab(m), &e), &e);
        baton_request_close(r);
    }
    baton_engine_close(en);
}

static void pool_free(struct pool *p)
{
    for (uint32_t k = 0; k < PROMPTS; k++)
        rig_run_free(&p->native[k]);
}

/* What is done to a request. */
enum deed { LET_BE, CANCEL_PRODUCER, CANCEL_CONSUMER, REFUSE, N_DEEDS };

struct pairing {
    struct baton_request *producer, *consumer;
    uint32_t k;
    enum deed deed;
};

static void begin(struct rig_pair *p, struct pool *pool, struct pairing *x, uint64_t id,
                  enum deed deed, uint64_t *seed)
{
    int32_t other[MOST];
    x->k = test_range(seed, 0, PROMPTS - 1);
    x->deed = deed;
    struct baton_request_options o = ask(pool, x->k, id), po = o;
    if (deed == REFUSE) {
        memcpy(other, o.ids, o.n_ids * sizeof *other);
        other[o.n_ids - 1] ^= 1;
        po.ids = other;
    }
    bool first = test_range(seed, 0, 1);
    if (first)
        x->consumer = rig_submit(p->consumer, &o);
    x->producer = rig_submit(p->producer, &po);
    if (!first)
        x->consumer = rig_submit(p->consumer, &o);
}

/* The end of one: right bits or the right reason. */
static void finish(struct rig_pair *p, struct pool *pool, struct pairing *x, uint32_t seen[2])
{
    struct rig_run run;
    struct baton_error e;
    struct baton_token t;
    int rc = rig_pull(x->consumer, &run, p->vocab, &e);
    if (x->deed == LET_BE)
        test_ok(rc, &e);
    if (x->deed == REFUSE)
        assert_int_equal(rc, BATON_ERR_MISMATCH);
    assert_true(rc == 0 || rc == BATON_ERR_CANCELLED || x->deed == REFUSE);
    if (run.n == OUTPUT)
        rig_equal(&run, &pool->native[x->k], p->vocab, "a survivor");
    else
        assert_true(x->deed != LET_BE);
    seen[run.n == OUTPUT]++;
    int rp = baton_next(x->producer, &t, -1, &e);
    assert_true(rp == 0 || rp == BATON_ERR_CANCELLED ||
                (x->deed == REFUSE && rp == BATON_ERR_MISMATCH));
    if (x->deed == LET_BE)
        assert_int_equal(rp, 0);
    rig_run_free(&run);
    baton_request_close(x->consumer);
    baton_request_close(x->producer);
}

/* A lot of requests with random deeds, then as many undisturbed ones as there are lanes. */
static void disturbed(struct rig_pair *p, struct pool *pool, uint32_t lanes, uint64_t *seed)
{
    struct pairing x[24];
    uint32_t n = 3 * lanes, seen[2] = {0, 0};
    for (uint32_t i = 0; i < n; i++)
        begin(p, pool, &x[i], i + 1, i % 2 ? LET_BE : (enum deed)test_range(seed, 0, N_DEEDS - 1),
              seed);
    for (uint32_t i = 0; i < n; i++) {
        base_sleep_ns(test_random(seed) % 4000000);
        if (x[i].deed == CANCEL_PRODUCER)
            baton_cancel(x[i].producer);
        if (x[i].deed == CANCEL_CONSUMER)
            baton_cancel(x[i].consumer);
    }
    for (uint32_t i = 0; i < n; i++)
        finish(p, pool, &x[i], seen);
    assert_true(seen[1] >= n / 2);
    assert_int_equal(engine_blocks_used(p->producer), 0);
    assert_int_equal(engine_blocks_used(p->consumer), 0);
    for (uint32_t i = 0; i < lanes; i++)
        begin(p, pool, &x[i], i + 1, LET_BE, seed);
    for (uint32_t i = 0; i < lanes; i++)
        finish(p, pool, &x[i], seen);
    print_message("%u lanes: %u whole, %u not\n", lanes, seen[1], seen[0]);
}

static void test_deeds(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    static const char *const models[] = {"qwen3-tiny", "gemma3-tiny"};
    for (size_t i = 0; i < (RIG_SHORT ? 1 : 2); i++) {
        struct baton_model *m = rig_model(models[i]);
        struct pool pool;
        pool_fill(&pool, baton_model_vocab(m), &seed);
        pool_run(&pool, m);
        for (uint32_t lanes = 2; lanes <= (RIG_SHORT ? 2 : 8); lanes *= 2) {
            struct rig_pair p;
            rig_pair_open(&p, m, rig_device(), lanes, CTX, test_range(&seed, 16, 80));
            disturbed(&p, &pool, lanes, &seed);
            rig_pair_close(&p);
        }
        pool_free(&pool);
        baton_model_close(m);
    }
}

/* ---- a process that is killed --------------------------------------------------------------- */

/* The child's life: its end of N requests, all at once, until it is killed. */
static void other_process(struct baton_model *m, const struct pool *pool, enum baton_role role,
                          uint32_t lanes, uint32_t n, int fd, int go)
{
    char byte;
    if (read(go, &byte, 1) != 1)
        _exit(1);
    struct baton_engine *en = rig_engine(m, role, rig_device(), lanes, CTX, 24, fd);
    struct baton_request *r[16];
    struct baton_error e;
    for (uint32_t i = 0; i < n; i++) {
        struct baton_request_options o = ask(pool, i % PROMPTS, i + 1);
        r[i] = rig_submit(en, &o);
    }
    for (uint32_t i = 0; i < n; i++) {
        struct baton_token t;
        while (baton_next(r[i], &t, -1, &e) == 1)
            ;
    }
    for (;;)
        pause();
}

/* This process's end of request i after the other was killed; true where it was done before. A
 * consumer's odd requests may prefill here. */
static bool outcome(struct baton_request *r, const struct rig_run *native, bool local,
                    enum baton_role role, uint32_t vocab)
{
    struct rig_run run;
    struct baton_error e;
    int rc = rig_pull(r, &run, vocab, &e);
    struct baton_stats s = rig_stats(r);
    if (rc == 0 && role == BATON_CONSUMER)
        rig_equal(&run, native, vocab, "beside a killed process");
    if (rc)
        assert_int_equal(rc, BATON_ERR_PEER);
    assert_true(rc == 0 || !local);
    bool verified = !strcmp(s.verdict, "verified");
    if (local && !verified)
        assert_string_equal(s.verdict, "local-prefill: peer");
    rig_run_free(&run);
    return verified;
}

static void killed(const char *model, enum baton_role role, uint32_t lanes, uint64_t most_ns,
                   uint64_t *seed, uint32_t seen[2])
{
    struct baton_model *m = rig_model(model);
    uint32_t vocab = baton_model_vocab(m), n = 2 * lanes;
    struct baton_request *r[16];
    struct baton_error e;
    struct pool pool;
    int fds[2], go[2], status;
    pool_fill(&pool, vocab, seed);
    test_ok(baton_model_prepare(m, rig_device(), &e), &e);
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    assert_int_equal(pipe(go), 0);
    pid_t pid = fork();
    if (pid == 0) {
        close(fds[1]);
        close(go[1]);
        other_process(m, &pool, role == BATON_CONSUMER ? BATON_PRODUCER : BATON_CONSUMER, lanes, n,
                      fds[0], go[0]);
    }
    close(fds[0]);
    close(go[0]);
    pool_run(&pool, m);
    struct baton_engine *en = rig_engine(m, role, rig_device(), lanes, CTX, 0, fds[1]);
    for (uint32_t i = 0; i < n; i++) {
        struct baton_request_options o = ask(&pool, i % PROMPTS, i + 1);
        o.local_prefill = role == BATON_CONSUMER && i % 2;
        r[i] = rig_submit(en, &o);
    }
    assert_int_equal(write(go[1], "g", 1), 1);
    base_sleep_ns(test_random(seed) % most_ns);
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    close(go[1]);
    for (uint32_t i = 0; i < n; i++) {
        bool local = role == BATON_CONSUMER && i % 2;
        seen[outcome(r[i], &pool.native[i % PROMPTS], local, role, vocab)]++;
        baton_request_close(r[i]);
    }
    assert_int_equal(engine_blocks_used(en), 0);
    baton_engine_close(en);
    pool_free(&pool);
    baton_model_close(m);
}

static void test_killed(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    int rounds = RIG_SHORT ? 1 : 4;
    for (int role = BATON_PRODUCER; role <= BATON_CONSUMER; role++) {
        uint32_t seen[2] = {0, 0};
        for (int i = 0; i < rounds; i++)
            for (uint32_t lanes = 2; lanes <= (RIG_SHORT ? 2 : 8); lanes *= 2)
                killed(i % 2 ? "qwen3-tiny" : "koni-tiny", (enum baton_role)role, lanes,
                       i == 0 ? 20000000 : 400000000, &seed, seen);
        print_message("the %s was killed: %u handed over before, %u not\n",
                      role == BATON_PRODUCER ? "consumer" : "producer", seen[1], seen[0]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed),
        cmocka_unit_test(test_deeds),
    };
    return cmocka_run_group_tests_name("engine: survivors", tests, NULL, NULL);
}
