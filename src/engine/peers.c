/* SPDX-License-Identifier: Apache-2.0 */
/* The connections of an engine: the fixed peer, consumers that were accepted, producers that were
 * dialed for a pull. All belong to the I/O thread; only the waiting for an answer to a dial, which
 * may take long and resolves names, is done by a thread of its own.
 *
 * Who dials keeps a connection for the next pull and lets go of it when it was idle for long. Who
 * accepts never does: a claim may be on its way. Those that do not prove that they have the key go
 * by themselves.
 */
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine_priv.h"

#define IDLE_NS 30000000000u
#define ACCEPT_AGAIN_NS 100000000u /* after a failure, as of descriptors */

static struct engine_peer *free_slot(struct engine_io *io)
{
    for (size_t i = 1; i < ENGINE_MAX_PEERS; i++)
        if (!io->peers[i].used)
            return &io->peers[i];
    return NULL;
}

static void take_slot(struct engine_peer *p, struct baton_engine *en)
{
    memset(p, 0, sizeof *p);
    p->engine = en;
    p->used = true;
}

/* The fixed peer's place stays taken. */
static void drop(struct engine_peer *p)
{
    if (p->conn) {
        handoff_conn_close(p->conn);
        atomic_fetch_sub(&p->engine->n_peers, 1);
    }
    p->conn = NULL;
    free(p->address);
    p->address = NULL;
    p->used = p == &p->engine->io.peers[0];
}

static bool has_entries(const struct engine_peer *p)
{
    const struct engine_io *io = &p->engine->io;
    for (size_t i = 0; i < ENGINE_MAX_OFFERS; i++)
        if (io->entries[i].used && !io->entries[i].over && io->entries[i].peer == p)
            return true;
    return false;
}

/* Each at most once, since entries go. */
static void end_entries(struct engine_peer *p, const struct baton_error *why)
{
    struct engine_io *io = &p->engine->io;
    for (size_t i = 0; i < ENGINE_MAX_OFFERS; i++)
        if (io->entries[i].used && !io->entries[i].over && io->entries[i].peer == p)
            engine_io_end(p->engine, &io->entries[i], why);
}

/* ---- dialing ------------------------------------------------------------------------------ */

static void *dialer(void *arg)
{
    struct engine_peer *p = arg;
    const struct engine_message m = {.kind = ENGINE_DIALED};
    struct baton_engine *en = p->engine;
    uint64_t dead_ns = en->io.options.dead_ns;
    handoff_dial(p->address, dead_ns ? dead_ns : HANDOFF_DEAD_NS, &p->transport, &p->why);
    atomic_store(&p->answered, true);
    /* Where the queue is full the I/O thread is awake and will look. */
    base_queue_push(en->outbox, &m);
    return NULL;
}

/* The one that was idle longest makes room. */
static struct engine_peer *evict(struct engine_io *io)
{
    struct engine_peer *victim = NULL;
    for (struct engine_peer *p = io->peers + 1; p < io->peers + ENGINE_MAX_PEERS; p++)
        if (p->used && p->address && p->idle_ns && (!victim || p->idle_ns < victim->idle_ns))
            victim = p;
    if (victim)
        drop(victim);
    return victim;
}

static int dial(struct baton_engine *en, const char *from, struct engine_peer **out,
                struct baton_error *e)
{
    struct engine_peer *p = free_slot(&en->io);
    if (!p && !(p = evict(&en->io)))
        return base_fail(e, BATON_ERR_BUSY, "%u connections are in use", ENGINE_MAX_PEERS - 1);
    take_slot(p, en);
    p->address = base_try_strdup(from, e);
    int rc = p->address ? 0 : BATON_ERR_NOMEM;
    if (rc == 0) {
        int err = pthread_create(&p->dialer, NULL, dialer, p);
        rc = err ? base_fail_errno(e, BATON_ERR_NOMEM, err, "a thread to connect") : 0;
    }
    if (rc) {
        drop(p);
        return rc;
    }
    p->dialing = true;
    *out = p;
    return 0;
}

int engine_peer_get(struct baton_engine *en, const char *from, struct engine_peer **out,
                    struct baton_error *e)
{
    struct engine_peer *p = en->io.peers;
    if (!from) {
        *out = p;
        if (p->conn)
            return 0;
        *e = p->why;
        return p->why.code;
    }
    for (p++; p < en->io.peers + ENGINE_MAX_PEERS; p++)
        if (p->used && p->address && !strcmp(p->address, from)) {
            p->idle_ns = 0;
            *out = p;
            return 0;
        }
    return dial(en, from, out, e);
}

static void take_dial(struct engine_peer *p)
{
    struct baton_engine *en = p->engine;
    struct handoff_callbacks cb = engine_callbacks;
    cb.ctx = p;
    pthread_join(p->dialer, NULL);
    p->dialing = false;
    if (p->transport && handoff_conn_open(p->transport, &en->io.options, &cb, &p->conn, &p->why))
        handoff_link_close(p->transport);
    p->transport = NULL;
    if (p->conn) {
        atomic_fetch_add(&en->n_peers, 1);
        engine_io_dialed(p);
    } else {
        end_entries(p, &p->why);
        drop(p);
    }
}

/* ---- accepting ---------------------------------------------------------------------------- */

static void accept_all(struct baton_engine *en, uint64_t now)
{
    struct engine_io *io = &en->io;
    struct engine_peer *p;
    while (io->listener && now >= io->accept_after_ns && (p = free_slot(io))) {
        struct handoff_callbacks cb = engine_callbacks;
        struct baton_error e;
        cb.ctx = p;
        take_slot(p, en);
        int rc = handoff_accept(io->listener, &io->options, &cb, &p->conn, &e);
        if (rc == 0) {
            atomic_fetch_add(&en->n_peers, 1);
            continue;
        }
        p->used = false;
        if (rc == BATON_ERR_BUSY)
            return;
        base_log(BASE_LOG_WARN, "engine: %s", e.text);
        io->accept_after_ns = now + ACCEPT_AGAIN_NS;
    }
}

/* ---- turns -------------------------------------------------------------------------------- */

void engine_peers_turn(struct baton_engine *en)
{
    struct engine_io *io = &en->io;
    uint64_t now = base_now_ns();
    for (struct engine_peer *p = io->peers + 1; p < io->peers + ENGINE_MAX_PEERS; p++) {
        if (p->dialing && atomic_load(&p->answered))
            take_dial(p);
        if (!p->used || !p->address || p->dialing)
            continue;
        if (has_entries(p))
            p->idle_ns = 0;
        else if (!p->idle_ns)
            p->idle_ns = now;
        else if (now - p->idle_ns > IDLE_NS)
            drop(p);
    }
    accept_all(en, now);
}

static void step(struct engine_peer *p)
{
    struct baton_engine *en = p->engine;
    struct baton_error why;
    if (!p->conn)
        return;
    if (handoff_conn_step(p->conn, &why) == 0) {
        if (!p->greeted && handoff_conn_ready(p->conn)) {
            p->greeted = true;
            engine_io_dialed(p);
        }
        return;
    }
    base_log(BASE_LOG_DEBUG, "engine: a connection ended: %s", why.text);
    p->why = why;
    drop(p);
    /* Whatever handoff_conn_step did not end itself. */
    end_entries(p, &why);
    if (p != en->io.peers)
        return;
    const struct engine_message m = {.kind = ENGINE_DEAD, .why = why};
    base_queue_push_wait(en->inbox, &m);
}

void engine_peers_step(struct baton_engine *en)
{
    for (size_t i = 0; i < ENGINE_MAX_PEERS; i++)
        step(&en->io.peers[i]);
}

bool engine_peers_busy(const struct baton_engine *en)
{
    for (size_t i = 0; i < ENGINE_MAX_PEERS; i++)
        if (en->io.peers[i].conn && handoff_conn_busy(en->io.peers[i].conn))
            return true;
    return false;
}

int engine_peers_poll(struct baton_engine *en, struct pollfd *fds, uint64_t *timeout_ns)
{
    struct engine_io *io = &en->io;
    uint64_t one, now = base_now_ns();
    int n = 0;
    *timeout_ns = UINT64_MAX;
    for (size_t i = 0; i < ENGINE_MAX_PEERS; i++)
        if (io->peers[i].conn) {
            n += handoff_conn_poll(io->peers[i].conn, fds + n, &one);
            *timeout_ns = one < *timeout_ns ? one : *timeout_ns;
        }
    if (io->listener && now < io->accept_after_ns)
        *timeout_ns = *timeout_ns < ACCEPT_AGAIN_NS ? *timeout_ns : ACCEPT_AGAIN_NS;
    else if (io->listener && free_slot(io))
        fds[n++] = (struct pollfd){handoff_listener_fd(io->listener), POLLIN, 0};
    return n;
}

void engine_peers_close(struct baton_engine *en)
{
    struct engine_io *io = &en->io;
    for (struct engine_peer *p = io->peers; p < io->peers + ENGINE_MAX_PEERS; p++) {
        if (!p->used)
            continue;
        if (p->dialing)
            pthread_join(p->dialer, NULL);
        handoff_link_close(p->transport);
        drop(p);
    }
    handoff_listener_close(io->listener);
    io->listener = NULL;
}
