/* SPDX-License-Identifier: Apache-2.0 */
/* plugin: a model's verbs as a plan for the plugin, and what its program says of itself. */
#include <stdlib.h>
#include <string.h>

#include "device/npu/npu_priv.h"
#include "device/plugin_priv.h"

static const struct baton_weight *their(const struct device_weight *w)
{
    return w ? ((const struct plugin_weight *)w)->theirs : NULL;
}

/* The recorder's step as the plugin sees it. */
static struct baton_step convert(const struct npu_step *s, const uint32_t *cols)
{
    struct baton_step o = {.a = {s->a[0], s->a[1], s->a[2]}, .w = their(s->w), .b = their(s->b)};
    static const uint32_t verbs[] = {
        [NPU_EMBED] = BATON_VERB_EMBED,   [NPU_NORM] = BATON_VERB_NORM,
        [NPU_LINEAR] = BATON_VERB_LINEAR, [NPU_HEAD_NORM] = BATON_VERB_HEAD_NORM,
        [NPU_ROPE] = BATON_VERB_ROPE,     [NPU_APPEND] = BATON_VERB_APPEND,
        [NPU_ATTEND] = BATON_VERB_ATTEND, [NPU_ADD] = BATON_VERB_ADD,
        [NPU_GATE] = BATON_VERB_GATE,     [NPU_LAYER_DONE] = BATON_VERB_LAYER_DONE,
        [NPU_SELECT] = BATON_VERB_SELECT, [NPU_LOGITS] = BATON_VERB_LOGITS,
    };
    o.verb = verbs[s->verb];
    switch (s->verb) {
    case NPU_EMBED:
        o.scale = s->x;
        break;
    case NPU_HEAD_NORM:
        o.heads = s->n;
        o.head_dim = cols[s->a[0]] / s->n;
        /* fall through */
    case NPU_NORM:
        o.eps = s->x;
        o.offset = s->y;
        break;
    case NPU_ROPE:
        o.heads = s->n;
        o.head_dim = s->rope.head_dim;
        o.inv_freq = s->rope.inv_freq;
        break;
    case NPU_APPEND:
    case NPU_LAYER_DONE:
        o.layer = s->n;
        break;
    case NPU_ATTEND:
        o.layer = s->attn.layer;
        o.heads = s->attn.q_heads;
        o.kv_heads = s->attn.kv_heads;
        o.head_dim = s->attn.head_dim;
        o.window = s->attn.window;
        o.scale = s->attn.scale;
        break;
    case NPU_GATE:
        o.act = s->act;
        break;
    default:
        break;
    }
    return o;
}

/* Heads of keys are those of attention, which an append does not tell. */
static void fill(const struct npu_plan *p, struct baton_plan *out, uint32_t *cols,
                 struct baton_step *steps)
{
    for (uint32_t i = 0; i < p->n_steps; i++) {
        const struct npu_step *s = &p->steps[i];
        if (s->verb == NPU_ARRAY) {
            cols[s->a[0]] = s->n;
            continue;
        }
        if (s->verb == NPU_SELECT)
            cols[s->a[0]] = cols[s->a[1]];
        steps[out->n_steps] = convert(s, cols);
        if (s->verb == NPU_APPEND) {
            steps[out->n_steps].kv_heads = p->kv_heads;
            steps[out->n_steps].head_dim = p->head_dim;
        }
        out->n_steps++;
    }
    out->cols = cols;
    out->steps = steps;
    out->n_arrays = p->n_arrays;
}

static const struct plugin_weight *weight_named(const struct npu_plan *p, const char *name)
{
    for (uint32_t i = 0; i < 2 * p->n_steps; i++) {
        const struct npu_step *s = &p->steps[i / 2];
        const struct plugin_weight *w = (const void *)(i % 2 ? s->b : s->w);
        if (w && !strcmp(w->name, name))
            return w;
    }
    return NULL;
}

static int check_port(const struct plugin_device *d, const struct plugin_weight *w,
                      const struct baton_port *port, struct baton_error *e)
{
    if (port->n_dims != w->n_dims)
        return base_fail(e, BATON_ERR_MISMATCH,
                         "plugin %.60s: its program's %.60s has %u dimensions, the model's %u",
                         d->path, w->name, port->n_dims, w->n_dims);
    for (uint32_t k = 0; k < w->n_dims; k++) {
        bool compiled = port->compiled[k] != w->stride[k];
        if (compiled || port->bound[k] != w->stride[k])
            return base_fail(e, BATON_ERR_MISMATCH,
                             "plugin %.60s: %.60s is %s with stride %lld in dimension %u, the "
                             "model gave %lld",
                             d->path, w->name, compiled ? "compiled" : "bound",
                             (long long)(compiled ? port->compiled[k] : port->bound[k]), k,
                             (long long)w->stride[k]);
    }
    return 0;
}

/* A program that reads a weight with other strides than it is bound with gives wrong numbers and
 * no error: what it says of itself is compared before it runs. */
static int check_ports(const struct plugin_device *d, const struct npu_plan *p,
                       const struct baton_geometry *g, struct baton_error *e)
{
    for (uint32_t i = 0; i < g->n_inputs; i++) {
        const struct baton_port *port = &g->inputs[i];
        if (port->kind != BATON_PORT_WEIGHT)
            continue;
        const struct plugin_weight *w = port->name ? weight_named(p, port->name) : NULL;
        if (!w)
            return base_fail(e, BATON_ERR_MISMATCH,
                             "plugin %.60s: its program has the weight %.60s, the model has not",
                             d->path, port->name ? port->name : "without a name");
        int rc = check_port(d, w, port, e);
        if (rc)
            return rc;
    }
    return 0;
}

static int check_geometry(struct plugin_device *d, struct plugin_program *x,
                          const struct npu_plan *p, struct baton_error *e)
{
    struct baton_geometry g = {.struct_size = sizeof g};
    if (!d->api.geometry)
        return 0;
    int rc = device_plugin_result(d, "geometry", d->api.geometry(d->theirs, x->theirs, &g, e), e);
    if (rc)
        return rc;
    if (g.n_layers && (g.first_layer || g.n_layers != x->n_layers))
        return base_fail(e, BATON_ERR_MISMATCH,
                         "plugin %.100s: its program has %u layers from %u on, the model has %u",
                         d->path, g.n_layers, g.first_layer, x->n_layers);
    return d->base.caps.checks_strides ? 0 : check_ports(d, p, &g, e);
}

void device_plugin_program_close(struct device_program *base)
{
    struct plugin_program *p = (struct plugin_program *)base;
    struct plugin_device *d = (struct plugin_device *)base->device;
    if (p->theirs)
        d->api.program_close(d->theirs, p->theirs);
    if (d->program == p)
        d->program = NULL;
    free(p);
}

static int open_theirs(struct plugin_device *d, struct plugin_program *x, const struct npu_plan *p,
                       struct baton_error *e)
{
    struct baton_plan plan = {
        .struct_size = sizeof plan, .n_layers = x->n_layers, .vocab = x->base.graph.vocab};
    uint32_t *cols = base_try_alloc(p->n_arrays, sizeof *cols, e);
    struct baton_step *steps = base_try_alloc(p->n_steps, sizeof *steps, e);
    int rc = cols && steps ? 0 : BATON_ERR_NOMEM;
    if (rc == 0) {
        fill(p, &plan, cols, steps);
        const struct baton_source s = {sizeof s, &plan, d->artifact, d->artifact_bytes};
        rc = device_plugin_result(d, "program_open",
                                  d->api.program_open(d->theirs, &s, &x->theirs, e), e);
    }
    free(cols);
    free(steps);
    return rc;
}

int device_plugin_program_open(struct device *base, const struct device_graph *g,
                               struct device_program **out, struct baton_error *e)
{
    struct plugin_device *d = (struct plugin_device *)base;
    struct npu_plan plan;
    if (d->program)
        return base_fail(e, BATON_ERR_USAGE, "plugin %.100s has a program", d->path);
    struct plugin_program *x = base_try_alloc(1, sizeof *x, e);
    if (!x)
        return BATON_ERR_NOMEM;
    x->base = (struct device_program){.device = base, .graph = *g};
    x->n_layers = g->n_layers;
    int rc = device_npu_plan_record(g, &plan, e);
    if (rc == 0) {
        rc = open_theirs(d, x, &plan, e);
        if (rc == 0)
            rc = check_geometry(d, x, &plan, e);
        if (rc == 0)
            rc = device_plugin_read_caps(d, e);
        device_npu_plan_close(&plan);
    }
    if (rc) {
        device_plugin_program_close(&x->base);
        return rc;
    }
    d->program = x;
    *out = &x->base;
    return 0;
}
