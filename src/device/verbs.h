/* SPDX-License-Identifier: Apache-2.0 */
/* Verb level: the coarse operations of which a family's forward function is written.
 *
 * Private to device and model; it may change from week to week, which the program level
 * (baton/device.h) may not. A dynamic device (cpu, cuda) executes a verb when it is called; the
 * recorder writes it down as a plan.
 *
 * Arrays are row-major float32 [rows, cols] in the device's own memory; rows is the number of rows
 * of the batch unless a verb says otherwise. Verbs of one run execute in the order of the calls. A
 * verb that fails notes the first error in the run and turns the following verbs into no-ops, so a
 * forward function checks nothing and ends with `return device_run_end(r, e)`.
 */
#ifndef DEVICE_VERBS_H
#define DEVICE_VERBS_H

#include <baton/device.h>

struct device;
struct device_run;    /* one submission under way: verbs, batch, scratch, first error */
struct device_weight; /* a matrix, vector or table in the order that the device wants */

struct device_array {
    void *data; /* meaning: the device's (cpu: float *) */
    uint32_t rows, cols;
};

enum device_act {
    DEVICE_SILU = 1,      /* x / (1 + exp(-x)) */
    DEVICE_GELU_TANH = 2, /* 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) */
};

/* Rotation angles: angle(p, i) = (float)p * inv_freq[i] in float32, as Hugging Face computes it;
 * sine and cosine are taken of that float. Pair (i, i + head_dim/2) rotates ("half" order). */
struct device_rope {
    uint32_t head_dim;
    float inv_freq[128]; /* [head_dim/2] */
};

/* What an attention verb needs besides the cache view of its span. */
struct device_attn {
    uint32_t layer;
    uint32_t q_heads, kv_heads, head_dim;
    float scale;     /* q.k is multiplied by it */
    uint32_t window; /* 0 = global; else a query at p sees [max(0, p-window+1), p] */
};

struct device_verbs {
    /* A scratch array [rows of the batch, cols] that lives until the run ends. */
    struct device_array (*array)(struct device_run *r, uint32_t cols);
    /* y[i,:] = table[ids[i],:] * scale. table: [vocab, cols]. */
    void (*embed)(struct device_run *r, struct device_array y, const struct device_weight *table,
                  float scale);
    /* RMSNorm over a row: y = x / sqrt(mean(x^2) + eps) * (offset + w). y may be x. */
    void (*norm)(struct device_run *r, struct device_array y, struct device_array x,
                 const struct device_weight *w, float eps, float offset);
    /* y = x w^T + b: x [rows, k], w [m, k], b [m] or NULL, y [rows, m]. y is not x. */
    void (*linear)(struct device_run *r, struct device_array y, struct device_array x,
                   const struct device_weight *w, const struct device_weight *b);
    /* RMSNorm of every head of a row, in place: x [rows, heads*head_dim], w [head_dim]. */
    void (*head_norm)(struct device_run *r, struct device_array x, uint32_t heads,
                      const struct device_weight *w, float eps, float offset);
    /* Rotate every head of a row by its position, in place. */
    void (*rope)(struct device_run *r, struct device_array x, uint32_t heads,
                 const struct device_rope *rope);
    /* Store k and v [rows, kv_heads*head_dim] at the rows' positions in `layer` of their spans. */
    void (*kv_append)(struct device_run *r, uint32_t layer, struct device_array k,
                      struct device_array v);
    /* o = softmax(scale q k^T) v over the cache, causal, window respected; q, o:
     * [rows, q_heads*head_dim]. The rows' own K and V have been appended before. */
    void (*attend)(struct device_run *r, struct device_array o, struct device_array q,
                   const struct device_attn *a);
    /* x += y. */
    void (*add)(struct device_run *r, struct device_array x, struct device_array y);
    /* y = act(gate) * up. y may be gate. */
    void (*gate)(struct device_run *r, struct device_array y, struct device_array gate,
                 struct device_array up, enum device_act act);
    /* K and V of `layer` are complete for all rows: tells the batch's owner. */
    void (*layer_done)(struct device_run *r, uint32_t layer);
    /* y = the rows of x whose logits are wanted: an array of [n_logits, cols]. */
    struct device_array (*select)(struct device_run *r, struct device_array x);
    /* Write x w^T into the batch's logits: x [n_logits, k], w [vocab, k]. */
    void (*logits)(struct device_run *r, struct device_array x, const struct device_weight *w);
};

/* The verbs of a run and the batch's rows: all that a forward function needs of it. */
const struct device_verbs *device_run_verbs(const struct device_run *r);
/* The first error of the run, or 0. */
int device_run_end(struct device_run *r, struct baton_error *e);

/* A program in its in-process form: the family's forward function and its bound weights. */
struct device_graph {
    int (*forward)(const void *ctx, struct device_run *r, struct baton_error *e);
    const void *ctx;
    uint32_t n_layers, vocab;
    /* Widest arrays, so that a device can size its scratch: sum of cols of all arrays that one
     * forward asks for, and the widest activation that enters a linear. */
    uint32_t scratch_cols, max_cols;
    const uint8_t *checkpoint; /* [32] hash of the weights, for a device that asked; NULL else */
};

#endif
