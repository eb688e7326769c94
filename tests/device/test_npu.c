/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated static-graph producer against cpu: every family, odd lengths, parts, widths; nothing
 * is stored behind the prompt; what it refuses; and every fault that can be planted is silent and
 * changes numbers. */
#include "device/device.h"
#include "model/model.h"

#include "cpu_pages.h"
#include "side.h"

/* A side with the device of that name. */
static int named_open(struct side *s, const char *device, const struct model *m)
{
    struct device *d = NULL;
    test_ok(device_open(device, &d, &err), &err);
    return side_open(s, d, m);
}

static int submit(struct side *s, const int32_t *ids, uint32_t at, uint32_t n)
{
    uint32_t row = n - 1;
    uint64_t id = 0;
    struct baton_span span = {0, n, at, 0, s->pages.views};
    struct baton_batch b = {0, ids + at, n, &span, 1, &row, 1, s->logits, count_layer, s};
    s->layers_done = 0;
    pages_set_end(&s->pages, at);
    return device_submit(s->program, &b, &id, &err);
}

/* Prefill n ids; cpu takes them in pieces. */
static void run(struct side *s, const struct model_config *c, const int32_t *ids, uint32_t n,
                uint64_t *seed)
{
    uint32_t most = device_caps(s->device)->max_rows;
    cpu_pages_open(&s->pages, seed, c->n_layers, c->kv_heads, c->head_dim, n);
    for (uint32_t at = 0, step; at < n; at += step) {
        step = n - at < most ? n - at : most;
        test_ok(submit(s, ids, at, step), &err);
        assert_int_equal(s->layers_done, c->n_layers);
    }
    pages_check_poison(&s->pages, n);
}

/* Relative RMS of all K and V of two sides. */
static double kv_difference(const struct side *a, const struct side *b,
                            const struct model_config *c, uint32_t n)
{
    double d = 0, r = 0;
    for (uint32_t l = 0; l < c->n_layers; l++)
        for (uint32_t i = 0; i < 2 * n * c->kv_heads; i++)
            for (uint32_t k = 0; k < c->head_dim; k++) {
                uint32_t p = (i >> 1) / c->kv_heads, h = (i >> 1) % c->kv_heads;
                double x = pages_get(&a->pages, l, (int)(i & 1), p, h, k);
                double y = pages_get(&b->pages, l, (int)(i & 1), p, h, k);
                assert_true(isfinite(x));
                d += (x - y) * (x - y);
                r += y * y;
            }
    return sqrt(d / r);
}

static void random_ids(int32_t *ids, uint32_t n, uint32_t vocab, uint64_t *seed)
{
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)test_range(seed, 0, vocab - 1);
}

/* Compares K and V, and returns how far the logits are apart. Of random tokens these are now and
 * then nearly flat, and bf16's noise a tenth of them: no limit for a single case. */
static double compare(const struct model *m, const char *device, uint32_t n, uint64_t *seed)
{
    const struct model_config *c = model_config_of(m);
    struct side cpu, npu;
    int32_t *ids = calloc(n, sizeof *ids);
    random_ids(ids, n, c->vocab, seed);
    assert_int_equal(named_open(&cpu, "cpu", m), 0);
    assert_int_equal(named_open(&npu, device, m), 0);
    run(&cpu, c, ids, n, seed);
    run(&npu, c, ids, n, seed);
    double kv = kv_difference(&npu, &cpu, c, n);
    double logits = test_rel_rms(npu.logits, cpu.logits, c->vocab);
    print_message("%s, %u tokens: kv %.2e logits %.2e\n", device, n, kv, logits);
    assert_true(kv < 1.5e-2 && isfinite(logits));
    pages_close(&cpu.pages);
    pages_close(&npu.pages);
    side_close(&cpu);
    side_close(&npu);
    free(ids);
    return logits;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void equals_cpu(void **state)
{
    static const char *const models[] = {
        "models/qwen3-tiny", "models/koni-tiny", "models/gemma3-tiny",
        "tests/golden/edge/gemma3-window8-headdim256", "tests/golden/edge/llama-attention-bias"};
    enum { MODELS = sizeof models / sizeof *models };
    double logits[3 * MODELS], *next = logits;
    uint64_t seed = test_seed();
    for (size_t i = 0; i < MODELS; i++) {
        struct model *m = NULL;
        char device[40];
        test_ok(model_open(test_path(models[i]), &m, &err), &err);
        snprintf(device, sizeof device, "npu:rngd,parts=%u", test_range(&seed, 1, 30));
        *next++ = compare(m, device, 1, &seed);
        *next++ = compare(m, device, test_range(&seed, 2, 127), &seed);
        *next++ = compare(m, "npu:rngd", 128, &seed);
        model_close(m);
    }
    qsort(logits, 3 * MODELS, sizeof *logits, by_size);
    assert_true(logits[3 * MODELS / 2] < 2e-2);
}

static void wide(void **state)
{
    uint64_t seed = test_seed();
    struct model *m = NULL;
    test_ok(model_open(test_path("models/qwen3-tiny"), &m, &err), &err);
    compare(m, "npu:rngd,parts=1", test_range(&seed, 129, 1024), &seed);
    compare(m, "npu:rngd,width=2048", 65, &seed);
    model_close(m);
}

/* Finite, without an error, and not what it should be. */
static void faults_are_silent(void **state)
{
    static const char *const faults[] = {"weight-stride",   "kv-block-order", "noncausal",
                                         "pad-leak",        "position-shift", "window-off-by-one",
                                         "rope-interleave", "norm-offset",    "global-as-local"};
    uint64_t seed = test_seed();
    struct model *m = NULL;
    int32_t ids[100];
    struct side good, bad;
    test_ok(model_open(test_path("tests/golden/edge/gemma3-window8-headdim256"), &m, &err), &err);
    const struct model_config *c = model_config_of(m);
    random_ids(ids, 100, c->vocab, &seed);
    assert_int_equal(named_open(&good, "npu:rngd", m), 0);
    run(&good, c, ids, 100, &seed);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        char device[64];
        snprintf(device, sizeof device, "npu:rngd,fault=%s", faults[i]);
        assert_int_equal(named_open(&bad, device, m), 0);
        run(&bad, c, ids, 100, &seed);
        double d = kv_difference(&bad, &good, c, 100);
        print_message("%-18s kv differs by %.3f\n", faults[i], d);
        assert_true(d > 1e-3);
        pages_close(&bad.pages);
        side_close(&bad);
    }
    pages_close(&good.pages);
    side_close(&good);
    model_close(m);
}

static void refuses(void **state)
{
    struct device *d = NULL;
    struct model *m = NULL;
    struct side s;
    uint64_t seed = test_seed();
    int32_t ids[2] = {1, 1};
    test_fails(device_open("npu:rngd,width=100", &d, &err), BATON_ERR_USAGE, "128, 1024", &err);
    test_fails(device_open("npu:rngd,parts=0", &d, &err), BATON_ERR_USAGE, "parts", &err);
    test_fails(device_open("npu:rngd,fault=smoke", &d, &err), BATON_ERR_USAGE, "pad-leak", &err);
    test_fails(device_open("npu:rngd,isa=avx2", &d, &err), BATON_ERR_USAGE, "width", &err);
    test_ok(model_open(test_path("models/qwen3-tiny"), &m, &err), &err);
    assert_int_equal(named_open(&s, "npu:rngd,fault=window-off-by-one", m), BATON_ERR_UNSUPPORTED);
    side_close(&s);
    assert_int_equal(named_open(&s, "npu:rngd", m), 0);
    const struct model_config *c = model_config_of(m);
    cpu_pages_open(&s.pages, &seed, c->n_layers, c->kv_heads, c->head_dim, 2);
    test_fails(submit(&s, ids, 1, 1), BATON_ERR_UNSUPPORTED, "whole prompts", &err);
    pages_close(&s.pages);
    side_close(&s);
    model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_cpu),
        cmocka_unit_test(wide),
        cmocka_unit_test(faults_are_silent),
        cmocka_unit_test(refuses),
    };
    return cmocka_run_group_tests_name("device npu", tests, NULL, NULL);
}
