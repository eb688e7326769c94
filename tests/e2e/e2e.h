/* SPDX-License-Identifier: Apache-2.0 */
/* Run the binary as a user does, and look at what it says. The binary is $BATON_BINARY. */
#ifndef TESTS_E2E_E2E_H
#define TESTS_E2E_E2E_H

#include <jansson.h>
#include <sys/types.h>

#include "model/model.h"
#include "tests/test.h"

struct e2e {
    int status; /* exit code, or 128 + signal */
    char *out, *err;
    json_t *json; /* of stdout where it parses; else NULL */
};

/* Run with these arguments (NULL-terminated, without the program's name) and an empty stdin. */
void e2e_run(struct e2e *r, const char *const *args);
void e2e_free(struct e2e *r);
/* e2e_run that must end with `status`; the output is shown where it does not. */
void e2e_expect(struct e2e *r, int status, const char *const *args);

/* Start without waiting; stdout and stderr go to files that e2e_finish reads. */
struct e2e_child {
    pid_t pid;
    char out[64], err[64];
};
void e2e_start(struct e2e_child *c, const char *const *args);
/* Wait for its end, fill r. One that has not ended after 20 minutes hangs, which is a failure. */
void e2e_finish(struct e2e_child *c, struct e2e *r);

/* "1,2,3" of ids; free(). */
char *e2e_ids(const int32_t *ids, size_t n);
/* The same of n random ids that every shipped model has as ordinary tokens. */
char *e2e_random_ids(uint64_t *seed, size_t n);
/* The folder of a shipped model: 4 static buffers in turn. */
const char *e2e_model(const char *name);
/* A fresh path in the test's temporary folder: 16 static buffers in turn. */
const char *e2e_temp(const char *name);
void e2e_temp_remove(void); /* the whole folder */

/* The member at a path such as "handoff.positions.local"; fails where it is missing. */
json_t *e2e_get(json_t *doc, const char *path);

/* A tensor of a file; fails where it is missing. */
const struct model_tensor *e2e_tensor(const struct model_tensors *t, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

extern const char *const e2e_models[4]; /* names of the shipped models */

#endif
