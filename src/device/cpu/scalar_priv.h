/* SPDX-License-Identifier: Apache-2.0 */
/* cpu:ref: its objects (scalar.c), its verbs (scalar_verbs.c), those of the cache (scalar_attn.c).
 */
#ifndef DEVICE_CPU_SCALAR_PRIV_H
#define DEVICE_CPU_SCALAR_PRIV_H

#include "base/base.h"
#include "device/device_priv.h"

struct ref_device {
    struct device base;
    struct base_pool *pool; /* NULL until device_start */
};

/* Any tensor, dense row-major in float32: a vector is one row. */
struct ref_weight {
    struct device_weight base;
    char name[96];
    uint32_t rows, cols;
    float *data; /* [rows, cols] */
    size_t bytes;
};

struct ref_run {
    struct device_run base;
    struct base_pool *pool;
    struct base_arena *arena; /* the arrays of this run */
};

extern const struct device_verbs device_ref_verbs; /* scalar_verbs.c */

/* Note an error in the run unless it has one. */
void device_ref_fail(struct device_run *r, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* True where the run goes on and `a` has one row a batch row and `cols` columns. */
bool device_ref_shape(struct device_run *r, const char *verb, struct device_array a, uint64_t cols);

void device_ref_kv_append(struct device_run *r, uint32_t layer, struct device_array k,
                          struct device_array v);
void device_ref_attend(struct device_run *r, struct device_array o, struct device_array q,
                       const struct device_attn *a);

#endif
