/* SPDX-License-Identifier: Apache-2.0 */
/* Probes on the emulated devices: none fails without a fault, each planted fault is found by the
 * probe that is there for it, with a place and a reason. */
#include "verify/probe.h"

#include "../test.h"

static struct baton_error err;

static struct baton_model *open_model(void)
{
    const struct baton_model_options o = {
        .struct_size = sizeof o, .path = test_path("tests/golden/edge/gemma3-window8-headdim256")};
    struct baton_model *m = NULL;
    test_ok(baton_model_open(&o, &m, &err), &err);
    return m;
}

static void clean(void **state)
{
    struct baton_model *m = open_model();
    for (int i = 0; i < VERIFY_PROBES; i++) {
        struct verify_finding f;
        test_ok(verify_probe_run(m, "npu:rngd", (enum verify_probe)i, 2, &f, &err), &err);
        print_message("%s: %g (limit %g) %s\n", verify_probe_names[i], f.value, f.limit, f.why);
        assert_int_equal(f.verdict, i == VERIFY_LANES ? VERIFY_PROBE_NA : VERIFY_PROBE_PASS);
    }
    baton_model_close(m);
}

static void each_fault_is_found(void **state)
{
    static const struct {
        const char *fault;
        enum verify_probe probe;
        uint32_t layer;
        const char *word;
    } faults[] = {
        {"weight-stride", VERIFY_LAYOUT, 0, "strides"},
        {"kv-block-order", VERIFY_LAYOUT, 0, "another order"},
        {"noncausal", VERIFY_CAUSALITY, 3, "later positions"},
        {"window-off-by-one", VERIFY_WINDOW, 1, "window of 8"},
        {"position-shift", VERIFY_WINDOW, 0, "shifted"},
        {"pad-leak", VERIFY_PADDING, 1, "padding"},
        {"rope-interleave", VERIFY_PRECISION, 0, "rotation"},
        {"norm-offset", VERIFY_PRECISION, 0, "norm"},
        {"global-as-local", VERIFY_PRECISION, 3, "layer before"}, /* layer 2 is global */
    };
    struct baton_model *m = open_model();
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        char device[64];
        struct verify_finding f;
        snprintf(device, sizeof device, "npu:rngd,fault=%s", faults[i].fault);
        test_ok(verify_probe_run(m, device, faults[i].probe, 2, &f, &err), &err);
        print_message("%s: layer %u %s @%u %g: %s\n", faults[i].fault, f.layer, f.tensor,
                      f.position, f.value, f.why);
        assert_int_equal(f.verdict, VERIFY_PROBE_FAIL);
        assert_int_equal(f.layer, faults[i].layer);
        assert_non_null(strstr(f.why, faults[i].word));
        if (i == 0)
            assert_true(f.value > 1.2 && f.value < 1.6);
    }
    baton_model_close(m);
}

static void lanes(void **state)
{
    static const struct {
        const char *device;
        enum verify_probe_verdict verdict;
        int32_t lane;
        const char *word;
    } cases[] = {
        {"npu:atom-b4", VERIFY_PROBE_PASS, 0, ""},
        {"cpu", VERIFY_PROBE_PASS, 0, ""},
        {"npu:atom-b4,fault=lane-swap", VERIFY_PROBE_FAIL, 1, "another lane's"},
        {"npu:atom-b4,fault=lane-bleed", VERIFY_PROBE_FAIL, 0, "other logits"},
        {"npu:atom-b1", VERIFY_PROBE_NA, -1, "no lanes"},
    };
    struct baton_model *m = open_model();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct verify_finding f;
        test_ok(verify_probe_run(m, cases[i].device, VERIFY_LANES, 2, &f, &err), &err);
        print_message("%s: lane %d, %g: %s\n", cases[i].device, f.lane, f.value, f.why);
        assert_int_equal(f.verdict, cases[i].verdict);
        assert_int_equal(f.lane, cases[i].lane);
        assert_non_null(strstr(f.why, cases[i].word));
    }
    baton_model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(clean),
        cmocka_unit_test(lanes),
        cmocka_unit_test(each_fault_is_found),
    };
    return cmocka_run_group_tests_name("verify probe", tests, NULL, NULL);
}
