/* SPDX-License-Identifier: Apache-2.0 */
/* npu: atom's memory of K and V, its blocks and its lanes. */
#include <stdlib.h>
#include <string.h>

#include "device/npu/artifact_priv.h"
#include "device/npu/atom_priv.h"

#define TENSOR_BYTES (2u << 20) /* a tensor's size is a multiple of it */

/* ---- layouts -------------------------------------------------------------------------------- */

/* [head][rows of `block`][dim] bf16. */
static struct baton_kv_layout layout_of(const struct atom_kv *kv, uint32_t block)
{
    struct baton_kv_layout l = {
        .version = 1,
        .dtype = BATON_BF16,
        .kind = BATON_KV_PAGED,
        .alignment = 64,
        .kv_heads = kv->kv_heads,
        .head_dim = kv->head_dim,
        .head_dim_padded = kv->head_dim,
        .block = block,
        .stride_dim = 2,
        .stride_position = 2 * (int64_t)kv->head_dim,
    };
    l.stride_head = l.stride_position * block;
    l.stride_block = l.stride_head * kv->kv_heads;
    return l;
}

/* A block of the device is so many tiles of cpu's for each head: the same memory, read as pages. */
static void lay_out(struct atom_kv *kv)
{
    kv->global = layout_of(kv, kv->block);
    kv->tiled = kv->global;
    kv->tiled.block = ATOM_TILE;
    kv->tiled.stride_block = kv->tiled.stride_position * ATOM_TILE;
    kv->window_tiled = layout_of(kv, ATOM_TILE);
    if (!kv->window)
        return;
    kv->slid = layout_of(kv, kv->window);
    kv->slid.kind = BATON_KV_SLID;
    kv->slid.zero_fill = 1;
    kv->slid.block = 0;
    kv->slid.rows = kv->window;
    kv->slid.stride_block = 0;
}

/* Bytes of one tensor as it lies here. */
static size_t tensor_bytes(const struct atom_kv *kv, uint32_t layer)
{
    uint64_t rows = kv->local[layer] ? (uint64_t)(kv->lanes + 1) * kv->window
                                     : (uint64_t)kv->n_blocks * kv->block;
    return (size_t)(2 * rows * kv->kv_heads * kv->head_dim);
}

/* As a device counts it: head_dim rounded up to 64, the tensor to 2 MiB. */
static uint64_t device_bytes(const struct atom_kv *kv)
{
    uint64_t sum = 0, dim = (kv->head_dim + 63) / 64 * 64;
    for (uint32_t l = 0; l < kv->n_layers; l++) {
        uint64_t bytes = tensor_bytes(kv, l) / kv->head_dim * dim;
        sum += 2 * ((bytes + TENSOR_BYTES - 1) / TENSOR_BYTES * TENSOR_BYTES);
    }
    return sum;
}

/* ---- memory --------------------------------------------------------------------------------- */

static int check_memory(const struct atom_device *d, const struct atom_kv *kv,
                        struct baton_error *e)
{
    uint64_t need = device_bytes(kv) + d->weight_bytes;
    if (need <= d->base.base.caps.memory_bytes)
        return 0;
    return base_fail(e, BATON_ERR_NOMEM,
                     "%s: weights of %llu MiB and K and V of %llu MiB do not fit %llu MiB of %u "
                     "logical device%s; devices= sets their number",
                     d->base.base.caps.name, (unsigned long long)(d->weight_bytes >> 20),
                     (unsigned long long)(device_bytes(kv) >> 20),
                     (unsigned long long)(d->base.base.caps.memory_bytes >> 20), d->devices,
                     d->devices > 1 ? "s" : "");
}

static int map_tensors(struct atom_kv *kv, struct baton_error *e)
{
    for (uint32_t l = 0; l < kv->n_layers; l++)
        kv->bytes += 2 * tensor_bytes(kv, l);
    kv->scratch_tiles = kv->window / ATOM_TILE + ATOM_CHUNK_LOCAL / ATOM_TILE + 2;
    kv->scratch_bytes = (size_t)kv->window_tiled.stride_block * kv->scratch_tiles;
    kv->k = base_try_alloc(kv->n_layers, sizeof *kv->k, e);
    kv->v = kv->k ? base_try_alloc(kv->n_layers, sizeof *kv->v, e) : NULL;
    kv->memory = kv->v ? base_map_alloc(kv->bytes, false, e) : NULL;
    kv->scratch = kv->memory ? base_map_alloc(2 * kv->scratch_bytes * (kv->lanes + 1), false, e)
                             : NULL;
    kv->taken = kv->scratch ? base_try_alloc(kv->n_blocks, sizeof *kv->taken, e) : NULL;
    if (!kv->taken)
        return BATON_ERR_NOMEM;
    uint8_t *at = kv->memory;
    for (uint32_t l = 0; l < kv->n_layers; l++) {
        kv->k[l] = at;
        kv->v[l] = at + tensor_bytes(kv, l);
        at = kv->v[l] + tensor_bytes(kv, l);
    }
    return 0;
}

static int open_lane(struct atom_kv *kv, uint32_t i, struct baton_error *e)
{
    struct atom_lane *lane = &kv->lane[i];
    uint32_t tiles = kv->max_seq / ATOM_TILE;
    lane->blocks = base_try_alloc(kv->blocks_lane, sizeof *lane->blocks, e);
    lane->tiles = lane->blocks ? base_try_alloc(tiles, sizeof *lane->tiles, e) : NULL;
    lane->window = lane->tiles ? base_try_alloc(tiles, sizeof *lane->window, e) : NULL;
    lane->views = lane->window ? base_try_alloc(kv->n_layers, sizeof *lane->views, e) : NULL;
    if (!lane->views)
        return BATON_ERR_NOMEM;
    lane->scratch_k = kv->scratch + 2 * kv->scratch_bytes * i;
    lane->scratch_v = lane->scratch_k + kv->scratch_bytes;
    for (uint32_t b = 0; b < kv->blocks_lane; b++)
        lane->blocks[b] = -1;
    for (uint32_t t = 0; t < tiles; t++)
        lane->tiles[t] = lane->window[t] = -1;
    return 0;
}

static void set_block(struct atom_kv *kv, struct atom_lane *lane, uint32_t b, int32_t id)
{
    uint32_t tiles = kv->block / ATOM_TILE;
    lane->blocks[b] = id;
    for (uint32_t t = 0; t < tiles; t++)
        lane->tiles[b * tiles + t] = id < 0 ? -1
                                            : (int32_t)((uint32_t)id * kv->kv_heads * tiles + t);
}

/* An artifact has its length compiled in; without one the program is compiled for this pool. */
static int compiled_length(const struct atom_device *d, uint32_t positions, struct atom_kv *kv,
                           struct baton_error *e)
{
    const struct npu_artifact *a = d->base.artifact;
    if (!a)
        return device_atom_geometry(d, d->program->chunk, positions, &kv->block, &kv->max_seq, e);
    if (positions > a->geometry.positions)
        return base_fail(e, BATON_ERR_MISMATCH,
                         "%.100s was compiled for %u positions; %u are asked for", a->path,
                         a->geometry.positions, positions);
    kv->block = a->geometry.block;
    kv->max_seq = a->geometry.positions;
    return 0;
}

int device_atom_kv_open(struct device *base, const struct device_kv_pool *pool,
                        struct baton_error *e)
{
    struct atom_device *d = (struct atom_device *)base;
    struct atom_kv *kv = &d->kv;
    if (kv->lane || !d->program)
        return base_fail(e, BATON_ERR_USAGE, "%s: a KV pool is open, or no program is",
                         base->caps.name);
    const struct npu_plan *plan = &d->program->plan;
    *kv = (struct atom_kv){.n_layers = d->program->base.graph.n_layers,
                           .kv_heads = plan->kv_heads,
                           .head_dim = plan->head_dim,
                           .window = plan->window,
                           .lanes = d->bucket,
                           .local = d->program->local};
    int rc = compiled_length(d, pool->positions, kv, e);
    if (rc)
        return rc;
    kv->blocks_lane = kv->max_seq / kv->block;
    kv->n_blocks = kv->blocks_lane * kv->lanes + 1;
    lay_out(kv);
    rc = check_memory(d, kv, e);
    if (rc == 0)
        rc = map_tensors(kv, e);
    if (rc == 0 && !(kv->lane = base_try_alloc(kv->lanes + 1, sizeof *kv->lane, e)))
        rc = BATON_ERR_NOMEM;
    for (uint32_t i = 0; i <= kv->lanes && rc == 0; i++)
        rc = open_lane(kv, i, e);
    if (rc == 0)
        set_block(kv, &kv->lane[kv->lanes], 0, (int32_t)kv->n_blocks - 1);
    else
        device_atom_kv_close(base);
    return rc;
}

void device_atom_kv_close(struct device *base)
{
    struct atom_kv *kv = &((struct atom_device *)base)->kv;
    for (uint32_t i = 0; kv->lane && i <= kv->lanes; i++) {
        free(kv->lane[i].blocks);
        free(kv->lane[i].tiles);
        free(kv->lane[i].window);
        free(kv->lane[i].views);
    }
    base_map_free(kv->memory, kv->bytes);
    base_map_free(kv->scratch, 2 * kv->scratch_bytes * (kv->lanes + 1));
    free(kv->k);
    free(kv->v);
    free(kv->taken);
    free(kv->lane);
    memset(kv, 0, sizeof *kv);
}

/* ---- lanes ---------------------------------------------------------------------------------- */

int device_atom_ready(const struct atom_device *d, uint32_t lane, struct baton_error *e)
{
    const char *name = d->base.base.caps.name;
    if (d->lost)
        return base_fail(e, BATON_ERR_DEVICE_LOST, "%s was lost and must be opened again", name);
    if (!d->kv.lane)
        return base_fail(e, BATON_ERR_USAGE, "%s: no KV pool is open", name);
    if (lane >= d->kv.lanes)
        return base_fail(e, BATON_ERR_USAGE, "%s has no lane %u; there are %u", name, lane,
                         d->kv.lanes);
    return 0;
}

int device_atom_lane_bind(struct device *base, uint32_t lane, struct baton_error *e)
{
    struct atom_device *d = (struct atom_device *)base;
    int rc = device_atom_ready(d, lane, e);
    if (rc == 0 && d->kv.lane[lane].bound)
        rc = base_fail(e, BATON_ERR_USAGE, "%s: lane %u is bound", base->caps.name, lane);
    if (rc == 0)
        rc = device_atom_blocks(&d->kv, &d->kv.lane[lane], 1, e);
    if (rc)
        return rc;
    d->kv.lane[lane].bound = true;
    d->kv.lane[lane].length = 0;
    return 0;
}

void device_atom_lane_release(struct device *base, uint32_t lane)
{
    struct atom_kv *kv = &((struct atom_device *)base)->kv;
    if (!kv->lane || lane >= kv->lanes)
        return;
    for (uint32_t b = 0; b < kv->blocks_lane; b++) {
        int32_t id = kv->lane[lane].blocks[b];
        if (id >= 0)
            kv->taken[id] = false;
        set_block(kv, &kv->lane[lane], b, -1);
    }
    kv->lane[lane].bound = false;
}

int device_atom_blocks(struct atom_kv *kv, struct atom_lane *lane, uint32_t end,
                       struct baton_error *e)
{
    for (uint32_t b = 0; b < kv->blocks_lane && b * kv->block < end; b++) {
        uint32_t id = 0;
        if (lane->blocks[b] >= 0)
            continue;
        while (id + 1 < kv->n_blocks && kv->taken[id])
            id++;
        if (id + 1 >= kv->n_blocks)
            return base_fail(e, BATON_ERR_BUSY, "no block free of %u", kv->n_blocks - 1);
        kv->taken[id] = true;
        set_block(kv, lane, b, (int32_t)id);
    }
    return 0;
}

/* ---- rows of local layers ------------------------------------------------------------------- */

uint32_t device_atom_base(const struct atom_kv *kv, uint32_t length)
{
    return length > kv->window ? length - kv->window : 0;
}

uint8_t *device_atom_row(const struct atom_kv *kv, const uint8_t *tensor, uint32_t lane,
                         uint32_t head, uint32_t row)
{
    size_t at = ((size_t)lane * kv->kv_heads + head) * kv->window + row;
    return (uint8_t *)(uintptr_t)tensor + at * (size_t)kv->slid.stride_position;
}

int device_atom_lane_clear(struct device *base, uint32_t lane, struct baton_error *e)
{
    struct atom_device *d = (struct atom_device *)base;
    const struct atom_kv *kv = &d->kv;
    int rc = device_atom_ready(d, lane, e);
    if (rc)
        return rc;
    size_t bytes = (size_t)kv->slid.stride_head * kv->kv_heads;
    for (uint32_t l = 0; l < kv->n_layers; l++)
        if (kv->local[l]) {
            memset(device_atom_row(kv, kv->k[l], lane, 0, 0), 0, bytes);
            memset(device_atom_row(kv, kv->v[l], lane, 0, 0), 0, bytes);
        }
    return 0;
}
