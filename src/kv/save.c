/* SPDX-License-Identifier: Apache-2.0 */
/* A sequence as a safetensors file: u64 length of the header, JSON header, tensors without gaps. */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kv/kv_priv.h"

#define BUFFER ((size_t)1 << 20)

struct out {
    int fd;
    const char *path;
    uint8_t *buffer; /* [BUFFER] */
    size_t used;
};

static int out_flush(struct out *o, struct baton_error *e)
{
    for (size_t at = 0; at < o->used;) {
        ssize_t n = write(o->fd, o->buffer + at, o->used - at);
        if (n < 0 && errno != EINTR)
            return base_fail_errno(e, BATON_ERR_IO, errno, "cannot write %s", o->path);
        at += n > 0 ? (size_t)n : 0;
    }
    o->used = 0;
    return 0;
}

static int out_write(struct out *o, const void *data, size_t n, struct baton_error *e)
{
    for (const uint8_t *p = data; n > 0;) {
        size_t m = BUFFER - o->used < n ? BUFFER - o->used : n;
        memcpy(o->buffer + o->used, p, m);
        o->used += m;
        p += m;
        n -= m;
        int rc = o->used == BUFFER ? out_flush(o, e) : 0;
        if (rc)
            return rc;
    }
    return 0;
}

/* One layer's retained range. */
static uint32_t retained(const struct kv_seq *s, const struct kv_geometry *g, uint32_t layer,
                         uint32_t *first)
{
    *first = kv_retained_first(g, layer, kv_seq_length(s));
    return kv_seq_length(s) - *first;
}

static const char *dtype_name(uint32_t dtype)
{
    return dtype == BATON_F32 ? "F32" : dtype == BATON_F16 ? "F16" : "BF16";
}

/* Add {"dtype", "shape", "data_offsets"} under "<what>.<layer>"; advances *at. */
static bool header_tensor(json_t *root, const char *what, uint32_t layer, const char *dtype,
                          json_t *shape, size_t bytes, uint64_t *at)
{
    char name[32];
    snprintf(name, sizeof name, "%s.%u", what, layer);
    json_t *t = json_pack("{s:s, s:o, s:[I, I]}", "dtype", dtype, "shape", shape, "data_offsets",
                          (json_int_t)*at, (json_int_t)(*at + bytes));
    *at += bytes;
    return t && json_object_set_new(root, name, t) == 0;
}

/* Positions come first: they are the widest elements, so every tensor lies aligned to its own. */
static json_t *header_build(const struct kv_seq *s, const struct kv_geometry *g,
                            const char *const *metadata)
{
    json_t *root = json_object(), *meta = json_object();
    bool ok = root && meta;
    for (; ok && metadata && metadata[0]; metadata += 2)
        ok = json_object_set_new(meta, metadata[0], json_string(metadata[1])) == 0;
    ok = ok && json_object_set(root, "__metadata__", meta) == 0;
    uint64_t at = 0;
    uint32_t first;
    for (uint32_t l = 0; ok && l < g->n_layers; l++) {
        uint32_t n = retained(s, g, l, &first);
        ok = header_tensor(root, "positions", l, "I32", json_pack("[i]", (int)n), 4 * (size_t)n,
                           &at);
    }
    for (uint32_t l = 0; ok && l < 2 * g->n_layers; l++) {
        uint32_t n = retained(s, g, l / 2, &first);
        json_t *shape = json_pack("[i, i, i]", (int)g->kv_heads, (int)n, (int)g->head_dim);
        ok = header_tensor(root, l % 2 ? "v" : "k", l / 2, dtype_name(g->dtype), shape,
                           kv_piece_bytes(g->dtype, g->kv_heads, g->head_dim, n), &at);
    }
    json_decref(meta);
    if (ok)
        return root;
    json_decref(root);
    return NULL;
}

static int write_header(struct out *o, const struct kv_seq *s, const struct kv_geometry *g,
                        const char *const *metadata, struct baton_error *e)
{
    json_t *root = header_build(s, g, metadata);
    char *text = root ? json_dumps(root, JSON_COMPACT) : NULL;
    json_decref(root);
    if (!text)
        return base_fail(e, BATON_ERR_USAGE, "%s: metadata is no UTF-8 text, or no memory",
                         o->path);
    uint64_t n = strlen(text), padded = (n + 7) / 8 * 8; /* readers want tensors 8-aligned */
    int rc = out_write(o, &padded, sizeof padded, e);
    if (rc == 0)
        rc = out_write(o, text, n, e);
    if (rc == 0)
        rc = out_write(o, "        ", padded - n, e);
    free(text);
    return rc;
}

static int write_positions(struct out *o, uint32_t first, uint32_t n, struct baton_error *e)
{
    int rc = 0;
    for (uint32_t i = 0; i < n && rc == 0; i++) {
        int32_t p = (int32_t)(first + i);
        rc = out_write(o, &p, sizeof p, e);
    }
    return rc;
}

/* [kv_heads, n, head_dim] of a pool's page, whose rows are dense within a head. */
static int write_slot(struct out *o, const struct baton_kv_view *v, enum kv_which which,
                      uint32_t first, uint32_t n, struct baton_error *e)
{
    const struct baton_kv_layout *l = v->layout;
    int rc = kv_view_check(v, which, first, n, false, e);
    for (uint32_t h = 0; h < l->kv_heads; h++)
        for (uint32_t p = first, run; rc == 0 && p < first + n; p += run) {
            const uint8_t *row = kv_view_run(v, which, p, first + n - p, &run);
            rc = out_write(o, row + h * l->stride_head, run * (size_t)l->stride_position, e);
        }
    return rc;
}

static int write_all(struct out *o, struct kv_seq *s, const struct kv_geometry *g,
                     const char *const *metadata, struct baton_error *e)
{
    const struct baton_kv_view *views = kv_seq_views(s);
    uint32_t first;
    int rc = write_header(o, s, g, metadata, e);
    for (uint32_t l = 0; rc == 0 && l < g->n_layers; l++) {
        uint32_t n = retained(s, g, l, &first);
        rc = write_positions(o, first, n, e);
    }
    for (uint32_t l = 0; rc == 0 && l < 2 * g->n_layers; l++) {
        uint32_t n = retained(s, g, l / 2, &first);
        rc = write_slot(o, &views[l / 2], l % 2 ? KV_V : KV_K, first, n, e);
    }
    if (rc == 0)
        rc = out_flush(o, e);
    if (rc == 0 && fsync(o->fd) != 0)
        rc = base_fail_errno(e, BATON_ERR_IO, errno, "cannot write %s", o->path);
    return rc;
}

/* A new file beside `path`: its name into *name. */
static int open_beside(const char *path, char **name, struct baton_error *e)
{
    uint64_t r;
    int rc = base_random(&r, sizeof r, e);
    if (rc)
        return rc;
    size_t bytes = strlen(path) + 32;
    *name = base_try_alloc(bytes, 1, e);
    if (!*name)
        return BATON_ERR_NOMEM;
    snprintf(*name, bytes, "%s.%016llx.part", path, (unsigned long long)r);
    int fd = open(*name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    return fd >= 0 ? fd : base_fail_errno(e, BATON_ERR_IO, errno, "cannot create %s", *name);
}

int kv_save(struct kv_seq *s, const char *path, const char *const *metadata,
            struct baton_error *e)
{
    char *name = NULL;
    struct out o = {.fd = -1, .path = path};
    int rc = BATON_ERR_NOMEM;
    o.buffer = base_try_alloc(BUFFER, 1, e);
    if (o.buffer)
        rc = o.fd = open_beside(path, &name, e);
    if (o.fd >= 0) {
        rc = write_all(&o, s, kv_seq_geometry(s), metadata, e);
        if (close(o.fd) != 0 && rc == 0)
            rc = base_fail_errno(e, BATON_ERR_IO, errno, "cannot write %s", path);
        if (rc == 0 && rename(name, path) != 0)
            rc = base_fail_errno(e, BATON_ERR_IO, errno, "cannot rename to %s", path);
        if (rc != 0)
            unlink(name);
    }
    free(name);
    free(o.buffer);
    return rc;
}
