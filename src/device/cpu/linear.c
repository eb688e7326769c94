/* SPDX-License-Identifier: Apache-2.0 */
/* cpu: how a linear map is spread over the pool.
 *
 * The rows are brought into the kernels' order once. A few rows go through gemv, cut by panels
 * of outputs alone; more go through gemm, cut by blocks of rows and by panels. How it is cut
 * follows the number of threads; the bits do not.
 */
#include "device/cpu/cpu_priv.h"

/* Fewer multiplications than this are not worth waking a worker. */
#define SMALL_WORK (1u << 16)

struct job {
    struct cpu_linear l;
    const struct cpu_kernels *kernels;
    const float *x;
    uint32_t k_x;
    uint32_t rows_item, panels_item; /* of one item */
    uint32_t n_panels, n_chunks;     /* panels in all; chunks of them */
};

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static uint32_t round_up(uint32_t n, uint32_t unit)
{
    return (n + unit - 1) / unit * unit;
}

static void pack_item(void *ctx, unsigned item, void *scratch)
{
    struct job *job = ctx;
    uint32_t r0 = item * job->rows_item;
    job->kernels->pack_rows(&job->l, job->x, job->k_x, r0, least(r0 + job->rows_item, job->l.m));
}

static void gemv_item(void *ctx, unsigned item, void *scratch)
{
    struct job *job = ctx;
    uint32_t p0 = item * job->panels_item;
    job->kernels->gemv(&job->l, p0, least(p0 + job->panels_item, job->n_panels));
}

static void gemm_item(void *ctx, unsigned item, void *scratch)
{
    struct job *job = ctx;
    uint32_t r0 = item / job->n_chunks * job->rows_item;
    uint32_t p0 = item % job->n_chunks * job->panels_item;
    job->kernels->gemm(&job->l, r0, least(r0 + job->rows_item, job->l.m), p0,
                       least(p0 + job->panels_item, job->n_panels));
}

/* About `per_thread` chunks a thread, in units of `unit` panels. */
static void cut_panels(struct job *job, uint32_t threads, uint32_t per_thread, uint32_t blocks,
                       uint32_t unit)
{
    uint32_t chunks = threads * per_thread / blocks + 1;
    job->panels_item = round_up((job->n_panels + chunks - 1) / chunks, unit);
    job->n_chunks = (job->n_panels + job->panels_item - 1) / job->panels_item;
}

static void run_gemv(struct cpu_run *r, struct job *job)
{
    uint32_t threads = base_pool_threads(r->device->pool);
    job->rows_item = job->l.m;
    pack_item(job, 0, NULL);
    if ((uint64_t)job->l.n * job->l.k < SMALL_WORK)
        threads = 1;
    cut_panels(job, threads, threads > 1 ? 4 : 1, threads > 1 ? 1 : 2, 4);
    device_cpu_parallel(r, gemv_item, job, job->n_chunks);
}

static void run_gemm(struct cpu_run *r, struct job *job)
{
    uint32_t threads = base_pool_threads(r->device->pool), mr = r->kernels->mr;
    uint32_t blocks = (job->l.m + r->kernels->row_block - 1) / r->kernels->row_block;
    job->rows_item = round_up((job->l.m + 4 * threads - 1) / (4 * threads), mr);
    device_cpu_parallel(r, pack_item, job, (job->l.m + job->rows_item - 1) / job->rows_item);
    job->rows_item = round_up((job->l.m + blocks - 1) / blocks, mr);
    cut_panels(job, threads, 8, blocks, 3);
    device_cpu_parallel(r, gemm_item, job, blocks * job->n_chunks);
}

void device_cpu_linear_run(struct cpu_run *r, float *y, const float *x, uint32_t rows,
                           const struct cpu_weight *w, const float *bias)
{
    struct job job = {
        .l = {y, w->rows, r->program->a, w->packed, bias, rows, w->rows, w->k},
        .kernels = r->kernels,
        .x = x,
        .k_x = w->cols,
        .n_panels = (w->rows + CPU_PANEL - 1) / CPU_PANEL,
    };
    if (rows == 0)
        return;
    if ((size_t)rows * w->k * sizeof(float) > r->program->a_bytes) {
        device_cpu_fail(&r->base, BATON_ERR_INTERNAL,
                        "linear: %s has %u columns, the graph said %u", w->name, w->cols,
                        r->program->base.graph.max_cols);
        return;
    }
    if (rows <= r->kernels->gemv_rows)
        run_gemv(r, &job);
    else
        run_gemm(r, &job);
}
