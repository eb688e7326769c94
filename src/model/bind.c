/* SPDX-License-Identifier: Apache-2.0 */
/* From a checkpoint to a program: every tensor into the device's order, then the forward function
 * over them. */
#include <stdlib.h>
#include <string.h>

#include "model/model_priv.h"

#define FILL_PIECE ((uint64_t)1 << 20) /* elements of random weights that one item makes */

struct model_bound {
    struct device *device;
    struct device_weight **list; /* [n_list], in the order of the model's entries */
    size_t n_list;
    struct model_weights weights;
    struct device_graph graph;
    uint8_t checkpoint[32];
};

/* ---- the bytes of a tensor ------------------------------------------------------------------ */

struct fill {
    const struct model *m;
    size_t entry;
    uint16_t *out;
};

static void fill_piece(void *ctx, unsigned i)
{
    const struct fill *f = ctx;
    uint64_t first = i * FILL_PIECE, all = f->m->entries[f->entry].n_elements;
    model_shape_fill(f->m, f->entry, first, all - first < FILL_PIECE ? all - first : FILL_PIECE,
                     f->out + first);
}

/* A safetensors header of odd length leaves tensors at odd addresses; devices read them as arrays
 * of their type. */
static bool misaligned(const struct model_entry *x)
{
    return (uintptr_t)x->data % model_dtype_bytes(x->dtype) != 0;
}

/* *data: the entry's bytes, where they are or in *copy (base_map_free). */
static int get_bytes(const struct model *m, size_t entry, struct base_pool *pool, const void **data,
                     void **copy, struct baton_error *e)
{
    const struct model_entry *x = &m->entries[entry];
    *copy = NULL;
    *data = x->data;
    if (!m->is_shape && !misaligned(x))
        return 0;
    *copy = base_map_alloc((size_t)x->bytes, false, e);
    if (!*copy)
        return BATON_ERR_NOMEM;
    *data = *copy;
    if (m->is_shape) {
        struct fill f = {.m = m, .entry = entry, .out = *copy};
        base_pool_run(pool, fill_piece, &f,
                      (unsigned)((x->n_elements + FILL_PIECE - 1) / FILL_PIECE));
    } else {
        memcpy(*copy, x->data, (size_t)x->bytes);
    }
    return 0;
}

/* ---- binding -------------------------------------------------------------------------------- */

static int bind_entry(const struct model *m, size_t entry, struct base_pool *pool, struct device *d,
                      struct device_weight **out, struct baton_error *e)
{
    const struct model_entry *x = &m->entries[entry];
    int64_t width = (int64_t)model_dtype_bytes(x->dtype);
    struct baton_tensor t = {.name = x->name, .dtype = x->dtype, .n_dims = x->n_dims};
    void *copy;
    int rc = get_bytes(m, entry, pool, &t.data, &copy, e);
    if (rc)
        return rc;
    memcpy(t.shape, x->shape, sizeof x->shape);
    t.stride[0] = x->n_dims == 2 ? (int64_t)x->shape[1] * width : width;
    t.stride[1] = x->n_dims == 2 ? width : 0;
    rc = device_weight_bind(d, &t, x->kind, out, e);
    if (copy)
        base_map_free(copy, (size_t)x->bytes);
    if (!m->is_shape) {
        /* The device has its copy: pages of the file need not stay in this process. */
        const struct base_file *f = model_tensors_file(m->files[x->file]);
        base_file_drop(f, (size_t)((const uint8_t *)x->data - f->data), (size_t)x->bytes);
    }
    return rc;
}

/* Put a bound weight where the forward function looks for it. */
static void place(struct model_bound *b, const struct model_entry *x, struct device_weight *w)
{
    char *base = x->layer == MODEL_NO_LAYER ? (char *)&b->weights
                                            : (char *)&b->weights.layers[x->layer];
    memcpy(base + x->slot, &w, sizeof w);
}

static int bind_all(struct model_bound *b, const struct model *m, struct base_pool *pool,
                    void (*progress)(void *ctx, uint64_t done, uint64_t all), void *ctx,
                    struct baton_error *e)
{
    uint64_t done = 0, all = model_weight_bytes(m);
    for (size_t i = 0; i < m->n_entries; i++) {
        int rc = bind_entry(m, i, pool, b->device, &b->list[i], e);
        if (rc)
            return rc;
        b->n_list = i + 1;
        place(b, &m->entries[i], b->list[i]);
        done += m->entries[i].bytes;
        if (progress)
            progress(ctx, done, all);
    }
    if (m->config.tied)
        b->weights.lm_head = b->weights.embed_tokens;
    return 0;
}

/* ---- graph ---------------------------------------------------------------------------------- */

static uint32_t largest(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t ab = a > b ? a : b;
    return ab > c ? ab : c;
}

/* Arrays of every family: x, h and the selected rows [hidden], y [hidden], q and o [q], k and v
 * [kv], gate and up [inner]. */
static void make_graph(struct model_bound *b, const struct model_config *c)
{
    b->graph.forward = c->family == MODEL_LLAMA   ? model_llama_forward
                       : c->family == MODEL_QWEN3 ? model_qwen3_forward
                                                  : model_gemma3_forward;
    b->graph.ctx = &b->weights;
    b->graph.n_layers = c->n_layers;
    b->graph.vocab = c->vocab;
    b->graph.scratch_cols = 4 * c->hidden + 2 * model_q_cols(c) + 2 * model_kv_cols(c) +
                            2 * c->inner;
    b->graph.max_cols = largest(c->hidden, model_q_cols(c), c->inner);
}

/* The hash of weights that identities have; it is cached from run to run. */
static int name_checkpoint(struct model_bound *b, const struct model *m, struct baton_error *e)
{
    struct model_identity id;
    int rc = model_hash(m, 0, false, NULL, NULL, &id, e);
    if (rc)
        return rc;
    memcpy(b->checkpoint, id.weights, sizeof b->checkpoint);
    b->graph.checkpoint = b->checkpoint;
    return 0;
}

int model_bind(const struct model *m, struct device *d,
               void (*progress)(void *ctx, uint64_t done, uint64_t all), void *ctx,
               struct model_bound **out, struct baton_error *e)
{
    struct base_pool *pool = NULL;
    int rc = BATON_ERR_NOMEM;
    struct model_bound *b = base_try_alloc(1, sizeof *b, e);
    if (!b)
        return rc;
    b->device = d;
    b->weights.config = &m->config;
    b->list = base_try_alloc(m->n_entries, sizeof *b->list, e);
    b->weights.layers = b->list ? base_try_alloc(m->config.n_layers, sizeof *b->weights.layers, e)
                                : NULL;
    if (b->weights.layers)
        rc = m->is_shape ? base_pool_open(&pool, model_cpus(16), e) : 0;
    if (!rc)
        rc = bind_all(b, m, pool, progress, ctx, e);
    base_pool_close(pool); /* no thread outlives this call: the caller may fork */
    make_graph(b, &m->config);
    if (!rc && device_wants_checkpoint(d))
        rc = name_checkpoint(b, m, e);
    if (rc)
        model_unbind(b);
    else
        *out = b;
    return rc;
}

void model_unbind(struct model_bound *b)
{
    if (!b)
        return;
    for (size_t i = 0; i < b->n_list; i++)
        device_weight_close(b->device, b->list[i]);
    free(b->list);
    free(b->weights.layers);
    free(b);
}

const struct device_graph *model_graph(const struct model_bound *b)
{
    return &b->graph;
}

uint64_t model_bound_bytes(const struct model_bound *b)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < b->n_list; i++)
        sum += device_weight_bytes(b->list[i]);
    return sum;
}
