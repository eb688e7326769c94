/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of many rows of one sequence over its pages (FlashAttention-2, arXiv 2307.08691).
 *
 * A block takes one query head and a tile of rows; a warp keeps 16 * MT rows and their sums in
 * registers and walks tiles of one page, aligned at absolute multiples of 64, which the copy engine
 * brings into shared memory one ahead. Tiles that no row sees are never read; rows of a tile that
 * nobody sees are filled with zeros, since pages may hold anything there. Scores, maxima and sums
 * are float32; probabilities are rounded to bf16 before they meet the values. */
#include "device/cuda/kernel.cuh"

#define WARPS 4
#define THREADS (32 * WARPS)
#define TILE CUDA_PAGE
#define NONE (-INFINITY)

struct job {
    struct cuda_attention a;
    const int32_t *table;
    uint32_t row, n, position, group;
};

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void copy16(void *to, const void *from, bool real)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(real ? 16 : 0));
}

static __device__ __forceinline__ void load4(uint32_t r[4], const void *p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p)));
}

static __device__ __forceinline__ void load4_transposed(uint32_t r[4], const void *p)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(p)));
}

/* 2^x to 2 units in the last place; 0 for minus infinity. */
static __device__ __forceinline__ float power2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

static __device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

/* Rows in shared memory are 16 bytes apart beyond their length: an odd number of 16-byte units, so
 * that eight consecutive rows meet all banks. */
template <int HD> struct shape {
    static constexpr int LD = HD + 8;
    static constexpr int MT = HD > 128 ? 1 : 2;
    static constexpr int ROWS = 16 * MT * WARPS;
    static constexpr size_t SHARED = 2 * ((size_t)ROWS * LD + 4 * TILE * LD);
};

/* One page's K or V of this head; positions outside [lo, hi] become zero. */
template <int HD>
static __device__ __forceinline__ void fetch(cuda_bf16 *to, const struct job &j,
                                             const uint8_t *base, uint32_t tile, uint32_t lo,
                                             uint32_t hi)
{
    constexpr int UNITS = HD / 8;
    const cuda_bf16 *from = (const cuda_bf16 *)(base + j.table[tile] * j.a.pages.stride_block +
                                                blockIdx.y / j.group * j.a.pages.stride_head);
    for (int i = threadIdx.x; i < TILE * UNITS; i += THREADS) {
        uint32_t r = i / UNITS, u = i % UNITS, p = tile * TILE + r;
        copy16(to + r * shape<HD>::LD + 8 * u, from + r * HD + 8 * u, p >= lo && p <= hi);
    }
}

template <int HD>
static __device__ __forceinline__ void fetch_queries(cuda_bf16 *to, const struct job &j,
                                                     uint32_t row0)
{
    constexpr int UNITS = HD / 8;
    const cuda_bf16 *q = j.a.q + (size_t)j.row * j.a.ldq + blockIdx.y * HD;
    for (int i = threadIdx.x; i < shape<HD>::ROWS * UNITS; i += THREADS) {
        uint32_t r = i / UNITS, u = i % UNITS;
        bool real = row0 + r < j.n;
        copy16(to + r * shape<HD>::LD + 8 * u, q + (size_t)(real ? row0 + r : 0) * j.a.ldq + 8 * u,
               real);
    }
}

/* s += q k^T of the warp's rows and a tile. */
template <int HD>
static __device__ __forceinline__ void scores(float s[][8][4], const cuda_bf16 *q,
                                              const cuda_bf16 *k)
{
    constexpr int LD = shape<HD>::LD, MT = shape<HD>::MT;
    int lane = threadIdx.x & 31;
    const cuda_bf16 *qp = q + (lane & 15) * LD + (lane >> 4) * 8;
    const cuda_bf16 *kp = k + ((lane & 7) + (lane >> 4) * 8) * LD + (lane >> 3 & 1) * 8;
#pragma unroll
    for (int d = 0; d < HD; d += 16) {
        uint32_t a[MT][4];
#pragma unroll
        for (int t = 0; t < MT; t++)
            load4(a[t], qp + 16 * t * LD + d);
#pragma unroll
        for (int n = 0; n < TILE / 16; n++) {
            uint32_t b[4];
            load4(b, kp + 16 * n * LD + d);
#pragma unroll
            for (int t = 0; t < MT; t++) {
                mma16816(s[t][2 * n], a[t][0], a[t][1], a[t][2], a[t][3], b[0], b[1]);
                mma16816(s[t][2 * n + 1], a[t][0], a[t][1], a[t][2], a[t][3], b[2], b[3]);
            }
        }
    }
}

/* o += p v, p being rounded scores. */
template <int HD>
static __device__ __forceinline__ void values(float o[][HD / 8][4], float p[][8][4],
                                              const cuda_bf16 *v)
{
    constexpr int LD = shape<HD>::LD, MT = shape<HD>::MT;
    int lane = threadIdx.x & 31;
    const cuda_bf16 *vp = v + (lane & 15) * LD + (lane >> 4) * 8;
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
        uint32_t a[MT][4];
#pragma unroll
        for (int t = 0; t < MT; t++) {
            a[t][0] = pack_bf16(p[t][2 * k][0], p[t][2 * k][1]);
            a[t][1] = pack_bf16(p[t][2 * k][2], p[t][2 * k][3]);
            a[t][2] = pack_bf16(p[t][2 * k + 1][0], p[t][2 * k + 1][1]);
            a[t][3] = pack_bf16(p[t][2 * k + 1][2], p[t][2 * k + 1][3]);
        }
#pragma unroll
        for (int n = 0; n < HD / 16; n++) {
            uint32_t b[4];
            load4_transposed(b, vp + 16 * k * LD + 16 * n);
#pragma unroll
            for (int t = 0; t < MT; t++) {
                mma16816(o[t][2 * n], a[t][0], a[t][1], a[t][2], a[t][3], b[0], b[1]);
                mma16816(o[t][2 * n + 1], a[t][0], a[t][1], a[t][2], a[t][3], b[2], b[3]);
            }
        }
    }
}

/* What a row does not see becomes minus infinity. */
template <int MT>
static __device__ __forceinline__ void mask(float s[][8][4], uint32_t tile, uint32_t p0,
                                            uint32_t window)
{
    uint32_t lane = threadIdx.x & 31;
#pragma unroll
    for (int t = 0; t < MT; t++)
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t at = tile * TILE + 8 * n + 2 * (lane & 3) + (i & 1);
                uint32_t p = p0 + 16 * t + (lane >> 2) + (i >> 1) * 8;
                if (at > p || (window && at + window <= p))
                    s[t][n][i] = NONE;
            }
}

template <int HD>
static __global__ void __launch_bounds__(THREADS, HD > 128 ? 1 : 2) attend(struct job j)
{
    constexpr int LD = shape<HD>::LD, MT = shape<HD>::MT, ROWS = shape<HD>::ROWS;
    extern __shared__ __align__(16) cuda_bf16 shared[];
    cuda_bf16 *qs = shared, *ks = qs + ROWS * LD, *vs = ks + 2 * TILE * LD;
    uint32_t warp = threadIdx.x >> 5, lane = threadIdx.x & 31, window = j.a.window;
    uint32_t row0 = (gridDim.x - 1 - blockIdx.x) * ROWS; /* the longest first */
    uint32_t end = min(row0 + ROWS, j.n);
    uint32_t first = j.position + row0, hi = j.position + end - 1;
    uint32_t lo = window && first >= window ? first - window + 1 : 0;
    uint32_t p0 = first + warp * 16 * MT; /* the warp's first row */
    float o[MT][HD / 8][4] = {}, m[MT][2], l[MT][2] = {};
    float scale = j.a.scale * 1.4426950408889634f;
#pragma unroll
    for (int t = 0; t < MT; t++)
        m[t][0] = m[t][1] = NONE;
    wait_before();
    uint32_t t0 = lo / TILE, t1 = hi / TILE + 1;
    fetch_queries<HD>(qs, j, row0);
    fetch<HD>(ks, j, j.a.pages.k, t0, lo, hi);
    fetch<HD>(vs, j, j.a.pages.v, t0, lo, hi);
    asm volatile("cp.async.commit_group;");
    for (uint32_t tile = t0; tile < t1; tile++) {
        uint32_t now = (tile - t0) & 1;
        if (tile + 1 < t1) {
            fetch<HD>(ks + (now ^ 1) * TILE * LD, j, j.a.pages.k, tile + 1, lo, hi);
            fetch<HD>(vs + (now ^ 1) * TILE * LD, j, j.a.pages.v, tile + 1, lo, hi);
        }
        asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group 1;");
        __syncthreads();
        float s[MT][8][4] = {};
        scores<HD>(s, qs + warp * 16 * MT * LD, ks + now * TILE * LD);
        if (tile * TILE + TILE - 1 > p0 || (window && tile * TILE + window <= p0 + 16 * MT - 1))
            mask<MT>(s, tile, p0, window);
#pragma unroll
        for (int t = 0; t < MT; t++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float top = NONE, sum = 0;
#pragma unroll
                for (int n = 0; n < 8; n++)
                    top = fmaxf(top, fmaxf(s[t][n][2 * h], s[t][n][2 * h + 1]));
                top = fmaxf(m[t][h], quad_max(top) * scale);
                float base = top == NONE ? 0 : top, f = power2(m[t][h] - base);
                m[t][h] = top;
#pragma unroll
                for (int n = 0; n < 8; n++) {
                    s[t][n][2 * h] = power2(s[t][n][2 * h] * scale - base);
                    s[t][n][2 * h + 1] = power2(s[t][n][2 * h + 1] * scale - base);
                    sum += s[t][n][2 * h] + s[t][n][2 * h + 1];
                }
                l[t][h] = l[t][h] * f + sum;
                if (__all_sync(0xFFFFFFFFu, f == 1)) /* most tiles: no row has a new maximum */
                    continue;
#pragma unroll
                for (int n = 0; n < HD / 8; n++) {
                    o[t][n][2 * h] *= f;
                    o[t][n][2 * h + 1] *= f;
                }
            }
        values<HD>(o, s, vs + now * TILE * LD);
        __syncthreads();
    }
#pragma unroll
    for (int t = 0; t < MT; t++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint32_t r = row0 + warp * 16 * MT + 16 * t + (lane >> 2) + 8 * h;
            float f = 1 / quad_sum(l[t][h]);
            if (r >= j.n)
                continue;
            cuda_bf16 *to = j.a.o + (size_t)(j.row + r) * j.a.ldo + blockIdx.y * HD +
                            2 * (lane & 3);
#pragma unroll
            for (int n = 0; n < HD / 8; n++)
                *(uint32_t *)(to + 8 * n) = pack_bf16(o[t][n][2 * h] * f, o[t][n][2 * h + 1] * f);
        }
}

template <int HD> static cudaError_t run(struct cuda_where at, const struct job &j)
{
    dim3 grid((j.n + shape<HD>::ROWS - 1) / shape<HD>::ROWS, j.a.q_heads);
    return launch(at, attend<HD>, grid, THREADS, shape<HD>::SHARED, j);
}

bool cuda_attend_has(uint32_t d)
{
    return d == 32 || d == 64 || d == 80 || d == 96 || d == 128 || d == 256;
}

cudaError_t cuda_attend_prefill(struct cuda_where at, const struct cuda_attention *a,
                                struct cuda_rows r, uint32_t span, uint32_t row, uint32_t n,
                                uint32_t position)
{
    struct job j = {
        *a,       r.tables + ((size_t)span * CUDA_GROUPS + a->pages.group) * r.table_stride,
        row,      n,
        position, a->q_heads / a->kv_heads};
    switch (a->head_dim) {
    case 32:
        return run<32>(at, j);
    case 64:
        return run<64>(at, j);
    case 80:
        return run<80>(at, j);
    case 96:
        return run<96>(at, j);
    case 128:
        return run<128>(at, j);
    case 256:
        return run<256>(at, j);
    default:
        return cudaErrorInvalidValue;
    }
}
