/* SPDX-License-Identifier: Apache-2.0 */
/* Seam between the registry and the in-process devices, and between verbs and runs. */
#ifndef DEVICE_DEVICE_PRIV_H
#define DEVICE_DEVICE_PRIV_H

#include "device/device.h"

/* What follows the name on the command line: "isa=avx2,kv-dtype=f32" cut at the commas. */
struct device_arg {
    char key[32];
    char value[96];
};

/* One in-process device kind. A device object starts with struct device. */
struct device_impl {
    const char *name; /* "cpu", "cpu:ref" */
    /* Fill caps as this machine has them; a reason in why (may stay "") where it can't be opened. */
    void (*probe)(struct baton_caps *caps, char why[128]);
    int (*open)(const struct device_arg *args, unsigned n_args, struct device **out,
                struct baton_error *e);
    void (*close)(struct device *d);
    int (*start)(struct device *d, unsigned n_threads, struct baton_error *e);
    int (*weight_bind)(struct device *d, const struct baton_tensor *t, unsigned kind,
                       struct device_weight **out, struct baton_error *e);
    void (*weight_close)(struct device *d, struct device_weight *w);
    uint64_t (*weight_bytes)(const struct device_weight *w);
    int (*program_open)(struct device *d, const struct device_graph *g,
                        struct device_program **out, struct baton_error *e);
    void (*program_close)(struct device_program *p);
    int (*submit)(struct device_program *p, const struct baton_batch *b, uint64_t *id,
                  struct baton_error *e);
    int (*wait)(struct device_program *p, uint64_t id, uint64_t timeout_ns,
                struct baton_error *e);
};

struct device {
    const struct device_impl *impl;
    struct baton_caps caps;
};

/* First members of every program and run, so that the dispatcher finds the device. */
struct device_program {
    struct device *device;
    struct device_graph graph;
};

struct device_run {
    const struct device_verbs *verbs;
    const struct baton_batch *batch;
    struct device_program *program;
    struct baton_error error; /* first one; code 0 = none */
};

extern const struct device_impl device_cpu_ref; /* cpu/scalar.c */
extern const struct device_impl device_cpu;     /* cpu/init.c */

/* bf16 is the upper half of a float32; conversion rounds to nearest even, NaN stays NaN. */
static inline float device_bf16_to_f32(uint16_t h)
{
    union {
        uint32_t u;
        float f;
    } v = {(uint32_t)h << 16};
    return v.f;
}

static inline uint16_t device_f32_to_bf16(float f)
{
    union {
        float f;
        uint32_t u;
    } v = {f};
    if ((v.u & 0x7FFFFFFFu) > 0x7F800000u)
        return (uint16_t)((v.u >> 16) | 0x0040u);
    return (uint16_t)((v.u + 0x7FFFu + ((v.u >> 16) & 1u)) >> 16);
}

#endif
