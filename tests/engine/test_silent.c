/* SPDX-License-Identifier: Apache-2.0 */
/* A peer that falls silent: behind a network that is cut, or stopped in the middle of a handoff and
 * continued when everybody has given it up. Who is decoding already goes on to the last bit, who
 * may prefill here does, the others are told, and what a continued producer writes late hits
 * nothing. */
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "chaos.h"
#include "tests/netns.h"
#include "transport/transport.h"

#define PROMPTS 4u
#define MOST 110u
#define OUTPUT 40u
#define CTX 160u
#define DEAD_NS 4000000000u /* long enough for an engine to open on a machine that has more to do */

static uint64_t seed;
static struct baton_model *model;
static uint32_t vocab;
static struct chaos_prompt prompts[PROMPTS];

static struct baton_request_options ask(uint32_t k, uint64_t id)
{
    return (struct baton_request_options){.struct_size = sizeof(struct baton_request_options),
                                          .ids = prompts[k % PROMPTS].ids,
                                          .n_ids = prompts[k % PROMPTS].n,
                                          .max_tokens = OUTPUT,
                                          .ignore_eos = true,
                                          .request_id = id,
                                          .mode = k % 2 ? BATON_STREAM : BATON_WHOLE};
}

static int setup(void **state)
{
    struct baton_error e;
    model = rig_model("qwen3-tiny");
    vocab = baton_model_vocab(model);
    test_ok(baton_model_prepare(model, rig_device(), &e), &e);
    for (uint32_t k = 0; k < PROMPTS; k++) {
        struct baton_request_options o = ask(k, 0);
        prompts[k].n = test_range(&seed, 70, MOST);
        rig_prompt(&seed, vocab, prompts[k].ids, prompts[k].n);
        o = ask(k, 0);
        rig_alone(model, rig_device(), CTX, 0, &o, &prompts[k].native);
    }
    return 0;
}

static int teardown(void **state)
{
    for (uint32_t k = 0; k < PROMPTS; k++)
        rig_run_free(&prompts[k].native);
    baton_model_close(model);
    return 0;
}

static struct baton_engine *open_engine(enum baton_role role, uint32_t lanes, int fd)
{
    struct baton_error e;
    struct baton_engine *en = NULL;
    const struct baton_engine_options o = {.struct_size = sizeof o,
                                           .role = role,
                                           .device = rig_device(),
                                           .lanes = lanes,
                                           .ctx = CTX,
                                           .threads = 1,
                                           .chunk = 32,
                                           .peer_fd = fd,
                                           .dead_ns = DEAD_NS};
    test_ok(baton_engine_open(model, &o, &en, &e), &e);
    return en;
}

/* A consumer's request to its end. */
static void ends(struct baton_request *r, uint32_t k, uint32_t may, struct chaos_book *b)
{
    struct chaos_fault f;
    if (!chaos_judge_consumer(r, &prompts[k % PROMPTS].native, OUTPUT, may, b, &f))
        fail_msg("request of prompt %u: %s", k, f.text);
    baton_request_close(r);
}

/* ---- the network is cut ------------------------------------------------------------------- */

#define MANY 8u /* requests beside the one that decodes already */

static void test_cut(void **state)
{
    const uint32_t peer = CHAOS_CODE(BATON_ERR_PEER);
    struct chaos_book consumers = {0}, producers = {0};
    struct chaos_census before = chaos_count();
    struct baton_request *p[1 + MANY], *c[1 + MANY];
    struct baton_error e;
    struct baton_token t;
    struct chaos_fault f;
    struct net net;
    int fds[2];
    if (!net_open(&net))
        skip();
    net_connect(&net, fds);
    struct baton_engine *producer = open_engine(BATON_PRODUCER, 4, fds[0]);
    struct baton_engine *consumer = open_engine(BATON_CONSUMER, 4, fds[1]);
    for (uint32_t i = 0; i <= MANY; i++) {
        struct baton_request_options o = ask(i, i + 1);
        p[i] = rig_submit(producer, &o);
        o.local_prefill = i % 2;
        c[i] = rig_submit(consumer, &o);
        if (i == 0) /* it decodes by now */
            test_ok(baton_next(c[0], &t, -1, &e) - 1, &e);
    }
    assert_int_equal(t.id, prompts[0].native.ids[0]);
    base_sleep_ns(test_random(&seed) % 8000000);
    net_link(&net, (int)test_range(&seed, 0, 1), false);
    uint32_t n = 1;
    int rc;
    while ((rc = baton_next(c[0], &t, -1, &e)) == 1)
        assert_int_equal(t.id, prompts[0].native.ids[n++]);
    assert_int_equal(rc, 0);
    assert_int_equal(n, OUTPUT);
    baton_request_close(c[0]);
    for (uint32_t i = 0; i <= MANY; i++) {
        if (i > 0)
            ends(c[i], i, CHAOS_OK | (i % 2 ? 0 : peer), &consumers);
        if (!chaos_judge_producer(p[i], CHAOS_OK | peer, &producers, &f))
            fail_msg("producer of request %u: %s", i, f.text);
        baton_request_close(p[i]);
    }
    chaos_book_print(&consumers);
    chaos_book_print(&producers);
    assert_int_equal(engine_blocks_used(producer), 0);
    assert_int_equal(engine_blocks_used(consumer), 0);
    baton_engine_close(producer);
    baton_engine_close(consumer);
    net_close(&net);
    chaos_same(&before);
}

/* ---- a producer that is stopped ------------------------------------------------------------- */

/* Where it stops; each in a process of its own, forked before this one looks for probe points. */
static const char *const stops[] = {"producer-offered=stop", "producer-reserved=stop",
                                    "producer-piece@1=stop", "producer-piece@9=stop",
                                    "producer-commit=stop"};
#define STOPS (sizeof stops / sizeof *stops)

struct other {
    pid_t pid;
    int fd, go; /* this process's ends */
};

/* The producer's life: one request, which ends because its consumer is gone. */
static void stopped_life(const char *stop, uint32_t k, int fd, int go)
{
    char byte;
    struct chaos_book b = {0};
    struct chaos_fault f;
    if (read(go, &byte, 1) != 1)
        _exit(1);
    setenv("BATON_PROBE", stop, 1);
    struct baton_engine *en = open_engine(BATON_PRODUCER, 1, fd);
    struct baton_request_options o = ask(k, 1);
    struct baton_request *r = rig_submit(en, &o);
    if (!chaos_judge_producer(r, CHAOS_OK | CHAOS_CODE(BATON_ERR_PEER), &b, &f)) {
        fprintf(stderr, "the stopped producer: %s\n", f.text);
        _exit(2);
    }
    baton_request_close(r);
    int left = (int)engine_blocks_used(en);
    baton_engine_close(en);
    _exit(left ? 3 : 0);
}

static void other_start(struct other *x, uint32_t i)
{
    int fds[2], go[2];
    struct baton_error e;
    test_ok(transport_socketpair(fds, &e), &e);
    assert_int_equal(pipe2(go, O_CLOEXEC), 0);
    fflush(NULL);
    x->pid = fork();
    assert_true(x->pid >= 0);
    if (x->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that failed leaves nobody waiting */
        close(fds[0]);
        close(go[1]);
        stopped_life(stops[i], i, fds[1], go[0]);
    }
    close(fds[1]);
    close(go[0]);
    x->fd = fds[0];
    x->go = go[1];
}

/* One lane, so that the pages which the stopped producer was filling are those of the next request:
 * it decodes from them while the producer, continued, fills what it still has. */
static void stopped(struct other *x, uint32_t i)
{
    struct chaos_book b = {0};
    struct baton_error e;
    struct baton_token t;
    int status, rc;
    /* A stop takes hold of the process's threads one by one: COMMIT may still have left. */
    bool may_commit = i + 1 == STOPS;
    struct baton_engine *en = open_engine(BATON_CONSUMER, 1, x->fd);
    struct baton_request_options o = ask(i, 1);
    struct baton_request *lost = rig_submit(en, &o), *next;
    o = ask(i + 1, 2);
    o.local_prefill = true;
    next = rig_submit(en, &o);
    assert_int_equal(write(x->go, "g", 1), 1);
    assert_int_equal(waitpid(x->pid, &status, WUNTRACED), x->pid);
    assert_true(WIFSTOPPED(status));
    ends(lost, i, CHAOS_CODE(BATON_ERR_PEER) | (may_commit ? CHAOS_OK : 0), &b);
    test_ok(baton_next(next, &t, -1, &e) - 1, &e);
    assert_int_equal(t.id, prompts[(i + 1) % PROMPTS].native.ids[0]);
    kill(x->pid, SIGCONT);
    uint32_t n = 1;
    while ((rc = baton_next(next, &t, -1, &e)) == 1)
        assert_int_equal(t.id, prompts[(i + 1) % PROMPTS].native.ids[n++]);
    assert_int_equal(rc, 0);
    assert_int_equal(n, OUTPUT);
    assert_int_equal(waitpid(x->pid, &status, 0), x->pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status))
        fail_msg("%s: the producer ended with status %x", stops[i], (unsigned)status);
    baton_request_close(next);
    o = ask(i, 3);
    o.local_prefill = true;
    ends(rig_submit(en, &o), i, CHAOS_OK, &b);
    assert_int_equal(b.local, 1);
    assert_int_equal(engine_blocks_used(en), 0);
    baton_engine_close(en);
    close(x->go);
}

static void test_stopped(void **state)
{
    struct other others[STOPS];
    struct chaos_census before = chaos_count();
#ifdef __SANITIZE_THREAD__
    skip(); /* ThreadSanitizer follows no threads in a process forked from one that had some */
#endif
    for (uint32_t i = 0; i < STOPS; i++)
        other_start(&others[i], i);
    for (uint32_t i = 0; i < STOPS; i++)
        stopped(&others[i], i);
    chaos_same(&before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stopped), /* first: it forks before any probe point is looked for */
        cmocka_unit_test(test_cut),
    };
    seed = test_seed();
    return cmocka_run_group_tests_name("engine: a silent peer", tests, setup, teardown);
}
