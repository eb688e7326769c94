/* SPDX-License-Identifier: Apache-2.0 */
/* The producer's part: offer, lend layers to the I/O thread, commit.
 *
 * Whole and stream are two triggers of one function: engine_producer_layer gives away whatever of a
 * layer can go. In stream mode the device calls it as layers complete; in either mode it is called
 * for all layers when the prefill is over. Nothing goes before the peer has reserved pages, which
 * does not keep the prefill waiting, and means that until then the pages are ours to take back.
 *
 * Pages that were lent stay untouched until ENDED: a prefill appends behind them, and the pages
 * that it gives back lie before every position that a local layer retains in the end, so none of
 * those is ever sent.
 */
#include <string.h>

#include "engine/engine_priv.h"

static void reset_sent(const struct baton_engine *en, struct engine_session *s)
{
    for (uint32_t l = 0; l < en->geometry.n_layers; l++)
        s->sent[l] = kv_retained_first(&en->geometry, l, s->request->ask.n_ids);
}

/* Not while the I/O thread has it: a RESERVE that comes meanwhile would be forgotten. */
void engine_producer_reset(const struct baton_engine *en, struct engine_session *s)
{
    reset_sent(en, s);
    atomic_store(&s->reserved, false);
    s->commit_sent = false;
}

void engine_producer_start(struct baton_engine *en, struct engine_session *s)
{
    bool hold = s->request->ask.hold;
    if (en->dead && !hold) {
        engine_session_over(en, s, BATON_FAILED, &en->dead_why);
        return;
    }
    engine_producer_reset(en, s);
    s->state = ENGINE_WAITING;
    if (hold) /* offered to who claims it */
        return;
    s->serial = ++en->serial;
    s->lent = true;
    engine_post(en, ENGINE_OFFER, s, NULL);
}

/* ---- layers ------------------------------------------------------------------------------- */

/* Pieces end at page borders, besides the last: a digest leaf is never cut. */
void engine_producer_layer(struct baton_engine *en, struct engine_session *s, uint32_t layer,
                           uint32_t computed)
{
    uint32_t n_ids = s->request->ask.n_ids;
    uint32_t to = computed == n_ids ? n_ids : computed / KV_BLOCK * KV_BLOCK;
    if (!atomic_load(&s->reserved) || to <= s->sent[layer])
        return;
    struct engine_message m = {
        .kind = ENGINE_LAYER,
        .id = s->request->ask.id,
        .serial = s->serial,
        .view = kv_seq_views(s->seq)[layer],
        .layer = layer,
        .first = s->sent[layer],
        .n = to - s->sent[layer],
    };
    m.view.end = computed; /* the sequence advances only after the chunk */
    s->sent[layer] = to;
    base_queue_push_wait(en->outbox, &m);
    engine_trace_queued(en, layer, m.first, m.n);
}

static void send_rest(struct baton_engine *en, struct engine_session *s)
{
    struct baton_error e;
    bool all = true; /* a stream has left already */
    for (uint32_t l = 0; l < en->geometry.n_layers; l++)
        all = all && s->sent[l] == s->done;
    if (!all && engine_session_fetch(en, s, &e)) {
        engine_session_fail(en, s, &e);
        return;
    }
    for (uint32_t l = 0; l < en->geometry.n_layers; l++)
        engine_producer_layer(en, s, l, s->done);
    s->commit_sent = true;
    engine_post(en, ENGINE_COMMIT, s, NULL);
}

void engine_producer_prefilled(struct baton_engine *en, struct engine_session *s)
{
    const struct engine_ask *a = &s->request->ask;
    const struct model_sampling greedy = model_sampling_default();
    struct handoff_commit *c = &s->commit;
    struct baton_error e;
    int rc = model_sampler_pick(en->sampler, s->row, &greedy, a->ids, a->n_ids, a->n_ids, 0, 0,
                                NULL, 0, &c->argmax, &c->margin, &e);
    if (rc == 0 && device_caps(en->binding->device)->lane_kv)
        rc = engine_session_fetch(en, s, &e); /* before its lane goes */
    engine_session_drop_lane(en, s);
    if (rc) {
        engine_session_fail(en, s, &e);
        return;
    }
    c->logits = s->row;
    c->vocab = en->vocab;
    c->prefill_ns = s->stats.prefill_ns;
    engine_session_note_positions(en, s);
    engine_request_publish(s->request, &s->stats);
    if (s->request->ask.hold) {
        engine_held_ready(en, s);
        return;
    }
    s->state = ENGINE_PREFILLED;
    if (atomic_load(&s->reserved))
        send_rest(en, s);
}

void engine_producer_reserved(struct baton_engine *en, struct engine_session *s)
{
    if (s->state == ENGINE_PREFILLED && !s->commit_sent)
        send_rest(en, s);
}

/* ---- admission ---------------------------------------------------------------------------- */

/* Take back the pages of the youngest session that the peer has no room for, besides those that a
 * ticket stands for. Nothing of it was sent; it starts again when there is room. Without this, a
 * producer full of requests whose pages the consumer gave to others would wait for ever, and so
 * would the consumer. */
static bool roll_back(struct baton_engine *en)
{
    struct engine_session *victim = NULL;
    for (struct engine_session *s = en->sessions; s; s = s->next)
        if ((s->state == ENGINE_PREFILL || s->state == ENGINE_PREFILLED) && !s->commit_sent &&
            !s->ticketed && !atomic_load(&s->reserved))
            victim = s;
    if (!victim)
        return false;
    engine_session_drop_lane(en, victim);
    engine_session_drop_pages(en, victim);
    reset_sent(en, victim);
    victim->done = 0;
    victim->stats.prefill_ns = 0;
    victim->state = ENGINE_WAITING;
    return true;
}

/* false: no room for it now. */
static bool start(struct baton_engine *en, struct engine_session *s, bool may_roll_back)
{
    struct baton_error e;
    int rc;
    do
        rc = engine_start_prefill(en, s, s->request->ask.n_ids, &e);
    while (rc == BATON_ERR_BUSY && may_roll_back && roll_back(en));
    if (rc && rc != BATON_ERR_BUSY)
        engine_session_fail(en, s, &e);
    return rc != BATON_ERR_BUSY;
}

void engine_producer_admit(struct baton_engine *en)
{
    for (struct engine_session *s = en->sessions; s; s = s->next)
        if (s->state == ENGINE_WAITING && atomic_load(&s->reserved) && !start(en, s, true))
            return;
    for (struct engine_session *s = en->sessions; s; s = s->next)
        if (s->state == ENGINE_WAITING && !start(en, s, false))
            return;
}
