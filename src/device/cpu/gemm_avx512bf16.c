/* SPDX-License-Identifier: Apache-2.0 */
/* AVX-512-BF16: linear maps.
 *
 * Weights in CPU_ORDER_PAIRS. Activations are rounded to bf16, element by element, and lie as
 * words of two: [block of k][tile of rows][k/2 in the block][rows in the tile]. gemv takes all of
 * k at once; gemm takes KC k, for which three panels and a tile of rows stay in L1. Each output is
 * bias + one chain over the words in order: that the sum rests in y between two blocks changes no
 * bit of it.
 */
#include "device/cpu/avx512bf16_priv.h"
#include "device/cpu/rows_priv.h"

enum {
    MR = AVX512_MR,
    KC = 256,
    AHEAD = 1024, /* bytes a weight stream is fetched ahead in gemv */
};

/* Rows of a tile: few rows are cut evenly. */
static uint32_t tile_rows(const struct cpu_linear *l)
{
    uint32_t tiles = (l->m + MR - 1) / MR;
    return l->m > AVX512_GEMV_ROWS ? MR : (l->m + tiles - 1) / tiles;
}

static uint32_t block_k(const struct cpu_linear *l)
{
    return l->m > AVX512_GEMV_ROWS ? KC : l->k;
}

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Where rows from r on (the first of a tile) of the block [k0, k0 + kc) lie. */
static uint32_t *a_at(const struct cpu_linear *l, uint32_t k0, uint32_t kc, uint32_t r)
{
    return (uint32_t *)l->a + ((size_t)k0 * l->m + (size_t)kc * r) / 2;
}

CPU_PACK_ROWS(device_cpu_pack_rows_avx512bf16)
{
    uint32_t block = block_k(l), tile = tile_rows(l);
    for (uint32_t k0 = 0; k0 < l->k; k0 += block) {
        uint32_t kc = least(block, l->k - k0), real = least(kc, k_x - k0);
        for (uint32_t r = r0; r < r1; r += tile) {
            uint32_t rows = least(tile, r1 - r);
            uint32_t *a = a_at(l, k0, kc, r);
            for (uint32_t i = 0; i < rows; i++) {
                const float *from = x + (size_t)(r + i) * k_x + k0;
                for (uint32_t k = 0; k < kc; k += 2) {
                    uint16_t pair[2] = {0, 0};
                    cpu_narrow_row(pair, from + k, real - k < 2 ? real - k : 2);
                    a[(size_t)(k / 2) * rows + i] = pair[0] | (uint32_t)pair[1] << 16;
                }
            }
        }
    }
}

/* ---- the register tile -------------------------------------------------------------------- */

/* The columns of a panel that exist. */
AVX512_INLINE __mmask16 columns(uint32_t n)
{
    return n >= CPU_PANEL ? (__mmask16)0xFFFFu : (__mmask16)((1u << n) - 1u);
}

/* mr rows from r on times np panels from `panel` on over [k0, k0 + kc); mr * np <= 24. */
AVX512_INLINE void tile_fixed(const struct cpu_linear *l, uint32_t k0, uint32_t kc, uint32_t r,
                              uint32_t panel, const int mr, const int np, const size_t ahead)
{
    __m512 c[AVX512_SUMS];
    const uint32_t *w = (const uint32_t *)(const void *)l->w;
    size_t stride = (size_t)l->k * (CPU_PANEL / 2);
    float *y = l->y + r * l->ldy + (size_t)panel * CPU_PANEL;
    uint32_t n = l->n - panel * CPU_PANEL; /* columns from here on */
#pragma GCC unroll 4
    for (int p = 0; p < np; p++) {
        const float *bias = l->bias ? l->bias + (panel + p) * CPU_PANEL : NULL;
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++)
            c[p * mr + i] = k0     ? _mm512_maskz_loadu_ps(columns(n - p * CPU_PANEL),
                                                           y + i * l->ldy + p * CPU_PANEL)
                            : bias ? _mm512_loadu_ps(bias)
                                   : _mm512_setzero_ps();
    }
    avx512_dot(c, a_at(l, k0, kc, r), 1, (size_t)mr,
               w + (size_t)panel * stride + (size_t)k0 * (CPU_PANEL / 2), stride, kc / 2, mr, np,
               ahead);
#pragma GCC unroll 4
    for (int p = 0; p < np; p++)
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++)
            _mm512_mask_storeu_ps(y + i * l->ldy + p * CPU_PANEL, columns(n - p * CPU_PANEL),
                                  c[p * mr + i]);
}

/* One function each: inlined side by side, the compiler would keep constants of one tile in
 * registers that another needs for its sums. */
#define TILE(mr, np, ahead)                                                                        \
    static __attribute__((noinline)) void tile_##mr##x##np##_##ahead(                              \
        const struct cpu_linear *l, uint32_t k0, uint32_t kc, uint32_t r, uint32_t panel)          \
    {                                                                                              \
        tile_fixed(l, k0, kc, r, panel, mr, np, ahead);                                            \
    }
TILE(1, 1, AHEAD)
TILE(1, 4, AHEAD)
TILE(2, 1, AHEAD)
TILE(2, 4, AHEAD)
TILE(3, 1, AHEAD)
TILE(3, 4, AHEAD)
TILE(4, 1, AHEAD)
TILE(4, 4, AHEAD)
TILE(5, 1, AHEAD)
TILE(5, 4, AHEAD)
TILE(6, 1, AHEAD)
TILE(6, 4, AHEAD)
TILE(7, 1, AHEAD)
TILE(7, 3, AHEAD)
TILE(8, 1, AHEAD)
TILE(8, 3, AHEAD)
TILE(8, 1, 0)
TILE(8, 2, 0)
TILE(8, 3, 0)

typedef void (*tile_fn)(const struct cpu_linear *l, uint32_t k0, uint32_t kc, uint32_t r,
                        uint32_t panel);

/* By rows of the tile: one panel, and as many as fill the registers. */
static const struct {
    tile_fn one, group;
    uint32_t panels; /* of group */
} tiles[MR + 1] = {
    {NULL, NULL, 0},
    {tile_1x1_AHEAD, tile_1x4_AHEAD, 4},
    {tile_2x1_AHEAD, tile_2x4_AHEAD, 4},
    {tile_3x1_AHEAD, tile_3x4_AHEAD, 4},
    {tile_4x1_AHEAD, tile_4x4_AHEAD, 4},
    {tile_5x1_AHEAD, tile_5x4_AHEAD, 4},
    {tile_6x1_AHEAD, tile_6x4_AHEAD, 4},
    {tile_7x1_AHEAD, tile_7x3_AHEAD, 3},
    {tile_8x1_AHEAD, tile_8x3_AHEAD, 3},
};

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

/* ---- few rows, many rows ------------------------------------------------------------------ */

CPU_GEMV(device_cpu_gemv_avx512bf16)
{
    uint32_t tile = tile_rows(l), step = tiles[tile].panels;
    for (uint32_t p = p0; p < p1; p += step) /* the panels stay in L2 from tile to tile */
        for (uint32_t r = 0; r < l->m; r += tile)
            tile_panels(l, 0, l->k, r, least(tile, l->m - r), p, least(p + step, p1));
}

CPU_GEMM(device_cpu_gemm_avx512bf16)
{
    static const tile_fn by_panels[] = {NULL, tile_8x1_0, tile_8x2_0, tile_8x3_0};
    uint32_t full = r0 + (r1 - r0) / MR * MR;
    for (uint32_t k0 = 0; k0 < l->k; k0 += KC) {
        uint32_t kc = least(KC, l->k - k0);
        for (uint32_t p = p0; p < p1; p += 3) {
            tile_fn fn = by_panels[least(3, p1 - p)];
            for (uint32_t r = r0; r < full; r += MR)
                fn(l, k0, kc, r, p);
        }
        if (full < r1)
            tile_panels(l, k0, kc, full, r1 - full, p0, p1);
    }
}
