/* SPDX-License-Identifier: Apache-2.0 */
/* Cells of the matrix, one after another. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "audit/audit_priv.h"
#include "audit/matrix.h"
#include "base/base.h"

static const char *const route_names[] = {"native", "whole", "stream"};

struct matrix {
    const struct audit_matrix *config;
    const struct audit_matrix_options *options;
    struct verify_left left;
    json_t *cells;
    uint64_t done;
    /* of the model at hand */
    const struct audit_matrix_model *entry;
    struct baton_model *model; /* NULL: `why` says why it can't be opened */
    struct baton_error why;
    char pin[65];
    struct verify_prompt prompts[AUDIT_MATRIX_PROMPTS];
    json_t
        *reference; /* outputs of cpu:ref; null where they are not wanted, NULL before the first */
    /* of the consumer at hand */
    json_t *native; /* outputs of its device alone; null where it can't prefill; NULL: before */
};

/* A cell: which, how often it was tried, what became of it. */
struct cell {
    const struct audit_matrix_consumer *consumer;
    enum baton_mode mode;
    char name[200];
    int64_t supersedes; /* the attempt that this one is the retry of */
};

static uint32_t longest(const struct matrix *x)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < x->config->n_prompts; i++)
        n = x->config->lengths[i] > n ? x->config->lengths[i] : n;
    return n;
}

/* ---- outputs ------------------------------------------------------------------------------ */

static void fill_asks(const struct matrix *x, struct audit_ask *asks, bool together)
{
    for (uint32_t i = 0; i < x->config->n_prompts; i++)
        asks[i] = (struct audit_ask){.ids = x->prompts[i].ids,
                                     .n_ids = x->prompts[i].n_ids,
                                     .n = x->config->n,
                                     .past_end = true,
                                     .together = together};
}

/* All prompts at once, with their caches. */
static int run_together(struct matrix *x, struct audit_route *r, json_t *repeats,
                        struct baton_error *e)
{
    struct audit_ask asks[AUDIT_MATRIX_PROMPTS];
    struct audit_output outputs[AUDIT_MATRIX_PROMPTS];
    uint64_t steps[9];
    uint32_t n = x->config->n_prompts;
    fill_asks(x, asks, true);
    audit_route_forget(r);
    int rc = audit_route_run(r, asks, outputs, n, steps, e);
    json_t *list = json_array(), *by = json_array();
    for (uint32_t i = 0; i < n && rc == 0; i++)
        json_array_append_new(
            list, audit_route_output_json(r, &outputs[i], x->model, (uint32_t)x->prompts[i].n_ids));
    for (int k = 1; k < 9 && rc == 0; k++)
        json_array_append_new(by, json_integer((json_int_t)steps[k]));
    for (uint32_t i = 0; i < n; i++)
        audit_output_free(&outputs[i]);
    json_array_append_new(repeats, json_pack("{s:o,s:o}", "steps_by_lanes", by, "outputs", list));
    return rc;
}

/* Each prompt alone on one device that does both. */
static int run_alone(struct matrix *x, const char *device, json_t **out, struct baton_error *e)
{
    const struct audit_route_options o = {.model = x->model,
                                          .decode = device,
                                          .mode = BATON_NATIVE,
                                          .lanes = 1,
                                          .ctx = longest(x) + x->config->n,
                                          .threads = x->options->threads};
    struct audit_ask asks[AUDIT_MATRIX_PROMPTS];
    struct audit_route r = {0};
    json_t *list = json_array();
    fill_asks(x, asks, false);
    int rc = audit_route_open(&r, &o, e);
    for (uint32_t i = 0; i < x->config->n_prompts && rc == 0; i++) {
        struct audit_output output;
        rc = audit_route_run(&r, &asks[i], &output, 1, NULL, e);
        if (rc == 0 && output.why.code) {
            *e = output.why;
            rc = e->code;
        }
        if (rc == 0)
            json_array_append_new(list, audit_output_json(&output, x->model));
        audit_output_free(&output);
    }
    audit_route_close(&r, &x->left);
    if (rc)
        json_decref(list);
    else
        *out = list;
    return rc;
}

/* ---- devices ------------------------------------------------------------------------------ */

/* "" where the device is there and can do it; else why not. */
static void look_at_device(const char *name, bool prefill, bool decode, uint32_t lanes, char *why,
                           size_t size)
{
    struct baton_error e;
    struct device *d = NULL;
    why[0] = '\0';
    if (device_open(name, &d, &e)) {
        snprintf(why, size, "%s", e.text);
        return;
    }
    const struct baton_caps *c = device_caps(d);
    if (prefill && !c->prefill)
        snprintf(why, size, "%s does not prefill", name);
    else if (decode && !c->decode)
        snprintf(why, size, "%s does not decode", name);
    else if (decode && c->max_lanes < lanes)
        snprintf(why, size, "%s has %u lanes, not %u", name, c->max_lanes, lanes);
    device_close(d);
}

/* ---- one cell ----------------------------------------------------------------------------- */

/* A bit of a position that every prompt holds: of a global layer where there is one. */
static int plant(struct matrix *x, struct audit_route *r, struct baton_error *e)
{
    const struct model_config *c = model_config_of(engine_model(x->model));
    uint32_t layer = 0, least = UINT32_MAX, most = longest(x);
    for (uint32_t i = 0; i < x->config->n_prompts; i++)
        least = x->config->lengths[i] < least ? x->config->lengths[i] : least;
    while (layer + 1 < c->n_layers && c->local[layer])
        layer++;
    if (c->local[layer] && most + 1 > c->window + least)
        return base_fail(e, BATON_ERR_INPUT,
                         "--fault: no position stands in the window of every prompt");
    const struct engine_flip f = {.layer = layer, .which = KV_V, .position = least - 1, .bit = 7};
    engine_plant_flip(r->consumer, &f);
    return 0;
}

static int run_repeats(struct matrix *x, const struct cell *c, json_t *repeats,
                       struct baton_error *e)
{
    const struct audit_route_options o = {.model = x->model,
                                          .prefill = c->consumer->producer,
                                          .decode = c->consumer->device,
                                          .mode = c->mode,
                                          .lanes = c->consumer->lanes,
                                          .ctx = longest(x) + x->config->n,
                                          .threads = x->options->threads};
    struct audit_route r = {0};
    int rc = audit_route_open(&r, &o, e);
    if (rc == 0)
        audit_route_observe(&r);
    if (rc == 0 && x->options->plant_flip && c->mode != BATON_NATIVE)
        rc = plant(x, &r, e);
    for (uint32_t i = 0; i < x->config->repeats && rc == 0; i++)
        rc = run_together(x, &r, repeats, e);
    audit_route_close(&r, &x->left);
    return rc;
}

static json_t *prompts_json(const struct matrix *x)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < x->config->n_prompts; i++) {
        json_t *ids = json_array();
        for (size_t k = 0; k < x->prompts[i].n_ids; k++)
            json_array_append_new(ids, json_integer(x->prompts[i].ids[k]));
        json_array_append_new(list, json_pack("{s:s,s:o}", "name", x->prompts[i].name, "ids", ids));
    }
    return list;
}

static json_t *cell_json(const struct matrix *x, const struct cell *c)
{
    bool native = c->mode == BATON_NATIVE;
    return json_pack("{s:s,s:s,s:s,s:s,s:i}", "model", x->entry->name, "route",
                     route_names[c->mode], "producer",
                     native ? c->consumer->device : c->consumer->producer, "consumer",
                     c->consumer->device, "lanes", (int)c->consumer->lanes);
}

/* Takes `repeats` over. */
static json_t *raw_json(const struct matrix *x, const struct cell *c, json_t *repeats)
{
    const struct model_config *m = model_config_of(engine_model(x->model));
    json_t *local = json_array();
    for (uint32_t l = 0; l < m->n_layers; l++)
        json_array_append_new(local, json_integer(m->local[l] != 0));
    return json_pack("{s:i,s:s,s:s,s:o,s:i,s:i,s:o,s:o,s:o,s:O,s:O}", "schema", AUDIT_SCHEMA, "pin",
                     x->pin, "kind", "matrix", "cell", cell_json(x, c), "n", (int)x->config->n,
                     "window", (int)m->window, "local", local, "prompts", prompts_json(x),
                     "repeats", repeats, "native", x->native, "reference", x->reference);
}

/* Native and the reference, each once for as many cells as share them. */
static int run_others(struct matrix *x, const struct cell *c, struct baton_error *e)
{
    char why[252];
    int rc = 0;
    if (!x->reference)
        rc = x->config->reference ? run_alone(x, "cpu:ref", &x->reference, e)
                                  : ((x->reference = json_null()), 0);
    if (rc || x->native)
        return rc;
    look_at_device(c->consumer->device, true, true, 1, why, sizeof why);
    if (why[0])
        x->native = json_null();
    return why[0] ? 0 : run_alone(x, c->consumer->device, &x->native, e);
}

/* ---- results ------------------------------------------------------------------------------ */

/* Takes raw (may be NULL) and result over. */
static int keep(struct matrix *x, const struct cell *c, json_t *raw, json_t *result,
                struct baton_error *e)
{
    if (!result) {
        json_decref(raw);
        return base_fail(e, BATON_ERR_NOMEM, "no memory for %s", c->name);
    }
    json_object_set_new(result, "name", json_string(c->name));
    json_array_append(x->cells, result);
    const struct audit_attempt a = {
        .name = c->name, .raw = raw, .result = result, .supersedes = c->supersedes};
    if (x->options->evidence)
        return audit_evidence_add(x->options->evidence, &a, e);
    json_decref(raw);
    json_decref(result);
    return 0;
}

/* A cell that did not run: `verdict` is not_run or error. */
static int keep_absent(struct matrix *x, const struct cell *c, const char *verdict,
                       const char *depends_on, const char *why, struct baton_error *e)
{
    json_t *o = cell_json(x, c);
    json_t *more = json_pack("{s:s,s:s,s:s,s:s,s:s,s:s?}", "within_route", "not_run", "vs_native",
                             "not_run", "vs_reference", "not_run", "verdict", verdict, "why", why,
                             "depends_on", depends_on);
    json_object_update(o, more);
    json_decref(more);
    return keep(x, c, NULL, o, e);
}

/* What the verdict rests on, in a sentence. */
static json_t *why_json(const json_t *result, const json_t *raw)
{
    const char *verdict = json_string_value(json_object_get(result, "verdict"));
    if (!verdict || !strcmp(verdict, "pass"))
        return json_null();
    const json_t *repeats = json_object_get(raw, "repeats");
    for (size_t r = 0; r < json_array_size(repeats); r++) {
        const json_t *outputs = json_object_get(json_array_get(repeats, r), "outputs");
        for (size_t i = 0; i < json_array_size(outputs); i++) {
            const json_t *error = json_object_get(json_array_get(outputs, i), "error");
            if (json_is_object(error))
                return json_incref(json_object_get(error, "message"));
        }
    }
    if (!strcmp(verdict, "error"))
        return json_string("no step had all lanes active");
    return json_string("a slot at the consumer is not the producer's, or a repeat differs");
}

static int keep_run(struct matrix *x, const struct cell *c, json_t *raw, struct baton_error *e)
{
    json_t *computed = raw ? audit_recompute_matrix(raw, e) : NULL;
    json_t *result = json_incref(json_object_get(computed, "result"));
    if (result) {
        json_object_set_new(result, "why", why_json(result, raw));
        json_object_set_new(result, "depends_on", json_null());
    }
    json_decref(computed);
    return keep(x, c, raw, result, e);
}

/* ---- order -------------------------------------------------------------------------------- */

/* The verdict of a cell of this run, or ""; its native cell is looked for by whole and stream. */
static const char *verdict_of(const json_t *cells, const char *name)
{
    for (size_t i = json_array_size(cells); i-- > 0;) {
        const json_t *o = json_array_get(cells, i);
        const char *is = json_string_value(json_object_get(o, "name"));
        const char *verdict = json_string_value(json_object_get(o, "verdict"));
        if (is && verdict && !strcmp(is, name))
            return verdict;
    }
    return "";
}

/* Why a cell can't run: *depends_on is a device or a cell. "" where it can. */
static void look_ahead(const struct matrix *x, const struct cell *c, char *depends_on, size_t size,
                       char *why, size_t why_size)
{
    bool native = c->mode == BATON_NATIVE;
    snprintf(depends_on, size, "%s", c->consumer->device);
    look_at_device(c->consumer->device, native, true, c->consumer->lanes, why, why_size);
    if (why[0] || native)
        return;
    snprintf(depends_on, size, "%s", c->consumer->producer);
    look_at_device(c->consumer->producer, true, false, 1, why, why_size);
    if (why[0])
        return;
    snprintf(depends_on, size, "%s/native/%s", x->entry->name, c->consumer->name);
    const char *v = verdict_of(x->cells, depends_on);
    if (!strcmp(v, "fail") || !strcmp(v, "error"))
        snprintf(why, why_size, "the consumer alone: %s", v);
}

static int run_cell(struct matrix *x, const struct cell *c, struct baton_error *e)
{
    char depends_on[200], why[252];
    struct baton_error broken = {0};
    if (!x->model)
        return keep_absent(x, c, "not_run", x->entry->name, x->why.text, e);
    look_ahead(x, c, depends_on, sizeof depends_on, why, sizeof why);
    if (why[0])
        return keep_absent(x, c, "not_run", depends_on, why, e);
    json_t *repeats = json_array();
    int rc = run_others(x, c, &broken);
    if (rc == 0)
        rc = run_repeats(x, c, repeats, &broken);
    if (rc == 0)
        return keep_run(x, c, raw_json(x, c, repeats), e);
    json_decref(repeats);
    return keep_absent(x, c, "error", NULL, broken.text, e);
}

/* The last attempt at a cell in the folder that is resumed; NULL: none. */
static const json_t *earlier_attempt(const struct matrix *x, const char *name)
{
    const json_t *found = NULL;
    for (size_t i = 0; i < json_array_size(x->options->earlier); i++) {
        const json_t *line = json_array_get(x->options->earlier, i);
        const char *is = json_string_value(json_object_get(line, "name"));
        if (is && !strcmp(audit_line_kind(line), "case") && !strcmp(is, name))
            found = line;
    }
    return found;
}

static int visit(struct matrix *x, const struct audit_matrix_consumer *consumer,
                 enum baton_mode mode, struct baton_error *e)
{
    struct cell c = {.consumer = consumer, .mode = mode, .supersedes = -1};
    snprintf(c.name, sizeof c.name, "%s/%s/%s", x->entry->name, route_names[mode], consumer->name);
    const json_t *before = earlier_attempt(x, c.name);
    json_t *result = json_object_get(before, "result");
    const char *verdict = json_string_value(json_object_get(result, "verdict"));
    int rc = 0;
    if (before && verdict && !strcmp(verdict, "pass")) {
        json_array_append(x->cells, result);
    } else {
        if (before)
            c.supersedes = json_integer_value(json_object_get(before, "attempt"));
        rc = run_cell(x, &c, e);
    }
    x->done++;
    if (x->options->progress)
        x->options->progress(x->options->ctx, x->done,
                             (uint64_t)x->config->n_models * x->config->n_consumers * 3);
    return rc;
}

/* Evidence is shown to others: the model's name stands where an error quotes its path. */
static void hide_path(struct baton_error *e, const struct audit_matrix_model *m)
{
    const struct baton_error said = *e;
    const char *at = strstr(said.text, m->path);
    if (at)
        base_fail(e, said.code, "%.*s%s%s", (int)(at - said.text), said.text, m->name,
                  at + strlen(m->path));
}

static void open_model(struct matrix *x)
{
    const struct baton_model_options mo = {.struct_size = sizeof mo, .path = x->entry->path};
    struct model_identity id = {0};
    int rc = baton_model_open(&mo, &x->model, &x->why);
    if (rc == 0)
        rc = model_hash(engine_model(x->model), 0, false, NULL, NULL, &id, &x->why);
    base_hex(id.pin, sizeof id.pin, x->pin);
    for (uint32_t i = 0; i < x->config->n_prompts && rc == 0; i++)
        rc = verify_prompt_lookup(x->model, x->config->lengths[i], &x->prompts[i], &x->why);
    if (rc) {
        hide_path(&x->why, x->entry);
        baton_model_close(x->model);
        x->model = NULL;
    }
}

static void close_model(struct matrix *x)
{
    for (uint32_t i = 0; i < x->config->n_prompts; i++)
        verify_prompt_free(&x->prompts[i]);
    memset(x->prompts, 0, sizeof x->prompts);
    json_decref(x->reference);
    x->reference = NULL;
    baton_model_close(x->model);
    x->model = NULL;
}

static int run_model(struct matrix *x, struct baton_error *e)
{
    int rc = 0;
    open_model(x);
    for (uint32_t k = 0; k < x->config->n_consumers && rc == 0; k++) {
        for (int mode = 0; mode < 3 && rc == 0; mode++)
            if (x->config->routes[mode])
                rc = visit(x, &x->config->consumers[k], (enum baton_mode)mode, e);
        json_decref(x->native);
        x->native = NULL;
    }
    close_model(x);
    return rc;
}

const char *audit_matrix_verdict(const struct json_t *cells)
{
    bool error = false, pass = false;
    for (size_t i = 0; i < json_array_size(cells); i++) {
        const char *v = json_string_value(json_object_get(json_array_get(cells, i), "verdict"));
        if (v && !strcmp(v, "fail"))
            return "fail";
        error = error || (v && !strcmp(v, "error"));
        pass = pass || (v && !strcmp(v, "pass"));
    }
    return error ? "error" : pass ? "pass" : "not_run";
}

int audit_matrix_run(const struct audit_matrix *m, const struct audit_matrix_options *o,
                     struct json_t **cells, struct baton_error *e)
{
    struct matrix x = {.config = m, .options = o, .cells = json_array()};
    int rc = 0;
    for (uint32_t i = 0; i < m->n_models && rc == 0; i++) {
        x.entry = &m->models[i];
        rc = run_model(&x, e);
    }
    const struct audit_cleanup cleanup = {.left = x.left};
    if (rc == 0 && o->evidence)
        rc = audit_evidence_finish(o->evidence, &cleanup, e);
    if (rc)
        json_decref(x.cells);
    else
        *cells = x.cells;
    return rc;
}
