/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens: one block of text, ids as indices, a hash from text to id; and the growing arrays. */
#include <stdlib.h>
#include <string.h>

#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>

#include "base/base.h"
#include "model/tokenizer_priv.h"

int model_text_reserve(struct model_text *t, size_t more, struct baton_error *e)
{
    if (more > MODEL_TOK_TEXT_MAX - t->n)
        return base_fail(e, BATON_ERR_INPUT, "the text grows over %zu bytes while it is converted",
                         MODEL_TOK_TEXT_MAX);
    size_t need = t->n + more;
    if (need <= t->cap)
        return 0;
    size_t cap = t->cap ? t->cap : 256;
    while (cap < need)
        cap *= 2;
    char *p = base_try_realloc(t->data, cap, 1, e);
    if (!p)
        return BATON_ERR_NOMEM;
    t->data = p;
    t->cap = cap;
    return 0;
}

int model_text_add(struct model_text *t, const char *s, size_t n, struct baton_error *e)
{
    if (n == 0)
        return 0;
    int rc = model_text_reserve(t, n, e);
    if (rc)
        return rc;
    memcpy(t->data + t->n, s, n);
    t->n += n;
    return 0;
}

int model_ids_add(struct model_ids *ids, int32_t id, struct baton_error *e)
{
    if (ids->n == ids->cap) {
        size_t cap = ids->cap ? ids->cap * 2 : 64;
        int32_t *p = base_try_realloc(ids->data, cap, sizeof *p, e);
        if (!p)
            return BATON_ERR_NOMEM;
        ids->data = p;
        ids->cap = cap;
    }
    ids->data[ids->n++] = id;
    return 0;
}

struct model_quoted model_quote(const char *s, size_t n)
{
    struct model_quoted q;
    size_t at = 0;
    for (size_t i = 0, len; i < n; i += len) {
        (void)model_utf8_get(s + i, &len);
        if (at + len + 4 > sizeof q.text) {
            memcpy(q.text + at, "...", 3);
            at += 3;
            break;
        }
        memcpy(q.text + at, s + i, len);
        if (len == 1 && (unsigned char)s[i] < 0x20)
            q.text[at] = '?';
        at += len;
    }
    q.text[at] = '\0';
    return q;
}

int model_vocab_init(struct model_vocab *v, uint32_t n_ids, uint32_t n_tokens, size_t text_bytes,
                     struct baton_error *e)
{
    uint32_t n_slots = 64;
    while (n_slots / 2 < n_tokens)
        n_slots *= 2;
    int rc = base_random(&v->seed, sizeof v->seed, e);
    if (rc)
        return rc;
    v->n_ids = n_ids;
    v->mask = n_slots - 1;
    v->text_cap = text_bytes;
    if (!(v->text = base_try_alloc(text_bytes + 1, 1, e)) ||
        !(v->start = base_try_alloc(n_ids + 1, sizeof *v->start, e)) ||
        !(v->length = base_try_alloc(n_ids + 1, sizeof *v->length, e)) ||
        !(v->flags = base_try_alloc(n_ids + 1, sizeof *v->flags, e)) ||
        !(v->slots = base_try_alloc(n_slots, sizeof *v->slots, e)))
        return BATON_ERR_NOMEM;
    return 0;
}

void model_vocab_fini(struct model_vocab *v)
{
    free(v->text);
    free(v->start);
    free(v->length);
    free(v->flags);
    free(v->slots);
    memset(v, 0, sizeof *v);
}

/* The slot that holds s, or the empty one where it belongs. */
static uint32_t slot_of(const struct model_vocab *v, const char *s, size_t n)
{
    uint32_t i = (uint32_t)XXH3_64bits_withSeed(s, n, v->seed) & v->mask;
    for (; v->slots[i] != 0; i = (i + 1) & v->mask) {
        uint32_t id = v->slots[i] - 1;
        if (v->length[id] == n && memcmp(v->text + v->start[id], s, n) == 0)
            break;
    }
    return i;
}

int model_vocab_add(struct model_vocab *v, const char *s, size_t n, uint32_t id, uint8_t flags,
                    const char *what, struct baton_error *e)
{
    if (id >= v->n_ids || n > v->text_cap - v->n_text)
        return base_fail(e, BATON_ERR_INTERNAL, "%s: token %u has no room", what, id);
    if (v->flags[id] != 0)
        return base_fail(e, BATON_ERR_INPUT, "%s: two tokens have the id %u: \"%s\" and \"%s\"",
                         what, id, model_quote(s, n).text,
                         model_quote(v->text + v->start[id], v->length[id]).text);
    uint32_t slot = slot_of(v, s, n);
    if (v->slots[slot] != 0)
        return base_fail(e, BATON_ERR_INPUT, "%s: token \"%s\" has two ids: %u and %u", what,
                         model_quote(s, n).text, v->slots[slot] - 1, id);
    memcpy(v->text + v->n_text, s, n);
    v->start[id] = (uint32_t)v->n_text;
    v->length[id] = (uint32_t)n;
    v->flags[id] = flags;
    v->n_text += n;
    v->slots[slot] = id + 1;
    return 0;
}

int32_t model_vocab_find(const struct model_vocab *v, const char *s, size_t n)
{
    return (int32_t)v->slots[slot_of(v, s, n)] - 1;
}
