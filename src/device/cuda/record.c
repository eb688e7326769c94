/* SPDX-License-Identifier: Apache-2.0 */
/* Runs a forward function once with verbs that only write themselves down. */
#include <stdlib.h>
#include <string.h>

#include "device/cuda/cuda_priv.h"

/* The run that the forward function sees; an array's data is its number plus one. */
struct recorder {
    struct device_run base;
    struct cuda_record *out;
    struct cuda_op nowhere; /* written when memory is short, never read */
};

static void fail(struct device_run *r, int code, const char *text)
{
    if (r->error.code == 0)
        base_fail(&r->error, code, "cuda: %s", text);
}

static struct cuda_op *add_op(struct device_run *r, enum cuda_verb verb)
{
    struct cuda_record *out = ((struct recorder *)r)->out;
    if (out->n_ops == out->cap_ops) {
        uint32_t cap = out->cap_ops ? 2 * out->cap_ops : 512;
        struct cuda_op *ops = base_try_realloc(out->ops, cap, sizeof *ops, &r->error);
        if (!ops) {
            fail(r, BATON_ERR_NOMEM, "no memory for the plan");
            return &((struct recorder *)r)->nowhere;
        }
        out->ops = ops;
        out->cap_ops = cap;
    }
    struct cuda_op *op = &out->ops[out->n_ops++];
    memset(op, 0, sizeof *op);
    op->verb = verb;
    return op;
}

static uint8_t number(struct device_run *r, struct device_array a)
{
    uintptr_t n = (uintptr_t)a.data;
    if (n == 0 || n > ((struct recorder *)r)->out->n_arrays) {
        fail(r, BATON_ERR_INTERNAL, "an array that the run did not make");
        return 0;
    }
    return (uint8_t)(n - 1);
}

static struct device_array new_array(struct device_run *r, uint32_t cols, bool selected)
{
    struct cuda_record *out = ((struct recorder *)r)->out;
    if (out->n_arrays == CUDA_MAX_ARRAYS || cols == 0) {
        fail(r, BATON_ERR_UNSUPPORTED, "too many arrays, or an empty one");
        return (struct device_array){0};
    }
    out->cols[out->n_arrays] = cols;
    out->selected[out->n_arrays++] = selected;
    return (struct device_array){(void *)(uintptr_t)out->n_arrays, 1, cols};
}

static struct device_array v_array(struct device_run *r, uint32_t cols)
{
    return new_array(r, cols, false);
}

static struct device_array v_select(struct device_run *r, struct device_array x)
{
    struct device_array y = new_array(r, x.cols, true);
    struct cuda_op *op = add_op(r, CUDA_V_SELECT);
    op->y = number(r, y);
    op->x = number(r, x);
    return y;
}

static void weight(struct device_run *r, struct cuda_op *op, const struct device_weight *w,
                   unsigned kind, uint32_t rows, uint32_t cols)
{
    op->w = (struct cuda_weight *)(uintptr_t)w;
    if (!w || !(op->w->kind & kind) || op->w->cols != cols || (rows && op->w->rows != rows))
        fail(r, BATON_ERR_INTERNAL, "a weight of another shape than its verb");
}

static void v_embed(struct device_run *r, struct device_array y, const struct device_weight *t,
                    float scale)
{
    struct cuda_op *op = add_op(r, CUDA_V_EMBED);
    op->y = number(r, y);
    op->offset = scale;
    weight(r, op, t, DEVICE_TABLE, 0, y.cols);
}

static void v_norm(struct device_run *r, struct device_array y, struct device_array x,
                   const struct device_weight *w, float eps, float offset)
{
    struct cuda_op *op = add_op(r, CUDA_V_NORM);
    op->y = number(r, y);
    op->x = number(r, x);
    op->eps = eps;
    op->offset = offset;
    weight(r, op, w, DEVICE_VECTOR, 1, x.cols);
}

static void v_linear(struct device_run *r, struct device_array y, struct device_array x,
                     const struct device_weight *w, const struct device_weight *b)
{
    struct cuda_op *op = add_op(r, CUDA_V_LINEAR);
    op->y = number(r, y);
    op->x = number(r, x);
    op->b = (struct cuda_weight *)(uintptr_t)b;
    weight(r, op, w, DEVICE_MATRIX, y.cols, x.cols);
    if (b && (!op->b->vector || op->b->cols != y.cols))
        fail(r, BATON_ERR_INTERNAL, "a bias of another length than its product");
}

static void v_head_norm(struct device_run *r, struct device_array x, uint32_t heads,
                        const struct device_weight *w, float eps, float offset)
{
    struct cuda_op *op = add_op(r, CUDA_V_HEAD_NORM);
    op->x = number(r, x);
    op->heads = heads;
    op->eps = eps;
    op->offset = offset;
    weight(r, op, w, DEVICE_VECTOR, 1, heads ? x.cols / heads : 0);
}

static void v_rope(struct device_run *r, struct device_array x, uint32_t heads,
                   const struct device_rope *rope)
{
    struct cuda_record *out = ((struct recorder *)r)->out;
    struct cuda_op *op = add_op(r, CUDA_V_ROPE);
    uint32_t i = 0;
    op->x = number(r, x);
    op->heads = heads;
    if (rope->head_dim % 8 || rope->head_dim > CUDA_MAX_HEAD_DIM ||
        x.cols != heads * rope->head_dim) {
        fail(r, BATON_ERR_UNSUPPORTED, "heads to rotate must be multiples of 8, at most 256");
        return;
    }
    while (i < out->n_ropes &&
           (out->ropes[i].head_dim != rope->head_dim ||
            memcmp(out->ropes[i].inv_freq, rope->inv_freq, rope->head_dim / 2 * sizeof(float))))
        i++;
    if (i == CUDA_MAX_ROPES) {
        fail(r, BATON_ERR_UNSUPPORTED, "more than 4 kinds of rotation");
        return;
    }
    out->ropes[i] = *rope;
    if (i == out->n_ropes)
        out->n_ropes++;
    op->rope = i;
}

static void v_append(struct device_run *r, uint32_t layer, struct device_array k,
                     struct device_array v)
{
    struct cuda_op *op = add_op(r, CUDA_V_APPEND);
    op->x = number(r, k);
    op->z = number(r, v);
    op->layer = layer;
    if (layer >= ((struct recorder *)r)->out->n_layers || layer >= CUDA_MAX_LAYERS)
        fail(r, BATON_ERR_INTERNAL, "a layer beyond the graph's");
}

static void v_attend(struct device_run *r, struct device_array o, struct device_array q,
                     const struct device_attn *a)
{
    struct cuda_op *op = add_op(r, CUDA_V_ATTEND);
    op->y = number(r, o);
    op->x = number(r, q);
    op->attn = *a;
    if (!cuda_attend_has(a->head_dim))
        fail(r, BATON_ERR_UNSUPPORTED, "attention has heads of 32, 64, 80, 96, 128 and 256");
    else if (q.cols != a->q_heads * a->head_dim || o.cols != q.cols || a->q_heads % a->kv_heads)
        fail(r, BATON_ERR_INTERNAL, "attention over arrays of another shape");
}

static void v_add(struct device_run *r, struct device_array x, struct device_array y)
{
    struct cuda_op *op = add_op(r, CUDA_V_ADD);
    op->x = number(r, x);
    op->y = number(r, y);
}

static void v_gate(struct device_run *r, struct device_array y, struct device_array gate,
                   struct device_array up, enum device_act act)
{
    struct cuda_op *op = add_op(r, CUDA_V_GATE);
    op->y = number(r, y);
    op->x = number(r, gate);
    op->z = number(r, up);
    op->act = (int)act;
}

static void v_layer_done(struct device_run *r, uint32_t layer)
{
    add_op(r, CUDA_V_LAYER_DONE)->layer = layer;
}

static void v_logits(struct device_run *r, struct device_array x, const struct device_weight *w)
{
    struct cuda_op *op = add_op(r, CUDA_V_LOGITS);
    op->x = number(r, x);
    weight(r, op, w, DEVICE_MATRIX, 0, x.cols);
}

static const struct device_verbs verbs = {
    .array = v_array,
    .embed = v_embed,
    .norm = v_norm,
    .linear = v_linear,
    .head_norm = v_head_norm,
    .rope = v_rope,
    .kv_append = v_append,
    .attend = v_attend,
    .add = v_add,
    .gate = v_gate,
    .layer_done = v_layer_done,
    .select = v_select,
    .logits = v_logits,
};

int device_cuda_record_open(const struct device_graph *g, struct cuda_record *out,
                            struct baton_error *e)
{
    struct recorder r = {.base = {.verbs = &verbs}, .out = out};
    memset(out, 0, sizeof *out);
    out->n_layers = g->n_layers;
    int rc = g->forward(g->ctx, &r.base, e);
    if (rc)
        device_cuda_record_close(out);
    return rc;
}

void device_cuda_record_close(struct cuda_record *r)
{
    free(r->ops);
    r->ops = NULL;
}
