/* SPDX-License-Identifier: Apache-2.0 */
/* A sequence as a KV file. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kv/kv_priv.h"

/* One layer's retained range. */
static uint32_t retained(const struct kv_seq *s, const struct kv_geometry *g, uint32_t layer,
                         uint32_t *first)
{
    *first = kv_retained_first(g, layer, kv_seq_length(s));
    return kv_seq_length(s) - *first;
}

const char *kv_dtype_name(uint32_t dtype)
{
    return dtype == BATON_F32 ? "F32" : dtype == BATON_F16 ? "F16" : "BF16";
}

static int declare_vector(struct base_tensors_out *o, const char *name, const char *dtype,
                          uint64_t n, struct baton_error *e)
{
    return base_tensors_declare(o, name, dtype, 1, &n, e);
}

/* 32-bit elements come first: slots may be of 16, and every tensor shall lie aligned to its own. */
static int declare(struct base_tensors_out *o, const struct kv_seq *s, const struct kv_geometry *g,
                   const struct kv_tokens *t, struct baton_error *e)
{
    char name[32];
    uint32_t first;
    int rc = t->ids ? declare_vector(o, "ids", "I32", t->n_ids, e) : 0;
    if (rc == 0 && t->logits)
        rc = declare_vector(o, "logits", "F32", t->vocab, e);
    for (uint32_t l = 0; rc == 0 && l < g->n_layers; l++) {
        snprintf(name, sizeof name, "positions.%u", l);
        rc = declare_vector(o, name, "I32", retained(s, g, l, &first), e);
    }
    for (uint32_t l = 0; rc == 0 && l < 2 * g->n_layers; l++) {
        const uint64_t shape[] = {g->kv_heads, retained(s, g, l / 2, &first), g->head_dim};
        snprintf(name, sizeof name, "%c.%u", l % 2 ? 'v' : 'k', l / 2);
        rc = base_tensors_declare(o, name, kv_dtype_name(g->dtype), 3, shape, e);
    }
    return rc;
}

static int write_positions(struct base_tensors_out *o, uint32_t first, uint32_t n,
                           struct baton_error *e)
{
    int rc = 0;
    for (uint32_t i = 0; i < n && rc == 0; i++) {
        int32_t p = (int32_t)(first + i);
        rc = base_tensors_write(o, &p, sizeof p, e);
    }
    return rc;
}

/* [kv_heads, n, head_dim] of a pool's page, whose rows are dense within a head. */
static int write_slot(struct base_tensors_out *o, const struct baton_kv_view *v,
                      enum kv_which which, uint32_t first, uint32_t n, struct baton_error *e)
{
    const struct baton_kv_layout *l = v->layout;
    int rc = kv_view_check(v, which, first, n, false, e);
    for (uint32_t h = 0; h < l->kv_heads; h++)
        for (uint32_t p = first, run; rc == 0 && p < first + n; p += run) {
            const uint8_t *row = kv_view_run(v, which, p, first + n - p, &run);
            rc = base_tensors_write(o, row + h * l->stride_head, run * (size_t)l->stride_position,
                                    e);
        }
    return rc;
}

static int write_all(struct base_tensors_out *o, struct kv_seq *s, const struct kv_geometry *g,
                     const struct kv_tokens *t, struct baton_error *e)
{
    const struct baton_kv_view *views = kv_seq_views(s);
    uint32_t first;
    int rc = declare(o, s, g, t, e);
    if (rc == 0 && t->ids)
        rc = base_tensors_write(o, t->ids, t->n_ids * sizeof *t->ids, e);
    if (rc == 0 && t->logits)
        rc = base_tensors_write(o, t->logits, t->vocab * sizeof *t->logits, e);
    for (uint32_t l = 0; rc == 0 && l < g->n_layers; l++) {
        uint32_t n = retained(s, g, l, &first);
        rc = write_positions(o, first, n, e);
    }
    for (uint32_t l = 0; rc == 0 && l < 2 * g->n_layers; l++) {
        uint32_t n = retained(s, g, l / 2, &first);
        rc = write_slot(o, &views[l / 2], l % 2 ? KV_V : KV_K, first, n, e);
    }
    return rc ? rc : base_tensors_commit(o, e);
}

void kv_ids_hash(const int32_t *ids, uint32_t n, char hex[65])
{
    uint8_t hash[32];
    base_sha256(ids, n * sizeof *ids, hash);
    base_hex(hash, sizeof hash, hex);
}

int kv_save(struct kv_seq *s, const char *path, const char *const *metadata,
            const struct kv_tokens *tokens, struct baton_error *e)
{
    const struct kv_tokens t = tokens ? *tokens : (struct kv_tokens){0};
    const char *all[2 * KV_FILE_METADATA + 8] = {0};
    char n_tokens[16], ids_hash[65];
    size_t n = 0;
    struct base_tensors_out *o = NULL;
    if (t.ids && t.n_ids != kv_seq_length(s))
        return base_fail(e, BATON_ERR_USAGE, "%u ids for a cache of %u positions", t.n_ids,
                         kv_seq_length(s));
    for (; metadata && metadata[n]; n += 2) {
        if (n == 2 * KV_FILE_METADATA)
            return base_fail(e, BATON_ERR_USAGE, "more than %u metadata", KV_FILE_METADATA);
        all[n] = metadata[n];
        all[n + 1] = metadata[n + 1];
    }
    snprintf(n_tokens, sizeof n_tokens, "%u", kv_seq_length(s));
    all[n++] = "format";
    all[n++] = KV_FILE_FORMAT;
    all[n++] = "n_tokens";
    all[n++] = n_tokens;
    if (t.ids) {
        kv_ids_hash(t.ids, t.n_ids, ids_hash);
        all[n++] = "ids_hash";
        all[n++] = ids_hash;
    }
    int rc = base_tensors_create(&o, path, all, e);
    if (rc == 0)
        rc = write_all(o, s, kv_seq_geometry(s), &t, e);
    base_tensors_discard(o);
    return rc;
}
