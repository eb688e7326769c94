/* SPDX-License-Identifier: Apache-2.0 */
/* Sessions: one timeline of tokens from submit to the end, whatever the role. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine_priv.h"

/* ---- submit ------------------------------------------------------------------------------- */

static int check_ids(const int32_t *ids, size_t n, uint32_t vocab, const char *what,
                     struct baton_error *e)
{
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= vocab)
            return base_fail(e, BATON_ERR_INPUT, "%s id %zu is %d, the model has ids 0 to %u", what,
                             i, ids[i], vocab - 1);
    return 0;
}

/* A device of whole prompts has a widest program, and nothing else can follow it. */
static int check_width(const struct baton_engine *en, size_t n_ids, struct baton_error *e)
{
    const struct baton_caps *caps = device_caps(en->binding->device);
    char list[96] = "";
    size_t used = 0;
    if (!caps->whole_prompt || n_ids <= caps->max_rows)
        return 0;
    for (uint32_t i = 0; i < BATON_MAX_WIDTHS && caps->widths[i] && used < sizeof list; i++)
        used += (size_t)snprintf(list + used, sizeof list - used, "%s%u", i ? ", " : "",
                                 caps->widths[i]);
    return base_fail(e, BATON_ERR_INPUT,
                     "the prompt has %zu tokens; device %s has programs of width %s", n_ids,
                     caps->name, list);
}

static int check_room(const struct baton_engine *en, const struct baton_request_options *o,
                      struct baton_error *e)
{
    uint64_t max = o->n_force ? o->n_force : o->max_tokens;
    uint32_t least = en->role == BATON_PRODUCER ? 0 : 1;
    if (o->n_ids > HANDOFF_MAX_IDS || o->n_ids + least > en->ctx)
        return base_fail(e, BATON_ERR_INPUT,
                         "the prompt has %zu tokens and leaves no room in a context of %u",
                         o->n_ids, en->ctx);
    if (o->n_force > UINT32_MAX || (least && o->n_ids + max > en->ctx))
        return base_fail(e, BATON_ERR_INPUT,
                         "%zu prompt and %llu new tokens do not fit a context of %u", o->n_ids,
                         (unsigned long long)max, en->ctx);
    return 0;
}

/* What a request has to do with peers and tickets. */
static int check_way(const struct baton_engine *en, const struct baton_request_options *o,
                     struct baton_error *e)
{
    uint8_t ticket[HANDOFF_TICKET];
    if (o->hold && en->role != BATON_PRODUCER)
        return base_fail(e, BATON_ERR_USAGE, "a producer alone holds requests for their tickets");
    if ((o->ticket || o->ask || o->from) && en->role != BATON_CONSUMER)
        return base_fail(e, BATON_ERR_USAGE, "a consumer alone pulls by ticket or asks");
    if (o->ticket && o->ask)
        return base_fail(e, BATON_ERR_USAGE, "a request has a ticket or asks, not both");
    if (o->from && !o->ticket && !o->ask)
        return base_fail(e, BATON_ERR_USAGE, "an address to pull from, and no ticket");
    bool here = en->role == BATON_CONSUMER && o->local_prefill && !o->ticket;
    if (en->no_peer && !o->hold && !o->from && !here)
        return base_fail(e, BATON_ERR_USAGE, "the engine was opened without a peer: %s",
                         en->role == BATON_PRODUCER ? "hold the request for who has its ticket"
                                                    : "say from whom to pull, or local_prefill");
    return o->ticket ? handoff_ticket_parse(o->ticket, ticket, e) : 0;
}

static int check(const struct baton_engine *en, const struct baton_request_options *o,
                 struct baton_error *e)
{
    if (!o->ids || o->n_ids == 0)
        return base_fail(e, BATON_ERR_INPUT, "the prompt is empty");
    if (o->n_force && !o->force)
        return base_fail(e, BATON_ERR_USAGE, "n_force is %zu and force is NULL", o->n_force);
    if (en->role == BATON_PRODUCER && !o->hold && o->mode != BATON_WHOLE && o->mode != BATON_STREAM)
        return base_fail(e, BATON_ERR_USAGE, "a producer's mode is whole or stream, not %d",
                         (int)o->mode);
    if (en->role == BATON_CONSUMER && o->local_prefill &&
        !device_caps(en->binding->device)->prefill)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "device %s can't prefill",
                         device_caps(en->binding->device)->name);
    if (en->role == BATON_PRODUCER && o->kv_save)
        return base_fail(e, BATON_ERR_USAGE, "a producer does not save: the consumer does");
    int rc = check_way(en, o, e);
    if (rc == 0)
        rc = check_room(en, o, e);
    if (rc == 0 && (en->role != BATON_CONSUMER || (en->no_peer && !o->ticket)))
        rc = check_width(en, o->n_ids, e);
    if (rc == 0)
        rc = check_ids(o->ids, o->n_ids, en->vocab, "prompt", e);
    return rc ? rc : check_ids(o->force, o->n_force, en->vocab, "forced", e);
}

/* Count it among the open requests; one id at a time where ids pair two ends. */
static int admit(struct baton_engine *en, uint64_t id, struct baton_error *e)
{
    int rc = 0;
    pthread_mutex_lock(&en->admit);
    if (en->n_open == en->lanes + ENGINE_MAX_WAITING)
        rc = base_fail(e, BATON_ERR_BUSY, "%u requests wait already", ENGINE_MAX_WAITING);
    for (uint32_t i = 0; rc == 0 && en->role != BATON_BOTH && i < en->n_open; i++)
        if (en->open_ids[i] == id)
            rc = base_fail(e, BATON_ERR_USAGE, "request id %llu is in use", (unsigned long long)id);
    if (rc == 0)
        en->open_ids[en->n_open++] = id;
    pthread_mutex_unlock(&en->admit);
    return rc;
}

static void dismiss(struct baton_engine *en, uint64_t id)
{
    pthread_mutex_lock(&en->admit);
    for (uint32_t i = 0; i < en->n_open; i++)
        if (en->open_ids[i] == id) {
            en->open_ids[i] = en->open_ids[--en->n_open];
            break;
        }
    pthread_mutex_unlock(&en->admit);
}

static void init_stats(const struct baton_engine *en, struct engine_session *s)
{
    struct baton_stats *st = &s->stats;
    st->prompt_tokens = s->request->ask.n_ids;
    st->global_first = st->global_last = st->local_first = st->local_last = -1;
    st->kv_bytes = kv_pool_bytes(en->pool);
    st->weights_bytes = model_bound_bytes(en->binding->bound);
}

static int open_session(struct baton_engine *en, const struct baton_request_options *o,
                        struct engine_session **out, struct baton_error *e)
{
    struct engine_session *s = base_try_alloc(1, sizeof *s, e);
    if (!s)
        return BATON_ERR_NOMEM;
    s->lane = -1;
    atomic_init(&s->reserved, false);
    int rc = engine_request_open(en->wake, o, &s->request, e);
    if (rc) {
        engine_session_free(s);
        return rc;
    }
    struct engine_ask *a = &s->request->ask;
    if (o->kv_load &&
        (rc = engine_kv_open(en->model, o->kv_load, a->ids, a->n_ids, &a->kv_load, e))) {
        engine_session_free(s);
        return rc;
    }
    if (!a->max_tokens && en->role != BATON_PRODUCER)
        a->max_tokens = en->ctx - a->n_ids;
    uint32_t output = en->role == BATON_PRODUCER ? 0 : a->max_tokens;
    s->context = base_try_alloc(a->n_ids + output, sizeof *s->context, e);
    s->sent = base_try_alloc(en->geometry.n_layers, sizeof *s->sent, e);
    rc = s->context && s->sent ? model_sampling_check(&a->sampling, e) : BATON_ERR_NOMEM;
    if (rc == 0 && en->role == BATON_PRODUCER &&
        !(s->row = base_try_alloc(en->vocab, sizeof *s->row, e)))
        rc = BATON_ERR_NOMEM;
    if (rc) {
        engine_session_free(s);
        return rc;
    }
    memcpy(s->context, a->ids, a->n_ids * sizeof *s->context);
    init_stats(en, s);
    s->request->stats = s->stats;
    *out = s;
    return 0;
}

int engine_submit(struct baton_engine *en, const struct baton_request_options *o,
                  struct baton_request **out, struct baton_error *e)
{
    struct engine_session *s;
    int rc = check(en, o, e);
    if (rc == 0)
        rc = open_session(en, o, &s, e);
    if (rc)
        return rc;
    rc = admit(en, o->request_id, e);
    if (rc) {
        engine_session_free(s);
        return rc;
    }
    *out = s->request;
    atomic_fetch_add(&s->request->refs, 1); /* the caller's, before the engine may drop its own */
    struct engine_message m = {.kind = ENGINE_SUBMIT, .session = s};
    base_queue_push_wait(en->inbox, &m);
    return 0;
}

void engine_session_free(struct engine_session *s)
{
    if (!s)
        return;
    free(s->context);
    free(s->sent);
    free(s->row);
    engine_request_put(s->request);
    free(s);
}

/* ---- pages and lanes ---------------------------------------------------------------------- */

void engine_count_pages(struct baton_engine *en)
{
    atomic_store(&en->blocks_used, kv_pool_used(en->pool));
    atomic_store(&en->blocks_cached, kv_pool_idle(en->pool));
}

/* The whole need is committed at once, so that a running request never finds the pool empty. */
int engine_session_take_pages(struct baton_engine *en, struct engine_session *s, uint32_t n_tokens,
                              struct baton_error *e)
{
    uint32_t blocks = (n_tokens + KV_BLOCK - 1) / KV_BLOCK;
    if (en->n_seqs == en->max_seqs || en->n_blocks + blocks > en->max_blocks)
        return base_fail(e, BATON_ERR_BUSY, "no pages free for %u positions", n_tokens);
    int rc = kv_seq_open(en->pool, &s->seq, e);
    if (rc)
        return rc;
    s->blocks = blocks;
    en->n_blocks += blocks;
    en->n_seqs++;
    return 0;
}

void engine_session_drop_pages(struct baton_engine *en, struct engine_session *s)
{
    if (!s->seq)
        return;
    kv_seq_close(s->seq);
    s->seq = NULL;
    en->n_blocks -= s->blocks;
    en->n_seqs--;
    engine_count_pages(en);
}

/* Positions that each layer retains of the sequence as it stands. */
static uint32_t retained(const struct baton_engine *en, const struct engine_session *s,
                         uint32_t first[KV_MAX_LAYERS])
{
    uint32_t n = kv_seq_length(s->seq);
    for (uint32_t l = 0; l < en->geometry.n_layers; l++)
        first[l] = kv_retained_first(&en->geometry, l, n);
    return n;
}

/* A mirror finds pages through their tables: any lane will do. */
static uint32_t lane_of(const struct engine_session *s)
{
    return s->lane < 0 ? 0 : (uint32_t)s->lane;
}

int engine_session_fetch(struct baton_engine *en, struct engine_session *s, struct baton_error *e)
{
    uint32_t first[KV_MAX_LAYERS], end = retained(en, s, first);
    if (s->lane < 0 && device_caps(en->binding->device)->lane_kv)
        return 0;
    return device_kv_read(en->binding->device, lane_of(s), kv_seq_views(s->seq),
                          en->geometry.n_layers, first, end, e);
}

int engine_session_deliver(struct baton_engine *en, struct engine_session *s, struct baton_error *e)
{
    uint32_t first[KV_MAX_LAYERS], end = retained(en, s, first);
    int rc = device_lane_clear(en->binding->device, lane_of(s), e);
    return rc ? rc
              : device_kv_write(en->binding->device, lane_of(s), kv_seq_views(s->seq),
                                en->geometry.n_layers, first, end, e);
}

int engine_session_take_lane(struct baton_engine *en, struct engine_session *s,
                             struct baton_error *e)
{
    uint32_t i = 0;
    while (i < en->lanes && en->lane[i])
        i++;
    if (i == en->lanes)
        return base_fail(e, BATON_ERR_BUSY, "no lane free");
    int rc = device_lane_bind(en->binding->device, i, e);
    if (rc)
        return rc;
    en->lane[i] = s;
    s->lane = (int)i;
    atomic_fetch_add(&en->lanes_used, 1);
    return 0;
}

void engine_session_drop_lane(struct baton_engine *en, struct engine_session *s)
{
    if (s->lane >= 0) {
        device_lane_release(en->binding->device, (uint32_t)s->lane);
        en->lane[s->lane] = NULL;
        atomic_fetch_sub(&en->lanes_used, 1);
    }
    s->lane = -1;
}

/* ---- the end ------------------------------------------------------------------------------ */

void engine_session_judge(struct engine_session *s, const char *verdict,
                          const struct baton_error *why)
{
    snprintf(s->stats.verdict, sizeof s->stats.verdict, "%s: %.16s", verdict,
             base_code_name(why->code));
    snprintf(s->stats.reason, sizeof s->stats.reason, "%s", why->text);
}

static void unlink_session(struct baton_engine *en, struct engine_session *s)
{
    struct engine_session **p = &en->sessions;
    while (*p != s)
        p = &(*p)->next;
    *p = s->next;
}

void engine_session_over(struct baton_engine *en, struct engine_session *s,
                         enum baton_finish finish, const struct baton_error *why)
{
    struct baton_error error = {0};
    if (why)
        error = *why;
    if (finish == BATON_FAILED && (error.code == 0 || error.code == BATON_ERR_CANCELLED))
        finish = BATON_CANCELLED;
    /* 0 tells a producer's caller that the consumer has the cache. */
    if (finish == BATON_CANCELLED && error.code == 0 && en->role == BATON_PRODUCER)
        base_fail(&error, BATON_ERR_CANCELLED, "request %llu was cancelled",
                  (unsigned long long)s->request->ask.id);
    if (error.code && en->role != BATON_BOTH && !s->stats.verdict[0])
        engine_session_judge(s, "failed", &error);
    s->stats.finish = finish;
    engine_trace_over(en, s);
    engine_held_over(en, s, finish, &error);
    unlink_session(en, s);
    engine_session_drop_lane(en, s);
    engine_session_drop_pages(en, s);
    dismiss(en, s->request->ask.id);
    engine_request_finish(s->request, &s->stats, &error);
    engine_session_free(s);
}

void engine_session_fail(struct baton_engine *en, struct engine_session *s,
                         const struct baton_error *why)
{
    struct baton_error tell = *why;
    if (!s->lent) {
        engine_session_over(en, s, BATON_FAILED, why);
        return;
    }
    if (tell.code == 0)
        base_fail(&tell, BATON_ERR_CANCELLED, "cancelled at the %s",
                  en->role == BATON_PRODUCER ? "producer" : "consumer");
    engine_post(en, s->state == ENGINE_PAIRED ? ENGINE_REFUSE : ENGINE_ABORT, s, &tell);
    engine_session_drop_lane(en, s);
    s->why = *why;
    s->state = ENGINE_CLOSING;
}

/* ---- tokens ------------------------------------------------------------------------------- */

static bool is_end(const struct model_config *c, int32_t id)
{
    for (uint32_t i = 0; i < c->n_eos; i++)
        if (c->eos[i] == id)
            return true;
    return false;
}

bool engine_takes_argmax(const struct engine_ask *a)
{
    const struct model_sampling *p = &a->sampling;
    return p->temperature == 0 && p->repetition_penalty == 1 && p->presence_penalty == 0 &&
           p->frequency_penalty == 0;
}

/* What greedy takes comes first: it is reported whatever is chosen, and usually it is chosen. */
static int pick(struct baton_engine *en, struct engine_session *s, const float *row,
                struct engine_token *t, struct baton_error *e)
{
    const struct engine_ask *a = &s->request->ask;
    const struct model_config *c = model_config_of(en->model->model);
    const struct model_sampling greedy = model_sampling_default();
    size_t n = a->n_ids + (size_t)s->n_out;
    float margin;
    int rc = model_sampler_pick(en->sampler, row, &greedy, s->context, n, a->n_ids, 0, s->n_out,
                                NULL, 0, &t->argmax, &t->margin, e);
    bool banned = s->n_out < a->min_tokens && c->n_eos > 0;
    t->id = t->argmax;
    if (rc || a->n_force || (engine_takes_argmax(a) && !banned))
        return rc;
    return model_sampler_pick(en->sampler, row, &a->sampling, s->context, n, a->n_ids, a->choice,
                              s->n_out, c->eos, banned ? c->n_eos : 0, &t->id, &margin, e);
}

/* Hand a chosen token over; the session may be over afterwards. */
static void emit(struct baton_engine *en, struct engine_session *s, struct engine_token *t,
                 const float *row)
{
    const struct engine_ask *a = &s->request->ask;
    struct baton_error e = {0};
    if (a->n_force)
        t->id = a->force[s->n_out];
    s->context[a->n_ids + s->n_out++] = t->id;
    bool end = !a->n_force && !a->ignore_eos && is_end(model_config_of(en->model->model), t->id);
    t->time_ns = base_now_ns();
    int rc = engine_request_push(s->request, t, row, a->want_logits ? en->vocab : 0, &s->stats, &e);
    if (rc)
        engine_session_fail(en, s, &e);
    else if (end)
        engine_session_over(en, s, BATON_STOP, NULL);
    else if (s->n_out == a->max_tokens)
        engine_session_over(en, s, BATON_LENGTH, NULL);
}

void engine_session_choose(struct baton_engine *en, struct engine_session *s, const float *row)
{
    struct engine_token t = {0};
    struct baton_error e = {0};
    int rc = pick(en, s, row, &t, &e);
    if (rc)
        engine_session_fail(en, s, &e);
    else
        emit(en, s, &t, row);
}

void engine_session_note_positions(const struct baton_engine *en, struct engine_session *s)
{
    const struct kv_geometry *g = &en->geometry;
    uint32_t n = s->request->ask.n_ids;
    for (uint32_t l = 0; l < g->n_layers; l++) {
        int32_t *first = g->local[l] ? &s->stats.local_first : &s->stats.global_first;
        int32_t *last = g->local[l] ? &s->stats.local_last : &s->stats.global_last;
        *first = (int32_t)kv_retained_first(g, l, n);
        *last = (int32_t)n - 1;
    }
}

void engine_session_begin(struct baton_engine *en, struct engine_session *s, const float *row)
{
    struct baton_error e = {0};
    struct engine_token t = {
        .id = s->commit.argmax, .argmax = s->commit.argmax, .margin = s->commit.margin};
    int rc;
    s->state = ENGINE_DECODE;
    engine_session_note_positions(en, s);
    engine_count_pages(en);
    rc = engine_session_observe(en, s, &e);
    if (rc == 0 && s->request->ask.kv_save)
        rc = engine_session_fetch(en, s, &e);
    if (rc == 0 && s->request->ask.kv_save)
        rc = engine_kv_save(en, s, row, &e);
    if (rc)
        engine_session_fail(en, s, &e);
    else if (row)
        engine_session_choose(en, s, row);
    else
        emit(en, s, &t, NULL);
}
