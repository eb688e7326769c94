/* SPDX-License-Identifier: Apache-2.0 */
/* Many handoffs with random aborts, kills and faults: no wrong token, a reason for every failure,
 * and nothing is left at the end. Pushes here, ticketed pulls in chaos_pull.c, half of them each.
 *
 *     test_engine_chaos [-n HANDOFFS] [-s SEED]
 *
 * Seven eighths run between two engines of this process, over every transport and through faulty
 * ones; the rest between two processes, of which one is killed or stopped. The seed decides what
 * is done; what it meets is up to the scheduler, so a seed repeats the deeds, not the counts.
 */
#include <getopt.h>
#include <signal.h>
#include <sys/wait.h>

#include "chaos_deeds.h"

#define IN_PROCESS 8u /* one handoff in so many is between two processes */
#define PARKED 8u     /* stalled pairs that wait for their death side by side: 10 s each */

/* ---- two engines in this process ------------------------------------------------------------ */

/* Of so many handoffs. */
static uint64_t pushes(uint64_t n)
{
    return n - n / 2;
}

/* What is done to one request. ALONE: the other end never asks for it. */
enum deed { LET_BE, CANCEL_PRODUCER, CANCEL_CONSUMER, REFUSE, ALONE_PRODUCER, ALONE_CONSUMER };

struct item {
    struct baton_request *producer, *consumer; /* NULL: ALONE */
    const struct chaos_prompt *prompt;
    uint32_t most;
    enum deed deed;
    bool local;
};

struct pair {
    enum fault fault;
    const struct chaos_model *model;
    struct baton_engine *producer, *consumer; /* NULL: closed */
    uint32_t n;
    struct item items[WAVE];
};

static enum deed any_deed(struct chaos *c)
{
    static const enum deed deeds[] = {CANCEL_PRODUCER, CANCEL_CONSUMER, CANCEL_PRODUCER,
                                      CANCEL_CONSUMER, REFUSE,          ALONE_PRODUCER,
                                      ALONE_CONSUMER};
    uint32_t k = test_range(&c->random, 0, 2 * sizeof deeds / sizeof *deeds - 1);
    return k < sizeof deeds / sizeof *deeds ? deeds[k] : LET_BE;
}

static void cancel(const struct item *x)
{
    if (x->deed == CANCEL_PRODUCER || x->deed == ALONE_PRODUCER)
        baton_cancel(x->producer);
    if (x->deed == CANCEL_CONSUMER || x->deed == ALONE_CONSUMER)
        baton_cancel(x->consumer);
}

/* Submit one at both ends, in either order, perhaps with its cancel in between. */
static void begin(struct chaos *c, struct pair *p, struct item *x)
{
    static const enum baton_mode modes[] = {BATON_WHOLE, BATON_STREAM};
    int32_t other[CHAOS_MOST];
    uint32_t k = test_range(&c->random, 0, CHAOS_PROMPTS - 1);
    bool consumer_first = test_range(&c->random, 0, 1), at_once = !test_range(&c->random, 0, 3);
    x->prompt = &p->model->prompts[k];
    x->most = test_range(&c->random, 1, CHAOS_OUTPUT);
    x->deed = any_deed(c);
    x->local = !test_range(&c->random, 0, 2);
    struct baton_request_options o = chaos_ask(x->prompt, k, ++c->next_id);
    o.max_tokens = x->most;
    o.mode = modes[test_range(&c->random, 0, 1)];
    struct baton_request_options po = o;
    o.local_prefill = x->local;
    if (x->deed == REFUSE) {
        memcpy(other, o.ids, o.n_ids * sizeof *other);
        other[test_range(&c->random, 0, x->prompt->n - 1)] ^= 1;
        po.ids = other;
    }
    for (int i = 0; i < 2; i++) {
        if ((i == 0) == consumer_first && x->deed != ALONE_PRODUCER)
            x->consumer = rig_submit(p->consumer, &o);
        else if ((i == 0) != consumer_first && x->deed != ALONE_CONSUMER)
            x->producer = rig_submit(p->producer, &po);
        struct baton_request *first = consumer_first ? x->consumer : x->producer;
        bool consumer_cancels = x->deed == CANCEL_CONSUMER;
        if (i == 0 && at_once && first && consumer_first == consumer_cancels)
            cancel(x);
    }
}

static void open_pair(struct chaos *c, struct pair *p, enum fault fault, uint32_t n)
{
    struct transport *ends[2];
    struct baton_error e;
    bool key = test_range(&c->random, 0, 1);
    *p = (struct pair){.fault = fault, .model = any_model(c), .n = n};
    open_link(c, fault, ends);
    struct baton_engine_options po = any_engine(c, BATON_PRODUCER, key);
    struct baton_engine_options co = any_engine(c, BATON_CONSUMER, key);
    po.link = (struct baton_link *)ends[0];
    co.link = (struct baton_link *)ends[1];
    test_ok(baton_engine_open(p->model->model, &po, &p->producer, &e), &e);
    test_ok(baton_engine_open(p->model->model, &co, &p->consumer, &e), &e);
    c->pairs[fault]++;
}

static void disturb(struct chaos *c, struct pair *p)
{
    uint32_t closing = test_range(&c->random, 0, p->n - 1);
    for (uint32_t i = 0; i < p->n; i++) {
        pause_somewhere(c, 1); /* half of the time that they take: what waits here is measured */
        cancel(&p->items[i]);
        if (i == closing && p->fault == CLOSE_PRODUCER) {
            baton_engine_close(p->producer);
            p->producer = NULL;
        } else if (i == closing && p->fault == CLOSE_CONSUMER) {
            baton_engine_close(p->consumer);
            p->consumer = NULL;
        }
    }
}

/* How a request may end at one end, from what was done to it and to its pair. */
static uint32_t permitted(const struct pair *p, const struct item *x, enum baton_role role)
{
    const uint32_t cancelled = CHAOS_CODE(BATON_ERR_CANCELLED), peer = CHAOS_CODE(BATON_ERR_PEER);
    static const uint32_t deeds[] = {
        [LET_BE] = CHAOS_OK,
        [CANCEL_PRODUCER] = CHAOS_OK | CHAOS_CODE(BATON_ERR_CANCELLED),
        [CANCEL_CONSUMER] = CHAOS_OK | CHAOS_CODE(BATON_ERR_CANCELLED),
        [REFUSE] = CHAOS_CODE(BATON_ERR_MISMATCH),
        [ALONE_PRODUCER] = CHAOS_CODE(BATON_ERR_CANCELLED),
        [ALONE_CONSUMER] = CHAOS_CODE(BATON_ERR_CANCELLED),
    };
    uint32_t may = deeds[x->deed];
    if (p->fault == FLIP)
        may |= CHAOS_ANY & ~CHAOS_OK & ~CHAOS_CODE(BATON_ERR_INTERNAL);
    else if (p->fault == CUT || p->fault == STALL)
        may |= peer;
    else if (p->fault != CALM && p->fault != SHORT)
        may |= peer | cancelled;
    /* Whatever goes wrong, one that may prefill here is done, unless it is stopped here. */
    if (role == BATON_CONSUMER && x->local)
        may = x->deed == LET_BE && p->fault != CLOSE_CONSUMER ? CHAOS_OK : CHAOS_OK | cancelled;
    return may;
}

static void judge(struct chaos *c, const struct pair *p, struct item *x)
{
    struct chaos_book beside = {0};
    struct chaos_fault f = {""};
    bool good = true;
    if (x->consumer)
        good = chaos_judge_consumer(x->consumer, &x->prompt->native, x->most,
                                    permitted(p, x, BATON_CONSUMER), &c->book, &f);
    if (good && x->producer)
        good = chaos_judge_producer(x->producer, permitted(p, x, BATON_PRODUCER),
                                    x->consumer ? &beside : &c->book, &f);
    if (!good)
        fail_msg("seed %llu, after %llu handoffs: %s, pair %s, deed %d, %u ids%s: %s",
                 (unsigned long long)c->seed, (unsigned long long)chaos_book_all(&c->book),
                 p->model->name, fault_names[p->fault], (int)x->deed, x->prompt->n,
                 x->local ? ", local prefill" : "", f.text);
    baton_request_close(x->consumer);
    baton_request_close(x->producer);
}

static void finish_pair(struct chaos *c, struct pair *p)
{
    for (uint32_t i = 0; i < p->n; i++)
        judge(c, p, &p->items[i]);
    struct rig_pair ends = {.producer = p->producer, .consumer = p->consumer};
    rig_pair_close(&ends);
}

static void test_engines(void **state)
{
    struct chaos *c = *state;
    struct pair parked[PARKED], p;
    uint32_t n_parked = 0;
    static const enum fault faults[] = {CALM,  CALM,  CALM,           CALM,          SHORT, SHORT,
                                        SHORT, FLIP,  FLIP,           FLIP,          CUT,   CUT,
                                        CUT,   STALL, CLOSE_PRODUCER, CLOSE_CONSUMER};
    uint64_t left = pushes(c->n - c->n / IN_PROCESS);
    while (left > 0) {
        uint64_t start = base_now_ns();
        uint32_t n = test_range(&c->random, 1, WAVE);
        n = n < left ? n : (uint32_t)left;
        left -= n;
        open_pair(c, &p, faults[test_range(&c->random, 0, sizeof faults / sizeof *faults - 1)], n);
        for (uint32_t i = 0; i < n; i++)
            begin(c, &p, &p.items[i]);
        disturb(c, &p);
        if (p.fault == STALL) {
            parked[n_parked++] = p;
        } else {
            finish_pair(c, &p);
            c->unit = (7 * c->unit + (base_now_ns() - start) / n) / 8;
        }
        if (n_parked == PARKED || left == 0)
            while (n_parked > 0)
                finish_pair(c, &parked[--n_parked]);
    }
    for (uint32_t i = 0; i < N_FAULTS; i++)
        print_message("%s%u %s", i ? ", " : "pairs: ", c->pairs[i], fault_names[i]);
    print_message("\n");
}

/* ---- two processes -------------------------------------------------------------------------- */

/* What both processes know of a round: the same requests, and how they may end. */
struct round {
    enum blow blow;
    enum baton_role child;
    const struct chaos_model *model;
    uint32_t n;
    struct baton_request_options ask[WAVE];
    const struct rig_run *native[WAVE];
    int fds[2], ready[2]; /* of the child and of this process; the child writes when it submitted */
};

static void plan(struct chaos *c, struct round *r, uint32_t n)
{
    *r = (struct round){.blow = (enum blow)test_range(&c->random, 0, N_BLOWS - 1), .n = n};
    r->child = test_range(&c->random, 0, 1) ? BATON_PRODUCER : BATON_CONSUMER;
    r->model = any_model(c);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t k = test_range(&c->random, 0, CHAOS_PROMPTS - 1);
        r->ask[i] = chaos_ask(&r->model->prompts[k], k, ++c->next_id);
        r->ask[i].max_tokens = test_range(&c->random, 1, CHAOS_OUTPUT);
        r->ask[i].mode = test_range(&c->random, 0, 1) ? BATON_STREAM : BATON_WHOLE;
        r->ask[i].local_prefill = test_range(&c->random, 0, 1);
        r->native[i] = &r->model->prompts[k].native;
    }
}

static uint32_t round_permits(const struct round *r, bool child, enum baton_role role, uint32_t i)
{
    const uint32_t cancelled = CHAOS_CODE(BATON_ERR_CANCELLED), peer = CHAOS_CODE(BATON_ERR_PEER);
    if (r->blow == LEAVE || r->blow == STOP)
        return CHAOS_OK;
    if (r->blow == STOP_CLOSE && !child)
        return CHAOS_OK | cancelled;
    if (role == BATON_CONSUMER && r->ask[i].local_prefill)
        return CHAOS_OK;
    return CHAOS_OK | peer | (r->blow == STOP_CLOSE ? cancelled : 0);
}

static bool judge_round(const struct round *r, struct baton_request **q, enum baton_role role,
                        bool child, struct chaos_book *b, struct chaos_fault *f)
{
    bool good = true;
    for (uint32_t i = 0; i < r->n && good; i++) {
        uint32_t may = round_permits(r, child, role, i);
        good = role == BATON_CONSUMER
                   ? chaos_judge_consumer(q[i], r->native[i], r->ask[i].max_tokens, may, b, f)
                   : chaos_judge_producer(q[i], may, b, f);
        if (good)
            baton_request_close(q[i]);
    }
    return good;
}

static void child_fails(const char *what, const char *why)
{
    fprintf(stderr, "chaos: the other process: %s: %s\n", what, why);
    _exit(9);
}

/* The other process, from fork to exit; it has no test to fail, only a status. */
static void child_life(struct chaos *c, const struct round *r, bool key)
{
    struct baton_engine_options o = any_engine(c, r->child, key);
    struct baton_request *q[WAVE];
    struct baton_engine *en;
    struct chaos_book book = {0};
    struct chaos_fault f;
    struct baton_error e;
    close(r->fds[1]);
    close(r->ready[0]);
    o.peer_fd = r->fds[0];
    if (baton_engine_open(r->model->model, &o, &en, &e))
        child_fails("its engine", e.text);
    for (uint32_t i = 0; i < r->n; i++)
        if (baton_submit(en, &r->ask[i], &q[i], &e))
            child_fails("a submit", e.text);
    if (write(r->ready[1], "r", 1) != 1)
        child_fails("ready", "nobody reads");
    if (!judge_round(r, q, r->child, true, &book, &f))
        child_fails("a request", f.text);
    if (engine_blocks_used(en))
        child_fails("its pool", "blocks are left");
    baton_engine_close(en);
    _exit(0);
}

/* Done to the child at a random moment; in one of four rounds that may be while it starts. */
static void strike(struct chaos *c, const struct round *r, pid_t pid, struct baton_engine **en)
{
    char byte;
    if (test_range(&c->random, 0, 3))
        assert_int_equal(read(r->ready[0], &byte, 1), 1);
    pause_somewhere(c, r->n);
    if (r->blow == KILL)
        kill(pid, SIGKILL);
    if (r->blow == KILL || r->blow == LEAVE)
        return;
    kill(pid, SIGSTOP);
    pause_somewhere(c, 8);
    if (r->blow == STOP_CLOSE) {
        baton_engine_close(*en);
        *en = NULL;
    }
    kill(pid, r->blow == STOP_KILL ? SIGKILL : SIGCONT);
}

static void run_round(struct chaos *c, struct round *r)
{
    bool key = test_range(&c->random, 0, 1);
    enum baton_role role = r->child == BATON_PRODUCER ? BATON_CONSUMER : BATON_PRODUCER;
    struct baton_engine *en = NULL;
    struct baton_request *q[WAVE];
    struct chaos_fault f = {""};
    struct baton_error e;
    int status;
    test_ok(test_range(&c->random, 0, 2) ? transport_socketpair(r->fds, &e)
                                         : transport_tcp_pair(r->fds, &e),
            &e);
    assert_int_equal(pipe(r->ready), 0);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        child_life(c, r, key);
    close(r->fds[0]);
    close(r->ready[1]);
    struct baton_engine_options o = any_engine(c, role, key);
    o.peer_fd = r->fds[1];
    test_ok(baton_engine_open(r->model->model, &o, &en, &e), &e);
    for (uint32_t i = 0; i < r->n; i++)
        q[i] = rig_submit(en, &r->ask[i]);
    strike(c, r, pid, &en);
    if (!judge_round(r, q, role, false, &c->book, &f))
        fail_msg("seed %llu, round %s, child %d: %s", (unsigned long long)c->seed,
                 blow_names[r->blow], (int)r->child, f.text);
    if (en)
        assert_int_equal(engine_blocks_used(en), 0);
    baton_engine_close(en);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    close(r->ready[0]); /* not before: a child that was struck early writes to it late */
    bool killed = r->blow == KILL || r->blow == STOP_KILL;
    if (!(WIFEXITED(status) && WEXITSTATUS(status) == 0) && !(killed && WIFSIGNALED(status)))
        fail_msg("seed %llu, round %s, child %d: its status is %x", (unsigned long long)c->seed,
                 blow_names[r->blow], (int)r->child, (unsigned)status);
    c->processes[r->blow]++;
}

static void test_processes(void **state)
{
    struct chaos *c = *state;
    struct round r;
    for (uint64_t left = pushes(c->n / IN_PROCESS); left > 0; left -= r.n) {
        uint32_t n = test_range(&c->random, 1, WAVE);
        plan(c, &r, n < left ? n : (uint32_t)left);
        run_round(c, &r);
    }
    for (uint32_t i = 0; i < N_BLOWS; i++)
        print_message("%s%u %s", i ? ", " : "processes: ", c->processes[i], blow_names[i]);
    print_message("\n");
}

/* ---- the whole ------------------------------------------------------------------------------ */

static void test_chaos(void **state)
{
    static struct chaos_model models[2];
    struct chaos *c = *state;
    uint64_t start = base_now_ns();
    c->random = c->seed;
    c->unit = 2000000;
    models[0] = (struct chaos_model){.name = "qwen3-tiny", .shortest = 60, .longest = 150};
    models[1] = (struct chaos_model){.name = "gemma3-tiny",
                                     .shortest = RIG_SHORT ? 60 : 505, /* its window is 512 */
                                     .longest = RIG_SHORT ? 90 : 540};
    c->models = models;
    for (int i = 0; i < 2; i++)
        chaos_model_open(&c->models[i], CTX, &c->random);
    struct chaos_census before = chaos_count();
    test_processes(state); /* first: a fork is best made without threads */
    chaos_pull_processes(c, c->n / IN_PROCESS - pushes(c->n / IN_PROCESS));
    test_engines(state);
    uint64_t beside = c->n - c->n / IN_PROCESS;
    chaos_pull_engines(c, beside - pushes(beside));
    chaos_same(&before);
    assert_int_equal(chaos_book_all(&c->book), c->n);
    for (int i = 0; i < 2; i++)
        baton_model_close(c->models[i].model);
    print_message("seed %llu: %llu handoffs in %.1f s: ", (unsigned long long)c->seed,
                  (unsigned long long)c->n, (double)(base_now_ns() - start) / 1e9);
    chaos_book_print(&c->book);
}

int main(int argc, char **argv)
{
    struct chaos c = {.n = RIG_SHORT ? 48 : 640};
    for (int o; (o = getopt(argc, argv, "n:s:")) != -1;) {
        if (o == 'n')
            c.n = strtoull(optarg, NULL, 0);
        else if (o == 's')
            c.seed = strtoull(optarg, NULL, 0) | 1;
        else
            return 2;
    }
    if (!c.seed)
        c.seed = test_seed();
    const struct CMUnitTest tests[] = {cmocka_unit_test_prestate(test_chaos, &c)};
    return cmocka_run_group_tests_name("engine: chaos", tests, NULL, NULL);
}
