/* SPDX-License-Identifier: Apache-2.0 */
/* One route's times, or two routes' in pairs: A B, B A, A B, ... after one run of each that does
 * not count, so that a machine which drifts slows both alike.
 *
 * Threads: one at a time.
 */
#ifndef AUDIT_BENCH_H
#define AUDIT_BENCH_H

#include "audit/ratio.h"
#include "audit/route.h"

/* One run of a route: `lanes` equal requests at once; means over them, in ms. */
enum audit_bench_time {
    AUDIT_TTFT,    /* accepted to first token */
    AUDIT_DECODE,  /* first to last token */
    AUDIT_TOTAL,   /* accepted to last token */
    AUDIT_ITL_P50, /* between tokens */
    AUDIT_ITL_P99,
    AUDIT_PREFILL,
    AUDIT_TRANSFER,
    AUDIT_EXPOSED,
    AUDIT_IMPORT,
    AUDIT_VERIFY,
    AUDIT_WALL, /* of all requests together: first submitted to last ended */
    AUDIT_BENCH_TIMES,
};
extern const char *const audit_bench_time_names[AUDIT_BENCH_TIMES];

struct audit_sample {
    double ms[AUDIT_BENCH_TIMES];
    uint64_t steps[9]; /* decode steps by lanes that took part */
};

struct audit_bench_options {
    struct audit_route_options route[2]; /* lanes are `lanes`, ctx is computed */
    uint32_t arms;                       /* 1 or 2 */
    uint32_t pairs;                      /* 1 to AUDIT_RATIO_MOST: runs of each arm that count */
    uint32_t prompt, n;                  /* tokens in and out, past end tokens */
    uint32_t lanes;
    uint64_t seed; /* of the prompts: random ids, another one each lane */
    void (*progress)(void *ctx, uint64_t done, uint64_t all); /* may be NULL */
    void *ctx;
};

struct audit_bench {
    struct audit_sample sample[2][AUDIT_RATIO_MOST]; /* in the order of the pairs */
    bool same_tokens; /* every run of every arm gave each lane the same ids */
    struct verify_left left;
};
/* The first request that fails is the error. *out is the caller's to malloc: it is large. */
int audit_bench_run(const struct audit_bench_options *o, struct audit_bench *out,
                    struct baton_error *e);

/* Do both arms hold the same devices and threads? Only then is one's time over the other's a figure
 * of the route. Native counts its one device for both. */
bool audit_bench_alike(const struct audit_route_options *a, const struct audit_route_options *b);

/* B's times over A's; false where a time is zero (one token has no decode). */
bool audit_bench_ratio(const struct audit_bench *b, uint32_t pairs, enum audit_bench_time time,
                       struct audit_ratio *out);

#endif
