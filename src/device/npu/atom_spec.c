/* SPDX-License-Identifier: Apache-2.0 */
/* npu: what the emulated atom devices can do, the keys of their names, the rules of compiling. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/npu/artifact_priv.h"
#include "device/npu/atom_priv.h"

/* One logical device: 16 GiB of which the system has 288 MiB; nine tenths of that are used, and a
 * program takes 256 MiB. */
#define DEVICE_BYTES ((uint64_t)((16384u - 288u) * 9u / 10u - 256u) << 20)

static void fill_caps(struct baton_caps *caps, uint32_t bucket)
{
    struct baton_caps cpu = {0};
    char unused[128];
    device_cpu.probe(&cpu, unused);
    caps->struct_size = sizeof *caps;
    snprintf(caps->name, sizeof caps->name, "npu:atom-b%u", bucket);
    snprintf(caps->detail, sizeof caps->detail,
             "static graphs of %u lane%s, prefill in chunks, KV of its own, computed on the cpu; "
             "bf16",
             bucket, bucket > 1 ? "s" : "");
    snprintf(caps->numerics, sizeof caps->numerics, "npu-atom-emulated-1 on %.30s", cpu.numerics);
    caps->emulated = caps->prefill = caps->decode = caps->lane_kv = true;
    caps->row_invariant = cpu.row_invariant;
    caps->kv_dtype = BATON_BF16;
    caps->kv_block = ATOM_TILE;
    caps->max_lanes = bucket;
    caps->memory_bytes = DEVICE_BYTES;
    caps->widths[0] = caps->max_rows = ATOM_CHUNK;
}

void device_atom_probe_b1(struct baton_caps *caps, char why[128])
{
    fill_caps(caps, 1);
    why[0] = '\0';
}

void device_atom_probe_b4(struct baton_caps *caps, char why[128])
{
    fill_caps(caps, 4);
    why[0] = '\0';
}

/* Blocks shorter than a real device's show what happens at their borders with a short context. */
static void say_small_blocks(struct atom_device *d)
{
    struct baton_caps *caps = &d->base.base.caps;
    if (d->partition && d->partition < ATOM_MIN_PARTITION)
        snprintf(caps->detail, sizeof caps->detail,
                 "not a real profile: blocks of %u positions, of which real ones have %u or more",
                 d->partition, ATOM_MIN_PARTITION);
}

/* Blocks are partitions where a sequence has more than one. */
static void take_compiled(struct atom_device *d)
{
    const struct npu_geometry *g = &d->base.artifact->geometry;
    d->base.base.positions = g->positions;
    d->partition = g->block < g->positions ? g->block : 0;
    say_small_blocks(d);
}

static int take_partition(struct atom_device *d, const struct device_arg *a, struct baton_error *e)
{
    struct baton_caps *caps = &d->base.base.caps;
    int rc = device_npu_number(caps->name, a, ATOM_MAX_WHOLE, &d->partition, e);
    if (rc == 0 && d->partition % ATOM_CHUNK_LOCAL)
        rc = base_fail(e, BATON_ERR_USAGE, "%s: partition=%u is no multiple of %u", caps->name,
                       d->partition, ATOM_CHUNK_LOCAL);
    if (rc == 0)
        say_small_blocks(d);
    return rc;
}

static int take_devices(struct atom_device *d, const struct device_arg *a, struct baton_error *e)
{
    struct baton_caps *caps = &d->base.base.caps;
    int rc = device_npu_number(caps->name, a, 32, &d->devices, e);
    if (rc == 0 && (d->devices & (d->devices - 1)))
        rc = base_fail(e, BATON_ERR_USAGE, "%s: devices is %u; there are 1, 2, 4, 8, 16, 32",
                       caps->name, d->devices);
    caps->memory_bytes = d->devices * DEVICE_BYTES;
    return rc;
}

int device_atom_spec(const struct device_arg *args, unsigned n_args, struct atom_device *d,
                     struct baton_error *e)
{
    static const char *const keys[] = {"partition", "devices", "artifact", "fault", NULL};
    struct baton_caps *caps = &d->base.base.caps;
    fill_caps(caps, d->bucket);
    d->devices = 1;
    int rc = device_arg_check(caps->name, args, n_args, keys, e);
    if (rc == 0)
        rc = device_npu_take_artifact(&d->base, args, n_args, e);
    if (rc == 0 && d->base.artifact)
        take_compiled(d);
    for (unsigned i = 0; i < n_args && rc == 0; i++) {
        if (!strcmp(args[i].key, "partition"))
            rc = d->base.artifact ? device_npu_compiled_in(caps->name, &args[i], e)
                                  : take_partition(d, &args[i], e);
        else if (!strcmp(args[i].key, "artifact"))
            continue;
        else if (!strcmp(args[i].key, "devices"))
            rc = take_devices(d, &args[i], e);
        else
            rc = device_npu_fault_find(caps->name, args[i].value, &d->base.fault, e);
    }
    return rc;
}

static uint64_t up(uint64_t n, uint64_t to)
{
    return (n + to - 1) / to * to;
}

/* A sequence is compiled a multiple of the chunk long, so that no chunk reaches over its end, and,
 * where it is partitioned, of two partitions or more. */
int device_atom_geometry(const struct atom_device *d, uint32_t chunk, uint32_t positions,
                         uint32_t *block, uint32_t *max_seq, struct baton_error *e)
{
    uint64_t whole = up(positions, chunk), partition = d->partition;
    if (!partition && whole > ATOM_MAX_WHOLE)
        partition = ATOM_PARTITION;
    if (partition && whole < 2 * partition)
        return base_fail(e, BATON_ERR_UNSUPPORTED,
                         "%s: partitions of %u positions need a context of two or more; it has %u",
                         d->base.base.caps.name, (uint32_t)partition, positions);
    whole = partition ? up(whole, partition) : whole;
    if (whole > INT32_MAX)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "%s: a context of %u positions",
                         d->base.base.caps.name, positions);
    *block = (uint32_t)(partition ? partition : whole);
    *max_seq = (uint32_t)whole;
    return 0;
}
