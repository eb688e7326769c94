/* SPDX-License-Identifier: Apache-2.0 */
/* A device plugin in one file, built against baton/device.h alone: a plain C device that runs a
 * model's plan step by step in float32. It is slow on purpose; each slot shows what the host
 * expects of it.
 *
 * Keys: kv=own keeps keys and values in the device's lanes instead of the host's pages.
 * break=NAME does what a broken plugin would, for the conformance tests: strides, lost, logits,
 * layers, silent, noncausal, lanes. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <baton/device.h>

#define LANES 4u
#define ROWS 64u
#define PAGE 64u
#define GRAIN 16u
#define MAX_LAYERS 256u

enum breakage { WELL, STRIDES, LOST, LOGITS, LAYERS, SILENT, NONCAUSAL, LANE_MIX };

struct baton_weight {
    char name[128];
    uint32_t m, k; /* vector: m = 1 */
    uint32_t n_dims;
    int64_t stride[4];
    float *data; /* [m, k] */
};

struct baton_program {
    struct baton_plan plan;
    uint32_t *cols;
    struct baton_step *steps;
    float *inv_freq; /* of all steps, copied */
    float **arrays;  /* [n_arrays][ROWS, cols] */
    struct baton_port *ports;
    uint32_t n_ports;
    uint32_t kv_heads, head_dim;
};

struct baton_device {
    bool own;
    enum breakage breakage;
    uint64_t batches;
    struct baton_program *program;
    /* kv=own: [lane][layer][K|V] of [position][head][dim] float32, shown as pages in a row */
    struct baton_kv_layout layout;
    float *kv;
    int32_t *table; /* [positions / PAGE] 0, 1, 2, ... */
    uint32_t positions, lanes, end[LANES];
    bool bound[LANES];
};

static int fail(struct baton_error *e, int code, const char *text)
{
    if (e) {
        e->code = code;
        snprintf(e->text, sizeof e->text, "sample: %s", text);
    }
    return code;
}

/* ---- the device ---------------------------------------------------------------------------- */

static int take_key(struct baton_device *d, const struct baton_device_key *key,
                    struct baton_error *e)
{
    static const char *const names[] = {"none",   "strides", "lost",      "logits",
                                        "layers", "silent",  "noncausal", "lanes"};
    if (!strcmp(key->key, "kv") && (!strcmp(key->value, "own") || !strcmp(key->value, "host"))) {
        d->own = !strcmp(key->value, "own");
        return 0;
    }
    for (int i = 0; !strcmp(key->key, "break") && i < 8; i++)
        if (!strcmp(key->value, names[i])) {
            d->breakage = (enum breakage)i;
            return 0;
        }
    return fail(e, BATON_ERR_USAGE,
                "keys are kv=host|own and "
                "break=none|strides|lost|logits|layers|silent|noncausal|lanes");
}

static int sample_open(const struct baton_device_key *keys, uint32_t n_keys,
                       struct baton_device **out, struct baton_error *e)
{
    struct baton_device *d = calloc(1, sizeof *d);
    int rc = d ? 0 : fail(e, BATON_ERR_NOMEM, "no memory");
    for (uint32_t i = 0; i < n_keys && rc == 0; i++)
        rc = take_key(d, &keys[i], e);
    if (rc)
        free(d);
    else
        *out = d;
    return rc;
}

static void sample_close(struct baton_device *d)
{
    free(d->kv);
    free(d->table);
    free(d);
}

static int sample_caps(struct baton_device *d, struct baton_caps *out, struct baton_error *e)
{
    struct baton_caps c = {.struct_size = out->struct_size};
    snprintf(c.name, sizeof c.name, "sample");
    snprintf(c.detail, sizeof c.detail, "a plan in plain C, float32, one thread");
    snprintf(c.numerics, sizeof c.numerics, "sample-1");
    c.dynamic = c.prefill = c.decode = c.row_invariant = c.layer_export = true;
    c.host_kv = !d->own;
    c.lane_kv = d->own;
    c.kv_grain = d->own ? GRAIN : 0;
    c.kv_dtype = BATON_F32;
    c.kv_block = PAGE;
    c.max_rows = ROWS;
    c.max_lanes = LANES;
    /* A host of an older header has a shorter struct: no byte behind its size is written. */
    memcpy(out, &c, c.struct_size < sizeof c ? c.struct_size : sizeof c);
    (void)e;
    return 0;
}

/* ---- weights: any strides in, rows out ------------------------------------------------------ */

static float element(const uint8_t *p, uint32_t dtype)
{
    union {
        uint32_t u;
        float f;
    } v;
    uint16_t h;
    if (dtype == BATON_F32) {
        memcpy(&v.f, p, sizeof v.f);
        return v.f;
    }
    memcpy(&h, p, sizeof h);
    if (dtype == BATON_BF16) {
        v.u = (uint32_t)h << 16;
        return v.f;
    }
    float f = (float)(h & 0x3FFu), sign = h & 0x8000u ? -1.0f : 1.0f;
    uint32_t exponent = (h >> 10) & 0x1Fu;
    if (exponent == 31)
        return f > 0 ? NAN : sign * INFINITY;
    return sign * (exponent ? ldexpf(1024.0f + f, (int)exponent - 25) : ldexpf(f, -24));
}

static void sample_weight_close(struct baton_device *d, struct baton_weight *w)
{
    (void)d;
    free(w->data);
    free(w);
}

static int sample_weight_bind(struct baton_device *d, const struct baton_tensor *t, uint32_t kind,
                              struct baton_weight **out, struct baton_error *e)
{
    struct baton_weight *w = calloc(1, sizeof *w);
    (void)kind;
    if (!w)
        return fail(e, BATON_ERR_NOMEM, "no memory");
    snprintf(w->name, sizeof w->name, "%s", t->name);
    w->n_dims = t->n_dims;
    memcpy(w->stride, t->stride, sizeof w->stride);
    w->m = t->n_dims == 2 ? (uint32_t)t->shape[0] : 1;
    w->k = (uint32_t)t->shape[t->n_dims - 1];
    w->data = malloc((size_t)w->m * w->k * sizeof *w->data);
    if (!w->data) {
        sample_weight_close(d, w);
        return fail(e, BATON_ERR_NOMEM, "no memory for a weight");
    }
    int64_t row = t->n_dims == 2 ? t->stride[0] : 0, col = t->stride[t->n_dims - 1];
    for (uint32_t i = 0; i < w->m; i++)
        for (uint32_t j = 0; j < w->k; j++)
            w->data[(size_t)i * w->k + j] = element((const uint8_t *)t->data + i * row + j * col,
                                                    t->dtype);
    *out = w;
    return 0;
}

/* ---- programs: the plan is the host's, so it is copied --------------------------------------- */

static void sample_program_close(struct baton_device *d, struct baton_program *p)
{
    for (uint32_t i = 0; p->arrays && i < p->plan.n_arrays; i++)
        free(p->arrays[i]);
    free(p->arrays);
    free(p->cols);
    free(p->steps);
    free(p->inv_freq);
    free(p->ports);
    free(p);
    d->program = NULL;
}

static int copy_plan(struct baton_program *p, const struct baton_plan *plan)
{
    size_t angles = 0;
    p->plan = *plan;
    p->cols = calloc(plan->n_arrays, sizeof *p->cols);
    p->steps = calloc(plan->n_steps, sizeof *p->steps);
    p->arrays = calloc(plan->n_arrays, sizeof *p->arrays);
    p->ports = calloc(2 * (size_t)plan->n_steps, sizeof *p->ports);
    for (uint32_t i = 0; i < plan->n_steps; i++)
        angles += plan->steps[i].inv_freq ? plan->steps[i].head_dim / 2 : 0;
    p->inv_freq = calloc(angles + 1, sizeof *p->inv_freq);
    if (!p->cols || !p->steps || !p->arrays || !p->ports || !p->inv_freq)
        return -1;
    memcpy(p->cols, plan->cols, plan->n_arrays * sizeof *p->cols);
    memcpy(p->steps, plan->steps, plan->n_steps * sizeof *p->steps);
    angles = 0;
    for (uint32_t i = 0; i < plan->n_steps; i++) {
        struct baton_step *s = &p->steps[i];
        if (!s->inv_freq)
            continue;
        memcpy(p->inv_freq + angles, s->inv_freq, s->head_dim / 2 * sizeof *p->inv_freq);
        s->inv_freq = p->inv_freq + angles;
        angles += s->head_dim / 2;
    }
    for (uint32_t i = 0; i < plan->n_arrays; i++) {
        p->arrays[i] = calloc((size_t)ROWS * p->cols[i], sizeof(float));
        if (!p->arrays[i])
            return -1;
    }
    return 0;
}

/* What the program takes of the weights. break=strides says what a sample that was transposed
 * when it was compiled would have left in the record. */
static void list_ports(struct baton_program *p, bool transposed)
{
    for (uint32_t i = 0; i < 2 * p->plan.n_steps; i++) {
        const struct baton_weight *w = i % 2 ? p->steps[i / 2].b : p->steps[i / 2].w;
        struct baton_port *port = &p->ports[p->n_ports];
        if (!w)
            continue;
        *port = (struct baton_port){.name = w->name,
                                    .kind = BATON_PORT_WEIGHT,
                                    .dtype = BATON_F32,
                                    .n_dims = w->n_dims,
                                    .shape = {w->n_dims == 2 ? w->m : w->k, w->k}};
        memcpy(port->bound, w->stride, sizeof port->bound);
        memcpy(port->compiled, w->stride, sizeof port->compiled);
        if (transposed && w->n_dims == 2) {
            port->compiled[0] = w->stride[1];
            port->compiled[1] = w->stride[1] * (int64_t)w->m;
        }
        p->n_ports++;
    }
}

static int sample_program_open(struct baton_device *d, const struct baton_source *s,
                               struct baton_program **out, struct baton_error *e)
{
    if (s->artifact)
        return fail(e, BATON_ERR_UNSUPPORTED, "it compiles nothing and loads no artifacts");
    if (s->plan->n_layers > MAX_LAYERS)
        return fail(e, BATON_ERR_UNSUPPORTED, "more than 256 layers");
    /* A later host may write verbs of which this knows nothing: left out, they would be a fault
     * that nobody sees. */
    for (uint32_t i = 0; i < s->plan->n_steps; i++)
        if (!s->plan->steps[i].verb || s->plan->steps[i].verb > BATON_VERB_LOGITS)
            return fail(e, BATON_ERR_UNSUPPORTED, "a plan with a verb that it does not know");
    struct baton_program *p = calloc(1, sizeof *p);
    if (!p)
        return fail(e, BATON_ERR_NOMEM, "no memory");
    if (copy_plan(p, s->plan)) {
        sample_program_close(d, p);
        return fail(e, BATON_ERR_NOMEM, "no memory for the program");
    }
    for (uint32_t i = 0; i < p->plan.n_steps; i++)
        if (p->steps[i].verb == BATON_VERB_ATTEND) {
            p->kv_heads = p->steps[i].kv_heads;
            p->head_dim = p->steps[i].head_dim;
        }
    list_ports(p, d->breakage == STRIDES);
    d->program = p;
    *out = p;
    return 0;
}

static int sample_geometry(struct baton_device *d, struct baton_program *p,
                           struct baton_geometry *out, struct baton_error *e)
{
    struct baton_geometry g = {.struct_size = out->struct_size};
    g.phase = BATON_PHASE_PREFILL | BATON_PHASE_DECODE;
    g.lanes = LANES;
    g.n_layers = p->plan.n_layers;
    g.export_layers = 1;
    g.n_inputs = p->n_ports;
    g.inputs = p->ports;
    g.global = g.local = d->own ? &d->layout : NULL;
    snprintf(g.compiler, sizeof g.compiler, "none");
    memcpy(out, &g, g.struct_size < sizeof g ? g.struct_size : sizeof g);
    (void)e;
    return 0;
}

/* ---- one batch ------------------------------------------------------------------------------ */

struct run {
    struct baton_device *d;
    struct baton_program *p;
    const struct baton_batch *b;
    struct baton_kv_view views[LANES][MAX_LAYERS]; /* [span][layer] */
};

static uint8_t *kv_at(const struct baton_kv_view *v, bool value, uint32_t position, uint32_t head)
{
    const struct baton_kv_layout *l = v->layout;
    return (value ? v->v : v->k) + v->blocks[position / l->block] * l->stride_block +
           position % l->block * l->stride_position + head * l->stride_head;
}

static float dot(const float *a, const float *b, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += (double)a[i] * b[i];
    return (float)sum;
}

static void norm(float *y, const float *x, uint32_t n, const float *w, float eps, float offset)
{
    float scale = 1.0f / sqrtf(dot(x, x, n) / (float)n + eps);
    for (uint32_t i = 0; i < n; i++)
        y[i] = x[i] * scale * (offset + w[i]);
}

/* y [n, m] = x [n, k] w^T + b */
static void product(float *y, const float *x, uint32_t n, const struct baton_weight *w,
                    const struct baton_weight *b)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t j = 0; j < w->m; j++)
            y[(size_t)i * w->m + j] = dot(x + (size_t)i * w->k, w->data + (size_t)j * w->k, w->k) +
                                      (b ? b->data[j] : 0);
}

static float activate(uint32_t act, float x)
{
    if (act == BATON_ACT_SILU)
        return x / (1.0f + expf(-x));
    return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}

static void rope(float *row, const struct baton_step *s, uint32_t position)
{
    uint32_t half = s->head_dim / 2;
    for (uint32_t h = 0; h < s->heads; h++, row += s->head_dim)
        for (uint32_t i = 0; i < half; i++) {
            float angle = (float)position * s->inv_freq[i], a = row[i], b = row[i + half];
            row[i] = a * cosf(angle) - b * sinf(angle);
            row[i + half] = b * cosf(angle) + a * sinf(angle);
        }
}

static void append(const struct run *r, const struct baton_step *s, uint32_t span)
{
    const struct baton_span *sp = &r->b->spans[span];
    const float *k = r->p->arrays[s->a[0]], *v = r->p->arrays[s->a[1]];
    size_t row = (size_t)s->kv_heads * s->head_dim;
    for (uint32_t i = 0; i < sp->n_rows; i++)
        for (uint32_t h = 0; h < s->kv_heads; h++) {
            size_t from = (sp->row + i) * row + (size_t)h * s->head_dim;
            const struct baton_kv_view *view = &r->views[span][s->layer];
            memcpy(kv_at(view, false, sp->position + i, h), k + from, s->head_dim * sizeof *k);
            memcpy(kv_at(view, true, sp->position + i, h), v + from, s->head_dim * sizeof *v);
        }
}

/* One head of one row: softmax in one pass, the sum rescaled when a larger score comes. */
static void attend_head(float *o, const float *q, const struct baton_step *s,
                        const struct baton_kv_view *v, uint32_t head, uint32_t first, uint32_t end)
{
    float most = -INFINITY, sum = 0;
    memset(o, 0, s->head_dim * sizeof *o);
    for (uint32_t p = first; p < end; p++) {
        const float *k = (const float *)kv_at(v, false, p, head);
        const float *x = (const float *)kv_at(v, true, p, head);
        float score = s->scale * dot(q, k, s->head_dim), top = score > most ? score : most;
        float keep = expf(most - top), weight = expf(score - top);
        sum = sum * keep + weight;
        for (uint32_t i = 0; i < s->head_dim; i++)
            o[i] = o[i] * keep + weight * x[i];
        most = top;
    }
    for (uint32_t i = 0; i < s->head_dim; i++)
        o[i] /= sum;
}

static void attend(const struct run *r, const struct baton_step *s, uint32_t span)
{
    const struct baton_span *sp = &r->b->spans[span];
    /* break=lanes: a row of a step looks at its neighbour's cache */
    bool mixed = r->d->breakage == LANE_MIX && r->b->n_spans > 1 && sp->n_rows == 1;
    uint32_t seen = mixed ? (span + 1) % r->b->n_spans : span;
    const struct baton_kv_view *v = &r->views[seen][s->layer];
    for (uint32_t i = 0; i < sp->n_rows; i++) {
        uint32_t p = r->b->spans[seen].position + (mixed ? 0 : i), end = p + 1;
        uint32_t first = s->window && end > s->window ? end - s->window : 0;
        if (r->d->breakage == NONCAUSAL)
            end = sp->position + sp->n_rows;
        for (uint32_t h = 0; h < s->heads; h++) {
            size_t at = ((size_t)(sp->row + i) * s->heads + h) * s->head_dim;
            attend_head(r->p->arrays[s->a[0]] + at, r->p->arrays[s->a[1]] + at, s, v,
                        h / (s->heads / s->kv_heads), first, end);
        }
    }
}

/* Steps that look at one row after the other. */
static void row_step(const struct run *r, const struct baton_step *s, uint32_t row,
                     uint32_t position)
{
    const uint32_t *cols = r->p->cols;
    float *x = r->p->arrays[s->a[0]] + (size_t)row * cols[s->a[0]];
    const float *y = r->p->arrays[s->a[1]] + (size_t)row * cols[s->a[1]];
    const float *z = r->p->arrays[s->a[2]] + (size_t)row * cols[s->a[2]];
    uint32_t n = cols[s->a[0]];
    switch (s->verb) {
    case BATON_VERB_EMBED:
        for (uint32_t i = 0; i < n; i++)
            x[i] = s->w->data[(size_t)r->b->ids[row] * n + i] * s->scale;
        break;
    case BATON_VERB_NORM:
        norm(x, y, n, s->w->data, s->eps, s->offset);
        break;
    case BATON_VERB_HEAD_NORM:
        for (uint32_t h = 0; h < s->heads; h++)
            norm(x + h * s->head_dim, x + h * s->head_dim, s->head_dim, s->w->data, s->eps,
                 s->offset);
        break;
    case BATON_VERB_ROPE:
        rope(x, s, position);
        break;
    case BATON_VERB_ADD:
        for (uint32_t i = 0; i < n; i++)
            x[i] += y[i];
        break;
    case BATON_VERB_GATE:
        for (uint32_t i = 0; i < n; i++)
            x[i] = activate(s->act, y[i]) * z[i];
        break;
    }
}

static void layer_done(const struct run *r, uint32_t layer)
{
    uint32_t last = r->p->plan.n_layers - 1;
    if (r->b->layer_done)
        r->b->layer_done(r->b->ctx, r->d->breakage == LAYERS ? last - layer : layer);
}

static void step(const struct run *r, const struct baton_step *s)
{
    const struct baton_batch *b = r->b;
    float *x = r->p->arrays[s->a[0]], *y = r->p->arrays[s->a[1]];
    uint32_t cols = r->p->cols[s->a[0]];
    if (s->verb == BATON_VERB_LINEAR) {
        product(x, y, b->n_rows, s->w, s->b);
    } else if (s->verb == BATON_VERB_LAYER_DONE) {
        layer_done(r, s->layer);
    } else if (s->verb == BATON_VERB_SELECT) {
        for (uint32_t i = 0; i < b->n_logits; i++)
            memcpy(x + (size_t)i * cols, y + (size_t)b->logit_rows[i] * cols, cols * sizeof *x);
    } else if (s->verb == BATON_VERB_LOGITS) {
        if (r->d->breakage != LOGITS)
            product(b->logits, x, b->n_logits, s->w, NULL);
    } else {
        for (uint32_t i = 0; i < b->n_spans; i++) {
            if (s->verb == BATON_VERB_APPEND)
                append(r, s, i);
            else if (s->verb == BATON_VERB_ATTEND)
                attend(r, s, i);
            else
                for (uint32_t k = 0; k < b->spans[i].n_rows; k++)
                    row_step(r, s, b->spans[i].row + k, b->spans[i].position + k);
        }
    }
}

static void show_lane(struct baton_device *d, uint32_t lane, struct baton_kv_view *views,
                      uint32_t n_layers)
{
    size_t tensor = (size_t)d->positions * d->program->kv_heads * d->program->head_dim;
    for (uint32_t l = 0; l < n_layers; l++) {
        float *k = d->kv + 2 * tensor * ((size_t)lane * d->program->plan.n_layers + l);
        views[l] = (struct baton_kv_view){
            .layout = &d->layout,
            .k = (uint8_t *)k,
            .v = (uint8_t *)(k + tensor),
            .blocks = d->table,
            .n_blocks = d->positions / PAGE,
            .end = d->end[lane],
        };
    }
}

/* Copies of this lane's rows to the host's pages, for whoever asked to be told of layers. */
static void export_rows(const struct run *r, uint32_t span)
{
    const struct baton_span *sp = &r->b->spans[span];
    size_t row = r->p->head_dim * sizeof(float);
    for (uint32_t l = 0; sp->kv && l < r->p->plan.n_layers; l++)
        for (uint32_t p = sp->position; p < sp->position + sp->n_rows; p++)
            for (uint32_t h = 0; h < r->p->kv_heads; h++)
                for (int v = 0; v < 2; v++)
                    memcpy(kv_at(&sp->kv[l], v, p, h), kv_at(&r->views[span][l], v, p, h), row);
}

static int views(struct run *r, struct baton_error *e)
{
    uint32_t n_layers = r->p->plan.n_layers;
    for (uint32_t i = 0; i < r->b->n_spans; i++) {
        const struct baton_span *s = &r->b->spans[i];
        if (!r->d->own) {
            memcpy(r->views[i], s->kv, n_layers * sizeof *s->kv);
            continue;
        }
        if (s->lane >= r->d->lanes || !r->d->bound[s->lane])
            return fail(e, BATON_ERR_USAGE, "rows of a lane that is not bound");
        if (s->position + s->n_rows > r->d->positions)
            return fail(e, BATON_ERR_USAGE, "a sequence longer than its lane");
        show_lane(r->d, s->lane, r->views[i], n_layers);
        r->d->end[s->lane] = s->position + s->n_rows;
    }
    return 0;
}

static int sample_submit(struct baton_device *d, struct baton_program *p,
                         const struct baton_batch *b, uint64_t *id, struct baton_error *e)
{
    if (d->breakage == SILENT)
        return BATON_ERR_DEVICE;
    if (d->breakage == LOST)
        return fail(e, BATON_ERR_DEVICE_LOST, "the device fell off the bus");
    struct run *r = malloc(sizeof *r);
    if (!r)
        return fail(e, BATON_ERR_NOMEM, "no memory for a batch");
    r->d = d;
    r->p = p;
    r->b = b;
    int rc = views(r, e);
    for (uint32_t i = 0; i < p->plan.n_steps && rc == 0; i++) {
        const struct baton_step *s = &p->steps[i];
        if (s->verb == BATON_VERB_LAYER_DONE && d->own && b->layer_done)
            for (uint32_t k = 0; k < b->n_spans; k++)
                export_rows(r, k);
        step(r, s);
    }
    free(r);
    *id = ++d->batches;
    return rc;
}

static int sample_wait(struct baton_device *d, struct baton_program *p, uint64_t id,
                       uint64_t timeout_ns, struct baton_error *e)
{
    (void)p;
    (void)timeout_ns;
    return id <= d->batches ? 0 : fail(e, BATON_ERR_USAGE, "no such batch");
}

/* ---- kv=own --------------------------------------------------------------------------------- */

static int sample_kv_open(struct baton_device *d, struct baton_program *p, uint32_t positions,
                          uint32_t lanes, struct baton_error *e)
{
    size_t row = (size_t)p->kv_heads * p->head_dim;
    if (lanes > LANES)
        return fail(e, BATON_ERR_USAGE, "four lanes at most");
    positions += (PAGE - positions % PAGE) % PAGE;
    d->kv = calloc(2 * row * positions * lanes * p->plan.n_layers, sizeof *d->kv);
    d->table = calloc(positions / PAGE, sizeof *d->table);
    if (!d->kv || !d->table)
        return fail(e, BATON_ERR_NOMEM, "no memory for KV"); /* close frees what there is */
    for (uint32_t i = 0; i < positions / PAGE; i++)
        d->table[i] = (int32_t)i;
    d->positions = positions;
    d->lanes = lanes;
    d->layout = (struct baton_kv_layout){.version = 1,
                                         .dtype = BATON_F32,
                                         .kind = BATON_KV_PAGED,
                                         .alignment = sizeof(float),
                                         .kv_heads = p->kv_heads,
                                         .head_dim = p->head_dim,
                                         .head_dim_padded = p->head_dim,
                                         .block = PAGE,
                                         .stride_block = (int64_t)(PAGE * row * sizeof(float)),
                                         .stride_head = (int64_t)(p->head_dim * sizeof(float)),
                                         .stride_position = (int64_t)(row * sizeof(float)),
                                         .stride_dim = sizeof(float)};
    return 0;
}

static void sample_kv_close(struct baton_device *d)
{
    free(d->kv);
    free(d->table);
    d->kv = NULL;
    d->table = NULL;
}

static int sample_lane_bind(struct baton_device *d, uint32_t lane, struct baton_error *e)
{
    if (lane >= d->lanes || d->bound[lane])
        return fail(e, BATON_ERR_USAGE, "no such lane, or it is bound");
    d->bound[lane] = true;
    d->end[lane] = 0;
    return 0;
}

static void sample_lane_release(struct baton_device *d, uint32_t lane)
{
    if (lane < d->lanes)
        d->bound[lane] = false;
}

static int copy(struct baton_device *d, const struct baton_kv_copy *c, bool write,
                struct baton_error *e)
{
    struct baton_kv_view own[MAX_LAYERS];
    if (c->lane >= d->lanes || !d->bound[c->lane] || c->layer >= d->program->plan.n_layers ||
        c->first % GRAIN || c->count % GRAIN || c->first + c->count > d->positions)
        return fail(e, BATON_ERR_USAGE, "a copy that does not fit lanes, layers or grain");
    show_lane(d, c->lane, own, d->program->plan.n_layers);
    for (uint32_t p = 0; p < c->count; p++)
        for (uint32_t h = 0; h < c->layout->kv_heads; h++) {
            uint8_t *host = (uint8_t *)c->host + p * c->layout->stride_position +
                            h * c->layout->stride_head;
            uint8_t *mine = kv_at(&own[c->layer], c->which, c->first + p, h);
            memcpy(write ? mine : host, write ? host : mine, c->layout->head_dim * sizeof(float));
        }
    return 0;
}

static int sample_kv_read(struct baton_device *d, const struct baton_kv_copy *copies, uint32_t n,
                          struct baton_error *e)
{
    int rc = 0;
    for (uint32_t i = 0; i < n && rc == 0; i++)
        rc = copy(d, &copies[i], false, e);
    return rc;
}

static int sample_kv_write(struct baton_device *d, const struct baton_kv_copy *copies, uint32_t n,
                           uint32_t end, struct baton_error *e)
{
    int rc = 0;
    for (uint32_t i = 0; i < n && rc == 0; i++) {
        rc = copy(d, &copies[i], true, e);
        if (rc == 0)
            d->end[copies[i].lane] = end;
    }
    return rc;
}

static int sample_kv_look(struct baton_device *d, uint32_t lane, struct baton_kv_view *views,
                          uint32_t n_layers, struct baton_error *e)
{
    if (lane >= d->lanes || !d->bound[lane])
        return fail(e, BATON_ERR_USAGE, "a look at a lane that is not bound");
    show_lane(d, lane, views, n_layers);
    return 0;
}

/* ---- the table ------------------------------------------------------------------------------ */

/* Slots that are not here (start, cancel, lane_clear, buffers) the device does not have. */
static const struct baton_device_api api = {
    .abi_version = BATON_DEVICE_ABI,
    .struct_size = sizeof api,
    .open = sample_open,
    .close = sample_close,
    .caps = sample_caps,
    .weight_bind = sample_weight_bind,
    .weight_close = sample_weight_close,
    .program_open = sample_program_open,
    .program_close = sample_program_close,
    .geometry = sample_geometry,
    .submit = sample_submit,
    .wait = sample_wait,
    .kv_open = sample_kv_open,
    .kv_close = sample_kv_close,
    .lane_bind = sample_lane_bind,
    .lane_release = sample_lane_release,
    .kv_read = sample_kv_read,
    .kv_write = sample_kv_write,
    .kv_look = sample_kv_look,
};

const struct baton_device_api *baton_device_plugin(uint32_t host_abi);
const struct baton_device_api *baton_device_plugin(uint32_t host_abi)
{
    return host_abi == BATON_DEVICE_ABI ? &api : NULL;
}
