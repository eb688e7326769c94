/* SPDX-License-Identifier: Apache-2.0 */
/* Quality: a frozen set of prompts with exact answers through a route, asked one at a time and
 * several at once. docs/evidence.md says how an answer is judged.
 *
 * Threads: one at a time. JSON values are jansson's; what a function returns is the caller's.
 */
#ifndef AUDIT_QUALITY_H
#define AUDIT_QUALITY_H

#include "audit/audit.h"
#include "audit/route.h"

struct audit_set {
    char name[64]; /* of the file, without its ending */
    char sha256[65];
    struct json_t *prompts; /* [{"id", "prompt", "answer", "json", "category"}] */
};
/* Read FILE.jsonl, whose SHA-256 FILE.jsonl.sha256 beside it must hold (as sha256sum writes it):
 * BATON_ERR_MISMATCH where it does not, so that nobody edits a set and keeps its name.
 * BATON_ERR_INPUT where a line is no prompt, or two have one id. */
int audit_set_open(const char *path, struct audit_set *out, struct baton_error *e);
void audit_set_close(struct audit_set *s); /* a zeroed one is fine */

struct audit_quality_options {
    struct audit_route_options route; /* ctx is computed */
    uint32_t n;                       /* tokens an answer may have */
    uint32_t cohort;                  /* asked at once; with route.lanes 1: nothing is */
    const char *reference;            /* file of outputs to compare with, or NULL */
    struct audit_evidence *evidence;  /* NULL: none is kept */
    void (*progress)(void *ctx, uint64_t done, uint64_t all); /* prompts; may be NULL */
    void *ctx;
};
/* Ask all prompts. *results: one object a prompt, as docs/evidence.md has "result". Finishes the
 * evidence. */
int audit_quality_run(const struct audit_quality_options *o, const struct audit_set *s,
                      struct json_t **results, struct baton_error *e);

/* The results of a folder once more, from its stored answers and this set, which must be the one
 * that was asked (BATON_ERR_MISMATCH). *about: its first line. */
int audit_quality_rescore(const char *path, const struct audit_set *s, struct json_t **results,
                          struct json_t **about, struct baton_error *e);

/* The totals of results: {"prompts", "counted", "right", ..., "verdict"}. */
struct json_t *audit_quality_score(const struct json_t *results);

#endif
