/* SPDX-License-Identifier: Apache-2.0 */
/* The device's copy of the cache and the way between it and the engine's pool.
 *
 * Pages of a layer are copied whole: positions of a page that nobody stored travel too and mean
 * nothing on either side. K and V of a layer lie side by side in a block, so a run of consecutive
 * block numbers is one copy with a pitch. */
#include <stdlib.h>

#include "device/cuda/cuda_priv.h"

int cuda_kv_open(struct device *base, void *host, size_t bytes, struct baton_error *e)
{
    struct cuda_device *d = (struct cuda_device *)base;
    if (d->host)
        return base_fail(e, BATON_ERR_USAGE, "cuda: a KV pool is open already");
    int rc = cuda_check(cudaMalloc((void **)&d->pool, bytes), "the KV pool", e);
    if (rc == 0) /* 0xFF is NaN: reading what nobody stored shows */
        rc = cuda_check(cudaMemset(d->pool, 0xFF, bytes), "the KV pool", e);
    if (rc) {
        cudaFree(d->pool);
        d->pool = NULL;
        return rc;
    }
    d->host = host;
    d->pool_bytes = bytes;
    d->pool_serial++;
    return 0;
}

void cuda_kv_close(struct device *base)
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
        rc = cuda_check(cudaMemcpy2DAsync(to, pitch, from, pitch, beside ? 2 * one : one, n,
                                          to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice,
                                          stream), "a copy of the KV cache", e);
    }
    return rc;
}

int cuda_pages_copy(struct cuda_device *d, const struct baton_kv_view *v, uint32_t first,
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

static int copy_now(struct device *base, const struct baton_kv_view *v, uint32_t first, uint32_t n,
                    bool to_host, struct baton_error *e)
{
    struct cuda_device *d = (struct cuda_device *)base;
    int rc = cuda_pages_copy(d, v, first, n, to_host, d->copy, e);
    return rc ? rc : cuda_check(cudaStreamSynchronize(d->copy), "a copy of the KV cache", e);
}

int cuda_kv_read(struct device *d, const struct baton_kv_view *v, uint32_t first, uint32_t n,
                 struct baton_error *e)
{
    return copy_now(d, v, first, n, true, e);
}

int cuda_kv_write(struct device *d, const struct baton_kv_view *v, uint32_t first, uint32_t n,
                  struct baton_error *e)
{
    return copy_now(d, v, first, n, false, e);
}
