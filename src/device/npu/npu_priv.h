/* SPDX-License-Identifier: Apache-2.0 */
/* npu: emulated static-graph accelerators. They impose what such devices impose (fixed widths,
 * padding, lanes, parts of consecutive layers, strides fixed when compiling, a KV layout of their
 * own) and compute on this machine's cpu. Their times are this machine's times.
 *
 * Files: spec.c (names, what a profile can do), plan.c (verbs written down), parts.c (the plan cut
 * into programs), replay.c (steps through cpu's verbs), fault.c (faults that a test plants),
 * weight.c, device.c (the object), artifact_priv.h (programs in files). rngd, a producer of whole
 * prompts: rngd.c (runs), output.c (K and V of a part). atom, which decodes in lanes: atom_priv.h.
 *
 * rngd: a forward function runs once, when the program is opened. Its verbs up to the embedding,
 * and from the last layer's end on, are the host's; those between are cut into parts. A run takes a
 * whole prompt, pads it to the width, and computes part after part; between two parts only the
 * residual stream lives on. Operands of products are rounded to bf16, sums are float32.
 */
#ifndef DEVICE_NPU_NPU_PRIV_H
#define DEVICE_NPU_NPU_PRIV_H

#include "base/base.h"
#include "device/device_priv.h"

#define NPU_MAX_ARRAYS 64u
#define NPU_CHUNK 512u /* rows that cpu takes at a time; the width is computed in so many pieces */
#define NPU_PAGE 64u   /* positions of cpu's pages */
#define NPU_PART 4u    /* layers a part unless `parts=` says otherwise */
#define NPU_PAD_ID 0   /* token of padding rows */
#define NPU_NONCAUSAL_BLOCK 128u /* positions that see each other, where that fault is planted */

/* ---- faults (fault.c): each leaves plausible numbers and no error -------------------------- */

enum npu_fault {
    NPU_NO_FAULT,
    NPU_WEIGHT_STRIDE,   /* matrices are read with the strides of a transposed sample */
    NPU_KV_BLOCK_ORDER,  /* neighbouring blocks of 16 exported positions change places */
    NPU_NONCAUSAL,       /* attention sees all of its own 128 positions */
    NPU_PAD_LEAK,        /* padding comes first and is attended to */
    NPU_WINDOW_OFF,      /* local layers see one position too many */
    NPU_POSITION_SHIFT,  /* row p of K and V leaves as row p + 1 */
    NPU_ROPE_INTERLEAVE, /* pairs (2i, 2i+1) rotate instead of (i, i + d/2) */
    NPU_NORM_OFFSET,     /* norms multiply by 1 + w where w is right, and the other way round */
    NPU_GLOBAL_AS_LOCAL, /* global layers see the local layers' window alone */
    NPU_LANE_SWAP,       /* lanes 1 and 2 exchange their outputs when all lanes are active */
    NPU_LANE_BLEED,      /* attention of a lane takes in a little of the next lane's */
};
/* By name; BATON_ERR_USAGE that lists all. `device` is for the text. */
int device_npu_fault_find(const char *device, const char *name, enum npu_fault *out,
                          struct baton_error *e);
const char *device_npu_fault_name(enum npu_fault f);

/* ---- plan (plan.c, parts.c) ---------------------------------------------------------------- */

enum npu_verb {
    NPU_ARRAY = 1,
    NPU_EMBED,
    NPU_NORM,
    NPU_LINEAR,
    NPU_HEAD_NORM,
    NPU_ROPE,
    NPU_APPEND,
    NPU_ATTEND,
    NPU_ADD,
    NPU_GATE,
    NPU_LAYER_DONE,
    NPU_SELECT,
    NPU_LOGITS,
};

/* One verb. Arrays are numbers in the order in which they were made; what a pointer of the caller
 * led to is copied, since it need not outlive the recording. */
struct npu_step {
    enum npu_verb verb;
    uint32_t a[3]; /* arrays in the order of the verb's parameters; a made one is a[0] */
    uint32_t n;    /* columns, heads or layer */
    bool narrow;   /* the product's operand has not been rounded since it was written */
    const struct device_weight *w, *b;
    float x, y; /* scale; or eps and offset */
    enum device_act act;
    struct device_rope rope;
    struct device_attn attn;
};

/* Steps [first, end), layers [layer, layer + n_layers). */
struct npu_part {
    uint32_t first, end, layer, n_layers;
};

struct npu_plan {
    struct npu_step *steps;
    uint32_t n_steps, n_arrays;
    uint32_t residual;            /* the array that lives on between layers */
    uint32_t hidden;              /* its columns */
    uint32_t kv_heads, head_dim;  /* of the attention steps */
    uint32_t window;              /* of local layers; 0 = there are none */
    struct npu_part head, *parts; /* head: embedding. [n_parts] */
    struct npu_part tail;         /* last norm, selection, output matrix */
    uint32_t n_parts, max_layers; /* layers of the largest part */
};
int device_npu_plan_record(const struct device_graph *g, struct npu_plan *out,
                           struct baton_error *e);
/* Cut into parts of `layers` layers. BATON_ERR_UNSUPPORTED where another array than the residual
 * stream is read in a later layer than it was written in. */
int device_npu_plan_cut(struct npu_plan *p, uint32_t n_layers, uint32_t layers,
                        struct baton_error *e);
void device_npu_plan_close(struct npu_plan *p);

/* ---- objects ------------------------------------------------------------------------------- */

struct npu_artifact; /* artifact_priv.h */

struct npu_device {
    struct device base;
    struct device *cpu; /* what computes */
    enum npu_fault fault;
    uint32_t part_layers;          /* rngd */
    struct npu_artifact *artifact; /* of artifact=; NULL: compiled when the program is opened */
    bool strides_differ;           /* a weight is read with other strides than it was bound with */
};
/* Take artifact=FILE, which must be for this device. */
int device_npu_take_artifact(struct npu_device *d, const struct device_arg *args, unsigned n_args,
                             struct baton_error *e);
/* Everything besides programs and KV. `size` bytes, of which struct npu_device comes first. */
int device_npu_open(const struct device_impl *impl, size_t size, struct device **out,
                    struct baton_error *e);
void device_npu_close(struct device *d); /* half-built is fine */
int device_npu_start(struct device *d, unsigned n_threads, struct baton_error *e);
int device_npu_wait(struct device_program *p, uint64_t id, uint64_t timeout_ns,
                    struct baton_error *e);
/* A fault that changes nothing in this model would be taken for one that no probe finds. */
int device_npu_fault_check(const struct npu_device *d, const struct npu_plan *p,
                           struct baton_error *e);

/* Strides of a matrix as the sample had that was compiled, and as bound at run time. The device
 * reads with the former and compares nothing, as such devices do. */
struct npu_weight {
    struct device_weight base;
    struct device_weight *cpu;
    char *name;
    uint32_t dtype, n_dims;
    uint64_t shape[2];
    int64_t compiled[2], bound[2];
};

/* K and V of one part, [layer of the part][width][kv_heads*head_dim] bf16 each; and the pages that
 * cpu's attention reads. All layers of the graph have a view; those of the part a page run of their
 * own. */
struct npu_output {
    uint16_t *k, *v;
    uint8_t *pages;
    size_t kv_bytes, pages_bytes;
    struct baton_kv_layout layout;
    struct baton_kv_view *views; /* [n_layers of the graph] */
    int32_t *table;
    uint32_t width, row, n_layers;
};

/* Spans that stand in for a batch's own in one verb; n 0 = none. */
struct npu_spans {
    struct baton_span *spans;
    uint32_t n;
};

/* What the forward function that cpu runs does: the steps of `part`. */
struct npu_replay {
    const struct npu_plan *plan;
    const struct npu_part *part;
    enum npu_fault fault;
    bool lanes;                     /* rows are those of lanes */
    struct npu_spans rotated, seen; /* where rows stand when they are rotated, when they look */
    float *hidden; /* [rows, hidden] the residual stream, in where the part does not begin with the
                      embedding, out where it does not end with the logits */
    /* K and V of all rows of `layer` are about to be, were written to the pages of the batch. */
    void (*before_append)(const struct npu_replay *p, uint32_t layer); /* NULL = nothing to do */
    void (*appended)(const struct npu_replay *p, uint32_t layer, struct device_array k,
                     struct device_array v);
    void (*attended)(const struct npu_replay *p, uint32_t layer, struct device_array o); /* NULL */
};
/* The forward function; ctx: struct npu_replay. */
int device_npu_replay(const void *ctx, struct device_run *r, struct baton_error *e);
/* For NPU_NONCAUSAL: each row of the span stands where its block ends, or before `last`, so that it
 * sees what comes after it there. Returns how many spans `out` has now. */
uint32_t device_npu_stand_at_ends(struct baton_span *out, const struct baton_span *s,
                                  uint32_t block, uint32_t last);

struct npu_program {
    struct device_program base;
    struct npu_plan plan;
    struct device_program *cpu;
    struct npu_replay replay;
    struct npu_output output;
    float *hidden; /* [width, hidden] */
    size_t hidden_bytes;
    int32_t *ids; /* [width] */
    uint32_t width;
    uint32_t first;         /* row of the width that the piece under way starts with */
    uint32_t padding_first; /* padding rows that come before the prompt: a fault */
    struct baton_span spans[NPU_CHUNK];
};

/* Room for a part of `width` rows; what is there of another width goes. */
int device_npu_output_open(struct npu_output *o, const struct npu_plan *p, uint32_t n_layers,
                           uint32_t width, struct baton_error *e);
void device_npu_output_close(struct npu_output *o);
/* Rows [first, first + n) of K or V of a layer of the part, rounded to bf16. */
void device_npu_output_take(struct npu_output *o, bool v, uint32_t layer, const float *rows,
                            uint32_t first, uint32_t n);
/* Output rows [from, from + n) of a layer of the part to the caller's pages, at positions 0 on. */
void device_npu_output_export(const struct npu_output *o, uint32_t layer,
                              const struct baton_kv_view *to, uint32_t from, uint32_t n,
                              enum npu_fault fault);

/* weight.c */
int device_npu_weight_bind(struct device *d, const struct baton_tensor *t, unsigned kind,
                           struct device_weight **out, struct baton_error *e);
void device_npu_weight_close(struct device *d, struct device_weight *w);
uint64_t device_npu_weight_bytes(const struct device_weight *w);

/* rngd.c */
int device_npu_program_open(struct device *d, const struct device_graph *g,
                            struct device_program **out, struct baton_error *e);
void device_npu_program_close(struct device_program *p);
int device_npu_submit(struct device_program *p, const struct baton_batch *b, uint64_t *id,
                      struct baton_error *e);
int device_npu_artifact(struct device_program *p, uint32_t positions, const uint8_t checkpoint[32],
                        char **out, size_t *n, struct baton_error *e);

/* spec.c */
void device_npu_probe(struct baton_caps *caps, char why[128]);
int device_npu_spec(const struct device_arg *args, unsigned n_args, struct npu_device *d,
                    struct baton_error *e);
/* A key that stands in the artifact. */
int device_npu_compiled_in(const char *device, const struct device_arg *a, struct baton_error *e);
/* A decimal number of 1 to max. */
int device_npu_number(const char *device, const struct device_arg *a, uint32_t max, uint32_t *out,
                      struct baton_error *e);

#endif
