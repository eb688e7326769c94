/* SPDX-License-Identifier: Apache-2.0 */
/* Engines on a route, and requests through them. */
#include <stdlib.h>
#include <string.h>

#include "audit/audit_priv.h"
#include "audit/route.h"
#include "base/base.h"

/* ---- engines ------------------------------------------------------------------------------ */

/* A device that prefills for several lanes may have but one: requests then follow one another. */
static uint32_t lanes_of(const char *device, uint32_t lanes)
{
    struct device *d = NULL;
    if (device_open(device, &d, NULL))
        return lanes; /* the engine says why */
    uint32_t most = device_caps(d)->max_lanes;
    device_close(d);
    return most && most < lanes ? most : lanes;
}

static int open_end(const struct audit_route_options *o, enum baton_role role,
                    struct baton_link *link, struct baton_engine **out, struct baton_error *e)
{
    const struct baton_engine_options eo = {
        .struct_size = sizeof eo,
        .role = role,
        .device = role == BATON_PRODUCER ? o->prefill : o->decode,
        .lanes = role == BATON_PRODUCER ? lanes_of(o->prefill, o->lanes) : o->lanes,
        .ctx = o->ctx,
        .threads = o->threads,
        .peer_fd = -1,
        .link = link,
    };
    return baton_engine_open(o->model, &eo, out, e);
}

int audit_route_open(struct audit_route *r, const struct audit_route_options *o,
                     struct baton_error *e)
{
    struct baton_link *link[2] = {NULL, NULL};
    *r = (struct audit_route){.mode = o->mode, .vocab = baton_model_vocab(o->model)};
    if (o->mode == BATON_NATIVE)
        return open_end(o, BATON_BOTH, NULL, &r->consumer, e);
    int rc = baton_link_pair(&link[0], &link[1], e);
    if (rc)
        return rc;
    rc = open_end(o, BATON_PRODUCER, link[0], &r->producer, e);
    if (rc)
        baton_link_close(link[1]);
    else
        rc = open_end(o, BATON_CONSUMER, link[1], &r->consumer, e);
    if (rc)
        audit_route_close(r, NULL);
    return rc;
}

void audit_route_close(struct audit_route *r, struct verify_left *left)
{
    verify_left_add(left, r->producer);
    verify_left_add(left, r->consumer);
    baton_engine_close(r->producer);
    baton_engine_close(r->consumer);
    audit_route_forget(r);
    *r = (struct audit_route){0};
}

/* ---- caches ------------------------------------------------------------------------------- */

/* In an engine's thread; the caller looks after the requests ended, which orders the two. */
static int see(void *ctx, const struct engine_look *look, struct baton_error *e)
{
    struct audit_seen *s = ctx;
    if (s->n == sizeof s->caches / sizeof *s->caches)
        return base_fail(e, BATON_ERR_INTERNAL, "more caches than are kept");
    int rc = verify_cache_read(look, &s->caches[s->n], e);
    s->n += rc == 0;
    return rc;
}

void audit_route_observe(struct audit_route *r)
{
    engine_observe(r->consumer, see, &r->seen);
    if (r->producer)
        engine_observe(r->producer, see, &r->sent);
}

static void forget(struct audit_seen *s)
{
    for (size_t i = 0; i < s->n; i++)
        verify_cache_free(s->caches[i]);
    *s = (struct audit_seen){0};
}

void audit_route_forget(struct audit_route *r)
{
    forget(&r->seen);
    forget(&r->sent);
}

struct verify_cache *audit_seen_find(const struct audit_seen *s, uint32_t n_tokens)
{
    for (size_t i = 0; i < s->n; i++)
        if (s->caches[i]->n_tokens == n_tokens)
            return s->caches[i];
    return NULL;
}

/* ---- outputs ------------------------------------------------------------------------------ */

void audit_output_free(struct audit_output *o)
{
    free(o->ids);
    free(o->margins);
    free(o->time_ns);
    free(o->rows);
    memset(o, 0, sizeof *o);
}

static int output_init(struct audit_output *o, uint32_t n, bool hashed, struct baton_error *e)
{
    memset(o, 0, sizeof *o);
    o->cap = n;
    o->hashed = hashed;
    o->rows = base_try_alloc(n, sizeof *o->rows, e);
    o->ids = base_try_alloc(n, sizeof *o->ids, e);
    o->margins = base_try_alloc(n, sizeof *o->margins, e);
    o->time_ns = base_try_alloc(n, sizeof *o->time_ns, e);
    return o->ids && o->margins && o->time_ns && o->rows ? 0 : BATON_ERR_NOMEM;
}

/* ---- requests ----------------------------------------------------------------------------- */

/* The two ends of one request; producer NULL where native. */
struct ends {
    struct baton_request *producer, *consumer;
};

static int submit(struct audit_route *r, const struct audit_ask *a, struct ends *x,
                  struct baton_error *e)
{
    struct baton_request_options o = {
        .struct_size = sizeof o,
        .ids = a->ids,
        .n_ids = a->n_ids,
        .request_id = r->next_id++,
        .mode = r->mode,
        .max_tokens = a->n,
        .ignore_eos = a->past_end,
        .want_logits = a->together, /* it pauses when some of its rows were not pulled */
    };
    int rc = baton_submit(r->consumer, &o, &x->consumer, e);
    o.want_logits = false;
    if (rc == 0 && r->producer)
        rc = baton_submit(r->producer, &o, &x->producer, e);
    if (rc && x->consumer)
        baton_cancel(x->consumer); /* nobody would ever offer it */
    return rc;
}

static void take(struct audit_output *o, const struct baton_token *t, uint32_t vocab)
{
    if (o->n == o->cap)
        return;
    o->ids[o->n] = t->id;
    o->margins[o->n] = t->margin;
    o->time_ns[o->n] = t->time_ns;
    if (o->hashed && t->logits)
        base_sha256(t->logits, vocab * sizeof *t->logits, o->rows[o->n]);
    o->n++;
}

/* At most n tokens; how many came. */
static uint32_t pull(struct baton_request *request, struct audit_output *o, uint32_t n,
                     int64_t timeout_ns, uint32_t vocab)
{
    struct baton_token t;
    struct baton_error e = {0};
    for (uint32_t i = 0; i < n && !o->over; i++) {
        int rc = baton_next(request, &t, timeout_ns, &e);
        if (rc == BATON_ERR_TIMEOUT)
            return i;
        if (rc == 1) {
            take(o, &t, vocab);
            continue;
        }
        o->over = true;
        if (rc < 0)
            o->why = e;
    }
    return n;
}

/* All of them to their ends. The first token of each is waited for before the second of any: until
 * then those that are `together` pause after a few. Then in bursts, so that all go on at once. */
static void pull_all(struct audit_route *r, struct ends *ends, struct audit_output *outputs,
                     size_t n)
{
    enum { BURST = 8, SHORT_NS = 1000000 };
    size_t left = 0;
    for (size_t i = 0; i < n; i++) {
        outputs[i].over = outputs[i].why.code != 0; /* was not submitted */
        pull(ends[i].consumer, &outputs[i], 1, -1, r->vocab);
    }
    do {
        uint32_t came = 0;
        size_t first = n;
        left = 0;
        for (size_t i = 0; i < n; i++) {
            came += pull(ends[i].consumer, &outputs[i], BURST, 0, r->vocab);
            left += !outputs[i].over;
            first = !outputs[i].over && first == n ? i : first;
        }
        if (left && !came)
            pull(ends[first].consumer, &outputs[first], 1, SHORT_NS, r->vocab);
    } while (left);
}

/* Of two ends that failed, the one that knows the cause: the other only lost its peer. */
static bool knows_less(const struct baton_error *e)
{
    return e->code == BATON_ERR_PEER || e->code == BATON_ERR_CANCELLED || e->code == 0;
}

static void finish(struct ends *x, struct audit_output *o)
{
    struct baton_error theirs = {0};
    struct baton_token t;
    if (o->why.code && x->producer)
        baton_cancel(x->producer);
    int rc = x->producer ? baton_next(x->producer, &t, -1, &theirs) : 0;
    if (rc < 0 && knows_less(&o->why) && (o->why.code == 0 || !knows_less(&theirs)))
        o->why = theirs;
    o->stats.struct_size = sizeof o->stats;
    baton_request_stats(x->consumer, &o->stats);
}

int audit_route_run(struct audit_route *r, const struct audit_ask *asks,
                    struct audit_output *outputs, size_t n, uint64_t steps[9],
                    struct baton_error *e)
{
    struct engine_load before, after;
    struct ends *ends = base_try_alloc(n, sizeof *ends, e);
    int rc = ends ? 0 : BATON_ERR_NOMEM;
    memset(outputs, 0, n * sizeof *outputs);
    for (size_t i = 0; i < n && rc == 0; i++)
        rc = output_init(&outputs[i], asks[i].n, asks[i].together, e);
    engine_load(r->consumer, &before);
    for (size_t i = 0; i < n && rc == 0; i++)
        submit(r, &asks[i], &ends[i], &outputs[i].why);
    if (rc == 0)
        pull_all(r, ends, outputs, n);
    for (size_t i = 0; i < n && rc == 0; i++)
        if (ends[i].consumer)
            finish(&ends[i], &outputs[i]);
    for (size_t i = 0; i < n && ends; i++) {
        baton_request_close(ends[i].producer);
        baton_request_close(ends[i].consumer);
    }
    engine_load(r->consumer, &after);
    for (int k = 0; k < 9 && steps; k++)
        steps[k] = after.steps_by_lanes[k] - before.steps_by_lanes[k];
    free(ends);
    return rc;
}

/* ---- JSON --------------------------------------------------------------------------------- */

static json_t *lists_json(const struct audit_output *o)
{
    json_t *ids = json_array(), *margins = json_array(), *times = json_array();
    json_t *rows = json_array();
    char hex[65];
    for (uint32_t i = 0; i < o->n; i++) {
        base_hex(o->rows[i], 32, hex);
        if (o->hashed)
            json_array_append_new(rows, json_string(hex));
        json_array_append_new(ids, json_integer(o->ids[i]));
        json_array_append_new(margins, audit_real((double)o->margins[i]));
        json_array_append_new(times, json_integer((json_int_t)(o->time_ns[i] - o->time_ns[0])));
    }
    return json_pack("{s:o,s:o,s:o,s:o}", "ids", ids, "margins", margins, "token_ns", times,
                     "rows_sha256", rows);
}

static json_t *text_json(const struct audit_output *o, const struct baton_model *m)
{
    char *text = NULL;
    if (baton_detokenize(m, o->ids, o->n, &text, NULL))
        return json_null();
    json_t *s = json_string(text);
    free(text);
    return s ? s : json_null();
}

struct json_t *audit_output_json(const struct audit_output *o, const struct baton_model *m)
{
    static const char *const finishes[] = {"running", "stop", "length", "cancelled", "failed"};
    json_t *x = lists_json(o), *error = json_null();
    if (o->why.code)
        error = json_pack("{s:s,s:s}", "code", base_code_name(o->why.code), "message", o->why.text);
    json_object_set_new(x, "text", text_json(o, m));
    json_object_set_new(x, "finish", json_string(finishes[o->stats.finish % 5]));
    json_object_set_new(x, "stats", audit_stats_json(&o->stats));
    json_object_set_new(x, "error", error);
    return x;
}

struct json_t *audit_route_output_json(const struct audit_route *r, const struct audit_output *o,
                                       const struct baton_model *m, uint32_t n_prompt)
{
    json_t *out = audit_output_json(o, m);
    const struct verify_run run = {.cache = audit_seen_find(&r->seen, n_prompt),
                                   .sent = audit_seen_find(&r->sent, n_prompt)};
    json_object_set_new(out, "holds", audit_holder_json(run.cache));
    json_object_set_new(out, "sent", audit_holder_json(run.sent));
    json_object_set_new(out, "slots", audit_slots_json(&run, NULL));
    return out;
}
