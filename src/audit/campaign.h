/* SPDX-License-Identifier: Apache-2.0 */
/* A campaign of cancellations: in each round as many requests as there are lanes, all active. One
 * of them, whose cache was imported and verified, is cancelled, and another takes its place while
 * the others hold their lanes. Whoever was not touched, and who came instead, must give what the
 * same request gives alone on the same route: tokens, and logits bit by bit.
 *
 * Threads: one at a time.
 */
#ifndef AUDIT_CAMPAIGN_H
#define AUDIT_CAMPAIGN_H

#include "audit/route.h"

struct audit_campaign_options {
    struct audit_route_options route; /* whole or stream; 2 to 8 lanes; ctx is computed */
    uint32_t rounds, n;               /* tokens of a request, at least 2 */
    uint64_t seed;                    /* of the prompts: random ids of 20 tokens and more */
    void (*progress)(void *ctx, uint64_t done, uint64_t all); /* rounds; may be NULL */
    void *ctx;
};

/* A token counts as equal where its row of logits is the same too. */
struct audit_campaign {
    uint64_t victims;                               /* cancelled after a verified import */
    uint64_t survivors, replacements;               /* requests that were compared */
    uint64_t survivor_tokens, survivor_equal;       /* of them; as alone */
    uint64_t replacement_tokens, replacement_equal; /* the same */
    uint64_t reused;   /* replacements that began while all other lanes were held */
    uint64_t unclean;  /* rounds after which a lane or a block was still held */
    uint64_t steps[9]; /* decode steps by lanes that took part */
    struct verify_left left;
};
/* A request that fails, or a victim without a verified import, is an error. What differs is counted
 * and is none. */
int audit_campaign_run(const struct audit_campaign_options *o, struct audit_campaign *out,
                       struct baton_error *e);
/* Does all of it hold? */
bool audit_campaign_holds(const struct audit_campaign *c);

#endif
