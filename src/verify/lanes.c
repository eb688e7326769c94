/* SPDX-License-Identifier: Apache-2.0 */
/* Sequences in the lanes of a device on a bench. */
#include <string.h>

#include "verify/probe_priv.h"

int verify_lanes_open(struct verify_lanes *x, struct verify_bench *b, uint32_t n_lanes,
                      uint32_t positions, struct baton_error *e)
{
    const struct baton_caps *caps = device_caps(b->device);
    memset(x, 0, sizeof *x);
    x->bench = b;
    x->n = n_lanes;
    engine_geometry(b->config, caps->kv_dtype, &x->geometry);
    int rc = kv_pool_open(&x->pool, &x->geometry, n_lanes * positions, n_lanes, positions, e);
    if (rc)
        return rc;
    const struct device_kv_pool pool = {kv_pool_memory(x->pool), (size_t)kv_pool_bytes(x->pool),
                                        positions, n_lanes};
    rc = device_kv_open(b->device, &pool, e);
    x->kv_open = rc == 0;
    if (rc)
        verify_lanes_close(x);
    return rc;
}

void verify_lanes_close(struct verify_lanes *x)
{
    for (uint32_t i = 0; i < x->n; i++)
        verify_lane_free(x, i);
    if (x->kv_open)
        device_kv_close(x->bench->device);
    kv_pool_close(x->pool);
    memset(x, 0, sizeof *x);
}

void verify_lane_free(struct verify_lanes *x, uint32_t lane)
{
    if (!x->seq[lane])
        return;
    device_lane_release(x->bench->device, lane);
    kv_seq_close(x->seq[lane]);
    x->seq[lane] = NULL;
}

/* An empty sequence. */
static int enter(struct verify_lanes *x, uint32_t lane, struct baton_error *e)
{
    int rc = kv_seq_open(x->pool, &x->seq[lane], e);
    return rc ? rc : device_lane_bind(x->bench->device, lane, e);
}

static int submit(struct verify_lanes *x, const struct baton_batch *b, struct baton_error *e)
{
    uint64_t id;
    int rc = device_submit(x->bench->program, b, &id, e);
    return rc ? rc : device_wait(x->bench->program, id, UINT64_MAX, e);
}

static int run_piece(struct verify_lanes *x, uint32_t lane, const int32_t *ids, uint32_t n,
                     float *logits, struct baton_error *e)
{
    struct kv_seq *s = x->seq[lane];
    const uint32_t last = n - 1;
    const struct baton_span span = {
        .n_rows = n, .position = kv_seq_length(s), .lane = lane, .kv = kv_seq_views(s)};
    const struct baton_batch batch = {.ids = ids,
                                      .n_rows = n,
                                      .spans = &span,
                                      .n_spans = 1,
                                      .logit_rows = &last,
                                      .n_logits = 1,
                                      .logits = logits};
    int rc = submit(x, &batch, e);
    if (rc == 0)
        kv_seq_advance(s, n);
    return rc;
}

/* All of it is reserved at once, so that local layers keep what they would give back. */
int verify_lane_prefill(struct verify_lanes *x, uint32_t lane, const int32_t *ids, uint32_t n,
                        float *logits, struct baton_error *e)
{
    uint32_t most = device_caps(x->bench->device)->max_rows;
    int rc = enter(x, lane, e);
    if (rc == 0)
        rc = kv_seq_reserve(x->seq[lane], n, e);
    for (uint32_t at = 0, step; at < n && rc == 0; at += step) {
        step = n - at < most ? n - at : most;
        rc = run_piece(x, lane, ids + at, step, logits, e);
    }
    return rc;
}

int verify_lanes_step(struct verify_lanes *x, const int32_t *ids, float *logits,
                      struct baton_error *e)
{
    struct baton_span spans[VERIFY_LANES_MAX];
    uint32_t rows[VERIFY_LANES_MAX], n = 0, vocab = x->bench->config->vocab;
    int32_t tokens[VERIFY_LANES_MAX];
    int rc = 0;
    for (uint32_t i = 0; i < x->n && rc == 0; i++) {
        if (!x->seq[i])
            continue;
        rc = kv_seq_reserve(x->seq[i], 1, e);
        tokens[n] = ids[i];
        rows[n] = n;
        spans[n] = (struct baton_span){.row = n,
                                       .n_rows = 1,
                                       .position = kv_seq_length(x->seq[i]),
                                       .lane = i,
                                       .kv = kv_seq_views(x->seq[i])};
        n++;
    }
    const struct baton_batch batch = {.ids = tokens,
                                      .n_rows = n,
                                      .spans = spans,
                                      .n_spans = n,
                                      .logit_rows = rows,
                                      .n_logits = n,
                                      .logits = logits};
    if (rc == 0)
        rc = submit(x, &batch, e);
    if (rc)
        return rc;
    for (uint32_t i = x->n; i-- > 0;) /* from row to lane, the last first: lanes are no less */
        if (x->seq[i]) {
            memmove(logits + (size_t)i * vocab, logits + (size_t)--n * vocab,
                    vocab * sizeof *logits);
            kv_seq_advance(x->seq[i], 1);
        }
    return 0;
}

int verify_lane_fetch(struct verify_lanes *x, uint32_t lane, uint32_t *first, struct baton_error *e)
{
    struct kv_seq *s = x->seq[lane];
    uint32_t n = kv_seq_length(s);
    bool retained = device_caps(x->bench->device)->lane_kv;
    for (uint32_t l = 0; l < x->geometry.n_layers; l++)
        first[l] = retained ? kv_retained_first(&x->geometry, l, n) : 0;
    return device_kv_read(x->bench->device, lane, kv_seq_views(s), x->geometry.n_layers, first, n,
                          e);
}
