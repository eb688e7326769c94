/* SPDX-License-Identifier: Apache-2.0 */
/* The prefix index: whole pages of sequences by what they hold, kept after their sequences.
 *
 * A page's key is SHA-256 over the key of the page before it and its 64 token ids; before the first
 * page stands the origin. So a key says everything that the page's numbers depend on, and whoever
 * chooses token ids can't make two prompts meet. Global and local pages of one key are kept and
 * forgotten apart: of a long prompt's local pages those at its end outlive the others where they
 * were used last.
 */
#include "kv/kv_priv.h"

#include <stdlib.h>
#include <string.h>

struct entry {
    uint8_t key[32];
    int32_t block[KV_N_GROUPS]; /* -1 = not kept */
    int32_t next;               /* in its bucket, or of the unused; -1 = none */
};

struct kv_prefix {
    struct kv_pool *pool;
    struct entry *entries; /* as many as there are blocks: each keeps one at least */
    int32_t unused;
    int32_t *buckets;            /* [mask + 1] */
    uint32_t mask;               /* a power of two, less one */
    int32_t *pages[KV_N_GROUPS]; /* [table_blocks] of the prompt that is looked up */
};

/* ---- entries ------------------------------------------------------------------------------ */

static int32_t *bucket_of(struct kv_prefix *x, const uint8_t key[32])
{
    uint32_t h;
    memcpy(&h, key, sizeof h);
    return &x->buckets[h & x->mask];
}

static struct entry *find(struct kv_prefix *x, const uint8_t key[32])
{
    for (int32_t i = *bucket_of(x, key); i >= 0; i = x->entries[i].next)
        if (!memcmp(x->entries[i].key, key, 32))
            return &x->entries[i];
    return NULL;
}

static struct entry *add(struct kv_prefix *x, const uint8_t key[32])
{
    struct entry *n = &x->entries[x->unused];
    int32_t *bucket = bucket_of(x, key);
    x->unused = n->next;
    memcpy(n->key, key, 32);
    n->block[KV_GLOBAL] = n->block[KV_LOCAL] = -1;
    n->next = *bucket;
    *bucket = (int32_t)(n - x->entries);
    return n;
}

static void drop(struct kv_prefix *x, struct entry *n)
{
    int32_t self = (int32_t)(n - x->entries), *p = bucket_of(x, n->key);
    while (*p != self)
        p = &x->entries[*p].next;
    *p = n->next;
    n->next = x->unused;
    x->unused = self;
}

void kv_prefix_evict(struct kv_prefix *x, const struct kv_blocks *b, int32_t id)
{
    enum kv_group g = b == &x->pool->group[KV_LOCAL] ? KV_LOCAL : KV_GLOBAL;
    struct entry *n = &x->entries[b->entry[id]];
    kv_blocks_unkeep(&x->pool->group[g], id);
    n->block[g] = -1;
    if (n->block[KV_GLOBAL] < 0 && n->block[KV_LOCAL] < 0)
        drop(x, n);
}

/* ---- life --------------------------------------------------------------------------------- */

int kv_prefix_open(struct kv_pool *p, struct kv_prefix **out, struct baton_error *e)
{
    uint32_t n = kv_pool_capacity(p), n_buckets = 1;
    struct kv_prefix *x = base_try_alloc(1, sizeof *x, e);
    if (!x)
        return BATON_ERR_NOMEM;
    while (n_buckets < n)
        n_buckets *= 2;
    x->pool = p;
    x->mask = n_buckets - 1;
    x->entries = base_try_alloc(n, sizeof *x->entries, e);
    x->buckets = base_try_alloc(n_buckets, sizeof *x->buckets, e);
    for (int g = 0; g < KV_N_GROUPS; g++)
        x->pages[g] = base_try_alloc(p->table_blocks, sizeof *x->pages[g], e);
    if (!x->entries || !x->buckets || !x->pages[KV_GLOBAL] || !x->pages[KV_LOCAL]) {
        kv_prefix_close(x);
        return BATON_ERR_NOMEM;
    }
    for (uint32_t i = 0; i < n; i++)
        x->entries[i].next = i + 1 < n ? (int32_t)i + 1 : -1;
    memset(x->buckets, 0xFF, n_buckets * sizeof *x->buckets); /* -1 */
    for (int g = 0; g < KV_N_GROUPS; g++)
        p->group[g].prefix = x;
    *out = x;
    return 0;
}

void kv_prefix_close(struct kv_prefix *x)
{
    if (!x)
        return;
    for (int g = 0; g < KV_N_GROUPS; g++) {
        struct kv_blocks *b = &x->pool->group[g];
        for (uint32_t i = 0; b->prefix && i < b->n_blocks; i++)
            if (b->entry[i] >= 0)
                kv_blocks_unkeep(b, (int32_t)i);
        b->prefix = NULL;
        free(x->pages[g]);
    }
    free(x->entries);
    free(x->buckets);
    free(x);
}

/* ---- keys --------------------------------------------------------------------------------- */

/* From the key of the page before to that of the page of these ids. */
static void key_next(uint8_t key[32], const int32_t *ids)
{
    struct base_sha256 h;
    base_sha256_init(&h);
    base_sha256_update(&h, key, 32);
    base_sha256_update(&h, ids, KV_BLOCK * sizeof *ids);
    base_sha256_final(&h, key);
}

/* ---- hits --------------------------------------------------------------------------------- */

/* Pages of the longest hit below `most` positions, a multiple of `grain`, whose next query stands
 * at its end, or at `length` where that is not 0; pages[] is filled in so far. */
static uint32_t longest(struct kv_prefix *x, const uint8_t origin[32], const int32_t *ids,
                        uint32_t most, uint32_t grain, uint32_t length)
{
    const struct kv_geometry *g = &x->pool->geometry;
    bool global = x->pool->group[KV_GLOBAL].n_layers > 0;
    bool local = x->pool->group[KV_LOCAL].n_layers > 0;
    uint32_t hit = 0, run = 0; /* run: local pages that are there, up to this one */
    uint8_t key[32];
    memcpy(key, origin, 32);
    for (uint32_t i = 0; i < most / KV_BLOCK && i < x->pool->table_blocks; i++) {
        key_next(key, ids + (size_t)i * KV_BLOCK);
        const struct entry *n = find(x, key);
        uint32_t end = (i + 1) * KV_BLOCK;
        x->pages[KV_GLOBAL][i] = n ? n->block[KV_GLOBAL] : -1;
        x->pages[KV_LOCAL][i] = n ? n->block[KV_LOCAL] : -1;
        if (global && x->pages[KV_GLOBAL][i] < 0)
            break;
        run = x->pages[KV_LOCAL][i] < 0 ? 0 : run + 1;
        uint32_t need = kv_needed_page(g, KV_LOCAL, length ? length : end);
        if (end % grain == 0 && (!local || need > i || i + 1 - run <= need))
            hit = i + 1;
    }
    return hit;
}

static uint32_t take(struct kv_prefix *x, struct kv_seq *s, const uint8_t origin[32],
                     const int32_t *ids, uint32_t most, uint32_t grain, uint32_t length)
{
    uint32_t n = longest(x, origin, ids, most, grain, length);
    struct kv_chain *chain = kv_seq_chain(s);
    if (n == 0)
        return 0;
    kv_seq_borrow(s, n, length ? length : n * KV_BLOCK, x->pages);
    memcpy(chain->hash, origin, 32);
    for (chain->pages = 0; chain->pages < n; chain->pages++)
        key_next(chain->hash, ids + (size_t)chain->pages * KV_BLOCK);
    return n * KV_BLOCK;
}

uint32_t kv_prefix_take(struct kv_prefix *x, struct kv_seq *s, const uint8_t origin[32],
                        const int32_t *ids, uint32_t most, uint32_t grain)
{
    uint32_t n = take(x, s, origin, ids, most, grain, 0);
    kv_seq_advance(s, n);
    return n;
}

uint32_t kv_prefix_take_import(struct kv_prefix *x, struct kv_seq *s, const uint8_t origin[32],
                               const int32_t *ids, uint32_t length)
{
    return take(x, s, origin, ids, length - 1, KV_BLOCK, length);
}

void kv_prefix_put(struct kv_prefix *x, struct kv_seq *s, const uint8_t origin[32],
                   const int32_t *ids, uint32_t n)
{
    struct kv_chain *chain = kv_seq_chain(s);
    if (chain->pages == 0)
        memcpy(chain->hash, origin, 32);
    for (; chain->pages < n / KV_BLOCK; chain->pages++) {
        key_next(chain->hash, ids + (size_t)chain->pages * KV_BLOCK);
        struct entry *have = find(x, chain->hash);
        for (int g = 0; g < KV_N_GROUPS; g++) {
            int32_t block = kv_seq_page(s, (enum kv_group)g, chain->pages);
            if (block < 0 || (have && have->block[g] >= 0))
                continue;
            if (!have)
                have = add(x, chain->hash);
            have->block[g] = block;
            kv_blocks_keep(&x->pool->group[g], block, (int32_t)(have - x->entries));
        }
    }
}
