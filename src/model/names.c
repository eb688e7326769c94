/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of each family: canonical names, shapes, and where the forward function finds them.
 * One table says all of it; loading, random weights, hashes and binding walk what it makes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/model_priv.h"

enum dim { D_NONE, D_HIDDEN, D_Q, D_KV, D_HEAD, D_INNER, D_VOCAB };

#define OF_LLAMA 1u
#define OF_QWEN3 2u
#define OF_GEMMA3 4u
#define OF_ALL 7u

enum when { ALWAYS, WITH_BIAS, UNTIED };

struct want {
    const char *name;
    size_t slot;
    unsigned families;
    enum when when;
    unsigned kind;
    bool norm;
    enum dim rows, cols; /* cols D_NONE: a vector */
};

#define LAYER(field) offsetof(struct model_layer, field)
#define MODEL(field) offsetof(struct model_weights, field)
#define QK_NORM (OF_QWEN3 | OF_GEMMA3)

static const struct want of_model[] = {
    {"model.embed_tokens.weight", MODEL(embed_tokens), OF_ALL, ALWAYS, DEVICE_TABLE, false, D_VOCAB,
     D_HIDDEN},
    {"model.norm.weight", MODEL(norm), OF_ALL, ALWAYS, DEVICE_VECTOR, true, D_HIDDEN, D_NONE},
    {"lm_head.weight", MODEL(lm_head), OF_ALL, UNTIED, DEVICE_MATRIX, false, D_VOCAB, D_HIDDEN},
};

static const struct want of_layer[] = {
    {"input_layernorm.weight", LAYER(input_layernorm), OF_ALL, ALWAYS, DEVICE_VECTOR, true,
     D_HIDDEN, D_NONE},
    {"self_attn.q_proj.weight", LAYER(q_proj), OF_ALL, ALWAYS, DEVICE_MATRIX, false, D_Q, D_HIDDEN},
    {"self_attn.k_proj.weight", LAYER(k_proj), OF_ALL, ALWAYS, DEVICE_MATRIX, false, D_KV,
     D_HIDDEN},
    {"self_attn.v_proj.weight", LAYER(v_proj), OF_ALL, ALWAYS, DEVICE_MATRIX, false, D_KV,
     D_HIDDEN},
    {"self_attn.o_proj.weight", LAYER(o_proj), OF_ALL, ALWAYS, DEVICE_MATRIX, false, D_HIDDEN, D_Q},
    {"self_attn.q_proj.bias", LAYER(q_bias), OF_ALL, WITH_BIAS, DEVICE_VECTOR, false, D_Q, D_NONE},
    {"self_attn.k_proj.bias", LAYER(k_bias), OF_ALL, WITH_BIAS, DEVICE_VECTOR, false, D_KV, D_NONE},
    {"self_attn.v_proj.bias", LAYER(v_bias), OF_ALL, WITH_BIAS, DEVICE_VECTOR, false, D_KV, D_NONE},
    {"self_attn.o_proj.bias", LAYER(o_bias), OF_ALL, WITH_BIAS, DEVICE_VECTOR, false, D_HIDDEN,
     D_NONE},
    {"self_attn.q_norm.weight", LAYER(q_norm), QK_NORM, ALWAYS, DEVICE_VECTOR, true, D_HEAD,
     D_NONE},
    {"self_attn.k_norm.weight", LAYER(k_norm), QK_NORM, ALWAYS, DEVICE_VECTOR, true, D_HEAD,
     D_NONE},
    {"post_attention_layernorm.weight", LAYER(post_attention_layernorm), OF_ALL, ALWAYS,
     DEVICE_VECTOR, true, D_HIDDEN, D_NONE},
    {"pre_feedforward_layernorm.weight", LAYER(pre_feedforward_layernorm), OF_GEMMA3, ALWAYS,
     DEVICE_VECTOR, true, D_HIDDEN, D_NONE},
    {"mlp.gate_proj.weight", LAYER(gate_proj), OF_ALL, ALWAYS, DEVICE_MATRIX, false, D_INNER,
     D_HIDDEN},
    {"mlp.up_proj.weight", LAYER(up_proj), OF_ALL, ALWAYS, DEVICE_MATRIX, false, D_INNER, D_HIDDEN},
    {"mlp.down_proj.weight", LAYER(down_proj), OF_ALL, ALWAYS, DEVICE_MATRIX, false, D_HIDDEN,
     D_INNER},
    {"post_feedforward_layernorm.weight", LAYER(post_feedforward_layernorm), OF_GEMMA3, ALWAYS,
     DEVICE_VECTOR, true, D_HIDDEN, D_NONE},
};
#define COUNT(a) (sizeof(a) / sizeof *(a))

static uint64_t size_of(const struct model_config *c, enum dim d)
{
    switch (d) {
    case D_HIDDEN:
        return c->hidden;
    case D_Q:
        return model_q_cols(c);
    case D_KV:
        return model_kv_cols(c);
    case D_HEAD:
        return c->head_dim;
    case D_INNER:
        return c->inner;
    case D_VOCAB:
        return c->vocab;
    case D_NONE:
        break;
    }
    return 1;
}

static bool wanted(const struct model_config *c, const struct want *w)
{
    unsigned family = c->family == MODEL_LLAMA   ? OF_LLAMA
                      : c->family == MODEL_QWEN3 ? OF_QWEN3
                                                 : OF_GEMMA3;
    if (!(w->families & family))
        return false;
    return w->when == ALWAYS || (w->when == WITH_BIAS ? c->attn_bias : !c->tied);
}

static void fill(struct model_entry *x, const struct model_config *c, const struct want *w,
                 uint32_t layer)
{
    if (layer == MODEL_NO_LAYER)
        snprintf(x->name, sizeof x->name, "%s", w->name);
    else
        snprintf(x->name, sizeof x->name, "model.layers.%u.%s", layer, w->name);
    x->layer = layer;
    x->slot = w->slot;
    x->kind = w->kind;
    /* A tied embedding is read both row by row and as the output matrix. */
    if (w->kind == DEVICE_TABLE && c->tied)
        x->kind |= DEVICE_MATRIX;
    x->norm = w->norm;
    x->n_dims = w->cols == D_NONE ? 1 : 2;
    x->shape[0] = size_of(c, w->rows);
    x->shape[1] = size_of(c, w->cols);
    x->n_elements = x->shape[0] * x->shape[1];
}

static int by_name(const void *a, const void *b)
{
    const struct model_entry *x = a, *y = b;
    return strcmp(x->name, y->name);
}

int model_entries_make(const struct model_config *c, struct model_entry **out, size_t *n,
                       struct baton_error *e)
{
    size_t count = 0;
    struct model_entry *list = base_try_alloc(COUNT(of_model) + c->n_layers * COUNT(of_layer),
                                              sizeof *list, e);
    if (!list)
        return BATON_ERR_NOMEM;
    for (size_t i = 0; i < COUNT(of_model); i++)
        if (wanted(c, &of_model[i]))
            fill(&list[count++], c, &of_model[i], MODEL_NO_LAYER);
    for (uint32_t l = 0; l < c->n_layers; l++)
        for (size_t i = 0; i < COUNT(of_layer); i++)
            if (wanted(c, &of_layer[i]))
                fill(&list[count++], c, &of_layer[i], l);
    qsort(list, count, sizeof *list, by_name);
    *out = list;
    *n = count;
    return 0;
}
