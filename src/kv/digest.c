/* SPDX-License-Identifier: Apache-2.0 */
/* Slot digests. All integers are little-endian.
 *
 * A slot's positions [first, first + count) are cut at absolute multiples of 64 into leaves, the
 * first and last of which may be short. With a leaf's first position f and its count m,
 *
 *     leaf = XXH3-128, seed 0, of
 *            u32 layer, u32 which (0 = K, 1 = V), u32 f, u32 m,
 *            then for each head, for each of the m positions, for each dim in [0, head_dim):
 *            the element as stored (2 or 4 bytes)
 *            written in xxHash's canonical form: 16 bytes, most significant first
 *     slot = SHA-256 of
 *            u32 version (1), u32 layer, u32 which, u32 dtype, u32 kv_heads, u32 head_dim,
 *            u32 first, u32 count, u32 number of leaves,
 *            then the leaves in ascending order of positions
 */
#include <stdlib.h>
#include <string.h>
#ifdef KV_XXHASH_DISPATCH /* the library chooses its vectors at run time; same values */
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include "kv/kv_priv.h"

#define LEAF 64u
/* Copied, then digested while both copies are in the nearest caches. Half of it costs more calls
 * than it saves misses (bench/bench_kv). */
#define TILE_BYTES 16384u

struct kv_digest {
    uint32_t layer, which, dtype, kv_heads, head_dim;
    uint32_t first, end;
    uint32_t n_leaves, n_done;
    bool *done;                 /* [n_leaves] */
    XXH128_canonical_t *leaves; /* [n_leaves] */
    XXH3_state_t *state;
    uint8_t *tile; /* [LEAF, head_dim] as read, where a copy converts; NULL until then */
};

int kv_digest_open(struct kv_digest **out, uint32_t layer, enum kv_which which, uint32_t dtype,
                   uint32_t kv_heads, uint32_t head_dim, uint32_t first, uint32_t n,
                   struct baton_error *e)
{
    if (kv_dtype_bytes(dtype) == 0)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "KV digest of dtype %u", dtype);
    if (kv_heads == 0 || head_dim == 0 || n == 0 || (uint64_t)first + n > UINT32_MAX)
        return base_fail(e, BATON_ERR_USAGE, "KV digest of %u heads of %u, positions %u, %u",
                         kv_heads, head_dim, first, n);
    struct kv_digest *d = base_try_alloc(1, sizeof *d, e);
    if (!d)
        return BATON_ERR_NOMEM;
    *d = (struct kv_digest){.layer = layer,
                            .which = which,
                            .dtype = dtype,
                            .kv_heads = kv_heads,
                            .head_dim = head_dim,
                            .first = first,
                            .end = first + n};
    d->n_leaves = (d->end - 1) / LEAF - first / LEAF + 1;
    d->done = base_try_alloc(d->n_leaves, sizeof *d->done, e);
    d->leaves = base_try_alloc(d->n_leaves, sizeof *d->leaves, e);
    d->state = XXH3_createState();
    if (!d->done || !d->leaves || !d->state) {
        kv_digest_close(d);
        return base_fail(e, BATON_ERR_NOMEM, "no memory for the digest of %u positions", n);
    }
    *out = d;
    return 0;
}

void kv_digest_close(struct kv_digest *d)
{
    if (!d)
        return;
    XXH3_freeState(d->state);
    free(d->tile);
    free(d->leaves);
    free(d->done);
    free(d);
}

static void put_u32(uint8_t *p, const uint32_t *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        for (int b = 0; b < 4; b++)
            p[4 * i + b] = (uint8_t)(x[i] >> 8 * b);
}

/* n positions of one head, from its row at p on. */
static void hash_rows(XXH3_state_t *state, const uint8_t *p, const struct baton_kv_layout *l,
                      uint32_t n)
{
    size_t bytes = kv_dtype_bytes(l->dtype), row = bytes * l->head_dim;
    if (l->stride_dim == (int64_t)bytes && l->stride_position == (int64_t)row) {
        XXH3_128bits_update(state, p, n * row);
        return;
    }
    uint8_t tile[1024]; /* gathered first: the hash wants long inputs */
    uint32_t step = (uint32_t)(sizeof tile / bytes);
    for (uint32_t i = 0; i < n; i++, p += l->stride_position)
        for (uint32_t j = 0; j < l->head_dim; j += step) {
            uint32_t m = l->head_dim - j < step ? l->head_dim - j : step;
            kv_convert(tile, l->dtype, (int64_t)bytes, p + j * l->stride_dim, l->dtype,
                       l->stride_dim, m);
            XXH3_128bits_update(state, tile, m * bytes);
        }
}

static void leaf_begin(struct kv_digest *d, uint32_t first, uint32_t end)
{
    const uint32_t head[4] = {d->layer, d->which, first, end - first};
    uint8_t bytes[sizeof head];
    put_u32(bytes, head, 4);
    XXH3_128bits_reset(d->state);
    XXH3_128bits_update(d->state, bytes, sizeof bytes);
}

static void leaf_end(struct kv_digest *d, uint32_t first)
{
    uint32_t i = first / LEAF - d->first / LEAF;
    XXH128_canonicalFromHash(&d->leaves[i], XXH3_128bits_digest(d->state));
    d->done[i] = true;
    d->n_done++;
}

/* The leaf of positions [first, end) as it lies in the view. */
static void hash_leaf(struct kv_digest *d, const struct baton_kv_view *v, uint32_t first,
                      uint32_t end)
{
    const struct baton_kv_layout *l = v->layout;
    leaf_begin(d, first, end);
    for (uint32_t h = 0; h < d->kv_heads; h++)
        for (uint32_t p = first, run; p < end; p += run) {
            const uint8_t *row = kv_view_run(v, (enum kv_which)d->which, p, end - p, &run);
            hash_rows(d->state, row + h * l->stride_head, l, run);
        }
    leaf_end(d, first);
}

/* n positions of one head: copied, and taken into the leaf under way. */
static void copy_rows(struct kv_digest *d, enum kv_digest_side side, uint8_t *dst,
                      const struct baton_kv_layout *dl, const uint8_t *src,
                      const struct baton_kv_layout *sl, uint32_t n)
{
    if (side == KV_DIGEST_SOURCE) {
        hash_rows(d->state, src, sl, n);
        kv_copy_rows(dst, dl, src, sl, n);
    } else if (dl->dtype == sl->dtype) {
        kv_copy_rows(dst, dl, src, sl, n);
        hash_rows(d->state, dst, dl, n);
    } else {
        struct baton_kv_layout tile;
        kv_dense_view(&tile, sl->dtype, 1, sl->head_dim, d->tile, d->tile, 0, n);
        kv_copy_rows(d->tile, &tile, src, sl, n);
        hash_rows(d->state, d->tile, &tile, n);
        kv_copy_rows(dst, dl, d->tile, &tile, n);
    }
}

static void copy_leaf(struct kv_digest *d, enum kv_digest_side side,
                      const struct baton_kv_view *dst, const struct baton_kv_view *src,
                      uint32_t first, uint32_t end)
{
    enum kv_which which = (enum kv_which)d->which;
    uint32_t row = (uint32_t)kv_dtype_bytes(d->dtype) * d->head_dim;
    uint32_t most = row < TILE_BYTES ? TILE_BYTES / row : 1;
    leaf_begin(d, first, end);
    for (uint32_t h = 0; h < d->kv_heads; h++)
        for (uint32_t p = first, run; p < end; p += run) {
            run = end - p < most ? end - p : most;
            const uint8_t *from = kv_view_run(src, which, p, run, &run);
            uint8_t *to = kv_view_run(dst, which, p, run, &run);
            copy_rows(d, side, to + h * dst->layout->stride_head, dst->layout,
                      from + h * src->layout->stride_head, src->layout, run);
        }
    leaf_end(d, first);
}

/* The end of the leaf that holds p, or of the range. */
static uint32_t leaf_border(uint32_t p, uint32_t end)
{
    uint64_t border = ((uint64_t)p / LEAF + 1) * LEAF;
    return border < end ? (uint32_t)border : end;
}

static int update_check(const struct kv_digest *d, const struct baton_kv_view *v, uint32_t first,
                        uint32_t n, struct baton_error *e)
{
    const struct baton_kv_layout *l = v->layout;
    uint64_t end = (uint64_t)first + n;
    int rc = kv_layout_check(l, e);
    if (rc)
        return rc;
    if (l->dtype != d->dtype || l->kv_heads != d->kv_heads || l->head_dim != d->head_dim)
        return base_fail(e, BATON_ERR_MISMATCH,
                         "KV digest of dtype %u, %u heads of %u: the view has dtype %u, %u heads "
                         "of %u",
                         d->dtype, d->kv_heads, d->head_dim, l->dtype, l->kv_heads, l->head_dim);
    if (first < d->first || end > d->end || (first != d->first && first % LEAF != 0) ||
        (end != d->end && end % LEAF != 0))
        return base_fail(e, BATON_ERR_USAGE,
                         "KV digest: positions [%u, %llu) cut a leaf of [%u, %u)", first,
                         (unsigned long long)end, d->first, d->end);
    for (uint32_t i = first / LEAF; i < (end + LEAF - 1) / LEAF; i++)
        if (d->done[i - d->first / LEAF])
            return base_fail(e, BATON_ERR_USAGE, "KV digest: the leaf at position %u came twice",
                             i * LEAF);
    return kv_view_check(v, (enum kv_which)d->which, first, n, false, e);
}

int kv_digest_update(struct kv_digest *d, const struct baton_kv_view *v, uint32_t first, uint32_t n,
                     struct baton_error *e)
{
    if (n == 0)
        return 0;
    int rc = update_check(d, v, first, n, e);
    if (rc)
        return rc;
    for (uint32_t p = first, end = first + n, next; p < end; p = next) {
        next = leaf_border(p, end);
        hash_leaf(d, v, p, next);
    }
    return 0;
}

int kv_digest_copy(struct kv_digest *d, enum kv_digest_side side, const struct baton_kv_view *dst,
                   const struct baton_kv_view *src, uint32_t first, uint32_t n,
                   struct baton_error *e)
{
    if (n == 0)
        return 0;
    int rc = kv_copy_check(dst, src, (enum kv_which)d->which, first, n, e);
    if (rc == 0)
        rc = update_check(d, src, first, n, e);
    if (rc)
        return rc;
    if (dst->layout->dtype != src->layout->dtype && !d->tile &&
        !(d->tile = base_try_alloc(LEAF, kv_dtype_bytes(d->dtype) * d->head_dim, e)))
        return BATON_ERR_NOMEM;
    for (uint32_t p = first, end = first + n, next; p < end; p = next) {
        next = leaf_border(p, end);
        copy_leaf(d, side, dst, src, p, next);
    }
    return 0;
}

int kv_digest_final(const struct kv_digest *d, uint8_t out[32], struct baton_error *e)
{
    for (uint32_t i = 0; i < d->n_leaves && d->n_done < d->n_leaves; i++)
        if (!d->done[i])
            return base_fail(e, BATON_ERR_INTEGRITY,
                             "KV digest: layer %u %s lacks the leaf at "
                             "position %u",
                             d->layer, d->which == KV_K ? "K" : "V",
                             i ? (d->first / LEAF + i) * LEAF : d->first);
    const uint32_t head[9] = {1,           d->layer, d->which,          d->dtype,   d->kv_heads,
                              d->head_dim, d->first, d->end - d->first, d->n_leaves};
    uint8_t bytes[sizeof head];
    put_u32(bytes, head, 9);
    struct base_sha256 sha;
    base_sha256_init(&sha);
    base_sha256_update(&sha, bytes, sizeof bytes);
    base_sha256_update(&sha, d->leaves, d->n_leaves * sizeof *d->leaves);
    base_sha256_final(&sha, out);
    return 0;
}
