/* SPDX-License-Identifier: Apache-2.0 */
/* config.json and generation_config.json, of transformers 4 and 5, checked before anything is
 * computed from them. Defaults are those of the transformers class, since a config.json leaves out
 * what equals its class's default. What would change the equations and is not implemented is an
 * error that names it: a wrong answer without one is the worst outcome. */
#include <jansson.h>
#include <math.h>
#include <string.h>

#include "model/model_priv.h"

#define WHAT "config.json"
#define MAX_WIDTH (1u << 20) /* of hidden, inner: far above any model, far below overflow */

static const struct {
    const char *arch;
    enum model_family family;
    bool nested; /* the text model's configuration is the member text_config */
} archs[] = {
    {"LlamaForCausalLM", MODEL_LLAMA, false},
    {"Qwen3ForCausalLM", MODEL_QWEN3, false},
    {"Gemma3ForCausalLM", MODEL_GEMMA3, false},
    {"Gemma3ForConditionalGeneration", MODEL_GEMMA3, true},
};

/* top is the whole document, text the part that describes the text model (often the same). */
struct source {
    const json_t *top, *text;
};

static const json_t *member(const json_t *obj, const char *key)
{
    const json_t *v = json_object_get(obj, key);
    return json_is_null(v) ? NULL : v;
}

static int find_arch(const json_t *root, struct source *src, struct model_config *c,
                     struct baton_error *e)
{
    char buf[64];
    const char *arch = json_string_value(json_array_get(json_object_get(root, "architectures"), 0));
    for (size_t i = 0; arch && i < sizeof archs / sizeof *archs; i++) {
        if (strcmp(arch, archs[i].arch) != 0)
            continue;
        c->family = archs[i].family;
        memcpy(c->arch, arch, strlen(arch) + 1);
        src->top = root;
        src->text = archs[i].nested ? json_object_get(root, "text_config") : root;
        if (!json_is_object(src->text))
            return base_fail(e, BATON_ERR_INPUT, WHAT ": %s without a text_config", arch);
        return 0;
    }
    return base_fail(e, BATON_ERR_UNSUPPORTED,
                     WHAT ": architecture %s is not supported; supported are LlamaForCausalLM, "
                          "Qwen3ForCausalLM, Gemma3ForCausalLM, Gemma3ForConditionalGeneration",
                     arch ? base_shown(buf, arch) : "(none named)");
}

/* What the class assumes where the file is silent. Zero: the file must say it. */
static void set_defaults(struct model_config *c)
{
    c->norm_eps = 1e-6;
    c->bos = -1;
    switch (c->family) {
    case MODEL_LLAMA:
        c->max_positions = 2048;
        break;
    case MODEL_QWEN3:
        c->max_positions = 32768;
        c->head_dim = 128;
        break;
    case MODEL_GEMMA3:
        c->max_positions = 131072;
        c->tied = true;
        c->hidden = 2304;
        c->inner = 9216;
        c->n_layers = 26;
        c->vocab = 262208;
        c->q_heads = 8;
        c->kv_heads = 4;
        c->head_dim = 256;
        c->window = 4096;
        break;
    }
}

static int read_sizes(const json_t *t, struct model_config *c, struct baton_error *e)
{
    const struct {
        const char *key;
        uint32_t max, *out;
    } list[] = {
        {"num_hidden_layers", MODEL_MAX_LAYERS, &c->n_layers},
        {"hidden_size", MAX_WIDTH, &c->hidden},
        {"intermediate_size", MAX_WIDTH, &c->inner},
        {"vocab_size", 1u << 24, &c->vocab},
        {"num_attention_heads", 1024, &c->q_heads},
        {"max_position_embeddings", 1u << 30, &c->max_positions},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        int rc = base_json_u32(t, list[i].key, *list[i].out == 0, 1, list[i].max, list[i].out, WHAT,
                               e);
        if (rc)
            return rc;
    }
    return base_json_f64(t, "rms_norm_eps", false, 0, 1, &c->norm_eps, WHAT, e);
}

static int read_heads(const json_t *t, struct model_config *c, struct baton_error *e)
{
    if (c->kv_heads == 0)
        c->kv_heads = c->q_heads;
    int rc = base_json_u32(t, "num_key_value_heads", false, 1, 1024, &c->kv_heads, WHAT, e);
    if (rc)
        return rc;
    if (c->head_dim == 0 && !member(t, "head_dim")) {
        if (c->hidden % c->q_heads)
            return base_fail(e, BATON_ERR_INPUT,
                             WHAT ": no head_dim, and hidden_size %u is no multiple of "
                                  "num_attention_heads %u",
                             c->hidden, c->q_heads);
        c->head_dim = c->hidden / c->q_heads;
    }
    rc = base_json_u32(t, "head_dim", false, 1, UINT32_MAX, &c->head_dim, WHAT, e);
    if (rc)
        return rc;
    if (c->head_dim > 256 || c->head_dim % 2)
        return base_fail(e, BATON_ERR_UNSUPPORTED,
                         WHAT ": head_dim %u; even sizes up to 256 are supported", c->head_dim);
    if (c->q_heads % c->kv_heads)
        return base_fail(e, BATON_ERR_INPUT,
                         WHAT ": num_attention_heads %u is no multiple of num_key_value_heads %u",
                         c->q_heads, c->kv_heads);
    return 0;
}

static int read_act(const json_t *t, struct model_config *c, struct baton_error *e)
{
    char buf[64];
    bool gemma = c->family == MODEL_GEMMA3;
    const char *want = gemma ? "gelu_pytorch_tanh" : "silu", *act = want;
    int rc = base_json_str(t, "hidden_act", false, &act, WHAT, e);
    if (!rc)
        rc = base_json_str(t, "hidden_activation", false, &act, WHAT, e);
    if (!rc && strcmp(act, want) != 0)
        rc = base_fail(e, BATON_ERR_UNSUPPORTED, WHAT ": activation %s; %s supports %s",
                       base_shown(buf, act), c->arch, want);
    c->act = gemma ? DEVICE_GELU_TANH : DEVICE_SILU;
    return rc;
}

/* Switches that must be off, and members that must be null, for the equations to be ours. */
static int read_refusals(const struct source *src, struct baton_error *e)
{
    static const char *const off[] = {"mlp_bias", "use_sliding_window",
                                      "use_bidirectional_attention"};
    static const char *const null[] = {"attn_logit_softcapping", "final_logit_softcapping",
                                       "quantization_config"};
    for (size_t i = 0; i < sizeof off / sizeof *off; i++) {
        bool on = false;
        int rc = base_json_bool(src->text, off[i], false, &on, WHAT, e);
        if (rc)
            return rc;
        if (on)
            return base_fail(e, BATON_ERR_UNSUPPORTED, WHAT ": %s true is not supported", off[i]);
    }
    for (size_t i = 0; i < sizeof null / sizeof *null; i++)
        if (member(src->text, null[i]) || member(src->top, null[i]))
            return base_fail(e, BATON_ERR_UNSUPPORTED, WHAT ": %s is not supported", null[i]);
    return 0;
}

static int read_switches(const struct source *src, struct model_config *c, struct baton_error *e)
{
    int rc = base_json_bool(src->text, "attention_bias", false, &c->attn_bias, WHAT, e);
    if (!rc)
        rc = base_json_bool(src->top, "tie_word_embeddings", false, &c->tied, WHAT, e);
    if (!rc)
        rc = base_json_bool(src->text, "tie_word_embeddings", false, &c->tied, WHAT, e);
    if (!rc)
        rc = read_refusals(src, e);
    return rc;
}

/* ---- local and global layers -------------------------------------------------------------- */

static int read_layer_types(const json_t *list, struct model_config *c, struct baton_error *e)
{
    char buf[64];
    if (!json_is_array(list) || json_array_size(list) != c->n_layers)
        return base_fail(e, BATON_ERR_INPUT, WHAT ": layer_types is no list of %u entries",
                         c->n_layers);
    for (uint32_t i = 0; i < c->n_layers; i++) {
        const char *s = json_string_value(json_array_get(list, i));
        if (s && !strcmp(s, "sliding_attention"))
            c->local[i] = 1;
        else if (!s || strcmp(s, "full_attention") != 0)
            return base_fail(e, BATON_ERR_UNSUPPORTED,
                             WHAT ": layer_types[%u] is %s; full_attention and sliding_attention "
                                  "are supported",
                             i, s ? base_shown(buf, s) : "no text");
    }
    return 0;
}

/* Llama and Qwen 3 have no local layers; a file that asks for some is refused. */
static int read_layers(const json_t *t, struct model_config *c, struct baton_error *e)
{
    uint32_t pattern = 6, n_local = 0;
    bool gemma = c->family == MODEL_GEMMA3;
    const json_t *types = member(t, "layer_types");
    int rc = 0;
    if (types) {
        rc = read_layer_types(types, c, e);
    } else if (gemma) {
        rc = base_json_u32(t, "sliding_window_pattern", false, 1, 1 << 20, &pattern, WHAT, e);
        for (uint32_t i = 0; i < c->n_layers; i++)
            c->local[i] = (i + 1) % pattern != 0;
    }
    if (rc)
        return rc;
    for (uint32_t i = 0; i < c->n_layers; i++)
        n_local += c->local[i];
    if (n_local && !gemma)
        return base_fail(e, BATON_ERR_UNSUPPORTED, WHAT ": %s with sliding_attention layers",
                         c->arch);
    if (n_local && json_is_null(json_object_get(t, "sliding_window")))
        return base_fail(e, BATON_ERR_INPUT, WHAT ": sliding layers, and sliding_window is null");
    if (n_local)
        return base_json_u32(t, "sliding_window", false, 1, 1u << 30, &c->window, WHAT, e);
    c->window = 0;
    return 0;
}

/* ---- rotation and scales ------------------------------------------------------------------- */

/* One kind of rotation: rope_scaling is the older form, rope_parameters the newer; as in
 * transformers the older one counts where both stand. */
static int read_rope(const json_t *t, struct model_config *c, struct baton_error *e)
{
    struct model_rope_params p = {.theta = 10000, .original = c->max_positions};
    int rc = base_json_f64(t, "rope_theta", false, 1, 1e15, &p.theta, WHAT, e);
    if (rc)
        return rc;
    const json_t *old = member(t, "rope_scaling");
    rc = old ? model_rope_parse(old, WHAT ": rope_scaling", &p, e)
             : model_rope_parse(member(t, "rope_parameters"), WHAT ": rope_parameters", &p, e);
    if (!rc)
        model_rope_fill(&p, c->head_dim, &c->rope_global);
    return rc;
}

/* Gemma 3 has two: global layers at rope_theta with the scaling, local ones at
 * rope_local_base_freq without. The newer form nests one dictionary for each kind. */
static int read_rope_gemma3(const json_t *t, struct model_config *c, struct baton_error *e)
{
    struct model_rope_params global = {.theta = 1e6, .original = c->max_positions};
    struct model_rope_params local = {.theta = 1e4, .original = c->max_positions};
    const json_t *both = member(t, "rope_parameters");
    if (both && (!json_is_object(both) ||
                 (json_object_size(both) && !json_object_get(both, "full_attention") &&
                  !json_object_get(both, "sliding_attention"))))
        return base_fail(e, BATON_ERR_INPUT,
                         WHAT ": rope_parameters of Gemma 3 must name full_attention and "
                              "sliding_attention");
    int rc = base_json_f64(t, "rope_theta", false, 1, 1e15, &global.theta, WHAT, e);
    if (!rc)
        rc = base_json_f64(t, "rope_local_base_freq", false, 1, 1e15, &local.theta, WHAT, e);
    if (!rc)
        rc = model_rope_parse(member(both, "full_attention"),
                              WHAT ": rope_parameters.full_attention", &global, e);
    if (!rc)
        rc = model_rope_parse(member(both, "sliding_attention"),
                              WHAT ": rope_parameters.sliding_attention", &local, e);
    if (!rc)
        rc = model_rope_parse(member(t, "rope_scaling"), WHAT ": rope_scaling", &global, e);
    if (rc)
        return rc;
    model_rope_fill(&global, c->head_dim, &c->rope_global);
    if (c->window)
        model_rope_fill(&local, c->head_dim, &c->rope_local);
    return 0;
}

static int read_scales(const json_t *t, struct model_config *c, struct baton_error *e)
{
    double scalar = c->family == MODEL_GEMMA3 ? 256 : c->head_dim;
    int rc = 0;
    if (c->family == MODEL_GEMMA3)
        rc = base_json_f64(t, "query_pre_attn_scalar", false, 1e-3, 1e9, &scalar, WHAT, e);
    c->attn_scale = 1 / sqrt(scalar);
    c->embed_scale = c->family == MODEL_GEMMA3 ? sqrt(c->hidden) : 1;
    return rc;
}

/* ---- start and end ids --------------------------------------------------------------------- */

static int add_eos(const json_t *v, struct model_config *c, const char *what, struct baton_error *e)
{
    if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) >= c->vocab)
        return base_fail(e, BATON_ERR_INPUT, "%s: eos_token_id is not an id in [0, %u)", what,
                         c->vocab);
    int32_t id = (int32_t)json_integer_value(v);
    for (uint32_t i = 0; i < c->n_eos; i++)
        if (c->eos[i] == id)
            return 0;
    if (c->n_eos == MODEL_MAX_EOS)
        return base_fail(e, BATON_ERR_INPUT, "%s: more than %u end ids", what, MODEL_MAX_EOS);
    c->eos[c->n_eos++] = id;
    return 0;
}

static int read_eos(const json_t *obj, struct model_config *c, const char *what,
                    struct baton_error *e)
{
    const json_t *v = member(obj, "eos_token_id");
    int rc = 0;
    if (!json_is_array(v))
        return v ? add_eos(v, c, what, e) : 0;
    for (size_t i = 0; i < json_array_size(v) && !rc; i++)
        rc = add_eos(json_array_get(v, i), c, what, e);
    return rc;
}

static int read_bos(const json_t *obj, struct model_config *c, struct baton_error *e)
{
    uint32_t bos = UINT32_MAX;
    int rc = base_json_u32(obj, "bos_token_id", false, 0, c->vocab - 1, &bos, WHAT, e);
    if (!rc && bos != UINT32_MAX)
        c->bos = (int32_t)bos;
    return rc;
}

static int read_generation(const char *text, size_t n, struct model_config *c,
                           struct baton_error *e)
{
    static const char what[] = "generation_config.json";
    json_t *root = NULL;
    if (!text)
        return 0;
    int rc = base_json_parse(text, n, what, &root, e);
    if (!rc && !json_is_object(root))
        rc = base_fail(e, BATON_ERR_INPUT, "%s is not an object", what);
    if (!rc)
        rc = read_eos(root, c, what, e);
    json_decref(root);
    return rc;
}

static int read_ids(const struct source *src, struct model_config *c, struct baton_error *e)
{
    int rc = read_bos(src->text, c, e);
    if (!rc && c->bos < 0)
        rc = read_bos(src->top, c, e);
    if (!rc)
        rc = read_eos(src->text, c, WHAT, e);
    if (!rc && src->top != src->text)
        rc = read_eos(src->top, c, WHAT, e);
    return rc;
}

static int read_all(const json_t *root, struct model_config *c, struct baton_error *e)
{
    struct source src = {NULL, NULL};
    if (!json_is_object(root))
        return base_fail(e, BATON_ERR_INPUT, WHAT " is not an object");
    int rc = find_arch(root, &src, c, e);
    if (rc)
        return rc;
    set_defaults(c);
    rc = read_sizes(src.text, c, e);
    if (!rc)
        rc = read_heads(src.text, c, e);
    if (!rc)
        rc = read_act(src.text, c, e);
    if (!rc)
        rc = read_switches(&src, c, e);
    if (!rc)
        rc = read_layers(src.text, c, e);
    if (!rc)
        rc = read_scales(src.text, c, e);
    if (!rc)
        rc = c->family == MODEL_GEMMA3 ? read_rope_gemma3(src.text, c, e)
                                       : read_rope(src.text, c, e);
    if (!rc)
        rc = read_ids(&src, c, e);
    return rc;
}

int model_config_parse(const char *config_json, size_t n, const char *generation_json,
                       size_t generation_n, struct model_config *out, struct baton_error *e)
{
    struct model_config c = {0};
    json_t *root = NULL;
    int rc = base_json_parse(config_json, n, WHAT, &root, e);
    if (!rc)
        rc = read_all(root, &c, e);
    json_decref(root);
    if (!rc)
        rc = read_generation(generation_json, generation_n, &c, e);
    if (!rc)
        *out = c;
    return rc;
}
