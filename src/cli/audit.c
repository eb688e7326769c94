/* SPDX-License-Identifier: Apache-2.0 */
/* baton audit: does an evidence folder hold? */
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "audit/audit.h"
#include "base/base.h"
#include "cli/cli.h"

static const char help[] =
    "usage: baton audit DIR [--seal HEX]\n"
    "\n"
    "Recomputes what an evidence folder claims from its raw documents: figures, verdicts, hashes,\n"
    "the chain of attempts, the summary, the seal. docs/evidence.md explains the folder.\n"
    "Exit 0: all of it holds; 1: something differs or is missing, and is named.\n"
    "\n"
    "  --seal HEX       the seal that was published: the hash in seal.txt's last line\n"
    "  --json, -v, -q\n"
    "\n"
    "example\n"
    "  baton audit evidence/20260102T030405Z-check-0a1b2c3d\n";

enum { OPT_SEAL = 256 };

static int take(void *args, int opt, const char *value, struct baton_error *e)
{
    uint8_t bytes[32];
    const char **seal = args;
    *seal = value;
    if (!base_unhex(value, bytes, sizeof bytes))
        return base_fail(e, BATON_ERR_USAGE, "--seal: '%.70s' is no SHA-256", value);
    return 0;
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

static int report(const struct cli_common *common, const char *dir, const struct audit_report *r)
{
    int rc = json_array_size(r->differences) != 0;
    if (!common->json) {
        print_report(dir, r);
        return rc;
    }
    return cli_print_json(json_pack("{s:i,s:s,s:s,s:{s:i,s:i,s:i},s:O,s:O,s:s}", "schema", 1,
                                    "command", r->command, "claimed", r->verdict, "checked",
                                    "files", (int)r->files, "lines", (int)r->lines, "figures",
                                    (int)r->figures, "differences", r->differences, "not_available",
                                    r->not_available, "verdict", rc ? "fail" : "pass"),
                          rc);
}

int cli_audit(int argc, char **argv)
{
    static const struct option options[] = {{"seal", required_argument, NULL, OPT_SEAL},
                                            {"json", no_argument, NULL, 'j'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    static const struct cli_syntax syntax = {":hvq", help, options, take, true};
    struct cli_common common = {0};
    struct baton_error e = {0};
    struct audit_report r = {0};
    const char *seal = NULL;
    bool helped = false;
    int rc = cli_parse(argc, argv, &syntax, &common, &seal, &helped, &e);
    if (helped)
        return 0;
    if (rc == 0 && optind + 1 != argc)
        rc = base_fail(&e, BATON_ERR_USAGE, "give one folder; see `baton audit --help`");
    if (rc == 0)
        rc = audit_folder(argv[optind], seal, &r, &e);
    rc = rc ? cli_fail(&common, &e) : report(&common, argv[optind], &r);
    audit_report_free(&r);
    return rc;
}
