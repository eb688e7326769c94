/* SPDX-License-Identifier: Apache-2.0 */
/* A cell of the matrix, from the outputs and caches of its repeats. */
#include <string.h>

#include "audit/checked_priv.h"
#include "base/base.h"

/* The document, its shape checked. */
struct cell {
    const json_t *raw, *repeats, *prompts;
    size_t n_prompts, layers;
    json_int_t lanes;
    bool handed; /* there is a producer */
};

static const json_t *output(const struct cell *c, size_t repeat, size_t i)
{
    return json_array_get(get(json_array_get(c->repeats, repeat), "outputs"), i);
}

static struct audit_checked prompt(const struct cell *c, size_t i)
{
    const json_t *ids = get(json_array_get(c->prompts, i), "ids");
    return (struct audit_checked){
        .raw = c->raw, .tokens = json_array_size(ids), .layers = c->layers};
}

/* ---- shape -------------------------------------------------------------------------------- */

static bool good_output(const json_t *o)
{
    const json_t *error = get(o, "error");
    return audit_all_integers(get(o, "ids")) && json_is_array(get(o, "margins")) &&
           (json_is_null(error) || json_is_object(error)) && json_is_object(get(o, "stats"));
}

static bool good_list(const struct cell *c, const json_t *outputs)
{
    for (size_t i = 0; i < json_array_size(outputs); i++)
        if (!good_output(json_array_get(outputs, i)))
            return false;
    return json_is_array(outputs) && json_array_size(outputs) == c->n_prompts;
}

static bool good_repeats(const struct cell *c)
{
    for (size_t r = 0; r < json_array_size(c->repeats); r++) {
        const json_t *repeat = json_array_get(c->repeats, r);
        const json_t *steps = get(repeat, "steps_by_lanes");
        if (!good_list(c, get(repeat, "outputs")) || !audit_all_integers(steps) ||
            json_array_size(steps) != 8)
            return false;
        for (size_t i = 0; i < c->n_prompts; i++) {
            const struct audit_checked x = prompt(c, i);
            if (!audit_checked_caches(&x, output(c, r, i)))
                return false;
        }
    }
    return json_array_size(c->repeats) >= 2;
}

static int open_cell(struct cell *c, const json_t *raw, struct baton_error *e)
{
    const json_t *lanes = get(get(raw, "cell"), "lanes");
    const char *route = json_string_value(get(get(raw, "cell"), "route"));
    *c = (struct cell){.raw = raw,
                       .repeats = get(raw, "repeats"),
                       .prompts = get(raw, "prompts"),
                       .n_prompts = length(raw, "prompts"),
                       .layers = length(raw, "local"),
                       .lanes = json_integer_value(lanes),
                       .handed = route && strcmp(route, "native") != 0};
    bool good = route && json_is_integer(lanes) && c->lanes >= 1 && c->lanes <= 8 &&
                audit_all_integers(get(raw, "local")) && json_is_integer(get(raw, "window")) &&
                json_is_integer(get(raw, "n")) && c->n_prompts > 0;
    for (size_t i = 0; i < c->n_prompts; i++)
        good = good && audit_all_integers(get(json_array_get(c->prompts, i), "ids"));
    static const char *const others[] = {"native", "reference"};
    for (size_t k = 0; k < 2; k++)
        good = good && (json_is_null(get(raw, others[k])) || good_list(c, get(raw, others[k])));
    return good && good_repeats(c)
               ? 0
               : base_fail(e, BATON_ERR_INPUT, "malformed: no document of a cell");
}

/* ---- within the route --------------------------------------------------------------------- */

static bool holds(const struct cell *c, size_t repeat, size_t i)
{
    const struct audit_checked x = prompt(c, i);
    const json_t *o = output(c, repeat, i);
    const char *verdict = json_string_value(get(get(o, "stats"), "verdict"));
    if (length(o, "ids") != (size_t)json_integer_value(get(c->raw, "n")) ||
        length(o, "slots") != 2 * c->layers)
        return false;
    if (!c->handed)
        return audit_positions_ok(&x, o, false);
    return json_is_object(get(o, "sent")) && audit_slots_hold(&x, o) && verdict &&
           !strcmp(verdict, "verified");
}

/* The first repeat's ids, margins, logits and slots. */
static bool repeats(const struct cell *c, size_t repeat, size_t i)
{
    const json_t *a = output(c, 0, i), *b = output(c, repeat, i);
    if (!json_equal(get(a, "ids"), get(b, "ids")) ||
        !json_equal(get(a, "margins"), get(b, "margins")) ||
        !json_equal(get(a, "rows_sha256"), get(b, "rows_sha256")) ||
        length(a, "slots") != length(b, "slots"))
        return false;
    for (size_t s = 0; s < length(a, "slots"); s++)
        if (!json_equal(get(slot(a, s), "have"), get(slot(b, s), "have")))
            return false;
    return true;
}

static bool broken(const json_t *o)
{
    return !json_is_null(get(o, "error"));
}

/* Does this output show a fault? One that is missing for another reason than a digest shows none,
 * unless its cache was read back and is not what was sent. */
static bool faulty(const struct cell *c, size_t repeat, size_t i)
{
    const struct audit_checked x = prompt(c, i);
    const json_t *o = output(c, repeat, i);
    const char *code = json_string_value(get(get(o, "error"), "code"));
    if (!broken(o))
        return !holds(c, repeat, i) || (!broken(output(c, 0, i)) && !repeats(c, repeat, i));
    return (code && !strcmp(code, base_code_name(BATON_ERR_INTEGRITY))) ||
           (c->handed && json_is_object(get(o, "sent")) && length(o, "slots") != 0 &&
            !audit_slots_hold(&x, o));
}

/* A fault counts more than an output that is missing. A cell whose lanes were never all active has
 * not shown what it is for. */
static const char *judge(const struct cell *c, bool full)
{
    bool fault = false, missing = !full;
    for (size_t r = 0; r < json_array_size(c->repeats); r++)
        for (size_t i = 0; i < c->n_prompts; i++) {
            fault = fault || faulty(c, r, i);
            missing = missing || broken(output(c, r, i));
        }
    return fault ? "fail" : missing ? "error" : "pass";
}

/* ---- with others -------------------------------------------------------------------------- */

/* Tokens of the first repeat against those of another run of the same prompts. */
struct versus {
    const char *word;
    json_int_t compared, equal;
    json_t *first; /* of each prompt: the first output index that differs, or null */
};

static struct versus compare(const struct cell *c, const char *with)
{
    const json_t *list = get(c->raw, with);
    struct versus v = {.word = "not_run", .first = json_array()};
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *a = get(output(c, 0, i), "ids"), *b = get(json_array_get(list, i), "ids");
        size_t n = json_array_size(a), m = json_array_size(b), k = 0, same = 0;
        for (size_t t = 0; t < n && t < m; t++)
            same += json_equal(json_array_get(a, t), json_array_get(b, t));
        while (k < n && k < m && json_equal(json_array_get(a, k), json_array_get(b, k)))
            k++;
        bool differs = k < n || k < m;
        json_array_append_new(v.first, differs ? json_integer((json_int_t)k) : json_null());
        v.compared += (json_int_t)n;
        v.equal += (json_int_t)same;
        v.word = differs || !strcmp(v.word, "differs") ? "differs" : "equal";
    }
    return v;
}

static json_t *steps_json(const struct cell *c, json_int_t *full, json_int_t *most)
{
    json_t *list = json_array();
    *full = *most = 0;
    for (size_t k = 0; k < 8; k++) {
        json_int_t sum = 0;
        for (size_t r = 0; r < json_array_size(c->repeats); r++)
            sum += json_integer_value(
                json_array_get(get(json_array_get(c->repeats, r), "steps_by_lanes"), k));
        json_array_append_new(list, json_integer(sum));
        *most = sum ? (json_int_t)k + 1 : *most;
        *full = (json_int_t)k + 1 == c->lanes ? sum : *full;
    }
    return list;
}

static json_t *result_json(const struct cell *c)
{
    json_int_t full, most;
    json_t *steps = steps_json(c, &full, &most);
    const char *verdict = judge(c, full > 0);
    bool ran = strcmp(verdict, "error") != 0;
    struct versus native = compare(c, "native"), reference = compare(c, "reference");
    json_t *o = json_pack("{s:s,s:s,s:s,s:{s:o,s:o},s:o,s:I,s:I,s:I,s:s}", "within_route",
                          ran ? verdict : "not_run", "vs_native", ran ? native.word : "not_run",
                          "vs_reference", ran ? reference.word : "not_run", "first_mismatch",
                          "native", native.first, "reference", reference.first, "steps_by_lanes",
                          steps, "lanes_active_max", most, "full_lane_steps", full, "repeats",
                          (json_int_t)json_array_size(c->repeats), "verdict", verdict);
    static const char *const same[] = {"model", "route", "producer", "consumer", "lanes"};
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        json_object_set(o, same[i], get(get(c->raw, "cell"), same[i]));
    json_t *line = json_pack("{s:I,s:I}", "tokens_compared", native.compared, "tokens_equal",
                             native.equal);
    return json_pack("{s:o,s:o}", "result", o, "line", line);
}

json_t *audit_recompute_matrix(const json_t *raw, struct baton_error *e)
{
    struct cell c;
    return open_cell(&c, raw, e) ? NULL : result_json(&c);
}
