/* SPDX-License-Identifier: Apache-2.0 */
/* Held requests: prefilled, and kept for whoever comes with their ticket.
 *
 *     prefill -> HELD -> claim -> PREFILLED, as a push -> acknowledged: over
 *                 ^                   |
 *                 +---- returned -----+   the claimant died or failed: open for another lease
 *
 * A claimant that says CANCELLED wants the request no more, nor does anybody else: over at once.
 * The book of tickets lives in this thread, beside the pages that they stand for. Sessions go by
 * their request's id there: it is the only open one of that id, and a later one has another serial.
 */
#include <stdlib.h>
#include <string.h>

#include "engine/engine_priv.h"

static struct engine_session *find(struct baton_engine *en, uint64_t request)
{
    struct engine_session *s = en->sessions;
    while (s && !(s->ticketed && s->request->ask.id == request))
        s = s->next;
    return s;
}

void engine_held_ready(struct baton_engine *en, struct engine_session *s)
{
    uint8_t ticket[HANDOFF_TICKET];
    struct baton_error e;
    struct baton_ticket t = {
        .argmax = s->commit.argmax,
        .margin = s->commit.margin,
        .prefill_ns = s->stats.prefill_ns,
        .lease_ns = en->lease_ns,
    };
    if (handoff_ticket_issue(en->tickets, s->request->ask.id, kv_seq_generations(s->seq),
                             base_now_ns(), ticket, &e)) {
        engine_session_fail(en, s, &e);
        return;
    }
    s->ticketed = true;
    s->state = ENGINE_HELD;
    atomic_fetch_add(&en->issued, 1);
    atomic_fetch_add(&en->tickets_open, 1);
    handoff_ticket_text(ticket, t.text);
    engine_request_hold(s->request, &t);
}

/* ---- claims ------------------------------------------------------------------------------- */

static int claim(struct baton_engine *en, const struct engine_message *m,
                 struct engine_session **out, struct baton_error *e)
{
    uint64_t request, now = base_now_ns();
    int rc = handoff_ticket_request(en->tickets, m->ticket, now, &request, e);
    if (rc)
        return rc;
    struct engine_session *s = find(en, request);
    if (!s || s->state == ENGINE_CLOSING)
        return base_fail(e, BATON_ERR_STALE, "ticket: withdrawn");
    *out = s;
    return handoff_ticket_claim(en->tickets, m->ticket, kv_seq_generations(s->seq), now, e);
}

void engine_held_claimed(struct baton_engine *en, const struct engine_message *m)
{
    struct engine_session *s = NULL;
    struct engine_message no = {.kind = ENGINE_ABORT, .id = m->id, .serial = m->serial};
    if (claim(en, m, &s, &no.why)) {
        atomic_fetch_add(&en->refused, 1);
        base_queue_push_wait(en->outbox, &no);
        return;
    }
    atomic_fetch_sub(&en->tickets_open, 1);
    atomic_fetch_add(&en->tickets_claimed, 1);
    s->serial = m->serial;
    s->lent = true;
    s->state = ENGINE_PREFILLED;
    engine_post(en, ENGINE_OFFER, s, NULL);
}

void engine_held_returned(struct baton_engine *en, struct engine_session *s,
                          const struct baton_error *why, uint64_t heard_ns)
{
    if (why->code == BATON_ERR_CANCELLED) {
        engine_session_over(en, s, BATON_FAILED, why);
        return;
    }
    handoff_ticket_release(en->tickets, s->request->ask.id, heard_ns);
    atomic_fetch_sub(&en->tickets_claimed, 1);
    atomic_fetch_add(&en->tickets_open, 1);
    engine_producer_reset(en, s);
    s->state = ENGINE_HELD;
}

/* ---- leases ------------------------------------------------------------------------------- */

void engine_held_told(struct baton_engine *en, const struct engine_message *m)
{
    static const struct baton_error released = {BATON_ERR_CANCELLED, "its ticket was released"};
    uint64_t request;
    atomic_fetch_sub(&en->n_told, 1);
    if (m->kind == ENGINE_RENEW) {
        handoff_ticket_renew(en->tickets, m->ticket, base_now_ns(), NULL);
        return;
    }
    if (handoff_ticket_request(en->tickets, m->ticket, base_now_ns(), &request, NULL))
        return;
    struct engine_session *s = find(en, request);
    if (s && s->state == ENGINE_HELD) /* else it is the claimant's to release */
        engine_session_over(en, s, BATON_FAILED, &released);
}

void engine_held_expire(struct baton_engine *en)
{
    static const struct baton_error expired = {BATON_ERR_STALE,
                                               "nobody fetched it before its lease ended"};
    uint64_t request;
    while (en->tickets && handoff_ticket_expire(en->tickets, base_now_ns(), &request)) {
        struct engine_session *s = find(en, request);
        if (s)
            engine_session_over(en, s, BATON_FAILED, &expired);
    }
}

uint64_t engine_held_due(const struct baton_engine *en)
{
    uint64_t due = en->tickets ? handoff_ticket_due(en->tickets) : UINT64_MAX;
    uint64_t now = due == UINT64_MAX ? 0 : base_now_ns();
    return due == UINT64_MAX ? due : due > now ? due - now : 0;
}

void engine_held_over(struct baton_engine *en, struct engine_session *s, enum baton_finish finish,
                      const struct baton_error *why)
{
    if (!s->ticketed)
        return;
    bool expired = s->state == ENGINE_HELD && why->code == BATON_ERR_STALE;
    atomic_fetch_sub(s->state == ENGINE_HELD ? &en->tickets_open : &en->tickets_claimed, 1);
    atomic_fetch_add(finish == BATON_STOP ? &en->fetched
                     : expired            ? &en->expired
                                          : &en->given_up,
                     1);
    handoff_ticket_burn(en->tickets, s->request->ask.id);
    s->ticketed = false;
}

/* ---- callers ------------------------------------------------------------------------------ */

static int check_told(const struct baton_engine *en, const char *from, struct baton_error *e)
{
    if (en->role == BATON_BOTH)
        return base_fail(e, BATON_ERR_USAGE, "an engine of both roles has no tickets");
    if (en->role == BATON_PRODUCER && from)
        return base_fail(e, BATON_ERR_USAGE, "a producer knows its own tickets alone");
    if (en->role == BATON_CONSUMER && en->no_peer && !from)
        return base_fail(e, BATON_ERR_USAGE, "whose ticket? The engine has no peer of its own");
    return 0;
}

int engine_ticket_tell(struct baton_engine *en, bool release, const char *from, const char *ticket,
                       struct baton_error *e)
{
    struct engine_message m = {.kind = release ? ENGINE_RELEASE : ENGINE_RENEW};
    int rc = check_told(en, from, e);
    if (rc == 0)
        rc = handoff_ticket_parse(ticket, m.ticket, e);
    if (rc == 0 && from && !(m.from = base_try_strdup(from, e)))
        rc = BATON_ERR_NOMEM;
    if (rc)
        return rc;
    if (atomic_fetch_add(&en->n_told, 1) >= ENGINE_MAX_TOLD) {
        atomic_fetch_sub(&en->n_told, 1);
        free(m.from);
        return base_fail(e, BATON_ERR_BUSY, "%u tickets are being renewed or released",
                         ENGINE_MAX_TOLD);
    }
    base_queue_push_wait(en->role == BATON_PRODUCER ? en->inbox : en->outbox, &m);
    return 0;
}

int engine_ticket_stats(struct baton_engine *en, struct baton_ticket_stats *out)
{
    size_t size = out->struct_size;
    if (size < sizeof size || size > 1u << 16)
        return BATON_ERR_USAGE;
    const struct baton_ticket_stats s = {
        .struct_size = size,
        .open = atomic_load(&en->tickets_open),
        .claimed = atomic_load(&en->tickets_claimed),
        .peers = atomic_load(&en->n_peers),
        .issued = atomic_load(&en->issued),
        .fetched = atomic_load(&en->fetched),
        .expired = atomic_load(&en->expired),
        .given_up = atomic_load(&en->given_up),
        .refused = atomic_load(&en->refused),
    };
    memset(out, 0, size);
    memcpy(out, &s, size < sizeof s ? size : sizeof s);
    return 0;
}
