/* SPDX-License-Identifier: Apache-2.0 */
/* plugin: loading the object, its table, what it can do, and weights. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

int device_plugin_read_caps(struct plugin_device *d, struct baton_error *e)
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
        rc = device_plugin_read_caps(d, e);
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
    .program_open = device_plugin_program_open,
    .program_close = device_plugin_program_close,
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
