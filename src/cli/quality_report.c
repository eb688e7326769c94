/* SPDX-License-Identifier: Apache-2.0 */
/* quality: the table, the document, and the same from stored answers. */
#include <dirent.h>
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "cli/quality_priv.h"
#include "cli/run_priv.h"

static const char *text(const json_t *o, const char *key)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : "";
}

static long long integer(const json_t *o, const char *key)
{
    return json_integer_value(json_object_get(o, key));
}

static int exit_code(const json_t *score)
{
    return !strcmp(text(score, "verdict"), "fail")   ? 1
           : strcmp(text(score, "verdict"), "error") ? 0
                                                     : 3;
}

/* ---- table -------------------------------------------------------------------------------- */

static void print_head(void)
{
    printf("%-14s %-28s %9s %11s %8s %7s %11s %10s %11s\n", "model", "route", "right", "concurrent",
           "format", "end", "as alone", "reference", "full steps");
}

static const char *of(char buf[32], const json_t *o, const char *part, const char *whole)
{
    if (!json_is_object(o))
        return "-";
    snprintf(buf, 32, "%lld/%lld", integer(o, part), integer(o, whole));
    return buf;
}

static void print_row(const char *model, const json_t *route, const json_t *s)
{
    char name[64], right[32], con[32], format[32], end[32], same[32], ref[32];
    const json_t *r = json_object_get(s, "reference");
    bool native = !strcmp(text(route, "mode"), "native");
    snprintf(name, sizeof name, "%s %s%s%s B%lld", text(route, "mode"),
             native ? "" : text(route, "prefill"), native ? "" : ">", text(route, "decode"),
             integer(route, "lanes"));
    snprintf(right, sizeof right, "%lld/%lld", integer(s, "right"), integer(s, "counted"));
    snprintf(con, sizeof con, "%lld/%lld", integer(s, "right_concurrent"), integer(s, "counted"));
    snprintf(end, sizeof end, "%lld", integer(s, "eos"));
    snprintf(ref, sizeof ref, "%lld/%lld", integer(r, "same"),
             integer(r, "same") + integer(r, "differs"));
    bool asked = json_is_object(json_object_get(s, "concurrent"));
    printf("%-14.14s %-28.28s %9s %11s %8s %7s %11s %10s %11lld\n", model, name, right,
           asked ? con : "-", of(format, json_object_get(s, "format"), "right", "of"), end,
           of(same, json_object_get(s, "concurrent"), "same", "of"), json_is_object(r) ? ref : "-",
           integer(s, "full_lane_steps"));
}

/* Prompts that do not hold, and what was answered. */
static void print_wrong(const json_t *results)
{
    for (size_t i = 0; i < json_array_size(results); i++) {
        const json_t *r = json_array_get(results, i);
        if (!strcmp(text(r, "verdict"), "fail") || !strcmp(text(r, "verdict"), "error"))
            printf("%s %s%s%s: %.100s\n", text(r, "verdict"), text(r, "id"),
                   json_is_false(json_object_get(r, "same")) ? ", not as alone" : "",
                   !strcmp(text(r, "reference"), "differs") ? ", not the reference's" : "",
                   text(r, "text"));
    }
}

static const char *base_name(const char *path, char buf[64])
{
    const char *end = path + strlen(path);
    while (end > path && end[-1] == '/')
        end--;
    const char *start = end;
    while (start > path && start[-1] != '/')
        start--;
    snprintf(buf, 64, "%.*s", (int)(end - start), start);
    return buf;
}

int cli_quality_report(const struct cli_quality_args *a, const struct audit_set *s,
                       const struct json_t *results)
{
    const struct audit_route_options *r = &a->options.route;
    char name[64];
    json_t *score = audit_quality_score(results);
    json_t *route = json_pack(
        "{s:s,s:s,s:s,s:i,s:i,s:s,s:{s:b,s:b}}", "mode", cli_run_mode_names[a->mode], "prefill",
        r->mode == BATON_NATIVE ? r->decode : r->prefill, "decode", r->decode, "lanes",
        (int)r->lanes, "cohort", (int)a->options.cohort, "path", "engine", "emulated", "prefill",
        cli_emulated(r->prefill), "decode", cli_emulated(r->decode));
    int rc = exit_code(score);
    const char *where = a->options.evidence ? audit_evidence_path(a->options.evidence) : NULL;
    if (!a->common.json) {
        print_wrong(results);
        print_head();
        print_row(base_name(a->model, name), route, score);
        if (where)
            printf("evidence in %s\n", where);
        printf("%s\n", text(score, "verdict"));
        json_decref(score);
        json_decref(route);
        return rc;
    }
    return cli_print_json(json_pack("{s:i,s:s,s:{s:s,s:s},s:o,s:o,s:O,s:s*,s:s}", "schema", 1,
                                    "model", a->model, "set", "name", s->name, "sha256", s->sha256,
                                    "route", route, "score", score, "prompts", results, "evidence",
                                    where, "verdict", text(score, "verdict")),
                          rc);
}

/* ---- stored answers ----------------------------------------------------------------------- */

/* The folders to judge: DIR itself, or those below it whose name says quality. In order of name. */
static int list_folders(const char *dir, json_t **out, struct baton_error *e)
{
    struct dirent **names = NULL;
    char *own = base_path_join(dir, "cases.jsonl", e);
    if (!own)
        return e->code;
    json_t *list = json_array();
    bool single = access(own, F_OK) == 0;
    free(own);
    int n = single ? 0 : scandir(dir, &names, NULL, alphasort), rc = 0;
    if (single)
        json_array_append_new(list, json_string(dir));
    if (n < 0)
        rc = base_fail_errno(e, BATON_ERR_INPUT, errno, "%s", dir);
    for (int i = 0; i < n; i++) {
        char *path = strstr(names[i]->d_name, "-quality-")
                         ? base_path_join(dir, names[i]->d_name, NULL)
                         : NULL;
        if (path)
            json_array_append_new(list, json_string(path));
        free(path);
        free(names[i]);
    }
    free(names);
    if (rc == 0 && json_array_size(list) == 0)
        rc = base_fail(e, BATON_ERR_INPUT, "%.160s holds no evidence of quality", dir);
    if (rc) {
        json_decref(list);
        return rc;
    }
    *out = list;
    return 0;
}

/* Prompts that two folders of one model answered differently: [{"id", "a", "b"}] by number. */
static json_t *differences(const json_t *runs)
{
    json_t *list = json_array();
    for (size_t b = 1; b < json_array_size(runs); b++) {
        const json_t *y = json_array_get(runs, b);
        size_t a = 0;
        while (a < b && !json_equal(json_object_get(json_array_get(runs, a), "pin"),
                                    json_object_get(y, "pin")))
            a++; /* the first of its model */
        const json_t *x = json_array_get(runs, a);
        for (size_t i = 0; i < json_array_size(json_object_get(y, "prompts")); i++) {
            const json_t *p = json_array_get(json_object_get(x, "prompts"), i);
            const json_t *q = json_array_get(json_object_get(y, "prompts"), i);
            if (!json_equal(json_object_get(p, "text"), json_object_get(q, "text")))
                json_array_append_new(list, json_pack("{s:s,s:I,s:I}", "id", text(q, "id"), "a",
                                                      (json_int_t)a, "b", (json_int_t)b));
        }
    }
    return list;
}

static int rescore_one(const char *path, const struct audit_set *s, json_t *runs,
                       struct baton_error *e)
{
    json_t *results = NULL, *about = NULL;
    int rc = audit_quality_rescore(path, s, &results, &about, e);
    if (rc)
        return rc;
    const json_t *model = json_object_get(about, "model");
    json_array_append_new(runs, json_pack("{s:s,s:O,s:O,s:o,s:o}", "folder", path, "pin",
                                          json_object_get(model, "pin"), "route",
                                          json_object_get(about, "route"), "score",
                                          audit_quality_score(results), "prompts", results));
    json_decref(about);
    return 0;
}

static void print_runs(const json_t *runs, const json_t *differ)
{
    char name[64];
    print_head();
    for (size_t i = 0; i < json_array_size(runs); i++) {
        const json_t *r = json_array_get(runs, i);
        snprintf(name, sizeof name, "%.12s", text(r, "pin"));
        print_row(name, json_object_get(r, "route"), json_object_get(r, "score"));
    }
    for (size_t i = 0; i < json_array_size(differ); i++) {
        const json_t *d = json_array_get(differ, i);
        printf("%s: row %lld and row %lld answer differently\n", text(d, "id"), integer(d, "a") + 1,
               integer(d, "b") + 1);
    }
}

int cli_quality_rescore(const struct cli_quality_args *a, const struct audit_set *s,
                        struct baton_error *e)
{
    json_t *folders = NULL, *runs = json_array();
    int rc = list_folders(a->rescore, &folders, e), worst = 0;
    for (size_t i = 0; rc == 0 && i < json_array_size(folders); i++)
        rc = rescore_one(json_string_value(json_array_get(folders, i)), s, runs, e);
    for (size_t i = 0; i < json_array_size(runs); i++) {
        int code = exit_code(json_object_get(json_array_get(runs, i), "score"));
        worst = code > worst ? code : worst;
    }
    json_t *differ = differences(runs);
    if (rc == 0 && a->common.json)
        rc = cli_print_json(json_pack("{s:i,s:{s:s,s:s},s:O,s:O,s:s}", "schema", 1, "set", "name",
                                      s->name, "sha256", s->sha256, "runs", runs, "differences",
                                      differ, "verdict",
                                      worst == 0   ? "pass"
                                      : worst == 1 ? "fail"
                                                   : "error"),
                            worst);
    else if (rc == 0) {
        print_runs(runs, differ);
        rc = worst;
    }
    json_decref(differ);
    json_decref(folders);
    json_decref(runs);
    return rc;
}
