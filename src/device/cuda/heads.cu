/* SPDX-License-Identifier: Apache-2.0 */
/* Heads of a row: norm, rotation, and the way of keys and values into the pages, in one pass.
 * A warp a head; a lane holds the pairs (i, i + head_dim/2) for i = lane, lane + 32, ... */
#include "device/cuda/kernel.cuh"

#define WARPS 4
#define MAX_PAIRS 4 /* head_dim <= 256 */

struct job {
    struct cuda_head_part part[3]; /* q, k, v */
    struct cuda_pages pages;
    struct cuda_rows rows;
    uint32_t head_dim;
};

static __device__ __forceinline__ void load_head(const cuda_bf16 *x, uint32_t half, uint32_t lane,
                                                 float a[MAX_PAIRS], float b[MAX_PAIRS])
{
#pragma unroll
    for (int j = 0; j < MAX_PAIRS; j++) {
        uint32_t i = lane + 32 * j;
        a[j] = i < half ? to_f32(x[i]) : 0;
        b[j] = i < half ? to_f32(x[i + half]) : 0;
    }
}

static __device__ __forceinline__ void norm_head(const struct cuda_head_part &p, uint32_t half,
                                                 uint32_t lane, float a[MAX_PAIRS],
                                                 float b[MAX_PAIRS])
{
    float sum = 0;
#pragma unroll
    for (int j = 0; j < MAX_PAIRS; j++)
        sum += a[j] * a[j] + b[j] * b[j];
    float scale = rsqrtf(warp_sum(sum) / (2 * half) + p.eps);
#pragma unroll
    for (int j = 0; j < MAX_PAIRS; j++) {
        uint32_t i = lane + 32 * j;
        if (i < half) {
            a[j] *= scale * (p.offset + p.norm[i]);
            b[j] *= scale * (p.offset + p.norm[i + half]);
        }
    }
}

static __device__ __forceinline__ void rotate_head(const float2 *cs, uint32_t half, uint32_t lane,
                                                   float a[MAX_PAIRS], float b[MAX_PAIRS])
{
#pragma unroll
    for (int j = 0; j < MAX_PAIRS; j++) {
        uint32_t i = lane + 32 * j;
        if (i < half) {
            float x = a[j], y = b[j];
            a[j] = x * cs[i].x - y * cs[i].y;
            b[j] = y * cs[i].x + x * cs[i].y;
        }
    }
}

static __device__ cuda_bf16 *page_row(const struct job &j, uint32_t row, uint32_t which,
                                      uint32_t head)
{
    const struct cuda_rows &r = j.rows;
    uint32_t p = (uint32_t)r.position[row];
    const int32_t *table = r.tables +
                           ((size_t)r.span[row] * CUDA_GROUPS + j.pages.group) * r.table_stride;
    uint8_t *base = which == 1 ? j.pages.k : j.pages.v;
    return (cuda_bf16 *)(base + table[p / CUDA_PAGE] * j.pages.stride_block +
                         head * j.pages.stride_head) +
           (p % CUDA_PAGE) * j.head_dim;
}

static __global__ void heads(struct job j)
{
    uint32_t lane = threadIdx.x & 31, row = blockIdx.x, half = j.head_dim / 2, which = 0;
    uint32_t head = blockIdx.y * WARPS + (threadIdx.x >> 5);
    float a[MAX_PAIRS], b[MAX_PAIRS];
    wait_before();
    while (which < 3 && head >= j.part[which].heads)
        head -= j.part[which++].heads;
    if (which == 3)
        return;
    const struct cuda_head_part &p = j.part[which];
    cuda_bf16 *x = p.x + (size_t)row * p.ld + (size_t)head * j.head_dim;
    load_head(x, half, lane, a, b);
    if (p.norm)
        norm_head(p, half, lane, a, b);
    if (p.cs)
        rotate_head(p.cs + (size_t)row * half, half, lane, a, b);
    cuda_bf16 *to = which == 0 ? x : page_row(j, row, which, head);
#pragma unroll
    for (int i = 0; i < MAX_PAIRS; i++) {
        uint32_t at = lane + 32 * i;
        if (at < half) {
            to[at] = to_bf16(a[i]);
            to[at + half] = to_bf16(b[i]);
        }
    }
}

cudaError_t cuda_heads(struct cuda_where at, struct cuda_head_part q, struct cuda_head_part k,
                       struct cuda_head_part v, uint32_t head_dim, struct cuda_pages p,
                       struct cuda_rows r)
{
    struct job j = {{q, k, v}, p, r, head_dim};
    uint32_t n = q.heads + k.heads + v.heads;
    return launch(at, heads, dim3(r.n, (n + WARPS - 1) / WARPS), 32 * WARPS, 0, j);
}
