/* SPDX-License-Identifier: Apache-2.0 */
/* npu: weights are inputs of a compiled program, which knows the strides of the sample that it was
 * compiled with. What is bound later is read with those, whatever its own. */
#include <stdlib.h>
#include <string.h>

#include "device/npu/artifact_priv.h"

/* The output matrix stays on the host, as the embedding does. */
static bool on_device(const struct baton_tensor *t, unsigned kind)
{
    return kind == DEVICE_MATRIX && strncmp(t->name, "lm_head", 7) != 0;
}

static bool dense(const struct baton_tensor *t)
{
    int64_t width = t->dtype == BATON_F32 ? 4 : 2;
    return t->stride[1] == width && t->stride[0] == width * (int64_t)t->shape[1];
}

/* A transposed view of dense memory covers the same bytes: nothing out of range is read. */
static void compile_transposed(struct npu_weight *w, const struct baton_tensor *t)
{
    w->compiled[0] = w->bound[1];
    w->compiled[1] = w->bound[1] * (int64_t)t->shape[0];
}

static void describe(struct npu_weight *w, const struct baton_tensor *t)
{
    w->dtype = t->dtype;
    w->n_dims = t->n_dims;
    memcpy(w->shape, t->shape, sizeof w->shape);
    memcpy(w->bound, t->stride, sizeof w->bound);
    memcpy(w->compiled, t->stride, sizeof w->compiled);
}

/* An artifact has its sample's strides; else the tensor itself is the sample. */
static int compile(const struct npu_device *d, struct npu_weight *w, const struct baton_tensor *t,
                   unsigned kind, struct baton_error *e)
{
    bool silent = d->fault == NPU_WEIGHT_STRIDE;
    if (d->artifact)
        return device_npu_artifact_weight(d->artifact, t, silent, w->compiled, e);
    if (silent && on_device(t, kind) && dense(t))
        compile_transposed(w, t);
    return 0;
}

int device_npu_weight_bind(struct device *base, const struct baton_tensor *t, unsigned kind,
                           struct device_weight **out, struct baton_error *e)
{
    struct npu_device *d = (struct npu_device *)base;
    struct npu_weight *w = base_try_alloc(1, sizeof *w, e);
    struct baton_tensor as_read = *t;
    if (!w)
        return BATON_ERR_NOMEM;
    w->base.impl = base->impl;
    describe(w, t);
    w->name = base_try_strdup(t->name, e);
    int rc = w->name ? compile(d, w, t, kind, e) : BATON_ERR_NOMEM;
    memcpy(as_read.stride, w->compiled, sizeof w->compiled);
    if (rc == 0)
        rc = device_weight_bind(d->cpu, &as_read, kind, &w->cpu, e);
    if (rc) {
        free(w->name);
        free(w);
        return rc;
    }
    d->strides_differ |= memcmp(w->compiled, w->bound, sizeof w->bound) != 0;
    *out = &w->base;
    return 0;
}

void device_npu_weight_close(struct device *base, struct device_weight *w)
{
    device_weight_close(((struct npu_device *)base)->cpu, ((struct npu_weight *)w)->cpu);
    free(((struct npu_weight *)w)->name);
    free(w);
}

uint64_t device_npu_weight_bytes(const struct device_weight *w)
{
    return device_weight_bytes(((const struct npu_weight *)w)->cpu);
}
