/* SPDX-License-Identifier: Apache-2.0 */
/* Layout records: checking one that came from outside, and finding a row in a view. */
#include "kv/kv_priv.h"

#define MAX_STRIDE ((int64_t)1 << 48)
#define MAX_HEADS 65535u
#define MAX_HEAD_DIM 65535u
#define MAX_BLOCK 1024u
#define MAX_ROWS (1u << 30)

size_t kv_piece_bytes(uint32_t dtype, uint32_t kv_heads, uint32_t head_dim, uint32_t n)
{
    size_t bytes = kv_dtype_bytes(dtype);
    if (!base_mul(bytes, kv_heads, &bytes) || !base_mul(bytes, head_dim, &bytes) ||
        !base_mul(bytes, n, &bytes))
        return SIZE_MAX; /* no allocation of that many bytes succeeds */
    return bytes;
}

static int check_fields(const struct baton_kv_layout *l, struct baton_error *e)
{
    const int bad = BATON_ERR_INPUT;
    bool paged = l->kind == BATON_KV_PAGED;
    if (l->version != 1)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "KV layout: version %u", l->version);
    if (l->dtype != BATON_I8 && kv_dtype_bytes(l->dtype) == 0)
        return base_fail(e, bad, "KV layout: dtype %u", l->dtype);
    if (l->kind < BATON_KV_PAGED || l->kind > BATON_KV_SLID)
        return base_fail(e, bad, "KV layout: kind %u", l->kind);
    if (l->joint > 1 || l->zero_fill > 1)
        return base_fail(e, bad, "KV layout: joint %u, zero_fill %u", l->joint, l->zero_fill);
    if (l->alignment == 0 || (l->alignment & (l->alignment - 1)) != 0)
        return base_fail(e, bad, "KV layout: alignment %u", l->alignment);
    if (l->kv_heads == 0 || l->kv_heads > MAX_HEADS)
        return base_fail(e, bad, "KV layout: %u heads", l->kv_heads);
    if (l->head_dim == 0 || l->head_dim > l->head_dim_padded || l->head_dim_padded > MAX_HEAD_DIM)
        return base_fail(e, bad, "KV layout: head_dim %u padded to %u", l->head_dim,
                         l->head_dim_padded);
    if (l->block > (paged ? MAX_BLOCK : 0))
        return base_fail(e, bad, "KV layout: block %u", l->block);
    if (paged ? l->rows != 0 : l->rows == 0 || l->rows > MAX_ROWS)
        return base_fail(e, bad, "KV layout: %u rows", l->rows);
    if (l->dtype == BATON_I8 ? l->scale_block == 0 || l->scale_block > KV_INT8_MAX_BLOCK
                             : l->scale_block != 0)
        return base_fail(e, bad, "KV layout: scales of %u elements, dtype %u", l->scale_block,
                         l->dtype);
    if (l->dtype == BATON_I8 && l->stride_dim != 1)
        return base_fail(e, bad, "KV layout: stride_dim %lld of int8 entries",
                         (long long)l->stride_dim);
    if (!l->joint && l->stride_kv != 0)
        return base_fail(e, bad, "KV layout: stride_kv without a joint region");
    return 0;
}

/* One axis of the address formula. count 0 = as many as there is room for. */
struct axis {
    const char *name;
    int64_t stride;
    uint32_t count;
};

static uint32_t axes_of(const struct baton_kv_layout *l, struct axis axes[5])
{
    uint32_t n = 0, rows = l->kind == BATON_KV_PAGED ? l->block : l->rows;
    if (l->dtype != BATON_I8) /* an int8 row is one thing: its scales follow its bytes */
        axes[n++] = (struct axis){"dim", l->stride_dim, l->head_dim_padded};
    axes[n++] = (struct axis){"position", l->stride_position, rows};
    axes[n++] = (struct axis){"head", l->stride_head, l->kv_heads};
    if (l->joint)
        axes[n++] = (struct axis){"kv", l->stride_kv, 2};
    if (l->kind == BATON_KV_PAGED && l->block != 0)
        axes[n++] = (struct axis){"block", l->stride_block, 0};
    return n;
}

/* Innermost first. Of two equal strides the axis without a fixed count is inside: room for one. */
static bool outside(const struct axis *a, const struct axis *b)
{
    return a->stride != b->stride ? a->stride > b->stride : a->count != 0 && b->count == 0;
}

static void axes_sort(struct axis *axes, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++)
        for (uint32_t j = i; j > 0 && outside(&axes[j - 1], &axes[j]); j--) {
            struct axis a = axes[j];
            axes[j] = axes[j - 1];
            axes[j - 1] = a;
        }
}

/* From the innermost axis outward every stride must step over all that lies inside: then no two
 * elements share a byte, in whatever order the axes are nested. An axis without a fixed count ends
 * where the next one outward steps. */
static int check_strides(const struct baton_kv_layout *l, struct baton_error *e)
{
    struct axis axes[5];
    uint32_t n = axes_of(l, axes);
    bool int8 = l->dtype == BATON_I8;
    int64_t unit = int8 ? 4 : (int64_t)kv_dtype_bytes(l->dtype);
    int64_t extent = int8 ? kv_int8_row_bytes(l->head_dim_padded, l->scale_block) : unit;
    for (uint32_t i = 0; i < n; i++)
        if (axes[i].stride < 0 || axes[i].stride > MAX_STRIDE || axes[i].stride % unit != 0)
            return base_fail(e, BATON_ERR_INPUT, "KV layout: stride_%s %lld", axes[i].name,
                             (long long)axes[i].stride);
    if (l->block != 0 && l->stride_block % l->alignment != 0)
        return base_fail(e, BATON_ERR_INPUT, "KV layout: stride_block %lld, alignment %u",
                         (long long)l->stride_block, l->alignment);
    axes_sort(axes, n);
    for (uint32_t i = 0; i < n; i++) {
        const struct axis *a = &axes[i];
        if (a->count == 1)
            continue;
        if (a->stride < extent)
            return base_fail(e, BATON_ERR_INPUT, "KV layout: stride_%s %lld overlaps %lld bytes",
                             a->name, (long long)a->stride, (long long)extent);
        if (a->count > 1 && (__builtin_mul_overflow(a->stride, (int64_t)a->count - 1, &extent) ||
                             __builtin_add_overflow(extent, a->stride, &extent)))
            return base_fail(e, BATON_ERR_INPUT, "KV layout: stride_%s %lld times %u", a->name,
                             (long long)a->stride, a->count);
    }
    return 0;
}

int kv_layout_check(const struct baton_kv_layout *l, struct baton_error *e)
{
    int rc = check_fields(l, e);
    return rc ? rc : check_strides(l, e);
}

static const int32_t first_block[1] = {0};

struct baton_kv_view kv_dense_view(struct baton_kv_layout *layout, uint32_t dtype,
                                   uint32_t kv_heads, uint32_t head_dim, void *k, void *v,
                                   uint32_t first, uint32_t n)
{
    int64_t element = (int64_t)kv_dtype_bytes(dtype);
    int64_t row = (int64_t)head_dim * element;
    *layout = (struct baton_kv_layout){
        .version = 1,
        .dtype = (uint8_t)dtype,
        .kind = BATON_KV_PAGED,
        .alignment = 1,
        .kv_heads = kv_heads,
        .head_dim = head_dim,
        .head_dim_padded = head_dim,
        .stride_head = row * (n ? n : 1),
        .stride_position = row,
        .stride_dim = element,
    };
    return (struct baton_kv_view){
        .layout = layout,
        .k = k ? kv_at(k, -row * first) : NULL,
        .v = v ? kv_at(v, -row * first) : NULL,
        .blocks = first_block,
        .n_blocks = 1,
        .first = first,
        .end = first + n,
    };
}

/* How many blocks (without blocks: positions) fit below the axis that steps over them. */
static int64_t open_axis_room(const struct baton_kv_layout *l)
{
    struct axis axes[5];
    uint32_t n = axes_of(l, axes), i = 0;
    axes_sort(axes, n);
    while (axes[i].count != 0)
        i++;
    int64_t stride = axes[i++].stride;
    while (i < n && axes[i].count == 1)
        i++;
    return i < n && stride > 0 ? axes[i].stride / stride : INT64_MAX;
}

static int check_paged(const struct baton_kv_view *v, uint32_t first, uint32_t n,
                       struct baton_error *e)
{
    uint32_t block = v->layout->block;
    uint32_t from = block ? first / block : 0, to = block ? (first + n - 1) / block : 0;
    int64_t room = open_axis_room(v->layout);
    if (block == 0 && v->end - v->first > room)
        return base_fail(e, BATON_ERR_USAGE,
                         "KV view of %u positions, its strides have room for "
                         "%lld",
                         v->end - v->first, (long long)room);
    for (uint32_t i = from; i <= to; i++)
        if (i >= v->n_blocks || v->blocks[i] < 0)
            return base_fail(e, BATON_ERR_USAGE, "KV view has no block for position %u",
                             i * block > first ? i * block : first);
        else if (block != 0 && v->blocks[i] >= room)
            return base_fail(e, BATON_ERR_USAGE,
                             "KV view: block %d, its strides have room for %lld", v->blocks[i],
                             (long long)room);
    return 0;
}

int kv_view_check(const struct baton_kv_view *v, enum kv_which which, uint32_t first, uint32_t n,
                  bool write, struct baton_error *e)
{
    const struct baton_kv_layout *l = v->layout;
    uint64_t end = (uint64_t)first + n;
    uint32_t lo = v->first;
    uint64_t hi = v->end;
    if (!kv_view_base(v, which))
        return base_fail(e, BATON_ERR_USAGE, "KV view without %s", which == KV_K ? "K" : "V");
    if (l->kind != BATON_KV_PAGED) {
        /* A ring may be written past its end; the rows that are older then fall out. */
        uint64_t newest = write && l->kind == BATON_KV_RING && end > hi ? end : hi;
        lo = newest > l->rows ? (uint32_t)(newest - l->rows) : 0;
        if (!write && lo < v->first)
            lo = v->first;
        hi = newest;
    } else if (write && l->block != 0) {
        lo = 0; /* the block table says what there is room for */
        hi = UINT32_MAX;
    }
    if (first < lo || end > hi)
        return base_fail(e, BATON_ERR_USAGE,
                         "KV positions [%u, %llu) of a view that holds "
                         "[%u, %llu)",
                         first, (unsigned long long)end, lo, (unsigned long long)hi);
    return l->kind == BATON_KV_PAGED && n > 0 ? check_paged(v, first, n, e) : 0;
}

uint8_t *kv_view_run(const struct baton_kv_view *v, enum kv_which which, uint32_t position,
                     uint32_t n, uint32_t *run)
{
    const struct baton_kv_layout *l = v->layout;
    int64_t offset = 0;
    uint32_t row = position, left = n;
    if (l->kind == BATON_KV_RING) {
        row = position % l->rows;
        left = l->rows - row;
    } else if (l->kind == BATON_KV_SLID) {
        row = position - (v->end > l->rows ? v->end - l->rows : 0);
    } else if (l->block != 0) {
        row = position % l->block;
        left = l->block - row;
        offset = v->blocks[position / l->block] * l->stride_block;
    }
    *run = left < n ? left : n;
    return kv_at(kv_view_base(v, which), offset + row * l->stride_position);
}
