/* SPDX-License-Identifier: Apache-2.0 */
/* A look at a request's cache for the verify room, and the one fault that its tests plant. */
#include <string.h>

#include "engine/engine_priv.h"

void engine_observe(struct baton_engine *en, engine_observe_fn fn, void *ctx)
{
    en->observe = fn;
    en->observe_ctx = ctx;
}

void engine_plant_flip(struct baton_engine *en, const struct engine_flip *flip)
{
    en->flip_on = flip != NULL;
    if (flip)
        en->flip = *flip;
}

/* Fill the pages of a layer's retained positions with NaN. */
static void poison_layer(const struct kv_geometry *g, const struct baton_kv_view *v, uint32_t first,
                         uint32_t end)
{
    size_t bytes = kv_piece_bytes(g->dtype, g->kv_heads, g->head_dim, KV_BLOCK);
    for (uint32_t b = first / KV_BLOCK; first < end && b <= (end - 1) / KV_BLOCK; b++)
        if (b < v->n_blocks && v->blocks[b] >= 0) {
            memset(v->k + v->blocks[b] * v->layout->stride_block, 0xFF, bytes);
            memset(v->v + v->blocks[b] * v->layout->stride_block, 0xFF, bytes);
        }
}

/* Pages of the device's own are read back into host pages that no longer hold what was copied
 * to it, so that a copy that does nothing cannot pass for one. */
static int read_back(struct baton_engine *en, struct engine_session *s, struct baton_error *e)
{
    const struct baton_kv_view *views = kv_seq_views(s->seq);
    uint32_t n = kv_seq_length(s->seq);
    for (uint32_t l = 0; l < en->geometry.n_layers; l++)
        poison_layer(&en->geometry, &views[l], kv_retained_first(&en->geometry, l, n), n);
    return engine_session_fetch(en, s, e);
}

/* After an import the host's pages hold what the device was given: flip there, give it again. */
static int plant(struct baton_engine *en, struct engine_session *s, struct baton_error *e)
{
    const struct engine_flip *f = &en->flip;
    if (f->layer >= en->geometry.n_layers || f->head >= en->geometry.kv_heads ||
        f->dim >= en->geometry.head_dim)
        return base_fail(e, BATON_ERR_USAGE, "no layer %u, head %u, dim %u to plant a fault in",
                         f->layer, f->head, f->dim);
    const struct baton_kv_view *v = &kv_seq_views(s->seq)[f->layer];
    const struct baton_kv_layout *l = v->layout;
    if (f->position < v->first || f->position >= v->end)
        return base_fail(e, BATON_ERR_USAGE, "layer %u has no position %u to plant a fault in",
                         f->layer, f->position);
    uint8_t *p = (f->which == KV_K ? v->k : v->v) +
                 v->blocks[f->position / KV_BLOCK] * l->stride_block + f->head * l->stride_head +
                 f->position % KV_BLOCK * l->stride_position + f->dim * l->stride_dim;
    p[f->bit / 8] ^= (uint8_t)(1u << f->bit % 8);
    return engine_session_deliver(en, s, e);
}

/* The cache as the device has it: views of the lane in the device's own layout go to `own`. */
static int look_at(struct baton_engine *en, struct engine_session *s, struct baton_kv_view *own,
                   const struct baton_kv_view **out, struct baton_error *e)
{
    const struct baton_caps *caps = device_caps(en->binding->device);
    *out = kv_seq_views(s->seq);
    if (caps->host_kv) /* the host's pages are the device's */
        return 0;
    if (!caps->lane_kv)
        return read_back(en, s, e);
    if (s->lane < 0) /* a producer's: they left the device before its lane was given up */
        return 0;
    *out = own;
    return device_kv_look(en->binding->device, (uint32_t)s->lane, own, en->geometry.n_layers, e);
}

int engine_session_observe(struct baton_engine *en, struct engine_session *s, struct baton_error *e)
{
    struct baton_kv_view own[KV_MAX_LAYERS];
    struct engine_look look = {
        .role = en->role,
        .caps = device_caps(en->binding->device),
        .geometry = &en->geometry,
        .n_tokens = s->request->ask.n_ids,
    };
    int rc = 0;
    if (!en->observe)
        return 0;
    if (en->flip_on && en->role == BATON_CONSUMER)
        rc = plant(en, s, e);
    if (rc == 0)
        rc = look_at(en, s, own, &look.views, e);
    return rc ? rc : en->observe(en->observe_ctx, &look, e);
}
