/* SPDX-License-Identifier: Apache-2.0 */
/* What must hold of a tensor and of a batch whatever the device: the caller's mistakes end here,
 * with their names, and no implementation repeats the checks. */
#include "base/base.h"
#include "device/device_priv.h"

/* ---- tensors ------------------------------------------------------------------------------ */

int device_tensor_check(const struct baton_tensor *t, unsigned kind, struct baton_error *e)
{
    bool vector = kind == DEVICE_VECTOR;
    if (!vector && (kind == 0 || (kind & ~(unsigned)(DEVICE_MATRIX | DEVICE_TABLE))))
        return base_fail(e, BATON_ERR_USAGE, "tensor %s: no weight kind %u", t->name, kind);
    if (t->dtype != BATON_F32 && t->dtype != BATON_F16 && t->dtype != BATON_BF16)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "tensor %s: dtype %u is not f32, f16 or bf16",
                         t->name, t->dtype);
    if (t->n_dims != (vector ? 1u : 2u))
        return base_fail(e, BATON_ERR_USAGE, "tensor %s has %u dimensions, a %s has %u", t->name,
                         t->n_dims, vector ? "vector" : "matrix", vector ? 1u : 2u);
    for (uint32_t i = 0; i < t->n_dims; i++)
        if (t->shape[i] == 0 || t->shape[i] > INT32_MAX)
            return base_fail(e, BATON_ERR_USAGE, "tensor %s: dimension %u is %llu", t->name, i,
                             (unsigned long long)t->shape[i]);
    if (!t->data)
        return base_fail(e, BATON_ERR_USAGE, "tensor %s has no data", t->name);
    return 0;
}

/* ---- batches ------------------------------------------------------------------------------ */

static int check_rows(const struct baton_caps *caps, const struct device_graph *g,
                      const struct baton_batch *b, struct baton_error *e)
{
    if (b->n_rows == 0 || b->n_rows > caps->max_rows)
        return base_fail(e, BATON_ERR_USAGE, "batch of %u rows; %s takes 1 to %u", b->n_rows,
                         caps->name, caps->max_rows);
    if (b->n_spans == 0 || b->n_spans > caps->max_lanes)
        return base_fail(e, BATON_ERR_USAGE, "batch of %u spans; %s takes 1 to %u", b->n_spans,
                         caps->name, caps->max_lanes);
    if (!b->ids || !b->spans)
        return base_fail(e, BATON_ERR_USAGE, "batch without ids or spans");
    for (uint32_t i = 0; i < b->n_rows; i++)
        if (b->ids[i] < 0 || (uint32_t)b->ids[i] >= g->vocab)
            return base_fail(e, BATON_ERR_INPUT, "token id %d of row %u is not in [0, %u)",
                             b->ids[i], i, g->vocab);
    return 0;
}

static int check_logits(const struct baton_batch *b, struct baton_error *e)
{
    if (b->n_logits && (!b->logit_rows || !b->logits))
        return base_fail(e, BATON_ERR_USAGE, "batch wants %u rows of logits and has no place",
                         b->n_logits);
    for (uint32_t i = 0; i < b->n_logits; i++) {
        if (b->logit_rows[i] >= b->n_rows)
            return base_fail(e, BATON_ERR_USAGE, "logits of row %u in a batch of %u rows",
                             b->logit_rows[i], b->n_rows);
        if (i && b->logit_rows[i] <= b->logit_rows[i - 1])
            return base_fail(e, BATON_ERR_USAGE, "logit rows %u, %u are not ascending",
                             b->logit_rows[i - 1], b->logit_rows[i]);
    }
    return 0;
}

/* The record describes pages that this device reads. */
static int check_layout(const struct baton_caps *caps, const struct baton_kv_layout *l,
                        uint32_t span, uint32_t layer, struct baton_error *e)
{
    if (!l || l->version != 1 || l->kind != BATON_KV_PAGED)
        return base_fail(e, BATON_ERR_USAGE, "span %u, layer %u: KV layout is not paged", span,
                         layer);
    if (l->dtype != caps->kv_dtype)
        return base_fail(e, BATON_ERR_USAGE, "span %u, layer %u: KV dtype is %u, %s wants %u", span,
                         layer, l->dtype, caps->name, caps->kv_dtype);
    if (l->kv_heads == 0 || l->head_dim == 0 || l->head_dim_padded < l->head_dim)
        return base_fail(e, BATON_ERR_USAGE, "span %u, layer %u: KV of %u heads of %u elements",
                         span, layer, l->kv_heads, l->head_dim);
    return 0;
}

/* The view holds everything up to the span and has a block for every position of the span. */
static int check_view(const struct baton_kv_view *v, const struct baton_span *s, uint32_t span,
                      uint32_t layer, struct baton_error *e)
{
    uint64_t end = (uint64_t)s->position + s->n_rows;
    uint32_t block = v->layout->block;
    if (!v->k || !v->v || !v->blocks)
        return base_fail(e, BATON_ERR_USAGE, "span %u, layer %u: KV view without memory", span,
                         layer);
    if (s->position < v->first || s->position > v->end)
        return base_fail(e, BATON_ERR_USAGE,
                         "span %u, layer %u: position %u does not follow the held [%u, %u)", span,
                         layer, s->position, v->first, v->end);
    if (block ? (end - 1) / block >= v->n_blocks : v->n_blocks == 0)
        return base_fail(e, BATON_ERR_USAGE,
                         "span %u, layer %u: rows up to position %llu, view has %u blocks of %u",
                         span, layer, (unsigned long long)(end - 1), v->n_blocks, block);
    for (uint64_t i = block ? s->position / block : 0; i <= (block ? (end - 1) / block : 0); i++)
        if (v->blocks[i] < 0)
            return base_fail(e, BATON_ERR_USAGE, "span %u, layer %u: no block for position %llu",
                             span, layer, (unsigned long long)(i * block));
    return 0;
}

static int check_span(const struct baton_caps *caps, const struct device_graph *g,
                      const struct baton_span *s, uint32_t span, struct baton_error *e)
{
    if ((uint64_t)s->position + s->n_rows > INT32_MAX)
        return base_fail(e, BATON_ERR_USAGE, "span %u: position %u is out of range", span,
                         s->position);
    if (!caps->host_kv && !s->kv)
        return 0;
    if (!s->kv)
        return base_fail(e, BATON_ERR_USAGE, "span %u has no KV views", span);
    for (uint32_t l = 0; l < g->n_layers; l++) {
        int rc = check_layout(caps, s->kv[l].layout, span, l, e);
        if (rc == 0)
            rc = check_view(&s->kv[l], s, span, l, e);
        if (rc)
            return rc;
    }
    return 0;
}

int device_batch_check(const struct baton_caps *caps, const struct device_graph *g,
                       const struct baton_batch *b, struct baton_error *e)
{
    uint64_t row = 0; /* one past the rows of the spans so far */
    int rc = check_rows(caps, g, b, e);
    if (rc == 0)
        rc = check_logits(b, e);
    for (uint32_t i = 0; i < b->n_spans && rc == 0; i++) {
        const struct baton_span *s = &b->spans[i];
        if (s->n_rows == 0 || s->row != row || row + s->n_rows > b->n_rows)
            return base_fail(e, BATON_ERR_USAGE,
                             "span %u is rows [%u, +%u); the next row is %llu of %u", i, s->row,
                             s->n_rows, (unsigned long long)row, b->n_rows);
        row += s->n_rows;
        rc = check_span(caps, g, s, i, e);
    }
    if (rc == 0 && row != b->n_rows)
        return base_fail(e, BATON_ERR_USAGE, "spans cover %llu of %u rows", (unsigned long long)row,
                         b->n_rows);
    return rc;
}
