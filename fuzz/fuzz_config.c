/* SPDX-License-Identifier: Apache-2.0 */
/* config.json, and after a NUL byte generation_config.json. What is accepted must be finite and
 * inside the bounds that the rest of the program relies on. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model/model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool holds)
{
    if (!holds)
        abort();
}

static void check(const struct model_config *c)
{
    must(c->n_layers >= 1 && c->n_layers <= MODEL_MAX_LAYERS);
    must(c->hidden >= 1 && c->inner >= 1 && c->vocab >= 1 && c->max_positions >= 1);
    must(c->kv_heads >= 1 && c->q_heads % c->kv_heads == 0);
    must(c->head_dim >= 2 && c->head_dim <= 256 && c->head_dim % 2 == 0);
    must(isfinite(c->norm_eps) && isfinite(c->attn_scale) && isfinite(c->embed_scale));
    must(c->n_eos <= MODEL_MAX_EOS);
    for (uint32_t i = 0; i < c->n_eos; i++)
        must(c->eos[i] >= 0 && (uint32_t)c->eos[i] < c->vocab);
    for (uint32_t i = 0; i < c->head_dim / 2; i++)
        must(isfinite(c->rope_global.inv_freq[i]) && isfinite(c->rope_local.inv_freq[i]));
    for (uint32_t l = 0; l < c->n_layers; l++)
        must(!c->local[l] || (c->window > 0 && c->rope_local.head_dim == c->head_dim));
    must(isfinite(model_prefill_flops(c, c->max_positions)));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct baton_error e;
    struct model_config c;
    const uint8_t *zero = n ? memchr(data, 0, n) : NULL;
    size_t first = zero ? (size_t)(zero - data) : n;
    const char *second = zero ? (const char *)zero + 1 : NULL;
    if (model_config_parse((const char *)data, first, second, zero ? n - first - 1 : 0, &c, &e) ==
        0)
        check(&c);
    return 0;
}
