/* SPDX-License-Identifier: Apache-2.0 */
/* The matrix: models x routes x consumers, a cell each. A cell runs its prompts at once over the
 * consumer's lanes, several times, reads every cache back and compares: repeats with each other and
 * slots with the producer's (within the route, which decides the verdict), tokens with the
 * consumer's device alone and with cpu:ref (both reported, neither merged into it).
 *
 * Requests go through the engine in one process, not over HTTP. Threads: one at a time.
 */
#ifndef AUDIT_MATRIX_H
#define AUDIT_MATRIX_H

#include "audit/audit.h"
#include "audit/route.h"

enum { AUDIT_MATRIX_MODELS = 32, AUDIT_MATRIX_CONSUMERS = 16, AUDIT_MATRIX_PROMPTS = 16 };

/* What a configuration says; names are what cells are called by. */
struct audit_matrix_model {
    char name[64], path[1024];
};
struct audit_matrix_consumer {
    char name[64], device[128], producer[128]; /* producer: of whole and stream */
    uint32_t lanes;
};
struct audit_matrix {
    char sha256[65]; /* of the file */
    uint32_t n_models, n_consumers, n_prompts, repeats, n;
    bool reference;
    bool routes[3];                         /* by enum baton_mode */
    uint32_t lengths[AUDIT_MATRIX_PROMPTS]; /* of the prompts in tokens, each another one */
    struct audit_matrix_model models[AUDIT_MATRIX_MODELS];
    struct audit_matrix_consumer consumers[AUDIT_MATRIX_CONSUMERS];
};
/* Read a configuration. Paths in it are relative to its folder. docs/matrix.md has the fields. */
int audit_matrix_read(const char *path, struct audit_matrix *out, struct baton_error *e);

struct audit_matrix_options {
    uint32_t threads;
    bool plant_flip;                 /* one bit of every imported cache */
    struct audit_evidence *evidence; /* NULL: none is kept */
    const struct json_t *earlier;    /* lines of a folder that is resumed, or NULL */
    void (*progress)(void *ctx, uint64_t done, uint64_t all); /* cells; may be NULL */
    void *ctx;
};
/* Run all cells, or of a resumed folder those that have not passed. *cells: one object each, as
 * `baton matrix --json` has them: the evidence's "result" with a "name". What goes wrong in a cell
 * is its result; an error is that there is no memory, or that evidence can't be written. Finishes
 * the evidence. */
int audit_matrix_run(const struct audit_matrix *m, const struct audit_matrix_options *o,
                     struct json_t **cells, struct baton_error *e);
/* pass, fail, error or not_run of them all. */
const char *audit_matrix_verdict(const struct json_t *cells);

#endif
