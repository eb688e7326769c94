/* SPDX-License-Identifier: Apache-2.0 */
/* Small things that all files of the room share. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "audit/audit_priv.h"
#include "base/base.h"

char *audit_text(const json_t *v, size_t flags)
{
    return json_dumps(v, flags | JSON_REAL_PRECISION(17));
}

void audit_hash(const void *data, size_t n, char hex[65])
{
    uint8_t digest[32];
    base_sha256(data, n, digest);
    base_hex(digest, sizeof digest, hex);
}

json_t *audit_real(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

void audit_time(char out[32])
{
    time_t now = (time_t)(base_wall_ms() / 1000);
    struct tm tm;
    gmtime_r(&now, &tm);
    strftime(out, 32, "%Y-%m-%dT%H:%M:%SZ", &tm);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

json_t *audit_spread(double *values, size_t n)
{
    if (n == 0)
        return json_null();
    qsort(values, n, sizeof *values, by_value);
    double median = n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
    return json_pack("{s:I,s:f,s:f,s:f}", "n", (json_int_t)n, "min", values[0], "median", median,
                     "max", values[n - 1]);
}
