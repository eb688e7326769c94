/* SPDX-License-Identifier: Apache-2.0 */
/* npu: what the emulated device can do, and the keys of its name. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/npu/artifact_priv.h"

static const uint32_t widths[] = {128, 1024, 2048, 8192};
enum { N_WIDTHS = sizeof widths / sizeof *widths };

static void fill_caps(struct baton_caps *caps)
{
    struct baton_caps cpu = {0};
    char unused[128];
    device_cpu.probe(&cpu, unused);
    caps->struct_size = sizeof *caps;
    snprintf(caps->name, sizeof caps->name, "npu:rngd");
    snprintf(caps->detail, sizeof caps->detail,
             "static graphs of 128, 1024, 2048 and 8192 rows, computed on the cpu; bf16");
    snprintf(caps->numerics, sizeof caps->numerics, "npu-rngd-emulated-1 on %.30s", cpu.numerics);
    caps->emulated = caps->prefill = caps->host_kv = caps->layer_export = true;
    caps->whole_prompt = true;
    caps->kv_dtype = BATON_BF16;
    caps->kv_block = NPU_PAGE;
    caps->max_lanes = 1;
    caps->memory_bytes = cpu.memory_bytes;
    memcpy(caps->widths, widths, sizeof widths);
    caps->max_rows = widths[N_WIDTHS - 1];
}

void device_npu_probe(struct baton_caps *caps, char why[128])
{
    fill_caps(caps);
    why[0] = '\0';
}

int device_npu_number(const char *device, const struct device_arg *a, uint32_t max, uint32_t *out,
                      struct baton_error *e)
{
    char *end;
    unsigned long n = strtoul(a->value, &end, 10);
    if (a->value[0] < '0' || a->value[0] > '9' || *end || n == 0 || n > max)
        return base_fail(e, BATON_ERR_USAGE, "%s: %s is '%s', not a number of 1 to %u", device,
                         a->key, a->value, max);
    *out = (uint32_t)n;
    return 0;
}

int device_npu_compiled_in(const char *device, const struct device_arg *a, struct baton_error *e)
{
    return base_fail(e, BATON_ERR_USAGE, "%s: %s= is compiled into the artifact: leave it out",
                     device, a->key);
}

/* The profile's programs are fixed; a file has some of them. */
static bool has_width(const struct baton_caps *caps, uint32_t width)
{
    for (uint32_t i = 0; i < BATON_MAX_WIDTHS && caps->widths[i]; i++)
        if (caps->widths[i] == width)
            return true;
    return false;
}

static int take_compiled(struct npu_device *d, struct baton_error *e)
{
    const struct npu_geometry *g = &d->artifact->geometry;
    struct baton_caps *caps = &d->base.caps;
    for (uint32_t i = 0; i < BATON_MAX_WIDTHS && g->widths[i]; i++)
        if (!has_width(caps, g->widths[i]))
            return base_fail(e, BATON_ERR_MISMATCH, "%.100s has a program of %u rows, %s has none",
                             d->artifact->path, g->widths[i], caps->name);
    if (!g->widths[0] || !g->part_layers)
        return base_fail(e, BATON_ERR_MISMATCH, "%.100s has no programs", d->artifact->path);
    memcpy(caps->widths, g->widths, sizeof caps->widths);
    for (uint32_t i = 0; i < BATON_MAX_WIDTHS && g->widths[i]; i++)
        caps->max_rows = g->widths[i];
    d->part_layers = g->part_layers;
    return 0;
}

static int no_such_width(const struct baton_caps *caps, uint32_t width, struct baton_error *e)
{
    char known[BATON_MAX_WIDTHS * 12] = "";
    size_t used = 0;
    for (uint32_t i = 0; i < BATON_MAX_WIDTHS && caps->widths[i]; i++)
        used += (size_t)snprintf(known + used, sizeof known - used, "%s%u", i ? ", " : "",
                                 caps->widths[i]);
    return base_fail(e, BATON_ERR_USAGE, "npu:rngd: no program of width %u; there are: %s", width,
                     known);
}

/* One program instead of the narrowest that fits. */
static int force_width(const struct device_arg *a, struct baton_caps *caps, struct baton_error *e)
{
    uint32_t width = 0;
    int rc = device_npu_number("npu:rngd", a, widths[N_WIDTHS - 1], &width, e);
    if (rc == 0 && !has_width(caps, width))
        rc = no_such_width(caps, width, e);
    if (rc)
        return rc;
    memset(caps->widths, 0, sizeof caps->widths);
    caps->widths[0] = caps->max_rows = width;
    return 0;
}

int device_npu_spec(const struct device_arg *args, unsigned n_args, struct npu_device *d,
                    struct baton_error *e)
{
    static const char *const keys[] = {"width", "parts", "artifact", "fault", NULL};
    fill_caps(&d->base.caps);
    d->part_layers = NPU_PART;
    int rc = device_arg_check("npu:rngd", args, n_args, keys, e);
    if (rc == 0)
        rc = device_npu_take_artifact(d, args, n_args, e);
    if (rc == 0 && d->artifact)
        rc = take_compiled(d, e);
    for (unsigned i = 0; i < n_args && rc == 0; i++) {
        if (!strcmp(args[i].key, "width"))
            rc = force_width(&args[i], &d->base.caps, e);
        else if (!strcmp(args[i].key, "artifact"))
            continue;
        else if (!strcmp(args[i].key, "parts"))
            rc = d->artifact ? device_npu_compiled_in("npu:rngd", &args[i], e)
                             : device_npu_number("npu:rngd", &args[i], 512, &d->part_layers, e);
        else
            rc = device_npu_fault_find("npu:rngd", args[i].value, &d->fault, e);
    }
    return rc;
}
