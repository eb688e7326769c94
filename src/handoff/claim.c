/* SPDX-License-Identifier: Apache-2.0 */
/* A consumer opens a request, by a ticket (CLAIM) or by the prompt itself (ASK), and the producer
 * answers with the same OFFER that it would push. From there on nothing differs. */
#include <stdlib.h>
#include <string.h>

#include "handoff/handoff_priv.h"

/* A new request, and the frame that opens it with room for its body; both are the connection's. */
static int open_by(struct handoff_conn *c, unsigned type, uint64_t request, size_t control,
                   struct handoff_out **frame, struct baton_error *e)
{
    struct handoff_request *r;
    if (c->death.code)
        return base_fail(e, c->death.code, "%s", c->death.text);
    if (c->producer)
        return base_fail(e, BATON_ERR_USAGE, "a producer claims nothing");
    if (handoff_request_find(c, request))
        return base_fail(e, BATON_ERR_BUSY, "request %llu is open on this connection",
                         (unsigned long long)request);
    if (c->n_requests >= HANDOFF_MAX_REQUESTS)
        return base_fail(e, BATON_ERR_BUSY, "%u requests are open on this connection",
                         c->n_requests);
    struct handoff_out *f = handoff_out_new(type, request, control, e);
    if (!f)
        return BATON_ERR_NOMEM;
    int rc = handoff_request_open(c, request, &r, e);
    if (rc) {
        free(f);
        return rc;
    }
    memset(f->control, 0, control);
    handoff_out_push(c, f);
    handoff_request_note(c, r, handoff_type_name(type));
    *frame = f;
    return 0;
}

int handoff_claim(struct handoff_conn *c, uint64_t request, const uint8_t ticket[HANDOFF_TICKET],
                  struct baton_error *e)
{
    struct handoff_out *f = NULL;
    int rc = open_by(c, HANDOFF_CLAIM, request, HANDOFF_CLAIM_BYTES, &f, e);
    if (f)
        memcpy(f->control, ticket, HANDOFF_TICKET);
    return rc;
}

int handoff_ask(struct handoff_conn *c, uint64_t request, const int32_t *ids, uint32_t n_ids,
                uint32_t max_new, struct baton_error *e)
{
    struct handoff_out *f = NULL;
    if (n_ids == 0 || n_ids > HANDOFF_MAX_IDS)
        return base_fail(e, BATON_ERR_USAGE, "%u token ids to ask for", n_ids);
    if (handoff_conn_ready(c) && !(c->peer_takes & HANDOFF_TAKES_ASK))
        return base_fail(e, BATON_ERR_UNSUPPORTED,
                         "the producer does not prefill what it is asked for on this port");
    if (!handoff_conn_ready(c) && !c->death.code)
        return base_fail(e, BATON_ERR_USAGE, "asked before the producer's HELLO");
    int rc = open_by(c, HANDOFF_ASK, request, HANDOFF_ASK_BYTES + 4 * (size_t)n_ids, &f, e);
    if (!f)
        return rc;
    handoff_put32(f->control, n_ids);
    handoff_put32(f->control + 4, max_new);
    for (uint32_t i = 0; i < n_ids; i++)
        handoff_put32(f->control + HANDOFF_ASK_BYTES + 4 * (size_t)i, (uint32_t)ids[i]);
    return 0;
}

int handoff_claim_take(struct handoff_conn *c, const uint8_t *control, struct baton_error *e)
{
    struct handoff_request *r;
    static const uint8_t zero[HANDOFF_CLAIM_BYTES - HANDOFF_TICKET];
    if (memcmp(control + HANDOFF_TICKET, zero, sizeof zero))
        return base_fail(e, BATON_ERR_PEER, "CLAIM with fields that version 1 does not have");
    if (c->n_requests >= HANDOFF_MAX_REQUESTS)
        return base_fail(e, BATON_ERR_PEER, "more than %u requests at a time",
                         HANDOFF_MAX_REQUESTS);
    int rc = handoff_request_open(c, c->in.request, &r, e);
    if (rc)
        return rc;
    handoff_request_note(c, r, "CLAIM came");
    if (c->cb.on_claim) {
        c->cb.on_claim(c->cb.ctx, r->id, control);
        return 0;
    }
    struct baton_error why;
    base_fail(&why, BATON_ERR_UNSUPPORTED, "nothing can be claimed here");
    r->state = HANDOFF_ENDED; /* the owner never heard of it, so on_end is not called */
    handoff_request_final(c, r, HANDOFF_ABORT, HANDOFF_NO_SLOT, &why);
    return 0;
}
