/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer.json to a tokenizer, part 1: vocabulary, merges, added tokens.
 *
 * The file is a stranger's. Every id, count and length is bounded before it sizes anything, every
 * part of a kind that is not built here is refused by name, and what the vocabulary does not hold
 * may not be referred to. Part 2 (tokenizer_parts.c) reads the pipeline.
 */
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/base.h"
#include "model/tokenizer_load_priv.h"

/* ---- vocabulary ------------------------------------------------------------------------------ */

struct census {
    uint32_t n_ids;    /* one past the largest */
    size_t n_tokens;   /* added ones included, some of them twice */
    size_t text_bytes; /* likewise */
};

static int bad_id(struct model_load *l, const char *s, size_t n)
{
    return base_fail(l->e, BATON_ERR_INPUT, "%s: the id of token \"%s\" is no integer in [0, %d)",
                     l->what, model_quote(s, n).text, MODEL_TOK_IDS_MAX);
}

static void count_token(struct census *c, size_t n, uint32_t id)
{
    if (id >= c->n_ids)
        c->n_ids = id + 1;
    c->n_tokens++;
    c->text_bytes += n; /* at most the file's size */
}

/* One pass over the vocabulary: counts where c is given, adds where it is not. */
static int walk_vocab(struct model_load *l, struct census *c)
{
    struct model_cursor at = {l->vocab.from, l->vocab.from, l->vocab.to, l->what, l->e};
    struct model_text token = {0};
    bool first = true;
    int rc = model_cursor_expect(&at, '{');
    while (rc == 0 && (rc = model_cursor_next(&at, '}', &first)) > 0) {
        uint32_t id;
        token.n = 0;
        rc = model_cursor_string(&at, &token);
        if (rc == 0)
            rc = model_cursor_expect(&at, ':');
        if (rc)
            break;
        if (!model_cursor_u32(&at, &id) || id >= MODEL_TOK_IDS_MAX)
            rc = bad_id(l, token.data, token.n);
        else if (c)
            count_token(c, token.n, id);
        else
            rc = model_vocab_add(&l->t->vocab, token.n ? token.data : "", token.n, id,
                                 MODEL_TOKEN_MODEL, l->what, l->e);
    }
    free(token.data);
    return rc;
}

static int count_added(struct model_load *l, const json_t *added, struct census *c)
{
    const json_t *a;
    size_t i;
    json_array_foreach(added, i, a)
    {
        const char *content = NULL;
        const json_t *id = json_object_get(a, "id");
        int rc = base_json_str(a, "content", true, &content, l->what, l->e);
        if (rc)
            return rc;
        size_t n = strlen(content);
        if (n == 0 || n > MODEL_TOK_ADDED_MAX)
            return base_fail(l->e, BATON_ERR_INPUT,
                             "%s: added token %zu has %zu bytes, not 1 to %d", l->what, i, n,
                             MODEL_TOK_ADDED_MAX);
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= MODEL_TOK_IDS_MAX)
            return bad_id(l, content, n);
        count_token(c, n, (uint32_t)json_integer_value(id));
    }
    return 0;
}

static int load_vocab(struct model_load *l, const json_t *added)
{
    struct census c = {0};
    int rc = walk_vocab(l, &c);
    if (rc == 0)
        rc = count_added(l, added, &c);
    if (rc == 0 && c.n_tokens == 0)
        rc = base_fail(l->e, BATON_ERR_INPUT, "%s: the vocabulary is empty", l->what);
    if (rc == 0)
        rc = model_vocab_init(&l->t->vocab, c.n_ids, (uint32_t)c.n_tokens, c.text_bytes, l->e);
    return rc ? rc : walk_vocab(l, NULL);
}

/* ---- merges -------------------------------------------------------------------------------- */

static int bad_merge(struct model_load *l, uint32_t i, const char *why)
{
    return base_fail(l->e, BATON_ERR_INPUT, "%s: merge %u %s", l->what, i, why);
}

/* "a b" or ["a", "b"] put together in `joined`; *n_left bytes of it are the left part. */
static int merge_parts(struct model_load *l, struct model_cursor *at, uint32_t i,
                       struct model_text *joined, size_t *n_left)
{
    joined->n = 0;
    bool pair = model_cursor_peek(at) == '[';
    if (pair)
        at->p++;
    int rc = model_cursor_string(at, joined);
    *n_left = joined->n;
    if (rc == 0 && pair) {
        rc = model_cursor_expect(at, ',');
        if (rc == 0)
            rc = model_cursor_string(at, joined);
        return rc ? rc : model_cursor_expect(at, ']');
    }
    if (rc)
        return rc;
    char *space = joined->n ? memchr(joined->data, ' ', joined->n) : NULL;
    if (!space || memchr(space + 1, ' ', joined->n - (size_t)(space + 1 - joined->data)))
        return bad_merge(l, i, "is no pair of two tokens");
    *n_left = (size_t)(space - joined->data);
    joined->n--;
    memmove(space, space + 1, joined->n - *n_left);
    return 0;
}

static int add_merge(struct model_load *l, uint32_t i, const char *s, size_t n, size_t n_left)
{
    const struct model_vocab *v = &l->t->vocab;
    /* With an empty part the result would be its own other part: a merge without end. All other
     * merges make a longer token, so there can be no cycle among them. */
    if (n_left == 0 || n_left == n)
        return bad_merge(l, i, "is a cycle: it makes its own part");
    const struct {
        const char *s;
        size_t n;
    } token[3] = {{s, n_left}, {s + n_left, n - n_left}, {s, n}};
    int32_t id[3];
    for (unsigned k = 0; k < 3; k++) {
        id[k] = model_vocab_find(v, token[k].s, token[k].n);
        if (id[k] < 0)
            return base_fail(l->e, BATON_ERR_INPUT, "%s: merge %u: \"%s\" is not in the vocabulary",
                             l->what, i, model_quote(token[k].s, token[k].n).text);
    }
    model_bpe_add(&l->t->bpe, v->seed, (uint32_t)id[0], (uint32_t)id[1], i, (uint32_t)id[2]);
    return 0;
}

/* One pass over the merges: counts where `adds` is false. */
static int walk_merges(struct model_load *l, bool adds, uint32_t *n)
{
    struct model_cursor at = {l->merges.from, l->merges.from, l->merges.to, l->what, l->e};
    struct model_text joined = {0};
    bool first = true;
    size_t n_left = 0;
    int rc = model_cursor_expect(&at, '[');
    for (*n = 0; rc == 0 && (rc = model_cursor_next(&at, ']', &first)) > 0; ++*n) {
        if (*n == MODEL_TOK_MERGES_MAX)
            rc = base_fail(l->e, BATON_ERR_INPUT, "%s: there are more than %d merges", l->what,
                           MODEL_TOK_MERGES_MAX);
        else
            rc = merge_parts(l, &at, *n, &joined, &n_left);
        if (rc == 0 && adds)
            rc = add_merge(l, *n, joined.data, joined.n, n_left);
    }
    free(joined.data);
    return rc;
}

static int load_merges(struct model_load *l)
{
    uint32_t n;
    int rc = walk_merges(l, false, &n);
    if (rc == 0)
        rc = model_bpe_init(&l->t->bpe, n, l->e);
    return rc ? rc : walk_merges(l, true, &n);
}

/* ---- the model ----------------------------------------------------------------------------- */

/* Options of BPE that no family here uses; a value that does something is refused. */
static int refuse_options(struct model_load *l, const json_t *model)
{
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (unsigned i = 0; i < 2; i++) {
        const char *s = "";
        int rc = base_json_str(model, affixes[i], false, &s, l->what, l->e);
        if (rc == 0 && *s)
            rc = base_fail(l->e, BATON_ERR_INPUT, "%s: model.%s is not supported", l->what,
                           affixes[i]);
        if (rc)
            return rc;
    }
    double dropout = 0;
    int rc = base_json_f64(model, "dropout", false, 0, 1, &dropout, l->what, l->e);
    if (rc == 0 && dropout != 0)
        rc = base_fail(l->e, BATON_ERR_INPUT, "%s: model.dropout is not supported", l->what);
    return rc;
}

static int load_options(struct model_load *l, const json_t *model)
{
    struct model_bpe *b = &l->t->bpe;
    const char *type = NULL, *unk = NULL;
    int rc = base_json_str(model, "type", true, &type, l->what, l->e);
    if (rc == 0 && strcmp(type, "BPE") != 0)
        rc = base_fail(l->e, BATON_ERR_INPUT, "%s: model type \"%s\" is not supported, only BPE",
                       l->what, model_quote(type, strlen(type)).text);
    if (rc == 0)
        rc = refuse_options(l, model);
    if (rc == 0)
        rc = base_json_bool(model, "ignore_merges", false, &b->ignore_merges, l->what, l->e);
    if (rc == 0)
        rc = base_json_bool(model, "byte_fallback", false, &b->byte_fallback, l->what, l->e);
    if (rc == 0)
        rc = base_json_bool(model, "fuse_unk", false, &b->fuse_unk, l->what, l->e);
    if (rc == 0)
        rc = base_json_str(model, "unk_token", false, &unk, l->what, l->e);
    if (rc)
        return rc;
    b->unk = unk ? model_vocab_find(&l->t->vocab, unk, strlen(unk)) : -1;
    if (unk && b->unk < 0)
        return base_fail(l->e, BATON_ERR_INPUT, "%s: unk_token \"%s\" is not in the vocabulary",
                         l->what, model_quote(unk, strlen(unk)).text);
    return 0;
}

static int load_model(struct model_load *l)
{
    const json_t *added = json_object_get(l->root, "added_tokens");
    if (added && !json_is_null(added) && !json_is_array(added))
        return base_fail(l->e, BATON_ERR_INPUT, "%s: added_tokens is no list", l->what);
    int rc = load_vocab(l, added);
    if (rc == 0)
        rc = load_options(l, json_object_get(l->root, "model"));
    if (rc == 0)
        rc = load_merges(l);
    if (rc == 0)
        model_bpe_index(&l->t->bpe, &l->t->vocab);
    return rc;
}

/* ---- added tokens -------------------------------------------------------------------------- */

static int added_flags(struct model_load *l, const json_t *a, uint8_t *flags)
{
    static const struct {
        const char *key;
        uint8_t flag;
    } known[] = {
        {"special", MODEL_TOKEN_SPECIAL},       {"lstrip", MODEL_TOKEN_LSTRIP},
        {"rstrip", MODEL_TOKEN_RSTRIP},         {"single_word", MODEL_TOKEN_WORD},
        {"normalized", MODEL_TOKEN_NORMALIZED},
    };
    bool special = false;
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++) {
        /* The package's default: what is not special is looked for in normalized text. */
        bool on = known[i].flag == MODEL_TOKEN_NORMALIZED && !special;
        int rc = base_json_bool(a, known[i].key, false, &on, l->what, l->e);
        if (rc)
            return rc;
        if (i == 0)
            special = on;
        *flags |= on ? known[i].flag : 0;
    }
    return 0;
}

static int load_added_token(struct model_load *l, const json_t *a)
{
    struct model_vocab *v = &l->t->vocab;
    const char *content = json_string_value(json_object_get(a, "content"));
    uint32_t id = (uint32_t)json_integer_value(json_object_get(a, "id"));
    uint8_t flags = MODEL_TOKEN_ADDED;
    int rc = added_flags(l, a, &flags);
    if (rc)
        return rc;
    int32_t have = model_vocab_find(v, content, strlen(content));
    if (have < 0)
        return model_vocab_add(v, content, strlen(content), id, flags, l->what, l->e);
    if ((uint32_t)have != id || (v->flags[id] & MODEL_TOKEN_ADDED))
        return base_fail(l->e, BATON_ERR_INPUT, "%s: added token \"%s\" has two ids: %d and %u",
                         l->what, model_quote(content, strlen(content)).text, have, id);
    v->flags[id] |= flags;
    return 0;
}

/* Into the trie of the text that it is looked for in; the content of a token that wants to see
 * normalized text is normalized too. */
static int index_added_token(struct model_load *l, uint32_t id)
{
    struct model_tokenizer *t = l->t;
    const char *s = t->vocab.text + t->vocab.start[id];
    size_t n = t->vocab.length[id];
    if (!(t->vocab.flags[id] & MODEL_TOKEN_NORMALIZED))
        return model_trie_add(&t->raw, s, n, (int32_t)id, l->e);
    struct model_text buf[2] = {{0}, {0}};
    int rc = model_normalize(t->norm, t->n_norm, buf, s, n, &s, &n, l->e);
    if (rc == 0)
        rc = model_trie_add(&t->normalized, s, n, (int32_t)id, l->e);
    free(buf[0].data);
    free(buf[1].data);
    return rc;
}

static int load_added(struct model_load *l)
{
    const json_t *added = json_object_get(l->root, "added_tokens");
    json_t *a;
    size_t i;
    int rc = 0;
    json_array_foreach(added, i, a) if ((rc = load_added_token(l, a))) return rc;
    /* Of two that are equal once normalized, the special one counts, then the earlier. */
    for (unsigned turn = 0; turn < 2; turn++)
        json_array_foreach(added, i, a)
        {
            uint32_t id = (uint32_t)json_integer_value(json_object_get(a, "id"));
            bool special = l->t->vocab.flags[id] & MODEL_TOKEN_SPECIAL;
            if (special == (turn == 0) && (rc = index_added_token(l, id)))
                return rc;
        }
    return 0;
}

/* ---- the whole ----------------------------------------------------------------------------- */

/* The small parts as a tree, the large ones as spans. */
static int read_json(struct model_load *l, const char *json, size_t n)
{
    struct model_text rest = {0};
    size_t valid = model_utf8_valid(json, n);
    if (n > MODEL_TOK_FILE_MAX)
        return base_fail(l->e, BATON_ERR_INPUT, "%s: %zu bytes, at most %d are read", l->what, n,
                         MODEL_TOK_FILE_MAX);
    if (valid < n)
        return base_fail(l->e, BATON_ERR_INPUT, "%s: not UTF-8 at byte %zu", l->what, valid);
    int rc = model_json_spans(json, n, l->what, &l->vocab, &l->merges, l->e);
    if (rc == 0)
        rc = model_json_rest(json, n, l->vocab, l->merges, &rest, l->e);
    if (rc == 0)
        rc = base_json_parse(rest.data, rest.n, l->what, &l->root, l->e);
    free(rest.data);
    return rc;
}

int model_tokenizer_parse(const char *json, size_t n, const char *what,
                          struct model_tokenizer **out, struct baton_error *e)
{
    struct model_load l = {.what = what, .e = e};
    int rc = read_json(&l, n ? json : "", n); /* an empty file maps to NULL */
    if (rc)
        return rc;
    l.t = base_try_alloc(1, sizeof *l.t, e);
    rc = l.t ? load_model(&l) : BATON_ERR_NOMEM;
    if (rc == 0)
        rc = model_load_pipeline(&l);
    if (rc == 0)
        rc = load_added(&l);
    if (rc == 0)
        rc = model_load_post(&l);
    json_decref(l.root);
    if (rc)
        model_tokenizer_close(l.t);
    else
        *out = l.t;
    return rc;
}

int model_tokenizer_open(const char *dir, struct model_tokenizer **out, struct baton_error *e)
{
    struct base_file f = {0};
    char *path = base_path_join(dir, "tokenizer.json", e);
    if (!path)
        return BATON_ERR_NOMEM;
    int rc = base_file_open(&f, path, e);
    if (rc == 0)
        rc = model_tokenizer_parse((const char *)f.data, f.size, path, out, e);
    base_file_close(&f);
    free(path);
    return rc;
}
