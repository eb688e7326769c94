/* SPDX-License-Identifier: Apache-2.0 */
/* Chaos over ticketed pulls: tickets that are forged, claimed twice, replayed, released, left to
 * expire; either end cancelled; the connection faulty or cut, the other process stopped or killed.
 *
 * Two engines of this process are used by several threads, each of which brings one ticket after
 * the other to its end: a producer holds no more than it has pages for, and a thread that waits for
 * its ticket waits for the others' pages alone. */
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#include "chaos_deeds.h"

#define PULLERS 4u
#define SHORT_LEASE 200000000u /* where a claimant may be gone for good */

#define OK CHAOS_OK
#define CANCELLED CHAOS_CODE(BATON_ERR_CANCELLED)
#define PEER CHAOS_CODE(BATON_ERR_PEER)
#define STALE CHAOS_CODE(BATON_ERR_STALE)
#define MISMATCH CHAOS_CODE(BATON_ERR_MISMATCH)

/* ---- two engines in this process ------------------------------------------------------------ */

enum deed { FETCH, CANCEL_HOLD, CANCEL_PULL, OTHER_IDS, FORGE, TWICE, REPLAY, RELEASE, EXPIRE };

/* The consumer dials the producer's address, or (address NULL) both are joined by a link. */
struct site {
    enum fault fault;
    const struct chaos_model *model;
    struct baton_engine *producer, *consumers[2];
    const char *address;
};

/* One thread. */
struct puller {
    pthread_t thread;
    const struct site *site;
    uint32_t n, index;
    struct chaos c; /* its random numbers and its book */
    struct chaos_fault fault;
};

/* One ticket. */
struct item {
    const struct chaos_prompt *prompt;
    uint32_t k, most;
    enum deed deed;
    bool local;
    struct baton_engine *consumer;
    struct baton_request *held;
    struct baton_ticket ticket;
    bool fetched; /* the consumer says that it has the producer's cache */
};

/* What the fault alone makes possible. */
static uint32_t by_fault(const struct site *s)
{
    if (s->fault == FLIP)
        return CHAOS_ANY & ~OK & ~CHAOS_CODE(BATON_ERR_INTERNAL);
    return s->fault == CUT || s->fault == STALL ? PEER : 0;
}

static struct baton_request *pull(struct puller *t, const struct item *x, const char *ticket,
                                  const int32_t *ids, bool local, struct chaos_fault *f)
{
    struct baton_request_options o = chaos_ask(x->prompt, x->k,
                                               (uint64_t)(t->index + 1) << 32 | ++t->c.next_id);
    struct baton_request *r = NULL;
    struct baton_error e;
    o.max_tokens = x->most;
    o.ticket = ticket;
    o.from = t->site->address;
    o.local_prefill = local;
    o.ids = ids ? ids : o.ids;
    if (baton_submit(x->consumer, &o, &r, &e))
        (void)chaos_wrong(f, "a pull can't be submitted: %s", e.text);
    return r;
}

/* A pull to its end; *verified: with the producer's cache. */
static bool judge_pull(struct puller *t, const struct item *x, struct baton_request *r,
                       uint32_t may, struct chaos_book *b, bool *verified, struct chaos_fault *f)
{
    struct chaos_book one = {0};
    bool good = r && chaos_judge_consumer(r, &x->prompt->native, x->most, may, &one, f);
    *verified = one.verified > 0;
    chaos_book_add(b, &one);
    baton_request_close(r);
    return good;
}

/* Pulls that must come to nothing, before the one that counts. */
static bool misuse(struct puller *t, struct item *x, struct chaos_fault *f)
{
    int32_t other[CHAOS_MOST];
    struct baton_ticket forged = x->ticket;
    char *digit = &forged.text[test_range(&t->c.random, 4, 80)];
    struct chaos_book beside = {0};
    bool verified;
    *digit = *digit == 'A' ? 'B' : 'A';
    if (x->deed == FORGE)
        return judge_pull(t, x, pull(t, x, forged.text, NULL, false, f), STALE | by_fault(t->site),
                          &beside, &verified, f);
    if (x->deed != OTHER_IDS)
        return true;
    memcpy(other, x->prompt->ids, x->prompt->n * sizeof *other);
    other[test_range(&t->c.random, 0, x->prompt->n - 1)] ^= 1;
    return judge_pull(t, x, pull(t, x, x->ticket.text, other, false, f),
                      MISMATCH | by_fault(t->site), &beside, &verified, f);
}

/* Two at once: one of them gets it. */
static bool pull_twice(struct puller *t, struct item *x, struct chaos_fault *f)
{
    struct chaos_book beside = {0};
    struct baton_request *a = pull(t, x, x->ticket.text, NULL, false, f);
    struct baton_request *b = pull(t, x, x->ticket.text, NULL, false, f);
    uint32_t may = OK | STALE | by_fault(t->site);
    bool first, second;
    if (!judge_pull(t, x, a, may, &t->c.book, &first, f) ||
        !judge_pull(t, x, b, may, &beside, &second, f))
        return false;
    x->fetched = first || second;
    if ((first && second) || (!by_fault(t->site) && !x->fetched))
        return chaos_wrong(f, "a ticket that was pulled twice is good %d times", first + second);
    return true;
}

/* The pull that counts. */
static bool fetch(struct puller *t, struct item *x, struct chaos_fault *f)
{
    uint32_t may = OK | by_fault(t->site);
    struct baton_request *r = pull(t, x, x->ticket.text, NULL, x->local, f);
    if (x->deed == CANCEL_HOLD || x->deed == CANCEL_PULL) {
        pause_somewhere(&t->c, 1);
        if (r)
            baton_cancel(x->deed == CANCEL_PULL ? r : x->held);
        may |= x->deed == CANCEL_PULL ? CANCELLED : CANCELLED | STALE;
    }
    if (x->local) /* whatever goes wrong elsewhere */
        may = x->deed == CANCEL_PULL ? OK | CANCELLED : OK;
    return judge_pull(t, x, r, may, &t->c.book, &x->fetched, f);
}

static bool replay(struct puller *t, struct item *x, struct chaos_fault *f)
{
    struct chaos_book beside = {0};
    bool again;
    return judge_pull(t, x, pull(t, x, x->ticket.text, NULL, false, f), STALE | by_fault(t->site),
                      &beside, &again, f);
}

/* A ticket that nobody pulls. */
static bool unwanted(struct puller *t, struct item *x, struct chaos_fault *f)
{
    struct baton_error e;
    if (x->deed == RELEASE && baton_ticket_release(t->site->producer, NULL, x->ticket.text, &e))
        return chaos_wrong(f, "a release: %s", e.text);
    return chaos_judge_producer(x->held, x->deed == RELEASE ? CANCELLED : STALE, &t->c.book, f);
}

/* What the producer says of the request behind the ticket. Where nothing on an honest connection
 * told it that the consumer is done with it, its owner does. */
static bool judge_held(struct puller *t, struct item *x, struct chaos_fault *f)
{
    struct chaos_book beside = {0};
    bool told = x->fetched || x->deed == CANCEL_PULL || x->deed == CANCEL_HOLD;
    uint32_t may = x->fetched ? OK : OK | CANCELLED;
    if (by_fault(t->site) || !told)
        baton_cancel(x->held);
    if (by_fault(t->site) || x->deed == CANCEL_HOLD)
        may = OK | CANCELLED | by_fault(t->site);
    return chaos_judge_producer(x->held, may, &beside, f);
}

/* From the prompt to a ticket. false: there is none, and *f says why that is wrong, if it is. */
static bool hold(struct puller *t, struct item *x, struct chaos_fault *f)
{
    const struct site *s = t->site;
    struct baton_request_options o = chaos_ask(x->prompt, x->k,
                                               (uint64_t)(t->index + 1) << 32 | ++t->c.next_id);
    struct baton_error e;
    int rc;
    o.hold = true;
    if (baton_submit(s->producer, &o, &x->held, &e))
        return chaos_wrong(f, "a hold can't be submitted: %s", e.text);
    if (x->deed == CANCEL_HOLD && test_range(&t->c.random, 0, 1))
        baton_cancel(x->held);
    x->ticket.struct_size = sizeof x->ticket;
    while ((rc = baton_ticket(x->held, &x->ticket, CHAOS_PATIENCE, &e)) == BATON_ERR_TIMEOUT)
        fprintf(stderr, "chaos: still waiting for a ticket: %s\n", e.text);
    if (rc == 0)
        return true;
    uint32_t may = x->deed == CANCEL_HOLD ? CANCELLED : x->deed == EXPIRE ? STALE : 0;
    chaos_judge_producer(x->held, may | by_fault(s), &t->c.book, f);
    return false;
}

static bool one(struct puller *t, struct item *x, struct chaos_fault *f)
{
    if (!hold(t, x, f))
        return !f->text[0];
    if (x->deed == RELEASE || x->deed == EXPIRE)
        return unwanted(t, x, f);
    bool good = misuse(t, x, f) && (x->deed == TWICE ? pull_twice(t, x, f) : fetch(t, x, f)) &&
                judge_held(t, x, f);
    return good && (x->deed != REPLAY || replay(t, x, f));
}

static struct item any_item(struct puller *t)
{
    struct item x = {.k = test_range(&t->c.random, 0, CHAOS_PROMPTS - 1),
                     .most = test_range(&t->c.random, 1, CHAOS_OUTPUT),
                     .local = !test_range(&t->c.random, 0, 2),
                     .deed = (enum deed)test_range(&t->c.random, 0, 2 * EXPIRE)};
    x.deed = x.deed > RELEASE ? FETCH : x.deed; /* half of them; tickets expire elsewhere */
    if (!t->site->consumers[0])
        x.deed = EXPIRE;
    x.prompt = &t->site->model->prompts[x.k];
    x.consumer = t->site->consumers[test_range(&t->c.random, 0, 1)];
    return x;
}

static void *pull_all(void *arg)
{
    struct puller *t = arg;
    for (uint32_t i = 0; i < t->n; i++) {
        struct item x = any_item(t);
        bool good = one(t, &x, &t->fault);
        baton_request_close(x.held);
        if (!good) {
            size_t n = strlen(t->fault.text);
            snprintf(t->fault.text + n, sizeof t->fault.text - n, " (deed %d, %u ids%s)",
                     (int)x.deed, x.prompt->n, x.local ? ", local prefill" : "");
            break;
        }
    }
    return NULL;
}

/* `expiring`: nobody pulls, and leases are short. */
static void open_site(struct chaos *c, struct site *s, bool dialed, bool expiring)
{
    struct transport *ends[2];
    struct baton_error e;
    char address[96];
    bool key = test_range(&c->random, 0, 1);
    struct baton_engine_options po = any_engine(c, BATON_PRODUCER, key);
    struct baton_engine_options co = any_engine(c, BATON_CONSUMER, key);
    s->model = any_model(c);
    /* A stalled peer is soon found dead: pulls wait for that one by one. */
    po.dead_ns = co.dead_ns = s->fault == STALL ? 300000000 : 0;
    if (dialed) {
        snprintf(address, sizeof address, "unix:/tmp/baton-chaos-%d", (int)getpid());
        po.no_peer = co.no_peer = true;
        po.listen = test_range(&c->random, 0, 1) ? address : "127.0.0.1:0";
        po.lease_ns = expiring ? 1 + test_random(&c->random) % 50000000u : 0;
    } else {
        open_link(c, s->fault, ends);
        po.link = (struct baton_link *)ends[0];
        co.link = (struct baton_link *)ends[1];
    }
    test_ok(baton_engine_open(s->model->model, &po, &s->producer, &e), &e);
    s->address = baton_engine_address(s->producer);
    for (int i = 0; i < 2 && !expiring; i++)
        if (i == 0 || dialed)
            test_ok(baton_engine_open(s->model->model, &co, &s->consumers[i], &e), &e);
        else
            s->consumers[1] = s->consumers[0];
}

static void close_site(struct site *s)
{
    struct baton_ticket_stats x = {.struct_size = sizeof x};
    struct baton_engine *other = s->consumers[1] == s->consumers[0] ? NULL : s->consumers[1];
    assert_int_equal(baton_ticket_stats(s->producer, &x), 0);
    assert_int_equal(x.open + x.claimed, 0);
    assert_int_equal(x.issued, x.fetched + x.expired + x.given_up);
    assert_int_equal(engine_blocks_used(s->producer), 0);
    for (int i = 0; i < 2; i++)
        assert_true(!s->consumers[i] || engine_blocks_used(s->consumers[i]) == 0);
    baton_engine_close(s->consumers[0]);
    baton_engine_close(other);
    baton_engine_close(s->producer);
}

static void run_site(struct chaos *c, struct site *s, uint32_t n)
{
    struct puller t[PULLERS];
    uint32_t threads = test_range(&c->random, 1, PULLERS), begun = 0;
    memset(t, 0, sizeof t);
    for (uint32_t i = 0; i < threads; i++) {
        t[i] = (struct puller){.site = s, .index = i, .n = (n - begun) / (threads - i)};
        t[i].c.random = test_random(&c->random) | 1;
        t[i].c.unit = c->unit;
        begun += t[i].n;
        assert_int_equal(pthread_create(&t[i].thread, NULL, pull_all, &t[i]), 0);
    }
    for (uint32_t i = 0; i < threads; i++)
        pthread_join(t[i].thread, NULL);
    for (uint32_t i = 0; i < threads; i++) {
        chaos_book_add(&c->book, &t[i].c.book);
        if (t[i].fault.text[0])
            fail_msg("seed %llu, pulls of %s, %s%s: %s", (unsigned long long)c->seed,
                     s->model->name, s->address ? "dialed, " : "", fault_names[s->fault],
                     t[i].fault.text);
    }
}

void chaos_pull_engines(struct chaos *c, uint64_t n)
{
    static const enum fault faults[] = {CALM, CALM, CALM, SHORT, SHORT,
                                        FLIP, FLIP, CUT,  CUT,   STALL};
    uint32_t done[N_FAULTS] = {0}, dialed = 0, expiring = 0;
    while (n > 0) {
        struct site s = {CALM};
        uint32_t k = test_range(&c->random, 0, 13), m = test_range(&c->random, 1, WAVE);
        m = m < n ? m : (uint32_t)n;
        n -= m;
        s.fault = k < sizeof faults / sizeof *faults ? faults[k] : CALM;
        open_site(c, &s, k >= 10, k == 13);
        run_site(c, &s, m);
        close_site(&s);
        *(k == 13 ? &expiring : k >= 10 ? &dialed : &done[s.fault]) += 1;
    }
    print_message("pulls: %u dialed, %u left to expire", dialed, expiring);
    for (uint32_t i = 0; i < CLOSE_PRODUCER; i++)
        print_message(", %u %s", done[i], fault_names[i]);
    print_message("\n");
}

/* ---- two processes -------------------------------------------------------------------------- */

/* What both processes know of a round. */
struct round {
    enum blow blow;
    enum baton_role child;
    const struct chaos_model *model;
    uint32_t n, until; /* STOP_CLOSE: the parent closes its engine after so many tickets */
    bool key;
    struct baton_request_options ask[WAVE];
    const struct rig_run *native[WAVE];
    int post[2];      /* from the producer: its address, then a ticket for each request, in order */
    char address[96]; /* to listen at */
};

/* One of them. */
struct life {
    const struct round *r;
    enum baton_role role;
    bool child, alive; /* alive: the other end of the post is there, as far as is known */
    struct baton_engine *engine;
    struct baton_request *q[WAVE];
    uint32_t n;
    char from[96];
    struct chaos_fault *fault;
};

static void plan(struct chaos *c, struct round *r, uint32_t n)
{
    static unsigned turn;
    *r = (struct round){.blow = (enum blow)test_range(&c->random, 0, N_BLOWS - 1),
                        .child = test_range(&c->random, 0, 1) ? BATON_PRODUCER : BATON_CONSUMER,
                        .model = any_model(c),
                        .key = test_range(&c->random, 0, 1),
                        .n = n,
                        .until = n};
    if (r->blow == STOP_CLOSE)
        r->until = test_range(&c->random, 0, n);
    if (test_range(&c->random, 0, 1))
        snprintf(r->address, sizeof r->address, "unix:/tmp/baton-chaos-%d-%u", getpid(), turn++);
    else
        snprintf(r->address, sizeof r->address, "127.0.0.1:0");
    for (uint32_t i = 0; i < n; i++) {
        uint32_t k = test_range(&c->random, 0, CHAOS_PROMPTS - 1);
        r->ask[i] = chaos_ask(&r->model->prompts[k], k, ++c->next_id);
        r->ask[i].max_tokens = test_range(&c->random, 1, CHAOS_OUTPUT);
        r->ask[i].local_prefill = test_range(&c->random, 0, 1);
        r->native[i] = &r->model->prompts[k].native;
    }
    assert_int_equal(pipe(r->post), 0);
}

static uint32_t may_end(const struct life *l, bool local)
{
    enum blow blow = l->r->blow;
    if (blow == LEAVE || blow == STOP)
        return OK;
    if (l->role == BATON_PRODUCER)
        return OK | STALE | CANCELLED | PEER;
    if (local)
        return blow == STOP_CLOSE && !l->child ? OK | CANCELLED : OK;
    return OK | STALE | CANCELLED | PEER;
}

static bool life_open(struct life *l, struct chaos *c)
{
    const struct round *r = l->r;
    struct baton_engine_options o = any_engine(c, l->role, r->key);
    struct baton_error e;
    bool producer = l->role == BATON_PRODUCER;
    close(r->post[producer ? 0 : 1]);
    o.no_peer = true;
    o.listen = producer ? r->address : NULL;
    o.lease_ns = r->blow == LEAVE || r->blow == STOP ? 0 : SHORT_LEASE;
    if (baton_engine_open(r->model->model, &o, &l->engine, &e))
        return chaos_wrong(l->fault, "an engine: %s", e.text);
    if (producer)
        snprintf(l->from, sizeof l->from, "%s", baton_engine_address(l->engine));
    ssize_t n = producer ? write(r->post[1], l->from, sizeof l->from)
                         : read(r->post[0], l->from, sizeof l->from);
    l->alive = n == sizeof l->from;
    return true;
}

static bool hold_all(struct life *l)
{
    struct baton_error e;
    for (; l->n < l->r->n; l->n++) {
        struct baton_request_options o = l->r->ask[l->n];
        o.hold = true;
        o.local_prefill = false;
        if (baton_submit(l->engine, &o, &l->q[l->n], &e))
            return chaos_wrong(l->fault, "a hold: %s", e.text);
    }
    struct baton_ticket t = {.struct_size = sizeof t};
    for (uint32_t i = 0; i < l->r->n && (l->child || i < l->r->until) && l->alive; i++)
        if (baton_ticket(l->q[i], &t, -1, &e) == 0)
            l->alive = write(l->r->post[1], t.text, sizeof t.text) == sizeof t.text;
    return true;
}

static bool pull_each(struct life *l)
{
    struct baton_error e;
    char ticket[sizeof(struct baton_ticket){0}.text];
    while (l->n < (l->child ? l->r->n : l->r->until) && l->alive) {
        struct baton_request_options o = l->r->ask[l->n];
        l->alive = read(l->r->post[0], ticket, sizeof ticket) == sizeof ticket;
        o.from = l->from;
        o.ticket = ticket;
        if (l->alive && baton_submit(l->engine, &o, &l->q[l->n++], &e))
            return chaos_wrong(l->fault, "a pull: %s", e.text);
    }
    return true;
}

/* The rest, and what became of all. What was never asked for is a handoff that never was. */
static bool life_end(struct life *l, struct chaos_book *b)
{
    const struct round *r = l->r;
    bool good = true;
    for (uint32_t i = 0; i < l->n && good; i++) {
        uint32_t may = may_end(l, r->ask[i].local_prefill);
        if (l->role == BATON_PRODUCER && !l->alive)
            baton_cancel(l->q[i]);
        good = l->role == BATON_CONSUMER
                   ? chaos_judge_consumer(l->q[i], r->native[i], r->ask[i].max_tokens, may, b,
                                          l->fault)
                   : chaos_judge_producer(l->q[i], may, b, l->fault);
        baton_request_close(l->q[i]);
    }
    b->never += r->n - l->n;
    if (l->n < r->n && (r->blow == LEAVE || r->blow == STOP) && good)
        good = chaos_wrong(l->fault, "%u tickets of %u came", l->n, r->n);
    if (good && l->engine && engine_blocks_used(l->engine))
        good = chaos_wrong(l->fault, "blocks are left");
    baton_engine_close(l->engine);
    close(r->post[l->role == BATON_PRODUCER ? 1 : 0]);
    return good;
}

static bool life_run(struct life *l)
{
    return l->role == BATON_PRODUCER ? hold_all(l) : pull_each(l);
}

static void child_life(struct chaos *c, const struct round *r)
{
    struct chaos_fault f = {""};
    struct chaos_book book = {0};
    struct life l = {.r = r, .role = r->child, .child = true, .fault = &f};
    if (life_open(&l, c) && life_run(&l) && life_end(&l, &book))
        _exit(0);
    fprintf(stderr, "chaos: the other process: %s\n", f.text);
    _exit(9);
}

/* Done to the child at a random moment of all that it does, while this process goes on. */
struct striker {
    pthread_t thread;
    pid_t pid;
    enum blow blow;
    struct chaos c; /* random numbers and a unit alone */
    uint32_t n;
};

static void *strike(void *arg)
{
    struct striker *s = arg;
    pause_somewhere(&s->c, 2 * s->n + 100); /* engines open meanwhile, and tickets come */
    if (s->blow == KILL)
        kill(s->pid, SIGKILL);
    if (s->blow != STOP && s->blow != STOP_KILL)
        return NULL;
    kill(s->pid, SIGSTOP);
    pause_somewhere(&s->c, 8);
    kill(s->pid, s->blow == STOP ? SIGCONT : SIGKILL);
    return NULL;
}

static void run_round(struct chaos *c, struct round *r)
{
    struct chaos_fault f = {""};
    struct life l = {.r = r, .fault = &f};
    struct striker s = {.blow = r->blow, .n = r->n};
    int status;
    l.role = r->child == BATON_PRODUCER ? BATON_CONSUMER : BATON_PRODUCER;
    s.c.random = test_random(&c->random) | 1;
    s.c.unit = c->unit;
    fflush(NULL);
    s.pid = fork();
    assert_true(s.pid >= 0);
    if (s.pid == 0)
        child_life(c, r);
    assert_int_equal(pthread_create(&s.thread, NULL, strike, &s), 0);
    bool good = life_open(&l, c) && life_run(&l);
    if (r->blow == STOP_CLOSE) { /* it finds out when it is continued */
        kill(s.pid, SIGSTOP);
        baton_engine_close(l.engine);
        l.engine = NULL;
        kill(s.pid, SIGCONT);
    }
    good = good && life_end(&l, &c->book);
    pthread_join(s.thread, NULL);
    assert_int_equal(waitpid(s.pid, &status, 0), s.pid);
    bool killed = r->blow == KILL || r->blow == STOP_KILL;
    bool ended = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (!good || (!ended && !(killed && WIFSIGNALED(status))))
        fail_msg("seed %llu, pulls, round %s, child %d: status %x: %s", (unsigned long long)c->seed,
                 blow_names[r->blow], (int)r->child, (unsigned)status, f.text);
}

void chaos_pull_processes(struct chaos *c, uint64_t n)
{
    uint32_t done[N_BLOWS] = {0};
    signal(SIGPIPE, SIG_IGN); /* the post's other end may be gone */
    while (n > 0) {
        struct round r;
        uint32_t m = test_range(&c->random, 1, WAVE);
        m = m < n ? m : (uint32_t)n;
        n -= m;
        plan(c, &r, m);
        run_round(c, &r);
        done[r.blow]++;
    }
    for (uint32_t i = 0; i < N_BLOWS; i++)
        print_message("%s%u %s", i ? ", " : "pulls between processes: ", done[i], blow_names[i]);
    print_message("\n");
}
