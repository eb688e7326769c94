/* SPDX-License-Identifier: Apache-2.0 */
/* npu: programs and runs of npu:rngd, a producer of whole prompts. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "device/npu/artifact_priv.h"

/* ---- programs ------------------------------------------------------------------------------ */

/* What cpu rounded and stored for its attention leaves the device token by token. */
static void take(const struct npu_replay *r, uint32_t layer, struct device_array k,
                 struct device_array v)
{
    struct npu_program *p = (struct npu_program *)((uintptr_t)r -
                                                   offsetof(struct npu_program, replay));
    uint32_t n = layer - r->part->layer;
    device_npu_output_take(&p->output, false, n, k.data, p->first, k.rows);
    device_npu_output_take(&p->output, true, n, v.data, p->first, v.rows);
}

/* What this program is compiled for. */
static void geometry(const struct npu_device *d, const struct npu_plan *p,
                     const struct device_graph *g, struct npu_geometry *out)
{
    device_npu_geometry_model(p, g, out);
    out->part_layers = d->part_layers;
    out->lanes = 1;
    memcpy(out->widths, d->base.caps.widths, sizeof out->widths);
}

/* A file is compared with what would be compiled now. */
static int check_artifact(const struct npu_device *d, const struct npu_program *p,
                          struct baton_error *e)
{
    struct npu_geometry now;
    geometry(d, &p->plan, &p->base.graph, &now);
    return d->artifact ? device_npu_artifact_check(d->artifact, &p->plan, &p->base.graph, &now, e)
                       : 0;
}

int device_npu_artifact(struct device_program *base, uint32_t positions,
                        const uint8_t checkpoint[32], char **out, size_t *n, struct baton_error *e)
{
    struct npu_program *p = (struct npu_program *)base;
    struct npu_geometry g;
    geometry((struct npu_device *)base->device, &p->plan, &base->graph, &g);
    return device_npu_artifact_write(base->device->caps.name, &p->plan, &g, checkpoint, true, out,
                                     n, e);
}

int device_npu_program_open(struct device *base, const struct device_graph *g,
                            struct device_program **out, struct baton_error *e)
{
    struct npu_device *d = (struct npu_device *)base;
    struct npu_program *p = base_try_alloc(1, sizeof *p, e);
    struct device_graph replayed = *g;
    if (!p)
        return BATON_ERR_NOMEM;
    p->base = (struct device_program){.device = base, .graph = *g};
    replayed.forward = device_npu_replay;
    replayed.ctx = &p->replay;
    p->replay = (struct npu_replay){.plan = &p->plan, .fault = d->fault, .appended = take};
    int rc = device_npu_plan_record(g, &p->plan, e);
    if (rc == 0)
        rc = device_npu_plan_cut(&p->plan, g->n_layers, d->part_layers, e);
    if (rc == 0)
        rc = check_artifact(d, p, e);
    if (rc == 0)
        rc = device_npu_fault_check(d, &p->plan, e);
    if (rc == 0)
        rc = device_program_open(d->cpu, &replayed, &p->cpu, e);
    if (rc)
        device_npu_program_close(&p->base);
    else
        *out = &p->base;
    return rc;
}

void device_npu_program_close(struct device_program *base)
{
    struct npu_program *p = (struct npu_program *)base;
    device_program_close(p->cpu);
    device_npu_output_close(&p->output);
    device_npu_plan_close(&p->plan);
    base_map_free(p->hidden, p->hidden_bytes);
    free(p->ids);
    free(p);
}

/* ---- runs ---------------------------------------------------------------------------------- */

static int check(const struct baton_caps *caps, const struct baton_batch *b, struct baton_error *e)
{
    const struct baton_span *s = b->spans;
    if (s->position)
        return base_fail(e, BATON_ERR_UNSUPPORTED,
                         "%s computes whole prompts from position 0; asked for position %u",
                         caps->name, s->position);
    return 0;
}

/* Memory for the narrowest width that fits. */
static int take_width(struct npu_program *p, uint32_t width, struct baton_error *e)
{
    size_t bytes;
    if (p->width == width)
        return 0;
    base_map_free(p->hidden, p->hidden_bytes);
    free(p->ids);
    p->width = 0;
    p->hidden = NULL;
    p->ids = base_try_alloc(width, sizeof *p->ids, e);
    if (!p->ids)
        return BATON_ERR_NOMEM;
    if (!base_mul((size_t)p->plan.hidden * sizeof(float), width, &bytes))
        return base_fail(e, BATON_ERR_NOMEM, "npu: %u rows of %u", width, p->plan.hidden);
    p->hidden_bytes = bytes;
    p->hidden = base_map_alloc(bytes, false, e);
    if (!p->hidden)
        return BATON_ERR_NOMEM;
    int rc = device_npu_output_open(&p->output, &p->plan, p->base.graph.n_layers, width, e);
    if (rc == 0)
        p->width = width;
    return rc;
}

/* Where padding comes first, the prompt's rows keep their positions; padding counts from 0 too. */
static uint32_t prompt_positions(struct npu_program *p, uint32_t n)
{
    uint32_t n_spans = 0, end = p->first + n, border = p->padding_first;
    if (p->first < border)
        p->spans[n_spans++] = (struct baton_span){.n_rows = (end < border ? end : border) -
                                                            p->first,
                                                  .position = p->first,
                                                  .kv = p->output.views};
    uint32_t first = p->first > border ? p->first : border;
    if (first < end)
        p->spans[n_spans++] = (struct baton_span){.row = first - p->first,
                                                  .n_rows = end - first,
                                                  .position = first - border,
                                                  .kv = p->output.views};
    return n_spans;
}

/* Rows that another piece will append are not there yet. */
static void plant(struct npu_program *p, const struct baton_span *span)
{
    struct npu_replay *r = &p->replay;
    r->rotated.spans = r->seen.spans = p->spans;
    r->rotated.n = r->seen.n = 0;
    if (p->padding_first)
        r->rotated.n = prompt_positions(p, span->n_rows);
    else if (r->fault == NPU_NONCAUSAL)
        r->seen.n = device_npu_stand_at_ends(p->spans, span, NPU_NONCAUSAL_BLOCK,
                                             span->position + span->n_rows);
}

/* Rows [first, first + n) of the width through one part. */
static int run_piece(struct npu_program *p, const struct npu_part *part, uint32_t first, uint32_t n,
                     struct baton_error *e)
{
    struct baton_span span = {.n_rows = n, .position = first, .kv = p->output.views};
    struct baton_batch b = {.ids = p->ids + first, .n_rows = n, .spans = &span, .n_spans = 1};
    uint64_t id;
    p->replay.part = part;
    p->first = first;
    p->replay.hidden = p->hidden + (size_t)first * p->plan.hidden;
    plant(p, &span);
    for (uint32_t l = 0; l < p->output.n_layers; l++)
        p->output.views[l].end = first;
    return device_submit(p->cpu, &b, &id, e);
}

static int run_part(struct npu_program *p, const struct npu_part *part, struct baton_error *e)
{
    int rc = 0;
    for (uint32_t first = 0; first < p->width && rc == 0; first += NPU_CHUNK) {
        uint32_t left = p->width - first;
        rc = run_piece(p, part, first, left < NPU_CHUNK ? left : NPU_CHUNK, e);
    }
    return rc;
}

/* K and V of a part leave, and only then is anybody told of its layers. */
static void export_part(struct npu_program *p, const struct npu_part *part,
                        const struct baton_batch *b)
{
    enum npu_fault fault = ((struct npu_device *)p->base.device)->fault;
    for (uint32_t l = 0; l < part->n_layers; l++)
        device_npu_output_export(&p->output, l, &b->spans[0].kv[part->layer + l], p->padding_first,
                                 b->n_rows, fault);
    for (uint32_t l = 0; b->layer_done && l < part->n_layers; l++)
        b->layer_done(b->ctx, part->layer + l);
}

/* The last norm and the output matrix for the wanted rows, on the host. */
static int run_tail(struct npu_program *p, const struct baton_batch *b, struct baton_error *e)
{
    static const uint32_t all[] = {0};
    uint32_t hidden = p->plan.hidden;
    struct baton_span span = {.n_rows = 1, .kv = p->output.views};
    struct baton_batch one = {
        .ids = p->ids, .n_rows = 1, .spans = &span, .n_spans = 1, .logit_rows = all, .n_logits = 1};
    int rc = 0;
    p->replay.part = &p->plan.tail;
    p->replay.rotated.n = p->replay.seen.n = 0;
    for (uint32_t l = 0; l < p->output.n_layers; l++)
        p->output.views[l].end = 0;
    for (uint32_t i = 0; i < b->n_logits && rc == 0; i++) {
        uint64_t id;
        p->replay.hidden = p->hidden + (size_t)(p->padding_first + b->logit_rows[i]) * hidden;
        one.logits = b->logits + (size_t)i * p->base.graph.vocab;
        rc = device_submit(p->cpu, &one, &id, e);
    }
    return rc;
}

static void place_ids(struct npu_program *p, const struct baton_batch *b)
{
    const struct npu_device *d = (struct npu_device *)p->base.device;
    p->padding_first = d->fault == NPU_PAD_LEAK ? p->width - b->n_rows : 0;
    for (uint32_t i = 0; i < p->width; i++)
        p->ids[i] = NPU_PAD_ID;
    memcpy(p->ids + p->padding_first, b->ids, b->n_rows * sizeof *p->ids);
}

int device_npu_submit(struct device_program *base, const struct baton_batch *b, uint64_t *id,
                      struct baton_error *e)
{
    struct npu_program *p = (struct npu_program *)base;
    int rc = check(&base->device->caps, b, e);
    if (rc == 0)
        rc = take_width(p, device_width(&base->device->caps, b->n_rows), e);
    if (rc)
        return rc;
    place_ids(p, b);
    rc = run_part(p, &p->plan.head, e);
    for (uint32_t i = 0; i < p->plan.n_parts && rc == 0; i++) {
        rc = run_part(p, &p->plan.parts[i], e);
        if (rc == 0)
            export_part(p, &p->plan.parts[i], b);
    }
    if (rc == 0)
        rc = run_tail(p, b, e);
    if (rc == 0 && id)
        *id = 0;
    return rc;
}
