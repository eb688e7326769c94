/* SPDX-License-Identifier: Apache-2.0 */
/* A prompt of a quality set: is the answer right to the letter, with an end token, and the
 * reference's? */
#include <stdlib.h>
#include <string.h>

#include "audit/audit_priv.h"
#include "base/base.h"

#define MARGIN 0.4 /* below, two implementations may choose differently (docs/architecture.md) */

static json_t *get(const json_t *o, const char *key)
{
    return json_object_get(o, key);
}

static const json_t *phase(const json_t *raw, const char *name)
{
    const json_t *runs = get(raw, "runs");
    for (size_t i = 0; i < json_array_size(runs); i++) {
        const char *is = json_string_value(get(json_array_get(runs, i), "phase"));
        if (is && !strcmp(is, name))
            return json_array_get(runs, i);
    }
    return NULL;
}

static bool stopped(const json_t *run)
{
    const char *finish = json_string_value(get(run, "finish"));
    return json_is_null(get(run, "error")) && finish && !strcmp(finish, "stop");
}

/* Nothing is cut off, trimmed or searched for in the text. */
static bool says(const json_t *run, const json_t *text)
{
    return stopped(run) && json_is_string(get(run, "text")) && json_equal(get(run, "text"), text);
}

/* Where the answer is JSON: is the text, and does it mean the same? */
static json_t *format(const json_t *raw, const json_t *run)
{
    struct baton_error e;
    const json_t *due = get(raw, "json"), *text = get(run, "text");
    json_t *is = NULL;
    if (!due || json_is_null(due))
        return json_null();
    bool same = stopped(run) && json_is_string(text) &&
                !base_json_parse(json_string_value(text), json_string_length(text), "answer", &is,
                                 &e) &&
                json_equal(is, due);
    json_decref(is);
    return json_boolean(same);
}

/* "same", "differs", "below margin"; null without a reference. */
static const char *versus(const json_t *raw, const json_t *run)
{
    const json_t *ref = get(raw, "reference");
    if (!json_is_object(ref))
        return NULL;
    if (!json_equal(get(ref, "prompt_tokens"),
                    get(raw, "n_prompt"))) /* another prompt is no comparison */
        return "differs";
    if (says(run, get(ref, "output")))
        return "same";
    return json_number_value(get(ref, "min_margin")) > MARGIN ? "differs" : "below margin";
}

static bool good_run(const json_t *run)
{
    const json_t *lanes = get(get(run, "stats"), "steps_by_lanes");
    return json_is_string(get(run, "phase")) && json_is_array(get(run, "ids")) &&
           json_is_string(get(run, "finish")) && json_array_size(lanes) == 8;
}

static int check_shape(const json_t *raw, struct baton_error *e)
{
    const json_t *runs = get(raw, "runs"), *counted = get(get(raw, "reference"), "counted");
    bool good = json_is_array(runs) && json_is_string(get(raw, "id")) &&
                json_is_string(get(raw, "answer")) && json_is_array(get(raw, "prompt_ids")) &&
                json_is_integer(get(raw, "n_prompt")) && phase(raw, "sequential") &&
                (size_t)json_integer_value(get(raw, "n_prompt")) ==
                    json_array_size(get(raw, "prompt_ids")) &&
                (!json_is_object(get(raw, "reference")) || json_is_boolean(counted)) &&
                json_is_integer(get(get(raw, "cohort"), "full_lane_steps"));
    for (size_t i = 0; i < json_array_size(runs); i++)
        good = good && good_run(json_array_get(runs, i));
    return good ? 0 : base_fail(e, BATON_ERR_INPUT, "malformed: no document of a quality prompt");
}

static size_t count_equal(const json_t *a, const json_t *b)
{
    const json_t *x = get(a, "ids"), *y = get(b, "ids");
    size_t n = 0;
    for (size_t i = 0; i < json_array_size(x) && i < json_array_size(y); i++)
        n += json_equal(json_array_get(x, i), json_array_get(y, i));
    return n;
}

/* An answer that could not be made is an error. With a reference, what it says above the margin
 * must be said; without one the answer must be right. One that is asked beside others must be the
 * one that is given alone. */
static const char *judge(const json_t *o, const json_t *seq, const json_t *con, bool counted)
{
    const char *ref = json_string_value(get(o, "reference"));
    if (!json_is_null(get(seq, "error")) || (con && !json_is_null(get(con, "error"))))
        return "error";
    if (json_is_false(get(o, "same")) || (ref && !strcmp(ref, "differs")))
        return "fail";
    if (ref)
        return !strcmp(ref, "same") ? "pass" : "n/a";
    return !counted ? "n/a" : json_is_true(get(o, "exact")) ? "pass" : "fail";
}

json_t *audit_recompute_quality(const json_t *raw, struct baton_error *e)
{
    if (check_shape(raw, e))
        return NULL;
    const json_t *seq = phase(raw, "sequential"), *con = phase(raw, "concurrent");
    const json_t *ref = get(raw, "reference"), *answer = get(raw, "answer");
    const char *like = versus(raw, seq);
    bool counted = !json_is_object(ref) || json_is_true(get(ref, "counted"));
    bool exact = says(seq, answer), exact_con = con && says(con, answer);
    bool same = con && json_equal(get(seq, "ids"), get(con, "ids")) &&
                json_equal(get(seq, "finish"), get(con, "finish"));
    json_t *o = json_pack(
        "{s:O,s:O?,s:O?,s:i,s:i,s:o,s:b,s:b,s:o,s:o,s:o,s:O}", "id", get(raw, "id"), "category",
        get(raw, "category"), "text", get(seq, "text"), "counted", counted, "right",
        counted && exact, "right_concurrent",
        con ? json_integer(counted && exact_con) : json_null(), "exact", exact, "eos", stopped(seq),
        "format", format(raw, seq), "same", con ? json_boolean(same) : json_null(), "reference",
        like ? json_string(like) : json_null(), "full_lane_steps",
        get(get(raw, "cohort"), "full_lane_steps"));
    json_object_set_new(o, "verdict", json_string(judge(o, seq, con, counted)));
    json_t *line = json_pack("{s:I,s:I}", "tokens_compared",
                             (json_int_t)(con ? json_array_size(get(seq, "ids")) : 0),
                             "tokens_equal", (json_int_t)(con ? count_equal(seq, con) : 0));
    return json_pack("{s:o,s:o}", "result", o, "line", line);
}
