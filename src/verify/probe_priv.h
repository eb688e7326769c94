/* SPDX-License-Identifier: Apache-2.0 */
/* Inside verify: a device with a model on a bench, and everything that a prefill left. */
#ifndef VERIFY_PROBE_PRIV_H
#define VERIFY_PROBE_PRIV_H

#include "base/base.h"
#include "kv/kv.h"
#include "model/model.h"
#include "verify/probe.h"

#define VERIFY_LANES_MAX 8u

struct verify_bench {
    const struct model_config *config;
    struct device *device;
    struct model_bound *bound;
    struct device_program *program;
};
int verify_bench_open(struct verify_bench *b, const struct baton_model *m, const char *device,
                      uint32_t threads, struct baton_error *e);
void verify_bench_close(struct verify_bench *b); /* a zeroed or half-built one is fine */

/* Sequences in the lanes of a bench, each with a prompt of its own. */
struct verify_lanes {
    struct verify_bench *bench;
    struct kv_geometry geometry;
    struct kv_pool *pool;
    struct kv_seq *seq[VERIFY_LANES_MAX]; /* NULL = the lane is free */
    uint32_t n;
    bool kv_open;
};
int verify_lanes_open(struct verify_lanes *x, struct verify_bench *b, uint32_t n_lanes,
                      uint32_t positions, struct baton_error *e);
void verify_lanes_close(struct verify_lanes *x); /* a zeroed or half-built one is fine */
/* A prompt into a free lane; the last row of logits, [vocab]. */
int verify_lane_prefill(struct verify_lanes *x, uint32_t lane, const int32_t *ids, uint32_t n,
                        float *logits, struct baton_error *e);
void verify_lane_free(struct verify_lanes *x, uint32_t lane);
/* One token in each lane with a sequence: ids[lane], logits [n_lanes, vocab]. */
int verify_lanes_step(struct verify_lanes *x, const int32_t *ids, float *logits,
                      struct baton_error *e);
/* What the lane retains, into its host pages. first: [n_layers], filled. */
int verify_lane_fetch(struct verify_lanes *x, uint32_t lane, uint32_t *first,
                      struct baton_error *e);

/* K and V as float32, and the last row of logits. Layers hold all n positions, or those that are
 * retained where the device keeps no others. */
struct verify_yield {
    uint32_t n_layers, n, row, vocab;
    uint32_t *first; /* [n_layers] first position held */
    float *kv;       /* [n_layers][K, V][n][row] */
    float *logits;   /* [vocab] */
};
/* Room for n positions. */
int verify_yield_open(struct verify_yield *y, const struct verify_bench *b, uint32_t n,
                      struct baton_error *e);
/* The sequence of a lane; y->n is its length. */
int verify_yield_take(struct verify_yield *y, struct verify_lanes *x, uint32_t lane,
                      struct baton_error *e);
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

/* probe_lanes.c: the whole probe, on a device that has several lanes. */
int verify_probe_lanes(const struct baton_model *m, const char *device, uint32_t threads,
                       struct verify_finding *out, struct baton_error *e);

#endif
