/* SPDX-License-Identifier: Apache-2.0 */
/* cpu: programs, runs, and the verbs that work row by row. */
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/cpu/cpu_priv.h"

/* ---- runs --------------------------------------------------------------------------------- */

void device_cpu_fail(struct device_run *r, int code, const char *fmt, ...)
{
    char text[sizeof r->error.text];
    va_list ap;
    if (r->error.code) /* the first one counts */
        return;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    base_fail(&r->error, code, "%s", text);
}

bool device_cpu_shape(struct device_run *r, const char *verb, struct device_array a, uint32_t rows,
                      uint64_t cols)
{
    if (r->error.code)
        return false;
    if (a.data && a.rows == rows && a.cols == cols)
        return true;
    device_cpu_fail(r, BATON_ERR_INTERNAL, "%s: array is [%u, %u], wanted [%u, %llu]", verb, a.rows,
                    a.cols, rows, (unsigned long long)cols);
    return false;
}

/* A weight is of a kind and [rows, cols]. */
static bool weight_fits(struct device_run *r, const char *verb, const struct device_weight *base,
                        unsigned kind, uint32_t rows, uint32_t cols)
{
    const struct cpu_weight *w = (const struct cpu_weight *)base;
    if (r->error.code)
        return false;
    if (w && (w->kind & kind) && w->rows == rows && w->cols == cols)
        return true;
    device_cpu_fail(r, BATON_ERR_INTERNAL,
                    "%s: weight %s of kind %u is [%u, %u], wanted %u, [%u, %u]", verb,
                    w ? w->name : "(none)", w ? w->kind : 0, w ? w->rows : 0, w ? w->cols : 0, kind,
                    rows, cols);
    return false;
}

static const float *vector_of(const struct device_weight *w)
{
    return w ? ((const struct cpu_weight *)w)->vector : NULL;
}

static float *row_of(struct device_array a, uint32_t i)
{
    return (float *)a.data + (size_t)i * a.cols;
}

/* ---- the pool ----------------------------------------------------------------------------- */

/* The pool runs one loop a worker, each with scratch of its own; the loops take items one by one,
 * so that a worker that the system took off its core delays one item, not its share. */
struct claim {
    cpu_item_fn fn;
    void *ctx;
    unsigned n;
    atomic_uint next;
    struct cpu_program *program;
};

static void claim_items(void *ctx, unsigned worker)
{
    struct claim *c = ctx;
    void *scratch = (uint8_t *)c->program->scratch + worker * c->program->scratch_bytes;
    unsigned i;
    while ((i = atomic_fetch_add_explicit(&c->next, 1, memory_order_relaxed)) < c->n)
        c->fn(c->ctx, i, scratch);
}

void device_cpu_parallel(struct cpu_run *r, cpu_item_fn fn, void *ctx, unsigned n)
{
    struct claim c = {.fn = fn, .ctx = ctx, .n = n, .program = r->program};
    unsigned threads = base_pool_threads(r->device->pool);
    base_pool_run(r->device->pool, claim_items, &c, n < threads ? n : threads);
}

/* Elements below which a verb runs on the caller's thread alone. */
#define SMALL_VERB 16384u

/* Row by row over the pool: fn gets a row as its item. */
struct rows_job {
    cpu_item_fn fn;
    void *ctx;
    uint32_t rows, rows_item;
};

static void rows_item(void *ctx, unsigned item, void *scratch)
{
    struct rows_job *job = ctx;
    uint32_t i = item * job->rows_item, end = i + job->rows_item;
    for (; i < end && i < job->rows; i++)
        job->fn(job->ctx, i, scratch);
}

static void each_row(struct device_run *r, cpu_item_fn fn, void *ctx, uint32_t rows, uint32_t cols)
{
    struct cpu_run *run = (struct cpu_run *)r;
    uint32_t threads = base_pool_threads(run->device->pool);
    struct rows_job job = {fn, ctx, rows, rows};
    if ((uint64_t)rows * cols >= SMALL_VERB)
        job.rows_item = (rows + 4 * threads - 1) / (4 * threads);
    if (rows > 0)
        device_cpu_parallel(run, rows_item, &job, (rows + job.rows_item - 1) / job.rows_item);
}

/* ---- arrays ------------------------------------------------------------------------------- */

static struct device_array new_array(struct device_run *r, uint32_t rows, uint32_t cols)
{
    struct cpu_run *run = (struct cpu_run *)r;
    struct device_array a = {NULL, rows, cols};
    size_t n = ((size_t)rows * cols + 15u) / 16u * 16u; /* 64-byte aligned rows where cols allow */
    if (r->error.code)
        return a;
    if (n > run->program->n_arrays - run->used) {
        device_cpu_fail(r, BATON_ERR_INTERNAL, "array of %u columns: the graph said %u in all",
                        cols, r->program->graph.scratch_cols);
        return a;
    }
    a.data = run->program->arrays + run->used;
    run->used += n;
    return a;
}

static struct device_array cpu_array(struct device_run *r, uint32_t cols)
{
    return new_array(r, r->batch->n_rows, cols);
}

static struct device_array cpu_select(struct device_run *r, struct device_array x)
{
    const struct baton_batch *b = r->batch;
    struct device_array y = new_array(r, b->n_logits, x.cols);
    if (!device_cpu_shape(r, "select", x, b->n_rows, x.cols))
        return y;
    for (uint32_t i = 0; i < y.rows; i++)
        memcpy(row_of(y, i), row_of(x, b->logit_rows[i]), x.cols * sizeof(float));
    return y;
}

/* ---- row verbs ---------------------------------------------------------------------------- */

struct row_job {
    const struct cpu_run *run;
    struct device_array y, x, z;
    const struct cpu_weight *w;
    const struct cpu_angles *angles;
    uint32_t heads;
    float eps, offset; /* embed: offset is the scale */
    enum device_act act;
};

static void embed_row(void *ctx, unsigned i, void *scratch)
{
    const struct row_job *job = ctx;
    float *y = row_of(job->y, i);
    device_cpu_weight_row(job->w, job->run->kernels->order, (uint32_t)job->run->base.batch->ids[i],
                          y);
    for (uint32_t j = 0; j < job->y.cols; j++)
        y[j] *= job->offset;
}

static void cpu_embed(struct device_run *r, struct device_array y,
                      const struct device_weight *table, float scale)
{
    struct row_job job = {.run = (struct cpu_run *)r, .y = y, .offset = scale};
    if (!device_cpu_shape(r, "embed", y, r->batch->n_rows, y.cols) ||
        !weight_fits(r, "embed", table, DEVICE_TABLE, r->program->graph.vocab, y.cols))
        return;
    job.w = (const struct cpu_weight *)table;
    each_row(r, embed_row, &job, y.rows, y.cols);
}

static void norm_row(void *ctx, unsigned i, void *scratch)
{
    const struct row_job *job = ctx;
    uint32_t n = job->x.cols / job->heads;
    for (uint32_t h = 0; h < job->heads; h++)
        job->run->kernels->norm(row_of(job->y, i) + (size_t)h * n,
                                row_of(job->x, i) + (size_t)h * n, job->w->vector, n, job->eps,
                                job->offset);
}

static void cpu_norm(struct device_run *r, struct device_array y, struct device_array x,
                     const struct device_weight *w, float eps, float offset)
{
    struct row_job job = {.run = (struct cpu_run *)r,
                          .y = y,
                          .x = x,
                          .heads = 1,
                          .eps = eps,
                          .offset = offset,
                          .w = (const struct cpu_weight *)w};
    if (device_cpu_shape(r, "norm", x, x.rows, x.cols) &&
        device_cpu_shape(r, "norm", y, x.rows, x.cols) &&
        weight_fits(r, "norm", w, DEVICE_VECTOR, 1, x.cols))
        each_row(r, norm_row, &job, x.rows, x.cols);
}

static void cpu_head_norm(struct device_run *r, struct device_array x, uint32_t heads,
                          const struct device_weight *w, float eps, float offset)
{
    struct row_job job = {.run = (struct cpu_run *)r,
                          .y = x,
                          .x = x,
                          .heads = heads,
                          .eps = eps,
                          .offset = offset,
                          .w = (const struct cpu_weight *)w};
    uint32_t head_dim = heads ? x.cols / heads : 0;
    if (device_cpu_shape(r, "head_norm", x, x.rows, (uint64_t)heads * head_dim) &&
        weight_fits(r, "head_norm", w, DEVICE_VECTOR, 1, head_dim))
        each_row(r, norm_row, &job, x.rows, x.cols);
}

static void add_row(void *ctx, unsigned i, void *scratch)
{
    const struct row_job *job = ctx;
    job->run->kernels->add(row_of(job->x, i), row_of(job->y, i), job->x.cols);
}

static void cpu_add(struct device_run *r, struct device_array x, struct device_array y)
{
    struct row_job job = {.run = (struct cpu_run *)r, .y = y, .x = x};
    if (device_cpu_shape(r, "add", x, x.rows, x.cols) &&
        device_cpu_shape(r, "add", y, x.rows, x.cols))
        each_row(r, add_row, &job, x.rows, x.cols);
}

static void gate_row(void *ctx, unsigned i, void *scratch)
{
    const struct row_job *job = ctx;
    job->run->kernels->gate(row_of(job->y, i), row_of(job->x, i), row_of(job->z, i), job->y.cols,
                            job->act);
}

static void cpu_gate(struct device_run *r, struct device_array y, struct device_array gate,
                     struct device_array up, enum device_act act)
{
    struct row_job job = {.run = (struct cpu_run *)r, .y = y, .x = gate, .z = up, .act = act};
    if (!device_cpu_shape(r, "gate", y, y.rows, y.cols) ||
        !device_cpu_shape(r, "gate", gate, y.rows, y.cols) ||
        !device_cpu_shape(r, "gate", up, y.rows, y.cols))
        return;
    if (act != DEVICE_SILU && act != DEVICE_GELU_TANH) {
        device_cpu_fail(r, BATON_ERR_INTERNAL, "gate: no activation %d", (int)act);
        return;
    }
    each_row(r, gate_row, &job, y.rows, 4 * y.cols); /* an exponential is four simple elements */
}

/* ---- rotation ----------------------------------------------------------------------------- */

static uint32_t position_of(const struct baton_batch *b, uint32_t row)
{
    const struct baton_span *s = b->spans;
    while (row >= s->row + s->n_rows)
        s++;
    return s->position + (row - s->row);
}

static void angle_row(void *ctx, unsigned i, void *scratch)
{
    const struct row_job *job = ctx;
    const struct device_rope *rope = &job->angles->rope;
    uint32_t half = rope->head_dim / 2, position = position_of(job->run->base.batch, i);
    float *c = job->angles->cosine + (size_t)i * half, *s = job->angles->sine + (size_t)i * half;
    for (uint32_t n = 0; n < half; n++) {
        float angle = (float)position * rope->inv_freq[n];
        c[n] = (float)cos((double)angle);
        s[n] = (float)sin((double)angle);
    }
}

/* The table of a rope, made at its first use in the run. */
static const struct cpu_angles *angles_of(struct device_run *r, const struct device_rope *rope)
{
    struct cpu_run *run = (struct cpu_run *)r;
    struct cpu_program *p = run->program;
    size_t used = rope->head_dim / 2 * sizeof(float);
    for (uint32_t i = 0; i < run->n_angles; i++)
        if (p->angles[i].rope.head_dim == rope->head_dim &&
            !memcmp(p->angles[i].rope.inv_freq, rope->inv_freq, used))
            return &p->angles[i];
    if (run->n_angles == CPU_MAX_ROPES) /* more kinds than any model has: the last place again */
        run->n_angles--;
    struct cpu_angles *a = &p->angles[run->n_angles++];
    a->rope = *rope;
    struct row_job job = {.run = run, .angles = a};
    each_row(r, angle_row, &job, r->batch->n_rows, 8 * rope->head_dim); /* libm is slow */
    return a;
}

static void rope_row(void *ctx, unsigned i, void *scratch)
{
    const struct row_job *job = ctx;
    uint32_t half = job->angles->rope.head_dim / 2;
    job->run->kernels->rope(row_of(job->x, i), job->heads, half,
                            job->angles->cosine + (size_t)i * half,
                            job->angles->sine + (size_t)i * half);
}

static void cpu_rope(struct device_run *r, struct device_array x, uint32_t heads,
                     const struct device_rope *rope)
{
    struct row_job job = {.run = (struct cpu_run *)r, .x = x, .heads = heads};
    if (!device_cpu_shape(r, "rope", x, r->batch->n_rows, (uint64_t)heads * rope->head_dim))
        return;
    if (rope->head_dim > CPU_MAX_HEAD_DIM || rope->head_dim % 2) {
        device_cpu_fail(r, BATON_ERR_UNSUPPORTED,
                        "rope: heads of %u elements; cpu rotates even ones up to %u",
                        rope->head_dim, CPU_MAX_HEAD_DIM);
        return;
    }
    job.angles = angles_of(r, rope);
    each_row(r, rope_row, &job, x.rows, x.cols);
}

/* ---- linear maps -------------------------------------------------------------------------- */

static void cpu_linear(struct device_run *r, struct device_array y, struct device_array x,
                       const struct device_weight *w, const struct device_weight *b)
{
    if (device_cpu_shape(r, "linear", x, x.rows, x.cols) &&
        device_cpu_shape(r, "linear", y, x.rows, y.cols) &&
        weight_fits(r, "linear", w, DEVICE_MATRIX, y.cols, x.cols) &&
        (!b || weight_fits(r, "linear", b, DEVICE_VECTOR, 1, y.cols)))
        device_cpu_linear_run((struct cpu_run *)r, y.data, x.data, x.rows,
                              (const struct cpu_weight *)w, vector_of(b));
}

static void cpu_logits(struct device_run *r, struct device_array x, const struct device_weight *w)
{
    const struct baton_batch *b = r->batch;
    if (device_cpu_shape(r, "logits", x, b->n_logits, x.cols) &&
        weight_fits(r, "logits", w, DEVICE_MATRIX, r->program->graph.vocab, x.cols))
        device_cpu_linear_run((struct cpu_run *)r, b->logits, x.data, x.rows,
                              (const struct cpu_weight *)w, NULL);
}

static void cpu_layer_done(struct device_run *r, uint32_t layer)
{
    if (r->error.code == 0 && r->batch->layer_done)
        r->batch->layer_done(r->batch->ctx, layer);
}

static const struct device_verbs verbs = {
    .array = cpu_array,
    .embed = cpu_embed,
    .norm = cpu_norm,
    .linear = cpu_linear,
    .head_norm = cpu_head_norm,
    .rope = cpu_rope,
    .kv_append = device_cpu_kv_append,
    .attend = device_cpu_attend,
    .add = cpu_add,
    .gate = cpu_gate,
    .layer_done = cpu_layer_done,
    .select = cpu_select,
    .logits = cpu_logits,
};

/* ---- programs ----------------------------------------------------------------------------- */

#define TABLE_FLOATS (2 * CPU_MAX_ROWS * (CPU_MAX_HEAD_DIM / 2)) /* cosine and sine of a rope */
#define TABLES_BYTES (CPU_MAX_ROPES * TABLE_FLOATS * sizeof(float))

/* Scratch of one worker: two partials and the kernel's own for the largest attention item. */
static size_t scratch_bytes(void)
{
    size_t partial = CPU_ATTEND_ROWS * (CPU_MAX_HEAD_DIM + 2) + 16;
    size_t n = 2 * partial * sizeof(float) + cpu_attend_scratch(CPU_ATTEND_ROWS, CPU_MAX_HEAD_DIM);
    return (n + 4095u) / 4096u * 4096u;
}

/* Arrays of the forward function, the selected rows, and rounding of up to 64 arrays. */
static bool size_arrays(struct cpu_program *p)
{
    size_t cols = (size_t)p->base.graph.scratch_cols + p->base.graph.max_cols;
    return base_mul(cols, CPU_MAX_ROWS, &p->n_arrays) &&
           base_add(p->n_arrays, 64 * 16, &p->n_arrays) &&
           base_mul((size_t)p->base.graph.max_cols + 2, CPU_MAX_ROWS * sizeof(float), &p->a_bytes);
}

/* Zeroed memory into *place unless an earlier attempt got it; what is there is closed with the
 * program, so a failure half-way needs no unwinding. */
static bool get(float **place, size_t bytes, struct baton_error *e)
{
    if (!*place)
        *place = base_map_alloc(bytes, false, e);
    return *place != NULL;
}

static int allocate(struct cpu_program *p, unsigned n_threads, struct baton_error *e)
{
    p->n_threads = n_threads;
    if (!size_arrays(p))
        return base_fail(e, BATON_ERR_NOMEM, "a graph of %u scratch columns does not fit memory",
                         p->base.graph.scratch_cols);
    if (!get(&p->arrays, p->n_arrays * sizeof(float), e) || !get(&p->a, p->a_bytes, e) ||
        !get(&p->scratch, p->scratch_bytes * n_threads, e) || !get(&p->tables, TABLES_BYTES, e))
        return BATON_ERR_NOMEM;
    for (unsigned i = 0; i < CPU_MAX_ROPES; i++) {
        p->angles[i].cosine = p->tables + (size_t)i * TABLE_FLOATS;
        p->angles[i].sine = p->angles[i].cosine + TABLE_FLOATS / 2;
    }
    p->ready = true;
    return 0;
}

int device_cpu_program_open(struct device *d, const struct device_graph *g,
                            struct device_program **out, struct baton_error *e)
{
    struct cpu_program *p = base_try_alloc(1, sizeof *p, e);
    if (!p)
        return BATON_ERR_NOMEM;
    p->base.device = d;
    p->base.graph = *g;
    p->scratch_bytes = scratch_bytes();
    *out = &p->base;
    return 0;
}

void device_cpu_program_close(struct device_program *base)
{
    struct cpu_program *p = (struct cpu_program *)base;
    base_map_free(p->arrays, p->n_arrays * sizeof(float));
    base_map_free(p->a, p->a_bytes);
    base_map_free(p->scratch, p->scratch_bytes * p->n_threads);
    base_map_free(p->tables, TABLES_BYTES);
    free(p->partials);
    free(p);
}

int device_cpu_submit(struct device_program *base, const struct baton_batch *b, uint64_t *id,
                      struct baton_error *e)
{
    struct cpu_program *p = (struct cpu_program *)base;
    struct cpu_device *d = (struct cpu_device *)base->device;
    struct cpu_run run = {.base = {.verbs = &verbs, .batch = b, .program = base},
                          .device = d,
                          .kernels = d->kernels,
                          .program = p};
    if (!d->pool)
        return base_fail(e, BATON_ERR_USAGE, "cpu was not started");
    if (!p->ready) {
        int rc = allocate(p, base_pool_threads(d->pool), e);
        if (rc)
            return rc;
    }
    int rc = base->graph.forward(base->graph.ctx, &run.base, e);
    if (rc == 0 && id)
        *id = 0;
    return rc;
}
