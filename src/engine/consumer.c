/* SPDX-License-Identifier: Apache-2.0 */
/* The consumer's part: pair offers with submits, lend pages for the import, go on from COMMIT.
 *
 * Offer and submit come in either order and wait for each other. Nothing is reserved before both
 * are there and agree on model, token ids and geometry.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine_priv.h"

/* ---- agreement ---------------------------------------------------------------------------- */

static int check_identity(const struct baton_engine *en, const struct handoff_identity *theirs,
                          struct baton_error *e)
{
    const struct handoff_identity *ours = &en->model->identity;
    const struct {
        const char *name;
        const uint8_t *a, *b;
    } parts[] = {
        {"architecture", ours->arch, theirs->arch},
        {"weights", ours->weights, theirs->weights},
        {"numerics", ours->numerics, theirs->numerics},
        {"tokenizer", ours->tokenizer, theirs->tokenizer},
    };
    char names[64] = "";
    size_t used = 0;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (memcmp(parts[i].a, parts[i].b, 32))
            used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "",
                                     parts[i].name);
    return used ? base_fail(e, BATON_ERR_MISMATCH,
                            "producer and consumer run different models: %s differ", names)
                : 0;
}

/* The dtype may differ: pages are converted on import. */
static int check_geometry(const struct kv_geometry *ours, const struct kv_geometry *theirs,
                          struct baton_error *e)
{
    if (theirs->n_layers != ours->n_layers || theirs->kv_heads != ours->kv_heads ||
        theirs->head_dim != ours->head_dim || theirs->window != ours->window)
        return base_fail(e, BATON_ERR_MISMATCH,
                         "the producer's KV cache has %u layers of %u heads of %u, window %u; ours "
                         "%u of %u of %u, window %u",
                         theirs->n_layers, theirs->kv_heads, theirs->head_dim, theirs->window,
                         ours->n_layers, ours->kv_heads, ours->head_dim, ours->window);
    for (uint32_t l = 0; l < ours->n_layers; l++)
        if (!theirs->local[l] != !ours->local[l])
            return base_fail(e, BATON_ERR_MISMATCH, "layer %u is %s at the producer, %s here", l,
                             theirs->local[l] ? "local" : "global",
                             ours->local[l] ? "local" : "global");
    return 0;
}

static int check_ids(const struct engine_ask *a, const struct engine_offer *o,
                     struct baton_error *e)
{
    if (o->n_ids != a->n_ids)
        return base_fail(e, BATON_ERR_MISMATCH,
                         "token ids differ: the producer has %u, the consumer %u", o->n_ids,
                         a->n_ids);
    for (uint32_t i = 0; i < a->n_ids; i++)
        if (o->ids[i] != a->ids[i])
            return base_fail(e, BATON_ERR_MISMATCH,
                             "token ids differ at %u: %d at the producer, %d at the consumer", i,
                             o->ids[i], a->ids[i]);
    return 0;
}

/* ---- pairing ------------------------------------------------------------------------------ */

/* Consumes the offer. */
static void pair(struct baton_engine *en, struct engine_session *s, struct engine_offer *o)
{
    struct baton_error e;
    s->serial = o->serial; /* a claim's is the same */
    s->lent = true;
    s->state = ENGINE_PAIRED;
    int rc = check_identity(en, &o->identity, &e);
    if (rc == 0)
        rc = check_geometry(&en->geometry, &o->geometry, &e);
    if (rc == 0)
        rc = check_ids(&s->request->ask, o, &e);
    free(o);
    if (rc)
        engine_session_fail(en, s, &e);
}

/* The session that an offer is for, NULL where there is none (yet). */
static struct engine_session *find_unpaired(struct baton_engine *en, const struct engine_offer *o)
{
    struct engine_session *s = en->sessions;
    while (s && !(s->state == ENGINE_UNPAIRED &&
                  (o->claimed ? s->lent && s->serial == o->serial
                              : !s->request->ask.pull && s->request->ask.id == o->id)))
        s = s->next;
    return s;
}

static struct engine_offer *take_offer(struct baton_engine *en, uint64_t id)
{
    struct engine_offer **p = &en->offers;
    while (*p && (*p)->id != id)
        p = &(*p)->next;
    struct engine_offer *o = *p;
    if (o)
        *p = o->next;
    return o;
}

static bool recall(struct engine_ids *ids, uint64_t id)
{
    for (uint32_t i = 0; i < ids->n; i++)
        if (ids->id[i] == id) {
            ids->n--;
            memmove(ids->id + i, ids->id + i + 1, (ids->n - i) * sizeof *ids->id);
            return true;
        }
    return false;
}

/* The newest are kept. */
static void remember(struct engine_ids *ids, uint64_t id)
{
    recall(ids, id);
    if (ids->n == ENGINE_MAX_OPEN)
        recall(ids, ids->id[0]);
    ids->id[ids->n++] = id;
}

void engine_consumer_forget(struct baton_engine *en, uint64_t id)
{
    remember(&en->cancelled, id);
}

void engine_consumer_start(struct baton_engine *en, struct engine_session *s)
{
    uint64_t id = s->request->ask.id;
    s->state = ENGINE_UNPAIRED;
    if (en->no_peer && !s->request->ask.pull) { /* computed here from the start */
        s->state = ENGINE_WAITING;
        return;
    }
    if (s->request->ask.pull) {
        s->serial = ++en->serial;
        s->lent = true;
        engine_post(en, ENGINE_CLAIM, s, NULL);
        return;
    }
    recall(&en->cancelled, id);
    bool withdrawn = recall(&en->withdrawn, id);
    struct engine_offer *o = take_offer(en, id);
    if (o) {
        pair(en, s, o);
    } else if (en->dead) {
        engine_consumer_failed(en, s, &en->dead_why);
    } else if (withdrawn) { /* no other offer is to be waited for */
        struct baton_error e;
        base_fail(&e, BATON_ERR_CANCELLED, "the producer withdrew its offer");
        engine_consumer_failed(en, s, &e);
    }
}

void engine_consumer_offered(struct baton_engine *en, struct engine_offer *o)
{
    struct engine_session *s = find_unpaired(en, o);
    if (!o->claimed)
        recall(&en->withdrawn, o->id);
    if (s) {
        pair(en, s, o);
    } else if (o->claimed) { /* given up meanwhile, and the I/O thread knows */
        free(o);
    } else if (recall(&en->cancelled, o->id)) {
        struct engine_message m = {.kind = ENGINE_REFUSE, .id = o->id, .serial = o->serial};
        base_fail(&m.why, BATON_ERR_CANCELLED, "cancelled at the consumer");
        base_queue_push_wait(en->outbox, &m);
        free(o);
    } else {
        o->next = en->offers;
        en->offers = o;
    }
}

void engine_consumer_withdrawn(struct baton_engine *en, uint64_t serial)
{
    struct engine_offer **p = &en->offers;
    while (*p && (*p)->serial != serial)
        p = &(*p)->next;
    struct engine_offer *o = *p;
    if (o) {
        *p = o->next;
        remember(&en->withdrawn, o->id);
        free(o);
    }
}

/* ---- without the producer ----------------------------------------------------------------- */

/* Nothing of the import is kept: what came was not proven. */
static void start_over(struct baton_engine *en, struct engine_session *s,
                       const struct baton_error *why)
{
    engine_session_drop_lane(en, s);
    engine_session_drop_pages(en, s);
    free(s->row);
    s->row = NULL;
    s->committed = false;
    memset(&s->result, 0, sizeof s->result);
    s->done = s->held = s->stats.loaded_tokens = 0;
    s->state = ENGINE_WAITING;
    engine_session_judge(s, "local-prefill", why);
    engine_request_publish(s->request, &s->stats);
}

void engine_consumer_failed(struct baton_engine *en, struct engine_session *s,
                            const struct baton_error *why)
{
    if (why->code && s->request->ask.local_prefill)
        start_over(en, s, why);
    else
        engine_session_over(en, s, BATON_FAILED, why);
}

/* ---- import ------------------------------------------------------------------------------- */

static bool wants_row(const struct baton_engine *en, const struct engine_ask *a)
{
    return a->want_logits || a->kv_save ||
           (!a->n_force && (!engine_takes_argmax(a) ||
                            (a->min_tokens > 0 && model_config_of(en->model->model)->n_eos > 0)));
}

/* What the consumer has in a file need not travel, besides the last position, which always does. A
 * local layer retains less of it the longer the prompt is. */
static int load_held(struct engine_session *s, struct baton_error *e)
{
    const struct engine_ask *a = &s->request->ask;
    uint32_t n = kv_file_info(a->kv_load)->n_tokens;
    s->held = n < a->n_ids ? n : a->n_ids - 1;
    s->stats.loaded_tokens = s->held;
    return kv_load_below(s->seq, a->kv_load, s->held, e);
}

/* Lend pages, and a place for the row, to the I/O thread. */
static int reserve(struct baton_engine *en, struct engine_session *s, struct baton_error *e)
{
    const struct engine_ask *a = &s->request->ask;
    int rc = engine_session_take_pages(en, s, a->n_ids + a->max_tokens, e);
    if (rc == 0)
        rc = kv_seq_reserve_import(s->seq, a->n_ids, e);
    if (rc == 0 && a->kv_load)
        rc = load_held(s, e);
    if (rc == 0 && wants_row(en, a) && !(s->row = base_try_alloc(en->vocab, sizeof *s->row, e)))
        rc = BATON_ERR_NOMEM;
    if (rc == 0) {
        engine_count_pages(en);
        engine_post(en, ENGINE_RESERVE, s, NULL);
        s->state = ENGINE_IMPORT;
    }
    return rc;
}

/* What the host's pages hold goes to the device with the lane, not before: KV may live there. */
static int enter_lane(struct baton_engine *en, struct engine_session *s, struct baton_error *e)
{
    int rc = engine_session_take_lane(en, s, e);
    return rc ? rc : engine_session_deliver(en, s, e);
}

/* Those that only need a lane. One may be over with its first token, and leaves room for others:
 * so they go before those that need pages, of which none is asked again before the next event. */
static void admit_imported(struct baton_engine *en)
{
    struct engine_session *next;
    for (struct engine_session *s = en->sessions; s; s = next) {
        struct baton_error e;
        next = s->next;
        if (s->state != ENGINE_IMPORTED)
            continue;
        int rc = enter_lane(en, s, &e);
        if (rc == 0)
            engine_session_begin(en, s, s->row);
        else if (rc != BATON_ERR_BUSY)
            engine_session_over(en, s, BATON_FAILED, &e);
    }
}

void engine_consumer_admit(struct baton_engine *en)
{
    struct engine_session *next;
    bool full = false; /* the oldest that waits for pages is served first */
    admit_imported(en);
    for (struct engine_session *s = en->sessions; s && !full; s = next) {
        const struct engine_ask *a = &s->request->ask;
        struct baton_error e;
        int rc = 0;
        next = s->next;
        if (s->state == ENGINE_PAIRED)
            rc = reserve(en, s, &e);
        else if (s->state == ENGINE_WAITING)
            rc = engine_start_prefill(en, s, a->n_ids + a->max_tokens, &e);
        full = rc == BATON_ERR_BUSY;
        if (rc && !full)
            engine_session_fail(en, s, &e);
    }
}

/* ---- after COMMIT ------------------------------------------------------------------------- */

/* TTFT counts from when either end accepted the request: where the producer was first and its
 * prefill was under way already, from the prefill's start. */
static void note_start(struct baton_request *r, const struct handoff_commit *c)
{
    uint64_t start = c->compute_end_ns - c->prefill_ns;
    pthread_mutex_lock(&r->lock);
    if (start < r->ask.accepted_ns && r->ask.accepted_ns <= c->compute_end_ns)
        r->ask.accepted_ns = start;
    pthread_mutex_unlock(&r->lock);
}

static void note_result(const struct baton_engine *en, struct engine_session *s)
{
    const struct handoff_result *r = &s->result;
    const struct handoff_commit *c = &r->commit;
    struct baton_stats *st = &s->stats;
    note_start(s->request, c);
    st->prefill_ns = c->prefill_ns;
    st->transfer_ns = r->last_byte_ns - r->first_byte_ns;
    if (s->request->ask.pull)
        st->exposed_ns = st->transfer_ns;
    else if (c->compute_end_ns && r->last_byte_ns > c->compute_end_ns)
        st->exposed_ns = r->last_byte_ns - c->compute_end_ns;
    st->import_ns = r->import_ns;
    st->verify_ns = r->verify_ns;
    st->layers = en->geometry.n_layers;
    st->slots = r->slots;
    st->pieces = r->pieces;
    st->bytes = r->bytes;
    st->landed_bytes = r->landed_bytes;
    st->prefilled_tokens = s->request->ask.n_ids;
    if (r->digested)
        base_hex(r->digest, 32, st->digest);
    else
        strcpy(st->digest, "off");
    strcpy(st->verdict, r->digested ? "verified" : "off");
}

/* No offer came of a claim: whoever pulls is told the cases apart by their codes. On the wire
 * INTEGRITY and BUSY are the issuer's words for a forged ticket and one that another has claimed;
 * IO and TIMEOUT are of the dial. */
static void no_offer(bool asks, const struct baton_error *why, struct baton_error *out)
{
    bool refused = why->code == BATON_ERR_INTEGRITY || why->code == BATON_ERR_BUSY ||
                   why->code == BATON_ERR_STALE;
    if (refused && !asks)
        base_fail(out, BATON_ERR_STALE, "the producer refused the %.220s", why->text);
    else if (why->code == BATON_ERR_IO || why->code == BATON_ERR_TIMEOUT)
        base_fail(out, BATON_ERR_PEER, "the producer can't be reached: %.200s", why->text);
    else
        *out = *why;
}

void engine_consumer_ended(struct baton_engine *en, struct engine_session *s,
                           const struct baton_error *why)
{
    struct baton_error e;
    if (why->code && s->state == ENGINE_UNPAIRED) {
        no_offer(s->request->ask.asks, why, &e);
        engine_consumer_failed(en, s, &e);
        return;
    }
    if (why->code) {
        engine_consumer_failed(en, s, why);
        return;
    }
    const struct handoff_commit *c = &s->result.commit;
    if (!s->committed || c->argmax < 0 || (uint32_t)c->argmax >= en->vocab) {
        base_fail(&e, BATON_ERR_PEER,
                  "the producer's COMMIT is missing, or has no row of %u logits, or "
                  "an argmax out of range",
                  en->vocab);
        engine_consumer_failed(en, s, &e);
        return;
    }
    s->commit = *c;
    note_result(en, s);
    s->state = ENGINE_IMPORTED;
}
