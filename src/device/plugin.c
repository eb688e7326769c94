/* SPDX-License-Identifier: Apache-2.0 */
/* plugin: loading the object, its table, weights, and a model's verbs as a plan for it. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/npu/npu_priv.h"
#include "device/plugin_priv.h"

#define MAX_ARTIFACT ((size_t)1 << 32)

static struct plugin_device *of(struct device *d)
{
    return (struct plugin_device *)d;
}

/* ---- results ------------------------------------------------------------------------------- */

int device_plugin_result(struct plugin_device *d, const char *slot, int rc, struct baton_error *e)
{
    if (rc >= 0)
        return rc == 0 ? 0
                       : base_fail(e, BATON_ERR_DEVICE,
                                   "plugin %.100s: %s returned %d, which is no "
                                   "result",
                                   d->path, slot, rc);
    d->lost = d->lost || rc == BATON_ERR_DEVICE_LOST;
    if (e && (e->code != rc || !e->text[0]))
        return base_fail(e, rc, "plugin %.100s: %s failed and does not say why (code %d)", d->path,
                         slot, rc);
    if (e)
        e->text[sizeof e->text - 1] = '\0';
    return rc;
}

int device_plugin_alive(const struct plugin_device *d, struct baton_error *e)
{
    return d->lost
               ? base_fail(e, BATON_ERR_DEVICE_LOST,
                           "plugin %.100s: the device is lost and must be opened again", d->path)
               : 0;
}

/* ---- the table ----------------------------------------------------------------------------- */

static int missing(const struct plugin_device *d, const char *slot, struct baton_error *e)
{
    return base_fail(e, BATON_ERR_UNSUPPORTED, "plugin %.100s has no %s, which is required",
                     d->path, slot);
}

static int check_table(const struct plugin_device *d, struct baton_error *e)
{
    const struct baton_device_api *a = &d->api;
    const struct {
        bool there;
        const char *slot;
    } required[] = {
        {a->open, "open"},
        {a->close, "close"},
        {a->caps, "caps"},
        {a->weight_bind, "weight_bind"},
        {a->weight_close, "weight_close"},
        {a->program_open, "program_open"},
        {a->program_close, "program_close"},
        {a->submit, "submit"},
        {a->wait, "wait"},
    };
    for (size_t i = 0; i < sizeof required / sizeof *required; i++)
        if (!required[i].there)
            return missing(d, required[i].slot, e);
    return 0;
}

/* The host's table holds what both know; the rest of it stays NULL. */
static int take_table(struct plugin_device *d, const struct baton_device_api *theirs,
                      struct baton_error *e)
{
    if (!theirs)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "plugin %.100s does not serve ABI %u", d->path,
                         BATON_DEVICE_ABI);
    if (theirs->abi_version != BATON_DEVICE_ABI)
        return base_fail(e, BATON_ERR_UNSUPPORTED,
                         "plugin %.100s is built for device ABI %u, this is %u", d->path,
                         theirs->abi_version, BATON_DEVICE_ABI);
    size_t n = theirs->struct_size < sizeof d->api ? theirs->struct_size : sizeof d->api;
    memcpy(&d->api, theirs, n);
    return check_table(d, e);
}

static int load(struct plugin_device *d, struct baton_error *e)
{
    union {
        void *address;
        baton_device_plugin_fn fn;
    } entry;
    /* Without a slash dlopen would search the system's libraries for it. */
    char path[sizeof d->path + 2];
    snprintf(path, sizeof path, "%s%s", strchr(d->path, '/') ? "" : "./", d->path);
    d->object = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!d->object)
        return base_fail(e, BATON_ERR_DEVICE, "plugin %.200s", dlerror());
    entry.address = dlsym(d->object, BATON_DEVICE_SYMBOL);
    if (!entry.address)
        return base_fail(e, BATON_ERR_DEVICE, "%.100s is no device plugin: it has no %s", d->path,
                         BATON_DEVICE_SYMBOL);
    return take_table(d, entry.fn(BATON_DEVICE_ABI), e);
}

/* ---- caps ---------------------------------------------------------------------------------- */

static int check_caps(const struct plugin_device *d, const struct baton_caps *c,
                      struct baton_error *e)
{
    const struct baton_device_api *a = &d->api;
    const char *what = NULL;
    if (c->host_kv == c->lane_kv)
        what = "has KV in host pages or in its lanes, one of the two";
    else if (c->kv_dtype != BATON_F32 && c->kv_dtype != BATON_BF16)
        what = "wants pages of neither f32 nor bf16";
    else if (c->kv_block != 64)
        what = "wants pages of other than 64 positions";
    else if (!c->max_rows || !c->max_lanes)
        what = "takes no rows or has no lanes";
    else if (!c->prefill && !c->decode)
        what = "neither prefills nor decodes";
    else if (c->kv_grain && c->kv_block % c->kv_grain)
        what = "has a kv_grain that does not divide a page";
    else if (c->lane_kv && !(a->kv_open && a->kv_close && a->lane_bind && a->lane_release &&
                             a->kv_read && a->kv_write))
        what = "has KV in its lanes and not all of the slots for that";
    return what ? base_fail(e, BATON_ERR_UNSUPPORTED, "plugin %.100s %s", d->path, what) : 0;
}

static int read_caps(struct plugin_device *d, struct baton_error *e)
{
    struct baton_caps c = {.struct_size = sizeof c};
    int rc = device_plugin_result(d, "caps", d->api.caps(d->theirs, &c, e), e);
    if (rc == 0)
        rc = check_caps(d, &c, e);
    if (rc)
        return rc;
    c.struct_size = sizeof c;
    c.name[sizeof c.name - 1] = c.detail[sizeof c.detail - 1] = '\0';
    c.numerics[sizeof c.numerics - 1] = '\0';
    if (!c.name[0])
        snprintf(c.name, sizeof c.name, "plugin");
    d->base.caps = c;
    return 0;
}

/* ---- the device ---------------------------------------------------------------------------- */

static void plugin_close(struct device *base)
{
    struct plugin_device *d = of(base);
    if (d->theirs)
        d->api.close(d->theirs);
    if (d->object)
        dlclose(d->object);
    free(d->artifact);
    free(d->first);
    free(d);
}

/* Keys of the host's are taken out; the others are the plugin's. */
static int take_keys(struct plugin_device *d, const struct device_arg *args, unsigned n_args,
                     struct baton_device_key *keys, uint32_t *n_keys, struct baton_error *e)
{
    int rc = 0;
    for (unsigned i = 0; i < n_args && rc == 0; i++) {
        if (!strcmp(args[i].key, "path"))
            snprintf(d->path, sizeof d->path, "%s", args[i].value);
        else if (!strcmp(args[i].key, "artifact"))
            rc = base_file_read(args[i].value, MAX_ARTIFACT, &d->artifact, &d->artifact_bytes, e);
        else
            keys[(*n_keys)++] = (struct baton_device_key){args[i].key, args[i].value};
    }
    if (rc == 0 && !d->path[0])
        rc = base_fail(e, BATON_ERR_USAGE, "give the plugin's file: plugin:PATH");
    return rc;
}

static int plugin_open(const struct device_arg *args, unsigned n_args, struct device **out,
                       struct baton_error *e)
{
    struct baton_device_key keys[32];
    uint32_t n_keys = 0;
    struct plugin_device *d = base_try_alloc(1, sizeof *d, e);
    if (!d)
        return BATON_ERR_NOMEM;
    d->base.impl = &device_plugin;
    int rc = take_keys(d, args, n_args, keys, &n_keys, e);
    if (rc == 0)
        rc = load(d, e);
    if (rc == 0)
        rc = device_plugin_result(d, "open", d->api.open(keys, n_keys, &d->theirs, e), e);
    if (rc == 0)
        rc = read_caps(d, e);
    if (rc)
        plugin_close(&d->base);
    else
        *out = &d->base;
    return rc;
}

static int plugin_start(struct device *base, unsigned n_threads, struct baton_error *e)
{
    struct plugin_device *d = of(base);
    return d->api.start ? device_plugin_result(d, "start", d->api.start(d->theirs, n_threads, e), e)
                        : 0;
}

/* ---- weights ------------------------------------------------------------------------------- */

static void weight_close(struct device *base, struct device_weight *w)
{
    struct plugin_weight *x = (struct plugin_weight *)w;
    if (x->theirs)
        of(base)->api.weight_close(of(base)->theirs, x->theirs);
    free(x->name);
    free(x);
}

static int weight_bind(struct device *base, const struct baton_tensor *t, unsigned kind,
                       struct device_weight **out, struct baton_error *e)
{
    struct plugin_device *d = of(base);
    struct plugin_weight *w = base_try_alloc(1, sizeof *w, e);
    if (!w)
        return BATON_ERR_NOMEM;
    w->base.impl = base->impl;
    w->n_dims = t->n_dims;
    memcpy(w->stride, t->stride, sizeof w->stride);
    w->bytes = t->dtype == BATON_F32 ? 4 : 2;
    for (uint32_t i = 0; i < t->n_dims; i++)
        w->bytes *= t->shape[i];
    w->name = base_try_strdup(t->name, e);
    int rc = w->name ? 0 : BATON_ERR_NOMEM;
    if (rc == 0)
        rc = device_plugin_result(d, "weight_bind",
                                  d->api.weight_bind(d->theirs, t, kind, &w->theirs, e), e);
    if (rc)
        weight_close(base, &w->base);
    else
        *out = &w->base;
    return rc;
}

static uint64_t weight_bytes(const struct device_weight *w)
{
    return ((const struct plugin_weight *)w)->bytes;
}

/* ---- programs ------------------------------------------------------------------------------ */

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

static void program_close(struct device_program *base)
{
    struct plugin_program *p = (struct plugin_program *)base;
    struct plugin_device *d = of(base->device);
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

static int program_open(struct device *base, const struct device_graph *g,
                        struct device_program **out, struct baton_error *e)
{
    struct plugin_device *d = of(base);
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
            rc = read_caps(d, e);
        device_npu_plan_close(&plan);
    }
    if (rc) {
        program_close(&x->base);
        return rc;
    }
    d->program = x;
    *out = &x->base;
    return 0;
}

static void probe(struct baton_caps *caps, char why[128])
{
    caps->struct_size = sizeof *caps;
    snprintf(caps->name, sizeof caps->name, "plugin");
    snprintf(caps->detail, sizeof caps->detail, "a shared object with device ABI %u",
             BATON_DEVICE_ABI);
    snprintf(why, 128, "its file is given by name: plugin:PATH");
}

const struct device_impl device_plugin = {
    .name = "plugin",
    .pathed = true,
    .after_fork = true,
    .probe = probe,
    .open = plugin_open,
    .close = plugin_close,
    .start = plugin_start,
    .weight_bind = weight_bind,
    .weight_close = weight_close,
    .weight_bytes = weight_bytes,
    .program_open = program_open,
    .program_close = program_close,
    .submit = device_plugin_submit,
    .wait = device_plugin_wait,
    .kv_open = device_plugin_kv_open,
    .kv_close = device_plugin_kv_close,
    .kv_read = device_plugin_kv_read,
    .kv_write = device_plugin_kv_write,
    .lane_bind = device_plugin_lane_bind,
    .lane_clear = device_plugin_lane_clear,
    .lane_release = device_plugin_lane_release,
    .kv_look = device_plugin_kv_look,
    .pin = device_plugin_pin,
    .unpin = device_plugin_unpin,
};
