/* SPDX-License-Identifier: Apache-2.0 */
/* device: what runs programs. The registry, opening a device by name, weights, programs.
 *
 * A device is named as on the command line: `cpu`, `cpu:ref`, then optional `,key=value` pairs
 * (cpu: `isa=scalar|avx2|avx512bf16`, which only removes features; `kv-dtype=bf16|f32`). Life:
 *
 *     device_open -> device_weight_bind (each tensor) -> device_program_open ->
 *     device_submit / device_wait ... -> device_program_close -> device_weight_close ->
 *     device_close
 *
 * Devices, weights and programs are opened and closed from one thread; device_start is called in
 * the process that will compute, after any fork (it starts the worker threads).
 */
#ifndef DEVICE_DEVICE_H
#define DEVICE_DEVICE_H

#include <baton/device.h>

#include "device/verbs.h"

struct device;
struct device_program;

/* Called once for each device this build knows. `why_absent` is NULL where it can be opened. */
typedef void (*device_list_fn)(void *ctx, const struct baton_caps *caps, const char *why_absent);
void device_list(device_list_fn fn, void *ctx);

/* Open by name. No threads yet. Unknown name or key: BATON_ERR_USAGE that lists what exists;
 * an absent instruction set or card: BATON_ERR_DEVICE that says why. */
int device_open(const char *name, struct device **out, struct baton_error *e);
void device_close(struct device *d); /* NULL and half-built are fine */
/* Of a device of compiled programs, widths and rows are the program's once that is open. */
const struct baton_caps *device_caps(const struct device *d);

/* What a device of compiled programs can do, by its name; false for any other name. A plugin says
 * only after it is opened whether it has fixed widths or is emulated: false for it, too. */
bool device_static(const char *name, struct baton_caps *out);
/* A device that is not one of baton's own on this machine, or emulates one that is not: its numbers
 * are proved before they are used. Nothing is opened. */
bool device_is_foreign(const char *name);
/* Positions that a sequence may have, where the program was compiled for so many; else 0. */
uint32_t device_positions(const struct device *d);
/* The narrowest of a device's programs that takes n rows; 0 where it has none that does. */
uint32_t device_width(const struct baton_caps *caps, uint32_t n_rows);

/* A program that was compiled for one checkpoint: model_bind then says which one it binds, in
 * device_graph. */
bool device_wants_checkpoint(const struct device *d);

/* Start n_threads workers (0 = one a core that this process may use). */
int device_start(struct device *d, unsigned n_threads, struct baton_error *e);

enum device_weight_kind {
    DEVICE_MATRIX = 1, /* [m, k], right operand of linear and logits */
    DEVICE_VECTOR = 2, /* [n], norms and biases */
    DEVICE_TABLE = 4,  /* [vocab, k], read by embed; may be combined with DEVICE_MATRIX (tied) */
};
/* Bring a tensor (f32, f16 or bf16) into the device's order. The source may be dropped
 * afterwards. Non-finite values are not looked for. */
int device_weight_bind(struct device *d, const struct baton_tensor *t, unsigned kind,
                       struct device_weight **out, struct baton_error *e);
void device_weight_close(struct device *d, struct device_weight *w); /* NULL is fine */
/* Bytes that the weight keeps in the device's own order. */
uint64_t device_weight_bytes(const struct device_weight *w);

/* ---- KV in memory of the device's own (caps.host_kv is false) ------------------------------
 *
 * The engine's pool is then host memory that K and V are staged in. Without lane_kv the device
 * mirrors it: it keeps the page at offset o of the pool at offset o of its own memory, so that
 * views and block tables speak of both; lanes mean nothing. With lane_kv the device has a layout of
 * its own in which a sequence lies in a lane: a lane is bound before the sequence's first row is
 * computed or written there, and released afterwards.
 *
 * A run reads and writes the device's memory; the host's pages hold what was copied last. Where the
 * caller asked for layer_done, the rows of the layer that the device still has are in the span's
 * host pages when it is called. One pool at a time. */
struct device_kv_pool {
    void *host; /* lent to the device until device_kv_close */
    size_t bytes;
    uint32_t positions; /* that the longest sequence may have */
    uint32_t lanes;     /* that will be used, at most caps.max_lanes */
};
/* After the program was opened. Without effect, 0, on a device with host_kv, like all below. */
int device_kv_open(struct device *d, const struct device_kv_pool *pool, struct baton_error *e);
void device_kv_close(struct device *d);
/* What a lane holds of an earlier sequence stays there and may be read by a program that masks it:
 * clear the lane before device_kv_write where the layout says zero_fill. A prefill from position 0
 * does so itself. BATON_ERR_BUSY: the device has no block for another sequence. */
int device_lane_bind(struct device *d, uint32_t lane, struct baton_error *e);
int device_lane_clear(struct device *d, uint32_t lane, struct baton_error *e);
void device_lane_release(struct device *d, uint32_t lane); /* an unbound one is fine */
/* Copy K and V of layers 0 .. n_layers-1 of one sequence between the device and the host's pages:
 * read to the host, write to the device. Of layer l the positions [first[l], end); of a mirror the
 * pages that hold them travel whole, with all layers that share them. A write with lane_kv says
 * that the sequence has `end` positions. A layer that does not hold all of it: BATON_ERR_USAGE.
 * Blocks until they are there. */
int device_kv_read(struct device *d, uint32_t lane, const struct baton_kv_view *views,
                   uint32_t n_layers, const uint32_t *first, uint32_t end, struct baton_error *e);
int device_kv_write(struct device *d, uint32_t lane, const struct baton_kv_view *views,
                    uint32_t n_layers, const uint32_t *first, uint32_t end, struct baton_error *e);
/* lane_kv: a bound lane read back as it lies in the device, in the device's layout, for those who
 * check it: views[n_layers], valid until the next call that changes the lane. */
int device_kv_look(struct device *d, uint32_t lane, struct baton_kv_view *views, uint32_t n_layers,
                   struct baton_error *e);

/* Tell the device of memory that results go to again and again, so that they need no detour; false
 * where that is of no use. Undo it before the memory goes. */
bool device_pin(struct device *d, void *p, size_t bytes);
void device_unpin(struct device *d, void *p);
/* False for a device that must be opened in the process that computes, not before a fork. */
bool device_survives_fork(const char *name);

/* A program from its in-process form. `graph` is copied; what it points to outlives the program. */
int device_program_open(struct device *d, const struct device_graph *graph,
                        struct device_program **out, struct baton_error *e);
void device_program_close(struct device_program *p); /* NULL is fine */

/* The program as a file that `artifact=` loads (docs/artifact.md), for sequences of at most
 * `positions` where the device compiles that in. *out is malloc'ed. BATON_ERR_UNSUPPORTED where a
 * device compiles no files. */
int device_program_artifact(struct device_program *p, uint32_t positions,
                            const uint8_t checkpoint[32], char **out, size_t *n,
                            struct baton_error *e);

/* Run a batch. A synchronous device has finished when submit returns; wait then returns at once.
 * At most caps.max_rows rows and caps.max_lanes spans; a span's view must have blocks for all its
 * rows' positions. */
int device_submit(struct device_program *p, const struct baton_batch *b, uint64_t *id,
                  struct baton_error *e);
int device_wait(struct device_program *p, uint64_t id, uint64_t timeout_ns, struct baton_error *e);

/* When the device itself computed a layer and copied it to the host's pages, by its own timestamps
 * laid onto CLOCK_MONOTONIC. A layer is computed once its keys and values are there; what follows
 * of it counts for the next one, behind the last layer for `end_ns`. */
struct device_layer_time {
    uint64_t begin_ns, computed_ns, copy_ns, copied_ns;
};
/* Of the last batch that asked for layer_done, once it is waited for: how many layers, and by
 * `end_ns` the end of its computing; 0 where the device does not tell. At most n are written. */
uint32_t device_layer_times(struct device_program *p, struct device_layer_time *out, uint32_t n,
                            uint64_t *end_ns);

#endif
