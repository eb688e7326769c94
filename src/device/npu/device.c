/* SPDX-License-Identifier: Apache-2.0 */
/* npu: the device object, which computes through a cpu device of its own. */
#include <stdlib.h>
#include <string.h>

#include "device/npu/artifact_priv.h"

void device_npu_close(struct device *d)
{
    device_close(((struct npu_device *)d)->cpu);
    device_npu_artifact_close(((struct npu_device *)d)->artifact);
    free(d);
}

int device_npu_open(const struct device_impl *impl, size_t size, struct device **out,
                    struct baton_error *e)
{
    struct npu_device *d = base_try_alloc(1, size, e);
    if (!d)
        return BATON_ERR_NOMEM;
    d->base.impl = impl;
    int rc = device_open("cpu", &d->cpu, e);
    if (rc)
        device_npu_close(&d->base);
    else
        *out = &d->base;
    return rc;
}

int device_npu_take_artifact(struct npu_device *d, const struct device_arg *args, unsigned n_args,
                             struct baton_error *e)
{
    int rc = 0;
    for (unsigned i = 0; i < n_args && rc == 0; i++)
        if (!strcmp(args[i].key, "artifact"))
            rc = device_npu_artifact_open(args[i].value, d->base.caps.name, &d->artifact, e);
    d->base.wants_checkpoint = d->artifact != NULL;
    return rc;
}

int device_npu_start(struct device *d, unsigned n_threads, struct baton_error *e)
{
    return device_start(((struct npu_device *)d)->cpu, n_threads, e);
}

int device_npu_wait(struct device_program *p, uint64_t id, uint64_t timeout_ns,
                    struct baton_error *e)
{
    return 0; /* submit has finished the batch */
}

static int rngd_open(const struct device_arg *args, unsigned n_args, struct device **out,
                     struct baton_error *e)
{
    struct device *d;
    int rc = device_npu_open(&device_npu_rngd, sizeof(struct npu_device), &d, e);
    if (rc)
        return rc;
    rc = device_npu_spec(args, n_args, (struct npu_device *)d, e);
    if (rc)
        device_npu_close(d);
    else
        *out = d;
    return rc;
}

const struct device_impl device_npu_rngd = {
    .name = "npu:rngd",
    .compiles = true,
    .probe = device_npu_probe,
    .open = rngd_open,
    .close = device_npu_close,
    .start = device_npu_start,
    .weight_bind = device_npu_weight_bind,
    .weight_close = device_npu_weight_close,
    .weight_bytes = device_npu_weight_bytes,
    .program_open = device_npu_program_open,
    .program_close = device_npu_program_close,
    .artifact = device_npu_artifact,
    .submit = device_npu_submit,
    .wait = device_npu_wait,
};
