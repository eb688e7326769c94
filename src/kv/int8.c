/* SPDX-License-Identifier: Apache-2.0 */
/* int8 rows. A row of one head holds head_dim_padded signed bytes, then, at the next multiple of 4,
 * a float32 scale for each scale_block of them: element = byte * scale. A block is quantised
 * symmetrically, scale = largest magnitude / 127, each element rounded to nearest even. Declared
 * budget: half a scale an element, and what rounding the quotient adds, 2^-17 of one. Bytes of -128
 * are read and never written.
 */
#include <math.h>
#include <string.h>

#include "kv/kv_priv.h"

#define STEPS 127.0f

uint32_t kv_int8_row_bytes(uint32_t head_dim_padded, uint32_t scale_block)
{
    uint32_t scales = (head_dim_padded + scale_block - 1) / scale_block;
    return (head_dim_padded + 3u) / 4u * 4u + 4u * scales;
}

static size_t scale_at(const struct baton_kv_layout *l, uint32_t block)
{
    return (l->head_dim_padded + 3u) / 4u * 4u + 4u * (size_t)block;
}

static void widen_block(float *x, const uint8_t *row, const struct baton_kv_layout *l, uint32_t d,
                        uint32_t n)
{
    float scale;
    memcpy(&scale, row + scale_at(l, d / l->scale_block), sizeof scale);
    for (uint32_t i = 0; i < n; i++)
        x[i] = (float)(int8_t)row[d + i] * scale;
}

/* Infinity or NaN in a block cannot be told by a byte: its scale says it for all of them. */
static void narrow_block(uint8_t *row, const struct baton_kv_layout *l, const float *x, uint32_t d,
                         uint32_t n)
{
    float most = 0.0f;
    bool finite = true;
    for (uint32_t i = 0; i < n; i++) {
        finite &= isfinite(x[i]) != 0;
        most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
    }
    /* A normal number, so that the step is never zero, and one whose 127 steps do not overflow. */
    float scale = most > 0.0f ? fmaxf(most / STEPS, 0x1p-126f) : 0.0f;
    if (isinf(scale * STEPS))
        scale = nextafterf(scale, 0.0f);
    if (!finite)
        scale = NAN;
    for (uint32_t i = 0; i < n; i++) {
        float q = scale > 0.0f ? rintf(x[i] / scale) : 0.0f;
        row[d + i] = (uint8_t)(int8_t)fminf(fmaxf(q, -STEPS), STEPS);
    }
    memcpy(row + scale_at(l, d / l->scale_block), &scale, sizeof scale);
}

static uint32_t block_end(const struct baton_kv_layout *l, uint32_t d)
{
    uint32_t end = (d / l->scale_block + 1) * l->scale_block;
    return end < l->head_dim ? end : l->head_dim;
}

static void read_row(uint8_t *dst, const struct baton_kv_layout *dl, const uint8_t *src,
                     const struct baton_kv_layout *sl)
{
    float x[KV_INT8_MAX_BLOCK];
    for (uint32_t d = 0, end; d < sl->head_dim; d = end) {
        end = block_end(sl, d);
        widen_block(x, src, sl, d, end - d);
        kv_convert(dst + d * dl->stride_dim, dl->dtype, dl->stride_dim, (const uint8_t *)x,
                   BATON_F32, sizeof *x, end - d);
    }
}

/* The padding, its scales too, is zero. */
static void write_row(uint8_t *dst, const struct baton_kv_layout *dl, const uint8_t *src,
                      const struct baton_kv_layout *sl)
{
    float x[KV_INT8_MAX_BLOCK];
    memset(dst, 0, kv_int8_row_bytes(dl->head_dim_padded, dl->scale_block));
    for (uint32_t d = 0, end; d < dl->head_dim; d = end) {
        end = block_end(dl, d);
        if (sl->dtype == BATON_I8) /* other blocks of scales */
            for (uint32_t i = d; i < end; i++)
                widen_block(&x[i - d], src, sl, i, 1);
        else
            kv_convert((uint8_t *)x, BATON_F32, sizeof *x, src + d * sl->stride_dim, sl->dtype,
                       sl->stride_dim, end - d);
        narrow_block(dst, dl, x, d, end - d);
    }
}

/* The same bytes and the scales of the elements that mean something; the rest is zero. */
static void copy_row(uint8_t *dst, const struct baton_kv_layout *dl, const uint8_t *src,
                     const struct baton_kv_layout *sl)
{
    uint32_t scales = (dl->head_dim + dl->scale_block - 1) / dl->scale_block;
    memset(dst, 0, kv_int8_row_bytes(dl->head_dim_padded, dl->scale_block));
    memcpy(dst, src, dl->head_dim);
    memcpy(dst + scale_at(dl, 0), src + scale_at(sl, 0), 4 * (size_t)scales);
}

void kv_int8_copy_row(uint8_t *dst, const struct baton_kv_layout *dl, const uint8_t *src,
                      const struct baton_kv_layout *sl)
{
    if (dl->dtype != BATON_I8)
        read_row(dst, dl, src, sl);
    else if (sl->dtype == BATON_I8 && sl->scale_block == dl->scale_block)
        copy_row(dst, dl, src, sl);
    else
        write_row(dst, dl, src, sl);
}
