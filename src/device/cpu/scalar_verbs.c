/* SPDX-License-Identifier: Apache-2.0 */
/* cpu:ref: every verb but attend, in the plainest form that is still bearable to wait for.
 *
 * Each output element is one sum, in double, in the order of its index; it depends on its own row
 * and on absolute positions alone, which is what makes the device row-invariant. Products of two
 * float32 are exact in double, so the bits are the same with and without fused multiply-add. Work
 * is spread over rows and outputs, never inside a sum. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "device/cpu/scalar_priv.h"

void device_ref_fail(struct device_run *r, int code, const char *fmt, ...)
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

bool device_ref_shape(struct device_run *r, const char *verb, struct device_array a, uint64_t cols)
{
    if (r->error.code)
        return false;
    if (a.data && a.rows == r->batch->n_rows && a.cols == cols)
        return true;
    device_ref_fail(r, BATON_ERR_INTERNAL, "%s: array is [%u, %u], wanted [%u, %llu]", verb, a.rows,
                    a.cols, r->batch->n_rows, (unsigned long long)cols);
    return false;
}

/* A weight has `rows` (0: any) and `cols`. */
static bool weight_shape(struct device_run *r, const char *verb, const struct ref_weight *w,
                         uint32_t rows, uint32_t cols)
{
    if (r->error.code)
        return false;
    if (w && w->cols == cols && (rows == 0 || w->rows == rows))
        return true;
    device_ref_fail(r, BATON_ERR_INTERNAL, "%s: weight %s is [%u, %u], wanted [%u, %u]", verb,
                    w ? w->name : "(none)", w ? w->rows : 0, w ? w->cols : 0, rows, cols);
    return false;
}

static const struct ref_weight *weight_of(const struct device_weight *w)
{
    return (const struct ref_weight *)w;
}

static float *row_of(struct device_array a, uint32_t i)
{
    return (float *)a.data + (size_t)i * a.cols;
}

/* ---- arrays ------------------------------------------------------------------------------- */

/* Starts as NaN, so that reading what no verb wrote shows in the logits. */
static struct device_array new_array(struct device_run *r, uint32_t rows, uint32_t cols)
{
    struct device_array a = {NULL, rows, cols};
    size_t n = (size_t)rows * cols;
    if (r->error.code)
        return a;
    a.data = base_arena_alloc(((struct ref_run *)r)->arena, n ? n : 1, sizeof(float), &r->error);
    for (size_t i = 0; a.data && i < n; i++)
        ((float *)a.data)[i] = NAN;
    return a;
}

static struct device_array ref_array(struct device_run *r, uint32_t cols)
{
    return new_array(r, r->batch->n_rows, cols);
}

static struct device_array ref_select(struct device_run *r, struct device_array x)
{
    const struct baton_batch *b = r->batch;
    struct device_array y = new_array(r, b->n_logits, x.cols);
    if (!device_ref_shape(r, "select", x, x.cols))
        return y;
    for (uint32_t i = 0; i < y.rows; i++)
        memcpy(row_of(y, i), row_of(x, b->logit_rows[i]), x.cols * sizeof(float));
    return y;
}

/* ---- rows --------------------------------------------------------------------------------- */

static void ref_embed(struct device_run *r, struct device_array y,
                      const struct device_weight *table, float scale)
{
    const struct ref_weight *w = weight_of(table);
    if (!device_ref_shape(r, "embed", y, y.cols) ||
        !weight_shape(r, "embed", w, r->program->graph.vocab, y.cols))
        return;
    for (uint32_t i = 0; i < y.rows; i++)
        for (uint32_t j = 0; j < y.cols; j++)
            row_of(y, i)[j] = w->data[(size_t)r->batch->ids[i] * w->cols + j] * scale;
}

/* RMSNorm (Zhang and Sennrich 2019, eq. 4), rounded to float32 once. */
static void norm_row(float *y, const float *x, const float *w, uint32_t n, float eps, float offset)
{
    double sum = 0;
    for (uint32_t j = 0; j < n; j++)
        sum += (double)x[j] * x[j];
    double inverse = 1.0 / sqrt(sum / n + eps);
    for (uint32_t j = 0; j < n; j++)
        y[j] = (float)(x[j] * inverse * ((double)offset + w[j]));
}

static void ref_norm(struct device_run *r, struct device_array y, struct device_array x,
                     const struct device_weight *weight, float eps, float offset)
{
    const struct ref_weight *w = weight_of(weight);
    if (!device_ref_shape(r, "norm", x, x.cols) || !device_ref_shape(r, "norm", y, x.cols) ||
        !weight_shape(r, "norm", w, 1, x.cols))
        return;
    for (uint32_t i = 0; i < x.rows; i++)
        norm_row(row_of(y, i), row_of(x, i), w->data, x.cols, eps, offset);
}

static void ref_head_norm(struct device_run *r, struct device_array x, uint32_t heads,
                          const struct device_weight *weight, float eps, float offset)
{
    const struct ref_weight *w = weight_of(weight);
    uint32_t head_dim = heads ? x.cols / heads : 0;
    if (!device_ref_shape(r, "head_norm", x, (uint64_t)heads * head_dim) ||
        !weight_shape(r, "head_norm", w, 1, head_dim))
        return;
    for (uint32_t i = 0; i < x.rows; i++)
        for (uint32_t h = 0; h < heads; h++) {
            float *head = row_of(x, i) + (size_t)h * head_dim;
            norm_row(head, head, w->data, head_dim, eps, offset);
        }
}

static void rotate_row(float *x, uint32_t heads, const struct device_rope *rope, uint32_t position)
{
    uint32_t half = rope->head_dim / 2;
    for (uint32_t i = 0; i < half; i++) {
        float angle = (float)position * rope->inv_freq[i];
        float c = (float)cos((double)angle), s = (float)sin((double)angle);
        for (uint32_t h = 0; h < heads; h++) {
            float *head = x + (size_t)h * rope->head_dim;
            float a = head[i], b = head[i + half];
            head[i] = a * c - b * s;
            head[i + half] = b * c + a * s;
        }
    }
}

static void ref_rope(struct device_run *r, struct device_array x, uint32_t heads,
                     const struct device_rope *rope)
{
    if (!device_ref_shape(r, "rope", x, (uint64_t)heads * rope->head_dim))
        return;
    for (uint32_t s = 0; s < r->batch->n_spans; s++) {
        const struct baton_span *span = &r->batch->spans[s];
        for (uint32_t i = 0; i < span->n_rows; i++)
            rotate_row(row_of(x, span->row + i), heads, rope, span->position + i);
    }
}

static void ref_add(struct device_run *r, struct device_array x, struct device_array y)
{
    if (!device_ref_shape(r, "add", x, x.cols) || !device_ref_shape(r, "add", y, x.cols))
        return;
    for (size_t i = 0; i < (size_t)x.rows * x.cols; i++)
        ((float *)x.data)[i] += ((const float *)y.data)[i];
}

static double activate(double x, enum device_act act)
{
    if (act == DEVICE_SILU)
        return x / (1.0 + exp(-x));
    return 0.5 * x * (1.0 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
}

struct gate_job {
    struct device_array y, gate, up;
    enum device_act act;
};

static void gate_row(void *ctx, unsigned i)
{
    const struct gate_job *job = ctx;
    float *y = row_of(job->y, i);
    const float *g = row_of(job->gate, i), *u = row_of(job->up, i);
    for (uint32_t j = 0; j < job->y.cols; j++)
        y[j] = (float)(activate(g[j], job->act) * u[j]);
}

static void ref_gate(struct device_run *r, struct device_array y, struct device_array gate,
                     struct device_array up, enum device_act act)
{
    struct gate_job job = {y, gate, up, act};
    if (!device_ref_shape(r, "gate", y, y.cols) || !device_ref_shape(r, "gate", gate, y.cols) ||
        !device_ref_shape(r, "gate", up, y.cols))
        return;
    if (act != DEVICE_SILU && act != DEVICE_GELU_TANH) {
        device_ref_fail(r, BATON_ERR_INTERNAL, "gate: no activation %d", (int)act);
        return;
    }
    base_pool_run(((struct ref_run *)r)->pool, gate_row, &job, y.rows);
}

/* ---- linear maps -------------------------------------------------------------------------- */

#define OUTPUTS 16u /* outputs that one item of work computes, for all rows */

struct linear_job {
    const float *x, *w, *bias; /* [rows, k], [m, k], [m] or NULL */
    float *y;                  /* [rows, m] */
    uint32_t rows, k, m;
};

/* Four outputs side by side, only so that the processor can add four sums at a time: each is the
 * sum over k in the order of k, as if alone. */
static void dot4(const float *x, const float *const w[4], uint32_t n, double sum[4])
{
    double s0 = 0, s1 = 0, s2 = 0, s3 = 0;
    for (uint32_t k = 0; k < n; k++) {
        double v = x[k];
        s0 += v * w[0][k];
        s1 += v * w[1][k];
        s2 += v * w[2][k];
        s3 += v * w[3][k];
    }
    sum[0] = s0;
    sum[1] = s1;
    sum[2] = s2;
    sum[3] = s3;
}

/* Outputs [item*OUTPUTS, ...) of every row. Past the last output dot4 repeats it. */
static void linear_item(void *ctx, unsigned item)
{
    const struct linear_job *job = ctx;
    uint32_t end = job->m - item * OUTPUTS < OUTPUTS ? job->m : (item + 1) * OUTPUTS;
    for (uint32_t i = 0; i < job->rows; i++)
        for (uint32_t j = item * OUTPUTS; j < end; j += 4) {
            const float *w[4];
            double sum[4];
            for (uint32_t t = 0; t < 4; t++)
                w[t] = job->w + (size_t)(j + t < end ? j + t : end - 1) * job->k;
            dot4(job->x + (size_t)i * job->k, w, job->k, sum);
            for (uint32_t t = 0; t < 4 && j + t < end; t++)
                job->y[(size_t)i * job->m + j + t] = (float)(sum[t] +
                                                             (job->bias ? job->bias[j + t] : 0.0f));
        }
}

static void run_linear(struct device_run *r, struct linear_job *job)
{
    base_pool_run(((struct ref_run *)r)->pool, linear_item, job, (job->m + OUTPUTS - 1) / OUTPUTS);
}

static void ref_linear(struct device_run *r, struct device_array y, struct device_array x,
                       const struct device_weight *weight, const struct device_weight *bias)
{
    const struct ref_weight *w = weight_of(weight), *b = weight_of(bias);
    if (!device_ref_shape(r, "linear", x, x.cols) || !device_ref_shape(r, "linear", y, y.cols) ||
        !weight_shape(r, "linear", w, y.cols, x.cols) ||
        (b && !weight_shape(r, "linear", b, 1, y.cols)))
        return;
    struct linear_job job = {x.data, w->data, b ? b->data : NULL, y.data, x.rows, x.cols, y.cols};
    run_linear(r, &job);
}

static void ref_logits(struct device_run *r, struct device_array x,
                       const struct device_weight *weight)
{
    const struct ref_weight *w = weight_of(weight);
    const struct baton_batch *b = r->batch;
    if (!weight_shape(r, "logits", w, r->program->graph.vocab, x.cols))
        return;
    if (!x.data || x.rows != b->n_logits) {
        device_ref_fail(r, BATON_ERR_INTERNAL, "logits: array of %u rows, the batch wants %u",
                        x.rows, b->n_logits);
        return;
    }
    struct linear_job job = {x.data, w->data, NULL, b->logits, x.rows, x.cols, w->rows};
    run_linear(r, &job);
}

/* ---- layers ------------------------------------------------------------------------------- */

static void ref_layer_done(struct device_run *r, uint32_t layer)
{
    if (r->error.code == 0 && r->batch->layer_done)
        r->batch->layer_done(r->batch->ctx, layer);
}

const struct device_verbs device_ref_verbs = {
    .array = ref_array,
    .embed = ref_embed,
    .norm = ref_norm,
    .linear = ref_linear,
    .head_norm = ref_head_norm,
    .rope = ref_rope,
    .kv_append = device_ref_kv_append,
    .attend = device_ref_attend,
    .add = ref_add,
    .gate = ref_gate,
    .layer_done = ref_layer_done,
    .select = ref_select,
    .logits = ref_logits,
};
