/* SPDX-License-Identifier: Apache-2.0 */
/* A file written piece by piece that takes its name only when it is whole: a temporary name beside
 * it, fsync, rename. Whatever fails, a full disk too, leaves an older file as it was. */
#ifndef BASE_REPLACE_PRIV_H
#define BASE_REPLACE_PRIV_H

#include "base/base.h"

/* {.fd = -1} before opening; what is not committed goes away at closing. */
struct base_replace {
    int fd;
    char *path; /* what is replaced: behind a symbolic link */
    char *temp; /* NULL: a pipe, terminal or device, written in place */
};

int base_replace_open(struct base_replace *r, const char *path, struct baton_error *e);
int base_replace_write(struct base_replace *r, const void *data, size_t n, struct baton_error *e);
int base_replace_commit(struct base_replace *r, struct baton_error *e);
void base_replace_close(struct base_replace *r);

#endif
