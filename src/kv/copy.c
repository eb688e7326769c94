/* SPDX-License-Identifier: Apache-2.0 */
/* Conversion between any two layouts: runs of positions, then heads, then rows. */
#include <string.h>

#include "kv/kv_priv.h"

/* Rows of one head lie one after the other without gaps. */
static bool rows_dense(const struct baton_kv_layout *l)
{
    int64_t bytes = (int64_t)kv_dtype_bytes(l->dtype);
    return l->stride_dim == bytes && l->stride_position == bytes * l->head_dim &&
           l->head_dim_padded == l->head_dim;
}

/* Elements past head_dim are stored, so a device may multiply them: they are made zero. */
static void pad_row(uint8_t *row, const struct baton_kv_layout *l)
{
    size_t bytes = kv_dtype_bytes(l->dtype);
    for (uint32_t d = l->head_dim; d < l->head_dim_padded; d++)
        memset(row + d * l->stride_dim, 0, bytes);
}

void kv_copy_rows(uint8_t *dst, const struct baton_kv_layout *dl, const uint8_t *src,
                  const struct baton_kv_layout *sl, uint32_t n)
{
    if (dl->dtype == sl->dtype && dl->dtype != BATON_I8 && rows_dense(dl) && rows_dense(sl)) {
        memcpy(dst, src, n * (size_t)dl->stride_position);
        return;
    }
    for (uint32_t p = 0; p < n; p++) {
        uint8_t *row = dst + p * dl->stride_position;
        if (dl->dtype == BATON_I8 || sl->dtype == BATON_I8) {
            kv_int8_copy_row(row, dl, src + p * sl->stride_position, sl);
            if (dl->dtype != BATON_I8)
                pad_row(row, dl);
            continue;
        }
        kv_convert(row, dl->dtype, dl->stride_dim, src + p * sl->stride_position, sl->dtype,
                   sl->stride_dim, dl->head_dim);
        if (dl->head_dim_padded > dl->head_dim)
            pad_row(row, dl);
    }
}

int kv_copy_check(const struct baton_kv_view *dst, const struct baton_kv_view *src,
                  enum kv_which which, uint32_t first, uint32_t n, struct baton_error *e)
{
    const struct baton_kv_layout *dl = dst->layout, *sl = src->layout;
    int rc;
    if ((rc = kv_layout_check(dl, e)) || (rc = kv_layout_check(sl, e)))
        return rc;
    if (dl->kv_heads != sl->kv_heads || dl->head_dim != sl->head_dim)
        return base_fail(e, BATON_ERR_MISMATCH, "KV copy: %u heads of %u into %u heads of %u",
                         sl->kv_heads, sl->head_dim, dl->kv_heads, dl->head_dim);
    rc = kv_view_check(dst, which, first, n, true, e);
    return rc ? rc : kv_view_check(src, which, first, n, false, e);
}

int kv_copy(const struct baton_kv_view *dst, const struct baton_kv_view *src, enum kv_which which,
            uint32_t first, uint32_t n, struct baton_error *e)
{
    const struct baton_kv_layout *dl = dst->layout, *sl = src->layout;
    int rc = kv_copy_check(dst, src, which, first, n, e);
    if (rc)
        return rc;
    while (n > 0) {
        uint32_t run, src_run;
        uint8_t *d = kv_view_run(dst, which, first, n, &run);
        const uint8_t *s = kv_view_run(src, which, first, run, &src_run);
        for (uint32_t h = 0; h < dl->kv_heads; h++)
            kv_copy_rows(d + h * dl->stride_head, dl, s + h * sl->stride_head, sl, src_run);
        first += src_run;
        n -= src_run;
    }
    return 0;
}
