/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated consumers at the end of a route, and alone, compiled and loaded: slots exact, read
 * back from the device's own layout; the numbers of docs/architecture.md under cpu:ref's tokens;
 * lanes full. Lengths stand around chunks (128; 256 with local layers), windows, blocks and above
 * 600. */
#include "tests/e2e/e2e.h"

#define WINDOW8 "tests/golden/edge/gemma3-window8-headdim256"
enum { MOST = 32 };

/* Relative RMS of native's logits to cpu:ref's, of all cases. */
static double logits[MOST];
static size_t n_logits;

static double number(json_t *o, const char *path)
{
    json_t *x = e2e_get(o, path);
    if (!json_is_number(x))
        fail_msg("%s is no number", path);
    return json_number_value(x);
}

/* bf16 at both ends: what arrived is what was sent; what the device computes is near cpu:ref. */
static void expect_case(json_t *c, double tokens, double slots)
{
    static const char *const zero[] = {"k_rel_rms", "v_rel_rms", "native_vs_ref.argmax_mismatch",
                                       "control.native_repeat_mismatch", "control.kv_rel_rms_max"};
    print_message("%g tokens: logits %g, K %g, V %g to cpu:ref\n", tokens,
                  number(c, "native_vs_ref.logits_rel_rms"), number(c, "native_vs_ref.k_rel_rms"),
                  number(c, "native_vs_ref.v_rel_rms"));
    assert_string_equal(json_string_value(e2e_get(c, "verdict")), "pass");
    assert_true(number(c, "tokens") == tokens);
    assert_true(number(c, "slots_exact") == slots && number(c, "slots_total") == slots);
    assert_true(number(c, "second_consumer.slots_exact") == slots);
    assert_true(json_is_true(e2e_get(c, "positions_ok")));
    for (size_t i = 0; i < sizeof zero / sizeof *zero; i++)
        assert_true(number(c, zero[i]) == 0);
    assert_true(number(c, "native_vs_ref.k_rel_rms") < 1.5e-2);
    assert_true(number(c, "native_vs_ref.v_rel_rms") < 1.5e-2);
    assert_true(number(c, "vs_native.k_rel_rms") < 1.5e-2);
    assert_true(number(c, "vs_native.v_rel_rms") < 1.5e-2);
    assert_true(n_logits < MOST);
    logits[n_logits] = number(c, "native_vs_ref.logits_rel_rms");
    assert_true(logits[n_logits] > 0 && logits[n_logits] < 5e-2);
    n_logits++;
}

static void routes(void **state)
{
    static const struct {
        const char *model, *prefill, *decode, *mode, *lengths;
        double slots, tokens[8];
    } checks[] = {
        {"models/qwen3-tiny",
         "npu:rngd",
         "npu:atom-b1",
         "whole",
         "1,128,129,641",
         16,
         {1, 128, 129, 641}},
        {"models/koni-tiny", "cpu", "npu:atom-b1", "stream", "128,130", 16, {128, 130}},
        {WINDOW8,
         "npu:rngd",
         "npu:atom-b4",
         "stream",
         "7,8,9,255,256,257,769",
         8,
         {7, 8, 9, 255, 256, 257, 769}},
        {WINDOW8,
         "cpu",
         "npu:atom-b4,partition=256",
         "whole",
         "511,512,513,700",
         8,
         {511, 512, 513, 700}},
    };
    for (size_t i = 0; i < sizeof checks / sizeof *checks; i++) {
        struct e2e r;
        const char *args[] = {"check",
                              "-m",
                              test_path(checks[i].model),
                              "--prefill",
                              checks[i].prefill,
                              "--decode",
                              checks[i].decode,
                              "--mode",
                              checks[i].mode,
                              "--tokens",
                              checks[i].lengths,
                              "-n",
                              "4",
                              "--repeats",
                              "1",
                              "--json",
                              NULL};
        e2e_expect(&r, 0, args);
        for (size_t k = 0; checks[i].tokens[k] > 0; k++)
            expect_case(json_array_get(e2e_get(r.json, "cases"), k), checks[i].tokens[k],
                        checks[i].slots);
        e2e_free(&r);
    }
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Of the cases before. */
static void median(void **state)
{
    if (!n_logits)
        skip();
    qsort(logits, n_logits, sizeof *logits, by_size);
    assert_true(logits[n_logits / 2] < 1e-2);
}

/* Four requests at once in the compiled bucket: each as it is alone. */
static void four_lanes(void **state)
{
    static const char *const routes[] = {"native", "whole", "stream"};
    char config[1500];
    snprintf(config, sizeof config,
             "{\"schema\":1,\"models\":[{\"name\":\"w\",\"path\":\"%s\"}],"
             "\"routes\":[\"native\",\"whole\",\"stream\"],"
             "\"consumers\":[{\"name\":\"b4\",\"device\":\"npu:atom-b4\",\"producer\":\"npu:rngd\","
             "\"lanes\":4}],\"lengths\":[127,256,257,601],\"n\":16,\"repeats\":2,"
             "\"reference\":false}",
             test_path(WINDOW8));
    const char *path = e2e_temp("matrix.json");
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(config, f);
    fclose(f);
    struct e2e r;
    const char *args[] = {"matrix", "--config", path, "--json", NULL};
    e2e_expect(&r, 0, args);
    assert_int_equal(json_array_size(e2e_get(r.json, "cells")), 3);
    for (size_t i = 0; i < 3; i++) {
        json_t *c = json_array_get(e2e_get(r.json, "cells"), i);
        assert_string_equal(json_string_value(e2e_get(c, "route")), routes[i]);
        assert_string_equal(json_string_value(e2e_get(c, "verdict")), "pass");
        assert_string_equal(json_string_value(e2e_get(c, "vs_native")), "equal");
        assert_true(number(c, "lanes_active_max") == 4 && number(c, "full_lane_steps") > 0);
    }
    e2e_free(&r);
}

/* Programs from files, both ends: the same tokens as without; one of another model is bad input. */
static void artifacts(void **state)
{
    char rngd[200], atom[200];
    const char *path = e2e_temp("rngd.npu");
    snprintf(rngd, sizeof rngd, "npu:rngd,artifact=%s", path);
    const char *first[] = {"model",    "compile",          "-m",    test_path(WINDOW8),
                           "--device", "npu:rngd,parts=1", "--out", path,
                           NULL};
    struct e2e r, plain;
    e2e_expect(&r, 0, first);
    e2e_free(&r);
    path = e2e_temp("atom.npu");
    snprintf(atom, sizeof atom, "npu:atom-b1,artifact=%s", path);
    const char *second[] = {"model",    "compile",     "-m",     test_path(WINDOW8),
                            "--device", "npu:atom-b1", "--out",  path,
                            "--ctx",    "600",         "--json", NULL};
    e2e_expect(&r, 0, second);
    assert_int_equal(strlen(json_string_value(e2e_get(r.json, "sha256"))), 64);
    e2e_free(&r);
    const char *run[] = {"run",         "-m",     test_path(WINDOW8), "--ids",    "5,6,7,8",
                         "-n",          "8",      "--prefill",        "npu:rngd", "--decode",
                         "npu:atom-b1", "--json", "--ignore-eos",     NULL};
    e2e_expect(&plain, 0, run);
    run[8] = rngd;
    run[10] = atom;
    e2e_expect(&r, 0, run);
    assert_true(json_equal(e2e_get(r.json, "ids"), e2e_get(plain.json, "ids")));
    e2e_free(&r);
    e2e_free(&plain);
    run[2] = test_path("models/qwen3-tiny");
    e2e_expect(&r, 2, run);
    assert_non_null(strstr(r.err, "was compiled with"));
    e2e_free(&r);
}

/* Probed when they first meet, then known; one that fails is not used, unless forced, which the
 * record says. The cache is this test's own. */
static void pairing(void **state)
{
    static const struct {
        const char *prefill, *probe, *verdict; /* verdict NULL: refused */
        bool cached, forced;
    } runs[] = {
        {"npu:rngd,fault=noncausal", "never", "not_run", false, true},
        {"npu:rngd,fault=noncausal", "pairing", NULL, false, false},
        {"npu:rngd,fault=noncausal", "never", "fail", true, true},
        {"npu:rngd,width=128", "pairing", "pass", false, false},
        {"npu:rngd,width=128", "pairing", "pass", true, false},
        {"npu:rngd,width=128", "always", "pass", false, false},
    };
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        struct e2e r;
        const char *args[] = {
            "run", "-m",        test_path(WINDOW8), "--ids",   "5,6,7",       "-n",
            "2",   "--prefill", runs[i].prefill,    "--probe", runs[i].probe, "--json",
            NULL};
        e2e_expect(&r, runs[i].verdict ? 0 : 1, args);
        if (!runs[i].verdict) {
            assert_non_null(strstr(r.err, "fails the probe of causality"));
            e2e_free(&r);
            continue;
        }
        json_t *p = e2e_get(r.json, "probes.prefill");
        assert_string_equal(json_string_value(e2e_get(p, "verdict")), runs[i].verdict);
        assert_int_equal(json_is_true(e2e_get(p, "cached")), runs[i].cached);
        assert_int_equal(json_is_true(e2e_get(p, "forced")), runs[i].forced);
        assert_true(json_is_null(e2e_get(r.json, "probes.decode"))); /* cpu is not asked */
        e2e_free(&r);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(routes), cmocka_unit_test(median),
                                       cmocka_unit_test(artifacts), cmocka_unit_test(pairing),
                                       cmocka_unit_test(four_lanes)};
    setenv("XDG_CACHE_HOME", e2e_temp("cache"), 1);
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    int rc = cmocka_run_group_tests_name("e2e atom", tests, NULL, NULL);
    e2e_temp_remove();
    return rc;
}
