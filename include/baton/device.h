/* SPDX-License-Identifier: Apache-2.0 */
/* The device plugin ABI: program level. Version 1, frozen: no field or slot below changes its
 * meaning or its place. What is added later stands behind the last member of a struct that begins
 * with struct_size, or is a new slot at the end of struct baton_device_api; a struct without
 * struct_size is never extended. docs/device-abi.md tells how a plugin is written and run.
 *
 * A device runs *programs*. A program takes rows of tokens that belong to one or more sequences,
 * appends their keys and values to the KV cache and returns logits for the rows that were asked
 * for. The engine calls nothing else of a device, and never asks which device it is: it asks what
 * it can do (struct baton_caps).
 *
 * A plugin is a shared object that exports BATON_DEVICE_SYMBOL. It needs no library of baton's.
 *
 * Threads: one thread at a time calls a device. Buffers in a call belong to the caller and must
 * stay valid until the call returns (until wait() returned, for submit()).
 */
#ifndef BATON_DEVICE_H
#define BATON_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <baton/error.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BATON_DEVICE_ABI 1u

/* Element types, the same numbers here, in files and on the wire. */
enum baton_dtype {
    BATON_F32 = 1,
    BATON_F16 = 2,
    BATON_BF16 = 3,
    BATON_I8 = 4,
};

enum baton_kv_kind {
    BATON_KV_PAGED =
        1, /* blocks found through a block table; block i holds [i*block, (i+1)*block) */
    BATON_KV_RING = 2, /* one region of `rows` rows; position p lives in row p % rows */
    BATON_KV_SLID = 3, /* one region of `rows` rows in the order of positions, moved down in place:
                          p lies in row p - max(0, end - rows) */
};

/* Layout record, version 1: how the K and V of one layer lie in memory. The wire carries the same
 * fields in the same order (docs/wire.md). The address of element (K|V, position p, head h, dim d)
 * in a paged layout is
 *     base + kv*stride_kv + table[p / block]*stride_block + h*stride_head
 *          + (p % block)*stride_position + d*stride_dim
 * with kv = 0 for K and 1 for V. `block` 0 means one block that holds the whole sequence.
 *
 * BATON_I8: stride_dim is 1, and a row (one head, one position) is head_dim_padded signed bytes
 * followed, at the next multiple of 4, by one float32 scale for each `scale_block` of them; element
 * = byte * scale. The other strides are multiples of 4 and leave room for the scales. Such entries
 * never travel: the wire has the dtype that the other side reads them as.
 */
struct baton_kv_layout {
    uint16_t version;   /* 1 */
    uint8_t dtype;      /* enum baton_dtype */
    uint8_t kind;       /* enum baton_kv_kind */
    uint8_t joint;      /* 1: K and V in one region, stride_kv apart; 0: two regions */
    uint8_t zero_fill;  /* 1: rows that hold nothing must be zero before the device reads */
    uint16_t alignment; /* bytes; of every block's start */
    uint32_t kv_heads;
    uint32_t head_dim;        /* elements with a meaning */
    uint32_t head_dim_padded; /* elements stored; >= head_dim */
    uint32_t block;           /* positions a block; 0 = whole sequence */
    uint32_t rows;            /* rows of a ring or slid window; 0 for paged */
    uint32_t scale_block;     /* elements that share one scale (BATON_I8); 0 = no scales */
    int64_t stride_kv;        /* bytes from K to V where joint; else 0 */
    int64_t stride_block;     /* bytes from one block to the next */
    int64_t stride_head;
    int64_t stride_position;
    int64_t stride_dim;
};

/* What an attention or append verb reads of the cache: one layer of one sequence. Filled by the
 * kv room, passed on by the engine. K and V are the addresses of block 0 of this layer. */
struct baton_kv_view {
    const struct baton_kv_layout *layout;
    uint8_t *k;
    uint8_t *v;            /* == k + stride_kv where joint */
    const int32_t *blocks; /* block table; entry < 0: those positions are not held */
    uint32_t n_blocks;
    uint32_t first; /* first absolute position that is held */
    uint32_t end;   /* one past the last position stored; appends write from here on */
};

/* A strided tensor in host memory, as bound. */
struct baton_tensor {
    const char *name; /* canonical (Hugging Face) name */
    uint32_t dtype;   /* enum baton_dtype */
    uint32_t n_dims;
    uint64_t shape[4];
    int64_t stride[4]; /* bytes */
    const void *data;
};

/* Consecutive rows of one sequence inside a batch. */
struct baton_span {
    uint32_t row;                   /* first row in the batch */
    uint32_t n_rows;                /* rows of this sequence, >= 1 */
    uint32_t position;              /* absolute position of the first of them */
    uint32_t lane;                  /* which lane the sequence is bound to */
    const struct baton_kv_view *kv; /* [n_layers]; host-paged devices */
};

/* One submission. All arrays are the caller's. A plugin is given struct_size; inside baton it may
 * be 0. */
struct baton_batch {
    uint32_t struct_size;
    const int32_t *ids; /* [n_rows] token ids */
    uint32_t n_rows;
    const struct baton_span *spans; /* [n_spans], rows ascending, together all of [0, n_rows) */
    uint32_t n_spans;
    const uint32_t *logit_rows; /* [n_logits] rows whose logits are wanted, ascending */
    uint32_t n_logits;
    float *logits; /* [n_logits, vocab] written before wait() returns */
    /* Called from the device's thread when the K and V of `layer` are complete and readable for
     * all rows of the batch, while later layers may still run. In layer order. May be NULL. */
    void (*layer_done)(void *ctx, uint32_t layer);
    void *ctx;
};

#define BATON_MAX_WIDTHS 8

/* What a device can do. Filled by caps(); unknown fields are zero. A plugin has one of host_kv and
 * lane_kv. */
struct baton_caps {
    uint32_t struct_size;
    char name[32];         /* "cpu", "cpu:ref", ... */
    char detail[128];      /* one line for `baton devices`: model, instruction sets, memory */
    bool emulated;         /* true: says so wherever a user can see the name */
    bool dynamic;          /* any number of rows; false: compiled widths only */
    bool prefill;          /* may prefill */
    bool decode;           /* may decode */
    bool row_invariant;    /* see docs/architecture.md, Exactness */
    bool host_kv;          /* KV pages are host memory that the engine owns */
    bool layer_export;     /* layer_done is called while later layers still run */
    uint32_t kv_dtype;     /* enum baton_dtype of the pages it wants */
    uint32_t kv_block;     /* positions a page */
    uint32_t max_rows;     /* rows a submission may have */
    uint32_t max_lanes;    /* spans a submission may have */
    uint64_t memory_bytes; /* memory it can use; 0 = unknown */
    char numerics[64];     /* names the arithmetic (instruction set, versions): pages computed
                              under another string are not mixed */
    bool whole_prompt;     /* prefills a prompt from position 0 in one submission or not at all */
    uint32_t widths[BATON_MAX_WIDTHS]; /* static: rows of its programs, ascending; 0 ends them */
    bool lane_kv; /* KV lies in the lanes of the device, in a layout of its own; not host_kv */
    bool checks_strides; /* refuses a weight whose strides are not those it was compiled for; where
                            it does not, the host compares the program's geometry */
    uint32_t kv_grain;   /* lane_kv: first and count of a copy are multiples of it, or of 1 where it
                            is 0; it divides kv_block */
};

/* ---- plugins ------------------------------------------------------------------------------- */

/* Opaque objects of a plugin; it casts them to its own. */
struct baton_device;
struct baton_weight;
struct baton_program;

/* One of the `,key=value` pairs behind the path. */
struct baton_device_key {
    const char *key, *value;
};

/* What a weight is used for; bits. */
enum baton_weight_kind {
    BATON_WEIGHT_MATRIX = 1, /* [m, k], right operand of LINEAR and LOGITS */
    BATON_WEIGHT_VECTOR = 2, /* [n], norms and biases */
    BATON_WEIGHT_TABLE = 4,  /* [vocab, k], read by EMBED; with MATRIX where embeddings are tied */
};

/* Operations of a plan. `x`, `y` are a[0], a[1] unless said otherwise; all arrays are row-major
 * float32 [rows, cols] in memory of the plugin, rows those of the batch. */
enum baton_verb {
    BATON_VERB_EMBED = 1, /* x[i,:] = w[ids[i],:] * scale */
    BATON_VERB_NORM,      /* x = y / sqrt(mean(y^2) + eps) * (offset + w), over a row; x may be y */
    BATON_VERB_LINEAR,    /* x = y w^T + b; b may be NULL */
    BATON_VERB_HEAD_NORM, /* as NORM, each of `heads` heads of a row of x, in place */
    BATON_VERB_ROPE,   /* each of `heads` heads of head_dim: pair (i, i + head_dim/2) is turned by
                             (float)position * inv_freq[i], in place */
    BATON_VERB_APPEND, /* K = a[0], V = a[1], stored at the rows' positions in `layer` */
    BATON_VERB_ATTEND, /* x = softmax(scale q k^T) v over the cache of `layer`, q = y; causal, and
                             with a window a query at p sees [max(0, p-window+1), p] */
    BATON_VERB_ADD,    /* x += y */
    BATON_VERB_GATE,   /* x = act(a[1]) * a[2]; x may be a[1] */
    BATON_VERB_LAYER_DONE, /* K and V of `layer` are complete: layer_done of the batch */
    BATON_VERB_SELECT,     /* x = the rows of y that the batch wants logits of: n_logits rows */
    BATON_VERB_LOGITS,     /* the batch's logits = x w^T; x has n_logits rows */
};

enum baton_act {
    BATON_ACT_SILU = 1,      /* x / (1 + exp(-x)) */
    BATON_ACT_GELU_TANH = 2, /* 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) */
};

/* One step; members that its verb does not name are zero. */
struct baton_step {
    uint32_t verb;                                     /* enum baton_verb */
    uint32_t a[3];                                     /* arrays, by number */
    uint32_t layer, heads, kv_heads, head_dim, window; /* heads: of the array; ATTEND: of q */
    uint32_t act;                                      /* enum baton_act */
    float scale, eps, offset;
    const struct baton_weight *w, *b; /* as weight_bind returned them */
    const float *inv_freq;            /* [head_dim/2] */
};

/* A model's forward function, written down. Later versions of the host may write verbs that are not
 * above; a plugin refuses a plan with one it does not know (BATON_ERR_UNSUPPORTED). */
struct baton_plan {
    uint32_t struct_size;
    uint32_t n_layers, vocab, n_arrays, n_steps;
    const uint32_t *cols; /* [n_arrays] columns of each array */
    const struct baton_step *steps;
};

/* What a program is made of: a plan always, and the bytes of the file of `artifact=` where one was
 * given. Valid during program_open. */
struct baton_source {
    uint32_t struct_size;
    const struct baton_plan *plan;
    const void *artifact; /* NULL without */
    uint64_t artifact_bytes;
};

enum baton_port_kind {
    BATON_PORT_WEIGHT = 1,
    BATON_PORT_ACTIVATION = 2,
    BATON_PORT_TABLE = 3, /* angles, positions, block tables */
    BATON_PORT_MASK = 4,
    BATON_PORT_KV = 5,
};

/* One input or output of a compiled program. */
struct baton_port {
    const char *name;
    uint32_t kind, dtype, n_dims;
    uint64_t shape[4];
    int64_t compiled[4]; /* byte strides of the sample that the program was compiled with */
    int64_t bound[4];    /* byte strides of what is bound to it now */
};

enum baton_phase { BATON_PHASE_PREFILL = 1, BATON_PHASE_DECODE = 2 }; /* bits */
enum baton_host_part {
    BATON_HOST_EMBED = 1, /* bits: what does not run on the device */
    BATON_HOST_NORM = 2,
    BATON_HOST_HEAD = 4,
};

/* The record of one compiled program. Pointers are the program's and live as long as it does. */
struct baton_geometry {
    uint32_t struct_size;
    uint32_t phase, width, lanes;                  /* width 0: any number of rows */
    uint32_t max_positions;                        /* 0: any */
    uint32_t first_layer, n_layers, export_layers; /* export_layers: that leave together; 0: none
                                                      before the batch is over */
    uint32_t host_parts;                           /* enum baton_host_part */
    uint32_t alignment;                            /* bytes, of host memory in a copy; 0: any */
    uint32_t n_inputs, n_outputs;
    const struct baton_port *inputs, *outputs;
    const struct baton_kv_layout *global, *local; /* lane_kv: as KV lies in the device */
    char artifact[65];                            /* SHA-256, hex; "" where there is none */
    char model[65];    /* SHA-256 of the checkpoint compiled for, or "" */
    char compiler[64]; /* name and version */
};

/* Positions [first, first + count) of the K or V of one layer of one lane, and where they lie on
 * the host: `host` is the address of the first of them, head 0, dim 0; stride_head,
 * stride_position and stride_dim of `layout` lead on. A copy stays within one block of the
 * layout. */
struct baton_kv_copy {
    uint32_t lane, layer;
    uint32_t which; /* 0: K, 1: V */
    uint32_t first, count;
    void *host;
    const struct baton_kv_layout *layout;
};

/* The slots of a plugin. Results are 0 or a negative code of baton/error.h with a sentence in e; a
 * slot that is NULL or behind struct_size answers BATON_ERR_UNSUPPORTED (or does nothing, where it
 * returns nothing). BATON_ERR_DEVICE_LOST from any slot: every lane is lost, the host calls nothing
 * any more but the slots that return nothing (close, weight_close, program_close, kv_close,
 * lane_release, buffer_free, buffer_unregister). Nothing may be thrown, printed or exited through
 * a slot. */
struct baton_device_api {
    uint32_t abi_version; /* BATON_DEVICE_ABI that the plugin was built with */
    uint32_t struct_size; /* sizeof (struct baton_device_api), as built */

    /* Required. Opens the device in the process that will compute, exclusively; keys are valid
     * during the call. An unknown key is BATON_ERR_USAGE that lists the known ones. */
    int (*open)(const struct baton_device_key *keys, uint32_t n_keys, struct baton_device **out,
                struct baton_error *e);
    /* Required. After programs, weights and KV were closed. Also of a lost device. */
    void (*close)(struct baton_device *d);
    /* Required. Fill `out`, which is zero besides struct_size; no byte behind that. Asked for after
     * open, and once more after program_open, which may settle widths and rows. */
    int (*caps)(struct baton_device *d, struct baton_caps *out, struct baton_error *e);
    /* Threads that the host would have it use at most, 0 = its own choice. Once, before programs
     * run. */
    int (*start)(struct baton_device *d, uint32_t n_threads, struct baton_error *e);

    /* Required. Take a weight as it is bound: any strides. The data may go when this returns. */
    int (*weight_bind)(struct baton_device *d, const struct baton_tensor *t, uint32_t kind,
                       struct baton_weight **out, struct baton_error *e);
    void (*weight_close)(struct baton_device *d, struct baton_weight *w); /* required */

    /* Required. After all weights of the plan are bound; they outlive the program. */
    int (*program_open)(struct baton_device *d, const struct baton_source *s,
                        struct baton_program **out, struct baton_error *e);
    void (*program_close)(struct baton_device *d, struct baton_program *p); /* required */
    /* Fill `out`, which is zero besides struct_size. The host refuses a program of which a weight's
     * compiled strides are not the bound ones, unless caps.checks_strides. */
    int (*geometry)(struct baton_device *d, struct baton_program *p, struct baton_geometry *out,
                    struct baton_error *e);
    /* Required. Begin a batch and give it a number; a synchronous device has finished it when this
     * returns. The batch is valid until wait returned for it. */
    int (*submit)(struct baton_device *d, struct baton_program *p, const struct baton_batch *b,
                  uint64_t *id, struct baton_error *e);
    /* Required. Wait until batch `id` is over; BATON_ERR_TIMEOUT where it is not yet, and it may be
     * waited for again. layer_done comes from within submit or wait. */
    int (*wait)(struct baton_device *d, struct baton_program *p, uint64_t id, uint64_t timeout_ns,
                struct baton_error *e);
    /* Give up batch `id` as soon as possible; wait then says BATON_ERR_CANCELLED, or 0 where it was
     * over already. */
    int (*cancel)(struct baton_device *d, struct baton_program *p, uint64_t id,
                  struct baton_error *e);

    /* lane_kv only, where they are required: room for `lanes` sequences of at most `positions`. */
    int (*kv_open)(struct baton_device *d, struct baton_program *p, uint32_t positions,
                   uint32_t lanes, struct baton_error *e);
    void (*kv_close)(struct baton_device *d);
    /* Before a sequence's first row is computed or written in a lane, and after its last. */
    int (*lane_bind)(struct baton_device *d, uint32_t lane, struct baton_error *e);
    int (*lane_clear)(struct baton_device *d, uint32_t lane, struct baton_error *e); /* zero-fill */
    void (*lane_release)(struct baton_device *d, uint32_t lane);
    /* Copy from the lanes to the host, from the host to the lanes, all in one call; done when it
     * returns. After a write the sequence has `end` positions. */
    int (*kv_read)(struct baton_device *d, const struct baton_kv_copy *copies, uint32_t n,
                   struct baton_error *e);
    int (*kv_write)(struct baton_device *d, const struct baton_kv_copy *copies, uint32_t n,
                    uint32_t end, struct baton_error *e);
    /* Show a bound lane as it lies in the device's layout: views[n_layers] of host memory of the
     * plugin, valid until the lane changes. */
    int (*kv_look)(struct baton_device *d, uint32_t lane, struct baton_kv_view *views,
                   uint32_t n_layers, struct baton_error *e);

    /* Host memory that the device reaches without a detour: its own, or the host's made so. */
    int (*buffer_alloc)(struct baton_device *d, size_t bytes, void **out, struct baton_error *e);
    void (*buffer_free)(struct baton_device *d, void *p);
    int (*buffer_register)(struct baton_device *d, void *p, size_t bytes, struct baton_error *e);
    void (*buffer_unregister)(struct baton_device *d, void *p);
};

/* A plugin exports, under this name, a function of this type: the table, which lives as long as the
 * object is loaded; or NULL where it can't serve a host of that version. A host takes its own
 * version alone. */
#define BATON_DEVICE_SYMBOL "baton_device_plugin"
typedef const struct baton_device_api *(*baton_device_plugin_fn)(uint32_t host_abi);

#ifdef __cplusplus
}
#endif
#endif
