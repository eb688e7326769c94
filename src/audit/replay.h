/* SPDX-License-Identifier: Apache-2.0 */
/* Replay: a recorded request once more on the same devices, and the first recorded output that is
 * another one now.
 *
 * A record holds hashes of what each layer's kv_append stored, of what was imported, of every row
 * of logits, and the tokens: those verbs can be named, and for the others between which two of them
 * the difference came about. Threads: one at a time.
 */
#ifndef AUDIT_REPLAY_H
#define AUDIT_REPLAY_H

#include "audit/audit.h"
#include "audit/route.h"

enum { AUDIT_RECORD_PROMPTS = 16 };

struct audit_record {
    const char *kind;   /* "check": its first handoff; "matrix": a cell's first repeat; "run" */
    struct json_t *doc; /* behind all of it */
    char prefill[128], decode[128], model[1024]; /* model: "" where the record names none */
    char pin[65]; /* of the model that it was made with; "" where it is not known */
    enum baton_mode mode;
    uint32_t lanes, n, n_prompts;
    int32_t *ids[AUDIT_RECORD_PROMPTS]; /* of each prompt */
    size_t n_ids[AUDIT_RECORD_PROMPTS];
    const struct json_t *outputs[AUDIT_RECORD_PROMPTS];
};
/* Read raw/NNNN.json of an evidence folder of check or matrix, whose line must have its hash, or
 * what `baton run --json` printed. */
int audit_record_open(const char *path, struct audit_record *out, struct baton_error *e);
void audit_record_close(struct audit_record *r); /* a zeroed one is fine */

/* Run it twice: once to compare with the record, once to compare with the first (the control).
 * *out: {"first", "control": null or where they differ, "compared": {"slots", "rows", "ids"}}.
 * BATON_ERR_MISMATCH where the model or a device computes as another one than the record's. */
int audit_replay(const struct audit_record *r, struct baton_model *m, uint32_t threads,
                 struct json_t **out, struct baton_error *e);

#endif
