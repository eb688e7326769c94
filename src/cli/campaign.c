/* SPDX-License-Identifier: Apache-2.0 */
/* baton campaign: requests that are cancelled, producers that are killed, and everybody else. */
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <jansson.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "audit/campaign.h"
#include "base/base.h"
#include "cli/cli.h"
#include "cli/run_priv.h"

extern char **environ;

static const char help[] =
    "usage: baton campaign -m MODEL [OPTIONS]\n"
    "\n"
    "Cancels requests whose cache was imported and verified, while their neighbours decode, and "
    "lets\n"
    "others take their lanes; then, in two processes, kills the producer at each layer of a "
    "handoff.\n"
    "Neighbours and replacements must give the tokens and the logits that they give alone, a "
    "request\n"
    "whose producer died those of a native run, and nothing may still be held at the end.\n"
    "Exit 0: all of it holds; 1: something does not.\n"
    "\n"
    "  -m MODEL         Hugging Face folder\n"
    "  --prefill DEV, --decode DEV   (default cpu)\n"
    "  --mode whole|stream           (default stream)\n"
    "  --lanes N        2 to 8 (default 4)\n"
    "  --rounds N       a victim each (default 8)\n"
    "  -n N             tokens of a request (default 24)\n"
    "  --no-kills       leave the second part out\n"
    "  --seed N         of the prompts\n"
    "  --threads N, --json, -v, -q\n"
    "\n"
    "example\n"
    "  baton campaign -m models/gemma3-tiny --prefill npu:rngd --rounds 32\n";

enum {
    OPT_PREFILL = 256,
    OPT_DECODE,
    OPT_MODE,
    OPT_LANES,
    OPT_ROUNDS,
    OPT_NO_KILLS,
    OPT_SEED,
    OPT_THREADS
};

static const struct option long_options[] = {
    {"model", required_argument, NULL, 'm'},
    {"prefill", required_argument, NULL, OPT_PREFILL},
    {"decode", required_argument, NULL, OPT_DECODE},
    {"mode", required_argument, NULL, OPT_MODE},
    {"lanes", required_argument, NULL, OPT_LANES},
    {"rounds", required_argument, NULL, OPT_ROUNDS},
    {"no-kills", no_argument, NULL, OPT_NO_KILLS},
    {"seed", required_argument, NULL, OPT_SEED},
    {"threads", required_argument, NULL, OPT_THREADS},
    {"json", no_argument, NULL, 'j'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

struct args {
    struct cli_common common;
    const char *model;
    bool no_kills;
    struct audit_campaign_options options;
};

/* What the second part found. */
struct kills {
    uint64_t layers, killed, tokens, equal;
    uint64_t local; /* the handoff's verdict says that the consumer computed the prompt */
};

static int take_mode(struct audit_route_options *r, const char *v, struct baton_error *e)
{
    int mode = 0, rc = cli_parse_word("--mode", v, cli_run_mode_names, &mode, e);
    r->mode = (enum baton_mode)mode;
    return rc == 0 && mode == BATON_NATIVE
               ? base_fail(e, BATON_ERR_USAGE, "--mode native hands nothing over")
               : rc;
}

static int take(void *args, int opt, const char *v, struct baton_error *e)
{
    struct args *a = args;
    struct audit_campaign_options *o = &a->options;
    switch (opt) {
    case 'm':
        a->model = v;
        return 0;
    case OPT_PREFILL:
        o->route.prefill = v;
        return 0;
    case OPT_DECODE:
        o->route.decode = v;
        return 0;
    case OPT_MODE:
        return take_mode(&o->route, v, e);
    case OPT_LANES:
        return cli_parse_u32("--lanes", v, 2, 8, &o->route.lanes, e);
    case OPT_ROUNDS:
        return cli_parse_u32("--rounds", v, 1, 1u << 20, &o->rounds, e);
    case OPT_NO_KILLS:
        a->no_kills = true;
        return 0;
    case OPT_SEED:
        return cli_parse_u64("--seed", v, &o->seed, e);
    case OPT_THREADS:
        return cli_parse_u32("--threads", v, 1, 1024, &o->route.threads, e);
    default:
        return cli_parse_u32("-n", v, 16, 4096, &o->n, e);
    }
}

/* ---- victims ------------------------------------------------------------------------------ */

static void draw(void *ctx, uint64_t done, uint64_t all)
{
    cli_progress_draw(ctx, "rounds", done, all);
}

static int run_victims(struct args *a, struct audit_campaign *out, struct baton_error *e)
{
    const struct baton_model_options mo = {.struct_size = sizeof mo, .path = a->model};
    struct cli_progress progress;
    int rc = baton_model_open(&mo, &a->options.route.model, e);
    cli_progress_init(&progress, &a->common);
    a->options.progress = draw;
    a->options.ctx = &progress;
    if (rc == 0)
        rc = audit_campaign_run(&a->options, out, e);
    cli_progress_end(&progress);
    a->options.ctx = NULL; /* it ends here */
    baton_model_close(a->options.route.model);
    return rc;
}

/* ---- kills -------------------------------------------------------------------------------- */

/* This program once more, with a probe point (NULL: none), its stdout into *from. */
static int spawn(const char *const *argv, const char *probe, int *from, pid_t *pid,
                 struct baton_error *e)
{
    int ends[2];
    posix_spawn_file_actions_t actions;
    if (pipe2(ends, O_CLOEXEC))
        return base_fail_errno(e, BATON_ERR_IO, errno, "no pipe from baton run");
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    int rc = probe ? setenv("BATON_PROBE", probe, 1) : 0; /* no thread is left of the first part */
    if (rc == 0)
        rc = posix_spawn(pid, "/proc/self/exe", &actions, NULL, (char *const *)(uintptr_t)argv,
                         environ);
    unsetenv("BATON_PROBE");
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    if (rc)
        close(ends[0]);
    *from = ends[0];
    return rc ? base_fail_errno(e, BATON_ERR_IO, rc > 0 ? rc : errno, "baton run") : 0;
}

/* The document of a `baton run`. */
static int run_self(const struct args *a, const char *mode, const char *probe, json_t **doc,
                    struct baton_error *e)
{
    const struct audit_route_options *r = &a->options.route;
    const char *prefill = strcmp(mode, "native") ? r->prefill : r->decode;
    char n[16], *text = NULL;
    int from = -1, status = 0;
    size_t bytes = 0;
    pid_t pid = 0;
    snprintf(n, sizeof n, "%u", a->options.n);
    const char *const argv[] = {"baton",
                                "run",
                                "-m",
                                a->model,
                                "--ids",
                                "1,2,3,5,8,13,21,34,55,89,144,233",
                                "-n",
                                n,
                                "--ignore-eos",
                                "--json",
                                "--mode",
                                mode,
                                "--prefill",
                                prefill,
                                "--decode",
                                r->decode,
                                "--on-handoff-failure",
                                "local-prefill",
                                "-q",
                                NULL};
    int rc = spawn(argv, probe, &from, &pid, e);
    if (rc)
        return rc;
    rc = cli_read_all(from, 64 << 20, &text, &bytes, e);
    close(from);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        continue;
    if (rc == 0 && status)
        rc = base_fail(e, BATON_ERR_PEER, "baton run --mode %s%s%s ended with %d", mode,
                       probe ? " under " : "", probe ? probe : "", WEXITSTATUS(status));
    if (rc == 0)
        rc = base_json_parse(text, bytes, "baton run", doc, e);
    free(text);
    return rc;
}

static uint64_t handoff_number(const json_t *doc, const char *key)
{
    return (uint64_t)json_integer_value(json_object_get(json_object_get(doc, "handoff"), key));
}

static void count_kill(struct kills *k, const json_t *native, const json_t *doc)
{
    const json_t *want = json_object_get(native, "ids"), *have = json_object_get(doc, "ids");
    const char *verdict = json_string_value(
        json_object_get(json_object_get(doc, "handoff"), "verdict"));
    k->killed++;
    k->local += verdict && !strcmp(verdict, "local-prefill: peer");
    k->tokens += json_array_size(want);
    for (size_t i = 0; i < json_array_size(want); i++)
        k->equal += json_equal(json_array_get(want, i), json_array_get(have, i));
}

/* The pieces of a handoff that is left alone tell which one is a layer's first. */
static int run_kills(const struct args *a, struct kills *k, struct baton_error *e)
{
    const char *mode = cli_run_mode_names[a->options.route.mode];
    json_t *native = NULL, *whole = NULL, *doc = NULL;
    int rc = run_self(a, "native", NULL, &native, e);
    if (rc == 0)
        rc = run_self(a, mode, NULL, &whole, e);
    k->layers = handoff_number(whole, "layers");
    uint64_t pieces = handoff_number(whole, "pieces");
    for (uint64_t l = 0; l < k->layers && rc == 0; l++) {
        char probe[64];
        snprintf(probe, sizeof probe, "producer-piece@%llu=kill",
                 (unsigned long long)(1 + l * pieces / k->layers));
        doc = NULL;
        rc = run_self(a, mode, probe, &doc, e);
        if (rc == 0)
            count_kill(k, native, doc);
        json_decref(doc);
    }
    json_decref(native);
    json_decref(whole);
    return rc;
}

/* ---- report ------------------------------------------------------------------------------- */

static bool kills_hold(const struct kills *k)
{
    return k->layers && k->killed == k->layers && k->local == k->killed && k->equal == k->tokens;
}

static json_t *integer(uint64_t n)
{
    return json_integer((json_int_t)n);
}

static int print_document(const struct args *a, const struct audit_campaign *c,
                          const struct kills *k, int rc)
{
    const struct audit_route_options *r = &a->options.route;
    json_t *steps = json_array();
    for (int i = 1; i < 9; i++)
        json_array_append_new(steps, integer(c->steps[i]));
    json_t *kills = a->no_kills ? json_null()
                                : json_pack("{s:o,s:o,s:o,s:o,s:o}", "layers", integer(k->layers),
                                            "killed", integer(k->killed), "local_prefill",
                                            integer(k->local), "tokens", integer(k->tokens),
                                            "tokens_equal", integer(k->equal));
    json_t *victims = json_pack(
        "{s:o,s:o,s:o,s:o,s:o,s:o,s:o,s:o,s:o}", "cancelled", integer(c->victims), "survivors",
        integer(c->survivors), "survivor_tokens", integer(c->survivor_tokens),
        "survivor_tokens_equal", integer(c->survivor_equal), "replacements",
        integer(c->replacements), "replacement_tokens", integer(c->replacement_tokens),
        "replacement_tokens_equal", integer(c->replacement_equal), "lanes_reused",
        integer(c->reused), "steps_by_lanes", steps);
    return cli_print_json(
        json_pack("{s:i,s:s,s:{s:s,s:s,s:s,s:i,s:s,s:{s:b,s:b}},s:o,s:o,s:{s:o,s:o,s:o,s:o},s:s}",
                  "schema", 1, "model", a->model, "route", "mode", cli_run_mode_names[r->mode],
                  "prefill", r->prefill, "decode", r->decode, "lanes", (int)r->lanes, "path",
                  "engine", "emulated", "prefill", cli_emulated(r->prefill), "decode",
                  cli_emulated(r->decode), "victims", victims, "kills", kills, "cleanup",
                  "unclean_rounds", integer(c->unclean), "lanes", integer(c->left.lanes), "blocks",
                  integer(c->left.blocks), "tickets", integer(c->left.tickets), "verdict",
                  rc ? "fail" : "pass"),
        rc);
}

static int report(const struct args *a, const struct audit_campaign *c, const struct kills *k)
{
    const struct audit_route_options *r = &a->options.route;
    int rc = !audit_campaign_holds(c) || (!a->no_kills && !kills_hold(k));
    if (a->common.json)
        return print_document(a, c, k, rc);
    printf("%s: %s, prefill on %s%s, decode on %s%s, %u lanes\n", a->model,
           cli_run_mode_names[r->mode], r->prefill, cli_emulated(r->prefill) ? " (emulated)" : "",
           r->decode, cli_emulated(r->decode) ? " (emulated)" : "", r->lanes);
    printf("victims       %llu cancelled after a verified import, %llu of their lanes reused at "
           "once\n",
           (unsigned long long)c->victims, (unsigned long long)c->reused);
    printf("survivors     %llu, %llu of %llu tokens and logits as alone\n",
           (unsigned long long)c->survivors, (unsigned long long)c->survivor_equal,
           (unsigned long long)c->survivor_tokens);
    printf("replacements  %llu, %llu of %llu tokens and logits as alone\n",
           (unsigned long long)c->replacements, (unsigned long long)c->replacement_equal,
           (unsigned long long)c->replacement_tokens);
    if (!a->no_kills)
        printf("kills         %llu of %llu layers, %llu computed the prompt themselves, %llu of "
               "%llu tokens as native\n",
               (unsigned long long)k->killed, (unsigned long long)k->layers,
               (unsigned long long)k->local, (unsigned long long)k->equal,
               (unsigned long long)k->tokens);
    printf("left          %llu unclean rounds, %llu lanes, %llu blocks, %llu tickets\n%s\n",
           (unsigned long long)c->unclean, (unsigned long long)c->left.lanes,
           (unsigned long long)c->left.blocks, (unsigned long long)c->left.tickets,
           rc ? "fail" : "pass");
    return rc;
}

int cli_campaign(int argc, char **argv)
{
    static const struct cli_syntax syntax = {":m:n:hvq", help, long_options, take, false};
    struct args a = {
        .options = {.route = {.prefill = "cpu", .decode = "cpu", .mode = BATON_STREAM, .lanes = 4},
                    .rounds = 8,
                    .n = 24,
                    .seed = 1}};
    struct audit_campaign c;
    struct kills k = {0};
    struct baton_error e = {0};
    bool helped = false;
    int rc = cli_parse(argc, argv, &syntax, &a.common, &a, &helped, &e);
    if (helped)
        return 0;
    if (rc == 0 && !a.model)
        rc = base_fail(&e, BATON_ERR_USAGE, "no model: -m is missing");
    cli_set_verbosity(&a.common);
    if (rc == 0)
        rc = run_victims(&a, &c, &e);
    if (rc == 0 && !a.no_kills)
        rc = run_kills(&a, &k, &e);
    return rc ? cli_fail(&a.common, &e) : report(&a, &c, &k);
}
