/* SPDX-License-Identifier: Apache-2.0 */
/* The device's copy of the cache and the way between it and the engine's pool.
 *
 * Pages are copied whole: positions of a page that nobody stored travel too and mean nothing on
 * either side. A layer leaves by itself while the next one computes: its K and V of a layer lie
 * side by side in a block, so a run of consecutive block numbers is one copy with a pitch. */
#include <stdlib.h>

#include "device/cuda/cuda_priv.h"

int device_cuda_kv_open(struct device *base, const struct device_kv_pool *pool,
                        struct baton_error *e)
{
    size_t bytes = pool->bytes;
    struct cuda_device *d = (struct cuda_device *)base;
    if (d->host)
        return base_fail(e, BATON_ERR_USAGE, "cuda: a KV pool is open already");
    int rc = device_cuda_check(cudaMalloc((void **)&d->pool, bytes), "the KV pool", e);
    if (rc == 0) /* 0xFF is NaN: reading what nobody stored shows */
        rc = device_cuda_check(cudaMemset(d->pool, 0xFF, bytes), "the KV pool", e);
    if (rc) {
        cudaFree(d->pool);
        d->pool = NULL;
        return rc;
    }
    d->host = pool->host;
    d->pool_bytes = bytes;
    d->pool_serial++;
    return 0;
}

void device_cuda_kv_close(struct device *base)
{
    struct cuda_device *d = (struct cuda_device *)base;
    if (!d->host)
        return;
    cudaDeviceSynchronize();
    if (d->pinned)
        cudaHostUnregister(d->host);
    cudaFree(d->pool);
    d->host = d->pool = NULL;
    d->pinned = false;
}

/* Only those that copy pin the pool: a native engine never does. Without it copies are slower and
 * still right. */
static void pin(struct cuda_device *d)
{
    if (!d->pinned && cudaHostRegister(d->host, d->pool_bytes, cudaHostRegisterDefault) == 0)
        d->pinned = true;
    else
        cudaGetLastError();
}

static int copy_run(struct cuda_device *d, const struct baton_kv_view *v, int32_t block, uint32_t n,
                    bool to_host, cudaStream_t stream, struct baton_error *e)
{
    const struct baton_kv_layout *l = v->layout;
    size_t one = (size_t)l->kv_heads * (size_t)l->stride_head, pitch = (size_t)l->stride_block;
    const uint8_t *start = v->k < v->v ? v->k : v->v;
    bool beside = (size_t)(v->k < v->v ? v->v - v->k : v->k - v->v) == one;
    int rc = 0;
    for (int i = 0; rc == 0 && i < (beside ? 1 : 2); i++) {
        size_t at = (size_t)((i ? (v->k < v->v ? v->v : v->k) : start) - d->host) +
                    (size_t)block * pitch;
        void *to = to_host ? d->host + at : d->pool + at;
        const void *from = to_host ? d->pool + at : d->host + at;
        rc = device_cuda_check(
            cudaMemcpy2DAsync(to, pitch, from, pitch, beside ? 2 * one : one, n,
                              to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice, stream),
            "a copy of the KV cache", e);
    }
    return rc;
}

int device_cuda_pages_copy(struct cuda_device *d, const struct baton_kv_view *v, uint32_t first,
                           uint32_t n, bool to_host, cudaStream_t stream, struct baton_error *e)
{
    if (!d->host)
        return base_fail(e, BATON_ERR_USAGE, "cuda: no KV pool is open");
    if (n == 0)
        return 0;
    pin(d);
    int rc = 0;
    for (uint32_t b = first / CUDA_PAGE, end = (first + n - 1) / CUDA_PAGE + 1, run; b < end && !rc;
         b += run) {
        if (b >= v->n_blocks || v->blocks[b] < 0)
            return base_fail(e, BATON_ERR_USAGE, "cuda: no block for position %u", b * CUDA_PAGE);
        for (run = 1; b + run < end && v->blocks[b + run] == v->blocks[b] + (int32_t)run;)
            run++;
        rc = copy_run(d, v, v->blocks[b], run, to_host, stream, e);
    }
    return rc;
}

/* Blocks [begin, end) of one table with all layers that share it: plain memory, since a block holds
 * its layers without gaps. `base` is where block 0 starts. */
static int copy_blocks(struct cuda_device *d, const struct baton_kv_view *v, const uint8_t *base,
                       uint32_t begin, uint32_t end, bool to_host, struct baton_error *e)
{
    size_t one = (size_t)v->layout->stride_block;
    int rc = 0;
    for (uint32_t b = begin, run; b < end && rc == 0; b += run) {
        if (b >= v->n_blocks || v->blocks[b] < 0)
            return base_fail(e, BATON_ERR_USAGE, "cuda: no block for position %u", b * CUDA_PAGE);
        for (run = 1; b + run < end && v->blocks[b + run] == v->blocks[b] + (int32_t)run;)
            run++;
        size_t at = (size_t)(base - d->host) + (size_t)v->blocks[b] * one;
        rc = device_cuda_check(to_host ? cudaMemcpyAsync(d->host + at, d->pool + at, run * one,
                                                         cudaMemcpyDeviceToHost, d->copy)
                                       : cudaMemcpyAsync(d->pool + at, d->host + at, run * one,
                                                         cudaMemcpyHostToDevice, d->copy),
                               "a copy of the KV cache", e);
    }
    return rc;
}

/* Table by table: the lowest address of its layers is where its blocks start. */
static int copy_now(struct device *base, const struct baton_kv_view *views, uint32_t n_layers,
                    const uint32_t *first, uint32_t end, bool to_host, struct baton_error *e)
{
    struct cuda_device *d = (struct cuda_device *)base;
    int rc = d->host ? 0 : base_fail(e, BATON_ERR_USAGE, "cuda: no KV pool is open");
    if (rc)
        return rc;
    pin(d);
    for (uint32_t l = 0; l < n_layers && rc == 0; l++) {
        const struct baton_kv_view *v = &views[l];
        const uint8_t *start = v->k < v->v ? v->k : v->v;
        uint32_t lowest = first[l];
        bool done = false;
        for (uint32_t k = 0; k < n_layers; k++) {
            const uint8_t *other = views[k].k < views[k].v ? views[k].k : views[k].v;
            if (views[k].blocks != v->blocks)
                continue;
            done = done || k < l;
            start = other < start ? other : start;
            lowest = first[k] < lowest ? first[k] : lowest;
        }
        if (!done && lowest < end)
            rc = copy_blocks(d, v, start, lowest / CUDA_PAGE, (end - 1) / CUDA_PAGE + 1, to_host,
                             e);
    }
    return rc ? rc : device_cuda_check(cudaStreamSynchronize(d->copy), "a copy of the KV cache", e);
}

int device_cuda_kv_read(struct device *d, uint32_t lane, const struct baton_kv_view *views,
                        uint32_t n_layers, const uint32_t *first, uint32_t end,
                        struct baton_error *e)
{
    (void)lane; /* pages are found through tables */
    return copy_now(d, views, n_layers, first, end, true, e);
}

int device_cuda_kv_write(struct device *d, uint32_t lane, const struct baton_kv_view *views,
                         uint32_t n_layers, const uint32_t *first, uint32_t end,
                         struct baton_error *e)
{
    (void)lane;
    return copy_now(d, views, n_layers, first, end, false, e);
}

bool device_cuda_pin(struct device *d, void *p, size_t bytes)
{
    (void)d;
    if (cudaHostRegister(p, bytes, cudaHostRegisterDefault) == 0)
        return true;
    cudaGetLastError(); /* works without, slower */
    return false;
}

void device_cuda_unpin(struct device *d, void *p)
{
    (void)d;
    if (cudaHostUnregister(p))
        cudaGetLastError();
}
