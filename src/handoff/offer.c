/* SPDX-License-Identifier: Apache-2.0 */
/* OFFER: identity, geometry and token ids, and the two questions asked about them. */
#include <string.h>

#include "handoff/handoff_priv.h"

static size_t dtype_bytes(uint32_t dtype)
{
    return dtype == BATON_F32 ? 4 : dtype == BATON_F16 || dtype == BATON_BF16 ? 2 : 0;
}

static bool has_local(const struct kv_geometry *g)
{
    for (uint32_t l = 0; l < g->n_layers; l++)
        if (g->local[l])
            return true;
    return false;
}

int handoff_geometry_limits(const struct kv_geometry *g, int code, struct baton_error *e)
{
    if (g->n_layers == 0 || g->n_layers > KV_MAX_LAYERS)
        return base_fail(e, code, "geometry with %u layers, 1 to %u are possible", g->n_layers,
                         KV_MAX_LAYERS);
    size_t element = dtype_bytes(g->dtype);
    if (element == 0)
        return base_fail(e, code, "geometry with KV dtype %u", g->dtype);
    uint64_t row = (uint64_t)g->kv_heads * g->head_dim;
    if (row == 0 || row > HANDOFF_MAX_ROW / element)
        return base_fail(e, code, "geometry with %u KV heads of %u elements", g->kv_heads,
                         g->head_dim);
    for (uint32_t l = 0; l < g->n_layers; l++)
        if (g->local[l] > 1)
            return base_fail(e, code, "geometry with layer %u of kind %u", l, g->local[l]);
    /* A window of 1 retains nothing at all: there would be a slot without positions. */
    if (g->window < 2 && has_local(g))
        return base_fail(
            e, code,
            "geometry with local layers and window %u: it keeps no position that could "
            "be handed over, 2 is the least",
            g->window);
    return 0;
}

size_t handoff_offer_bytes(const struct handoff_offer *o)
{
    return HANDOFF_OFFER_BYTES + (size_t)o->geometry.n_layers * HANDOFF_OFFER_LAYER_BYTES +
           (size_t)o->n_ids * 4 + (o->ticket ? HANDOFF_TICKET : 0);
}

void handoff_offer_write(uint8_t *p, const struct handoff_offer *o)
{
    const struct kv_geometry *g = &o->geometry;
    memset(p, 0, HANDOFF_OFFER_BYTES);
    memcpy(p, o->identity.arch, 32);
    memcpy(p + 32, o->identity.weights, 32);
    memcpy(p + 64, o->identity.numerics, 32);
    memcpy(p + 96, o->identity.tokenizer, 32);
    handoff_put32(p + 128, g->n_layers);
    handoff_put32(p + 132, g->kv_heads);
    handoff_put32(p + 136, g->head_dim);
    handoff_put32(p + 140, g->dtype);
    handoff_put32(p + 144, g->window);
    handoff_put32(p + 148, o->n_ids);
    handoff_put32(p + 152, o->max_new);
    handoff_put32(p + 156, (o->stream ? 1u : 0u) | (o->digest ? 2u : 0u) | (o->ticket ? 4u : 0u));
    p += HANDOFF_OFFER_BYTES;
    for (uint32_t l = 0; l < g->n_layers; l++, p += HANDOFF_OFFER_LAYER_BYTES) {
        uint32_t first = kv_retained_first(g, l, o->n_ids);
        handoff_put32(p, g->local[l]);
        handoff_put32(p + 4, first);
        handoff_put32(p + 8, o->n_ids - first);
        handoff_put32(p + 12, 0);
    }
    for (uint32_t i = 0; i < o->n_ids; i++)
        handoff_put32(p + 4 * (size_t)i, (uint32_t)o->ids[i]);
    if (o->ticket)
        memcpy(p + 4 * (size_t)o->n_ids, o->ticket, HANDOFF_TICKET);
}

static int read_fixed(const uint8_t *p, size_t n, struct handoff_offer *o, struct baton_error *e)
{
    struct kv_geometry *g = &o->geometry;
    memcpy(o->identity.arch, p, 32);
    memcpy(o->identity.weights, p + 32, 32);
    memcpy(o->identity.numerics, p + 64, 32);
    memcpy(o->identity.tokenizer, p + 96, 32);
    g->n_layers = handoff_get32(p + 128);
    g->kv_heads = handoff_get32(p + 132);
    g->head_dim = handoff_get32(p + 136);
    g->dtype = handoff_get32(p + 140);
    g->window = handoff_get32(p + 144);
    o->n_ids = handoff_get32(p + 148);
    o->max_new = handoff_get32(p + 152);
    uint32_t flags = handoff_get32(p + 156);
    o->stream = flags & 1;
    o->digest = flags & 2;
    o->ticket = flags & 4 ? p : NULL; /* its place is known with the sizes */
    uint64_t reserved = handoff_get64(p + 160) | handoff_get64(p + 168) | handoff_get64(p + 176) |
                        handoff_get64(p + 184);
    if (flags > 7 || reserved)
        return base_fail(e, BATON_ERR_PEER, "OFFER with fields that version 1 does not have");
    if (g->n_layers == 0 || g->n_layers > KV_MAX_LAYERS || o->n_ids == 0 ||
        o->n_ids > HANDOFF_MAX_IDS || n != handoff_offer_bytes(o))
        return base_fail(e, BATON_ERR_PEER, "OFFER of %u layers and %u ids in %zu bytes",
                         g->n_layers, o->n_ids, n);
    return 0;
}

int handoff_offer_read(uint8_t *p, size_t n, struct handoff_offer *o, const uint8_t **table,
                       struct baton_error *e)
{
    memset(o, 0, sizeof *o);
    int rc = read_fixed(p, n, o, e);
    if (rc)
        return rc;
    struct kv_geometry *g = &o->geometry;
    uint8_t *entry = p + HANDOFF_OFFER_BYTES;
    *table = entry;
    for (uint32_t l = 0; l < g->n_layers; l++, entry += HANDOFF_OFFER_LAYER_BYTES) {
        uint32_t kind = handoff_get32(entry);
        if (kind > 1 || handoff_get32(entry + 12))
            return base_fail(e, BATON_ERR_PEER, "OFFER with layer %u of kind %u", l, kind);
        g->local[l] = (uint8_t)kind;
    }
    for (uint32_t i = 0; i < o->n_ids; i++) {
        int32_t id = (int32_t)handoff_get32(entry + 4 * (size_t)i);
        if (id < 0)
            return base_fail(e, BATON_ERR_PEER, "OFFER with token id %d at %u", id, i);
        memcpy(entry + 4 * (size_t)i, &id, 4);
    }
    o->ids = (const int32_t *)(const void *)entry; /* 4-aligned: all sizes before are */
    if (o->ticket)
        o->ticket = entry + 4 * (size_t)o->n_ids;
    return handoff_geometry_limits(g, BATON_ERR_PEER, e);
}

int handoff_offer_check_table(const struct handoff_offer *o, const uint8_t *table,
                              struct baton_error *e)
{
    for (uint32_t l = 0; l < o->geometry.n_layers; l++, table += HANDOFF_OFFER_LAYER_BYTES) {
        uint32_t first = handoff_get32(table + 4), count = handoff_get32(table + 8);
        uint32_t want = kv_retained_first(&o->geometry, l, o->n_ids);
        if (first != want || count != o->n_ids - want)
            return base_fail(e, BATON_ERR_MISMATCH,
                             "layer %u offers %u positions from %u, %u from %u are retained", l,
                             count, first, o->n_ids - want, want);
    }
    return 0;
}

/* ---- the owner's questions ------------------------------------------------------------------ */

static int identity_part(const char *name, const uint8_t *mine, const uint8_t *theirs,
                         struct baton_error *e)
{
    static const uint8_t unknown[32];
    if (memcmp(mine, theirs, 32) == 0)
        return 0;
    if (memcmp(mine, unknown, 32) == 0)
        return base_fail(e, BATON_ERR_MISMATCH, "identity: %s is not known at this end", name);
    if (memcmp(theirs, unknown, 32) == 0)
        return base_fail(e, BATON_ERR_MISMATCH, "identity: %s is not known at the peer", name);
    char a[17], b[17];
    base_hex(mine, 8, a);
    base_hex(theirs, 8, b);
    return base_fail(e, BATON_ERR_MISMATCH, "identity: %s differs, %s... here, %s... at the peer",
                     name, a, b);
}

int handoff_identity_check(const struct handoff_identity *mine,
                           const struct handoff_identity *theirs, struct baton_error *e)
{
    int rc = identity_part("arch", mine->arch, theirs->arch, e);
    if (!rc)
        rc = identity_part("weights", mine->weights, theirs->weights, e);
    if (!rc)
        rc = identity_part("numerics", mine->numerics, theirs->numerics, e);
    if (!rc)
        rc = identity_part("tokenizer", mine->tokenizer, theirs->tokenizer, e);
    return rc;
}

int handoff_geometry_check(const struct kv_geometry *mine, const struct kv_geometry *theirs,
                           struct baton_error *e)
{
    const struct {
        const char *name;
        uint32_t a, b;
    } parts[] = {
        {"layers", mine->n_layers, theirs->n_layers},
        {"KV heads", mine->kv_heads, theirs->kv_heads},
        {"head_dim", mine->head_dim, theirs->head_dim},
        {"KV dtype", mine->dtype, theirs->dtype},
        {"window", mine->window, theirs->window},
    };
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (parts[i].a != parts[i].b)
            return base_fail(e, BATON_ERR_MISMATCH, "geometry: %s is %u here, %u at the peer",
                             parts[i].name, parts[i].a, parts[i].b);
    for (uint32_t l = 0; l < mine->n_layers; l++)
        if (!mine->local[l] != !theirs->local[l])
            return base_fail(e, BATON_ERR_MISMATCH,
                             "geometry: layer %u is %s here, not at the peer", l,
                             mine->local[l] ? "local" : "global");
    return 0;
}
