/* SPDX-License-Identifier: Apache-2.0 */
/* The bounded queue: order, limits, eventfd, several senders (run under TSan too). */
#include <poll.h>
#include <pthread.h>

#include "base/base.h"
#include "../test.h"

struct message {
    uint32_t sender, number;
    uint8_t guard[5]; /* an odd size */
};

static bool readable(const struct base_queue *q)
{
    struct pollfd p = {.fd = base_queue_fd(q), .events = POLLIN};
    return poll(&p, 1, 0) == 1;
}

static void order_and_limits(void **state)
{
    struct baton_error e;
    struct base_queue *q = NULL;
    test_ok(base_queue_open(&q, 3, 5, &e), &e);
    uint8_t out[4] = {0, 0, 0, 0x99};
    assert_false(readable(q));
    assert_false(base_queue_pop(q, out, 0));
    for (int round = 0; round < 7; round++) { /* the ring wraps at every place */
        for (uint8_t i = 0; i < 5; i++)
            assert_true(base_queue_push(q, (uint8_t[3]){i, (uint8_t)round, 7}));
        assert_false(base_queue_push(q, (uint8_t[3]){9, 9, 9}));
        for (uint8_t i = 0; i < 5; i++) {
            assert_true(readable(q));
            assert_true(base_queue_pop(q, out, i % 2 ? 1000000 : 0));
            assert_int_equal(out[0], i);
            assert_int_equal(out[1], round);
            assert_int_equal(out[3], 0x99);
        }
        assert_false(readable(q));
        assert_true(base_queue_push(q, out)); /* move the head by one */
        assert_true(base_queue_pop(q, out, UINT64_MAX));
    }
    base_queue_push(q, out); /* dropped by close */
    base_queue_close(q);
    base_queue_close(NULL);
}

static void pop_waits_as_long_as_asked(void **state)
{
    struct baton_error e;
    struct base_queue *q = NULL;
    uint32_t m;
    test_ok(base_queue_open(&q, sizeof m, 1, &e), &e);
    uint64_t before = base_now_ns();
    assert_false(base_queue_pop(q, &m, 30000000));
    assert_true(base_now_ns() - before >= 30000000);
    base_queue_close(q);
}

enum { SENDERS = 4, EACH = 3000 };

struct sender {
    struct base_queue *q;
    uint32_t id;
    bool wait;
};

static void *send_all(void *arg)
{
    struct sender *s = arg;
    for (uint32_t i = 0; i < EACH; i++) {
        struct message m = {.sender = s->id, .number = i, .guard = {1, 2, 3, 4, 5}};
        if (s->wait) {
            base_queue_push_wait(s->q, &m);
        } else {
            while (!base_queue_push(s->q, &m))
                base_sleep_ns(1000);
        }
    }
    return NULL;
}

static void many_senders(void **state)
{
    struct baton_error e;
    for (size_t capacity = 1; capacity <= 64; capacity *= 8) {
        struct base_queue *q = NULL;
        struct sender senders[SENDERS];
        pthread_t threads[SENDERS];
        uint32_t next[SENDERS] = {0};
        test_ok(base_queue_open(&q, sizeof(struct message), capacity, &e), &e);
        for (uint32_t i = 0; i < SENDERS; i++) {
            senders[i] = (struct sender){.q = q, .id = i, .wait = i % 2 == 0};
            pthread_create(&threads[i], NULL, send_all, &senders[i]);
        }
        for (int i = 0; i < SENDERS * EACH; i++) {
            struct message m;
            if (i % 3 == 0) { /* as a poll() loop does */
                struct pollfd p = {.fd = base_queue_fd(q), .events = POLLIN};
                assert_int_equal(poll(&p, 1, 60000), 1);
                assert_true(base_queue_pop(q, &m, 0));
            } else {
                assert_true(base_queue_pop(q, &m, UINT64_MAX));
            }
            assert_true(m.sender < SENDERS && m.guard[4] == 5);
            assert_int_equal(m.number, next[m.sender]++); /* each sender's order is kept */
        }
        for (int i = 0; i < SENDERS; i++)
            pthread_join(threads[i], NULL);
        assert_false(readable(q));
        base_queue_close(q);
    }
}

static void refused_sizes(void **state)
{
    struct baton_error e;
    struct base_queue *q = NULL;
    test_fails(base_queue_open(&q, 0, 1, &e), BATON_ERR_USAGE, "queue", &e);
    test_fails(base_queue_open(&q, 1, 0, &e), BATON_ERR_USAGE, "queue", &e);
    test_fails(base_queue_open(&q, SIZE_MAX, 2, &e), BATON_ERR_NOMEM, "memory", &e);
    assert_null(q);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(order_and_limits),
        cmocka_unit_test(pop_waits_as_long_as_asked),
        cmocka_unit_test(many_senders),
        cmocka_unit_test(refused_sizes),
    };
    return cmocka_run_group_tests_name("base-queue", tests, NULL, NULL);
}
