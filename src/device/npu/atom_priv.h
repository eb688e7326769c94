/* SPDX-License-Identifier: Apache-2.0 */
/* npu:atom-b1, npu:atom-b4: an emulated static-graph accelerator that decodes in compiled lanes and
 * prefills one prompt at a time, in chunks.
 *
 * K and V live in the device. Global layers: [blocks][kv_heads][block][head_dim], a block as long
 * as the compiled sequence, or a partition of it (`partition=`). Local layers: [lanes][kv_heads][W]
 * [head_dim], the newest W positions in order, moved down in place. One more block and one more
 * lane are the dummy's: rows of the bucket that no sequence has run there, with token 0 at position
 * 0.
 *
 * A chunk is always computed whole. Its padding is written behind the prompt in global layers, as
 * garbage that is masked and overwritten later; local layers drop it. A block number that is none
 * takes the device down, as an access out of bounds does: BATON_ERR_DEVICE_LOST from then on.
 *
 * Files: atom.c (programs and runs), atom_kv.c (memory, lanes), atom_slide.c (local layers in a
 * run), atom_copy.c (ways in and out), atom_spec.c (names and rules). */
#ifndef DEVICE_NPU_ATOM_PRIV_H
#define DEVICE_NPU_ATOM_PRIV_H

#include "device/npu/npu_priv.h"

#define ATOM_CHUNK 128u
#define ATOM_CHUNK_LOCAL 256u    /* of models with local layers */
#define ATOM_MAX_BUCKET 4u       /* lanes */
#define ATOM_MAX_WHOLE 32768u    /* positions of a block that holds the whole sequence */
#define ATOM_PARTITION 16384u    /* unless `partition=` says otherwise, where a block can't */
#define ATOM_MIN_PARTITION 4096u /* of a real device */
#define ATOM_TILE 64u            /* positions of cpu's tiles; head_dim is rounded up to it too */

struct atom_lane {
    bool bound;
    uint32_t length, first; /* positions stored; the first that an import gave local layers */
    uint32_t position;      /* of the run under way */
    bool spoiled;           /* the local layer under way has a row that is no number */
    int32_t *blocks;        /* [blocks_lane] of the pool; -1 = none */
    int32_t *tiles;         /* [max_seq / 64] the same for cpu, in tiles */
    int32_t *window;        /* [max_seq / 64] tiles of the scratch that a local layer's rows
                                     lie in during a run; -1 = none */
    uint8_t *scratch_k, *scratch_v;
    struct baton_kv_view *views; /* [n_layers] for cpu */
};

/* All of it for one pool of the engine. */
struct atom_kv {
    uint32_t n_layers, kv_heads, head_dim, window, lanes;
    uint32_t max_seq, block, blocks_lane, n_blocks; /* the last block is the dummy's */
    uint32_t scratch_tiles;
    const uint8_t *local;        /* [n_layers] */
    uint8_t *memory;             /* all tensors, one after another */
    size_t bytes, scratch_bytes; /* scratch_bytes: of one lane's K or V */
    uint8_t *scratch;
    uint8_t **k, **v;                           /* [n_layers] tensors */
    bool *taken;                                /* [n_blocks] */
    struct atom_lane *lane;                     /* [lanes + 1]; the last one is the dummy */
    struct baton_kv_layout global, slid;        /* as the device has them */
    struct baton_kv_layout tiled, window_tiled; /* as cpu reads the same, or the scratch */
};

struct atom_device {
    struct npu_device base;
    uint32_t bucket, partition, devices;
    bool lost;
    struct atom_program *program; /* the one that is open */
    uint64_t weight_bytes;
    struct atom_kv kv; /* memory NULL: no pool is open */
};

struct atom_program {
    struct device_program base;
    struct npu_plan plan;
    uint8_t *local; /* [n_layers] */
    struct npu_part whole;
    struct device_program *cpu;
    struct npu_replay replay;
    uint32_t chunk;
    int32_t ids[ATOM_CHUNK_LOCAL];
    float *logits; /* [bucket, vocab] */
    /* the run under way */
    uint32_t lane_of[ATOM_MAX_BUCKET], n_lanes; /* decode: of each row. prefill: the one */
    uint32_t valid;                             /* prefill: rows that are not padding */
    bool prefill;
    struct baton_span spans[ATOM_MAX_BUCKET], rotated[ATOM_CHUNK_LOCAL], seen[ATOM_CHUNK_LOCAL];
};

/* ---- atom_spec.c: the rules of a profile ---------------------------------------------------- */

void device_atom_probe_b1(struct baton_caps *caps, char why[128]);
void device_atom_probe_b4(struct baton_caps *caps, char why[128]);
int device_atom_spec(const struct device_arg *args, unsigned n_args, struct atom_device *d,
                     struct baton_error *e);
/* Positions of a block and of the compiled sequence for one of `positions`. */
int device_atom_geometry(const struct atom_device *d, uint32_t chunk, uint32_t positions,
                         uint32_t *block, uint32_t *max_seq, struct baton_error *e);

/* ---- atom_kv.c ------------------------------------------------------------------------------ */

int device_atom_kv_open(struct device *d, const struct device_kv_pool *pool, struct baton_error *e);
void device_atom_kv_close(struct device *d);
int device_atom_lane_bind(struct device *d, uint32_t lane, struct baton_error *e);
int device_atom_lane_clear(struct device *d, uint32_t lane, struct baton_error *e);
void device_atom_lane_release(struct device *d, uint32_t lane);
/* 0, or that the device is lost, or that no pool is open, or that there is no such lane. */
int device_atom_ready(const struct atom_device *d, uint32_t lane, struct baton_error *e);
/* Blocks for positions [0, end) of a bound lane. */
int device_atom_blocks(struct atom_kv *kv, struct atom_lane *lane, uint32_t end,
                       struct baton_error *e);
/* First position that a local layer has a row for after `length`. */
uint32_t device_atom_base(const struct atom_kv *kv, uint32_t length);
/* The row of a local layer, K or V, of a lane. */
uint8_t *device_atom_row(const struct atom_kv *kv, const uint8_t *tensor, uint32_t lane,
                         uint32_t head, uint32_t row);

/* ---- atom_slide.c --------------------------------------------------------------------------- */

/* cpu's tables and views for a run of this lane: it stands at `position`, computes n rows. */
void device_atom_window_table(struct atom_kv *kv, struct atom_lane *lane, uint32_t position,
                              uint32_t n);
void device_atom_views(struct atom_kv *kv, uint32_t lane, uint32_t position);
/* Hooks of the replay: the window goes to the scratch, new rows join it there, the newest W go
 * back; a row that is not finite and masked spoils the sum as 0 times it does. */
void device_atom_window_load(const struct npu_replay *r, uint32_t layer);
void device_atom_window_store(const struct npu_replay *r, uint32_t layer, struct device_array k,
                              struct device_array v);
void device_atom_window_spoil(const struct npu_replay *r, uint32_t layer, struct device_array o);

/* ---- atom_copy.c ---------------------------------------------------------------------------- */

int device_atom_kv_read(struct device *d, uint32_t lane, const struct baton_kv_view *views,
                        uint32_t n_layers, const uint32_t *first, uint32_t end,
                        struct baton_error *e);
int device_atom_kv_write(struct device *d, uint32_t lane, const struct baton_kv_view *views,
                         uint32_t n_layers, const uint32_t *first, uint32_t end,
                         struct baton_error *e);
int device_atom_kv_look(struct device *d, uint32_t lane, struct baton_kv_view *views,
                        uint32_t n_layers, struct baton_error *e);
/* Rows [first, end) of all layers, as far as the device has them, to the host's pages. */
void device_atom_export(struct atom_kv *kv, uint32_t lane, const struct baton_kv_view *to,
                        uint32_t first, uint32_t end);

/* ---- atom.c --------------------------------------------------------------------------------- */

int device_atom_program_open(struct device *d, const struct device_graph *g,
                             struct device_program **out, struct baton_error *e);
void device_atom_program_close(struct device_program *p);
int device_atom_submit(struct device_program *p, const struct baton_batch *b, uint64_t *id,
                       struct baton_error *e);
/* The device is gone: noted, and said. */
int device_atom_lose(struct atom_device *d, uint32_t lane, uint32_t position,
                     struct baton_error *e);

#endif
