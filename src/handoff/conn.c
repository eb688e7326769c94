/* SPDX-License-Identifier: Apache-2.0 */
/* A connection: frames in, frames out, HELLO, heartbeats, death. */
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "handoff/handoff_priv.h"
#include "transport/transport.h"

#define STEP_BYTES (16u << 20)   /* moved in one direction by one step */
#define ANSWERS_BYTES (4u << 20) /* unread answers after which a peer is said not to read */

static const char *peer_role(const struct handoff_conn *c)
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

/* ---- output --------------------------------------------------------------------------------- */

struct handoff_out *handoff_out_new(unsigned type, uint64_t request, size_t control,
                                    struct baton_error *e)
{
    struct handoff_out *f = base_try_alloc(1, sizeof *f + control, e);
    if (!f)
        return NULL;
    f->header.version = HANDOFF_VERSION;
    f->header.type = (uint8_t)type;
    f->header.control = (uint32_t)control;
    f->header.request = request;
    return f;
}

void handoff_out_push(struct handoff_conn *c, struct handoff_out *f)
{
    f->next = NULL;
    *c->out_tail = f;
    c->out_tail = &f->next;
    c->out_bytes += HANDOFF_HEADER + f->header.control;
}

bool handoff_out_pending(const struct handoff_conn *c, uint64_t request)
{
    if (c->writing && c->writing->header.request == request)
        return true;
    for (const struct handoff_out *f = c->out_first; f; f = f->next)
        if (f->header.request == request)
            return true;
    return false;
}

/* Choose the frame that is written next: queued control frames before payload, and nothing but
 * this end's HELLO before the peer's has been read. */
static struct handoff_out *out_take(struct handoff_conn *c)
{
    if (!c->hello_seen && c->out_sequence > 0)
        return NULL;
    struct handoff_out *f = c->out_first;
    if (!f)
        f = handoff_producer_next(c);
    if (c->out_first) { /* a COMMIT may have been queued just now, and goes first then */
        f = c->out_first;
        c->out_first = f->next;
        if (!c->out_first)
            c->out_tail = &c->out_first;
        c->out_bytes -= HANDOFF_HEADER + f->header.control;
    }
    if (f) {
        f->header.sequence = c->out_sequence++;
        f->header.body_check = handoff_body_check(f->header.flags, f->control, f->header.control,
                                                  f->payload, f->header.payload);
        handoff_header_write(f->raw, &f->header);
        c->written = 0;
    }
    return f;
}

/* What is left of the frame under way. */
static int out_iov(const struct handoff_conn *c, struct iovec iov[3])
{
    const struct handoff_out *f = c->writing;
    const struct iovec parts[3] = {{(void *)f->raw, HANDOFF_HEADER},
                                   {(void *)f->control, f->header.control},
                                   {(void *)f->payload, f->header.payload}};
    size_t skip = c->written;
    int n = 0;
    for (int i = 0; i < 3; i++) {
        size_t cut = skip < parts[i].iov_len ? skip : parts[i].iov_len;
        skip -= cut;
        if (cut < parts[i].iov_len)
            iov[n++] = (struct iovec){(uint8_t *)parts[i].iov_base + cut, parts[i].iov_len - cut};
    }
    return n;
}

static int conn_write(struct handoff_conn *c, struct baton_error *e)
{
    for (size_t total = 0; total < STEP_BYTES;) {
        if (!c->writing && !(c->writing = out_take(c)))
            return 0;
        struct iovec iov[3];
        size_t moved = 0;
        int rc = transport_send(c->t, iov, out_iov(c, iov), &moved, e);
        if (rc)
            return rc;
        if (moved == 0)
            return 0;
        total += moved;
        c->written += moved;
        c->last_out_ns = base_now_ns();
        if (c->written ==
            HANDOFF_HEADER + (size_t)c->writing->header.control + c->writing->header.payload) {
            struct handoff_out *f = c->writing;
            c->writing = NULL;
            handoff_piece_sent(c, f);
            free(f);
        }
    }
    return 0;
}

static void out_drop(struct handoff_conn *c)
{
    while (c->out_first) {
        struct handoff_out *f = c->out_first;
        c->out_first = f->next;
        free(f);
    }
    c->out_tail = &c->out_first;
    c->out_bytes = 0;
    free(c->writing);
    c->writing = NULL;
}

static int push_reason(struct handoff_conn *c, unsigned type, const struct baton_error *why)
{
    struct handoff_out *f = handoff_out_new(type, 0, why ? HANDOFF_REASON_BYTES : 0, NULL);
    if (!f)
        return BATON_ERR_NOMEM;
    if (why)
        handoff_reason_write(f->control, why);
    handoff_out_push(c, f);
    return 0;
}

/* ---- frames of the connection itself -------------------------------------------------------- */

static int push_hello(struct handoff_conn *c, struct baton_error *e)
{
    struct handoff_hello h = {.min_version = HANDOFF_VERSION,
                              .max_version = HANDOFF_VERSION,
                              .role = c->producer ? 1 : 2,
                              .heartbeat_ns = c->heartbeat_ns,
                              .dead_ns = c->dead_ns};
    int rc = base_random(h.nonce, sizeof h.nonce, e);
    if (rc)
        return rc;
    struct handoff_out *f = handoff_out_new(HANDOFF_HELLO, 0, HANDOFF_HELLO_BYTES, e);
    if (!f)
        return BATON_ERR_NOMEM;
    handoff_hello_write(f->control, &h);
    handoff_out_push(c, f);
    return 0;
}

static int take_hello(struct handoff_conn *c, const uint8_t *control, struct baton_error *e)
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
                         c->producer ? "producer" : "consumer", peer_role(c),
                         h.role == 1   ? "a producer too"
                         : h.role == 2 ? "a consumer too"
                                       : "neither");
    if (h.auth != 0)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "the peer wants authentication %u", h.auth);
    if (h.heartbeat_ns >= c->dead_ns || c->heartbeat_ns >= h.dead_ns)
        return base_fail(e, BATON_ERR_MISMATCH,
                         "heartbeats every %.1f and %.1f s, death after %.1f and %.1f s",
                         (double)c->heartbeat_ns * 1e-9, (double)h.heartbeat_ns * 1e-9,
                         (double)c->dead_ns * 1e-9, (double)h.dead_ns * 1e-9);
    c->hello_seen = true;
    return 0;
}

static int take_bye(struct handoff_conn *c, const uint8_t *control, struct baton_error *e)
{
    struct baton_error why;
    handoff_reason_read(control, &why);
    int code = why.code == BATON_ERR_CANCELLED ? BATON_ERR_PEER : why.code;
    return base_fail(e, code, "%s closed the connection: %s", peer_role(c), why.text);
}

/* ---- input ---------------------------------------------------------------------------------- */

/* A frame for a request that ended here: its final frame completes the end, anything else was on
 * its way when this end's final frame left. */
static int take_late(struct handoff_conn *c, struct handoff_request *r, unsigned type)
{
    static const struct baton_error none = {0, ""};
    if (type == HANDOFF_REFUSE || type >= HANDOFF_ACK)
        handoff_request_finished(c, r, &none);
    return 0;
}

static int take_final(struct handoff_conn *c, struct handoff_request *r, struct baton_error *e)
{
    struct baton_error why;
    if (c->in.type == HANDOFF_CLOSE)
        return base_fail(e, BATON_ERR_PEER, "CLOSE for request %llu, which is open",
                         (unsigned long long)r->id);
    handoff_reason_read(c->in_control.data, &why);
    handoff_request_finished(c, r, &why);
    return 0;
}

static int take_of_request(struct handoff_conn *c, struct baton_error *e)
{
    unsigned type = c->in.type;
    struct handoff_request *r = handoff_request_find(c, c->in.request);
    if (type == HANDOFF_OFFER && r)
        return base_fail(e, BATON_ERR_PEER, "OFFER of request %llu, which is open",
                         (unsigned long long)r->id);
    if (type == HANDOFF_OFFER)
        return handoff_consumer_offer(c, c->in_control.data, e);
    if (!r)
        return base_fail(e, BATON_ERR_PEER, "%s for unknown request %llu", handoff_type_name(type),
                         (unsigned long long)c->in.request);
    if (r->state == HANDOFF_ENDED)
        return take_late(c, r, type);
    if (type == HANDOFF_ABORT || type == HANDOFF_CLOSE)
        return take_final(c, r, e);
    if (c->producer)
        return handoff_producer_take(c, r, c->in_control.data, e);
    return handoff_consumer_take(c, r, c->in_control.data, c->in_payload.data, e);
}

static int take_frame(struct handoff_conn *c, struct baton_error *e)
{
    const struct handoff_header *h = &c->in;
    if (handoff_body_check(h->flags, c->in_control.data, h->control, c->in_payload.data,
                           h->payload) != h->body_check)
        return base_fail(e, BATON_ERR_INTEGRITY, "frame %llu (%s) does not match its check",
                         (unsigned long long)h->sequence, handoff_type_name(h->type));
    if (h->type == HANDOFF_HELLO)
        return take_hello(c, c->in_control.data, e);
    if (h->type == HANDOFF_BYE)
        return take_bye(c, c->in_control.data, e);
    if (h->type == HANDOFF_HEARTBEAT)
        return 0;
    return take_of_request(c, e);
}

static int take_header(struct handoff_conn *c, struct baton_error *e)
{
    int rc = handoff_header_read(c->in_raw, !c->producer, &c->in, e);
    if (rc)
        return rc;
    if (c->in.sequence != c->in_sequence)
        return base_fail(e, BATON_ERR_PEER, "frame %llu (%s) where frame %llu was due",
                         (unsigned long long)c->in.sequence, handoff_type_name(c->in.type),
                         (unsigned long long)c->in_sequence);
    c->in_sequence++;
    /* BYE may come first: a peer that cannot read our HELLO says so without its own. */
    if (!c->hello_seen && c->in.type != HANDOFF_HELLO && c->in.type != HANDOFF_BYE)
        return base_fail(e, BATON_ERR_PEER, "%s before HELLO", handoff_type_name(c->in.type));
    rc = handoff_buffer_fit(&c->in_control, c->in.control, e);
    return rc ? rc : handoff_buffer_fit(&c->in_payload, c->in.payload, e);
}

/* Where the next bytes go, and how many the part still lacks. */
static uint8_t *in_target(struct handoff_conn *c, size_t *want)
{
    size_t n = c->in_part == HANDOFF_IN_HEADER    ? HANDOFF_HEADER
               : c->in_part == HANDOFF_IN_CONTROL ? c->in.control
                                                  : c->in.payload;
    uint8_t *base = c->in_part == HANDOFF_IN_HEADER    ? c->in_raw
                    : c->in_part == HANDOFF_IN_CONTROL ? c->in_control.data
                                                       : c->in_payload.data;
    *want = n - c->in_got;
    return *want ? base + c->in_got : NULL;
}

/* The part is complete: go on to the next, and from the last to the frame. */
static int in_advance(struct handoff_conn *c, struct baton_error *e)
{
    c->in_got = 0;
    if (c->in_part == HANDOFF_IN_HEADER) {
        c->in_part = HANDOFF_IN_CONTROL;
        c->in_began_ns = c->last_in_ns;
        return take_header(c, e);
    }
    if (c->in_part == HANDOFF_IN_CONTROL) {
        c->in_part = HANDOFF_IN_PAYLOAD;
        return 0;
    }
    c->in_part = HANDOFF_IN_HEADER;
    return take_frame(c, e);
}

static int conn_read(struct handoff_conn *c, struct baton_error *e)
{
    for (size_t total = 0; total < STEP_BYTES;) {
        size_t want, moved = 0;
        uint8_t *to = in_target(c, &want);
        if (want) {
            int rc = transport_recv(c->t, to, want, &moved, e);
            if (rc == BATON_ERR_PEER)
                return base_fail(e, rc, "%s process ended", peer_role(c));
            if (rc || moved == 0)
                return rc;
            c->last_in_ns = base_now_ns();
        }
        c->in_got += moved;
        total += moved;
        if (moved == want) {
            int rc = in_advance(c, e);
            if (rc || c->death.code)
                return rc;
        }
    }
    return 0;
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
    c->dead_ns = o->dead_ns ? o->dead_ns : 10000000000u;
    c->heartbeat_ns = o->heartbeat_ns ? o->heartbeat_ns : 1000000000u;
    if (!o->heartbeat_ns && c->heartbeat_ns > c->dead_ns / 4)
        c->heartbeat_ns = c->dead_ns / 4 ? c->dead_ns / 4 : 1;
    c->out_tail = &c->out_first;
    int rc = c->heartbeat_ns < c->dead_ns / 2 + 1
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
        c->hello_seen = true; /* BYE needs no answer to HELLO */
        if (say && push_reason(c, HANDOFF_BYE, say) == 0) {
            struct handoff_request *requests = c->requests;
            c->requests = NULL; /* nothing but what is queued already */
            conn_write(c, NULL);
            c->requests = requests;
        }
        transport_close(c->t);
        c->t = NULL;
    }
    out_drop(c);
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
    free(c);
}

static bool has_output(const struct handoff_conn *c)
{
    if (c->writing)
        return true;
    if (!c->hello_seen && c->out_sequence > 0)
        return false;
    return c->out_first || handoff_producer_ready(c);
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
    c->last_step_ns = now;
    if (now - c->last_in_ns >= c->dead_ns)
        return base_fail(e, BATON_ERR_PEER, "%s silent for %.1f s", peer_role(c),
                         (double)(now - c->last_in_ns) * 1e-9);
    if (now - c->last_out_ns < c->heartbeat_ns || has_output(c) || !c->hello_seen)
        return 0;
    if (push_reason(c, HANDOFF_HEARTBEAT, NULL))
        return base_fail(e, BATON_ERR_NOMEM, "no memory for a heartbeat");
    return 0;
}

static int conn_move(struct handoff_conn *c, struct baton_error *e)
{
    int rc = conn_read(c, e);
    if (rc || c->death.code)
        return rc;
    rc = conn_clock(c, e);
    if (rc)
        return rc;
    rc = conn_write(c, e);
    if (rc == BATON_ERR_PEER) {
        /* It may have said why before it went. */
        rc = conn_read(c, e);
        return rc ? rc : base_fail(e, BATON_ERR_PEER, "%s process ended", peer_role(c));
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
    if (c->hello_seen && !has_output(c) && due > c->last_out_ns + c->heartbeat_ns)
        due = c->last_out_ns + c->heartbeat_ns;
    if (due > dead)
        due = dead;
    *timeout_ns = due > now && !c->death.code ? due - now : 0;
    return transport_poll(c->t, has_output(c), fds);
}
