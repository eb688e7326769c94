/* SPDX-License-Identifier: Apache-2.0 */
/* Reading a device's cache into a second buffer: positions first, then element by element. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "verify/verify_priv.h"

uint32_t verify_width(uint32_t dtype)
{
    return dtype == BATON_F32 ? 4 : 2;
}

/* First position that a layer must retain after n tokens. The next query stands at n and sees
 * the `window` positions that end with its own: [n - window + 1, n). */
static uint32_t retained_first(const struct kv_geometry *g, uint32_t layer, uint32_t n)
{
    if (!g->local[layer] || g->window == 0 || n < g->window)
        return 0;
    return n - g->window + 1;
}

/* ---- positions ---------------------------------------------------------------------------- */

/* One region of rows that holds the newest positions; no block table. */
static bool windowed(const struct baton_kv_layout *l)
{
    return l->kind == BATON_KV_RING || l->kind == BATON_KV_SLID;
}

static int32_t block_of(const struct baton_kv_view *v, uint32_t position)
{
    uint32_t i = position / v->layout->block;
    return i < v->n_blocks ? v->blocks[i] : -1;
}

/* Two entries of a table that name one block: the later positions overwrote the earlier ones. */
static bool blocks_shared(const struct baton_kv_view *v, uint32_t first, uint32_t end)
{
    uint32_t size = v->layout->block;
    for (uint32_t i = first / size; i <= (end - 1) / size; i++)
        for (uint32_t j = first / size; j < i; j++)
            if (v->blocks[i] == v->blocks[j])
                return true;
    return false;
}

/* "" where the view of a layer holds [first, end), and after an import nothing before it. */
static void check_positions(const struct engine_look *look, uint32_t layer, uint32_t first,
                            char *why, size_t size)
{
    const struct baton_kv_view *v = &look->views[layer];
    uint32_t end = look->n_tokens, missing = first;
    why[0] = '\0';
    if (v->end != end || v->first > first || (look->role == BATON_CONSUMER && v->first != first)) {
        snprintf(why, size, "layer %u holds positions [%u, %u), not [%u, %u)", layer, v->first,
                 v->end, first, end);
        return;
    }
    if (first == end)
        return;
    if (windowed(v->layout)) { /* where there is a row for each, no two share one */
        if (end - first > v->layout->rows)
            snprintf(why, size, "layer %u has %u rows for positions [%u, %u)", layer,
                     v->layout->rows, first, end);
        return;
    }
    while (missing < end && block_of(v, missing) >= 0)
        missing++;
    if (missing < end)
        snprintf(why, size, "layer %u has no block for position %u", layer, missing);
    else if (blocks_shared(v, first, end))
        snprintf(why, size, "layer %u has one block for two places", layer);
}

/* ---- elements ----------------------------------------------------------------------------- */

/* In which row of its block or region a position lies. */
static int64_t row_of(const struct baton_kv_view *v, uint32_t position)
{
    const struct baton_kv_layout *l = v->layout;
    if (l->kind == BATON_KV_RING)
        return position % l->rows;
    if (l->kind == BATON_KV_SLID) /* the oldest in the first row */
        return position - (v->end > l->rows ? v->end - l->rows : 0);
    return position % l->block;
}

/* The address formula of baton/device.h, written down a second time. */
static const uint8_t *element(const struct baton_kv_view *v, enum kv_which which, uint32_t position,
                              uint32_t head, uint32_t dim)
{
    const struct baton_kv_layout *l = v->layout;
    int64_t block = windowed(l) ? 0 : block_of(v, position) * l->stride_block;
    return (which == KV_K ? v->k : v->v) + block + (int64_t)head * l->stride_head +
           row_of(v, position) * l->stride_position + (int64_t)dim * l->stride_dim;
}

static void copy_slot(const struct baton_kv_view *v, enum kv_which which, struct verify_slot *slot)
{
    const struct baton_kv_layout *l = v->layout;
    uint32_t width = verify_width(l->dtype);
    uint8_t *to = slot->data;
    for (uint32_t h = 0; h < l->kv_heads; h++)
        for (uint32_t p = slot->first; p < slot->first + slot->n; p++)
            for (uint32_t d = 0; d < l->head_dim; d++, to += width)
                memcpy(to, element(v, which, p, h, d), width);
}

static int read_slot(struct verify_cache *c, const struct engine_look *look, uint32_t slot,
                     struct baton_error *e)
{
    struct verify_slot *s = &c->slots[slot];
    size_t row = (size_t)c->kv_heads * c->head_dim * verify_width(c->dtype);
    if (s->n == 0)
        return 0;
    s->data = base_try_alloc(s->n, row, e);
    if (!s->data)
        return BATON_ERR_NOMEM;
    copy_slot(&look->views[slot / 2], slot % 2 ? KV_V : KV_K, s);
    return 0;
}

static int check_layout(const struct engine_look *look, uint32_t layer, struct baton_error *e)
{
    const struct baton_kv_layout *l = look->views[layer].layout;
    const struct kv_geometry *g = look->geometry;
    bool paged = l->kind == BATON_KV_PAGED && l->block > 0;
    if ((!paged && !(windowed(l) && l->rows > 0)) || l->dtype == BATON_I8)
        return base_fail(e, BATON_ERR_UNSUPPORTED,
                         "layer %u: the checker reads pages, rings and slid windows of f32, f16 "
                         "and bf16; this is kind %u of dtype %u",
                         layer, l->kind, l->dtype);
    if (l->kv_heads != g->kv_heads || l->head_dim != g->head_dim || l->dtype != g->dtype)
        return base_fail(e, BATON_ERR_MISMATCH, "layer %u: its layout is not of this model", layer);
    return 0;
}

static int read_layer(struct verify_cache *c, const struct engine_look *look, uint32_t layer,
                      struct baton_error *e)
{
    uint32_t first = retained_first(look->geometry, layer, look->n_tokens);
    char why[sizeof c->positions_why];
    int rc = check_layout(look, layer, e);
    if (rc)
        return rc;
    check_positions(look, layer, first, why, sizeof why);
    if (why[0] && c->positions_ok)
        memcpy(c->positions_why, why, sizeof why);
    c->positions_ok = c->positions_ok && !why[0];
    for (uint32_t s = 2 * layer; s < 2 * layer + 2 && rc == 0; s++) {
        c->slots[s].first = first;
        c->slots[s].n = why[0] ? 0 : look->n_tokens - first;
        rc = read_slot(c, look, s, e);
    }
    return rc;
}

static void describe(struct verify_cache *c, const struct engine_look *look)
{
    const struct kv_geometry *g = look->geometry;
    c->n_layers = g->n_layers;
    c->kv_heads = g->kv_heads;
    c->head_dim = g->head_dim;
    c->dtype = g->dtype;
    c->n_tokens = look->n_tokens;
    c->row_invariant = look->caps->row_invariant;
    memcpy(c->numerics, look->caps->numerics, sizeof c->numerics);
    c->positions_ok = true;
}

int verify_cache_read(const struct engine_look *look, struct verify_cache **out,
                      struct baton_error *e)
{
    struct verify_cache *c = base_try_alloc(1, sizeof *c, e);
    if (!c)
        return BATON_ERR_NOMEM;
    describe(c, look);
    c->local = base_try_alloc(c->n_layers, 1, e);
    c->slots = base_try_alloc(2 * (size_t)c->n_layers, sizeof *c->slots, e);
    int rc = c->local && c->slots ? 0 : BATON_ERR_NOMEM;
    if (rc == 0)
        memcpy(c->local, look->geometry->local, c->n_layers);
    for (uint32_t l = 0; l < look->geometry->n_layers && rc == 0; l++)
        rc = read_layer(c, look, l, e);
    if (rc) {
        verify_cache_free(c);
        return rc;
    }
    *out = c;
    return 0;
}

void verify_cache_free(struct verify_cache *c)
{
    if (!c)
        return;
    for (uint32_t s = 0; c->slots && s < 2 * c->n_layers; s++)
        free(c->slots[s].data);
    free(c->slots);
    free(c->local);
    free(c);
}
