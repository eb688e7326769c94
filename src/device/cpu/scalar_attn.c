/* SPDX-License-Identifier: Apache-2.0 */
/* cpu:ref: the two verbs that touch the cache. Keys and values are found through the strides of
 * the layout record alone, so any paged layout is read and written. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "device/cpu/scalar_priv.h"

/* ---- elements ----------------------------------------------------------------------------- */

/* Address of element (position, head, 0); the formula of baton/device.h. */
static uint8_t *kv_address(const struct baton_kv_view *v, uint8_t *base, uint32_t head,
                           uint32_t position)
{
    const struct baton_kv_layout *l = v->layout;
    uint32_t block = l->block ? position / l->block : 0;
    uint32_t row = l->block ? position % l->block : position;
    return base + v->blocks[block] * l->stride_block + head * l->stride_head +
           row * l->stride_position;
}

static void kv_store(const struct baton_kv_view *v, uint8_t *base, uint32_t head, uint32_t position,
                     const float *x)
{
    const struct baton_kv_layout *l = v->layout;
    uint8_t *p = kv_address(v, base, head, position);
    for (uint32_t d = 0; d < l->head_dim; d++, p += l->stride_dim) {
        uint16_t half = device_f32_to_bf16(x[d]);
        if (l->dtype == BATON_F32)
            memcpy(p, &x[d], sizeof x[d]);
        else
            memcpy(p, &half, sizeof half);
    }
}

/* The head_dim elements as float32: in place where they lie so, else widened into buf. */
static const float *kv_load(const struct baton_kv_view *v, uint8_t *base, uint32_t head,
                            uint32_t position, float *buf)
{
    const struct baton_kv_layout *l = v->layout;
    const uint8_t *p = kv_address(v, base, head, position);
    if (l->dtype == BATON_F32 && l->stride_dim == sizeof(float) &&
        (uintptr_t)p % sizeof(float) == 0)
        return (const float *)(const void *)p;
    for (uint32_t d = 0; d < l->head_dim; d++, p += l->stride_dim) {
        uint16_t half;
        if (l->dtype == BATON_F32) {
            memcpy(&buf[d], p, sizeof buf[d]);
        } else {
            memcpy(&half, p, sizeof half);
            buf[d] = device_bf16_to_f32(half);
        }
    }
    return buf;
}

/* ---- append ------------------------------------------------------------------------------- */

/* The layout of `layer`, whose heads are the same in all spans; NULL with the error noted. */
static const struct baton_kv_layout *layer_layout(struct device_run *r, const char *verb,
                                                  uint32_t layer, uint32_t kv_cols)
{
    const struct baton_kv_layout *first = NULL;
    if (layer >= r->program->graph.n_layers) {
        device_ref_fail(r, BATON_ERR_INTERNAL, "%s: layer %u of %u", verb, layer,
                        r->program->graph.n_layers);
        return NULL;
    }
    for (uint32_t s = 0; s < r->batch->n_spans; s++) {
        const struct baton_kv_layout *l = r->batch->spans[s].kv[layer].layout;
        first = first ? first : l;
        if ((uint64_t)l->kv_heads * l->head_dim != kv_cols || l->head_dim != first->head_dim) {
            device_ref_fail(
                r, BATON_ERR_MISMATCH,
                "%s: layer %u of span %u holds %u heads of %u elements, wanted %u columns", verb,
                layer, s, l->kv_heads, l->head_dim, kv_cols);
            return NULL;
        }
    }
    return first;
}

void device_ref_kv_append(struct device_run *r, uint32_t layer, struct device_array k,
                          struct device_array v)
{
    if (!device_ref_shape(r, "kv_append", k, k.cols) ||
        !device_ref_shape(r, "kv_append", v, k.cols))
        return;
    const struct baton_kv_layout *l = layer_layout(r, "kv_append", layer, k.cols);
    if (!l)
        return;
    for (uint32_t s = 0; s < r->batch->n_spans; s++) {
        const struct baton_span *span = &r->batch->spans[s];
        const struct baton_kv_view *view = &span->kv[layer];
        for (uint32_t i = 0; i < span->n_rows; i++)
            for (uint32_t h = 0; h < l->kv_heads; h++) {
                size_t at = (size_t)(span->row + i) * k.cols + (size_t)h * l->head_dim;
                kv_store(view, view->k, h, span->position + i, (const float *)k.data + at);
                kv_store(view, view->v, h, span->position + i, (const float *)v.data + at);
            }
    }
}

/* ---- attend ------------------------------------------------------------------------------- */

/* Work is cut into a few tasks with scratch of their own; task t takes the (row, head) pairs
 * t, t + n_tasks, ... so that long and short rows mix. */
struct attend_job {
    const struct baton_batch *batch;
    const struct device_attn *attn;
    struct device_array o, q;
    unsigned n_tasks;
    size_t visible;  /* most positions that one query sees */
    double *weights; /* [n_tasks, visible] */
    double *sums;    /* [n_tasks, head_dim] */
    float *widened;  /* [n_tasks, head_dim] */
};

static uint32_t first_visible(uint32_t position, uint32_t window)
{
    return window && position >= window ? position - window + 1 : 0;
}

/* softmax(scale q k^T) v for one row and one head over [first, position]: all scores, their
 * maximum, weights and their sum, and then the weighted sum of the values; the order is that of the
 * positions. Divided and rounded to float32 once, at the end. */
static void attend_one(const struct attend_job *job, const struct baton_kv_view *view,
                       uint32_t position, uint32_t kv_head, const float *q, float *o, unsigned task)
{
    const struct device_attn *a = job->attn;
    uint32_t first = first_visible(position, a->window), n = position - first + 1;
    double *weights = job->weights + task * job->visible, *sums = job->sums + task * a->head_dim;
    float *buf = job->widened + (size_t)task * a->head_dim;
    double max = -INFINITY, total = 0;

    for (uint32_t j = 0; j < n; j++) {
        const float *k = kv_load(view, view->k, kv_head, first + j, buf);
        double dot = 0;
        for (uint32_t d = 0; d < a->head_dim; d++)
            dot += (double)q[d] * k[d];
        weights[j] = dot * a->scale;
        if (weights[j] > max)
            max = weights[j];
    }
    for (uint32_t d = 0; d < a->head_dim; d++)
        sums[d] = 0;
    for (uint32_t j = 0; j < n; j++) {
        const float *v = kv_load(view, view->v, kv_head, first + j, buf);
        double weight = exp(weights[j] - max);
        total += weight;
        for (uint32_t d = 0; d < a->head_dim; d++)
            sums[d] += weight * v[d];
    }
    for (uint32_t d = 0; d < a->head_dim; d++)
        o[d] = (float)(sums[d] / total);
}

static void attend_task(void *ctx, unsigned task)
{
    const struct attend_job *job = ctx;
    const struct device_attn *a = job->attn;
    const struct baton_span *span = job->batch->spans;
    uint64_t n = (uint64_t)job->batch->n_rows * a->q_heads;
    for (uint64_t item = task; item < n; item += job->n_tasks) {
        uint32_t row = (uint32_t)(item / a->q_heads), head = (uint32_t)(item % a->q_heads);
        size_t at = (size_t)item * a->head_dim;
        while (row >= span->row + span->n_rows)
            span++;
        attend_one(job, &span->kv[a->layer], span->position + (row - span->row),
                   head / (a->q_heads / a->kv_heads), (const float *)job->q.data + at,
                   (float *)job->o.data + at, task);
    }
}

/* Every position that a row of the span sees is held and has a block. */
static bool span_held(struct device_run *r, const struct baton_span *s, const struct device_attn *a)
{
    const struct baton_kv_view *v = &s->kv[a->layer];
    uint32_t first = first_visible(s->position, a->window), block = v->layout->block;
    for (uint32_t p = first; p < s->position + s->n_rows; p++)
        if (p < v->first || v->blocks[block ? p / block : 0] < 0) {
            device_ref_fail(
                r, BATON_ERR_USAGE,
                "attend: layer %u does not hold position %u, which the query at %u sees", a->layer,
                p, s->position);
            return false;
        }
    return true;
}

static bool attend_check(struct device_run *r, struct device_array o, struct device_array q,
                         const struct device_attn *a)
{
    uint64_t cols = (uint64_t)a->q_heads * a->head_dim;
    if (!device_ref_shape(r, "attend", q, cols) || !device_ref_shape(r, "attend", o, cols))
        return false;
    if (a->kv_heads == 0 || a->q_heads % a->kv_heads) {
        device_ref_fail(r, BATON_ERR_INTERNAL, "attend: %u query heads share %u key heads",
                        a->q_heads, a->kv_heads);
        return false;
    }
    const struct baton_kv_layout *l = layer_layout(r, "attend", a->layer,
                                                   a->kv_heads * a->head_dim);
    if (!l)
        return false;
    if (l->head_dim != a->head_dim) {
        device_ref_fail(r, BATON_ERR_MISMATCH,
                        "attend: layer %u holds heads of %u elements, wanted %u", a->layer,
                        l->head_dim, a->head_dim);
        return false;
    }
    for (uint32_t s = 0; s < r->batch->n_spans; s++)
        if (!span_held(r, &r->batch->spans[s], a))
            return false;
    return true;
}

static size_t most_visible(const struct baton_batch *b, uint32_t window)
{
    size_t most = 1;
    for (uint32_t s = 0; s < b->n_spans; s++) {
        size_t end = (size_t)b->spans[s].position + b->spans[s].n_rows;
        size_t n = window && end > window ? window : end;
        most = n > most ? n : most;
    }
    return most;
}

void device_ref_attend(struct device_run *r, struct device_array o, struct device_array q,
                       const struct device_attn *a)
{
    struct base_pool *pool = ((struct ref_run *)r)->pool;
    struct attend_job job = {.batch = r->batch, .attn = a, .o = o, .q = q};
    if (!attend_check(r, o, q, a))
        return;
    job.n_tasks = 4 * base_pool_threads(pool);
    job.visible = most_visible(r->batch, a->window);
    job.weights = base_try_alloc(job.n_tasks * job.visible, sizeof *job.weights, &r->error);
    job.sums = base_try_alloc((size_t)job.n_tasks * a->head_dim, sizeof *job.sums, &r->error);
    job.widened = base_try_alloc((size_t)job.n_tasks * a->head_dim, sizeof *job.widened, &r->error);
    if (job.weights && job.sums && job.widened)
        base_pool_run(pool, attend_task, &job, job.n_tasks);
    free(job.weights);
    free(job.sums);
    free(job.widened);
}
