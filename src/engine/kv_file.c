/* SPDX-License-Identifier: Apache-2.0 */
/* KV files at requests: what a saved cache says about itself, and what is believed of a loaded one.
 *
 * A file continues a request when it was made by the same model from the first tokens of the very
 * prompt. What it holds is not computed again, not even its last position: a local layer keeps the
 * W - 1 positions that the *next* token sees, one too few to repeat the last one. So the logits of
 * the last position travel with the file; without them the prompt must go on after it.
 */
#include <string.h>

#include "engine/engine_priv.h"

/* Parts of the identity as metadata. Only what a content hash says is written: a lineage means
 * nothing to another process. */
struct part {
    const char *key;
    const uint8_t *hash;
    bool required;
};
#define N_PARTS 4

static void identity_parts(const struct handoff_identity *id, struct part p[N_PARTS])
{
    p[0] = (struct part){"architecture", id->arch, true};
    p[1] = (struct part){"weights", id->weights, true};
    p[2] = (struct part){"tokenizer", id->tokenizer, false};
    p[3] = (struct part){"numerics", id->numerics, false};
}

int engine_kv_save(struct baton_engine *en, struct engine_session *s, const float *row,
                   struct baton_error *e)
{
    const struct engine_ask *a = &s->request->ask;
    const struct kv_tokens tokens = {a->ids, a->n_ids, row, row ? en->vocab : 0};
    struct part parts[N_PARTS];
    char hex[N_PARTS][65];
    const char *metadata[2 * N_PARTS + 3] = {"arch", model_config_of(en->model->model)->arch};
    size_t n = 2;
    identity_parts(&en->model->identity, parts);
    for (size_t i = 0; i < N_PARTS && en->model->content; i++) {
        base_hex(parts[i].hash, 32, hex[i]);
        metadata[n++] = parts[i].key;
        metadata[n++] = hex[i];
    }
    return kv_save(s->seq, a->kv_save, metadata, &tokens, e);
}

/* ---- loading ------------------------------------------------------------------------------ */

static int check_identity(const struct baton_model *m, const struct kv_file *f, const char *path,
                          struct baton_error *e)
{
    struct part parts[N_PARTS];
    char hex[65];
    if (!m->content)
        return base_fail(e, BATON_ERR_USAGE,
                         "a KV file needs a model that was opened with content_identity");
    identity_parts(&m->identity, parts);
    for (size_t i = 0; i < N_PARTS; i++) {
        const char *have = kv_file_metadata(f, parts[i].key);
        if (!have && parts[i].required)
            return base_fail(e, BATON_ERR_INPUT, "%s: no %s in its metadata: of which model is it?",
                             path, parts[i].key);
        base_hex(parts[i].hash, 32, hex);
        if (have && strcmp(have, hex))
            return base_fail(e, BATON_ERR_MISMATCH,
                             "%s: made by another model: its %s is not %.16s...", path,
                             parts[i].key, hex);
    }
    return 0;
}

static int check_hash(const int32_t *ids, const struct kv_file *f, const char *path,
                      struct baton_error *e)
{
    const char *want = kv_file_metadata(f, "ids_hash");
    uint32_t n = kv_file_info(f)->n_tokens;
    char have[65];
    if (!want)
        return base_fail(e, BATON_ERR_INPUT, "%s: neither ids nor ids_hash: of which prompt is it?",
                         path);
    kv_ids_hash(ids, n, have);
    return strcmp(want, have) ? base_fail(e, BATON_ERR_MISMATCH,
                                          "%s: the prompt's first %u tokens are others than the "
                                          "file's (ids_hash)",
                                          path, n)
                              : 0;
}

static int check_ids(const int32_t *ids, size_t n_ids, const struct kv_file *f, const char *path,
                     struct baton_error *e)
{
    const struct kv_file_info *i = kv_file_info(f);
    if (i->n_tokens > n_ids)
        return base_fail(e, BATON_ERR_MISMATCH, "%s holds %u positions, the prompt has %zu", path,
                         i->n_tokens, n_ids);
    for (uint32_t p = 0; p < i->tokens.n_ids; p++)
        if (i->tokens.ids[p] != ids[p])
            return base_fail(e, BATON_ERR_MISMATCH,
                             "%s: token %u is %d in the file, %d in the prompt", path, p,
                             i->tokens.ids[p], ids[p]);
    if (i->n_tokens == n_ids && !i->tokens.logits)
        return base_fail(e, BATON_ERR_INPUT,
                         "%s holds the whole prompt and no logits to choose the next token from: "
                         "give a prompt that goes on after it",
                         path);
    return i->tokens.ids ? 0 : check_hash(ids, f, path, e);
}

static int check(const struct baton_model *m, const struct kv_file *f, const char *path,
                 struct baton_error *e)
{
    const struct model_config *c = model_config_of(m->model);
    const struct kv_tokens *t = &kv_file_info(f)->tokens;
    struct kv_geometry g;
    engine_geometry(c, BATON_BF16, &g); /* any dtype: a file is converted */
    int rc = kv_file_fits(f, &g, e);
    if (rc == 0)
        rc = check_identity(m, f, path, e);
    if (rc == 0 && t->logits && t->vocab != c->vocab)
        rc = base_fail(e, BATON_ERR_MISMATCH, "%s: a row of %u logits; the model has %u", path,
                       t->vocab, c->vocab);
    return rc;
}

int engine_kv_open(const struct baton_model *m, const char *path, const int32_t *ids, size_t n_ids,
                   struct kv_file **out, struct baton_error *e)
{
    struct kv_file *f;
    int rc = kv_file_open(path, &f, e);
    if (rc)
        return rc;
    rc = check(m, f, path, e);
    if (rc == 0 && ids)
        rc = check_ids(ids, n_ids, f, path, e);
    if (rc)
        kv_file_close(f);
    else
        *out = f;
    return rc;
}

int engine_kv_load(struct engine_session *s, struct baton_error *e)
{
    const struct kv_file *f = s->request->ask.kv_load;
    int rc = kv_load(s->seq, f, e);
    if (rc == 0)
        s->done = s->stats.loaded_tokens = s->stats.prefilled_tokens = kv_file_info(f)->n_tokens;
    return rc;
}
