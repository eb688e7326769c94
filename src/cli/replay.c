/* SPDX-License-Identifier: Apache-2.0 */
/* baton replay: a recorded request once more, and the first output that is another one now. */
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "audit/replay.h"
#include "base/base.h"
#include "cli/cli.h"
#include "cli/run_priv.h"

static const char help[] =
    "usage: baton replay RECORD [-m MODEL] [OPTIONS]\n"
    "\n"
    "Runs one recorded request again on the devices that it was recorded with, twice, and names\n"
    "the first recorded output that is another one now: of the prompt's kv_append verbs (layer, K "
    "or\n"
    "V), the import at the consumer, a step's logits, or the choice of a token. Verbs between\n"
    "two of those leave no record: it then says which lie between. RECORD is raw/NNNN.json of\n"
    "an evidence folder of check (its first handoff) or matrix (a cell's first repeat, all its\n"
    "prompts at once), or a document of baton run --json (tokens alone, taken as greedy).\n"
    "Exit 0: all outputs are the recorded ones; 1: one is not, or two replays differ; 2: another\n"
    "model, devices that compute otherwise than the recorded ones, or a folder whose chain is "
    "broken.\n"
    "\n"
    "  -m MODEL         Hugging Face folder; evidence names none, and the record's hash must be "
    "its\n"
    "  --threads N, --json, -v, -q\n"
    "\n"
    "example\n"
    "  baton replay evidence/20260102T030405Z-check-0a1b2c3d/raw/0000.json -m models/qwen3-tiny\n";

enum { OPT_THREADS = 256 };

struct args {
    const char *model;
    uint32_t threads;
};

static int take(void *args, int opt, const char *value, struct baton_error *e)
{
    struct args *a = args;
    if (opt != 'm')
        return cli_parse_u32("--threads", value, 1, 1024, &a->threads, e);
    a->model = value;
    return 0;
}

static const char *text(const json_t *o, const char *key)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : "";
}

static long long integer(const json_t *o, const char *key)
{
    return json_integer_value(json_object_get(o, key));
}

static void print_place(const char *what, const json_t *p)
{
    if (json_is_null(p))
        return;
    printf("%s: request %lld, %s: %s", what, integer(p, "request"), text(p, "phase"),
           text(p, "verb"));
    if (json_is_integer(json_object_get(p, "layer")))
        printf(" of layer %lld, %s", integer(p, "layer"), text(p, "tensor"));
    if (json_is_integer(json_object_get(p, "step")))
        printf(" of token %lld", integer(p, "step"));
    printf("\n  between it and what is equal before it: %s\n", text(p, "between"));
}

static int report(const struct cli_common *common, const struct audit_record *r, json_t *found)
{
    const json_t *first = json_object_get(found, "first"), *n = json_object_get(found, "compared");
    const json_t *control = json_object_get(found, "control");
    int rc = !json_is_null(first) || !json_is_null(control);
    if (common->json) {
        json_t *doc = json_pack("{s:i,s:s,s:{s:s,s:s,s:s,s:i,s:i,s:{s:b,s:b}},s:s}", "schema", 1,
                                "kind", r->kind, "binding", "mode", cli_run_mode_names[r->mode],
                                "prefill", r->prefill, "decode", r->decode, "lanes", (int)r->lanes,
                                "requests", (int)r->n_prompts, "emulated", "prefill",
                                cli_emulated(r->prefill), "decode", cli_emulated(r->decode),
                                "verdict", rc ? "fail" : "pass");
        json_object_update(doc, found);
        return cli_print_json(doc, rc);
    }
    printf("%s of %s: %s on %s%s, %s%s, %u requests over %u lanes\n", "record", r->kind,
           cli_run_mode_names[r->mode], r->prefill, cli_emulated(r->prefill) ? " (emulated)" : "",
           r->decode, cli_emulated(r->decode) ? " (emulated)" : "", r->n_prompts, r->lanes);
    print_place("differs from the record", first);
    print_place("two replays differ from each other", control);
    printf("%lld slots, %lld rows of logits, %lld tokens: %s\n", integer(n, "slots"),
           integer(n, "rows"), integer(n, "ids"), rc ? "fail" : "all as recorded");
    return rc;
}

static int replay(const struct cli_common *common, const struct args *a, const char *path,
                  struct baton_error *e)
{
    struct audit_record r = {0};
    struct baton_model *model = NULL;
    json_t *found = NULL;
    struct baton_model_options mo = {.struct_size = sizeof mo, .path = a->model};
    int rc = audit_record_open(path, &r, e);
    if (rc == 0 && !mo.path)
        mo.path = r.model;
    if (rc == 0 && !mo.path[0])
        rc = base_fail(e, BATON_ERR_USAGE, "the record names no model: -m is missing");
    if (rc == 0)
        rc = baton_model_open(&mo, &model, e);
    if (rc == 0)
        rc = audit_replay(&r, model, a->threads, &found, e);
    if (rc == 0)
        rc = report(common, &r, found);
    json_decref(found);
    baton_model_close(model);
    audit_record_close(&r);
    return rc;
}

int cli_replay(int argc, char **argv)
{
    static const struct option options[] = {{"model", required_argument, NULL, 'm'},
                                            {"threads", required_argument, NULL, OPT_THREADS},
                                            {"json", no_argument, NULL, 'j'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    static const struct cli_syntax syntax = {":m:hvq", help, options, take, true};
    struct cli_common common = {0};
    struct args a = {0};
    struct baton_error e = {0};
    bool helped = false;
    int rc = cli_parse(argc, argv, &syntax, &common, &a, &helped, &e);
    if (helped)
        return 0;
    if (rc == 0 && optind + 1 != argc)
        rc = base_fail(&e, BATON_ERR_USAGE, "give one record; see `baton replay --help`");
    cli_set_verbosity(&common);
    if (rc == 0)
        rc = replay(&common, &a, argv[optind], &e);
    return rc < 0 ? cli_fail(&common, &e) : rc;
}
