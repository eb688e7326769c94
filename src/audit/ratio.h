/* SPDX-License-Identifier: Apache-2.0 */
/* How many times as long is B as A, from pairs that were measured side by side? */
#ifndef AUDIT_RATIO_H
#define AUDIT_RATIO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define AUDIT_RATIO_LEVEL 0.95
#define AUDIT_RATIO_PAIRS 6u /* fewer say nothing about an interval */
#define AUDIT_RATIO_MOST 256u

struct audit_ratio {
    double estimate; /* geometric mean of b[i] / a[i] */
    bool interval;   /* enough pairs for lo and hi */
    double lo, hi;   /* at AUDIT_RATIO_LEVEL */
};

/* Of n pairs, all above zero. The interval is the studentised bootstrap's over the logarithms of
 * the pairs' ratios (Efron and Tibshirani 1993, section 12.5), which keeps its level where pairs
 * are few; the resamples are drawn from `seed`. */
struct audit_ratio audit_ratio(const double *a, const double *b, size_t n, uint64_t seed);

double audit_median(const double *x, size_t n); /* of n > 0 numbers, at most AUDIT_RATIO_MOST */

#endif
