/* SPDX-License-Identifier: Apache-2.0 */
/* Tensor files as the model room sees them: base reads and checks the format, dtypes become the
 * numbers that devices know. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/model_priv.h"

struct model_tensors {
    struct base_tensors *file;
    struct model_tensor *list; /* [n] in the file's order: by name */
    size_t n;
};

static const struct {
    const char *name;
    uint32_t dtype;
} dtypes[] = {
    {"F32", BATON_F32}, {"F16", BATON_F16}, {"BF16", BATON_BF16},
    {"I8", BATON_I8},   {"I32", MODEL_I32}, {"I64", MODEL_I64},
};
#define N_DTYPES (sizeof dtypes / sizeof *dtypes)

const char *model_dtype_name(uint32_t dtype)
{
    for (size_t i = 0; i < N_DTYPES; i++)
        if (dtypes[i].dtype == dtype)
            return dtypes[i].name;
    return "?";
}

uint64_t model_dtype_bytes(uint32_t dtype)
{
    return base_tensors_width(model_dtype_name(dtype));
}

static uint32_t dtype_number(const char *name)
{
    for (size_t i = 0; i < N_DTYPES; i++)
        if (!strcmp(dtypes[i].name, name))
            return dtypes[i].dtype;
    return 0;
}

const char *model_shape_text(char buf[96], const uint64_t *shape, uint32_t n_dims)
{
    size_t at = (size_t)snprintf(buf, 96, "[");
    for (uint32_t i = 0; i < n_dims && at < 90; i++)
        at += (size_t)snprintf(buf + at, 96 - at, "%s%llu", i ? ", " : "",
                               (unsigned long long)shape[i]);
    if (at < 95)
        snprintf(buf + at, 96 - at, "]");
    return buf;
}

/* Takes the file over, also where it fails. */
static int wrap(struct base_tensors *file, struct model_tensors **out, struct baton_error *e)
{
    size_t n = base_tensors_count(file);
    struct model_tensors *ts = base_try_alloc(1, sizeof *ts, e);
    struct model_tensor *list = base_try_alloc(n + 1, sizeof *list, e);
    if (!ts || !list) {
        free(ts);
        free(list);
        base_tensors_close(file);
        return BATON_ERR_NOMEM;
    }
    for (size_t i = 0; i < n; i++) {
        const struct base_tensor *x = base_tensors_at(file, i);
        list[i] = (struct model_tensor){.name = x->name,
                                        .dtype = dtype_number(x->dtype),
                                        .n_dims = x->n_dims,
                                        .data = x->data,
                                        .bytes = x->bytes};
        memcpy(list[i].shape, x->shape, sizeof list[i].shape);
    }
    *ts = (struct model_tensors){file, list, n};
    *out = ts;
    return 0;
}

int model_tensors_open(const char *path, struct model_tensors **out, struct baton_error *e)
{
    struct base_tensors *file;
    int rc = base_tensors_open(path, &file, e);
    return rc ? rc : wrap(file, out, e);
}

int model_tensors_parse(const void *data, size_t n, const char *what, struct model_tensors **out,
                        struct baton_error *e)
{
    struct base_tensors *file;
    int rc = base_tensors_parse(data, n, what, &file, e);
    return rc ? rc : wrap(file, out, e);
}

void model_tensors_close(struct model_tensors *t)
{
    if (!t)
        return;
    base_tensors_close(t->file);
    free(t->list);
    free(t);
}

size_t model_tensors_count(const struct model_tensors *t)
{
    return t->n;
}

const struct model_tensor *model_tensors_at(const struct model_tensors *t, size_t i)
{
    return i < t->n ? &t->list[i] : NULL;
}

static int by_name(const void *a, const void *b)
{
    const struct model_tensor *x = a, *y = b;
    return strcmp(x->name, y->name);
}

const struct model_tensor *model_tensors_find(const struct model_tensors *t, const char *name)
{
    struct model_tensor key = {.name = name};
    return t->n ? bsearch(&key, t->list, t->n, sizeof key, by_name) : NULL;
}

const char *model_tensors_metadata(const struct model_tensors *t, const char *key)
{
    return base_tensors_metadata(t->file, key);
}

const struct base_file *model_tensors_file(const struct model_tensors *t)
{
    return base_tensors_file(t->file);
}
