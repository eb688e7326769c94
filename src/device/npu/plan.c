/* SPDX-License-Identifier: Apache-2.0 */
/* npu: a forward function's verbs, written down. */
#include <stdlib.h>
#include <string.h>

#include "device/npu/npu_priv.h"

struct recording {
    struct device_run base;
    struct npu_plan *plan;
    uint32_t cap;
    bool rounded[NPU_MAX_ARRAYS]; /* since its last write */
};

static void fail(struct device_run *r, int code, const char *text)
{
    if (!r->error.code)
        base_fail(&r->error, code, "%s", text);
}

static void record(struct device_run *r, struct npu_step s)
{
    struct recording *x = (struct recording *)r;
    struct npu_plan *p = x->plan;
    if (r->error.code)
        return;
    if (p->n_steps == x->cap) {
        uint32_t cap = x->cap ? 2 * x->cap : 64;
        struct npu_step *grown = base_try_realloc(p->steps, cap, sizeof s, &r->error);
        if (!grown)
            return;
        p->steps = grown;
        x->cap = cap;
    }
    p->steps[p->n_steps++] = s;
}

/* The number of an array; its address is no address, so whoever looks into one crashes. */
static uint32_t number(struct device_array a)
{
    return (uint32_t)(uintptr_t)a.data - 1;
}

/* An array that a step writes. */
static uint32_t written(struct device_run *r, struct device_array a)
{
    if (!r->error.code)
        ((struct recording *)r)->rounded[number(a)] = false;
    return number(a);
}

/* An array that a product reads: true the first time after a write. */
static bool narrows(struct device_run *r, struct device_array a)
{
    if (r->error.code)
        return false;
    bool *rounded = &((struct recording *)r)->rounded[number(a)];
    bool first = !*rounded;
    *rounded = true;
    return first;
}

static struct device_array made(struct device_run *r, uint32_t rows, uint32_t cols)
{
    struct npu_plan *p = ((struct recording *)r)->plan;
    if (p->n_arrays == NPU_MAX_ARRAYS)
        fail(r, BATON_ERR_UNSUPPORTED, "a plan: the graph has more than 64 arrays");
    else
        p->n_arrays++;
    return (struct device_array){(void *)(uintptr_t)p->n_arrays, rows, cols};
}

static struct device_array rec_array(struct device_run *r, uint32_t cols)
{
    struct device_array a = made(r, 1, cols);
    record(r, (struct npu_step){.verb = NPU_ARRAY, .a = {number(a)}, .n = cols});
    return a;
}

static void rec_embed(struct device_run *r, struct device_array y,
                      const struct device_weight *table, float scale)
{
    struct npu_plan *p = ((struct recording *)r)->plan;
    p->residual = written(r, y);
    p->hidden = y.cols;
    record(r, (struct npu_step){.verb = NPU_EMBED, .a = {number(y)}, .w = table, .x = scale});
}

static void rec_norm(struct device_run *r, struct device_array y, struct device_array x,
                     const struct device_weight *w, float eps, float offset)
{
    record(r,
           (struct npu_step){
               .verb = NPU_NORM, .a = {written(r, y), number(x)}, .w = w, .x = eps, .y = offset});
}

static void rec_linear(struct device_run *r, struct device_array y, struct device_array x,
                       const struct device_weight *w, const struct device_weight *b)
{
    record(r, (struct npu_step){.verb = NPU_LINEAR,
                                .a = {written(r, y), number(x)},
                                .narrow = narrows(r, x),
                                .w = w,
                                .b = b});
}

static void rec_head_norm(struct device_run *r, struct device_array x, uint32_t heads,
                          const struct device_weight *w, float eps, float offset)
{
    record(r, (struct npu_step){.verb = NPU_HEAD_NORM,
                                .a = {written(r, x)},
                                .n = heads,
                                .w = w,
                                .x = eps,
                                .y = offset});
}

static void rec_rope(struct device_run *r, struct device_array x, uint32_t heads,
                     const struct device_rope *rope)
{
    record(r, (struct npu_step){.verb = NPU_ROPE, .a = {written(r, x)}, .n = heads, .rope = *rope});
}

static void rec_append(struct device_run *r, uint32_t layer, struct device_array k,
                       struct device_array v)
{
    record(r, (struct npu_step){.verb = NPU_APPEND, .a = {number(k), number(v)}, .n = layer});
}

static void rec_attend(struct device_run *r, struct device_array o, struct device_array q,
                       const struct device_attn *a)
{
    struct npu_plan *p = ((struct recording *)r)->plan;
    if (p->head_dim && (p->kv_heads != a->kv_heads || p->head_dim != a->head_dim))
        fail(r, BATON_ERR_UNSUPPORTED, "a plan: the layers' key heads are of different sizes");
    p->kv_heads = a->kv_heads;
    p->head_dim = a->head_dim;
    p->window = a->window ? a->window : p->window;
    record(r, (struct npu_step){.verb = NPU_ATTEND,
                                .a = {written(r, o), number(q)},
                                .narrow = narrows(r, q),
                                .attn = *a});
}

static void rec_add(struct device_run *r, struct device_array x, struct device_array y)
{
    record(r, (struct npu_step){.verb = NPU_ADD, .a = {written(r, x), number(y)}});
}

static void rec_gate(struct device_run *r, struct device_array y, struct device_array gate,
                     struct device_array up, enum device_act act)
{
    record(r, (struct npu_step){
                  .verb = NPU_GATE, .a = {written(r, y), number(gate), number(up)}, .act = act});
}

static void rec_layer_done(struct device_run *r, uint32_t layer)
{
    record(r, (struct npu_step){.verb = NPU_LAYER_DONE, .n = layer});
}

static struct device_array rec_select(struct device_run *r, struct device_array x)
{
    struct device_array a = made(r, 1, x.cols);
    record(r, (struct npu_step){.verb = NPU_SELECT, .a = {number(a), number(x)}});
    return a;
}

static void rec_logits(struct device_run *r, struct device_array x, const struct device_weight *w)
{
    record(r, (struct npu_step){.verb = NPU_LOGITS, .a = {number(x)}, .w = w});
}

static const struct device_verbs recording_verbs = {
    .array = rec_array,
    .embed = rec_embed,
    .norm = rec_norm,
    .linear = rec_linear,
    .head_norm = rec_head_norm,
    .rope = rec_rope,
    .kv_append = rec_append,
    .attend = rec_attend,
    .add = rec_add,
    .gate = rec_gate,
    .layer_done = rec_layer_done,
    .select = rec_select,
    .logits = rec_logits,
};

int device_npu_plan_record(const struct device_graph *g, struct npu_plan *out,
                           struct baton_error *e)
{
    struct recording r = {.base = {.verbs = &recording_verbs}, .plan = out};
    memset(out, 0, sizeof *out);
    int rc = g->forward(g->ctx, &r.base, e);
    if (rc)
        device_npu_plan_close(out);
    return rc;
}

void device_npu_plan_close(struct npu_plan *p)
{
    free(p->steps);
    free(p->parts);
    p->steps = NULL;
    p->parts = NULL;
}
