/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer.json to a tokenizer, part 2: normalizer, pre-tokenizer, decoder, post-processor.
 *
 * Each of them is null, one part, or a Sequence of parts; parts are told by their "type".
 */
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/base.h"
#include "model/tokenizer_load_priv.h"

typedef int part_fn(struct model_load *l, const json_t *part, const char *type);

static int unknown_part(struct model_load *l, const char *role, const char *type)
{
    return base_fail(l->e, BATON_ERR_INPUT, "%s: %s \"%s\" is not supported", l->what, role,
                     model_quote(type, strlen(type)).text);
}

/* Give fn the part, or those of a Sequence (whose list is called `list`), in order. */
static int each_part(struct model_load *l, const json_t *part, const char *list, part_fn *fn)
{
    const char *type = NULL;
    int rc = base_json_str(part, "type", true, &type, l->what, l->e);
    if (rc || strcmp(type, "Sequence") != 0)
        return rc ? rc : fn(l, part, type);
    const json_t *parts = json_object_get(part, list), *p;
    if (!json_is_array(parts))
        return base_fail(l->e, BATON_ERR_INPUT, "%s: a Sequence has no list %s", l->what, list);
    size_t i;
    json_array_foreach(parts, i, p)
    {
        rc = base_json_str(p, "type", true, &type, l->what, l->e);
        if (rc == 0)
            rc = fn(l, p, type); /* fn refuses a Sequence inside a Sequence */
        if (rc)
            return rc;
    }
    return 0;
}

static int each_if_any(struct model_load *l, const char *key, const char *list, part_fn *fn)
{
    const json_t *part = json_object_get(l->root, key);
    return !part || json_is_null(part) ? 0 : each_part(l, part, list, fn);
}

static int copy_affix(struct model_load *l, const char *name, const char *s, char *out, size_t *n)
{
    *n = strlen(s);
    if (*n > MODEL_TOK_AFFIX_MAX)
        return base_fail(l->e, BATON_ERR_INPUT, "%s: \"%s\" has %zu bytes, at most %d", l->what,
                         name, *n, MODEL_TOK_AFFIX_MAX);
    memcpy(out, s, *n);
    return 0;
}

static int too_many(struct model_load *l, const char *role)
{
    return base_fail(l->e, BATON_ERR_INPUT, "%s: more than %d steps of a %s", l->what,
                     MODEL_TOK_STEPS_MAX, role);
}

/* {"String": "..."} of a part; {"Regex": ...} where the caller can use one, else refused. */
static int pattern_of(struct model_load *l, const json_t *part, const char **text, bool *regex)
{
    const json_t *pattern = json_object_get(part, "pattern");
    const char *kind = json_object_get(pattern, "Regex") && *regex ? "Regex" : "String";
    *regex = *kind == 'R';
    int rc = base_json_str(pattern, kind, true, text, l->what, l->e);
    if (rc == 0 && **text == '\0')
        rc = base_fail(l->e, BATON_ERR_INPUT, "%s: an empty pattern", l->what);
    return rc;
}

/* ---- normalizer ---------------------------------------------------------------------------- */

static int load_replace(struct model_load *l, const json_t *part, struct model_norm *r)
{
    const char *text = NULL, *content = NULL;
    bool regex = false;
    r->kind = MODEL_NORM_REPLACE;
    int rc = pattern_of(l, part, &text, &regex);
    if (rc == 0)
        rc = base_json_str(part, "content", true, &content, l->what, l->e);
    if (rc == 0)
        rc = copy_affix(l, "pattern", text, r->pattern, &r->n_pattern);
    return rc ? rc : copy_affix(l, "content", content, r->content, &r->n_content);
}

static int load_norm(struct model_load *l, const json_t *part, const char *type)
{
    if (l->t->n_norm == MODEL_TOK_STEPS_MAX)
        return too_many(l, "normalizer");
    struct model_norm *step = &l->t->norm[l->t->n_norm++];
    if (strcmp(type, "NFC") == 0) {
        step->kind = MODEL_NORM_NFC;
        return 0;
    }
    if (strcmp(type, "Replace") == 0)
        return load_replace(l, part, step);
    if (strcmp(type, "Prepend") == 0) {
        const char *s = NULL;
        step->kind = MODEL_NORM_PREPEND;
        int rc = base_json_str(part, "prepend", true, &s, l->what, l->e);
        return rc ? rc : copy_affix(l, "prepend", s, step->content, &step->n_content);
    }
    return unknown_part(l, "normalizer", type);
}

/* ---- pre-tokenizer ------------------------------------------------------------------------- */

static struct model_split *new_split(struct model_load *l, enum model_split_kind kind)
{
    if (l->t->n_split == MODEL_TOK_STEPS_MAX) {
        (void)too_many(l, "pre_tokenizer");
        return NULL;
    }
    struct model_split *s = &l->t->split[l->t->n_split++];
    s->kind = kind;
    return s;
}

static int load_behavior(struct model_load *l, const json_t *part, struct model_split *s)
{
    static const char *const names[] = {
        [MODEL_ISOLATED] = "Isolated",
        [MODEL_REMOVED] = "Removed",
        [MODEL_WITH_PREVIOUS] = "MergedWithPrevious",
        [MODEL_WITH_NEXT] = "MergedWithNext",
        [MODEL_CONTIGUOUS] = "Contiguous",
    };
    const char *name = NULL;
    int rc = base_json_str(part, "behavior", true, &name, l->what, l->e);
    if (rc == 0)
        rc = base_json_bool(part, "invert", false, &s->invert, l->what, l->e);
    if (rc)
        return rc;
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0) {
            s->behavior = (enum model_split_behavior)i;
            return 0;
        }
    return unknown_part(l, "behavior", name);
}

static int load_split(struct model_load *l, const json_t *part)
{
    const char *text = NULL;
    bool regex = true;
    int rc = pattern_of(l, part, &text, &regex);
    if (rc)
        return rc;
    struct model_split *s = new_split(l, regex ? MODEL_SPLIT_REGEX : MODEL_SPLIT_TEXT);
    if (!s)
        return BATON_ERR_INPUT;
    rc = load_behavior(l, part, s);
    if (rc == 0 && regex)
        rc = model_pattern_compile(text, strlen(text), l->what, &s->regex, l->e);
    if (rc == 0 && !regex)
        rc = copy_affix(l, "pattern", text, s->text, &s->n_text);
    return rc;
}

static int load_byte_level(struct model_load *l, const json_t *part)
{
    /* GPT-2's pattern, which use_regex stands for. */
    static const char gpt2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+"
                               "|\\s+(?!\\S)|\\s+";
    bool space = true, regex = true;
    int rc = base_json_bool(part, "add_prefix_space", true, &space, l->what, l->e);
    if (rc == 0)
        rc = base_json_bool(part, "use_regex", false, &regex, l->what, l->e);
    if (rc)
        return rc;
    if (space && !new_split(l, MODEL_SPLIT_SPACE))
        return BATON_ERR_INPUT;
    if (regex) {
        struct model_split *s = new_split(l, MODEL_SPLIT_REGEX);
        if (!s)
            return BATON_ERR_INPUT;
        rc = model_pattern_compile(gpt2, sizeof gpt2 - 1, l->what, &s->regex, l->e);
    }
    if (rc == 0 && !new_split(l, MODEL_SPLIT_BYTES))
        rc = BATON_ERR_INPUT;
    return rc;
}

static int load_pre(struct model_load *l, const json_t *part, const char *type)
{
    if (strcmp(type, "Split") == 0)
        return load_split(l, part);
    if (strcmp(type, "ByteLevel") == 0)
        return load_byte_level(l, part);
    return unknown_part(l, "pre_tokenizer", type);
}

/* ---- decoder ------------------------------------------------------------------------------- */

/* In the order Replace..., ByteFallback, Fuse, or ByteLevel alone: that is what detokenize.c
 * does. */
static int load_decoder_part(struct model_load *l, const json_t *part, const char *type)
{
    struct model_tokenizer *t = l->t;
    bool first = t->n_decode_replace == 0 && !t->decode_bytes && !l->decoder_ends;
    bool chain = strcmp(type, "Replace") == 0 || strcmp(type, "ByteFallback") == 0 ||
                 strcmp(type, "Fuse") == 0;
    if (!chain && strcmp(type, "ByteLevel") != 0)
        return unknown_part(l, "decoder", type);
    if (l->decoder_ends || (!chain && !first) || (*type == 'R' && t->decode_bytes))
        return base_fail(l->e, BATON_ERR_INPUT, "%s: decoder %s is not supported in this place",
                         l->what, type);
    if (*type == 'R') {
        if (t->n_decode_replace == MODEL_TOK_STEPS_MAX)
            return too_many(l, "decoder");
        return load_replace(l, part, &t->decode_replace[t->n_decode_replace++]);
    }
    t->decode_bytes |= strcmp(type, "ByteFallback") == 0;
    l->decoder_ends = !chain || *type == 'F';
    t->decoder = chain ? MODEL_DECODE_CHAIN : MODEL_DECODE_BYTES;
    return 0;
}

static int load_decoder(struct model_load *l)
{
    l->t->decoder = MODEL_DECODE_CHAIN;
    int rc = each_if_any(l, "decoder", "decoders", load_decoder_part);
    if (rc == 0 && !l->decoder_ends)
        rc = base_fail(l->e, BATON_ERR_INPUT, "%s: decoder is neither ByteLevel nor ends with Fuse",
                       l->what);
    return rc;
}

int model_load_pipeline(struct model_load *l)
{
    int rc = each_if_any(l, "normalizer", "normalizers", load_norm);
    if (rc == 0)
        rc = each_if_any(l, "pre_tokenizer", "pretokenizers", load_pre);
    return rc ? rc : load_decoder(l);
}

/* ---- post-processor ------------------------------------------------------------------------ */

static int add_special(struct model_load *l, const json_t *id, int32_t *ids, unsigned *n)
{
    const struct model_vocab *v = &l->t->vocab;
    json_int_t value = json_is_integer(id) ? json_integer_value(id) : -1;
    if (value < 0 || value >= v->n_ids || v->flags[value] == 0)
        return base_fail(l->e, BATON_ERR_INPUT,
                         "%s: post_processor: an id that no token has (%lld)", l->what,
                         (long long)value);
    if (*n == MODEL_TOK_SPECIALS_MAX)
        return base_fail(l->e, BATON_ERR_INPUT, "%s: post_processor: more than %d special tokens",
                         l->what, MODEL_TOK_SPECIALS_MAX);
    ids[(*n)++] = (int32_t)value;
    return 0;
}

/* The ids of one special token of the template. */
static int template_special(struct model_load *l, const json_t *part, const json_t *special,
                            int32_t *ids, unsigned *n)
{
    const char *name = NULL;
    int rc = base_json_str(special, "id", true, &name, l->what, l->e);
    if (rc)
        return rc;
    const json_t *entry = json_object_get(json_object_get(part, "special_tokens"), name);
    const json_t *list = json_object_get(entry, "ids"), *id;
    if (!json_is_array(list))
        return base_fail(l->e, BATON_ERR_INPUT, "%s: post_processor: \"%s\" has no ids", l->what,
                         model_quote(name, strlen(name)).text);
    size_t i;
    json_array_foreach(list, i, id) if ((rc = add_special(l, id, ids, n))) return rc;
    return 0;
}

static int load_template(struct model_load *l, const json_t *part)
{
    int32_t *const ids[2] = {l->t->before, l->t->after};
    unsigned *const n[2] = {&l->t->n_before, &l->t->n_after};
    unsigned side = 0; /* 0 before the text, 1 after it */
    const json_t *single = json_object_get(part, "single"), *step;
    size_t i;
    if (l->templates++ > 0) /* the package has no meaning for a second one either */
        return base_fail(l->e, BATON_ERR_INPUT, "%s: post_processor: two templates", l->what);
    json_array_foreach(single, i, step)
    {
        const json_t *special = json_object_get(step, "SpecialToken");
        if (special) {
            int rc = template_special(l, part, special, ids[side], n[side]);
            if (rc)
                return rc;
        } else if (json_object_get(step, "Sequence") && side == 0) {
            side = 1;
        } else {
            break;
        }
    }
    if (side == 0 || i < json_array_size(single))
        return base_fail(l->e, BATON_ERR_INPUT,
                         "%s: post_processor: single is no text among special tokens", l->what);
    return 0;
}

static int load_post_part(struct model_load *l, const json_t *part, const char *type)
{
    if (strcmp(type, "TemplateProcessing") == 0)
        return load_template(l, part);
    if (strcmp(type, "ByteLevel") == 0)
        return 0; /* moves offsets, which nothing here has */
    return unknown_part(l, "post_processor", type);
}

int model_load_post(struct model_load *l)
{
    return each_if_any(l, "post_processor", "processors", load_post_part);
}
