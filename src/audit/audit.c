/* SPDX-License-Identifier: Apache-2.0 */
/* The auditor: what the folder claims against what its raw documents and its chain come to. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "audit/folder_priv.h"
#include "base/base.h"

/* ---- attempts ----------------------------------------------------------------------------- */

static bool kept_elsewhere(const struct audit_folder *f, const char *hex)
{
    for (size_t i = 0; i < json_array_size(f->elsewhere); i++)
        if (!strncmp(json_string_value(json_array_get(f->elsewhere, i)), hex, 64))
            return true;
    return false;
}

/* The raw document of a line; NULL where there is none, which is a difference unless it is kept
 * elsewhere. */
static json_t *load_raw(struct audit_folder *f, const char *file, const char *hex)
{
    struct baton_error e = {0};
    char now[65], *path;
    json_t *raw = NULL;
    if (audit_file_hash(f->path, file, now, &e)) {
        if (!kept_elsewhere(f, hex))
            audit_difference(f->differences, file, "", "is missing: %.150s", e.text);
        return NULL;
    }
    if (strcmp(now, hex))
        audit_difference(f->differences, file, "", "is not the document of its line: SHA-256");
    path = base_path_join(f->path, file, &e);
    if (!path || base_json_load(path, AUDIT_FILE_LIMIT, &raw, &e))
        audit_difference(f->differences, file, "", "%.190s", e.text);
    free(path);
    return raw;
}

/* Without a raw document nothing was run, so nothing can have been shown. */
static void check_without(struct audit_folder *f, const char *where, const json_t *result)
{
    const char *v = json_string_value(json_object_get(result, "verdict"));
    if (!v || (strcmp(v, "error") && strcmp(v, "not_run")))
        audit_difference(f->differences, "cases.jsonl", where, "a verdict without raw data");
}

static uint32_t check_figures(struct audit_folder *f, const char *command, const char *where,
                              const json_t *line, const json_t *raw)
{
    struct baton_error e = {0};
    char at[64];
    json_t *computed = audit_recompute(command, raw, &e);
    if (!computed) {
        audit_difference(f->differences, "cases.jsonl", where, "%.190s", e.text);
        return 0;
    }
    snprintf(at, sizeof at, "%s result", where);
    uint32_t n = audit_compare(json_object_get(computed, "result"), json_object_get(line, "result"),
                               false, "cases.jsonl", at, f->differences);
    n += audit_compare(json_object_get(computed, "line"), line, false, "cases.jsonl", where,
                       f->differences);
    json_decref(computed);
    return n;
}

static uint32_t check_case(struct audit_folder *f, const char *command, const json_t *line,
                           json_int_t attempt, json_t *used)
{
    char where[48];
    const json_t *raw = json_object_get(line, "raw"), *by = json_object_get(line, "supersedes");
    const json_t *number = json_object_get(line, "attempt");
    const char *file = json_string_value(json_object_get(raw, "file"));
    const char *hex = json_string_value(json_object_get(raw, "sha256"));
    snprintf(where, sizeof where, "attempt %lld", (long long)attempt);
    if (!json_is_integer(number) || json_integer_value(number) != attempt)
        audit_difference(f->differences, "cases.jsonl", where, "is not numbered so");
    if (!json_is_null(by) &&
        (!json_is_integer(by) || json_integer_value(by) < 0 || json_integer_value(by) >= attempt))
        audit_difference(f->differences, "cases.jsonl", where, "supersedes no earlier attempt");
    if (json_is_null(raw)) {
        check_without(f, where, json_object_get(line, "result"));
        return 0;
    }
    if (!file || !hex || strlen(hex) != 64 || strncmp(file, "raw/", 4)) {
        audit_difference(f->differences, "cases.jsonl", where, "names no file of raw/");
        return 0;
    }
    if (json_object_get(used, file))
        audit_difference(f->differences, "cases.jsonl", where, "another attempt's file");
    json_object_set_new(used, file, json_true());
    json_t *doc = load_raw(f, file, hex);
    uint32_t n = doc ? check_figures(f, command, where, line, doc) : 0;
    json_decref(doc);
    return n;
}

/* ---- all ---------------------------------------------------------------------------------- */

static uint32_t check_cases(struct audit_folder *f, const json_t *lines)
{
    const char *command = json_string_value(json_object_get(json_array_get(lines, 0), "command"));
    json_t *used = json_object();
    json_int_t attempt = 0;
    uint32_t figures = 0;
    const char *name;
    json_t *ignored;
    for (size_t i = 1; i < json_array_size(lines); i++) {
        const json_t *line = json_array_get(lines, i);
        if (!strcmp(audit_line_kind(line), "case"))
            figures += check_case(f, command, line, attempt++, used);
        else if (strcmp(audit_line_kind(line), "end"))
            audit_difference(f->differences, "cases.jsonl", "", "line %zu is of no known kind",
                             i + 1);
    }
    if (strcmp(audit_line_kind(json_array_get(lines, json_array_size(lines) - 1)), "end"))
        audit_difference(f->differences, "cases.jsonl", "", "the run did not end");
    json_object_foreach(f->files, name, ignored)
    {
        if (!strncmp(name, "raw/", 4) && !json_object_get(used, name))
            audit_difference(f->differences, name, "", "no attempt names this file");
    }
    json_decref(used);
    return figures;
}

static uint32_t check_summary(struct audit_folder *f, const json_t *lines, const char *last,
                              struct audit_report *out)
{
    struct baton_error e = {0};
    json_t *claimed = NULL, *due = audit_summary(lines, last);
    char *path = base_path_join(f->path, "summary.json", &e);
    uint32_t n = 0;
    if (!path || base_json_load(path, AUDIT_FILE_LIMIT, &claimed, &e))
        audit_difference(f->differences, "summary.json", "", "%.190s", e.text);
    else
        n = audit_compare(due, claimed, true, "summary.json", "", f->differences);
    const char *command = json_string_value(json_object_get(claimed, "command"));
    const char *verdict = json_string_value(json_object_get(claimed, "verdict"));
    snprintf(out->command, sizeof out->command, "%s", command ? command : "");
    snprintf(out->verdict, sizeof out->verdict, "%s", verdict ? verdict : "");
    json_decref(due);
    json_decref(claimed);
    free(path);
    return n;
}

int audit_folder(const char *path, const char *seal, struct audit_report *out,
                 struct baton_error *e)
{
    struct audit_folder f = {.path = path};
    struct baton_error why = {0};
    json_t *lines = NULL;
    char last[65];
    memset(out, 0, sizeof *out);
    int rc = audit_files_list(path, &f.files, e);
    if (rc)
        return rc;
    f.differences = out->differences = json_array();
    f.elsewhere = out->not_available = json_array();
    out->files = (uint32_t)json_object_size(f.files);
    audit_seal_check(&f, seal);
    audit_external_read(&f);
    if (audit_lines_read(path, &lines, last, &why)) {
        audit_difference(f.differences, "cases.jsonl", "", "%.190s", why.text);
    } else {
        out->lines = (uint32_t)json_array_size(lines);
        out->figures = check_cases(&f, lines);
        out->figures += check_summary(&f, lines, last, out);
    }
    json_decref(lines);
    json_decref(f.files);
    return 0;
}

void audit_report_free(struct audit_report *r)
{
    json_decref(r->differences);
    json_decref(r->not_available);
    memset(r, 0, sizeof *r);
}
