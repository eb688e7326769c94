/* SPDX-License-Identifier: Apache-2.0 */
/* The producer's half: offers, queued layers cut into pieces, COMMIT, the logits row.
 *
 * Pages are read when a piece's turn comes and the frame before it has left: there is one piece
 * under way a connection, or as many as the landing region has slots, and a slow consumer holds
 * back the next one. Requests take turns. */
#include <stdlib.h>
#include <string.h>

#include "handoff/handoff_priv.h"

#define OFFERS_BYTES (16u << 20) /* of OFFERs that may wait to be written */

/* ---- offer ---------------------------------------------------------------------------------- */

static int offer_check(struct handoff_conn *c, const struct handoff_offer *o, struct baton_error *e)
{
    if (c->death.code)
        return base_fail(e, c->death.code, "%s", c->death.text);
    if (!c->producer)
        return base_fail(e, BATON_ERR_USAGE, "a consumer offers nothing");
    if (o->n_ids == 0 || o->n_ids > HANDOFF_MAX_IDS)
        return base_fail(e, BATON_ERR_USAGE, "offer of %u token ids, 1 to %u are possible",
                         o->n_ids, HANDOFF_MAX_IDS);
    for (uint32_t i = 0; i < o->n_ids; i++)
        if (o->ids[i] < 0)
            return base_fail(e, BATON_ERR_USAGE, "offer with token id %d", o->ids[i]);
    int rc = handoff_geometry_limits(&o->geometry, BATON_ERR_USAGE, e);
    if (rc)
        return rc;
    const struct handoff_request *r = handoff_request_find(c, o->request);
    if (r && r->state != HANDOFF_CLAIMED)
        return base_fail(e, BATON_ERR_BUSY, "request %llu is open on this connection",
                         (unsigned long long)o->request);
    if ((!r && c->n_requests >= HANDOFF_MAX_REQUESTS) || c->out_bytes > OFFERS_BYTES)
        return base_fail(e, BATON_ERR_BUSY, "%u requests are open on this connection",
                         c->n_requests);
    return 0;
}

static int feeds_open(struct handoff_request *r, struct baton_error *e)
{
    uint32_t n = r->geometry.n_layers;
    r->feeds = base_try_alloc(n, sizeof *r->feeds, e);
    r->turn = base_try_alloc(n, sizeof *r->turn, e);
    if (!r->feeds || !r->turn)
        return BATON_ERR_NOMEM;
    for (uint32_t l = 0; l < n; l++) {
        r->feeds[l].tail = &r->feeds[l].jobs;
        r->feeds[l].queued = kv_retained_first(&r->geometry, l, r->n_ids);
    }
    return 0;
}

int handoff_offer(struct handoff_conn *c, const struct handoff_offer *o, struct baton_error *e)
{
    struct handoff_request *r = NULL;
    int rc = offer_check(c, o, e);
    if (rc)
        return rc;
    struct handoff_out *f = handoff_out_new(HANDOFF_OFFER, o->request, handoff_offer_bytes(o), e);
    if (!f)
        return BATON_ERR_NOMEM;
    rc = handoff_request_add(c, o, &r, e);
    if (!rc) {
        rc = feeds_open(r, e);
        if (rc)
            handoff_request_withdraw(c, r);
    }
    if (rc) {
        free(f);
        return rc;
    }
    handoff_offer_write(f->control, o);
    handoff_out_push(c, f);
    handoff_request_note(c, r, "OFFER");
    return 0;
}

/* The request that a call of the owner speaks of, still open at this end. */
static int request_open(struct handoff_conn *c, uint64_t id, struct handoff_request **out,
                        struct baton_error *e)
{
    if (!c->producer)
        return base_fail(e, BATON_ERR_USAGE, "a consumer sends no layers");
    *out = handoff_request_find(c, id);
    if (!*out || (*out)->state == HANDOFF_ENDED)
        return base_fail(e, BATON_ERR_CANCELLED, "request %llu is over", (unsigned long long)id);
    if ((*out)->state == HANDOFF_CLAIMED)
        return base_fail(e, BATON_ERR_USAGE, "request %llu was not offered yet",
                         (unsigned long long)id);
    if ((*out)->commit_queued)
        return base_fail(e, BATON_ERR_USAGE, "request %llu is committed already",
                         (unsigned long long)id);
    return 0;
}

/* ---- layers --------------------------------------------------------------------------------- */

/* Pieces end at leaf borders, so that a digest sees whole leaves: what is queued beyond the last
 * border waits for the rest of its leaf. */
static uint32_t feed_ready(const struct handoff_request *r, uint32_t layer)
{
    uint32_t queued = r->feeds[layer].queued;
    return queued == r->n_ids ? queued : queued & ~(KV_BLOCK - 1);
}

static void turn_push(struct handoff_request *r, uint32_t layer)
{
    if (r->feeds[layer].waiting)
        return;
    r->feeds[layer].waiting = true;
    r->turn[(r->turn_first + r->turn_n++) % r->geometry.n_layers] = layer;
}

static void turn_pop(struct handoff_request *r)
{
    r->feeds[r->turn[r->turn_first]].waiting = false;
    r->turn_first = (r->turn_first + 1) % r->geometry.n_layers;
    r->turn_n--;
}

static int job_add(struct handoff_feed *feed, const struct baton_kv_view *view, uint32_t first,
                   uint32_t end, struct baton_error *e)
{
    struct handoff_job *j = base_try_alloc(1, sizeof *j, e);
    if (!j)
        return BATON_ERR_NOMEM;
    int rc = handoff_view_copy(&j->view, view, first, end, e);
    if (rc) {
        free(j);
        return rc;
    }
    j->first = first;
    j->end = end;
    *feed->tail = j;
    feed->tail = &j->next;
    return 0;
}

static int view_check(const struct handoff_request *r, const struct baton_kv_view *view,
                      struct baton_error *e)
{
    const struct kv_geometry *g = &r->geometry;
    const struct baton_kv_layout *l = view->layout;
    if (l->kv_heads != g->kv_heads || l->head_dim != g->head_dim || l->dtype != g->dtype)
        return base_fail(e, BATON_ERR_USAGE,
                         "a view of %u heads of %u, dtype %u; offered were %u "
                         "of %u, dtype %u",
                         l->kv_heads, l->head_dim, l->dtype, g->kv_heads, g->head_dim, g->dtype);
    return 0;
}

int handoff_layer(struct handoff_conn *c, uint64_t request, uint32_t layer,
                  const struct baton_kv_view *view, uint32_t first, uint32_t n,
                  struct baton_error *e)
{
    struct handoff_request *r = NULL;
    int rc = request_open(c, request, &r, e);
    if (rc)
        return rc;
    if (layer >= r->geometry.n_layers || n == 0 || first > r->n_ids || n > r->n_ids - first)
        return base_fail(e, BATON_ERR_USAGE,
                         "layer %u, %u positions from %u: offered were %u "
                         "layers of %u",
                         layer, n, first, r->geometry.n_layers, r->n_ids);
    rc = view_check(r, view, e);
    if (rc)
        return rc;
    struct handoff_feed *feed = &r->feeds[layer];
    uint32_t end = first + n, due = feed->queued, least = due;
    if (r->state != HANDOFF_OFFERED && r->slots[2 * layer].first > least)
        least = r->slots[2 * layer].first; /* what the consumer holds may be left out */
    if (first > least)
        return base_fail(e, BATON_ERR_USAGE, "layer %u: positions from %u queued where %u is due",
                         layer, first, least);
    if (end <= due)
        /* Before the retained ones: nothing to send. Queued before: a mistake. */
        return end <= kv_retained_first(&r->geometry, layer, r->n_ids)
                   ? 0
                   : base_fail(e, BATON_ERR_USAGE, "layer %u: positions %u to %u queued twice",
                               layer, first, end - 1);
    if (first < due && due > kv_retained_first(&r->geometry, layer, r->n_ids))
        return base_fail(e, BATON_ERR_USAGE, "layer %u: position %u queued twice", layer, first);
    rc = job_add(feed, view, first > due ? first : due, end, e);
    if (rc)
        return rc;
    feed->queued = end;
    turn_push(r, layer);
    return 0;
}

int handoff_commit(struct handoff_conn *c, uint64_t request, const struct handoff_commit *m,
                   struct baton_error *e)
{
    struct handoff_request *r = NULL;
    int rc = request_open(c, request, &r, e);
    if (rc)
        return rc;
    for (uint32_t l = 0; l < r->geometry.n_layers; l++)
        if (r->feeds[l].queued != r->n_ids)
            return base_fail(e, BATON_ERR_USAGE,
                             "commit with layer %u queued up to position %u "
                             "of %u",
                             l, r->feeds[l].queued, r->n_ids);
    uint32_t vocab = m->logits ? m->vocab : 0;
    if (m->argmax < 0 || !(m->margin >= 0) || vocab > HANDOFF_MAX_VOCAB ||
        (m->logits && (uint32_t)m->argmax >= vocab))
        return base_fail(e, BATON_ERR_USAGE, "commit of argmax %d, margin %g, %u logits", m->argmax,
                         (double)m->margin, vocab);
    bool wanted = r->state == HANDOFF_OFFERED || r->wants_logits;
    if (r->state != HANDOFF_OFFERED && r->wants_logits && !m->logits)
        return base_fail(e, BATON_ERR_USAGE, "commit without the logits row that is wanted");
    if (wanted && m->logits) {
        r->logits = base_try_alloc(vocab, sizeof *r->logits, e);
        if (!r->logits)
            return BATON_ERR_NOMEM;
        memcpy(r->logits, m->logits, (size_t)vocab * sizeof *r->logits);
    }
    r->commit = *m;
    r->commit.vocab = vocab;
    r->commit.logits = r->logits;
    r->commit_queued = true;
    return 0;
}

/* ---- sending -------------------------------------------------------------------------------- */

/* The end of the piece that starts at `first`: a leaf border, or `ready`. */
static uint32_t piece_end(const struct handoff_conn *c, const struct handoff_request *r,
                          uint32_t first, uint32_t ready)
{
    const struct kv_geometry *g = &r->geometry;
    size_t row = kv_piece_bytes(g->dtype, g->kv_heads, g->head_dim, 1), aim = HANDOFF_PIECE;
    if (r->placed && c->landing.lent.slot_bytes < aim)
        aim = c->landing.lent.slot_bytes;
    uint32_t n = (uint32_t)(aim / row) & ~(KV_BLOCK - 1);
    uint64_t end = (uint64_t)(first & ~(KV_BLOCK - 1)) + (n ? n : KV_BLOCK);
    return end < ready ? (uint32_t)end : ready;
}

/* Bring [first, end) into the dense form. Digests are taken from the pages where one job has them
 * all, so that packing is under their protection too. */
static int piece_pack(struct handoff_request *r, uint32_t slot, const struct baton_kv_view *dense,
                      uint32_t first, uint32_t end, struct baton_error *e)
{
    for (const struct handoff_job *j = r->feeds[slot / 2].jobs; j && j->first < end; j = j->next) {
        uint32_t lo = j->first > first ? j->first : first, hi = j->end < end ? j->end : end;
        if (lo >= hi)
            continue;
        if (lo == first && hi == end)
            return handoff_request_move(r, slot, KV_DIGEST_SOURCE, dense, &j->view.view, first,
                                        end - first, e);
        int rc = kv_copy(dense, &j->view.view, (enum kv_which)(slot % 2), lo, hi - lo, e);
        if (rc)
            return rc;
    }
    return handoff_request_move(r, slot, KV_DIGEST_SOURCE, NULL, dense, first, end - first, e);
}

/* A piece that one job has whole, and of which nothing but its digest is computed, is sent from the
 * pages themselves. */
static bool piece_gather(struct handoff_conn *c, struct handoff_request *r, uint32_t slot,
                         uint32_t end, int *rc, struct baton_error *e)
{
    const struct handoff_job *j = r->feeds[slot / 2].jobs;
    uint32_t first = r->slots[slot].next;
    while (j && j->end <= first)
        j = j->next;
    if (r->placed || !r->digest || c->auth.level == HANDOFF_AUTH_PAYLOAD || !j || j->end < end ||
        !handoff_gather(c, &j->view.view, (enum kv_which)(slot % 2), first, end))
        return false;
    *rc = handoff_request_move(r, slot, KV_DIGEST_SOURCE, NULL, &j->view.view, first, end - first,
                               e);
    return true;
}

/* Jobs that both slots of the layer have left behind. */
static void feed_trim(struct handoff_request *r, uint32_t layer)
{
    struct handoff_feed *feed = &r->feeds[layer];
    uint32_t k = r->slots[2 * layer].next, v = r->slots[2 * layer + 1].next;
    uint32_t done = k < v ? k : v;
    while (feed->jobs && feed->jobs->end <= done) {
        struct handoff_job *j = feed->jobs;
        feed->jobs = j->next;
        if (!feed->jobs)
            feed->tail = &feed->jobs;
        handoff_view_free(&j->view);
        free(j);
    }
}

static int piece_stage(struct handoff_conn *c, struct handoff_request *r, uint32_t slot,
                       uint32_t end, struct handoff_out **out, struct baton_error *e)
{
    const struct kv_geometry *g = &r->geometry;
    uint32_t first = r->slots[slot].next;
    size_t bytes = kv_piece_bytes(g->dtype, g->kv_heads, g->head_dim, end - first);
    struct handoff_piece piece = {slot / 2, slot % 2, first, end - first, g->dtype, 0, 0};
    struct baton_kv_layout layout;
    c->stage_began_ns = base_now_ns();
    int rc = r->placed ? 0 : handoff_buffer_fit(&c->stage, bytes, e);
    if (rc)
        return rc;
    struct handoff_out *f = handoff_out_new(HANDOFF_LAYER, r->id, HANDOFF_LAYER_BYTES, e);
    if (!f)
        return BATON_ERR_NOMEM;
    uint8_t *to = r->placed ? handoff_landing_claim(c, &piece) : c->stage.data;
    struct baton_kv_view dense = kv_dense_view(&layout, g->dtype, g->kv_heads, g->head_dim, to, to,
                                               first, end - first);
    bool gathered = piece_gather(c, r, slot, end, &rc, e);
    if (!gathered)
        rc = piece_pack(r, slot, &dense, first, end, e);
    if (rc) {
        handoff_landing_unclaim(c, &piece);
        free(f);
        return rc;
    }
    handoff_piece_write(f->control, &piece);
    if (r->placed) {
        f->landed = (uint32_t)bytes;
    } else {
        f->payload = gathered ? NULL : to;
        f->header.payload = (uint32_t)bytes;
        f->header.flags = r->digest ? 0 : HANDOFF_FLAG_PAYLOAD;
    }
    c->staged_ns = base_now_ns();
    r->pieces++;
    r->bytes += bytes;
    *out = f;
    return 0;
}

/* K, then V, of the layer whose turn it is. */
static int next_piece(struct handoff_conn *c, struct handoff_request *r, struct handoff_out **out,
                      struct baton_error *e)
{
    while (r->turn_n) {
        uint32_t layer = r->turn[r->turn_first], ready = feed_ready(r, layer);
        feed_trim(r, layer);
        for (uint32_t slot = 2 * layer; slot < 2 * layer + 2; slot++)
            if (r->slots[slot].next < ready)
                return piece_stage(c, r, slot, piece_end(c, r, r->slots[slot].next, ready), out, e);
        turn_pop(r);
    }
    return 0;
}

static int send_commit(struct handoff_conn *c, struct handoff_request *r, struct baton_error *e)
{
    uint32_t slots = 2 * r->geometry.n_layers;
    struct handoff_out *f = handoff_out_new(
        HANDOFF_COMMIT, r->id, HANDOFF_COMMIT_BYTES + (size_t)slots * HANDOFF_COMMIT_SLOT_BYTES, e);
    if (!f)
        return BATON_ERR_NOMEM;
    struct handoff_totals t = {
        .slots = slots, .pieces = r->pieces, .bytes = r->bytes, .logits_follow = r->wants_logits};
    handoff_request_digest(r, t.digest);
    if (r->wants_logits && r->digest)
        base_sha256(r->logits, (size_t)r->commit.vocab * 4, t.logits_digest);
    handoff_commit_write(f->control, &r->commit, &t);
    uint8_t *p = f->control + HANDOFF_COMMIT_BYTES;
    for (uint32_t s = 0; s < slots; s++, p += HANDOFF_COMMIT_SLOT_BYTES) {
        handoff_put32(p, r->slots[s].first);
        handoff_put32(p + 4, r->n_ids - 1);
        memcpy(p + 8, r->slots[s].digest, 32);
    }
    handoff_out_push(c, f);
    r->state = HANDOFF_COMMITTED;
    handoff_request_note(c, r, "all slots sent, COMMIT");
    return 0;
}

/* Staged like pieces: an abort frees the row while its frame may be half written. */
static int next_logits(struct handoff_conn *c, struct handoff_request *r, struct handoff_out **out,
                       struct baton_error *e)
{
    uint32_t n = r->commit.vocab - r->logits_done;
    if (n > HANDOFF_MAX_LOGITS / 4)
        n = HANDOFF_MAX_LOGITS / 4;
    int rc = handoff_buffer_fit(&c->stage, (size_t)n * 4, e);
    if (rc)
        return rc;
    struct handoff_out *f = handoff_out_new(HANDOFF_LOGITS, r->id, HANDOFF_LOGITS_BYTES, e);
    if (!f)
        return BATON_ERR_NOMEM;
    handoff_put32(f->control, r->logits_done);
    handoff_put32(f->control + 4, n);
    memcpy(c->stage.data, r->logits + r->logits_done, (size_t)n * 4);
    f->payload = c->stage.data;
    f->header.payload = n * 4;
    f->header.flags = r->digest ? 0 : HANDOFF_FLAG_PAYLOAD;
    r->logits_done += n;
    *out = f;
    return 0;
}

static bool request_ready(const struct handoff_conn *c, const struct handoff_request *r)
{
    if (r->state == HANDOFF_COMMITTED)
        return r->wants_logits && r->logits_done < r->commit.vocab;
    if (r->placed && r->turn_n && !handoff_landing_free(c))
        return false; /* until CREDIT */
    return r->state == HANDOFF_RESERVED && (r->turn_n || r->commit_queued);
}

bool handoff_producer_ready(const struct handoff_conn *c)
{
    if (!c->producer)
        return false;
    for (const struct handoff_request *r = c->requests; r; r = r->next)
        if (request_ready(c, r))
            return true;
    return false;
}

/* A frame with payload of this request, or COMMIT queued, or nothing. */
static int request_next(struct handoff_conn *c, struct handoff_request *r, struct handoff_out **out,
                        struct baton_error *e)
{
    if (r->state == HANDOFF_COMMITTED)
        return next_logits(c, r, out, e);
    int rc = next_piece(c, r, out, e);
    if (rc || *out || !r->commit_queued)
        return rc;
    return send_commit(c, r, e);
}

/* Behind all others: the next request's turn. */
static void rotate(struct handoff_conn *c, struct handoff_request *r)
{
    struct handoff_request **p = &c->requests;
    while (*p != r)
        p = &(*p)->next;
    *p = r->next;
    while (*p)
        p = &(*p)->next;
    *p = r;
    r->next = NULL;
}

struct handoff_out *handoff_producer_next(struct handoff_conn *c)
{
    struct handoff_out *f = NULL;
    while (c->producer && !f && !c->out_first) { /* COMMIT is queued, not returned */
        struct handoff_request *r = c->requests;
        while (r && !request_ready(c, r))
            r = r->next;
        if (!r)
            return NULL;
        struct baton_error e = {0};
        rotate(c, r);
        if (request_next(c, r, &f, &e))
            handoff_request_final(c, r, HANDOFF_ABORT, HANDOFF_NO_SLOT, &e);
    }
    return f;
}

/* ---- answers -------------------------------------------------------------------------------- */

static int take_reserve(struct handoff_conn *c, struct handoff_request *r, const uint8_t *control,
                        struct baton_error *e)
{
    struct handoff_terms x;
    int rc = handoff_reserve_read(control, &x, e);
    if (rc)
        return rc;
    if (r->state != HANDOFF_OFFERED || x.held >= r->n_ids)
        return base_fail(e, BATON_ERR_PEER, "RESERVE of request %llu with %u positions held of %u",
                         (unsigned long long)r->id, x.held, r->n_ids);
    rc = handoff_landing_take_terms(c, &x, handoff_leaf_bytes(&r->geometry), &r->placed, e);
    if (rc)
        return rc;
    handoff_request_start(r, x.held, x.wants_logits);
    handoff_request_note(c, r, "RESERVE came");
    if (r->commit_queued && x.wants_logits && !r->logits) {
        struct baton_error why;
        base_fail(&why, BATON_ERR_USAGE, "commit without the logits row that is wanted");
        handoff_request_final(c, r, HANDOFF_ABORT, HANDOFF_NO_SLOT, &why);
        return 0;
    }
    if (c->cb.on_reserve)
        c->cb.on_reserve(c->cb.ctx, r->id, x.held, x.wants_logits);
    return 0;
}

static int take_ack(struct handoff_conn *c, struct handoff_request *r, const uint8_t *control,
                    struct baton_error *e)
{
    static const struct baton_error good = {0, ""};
    uint8_t mine[32];
    if (r->state != HANDOFF_COMMITTED || request_ready(c, r) || handoff_out_pending(c, r->id))
        return base_fail(e, BATON_ERR_PEER, "ACK of request %llu before all was sent",
                         (unsigned long long)r->id);
    handoff_request_digest(r, mine);
    struct baton_error why = good;
    if (memcmp(mine, control, 32))
        base_fail(&why, BATON_ERR_INTEGRITY, "ACK of request %llu for another digest",
                  (unsigned long long)r->id);
    handoff_request_finished(c, r, &why);
    return 0;
}

int handoff_producer_take(struct handoff_conn *c, struct handoff_request *r, const uint8_t *control,
                          struct baton_error *e)
{
    struct baton_error why;
    switch (c->in.type) {
    case HANDOFF_RESERVE:
        return take_reserve(c, r, control, e);
    case HANDOFF_ACK:
        return take_ack(c, r, control, e);
    case HANDOFF_REFUSE:
        if (r->state != HANDOFF_OFFERED)
            return base_fail(e, BATON_ERR_PEER, "REFUSE of request %llu after RESERVE",
                             (unsigned long long)r->id);
        handoff_reason_read(control, &why);
        handoff_request_finished(c, r, &why);
        return 0;
    case HANDOFF_NACK:
        if (r->state < HANDOFF_RESERVED)
            return base_fail(e, BATON_ERR_PEER, "NACK of request %llu before RESERVE",
                             (unsigned long long)r->id);
        handoff_reason_read(control + 8, &why);
        handoff_request_finished(c, r, &why);
        return 0;
    default:
        return base_fail(e, BATON_ERR_PEER, "%s to a producer", handoff_type_name(c->in.type));
    }
}
