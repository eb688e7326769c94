/* SPDX-License-Identifier: Apache-2.0 */
/* quality: what its files share. quality.c parses and asks, quality_report.c prints and
 * rescores. */
#ifndef CLI_QUALITY_PRIV_H
#define CLI_QUALITY_PRIV_H

#include "audit/quality.h"
#include "cli/cli.h"

struct cli_quality_args {
    struct cli_common common;
    const char *model, *set, *evidence, *rescore;
    int mode;
    int argc;
    char **argv;
    struct audit_quality_options options;
};

/* Print; returns the exit code. */
int cli_quality_report(const struct cli_quality_args *a, const struct audit_set *s,
                       const struct json_t *results);
/* Judge the answers of --rescore again and print; the exit code, or a negative error. */
int cli_quality_rescore(const struct cli_quality_args *a, const struct audit_set *s,
                        struct baton_error *e);

#endif
