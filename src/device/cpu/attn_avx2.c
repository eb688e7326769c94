/* SPDX-License-Identifier: Apache-2.0 */
/* AVX2: attention of many (row, head) pairs that share one kv head.
 *
 * Tile by tile of 64 positions: K is widened and turned to [panel of 16 keys][dim][16], V to
 * [panel of 16 dims][64][16]; both are the B of the register tile. Scores are one chain over dim,
 * with lanes over keys; o is one chain over positions, with lanes over dims. Queries are
 * multiplied by the scale first. Rows of the page that no pair sees are taken as zeros, for they
 * may hold anything.
 */
#include <string.h>

#include "device/cpu/avx2_priv.h"
#include "device/cpu/rows_priv.h"

enum { MR = AVX2_MR };

struct scratch {
    uint32_t pairs, wide; /* wide = dim padded to 16 */
    float *q;             /* [tile of 6 pairs][dim][pairs in the tile] */
    float *s;             /* [pairs][64]: scores, then p */
    float *k;             /* [4][dim][16] */
    float *v;             /* [wide/16][64][16] */
};

static struct scratch lay_out(const struct cpu_attend *j, void *memory)
{
    struct scratch c = {.pairs = j->rows * j->group, .wide = (j->dim + 15u) / 16u * 16u};
    c.k = memory;
    c.v = c.k + (size_t)CPU_TILE * c.wide;
    c.q = c.v + (size_t)CPU_TILE * c.wide;
    c.s = c.q + (size_t)c.pairs * c.wide;
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

/* 8 keys x 8 dims of bf16, keys dim elements apart, into 8 vectors over the keys. Transposed as
 * 32-bit words of two dims, then widened. */
AVX2_INLINE void turn_8x8(__m256 to[8], const uint16_t *k, uint32_t dim)
{
    __m256i r0 = two_rows(k, dim, 0), r1 = two_rows(k, dim, 1);
    __m256i r2 = two_rows(k, dim, 2), r3 = two_rows(k, dim, 3);
    __m256i a = _mm256_unpacklo_epi32(r0, r1), b = _mm256_unpackhi_epi32(r0, r1);
    __m256i c = _mm256_unpacklo_epi32(r2, r3), d = _mm256_unpackhi_epi32(r2, r3);
    __m256i w[4] = {_mm256_unpacklo_epi64(a, c), _mm256_unpackhi_epi64(a, c),
                    _mm256_unpacklo_epi64(b, d), _mm256_unpackhi_epi64(b, d)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        to[2 * i] = avx2_low(w[i]);
        to[2 * i + 1] = avx2_high(w[i]);
    }
}

static void turn_store(float *to, const uint16_t *k, uint32_t dim)
{
    __m256 r[8];
    turn_8x8(r, k, dim);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        _mm256_storeu_ps(to + i * CPU_PANEL, r[i]);
}

/* Key by key, for dims beyond a multiple of 8 and keys beside those that are seen. */
static void turn_plain(float *to, const uint16_t *k, uint32_t dim, uint32_t d0, uint32_t a,
                       uint32_t b)
{
    for (uint32_t d = d0; d < dim; d++)
        for (uint32_t i = 0; i < 8; i++)
            to[d * CPU_PANEL + i] = i >= a && i < b ? device_bf16_to_f32(k[(size_t)i * dim + d])
                                                    : 0.0f;
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
                turn_store(to + d * CPU_PANEL, from + d, j->dim);
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
        uint32_t a, b;
        cpu_attend_sees(j, i / j->group, t, &a, &b);
        float shrink = cpu_softmax_tile(c->s + (size_t)i * CPU_TILE, a, b, &p->m[i], &p->l[i]);
        if (shrink != 1.0f)
            for (uint32_t d = 0; d < c->wide; d++)
                p->o[i * p->ldo + d] *= shrink;
    }
}

static void weigh(const struct scratch *c, const struct cpu_partial *p)
{
    for (uint32_t d = 0; d < c->wide; d += CPU_PANEL)
        for (uint32_t i = 0; i < c->pairs; i += MR)
            avx2_tile_rows(p->o + i * p->ldo + d, p->ldo, c->s + (size_t)i * CPU_TILE,
                           c->v + (size_t)d * CPU_TILE, c->pairs - i < MR ? c->pairs - i : MR);
}

/* ---- one tile of few pairs ---------------------------------------------------------------- */

/* Up to 6 pairs of a tile that is seen whole (a decode step): K and V go through registers once
 * and are never stored. The same chains as above. */

/* 16 keys from k on against mr pairs. */
AVX2_INLINE void score_fixed(float *s, const float *q, const uint16_t *k, uint32_t dim,
                             const int mr)
{
    __m256 c[MR][2], r[8];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
        c[i][0] = c[i][1] = _mm256_setzero_ps();
    for (uint32_t d = 0; d < dim; d += 8, q += 8 * mr) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            turn_8x8(r, k + (size_t)(8 * h) * dim + d, dim);
#pragma GCC unroll 8
            for (int n = 0; n < 8; n++)
#pragma GCC unroll 6
                for (int i = 0; i < mr; i++)
                    c[i][h] = _mm256_fmadd_ps(_mm256_broadcast_ss(q + n * mr + i), r[n], c[i][h]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++) {
        _mm256_storeu_ps(s + i * CPU_TILE, c[i][0]);
        _mm256_storeu_ps(s + i * CPU_TILE + 8, c[i][1]);
    }
}

/* o [mr, 16 nv] += p [mr, 64] v [64, 16 nv]; lanes in the order of the dims. */
AVX2_INLINE void weigh_fixed(float *o, size_t ldo, const float *p, const uint16_t *v, uint32_t dim,
                             const int mr, const int nv)
{
    __m256 c[MR][4];
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int n = 0; n < 2 * nv; n++)
            c[i][n] = _mm256_loadu_ps(o + i * ldo + 8 * n);
    for (uint32_t k = 0; k < CPU_TILE; k++, v += dim) {
#pragma GCC unroll 4
        for (int n = 0; n < 2 * nv; n++) {
            __m128i h = _mm_loadu_si128((const __m128i *)(const void *)(v + 8 * n));
            __m256 x = avx2_low(_mm256_cvtepu16_epi32(h));
#pragma GCC unroll 6
            for (int i = 0; i < mr; i++)
                c[i][n] = _mm256_fmadd_ps(_mm256_broadcast_ss(p + i * CPU_TILE + k), x, c[i][n]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int n = 0; n < 2 * nv; n++)
            _mm256_storeu_ps(o + i * ldo + 8 * n, c[i][n]);
}

AVX2_INLINE void few_fixed(const struct cpu_attend *j, const struct scratch *c, uint32_t t,
                           const struct cpu_partial *p, const int mr, const int nv)
{
    const uint16_t *k = page(j, j->k, t), *v = page(j, j->v, t);
    uint32_t d = 0;
    for (uint32_t n = 0; n < CPU_TILE; n += CPU_PANEL)
        score_fixed(c->s + n, c->q, k + (size_t)n * j->dim, j->dim, mr);
    softmax(j, c, t, p);
    for (; d + 16 * nv <= j->dim; d += 16 * nv)
        weigh_fixed(p->o + d, p->ldo, c->s, v + d, j->dim, mr, nv);
    for (; d < j->dim; d += 16)
        weigh_fixed(p->o + d, p->ldo, c->s, v + d, j->dim, mr, 1);
}

static void few(const struct cpu_attend *j, const struct scratch *c, uint32_t t,
                const struct cpu_partial *p)
{
    switch (c->pairs) {
    case 1:
        few_fixed(j, c, t, p, 1, 2);
        break;
    case 2:
        few_fixed(j, c, t, p, 2, 2);
        break;
    case 3:
        few_fixed(j, c, t, p, 3, 2);
        break;
    case 4:
        few_fixed(j, c, t, p, 4, 1);
        break;
    case 5:
        few_fixed(j, c, t, p, 5, 1);
        break;
    default:
        few_fixed(j, c, t, p, 6, 1);
        break;
    }
}

/* ---- all ---------------------------------------------------------------------------------- */

static void many(const struct cpu_attend *j, const struct scratch *c, uint32_t t, uint32_t a,
                 uint32_t b, const struct cpu_partial *p)
{
    widen_keys(j, c, t, a, b);
    widen_values(j, c, t, a, b);
    score(j, c);
    softmax(j, c, t, p);
    weigh(c, p);
}

CPU_ATTEND(device_cpu_attend_avx2)
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
        if (c.pairs <= MR && j->dim % 16 == 0 && a == 0 && b == CPU_TILE)
            few(j, &c, t, p);
        else
            many(j, &c, t, a, b, p);
    }
}
