/* SPDX-License-Identifier: Apache-2.0 */
/* Ratios of pairs, with the studentised bootstrap. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "audit/ratio.h"

#define RESAMPLES 4000u

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double audit_median(const double *x, size_t n)
{
    double sorted[AUDIT_RATIO_MOST];
    memcpy(sorted, x, n * sizeof *x);
    qsort(sorted, n, sizeof *sorted, ascending);
    return (sorted[(n - 1) / 2] + sorted[n / 2]) / 2;
}

/* splitmix64: Steele, Lea, Flood 2014. */
static uint64_t draw(uint64_t *s)
{
    uint64_t z = *s += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* Mean of n numbers and the standard error of it. */
static double mean_of(const double *x, size_t n, double *error)
{
    double sum = 0, squares = 0;
    for (size_t i = 0; i < n; i++)
        sum += x[i];
    double mean = sum / (double)n;
    for (size_t i = 0; i < n; i++)
        squares += (x[i] - mean) * (x[i] - mean);
    *error = sqrt(squares / (double)(n - 1) / (double)n);
    return mean;
}

/* (mean of a resample - mean) / its own standard error. One that drew a single pair n times has
 * none; it stands at the end that its mean points to. */
static double resample(const double *x, size_t n, double mean, uint64_t *seed)
{
    double y[AUDIT_RATIO_MOST], error;
    for (size_t i = 0; i < n; i++)
        y[i] = x[draw(seed) % n];
    double off = mean_of(y, n, &error) - mean;
    return error > 0 ? off / error : off == 0 ? 0 : copysign(HUGE_VAL, off);
}

static void interval(const double *x, size_t n, uint64_t seed, struct audit_ratio *r)
{
    double t[RESAMPLES], error, tail = (1 - AUDIT_RATIO_LEVEL) / 2;
    double mean = mean_of(x, n, &error);
    for (size_t i = 0; i < RESAMPLES; i++)
        t[i] = resample(x, n, mean, &seed);
    qsort(t, RESAMPLES, sizeof *t, ascending);
    size_t cut = (size_t)(tail * RESAMPLES);
    r->interval = true;
    r->lo = error > 0 ? exp(mean - t[RESAMPLES - 1 - cut] * error) : exp(mean);
    r->hi = error > 0 ? exp(mean - t[cut] * error) : exp(mean);
}

struct audit_ratio audit_ratio(const double *a, const double *b, size_t n, uint64_t seed)
{
    struct audit_ratio r = {0};
    double x[AUDIT_RATIO_MOST], sum = 0;
    for (size_t i = 0; i < n; i++) {
        x[i] = log(b[i] / a[i]);
        sum += x[i];
    }
    r.estimate = exp(sum / (double)n);
    if (n >= AUDIT_RATIO_PAIRS)
        interval(x, n, seed, &r);
    return r;
}
