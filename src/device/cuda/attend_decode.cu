/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of single rows over the pages, split over the context.
 *
 * A block takes one row, up to 8 query heads of one kv head, and CUDA_SPLIT positions whose borders
 * are absolute, so that a row's sums do not depend on what runs beside it. Scores come from the
 * matrix unit with keys as its first operand (k permuted inside 32, as in gemv.cu); values are
 * summed in float32 with unrounded probabilities. Splits are combined in order by whichever block
 * of the row ends last. Positions that the row does not see may hold anything, NaN too. */
#include "device/cuda/kernel.cuh"

#define WARPS 4
#define HEADS 8
#define WARP_POSITIONS (CUDA_SPLIT / WARPS)
#define NONE (-INFINITY)

struct job {
    struct cuda_attention a;
    struct cuda_partials p;
    struct cuda_rows r;
    uint32_t group;   /* query heads of a kv head */
    uint32_t bundles; /* of at most 8 query heads, a kv head */
};

/* What a block works on. */
struct part {
    uint32_t row, head0, n_heads, kv_head;
    uint32_t first, last;     /* positions seen, inclusive */
    uint32_t split, n_splits; /* of this row, counted from its first */
    uint32_t base;            /* first position of the split */
    uint32_t fresh;           /* positions from here on are of this batch */
};

static __device__ bool find_part(const struct job &j, struct part *p)
{
    uint32_t bundle = blockIdx.y % j.bundles, position = (uint32_t)j.r.position[blockIdx.z];
    uint32_t window = j.a.window;
    p->row = blockIdx.z;
    p->kv_head = blockIdx.y / j.bundles;
    p->head0 = p->kv_head * j.group + bundle * HEADS;
    p->n_heads = min(j.group - bundle * HEADS, HEADS);
    p->last = position;
    p->first = window && position >= window ? position - window + 1 : 0;
    p->split = blockIdx.x;
    p->n_splits = position / CUDA_SPLIT - p->first / CUDA_SPLIT + 1;
    p->base = (p->first / CUDA_SPLIT + p->split) * CUDA_SPLIT;
    p->fresh = position;
    for (uint32_t i = p->row; i > 0 && j.r.span[i - 1] == j.r.span[p->row]; i--)
        p->fresh--;
    return p->split < p->n_splits;
}

static __device__ __forceinline__ bool sees(const struct part &p, uint32_t position)
{
    return position >= p.first && position <= p.last;
}

/* The warp's positions lie in one page; NULL where the row sees none of them. */
static __device__ __forceinline__ const cuda_bf16 *
warp_page(const struct job &j, const struct part &p, uint32_t start, const uint8_t *base)
{
    const int32_t *table = j.r.tables + ((size_t)j.r.span[p.row] * CUDA_GROUPS + j.a.pages.group) *
                                            j.r.table_stride;
    if (start > p.last || start + WARP_POSITIONS <= p.first)
        return NULL;
    return (const cuda_bf16 *)(base + table[start / CUDA_PAGE] * j.a.pages.stride_block +
                               p.kv_head * j.a.pages.stride_head) +
           (start % CUDA_PAGE) * j.a.head_dim;
}

/* Bytes from one position to the next in shared memory: 64 modulo 128, so that the eight rows of a
 * matrix operand meet all banks. */
static __host__ __device__ __forceinline__ uint32_t row_bytes(uint32_t dim)
{
    return (2 * dim + 63) / 128 * 128 + 64;
}

/* The warp's keys or values on their way into shared memory: those of this batch, or those before
 * it; zeros where the row does not see them. */
static __device__ void stage(const struct job &j, const struct part &p, uint32_t start, bool fresh,
                             const uint8_t *base, uint8_t *to)
{
    uint32_t lane = threadIdx.x & 31, dim = j.a.head_dim, units = dim / 8, ld = row_bytes(dim);
    const cuda_bf16 *from = warp_page(j, p, start, base);
    to += start % CUDA_SPLIT * ld;
    if (fresh && start + WARP_POSITIONS <= p.fresh)
        return;
    for (uint32_t i = lane; i < WARP_POSITIONS * units; i += 32) {
        uint32_t r = i / units, u = i % units;
        bool real = from && sees(p, start + r);
        if ((start + r >= p.fresh) == fresh)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                             (uint32_t)__cvta_generic_to_shared(to + r * ld + 16 * u)),
                         "l"(real ? from + 8 * i : j.a.q), "r"(real ? 16 : 0));
    }
}

static __device__ void score(const struct job &j, const struct part &p, uint32_t start,
                             const uint8_t *keys, float s[HEADS][CUDA_SPLIT])
{
    uint32_t lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, dim = j.a.head_dim;
    uint32_t at = start % CUDA_SPLIT, ld = row_bytes(dim);
    const cuda_bf16 *x = j.a.q + (size_t)p.row * j.a.ldq + (p.head0 + g) * dim;
    const uint8_t *k = keys + (at + g) * ld;
    float c[2][4] = {};
#pragma unroll 4
    for (uint32_t d = 8 * q; d < (dim + 31) / 32 * 32; d += 32) {
        const uint4 zero = make_uint4(0, 0, 0, 0);
        bool in = d < dim;
        uint4 b = in && g < p.n_heads ? *(const uint4 *)(x + d) : zero;
#pragma unroll
        for (int t = 0; t < 2; t++) {
            uint4 a0 = in ? *(const uint4 *)(k + 16 * t * ld + 2 * d) : zero;
            uint4 a1 = in ? *(const uint4 *)(k + (16 * t + 8) * ld + 2 * d) : zero;
            mma16816(c[t], a0.x, a1.x, a0.y, a1.y, b.x, b.y);
            mma16816(c[t], a0.z, a1.z, a0.w, a1.w, b.z, b.w);
        }
    }
    float scale = j.a.scale * 1.4426950408889634f; /* powers of two from here on */
#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t position = 16 * t + g + (i >= 2 ? 8 : 0);
            s[2 * q + (i & 1)][at + position] = sees(p, start + position) ? c[t][i] * scale : NONE;
        }
}

/* Scores of a head to probabilities relative to the split's maximum. */
static __device__ void soften(const struct part &p, float s[HEADS][CUDA_SPLIT], float2 ml[HEADS])
{
    uint32_t lane = threadIdx.x & 31;
    for (uint32_t h = threadIdx.x >> 5; h < p.n_heads; h += WARPS) {
        float v[CUDA_SPLIT / 32], m = NONE, sum = 0;
#pragma unroll
        for (uint32_t i = 0; i < CUDA_SPLIT / 32; i++) {
            v[i] = s[h][lane + 32 * i];
            m = fmaxf(m, v[i]);
        }
        m = warp_max(m); /* every split has a position that is seen */
#pragma unroll
        for (uint32_t i = 0; i < CUDA_SPLIT / 32; i++) {
            v[i] = exp2f(v[i] - m);
            sum += v[i];
            s[h][lane + 32 * i] = v[i];
        }
        sum = warp_sum(sum);
        if (lane == 0)
            ml[h] = make_float2(m, sum);
    }
}

/* The warp's share of p v: lanes of one position hold 8 dims each. Into o[slot][head][dim], a slot
 * for every warp and position that it takes at a time. */
template <int N>
static __device__ void sum_values(const struct job &j, const struct part &p, uint32_t start,
                                  float s[HEADS][CUDA_SPLIT], const uint8_t *v, float *o)
{
    uint32_t lane = threadIdx.x & 31, dim = j.a.head_dim, lanes = dim / 8, at_once = 32 / lanes;
    uint32_t sub = lane / lanes, d = lane % lanes * 8, at = start % CUDA_SPLIT;
    uint32_t ld = row_bytes(dim);
    float acc[N][8] = {};
    if (sub >= at_once)
        return;
#pragma unroll 8
    for (uint32_t i = sub; i < WARP_POSITIONS; i += at_once) {
        uint4 w = *(const uint4 *)(v + (at + i) * ld + 2 * d);
#pragma unroll
        for (int h = 0; h < N; h++) {
            float x = s[h][at + i];
            acc[h][0] += x * lo_f32(w.x);
            acc[h][1] += x * hi_f32(w.x);
            acc[h][2] += x * lo_f32(w.y);
            acc[h][3] += x * hi_f32(w.y);
            acc[h][4] += x * lo_f32(w.z);
            acc[h][5] += x * hi_f32(w.z);
            acc[h][6] += x * lo_f32(w.w);
            acc[h][7] += x * hi_f32(w.w);
        }
    }
    uint32_t slot = (threadIdx.x >> 5) * at_once + sub;
    for (int h = 0; h < N; h++)
        for (int i = 0; i < 8; i++)
            o[(slot * N + h) * dim + d + i] = acc[h][i];
}

/* Splits that a row may have: their factors share the memory of o. */
#define MAX_SPLITS 1024u

/* What each split of a head counts for, by one warp a head; returns by f [heads][MAX_SPLITS] and,
 * behind the last split, nothing. The order of the sum depends on the number of splits alone. */
static __device__ void weigh(const struct job &j, const struct part &p, float *f, float *l)
{
    uint32_t lane = threadIdx.x & 31, n = p.n_splits;
    for (uint32_t h = threadIdx.x >> 5; h < p.n_heads; h += WARPS) {
        const float2 *ml = j.p.ml + ((size_t)p.row * j.a.q_heads + p.head0 + h) * j.p.max_splits;
        float m = NONE, sum = 0;
        for (uint32_t s = lane; s < n; s += 32)
            m = fmaxf(m, __ldcg(&ml[s]).x);
        m = warp_max(m);
        for (uint32_t s = lane; s < n; s += 32) {
            float2 v = __ldcg(&ml[s]);
            float x = exp2f(v.x - m);
            f[h * MAX_SPLITS + s] = x;
            sum += x * v.y;
        }
        sum = warp_sum(sum);
        if (lane == 0)
            l[h] = sum;
    }
}

/* All splits of a head in order, four dims a thread. */
static __device__ void combine(const struct job &j, const struct part &p, float *f, float *l)
{
    uint32_t dim = j.a.head_dim, n = p.n_splits, units = dim / 4;
    weigh(j, p, f, l);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < p.n_heads * units; i += blockDim.x) {
        uint32_t h = i / units, d = 4 * (i % units);
        size_t at = ((size_t)p.row * j.a.q_heads + p.head0 + h) * j.p.max_splits;
        const float *o = j.p.o + at * dim + d;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
        for (uint32_t s = 0; s < n; s++) {
            float x = f[h * MAX_SPLITS + s];
            float4 v = __ldcg((const float4 *)(o + (size_t)s * dim));
            sum.x += x * v.x;
            sum.y += x * v.y;
            sum.z += x * v.z;
            sum.w += x * v.w;
        }
        float r = 1 / l[h];
        *(uint2 *)(j.a.o + (size_t)p.row * j.a.ldo + (p.head0 + h) * dim + d) = make_uint2(
            pack_bf16(sum.x * r, sum.y * r), pack_bf16(sum.z * r, sum.w * r));
    }
}

template <int N> static __global__ void __launch_bounds__(32 * WARPS) attend(struct job j)
{
    extern __shared__ __align__(16) float o[];
    uint8_t *ks = (uint8_t *)(o + N * 32 * 8 * WARPS);
    uint8_t *vs = ks + CUDA_SPLIT * row_bytes(j.a.head_dim);
    __shared__ float s[HEADS][CUDA_SPLIT];
    __shared__ float2 ml[HEADS];
    __shared__ bool last;
    struct part p;
    /* What this step's batch says was there before any of its kernels, like all older pages. */
    bool have = find_part(j, &p);
    uint32_t start = p.base + (threadIdx.x >> 5) * WARP_POSITIONS, dim = j.a.head_dim;
    if (have) {
        stage(j, p, start, false, j.a.pages.k, ks);
        stage(j, p, start, false, j.a.pages.v, vs);
    }
    wait_before();
    if (!have)
        return;
    stage(j, p, start, true, j.a.pages.k, ks);
    stage(j, p, start, true, j.a.pages.v, vs);
    asm volatile("cp.async.commit_group;");
    asm volatile("cp.async.wait_group 0;");
    __syncwarp();
    score(j, p, start, ks, s);
    __syncthreads();
    soften(p, s, ml);
    __syncthreads();
    sum_values<N>(j, p, start, s, vs, o);
    __syncthreads();
    uint32_t slots = WARPS * (32 / (dim / 8));
    for (uint32_t i = threadIdx.x; i < p.n_heads * dim; i += blockDim.x) {
        uint32_t h = i / dim, d = i % dim;
        float sum = 0;
        for (uint32_t k = 0; k < slots; k++)
            sum += o[(k * N + h) * dim + d];
        size_t at = ((size_t)p.row * j.a.q_heads + p.head0 + h) * j.p.max_splits + p.split;
        if (p.n_splits == 1)
            j.a.o[(size_t)p.row * j.a.ldo + (p.head0 + h) * dim + d] = to_bf16(sum / ml[h].y);
        else
            j.p.o[at * dim + d] = sum;
        if (d == 0 && p.n_splits > 1)
            j.p.ml[at] = ml[h];
    }
    if (p.n_splits == 1)
        return;
    __threadfence();
    __syncthreads();
    uint32_t *arrived = &j.p.arrived[(size_t)p.row * j.a.q_heads + p.head0];
    if (threadIdx.x == 0)
        last = atomicAdd(arrived, 1) == p.n_splits - 1;
    __syncthreads();
    if (!last)
        return;
    __threadfence();
    combine(j, p, o, (float *)ml);
    if (threadIdx.x == 0)
        *arrived = 0;
}

template <int N> static cudaError_t run(struct cuda_where at, dim3 grid, const struct job &j)
{
    size_t shared = N * 32 * 8 * WARPS * sizeof(float) + 2 * CUDA_SPLIT * row_bytes(j.a.head_dim);
    return launch(at, attend<N>, grid, 32 * WARPS, shared, j);
}

cudaError_t cuda_attend_decode(struct cuda_where at, const struct cuda_attention *a,
                               struct cuda_partials p, struct cuda_rows r, uint32_t splits)
{
    struct job j = {*a, p, r, a->q_heads / a->kv_heads, 0};
    j.bundles = (j.group + HEADS - 1) / HEADS;
    dim3 grid(splits, a->kv_heads * j.bundles, r.n);
    uint32_t n = j.group < HEADS ? j.group : HEADS;
    if (splits > MAX_SPLITS)
        return cudaErrorInvalidValue;
    if (n == 1)
        return run<1>(at, grid, j);
    if (n == 2)
        return run<2>(at, grid, j);
    return n <= 4 ? run<4>(at, grid, j) : run<8>(at, grid, j);
}
