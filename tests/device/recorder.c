/* SPDX-License-Identifier: Apache-2.0 */
#include "recorder.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "device/device_priv.h"

enum step_kind {
    ARRAY,
    EMBED,
    NORM,
    LINEAR,
    HEAD_NORM,
    ROPE,
    KV_APPEND,
    ATTEND,
    ADD,
    GATE,
    LAYER_DONE,
    SELECT,
    LOGITS
};

/* One verb. Arrays are numbers, in the order in which the plan makes them; what a pointer of the
 * caller led to is copied, since the pointer need not outlive the recording. */
struct step {
    enum step_kind kind;
    uint32_t a[3]; /* array operands in the order of the verb's parameters */
    uint32_t n;    /* cols, heads or layer */
    const struct device_weight *w, *b;
    float x, y; /* scale; or eps and offset */
    enum device_act act;
    struct device_rope rope;
    struct device_attn attn;
};

struct plan {
    struct step *steps;
    uint32_t n_steps, n_arrays;
};

struct recorder {
    struct device base;
    struct device *ref;
    int32_t pad_id;
};

struct recorded {
    struct device_program base;
    struct plan plan;
    struct device_program *replayed;
};

/* ---- recording ---------------------------------------------------------------------------- */

struct recording {
    struct device_run base;
    struct plan *plan;
};

static void record(struct device_run *r, struct step s)
{
    struct plan *p = ((struct recording *)r)->plan;
    struct step *grown = base_try_realloc(p->steps, p->n_steps + 1, sizeof s, &r->error);
    if (!grown)
        return;
    p->steps = grown;
    p->steps[p->n_steps++] = s;
}

/* Not an address: whoever looks into an array while being recorded crashes. */
static struct device_array made(struct device_run *r, uint32_t rows, uint32_t cols)
{
    struct plan *p = ((struct recording *)r)->plan;
    return (struct device_array){(void *)(uintptr_t)++p->n_arrays, rows, cols};
}

static uint32_t number(struct device_array a)
{
    return (uint32_t)(uintptr_t)a.data - 1;
}

static struct device_array rec_array(struct device_run *r, uint32_t cols)
{
    record(r, (struct step){.kind = ARRAY, .n = cols});
    return made(r, RECORDER_WIDTH, cols);
}

static void rec_embed(struct device_run *r, struct device_array y,
                      const struct device_weight *table, float scale)
{
    record(r, (struct step){.kind = EMBED, .a = {number(y)}, .w = table, .x = scale});
}

static void rec_norm(struct device_run *r, struct device_array y, struct device_array x,
                     const struct device_weight *w, float eps, float offset)
{
    record(r,
           (struct step){.kind = NORM, .a = {number(y), number(x)}, .w = w, .x = eps, .y = offset});
}

static void rec_linear(struct device_run *r, struct device_array y, struct device_array x,
                       const struct device_weight *w, const struct device_weight *b)
{
    record(r, (struct step){.kind = LINEAR, .a = {number(y), number(x)}, .w = w, .b = b});
}

static void rec_head_norm(struct device_run *r, struct device_array x, uint32_t heads,
                          const struct device_weight *w, float eps, float offset)
{
    record(r, (struct step){
                  .kind = HEAD_NORM, .a = {number(x)}, .n = heads, .w = w, .x = eps, .y = offset});
}

static void rec_rope(struct device_run *r, struct device_array x, uint32_t heads,
                     const struct device_rope *rope)
{
    record(r, (struct step){.kind = ROPE, .a = {number(x)}, .n = heads, .rope = *rope});
}

static void rec_kv_append(struct device_run *r, uint32_t layer, struct device_array k,
                          struct device_array v)
{
    record(r, (struct step){.kind = KV_APPEND, .a = {number(k), number(v)}, .n = layer});
}

static void rec_attend(struct device_run *r, struct device_array o, struct device_array q,
                       const struct device_attn *a)
{
    record(r, (struct step){.kind = ATTEND, .a = {number(o), number(q)}, .attn = *a});
}

static void rec_add(struct device_run *r, struct device_array x, struct device_array y)
{
    record(r, (struct step){.kind = ADD, .a = {number(x), number(y)}});
}

static void rec_gate(struct device_run *r, struct device_array y, struct device_array gate,
                     struct device_array up, enum device_act act)
{
    record(r, (struct step){.kind = GATE, .a = {number(y), number(gate), number(up)}, .act = act});
}

static void rec_layer_done(struct device_run *r, uint32_t layer)
{
    record(r, (struct step){.kind = LAYER_DONE, .n = layer});
}

static struct device_array rec_select(struct device_run *r, struct device_array x)
{
    record(r, (struct step){.kind = SELECT, .a = {number(x)}});
    return made(r, 1, x.cols);
}

static void rec_logits(struct device_run *r, struct device_array x, const struct device_weight *w)
{
    record(r, (struct step){.kind = LOGITS, .a = {number(x)}, .w = w});
}

static const struct device_verbs recording_verbs = {
    .array = rec_array,
    .embed = rec_embed,
    .norm = rec_norm,
    .linear = rec_linear,
    .head_norm = rec_head_norm,
    .rope = rec_rope,
    .kv_append = rec_kv_append,
    .attend = rec_attend,
    .add = rec_add,
    .gate = rec_gate,
    .layer_done = rec_layer_done,
    .select = rec_select,
    .logits = rec_logits,
};

/* ---- replay ------------------------------------------------------------------------------- */

static void replay_step(const struct device_verbs *v, struct device_run *r, const struct step *s,
                        struct device_array *arrays, uint32_t *n_arrays)
{
    struct device_array a = arrays[s->a[0]], b = arrays[s->a[1]], c = arrays[s->a[2]];
    switch (s->kind) {
    case ARRAY:
        arrays[(*n_arrays)++] = v->array(r, s->n);
        break;
    case EMBED:
        v->embed(r, a, s->w, s->x);
        break;
    case NORM:
        v->norm(r, a, b, s->w, s->x, s->y);
        break;
    case LINEAR:
        v->linear(r, a, b, s->w, s->b);
        break;
    case HEAD_NORM:
        v->head_norm(r, a, s->n, s->w, s->x, s->y);
        break;
    case ROPE:
        v->rope(r, a, s->n, &s->rope);
        break;
    case KV_APPEND:
        v->kv_append(r, s->n, a, b);
        break;
    case ATTEND:
        v->attend(r, a, b, &s->attn);
        break;
    case ADD:
        v->add(r, a, b);
        break;
    case GATE:
        v->gate(r, a, b, c, s->act);
        break;
    case LAYER_DONE:
        v->layer_done(r, s->n);
        break;
    case SELECT:
        arrays[(*n_arrays)++] = v->select(r, a);
        break;
    case LOGITS:
        v->logits(r, a, s->w);
        break;
    }
}

/* The forward function that cpu:ref runs in place of the recorded one. */
static int replay(const void *ctx, struct device_run *r, struct baton_error *e)
{
    const struct plan *p = ctx;
    uint32_t n_arrays = 0;
    struct device_array *arrays = base_try_alloc(p->n_arrays + 1, sizeof *arrays, e);
    if (!arrays)
        return BATON_ERR_NOMEM;
    for (uint32_t i = 0; i < p->n_steps; i++)
        replay_step(device_run_verbs(r), r, &p->steps[i], arrays, &n_arrays);
    free(arrays);
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
    free(p->plan.steps);
    free(p);
}

static int rec_program_open(struct device *d, const struct device_graph *g,
                            struct device_program **out, struct baton_error *e)
{
    struct recorded *p = base_try_alloc(1, sizeof *p, e);
    if (!p)
        return BATON_ERR_NOMEM;
    p->base = (struct device_program){.device = d, .graph = *g};
    struct recording r = {{.verbs = &recording_verbs, .program = &p->base}, &p->plan};
    struct device_graph again = *g;
    int rc = g->forward(g->ctx, &r.base, e);
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
