/* SPDX-License-Identifier: Apache-2.0 */
/* Programs and batches: memory that grows with the rows, what a batch says to the kernels, the
 * order of compute and copies. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/cuda/cuda_priv.h"

/* ---- memory ------------------------------------------------------------------------------- */

static int grow(void **p, size_t bytes, const char *what, struct baton_error *e)
{
    cudaFree(*p);
    *p = NULL;
    return device_cuda_check(cudaMalloc(p, bytes), what, e);
}

/* Rows up to a power of two, so that growth is rare. Poisoned: reading what no step wrote shows. */
static int grow_arrays(struct cuda_program *p, uint32_t rows, struct baton_error *e)
{
    uint32_t capacity = 16;
    int rc = 0;
    if (rows <= p->capacity)
        return 0;
    while (capacity < rows)
        capacity *= 2;
    device_cuda_graphs_drop(p);
    p->capacity = 0;
    for (uint32_t i = 0; rc == 0 && i < p->plan.n_arrays; i++) {
        struct cuda_array *a = &p->plan.array[i];
        size_t bytes = (size_t)capacity * a->ld * (a->wide ? 4 : 2);
        if (a->home == i)
            rc = grow(&a->data, bytes, "activations", e);
        if (rc == 0 && a->home == i)
            rc = device_cuda_check(cudaMemset(a->data, 0xFF, bytes), "activations", e);
        if (rc == 0 && a->twin)
            rc = grow((void **)&a->other, CUDA_DECODE_ROWS * (size_t)a->cols * sizeof(float),
                      "activations", e);
        if (rc == 0 && a->shadow)
            rc = grow((void **)&a->copy, (size_t)capacity * a->cols * 2, "activations", e);
    }
    for (uint32_t i = 0; rc == 0 && i < p->plan.n_ropes; i++)
        rc = grow((void **)&p->angles[i],
                  (size_t)capacity * p->plan.ropes[i].head_dim / 2 * sizeof(float2), "angles", e);
    if (rc == 0)
        p->capacity = capacity;
    return rc;
}

static int grow_logits(struct cuda_program *p, uint32_t rows, struct baton_error *e)
{
    if (rows <= p->logit_rows)
        return 0;
    device_cuda_graphs_drop(p);
    p->logit_rows = 0;
    if (rows < CUDA_DECODE_ROWS)
        rows = CUDA_DECODE_ROWS;
    int rc = grow((void **)&p->logits, (size_t)rows * p->base.graph.vocab * sizeof(float), "logits",
                  e);
    if (rc == 0)
        p->logit_rows = rows;
    return rc;
}

static int grow_partials(struct cuda_program *p, uint32_t splits, struct baton_error *e)
{
    size_t rows = (size_t)CUDA_DECODE_ROWS * p->plan.max_heads;
    if (splits <= p->partials.max_splits || p->plan.max_heads == 0)
        return 0;
    device_cuda_graphs_drop(p);
    p->partials.max_splits = 0;
    int rc = grow((void **)&p->partials.o, rows * splits * CUDA_MAX_HEAD_DIM * sizeof(float),
                  "attention", e);
    if (rc == 0)
        rc = grow((void **)&p->partials.ml, rows * splits * sizeof(float2), "attention", e);
    if (rc == 0)
        rc = grow((void **)&p->partials.arrived, rows * sizeof(uint32_t), "attention", e);
    if (rc == 0)
        rc = device_cuda_check(cudaMemset(p->partials.arrived, 0, rows * sizeof(uint32_t)),
                               "attention", e);
    if (rc == 0)
        p->partials.max_splits = splits;
    return rc;
}

static int grow_meta(struct cuda_program *p, size_t bytes, struct baton_error *e)
{
    if (bytes <= p->meta_bytes)
        return 0;
    bytes = 2 * bytes;
    device_cuda_graphs_drop(p);
    p->meta_bytes = 0;
    cudaFreeHost(p->meta_host);
    p->meta_host = NULL;
    int rc = device_cuda_check(cudaMallocHost((void **)&p->meta_host, bytes), "pinned memory", e);
    if (rc == 0)
        rc = grow((void **)&p->meta, bytes, "a batch", e);
    if (rc == 0)
        p->meta_bytes = bytes;
    return rc;
}

/* ---- programs ----------------------------------------------------------------------------- */

static int open_parts(struct cuda_program *p, struct baton_error *e)
{
    struct cuda_device *d = (struct cuda_device *)p->base.device;
    struct cuda_record record;
    int rc = d->matmul ? 0 : device_cuda_matmul_open(&d->matmul, e);
    if (rc == 0)
        rc = device_cuda_record_open(&p->base.graph, &record, e);
    if (rc)
        return rc;
    rc = device_cuda_plan_make(d, &record, &p->plan, e);
    device_cuda_record_close(&record);
    if (rc == 0)
        rc = device_cuda_export_open(p->plan.n_layers, &p->export, e);
    return rc;
}

int device_cuda_program_open(struct device *d, const struct device_graph *g,
                             struct device_program **out, struct baton_error *e)
{
    if (g->n_layers > CUDA_MAX_LAYERS)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "cuda: %u layers, at most %u", g->n_layers,
                         CUDA_MAX_LAYERS);
    struct cuda_program *p = base_try_alloc(1, sizeof *p, e);
    if (!p)
        return BATON_ERR_NOMEM;
    p->base.device = d;
    p->base.graph = *g;
    int rc = open_parts(p, e);
    if (rc) {
        device_cuda_program_close(&p->base);
        return rc;
    }
    *out = &p->base;
    return 0;
}

void device_cuda_program_close(struct device_program *base)
{
    struct cuda_program *p = (struct cuda_program *)base;
    cudaDeviceSynchronize();
    device_cuda_graphs_drop(p);
    device_cuda_plan_free(&p->plan);
    for (uint32_t i = 0; i < CUDA_MAX_ROPES; i++)
        cudaFree(p->angles[i]);
    cudaFreeHost(p->meta_host);
    cudaFree(p->meta);
    cudaFree(p->partials.o);
    cudaFree(p->partials.ml);
    cudaFree(p->partials.arrived);
    cudaFree(p->logits);
    device_cuda_export_close(p->export);
    free(p);
}

/* ---- what a batch says -------------------------------------------------------------------- */

/* Pages as the kernels read them: dense rows of bf16, 64 positions, 16-byte units. */
static int check_layout(const struct baton_kv_layout *l, struct baton_error *e)
{
    if (l->kind == BATON_KV_PAGED && l->dtype == BATON_BF16 && l->block == CUDA_PAGE &&
        l->stride_dim == 2 && l->stride_position == 2 * (int64_t)l->head_dim &&
        l->head_dim % 8 == 0 && l->head_dim <= CUDA_MAX_HEAD_DIM && l->stride_head % 16 == 0 &&
        l->stride_block % 16 == 0)
        return 0;
    return base_fail(e, BATON_ERR_UNSUPPORTED,
                     "cuda: KV pages are not dense bf16 pages of 64 positions");
}

/* The device's addresses of every layer; layers that share a block table share a group. */
static int set_pages(struct cuda_run *r, struct baton_error *e)
{
    const struct baton_kv_view *views = r->b->spans[0].kv;
    const struct cuda_device *d = r->d;
    const int32_t *tables[CUDA_GROUPS] = {0};
    for (uint32_t l = 0; l < r->p->plan.n_layers; l++) {
        const struct baton_kv_view *v = &views[l];
        uint32_t g = 0;
        int rc = check_layout(v->layout, e);
        if (rc)
            return rc;
        while (g < CUDA_GROUPS && tables[g] && tables[g] != v->blocks)
            g++;
        if (g == CUDA_GROUPS || v->k < d->host || v->v < d->host ||
            v->k >= d->host + d->pool_bytes || v->v >= d->host + d->pool_bytes)
            return base_fail(e, BATON_ERR_USAGE, "cuda: a KV view outside the pool that was lent");
        tables[g] = v->blocks;
        struct cuda_pages now;
        memset(&now, 0, sizeof now); /* compared as bytes */
        now.k = d->pool + (v->k - d->host);
        now.v = d->pool + (v->v - d->host);
        now.stride_block = v->layout->stride_block;
        now.stride_head = v->layout->stride_head;
        now.group = g;
        /* NOLINTNEXTLINE(bugprone-suspicious-memory-comparison): padding is zero in both */
        if (memcmp(&now, &r->p->pages[l], sizeof now)) {
            device_cuda_graphs_drop(r->p);
            r->p->pages[l] = now;
        }
    }
    return 0;
}

static uint32_t longest_table(const struct cuda_run *r)
{
    uint32_t n = 1;
    for (uint32_t i = 0; i < r->b->n_spans; i++)
        for (uint32_t l = 0; l < r->p->plan.n_layers; l++)
            if (r->b->spans[i].kv[l].n_blocks > n)
                n = r->b->spans[i].kv[l].n_blocks;
    return n;
}

static void fill_tables(const struct cuda_run *r, int32_t *tables)
{
    for (uint32_t i = 0; i < r->b->n_spans; i++)
        for (uint32_t l = 0, done = 0; l < r->p->plan.n_layers; l++) {
            const struct baton_kv_view *v = &r->b->spans[i].kv[l];
            uint32_t g = r->p->pages[l].group;
            if (done & 1u << g)
                continue;
            memcpy(tables + ((size_t)i * CUDA_GROUPS + g) * r->p->table_stride, v->blocks,
                   v->n_blocks * sizeof *tables);
            done |= 1u << g;
        }
}

/* [ids][positions][spans][logit rows][tables], each at a fixed place while the stride holds. */
static int fill_meta(struct cuda_run *r, struct baton_error *e)
{
    struct cuda_program *p = r->p;
    const struct baton_batch *b = r->b;
    uint32_t longest = longest_table(r), cap = p->capacity;
    if (longest > p->table_stride) {
        while (p->table_stride < longest)
            p->table_stride = p->table_stride ? 2 * p->table_stride : 64;
        device_cuda_graphs_drop(p);
    }
    size_t tables = (size_t)CUDA_MAX_LANES * CUDA_GROUPS * p->table_stride;
    size_t used = 4 * (size_t)cap + (size_t)b->n_spans * CUDA_GROUPS * p->table_stride;
    int rc = grow_meta(p, (4 * (size_t)cap + tables) * sizeof(int32_t), e);
    if (rc)
        return rc;
    int32_t *m = (int32_t *)p->meta_host, *dev = (int32_t *)p->meta;
    memcpy(m, b->ids, b->n_rows * sizeof *m);
    for (uint32_t i = 0; i < b->n_spans; i++)
        for (uint32_t k = 0; k < b->spans[i].n_rows; k++) {
            m[cap + b->spans[i].row + k] = (int32_t)(b->spans[i].position + k);
            m[2 * cap + b->spans[i].row + k] = (int32_t)i;
        }
    for (uint32_t i = 0; i < b->n_logits; i++)
        m[3 * cap + i] = (int32_t)b->logit_rows[i];
    fill_tables(r, m + 4 * (size_t)cap);
    r->rows = (struct cuda_rows){.ids = dev,
                                 .position = dev + cap,
                                 .span = dev + 2 * cap,
                                 .logit = dev + 3 * cap,
                                 .tables = dev + 4 * (size_t)cap,
                                 .table_stride = p->table_stride,
                                 .n = b->n_rows};
    r->meta_used = used * sizeof *m;
    return 0;
}

/* Blocks of split attention that the longest row needs, rounded up so that graphs last. */
static uint32_t splits_of(const struct cuda_run *r, uint32_t window)
{
    uint32_t most = 1, rounded = 1;
    for (uint32_t i = 0; i < r->b->n_spans; i++) {
        const struct baton_span *s = &r->b->spans[i];
        uint32_t last = s->position + s->n_rows - 1;
        uint32_t n = last / CUDA_SPLIT + 1, held = window ? (window - 1) / CUDA_SPLIT + 2 : n;
        n = n < held ? n : held;
        most = n > most ? n : most;
    }
    while (rounded < most)
        rounded *= 2;
    return rounded;
}

static uint32_t window_of(const struct cuda_plan *p)
{
    uint32_t widest = 0;
    for (uint32_t i = 0; i < p->n_steps; i++)
        if (p->steps[i].kind == CUDA_S_ATTEND && p->steps[i].attn.window > widest)
            widest = p->steps[i].attn.window;
    return widest;
}

/* ---- running ------------------------------------------------------------------------------ */

static int prepare(struct cuda_run *r, struct baton_error *e)
{
    const struct baton_batch *b = r->b;
    for (uint32_t i = 0; i < b->n_spans; i++)
        if (!b->spans[i].kv)
            return base_fail(e, BATON_ERR_USAGE, "cuda: span %u has no KV views", i);
    if (!r->d->pool)
        return base_fail(e, BATON_ERR_USAGE, "cuda: no KV pool is open");
    int rc = set_pages(r, e);
    if (rc == 0)
        rc = grow_arrays(r->p, b->n_rows, e);
    if (rc == 0)
        rc = grow_logits(r->p, b->n_logits, e);
    if (rc == 0)
        rc = fill_meta(r, e);
    if (rc == 0 && r->decode && r->p->plan.max_heads) {
        uint32_t window = window_of(&r->p->plan);
        r->splits[0] = splits_of(r, 0);
        r->splits[1] = window ? splits_of(r, window) : 1;
        rc = grow_partials(r->p, r->splits[0] > r->splits[1] ? r->splits[0] : r->splits[1], e);
    }
    return rc;
}

/* A copy into pinned memory can be part of a graph. */
static bool logits_pinned(const float *p)
{
    struct cudaPointerAttributes a;
    if (cudaPointerGetAttributes(&a, p) == 0)
        return a.type == cudaMemoryTypeHost;
    cudaGetLastError();
    return false;
}

int device_cuda_logits_out(struct cuda_run *r, struct baton_error *e)
{
    size_t bytes = (size_t)r->b->n_logits * r->p->base.graph.vocab * sizeof(float);
    if (bytes == 0)
        return 0;
    return device_cuda_check(
        cudaMemcpyAsync(r->b->logits, r->p->logits, bytes, cudaMemcpyDeviceToHost, r->at.stream),
        "logits", e);
}

int device_cuda_meta_in(struct cuda_run *r, struct baton_error *e)
{
    return device_cuda_check(cudaMemcpyAsync(r->p->meta, r->p->meta_host, r->meta_used,
                                             cudaMemcpyHostToDevice, r->at.stream),
                             "a batch", e);
}

int device_cuda_whole_run(struct cuda_run *r, struct baton_error *e)
{
    int rc = r->exports ? device_cuda_export_begin(r, e) : 0;
    if (rc == 0)
        rc = device_cuda_meta_in(r, e);
    if (rc == 0)
        rc = device_cuda_steps(r, e);
    if (rc == 0 && r->exports)
        rc = device_cuda_export_end(r, e);
    return rc ? rc : device_cuda_logits_out(r, e);
}

int device_cuda_submit(struct device_program *base, const struct baton_batch *b, uint64_t *id,
                       struct baton_error *e)
{
    struct cuda_program *p = (struct cuda_program *)base;
    struct cuda_device *d = (struct cuda_device *)base->device;
    struct cuda_run r = {.d = d, .p = p, .b = b, .at = {d->compute, d->overlap}};
    r.decode = b->n_rows <= CUDA_DECODE_ROWS;
    r.exports = b->layer_done != NULL;
    int rc = prepare(&r, e);
    r.pinned = b->n_logits && logits_pinned(b->logits);
    bool graph = rc == 0 && device_cuda_graph_fits(&r);
    if (rc == 0)
        rc = graph ? device_cuda_graph_run(&r, e) : device_cuda_whole_run(&r, e);
    if (rc == 0 && graph && !r.pinned)
        rc = device_cuda_logits_out(&r, e);
    if (rc == 0 && r.exports)
        rc = device_cuda_export_tell(&r, e);
    struct baton_error late;
    int end = device_cuda_check(cudaStreamSynchronize(d->compute), "a run", rc ? &late : e);
    if (rc == 0)
        rc = end;
    if (rc == 0 && id)
        *id = 0;
    return rc;
}

int device_cuda_wait(struct device_program *p, uint64_t id, uint64_t timeout_ns,
                     struct baton_error *e)
{
    (void)p;
    (void)id;
    (void)timeout_ns;
    (void)e;
    return 0; /* submit has waited */
}
