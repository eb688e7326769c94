/* SPDX-License-Identifier: Apache-2.0 */
/* A KV file from anywhere: what opens can be read in every slot, and loads into a cache of its own
 * form or is refused with a reason. */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "kv/kv.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void expect(int good)
{
    if (!good)
        abort();
}

/* The geometry that the file itself claims: a layer that lacks old positions is a local one. */
static struct kv_geometry claimed(const struct kv_file *f)
{
    const struct kv_file_info *i = kv_file_info(f);
    struct kv_geometry g = {.n_layers = i->n_layers,
                            .kv_heads = i->kv_heads,
                            .head_dim = i->head_dim,
                            .dtype = BATON_BF16};
    for (uint32_t l = 0; l < i->n_layers; l++) {
        struct baton_kv_layout layout;
        struct baton_kv_view v = kv_file_view(f, l, &layout);
        expect(v.end == i->n_tokens && v.first <= v.end);
        if (v.first) {
            g.local[l] = 1;
            g.window = v.end - v.first + 1;
        }
    }
    return g;
}

/* Small ones only: the pool is as large as the positions say, and few bytes can say much where a
 * window leaves nothing. */
static void load(const struct kv_file *f)
{
    const struct kv_file_info *i = kv_file_info(f);
    struct kv_geometry g = claimed(f);
    struct baton_error e = {0};
    struct kv_pool *p = NULL;
    struct kv_seq *s = NULL;
    if ((uint64_t)i->n_tokens * i->n_layers * i->kv_heads * i->head_dim > 1u << 22)
        return;
    if (kv_pool_open(&p, &g, i->n_tokens + 1, 1, 1, &e) == 0 && kv_seq_open(p, &s, &e) == 0) {
        int rc = kv_load(s, f, &e);
        expect(rc == 0 ? kv_seq_length(s) == i->n_tokens : e.text[0] != '\0');
    }
    kv_seq_close(s);
    expect(!p || kv_pool_used(p) == 0);
    kv_pool_close(p);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct baton_error e = {0};
    struct kv_file *f = NULL;
    volatile uint64_t sum = 0;
    if (kv_file_parse(data, n, "fuzz", &f, &e)) {
        expect(!f && e.text[0]);
        return 0;
    }
    const struct kv_file_info *i = kv_file_info(f);
    for (uint32_t t = 0; t < i->tokens.n_ids; t++)
        sum += (uint64_t)i->tokens.ids[t];
    for (uint32_t t = 0; t < i->tokens.vocab; t++)
        sum += i->tokens.logits[t] > 0;
    (void)kv_file_metadata(f, "weights");
    load(f);
    kv_file_close(f);
    return 0;
}
