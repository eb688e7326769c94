/* SPDX-License-Identifier: Apache-2.0 */
/* run: what its files share. run.c parses, run_prompt.c reads the prompt, run_exec.c runs,
 * run_remote.c knows the other machine, run_report.c prints, run_logits.c saves. */
#ifndef CLI_RUN_PRIV_H
#define CLI_RUN_PRIV_H

#include <baton/baton.h>
#include <sys/types.h>

#include "cli/cli.h"
#include "cli/pairing_priv.h"

enum run_transport { RUN_INPROC, RUN_TCP, RUN_SHM, RUN_UCX };

struct run_args {
    struct cli_common common;
    const char *model, *pin, *cpus;
    const char *text, *chat, *prompt_file, *ids_text; /* at most one */
    const int32_t *ids; /* [n_ids] instead of all of them; NULL = not given */
    size_t n_ids;
    const char *prefill, *decode; /* device names */
    int mode;                     /* enum baton_mode */
    int transport;                /* enum run_transport */
    uint32_t n, ctx, threads;     /* 0 = not given */
    float temperature, top_p, min_p;
    uint32_t top_k;
    uint64_t seed;
    bool ignore_eos, no_digest, local_prefill;
    int32_t *force; /* malloc'ed */
    size_t n_force;
    const char *logits, *kv_save, *kv_load, *trace;
    enum cli_probe_policy probe;
    const char *key_file; /* of a handoff with another machine */
};

/* One finished run, for the report. */
struct run_result {
    int32_t *prompt; /* malloc'ed, like the arrays below */
    size_t n_prompt;
    int32_t *ids, *argmax;
    float *logits; /* [n_ids, vocab] where asked for */
    size_t n_ids, cap_ids;
    char *text;
    uint32_t n_loaded; /* prompt positions that came from --kv-load */
    uint64_t load_ns;
    struct cli_pairing prefill_pairing, decode_pairing;
    struct baton_stats stats;
};
/* One more token, with its row of `vocab` logits where it has one. */
int cli_run_result_keep(struct run_result *r, const struct baton_token *t, uint32_t vocab,
                        struct baton_error *e);
void cli_run_result_free(struct run_result *r);

/* The address of a device name "remote:HOST:PORT"; NULL where it is another device. */
const char *cli_run_remote(const char *device);
/* Whether the options go with a remote end: which one, what it can be asked, and with which key. */
int cli_run_remote_check(const struct run_args *a, struct baton_error *e);
/* The ids of the prompt into *r. */
int cli_run_prompt(const struct run_args *a, const struct baton_model *m, struct run_result *r,
                   struct baton_error *e);

/* Load, fork where two processes are asked for, generate. Text is streamed to stdout unless
 * --json. Returns 0 or a code with *e. The model is returned open for the report. */
int cli_run_execute(const struct run_args *a, struct baton_model **model, struct run_result *r,
                    struct baton_error *e);

/* Pieces of cli_run_execute that deal with the second process (run_pair.c). */
struct run_pair {
    pid_t producer;                    /* 0 = none */
    int fd;                            /* this side's end; -1 where none */
    const struct baton_error *failure; /* shared: the producer's, code 0 = none; NULL = not known */
};
/* Connect two ends and fork. In the producer `child` runs and its result is the exit code; in the
 * caller *pair is filled. */
int cli_run_pair_fork(const struct run_args *a, int (*child)(void *ctx, int fd), void *ctx,
                      struct run_pair *pair, struct baton_error *e);
/* The producer is no longer needed: end it if it has not ended, reap it. Where `e` says that the
 * peer was lost, it is replaced by the producer's own error, or by how the producer ended. */
void cli_run_pair_end(struct run_pair *pair, bool failed, struct baton_error *e);

int cli_run_report_json(const struct run_args *a, struct baton_model *m,
                        const struct run_result *r);
void cli_run_report_text(const struct run_args *a, struct baton_model *m,
                         const struct run_result *r);

/* safetensors: logits F32 [n, vocab], ids I32 [n] (as chosen or forced), argmax I32 [n]. */
int cli_run_logits_save(const char *path, const struct run_result *r, uint32_t vocab,
                        struct baton_error *e);

extern const char *const cli_run_mode_names[];      /* native, whole, stream, NULL */
extern const char *const cli_run_transport_names[]; /* inproc, tcp, shm, ucx, NULL */

#endif
