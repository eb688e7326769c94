/* SPDX-License-Identifier: Apache-2.0 */
/* baton audit: does an evidence folder hold, and what should not be shown to others? */
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "audit/audit.h"
#include "base/base.h"
#include "cli/audit_priv.h"

static const char help[] =
    "usage: baton audit DIR [--seal HEX] [--sensitive]\n"
    "       baton audit --sensitive [--tree | --changed BASE]\n"
    "\n"
    "Recomputes what an evidence folder claims from its raw documents: figures, verdicts, hashes,\n"
    "the chain of attempts, the summary, the seal. docs/evidence.md explains the folder.\n"
    "--sensitive searches it, or what git has here, for absolute paths of a machine, names of "
    "users,\n"
    "names and addresses of hosts, and keys, all by patterns: what looks like none is not found.\n"
    "Exit 0: all of it holds; 1: something differs or is missing or was found, and is named.\n"
    "\n"
    "  --seal HEX       the seal that was published: the hash in seal.txt's last line\n"
    "  --sensitive      search too\n"
    "  --tree           all files of git's below this folder, and those that it would add "
    "(default)\n"
    "  --changed BASE   lines added since that commit, and files that git would add\n"
    "  --known FILE     findings that are counted and are no failure: KIND<tab>FILE<tab>TEXT a "
    "line,\n"
    "                   the latter two patterns of the shell\n"
    "  --json, -v, -q\n"
    "\n"
    "example\n"
    "  baton audit evidence/20260102T030405Z-check-0a1b2c3d\n";

enum { OPT_SEAL = 256, OPT_SENSITIVE, OPT_TREE, OPT_CHANGED, OPT_KNOWN };

static const struct option long_options[] = {
    {"seal", required_argument, NULL, OPT_SEAL},
    {"sensitive", no_argument, NULL, OPT_SENSITIVE},
    {"tree", no_argument, NULL, OPT_TREE},
    {"changed", required_argument, NULL, OPT_CHANGED},
    {"known", required_argument, NULL, OPT_KNOWN},
    {"json", no_argument, NULL, 'j'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

static int take(void *args, int opt, const char *value, struct baton_error *e)
{
    struct cli_audit_args *a = args;
    uint8_t bytes[32];
    switch (opt) {
    case OPT_SEAL:
        a->seal = value;
        if (!base_unhex(value, bytes, sizeof bytes))
            return base_fail(e, BATON_ERR_USAGE, "--seal: '%.70s' is no SHA-256", value);
        return 0;
    case OPT_SENSITIVE:
        a->sensitive = true;
        return 0;
    case OPT_TREE:
        a->tree = true;
        return 0;
    case OPT_CHANGED:
        a->changed = value;
        return 0;
    default:
        a->known = value;
        return 0;
    }
}

static int check_args(struct cli_audit_args *a, int words, char **word, struct baton_error *e)
{
    a->dir = words == 1 ? word[0] : NULL;
    if (words > 1 || (!words && !a->sensitive))
        return base_fail(e, BATON_ERR_USAGE, "give one folder; see `baton audit --help`");
    if (!a->sensitive && (a->tree || a->changed || a->known))
        return base_fail(e, BATON_ERR_USAGE, "--tree, --changed and --known are --sensitive's");
    if ((a->dir != NULL) + a->tree + (a->changed != NULL) > 1)
        return base_fail(e, BATON_ERR_USAGE, "one of a folder, --tree and --changed");
    return !a->dir && a->seal
               ? base_fail(e, BATON_ERR_USAGE, "--seal is a folder's, and there is none")
               : 0;
}

static const char *text(const json_t *o, const char *key)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : "";
}

static void print_report(const char *dir, const struct audit_report *r)
{
    size_t n = json_array_size(r->differences);
    for (size_t i = 0; i < n; i++) {
        const json_t *d = json_array_get(r->differences, i);
        printf("%s%s%s: %s\n", text(d, "file"), *text(d, "where") ? ": " : "", text(d, "where"),
               text(d, "why"));
    }
    for (size_t i = 0; i < json_array_size(r->not_available); i++)
        printf("not available: %s\n", json_string_value(json_array_get(r->not_available, i)));
    printf("%s: %s, claimed verdict %s; %u files, %u lines, %u figures recomputed: ", dir,
           r->command, r->verdict, r->files, r->lines, r->figures);
    printf(n ? "%zu differences\n" : "all hold\n", n);
}

static json_t *report_json(const struct audit_report *r)
{
    return json_pack("{s:i,s:s,s:s,s:{s:i,s:i,s:i},s:O,s:O,s:s}", "schema", 1, "command",
                     r->command, "claimed", r->verdict, "checked", "files", (int)r->files, "lines",
                     (int)r->lines, "figures", (int)r->figures, "differences", r->differences,
                     "not_available", r->not_available, "verdict",
                     json_array_size(r->differences) ? "fail" : "pass");
}

/* Prints what there is: an audit where there is a folder, findings where they were searched for. */
static int report(const struct cli_audit_args *a, const struct audit_report *r, json_t *found)
{
    int rc = json_array_size(r->differences) || (found && strcmp(text(found, "verdict"), "pass"));
    if (!a->common.json) {
        if (a->dir)
            print_report(a->dir, r);
        if (found)
            cli_audit_print_sensitive(found);
        return rc;
    }
    json_t *doc = a->dir ? report_json(r) : json_pack("{s:i}", "schema", 1);
    if (found)
        json_object_set(doc, "sensitive", found);
    json_object_set_new(doc, "verdict", json_string(rc ? "fail" : "pass"));
    return cli_print_json(doc, rc);
}

static int audit(const struct cli_audit_args *a, struct baton_error *e)
{
    struct audit_report r = {0};
    json_t *found = NULL;
    int rc = a->dir ? audit_folder(a->dir, a->seal, &r, e) : 0;
    if (rc == 0 && a->sensitive)
        rc = cli_audit_sensitive(a, &found, e);
    if (rc == 0)
        rc = report(a, &r, found);
    json_decref(found);
    audit_report_free(&r);
    return rc;
}

int cli_audit(int argc, char **argv)
{
    static const struct cli_syntax syntax = {":hvq", help, long_options, take, true};
    struct cli_audit_args a = {0};
    struct baton_error e = {0};
    bool helped = false;
    int rc = cli_parse(argc, argv, &syntax, &a.common, &a, &helped, &e);
    if (helped)
        return 0;
    if (rc == 0)
        rc = check_args(&a, argc - optind, argv + optind, &e);
    if (rc == 0)
        rc = audit(&a, &e);
    return rc < 0 ? cli_fail(&a.common, &e) : rc;
}
