/* SPDX-License-Identifier: Apache-2.0 */
/* Gemma 3, text: technical report 2025 (arXiv 2503.19786, section 2), on Gemma 2 (arXiv
 * 2408.00118, section 2). Weights are named as in transformers' modeling_gemma3.py, whose order of
 * operations this follows.
 *
 * What sets it apart: a norm multiplies by (1 + w); each block is normed before and after, the
 * second norm inside the residual branch; embeddings are scaled by sqrt(D), in float32; local and
 * global layers, each kind with its own rotation; GELU gating.
 *
 * Shapes: n rows, D hidden, H query heads, G key/value heads, d head size, F inner. */
#include "model/model_priv.h"

int model_gemma3_forward(const void *ctx, struct device_run *r, struct baton_error *e)
{
    const struct model_weights *w = ctx;
    const struct model_config *c = w->config;
    const struct device_verbs *v = device_run_verbs(r);
    const float eps = (float)c->norm_eps;

    struct device_array x = v->array(r, c->hidden);          /* [n, D] residual stream */
    struct device_array h = v->array(r, c->hidden);          /* [n, D] a norm's output */
    struct device_array y = v->array(r, c->hidden);          /* [n, D] a block's output */
    struct device_array q = v->array(r, model_q_cols(c));    /* [n, H*d] */
    struct device_array k = v->array(r, model_kv_cols(c));   /* [n, G*d] */
    struct device_array val = v->array(r, model_kv_cols(c)); /* [n, G*d] */
    struct device_array o = v->array(r, model_q_cols(c));    /* [n, H*d] */
    struct device_array gate = v->array(r, c->inner);        /* [n, F] */
    struct device_array up = v->array(r, c->inner);          /* [n, F] */

    v->embed(r, x, w->embed_tokens, (float)c->embed_scale); /* times sqrt(D), not rounded to bf16 */

    for (uint32_t l = 0; l < c->n_layers; l++) {
        const struct model_layer *m = &w->layers[l];
        /* Five local layers to one global (2503.19786, 2.1); theta 10k local, 1M global. */
        const struct device_rope *rope = c->local[l] ? &c->rope_local : &c->rope_global;
        const struct device_attn attn = {.layer = l,
                                         .q_heads = c->q_heads,
                                         .kv_heads = c->kv_heads,
                                         .head_dim = c->head_dim,
                                         .scale = (float)c->attn_scale,
                                         .window = c->local[l] ? c->window : 0};

        /* Attention: x += norm(Wo softmax(q k^T / sqrt(query_pre_attn_scalar)) v) */
        v->norm(r, h, x, m->input_layernorm, eps, 1);       /* pre-norm, (1 + w) */
        v->linear(r, q, h, m->q_proj, m->q_bias);           /* [n, D] x [H*d, D]^T */
        v->linear(r, k, h, m->k_proj, m->k_bias);           /* [n, D] x [G*d, D]^T */
        v->linear(r, val, h, m->v_proj, m->v_bias);         /* [n, D] x [G*d, D]^T */
        v->head_norm(r, q, c->q_heads, m->q_norm, eps, 1);  /* QK-norm in place of the soft cap */
        v->head_norm(r, k, c->kv_heads, m->k_norm, eps, 1); /* of Gemma 2 (2503.19786, 2.1) */
        v->rope(r, q, c->q_heads, rope);                    /* Su et al. 2021, eq. 34 */
        v->rope(r, k, c->kv_heads, rope);
        v->kv_append(r, l, k, val); /* keys are kept rotated */
        v->layer_done(r, l);
        v->attend(r, o, q, &attn);                             /* head j reads kv head j / (H/G) */
        v->linear(r, y, o, m->o_proj, m->o_bias);              /* [n, H*d] x [D, H*d]^T */
        v->norm(r, y, y, m->post_attention_layernorm, eps, 1); /* post-norm (2408.00118, 2) */
        v->add(r, x, y);

        /* MLP: x += norm(Wdown (gelu(Wgate h) * Wup h))  (Shazeer 2020, eq. 6, GeGLU) */
        v->norm(r, h, x, m->pre_feedforward_layernorm, eps, 1);
        v->linear(r, gate, h, m->gate_proj, NULL);    /* [n, D] x [F, D]^T */
        v->linear(r, up, h, m->up_proj, NULL);        /* [n, D] x [F, D]^T */
        v->gate(r, gate, gate, up, DEVICE_GELU_TANH); /* Hendrycks 2016, tanh form */
        v->linear(r, y, gate, m->down_proj, NULL);    /* [n, F] x [D, F]^T */
        v->norm(r, y, y, m->post_feedforward_layernorm, eps, 1);
        v->add(r, x, y);
    }

    v->norm(r, h, x, w->norm, eps, 1);
    v->logits(r, v->select(r, h), w->lm_head); /* [n_logits, D] x [vocab, D]^T; tied */
    return device_run_end(r, e);
}
