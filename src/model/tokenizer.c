/* SPDX-License-Identifier: Apache-2.0 */
/* The tokenizer as a whole: look-ups and encoding. */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "model/tokenizer_priv.h"

void model_tokenizer_close(struct model_tokenizer *t)
{
    if (!t)
        return;
    model_vocab_fini(&t->vocab);
    free(t->bpe.merges);
    free(t->raw.nodes);
    free(t->normalized.nodes);
    for (unsigned i = 0; i < t->n_split; i++)
        model_pattern_free(t->split[i].regex);
    free(t);
}

uint32_t model_tokenizer_size(const struct model_tokenizer *t)
{
    return t->vocab.n_ids;
}

int32_t model_tokenizer_id(const struct model_tokenizer *t, const char *content)
{
    return model_vocab_find(&t->vocab, content, strlen(content));
}

bool model_tokenizer_is_special(const struct model_tokenizer *t, int32_t id)
{
    return id >= 0 && (uint32_t)id < t->vocab.n_ids && (t->vocab.flags[id] & MODEL_TOKEN_SPECIAL);
}

int model_ids_check(const int32_t *ids, size_t n_ids, uint32_t vocab, struct baton_error *e)
{
    for (size_t i = 0; i < n_ids; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= vocab)
            return base_fail(e, BATON_ERR_INPUT, "token id %d is not in [0, %u)", ids[i], vocab);
    return 0;
}

static int encoding_begin(struct model_encoding *en)
{
    int rc = 0;
    for (unsigned i = 0; i < en->t->n_split && rc == 0; i++)
        if (en->t->split[i].regex)
            rc = model_pattern_work(en->t->split[i].regex, &en->match[i], en->e);
    return rc;
}

static void encoding_end(struct model_encoding *en)
{
    for (unsigned i = 0; i < MODEL_TOK_STEPS_MAX; i++) {
        model_pattern_work_free(en->match[i]);
        free(en->step[i].data);
    }
    free(en->norm[0].data);
    free(en->norm[1].data);
    model_bpe_work_fini(&en->bpe);
    free(en->ids.data);
}

/* Text between the added tokens of the raw text. */
static int encode_text(struct model_encoding *en, const char *s, size_t n)
{
    const struct model_tokenizer *t = en->t;
    int rc = model_normalize(t->norm, t->n_norm, en->norm, s, n, &s, &n, en->e);
    if (rc || n == 0)
        return rc;
    if (t->normalized.n == 0)
        return model_pretokenize(en, 0, s, n);
    struct model_added_walk w = {&t->normalized, &t->vocab, s, n, 0, 0, -1};
    size_t from, to;
    int32_t id;
    while (rc == 0 && model_added_next(&w, &from, &to, &id))
        rc = id >= 0 ? model_ids_add(&en->ids, id, en->e)
                     : model_pretokenize(en, 0, s + from, to - from);
    return rc;
}

static int encode(struct model_encoding *en, const char *s, size_t n)
{
    struct model_added_walk w = {&en->t->raw, &en->t->vocab, s, n, 0, 0, -1};
    size_t from, to;
    int32_t id;
    int rc = encoding_begin(en);
    while (rc == 0 && model_added_next(&w, &from, &to, &id))
        rc = id >= 0 ? model_ids_add(&en->ids, id, en->e) : encode_text(en, s + from, to - from);
    return rc;
}

static int add_all(struct model_ids *ids, const int32_t *more, unsigned n, struct baton_error *e)
{
    int rc = 0;
    for (unsigned i = 0; i < n && rc == 0; i++)
        rc = model_ids_add(ids, more[i], e);
    return rc;
}

int model_tokenizer_encode(const struct model_tokenizer *t, const char *text, size_t n,
                           bool with_special, int32_t **ids, size_t *n_ids, struct baton_error *e)
{
    if (n > MODEL_TOK_TEXT_MAX / 2)
        return base_fail(e, BATON_ERR_INPUT, "the text has %zu bytes, at most %zu are encoded", n,
                         MODEL_TOK_TEXT_MAX / 2);
    size_t valid = model_utf8_valid(text, n);
    if (valid < n)
        return base_fail(e, BATON_ERR_INPUT, "the text is not UTF-8 at byte %zu", valid);
    struct model_encoding en = {.t = t, .e = e};
    int rc = with_special ? add_all(&en.ids, t->before, t->n_before, e) : 0;
    if (rc == 0)
        rc = encode(&en, text, n);
    if (rc == 0 && with_special)
        rc = add_all(&en.ids, t->after, t->n_after, e);
    if (rc == 0 && !en.ids.data) { /* an empty result is an allocation too */
        en.ids.data = base_try_alloc(1, sizeof *en.ids.data, e);
        rc = en.ids.data ? 0 : BATON_ERR_NOMEM;
    }
    if (rc == 0) {
        *ids = en.ids.data;
        *n_ids = en.ids.n;
        en.ids.data = NULL;
    }
    encoding_end(&en);
    return rc;
}
