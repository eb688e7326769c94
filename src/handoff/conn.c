/* SPDX-License-Identifier: Apache-2.0 */
/* A connection: HELLO, heartbeats, life and death. Frames go out by out.c and come in by in.c. */
#include <poll.h>
#include <stdlib.h>
#include <string.h>

#include "handoff/handoff_priv.h"
#include "transport/transport.h"

#define ANSWERS_BYTES (4u << 20) /* unread answers after which a peer is said not to read */

const char *handoff_peer_role(const struct handoff_conn *c)
{
    return c->producer ? "consumer" : "producer";
}

int handoff_buffer_fit(struct handoff_buffer *b, size_t n, struct baton_error *e)
{
    if (n <= b->capacity)
        return 0;
    uint8_t *data = base_try_alloc(n, 1, e);
    if (!data)
        return BATON_ERR_NOMEM;
    free(b->data);
    b->data = data;
    b->capacity = n;
    return 0;
}

void handoff_conn_doom(struct handoff_conn *c, const struct baton_error *why)
{
    if (!c->death.code)
        c->death = *why;
}

/* ---- frames of the connection itself -------------------------------------------------------- */

static int push_hello(struct handoff_conn *c, struct baton_error *e)
{
    struct handoff_hello h = {.min_version = HANDOFF_VERSION,
                              .max_version = HANDOFF_VERSION,
                              .role = c->producer ? 1 : 2,
                              .auth = c->auth.wanted,
                              .heartbeat_ns = c->heartbeat_ns,
                              .dead_ns = c->dead_ns};
    int rc = base_random(h.nonce, sizeof h.nonce, e);
    if (rc)
        return rc;
    struct handoff_out *f = handoff_out_new(HANDOFF_HELLO, 0, HANDOFF_HELLO_BYTES, e);
    if (!f)
        return BATON_ERR_NOMEM;
    handoff_hello_write(f->control, &h);
    memcpy(c->hello, f->control, sizeof c->hello);
    handoff_out_push(c, f);
    return 0;
}

int handoff_hello_take(struct handoff_conn *c, const uint8_t *control, struct baton_error *e)
{
    struct handoff_hello h;
    if (c->hello_seen)
        return base_fail(e, BATON_ERR_PEER, "a second HELLO");
    int rc = handoff_hello_read(control, &h, e);
    if (rc)
        return rc;
    if (h.min_version > HANDOFF_VERSION || h.max_version < HANDOFF_VERSION)
        return base_fail(e, BATON_ERR_MISMATCH,
                         "wire version: this end speaks %u, the peer %u to %u", HANDOFF_VERSION,
                         h.min_version, h.max_version);
    if (h.role != (c->producer ? 2u : 1u))
        return base_fail(e, BATON_ERR_MISMATCH, "this end is a %s and needs a %s, the peer is %s",
                         c->producer ? "producer" : "consumer", handoff_peer_role(c),
                         h.role == 1   ? "a producer too"
                         : h.role == 2 ? "a consumer too"
                                       : "neither");
    rc = handoff_auth_agree(&c->auth, h.auth, c->producer ? c->hello : control,
                            c->producer ? control : c->hello, c->producer, e);
    if (rc)
        return rc;
    if (h.heartbeat_ns >= c->dead_ns || c->heartbeat_ns >= h.dead_ns)
        return base_fail(e, BATON_ERR_MISMATCH,
                         "heartbeats every %.1f and %.1f s, death after %.1f and %.1f s",
                         (double)c->heartbeat_ns * 1e-9, (double)h.heartbeat_ns * 1e-9,
                         (double)c->dead_ns * 1e-9, (double)h.dead_ns * 1e-9);
    c->peer_takes = h.takes;
    c->hello_seen = true;
    return 0;
}

int handoff_bye_take(struct handoff_conn *c, const uint8_t *control, struct baton_error *e)
{
    struct baton_error why;
    handoff_reason_read(control, &why);
    int code = why.code == BATON_ERR_CANCELLED ? BATON_ERR_PEER : why.code;
    return base_fail(e, code, "%s closed the connection: %s", handoff_peer_role(c), why.text);
}

/* ---- life and death ------------------------------------------------------------------------- */

int handoff_conn_open(struct transport *t, const struct handoff_options *o,
                      const struct handoff_callbacks *cb, struct handoff_conn **out,
                      struct baton_error *e)
{
    struct handoff_conn *c = base_try_alloc(1, sizeof *c, e);
    if (!c)
        return BATON_ERR_NOMEM;
    c->cb = *cb;
    c->producer = o->producer;
    c->dead_ns = o->dead_ns ? o->dead_ns : HANDOFF_DEAD_NS;
    c->heartbeat_ns = o->heartbeat_ns ? o->heartbeat_ns : 1000000000u;
    if (!o->heartbeat_ns && c->heartbeat_ns > c->dead_ns / 4)
        c->heartbeat_ns = c->dead_ns / 4 ? c->dead_ns / 4 : 1;
    c->out_tail = &c->out_first;
    int rc = handoff_auth_open(&c->auth, o, e);
    if (rc == 0)
        rc = handoff_landing_open(c, t, o, e);
    if (rc == 0)
        rc = c->heartbeat_ns < c->dead_ns / 2 + 1
                 ? push_hello(c, e)
                 : base_fail(e, BATON_ERR_USAGE, "heartbeats every %llu ns, death after %llu ns",
                             (unsigned long long)c->heartbeat_ns, (unsigned long long)c->dead_ns);
    if (rc) {
        handoff_conn_close(c);
        return rc;
    }
    c->t = t;
    *out = c;
    return 0;
}

/* One attempt to say why, without waiting; then the stream is closed and all requests end. */
static void conn_die(struct handoff_conn *c, const struct baton_error *why,
                     const struct baton_error *say)
{
    struct baton_error copy = *why;
    handoff_conn_doom(c, why);
    if (c->t) {
        if (!c->hello_seen || !c->auth.proven)
            handoff_out_drop_waiting(c);
        c->hello_seen = c->auth.proven = true; /* BYE needs no answer to HELLO */
        if (say && handoff_out_reason(c, HANDOFF_BYE, say) == 0) {
            struct handoff_request *requests = c->requests;
            c->requests = NULL; /* nothing but what is queued already */
            handoff_out_write(c, NULL);
            c->requests = requests;
        }
        transport_close(c->t);
        c->t = NULL;
    }
    handoff_out_drop(c);
    handoff_landing_drop(c);
    handoff_request_end_all(c, &copy);
}

void handoff_conn_close(struct handoff_conn *c)
{
    static const struct baton_error cancelled = {BATON_ERR_CANCELLED, "connection closed"};
    if (!c)
        return;
    conn_die(c, &cancelled, &cancelled);
    free(c->in_control.data);
    free(c->in_payload.data);
    free(c->stage.data);
    handoff_auth_close(&c->auth);
    free(c);
}

uint64_t handoff_conn_heard(const struct handoff_conn *c)
{
    return c->last_in_ns;
}

bool handoff_conn_dead(const struct handoff_conn *c)
{
    return c->death.code != 0;
}

bool handoff_conn_ready(const struct handoff_conn *c)
{
    return c->t && c->hello_seen;
}

bool handoff_conn_busy(const struct handoff_conn *c)
{
    return c->t && (c->writing || c->out_first || handoff_producer_ready(c));
}

/* Silence either way: a heartbeat when nothing else went out, death when nothing came in. Silence
 * counts while this end listens: one that was stopped itself for long (a suspended shell job, both
 * processes alike) listens anew before it judges. */
static int conn_clock(struct handoff_conn *c, struct baton_error *e)
{
    uint64_t now = base_now_ns();
    if (now - c->last_step_ns > c->dead_ns / 2)
        c->last_in_ns = now;
    if (!c->proof_due_ns)
        c->proof_due_ns = now + c->dead_ns;
    c->last_step_ns = now;
    if (now - c->last_in_ns >= c->dead_ns)
        return base_fail(e, BATON_ERR_PEER, "%s silent for %.1f s", handoff_peer_role(c),
                         (double)(now - c->last_in_ns) * 1e-9);
    if (!c->auth.proven && now >= c->proof_due_ns)
        return base_fail(e, BATON_ERR_PEER, "%s did not prove within %.1f s that it has the key",
                         handoff_peer_role(c), (double)c->dead_ns * 1e-9);
    if (now - c->last_out_ns < c->heartbeat_ns || handoff_out_ready(c) || !handoff_out_may_send(c))
        return 0;
    if (handoff_out_reason(c, HANDOFF_HEARTBEAT, NULL))
        return base_fail(e, BATON_ERR_NOMEM, "no memory for a heartbeat");
    return 0;
}

static int conn_move(struct handoff_conn *c, struct baton_error *e)
{
    int rc = handoff_in_read(c, e);
    if (rc || c->death.code)
        return rc;
    rc = conn_clock(c, e);
    if (rc)
        return rc;
    rc = handoff_out_write(c, e);
    c->landing.owes = false;
    if (rc == BATON_ERR_PEER) {
        /* It may have said why before it went. */
        rc = handoff_in_read(c, e);
        return rc ? rc : base_fail(e, BATON_ERR_PEER, "%s process ended", handoff_peer_role(c));
    }
    if (!rc && !c->producer && c->out_bytes > ANSWERS_BYTES)
        return base_fail(e, BATON_ERR_PEER, "the producer does not read its answers");
    return rc;
}

int handoff_conn_step(struct handoff_conn *c, struct baton_error *e)
{
    struct baton_error why = {0};
    if (c->t) {
        int rc = conn_move(c, &why);
        if (rc)
            handoff_conn_doom(c, &why);
        if (c->death.code) {
            why = c->death;
            conn_die(c, &why, &why);
        }
    }
    if (!c->death.code)
        return 0;
    if (e)
        *e = c->death;
    return c->death.code;
}

int handoff_conn_poll(struct handoff_conn *c, struct pollfd *fds, uint64_t *timeout_ns)
{
    *timeout_ns = 0;
    if (!c->t)
        return 0;
    uint64_t now = base_now_ns(), due = now + c->heartbeat_ns, dead = c->last_in_ns + c->dead_ns;
    if (handoff_out_may_send(c) && !handoff_out_ready(c) && due > c->last_out_ns + c->heartbeat_ns)
        due = c->last_out_ns + c->heartbeat_ns;
    if (due > dead)
        due = dead;
    if (!c->auth.proven && c->proof_due_ns && due > c->proof_due_ns)
        due = c->proof_due_ns;
    *timeout_ns = due > now && !c->death.code ? due - now : 0;
    return transport_poll(c->t, handoff_out_ready(c), fds);
}
