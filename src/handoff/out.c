/* SPDX-License-Identifier: Apache-2.0 */
/* Output of a connection: what waits, which frame goes next, its checks and its tag. */
#include <stdlib.h>
#include <sys/uio.h>

#include "handoff/handoff_priv.h"
#include "transport/transport.h"

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

/* The second frame of an authenticated end: a heartbeat that shows that it has the key. */
static bool owes_proof(const struct handoff_conn *c)
{
    return c->hello_seen && c->auth.level && c->out_sequence == 1;
}

/* Nothing but this end's HELLO leaves before the peer's has been read, and nothing but the proof
 * before the peer has given its own. */
bool handoff_out_may_send(const struct handoff_conn *c)
{
    return c->out_sequence == 0 || owes_proof(c) || (c->hello_seen && c->auth.proven);
}

/* HELLO has no tag: the keys come from it. */
static void out_seal(struct handoff_conn *c, struct handoff_out *f)
{
    bool tagged = c->auth.level && f->header.type != HANDOFF_HELLO;
    if (tagged)
        f->header.flags |= HANDOFF_FLAG_TAG;
    f->header.sequence = c->out_sequence++;
    f->header.body_check = handoff_body_check(f->header.flags, f->control, f->header.control,
                                              f->payload, f->header.payload);
    handoff_header_write(f->raw, &f->header);
    if (tagged)
        handoff_auth_tag(&c->auth, &c->auth.out, f->raw, f->control, f->header.control, f->payload,
                         f->header.payload, f->tag);
}

static struct handoff_out *out_pop(struct handoff_conn *c)
{
    struct handoff_out *f = c->out_first;
    c->out_first = f->next;
    if (!c->out_first)
        c->out_tail = &c->out_first;
    c->out_bytes -= HANDOFF_HEADER + f->header.control;
    return f;
}

/* Choose the frame that is written next: queued control frames before payload. */
static struct handoff_out *out_take(struct handoff_conn *c)
{
    struct handoff_out *f = NULL;
    if (!handoff_out_may_send(c))
        return NULL;
    if (owes_proof(c)) {
        struct baton_error e = {0};
        f = handoff_out_new(HANDOFF_HEARTBEAT, 0, 0, &e);
        if (!f)
            handoff_conn_doom(c, &e);
    } else {
        if (!c->out_first)
            f = handoff_producer_next(c);
        if (c->out_first) /* a COMMIT may have been queued just now, and goes first then */
            f = out_pop(c);
    }
    if (f) {
        out_seal(c, f);
        c->written = 0;
    }
    return f;
}

#define OUT_PARTS (3 + HANDOFF_MAX_RUNS)

/* One more part, without what of the first *skip bytes falls into it. */
static int add_part(struct iovec *iov, int n, const uint8_t *data, size_t bytes, size_t *skip)
{
    size_t cut = *skip < bytes ? *skip : bytes;
    *skip -= cut;
    if (cut == bytes)
        return n;
    iov[n] = (struct iovec){(uint8_t *)data + cut, bytes - cut};
    return n + 1;
}

/* What is left of the frame under way. */
static int out_iov(const struct handoff_conn *c, struct iovec iov[OUT_PARTS])
{
    const struct handoff_out *f = c->writing;
    size_t skip = c->written;
    int n = add_part(iov, 0, f->raw, HANDOFF_HEADER, &skip);
    n = add_part(iov, n, f->control, f->header.control, &skip);
    if (!handoff_gathered(f))
        n = add_part(iov, n, f->payload, f->header.payload, &skip);
    for (uint32_t i = 0; handoff_gathered(f) && i < c->n_runs; i++)
        n = add_part(iov, n, c->runs[i].data, c->runs[i].bytes, &skip);
    return add_part(iov, n, f->tag, handoff_tag_bytes(&f->header), &skip);
}

/* A descriptor goes with the first byte of its frame. */
static int send_some(struct handoff_conn *c, const struct iovec *iov, int n_iov, size_t *moved,
                     struct baton_error *e)
{
    int fd = c->written ? -1 : handoff_landing_fd(c, c->writing);
    if (fd < 0)
        return transport_send(c->t, iov, n_iov, moved, e);
    int rc = transport_send_fd(c->t, iov, n_iov, fd, moved, e);
    if (!rc && *moved)
        handoff_landing_sent(c);
    return rc;
}

int handoff_out_write(struct handoff_conn *c, struct baton_error *e)
{
    for (size_t total = 0; total < HANDOFF_STEP_BYTES;) {
        if (!c->writing && !(c->writing = out_take(c)))
            return 0;
        struct iovec iov[OUT_PARTS];
        size_t moved = 0;
        int rc = send_some(c, iov, out_iov(c, iov), &moved, e);
        if (rc)
            return rc;
        if (moved == 0)
            return 0;
        total += moved + (c->written ? 0 : c->writing->landed);
        c->written += moved;
        c->last_out_ns = base_now_ns();
        const struct handoff_header *h = &c->writing->header;
        if (c->written == HANDOFF_HEADER + (size_t)h->control + h->payload + handoff_tag_bytes(h)) {
            struct handoff_out *f = c->writing;
            c->writing = NULL;
            handoff_piece_sent(c, f);
            free(f);
        }
    }
    return 0;
}

void handoff_out_drop(struct handoff_conn *c)
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

/* What waits besides HELLO is not for a peer that was refused, or has not proven itself. */
void handoff_out_drop_waiting(struct handoff_conn *c)
{
    struct handoff_out *hello = c->out_sequence == 0 && c->out_first ? out_pop(c) : NULL;
    while (c->out_first)
        free(out_pop(c));
    if (hello)
        handoff_out_push(c, hello);
}

int handoff_out_reason(struct handoff_conn *c, unsigned type, const struct baton_error *why)
{
    struct handoff_out *f = handoff_out_new(type, 0, why ? HANDOFF_REASON_BYTES : 0, NULL);
    if (!f)
        return BATON_ERR_NOMEM;
    if (why)
        handoff_reason_write(f->control, why);
    handoff_out_push(c, f);
    return 0;
}

bool handoff_out_ready(const struct handoff_conn *c)
{
    if (c->writing)
        return true;
    return handoff_out_may_send(c) && (c->out_first || owes_proof(c) || handoff_producer_ready(c));
}
