/* SPDX-License-Identifier: Apache-2.0 */
/* A device on a bench: one prompt, and all of its cache. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kv/kv.h"
#include "verify/probe_priv.h"
#include "verify/verify_priv.h"

int verify_bench_open(struct verify_bench *b, const struct baton_model *m, const char *device,
                      uint32_t threads, struct baton_error *e)
{
    memset(b, 0, sizeof *b);
    b->config = model_config_of(engine_model(m));
    int rc = device_open(device, &b->device, e);
    if (rc == 0)
        rc = device_start(b->device, threads, e);
    if (rc == 0)
        rc = model_bind(engine_model(m), b->device, NULL, NULL, &b->bound, e);
    if (rc == 0)
        rc = device_program_open(b->device, model_graph(b->bound), &b->program, e);
    if (rc)
        verify_bench_close(b);
    return rc;
}

void verify_bench_close(struct verify_bench *b)
{
    device_program_close(b->program);
    model_unbind(b->bound);
    device_close(b->device);
    memset(b, 0, sizeof *b);
}

/* ---- what a prefill left --------------------------------------------------------------------- */

/* Dense [head][position][dim] of positions [first, end) of one slot to [position][head * dim]. */
static int take_slot(const struct baton_kv_view *from, enum kv_which which, float *dense, float *to,
                     uint32_t first, uint32_t end, struct baton_error *e)
{
    struct baton_kv_layout layout;
    uint32_t heads = from->layout->kv_heads, dim = from->layout->head_dim, n = end - first;
    struct baton_kv_view view = kv_dense_view(&layout, BATON_F32, heads, dim, dense, dense, first,
                                              n);
    int rc = kv_copy(&view, from, which, first, n, e);
    for (uint32_t h = 0; h < heads && rc == 0; h++)
        for (uint32_t p = 0; p < n; p++)
            memcpy(to + ((size_t)(first + p) * heads + h) * dim, dense + ((size_t)h * n + p) * dim,
                   dim * sizeof *to);
    return rc;
}

int verify_yield_take(struct verify_yield *y, struct verify_lanes *x, uint32_t lane,
                      struct baton_error *e)
{
    const struct baton_kv_view *views = kv_seq_views(x->seq[lane]);
    size_t slot = (size_t)y->n * y->row;
    float *dense = base_try_alloc(slot, sizeof *dense, e);
    int rc = dense ? verify_lane_fetch(x, lane, y->first, e) : BATON_ERR_NOMEM;
    for (uint32_t i = 0; i < 2 * y->n_layers && rc == 0; i++)
        rc = take_slot(&views[i / 2], i % 2 ? KV_V : KV_K, dense, y->kv + i * slot, y->first[i / 2],
                       y->n, e);
    free(dense);
    return rc;
}

int verify_yield_open(struct verify_yield *y, const struct verify_bench *b, uint32_t n,
                      struct baton_error *e)
{
    memset(y, 0, sizeof *y);
    y->n_layers = b->config->n_layers;
    y->n = n;
    y->row = b->config->kv_heads * b->config->head_dim;
    y->vocab = b->config->vocab;
    y->first = base_try_alloc(y->n_layers, sizeof *y->first, e);
    y->kv = y->first ? base_try_alloc(2 * (size_t)y->n_layers * n, y->row * sizeof *y->kv, e)
                     : NULL;
    y->logits = y->kv ? base_try_alloc(y->vocab, sizeof *y->logits, e) : NULL;
    if (!y->logits)
        verify_yield_free(y);
    return y->logits ? 0 : BATON_ERR_NOMEM;
}

int verify_bench_prefill(struct verify_bench *b, const int32_t *ids, uint32_t n,
                         struct verify_yield *y, struct baton_error *e)
{
    struct verify_lanes x = {0};
    int rc = verify_yield_open(y, b, n, e);
    if (rc == 0)
        rc = verify_lanes_open(&x, b, 1, n, e);
    if (rc == 0)
        rc = verify_lane_prefill(&x, 0, ids, n, y->logits, e);
    if (rc == 0)
        rc = verify_yield_take(y, &x, 0, e);
    verify_lanes_close(&x);
    if (rc)
        verify_yield_free(y);
    return rc;
}

void verify_yield_free(struct verify_yield *y)
{
    free(y->first);
    free(y->kv);
    free(y->logits);
    memset(y, 0, sizeof *y);
}

/* ---- rows ---------------------------------------------------------------------------------- */

const float *verify_yield_row(const struct verify_yield *y, uint32_t layer, uint32_t v,
                              uint32_t position)
{
    return y->kv + ((size_t)(2 * layer + v) * y->n + position) * y->row;
}

double verify_yield_differs(const struct verify_yield *have, const struct verify_yield *want,
                            uint32_t layer, uint32_t v, uint32_t first, uint32_t n)
{
    return verify_rel_rms(verify_yield_row(want, layer, v, first),
                          verify_yield_row(have, layer, v, first), (size_t)n * want->row);
}

int verify_probe_ids(const struct model_config *c, uint32_t n, int32_t **out, struct baton_error *e)
{
    uint64_t x = 20261202;
    int32_t *ids = base_try_alloc(n, sizeof *ids, e);
    if (!ids)
        return BATON_ERR_NOMEM;
    for (uint32_t i = 0; i < n; i++) { /* Knuth's 64-bit linear congruence, its upper half */
        x = x * 6364136223846793005u + 1442695040888963407u;
        ids[i] = (int32_t)((x >> 33) % c->vocab);
        if (i && ids[i] == ids[i - 1])
            ids[i] = (int32_t)(((uint32_t)ids[i] + 1) % c->vocab);
    }
    *out = ids;
    return 0;
}

int verify_probe_once(const struct baton_model *m, const char *device, uint32_t threads,
                      const int32_t *ids, uint32_t n, struct verify_yield *out,
                      struct baton_error *e)
{
    struct verify_bench b;
    int rc = verify_bench_open(&b, m, device, threads, e);
    if (rc)
        return rc;
    rc = verify_bench_prefill(&b, ids, n, out, e);
    verify_bench_close(&b);
    return rc;
}
