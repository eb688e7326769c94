/* SPDX-License-Identifier: Apache-2.0 */
/* baton quality: how many answers of a frozen set are right over this route? */
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "cli/evidence_priv.h"
#include "cli/quality_priv.h"
#include "cli/run_priv.h"

static const char help[] =
    "usage: baton quality -m MODEL --set FILE.jsonl [OPTIONS]\n"
    "       baton quality --set FILE.jsonl --rescore DIR\n"
    "\n"
    "Asks the prompts of a frozen set, greedily, one at a time and then a cohort at once. An "
    "answer\n"
    "is right where it is the set's to the letter and ended with an end token; nothing is cut off "
    "or\n"
    "searched for in it. FILE.jsonl.sha256 must hold the set's hash. docs/evidence.md explains.\n"
    "Exit 0: every answer is the reference's (without one: right), alone and beside others; 1: "
    "not.\n"
    "\n"
    "  -m MODEL              Hugging Face folder\n"
    "  --set FILE.jsonl      {\"id\", \"prompt\", \"answer\", \"json\"?, \"category\"?} a line\n"
    "  --reference FILE      another implementation's outputs: where its margin is above 0.4 the\n"
    "                        output must be the same; it says which prompts count\n"
    "  --prefill DEV, --decode DEV   cpu (default), ...\n"
    "  --mode native|whole|stream    (default native)\n"
    "  --concurrency N       lanes, 1 to 8 (default 4); 1 asks one at a time only\n"
    "  --cohort N            prompts at once (default 12)\n"
    "  -n N                  tokens that an answer may have (default 256)\n"
    "  --evidence DIR        keep all of it in a folder below DIR\n"
    "  --rescore DIR         judge stored answers again: of one folder, or of all below DIR\n"
    "  --threads N, --json, -v, -q\n"
    "\n"
    "example\n"
    "  baton quality -m models/gemma3-tiny --set tests/quality/frozen36.jsonl --mode stream\n";

enum {
    OPT_SET = 256,
    OPT_REFERENCE,
    OPT_PREFILL,
    OPT_DECODE,
    OPT_MODE,
    OPT_CONCURRENCY,
    OPT_COHORT,
    OPT_EVIDENCE,
    OPT_RESCORE,
    OPT_THREADS,
    OPT_URL,
    OPT_AGAINST,
};

static const struct option long_options[] = {
    {"model", required_argument, NULL, 'm'},
    {"set", required_argument, NULL, OPT_SET},
    {"reference", required_argument, NULL, OPT_REFERENCE},
    {"prefill", required_argument, NULL, OPT_PREFILL},
    {"decode", required_argument, NULL, OPT_DECODE},
    {"mode", required_argument, NULL, OPT_MODE},
    {"concurrency", required_argument, NULL, OPT_CONCURRENCY},
    {"cohort", required_argument, NULL, OPT_COHORT},
    {"evidence", required_argument, NULL, OPT_EVIDENCE},
    {"rescore", required_argument, NULL, OPT_RESCORE},
    {"threads", required_argument, NULL, OPT_THREADS},
    {"url", required_argument, NULL, OPT_URL},
    {"against", required_argument, NULL, OPT_AGAINST},
    {"json", no_argument, NULL, 'j'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

/* ---- arguments ---------------------------------------------------------------------------- */

static int take_path(struct cli_quality_args *a, int opt, const char *v, struct baton_error *e)
{
    const char **to = opt == 'm'             ? &a->model
                      : opt == OPT_SET       ? &a->set
                      : opt == OPT_REFERENCE ? &a->options.reference
                      : opt == OPT_PREFILL   ? &a->options.route.prefill
                      : opt == OPT_DECODE    ? &a->options.route.decode
                      : opt == OPT_EVIDENCE  ? &a->evidence
                      : opt == OPT_RESCORE   ? &a->rescore
                                             : NULL;
    if (!to)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "--url and --against are not built in quality");
    *to = v;
    return 0;
}

static int take(void *args, int opt, const char *v, struct baton_error *e)
{
    struct cli_quality_args *a = args;
    int rc = 0;
    switch (opt) {
    case OPT_MODE:
        rc = cli_parse_word("--mode", v, cli_run_mode_names, &a->mode, e);
        a->options.route.mode = (enum baton_mode)a->mode;
        return rc;
    case OPT_CONCURRENCY:
        return cli_parse_u32("--concurrency", v, 1, 8, &a->options.route.lanes, e);
    case OPT_COHORT:
        return cli_parse_u32("--cohort", v, 1, 64, &a->options.cohort, e);
    case 'n':
        return cli_parse_u32("-n", v, 1, 1u << 16, &a->options.n, e);
    case OPT_THREADS:
        return cli_parse_u32("--threads", v, 1, 1024, &a->options.route.threads, e);
    default:
        return take_path(a, opt, v, e);
    }
}

static int check_args(const struct cli_quality_args *a, struct baton_error *e)
{
    if (!a->set)
        return base_fail(e, BATON_ERR_USAGE, "no set: --set is missing");
    if (!a->model && !a->rescore)
        return base_fail(e, BATON_ERR_USAGE, "no model: -m is missing");
    if (a->rescore && (a->model || a->evidence || a->options.reference))
        return base_fail(e, BATON_ERR_USAGE,
                         "--rescore asks nothing: it takes no -m, --evidence and --reference");
    return 0;
}

/* ---- asking ------------------------------------------------------------------------------- */

static const char *const limits[] = {
    "Greedy answers to these prompts, in this build: a score, not a proof of equality.",
    "Through the engine in one process: nothing is shown of HTTP, of other transports or of loss.",
    "Two routes that make the same mistake give the same answers.", NULL};

static int begin(struct cli_quality_args *a, const struct audit_set *s, struct baton_error *e)
{
    const struct audit_route_options *r = &a->options.route;
    bool native = r->mode == BATON_NATIVE;
    const struct audit_device devices[] = {
        {"decode", r->decode}, {native ? NULL : "prefill", r->prefill}, {NULL, NULL}};
    json_t *more = json_pack(
        "{s:{s:s,s:s,s:i},s:{s:s,s:s,s:s,s:i,s:i,s:s}}", "set", "name", s->name, "sha256",
        s->sha256, "prompts", (int)json_array_size(s->prompts), "route", "mode",
        cli_run_mode_names[a->mode], "prefill", native ? r->decode : r->prefill, "decode",
        r->decode, "lanes", (int)r->lanes, "cohort", (int)a->options.cohort, "path", "engine");
    const struct cli_evidence x = {.command = "quality",
                                   .argc = a->argc,
                                   .argv = a->argv,
                                   .dir = a->evidence,
                                   .model = a->model,
                                   .input = a->set,
                                   .reference = a->options.reference,
                                   .opened = r->model,
                                   .devices = devices,
                                   .limits = limits,
                                   .repeats = 1,
                                   .more = more};
    int rc = cli_evidence_open(&x, &a->options.evidence, e);
    json_decref(more);
    return rc;
}

static void draw(void *ctx, uint64_t done, uint64_t all)
{
    cli_progress_draw(ctx, "prompts", done, all);
}

static int ask(struct cli_quality_args *a, const struct audit_set *s, json_t **results,
               struct baton_error *e)
{
    const struct baton_model_options mo = {.struct_size = sizeof mo, .path = a->model};
    struct cli_progress progress;
    int rc = baton_model_open(&mo, &a->options.route.model, e);
    if (rc == 0 && a->evidence)
        rc = begin(a, s, e);
    cli_progress_init(&progress, &a->common);
    a->options.progress = draw;
    a->options.ctx = &progress;
    if (rc == 0)
        rc = audit_quality_run(&a->options, s, results, e);
    cli_progress_end(&progress);
    a->options.ctx = NULL; /* it ends here */
    baton_model_close(a->options.route.model);
    return rc;
}

static int quality(struct cli_quality_args *a, struct baton_error *e)
{
    struct audit_set s = {0};
    json_t *results = NULL;
    int rc = check_args(a, e);
    if (rc == 0)
        rc = audit_set_open(a->set, &s, e);
    if (rc == 0)
        rc = a->rescore ? cli_quality_rescore(a, &s, e) : ask(a, &s, &results, e);
    if (results)
        rc = cli_quality_report(a, &s, results);
    json_decref(results);
    audit_evidence_drop(a->options.evidence);
    audit_set_close(&s);
    return rc;
}

int cli_quality(int argc, char **argv)
{
    static const struct cli_syntax syntax = {":m:n:vqh", help, long_options, take, false};
    struct cli_quality_args a = {
        .mode = BATON_NATIVE,
        .argc = argc,
        .argv = argv,
        .options = {.n = 256,
                    .cohort = 12,
                    .route = {.prefill = "cpu", .decode = "cpu", .lanes = 4}},
    };
    struct baton_error e = {0};
    bool helped = false;
    if (cli_parse(argc, argv, &syntax, &a.common, &a, &helped, &e))
        return cli_fail(&a.common, &e);
    if (helped)
        return 0;
    cli_set_verbosity(&a.common);
    int rc = quality(&a, &e);
    return rc < 0 ? cli_fail(&a.common, &e) : rc;
}
