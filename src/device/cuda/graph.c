/* SPDX-License-Identifier: Apache-2.0 */
/* Decode steps, and short prefills that come again, as CUDA graphs: hundreds of small kernels with
 * one call.
 *
 * What changes from step to step (tokens, positions, block tables) is copied from pinned memory at
 * the graph's start. A graph belongs to a number of rows, to the place that logits go to and, for
 * decode, to bounds of the splits, which are rounded up to powers of two. */
#include <stdlib.h>
#include <string.h>

#include "device/cuda/cuda_priv.h"

void device_cuda_graphs_drop(struct cuda_program *p)
{
    for (uint32_t i = 0; i < p->n_graphs; i++)
        cudaGraphExecDestroy(p->graphs[i].exec);
    p->n_graphs = 0;
}

static struct cuda_graph_key key_of(const struct cuda_run *r)
{
    struct cuda_graph_key k;
    memset(&k, 0, sizeof k);
    k.rows = r->b->n_rows;
    k.n_logits = r->b->n_logits;
    k.logits = r->pinned ? r->b->logits : NULL;
    if (r->decode) {
        memcpy(k.splits, r->splits, sizeof k.splits);
    } else {
        k.chunk = 1;
        k.position = r->b->spans[0].position;
    }
    return k;
}

static struct cuda_graph *find(struct cuda_run *r)
{
    struct cuda_graph_key k = key_of(r);
    for (uint32_t i = 0; i < r->p->n_graphs; i++)
        if (!memcmp(&r->p->graphs[i].key, &k, sizeof k))
            return &r->p->graphs[i];
    return NULL;
}

/* A prefill's graph is worth its recording when the same one comes again. */
static bool seen_before(struct cuda_run *r)
{
    struct cuda_program *p = r->p;
    struct cuda_graph_key k = key_of(r);
    for (uint32_t i = 0; i < CUDA_MAX_GRAPHS; i++)
        if (!memcmp(&p->seen[i], &k, sizeof k))
            return true;
    p->seen[p->n_seen++ % CUDA_MAX_GRAPHS] = k;
    return false;
}

bool device_cuda_graph_fits(struct cuda_run *r)
{
    const struct baton_batch *b = r->b;
    if (r->exports || getenv("BATON_CUDA_PROFILE"))
        return false;
    if (r->decode)
        return b->n_spans == b->n_rows && b->n_logits == b->n_rows;
    return b->n_spans == 1 && b->n_rows <= CUDA_GRAPH_ROWS && seen_before(r);
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
        g->key = key_of(r);
    }
    g->used = ++p->clock;
    return device_cuda_check(cudaGraphLaunch(g->exec, r->at.stream), "a step", e);
}
