/* SPDX-License-Identifier: Apache-2.0 */
/* Every order of events of one request between two real ends, breadth first, up to a bound.
 *
 * A state is reached by a sequence of acts: an end works on what has arrived, an owner calls, or
 * something goes wrong (only a part of what has arrived is read, an owner calls twice, an abort, a
 * crash, an orderly close, a refusal, a cut, bytes that come twice or damaged, somebody who writes
 * into the landing region where he may not). Ends can't be
 * copied, so a state is reached again by doing its acts again. Two sequences lead to the same state
 * where each end alone saw the same (bytes taken, bytes given, calls) in the same order, and the
 * same lies in the region and in the consumer's pages: the bytes between the ends follow from that.
 * From every state the rest is played without further trouble, and then one more request.
 *
 * Shown, in every state and on every way: both ends come to an end without anybody's clock; one end
 * a request and side; nothing is delivered before the producer's commit, after an end, or wrong;
 * nobody reads the producer's pages or writes the consumer's after on_end. With a landing region of
 * one slot, through which two pieces go: no slot is credited before it was drained, none is filled
 * again before it was drained and its credit came; a dead end has no mapping of it; whatever became
 * of the request, the next one finds the slot free.
 *
 * BATON_EXPLORE=N: N troubles a way instead of 1. Built with PLANT (plant.c): a fault has to be
 * found. */
#include <setjmp.h>
#include <sys/uio.h>

#include "handoff/handoff_priv.h"
#include "pipe.h"
#include "shuttle.h"

#define N_TOKENS 2u
#define QUEUE (64u << 10)
#define MAX_DEPTH 64u

enum act {
    P_ALL, /* the end takes all that has arrived, works, gives what it can */
    C_ALL,
    P_PART, /* half of it; counts as a trouble */
    C_PART,
    P_COMMIT,  /* layers and commit are queued; a second call, a trouble, must be refused */
    C_RESERVE, /* the same */
    P_ANSWER,  /* of a claim: offer */
    TROUBLE,
    P_ABORT = TROUBLE,
    C_ABORT,
    P_DENY, /* of a claim: abort at once */
    C_REFUSE,
    P_CRASH, /* what it gave to the stream still arrives */
    C_CRASH,
    P_CLOSE,
    C_CLOSE,
    CUT, /* what is between the ends is lost */
    TO_P_TWICE,
    TO_C_TWICE,
    TO_P_DAMAGED,
    TO_C_DAMAGED,
    SCRIBBLE, /* over the whole landing region */
    N_ACTS
};

static uint64_t seed;

/* Opened once: pools, and what the pages should hold. */
static struct truth truth;
static struct cache cache[2];
static bool pull, landing;

struct world {
    struct end end[2];       /* producer, consumer */
    struct transport *in[2]; /* the streams' other ends */
    uint8_t *queue[2];       /* from end i, not arrived yet */
    size_t n[2];
    bool over[2]; /* nothing more comes from end i */
    bool gone[2]; /* crashed or closed */
    bool trusted; /* no bytes were changed on their way */
    int offers, commits, reserves, troubles, calls;
    uint64_t history[2];
    uint64_t kept; /* the consumer's pages as its end left them */
    struct lending lending;
};

static struct world w;
static uint8_t *queues[2];

/* The way to the state that is looked at, in letters of enum act: what a failure is about. */
static char way[MAX_DEPTH + 8];

#ifndef PLANT
#define PLANT 0
#endif
/* What is said of the fault that was planted. */
static const char *const planted[] = {
    NULL,
    "a slot is credited before it was drained",
    "a slot is filled again before it was drained",
    "the next request is delivered",
};
static jmp_buf found_it;

static void broken(const char *rule)
{
    if (PLANT && !strcmp(rule, planted[PLANT])) {
        print_message("found: not so: %s, on the way %s\n", rule, way);
        longjmp(found_it, 1);
    }
    fail_msg("%s: not so: %s (P %d '%s' ends %d '%s', C %d '%s' ends %d '%s' of %d)", way, rule,
             w.end[0].rc, w.end[0].death.text, w.end[0].ends[0], w.end[0].why[0].text, w.end[1].rc,
             w.end[1].death.text, w.end[1].ends[0], w.end[1].why[0].text, w.end[1].offers[0]);
}

#define holds(condition) ((condition) ? (void)0 : broken(#condition))

static uint64_t mix(uint64_t h, uint64_t x)
{
    h = (h ^ x) * 0x9E3779B97F4A7C15u;
    return h ^ h >> 29;
}

static uint64_t pages_hash(const struct cache *c)
{
    const uint8_t *p = kv_pool_memory(c->pool);
    uint64_t h = 1;
    for (uint64_t i = 0; i + 8 <= kv_pool_bytes(c->pool); i += 8) {
        uint64_t x;
        memcpy(&x, p + i, 8);
        h = mix(h, x);
    }
    return h;
}

/* What the peer may have written and the consumer not read yet. */
static uint64_t region_hash(void)
{
    uint64_t h = 1;
    for (size_t i = 0; i < SHUTTLE_BYTES && w.lending.data; i++)
        h = mix(h, w.lending.data[i]);
    return h;
}

/* Called in on_commit and on_end: from an end on, pages belong to somebody else. */
static void watch(struct end *end, uint64_t id, bool commit)
{
    int side = end == &w.end[1];
    if (commit) {
        assert_true(w.commits > 0);
        assert_int_equal(end->commits[id], 1);
        assert_true(cache_equals(&cache[1], &truth));
    }
    if (commit || id)
        return;
    assert_int_equal(end->ends[0], 1);
    if (side == 0 || end->why[0].code)
        memset(kv_pool_memory(cache[side].pool), 0xEE, (size_t)kv_pool_bytes(cache[side].pool));
    if (side == 1)
        w.kept = pages_hash(&cache[1]);
}

static void world_open(void)
{
    struct baton_error e;
    const struct handoff_options o[2] = {
        {.producer = true},
        {.landing_slots = SHUTTLE_SLOTS, .landing_slot_bytes = SHUTTLE_SLOT_BYTES}};
    const uint8_t ticket[HANDOFF_TICKET] = {1};
    memset(&w, 0, sizeof w);
    w.trusted = true;
    lending_open(&w.lending);
    truth_put(&truth, kv_seq_views(cache[0].seq), 0, 0, N_TOKENS);
    memset(kv_pool_memory(cache[1].pool), 0xDD, (size_t)kv_pool_bytes(cache[1].pool));
    for (int i = 0; i < 2; i++) {
        struct transport *t;
        pipe_open(&t, &w.in[i]);
        t = landing ? shuttle_open(t, i == 0, &w.lending) : t;
        end_open_with(&w.end[i], t, &o[i]);
        w.end[i].watch = watch;
        w.end[i].answer = RIG_WAIT;
        w.queue[i] = queues[i];
    }
    if (pull)
        test_ok(handoff_claim(w.end[1].conn, 0, ticket, &e), &e);
}

static void world_close(void)
{
    for (int i = 0; i < 2; i++) {
        end_close(&w.end[i]);
        transport_close(w.in[i]);
    }
    lending_close(&w.lending);
}

/* ---- acts ----------------------------------------------------------------------------------- */

/* What end i has written, as far as there is room. A crash leaves it to the stream. */
static size_t collect(int i, size_t limit)
{
    size_t all = 0;
    while (w.in[i] && w.n[i] < limit) {
        size_t moved = 0;
        if (transport_recv(w.in[i], w.queue[i] + w.n[i], limit - w.n[i], &moved, NULL)) {
            w.over[i] = true;
            break;
        }
        if (moved == 0)
            break;
        w.n[i] += moved;
        all += moved;
    }
    if (w.gone[1 - i])
        w.n[i] = 0; /* nobody there */
    return all;
}

static void hang_up(int i)
{
    transport_close(w.in[i]);
    w.in[i] = NULL;
}

/* Up to `limit` bytes arrive, and the end works. false: nothing happened. */
static bool work(int i, size_t limit)
{
    int from = 1 - i;
    size_t moved = 0, n = w.n[from] < limit ? w.n[from] : limit;
    uint64_t seen = (uint64_t)w.end[i].rc;
    if (w.gone[i])
        return false;
    if (w.end[i].rc) { /* dead: what it said last is still on its way */
        bool over = w.over[i];
        return collect(i, PIPE) > 0 || over != w.over[i];
    }
    if (n && w.in[i]) {
        struct iovec iov = {w.queue[from], n};
        transport_send(w.in[i], &iov, 1, &moved, NULL);
        memmove(w.queue[from], w.queue[from] + moved, w.n[from] - moved);
        w.n[from] -= moved;
    }
    bool ended = w.over[from] && w.n[from] == 0 && w.in[i];
    int before = w.end[i].offers[0] + w.end[i].reserves[0] + w.end[i].commits[0] +
                 w.end[i].ends[0] + w.end[i].claims[0];
    end_step(&w.end[i]);
    size_t given = collect(i, PIPE);
    if (ended) { /* only now: the end may have something to say, and what arrived is read first */
        hang_up(i);
        end_step(&w.end[i]);
    }
    int after = w.end[i].offers[0] + w.end[i].reserves[0] + w.end[i].commits[0] + w.end[i].ends[0] +
                w.end[i].claims[0];
    w.history[i] = moved || given || ended || before != after || seen != (uint64_t)w.end[i].rc
                       ? mix(mix(mix(w.history[i], 1), moved), given + ended)
                       : w.history[i];
    return moved || given || ended || before != after || seen != (uint64_t)w.end[i].rc;
}

static void leave(int i, bool crash)
{
    if (!crash) {
        handoff_conn_close(w.end[i].conn);
        w.end[i].conn = NULL;
        assert_int_equal(w.end[i].ends[0],
                         i == 0 ? w.offers || w.end[0].claims[0] : pull || w.end[1].offers[0]);
    }
    collect(i, QUEUE);
    w.over[i] = w.gone[i] = true;
    w.n[1 - i] = 0;
    hang_up(i);
}

static const int32_t ids[N_TOKENS] = {1, 2};
static const struct handoff_commit last_words = {.argmax = 1, .margin = 1};

static void offer(void)
{
    struct baton_error e;
    struct handoff_offer o;
    offer_fill(&o, 0, &truth.g, ids, N_TOKENS, true);
    int rc = handoff_offer(w.end[0].conn, &o, &e);
    assert_true(rc == 0 || w.end[0].rc || w.offers || w.end[0].ends[0]);
    w.offers += rc == 0;
}

static void commit(void)
{
    struct baton_error e;
    int first = w.commits == 0 && !w.end[0].ends[0];
    int rc = handoff_layer(w.end[0].conn, 0, 0, kv_seq_views(cache[0].seq), 0, N_TOKENS, &e);
    assert_int_equal(rc == 0, first);
    w.commits += first;
    rc = handoff_commit(w.end[0].conn, 0, &last_words, &e);
    assert_int_equal(rc == 0, first);
}

static void reserve(void)
{
    struct baton_error e;
    int first = w.reserves++ == 0 && !w.end[1].ends[0];
    int rc = handoff_reserve(w.end[1].conn, 0, kv_seq_views(cache[1].seq), 0, false, &e);
    assert_int_equal(rc == 0, first);
}

static bool spoil(int from, bool twice)
{
    if (w.n[from] == 0 || 2 * w.n[from] > QUEUE)
        return false;
    w.trusted = false;
    if (twice) {
        memcpy(w.queue[from] + w.n[from], w.queue[from], w.n[from]);
        w.n[from] *= 2;
    } else {
        w.queue[from][w.n[from] - 1] ^= 1;
    }
    return true;
}

/* An owner's call: part of its end's history. */
static bool told(int i, unsigned act)
{
    w.history[i] = mix(mix(w.history[i], 2), act);
    return true;
}

static bool owner_may(int i)
{
    return !w.gone[i] && !w.end[i].rc;
}

static bool do_owner(enum act a)
{
    static const struct baton_error why = {BATON_ERR_BUSY, "no"};
    struct end *p = &w.end[0], *c = &w.end[1];
    bool at_p = owner_may(0), at_c = owner_may(1);
    if (a == P_COMMIT && at_p && w.offers && w.calls++ < 2) {
        w.troubles += w.calls > 1;
        commit();
        return told(0, a);
    }
    if (a == P_ANSWER && at_p && !w.offers && (!pull || (p->claims[0] && !p->ends[0]))) {
        offer();
        return told(0, a);
    }
    if (a == C_RESERVE && at_c && c->offers[0] && w.reserves < 2) {
        w.troubles += w.reserves > 0;
        reserve();
        return told(1, a);
    }
    if (a == C_REFUSE && at_c && c->offers[0] && !w.reserves && !c->ends[0]) {
        w.reserves = 2;
        handoff_refuse(c->conn, 0, &why, NULL);
        return told(1, a);
    }
    if ((a == P_ABORT && at_p && w.offers) ||
        (a == P_DENY && at_p && pull && !w.offers && p->claims[0] && !p->ends[0])) {
        handoff_abort(p->conn, 0, &why);
        return told(0, a);
    }
    if (a == C_ABORT && at_c && (pull || c->offers[0])) {
        handoff_abort(c->conn, 0, &why);
        return told(1, a);
    }
    return false;
}

static bool do_trouble(enum act a)
{
    if (a == SCRIBBLE) {
        if (w.lending.data)
            lending_scribble(&w.lending);
        return w.lending.data;
    }
    if (a == CUT) {
        if (!w.in[0] && !w.in[1])
            return false;
        for (int i = 0; i < 2; i++) {
            w.n[i] = 0;
            w.over[i] = true;
            hang_up(i);
            told(i, a);
        }
        return true;
    }
    if (a == P_CRASH || a == C_CRASH || a == P_CLOSE || a == C_CLOSE) {
        int i = a == C_CRASH || a == C_CLOSE;
        if (!owner_may(i))
            return false;
        leave(i, a == P_CRASH || a == C_CRASH);
        told(1 - i, a);
        return told(i, a);
    }
    int from = a == TO_P_TWICE || a == TO_P_DAMAGED;
    if (!spoil(from, a == TO_P_TWICE || a == TO_C_TWICE))
        return false;
    return told(1 - from, a);
}

/* false: do_act would say so too. */
static bool may_act(enum act a, int troubles)
{
    const struct end *p = &w.end[0], *c = &w.end[1];
    bool again = (a == P_COMMIT && w.calls) || (a == C_RESERVE && w.reserves);
    if ((a >= TROUBLE || a == P_PART || a == C_PART || again) && w.troubles >= troubles)
        return false;
    if (a == P_ALL || a == C_ALL)
        return !w.gone[a == C_ALL];
    if (a == P_PART || a == C_PART)
        return !w.gone[a == C_PART] && w.n[a == P_PART] > 1;
    if (a == P_COMMIT || a == P_ABORT)
        return w.offers && owner_may(0) && (a == P_ABORT || w.calls < 2);
    if (a == P_ANSWER || a == P_DENY)
        return !w.offers && owner_may(0) && (!pull || p->claims[0]);
    if (a == C_RESERVE || a == C_REFUSE)
        return c->offers[0] && owner_may(1) && w.reserves < 2;
    if (a == TO_P_TWICE || a == TO_P_DAMAGED)
        return w.n[1] > 0;
    if (a == TO_C_TWICE || a == TO_C_DAMAGED)
        return w.n[0] > 0;
    if (a == SCRIBBLE)
        return w.lending.data;
    return true;
}

/* false: not possible here, or nothing happens. */
static bool do_act(enum act a)
{
    bool done;
    if (a == P_ALL || a == C_ALL)
        return work(a == C_ALL, SIZE_MAX);
    if (a == P_PART || a == C_PART) {
        size_t n = w.n[a == P_PART];
        return n > 1 && ++w.troubles && work(a == C_PART, n / 2);
    }
    if (a < TROUBLE)
        return do_owner(a);
    done = a <= C_REFUSE ? do_owner(a) : do_trouble(a);
    w.troubles += done;
    return done;
}

/* ---- what must hold ------------------------------------------------------------------------- */

/* After every act, so that the observer misses none. */
static void observe(void)
{
    lending_look(&w.lending);
    if (w.lending.fault && w.trusted)
        broken(w.lending.fault);
}

static void check(void)
{
    struct end *p = &w.end[0], *c = &w.end[1];
    holds(p->ends[0] <= 1 && c->ends[0] <= 1 && c->commits[0] <= 1 && c->offers[0] <= 1);
    if (p->ends[0] && p->why[0].code == 0)
        holds(c->commits[0] == (int)(1));
    if (c->ends[0] && c->why[0].code == 0)
        holds(c->commits[0] == (int)(1));
    if (c->ends[0]) /* nobody writes there any more */
        holds(pages_hash(&cache[1]) == w.kept);
    observe();
    for (int i = 0; i < 2; i++)
        holds(!w.end[i].rc || !w.end[i].conn || !w.end[i].conn->landing.memory);
}

/* What two ends that are still connected do next is a request like any other. */
static void again(void)
{
    struct baton_error e;
    struct handoff_offer o;
    struct handoff_conn *p = w.end[0].conn, *c = w.end[1].conn;
    bool reserved = false, moved = true;
    truth_put(&truth, kv_seq_views(cache[0].seq), 0, 0, N_TOKENS);
    memset(kv_pool_memory(cache[1].pool), 0xDD, (size_t)kv_pool_bytes(cache[1].pool));
    offer_fill(&o, 1, &truth.g, ids, N_TOKENS, true);
    test_ok(handoff_offer(p, &o, &e), &e);
    test_ok(handoff_layer(p, 1, 0, kv_seq_views(cache[0].seq), 0, N_TOKENS, &e), &e);
    test_ok(handoff_commit(p, 1, &last_words, &e), &e);
    w.commits++;
    for (int i = 0; i < 400 && moved; i++) {
        moved = !reserved && w.end[1].offers[1];
        if (moved)
            test_ok(handoff_reserve(c, 1, kv_seq_views(cache[1].seq), 0, false, &e), &e);
        reserved = reserved || moved;
        moved = work(0, SIZE_MAX) | work(1, SIZE_MAX) | moved;
        observe();
    }
    if (w.end[1].commits[1] != 1 || w.end[0].ends[1] != 1 || w.end[0].why[1].code)
        broken("the next request is delivered");
}

/* The rest without trouble: whoever has something to do does it. */
static void finish(void)
{
    bool moved = true;
    for (int i = 0; i < 400 && moved; i++) {
        moved = (w.offers == 0 && do_owner(P_ANSWER)) | (w.commits == 0 && do_owner(P_COMMIT)) |
                (w.reserves == 0 && do_owner(C_RESERVE));
        moved = work(0, SIZE_MAX) | work(1, SIZE_MAX) | moved;
        observe();
    }
    struct end *p = &w.end[0], *c = &w.end[1];
    check();
    bool p_knows = w.offers || p->claims[0], c_knows = pull || c->offers[0];
    if (!w.gone[0])
        holds(p->ends[0] == (int)(p_knows));
    if (!w.gone[1])
        holds(c->ends[0] == (int)(c_knows));
    if (w.troubles == 0)
        holds(c->commits[0] == 1 && p->why[0].code == 0 && !p->rc && !c->rc);
    if (w.trusted && !w.gone[0] && !w.gone[1] && w.in[0] && w.in[1]) {
        holds(!p->rc && !c->rc); /* nothing on an honest stream ends it */
        again();
    }
}

/* ---- the search ----------------------------------------------------------------------------- */

struct node {
    uint32_t parent;
    uint8_t act, depth;
};

static struct {
    struct node *nodes;
    size_t n, capacity;
    uint64_t *set; /* open addressing; 0 = free */
    size_t n_set, mask;
} found;

static bool set_add(uint64_t key)
{
    key += key == 0;
    if (2 * found.n_set >= found.mask) {
        size_t old = found.mask + 1;
        uint64_t *before = found.set;
        found.mask = 2 * old - 1;
        found.set = calloc(found.mask + 1, sizeof *found.set);
        found.n_set = 0;
        for (size_t i = 0; i < old; i++)
            if (before[i])
                set_add(before[i]);
        free(before);
    }
    size_t at = key & found.mask;
    for (; found.set[at]; at = (at + 1) & found.mask)
        if (found.set[at] == key)
            return false;
    found.set[at] = key;
    found.n_set++;
    return true;
}

static void node_add(uint32_t parent, enum act a, unsigned depth)
{
    if (found.n == found.capacity) {
        found.capacity = found.capacity ? 2 * found.capacity : 4096;
        found.nodes = realloc(found.nodes, found.capacity * sizeof *found.nodes);
    }
    found.nodes[found.n++] = (struct node){parent, (uint8_t)a, (uint8_t)depth};
}

static void replay(uint32_t node)
{
    uint8_t acts[MAX_DEPTH];
    unsigned n = 0;
    for (uint32_t i = node; i; i = found.nodes[i].parent)
        acts[n++] = found.nodes[i].act;
    world_open();
    while (n) {
        assert_true(do_act((enum act)acts[--n]));
        observe();
    }
}

static void describe(uint32_t node, unsigned act)
{
    unsigned n = found.nodes[node].depth;
    way[n] = (char)('a' + act);
    way[n + 1] = 0;
    for (uint32_t i = node; i; i = found.nodes[i].parent)
        way[--n] = (char)('a' + found.nodes[i].act);
}

static void explore(int troubles)
{
    unsigned deepest = 0;
    size_t runs = 0;
    found.mask = 1023;
    found.set = calloc(1024, sizeof *found.set);
    node_add(0, 0, 0);
    for (uint32_t i = 0; i < found.n; i++) {
        unsigned depth = found.nodes[i].depth;
        bool may[N_ACTS], fresh = true;
        replay(i);
        for (unsigned a = 0; a < N_ACTS; a++)
            may[a] = may_act((enum act)a, troubles);
        for (unsigned a = 0; a < N_ACTS; a++) {
            if (!may[a])
                continue;
            if (!fresh)
                replay(i);
            fresh = false;
            runs++;
            if (do_act((enum act)a)) {
                check();
                uint64_t key = mix(mix(w.history[0], w.history[1]), (uint64_t)w.troubles);
                key = mix(mix(key, pages_hash(&cache[1])), region_hash());
                if (set_add(key)) {
                    assert_true(depth + 1 < MAX_DEPTH);
                    node_add(i, (enum act)a, depth + 1);
                    deepest = depth + 1 > deepest ? depth + 1 : deepest;
                    describe(i, a);
                    finish();
                }
            }
            world_close();
        }
        if (fresh)
            world_close();
    }
    print_message("%s, %s, %d troubles: %zu states, %zu runs, ways of up to %u acts\n",
                  pull ? "pull" : "push", landing ? "landing" : "in the stream", troubles, found.n,
                  runs, deepest);
}

static bool explore_finds(int troubles)
{
    if (setjmp(found_it)) {
        world_close();
        return true;
    }
    explore(troubles);
    return false;
}

static void test_explore(void **state)
{
    struct baton_error e;
    const char *bound = getenv("BATON_EXPLORE");
    const struct kv_geometry g = {
        .n_layers = 1, .kv_heads = 1, .head_dim = 2, .dtype = BATON_BF16, .window = 0};
    truth_open(&truth, &g, N_TOKENS, &seed);
    for (int i = 0; i < 2; i++) {
        cache_open(&cache[i], &g, N_TOKENS, N_TOKENS);
        queues[i] = malloc(QUEUE);
    }
    test_ok(kv_seq_reserve(cache[0].seq, N_TOKENS, &e), &e);
    kv_seq_advance(cache[0].seq, N_TOKENS);
    cache_import(&cache[1], N_TOKENS);
    for (int variant = PLANT ? 2 : 0; variant < 4; variant++) {
        pull = variant % 2;
        landing = variant / 2;
        bool fault = explore_finds(bound ? atoi(bound) : 1);
        free(found.nodes);
        free(found.set);
        memset(&found, 0, sizeof found);
        assert_int_equal(fault, PLANT > 0);
        if (fault)
            break;
    }
    for (int i = 0; i < 2; i++) {
        cache_close(&cache[i]);
        free(queues[i]);
    }
    truth_close(&truth);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_explore)};
    seed = test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
