/* SPDX-License-Identifier: Apache-2.0 */
/* Decode steps as CUDA graphs: hundreds of small kernels with one call.
 *
 * What changes from step to step (tokens, positions, block tables) is copied from pinned memory at
 * the graph's start. A graph belongs to a number of rows, to bounds of the splits, which are
 * rounded up to powers of two, and to the place that logits go to. */
#include <string.h>

#include "device/cuda/cuda_priv.h"

void device_cuda_graphs_drop(struct cuda_program *p)
{
    for (uint32_t i = 0; i < p->n_graphs; i++)
        cudaGraphExecDestroy(p->graphs[i].exec);
    p->n_graphs = 0;
}

static struct cuda_graph *find(struct cuda_run *r)
{
    struct cuda_program *p = r->p;
    for (uint32_t i = 0; i < p->n_graphs; i++) {
        struct cuda_graph *g = &p->graphs[i];
        if (g->rows == r->b->n_rows && g->logits == (r->pinned ? r->b->logits : NULL) &&
            !memcmp(g->splits, r->splits, sizeof g->splits))
            return g;
    }
    return NULL;
}

/* The place of a new graph: a free one, or that of the graph that was used longest ago. */
static struct cuda_graph *place(struct cuda_program *p)
{
    struct cuda_graph *oldest = &p->graphs[0];
    if (p->n_graphs < CUDA_MAX_GRAPHS)
        return &p->graphs[p->n_graphs++];
    for (uint32_t i = 1; i < p->n_graphs; i++)
        if (p->graphs[i].used < oldest->used)
            oldest = &p->graphs[i];
    cudaGraphExecDestroy(oldest->exec);
    return oldest;
}

static int record(struct cuda_run *r, cudaGraphExec_t *out, struct baton_error *e)
{
    cudaGraph_t graph = NULL;
    int rc = device_cuda_check(
        cudaStreamBeginCapture(r->at.stream, cudaStreamCaptureModeThreadLocal), "recording a step",
        e);
    if (rc)
        return rc;
    rc = device_cuda_meta_in(r, e);
    if (rc == 0)
        rc = device_cuda_steps(r, e);
    if (rc == 0 && r->pinned)
        rc = device_cuda_logits_out(r, e);
    cudaError_t end = cudaStreamEndCapture(r->at.stream, &graph);
    if (rc == 0)
        rc = device_cuda_check(end, "recording a step", e);
    else
        cudaGetLastError();
    if (rc == 0)
        rc = device_cuda_check(cudaGraphInstantiate(out, graph, 0), "a graph", e);
    if (graph)
        cudaGraphDestroy(graph);
    return rc;
}

int device_cuda_graph_run(struct cuda_run *r, struct baton_error *e)
{
    struct cuda_program *p = r->p;
    struct cuda_graph *g = find(r);
    if (!g) {
        cudaGraphExec_t exec;
        int rc = record(r, &exec, e);
        if (rc)
            return rc;
        g = place(p);
        g->exec = exec;
        g->rows = r->b->n_rows;
        g->logits = r->pinned ? r->b->logits : NULL;
        memcpy(g->splits, r->splits, sizeof g->splits);
    }
    g->used = ++p->clock;
    return device_cuda_check(cudaGraphLaunch(g->exec, r->at.stream), "a step", e);
}
