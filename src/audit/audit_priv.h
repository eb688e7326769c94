/* SPDX-License-Identifier: Apache-2.0 */
/* Inside audit: the chain's lines, what is recomputed from raw documents, comparison. */
#ifndef AUDIT_AUDIT_PRIV_H
#define AUDIT_AUDIT_PRIV_H

#include <jansson.h>

#include "audit/audit.h"

#define AUDIT_SCHEMA 1
#define AUDIT_ZERO "0000000000000000000000000000000000000000000000000000000000000000"
/* What is read of a folder: more than any run writes, less than what harms. */
#define AUDIT_FILE_LIMIT ((size_t)256 << 20)
#define AUDIT_LINES_LIMIT 65536u
#define AUDIT_FILES_LIMIT 65536u

/* A value with as many digits as bring the same double back; NULL where memory ran out. free(). */
char *audit_text(const json_t *v, size_t flags);
/* SHA-256 in hex. */
void audit_hash(const void *data, size_t n, char hex[65]);
/* JSON has neither infinity nor NaN: null. */
json_t *audit_real(double x);

/* "slots" of a run, "holds" or "sent", "stats": as raw documents have them. */
json_t *audit_slots_json(const struct verify_run *r, const struct verify_run *against);
json_t *audit_holder_json(const struct verify_cache *c);
json_t *audit_stats_json(const struct baton_stats *s);

/* ---- about.c ------------------------------------------------------------------------------ */

/* The begin line without its chain; NULL with *e filled. */
json_t *audit_begin(const struct audit_about *about, struct baton_error *e);
void audit_time(char out[32]); /* now, UTC, as 2026-01-02T03:04:05Z */

/* ---- lines.c ------------------------------------------------------------------------------ */

/* cases.jsonl of a folder as an array of objects, in order; *last: the hash of its last line. Every
 * line's "prev" must be the hash of the one before and the first one's kind "begin", else
 * BATON_ERR_INTEGRITY; a line that does not parse or is not closed is BATON_ERR_INPUT. */
int audit_lines_read(const char *path, json_t **out, char last[65], struct baton_error *e);
int audit_lines_parse(const char *text, size_t n, json_t **out, char last[65],
                      struct baton_error *e);
const char *audit_line_kind(const json_t *line); /* "" where it has none */

/* ---- recompute.c -------------------------------------------------------------------------- */

/* What the raw document of an attempt comes to: {"result": {...}, "line": {...}}, members that the
 * result and the chain's line must have. NULL with *e filled where raw is malformed. */
json_t *audit_recompute(const char *command, const json_t *raw, struct baton_error *e);
json_t *audit_recompute_check(const json_t *raw, struct baton_error *e);
json_t *audit_recompute_matrix(const json_t *raw, struct baton_error *e);
json_t *audit_recompute_quality(const json_t *raw, struct baton_error *e);
/* null, or {"n", "min", "median", "max"} of n values in any order, which are sorted. */
json_t *audit_spread(double *values, size_t n);

/* ---- summary.c ---------------------------------------------------------------------------- */

/* summary.json from all lines of the chain and the hash of the last one. */
json_t *audit_summary(const json_t *lines, const char *last);

/* ---- compare.c ---------------------------------------------------------------------------- */

/* Add to `differences` every member of `want` that `have` has not, or has otherwise. Numbers are
 * equal as numbers. `exact`: neither may `have` have others. Returns how many leaves were compared.
 */
uint32_t audit_compare(const json_t *want, const json_t *have, bool exact, const char *file,
                       const char *where, json_t *differences);
void audit_difference(json_t *differences, const char *file, const char *where, const char *fmt,
                      ...) __attribute__((format(printf, 4, 5)));

#endif
