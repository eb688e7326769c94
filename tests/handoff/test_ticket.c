/* SPDX-License-Identifier: Apache-2.0 */
/* Tickets: forged, changed, expired, stale, used twice; and pulls by them over connections that
 * live, die and abort. */
#include "scene.h"

#define SECOND 1000000000u

/* ---- the book ------------------------------------------------------------------------------- */

static struct handoff_tickets *book_open(const void *key, uint64_t epoch)
{
    struct baton_error e;
    struct handoff_tickets *b;
    const struct handoff_tickets_options o = {.key = key, .key_bytes = 32, .epoch = epoch};
    test_ok(handoff_tickets_open(&o, &b, &e), &e);
    return b;
}

static void issue(struct handoff_tickets *b, uint64_t request, uint64_t generations, uint64_t now,
                  uint8_t ticket[HANDOFF_TICKET])
{
    struct baton_error e;
    test_ok(handoff_ticket_issue(b, request, generations, now, ticket, &e), &e);
}

#define refused(b, ticket, generations, now, code, word)                                           \
    do {                                                                                           \
        struct baton_error e_;                                                                     \
        test_fails(handoff_ticket_claim(b, ticket, generations, now, &e_), code, word, &e_);       \
    } while (0)

static void claimed(struct handoff_tickets *b, const uint8_t *ticket, uint64_t generations,
                    uint64_t now)
{
    struct baton_error e;
    test_ok(handoff_ticket_claim(b, ticket, generations, now, &e), &e);
}

static void test_text(void **state)
{
    struct baton_error e;
    uint8_t ticket[HANDOFF_TICKET], back[HANDOFF_TICKET];
    char text[HANDOFF_TICKET_TEXT + 8], other[HANDOFF_TICKET_TEXT];
    static const char *const bad[] = {"", "bt1.", "bt2.AAAA", "bt1.====", "request-17"};
    for (int round = 0; round < 200; round++) {
        for (size_t i = 0; i < sizeof ticket; i++)
            ticket[i] = (uint8_t)(test_random(&seed) >> 32);
        handoff_ticket_text(ticket, text);
        assert_int_equal(strlen(text), 90);
        assert_int_equal(strspn(text + 4, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
                                          "0123456789-_"),
                         86);
        test_ok(handoff_ticket_parse(text, back, &e), &e);
        assert_memory_equal(back, ticket, sizeof ticket);
    }
    memset(ticket, 0, sizeof ticket); /* as coreutils' basenc --base64url has it */
    ticket[0] = 0xFB;
    ticket[1] = 0xFF;
    handoff_ticket_text(ticket, other);
    assert_memory_equal(other, "bt1.-_8AAAAA", 12);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        test_fails(handoff_ticket_parse(bad[i], back, &e), BATON_ERR_INPUT, "not a ticket", &e);
    for (size_t i = 0; i < 90; i++) { /* one character that is none, or one too few or too many */
        char kept = text[i];
        text[i] = "+/=. \n\x80"[test_range(&seed, 0, 6)];
        if (text[i] != kept)
            test_fails(handoff_ticket_parse(text, back, &e), BATON_ERR_INPUT, "not a ticket", &e);
        text[i] = 0;
        test_fails(handoff_ticket_parse(text, back, &e), BATON_ERR_INPUT, "not a ticket", &e);
        text[i] = kept;
    }
    strcat(text, "A");
    test_fails(handoff_ticket_parse(text, back, &e), BATON_ERR_INPUT, "not a ticket", &e);
    other[89] = 'B'; /* bits behind the last byte: another text of the same ticket */
    test_fails(handoff_ticket_parse(other, back, &e), BATON_ERR_INPUT, "not a ticket", &e);
}

static void test_forged(void **state)
{
    uint8_t ticket[HANDOFF_TICKET];
    struct handoff_tickets *b = book_open(rig_key, 0), *other = book_open(NULL, 0);
    issue(b, 7, 1, 0, ticket);
    for (unsigned bit = 0; bit < 8 * HANDOFF_TICKET; bit++) {
        ticket[bit / 8] ^= (uint8_t)(1u << bit % 8);
        refused(b, ticket, 1, 0, BATON_ERR_INTEGRITY, "not issued here, or changed");
        ticket[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    refused(other, ticket, 1, 0, BATON_ERR_INTEGRITY, "not issued here");
    memset(ticket, 0, sizeof ticket);
    refused(b, ticket, 1, 0, BATON_ERR_INTEGRITY, "not issued here");
    handoff_tickets_close(b);
    handoff_tickets_close(other);
    handoff_tickets_close(NULL);
}

static void test_expired(void **state)
{
    uint8_t ticket[HANDOFF_TICKET], second[HANDOFF_TICKET];
    struct handoff_tickets *b = book_open(rig_key, 0);
    const uint64_t now = 5 * (uint64_t)SECOND, end = now + 30 * (uint64_t)SECOND;
    uint64_t request = 99;
    assert_int_equal(handoff_ticket_due(b), UINT64_MAX);
    issue(b, 7, 1, now, ticket);
    issue(b, 8, 1, now + 1, second);
    assert_int_equal(handoff_ticket_due(b), end);
    assert_false(handoff_ticket_expire(b, end - 1, &request));
    refused(b, ticket, 1, end, BATON_ERR_STALE, "expired");
    assert_true(handoff_ticket_expire(b, end, &request));
    assert_int_equal(request, 7);
    assert_false(handoff_ticket_expire(b, end, &request));
    refused(b, ticket, 1, end, BATON_ERR_STALE, "expired");
    claimed(b, second, 1, end); /* in its last nanosecond */
    assert_int_equal(handoff_ticket_due(b), UINT64_MAX);
    assert_false(handoff_ticket_expire(b, end + 1000 * (uint64_t)SECOND, &request));
    assert_int_equal(handoff_tickets_open_n(b), 1);
    handoff_tickets_close(b);
}

/* Its pages were given back and went to somebody else. */
static void test_stale_generation(void **state)
{
    struct baton_error e;
    struct kv_geometry g;
    struct cache c;
    uint8_t ticket[HANDOFF_TICKET];
    struct handoff_tickets *b = book_open(rig_key, 0);
    geometry_small(&g);
    cache_open(&c, &g, 300, 300);
    test_ok(kv_seq_reserve(c.seq, 200, &e), &e);
    uint64_t before = kv_seq_generations(c.seq);
    issue(b, 7, before, 0, ticket);
    kv_seq_close(c.seq);
    test_ok(kv_seq_open(c.pool, &c.seq, &e), &e);
    test_ok(kv_seq_reserve(c.seq, 200, &e), &e); /* the very same blocks, another time */
    assert_int_not_equal(kv_seq_generations(c.seq), before);
    refused(b, ticket, kv_seq_generations(c.seq), 0, BATON_ERR_STALE, "pages were given back");
    kv_seq_close(c.seq);
    test_ok(kv_seq_open(c.pool, &c.seq, &e), &e);
    refused(b, ticket, kv_seq_generations(c.seq), 0, BATON_ERR_STALE, "pages were given back");
    claimed(b, ticket, before, 0);
    cache_close(&c);
    handoff_tickets_close(b);
}

static void test_second_claim(void **state)
{
    struct baton_error e;
    uint8_t ticket[HANDOFF_TICKET], again[HANDOFF_TICKET];
    uint64_t request = 0;
    struct handoff_tickets *b = book_open(rig_key, 0);
    issue(b, 7, 1, 0, ticket);
    test_fails(handoff_ticket_issue(b, 7, 1, 0, again, &e), BATON_ERR_USAGE, "has a ticket", &e);
    test_ok(handoff_ticket_request(b, ticket, 0, &request, &e), &e);
    assert_int_equal(request, 7);
    claimed(b, ticket, 1, 0);
    refused(b, ticket, 1, 0, BATON_ERR_BUSY, "claimed by another connection");
    /* its connection lived longer than the ticket says, and then died */
    const uint64_t heard = 100 * (uint64_t)SECOND, end = heard + 30 * (uint64_t)SECOND;
    handoff_ticket_release(b, 7, heard);
    handoff_ticket_release(b, 7, heard + SECOND); /* not claimed: nothing to renew */
    assert_int_equal(handoff_ticket_due(b), end);
    claimed(b, ticket, 1, end - 1);
    handoff_ticket_burn(b, 7);
    handoff_ticket_burn(b, 7);
    refused(b, ticket, 1, SECOND, BATON_ERR_STALE, "used up");
    refused(b, ticket, 1, end, BATON_ERR_STALE, "expired");
    issue(b, 7, 1, SECOND, again); /* the id comes again: the old ticket does not */
    refused(b, ticket, 1, SECOND, BATON_ERR_STALE, "used up");
    claimed(b, again, 1, SECOND);
    handoff_tickets_close(b);
}

static void test_restarted_issuer(void **state)
{
    uint8_t ticket[HANDOFF_TICKET];
    struct handoff_tickets *b = book_open(rig_key, 41);
    issue(b, 7, 1, 0, ticket);
    handoff_tickets_close(b);
    b = book_open(rig_key, 42);
    refused(b, ticket, 1, 0, BATON_ERR_STALE, "of an earlier start of its issuer");
    handoff_tickets_close(b);
    b = book_open(NULL, 41); /* without a key of its own nothing of an earlier start is known */
    refused(b, ticket, 1, 0, BATON_ERR_INTEGRITY, "not issued here");
    handoff_tickets_close(b);
    struct handoff_tickets *x = book_open(rig_key, 0), *y = book_open(rig_key, 0);
    issue(x, 7, 1, 0, ticket);
    refused(y, ticket, 1, 0, BATON_ERR_STALE, "of an earlier start"); /* epochs are random */
    handoff_tickets_close(x);
    handoff_tickets_close(y);
}

static void test_full_book(void **state)
{
    struct baton_error e;
    uint8_t ticket[HANDOFF_TICKET];
    uint64_t request;
    int out = 0;
    struct handoff_tickets *b = book_open(rig_key, 0);
    for (uint64_t i = 0; i < HANDOFF_MAX_TICKETS; i++)
        issue(b, i, 1, i, ticket);
    test_fails(handoff_ticket_issue(b, 5000, 1, 0, ticket, &e), BATON_ERR_BUSY, "1024 tickets", &e);
    while (handoff_ticket_expire(b, 30 * (uint64_t)SECOND + 499, &request))
        assert_true(out++ < 500 && request < 500);
    assert_int_equal(out, 500);
    handoff_tickets_close(b);
}

/* ---- pulls ---------------------------------------------------------------------------------- */

#define TOKENS 130u

/* A producer that keeps one finished prefill, its book, and connections to two consumers. */
static struct keeper {
    struct truth truth;
    struct cache from, into[2];
    struct end p[2], c[2];
    struct handoff_tickets *book;
    uint8_t ticket[HANDOFF_TICKET];
    int32_t ids[TOKENS];
    bool late; /* does not answer in on_claim */
} k;

/* What an engine does when a claim comes: one code path with push from here on. */
static void keeper_answer(struct end *end, uint64_t id)
{
    struct baton_error e;
    struct handoff_offer o;
    const struct handoff_commit m = {.argmax = 3, .margin = 1};
    if (handoff_ticket_claim(k.book, end->ticket[id % RIG_IDS], kv_seq_generations(k.from.seq), 0,
                             &e)) {
        handoff_abort(end->conn, id, &e);
        return;
    }
    offer_fill(&o, id, &k.truth.g, k.ids, TOKENS, true);
    test_ok(handoff_offer(end->conn, &o, &e), &e);
    queue_all(end->conn, id, &k.from, TOKENS);
    test_ok(handoff_commit(end->conn, id, &m, &e), &e);
}

static void keeper_claim(struct end *end, uint64_t id)
{
    if (!k.late)
        keeper_answer(end, id);
}

/* And when a request ends. */
static void keeper_settle(void)
{
    for (int i = 0; i < 2; i++)
        for (unsigned id = 0; id < RIG_IDS; id++) {
            if (k.p[i].ends[id] != 1 || k.p[i].held[id] == UINT32_MAX)
                continue;
            k.p[i].held[id] = UINT32_MAX; /* settled */
            bool mine = k.p[i].reserves[id] || k.p[i].why[id].code != BATON_ERR_BUSY;
            if (k.p[i].why[id].code == 0)
                handoff_ticket_burn(k.book, 7);
            else if (mine)
                handoff_ticket_release(k.book, 7, handoff_conn_heard(k.p[i].conn));
        }
}

static void line_open(int i)
{
    struct baton_error e;
    struct transport *a, *b;
    test_ok(transport_inproc_pair(4096, &a, &b, &e), &e);
    rig_auth = 1;
    end_open(&k.p[i], a, true, 0);
    end_open(&k.c[i], b, false, 0);
    k.p[i].on_claim = keeper_claim;
    for (int id = 0; id < RIG_IDS; id++)
        k.c[i].into[id] = &k.into[i];
}

static void keeper_open(void)
{
    const struct kv_geometry g = {.n_layers = 2,
                                  .kv_heads = 2,
                                  .head_dim = 8,
                                  .dtype = BATON_BF16,
                                  .window = 70,
                                  .local = {1, 0}};
    memset(&k, 0, sizeof k);
    truth_open(&k.truth, &g, TOKENS, &seed);
    cache_open(&k.from, &g, TOKENS, TOKENS);
    cache_prefill(&k.from, &k.truth);
    for (int i = 0; i < 2; i++) {
        cache_open(&k.into[i], &g, TOKENS, 1);
        cache_import(&k.into[i], TOKENS);
        line_open(i);
    }
    k.book = book_open(rig_key, 0);
    issue(k.book, 7, kv_seq_generations(k.from.seq), 0, k.ticket);
}

static void keeper_close(void)
{
    for (int i = 0; i < 2; i++) {
        end_close(&k.p[i]);
        end_close(&k.c[i]);
        cache_close(&k.into[i]);
    }
    truth_close(&k.truth);
    cache_close(&k.from);
    handoff_tickets_close(k.book);
}

static void claim(int i, uint64_t id)
{
    struct baton_error e;
    test_ok(handoff_claim(k.c[i].conn, id, k.ticket, &e), &e);
}

static void run(int i, int rounds)
{
    for (int n = 0; n < rounds; n++) {
        both_step(&k.p[i], &k.c[i], 1);
        keeper_settle();
    }
}

static void pulled(int i, uint64_t id)
{
    assert_int_equal(k.p[i].rc, 0);
    assert_int_equal(k.c[i].rc, 0);
    assert_int_equal(k.c[i].commits[id], 1);
    assert_int_equal(k.c[i].ends[id], 1);
    assert_int_equal(k.c[i].why[id].code, 0);
    assert_int_equal(k.p[i].ends[id], 1);
    assert_int_equal(k.p[i].why[id].code, 0);
    assert_true(cache_equals(&k.into[i], &k.truth));
}

static void test_pull(void **state)
{
    struct baton_error e;
    keeper_open();
    claim(0, 3);
    test_fails(handoff_claim(k.c[0].conn, 3, k.ticket, &e), BATON_ERR_BUSY, "is open", &e);
    test_fails(handoff_claim(k.p[0].conn, 3, k.ticket, &e), BATON_ERR_USAGE, "claims nothing", &e);
    run(0, 200);
    pulled(0, 3);
    assert_int_equal(handoff_tickets_open_n(k.book), 0);
    claim(1, 3); /* replayed by another */
    run(1, 50);
    assert_int_equal(k.c[1].offers[3], 0);
    assert_int_equal(k.c[1].ends[3], 1);
    assert_int_equal(k.c[1].why[3].code, BATON_ERR_STALE);
    assert_non_null(strstr(k.c[1].why[3].text, "used up"));
    assert_int_equal(k.p[1].ends[3], 1);
    claim(0, 3); /* and by the same one, whose connection is as good as before */
    k.c[0].ends[3] = k.p[0].ends[3] = 0;
    run(0, 50);
    assert_int_equal(k.c[0].why[3].code, BATON_ERR_STALE);
    assert_int_equal(k.c[0].rc, 0);
    keeper_close();
}

/* Answered later, as a prefill that still runs is. */
static void test_pull_answered_late(void **state)
{
    struct baton_error e;
    const struct handoff_commit m = {.argmax = 3};
    keeper_open();
    k.late = true;
    claim(0, 3);
    run(0, 20);
    assert_int_equal(k.p[0].claims[3], 1);
    assert_memory_equal(k.p[0].ticket[3], k.ticket, HANDOFF_TICKET);
    test_fails(handoff_layer(k.p[0].conn, 3, 0, kv_seq_views(k.from.seq), 0, 1, &e),
               BATON_ERR_USAGE, "not offered yet", &e);
    test_fails(handoff_commit(k.p[0].conn, 3, &m, &e), BATON_ERR_USAGE, "not offered yet", &e);
    test_fails(handoff_reserve(k.c[0].conn, 3, kv_seq_views(k.into[0].seq), 0, false, &e),
               BATON_ERR_USAGE, "not offered yet", &e);
    keeper_answer(&k.p[0], 3);
    run(0, 200);
    pulled(0, 3);
    keeper_close();
}

static void test_second_claim_over_a_connection(void **state)
{
    keeper_open();
    claim(0, 3);
    for (int i = 0; !k.c[0].offers[3]; i++)
        run(0, 1);
    claim(1, 4);
    run(1, 50);
    assert_int_equal(k.c[1].ends[4], 1);
    assert_int_equal(k.c[1].why[4].code, BATON_ERR_BUSY);
    assert_non_null(strstr(k.c[1].why[4].text, "claimed by another connection"));
    run(0, 200); /* and the first is undisturbed */
    pulled(0, 3);
    keeper_close();
}

/* A claimant dies after every step, another one claims: it gets all of it, unless the first had
 * acknowledged. */
static void test_claimant_dies(void **state)
{
    int served = 0, late = 0;
    for (int at = 0; late < 3; at++) {
        keeper_open();
        claim(0, 3);
        run(0, at);
        bool acked = k.p[0].ends[3] && k.p[0].why[3].code == 0;
        handoff_conn_close(k.c[0].conn); /* also without BYE, see test_faults: the same to us */
        k.c[0].conn = NULL;
        for (int i = 0; i < 200 && !k.p[0].rc; i++)
            end_step(&k.p[0]);
        keeper_settle();
        assert_int_equal(k.p[0].ends[3], k.p[0].claims[3]);
        claim(1, 4);
        run(1, 200);
        if (acked || (k.p[0].ends[3] && k.p[0].why[3].code == 0)) {
            assert_int_equal(k.c[1].why[4].code, BATON_ERR_STALE);
            late++;
        } else {
            pulled(1, 4);
            served++;
        }
        keeper_close();
    }
    print_message("%d times served by the second claim\n", served);
    assert_true(served > 5);
}

/* The consumer, or the producer, gives the claim up after every step: the connection goes on, and
 * the ticket is open again. */
static void test_claim_aborted(void **state)
{
    for (int side = 0; side < 2; side++)
        for (int at = 0, late = 0; late < 2; at++) {
            keeper_open();
            k.late = at % 2;
            claim(0, 3);
            run(0, at);
            if (k.late && k.p[0].claims[3] && at % 4 == 1)
                keeper_answer(&k.p[0], 3); /* OFFER on its way when ABORT leaves */
            late += k.c[0].ends[3] || at > 40;
            handoff_abort(side ? k.c[0].conn : k.p[0].conn, 3, NULL);
            run(0, 60);
            assert_int_equal(k.p[0].rc, 0);
            assert_int_equal(k.c[0].rc, 0);
            if (side || k.p[0].ends[3]) {
                assert_int_equal(k.c[0].ends[3], 1);
                assert_int_equal(k.p[0].ends[3], k.p[0].claims[3]);
            }
            if (k.p[0].ends[3] && k.p[0].why[3].code) {
                k.late = false;
                claim(0, 4); /* on the same connection */
                run(0, 200);
                pulled(0, 4);
            }
            keeper_close();
        }
}

/* Nobody there who knows tickets. */
static void test_claim_unanswerable(void **state)
{
    struct baton_error e;
    struct scene s;
    scene_auth = 0;
    const struct handoff_options o = {.producer = true};
    const struct handoff_callbacks cb = {0};
    uint8_t b[96] = {0};
    scene_open(&s, true);
    transport_close(s.peer);
    handoff_conn_close(s.me.conn);
    struct transport *t;
    test_ok(transport_inproc_pair(1 << 16, &t, &s.peer, &e), &e);
    test_ok(handoff_conn_open(t, &o, &cb, &s.me.conn, &e), &e);
    wire_hello(&s.w, 1, 1, 2, 1000000000u, 10000000000u);
    wire_frame(&s.w, W_CLAIM, 9, b, 96, NULL, 0, false);
    scene_send(&s);
    assert_int_equal(s.me.rc, 0);
    assert_true(scene_heard(&s, W_ABORT));
    wire_frame(&s.w, W_CLOSE, 9, NULL, 0, NULL, 0, false);
    wire_frame(&s.w, W_CLAIM, 9, b, 96, NULL, 0, false); /* the id is free again */
    scene_send(&s);
    assert_int_equal(s.me.rc, 0);
    assert_true(scene_heard(&s, W_ABORT));
    scene_close(&s);
}

/* ---- claims written by hand ----------------------------------------------------------------- */

static void claim_dies(uint8_t type, uint32_t n, size_t at, const char *word)
{
    struct scene s;
    uint8_t b[264] = {0};
    scene_auth = 0;
    scene_open(&s, true);
    wire_hello(&s.w, 1, 1, 2, 1000000000u, 10000000000u);
    b[at] = at != 0;
    wire_frame(&s.w, W_CLAIM, 0, b, 96, NULL, 0, false);
    if (at == 0)
        wire_frame(&s.w, type, 0, b, n, NULL, 0, false);
    s.me.offers[0] = at == 0; /* for dies(): a claim that came must be ended */
    dies(&s, BATON_ERR_PEER, word);
}

static void test_hostile_claims(void **state)
{
    claim_dies(W_CLAIM, 96, 0, "CLAIM of request 0, which is open");
    claim_dies(W_CLAIM, 96, 95, "CLAIM with fields that version 1 does not have");
    claim_dies(W_CLAIM, 96, 64, "CLAIM with fields that version 1 does not have");
    claim_dies(W_RESERVE, 96, 0, "RESERVE of request 0");
    claim_dies(W_REFUSE, 256, 0, "REFUSE of request 0");
    claim_dies(W_NACK, 264, 0, "NACK of request 0 before RESERVE");
    claim_dies(W_ACK, 32, 0, "ACK of request 0 before all was sent");
    claim_dies(W_CLOSE, 0, 0, "CLOSE for request 0, which is open");
}

/* ---- ASK ------------------------------------------------------------------------------------ */

static void hello_takes(struct scene *s, uint32_t takes)
{
    uint8_t b[96] = {0};
    w_u32(w_u16(w_u16(b, 1), 1), 1);
    w_u64(w_u64(b + 16, 1000000000u), 10000000000u);
    w_u32(b + 64, takes);
    wire_frame(&s->w, W_HELLO, 0, b, sizeof b, NULL, 0, false);
}

/* The last frame that the end under test has sent is this one. */
static void heard_last(struct scene *s, uint8_t type, uint64_t request, const uint8_t *body,
                       size_t n)
{
    uint8_t buf[4096];
    size_t got = scene_read(s, buf, sizeof buf);
    assert_true(got >= 48 + n);
    const uint8_t *h = buf + got - n - 48;
    assert_memory_equal(h, "BATN", 4);
    assert_int_equal(h[6], type);
    assert_memory_equal(h + 16, &request, 8);
    assert_memory_equal(h + 48, body, n);
}

/* Asking needs the peer's HELLO, and its word that it takes this. */
static void test_ask(void **state)
{
    (void)state;
    struct baton_error e;
    struct scene s;
    const int32_t ids[3] = {5, 0, 70000};
    uint8_t body[16 + 12];
    scene_auth = 0;
    scene_open(&s, false);
    test_fails(handoff_ask(s.me.conn, 3, ids, 3, 9, &e), BATON_ERR_USAGE, "HELLO", &e);
    hello(&s);
    scene_send(&s);
    test_fails(handoff_ask(s.me.conn, 3, ids, 3, 9, &e), BATON_ERR_UNSUPPORTED, "asked for", &e);
    scene_close(&s);

    scene_open(&s, false);
    hello_takes(&s, UINT32_MAX); /* bits that nobody knows do no harm */
    scene_send(&s);
    test_fails(handoff_ask(s.me.conn, 3, ids, 0, 9, &e), BATON_ERR_USAGE, "0 token ids", &e);
    test_ok(handoff_ask(s.me.conn, 3, ids, 3, 9, &e), &e);
    test_fails(handoff_ask(s.me.conn, 3, ids, 3, 9, &e), BATON_ERR_BUSY, "request 3", &e);
    memset(body, 0, sizeof body);
    w_u32(w_u32(body, 3), 9);
    w_u32(w_u32(w_u32(body + 16, 5), 0), 70000);
    scene_send(&s);
    heard_last(&s, W_ASK, 3, body, sizeof body);
    scene_close(&s);
}

/* A baton producer takes none. */
static void test_ask_untaken(void **state)
{
    (void)state;
    claim_dies(W_ASK, 20, 0, "ASK, which this end does not take");
    claim_dies(W_ASK, 16, 0, "ASK with a body of 16 bytes");
    claim_dies(W_ASK, 22, 0, "ASK with a body of 22 bytes");
}

/* A consumer that has claimed, and a producer written by hand. */
static void claiming(struct scene *s)
{
    struct baton_error e;
    const uint8_t ticket[HANDOFF_TICKET] = {7};
    scene_auth = 0;
    consumer_open(s);
    test_ok(handoff_claim(s->me.conn, 0, ticket, &e), &e);
    scene_send(s);
    assert_true(scene_heard(s, W_CLAIM));
}

static void test_hostile_answers(void **state)
{
    struct scene s;
    uint8_t b[400] = {0};
    claiming(&s);
    s.me.offers[0] = 1; /* for dies() */
    wire_layer(&s.w, 0, 0, 0, 0, 5, 1);
    dies(&s, BATON_ERR_PEER, "LAYER for request 0, which is claimed and not offered yet");
    claiming(&s);
    s.me.offers[0] = 1;
    wire_commit(&s.w, 0, N);
    dies(&s, BATON_ERR_PEER, "COMMIT for request 0, which is claimed and not offered yet");
    claiming(&s); /* twice */
    wire_offer(&s.w, 0, N, false);
    wire_offer(&s.w, 0, N, false);
    dies(&s, BATON_ERR_PEER, "OFFER of request 0, which is open");
    claiming(
        &s); /* a layer table that does not fit: the owner has a request, and hears of its end */
    uint32_t n = wire_offer_body(b, N, false);
    w_u32(b + 196, 1);
    wire_frame(&s.w, W_OFFER, 0, b, n, NULL, 0, false);
    scene_send(&s);
    assert_int_equal(s.me.rc, 0);
    assert_int_equal(s.me.ends[0], 1);
    assert_int_equal(s.me.why[0].code, BATON_ERR_MISMATCH);
    assert_true(scene_heard(&s, W_REFUSE));
    scene_close(&s);
    claiming(&s); /* given up here while OFFER is on its way: it is ignored */
    handoff_abort(s.me.conn, 0, NULL);
    wire_offer(&s.w, 0, N, false);
    scene_send(&s);
    assert_int_equal(s.me.rc, 0);
    assert_int_equal(s.me.offers[0], 0);
    wire_frame(&s.w, W_CLOSE, 0, NULL, 0, NULL, 0, false);
    wire_offer(&s.w, 0, N, false); /* now it is a push */
    scene_send(&s);
    assert_int_equal(s.me.rc, 0);
    assert_int_equal(s.me.offers[0], 1);
    scene_close(&s);
}

/* A push may carry a ticket of the consumer's. */
static void test_ticket_in_offer(void **state)
{
    struct baton_error e;
    struct handoff_offer o;
    keeper_open();
    for (int with = 0; with < 2; with++) {
        offer_fill(&o, (uint64_t)with, &k.truth.g, k.ids, TOKENS, true);
        o.ticket = with ? k.ticket : NULL;
        test_ok(handoff_offer(k.p[0].conn, &o, &e), &e);
        run(0, 20);
        assert_int_equal(k.c[0].offers[with], 1);
        assert_int_equal(k.c[0].offer[with].ticket != NULL, with);
    }
    assert_memory_equal(k.c[0].ticket[1], k.ticket, HANDOFF_TICKET);
    assert_int_equal(k.c[0].ids_sum[0], k.c[0].ids_sum[1]);
    keeper_close();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_forged),
        cmocka_unit_test(test_expired),
        cmocka_unit_test(test_stale_generation),
        cmocka_unit_test(test_second_claim),
        cmocka_unit_test(test_restarted_issuer),
        cmocka_unit_test(test_full_book),
        cmocka_unit_test(test_pull),
        cmocka_unit_test(test_pull_answered_late),
        cmocka_unit_test(test_second_claim_over_a_connection),
        cmocka_unit_test(test_claimant_dies),
        cmocka_unit_test(test_claim_aborted),
        cmocka_unit_test(test_claim_unanswerable),
        cmocka_unit_test(test_hostile_claims),
        cmocka_unit_test(test_ask),
        cmocka_unit_test(test_ask_untaken),
        cmocka_unit_test(test_hostile_answers),
        cmocka_unit_test(test_ticket_in_offer),
    };
    seed = test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
