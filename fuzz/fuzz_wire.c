/* SPDX-License-Identifier: Apache-2.0 */
/* A connection of either role against a peer made of the input.
 *
 * The input is a list of steps: a frame from a template with some bytes overwritten and then sealed
 * (so that the checks do not end every run at the door), raw bytes, or an act of the owner.
 * Nothing may crash, every request that was told of ends exactly once, and a request is delivered
 * before its end or not at all. Where the connection has a key the peer has it too: behind the tags
 * everything must hold as it does without. Without a key it may be a Unix socket, over which the
 * consumer lends a landing region: then no descriptor may stay either. */
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "../tests/handoff/wire.h"
#include "handoff/handoff.h"
#include "transport/transport.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define IDS 4u
#define TOKENS 70u /* two leaves */
#define SLOTS 2u   /* of a landing region, */
#define SLOT 512u  /* each of so many bytes: a layer's K or V fits */

static const uint8_t secret[32] = "a secret that the peer has too.";

struct run {
    const uint8_t *in;
    size_t left;
    struct handoff_conn *conn;
    struct transport *peer;
    struct kv_seq *seq;
    struct kv_geometry g;
    struct wire w;
    int live[IDS], committed[IDS];
    bool claimed[8]; /* consumer: by id, until the offer or the end */
    uint8_t answer;  /* consumer: what on_offer does */
    bool digest, want_logits, producer;
    bool landing, lent; /* over a Unix socket; the peer, a consumer, said LANDING */
    int32_t ids[TOKENS];
};

static uint8_t take(struct run *r)
{
    if (r->left == 0)
        return 0;
    r->left--;
    return *r->in++;
}

/* One pool for all runs: opening one asks the system how much memory there is. */
static struct kv_pool *pool_of(const struct kv_geometry *g)
{
    static struct kv_pool *pool;
    if (!pool && kv_pool_open(&pool, g, TOKENS, 1, TOKENS, NULL))
        __builtin_trap();
    return pool;
}

static void require(bool holds)
{
    if (!holds)
        __builtin_trap();
}

/* ---- the owner ------------------------------------------------------------------------------ */

static void on_offer(void *ctx, const struct handoff_offer *o)
{
    struct run *r = ctx;
    const struct baton_error why = {BATON_ERR_MISMATCH, "no"};
    unsigned i = o->request % IDS;
    int64_t sum = 0;
    for (uint32_t k = 0; k < o->n_ids; k++)
        sum += o->ids[k];
    if (o->request < 8 && r->claimed[o->request])
        r->claimed[o->request] = false;
    else
        r->live[i]++;
    r->committed[i] = 0;
    bool fits = o->n_ids == TOKENS && !handoff_geometry_check(&r->g, &o->geometry, NULL);
    if (!fits || sum < 0 || r->answer == 2)
        handoff_refuse(r->conn, o->request, &why, NULL);
    else if (r->answer == 0)
        handoff_reserve(r->conn, o->request, kv_seq_views(r->seq), 0, r->want_logits, NULL);
}

static void on_commit(void *ctx, uint64_t id, const struct handoff_result *result)
{
    struct run *r = ctx;
    require(r->live[id % IDS] > 0 && result->slots == 4 && result->pieces >= 4);
    r->committed[id % IDS]++;
}

static void on_reserve(void *ctx, uint64_t id, uint32_t held, bool wants)
{
    struct run *r = ctx;
    require(r->live[id % IDS] > 0 && held < TOKENS);
}

static void on_end(void *ctx, uint64_t id, const struct baton_error *why)
{
    struct run *r = ctx;
    if (id < 8)
        r->claimed[id] = false;
    require(r->live[id % IDS] > 0 && memchr(why->text, 0, sizeof why->text));
    r->live[id % IDS]--;
}

static void on_claim(void *ctx, uint64_t id, const uint8_t *ticket)
{
    struct run *r = ctx;
    struct handoff_offer o = {
        .request = id, .geometry = r->g, .ids = r->ids, .n_ids = TOKENS, .digest = r->digest};
    r->live[id % IDS]++;
    if (r->answer || ticket[0] || handoff_offer(r->conn, &o, NULL))
        handoff_abort(r->conn, id, NULL);
}

static void owner_claim(struct run *r, uint64_t id)
{
    static const uint8_t ticket[HANDOFF_TICKET];
    if (handoff_claim(r->conn, id, ticket, NULL))
        return;
    r->claimed[id] = true;
    r->live[id % IDS]++;
}

static void owner_offer(struct run *r, uint64_t id)
{
    struct handoff_offer o = {
        .request = id, .geometry = r->g, .ids = r->ids, .n_ids = TOKENS, .digest = r->digest};
    if (handoff_offer(r->conn, &o, NULL) == 0)
        r->live[id % IDS]++;
}

static void owner_step(struct run *r)
{
    uint8_t what = take(r), id = take(r) % 8;
    static const float logits[3] = {1, 2, 3};
    const struct baton_kv_view *v = kv_seq_views(r->seq);
    const struct handoff_commit m = {
        .argmax = 1, .margin = 1, .vocab = 3, .logits = what & 8 ? logits : NULL};
    if (what % 5 == 0)
        handoff_abort(r->conn, id, NULL);
    else if (what % 5 == 1 && r->producer)
        owner_offer(r, id);
    else if (what % 5 == 1)
        owner_claim(r, id);
    else if (what % 5 == 2)
        handoff_reserve(r->conn, id, v, take(r) % TOKENS, r->want_logits, NULL);
    else if (what % 5 == 3)
        handoff_commit(r->conn, id, &m, NULL);
    else
        handoff_layer(r->conn, id, what & 8 ? 1 : 0, &v[what & 8 ? 1 : 0], take(r) % TOKENS,
                      take(r) % TOKENS + 1, NULL);
}

/* ---- the peer ------------------------------------------------------------------------------- */

/* `fd` goes with the first byte; -1 = none does. */
static void deliver(struct run *r, const uint8_t *p, size_t n, int fd)
{
    uint8_t sink[4096];
    for (size_t at = 0, moved = 0; at < n; at += moved) {
        struct iovec iov = {(void *)(p + at), n - at};
        moved = 0;
        if (fd >= 0 && at == 0 ? transport_send_fd(r->peer, &iov, 1, fd, &moved, NULL)
                               : transport_send(r->peer, &iov, 1, &moved, NULL))
            return;
        handoff_conn_step(r->conn, NULL);
        size_t got = 1;
        while (got && transport_recv(r->peer, sink, sizeof sink, &got, NULL) == 0)
            ;
        if (moved == 0)
            return;
    }
    handoff_conn_step(r->conn, NULL);
}

/* Bodies about the landing region. */
static void template_landing(struct run *r, uint8_t type, uint8_t *b)
{
    if (type == W_LANDING)
        w_u32(w_u32(w_u32(b, 1), SLOTS), SLOT);
    if (type == W_CREDIT)
        w_u32(w_u32(b, 1), take(r) & 3);
    if (type == W_RESERVE && r->lent)
        w_u32(w_u32(b + 16, SLOTS), 1);
    r->lent = r->lent || type == W_LANDING;
}

/* The body that a frame of this type has when all is well. */
static uint32_t template(struct run *r, uint8_t type, uint8_t *b, uint32_t *payload)
{
    static const uint32_t sizes[32] = {0,  96, 0,   256, 0, 96, 256, 32, 288,
                                       16, 32, 264, 256, 0, 96, 32,  16};
    uint8_t slot = 0;
    *payload = 0;
    if (r->landing)
        template_landing(r, type, b);
    if (type == W_OFFER)
        return wire_offer_body(b, TOKENS, r->digest);
    if (type == W_LAYER) {
        slot = take(r);
        uint32_t first = slot & 2 ? TOKENS - 2 : slot & 4 ? 64 : 0;
        uint32_t count = slot & 2 ? 2 : slot & 4 ? TOKENS - 64 : slot & 8 ? TOKENS : 64;
        wire_layer_body(b, slot >> 1 & 1, slot & 1, first, count);
        *payload = 4 * count;
        if (r->landing && slot & 16) { /* placed, in one of the slots or behind them */
            w_u64(w_u32(b + 20, 1), (uint64_t)SLOT * (slot >> 5 & 3));
            *payload = 0;
        }
    }
    if (type == W_LOGITS) {
        w_u32(b + 4, 3);
        *payload = 12;
    }
    if (type == W_COMMIT) {
        wire_commit_body(b, TOKENS);
        w_u32(w_u32(b + 4, r->want_logits), 1);
        w_u32(b + 44, r->want_logits ? 3 : 0);
    }
    return sizes[type & 31];
}

static void peer_frame(struct run *r)
{
    static const uint8_t zeros[4 * TOKENS];
    uint8_t b[600] = {0}, type = take(r) & 31, how = take(r);
    uint64_t id = how & 7;
    uint32_t payload, n = template(r, type, b, &payload);
    for (uint8_t edits = how >> 6; edits && n; edits--) {
        uint32_t at = (take(r) | (uint32_t)take(r) << 8) % n;
        b[at] = take(r);
    }
    if (how & 16)
        n = n > 4 ? n - 4 : n;
    r->w.n = 0;
    uint8_t *h = wire_frame(&r->w, type, type <= W_BYE ? 0 : id, b, n, zeros, payload,
                            payload && !(how & 8));
    if (how & 32) {
        h[4 + take(r) % 36] = take(r);
        wire_seal(h);
        if (r->w.tagged)
            wire_tag(&r->w, h, n, payload, h + 48 + n + payload);
    }
    struct transport_landing *lent = NULL;
    if (r->landing && type == W_LANDING && !(how & 8))
        require(!transport_landing_create(SLOTS * SLOT, &lent, NULL));
    deliver(r, r->w.data, r->w.n, lent ? transport_landing_fd(lent) : -1);
    transport_landing_close(lent);
}

static void peer_raw(struct run *r)
{
    size_t n = take(r);
    n = n < r->left ? n : r->left;
    deliver(r, r->in, n, -1);
    r->in += n;
    r->left -= n;
}

/* ---- a run ---------------------------------------------------------------------------------- */

/* HELLO; with a key, the peer derives the session key of its direction and proves it. */
static void greet(struct run *r, uint8_t mode)
{
    uint8_t theirs[144], mine[96] = {0};
    bool auth = mode & 64;
    size_t got = 0;
    handoff_conn_step(r->conn, NULL);
    require(!transport_recv(r->peer, theirs, sizeof theirs, &got, NULL) && got == sizeof theirs);
    w_u32(w_u32(w_u32(mine, 0x10001), r->producer ? 2 : 1), auth);
    w_u64(w_u64(mine + 16, 1000000000u), 10000000000u);
    wire_frame(&r->w, W_HELLO, 0, mine, sizeof mine, NULL, 0, false);
    if (auth) {
        wire_session_key(secret, sizeof secret, !r->producer, r->producer ? theirs + 48 : mine,
                         r->producer ? mine : theirs + 48, r->w.key);
        r->w.tagged = true;
        r->w.tag_payload = mode & 128;
        wire_frame(&r->w, W_HEARTBEAT, 0, NULL, 0, NULL, 0, false);
    }
    deliver(r, r->w.data, r->w.n, -1);
}

static void open_stream(struct run *r, struct transport **mine)
{
    int fds[2];
    if (!r->landing) {
        require(!transport_inproc_pair(1 << 14, mine, &r->peer, NULL));
        return;
    }
    require(!transport_socketpair(fds, NULL) && !transport_fd_open(fds[0], mine, NULL) &&
            !transport_fd_open(fds[1], &r->peer, NULL));
}

static void run_open(struct run *r, uint8_t mode)
{
    struct transport *mine;
    const struct handoff_options o = {.producer = mode & 1,
                                      .key = mode & 64 ? secret : NULL,
                                      .key_bytes = sizeof secret,
                                      .tag_payload = (mode & 192) == 192,
                                      .landing_slots = SLOTS,
                                      .landing_slot_bytes = SLOT};
    const struct handoff_callbacks cb = {on_offer, on_commit, on_reserve,
                                         on_end,   .ctx = r,  .on_claim = on_claim};
    r->producer = mode & 1;
    r->landing = (mode & 192) == 128;
    r->g = (struct kv_geometry){.n_layers = 2,
                                .kv_heads = 1,
                                .head_dim = 2,
                                .dtype = BATON_BF16,
                                .window = 3,
                                .local = {0, 1}};
    r->digest = mode & 2;
    r->want_logits = mode & 4;
    r->answer = mode >> 3 & 3;
    r->w.capacity = 1 << 12;
    r->w.data = malloc(r->w.capacity);
    open_stream(r, &mine);
    require(r->w.data && !kv_seq_open(pool_of(&r->g), &r->seq, NULL) &&
            !handoff_conn_open(mine, &o, &cb, &r->conn, NULL));
    if (mode & 1) {
        require(!kv_seq_reserve(r->seq, TOKENS, NULL));
        for (int l = 0; l < 2; l++) {
            struct baton_kv_layout layout;
            static uint8_t rows[4 * TOKENS];
            struct baton_kv_view from = kv_dense_view(&layout, BATON_BF16, 1, 2, rows, rows, 0,
                                                      TOKENS);
            kv_copy(&kv_seq_views(r->seq)[l], &from, KV_K, 0, TOKENS, NULL);
            kv_copy(&kv_seq_views(r->seq)[l], &from, KV_V, 0, TOKENS, NULL);
        }
        kv_seq_advance(r->seq, TOKENS);
    } else {
        require(!kv_seq_reserve_import(r->seq, TOKENS, NULL));
    }
    if (mode & 32)
        greet(r, mode);
}

/* The lowest descriptor that is free: another one after a run means that one stayed open. */
static int free_fd(void)
{
    int fd = dup(STDERR_FILENO);
    close(fd);
    return fd;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    int fd = free_fd();
    struct run r = {.in = data, .left = n};
    run_open(&r, take(&r));
    while (r.left) {
        uint8_t step = take(&r) & 7;
        if (step < 5)
            peer_frame(&r);
        else if (step < 7)
            owner_step(&r);
        else
            peer_raw(&r);
    }
    handoff_conn_close(r.conn);
    for (unsigned i = 0; i < IDS; i++)
        require(r.live[i] == 0);
    transport_close(r.peer);
    kv_seq_close(r.seq);
    require(kv_pool_used(pool_of(&r.g)) == 0 && free_fd() == fd);
    free(r.w.data);
    return 0;
}
