/* SPDX-License-Identifier: Apache-2.0 */
/* The I/O thread: the connections' owner (peers.c). It turns messages into calls of handoff and
 * handoff's callbacks (callbacks.c) into messages, and never waits for the engine thread.
 *
 * A connection that ended takes its own requests with it, once each; the thread stays to answer for
 * what is still submitted.
 */
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "engine/engine_priv.h"

#define FLUSH_NS 1000000000u /* at most this long for an ACK or ABORT to leave when closing */

/* The very request that a message is about; NULL where it ended meanwhile. */
static struct engine_io_entry *find_serial(struct engine_io *io, uint64_t serial)
{
    for (size_t i = 0; i < ENGINE_MAX_OFFERS; i++)
        if (io->entries[i].used && !io->entries[i].tell && io->entries[i].serial == serial)
            return &io->entries[i];
    return NULL;
}

/* A request that never came to have an entry. */
static void tell_ended(struct baton_engine *en, const struct engine_message *m,
                       const struct baton_error *why)
{
    const struct engine_message ended = {
        .kind = ENGINE_ENDED, .id = m->id, .serial = m->serial, .why = *why};
    base_queue_push_wait(en->inbox, &ended);
}

/* ---- offers ------------------------------------------------------------------------------- */

static int send_offer(struct baton_engine *en, struct engine_io_entry *entry, struct baton_error *e)
{
    const struct engine_ask *a = &entry->session->request->ask;
    struct handoff_offer o = {
        .request = entry->id,
        .identity = en->model->identity,
        .geometry = en->geometry,
        .ids = a->ids,
        .n_ids = a->n_ids,
        .max_new = a->max_tokens,
        .stream = a->mode == BATON_STREAM && !a->hold,
        .digest = en->digest,
    };
    return handoff_offer(entry->peer->conn, &o, e);
}

/* The entry of an offer: a new one at the fixed peer, or that of the claim which it answers. NULL:
 * over, and the engine thread knows or is told here. */
static struct engine_io_entry *offer_entry(struct baton_engine *en, const struct engine_message *m)
{
    static const struct baton_error full = {BATON_ERR_BUSY, "too many requests at the connection"};
    struct engine_peer *p = en->io.peers;
    if (m->serial & ENGINE_IO_SERIAL)
        return find_serial(&en->io, m->serial);
    struct engine_io_entry *entry = p->conn ? engine_io_add(p, m->id, m->serial) : NULL;
    if (!entry)
        tell_ended(en, m, p->conn ? &full : &p->why);
    return entry;
}

/* The session is not looked at before it is sure that it is still there. */
static void take_offer(struct baton_engine *en, const struct engine_message *m)
{
    struct engine_io_entry *entry = offer_entry(en, m);
    struct baton_error e;
    if (!entry)
        return;
    entry->answered = true;
    if (entry->over) {
        entry->used = false;
        return;
    }
    entry->session = m->session;
    uint64_t id = entry->id;
    struct engine_peer *p = entry->peer;
    bool claim = entry->claim;
    int rc = send_offer(en, entry, &e);
    /* A connection that failed inside has told by on_end already, and the entry is gone. */
    if (rc && find_serial(&en->io, m->serial) == entry) {
        if (claim)
            handoff_abort(p->conn, id, &e);
        else
            engine_io_end(en, entry, &e);
    } else if (rc == 0) {
        engine_io_point(p, id, "producer-offered");
    }
}

/* ---- claims ------------------------------------------------------------------------------- */

static void send_claim(struct engine_io_entry *entry)
{
    struct engine_peer *p = entry->peer;
    uint64_t serial = entry->serial, id = entry->id;
    struct baton_error e;
    struct baton_error back = {entry->tell, "not fetched now"};
    const struct engine_ask *a = entry->asks;
    if (a && !handoff_conn_ready(p->conn)) /* whether the peer takes it is not known yet */
        return;
    entry->waits = false;
    int rc = a ? handoff_ask(p->conn, id, a->ids, a->n_ids, a->max_tokens, &e)
               : handoff_claim(p->conn, id, entry->ticket, &e);
    if (rc && find_serial(&p->engine->io, serial) == entry)
        engine_io_end(p->engine, entry, &e);
    else if (entry->tell) {
        entry->used = false;
        handoff_abort(p->conn, id, &back);
    } else {
        engine_io_point(p, id, "consumer-claimed");
    }
}

void engine_io_dialed(struct engine_peer *p)
{
    struct engine_io *io = &p->engine->io;
    for (size_t i = 0; i < ENGINE_MAX_OFFERS && p->conn; i++)
        if (io->entries[i].used && io->entries[i].peer == p && io->entries[i].waits)
            send_claim(&io->entries[i]);
}

/* Ids of claims lie where those of a fixed peer's offers hardly are. */
static int add_claim(struct baton_engine *en, const char *from, const uint8_t *ticket,
                     const struct engine_ask *asks, uint64_t serial, int tell,
                     struct baton_error *e)
{
    struct engine_peer *p;
    int rc = engine_peer_get(en, from, &p, e);
    if (rc)
        return rc;
    struct engine_io_entry *entry = engine_io_add(p, ++p->claims | ENGINE_IO_SERIAL, serial);
    if (!entry)
        return base_fail(e, BATON_ERR_NOMEM, "too many requests at the connection");
    entry->claim = entry->waits = true;
    entry->tell = tell;
    entry->asks = asks;
    memcpy(entry->ticket, ticket, sizeof entry->ticket);
    if (p->conn)
        send_claim(entry);
    return 0;
}

static void take_claim(struct baton_engine *en, const struct engine_message *m)
{
    const struct engine_ask *a = &m->session->request->ask;
    struct baton_error e;
    if (add_claim(en, a->from, a->ticket, a->asks ? a : NULL, m->serial, 0, &e))
        tell_ended(en, m, &e);
}

/* A claim that is given back at once renews the lease, or gives the request up. */
static void take_told(struct baton_engine *en, const struct engine_message *m)
{
    struct baton_error e;
    int code = m->kind == ENGINE_RELEASE ? BATON_ERR_CANCELLED : BATON_ERR_BUSY;
    add_claim(en, m->from, m->ticket, NULL, 0, code, &e);
    free(m->from);
    atomic_fetch_sub(&en->n_told, 1);
}

/* ---- steps -------------------------------------------------------------------------------- */

static int take_step(struct engine_io_entry *entry, const struct engine_message *m,
                     struct baton_error *e)
{
    struct handoff_conn *conn = entry->peer->conn;
    uint64_t id = entry->id;
    if (m->kind == ENGINE_LAYER)
        return handoff_layer(conn, id, m->layer, &m->view, m->first, m->n, e);
    if (m->kind == ENGINE_REFUSE)
        return handoff_refuse(conn, id, &m->why, e);
    if (m->kind == ENGINE_COMMIT) {
        struct handoff_commit c = m->session->commit;
        if (!entry->wants_logits)
            c.logits = NULL;
        if (entry->claim)
            c.compute_end_ns = 0; /* nothing that the transfer could be seen beside */
        return handoff_commit(conn, id, &c, e);
    }
    if (m->kind == ENGINE_RESERVE) {
        entry->session = m->session;
        return handoff_reserve(conn, id, kv_seq_views(m->session->seq), m->session->held,
                               m->session->row != NULL, e);
    }
    handoff_abort(conn, id, &m->why);
    return 0;
}

/* What a request in progress asks for. A refusal of handoff's own is a reason to give it up. */
static void take_request(struct baton_engine *en, const struct engine_message *m)
{
    struct engine_io_entry *entry = find_serial(&en->io, m->serial);
    struct baton_error e;
    if (!entry)
        return;
    struct engine_peer *p = entry->peer;
    uint64_t id = entry->id;
    entry->answered = true;
    if (entry->over) {
        entry->used = false;
        return;
    }
    if (!p->conn || entry->waits) { /* given up before it was sent */
        engine_io_end(en, entry, &m->why);
        return;
    }
    int rc = take_step(entry, m, &e);
    if (rc && find_serial(&en->io, m->serial))
        handoff_abort(p->conn, id, &e);
    else if (m->kind == ENGINE_COMMIT)
        engine_io_point(p, id, "producer-commit");
    else if (m->kind == ENGINE_RESERVE)
        engine_io_point(p, id, "consumer-reserved");
}

static void take_messages(struct baton_engine *en)
{
    struct engine_message m;
    while (!en->io.stop && base_queue_pop(en->outbox, &m, 0)) {
        if (m.kind == ENGINE_STOP)
            en->io.stop = true;
        else if (m.kind == ENGINE_OFFER)
            take_offer(en, &m);
        else if (m.kind == ENGINE_CLAIM)
            take_claim(en, &m);
        else if (m.kind == ENGINE_RENEW || m.kind == ENGINE_RELEASE)
            take_told(en, &m);
        else if (m.kind != ENGINE_DIALED)
            take_request(en, &m);
    }
}

/* ---- the loop ----------------------------------------------------------------------------- */

/* Until something arrives, there is room to write, a connection wants its step, or `limit_ns`. */
static void wait_for_work(struct baton_engine *en, uint64_t limit_ns)
{
    struct pollfd fds[2 * ENGINE_MAX_PEERS + 2];
    uint64_t timeout;
    int n = 1 + engine_peers_poll(en, fds + 1, &timeout);
    fds[0] = (struct pollfd){base_queue_fd(en->outbox), POLLIN, 0};
    if (timeout > limit_ns)
        timeout = limit_ns;
    struct timespec ts = {(time_t)(timeout / 1000000000u), (long)(timeout % 1000000000u)};
    ppoll(fds, (nfds_t)n, timeout == UINT64_MAX ? NULL : &ts, NULL);
}

static void flush(struct baton_engine *en)
{
    uint64_t end = base_now_ns() + FLUSH_NS;
    for (uint64_t now = base_now_ns(); now < end; now = base_now_ns()) {
        engine_peers_step(en);
        if (!engine_peers_busy(en))
            return;
        wait_for_work(en, end - now);
    }
}

void *engine_io_thread(void *arg)
{
    struct baton_engine *en = arg;
    while (!en->io.stop) {
        take_messages(en);
        engine_peers_turn(en);
        engine_peers_step(en);
        if (!en->io.stop)
            wait_for_work(en, UINT64_MAX);
    }
    flush(en);
    return NULL;
}

/* ---- life --------------------------------------------------------------------------------- */

static int copy_options(struct baton_engine *en, const struct baton_engine_options *eo,
                        struct baton_error *e)
{
    struct engine_io *io = &en->io;
    io->options = (struct handoff_options){
        .producer = en->role == BATON_PRODUCER,
        .key = eo->key ? io->key : NULL,
        .key_bytes = eo->key_bytes,
        .dead_ns = eo->dead_ns,
        .tag_payload = eo->tag_payload,
    };
    if (eo->key && (eo->key_bytes < HANDOFF_MIN_KEY || eo->key_bytes > HANDOFF_MAX_KEY))
        return base_fail(e, BATON_ERR_USAGE, "a key of %zu bytes, %u to %u are possible",
                         eo->key_bytes, HANDOFF_MIN_KEY, HANDOFF_MAX_KEY);
    if (eo->tag_payload && !eo->key)
        return base_fail(e, BATON_ERR_USAGE, "tags over payload need a key");
    if (eo->key)
        memcpy(io->key, eo->key, eo->key_bytes);
    return 0;
}

static int open_fixed(struct baton_engine *en, int fd, const struct baton_engine_options *eo,
                      struct baton_error *e)
{
    struct engine_peer *p = en->io.peers;
    struct handoff_callbacks cb = engine_callbacks;
    cb.ctx = p;
    base_fail(&p->why, BATON_ERR_USAGE, "the engine was opened without a peer");
    if (eo->no_peer)
        return 0;
    /* A link is the public name of a transport's end. */
    int rc = eo->link ? handoff_conn_open((struct transport *)eo->link, &en->io.options, &cb,
                                          &p->conn, e)
                      : handoff_conn_open_fd(fd, &en->io.options, &cb, &p->conn, e);
    if (rc == 0)
        atomic_fetch_add(&en->n_peers, 1);
    return rc;
}

int engine_io_open(struct baton_engine *en, int fd, const struct baton_engine_options *eo,
                   struct baton_error *e)
{
    en->io.peers[0].engine = en;
    en->io.peers[0].used = true;
    int rc = copy_options(en, eo, e);
    if (rc == 0 && eo->listen)
        rc = handoff_listen(eo->listen, &en->io.options, &en->io.listener, e);
    return rc ? rc : open_fixed(en, fd, eo, e);
}

void engine_io_close(struct baton_engine *en)
{
    struct engine_message m;
    engine_peers_close(en);
    base_forget(en->io.key, sizeof en->io.key);
    /* Offers that nobody took: in the queue, and held. */
    while (en->inbox && base_queue_pop(en->inbox, &m, 0)) {
        if (m.kind == ENGINE_OFFERED)
            free(m.offer);
        free(m.from);
    }
    while (en->outbox && base_queue_pop(en->outbox, &m, 0))
        free(m.from);
    for (struct engine_offer *o = en->offers, *next; o; o = next) {
        next = o->next;
        free(o);
    }
}
