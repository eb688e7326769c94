/* SPDX-License-Identifier: Apache-2.0 */
/* AVX2: attention of many (row, head) pairs that share one kv head.
 *
 * Tile by tile of 64 positions: K is widened and turned to [panel of 16 keys][dim][16], V to [panel
 * of 16 dims][64][16]; both are the B of the register tile. Scores are one chain over dim, with lanes
 * over keys; o is one chain over positions, with lanes over dims. Queries are multiplied by the
 * scale first. Rows of the page that no pair sees are taken as zeros, for they may hold anything.
 */
#include <string.h>

#include "device/cpu/avx2_priv.h"
#include "device/cpu/rows_priv.h"

enum { MR = AVX2_MR };

struct scratch {
    uint32_t pairs, wide; /* wide = dim padded to 16 */
    float *q;             /* [tile of 6 pairs][dim][pairs in the tile] */
    float *s;             /* [pairs][64] */
    float *p;             /* [tile of 6 pairs][64][pairs in the tile] */
    float *k;             /* [4][dim][16] */
    float *v;             /* [wide/16][64][16] */
    float *shrink;        /* [pairs] */
};

static struct scratch lay_out(const struct cpu_attend *j, void *memory)
{
    struct scratch c = {.pairs = j->rows * j->group, .wide = (j->dim + 15u) / 16u * 16u};
    c.k = memory;
    c.v = c.k + (size_t)CPU_TILE * c.wide;
    c.q = c.v + (size_t)CPU_TILE * c.wide;
    c.s = c.q + (size_t)c.pairs * c.wide;
    c.p = c.s + (size_t)c.pairs * CPU_TILE;
    c.shrink = c.p + (size_t)c.pairs * CPU_TILE;
    return c;
}

static void pack_queries(const struct cpu_attend *j, const struct scratch *c)
{
    for (uint32_t i = 0; i < c->pairs; i++) {
        uint32_t tile = i / MR * MR, mr = c->pairs - tile < MR ? c->pairs - tile : MR;
        const float *q = j->q + i / j->group * j->ldq + (size_t)(i % j->group) * j->dim;
        float *to = c->q + (size_t)tile * j->dim + (i - tile);
        for (uint32_t d = 0; d < j->dim; d++)
            to[(size_t)d * mr] = q[d] * j->scale;
    }
}

/* ---- one tile of K and V ------------------------------------------------------------------ */

static const uint16_t *page(const struct cpu_attend *j, const uint8_t *base, uint32_t t)
{
    return (const uint16_t *)(const void *)(base + j->blocks[t] * j->stride_block);
}

/* Keys n..n+3 and n+4..n+7 of 8 dims: a vector of two rows' halves. */
AVX2_INLINE __m256i two_rows(const uint16_t *k, uint32_t dim, uint32_t i)
{
    __m128i lo = _mm_loadu_si128((const __m128i *)(const void *)(k + (size_t)i * dim));
    __m128i hi = _mm_loadu_si128((const __m128i *)(const void *)(k + (size_t)(i + 4) * dim));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(lo), hi, 1);
}

/* 8 keys x 8 dims of bf16 into 8 rows of 8 float32, `to` 16 floats apart. Transposed as 32-bit
 * words of two dims, then widened. */
AVX2_INLINE void turn_8x8(float *to, const uint16_t *k, uint32_t dim)
{
    __m256i r0 = two_rows(k, dim, 0), r1 = two_rows(k, dim, 1);
    __m256i r2 = two_rows(k, dim, 2), r3 = two_rows(k, dim, 3);
    __m256i a = _mm256_unpacklo_epi32(r0, r1), b = _mm256_unpackhi_epi32(r0, r1);
    __m256i c = _mm256_unpacklo_epi32(r2, r3), d = _mm256_unpackhi_epi32(r2, r3);
    __m256i w[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c),
                    _mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(to + 2 * i * CPU_PANEL, avx2_low(w[i]));
        _mm256_storeu_ps(to + (2 * i + 1) * CPU_PANEL, avx2_high(w[i]));
    }
}

/* Key by key, for dims beyond a multiple of 8 and keys beside those that are seen. */
static void turn_plain(float *to, const uint16_t *k, uint32_t dim, uint32_t d0, uint32_t a,
                       uint32_t b)
{
    for (uint32_t d = d0; d < dim; d++)
        for (uint32_t i = 0; i < 8; i++)
            to[d * CPU_PANEL + i] =
                i >= a && i < b ? device_bf16_to_f32(k[(size_t)i * dim + d]) : 0.0f;
}

static void widen_keys(const struct cpu_attend *j, const struct scratch *c, uint32_t t, uint32_t a,
                       uint32_t b)
{
    const uint16_t *k = page(j, j->k, t);
    for (uint32_t i = 0; i < CPU_TILE; i += 8) {
        float *to = c->k + (size_t)(i / CPU_PANEL) * j->dim * CPU_PANEL + i % CPU_PANEL;
        const uint16_t *from = k + (size_t)i * j->dim;
        uint32_t d = 0;
        if (a <= i && b >= i + 8)
            for (; d + 8 <= j->dim; d += 8)
                turn_8x8(to + d * CPU_PANEL, from + d, j->dim);
        turn_plain(to, from, j->dim, d, a > i ? a - i : 0, b > i ? b - i : 0);
    }
}

static void widen_values(const struct cpu_attend *j, const struct scratch *c, uint32_t t,
                         uint32_t a, uint32_t b)
{
    const uint16_t *v = page(j, j->v, t);
    for (uint32_t i = 0; i < CPU_TILE; i++) {
        const uint16_t *from = v + (size_t)i * j->dim;
        uint32_t d = 0;
        for (; d + 8 <= j->dim && i >= a && i < b; d += 8) {
            float *to = c->v + (size_t)(d / CPU_PANEL) * CPU_TILE * CPU_PANEL + i * CPU_PANEL;
            __m128i h = _mm_loadu_si128((const __m128i *)(const void *)(from + d));
            _mm256_storeu_ps(to + d % CPU_PANEL, avx2_low(_mm256_cvtepu16_epi32(h)));
        }
        for (; d < c->wide; d++) {
            float *to = c->v + (size_t)(d / CPU_PANEL) * CPU_TILE * CPU_PANEL + i * CPU_PANEL;
            to[d % CPU_PANEL] = d < j->dim && i >= a && i < b ? device_bf16_to_f32(from[d]) : 0.0f;
        }
    }
}

/* ---- one tile of all pairs ---------------------------------------------------------------- */

static void score(const struct cpu_attend *j, const struct scratch *c)
{
    memset(c->s, 0, (size_t)c->pairs * CPU_TILE * sizeof(float));
    for (uint32_t n = 0; n < CPU_TILE; n += CPU_PANEL)
        for (uint32_t i = 0; i < c->pairs; i += MR)
            avx2_tile(c->s + (size_t)i * CPU_TILE + n, CPU_TILE, c->q + (size_t)i * j->dim,
                      c->k + (size_t)n * j->dim, j->dim, c->pairs - i < MR ? c->pairs - i : MR);
}

static void softmax(const struct cpu_attend *j, const struct scratch *c, uint32_t t,
                    const struct cpu_partial *p)
{
    for (uint32_t i = 0; i < c->pairs; i++) {
        uint32_t tile = i / MR * MR, mr = c->pairs - tile < MR ? c->pairs - tile : MR, a, b;
        float *s = c->s + (size_t)i * CPU_TILE, *to = c->p + (size_t)tile * CPU_TILE + (i - tile);
        cpu_attend_sees(j, i / j->group, t, &a, &b);
        float shrink = cpu_softmax_tile(s, a, b, &p->m[i], &p->l[i]);
        for (uint32_t n = 0; n < CPU_TILE; n++)
            to[(size_t)n * mr] = s[n];
        if (shrink != 1.0f)
            for (uint32_t d = 0; d < c->wide; d++)
                p->o[i * p->ldo + d] *= shrink;
    }
}

static void weigh(const struct scratch *c, const struct cpu_partial *p)
{
    for (uint32_t d = 0; d < c->wide; d += CPU_PANEL)
        for (uint32_t i = 0; i < c->pairs; i += MR)
            avx2_tile(p->o + i * p->ldo + d, p->ldo, c->p + (size_t)i * CPU_TILE,
                      c->v + (size_t)d * CPU_TILE, CPU_TILE,
                      c->pairs - i < MR ? c->pairs - i : MR);
}

CPU_ATTEND(cpu_attend_avx2)
{
    struct scratch c = lay_out(j, scratch);
    pack_queries(j, &c);
    for (uint32_t i = 0; i < c.pairs; i++) {
        memset(p->o + i * p->ldo, 0, c.wide * sizeof(float));
        p->m[i] = -INFINITY;
        p->l[i] = 0.0f;
    }
    for (uint32_t t = t0; t < t1; t++) {
        uint32_t a, b;
        cpu_attend_held(j, t, &a, &b);
        widen_keys(j, &c, t, a, b);
        widen_values(j, &c, t, a, b);
        score(j, &c);
        softmax(j, &c, t, p);
        weigh(&c, p);
    }
}
