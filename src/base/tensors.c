/* SPDX-License-Identifier: Apache-2.0 */
/* Reading safetensors: 8 bytes of header length, a JSON header, then the tensors' bytes without
 * gaps. Format: https://huggingface.co/docs/safetensors. Everything in the header is a stranger's
 * claim and is checked against the size of the file before any of it is used. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

/* The format's own limit; it also bounds what the JSON parser may be made to allocate. */
#define HEADER_MAX 100000000u
#define NAME_MAX_BYTES 256u

struct base_tensors {
    struct base_file file;      /* zero where the caller keeps the bytes */
    struct base_arena *arena;   /* names */
    struct json_t *metadata;    /* __metadata__ or NULL */
    struct base_tensor *sorted; /* by name */
    size_t n;
};

static const struct {
    const char *name;
    uint32_t width;
} dtypes[] = {{"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I8", 1}, {"I32", 4}, {"I64", 8}};
#define N_DTYPES (sizeof dtypes / sizeof *dtypes)

static const char *known_dtype(const char *name, uint32_t *width)
{
    for (size_t i = 0; i < N_DTYPES; i++)
        if (!strcmp(name, dtypes[i].name)) {
            *width = dtypes[i].width;
            return dtypes[i].name;
        }
    return NULL;
}

uint32_t base_tensors_width(const char *dtype)
{
    uint32_t width = 0;
    known_dtype(dtype, &width);
    return width;
}

/* A name is printed in messages and compared with others: plain text of bounded length. */
static bool name_ok(const char *name)
{
    size_t n = strlen(name);
    if (n == 0 || n > NAME_MAX_BYTES)
        return false;
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)name[i] < 0x20 || name[i] == 0x7F)
            return false;
    return true;
}

static int read_dtype(const json_t *v, struct base_tensor *t, const char *what,
                      struct baton_error *e)
{
    char buf[64];
    if (!json_is_string(v))
        return base_fail(e, BATON_ERR_INPUT, "%s: tensor %s has no dtype", what, t->name);
    t->dtype = known_dtype(json_string_value(v), &t->width);
    if (t->dtype)
        return 0;
    return base_fail(e, BATON_ERR_UNSUPPORTED,
                     "%s: tensor %s has dtype %s; supported are F32, F16, BF16, I8, I32, I64", what,
                     t->name, base_shown(buf, json_string_value(v)));
}

/* Sets shape and the byte count that it implies. */
static int read_shape(const json_t *v, struct base_tensor *t, const char *what,
                      struct baton_error *e)
{
    if (!json_is_array(v) || json_array_size(v) > sizeof t->shape / sizeof *t->shape)
        return base_fail(e, BATON_ERR_INPUT, "%s: tensor %s has no shape of at most 8 dimensions",
                         what, t->name);
    size_t bytes = t->width;
    t->n_dims = (uint32_t)json_array_size(v);
    for (uint32_t i = 0; i < t->n_dims; i++) {
        const json_t *d = json_array_get(v, i);
        if (!json_is_integer(d) || json_integer_value(d) < 0)
            return base_fail(e, BATON_ERR_INPUT, "%s: tensor %s: dimension %u is not a count", what,
                             t->name, i);
        t->shape[i] = (uint64_t)json_integer_value(d);
        if (!base_mul(bytes, t->shape[i], &bytes))
            return base_fail(e, BATON_ERR_INPUT,
                             "%s: tensor %s: the product of its shape overflows", what, t->name);
    }
    t->bytes = bytes;
    return 0;
}

static int read_offsets(const json_t *v, const uint8_t *base, size_t size, struct base_tensor *t,
                        const char *what, struct baton_error *e)
{
    const json_t *a = json_array_get(v, 0), *b = json_array_get(v, 1);
    if (json_array_size(v) != 2 || !json_is_integer(a) || !json_is_integer(b) ||
        json_integer_value(a) < 0 || json_integer_value(b) < json_integer_value(a))
        return base_fail(e, BATON_ERR_INPUT, "%s: tensor %s has no valid data_offsets", what,
                         t->name);
    uint64_t begin = (uint64_t)json_integer_value(a), end = (uint64_t)json_integer_value(b);
    if (end > size)
        return base_fail(e, BATON_ERR_INPUT,
                         "%s: tensor %s ends at byte %llu, but the file has only %zu bytes of "
                         "tensors (truncated?)",
                         what, t->name, (unsigned long long)end, size);
    if (end - begin != t->bytes)
        return base_fail(e, BATON_ERR_INPUT,
                         "%s: tensor %s has %llu bytes, its shape and dtype need %llu", what,
                         t->name, (unsigned long long)(end - begin), (unsigned long long)t->bytes);
    t->data = base + begin;
    return 0;
}

static int by_name(const void *a, const void *b)
{
    const struct base_tensor *x = a, *y = b;
    return strcmp(x->name, y->name);
}

static int by_data(const void *a, const void *b)
{
    const struct base_tensor *x = a, *y = b;
    if (x->data != y->data)
        return (const uint8_t *)x->data < (const uint8_t *)y->data ? -1 : 1;
    return x->bytes < y->bytes ? -1 : x->bytes > y->bytes;
}

/* Tensors must tile the data: a hole could hide bytes, an overlap makes two tensors one. */
static int check_tiling(struct base_tensor *t, size_t n, const uint8_t *base, size_t size,
                        const char *what, struct baton_error *e)
{
    qsort(t, n, sizeof *t, by_data);
    const uint8_t *at = base;
    for (size_t i = 0; i < n; i++) {
        const uint8_t *data = t[i].data;
        if (data < at)
            return base_fail(e, BATON_ERR_INPUT, "%s: tensor %s overlaps %s", what, t[i].name,
                             t[i - 1].name);
        if (data > at)
            return base_fail(e, BATON_ERR_INPUT, "%s: a hole of %zu bytes before tensor %s", what,
                             (size_t)(data - at), t[i].name);
        at = data + t[i].bytes;
    }
    if (at != base + size)
        return base_fail(e, BATON_ERR_INPUT, "%s: %zu bytes behind the last tensor", what,
                         (size_t)(base + size - at));
    return 0;
}

static int read_tensor(struct base_tensors *ts, const char *name, const json_t *v,
                       const uint8_t *base, size_t size, const char *what, struct baton_error *e)
{
    struct base_tensor *t = &ts->sorted[ts->n];
    char buf[64];
    if (!name_ok(name) || !json_is_object(v))
        return base_fail(e, BATON_ERR_INPUT, "%s: '%s' is not a tensor's entry", what,
                         base_shown(buf, name));
    t->name = base_arena_strdup(ts->arena, name, e);
    if (!t->name)
        return BATON_ERR_NOMEM;
    int rc = read_dtype(json_object_get(v, "dtype"), t, what, e);
    if (!rc)
        rc = read_shape(json_object_get(v, "shape"), t, what, e);
    if (!rc)
        rc = read_offsets(json_object_get(v, "data_offsets"), base, size, t, what, e);
    if (!rc)
        ts->n++;
    return rc;
}

static int read_metadata(struct base_tensors *ts, json_t *v, const char *what,
                         struct baton_error *e)
{
    const char *key;
    json_t *value;
    if (!json_is_object(v))
        return base_fail(e, BATON_ERR_INPUT, "%s: __metadata__ is not an object", what);
    json_object_foreach(v, key, value) if (!json_is_string(value)) return base_fail(
        e, BATON_ERR_INPUT, "%s: __metadata__ holds something that is no text", what);
    ts->metadata = json_incref(v);
    return 0;
}

static int read_header(struct base_tensors *ts, json_t *root, const uint8_t *base, size_t size,
                       const char *what, struct baton_error *e)
{
    const char *name;
    json_t *v;
    if (!json_is_object(root))
        return base_fail(e, BATON_ERR_INPUT, "%s: the header is not a JSON object", what);
    ts->sorted = base_try_alloc(json_object_size(root) + 1, sizeof *ts->sorted, e);
    if (!ts->sorted)
        return BATON_ERR_NOMEM;
    json_object_foreach(root, name, v)
    {
        int rc = !strcmp(name, "__metadata__") ? read_metadata(ts, v, what, e)
                                               : read_tensor(ts, name, v, base, size, what, e);
        if (rc)
            return rc;
    }
    int rc = check_tiling(ts->sorted, ts->n, base, size, what, e);
    qsort(ts->sorted, ts->n, sizeof *ts->sorted, by_name);
    return rc;
}

/* Where the header's JSON ends, after the checks that need no JSON. */
static int header_bytes(const uint8_t *p, size_t n, const char *what, size_t *out,
                        struct baton_error *e)
{
    uint64_t len = 0;
    if (n < 8)
        return base_fail(e, BATON_ERR_INPUT, "%s: %zu bytes are too few for a safetensors file",
                         what, n);
    for (unsigned i = 0; i < 8; i++)
        len |= (uint64_t)p[i] << (8 * i);
    if (len > HEADER_MAX)
        return base_fail(e, BATON_ERR_INPUT,
                         "%s: header of %llu bytes; the format's limit is %u (not safetensors?)",
                         what, (unsigned long long)len, HEADER_MAX);
    if (len > n - 8)
        return base_fail(e, BATON_ERR_INPUT,
                         "%s: header of %llu bytes in a file of %zu (truncated?)", what,
                         (unsigned long long)len, n);
    *out = (size_t)len;
    return 0;
}

static int parse(struct base_tensors *ts, const uint8_t *p, size_t n, const char *what,
                 struct baton_error *e)
{
    size_t len = 0;
    json_t *root = NULL;
    int rc = header_bytes(p, n, what, &len, e);
    if (!rc)
        rc = base_arena_open(&ts->arena, e);
    if (!rc)
        rc = base_json_parse((const char *)p + 8, len, what, &root, e);
    if (!rc)
        rc = read_header(ts, root, p + 8 + len, n - 8 - len, what, e);
    json_decref(root);
    return rc;
}

int base_tensors_open(const char *path, struct base_tensors **out, struct baton_error *e)
{
    const char *slash = strrchr(path, '/');
    struct base_tensors *ts = base_try_alloc(1, sizeof *ts, e);
    if (!ts)
        return BATON_ERR_NOMEM;
    int rc = base_file_open(&ts->file, path, e);
    if (!rc)
        rc = parse(ts, ts->file.data, ts->file.size, slash ? slash + 1 : path, e);
    if (rc)
        base_tensors_close(ts);
    else
        *out = ts;
    return rc;
}

int base_tensors_parse(const void *data, size_t n, const char *what, struct base_tensors **out,
                       struct baton_error *e)
{
    struct base_tensors *ts = base_try_alloc(1, sizeof *ts, e);
    if (!ts)
        return BATON_ERR_NOMEM;
    int rc = parse(ts, data, n, what, e);
    if (rc)
        base_tensors_close(ts);
    else
        *out = ts;
    return rc;
}

void base_tensors_close(struct base_tensors *t)
{
    if (!t)
        return;
    base_file_close(&t->file);
    json_decref(t->metadata);
    base_arena_close(t->arena);
    free(t->sorted);
    free(t);
}

size_t base_tensors_count(const struct base_tensors *t)
{
    return t->n;
}

const struct base_tensor *base_tensors_at(const struct base_tensors *t, size_t i)
{
    return i < t->n ? &t->sorted[i] : NULL;
}

const struct base_tensor *base_tensors_find(const struct base_tensors *t, const char *name)
{
    struct base_tensor key = {.name = name};
    return t->n ? bsearch(&key, t->sorted, t->n, sizeof key, by_name) : NULL;
}

const char *base_tensors_metadata(const struct base_tensors *t, const char *key)
{
    return json_string_value(json_object_get(t->metadata, key));
}

const struct base_file *base_tensors_file(const struct base_tensors *t)
{
    return &t->file;
}
