/* SPDX-License-Identifier: Apache-2.0 */
/* npu: K and V as outputs of a part, token by token, and their way into the caller's pages. */
#include <stdlib.h>
#include <string.h>

#include "device/npu/npu_priv.h"

#define FAULT_BLOCK 16u /* positions of the blocks that kv-block-order exchanges */

/* ---- memory -------------------------------------------------------------------------------- */

/* bf16 pages [head][64][dim], as cpu reads them. */
static void lay_pages(struct npu_output *o, uint32_t kv_heads, uint32_t head_dim)
{
    struct baton_kv_layout *l = &o->layout;
    memset(l, 0, sizeof *l);
    l->version = 1;
    l->dtype = BATON_BF16;
    l->kind = BATON_KV_PAGED;
    l->alignment = 64;
    l->kv_heads = kv_heads;
    l->head_dim = l->head_dim_padded = head_dim;
    l->block = NPU_PAGE;
    l->stride_dim = 2;
    l->stride_position = 2 * (int64_t)head_dim;
    l->stride_head = l->stride_position * NPU_PAGE;
    l->stride_block = l->stride_head * kv_heads;
}

static bool sizes(const struct npu_plan *p, uint32_t width, struct npu_output *o)
{
    size_t row = 2 * (size_t)p->kv_heads * p->head_dim;
    return base_mul(row, width, &o->kv_bytes) &&
           base_mul(o->kv_bytes, p->max_layers, &o->kv_bytes) &&
           base_mul(o->kv_bytes, 2, &o->pages_bytes);
}

int device_npu_output_open(struct npu_output *o, const struct npu_plan *p, uint32_t n_layers,
                           uint32_t width, struct baton_error *e)
{
    uint32_t blocks = width / NPU_PAGE;
    if (o->width == width)
        return 0;
    device_npu_output_close(o);
    if (!sizes(p, width, o))
        return base_fail(e, BATON_ERR_NOMEM, "npu: K and V of a part of %u layers and %u rows",
                         p->max_layers, width);
    o->k = base_map_alloc(o->kv_bytes, false, e);
    o->v = o->k ? base_map_alloc(o->kv_bytes, false, e) : NULL;
    o->pages = o->v ? base_map_alloc(o->pages_bytes, false, e) : NULL;
    o->table = o->pages ? base_try_alloc(blocks, sizeof *o->table, e) : NULL;
    o->views = o->table ? base_try_alloc(n_layers, sizeof *o->views, e) : NULL;
    if (!o->views) {
        device_npu_output_close(o);
        return BATON_ERR_NOMEM;
    }
    lay_pages(o, p->kv_heads, p->head_dim);
    for (uint32_t i = 0; i < blocks; i++)
        o->table[i] = (int32_t)i;
    size_t region = (size_t)o->layout.stride_block * blocks;
    for (uint32_t l = 0; l < n_layers; l++) {
        uint8_t *k = o->pages + 2 * region * (l % p->max_layers);
        o->views[l] = (struct baton_kv_view){&o->layout, k, k + region, o->table, blocks, 0, 0};
    }
    o->width = width;
    o->row = p->kv_heads * p->head_dim;
    o->n_layers = n_layers;
    return 0;
}

void device_npu_output_close(struct npu_output *o)
{
    base_map_free(o->k, o->kv_bytes);
    base_map_free(o->v, o->kv_bytes);
    base_map_free(o->pages, o->pages_bytes);
    free(o->table);
    free(o->views);
    memset(o, 0, sizeof *o);
}

/* ---- rows ---------------------------------------------------------------------------------- */

static uint16_t *row_at(const struct npu_output *o, bool v, uint32_t layer, uint32_t row)
{
    return (v ? o->v : o->k) + ((size_t)layer * o->width + row) * o->row;
}

void device_npu_output_take(struct npu_output *o, bool v, uint32_t layer, const float *rows,
                            uint32_t first, uint32_t n)
{
    uint16_t *to = row_at(o, v, layer, first);
    for (size_t i = 0; i < (size_t)n * o->row; i++)
        to[i] = device_f32_to_bf16(rows[i]);
}

/* Which of the prompt's rows leaves at position p of n. */
static uint32_t source_row(uint32_t p, uint32_t n, enum npu_fault fault)
{
    uint32_t other = p ^ FAULT_BLOCK;
    if (fault == NPU_POSITION_SHIFT)
        return p ? p - 1 : 0;
    if (fault == NPU_KV_BLOCK_ORDER && other < n)
        return other;
    return p;
}

static void export_row(const struct npu_output *o, const uint16_t *from, uint8_t *to,
                       const struct baton_kv_layout *l)
{
    for (uint32_t h = 0; h < l->kv_heads; h++, to += l->stride_head)
        for (uint32_t d = 0; d < l->head_dim; d++, from++)
            memcpy(to + (int64_t)d * l->stride_dim, from, sizeof *from);
}

void device_npu_output_export(const struct npu_output *o, uint32_t layer,
                              const struct baton_kv_view *to, uint32_t from, uint32_t n,
                              enum npu_fault fault)
{
    const struct baton_kv_layout *l = to->layout;
    for (uint32_t p = 0; p < n; p++) {
        uint32_t block = l->block ? p / l->block : 0, in = l->block ? p % l->block : p;
        int64_t at = to->blocks[block] * l->stride_block + in * l->stride_position;
        uint32_t row = from + source_row(p, n, fault);
        export_row(o, row_at(o, false, layer, row), to->k + at, l);
        export_row(o, row_at(o, true, layer, row), to->v + at, l);
    }
}
