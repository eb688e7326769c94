/* SPDX-License-Identifier: Apache-2.0 */
/* Qwen 3: technical report 2025 (arXiv 2505.09388, section 2): grouped queries, SwiGLU, rotation,
 * pre-norm RMSNorm, and a norm of every query and key head in place of the biases of Qwen 2.
 * Weights are named as in transformers' modeling_qwen3.py, whose order of operations this follows.
 *
 * Shapes: n rows, D hidden, H query heads, G key/value heads, d head size, F inner. H*d need not
 * be D. */
#include "model/model_priv.h"

int model_qwen3_forward(const void *ctx, struct device_run *r, struct baton_error *e)
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

    v->embed(r, x, w->embed_tokens, 1);

    for (uint32_t l = 0; l < c->n_layers; l++) {
        const struct model_layer *m = &w->layers[l];
        const struct device_attn attn = {.layer = l,
                                         .q_heads = c->q_heads,
                                         .kv_heads = c->kv_heads,
                                         .head_dim = c->head_dim,
                                         .scale = (float)c->attn_scale};

        /* Attention: x += Wo softmax(q k^T / sqrt(d)) v  (Vaswani et al. 2017, eq. 1) */
        v->norm(r, h, x, m->input_layernorm, eps, 0);       /* pre-norm, RMSNorm */
        v->linear(r, q, h, m->q_proj, m->q_bias);           /* [n, D] x [H*d, D]^T */
        v->linear(r, k, h, m->k_proj, m->k_bias);           /* [n, D] x [G*d, D]^T */
        v->linear(r, val, h, m->v_proj, m->v_bias);         /* [n, D] x [G*d, D]^T */
        v->head_norm(r, q, c->q_heads, m->q_norm, eps, 0);  /* QK-norm (2505.09388, 2), */
        v->head_norm(r, k, c->kv_heads, m->k_norm, eps, 0); /* before the rotation */
        v->rope(r, q, c->q_heads, &c->rope_global);         /* Su et al. 2021, eq. 34 */
        v->rope(r, k, c->kv_heads, &c->rope_global);
        v->kv_append(r, l, k, val); /* keys are kept rotated */
        v->layer_done(r, l);
        v->attend(r, o, q, &attn);                /* head j reads kv head j / (H/G) */
        v->linear(r, y, o, m->o_proj, m->o_bias); /* [n, H*d] x [D, H*d]^T */
        v->add(r, x, y);

        /* MLP: x += Wdown (silu(Wgate h) * Wup h)  (Shazeer 2020, eq. 6, SwiGLU) */
        v->norm(r, h, x, m->post_attention_layernorm, eps, 0); /* despite its name, pre-MLP */
        v->linear(r, gate, h, m->gate_proj, NULL);             /* [n, D] x [F, D]^T */
        v->linear(r, up, h, m->up_proj, NULL);                 /* [n, D] x [F, D]^T */
        v->gate(r, gate, gate, up, DEVICE_SILU);
        v->linear(r, y, gate, m->down_proj, NULL); /* [n, F] x [D, F]^T */
        v->add(r, x, y);
    }

    v->norm(r, h, x, w->norm, eps, 0);
    v->logits(r, v->select(r, h), w->lm_head); /* [n_logits, D] x [vocab, D]^T */
    return device_run_end(r, e);
}
