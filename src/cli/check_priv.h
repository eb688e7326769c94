/* SPDX-License-Identifier: Apache-2.0 */
/* check: what its files share. check.c parses and runs, check_prompts.c finds the prompts,
 * check_evidence.c keeps evidence, check_report.c prints. */
#ifndef CLI_CHECK_PRIV_H
#define CLI_CHECK_PRIV_H

#include "cli/cli.h"
#include "verify/verify.h"

#define CLI_CHECK_CASES 256u

struct cli_check_args {
    struct cli_common common;
    const char *model, *prompts, *cpus, *evidence, *against;
    int argc;
    char **argv;
    struct verify_options options; /* all but the model */
    int mode;
    uint32_t tokens[CLI_CHECK_CASES]; /* [n_tokens] lengths of default prompts */
    uint32_t n_tokens;
};

/* One case: its prompt, or why there is none, and how it went. */
struct cli_check_case {
    struct verify_prompt prompt;
    struct verify_case result;
    char evidence[128];     /* the raw document's path in the folder; "" = none is kept */
    struct json_t *against; /* null where an earlier folder's outputs are the same, else why not;
                               NULL where none was compared */
};
struct cli_check {
    const struct cli_check_args *args;
    struct cli_check_case *cases; /* [n_cases] */
    uint32_t n_cases;
    struct audit_evidence *evidence; /* NULL: none is kept */
};

/* The cases with their prompts; a default prompt that can't be made is a case with an error, a file
 * that can't be read is one for all. */
int cli_check_prompts(struct cli_check *c, const struct baton_model *m, struct baton_error *e);

/* fail where a case fails, else error where one has an error, else pass. */
enum verify_verdict cli_check_verdict(const struct cli_check *c);
bool cli_check_differs(const struct cli_check *c); /* from the folder of --against, somewhere */
struct json_t *cli_check_json(const struct cli_check *c);
struct json_t *cli_check_case_json(const struct cli_check_args *a, const struct cli_check_case *c);
void cli_check_table(const struct cli_check *c);

/* ---- evidence (check_evidence.c) ---------------------------------------------------------- */

/* Begin the folder of --evidence and look at that of --against, where they were asked for. */
int cli_check_begin(struct cli_check *c, const struct baton_model *m, struct baton_error *e);
/* verify_check, with what --evidence and --against want of it. An error is that they could not be
 * satisfied. */
int cli_check_one(struct cli_check *c, const struct verify_options *o, struct cli_check_case *x,
                  struct baton_error *e);
int cli_check_end(struct cli_check *c, struct baton_error *e);

#endif
