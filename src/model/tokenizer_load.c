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

static int count_token(struct model_load *l, struct census *c, const char *s, size_t n,
                       const json_t *id)
{
    if (!json_is_integer(id) || json_integer_value(id) < 0 ||
        json_integer_value(id) >= MODEL_TOK_IDS_MAX)
        return base_fail(l->e, BATON_ERR_INPUT,
                         "%s: the id of token \"%s\" is no integer in [0, %d)", l->what,
                         model_quote(s, n).text,
                         MODEL_TOK_IDS_MAX);
    uint32_t end = (uint32_t)json_integer_value(id) + 1;
    if (end > c->n_ids)
        c->n_ids = end;
    c->n_tokens++;
    c->text_bytes += n; /* at most the file's size */
    return 0;
}

static int census_take(struct model_load *l, const json_t *vocab, const json_t *added,
                       struct census *c)
{
    const char *key;
    json_t *value;
    size_t i;
    int rc = 0;
    json_object_foreach((json_t *)vocab, key, value)
        if ((rc = count_token(l, c, key, strlen(key), value)))
            return rc;
    json_array_foreach(added, i, value) {
        const char *content = NULL;
        rc = base_json_str(value, "content", true, &content, l->what, l->e);
        if (rc)
            return rc;
        size_t n = strlen(content);
        if (n == 0 || n > MODEL_TOK_ADDED_MAX)
            return base_fail(l->e, BATON_ERR_INPUT,
                             "%s: added token %zu has %zu bytes, not 1 to %d", l->what, i, n,
                             MODEL_TOK_ADDED_MAX);
        if ((rc = count_token(l, c, content, n, json_object_get(value, "id"))))
            return rc;
    }
    return rc;
}

static int load_vocab(struct model_load *l, const json_t *vocab, const json_t *added)
{
    struct census c = {0};
    int rc = census_take(l, vocab, added, &c);
    if (rc == 0 && c.n_tokens == 0)
        rc = base_fail(l->e, BATON_ERR_INPUT, "%s: the vocabulary is empty", l->what);
    if (rc == 0)
        rc = model_vocab_init(&l->t->vocab, c.n_ids, (uint32_t)c.n_tokens, c.text_bytes, l->e);
    if (rc)
        return rc;
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)vocab, key, value) {
        rc = model_vocab_add(&l->t->vocab, key, strlen(key), (uint32_t)json_integer_value(value),
                             MODEL_TOKEN_MODEL, l->what, l->e);
        if (rc)
            return rc;
    }
    return 0;
}

/* ---- merges ------------------------------------------------------------------------------------ */

/* "a b" or ["a", "b"] to two parts. */
static int merge_parts(struct model_load *l, size_t i, const json_t *m, const char *part[2],
                       size_t n[2])
{
    if (json_is_string(m)) {
        part[0] = json_string_value(m);
        const char *space = strchr(part[0], ' ');
        if (space && !strchr(space + 1, ' ')) {
            n[0] = (size_t)(space - part[0]);
            part[1] = space + 1;
            n[1] = strlen(part[1]);
            return 0;
        }
    } else if (json_array_size(m) == 2 && json_is_string(json_array_get(m, 0)) &&
               json_is_string(json_array_get(m, 1))) {
        for (unsigned k = 0; k < 2; k++) {
            part[k] = json_string_value(json_array_get(m, k));
            n[k] = strlen(part[k]);
        }
        return 0;
    }
    return base_fail(l->e, BATON_ERR_INPUT, "%s: merge %zu is no pair of two tokens", l->what, i);
}

static int load_merge(struct model_load *l, size_t i, const json_t *m, struct model_text *joined)
{
    const char *part[2] = {NULL, NULL};
    size_t n[2] = {0, 0};
    int rc = merge_parts(l, i, m, part, n);
    if (rc)
        return rc;
    /* With an empty part the result would be its own other part: a merge without end. All other
     * merges make a longer token, so there can be no cycle among them. */
    if (n[0] == 0 || n[1] == 0)
        return base_fail(l->e, BATON_ERR_INPUT, "%s: merge %zu is a cycle: it makes its own part",
                         l->what, i);
    joined->n = 0;
    rc = model_text_add(joined, part[0], n[0], l->e);
    if (rc == 0)
        rc = model_text_add(joined, part[1], n[1], l->e);
    if (rc)
        return rc;
    const struct model_vocab *v = &l->t->vocab;
    int32_t left = model_vocab_find(v, part[0], n[0]), right = model_vocab_find(v, part[1], n[1]);
    int32_t id = model_vocab_find(v, joined->data, joined->n);
    if (left < 0 || right < 0 || id < 0)
        return base_fail(l->e, BATON_ERR_INPUT, "%s: merge %zu: \"%s\" is not in the vocabulary",
                         l->what, i,
                         left < 0    ? model_quote(part[0], n[0]).text
                         : right < 0 ? model_quote(part[1], n[1]).text
                                     : model_quote(joined->data, joined->n).text);
    model_bpe_add(&l->t->bpe, v->seed, (uint32_t)left, (uint32_t)right, (uint32_t)i, (uint32_t)id);
    return 0;
}

static int load_merges(struct model_load *l, const json_t *merges)
{
    size_t n = json_array_size(merges);
    if (!json_is_array(merges) || n > MODEL_TOK_MERGES_MAX)
        return base_fail(l->e, BATON_ERR_INPUT, "%s: merges is no list of at most %d (%zu)",
                         l->what, MODEL_TOK_MERGES_MAX, n);
    int rc = model_bpe_init(&l->t->bpe, (uint32_t)n, l->e);
    struct model_text joined = {0};
    for (size_t i = 0; i < n && rc == 0; i++)
        rc = load_merge(l, i, json_array_get(merges, i), &joined);
    free(joined.data);
    return rc;
}

/* ---- the model --------------------------------------------------------------------------------- */

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
    const json_t *model = json_object_get(l->root, "model");
    const json_t *vocab = json_object_get(model, "vocab");
    const json_t *added = json_object_get(l->root, "added_tokens");
    if (!json_is_object(model) || !json_is_object(vocab))
        return base_fail(l->e, BATON_ERR_INPUT, "%s: there is no model with a vocab", l->what);
    if (added && !json_is_null(added) && !json_is_array(added))
        return base_fail(l->e, BATON_ERR_INPUT, "%s: added_tokens is no list", l->what);
    int rc = load_vocab(l, vocab, added);
    if (rc == 0)
        rc = load_options(l, model);
    if (rc == 0)
        rc = load_merges(l, json_object_get(model, "merges"));
    if (rc == 0)
        model_bpe_index(&l->t->bpe, &l->t->vocab);
    return rc;
}

/* ---- added tokens ------------------------------------------------------------------------------ */

static int added_flags(struct model_load *l, const json_t *a, uint8_t *flags)
{
    static const struct {
        const char *key;
        uint8_t flag;
    } known[] = {
        {"special", MODEL_TOKEN_SPECIAL},   {"lstrip", MODEL_TOKEN_LSTRIP},
        {"rstrip", MODEL_TOKEN_RSTRIP},     {"single_word", MODEL_TOKEN_WORD},
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
    json_array_foreach(added, i, a)
        if ((rc = load_added_token(l, a)))
            return rc;
    /* Of two that are equal once normalized, the special one counts, then the earlier. */
    for (unsigned turn = 0; turn < 2; turn++)
        json_array_foreach(added, i, a) {
            uint32_t id = (uint32_t)json_integer_value(json_object_get(a, "id"));
            bool special = l->t->vocab.flags[id] & MODEL_TOKEN_SPECIAL;
            if (special == (turn == 0) && (rc = index_added_token(l, id)))
                return rc;
        }
    return 0;
}

/* ---- the whole --------------------------------------------------------------------------------- */

int model_tokenizer_parse(const char *json, size_t n, const char *what,
                          struct model_tokenizer **out, struct baton_error *e)
{
    struct model_load l = {.what = what, .e = e};
    if (n > MODEL_TOK_FILE_MAX)
        return base_fail(e, BATON_ERR_INPUT, "%s: %zu bytes, at most %d are read", what, n,
                         MODEL_TOK_FILE_MAX);
    int rc = base_json_parse(json, n, what, &l.root, e);
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
