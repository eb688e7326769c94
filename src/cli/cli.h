/* SPDX-License-Identifier: Apache-2.0 */
/* cli: one binary, one file a command. Parses arguments, calls the rooms, prints.
 *
 * Exit codes: 0 did it and it holds, 1 did it and it does not hold, 2 bad usage or
 * bad input, 3 environment; 130 after Ctrl-C. Results go to stdout, everything else to stderr. With
 * --json stdout carries exactly one JSON document, an {"error"} document where it failed.
 */
#ifndef CLI_CLI_H
#define CLI_CLI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <baton/error.h>

struct json_t;

/* Flags that every command takes. */
struct cli_common {
    bool json;
    int verbosity; /* -1 quiet, 0, 1.. */
};

/* ---- commands: argv[0] is the command's name ---------------------------------------------- */
int cli_run(int argc, char **argv);
int cli_model(int argc, char **argv);
int cli_devices(int argc, char **argv);
int cli_probe(int argc, char **argv); /* 1 also where a probe fails */
int cli_kv(int argc, char **argv);
int cli_serve(int argc, char **argv);    /* returns after a signal has stopped it */
int cli_proxy(int argc, char **argv);    /* the same */
int cli_check(int argc, char **argv);    /* 1 also where the handoff was made and does not hold */
int cli_matrix(int argc, char **argv);   /* 1 also where a cell fails */
int cli_campaign(int argc, char **argv); /* 1 also where a neighbour was touched */
int cli_quality(int argc, char **argv);  /* 1 also where an answer is not what it must be */
int cli_bench(int argc, char **argv);    /* 1 also where two arms did not generate the same */
int cli_audit(int argc, char **argv);    /* 1 where the folder does not hold */
int cli_replay(int argc, char **argv);   /* 1 where an output is not the recorded one */

/* The commit that this was built from; "" where it is not known. */
extern const char cli_source_commit[];

/* ---- options (options.c) ------------------------------------------------------------------ */

struct option;

/* What a command takes. -v, -q, -h, --help and --json are every command's: they stand in `letters`,
 * which begins with ':', and `options` (as 'h' and 'j'), and `take` is not asked about them. */
struct cli_syntax {
    const char *letters, *help;
    const struct option *options;
    int (*take)(void *args, int opt, const char *value, struct baton_error *e); /* may be NULL */
    bool words; /* arguments may follow, from argv[optind] on */
};

/* Read a command line, whose argv[0] is the command's name. Errors name the option; long ones are
 * written out. *helped: --help was asked for and printed, nothing else is to be done. Fills
 * *common, its `json` also on failure. */
int cli_parse(int argc, char **argv, const struct cli_syntax *x, struct cli_common *common,
              void *args, bool *helped, struct baton_error *e);

/* ---- arguments (args.c) ------------------------------------------------------------------- */

/* Parse the value of option `name`; BATON_ERR_USAGE that quotes both where it is not a number of
 * that kind inside [min, max]. */
int cli_parse_u32(const char *name, const char *value, uint32_t min, uint32_t max, uint32_t *out,
                  struct baton_error *e);
int cli_parse_u64(const char *name, const char *value, uint64_t *out, struct baton_error *e);
/* Bytes: a whole number, or one with K, M, G or T behind it (1024 each), as 512M or 2GiB. */
int cli_parse_bytes(const char *name, const char *value, uint64_t *out, struct baton_error *e);
int cli_parse_f32(const char *name, const char *value, float min, float max, float *out,
                  struct baton_error *e);
/* "1,2,3" to a malloc'ed array. Empty text is an error. */
int cli_parse_ids(const char *name, const char *value, int32_t **ids, size_t *n,
                  struct baton_error *e);
/* One of the words in NULL-terminated `words`; *out is its index. */
int cli_parse_word(const char *name, const char *value, const char *const *words, int *out,
                   struct baton_error *e);
/* Restrict this process to CPUs "0,2-3". */
int cli_set_cpus(const char *list, struct baton_error *e);
/* All of a descriptor's text, at most `limit` bytes; *text is malloc'ed and NUL-terminated. */
int cli_read_all(int fd, size_t limit, char **text, size_t *n, struct baton_error *e);

/* Whether --json stands anywhere: for arguments that could not be parsed, so that a usage error is
 * a document too. Elsewhere it may be another option's value. */
bool cli_wants_json(int argc, char **argv);

/* Apply -v, -q to the log level. */
void cli_set_verbosity(const struct cli_common *c);

/* ---- output (output.c) -------------------------------------------------------------------- */

/* The exit code for an error code. */
int cli_exit_code(int code);
/* Print the error for people and, with --json, as a document; returns the exit code. */
int cli_fail(const struct cli_common *c, const struct baton_error *e);
/* Print a document on stdout and drop the reference; returns `rc`, or 3 when stdout is broken. */
int cli_print_json(struct json_t *doc, int rc);
/* A progress bar on stderr where that is a terminal: `what` and done of all. done == all ends
 * it. */
struct cli_progress {
    bool on, shown;
    uint64_t last_ns;
};
void cli_progress_init(struct cli_progress *p, const struct cli_common *c);
void cli_progress_draw(struct cli_progress *p, const char *what, uint64_t done, uint64_t all);
void cli_progress_end(struct cli_progress *p);
/* A device that is shown as emulated wherever its name is. */
bool cli_emulated(const char *device);
/* "10.8 MiB" into buf (>= 16 bytes); returns buf. */
const char *cli_bytes(uint64_t n, char *buf);

#endif
