/* SPDX-License-Identifier: Apache-2.0 */
/* AVX2: linear maps.
 *
 * Activations are float32, [block of KC k][tile of 6 rows][k in the block][rows in the tile].
 * gemv (up to 6 rows) widens weights in registers on their way from memory, several panels side by
 * side so that a chain's latency is hidden; gemm widens KC k of a panel into L1 once and runs every
 * row tile over it. Each output is bias + sum over k in order, fused multiply-add: in gemm the sum
 * rests in y between two blocks, which does not change a bit of it.
 */
#include <string.h>

#include "device/cpu/avx2_priv.h"

enum { MR = AVX2_MR, KC = 256, HALF = CPU_PANEL / 2 };

/* Where rows from r on (a multiple of MR) of the block that starts at k0 lie. */
static float *a_at(const struct cpu_linear *l, uint32_t k0, uint32_t r)
{
    uint32_t kc = l->k - k0 < KC ? l->k - k0 : KC;
    return (float *)l->a + (size_t)k0 * l->m + (size_t)kc * r;
}

CPU_PACK_ROWS(cpu_pack_rows_avx2)
{
    for (uint32_t k0 = 0; k0 < k_x; k0 += KC) {
        uint32_t kc = k_x - k0 < KC ? k_x - k0 : KC;
        for (uint32_t r = r0; r < r1; r += MR) {
            uint32_t rows = r1 - r < MR ? r1 - r : MR;
            float *a = a_at(l, k0, r);
            for (uint32_t i = 0; i < rows; i++) {
                const float *from = x + (size_t)(r + i) * k_x + k0;
                for (uint32_t k = 0; k < kc; k++)
                    a[(size_t)k * rows + i] = from[k];
            }
        }
    }
}

/* ---- few rows ----------------------------------------------------------------------------- */

AVX2_INLINE void store_panel(const struct cpu_linear *l, uint32_t row, uint32_t panel, __m256 lo,
                             __m256 hi)
{
    uint32_t at = panel * CPU_PANEL, n = l->n - at;
    float *y = l->y + row * l->ldy + at;
    if (n >= CPU_PANEL) {
        _mm256_storeu_ps(y, lo);
        _mm256_storeu_ps(y + HALF, hi);
        return;
    }
    float buf[CPU_PANEL];
    _mm256_storeu_ps(buf, lo);
    _mm256_storeu_ps(buf + HALF, hi);
    memcpy(y, buf, n * sizeof(float));
}

/* mr rows times `np` panels from `panel` on: mr * np <= 6. All of k in one go; with m <= MR the
 * blocks of the activations lie one behind the other. */
AVX2_INLINE void gemv_fixed(const struct cpu_linear *l, uint32_t panel, const int mr, const int np)
{
    __m256 c[6][2];
    const float *a = l->a;
    const uint16_t *w = l->w + (size_t)panel * l->k * CPU_PANEL;
    size_t stride = (size_t)l->k * CPU_PANEL;
#pragma GCC unroll 6
    for (int p = 0; p < np; p++) {
        const float *bias = l->bias ? l->bias + (panel + p) * CPU_PANEL : NULL;
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            c[p * mr + i][0] = bias ? _mm256_loadu_ps(bias) : _mm256_setzero_ps();
            c[p * mr + i][1] = bias ? _mm256_loadu_ps(bias + HALF) : _mm256_setzero_ps();
        }
    }
    for (uint32_t k = 0; k < l->k; k++, a += mr, w += CPU_PANEL) {
#pragma GCC unroll 6
        for (int p = 0; p < np; p++) {
            __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(w + p * stride));
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
            store_panel(l, i, panel + p, c[p * mr + i][0], c[p * mr + i][1]);
}

CPU_GEMV(cpu_gemv_avx2)
{
    uint32_t p = p0;
    switch (l->m) {
    case 1:
        for (; p + 4 <= p1; p += 4)
            gemv_fixed(l, p, 1, 4);
        for (; p < p1; p++)
            gemv_fixed(l, p, 1, 1);
        break;
    case 2:
        for (; p + 3 <= p1; p += 3)
            gemv_fixed(l, p, 2, 3);
        for (; p < p1; p++)
            gemv_fixed(l, p, 2, 1);
        break;
    case 3:
        for (; p + 2 <= p1; p += 2)
            gemv_fixed(l, p, 3, 2);
        for (; p < p1; p++)
            gemv_fixed(l, p, 3, 1);
        break;
    case 4:
        for (; p < p1; p++)
            gemv_fixed(l, p, 4, 1);
        break;
    case 5:
        for (; p < p1; p++)
            gemv_fixed(l, p, 5, 1);
        break;
    default:
        for (; p < p1; p++)
            gemv_fixed(l, p, 6, 1);
        break;
    }
}

/* ---- many rows ---------------------------------------------------------------------------- */

static void widen(float *b, const uint16_t *w, uint32_t kc)
{
    for (uint32_t k = 0; k < kc; k++, b += CPU_PANEL, w += CPU_PANEL) {
        __m256i v = _mm256_loadu_si256((const __m256i *)(const void *)w);
        _mm256_storeu_ps(b, avx2_low(v));
        _mm256_storeu_ps(b + HALF, avx2_high(v));
    }
}

/* Start the sums of a panel. */
static void init_panel(const struct cpu_linear *l, uint32_t r0, uint32_t r1, uint32_t panel)
{
    uint32_t at = panel * CPU_PANEL, n = l->n - at < CPU_PANEL ? l->n - at : CPU_PANEL;
    for (uint32_t r = r0; r < r1; r++)
        for (uint32_t j = 0; j < n; j++)
            l->y[r * l->ldy + at + j] = l->bias ? l->bias[at + j] : 0.0f;
}

/* A panel that y has no 16 columns for: through a buffer. */
static void tile_edge(float *y, size_t ldy, const float *a, const float *b, uint32_t k, uint32_t mr,
                      uint32_t n)
{
    float buf[MR][CPU_PANEL] = {{0}};
    for (uint32_t i = 0; i < mr; i++)
        memcpy(buf[i], y + i * ldy, n * sizeof(float));
    avx2_tile(buf[0], CPU_PANEL, a, b, k, mr);
    for (uint32_t i = 0; i < mr; i++)
        memcpy(y + i * ldy, buf[i], n * sizeof(float));
}

CPU_GEMM(cpu_gemm_avx2)
{
    float *b = scratch;
    for (uint32_t k0 = 0; k0 < l->k; k0 += KC) {
        uint32_t kc = l->k - k0 < KC ? l->k - k0 : KC;
        for (uint32_t p = p0; p < p1; p++) {
            uint32_t n = l->n - p * CPU_PANEL;
            if (k0 == 0)
                init_panel(l, r0, r1, p);
            widen(b, l->w + ((size_t)p * l->k + k0) * CPU_PANEL, kc);
            for (uint32_t r = r0; r < r1; r += MR) {
                uint32_t mr = r1 - r < MR ? r1 - r : MR;
                float *y = l->y + r * l->ldy + (size_t)p * CPU_PANEL;
                if (n >= CPU_PANEL)
                    avx2_tile(y, l->ldy, a_at(l, k0, r), b, kc, mr);
                else
                    tile_edge(y, l->ldy, a_at(l, k0, r), b, kc, mr, n);
            }
        }
    }
}
