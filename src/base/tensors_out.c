/* SPDX-License-Identifier: Apache-2.0 */
/* Writing safetensors: what follows is declared first, since the header leads the file. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "base/replace_priv.h"

#define BUFFER ((size_t)1 << 20) /* small pieces (rows of a head) are gathered up to here */

struct base_tensors_out {
    struct base_replace file;
    json_t *header;             /* NULL once it is written */
    uint64_t declared, written; /* bytes of tensors */
    uint8_t *buffer;            /* [BUFFER] */
    size_t used;
};

static int flush(struct base_tensors_out *o, struct baton_error *e)
{
    int rc = base_replace_write(&o->file, o->buffer, o->used, e);
    o->used = 0;
    return rc;
}

static int put(struct base_tensors_out *o, const void *data, size_t n, struct baton_error *e)
{
    int rc = 0;
    for (const uint8_t *p = data; n > 0 && rc == 0;) {
        size_t m = BUFFER - o->used < n ? BUFFER - o->used : n;
        memcpy(o->buffer + o->used, p, m);
        o->used += m;
        p += m;
        n -= m;
        rc = o->used == BUFFER ? flush(o, e) : 0;
    }
    return rc;
}

static int bad_text(const struct base_tensors_out *o, struct baton_error *e)
{
    return base_fail(e, BATON_ERR_USAGE, "%s: a name or metadata is no UTF-8 text, or no memory",
                     o->file.path);
}

static int set_metadata(struct base_tensors_out *o, const char *const *pairs, struct baton_error *e)
{
    json_t *meta = json_object();
    bool ok = meta != NULL;
    for (; ok && pairs && pairs[0]; pairs += 2)
        ok = json_object_set_new(meta, pairs[0], json_string(pairs[1])) == 0;
    ok = ok && o->header && json_object_set(o->header, "__metadata__", meta) == 0;
    json_decref(meta);
    return ok ? 0 : bad_text(o, e);
}

int base_tensors_create(struct base_tensors_out **out, const char *path,
                        const char *const *metadata, struct baton_error *e)
{
    struct base_tensors_out *o = base_try_alloc(1, sizeof *o, e);
    if (!o)
        return BATON_ERR_NOMEM;
    int rc = base_replace_open(&o->file, path, e);
    if (rc == 0 && !(o->buffer = base_try_alloc(BUFFER, 1, e)))
        rc = BATON_ERR_NOMEM;
    if (rc == 0) {
        o->header = json_object();
        rc = set_metadata(o, metadata, e);
    }
    if (rc)
        base_tensors_discard(o);
    else
        *out = o;
    return rc;
}

int base_tensors_declare(struct base_tensors_out *o, const char *name, const char *dtype,
                         uint32_t n_dims, const uint64_t *shape, struct baton_error *e)
{
    size_t bytes = base_tensors_width(dtype), end;
    json_t *dims = json_array();
    bool ok = dims != NULL && bytes != 0 && o->header != NULL;
    for (uint32_t i = 0; ok && i < n_dims; i++)
        ok = base_mul(bytes, shape[i], &bytes) &&
             json_array_append_new(dims, json_integer((json_int_t)shape[i])) == 0;
    if (!ok || !base_add(o->declared, bytes, &end)) {
        json_decref(dims);
        return base_fail(e, BATON_ERR_USAGE, "%s: tensor %s cannot be declared", o->file.path,
                         name);
    }
    json_t *t = json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtype, "shape", dims, "data_offsets",
                          (json_int_t)o->declared, (json_int_t)end);
    if (json_object_set_new(o->header, name, t) != 0)
        return bad_text(o, e);
    o->declared = end;
    return 0;
}

static int write_header(struct base_tensors_out *o, struct baton_error *e)
{
    char *text = json_dumps(o->header, JSON_COMPACT);
    if (!text)
        return bad_text(o, e);
    uint64_t n = strlen(text), padded = (n + 7) / 8 * 8; /* readers want tensors 8-aligned */
    uint8_t length[8];
    for (int i = 0; i < 8; i++)
        length[i] = (uint8_t)(padded >> 8 * i);
    int rc = put(o, length, sizeof length, e);
    if (rc == 0)
        rc = put(o, text, n, e);
    if (rc == 0)
        rc = put(o, "        ", padded - n, e);
    free(text);
    json_decref(o->header);
    o->header = NULL;
    return rc;
}

int base_tensors_write(struct base_tensors_out *o, const void *data, size_t n,
                       struct baton_error *e)
{
    int rc = o->header ? write_header(o, e) : 0;
    if (rc)
        return rc;
    if (n > o->declared - o->written)
        return base_fail(e, BATON_ERR_USAGE,
                         "%s: more bytes than its tensors were declared to have", o->file.path);
    o->written += n;
    return put(o, data, n, e);
}

int base_tensors_commit(struct base_tensors_out *o, struct baton_error *e)
{
    int rc = o->header ? write_header(o, e) : 0; /* no tensor has a byte */
    if (rc == 0 && o->written != o->declared)
        rc = base_fail(e, BATON_ERR_USAGE, "%s: %llu of %llu declared bytes were written",
                       o->file.path, (unsigned long long)o->written,
                       (unsigned long long)o->declared);
    if (rc == 0)
        rc = flush(o, e);
    return rc ? rc : base_replace_commit(&o->file, e);
}

void base_tensors_discard(struct base_tensors_out *o)
{
    if (!o)
        return;
    base_replace_close(&o->file);
    json_decref(o->header);
    free(o->buffer);
    free(o);
}
