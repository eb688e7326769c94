/* SPDX-License-Identifier: Apache-2.0 */
/* Inside verify: a device with a model on a bench, and everything that a prefill left. */
#ifndef VERIFY_PROBE_PRIV_H
#define VERIFY_PROBE_PRIV_H

#include "base/base.h"
#include "model/model.h"
#include "verify/probe.h"

struct verify_bench {
    const struct model_config *config;
    struct device *device;
    struct model_bound *bound;
    struct device_program *program;
};
int verify_bench_open(struct verify_bench *b, const struct baton_model *m, const char *device,
                      uint32_t threads, struct baton_error *e);
void verify_bench_close(struct verify_bench *b); /* a zeroed or half-built one is fine */

/* K and V of all layers and all n positions as float32, and the last row of logits. */
struct verify_yield {
    uint32_t n_layers, n, row, vocab;
    float *kv;     /* [n_layers][K, V][n][row] */
    float *logits; /* [vocab] */
};
int verify_bench_prefill(struct verify_bench *b, const int32_t *ids, uint32_t n,
                         struct verify_yield *out, struct baton_error *e);
void verify_yield_free(struct verify_yield *y); /* a zeroed one is fine */
const float *verify_yield_row(const struct verify_yield *y, uint32_t layer, uint32_t v,
                              uint32_t position);
/* Relative RMS of rows [first, first + n) of a slot of `have` against `want`. */
double verify_yield_differs(const struct verify_yield *have, const struct verify_yield *want,
                            uint32_t layer, uint32_t v, uint32_t first, uint32_t n);

/* The same n token ids for the same model, always; neighbours differ. */
int verify_probe_ids(const struct model_config *c, uint32_t n, int32_t **out,
                     struct baton_error *e);
/* Prefill ids on a device opened for it alone. */
int verify_probe_once(const struct baton_model *m, const char *device, uint32_t threads,
                      const int32_t *ids, uint32_t n, struct verify_yield *out,
                      struct baton_error *e);

#endif
