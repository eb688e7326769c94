/* SPDX-License-Identifier: Apache-2.0 */
/* Prefix reuse: what a prompt begins with need not be computed again.
 *
 * A page stands for whatever computes the same bits anew. On a device that is row invariant that is
 * every page, of prompts and of steps alike, wherever the chunks began. On any other it is a page
 * of a whole chunk of the grid that every prefill here follows from position 0; hits are multiples
 * of that grid, so that the chunks behind one are those that there would have been without it.
 *
 * Not reused: where KV lies in a device's lanes, or prompts are computed whole. Nor at a producer
 * whose device mirrors the pool: it reads pages back to the host while others that have them are
 * being sent.
 */
#include <stdio.h>
#include <string.h>

#include "engine/engine_priv.h"

static uint32_t gcd(uint32_t a, uint32_t b)
{
    while (b) {
        uint32_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* Positions of whole pages and whole chunks. */
static uint32_t grain(const struct baton_engine *en, const struct baton_caps *caps)
{
    bool shared = caps->host_kv || en->role != BATON_PRODUCER;
    if (!caps->prefill || caps->whole_prompt || caps->lane_kv || !shared)
        return 0;
    if (caps->row_invariant && caps->dynamic)
        return KV_BLOCK;
    uint64_t both = (uint64_t)KV_BLOCK / gcd(KV_BLOCK, en->chunk) * en->chunk;
    return both <= en->ctx ? (uint32_t)both : 0;
}

/* Everything that a page's numbers depend on besides the ids. */
static void origin(const struct baton_engine *en, const char *numerics, uint8_t out[32])
{
    const struct handoff_identity *id = &en->model->identity;
    struct base_sha256 h;
    char tag[96 + 64];
    int n = snprintf(tag, sizeof tag, "baton prefix 1: kv %u, computed by %s", en->geometry.dtype,
                     numerics);
    base_sha256_init(&h);
    base_sha256_update(&h, id->arch, 32);
    base_sha256_update(&h, id->weights, 32);
    base_sha256_update(&h, id->numerics, 32);
    base_sha256_update(&h, id->tokenizer, 32);
    base_sha256_update(&h, tag, (size_t)n);
    base_sha256_final(&h, out);
}

int engine_reuse_open(struct baton_engine *en, struct baton_error *e)
{
    const struct baton_caps *caps = device_caps(en->binding->device);
    en->prefix_grain = grain(en, caps);
    en->prefix_steps = en->prefix_grain && caps->row_invariant;
    origin(en, caps->numerics, en->prefix_origin);
    return kv_prefix_open(en->pool, &en->prefix, e);
}

/* One sequence, one origin: what was imported, or loaded from a file, was computed elsewhere. */
static bool computed_here(const struct baton_engine *en, const struct engine_session *s)
{
    return en->prefix && en->prefix_grain && !s->committed && !s->request->ask.kv_load;
}

void engine_reuse_take(struct baton_engine *en, struct engine_session *s)
{
    const struct engine_ask *a = &s->request->ask;
    if (!computed_here(en, s))
        return;
    s->done = s->stats.cached_tokens = kv_prefix_take(en->prefix, s->seq, en->prefix_origin, a->ids,
                                                      a->n_ids - 1, en->prefix_grain);
}

void engine_reuse_put(struct baton_engine *en, struct engine_session *s)
{
    uint32_t n = computed_here(en, s) ? kv_seq_length(s->seq) : 0;
    if (en->prefix_grain > KV_BLOCK)
        n = n / en->prefix_grain * en->prefix_grain;
    if (n)
        kv_prefix_put(en->prefix, s->seq, en->prefix_origin, s->context, n);
}

void engine_reuse_count(struct baton_engine *en, const struct engine_session *s)
{
    if (!computed_here(en, s))
        return;
    atomic_fetch_add(&en->prefix_queries, s->request->ask.n_ids);
    atomic_fetch_add(&en->prefix_hits, s->stats.cached_tokens);
}
