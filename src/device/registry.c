/* SPDX-License-Identifier: Apache-2.0 */
/* The devices of this build, opening one by name, and the way from device.h to struct device_impl.
 *
 * Everything that is the same for all devices happens here or in check.c, so that an
 * implementation may rely on it: arguments are checked before they reach it. */
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "device/device_priv.h"

#define MAX_ARGS 16u

/* In the order in which they are listed; ends with NULL. A device adds its own line. */
static const struct device_impl *const impls[] = {
    &device_cpu,         &device_cpu_ref,     &device_cuda,   &device_npu_rngd,
    &device_npu_atom_b1, &device_npu_atom_b4, &device_plugin, NULL,
};

void device_list(device_list_fn fn, void *ctx)
{
    for (unsigned i = 0; impls[i]; i++) {
        struct baton_caps caps;
        char why[128] = "";
        memset(&caps, 0, sizeof caps);
        impls[i]->probe(&caps, why);
        fn(ctx, &caps, why[0] ? why : NULL);
    }
}

/* ---- names -------------------------------------------------------------------------------- */

static int unknown_name(const char *name, size_t n, struct baton_error *e)
{
    char known[160] = "";
    size_t used = 0;
    for (unsigned i = 0; impls[i] && used < sizeof known; i++)
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "",
                                 impls[i]->name);
    return base_fail(e, BATON_ERR_USAGE, "no device '%.*s' in this build; there are: %s",
                     (int)(n < 40 ? n : 40), name, known);
}

/* One "key=value" of n bytes. */
static int parse_arg(const char *s, size_t n, const char *name, struct device_arg *a,
                     struct baton_error *e)
{
    const char *eq = memchr(s, '=', n);
    size_t key = eq ? (size_t)(eq - s) : 0;
    if (key == 0 || n - key - 1 == 0)
        return base_fail(e, BATON_ERR_USAGE, "device '%.40s': '%.*s' is not key=value", name,
                         (int)(n < 40 ? n : 40), s);
    if (key >= sizeof a->key || n - key - 1 >= sizeof a->value)
        return base_fail(e, BATON_ERR_USAGE, "device '%.40s': '%.40s' is too long", name, s);
    memcpy(a->key, s, key);
    a->key[key] = '\0';
    memcpy(a->value, eq + 1, n - key - 1);
    a->value[n - key - 1] = '\0';
    return 0;
}

/* All pairs after the name: `rest` is "" or starts with a comma. */
static int parse_args(const char *rest, const char *name, struct device_arg *args, unsigned *n_args,
                      struct baton_error *e)
{
    *n_args = 0;
    while (*rest == ',') {
        size_t n = strcspn(++rest, ",");
        struct device_arg *a = &args[*n_args];
        if (*n_args == MAX_ARGS)
            return base_fail(e, BATON_ERR_USAGE, "device '%.40s': more than %u keys", name,
                             MAX_ARGS);
        int rc = parse_arg(rest, n, name, a, e);
        if (rc)
            return rc;
        for (unsigned i = 0; i < *n_args; i++)
            if (!strcmp(args[i].key, a->key))
                return base_fail(e, BATON_ERR_USAGE, "device '%.40s': key '%s' is given twice",
                                 name, a->key);
        rest += n;
        (*n_args)++;
    }
    return 0;
}

/* The device that the n bytes of a name mean; a number or path behind it goes to *card. */
static const struct device_impl *find_impl(const char *name, size_t n, struct device_arg *card)
{
    for (unsigned i = 0; impls[i]; i++) {
        size_t known = strlen(impls[i]->name);
        if (n < known || memcmp(impls[i]->name, name, known))
            continue;
        if (n == known)
            return impls[i];
        size_t rest = n - known - 1;
        if (impls[i]->pathed && name[known] == ':' && rest > 0 && rest < sizeof card->value) {
            snprintf(card->key, sizeof card->key, "path");
            snprintf(card->value, sizeof card->value, "%.*s", (int)rest, name + known + 1);
            return impls[i];
        }
        size_t digits = strspn(name + known + 1, "0123456789");
        if (impls[i]->numbered && name[known] == ':' && digits > 0 && digits < 4 &&
            known + 1 + digits == n) {
            snprintf(card->key, sizeof card->key, "card");
            snprintf(card->value, sizeof card->value, "%.*s", (int)digits, name + known + 1);
            return impls[i];
        }
    }
    return NULL;
}

bool device_survives_fork(const char *name)
{
    struct device_arg card;
    const struct device_impl *impl = find_impl(name, strcspn(name, ","), &card);
    return !impl || !impl->after_fork;
}

int device_open(const char *name, struct device **out, struct baton_error *e)
{
    struct device_arg args[MAX_ARGS + 1], card = {"", ""};
    struct baton_caps caps;
    char why[128] = "";
    unsigned n_args;
    size_t n = strcspn(name, ",");
    const struct device_impl *impl = find_impl(name, n, &card);

    if (!impl)
        return unknown_name(name, n, e);
    int rc = parse_args(name + n, impl->name, args, &n_args, e);
    if (rc)
        return rc;
    if (card.key[0])
        args[n_args++] = card;
    if (card.key[0] ||
        impl->numbered) /* which one is not known here: open tells why it is absent */
        return impl->open(args, n_args, out, e);
    memset(&caps, 0, sizeof caps);
    impl->probe(&caps, why);
    if (why[0])
        return base_fail(e, BATON_ERR_DEVICE, "device %s is absent: %s", impl->name, why);
    return impl->open(args, n_args, out, e);
}

bool device_static(const char *name, struct baton_caps *out)
{
    struct device_arg card;
    struct device *d = NULL;
    const struct device_impl *impl = find_impl(name, strcspn(name, ","), &card);
    if (!impl || !(impl->compiles || impl->pathed) || device_open(name, &d, NULL) || !d)
        return false;
    *out = d->caps;
    device_close(d);
    return impl->compiles || out->emulated || !out->dynamic;
}

bool device_is_foreign(const char *name)
{
    struct device_arg card;
    const struct device_impl *impl = find_impl(name, strcspn(name, ","), &card);
    return impl && (impl->compiles || impl->pathed);
}

uint32_t device_positions(const struct device *d)
{
    return d->positions;
}

uint32_t device_width(const struct baton_caps *caps, uint32_t n_rows)
{
    for (uint32_t i = 0; i < BATON_MAX_WIDTHS && caps->widths[i]; i++)
        if (n_rows <= caps->widths[i])
            return caps->widths[i];
    return 0;
}

int device_arg_check(const char *name, const struct device_arg *args, unsigned n_args,
                     const char *const *keys, struct baton_error *e)
{
    char known[120] = "none";
    size_t used = 0;
    for (unsigned k = 0; keys[k] && used < sizeof known; k++)
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%s", k ? ", " : "", keys[k]);
    for (unsigned i = 0; i < n_args; i++) {
        unsigned k = 0;
        while (keys[k] && strcmp(keys[k], args[i].key))
            k++;
        if (!keys[k])
            return base_fail(e, BATON_ERR_USAGE, "device %s has no key '%s'; there are: %s", name,
                             args[i].key, known);
    }
    return 0;
}

/* ---- dispatch ----------------------------------------------------------------------------- */

void device_close(struct device *d)
{
    if (d)
        d->impl->close(d);
}

const struct baton_caps *device_caps(const struct device *d)
{
    return &d->caps;
}

bool device_wants_checkpoint(const struct device *d)
{
    return d->wants_checkpoint;
}

int device_start(struct device *d, unsigned n_threads, struct baton_error *e)
{
    return d->impl->start(d, n_threads, e);
}

int device_weight_bind(struct device *d, const struct baton_tensor *t, unsigned kind,
                       struct device_weight **out, struct baton_error *e)
{
    int rc = device_tensor_check(t, kind, e);
    return rc ? rc : d->impl->weight_bind(d, t, kind, out, e);
}

void device_weight_close(struct device *d, struct device_weight *w)
{
    if (w)
        d->impl->weight_close(d, w);
}

uint64_t device_weight_bytes(const struct device_weight *w)
{
    /* A weight starts with the implementation that made it, see device_priv.h. */
    return w ? w->impl->weight_bytes(w) : 0;
}

int device_program_open(struct device *d, const struct device_graph *graph,
                        struct device_program **out, struct baton_error *e)
{
    if (!graph->forward || graph->n_layers == 0 || graph->vocab == 0 || graph->vocab > INT32_MAX)
        return base_fail(e, BATON_ERR_USAGE,
                         "graph of %u layers and %u tokens has no forward function or no size",
                         graph->n_layers, graph->vocab);
    return d->impl->program_open(d, graph, out, e);
}

void device_program_close(struct device_program *p)
{
    if (p)
        p->device->impl->program_close(p);
}

int device_program_artifact(struct device_program *p, uint32_t positions,
                            const uint8_t checkpoint[32], char **out, size_t *n,
                            struct baton_error *e)
{
    if (!p->device->impl->artifact)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "%s compiles no artifacts",
                         p->device->caps.name);
    return p->device->impl->artifact(p, positions, checkpoint, out, n, e);
}

int device_submit(struct device_program *p, const struct baton_batch *b, uint64_t *id,
                  struct baton_error *e)
{
    int rc = device_batch_check(&p->device->caps, &p->graph, b, e);
    return rc ? rc : p->device->impl->submit(p, b, id, e);
}

int device_wait(struct device_program *p, uint64_t id, uint64_t timeout_ns, struct baton_error *e)
{
    return p->device->impl->wait(p, id, timeout_ns, e);
}

uint32_t device_layer_times(struct device_program *p, struct device_layer_time *out, uint32_t n,
                            uint64_t *end_ns)
{
    return p->device->impl->layer_times ? p->device->impl->layer_times(p, out, n, end_ns) : 0;
}

int device_kv_open(struct device *d, const struct device_kv_pool *pool, struct baton_error *e)
{
    return d->impl->kv_open ? d->impl->kv_open(d, pool, e) : 0;
}

void device_kv_close(struct device *d)
{
    if (d->impl->kv_close)
        d->impl->kv_close(d);
}

int device_kv_read(struct device *d, uint32_t lane, const struct baton_kv_view *views,
                   uint32_t n_layers, const uint32_t *first, uint32_t end, struct baton_error *e)
{
    return d->impl->kv_read ? d->impl->kv_read(d, lane, views, n_layers, first, end, e) : 0;
}

int device_kv_write(struct device *d, uint32_t lane, const struct baton_kv_view *views,
                    uint32_t n_layers, const uint32_t *first, uint32_t end, struct baton_error *e)
{
    return d->impl->kv_write ? d->impl->kv_write(d, lane, views, n_layers, first, end, e) : 0;
}

int device_lane_bind(struct device *d, uint32_t lane, struct baton_error *e)
{
    return d->impl->lane_bind ? d->impl->lane_bind(d, lane, e) : 0;
}

int device_lane_clear(struct device *d, uint32_t lane, struct baton_error *e)
{
    return d->impl->lane_clear ? d->impl->lane_clear(d, lane, e) : 0;
}

void device_lane_release(struct device *d, uint32_t lane)
{
    if (d->impl->lane_release)
        d->impl->lane_release(d, lane);
}

int device_kv_look(struct device *d, uint32_t lane, struct baton_kv_view *views, uint32_t n_layers,
                   struct baton_error *e)
{
    return d->impl->kv_look ? d->impl->kv_look(d, lane, views, n_layers, e) : 0;
}

bool device_pin(struct device *d, void *p, size_t bytes)
{
    return d->impl->pin && d->impl->pin(d, p, bytes);
}

void device_unpin(struct device *d, void *p)
{
    if (d->impl->unpin)
        d->impl->unpin(d, p);
}

/* ---- runs --------------------------------------------------------------------------------- */

const struct device_verbs *device_run_verbs(const struct device_run *r)
{
    return r->verbs;
}

int device_run_end(struct device_run *r, struct baton_error *e)
{
    if (r->error.code && e)
        *e = r->error;
    return r->error.code;
}
