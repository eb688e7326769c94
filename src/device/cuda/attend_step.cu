/* SPDX-License-Identifier: Apache-2.0 */
/* One row's whole way through a layer's attention in decode: norm and rotation of its heads, its
 * key and value into the pages, attention over all positions that it sees. sm_90: a cluster of
 * CTAS blocks works on one row and up to 8 query heads of one kv head.
 *
 * The positions are cut into tiles of 16, aligned at absolute positions and dealt out to the
 * cluster's warps in turn, so a row's sums depend on its own position alone. A warp brings tiles
 * through a ring of its own, keys and values in turn; those of earlier steps are on their way
 * before the kernel in front has ended. Scores: queries (8 heads, rows 8 to 15 of the operand are zero)
 * times keys; their layout is that of the second operand of values^T times probabilities. Warps are
 * combined in order, then the blocks of the cluster, which read each other's shared memory. Scores,
 * maxima and sums are float32; probabilities are rounded to bf16 before they meet the values.
 * Positions that the row does not see may hold anything, NaN too. */
#include <cooperative_groups.h>

#include "device/cuda/kernel.cuh"

#define CTAS 8
#define HEADS 8
#define TILE 16
#define NONE (-INFINITY)

namespace cg = cooperative_groups;

struct job {
    struct cuda_attention a;
    struct cuda_head_part part[3]; /* q, k, v */
    struct cuda_rows r;
    uint32_t group, bundles; /* query heads of a kv head; bundles of at most 8 of them */
};

/* What a block works on. */
struct part {
    uint32_t row, head0, n_heads, kv_head;
    uint32_t first, last; /* positions seen, inclusive */
    uint32_t fresh;       /* positions from here on are rows of this batch */
    uint32_t tile, tiles; /* the warp's first, and the end of all */
    bool stores;          /* the row's key and value into the pages */
    const int32_t *table;
};

template <int HD> struct shape {
    static constexpr int LD = HD + 8; /* odd in units of 16 bytes */
    static constexpr int WARPS = HD > 128 ? 4 : 8;
    static constexpr int RING = 3;         /* halves: keys or values of a tile */
    static constexpr int HALF = TILE * LD; /* elements */
    static constexpr int PAIRS = HD / 64;  /* (i, i + HD/2) of a lane */
    /* bytes: queries, then this batch's keys and values, then the rings */
    static constexpr size_t ROWS = 2 * (HEADS + 2 * CUDA_DECODE_ROWS) * LD;
    static constexpr size_t SHARED = ROWS + 2 * (size_t)WARPS * RING * HALF;
};

template <int HD> static __device__ __forceinline__ struct part find_part(const struct job &j)
{
    struct part p;
    uint32_t bundle = blockIdx.y % j.bundles, window = j.a.window;
    p.row = blockIdx.z;
    p.last = (uint32_t)j.r.position[p.row];
    p.kv_head = blockIdx.y / j.bundles;
    p.head0 = p.kv_head * j.group + bundle * HEADS;
    p.n_heads = min(j.group - bundle * HEADS, HEADS);
    p.first = window && p.last >= window ? p.last - window + 1 : 0;
    p.fresh = p.last;
    for (uint32_t i = p.row; i > 0 && j.r.span[i - 1] == j.r.span[p.row]; i--)
        p.fresh--;
    p.tile = p.first / TILE + blockIdx.x * shape<HD>::WARPS + (threadIdx.x >> 5);
    p.tiles = p.last / TILE + 1;
    p.stores = bundle == 0;
    p.table = j.r.tables +
              ((size_t)j.r.span[p.row] * CUDA_GROUPS + j.a.pages.group) * j.r.table_stride;
    return p;
}

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void load4(uint32_t r[4], const void *p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p))
                 : "memory");
}

static __device__ __forceinline__ void load4_transposed(uint32_t r[4], const void *p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p))
                 : "memory");
}

/* ---- heads -------------------------------------------------------------------------------- */

/* 2^x to 2 units in the last place; 0 for minus infinity. */
static __device__ __forceinline__ float power2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* A head by one warp: norm and rotation as the part asks. Lanes hold the pairs (i, i + HD/2) for
 * i = lane, lane + 32, ...; `row` of the batch. */
template <int HD>
static __device__ __forceinline__ void make_head(const struct cuda_head_part &p, uint32_t row,
                                                 uint32_t head, cuda_bf16 *to)
{
    constexpr int PAIRS = shape<HD>::PAIRS, HALF = HD / 2;
    uint32_t lane = threadIdx.x & 31;
    const cuda_bf16 *x = p.x + (size_t)row * p.ld + head * HD;
    float a[PAIRS], b[PAIRS], sum = 0;
    float2 cs[PAIRS];
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        uint32_t i = lane + 32 * j;
        a[j] = to_f32(x[i]);
        b[j] = to_f32(x[i + HALF]);
        cs[j] = p.cs ? p.cs[(size_t)row * HALF + i] : make_float2(1, 0);
        sum += a[j] * a[j] + b[j] * b[j];
    }
    if (p.norm) {
        float scale = rsqrtf(warp_sum(sum) / HD + p.eps);
#pragma unroll
        for (int j = 0; j < PAIRS; j++) {
            uint32_t i = lane + 32 * j;
            a[j] *= scale * (p.offset + p.norm[i]);
            b[j] *= scale * (p.offset + p.norm[i + HALF]);
        }
    }
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
        uint32_t i = lane + 32 * j;
        float y = a[j];
        if (p.cs) {
            a[j] = y * cs[j].x - b[j] * cs[j].y;
            b[j] = b[j] * cs[j].x + y * cs[j].y;
        }
        to[i] = to_bf16(a[j]);
        to[i + HALF] = to_bf16(b[j]);
    }
}

/* ---- tiles -------------------------------------------------------------------------------- */

template <int HD>
static __device__ __forceinline__ cuda_bf16 *page_row(const struct job &j, const struct part &p,
                                                      uint32_t which, uint32_t position)
{
    const struct cuda_pages &g = j.a.pages;
    return (cuda_bf16 *)((which ? g.v : g.k) + p.table[position / CUDA_PAGE] * g.stride_block +
                         p.kv_head * g.stride_head) +
           position % CUDA_PAGE * HD;
}

/* Keys or values of a tile on their way; zeros where the row does not see them, nothing where they
 * are this batch's. */
template <int HD>
static __device__ __forceinline__ void fetch(const struct job &j, const struct part &p,
                                             uint32_t tile, uint32_t which, cuda_bf16 *to)
{
    constexpr uint32_t UNITS = HD / 8;
    if (tile < p.tiles) {
        const cuda_bf16 *from = page_row<HD>(j, p, which, tile * TILE);
#pragma unroll
        for (uint32_t i = threadIdx.x & 31; i < TILE * UNITS; i += 32) {
            uint32_t r = i / UNITS, u = i % UNITS, at = tile * TILE + r;
            bool real = at >= p.first && at < p.fresh;
            if (at < p.fresh || at > p.last)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                                 shared_address(to + r * shape<HD>::LD + 8 * u)),
                             "l"(real ? from + 8 * i : j.a.q), "r"(real ? 16 : 0));
        }
    }
    asm volatile("cp.async.commit_group;");
}

/* Row i of this batch's that the row sees, the first being at p.fresh. */
template <int HD>
static __device__ __forceinline__ cuda_bf16 *fresh_row(cuda_bf16 *queries, uint32_t which,
                                                       uint32_t i)
{
    return queries + (HEADS + 2 * i + which) * shape<HD>::LD;
}

/* All heads that the block needs, a warp each: its queries, and keys and values of this batch's
 * rows where a warp of the block has their tile. The row's own go into its pages. */
template <int HD>
static __device__ __forceinline__ void make_heads(const struct job &j, const struct part &p,
                                                  cuda_bf16 *queries)
{
    constexpr uint32_t WARPS = shape<HD>::WARPS;
    uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    uint32_t jobs = p.n_heads + 2 * (p.last - p.fresh + 1);
    for (uint32_t i = warp; i < jobs; i += WARPS) {
        if (i < p.n_heads) {
            make_head<HD>(j.part[0], p.row, p.head0 + i, queries + i * shape<HD>::LD);
            continue;
        }
        uint32_t which = (i - p.n_heads) & 1, k = (i - p.n_heads) >> 1, at = p.fresh + k;
        if (at < p.first || (at / TILE - p.first / TILE) / WARPS % CTAS != blockIdx.x)
            continue;
        cuda_bf16 *row = fresh_row<HD>(queries, which, k);
        make_head<HD>(j.part[1 + which], p.row - (p.last - at), p.kv_head, row);
        __syncwarp();
        if (at == p.last && p.stores)
            for (uint32_t u = lane; u < HD / 8; u += 32)
                ((uint4 *)page_row<HD>(j, p, which, at))[u] = ((const uint4 *)row)[u];
    }
}

/* This batch's rows of a tile into it. */
template <int HD>
static __device__ __forceinline__ void add_fresh(const struct part &p, uint32_t tile,
                                                 uint32_t which, cuda_bf16 *queries, cuda_bf16 *to)
{
    uint32_t lane = threadIdx.x & 31;
    for (uint32_t at = max(p.fresh, max(p.first, tile * TILE));
         at <= p.last && at < tile * TILE + TILE; at++)
        for (uint32_t u = lane; u < HD / 8; u += 32)
            ((uint4 *)(to + at % TILE * shape<HD>::LD))[u] = ((const uint4 *)fresh_row<HD>(
                queries, which, at - p.fresh))[u];
}

/* What a warp has summed up. Heads of m and l: lane / 4; of o: 2 * (lane % 4) and the next. */
template <int HD> struct sums {
    float o[HD / 16][4], m, l;
};

/* Scores of the tile to probabilities, as the second operand of the values' product. */
template <int HD>
static __device__ __forceinline__ void score(const struct part &p, uint32_t tile,
                                             const uint32_t q[HD / 32][4], const cuda_bf16 *keys,
                                             float scale, struct sums<HD> &s, uint32_t b[2])
{
    constexpr int LD = shape<HD>::LD;
    uint32_t lane = threadIdx.x & 31;
    const cuda_bf16 *kp = keys + ((lane & 7) + (lane >> 4) * 8) * LD + (lane >> 3 & 1) * 8;
    float c[2][2][4] = {}; /* two chains of each block of 8 positions */
#pragma unroll
    for (int d = 0; d < HD / 16; d++) {
        uint32_t k[4], a0 = q[d / 2][2 * (d & 1)], a2 = q[d / 2][2 * (d & 1) + 1];
        load4(k, kp + 16 * d);
        mma16816(c[d & 1][0], a0, 0, a2, 0, k[0], k[1]);
        mma16816(c[d & 1][1], a0, 0, a2, 0, k[2], k[3]);
    }
    float v[4], top = NONE, sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t at = tile * TILE + 8 * (i >> 1) + 2 * (lane & 3) + (i & 1);
        v[i] = at >= p.first && at <= p.last ? (c[0][i >> 1][i & 1] + c[1][i >> 1][i & 1]) * scale
                                             : NONE;
        top = fmaxf(top, v[i]);
    }
    top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFu, top, 2));
    top = fmaxf(s.m, top); /* finite: every tile has a position that is seen */
    float f = power2(s.m - top);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        v[i] = power2(v[i] - top);
        sum += v[i];
    }
    s.l = s.l * f + sum;
    s.m = top;
    b[0] = pack_bf16(v[0], v[1]);
    b[1] = pack_bf16(v[2], v[3]);
    float f0 = __shfl_sync(0xFFFFFFFFu, f, 8 * (lane & 3));
    float f1 = __shfl_sync(0xFFFFFFFFu, f, 8 * (lane & 3) + 4);
#pragma unroll
    for (int n = 0; n < HD / 16; n++) {
        s.o[n][0] *= f0;
        s.o[n][1] *= f1;
        s.o[n][2] *= f0;
        s.o[n][3] *= f1;
    }
}

template <int HD>
static __device__ __forceinline__ void add_values(const cuda_bf16 *values, const uint32_t b[2],
                                                  struct sums<HD> &s)
{
    constexpr int LD = shape<HD>::LD;
    uint32_t lane = threadIdx.x & 31;
    const cuda_bf16 *vp = values + ((lane & 7) + (lane >> 4) * 8) * LD + (lane >> 3 & 1) * 8;
#pragma unroll
    for (int n = 0; n < HD / 16; n++) {
        uint32_t a[4];
        load4_transposed(a, vp + 16 * n);
        mma16816(s.o[n], a[0], a[1], a[2], a[3], b[0], b[1]);
    }
}

/* ---- together ----------------------------------------------------------------------------- */

/* What a sum of maximum m counts for beside the largest; 0 where there was nothing to sum. */
static __device__ __forceinline__ float weight_of(float m, float top)
{
    return m == NONE ? 0 : power2(m - top);
}

/* A block's sums: the warps in order. Into o [HEADS][HD] and ml [HEADS]. */
template <int HD>
static __device__ __forceinline__ void join_warps(const struct part &p, const float *parts,
                                                  const float2 (*wml)[HEADS], float *o, float2 *ml)
{
    constexpr int WARPS = shape<HD>::WARPS;
    for (uint32_t i = threadIdx.x; i < p.n_heads * HD; i += 32 * WARPS) {
        uint32_t h = i / HD;
        float top = NONE, sum = 0, l = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            top = fmaxf(top, wml[w][h].x);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float f = weight_of(wml[w][h].x, top);
            sum += f * parts[w * HEADS * HD + i];
            l += f * wml[w][h].y;
        }
        o[i] = sum;
        if (i % HD == 0)
            ml[h] = make_float2(top, l);
    }
}

template <int HD>
static __global__ void __launch_bounds__(32 * shape<HD>::WARPS)
    attend(const __grid_constant__ struct job j)
{
#if __CUDA_ARCH__ >= 900
    constexpr int LD = shape<HD>::LD, RING = shape<HD>::RING, HALF = shape<HD>::HALF;
    constexpr int WARPS = shape<HD>::WARPS;
    extern __shared__ __align__(16) uint8_t shared[];
    __shared__ float2 wml[WARPS][HEADS], ml[HEADS];
    cg::cluster_group cluster = cg::this_cluster();
    uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    cuda_bf16 *queries = (cuda_bf16 *)shared;
    float *joined = (float *)shared; /* once the heads are used up */
    cuda_bf16 *ring = (cuda_bf16 *)(shared + shape<HD>::ROWS) + warp * RING * HALF;
    struct part p = find_part<HD>(j);
    /* Older pages were there before any kernel of this step. */
#pragma unroll
    for (int i = 0; i < RING; i++)
        fetch<HD>(j, p, p.tile + i / 2 * CTAS * WARPS, i & 1, ring + i * HALF);
    for (uint32_t i = p.n_heads * LD + threadIdx.x; i < HEADS * LD; i += 32 * WARPS)
        queries[i] = 0;
    wait_before();
    make_heads<HD>(j, p, queries);
    __syncthreads();
    uint32_t q[HD / 32][4], b[2], slot = 0, ahead = RING;
#pragma unroll
    for (int d = 0; d < HD / 32; d++)
        load4(q[d], queries + (lane & 7) * LD + 32 * d + 8 * (lane >> 3));
    struct sums<HD> s = {
    };
    s.m = NONE;
    float scale = j.a.scale * 1.4426950408889634f; /* powers of two */
    for (uint32_t tile = p.tile; tile < p.tiles; tile += CTAS * WARPS)
        for (uint32_t which = 0; which < 2; which++) {
            cuda_bf16 *half = ring + slot * HALF;
            asm volatile("cp.async.wait_group %0;" ::"n"(RING - 1) : "memory");
            add_fresh<HD>(p, tile, which, queries, half);
            __syncwarp();
            if (which == 0)
                score<HD>(p, tile, q, half, scale, s, b);
            else
                add_values<HD>(half, b, s);
            __syncwarp();
            fetch<HD>(j, p, p.tile + ahead / 2 * CTAS * WARPS, ahead & 1, half);
            ahead++;
            slot = slot + 1 == RING ? 0 : slot + 1;
        }
    s.l += __shfl_xor_sync(0xFFFFFFFFu, s.l, 1);
    s.l += __shfl_xor_sync(0xFFFFFFFFu, s.l, 2);
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads(); /* the rings become the warps' sums */
    float *parts = (float *)(shared + shape<HD>::ROWS);
    float *mine = parts + warp * HEADS * HD + 2 * (lane & 3) * HD + (lane >> 2);
#pragma unroll
    for (int n = 0; n < HD / 16; n++) {
        mine[16 * n] = s.o[n][0];
        mine[16 * n + HD] = s.o[n][1];
        mine[16 * n + 8] = s.o[n][2];
        mine[16 * n + 8 + HD] = s.o[n][3];
    }
    if ((lane & 3) == 0)
        wml[warp][lane >> 2] = make_float2(s.m, s.l);
    __syncthreads();
    join_warps<HD>(p, parts, wml, joined, ml);
    cluster.sync();
    /* Each block of the cluster writes its share, two dims a thread. */
    for (uint32_t i = 2 * (threadIdx.x * CTAS + blockIdx.x); i < p.n_heads * HD;
         i += 2 * CTAS * 32 * WARPS) {
        uint32_t h = i / HD;
        float2 other[CTAS], v[CTAS];
        float top = NONE, l = 0, x = 0, y = 0;
#pragma unroll
        for (int c = 0; c < CTAS; c++) {
            other[c] = *cluster.map_shared_rank(&ml[h], c);
            v[c] = *(const float2 *)cluster.map_shared_rank(&joined[i], c);
        }
#pragma unroll
        for (int c = 0; c < CTAS; c++)
            top = fmaxf(top, other[c].x);
#pragma unroll
        for (int c = 0; c < CTAS; c++) {
            float f = weight_of(other[c].x, top);
            l += f * other[c].y;
            x += f * v[c].x;
            y += f * v[c].y;
        }
        *(uint32_t *)(j.a.o + (size_t)p.row * j.a.ldo + p.head0 * HD + i) = pack_bf16(x / l, y / l);
    }
    cluster.sync(); /* nobody leaves while others read */
#endif
}

template <int HD> static cudaError_t run(struct cuda_where at, dim3 grid, const struct job &j)
{
    return launch_clusters(at, attend<HD>, grid, 32 * shape<HD>::WARPS, shape<HD>::SHARED, CTAS, j);
}

bool cuda_attend_step_has(uint32_t head_dim)
{
    return head_dim == 64 || head_dim == 128 || head_dim == 256;
}

cudaError_t cuda_attend_step(struct cuda_where at, const struct cuda_attention *a,
                             const struct cuda_head_part part[3], struct cuda_rows r)
{
    struct job j = {*a, {part[0], part[1], part[2]}, r, a->q_heads / a->kv_heads, 0};
    j.bundles = (j.group + HEADS - 1) / HEADS;
    dim3 grid(CTAS, a->kv_heads * j.bundles, r.n);
    switch (a->head_dim) {
    case 64:
        return run<64>(at, grid, j);
    case 128:
        return run<128>(at, grid, j);
    case 256:
        return run<256>(at, grid, j);
    default:
        return cudaErrorInvalidValue;
    }
}
