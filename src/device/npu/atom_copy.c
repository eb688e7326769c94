/* SPDX-License-Identifier: Apache-2.0 */
/* npu: ways in and out of atom's K and V. */
#include <string.h>

#include "device/npu/atom_priv.h"

#define FAULT_BLOCK 16u /* positions of the blocks that kv-block-order exchanges */

/* ---- addresses ------------------------------------------------------------------------------ */

/* Head 0 of a position that the lane holds, and how far the next head is. */
static uint8_t *device_at(const struct atom_kv *kv, uint32_t lane, uint32_t layer, bool v,
                          uint32_t position, int64_t *head)
{
    const struct atom_lane *a = &kv->lane[lane];
    const uint8_t *tensor = v ? kv->v[layer] : kv->k[layer];
    *head = kv->local[layer] ? kv->slid.stride_head : kv->global.stride_head;
    if (kv->local[layer])
        return device_atom_row(kv, tensor, lane, 0, position - device_atom_base(kv, a->length));
    return (uint8_t *)(uintptr_t)tensor +
           a->blocks[position / kv->block] * kv->global.stride_block +
           position % kv->block * kv->global.stride_position;
}

static uint8_t *host_at(const struct baton_kv_view *view, bool v, uint32_t position)
{
    const struct baton_kv_layout *l = view->layout;
    uint32_t block = l->block ? position / l->block : 0;
    uint32_t in = l->block ? position % l->block : position;
    return (v ? view->v : view->k) + view->blocks[block] * l->stride_block +
           in * l->stride_position;
}

static int check_host(const struct baton_kv_view *view, uint32_t layer, uint32_t first,
                      uint32_t end, struct baton_error *e)
{
    const struct baton_kv_layout *l = view->layout;
    for (uint32_t p = first; p < end; p++) {
        uint32_t b = l->block ? p / l->block : 0;
        if (b >= view->n_blocks || view->blocks[b] < 0)
            return base_fail(e, BATON_ERR_USAGE, "layer %u: the host has no block for position %u",
                             layer, p);
    }
    return 0;
}

/* One position, all heads, between the host's strides and the device's dense rows. */
static void copy_row(const struct atom_kv *kv, uint8_t *device, int64_t device_head, uint8_t *host,
                     const struct baton_kv_layout *l, bool to_host)
{
    for (uint32_t h = 0; h < kv->kv_heads; h++)
        for (uint32_t d = 0; d < kv->head_dim; d++) {
            uint8_t *a = device + h * device_head + 2 * (size_t)d;
            uint8_t *b = host + h * l->stride_head + d * l->stride_dim;
            memcpy(to_host ? b : a, to_host ? a : b, 2);
        }
}

/* ---- out ------------------------------------------------------------------------------------ */

static void read_rows(const struct atom_kv *kv, uint32_t lane, uint32_t layer,
                      const struct baton_kv_view *to, uint32_t first, uint32_t end)
{
    for (uint32_t p = first; p < end; p++)
        for (int v = 0; v < 2; v++) {
            int64_t head;
            uint8_t *row = device_at(kv, lane, layer, v, p, &head);
            copy_row(kv, row, head, host_at(to, v, p), to->layout, true);
        }
}

void device_atom_export(struct atom_kv *kv, uint32_t lane, const struct baton_kv_view *to,
                        uint32_t first, uint32_t end)
{
    for (uint32_t l = 0; l < kv->n_layers; l++) {
        uint32_t base = kv->local[l] ? device_atom_base(kv, end) : 0;
        read_rows(kv, lane, l, &to[l], first > base ? first : base, end);
    }
}

static int check_range(const struct atom_kv *kv, const struct atom_lane *a, uint32_t layer,
                       uint32_t first, uint32_t end, struct baton_error *e)
{
    uint32_t base = kv->local[layer] ? device_atom_base(kv, a->length) : 0;
    if (first >= base && first <= end && end <= a->length)
        return 0;
    return base_fail(e, BATON_ERR_USAGE, "layer %u has positions [%u, %u), not [%u, %u)", layer,
                     base, a->length, first, end);
}

static int check_bound(const struct atom_device *d, uint32_t lane, uint32_t n_layers,
                       struct baton_error *e)
{
    int rc = device_atom_ready(d, lane, e);
    if (rc == 0 && !d->kv.lane[lane].bound)
        rc = base_fail(e, BATON_ERR_USAGE, "%s: lane %u is not bound", d->base.base.caps.name,
                       lane);
    if (rc == 0 && n_layers != d->kv.n_layers)
        rc = base_fail(e, BATON_ERR_USAGE, "%s has %u layers, asked for %u", d->base.base.caps.name,
                       d->kv.n_layers, n_layers);
    return rc;
}

int device_atom_kv_read(struct device *base, uint32_t lane, const struct baton_kv_view *views,
                        uint32_t n_layers, const uint32_t *first, uint32_t end,
                        struct baton_error *e)
{
    struct atom_device *d = (struct atom_device *)base;
    int rc = check_bound(d, lane, n_layers, e);
    for (uint32_t l = 0; l < n_layers && rc == 0; l++) {
        rc = check_range(&d->kv, &d->kv.lane[lane], l, first[l], end, e);
        if (rc == 0)
            rc = check_host(&views[l], l, first[l], end, e);
        if (rc == 0)
            read_rows(&d->kv, lane, l, &views[l], first[l], end);
    }
    return rc;
}

int device_atom_kv_look(struct device *base, uint32_t lane, struct baton_kv_view *views,
                        uint32_t n_layers, struct baton_error *e)
{
    struct atom_device *d = (struct atom_device *)base;
    const struct atom_kv *kv = &d->kv;
    int rc = check_bound(d, lane, n_layers, e);
    if (rc)
        return rc;
    const struct atom_lane *a = &kv->lane[lane];
    uint32_t slid = device_atom_base(kv, a->length);
    for (uint32_t l = 0; l < n_layers; l++) {
        if (kv->local[l])
            views[l] = (struct baton_kv_view){.layout = &kv->slid,
                                              .k = device_atom_row(kv, kv->k[l], lane, 0, 0),
                                              .v = device_atom_row(kv, kv->v[l], lane, 0, 0),
                                              .first = a->first > slid ? a->first : slid,
                                              .end = a->length};
        else
            views[l] = (struct baton_kv_view){&kv->global,     kv->k[l], kv->v[l], a->blocks,
                                              kv->blocks_lane, 0,        a->length};
    }
    return 0;
}

/* ---- in ------------------------------------------------------------------------------------- */

/* Which of the host's rows [first, end) the device is given for position p. */
static uint32_t source_row(uint32_t p, uint32_t first, uint32_t end, enum npu_fault fault)
{
    uint32_t other = p ^ FAULT_BLOCK;
    if (fault == NPU_POSITION_SHIFT)
        return p > first ? p - 1 : p;
    if (fault == NPU_KV_BLOCK_ORDER && other >= first && other < end)
        return other;
    return p;
}

static void write_rows(const struct atom_device *d, uint32_t lane, uint32_t layer,
                       const struct baton_kv_view *from, uint32_t first, uint32_t end)
{
    for (uint32_t p = first; p < end; p++)
        for (int v = 0; v < 2; v++) {
            int64_t head;
            uint8_t *row = device_at(&d->kv, lane, layer, v, p, &head);
            copy_row(&d->kv, row, head, host_at(from, v, source_row(p, first, end, d->base.fault)),
                     from->layout, false);
        }
}

static int check_write(const struct atom_device *d, const struct baton_kv_view *views,
                       uint32_t n_layers, const uint32_t *first, uint32_t end,
                       struct baton_error *e)
{
    if (end > d->kv.max_seq)
        return base_fail(e, BATON_ERR_USAGE, "%s: %u positions; compiled for %u",
                         d->base.base.caps.name, end, d->kv.max_seq);
    const struct atom_lane as_if = {.length = end};
    int rc = 0;
    for (uint32_t l = 0; l < n_layers && rc == 0; l++) {
        rc = check_range(&d->kv, &as_if, l, first[l], end, e);
        if (rc == 0)
            rc = check_host(&views[l], l, first[l], end, e);
    }
    return rc;
}

int device_atom_kv_write(struct device *base, uint32_t lane, const struct baton_kv_view *views,
                         uint32_t n_layers, const uint32_t *first, uint32_t end,
                         struct baton_error *e)
{
    struct atom_device *d = (struct atom_device *)base;
    int rc = check_bound(d, lane, n_layers, e);
    if (rc == 0)
        rc = check_write(d, views, n_layers, first, end, e);
    if (rc == 0)
        rc = device_atom_blocks(&d->kv, &d->kv.lane[lane], end, e);
    if (rc)
        return rc;
    d->kv.lane[lane].length = end; /* rows of local layers find their places by it */
    d->kv.lane[lane].first = 0;
    for (uint32_t l = 0; l < n_layers; l++) {
        write_rows(d, lane, l, &views[l], first[l], end);
        if (d->kv.local[l])
            d->kv.lane[lane].first = first[l];
    }
    return 0;
}
