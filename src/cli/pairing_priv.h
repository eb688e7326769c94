/* SPDX-License-Identifier: Apache-2.0 */
/* Probes at pairing time, for commands that are given devices: --probe pairing|always|never. */
#ifndef CLI_PAIRING_PRIV_H
#define CLI_PAIRING_PRIV_H

#include <baton/baton.h>

#include "cli/cli.h"
#include "verify/pairing.h"

enum cli_probe_policy { CLI_PROBE_PAIRING, CLI_PROBE_ALWAYS, CLI_PROBE_NEVER };
int cli_probe_policy(const char *value, enum cli_probe_policy *out, struct baton_error *e);

/* One device of a command. */
struct cli_pairing {
    bool asked;  /* a device that is probed before it is used; else nothing is known or needed */
    bool forced; /* it is used without a probe that passed */
    struct verify_pairing verdict;
};
/* Nothing for the built-in devices that tests cover. Others are probed unless the cache has a
 * verdict; one that fails is BATON_ERR_INTEGRITY. With CLI_PROBE_NEVER the cache alone is asked,
 * and the device is used in any case. `apart`: the probes run in a process of their own, for a
 * caller that must not have opened the device, and that has no threads. */
int cli_pairing(const struct baton_model *m, const char *device, enum cli_probe_policy policy,
                uint32_t threads, bool apart, const struct cli_common *common,
                struct cli_pairing *out, struct baton_error *e);
/* For a record; null where nothing was asked. */
struct json_t *cli_pairing_json(const struct cli_pairing *p);
/* "passed", "failed causality, forced", ... into buf; returns buf. */
const char *cli_pairing_text(const struct cli_pairing *p, char *buf, size_t size);

#endif
