/* SPDX-License-Identifier: Apache-2.0 */
/* cases.jsonl: lines that each carry the hash of the one before. */
#include <stdlib.h>
#include <string.h>

#include "audit/audit_priv.h"
#include "base/base.h"

const char *audit_line_kind(const json_t *line)
{
    const char *kind = json_string_value(json_object_get(line, "kind"));
    return kind ? kind : "";
}

/* One line, without its newline. */
static int take_line(const char *text, size_t n, json_t *lines, char last[65],
                     struct baton_error *e)
{
    char what[48];
    const char *prev = NULL;
    json_t *o = NULL;
    size_t i = json_array_size(lines);
    snprintf(what, sizeof what, "cases.jsonl line %zu", i + 1);
    if (i == AUDIT_LINES_LIMIT)
        return base_fail(e, BATON_ERR_INPUT, "cases.jsonl has more than %u lines",
                         AUDIT_LINES_LIMIT);
    int rc = base_json_parse(text, n, what, &o, e);
    if (rc == 0)
        rc = base_json_str(o, "prev", true, &prev, what, e);
    if (rc == 0 && strcmp(prev, last))
        rc = base_fail(e, BATON_ERR_INTEGRITY,
                       "%s: its \"prev\" is not the hash of the line before", what);
    if (rc == 0 && (i == 0) != !strcmp(audit_line_kind(o), "begin"))
        rc = base_fail(e, BATON_ERR_INTEGRITY, "%s: the first line, and no other, is the beginning",
                       what);
    if (rc || json_array_append(lines, o)) {
        json_decref(o);
        return rc ? rc : base_fail(e, BATON_ERR_NOMEM, "no memory for cases.jsonl");
    }
    json_decref(o);
    audit_hash(text, n, last);
    return 0;
}

int audit_lines_parse(const char *text, size_t n, json_t **out, char last[65],
                      struct baton_error *e)
{
    json_t *lines = json_array();
    int rc = 0;
    strcpy(last, AUDIT_ZERO);
    for (size_t at = 0; rc == 0 && at < n;) {
        const char *end = memchr(text + at, '\n', n - at);
        if (!end) {
            rc = base_fail(e, BATON_ERR_INPUT, "cases.jsonl: its last line was not written whole");
            break;
        }
        size_t length = (size_t)(end - text) - at;
        rc = take_line(text + at, length, lines, last, e);
        at += length + 1;
    }
    if (rc == 0 && json_array_size(lines) == 0)
        rc = base_fail(e, BATON_ERR_INPUT, "cases.jsonl is empty");
    if (rc) {
        json_decref(lines);
        return rc;
    }
    *out = lines;
    return 0;
}

int audit_lines_read(const char *path, json_t **out, char last[65], struct baton_error *e)
{
    char *text = NULL, *file = base_path_join(path, "cases.jsonl", e);
    size_t n = 0;
    int rc = file ? base_file_read(file, AUDIT_FILE_LIMIT, &text, &n, e) : BATON_ERR_NOMEM;
    if (rc == 0)
        rc = audit_lines_parse(text, n, out, last, e);
    free(text);
    free(file);
    return rc;
}
