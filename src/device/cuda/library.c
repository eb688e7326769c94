/* SPDX-License-Identifier: Apache-2.0 */
/* The library's entry symbol, what the cards are, the device object. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/cuda/cuda_priv.h"

#define MIN_SM 80

int device_cuda_check(cudaError_t rc, const char *what, struct baton_error *e)
{
    if (rc == cudaSuccess)
        return 0;
    cudaGetLastError(); /* not found again by the next launch */
    if (rc == cudaErrorMemoryAllocation)
        return base_fail(e, BATON_ERR_NOMEM, "cuda: out of device memory (%s)", what);
    return base_fail(e, BATON_ERR_DEVICE_LOST, "cuda: %s: %s", what, cudaGetErrorString(rc));
}

/* ---- cards -------------------------------------------------------------------------------- */

static int card_of(const struct device_arg *args, unsigned n_args)
{
    for (unsigned i = 0; i < n_args; i++)
        if (!strcmp(args[i].key, "card"))
            return atoi(args[i].value);
    return 0;
}

static void probe_card(unsigned card, struct baton_caps *caps, char why[128])
{
    struct cudaDeviceProp p;
    int n = 0;
    cudaError_t rc = cudaGetDeviceCount(&n);
    *caps = (struct baton_caps){.struct_size = sizeof *caps};
    snprintf(caps->name, sizeof caps->name, card ? "cuda:%u" : "cuda", card);
    if (rc == cudaErrorInsufficientDriver)
        snprintf(why, 128, "no NVIDIA driver, or one older than CUDA %d.%d", CUDART_VERSION / 1000,
                 CUDART_VERSION % 1000 / 10);
    else if (rc || n == 0)
        snprintf(why, 128, "no card: %.100s", cudaGetErrorString(rc ? rc : cudaErrorNoDevice));
    else if (card >= (unsigned)n)
        snprintf(why, 128, "there are %d cards, numbered from 0", n);
    if (rc)
        cudaGetLastError();
    if (why[0])
        return;
    if ((rc = cudaGetDeviceProperties(&p, (int)card))) {
        snprintf(why, 128, "card %u: %.100s", card, cudaGetErrorString(rc));
        return;
    }
    if (10 * p.major + p.minor < MIN_SM)
        snprintf(why, 128, "%.60s is sm_%d%d; sm_%d or later is needed", p.name, p.major, p.minor,
                 MIN_SM);
    snprintf(caps->detail, sizeof caps->detail, "%.60s, sm_%d%d, %d multiprocessors, %.1f GiB",
             p.name, p.major, p.minor, p.multiProcessorCount, (double)p.totalGlobalMem / (1 << 30));
    caps->dynamic = caps->prefill = caps->decode = true;
    caps->row_invariant = false; /* decode is; a prefill's products depend on the chunk's rows */
    caps->layer_export = true;
    caps->kv_dtype = BATON_BF16;
    caps->kv_block = CUDA_PAGE;
    caps->max_rows = CUDA_MAX_ROWS;
    caps->max_lanes = CUDA_MAX_LANES;
    caps->memory_bytes = p.totalGlobalMem;
    snprintf(caps->numerics, sizeof caps->numerics, "cuda sm_%d%d bf16 1", p.major, p.minor);
}

static void probe(struct baton_caps *caps, char why[128])
{
    probe_card(0, caps, why);
}

/* ---- the device --------------------------------------------------------------------------- */

#define BOUNCE_BYTES ((size_t)16 << 20)

static void cuda_close(struct device *base)
{
    struct cuda_device *d = (struct cuda_device *)base;
    device_cuda_kv_close(base);
    device_cuda_matmul_close(d->matmul);
    if (d->compute)
        cudaStreamDestroy(d->compute);
    if (d->copy)
        cudaStreamDestroy(d->copy);
    cudaFreeHost(d->bounce);
    free(d);
}

static int open_parts(struct cuda_device *d, struct baton_error *e)
{
    int n = 0, major = 0, block = 0;
    int rc = device_cuda_check(cudaSetDevice(d->card), "choosing the card", e);
    if (rc == 0)
        rc = device_cuda_check(cudaStreamCreateWithFlags(&d->compute, cudaStreamNonBlocking),
                               "a stream", e);
    if (rc == 0)
        rc = device_cuda_check(cudaStreamCreateWithFlags(&d->copy, cudaStreamNonBlocking),
                               "a stream", e);
    if (rc == 0)
        rc = device_cuda_check(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, d->card),
                               "attributes", e);
    if (rc == 0)
        rc = device_cuda_check(
            cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, d->card),
            "attributes", e);
    if (rc == 0)
        rc = device_cuda_check(
            cudaDeviceGetAttribute(&block, cudaDevAttrMaxSharedMemoryPerBlockOptin, d->card),
            "attributes", e);
    if (rc == 0)
        rc = device_cuda_check(cudaMallocHost(&d->bounce, BOUNCE_BYTES), "pinned memory", e);
    d->limits = (struct cuda_card){(uint32_t)n, (uint32_t)block};
    d->overlap = major >= 9;
    return rc;
}

static int cuda_open(const struct device_arg *args, unsigned n_args, struct device **out,
                     struct baton_error *e);
static int cuda_start(struct device *d, unsigned n_threads, struct baton_error *e)
{
    struct cuda_device *c = (struct cuda_device *)d;
    (void)n_threads; /* the card has its own */
    return device_cuda_check(cudaSetDevice(c->card), "choosing the card", e);
}

static const struct device_impl impl = {
    .name = "cuda",
    .probe = probe,
    .open = cuda_open,
    .close = cuda_close,
    .start = cuda_start,
    .weight_bind = device_cuda_weight_bind,
    .weight_close = device_cuda_weight_close,
    .weight_bytes = device_cuda_weight_bytes,
    .program_open = device_cuda_program_open,
    .program_close = device_cuda_program_close,
    .submit = device_cuda_submit,
    .wait = device_cuda_wait,
    .layer_times = device_cuda_layer_times,
    .kv_open = device_cuda_kv_open,
    .kv_close = device_cuda_kv_close,
    .kv_read = device_cuda_kv_read,
    .kv_write = device_cuda_kv_write,
    .pin = device_cuda_pin,
    .unpin = device_cuda_unpin,
    .after_fork = true,
    .numbered = true,
};

static int cuda_open(const struct device_arg *args, unsigned n_args, struct device **out,
                     struct baton_error *e)
{
    char why[128] = "";
    struct cuda_device *d = base_try_alloc(1, sizeof *d, e);
    if (!d)
        return BATON_ERR_NOMEM;
    d->base.impl = &impl;
    d->card = card_of(args, n_args);
    probe_card((unsigned)d->card, &d->base.caps, why);
    int rc = why[0] ? base_fail(e, BATON_ERR_DEVICE, "device cuda:%d is absent: %s", d->card, why)
                    : open_parts(d, e);
    if (rc) {
        cuda_close(&d->base);
        return rc;
    }
    *out = &d->base;
    return 0;
}

static const struct device_library library = {
    .version = DEVICE_LIBRARY_VERSION,
    .struct_size = sizeof(struct device_library),
    .impl_size = sizeof(struct device_impl),
    .impl = &impl,
    .probe_card = probe_card,
    .ceilings = device_cuda_ceilings,
};

__attribute__((visibility("default"))) const struct device_library *baton_device_library(void)
{
    return &library;
}
