/* SPDX-License-Identifier: Apache-2.0 */
/* A few rows times a matrix: streams the weights once for all rows.
 *
 * The matrix unit computes 16 outputs times 8 rows; weights are its first operand, so rows that do
 * not exist cost nothing and each row keeps a column, hence its bits, to itself. A block computes
 * 8, 16 or 32 outputs; its warps share k in slices of multiples of 32 and are added up in order.
 * A lane loads 8 consecutive weights (16 bytes): k is permuted inside 32 alike for both operands.
 * bf16 operands, float32 sums; promised: relative error 3e-7 * sqrt(k) of the sum of magnitudes. */
#include "device/cuda/kernel.cuh"

#define MAX_WARPS 16
#define DEPTH 4 /* loads of 32 k under way for each half tile */

static __device__ __forceinline__ uint4 load_weight(const cuda_bf16 *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

/* Norm the rows into shared memory as bf16 without the row's own factor, which the epilogue
 * applies: that needs no pass before the first product. Returns by `factor` [8] in shared memory. */
static __device__ void stage_rows(const struct cuda_gemv &j, cuda_bf16 *xs, uint32_t ld,
                                  float *factor)
{
    uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n = blockDim.x / 32;
    __shared__ float part[MAX_WARPS][CUDA_DECODE_ROWS];
    for (uint32_t r = 0; r < j.rows; r++) {
        float sum = 0;
        for (uint32_t i = 4 * threadIdx.x; i < j.k; i += 4 * blockDim.x) {
            float4 x = *(const float4 *)(j.xf + (size_t)r * j.ldx + i);
            float4 g = *(const float4 *)(j.g + i);
            sum += x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
            uint2 v = make_uint2(pack_bf16(x.x * (g.x + j.offset), x.y * (g.y + j.offset)),
                                 pack_bf16(x.z * (g.z + j.offset), x.w * (g.w + j.offset)));
            *(uint2 *)(xs + r * ld + i) = v;
        }
        sum = warp_sum(sum);
        if (lane == 0)
            part[warp][r] = sum;
    }
    __syncthreads();
    if (threadIdx.x < j.rows) {
        float sum = 0;
        for (uint32_t i = 0; i < n; i++)
            sum += part[i][threadIdx.x];
        factor[threadIdx.x] = rsqrtf(sum / j.k + j.eps);
    }
    __syncthreads();
}

static __device__ __forceinline__ void put(const struct cuda_gemv &j, uint32_t row, uint32_t m,
                                           float v)
{
    size_t at = (size_t)row * j.ldy + m;
    if (j.epilogue == CUDA_STORE_F32)
        ((float *)j.y)[at] = v;
    else if (j.epilogue == CUDA_ADD_F32)
        ((float *)j.y)[at] += v;
    else
        ((cuda_bf16 *)j.y)[at] = to_bf16(v);
}

/* OUT: outputs of a block, 8 (half a tile), 16 or 32. NORM: rows come from xf. GATE: a tile is 8
 * outputs of the gate above the same 8 of up. */
template <int OUT, bool NORM, bool GATE>
static __global__ void __launch_bounds__(32 * MAX_WARPS) gemv(struct cuda_gemv j, uint32_t slice)
{
    constexpr int TILES = OUT == 8 ? 1 : OUT / 16;
    constexpr int HALVES = OUT == 8 ? 1 : 2;
    extern __shared__ __align__(16) cuda_bf16 xs[];
    __shared__ float sums[MAX_WARPS][TILES][32][4];
    __shared__ float factor[CUDA_DECODE_ROWS];
    uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    uint32_t k0 = warp * slice, k1 = min(j.k, k0 + slice), ldxs = j.k + 32;
    uint32_t steps = k1 > k0 ? (k1 - k0 + 31) / 32 : 0, outs = GATE ? OUT / 2 : OUT;
    uint32_t m0 = blockIdx.x * outs, at = k0 + 8 * q;
    const cuda_bf16 *w[TILES][HALVES];
    bool have[TILES][HALVES];
    uint4 buf[DEPTH][TILES][HALVES];
    float c[TILES][4] = {};

#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
            uint32_t m = GATE ? m0 + 8 * t + g : m0 + 16 * t + 8 * h + g;
            have[t][h] = m < j.m;
            w[t][h] = j.w + ((size_t)(GATE && h ? j.m : 0) + (have[t][h] ? m : 0)) * j.k + at;
        }
    auto fetch = [&](uint4(&to)[TILES][HALVES], uint32_t s) {
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int h = 0; h < HALVES; h++)
                to[t][h] = have[t][h] && s < steps && at + 32 * s < k1
                               ? load_weight(w[t][h] + 32 * s)
                               : make_uint4(0, 0, 0, 0);
    };
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        fetch(buf[d], d);
    wait_before();
    if (NORM)
        stage_rows(j, xs, ldxs, factor);
    bool row = g < j.rows;
    const cuda_bf16 *x = NORM ? xs + g * ldxs + at : j.x + (size_t)(row ? g : 0) * j.ldx + at;
    auto rows_at = [&](uint32_t s) {
        return row && s < steps && at + 32 * s < k1 ? *(const uint4 *)(x + 32 * s)
                                                    : make_uint4(0, 0, 0, 0);
    };
    uint4 next[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        next[d] = rows_at(d);
    for (uint32_t s = 0; s < steps; s += DEPTH)
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            uint4 b = next[d];
            next[d] = rows_at(s + d + DEPTH);
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                uint4 a0 = buf[d][t][0], a1 = make_uint4(0, 0, 0, 0);
                if (HALVES == 2)
                    a1 = buf[d][t][HALVES - 1];
                mma16816(c[t], a0.x, a1.x, a0.y, a1.y, b.x, b.y);
                mma16816(c[t], a0.z, a1.z, a0.w, a1.w, b.z, b.w);
            }
            fetch(buf[d], s + d + DEPTH);
        }
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            sums[warp][t][lane][i] = c[t][i];
    __syncthreads();
    /* Thread (tile, lane, i): outputs g and g + 8 of row 2q + i. */
    uint32_t tile = threadIdx.x / 64, ln = threadIdx.x / 2 % 32, i = threadIdx.x & 1;
    uint32_t r = 2 * (ln & 3) + i, n_warps = blockDim.x / 32;
    if (tile >= TILES || r >= j.rows)
        return;
    float lo = 0, hi = 0;
    for (uint32_t k = 0; k < n_warps; k++) {
        lo += sums[k][tile][ln][i];
        hi += sums[k][tile][ln][i + 2];
    }
    if (NORM) {
        lo *= factor[r];
        hi *= factor[r];
    }
    uint32_t m = m0 + (GATE ? 8 : 16) * tile + (ln >> 2);
    if (GATE) {
        if (m < j.m)
            put(j, r, m, activate(lo, j.act) * hi);
        return;
    }
    if (m < j.m)
        put(j, r, m, lo + (j.bias ? j.bias[m] : 0));
    if (HALVES == 2 && m + 8 < j.m)
        put(j, r, m + 8, hi + (j.bias ? j.bias[m + 8] : 0));
}

template <int OUT, bool NORM, bool GATE>
static cudaError_t run(struct cuda_where at, const struct cuda_gemv *g)
{
    uint32_t outs = GATE ? OUT / 2 : OUT, blocks = (g->m + outs - 1) / outs;
    uint32_t steps = (g->k + 31) / 32, warps = 8;
    if (blocks < 300 && steps >= 64)
        warps = 16;
    while (warps > 2 && steps < 2 * warps)
        warps /= 2;
    uint32_t slice = (steps + warps - 1) / warps * 32;
    size_t shared = NORM ? (size_t)CUDA_DECODE_ROWS * (g->k + 32) * 2 : 0;
    return launch(at, gemv<OUT, NORM, GATE>, blocks, 32 * (warps < 4 ? 4 : warps), shared, *g,
                  slice);
}

/* Fewer outputs a block where the matrix is small, so that every multiprocessor has two blocks. A
 * function of the shape alone: bits do not depend on the number of rows. */
template <bool NORM>
static cudaError_t choose(struct cuda_where at, const struct cuda_gemv *g, uint32_t n_sms)
{
    (void)n_sms;
    if (g->epilogue == CUDA_GATE)
        return g->m >= 8192 ? run<32, NORM, true>(at, g) : run<16, NORM, true>(at, g);
    if (g->m >= 32768)
        return run<32, NORM, false>(at, g);
    return g->m >= 4096 ? run<16, NORM, false>(at, g) : run<8, NORM, false>(at, g);
}

cudaError_t cuda_gemv(struct cuda_where at, const struct cuda_gemv *g, uint32_t n_sms)
{
    return g->xf ? choose<true>(at, g, n_sms) : choose<false>(at, g, n_sms);
}
