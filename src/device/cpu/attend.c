/* SPDX-License-Identifier: Apache-2.0 */
/* cpu: the two verbs that touch the cache, and how attention is spread over the pool.
 *
 * An item is (span, kv head, block of rows): the query heads that share the kv head and the rows
 * of the block share each widened tile. Where there are fewer items than threads and a long
 * context (a decode step), the segments of one item are computed by different threads and combined
 * in the order in which one thread would have.
 */
#include <stdlib.h>
#include <string.h>

#include "device/cpu/cpu_priv.h"

#define SEGMENT_POSITIONS (CPU_SEGMENT * CPU_TILE)

/* ---- the cache ---------------------------------------------------------------------------- */

/* Pages as the kernels read them: bf16 [head][64][dim], nothing between two rows. */
static bool layout_fits(struct device_run *r, const char *verb, uint32_t layer, uint32_t kv_heads,
                        uint32_t head_dim)
{
    if (layer >= r->program->graph.n_layers) {
        device_cpu_fail(r, BATON_ERR_INTERNAL, "%s: layer %u of %u", verb, layer,
                        r->program->graph.n_layers);
        return false;
    }
    for (uint32_t s = 0; s < r->batch->n_spans; s++) {
        const struct baton_kv_layout *l = r->batch->spans[s].kv[layer].layout;
        if (l->kv_heads != kv_heads || l->head_dim != head_dim) {
            device_cpu_fail(
                r, BATON_ERR_MISMATCH,
                "%s: layer %u of span %u holds %u heads of %u elements, the model has %u of %u",
                verb, layer, s, l->kv_heads, l->head_dim, kv_heads, head_dim);
            return false;
        }
        if (l->block != CPU_TILE || l->dtype != BATON_BF16 || l->stride_dim != 2 ||
            l->stride_position != 2 * (int64_t)head_dim || l->stride_head % 2 ||
            l->stride_block % 2) {
            device_cpu_fail(
                r, BATON_ERR_UNSUPPORTED,
                "%s: layer %u: cpu reads pages of 64 positions, bf16, [head][position][dim]", verb,
                layer);
            return false;
        }
    }
    return true;
}

void device_cpu_kv_append(struct device_run *r, uint32_t layer, struct device_array k,
                          struct device_array v)
{
    const struct cpu_kernels *kernels = ((struct cpu_run *)r)->kernels;
    uint32_t n_rows = r->batch->n_rows;
    if (!device_cpu_shape(r, "kv_append", k, n_rows, k.cols) ||
        !device_cpu_shape(r, "kv_append", v, n_rows, k.cols))
        return;
    uint32_t checked = layer < r->program->graph.n_layers ? layer : 0;
    const struct baton_kv_layout *l = r->batch->spans[0].kv[checked].layout;
    if (!layout_fits(r, "kv_append", layer, l->kv_heads, l->head_dim))
        return;
    if ((uint64_t)l->kv_heads * l->head_dim != k.cols) {
        device_cpu_fail(
            r, BATON_ERR_MISMATCH,
            "kv_append: layer %u holds %u heads of %u elements, the model has %u columns", layer,
            l->kv_heads, l->head_dim, k.cols);
        return;
    }
    for (uint32_t s = 0; s < r->batch->n_spans; s++) {
        const struct baton_span *span = &r->batch->spans[s];
        const struct baton_kv_view *view = &span->kv[layer];
        for (uint32_t i = 0; i < span->n_rows; i++) {
            uint32_t p = span->position + i;
            int64_t at = view->blocks[p / CPU_TILE] * view->layout->stride_block +
                         p % CPU_TILE * view->layout->stride_position;
            for (uint32_t h = 0; h < l->kv_heads; h++, at += view->layout->stride_head) {
                size_t from = (size_t)(span->row + i) * k.cols + (size_t)h * l->head_dim;
                kernels->narrow((uint16_t *)(void *)(view->k + at), (float *)k.data + from,
                                l->head_dim);
                kernels->narrow((uint16_t *)(void *)(view->v + at), (float *)v.data + from,
                                l->head_dim);
            }
        }
    }
}

/* ---- attention ---------------------------------------------------------------------------- */

struct job {
    struct cpu_run *run;
    const struct device_attn *attn;
    float *o;
    const float *q;
    uint32_t group;      /* query heads a kv head */
    uint32_t rows_item;  /* rows of one item at most */
    uint32_t n_items;    /* (span, kv head, block of rows) */
    uint32_t n_segments; /* split: places for partials of one item; else 0 */
    size_t partial;      /* split: floats of one partial */
};

static uint32_t first_visible(uint32_t position, uint32_t window)
{
    return window && position >= window ? position - window + 1 : 0;
}

/* Item `item` of the list: the last rows first, since they see most and long items should not
 * come last. */
static void find_item(const struct job *job, uint32_t item, struct cpu_attend *j, float **out)
{
    const struct device_attn *a = job->attn;
    const struct baton_span *span = job->run->base.batch->spans;
    uint32_t head = item % a->kv_heads, block = item / a->kv_heads, blocks;
    while (block >= (blocks = (span->n_rows + job->rows_item - 1) / job->rows_item)) {
        block -= blocks;
        span++;
    }
    uint32_t r0 = (blocks - 1 - block) * job->rows_item, left = span->n_rows - r0;
    const struct baton_kv_view *view = &span->kv[a->layer];
    size_t cols = (size_t)a->q_heads * a->head_dim;
    size_t at = (span->row + r0) * cols + (size_t)head * job->group * a->head_dim;
    *j = (struct cpu_attend){
        .q = job->q + at,
        .ldq = cols,
        .rows = left < job->rows_item ? left : job->rows_item,
        .group = job->group,
        .dim = a->head_dim,
        .position = span->position + r0,
        .window = a->window,
        .scale = a->scale,
        .k = view->k + head * view->layout->stride_head,
        .v = view->v + head * view->layout->stride_head,
        .blocks = view->blocks,
        .stride_block = view->layout->stride_block,
    };
    *out = job->o + at;
}

/* Lay a partial of `pairs` over floats at `at`; returns what follows it. */
static float *lay_partial(struct cpu_partial *p, float *at, uint32_t pairs, uint32_t dim)
{
    p->ldo = (dim + 15u) / 16u * 16u;
    p->o = at;
    p->m = at + pairs * p->ldo;
    p->l = p->m + pairs;
    return p->l + (pairs + 15u) / 16u * 16u;
}

static void start_total(struct cpu_partial *p, uint32_t pairs)
{
    memset(p->o, 0, pairs * p->ldo * sizeof(float));
    for (uint32_t i = 0; i < pairs; i++) {
        p->m[i] = -__builtin_inff();
        p->l[i] = 0.0f;
    }
}

/* Tiles of segment s that the item sees: [*t0, *t1), empty where none. */
static void segment_tiles(const struct cpu_attend *j, uint32_t s, uint32_t *t0, uint32_t *t1)
{
    cpu_attend_tiles(j, t0, t1);
    *t0 = *t0 > s * CPU_SEGMENT ? *t0 : s * CPU_SEGMENT;
    *t1 = *t1 < (s + 1) * CPU_SEGMENT ? *t1 : (s + 1) * CPU_SEGMENT;
}

static void whole_item(void *ctx, unsigned item, void *scratch)
{
    struct job *job = ctx;
    const struct cpu_kernels *kernels = job->run->kernels;
    struct cpu_attend j;
    struct cpu_partial total, part;
    float *out;
    uint32_t t0, t1;
    find_item(job, item, &j, &out);
    uint32_t pairs = j.rows * j.group, s, end;
    cpu_attend_tiles(&j, &t0, &t1);
    s = t0 / CPU_SEGMENT;
    end = (t1 - 1) / CPU_SEGMENT + 1;
    float *rest = lay_partial(&total, scratch, pairs, j.dim);
    rest = lay_partial(&part, rest, pairs, j.dim);
    start_total(&total, pairs);
    for (; s < end; s++) {
        segment_tiles(&j, s, &t0, &t1);
        kernels->attend(&j, t0, t1, &part, rest);
        kernels->combine(&total, &part, pairs, j.dim);
    }
    kernels->finish(&total, pairs, j.dim, j.group, out, j.ldq);
}

/* ---- split: one segment an item ----------------------------------------------------------- */

/* Segment number n of an item, counted from the first one it sees; NULL where it has none. */
static float *segment_place(const struct job *job, const struct cpu_attend *j, uint32_t item,
                            uint32_t n, uint32_t *t0, uint32_t *t1)
{
    cpu_attend_tiles(j, t0, t1);
    segment_tiles(j, *t0 / CPU_SEGMENT + n, t0, t1);
    if (*t0 >= *t1)
        return NULL;
    return job->run->program->partials + ((size_t)item * job->n_segments + n) * job->partial;
}

static void split_item(void *ctx, unsigned index, void *scratch)
{
    struct job *job = ctx;
    struct cpu_attend j;
    struct cpu_partial part;
    float *out;
    uint32_t item = index / job->n_segments, t0, t1;
    find_item(job, item, &j, &out);
    float *at = segment_place(job, &j, item, index % job->n_segments, &t0, &t1);
    if (!at)
        return;
    lay_partial(&part, at, j.rows * j.group, j.dim);
    job->run->kernels->attend(&j, t0, t1, &part, scratch);
}

static void join_item(void *ctx, unsigned item, void *scratch)
{
    struct job *job = ctx;
    const struct cpu_kernels *kernels = job->run->kernels;
    struct cpu_attend j;
    struct cpu_partial total, part;
    float *out, *at;
    uint32_t t0, t1;
    find_item(job, item, &j, &out);
    uint32_t pairs = j.rows * j.group;
    lay_partial(&total, scratch, pairs, j.dim);
    start_total(&total, pairs);
    for (uint32_t n = 0; n < job->n_segments; n++) {
        at = segment_place(job, &j, item, n, &t0, &t1);
        if (!at)
            break;
        lay_partial(&part, at, pairs, j.dim);
        kernels->combine(&total, &part, pairs, j.dim);
    }
    kernels->finish(&total, pairs, j.dim, j.group, out, j.ldq);
}

/* Most segments that one row block of the batch sees. */
static uint32_t most_segments(const struct job *job)
{
    const struct baton_batch *b = job->run->base.batch;
    uint32_t most = 1;
    for (uint32_t s = 0; s < b->n_spans; s++) {
        uint32_t first = first_visible(b->spans[s].position, job->attn->window);
        uint32_t last = b->spans[s].position + b->spans[s].n_rows - 1;
        uint32_t n = last / SEGMENT_POSITIONS - first / SEGMENT_POSITIONS + 1;
        most = n > most ? n : most;
    }
    return most;
}

/* Memory for the partials of all items; the only thing a run may have to allocate. */
static bool partials_reserve(struct job *job)
{
    struct cpu_program *p = job->run->program;
    struct cpu_partial unused;
    uint32_t pairs = job->rows_item * job->group;
    job->partial = (size_t)(lay_partial(&unused, p->arrays, pairs, job->attn->head_dim) -
                            p->arrays);
    size_t n = (size_t)job->n_items * job->n_segments * job->partial;
    if (n <= p->n_partials)
        return true;
    free(p->partials);
    p->n_partials = 0;
    p->partials = base_try_alloc(n, sizeof(float), &job->run->base.error);
    p->n_partials = p->partials ? n : 0;
    return p->partials != NULL;
}

/* ---- the verb ----------------------------------------------------------------------------- */

/* Every position that a row of the span sees is held and has a block. */
static bool span_held(struct device_run *r, const struct baton_span *s, const struct device_attn *a)
{
    const struct baton_kv_view *v = &s->kv[a->layer];
    uint32_t first = first_visible(s->position, a->window);
    uint32_t end = s->position + s->n_rows;
    bool held = first >= v->first && (end - 1) / CPU_TILE < v->n_blocks;
    for (uint32_t t = first / CPU_TILE; t <= (end - 1) / CPU_TILE && held; t++)
        held = v->blocks[t] >= 0;
    if (!held)
        device_cpu_fail(
            r, BATON_ERR_USAGE,
            "attend: layer %u does not hold all of [%u, %u), which the span's queries see",
            a->layer, first, end);
    return held;
}

static bool attend_fits(struct device_run *r, struct device_array o, struct device_array q,
                        const struct device_attn *a)
{
    uint64_t cols = (uint64_t)a->q_heads * a->head_dim;
    if (!device_cpu_shape(r, "attend", q, r->batch->n_rows, cols) ||
        !device_cpu_shape(r, "attend", o, r->batch->n_rows, cols))
        return false;
    if (a->kv_heads == 0 || a->q_heads % a->kv_heads) {
        device_cpu_fail(r, BATON_ERR_INTERNAL, "attend: %u query heads share %u key heads",
                        a->q_heads, a->kv_heads);
        return false;
    }
    if (a->head_dim > CPU_MAX_HEAD_DIM || a->q_heads / a->kv_heads > CPU_ATTEND_ROWS) {
        device_cpu_fail(r, BATON_ERR_UNSUPPORTED,
                        "attend: heads of %u elements, %u a key head; cpu has up to %u and %u",
                        a->head_dim, a->q_heads / a->kv_heads, CPU_MAX_HEAD_DIM, CPU_ATTEND_ROWS);
        return false;
    }
    if (!layout_fits(r, "attend", a->layer, a->kv_heads, a->head_dim))
        return false;
    for (uint32_t s = 0; s < r->batch->n_spans; s++)
        if (!span_held(r, &r->batch->spans[s], a))
            return false;
    return true;
}

/* Rows of an item: as many pairs as leave its scratch in L2. */
static uint32_t rows_of_item(const struct device_attn *a, uint32_t group)
{
    uint32_t pairs = a->head_dim > 128 ? CPU_ATTEND_ROWS / 2 : CPU_ATTEND_ROWS;
    return pairs > group ? pairs / group : 1;
}

void device_cpu_attend(struct device_run *r, struct device_array o, struct device_array q,
                       const struct device_attn *a)
{
    struct cpu_run *run = (struct cpu_run *)r;
    struct job job = {.run = run, .attn = a, .o = o.data, .q = q.data};
    uint32_t most_rows = 1;
    if (!attend_fits(r, o, q, a))
        return;
    job.group = a->q_heads / a->kv_heads;
    job.rows_item = rows_of_item(a, job.group);
    for (uint32_t s = 0; s < r->batch->n_spans; s++) {
        uint32_t n = r->batch->spans[s].n_rows;
        most_rows = n > most_rows ? n : most_rows;
        job.n_items += (n + job.rows_item - 1) / job.rows_item * a->kv_heads;
    }
    job.n_segments = most_segments(&job);
    if (most_rows > 1 || job.n_segments == 1 ||
        job.n_items >= 2 * base_pool_threads(run->device->pool)) {
        device_cpu_parallel(run, whole_item, &job, job.n_items);
        return;
    }
    job.rows_item = 1;
    if (!partials_reserve(&job))
        return;
    device_cpu_parallel(run, split_item, &job, job.n_items * job.n_segments);
    device_cpu_parallel(run, join_item, &job, job.n_items);
}
