/* SPDX-License-Identifier: Apache-2.0 */
/* An artifact from anywhere, and its body alone, which no hash keeps from the parser: an artifact,
 * or a reason. A tensor is read with its strides inside itself, or refused. */
#include <stdlib.h>
#include <string.h>

#include "device/npu/artifact_priv.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool holds)
{
    if (!holds)
        abort();
}

static void weights(const struct npu_artifact *a)
{
    for (uint32_t i = 0; i < a->n_weights; i++) {
        const struct npu_artifact_weight *w = &a->weights[i];
        struct baton_error e = {0};
        struct baton_tensor t = {.name = w->name, .dtype = w->dtype, .n_dims = w->n_dims};
        uint64_t width = w->dtype == BATON_F32 ? 4 : 2, end = width;
        int64_t stride[2] = {0};
        memcpy(t.shape, w->shape, sizeof w->shape);
        t.stride[0] = (int64_t)(w->n_dims == 2 ? w->shape[1] * width : width);
        t.stride[1] = w->n_dims == 2 ? (int64_t)width : 0;
        if (device_npu_artifact_weight(a, &t, true, stride, &e))
            continue;
        for (uint32_t k = 0; k < t.n_dims; k++)
            end += (t.shape[k] - 1) * (uint64_t)stride[k];
        must(end <= t.shape[0] * (t.n_dims == 2 ? t.shape[1] : 1) * width);
    }
}

static void take(int rc, struct npu_artifact *a, const struct baton_error *e)
{
    must(rc ? !a && e->text[0] : a->n_weights > 0 && a->geometry.layers > 0);
    if (rc == 0)
        weights(a);
    device_npu_artifact_close(a);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct baton_error e = {0};
    struct npu_artifact *a = NULL, *b = NULL;
    char *text = malloc(n + 1);
    if (!text)
        return 0;
    memcpy(text, data, n);
    text[n] = '\0';
    int rc = device_npu_artifact_parse(text, n, "fuzz", &a, &e);
    take(rc, a, &e);
    rc = device_npu_artifact_body(text, n, "fuzz", &b, &e);
    take(rc, b, &e);
    free(text);
    return 0;
}
