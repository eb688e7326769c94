/* SPDX-License-Identifier: Apache-2.0 */
/* baton bench: how long does a route take, alone or beside another one? */
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "audit/bench.h"
#include "base/base.h"
#include "cli/cli.h"
#include "cli/run_priv.h"

static const char help[] =
    "usage: baton bench -m MODEL --a \"FLAGS\" --b \"FLAGS\" [OPTIONS]\n"
    "       baton bench -m MODEL --single \"FLAGS\" [OPTIONS]\n"
    "\n"
    "Times two routes in pairs (A B, B A, ... after one run of each that does not count) or one\n"
    "alone, compares what they generate token for token, and gives B's time over A's with a\n"
    "bootstrap interval of 95 %. Under 6 pairs there is no interval and the figure is called\n"
    "exploratory; where the arms hold other devices or threads there is no ratio. Engines run in "
    "this\n"
    "process, joined in memory; prompts are random ids. FLAGS are --prefill DEV, --decode DEV,\n"
    "--mode native|whole|stream and --threads N.\n"
    "Exit 0: measured; 1: the arms did not generate the same tokens.\n"
    "\n"
    "  -m MODEL             Hugging Face folder, or shape:NAME[:SEED]\n"
    "  --pairs N            runs of each arm that count, 1 to 256 (default 6)\n"
    "  --prompt-tokens N    (default 512)\n"
    "  -n N                 tokens to generate, past end tokens (default 32)\n"
    "  --lanes N            equal requests at once, 1 to 8 (default 1)\n"
    "  --seed N             of the prompts\n"
    "  --json, -v, -q\n"
    "\n"
    "example\n"
    "  baton bench -m models/qwen3-small --a '--mode whole' --b '--mode stream' "
    "--prompt-tokens 2048\n";

enum { OPT_A = 256, OPT_B, OPT_SINGLE, OPT_PAIRS, OPT_TOKENS, OPT_LANES, OPT_SEED };

static const struct option long_options[] = {
    {"model", required_argument, NULL, 'm'},
    {"a", required_argument, NULL, OPT_A},
    {"b", required_argument, NULL, OPT_B},
    {"single", required_argument, NULL, OPT_SINGLE},
    {"pairs", required_argument, NULL, OPT_PAIRS},
    {"prompt-tokens", required_argument, NULL, OPT_TOKENS},
    {"lanes", required_argument, NULL, OPT_LANES},
    {"seed", required_argument, NULL, OPT_SEED},
    {"json", no_argument, NULL, 'j'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

struct bench_args {
    struct cli_common common;
    const char *model;
    const char *flags[2]; /* --a or --single; --b */
    bool single;
    char *words[2]; /* copies, cut */
    struct audit_bench_options options;
};

/* ---- arguments ---------------------------------------------------------------------------- */

static int take(void *args, int opt, const char *v, struct baton_error *e)
{
    struct bench_args *a = args;
    struct audit_bench_options *o = &a->options;
    switch (opt) {
    case 'm':
        a->model = v;
        return 0;
    case OPT_A:
    case OPT_B:
        a->flags[opt - OPT_A] = v;
        return 0;
    case OPT_SINGLE:
        a->flags[0] = v;
        a->single = true;
        return 0;
    case OPT_PAIRS:
        return cli_parse_u32("--pairs", v, 1, AUDIT_RATIO_MOST, &o->pairs, e);
    case OPT_TOKENS:
        return cli_parse_u32("--prompt-tokens", v, 1, 1u << 20, &o->prompt, e);
    case OPT_LANES:
        return cli_parse_u32("--lanes", v, 1, 8, &o->lanes, e);
    case OPT_SEED:
        return cli_parse_u64("--seed", v, &o->seed, e);
    default:
        return cli_parse_u32("-n", v, 1, 1u << 16, &o->n, e);
    }
}

enum { ARM_PREFILL = 256, ARM_DECODE, ARM_MODE, ARM_THREADS };

static int take_arm(void *args, int opt, const char *v, struct baton_error *e)
{
    struct audit_route_options *r = args;
    int mode = 0, rc;
    switch (opt) {
    case ARM_PREFILL:
        r->prefill = v;
        return 0;
    case ARM_DECODE:
        r->decode = v;
        return 0;
    case ARM_MODE:
        rc = cli_parse_word("--mode", v, cli_run_mode_names, &mode, e);
        r->mode = (enum baton_mode)mode;
        return rc;
    default:
        return cli_parse_u32("--threads", v, 1, 1024, &r->threads, e);
    }
}

/* An arm's flags, cut at spaces. */
static int parse_arm(struct bench_args *a, uint32_t i, struct baton_error *e)
{
    static const struct option options[] = {
        {"prefill", required_argument, NULL, ARM_PREFILL},
        {"decode", required_argument, NULL, ARM_DECODE},
        {"mode", required_argument, NULL, ARM_MODE},
        {"threads", required_argument, NULL, ARM_THREADS},
        {NULL, 0, NULL, 0},
    };
    static const struct cli_syntax syntax = {":", "", options, take_arm, false};
    char *argv[32] = {(char *)(uintptr_t) "bench"}, *rest = NULL;
    int argc = 1;
    struct cli_common unused = {0};
    bool helped = false;
    struct audit_route_options *r = &a->options.route[i];
    *r = (struct audit_route_options){.prefill = "cpu", .decode = "cpu", .mode = BATON_NATIVE};
    if (!(a->words[i] = strdup(a->flags[i])))
        return base_fail(e, BATON_ERR_NOMEM, "no memory for '%.80s'", a->flags[i]);
    for (char *w = strtok_r(a->words[i], " ", &rest); w; w = strtok_r(NULL, " ", &rest))
        if (argc < 31)
            argv[argc++] = w;
        else
            return base_fail(e, BATON_ERR_USAGE, "'%.80s': too many words", a->flags[i]);
    struct baton_error why;
    int rc = cli_parse(argc, argv, &syntax, &unused, r, &helped, &why);
    return rc ? base_fail(e, rc, "arm '%.60s': %.160s", a->flags[i], why.text) : 0;
}

static int check_args(struct bench_args *a, struct baton_error *e)
{
    if (!a->model)
        return base_fail(e, BATON_ERR_USAGE, "no model: -m is missing");
    if (a->single ? a->flags[1] != NULL : !a->flags[0] || !a->flags[1])
        return base_fail(e, BATON_ERR_USAGE, "either --a and --b, or --single alone");
    a->options.arms = a->single ? 1 : 2;
    for (uint32_t i = 0; i < a->options.arms; i++) {
        int rc = parse_arm(a, i, e);
        if (rc)
            return rc;
    }
    return 0;
}

/* ---- report ------------------------------------------------------------------------------- */

static double median_of(const struct bench_args *a, const struct audit_bench *b, uint32_t arm,
                        int time)
{
    double x[AUDIT_RATIO_MOST];
    for (uint32_t i = 0; i < a->options.pairs; i++)
        x[i] = b->sample[arm][i].ms[time];
    return audit_median(x, a->options.pairs);
}

static const char *producer_of(const struct audit_route_options *r)
{
    return r->mode == BATON_NATIVE ? r->decode : r->prefill;
}

static bool emulated(const struct audit_route_options *r)
{
    return cli_emulated(r->decode) || cli_emulated(producer_of(r));
}

static json_t *sample_json(const struct audit_sample *s)
{
    json_t *ms = json_object(), *steps = json_array();
    for (int i = 0; i < AUDIT_BENCH_TIMES; i++)
        json_object_set_new(ms, audit_bench_time_names[i], json_real(s->ms[i]));
    for (int i = 0; i < 9; i++)
        json_array_append_new(steps, json_integer((json_int_t)s->steps[i]));
    return json_pack("{s:o,s:o}", "ms", ms, "steps_by_lanes", steps);
}

static json_t *arm_json(const struct bench_args *a, const struct audit_bench *b, uint32_t arm)
{
    const struct audit_bench_options *o = &a->options;
    const struct audit_route_options *r = &o->route[arm];
    json_t *samples = json_array(), *medians = json_object();
    for (uint32_t i = 0; i < o->pairs; i++)
        json_array_append_new(samples, sample_json(&b->sample[arm][i]));
    for (int i = 0; i < AUDIT_BENCH_TIMES; i++)
        json_object_set_new(medians, audit_bench_time_names[i], json_real(median_of(a, b, arm, i)));
    double wall = median_of(a, b, arm, AUDIT_WALL) * 1e-3;
    return json_pack("{s:s,s:s,s:s,s:s,s:i,s:b,s:o,s:f,s:o}", "flags", a->flags[arm], "mode",
                     cli_run_mode_names[r->mode], "prefill", producer_of(r), "decode", r->decode,
                     "threads", (int)r->threads, "emulated", emulated(r), "median_ms", medians,
                     "tokens_per_s", (double)o->lanes * o->n / wall, "samples", samples);
}

static const enum audit_bench_time rated[] = {AUDIT_TTFT, AUDIT_DECODE, AUDIT_TOTAL, AUDIT_WALL};

/* Why no ratio may be printed; NULL where it may. */
static const char *unfair(const struct bench_args *a, const struct audit_bench *b)
{
    if (a->single)
        return "one arm";
    if (!b->same_tokens)
        return "not equivalent: the arms did not generate the same tokens";
    if (!audit_bench_alike(&a->options.route[0], &a->options.route[1]))
        return "the arms hold other devices or threads";
    return NULL;
}

static json_t *ratios_json(const struct bench_args *a, const struct audit_bench *b)
{
    json_t *all = json_object();
    for (size_t i = 0; i < sizeof rated / sizeof *rated; i++) {
        struct audit_ratio r;
        if (!audit_bench_ratio(b, a->options.pairs, rated[i], &r))
            continue;
        json_t *interval = r.interval ? json_pack("[f,f]", r.lo, r.hi) : json_null();
        json_object_set_new(all, audit_bench_time_names[rated[i]],
                            json_pack("{s:f,s:o,s:f}", "estimate", r.estimate, "interval", interval,
                                      "level", AUDIT_RATIO_LEVEL));
    }
    return all;
}

static int print_document(const struct bench_args *a, const struct audit_bench *b, int rc)
{
    const struct audit_bench_options *o = &a->options;
    const char *why = unfair(a, b);
    json_t *doc = json_pack(
        "{s:i,s:s,s:i,s:i,s:i,s:i,s:s,s:s,s:o,s:b,s:b,s:s?,s:o,s:{s:I,s:I,s:I}}", "schema", 1,
        "model", a->model, "prompt_tokens", (int)o->prompt, "n", (int)o->n, "lanes", (int)o->lanes,
        "pairs", (int)o->pairs, "order", "abba", "path", "engine", "a", arm_json(a, b, 0),
        "same_tokens", b->same_tokens, "exploratory", o->pairs < AUDIT_RATIO_PAIRS, "why", why,
        "ratio_b_to_a", why ? json_null() : ratios_json(a, b), "left", "lanes",
        (json_int_t)b->left.lanes, "blocks", (json_int_t)b->left.blocks, "tickets",
        (json_int_t)b->left.tickets);
    if (!a->single)
        json_object_set_new(doc, "b", arm_json(a, b, 1));
    return cli_print_json(doc, rc);
}

static void print_arm(const struct bench_args *a, const struct audit_bench *b, uint32_t arm)
{
    const struct audit_route_options *r = &a->options.route[arm];
    double wall = median_of(a, b, arm, AUDIT_WALL);
    printf("%s  %s: prefill on %s, decode on %s%s\n", arm ? "B" : "A", cli_run_mode_names[r->mode],
           producer_of(r), r->decode, emulated(r) ? " (emulated: host time)" : "");
    printf("   first token %.1f ms (prefill %.1f, exposed transfer %.2f), between tokens %.2f ms, "
           "total %.1f ms, %.1f tokens/s\n",
           median_of(a, b, arm, AUDIT_TTFT), median_of(a, b, arm, AUDIT_PREFILL),
           median_of(a, b, arm, AUDIT_EXPOSED), median_of(a, b, arm, AUDIT_ITL_P50),
           median_of(a, b, arm, AUDIT_TOTAL), a->options.lanes * a->options.n / wall * 1e3);
}

static void print_table(const struct bench_args *a, const struct audit_bench *b)
{
    const struct audit_bench_options *o = &a->options;
    const char *why = unfair(a, b);
    printf("%s: %u tokens in, %u out, %u at once, %u runs of an arm, medians\n", a->model,
           o->prompt, o->n, o->lanes, o->pairs);
    for (uint32_t i = 0; i < o->arms; i++)
        print_arm(a, b, i);
    if (why && !a->single)
        printf("no ratio: %s\n", why);
    for (size_t i = 0; i < sizeof rated / sizeof *rated && !why; i++) {
        struct audit_ratio r;
        if (!audit_bench_ratio(b, o->pairs, rated[i], &r))
            continue;
        printf("B/A %-7s %.4f", audit_bench_time_names[rated[i]], r.estimate);
        if (r.interval)
            printf("  [%.4f, %.4f] at 95 %%\n", r.lo, r.hi);
        else
            printf("  exploratory: under %u pairs\n", AUDIT_RATIO_PAIRS);
    }
}

/* ---- the command -------------------------------------------------------------------------- */

static void draw(void *ctx, uint64_t done, uint64_t all)
{
    cli_progress_draw(ctx, "runs", done, all);
}

static int measure(struct bench_args *a, struct audit_bench *b, struct baton_error *e)
{
    struct baton_model *model = NULL;
    const struct baton_model_options mo = {.struct_size = sizeof mo, .path = a->model};
    struct cli_progress progress;
    int rc = baton_model_open(&mo, &model, e);
    for (uint32_t i = 0; i < 2; i++)
        a->options.route[i].model = model;
    cli_progress_init(&progress, &a->common);
    a->options.progress = draw;
    a->options.ctx = &progress;
    if (rc == 0)
        rc = audit_bench_run(&a->options, b, e);
    cli_progress_end(&progress);
    a->options.ctx = NULL; /* it ends here */
    baton_model_close(model);
    return rc;
}

static int bench(struct bench_args *a, struct baton_error *e)
{
    int rc = check_args(a, e);
    struct audit_bench *b = rc ? NULL : base_try_alloc(1, sizeof *b, e);
    if (rc == 0)
        rc = b ? measure(a, b, e) : BATON_ERR_NOMEM;
    if (rc == 0) {
        rc = b->same_tokens ? 0 : 1;
        if (a->common.json)
            rc = print_document(a, b, rc);
        else
            print_table(a, b);
    }
    free(b);
    free(a->words[0]);
    free(a->words[1]);
    return rc;
}

int cli_bench(int argc, char **argv)
{
    static const struct cli_syntax syntax = {":m:n:vqh", help, long_options, take, false};
    struct bench_args a = {.options = {.pairs = 6, .prompt = 512, .n = 32, .lanes = 1, .seed = 1}};
    struct baton_error e = {0};
    bool helped = false;
    if (cli_parse(argc, argv, &syntax, &a.common, &a, &helped, &e))
        return cli_fail(&a.common, &e);
    if (helped)
        return 0;
    cli_set_verbosity(&a.common);
    int rc = bench(&a, &e);
    return rc < 0 ? cli_fail(&a.common, &e) : rc;
}
