/* SPDX-License-Identifier: Apache-2.0 */
/* npu: atom's local layers in a run. The device computes on the old rows followed by the new ones
 * and keeps the newest W; here both lie in a scratch, at their positions in cpu's tiles. */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "device/npu/atom_priv.h"

static struct atom_program *program_of(const struct npu_replay *r)
{
    return (struct atom_program *)((uintptr_t)r - offsetof(struct atom_program, replay));
}

static struct atom_kv *kv_of(const struct npu_replay *r)
{
    return &((struct atom_device *)program_of(r)->base.device)->kv;
}

/* ---- tables --------------------------------------------------------------------------------- */

void device_atom_window_table(struct atom_kv *kv, struct atom_lane *lane, uint32_t position,
                              uint32_t n)
{
    uint32_t first = device_atom_base(kv, position) / ATOM_TILE;
    uint32_t last = (position + n - 1) / ATOM_TILE;
    for (uint32_t t = 0; t < kv->max_seq / ATOM_TILE; t++)
        lane->window[t] = t < first || t > last ? -1 : (int32_t)(t - first);
}

void device_atom_views(struct atom_kv *kv, uint32_t lane, uint32_t position)
{
    struct atom_lane *a = &kv->lane[lane];
    uint32_t tiles = kv->max_seq / ATOM_TILE, base = device_atom_base(kv, position);
    for (uint32_t l = 0; l < kv->n_layers; l++) {
        if (kv->local[l])
            a->views[l] = (struct baton_kv_view){
                &kv->window_tiled, a->scratch_k, a->scratch_v, a->window, tiles, base, position};
        else
            a->views[l] = (struct baton_kv_view){&kv->tiled, kv->k[l], kv->v[l], a->tiles,
                                                 tiles,      0,        position};
    }
}

/* ---- rows ----------------------------------------------------------------------------------- */

static uint8_t *scratch_row(const struct atom_kv *kv, const struct atom_lane *lane, bool v,
                            uint32_t head, uint32_t position)
{
    const struct baton_kv_layout *l = &kv->window_tiled;
    return (v ? lane->scratch_v : lane->scratch_k) +
           lane->window[position / ATOM_TILE] * l->stride_block + head * l->stride_head +
           position % ATOM_TILE * l->stride_position;
}

/* Is there a number among the W rows of a tensor that spoils a sum it enters with weight 0? */
static bool finite_rows(const struct atom_kv *kv, const uint8_t *tensor, uint32_t lane)
{
    const uint8_t *at = device_atom_row(kv, tensor, lane, 0, 0);
    size_t n = (size_t)kv->kv_heads * kv->window * kv->head_dim;
    uint16_t x;
    bool finite = true;
    for (size_t i = 0; i < n; i++) {
        memcpy(&x, at + 2 * i, sizeof x);
        finite = finite && (x & 0x7F80u) != 0x7F80u;
    }
    return finite;
}

static void load(struct atom_kv *kv, uint32_t lane, uint32_t layer)
{
    struct atom_lane *a = &kv->lane[lane];
    size_t row = (size_t)kv->slid.stride_position;
    uint32_t end = a->position, base = device_atom_base(kv, end);
    for (int v = 0; v < 2; v++)
        for (uint32_t h = 0; h < kv->kv_heads; h++)
            for (uint32_t p = base; p < end; p++)
                memcpy(scratch_row(kv, a, v, h, p),
                       device_atom_row(kv, v ? kv->v[layer] : kv->k[layer], lane, h, p - base),
                       row);
    a->spoiled = end > 0 &&
                 (!finite_rows(kv, kv->k[layer], lane) || !finite_rows(kv, kv->v[layer], lane));
}

static void store(struct atom_kv *kv, uint32_t lane, uint32_t layer, uint32_t n_new)
{
    const struct atom_lane *a = &kv->lane[lane];
    size_t row = (size_t)kv->slid.stride_position;
    uint32_t end = a->position + n_new, base = device_atom_base(kv, end), held = end - base;
    for (int v = 0; v < 2; v++)
        for (uint32_t h = 0; h < kv->kv_heads; h++) {
            uint8_t *to = device_atom_row(kv, v ? kv->v[layer] : kv->k[layer], lane, h, 0);
            for (uint32_t i = 0; i < held; i++)
                memcpy(to + i * row, scratch_row(kv, a, v, h, base + i), row);
            memset(to + held * row, 0, (kv->window - held) * row);
        }
}

/* ---- hooks ---------------------------------------------------------------------------------- */

void device_atom_window_load(const struct npu_replay *r, uint32_t layer)
{
    struct atom_program *p = program_of(r);
    struct atom_kv *kv = kv_of(r);
    for (uint32_t i = 0; kv->local[layer] && i < p->n_lanes; i++)
        load(kv, p->lane_of[i], layer);
}

/* Padding is dropped here; global layers keep what it left. */
void device_atom_window_store(const struct npu_replay *r, uint32_t layer, struct device_array k,
                              struct device_array v)
{
    struct atom_program *p = program_of(r);
    struct atom_kv *kv = kv_of(r);
    (void)k; /* they lie in the scratch */
    (void)v;
    for (uint32_t i = 0; kv->local[layer] && i < p->n_lanes; i++)
        store(kv, p->lane_of[i], layer, p->prefill ? p->valid : 1);
}

void device_atom_window_spoil(const struct npu_replay *r, uint32_t layer, struct device_array o)
{
    struct atom_program *p = program_of(r);
    struct atom_kv *kv = kv_of(r);
    uint32_t rows = p->prefill ? o.rows : 1;
    for (uint32_t i = 0; kv->local[layer] && i < p->n_lanes; i++)
        if (kv->lane[p->lane_of[i]].spoiled)
            for (size_t c = 0; c < (size_t)rows * o.cols; c++)
                ((float *)o.data)[(size_t)i * o.cols + c] = NAN;
}
