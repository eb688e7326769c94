/* SPDX-License-Identifier: Apache-2.0 */
/* Verbs that work row by row. All are bound by memory; a block or more a row. */
#include "device/cuda/kernel.cuh"

#define THREADS 256

static __global__ void embed(float *y, const cuda_bf16 *table, struct cuda_rows r, uint32_t cols,
                             float scale)
{
    wait_before();
    const cuda_bf16 *from = table + (size_t)r.ids[blockIdx.x] * cols;
    float *to = y + (size_t)blockIdx.x * cols;
    for (uint32_t j = threadIdx.x; j < cols; j += blockDim.x)
        to[j] = to_f32(from[j]) * scale;
}

cudaError_t cuda_embed(struct cuda_where at, float *y, const cuda_bf16 *table, struct cuda_rows r,
                       uint32_t cols, float scale)
{
    return launch(at, embed, r.n, THREADS, 0, y, table, r, cols, scale);
}

static __device__ __forceinline__ float squares(float4 v)
{
    return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
}

/* cols is a multiple of 8. */
static __global__ void norm(float *y, cuda_bf16 *h, uint32_t ldh, const float *x, const float *w,
                            uint32_t cols, float eps, float offset)
{
    __shared__ float buf[32];
    const float *from = x + (size_t)blockIdx.x * cols;
    float sum = 0;
    wait_before();
    for (uint32_t j = 4 * threadIdx.x; j < cols; j += 4 * blockDim.x)
        sum += squares(*(const float4 *)(from + j));
    float scale = rsqrtf(block_sum(sum, buf) / cols + eps);
    for (uint32_t j = 4 * threadIdx.x; j < cols; j += 4 * blockDim.x) {
        float4 v = *(const float4 *)(from + j), g = *(const float4 *)(w + j);
        v.x *= scale * (offset + g.x);
        v.y *= scale * (offset + g.y);
        v.z *= scale * (offset + g.z);
        v.w *= scale * (offset + g.w);
        if (y)
            *(float4 *)(y + (size_t)blockIdx.x * cols + j) = v;
        if (h)
            *(uint2 *)(h + (size_t)blockIdx.x * ldh + j) = make_uint2(pack_bf16(v.x, v.y),
                                                                      pack_bf16(v.z, v.w));
    }
}

cudaError_t cuda_norm(struct cuda_where at, float *y, cuda_bf16 *h, uint32_t ldh, const float *x,
                      const float *w, uint32_t rows, uint32_t cols, float eps, float offset)
{
    return launch(at, norm, rows, rows <= CUDA_DECODE_ROWS ? 512 : THREADS, 0, y, h, ldh, x, w,
                  cols, eps, offset);
}

static __global__ void norm_add_norm(cuda_bf16 *h, uint32_t ldh, float *x, const float *y,
                                     const float *w1, const float *w2, uint32_t cols, float eps,
                                     float offset)
{
    __shared__ float buf[32];
    float *xs = x + (size_t)blockIdx.x * cols;
    const float *ys = y + (size_t)blockIdx.x * cols;
    float sum = 0, sum2 = 0;
    wait_before();
    for (uint32_t j = 4 * threadIdx.x; j < cols; j += 4 * blockDim.x)
        sum += squares(*(const float4 *)(ys + j));
    float scale = rsqrtf(block_sum(sum, buf) / cols + eps);
    for (uint32_t j = 4 * threadIdx.x; j < cols; j += 4 * blockDim.x) {
        float4 v = *(const float4 *)(xs + j), u = *(const float4 *)(ys + j);
        float4 g = *(const float4 *)(w1 + j);
        v.x += u.x * scale * (offset + g.x);
        v.y += u.y * scale * (offset + g.y);
        v.z += u.z * scale * (offset + g.z);
        v.w += u.w * scale * (offset + g.w);
        *(float4 *)(xs + j) = v;
        sum2 += squares(v);
    }
    scale = rsqrtf(block_sum(sum2, buf) / cols + eps);
    for (uint32_t j = 4 * threadIdx.x; j < cols; j += 4 * blockDim.x) {
        float4 v = *(const float4 *)(xs + j), g = *(const float4 *)(w2 + j);
        *(uint2 *)(h + (size_t)blockIdx.x * ldh + j) = make_uint2(
            pack_bf16(v.x * scale * (offset + g.x), v.y * scale * (offset + g.y)),
            pack_bf16(v.z * scale * (offset + g.z), v.w * scale * (offset + g.w)));
    }
}

cudaError_t cuda_norm_add_norm(struct cuda_where at, cuda_bf16 *h, uint32_t ldh, float *x,
                               const float *y, const float *w1, const float *w2, uint32_t rows,
                               uint32_t cols, float eps, float offset)
{
    return launch(at, norm_add_norm, rows, rows <= CUDA_DECODE_ROWS ? 512 : THREADS, 0, h, ldh, x,
                  y, w1, w2, cols, eps, offset);
}

static __global__ void add(float *x, const float *y, uint64_t n)
{
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    wait_before();
    if (i < n)
        x[i] += y[i];
}

cudaError_t cuda_add(struct cuda_where at, float *x, const float *y, uint64_t n)
{
    return launch(at, add, (unsigned)((n + THREADS - 1) / THREADS), THREADS, 0, x, y, n);
}

/* Eight elements a thread: ld, ldy and cols are multiples of 8 (heads and inner sizes are). */
static __global__ void gate(cuda_bf16 *y, const cuda_bf16 *g, const cuda_bf16 *up, uint32_t ld,
                            uint32_t ldy, uint32_t cols, int act)
{
    uint32_t j = 8 * (blockIdx.y * blockDim.x + threadIdx.x);
    wait_before();
    if (j >= cols)
        return;
    uint4 a = *(const uint4 *)(g + (size_t)blockIdx.x * ld + j);
    uint4 b = *(const uint4 *)(up + (size_t)blockIdx.x * ld + j);
    const uint32_t *pa = &a.x, *pb = &b.x;
    uint4 o;
    uint32_t *po = &o.x;
#pragma unroll
    for (int i = 0; i < 4; i++)
        po[i] = pack_bf16(activate(lo_f32(pa[i]), act) * lo_f32(pb[i]),
                          activate(hi_f32(pa[i]), act) * hi_f32(pb[i]));
    *(uint4 *)(y + (size_t)blockIdx.x * ldy + j) = o;
}

cudaError_t cuda_gate(struct cuda_where at, cuda_bf16 *y, const cuda_bf16 *g, const cuda_bf16 *up,
                      uint32_t ld, uint32_t ldy, uint32_t rows, uint32_t cols, int act)
{
    return launch(at, gate, dim3(rows, (cols / 8 + THREADS - 1) / THREADS), THREADS, 0, y, g, up,
                  ld, ldy, cols, act);
}

static __global__ void narrow(cuda_bf16 *y, const float *x, uint64_t n)
{
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    wait_before();
    if (i < n)
        y[i] = to_bf16(x[i]);
}

cudaError_t cuda_narrow(struct cuda_where at, cuda_bf16 *y, const float *x, uint64_t n)
{
    return launch(at, narrow, (unsigned)((n + THREADS - 1) / THREADS), THREADS, 0, y, x, n);
}

static __global__ void select_rows(cuda_bf16 *y, const cuda_bf16 *x, uint32_t ldx,
                                   struct cuda_rows r, uint32_t cols)
{
    wait_before();
    const cuda_bf16 *from = x + (size_t)r.logit[blockIdx.x] * ldx;
    for (uint32_t j = threadIdx.x; j < cols; j += blockDim.x)
        y[(size_t)blockIdx.x * cols + j] = from[j];
}

cudaError_t cuda_select(struct cuda_where at, cuda_bf16 *y, const cuda_bf16 *x, uint32_t ldx,
                        struct cuda_rows r, uint32_t n_logits, uint32_t cols)
{
    return launch(at, select_rows, n_logits, THREADS, 0, y, x, ldx, r, cols);
}

template <bool NARROW>
static __global__ void add_bias(void *y, uint32_t ld, const float *bias, uint32_t cols)
{
    uint32_t j = blockIdx.y * blockDim.x + threadIdx.x;
    wait_before();
    if (j >= cols)
        return;
    size_t at = (size_t)blockIdx.x * ld + j;
    if (NARROW)
        ((cuda_bf16 *)y)[at] = to_bf16(to_f32(((cuda_bf16 *)y)[at]) + bias[j]);
    else
        ((float *)y)[at] += bias[j];
}

cudaError_t cuda_bias(struct cuda_where at, void *y, bool narrow_y, uint32_t ld, const float *bias,
                      uint32_t rows, uint32_t cols)
{
    dim3 grid(rows, (cols + THREADS - 1) / THREADS);
    return narrow_y ? launch(at, add_bias<true>, grid, THREADS, 0, y, ld, bias, cols)
                    : launch(at, add_bias<false>, grid, THREADS, 0, y, ld, bias, cols);
}

static __global__ void angles(float2 *cs, const float *inv_freq, uint32_t half, struct cuda_rows r)
{
    wait_before();
    float p = (float)r.position[blockIdx.x];
    for (uint32_t i = threadIdx.x; i < half; i += blockDim.x) {
        float s, c;
        sincosf(__fmul_rn(p, inv_freq[i]), &s, &c);
        cs[(size_t)blockIdx.x * half + i] = make_float2(c, s);
    }
}

cudaError_t cuda_angles(struct cuda_where at, float2 *cs, const float *inv_freq, uint32_t half,
                        struct cuda_rows r)
{
    return launch(at, angles, r.n, 64, 0, cs, inv_freq, half, r);
}
