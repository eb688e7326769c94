/* SPDX-License-Identifier: Apache-2.0 */
/* matrix: what its files share. matrix.c parses and runs; matrix_report.c writes JUnit's XML and
 * Markdown, matrix_html.c the page, matrix_with.c the page's tables of other evidence.
 *
 * Cells and lines may come from a stranger's folder: every text of theirs goes through cli_put, and
 * a member of another type than it should have is shown as empty.
 */
#ifndef CLI_MATRIX_PRIV_H
#define CLI_MATRIX_PRIV_H

#include <jansson.h>
#include <stdio.h>

#include "audit/audit.h"
#include "cli/cli.h"

/* An evidence folder that is shown: its lines, and what an audit of it came to. */
struct cli_folder {
    const char *path;
    char name[128];        /* its last part */
    json_t *lines, *cases; /* all; those of attempts, in the order of their numbers */
    struct audit_report audit;
};
int cli_folder_open(struct cli_folder *f, const char *path, struct baton_error *e);
void cli_folder_close(struct cli_folder *f); /* a zeroed one is fine */

enum { CLI_WITH_MOST = 16 };
/* What a report is of. */
struct cli_matrix_report {
    const json_t *cells;      /* as `baton matrix --json` has them */
    const char *verdict;      /* of the cells; fail where a folder does not hold */
    struct cli_folder folder; /* lines NULL: no evidence was kept */
    /* Shown below the cells: folders of check, probe and quality, documents of bench. */
    struct cli_folder with[CLI_WITH_MOST];
    json_t *bench[CLI_WITH_MOST]; /* with[i] is then no folder */
    uint32_t n_with;
};
int cli_matrix_with(struct cli_matrix_report *r, const char *path, struct baton_error *e);
void cli_matrix_report_close(struct cli_matrix_report *r); /* cells are the caller's */
/* Does one of the folders not hold? */
bool cli_matrix_differs(const struct cli_matrix_report *r);

/* All cells for a job that is gated on them: fail is a failure, not_run skipped. A folder that does
 * not hold is a failure called "evidence". */
int cli_matrix_junit(const char *path, const struct cli_matrix_report *r, struct baton_error *e);
/* The same as a table for a pull request. */
int cli_matrix_markdown(const char *path, const struct cli_matrix_report *r, struct baton_error *e);
/* All there is to see, as one page that loads nothing. */
int cli_matrix_html(const char *path, const struct cli_matrix_report *r, struct baton_error *e);
/* The page's sections of with[]. */
void cli_matrix_put_with(FILE *f, const struct cli_matrix_report *r);

/* ---- what they write with ----------------------------------------------------------------- */

/* A member's text; "" where it is none. */
const char *cli_text(const json_t *o, const char *key);
/* Text for XML, HTML and a cell of a Markdown table alike: what has a meaning in one of them
 * becomes a number, control characters become spaces. */
void cli_put(FILE *f, const char *s);
/* The same, with what marks an emulated device after it. */
void cli_put_device(FILE *f, const char *name);
/* <td>text</td>; with a class of its own where it is a verdict. */
void cli_put_cell(FILE *f, const char *s);
/* <td>number</td>, or a dash where it is none. */
void cli_put_number(FILE *f, const json_t *v);
/* A section with a title, a note (may be NULL) and a table, whose heads NULL ends. */
void cli_put_table(FILE *f, const char *title, const char *note, const char *const *heads);
void cli_put_table_end(FILE *f);
/* End what open_memstream began and write it whole. */
int cli_finish(FILE *f, const char *path, char **s, const size_t *n, struct baton_error *e);
/* Cells of that verdict; of "error": all that are none of the others. */
int cli_count(const json_t *cells, const char *verdict);

#endif
