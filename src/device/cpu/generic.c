/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels in portable C: what the vector kernels mean, and what runs where there are none.
 *
 * Activations [tile of 4 rows][k][rows in the tile], float32. Weights in CPU_ORDER_OUTPUTS. Every
 * output is bias + sum over k in order, one multiplication and one addition a term.
 */
#include <string.h>

#include "device/cpu/rows_priv.h"

enum { MR = 4, HALF = CPU_PANEL / 2 };

CPU_ROWS_DEFINE(generic)

CPU_PACK_ROWS(device_cpu_pack_rows_generic)
{
    for (uint32_t r = r0; r < r1; r += MR) {
        uint32_t rows = r1 - r < MR ? r1 - r : MR;
        float *a = (float *)l->a + (size_t)r * l->k;
        for (uint32_t k = 0; k < k_x; k++)
            for (uint32_t i = 0; i < rows; i++)
                *a++ = x[(size_t)(r + i) * k_x + k];
    }
}

/* One tile of rows times one panel. */
static void tile(const struct cpu_linear *l, uint32_t r, uint32_t rows, uint32_t panel)
{
    const float *a = (const float *)l->a + (size_t)r * l->k;
    const uint16_t *w = l->w + (size_t)panel * l->k * CPU_PANEL;
    uint32_t n = l->n - panel * CPU_PANEL < CPU_PANEL ? l->n - panel * CPU_PANEL : CPU_PANEL;
    float sum[MR][CPU_PANEL], wide[CPU_PANEL];

    for (uint32_t i = 0; i < rows; i++)
        for (uint32_t j = 0; j < CPU_PANEL; j++)
            sum[i][j] = l->bias ? l->bias[panel * CPU_PANEL + j] : 0.0f;
    for (uint32_t k = 0; k < l->k; k++, w += CPU_PANEL, a += rows) {
        for (uint32_t j = 0; j < HALF; j++) {
            wide[j] = device_bf16_to_f32(w[2 * j]);
            wide[j + HALF] = device_bf16_to_f32(w[2 * j + 1]);
        }
        for (uint32_t i = 0; i < rows; i++)
            for (uint32_t j = 0; j < CPU_PANEL; j++)
                sum[i][j] += a[i] * wide[j];
    }
    for (uint32_t i = 0; i < rows; i++)
        memcpy(l->y + (r + i) * l->ldy + (size_t)panel * CPU_PANEL, sum[i], n * sizeof(float));
}

CPU_GEMV(device_cpu_gemv_generic)
{
    for (uint32_t p = p0; p < p1; p++)
        tile(l, 0, l->m, p);
}

CPU_GEMM(device_cpu_gemm_generic)
{
    for (uint32_t p = p0; p < p1; p++)
        for (uint32_t r = r0; r < r1; r += MR)
            tile(l, r, r1 - r < MR ? r1 - r : MR, p);
}

/* ---- attention ---------------------------------------------------------------------------- */

static const uint16_t *kv_row(const struct cpu_attend *j, const uint8_t *base, uint32_t t,
                              uint32_t i)
{
    const uint8_t *page = base + j->blocks[t] * j->stride_block;
    return (const uint16_t *)(const void *)page + (size_t)i * j->dim;
}

/* One pair and one tile. */
static void attend_tile(const struct cpu_attend *j, uint32_t pair, uint32_t t,
                        const struct cpu_partial *p)
{
    const float *q = j->q + pair / j->group * j->ldq + (size_t)(pair % j->group) * j->dim;
    float *o = p->o + pair * p->ldo, s[CPU_TILE] = {0};
    uint32_t a, b;
    cpu_attend_sees(j, pair / j->group, t, &a, &b);
    for (uint32_t i = a; i < b; i++) {
        const uint16_t *k = kv_row(j, j->k, t, i);
        for (uint32_t d = 0; d < j->dim; d++)
            s[i] += q[d] * j->scale * device_bf16_to_f32(k[d]);
    }
    float shrink = cpu_softmax_tile(s, a, b, &p->m[pair], &p->l[pair]);
    for (uint32_t d = 0; d < j->dim; d++)
        o[d] *= shrink;
    for (uint32_t i = a; i < b; i++) {
        const uint16_t *v = kv_row(j, j->v, t, i);
        for (uint32_t d = 0; d < j->dim; d++)
            o[d] += s[i] * device_bf16_to_f32(v[d]);
    }
}

CPU_ATTEND(device_cpu_attend_generic)
{
    uint32_t pairs = j->rows * j->group;
    for (uint32_t i = 0; i < pairs; i++) {
        memset(p->o + i * p->ldo, 0, p->ldo * sizeof(float));
        p->m[i] = -INFINITY;
        p->l[i] = 0.0f;
        for (uint32_t t = t0; t < t1; t++)
            attend_tile(j, i, t, p);
    }
}

const struct cpu_kernels device_cpu_kernels_generic = {
    .isa = "scalar",
    .numerics = "cpu-scalar-1",
    .order = CPU_ORDER_OUTPUTS,
    .mr = MR,
    .gemv_rows = MR,
    .k_unit = 1,
    .row_block = 64,
    CPU_KERNELS_FILL(generic),
};
