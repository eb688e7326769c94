/* SPDX-License-Identifier: Apache-2.0 */
/* Evidence of a command: what all of them say of themselves. */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "cli/evidence_priv.h"

int cli_evidence_open(const struct cli_evidence *c, struct audit_evidence **out,
                      struct baton_error *e)
{
    const struct audit_word words[] = {
        {c->model, "MODEL"}, {c->dir, "EVIDENCE"},        {c->against, "AGAINST"},
        {c->input, "INPUT"}, {c->reference, "REFERENCE"}, {NULL, NULL},
    };
    const struct audit_about about = {
        .command = c->command,
        .argc = c->argc,
        .argv = c->argv,
        .words = words,
        .model = c->opened ? engine_model(c->opened) : NULL,
        .devices = c->devices,
        .version = BATON_VERSION,
        .commit = cli_source_commit,
        .repeats = c->repeats,
        .limits = c->limits,
        .more = c->more,
    };
    return c->resume ? audit_evidence_resume(c->resume, &about, out, c->earlier, e)
                     : audit_evidence_open(c->dir, &about, out, e);
}
