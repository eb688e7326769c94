/* SPDX-License-Identifier: Apache-2.0 */
/* One file of the room with a fault planted in it, in place of the library's: what the explorer
 * must find. PLANT says which. */
#include "handoff/handoff_priv.h"
#include "transport/transport.h"

#if PLANT == 1
/* The consumer gives a slot back as soon as it has read which one it is, not when it has read the
 * frame and copied the piece. */
static int recv_and_credit(struct handoff_conn *c, uint8_t *to, size_t want, size_t *moved,
                           struct baton_error *e)
{
    struct handoff_piece p;
    int rc = transport_recv(c->t, to, want, moved, e);
    if (!rc && *moved == want && c->in_part == HANDOFF_IN_CONTROL && c->in.type == HANDOFF_LAYER &&
        handoff_piece_read(c->in_control.data, &p, NULL) == 0)
        handoff_landing_credit(c, &p);
    return rc;
}
#define transport_recv(t, to, want, moved, e) recv_and_credit(c, to, want, moved, e)
#include "handoff/in.c"

#elif PLANT == 2
/* The producer forgets that the slot which it has just chosen is in use. */
static uint8_t *claim_and_forget(struct handoff_conn *c, struct handoff_piece *p)
{
    uint8_t *data = handoff_landing_claim(c, p);
    handoff_landing_unclaim(c, p);
    return data;
}
#define handoff_landing_claim claim_and_forget
#include "handoff/producer.c"

#elif PLANT == 3
/* The consumer gives no slot back that comes for a request which is over. */
#define handoff_landing_credit(c, p) ((void)0)
#include "handoff/in.c"
#endif
