/* SPDX-License-Identifier: Apache-2.0 */
/* Pairing: may this device be used with this model? All probes, the first time that the two meet;
 * then the verdict is read from the cache ($XDG_CACHE_HOME/baton or ~/.cache/baton), until anything
 * is another one that it depends on: the device's name with its keys, the files named there, the
 * weights, the instruction set, this program. docs/probes.md says which devices are asked.
 *
 * Threads: any one at a time. Nothing outlives a call. */
#ifndef VERIFY_PAIRING_H
#define VERIFY_PAIRING_H

#include "verify/probe.h"

struct verify_pairing {
    bool known; /* else the rest says nothing */
    bool cached;
    bool failed;
    char probe[16]; /* the first that failed; "" */
    char why[240];
};

/* What the cache knows of the two. An error: the model could not be hashed. */
int verify_pairing_find(const struct baton_model *m, const char *device, struct verify_pairing *out,
                        struct baton_error *e);
/* Run all probes until one fails, and keep the verdict. An error is that they could not be run, and
 * nothing is kept. */
int verify_pairing_run(const struct baton_model *m, const char *device, uint32_t threads,
                       struct verify_pairing *out, struct baton_error *e);

#endif
