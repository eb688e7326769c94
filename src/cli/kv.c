/* SPDX-License-Identifier: Apache-2.0 */
/* baton kv: KV caches as files. */
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "cli/kv_priv.h"
#include "cli/run_priv.h"

static const char help[] =
    "usage: baton kv export -m MODEL (-p TEXT | --chat TEXT | --ids 1,2,3) FILE\n"
    "       baton kv import -m MODEL FILE [-n N] [--force IDS]\n"
    "       baton kv inspect FILE\n"
    "       baton kv diff A B [--limit X]\n"
    "\n"
    "KV caches as safetensors files (docs/kv-file.md), for Python and other software.\n"
    "\n"
    "  export     prefill the prompt and save its cache, its ids and the logits after it\n"
    "  import     check that a file is of this model and continue from it\n"
    "  inspect    what a file holds: identity, layers, positions\n"
    "  diff       slot by slot: bits, relative RMS, positions; exit 1 where they differ\n"
    "\n"
    "  --device DEV   cpu (default), cpu:ref; `baton devices` lists them\n"
    "  -n N           import: tokens to continue by (default 16; past end tokens, greedy)\n"
    "  --force IDS    import: feed these tokens whatever would be chosen\n"
    "  --limit X      diff: slots up to this relative RMS count as equal (default: bits)\n"
    "  --threads N, --json, -v, -q\n"
    "\n"
    "example\n"
    "  baton kv export -m models/gemma3-tiny --chat 'What is the capital of France?' "
    "a.safetensors\n"
    "  baton kv import -m models/gemma3-tiny a.safetensors\n"
    "  baton run -m models/gemma3-tiny --chat 'What is the capital of France?' --kv-load "
    "a.safetensors\n";

#define DEFAULT_TOKENS 16u

/* ---- export, import: runs on one device --------------------------------------------------- */

static struct run_args run_args(const struct cli_kv_args *a)
{
    return (struct run_args){
        .common = a->common,
        .model = a->model,
        .prefill = a->device,
        .decode = a->device,
        .mode = BATON_NATIVE,
        .threads = a->threads,
        .ignore_eos = true,
    };
}

static int export(const struct cli_kv_args *a, struct baton_error *e)
{
    struct run_args r = run_args(a);
    struct run_result result = {0};
    struct baton_model *model = NULL;
    if (!!a->text + !!a->chat + !!a->ids_text != 1)
        return base_fail(e, BATON_ERR_USAGE, "kv export needs one of -p, --chat and --ids");
    int rc = base_file_try(a->files[0], e);
    if (rc)
        return rc;
    r.common.json = true; /* the token after it is nobody's answer: not printed */
    r.text = a->text;
    r.chat = a->chat;
    r.ids_text = a->ids_text;
    r.n = 1;
    r.kv_save = a->files[0];
    rc = cli_run_execute(&r, &model, &result, e);
    cli_run_result_free(&result);
    baton_model_close(model);
    return rc ? rc : cli_kv_inspect(a, e);
}

static json_t *ids_json(const int32_t *ids, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++)
        json_array_append_new(list, json_integer(ids[i]));
    return list;
}

static int report_import(const struct cli_kv_args *a, const struct run_result *r)
{
    if (a->common.json)
        return cli_print_json(
            json_pack("{s:i,s:s,s:i,s:o,s:o,s:s}", "schema", 1, "file", a->files[0],
                      "loaded_tokens", (int)r->n_loaded, "ids", ids_json(r->ids, r->n_ids),
                      "argmax", ids_json(r->argmax, r->n_ids), "text", r->text ? r->text : ""),
            0);
    if (a->common.verbosity >= 0)
        fprintf(stderr, "%s: %u positions loaded, %zu tokens from there\n", a->files[0],
                r->n_loaded, r->n_ids);
    return 0;
}

static int import(const struct cli_kv_args *a, struct baton_error *e)
{
    struct run_args r = run_args(a);
    struct run_result result = {0};
    struct baton_model *model = NULL;
    struct kv_file *f = NULL;
    int rc = kv_file_open(a->files[0], &f, e);
    if (rc)
        return rc;
    const struct kv_tokens *t = &kv_file_info(f)->tokens;
    if (t->ids) {
        r.ids = t->ids;
        r.n_ids = t->n_ids;
        r.n = a->n_force ? 0 : a->n;
        r.force = a->force;
        r.n_force = a->n_force;
        r.kv_load = a->files[0];
        rc = cli_run_execute(&r, &model, &result, e);
    } else {
        rc = base_fail(e, BATON_ERR_INPUT, "%s: holds no ids: give them to `baton run --kv-load`",
                       a->files[0]);
    }
    if (rc == 0)
        rc = report_import(a, &result);
    cli_run_result_free(&result);
    baton_model_close(model);
    kv_file_close(f);
    return rc;
}

/* ---- the command -------------------------------------------------------------------------- */

static int parse_option(void *args, int opt, const char *v, struct baton_error *e)
{
    struct cli_kv_args *a = args;
    switch (opt) {
    case 'm':
        a->model = v;
        return 0;
    case 'p':
        a->text = v;
        return 0;
    case 'c':
        a->chat = v;
        return 0;
    case 'i':
        a->ids_text = v;
        return 0;
    case 'd':
        a->device = v;
        return 0;
    case 'n':
        return cli_parse_u32("-n", v, 1, 1u << 20, &a->n, e);
    case 't':
        return cli_parse_u32("--threads", v, 1, 1024, &a->threads, e);
    case 'l':
        return cli_parse_f32("--limit", v, 0, 1e6f, &a->limit, e);
    case 'f':
        free(a->force);
        a->force = NULL;
        return cli_parse_ids("--force", v, &a->force, &a->n_force, e);
    default:
        return base_fail(e, BATON_ERR_USAGE, "unknown option; see `baton kv --help`");
    }
}

static int parse(int argc, char **argv, struct cli_kv_args *a, bool *done, struct baton_error *e)
{
    static const struct option options[] = {{"model", required_argument, NULL, 'm'},
                                            {"prompt", required_argument, NULL, 'p'},
                                            {"chat", required_argument, NULL, 'c'},
                                            {"ids", required_argument, NULL, 'i'},
                                            {"device", required_argument, NULL, 'd'},
                                            {"threads", required_argument, NULL, 't'},
                                            {"limit", required_argument, NULL, 'l'},
                                            {"force", required_argument, NULL, 'f'},
                                            {"json", no_argument, NULL, 'j'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    static const struct cli_syntax syntax = {":m:p:n:vqh", help, options, parse_option, true};
    return cli_parse(argc, argv, &syntax, &a->common, a, done, e);
}

struct verb {
    const char *name;
    int (*run)(const struct cli_kv_args *a, struct baton_error *e);
    int n_files;
    bool model;
};

static const struct verb *find_verb(const char *name)
{
    static const struct verb verbs[] = {{"export", export, 1, true},
                                        {"import", import, 1, true},
                                        {"inspect", cli_kv_inspect, 1, false},
                                        {"diff", cli_kv_diff, 2, false}};
    for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++)
        if (!strcmp(verbs[i].name, name))
            return &verbs[i];
    return NULL;
}

/* What follows the options: the verb and its files. */
static int take_words(int argc, char **argv, struct cli_kv_args *a, const struct verb **verb,
                      struct baton_error *e)
{
    if (optind == argc)
        return base_fail(e, BATON_ERR_USAGE, "kv needs a verb; see `baton kv --help`");
    *verb = find_verb(argv[optind]);
    if (!*verb)
        return base_fail(e, BATON_ERR_USAGE, "kv has no verb '%.20s'; see `baton kv --help`",
                         argv[optind]);
    a->n_files = argc - optind - 1;
    if (a->n_files != (*verb)->n_files)
        return base_fail(e, BATON_ERR_USAGE, "kv %s takes %d file%s, not %d", (*verb)->name,
                         (*verb)->n_files, (*verb)->n_files > 1 ? "s" : "", a->n_files);
    for (int i = 0; i < a->n_files; i++)
        a->files[i] = argv[optind + 1 + i];
    if ((*verb)->model && !a->model)
        return base_fail(e, BATON_ERR_USAGE, "kv %s needs -m MODEL", (*verb)->name);
    return 0;
}

int cli_kv(int argc, char **argv)
{
    struct cli_kv_args a = {.device = "cpu", .n = DEFAULT_TOKENS};
    struct baton_error e = {0};
    const struct verb *verb = NULL;
    bool done = false, saving = false;
    int rc = parse(argc, argv, &a, &done, &e);
    if (!rc && !done)
        rc = take_words(argc, argv, &a, &verb, &e);
    if (!rc && !done) {
        cli_set_verbosity(&a.common);
        saving = verb->run == export;
        rc = verb->run(&a, &e);
    }
    if (rc == BATON_ERR_IO && !saving)
        e.code = BATON_ERR_INPUT; /* a file that the user named and that can't be read */
    free(a.force);
    return rc < 0 ? cli_fail(&a.common, &e) : rc;
}
