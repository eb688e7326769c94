/* SPDX-License-Identifier: Apache-2.0 */
/* engine: sessions, lanes, the scheduler, and the public API (api.c implements baton/baton.h).
 *
 * Per engine two threads. The *engine thread* owns sessions, lanes, the page pool and the device,
 * without locks: it takes commands from a bounded queue, runs one prefill chunk or one decode step
 * over all active lanes at a time, and hands tokens to requests. The *I/O thread* (producer and
 * consumer roles) owns the handoff connections; it touches only pages that the engine thread lent
 * it and tells it by message when it is done. Callers' threads own nothing but their request
 * handles.
 *
 * What other rooms may use beyond baton/baton.h stands below.
 */
#ifndef ENGINE_ENGINE_H
#define ENGINE_ENGINE_H

#include <baton/baton.h>

#include "device/device.h"
#include "kv/kv.h"
#include "model/model.h"

struct model_tokenizer;
struct model_chat;

/* The parts of an opened model. Tokenizer and chat are opened on first use and may be absent. */
const struct model *engine_model(const struct baton_model *m);
int engine_tokenizer(const struct baton_model *m, const struct model_tokenizer **out,
                     struct baton_error *e);
int engine_chat(const struct baton_model *m, const struct model_chat **out, struct baton_error *e);

/* The hash of the model's weights, hex; "" where the model was opened without content_identity. */
void engine_fingerprint(const struct baton_model *m, char hex[65]);

/* Blocks in use in the engine's pool: 0 when no request is open. Any thread. */
uint32_t engine_blocks_used(const struct baton_engine *en);

/* What an engine has and uses, as it stands. Any thread. */
struct engine_load {
    uint32_t lanes, lanes_used;
    uint32_t ctx;                 /* positions that a request may have */
    uint32_t blocks, blocks_used; /* of block_positions positions each */
    uint32_t blocks_cached;       /* besides these, kept for prompts that begin alike */
    uint32_t block_positions;
    uint64_t prefix_queries, prefix_hits; /* prompt tokens so far: looked up, found */
    uint64_t steps_by_lanes[9];           /* decode steps so far, by the lanes that took part */
    const char *device;                   /* its name; valid as long as the engine */
    bool emulated;
};
void engine_load(const struct baton_engine *en, struct engine_load *out);

uint64_t engine_kv_bytes(const struct baton_engine *en);

/* The geometry of a model's cache on a device. */
void engine_geometry(const struct model_config *c, uint32_t kv_dtype, struct kv_geometry *out);
/* The part of a model's identity that says what keys and values mean (docs/wire.md). */
void engine_numerics(const struct model_config *c, uint8_t out[32]);

/* Open a KV file that was saved from this model (BATON_ERR_MISMATCH where it was not; the model
 * must have content_identity) and, where ids is not NULL, from the first of these tokens. */
int engine_kv_open(const struct baton_model *m, const char *path, const int32_t *ids, size_t n_ids,
                   struct kv_file **out, struct baton_error *e);

/* ---- for the verify room ------------------------------------------------------------------ */

/* A request's cache as its device holds it: at a producer when the consumer has acknowledged it, at
 * a consumer after insertion, natively after the prefill; both before the first step. Where the
 * device keeps KV of its own it was read back from there; with lane_kv in the device's layout,
 * besides a producer's, which left the device when its lane was given up. Valid inside the call
 * alone. */
struct engine_look {
    enum baton_role role;
    const struct baton_caps *caps;
    const struct kv_geometry *geometry;
    const struct baton_kv_view *views; /* [n_layers] */
    uint32_t n_tokens;                 /* of the prompt, all of which the cache should hold */
};
/* In the engine thread; a negative result fails the request. */
typedef int (*engine_observe_fn)(void *ctx, const struct engine_look *look, struct baton_error *e);
/* Show each request's cache to `fn`. Set while no request is open. */
void engine_observe(struct baton_engine *en, engine_observe_fn fn, void *ctx);

/* A fault for tests of the checker: flip one bit of one element of an imported cache, in the
 * device's pages, after every check of the handoff and before the look. */
struct engine_flip {
    uint32_t layer;
    enum kv_which which;
    uint32_t position, head, dim;
    uint32_t bit; /* of the element, below 8 times its bytes */
};
/* In every request of a consumer that is observed, until `flip` is NULL. Set while none is open. */
void engine_plant_flip(struct baton_engine *en, const struct engine_flip *flip);

#endif
