/* SPDX-License-Identifier: Apache-2.0 */
/* baton model: what a checkpoint is, its hashes, its tokenizer. */
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "cli/model_priv.h"
#include "engine/engine.h"
#include "model/chat.h"
#include "model/model.h"
#include "model/tokenizer.h"

#define TEXT_LIMIT ((size_t)256 << 20)

static const char help[] =
    "usage: baton model info|hash|tokenize|detokenize|compile -m MODEL [OPTIONS]\n"
    "\n"
    "  info         family, sizes, layers, window, end tokens\n"
    "  hash         identity by parts, and the pin for --pin\n"
    "  tokenize     -p TEXT or stdin to ids [--chat: as one user turn] [--no-special]\n"
    "  detokenize   --ids 1,2,3 to text [--skip-special]\n"
    "  compile      a program of an emulated device into a file, without weights, that\n"
    "               artifact=FILE loads (docs/artifact.md):\n"
    "               --device npu:... --out FILE [--ctx N: positions; default 8192]\n"
    "\n"
    "  --threads N  threads for hashing;  --no-cache  hash again;  --json\n"
    "\n"
    "The pin is the SHA-256 of what `sha256sum` prints for config.json, tokenizer.json and the\n"
    "weight files, named without their folder, in C order.\n"
    "\n"
    "example\n"
    "  baton model hash -m models/gemma3-tiny --json\n"
    "  baton model compile -m models/qwen3-tiny --device npu:rngd,parts=1 --out rngd.npu\n";

/* ---- info --------------------------------------------------------------------------------- */

static const char *layer_kinds(const struct model_config *c, char *buf, size_t n)
{
    uint32_t local = 0;
    for (uint32_t i = 0; i < c->n_layers; i++)
        local += c->local[i];
    if (local)
        snprintf(buf, n, "%u layers: %u local (window %u), %u global", c->n_layers, local,
                 c->window, c->n_layers - local);
    else
        snprintf(buf, n, "%u layers, all global", c->n_layers);
    return buf;
}

static json_t *info_json(const struct model *m)
{
    const struct model_config *c = model_config_of(m);
    json_t *eos = json_array(), *local = json_array();
    for (uint32_t i = 0; i < c->n_eos; i++)
        json_array_append_new(eos, json_integer(c->eos[i]));
    for (uint32_t i = 0; i < c->n_layers; i++)
        if (c->local[i])
            json_array_append_new(local, json_integer(i));
    return json_pack("{s:i,s:s,s:s,s:I,s:I,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:b,s:b,s:i,s:o,s:o}",
                     "schema", 1, "path", model_path(m), "arch", c->arch, "parameters",
                     (json_int_t)model_n_params(m), "weights_bytes",
                     (json_int_t)model_weight_bytes(m), "layers", (int)c->n_layers, "hidden",
                     (int)c->hidden, "inner", (int)c->inner, "q_heads", (int)c->q_heads, "kv_heads",
                     (int)c->kv_heads, "head_dim", (int)c->head_dim, "vocab", (int)c->vocab,
                     "max_positions", (int)c->max_positions, "tied", c->tied, "attention_bias",
                     c->attn_bias, "window", (int)c->window, "local_layers", local, "eos", eos);
}

static int info(const struct model_args *a, struct baton_error *e)
{
    struct model *m = NULL;
    int rc = model_open(a->model, &m, e);
    if (rc)
        return rc;
    const struct model_config *c = model_config_of(m);
    char kinds[96], bytes[16];
    if (a->common.json)
        rc = cli_print_json(info_json(m), 0);
    else
        printf("%s  %s\n%.2f M parameters, %s of weights\n%s\nhidden %u, inner %u, heads %u / %u x "
               "%u, vocabulary %u%s, positions %u\n",
               c->arch, model_path(m), (double)model_n_params(m) / 1e6,
               cli_bytes(model_weight_bytes(m), bytes), layer_kinds(c, kinds, sizeof kinds),
               c->hidden, c->inner, c->q_heads, c->kv_heads, c->head_dim, c->vocab,
               c->tied ? " (tied)" : "", c->max_positions);
    model_close(m);
    return rc;
}

/* ---- hash --------------------------------------------------------------------------------- */

static void draw(void *ctx, uint64_t done, uint64_t all)
{
    cli_progress_draw(ctx, "hashing", done, all);
}

static int hash(const struct model_args *a, struct baton_error *e)
{
    struct model *m = NULL;
    struct model_identity id;
    struct cli_progress progress;
    cli_progress_init(&progress, &a->common);
    int rc = model_open(a->model, &m, e);
    if (!rc)
        rc = model_hash(m, a->threads, a->no_cache, draw, &progress, &id, e);
    cli_progress_end(&progress);
    if (!rc) {
        char arch[65], weights[65], numerics[65], tokenizer[65], pin[65];
        uint8_t meaning[32];
        engine_numerics(model_config_of(m), meaning);
        base_hex(meaning, 32, numerics);
        base_hex(id.arch, 32, arch);
        base_hex(id.weights, 32, weights);
        base_hex(id.tokenizer, 32, tokenizer);
        base_hex(id.pin, 32, pin);
        if (a->common.json)
            rc = cli_print_json(json_pack("{s:i,s:s,s:s,s:s,s:s,s:s,s:s}", "schema", 1, "path",
                                          model_path(m), "arch", arch, "weights", weights,
                                          "numerics", numerics, "tokenizer", tokenizer, "pin", pin),
                                0);
        else
            printf("arch       %s\nweights    %s\nnumerics   %s\ntokenizer  %s\npin        "
                   "sha256:%s\n",
                   arch, weights, numerics, tokenizer, pin);
    }
    model_close(m);
    return rc;
}

/* ---- tokenize, detokenize ----------------------------------------------------------------- */

static int read_text(const struct model_args *a, char **text, size_t *n, struct baton_error *e)
{
    if (!a->text)
        return cli_read_all(STDIN_FILENO, TEXT_LIMIT, text, n, e);
    *n = strlen(a->text);
    *text = base_try_strdup(a->text, e);
    return *text ? 0 : BATON_ERR_NOMEM;
}

/* Wrap *text as one user turn in the folder's chat format. */
static int wrap_chat(const char *dir, char **text, size_t *n, struct baton_error *e)
{
    struct model_chat *chat = NULL;
    struct model_message turn = {"user", *text};
    char *rendered = NULL;
    int rc = model_chat_open(dir, &chat, e);
    if (!rc)
        rc = model_chat_render(chat, &turn, 1, true, true, &rendered, e);
    if (!rc) {
        free(*text);
        *text = rendered;
        *n = strlen(rendered);
    }
    model_chat_close(chat);
    return rc;
}

static int print_ids(const struct model_args *a, const int32_t *ids, size_t n)
{
    if (a->common.json) {
        json_t *list = json_array();
        for (size_t i = 0; i < n; i++)
            json_array_append_new(list, json_integer(ids[i]));
        return cli_print_json(json_pack("{s:i,s:o,s:i}", "schema", 1, "ids", list, "count", (int)n),
                              0);
    }
    for (size_t i = 0; i < n; i++)
        printf("%s%d", i ? "," : "", ids[i]);
    putchar('\n');
    return 0;
}

static int tokenize(const struct model_args *a, struct baton_error *e)
{
    struct model_tokenizer *t = NULL;
    char *text = NULL;
    int32_t *ids = NULL;
    size_t n = 0, n_ids = 0;
    int rc = model_tokenizer_open(a->model, &t, e);
    if (!rc)
        rc = read_text(a, &text, &n, e);
    if (!rc && a->chat)
        rc = wrap_chat(a->model, &text, &n, e);
    if (!rc)
        rc = model_tokenizer_encode(t, text, n, !a->chat && !a->no_special, &ids, &n_ids, e);
    if (!rc)
        rc = print_ids(a, ids, n_ids);
    free(ids);
    free(text);
    model_tokenizer_close(t);
    return rc;
}

/* How many ids the folder's model has: padding rows of the embedding count too. A folder with a
 * tokenizer alone has the tokenizer's. */
static int read_vocab(const char *dir, const struct model_tokenizer *t, uint32_t *vocab,
                      struct baton_error *e)
{
    struct model_config c;
    char *path = base_path_join(dir, "config.json", e);
    if (!path)
        return BATON_ERR_NOMEM;
    bool alone = access(path, F_OK) != 0;
    free(path);
    int rc = alone ? 0 : model_config_read(dir, &c, e);
    if (!rc)
        *vocab = alone ? model_tokenizer_size(t) : c.vocab;
    return rc;
}

static int detokenize(const struct model_args *a, struct baton_error *e)
{
    struct model_tokenizer *t = NULL;
    char *text = NULL;
    int32_t *ids = NULL;
    size_t n = 0, n_ids = 0;
    uint32_t vocab = 0;
    if (!a->ids_text)
        return base_fail(e, BATON_ERR_USAGE, "detokenize needs --ids 1,2,3");
    int rc = cli_parse_ids("--ids", a->ids_text, &ids, &n_ids, e);
    if (!rc)
        rc = model_tokenizer_open(a->model, &t, e);
    if (!rc)
        rc = read_vocab(a->model, t, &vocab, e);
    if (!rc)
        rc = model_ids_check(ids, n_ids, vocab, e);
    if (!rc)
        rc = model_tokenizer_decode(t, ids, n_ids, a->skip_special, &text, &n, e);
    if (!rc && a->common.json)
        rc = cli_print_json(json_pack("{s:i,s:s}", "schema", 1, "text", text), 0);
    else if (!rc) {
        fwrite(text, 1, n, stdout);
        putchar('\n');
    }
    free(text);
    free(ids);
    model_tokenizer_close(t);
    return rc;
}

/* ---- the command -------------------------------------------------------------------------- */

static int parse_option(void *args, int opt, const char *v, struct baton_error *e)
{
    struct model_args *a = args;
    switch (opt) {
    case 'm':
        a->model = v;
        return 0;
    case 'p':
        a->text = v;
        return 0;
    case 'i':
        a->ids_text = v;
        return 0;
    case 't':
        return cli_parse_u32("--threads", v, 1, 1024, &a->threads, e);
    case 'c':
        a->chat = true;
        return 0;
    case 'N':
        a->no_special = true;
        return 0;
    case 'S':
        a->skip_special = true;
        return 0;
    case 'D':
        a->device = v;
        return 0;
    case 'O':
        a->out = v;
        return 0;
    case 'X':
        return cli_parse_u32("--ctx", v, 1, 1u << 24, &a->ctx, e);
    default:
        a->no_cache = true; /* 'C', the last one */
        return 0;
    }
}

static int parse(int argc, char **argv, struct model_args *a, bool *done, struct baton_error *e)
{
    static const struct option options[] = {
        {"model", required_argument, NULL, 'm'}, {"prompt", required_argument, NULL, 'p'},
        {"ids", required_argument, NULL, 'i'},   {"threads", required_argument, NULL, 't'},
        {"chat", no_argument, NULL, 'c'},        {"device", required_argument, NULL, 'D'},
        {"out", required_argument, NULL, 'O'},   {"ctx", required_argument, NULL, 'X'},
        {"no-special", no_argument, NULL, 'N'},  {"skip-special", no_argument, NULL, 'S'},
        {"no-cache", no_argument, NULL, 'C'},    {"json", no_argument, NULL, 'j'},
        {"help", no_argument, NULL, 'h'},        {NULL, 0, NULL, 0}};
    static const struct cli_syntax syntax = {":m:p:vqh", help, options, parse_option, true};
    int rc = cli_parse(argc, argv, &syntax, &a->common, a, done, e);
    if (rc || *done)
        return rc;
    if (optind < argc)
        a->verb = argv[optind++];
    if (optind < argc && !a->model)
        a->model = argv[optind++];
    if (optind < argc)
        return base_fail(e, BATON_ERR_USAGE, "unexpected argument '%.80s'", argv[optind]);
    return 0;
}

int cli_model(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(const struct model_args *a, struct baton_error *e);
    } verbs[] = {{"info", info},
                 {"hash", hash},
                 {"tokenize", tokenize},
                 {"detokenize", detokenize},
                 {"compile", cli_model_compile}};
    struct model_args a = {0};
    struct baton_error e = {0};
    bool done = false;
    int rc = parse(argc, argv, &a, &done, &e);
    if (rc)
        a.common.json = cli_wants_json(argc, argv);
    if (done)
        return 0;
    cli_set_verbosity(&a.common);
    if (!rc && !a.verb)
        rc = base_fail(&e, BATON_ERR_USAGE, "model needs a verb; see `baton model --help`");
    if (!rc && !strcmp(a.verb, "convert"))
        rc = base_fail(&e, BATON_ERR_UNSUPPORTED, "model convert is not built yet");
    if (!rc && !a.model)
        rc = base_fail(&e, BATON_ERR_USAGE, "model %.20s needs -m MODEL", a.verb);
    for (size_t i = 0; !rc && i < sizeof verbs / sizeof *verbs; i++)
        if (!strcmp(a.verb, verbs[i].name)) {
            rc = verbs[i].run(&a, &e);
            if (rc == BATON_ERR_IO)
                e.code = BATON_ERR_INPUT; /* a file that the user named and that can't be read */
            return rc < 0 ? cli_fail(&a.common, &e) : rc;
        }
    if (!rc)
        base_fail(&e, BATON_ERR_USAGE, "model has no verb '%.20s'; see `baton model --help`",
                  a.verb);
    return cli_fail(&a.common, &e);
}
