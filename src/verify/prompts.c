/* SPDX-License-Identifier: Apache-2.0 */
/* Default prompts: a lookup in a table, cut to a number of tokens. Made here, so that the check
 * needs no files beside the model. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "verify/verify_priv.h"

#define KEYS 2600u                  /* A00 to Z99 */
#define MAX_TEXT ((size_t)64 << 20) /* far more than any model's context */
#define TAIL 64u                    /* tokens that are kept at the end: the question and the turn */

/* splitmix64: number i of a fixed sequence. */
static uint64_t number(uint64_t i)
{
    uint64_t x = (i + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* Every key once: the multiplier has no factor in common with their number. Later rounds carry
 * a letter more. */
static int write_key(char *to, size_t size, uint32_t i)
{
    uint32_t k = i % KEYS * 1009 % KEYS, round = i / KEYS;
    char more[2] = {round ? (char)('A' + (round - 1) % 26) : '\0', '\0'};
    return snprintf(to, size, "%c%02u%s", 'A' + k / 100, k % 100, more);
}

/* Like "P12 = 9374\n", which makes 11 or 12 bytes. */
static int table_text(uint32_t n_records, char **out, struct baton_error *e)
{
    size_t size = 128 + 16 * (size_t)n_records, used;
    char *text = size > MAX_TEXT ? NULL : base_try_alloc(size, 1, e);
    char key[8];
    if (!text)
        return base_fail(e, BATON_ERR_NOMEM, "a prompt of %u records", n_records);
    used = (size_t)snprintf(text, size, "Here is a list of records.\n");
    for (uint32_t i = 0; i < n_records; i++) {
        write_key(key, sizeof key, i);
        used += (size_t)snprintf(text + used, size - used, "%s = %u\n", key,
                                 (unsigned)(1000 + number(i) % 9000));
    }
    write_key(key, sizeof key, 0);
    snprintf(text + used, size - used, "What is the value of \"%s\"?", key);
    *out = text;
    return 0;
}

/* A chat turn, or the bare text where the model's chat format is none that we know. */
static int tokenize(const struct baton_model *m, uint32_t n_records, int32_t **ids, size_t *n,
                    struct baton_error *e)
{
    char *text = NULL;
    int rc = table_text(n_records, &text, e);
    if (rc)
        return rc;
    rc = baton_tokenize(m, text, strlen(text), true, ids, n, e);
    if (rc == BATON_ERR_UNSUPPORTED)
        rc = baton_tokenize(m, text, strlen(text), false, ids, n, e);
    free(text);
    return rc;
}

/* Leave the beginning, which the answer is in, and the end, which the question is in. */
static void cut(int32_t *ids, size_t n, uint32_t want)
{
    size_t tail = want / 2 < TAIL ? want / 2 : TAIL;
    memmove(ids + want - tail, ids + n - tail, tail * sizeof *ids);
}

static int lookup(const struct baton_model *m, uint32_t n_tokens, struct verify_prompt *p,
                  struct baton_error *e)
{
    int rc = 0;
    for (uint32_t n_records = n_tokens / 8 + 16;; n_records *= 2) {
        rc = tokenize(m, n_records, &p->ids, &p->n_ids, e);
        if (rc)
            return rc;
        if (p->n_ids >= n_tokens)
            break;
        free(p->ids);
        p->ids = NULL;
    }
    cut(p->ids, p->n_ids, n_tokens);
    p->n_ids = n_tokens;
    return 0;
}

static int random_ids(const struct baton_model *m, uint32_t n_tokens, struct verify_prompt *p,
                      struct baton_error *e)
{
    p->ids = base_try_alloc(n_tokens, sizeof *p->ids, e);
    if (!p->ids)
        return BATON_ERR_NOMEM;
    for (uint32_t i = 0; i < n_tokens; i++)
        p->ids[i] = (int32_t)(number(i) % baton_model_vocab(m));
    p->n_ids = n_tokens;
    return 0;
}

static bool has_tokenizer(const struct baton_model *m)
{
    const struct model *model = engine_model(m);
    char *path = model_is_shape(model) ? NULL
                                       : base_path_join(model_path(model), "tokenizer.json", NULL);
    bool has = path && access(path, F_OK) == 0;
    free(path);
    return has;
}

int verify_prompt_lookup(const struct baton_model *m, uint32_t n_tokens, struct verify_prompt *out,
                         struct baton_error *e)
{
    struct verify_prompt p = {.source = "lookup"};
    uint32_t most = model_config_of(engine_model(m))->max_positions;
    int rc;
    if (n_tokens == 0)
        return base_fail(e, BATON_ERR_USAGE, "a prompt of no tokens");
    if (n_tokens > most)
        return base_fail(e, BATON_ERR_INPUT, "a prompt of %u tokens: the model's context is %u",
                         n_tokens, most);
    if (has_tokenizer(m)) {
        rc = lookup(m, n_tokens, &p, e);
    } else {
        p.source = "random ids";
        rc = random_ids(m, n_tokens, &p, e);
    }
    snprintf(p.name, sizeof p.name, "%u tokens", n_tokens);
    if (rc)
        verify_prompt_free(&p);
    else
        *out = p;
    return rc;
}

void verify_prompt_free(struct verify_prompt *p)
{
    free(p->ids);
    p->ids = NULL;
    p->n_ids = 0;
}
