/* SPDX-License-Identifier: Apache-2.0 */
/* The engine thread: messages, cancels, admission, and one piece of compute at a time.
 *
 * A turn is one prefill chunk of one session or one decode step over all lanes that decode; where
 * both could run they alternate, so that neither a long prompt nor many lanes starve the other.
 */
#include <poll.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/engine_priv.h"

/* ---- messages ----------------------------------------------------------------------------- */

static void add_session(struct baton_engine *en, struct engine_session *s)
{
    struct engine_session **p = &en->sessions;
    while (*p)
        p = &(*p)->next;
    *p = s;
    if (en->role == BATON_PRODUCER)
        engine_producer_start(en, s);
    else if (en->role == BATON_CONSUMER)
        engine_consumer_start(en, s);
}

static struct engine_session *find_session(struct baton_engine *en, const struct engine_message *m)
{
    struct engine_session *s = en->sessions;
    while (s && !(s->lent && s->serial == m->serial))
        s = s->next;
    return s;
}

/* The consumer verified what was sent, or says why it does not have it. */
static void producer_ended(struct baton_engine *en, struct engine_session *s,
                           const struct baton_error *why)
{
    struct baton_error e;
    if (why->code) {
        engine_session_over(en, s, BATON_FAILED, why);
    } else if (!s->commit_sent) { /* handoff does not let it come to that */
        base_fail(&e, BATON_ERR_PEER, "the consumer acknowledged a request before its COMMIT");
        engine_session_over(en, s, BATON_FAILED, &e);
    } else if (engine_session_observe(en, s, &e)) {
        engine_session_over(en, s, BATON_FAILED, &e);
    } else {
        s->stats.layers = en->geometry.n_layers;
        s->stats.slots = 2 * en->geometry.n_layers;
        strcpy(s->stats.verdict, en->digest ? "verified" : "off");
        engine_session_over(en, s, BATON_STOP, NULL);
    }
}

static void session_ended(struct baton_engine *en, struct engine_session *s,
                          const struct engine_message *m)
{
    struct baton_error error;
    s->lent = false;
    engine_peer_error(en, &m->why, &error);
    /* A cancel that came too late: the consumer has acknowledged. */
    bool acknowledged = en->role == BATON_PRODUCER && error.code == 0 && s->commit_sent;
    bool given_up = s->state == ENGINE_CLOSING && !acknowledged;
    if (given_up && en->role == BATON_CONSUMER)
        engine_consumer_failed(en, s, &s->why);
    else if (given_up)
        engine_session_over(en, s, BATON_FAILED, &s->why);
    else if (en->role == BATON_CONSUMER)
        engine_consumer_ended(en, s, &error);
    else if (s->ticketed && error.code)
        engine_held_returned(en, s, &error, m->heard_ns);
    else
        producer_ended(en, s, &error);
}

/* The connection ended every request it knew; those that it does not know wait in vain. */
static void peer_died(struct baton_engine *en, const struct baton_error *why)
{
    struct engine_session *next;
    en->dead = true;
    engine_peer_error(en, why, &en->dead_why);
    for (struct engine_session *s = en->sessions; s; s = next) {
        next = s->next;
        if (s->state == ENGINE_UNPAIRED && !s->lent)
            engine_consumer_failed(en, s, &en->dead_why);
    }
}

static void take_message(struct baton_engine *en, const struct engine_message *m)
{
    struct engine_session *s = NULL;
    if (m->kind == ENGINE_RESERVED || m->kind == ENGINE_ENDED)
        s = find_session(en, m);
    if (m->kind == ENGINE_SUBMIT)
        add_session(en, m->session);
    else if (m->kind == ENGINE_OFFERED)
        engine_consumer_offered(en, m->offer);
    else if (m->kind == ENGINE_RESERVED && s)
        engine_producer_reserved(en, s);
    else if (m->kind == ENGINE_ENDED && s)
        session_ended(en, s, m);
    else if (m->kind == ENGINE_ENDED)
        engine_consumer_withdrawn(en, m->serial);
    else if (m->kind == ENGINE_DEAD)
        peer_died(en, &m->why);
    else if (m->kind == ENGINE_CLAIMED)
        engine_held_claimed(en, m);
    else if (m->kind == ENGINE_RENEW || m->kind == ENGINE_RELEASE)
        engine_held_told(en, m);
}

static void take_cancels(struct baton_engine *en)
{
    static const struct baton_error cancelled = {0};
    struct engine_session *next;
    bool all = atomic_load(&en->stopping);
    for (struct engine_session *s = en->sessions; s; s = next) {
        next = s->next;
        if (s->state == ENGINE_CLOSING || (!all && !atomic_load(&s->request->cancel)))
            continue;
        if (s->state == ENGINE_UNPAIRED && !s->lent)
            engine_consumer_forget(en, s->request->ask.id);
        engine_session_fail(en, s, &cancelled);
    }
}

/* ---- admission ---------------------------------------------------------------------------- */

int engine_start_prefill(struct baton_engine *en, struct engine_session *s, uint32_t n_tokens,
                         struct baton_error *e)
{
    int rc = engine_session_take_lane(en, s, e);
    if (rc)
        return rc;
    rc = engine_session_take_pages(en, s, n_tokens, e);
    if (rc == 0 && s->request->ask.kv_load)
        rc = engine_kv_load(s, e);
    if (rc == 0 && s->request->ask.kv_load)
        rc = engine_session_deliver(en, s, e);
    if (rc == 0) {
        s->state = ENGINE_PREFILL;
        return 0;
    }
    engine_session_drop_pages(en, s);
    engine_session_drop_lane(en, s);
    return rc;
}

static void admit_native(struct baton_engine *en)
{
    struct engine_session *next;
    for (struct engine_session *s = en->sessions; s; s = next) {
        struct baton_error e;
        next = s->next;
        if (s->state != ENGINE_WAITING)
            continue;
        const struct engine_ask *a = &s->request->ask;
        int rc = engine_start_prefill(en, s, a->n_ids + a->max_tokens, &e);
        if (rc == BATON_ERR_BUSY)
            return; /* in order: a small request does not pass a large one for ever */
        if (rc)
            engine_session_fail(en, s, &e);
    }
}

static void admit(struct baton_engine *en)
{
    if (en->role == BATON_PRODUCER)
        engine_producer_admit(en);
    else if (en->role == BATON_CONSUMER)
        engine_consumer_admit(en);
    else
        admit_native(en);
}

/* ---- prefill ------------------------------------------------------------------------------ */

struct chunk {
    struct baton_engine *engine;
    struct engine_session *session;
    uint32_t computed; /* prompt positions there will be after it */
    bool exports;      /* layers leave while later ones compute */
    uint64_t layer_ns; /* with a trace: since when a layer is computed; 0 before the first one */
};

static void layer_done(void *ctx, uint32_t layer)
{
    struct chunk *c = ctx;
    const struct baton_engine *en = c->engine;
    uint32_t first = c->session->done;
    if (en->trace)
        engine_trace_layer(en, layer, c->layer_ns, base_now_ns(), first, c->computed - first);
    if (c->exports)
        engine_producer_layer(c->engine, c->session, layer, c->computed);
    if (en->trace)
        c->layer_ns = base_now_ns();
}

/* Where pages are the device's own, being told of a layer costs a copy of it: the trace then does
 * without, rather than slow down what it looks at. */
static bool told_for_trace(const struct baton_engine *en)
{
    return en->trace && device_caps(en->binding->device)->host_kv;
}

static int run_batch(struct baton_engine *en, const struct baton_batch *b, struct baton_error *e)
{
    uint64_t id;
    int rc = device_submit(en->program, b, &id, e);
    return rc ? rc : device_wait(en->program, id, UINT64_MAX, e);
}

static int run_chunk(struct baton_engine *en, struct engine_session *s, uint32_t n, float *row,
                     struct baton_error *e)
{
    const struct engine_ask *a = &s->request->ask;
    struct chunk chunk = {.engine = en, .session = s, .computed = s->done + n};
    struct baton_span span = {.n_rows = n, .position = s->done, .lane = (uint32_t)s->lane};
    const uint32_t last_row = n - 1;
    int rc = kv_seq_reserve(s->seq, n, e);
    if (rc)
        return rc;
    span.kv = kv_seq_views(s->seq);
    chunk.exports = en->role == BATON_PRODUCER && a->mode == BATON_STREAM;
    bool tell = chunk.exports || told_for_trace(en);
    struct baton_batch b = {
        .ids = a->ids + s->done,
        .n_rows = n,
        .spans = &span,
        .n_spans = 1,
        .logit_rows = &last_row,
        .n_logits = row ? 1 : 0,
        .logits = row,
        .layer_done = tell ? layer_done : NULL,
        .ctx = &chunk,
    };
    uint64_t start = base_now_ns();
    chunk.layer_ns = start;
    rc = run_batch(en, &b, e);
    s->commit.compute_end_ns = base_now_ns();
    s->stats.prefill_ns += s->commit.compute_end_ns - start;
    engine_trace_chunk(en, s->done, n, start, tell ? chunk.layer_ns : 0, s->commit.compute_end_ns);
    if (rc == 0 && chunk.exports)
        engine_trace_device(en, s->done, n);
    if (rc == 0)
        kv_seq_advance(s->seq, n);
    return rc;
}

static void prefill_chunk(struct baton_engine *en, struct engine_session *s)
{
    const struct engine_ask *a = &s->request->ask;
    struct baton_error e;
    if (s->done == 0)
        engine_reuse_take(en, s);
    uint32_t left = a->n_ids - s->done;
    uint32_t n = left < en->chunk ? left : en->chunk;
    bool last = n == left;
    float *row = en->role == BATON_PRODUCER ? s->row : en->logits;
    /* A loaded cache that holds the whole prompt brings its last row along. */
    int rc = n ? run_chunk(en, s, n, last ? row : NULL, &e) : 0;
    if (n == 0)
        memcpy(row, kv_file_info(a->kv_load)->tokens.logits, en->vocab * sizeof *row);
    if (rc) {
        engine_session_fail(en, s, &e);
        return;
    }
    s->done += n;
    s->stats.prefilled_tokens = s->done;
    engine_reuse_put(en, s);
    if (last)
        engine_reuse_count(en, s);
    engine_request_publish(s->request, &s->stats);
    engine_count_pages(en);
    if (last && en->role == BATON_PRODUCER)
        engine_producer_prefilled(en, s);
    else if (last)
        engine_session_begin(en, s, row);
}

/* A session that the peer has room for goes first: it will be able to leave. */
static struct engine_session *next_prefill(struct baton_engine *en)
{
    struct engine_session *first = NULL;
    for (struct engine_session *s = en->sessions; s; s = s->next) {
        if (s->state != ENGINE_PREFILL)
            continue;
        if (atomic_load(&s->reserved))
            return s;
        if (!first)
            first = s;
    }
    return first;
}

/* ---- decode ------------------------------------------------------------------------------- */

static bool somebody_waits(const struct baton_engine *en)
{
    for (const struct engine_session *s = en->sessions; s; s = s->next)
        if (s->state == ENGINE_WAITING || s->state == ENGINE_PAIRED || s->state == ENGINE_IMPORTED)
            return true;
    return false;
}

/* Lanes that take part in a step, in lane order. A caller that leaves its rows of logits lying
 * pauses its lane, so that they do not fill the memory, but not while others wait for a lane: the
 * caller may be one that wants to see the others' tokens first. */
static uint32_t gather(struct baton_engine *en, struct engine_session **active)
{
    bool may_pause = !somebody_waits(en);
    uint32_t n = 0;
    for (uint32_t i = 0; i < en->lanes; i++) {
        struct engine_session *s = en->lane[i];
        if (s && s->state == ENGINE_DECODE && !(may_pause && engine_request_stalled(s->request)))
            active[n++] = s;
    }
    return n;
}

static int run_step(struct baton_engine *en, struct engine_session **active, uint32_t n,
                    struct baton_error *e)
{
    struct baton_span spans[ENGINE_MAX_LANES];
    int32_t ids[ENGINE_MAX_LANES];
    uint32_t rows[ENGINE_MAX_LANES];
    for (uint32_t i = 0; i < n; i++) {
        struct engine_session *s = active[i];
        int rc = kv_seq_reserve(s->seq, 1, e);
        if (rc)
            return rc;
        ids[i] = s->context[s->request->ask.n_ids + s->n_out - 1];
        rows[i] = i;
        spans[i] = (struct baton_span){
            .row = i,
            .n_rows = 1,
            .position = kv_seq_length(s->seq),
            .lane = (uint32_t)s->lane,
            .kv = kv_seq_views(s->seq),
        };
    }
    const struct baton_batch b = {
        .ids = ids,
        .n_rows = n,
        .spans = spans,
        .n_spans = n,
        .logit_rows = rows,
        .n_logits = n,
        .logits = en->logits,
    };
    return run_batch(en, &b, e);
}

static void decode_step(struct baton_engine *en, struct engine_session **active, uint32_t n)
{
    struct baton_error e;
    uint64_t start = base_now_ns();
    int rc = run_step(en, active, n, &e);
    engine_trace_step(en, n, start);
    atomic_fetch_add(&en->steps_by_lanes[n], 1);
    for (uint32_t i = 0; i < n; i++) {
        struct engine_session *s = active[i];
        if (rc) {
            engine_session_fail(en, s, &e);
            continue;
        }
        kv_seq_advance(s->seq, 1);
        if (en->prefix_steps)
            engine_reuse_put(en, s);
        s->stats.steps_by_lanes[n]++;
        engine_session_choose(en, s, en->logits + (size_t)i * en->vocab);
    }
    engine_count_pages(en);
}

/* ---- the loop ----------------------------------------------------------------------------- */

/* One piece of compute; false where nothing can run. */
static bool turn(struct baton_engine *en)
{
    struct engine_session *active[ENGINE_MAX_LANES];
    struct engine_session *prefill = next_prefill(en);
    uint32_t n = gather(en, active);
    if (prefill && (n == 0 || !en->chunk_last)) {
        en->chunk_last = true;
        prefill_chunk(en, prefill);
        return true;
    }
    en->chunk_last = false;
    if (n > 0)
        decode_step(en, active, n);
    return n > 0;
}

static void sleep_until_woken(struct baton_engine *en)
{
    struct pollfd fds[] = {{base_queue_fd(en->inbox), POLLIN, 0}, {en->wake->fd, POLLIN, 0}};
    uint64_t count, due = engine_held_due(en);
    struct timespec ts = {(time_t)(due / 1000000000u), (long)(due % 1000000000u)};
    ppoll(fds, 2, due == UINT64_MAX ? NULL : &ts, NULL);
    if (fds[1].revents) {
        ssize_t n = read(en->wake->fd, &count, sizeof count);
        (void)n;
    }
}

void *engine_thread(void *arg)
{
    struct baton_engine *en = arg;
    struct engine_message m;
    for (;;) {
        while (base_queue_pop(en->inbox, &m, 0))
            take_message(en, &m);
        engine_trace_states(en);
        engine_held_expire(en);
        take_cancels(en);
        if (atomic_load(&en->stopping) && !en->sessions)
            break;
        admit(en);
        engine_trace_states(en);
        if (!turn(en))
            sleep_until_woken(en);
    }
    return NULL;
}
