/* SPDX-License-Identifier: Apache-2.0 */
/* Recorded requests, run again and compared in the order in which they were computed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "audit/audit_priv.h"
#include "audit/replay.h"
#include "base/base.h"

static const char *const mode_names[] = {"native", "whole", "stream"};

static json_t *get(const json_t *o, const char *key)
{
    return json_object_get(o, key);
}

static const char *text(const json_t *o, const char *key)
{
    const char *s = json_string_value(get(o, key));
    return s ? s : "";
}

static bool is(const json_t *o, const char *key, const char *value)
{
    return !strcmp(text(o, key), value);
}

static void copy(char *to, size_t size, const char *from)
{
    snprintf(to, size, "%s", from);
}

/* ---- reading ------------------------------------------------------------------------------ */

static int bad(const char *what, struct baton_error *e)
{
    return base_fail(e, BATON_ERR_INPUT, "the record can't be replayed: %s", what);
}

static int take_mode(struct audit_record *r, const char *name, struct baton_error *e)
{
    for (int i = 0; i < 3; i++)
        if (!strcmp(name, mode_names[i])) {
            r->mode = (enum baton_mode)i;
            return 0;
        }
    return bad("it names no mode", e);
}

static int take_prompt(struct audit_record *r, const json_t *ids, const json_t *output,
                       struct baton_error *e)
{
    size_t n = json_array_size(ids);
    uint32_t at = r->n_prompts;
    if (at == AUDIT_RECORD_PROMPTS || !n || n > 1u << 22 || !json_is_object(output))
        return bad("its prompts or outputs", e);
    if (!(r->ids[at] = base_try_alloc(n, sizeof *r->ids[at], e)))
        return BATON_ERR_NOMEM;
    for (size_t i = 0; i < n; i++) {
        if (!json_is_integer(json_array_get(ids, i)))
            return bad("an id of a prompt", e);
        r->ids[at][i] = (int32_t)json_integer_value(json_array_get(ids, i));
    }
    r->n_ids[at] = n;
    r->outputs[at] = output;
    r->n_prompts++;
    return 0;
}

/* What follows --mode in a command line; check's own default is whole. */
static const char *mode_of(const json_t *argv)
{
    const char *mode = "whole";
    for (size_t i = 0; i < json_array_size(argv); i++) {
        const char *word = json_string_value(json_array_get(argv, i));
        const char *next = json_string_value(json_array_get(argv, i + 1));
        if (word && next && !strcmp(word, "--mode"))
            mode = next;
        else if (word && !strncmp(word, "--mode=", 7))
            mode = word + 7;
    }
    return mode;
}

static int take_check(struct audit_record *r, const json_t *begin, struct baton_error *e)
{
    const json_t *devices = get(begin, "devices"), *runs = get(r->doc, "runs"), *found = NULL;
    for (size_t i = 0; i < json_array_size(devices); i++) {
        const json_t *d = json_array_get(devices, i);
        copy(is(d, "role", "prefill") ? r->prefill : r->decode, sizeof r->decode, text(d, "name"));
    }
    for (size_t i = json_array_size(runs); i-- > 0;)
        if (is(json_array_get(runs, i), "run", "handoff"))
            found = json_array_get(runs, i);
    r->kind = "check";
    r->lanes = 1;
    copy(r->pin, sizeof r->pin, text(get(begin, "model"), "pin"));
    int rc = found ? take_mode(r, mode_of(get(begin, "argv")), e) : bad("it has no handoff", e);
    return rc ? rc : take_prompt(r, get(r->doc, "prompt_ids"), found, e);
}

static int take_matrix(struct audit_record *r, struct baton_error *e)
{
    const json_t *cell = get(r->doc, "cell"), *prompts = get(r->doc, "prompts");
    const json_t *outputs = get(json_array_get(get(r->doc, "repeats"), 0), "outputs");
    r->kind = "matrix";
    copy(r->prefill, sizeof r->prefill, text(cell, "producer"));
    copy(r->decode, sizeof r->decode, text(cell, "consumer"));
    copy(r->pin, sizeof r->pin, text(r->doc, "pin"));
    int rc = take_mode(r, text(cell, "route"), e);
    if (rc == 0)
        rc = base_json_u32(cell, "lanes", true, 1, 8, &r->lanes, "the record", e);
    for (size_t i = 0; rc == 0 && i < json_array_size(prompts); i++)
        rc = take_prompt(r, get(json_array_get(prompts, i), "ids"), json_array_get(outputs, i), e);
    return rc;
}

/* Tokens alone, and nothing of how they were sampled: greedy is what most runs are. */
static int take_run(struct audit_record *r, struct baton_error *e)
{
    const json_t *route = get(r->doc, "route");
    r->kind = "run";
    r->lanes = 1;
    r->n = (uint32_t)json_array_size(get(r->doc, "ids"));
    copy(r->prefill, sizeof r->prefill, text(route, "prefill"));
    copy(r->decode, sizeof r->decode, text(route, "decode"));
    copy(r->model, sizeof r->model, text(get(r->doc, "model"), "path"));
    int rc = r->n ? take_mode(r, text(route, "mode"), e) : bad("it has no token", e);
    return rc ? rc : take_prompt(r, get(r->doc, "prompt_ids"), r->doc, e);
}

/* The folder of FOLDER/raw/NNNN.json; its line must name the document by its hash. *begin is the
 * folder's first line. */
static int find_begin(const char *path, json_t **begin, struct baton_error *e)
{
    char folder[4096], hex[65];
    struct base_file f = {0};
    json_t *lines = NULL;
    int n = snprintf(folder, sizeof folder, "%s", path);
    char *raw = n < (int)sizeof folder ? strrchr(folder, '/') : NULL;
    if (raw)
        *raw = '\0';
    char *end = raw ? strrchr(folder, '/') : NULL;
    if (!raw || strcmp(end ? end + 1 : folder, "raw"))
        return bad("it is no raw/NNNN.json of an evidence folder", e);
    if (end)
        *end = '\0';
    int rc = audit_cases(end ? folder : ".", &lines, e);
    if (rc == 0)
        rc = base_file_open(&f, path, e);
    if (rc == 0) {
        bool named = false;
        audit_hash(f.data, f.size, hex);
        base_file_close(&f);
        for (size_t i = 0; i < json_array_size(lines); i++)
            named = named || is(get(json_array_get(lines, i), "raw"), "sha256", hex);
        *begin = json_incref(json_array_get(lines, 0));
        rc = named ? 0 : bad("no line of its folder has its hash", e);
    }
    json_decref(lines);
    return rc;
}

/* A file that can't be read, or a chain that does not hold, is no difference of the request. */
static int as_input(int rc, const struct baton_error *why, struct baton_error *e)
{
    bool input = rc == BATON_ERR_IO || rc == BATON_ERR_INTEGRITY;
    return base_fail(e, input ? BATON_ERR_INPUT : rc, "%s", why->text);
}

int audit_record_open(const char *path, struct audit_record *out, struct baton_error *e)
{
    json_t *begin = NULL;
    struct baton_error why = {0};
    *out = (struct audit_record){.kind = ""};
    int rc = base_json_load(path, AUDIT_FILE_LIMIT, &out->doc, &why);
    if (rc)
        return as_input(rc, &why, e);
    bool check = is(out->doc, "kind", "check"), run = json_is_object(get(out->doc, "route"));
    if (!check && !is(out->doc, "kind", "matrix") && !run)
        return bad("it is neither a check's, nor a matrix cell's, nor a document of baton run", e);
    if (!run && (rc = find_begin(path, &begin, &why)) != 0)
        rc = as_input(rc, &why, e);
    if (rc == 0 && !run)
        rc = base_json_u32(out->doc, "n", true, 1, 1u << 16, &out->n, "the record", e);
    if (rc == 0)
        rc = check ? take_check(out, begin, e) : run ? take_run(out, e) : take_matrix(out, e);
    json_decref(begin);
    if (rc == 0 && !out->n_prompts)
        rc = bad("it has no prompt", e);
    return rc;
}

void audit_record_close(struct audit_record *r)
{
    json_decref(r->doc);
    for (int i = 0; i < AUDIT_RECORD_PROMPTS; i++)
        free(r->ids[i]);
    memset(r, 0, sizeof *r);
}

/* ---- running ------------------------------------------------------------------------------ */

/* All prompts at once, as they were recorded. *out: their outputs with caches, in order. */
static int run_once(const struct audit_record *r, struct baton_model *m, uint32_t threads,
                    json_t **out, struct baton_error *e)
{
    struct audit_route_options o = {.model = m,
                                    .prefill = r->prefill,
                                    .decode = r->decode,
                                    .mode = r->mode,
                                    .lanes = r->lanes,
                                    .threads = threads};
    struct audit_ask asks[AUDIT_RECORD_PROMPTS] = {{0}};
    struct audit_output outputs[AUDIT_RECORD_PROMPTS] = {{0}};
    struct audit_route route = {0};
    json_t *list = json_array();
    for (uint32_t i = 0; i < r->n_prompts; i++) {
        uint32_t n = (uint32_t)r->n_ids[i];
        asks[i] = (struct audit_ask){
            .ids = r->ids[i], .n_ids = n, .n = r->n, .past_end = true, .together = true};
        o.ctx = n + r->n > o.ctx ? n + r->n : o.ctx;
    }
    int rc = audit_route_open(&route, &o, e);
    if (rc == 0) {
        audit_route_observe(&route);
        rc = audit_route_run(&route, asks, outputs, r->n_prompts, NULL, e);
    }
    for (uint32_t i = 0; i < r->n_prompts; i++) {
        if (rc == 0)
            json_array_append_new(
                list, audit_route_output_json(&route, &outputs[i], m, (uint32_t)r->n_ids[i]));
        audit_output_free(&outputs[i]);
    }
    audit_route_close(&route, NULL);
    if (rc)
        json_decref(list);
    else
        *out = list;
    return rc;
}

/* ---- comparing ---------------------------------------------------------------------------- */

/* What was computed between the recorded output before and the one that differs. */
static json_t *between(const char *verb, size_t layer, bool v, int64_t step)
{
    if (!strcmp(verb, "import"))
        return json_string("the producer's cache is the recorded one: transfer, conversion or "
                           "insertion");
    if (!strcmp(verb, "logits"))
        return step
                   ? json_sprintf("any verb of decode step %lld, up to the logits", (long long)step)
                   : json_string("attend and what follows it in the last layer, the last norm, "
                                 "the logits");
    if (!strcmp(verb, "choice"))
        return json_string("the row of logits is the recorded one, or none was recorded");
    if (v)
        return json_sprintf("the linear of V in layer %zu: its K is the recorded one", layer);
    return layer ? json_sprintf("attend and what follows it in layer %zu; norm, linear, head_norm "
                                "or rope in layer %zu",
                                layer - 1, layer)
                 : json_string("embed; norm, linear, head_norm or rope in layer 0");
}

static json_t *place(const struct audit_record *r, uint32_t request, const char *phase,
                     const char *verb, int64_t slot, int64_t step)
{
    bool cache = slot >= 0;
    return json_pack("{s:i,s:o,s:s,s:s,s:o,s:o,s:o,s:o}", "request", (int)request, "lane",
                     r->lanes == 1 ? json_integer(0) : json_null(), "phase", phase, "verb", verb,
                     "layer", cache ? json_integer(slot / 2) : json_null(), "tensor",
                     cache ? json_string(slot % 2 ? "v" : "k") : json_null(), "step",
                     step < 0 ? json_null() : json_integer(step), "between",
                     between(verb, cache ? (size_t)slot / 2 : 0, slot % 2 == 1, step));
}

/* The first slot whose `key` is another one; -1 where none is. A list that is missing was not
 * recorded. */
static int64_t other_slot(const json_t *was, const json_t *now, const char *key)
{
    const json_t *x = get(was, "slots"), *y = get(now, "slots");
    for (size_t i = 0; i < json_array_size(x); i++)
        if (json_is_string(get(json_array_get(x, i), key)) &&
            !json_equal(get(json_array_get(x, i), key), get(json_array_get(y, i), key)))
            return (int64_t)i;
    return -1;
}

static int64_t other_item(const json_t *was, const json_t *now, const char *key)
{
    const json_t *x = get(was, key), *y = get(now, key);
    for (size_t i = 0; i < json_array_size(x); i++)
        if (!json_equal(json_array_get(x, i), json_array_get(y, i)))
            return (int64_t)i;
    return -1;
}

/* Where a request's outputs first differ, in the order in which they were computed; null: nowhere.
 * What a native run's cache holds was computed by itself, so an import is none. */
static json_t *first_of(const struct audit_record *r, uint32_t i, const json_t *was,
                        const json_t *now)
{
    bool native = r->mode == BATON_NATIVE;
    int64_t slot = other_slot(was, now, native ? "have" : "want");
    if (slot >= 0)
        return place(r, i, "prefill", "kv_append", slot, -1);
    slot = native ? -1 : other_slot(was, now, "have");
    if (slot >= 0)
        return place(r, i, "handoff", "import", slot, -1);
    int64_t row = other_item(was, now, "rows_sha256"), id = other_item(was, now, "ids");
    if (row >= 0 && (id < 0 || row <= id))
        return place(r, i, row ? "decode" : "prefill", "logits", -1, row);
    return id < 0 ? json_null() : place(r, i, id ? "decode" : "prefill", "choice", -1, id);
}

/* Of several requests the one that differs earliest in the computation: prefill before handoff
 * before decode, and there by step. */
static int64_t rank(const json_t *p)
{
    static const char *const verbs[] = {"kv_append", "import", "logits", "choice"};
    int64_t step = json_integer_value(get(p, "step")), verb = 0;
    while (verb < 3 && strcmp(text(p, "verb"), verbs[verb]))
        verb++;
    if (verb < 2)
        return verb * 1000000 + json_integer_value(get(p, "layer")) * 2 + is(p, "tensor", "v");
    return 2000000 + step * 2 + verb - 2;
}

static json_t *first_of_all(const struct audit_record *r, const json_t *now, const json_t *control)
{
    json_t *first = json_null();
    for (uint32_t i = 0; i < r->n_prompts; i++) {
        const json_t *was = control ? json_array_get(control, i) : r->outputs[i];
        json_t *p = first_of(r, i, was, json_array_get(now, i));
        if (json_is_null(p) || (!json_is_null(first) && rank(first) <= rank(p))) {
            json_decref(p);
            continue;
        }
        json_decref(first);
        first = p;
    }
    return first;
}

static size_t compared(const struct audit_record *r, const char *key)
{
    size_t n = 0;
    for (uint32_t i = 0; i < r->n_prompts; i++)
        n += json_array_size(get(r->outputs[i], key));
    return n;
}

/* Devices that compute otherwise than the recorded ones, or requests that did not finish, are no
 * difference of the request. */
static int check_binding(const struct audit_record *r, const json_t *now, struct baton_error *e)
{
    static const char *const ends[] = {"holds", "sent"};
    for (uint32_t i = 0; i < r->n_prompts; i++) {
        const json_t *is_now = json_array_get(now, i), *error = get(is_now, "error");
        if (json_is_object(error))
            return base_fail(e, BATON_ERR_INPUT, "the replay did not finish: %.180s",
                             text(error, "message"));
        for (int k = 0; k < 2; k++) {
            const char *was = text(get(r->outputs[i], ends[k]), "numerics");
            const char *here = text(get(is_now, ends[k]), "numerics");
            if (*was && strcmp(was, here))
                return base_fail(e, BATON_ERR_MISMATCH,
                                 "another binding: the record was computed by %.80s, here is %.80s",
                                 was, here);
        }
    }
    return 0;
}

static int check_model(const struct audit_record *r, struct baton_model *m, struct baton_error *e)
{
    struct model_identity id;
    char hex[65], weights[65];
    if (!r->pin[0] && !json_is_string(get(get(r->doc, "model"), "fingerprint")))
        return 0;
    int rc = model_hash(engine_model(m), 0, false, NULL, NULL, &id, e);
    if (rc)
        return rc;
    base_hex(id.pin, sizeof id.pin, hex);
    base_hex(id.weights, sizeof id.weights, weights);
    return strcmp(r->pin[0] ? r->pin : text(get(r->doc, "model"), "fingerprint"),
                  r->pin[0] ? hex : weights)
               ? base_fail(e, BATON_ERR_MISMATCH, "another model: the record's is %.16s…",
                           r->pin[0] ? r->pin : text(get(r->doc, "model"), "fingerprint"))
               : 0;
}

int audit_replay(const struct audit_record *r, struct baton_model *m, uint32_t threads,
                 struct json_t **out, struct baton_error *e)
{
    json_t *now = NULL, *again = NULL;
    int rc = check_model(r, m, e);
    if (rc == 0)
        rc = run_once(r, m, threads, &now, e);
    if (rc == 0)
        rc = check_binding(r, now, e);
    if (rc == 0)
        rc = run_once(r, m, threads, &again, e);
    if (rc == 0)
        *out = json_pack(
            "{s:o,s:o,s:{s:I,s:I,s:I}}", "first", first_of_all(r, now, NULL), "control",
            first_of_all(r, again, now), "compared", "slots", (json_int_t)compared(r, "slots"),
            "rows", (json_int_t)compared(r, "rows_sha256"), "ids", (json_int_t)compared(r, "ids"));
    json_decref(now);
    json_decref(again);
    return rc;
}
