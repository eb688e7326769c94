/* SPDX-License-Identifier: Apache-2.0 */
/* Rotary position embedding: parameters from config.json, inverse frequencies.
 *
 * Formulas: RoFormer (Su et al. 2021), equation 15; linear: position interpolation (Chen et al.
 * 2023); llama3: transformers' modeling_rope_utils._compute_llama3_parameters. transformers works
 * in float32 step by step. The same steps are rounded here at the same places, since an angle is
 * position * frequency: at position 8000 one unit in the last place is already 5e-4 rad. */
#include <jansson.h>
#include <math.h>
#include <string.h>

#include "model/model_priv.h"

#define PI_TIMES_2 6.283185307179586

static int parse_kind(const char *s, const char *what, enum model_rope_kind *kind,
                      struct baton_error *e)
{
    char buf[64];
    static const char *const names[] = {"default", "linear", "llama3"};
    for (unsigned i = 0; i < 3; i++)
        if (!strcmp(s, names[i])) {
            *kind = (enum model_rope_kind)i;
            return 0;
        }
    return base_fail(e, BATON_ERR_UNSUPPORTED,
                     "%s: rope type %s; supported are default, linear, llama3", what,
                     base_shown(buf, s));
}

static int parse_llama3(const json_t *dict, const char *what, struct model_rope_params *p,
                        struct baton_error *e)
{
    int rc = base_json_f64(dict, "low_freq_factor", true, 1e-6, 1e6, &p->low_freq, what, e);
    if (!rc)
        rc = base_json_f64(dict, "high_freq_factor", true, 1e-6, 1e6, &p->high_freq, what, e);
    if (!rc)
        rc = base_json_f64(dict, "original_max_position_embeddings", false, 1, 1 << 30,
                           &p->original, what, e);
    if (!rc && p->high_freq <= p->low_freq)
        rc = base_fail(e, BATON_ERR_INPUT,
                       "%s: high_freq_factor %g is not above low_freq_factor %g", what,
                       p->high_freq, p->low_freq);
    return rc;
}

int model_rope_parse(const struct json_t *dict, const char *what, struct model_rope_params *p,
                     struct baton_error *e)
{
    const char *kind = "default";
    double part = 1;
    if (!dict || json_is_null(dict))
        return 0;
    if (!json_is_object(dict))
        return base_fail(e, BATON_ERR_INPUT, "%s is not an object", what);
    /* "type" is the older spelling; where both stand, the newer one counts. */
    int rc = base_json_str(dict, "type", false, &kind, what, e);
    if (!rc)
        rc = base_json_str(dict, "rope_type", false, &kind, what, e);
    if (!rc)
        rc = parse_kind(kind, what, &p->kind, e);
    if (!rc)
        rc = base_json_f64(dict, "rope_theta", false, 1, 1e15, &p->theta, what, e);
    if (!rc)
        rc = base_json_f64(dict, "partial_rotary_factor", false, 0, 1, &part, what, e);
    if (!rc && part != 1)
        rc = base_fail(e, BATON_ERR_UNSUPPORTED,
                       "%s: partial_rotary_factor %g; only 1 is supported", what, part);
    if (!rc && p->kind != MODEL_ROPE_DEFAULT)
        rc = base_json_f64(dict, "factor", true, 1, 1e6, &p->factor, what, e);
    if (!rc && p->kind == MODEL_ROPE_LLAMA3)
        rc = parse_llama3(dict, what, p, e);
    return rc;
}

/* Wavelengths that turn often within the original context stay, those that turn rarely are
 * stretched by factor, those between are mixed linearly in the number of turns. */
static float llama3(const struct model_rope_params *p, float inv)
{
    float wavelen = (1.0f / inv) * (float)PI_TIMES_2;
    if (wavelen < (float)(p->original / p->high_freq))
        return inv;
    if (wavelen > (float)(p->original / p->low_freq))
        return inv / (float)p->factor;
    float turns = (1.0f / wavelen) * (float)p->original;
    float smooth = (turns - (float)p->low_freq) / (float)(p->high_freq - p->low_freq);
    return (1.0f - smooth) * inv / (float)p->factor + smooth * inv;
}

void model_rope_fill(const struct model_rope_params *p, uint32_t head_dim, struct device_rope *out)
{
    memset(out, 0, sizeof *out);
    out->head_dim = head_dim;
    for (uint32_t i = 0; i < head_dim / 2; i++) {
        float exponent = (float)(2 * i) / (float)head_dim;
        /* The power in double, rounded once: torch's float32 pow is within one unit of this. */
        float inv = 1.0f / (float)pow((double)(float)p->theta, (double)exponent);
        if (p->kind == MODEL_ROPE_LINEAR)
            inv = inv / (float)p->factor;
        else if (p->kind == MODEL_ROPE_LLAMA3)
            inv = llama3(p, inv);
        out->inv_freq[i] = inv;
    }
}
