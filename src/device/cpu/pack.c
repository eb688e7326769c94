/* SPDX-License-Identifier: Apache-2.0 */
/* cpu: weights in the order of the kernels.
 *
 * A matrix becomes bf16 panels of 16 outputs, so that one row of activations meets the weights as
 * consecutive memory; outputs and k are padded with zeros. A tied table is the same memory: reading
 * one embedding gathers its column of a panel. Matrices lie in shared huge pages, so that a process
 * that forks later does not copy them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/cpu/cpu_priv.h"

/* ---- order -------------------------------------------------------------------------------- */

/* Element (row, k) in a packed matrix. */
static size_t packed_at(enum cpu_order order, uint32_t row, uint32_t k, uint32_t k_padded)
{
    size_t panel = (size_t)(row / CPU_PANEL) * k_padded * CPU_PANEL;
    uint32_t j = row % CPU_PANEL;
    if (order == CPU_ORDER_OUTPUTS)
        return panel + (size_t)k * CPU_PANEL + 2 * (j % 8) + j / 8;
    return panel + (size_t)(k / 2) * 2 * CPU_PANEL + 2 * j + k % 2;
}

/* One panel: word by word in the order of memory, reading 16 rows side by side. */
static void pack_panel(uint32_t *dst, const uint16_t *const src[CPU_PANEL], uint32_t cols,
                       uint32_t k_padded, enum cpu_order order)
{
    if (order == CPU_ORDER_OUTPUTS) {
        for (uint32_t k = 0; k < cols; k++, dst += CPU_PANEL / 2)
            for (uint32_t j = 0; j < CPU_PANEL / 2; j++)
                dst[j] = src[j][k] | (uint32_t)src[j + CPU_PANEL / 2][k] << 16;
        memset(dst, 0, (size_t)(k_padded - cols) * CPU_PANEL * sizeof(uint16_t));
        return;
    }
    for (uint32_t k = 0; k < k_padded; k += 2, dst += CPU_PANEL)
        for (uint32_t j = 0; j < CPU_PANEL; j++)
            dst[j] = src[j][k] | (k + 1 < cols ? (uint32_t)src[j][k + 1] << 16 : 0);
}

/* ---- conversion --------------------------------------------------------------------------- */

static void to_bf16(uint16_t *out, const struct baton_tensor *t, uint64_t row)
{
    const uint8_t *p = (const uint8_t *)t->data + (int64_t)row * t->stride[0];
    int64_t stride = t->stride[1];
    for (uint64_t k = 0; k < t->shape[1]; k++, p += stride) {
        uint16_t h;
        float f;
        memcpy(&h, p, sizeof h);
        if (t->dtype == BATON_F32) {
            memcpy(&f, p, sizeof f);
            h = device_f32_to_bf16(f);
        } else if (t->dtype == BATON_F16) {
            h = device_f32_to_bf16(device_f16_to_f32(h));
        }
        out[k] = h;
    }
}

static void to_f32(float *out, const struct baton_tensor *t)
{
    const uint8_t *p = t->data;
    for (uint64_t k = 0; k < t->shape[0]; k++, p += t->stride[0]) {
        uint16_t h;
        memcpy(&h, p, sizeof h);
        if (t->dtype == BATON_F32)
            memcpy(&out[k], p, sizeof out[k]);
        else
            out[k] = t->dtype == BATON_F16 ? device_f16_to_f32(h) : device_bf16_to_f32(h);
    }
}

/* ---- weights ------------------------------------------------------------------------------ */

static int bind_vector(struct cpu_weight *w, const struct baton_tensor *t, struct baton_error *e)
{
    size_t n = ((size_t)w->cols + CPU_PANEL - 1) / CPU_PANEL * CPU_PANEL;
    w->bytes = n * sizeof(float);
    w->vector = base_try_alloc(n, sizeof(float), e);
    if (!w->vector)
        return BATON_ERR_NOMEM;
    to_f32(w->vector, t);
    return 0;
}

static int bind_table(struct cpu_weight *w, const struct baton_tensor *t, struct baton_error *e)
{
    w->bytes = (size_t)w->rows * w->cols * sizeof(uint16_t);
    w->table = base_map_alloc(w->bytes, true, e);
    if (!w->table)
        return BATON_ERR_NOMEM;
    for (uint32_t i = 0; i < w->rows; i++)
        to_bf16(w->table + (size_t)i * w->cols, t, i);
    return 0;
}

/* Row `row` as bf16: where it lies, or converted into `buf`. */
static const uint16_t *bf16_row(const struct baton_tensor *t, uint64_t row, uint16_t *buf)
{
    const uint8_t *p = (const uint8_t *)t->data + (int64_t)row * t->stride[0];
    if (t->dtype == BATON_BF16 && t->stride[1] == 2 && (uintptr_t)p % 2 == 0)
        return (const uint16_t *)(const void *)p;
    to_bf16(buf, t, row);
    return buf;
}

static int bind_matrix(struct cpu_weight *w, const struct baton_tensor *t, enum cpu_order order,
                       struct baton_error *e)
{
    size_t panels = ((size_t)w->rows + CPU_PANEL - 1) / CPU_PANEL;
    /* 16 rows of the source as bf16, and a row of zeros for rows that do not exist */
    uint16_t *buf = base_try_alloc(CPU_PANEL + 1, w->cols * sizeof *buf, e);
    if (!buf)
        return BATON_ERR_NOMEM;
    w->bytes = panels * w->k * CPU_PANEL * sizeof(uint16_t);
    w->packed = base_map_alloc(w->bytes, true, e);
    for (size_t p = 0; p < panels && w->packed; p++) {
        const uint16_t *from[CPU_PANEL];
        for (uint32_t j = 0; j < CPU_PANEL; j++) {
            uint64_t row = p * CPU_PANEL + j;
            from[j] = row < w->rows ? bf16_row(t, row, buf + (size_t)j * w->cols)
                                    : buf + (size_t)CPU_PANEL * w->cols;
        }
        pack_panel((uint32_t *)(void *)(w->packed + p * w->k * CPU_PANEL), from, w->cols, w->k,
                   order);
    }
    free(buf);
    return w->packed ? 0 : BATON_ERR_NOMEM;
}

int device_cpu_weight_bind(struct device *d, const struct baton_tensor *t, unsigned kind,
                           struct device_weight **out, struct baton_error *e)
{
    const struct cpu_kernels *kernels = ((struct cpu_device *)d)->kernels;
    struct cpu_weight *w = base_try_alloc(1, sizeof *w, e);
    int rc;
    if (!w)
        return BATON_ERR_NOMEM;
    w->base.impl = &device_cpu;
    snprintf(w->name, sizeof w->name, "%s", t->name);
    w->kind = kind;
    w->rows = t->n_dims == 1 ? 1 : (uint32_t)t->shape[0];
    w->cols = (uint32_t)t->shape[t->n_dims - 1];
    w->k = (w->cols + kernels->k_unit - 1) / kernels->k_unit * kernels->k_unit;
    if (kind == DEVICE_VECTOR)
        rc = bind_vector(w, t, e);
    else if (kind == DEVICE_TABLE)
        rc = bind_table(w, t, e);
    else
        rc = bind_matrix(w, t, kernels->order, e);
    if (rc)
        device_cpu_weight_close(d, &w->base);
    else
        *out = &w->base;
    return rc;
}

void device_cpu_weight_close(struct device *d, struct device_weight *base)
{
    struct cpu_weight *w = (struct cpu_weight *)base;
    base_map_free(w->packed, w->bytes);
    base_map_free(w->table, w->bytes);
    free(w->vector);
    free(w);
}

uint64_t device_cpu_weight_bytes(const struct device_weight *w)
{
    return ((const struct cpu_weight *)w)->bytes;
}

void device_cpu_weight_row(const struct cpu_weight *w, enum cpu_order order, uint32_t row,
                           float *out)
{
    for (uint32_t k = 0; k < w->cols; k++)
        out[k] = device_bf16_to_f32(w->table ? w->table[(size_t)row * w->cols + k]
                                             : w->packed[packed_at(order, row, k, w->k)]);
}
