/* SPDX-License-Identifier: Apache-2.0 */
/* baton run: arguments, and what of CONTRACTS is not built yet. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/base.h"
#include "cli/run_priv.h"

const char *const cli_run_mode_names[] = {"native", "whole", "stream", NULL};
const char *const cli_run_transport_names[] = {"inproc", "tcp", "shm", "ucx", NULL};

static const char help[] =
    "usage: baton run -m MODEL [PROMPT] [OPTIONS]\n"
    "\n"
    "Answers one prompt. By default one process prefills and another one decodes from the KV\n"
    "cache that it was handed; the handoff is verified.\n"
    "\n"
    "prompt (default: a chat turn with stdin's text)\n"
    "  -p TEXT               continue TEXT as it is\n"
    "  --chat TEXT           TEXT as one user turn in the model's chat format\n"
    "  --prompt-file FILE    the same with FILE's text\n"
    "  --ids 1,2,3           token ids\n"
    "model and route\n"
    "  -m MODEL              Hugging Face folder, or shape:NAME[:SEED] (random weights)\n"
    "  --pin sha256:HEX      refuse other files than these (see `baton model hash`)\n"
    "  --prefill DEV, --decode DEV   cpu (default), cpu:ref; `baton devices` lists them\n"
    "  --mode native|whole|stream    one process / KV after the prefill / KV layer by layer\n"
    "                        (default whole)\n"
    "  --transport inproc|tcp|shm    one process / TCP on loopback / shared memory (default shm)\n"
    "                        or remote:HOST:PORT, where another program has that role\n"
    "                        (docs/bring-up.md); the tokens of a remote decode come out there\n"
    "  --kv-key-file F       the secret that both ends of a remote route have\n"
    "  --digest on|off       slot digests (default on)\n"
    "  --on-handoff-failure fail|local-prefill   where the KV does not arrive whole: an error\n"
    "                        (default), or the decode side computes the prompt itself\n"
    "  --ctx N               positions to keep room for (default: what the request needs)\n"
    "  --probe pairing|always|never   probe emulated and plugin devices when they first meet this\n"
    "                        model (default), each time, or not; one that fails is not used\n"
    "  --threads N           compute threads a process (default: one a core)\n"
    "  --cpus LIST           run on these CPUs only, e.g. 0,2-3\n"
    "generation (default: greedy)\n"
    "  -n N                  most tokens to generate (default 256)\n"
    "  --temp T --top-k K --top-p P --min-p P --seed S\n"
    "  --ignore-eos          go on past end tokens\n"
    "  --force IDS           teacher forcing: feed these tokens whatever would be chosen\n"
    "  --logits FILE         save every step's logits (safetensors)\n"
    "  --kv-save FILE        save the KV cache as the decode side holds it before its first step\n"
    "  --kv-load FILE        start from a saved KV cache of the prompt's first tokens\n"
    "output\n"
    "  --trace FILE          what both processes did when, for ui.perfetto.dev (docs/trace.md)\n"
    "  --json                one JSON document on stdout\n"
    "  -v, -q                more, or fewer, messages\n"
    "\n"
    "example\n"
    "  baton run -m models/gemma3-tiny --chat 'What is the capital of France?' --mode stream\n";

/* Long options without a letter start here. */
enum {
    OPT_CHAT = 256,
    OPT_PROMPT_FILE,
    OPT_IDS,
    OPT_PREFILL,
    OPT_DECODE,
    OPT_MODE,
    OPT_TRANSPORT,
    OPT_WEIGHTS,
    OPT_CTX,
    OPT_TEMP,
    OPT_TOP_K,
    OPT_TOP_P,
    OPT_MIN_P,
    OPT_SEED,
    OPT_IGNORE_EOS,
    OPT_PIN,
    OPT_THREADS,
    OPT_CPUS,
    OPT_FORCE,
    OPT_LOGITS,
    OPT_KV_SAVE,
    OPT_KV_LOAD,
    OPT_DIGEST,
    OPT_ON_FAILURE,
    OPT_ALLOW_WEIGHTS,
    OPT_TRACE,
    OPT_KEY_FILE,
    OPT_PROBE,
};

static const struct option options[] = {
    {"model", required_argument, NULL, 'm'},
    {"prompt", required_argument, NULL, 'p'},
    {"chat", required_argument, NULL, OPT_CHAT},
    {"prompt-file", required_argument, NULL, OPT_PROMPT_FILE},
    {"ids", required_argument, NULL, OPT_IDS},
    {"prefill", required_argument, NULL, OPT_PREFILL},
    {"decode", required_argument, NULL, OPT_DECODE},
    {"mode", required_argument, NULL, OPT_MODE},
    {"transport", required_argument, NULL, OPT_TRANSPORT},
    {"weights", required_argument, NULL, OPT_WEIGHTS},
    {"ctx", required_argument, NULL, OPT_CTX},
    {"temp", required_argument, NULL, OPT_TEMP},
    {"top-k", required_argument, NULL, OPT_TOP_K},
    {"top-p", required_argument, NULL, OPT_TOP_P},
    {"min-p", required_argument, NULL, OPT_MIN_P},
    {"seed", required_argument, NULL, OPT_SEED},
    {"ignore-eos", no_argument, NULL, OPT_IGNORE_EOS},
    {"pin", required_argument, NULL, OPT_PIN},
    {"threads", required_argument, NULL, OPT_THREADS},
    {"cpus", required_argument, NULL, OPT_CPUS},
    {"force", required_argument, NULL, OPT_FORCE},
    {"logits", required_argument, NULL, OPT_LOGITS},
    {"kv-save", required_argument, NULL, OPT_KV_SAVE},
    {"kv-load", required_argument, NULL, OPT_KV_LOAD},
    {"digest", required_argument, NULL, OPT_DIGEST},
    {"on-handoff-failure", required_argument, NULL, OPT_ON_FAILURE},
    {"allow-weights-mismatch", no_argument, NULL, OPT_ALLOW_WEIGHTS},
    {"trace", required_argument, NULL, OPT_TRACE},
    {"kv-key-file", required_argument, NULL, OPT_KEY_FILE},
    {"probe", required_argument, NULL, OPT_PROBE},
    {"json", no_argument, NULL, 'j'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

static int parse_weights(const char *value, struct baton_error *e)
{
    static const char *const words[] = {"bf16", "f32", "q8", "q4", NULL};
    int word = 0;
    int rc = cli_parse_word("--weights", value, words, &word, e);
    if (!rc && word != 0)
        rc = base_fail(e, BATON_ERR_UNSUPPORTED,
                       "--weights %s is not built yet: the device computes from the checkpoint's "
                       "own precision (cpu: bf16, cpu:ref: f32)",
                       value);
    return rc;
}

static int parse_digest(const char *value, struct run_args *a, struct baton_error *e)
{
    static const char *const words[] = {"on", "off", NULL};
    int word = 0;
    int rc = cli_parse_word("--digest", value, words, &word, e);
    a->no_digest = word == 1;
    return rc;
}

static int parse_policy(const char *value, struct run_args *a, struct baton_error *e)
{
    static const char *const words[] = {"fail", "local-prefill", NULL};
    int word = 0;
    int rc = cli_parse_word("--on-handoff-failure", value, words, &word, e);
    a->local_prefill = word == 1;
    return rc;
}

/* Options that choose what is generated. Returns 1 where `opt` is none of them. */
static int parse_generation(int opt, const char *v, struct run_args *a, struct baton_error *e)
{
    switch (opt) {
    case 'n':
        return cli_parse_u32("-n", v, 1, 1u << 20, &a->n, e);
    case OPT_TEMP:
        return cli_parse_f32("--temp", v, 0, 100, &a->temperature, e);
    case OPT_TOP_K:
        return cli_parse_u32("--top-k", v, 0, INT32_MAX, &a->top_k, e);
    case OPT_TOP_P:
        return cli_parse_f32("--top-p", v, 0, 1, &a->top_p, e);
    case OPT_MIN_P:
        return cli_parse_f32("--min-p", v, 0, 1, &a->min_p, e);
    case OPT_SEED:
        return cli_parse_u64("--seed", v, &a->seed, e);
    case OPT_IGNORE_EOS:
        a->ignore_eos = true;
        return 0;
    case OPT_FORCE:
        free(a->force);
        a->force = NULL;
        return cli_parse_ids("--force", v, &a->force, &a->n_force, e);
    case OPT_LOGITS:
        a->logits = v;
        return 0;
    case OPT_KV_SAVE:
        a->kv_save = v;
        return 0;
    case OPT_KV_LOAD:
        a->kv_load = v;
        return 0;
    default:
        return 1;
    }
}

/* Options that choose model, prompt and route. Returns 1 where `opt` is none of them. */
static int parse_route(int opt, const char *v, struct run_args *a, struct baton_error *e)
{
    switch (opt) {
    case 'm':
        a->model = v;
        return 0;
    case 'p':
        a->text = v;
        return 0;
    case OPT_CHAT:
        a->chat = v;
        return 0;
    case OPT_PROMPT_FILE:
        a->prompt_file = v;
        return 0;
    case OPT_IDS:
        a->ids_text = v;
        return 0;
    case OPT_PREFILL:
        a->prefill = v;
        return 0;
    case OPT_DECODE:
        a->decode = v;
        return 0;
    case OPT_MODE:
        return cli_parse_word("--mode", v, cli_run_mode_names, &a->mode, e);
    case OPT_TRANSPORT:
        return cli_parse_word("--transport", v, cli_run_transport_names, &a->transport, e);
    case OPT_WEIGHTS:
        return parse_weights(v, e);
    case OPT_CTX:
        return cli_parse_u32("--ctx", v, 1, 1u << 24, &a->ctx, e);
    case OPT_PIN:
        a->pin = v;
        return 0;
    case OPT_THREADS:
        return cli_parse_u32("--threads", v, 1, 1024, &a->threads, e);
    case OPT_CPUS:
        a->cpus = v;
        return 0;
    case OPT_DIGEST:
        return parse_digest(v, a, e);
    default:
        return 1;
    }
}

static int parse_option(void *args, int opt, const char *v, struct baton_error *e)
{
    struct run_args *a = args;
    int rc = parse_route(opt, v, a, e);
    if (rc == 1)
        rc = parse_generation(opt, v, a, e);
    if (rc != 1)
        return rc;
    switch (opt) {
    case OPT_ON_FAILURE:
        return parse_policy(v, a, e);
    case OPT_ALLOW_WEIGHTS:
        return base_fail(e, BATON_ERR_UNSUPPORTED, "--allow-weights-mismatch is not built yet");
    case OPT_TRACE:
        a->trace = v;
        return 0;
    case OPT_KEY_FILE:
        a->key_file = v;
        return 0;
    case OPT_PROBE:
        return cli_probe_policy(v, &a->probe, e);
    default:
        return base_fail(e, BATON_ERR_USAGE, "unknown option; see `baton run --help`");
    }
}

/* Two results in one file: the one written last would replace the other. A device such as /dev/null
 * takes both. */
static int check_outputs(const struct run_args *a, struct baton_error *e)
{
    const struct {
        const char *option, *path;
    } out[] = {{"--logits", a->logits}, {"--kv-save", a->kv_save}, {"--trace", a->trace}};
    struct stat st;
    for (size_t i = 0; i < sizeof out / sizeof *out; i++) {
        if (!out[i].path)
            continue;
        if (!*out[i].path)
            return base_fail(e, BATON_ERR_USAGE, "%s needs the name of a file", out[i].option);
        int rc = base_file_try(out[i].path, e);
        if (rc)
            return rc;
        if (stat(out[i].path, &st) == 0 && !S_ISREG(st.st_mode))
            continue;
        for (size_t j = 0; j < i; j++)
            if (out[j].path && !strcmp(out[i].path, out[j].path))
                return base_fail(e, BATON_ERR_USAGE, "%s and %s name the same file", out[j].option,
                                 out[i].option);
    }
    return 0;
}

static int check(const struct run_args *a, struct baton_error *e)
{
    if (!a->model)
        return base_fail(e, BATON_ERR_USAGE, "run needs -m MODEL; see `baton run --help`");
    int prompts = !!a->text + !!a->chat + !!a->prompt_file + !!a->ids_text;
    if (prompts > 1)
        return base_fail(e, BATON_ERR_USAGE, "give one of -p, --chat, --prompt-file and --ids");
    if (a->mode != BATON_NATIVE && a->transport > RUN_SHM)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "--transport %s is not built yet",
                         cli_run_transport_names[a->transport]);
    if (a->mode == BATON_NATIVE && strcmp(a->prefill, a->decode))
        return base_fail(e, BATON_ERR_USAGE,
                         "mode native runs on one device, not on --prefill %.40s and --decode "
                         "%.40s",
                         a->prefill, a->decode);
    int rc = cli_run_remote_check(a, e);
    return rc ? rc : check_outputs(a, e);
}

static int parse(int argc, char **argv, struct run_args *a, bool *done, struct baton_error *e)
{
    static const struct cli_syntax syntax = {":m:p:n:vqh", help, options, parse_option, false};
    int rc = cli_parse(argc, argv, &syntax, &a->common, a, done, e);
    if (rc || *done)
        return rc;
    /* One device named: native means that one for both phases. */
    if (a->mode == BATON_NATIVE && (!a->prefill || !a->decode))
        a->prefill = a->decode = a->decode ? a->decode : a->prefill;
    if (!a->prefill)
        a->prefill = "cpu";
    if (!a->decode)
        a->decode = "cpu";
    if (cli_run_remote(a->prefill) || cli_run_remote(a->decode))
        a->transport = RUN_TCP;
    return check(a, e);
}

int cli_run(int argc, char **argv)
{
    struct run_args a = {.mode = BATON_WHOLE, .transport = RUN_SHM};
    struct run_result r = {0};
    struct baton_model *model = NULL;
    struct baton_error e = {0};
    bool done = false;
    int rc = parse(argc, argv, &a, &done, &e);
    if (!rc && !done) {
        cli_set_verbosity(&a.common);
        rc = a.cpus ? cli_set_cpus(a.cpus, &e) : 0;
        if (!rc)
            rc = cli_run_execute(&a, &model, &r, &e);
        if (!rc && a.logits)
            rc = cli_run_logits_save(a.logits, &r, baton_model_vocab(model), &e);
    }
    if (rc)
        rc = cli_fail(&a.common, &e);
    else if (!done && a.common.json)
        rc = cli_run_report_json(&a, model, &r);
    else if (!done)
        cli_run_report_text(&a, model, &r);
    if (!rc && r.stats.finish == BATON_CANCELLED)
        rc = 130;
    cli_run_result_free(&r);
    baton_model_close(model);
    free(a.force);
    return rc;
}
