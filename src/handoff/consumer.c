/* SPDX-License-Identifier: Apache-2.0 */
/* The consumer's half: offers, landing, and the proof before anything is delivered.
 *
 * A piece is copied, digested and converted into the lent pages, in one pass, as soon as it is
 * complete, so that import overlaps the transfer. The digest is of what was copied: the peer may
 * still write where a placed piece came from. Nothing is said to the owner before COMMIT and every
 * slot's count, positions and digest were found right. */
#include <stdlib.h>
#include <string.h>

#include "handoff/handoff_priv.h"

/* ---- offers and their answers --------------------------------------------------------------- */

int handoff_consumer_offer(struct handoff_conn *c, uint8_t *control, struct baton_error *e)
{
    struct handoff_offer o;
    struct handoff_request *r = NULL;
    struct baton_error why;
    const uint8_t *table;
    int rc = handoff_offer_read(control, c->in.control, &o, &table, e);
    if (rc)
        return rc;
    o.request = c->in.request;
    bool claimed = handoff_request_find(c, o.request);
    if (!claimed && c->n_requests >= HANDOFF_MAX_REQUESTS)
        return base_fail(e, BATON_ERR_PEER, "more than %u requests at a time",
                         HANDOFF_MAX_REQUESTS);
    rc = handoff_request_add(c, &o, &r, e);
    if (rc)
        return rc;
    handoff_request_note(c, r, "OFFER came");
    rc = handoff_offer_check_table(&o, table, &why);
    if (!rc && !c->cb.on_offer)
        rc = base_fail(&why, BATON_ERR_UNSUPPORTED, "nobody takes offers here");
    if (rc) {
        if (!claimed) /* the owner never heard of it, so on_end is not called */
            r->state = HANDOFF_ENDED;
        handoff_request_final(c, r, HANDOFF_REFUSE, HANDOFF_NO_SLOT, &why);
        return 0;
    }
    c->cb.on_offer(c->cb.ctx, &o);
    return 0;
}

/* The request that an answer is for, not answered yet. */
static int request_offered(struct handoff_conn *c, uint64_t id, struct handoff_request **out,
                           struct baton_error *e)
{
    if (c->producer)
        return base_fail(e, BATON_ERR_USAGE, "a producer answers no offers");
    *out = handoff_request_find(c, id);
    if (!*out || (*out)->state == HANDOFF_ENDED)
        return base_fail(e, BATON_ERR_CANCELLED, "request %llu is over", (unsigned long long)id);
    if ((*out)->state == HANDOFF_CLAIMED)
        return base_fail(e, BATON_ERR_USAGE, "request %llu was not offered yet",
                         (unsigned long long)id);
    if ((*out)->state != HANDOFF_OFFERED)
        return base_fail(e, BATON_ERR_USAGE, "request %llu was answered already",
                         (unsigned long long)id);
    return 0;
}

/* Room for every position that will land, in a shape that kv can convert into. */
static int views_take(struct handoff_request *r, const struct baton_kv_view *views, uint32_t held,
                      struct baton_error *e)
{
    const struct kv_geometry *g = &r->geometry;
    for (uint32_t l = 0; l < g->n_layers; l++) {
        const struct baton_kv_layout *lay = views[l].layout;
        uint32_t first = kv_retained_first(g, l, r->n_ids);
        if (first < held)
            first = held;
        if (lay->kv_heads != g->kv_heads || lay->head_dim != g->head_dim)
            return base_fail(e, BATON_ERR_USAGE,
                             "layer %u: pages of %u heads of %u for an offer "
                             "of %u of %u",
                             l, lay->kv_heads, lay->head_dim, g->kv_heads, g->head_dim);
        int rc = handoff_view_copy(&r->views[l], &views[l], first, r->n_ids, e);
        if (rc)
            return rc;
        const int32_t *blocks = r->views[l].blocks;
        uint32_t b = lay->block ? first / lay->block : 0;
        for (; blocks && b < r->views[l].view.n_blocks; b++)
            if (blocks[b] < 0)
                return base_fail(e, BATON_ERR_USAGE, "layer %u: no page for block %u", l, b);
    }
    return 0;
}

static void views_drop(struct handoff_request *r)
{
    for (uint32_t l = 0; r->views && l < r->geometry.n_layers; l++)
        handoff_view_free(&r->views[l]);
    free(r->views);
    r->views = NULL;
}

int handoff_reserve(struct handoff_conn *c, uint64_t request, const struct baton_kv_view *views,
                    uint32_t held, bool wants_logits, struct baton_error *e)
{
    struct handoff_request *r = NULL;
    int rc = request_offered(c, request, &r, e);
    if (rc)
        return rc;
    if (held >= r->n_ids)
        return base_fail(e, BATON_ERR_USAGE, "%u positions held of %u: the last one always travels",
                         held, r->n_ids);
    struct handoff_terms terms = {.held = held, .wants_logits = wants_logits};
    rc = handoff_landing_lend(c, handoff_leaf_bytes(&r->geometry), &terms, e);
    if (rc)
        return rc;
    struct handoff_out *f = handoff_out_new(HANDOFF_RESERVE, request, HANDOFF_RESERVE_BYTES, e);
    if (!f)
        return BATON_ERR_NOMEM;
    r->views = base_try_alloc(r->geometry.n_layers, sizeof *r->views, e);
    rc = r->views ? views_take(r, views, held, e) : BATON_ERR_NOMEM;
    if (rc) {
        views_drop(r);
        free(f);
        return rc;
    }
    handoff_reserve_write(f->control, &terms);
    handoff_out_push(c, f);
    handoff_request_start(r, held, wants_logits);
    handoff_request_note(c, r, "RESERVE");
    return 0;
}

int handoff_refuse(struct handoff_conn *c, uint64_t request, const struct baton_error *why,
                   struct baton_error *e)
{
    struct handoff_request *r = NULL;
    int rc = request_offered(c, request, &r, e);
    if (!rc)
        handoff_request_final(c, r, HANDOFF_REFUSE, HANDOFF_NO_SLOT, why);
    return rc;
}

/* ---- landing -------------------------------------------------------------------------------- */

/* The request fails because of this slot, at both ends; the connection goes on. */
static int nack(struct handoff_conn *c, struct handoff_request *r, uint32_t slot,
                const struct baton_error *why)
{
    handoff_request_final(c, r, HANDOFF_NACK, slot, why);
    return 0;
}

/* Is this the piece that its slot is waiting for? */
static int piece_check(const struct handoff_conn *c, const struct handoff_request *r,
                       const struct handoff_piece *p, struct baton_error *e)
{
    const struct kv_geometry *g = &r->geometry;
    if (p->layer >= g->n_layers || p->which > 1)
        return base_fail(e, BATON_ERR_INTEGRITY,
                         "piece of layer %u, slot kind %u: %u layers were "
                         "offered",
                         p->layer, p->which, g->n_layers);
    char kv = p->which ? 'V' : 'K';
    const struct handoff_slot *s = &r->slots[2 * p->layer + p->which];
    if (p->dtype != g->dtype)
        return base_fail(e, BATON_ERR_INTEGRITY, "layer %u %c: dtype %u, offered was %u", p->layer,
                         kv, p->dtype, g->dtype);
    if (p->first != s->next || p->count == 0 || p->count > r->n_ids - s->next)
        return base_fail(e, BATON_ERR_INTEGRITY,
                         "layer %u %c: %u positions from %u where [%u, %u) "
                         "is due",
                         p->layer, kv, p->count, p->first, s->next, r->n_ids);
    uint32_t end = p->first + p->count;
    if (end % KV_BLOCK && end != r->n_ids)
        return base_fail(e, BATON_ERR_INTEGRITY, "layer %u %c: piece ends inside a leaf, at %u",
                         p->layer, kv, end);
    size_t bytes = kv_piece_bytes(g->dtype, g->kv_heads, g->head_dim, p->count);
    if (c->in.payload != (p->placement ? 0 : bytes))
        return base_fail(e, BATON_ERR_INTEGRITY, "layer %u %c: %u bytes for %u positions%s",
                         p->layer, kv, c->in.payload, p->count,
                         p->placement ? " in the landing region" : "");
    if (!r->digest && !p->placement && !(c->in.flags & HANDOFF_FLAG_PAYLOAD))
        return base_fail(e, BATON_ERR_INTEGRITY, "layer %u %c: neither digest nor check covers it",
                         p->layer, kv);
    return 0;
}

/* From where it lies into the pages; what is wrong with it is told in *e. */
static int piece_land(struct handoff_conn *c, struct handoff_request *r,
                      const struct handoff_piece *p, uint8_t *payload, struct baton_error *e)
{
    const struct kv_geometry *g = &r->geometry;
    struct baton_kv_layout layout;
    uint64_t began_ns = base_now_ns();
    int rc = piece_check(c, r, p, e);
    size_t bytes = rc ? 0 : kv_piece_bytes(g->dtype, g->kv_heads, g->head_dim, p->count);
    if (!rc && p->placement)
        rc = handoff_landing_find(c, p, bytes, &payload, e);
    if (rc)
        return rc;
    struct baton_kv_view dense = kv_dense_view(&layout, g->dtype, g->kv_heads, g->head_dim, payload,
                                               payload, p->first, p->count);
    rc = handoff_request_move(r, 2 * p->layer + p->which, KV_DIGEST_COPY, &r->views[p->layer].view,
                              &dense, p->first, p->count, e);
    if (rc)
        return rc;
    r->import_ns = base_now_ns() - began_ns;
    r->last_byte_ns = c->last_in_ns;
    if (r->pieces++ == 0)
        r->first_byte_ns = c->in_began_ns;
    r->bytes += bytes;
    r->landed += p->placement ? bytes : 0;
    return 0;
}

static int take_layer(struct handoff_conn *c, struct handoff_request *r, const uint8_t *control,
                      uint8_t *payload, struct baton_error *e)
{
    struct handoff_piece p;
    struct baton_error why;
    int rc = handoff_piece_read(control, &p, e);
    if (rc)
        return rc;
    bool bad = piece_land(c, r, &p, payload, &why) != 0;
    handoff_landing_credit(c, &p);
    if (!bad) {
        handoff_piece_placed(c, r, &p, base_now_ns());
        return 0;
    }
    bool known = p.layer < r->geometry.n_layers && p.which < 2;
    return nack(c, r, known ? 2 * p.layer + p.which : HANDOFF_NO_SLOT, &why);
}

/* ---- commit --------------------------------------------------------------------------------- */

/* Every slot complete, at the positions that were agreed, with the digest that the producer saw.
 * *slot: the first that is not. */
static int slots_verify(const struct handoff_request *r, const uint8_t *table, uint32_t *slot,
                        struct baton_error *e)
{
    for (uint32_t s = 0; s < 2 * r->geometry.n_layers; s++, table += HANDOFF_COMMIT_SLOT_BYTES) {
        const struct handoff_slot *x = &r->slots[s];
        uint32_t first = handoff_get32(table), last = handoff_get32(table + 4);
        char kv = s % 2 ? 'V' : 'K';
        *slot = s;
        if (x->next != r->n_ids)
            return base_fail(e, BATON_ERR_INTEGRITY, "layer %u %c: positions [%u, %u) are missing",
                             s / 2, kv, x->next, r->n_ids);
        if (first != x->first || last != r->n_ids - 1)
            return base_fail(e, BATON_ERR_INTEGRITY,
                             "layer %u %c: committed are positions %u to "
                             "%u, %u to %u were due",
                             s / 2, kv, first, last, x->first, r->n_ids - 1);
        if (memcmp(table + 8, x->digest, 32))
            return base_fail(e, BATON_ERR_INTEGRITY, "layer %u %c: digest differs", s / 2, kv);
    }
    *slot = HANDOFF_NO_SLOT;
    return 0;
}

static int commit_verify(const struct handoff_request *r, const uint8_t *control, uint32_t *slot,
                         struct baton_error *e)
{
    const struct handoff_totals *t = &r->totals;
    uint8_t digest[32];
    *slot = HANDOFF_NO_SLOT;
    if (t->slots != 2 * r->geometry.n_layers)
        return base_fail(e, BATON_ERR_INTEGRITY, "COMMIT of %u slots, %u were offered", t->slots,
                         2 * r->geometry.n_layers);
    int rc = slots_verify(r, control + HANDOFF_COMMIT_BYTES, slot, e);
    if (rc)
        return rc;
    if (t->pieces != r->pieces || t->bytes != r->bytes)
        return base_fail(e, BATON_ERR_INTEGRITY, "COMMIT of %u pieces, %llu bytes; %u, %llu came",
                         t->pieces, (unsigned long long)t->bytes, r->pieces,
                         (unsigned long long)r->bytes);
    handoff_request_digest(r, digest);
    if (memcmp(digest, t->digest, 32))
        return base_fail(e, BATON_ERR_INTEGRITY, "digest over all slots differs");
    if (t->logits_follow != r->wants_logits)
        return base_fail(e, BATON_ERR_INTEGRITY, "COMMIT with%s a logits row, which was%s wanted",
                         t->logits_follow ? "" : "out", r->wants_logits ? "" : " not");
    return 0;
}

/* All is proven: deliver, then acknowledge. The owner may still abort while it is told. */
static int deliver(struct handoff_conn *c, struct handoff_request *r)
{
    static const struct baton_error good = {0, ""};
    struct handoff_result result = {.commit = r->commit,
                                    .slots = 2 * r->geometry.n_layers,
                                    .pieces = r->pieces,
                                    .bytes = r->bytes,
                                    .landed_bytes = r->landed,
                                    .first_byte_ns = r->first_byte_ns,
                                    .last_byte_ns = r->last_byte_ns,
                                    .import_ns = r->import_ns,
                                    .verify_ns = r->verify_ns,
                                    .digested = r->digest};
    memcpy(result.digest, r->totals.digest, 32);
    handoff_request_note(c, r, "verified");
    if (c->cb.on_commit)
        c->cb.on_commit(c->cb.ctx, r->id, &result);
    if (r->state != HANDOFF_ENDED)
        handoff_request_final(c, r, HANDOFF_ACK, HANDOFF_NO_SLOT, &good);
    return 0;
}

static int take_commit(struct handoff_conn *c, struct handoff_request *r, const uint8_t *control,
                       struct baton_error *e)
{
    struct baton_error why;
    uint64_t t0 = base_now_ns();
    uint32_t slot;
    int rc = handoff_commit_read(control, c->in.control, &r->commit, &r->totals, e);
    if (rc)
        return rc;
    if (commit_verify(r, control, &slot, &why))
        return nack(c, r, slot, &why);
    if (r->totals.logits_follow) {
        r->logits = base_try_alloc(r->commit.vocab, sizeof *r->logits, &why);
        if (!r->logits)
            return nack(c, r, HANDOFF_NO_SLOT, &why);
        r->commit.logits = r->logits;
    }
    r->state = HANDOFF_COMMITTED;
    r->verify_ns = base_now_ns() - t0;
    return r->totals.logits_follow ? 0 : deliver(c, r);
}

static int take_logits(struct handoff_conn *c, struct handoff_request *r, const uint8_t *control,
                       const uint8_t *payload, struct baton_error *e)
{
    struct baton_error why;
    uint32_t first = handoff_get32(control), count = handoff_get32(control + 4);
    if (handoff_get64(control + 8))
        return base_fail(e, BATON_ERR_PEER, "LOGITS with fields that version 1 does not have");
    if (first != r->logits_done || count == 0 || count > r->commit.vocab - first ||
        c->in.payload != count * 4 || (!r->digest && !(c->in.flags & HANDOFF_FLAG_PAYLOAD))) {
        base_fail(&why, BATON_ERR_INTEGRITY, "logits row: %u from %u in %u bytes, %u of %u are due",
                  count, first, c->in.payload, r->logits_done, r->commit.vocab);
        return nack(c, r, HANDOFF_NO_SLOT, &why);
    }
    memcpy(r->logits + first, payload, c->in.payload);
    r->logits_done += count;
    if (r->logits_done < r->commit.vocab)
        return 0;
    uint8_t digest[32] = {0};
    uint64_t t0 = base_now_ns();
    if (r->digest)
        base_sha256(r->logits, (size_t)r->commit.vocab * 4, digest);
    r->verify_ns += base_now_ns() - t0;
    if (memcmp(digest, r->totals.logits_digest, 32)) {
        base_fail(&why, BATON_ERR_INTEGRITY, "logits row: digest differs");
        return nack(c, r, HANDOFF_NO_SLOT, &why);
    }
    return deliver(c, r);
}

int handoff_consumer_take(struct handoff_conn *c, struct handoff_request *r, const uint8_t *control,
                          uint8_t *payload, struct baton_error *e)
{
    unsigned type = c->in.type;
    if (type == HANDOFF_LAYER && r->state == HANDOFF_RESERVED)
        return take_layer(c, r, control, payload, e);
    if (type == HANDOFF_COMMIT && r->state == HANDOFF_RESERVED)
        return take_commit(c, r, control, e);
    if (type == HANDOFF_LOGITS && r->state == HANDOFF_COMMITTED)
        return take_logits(c, r, control, payload, e);
    return base_fail(e, BATON_ERR_PEER, "%s for request %llu, which is %s", handoff_type_name(type),
                     (unsigned long long)r->id,
                     r->state == HANDOFF_CLAIMED    ? "claimed and not offered yet"
                     : r->state == HANDOFF_OFFERED  ? "not answered yet"
                     : r->state == HANDOFF_RESERVED ? "not committed yet"
                                                    : "committed already");
}
