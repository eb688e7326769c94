/* SPDX-License-Identifier: Apache-2.0 */
/* The compute pool: each item once, memory ordering (run under TSan too), idle workers sleep. */
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>

#include "base/base.h"
#include "../test.h"

enum { MAX_ITEMS = 4000 };

struct job {
    uint32_t hits[MAX_ITEMS]; /* plain: only the worker that owns item i touches hits[i] */
    uint32_t in, n;
    uint64_t delay_ns; /* of item 0 */
};

static void hit(void *ctx, unsigned i)
{
    struct job *j = ctx;
    if (i == 0 && j->delay_ns)
        base_sleep_ns(j->delay_ns);
    j->hits[i] += j->in; /* reads what the owner wrote before run() */
}

static void run_and_check(struct base_pool *p, struct job *j, uint32_t n, uint32_t in)
{
    memset(j->hits, 0, sizeof j->hits);
    j->in = in;
    j->n = n;
    base_pool_run(p, hit, j, n);
    for (uint32_t i = 0; i < MAX_ITEMS; i++)
        if (j->hits[i] != (i < n ? in : 0))
            fail_msg("n=%u: item %u ran to %u, wanted %u", n, i, j->hits[i], i < n ? in : 0);
}

static void each_item_once(void **state)
{
    static struct job j;
    uint64_t seed = test_seed();
    struct baton_error e;
    for (unsigned threads = 1; threads <= 5; threads++) {
        struct base_pool *p = NULL;
        test_ok(base_pool_open(&p, threads, &e), &e);
        assert_int_equal(base_pool_threads(p), threads);
        for (int round = 0; round < 300; round++) {
            static const uint32_t odd[] = {0, 1, 2, 3};
            uint32_t n = round % 3 ? test_range(&seed, 0, 40) : odd[round / 3 % 4];
            run_and_check(p, &j, round % 50 == 49 ? MAX_ITEMS : n, 1 + (uint32_t)round);
        }
        base_pool_close(p);
    }
}

static void late_and_slow_items(void **state)
{
    static struct job j;
    struct baton_error e;
    struct base_pool *p = NULL;
    test_ok(base_pool_open(&p, 3, &e), &e);
    for (int round = 0; round < 20; round++) {
        j.delay_ns = round % 2 ? 2000000 : 0; /* the owner has to sleep for the slow item */
        run_and_check(p, &j, 5, 3);
        if (round % 5 == 0)
            base_sleep_ns(3000000); /* the workers have gone to sleep */
    }
    base_pool_close(p);
}

struct sum {
    uint64_t part[64];
    const uint32_t *data;
};

static void add_part(void *ctx, unsigned i)
{
    struct sum *s = ctx;
    s->part[i] = 0;
    for (unsigned k = 0; k < 100; k++)
        s->part[i] += s->data[i * 100 + k];
}

/* Results of one job are the input of the next, back to back: what a forward pass does. */
static void jobs_follow_each_other(void **state)
{
    static uint32_t data[6400];
    struct sum s = {.data = data};
    struct baton_error e;
    struct base_pool *p = NULL;
    test_ok(base_pool_open(&p, 4, &e), &e);
    for (uint32_t round = 0; round < 2000; round++) {
        for (int i = 0; i < 6400; i += 37)
            data[i] = round;
        uint64_t want = 0, got = 0;
        for (int i = 0; i < 6400; i++)
            want += data[i];
        base_pool_run(p, add_part, &s, 64);
        for (int i = 0; i < 64; i++)
            got += s.part[i];
        assert_true(got == want);
    }
    base_pool_close(p);
}

static double cpu_seconds(void)
{
    struct rusage r;
    getrusage(RUSAGE_SELF, &r);
    return (double)r.ru_utime.tv_sec + (double)r.ru_stime.tv_sec +
           1e-6 * (double)(r.ru_utime.tv_usec + r.ru_stime.tv_usec);
}

static void idle_costs_nothing(void **state)
{
    static struct job j;
    struct baton_error e;
    struct base_pool *p = NULL;
    test_ok(base_pool_open(&p, 4, &e), &e);
    run_and_check(p, &j, 100, 1);
    base_sleep_ns(5000000);
    double before = cpu_seconds();
    base_sleep_ns(300000000);
    double used = cpu_seconds() - before; /* three spinning workers would use most of a core each */
    base_pool_close(p);
    assert_true(used < 0.05);
}

static void signals_stay_with_the_owner(void **state)
{
    struct baton_error e;
    struct base_pool *p = NULL;
    sigset_t before, after;
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    test_ok(base_pool_open(&p, 3, &e), &e);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    for (int s = 1; s < 32; s++)
        assert_int_equal(sigismember(&before, s), sigismember(&after, s));
    base_pool_close(p);
}

static void refused_sizes(void **state)
{
    struct baton_error e;
    struct base_pool *p = NULL;
    test_fails(base_pool_open(&p, 0, &e), BATON_ERR_USAGE, "threads", &e);
    test_fails(base_pool_open(&p, 1u << 31, &e), BATON_ERR_USAGE, "threads", &e);
    assert_null(p);
    base_pool_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_item_once),
        cmocka_unit_test(late_and_slow_items),
        cmocka_unit_test(jobs_follow_each_other),
        cmocka_unit_test(idle_costs_nothing),
        cmocka_unit_test(signals_stay_with_the_owner),
        cmocka_unit_test(refused_sizes),
    };
    return cmocka_run_group_tests_name("base-pool", tests, NULL, NULL);
}
