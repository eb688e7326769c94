/* SPDX-License-Identifier: Apache-2.0 */
/* A few rows times a matrix: streams the weights once for all rows.
 *
 * The matrix unit computes 16 outputs times 8 rows; weights are its first operand, so rows that do
 * not exist cost nothing and each row keeps a column, hence its bits, to itself. A block walks
 * tiles of 8 or 16 outputs; its warps share k in slices of multiples of 32 and are added up in
 * order. Loads run DEPTH steps ahead across the borders of tiles, and begin before the kernel in
 * front has ended: small matrices are mostly in registers when their rows arrive. A lane loads 8
 * consecutive weights (16 bytes): k is permuted inside 32 alike for both operands.
 * bf16 operands, float32 sums; promised: relative error 3e-7 * sqrt(k) of the sum of magnitudes. */
#include "device/cuda/kernel.cuh"

#define WARPS 8
#define UNITS 4 /* of 32 k in a step */

/* Steps under way: 12 KiB a warp, so that the next kernel's rings fit beside this one's. */
static __host__ __device__ constexpr uint32_t ring_depth(int halves)
{
    return halves == 2 ? 3 : 6;
}

enum norm { PLAIN, NORM, SUM_NORM };

static __device__ __forceinline__ float add_squares(float sum, float4 v)
{
    sum = __fmaf_rn(v.x, v.x, sum);
    sum = __fmaf_rn(v.y, v.y, sum);
    sum = __fmaf_rn(v.z, v.z, sum);
    return __fmaf_rn(v.w, v.w, sum);
}

/* The block's sums of squares to the rows' norm factors, by factor [8] in shared memory. */
template <int R>
static __device__ __forceinline__ void to_factors(const struct cuda_gemv &j, float *sum,
                                                  float (*part)[CUDA_DECODE_ROWS], float *factor)
{
#pragma unroll
    for (int r = 0; r < R; r++) {
        float v = warp_sum(sum[r]);
        if ((threadIdx.x & 31) == 0)
            part[threadIdx.x >> 5][r] = v;
    }
    __syncthreads();
    if (threadIdx.x < R) {
        float all = 0;
        for (uint32_t i = 0; i < WARPS; i++)
            all += part[i][threadIdx.x];
        factor[threadIdx.x] = rsqrtf(all / j.k + j.eps);
    }
    __syncthreads();
}

/* Norm the rows into shared memory as bf16 without the row's own factor, which the epilogue
 * applies: that needs no pass before the first product. SUM_NORM: yf's norm is added first, and the
 * sum is kept, each block its share. R is 1 or the most there can be; which one changes no bit:
 * a thread adds up the same elements of a row in the same order. */
template <int N, int R>
static __device__ __forceinline__ void stage_rows(const struct cuda_gemv &j, cuda_bf16 *xs,
                                                  uint32_t ld, float *factor)
{
    __shared__ float part[WARPS][CUDA_DECODE_ROWS];
    float sum[R] = {}, by[R];
    if (N == SUM_NORM) {
#pragma unroll(R == 1 ? 4 : 1)
        for (uint32_t i = 4 * threadIdx.x; i < j.k; i += 4 * blockDim.x)
#pragma unroll
            for (int r = 0; r < R; r++)
                if (r < j.rows)
                    sum[r] = add_squares(sum[r], *(const float4 *)(j.yf + (size_t)r * j.ldx + i));
        to_factors<R>(j, sum, part, factor);
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        sum[r] = 0;
        by[r] = N == SUM_NORM ? factor[r] : 0;
    }
#pragma unroll(R == 1 ? 4 : 1)
    for (uint32_t i = 4 * threadIdx.x; i < j.k; i += 4 * blockDim.x) {
        float4 g = *(const float4 *)(j.g + i), f;
        if (N == SUM_NORM)
            f = *(const float4 *)(j.gf + i);
#pragma unroll
        for (int r = 0; r < R; r++) {
            size_t at = (size_t)r * j.ldx + i;
            if (r >= j.rows)
                continue;
            float4 x = *(const float4 *)(j.xf + at);
            if (N == SUM_NORM) {
                float4 y = *(const float4 *)(j.yf + at);
                x.x = __fmaf_rn(y.x * by[r], f.x + j.offset, x.x);
                x.y = __fmaf_rn(y.y * by[r], f.y + j.offset, x.y);
                x.z = __fmaf_rn(y.z * by[r], f.z + j.offset, x.z);
                x.w = __fmaf_rn(y.w * by[r], f.w + j.offset, x.w);
                if (i / 4 % gridDim.x == blockIdx.x)
                    *(float4 *)(j.sum + at) = x;
            }
            sum[r] = add_squares(sum[r], x);
            *(uint2 *)(xs + r * ld +
                       i) = make_uint2(pack_bf16(x.x * (g.x + j.offset), x.y * (g.y + j.offset)),
                                       pack_bf16(x.z * (g.z + j.offset), x.w * (g.w + j.offset)));
        }
    }
    to_factors<R>(j, sum, part, factor);
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

/* Loads under way: where the next step comes from. A step is UNITS times 32 k, 256 bytes of every
 * row in one go, which memory likes better than four visits. Every lane brings its own 16 bytes of
 * the lower and the upper 8 outputs into its own place of the warp's ring, and nobody else waits
 * for them. */
struct ahead {
    const cuda_bf16 *from; /* the lower outputs' row at this lane's k */
    uint32_t m, k;
};

/* m1: the block's outputs end there. */
template <int HALVES>
static __device__ __forceinline__ void issue(uint32_t slot, const struct ahead &a,
                                             const struct cuda_gemv &j, size_t upper, uint32_t rows,
                                             uint32_t k1, uint32_t m1)
{
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
        bool have = a.m + h * rows < m1;
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            bool real = have && a.k + 32 * u < k1;
            asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(
                             slot + 512 * (HALVES * u + h)),
                         "l"(real ? a.from + h * upper + 32 * u : j.w), "r"(real ? 16 : 0));
        }
    }
    asm volatile("cp.async.commit_group;");
}

/* What the ring has no room for while the rows are made ready: the rest of the tile that it ends
 * in, into the L2 cache. Lanes 4 g and 4 g + 1 take the row g and the one above. */
template <int HALVES>
static __device__ __forceinline__ void fetch_next(const struct cuda_gemv &j, uint32_t m, uint32_t k,
                                                  uint32_t k1, size_t upper, uint32_t rows,
                                                  uint32_t m1)
{
#if __CUDA_ARCH__ >= 900
    uint32_t lane = threadIdx.x & 31, h = lane & 3;
    m += lane >> 2;
    if (h < HALVES && m + h * rows < m1 && k < k1)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(j.w + (size_t)m * j.k +
                                                                        h * upper + k),
                     "r"(2 * (k1 - k)));
#endif
}

static __device__ __forceinline__ uint4 read_slot(uint32_t slot)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(slot)
                 : "memory");
    return v;
}

/* The tile's sums over the warps, by 64 threads; thread (lane, i): outputs g, g + 8, row 2q + i. */
template <int HALVES, int N, bool GATE>
static __device__ __forceinline__ void finish(const struct cuda_gemv &j, uint32_t m, uint32_t m1,
                                              uint32_t t, const float sums[WARPS][32][4],
                                              const float *factor)
{
    uint32_t lane = t / 2, i = t & 1, r = 2 * (lane & 3) + i;
    float lo = 0, hi = 0;
    if (r >= j.rows)
        return;
#pragma unroll
    for (int k = 0; k < WARPS; k++) {
        lo += sums[k][lane][i];
        hi += sums[k][lane][i + 2];
    }
    if (N != PLAIN) {
        lo *= factor[r];
        hi *= factor[r];
    }
    m += lane >> 2;
    if (m < m1)
        put(j, r, m, GATE ? activate(lo, j.act) * hi : lo + (j.bias ? j.bias[m] : 0));
    if (!GATE && HALVES == 2 && m + 8 < m1)
        put(j, r, m + 8, hi + (j.bias ? j.bias[m + 8] : 0));
}

/* HALVES 1: tiles of 8 outputs, 2: of 16. N: how rows come from xf. GATE: a tile is 8 outputs of
 * the gate above the same 8 of up. Shared memory: the rings, then the normed rows. */
template <int HALVES, int N, bool GATE>
static __global__ void __launch_bounds__(32 * WARPS, 2)
    gemv(const __grid_constant__ struct cuda_gemv j, uint32_t slice)
{
    constexpr uint32_t OUTS = GATE || HALVES == 1 ? 8 : 16, SLOT = 512 * HALVES * UNITS;
    constexpr uint32_t DEPTH = ring_depth(HALVES), STEP = 32 * UNITS;
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ float sums[2][WARPS][32][4];
    __shared__ float factor[CUDA_DECODE_ROWS];
    cuda_bf16 *xs = (cuda_bf16 *)(shared + WARPS * DEPTH * SLOT);
    uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
    uint32_t k0 = warp * slice, k1 = min(j.k, k0 + slice), ldxs = j.k + 32;
    uint32_t steps = (slice + STEP - 1) / STEP, at = k0 + 8 * (lane & 3);
    uint32_t m0 = blockIdx.x * j.m / gridDim.x, m1 = (blockIdx.x + 1) * j.m / gridDim.x;
    uint32_t ring = (uint32_t)__cvta_generic_to_shared(shared) + warp * DEPTH * SLOT + 16 * lane;
    size_t upper = (size_t)(GATE ? j.m : 8) * j.k, hop = (size_t)OUTS * j.k;
    struct ahead a = {j.w + (size_t)(m0 + g) * j.k + at, m0 + g, at};
    uint32_t rows = GATE ? 0 : 8, ahead_step = 0;
    auto next = [&](uint32_t slot) {
        issue<HALVES>(ring + slot * SLOT, a, j, upper, rows, k1, m1);
        a.from += STEP;
        a.k += STEP;
        if (++ahead_step == steps) {
            ahead_step = 0;
            a.k = at;
            a.from += hop - (size_t)STEP * steps;
            a.m += OUTS;
        }
    };
    for (uint32_t d = 0; d < DEPTH; d++)
        next(d);
    wait_before();
    fetch_next<HALVES>(j, m0 + DEPTH / steps * OUTS, k0 + DEPTH % steps * STEP, k1, upper, rows,
                       m1);
    if (N != PLAIN && j.rows == 1)
        stage_rows<N, 1>(j, xs, ldxs, factor);
    else if (N != PLAIN)
        stage_rows<N, CUDA_DECODE_ROWS>(j, xs, ldxs, factor);
    const cuda_bf16 *x = N != PLAIN ? xs + g * ldxs + at
                                    : j.x + (size_t)(g < j.rows ? g : 0) * j.ldx + at;
    const uint4 zero = make_uint4(0, 0, 0, 0);
    bool row = g < j.rows;
    uint4 b[UNITS];
    auto rows_at = [&](uint32_t k) {
#pragma unroll
        for (int u = 0; u < UNITS; u++)
            b[u] = row && at + k + 32 * u < k1 ? *(const uint4 *)(x + k + 32 * u) : zero;
    };
    rows_at(0);
    float c[2][4] = {};
    uint32_t slot = 0, turn = 0;
    for (uint32_t m = m0; m < m1; m += OUTS) {
        for (uint32_t step = 0; step < steps; step++) {
            uint4 now[UNITS];
#pragma unroll
            for (int u = 0; u < UNITS; u++)
                now[u] = b[u];
            rows_at(step + 1 == steps ? 0 : STEP * (step + 1));
            asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1));
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                uint4 a0 = read_slot(ring + slot * SLOT + 512 * HALVES * u), a1 = zero;
                if (HALVES == 2)
                    a1 = read_slot(ring + slot * SLOT + 512 * (HALVES * u + 1));
                mma16816(c[0], a0.x, a1.x, a0.y, a1.y, now[u].x, now[u].y);
                mma16816(c[1], a0.z, a1.z, a0.w, a1.w, now[u].z, now[u].w);
            }
            next(slot);
            slot = slot + 1 == DEPTH ? 0 : slot + 1;
        }
        *(float4 *)sums[turn & 1][warp][lane] = make_float4(c[0][0] + c[1][0], c[0][1] + c[1][1],
                                                            c[0][2] + c[1][2], c[0][3] + c[1][3]);
#pragma unroll
        for (int i = 0; i < 8; i++)
            c[i >> 2][i & 3] = 0;
        __syncthreads(); /* one a tile: the other half of sums is written next */
        if (warp / 2 == turn % (WARPS / 2))
            finish<HALVES, N, GATE>(j, m, m1, threadIdx.x & 63, sums[turn & 1], factor);
        turn++;
    }
}

/* Every multiprocessor has an equal share of the outputs, in tiles whose last may be partial. Which
 * outputs share a tile or a block changes no bit, and the slices of k follow from the shape: bits
 * depend neither on the number of rows nor on the card. */
template <int HALVES, int N, bool GATE>
static cudaError_t run(struct cuda_where at, const struct cuda_gemv *g, uint32_t n_sms)
{
    uint32_t slice = ((g->k + 31) / 32 + WARPS - 1) / WARPS * 32;
    uint32_t blocks = g->m < n_sms ? g->m : n_sms;
    size_t shared = WARPS * ring_depth(HALVES) * 512 * HALVES * UNITS +
                    (N != PLAIN ? (size_t)g->rows * (g->k + 32) * 2 : 0);
    cudaError_t rc = cudaFuncSetAttribute(gemv<HALVES, N, GATE>,
                                          cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
    return rc ? rc : launch(at, gemv<HALVES, N, GATE>, blocks, 32 * WARPS, shared, *g, slice);
}

/* Tiles of 8 where there are few outputs to a block, but not where a second tile would have only a
 * few. */
template <int N>
static cudaError_t choose(struct cuda_where at, const struct cuda_gemv *g, uint32_t n_sms)
{
    uint32_t share = (g->m + n_sms - 1) / n_sms;
    if (g->epilogue == CUDA_GATE)
        return run<2, N, true>(at, g, n_sms);
    return g->m >= 4096 || (share > 8 && share <= 16) ? run<2, N, false>(at, g, n_sms)
                                                      : run<1, N, false>(at, g, n_sms);
}

cudaError_t cuda_gemv(struct cuda_where at, const struct cuda_gemv *g, uint32_t n_sms)
{
    if (g->yf)
        return choose<SUM_NORM>(at, g, n_sms);
    return g->xf ? choose<NORM>(at, g, n_sms) : choose<PLAIN>(at, g, n_sms);
}
