/* SPDX-License-Identifier: Apache-2.0 */
/* AVX2: linear maps.
 *
 * Activations are float32, [block of k][tile of rows][k in the block][rows in the tile]. Weights
 * are widened in registers each time they meet a tile of rows: a shift and a mask a vector, which
 * hide behind the multiplications (widening a panel into L1 first was slower from 24 to 512 rows).
 * gemv takes all of k at once, several panels side by side where rows are few, so that a chain's
 * latency is hidden; gemm takes KC k, for which a panel and a tile stay in L1. Each output is bias
 * + sum over k in order, fused multiply-add: that the sum rests in y between two blocks changes no
 * bit.
 */
#include <string.h>

#include "device/cpu/avx2_priv.h"

enum {
    MR = AVX2_MR,
    KC = 512,
    HALF = CPU_PANEL / 2,
    AHEAD = 2048, /* bytes a weight stream is fetched ahead: 15 % more than the processor's own */
};

/* Rows of a tile: few rows are cut evenly, since small tiles leave the multipliers idle. */
static uint32_t tile_rows(const struct cpu_linear *l)
{
    uint32_t tiles = (l->m + MR - 1) / MR;
    return l->m > AVX2_GEMV_ROWS ? MR : (l->m + tiles - 1) / tiles;
}

static uint32_t block_k(const struct cpu_linear *l)
{
    return l->m > AVX2_GEMV_ROWS ? KC : l->k;
}

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Where rows from r on (the first of a tile) of the block [k0, k0 + kc) lie. */
static float *a_at(const struct cpu_linear *l, uint32_t k0, uint32_t kc, uint32_t r)
{
    return (float *)l->a + (size_t)k0 * l->m + (size_t)kc * r;
}

CPU_PACK_ROWS(device_cpu_pack_rows_avx2)
{
    uint32_t block = block_k(l), tile = tile_rows(l);
    for (uint32_t k0 = 0; k0 < k_x; k0 += block) {
        uint32_t kc = least(block, k_x - k0);
        for (uint32_t r = r0; r < r1; r += tile) {
            uint32_t rows = least(tile, r1 - r);
            float *a = a_at(l, k0, kc, r);
            for (uint32_t i = 0; i < rows; i++) {
                const float *from = x + (size_t)(r + i) * k_x + k0;
                for (uint32_t k = 0; k < kc; k++)
                    a[(size_t)k * rows + i] = from[k];
            }
        }
    }
}

/* ---- the register tile -------------------------------------------------------------------- */

AVX2_INLINE void store_panel(float *y, uint32_t n, __m256 lo, __m256 hi)
{
    float buf[CPU_PANEL];
    if (n >= CPU_PANEL) {
        _mm256_storeu_ps(y, lo);
        _mm256_storeu_ps(y + HALF, hi);
        return;
    }
    _mm256_storeu_ps(buf, lo);
    _mm256_storeu_ps(buf + HALF, hi);
    memcpy(y, buf, n * sizeof(float));
}

/* Where the sums of a panel start: at the bias, or where the last block of k left them. */
AVX2_INLINE void start_panel(const float *from, uint32_t n, __m256 c[2])
{
    float buf[CPU_PANEL] = {0};
    if (from && n < CPU_PANEL) {
        memcpy(buf, from, n * sizeof(float));
        from = buf;
    }
    c[0] = from ? _mm256_loadu_ps(from) : _mm256_setzero_ps();
    c[1] = from ? _mm256_loadu_ps(from + HALF) : _mm256_setzero_ps();
}

/* mr rows from r on times np panels from `panel` on over [k0, k0 + kc); mr * np <= 6. */
AVX2_INLINE void tile_fixed(const struct cpu_linear *l, uint32_t k0, uint32_t kc, uint32_t r,
                            uint32_t panel, const int mr, const int np)
{
    __m256 c[6][2];
    const float *a = a_at(l, k0, kc, r);
    const uint16_t *w = l->w + ((size_t)panel * l->k + k0) * CPU_PANEL;
    size_t stride = (size_t)l->k * CPU_PANEL;
    float *y = l->y + r * l->ldy + (size_t)panel * CPU_PANEL;
    uint32_t n = l->n - panel * CPU_PANEL; /* columns from here on */
#pragma GCC unroll 6
    for (int p = 0; p < np; p++)
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++)
            start_panel(k0        ? y + i * l->ldy + p * CPU_PANEL
                        : l->bias ? l->bias + (panel + p) * CPU_PANEL
                                  : NULL,
                        n - p * CPU_PANEL, c[p * mr + i]);
    for (uint32_t k = 0; k < kc; k++, a += mr, w += CPU_PANEL) {
#pragma GCC unroll 6
        for (int p = 0; p < np; p++) {
            __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(w + p * stride));
            _mm_prefetch((const char *)(w + p * stride) + AHEAD, _MM_HINT_T0);
            __m256 b0 = avx2_low(b), b1 = avx2_high(b);
#pragma GCC unroll 6
            for (int i = 0; i < mr; i++) {
                __m256 v = _mm256_broadcast_ss(a + i);
                c[p * mr + i][0] = _mm256_fmadd_ps(v, b0, c[p * mr + i][0]);
                c[p * mr + i][1] = _mm256_fmadd_ps(v, b1, c[p * mr + i][1]);
            }
        }
    }
#pragma GCC unroll 6
    for (int p = 0; p < np; p++)
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++)
            store_panel(y + i * l->ldy + p * CPU_PANEL, n - p * CPU_PANEL, c[p * mr + i][0],
                        c[p * mr + i][1]);
}

/* One function each: inlined side by side, the compiler would keep constants of one tile in
 * registers that another needs for its sums. */
#define TILE(mr, np)                                                                               \
    static __attribute__((noinline)) void tile_##mr##x##np(                                        \
        const struct cpu_linear *l, uint32_t k0, uint32_t kc, uint32_t r, uint32_t panel)          \
    {                                                                                              \
        tile_fixed(l, k0, kc, r, panel, mr, np);                                                   \
    }
TILE(1, 4)
TILE(2, 3)
TILE(3, 2)
TILE(1, 1)
TILE(2, 1)
TILE(3, 1)
TILE(4, 1)
TILE(5, 1)
TILE(6, 1)

typedef void (*tile_fn)(const struct cpu_linear *l, uint32_t k0, uint32_t kc, uint32_t r,
                        uint32_t panel);

/* By rows of the tile: one panel, and as many as fill the registers. */
static const struct {
    tile_fn one, group;
    uint32_t panels; /* of group */
} tiles[MR + 1] = {
    {NULL, NULL, 0},         {tile_1x1, tile_1x4, 4}, {tile_2x1, tile_2x3, 3},
    {tile_3x1, tile_3x2, 2}, {tile_4x1, tile_4x1, 1}, {tile_5x1, tile_5x1, 1},
    {tile_6x1, tile_6x1, 1},
};

/* ---- few rows, many rows ------------------------------------------------------------------ */

/* One tile of rows over panels [p0, p1). */
static void tile_panels(const struct cpu_linear *l, uint32_t k0, uint32_t kc, uint32_t r,
                        uint32_t rows, uint32_t p0, uint32_t p1)
{
    uint32_t step = tiles[rows].panels;
    for (; p0 + step <= p1; p0 += step)
        tiles[rows].group(l, k0, kc, r, p0);
    for (; p0 < p1; p0++)
        tiles[rows].one(l, k0, kc, r, p0);
}

CPU_GEMV(device_cpu_gemv_avx2)
{
    uint32_t tile = tile_rows(l), step = tiles[tile].panels;
    for (uint32_t p = p0; p < p1; p += step) /* the panels stay in L1 from tile to tile */
        for (uint32_t r = 0; r < l->m; r += tile)
            tile_panels(l, 0, l->k, r, least(tile, l->m - r), p, least(p + step, p1));
}

CPU_GEMM(device_cpu_gemm_avx2)
{
    uint32_t full = r0 + (r1 - r0) / MR * MR;
    for (uint32_t k0 = 0; k0 < l->k; k0 += KC) {
        uint32_t kc = least(KC, l->k - k0);
        for (uint32_t p = p0; p < p1; p++)
            for (uint32_t r = r0; r < full; r += MR)
                tile_6x1(l, k0, kc, r, p);
        if (full < r1)
            tile_panels(l, k0, kc, full, r1 - full, p0, p1);
    }
}
