/* SPDX-License-Identifier: Apache-2.0 */
/* Routes: one engine that does both, or a producer and a consumer joined by a link in memory, and
 * requests through them, one alone or several at once over the consumer's lanes.
 *
 *     audit_route_open(&route, &options, &e);
 *     audit_route_run(&route, asks, outputs, n, &e);     // all at once; as often as wanted
 *     audit_output_free(&outputs[i]);
 *     audit_route_close(&route, &left);
 *
 * It goes through the engine, not through HTTP. Threads: one at a time; engines have their own.
 */
#ifndef AUDIT_ROUTE_H
#define AUDIT_ROUTE_H

#include "verify/verify.h"

struct json_t;

struct audit_route_options {
    struct baton_model *model;
    const char *prefill, *decode; /* devices; prefill is not looked at where native */
    enum baton_mode mode;
    uint32_t lanes, ctx, threads; /* threads 0 = one a core */
};

/* Caches that engines showed, in any order: requests that run at once are told apart by the lengths
 * of their prompts. */
struct audit_seen {
    struct verify_cache *caches[64];
    size_t n;
};

struct audit_route {
    enum baton_mode mode;
    struct audit_seen seen, sent;  /* since audit_route_forget, where observed */
    struct baton_engine *producer; /* NULL where native */
    struct baton_engine *consumer;
    uint64_t next_id;
    uint32_t vocab;
};
int audit_route_open(struct audit_route *r, const struct audit_route_options *o,
                     struct baton_error *e);
/* Adds what the engines still hold to *left. A zeroed or half-built one is fine. */
void audit_route_close(struct audit_route *r, struct verify_left *left);

/* From now on keep the caches of all requests, 64 at most. `r` must not be moved any more. */
void audit_route_observe(struct audit_route *r);
/* Drop them. While no request runs. */
void audit_route_forget(struct audit_route *r);
/* The cache of a prompt of n tokens; NULL where none was shown. */
struct verify_cache *audit_seen_find(const struct audit_seen *s, uint32_t n_tokens);

struct audit_ask {
    const int32_t *ids; /* [n_ids] */
    size_t n_ids;
    uint32_t n;    /* tokens at most */
    bool past_end; /* end tokens do not stop */
    bool together; /* no more than some tokens before all others that are asked have their first, so
                      that all lanes are active together; logits are hashed on the way */
};

struct audit_output {
    uint32_t n, cap;
    int32_t *ids;        /* [n] */
    float *margins;      /* [n] */
    uint64_t *time_ns;   /* [n] CLOCK_MONOTONIC */
    uint8_t (*rows)[32]; /* [n] SHA-256 of the rows of logits, where `together` */
    bool hashed, over;
    struct baton_error why; /* code 0: it finished */
    struct baton_stats stats;
};
void audit_output_free(struct audit_output *o); /* a zeroed one is fine */

/* Submit all n requests, greedy, then wait for all of them. A request that fails says so in its
 * output; an error is that there is no memory. Outputs are the caller's whatever it returns.
 * `steps` (may be NULL): decode steps by lanes that took part, [9], of this call. */
int audit_route_run(struct audit_route *r, const struct audit_ask *asks,
                    struct audit_output *outputs, size_t n, uint64_t steps[9],
                    struct baton_error *e);

/* The outputs as raw documents have them; NULL without memory. */
struct json_t *audit_output_json(const struct audit_output *o, const struct baton_model *m);
/* The same with the caches that were seen of the prompt of that length: "holds", "sent",
 * "slots". */
struct json_t *audit_route_output_json(const struct audit_route *r, const struct audit_output *o,
                                       const struct baton_model *m, uint32_t n_prompt);

#endif
