/* SPDX-License-Identifier: Apache-2.0 */
/* npu: reading an artifact. Everything is bounded before it is kept. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/npu/artifact_priv.h"

#define MEMBER(name, max)                                                                          \
    {                                                                                              \
#name, offsetof(struct npu_geometry, name), max                                            \
    }
const struct npu_geometry_member device_npu_geometry_members[] = {
    MEMBER(layers, 4096),         MEMBER(vocabulary, INT32_MAX), MEMBER(hidden, 1u << 20),
    MEMBER(kv_heads, 65536),      MEMBER(head_dim, 65536),       MEMBER(window, INT32_MAX),
    MEMBER(part_layers, 4096),    MEMBER(chunk, 65536),          MEMBER(lanes, 64),
    MEMBER(positions, INT32_MAX), MEMBER(block, INT32_MAX),      {NULL, 0, 0},
};

uint32_t device_npu_geometry_get(const struct npu_geometry *g, size_t offset)
{
    uint32_t v;
    memcpy(&v, (const char *)g + offset, sizeof v);
    return v;
}

void device_npu_geometry_strides(const struct npu_geometry *g, int64_t out[4])
{
    int64_t row = 2 * (int64_t)g->head_dim; /* bf16 */
    bool paged = g->block > 0;              /* [head][position][dim]; else [position][head][dim] */
    out[3] = 2;
    out[2] = paged ? row : row * g->kv_heads;
    out[1] = paged ? row * g->block : row;
    out[0] = paged ? out[1] * g->kv_heads : 0;
}

/* ---- members -------------------------------------------------------------------------------- */

static int bad(const char *what, const char *member, struct baton_error *e)
{
    return base_fail(e, BATON_ERR_INPUT, "%.100s: '%s' is not what an artifact has there", what,
                     member);
}

static int read_hash(const json_t *doc, const char *key, uint8_t out[32], const char *what,
                     struct baton_error *e)
{
    const char *hex = NULL;
    int rc = base_json_str(doc, key, true, &hex, what, e);
    if (rc)
        return rc;
    return strlen(hex) == 64 && base_unhex(hex, out, 32) ? 0 : bad(what, key, e);
}

static int read_text(const json_t *doc, const char *key, char *out, size_t size, const char *what,
                     struct baton_error *e)
{
    const char *s = NULL;
    int rc = base_json_str(doc, key, true, &s, what, e);
    if (rc)
        return rc;
    if (!*s || strlen(s) >= size)
        return bad(what, key, e);
    snprintf(out, size, "%s", s);
    return 0;
}

/* A list of whole numbers from min to max, at most `most`; *n is how many. */
static bool read_list(const json_t *list, size_t most, json_int_t min, json_int_t max, int64_t *out,
                      size_t *n)
{
    *n = json_array_size(list);
    if (!json_is_array(list) || *n > most)
        return false;
    for (size_t i = 0; i < *n; i++) {
        const json_t *x = json_array_get(list, i);
        if (!json_is_integer(x) || json_integer_value(x) < min || json_integer_value(x) > max)
            return false;
        out[i] = json_integer_value(x);
    }
    return true;
}

/* ---- geometry ------------------------------------------------------------------------------- */

/* Ascending. */
static int read_widths(const json_t *doc, struct npu_geometry *g, const char *what,
                       struct baton_error *e)
{
    int64_t widths[BATON_MAX_WIDTHS], before = 0;
    size_t n;
    if (!read_list(json_object_get(doc, "widths"), BATON_MAX_WIDTHS, 1, 1 << 20, widths, &n))
        return bad(what, "widths", e);
    for (size_t i = 0; i < n; before = widths[i++]) {
        g->widths[i] = (uint32_t)widths[i];
        if (widths[i] <= before)
            return bad(what, "widths", e);
    }
    return 0;
}

/* Borders of the parts, in layers: the first of each. */
static int read_parts(const json_t *doc, const struct npu_geometry *g, const char *what,
                      struct baton_error *e)
{
    const json_t *list = json_object_get(doc, "parts");
    uint32_t step = g->part_layers;
    size_t n = step ? (g->layers + step - 1) / step : 0;
    if (!json_is_array(list) || json_array_size(list) != n)
        return bad(what, "parts", e);
    for (size_t i = 0; i < n; i++) {
        const json_t *first = json_array_get(list, i);
        if (!json_is_integer(first) || json_integer_value(first) != (json_int_t)(i * step))
            return bad(what, "parts", e);
    }
    return 0;
}

static int read_strides(const json_t *doc, const struct npu_geometry *g, const char *what,
                        struct baton_error *e)
{
    int64_t have[4] = {0}, want[4];
    size_t n;
    device_npu_geometry_strides(g, want);
    if (!read_list(json_object_get(doc, "kv_strides"), 4, 0, INT64_MAX, have, &n) || n != 4 ||
        memcmp(have, want, sizeof want))
        return bad(what, "kv_strides", e);
    return 0;
}

static int read_geometry(const json_t *doc, struct npu_geometry *g, const char *what,
                         struct baton_error *e)
{
    const json_t *o = json_object_get(doc, "geometry");
    int rc = json_is_object(o) ? 0 : bad(what, "geometry", e);
    for (const struct npu_geometry_member *m = device_npu_geometry_members; m->name && !rc; m++) {
        uint32_t v = 0;
        rc = base_json_u32(o, m->name, true, 0, m->max, &v, what, e);
        memcpy((char *)g + m->offset, &v, sizeof v);
    }
    if (rc == 0 && (!g->layers || !g->head_dim || !g->kv_heads))
        rc = bad(what, "geometry", e);
    if (rc == 0)
        rc = read_widths(doc, g, what, e);
    if (rc == 0)
        rc = read_parts(doc, g, what, e);
    return rc ? rc : read_strides(doc, g, what, e);
}

/* ---- weights -------------------------------------------------------------------------------- */

static uint32_t dtype_named(const char *name)
{
    return !strcmp(name, "F32")    ? BATON_F32
           : !strcmp(name, "F16")  ? BATON_F16
           : !strcmp(name, "BF16") ? BATON_BF16
                                   : 0;
}

static int read_weight(const json_t *o, struct npu_artifact_weight *w, const char *what,
                       struct baton_error *e)
{
    const char *dtype = NULL;
    int64_t shape[2] = {1, 1};
    size_t n_shape, n_stride;
    if (!json_is_object(o))
        return bad(what, "weights", e);
    int rc = base_json_str(o, "name", true, &w->name, what, e);
    if (rc == 0)
        rc = base_json_str(o, "dtype", true, &dtype, what, e);
    if (rc == 0)
        rc = base_json_bool(o, "host", true, &w->host, what, e);
    if (rc)
        return rc;
    w->dtype = dtype_named(dtype);
    if (!w->dtype || !read_list(json_object_get(o, "shape"), 2, 1, INT32_MAX, shape, &n_shape) ||
        !read_list(json_object_get(o, "strides"), 2, 1, INT64_MAX >> 1, w->stride, &n_stride) ||
        n_shape != n_stride || n_shape == 0)
        return bad(what, "weights", e);
    w->n_dims = (uint32_t)n_shape;
    for (size_t i = 0; i < n_shape; i++)
        w->shape[i] = (uint64_t)shape[i];
    return 0;
}

static int read_weights(struct npu_artifact *a, const char *what, struct baton_error *e)
{
    const json_t *list = json_object_get(a->doc, "weights");
    size_t n = json_array_size(list);
    if (!json_is_array(list) || n == 0 || n > NPU_ARTIFACT_WEIGHTS)
        return bad(what, "weights", e);
    a->weights = base_try_alloc(n, sizeof *a->weights, e);
    if (!a->weights)
        return BATON_ERR_NOMEM;
    int rc = 0;
    for (size_t i = 0; i < n && rc == 0; i++)
        rc = read_weight(json_array_get(list, i), &a->weights[i], what, e);
    a->n_weights = (uint32_t)n;
    return rc;
}

/* ---- the file ------------------------------------------------------------------------------- */

int device_npu_artifact_body(const char *json, size_t n, const char *what,
                             struct npu_artifact **out, struct baton_error *e)
{
    struct npu_artifact *a = base_try_alloc(1, sizeof *a, e);
    if (!a)
        return BATON_ERR_NOMEM;
    snprintf(a->path, sizeof a->path, "%s", what);
    int rc = base_json_parse(json, n, what, &a->doc, e);
    if (rc == 0 && !json_is_object(a->doc))
        rc = bad(what, "an object", e);
    if (rc == 0)
        rc = read_text(a->doc, "device", a->device, sizeof a->device, what, e);
    if (rc == 0)
        rc = read_text(a->doc, "compiler", a->compiler, sizeof a->compiler, what, e);
    if (rc == 0)
        rc = read_hash(a->doc, "source", a->source, what, e);
    if (rc == 0)
        rc = read_hash(a->doc, "checkpoint", a->checkpoint, what, e);
    if (rc == 0)
        rc = read_geometry(a->doc, &a->geometry, what, e);
    if (rc == 0)
        rc = read_weights(a, what, e);
    if (rc)
        device_npu_artifact_close(a);
    else
        *out = a;
    return rc;
}

/* A decimal number behind one blank; NULL where there is none. */
static const char *number(const char *s, uint64_t *out)
{
    char *end;
    if (*s != ' ' || s[1] < '0' || s[1] > '9')
        return NULL;
    *out = strtoull(s + 1, &end, 10);
    return end;
}

/* "baton-npu-artifact VERSION BYTES SHA256\n", of the body behind it. */
static int read_head(const char *bytes, const char *what, const char **body, uint64_t *n_body,
                     uint8_t hash[32], struct baton_error *e)
{
    size_t n_magic = strlen(NPU_ARTIFACT_MAGIC);
    char hex[65] = "";
    uint64_t version = 0;
    const char *s = strncmp(bytes, NPU_ARTIFACT_MAGIC, n_magic) ? NULL
                                                                : number(bytes + n_magic, &version);
    if (!s)
        return base_fail(e, BATON_ERR_INPUT, "%.100s is no artifact of an emulated npu", what);
    if (version != NPU_ARTIFACT_VERSION)
        return base_fail(e, BATON_ERR_UNSUPPORTED,
                         "%.100s is an artifact of version %llu; this build reads version %u", what,
                         (unsigned long long)version, NPU_ARTIFACT_VERSION);
    s = number(s, n_body);
    if (s && *s == ' ' && strcspn(s, "\n") == 65)
        memcpy(hex, s + 1, 64);
    if (!s || !base_unhex(hex, hash, 32) || s[65] != '\n')
        return base_fail(e, BATON_ERR_INPUT, "%.100s: its first line is not an artifact's", what);
    *body = s + 66;
    return 0;
}

int device_npu_artifact_parse(const char *bytes, size_t n, const char *what,
                              struct npu_artifact **out, struct baton_error *e)
{
    const char *body = NULL;
    uint64_t n_body = 0;
    uint8_t want[32], have[32];
    int rc = read_head(bytes, what, &body, &n_body, want, e);
    if (rc)
        return rc;
    size_t there = n - (size_t)(body - bytes);
    if (there != n_body)
        return base_fail(e, BATON_ERR_INPUT, "%.100s is %s: %zu bytes of %llu are there", what,
                         there < n_body ? "truncated" : "longer than it says", there,
                         (unsigned long long)n_body);
    base_sha256(body, there, have);
    if (memcmp(have, want, sizeof want))
        return base_fail(e, BATON_ERR_INPUT, "%.100s is damaged: its SHA-256 is another one", what);
    rc = device_npu_artifact_body(body, there, what, out, e);
    if (rc == 0) {
        base_sha256(bytes, n, have);
        base_hex(have, 32, (*out)->hash);
    }
    return rc;
}

int device_npu_artifact_open(const char *path, const char *device, struct npu_artifact **out,
                             struct baton_error *e)
{
    struct npu_artifact *a = NULL;
    char *bytes = NULL;
    size_t n = 0;
    int rc = base_file_read(path, NPU_ARTIFACT_BYTES, &bytes, &n, e);
    if (rc == BATON_ERR_IO && e)
        e->code = BATON_ERR_INPUT; /* a file that the user named */
    if (rc)
        return rc == BATON_ERR_IO ? BATON_ERR_INPUT : rc;
    rc = device_npu_artifact_parse(bytes, n, path, &a, e);
    free(bytes);
    if (rc == 0 && strcmp(a->device, device))
        rc = base_fail(e, BATON_ERR_MISMATCH, "%.100s was compiled for %s, not for %s", path,
                       a->device, device);
    if (rc)
        device_npu_artifact_close(a);
    else
        *out = a;
    return rc;
}

void device_npu_artifact_close(struct npu_artifact *a)
{
    if (!a)
        return;
    json_decref(a->doc);
    free(a->weights);
    free(a);
}
