/* SPDX-License-Identifier: Apache-2.0 */
/* A few rows times a matrix: streams the weights once for all rows.
 *
 * The matrix unit computes 16 outputs times 8 rows; weights are its first operand, so rows that do
 * not exist cost nothing and each row keeps a column, hence its bits, to itself. A block walks
 * tiles of 8 or 16 outputs; its warps share k in slices of multiples of 32 and are added up in
 * order. Loads run DEPTH steps ahead across the borders of tiles, and begin before the kernel in
 * front has ended: small matrices are in shared memory when their rows arrive. A lane loads 8
 * consecutive weights (16 bytes): k is permuted inside 32 alike for both operands.
 * bf16 operands, float32 sums; promised: relative error 3e-7 * sqrt(k) of the sum of magnitudes. */
#include "device/cuda/kernel.cuh"

#define WARPS 8
#define UNITS 2 /* of 32 k in a step */
/* Bytes of shared memory of which no two fit on a multiprocessor, and that fit beside attention. */
#define HALF_SM 107500u
#define STATIC_BYTES 8704u /* of shared memory, at most, besides the rings and the rows */
#define MAX_COPY 81920u    /* bytes of rows that are worth a copy in shared memory */

enum norm { PLAIN, NORM, SUM_NORM };

/* Bytes of a warp's ring at most. Rows that need no norm come from attention as a rule: a little
 * less of it fits beside that. */
static __host__ __device__ constexpr uint32_t ring_bytes(int n)
{
    return n == PLAIN ? 12288 : 14336;
}

static __host__ __device__ constexpr uint32_t tile_outputs(int halves, bool gate)
{
    return gate || halves == 1 ? 8 : 16;
}

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
    constexpr int U = R <= 2 ? 4 : R <= 4 ? 2 : 1; /* columns of four whose loads are under way */
    const uint32_t hop = 4 * blockDim.x;
    float sum[R] = {}, by[R];
    float4 x[U][R], y[N == SUM_NORM ? U : 1][R];
    if (N == SUM_NORM) {
        for (uint32_t i0 = 4 * threadIdx.x; i0 < j.k; i0 += U * hop) {
#pragma unroll
            for (int u = 0; u < U; u++)
#pragma unroll
                for (int r = 0; r < R; r++)
                    if (r < j.rows && i0 + u * hop < j.k)
                        y[u][r] = *(const float4 *)(j.yf + (size_t)r * j.ldx + i0 + u * hop);
#pragma unroll
            for (int u = 0; u < U; u++)
#pragma unroll
                for (int r = 0; r < R; r++)
                    if (r < j.rows && i0 + u * hop < j.k)
                        sum[r] = add_squares(sum[r], y[u][r]);
        }
        to_factors<R>(j, sum, part, factor);
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        sum[r] = 0;
        by[r] = N == SUM_NORM ? factor[r] : 0;
    }
    for (uint32_t i0 = 4 * threadIdx.x; i0 < j.k; i0 += U * hop) {
        float4 g[U], f[N == SUM_NORM ? U : 1];
#pragma unroll
        for (int u = 0; u < U; u++) {
            if (i0 + u * hop >= j.k)
                break;
            g[u] = *(const float4 *)(j.g + i0 + u * hop);
            if (N == SUM_NORM)
                f[u] = *(const float4 *)(j.gf + i0 + u * hop);
#pragma unroll
            for (int r = 0; r < R; r++) {
                size_t at = (size_t)r * j.ldx + i0 + u * hop;
                if (r < j.rows) {
                    x[u][r] = *(const float4 *)(j.xf + at);
                    if (N == SUM_NORM)
                        y[u][r] = *(const float4 *)(j.yf + at);
                }
            }
        }
#pragma unroll
        for (int u = 0; u < U; u++) {
            uint32_t i = i0 + u * hop;
            if (i >= j.k)
                break;
            float4 w = {g[u].x + j.offset, g[u].y + j.offset, g[u].z + j.offset, g[u].w + j.offset};
#pragma unroll
            for (int r = 0; r < R; r++) {
                float4 v = x[u][r];
                if (r >= j.rows)
                    continue;
                if (N == SUM_NORM) {
                    float4 z = y[u][r];
                    v.x = __fmaf_rn(z.x * by[r], f[u].x + j.offset, v.x);
                    v.y = __fmaf_rn(z.y * by[r], f[u].y + j.offset, v.y);
                    v.z = __fmaf_rn(z.z * by[r], f[u].z + j.offset, v.z);
                    v.w = __fmaf_rn(z.w * by[r], f[u].w + j.offset, v.w);
                    if (i / 4 % gridDim.x == blockIdx.x)
                        *(float4 *)(j.sum + (size_t)r * j.ldx + i) = v;
                }
                sum[r] = add_squares(sum[r], v);
                *(uint2 *)(xs + r * ld + i) = make_uint2(pack_bf16(v.x * w.x, v.y * w.y),
                                                         pack_bf16(v.z * w.z, v.w * w.w));
            }
        }
    }
    to_factors<R>(j, sum, part, factor);
}

/* The warp's own slice of the rows into shared memory: a step would wait for the L2 cache. */
static __device__ __forceinline__ void copy_rows(const struct cuda_gemv &j, cuda_bf16 *xs,
                                                 uint32_t ld, uint32_t k0, uint32_t k1)
{
    for (uint32_t r = 0; r < j.rows; r++)
#pragma unroll 4
        for (uint32_t i = k0 + 8 * (threadIdx.x & 31); i < k1; i += 256)
            *(uint4 *)(xs + r * ld + i) = *(const uint4 *)(j.x + (size_t)r * j.ldx + i);
    __syncwarp();
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

/* How a product is cut up: from its shape, rows and the number of blocks. */
struct cut {
    uint32_t slice; /* k of a warp */
    uint32_t depth; /* steps that a warp's ring holds */
    bool copied;    /* rows that need no norm are copied into shared memory */
};

/* HALVES 1: tiles of 8 outputs, 2: of 16. N: how rows come from xf. GATE: a tile is 8 outputs of
 * the gate above the same 8 of up. WHOLE: the ring holds all that the block reads. Shared memory:
 * the rings, then the rows. */
template <int HALVES, int N, bool GATE, bool WHOLE>
static __global__ void __launch_bounds__(32 * WARPS, 2)
    gemv(const __grid_constant__ struct cuda_gemv j, const __grid_constant__ struct cut c)
{
    constexpr uint32_t OUTS = tile_outputs(HALVES, GATE), SLOT = 512 * HALVES * UNITS;
    constexpr uint32_t DEPTH = ring_bytes(N) / SLOT, STEP = 32 * UNITS;
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ float sums[2][WARPS][32][4];
    __shared__ float factor[CUDA_DECODE_ROWS];
    const uint32_t held = WHOLE ? c.depth : DEPTH;
    cuda_bf16 *xs = (cuda_bf16 *)(shared + WARPS * held * SLOT);
    uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
    uint32_t k0 = warp * c.slice, k1 = min(j.k, k0 + c.slice), ldxs = j.k + 32;
    uint32_t steps = (c.slice + STEP - 1) / STEP, at = k0 + 8 * (lane & 3);
    uint32_t m0 = blockIdx.x * j.m / gridDim.x, m1 = (blockIdx.x + 1) * j.m / gridDim.x;
    uint32_t ring = (uint32_t)__cvta_generic_to_shared(shared) + warp * held * SLOT + 16 * lane;
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
    /* A group for every slot, empty where there is none: the oldest of DEPTH is waited for. */
    for (uint32_t d = 0; d < DEPTH; d++) {
        if (d < held)
            next(d);
        asm volatile("cp.async.commit_group;");
    }
    wait_before();
    if (N != PLAIN && j.rows == 1)
        stage_rows<N, 1>(j, xs, ldxs, factor);
    else if (N != PLAIN && j.rows == 2)
        stage_rows<N, 2>(j, xs, ldxs, factor);
    else if (N != PLAIN && j.rows <= 4)
        stage_rows<N, 4>(j, xs, ldxs, factor);
    else if (N != PLAIN)
        stage_rows<N, CUDA_DECODE_ROWS>(j, xs, ldxs, factor);
    else if (c.copied)
        copy_rows(j, xs, ldxs, k0, k1);
    const cuda_bf16 *x = N != PLAIN || c.copied ? xs + g * ldxs + at
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
    float acc[2][4] = {};
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
                mma16816(acc[0], a0.x, a1.x, a0.y, a1.y, now[u].x, now[u].y);
                mma16816(acc[1], a0.z, a1.z, a0.w, a1.w, now[u].z, now[u].w);
            }
            if (!WHOLE)
                next(slot);
            asm volatile("cp.async.commit_group;");
            slot = slot + 1 == held ? 0 : slot + 1;
        }
        *(float4 *)sums[turn & 1][warp][lane] = make_float4(
            acc[0][0] + acc[1][0], acc[0][1] + acc[1][1], acc[0][2] + acc[1][2],
            acc[0][3] + acc[1][3]);
#pragma unroll
        for (int i = 0; i < 8; i++)
            acc[i >> 2][i & 3] = 0;
        __syncthreads(); /* one a tile: the other half of sums is written next */
        if (warp / 2 == turn % (WARPS / 2))
            finish<HALVES, N, GATE>(j, m, m1, threadIdx.x & 63, sums[turn & 1], factor);
        turn++;
    }
}

/* Every multiprocessor has an equal share of the outputs, in tiles whose last may be partial. Which
 * outputs share a tile or a block changes no bit, and the slices of k follow from the shape: bits
 * depend neither on the number of rows nor on the card.
 *
 * A kernel whose rings hold all that its blocks read takes no more than that, so that the kernels
 * around it fit beside it and read ahead. One that reads more takes over half of a multiprocessor:
 * with room for two, blocks of one kernel came to lie on the same one while others were idle
 * (Qwen3-4B: 2.9 ms a step, 2.6 so). */
template <int HALVES, int N, bool GATE>
static cudaError_t run(struct cuda_where at, const struct cuda_gemv *g, struct cuda_card card)
{
    constexpr uint32_t SLOT = 512 * HALVES * UNITS, OUTS = tile_outputs(HALVES, GATE);
    uint32_t blocks = g->m < card.n_sms ? g->m : card.n_sms;
    uint32_t tiles = ((g->m + blocks - 1) / blocks + OUTS - 1) / OUTS;
    size_t rows = (size_t)g->rows * (g->k + 32) * 2;
    struct cut c = {.slice = ((g->k + 31) / 32 + WARPS - 1) / WARPS * 32,
                    .depth = ring_bytes(N) / SLOT};
    uint32_t steps = tiles * ((c.slice + 32 * UNITS - 1) / (32 * UNITS));
    bool whole = steps <= c.depth;
    if (whole)
        c.depth = steps;
    size_t rings = WARPS * c.depth * SLOT, most = card.block_bytes - STATIC_BYTES;
    c.copied = N == PLAIN && rows <= MAX_COPY && rings + rows <= most &&
               (g->rows == 1 || tiles > 1);
    size_t shared = rings + (N != PLAIN || c.copied ? rows : 0);
    if (!whole && shared < HALF_SM && HALF_SM <= most)
        shared = HALF_SM;
    return whole ? launch(at, gemv<HALVES, N, GATE, true>, blocks, 32 * WARPS, shared, *g, c)
                 : launch(at, gemv<HALVES, N, GATE, false>, blocks, 32 * WARPS, shared, *g, c);
}

/* Tiles of 8 where there are few outputs to a block, but not where a second tile would have only a
 * few. */
template <int N>
static cudaError_t choose(struct cuda_where at, const struct cuda_gemv *g, struct cuda_card card)
{
    uint32_t share = (g->m + card.n_sms - 1) / card.n_sms;
    if (g->epilogue == CUDA_GATE)
        return run<2, N, true>(at, g, card);
    return g->m >= 4096 || (share > 8 && share <= 16) ? run<2, N, false>(at, g, card)
                                                      : run<1, N, false>(at, g, card);
}

cudaError_t cuda_gemv(struct cuda_where at, const struct cuda_gemv *g, struct cuda_card card)
{
    if (g->yf)
        return choose<SUM_NORM>(at, g, card);
    return g->xf ? choose<NORM>(at, g, card) : choose<PLAIN>(at, g, card);
}
