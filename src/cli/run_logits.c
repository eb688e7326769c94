/* SPDX-License-Identifier: Apache-2.0 */
/* --logits: every step's row as a safetensors file. */
#include "base/base.h"
#include "cli/run_priv.h"

static int write_all(struct base_tensors_out *o, const struct run_result *r, uint32_t vocab,
                     struct baton_error *e)
{
    const uint64_t rows = r->n_ids, shape[] = {rows, vocab};
    int rc = base_tensors_declare(o, "logits", "F32", 2, shape, e);
    if (!rc)
        rc = base_tensors_declare(o, "ids", "I32", 1, &rows, e);
    if (!rc)
        rc = base_tensors_declare(o, "argmax", "I32", 1, &rows, e);
    /* The rows are in memory, so their bytes do not overflow. */
    if (!rc)
        rc = base_tensors_write(o, r->logits, rows * vocab * sizeof *r->logits, e);
    if (!rc)
        rc = base_tensors_write(o, r->ids, rows * sizeof *r->ids, e);
    if (!rc)
        rc = base_tensors_write(o, r->argmax, rows * sizeof *r->argmax, e);
    return rc ? rc : base_tensors_commit(o, e);
}

int cli_run_logits_save(const char *path, const struct run_result *r, uint32_t vocab,
                        struct baton_error *e)
{
    struct base_tensors_out *o = NULL;
    int rc = base_tensors_create(&o, path, NULL, e);
    if (!rc)
        rc = write_all(o, r, vocab, e);
    base_tensors_discard(o);
    return rc;
}
