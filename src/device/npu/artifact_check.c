/* SPDX-License-Identifier: Apache-2.0 */
/* npu: is an artifact one of this model? */
#include <string.h>

#include "device/npu/artifact_priv.h"

/* ---- weights -------------------------------------------------------------------------------- */

static const struct npu_artifact_weight *find(const struct npu_artifact *a, const char *name)
{
    for (uint32_t i = 0; i < a->n_weights; i++)
        if (!strcmp(a->weights[i].name, name))
            return &a->weights[i];
    return NULL;
}

static bool same_tensor(const struct npu_artifact_weight *w, const struct baton_tensor *t)
{
    bool same = w->dtype == t->dtype && w->n_dims == t->n_dims;
    for (uint32_t i = 0; i < w->n_dims && same; i++)
        same = w->shape[i] == t->shape[i];
    return same;
}

/* One past the last byte of an element of `shape` that strides lead to; UINT64_MAX: too many. */
static uint64_t reach(const uint64_t *shape, const int64_t *stride, uint32_t n_dims, uint64_t width)
{
    uint64_t sum = width;
    for (uint32_t i = 0; i < n_dims; i++) {
        uint64_t step = (uint64_t)stride[i], n = shape[i] - 1;
        if (n && step > (UINT64_MAX - sum) / n)
            return UINT64_MAX;
        sum += n * step;
    }
    return sum;
}

int device_npu_artifact_weight(const struct npu_artifact *a, const struct baton_tensor *t,
                               bool silent, int64_t stride[2], struct baton_error *e)
{
    const struct npu_artifact_weight *w = find(a, t->name);
    uint64_t width = t->dtype == BATON_F32 ? 4 : 2;
    if (!w)
        return base_fail(e, BATON_ERR_MISMATCH, "%.100s: its program has no weight %.60s", a->path,
                         t->name);
    if (!same_tensor(w, t))
        return base_fail(e, BATON_ERR_MISMATCH,
                         "%.90s: %.60s was compiled with [%llu, %llu], the model's is [%llu, %llu] "
                         "or of another dtype",
                         a->path, t->name, (unsigned long long)w->shape[0],
                         (unsigned long long)(w->n_dims > 1 ? w->shape[1] : 1),
                         (unsigned long long)t->shape[0],
                         (unsigned long long)(t->n_dims > 1 ? t->shape[1] : 1));
    for (uint32_t i = 0; i < t->n_dims; i++) {
        if (w->stride[i] != t->stride[i] && !silent)
            return base_fail(e, BATON_ERR_MISMATCH,
                             "%.90s: %.60s was compiled with stride %lld in dimension %u, the "
                             "model gives %lld: it would be read as other numbers",
                             a->path, t->name, (long long)w->stride[i], i, (long long)t->stride[i]);
        stride[i] = w->stride[i];
    }
    if (silent &&
        reach(t->shape, stride, t->n_dims, width) > reach(t->shape, t->stride, t->n_dims, width))
        return base_fail(e, BATON_ERR_MISMATCH, "%.100s: %.60s would be read behind its end",
                         a->path, t->name);
    return 0;
}

/* ---- program -------------------------------------------------------------------------------- */

static int compare_geometry(const struct npu_artifact *a, const struct npu_geometry *now,
                            struct baton_error *e)
{
    for (const struct npu_geometry_member *m = device_npu_geometry_members; m->name; m++) {
        uint32_t have = device_npu_geometry_get(&a->geometry, m->offset);
        uint32_t want = device_npu_geometry_get(now, m->offset);
        if (have != want)
            return base_fail(e, BATON_ERR_MISMATCH,
                             "%.100s was compiled with %s %u; this model and device have %u",
                             a->path, m->name, have, want);
    }
    return 0;
}

int device_npu_artifact_check(const struct npu_artifact *a, const struct npu_plan *p,
                              const struct device_graph *g, const struct npu_geometry *now,
                              struct baton_error *e)
{
    uint8_t source[32];
    char have[65], want[65];
    int rc = compare_geometry(a, now, e);
    if (rc)
        return rc;
    device_npu_plan_hash(p, source);
    if (memcmp(source, a->source, sizeof source))
        return base_fail(e, BATON_ERR_MISMATCH,
                         "%.100s was compiled from another forward function: compile it again with "
                         "this build",
                         a->path);
    if (g->checkpoint && !memcmp(g->checkpoint, a->checkpoint, 32))
        return 0;
    base_hex(a->checkpoint, 32, want);
    base_hex(g->checkpoint ? g->checkpoint : (const uint8_t[32]){0}, 32, have);
    return base_fail(e, BATON_ERR_MISMATCH,
                     "%.100s was compiled for the checkpoint %.16s..., this one is %.16s...",
                     a->path, want, have);
}
