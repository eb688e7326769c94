/* SPDX-License-Identifier: Apache-2.0 */
/* Inside kv: the pool's blocks, the address of a row, element conversion. */
#ifndef KV_KV_PRIV_H
#define KV_KV_PRIV_H

#include "base/base.h"
#include "kv/kv.h"

enum kv_group { KV_GLOBAL = 0, KV_LOCAL = 1, KV_N_GROUPS = 2 };

/* One group's blocks. Block b starts at base + b * block_bytes and holds, for each layer of the
 * group in ascending order, K then V as [kv_heads, KV_BLOCK, head_dim]. */
struct kv_blocks {
    uint8_t *base;
    uint64_t block_bytes;
    uint32_t n_layers; /* of this group; 0 = the group has no blocks and needs none */
    uint32_t n_blocks;
    uint32_t n_free;
    int32_t *free;        /* [n_blocks] a stack of ids: the block given back last goes out first */
    uint32_t *refs;       /* [n_blocks] 0 = free */
    uint32_t *generation; /* [n_blocks] 0 = never given out */
    struct baton_kv_layout layout;
    /* The prefix index is one owner more of a block that it keeps. Those that have no other are
     * idle: in a list by when they became so, and taken, oldest first, when none is free. */
    struct kv_prefix *prefix; /* NULL = none */
    int32_t *entry;           /* [n_blocks] of the index, that keeps it; -1 = none */
    int32_t *older, *newer;   /* [n_blocks] in the list; -1 = none */
    int32_t oldest, newest;   /* -1 = none is idle */
    uint32_t n_idle;
};

struct kv_pool {
    struct kv_geometry geometry;
    struct kv_blocks group[KV_N_GROUPS];
    uint8_t *memory;
    size_t memory_bytes;
    uint32_t table_blocks; /* entries of a sequence's table: its longest length in blocks */
    uint32_t n_open;       /* sequences */
};

/* Take a free block, or else the one that is idle for longest (reference count 1, generation
 * raised); -1 where there is neither. */
int32_t kv_blocks_take(struct kv_blocks *b);
/* One more owner of a block in use. */
void kv_blocks_share(struct kv_blocks *b, int32_t id);
/* One owner less; the last one frees it. */
void kv_blocks_put(struct kv_blocks *b, int32_t id);
/* The index becomes an owner of a block in use, or ceases to be. */
void kv_blocks_keep(struct kv_blocks *b, int32_t id, int32_t entry);
void kv_blocks_unkeep(struct kv_blocks *b, int32_t id);

/* prefix.c: let go of an idle block. */
void kv_prefix_evict(struct kv_prefix *x, const struct kv_blocks *b, int32_t id);

/* seq.c, for the index. How far a sequence's pages are indexed, and the hash of what they hold. */
struct kv_chain {
    uint32_t pages;
    uint8_t hash[32];
};
struct kv_chain *kv_seq_chain(struct kv_seq *s);
struct kv_pool *kv_seq_pool(const struct kv_seq *s);
/* The block with page i, -1 where the sequence does not hold all of its positions. */
int32_t kv_seq_page(const struct kv_seq *s, enum kv_group group, uint32_t i);
/* First page that a group needs when the next query stands at `position`. */
uint32_t kv_needed_page(const struct kv_geometry *g, enum kv_group group, uint32_t position);
/* Begin an empty sequence with pages of others: [0, n_pages), those of each group from where a
 * query at `position` needs them. pages[group] is [n_pages]. */
void kv_seq_borrow(struct kv_seq *s, uint32_t n_pages, uint32_t position,
                   int32_t *const pages[KV_N_GROUPS]);

const struct kv_geometry *kv_seq_geometry(const struct kv_seq *s);

static inline enum kv_group kv_group_of(const struct kv_geometry *g, uint32_t layer)
{
    return g->local[layer] ? KV_LOCAL : KV_GLOBAL;
}

/* Bytes of an element; 0 for a dtype that has no elements on the wire (BATON_I8 included). */
static inline size_t kv_dtype_bytes(uint32_t dtype)
{
    return dtype == BATON_F32 ? 4 : dtype == BATON_F16 || dtype == BATON_BF16 ? 2 : 0;
}

static inline uint8_t *kv_view_base(const struct baton_kv_view *v, enum kv_which which)
{
    return which == KV_K ? v->k : v->v;
}

/* Bases of dense views may lie before their buffer (positions are absolute), so addresses are
 * computed as numbers: only the final one need be inside an object. */
static inline uint8_t *kv_at(const uint8_t *base, int64_t offset)
{
    return (uint8_t *)((uintptr_t)base + (uintptr_t)offset);
}

/* Does the view hold (write: have room for) positions [first, first+n)? BATON_ERR_USAGE if not. */
int kv_view_check(const struct baton_kv_view *v, enum kv_which which, uint32_t first, uint32_t n,
                  bool write, struct baton_error *e);

/* n elements from src to dst, strides in bytes, converting between dtypes by one rounding to
 * nearest even; equal dtypes are copied bit by bit, NaN payloads included. */
void kv_convert(uint8_t *dst, uint32_t dst_dtype, int64_t dst_stride, const uint8_t *src,
                uint32_t src_dtype, int64_t src_stride, uint32_t n);
/* n positions of one head, from the row at src to the row at dst, converting; padding of dst is
 * zeroed. */
void kv_copy_rows(uint8_t *dst, const struct baton_kv_layout *dl, const uint8_t *src,
                  const struct baton_kv_layout *sl, uint32_t n);
/* One row of one head where either side is int8 (int8.c); padding of dst is zeroed. */
void kv_int8_copy_row(uint8_t *dst, const struct baton_kv_layout *dl, const uint8_t *src,
                      const struct baton_kv_layout *sl);
/* Bytes of an int8 row of one head, its scales included. */
uint32_t kv_int8_row_bytes(uint32_t head_dim_padded, uint32_t scale_block);
#define KV_INT8_MAX_BLOCK 1024u /* elements of a scale */
/* What kv_copy refuses. */
int kv_copy_check(const struct baton_kv_view *dst, const struct baton_kv_view *src,
                  enum kv_which which, uint32_t first, uint32_t n, struct baton_error *e);
/* Index of the first of n dense elements that is infinite or NaN; n where none is. */
size_t kv_first_not_finite(const uint8_t *data, uint32_t dtype, size_t n);

#endif
