/* SPDX-License-Identifier: Apache-2.0 */
/* Figures of one request, as the caller reads them. */
#include <stdlib.h>
#include <string.h>

#include "engine/engine_priv.h"

static int compare_u64(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Nearest-rank percentiles of the times between tokens. Without memory they stay 0. */
static void fill_gaps(const struct engine_token *t, uint32_t n, struct baton_stats *out)
{
    if (n < 2)
        return;
    uint32_t gaps = n - 1;
    uint64_t *gap = base_try_alloc(gaps, sizeof *gap, NULL);
    if (!gap)
        return;
    for (uint32_t i = 0; i < gaps; i++)
        gap[i] = t[i + 1].time_ns - t[i].time_ns;
    qsort(gap, gaps, sizeof *gap, compare_u64);
    out->itl_p50_ns = gap[((uint64_t)gaps * 50 + 99) / 100 - 1];
    out->itl_p99_ns = gap[((uint64_t)gaps * 99 + 99) / 100 - 1];
    free(gap);
}

int engine_request_stats(struct baton_request *r, struct baton_stats *out)
{
    size_t size = out->struct_size;
    if (size < sizeof size || size > 1u << 16)
        return BATON_ERR_USAGE;
    pthread_mutex_lock(&r->lock);
    struct baton_stats s = r->stats;
    uint32_t n = r->n;
    s.struct_size = size;
    s.output_tokens = n;
    if (n > 0)
        s.ttft_ns = r->tokens[0].time_ns - r->ask.accepted_ns;
    if (n > 1) {
        s.first_step_ns = r->tokens[1].time_ns - r->tokens[0].time_ns;
        s.decode_ns = r->tokens[n - 1].time_ns - r->tokens[0].time_ns;
    }
    fill_gaps(r->tokens, n, &s);
    pthread_mutex_unlock(&r->lock);
    /* A caller built against a longer struct sees zeros in what we do not have. */
    memset(out, 0, size);
    memcpy(out, &s, size < sizeof s ? size : sizeof s);
    return 0;
}
