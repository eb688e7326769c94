/* SPDX-License-Identifier: Apache-2.0 */
/* npu: steps of a plan through cpu's verbs, with the faults that sit in the arithmetic. */
#include <stdlib.h>
#include <string.h>

#include "device/npu/npu_priv.h"

/* A run of cpu's under way. */
struct piece {
    const struct npu_replay *p;
    const struct device_verbs *v;
    struct device_run *r;
    struct device_array arrays[NPU_MAX_ARRAYS];
};

static const struct device_weight *unwrap(const struct device_weight *w)
{
    return w ? ((const struct npu_weight *)w)->cpu : NULL;
}

/* Operands of a product leave the device's memory as bf16. */
static void narrow(struct device_array a)
{
    float *x = a.data;
    for (size_t i = 0; i < (size_t)a.rows * a.cols; i++)
        x[i] = device_bf16_to_f32(device_f32_to_bf16(x[i]));
}

/* The batch with other spans, where there are any. */
static struct baton_batch standing(const struct piece *x, const struct npu_spans *at)
{
    struct baton_batch moved = *x->r->batch;
    if (at->n > 0) {
        moved.spans = at->spans;
        moved.n_spans = at->n;
    }
    return moved;
}

/* ---- attention ----------------------------------------------------------------------------- */

uint32_t device_npu_stand_at_ends(struct baton_span *out, const struct baton_span *s,
                                  uint32_t block, uint32_t last)
{
    for (uint32_t i = 0; i < s->n_rows; i++) {
        uint32_t end = ((s->position + i) / block + 1) * block;
        out[i] = (struct baton_span){
            .row = s->row + i, .n_rows = 1, .position = (end < last ? end : last) - 1, .kv = s->kv};
    }
    return s->n_rows;
}

/* A lane's row takes a little of its neighbour's. */
static void bleed(struct device_array a)
{
    float *x = a.data;
    for (uint32_t i = 0; i + 1 < a.rows; i++)
        for (uint32_t c = 0; c < a.cols; c++)
            x[(size_t)i * a.cols + c] += 0.25f * x[(size_t)(i + 1) * a.cols + c];
}

static void attend(struct piece *x, const struct npu_step *s)
{
    const struct baton_batch *own = x->r->batch;
    const struct baton_batch moved = standing(x, &x->p->seen);
    struct device_attn a = s->attn;
    if (s->narrow)
        narrow(x->arrays[s->a[1]]);
    if (x->p->fault == NPU_GLOBAL_AS_LOCAL && !a.window)
        a.window = x->p->plan->window;
    if (x->p->fault == NPU_WINDOW_OFF && a.window)
        a.window++;
    x->r->batch = &moved;
    x->v->attend(x->r, x->arrays[s->a[0]], x->arrays[s->a[1]], &a);
    x->r->batch = own;
    if (x->p->fault == NPU_LANE_BLEED && x->p->lanes && !x->r->error.code)
        bleed(x->arrays[s->a[0]]);
    if (x->p->attended && !x->r->error.code)
        x->p->attended(x->p, s->attn.layer, x->arrays[s->a[0]]);
}

/* ---- rotation ------------------------------------------------------------------------------ */

/* Columns 2i and 2i+1 of each head to i and i + d/2, or back. */
static void interleave(struct device_array a, uint32_t dim, bool back)
{
    float head[256], *x = a.data;
    for (size_t h = 0; h < (size_t)a.rows * a.cols / dim; h++, x += dim) {
        memcpy(head, x, dim * sizeof *x);
        for (uint32_t i = 0; i < dim; i++) {
            uint32_t half = i / 2 + (i % 2) * (dim / 2);
            if (back)
                x[i] = head[half];
            else
                x[half] = head[i];
        }
    }
}

static void rotate(struct piece *x, const struct npu_step *s)
{
    const struct baton_batch *own = x->r->batch;
    const struct baton_batch moved = standing(x, &x->p->rotated);
    struct device_array a = x->arrays[s->a[0]];
    bool pairs = x->p->fault == NPU_ROPE_INTERLEAVE && s->rope.head_dim <= 256;
    x->r->batch = &moved;
    if (pairs)
        interleave(a, s->rope.head_dim, false);
    x->v->rope(x->r, a, s->n, &s->rope);
    if (pairs)
        interleave(a, s->rope.head_dim, true);
    x->r->batch = own;
}

/* ---- steps --------------------------------------------------------------------------------- */

/* A norm of a part with layers; the host's last one is never wrong. */
static float offset_of(const struct piece *x, float offset)
{
    bool device = x->p->part->n_layers > 0;
    return device && x->p->fault == NPU_NORM_OFFSET ? 1 - offset : offset;
}

static void append(struct piece *x, const struct npu_step *s)
{
    struct device_array k = x->arrays[s->a[0]], v = x->arrays[s->a[1]];
    if (x->p->before_append)
        x->p->before_append(x->p, s->n);
    x->v->kv_append(x->r, s->n, k, v);
    if (!x->r->error.code)
        x->p->appended(x->p, s->n, k, v);
}

static void replay_step(struct piece *x, const struct npu_step *s)
{
    struct device_array a = x->arrays[s->a[0]], b = x->arrays[s->a[1]], c = x->arrays[s->a[2]];
    switch (s->verb) {
    case NPU_EMBED:
        x->v->embed(x->r, a, unwrap(s->w), s->x);
        break;
    case NPU_NORM:
        x->v->norm(x->r, a, b, unwrap(s->w), s->x, offset_of(x, s->y));
        break;
    case NPU_LINEAR:
        if (s->narrow)
            narrow(b);
        x->v->linear(x->r, a, b, unwrap(s->w), unwrap(s->b));
        break;
    case NPU_HEAD_NORM:
        x->v->head_norm(x->r, a, s->n, unwrap(s->w), s->x, offset_of(x, s->y));
        break;
    case NPU_ROPE:
        rotate(x, s);
        break;
    case NPU_APPEND:
        append(x, s);
        break;
    case NPU_ATTEND:
        attend(x, s);
        break;
    case NPU_ADD:
        x->v->add(x->r, a, b);
        break;
    case NPU_GATE:
        x->v->gate(x->r, a, b, c, s->act);
        break;
    case NPU_SELECT:
        x->arrays[s->a[0]] = x->v->select(x->r, b);
        break;
    case NPU_LOGITS:
        x->v->logits(x->r, a, unwrap(s->w));
        break;
    case NPU_ARRAY: /* made before the first step */
    case NPU_LAYER_DONE:
        break;
    }
}

int device_npu_replay(const void *ctx, struct device_run *r, struct baton_error *e)
{
    const struct npu_replay *p = ctx;
    const struct npu_plan *plan = p->plan;
    struct piece *x = base_try_alloc(1, sizeof *x, e);
    if (!x)
        return BATON_ERR_NOMEM;
    x->p = p;
    x->v = device_run_verbs(r);
    x->r = r;
    for (uint32_t i = 0; i < plan->n_steps; i++)
        if (plan->steps[i].verb == NPU_ARRAY)
            x->arrays[plan->steps[i].a[0]] = x->v->array(r, plan->steps[i].n);
    float *residual = x->arrays[plan->residual].data;
    size_t bytes = (size_t)r->batch->n_rows * plan->hidden * sizeof(float);
    bool carried = residual && p->hidden; /* there may be no memory, which r->error says then */
    if (carried && p->part->first > plan->head.first)
        memcpy(residual, p->hidden, bytes);
    for (uint32_t i = p->part->first; i < p->part->end && !r->error.code; i++)
        replay_step(x, &plan->steps[i]);
    if (carried && !r->error.code && p->part->end < plan->tail.end)
        memcpy(p->hidden, residual, bytes);
    free(x);
    return device_run_end(r, e);
}
