/* SPDX-License-Identifier: Apache-2.0 */
/* plugin: KV in the lanes of the device, as copies from and to the host's pages. */
#include <stdlib.h>

#include "device/plugin_priv.h"

static struct plugin_device *of(struct device *d)
{
    return (struct plugin_device *)d;
}

int device_plugin_kv_open(struct device *base, const struct device_kv_pool *pool,
                          struct baton_error *e)
{
    struct plugin_device *d = of(base);
    if (!base->caps.lane_kv)
        return 0;
    if (!d->program)
        return base_fail(e, BATON_ERR_USAGE, "plugin %.100s: KV without a program", d->path);
    free(d->first);
    d->first = base_try_alloc((size_t)pool->lanes * d->program->n_layers, sizeof *d->first, e);
    if (!d->first)
        return BATON_ERR_NOMEM;
    return device_plugin_result(
        d, "kv_open",
        d->api.kv_open(d->theirs, d->program->theirs, pool->positions, pool->lanes, e), e);
}

void device_plugin_kv_close(struct device *base)
{
    if (base->caps.lane_kv)
        of(base)->api.kv_close(of(base)->theirs);
}

int device_plugin_lane_bind(struct device *base, uint32_t lane, struct baton_error *e)
{
    struct plugin_device *d = of(base);
    if (!base->caps.lane_kv)
        return 0;
    for (uint32_t l = 0; l < d->program->n_layers; l++)
        d->first[lane * d->program->n_layers + l] = 0;
    int rc = device_plugin_alive(d, e);
    return rc ? rc : device_plugin_result(d, "lane_bind", d->api.lane_bind(d->theirs, lane, e), e);
}

int device_plugin_lane_clear(struct device *base, uint32_t lane, struct baton_error *e)
{
    struct plugin_device *d = of(base);
    if (!base->caps.lane_kv || !d->api.lane_clear)
        return 0;
    int rc = device_plugin_alive(d, e);
    return rc ? rc
              : device_plugin_result(d, "lane_clear", d->api.lane_clear(d->theirs, lane, e), e);
}

void device_plugin_lane_release(struct device *base, uint32_t lane)
{
    if (base->caps.lane_kv)
        of(base)->api.lane_release(of(base)->theirs, lane);
}

/* ---- copies --------------------------------------------------------------------------------- */

static uint32_t min(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Copies of one layer, block by block, widened to the device's grain: a block is a multiple of
 * it. Returns how many; counts alone where `out` is NULL. */
static uint32_t cut(const struct plugin_device *d, const struct baton_kv_view *v, uint32_t lane,
                    uint32_t layer, uint32_t first, uint32_t end, struct baton_kv_copy *out)
{
    const struct baton_kv_layout *l = v->layout;
    uint32_t grain = d->base.caps.kv_grain ? d->base.caps.kv_grain : 1, n = 0;
    first -= first % grain;
    end += (grain - end % grain) % grain;
    for (uint32_t p = first, next; p < end; p = next) {
        next = min(end, p - p % l->block + l->block);
        int64_t at = v->blocks[p / l->block] * l->stride_block +
                     (int64_t)(p % l->block) * l->stride_position;
        for (uint32_t which = 0; which < 2; which++, n++)
            if (out)
                out[n] = (struct baton_kv_copy){
                    lane, layer, which, p, next - p, (which ? v->v : v->k) + at, l};
    }
    return n;
}

static int copies(const struct plugin_device *d, uint32_t lane, const struct baton_kv_view *views,
                  uint32_t n_layers, const uint32_t *first, uint32_t end,
                  struct baton_kv_copy **out, uint32_t *n, struct baton_error *e)
{
    *n = 0;
    for (uint32_t l = 0; l < n_layers; l++)
        *n += cut(d, &views[l], lane, l, first[l], end, NULL);
    *out = base_try_alloc(*n ? *n : 1, sizeof **out, e);
    if (!*out)
        return BATON_ERR_NOMEM;
    for (uint32_t l = 0, at = 0; l < n_layers; l++)
        at += cut(d, &views[l], lane, l, first[l], end, *out + at);
    return 0;
}

/* Copy [first[l], end) of each layer between the host's pages and the lane. */
static int move(struct plugin_device *d, bool write, uint32_t lane,
                const struct baton_kv_view *views, uint32_t n_layers, const uint32_t *first,
                uint32_t end, struct baton_error *e)
{
    struct baton_kv_copy *list;
    uint32_t n;
    int rc = device_plugin_alive(d, e);
    if (rc == 0)
        rc = copies(d, lane, views, n_layers, first, end, &list, &n, e);
    if (rc)
        return rc;
    rc = write ? device_plugin_result(d, "kv_write", d->api.kv_write(d->theirs, list, n, end, e), e)
               : device_plugin_result(d, "kv_read", d->api.kv_read(d->theirs, list, n, e), e);
    free(list);
    return rc;
}

int device_plugin_kv_read(struct device *base, uint32_t lane, const struct baton_kv_view *views,
                          uint32_t n_layers, const uint32_t *first, uint32_t end,
                          struct baton_error *e)
{
    return base->caps.lane_kv ? move(of(base), false, lane, views, n_layers, first, end, e) : 0;
}

int device_plugin_kv_write(struct device *base, uint32_t lane, const struct baton_kv_view *views,
                           uint32_t n_layers, const uint32_t *first, uint32_t end,
                           struct baton_error *e)
{
    struct plugin_device *d = of(base);
    int rc = base->caps.lane_kv ? move(d, true, lane, views, n_layers, first, end, e) : 0;
    for (uint32_t l = 0; l < n_layers && rc == 0 && base->caps.lane_kv; l++)
        d->first[lane * d->program->n_layers + l] = first[l];
    return rc;
}

int device_plugin_kv_look(struct device *base, uint32_t lane, struct baton_kv_view *views,
                          uint32_t n_layers, struct baton_error *e)
{
    struct plugin_device *d = of(base);
    if (!d->api.kv_look)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "plugin %.100s does not show its lanes",
                         d->path);
    int rc = device_plugin_alive(d, e);
    if (rc == 0)
        rc = device_plugin_result(d, "kv_look", d->api.kv_look(d->theirs, lane, views, n_layers, e),
                                  e);
    /* The device was given whole grains and can't know where in one the sequence begins. */
    for (uint32_t l = 0; l < n_layers && rc == 0; l++)
        if (views[l].first < d->first[lane * d->program->n_layers + l])
            views[l].first = d->first[lane * d->program->n_layers + l];
    return rc;
}

/* ---- host memory ---------------------------------------------------------------------------- */

bool device_plugin_pin(struct device *base, void *p, size_t bytes)
{
    struct plugin_device *d = of(base);
    return d->api.buffer_register && d->api.buffer_unregister && !d->lost &&
           device_plugin_result(d, "buffer_register",
                                d->api.buffer_register(d->theirs, p, bytes, NULL), NULL) == 0;
}

void device_plugin_unpin(struct device *base, void *p)
{
    of(base)->api.buffer_unregister(of(base)->theirs, p);
}
