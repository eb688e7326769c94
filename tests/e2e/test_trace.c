/* SPDX-License-Identifier: Apache-2.0 */
/* run --trace: one file for both processes, in which every layer's compute and transfer stand, and
 * in which a stream's overlap can be seen. */
#include <unistd.h>

#include "tests/e2e/e2e.h"

#define N_IDS 2048u
#define LAYERS 26u

static const char *folder;
static char *prompt; /* ids, as text */

/* A trace that was read: its spans by layer. */
struct view {
    json_t *doc;
    double compute_end[LAYERS]; /* of the last chunk, us; 0 = none */
    double sent[LAYERS];        /* begin of the first packing */
    double landed[LAYERS];      /* begin of the first landing */
    double imported[LAYERS];    /* end of the last import */
    double last_compute;        /* end of all prefill compute */
    unsigned compute, steps, pids, finished;
    json_int_t pid[4];
};

static double end_of(json_t *ev)
{
    return json_number_value(json_object_get(ev, "ts")) +
           json_number_value(json_object_get(ev, "dur"));
}

static void lower(double *at, double x)
{
    if (*at == 0 || x < *at)
        *at = x;
}

static void raise_to(double *at, double x)
{
    if (x > *at)
        *at = x;
}

static void take_span(struct view *v, json_t *ev)
{
    const char *name = json_string_value(json_object_get(ev, "name"));
    json_t *layer = json_object_get(json_object_get(ev, "args"), "layer");
    json_int_t l = layer ? json_integer_value(layer) : -1;
    double begin = json_number_value(json_object_get(ev, "ts")), end = end_of(ev);
    v->steps += !strcmp(name, "decode step");
    if (l < 0)
        return;
    assert_true(l < LAYERS);
    if (!strncmp(name, "layer ", 6)) {
        assert_int_equal(atoi(name + 6), l);
        v->compute++;
        raise_to(&v->compute_end[l], end);
        raise_to(&v->last_compute, end);
    }
    if (!strncmp(name, "pack ", 5))
        lower(&v->sent[l], begin);
    if (!strncmp(name, "land ", 5))
        lower(&v->landed[l], begin);
    if (!strncmp(name, "import ", 7))
        raise_to(&v->imported[l], end);
}

static void take_pid(struct view *v, json_t *ev)
{
    json_int_t pid = json_integer_value(json_object_get(ev, "pid"));
    for (unsigned i = 0; i < v->pids; i++)
        if (v->pid[i] == pid)
            return;
    assert_true(v->pids < 4);
    v->pid[v->pids++] = pid;
}

/* Read it, check what holds for every trace. */
static void read_trace(struct view *v, const char *path)
{
    json_error_t je;
    double last = 0;
    memset(v, 0, sizeof *v);
    v->doc = json_load_file(path, JSON_REJECT_DUPLICATES, &je);
    if (!v->doc)
        fail_msg("%s line %d", je.text, je.line);
    assert_int_equal(json_integer_value(e2e_get(v->doc, "otherData.dropped")), 0);
    json_t *all = e2e_get(v->doc, "traceEvents");
    for (size_t i = 0; i < json_array_size(all); i++) {
        json_t *ev = json_array_get(all, i);
        const char *ph = json_string_value(json_object_get(ev, "ph"));
        assert_true(strlen(ph) == 1 && strchr("XMi", *ph));
        take_pid(v, ev);
        if (*ph == 'M')
            continue;
        double ts = json_number_value(json_object_get(ev, "ts"));
        assert_true(ts > 0 && ts >= last);
        last = ts;
        if (*ph == 'X')
            take_span(v, ev);
        v->finished += *ph == 'i' &&
                       !strcmp(json_string_value(json_object_get(ev, "cat")), "request");
    }
    unlink(path);
}

static void run(struct view *v, int status, const char *mode, const char *transport)
{
    const char *path = e2e_temp("trace.json");
    const char *args[] = {"run",
                          "-m",
                          folder,
                          "--ids",
                          prompt,
                          "-n",
                          "5",
                          "-q",
                          "--json",
                          "--mode",
                          mode,
                          "--transport",
                          transport,
                          "--trace",
                          path,
                          "--ignore-eos",
                          "--on-handoff-failure",
                          "local-prefill",
                          NULL};
    struct e2e r;
    e2e_expect(&r, status, args);
    read_trace(v, path);
    e2e_free(&r);
}

static void test_stream(void **state)
{
    (void)state;
    static const char *const transports[] = {"tcp", "inproc"};
    for (unsigned i = 0; i < 2; i++) {
        struct view v;
        run(&v, 0, "stream", transports[i]);
        assert_int_equal(v.pids, i ? 1 : 2);
        assert_int_equal(v.steps, 4);
        assert_int_equal(v.finished, 2);
        assert_true(v.compute % LAYERS == 0 && v.compute >= LAYERS);
        for (unsigned l = 0; l < LAYERS; l++) {
            assert_true(v.compute_end[l] > 0 && v.sent[l] > 0);
            assert_true(v.landed[l] > v.sent[l]); /* one clock for both */
            assert_true(v.imported[l] > v.landed[l]);
            /* Later layers may find that the machine had better things to do. */
            if (l < LAYERS / 2 && v.sent[l] >= v.last_compute)
                fail_msg("layer %u left after all compute had ended", l);
        }
        json_decref(v.doc);
    }
}

static void test_whole_and_native(void **state)
{
    (void)state;
    struct view v;
    run(&v, 0, "whole", "tcp");
    for (unsigned l = 0; l < LAYERS; l++)
        assert_true(v.compute_end[l] > 0 && v.sent[l] >= v.last_compute);
    assert_int_equal(v.pids, 2);
    json_decref(v.doc);
    run(&v, 0, "native", "tcp");
    for (unsigned l = 0; l < LAYERS; l++)
        assert_true(v.compute_end[l] > 0 && v.sent[l] == 0 && v.landed[l] == 0);
    assert_int_equal(v.pids, 1);
    assert_int_equal(v.steps, 4);
    assert_int_equal(v.finished, 1);
    json_decref(v.doc);
}

/* What a killed producer wrote is in the file, and the consumer's own prefill after it. */
static void test_killed(void **state)
{
    (void)state;
    struct view v;
    setenv("BATON_PROBE", "producer-piece@20=kill", 1);
    run(&v, 0, "stream", "tcp");
    unsetenv("BATON_PROBE");
    assert_int_equal(v.pids, 2);
    assert_true(v.sent[5] > 0); /* the first global layer: local ones leave in the last chunk */
    assert_true(v.compute > N_IDS / 512 * LAYERS); /* of both */
    json_decref(v.doc);
}

/* Found before the model is read: here there is none. */
static void test_unwritable(void **state)
{
    (void)state;
    static const char *const options[] = {"--trace", "--logits", "--kv-save"};
    for (int i = 0; i < 3; i++) {
        const char *args[] = {"run",    "-m",       "/nonexistent/model",  "--ids", "5,6,7",
                              "--json", options[i], "/nonexistent/output", NULL};
        struct e2e r;
        e2e_expect(&r, 3, args);
        assert_non_null(
            strstr(json_string_value(e2e_get(r.json, "error.message")), "/nonexistent/output"));
        e2e_free(&r);
    }
}

static int setup(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    folder = e2e_model("gemma3-tiny");
    prompt = e2e_random_ids(&seed, N_IDS);
    return prompt ? 0 : 1;
}

static int teardown(void **state)
{
    (void)state;
    free(prompt);
    e2e_temp_remove();
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unwritable),
        cmocka_unit_test(test_stream),
        cmocka_unit_test(test_whole_and_native),
        cmocka_unit_test(test_killed),
    };
    return cmocka_run_group_tests_name("e2e trace", tests, setup, teardown);
}
