/* SPDX-License-Identifier: Apache-2.0 */
/* KV files read: base checks that it is a safetensors file, this that it is a cache. */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kv/kv_priv.h"

#define MAX_SIDE (1u << 20) /* heads, head size: far above any model, far below overflow */
#define MAX_TOKENS (1u << 30)

struct kv_file {
    struct base_tensors *tensors;
    char *what; /* its name in errors */
    struct kv_file_info info;
    uint32_t *first;       /* [n_layers] */
    const uint8_t **slots; /* [2 * n_layers] K, V of layer 0, K, V of layer 1, ... */
    int32_t *ids;          /* copies: a file's tensors need not be aligned */
    float *logits;
};

static int bad(const struct kv_file *f, const char *name, const char *why, struct baton_error *e)
{
    return base_fail(e, BATON_ERR_INPUT, "%s: tensor %s: %s", f->what, name, why);
}

/* ---- slots -------------------------------------------------------------------------------- */

static int find_tensor(const struct kv_file *f, const char *kind, uint32_t layer, char name[32],
                       const struct base_tensor **out, struct baton_error *e)
{
    snprintf(name, 32, "%s.%u", kind, layer);
    *out = base_tensors_find(f->tensors, name);
    return *out ? 0 : base_fail(e, BATON_ERR_INPUT, "%s: no tensor %s", f->what, name);
}

/* I32, one dimension, rising by one to the last token's: what a layer retains are the newest ones.
 * None at all is what a window of 1 leaves. */
static int read_positions(struct kv_file *f, uint32_t layer, uint32_t *n, struct baton_error *e)
{
    char name[32];
    const struct base_tensor *t;
    uint32_t end = f->info.n_tokens;
    int rc = find_tensor(f, "positions", layer, name, &t, e);
    if (rc)
        return rc;
    if (strcmp(t->dtype, "I32") || t->n_dims != 1 || t->shape[0] > end)
        return base_fail(e, BATON_ERR_INPUT, "%s: tensor %s: is not a list of at most %u I32",
                         f->what, name, end);
    *n = (uint32_t)t->shape[0];
    f->first[layer] = end - *n;
    for (uint32_t i = 0; i < *n; i++) {
        int32_t p;
        memcpy(&p, (const uint8_t *)t->data + i * sizeof p, sizeof p);
        if (p < 0 || (uint32_t)p != end - *n + i)
            return base_fail(e, BATON_ERR_INPUT,
                             "%s: tensor %s: position %d at index %u; %u of %u tokens are [%u, %u)",
                             f->what, name, p, i, *n, end, end - *n, end);
    }
    return 0;
}

static uint32_t dtype_number(const char *name)
{
    return !strcmp(name, "F32")    ? (uint32_t)BATON_F32
           : !strcmp(name, "F16")  ? (uint32_t)BATON_F16
           : !strcmp(name, "BF16") ? (uint32_t)BATON_BF16
                                   : 0;
}

/* The first slot says what all of them are like. */
static int take_form(struct kv_file *f, const char *name, const struct base_tensor *t,
                     struct baton_error *e)
{
    f->info.dtype = dtype_number(t->dtype);
    if (!f->info.dtype)
        return bad(f, name, "is not F32, F16 or BF16", e);
    if (t->n_dims != 3 || t->shape[0] == 0 || t->shape[2] == 0 || t->shape[0] > MAX_SIDE ||
        t->shape[2] > MAX_SIDE)
        return bad(f, name, "is not [kv heads, positions, head size]", e);
    f->info.kv_heads = (uint32_t)t->shape[0];
    f->info.head_dim = (uint32_t)t->shape[2];
    return 0;
}

static int read_slot(struct kv_file *f, uint32_t slot, uint32_t n, struct baton_error *e)
{
    char name[32];
    const struct base_tensor *t;
    const struct kv_file_info *i = &f->info;
    int rc = find_tensor(f, slot % 2 ? "v" : "k", slot / 2, name, &t, e);
    if (rc == 0 && slot == 0)
        rc = take_form(f, name, t, e);
    if (rc)
        return rc;
    if (dtype_number(t->dtype) != i->dtype)
        return base_fail(e, BATON_ERR_INPUT, "%s: tensor %s is %s, k.0 is %s", f->what, name,
                         t->dtype, kv_dtype_name(i->dtype));
    if (t->n_dims != 3 || t->shape[0] != i->kv_heads || t->shape[1] != n ||
        t->shape[2] != i->head_dim)
        return base_fail(e, BATON_ERR_INPUT,
                         "%s: tensor %s is not [%u, %u, %u] (kv heads, positions, head size)",
                         f->what, name, i->kv_heads, n, i->head_dim);
    f->slots[slot] = t->data;
    return 0;
}

static int read_layers(struct kv_file *f, struct baton_error *e)
{
    char name[32];
    uint32_t layers = 0, n = 0;
    do
        snprintf(name, sizeof name, "k.%u", layers);
    while (base_tensors_find(f->tensors, name) && ++layers <= KV_MAX_LAYERS);
    if (layers == 0 || layers > KV_MAX_LAYERS)
        return base_fail(e, BATON_ERR_INPUT, "%s: %s; this is no KV file", f->what,
                         layers ? "more layers than any model has" : "no tensor k.0");
    f->info.n_layers = layers;
    f->first = base_try_alloc(layers, sizeof *f->first, e);
    f->slots = base_try_alloc(2 * (size_t)layers, sizeof *f->slots, e);
    int rc = f->first && f->slots ? 0 : BATON_ERR_NOMEM;
    for (uint32_t l = 0; rc == 0 && l < layers; l++) {
        rc = read_positions(f, l, &n, e);
        if (rc == 0)
            rc = read_slot(f, 2 * l, n, e);
        if (rc == 0)
            rc = read_slot(f, 2 * l + 1, n, e);
    }
    return rc;
}

/* ---- tokens ------------------------------------------------------------------------------- */

static int read_ids(struct kv_file *f, struct baton_error *e)
{
    const struct base_tensor *t = base_tensors_find(f->tensors, "ids");
    const char *want = kv_file_metadata(f, "ids_hash");
    char have[65];
    if (!t)
        return 0;
    if (strcmp(t->dtype, "I32") || t->n_dims != 1 || t->shape[0] != f->info.n_tokens)
        return base_fail(e, BATON_ERR_INPUT, "%s: tensor ids is not the I32 ids of %u positions",
                         f->what, f->info.n_tokens);
    f->ids = base_try_alloc(f->info.n_tokens, sizeof *f->ids, e);
    if (!f->ids)
        return BATON_ERR_NOMEM;
    memcpy(f->ids, t->data, t->bytes);
    kv_ids_hash(f->ids, f->info.n_tokens, have);
    if (want && strcmp(want, have))
        return base_fail(e, BATON_ERR_INPUT, "%s: its ids do not have the hash in its metadata",
                         f->what);
    f->info.tokens.ids = f->ids;
    f->info.tokens.n_ids = f->info.n_tokens;
    return 0;
}

static int read_logits(struct kv_file *f, struct baton_error *e)
{
    const struct base_tensor *t = base_tensors_find(f->tensors, "logits");
    if (!t)
        return 0;
    if (strcmp(t->dtype, "F32") || t->n_dims != 1 || t->shape[0] == 0 || t->shape[0] > INT32_MAX)
        return bad(f, "logits", "is not one row of F32", e);
    f->logits = base_try_alloc(t->shape[0], sizeof *f->logits, e);
    if (!f->logits)
        return BATON_ERR_NOMEM;
    memcpy(f->logits, t->data, t->bytes);
    f->info.tokens.logits = f->logits;
    f->info.tokens.vocab = (uint32_t)t->shape[0];
    if (kv_first_not_finite((const uint8_t *)f->logits, BATON_F32, t->shape[0]) < t->shape[0])
        return bad(f, "logits", "holds a number that is not finite", e);
    return 0;
}

/* ---- the whole ---------------------------------------------------------------------------- */

static int check_metadata(const struct kv_file *f, struct baton_error *e)
{
    const char *format = kv_file_metadata(f, "format");
    char shown[64];
    if (!format)
        return base_fail(e, BATON_ERR_INPUT, "%s: no format in its metadata; this is no KV file",
                         f->what);
    if (strcmp(format, KV_FILE_FORMAT))
        return base_fail(e, BATON_ERR_UNSUPPORTED, "%s: format '%s'; supported is %s", f->what,
                         base_shown(shown, format), KV_FILE_FORMAT);
    return 0;
}

static int read_n_tokens(struct kv_file *f, struct baton_error *e)
{
    const char *text = kv_file_metadata(f, "n_tokens");
    char *end = NULL, shown[64];
    unsigned long n = text && text[0] >= '1' && text[0] <= '9' ? strtoul(text, &end, 10) : 0;
    if (n == 0 || n > MAX_TOKENS || *end)
        return base_fail(e, BATON_ERR_INPUT, "%s: metadata n_tokens '%s' is no count of tokens",
                         f->what, base_shown(shown, text ? text : ""));
    f->info.n_tokens = (uint32_t)n;
    return 0;
}

/* A tensor that no reader looks at could be a layer with a wrong name. */
static int check_names(const struct kv_file *f, struct baton_error *e)
{
    size_t known = 3 * (size_t)f->info.n_layers + (f->ids != NULL) + (f->logits != NULL);
    size_t n = base_tensors_count(f->tensors);
    char kind[16], canonical[48];
    for (size_t i = 0; n != known && i < n; i++) {
        const char *name = base_tensors_at(f->tensors, i)->name;
        unsigned layer = UINT_MAX;
        if (!strcmp(name, "ids") || !strcmp(name, "logits"))
            continue;
        if (sscanf(name, "%15[a-z].%u", kind, &layer) == 2 && layer < f->info.n_layers &&
            (!strcmp(kind, "k") || !strcmp(kind, "v") || !strcmp(kind, "positions"))) {
            snprintf(canonical, sizeof canonical, "%s.%u", kind, layer);
            if (!strcmp(name, canonical))
                continue;
        }
        return bad(f, base_shown((char[64]){0}, name), "is no part of a KV file", e);
    }
    return 0;
}

static int read_all(struct kv_file *f, struct baton_error *e)
{
    int rc = check_metadata(f, e);
    if (rc == 0)
        rc = read_n_tokens(f, e);
    if (rc == 0)
        rc = read_layers(f, e);
    if (rc == 0)
        rc = read_ids(f, e);
    if (rc == 0)
        rc = read_logits(f, e);
    return rc ? rc : check_names(f, e);
}

/* Takes the tensors over, also where it fails. */
static int wrap(struct base_tensors *tensors, const char *what, struct kv_file **out,
                struct baton_error *e)
{
    struct kv_file *f = base_try_alloc(1, sizeof *f, e);
    if (!f) {
        base_tensors_close(tensors);
        return BATON_ERR_NOMEM;
    }
    f->tensors = tensors;
    f->what = base_try_strdup(what, e);
    int rc = f->what ? read_all(f, e) : BATON_ERR_NOMEM;
    if (rc)
        kv_file_close(f);
    else
        *out = f;
    return rc;
}

int kv_file_open(const char *path, struct kv_file **out, struct baton_error *e)
{
    const char *slash = strrchr(path, '/');
    struct base_tensors *t;
    int rc = base_tensors_open(path, &t, e);
    return rc ? rc : wrap(t, slash ? slash + 1 : path, out, e);
}

int kv_file_parse(const void *data, size_t n, const char *what, struct kv_file **out,
                  struct baton_error *e)
{
    struct base_tensors *t;
    int rc = base_tensors_parse(data, n, what, &t, e);
    return rc ? rc : wrap(t, what, out, e);
}

void kv_file_close(struct kv_file *f)
{
    if (!f)
        return;
    base_tensors_close(f->tensors);
    free(f->what);
    free(f->first);
    free(f->slots);
    free(f->ids);
    free(f->logits);
    free(f);
}

const struct kv_file_info *kv_file_info(const struct kv_file *f)
{
    return &f->info;
}

const char *kv_file_metadata(const struct kv_file *f, const char *key)
{
    return base_tensors_metadata(f->tensors, key);
}

struct baton_kv_view kv_file_view(const struct kv_file *f, uint32_t layer,
                                  struct baton_kv_layout *layout)
{
    const struct kv_file_info *i = &f->info;
    /* Views serve readers and writers alike; nobody writes through this one. */
    return kv_dense_view(
        layout, i->dtype, i->kv_heads, i->head_dim, (void *)(uintptr_t)f->slots[2 * layer],
        (void *)(uintptr_t)f->slots[2 * layer + 1], f->first[layer], i->n_tokens - f->first[layer]);
}

/* ---- into a sequence ---------------------------------------------------------------------- */

int kv_file_fits(const struct kv_file *f, const struct kv_geometry *g, struct baton_error *e)
{
    const struct kv_file_info *i = &f->info;
    if (i->n_layers != g->n_layers || i->kv_heads != g->kv_heads || i->head_dim != g->head_dim)
        return base_fail(
            e, BATON_ERR_MISMATCH, "%s: %u layers of %u heads of %u; the model has %u of %u of %u",
            f->what, i->n_layers, i->kv_heads, i->head_dim, g->n_layers, g->kv_heads, g->head_dim);
    for (uint32_t l = 0; l < g->n_layers; l++) {
        uint32_t want = kv_retained_first(g, l, i->n_tokens);
        if (f->first[l] != want)
            return base_fail(e, BATON_ERR_MISMATCH,
                             "%s: layer %u holds the positions [%u, %u); a %s layer retains "
                             "[%u, %u) of them",
                             f->what, l, f->first[l], i->n_tokens, g->local[l] ? "local" : "global",
                             want, i->n_tokens);
    }
    return 0;
}

/* Positions [from, to) of a slot, which must be finite: what is not would silently become every
 * later token's answer. */
static int load_slot(const struct kv_file *f, const struct baton_kv_view *dst, uint32_t layer,
                     enum kv_which which, uint32_t from, uint32_t to, struct baton_error *e)
{
    struct baton_kv_layout layout;
    struct baton_kv_view src = kv_file_view(f, layer, &layout);
    uint32_t first = f->first[layer], n = f->info.n_tokens - first;
    size_t count = (size_t)f->info.kv_heads * n * f->info.head_dim;
    size_t at = kv_first_not_finite(f->slots[2 * layer + which], f->info.dtype, count);
    if (at < count)
        return base_fail(e, BATON_ERR_INPUT, "%s: tensor %c.%u: not finite at position %u", f->what,
                         which == KV_K ? 'k' : 'v', layer,
                         first + (uint32_t)(at / f->info.head_dim % n));
    return from < to ? kv_copy(dst, &src, which, from, to - from, e) : 0;
}

int kv_load_below(struct kv_seq *s, const struct kv_file *f, uint32_t end, struct baton_error *e)
{
    const struct kv_geometry *g = kv_seq_geometry(s);
    const struct baton_kv_view *views = kv_seq_views(s);
    int rc = kv_file_fits(f, g, e);
    if (rc == 0 && (end > f->info.n_tokens || kv_seq_length(s) < f->info.n_tokens))
        rc = base_fail(e, BATON_ERR_USAGE, "%s: %u of %u positions for a sequence of %u", f->what,
                       end, f->info.n_tokens, kv_seq_length(s));
    for (uint32_t l = 0; rc == 0 && l < f->info.n_layers; l++) {
        uint32_t from = kv_retained_first(g, l, kv_seq_length(s));
        rc = load_slot(f, &views[l], l, KV_K, from, end, e);
        if (rc == 0)
            rc = load_slot(f, &views[l], l, KV_V, from, end, e);
    }
    return rc;
}

int kv_load(struct kv_seq *s, const struct kv_file *f, struct baton_error *e)
{
    int rc = kv_file_fits(f, kv_seq_geometry(s), e);
    if (rc == 0)
        rc = kv_seq_reserve_import(s, f->info.n_tokens, e);
    return rc ? rc : kv_load_below(s, f, f->info.n_tokens, e);
}
