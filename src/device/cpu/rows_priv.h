/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels that work on one row or element by element, in plain C, compiled once into each
 * instruction set's library.
 *
 * Every operation here is a single IEEE one (no contraction, see meson.build) and every sum has
 * fixed lanes, so the compiler may choose any vector width and the bits stay the same: on every
 * instruction set, for any number of rows. That is why they need no intrinsics.
 */
#ifndef DEVICE_CPU_ROWS_PRIV_H
#define DEVICE_CPU_ROWS_PRIV_H

#include <math.h>

#include "device/cpu/cpu_priv.h"

#define CPU_LANES 16u /* partial sums of a reduction: element i belongs to lane i % 16 */

/* exp(x) for finite x, -inf and NaN: 2^n * p(r) with r in [-ln2/2, ln2/2], p of degree 6 (the
 * coefficients of Cephes' expf), below 1 ulp. 0 below -87 (results under 2^-125 are dropped) and
 * exp(88) above 88. n is rounded by adding 1.5*2^23, whose low mantissa bits then hold n. */
static inline float cpu_exp(float x)
{
    union {
        float f;
        uint32_t u;
    } t, scale;
    float c = x < -87.0f ? -87.0f : x;
    c = c > 88.0f ? 88.0f : c;
    t.f = c * 1.44269504088896341f + 12582912.0f;
    float n = t.f - 12582912.0f;
    float r = (c - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * (r * r) + r) + 1.0f;
    scale.u = (t.u << 23) + 0x3F800000u;
    p *= scale.f;
    return x < -87.0f ? 0.0f : p;
}

/* Lanes are added pairwise: 8 and 8, 4 and 4, ... */
static inline float cpu_lane_sum(float lane[CPU_LANES])
{
    for (uint32_t h = CPU_LANES / 2; h > 0; h /= 2)
        for (uint32_t i = 0; i < h; i++)
            lane[i] += lane[i + h];
    return lane[0];
}

static inline float cpu_sum_squares(const float *x, uint32_t n)
{
    float lane[CPU_LANES] = {0};
    uint32_t i = 0;
    for (; i + CPU_LANES <= n; i += CPU_LANES)
        for (uint32_t l = 0; l < CPU_LANES; l++)
            lane[l] += x[i + l] * x[i + l];
    for (uint32_t l = 0; i + l < n; l++)
        lane[l] += x[i + l] * x[i + l];
    return cpu_lane_sum(lane);
}

static inline void cpu_norm_row(float *y, const float *x, const float *w, uint32_t n, float eps,
                                float offset)
{
    float inverse = 1.0f / sqrtf(cpu_sum_squares(x, n) / (float)n + eps);
    for (uint32_t i = 0; i < n; i++)
        y[i] = x[i] * inverse * (offset + w[i]);
}

static inline void cpu_rope_row(float *x, uint32_t heads, uint32_t half, const float *cosine,
                                const float *sine)
{
    for (uint32_t h = 0; h < heads; h++, x += 2 * (size_t)half)
        for (uint32_t i = 0; i < half; i++) {
            float a = x[i], b = x[i + half];
            x[i] = a * cosine[i] - b * sine[i];
            x[i + half] = b * cosine[i] + a * sine[i];
        }
}

static inline void cpu_add_row(float *x, const float *y, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] += y[i];
}

/* silu(x) = x / (1 + exp(-x)); gelu with tanh is x / (1 + exp(-2u)), u = sqrt(2/pi)(x + 0.044715
 * x^3), since (1 + tanh u)/2 = 1/(1 + exp(-2u)). */
static inline void cpu_gate_row(float *y, const float *gate, const float *up, size_t n,
                                enum device_act act)
{
    if (act == DEVICE_SILU) {
        for (size_t i = 0; i < n; i++)
            y[i] = gate[i] / (1.0f + cpu_exp(-gate[i])) * up[i];
        return;
    }
    for (size_t i = 0; i < n; i++) {
        float x = gate[i], u = x * (0.797884560802865f + 0.0356774081363001f * x * x);
        y[i] = x / (1.0f + cpu_exp(-2.0f * u)) * up[i];
    }
}

/* As device_f32_to_bf16, without a branch. */
static inline void cpu_narrow_row(uint16_t *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        union {
            float f;
            uint32_t u;
        } v = {x[i]};
        uint32_t rounded = (v.u + 0x7FFFu + ((v.u >> 16) & 1u)) >> 16;
        uint32_t nan = (v.u >> 16) | 0x0040u;
        y[i] = (uint16_t)((v.u & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
    }
}

static inline float cpu_larger(float a, float b)
{
    return a > b ? a : b;
}

/* Largest of the 64 scores of a tile. */
static inline float cpu_tile_top(const float *s)
{
    float lane[CPU_LANES], top = -INFINITY;
    for (uint32_t i = 0; i < CPU_LANES; i++)
        lane[i] = cpu_larger(cpu_larger(s[i], s[i + 16]), cpu_larger(s[i + 32], s[i + 48]));
    for (uint32_t i = 0; i < CPU_LANES; i++)
        top = cpu_larger(top, lane[i]);
    return top;
}

/* One tile of one pair: s holds 64 scores of which [a, b) are seen, and becomes p = exp(s - m),
 * 0 where unseen. Returns the factor by which what was summed so far shrinks: exactly 1 where
 * nothing is seen, and then m and l stay. */
static inline float cpu_softmax_tile(float *s, uint32_t a, uint32_t b, float *m, float *l)
{
    float lane[CPU_LANES], old = *m;
    if (a >= b) {
        for (uint32_t i = 0; i < CPU_TILE; i++)
            s[i] = 0.0f;
        return 1.0f;
    }
    for (uint32_t i = 0; i < a; i++)
        s[i] = -INFINITY;
    for (uint32_t i = b; i < CPU_TILE; i++)
        s[i] = -INFINITY;
    float top = cpu_larger(cpu_tile_top(s), old);
    for (uint32_t i = 0; i < CPU_TILE; i++)
        s[i] = cpu_exp(s[i] - top);
    for (uint32_t i = 0; i < CPU_LANES; i++)
        lane[i] = (s[i] + s[i + 16]) + (s[i + 32] + s[i + 48]);
    float shrink = cpu_exp(old - top);
    *m = top;
    *l = *l * shrink + cpu_lane_sum(lane);
    return shrink;
}

static inline void cpu_combine_rows(const struct cpu_partial *p, const struct cpu_partial *q,
                                    uint32_t pairs, uint32_t dim)
{
    for (uint32_t i = 0; i < pairs; i++) {
        float *o = p->o + i * p->ldo;
        const float *more = q->o + i * q->ldo;
        if (q->m[i] == -INFINITY) /* saw nothing */
            continue;
        float top = p->m[i] > q->m[i] ? p->m[i] : q->m[i];
        float a = cpu_exp(p->m[i] - top), b = cpu_exp(q->m[i] - top);
        p->m[i] = top;
        p->l[i] = p->l[i] * a + q->l[i] * b;
        for (uint32_t d = 0; d < dim; d++)
            o[d] = o[d] * a + more[d] * b;
    }
}

/* A sum of exact zeros may be -0 or +0 depending on unseen values; adding +0 makes it +0. */
static inline void cpu_finish_rows(const struct cpu_partial *p, uint32_t pairs, uint32_t dim,
                                   uint32_t group, float *out, size_t ldout)
{
    for (uint32_t i = 0; i < pairs; i++) {
        float inverse = 1.0f / p->l[i];
        float *y = out + i / group * ldout + (size_t)(i % group) * dim;
        for (uint32_t d = 0; d < dim; d++)
            y[d] = p->o[i * p->ldo + d] * inverse + 0.0f;
    }
}

/* The row kernels of one instruction set. */
#define CPU_ROWS_DEFINE(isa)                                                                       \
    CPU_COMBINE(device_cpu_combine_##isa)                                                          \
    {                                                                                              \
        cpu_combine_rows(p, q, pairs, dim);                                                        \
    }                                                                                              \
    CPU_FINISH(device_cpu_finish_##isa)                                                            \
    {                                                                                              \
        cpu_finish_rows(p, pairs, dim, group, out, ldout);                                         \
    }                                                                                              \
    CPU_NORM(device_cpu_norm_##isa)                                                                \
    {                                                                                              \
        cpu_norm_row(y, x, w, n, eps, offset);                                                     \
    }                                                                                              \
    CPU_ROPE(device_cpu_rope_##isa)                                                                \
    {                                                                                              \
        cpu_rope_row(x, heads, half, cosine, sine);                                                \
    }                                                                                              \
    CPU_ADD(device_cpu_add_##isa)                                                                  \
    {                                                                                              \
        cpu_add_row(x, y, n);                                                                      \
    }                                                                                              \
    CPU_GATE(device_cpu_gate_##isa)                                                                \
    {                                                                                              \
        cpu_gate_row(y, gate, up, n, act);                                                         \
    }                                                                                              \
    CPU_NARROW(device_cpu_narrow_##isa)                                                            \
    {                                                                                              \
        cpu_narrow_row(y, x, n);                                                                   \
    }

#endif
