/* SPDX-License-Identifier: Apache-2.0 */
/* cpu:ref, the scalar reference: device, weights, programs. The equations are in scalar_verbs.c.
 *
 * It is the yardstick of every other device: float32 arrays, sums in double, no instruction set
 * asked for, nothing fused, nothing reordered. Weights are widened to float32 once. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <sched.h>

#include "device/cpu/scalar_priv.h"

#define REF_MAX_ROWS 512u
#define REF_MAX_LANES 8u

/* ---- device ------------------------------------------------------------------------------- */

static void ref_probe(struct baton_caps *caps, char why[128])
{
    caps->struct_size = sizeof *caps;
    snprintf(caps->name, sizeof caps->name, "cpu:ref");
    snprintf(caps->detail, sizeof caps->detail,
             "scalar reference: float32, sums in double, slow on purpose");
    snprintf(caps->numerics, sizeof caps->numerics, "ref-1");
    caps->dynamic = caps->prefill = caps->decode = true;
    caps->row_invariant = caps->host_kv = caps->layer_export = true;
    caps->kv_dtype = BATON_F32;
    caps->kv_block = 64;
    caps->max_rows = REF_MAX_ROWS;
    caps->max_lanes = REF_MAX_LANES;
    caps->memory_bytes = base_memory_available();
    why[0] = '\0';
}

/* Pages in bf16 change what later layers see, hence another name for the arithmetic. */
static int set_kv_dtype(struct baton_caps *caps, const char *value, struct baton_error *e)
{
    if (!strcmp(value, "bf16")) {
        caps->kv_dtype = BATON_BF16;
        snprintf(caps->numerics, sizeof caps->numerics, "ref-1 kv=bf16");
    } else if (strcmp(value, "f32")) {
        return base_fail(e, BATON_ERR_USAGE, "cpu:ref: kv-dtype is '%s'; there are: f32, bf16",
                         value);
    }
    return 0;
}

static void ref_close(struct device *base)
{
    struct ref_device *d = (struct ref_device *)base;
    base_pool_close(d->pool);
    free(d);
}

static int ref_open(const struct device_arg *args, unsigned n_args, struct device **out,
                    struct baton_error *e)
{
    static const char *const keys[] = {"kv-dtype", NULL};
    char why[128];
    int rc = device_arg_check("cpu:ref", args, n_args, keys, e);
    if (rc)
        return rc;
    struct ref_device *d = base_try_alloc(1, sizeof *d, e);
    if (!d)
        return BATON_ERR_NOMEM;
    d->base.impl = &device_cpu_ref;
    ref_probe(&d->base.caps, why);
    for (unsigned i = 0; i < n_args && rc == 0; i++)
        rc = set_kv_dtype(&d->base.caps, args[i].value, e);
    if (rc)
        ref_close(&d->base);
    else
        *out = &d->base;
    return rc;
}

static int ref_start(struct device *base, unsigned n_threads, struct baton_error *e)
{
    struct ref_device *d = (struct ref_device *)base;
    if (d->pool)
        return base_fail(e, BATON_ERR_USAGE, "cpu:ref was started before");
    if (n_threads == 0) {
        cpu_set_t set;
        n_threads = sched_getaffinity(0, sizeof set, &set) == 0 ? (unsigned)CPU_COUNT(&set) : 1;
    }
    return base_pool_open(&d->pool, n_threads, e);
}

/* ---- weights ------------------------------------------------------------------------------ */

static float widen(const void *p, uint32_t dtype)
{
    uint16_t h;
    float f;
    if (dtype == BATON_F32) {
        memcpy(&f, p, sizeof f);
        return f;
    }
    memcpy(&h, p, sizeof h);
    return dtype == BATON_F16 ? device_f16_to_f32(h) : device_bf16_to_f32(h);
}

static void ref_weight_close(struct device *d, struct device_weight *base)
{
    struct ref_weight *w = (struct ref_weight *)base;
    if (w->data)
        base_map_free(w->data, w->bytes);
    free(w);
}

static int ref_weight_bind(struct device *d, const struct baton_tensor *t, unsigned kind,
                           struct device_weight **out, struct baton_error *e)
{
    bool vector = t->n_dims == 1;
    int64_t row_stride = vector ? 0 : t->stride[0], stride = t->stride[vector ? 0 : 1];
    struct ref_weight *w = base_try_alloc(1, sizeof *w, e);
    if (!w)
        return BATON_ERR_NOMEM;
    w->base.impl = &device_cpu_ref;
    snprintf(w->name, sizeof w->name, "%s", t->name);
    w->rows = vector ? 1 : (uint32_t)t->shape[0];
    w->cols = (uint32_t)t->shape[vector ? 0 : 1];
    w->bytes = (size_t)w->rows * w->cols * sizeof(float); /* both fit 31 bits: no overflow */
    w->data = base_map_alloc(w->bytes, false, e);
    if (!w->data) {
        ref_weight_close(d, &w->base);
        return BATON_ERR_NOMEM;
    }
    for (uint32_t i = 0; i < w->rows; i++)
        for (uint32_t j = 0; j < w->cols; j++)
            w->data[(size_t)i * w->cols + j] = widen(
                (const uint8_t *)t->data + (int64_t)i * row_stride + (int64_t)j * stride, t->dtype);
    *out = &w->base;
    return 0;
}

static uint64_t ref_weight_bytes(const struct device_weight *base)
{
    return ((const struct ref_weight *)base)->bytes;
}

/* ---- programs ----------------------------------------------------------------------------- */

static int ref_program_open(struct device *d, const struct device_graph *g,
                            struct device_program **out, struct baton_error *e)
{
    struct device_program *p = base_try_alloc(1, sizeof *p, e);
    if (!p)
        return BATON_ERR_NOMEM;
    p->device = d;
    p->graph = *g;
    *out = p;
    return 0;
}

static void ref_program_close(struct device_program *p)
{
    free(p);
}

static int ref_submit(struct device_program *p, const struct baton_batch *b, uint64_t *id,
                      struct baton_error *e)
{
    struct ref_device *d = (struct ref_device *)p->device;
    struct ref_run run = {.base = {.verbs = &device_ref_verbs, .batch = b, .program = p},
                          .pool = d->pool};
    if (!d->pool)
        return base_fail(e, BATON_ERR_USAGE, "cpu:ref was not started");
    int rc = base_arena_open(&run.arena, e);
    if (rc)
        return rc;
    rc = p->graph.forward(p->graph.ctx, &run.base, e);
    base_arena_close(run.arena);
    if (rc == 0 && id)
        *id = 0;
    return rc;
}

static int ref_wait(struct device_program *p, uint64_t id, uint64_t timeout_ns,
                    struct baton_error *e)
{
    return 0; /* submit has finished the batch */
}

const struct device_impl device_cpu_ref = {
    .name = "cpu:ref",
    .probe = ref_probe,
    .open = ref_open,
    .close = ref_close,
    .start = ref_start,
    .weight_bind = ref_weight_bind,
    .weight_close = ref_weight_close,
    .weight_bytes = ref_weight_bytes,
    .program_open = ref_program_open,
    .program_close = ref_program_close,
    .submit = ref_submit,
    .wait = ref_wait,
};
