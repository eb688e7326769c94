/* SPDX-License-Identifier: Apache-2.0 */
/* How much a prefill must compute and a decode step must read: floors for benchmarks. */
#include "model/model_priv.h"

/* Elements of the matrices that every row passes. */
static double linear_elements(const struct model_config *c)
{
    double q = model_q_cols(c), kv = model_kv_cols(c);
    return (double)c->n_layers * c->hidden * (2 * q + 2 * kv + 3.0 * c->inner);
}

/* Sum over the queries 0 .. n-1 of the positions that each sees in a layer with this window. */
static double pairs(double n, double window)
{
    if (window == 0 || n <= window)
        return n * (n + 1) / 2;
    return window * (window + 1) / 2 + (n - window) * window;
}

double model_prefill_flops(const struct model_config *c, uint32_t n)
{
    double flops = 2.0 * n * linear_elements(c) + 2.0 * c->vocab * c->hidden;
    for (uint32_t l = 0; l < c->n_layers; l++)
        /* q.k and p*v: a multiplication and an addition each, for every dim of every query head */
        flops += 4.0 * model_q_cols(c) * pairs(n, c->local[l] ? c->window : 0);
    return flops;
}

double model_decode_bytes(const struct model_config *c, uint32_t n, double weight_bytes,
                          double kv_bytes)
{
    double bias = c->attn_bias ? model_q_cols(c) + 2.0 * model_kv_cols(c) + c->hidden : 0;
    double norms = 2.0 * c->hidden;
    if (c->family == MODEL_GEMMA3)
        norms += 2.0 * c->hidden;
    if (c->family != MODEL_LLAMA)
        norms += 2.0 * c->head_dim;
    /* The output matrix in full; of an embedding of its own only one row. */
    double weights = linear_elements(c) + c->n_layers * (norms + bias) + c->hidden +
                     (double)c->vocab * c->hidden + (c->tied ? 0 : c->hidden);
    double held = 0;
    for (uint32_t l = 0; l < c->n_layers; l++)
        held += c->local[l] && n > c->window ? c->window : n;
    return weights * weight_bytes + held * 2.0 * model_kv_cols(c) * kv_bytes;
}
