/* SPDX-License-Identifier: Apache-2.0 */
#include "recorder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "device/npu/npu_priv.h"

struct recorder {
    struct device base;
    struct device *ref;
    int32_t pad_id;
};

struct recorded {
    struct device_program base;
    struct npu_plan plan;
    struct device_program *replayed;
};

/* ---- replay ------------------------------------------------------------------------------- */

static void replay_step(const struct device_verbs *v, struct device_run *r,
                        const struct npu_step *s, struct device_array *arrays)
{
    struct device_array a = arrays[s->a[0]], b = arrays[s->a[1]], c = arrays[s->a[2]];
    switch (s->verb) {
    case NPU_ARRAY:
        arrays[s->a[0]] = v->array(r, s->n);
        break;
    case NPU_EMBED:
        v->embed(r, a, s->w, s->x);
        break;
    case NPU_NORM:
        v->norm(r, a, b, s->w, s->x, s->y);
        break;
    case NPU_LINEAR:
        v->linear(r, a, b, s->w, s->b);
        break;
    case NPU_HEAD_NORM:
        v->head_norm(r, a, s->n, s->w, s->x, s->y);
        break;
    case NPU_ROPE:
        v->rope(r, a, s->n, &s->rope);
        break;
    case NPU_APPEND:
        v->kv_append(r, s->n, a, b);
        break;
    case NPU_ATTEND:
        v->attend(r, a, b, &s->attn);
        break;
    case NPU_ADD:
        v->add(r, a, b);
        break;
    case NPU_GATE:
        v->gate(r, a, b, c, s->act);
        break;
    case NPU_LAYER_DONE:
        v->layer_done(r, s->n);
        break;
    case NPU_SELECT:
        arrays[s->a[0]] = v->select(r, b);
        break;
    case NPU_LOGITS:
        v->logits(r, a, s->w);
        break;
    }
}

/* The forward function that cpu:ref runs in place of the recorded one. */
static int replay(const void *ctx, struct device_run *r, struct baton_error *e)
{
    const struct npu_plan *p = ctx;
    struct device_array arrays[NPU_MAX_ARRAYS] = {0};
    for (uint32_t i = 0; i < p->n_steps; i++)
        replay_step(device_run_verbs(r), r, &p->steps[i], arrays);
    return device_run_end(r, e);
}

/* ---- padding ------------------------------------------------------------------------------ */

/* Pages for the padding rows of one batch: one block, which all layers use in turn. */
static int pad_open(const struct baton_kv_layout *like, uint32_t n_layers,
                    struct baton_kv_layout *layout, struct baton_kv_view **views, uint8_t **memory,
                    struct baton_error *e)
{
    static const int32_t table[1] = {0};
    int64_t element = like->dtype == BATON_F32 ? 4 : 2, row;
    *layout = *like;
    layout->joint = 0;
    layout->block = RECORDER_WIDTH;
    layout->head_dim_padded = like->head_dim;
    layout->stride_kv = 0;
    layout->stride_dim = element;
    layout->stride_head = element * like->head_dim;
    layout->stride_position = row = layout->stride_head * like->kv_heads;
    layout->stride_block = row * RECORDER_WIDTH;
    *memory = base_try_alloc(2 * RECORDER_WIDTH, (size_t)row, e);
    *views = base_try_alloc(n_layers, sizeof **views, e);
    if (!*memory || !*views)
        return BATON_ERR_NOMEM;
    for (uint32_t l = 0; l < n_layers; l++)
        (*views)[l] = (struct baton_kv_view){
            layout, *memory, *memory + row * RECORDER_WIDTH, table, 1, 0, 0};
    return 0;
}

static int rec_submit(struct device_program *base, const struct baton_batch *b, uint64_t *id,
                      struct baton_error *e)
{
    struct recorded *p = (struct recorded *)base;
    const struct recorder *d = (const struct recorder *)base->device;
    struct baton_kv_layout layout;
    struct baton_kv_view *views = NULL;
    uint8_t *memory = NULL;
    int32_t ids[RECORDER_WIDTH];
    struct baton_span spans[2] = {b->spans[0], {b->n_rows, RECORDER_WIDTH - b->n_rows, 0, 1, NULL}};
    struct baton_batch padded = *b;
    int rc = pad_open(b->spans[0].kv[0].layout, base->graph.n_layers, &layout, &views, &memory, e);
    spans[1].kv = views;
    for (uint32_t i = 0; i < RECORDER_WIDTH; i++)
        ids[i] = i < b->n_rows ? b->ids[i] : d->pad_id;
    padded.ids = ids;
    padded.n_rows = RECORDER_WIDTH;
    padded.spans = spans;
    padded.n_spans = b->n_rows < RECORDER_WIDTH ? 2 : 1;
    if (rc == 0)
        rc = device_submit(p->replayed, &padded, id, e);
    free(views);
    free(memory);
    return rc;
}

/* ---- the device --------------------------------------------------------------------------- */

static void rec_close(struct device *base)
{
    device_close(((struct recorder *)base)->ref);
    free(base);
}

static int rec_start(struct device *d, unsigned n_threads, struct baton_error *e)
{
    return device_start(((struct recorder *)d)->ref, n_threads, e);
}

static int rec_bind(struct device *d, const struct baton_tensor *t, unsigned kind,
                    struct device_weight **out, struct baton_error *e)
{
    return device_weight_bind(((struct recorder *)d)->ref, t, kind, out, e);
}

static void rec_weight_close(struct device *d, struct device_weight *w)
{
    device_weight_close(((struct recorder *)d)->ref, w);
}

static void rec_program_close(struct device_program *base)
{
    struct recorded *p = (struct recorded *)base;
    device_program_close(p->replayed);
    device_npu_plan_close(&p->plan);
    free(p);
}

static int rec_program_open(struct device *d, const struct device_graph *g,
                            struct device_program **out, struct baton_error *e)
{
    struct recorded *p = base_try_alloc(1, sizeof *p, e);
    if (!p)
        return BATON_ERR_NOMEM;
    p->base = (struct device_program){.device = d, .graph = *g};
    struct device_graph again = *g;
    int rc = device_npu_plan_record(g, &p->plan, e);
    again.forward = replay;
    again.ctx = &p->plan;
    if (rc == 0)
        rc = device_program_open(((struct recorder *)d)->ref, &again, &p->replayed, e);
    if (rc)
        rec_program_close(&p->base);
    else
        *out = &p->base;
    return rc;
}

static int rec_wait(struct device_program *p, uint64_t id, uint64_t timeout_ns,
                    struct baton_error *e)
{
    return device_wait(((struct recorded *)p)->replayed, id, timeout_ns, e);
}

static const struct device_impl recorder_impl = {
    .name = "recorder",
    .close = rec_close,
    .start = rec_start,
    .weight_bind = rec_bind,
    .weight_close = rec_weight_close,
    .program_open = rec_program_open,
    .program_close = rec_program_close,
    .submit = rec_submit,
    .wait = rec_wait,
};

int recorder_open(int32_t pad_id, struct device **out, struct baton_error *e)
{
    struct recorder *d = base_try_alloc(1, sizeof *d, e);
    if (!d)
        return BATON_ERR_NOMEM;
    int rc = device_open("cpu:ref", &d->ref, e);
    if (rc) {
        free(d);
        return rc;
    }
    d->base.impl = &recorder_impl;
    d->base.caps = *device_caps(d->ref);
    snprintf(d->base.caps.name, sizeof d->base.caps.name, "recorder");
    d->base.caps.dynamic = false;
    d->base.caps.emulated = true;
    d->base.caps.max_rows = RECORDER_WIDTH;
    d->base.caps.max_lanes = 1;
    d->pad_id = pad_id;
    *out = &d->base;
    return 0;
}

uint32_t recorder_steps(const struct device_program *p)
{
    return ((const struct recorded *)p)->plan.n_steps;
}
