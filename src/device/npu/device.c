/* SPDX-License-Identifier: Apache-2.0 */
/* npu: the device object, which computes through a cpu device of its own. */
#include <stdlib.h>

#include "device/npu/npu_priv.h"

static void npu_close(struct device *d)
{
    device_close(((struct npu_device *)d)->cpu);
    free(d);
}

static int npu_open(const struct device_arg *args, unsigned n_args, struct device **out,
                    struct baton_error *e)
{
    struct npu_device *d = base_try_alloc(1, sizeof *d, e);
    if (!d)
        return BATON_ERR_NOMEM;
    d->base.impl = &device_npu_rngd;
    int rc = device_npu_spec(args, n_args, d, e);
    if (rc == 0)
        rc = device_open("cpu", &d->cpu, e);
    if (rc)
        npu_close(&d->base);
    else
        *out = &d->base;
    return rc;
}

static int npu_start(struct device *d, unsigned n_threads, struct baton_error *e)
{
    return device_start(((struct npu_device *)d)->cpu, n_threads, e);
}

static int npu_wait(struct device_program *p, uint64_t id, uint64_t timeout_ns,
                    struct baton_error *e)
{
    return 0; /* submit has finished the batch */
}

const struct device_impl device_npu_rngd = {
    .name = "npu:rngd",
    .compiles = true,
    .probe = device_npu_probe,
    .open = npu_open,
    .close = npu_close,
    .start = npu_start,
    .weight_bind = device_npu_weight_bind,
    .weight_close = device_npu_weight_close,
    .weight_bytes = device_npu_weight_bytes,
    .program_open = device_npu_program_open,
    .program_close = device_npu_program_close,
    .submit = device_npu_submit,
    .wait = npu_wait,
};
