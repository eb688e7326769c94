/* SPDX-License-Identifier: Apache-2.0 */
/* Results added up, and computed once more from stored answers. */
#include <stdlib.h>
#include <string.h>

#include "audit/audit_priv.h"
#include "audit/quality.h"
#include "base/base.h"

static bool is(const json_t *o, const char *key, const char *word)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s && !strcmp(s, word);
}

struct json_t *audit_quality_score(const struct json_t *results)
{
    enum { COUNTED, RIGHT, RIGHT_CON, FULL, INTEGERS };
    static const char *const integers[] = {"counted", "right", "right_concurrent",
                                           "full_lane_steps"};
    json_int_t sum[INTEGERS] = {0}, formats = 0, format = 0, eos = 0, asked = 0, same = 0;
    json_int_t like = 0, unlike = 0, below = 0, fails = 0, errors = 0, passes = 0;
    for (size_t i = 0; i < json_array_size(results); i++) {
        const json_t *r = json_array_get(results, i);
        for (int k = 0; k < INTEGERS; k++)
            sum[k] += json_integer_value(json_object_get(r, integers[k]));
        formats += json_is_boolean(json_object_get(r, "format"));
        format += json_is_true(json_object_get(r, "format"));
        eos += json_is_true(json_object_get(r, "eos"));
        asked += json_is_boolean(json_object_get(r, "same"));
        same += json_is_true(json_object_get(r, "same"));
        like += is(r, "reference", "same");
        unlike += is(r, "reference", "differs");
        below += is(r, "reference", "below margin");
        fails += is(r, "verdict", "fail");
        errors += is(r, "verdict", "error");
        passes += is(r, "verdict", "pass");
    }
    return json_pack(
        "{s:I,s:I,s:I,s:o,s:I,s:{s:I,s:I},s:I,s:o,s:o,s:s}", "prompts",
        (json_int_t)json_array_size(results), "counted", sum[COUNTED], "right", sum[RIGHT],
        "right_concurrent", asked ? json_integer(sum[RIGHT_CON]) : json_null(), "eos", eos,
        "format", "right", format, "of", formats, "full_lane_steps", sum[FULL], "concurrent",
        asked ? json_pack("{s:I,s:I}", "same", same, "of", asked) : json_null(), "reference",
        like + unlike + below
            ? json_pack("{s:I,s:I,s:I}", "same", like, "differs", unlike, "below_margin", below)
            : json_null(),
        "verdict",
        fails    ? "fail"
        : errors ? "error"
        : passes ? "pass"
                 : "n/a");
}

/* ---- from stored answers ------------------------------------------------------------------ */

static const json_t *prompt_of(const struct audit_set *s, const char *id)
{
    for (size_t i = 0; id && i < json_array_size(s->prompts); i++)
        if (is(json_array_get(s->prompts, i), "id", id))
            return json_array_get(s->prompts, i);
    return NULL;
}

/* The raw document of a line, its hash checked. */
static int load_raw(const char *path, const json_t *line, json_t **raw, struct baton_error *e)
{
    const json_t *at = json_object_get(line, "raw");
    const char *file = json_string_value(json_object_get(at, "file"));
    const char *hex = json_string_value(json_object_get(at, "sha256"));
    char now[65], *text = NULL, *full = file ? base_path_join(path, file, e) : NULL;
    size_t n = 0;
    int rc = full ? base_file_read(full, AUDIT_FILE_LIMIT, &text, &n, e)
                  : base_fail(e, BATON_ERR_INPUT, "%.150s: an attempt without a raw file", path);
    if (rc == 0) {
        audit_hash(text, n, now);
        rc = hex && !strcmp(now, hex)
                 ? base_json_parse(text, n, file, raw, e)
                 : base_fail(e, BATON_ERR_MISMATCH, "%.150s is not what its line says", full);
    }
    free(text);
    free(full);
    return rc;
}

/* Answers are taken from the set, not from the folder. */
static int rescore_line(const char *path, const struct audit_set *s, const json_t *line,
                        json_t *results, struct baton_error *e)
{
    json_t *raw = NULL;
    int rc = load_raw(path, line, &raw, e);
    const json_t *p = prompt_of(s, json_string_value(json_object_get(raw, "id")));
    if (rc == 0 && !p)
        rc = base_fail(e, BATON_ERR_MISMATCH, "%.150s: an answer to no prompt of the set", path);
    json_t *computed = NULL;
    if (rc == 0) {
        json_object_set(raw, "answer", json_object_get(p, "answer"));
        json_object_set(raw, "json", json_object_get(p, "json"));
        computed = audit_recompute_quality(raw, e);
        rc = computed ? 0 : e->code;
    }
    if (rc == 0)
        json_array_append(results, json_object_get(computed, "result"));
    json_decref(computed);
    json_decref(raw);
    return rc;
}

int audit_quality_rescore(const char *path, const struct audit_set *s, struct json_t **results,
                          struct json_t **about, struct baton_error *e)
{
    json_t *lines = NULL, *list = json_array();
    char last[65];
    int rc = audit_lines_read(path, &lines, last, e);
    json_t *begin = json_array_get(lines, 0);
    if (rc == BATON_ERR_IO)
        rc = e->code = BATON_ERR_INPUT;
    if (rc == 0 && !is(begin, "command", "quality"))
        rc = base_fail(e, BATON_ERR_INPUT, "%.150s is no evidence of quality", path);
    if (rc == 0 && !is(json_object_get(begin, "set"), "sha256", s->sha256))
        rc = base_fail(e, BATON_ERR_MISMATCH, "%.150s was asked another set", path);
    for (size_t i = 1; rc == 0 && i < json_array_size(lines); i++)
        if (!strcmp(audit_line_kind(json_array_get(lines, i)), "case"))
            rc = rescore_line(path, s, json_array_get(lines, i), list, e);
    if (rc == 0) {
        *results = list;
        *about = json_incref(begin);
    } else {
        json_decref(list);
    }
    json_decref(lines);
    return rc;
}
