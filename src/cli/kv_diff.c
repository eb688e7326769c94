/* SPDX-License-Identifier: Apache-2.0 */
/* kv diff: two KV files, slot by slot, over the positions that both hold. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "cli/kv_priv.h"

struct slot {
    uint32_t first[2]; /* position, of A and of B */
    bool exact;        /* same dtype, same bits */
    double rel_rms;    /* of B - A to A, over the common positions; NaN: a number is not finite */
};

struct diff {
    const struct cli_kv_args *args;
    struct kv_file *f[2];
    struct slot *slots; /* [2 * n_layers] */
    float *buffer[2];
    uint32_t exact, within; /* slots: bit by bit, within the limit */
    double worst[2];        /* of K, of V */
    bool positions_ok;
    const char *ids; /* equal, differ, unknown */
    double logits;   /* relative RMS; negative: not both have them */
};

static double rel_rms(const float *a, const float *b, size_t n)
{
    double sum = 0, ref = 0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)b[i] - (double)a[i];
        sum += d * d;
        ref += (double)a[i] * (double)a[i];
    }
    return sum == 0 ? 0 : sqrt(sum / ref);
}

static int compare_slot(struct diff *d, uint32_t s, struct baton_error *e)
{
    const struct kv_file_info *a = kv_file_info(d->f[0]), *b = kv_file_info(d->f[1]);
    struct slot *x = &d->slots[s];
    uint32_t layer = s / 2, end = a->n_tokens < b->n_tokens ? a->n_tokens : b->n_tokens;
    enum kv_which which = s % 2 ? KV_V : KV_K;
    for (int i = 0; i < 2; i++)
        x->first[i] = cli_kv_first(d->f[i], layer);
    uint32_t first = x->first[0] > x->first[1] ? x->first[0] : x->first[1];
    bool same = x->first[0] == x->first[1] && a->n_tokens == b->n_tokens;
    d->positions_ok = d->positions_ok && same;
    if (first >= end) { /* nothing in common */
        x->exact = same && a->dtype == b->dtype;
        x->rel_rms = x->exact ? 0 : NAN;
        return 0;
    }
    size_t count = (size_t)a->kv_heads * (end - first) * a->head_dim;
    for (int i = 0; i < 2; i++) {
        int rc = cli_kv_floats(d->f[i], layer, which, first, end - first, d->buffer[i], e);
        if (rc)
            return rc;
    }
    x->exact = same && a->dtype == b->dtype &&
               memcmp(d->buffer[0], d->buffer[1], count * sizeof(float)) == 0;
    x->rel_rms = rel_rms(d->buffer[0], d->buffer[1], count);
    return 0;
}

static void compare_tokens(struct diff *d)
{
    const struct kv_tokens *a = &kv_file_info(d->f[0])->tokens;
    const struct kv_tokens *b = &kv_file_info(d->f[1])->tokens;
    d->ids = !a->ids || !b->ids ? "unknown"
             : a->n_ids == b->n_ids && !memcmp(a->ids, b->ids, a->n_ids * sizeof *a->ids)
                 ? "equal"
                 : "differ";
    d->logits = a->logits && b->logits && a->vocab == b->vocab
                    ? rel_rms(a->logits, b->logits, a->vocab)
                    : -1;
}

static int compare(struct diff *d, struct baton_error *e)
{
    uint32_t n = 2 * kv_file_info(d->f[0])->n_layers;
    int rc = 0;
    d->positions_ok = true;
    for (uint32_t s = 0; s < n && rc == 0; s++) {
        rc = compare_slot(d, s, e);
        const struct slot *x = &d->slots[s];
        d->exact += x->exact;
        d->within += x->exact || (d->args->limit > 0 && x->rel_rms <= (double)d->args->limit);
        if (!(x->rel_rms <= d->worst[s % 2]) && !isnan(d->worst[s % 2]))
            d->worst[s % 2] = x->rel_rms;
    }
    compare_tokens(d);
    return rc;
}

/* Everything that is compared is the same, within the limit where one was given. */
static bool equal(const struct diff *d)
{
    return d->positions_ok && d->within == 2 * kv_file_info(d->f[0])->n_layers &&
           strcmp(d->ids, "differ") != 0;
}

/* ---- output ------------------------------------------------------------------------------- */

static bool metadata_differs(const struct diff *d, const char *key)
{
    const char *a = kv_file_metadata(d->f[0], key), *b = kv_file_metadata(d->f[1], key);
    return (a || b) && !(a && b && !strcmp(a, b));
}

static json_t *document(const struct diff *d)
{
    const struct kv_file_info *a = kv_file_info(d->f[0]), *b = kv_file_info(d->f[1]);
    json_t *slots = json_array(), *meta = json_array();
    for (const char *const *k = cli_kv_metadata; *k; k++)
        if (metadata_differs(d, *k))
            json_array_append_new(meta, json_string(*k));
    for (uint32_t s = 0; s < 2 * a->n_layers; s++) {
        const struct slot *x = &d->slots[s];
        json_array_append_new(
            slots, json_pack("{s:i,s:s,s:b,s:o,s:{s:[i,i],s:[i,i]}}", "layer", (int)(s / 2),
                             "which", s % 2 ? "v" : "k", "exact", x->exact, "rel_rms",
                             cli_kv_real(x->rel_rms), "positions", "a", (int)x->first[0],
                             (int)a->n_tokens - 1, "b", (int)x->first[1], (int)b->n_tokens - 1));
    }
    return json_pack("{s:i,s:s,s:s,s:i,s:i,s:o,s:o,s:o,s:b,s:s,s:o,s:o,s:s}", "schema", 1, "a",
                     d->args->files[0], "b", d->args->files[1], "slots_total",
                     (int)(2 * a->n_layers), "slots_exact", (int)d->exact, "k_rel_rms",
                     cli_kv_real(d->worst[0]), "v_rel_rms", cli_kv_real(d->worst[1]),
                     "logits_rel_rms", d->logits < 0 ? json_null() : cli_kv_real(d->logits),
                     "positions_ok", d->positions_ok, "ids", d->ids, "metadata_differs", meta,
                     "slots", slots, "verdict", equal(d) ? "equal" : "differs");
}

/* One line for the whole, one for each slot that is not the same. */
static void table(const struct diff *d)
{
    const struct kv_file_info *a = kv_file_info(d->f[0]), *b = kv_file_info(d->f[1]);
    printf("%s: %u of %u slots exact, K within %.3g, V within %.3g (relative RMS), positions %s, "
           "ids %s\n",
           equal(d) ? "equal" : "differs", d->exact, 2 * a->n_layers, d->worst[0], d->worst[1],
           d->positions_ok ? "equal" : "differ", d->ids);
    if (d->logits >= 0)
        printf("logits: relative RMS %.3g\n", d->logits);
    for (const char *const *k = cli_kv_metadata; *k; k++)
        if (metadata_differs(d, *k))
            printf("metadata: %s differs\n", *k);
    for (uint32_t s = 0; s < 2 * a->n_layers; s++) {
        const struct slot *x = &d->slots[s];
        if (!x->exact)
            printf("  %c.%-4u [%u, %u] and [%u, %u]  relative RMS %.4g\n", s % 2 ? 'v' : 'k', s / 2,
                   x->first[0], a->n_tokens - 1, x->first[1], b->n_tokens - 1, x->rel_rms);
    }
}

/* ---- the command -------------------------------------------------------------------------- */

static int prepare(struct diff *d, struct baton_error *e)
{
    const struct kv_file_info *a = kv_file_info(d->f[0]), *b = kv_file_info(d->f[1]);
    if (a->n_layers != b->n_layers || a->kv_heads != b->kv_heads || a->head_dim != b->head_dim)
        return base_fail(e, BATON_ERR_MISMATCH,
                         "%u layers of %u heads of %u cannot be compared with %u of %u of %u",
                         a->n_layers, a->kv_heads, a->head_dim, b->n_layers, b->kv_heads,
                         b->head_dim);
    uint32_t n = a->n_tokens < b->n_tokens ? a->n_tokens : b->n_tokens;
    size_t row = (size_t)a->kv_heads * a->head_dim;
    d->slots = base_try_alloc(2 * (size_t)a->n_layers, sizeof *d->slots, e);
    for (int i = 0; i < 2; i++)
        d->buffer[i] = base_try_alloc(row * n, sizeof(float), e);
    return d->slots && d->buffer[0] && d->buffer[1] ? 0 : BATON_ERR_NOMEM;
}

int cli_kv_diff(const struct cli_kv_args *a, struct baton_error *e)
{
    struct diff d = {.args = a};
    int rc = kv_file_open(a->files[0], &d.f[0], e);
    if (rc == 0)
        rc = kv_file_open(a->files[1], &d.f[1], e);
    if (rc == 0)
        rc = prepare(&d, e);
    if (rc == 0)
        rc = compare(&d, e);
    if (rc == 0) {
        rc = equal(&d) ? 0 : 1;
        if (a->common.json)
            rc = cli_print_json(document(&d), rc);
        else
            table(&d);
    }
    for (int i = 0; i < 2; i++) {
        free(d.buffer[i]);
        kv_file_close(d.f[i]);
    }
    free(d.slots);
    return rc;
}
