/* SPDX-License-Identifier: Apache-2.0 */
/* Added tokens in a text: leftmost, then longest, by a walk in a trie of bytes.
 *
 * A walk is at most MODEL_TOK_ADDED_MAX long, so finding all is linear in the text. What the flags
 * do, and in which order, follows AddedVocabulary::find_matches of the tokenizers package: a match
 * that its flags refuse is skipped whole, and spaces taken by lstrip or rstrip do not move the
 * place where the search goes on.
 */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "model/tokenizer_priv.h"

static int add_node(struct model_trie *t, uint8_t byte, uint32_t *out, struct baton_error *e)
{
    if (t->n == t->cap) {
        uint32_t cap = t->cap ? t->cap * 2 : 256;
        void *p = base_try_realloc(t->nodes, cap, sizeof *t->nodes, e);
        if (!p)
            return BATON_ERR_NOMEM;
        t->nodes = p;
        t->cap = cap;
        t->n += t->n == 0;
    }
    t->nodes[t->n] = (struct model_trie_node){0, 0, -1, byte};
    *out = t->n++;
    return 0;
}

static uint32_t child_of(const struct model_trie *t, uint32_t node, uint8_t byte)
{
    uint32_t c = t->nodes[node].child;
    while (c != 0 && t->nodes[c].byte != byte)
        c = t->nodes[c].sibling;
    return c;
}

int model_trie_add(struct model_trie *t, const char *s, size_t n, int32_t id, struct baton_error *e)
{
    uint32_t node = 0;
    for (size_t i = 0; i < n; i++) {
        uint8_t byte = (uint8_t)s[i];
        uint32_t next = i == 0 ? t->root[byte] : child_of(t, node, byte);
        if (next == 0) {
            int rc = add_node(t, byte, &next, e);
            if (rc)
                return rc;
            if (i == 0) {
                t->root[byte] = next;
            } else {
                t->nodes[next].sibling = t->nodes[node].child;
                t->nodes[node].child = next;
            }
        }
        node = next;
    }
    if (node != 0 && t->nodes[node].id < 0)
        t->nodes[node].id = id; /* of equal strings the first counts */
    return 0;
}

/* Longest token at s; its length, 0 where there is none. */
static size_t longest_at(const struct model_trie *t, const char *s, size_t n, int32_t *id)
{
    size_t best = 0;
    uint32_t node = t->root[(uint8_t)s[0]];
    for (size_t i = 1; node != 0; i++) {
        if (t->nodes[node].id >= 0) {
            best = i;
            *id = t->nodes[node].id;
        }
        node = i < n ? child_of(t, node, (uint8_t)s[i]) : 0;
    }
    return best;
}

/* Start of the character that ends before s + at. */
static size_t char_before(const char *s, size_t at)
{
    do
        at--;
    while (((unsigned char)s[at] & 0xC0) == 0x80);
    return at;
}

static bool word_before(const char *s, size_t at)
{
    size_t len;
    return at > 0 && model_unicode_is_word(model_utf8_get(s + char_before(s, at), &len));
}

static bool word_at(const char *s, size_t n, size_t at)
{
    size_t len;
    return at < n && model_unicode_is_word(model_utf8_get(s + at, &len));
}

static size_t spaces_before(const char *s, size_t at)
{
    size_t len;
    while (at > 0) {
        size_t c = char_before(s, at);
        if (!model_unicode_is_space(model_utf8_get(s + c, &len)))
            break;
        at = c;
    }
    return at;
}

static size_t spaces_after(const char *s, size_t n, size_t at)
{
    size_t len;
    while (at < n && model_unicode_is_space(model_utf8_get(s + at, &len)))
        at += len;
    return at;
}

/* Next match that its flags allow, widened by the spaces that they take. */
static bool find_token(struct model_added_walk *w, size_t *from, size_t *to, int32_t *id)
{
    while (w->search < w->n) {
        size_t at = w->search, len = longest_at(w->trie, w->s + at, w->n - at, id);
        w->search = at + (len ? len : 1);
        if (len == 0)
            continue;
        uint8_t flags = w->vocab->flags[*id];
        if ((flags & MODEL_TOKEN_WORD) && (word_before(w->s, at) || word_at(w->s, w->n, at + len)))
            continue;
        *from = at;
        *to = at + len;
        if (flags & MODEL_TOKEN_LSTRIP) {
            size_t left = spaces_before(w->s, at);
            *from = left > w->done ? left : w->done;
        }
        if (flags & MODEL_TOKEN_RSTRIP)
            *to = spaces_after(w->s, w->n, *to);
        if (*from < *to) /* else the token before it took all of this one as its spaces */
            return true;
    }
    return false;
}

bool model_added_next(struct model_added_walk *w, size_t *from, size_t *to, int32_t *id)
{
    if (w->pending >= 0) {
        *id = w->pending;
        w->pending = -1;
        *from = *to = w->done;
        return true;
    }
    size_t text = w->done, start, end;
    if (find_token(w, &start, &end, id)) {
        w->done = end;
        if (text >= start) {
            *from = start;
            *to = end;
            return true;
        }
        w->pending = *id;
        *id = -1;
        *from = text;
        *to = start;
        return true;
    }
    *id = -1;
    *from = text;
    *to = w->n;
    w->done = w->n;
    return text < w->n;
}
