/* SPDX-License-Identifier: Apache-2.0 */
/* AVX2 and FMA: the register tile that linear maps and attention share.
 *
 * C [mr, 16] += A [k][mr] B [k][16], float32, one fused multiply-add a term, k ascending: 12 sums,
 * 2 operands of B and one broadcast of A fill the 16 registers at mr = 6.
 */
#ifndef DEVICE_CPU_AVX2_PRIV_H
#define DEVICE_CPU_AVX2_PRIV_H

#include <immintrin.h>

#include "device/cpu/cpu_priv.h"

#define AVX2_MR 6
#define AVX2_GEMV_ROWS 24 /* beyond, widening once pays */
#define AVX2_INLINE static inline __attribute__((always_inline))

/* The two halves of 16 bf16 in CPU_ORDER_OUTPUTS (or: even and odd elements of a row). */
AVX2_INLINE __m256 avx2_low(__m256i w)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
}

AVX2_INLINE __m256 avx2_high(__m256i w)
{
    return _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32((int)0xFFFF0000u)));
}

/* Element (row i, k) of A is a[i*row + k*step]. mr, row and step are constants at every place of
 * use, so that the loops unroll and c stays in registers. */
AVX2_INLINE void avx2_tile_fixed(float *y, size_t ldy, const float *a, size_t row, size_t step,
                                 const float *b, uint32_t k, const int mr)
{
    __m256 c[AVX2_MR][2];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        c[i][0] = _mm256_loadu_ps(y + i * ldy);
        c[i][1] = _mm256_loadu_ps(y + i * ldy + 8);
    }
    for (uint32_t n = 0; n < k; n++, a += step, b += CPU_PANEL) {
        __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8);
#pragma GCC unroll 6
        for (int i = 0; i < mr; i++) {
            __m256 v = _mm256_broadcast_ss(a + i * row);
            c[i][0] = _mm256_fmadd_ps(v, b0, c[i][0]);
            c[i][1] = _mm256_fmadd_ps(v, b1, c[i][1]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        _mm256_storeu_ps(y + i * ldy, c[i][0]);
        _mm256_storeu_ps(y + i * ldy + 8, c[i][1]);
    }
}

/* y [mr, 16] += a b with a in [k][mr]; mr 1..6. */
static inline void avx2_tile(float *y, size_t ldy, const float *a, const float *b, uint32_t k,
                             uint32_t mr)
{
    switch (mr) {
    case 6:
        avx2_tile_fixed(y, ldy, a, 1, 6, b, k, 6);
        break;
    case 5:
        avx2_tile_fixed(y, ldy, a, 1, 5, b, k, 5);
        break;
    case 4:
        avx2_tile_fixed(y, ldy, a, 1, 4, b, k, 4);
        break;
    case 3:
        avx2_tile_fixed(y, ldy, a, 1, 3, b, k, 3);
        break;
    case 2:
        avx2_tile_fixed(y, ldy, a, 1, 2, b, k, 2);
        break;
    default:
        avx2_tile_fixed(y, ldy, a, 1, 1, b, k, 1);
        break;
    }
}

/* y [mr, 16] += a b over the 64 positions of an attention tile, a in [mr][64]. */
static inline void avx2_tile_rows(float *y, size_t ldy, const float *a, const float *b, uint32_t mr)
{
    switch (mr) {
    case 6:
        avx2_tile_fixed(y, ldy, a, CPU_TILE, 1, b, CPU_TILE, 6);
        break;
    case 5:
        avx2_tile_fixed(y, ldy, a, CPU_TILE, 1, b, CPU_TILE, 5);
        break;
    case 4:
        avx2_tile_fixed(y, ldy, a, CPU_TILE, 1, b, CPU_TILE, 4);
        break;
    case 3:
        avx2_tile_fixed(y, ldy, a, CPU_TILE, 1, b, CPU_TILE, 3);
        break;
    case 2:
        avx2_tile_fixed(y, ldy, a, CPU_TILE, 1, b, CPU_TILE, 2);
        break;
    default:
        avx2_tile_fixed(y, ldy, a, CPU_TILE, 1, b, CPU_TILE, 1);
        break;
    }
}

#endif
