/* SPDX-License-Identifier: Apache-2.0 */
/* Probes: does a device compute a model's cache as it should, and if not, where and why? They run
 * one device in this process, without a handoff, and compare what it computes with cpu:ref or with
 * itself. Limits are constants; docs/probes.md explains them.
 *
 * Threads: any one at a time. Nothing outlives a call. */
#ifndef VERIFY_PROBE_H
#define VERIFY_PROBE_H

#include "engine/engine.h"

enum verify_probe {
    VERIFY_LAYOUT,    /* K and V of known tokens against the reference: weights, heads, blocks */
    VERIFY_CAUSALITY, /* changing token j changes nothing before j */
    VERIFY_LANES,     /* a prompt gives the same in each lane, beside whom ever */
    VERIFY_WINDOW,    /* which rows stand where, and how far local layers look back */
    VERIFY_PADDING,   /* a narrow and a wide program give the same */
    VERIFY_PRECISION, /* drift against the reference, layer by layer */
    VERIFY_PROBES,    /* how many there are */
};
extern const char *const verify_probe_names[VERIFY_PROBES + 1]; /* ends with NULL */

enum verify_probe_verdict { VERIFY_PROBE_PASS, VERIFY_PROBE_FAIL, VERIFY_PROBE_NA };

struct verify_finding {
    enum verify_probe_verdict verdict;
    const char *metric; /* "rel_rms", "rows" */
    double value, limit;
    uint32_t layer, position; /* of the first place that fails; of the largest value else */
    int32_t lane;             /* of lanes; -1 = the probe knows none */
    char tensor[8];           /* "k", "v", "logits" */
    char why[240];            /* one sentence */
};

/* Run one probe. What the device does wrong is a finding; an error is that it could not be run. */
int verify_probe_run(const struct baton_model *m, const char *device, enum verify_probe which,
                     uint32_t threads, struct verify_finding *out, struct baton_error *e);

#endif
