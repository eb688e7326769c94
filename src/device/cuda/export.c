/* SPDX-License-Identifier: Apache-2.0 */
/* A layer's keys and values on their way to the host's pages while later layers compute: order by
 * events between the two streams, which also say when each of it happened on the device. */
#include <stdlib.h>

#include "device/cuda/cuda_priv.h"

struct moments {
    cudaEvent_t computed, copying, copied;
};

struct cuda_export {
    cudaEvent_t begin, end;
    uint64_t begin_ns; /* when begin was put on the idle stream */
    uint32_t n_layers, n_open;
    bool told; /* a run has gone through all of it */
    struct moments at[CUDA_MAX_LAYERS];
};

static int open_events(struct cuda_export *x, struct baton_error *e)
{
    int rc = device_cuda_check(cudaEventCreate(&x->begin), "an event", e);
    if (rc == 0)
        rc = device_cuda_check(cudaEventCreate(&x->end), "an event", e);
    for (; rc == 0 && x->n_open < x->n_layers; x->n_open += rc == 0) {
        struct moments *m = &x->at[x->n_open];
        rc = device_cuda_check(cudaEventCreate(&m->computed), "an event", e);
        if (rc == 0)
            rc = device_cuda_check(cudaEventCreate(&m->copying), "an event", e);
        if (rc == 0)
            rc = device_cuda_check(cudaEventCreate(&m->copied), "an event", e);
    }
    return rc;
}

int device_cuda_export_open(uint32_t n_layers, struct cuda_export **out, struct baton_error *e)
{
    struct cuda_export *x = base_try_alloc(1, sizeof *x, e);
    if (!x)
        return BATON_ERR_NOMEM;
    x->n_layers = n_layers;
    int rc = open_events(x, e);
    if (rc) {
        device_cuda_export_close(x);
        return rc;
    }
    *out = x;
    return 0;
}

static void drop(cudaEvent_t e)
{
    if (e)
        cudaEventDestroy(e);
}

void device_cuda_export_close(struct cuda_export *x)
{
    if (!x)
        return;
    drop(x->begin);
    drop(x->end);
    for (uint32_t i = 0; i < x->n_layers; i++) {
        drop(x->at[i].computed);
        drop(x->at[i].copying);
        drop(x->at[i].copied);
    }
    free(x);
}

int device_cuda_export_begin(struct cuda_run *r, struct baton_error *e)
{
    struct cuda_export *x = r->p->export;
    x->told = false;
    x->begin_ns = base_now_ns();
    return device_cuda_check(cudaEventRecord(x->begin, r->at.stream), "an event", e);
}

int device_cuda_export_end(struct cuda_run *r, struct baton_error *e)
{
    return device_cuda_check(cudaEventRecord(r->p->export->end, r->at.stream), "an event", e);
}

int device_cuda_export_layer(struct cuda_run *r, uint32_t layer, struct baton_error *e)
{
    struct moments *m = &r->p->export->at[layer];
    int rc = device_cuda_check(cudaEventRecord(m->computed, r->at.stream), "an event", e);
    if (rc == 0)
        rc = device_cuda_check(cudaStreamWaitEvent(r->d->copy, m->computed, 0), "an event", e);
    if (rc == 0)
        rc = device_cuda_check(cudaEventRecord(m->copying, r->d->copy), "an event", e);
    for (uint32_t i = 0; rc == 0 && i < r->b->n_spans; i++) {
        const struct baton_span *s = &r->b->spans[i];
        rc = device_cuda_pages_copy(r->d, &s->kv[layer], s->position, s->n_rows, true, r->d->copy,
                                    e);
    }
    return rc ? rc : device_cuda_check(cudaEventRecord(m->copied, r->d->copy), "an event", e);
}

int device_cuda_export_tell(struct cuda_run *r, struct baton_error *e)
{
    struct cuda_export *x = r->p->export;
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < r->p->plan.n_steps; i++) {
        const struct cuda_step *s = &r->p->plan.steps[i];
        if (s->kind != CUDA_S_LAYER_DONE)
            continue;
        rc = device_cuda_check(cudaEventSynchronize(x->at[s->layer].copied),
                               "a copy of the KV cache", e);
        if (rc == 0)
            r->b->layer_done(r->b->ctx, s->layer);
    }
    x->told = rc == 0;
    return rc;
}

/* The host's time of an event: so much after begin. */
static bool moment(const struct cuda_export *x, cudaEvent_t at, uint64_t *ns)
{
    float ms = 0;
    if (cudaEventElapsedTime(&ms, x->begin, at)) {
        cudaGetLastError(); /* a layer that the run did not reach */
        return false;
    }
    *ns = x->begin_ns + (uint64_t)((double)ms * 1e6);
    return true;
}

uint32_t device_cuda_layer_times(struct device_program *base, struct device_layer_time *out,
                                 uint32_t n, uint64_t *end_ns)
{
    const struct cuda_export *x = ((struct cuda_program *)base)->export;
    uint64_t before = x->begin_ns;
    if (!x->told || !moment(x, x->end, end_ns))
        return 0;
    for (uint32_t i = 0; i < x->n_layers && i < n; i++) {
        const struct moments *m = &x->at[i];
        out[i].begin_ns = before;
        if (!moment(x, m->computed, &out[i].computed_ns) ||
            !moment(x, m->copying, &out[i].copy_ns) || !moment(x, m->copied, &out[i].copied_ns))
            return 0;
        before = out[i].computed_ns;
    }
    return x->n_layers;
}
