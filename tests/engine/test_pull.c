/* SPDX-License-Identifier: Apache-2.0 */
/* Pulls by ticket: the bits of a native run and of a push, over TCP, Unix sockets and a link; each
 * ticket that is refused; claimants that die, fail and give up; leases; many at once. */
#include <signal.h>
#include <sys/wait.h>

#include "handoff/handoff.h"
#include "rig.h"

#define KEY "a key that both roles were given"
#define CTX 256u
#define OUTPUT 5u
#define SECOND 1000000000ull

static const char *const tcp = "127.0.0.1:0";

static const char *unix_address(void)
{
    static char address[96];
    static unsigned turn;
    snprintf(address, sizeof address, "unix:/tmp/baton-test-pull-%d-%u", (int)getpid(), turn++);
    return address;
}

static struct baton_engine *open_engine(struct baton_model *m, const char *listen, uint32_t lanes,
                                        uint64_t lease_ns)
{
    struct baton_error e;
    struct baton_engine *en = NULL;
    const struct baton_engine_options o = {
        .struct_size = sizeof o,
        .role = listen ? BATON_PRODUCER : BATON_CONSUMER,
        .device = rig_device(),
        .lanes = lanes,
        .ctx = CTX,
        .threads = 2,
        .chunk = 48,
        .key = KEY,
        .key_bytes = 32,
        .no_peer = true,
        .listen = listen,
        .lease_ns = lease_ns,
    };
    test_ok(baton_engine_open(m, &o, &en, &e), &e);
    return en;
}

static struct baton_ticket_stats tickets(struct baton_engine *en)
{
    struct baton_ticket_stats s = {.struct_size = sizeof s};
    assert_int_equal(baton_ticket_stats(en, &s), 0);
    assert_int_equal(s.issued, s.open + s.claimed + s.fetched + s.expired + s.given_up);
    return s;
}

/* Until a figure that another thread counts is there: a failure shows as a hang. */
#define until(cond)                                                                                \
    while (!(cond))                                                                                \
    base_sleep_ns(1000000)

/* A model, a prompt, what it gives natively, and two engines that pull. */
struct scene {
    uint64_t seed, id;
    struct baton_model *m;
    uint32_t vocab;
    struct baton_engine *producer, *consumer;
    int32_t ids[200];
    struct baton_request_options o;
    struct rig_run native;
    struct baton_request *held;
    struct baton_ticket ticket;
};

static void draw_prompt(struct scene *s, uint32_t most)
{
    uint32_t n = test_range(&s->seed, 1, most);
    rig_prompt(&s->seed, s->vocab, s->ids, n);
    s->o = (struct baton_request_options){.struct_size = sizeof s->o,
                                          .ids = s->ids,
                                          .n_ids = n,
                                          .max_tokens = OUTPUT,
                                          .ignore_eos = true,
                                          .want_logits = true};
}

static void new_prompt(struct scene *s, uint32_t most)
{
    draw_prompt(s, most);
    rig_run_free(&s->native);
    rig_alone(s->m, rig_device(), CTX, 0, &s->o, &s->native);
}

static void scene_open(struct scene *s, const char *model, const char *listen, uint64_t lease_ns)
{
    memset(s, 0, sizeof *s);
    s->seed = test_seed();
    s->m = rig_model(model);
    s->vocab = baton_model_vocab(s->m);
    s->producer = open_engine(s->m, listen, 2, lease_ns);
    s->consumer = open_engine(s->m, NULL, 2, 0);
    new_prompt(s, RIG_SHORT ? 80 : 200);
}

/* Nothing is left at either end. */
static void scene_close(struct scene *s)
{
    baton_request_close(s->held);
    assert_int_equal(engine_blocks_used(s->producer), 0);
    assert_int_equal(engine_blocks_used(s->consumer), 0);
    struct baton_ticket_stats t = tickets(s->producer);
    assert_int_equal(t.open + t.claimed, 0);
    baton_engine_close(s->consumer);
    baton_engine_close(s->producer);
    rig_run_free(&s->native);
    baton_model_close(s->m);
}

static void hold(struct scene *s)
{
    struct baton_error e;
    struct baton_request_options o = s->o;
    o.hold = true;
    o.request_id = ++s->id;
    baton_request_close(s->held);
    s->held = rig_submit(s->producer, &o);
    memset(&s->ticket, 0xEE, sizeof s->ticket);
    s->ticket.struct_size = sizeof s->ticket;
    test_ok(baton_ticket(s->held, &s->ticket, -1, &e), &e);
    assert_int_equal(strlen(s->ticket.text), 90);
    assert_int_equal(s->ticket.argmax, s->native.ids[0]);
    assert_true(s->ticket.prefill_ns > 0);
}

static struct baton_request *pull_from(struct scene *s, const char *from, const char *ticket)
{
    struct baton_request_options o = s->o;
    o.request_id = ++s->id;
    o.from = from;
    o.ticket = ticket;
    return rig_submit(s->consumer, &o);
}

static struct baton_request *pull(struct scene *s)
{
    return pull_from(s, baton_engine_address(s->producer), s->ticket.text);
}

static void check_good(struct scene *s, struct baton_request *r)
{
    struct rig_run run;
    struct baton_error e;
    struct baton_token t;
    test_ok(rig_pull(r, &run, s->vocab, &e), &e);
    rig_equal(&run, &s->native, s->vocab, "a pull");
    struct baton_stats st = rig_stats(r);
    assert_string_equal(st.verdict, "verified");
    assert_int_equal(st.slots, 2 * baton_model_layers(s->m));
    assert_true(st.bytes > 0 && st.prefill_ns == s->ticket.prefill_ns);
    rig_run_free(&run);
    baton_request_close(r);
    test_ok(baton_next(s->held, &t, -1, &e), &e);
    assert_int_equal(rig_stats(s->held).finish, BATON_STOP);
}

static void check_bad(struct baton_request *r, int code, const char *word)
{
    struct baton_error e;
    struct baton_token t;
    test_fails(baton_next(r, &t, -1, &e), code, word, &e);
    assert_string_equal(rig_stats(r).reason, e.text);
    baton_request_close(r);
}

/* ---- bits --------------------------------------------------------------------------------- */

static void test_equal(void **state)
{
    (void)state;
    struct scene s;
    for (int i = 0; i < RIG_MODELS; i++) {
        if (RIG_SHORT && i % 2)
            continue;
        scene_open(&s, rig_models[i], i % 2 ? tcp : unix_address(), 0);
        for (int k = 0; k < 3; k++) {
            if (k)
                new_prompt(&s, 200);
            hold(&s);
            assert_int_equal(tickets(s.producer).open, 1);
            assert_true(engine_blocks_used(s.producer) > 0);
            check_good(&s, pull(&s));
            assert_int_equal(engine_blocks_used(s.producer), 0);
        }
        assert_int_equal(tickets(s.producer).fetched, 3);
        assert_int_equal(tickets(s.producer).peers, 1); /* one connection for all */
        scene_close(&s);
    }
}

/* A pull and a push of one prompt over one link: the same bits. */
static void test_push_too(void **state)
{
    (void)state;
    struct scene s;
    struct baton_error e;
    struct baton_token t;
    struct baton_link *link[2];
    scene_open(&s, "gemma3-tiny", tcp, 0);
    baton_engine_close(s.producer);
    baton_engine_close(s.consumer);
    test_ok(baton_link_pair(&link[0], &link[1], &e), &e);
    for (int i = 0; i < 2; i++) {
        const struct baton_engine_options o = {.struct_size = sizeof o,
                                               .role = i ? BATON_CONSUMER : BATON_PRODUCER,
                                               .device = rig_device(),
                                               .ctx = CTX,
                                               .threads = 2,
                                               .lanes = 2,
                                               .key = KEY,
                                               .key_bytes = 32,
                                               .tag_payload = i,
                                               .dead_ns = 20 * SECOND,
                                               .link = link[i]};
        test_ok(baton_engine_open(s.m, &o, i ? &s.consumer : &s.producer, &e), &e);
    }
    assert_null(baton_engine_address(s.producer));
    for (int i = 0; i < 3; i++) {
        hold(&s);
        struct baton_request_options o = s.o;
        o.request_id = ++s.id;
        o.mode = i ? BATON_STREAM : BATON_WHOLE;
        struct rig_run run;
        struct baton_request *p = rig_submit(s.producer, &o), *c = rig_submit(s.consumer, &o);
        struct baton_request *pulled = pull_from(&s, NULL, s.ticket.text);
        test_ok(rig_pull(c, &run, s.vocab, &e), &e);
        rig_equal(&run, &s.native, s.vocab, "a push");
        test_ok(baton_next(p, &t, -1, &e), &e);
        check_good(&s, pulled);
        rig_run_free(&run);
        baton_request_close(c);
        baton_request_close(p);
    }
    scene_close(&s);
}

/* Without a ticket the consumer computes itself, beside pulls. */
static void test_here(void **state)
{
    (void)state;
    struct scene s;
    struct rig_run run;
    struct baton_error e;
    scene_open(&s, "gemma3-tiny", tcp, 0);
    for (int i = 0; i < 3; i++) {
        if (i)
            new_prompt(&s, 200);
        hold(&s);
        struct baton_request_options o = s.o;
        o.request_id = ++s.id;
        o.local_prefill = true;
        struct baton_request *r = rig_submit(s.consumer, &o), *pulled = pull(&s);
        o.request_id = ++s.id;
        struct baton_request *cancelled = rig_submit(s.consumer, &o);
        baton_request_close(cancelled);
        test_ok(rig_pull(r, &run, s.vocab, &e), &e);
        rig_equal(&run, &s.native, s.vocab, "computed here from the start");
        struct baton_stats st = rig_stats(r);
        assert_string_equal(st.verdict, "");
        assert_int_equal(st.slots, 0);
        assert_true(st.prefill_ns > 0);
        rig_run_free(&run);
        baton_request_close(r);
        check_good(&s, pulled);
    }
    scene_close(&s);
}

/* ---- refusals ----------------------------------------------------------------------------- */

static void test_no_ticket(void **state)
{
    (void)state;
    struct scene s;
    struct baton_error e;
    struct baton_request *r;
    scene_open(&s, "qwen3-tiny", tcp, 0);
    struct baton_request_options o = s.o;
    const char *address = baton_engine_address(s.producer);
    test_fails(baton_submit(s.consumer, &o, &r, &e), BATON_ERR_USAGE, "whom to pull", &e);
    test_fails(baton_submit(s.producer, &o, &r, &e), BATON_ERR_USAGE, "mode", &e);
    o.mode = BATON_WHOLE;
    test_fails(baton_submit(s.producer, &o, &r, &e), BATON_ERR_USAGE, "without a peer", &e);
    o.from = address;
    test_fails(baton_submit(s.consumer, &o, &r, &e), BATON_ERR_USAGE, "no ticket", &e);
    o.ticket = "bt1.AAAA";
    test_fails(baton_submit(s.consumer, &o, &r, &e), BATON_ERR_INPUT, "not a ticket", &e);
    test_fails(baton_submit(s.producer, &o, &r, &e), BATON_ERR_USAGE, "consumer alone", &e);
    test_fails(baton_ticket_renew(s.consumer, address, "bt1.AAAA", &e), BATON_ERR_INPUT,
               "not a ticket", &e);
    o.hold = true;
    test_fails(baton_submit(s.consumer, &o, &r, &e), BATON_ERR_USAGE, "producer alone", &e);
    scene_close(&s);
}

static void forge(struct scene *s, char text[96])
{
    memcpy(text, s->ticket.text, 96);
    uint32_t at = test_range(&s->seed, 4, 80);
    text[at] = text[at] == 'A' ? 'B' : 'A';
}

static void test_refused(void **state)
{
    (void)state;
    struct scene s;
    char text[96], old[96];
    scene_open(&s, "qwen3-tiny", tcp, 0);
    hold(&s);
    forge(&s, text);
    check_bad(pull_from(&s, baton_engine_address(s.producer), text), BATON_ERR_STALE,
              "not issued here, or changed");
    check_good(&s, pull(&s));
    check_bad(pull(&s), BATON_ERR_STALE, "used up"); /* replayed */
    assert_int_equal(tickets(s.producer).refused, 2);
    hold(&s); /* one whose producer goes, and one that takes its place */
    memcpy(old, s.ticket.text, sizeof old);
    snprintf(text, sizeof text, "%s", baton_engine_address(s.producer));
    baton_request_close(s.held);
    s.held = NULL;
    baton_engine_close(s.producer);
    check_bad(pull_from(&s, text, old), BATON_ERR_PEER, "producer");
    s.producer = open_engine(s.m, tcp, 2, 0);
    check_bad(pull_from(&s, baton_engine_address(s.producer), old), BATON_ERR_STALE,
              "earlier start");
    scene_close(&s);
}

static void test_unreachable(void **state)
{
    (void)state;
    struct scene s;
    scene_open(&s, "qwen3-tiny", tcp, 0);
    hold(&s);
    check_bad(pull_from(&s, unix_address(), s.ticket.text), BATON_ERR_PEER, "can't be reached");
    check_bad(pull_from(&s, "nonsense", s.ticket.text), BATON_ERR_USAGE, "nonsense");
    s.o.local_prefill = true;
    struct baton_request *r = pull_from(&s, unix_address(), s.ticket.text);
    struct rig_run run;
    struct baton_error e;
    test_ok(rig_pull(r, &run, s.vocab, &e), &e);
    rig_equal(&run, &s.native, s.vocab, "computed here");
    assert_string_equal(rig_stats(r).verdict, "local-prefill: peer");
    baton_request_close(r);
    rig_run_free(&run);
    check_good(&s, pull(&s));
    scene_close(&s);
}

/* Another prompt: refused by the consumer, and the ticket is there for who has the right one. */
static void test_mismatch(void **state)
{
    (void)state;
    struct scene s;
    scene_open(&s, "koni-tiny", tcp, 0);
    hold(&s);
    s.ids[s.o.n_ids - 1] ^= 1;
    struct baton_request *r = pull(&s);
    s.ids[s.o.n_ids - 1] ^= 1;
    check_bad(r, BATON_ERR_MISMATCH, "token ids differ");
    until(tickets(s.producer).open == 1);
    check_good(&s, pull(&s));
    scene_close(&s);
}

/* Who has another key is told nothing and harms nobody. */
static void test_other_key(void **state)
{
    (void)state;
    struct scene s;
    struct baton_error e;
    scene_open(&s, "qwen3-tiny", tcp, 0);
    hold(&s);
    struct baton_engine *good = s.consumer;
    const struct baton_engine_options o = {.struct_size = sizeof o,
                                           .role = BATON_CONSUMER,
                                           .device = rig_device(),
                                           .ctx = CTX,
                                           .threads = 2,
                                           .key = "another one, also of 32 bytes...",
                                           .key_bytes = 32,
                                           .no_peer = true};
    test_ok(baton_engine_open(s.m, &o, &s.consumer, &e), &e);
    struct baton_token t;
    struct baton_request *r = pull(&s);
    test_fails(baton_next(r, &t, -1, &e), BATON_ERR_PEER, "another key", &e);
    baton_request_close(r);
    baton_engine_close(s.consumer);
    s.consumer = good;
    assert_int_equal(tickets(s.producer).open, 1);
    check_good(&s, pull(&s));
    scene_close(&s);
}

/* ---- claimants that hold, die, give up ------------------------------------------------------ */

/* One that knows the protocol and does no more than claim. */
struct claimant {
    struct handoff_conn *conn;
    bool offered;
};

static void note_offer(void *ctx, const struct handoff_offer *o)
{
    (void)o;
    ((struct claimant *)ctx)->offered = true;
}

static void claim(struct scene *s, struct claimant *c)
{
    struct baton_error e;
    struct transport *t;
    uint8_t ticket[HANDOFF_TICKET];
    const struct handoff_options o = {.key = KEY, .key_bytes = 32};
    const struct handoff_callbacks cb = {.on_offer = note_offer, .ctx = c};
    c->offered = false;
    test_ok(handoff_dial(baton_engine_address(s->producer), 10 * SECOND, &t, &e), &e);
    test_ok(handoff_conn_open(t, &o, &cb, &c->conn, &e), &e);
    test_ok(handoff_ticket_parse(s->ticket.text, ticket, &e), &e);
    test_ok(handoff_claim(c->conn, 7, ticket, &e), &e);
    while (!c->offered) {
        test_ok(handoff_conn_step(c->conn, &e), &e);
        base_sleep_ns(1000000);
    }
}

static void test_claimed(void **state)
{
    (void)state;
    struct scene s;
    struct claimant c;
    scene_open(&s, "qwen3-tiny", tcp, 0);
    hold(&s);
    claim(&s, &c);
    assert_int_equal(tickets(s.producer).claimed, 1);
    check_bad(pull(&s), BATON_ERR_STALE, "claimed by another");
    handoff_conn_close(c.conn); /* gone, and the ticket is open again */
    until(tickets(s.producer).open == 1);
    check_good(&s, pull(&s));
    assert_int_equal(tickets(s.producer).refused, 1);

    const struct baton_error no_use = {BATON_ERR_CANCELLED, "its client hung up"};
    struct baton_error e;
    struct baton_token t;
    hold(&s);
    claim(&s, &c);
    handoff_abort(c.conn, 7, &no_use);
    while (handoff_conn_busy(c.conn))
        test_ok(handoff_conn_step(c.conn, &e), &e);
    test_fails(baton_next(s.held, &t, -1, &e), BATON_ERR_CANCELLED, "hung up", &e);
    assert_int_equal(tickets(s.producer).given_up, 1);
    handoff_conn_close(c.conn);

    hold(&s); /* the producer gives up what was claimed */
    claim(&s, &c);
    baton_request_close(s.held);
    s.held = NULL;
    handoff_conn_close(c.conn);
    scene_close(&s);
}

/* A consumer process, told by a pipe whom to pull what from; killed at a point of the import. */
static void be_killed(struct scene *s, int fd, const char *probe)
{
    struct baton_token t;
    struct baton_error e;
    char address[96];
    setenv("BATON_PROBE", probe, 1);
    if (read(fd, address, 96) != 96 || read(fd, s->ticket.text, 96) != 96)
        _exit(2);
    s->consumer = open_engine(s->m, NULL, 1, 0);
    struct baton_request *r = pull_from(s, address, s->ticket.text);
    baton_next(r, &t, -1, &e);
    _exit(3);
}

/* Forked while this process has neither threads nor read its own probes. */
static void test_killed(void **state)
{
    (void)state;
    static const char *const probes[] = {"consumer-claimed=kill", "consumer-offered=kill",
                                         "consumer-reserved=kill", "consumer-piece=kill",
                                         "consumer-committed=kill"};
    enum { N = sizeof probes / sizeof *probes };
    struct scene s = {.seed = test_seed(), .m = rig_model("qwen3-tiny")};
    int fds[N][2], status;
    pid_t pid[N];
    s.vocab = baton_model_vocab(s.m);
    draw_prompt(&s, 150);
    for (int i = 0; i < N; i++) {
        assert_int_equal(pipe(fds[i]), 0);
        pid[i] = fork();
        if (pid[i] == 0)
            be_killed(&s, fds[i][0], probes[i]);
    }
    rig_alone(s.m, rig_device(), CTX, 0, &s.o, &s.native);
    s.consumer = open_engine(s.m, NULL, 2, 0);
    for (int i = 0; i < N; i++) {
        char address[96] = "";
        s.producer = open_engine(s.m, i % 2 ? tcp : unix_address(), 2, 0);
        hold(&s);
        snprintf(address, sizeof address, "%s", baton_engine_address(s.producer));
        assert_int_equal(write(fds[i][1], address, 96), 96);
        assert_int_equal(write(fds[i][1], s.ticket.text, 96), 96);
        assert_int_equal(waitpid(pid[i], &status, 0), pid[i]);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        until(tickets(s.producer).peers == 0);
        until(tickets(s.producer).open == 1);
        check_good(&s, pull(&s));
        baton_request_close(s.held);
        s.held = NULL;
        close(fds[i][0]);
        close(fds[i][1]);
        if (i < N - 1)
            baton_engine_close(s.producer);
    }
    scene_close(&s);
}

/* ---- leases ------------------------------------------------------------------------------- */

static void test_expired(void **state)
{
    (void)state;
    struct scene s;
    struct baton_error e;
    struct baton_token t;
    scene_open(&s, "qwen3-tiny", tcp, SECOND / 5);
    for (int i = 0; i < 2; i++) {
        hold(&s);
        if (i) { /* nobody looks after it */
            baton_request_detach(s.held);
            s.held = NULL;
            until(tickets(s.producer).expired == 2);
        } else {
            test_fails(baton_next(s.held, &t, -1, &e), BATON_ERR_STALE, "lease ended", &e);
            assert_int_equal(rig_stats(s.held).finish, BATON_FAILED);
        }
        until(engine_blocks_used(s.producer) == 0);
        check_bad(pull(&s), BATON_ERR_STALE, "expired");
    }
    scene_close(&s);
}

/* Twice its lease, renewed by either end; then it is fetched. */
static void test_renewed(void **state)
{
    (void)state;
    struct scene s;
    struct baton_error e;
    uint64_t lease = 3 * SECOND;
    scene_open(&s, "qwen3-tiny", unix_address(), lease);
    hold(&s);
    const char *address = baton_engine_address(s.producer);
    for (uint64_t begin = base_now_ns(); base_now_ns() < begin + lease + lease / 2;) {
        bool mine = test_range(&s.seed, 0, 3) == 0;
        test_ok(baton_ticket_renew(mine ? s.producer : s.consumer, mine ? NULL : address,
                                   s.ticket.text, &e),
                &e);
        base_sleep_ns(SECOND / 10);
    }
    check_good(&s, pull(&s));
    assert_int_equal(tickets(s.producer).expired, 0);
    scene_close(&s);
}

static void test_released(void **state)
{
    (void)state;
    struct scene s;
    struct baton_error e;
    struct baton_token t;
    scene_open(&s, "qwen3-tiny", tcp, 0);
    for (int i = 0; i < 2; i++) {
        hold(&s);
        test_ok(baton_ticket_release(i ? s.producer : s.consumer,
                                     i ? NULL : baton_engine_address(s.producer), s.ticket.text,
                                     &e),
                &e);
        test_fails(baton_next(s.held, &t, -1, &e), BATON_ERR_CANCELLED, "", &e);
        check_bad(pull(&s), BATON_ERR_STALE, "withdrawn");
        assert_int_equal(tickets(s.producer).given_up, i + 1);
    }
    hold(&s); /* cancelled at once: the claim is out, or not yet even dialed */
    struct baton_request *r = pull(&s);
    baton_cancel(r);
    int rc = baton_next(r, &t, -1, &e);
    while (rc == 1)
        rc = baton_next(r, &t, -1, &e);
    assert_int_equal(rc, 0);
    baton_request_close(r);
    rc = baton_next(s.held, &t, -1, &e);
    assert_true(rc == 0 || rc == BATON_ERR_CANCELLED);
    scene_close(&s);
}

/* ---- many --------------------------------------------------------------------------------- */

#define MANY 12u

/* Two producers and two consumers, each pulling from both, more than there are lanes; one consumer
 * is closed while it pulls: what it claimed is given up or fetched, and nobody else's suffers. */
static void many(struct scene *s, uint32_t lanes)
{
    struct baton_engine *p[2], *c[2];
    struct baton_request *held[MANY], *got[MANY];
    struct baton_ticket ticket = {.struct_size = sizeof ticket};
    struct baton_error e;
    struct baton_token t;
    for (int i = 0; i < 2; i++) {
        p[i] = open_engine(s->m, i ? unix_address() : tcp, lanes, 0);
        c[i] = open_engine(s->m, NULL, lanes, 0);
    }
    for (uint32_t i = 0; i < MANY; i++) {
        struct baton_request_options o = s->o;
        o.request_id = i;
        o.hold = true;
        held[i] = rig_submit(p[i % 2], &o);
    }
    for (uint32_t i = 0; i < MANY; i++) { /* in the order of submission, as pages come back */
        struct baton_request_options o = s->o;
        test_ok(baton_ticket(held[i], &ticket, -1, &e), &e);
        o.request_id = i;
        o.ticket = ticket.text;
        o.from = baton_engine_address(p[i % 2]);
        got[i] = rig_submit(c[i / 2 % 2], &o);
    }
    baton_engine_close(c[1]);
    for (uint32_t i = 0; i < MANY; i++) {
        struct rig_run run;
        bool closed = i / 2 % 2;
        int rc = rig_pull(got[i], &run, s->vocab, &e);
        if (!closed)
            test_ok(rc, &e);
        if (run.n == OUTPUT)
            rig_equal(&run, &s->native, s->vocab, "one of many");
        rig_run_free(&run);
        baton_request_close(got[i]);
        rc = baton_next(held[i], &t, -1, &e);
        assert_true(rc == 0 || (closed && rc == BATON_ERR_CANCELLED));
        baton_request_close(held[i]);
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(engine_blocks_used(p[i]), 0);
        assert_true(tickets(p[i]).fetched >= MANY / 4);
        baton_engine_close(p[i]);
    }
    baton_engine_close(c[0]);
}

static void test_many(void **state)
{
    (void)state;
    struct scene s;
    scene_open(&s, "koni-tiny", tcp, 0);
    for (uint32_t lanes = 2; lanes <= 4; lanes += 2)
        many(&s, lanes);
    scene_close(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_killed), /* forks: first, while there is one thread */
        cmocka_unit_test(test_equal),    cmocka_unit_test(test_push_too),
        cmocka_unit_test(test_here),     cmocka_unit_test(test_no_ticket),
        cmocka_unit_test(test_refused),  cmocka_unit_test(test_unreachable),
        cmocka_unit_test(test_mismatch), cmocka_unit_test(test_other_key),
        cmocka_unit_test(test_claimed),  cmocka_unit_test(test_expired),
        cmocka_unit_test(test_renewed),  cmocka_unit_test(test_released),
        cmocka_unit_test(test_many),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
