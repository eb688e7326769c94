/* SPDX-License-Identifier: Apache-2.0 */
/* What every test includes: cmocka, a printed seed, random numbers, guard bytes, paths. */
#ifndef TESTS_TEST_H
#define TESTS_TEST_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include <baton/error.h>

/* xorshift64*: fresh each run, repeated with BATON_TEST_SEED. */
static inline uint64_t test_random(uint64_t *s)
{
    *s ^= *s >> 12;
    *s ^= *s << 25;
    *s ^= *s >> 27;
    return *s * 0x2545F4914F6CDD1DULL;
}

static inline uint64_t test_seed(void)
{
    const char *env = getenv("BATON_TEST_SEED");
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    uint64_t seed = env ? strtoull(env, NULL, 0)
                        : (uint64_t)ts.tv_sec * 1000003u + (uint64_t)ts.tv_nsec;
    seed |= 1;
    print_message("BATON_TEST_SEED=%llu\n", (unsigned long long)seed);
    return seed;
}

/* Uniform in [lo, hi], both included. */
static inline uint32_t test_range(uint64_t *s, uint32_t lo, uint32_t hi)
{
    return lo + (uint32_t)(test_random(s) % ((uint64_t)hi - lo + 1));
}

/* Roughly normal: the sum of four uniforms, variance one. */
static inline float test_normal(uint64_t *s)
{
    double x = 0;
    for (int i = 0; i < 4; i++)
        x += (double)(test_random(s) >> 11) / 9007199254740992.0 - 0.5;
    return (float)(x * 1.7320508);
}

static inline double test_rel_rms(const float *a, const float *ref, size_t n)
{
    double d = 0, r = 0;
    for (size_t i = 0; i < n; i++) {
        d += ((double)a[i] - ref[i]) * ((double)a[i] - ref[i]);
        r += (double)ref[i] * ref[i];
    }
    return r > 0 ? sqrt(d / r) : sqrt(d);
}

/* A path below the source tree, from BATON_SOURCE_ROOT (set by meson). Static buffers, 8 deep. */
static inline const char *test_path(const char *name)
{
    static char buf[8][1024];
    static unsigned turn;
    char *p = buf[turn++ % 8];
    const char *root = getenv("BATON_SOURCE_ROOT");
    snprintf(p, sizeof *buf, "%s/%s", root ? root : ".", name);
    return p;
}

/* The call must succeed; the error's text is shown where it does not. */
#define test_ok(call, e)                                                                           \
    do {                                                                                           \
        memset((e), 0, sizeof *(e));                                                               \
        int rc_ = (call);                                                                          \
        if (rc_ != 0)                                                                              \
            fail_msg("%s: %d %s", #call, rc_, (e)->text);                                          \
    } while (0)

/* The call must fail with this code and a text that holds `word`. */
#define test_fails(call, want, word, e)                                                            \
    do {                                                                                           \
        memset((e), 0, sizeof *(e));                                                               \
        int rc_ = (call);                                                                          \
        if (rc_ != (want) || !strstr((e)->text, word))                                             \
            fail_msg("%s: got %d '%s', wanted %d with '%s'", #call, rc_, (e)->text, (want), word); \
    } while (0)

#endif
