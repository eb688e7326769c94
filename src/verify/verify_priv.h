/* SPDX-License-Identifier: Apache-2.0 */
/* Inside verify: runs of a request, natively or handed over, and what was seen of them. */
#ifndef VERIFY_VERIFY_PRIV_H
#define VERIFY_VERIFY_PRIV_H

#include "verify/verify.h"

/* ---- runs (run.c) ------------------------------------------------------------------------- */

/* What is asked of every run of a check. */
struct verify_ask {
    const int32_t *ids; /* [n_ids] */
    size_t n_ids;
    const int32_t *force; /* [n] or NULL */
    uint32_t n;
    enum baton_mode mode;
};

void verify_run_free(struct verify_run *r); /* a zeroed one is fine */

/* Engines that run requests one at a time: one that does both, or a pair. */
struct verify_route {
    struct baton_engine *producer; /* NULL where native */
    struct baton_engine *consumer;
    struct verify_cache *seen,
        *sent; /* of the request that runs; written by the engines' threads */
    uint32_t vocab;
    uint64_t next_id;
    struct verify_left *left; /* where closing adds what the engines still held */
};
/* Native on one device. */
int verify_route_native(struct verify_route *r, const struct verify_options *o, const char *device,
                        uint32_t ctx, struct baton_error *e);
/* The route that is checked, over a link in memory or over a socket. */
int verify_route_pair(struct verify_route *r, const struct verify_options *o, bool socket,
                      uint32_t ctx, struct baton_error *e);
void verify_route_close(struct verify_route *r); /* a zeroed or half-built one is fine */
/* One request. *out is the caller's to free whatever it returns: one that ends early may have shown
 * its caches. */
int verify_route_run(struct verify_route *r, const struct verify_ask *a, struct verify_run *out,
                     struct baton_error *e);

/* Tokens, margins and logits bit by bit. */
bool verify_runs_equal(const struct verify_run *a, const struct verify_run *b, uint32_t vocab);
/* First output index at which the tokens differ; -1 = none. */
int32_t verify_first_mismatch(const struct verify_run *a, const struct verify_run *b);
/* Worst row of two runs, up to and with the first token that differs: behind it the inputs do. */
double verify_worst_row(const struct verify_run *have, const struct verify_run *want,
                        uint32_t vocab);

/* ---- verdict (verdict.c) ------------------------------------------------------------------ */

/* From the figures to pass or fail, and the sentence that says why. */
void verify_judge(const struct verify_options *o, const struct verify_cache *consumer,
                  const struct verify_cache *producer, struct verify_case *c);
/* For a case that ended early: a slot that differs is the reason, else the error. */
void verify_judge_error(struct verify_case *c, const struct baton_error *e);

#endif
