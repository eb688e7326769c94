/* SPDX-License-Identifier: Apache-2.0 */
/* plugin: batches, and what must be true of one that the plugin calls done. */
#include <math.h>

#include "device/plugin_priv.h"

/* ---- layers --------------------------------------------------------------------------------- */

/* Whoever streams sends a layer when told of it: a wrong order would send what is not there. */
static void told(void *ctx, uint32_t layer)
{
    struct plugin_program *p = ctx;
    if (layer != p->layers_told || layer >= p->n_layers) {
        p->disorder = true;
        return;
    }
    p->layers_told++;
    if (!p->disorder)
        p->layer_done(p->ctx, layer);
}

static int check_layers(const struct plugin_device *d, const struct plugin_program *p,
                        struct baton_error *e)
{
    if (!p->layer_done || (!p->disorder && p->layers_told == p->n_layers))
        return 0;
    return base_fail(e, BATON_ERR_DEVICE, "plugin %.100s told of %u of %u layers%s", d->path,
                     p->layers_told, p->n_layers, p->disorder ? ", and out of order" : "");
}

/* ---- logits --------------------------------------------------------------------------------- */

/* A mark at both ends of each row, which no device writes: a row that still has it was left out. */
static void mark(const struct plugin_program *p)
{
    size_t vocab = p->base.graph.vocab;
    for (uint32_t i = 0; i < p->batch.n_logits; i++)
        p->batch.logits[i * vocab] = p->batch.logits[(i + 1) * vocab - 1] = NAN;
}

static int check_logits(const struct plugin_device *d, const struct plugin_program *p,
                        struct baton_error *e)
{
    size_t vocab = p->base.graph.vocab;
    for (uint32_t i = 0; i < p->batch.n_logits; i++)
        if (isnan(p->batch.logits[i * vocab]) || isnan(p->batch.logits[(i + 1) * vocab - 1]))
            return base_fail(e, BATON_ERR_DEVICE,
                             "plugin %.100s: the logits of row %u were not written, or are no "
                             "numbers",
                             d->path, p->batch.logit_rows[i]);
    return 0;
}

/* ---- runs ----------------------------------------------------------------------------------- */

int device_plugin_submit(struct device_program *base, const struct baton_batch *b, uint64_t *id,
                         struct baton_error *e)
{
    struct plugin_program *p = (struct plugin_program *)base;
    struct plugin_device *d = (struct plugin_device *)base->device;
    uint64_t unused;
    int rc = device_plugin_alive(d, e);
    if (rc)
        return rc;
    p->batch = *b;
    p->batch.struct_size = sizeof p->batch;
    p->layer_done = b->layer_done;
    p->ctx = b->ctx;
    p->layers_told = 0;
    p->disorder = false;
    if (b->layer_done) {
        p->batch.layer_done = told;
        p->batch.ctx = p;
    }
    mark(p);
    rc = d->api.submit(d->theirs, p->theirs, &p->batch, id ? id : &unused, e);
    return device_plugin_result(d, "submit", rc, e);
}

int device_plugin_wait(struct device_program *base, uint64_t id, uint64_t timeout_ns,
                       struct baton_error *e)
{
    struct plugin_program *p = (struct plugin_program *)base;
    struct plugin_device *d = (struct plugin_device *)base->device;
    int rc = device_plugin_alive(d, e);
    if (rc == 0)
        rc = device_plugin_result(d, "wait", d->api.wait(d->theirs, p->theirs, id, timeout_ns, e),
                                  e);
    if (rc == 0)
        rc = check_layers(d, p, e);
    return rc ? rc : check_logits(d, p, e);
}
