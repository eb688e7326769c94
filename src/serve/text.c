/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes that grow. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "serve/serve_priv.h"

static int reserve(struct serve_text *t, size_t more)
{
    size_t want, cap = t->cap ? t->cap : 256;
    if (!base_add(t->n, more, &want) || want > SIZE_MAX / 4)
        return BATON_ERR_NOMEM;
    while (cap <= want)
        cap *= 2;
    if (cap == t->cap)
        return 0;
    char *data = base_try_realloc(t->data, cap, 1, NULL);
    if (!data)
        return BATON_ERR_NOMEM;
    t->data = data;
    t->cap = cap;
    return 0;
}

int serve_text_put(struct serve_text *t, const void *data, size_t n)
{
    if (reserve(t, n))
        return BATON_ERR_NOMEM;
    if (n)
        memcpy(t->data + t->n, data, n);
    t->n += n;
    t->data[t->n] = '\0';
    return 0;
}

int serve_text_printf(struct serve_text *t, const char *fmt, ...)
{
    char line[512];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    if (n < 0 || (size_t)n >= sizeof line)
        return BATON_ERR_NOMEM;
    return serve_text_put(t, line, (size_t)n);
}

static int put(const char *data, size_t n, void *text)
{
    return serve_text_put(text, data, n);
}

int serve_text_json(struct serve_text *t, json_t *doc)
{
    size_t before = t->n;
    int rc = doc ? json_dump_callback(doc, put, t, JSON_COMPACT | JSON_REAL_PRECISION(9)) : -1;
    json_decref(doc);
    if (rc)
        t->n = before;
    return rc ? BATON_ERR_NOMEM : 0;
}

void serve_text_drop(struct serve_text *t, size_t n)
{
    if (n == 0)
        return;
    memmove(t->data, t->data + n, t->n - n + 1);
    t->n -= n;
}

void serve_text_free(struct serve_text *t)
{
    free(t->data);
    *t = (struct serve_text){0};
}
