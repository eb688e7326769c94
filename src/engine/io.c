/* SPDX-License-Identifier: Apache-2.0 */
/* The I/O thread: the connection's owner. It turns messages into calls of handoff and handoff's
 * callbacks into messages, and never waits for the engine thread: what may be under way is bounded
 * (entries, ids), and the queues have room for all of it.
 *
 * A connection that ended takes its requests with it, once each; the thread stays to answer for
 * what is still submitted.
 */
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/engine_priv.h"

#define FLUSH_NS 1000000000u /* at most this long for an ACK or ABORT to leave when closing */

static struct engine_io_entry *find(struct engine_io *io, uint64_t id)
{
    for (size_t i = 0; i < ENGINE_MAX_OFFERS; i++)
        if (io->entries[i].used && io->entries[i].id == id)
            return &io->entries[i];
    return NULL;
}

/* The very request that a message is about; NULL where it ended meanwhile. */
static struct engine_io_entry *find_serial(struct engine_io *io, const struct engine_message *m)
{
    struct engine_io_entry *en = find(io, m->id);
    return en && en->serial == m->serial ? en : NULL;
}

static struct engine_io_entry *add(struct engine_io *io, uint64_t id, uint64_t serial)
{
    for (size_t i = 0; i < ENGINE_MAX_OFFERS; i++)
        if (!io->entries[i].used) {
            io->entries[i] = (struct engine_io_entry){.used = true, .id = id, .serial = serial};
            return &io->entries[i];
        }
    return NULL;
}

static void tell(struct baton_engine *en, enum engine_kind kind, uint64_t id, uint64_t serial,
                 const struct baton_error *why)
{
    struct engine_message m = {.kind = kind, .id = id, .serial = serial};
    if (why)
        m.why = *why;
    base_queue_push_wait(en->inbox, &m);
}

/* A point at which tests stop or kill this process, or give the request up ("fail"). */
static void point(struct baton_engine *en, uint64_t request, const char *name)
{
    static const struct baton_error why = {BATON_ERR_INTERNAL, "a probe point gave it up"};
    if (base_probe(name))
        handoff_abort(en->io.conn, request, &why);
}

/* ---- callbacks ---------------------------------------------------------------------------- */

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

static void on_offer(void *ctx, const struct handoff_offer *o)
{
    static const struct baton_error full = {BATON_ERR_BUSY, "too many offers at the consumer"};
    static const struct baton_error closing = {BATON_ERR_CANCELLED, "the consumer closes"};
    struct baton_engine *en = ctx;
    struct engine_io *io = &en->io;
    struct engine_offer *mine = NULL;
    struct engine_io_entry *entry = NULL;
    bool stopping = atomic_load(&en->stopping); /* then nobody reads the inbox any more */
    if (!stopping && !find(io, o->request) && room_for(io, o->n_ids))
        mine = copy_offer(o);
    if (mine)
        entry = add(io, o->request, io->serial + 1);
    if (!entry) {
        free(mine);
        handoff_refuse(io->conn, o->request, stopping ? &closing : &full, NULL);
        return;
    }
    entry->n_ids = o->n_ids;
    mine->serial = ++io->serial;
    struct engine_message m = {.kind = ENGINE_OFFERED, .offer = mine};
    base_queue_push_wait(en->inbox, &m);
    point(en, o->request, "consumer-offered");
}

static void on_reserve(void *ctx, uint64_t request, uint32_t held, bool wants_logits)
{
    struct baton_engine *en = ctx;
    struct engine_io_entry *entry = find(&en->io, request);
    if (!entry)
        return;
    entry->wants_logits = wants_logits;
    atomic_store(&entry->session->reserved, true);
    tell(en, ENGINE_RESERVED, request, entry->serial, NULL);
    point(en, request, "producer-reserved");
}

/* The session is lent to this thread from RESERVE to ENDED: its result is written in place. */
static void on_commit(void *ctx, uint64_t request, const struct handoff_result *result)
{
    struct baton_engine *en = ctx;
    struct engine_io_entry *entry = find(&en->io, request);
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
    point(en, request, "consumer-committed");
}

static void on_piece(void *ctx, const struct handoff_moved *m)
{
    struct baton_engine *en = ctx;
    engine_trace_piece(en, m);
    point(en, m->request, en->role == BATON_PRODUCER ? "producer-piece" : "consumer-piece");
}

static void on_end(void *ctx, uint64_t request, const struct baton_error *why)
{
    struct baton_engine *en = ctx;
    struct engine_io_entry *entry = find(&en->io, request);
    if (!entry)
        return;
    entry->used = false;
    tell(en, ENGINE_ENDED, request, entry->serial, why);
}

/* ---- messages ----------------------------------------------------------------------------- */

static int send_offer(struct baton_engine *en, struct engine_session *s, struct baton_error *e)
{
    const struct engine_ask *a = &s->request->ask;
    struct handoff_offer o = {
        .request = a->id,
        .identity = en->model->identity,
        .geometry = en->geometry,
        .ids = a->ids,
        .n_ids = a->n_ids,
        .max_new = a->max_tokens,
        .stream = a->mode == BATON_STREAM,
        .digest = en->digest,
    };
    return handoff_offer(en->io.conn, &o, e);
}

static void take_offer(struct baton_engine *en, const struct engine_message *m)
{
    struct baton_error e;
    struct engine_io *io = &en->io;
    if (io->dead) {
        tell(en, ENGINE_ENDED, m->id, m->serial, &io->why);
        return;
    }
    struct engine_io_entry *entry = add(io, m->id, m->serial);
    int rc = entry ? 0 : base_fail(&e, BATON_ERR_BUSY, "too many requests at the connection");
    if (rc == 0) {
        entry->session = m->session;
        rc = send_offer(en, m->session, &e);
    }
    /* A connection that failed inside has told by on_end already, and the entry is gone. */
    if (rc && entry && find_serial(io, m))
        entry->used = false;
    else if (rc && entry)
        return;
    if (rc)
        tell(en, ENGINE_ENDED, m->id, m->serial, &e);
    else
        point(en, m->id, "producer-offered");
}

/* What a request in progress asks for. A refusal of handoff's own is a reason to give it up. */
static void take_step(struct baton_engine *en, const struct engine_message *m)
{
    struct engine_io *io = &en->io;
    struct engine_io_entry *entry = find_serial(io, m);
    struct baton_error e;
    int rc = 0;
    if (!entry || io->dead)
        return;
    if (m->kind == ENGINE_LAYER) {
        rc = handoff_layer(io->conn, m->id, m->layer, &m->view, m->first, m->n, &e);
    } else if (m->kind == ENGINE_COMMIT) {
        struct handoff_commit c = m->session->commit;
        if (!entry->wants_logits)
            c.logits = NULL;
        rc = handoff_commit(io->conn, m->id, &c, &e);
    } else if (m->kind == ENGINE_RESERVE) {
        entry->session = m->session;
        rc = handoff_reserve(io->conn, m->id, kv_seq_views(m->session->seq), m->session->held,
                             m->session->row != NULL, &e);
    } else if (m->kind == ENGINE_REFUSE) {
        rc = handoff_refuse(io->conn, m->id, &m->why, &e);
    } else if (m->kind == ENGINE_ABORT) {
        handoff_abort(io->conn, m->id, &m->why);
    }
    if (rc && find_serial(io, m))
        handoff_abort(io->conn, m->id, &e);
    else if (m->kind == ENGINE_COMMIT)
        point(en, m->id, "producer-commit");
    else if (m->kind == ENGINE_RESERVE)
        point(en, m->id, "consumer-reserved");
}

static void take_messages(struct baton_engine *en)
{
    struct engine_message m;
    while (!en->io.stop && base_queue_pop(en->outbox, &m, 0)) {
        if (m.kind == ENGINE_STOP)
            en->io.stop = true;
        else if (m.kind == ENGINE_OFFER)
            take_offer(en, &m);
        else
            take_step(en, &m);
    }
}

/* ---- the loop ----------------------------------------------------------------------------- */

static void step(struct baton_engine *en)
{
    struct engine_io *io = &en->io;
    if (io->dead || handoff_conn_step(io->conn, &io->why) == 0)
        return;
    io->dead = true;
    handoff_conn_close(io->conn);
    io->conn = NULL;
    /* Whatever handoff_conn_step did not end itself; each at most once, since entries go. */
    for (size_t i = 0; i < ENGINE_MAX_OFFERS; i++)
        if (io->entries[i].used)
            on_end(en, io->entries[i].id, &io->why);
    tell(en, ENGINE_DEAD, 0, 0, &io->why);
}

/* Until something arrives, there is room to write, the connection wants its step, or `limit_ns`. */
static void wait_for_work(struct baton_engine *en, uint64_t limit_ns)
{
    struct engine_io *io = &en->io;
    struct pollfd fds[3] = {{base_queue_fd(en->outbox), POLLIN, 0}};
    uint64_t timeout = UINT64_MAX;
    int n = 1;
    if (!io->dead)
        n += handoff_conn_poll(io->conn, fds + 1, &timeout);
    if (timeout > limit_ns)
        timeout = limit_ns;
    struct timespec ts = {(time_t)(timeout / 1000000000u), (long)(timeout % 1000000000u)};
    ppoll(fds, (nfds_t)n, timeout == UINT64_MAX ? NULL : &ts, NULL);
}

static void flush(struct baton_engine *en)
{
    uint64_t end = base_now_ns() + FLUSH_NS;
    for (uint64_t now = base_now_ns(); now < end; now = base_now_ns()) {
        step(en);
        if (en->io.dead || !handoff_conn_busy(en->io.conn))
            return;
        wait_for_work(en, end - now);
    }
}

int engine_io_open(struct baton_engine *en, int fd, const struct baton_engine_options *eo,
                   struct baton_error *e)
{
    const struct handoff_options o = {
        .producer = en->role == BATON_PRODUCER,
        .key = eo->key,
        .key_bytes = eo->key_bytes,
        .dead_ns = eo->dead_ns,
        .tag_payload = eo->tag_payload,
    };
    const struct handoff_callbacks cb = {
        .on_offer = on_offer,
        .on_commit = on_commit,
        .on_reserve = on_reserve,
        .on_end = on_end,
        .on_piece = on_piece,
        .ctx = en,
    };
    if (eo->link) /* the public name of a transport's end */
        return handoff_conn_open((struct transport *)eo->link, &o, &cb, &en->io.conn, e);
    return handoff_conn_open_fd(fd, &o, &cb, &en->io.conn, e);
}

void *engine_io_thread(void *arg)
{
    struct baton_engine *en = arg;
    while (!en->io.stop) {
        take_messages(en);
        step(en);
        if (!en->io.stop)
            wait_for_work(en, UINT64_MAX);
    }
    flush(en);
    return NULL;
}

void engine_io_close(struct baton_engine *en)
{
    struct engine_message m;
    if (en->io.conn)
        handoff_conn_close(en->io.conn);
    /* Offers that nobody took: in the queue, and held. */
    while (en->inbox && base_queue_pop(en->inbox, &m, 0))
        if (m.kind == ENGINE_OFFERED)
            free(m.offer);
    for (struct engine_offer *o = en->offers, *next; o; o = next) {
        next = o->next;
        free(o);
    }
}
