/* SPDX-License-Identifier: Apache-2.0 */
/* Random weights of known shapes, for benchmarks: no download, no tokenizer.
 *
 * Element i of a tensor is a function of (seed, tensor, i) alone, so any part of it can be made
 * again at any time by any thread. Nothing is kept: whoever wants the bytes has them made into
 * memory of its own, and a model of 16 GB needs 16 GB, not 32, once a device holds its copy. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model/model_priv.h"

#define SIGMA 0.02
#define QUANTILES 4096u          /* power of two */
#define STEP 0x9E3779B97F4A7C15u /* splitmix64's: odd, near 2^64 over the golden ratio */

/* clang-format off */
static const struct {
    const char *name;
    struct model_config config;
    double theta, theta_local;
    uint32_t pattern; /* every pattern-th layer is global; 0 = all are */
} shapes[] = {
    {"qwen3-0.6b",
     {.family = MODEL_QWEN3, .arch = "Qwen3ForCausalLM", .n_layers = 28, .hidden = 1024,
      .inner = 3072, .vocab = 151936, .q_heads = 16, .kv_heads = 8, .head_dim = 128,
      .max_positions = 40960, .norm_eps = 1e-6, .tied = true, .eos = {151645, 151643}, .n_eos = 2,
      .bos = -1},
     1e6, 0, 0},
    {"qwen3-4b",
     {.family = MODEL_QWEN3, .arch = "Qwen3ForCausalLM", .n_layers = 36, .hidden = 2560,
      .inner = 9728, .vocab = 151936, .q_heads = 32, .kv_heads = 8, .head_dim = 128,
      .max_positions = 40960, .norm_eps = 1e-6, .tied = true, .eos = {151645, 151643}, .n_eos = 2,
      .bos = -1},
     1e6, 0, 0},
    {"llama-3.1-8b",
     {.family = MODEL_LLAMA, .arch = "LlamaForCausalLM", .n_layers = 32, .hidden = 4096,
      .inner = 14336, .vocab = 128256, .q_heads = 32, .kv_heads = 8, .head_dim = 128,
      .max_positions = 131072, .norm_eps = 1e-5, .eos = {128001, 128008, 128009}, .n_eos = 3,
      .bos = 128000},
     5e5, 0, 0},
    {"gemma-3-1b",
     {.family = MODEL_GEMMA3, .arch = "Gemma3ForCausalLM", .n_layers = 26, .hidden = 1152,
      .inner = 6912, .vocab = 262144, .q_heads = 4, .kv_heads = 1, .head_dim = 256,
      .max_positions = 32768, .norm_eps = 1e-6, .tied = true, .window = 512, .eos = {1, 106},
      .n_eos = 2, .bos = 2},
     1e6, 1e4, 6},
};
/* clang-format on */
#define N_SHAPES (sizeof shapes / sizeof *shapes)

/* What config.json would say beyond the numbers of the table. */
static void complete(struct model_config *c, size_t i)
{
    struct model_rope_params rope = {.theta = shapes[i].theta};
    *c = shapes[i].config;
    if (c->family == MODEL_LLAMA) {
        rope.kind = MODEL_ROPE_LLAMA3;
        rope.factor = 8;
        rope.low_freq = 1;
        rope.high_freq = 4;
        rope.original = 8192;
    }
    model_rope_fill(&rope, c->head_dim, &c->rope_global);
    c->act = c->family == MODEL_GEMMA3 ? DEVICE_GELU_TANH : DEVICE_SILU;
    c->attn_scale = 1 / sqrt(c->head_dim); /* Gemma 3 1B: query_pre_attn_scalar is 256 too */
    c->embed_scale = c->family == MODEL_GEMMA3 ? sqrt(c->hidden) : 1;
    if (c->window) {
        struct model_rope_params local = {.theta = shapes[i].theta_local};
        model_rope_fill(&local, c->head_dim, &c->rope_local);
        for (uint32_t l = 0; l < c->n_layers; l++)
            c->local[l] = (l + 1) % shapes[i].pattern != 0;
    }
}

static int find_shape(const char *name, size_t n, size_t *out, struct baton_error *e)
{
    char buf[64];
    for (size_t i = 0; i < N_SHAPES; i++)
        if (strlen(shapes[i].name) == n && !memcmp(shapes[i].name, name, n)) {
            *out = i;
            return 0;
        }
    return base_fail(e, BATON_ERR_USAGE,
                     "shape:%s is unknown; known are qwen3-0.6b, qwen3-4b, llama-3.1-8b, "
                     "gemma-3-1b",
                     base_shown(buf, name));
}

/* ---- numbers ------------------------------------------------------------------------------- */

/* splitmix64's finaliser: every bit of the result depends on every bit of x. */
static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* Round to nearest, ties to even; finite input. */
static uint16_t to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

static float from_bf16(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* The x with Phi(x) = p: Newton steps from 0 converge for p <= 1/2 since Phi is convex there. */
static double quantile(double p)
{
    if (p > 0.5)
        return -quantile(1 - p);
    double x = 0, step = 1;
    for (int i = 0; i < 60 && fabs(step) > 1e-12; i++) {
        step = (0.5 * erfc(-x * M_SQRT1_2) - p) / (exp(-0.5 * x * x) * 0.3989422804014327);
        x -= step;
    }
    return x;
}

/* Midpoints of equally likely intervals of N(0, SIGMA): drawing one of them is one look-up. */
static uint16_t *make_quantiles(struct baton_error *e)
{
    uint16_t *table = base_try_alloc(QUANTILES, sizeof *table, e);
    for (unsigned i = 0; table && i < QUANTILES; i++)
        table[i] = to_bf16((float)(SIGMA * quantile((i + 0.5) / QUANTILES)));
    return table;
}

static void fill_block(uint16_t *out, unsigned n, uint64_t bits, const uint16_t *table)
{
    for (unsigned i = 0; i < n; i++, bits >>= 16)
        out[i] = table[bits & (QUANTILES - 1)];
}

void model_shape_fill(const struct model *m, size_t entry, uint64_t first, uint64_t n,
                      uint16_t *out)
{
    uint64_t key = mix(mix(m->seed + STEP) + entry);
    for (uint64_t i = 0; i < n; i += 4) {
        uint64_t bits = mix(key + ((first + i) >> 2) * STEP);
        fill_block(out + i, n - i < 4 ? (unsigned)(n - i) : 4, bits, m->quantiles);
    }
    /* Norm weights lie around what leaves a row unscaled: 1, or 0 where (1 + w) applies. */
    if (!m->entries[entry].norm || m->config.family == MODEL_GEMMA3)
        return;
    for (uint64_t i = 0; i < n; i++)
        out[i] = to_bf16(1 + from_bf16(out[i]));
}

int model_shape_open(struct model *m, const char *name, struct baton_error *e)
{
    size_t which = 0, n = strcspn(name, ":");
    char *end = NULL, buf[64];
    int rc = find_shape(name, n, &which, e);
    if (rc)
        return rc;
    if (name[n] == ':') {
        const char *digits = name + n + 1;
        errno = 0;
        m->seed = strtoull(digits, &end, 10);
        if (*digits < '0' || *digits > '9' || *end || errno)
            return base_fail(e, BATON_ERR_USAGE, "shape:%s: the seed is no number",
                             base_shown(buf, name));
    }
    m->is_shape = true;
    complete(&m->config, which);
    m->quantiles = make_quantiles(e);
    rc = m->quantiles ? model_entries_make(&m->config, &m->entries, &m->n_entries, e)
                      : BATON_ERR_NOMEM;
    for (size_t i = 0; i < m->n_entries; i++) {
        m->entries[i].dtype = BATON_BF16;
        m->entries[i].bytes = 2 * m->entries[i].n_elements;
    }
    return rc;
}
