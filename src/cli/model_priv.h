/* SPDX-License-Identifier: Apache-2.0 */
/* model: what its files share. */
#ifndef CLI_MODEL_PRIV_H
#define CLI_MODEL_PRIV_H

#include "cli/cli.h"

struct model_args {
    struct cli_common common;
    const char *verb, *model, *text, *ids_text;
    const char *device, *out; /* compile */
    uint32_t ctx;             /* compile; 0 = not given */
    bool chat, no_special, skip_special, no_cache;
    uint32_t threads;
};

/* compile: a program of an emulated device into a file (model_compile.c). */
int cli_model_compile(const struct model_args *a, struct baton_error *e);

#endif
