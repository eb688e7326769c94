/* SPDX-License-Identifier: Apache-2.0 */
/* kv: what its files share. kv.c parses, exports and imports; the others look at files. */
#ifndef CLI_KV_PRIV_H
#define CLI_KV_PRIV_H

#include "cli/cli.h"
#include "kv/kv.h"

struct cli_kv_args {
    struct cli_common common;
    const char *model, *device;
    const char *text, *chat, *ids_text; /* at most one */
    const char *files[2];
    int n_files;
    uint32_t n, threads;
    float limit;    /* diff: relative RMS up to which slots count as equal */
    int32_t *force; /* malloc'ed */
    size_t n_force;
};

/* Each returns an exit code, or a negative code with *e. */
int cli_kv_inspect(const struct cli_kv_args *a, struct baton_error *e);
int cli_kv_diff(const struct cli_kv_args *a, struct baton_error *e);

/* Positions [first, first+n) of one slot as float32 [kv_heads, n, head_dim]. */
int cli_kv_floats(const struct kv_file *f, uint32_t layer, enum kv_which which, uint32_t first,
                  uint32_t n, float *out, struct baton_error *e);
/* First position that the layer holds. */
uint32_t cli_kv_first(const struct kv_file *f, uint32_t layer);
/* A number, or null where JSON has none for it. */
struct json_t *cli_kv_real(double x);

/* Metadata that the engine writes, NULL-terminated. */
extern const char *const cli_kv_metadata[];

#endif
