/* SPDX-License-Identifier: Apache-2.0 */
/* Who a model is, in the parts that the two ends of a handoff compare.
 *
 * Weights are known in one of two ways. *Content*: a hash of every tensor, equal for all copies of
 * the same weights; it costs reading them, so it is computed for checkpoints up to 64 MiB, where a
 * pin is given, and where the options ask for it. *Lineage*: 32 random bytes drawn when the model
 * was opened. A fork inherits them, so two processes that agree on them hold the very same memory,
 * which is the stronger statement; two processes that opened the same large folder apart from each
 * other differ, and must ask for content. Architecture and tokenizer follow the same way, so that
 * a mixture of the two is refused and never taken for agreement.
 */
#include <string.h>

#include "engine/engine_priv.h"

static void put_u64(struct base_sha256 *h, uint64_t x)
{
    uint8_t b[8];
    for (int i = 0; i < 8; i++)
        b[i] = (uint8_t)(x >> 8 * i);
    base_sha256_update(h, b, sizeof b);
}

static void put_f64(struct base_sha256 *h, double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    put_u64(h, bits);
}

static void put_rope(struct base_sha256 *h, const struct device_rope *r)
{
    put_u64(h, r->head_dim);
    for (uint32_t i = 0; i < r->head_dim / 2; i++)
        put_f64(h, r->inv_freq[i]);
}

/* What keys and values mean, given equal weights: rotation, window, scales and epsilon, and that
 * keys are stored after rotation. The dtype of the pages is not part of it: the layer table of the
 * offer states it, and the consumer converts. */
void engine_numerics(const struct model_config *c, uint8_t out[32])
{
    static const char tag[] = "baton numerics 1: keys after rotation, half order";
    struct base_sha256 h;
    base_sha256_init(&h);
    base_sha256_update(&h, tag, sizeof tag);
    put_u64(&h, c->family);
    put_f64(&h, c->norm_eps);
    put_f64(&h, c->attn_scale);
    put_f64(&h, c->embed_scale);
    put_rope(&h, &c->rope_global);
    put_u64(&h, c->window);
    if (c->window) {
        put_rope(&h, &c->rope_local);
        base_sha256_update(&h, c->local, c->n_layers);
    }
    base_sha256_final(&h, out);
}

static int check_pin(const char *pin, const uint8_t have[32], struct baton_error *e)
{
    static const char prefix[] = "sha256:";
    uint8_t want[32];
    char hex[65];
    if (strncmp(pin, prefix, sizeof prefix - 1) || strlen(pin) != sizeof prefix - 1 + 64 ||
        !base_unhex(pin + sizeof prefix - 1, want, sizeof want))
        return base_fail(e, BATON_ERR_USAGE, "pin '%.80s' is not sha256: and 64 hex digits", pin);
    base_hex(have, 32, hex);
    if (memcmp(want, have, sizeof want))
        return base_fail(e, BATON_ERR_MISMATCH, "the model's files have pin sha256:%s, not %s", hex,
                         pin);
    return 0;
}

static void tell_progress(void *ctx, uint64_t done, uint64_t all)
{
    const struct baton_model_options *o = ctx;
    o->progress(o->ctx, "hash", done, all);
}

static int content(struct baton_model *m, struct baton_error *e)
{
    struct model_identity id;
    struct baton_model_options *o = &m->options;
    int rc = model_hash(m->model, o->threads, false, o->progress ? tell_progress : NULL, o, &id, e);
    if (rc)
        return rc;
    memcpy(m->identity.arch, id.arch, 32);
    memcpy(m->identity.weights, id.weights, 32);
    memcpy(m->identity.tokenizer, id.tokenizer, 32);
    m->content = true;
    return o->pin ? check_pin(o->pin, id.pin, e) : 0;
}

/* The sizes that make an architecture, for a lineage: nothing reads the files. */
static void architecture(const struct model_config *c, uint8_t out[32])
{
    static const char tag[] = "baton lineage 1: architecture";
    const uint32_t sizes[] = {c->n_layers, c->hidden,   c->inner, c->vocab,     c->q_heads,
                              c->kv_heads, c->head_dim, c->tied,  c->attn_bias, c->act};
    struct base_sha256 h;
    base_sha256_init(&h);
    base_sha256_update(&h, tag, sizeof tag);
    base_sha256_update(&h, c->arch, strnlen(c->arch, sizeof c->arch));
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        put_u64(&h, sizes[i]);
    base_sha256_final(&h, out);
}

static int lineage(struct baton_model *m, struct baton_error *e)
{
    architecture(model_config_of(m->model), m->identity.arch);
    return base_random(m->identity.weights, 32, e);
}

void engine_fingerprint(const struct baton_model *m, char hex[65])
{
    hex[0] = '\0';
    if (m->content)
        base_hex(m->identity.weights, 32, hex);
}

int engine_identity_fill(struct baton_model *m, struct baton_error *e)
{
    engine_numerics(model_config_of(m->model), m->identity.numerics);
    if (m->options.pin && model_is_shape(m->model))
        return base_fail(e, BATON_ERR_USAGE, "random weights of a shape have no files to pin");
    if (m->options.pin || m->options.content_identity ||
        (model_weight_bytes(m->model) <= ENGINE_CONTENT_BYTES && !model_is_shape(m->model)))
        return content(m, e);
    return lineage(m, e);
}
