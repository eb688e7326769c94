/* SPDX-License-Identifier: Apache-2.0 */
/* Where the time of a run goes, by kind of step. */
#include <stdio.h>
#include <stdlib.h>

#include "device/cuda/cuda_priv.h"

struct cuda_profile {
    uint32_t n;
    cudaEvent_t events[]; /* [n_steps + 1] */
};

struct cuda_profile *device_cuda_profile_open(const struct cuda_run *r)
{
    uint32_t n = r->p->plan.n_steps + 1;
    if (!getenv("BATON_CUDA_PROFILE"))
        return NULL;
    struct cuda_profile *p = base_try_alloc(1, sizeof *p + n * sizeof *p->events, NULL);
    for (; p && p->n < n; p->n++)
        if (cudaEventCreate(&p->events[p->n]))
            break;
    return p;
}

void device_cuda_profile_step(struct cuda_profile *p, const struct cuda_run *r, uint32_t step)
{
    if (p && step < p->n)
        cudaEventRecord(p->events[step], r->at.stream);
}

/* Products apart by shape: they are most of the time. */
static void tell(const struct cuda_profile *p, const struct cuda_run *r)
{
    static const char *const names[] = {"",       "embed",  "norm",   "norm_add_norm", "linear",
                                        "gate",   "heads",  "attend", "add",           "layer_done",
                                        "select", "logits", "narrow"};
    const struct cuda_plan *plan = &r->p->plan;
    for (uint32_t i = 0; i < plan->n_steps; i++) {
        const struct cuda_step *s = &plan->steps[i];
        float sum = 0, ms;
        uint32_t times = 0;
        bool first = true;
        for (uint32_t k = 0; k < plan->n_steps; k++) {
            const struct cuda_step *o = &plan->steps[k];
            bool same = o->kind == s->kind && o->m == s->m && o->attn.window == s->attn.window &&
                        (!s->w || !o->w || s->w->cols == o->w->cols);
            if (!same)
                continue;
            first = first && (times > 0 || k == i);
            if (cudaEventElapsedTime(&ms, p->events[k], p->events[k + 1]) == 0)
                sum += ms;
            times++;
        }
        if (first)
            fprintf(stderr, "  %-14s m %6u k %6u window %4u: %4u times, %9.3f ms\n", names[s->kind],
                    s->m, s->kind == CUDA_S_LINEAR && s->w ? s->w->cols : 0, s->attn.window, times,
                    (double)sum);
    }
}

void device_cuda_profile_close(struct cuda_profile *p, const struct cuda_run *r)
{
    if (!p)
        return;
    device_cuda_profile_step(p, r, r->p->plan.n_steps);
    if (p->n == r->p->plan.n_steps + 1 && cudaStreamSynchronize(r->at.stream) == 0) {
        fprintf(stderr, "cuda profile: %u rows\n", r->b->n_rows);
        tell(p, r);
    }
    for (uint32_t i = 0; i < p->n; i++)
        cudaEventDestroy(p->events[i]);
    free(p);
}
