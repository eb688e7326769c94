/* SPDX-License-Identifier: Apache-2.0 */
/* model: a checkpoint on disk, what it is, and its equations as a device program.
 *
 * struct model is immutable after model_open: configuration, mapped tensors, rotation tables.
 * model_bind brings its weights into one device's order and yields the program that the engine
 * runs. Families: Qwen3ForCausalLM, LlamaForCausalLM, Gemma3ForCausalLM and the text part of
 * Gemma3ForConditionalGeneration. Tokenizer, chat formats and sampler have headers of their own in
 * this folder.
 */
#ifndef MODEL_MODEL_H
#define MODEL_MODEL_H

#include <baton/device.h>

#include "device/device.h"

#define MODEL_MAX_LAYERS 512u
#define MODEL_MAX_EOS 16u

enum model_family { MODEL_LLAMA = 1, MODEL_QWEN3 = 2, MODEL_GEMMA3 = 3 };

/* config.json and generation_config.json after every check: finite, in range, consistent. */
struct model_config {
    enum model_family family;
    char arch[64]; /* the class name in config.json */
    uint32_t n_layers, hidden, inner, vocab;
    uint32_t q_heads, kv_heads, head_dim;
    uint32_t max_positions;
    double norm_eps;
    bool tied;      /* no lm_head.weight: the embedding is the output matrix */
    bool attn_bias; /* biases on q, k, v and o */
    enum device_act act;
    double attn_scale;  /* multiplies q.k: head_dim^-0.5 or query_pre_attn_scalar^-0.5 */
    double embed_scale; /* 1, or sqrt(hidden) for Gemma */
    uint32_t window;    /* of local layers; 0 = none */
    uint8_t local[MODEL_MAX_LAYERS];
    struct device_rope rope_global, rope_local; /* local only where window != 0 */
    int32_t eos[MODEL_MAX_EOS];                 /* all end ids of both files */
    uint32_t n_eos;
    int32_t bos; /* -1 = none */
};

struct model;
/* `path` is a Hugging Face folder, or "shape:NAME[:SEED]" for random weights of a known shape, made
 * when they are bound or hashed (qwen3-0.6b, qwen3-4b, llama-3.1-8b, gemma-3-1b). Every tensor that
 * the configuration asks for is there with the right shape and dtype when this succeeds; a missing
 * or odd one is BATON_ERR_INPUT naming the tensor, its shape and the expected one. */
int model_open(const char *path, struct model **out, struct baton_error *e);
void model_close(struct model *m); /* NULL and half-built are fine */
const struct model_config *model_config_of(const struct model *m);
const char *model_path(const struct model *m);
bool model_is_shape(const struct model *m);         /* made by shape:, so no tokenizer */
uint64_t model_weight_bytes(const struct model *m); /* as stored in the checkpoint */
uint64_t model_n_params(const struct model *m);

/* Read DIR/config.json and, where there is one, DIR/generation_config.json; no weights. */
int model_config_read(const char *dir, struct model_config *out, struct baton_error *e);
/* Parse a configuration alone (fuzzing, tests). generation may be NULL. */
int model_config_parse(const char *config_json, size_t n, const char *generation_json,
                       size_t generation_n, struct model_config *out, struct baton_error *e);

/* ---- identity ----------------------------------------------------------------------------- */

/* Identity in parts, each 32 bytes and compared by name. */
struct model_identity {
    uint8_t arch[32];    /* canonical configuration */
    uint8_t weights[32]; /* over canonical tensor names, dtypes, shapes, bytes; equal for shards */
    uint8_t tokenizer[32]; /* tokenizer.json; zeros where there is none */
    /* SHA-256 of what this prints, run in the folder, names in C order and without a path:
     * LC_ALL=C sha256sum config.json WEIGHT-FILES tokenizer.json
     * (model.safetensors or the shards; tokenizer.json where there is one; zeros for shape:). */
    uint8_t pin[32];
};
/* Content hashes, in parallel over n_threads; cached by device, inode, size and mtime under
 * $XDG_CACHE_HOME/baton (or ~/.cache/baton) unless `no_cache`. progress (may be NULL) is told bytes
 * done and all, in the calling thread. */
int model_hash(const struct model *m, unsigned n_threads, bool no_cache,
               void (*progress)(void *ctx, uint64_t done, uint64_t all), void *ctx,
               struct model_identity *out, struct baton_error *e);

/* ---- program ------------------------------------------------------------------------------ */

struct model_bound;
/* Bind all weights to `d`, dropping the file's pages tensor by tensor where the device made its
 * own copy. progress as above. The model must outlive what is bound. */
int model_bind(const struct model *m, struct device *d,
               void (*progress)(void *ctx, uint64_t done, uint64_t all), void *ctx,
               struct model_bound **out, struct baton_error *e);
void model_unbind(struct model_bound *b); /* NULL and half-built are fine */
/* The family's forward function with the bound weights. Valid as long as `b`. */
const struct device_graph *model_graph(const struct model_bound *b);
uint64_t model_bound_bytes(const struct model_bound *b);

/* FLOPs of a prefill of n tokens, everything counted (linear maps, attention pairs inside the
 * window, output matrix for one row), and bytes that a decode step at context n reads at least
 * (weights once at `weight_bytes` a parameter, KV of the context at kv_bytes an element). Benchmark
 * floors. */
double model_prefill_flops(const struct model_config *c, uint32_t n);
double model_decode_bytes(const struct model_config *c, uint32_t n, double weight_bytes,
                          double kv_bytes);

/* ---- safetensors -------------------------------------------------------------------------- */

/* One file as base reads and checks it, with dtypes as numbers. Also used by tests to read
 * goldens. */
struct model_tensors;
struct model_tensor {
    const char *name;
    uint32_t dtype; /* enum baton_dtype, or MODEL_I32 / MODEL_I64 */
    uint32_t n_dims;
    uint64_t shape[8];
    const void *data;
    uint64_t bytes;
};
#define MODEL_I32 64u
#define MODEL_I64 65u
int model_tensors_open(const char *path, struct model_tensors **out, struct baton_error *e);
/* The same over memory that the caller keeps (fuzzing). */
int model_tensors_parse(const void *data, size_t n, const char *what, struct model_tensors **out,
                        struct baton_error *e);
void model_tensors_close(struct model_tensors *t); /* NULL is fine */
size_t model_tensors_count(const struct model_tensors *t);
const struct model_tensor *model_tensors_at(const struct model_tensors *t, size_t i);
const struct model_tensor *model_tensors_find(const struct model_tensors *t, const char *name);
/* Value of a key of __metadata__, or NULL. */
const char *model_tensors_metadata(const struct model_tensors *t, const char *key);

#endif
