/* SPDX-License-Identifier: Apache-2.0 */
/* A paged cache as a test wants it: random layout, shuffled block table, everything poisoned.
 *
 * Split or joint, heads or positions outermost in a block, rows padded; unused blocks lie between
 * the used ones. All bytes start as 0xFF, which is NaN in float32 and in bf16, so that reading what
 * nobody wrote shows, and so does writing where nothing belongs. */
#ifndef TESTS_DEVICE_PAGES_H
#define TESTS_DEVICE_PAGES_H

#include <baton/device.h>

#include "../test.h"

struct pages {
    struct baton_kv_layout layout; /* of every layer */
    struct baton_kv_view *views;   /* [n_layers] */
    uint32_t n_layers;
    int32_t *table; /* [n_blocks], shared by all layers */
    uint8_t *memory;
    size_t bytes;
};

static inline void pages_close(struct pages *p)
{
    free(p->views);
    free(p->table);
    free(p->memory);
}

/* n_blocks different numbers of [0, n_slots), shuffled. */
static inline void pages_table(struct pages *p, uint64_t *seed, uint32_t n_blocks, uint32_t n_slots)
{
    p->table = calloc(n_slots, sizeof *p->table);
    assert_non_null(p->table);
    for (uint32_t i = 0; i < n_slots; i++) {
        uint32_t j = test_range(seed, 0, i);
        p->table[i] = p->table[j];
        p->table[j] = (int32_t)i;
    }
}

static inline void pages_layout(struct baton_kv_layout *l, uint64_t *seed, uint32_t dtype,
                                uint32_t kv_heads, uint32_t head_dim, uint32_t block)
{
    int64_t element = dtype == BATON_F32 ? 4 : 2;
    *l = (struct baton_kv_layout){.version = 1, .kind = BATON_KV_PAGED, .alignment = 4};
    l->dtype = (uint8_t)dtype;
    l->joint = test_range(seed, 0, 1);
    l->kv_heads = kv_heads;
    l->head_dim = head_dim;
    l->head_dim_padded = head_dim + test_range(seed, 0, 3);
    l->block = block;
    l->stride_dim = element * test_range(seed, 1, 2); /* 2: elements with a gap between them */
    int64_t row = l->stride_dim * l->head_dim_padded;
    bool heads_outside = test_range(seed, 0, 1);
    l->stride_position = heads_outside ? row : row * kv_heads;
    l->stride_head = heads_outside ? row * block : row;
    int64_t one = row * kv_heads * block;
    l->stride_kv = l->joint ? one : 0;
    l->stride_block = l->joint ? 2 * one : one;
}

static inline void pages_open(struct pages *p, uint64_t *seed, uint32_t dtype, uint32_t n_layers,
                              uint32_t kv_heads, uint32_t head_dim, uint32_t block,
                              uint32_t n_positions)
{
    uint32_t n_blocks = (n_positions + block - 1) / block, n_slots = n_blocks + 3;
    memset(p, 0, sizeof *p);
    pages_layout(&p->layout, seed, dtype, kv_heads, head_dim, block);
    pages_table(p, seed, n_blocks, n_slots);
    size_t region = (size_t)p->layout.stride_block * n_slots;
    p->n_layers = n_layers;
    p->bytes = region * n_layers * (p->layout.joint ? 1 : 2);
    p->memory = malloc(p->bytes);
    p->views = calloc(n_layers, sizeof *p->views);
    assert_non_null(p->memory);
    assert_non_null(p->views);
    memset(p->memory, 0xFF, p->bytes);
    for (uint32_t l = 0; l < n_layers; l++) {
        uint8_t *k = p->memory + region * l * (p->layout.joint ? 1 : 2);
        uint8_t *v = p->layout.joint ? k + p->layout.stride_kv : k + region;
        p->views[l] = (struct baton_kv_view){&p->layout, k, v, p->table, n_blocks, 0, 0};
    }
}

static inline uint8_t *pages_at(const struct pages *p, uint32_t layer, int which, uint32_t position,
                                uint32_t head, uint32_t d)
{
    const struct baton_kv_layout *l = &p->layout;
    uint8_t *base = which ? p->views[layer].v : p->views[layer].k;
    return base + p->table[position / l->block] * l->stride_block +
           (position % l->block) * l->stride_position + head * l->stride_head + d * l->stride_dim;
}

static inline float pages_get(const struct pages *p, uint32_t layer, int which, uint32_t position,
                              uint32_t head, uint32_t d)
{
    const uint8_t *at = pages_at(p, layer, which, position, head, d);
    union {
        uint32_t u;
        float f;
    } x;
    uint16_t half;
    if (p->layout.dtype == BATON_F32) {
        memcpy(&x.u, at, 4);
    } else {
        memcpy(&half, at, 2);
        x.u = (uint32_t)half << 16;
    }
    return x.f;
}

/* Positions [0, n) are stored from now on, in every layer. */
static inline void pages_set_end(struct pages *p, uint32_t n)
{
    for (uint32_t l = 0; l < p->n_layers; l++)
        p->views[l].end = n;
}

/* Every byte that belongs to no element of the positions [0, n) still holds its poison. */
static inline void pages_check_poison(const struct pages *p, uint32_t n)
{
    size_t element = p->layout.dtype == BATON_F32 ? 4 : 2;
    uint8_t *copy = malloc(p->bytes);
    assert_non_null(copy);
    memcpy(copy, p->memory, p->bytes);
    for (uint32_t l = 0; l < p->n_layers; l++)
        for (uint32_t i = 0; i < n * p->layout.kv_heads * 2; i++)
            for (uint32_t d = 0; d < p->layout.head_dim; d++)
                memset(copy + (pages_at(p, l, (int)(i & 1), (i >> 1) / p->layout.kv_heads,
                                        (i >> 1) % p->layout.kv_heads, d) -
                               p->memory),
                       0xFF, element);
    size_t i = 0;
    while (i < p->bytes && copy[i] == 0xFF)
        i++;
    assert_int_equal(i, p->bytes);
    free(copy);
}

#endif
