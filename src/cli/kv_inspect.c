/* SPDX-License-Identifier: Apache-2.0 */
/* kv inspect: what a KV file holds. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/base.h"
#include "cli/kv_priv.h"

const char *const cli_kv_metadata[] = {"format",   "arch",      "architecture",
                                       "weights",  "tokenizer", "numerics",
                                       "n_tokens", "ids_hash",  NULL};

uint32_t cli_kv_first(const struct kv_file *f, uint32_t layer)
{
    struct baton_kv_layout layout;
    return kv_file_view(f, layer, &layout).first;
}

int cli_kv_floats(const struct kv_file *f, uint32_t layer, enum kv_which which, uint32_t first,
                  uint32_t n, float *out, struct baton_error *e)
{
    const struct kv_file_info *i = kv_file_info(f);
    struct baton_kv_layout from, to;
    struct baton_kv_view src = kv_file_view(f, layer, &from);
    struct baton_kv_view dst = kv_dense_view(&to, BATON_F32, i->kv_heads, i->head_dim, out, out,
                                             first, n);
    return kv_copy(&dst, &src, which, first, n, e);
}

struct json_t *cli_kv_real(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

/* Root of the mean square; not finite where an element is not. */
static int slot_rms(const struct kv_file *f, uint32_t layer, enum kv_which which, float *buffer,
                    double *rms, struct baton_error *e)
{
    const struct kv_file_info *i = kv_file_info(f);
    uint32_t first = cli_kv_first(f, layer), n = i->n_tokens - first;
    size_t count = (size_t)i->kv_heads * n * i->head_dim;
    double sum = 0;
    int rc = cli_kv_floats(f, layer, which, first, n, buffer, e);
    for (size_t j = 0; rc == 0 && j < count; j++)
        sum += (double)buffer[j] * (double)buffer[j];
    *rms = sqrt(sum / (double)count);
    return rc;
}

static json_t *document(const struct cli_kv_args *a, const struct kv_file *f, const double *rms)
{
    const struct kv_file_info *i = kv_file_info(f);
    json_t *meta = json_object(), *ids = json_array(), *layers = json_array();
    for (const char *const *k = cli_kv_metadata; *k; k++)
        if (kv_file_metadata(f, *k))
            json_object_set_new(meta, *k, json_string(kv_file_metadata(f, *k)));
    for (uint32_t p = 0; p < i->tokens.n_ids; p++)
        json_array_append_new(ids, json_integer(i->tokens.ids[p]));
    for (uint32_t l = 0; l < i->n_layers; l++)
        json_array_append_new(
            layers, json_pack("{s:i,s:[i,i],s:o,s:o}", "layer", (int)l, "positions",
                              (int)cli_kv_first(f, l), (int)i->n_tokens - 1, "k_rms",
                              cli_kv_real(rms[2 * l]), "v_rms", cli_kv_real(rms[2 * l + 1])));
    return json_pack("{s:i,s:s,s:s,s:i,s:i,s:i,s:i,s:i,s:b,s:o,s:o,s:o}", "schema", 1, "file",
                     a->files[0], "dtype", kv_dtype_name(i->dtype), "n_tokens", (int)i->n_tokens,
                     "slots", (int)(2 * i->n_layers), "layer_count", (int)i->n_layers, "kv_heads",
                     (int)i->kv_heads, "head_dim", (int)i->head_dim, "logits",
                     i->tokens.logits != NULL, "metadata", meta, "ids", ids, "layers", layers);
}

static void table(const struct cli_kv_args *a, const struct kv_file *f, const double *rms)
{
    const struct kv_file_info *i = kv_file_info(f);
    printf("%s: %u positions, %u slots of %u heads of %u, %s%s%s\n", a->files[0], i->n_tokens,
           2 * i->n_layers, i->kv_heads, i->head_dim, kv_dtype_name(i->dtype),
           i->tokens.ids ? ", ids" : "", i->tokens.logits ? ", logits" : "");
    for (const char *const *k = cli_kv_metadata; *k; k++)
        if (kv_file_metadata(f, *k))
            printf("  %-13s %.64s\n", *k, kv_file_metadata(f, *k));
    printf("  layer   positions        K rms      V rms\n");
    for (uint32_t l = 0; l < i->n_layers; l++)
        printf("  %5u   [%u, %u]%*s %-10.4g %-10.4g\n", l, cli_kv_first(f, l), i->n_tokens - 1,
               cli_kv_first(f, l) < 1000 && i->n_tokens < 1000 ? 6 : 3, "", rms[2 * l],
               rms[2 * l + 1]);
}

int cli_kv_inspect(const struct cli_kv_args *a, struct baton_error *e)
{
    struct kv_file *f = NULL;
    double *rms = NULL;
    float *buffer = NULL;
    int rc = kv_file_open(a->files[0], &f, e);
    if (rc)
        return rc;
    const struct kv_file_info *i = kv_file_info(f);
    size_t row = (size_t)i->kv_heads * i->head_dim;
    rms = base_try_alloc(2 * (size_t)i->n_layers, sizeof *rms, e);
    buffer = base_try_alloc(row * i->n_tokens, sizeof *buffer, e);
    if (!rms || !buffer)
        rc = BATON_ERR_NOMEM;
    for (uint32_t s = 0; rc == 0 && s < 2 * i->n_layers; s++)
        rc = slot_rms(f, s / 2, s % 2 ? KV_V : KV_K, buffer, &rms[s], e);
    if (rc == 0 && a->common.json)
        rc = cli_print_json(document(a, f, rms), 0);
    else if (rc == 0)
        table(a, f, rms);
    free(buffer);
    free(rms);
    kv_file_close(f);
    return rc;
}
