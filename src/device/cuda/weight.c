/* SPDX-License-Identifier: Apache-2.0 */
/* Weights: matrices and tables as bf16, vectors as float32, in the checkpoint's order. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/cuda/cuda_priv.h"

#define PIECE ((size_t)4 << 20) /* elements that pass the pinned memory at a time */

static float element(const struct baton_tensor *t, const uint8_t *at)
{
    uint16_t h;
    float f;
    if (t->dtype == BATON_F32) {
        memcpy(&f, at, 4);
        return f;
    }
    memcpy(&h, at, 2);
    return t->dtype == BATON_BF16 ? device_bf16_to_f32(h) : device_f16_to_f32(h);
}

/* Elements [first, first + n) in row-major order, as bf16 or float32. */
static void convert(const struct baton_tensor *t, uint64_t first, size_t n, void *out, bool wide)
{
    uint64_t cols = t->n_dims == 2 ? t->shape[1] : 1;
    const uint8_t *base = t->data;
    bool dense = t->dtype == BATON_BF16 && !wide && t->n_dims == 2 && t->stride[1] == 2 &&
                 t->stride[0] == (int64_t)(2 * cols);
    if (dense) {
        memcpy(out, base + 2 * first, 2 * n);
        return;
    }
    for (size_t i = 0; i < n; i++) {
        uint64_t row = (first + i) / cols, col = (first + i) % cols;
        float f = element(t, base + (int64_t)row * t->stride[0] +
                                 (t->n_dims == 2 ? (int64_t)col * t->stride[1] : 0));
        if (wide)
            ((float *)out)[i] = f;
        else
            ((uint16_t *)out)[i] = device_f32_to_bf16(f);
    }
}

/* Through pinned memory in two halves: one is filled while the other travels. */
static int upload(struct cuda_device *d, const struct baton_tensor *t, uint64_t n, void *to,
                  bool wide, struct baton_error *e)
{
    size_t width = wide ? 4 : 2, piece = PIECE / 2;
    cudaEvent_t sent[2];
    int rc = device_cuda_check(cudaEventCreateWithFlags(&sent[0], cudaEventDisableTiming),
                               "an event", e);
    if (rc)
        return rc;
    rc = device_cuda_check(cudaEventCreateWithFlags(&sent[1], cudaEventDisableTiming), "an event",
                           e);
    if (rc) {
        cudaEventDestroy(sent[0]);
        return rc;
    }
    for (uint64_t i = 0, turn = 0; rc == 0 && i < n; i += piece, turn++) {
        size_t many = n - i < piece ? (size_t)(n - i) : piece;
        uint8_t *half = (uint8_t *)d->bounce + (turn & 1) * piece * 4;
        if (turn > 1)
            rc = device_cuda_check(cudaEventSynchronize(sent[turn & 1]), "an upload", e);
        if (rc == 0)
            convert(t, i, many, half, wide);
        if (rc == 0)
            rc = device_cuda_check(cudaMemcpyAsync((uint8_t *)to + i * width, half, many * width,
                                                   cudaMemcpyHostToDevice, d->copy),
                                   "an upload", e);
        if (rc == 0)
            rc = device_cuda_check(cudaEventRecord(sent[turn & 1], d->copy), "an upload", e);
    }
    if (rc == 0)
        rc = device_cuda_check(cudaStreamSynchronize(d->copy), "an upload", e);
    cudaEventDestroy(sent[0]);
    cudaEventDestroy(sent[1]);
    return rc;
}

static int slab_open(size_t bytes, struct cuda_slab **out, struct baton_error *e)
{
    struct cuda_slab *s = base_try_alloc(1, sizeof *s, e);
    if (!s)
        return BATON_ERR_NOMEM;
    int rc = device_cuda_check(cudaMalloc(&s->data, bytes), "weights", e);
    if (rc) {
        free(s);
        return rc;
    }
    s->refs = 1;
    *out = s;
    return 0;
}

static void slab_put(struct cuda_slab *s)
{
    if (s && --s->refs == 0) {
        cudaFree(s->data);
        free(s);
    }
}

int device_cuda_weight_bind(struct device *base, const struct baton_tensor *t, unsigned kind,
                            struct device_weight **out, struct baton_error *e)
{
    struct cuda_device *d = (struct cuda_device *)base;
    bool vector = kind == DEVICE_VECTOR;
    uint64_t rows = vector ? 1 : t->shape[0], cols = vector ? t->shape[0] : t->shape[1];
    if (!vector && cols % 8)
        return base_fail(e, BATON_ERR_UNSUPPORTED,
                         "tensor %s has rows of %llu elements; cuda wants multiples of 8", t->name,
                         (unsigned long long)cols);
    struct cuda_weight *w = base_try_alloc(1, sizeof *w, e);
    if (!w)
        return BATON_ERR_NOMEM;
    w->base.impl = base->impl;
    snprintf(w->name, sizeof w->name, "%s", t->name);
    w->kind = kind;
    w->rows = (uint32_t)rows;
    w->cols = (uint32_t)cols;
    int rc = slab_open(rows * cols * (vector ? 4 : 2), &w->slab, e);
    if (rc == 0) {
        if (vector)
            w->vector = w->slab->data;
        else
            w->matrix = w->slab->data;
        rc = upload(d, t, rows * cols, w->slab->data, vector, e);
    }
    if (rc) {
        device_cuda_weight_close(base, &w->base);
        return rc;
    }
    *out = &w->base;
    return 0;
}

void device_cuda_weight_close(struct device *d, struct device_weight *base)
{
    struct cuda_weight *w = (struct cuda_weight *)base;
    slab_put(w->slab);
    free(w);
    (void)d;
}

uint64_t device_cuda_weight_bytes(const struct device_weight *base)
{
    const struct cuda_weight *w = (const struct cuda_weight *)base;
    return (uint64_t)w->rows * w->cols * (w->vector ? 4 : 2);
}

static bool joined(struct cuda_weight *const *w, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++)
        if (w[i]->slab != w[0]->slab ||
            w[i]->matrix != w[i - 1]->matrix + (size_t)w[i - 1]->rows * w[i - 1]->cols)
            return false;
    return true;
}

int device_cuda_weight_join(struct cuda_device *d, struct cuda_weight *const *w, uint32_t n,
                            struct baton_error *e)
{
    struct cuda_slab *slab;
    size_t bytes = 0, at = 0;
    if (joined(w, n))
        return 0;
    for (uint32_t i = 0; i < n; i++)
        bytes += (size_t)w[i]->rows * w[i]->cols * 2;
    int rc = slab_open(bytes, &slab, e);
    if (rc)
        return rc;
    for (uint32_t i = 0; rc == 0 && i < n; i++) {
        size_t one = (size_t)w[i]->rows * w[i]->cols * 2;
        rc = device_cuda_check(cudaMemcpyAsync((uint8_t *)slab->data + at, w[i]->matrix, one,
                                               cudaMemcpyDeviceToDevice, d->copy),
                               "joining weights", e);
        at += one;
    }
    if (rc == 0)
        rc = device_cuda_check(cudaStreamSynchronize(d->copy), "joining weights", e);
    at = 0;
    for (uint32_t i = 0; rc == 0 && i < n; i++) {
        slab_put(w[i]->slab);
        w[i]->slab = slab;
        slab->refs++;
        w[i]->matrix = (cuda_bf16 *)((uint8_t *)slab->data + at);
        at += (size_t)w[i]->rows * w[i]->cols * 2;
    }
    slab_put(slab);
    return rc;
}
