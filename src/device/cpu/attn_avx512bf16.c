/* SPDX-License-Identifier: Apache-2.0 */
/* AVX-512-BF16: attention of many (row, head) pairs that share one kv head.
 *
 * Tile by tile of 64 positions, as in the AVX2 file, but K and V stay bf16: K is turned to [panel
 * of 16 keys][dim/2][16] words of two dims, V to [panel of 16 dims][32][16] words of two
 * positions. Queries (times the scale) and weights p are rounded to bf16, element by element; sums
 * are float32, one chain over the words. p's sum is taken before rounding. Rows of the page that
 * no pair sees are taken as zeros, for they may hold anything.
 */
#include <string.h>

#include "device/cpu/avx512bf16_priv.h"
#include "device/cpu/rows_priv.h"

enum { MR = 6, NP = 4, PAIRS = CPU_TILE / 2 };

struct scratch {
    uint32_t pairs, wide; /* wide = dim padded to 16 */
    uint32_t words;       /* of a key: dim/2, rounded up */
    uint32_t *q;          /* [tile of 6 pairs][words][pairs in the tile] */
    float *s;             /* [pairs][64]: scores, then p */
    uint32_t *p;          /* [pairs][32] p as bf16 */
    uint32_t *k;          /* [4][words][16] */
    uint32_t *v;          /* [wide/16][32][16] */
};

static struct scratch lay_out(const struct cpu_attend *j, void *memory)
{
    struct scratch c = {.pairs = j->rows * j->group, .wide = (j->dim + 15u) / 16u * 16u};
    c.words = (j->dim + 1) / 2;
    c.k = memory;
    c.v = c.k + (size_t)CPU_TILE * c.wide;
    c.q = c.v + (size_t)CPU_TILE * c.wide;
    c.s = (float *)(c.q + (size_t)c.pairs * c.wide);
    c.p = (uint32_t *)(c.s + (size_t)c.pairs * CPU_TILE);
    return c;
}

static uint32_t tile_of(const struct scratch *c, uint32_t i, uint32_t *mr)
{
    uint32_t tile = i / MR * MR;
    *mr = c->pairs - tile < MR ? c->pairs - tile : MR;
    return tile;
}

static void pack_queries(const struct cpu_attend *j, const struct scratch *c)
{
    for (uint32_t i = 0; i < c->pairs; i++) {
        uint32_t mr, tile = tile_of(c, i, &mr);
        const float *q = j->q + i / j->group * j->ldq + (size_t)(i % j->group) * j->dim;
        uint32_t *to = c->q + (size_t)tile * c->words + (i - tile);
        for (uint32_t d = 0; d < j->dim; d += 2) {
            float two[2] = {q[d] * j->scale, d + 1 < j->dim ? q[d + 1] * j->scale : 0.0f};
            uint16_t half[2];
            cpu_narrow_row(half, two, 2);
            to[(size_t)(d / 2) * mr] = half[0] | (uint32_t)half[1] << 16;
        }
    }
}

/* ---- one tile of K and V ------------------------------------------------------------------ */

static const uint16_t *page(const struct cpu_attend *j, const uint8_t *base, uint32_t t)
{
    return (const uint16_t *)(const void *)(base + j->blocks[t] * j->stride_block);
}

/* 16 keys, dim elements apart, x 32 dims: a 16 x 16 transpose of words, in four steps of pairwise
 * shuffles. */
static void turn_16x16(uint32_t *to, const uint16_t *k, uint32_t dim)
{
    __m512i a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        a[i] = _mm512_loadu_si512(k + (size_t)i * dim);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) { /* a[i+n]: word n of each quarter of keys i..i+3 */
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) {
        __m512i lo = _mm512_shuffle_i32x4(a[n], a[n + 4], 0x88); /* quarters 0, 2 of keys 0..7 */
        __m512i lo2 = _mm512_shuffle_i32x4(a[n + 8], a[n + 12], 0x88); /* of keys 8..15 */
        __m512i hi = _mm512_shuffle_i32x4(a[n], a[n + 4], 0xDD);       /* quarters 1, 3 */
        __m512i hi2 = _mm512_shuffle_i32x4(a[n + 8], a[n + 12], 0xDD);
        _mm512_storeu_si512(to + n * CPU_PANEL, _mm512_shuffle_i32x4(lo, lo2, 0x88));
        _mm512_storeu_si512(to + (n + 4) * CPU_PANEL, _mm512_shuffle_i32x4(hi, hi2, 0x88));
        _mm512_storeu_si512(to + (n + 8) * CPU_PANEL, _mm512_shuffle_i32x4(lo, lo2, 0xDD));
        _mm512_storeu_si512(to + (n + 12) * CPU_PANEL, _mm512_shuffle_i32x4(hi, hi2, 0xDD));
    }
}

/* Word by word, for dims beyond a multiple of 32 and keys beside those that are seen. */
static void turn_plain(uint32_t *to, const uint16_t *k, uint32_t dim, uint32_t d, uint32_t a,
                       uint32_t b)
{
    for (; d < dim; d += 2)
        for (uint32_t i = 0; i < CPU_PANEL; i++) {
            const uint16_t *from = k + (size_t)i * dim + d;
            uint32_t high = i >= a && i < b && d + 1 < dim ? from[1] : 0;
            to[(d / 2) * CPU_PANEL + i] = i >= a && i < b ? from[0] | high << 16 : 0;
        }
}

static void turn_keys(const struct cpu_attend *j, const struct scratch *c, uint32_t t, uint32_t a,
                      uint32_t b)
{
    const uint16_t *k = page(j, j->k, t);
    for (uint32_t i = 0; i < CPU_TILE; i += CPU_PANEL) {
        uint32_t *to = c->k + (size_t)i * c->words, d = 0;
        const uint16_t *from = k + (size_t)i * j->dim;
        if (a <= i && b >= i + CPU_PANEL)
            for (; d + 32 <= j->dim; d += 32)
                turn_16x16(to + (d / 2) * CPU_PANEL, from + d, j->dim);
        turn_plain(to, from, j->dim, d, a > i ? a - i : 0, b > i ? b - i : 0);
    }
}

/* 16 values of one position, those below `dim` where the position is seen, else zeros. */
AVX512_INLINE __m512i values(const uint16_t *v, uint32_t d, uint32_t dim, bool seen)
{
    uint32_t n = seen ? dim - d : 0;
    __mmask16 mask = n >= 16 ? (__mmask16)0xFFFFu : (__mmask16)((1u << n) - 1u);
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, v + d));
}

static void pair_values(const struct cpu_attend *j, const struct scratch *c, uint32_t t, uint32_t a,
                        uint32_t b)
{
    const uint16_t *v = page(j, j->v, t);
    for (uint32_t i = 0; i < CPU_TILE; i += 2) {
        bool seen0 = i >= a && i < b, seen1 = i + 1 >= a && i + 1 < b;
        const uint16_t *from = v + (size_t)i * j->dim;
        for (uint32_t d = 0; d < j->dim; d += CPU_PANEL) {
            __m512i even = values(from, d, j->dim, seen0);
            __m512i odd = values(from + j->dim, d, j->dim, seen1);
            _mm512_storeu_si512(c->v + ((size_t)d * PAIRS + (size_t)(i / 2) * CPU_PANEL),
                                _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        }
    }
}

/* ---- one tile of all pairs ---------------------------------------------------------------- */

/* mr pairs against all 64 keys. */
AVX512_INLINE void score_fixed(const struct scratch *c, uint32_t i, const int mr)
{
    __m512 sum[AVX512_SUMS];
    float *s = c->s + (size_t)i * CPU_TILE;
#pragma GCC unroll 24
    for (int n = 0; n < mr * NP; n++)
        sum[n] = _mm512_setzero_ps();
    avx512_dot(sum, c->q + (size_t)i * c->words, 1, (size_t)mr, c->k, (size_t)c->words * CPU_PANEL,
               c->words, mr, NP, 0);
#pragma GCC unroll 4
    for (int p = 0; p < NP; p++)
#pragma GCC unroll 8
        for (int n = 0; n < mr; n++)
            _mm512_storeu_ps(s + n * CPU_TILE + p * CPU_PANEL, sum[p * mr + n]);
}

/* o [mr, 16 np] += p v for dims from d on. */
AVX512_INLINE void weigh_fixed(const struct scratch *c, const struct cpu_partial *p, uint32_t i,
                               uint32_t d, const int mr, const int np)
{
    __m512 sum[AVX512_SUMS];
    float *o = p->o + i * p->ldo + d;
#pragma GCC unroll 4
    for (int h = 0; h < np; h++)
#pragma GCC unroll 8
        for (int n = 0; n < mr; n++)
            sum[h * mr + n] = _mm512_loadu_ps(o + n * p->ldo + h * CPU_PANEL);
    avx512_dot(sum, c->p + (size_t)i * PAIRS, PAIRS, 1, c->v + (size_t)d * PAIRS,
               (size_t)PAIRS * CPU_PANEL, PAIRS, mr, np, 0);
#pragma GCC unroll 4
    for (int h = 0; h < np; h++)
#pragma GCC unroll 8
        for (int n = 0; n < mr; n++)
            _mm512_storeu_ps(o + n * p->ldo + h * CPU_PANEL, sum[h * mr + n]);
}

/* One function for each number of pairs in a tile: see TILE in gemm_avx512bf16.c. */
#define PAIR_TILE(mr)                                                                              \
    static __attribute__((noinline)) void score_##mr(const struct scratch *c, uint32_t i)          \
    {                                                                                              \
        score_fixed(c, i, mr);                                                                     \
    }                                                                                              \
    static __attribute__((noinline)) void weigh_##mr(const struct scratch *c,                      \
                                                     const struct cpu_partial *p, uint32_t i)      \
    {                                                                                              \
        uint32_t d = 0;                                                                            \
        for (; d + NP * CPU_PANEL <= c->wide; d += NP * CPU_PANEL)                                 \
            weigh_fixed(c, p, i, d, mr, NP);                                                       \
        for (; d < c->wide; d += CPU_PANEL)                                                        \
            weigh_fixed(c, p, i, d, mr, 1);                                                        \
    }
PAIR_TILE(1)
PAIR_TILE(2)
PAIR_TILE(3)
PAIR_TILE(4)
PAIR_TILE(5)
PAIR_TILE(6)

static const struct {
    void (*score)(const struct scratch *c, uint32_t i);
    void (*weigh)(const struct scratch *c, const struct cpu_partial *p, uint32_t i);
} tiles[MR + 1] = {{NULL, NULL},       {score_1, weigh_1}, {score_2, weigh_2}, {score_3, weigh_3},
                   {score_4, weigh_4}, {score_5, weigh_5}, {score_6, weigh_6}};

static void softmax(const struct cpu_attend *j, const struct scratch *c, uint32_t t,
                    const struct cpu_partial *p)
{
    for (uint32_t i = 0; i < c->pairs; i++) {
        float *s = c->s + (size_t)i * CPU_TILE;
        uint32_t a, b;
        cpu_attend_sees(j, i / j->group, t, &a, &b);
        float shrink = cpu_softmax_tile(s, a, b, &p->m[i], &p->l[i]);
        cpu_narrow_row((uint16_t *)(c->p + (size_t)i * PAIRS), s, CPU_TILE);
        if (shrink != 1.0f)
            for (uint32_t d = 0; d < c->wide; d++)
                p->o[i * p->ldo + d] *= shrink;
    }
}

/* ---- all ---------------------------------------------------------------------------------- */

CPU_ATTEND(device_cpu_attend_avx512bf16)
{
    struct scratch c = lay_out(j, scratch);
    uint32_t mr;
    pack_queries(j, &c);
    for (uint32_t i = 0; i < c.pairs; i++) {
        memset(p->o + i * p->ldo, 0, c.wide * sizeof(float));
        p->m[i] = -INFINITY;
        p->l[i] = 0.0f;
    }
    for (uint32_t t = t0; t < t1; t++) {
        uint32_t a, b;
        cpu_attend_held(j, t, &a, &b);
        turn_keys(j, &c, t, a, b);
        pair_values(j, &c, t, a, b);
        for (uint32_t i = 0; i < c.pairs; i += MR) {
            tile_of(&c, i, &mr);
            tiles[mr].score(&c, i);
        }
        softmax(j, &c, t, p);
        for (uint32_t i = 0; i < c.pairs; i += MR) {
            tile_of(&c, i, &mr);
            tiles[mr].weigh(&c, p, i);
        }
    }
}
