/* SPDX-License-Identifier: Apache-2.0 */
/* An attempt's outputs beside those of an earlier folder. */
#include <stdlib.h>
#include <string.h>

#include "audit/audit_priv.h"
#include "base/base.h"

/* The first run of a handoff, or the attempt's only output. */
static const json_t *output(const json_t *raw)
{
    const json_t *runs = json_object_get(raw, "runs");
    for (size_t i = 0; i < json_array_size(runs); i++) {
        const json_t *run = json_array_get(runs, i);
        const char *name = json_string_value(json_object_get(run, "run"));
        if (name && !strcmp(name, "handoff"))
            return run;
    }
    return NULL;
}

/* "have" of all slots. */
static bool same_slots(const json_t *a, const json_t *b)
{
    const json_t *x = json_object_get(a, "slots"), *y = json_object_get(b, "slots");
    if (json_array_size(x) != json_array_size(y))
        return false;
    for (size_t i = 0; i < json_array_size(x); i++)
        if (!json_equal(json_object_get(json_array_get(x, i), "have"),
                        json_object_get(json_array_get(y, i), "have")))
            return false;
    return true;
}

struct json_t *audit_against(const struct json_t *raw, const struct json_t *earlier)
{
    const json_t *a = output(raw), *b = output(earlier);
    if (!a || !b)
        return json_string("one of the two handed nothing over");
    if (!json_equal(json_object_get(raw, "prompt_ids"), json_object_get(earlier, "prompt_ids")))
        return json_string("another prompt");
    const json_t *x = json_object_get(a, "ids"), *y = json_object_get(b, "ids");
    size_t n = json_array_size(x) < json_array_size(y) ? json_array_size(x) : json_array_size(y);
    for (size_t i = 0; i < n; i++)
        if (!json_equal(json_array_get(x, i), json_array_get(y, i)))
            return json_sprintf("token %zu differs", i);
    if (json_array_size(x) != json_array_size(y))
        return json_string("another number of tokens");
    if (!same_slots(a, b))
        return json_string("slots differ, tokens do not");
    if (!json_equal(json_object_get(a, "rows_sha256"), json_object_get(b, "rows_sha256")))
        return json_string("logits differ, tokens and slots do not");
    return json_null();
}

int audit_cases(const char *path, struct json_t **lines, struct baton_error *e)
{
    char last[65];
    struct baton_error why;
    int rc = audit_lines_read(path, lines, last, &why);
    if (rc == BATON_ERR_IO) /* a folder that the user named */
        rc = BATON_ERR_INPUT;
    return rc ? base_fail(e, rc, "%s", why.text) : 0;
}

int audit_case_raw(const char *path, const struct json_t *line, struct json_t **out,
                   struct baton_error *e)
{
    const char *file = json_string_value(json_object_get(json_object_get(line, "raw"), "file"));
    *out = NULL;
    if (!file)
        return 0;
    char *full = base_path_join(path, file, e);
    int rc = full ? base_json_load(full, AUDIT_FILE_LIMIT, out, e) : BATON_ERR_INPUT;
    free(full);
    return rc;
}

int audit_find_raw(const char *path, const char *name, struct json_t **out, struct baton_error *e)
{
    json_t *lines = NULL;
    const json_t *found = NULL;
    int rc = audit_cases(path, &lines, e);
    *out = NULL;
    for (size_t i = 0; rc == 0 && i < json_array_size(lines); i++) {
        const json_t *line = json_array_get(lines, i);
        const char *of = json_string_value(json_object_get(line, "name"));
        if (!strcmp(audit_line_kind(line), "case") && of && !strcmp(of, name) &&
            json_is_object(json_object_get(line, "raw")))
            found = line;
    }
    if (found)
        rc = audit_case_raw(path, found, out, e);
    json_decref(lines);
    return rc;
}
