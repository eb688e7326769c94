/* SPDX-License-Identifier: Apache-2.0 */
/* One step of a plan onto the stream, for many rows or for few. */
#include <string.h>

#include "device/cuda/cuda_priv.h"

static struct cuda_array *array_of(struct cuda_run *r, uint8_t i)
{
    return &r->p->plan.array[i];
}

static float *wide_of(struct cuda_run *r, uint8_t i)
{
    return r->flipped[i] ? array_of(r, i)->other : array_of(r, i)->data;
}

/* The bf16 form of an array: itself, or the copy that a step made. */
static cuda_bf16 *narrow_of(struct cuda_run *r, uint8_t i)
{
    struct cuda_array *a = array_of(r, i);
    if (a->wide)
        return a->copy;
    return (cuda_bf16 *)array_of(r, a->home)->data + a->at;
}

static uint32_t rows_of(struct cuda_run *r, uint8_t i)
{
    return array_of(r, i)->selected ? r->b->n_logits : r->b->n_rows;
}

/* ---- products ----------------------------------------------------------------------------- */

static int small_product(struct cuda_run *r, const struct cuda_step *s, struct baton_error *e)
{
    const struct cuda_array *x = array_of(r, s->x), *y = array_of(r, s->y);
    struct cuda_gemv g = {.w = s->w->matrix,
                          .x = narrow_of(r, s->x),
                          .ldx = x->ld,
                          .m = s->m,
                          .k = s->w->cols,
                          .bias = s->bias,
                          .rows = rows_of(r, s->x),
                          .ldy = y->ld};
    g.y = y->wide ? (void *)wide_of(r, s->y) : (void *)narrow_of(r, s->y);
    g.epilogue = s->add ? CUDA_ADD_F32 : y->wide ? CUDA_STORE_F32 : CUDA_STORE_BF16;
    if (s->norm) {
        g.xf = wide_of(r, s->norm->x);
        g.ldx = array_of(r, s->norm->x)->ld;
        g.g = s->norm->w->vector;
        g.eps = s->norm->eps;
        g.offset = s->norm->offset;
    }
    if (s->norm && s->norm->kind == CUDA_S_NORM_ADD_NORM) {
        g.yf = wide_of(r, s->norm->y);
        g.gf = s->norm->w->vector;
        g.g = s->norm->w2->vector;
        r->flipped[s->norm->x] = !r->flipped[s->norm->x];
        g.sum = wide_of(r, s->norm->x);
    }
    if (s->gate) {
        g.m /= 2;
        g.epilogue = CUDA_GATE;
        g.act = s->gate->act;
    }
    return device_cuda_check(cuda_gemv(r->at, &g, r->d->limits), "a product", e);
}

static int product(struct cuda_run *r, const struct cuda_step *s, struct baton_error *e)
{
    const struct cuda_array *y = array_of(r, s->y);
    uint32_t rows = rows_of(r, s->x);
    void *to = y->wide ? (void *)wide_of(r, s->y) : (void *)narrow_of(r, s->y);
    if (rows <= CUDA_DECODE_ROWS && r->decode)
        return small_product(r, s, e);
    int rc = device_cuda_matmul(
        r->d->matmul, r->at.stream, to, y->ld, y->wide, s->add, narrow_of(r, s->x),
        array_of(r, s->x)->wide ? array_of(r, s->x)->cols : array_of(r, s->x)->ld, s->w->matrix,
        rows, s->m, s->w->cols, e);
    if (rc == 0 && s->bias)
        rc = device_cuda_check(cuda_bias(r->at, to, !y->wide, y->ld, s->bias, rows, s->m), "a bias",
                               e);
    return rc;
}

/* Rows of logits are few, in prefill too: the same kernel, hence the same bits, up to 8. */
static int logits(struct cuda_run *r, const struct cuda_step *s, struct baton_error *e)
{
    uint32_t rows = r->b->n_logits, vocab = s->w->rows;
    struct cuda_gemv g = {.w = s->w->matrix,
                          .x = narrow_of(r, s->x),
                          .ldx = array_of(r, s->x)->ld,
                          .m = vocab,
                          .k = s->w->cols,
                          .y = r->p->logits,
                          .ldy = vocab,
                          .rows = rows,
                          .epilogue = CUDA_STORE_F32};
    if (rows == 0)
        return 0;
    if (rows > CUDA_DECODE_ROWS)
        return device_cuda_matmul(r->d->matmul, r->at.stream, r->p->logits, vocab, true, false, g.x,
                                  g.ldx, g.w, rows, vocab, g.k, e);
    return device_cuda_check(cuda_gemv(r->at, &g, r->d->limits), "logits", e);
}

/* ---- attention ---------------------------------------------------------------------------- */

static int layer_done(struct cuda_run *r, uint32_t layer, struct baton_error *e)
{
    return r->exports ? device_cuda_export_layer(r, layer, e) : 0;
}

static uint32_t head_parts(struct cuda_run *r, const struct cuda_step *s,
                           struct cuda_head_part part[3])
{
    uint32_t dim = s->head_dim ? s->head_dim : r->b->spans[0].kv[s->layer].layout->head_dim;
    for (int i = 0; i < 3; i++) {
        if (i == 0 && !s->part[0].heads)
            continue; /* no queries */
        part[i].x = narrow_of(r, s->part[i].array);
        part[i].ld = array_of(r, s->part[i].array)->ld;
        part[i].heads = array_of(r, s->part[i].array)->cols / dim;
        part[i].norm = s->part[i].norm ? s->part[i].norm->vector : NULL;
        part[i].cs = s->part[i].rope >= 0 ? r->p->angles[s->part[i].rope] : NULL;
        part[i].eps = s->part[i].eps;
        part[i].offset = s->part[i].offset;
    }
    return dim;
}

static int heads(struct cuda_run *r, const struct cuda_step *s, struct baton_error *e)
{
    struct cuda_head_part part[3] = {0};
    if (s->late && r->decode)
        return 0;
    uint32_t dim = head_parts(r, s, part);
    return device_cuda_check(
        cuda_heads(r->at, part[0], part[1], part[2], dim, r->p->pages[s->layer], r->rows), "heads",
        e);
}

static int attend(struct cuda_run *r, const struct cuda_step *s, struct baton_error *e)
{
    const struct cuda_array *q = array_of(r, s->x), *o = array_of(r, s->y);
    struct cuda_attention a = {.q = narrow_of(r, s->x),
                               .o = narrow_of(r, s->y),
                               .ldq = q->wide ? q->cols : q->ld,
                               .ldo = o->ld,
                               .q_heads = s->attn.q_heads,
                               .kv_heads = s->attn.kv_heads,
                               .head_dim = s->attn.head_dim,
                               .window = s->attn.window,
                               .scale = s->attn.scale,
                               .pages = r->p->pages[s->attn.layer]};
    int rc = 0;
    if (r->decode && s->heads) {
        struct cuda_head_part part[3] = {0};
        head_parts(r, s->heads, part);
        rc = device_cuda_check(cuda_attend_step(r->at, &a, part, r->rows), "attention", e);
        return rc ? rc : layer_done(r, s->layer, e);
    }
    if (r->decode) {
        uint32_t splits = r->splits[a.window ? 1 : 0];
        return device_cuda_check(cuda_attend_decode(r->at, &a, r->p->partials, r->rows, splits),
                                 "attention", e);
    }
    for (uint32_t i = 0; rc == 0 && i < r->b->n_spans; i++) {
        const struct baton_span *p = &r->b->spans[i];
        rc = device_cuda_check(
            cuda_attend_prefill(r->at, &a, r->rows, i, p->row, p->n_rows, p->position), "attention",
            e);
    }
    return rc;
}

/* ---- all ---------------------------------------------------------------------------------- */

static int norm(struct cuda_run *r, const struct cuda_step *s, struct baton_error *e)
{
    struct cuda_array *y = array_of(r, s->y);
    uint32_t cols = array_of(r, s->x)->cols;
    return device_cuda_check(cuda_norm(r->at, y->wide ? wide_of(r, s->y) : NULL,
                                       y->wide ? NULL : narrow_of(r, s->y), y->ld, wide_of(r, s->x),
                                       s->w->vector, rows_of(r, s->x), cols, s->eps, s->offset),
                             "a norm", e);
}

static int one_step(struct cuda_run *r, const struct cuda_step *s, struct baton_error *e)
{
    struct cuda_array *x = array_of(r, s->x), *y = array_of(r, s->y);
    uint32_t n = r->b->n_rows;
    if (s->lazy && r->decode)
        return 0;
    switch (s->kind) {
    case CUDA_S_EMBED:
        return device_cuda_check(
            cuda_embed(r->at, wide_of(r, s->y), s->w->matrix, r->rows, y->cols, s->offset),
            "embeddings", e);
    case CUDA_S_NORM:
        return norm(r, s, e);
    case CUDA_S_NORM_ADD_NORM:
        return device_cuda_check(cuda_norm_add_norm(r->at, narrow_of(r, s->z),
                                                    array_of(r, s->z)->ld, wide_of(r, s->x),
                                                    wide_of(r, s->y), s->w->vector, s->w2->vector,
                                                    n, x->cols, s->eps, s->offset),
                                 "norms", e);
    case CUDA_S_LINEAR:
        return product(r, s, e);
    case CUDA_S_GATE:
        if (s->gated && r->decode)
            return 0;
        return device_cuda_check(cuda_gate(r->at, narrow_of(r, s->y), narrow_of(r, s->x),
                                           narrow_of(r, s->z), x->ld, y->ld, n, x->cols, s->act),
                                 "a gate", e);
    case CUDA_S_HEADS:
        return heads(r, s, e);
    case CUDA_S_ATTEND:
        return attend(r, s, e);
    case CUDA_S_ADD:
        return device_cuda_check(cuda_add(r->at, wide_of(r, s->x), wide_of(r, s->y),
                                          (uint64_t)rows_of(r, s->x) * x->cols),
                                 "a sum", e);
    case CUDA_S_LAYER_DONE:
        return s->late && r->decode ? 0 : layer_done(r, s->layer, e);
    case CUDA_S_SELECT:
        if (r->b->n_logits == 0)
            return 0;
        return device_cuda_check(cuda_select(r->at, narrow_of(r, s->y), narrow_of(r, s->x),
                                             x->wide ? x->cols : x->ld, r->rows, r->b->n_logits,
                                             x->cols),
                                 "selected rows", e);
    case CUDA_S_LOGITS:
        return logits(r, s, e);
    case CUDA_S_NARROW:
        return device_cuda_check(
            cuda_narrow(r->at, x->copy, wide_of(r, s->x), (uint64_t)rows_of(r, s->x) * x->cols),
            "a conversion", e);
    }
    return 0;
}

int device_cuda_steps(struct cuda_run *r, struct baton_error *e)
{
    const struct cuda_plan *p = &r->p->plan;
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < p->n_ropes; i++)
        rc = device_cuda_check(cuda_angles(r->at, r->p->angles[i], p->inv_freq + 128 * i,
                                           p->ropes[i].head_dim / 2, r->rows),
                               "rotation angles", e);
    struct cuda_profile *profile = device_cuda_profile_open(r);
    for (uint32_t i = 0; rc == 0 && i < p->n_steps; i++) {
        device_cuda_profile_step(profile, r, i);
        rc = one_step(r, &p->steps[i], e);
    }
    device_cuda_profile_close(profile, r);
    return rc;
}
