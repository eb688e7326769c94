/* SPDX-License-Identifier: Apache-2.0 */
/* npu: programs and runs of the emulated atom devices: a prefill of one chunk, a decode step of a
 * bucket of lanes. Both graphs share the device's K and V. */
#include <stdlib.h>
#include <string.h>

#include "device/npu/artifact_priv.h"
#include "device/npu/atom_priv.h"

/* ---- programs ------------------------------------------------------------------------------- */

static int find_local(struct atom_program *p, struct baton_error *e)
{
    p->local = base_try_alloc(p->base.graph.n_layers, 1, e);
    for (uint32_t i = 0; p->local && i < p->plan.n_steps; i++) {
        const struct npu_step *s = &p->plan.steps[i];
        if (s->verb != NPU_ATTEND || !s->attn.window)
            continue;
        if (s->attn.window != p->plan.window)
            return base_fail(e, BATON_ERR_UNSUPPORTED, "npu: layer %u has another window",
                             s->attn.layer);
        p->local[s->attn.layer] = 1;
    }
    return p->local ? 0 : BATON_ERR_NOMEM;
}

/* The whole model is one graph for each phase. */
static int compile(struct atom_device *d, struct atom_program *p, struct baton_error *e)
{
    struct baton_caps *caps = &d->base.base.caps;
    p->chunk = p->plan.window ? ATOM_CHUNK_LOCAL : ATOM_CHUNK;
    if (p->plan.window > ATOM_MAX_WHOLE - p->chunk)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "%s: a window of %u; at most %u is possible",
                         caps->name, p->plan.window, ATOM_MAX_WHOLE - p->chunk);
    p->logits = base_try_alloc((size_t)d->bucket * p->base.graph.vocab, sizeof *p->logits, e);
    if (!p->logits)
        return BATON_ERR_NOMEM;
    p->whole = (struct npu_part){0, p->plan.n_steps, 0, p->base.graph.n_layers};
    p->replay = (struct npu_replay){.plan = &p->plan,
                                    .part = &p->whole,
                                    .fault = d->base.fault,
                                    .before_append = device_atom_window_load,
                                    .appended = device_atom_window_store,
                                    .attended = device_atom_window_spoil};
    p->replay.rotated.spans = p->rotated;
    p->replay.seen.spans = p->seen;
    caps->widths[0] = caps->max_rows = p->chunk;
    return 0;
}

/* What a program for sequences of `positions` is compiled for. */
static int geometry(const struct atom_device *d, const struct atom_program *p, uint32_t positions,
                    struct npu_geometry *out, struct baton_error *e)
{
    device_npu_geometry_model(&p->plan, &p->base.graph, out);
    out->chunk = p->chunk;
    out->lanes = d->bucket;
    return device_atom_geometry(d, p->chunk, positions, &out->block, &out->positions, e);
}

/* A file is compared with what would be compiled now for as many positions. */
static int check_artifact(const struct atom_device *d, const struct atom_program *p,
                          struct baton_error *e)
{
    const struct npu_artifact *a = d->base.artifact;
    struct npu_geometry now;
    if (!a)
        return 0;
    int rc = geometry(d, p, a->geometry.positions, &now, e);
    return rc ? rc : device_npu_artifact_check(a, &p->plan, &p->base.graph, &now, e);
}

static int artifact(struct device_program *base, uint32_t positions, const uint8_t checkpoint[32],
                    char **out, size_t *n, struct baton_error *e)
{
    struct atom_program *p = (struct atom_program *)base;
    struct npu_geometry g;
    int rc = geometry((struct atom_device *)base->device, p, positions, &g, e);
    return rc ? rc
              : device_npu_artifact_write(base->device->caps.name, &p->plan, &g, checkpoint, false,
                                          out, n, e);
}

int device_atom_program_open(struct device *base, const struct device_graph *g,
                             struct device_program **out, struct baton_error *e)
{
    struct atom_device *d = (struct atom_device *)base;
    struct device_graph replayed = *g;
    if (d->program)
        return base_fail(e, BATON_ERR_USAGE, "%s has a program", base->caps.name);
    struct atom_program *p = base_try_alloc(1, sizeof *p, e);
    if (!p)
        return BATON_ERR_NOMEM;
    p->base = (struct device_program){.device = base, .graph = *g};
    replayed.forward = device_npu_replay;
    replayed.ctx = &p->replay;
    int rc = device_npu_plan_record(g, &p->plan, e);
    if (rc == 0)
        rc = device_npu_plan_cut(&p->plan, g->n_layers, g->n_layers, e); /* one part, checked */
    if (rc == 0)
        rc = device_npu_fault_check(&d->base, &p->plan, e);
    if (rc == 0)
        rc = find_local(p, e);
    if (rc == 0)
        rc = compile(d, p, e);
    if (rc == 0)
        rc = check_artifact(d, p, e);
    if (rc == 0)
        rc = device_program_open(d->base.cpu, &replayed, &p->cpu, e);
    if (rc == 0) {
        d->program = p;
        *out = &p->base;
    } else {
        device_atom_program_close(&p->base);
    }
    return rc;
}

void device_atom_program_close(struct device_program *base)
{
    struct atom_program *p = (struct atom_program *)base;
    struct atom_device *d = (struct atom_device *)base->device;
    if (d->program == p) {
        device_atom_kv_close(&d->base.base); /* its tensors are static in the graphs */
        d->program = NULL;
    }
    device_program_close(p->cpu);
    device_npu_plan_close(&p->plan);
    free(p->local);
    free(p->logits);
    free(p);
}

/* ---- the front end: what it refuses before the device --------------------------------------- */

int device_atom_lose(struct atom_device *d, uint32_t lane, uint32_t position, struct baton_error *e)
{
    d->lost = true;
    return base_fail(e, BATON_ERR_DEVICE_LOST,
                     "%s: lane %u has block -1 for position %u: an access out of bounds; the "
                     "device is gone and must be opened again",
                     d->base.base.caps.name, lane, position);
}

/* A chunk begins where one can, a step where the lane ends. */
static int check_span(const struct atom_device *d, const struct baton_span *s, bool prefill,
                      struct baton_error *e)
{
    const char *name = d->base.base.caps.name;
    uint32_t chunk = d->program->chunk, length = d->kv.lane[s->lane].length;
    if (prefill && s->position % chunk)
        return base_fail(e, BATON_ERR_UNSUPPORTED,
                         "%s prefills in chunks that begin at multiples of %u; asked for %u rows "
                         "at position %u",
                         name, chunk, s->n_rows, s->position);
    if (s->position != length && s->position)
        return base_fail(e, BATON_ERR_USAGE, "%s: lane %u holds %u positions; asked for %u", name,
                         s->lane, length, s->position);
    if (s->position + s->n_rows > d->kv.max_seq)
        return base_fail(e, BATON_ERR_USAGE, "%s: position %u; compiled for %u", name,
                         s->position + s->n_rows - 1, d->kv.max_seq);
    return 0;
}

static int check(const struct atom_device *d, const struct baton_batch *b, bool prefill,
                 struct baton_error *e)
{
    uint32_t seen = 0;
    int rc = 0;
    for (uint32_t i = 0; i < b->n_spans && rc == 0; i++) {
        const struct baton_span *s = &b->spans[i];
        rc = device_atom_ready(d, s->lane, e);
        if (rc == 0 && s->n_rows > 1 && !prefill)
            rc = base_fail(e, BATON_ERR_UNSUPPORTED, "%s prefills one prompt at a time",
                           d->base.base.caps.name);
        if (rc == 0 && (seen & 1u << s->lane))
            rc = base_fail(e, BATON_ERR_USAGE, "%s: lane %u is given twice", d->base.base.caps.name,
                           s->lane);
        if (rc == 0)
            rc = check_span(d, s, prefill, e);
        seen |= 1u << s->lane;
    }
    return rc;
}

/* Blocks for `n` rows of a bound lane. An unbound one reaches the device as it is. */
static int provide(struct atom_device *d, const struct baton_span *s, uint32_t n,
                   struct baton_error *e)
{
    struct atom_lane *lane = &d->kv.lane[s->lane];
    int rc = lane->bound ? device_atom_blocks(&d->kv, lane, s->position + n, e) : 0;
    for (uint32_t p = s->position; p < s->position + n && rc == 0; p += ATOM_TILE)
        if (lane->tiles[p / ATOM_TILE] < 0)
            rc = device_atom_lose(d, s->lane, p, e);
    return rc;
}

static void place(struct atom_kv *kv, uint32_t lane, uint32_t position, uint32_t n)
{
    kv->lane[lane].position = position;
    if (position == 0)
        kv->lane[lane].length = kv->lane[lane].first = 0;
    device_atom_window_table(kv, &kv->lane[lane], position, n);
    device_atom_views(kv, lane, position);
}

/* ---- prefill -------------------------------------------------------------------------------- */

/* Padding has position 0 wherever it is written. */
static void rotate_padding(struct atom_program *p, const struct baton_span *s)
{
    p->replay.rotated.n = 1 + p->chunk - p->valid;
    p->rotated[0] = *s;
    p->rotated[0].n_rows = p->valid;
    for (uint32_t i = p->valid; i < p->chunk; i++)
        p->rotated[1 + i - p->valid] = (struct baton_span){.row = i, .n_rows = 1, .kv = s->kv};
}

static void plant(struct atom_program *p, const struct baton_span *s)
{
    uint32_t end = s->position + p->valid;
    p->replay.seen.n = 0;
    if (p->replay.fault == NPU_NONCAUSAL)
        p->replay.seen.n = device_npu_stand_at_ends(p->seen, s, p->chunk, end);
    if (p->replay.fault == NPU_PAD_LEAK && p->valid < p->chunk)
        p->replay.seen.n = device_npu_stand_at_ends(p->seen, s, p->chunk, s->position + p->chunk);
}

static int prefill(struct atom_device *d, struct atom_program *p, const struct baton_batch *b,
                   struct baton_error *e)
{
    uint32_t lane = b->spans[0].lane, position = b->spans[0].position;
    uint64_t id;
    int rc = provide(d, &b->spans[0], p->chunk, e);
    if (rc)
        return rc;
    place(&d->kv, lane, position, p->chunk);
    p->prefill = true;
    p->valid = b->n_rows;
    p->lane_of[0] = lane;
    p->n_lanes = 1;
    p->replay.lanes = false;
    for (uint32_t i = 0; i < p->chunk; i++)
        p->ids[i] = i < b->n_rows ? b->ids[i] : NPU_PAD_ID;
    const struct baton_span span = {
        .n_rows = p->chunk, .position = position, .kv = d->kv.lane[lane].views};
    const struct baton_batch whole = {.ids = p->ids,
                                      .n_rows = p->chunk,
                                      .spans = &span,
                                      .n_spans = 1,
                                      .logit_rows = b->logit_rows,
                                      .n_logits = b->n_logits,
                                      .logits = b->logits};
    rotate_padding(p, &span);
    plant(p, &span);
    rc = device_submit(p->cpu, &whole, &id, e);
    if (rc == 0)
        d->kv.lane[lane].length = position + p->valid;
    return rc;
}

/* ---- decode --------------------------------------------------------------------------------- */

/* Every lane of the bucket has a row; those of nobody run in the dummy's block. */
static int fill_bucket(struct atom_device *d, struct atom_program *p, const struct baton_batch *b,
                       struct baton_error *e)
{
    struct atom_kv *kv = &d->kv;
    int rc = 0;
    for (uint32_t i = 0; i < d->bucket; i++) {
        p->ids[i] = NPU_PAD_ID;
        p->lane_of[i] = d->bucket;
    }
    place(kv, d->bucket, 0, 1);
    for (uint32_t i = 0; i < b->n_spans && rc == 0; i++) {
        const struct baton_span *s = &b->spans[i];
        rc = provide(d, s, 1, e);
        place(kv, s->lane, s->position, 1);
        p->lane_of[s->lane] = s->lane;
        p->ids[s->lane] = b->ids[s->row];
    }
    for (uint32_t i = 0; i < d->bucket; i++) {
        const struct atom_lane *lane = &kv->lane[p->lane_of[i]];
        p->spans[i] = (struct baton_span){
            .row = i, .n_rows = 1, .position = lane->position, .kv = lane->views};
    }
    return rc;
}

/* Which lane's row of logits a lane is given. */
static uint32_t output_of(const struct atom_device *d, const struct baton_batch *b, uint32_t lane)
{
    bool swaps = d->base.fault == NPU_LANE_SWAP && b->n_spans == d->bucket;
    return swaps && (lane == 1 || lane == 2) ? 3 - lane : lane;
}

static int decode(struct atom_device *d, struct atom_program *p, const struct baton_batch *b,
                  struct baton_error *e)
{
    static const uint32_t rows[ATOM_MAX_BUCKET] = {0, 1, 2, 3};
    size_t vocab = p->base.graph.vocab;
    uint64_t id;
    int rc = fill_bucket(d, p, b, e);
    if (rc)
        return rc;
    p->prefill = false;
    p->n_lanes = d->bucket;
    p->replay.lanes = true;
    p->replay.rotated.n = p->replay.seen.n = 0;
    const struct baton_batch bucket = {.ids = p->ids,
                                       .n_rows = d->bucket,
                                       .spans = p->spans,
                                       .n_spans = d->bucket,
                                       .logit_rows = rows,
                                       .n_logits = d->bucket,
                                       .logits = p->logits};
    rc = device_submit(p->cpu, &bucket, &id, e);
    for (uint32_t i = 0; i < b->n_spans && rc == 0; i++)
        d->kv.lane[b->spans[i].lane].length = b->spans[i].position + 1;
    for (uint32_t i = 0; i < b->n_logits && rc == 0; i++) {
        uint32_t lane = b->spans[b->logit_rows[i]].lane; /* a span is one row */
        memcpy(b->logits + i * vocab, p->logits + output_of(d, b, lane) * vocab,
               vocab * sizeof *b->logits);
    }
    return rc;
}

/* ---- runs ----------------------------------------------------------------------------------- */

/* The graph of a phase is one program: its layers leave together. */
static void tell_layers(struct atom_device *d, const struct baton_batch *b)
{
    for (uint32_t i = 0; i < b->n_spans; i++) {
        const struct baton_span *s = &b->spans[i];
        if (s->kv)
            device_atom_export(&d->kv, s->lane, s->kv, s->position, s->position + s->n_rows);
    }
    for (uint32_t l = 0; l < d->kv.n_layers; l++)
        b->layer_done(b->ctx, l);
}

/* A single row behind others is a step; the graphs compute the same for it. */
int device_atom_submit(struct device_program *base, const struct baton_batch *b, uint64_t *id,
                       struct baton_error *e)
{
    struct atom_device *d = (struct atom_device *)base->device;
    struct atom_program *p = (struct atom_program *)base;
    bool one = b->n_spans == 1 && (b->n_rows > 1 || b->spans[0].position == 0);
    int rc = check(d, b, one, e);
    if (rc == 0)
        rc = one ? prefill(d, p, b, e) : decode(d, p, b, e);
    if (rc == 0 && b->layer_done)
        tell_layers(d, b);
    if (rc == 0 && id)
        *id = 0;
    return rc;
}

/* ---- the device ----------------------------------------------------------------------------- */

static int atom_open(const struct device_impl *impl, uint32_t bucket, const struct device_arg *args,
                     unsigned n_args, struct device **out, struct baton_error *e)
{
    struct device *base;
    int rc = device_npu_open(impl, sizeof(struct atom_device), &base, e);
    if (rc)
        return rc;
    ((struct atom_device *)base)->bucket = bucket;
    rc = device_atom_spec(args, n_args, (struct atom_device *)base, e);
    if (rc)
        device_npu_close(base);
    else
        *out = base;
    return rc;
}

static int open_b1(const struct device_arg *args, unsigned n_args, struct device **out,
                   struct baton_error *e)
{
    return atom_open(&device_npu_atom_b1, 1, args, n_args, out, e);
}

static int open_b4(const struct device_arg *args, unsigned n_args, struct device **out,
                   struct baton_error *e)
{
    return atom_open(&device_npu_atom_b4, 4, args, n_args, out, e);
}

static int weight_bind(struct device *base, const struct baton_tensor *t, unsigned kind,
                       struct device_weight **out, struct baton_error *e)
{
    int rc = device_npu_weight_bind(base, t, kind, out, e);
    if (rc == 0)
        ((struct atom_device *)base)->weight_bytes += device_npu_weight_bytes(*out);
    return rc;
}

static void weight_close(struct device *base, struct device_weight *w)
{
    ((struct atom_device *)base)->weight_bytes -= device_npu_weight_bytes(w);
    device_npu_weight_close(base, w);
}

#define ATOM(b)                                                                                    \
    {                                                                                              \
        .name = "npu:atom-b" #b, .compiles = true, .probe = device_atom_probe_b##b,                \
        .open = open_b##b, .close = device_npu_close, .start = device_npu_start,                   \
        .weight_bind = weight_bind, .weight_close = weight_close,                                  \
        .weight_bytes = device_npu_weight_bytes, .program_open = device_atom_program_open,         \
        .program_close = device_atom_program_close, .artifact = artifact,                          \
        .submit = device_atom_submit, .wait = device_npu_wait, .kv_open = device_atom_kv_open,     \
        .kv_close = device_atom_kv_close, .kv_read = device_atom_kv_read,                          \
        .kv_write = device_atom_kv_write, .lane_bind = device_atom_lane_bind,                      \
        .lane_clear = device_atom_lane_clear, .lane_release = device_atom_lane_release,            \
        .kv_look = device_atom_kv_look,                                                            \
    }
const struct device_impl device_npu_atom_b1 = ATOM(1);
const struct device_impl device_npu_atom_b4 = ATOM(4);
