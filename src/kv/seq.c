/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences: one block table per group, grown by reserve and emptied from the front by windows. */
#include "kv/kv_priv.h"

#include <stdlib.h>
#include <string.h>

/* Tables have their full size from the start and never move: a copy of a view that the I/O thread
 * still reads keeps its table while the engine thread appends further blocks behind. */
struct kv_table {
    int32_t *blocks; /* [pool->table_blocks]; -1 = not held */
    uint32_t begin;  /* first block that may be held; those before were given back */
    uint32_t end;    /* one past the last block reserved */
    uint32_t first;  /* first position stored; may lie inside block `begin` after an import */
};

struct kv_seq {
    struct kv_pool *pool;
    uint32_t length;
    uint32_t borrowed; /* pages, before the sequence was imported */
    struct kv_chain chain;
    struct kv_table table[KV_N_GROUPS];
    struct baton_kv_view *views; /* [n_layers] */
};

static uint32_t ceil_blocks(uint64_t n)
{
    return (uint32_t)((n + KV_BLOCK - 1) / KV_BLOCK);
}

/* Bring what changes with the tables and the length into the views. */
static void views_update(struct kv_seq *s)
{
    const struct kv_geometry *g = &s->pool->geometry;
    for (uint32_t l = 0; l < g->n_layers; l++) {
        const struct kv_table *t = &s->table[kv_group_of(g, l)];
        s->views[l].n_blocks = t->end;
        s->views[l].first = t->first;
        s->views[l].end = s->length;
    }
}

static void views_init(struct kv_seq *s)
{
    const struct kv_geometry *g = &s->pool->geometry;
    uint32_t nth[KV_N_GROUPS] = {0};
    for (uint32_t l = 0; l < g->n_layers; l++) {
        enum kv_group group = kv_group_of(g, l);
        struct kv_blocks *b = &s->pool->group[group];
        uint64_t slot = b->block_bytes / (2 * (uint64_t)b->n_layers);
        s->views[l].layout = &b->layout;
        s->views[l].k = b->base + 2 * slot * nth[group]++;
        s->views[l].v = s->views[l].k + slot;
        s->views[l].blocks = s->table[group].blocks;
    }
    views_update(s);
}

int kv_seq_open(struct kv_pool *p, struct kv_seq **out, struct baton_error *e)
{
    struct kv_seq *s = base_try_alloc(1, sizeof *s, e);
    if (!s)
        return BATON_ERR_NOMEM;
    s->pool = p;
    p->n_open++;
    s->views = base_try_alloc(p->geometry.n_layers, sizeof *s->views, e);
    bool ok = s->views != NULL;
    for (int g = 0; g < KV_N_GROUPS && ok; g++) {
        s->table[g].blocks = base_try_alloc(p->table_blocks, sizeof(int32_t), e);
        ok = s->table[g].blocks != NULL;
        for (uint32_t i = 0; ok && i < p->table_blocks; i++)
            s->table[g].blocks[i] = -1;
    }
    if (!ok) {
        kv_seq_close(s);
        return BATON_ERR_NOMEM;
    }
    views_init(s);
    *out = s;
    return 0;
}

void kv_seq_close(struct kv_seq *s)
{
    if (!s)
        return;
    /* The last page first: a page is of use only with those before it, so it is forgotten first. */
    for (int g = 0; g < KV_N_GROUPS; g++) {
        struct kv_table *t = &s->table[g];
        for (uint32_t i = t->end; i-- > t->begin;)
            if (t->blocks[i] >= 0)
                kv_blocks_put(&s->pool->group[g], t->blocks[i]);
        free(t->blocks);
    }
    s->pool->n_open--;
    free(s->views);
    free(s);
}

uint32_t kv_needed_page(const struct kv_geometry *g, enum kv_group group, uint32_t position)
{
    if (group == KV_GLOBAL || position < g->window)
        return 0;
    return (position - g->window + 1) / KV_BLOCK;
}

static uint32_t needed_from(const struct kv_seq *s, enum kv_group group, uint32_t position)
{
    return kv_needed_page(&s->pool->geometry, group, position);
}

/* Blocks of [begin, from) that can be taken when this sequence lets go of them. */
static uint32_t count_freed(const struct kv_table *t, const struct kv_blocks *b, uint32_t from)
{
    uint32_t n = 0;
    for (uint32_t i = t->begin; i < from && i < t->end; i++)
        n += t->blocks[i] >= 0 && b->refs[t->blocks[i]] - (b->entry[t->blocks[i]] >= 0) == 1;
    return n;
}

static void table_release(struct kv_table *t, struct kv_blocks *b, uint32_t from)
{
    for (; t->begin < from; t->begin++) {
        if (t->begin < t->end && t->blocks[t->begin] >= 0)
            kv_blocks_put(b, t->blocks[t->begin]);
        t->blocks[t->begin] = -1;
    }
    if (t->first < from * KV_BLOCK)
        t->first = from * KV_BLOCK;
    if (t->end < from)
        t->end = from;
}

/* Release blocks before needed_from(position), then hold blocks up to `end` positions. Nothing
 * changes unless every group has enough. */
static int tables_move(struct kv_seq *s, uint32_t position, uint64_t end, struct baton_error *e)
{
    uint32_t to = ceil_blocks(end);
    for (int g = 0; g < KV_N_GROUPS; g++) {
        const struct kv_blocks *b = &s->pool->group[g];
        const struct kv_table *t = &s->table[g];
        uint32_t from = needed_from(s, (enum kv_group)g, position);
        uint32_t have = t->end > from ? t->end : from;
        uint32_t want = to > have ? to - have : 0;
        uint32_t room = b->n_free + b->n_idle + count_freed(t, b, from);
        if (b->n_layers && (want > room || to > s->pool->table_blocks))
            return base_fail(e, BATON_ERR_BUSY, "KV pool: %u %s blocks wanted, %u free of %u", want,
                             g == KV_LOCAL ? "local" : "global", room, b->n_blocks);
    }
    for (int g = 0; g < KV_N_GROUPS; g++) {
        struct kv_blocks *b = &s->pool->group[g];
        struct kv_table *t = &s->table[g];
        if (b->n_layers == 0)
            continue;
        table_release(t, b, needed_from(s, (enum kv_group)g, position));
        for (; t->end < to; t->end++)
            t->blocks[t->end] = kv_blocks_take(b);
    }
    return 0;
}

int kv_seq_reserve(struct kv_seq *s, uint32_t n_rows, struct baton_error *e)
{
    int rc = tables_move(s, s->length, (uint64_t)s->length + n_rows, e);
    if (rc == 0)
        views_update(s);
    return rc;
}

int kv_seq_reserve_import(struct kv_seq *s, uint32_t length, struct baton_error *e)
{
    if (s->length != 0 || s->table[KV_GLOBAL].end > s->borrowed ||
        s->table[KV_LOCAL].end > s->borrowed)
        return base_fail(e, BATON_ERR_USAGE, "an import needs an empty sequence, this one has %u",
                         s->length);
    int rc = tables_move(s, length, length, e);
    if (rc)
        return rc;
    const struct kv_geometry *g = &s->pool->geometry;
    if (s->pool->group[KV_LOCAL].n_layers && length >= g->window)
        s->table[KV_LOCAL].first = length - g->window + 1;
    s->length = length;
    views_update(s);
    return 0;
}

void kv_seq_advance(struct kv_seq *s, uint32_t n_rows)
{
    uint64_t room = UINT64_MAX;
    for (int g = 0; g < KV_N_GROUPS; g++)
        if (s->pool->group[g].n_layers && room > (uint64_t)s->table[g].end * KV_BLOCK)
            room = (uint64_t)s->table[g].end * KV_BLOCK;
    uint64_t to = (uint64_t)s->length + n_rows;
    if (to > room) {
        base_log(BASE_LOG_ERROR, "KV sequence advanced to %llu with room for %llu",
                 (unsigned long long)to, (unsigned long long)room);
        to = room;
    }
    s->length = (uint32_t)to;
    views_update(s);
}

uint32_t kv_seq_length(const struct kv_seq *s)
{
    return s->length;
}

const struct baton_kv_view *kv_seq_views(struct kv_seq *s)
{
    return s->views;
}

uint32_t kv_seq_generation(const struct kv_seq *s, uint32_t layer, uint32_t position)
{
    enum kv_group group = kv_group_of(&s->pool->geometry, layer);
    const struct kv_table *t = &s->table[group];
    uint32_t i = position / KV_BLOCK;
    if (i >= t->end || t->blocks[i] < 0)
        return 0;
    return s->pool->group[group].generation[t->blocks[i]];
}

const struct kv_geometry *kv_seq_geometry(const struct kv_seq *s)
{
    return &s->pool->geometry;
}

uint64_t kv_seq_generations(const struct kv_seq *s)
{
    struct base_sha256 h;
    uint8_t sum[32];
    uint64_t out;
    base_sha256_init(&h);
    for (int g = 0; g < KV_N_GROUPS; g++) {
        const struct kv_table *t = &s->table[g];
        for (uint32_t i = t->begin; i < t->end; i++) {
            int32_t block = t->blocks[i];
            const uint32_t one[4] = {(uint32_t)g, i, (uint32_t)block,
                                     block < 0 ? 0 : s->pool->group[g].generation[block]};
            base_sha256_update(&h, one, sizeof one);
        }
    }
    base_sha256_final(&h, sum);
    memcpy(&out, sum, sizeof out);
    return out;
}

/* ---- pages of others ---------------------------------------------------------------------- */

struct kv_chain *kv_seq_chain(struct kv_seq *s)
{
    return &s->chain;
}

struct kv_pool *kv_seq_pool(const struct kv_seq *s)
{
    return s->pool;
}

int32_t kv_seq_page(const struct kv_seq *s, enum kv_group group, uint32_t i)
{
    const struct kv_table *t = &s->table[group];
    bool whole = i >= t->begin && i < t->end && (uint64_t)i * KV_BLOCK >= t->first &&
                 (uint64_t)(i + 1) * KV_BLOCK <= s->length;
    return whole ? t->blocks[i] : -1;
}

void kv_seq_borrow(struct kv_seq *s, uint32_t n_pages, uint32_t position,
                   int32_t *const pages[KV_N_GROUPS])
{
    for (int g = 0; g < KV_N_GROUPS; g++) {
        struct kv_blocks *b = &s->pool->group[g];
        struct kv_table *t = &s->table[g];
        uint32_t from = needed_from(s, (enum kv_group)g, position);
        if (b->n_layers == 0)
            continue;
        t->begin = from < n_pages ? from : n_pages;
        t->end = n_pages;
        t->first = t->begin * KV_BLOCK;
        for (uint32_t i = t->begin; i < n_pages; i++) {
            kv_blocks_share(b, pages[g][i]);
            t->blocks[i] = pages[g][i];
        }
    }
    s->borrowed = n_pages;
}
