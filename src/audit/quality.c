/* SPDX-License-Identifier: Apache-2.0 */
/* Asking a set: cohort after cohort, each prompt alone and then all of the cohort at once. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "audit/audit_priv.h"
#include "audit/quality.h"
#include "base/base.h"

struct quality {
    const struct audit_quality_options *options;
    const struct audit_set *set;
    json_t *reference; /* {id: {...}} of this set, or NULL */
    size_t n;
    struct audit_ask *asks; /* [n] */
    struct audit_route route;
    struct verify_left left;
    json_t *results;
};

/* ---- prompts ------------------------------------------------------------------------------ */

static const char *text_of(const struct quality *q, size_t i, const char *key)
{
    return json_string_value(json_object_get(json_array_get(q->set->prompts, i), key));
}

static int tokenize(struct quality *q, struct baton_error *e)
{
    q->n = json_array_size(q->set->prompts);
    q->asks = base_try_alloc(q->n, sizeof *q->asks, e);
    for (size_t i = 0; q->asks && i < q->n; i++) {
        const char *prompt = text_of(q, i, "prompt");
        int32_t *ids = NULL;
        int rc = baton_tokenize(q->options->route.model, prompt, strlen(prompt), true, &ids,
                                &q->asks[i].n_ids, e);
        if (rc)
            return rc;
        q->asks[i].ids = ids;
        q->asks[i].n = q->options->n;
    }
    return q->asks ? 0 : BATON_ERR_NOMEM;
}

static int read_reference(struct quality *q, struct baton_error *e)
{
    const char *path = q->options->reference;
    json_t *doc = NULL;
    if (!path)
        return 0;
    int rc = base_json_load(path, 64 << 20, &doc, e);
    const json_t *list = json_object_get(json_object_get(doc, "sets"), q->set->name);
    if (rc == 0 && !json_is_array(list))
        rc = base_fail(e, BATON_ERR_INPUT, "%.120s has no outputs of the set %s", path,
                       q->set->name);
    q->reference = json_object();
    for (size_t i = 0; i < json_array_size(list); i++) {
        json_t *o = json_array_get(list, i);
        const char *id = json_string_value(json_object_get(o, "id"));
        if (id)
            json_object_set(q->reference, id, o);
    }
    for (size_t i = 0; rc == 0 && i < q->n; i++)
        if (!json_object_get(q->reference, text_of(q, i, "id")))
            rc = base_fail(e, BATON_ERR_INPUT, "%.120s has no output of %.40s", path,
                           text_of(q, i, "id"));
    json_decref(doc);
    return rc;
}

/* ---- one prompt's document ---------------------------------------------------------------- */

static json_t *reference_json(const struct quality *q, size_t i)
{
    static const char *const keys[] = {"output", "min_margin", "counted", "prompt_tokens"};
    json_t *to = json_object();
    const json_t *o = q->reference ? json_object_get(q->reference, text_of(q, i, "id")) : NULL;
    for (size_t k = 0; o && k < sizeof keys / sizeof *keys; k++)
        json_object_set(to, keys[k], json_object_get(o, keys[k]));
    if (o)
        return to;
    json_decref(to);
    return json_null();
}

static json_t *phase_json(const struct quality *q, const char *phase, const struct audit_output *o)
{
    json_t *x = audit_output_json(o, q->options->route.model);
    json_object_set_new(x, "phase", json_string(phase));
    return x;
}

static json_t *ids_json(const struct audit_ask *a)
{
    json_t *list = json_array();
    for (size_t i = 0; i < a->n_ids; i++)
        json_array_append_new(list, json_integer(a->ids[i]));
    return list;
}

/* A cohort: prompts [first, first + n), and the steps of their time together. */
struct cohort {
    size_t number, first, n;
    struct audit_output *alone, *together; /* [n]; together NULL: not asked */
    uint64_t steps[9];
};

static json_t *cohort_json(const struct quality *q, const struct cohort *c, size_t k)
{
    uint32_t lanes = q->options->route.lanes;
    json_t *steps = json_array();
    for (int i = 1; i < 9; i++)
        json_array_append_new(steps, json_integer((json_int_t)c->steps[i]));
    /* counted once: with the cohort's first prompt */
    json_int_t full = k == 0 && lanes > 1 && lanes < 9 ? (json_int_t)c->steps[lanes] : 0;
    return json_pack("{s:I,s:I,s:i,s:o,s:I}", "number", (json_int_t)c->number, "prompts",
                     (json_int_t)c->n, "lanes", (int)lanes, "steps_by_lanes", steps,
                     "full_lane_steps", full);
}

static json_t *raw_json(const struct quality *q, const struct cohort *c, size_t k)
{
    size_t i = c->first + k;
    const json_t *prompt = json_array_get(q->set->prompts, i);
    json_t *runs = json_array();
    json_array_append_new(runs, phase_json(q, "sequential", &c->alone[k]));
    if (c->together)
        json_array_append_new(runs, phase_json(q, "concurrent", &c->together[k]));
    return json_pack("{s:i,s:s,s:O,s:O?,s:O,s:O?,s:o,s:I,s:i,s:o,s:o,s:o}", "schema", AUDIT_SCHEMA,
                     "kind", "quality", "id", json_object_get(prompt, "id"), "category",
                     json_object_get(prompt, "category"), "answer",
                     json_object_get(prompt, "answer"), "json", json_object_get(prompt, "json"),
                     "prompt_ids", ids_json(&q->asks[i]), "n_prompt", (json_int_t)q->asks[i].n_ids,
                     "n", (int)q->options->n, "reference", reference_json(q, i), "cohort",
                     cohort_json(q, c, k), "runs", runs);
}

static int keep(struct quality *q, const struct cohort *c, size_t k, struct baton_error *e)
{
    json_t *raw = raw_json(q, c, k);
    json_t *computed = raw ? audit_recompute_quality(raw, e) : NULL;
    json_t *result = json_incref(json_object_get(computed, "result"));
    json_decref(computed);
    if (!result) {
        json_decref(raw);
        return base_fail(e, BATON_ERR_INTERNAL, "an answer can't be kept as JSON");
    }
    json_array_append(q->results, result);
    if (!q->options->evidence) {
        json_decref(raw);
        json_decref(result);
        return 0;
    }
    const struct audit_attempt a = {
        .name = text_of(q, c->first + k, "id"), .raw = raw, .result = result, .supersedes = -1};
    return audit_evidence_add(q->options->evidence, &a, e);
}

/* ---- asking ------------------------------------------------------------------------------- */

static int ask_cohort(struct quality *q, struct cohort *c, struct baton_error *e)
{
    const struct audit_ask *asks = q->asks + c->first;
    int rc = 0;
    for (size_t k = 0; k < c->n && rc == 0; k++)
        rc = audit_route_run(&q->route, &asks[k], &c->alone[k], 1, NULL, e);
    if (rc == 0 && c->together)
        rc = audit_route_run(&q->route, asks, c->together, c->n, c->steps, e);
    for (size_t k = 0; k < c->n && rc == 0; k++)
        rc = keep(q, c, k, e);
    for (size_t k = 0; k < c->n; k++) {
        audit_output_free(&c->alone[k]);
        if (c->together)
            audit_output_free(&c->together[k]);
    }
    return rc;
}

static int ask_all(struct quality *q, struct baton_error *e)
{
    const struct audit_quality_options *o = q->options;
    struct audit_output *outputs = base_try_alloc(2 * (size_t)o->cohort, sizeof *outputs, e);
    int rc = outputs ? 0 : BATON_ERR_NOMEM;
    for (size_t i = 0; i < q->n && rc == 0; i += o->cohort) {
        struct cohort c = {.number = i / o->cohort,
                           .first = i,
                           .n = q->n - i < o->cohort ? q->n - i : o->cohort,
                           .alone = outputs,
                           .together = o->route.lanes > 1 ? outputs + o->cohort : NULL};
        memset(outputs, 0, 2 * (size_t)o->cohort * sizeof *outputs);
        rc = ask_cohort(q, &c, e);
        if (o->progress)
            o->progress(o->ctx, i + c.n, q->n);
    }
    free(outputs);
    return rc;
}

static int open_route(struct quality *q, struct baton_error *e)
{
    struct audit_route_options r = q->options->route;
    int rc = r.mode == BATON_NATIVE ? 0 : baton_model_prepare(r.model, r.prefill, e);
    if (rc == 0)
        rc = baton_model_prepare(r.model, r.decode, e);
    for (size_t i = 0; i < q->n; i++) {
        uint32_t due = (uint32_t)q->asks[i].n_ids + q->options->n;
        r.ctx = due > r.ctx ? due : r.ctx;
    }
    return rc ? rc : audit_route_open(&q->route, &r, e);
}

int audit_quality_run(const struct audit_quality_options *o, const struct audit_set *s,
                      struct json_t **results, struct baton_error *e)
{
    struct quality q = {.options = o, .set = s, .results = json_array()};
    int rc = tokenize(&q, e);
    if (rc == 0)
        rc = read_reference(&q, e);
    if (rc == 0)
        rc = open_route(&q, e);
    if (rc == 0)
        rc = ask_all(&q, e);
    audit_route_close(&q.route, &q.left);
    const struct audit_cleanup cleanup = {.left = q.left};
    if (rc == 0 && o->evidence)
        rc = audit_evidence_finish(o->evidence, &cleanup, e);
    for (size_t i = 0; q.asks && i < q.n; i++)
        free((void *)(uintptr_t)q.asks[i].ids);
    free(q.asks);
    json_decref(q.reference);
    if (rc)
        json_decref(q.results);
    else
        *results = q.results;
    return rc;
}
