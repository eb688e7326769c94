/* SPDX-License-Identifier: Apache-2.0 */
/* What check, probe and others need to keep evidence. */
#ifndef CLI_EVIDENCE_PRIV_H
#define CLI_EVIDENCE_PRIV_H

#include "audit/audit.h"
#include "cli/cli.h"

/* A command about to run. Paths stand in argv under their names in capitals (model is MODEL);
 * any may be NULL but dir. */
struct cli_evidence {
    const char *command;
    int argc;
    char **argv;
    const char *dir, *model, *against, *input, *reference;
    const struct baton_model *opened;
    const struct audit_device *devices; /* role NULL ends them */
    const char *const *limits;          /* NULL ends them */
    uint32_t repeats;
    struct json_t *more;
    const char *resume;      /* a folder to go on in, or NULL */
    struct json_t **earlier; /* its lines, the caller's to drop */
};
int cli_evidence_open(const struct cli_evidence *c, struct audit_evidence **out,
                      struct baton_error *e);

#endif
