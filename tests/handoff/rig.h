/* SPDX-License-Identifier: Apache-2.0 */
/* Two ends of a handoff in one thread: caches with known contents, callbacks that keep count. */
#ifndef TESTS_HANDOFF_RIG_H
#define TESTS_HANDOFF_RIG_H

#include "../test.h"

#include <poll.h>

#include "base/base.h"
#include "handoff/handoff.h"
#include "transport/transport.h"

/* ---- caches --------------------------------------------------------------------------------- */

struct cache {
    struct kv_geometry g;
    struct kv_pool *pool;
    struct kv_seq *seq;
};

static inline size_t element_bytes(uint32_t dtype)
{
    return dtype == BATON_F32 ? 4 : 2;
}

/* What every slot of a prompt should hold: dense [kv_heads, n, head_dim], all positions. */
struct truth {
    struct kv_geometry g;
    uint32_t n;
    uint8_t *slot[2 * KV_MAX_LAYERS];
};

static inline void truth_open(struct truth *t, const struct kv_geometry *g, uint32_t n,
                              uint64_t *seed)
{
    t->g = *g;
    t->n = n;
    size_t bytes = kv_piece_bytes(g->dtype, g->kv_heads, g->head_dim, n);
    for (uint32_t s = 0; s < 2 * g->n_layers; s++) {
        t->slot[s] = malloc(bytes);
        assert_non_null(t->slot[s]);
        for (size_t i = 0; i < bytes; i++)
            t->slot[s][i] = (uint8_t)(test_random(seed) >> 32);
    }
}

static inline void truth_close(struct truth *t)
{
    for (uint32_t s = 0; s < 2 * t->g.n_layers; s++)
        free(t->slot[s]);
}

static inline struct baton_kv_view truth_view(const struct truth *t, uint32_t layer,
                                              struct baton_kv_layout *layout)
{
    return kv_dense_view(layout, t->g.dtype, t->g.kv_heads, t->g.head_dim, t->slot[2 * layer],
                         t->slot[2 * layer + 1], 0, t->n);
}

/* Put positions [first, end) of a layer of the truth into pages that are there. */
static inline void truth_put(const struct truth *t, const struct baton_kv_view *to, uint32_t layer,
                             uint32_t first, uint32_t end)
{
    struct baton_error e;
    struct baton_kv_layout layout;
    struct baton_kv_view from = truth_view(t, layer, &layout);
    if (first >= end)
        return;
    test_ok(kv_copy(to, &from, KV_K, first, end - first, &e), &e);
    test_ok(kv_copy(to, &from, KV_V, first, end - first, &e), &e);
}

static inline void cache_open(struct cache *c, const struct kv_geometry *g, uint32_t n,
                              uint32_t chunk)
{
    struct baton_error e;
    c->g = *g;
    test_ok(kv_pool_open(&c->pool, g, n + KV_BLOCK, 1, chunk, &e), &e);
    kv_pool_poison(c->pool);
    test_ok(kv_seq_open(c->pool, &c->seq, &e), &e);
}

static inline void cache_close(struct cache *c)
{
    kv_seq_close(c->seq);
    assert_int_equal(kv_pool_used(c->pool), 0);
    kv_pool_close(c->pool);
}

static inline uint32_t slot_first(const struct kv_geometry *g, uint32_t layer, uint32_t n,
                                  uint32_t held)
{
    uint32_t first = kv_retained_first(g, layer, n);
    return first > held ? first : held;
}

/* SHA-256 over the digests of [slot_first, n) as the pages hold it now. */
static inline void cache_digest(const struct cache *c, uint32_t n, uint32_t held, uint8_t out[32])
{
    struct baton_error e;
    struct base_sha256 sum;
    const struct baton_kv_view *v = kv_seq_views(c->seq);
    base_sha256_init(&sum);
    for (uint32_t s = 0; s < 2 * c->g.n_layers; s++) {
        struct kv_digest *d;
        uint8_t one[32];
        uint32_t first = slot_first(&c->g, s / 2, n, held);
        test_ok(kv_digest_open(&d, s / 2, s % 2, c->g.dtype, c->g.kv_heads, c->g.head_dim, first,
                               n - first, &e),
                &e);
        test_ok(kv_digest_update(d, &v[s / 2], first, n - first, &e), &e);
        test_ok(kv_digest_final(d, one, &e), &e);
        kv_digest_close(d);
        base_sha256_update(&sum, one, 32);
    }
    base_sha256_final(&sum, out);
}

/* Every position that is retained after n tokens equals the truth, bit by bit. */
static inline bool cache_equals(const struct cache *c, const struct truth *t)
{
    struct baton_error e;
    bool same = true;
    const struct baton_kv_view *v = kv_seq_views(c->seq);
    for (uint32_t l = 0; l < c->g.n_layers; l++) {
        uint32_t first = kv_retained_first(&c->g, l, t->n), n = t->n - first;
        size_t row = element_bytes(c->g.dtype) * c->g.head_dim;
        uint8_t *got = malloc(row * c->g.kv_heads * n);
        for (int kv = 0; kv < 2; kv++) {
            struct baton_kv_layout layout;
            struct baton_kv_view dense = kv_dense_view(&layout, c->g.dtype, c->g.kv_heads,
                                                       c->g.head_dim, got, got, first, n);
            memset(got, 0xA5, row * c->g.kv_heads * n);
            test_ok(kv_copy(&dense, &v[l], kv, first, n, &e), &e);
            for (uint32_t h = 0; h < c->g.kv_heads; h++)
                same = same &&
                       memcmp(got + h * n * row,
                              t->slot[2 * l + kv] + ((size_t)h * t->n + first) * row, n * row) == 0;
        }
        free(got);
    }
    return same;
}

/* ---- ends ----------------------------------------------------------------------------------- */

#define RIG_IDS 8

/* How the ends that are opened next authenticate: 0 not, 1 with a key, 2 payload too. */
static int rig_auth = 1;
static const uint8_t rig_key[32] = "thirty-two bytes, known to both.";

enum rig_answer { RIG_RESERVE, RIG_WAIT, RIG_REFUSE };

/* One end and what its callbacks saw, by request id modulo RIG_IDS. */
struct end {
    struct handoff_conn *conn;
    int rc; /* of the last step; != 0: dead */
    struct baton_error death;
    int offers[RIG_IDS], reserves[RIG_IDS], commits[RIG_IDS], ends[RIG_IDS];
    struct baton_error why[RIG_IDS];
    struct handoff_result result[RIG_IDS];
    struct handoff_offer offer[RIG_IDS]; /* without ids */
    uint64_t ids_sum[RIG_IDS];
    uint32_t held[RIG_IDS];
    bool wants[RIG_IDS];
    float *logits[RIG_IDS];
    /* consumer: what on_offer does */
    enum rig_answer answer;
    struct cache *into[RIG_IDS];
    uint32_t give_held[RIG_IDS];
    bool want_logits;
    bool abort_in_commit;
    /* producer */
    int claims[RIG_IDS];
    uint8_t ticket[RIG_IDS][HANDOFF_TICKET];        /* as CLAIM or OFFER brought it */
    void (*on_claim)(struct end *end, uint64_t id); /* NULL: the test answers later */
    /* told of every on_commit and on_end, after they were counted; may be NULL */
    void (*watch)(struct end *end, uint64_t id, bool commit);
};

static inline uint64_t ids_sum(const int32_t *ids, uint32_t n)
{
    uint64_t x = n;
    for (uint32_t i = 0; i < n; i++)
        x = x * 1099511628211u + (uint32_t)ids[i];
    return x;
}

static inline void end_reserve(struct end *end, uint64_t id)
{
    struct baton_error e;
    unsigned i = id % RIG_IDS;
    test_ok(handoff_reserve(end->conn, id, kv_seq_views(end->into[i]->seq), end->give_held[i],
                            end->want_logits, &e),
            &e);
}

static void rig_offer(void *ctx, const struct handoff_offer *o)
{
    struct end *end = ctx;
    struct baton_error e, why;
    unsigned i = o->request % RIG_IDS;
    end->offers[i]++;
    end->offer[i] = *o;
    end->offer[i].ids = NULL;
    end->ids_sum[i] = ids_sum(o->ids, o->n_ids);
    if (o->ticket)
        memcpy(end->ticket[i], o->ticket, HANDOFF_TICKET);
    if (end->into[i] && handoff_geometry_check(&end->into[i]->g, &o->geometry, &why)) {
        test_ok(handoff_refuse(end->conn, o->request, &why, &e), &e);
        return;
    }
    if (end->answer == RIG_RESERVE)
        end_reserve(end, o->request);
    base_fail(&why, BATON_ERR_BUSY, "no pages for request %d", (int)o->request);
    if (end->answer == RIG_REFUSE)
        test_ok(handoff_refuse(end->conn, o->request, &why, &e), &e);
}

static void rig_commit(void *ctx, uint64_t id, const struct handoff_result *r)
{
    struct end *end = ctx;
    unsigned i = id % RIG_IDS;
    assert_int_equal(end->ends[i], 0);
    end->commits[i]++;
    end->result[i] = *r;
    if (r->commit.logits) {
        free(end->logits[i]);
        end->logits[i] = malloc(r->commit.vocab * sizeof(float));
        memcpy(end->logits[i], r->commit.logits, r->commit.vocab * sizeof(float));
    }
    if (end->watch)
        end->watch(end, id, true);
    if (end->abort_in_commit)
        handoff_abort(end->conn, id, NULL);
}

static void rig_reserve(void *ctx, uint64_t id, uint32_t held, bool wants)
{
    struct end *end = ctx;
    unsigned i = id % RIG_IDS;
    end->reserves[i]++;
    end->held[i] = held;
    end->wants[i] = wants;
}

static void rig_end(void *ctx, uint64_t id, const struct baton_error *why)
{
    struct end *end = ctx;
    unsigned i = id % RIG_IDS;
    end->ends[i]++;
    end->why[i] = *why;
    if (end->watch)
        end->watch(end, id, false);
}

static void rig_claim(void *ctx, uint64_t id, const uint8_t *ticket)
{
    struct end *end = ctx;
    unsigned i = id % RIG_IDS;
    end->claims[i]++;
    memcpy(end->ticket[i], ticket, HANDOFF_TICKET);
    if (end->on_claim)
        end->on_claim(end, id);
}

static inline void end_open_with(struct end *end, struct transport *t,
                                 const struct handoff_options *o)
{
    struct baton_error e;
    const struct handoff_callbacks cb = {rig_offer, rig_commit, rig_reserve,
                                         rig_end,   .ctx = end, .on_claim = rig_claim};
    memset(end, 0, sizeof *end);
    struct handoff_options keyed = *o;
    keyed.key = rig_auth ? rig_key : NULL;
    keyed.key_bytes = sizeof rig_key;
    keyed.tag_payload = rig_auth == 2;
    test_ok(handoff_conn_open(t, &keyed, &cb, &end->conn, &e), &e);
}

static inline void end_open(struct end *end, struct transport *t, bool producer, uint64_t dead_ns)
{
    const struct handoff_options o = {.producer = producer, .dead_ns = dead_ns};
    end_open_with(end, t, &o);
}

/* Two ends of a Unix socket: the kind over which memory is lent. */
static inline void unix_pair(struct transport *t[2])
{
    struct baton_error e;
    int fds[2];
    test_ok(transport_socketpair(fds, &e), &e);
    test_ok(transport_fd_open(fds[0], &t[0], &e), &e);
    test_ok(transport_fd_open(fds[1], &t[1], &e), &e);
}

static inline void end_close(struct end *end)
{
    handoff_conn_close(end->conn);
    end->conn = NULL;
    for (int i = 0; i < RIG_IDS; i++)
        free(end->logits[i]);
}

static inline void end_step(struct end *end)
{
    struct baton_error e = {0};
    int rc = handoff_conn_step(end->conn, &e);
    if (end->rc)
        assert_int_equal(rc, end->rc); /* dead stays dead, with the same reason */
    if (rc && !end->rc)
        end->death = e;
    end->rc = rc;
}

/* Step both until neither has anything to do for some rounds. */
static inline void both_step(struct end *a, struct end *b, int rounds)
{
    for (int i = 0; i < rounds; i++) {
        end_step(a);
        end_step(b);
    }
}

#define both_until(a, b, condition)                                                                \
    do {                                                                                           \
        for (int spins_ = 0; !(condition); spins_++) {                                             \
            if (spins_ > 2000000)                                                                  \
                fail_msg("never: %s (%s | %s)", #condition, (a)->death.text, (b)->death.text);     \
            end_step(a);                                                                           \
            end_step(b);                                                                           \
        }                                                                                          \
    } while (0)

/* ---- cases ---------------------------------------------------------------------------------- */

static inline void geometry_small(struct kv_geometry *g)
{
    memset(g, 0, sizeof *g);
    g->n_layers = 2;
    g->kv_heads = 1;
    g->head_dim = 2;
    g->dtype = BATON_BF16;
    g->window = 3;
    g->local[1] = 1;
}

static inline void offer_fill(struct handoff_offer *o, uint64_t id, const struct kv_geometry *g,
                              const int32_t *ids, uint32_t n, bool digest)
{
    memset(o, 0, sizeof *o);
    o->request = id;
    memset(o->identity.arch, 1, 32);
    memset(o->identity.weights, 2, 32);
    memset(o->identity.numerics, 3, 32);
    memset(o->identity.tokenizer, 4, 32);
    o->geometry = *g;
    o->ids = ids;
    o->n_ids = n;
    o->max_new = 7;
    o->digest = digest;
}

static inline void queue_all(struct handoff_conn *c, uint64_t id, struct cache *from, uint32_t n)
{
    struct baton_error e;
    for (uint32_t l = 0; l < from->g.n_layers; l++)
        test_ok(handoff_layer(c, id, l, &kv_seq_views(from->seq)[l], 0, n, &e), &e);
}

/* A sequence that holds the whole truth: as after a prefill in one chunk. */
static inline void cache_prefill(struct cache *c, const struct truth *t)
{
    struct baton_error e;
    test_ok(kv_seq_reserve(c->seq, t->n, &e), &e);
    for (uint32_t l = 0; l < t->g.n_layers; l++)
        truth_put(t, &kv_seq_views(c->seq)[l], l, 0, t->n);
    kv_seq_advance(c->seq, t->n);
}

static inline void cache_import(struct cache *c, uint32_t n)
{
    struct baton_error e;
    test_ok(kv_seq_reserve_import(c->seq, n, &e), &e);
}

#endif
