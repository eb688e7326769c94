/* SPDX-License-Identifier: Apache-2.0 */
/* AVX-512 with bf16 dot products: the register tile that linear maps and attention share.
 *
 * C [mr, 16 np] += A B over pairs of k: a 32-bit word holds two bf16 that follow each other in k,
 * on both sides. vdpbf16ps adds both products of a word to a float32 sum, odd k first, and takes
 * subnormals as zero; a sum is one chain over the words. 24 sums, np operands of B and one
 * broadcast of A: with two dot products started a cycle and a latency of 6, 12 chains would do.
 */
#ifndef DEVICE_CPU_AVX512BF16_PRIV_H
#define DEVICE_CPU_AVX512BF16_PRIV_H

#include <immintrin.h>

#include "device/cpu/cpu_priv.h"

#define AVX512_MR 8
#define AVX512_SUMS 24
#define AVX512_GEMV_ROWS 24
#define AVX512_INLINE static inline __attribute__((always_inline))

/* Word k of row i of A is a[i*row + k*step]; panel p of B starts at b + p*stride, 16 words a k.
 * mr and np are constants at every place of use, so that the loops unroll and c stays in registers:
 * c[p*mr + i]. ahead: bytes that B is fetched ahead, 0 where it is in a cache. */
AVX512_INLINE void avx512_dot(__m512 c[AVX512_SUMS], const uint32_t *a, size_t row, size_t step,
                              const uint32_t *b, size_t stride, uint32_t n, const int mr,
                              const int np, const size_t ahead)
{
    for (uint32_t k = 0; k < n; k++, a += step, b += CPU_PANEL) {
        __m512bh w[4];
#pragma GCC unroll 4
        for (int p = 0; p < np; p++) {
            w[p] = (__m512bh)_mm512_loadu_si512(b + p * stride);
            if (ahead)
                _mm_prefetch((const char *)(b + p * stride) + ahead, _MM_HINT_T0);
        }
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
            __m512bh v = (__m512bh)_mm512_set1_epi32((int)a[i * row]);
#pragma GCC unroll 4
            for (int p = 0; p < np; p++)
                c[p * mr + i] = _mm512_dpbf16_ps(c[p * mr + i], v, w[p]);
        }
    }
}

#endif
