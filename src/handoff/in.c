/* SPDX-License-Identifier: Apache-2.0 */
/* Input of a connection: frames from bytes, in the order in which they may be believed, and who
 * takes them. */
#include <unistd.h>

#include "handoff/handoff_priv.h"
#include "transport/transport.h"

/* A frame for a request that ended here: its final frame completes the end, anything else was on
 * its way when this end's final frame left. */
static int take_late(struct handoff_conn *c, struct handoff_request *r, unsigned type,
                     struct baton_error *e)
{
    static const struct baton_error none = {0, ""};
    struct handoff_piece p;
    if (type == HANDOFF_LAYER) { /* its slot is free again all the same */
        int rc = handoff_piece_read(c->in_control.data, &p, e);
        if (!rc)
            handoff_landing_credit(c, &p);
        return rc;
    }
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
    bool awaited = r && r->claimed && (r->state == HANDOFF_CLAIMED || r->state == HANDOFF_ENDED);
    if (r && (type == HANDOFF_CLAIM || (type == HANDOFF_OFFER && !awaited)))
        return base_fail(e, BATON_ERR_PEER, "%s of request %llu, which is open",
                         handoff_type_name(type), (unsigned long long)r->id);
    if (type == HANDOFF_ASK)
        return base_fail(e, BATON_ERR_PEER, "ASK, which this end does not take");
    if (type == HANDOFF_CLAIM)
        return handoff_claim_take(c, c->in_control.data, e);
    if (type == HANDOFF_OFFER && (!r || r->state == HANDOFF_CLAIMED))
        return handoff_consumer_offer(c, c->in_control.data, e);
    if (!r)
        return base_fail(e, BATON_ERR_PEER, "%s for unknown request %llu", handoff_type_name(type),
                         (unsigned long long)c->in.request);
    if (r->state == HANDOFF_ENDED)
        return take_late(c, r, type, e);
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
    int fd = c->producer ? transport_take_fd(c->t) : -1;
    if (fd >= 0 && h->type != HANDOFF_LANDING) {
        close(fd);
        return base_fail(e, BATON_ERR_PEER, "%s with a descriptor", handoff_type_name(h->type));
    }
    if (h->type == HANDOFF_HELLO)
        return handoff_hello_take(c, c->in_control.data, e);
    if (h->type == HANDOFF_BYE)
        return handoff_bye_take(c, c->in_control.data, e);
    if (h->type == HANDOFF_HEARTBEAT)
        return 0;
    if (h->type == HANDOFF_LANDING)
        return handoff_landing_take(c, c->in_control.data, fd, e);
    if (h->type == HANDOFF_CREDIT)
        return handoff_landing_take_credit(c, c->in_control.data, e);
    return take_of_request(c, e);
}

/* A frame of an authenticated connection is nothing before its tag was found right. */
static int take_tag(struct handoff_conn *c, struct baton_error *e)
{
    const struct handoff_header *h = &c->in;
    uint8_t tag[HANDOFF_TAG];
    if (!(h->flags & HANDOFF_FLAG_TAG))
        return 0;
    handoff_auth_tag(&c->auth, &c->auth.in, c->in_raw, c->in_control.data, h->control,
                     c->in_payload.data, h->payload, tag);
    if (!base_equal_secret(tag, c->in_tag, sizeof tag) && !c->auth.proven)
        return base_fail(e, BATON_ERR_INTEGRITY, "the %s has another key than this end",
                         handoff_peer_role(c));
    if (!base_equal_secret(tag, c->in_tag, sizeof tag))
        return base_fail(e, BATON_ERR_INTEGRITY, "frame %llu (%s) does not match its tag",
                         (unsigned long long)h->sequence, handoff_type_name(h->type));
    c->auth.proven = true;
    return 0;
}

/* What may come, and with a tag or without, while the connection is what it is. A peer that can't
 * read this end's HELLO, or refuses it, says BYE without HELLO and without tag. */
static int admit(const struct handoff_conn *c, struct baton_error *e)
{
    const struct handoff_auth *a = &c->auth;
    const char *name = handoff_type_name(c->in.type);
    bool tagged = c->in.flags & HANDOFF_FLAG_TAG;
    bool early = c->in.type == HANDOFF_HELLO || c->in.type == HANDOFF_BYE;
    if (!c->hello_seen && !early)
        return base_fail(e, BATON_ERR_PEER, "%s before HELLO", name);
    if (tagged && (!a->level || c->in.type == HANDOFF_HELLO))
        return base_fail(e, BATON_ERR_PEER, "%s with a tag where none was agreed on", name);
    if (a->level && !tagged && (a->proven || !early))
        return base_fail(e, BATON_ERR_INTEGRITY, "%s without a tag", name);
    if (a->level && !a->proven && !early && c->in.type != HANDOFF_HEARTBEAT)
        return base_fail(e, BATON_ERR_PEER, "%s before the %s proved that it has the key", name,
                         handoff_peer_role(c));
    return 0;
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
    rc = admit(c, e);
    if (rc)
        return rc;
    rc = handoff_buffer_fit(&c->in_control, c->in.control, e);
    return rc ? rc : handoff_buffer_fit(&c->in_payload, c->in.payload, e);
}

/* Where the next bytes go, and how many the part still lacks. */
static uint8_t *in_target(struct handoff_conn *c, size_t *want)
{
    const struct {
        uint8_t *data;
        size_t n;
    } parts[] = {
        [HANDOFF_IN_HEADER] = {c->in_raw, HANDOFF_HEADER},
        [HANDOFF_IN_CONTROL] = {c->in_control.data, c->in.control},
        [HANDOFF_IN_PAYLOAD] = {c->in_payload.data, c->in.payload},
        [HANDOFF_IN_TAG] = {c->in_tag, handoff_tag_bytes(&c->in)},
    };
    *want = parts[c->in_part].n - c->in_got;
    return *want ? parts[c->in_part].data + c->in_got : NULL;
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
    if (c->in_part != HANDOFF_IN_TAG) {
        c->in_part++;
        return 0;
    }
    c->in_part = HANDOFF_IN_HEADER;
    int rc = take_tag(c, e);
    return rc ? rc : take_frame(c, e);
}

/* Credits leave before the next piece is read: the producer fills that slot meanwhile. */
int handoff_in_read(struct handoff_conn *c, struct baton_error *e)
{
    for (size_t total = 0; total < HANDOFF_STEP_BYTES && !c->landing.owes;) {
        size_t want, moved = 0;
        uint8_t *to = in_target(c, &want);
        if (want) {
            int rc = transport_recv(c->t, to, want, &moved, e);
            if (rc == BATON_ERR_PEER)
                return base_fail(e, rc, "%s process ended", handoff_peer_role(c));
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
