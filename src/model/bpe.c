/* SPDX-License-Identifier: Apache-2.0 */
/* Byte pair encoding: characters to symbols, then the pair of lowest rank (leftmost of equals)
 * merges until none is left.
 *
 * Short pieces look for it by scanning, long ones (Gemma encodes whole texts) with a heap, so that
 * the cost is n log n. Both give the same ids: a merged token is the text of its parts put
 * together, so an entry of the heap that went stale can only be one whose symbols are gone.
 */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "model/tokenizer_priv.h"

enum { SHORT_MAX = 48 }; /* symbols; measured: the scan wins below about 60 */
#define NO_RANK UINT32_MAX

static uint32_t pair_slot(const struct model_bpe *b, uint64_t seed, uint32_t left, uint32_t right)
{
    /* splitmix64's finaliser over a seeded key */
    uint64_t x = (((uint64_t)left << 32) | right) ^ seed;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return (uint32_t)(x ^ (x >> 31)) & b->mask;
}

int model_bpe_init(struct model_bpe *b, uint32_t n_merges, struct baton_error *e)
{
    uint32_t n = 64;
    while (n / 2 < n_merges)
        n *= 2;
    b->mask = n - 1;
    b->merges = base_try_alloc(n, sizeof *b->merges, e);
    if (!b->merges)
        return BATON_ERR_NOMEM;
    for (uint32_t i = 0; i < n; i++)
        b->merges[i].left = UINT32_MAX;
    return 0;
}

void model_bpe_add(struct model_bpe *b, uint64_t seed, uint32_t left, uint32_t right, uint32_t rank,
                   uint32_t id)
{
    uint32_t i = pair_slot(b, seed, left, right);
    while (b->merges[i].left != UINT32_MAX &&
           !(b->merges[i].left == left && b->merges[i].right == right))
        i = (i + 1) & b->mask;
    b->merges[i] = (struct model_merge){left, right, rank, id};
}

static const struct model_merge *merge_find(const struct model_bpe *b, uint64_t seed, uint32_t left,
                                            uint32_t right)
{
    uint32_t i = pair_slot(b, seed, left, right);
    for (; b->merges[i].left != UINT32_MAX; i = (i + 1) & b->mask)
        if (b->merges[i].left == left && b->merges[i].right == right)
            return &b->merges[i];
    return NULL;
}

/* Only tokens of the model: an added token that is not in its vocabulary is no result of BPE. */
static int32_t find_in_model(const struct model_vocab *v, const char *s, size_t n)
{
    int32_t id = model_vocab_find(v, s, n);
    return id >= 0 && (v->flags[id] & MODEL_TOKEN_MODEL) ? id : -1;
}

void model_bpe_index(struct model_bpe *b, const struct model_vocab *v)
{
    for (uint32_t cp = 0; cp < 512; cp++) {
        char c[4];
        b->chars[cp] = find_in_model(v, c, model_utf8_put(cp, c));
    }
    for (unsigned i = 0; i < 256; i++) {
        static const char hex[] = "0123456789ABCDEF";
        const char name[6] = {'<', '0', 'x', hex[i >> 4], hex[i & 15], '>'};
        b->bytes[i] = find_in_model(v, name, sizeof name);
    }
}

void model_bpe_work_fini(struct model_bpe_work *w)
{
    free(w->symbols);
    free(w->heap);
}

static int add_symbol(struct model_bpe_work *w, int32_t id, struct baton_error *e)
{
    if (w->n == w->cap) {
        size_t cap = w->cap ? w->cap * 2 : 64;
        void *p = base_try_realloc(w->symbols, cap, sizeof *w->symbols, e);
        if (!p)
            return BATON_ERR_NOMEM;
        w->symbols = p;
        w->cap = cap;
    }
    w->symbols[w->n] = (struct model_symbol){(uint32_t)id, (int32_t)w->n - 1, (int32_t)w->n + 1,
                                             NO_RANK, 0};
    w->n++;
    return 0;
}

/* The bytes of one character as symbols; *done false where a byte has no token. */
static int add_bytes(const struct model_bpe *b, struct model_bpe_work *w, const char *s, size_t n,
                     bool *done, struct baton_error *e)
{
    *done = false;
    for (size_t i = 0; i < n; i++)
        if (b->bytes[(uint8_t)s[i]] < 0)
            return 0;
    *done = true;
    for (size_t i = 0; i < n; i++) {
        int rc = add_symbol(w, b->bytes[(uint8_t)s[i]], e);
        if (rc)
            return rc;
    }
    return 0;
}

/* Characters to symbols. An unknown character waits in n_unk until a known one follows, and bytes
 * do not count as known: so does the model of the tokenizers package. */
static int add_characters(const struct model_bpe *b, const struct model_vocab *v,
                          struct model_bpe_work *w, const char *s, size_t n, struct baton_error *e)
{
    bool unknown = false;
    int rc = 0;
    for (size_t i = 0, len; i < n && rc == 0; i += len) {
        uint32_t cp = model_utf8_get(s + i, &len);
        int32_t id = cp < 512 ? b->chars[cp] : find_in_model(v, s + i, len);
        bool as_bytes = false;
        if (id < 0 && b->byte_fallback)
            rc = add_bytes(b, w, s + i, len, &as_bytes, e);
        if (rc || as_bytes || (id < 0 && b->unk < 0))
            continue;
        if (unknown && (id >= 0 || !b->fuse_unk))
            rc = add_symbol(w, b->unk, e);
        unknown = id < 0;
        if (rc == 0 && id >= 0)
            rc = add_symbol(w, id, e);
    }
    if (rc == 0 && unknown)
        rc = add_symbol(w, b->unk, e);
    if (rc == 0 && w->n > 0)
        w->symbols[w->n - 1].next = -1;
    return rc;
}

/* ---- short: scan for the lowest rank -------------------------------------------------------- */

static void look_up(const struct model_bpe *b, uint64_t seed, struct model_symbol *symbols,
                    int32_t i)
{
    struct model_symbol *s = &symbols[i];
    const struct model_merge *m = s->next < 0 ? NULL
                                              : merge_find(b, seed, s->id, symbols[s->next].id);
    s->rank = m ? m->rank : NO_RANK;
    s->merged = m ? m->id : 0;
}

static void merge_short(const struct model_bpe *b, uint64_t seed, struct model_symbol *symbols,
                        size_t n)
{
    for (size_t i = 0; i + 1 < n; i++)
        look_up(b, seed, symbols, (int32_t)i);
    for (;;) {
        int32_t best = -1;
        uint32_t rank = NO_RANK;
        for (int32_t i = 0; i >= 0; i = symbols[i].next)
            if (symbols[i].rank < rank) {
                rank = symbols[i].rank;
                best = i;
            }
        if (best < 0)
            return;
        struct model_symbol *left = &symbols[best];
        left->id = left->merged;
        left->next = symbols[left->next].next;
        if (left->next >= 0)
            symbols[left->next].prev = best;
        look_up(b, seed, symbols, best);
        if (left->prev >= 0)
            look_up(b, seed, symbols, left->prev);
    }
}

/* ---- long: a heap of candidates ------------------------------------------------------------- */

static int heap_push(struct model_bpe_work *w, uint32_t rank, int32_t at, uint32_t id,
                     struct baton_error *e)
{
    if (w->n_heap == w->heap_cap) {
        size_t cap = w->heap_cap ? w->heap_cap * 2 : 256;
        void *p = base_try_realloc(w->heap, cap, sizeof *w->heap, e);
        if (!p)
            return BATON_ERR_NOMEM;
        w->heap = p;
        w->heap_cap = cap;
    }
    struct model_candidate c = {((uint64_t)rank << 32) | (uint32_t)at, id};
    size_t i = w->n_heap++;
    for (; i > 0 && c.order < w->heap[(i - 1) / 2].order; i = (i - 1) / 2)
        w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = c;
    return 0;
}

static struct model_candidate heap_pop(struct model_bpe_work *w)
{
    struct model_candidate top = w->heap[0], last = w->heap[--w->n_heap];
    size_t i = 0;
    for (size_t c = 1; c < w->n_heap; c = 2 * i + 1) {
        if (c + 1 < w->n_heap && w->heap[c + 1].order < w->heap[c].order)
            c++;
        if (last.order <= w->heap[c].order)
            break;
        w->heap[i] = w->heap[c];
        i = c;
    }
    w->heap[i] = last;
    return top;
}

static int push_pair(const struct model_bpe *b, uint64_t seed, struct model_bpe_work *w, int32_t at,
                     struct baton_error *e)
{
    const struct model_symbol *s = &w->symbols[at];
    if (s->next < 0)
        return 0;
    const struct model_merge *m = merge_find(b, seed, s->id, w->symbols[s->next].id);
    return m ? heap_push(w, m->rank, at, m->id, e) : 0;
}

static int merge_long(const struct model_bpe *b, uint64_t seed, struct model_bpe_work *w,
                      struct baton_error *e)
{
    int rc = 0;
    w->n_heap = 0;
    for (size_t i = 0; i + 1 < w->n && rc == 0; i++)
        rc = push_pair(b, seed, w, (int32_t)i, e);
    while (rc == 0 && w->n_heap > 0) {
        struct model_candidate c = heap_pop(w);
        int32_t at = (int32_t)(uint32_t)c.order;
        struct model_symbol *left = &w->symbols[at];
        if (left->merged || left->next < 0)
            continue;
        struct model_symbol *right = &w->symbols[left->next];
        const struct model_merge *m = merge_find(b, seed, left->id, right->id);
        if (!m || m->id != c.id)
            continue; /* the pair has changed since it was pushed */
        left->id = c.id;
        left->next = right->next;
        right->merged = 1;
        if (right->next >= 0)
            w->symbols[right->next].prev = at;
        if (left->prev >= 0)
            rc = push_pair(b, seed, w, left->prev, e);
        if (rc == 0)
            rc = push_pair(b, seed, w, at, e);
    }
    return rc;
}

int model_bpe_encode(const struct model_bpe *b, const struct model_vocab *v,
                     struct model_bpe_work *w, const char *s, size_t n, struct model_ids *out,
                     struct baton_error *e)
{
    if (n == 0)
        return 0;
    int32_t whole = b->ignore_merges ? find_in_model(v, s, n) : -1;
    if (whole >= 0)
        return model_ids_add(out, whole, e);
    w->n = 0;
    int rc = add_characters(b, v, w, s, n, e);
    if (rc || w->n == 0)
        return rc;
    if (w->n <= SHORT_MAX)
        merge_short(b, v->seed, w->symbols, w->n);
    else
        rc = merge_long(b, v->seed, w, e);
    for (int32_t i = 0; i >= 0 && rc == 0; i = w->symbols[i].next)
        rc = model_ids_add(out, (int32_t)w->symbols[i].id, e);
    return rc;
}
