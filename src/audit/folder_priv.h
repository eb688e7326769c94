/* SPDX-License-Identifier: Apache-2.0 */
/* A folder that is audited: its files, and what was found of them. */
#ifndef AUDIT_FOLDER_PRIV_H
#define AUDIT_FOLDER_PRIV_H

#include "audit/audit_priv.h"

struct audit_folder {
    const char *path;
    json_t *files;       /* {name: null, or the hash that the seal claims} */
    json_t *elsewhere;   /* lines of external.txt */
    json_t *differences; /* [{file, where, why}] */
};

/* Names of all files below, those of raw/ with "raw/" before them. */
int audit_files_list(const char *path, json_t **out, struct baton_error *e);
int audit_file_hash(const char *path, const char *name, char hex[65], struct baton_error *e);
/* seal.txt against the files, and against `published` (NULL: none). */
void audit_seal_check(struct audit_folder *f, const char *published);
void audit_external_read(struct audit_folder *f);

#endif
