/* SPDX-License-Identifier: Apache-2.0 */
/* Ratios of pairs: a difference that is there is found, one that is not there is claimed as seldom
 * as the level says. */
#include "../test.h"
#include "audit/ratio.h"

static uint64_t seed;

/* Pairs share the machine's drift, each has noise of its own; b is `planted` times as long. */
static void measure(double *a, double *b, size_t n, double noise, double planted)
{
    for (size_t i = 0; i < n; i++) {
        double machine = 100 * exp(0.2 * (double)test_normal(&seed));
        a[i] = machine * exp(noise * (double)test_normal(&seed));
        b[i] = machine * planted * exp(noise * (double)test_normal(&seed));
    }
}

/* How many of `runs` intervals leave 1 out. */
static int claims(int runs, size_t n, double noise, double planted)
{
    double a[AUDIT_RATIO_MOST], b[AUDIT_RATIO_MOST];
    int found = 0;
    for (int i = 0; i < runs; i++) {
        measure(a, b, n, noise, planted);
        struct audit_ratio r = audit_ratio(a, b, n, test_random(&seed));
        assert_true(r.interval && r.lo <= r.estimate && r.estimate <= r.hi);
        found += r.lo > 1 || r.hi < 1;
    }
    return found;
}

/* 5 % of 400 is 20, give or take 4.4: 50 is nearly seven times that away. */
static void null_runs(void **state)
{
    static const size_t pairs[] = {6, 12, 30};
    for (int i = 0; i < 3; i++) {
        int found = claims(400, pairs[i], 0.02, 1);
        print_message("%zu pairs: %d of 400 null runs outside of 95 %%\n", pairs[i], found);
        assert_true(found <= 50 && found >= 1);
    }
}

static void planted_three_percent(void **state)
{
    int found = claims(100, 20, 0.01, 1.03);
    print_message("3 %% among 1 %% of noise, 20 pairs: found in %d of 100\n", found);
    assert_true(found >= 95);
}

static void the_estimate(void **state)
{
    const double a[] = {1, 2, 4, 100}, b[] = {2, 2, 2, 100};
    struct audit_ratio r = audit_ratio(a, b, 4, 1);
    assert_true(fabs(r.estimate - 1) < 1e-12); /* 2 * 1 * 1/2 * 1 */
    assert_false(r.interval);
    const double x[6] = {3, 3, 3, 3, 3, 3}, y[6] = {6, 6, 6, 6, 6, 6};
    r = audit_ratio(x, y, 6, 1);
    assert_true(r.interval && fabs(r.lo - 2) < 1e-12 && fabs(r.hi - 2) < 1e-12);
    const double odd[] = {5, 1, 3}, even[] = {4, 1, 3, 2};
    assert_true(audit_median(odd, 3) == 3 && audit_median(even, 4) == 2.5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(null_runs),
        cmocka_unit_test(planted_three_percent),
        cmocka_unit_test(the_estimate),
    };
    seed = test_seed();
    return cmocka_run_group_tests_name("audit-ratio", tests, NULL, NULL);
}
