/* SPDX-License-Identifier: Apache-2.0 */
/* The page pool: two groups of blocks in one mapping, reference counts, generations. */
#include "kv/kv_priv.h"

#include <stdlib.h>
#include <string.h>

#define MAX_HEADS 65535u
#define MAX_HEAD_DIM 65535u

static uint64_t slot_bytes(const struct kv_geometry *g)
{
    return (uint64_t)g->kv_heads * KV_BLOCK * g->head_dim * kv_dtype_bytes(g->dtype);
}

static uint32_t count_local(const struct kv_geometry *g)
{
    uint32_t n = 0;
    for (uint32_t l = 0; l < g->n_layers; l++)
        n += g->local[l] != 0;
    return n;
}

void kv_geometry_bytes(const struct kv_geometry *g, uint64_t *global_block, uint64_t *local_block)
{
    uint32_t n_local = count_local(g);
    *global_block = 2 * slot_bytes(g) * (g->n_layers - n_local);
    *local_block = 2 * slot_bytes(g) * n_local;
}

uint32_t kv_retained_first(const struct kv_geometry *g, uint32_t layer, uint32_t n_tokens)
{
    /* The next query, at position n_tokens, still sees the window - 1 positions before it. */
    if (!g->local[layer] || n_tokens < g->window)
        return 0;
    return n_tokens - g->window + 1;
}

static int geometry_check(const struct kv_geometry *g, struct baton_error *e)
{
    if (g->n_layers == 0 || g->n_layers > KV_MAX_LAYERS)
        return base_fail(e, BATON_ERR_USAGE, "KV geometry: %u layers, 1 to %u are possible",
                         g->n_layers, KV_MAX_LAYERS);
    if (g->kv_heads == 0 || g->kv_heads > MAX_HEADS || g->head_dim == 0 ||
        g->head_dim > MAX_HEAD_DIM)
        return base_fail(e, BATON_ERR_USAGE, "KV geometry: %u heads of dimension %u", g->kv_heads,
                         g->head_dim);
    if (kv_dtype_bytes(g->dtype) == 0)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "KV pages of dtype %u", g->dtype);
    if (count_local(g) > 0 && g->window == 0)
        return base_fail(e, BATON_ERR_USAGE, "KV geometry: local layers without a window");
    return 0;
}

static void layout_fill(struct kv_blocks *b, const struct kv_geometry *g)
{
    int64_t row = (int64_t)g->head_dim * (int64_t)kv_dtype_bytes(g->dtype);
    b->layout = (struct baton_kv_layout){
        .version = 1,
        .dtype = (uint8_t)g->dtype,
        .kind = BATON_KV_PAGED,
        .alignment = 64,
        .kv_heads = g->kv_heads,
        .head_dim = g->head_dim,
        .head_dim_padded = g->head_dim,
        .block = KV_BLOCK,
        .stride_block = (int64_t)b->block_bytes,
        .stride_head = row * KV_BLOCK,
        .stride_position = row,
        .stride_dim = (int64_t)kv_dtype_bytes(g->dtype),
    };
}

static int blocks_init(struct kv_blocks *b, const struct kv_geometry *g, uint32_t n_layers,
                       uint32_t n_blocks, struct baton_error *e)
{
    b->n_layers = n_layers;
    b->n_blocks = n_layers ? n_blocks : 0;
    b->block_bytes = 2 * slot_bytes(g) * n_layers;
    layout_fill(b, g);
    b->free = base_try_alloc(b->n_blocks + 1u, sizeof *b->free, e);
    b->refs = base_try_alloc(b->n_blocks + 1u, sizeof *b->refs, e);
    b->generation = base_try_alloc(b->n_blocks + 1u, sizeof *b->generation, e);
    b->entry = base_try_alloc(b->n_blocks + 1u, sizeof *b->entry, e);
    b->older = base_try_alloc(b->n_blocks + 1u, sizeof *b->older, e);
    b->newer = base_try_alloc(b->n_blocks + 1u, sizeof *b->newer, e);
    if (!b->free || !b->refs || !b->generation || !b->entry || !b->older || !b->newer)
        return BATON_ERR_NOMEM;
    b->oldest = b->newest = -1;
    for (uint32_t i = 0; i < b->n_blocks; i++) {
        b->free[i] = (int32_t)(b->n_blocks - 1 - i); /* block 0 goes out first */
        b->entry[i] = -1;
    }
    b->n_free = b->n_blocks;
    return 0;
}

/* Blocks that n_seqs sequences of together n positions can touch, whatever their lengths. */
static uint64_t blocks_of(uint64_t n, uint64_t n_seqs)
{
    return (n + n_seqs * (KV_BLOCK - 1)) / KV_BLOCK;
}

/* Blocks that `n` consecutive positions can touch, wherever they start. */
static uint64_t blocks_unaligned(uint64_t n)
{
    return (n + KV_BLOCK - 2) / KV_BLOCK + 1;
}

static int map_memory(struct kv_pool *p, struct baton_error *e)
{
    unsigned __int128 bytes = 0;
    for (int g = 0; g < KV_N_GROUPS; g++)
        bytes += (unsigned __int128)p->group[g].n_blocks * p->group[g].block_bytes;
    uint64_t all = bytes > UINT64_MAX / 2 ? UINT64_MAX / 2 : (uint64_t)bytes;
    uint64_t available = base_memory_available();
    struct baton_error why;
    if ((available && all > available) || !(p->memory = base_map_alloc((size_t)all, false, &why)))
        return base_fail(e, BATON_ERR_NOMEM, "KV pool: %llu bytes asked for, %llu available",
                         (unsigned long long)all, (unsigned long long)available);
    p->memory_bytes = (size_t)all;
    p->group[KV_GLOBAL].base = p->memory;
    p->group[KV_LOCAL].base = p->memory +
                              p->group[KV_GLOBAL].n_blocks * p->group[KV_GLOBAL].block_bytes;
    return 0;
}

void kv_pool_size(const struct kv_geometry *g, uint32_t n_tokens, uint32_t n_seqs, uint32_t chunk,
                  struct kv_pool_size *out)
{
    uint64_t a_seq = blocks_unaligned((uint64_t)g->window - 1 + chunk);
    uint64_t longest = blocks_of(n_tokens, 1);
    out->global_blocks = blocks_of(n_tokens, n_seqs);
    out->local_blocks = count_local(g) ? n_seqs * (a_seq < longest ? a_seq : longest) : 0;
}

static int pool_init(struct kv_pool *p, const struct kv_pool_size *size, struct baton_error *e)
{
    const struct kv_geometry *g = &p->geometry;
    if (size->global_blocks > INT32_MAX || size->local_blocks > INT32_MAX)
        return base_fail(e, BATON_ERR_NOMEM, "KV pool: %llu and %llu blocks asked for",
                         (unsigned long long)size->global_blocks,
                         (unsigned long long)size->local_blocks);
    uint32_t local_layers = count_local(g);
    p->table_blocks = (uint32_t)size->global_blocks;
    int rc = blocks_init(&p->group[KV_GLOBAL], g, g->n_layers - local_layers, p->table_blocks, e);
    if (rc == 0)
        rc = blocks_init(&p->group[KV_LOCAL], g, local_layers, (uint32_t)size->local_blocks, e);
    return rc ? rc : map_memory(p, e);
}

int kv_pool_open(struct kv_pool **out, const struct kv_geometry *g, uint32_t n_tokens,
                 uint32_t n_seqs, uint32_t chunk, struct baton_error *e)
{
    struct kv_pool_size size;
    int rc = geometry_check(g, e);
    if (rc)
        return rc;
    if (n_tokens == 0 || n_seqs == 0 || chunk == 0 || n_tokens > INT32_MAX)
        return base_fail(e, BATON_ERR_USAGE, "KV pool for %u positions, %u sequences, chunks of %u",
                         n_tokens, n_seqs, chunk);
    kv_pool_size(g, n_tokens, n_seqs, chunk, &size);
    return kv_pool_open_sized(out, g, &size, e);
}

int kv_pool_open_sized(struct kv_pool **out, const struct kv_geometry *g,
                       const struct kv_pool_size *size, struct baton_error *e)
{
    int rc = geometry_check(g, e);
    if (rc)
        return rc;
    struct kv_pool *p = base_try_alloc(1, sizeof *p, e);
    if (!p)
        return BATON_ERR_NOMEM;
    p->geometry = *g;
    rc = pool_init(p, size, e);
    if (rc) {
        kv_pool_close(p);
        return rc;
    }
    *out = p;
    return 0;
}

void kv_pool_close(struct kv_pool *p)
{
    if (!p)
        return;
    if (kv_pool_used(p) > 0 || p->n_open > 0)
        base_log(BASE_LOG_ERROR, "KV pool closed with %u blocks and %u sequences still out",
                 kv_pool_used(p), p->n_open);
    for (int g = 0; g < KV_N_GROUPS; g++) {
        free(p->group[g].free);
        free(p->group[g].refs);
        free(p->group[g].generation);
        free(p->group[g].entry);
        free(p->group[g].older);
        free(p->group[g].newer);
    }
    if (p->memory)
        base_map_free(p->memory, p->memory_bytes);
    free(p);
}

const struct kv_geometry *kv_pool_geometry(const struct kv_pool *p)
{
    return &p->geometry;
}

uint64_t kv_pool_bytes(const struct kv_pool *p)
{
    return p->memory_bytes;
}

void *kv_pool_memory(const struct kv_pool *p)
{
    return p->memory;
}

uint32_t kv_pool_used(const struct kv_pool *p)
{
    uint32_t used = 0;
    for (int g = 0; g < KV_N_GROUPS; g++)
        used += p->group[g].n_blocks - p->group[g].n_free - p->group[g].n_idle;
    return used;
}

uint32_t kv_pool_idle(const struct kv_pool *p)
{
    return p->group[KV_GLOBAL].n_idle + p->group[KV_LOCAL].n_idle;
}

uint32_t kv_pool_capacity(const struct kv_pool *p)
{
    return p->group[KV_GLOBAL].n_blocks + p->group[KV_LOCAL].n_blocks;
}

void kv_pool_poison(struct kv_pool *p)
{
    for (int g = 0; g < KV_N_GROUPS; g++) {
        struct kv_blocks *b = &p->group[g];
        for (uint32_t i = 0; i < b->n_free; i++)
            memset(b->base + (uint64_t)b->free[i] * b->block_bytes, 0xFF, b->block_bytes);
    }
}

int32_t kv_blocks_take(struct kv_blocks *b)
{
    if (b->n_free == 0 && b->n_idle > 0)
        kv_prefix_evict(b->prefix, b, b->oldest);
    if (b->n_free == 0)
        return -1;
    int32_t id = b->free[--b->n_free];
    b->refs[id] = 1;
    if (++b->generation[id] == 0) /* 0 means "none": skip it when the counter comes round */
        b->generation[id] = 1;
    return id;
}

/* ---- idle blocks -------------------------------------------------------------------------- */

static bool is_idle(const struct kv_blocks *b, int32_t id)
{
    return b->entry[id] >= 0 && b->refs[id] == 1;
}

static void idle_add(struct kv_blocks *b, int32_t id)
{
    b->older[id] = b->newest;
    b->newer[id] = -1;
    if (b->newest >= 0)
        b->newer[b->newest] = id;
    else
        b->oldest = id;
    b->newest = id;
    b->n_idle++;
}

static void idle_remove(struct kv_blocks *b, int32_t id)
{
    if (b->older[id] >= 0)
        b->newer[b->older[id]] = b->newer[id];
    else
        b->oldest = b->newer[id];
    if (b->newer[id] >= 0)
        b->older[b->newer[id]] = b->older[id];
    else
        b->newest = b->older[id];
    b->n_idle--;
}

/* ---- owners ------------------------------------------------------------------------------- */

void kv_blocks_share(struct kv_blocks *b, int32_t id)
{
    if (is_idle(b, id))
        idle_remove(b, id);
    b->refs[id]++;
}

void kv_blocks_put(struct kv_blocks *b, int32_t id)
{
    if (--b->refs[id] == 0)
        b->free[b->n_free++] = id;
    else if (is_idle(b, id))
        idle_add(b, id);
}

void kv_blocks_keep(struct kv_blocks *b, int32_t id, int32_t entry)
{
    b->entry[id] = entry;
    b->refs[id]++;
}

void kv_blocks_unkeep(struct kv_blocks *b, int32_t id)
{
    if (is_idle(b, id))
        idle_remove(b, id);
    b->entry[id] = -1;
    kv_blocks_put(b, id);
}
