/* SPDX-License-Identifier: Apache-2.0 */
/* Requests of a connection: the table, slots and their digests, and how a request ends.
 *
 * Each end sends exactly one final frame per request (ACK, REFUSE and NACK from a consumer, ABORT
 * and CLOSE from both). An entry stays until both went over: what the peer sent before it knew is
 * then told apart from what it may not send, and the id is free again on both ends. */
#include <stdlib.h>
#include <string.h>

#include "handoff/handoff_priv.h"

struct handoff_request *handoff_request_find(struct handoff_conn *c, uint64_t id)
{
    struct handoff_request *r = c->requests;
    while (r && r->id != id)
        r = r->next;
    return r;
}

void handoff_request_note(const struct handoff_conn *c, const struct handoff_request *r,
                          const char *what)
{
    base_log(BASE_LOG_DEBUG, "handoff %s: request %llu: %s", c->producer ? "producer" : "consumer",
             (unsigned long long)r->id, what);
}

int handoff_request_open(struct handoff_conn *c, uint64_t id, struct handoff_request **out,
                         struct baton_error *e)
{
    struct handoff_request *r = base_try_alloc(1, sizeof *r, e);
    if (!r)
        return BATON_ERR_NOMEM;
    r->id = id;
    r->state = HANDOFF_CLAIMED;
    r->claimed = true;
    struct handoff_request **end = &c->requests;
    while (*end)
        end = &(*end)->next;
    *end = r;
    c->n_requests++;
    *out = r;
    return 0;
}

int handoff_request_add(struct handoff_conn *c, const struct handoff_offer *o,
                        struct handoff_request **out, struct baton_error *e)
{
    struct handoff_request *r = handoff_request_find(c, o->request);
    struct handoff_slot *slots = base_try_alloc(2 * (size_t)o->geometry.n_layers, sizeof *slots, e);
    bool claimed = r;
    int rc = !slots ? BATON_ERR_NOMEM : claimed ? 0 : handoff_request_open(c, o->request, &r, e);
    if (rc) {
        free(slots);
        return rc;
    }
    r->slots = slots;
    r->claimed = claimed;
    r->state = HANDOFF_OFFERED;
    r->digest = o->digest;
    r->n_ids = o->n_ids;
    r->geometry = o->geometry;
    *out = r;
    return 0;
}

static void feeds_free(struct handoff_request *r)
{
    for (uint32_t l = 0; r->feeds && l < r->geometry.n_layers; l++)
        for (struct handoff_job *j = r->feeds[l].jobs, *next; j; j = next) {
            next = j->next;
            handoff_view_free(&j->view);
            free(j);
        }
    free(r->feeds);
    free(r->turn);
    r->feeds = NULL;
    r->turn = NULL;
    r->turn_n = 0;
}

/* Everything but the entry itself. */
static void request_release(struct handoff_request *r)
{
    for (uint32_t s = 0; r->slots && s < 2 * r->geometry.n_layers; s++)
        kv_digest_close(r->slots[s].sum);
    for (uint32_t l = 0; r->views && l < r->geometry.n_layers; l++)
        handoff_view_free(&r->views[l]);
    feeds_free(r);
    free(r->slots);
    free(r->views);
    free(r->logits);
    r->slots = NULL;
    r->views = NULL;
    r->logits = NULL;
}

void handoff_request_remove(struct handoff_conn *c, struct handoff_request *r)
{
    struct handoff_request **p = &c->requests;
    while (*p != r)
        p = &(*p)->next;
    *p = r->next;
    c->n_requests--;
    request_release(r);
    free(r);
}

void handoff_request_withdraw(struct handoff_conn *c, struct handoff_request *r)
{
    if (!r->claimed) {
        handoff_request_remove(c, r);
        return;
    }
    request_release(r);
    r->state = HANDOFF_CLAIMED;
}

/* ---- views ---------------------------------------------------------------------------------- */

int handoff_view_copy(struct handoff_view *dst, const struct baton_kv_view *src, uint32_t first,
                      uint32_t end, struct baton_error *e)
{
    uint32_t block = src->layout->block;
    uint32_t from = block ? first / block : 0;
    uint32_t to = block ? (end - 1) / block + 1 : src->n_blocks;
    if (src->blocks && to > src->n_blocks)
        return base_fail(e, BATON_ERR_USAGE, "a view of %u blocks for positions up to %u",
                         src->n_blocks, end);
    if (first < src->first)
        return base_fail(e, BATON_ERR_USAGE, "a view that holds positions from %u on, not %u",
                         src->first, first);
    dst->blocks = NULL;
    if (src->blocks) {
        dst->blocks = base_try_alloc(to ? to : 1, sizeof *dst->blocks, e);
        if (!dst->blocks)
            return BATON_ERR_NOMEM;
        /* Entries outside the range may be changing under another thread: they are not read. */
        for (uint32_t i = 0; i < to; i++)
            dst->blocks[i] = i < from ? -1 : src->blocks[i];
    }
    dst->layout = *src->layout;
    dst->view = *src;
    dst->view.layout = &dst->layout;
    dst->view.blocks = dst->blocks;
    dst->view.n_blocks = src->blocks ? to : src->n_blocks;
    if (src->layout->kind == BATON_KV_PAGED) {
        /* The owner may count positions as stored only after the last layer: a page's place does
         * not depend on the end. That of a ring's or a slid window's row does. */
        dst->view.first = first;
        dst->view.end = end;
    }
    return 0;
}

void handoff_view_free(struct handoff_view *v)
{
    free(v->blocks);
    v->blocks = NULL;
}

/* ---- slots ---------------------------------------------------------------------------------- */

void handoff_request_start(struct handoff_request *r, uint32_t held, bool wants_logits)
{
    r->held = held;
    r->wants_logits = wants_logits;
    r->state = HANDOFF_RESERVED;
    for (uint32_t s = 0; s < 2 * r->geometry.n_layers; s++) {
        uint32_t first = kv_retained_first(&r->geometry, s / 2, r->n_ids);
        r->slots[s].first = r->slots[s].next = first > held ? first : held;
    }
}

int handoff_request_move(struct handoff_request *r, uint32_t slot, enum kv_digest_side side,
                         const struct baton_kv_view *dst, const struct baton_kv_view *src,
                         uint32_t first, uint32_t n, struct baton_error *e)
{
    struct handoff_slot *s = &r->slots[slot];
    const struct kv_geometry *g = &r->geometry;
    enum kv_which which = (enum kv_which)(slot % 2);
    int rc = 0;
    if (r->digest && !s->sum)
        rc = kv_digest_open(&s->sum, slot / 2, which, g->dtype, g->kv_heads, g->head_dim, s->first,
                            r->n_ids - s->first, e);
    if (rc)
        return rc;
    if (r->digest && dst)
        rc = kv_digest_copy(s->sum, side, dst, src, first, n, e);
    else if (r->digest)
        rc = kv_digest_update(s->sum, src, first, n, e);
    else if (dst)
        rc = kv_copy(dst, src, which, first, n, e);
    if (rc)
        return rc;
    s->next = first + n;
    if (s->next < r->n_ids)
        return 0;
    r->slots_done++;
    if (r->digest) {
        rc = kv_digest_final(s->sum, s->digest, e);
        kv_digest_close(s->sum);
        s->sum = NULL;
    }
    return rc;
}

void handoff_request_digest(const struct handoff_request *r, uint8_t out[32])
{
    struct base_sha256 h;
    memset(out, 0, 32);
    if (!r->digest)
        return;
    base_sha256_init(&h);
    for (uint32_t s = 0; s < 2 * r->geometry.n_layers; s++)
        base_sha256_update(&h, r->slots[s].digest, 32);
    base_sha256_final(&h, out);
}

/* ---- the end -------------------------------------------------------------------------------- */

void handoff_request_end(struct handoff_conn *c, struct handoff_request *r,
                         const struct baton_error *why)
{
    if (r->state == HANDOFF_ENDED)
        return;
    struct baton_error copy = *why; /* `why` may live in what is freed here */
    r->state = HANDOFF_ENDED;
    handoff_gather_drop(c, r);
    request_release(r);
    handoff_request_note(c, r, copy.code ? copy.text : "acknowledged");
    if (c->cb.on_end)
        c->cb.on_end(c->cb.ctx, r->id, &copy);
}

/* Body of a final frame; ACK carries the digest that this end computed. */
static void final_fill(struct handoff_out *f, const struct handoff_request *r, unsigned type,
                       uint32_t slot, const struct baton_error *why)
{
    uint8_t *p = f->control;
    if (type == HANDOFF_ACK) {
        handoff_request_digest(r, p);
    } else if (type == HANDOFF_NACK) {
        handoff_put32(p, slot);
        handoff_put32(p + 4, 0);
        handoff_reason_write(p + 8, why);
    } else if (type != HANDOFF_CLOSE) {
        handoff_reason_write(p, why);
    }
}

static void final_push(struct handoff_conn *c, struct handoff_request *r, unsigned type,
                       uint32_t slot, const struct baton_error *why)
{
    size_t n = type == HANDOFF_ACK     ? HANDOFF_ACK_BYTES
               : type == HANDOFF_NACK  ? HANDOFF_NACK_BYTES
               : type == HANDOFF_CLOSE ? 0
                                       : HANDOFF_REASON_BYTES;
    struct baton_error e = {0};
    struct handoff_out *f = handoff_out_new(type, r->id, n, &e);
    if (!f) {
        handoff_conn_doom(c, &e);
        return;
    }
    final_fill(f, r, type, slot, why);
    handoff_out_push(c, f);
}

void handoff_request_final(struct handoff_conn *c, struct handoff_request *r, unsigned type,
                           uint32_t slot, const struct baton_error *why)
{
    final_push(c, r, type, slot, why);
    handoff_request_end(c, r, why);
}

void handoff_request_finished(struct handoff_conn *c, struct handoff_request *r,
                              const struct baton_error *why)
{
    if (r->state != HANDOFF_ENDED)
        final_push(c, r, HANDOFF_CLOSE, HANDOFF_NO_SLOT, why);
    handoff_request_end(c, r, why);
    handoff_request_remove(c, r);
}

void handoff_request_end_all(struct handoff_conn *c, const struct baton_error *why)
{
    while (c->requests) {
        struct handoff_request *r = c->requests;
        handoff_request_end(c, r, why);
        handoff_request_remove(c, r);
    }
}

void handoff_abort(struct handoff_conn *c, uint64_t request, const struct baton_error *why)
{
    static const struct baton_error cancelled = {BATON_ERR_CANCELLED, "cancelled"};
    struct handoff_request *r = handoff_request_find(c, request);
    if (r && r->state != HANDOFF_ENDED)
        handoff_request_final(c, r, HANDOFF_ABORT, HANDOFF_NO_SLOT,
                              why && why->code ? why : &cancelled);
}
