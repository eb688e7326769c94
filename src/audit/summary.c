/* SPDX-License-Identifier: Apache-2.0 */
/* summary.json: nothing but what the chain says, added up. */
#include <string.h>

#include "audit/audit_priv.h"

/* Attempts by verdict; a retry takes the place of what it supersedes. */
static const char *const verdicts[] = {"pass", "fail", "error", "not_run", "n/a", NULL};

static const char *verdict_of(const json_t *line)
{
    const char *v = json_string_value(json_object_get(json_object_get(line, "result"), "verdict"));
    return v ? v : "";
}

static bool superseded(const json_t *cases, json_int_t attempt)
{
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *by = json_object_get(json_array_get(cases, i), "supersedes");
        if (json_is_integer(by) && json_integer_value(by) == attempt)
            return true;
    }
    return false;
}

/* Every attempt by its verdict, those that were superseded too; `live`: of those that were not. */
static json_t *count(const json_t *cases, const bool live)
{
    json_t *o = json_object();
    size_t all = 0;
    for (int v = 0; verdicts[v]; v++) {
        json_int_t n = 0;
        for (size_t i = 0; i < json_array_size(cases); i++) {
            const json_t *c = json_array_get(cases, i);
            bool counts = !live ||
                          !superseded(cases, json_integer_value(json_object_get(c, "attempt")));
            n += counts && !strcmp(verdict_of(c), verdicts[v]);
        }
        all += (size_t)n;
        json_object_set_new(o, verdicts[v], json_integer(n));
    }
    json_object_set_new(o, "total", json_integer((json_int_t)all));
    return o;
}

static json_int_t counted(const json_t *counts, const char *verdict)
{
    return json_integer_value(json_object_get(counts, verdict));
}

/* A fault found counts more than what could not be run; where nothing passed, nothing was shown. */
static const char *overall(const json_t *counts)
{
    if (counted(counts, "fail"))
        return "fail";
    if (counted(counts, "error"))
        return "error";
    return counted(counts, "pass") ? "pass" : counted(counts, "not_run") ? "not_run" : "n/a";
}

static json_t *attempts(const json_t *cases)
{
    static const char *const keys[] = {"attempt", "name", "supersedes", "warm_ms"};
    json_t *list = json_array();
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *c = json_array_get(cases, i);
        json_t *o = json_object();
        for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
            json_t *v = json_object_get(c, keys[k]);
            if (v)
                json_object_set(o, keys[k], v);
        }
        json_object_set_new(o, "verdict", json_string(verdict_of(c)));
        json_array_append_new(list, o);
    }
    return list;
}

/* Members of results that are worth a total. */
static json_t *totals(const json_t *cases)
{
    static const char *const keys[] = {"slots_total",      "slots_exact",     "tokens_compared",
                                       "tokens_equal",     "counted",         "right",
                                       "right_concurrent", "full_lane_steps", NULL};
    json_t *o = json_object();
    for (int k = 0; keys[k]; k++) {
        json_int_t sum = 0;
        bool any = false;
        for (size_t i = 0; i < json_array_size(cases); i++) {
            const json_t *line = json_array_get(cases, i);
            const json_t *v = json_object_get(json_object_get(line, "result"), keys[k]);
            v = v ? v : json_object_get(line, keys[k]);
            any = any || json_is_integer(v);
            sum += json_integer_value(v);
        }
        if (any)
            json_object_set_new(o, keys[k], json_integer(sum));
    }
    return o;
}

static void copy_about(json_t *to, const json_t *begin)
{
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)begin, key, value)
    {
        if (strcmp(key, "kind") && strcmp(key, "prev"))
            json_object_set(to, key, value);
    }
}

json_t *audit_summary(const json_t *lines, const char *last)
{
    json_t *o = json_object(), *cases = json_array();
    const json_t *end = NULL;
    for (size_t i = 0; i < json_array_size(lines); i++) {
        json_t *line = json_array_get(lines, i);
        if (!strcmp(audit_line_kind(line), "case"))
            json_array_append(cases, line);
        else if (!strcmp(audit_line_kind(line), "end"))
            end = line;
    }
    copy_about(o, json_array_get(lines, 0));
    json_t *live = count(cases, true);
    json_t *more = json_pack("{s:O,s:O,s:o,s:o,s:o,s:{s:I,s:s},s:s}", "ended",
                             end ? json_object_get(end, "ended") : json_null(), "cleanup",
                             end ? json_object_get(end, "cleanup") : json_null(), "attempts",
                             count(cases, false), "cases", attempts(cases), "totals", totals(cases),
                             "chain", "lines", (json_int_t)json_array_size(lines), "last", last,
                             "verdict", overall(live));
    json_object_update(o, more);
    json_decref(live);
    json_decref(more);
    json_decref(cases);
    return o;
}
