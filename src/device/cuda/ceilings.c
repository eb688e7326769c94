/* SPDX-License-Identifier: Apache-2.0 */
/* What the card can do at most, by its own events: yardsticks for benchmarks. Medians over random
 * data larger than any cache. */
#include <stdlib.h>

#include "device/cuda/cuda_priv.h"

#define ROUNDS 9
#define COPY_BYTES ((size_t)2 << 30)
#define LINK_BYTES ((size_t)128 << 20)
#define SIDE 8192u /* of the square product */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct probe {
    cudaStream_t stream;
    cudaEvent_t begin, end;
    uint8_t *a, *b, *host;
    struct device_cuda_matmul *mm;
    struct baton_error *e;
};

static int copy(struct probe *p)
{
    return device_cuda_check(
        cudaMemcpyAsync(p->b, p->a, COPY_BYTES, cudaMemcpyDeviceToDevice, p->stream), "a copy",
        p->e);
}

static int to_device(struct probe *p)
{
    return device_cuda_check(
        cudaMemcpyAsync(p->a, p->host, LINK_BYTES, cudaMemcpyHostToDevice, p->stream), "a copy",
        p->e);
}

static int to_host(struct probe *p)
{
    return device_cuda_check(
        cudaMemcpyAsync(p->host, p->a, LINK_BYTES, cudaMemcpyDeviceToHost, p->stream), "a copy",
        p->e);
}

static int product(struct probe *p)
{
    const cuda_bf16 *x = (const cuda_bf16 *)p->a;
    return device_cuda_matmul(p->mm, p->stream, p->b, SIDE, false, false, x, SIDE, x + SIDE * SIDE,
                              SIDE, SIDE, SIDE, p->e);
}

/* Median seconds of fn. */
static int timed(struct probe *p, int (*fn)(struct probe *p), double *seconds)
{
    double t[ROUNDS];
    for (int i = -2; i < ROUNDS; i++) {
        float ms = 0;
        cudaEventRecord(p->begin, p->stream);
        int rc = fn(p);
        cudaEventRecord(p->end, p->stream);
        if (rc == 0)
            rc = device_cuda_check(cudaEventSynchronize(p->end), "a measurement", p->e);
        if (rc)
            return rc;
        cudaEventElapsedTime(&ms, p->begin, p->end);
        if (i >= 0)
            t[i] = ms / 1e3;
    }
    qsort(t, ROUNDS, sizeof *t, by_value);
    *seconds = t[ROUNDS / 2];
    return 0;
}

/* Random bf16 of ordinary size: a product of zeros runs faster than any real one. */
static void fill(uint8_t *host, size_t bytes)
{
    uint64_t x = 88172645463325252u;
    for (size_t i = 0; i + 1 < bytes; i += 2) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        uint16_t v = (uint16_t)((x & 0x807Fu) | (0x3C00u + ((x >> 16) & 0x0380u)));
        host[i] = (uint8_t)v;
        host[i + 1] = (uint8_t)(v >> 8);
    }
}

static int open_probe(struct probe *p)
{
    int rc = device_cuda_check(cudaStreamCreateWithFlags(&p->stream, cudaStreamNonBlocking),
                               "a stream", p->e);
    if (rc == 0)
        rc = device_cuda_check(cudaEventCreate(&p->begin), "an event", p->e);
    if (rc == 0)
        rc = device_cuda_check(cudaEventCreate(&p->end), "an event", p->e);
    if (rc == 0)
        rc = device_cuda_check(cudaMalloc((void **)&p->a, COPY_BYTES), "a measurement", p->e);
    if (rc == 0)
        rc = device_cuda_check(cudaMalloc((void **)&p->b, COPY_BYTES), "a measurement", p->e);
    if (rc == 0)
        rc = device_cuda_check(cudaMallocHost((void **)&p->host, LINK_BYTES), "pinned memory",
                               p->e);
    if (rc == 0)
        rc = device_cuda_matmul_open(&p->mm, p->e);
    if (rc)
        return rc;
    fill(p->host, LINK_BYTES);
    for (size_t at = 0; rc == 0 && at < COPY_BYTES; at += LINK_BYTES)
        rc = device_cuda_check(cudaMemcpy(p->a + at, p->host, LINK_BYTES, cudaMemcpyHostToDevice),
                               "a measurement", p->e);
    return rc;
}

int device_cuda_ceilings(unsigned card, struct device_ceilings *out, struct baton_error *e)
{
    struct probe p = {.e = e};
    double s = 0;
    int rc = device_cuda_check(cudaSetDevice((int)card), "choosing the card", e);
    if (rc == 0)
        rc = open_probe(&p);
    if (rc == 0 && (rc = timed(&p, copy, &s)) == 0)
        out->copy_bytes_s = 2.0 * COPY_BYTES / s;
    if (rc == 0 && (rc = timed(&p, product, &s)) == 0)
        out->matrix_flops_s = 2.0 * SIDE * SIDE * SIDE / s;
    if (rc == 0 && (rc = timed(&p, to_device, &s)) == 0)
        out->to_device_bytes_s = LINK_BYTES / s;
    if (rc == 0 && (rc = timed(&p, to_host, &s)) == 0)
        out->to_host_bytes_s = LINK_BYTES / s;
    device_cuda_matmul_close(p.mm);
    cudaFreeHost(p.host);
    cudaFree(p.a);
    cudaFree(p.b);
    if (p.begin)
        cudaEventDestroy(p.begin);
    if (p.end)
        cudaEventDestroy(p.end);
    if (p.stream)
        cudaStreamDestroy(p.stream);
    return rc;
}
