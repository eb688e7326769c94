/* SPDX-License-Identifier: Apache-2.0 */
/* Arena: a list of chunks, each filled from its start; nothing is freed before the end. */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

enum { ALIGN = 16, CHUNK_MIN = 4096, CHUNK_MAX = 1 << 20 };

struct chunk {
    struct chunk *next;
    size_t cap, used;
    _Alignas(ALIGN) unsigned char data[];
};

struct base_arena {
    struct chunk *head; /* the one being filled */
    size_t next_cap;    /* doubles up to CHUNK_MAX, so small arenas stay small */
    size_t bytes;
};

int base_arena_open(struct base_arena **out, struct baton_error *e)
{
    struct base_arena *a = base_try_alloc(1, sizeof *a, e);
    if (!a)
        return BATON_ERR_NOMEM;
    a->next_cap = CHUNK_MIN;
    *out = a;
    return 0;
}

void base_arena_close(struct base_arena *a)
{
    if (!a)
        return;
    for (struct chunk *c = a->head; c;) {
        struct chunk *next = c->next;
        free(c);
        c = next;
    }
    free(a);
}

/* An object larger than a chunk gets one of its own, put behind the head so that the head's rest is
 * still used. Chunks come zeroed from base_try_alloc, and their bytes are given out once. */
static struct chunk *add_chunk(struct base_arena *a, size_t need, struct baton_error *e)
{
    bool alone = need > a->next_cap / 4 && a->head;
    size_t cap = need > a->next_cap || alone ? need : a->next_cap, total;
    if (!base_add(cap, sizeof(struct chunk), &total)) {
        base_fail(e, BATON_ERR_NOMEM, "no memory for %zu bytes", need);
        return NULL;
    }
    struct chunk *c = base_try_alloc(1, total, e);
    if (!c)
        return NULL;
    c->cap = cap;
    if (alone) {
        c->next = a->head->next;
        a->head->next = c;
    } else {
        c->next = a->head;
        a->head = c;
        if (a->next_cap < CHUNK_MAX)
            a->next_cap *= 2;
    }
    return c;
}

void *base_arena_alloc(struct base_arena *a, size_t n, size_t size, struct baton_error *e)
{
    size_t bytes, need;
    if (!base_mul(n, size, &bytes) || !base_add(bytes, ALIGN - 1, &need)) {
        base_fail(e, BATON_ERR_NOMEM, "no memory for %zu elements of %zu bytes", n, size);
        return NULL;
    }
    need &= ~(size_t)(ALIGN - 1);
    if (need == 0)
        need = ALIGN; /* empty arrays have distinct addresses */
    struct chunk *c = a->head;
    if (!c || c->cap - c->used < need) {
        c = add_chunk(a, need, e);
        if (!c)
            return NULL;
    }
    void *p = c->data + c->used;
    c->used += need;
    a->bytes += need;
    return p;
}

char *base_arena_strdup(struct base_arena *a, const char *s, struct baton_error *e)
{
    size_t n = strlen(s) + 1;
    char *p = base_arena_alloc(a, n, 1, e);
    return p ? memcpy(p, s, n) : NULL;
}

size_t base_arena_bytes(const struct base_arena *a)
{
    return a->bytes;
}
