/* SPDX-License-Identifier: Apache-2.0 */
/* baton check: does a handoff over this route hold? */
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "audit/audit.h"
#include "base/base.h"
#include "cli/check_priv.h"
#include "cli/run_priv.h"

static const char help[] =
    "usage: baton check -m MODEL [--prefill DEV] [--decode DEV] [OPTIONS]\n"
    "\n"
    "Hands prompts over from one device to another, reads every slot back from the consumer after\n"
    "insertion and compares it with the producer's; then tokens and logits with the consumer's\n"
    "device doing both, and that device with cpu:ref. docs/check.md explains each figure.\n"
    "Exit 0: it holds; 1: it does not; 2, 3: it could not be checked.\n"
    "\n"
    "  -m MODEL              Hugging Face folder, or shape:NAME[:SEED] (random weights)\n"
    "  --prefill DEV, --decode DEV   cpu (default), cpu:ref; `baton devices` lists them\n"
    "  --mode whole|stream   KV after the prefill (default) / layer by layer\n"
    "  --tokens N,N,...      lengths of default prompts (default 128,2048)\n"
    "  --prompts FILE.jsonl  instead: one {\"prompt\": MESSAGE}, {\"text\": TEXT} or {\"ids\": "
    "[...]}\n"
    "                        a line, \"id\" names it\n"
    "  -n N                  tokens to generate, past end tokens (default 32)\n"
    "  --repeats N           handoffs of each prompt (default 3)\n"
    "  --reference on|off    compare native with cpu:ref (default on; slow on large models)\n"
    "  --fault import-flip[:SEED]    plant a fault: one bit flipped at the consumer after import.\n"
    "                        The check must then fail and name the place\n"
    "  --evidence DIR        keep all of it in a folder below DIR (docs/evidence.md)\n"
    "  --against FOLDER      compare with the outputs in an earlier folder; exit 1 where they "
    "differ\n"
    "  --threads N, --cpus LIST, --json, -v, -q\n"
    "\n"
    "example\n"
    "  baton check -m models/gemma3-tiny --prefill cpu --decode cpu --mode stream --tokens "
    "128,2048\n";

enum {
    OPT_PREFILL = 256,
    OPT_DECODE,
    OPT_MODE,
    OPT_TOKENS,
    OPT_PROMPTS,
    OPT_REPEATS,
    OPT_REFERENCE,
    OPT_FAULT,
    OPT_THREADS,
    OPT_CPUS,
    OPT_EVIDENCE,
    OPT_AGAINST,
};

static const struct option long_options[] = {
    {"model", required_argument, NULL, 'm'},
    {"prefill", required_argument, NULL, OPT_PREFILL},
    {"decode", required_argument, NULL, OPT_DECODE},
    {"mode", required_argument, NULL, OPT_MODE},
    {"tokens", required_argument, NULL, OPT_TOKENS},
    {"prompts", required_argument, NULL, OPT_PROMPTS},
    {"repeats", required_argument, NULL, OPT_REPEATS},
    {"reference", required_argument, NULL, OPT_REFERENCE},
    {"fault", required_argument, NULL, OPT_FAULT},
    {"threads", required_argument, NULL, OPT_THREADS},
    {"cpus", required_argument, NULL, OPT_CPUS},
    {"evidence", required_argument, NULL, OPT_EVIDENCE},
    {"against", required_argument, NULL, OPT_AGAINST},
    {"json", no_argument, NULL, 'j'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

/* ---- arguments ---------------------------------------------------------------------------- */

static int parse_tokens(const char *value, struct cli_check_args *a, struct baton_error *e)
{
    int32_t *lengths = NULL;
    size_t n = 0;
    int rc = cli_parse_ids("--tokens", value, &lengths, &n, e);
    if (rc == 0 && n > CLI_CHECK_CASES)
        rc = base_fail(e, BATON_ERR_USAGE, "--tokens: %zu lengths, at most %u", n, CLI_CHECK_CASES);
    for (size_t i = 0; i < n && rc == 0; i++) {
        a->tokens[i] = (uint32_t)lengths[i];
        if (lengths[i] < 1 || lengths[i] > 1 << 22)
            rc = base_fail(e, BATON_ERR_USAGE, "--tokens: %d is no length", lengths[i]);
    }
    a->n_tokens = (uint32_t)n;
    free(lengths);
    return rc;
}

static int parse_mode(const char *value, struct cli_check_args *a, struct baton_error *e)
{
    int rc = cli_parse_word("--mode", value, cli_run_mode_names, &a->mode, e);
    if (rc == 0 && a->mode == BATON_NATIVE)
        rc = base_fail(e, BATON_ERR_USAGE,
                       "--mode native hands nothing over: check takes whole or stream");
    a->options.mode = (enum baton_mode)a->mode;
    return rc;
}

static int parse_fault(const char *value, struct verify_options *o, struct baton_error *e)
{
    const char name[] = "import-flip";
    size_t n = strlen(name);
    if (strncmp(value, name, n) || (value[n] && value[n] != ':'))
        return base_fail(e, BATON_ERR_USAGE, "--fault: '%.40s' is not import-flip[:SEED]", value);
    o->plant_flip = true;
    o->fault_seed = base_now_ns();
    return value[n] ? cli_parse_u64("--fault import-flip", value + n + 1, &o->fault_seed, e) : 0;
}

static int parse_reference(const char *value, struct verify_options *o, struct baton_error *e)
{
    static const char *const words[] = {"on", "off", NULL};
    int word = 0;
    int rc = cli_parse_word("--reference", value, words, &word, e);
    o->no_reference = word == 1;
    return rc;
}

/* Options that are the checker's own. Returns 1 where `opt` is none of them. */
static int parse_check(int opt, const char *v, struct cli_check_args *a, struct baton_error *e)
{
    switch (opt) {
    case OPT_MODE:
        return parse_mode(v, a, e);
    case OPT_TOKENS:
        return parse_tokens(v, a, e);
    case OPT_REPEATS:
        return cli_parse_u32("--repeats", v, 1, 1u << 20, &a->options.repeats, e);
    case OPT_REFERENCE:
        return parse_reference(v, &a->options, e);
    case OPT_FAULT:
        return parse_fault(v, &a->options, e);
    case 'n':
        return cli_parse_u32("-n", v, 1, 1u << 16, &a->options.n, e);
    case OPT_THREADS:
        return cli_parse_u32("--threads", v, 1, 1024, &a->options.threads, e);
    case OPT_EVIDENCE:
        a->evidence = v;
        return 0;
    case OPT_AGAINST:
        a->against = v;
        return 0;
    default:
        return 1;
    }
}

static int parse_option(void *args, int opt, const char *v, struct baton_error *e)
{
    struct cli_check_args *a = args;
    int rc = parse_check(opt, v, a, e);
    if (rc != 1)
        return rc;
    switch (opt) {
    case 'm':
        a->model = v;
        return 0;
    case OPT_PREFILL:
        a->options.prefill = v;
        return 0;
    case OPT_DECODE:
        a->options.decode = v;
        return 0;
    case OPT_PROMPTS:
        a->prompts = v;
        return 0;
    case OPT_CPUS:
        a->cpus = v;
        return 0;
    default:
        return base_fail(e, BATON_ERR_USAGE, "unknown option; see `baton check --help`");
    }
}

static int finish_args(struct cli_check_args *a, struct baton_error *e)
{
    if (!a->model)
        return base_fail(e, BATON_ERR_USAGE, "check needs -m MODEL; see `baton check --help`");
    if (a->prompts && a->n_tokens)
        return base_fail(e, BATON_ERR_USAGE, "give one of --tokens and --prompts");
    if (!a->prompts && !a->n_tokens) {
        a->tokens[0] = 128;
        a->tokens[1] = 2048;
        a->n_tokens = 2;
    }
    return 0;
}

static int parse(int argc, char **argv, struct cli_check_args *a, bool *done, struct baton_error *e)
{
    static const struct cli_syntax syntax = {":m:n:vqh", help, long_options, parse_option, false};
    int rc = cli_parse(argc, argv, &syntax, &a->common, a, done, e);
    return rc || *done ? rc : finish_args(a, e);
}

/* ---- running ------------------------------------------------------------------------------ */

static void draw(void *ctx, uint64_t done, uint64_t all)
{
    cli_progress_draw(ctx, "runs", done, all);
}

/* Weights in each device's order once, not once an engine: two of a kind where both ends are. */
static int prepare(const struct verify_options *o, struct baton_error *e)
{
    int rc = baton_model_prepare(o->model, o->prefill, e);
    if (rc == 0)
        rc = baton_model_prepare(o->model, o->decode, e);
    return rc;
}

static int run_cases(struct cli_check *c, const struct cli_check_args *a, struct baton_error *e)
{
    struct verify_options o = a->options;
    const struct baton_model_options mo = {.struct_size = sizeof mo, .path = a->model};
    struct cli_progress progress;
    int rc = baton_model_open(&mo, &o.model, e);
    if (rc == 0)
        rc = cli_check_prompts(c, o.model, e);
    if (rc == 0)
        rc = cli_check_begin(c, o.model, e);
    if (rc == 0)
        rc = prepare(&o, e);
    cli_progress_init(&progress, &a->common);
    o.progress = draw;
    o.ctx = &progress;
    for (uint32_t i = 0; i < c->n_cases && rc == 0; i++) {
        rc = cli_check_one(c, &o, &c->cases[i], e);
        cli_progress_end(&progress);
    }
    if (rc == 0)
        rc = cli_check_end(c, e);
    baton_model_close(o.model);
    return rc;
}

/* A fault found counts more than a case that could not be checked. */
static int exit_code(const struct cli_check *c)
{
    if (cli_check_verdict(c) == VERIFY_PASS)
        return cli_check_differs(c);
    if (cli_check_verdict(c) == VERIFY_FAIL)
        return 1;
    for (uint32_t i = 0; i < c->n_cases; i++)
        if (c->cases[i].result.verdict == VERIFY_ERROR)
            return cli_exit_code(c->cases[i].result.error.code);
    return 3;
}

int cli_check(int argc, char **argv)
{
    struct cli_check_args a = {
        .mode = BATON_WHOLE,
        .argc = argc,
        .argv = argv,
        .options = {.prefill = "cpu", .decode = "cpu", .mode = BATON_WHOLE, .n = 32, .repeats = 3},
    };
    struct cli_check c = {.args = &a};
    struct baton_error e = {0};
    bool done = false;
    int rc = parse(argc, argv, &a, &done, &e);
    if (!rc && !done) {
        cli_set_verbosity(&a.common);
        rc = a.cpus ? cli_set_cpus(a.cpus, &e) : 0;
        if (!rc)
            rc = run_cases(&c, &a, &e);
    }
    if (rc)
        rc = cli_fail(&a.common, &e);
    else if (!done && a.common.json)
        rc = cli_print_json(cli_check_json(&c), exit_code(&c));
    else if (!done) {
        cli_check_table(&c);
        rc = exit_code(&c);
    }
    for (uint32_t i = 0; i < c.n_cases; i++) {
        verify_prompt_free(&c.cases[i].prompt);
        json_decref(c.cases[i].against);
    }
    audit_evidence_drop(c.evidence);
    free(c.cases);
    return rc;
}
