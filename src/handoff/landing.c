/* SPDX-License-Identifier: Apache-2.0 */
/* Landing: a region of memory that the consumer lends to its peer, cut into slots of one piece.
 *
 * The producer alone chooses slots. One that it named in a LAYER is the consumer's until CREDIT: a
 * producer without free slots waits, which is all the back-pressure there is. The consumer keeps no
 * account of slots: it reads each piece once, as its LAYER comes, and a producer that writes where
 * it may not spoils only what it sends itself. */
#include <stdlib.h>
#include <unistd.h>

#include "handoff/handoff_priv.h"
#include "transport/transport.h"

#define SLOTS 4u /* one is filled, one is read, and neither end waits for a frame to travel */
/* All slots together stay in the cache that two cores share: the copy out then reads no memory
 * (bench/bench_handoff). */
#define SLOT_BYTES (256u << 10)

int handoff_landing_open(struct handoff_conn *c, struct transport *t,
                         const struct handoff_options *o, struct baton_error *e)
{
    struct handoff_landing *l = &c->landing;
    if (o->landing_slots > HANDOFF_MAX_SLOTS || o->landing_slot_bytes > HANDOFF_MAX_PAYLOAD ||
        o->landing_slot_bytes % HANDOFF_SLOT_UNIT)
        return base_fail(e, BATON_ERR_USAGE, "a landing region of %u slots of %u bytes",
                         o->landing_slots, o->landing_slot_bytes);
    l->on = !o->no_landing && transport_passes_fds(t, o->producer);
    l->want_slots = o->landing_slots;
    l->want_bytes = o->landing_slot_bytes;
    return 0;
}

/* ---- consumer ------------------------------------------------------------------------------- */

static int lend(struct handoff_conn *c, size_t leaf, struct baton_error *e)
{
    struct handoff_landing *l = &c->landing;
    size_t usual = leaf > SLOT_BYTES ? leaf : SLOT_BYTES;
    usual = (usual + HANDOFF_SLOT_UNIT - 1) / HANDOFF_SLOT_UNIT * HANDOFF_SLOT_UNIT;
    const struct handoff_lending x = {.region = 1,
                                      .n_slots = l->want_slots ? l->want_slots : SLOTS,
                                      .slot_bytes = l->want_bytes ? l->want_bytes
                                                                  : (uint32_t)usual};
    struct handoff_out *f = handoff_out_new(HANDOFF_LANDING, 0, HANDOFF_LANDING_BYTES, e);
    if (!f)
        return BATON_ERR_NOMEM;
    int rc = transport_landing_create((size_t)x.n_slots * x.slot_bytes, &l->memory, e);
    if (rc) {
        free(f);
        return rc;
    }
    l->lent = x;
    handoff_lending_write(f->control, &x);
    handoff_out_push(c, f);
    return 0;
}

int handoff_landing_lend(struct handoff_conn *c, size_t leaf, struct handoff_terms *x,
                         struct baton_error *e)
{
    struct handoff_landing *l = &c->landing;
    /* Placed payload is under no tag: who wants it there gets it in the stream. */
    if (!l->on || !c->t || c->auth.level == HANDOFF_AUTH_PAYLOAD)
        return 0;
    int rc = l->memory ? 0 : lend(c, leaf, e);
    if (rc)
        return rc;
    x->landing = l->lent.region;
    x->credits = l->lent.n_slots;
    return 0;
}

static bool in_slot(const struct handoff_lending *x, const struct handoff_piece *p)
{
    return x->region && p->placement == x->region && p->offset % x->slot_bytes == 0 &&
           p->offset / x->slot_bytes < x->n_slots;
}

int handoff_landing_find(const struct handoff_conn *c, const struct handoff_piece *p, size_t bytes,
                         uint8_t **data, struct baton_error *e)
{
    const struct handoff_lending *x = &c->landing.lent;
    if (!in_slot(x, p) || bytes > x->slot_bytes)
        return base_fail(e, BATON_ERR_INTEGRITY,
                         "%zu bytes at %llu of landing region %u; lent is region %u of %u slots of "
                         "%u bytes",
                         bytes, (unsigned long long)p->offset, p->placement, x->region, x->n_slots,
                         x->slot_bytes);
    *data = transport_landing_data(c->landing.memory) + p->offset;
    return 0;
}

void handoff_landing_credit(struct handoff_conn *c, const struct handoff_piece *p)
{
    const struct handoff_lending *x = &c->landing.lent;
    struct baton_error e = {0};
    if (!in_slot(x, p))
        return;
    struct handoff_out *f = handoff_out_new(HANDOFF_CREDIT, 0, HANDOFF_CREDIT_BYTES, &e);
    if (!f) {
        handoff_conn_doom(c, &e);
        return;
    }
    handoff_credit_write(f->control, x->region, (uint32_t)(p->offset / x->slot_bytes));
    handoff_out_push(c, f);
    c->landing.owes = true;
}

int handoff_landing_fd(const struct handoff_conn *c, const struct handoff_out *f)
{
    return f->header.type == HANDOFF_LANDING ? transport_landing_fd(c->landing.memory) : -1;
}

void handoff_landing_sent(struct handoff_conn *c)
{
    transport_landing_sent(c->landing.memory);
}

/* ---- producer ------------------------------------------------------------------------------- */

int handoff_landing_take(struct handoff_conn *c, const uint8_t *control, int fd,
                         struct baton_error *e)
{
    struct handoff_landing *l = &c->landing;
    struct handoff_lending x;
    int rc = handoff_lending_read(control, &x, e);
    if (!rc && l->lent.region)
        rc = base_fail(e, BATON_ERR_PEER, "a second LANDING");
    if (!rc && c->auth.level == HANDOFF_AUTH_PAYLOAD)
        rc = base_fail(e, BATON_ERR_PEER, "LANDING where payload has to be under tags");
    if (!rc && l->on && fd < 0)
        rc = base_fail(e, BATON_ERR_PEER, "LANDING without a descriptor");
    if (!rc && l->on)
        rc = transport_landing_map(fd, (size_t)x.n_slots * x.slot_bytes, &l->memory, e);
    else if (fd >= 0)
        close(fd);
    if (!rc)
        l->lent = x;
    return rc;
}

int handoff_landing_take_credit(struct handoff_conn *c, const uint8_t *control,
                                struct baton_error *e)
{
    struct handoff_landing *l = &c->landing;
    uint32_t region, slot;
    int rc = handoff_credit_read(control, &region, &slot, e);
    if (rc)
        return rc;
    if (region == 0 || region != l->lent.region || slot >= l->lent.n_slots ||
        !(l->used >> slot & 1))
        return base_fail(e, BATON_ERR_PEER, "CREDIT for slot %u of landing region %u, not in use",
                         slot, region);
    l->used &= ~(UINT64_C(1) << slot);
    return 0;
}

int handoff_landing_take_terms(const struct handoff_conn *c, const struct handoff_terms *x,
                               size_t leaf, bool *placed, struct baton_error *e)
{
    const struct handoff_lending *lent = &c->landing.lent;
    if (x->landing ? x->landing != lent->region || x->credits != lent->n_slots : x->credits != 0)
        return base_fail(e, BATON_ERR_PEER,
                         "RESERVE with %u credits of landing region %u; lent is region %u of %u",
                         x->credits, x->landing, lent->region, lent->n_slots);
    *placed = x->landing && c->landing.memory && leaf <= lent->slot_bytes;
    return 0;
}

bool handoff_landing_free(const struct handoff_conn *c)
{
    uint32_t n = c->landing.lent.n_slots;
    return c->landing.used != (n < 64 ? (UINT64_C(1) << n) - 1 : UINT64_MAX);
}

/* The lowest first: what was given back last is still in the caches. */
uint8_t *handoff_landing_claim(struct handoff_conn *c, struct handoff_piece *p)
{
    struct handoff_landing *l = &c->landing;
    uint32_t slot = (uint32_t)__builtin_ctzll(~l->used);
    l->used |= UINT64_C(1) << slot;
    p->placement = l->lent.region;
    p->offset = (uint64_t)slot * l->lent.slot_bytes;
    return transport_landing_data(l->memory) + p->offset;
}

void handoff_landing_unclaim(struct handoff_conn *c, const struct handoff_piece *p)
{
    if (p->placement)
        c->landing.used &= ~(UINT64_C(1) << p->offset / c->landing.lent.slot_bytes);
}

/* ---- both ----------------------------------------------------------------------------------- */

void handoff_landing_drop(struct handoff_conn *c)
{
    transport_landing_close(c->landing.memory);
    c->landing.memory = NULL;
    c->landing.lent = (struct handoff_lending){0};
}
