/* SPDX-License-Identifier: Apache-2.0 */
/* Heap allocation that can fail: the form for every size that comes from outside. */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

bool base_mul(size_t a, size_t b, size_t *out)
{
    size_t r;
    if (__builtin_mul_overflow(a, b, &r))
        return false;
    *out = r;
    return true;
}

bool base_add(size_t a, size_t b, size_t *out)
{
    size_t r;
    if (__builtin_add_overflow(a, b, &r))
        return false;
    *out = r;
    return true;
}

/* No heap array of baton comes near this; a larger one is a corrupt size, refused without asking an
 * allocator that may promise more than the machine has. Weights and caches use base_map_alloc. */
#define HEAP_MAX (((size_t)1 << 40) - 4096)

static bool array_bytes(size_t n, size_t size, size_t *out)
{
    return base_mul(n, size, out) && *out <= HEAP_MAX;
}

static void *no_memory(size_t n, size_t size, struct baton_error *e)
{
    base_fail(e, BATON_ERR_NOMEM, "no memory for %zu elements of %zu bytes", n, size);
    return NULL;
}

void *(base_try_alloc)(size_t n, size_t size, struct baton_error *e)
{
    size_t bytes;
    if (!array_bytes(n, size, &bytes))
        return no_memory(n, size, e);
    void *p = calloc(1, bytes ? bytes : 1); /* NULL must mean failure, for empty arrays too */
    return p ? p : no_memory(n, size, e);
}

void *base_try_realloc(void *p, size_t n, size_t size, struct baton_error *e)
{
    size_t bytes;
    if (!array_bytes(n, size, &bytes))
        return no_memory(n, size, e);
    void *q = realloc(p, bytes ? bytes : 1);
    return q ? q : no_memory(n, size, e);
}

char *base_try_strdup(const char *s, struct baton_error *e)
{
    return base_try_strndup(s, strlen(s), e);
}

char *base_try_strndup(const char *s, size_t n, struct baton_error *e)
{
    size_t bytes;
    if (!base_add(n, 1, &bytes))
        return no_memory(n, 1, e);
    char *p = base_try_alloc(bytes, 1, e);
    if (p && n)
        memcpy(p, s, n);
    return p;
}
