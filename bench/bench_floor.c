/* SPDX-License-Identifier: Apache-2.0 */
/* Floors: loops that do one thing as fast as the machine can. */
#include <stdlib.h>

#include "bench_floor.h"

enum {
    ROUNDS = 5,
    BUFFER = 256 << 20,
    PIECE = 1 << 20,
    STEPS = 2000000,
    SUMS = 12,
    WIDE_SUMS = 24
};

/* Best rate of n items of `amount` each. */
static double best_rate(struct base_pool *pool, void (*fn)(void *, unsigned), void *ctx, unsigned n,
                        double amount)
{
    double best = 0;
    for (int i = 0; i < ROUNDS; i++) {
        uint64_t start = base_now_ns();
        base_pool_run(pool, fn, ctx, n);
        double rate = amount * n / ((double)(base_now_ns() - start) * 1e-9);
        best = rate > best ? rate : best;
    }
    return best;
}

/* A result that the compiler cannot drop. */
static void keep(const void *p)
{
    __asm__ volatile("" : : "r"(p) : "memory");
}

/* ---- memory ------------------------------------------------------------------------------- */

typedef uint64_t words __attribute__((vector_size(16)));

/* Four streams a thread, fetched ahead. */
static void read_piece(void *ctx, unsigned i)
{
    enum { STREAM = PIECE / 4 / sizeof(words), AHEAD = 2048 / sizeof(words) };
    const words *p = (const words *)((const uint8_t *)ctx + (size_t)i * PIECE);
    words sum[4] = {{0}};
    for (size_t n = 0; n < STREAM; n += 4)
#pragma GCC unroll 4
        for (int s = 0; s < 4; s++) {
            const words *q = p + s * STREAM + n;
            __builtin_prefetch(q + AHEAD);
            sum[s] |= (q[0] | q[1]) | (q[2] | q[3]);
        }
    keep(sum);
}

/* One stream, left to the hardware's own fetching ahead: faster on some processors. */
static void read_line(void *ctx, unsigned i)
{
    const words *p = (const words *)((const uint8_t *)ctx + (size_t)i * PIECE);
    words sum[4] = {{0}};
    for (size_t n = 0; n < PIECE / sizeof *p; n += 16)
#pragma GCC unroll 4
        for (size_t s = 0; s < 4; s++)
            sum[s] |= (p[n + 4 * s] | p[n + 4 * s + 1]) | (p[n + 4 * s + 2] | p[n + 4 * s + 3]);
    keep(sum);
}

double bench_read_bandwidth(struct base_pool *pool, struct baton_error *e)
{
    uint8_t *buffer = base_map_alloc(BUFFER, false, e);
    if (!buffer)
        return 0;
    for (size_t i = 0; i < BUFFER; i += 64)
        buffer[i] = (uint8_t)i;
    double four = best_rate(pool, read_piece, buffer, BUFFER / PIECE, PIECE);
    double one = best_rate(pool, read_line, buffer, BUFFER / PIECE, PIECE);
    base_map_free(buffer, BUFFER);
    return four > one ? four : one;
}

/* ---- arithmetic --------------------------------------------------------------------------- */

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx2,fma"))) static void fma_256(void *ctx, unsigned i)
{
    __m256 s[SUMS], a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(1e-3f);
    for (int n = 0; n < SUMS; n++)
        s[n] = _mm256_set1_ps((float)n);
    for (int step = 0; step < STEPS; step++)
#pragma GCC unroll 12
        for (int n = 0; n < SUMS; n++)
            s[n] = _mm256_fmadd_ps(s[n], a, b);
    keep(s);
}

__attribute__((target("avx512f"))) static void fma_512(void *ctx, unsigned i)
{
    __m512 s[WIDE_SUMS], a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(1e-3f);
    for (int n = 0; n < WIDE_SUMS; n++)
        s[n] = _mm512_set1_ps((float)n);
    for (int step = 0; step < STEPS; step++)
#pragma GCC unroll 24
        for (int n = 0; n < WIDE_SUMS; n++)
            s[n] = _mm512_fmadd_ps(s[n], a, b);
    keep(s);
}

__attribute__((target("avx512f,avx512bf16"))) static void dot_512(void *ctx, unsigned i)
{
    __m512 s[WIDE_SUMS];
    __m512bh a = (__m512bh)_mm512_set1_epi16(0x3C00), b = (__m512bh)_mm512_set1_epi16(0x3C01);
    for (int n = 0; n < WIDE_SUMS; n++)
        s[n] = _mm512_set1_ps((float)n);
    for (int step = 0; step < STEPS; step++)
#pragma GCC unroll 24
        for (int n = 0; n < WIDE_SUMS; n++)
            s[n] = _mm512_dpbf16_ps(s[n], a, b);
    keep(s);
}

double bench_fma_peak(struct base_pool *pool)
{
    unsigned n = base_pool_threads(pool);
    if (__builtin_cpu_supports("avx512f"))
        return best_rate(pool, fma_512, NULL, n, 32.0 * WIDE_SUMS * STEPS);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return best_rate(pool, fma_256, NULL, n, 16.0 * SUMS * STEPS);
    return 0;
}

double bench_dot_peak(struct base_pool *pool)
{
    if (!__builtin_cpu_supports("avx512bf16"))
        return 0;
    return best_rate(pool, dot_512, NULL, base_pool_threads(pool), 64.0 * WIDE_SUMS * STEPS);
}
#else
double bench_fma_peak(struct base_pool *pool)
{
    return 0;
}

double bench_dot_peak(struct base_pool *pool)
{
    return 0;
}
#endif
