/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the cuda device's library: device, weights, plans, programs.
 *
 * Files: library.c (the entry symbol, cards, the device object), weight.c, pages.c (the device's
 * copy of the cache), record.c (a forward function's verbs as a list), plan.c (the list as steps
 * that kernels run), matmul.c (cuBLASLt), run.c (batches), step.c (one step), graph.c (decode steps
 * as CUDA graphs), export.c (layers to the host as they are done), and the kernels behind
 * kernels.h.
 *
 * A forward function makes the same calls for every batch, so it runs once, when the program is
 * opened: its verbs are written down, neighbours are joined (projections of one input, a product
 * and the sum it goes into, norm, rotation and append), and a run executes the steps.
 *
 * Cache: the engine's pool is host memory. The device allocates as many bytes of its own and keeps
 * the page at offset o of the pool at offset o of its copy, so block tables and layout records hold
 * for both. Computing touches the device's copy alone; pages.c copies between the two.
 */
#ifndef DEVICE_CUDA_CUDA_PRIV_H
#define DEVICE_CUDA_CUDA_PRIV_H

#include "base/base.h"
#include "device/cuda/kernels.h"
#include "device/device_priv.h"

#define CUDA_MAX_ROWS 8192u
#define CUDA_MAX_LANES 8u
#define CUDA_MAX_LAYERS 512u
#define CUDA_MAX_ROPES 4u
#define CUDA_MAX_HEAD_DIM 256u
#define CUDA_MAX_ARRAYS 64u

/* Error of a CUDA call: lost device, out of memory and the rest by name. 0 where rc is fine. */
int device_cuda_check(cudaError_t rc, const char *what, struct baton_error *e);

/* ---- device ------------------------------------------------------------------------------- */

struct cuda_device {
    struct device base;
    int card;
    struct cuda_card limits;
    bool overlap; /* programmatic launches: sm_90 and later */
    cudaStream_t compute, copy;
    struct device_cuda_matmul *matmul; /* opened with the first program */
    void *bounce;                      /* pinned memory on the way of weights */
    /* the cache */
    uint8_t *host; /* the engine's pool */
    uint8_t *pool; /* ours */
    size_t pool_bytes;
    bool pinned;
    uint32_t pool_serial; /* rises with every pool: graphs of another one are stale */
};

/* pages.c */
int device_cuda_kv_open(struct device *d, const struct device_kv_pool *pool, struct baton_error *e);
void device_cuda_kv_close(struct device *d);
int device_cuda_kv_read(struct device *d, uint32_t lane, const struct baton_kv_view *views,
                        uint32_t n_layers, const uint32_t *first, uint32_t end,
                        struct baton_error *e);
int device_cuda_kv_write(struct device *d, uint32_t lane, const struct baton_kv_view *views,
                         uint32_t n_layers, const uint32_t *first, uint32_t end,
                         struct baton_error *e);
bool device_cuda_pin(struct device *d, void *p, size_t bytes);
void device_cuda_unpin(struct device *d, void *p);
/* Put the copy of the pages that hold [first, first + n) on a stream. */
int device_cuda_pages_copy(struct cuda_device *d, const struct baton_kv_view *v, uint32_t first,
                           uint32_t n, bool to_host, cudaStream_t stream, struct baton_error *e);

/* ---- weights ------------------------------------------------------------------------------ */

/* Memory that several weights may share once they were joined. */
struct cuda_slab {
    void *data;
    uint32_t refs;
};

struct cuda_weight {
    struct device_weight base;
    char name[96];
    unsigned kind;
    uint32_t rows, cols; /* a vector is [1, cols] */
    struct cuda_slab *slab;
    cuda_bf16 *matrix; /* [rows, cols] in the slab */
    float *vector;     /* [cols] in the slab */
};
int device_cuda_weight_bind(struct device *d, const struct baton_tensor *t, unsigned kind,
                            struct device_weight **out, struct baton_error *e);
void device_cuda_weight_close(struct device *d, struct device_weight *w);
uint64_t device_cuda_weight_bytes(const struct device_weight *w);
/* Bring matrices of equal cols behind one another in memory, so that they are one. */
int device_cuda_weight_join(struct cuda_device *d, struct cuda_weight *const *w, uint32_t n,
                            struct baton_error *e);

/* ---- what a forward function asks for (record.c) ------------------------------------------ */

enum cuda_verb {
    CUDA_V_EMBED = 1,
    CUDA_V_NORM,
    CUDA_V_LINEAR,
    CUDA_V_HEAD_NORM,
    CUDA_V_ROPE,
    CUDA_V_APPEND,
    CUDA_V_ATTEND,
    CUDA_V_ADD,
    CUDA_V_GATE,
    CUDA_V_LAYER_DONE,
    CUDA_V_SELECT,
    CUDA_V_LOGITS,
};
struct cuda_op {
    enum cuda_verb verb;
    uint8_t y, x, z; /* arrays */
    struct cuda_weight *w, *b;
    float eps, offset; /* embed: offset is the scale */
    uint32_t heads, layer, rope;
    struct device_attn attn;
    int act;
};
struct cuda_record {
    struct cuda_op *ops;
    uint32_t n_ops, cap_ops;
    uint32_t cols[CUDA_MAX_ARRAYS];
    bool selected[CUDA_MAX_ARRAYS]; /* [n_logits, cols], not [n, cols] */
    uint32_t n_arrays, n_layers;
    struct device_rope ropes[CUDA_MAX_ROPES];
    uint32_t n_ropes;
};
int device_cuda_record_open(const struct device_graph *g, struct cuda_record *out,
                            struct baton_error *e);
void device_cuda_record_close(struct cuda_record *r);

/* ---- what kernels run (plan.c) ------------------------------------------------------------ */

enum cuda_step_kind {
    CUDA_S_EMBED = 1,
    CUDA_S_NORM,          /* y = norm(x); `lazy`: decode norms inside the next product */
    CUDA_S_NORM_ADD_NORM, /* x += norm(y; w); z = norm(x; w2); `lazy` alike */
    CUDA_S_LINEAR,        /* y.. = x w^T (+ b), or y += where `add` */
    CUDA_S_GATE,
    CUDA_S_HEADS,
    CUDA_S_ATTEND,
    CUDA_S_ADD,
    CUDA_S_LAYER_DONE,
    CUDA_S_SELECT,
    CUDA_S_LOGITS,
    CUDA_S_NARROW, /* the bf16 copy of a float32 array */
};
struct cuda_step {
    enum cuda_step_kind kind;
    uint8_t y, x, z;
    struct cuda_weight *w, *w2;
    const float *bias;             /* of the joined product, or NULL */
    uint32_t m;                    /* outputs of the joined product */
    bool add;                      /* into y */
    bool lazy;                     /* a norm: only the next product reads it */
    const struct cuda_step *norm;  /* a product: the lazy norm of its input */
    const struct cuda_step *heads; /* attention that does its heads in decode */
    bool late; /* heads, a layer's end: left to the attention behind them in decode */
    const struct cuda_step *gate; /* a product of gate and up: what follows */
    bool gated;                   /* a gate whose product did it in decode */
    float eps, offset;
    uint32_t layer;
    int act;
    struct device_attn attn;
    struct { /* heads: q, k, v */
        uint8_t array;
        uint32_t heads;
        struct cuda_weight *norm;
        int rope; /* -1 = none */
        float eps, offset;
    } part[3];
    uint32_t head_dim;
};

/* Where an array lives. Arrays that one joined product writes lie side by side in a row. */
struct cuda_array {
    uint32_t cols;
    bool wide;   /* float32; else bf16 */
    bool shadow; /* wide with a bf16 copy beside it */
    bool twin;   /* wide, summed up by products that others of them still read: see cuda_run */
    bool selected;
    uint8_t home;    /* array whose memory holds it (itself, or the first of its row) */
    uint32_t at;     /* column in the home's row */
    uint32_t ld;     /* of the row */
    void *data;      /* homes: [capacity, ld] */
    cuda_bf16 *copy; /* shadows */
    float *other;    /* twins: [CUDA_DECODE_ROWS, cols] */
};
struct cuda_plan {
    struct cuda_step *steps;
    uint32_t n_steps;
    struct cuda_array array[CUDA_MAX_ARRAYS];
    uint32_t n_arrays, n_layers, n_ropes;
    uint32_t max_heads; /* of attention that is split in decode */
    struct device_rope ropes[CUDA_MAX_ROPES];
    float *inv_freq; /* device memory [CUDA_MAX_ROPES][128] */
    void **extra;    /* joined biases, freed with the plan */
    uint32_t n_extra;
};
int device_cuda_plan_make(struct cuda_device *d, const struct cuda_record *r, struct cuda_plan *out,
                          struct baton_error *e);
void device_cuda_plan_free(struct cuda_plan *p);

/* ---- products (matmul.c) ------------------------------------------------------------------ */

struct device_cuda_matmul;
int device_cuda_matmul_open(struct device_cuda_matmul **out, struct baton_error *e);
void device_cuda_matmul_close(struct device_cuda_matmul *m); /* NULL is fine */
/* y [rows, m] = x [rows, k] w[m, k]^T, y bf16 or (wide) float32, added to y where `add`. */
int device_cuda_matmul(struct device_cuda_matmul *mm, cudaStream_t stream, void *y, uint32_t ldy,
                       bool wide, bool add, const cuda_bf16 *x, uint32_t ldx, const cuda_bf16 *w,
                       uint32_t rows, uint32_t m, uint32_t k, struct baton_error *e);

/* ceilings.c */
int device_cuda_ceilings(unsigned card, struct device_ceilings *out, struct baton_error *e);

/* ---- programs ----------------------------------------------------------------------------- */

/* What a graph belongs to. Compared as bytes. */
struct cuda_graph_key {
    uint32_t rows, n_logits, splits[CUDA_GROUPS];
    uint32_t position, chunk; /* chunk 1: the prefill of one span that starts at `position` */
    const float *logits;      /* where they go, if that is part of the graph */
};
struct cuda_graph {
    cudaGraphExec_t exec;
    struct cuda_graph_key key;
    uint64_t used;
};
#define CUDA_MAX_GRAPHS 32u
#define CUDA_GRAPH_ROWS 2048u /* longer prefills do not wait for launches */

struct cuda_program {
    struct device_program base;
    struct cuda_plan plan;
    uint32_t capacity; /* rows that the arrays have room for */
    float2 *angles[CUDA_MAX_ROPES];
    /* what a batch says, in pinned and in device memory */
    uint8_t *meta_host, *meta;
    size_t meta_bytes;
    uint32_t table_stride;
    struct cuda_partials partials;
    size_t partial_splits;
    float *logits; /* [logit_rows, vocab] device memory */
    uint32_t logit_rows;
    struct cuda_pages pages[CUDA_MAX_LAYERS]; /* of this run */
    struct cuda_export *export;               /* export.c */
    struct cuda_graph graphs[CUDA_MAX_GRAPHS];
    uint32_t n_graphs;
    struct cuda_graph_key seen[CUDA_MAX_GRAPHS]; /* prefills that ran once, in a ring */
    uint32_t n_seen;
    uint64_t clock;
};

/* A batch on its way. */
struct cuda_run {
    struct cuda_device *d;
    struct cuda_program *p;
    const struct baton_batch *b;
    struct cuda_rows rows;
    struct cuda_where at;
    bool decode; /* few rows: vector-matrix kernels and split attention */
    uint32_t splits[CUDA_GROUPS];
    bool flipped[CUDA_MAX_ARRAYS]; /* decode: a twin's values are in `other` now */
    bool exports;                  /* layers are copied to the host as they complete */
    bool pinned;                   /* the logits' place can be part of a graph */
    size_t meta_used;              /* bytes of what the batch says */
};
/* ---- layers on their way to the host (export.c) ------------------------------------------- */

/* Events around each layer's computing and copy; they have timestamps. */
int device_cuda_export_open(uint32_t n_layers, struct cuda_export **out, struct baton_error *e);
void device_cuda_export_close(struct cuda_export *x); /* NULL is fine */
/* Around the steps of a run that exports. */
int device_cuda_export_begin(struct cuda_run *r, struct baton_error *e);
int device_cuda_export_end(struct cuda_run *r, struct baton_error *e);
/* The layer's new rows leave on the copy stream once what is on the run's stream is done. */
int device_cuda_export_layer(struct cuda_run *r, uint32_t layer, struct baton_error *e);
/* Tell the batch's owner about layers in order as their copies end, while later ones compute. */
int device_cuda_export_tell(struct cuda_run *r, struct baton_error *e);
uint32_t device_cuda_layer_times(struct device_program *p, struct device_layer_time *out,
                                 uint32_t n, uint64_t *end_ns);

int device_cuda_program_open(struct device *d, const struct device_graph *g,
                             struct device_program **out, struct baton_error *e);
void device_cuda_program_close(struct device_program *p);
int device_cuda_submit(struct device_program *p, const struct baton_batch *b, uint64_t *id,
                       struct baton_error *e);
int device_cuda_wait(struct device_program *p, uint64_t id, uint64_t timeout_ns,
                     struct baton_error *e);

/* profile.c: where the time of a run goes, by events before every step, told on stderr where
 * $BATON_CUDA_PROFILE is set; such a run uses no graph. */
struct cuda_profile;
struct cuda_profile *device_cuda_profile_open(const struct cuda_run *r); /* NULL: not asked for */
void device_cuda_profile_step(struct cuda_profile *p, const struct cuda_run *r, uint32_t step);
void device_cuda_profile_close(struct cuda_profile *p, const struct cuda_run *r);

/* run.c: what the batch says to the device, logits to the host, and both around the steps. */
int device_cuda_meta_in(struct cuda_run *r, struct baton_error *e);
int device_cuda_logits_out(struct cuda_run *r, struct baton_error *e);
int device_cuda_whole_run(struct cuda_run *r, struct baton_error *e);

/* step.c: all steps of a run onto its stream. */
int device_cuda_steps(struct cuda_run *r, struct baton_error *e);
/* graph.c: the same through a graph: true where one serves this run. */
bool device_cuda_graph_fits(struct cuda_run *r);
int device_cuda_graph_run(struct cuda_run *r, struct baton_error *e);
void device_cuda_graphs_drop(struct cuda_program *p);

#endif
