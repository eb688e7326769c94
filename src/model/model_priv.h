/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the model room share: the list of tensors, bound weights, rotation tables. */
#ifndef MODEL_MODEL_PRIV_H
#define MODEL_MODEL_PRIV_H

#include "base/base.h"
#include "model/model.h"

/* ---- the tensors of a model (names.c) ------------------------------------------------------ */

#define MODEL_NO_LAYER UINT32_MAX

/* One tensor that the configuration asks for. The first half is known from the configuration
 * alone; weights.c fills the second from files. Models made by shape: have data == NULL. */
struct model_entry {
    char name[80];   /* canonical: as a plain ...ForCausalLM checkpoint spells it */
    uint32_t layer;  /* or MODEL_NO_LAYER */
    size_t slot;     /* offset of its pointer in struct model_layer or model_weights */
    unsigned kind;   /* enum device_weight_kind, combined */
    bool norm;       /* weight of an RMSNorm */
    uint32_t n_dims; /* 1 or 2 */
    uint64_t shape[2];
    uint64_t n_elements;

    uint32_t dtype;
    uint32_t file; /* index into model.files */
    const void *data;
    uint64_t bytes;
};

/* Everything that the configuration asks for, sorted by canonical name in C order; free(). */
int model_entries_make(const struct model_config *c, struct model_entry **out, size_t *n,
                       struct baton_error *e);

/* Elements of one row of each projection. */
static inline uint32_t model_q_cols(const struct model_config *c)
{
    return c->q_heads * c->head_dim;
}

static inline uint32_t model_kv_cols(const struct model_config *c)
{
    return c->kv_heads * c->head_dim;
}

/* ---- the model ----------------------------------------------------------------------------- */

struct model {
    struct model_config config;
    char *path;
    char *config_text; /* config.json as read, NUL-terminated; NULL for shape: */
    bool is_shape;
    uint64_t seed; /* of a shape: model, as quantiles (shape.c) */
    uint16_t *quantiles;
    struct model_entry *entries;
    size_t n_entries;
    struct model_tensors **files; /* weight files in C order of their names */
    char **file_names;            /* relative to the folder */
    uint32_t n_files;
};

/* The configuration of shape:NAME[:SEED]; `name` is what follows "shape:". */
int model_shape_open(struct model *m, const char *name, struct baton_error *e);
/* Elements [first, first + n) of an entry of a shape: model as bf16; first is a multiple of 4. The
 * same numbers in whatever pieces they are asked for. */
void model_shape_fill(const struct model *m, size_t entry, uint64_t first, uint64_t n,
                      uint16_t *out);

/* The mapping behind a tensor file: for hashes and for dropping pages. */
const struct base_file *model_tensors_file(const struct model_tensors *t);
/* "F32", "BF16", ...; "?" for a number that is no dtype. */
const char *model_dtype_name(uint32_t dtype);
uint64_t model_dtype_bytes(uint32_t dtype);
/* "[2, 3]" into buf. */
const char *model_shape_text(char buf[96], const uint64_t *shape, uint32_t n_dims);

/* CPUs that this process may use, at most `most`. */
unsigned model_cpus(unsigned most);

/* ---- rotation (rope.c) --------------------------------------------------------------------- */

enum model_rope_kind { MODEL_ROPE_DEFAULT, MODEL_ROPE_LINEAR, MODEL_ROPE_LLAMA3 };

struct model_rope_params {
    enum model_rope_kind kind;
    double theta;               /* base of the wavelengths */
    double factor;              /* linear, llama3: the context is longer by this */
    double low_freq, high_freq; /* llama3: borders, in turns over the original context */
    double original;            /* llama3: positions of the original training */
};

/* Read one dictionary of parameters ({"rope_type": "llama3", ...}; NULL = nothing given) over the
 * defaults already in *p. `what` names it in errors. */
int model_rope_parse(const struct json_t *dict, const char *what, struct model_rope_params *p,
                     struct baton_error *e);
void model_rope_fill(const struct model_rope_params *p, uint32_t head_dim, struct device_rope *out);

/* ---- bound weights and forward functions (bind.c, arch/) ----------------------------------- */

/* Named as in the checkpoints. What a family lacks is NULL: a linear takes NULL for no bias. */
struct model_layer {
    const struct device_weight *input_layernorm;            /* [hidden] */
    const struct device_weight *q_proj, *q_bias;            /* [q_heads*head_dim, hidden] */
    const struct device_weight *k_proj, *k_bias;            /* [kv_heads*head_dim, hidden] */
    const struct device_weight *v_proj, *v_bias;            /* [kv_heads*head_dim, hidden] */
    const struct device_weight *o_proj, *o_bias;            /* [hidden, q_heads*head_dim] */
    const struct device_weight *q_norm, *k_norm;            /* [head_dim]; Qwen 3, Gemma 3 */
    const struct device_weight *post_attention_layernorm;   /* [hidden] */
    const struct device_weight *pre_feedforward_layernorm;  /* [hidden]; Gemma 3 */
    const struct device_weight *gate_proj, *up_proj;        /* [inner, hidden] */
    const struct device_weight *down_proj;                  /* [hidden, inner] */
    const struct device_weight *post_feedforward_layernorm; /* [hidden]; Gemma 3 */
};

/* The context of a forward function. */
struct model_weights {
    const struct model_config *config;
    const struct device_weight *embed_tokens; /* [vocab, hidden] */
    const struct device_weight *norm;         /* [hidden] */
    const struct device_weight *lm_head;      /* [vocab, hidden]; == embed_tokens where tied */
    struct model_layer *layers;               /* [n_layers] */
};

int model_llama_forward(const void *ctx, struct device_run *r, struct baton_error *e);
int model_qwen3_forward(const void *ctx, struct device_run *r, struct baton_error *e);
int model_gemma3_forward(const void *ctx, struct device_run *r, struct baton_error *e);

#endif
