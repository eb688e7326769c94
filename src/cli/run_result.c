/* SPDX-License-Identifier: Apache-2.0 */
/* run: what came out, as it comes. */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "cli/run_priv.h"

int cli_run_result_keep(struct run_result *r, const struct baton_token *t, uint32_t vocab,
                        struct baton_error *e)
{
    if (r->n_ids == r->cap_ids) {
        size_t cap = r->cap_ids ? r->cap_ids * 2 : 64, row = (size_t)vocab * sizeof(float);
        int32_t *ids = base_try_realloc(r->ids, cap, sizeof *ids, e);
        if (ids)
            r->ids = ids;
        int32_t *argmax = ids ? base_try_realloc(r->argmax, cap, sizeof *argmax, e) : NULL;
        if (argmax)
            r->argmax = argmax;
        float *logits = argmax && t->logits ? base_try_realloc(r->logits, cap, row, e) : NULL;
        if (logits)
            r->logits = logits;
        if (!argmax || (t->logits && !logits))
            return BATON_ERR_NOMEM;
        r->cap_ids = cap;
    }
    r->ids[r->n_ids] = t->id;
    r->argmax[r->n_ids] = t->argmax;
    if (t->logits)
        memcpy(r->logits + r->n_ids * vocab, t->logits, (size_t)vocab * sizeof(float));
    r->n_ids++;
    return 0;
}

void cli_run_result_free(struct run_result *r)
{
    free(r->prompt);
    free(r->ids);
    free(r->argmax);
    free(r->logits);
    free(r->text);
}
