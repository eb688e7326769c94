/* SPDX-License-Identifier: Apache-2.0 */
/* The device plugin ABI: program level. Version 0: fields may still change.
 *
 * A device runs *programs*. A program takes rows of tokens that belong to one or more sequences,
 * appends their keys and values to the KV cache and returns logits for the rows that were asked
 * for. The engine calls nothing else of a device, and never asks which device it is: it asks what
 * it can do (struct baton_caps).
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

#define BATON_DEVICE_ABI 0u

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

/* One submission. All arrays are the caller's. */
struct baton_batch {
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

/* What a device can do. Filled by caps(); unknown fields are zero. */
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
};

#ifdef __cplusplus
}
#endif
#endif
