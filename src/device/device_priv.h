/* SPDX-License-Identifier: Apache-2.0 */
/* Seam between the registry and the in-process devices, and between verbs and runs. */
#ifndef DEVICE_DEVICE_PRIV_H
#define DEVICE_DEVICE_PRIV_H

#include "device/device.h"

/* What follows the name on the command line: "isa=avx2,kv-dtype=f32" cut at the commas. */
struct device_arg {
    char key[32];
    char value[512];
};

/* One in-process device kind. A device object starts with struct device. */
struct device_impl {
    const char *name; /* "cpu", "cpu:ref" */
    /* Fill caps as this machine has them; a reason in why (may stay "") where it can't be
     * opened. */
    void (*probe)(struct baton_caps *caps, char why[128]);
    int (*open)(const struct device_arg *args, unsigned n_args, struct device **out,
                struct baton_error *e);
    void (*close)(struct device *d);
    int (*start)(struct device *d, unsigned n_threads, struct baton_error *e);
    int (*weight_bind)(struct device *d, const struct baton_tensor *t, unsigned kind,
                       struct device_weight **out, struct baton_error *e);
    void (*weight_close)(struct device *d, struct device_weight *w);
    uint64_t (*weight_bytes)(const struct device_weight *w);
    int (*program_open)(struct device *d, const struct device_graph *g, struct device_program **out,
                        struct baton_error *e);
    void (*program_close)(struct device_program *p);
    int (*submit)(struct device_program *p, const struct baton_batch *b, uint64_t *id,
                  struct baton_error *e);
    int (*wait)(struct device_program *p, uint64_t id, uint64_t timeout_ns, struct baton_error *e);
    /* NULL: does not tell. */
    uint32_t (*layer_times)(struct device_program *p, struct device_layer_time *out, uint32_t n,
                            uint64_t *end_ns);
    /* Only without host_kv; NULL else. */
    int (*kv_open)(struct device *d, const struct device_kv_pool *pool, struct baton_error *e);
    void (*kv_close)(struct device *d);
    int (*kv_read)(struct device *d, uint32_t lane, const struct baton_kv_view *views,
                   uint32_t n_layers, const uint32_t *first, uint32_t end, struct baton_error *e);
    int (*kv_write)(struct device *d, uint32_t lane, const struct baton_kv_view *views,
                    uint32_t n_layers, const uint32_t *first, uint32_t end, struct baton_error *e);
    /* Only with lane_kv; NULL else. */
    int (*lane_bind)(struct device *d, uint32_t lane, struct baton_error *e);
    int (*lane_clear)(struct device *d, uint32_t lane, struct baton_error *e);
    void (*lane_release)(struct device *d, uint32_t lane);
    int (*kv_look)(struct device *d, uint32_t lane, struct baton_kv_view *views, uint32_t n_layers,
                   struct baton_error *e);
    /* NULL: compiles no files. */
    int (*artifact)(struct device_program *p, uint32_t positions, const uint8_t checkpoint[32],
                    char **out, size_t *n, struct baton_error *e);
    bool (*pin)(struct device *d, void *p, size_t bytes); /* NULL: of no use */
    void (*unpin)(struct device *d, void *p);
    bool after_fork; /* opened in the process that computes, never before its fork */
    bool compiles;   /* programs of fixed widths; opening takes next to nothing */
    bool numbered;   /* "name:N" is card N, handed to open as the argument "card" */
    bool pathed;     /* "name:PATH", handed to open as the argument "path" */
};

/* A device in a shared object of its own, opened at run time: the object's entry symbol returns
 * this. Both sides are built from one tree; version and sizes keep a stale object out. */
#define DEVICE_LIBRARY_VERSION 3u
#define DEVICE_LIBRARY_SYMBOL "baton_device_library"
/* What a card can do at most, measured; for benchmarks. */
struct device_ceilings {
    double copy_bytes_s; /* device memory, read plus written */
    double matrix_flops_s, to_device_bytes_s, to_host_bytes_s;
};
struct device_library {
    uint32_t version, struct_size, impl_size;
    const struct device_impl *impl;
    void (*probe_card)(unsigned card, struct baton_caps *caps, char why[128]);
    int (*ceilings)(unsigned card, struct device_ceilings *out, struct baton_error *e);
};
const struct device_library *baton_device_library(void);
/* The cuda library, or NULL and why. It stays open. */
const struct device_library *device_cuda_library(char why[128]);

/* First members of every device, weight, program and run: the dispatcher finds the device there. */
struct device {
    const struct device_impl *impl;
    struct baton_caps caps;
    uint32_t positions;    /* see device_positions */
    bool wants_checkpoint; /* see device_wants_checkpoint */
};

struct device_weight {
    const struct device_impl *impl;
};

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

/* Checks that hold for every device, made before a call reaches it (check.c). A tensor has a dtype
 * we read and the shape of its kind; a batch fits caps and graph, its ids are tokens and, where the
 * pages are the host's, the views have blocks for every row. */
int device_tensor_check(const struct baton_tensor *t, unsigned kind, struct baton_error *e);
int device_batch_check(const struct baton_caps *caps, const struct device_graph *g,
                       const struct baton_batch *b, struct baton_error *e);
/* Every key is one of `keys` (ends with NULL): else BATON_ERR_USAGE that lists them. */
int device_arg_check(const char *name, const struct device_arg *args, unsigned n_args,
                     const char *const *keys, struct baton_error *e);

extern const struct device_impl device_cpu_ref;                         /* cpu/scalar.c */
extern const struct device_impl device_cpu;                             /* cpu/init.c */
extern const struct device_impl device_cuda;                            /* cuda/load.c */
extern const struct device_impl device_plugin;                          /* plugin.c */
extern const struct device_impl device_npu_rngd;                        /* npu/device.c */
extern const struct device_impl device_npu_atom_b1, device_npu_atom_b4; /* npu/atom.c */

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

/* Exact; subnormals included, NaN stays NaN. */
static inline float device_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 0x1Fu, m = h & 0x3FFu;
    union {
        uint32_t u;
        float f;
    } v;
    if (exponent == 0) { /* m * 2^-24, exact in float32 */
        v.f = (float)m * 0x1p-24f;
        v.u |= sign;
        return v.f;
    }
    v.u = sign | (exponent == 31 ? 0x7F800000u : (exponent + 112u) << 23) | m << 13;
    return v.f;
}

#endif
