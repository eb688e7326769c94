/* SPDX-License-Identifier: Apache-2.0 */
/* Random layouts in guarded buffers, and the address formula once more, element by element. */
#ifndef TESTS_KV_SHAPES_H
#define TESTS_KV_SHAPES_H

#include "../test.h"
#include "base/base.h"
#include "kv/kv.h"

#define GUARD 64u
#define MAX_POSITIONS 400u

static inline uint32_t shape_bytes(uint32_t dtype)
{
    return dtype == BATON_F32 ? 4 : dtype == BATON_I8 ? 1 : 2;
}

/* Where the scale of dim d of an int8 row lies, counted from the row's start. */
static inline size_t shape_scale(const struct baton_kv_layout *l, uint32_t d)
{
    return ((size_t)l->head_dim_padded + 3) / 4 * 4 + 4 * (size_t)(d / l->scale_block);
}

/* A view of one sequence with memory of its own, holding [view.first, view.end). */
struct shape {
    struct baton_kv_layout l;
    struct baton_kv_view view;
    uint8_t *memory[2]; /* the region of K (or of both) and of V; GUARD bytes at both ends */
    size_t bytes[2];    /* guards included; 0 = no second region */
    int64_t origin;     /* offset of (position 0, head 0, dim 0) in its region; may be negative */
    int32_t *blocks;    /* a copy of the table, so that the view may be changed */
};

/* What the formula in baton/device.h says, as an offset into memory[*region]. */
static inline size_t shape_offset(const struct shape *s, enum kv_which which, uint32_t p,
                                  uint32_t h, uint32_t d, int *region)
{
    const struct baton_kv_layout *l = &s->l;
    int64_t at = s->origin;
    uint32_t row = p;
    if (l->kind == BATON_KV_RING)
        row = p % l->rows;
    else if (l->kind == BATON_KV_SLID)
        row = p - (s->view.end > l->rows ? s->view.end - l->rows : 0);
    else if (l->block) {
        row = p % l->block;
        at += s->blocks[p / l->block] * l->stride_block;
    }
    at += row * l->stride_position + h * l->stride_head + d * l->stride_dim;
    *region = l->joint ? 0 : (int)which;
    return (size_t)(at + (l->joint && which == KV_V ? l->stride_kv : 0));
}

static inline uint8_t *shape_at(const struct shape *s, enum kv_which which, uint32_t p, uint32_t h,
                                uint32_t d)
{
    int region;
    size_t at = shape_offset(s, which, p, h, d, &region);
    assert_true(at >= GUARD && at + shape_bytes(s->l.dtype) + GUARD <= s->bytes[region]);
    return s->memory[region] + at;
}

static inline void shape_fill(struct shape *s, uint64_t *seed)
{
    for (int r = 0; r < 2; r++)
        for (size_t i = 0; i < s->bytes[r]; i++)
            s->memory[r][i] = (uint8_t)(test_random(seed) >> 40);
}

/* Nest the axes in a random order with random gaps; returns the bytes of one region. */
static inline int64_t shape_strides(struct baton_kv_layout *l, uint32_t n_rows, uint32_t n_blocks,
                                    uint64_t *seed)
{
    int64_t *stride[5] = {&l->stride_dim, &l->stride_position, &l->stride_head, &l->stride_kv,
                          &l->stride_block};
    uint32_t count[5] = {l->head_dim_padded, n_rows, l->kv_heads, l->joint ? 2 : 0,
                         l->kind == BATON_KV_PAGED && l->block ? n_blocks : 0};
    int order[5] = {0, 1, 2, 3, 4};
    int64_t element = shape_bytes(l->dtype), extent = element;
    if (l->dtype == BATON_I8) { /* bytes, then scales: a row is the innermost thing */
        l->stride_dim = 1;
        count[0] = 0;
        element = 4;
        extent = (int64_t)shape_scale(l, l->head_dim_padded - 1) + 4;
    }
    bool plain = test_range(seed, 0, 3) == 0; /* [head][position][dim]: the fast path */
    for (uint32_t i = 4; i > 0 && !plain; i--) {
        uint32_t j = test_range(seed, 0, i);
        int x = order[i];
        order[i] = order[j];
        order[j] = x;
    }
    for (int i = 0; i < 5; i++) {
        int axis = order[i];
        if (count[axis] == 0)
            continue;
        int64_t gap = plain || test_range(seed, 0, 1) ? 0 : test_range(seed, 0, 9) * element;
        int64_t to = axis == 4 ? l->alignment : element;
        *stride[axis] = (extent + gap + to - 1) / to * to;
        extent = *stride[axis] * count[axis];
    }
    return extent;
}

static inline void shape_table(struct shape *s, uint32_t n_blocks, uint32_t end, uint64_t *seed)
{
    uint32_t block = s->l.block, n = block ? (end + block - 1) / block : 1;
    uint32_t lo = block ? s->view.first / block : 0;
    int32_t *ids = malloc(n_blocks * sizeof *ids);
    for (uint32_t i = 0; i < n_blocks; i++) {
        uint32_t j = test_range(seed, 0, i);
        ids[i] = ids[j];
        ids[j] = (int32_t)i;
    }
    s->blocks = malloc(n * sizeof *s->blocks);
    for (uint32_t i = 0; i < n; i++)
        s->blocks[i] = i < lo ? -1 : ids[i - lo];
    s->view.blocks = s->blocks;
    s->view.n_blocks = n;
    free(ids);
}

static inline uint32_t random_dtype(uint64_t *seed)
{
    return test_range(seed, BATON_F32, BATON_BF16);
}

/* A random layout of this geometry that holds at least [first, first+n), and as many positions
 * around as its kind allows. */
static inline struct shape shape_open(uint32_t dtype, uint32_t heads, uint32_t dim, uint32_t first,
                                      uint32_t n, uint64_t *seed)
{
    struct shape s = {0};
    struct baton_kv_layout *l = &s.l;
    uint32_t before = test_range(seed, 0, 20), n_rows, n_blocks = 0;
    *l = (struct baton_kv_layout){.version = 1,
                                  .dtype = (uint8_t)dtype,
                                  .kv_heads = heads,
                                  .head_dim = dim,
                                  .head_dim_padded = dim};
    l->kind = (uint8_t)test_range(seed, BATON_KV_PAGED, BATON_KV_SLID);
    l->joint = (uint8_t)test_range(seed, 0, 1);
    l->alignment = (uint16_t)(1u << test_range(seed, 0, 8));
    if (test_range(seed, 0, 1))
        l->head_dim_padded += test_range(seed, 0, 5);
    if (dtype == BATON_I8)
        l->scale_block = test_range(seed, 0, 1) ? test_range(seed, 1, 40) : l->head_dim_padded;
    s.view.first = first > before ? first - before : 0;
    s.view.end = first + n + test_range(seed, 0, 20);
    uint32_t held = s.view.end - s.view.first;
    n_rows = held;
    if (l->kind != BATON_KV_PAGED) {
        n_rows = l->rows = held + test_range(seed, 0, 30);
    } else if (test_range(seed, 0, 3)) {
        l->block = test_range(seed, 0, 4) ? test_range(seed, 1, 70) : test_range(seed, 1, 1024);
        n_rows = l->block;
        n_blocks = held / l->block + 2 + test_range(seed, 0, 3);
    }
    int64_t bytes = shape_strides(l, n_rows, n_blocks, seed);
    s.origin = GUARD;
    if (l->kind == BATON_KV_PAGED && l->block == 0)
        s.origin -= l->stride_position * s.view.first; /* only what is held has memory */
    for (int r = 0; r < (l->joint ? 1 : 2); r++) {
        s.bytes[r] = (size_t)bytes + 2 * GUARD;
        s.memory[r] = malloc(s.bytes[r]);
    }
    shape_table(&s, n_blocks ? n_blocks : 1, s.view.end, seed);
    s.view.k = (uint8_t *)((uintptr_t)s.memory[0] + (uintptr_t)s.origin);
    s.view.v = (uint8_t *)((uintptr_t)s.memory[l->joint ? 0 : 1] + (uintptr_t)s.origin +
                           (uintptr_t)l->stride_kv);
    shape_fill(&s, seed);
    return s; /* the caller sets view.layout: the record moves with the struct */
}

static inline void shape_close(struct shape *s)
{
    free(s->memory[0]);
    free(s->memory[1]);
    free(s->blocks);
}

#endif
