/* SPDX-License-Identifier: Apache-2.0 */
/* cpu: which instruction sets there are, and the device object. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <sched.h>

#include "device/cpu/cpu_priv.h"

/* ---- instruction sets --------------------------------------------------------------------- */

/* Kernels and what they need of the processor and the system, the best first. */
struct isa {
    const char *name;
    const struct cpu_kernels *kernels; /* NULL: not in this build */
    bool (*has)(void);
    const char *lacks;
};

static bool has_always(void)
{
    return true;
}

#if defined(__x86_64__)
/* F16C by its CPUID bit: clang 14 has no name for it. */
static bool has_avx2(void)
{
    unsigned a, b, c = 0, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

static bool has_avx512bf16(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16");
}
#endif

static const struct isa isas[] = {
#if defined(__x86_64__)
    {"avx512bf16", &device_cpu_kernels_avx512bf16, has_avx512bf16,
     "this processor or system has no AVX-512 F, BW, VL, DQ and BF16"},
    {"avx2", &device_cpu_kernels_avx2, has_avx2,
     "this processor or system has no AVX2, FMA and F16C"},
#else
    {"avx512bf16", NULL, NULL, "not in this build"},
    {"avx2", NULL, NULL, "not in this build"},
#endif
    {"scalar", &device_cpu_kernels_generic, has_always, ""},
};

enum { N_ISAS = sizeof isas / sizeof *isas };

const struct cpu_kernels *device_cpu_kernels_find(const char *isa, const char **why)
{
    for (unsigned i = 0; i < N_ISAS; i++) {
        bool named = isa && !strcmp(isa, isas[i].name);
        if ((named || !isa) && isas[i].kernels && isas[i].has())
            return isas[i].kernels;
        if (named) {
            *why = isas[i].lacks;
            return NULL;
        }
    }
    *why = NULL;
    return NULL;
}

/* ---- device ------------------------------------------------------------------------------- */

/* "AMD EPYC ..." from /proc/cpuinfo, or "". */
static void processor_name(char *out, size_t size)
{
    char line[256];
    out[0] = '\0';
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && !out[0] && fgets(line, sizeof line, f)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) || !colon)
            continue;
        line[strcspn(line, "\n")] = '\0';
        snprintf(out, size, "%s", colon + 1 + strspn(colon + 1, " "));
    }
    if (f)
        fclose(f);
}

static void fill_caps(struct baton_caps *caps, const struct cpu_kernels *kernels)
{
    char name[64];
    processor_name(name, sizeof name);
    caps->struct_size = sizeof *caps;
    snprintf(caps->name, sizeof caps->name, "cpu");
    snprintf(caps->detail, sizeof caps->detail, "%s%s%s kernels, bf16 weights and KV", name,
             name[0] ? "; " : "", kernels->isa);
    snprintf(caps->numerics, sizeof caps->numerics, "%s", kernels->numerics);
    caps->dynamic = caps->prefill = caps->decode = true;
    caps->row_invariant = caps->host_kv = caps->layer_export = true;
    caps->kv_dtype = BATON_BF16;
    caps->kv_block = CPU_TILE;
    caps->max_rows = CPU_MAX_ROWS;
    caps->max_lanes = CPU_MAX_LANES;
    caps->memory_bytes = base_memory_available();
}

static void cpu_probe(struct baton_caps *caps, char why[128])
{
    const char *unused;
    fill_caps(caps, device_cpu_kernels_find(NULL, &unused));
    why[0] = '\0';
}

static int read_args(const struct device_arg *args, unsigned n_args,
                     const struct cpu_kernels **kernels, struct baton_error *e)
{
    static const char *const keys[] = {"isa", "kv-dtype", NULL};
    const char *why = NULL, *isa = NULL;
    int rc = device_arg_check("cpu", args, n_args, keys, e);
    for (unsigned i = 0; i < n_args && rc == 0; i++) {
        if (!strcmp(args[i].key, "isa"))
            isa = args[i].value;
        else if (strcmp(args[i].value, "bf16"))
            rc = base_fail(e, BATON_ERR_UNSUPPORTED,
                           "cpu: kv-dtype is '%s'; its kernels read bf16 (cpu:ref has f32)",
                           args[i].value);
    }
    if (rc)
        return rc;
    *kernels = device_cpu_kernels_find(isa, &why);
    if (!*kernels && why)
        return base_fail(e, BATON_ERR_DEVICE, "cpu: isa=%s: %s", isa, why);
    if (!*kernels)
        return base_fail(e, BATON_ERR_USAGE,
                         "cpu: isa is '%s'; there are: scalar, avx2, avx512bf16", isa);
    return 0;
}

static int cpu_open(const struct device_arg *args, unsigned n_args, struct device **out,
                    struct baton_error *e)
{
    const struct cpu_kernels *kernels;
    int rc = read_args(args, n_args, &kernels, e);
    if (rc)
        return rc;
    struct cpu_device *d = base_try_alloc(1, sizeof *d, e);
    if (!d)
        return BATON_ERR_NOMEM;
    d->base.impl = &device_cpu;
    d->kernels = kernels;
    fill_caps(&d->base.caps, kernels);
    *out = &d->base;
    return 0;
}

static void cpu_close(struct device *base)
{
    struct cpu_device *d = (struct cpu_device *)base;
    base_pool_close(d->pool);
    free(d);
}

static int cpu_start(struct device *base, unsigned n_threads, struct baton_error *e)
{
    struct cpu_device *d = (struct cpu_device *)base;
    if (d->pool)
        return base_fail(e, BATON_ERR_USAGE, "cpu was started before");
    if (n_threads == 0) {
        cpu_set_t set;
        n_threads = sched_getaffinity(0, sizeof set, &set) == 0 ? (unsigned)CPU_COUNT(&set) : 1;
    }
    return base_pool_open(&d->pool, n_threads, e);
}

static int cpu_wait(struct device_program *p, uint64_t id, uint64_t timeout_ns,
                    struct baton_error *e)
{
    return 0; /* submit has finished the batch */
}

const struct device_impl device_cpu = {
    .name = "cpu",
    .probe = cpu_probe,
    .open = cpu_open,
    .close = cpu_close,
    .start = cpu_start,
    .weight_bind = device_cpu_weight_bind,
    .weight_close = device_cpu_weight_close,
    .weight_bytes = device_cpu_weight_bytes,
    .program_open = device_cpu_program_open,
    .program_close = device_cpu_program_close,
    .submit = device_cpu_submit,
    .wait = cpu_wait,
};
