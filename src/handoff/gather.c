/* SPDX-License-Identifier: Apache-2.0 */
/* Pieces that go into the stream from the pages where they lie, without a copy of this end's. The
 * pages are the request's until its on_end; a frame that is half written then goes on with zeros,
 * which nobody commits. */
#include <string.h>

#include "handoff/handoff_priv.h"

static bool rows_dense(const struct baton_kv_layout *l, size_t row)
{
    int64_t element = l->dtype == BATON_F32 ? 4 : 2;
    return l->dtype != BATON_I8 && l->stride_dim == element && l->stride_position == (int64_t)row;
}

bool handoff_gather(struct handoff_conn *c, const struct baton_kv_view *v, enum kv_which which,
                    uint32_t first, uint32_t end)
{
    const struct baton_kv_layout *l = v->layout;
    size_t row = kv_piece_bytes(l->dtype, 1, l->head_dim, 1);
    uint32_t n = 0;
    if (!rows_dense(l, row))
        return false;
    for (uint32_t h = 0; h < l->kv_heads; h++)
        for (uint32_t p = first, run; p < end; p += run) {
            const uint8_t *at = kv_view_run(v, which, p, end - p, &run) + h * l->stride_head;
            if (n > 0 && c->runs[n - 1].data + c->runs[n - 1].bytes == at)
                c->runs[n - 1].bytes += run * row;
            else if (n < HANDOFF_MAX_RUNS)
                c->runs[n++] = (struct handoff_run){at, run * row};
            else
                return false;
        }
    c->n_runs = n;
    return true;
}

void handoff_gather_drop(struct handoff_conn *c, const struct handoff_request *r)
{
    struct handoff_out *f = c->writing;
    if (!f || f->header.request != r->id || !handoff_gathered(f))
        return;
    memset(c->stage.data, 0, f->header.payload);
    f->payload = c->stage.data;
}
