/* SPDX-License-Identifier: Apache-2.0 */
/* npu: steps of a plan through cpu's verbs, with the faults that sit in the arithmetic. */
#include <stdlib.h>
#include <string.h>

#include "device/npu/npu_priv.h"

#define NONCAUSAL_BLOCK 128u /* positions that see each other */

/* A piece under way. */
struct piece {
    struct npu_program *p;
    const struct device_verbs *v;
    struct device_run *r;
    enum npu_fault fault;
    struct device_array arrays[NPU_MAX_ARRAYS];
    struct baton_span spans[NPU_CHUNK]; /* of a batch that stands in for the piece's own */
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

/* ---- attention ----------------------------------------------------------------------------- */

/* Each row stands where its block of 128 ends, so that it sees what comes after it there. Rows that
 * another piece will append are not there yet. */
static uint32_t stand_at_ends(struct piece *x)
{
    const struct npu_run *run = &x->p->run;
    for (uint32_t i = 0; i < run->n; i++) {
        uint32_t end = ((run->first + i) / NONCAUSAL_BLOCK + 1) * NONCAUSAL_BLOCK;
        uint32_t last = run->first + run->n;
        x->spans[i] = (struct baton_span){.row = i,
                                          .n_rows = 1,
                                          .position = (end < last ? end : last) - 1,
                                          .kv = x->p->output.views};
    }
    return run->n;
}

static void attend(struct piece *x, const struct npu_step *s)
{
    const struct baton_batch *own = x->r->batch;
    struct baton_batch moved = *own;
    struct device_attn a = s->attn;
    if (s->narrow)
        narrow(x->arrays[s->a[1]]);
    if (x->fault == NPU_GLOBAL_AS_LOCAL && !a.window)
        a.window = x->p->plan.window;
    if (x->fault == NPU_WINDOW_OFF && a.window)
        a.window++;
    if (x->fault == NPU_NONCAUSAL) {
        moved.n_spans = stand_at_ends(x);
        moved.spans = x->spans;
        x->r->batch = &moved;
    }
    x->v->attend(x->r, x->arrays[s->a[0]], x->arrays[s->a[1]], &a);
    x->r->batch = own;
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

/* Where padding comes first, the prompt's rows keep their positions; padding counts from 0 too. */
static uint32_t prompt_positions(struct piece *x)
{
    const struct npu_run *run = &x->p->run;
    uint32_t n = 0, end = run->first + run->n, border = run->padding_first;
    if (run->first < border)
        x->spans[n++] = (struct baton_span){.n_rows = (end < border ? end : border) - run->first,
                                            .position = run->first,
                                            .kv = x->p->output.views};
    uint32_t first = run->first > border ? run->first : border;
    if (first < end)
        x->spans[n++] = (struct baton_span){.row = first - run->first,
                                            .n_rows = end - first,
                                            .position = first - border,
                                            .kv = x->p->output.views};
    return n;
}

static void rotate(struct piece *x, const struct npu_step *s)
{
    const struct baton_batch *own = x->r->batch;
    struct baton_batch moved = *own;
    struct device_array a = x->arrays[s->a[0]];
    bool pairs = x->fault == NPU_ROPE_INTERLEAVE && s->rope.head_dim <= 256;
    if (x->p->run.padding_first) {
        moved.n_spans = prompt_positions(x);
        moved.spans = x->spans;
        x->r->batch = &moved;
    }
    if (pairs)
        interleave(a, s->rope.head_dim, false);
    x->v->rope(x->r, a, s->n, &s->rope);
    if (pairs)
        interleave(a, s->rope.head_dim, true);
    x->r->batch = own;
}

/* ---- steps --------------------------------------------------------------------------------- */

/* A norm of the device's part; the host's last one is never wrong. */
static float offset_of(const struct piece *x, float offset)
{
    bool device = x->p->run.part->n_layers > 0;
    return device && x->fault == NPU_NORM_OFFSET ? 1 - offset : offset;
}

static void append(struct piece *x, const struct npu_step *s)
{
    const struct npu_run *run = &x->p->run;
    struct device_array k = x->arrays[s->a[0]], v = x->arrays[s->a[1]];
    uint32_t layer = s->n - run->part->layer;
    x->v->kv_append(x->r, s->n, k, v);
    device_npu_output_take(&x->p->output, false, layer, k.data, run->first, run->n);
    device_npu_output_take(&x->p->output, true, layer, v.data, run->first, run->n);
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
    struct npu_program *p = (struct npu_program *)(uintptr_t)ctx;
    const struct npu_plan *plan = &p->plan;
    struct piece *x = base_try_alloc(1, sizeof *x, e);
    if (!x)
        return BATON_ERR_NOMEM;
    x->p = p;
    x->v = device_run_verbs(r);
    x->r = r;
    x->fault = ((const struct npu_device *)p->base.device)->fault;
    for (uint32_t i = 0; i < plan->n_steps; i++)
        if (plan->steps[i].verb == NPU_ARRAY)
            x->arrays[plan->steps[i].a[0]] = x->v->array(r, plan->steps[i].n);
    float *residual = x->arrays[plan->residual].data;
    float *carried = p->run.hidden;
    size_t bytes = (size_t)p->run.n * plan->hidden * sizeof(float);
    bool made = residual && carried; /* unless there was no memory, which r->error says then */
    if (made && p->run.part != &plan->head)
        memcpy(residual, carried, bytes);
    for (uint32_t i = p->run.part->first; i < p->run.part->end && !r->error.code; i++)
        replay_step(x, &plan->steps[i]);
    if (made && !r->error.code && p->run.part != &plan->tail)
        memcpy(carried, residual, bytes);
    free(x);
    return device_run_end(r, e);
}
