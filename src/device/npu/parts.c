/* SPDX-License-Identifier: Apache-2.0 */
/* npu: a plan cut into programs of consecutive layers.
 *
 * Nothing in the verbs says where a layer ends. It ends with the last sum into the residual stream
 * before the next layer's K and V are appended, or before the end. */
#include "device/npu/npu_priv.h"

/* Read and written arrays of a step, as bits. NPU_MAX_ARRAYS is 64. */
static void touches(const struct npu_step *s, uint64_t *reads, uint64_t *writes)
{
    uint64_t a = 1ull << s->a[0], b = 1ull << s->a[1], c = 1ull << s->a[2];
    *reads = *writes = 0;
    switch (s->verb) {
    case NPU_EMBED:
        *writes = a;
        break;
    case NPU_NORM:
    case NPU_LINEAR:
    case NPU_ATTEND:
    case NPU_SELECT:
        *reads = b;
        *writes = a;
        break;
    case NPU_HEAD_NORM:
    case NPU_ROPE:
        *reads = *writes = a;
        break;
    case NPU_APPEND:
        *reads = a | b;
        break;
    case NPU_ADD:
        *reads = a | b;
        *writes = a;
        break;
    case NPU_GATE:
        *reads = b | c;
        *writes = a;
        break;
    case NPU_LOGITS:
        *reads = a;
        break;
    case NPU_ARRAY:
    case NPU_LAYER_DONE:
        break;
    }
}

static int check_alone(const struct npu_plan *p, const struct npu_part *part, struct baton_error *e)
{
    uint64_t known = 1ull << p->residual;
    for (uint32_t i = part->first; i < part->end; i++) {
        uint64_t reads, writes;
        touches(&p->steps[i], &reads, &writes);
        if (reads & ~known)
            return base_fail(e, BATON_ERR_UNSUPPORTED,
                             "npu: layer %u reads an array that an earlier part wrote",
                             part->layer);
        known |= writes;
    }
    return 0;
}

/* One past the last sum into the residual stream in [first, end); `first` where there is none. */
static uint32_t last_sum(const struct npu_plan *p, uint32_t first, uint32_t end)
{
    for (uint32_t i = end; i > first; i--)
        if (p->steps[i - 1].verb == NPU_ADD && p->steps[i - 1].a[0] == p->residual)
            return i;
    return first;
}

static uint32_t find(const struct npu_plan *p, enum npu_verb verb, uint32_t n, uint32_t from)
{
    while (from < p->n_steps && !(p->steps[from].verb == verb && p->steps[from].n == n))
        from++;
    return from;
}

int device_npu_plan_cut(struct npu_plan *p, uint32_t n_layers, uint32_t layers,
                        struct baton_error *e)
{
    uint32_t at = 0;
    while (at < p->n_steps && p->steps[at].verb != NPU_EMBED)
        at++;
    if (at == p->n_steps || p->head_dim == 0)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "npu: the graph has no embedding or no layers");
    p->parts = base_try_alloc((n_layers + layers - 1) / layers, sizeof *p->parts, e);
    if (!p->parts)
        return BATON_ERR_NOMEM;
    p->head = (struct npu_part){0, ++at, 0, 0};
    p->max_layers = layers < n_layers ? layers : n_layers;
    for (uint32_t l = 0; l < n_layers; l += layers) {
        uint32_t n = l + layers < n_layers ? layers : n_layers - l;
        uint32_t append = find(p, NPU_APPEND, l + n - 1, at);
        uint32_t next = l + n < n_layers ? find(p, NPU_APPEND, l + n, append) : p->n_steps;
        uint32_t end = append < next ? last_sum(p, append, next) : append;
        if (append == p->n_steps || (l + n < n_layers && next == p->n_steps))
            return base_fail(e, BATON_ERR_UNSUPPORTED, "npu: the graph appends no layer %u",
                             l + n - 1);
        p->parts[p->n_parts] = (struct npu_part){at, end, l, n};
        int rc = check_alone(p, &p->parts[p->n_parts++], e);
        if (rc)
            return rc;
        at = end;
    }
    p->tail = (struct npu_part){at, p->n_steps, n_layers, 0};
    return check_alone(p, &p->tail, e);
}
