/* SPDX-License-Identifier: Apache-2.0 */
/* npu: the bytes of an artifact. The same program gives the same bytes, always. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/npu/artifact_priv.h"

/* ---- the source ----------------------------------------------------------------------------- */

static void put_u32(struct base_sha256 *h, uint32_t v)
{
    const uint8_t b[4] = {(uint8_t)v, (uint8_t)(v >> 8), (uint8_t)(v >> 16), (uint8_t)(v >> 24)};
    base_sha256_update(h, b, sizeof b);
}

static void put_f32(struct base_sha256 *h, float f)
{
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    put_u32(h, bits);
}

static void put_weight(struct base_sha256 *h, const struct device_weight *w)
{
    const char *name = w ? ((const struct npu_weight *)w)->name : "";
    base_sha256_update(h, name, strlen(name) + 1);
}

void device_npu_plan_hash(const struct npu_plan *p, uint8_t out[32])
{
    struct base_sha256 h;
    base_sha256_init(&h);
    put_u32(&h, p->n_steps);
    for (uint32_t i = 0; i < p->n_steps; i++) {
        const struct npu_step *s = &p->steps[i];
        const uint32_t words[] = {
            s->verb,          s->a[0],          s->a[1],          s->a[2],       s->n,
            s->narrow,        s->act,           s->rope.head_dim, s->attn.layer, s->attn.q_heads,
            s->attn.kv_heads, s->attn.head_dim, s->attn.window};
        for (size_t k = 0; k < sizeof words / sizeof *words; k++)
            put_u32(&h, words[k]);
        put_f32(&h, s->x);
        put_f32(&h, s->y);
        put_f32(&h, s->attn.scale);
        for (uint32_t k = 0; k < s->rope.head_dim / 2; k++)
            put_f32(&h, s->rope.inv_freq[k]);
        put_weight(&h, s->w);
        put_weight(&h, s->b);
    }
    base_sha256_final(&h, out);
}

/* ---- the body ------------------------------------------------------------------------------- */

void device_npu_geometry_model(const struct npu_plan *p, const struct device_graph *g,
                               struct npu_geometry *out)
{
    memset(out, 0, sizeof *out);
    out->layers = g->n_layers;
    out->vocabulary = g->vocab;
    out->hidden = p->hidden;
    out->kv_heads = p->kv_heads;
    out->head_dim = p->head_dim;
    out->window = p->window;
}

static json_t *numbers(const uint64_t *v, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++)
        json_array_append_new(list, json_integer((json_int_t)v[i]));
    return list;
}

static json_t *strides(const int64_t *v, size_t n)
{
    json_t *list = json_array();
    for (size_t i = 0; i < n; i++)
        json_array_append_new(list, json_integer(v[i]));
    return list;
}

static json_t *weight_json(const struct npu_weight *w, bool host)
{
    static const char *const names[] = {
        [BATON_F32] = "F32", [BATON_F16] = "F16", [BATON_BF16] = "BF16"};
    return json_pack("{s:s,s:s,s:o,s:o,s:b}", "name", w->name, "dtype", names[w->dtype], "shape",
                     numbers(w->shape, w->n_dims), "strides", strides(w->compiled, w->n_dims),
                     "host", host);
}

/* A weight that an earlier step reads stands in the list already. */
static bool seen(const struct npu_plan *p, const struct device_weight *w, uint32_t before)
{
    for (uint32_t i = 0; i < before; i++)
        if ((i % 2 ? p->steps[i / 2].b : p->steps[i / 2].w) == w)
            return true;
    return false;
}

static json_t *weights_json(const struct npu_plan *p, bool host_parts)
{
    json_t *list = json_array();
    for (uint32_t i = 0; i < 2 * p->n_steps; i++) {
        const struct device_weight *w = i % 2 ? p->steps[i / 2].b : p->steps[i / 2].w;
        bool host = host_parts && (i / 2 < p->head.end || i / 2 >= p->tail.first);
        if (w && !seen(p, w, i))
            json_array_append_new(list, weight_json((const struct npu_weight *)w, host));
    }
    return list;
}

static json_t *geometry_json(const struct npu_geometry *g)
{
    json_t *o = json_object();
    for (const struct npu_geometry_member *m = device_npu_geometry_members; m->name; m++)
        json_object_set_new(o, m->name, json_integer(device_npu_geometry_get(g, m->offset)));
    return o;
}

static json_t *body(const char *device, const struct npu_plan *p, const struct npu_geometry *g,
                    const uint8_t checkpoint[32], bool host_parts)
{
    uint64_t widths[BATON_MAX_WIDTHS];
    int64_t kv[4];
    uint8_t source[32];
    char source_hex[65], checkpoint_hex[65];
    size_t n_widths = 0;
    json_t *parts = json_array();
    for (; n_widths < BATON_MAX_WIDTHS && g->widths[n_widths]; n_widths++)
        widths[n_widths] = g->widths[n_widths];
    for (uint32_t l = 0; g->part_layers && l < g->layers; l += g->part_layers)
        json_array_append_new(parts, json_integer(l));
    device_npu_geometry_strides(g, kv);
    device_npu_plan_hash(p, source);
    base_hex(source, 32, source_hex);
    base_hex(checkpoint, 32, checkpoint_hex);
    return json_pack("{s:s,s:b,s:s,s:s,s:s,s:o,s:o,s:o,s:s,s:o,s:o}", "device", device, "emulated",
                     1, "compiler", NPU_COMPILER, "source", source_hex, "checkpoint",
                     checkpoint_hex, "geometry", geometry_json(g), "widths",
                     numbers(widths, n_widths), "parts", parts, "kv_dtype", "BF16", "kv_strides",
                     strides(kv, 4), "weights", weights_json(p, host_parts));
}

int device_npu_artifact_write(const char *device, const struct npu_plan *p,
                              const struct npu_geometry *g, const uint8_t checkpoint[32],
                              bool host_parts, char **out, size_t *n, struct baton_error *e)
{
    enum { HEAD = 160 };
    json_t *doc = body(device, p, g, checkpoint, host_parts);
    char *text = doc ? json_dumps(doc, JSON_COMPACT) : NULL, hex[65];
    size_t n_text = text ? strlen(text) : 0;
    uint8_t hash[32];
    json_decref(doc);
    char *bytes = text ? base_try_alloc(HEAD + n_text + 1, 1, e) : NULL;
    if (!bytes) {
        free(text);
        return base_fail(e, BATON_ERR_NOMEM, "an artifact of %u steps", p->n_steps);
    }
    base_sha256(text, n_text, hash);
    base_hex(hash, 32, hex);
    int head = snprintf(bytes, HEAD, "%s %u %zu %s\n", NPU_ARTIFACT_MAGIC, NPU_ARTIFACT_VERSION,
                        n_text, hex);
    memcpy(bytes + head, text, n_text);
    free(text);
    *out = bytes;
    *n = (size_t)head + n_text;
    return 0;
}
