/* SPDX-License-Identifier: Apache-2.0 */
/* audit: what its files share. audit.c recomputes, audit_sensitive.c searches. */
#ifndef CLI_AUDIT_PRIV_H
#define CLI_AUDIT_PRIV_H

#include "cli/cli.h"

struct cli_audit_args {
    struct cli_common common;
    const char *dir;  /* evidence; NULL: the tree or a change */
    const char *seal; /* 64 hex digits, or NULL */
    bool sensitive, tree;
    const char *changed, *known; /* a commit; a file of known findings */
};
/* Search what the arguments name. *out: audit_search_report's document, with "verdict". */
int cli_audit_sensitive(const struct cli_audit_args *a, struct json_t **out, struct baton_error *e);
void cli_audit_print_sensitive(const struct json_t *doc);

#endif
