/* SPDX-License-Identifier: Apache-2.0 */
/* Traces: what is written is what was added, in order, by any thread and process; bounded. */
#include <jansson.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "tests/test.h"

static const char *temp(void)
{
    static char path[64];
    snprintf(path, sizeof path, "/tmp/baton-test-trace-%d", (int)getpid());
    return path;
}

static json_t *save(struct base_trace *t)
{
    struct baton_error e;
    json_error_t je;
    test_ok(base_trace_save(t, temp(), &e), &e);
    json_t *doc = json_load_file(temp(), JSON_REJECT_DUPLICATES, &je);
    if (!doc)
        fail_msg("%s line %d", je.text, je.line);
    unlink(temp());
    return doc;
}

static json_int_t dropped(json_t *doc)
{
    return json_integer_value(json_object_get(json_object_get(doc, "otherData"), "dropped"));
}

static void test_fields(void **state)
{
    (void)state;
    struct base_trace *t;
    struct baton_error e;
    test_ok(base_trace_open(8, &t, &e), &e);
    const struct base_trace_event late = {.name = "layer",
                                          .category = "compute",
                                          .number = 3,
                                          .track = 7,
                                          .begin_ns = 5000123,
                                          .end_ns = 5002124,
                                          .key = {"a", "huge"},
                                          .value = {42, UINT64_MAX}};
    const struct base_trace_event early = {
        .name = "mark", .category = "x", .number = -1, .track = 7, .begin_ns = 1000001};
    base_trace_add(t, &late);
    base_trace_add(t, &early);
    base_trace_name(t, 7, "worker", 2);
    json_t *doc = save(t), *all = json_object_get(doc, "traceEvents");
    assert_int_equal(json_array_size(all), 3);
    json_t *name = json_array_get(all, 0), *mark = json_array_get(all, 1),
           *layer = json_array_get(all, 2);
    assert_string_equal(json_string_value(json_object_get(name, "ph")), "M");
    assert_string_equal(json_string_value(json_object_get(json_object_get(name, "args"), "name")),
                        "worker 2");
    assert_string_equal(json_string_value(json_object_get(mark, "ph")), "i");
    assert_string_equal(json_string_value(json_object_get(mark, "name")), "mark");
    assert_true(json_real_value(json_object_get(mark, "ts")) == 1000.001);
    assert_string_equal(json_string_value(json_object_get(layer, "name")), "layer 3");
    assert_true(json_real_value(json_object_get(layer, "ts")) == 5000.123);
    assert_true(json_real_value(json_object_get(layer, "dur")) == 2.001);
    assert_int_equal(json_integer_value(json_object_get(layer, "pid")), getpid());
    assert_int_equal(json_integer_value(json_object_get(layer, "tid")), 7);
    json_t *args = json_object_get(layer, "args");
    assert_int_equal(json_integer_value(json_object_get(args, "a")), 42);
    assert_string_equal(json_string_value(json_object_get(args, "huge")), "18446744073709551615");
    json_decref(doc);
    base_trace_close(t);
}

/* ---- bounded, by threads and processes ----------------------------------------------------- */

#define EACH 400u

static void write_some(struct base_trace *t, uint32_t track)
{
    for (uint32_t i = 0; i < EACH; i++) {
        const struct base_trace_event ev = {.name = "e",
                                            .category = "c",
                                            .number = i,
                                            .track = track,
                                            .begin_ns = base_now_ns(),
                                            .end_ns = base_now_ns()};
        base_trace_add(t, &ev);
    }
}

static void *writer(void *t)
{
    write_some(t, 1);
    return NULL;
}

static void many(uint32_t capacity)
{
    struct base_trace *t;
    struct baton_error e;
    pthread_t threads[2];
    test_ok(base_trace_open(capacity, &t, &e), &e);
    pid_t child = fork();
    if (child == 0) {
        write_some(t, 2);
        kill(getpid(), SIGKILL); /* what it wrote is there all the same */
    }
    for (int i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, writer, t), 0);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    json_t *doc = save(t), *all = json_object_get(doc, "traceEvents");
    uint32_t kept = capacity < 3 * EACH ? capacity : 3 * EACH;
    assert_int_equal(json_array_size(all), kept);
    assert_int_equal(dropped(doc), 3 * EACH - kept);
    assert_int_equal(base_trace_dropped(t), 3 * EACH - kept);
    double last = 0;
    uint32_t of_child = 0;
    for (size_t i = 0; i < json_array_size(all); i++) {
        json_t *ev = json_array_get(all, i);
        double ts = json_real_value(json_object_get(ev, "ts"));
        assert_true(ts >= last);
        last = ts;
        of_child += json_integer_value(json_object_get(ev, "pid")) == child;
    }
    if (kept == 3 * EACH)
        assert_int_equal(of_child, EACH);
    json_decref(doc);
    base_trace_close(t);
}

static void test_many(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    many(3 * EACH);
    many(1);
    many(test_range(&seed, 2, 3 * EACH - 1));
}

static void test_empty_and_refused(void **state)
{
    (void)state;
    struct base_trace *t;
    struct baton_error e;
    test_ok(base_trace_open(4, &t, &e), &e);
    json_t *doc = save(t);
    assert_int_equal(json_array_size(json_object_get(doc, "traceEvents")), 0);
    json_decref(doc);
    test_fails(base_trace_save(t, "/nonexistent/trace", &e), BATON_ERR_IO, "/nonexistent/trace",
               &e);
    base_trace_close(t);
    base_trace_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fields),
        cmocka_unit_test(test_many),
        cmocka_unit_test(test_empty_and_refused),
    };
    return cmocka_run_group_tests_name("base: trace", tests, NULL, NULL);
}
