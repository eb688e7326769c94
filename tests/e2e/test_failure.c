/* SPDX-License-Identifier: Apache-2.0 */
/* run --on-handoff-failure: a handoff that breaks in any state is an error, or a local prefill that
 * gives the same answer and says so. */
#include <unistd.h>

#include "tests/e2e/e2e.h"

#define N_IDS 200u

static const char *folder;
static char *prompt; /* ids, as text */

/* The ids of a run with these options after the common ones. */
static void run(struct e2e *r, int status, const char *mode, const char *policy, const char *probe)
{
    const char *args[] = {"run",
                          "-m",
                          folder,
                          "--ids",
                          prompt,
                          "-n",
                          "12",
                          "--json",
                          "--ignore-eos",
                          "-q",
                          "--mode",
                          mode,
                          policy ? "--on-handoff-failure" : NULL,
                          policy,
                          NULL};
    setenv("BATON_PROBE", probe, 1);
    e2e_expect(r, status, args);
    unsetenv("BATON_PROBE");
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

struct scene {
    const char *probe;   /* where what happens */
    const char *verdict; /* with the policy: how it begins */
    int status;          /* without it */
};

/* A killed consumer has nobody to answer: tests/e2e/test_kill.c. A producer that gives up may be
 * gone before its ABORT has left, and an offer that is given up before its request was submitted is
 * unknown to that: either is told. */
static const struct scene scenes[] = {
    {"producer-offered=kill", "local-prefill: peer", 3},
    {"producer-offered=fail", "local-prefill: ", 3},
    {"producer-reserved=kill", "local-prefill: peer", 3},
    {"producer-reserved=fail", "local-prefill: ", 3},
    {"producer-piece=kill", "local-prefill: peer", 3},
    {"producer-piece@30=kill", "local-prefill: peer", 3},
    {"producer-piece@52=fail", "local-prefill: ", 3},
    {"consumer-offered=fail", "local-prefill: ", 3},
    {"consumer-reserved=fail", "local-prefill: internal", 3},
    {"consumer-piece@17=fail", "local-prefill: internal", 3},
    {"consumer-committed=fail", "local-prefill: internal", 3},
};

static void check_local(const struct e2e *r, const struct e2e *native, const struct scene *s)
{
    const char *verdict = json_string_value(e2e_get(r->json, "handoff.verdict"));
    if (strncmp(verdict, s->verdict, strlen(s->verdict)))
        fail_msg("%s: verdict '%s'", s->probe, verdict);
    assert_true(strlen(json_string_value(e2e_get(r->json, "handoff.reason"))) > 0);
    assert_true(json_equal(e2e_get(r->json, "ids"), e2e_get(native->json, "ids")));
    assert_int_equal(json_integer_value(e2e_get(r->json, "handoff.bytes")), 0);
}

static void test_every_state(void **state)
{
    (void)state;
    struct e2e native, r;
    run(&native, 0, "native", NULL, "");
    assert_int_equal(json_array_size(e2e_get(native.json, "ids")), 12);
    for (size_t i = 0; i < sizeof scenes / sizeof *scenes; i++) {
        const struct scene *s = &scenes[i];
        const char *mode = i % 2 ? "whole" : "stream";
        run(&r, 0, mode, "local-prefill", s->probe);
        check_local(&r, &native, s);
        e2e_free(&r);
        run(&r, s->status, mode, i % 2 ? "fail" : NULL, s->probe);
        assert_null(json_object_get(r.json, "ids"));
        assert_true(strlen(json_string_value(e2e_get(r.json, "error.message"))) > 0);
        e2e_free(&r);
    }
    /* With a handoff that does not fail, the policy changes nothing. */
    run(&r, 0, "stream", "local-prefill", "");
    assert_string_equal(json_string_value(e2e_get(r.json, "handoff.verdict")), "verified");
    assert_null(json_object_get(json_object_get(r.json, "handoff"), "reason"));
    assert_true(json_equal(e2e_get(r.json, "ids"), e2e_get(native.json, "ids")));
    e2e_free(&r);
    e2e_free(&native);
}

/* What a producer fails by is told once, in its words, with --json too. */
static void test_told_once(void **state)
{
    (void)state;
    struct e2e r;
    run(&r, 3, "stream", NULL, "producer-piece@9=fail");
    const char *message = json_string_value(e2e_get(r.json, "error.message"));
    assert_non_null(strstr(message, "gave it up"));
    assert_null(strstr(message, "above"));
    const char *line = strchr(r.err, '\n');
    if (!line || line[1])
        fail_msg("not one line: %s", r.err);
    e2e_free(&r);
}

/* A stopped producer is dead after its silence, and gone when the run is. */
static void test_stopped(void **state)
{
    (void)state;
    const struct scene s = {"producer-piece@9=stop", "local-prefill: peer", 3};
    struct e2e native, r;
    run(&native, 0, "native", NULL, "");
    run(&r, 0, "stream", "local-prefill", s.probe);
    check_local(&r, &native, &s);
    e2e_free(&r);
    e2e_free(&native);
}

/* People are told as well. */
static void test_human(void **state)
{
    (void)state;
    const char *args[] = {"run",           "-m", folder, "--ids",
                          prompt,          "-n", "3",    "--on-handoff-failure",
                          "local-prefill", NULL};
    struct e2e r;
    setenv("BATON_PROBE", "producer-piece@3=kill", 1);
    e2e_expect(&r, 0, args);
    unsetenv("BATON_PROBE");
    assert_non_null(strstr(r.err, "local-prefill: peer"));
    assert_non_null(strstr(r.err, "producer"));
    e2e_free(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_human),
        cmocka_unit_test(test_every_state),
        cmocka_unit_test(test_told_once),
        cmocka_unit_test(test_stopped),
    };
    return cmocka_run_group_tests_name("e2e failure", tests, setup, teardown);
}
