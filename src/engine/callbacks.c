/* SPDX-License-Identifier: Apache-2.0 */
/* What connections tell: each callback is given its peer, and becomes a message to the engine
 * thread. What may be under way is bounded (entries, ids), and the queues have room for all of it.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/engine_priv.h"

struct engine_io_entry *engine_io_find(struct engine_peer *p, uint64_t id)
{
    struct engine_io *io = &p->engine->io;
    for (size_t i = 0; i < ENGINE_MAX_OFFERS; i++) {
        struct engine_io_entry *x = &io->entries[i];
        if (x->used && !x->over && x->peer == p && x->id == id)
            return x;
    }
    return NULL;
}

struct engine_io_entry *engine_io_add(struct engine_peer *p, uint64_t id, uint64_t serial)
{
    struct engine_io *io = &p->engine->io;
    for (size_t i = 0; i < ENGINE_MAX_OFFERS; i++)
        if (!io->entries[i].used) {
            io->entries[i] = (struct engine_io_entry){
                .used = true, .peer = p, .id = id, .serial = serial};
            return &io->entries[i];
        }
    return NULL;
}

void engine_io_tell(struct baton_engine *en, enum engine_kind kind,
                    const struct engine_io_entry *entry, const struct baton_error *why)
{
    struct engine_message m = {.kind = kind, .id = entry->id, .serial = entry->serial};
    if (why)
        m.why = *why;
    m.heard_ns = entry->peer->conn ? handoff_conn_heard(entry->peer->conn) : 0;
    if (!m.heard_ns)
        m.heard_ns = base_now_ns();
    base_queue_push_wait(en->inbox, &m);
}

void engine_io_end(struct baton_engine *en, struct engine_io_entry *entry,
                   const struct baton_error *why)
{
    if (en->role == BATON_PRODUCER && entry->claim && !entry->answered)
        entry->over = true;
    else
        entry->used = false;
    if (!entry->tell)
        engine_io_tell(en, ENGINE_ENDED, entry, why);
}

void engine_io_point(struct engine_peer *p, uint64_t id, const char *name)
{
    static const struct baton_error why = {BATON_ERR_INTERNAL, "a probe point gave it up"};
    if (base_probe(name))
        handoff_abort(p->conn, id, &why);
}

/* ---- consumer ----------------------------------------------------------------------------- */

static bool room_for(const struct engine_io *io, uint32_t n_ids)
{
    uint64_t ids = n_ids;
    for (size_t i = 0; i < ENGINE_MAX_OFFERS; i++)
        if (io->entries[i].used)
            ids += io->entries[i].n_ids;
    return ids <= ENGINE_MAX_OFFERED_IDS;
}

static struct engine_offer *copy_offer(const struct handoff_offer *o)
{
    struct engine_offer *mine = base_try_alloc(1, sizeof *mine + (size_t)o->n_ids * sizeof *o->ids,
                                               NULL);
    if (!mine)
        return NULL;
    mine->id = o->request;
    mine->identity = o->identity;
    mine->geometry = o->geometry;
    mine->n_ids = o->n_ids;
    memcpy(mine->ids, o->ids, (size_t)o->n_ids * sizeof *o->ids);
    return mine;
}

/* The entry of an offer: of the claim that it answers, or a new one, which the fixed peer alone may
 * open. NULL: there can be none. */
static struct engine_io_entry *offer_entry(struct engine_peer *p, uint64_t id)
{
    struct engine_io *io = &p->engine->io;
    struct engine_io_entry *entry = engine_io_find(p, id);
    if (entry)
        return entry->claim && !entry->n_ids ? entry : NULL;
    if (p != &io->peers[0])
        return NULL;
    entry = engine_io_add(p, id, (io->serial + 1) | ENGINE_IO_SERIAL);
    io->serial += entry != NULL;
    return entry;
}

static void on_offer(void *ctx, const struct handoff_offer *o)
{
    static const struct baton_error full = {BATON_ERR_BUSY, "too many offers at the consumer"};
    static const struct baton_error closing = {BATON_ERR_CANCELLED, "the consumer closes"};
    struct engine_peer *p = ctx;
    struct baton_engine *en = p->engine;
    struct engine_offer *mine = NULL;
    struct engine_io_entry *entry = NULL;
    bool stopping = atomic_load(&en->stopping); /* then nobody reads the inbox any more */
    if (!stopping && room_for(&en->io, o->n_ids))
        mine = copy_offer(o);
    if (mine)
        entry = offer_entry(p, o->request);
    if (!entry) {
        free(mine);
        handoff_refuse(p->conn, o->request, stopping ? &closing : &full, NULL);
        return;
    }
    entry->n_ids = o->n_ids;
    mine->serial = entry->serial;
    mine->claimed = entry->claim;
    struct engine_message m = {.kind = ENGINE_OFFERED, .offer = mine};
    base_queue_push_wait(en->inbox, &m);
    engine_io_point(p, o->request, "consumer-offered");
}

/* The session is lent to this thread from RESERVE to ENDED: its result is written in place. */
static void on_commit(void *ctx, uint64_t request, const struct handoff_result *result)
{
    struct engine_peer *p = ctx;
    struct baton_engine *en = p->engine;
    struct engine_io_entry *entry = engine_io_find(p, request);
    if (!entry || !entry->session)
        return;
    struct engine_session *s = entry->session;
    const struct handoff_commit *c = &result->commit;
    if (s->row && (!c->logits || c->vocab != en->vocab))
        return; /* not committed: ENDED makes it an error */
    s->result = *result;
    s->result.commit.logits = NULL;
    if (s->row)
        memcpy(s->row, c->logits, (size_t)en->vocab * sizeof *s->row);
    s->committed = true;
    engine_io_point(p, request, "consumer-committed");
}

/* ---- producer ----------------------------------------------------------------------------- */

static void on_reserve(void *ctx, uint64_t request, uint32_t held, bool wants_logits)
{
    struct engine_peer *p = ctx;
    struct engine_io_entry *entry = engine_io_find(p, request);
    if (!entry)
        return;
    entry->wants_logits = wants_logits;
    atomic_store(&entry->session->reserved, true);
    engine_io_tell(p->engine, ENGINE_RESERVED, entry, NULL);
    engine_io_point(p, request, "producer-reserved");
}

static void on_claim(void *ctx, uint64_t request, const uint8_t *ticket)
{
    static const struct baton_error full = {BATON_ERR_NOMEM, "too many claims at the producer"};
    static const struct baton_error closing = {BATON_ERR_PEER, "the producer closes"};
    struct engine_peer *p = ctx;
    struct baton_engine *en = p->engine;
    struct engine_io_entry *entry = NULL;
    bool stopping = atomic_load(&en->stopping);
    if (!stopping)
        entry = engine_io_add(p, request, (en->io.serial + 1) | ENGINE_IO_SERIAL);
    if (!entry) {
        handoff_abort(p->conn, request, stopping ? &closing : &full);
        return;
    }
    en->io.serial++;
    entry->claim = true;
    struct engine_message m = {.kind = ENGINE_CLAIMED, .id = request, .serial = entry->serial};
    memcpy(m.ticket, ticket, sizeof m.ticket);
    base_queue_push_wait(en->inbox, &m);
    engine_io_point(p, request, "producer-claimed");
}

/* ---- both --------------------------------------------------------------------------------- */

static void on_piece(void *ctx, const struct handoff_moved *m)
{
    struct engine_peer *p = ctx;
    engine_trace_piece(p->engine, m);
    engine_io_point(p, m->request,
                    p->engine->role == BATON_PRODUCER ? "producer-piece" : "consumer-piece");
}

static void on_end(void *ctx, uint64_t request, const struct baton_error *why)
{
    struct engine_peer *p = ctx;
    struct engine_io_entry *entry = engine_io_find(p, request);
    struct baton_error e = *why;
    if (!entry)
        return;
    /* INTEGRITY in answer to a claim is a forged ticket; of a connection that died, as for another
     * key, it says nothing about the ticket. */
    if (entry->claim && !entry->n_ids && why->code == BATON_ERR_INTEGRITY &&
        p->engine->role == BATON_CONSUMER && handoff_conn_dead(p->conn))
        base_fail(&e, BATON_ERR_PEER, "%s", why->text);
    engine_io_end(p->engine, entry, &e);
}

const struct handoff_callbacks engine_callbacks = {
    .on_offer = on_offer,
    .on_commit = on_commit,
    .on_reserve = on_reserve,
    .on_end = on_end,
    .on_piece = on_piece,
    .on_claim = on_claim,
};
