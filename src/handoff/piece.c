/* SPDX-License-Identifier: Apache-2.0 */
/* What an owner hears of single pieces. */
#include "handoff/handoff_priv.h"

static struct handoff_moved moved(const struct handoff_request *r, const struct handoff_piece *p)
{
    const struct kv_geometry *g = &r->geometry;
    return (struct handoff_moved){
        .request = r->id,
        .layer = p->layer,
        .which = p->which,
        .first = p->first,
        .count = p->count,
        .bytes = kv_piece_bytes(p->dtype, g->kv_heads, g->head_dim, p->count),
    };
}

void handoff_piece_sent(struct handoff_conn *c, const struct handoff_out *f)
{
    struct handoff_piece p;
    if (f->header.type != HANDOFF_LAYER || !c->cb.on_piece)
        return;
    const struct handoff_request *r = handoff_request_find(c, f->header.request);
    if (!r || r->state == HANDOFF_ENDED || handoff_piece_read(f->control, &p, NULL))
        return;
    struct handoff_moved m = moved(r, &p);
    m.begin_ns = c->stage_began_ns;
    m.digested_ns = c->staged_ns;
    m.moved_ns = c->last_out_ns;
    c->cb.on_piece(c->cb.ctx, &m);
}

void handoff_piece_placed(struct handoff_conn *c, const struct handoff_request *r,
                          const struct handoff_piece *p, uint64_t digested_ns)
{
    if (!c->cb.on_piece)
        return;
    struct handoff_moved m = moved(r, p);
    m.begin_ns = c->in_began_ns;
    m.moved_ns = c->last_in_ns;
    m.digested_ns = digested_ns;
    m.placed_ns = base_now_ns();
    c->cb.on_piece(c->cb.ctx, &m);
}
