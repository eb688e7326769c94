/* SPDX-License-Identifier: Apache-2.0 */
/* A bench for verbs: one device, one program whose forward function is the test's own, weights with
 * known values, arrays between guard bytes. */
#ifndef TESTS_DEVICE_RIG_H
#define TESTS_DEVICE_RIG_H

#include "device/device_priv.h"

#include "pages.h"

struct rig;
typedef void (*rig_body)(struct rig *t, const struct device_verbs *v, struct device_run *r);

struct rig {
    uint64_t seed;
    struct device *device;
    struct device_program *program;
    struct baton_error error;
    rig_body body;
    void *arg; /* the test's */
};

static inline int rig_forward(const void *ctx, struct device_run *r, struct baton_error *e)
{
    struct rig *t = (struct rig *)(uintptr_t)ctx;
    t->body(t, device_run_verbs(r), r);
    return device_run_end(r, e);
}

static inline void rig_open(struct rig *t, const char *device, unsigned n_threads,
                            uint32_t n_layers, uint32_t vocab)
{
    test_ok(device_open(device, &t->device, &t->error), &t->error);
    test_ok(device_start(t->device, n_threads, &t->error), &t->error);
    struct device_graph g = {rig_forward, t, n_layers, vocab, 4096, 4096};
    test_ok(device_program_open(t->device, &g, &t->program, &t->error), &t->error);
}

static inline void rig_close(struct rig *t)
{
    device_program_close(t->program);
    device_close(t->device);
}

/* Run `body` on a batch; the result of submit and wait. */
static inline int rig_run(struct rig *t, rig_body body, void *arg, const struct baton_batch *b)
{
    uint64_t id = 0;
    t->body = body;
    t->arg = arg;
    int rc = device_submit(t->program, b, &id, &t->error);
    return rc ? rc : device_wait(t->program, id, UINT64_MAX, &t->error);
}

/* ---- arrays ------------------------------------------------------------------------------- */

#define RIG_GUARD 24u /* floats before and after */

static inline struct device_array rig_array(uint32_t rows, uint32_t cols)
{
    size_t n = (size_t)rows * cols;
    float *p = malloc((n + 2 * RIG_GUARD) * sizeof *p);
    assert_non_null(p);
    memset(p, 0xA5, (n + 2 * RIG_GUARD) * sizeof *p);
    memset(p + RIG_GUARD, 0xFF, n * sizeof *p); /* NaN */
    return (struct device_array){p + RIG_GUARD, rows, cols};
}

static inline struct device_array rig_random(struct rig *t, uint32_t rows, uint32_t cols)
{
    struct device_array a = rig_array(rows, cols);
    for (size_t i = 0; i < (size_t)rows * cols; i++)
        ((float *)a.data)[i] = test_normal(&t->seed);
    return a;
}

/* Row i, column j. */
static inline float *rig_at(struct device_array a, uint32_t i, uint32_t j)
{
    return (float *)a.data + (size_t)i * a.cols + j;
}

/* The guards are whole. */
static inline void rig_guards(struct device_array a)
{
    const uint8_t *before = (const uint8_t *)((float *)a.data - RIG_GUARD);
    const uint8_t *after = (const uint8_t *)((float *)a.data + (size_t)a.rows * a.cols);
    for (size_t i = 0; i < RIG_GUARD * sizeof(float); i++)
        assert_true(before[i] == 0xA5 && after[i] == 0xA5);
}

static inline void rig_free(struct device_array a)
{
    rig_guards(a);
    free((float *)a.data - RIG_GUARD);
}

static inline void rig_near(double got, double want, double tolerance)
{
    if (!(fabs(got - want) <= tolerance))
        fail_msg("got %.9g, wanted %.9g within %.3g", got, want, tolerance);
}

/* ---- weights ------------------------------------------------------------------------------ */

struct rig_weight {
    struct device_weight *w;
    float *values; /* [rows, cols], as the checkpoint holds them */
    uint32_t rows, cols;
};

/* A random number that the dtype holds exactly, and its bytes. */
static inline float rig_element(struct rig *t, uint32_t dtype, uint8_t *to)
{
    float x = test_normal(&t->seed);
    uint16_t half;
    if (dtype == BATON_F32) {
        memcpy(to, &x, 4);
        return x;
    }
    half = dtype == BATON_BF16
               ? device_f32_to_bf16(x)
               : (uint16_t)(test_random(&t->seed) % 0x4000u | (x < 0 ? 0x8000u : 0)); /* |x| < 2 */
    memcpy(to, &half, 2);
    return dtype == BATON_BF16 ? device_bf16_to_f32(half) : device_f16_to_f32(half);
}

/* Bind random values with odd strides, then destroy the source. rows 0: a vector of cols. */
static inline struct rig_weight rig_weight(struct rig *t, uint32_t rows, uint32_t cols,
                                           unsigned kind)
{
    static const uint32_t dtypes[] = {BATON_F32, BATON_F16, BATON_BF16};
    struct rig_weight w = {.rows = rows ? rows : 1, .cols = cols};
    struct baton_tensor tensor = {.name = "test.weight", .n_dims = rows ? 2 : 1};
    tensor.dtype = dtypes[test_range(&t->seed, 0, 2)];
    int64_t element = tensor.dtype == BATON_F32 ? 4 : 2, pad = test_range(&t->seed, 0, 3);
    bool transposed = rows && test_range(&t->seed, 0, 1);
    int64_t row = transposed ? element : element * (cols + pad);
    int64_t col = transposed ? element * (rows + pad) : element;
    size_t bytes = (size_t)(transposed ? col * cols : row * w.rows);
    uint8_t *source = malloc(bytes);
    w.values = malloc((size_t)w.rows * cols * sizeof(float));
    assert_true(source && w.values);
    memset(source, 0xFF, bytes);
    for (uint32_t i = 0; i < w.rows; i++)
        for (uint32_t j = 0; j < cols; j++)
            w.values[(size_t)i * cols + j] = rig_element(t, tensor.dtype,
                                                         source + i * row + j * col);
    tensor.data = source;
    tensor.shape[0] = rows ? rows : cols;
    tensor.shape[1] = rows ? cols : 0;
    tensor.stride[0] = rows ? row : col;
    tensor.stride[1] = rows ? col : 0;
    test_ok(device_weight_bind(t->device, &tensor, kind, &w.w, &t->error), &t->error);
    memset(source, 0xFF, bytes);
    free(source);
    return w;
}

static inline void rig_weight_free(struct rig *t, struct rig_weight *w)
{
    device_weight_close(t->device, w->w);
    free(w->values);
}

#endif
