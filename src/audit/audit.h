/* SPDX-License-Identifier: Apache-2.0 */
/* audit: what was found, kept so that somebody else can compute it again.
 *
 * An evidence folder has the raw outcome of every attempt (raw/), one line an attempt in a hash
 * chain (cases.jsonl), what they come to (summary.json, a function of the two), and a seal.
 * docs/evidence.md describes every field; tools/audit.py reads the same folders and shares no code
 * with this room.
 *
 *     audit_evidence_open(dir, &about, &evidence, &e);        // before the work
 *     audit_evidence_add(evidence, &attempt, &e);             // as each attempt ends
 *     audit_evidence_finish(evidence, &cleanup, &e);          // summary and seal
 *     audit_folder(path, seal, &report, &e);                  // anybody, at any time
 *
 * JSON values are jansson's. Threads: one at a time for an object.
 */
#ifndef AUDIT_AUDIT_H
#define AUDIT_AUDIT_H

#include <stddef.h>
#include <stdint.h>

#include "verify/verify.h"

struct json_t;

/* ---- evidence: writing -------------------------------------------------------------------- */

/* A path of this machine and the word that stands for it in a command line. */
struct audit_word {
    const char *path, *word; /* path NULL ends a list */
};
struct audit_device {
    const char *role, *name; /* role NULL ends a list */
};

/* What is run, on what. */
struct audit_about {
    const char *command; /* "check" */
    int argc;
    char **argv;                    /* of the command, its name included */
    const struct audit_word *words; /* applied to argv; other absolute paths become PATH */
    const struct model *model;      /* NULL: several, named by the attempts */
    const struct audit_device *devices;
    const char *version, *commit; /* commit: of the source; ends with "-dirty" where it was changed;
                                     "" where unknown */
    uint32_t repeats;
    const char *const *limits; /* sentences: what this does not show. NULL ends them */
    struct json_t *more;       /* further members of the begin line, or NULL; stays the caller's */
};

/* What was still held at the end. All zero, or something leaks. */
struct audit_cleanup {
    struct verify_left left; /* processes and descriptors are counted by this room */
};

/* An attempt that ended. Takes over `raw` and `result` whatever add returns. */
struct audit_attempt {
    const char *name;
    struct json_t *raw;    /* the document of raw/; NULL: nothing was run */
    struct json_t *result; /* with "verdict"; what `--json` says of it */
    int64_t supersedes;    /* an earlier attempt that this one is the retry of; -1 = none */
};

struct audit_evidence;
/* Make `dir` where it is missing and a folder of this run in it, and begin. Fails here where it
 * can't be written or hardly any room is left. */
int audit_evidence_open(const char *dir, const struct audit_about *about,
                        struct audit_evidence **out, struct baton_error *e);
/* Append to a folder that audit_evidence_open began and that need not be closed: its chain must
 * hold, and what it says of itself must be what `about` says (else BATON_ERR_MISMATCH). *lines: its
 * lines so far, an array that the caller drops. */
int audit_evidence_resume(const char *path, const struct audit_about *about,
                          struct audit_evidence **out, struct json_t **lines,
                          struct baton_error *e);
const char *audit_evidence_path(const struct audit_evidence *ev); /* of the folder */
/* The path in the folder that the next attempt's raw document will have. Until the next add. */
const char *audit_evidence_next(const struct audit_evidence *ev);
int audit_evidence_add(struct audit_evidence *ev, const struct audit_attempt *a,
                       struct baton_error *e);
/* Write the end, summary.json and seal.txt. Nothing may be added afterwards. */
int audit_evidence_finish(struct audit_evidence *ev, const struct audit_cleanup *c,
                          struct baton_error *e);
/* Free; a folder that was not finished stays as it is, unsealed. NULL is fine. */
void audit_evidence_drop(struct audit_evidence *ev);

/* ---- evidence of a check ------------------------------------------------------------------ */

/* Collects the runs of one check: its `note` is verify_options.record, itself record_ctx. */
struct audit_recorder {
    const struct baton_model *model;
    struct json_t *raw;
};
/* Begin the raw document of a check of this prompt. */
int audit_recorder_init(struct audit_recorder *r, const struct baton_model *m,
                        const struct verify_prompt *p, uint32_t n, struct baton_error *e);
void audit_recorder_note(void *recorder, const struct verify_record *record);
/* The document, the caller's now; NULL where memory ran out. */
struct json_t *audit_recorder_take(struct audit_recorder *r);

/* ---- auditing ----------------------------------------------------------------------------- */

struct audit_report {
    struct json_t *differences;     /* [{"file", "where", "why"}] */
    struct json_t *not_available;   /* names of external.txt */
    char command[32], verdict[16];  /* as claimed */
    uint32_t files, lines, figures; /* looked at */
};
/* Recompute what the folder claims. What does not hold is a difference and no error; an error is
 * that there is no folder. `seal`: 64 hex digits that its seal must have, or NULL. */
int audit_folder(const char *path, const char *seal, struct audit_report *out,
                 struct baton_error *e);
void audit_report_free(struct audit_report *r);

/* The outputs of two raw documents, as `--against` compares them: null where nothing differs, else
 * a sentence. A new reference. */
struct json_t *audit_against(const struct json_t *raw, const struct json_t *earlier);
/* All lines of a folder's cases.jsonl, whose chain must hold: an array that the caller drops. */
int audit_cases(const char *path, struct json_t **lines, struct baton_error *e);
/* The raw document that a line names; *out is NULL where it names none. Its hash is not looked at:
 * audit_folder does. */
int audit_case_raw(const char *path, const struct json_t *line, struct json_t **out,
                   struct baton_error *e);
/* The raw document of the last attempt of that name in a folder whose chain holds; *out is NULL
 * where there is none. */
int audit_find_raw(const char *path, const char *name, struct json_t **out, struct baton_error *e);

#endif
