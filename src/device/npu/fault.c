/* SPDX-License-Identifier: Apache-2.0 */
/* npu: names of the faults that a test may plant. */
#include <stdio.h>
#include <string.h>

#include "device/npu/npu_priv.h"

static const char *const names[] = {
    [NPU_NO_FAULT] = "none",
    [NPU_WEIGHT_STRIDE] = "weight-stride",
    [NPU_KV_BLOCK_ORDER] = "kv-block-order",
    [NPU_NONCAUSAL] = "noncausal",
    [NPU_PAD_LEAK] = "pad-leak",
    [NPU_WINDOW_OFF] = "window-off-by-one",
    [NPU_POSITION_SHIFT] = "position-shift",
    [NPU_ROPE_INTERLEAVE] = "rope-interleave",
    [NPU_NORM_OFFSET] = "norm-offset",
    [NPU_GLOBAL_AS_LOCAL] = "global-as-local",
    [NPU_LANE_SWAP] = "lane-swap",
    [NPU_LANE_BLEED] = "lane-bleed",
};
enum { N_FAULTS = sizeof names / sizeof *names };

const char *device_npu_fault_name(enum npu_fault f)
{
    return names[f];
}

int device_npu_fault_find(const char *device, const char *name, enum npu_fault *out,
                          struct baton_error *e)
{
    char known[200] = "";
    size_t used = 0;
    for (unsigned i = 0; i < N_FAULTS; i++) {
        if (!strcmp(name, names[i])) {
            *out = (enum npu_fault)i;
            return 0;
        }
        if (used < sizeof known)
            used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "",
                                     names[i]);
    }
    return base_fail(e, BATON_ERR_USAGE, "%s has no fault '%.40s'; there are: %s", device, name,
                     known);
}

int device_npu_fault_check(const struct npu_device *d, const struct npu_plan *p,
                           struct baton_error *e)
{
    bool windowed = d->fault == NPU_WINDOW_OFF || d->fault == NPU_GLOBAL_AS_LOCAL;
    bool laned = d->fault == NPU_LANE_SWAP || d->fault == NPU_LANE_BLEED;
    if (windowed && !p->window)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "fault %s: this model has no local layers",
                         device_npu_fault_name(d->fault));
    if (laned && d->base.caps.max_lanes == 1)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "fault %s: %s has no lanes to take for others",
                         device_npu_fault_name(d->fault), d->base.caps.name);
    if (d->fault == NPU_WEIGHT_STRIDE && d->artifact && !d->strides_differ)
        return base_fail(e, BATON_ERR_UNSUPPORTED,
                         "fault %s: the artifact was compiled with the strides that the model has",
                         device_npu_fault_name(d->fault));
    return 0;
}
