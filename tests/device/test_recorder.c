/* SPDX-License-Identifier: Apache-2.0 */
/* The forward functions of all families, recorded as a plan of width 128 and replayed with padding,
 * against the direct run: equal bits in logits and cache. */
#include "device/device_priv.h"
#include "model/model.h"

#include "recorder.h"
#include "side.h"

/* Rows [at, at + n) of the sequence; logits of the first and the last of them. */
static void side_run(struct side *s, const struct model_config *c, const int32_t *ids, uint32_t at,
                     uint32_t n)
{
    uint32_t rows[2] = {0, n - 1};
    uint64_t id = 0;
    struct baton_span span = {0, n, at, 0, s->pages.views};
    struct baton_batch b = {0,    ids + at,      n,         &span,       1,
                            rows, n > 1 ? 2 : 1, s->logits, count_layer, s};
    memset(s->logits, 0xFF, 2 * c->vocab * sizeof(float));
    s->layers_done = 0;
    pages_set_end(&s->pages, at);
    test_ok(device_submit(s->program, &b, &id, &err), &err);
    test_ok(device_wait(s->program, id, UINT64_MAX, &err), &err);
    assert_int_equal(s->layers_done, c->n_layers);
}

static void same_cache(const struct side *a, const struct side *b, const struct model_config *c,
                       uint32_t n)
{
    for (uint32_t l = 0; l < c->n_layers; l++)
        for (uint32_t i = 0; i < 2 * n * c->kv_heads; i++)
            for (uint32_t d = 0; d < c->head_dim; d++) {
                uint32_t p = (i >> 1) / c->kv_heads, h = (i >> 1) % c->kv_heads;
                assert_true(pages_get(&a->pages, l, (int)(i & 1), p, h, d) ==
                            pages_get(&b->pages, l, (int)(i & 1), p, h, d));
            }
}

/* A sequence in chunks of the given sizes (ends with 0) on both sides, in different layouts. */
static void same_run(struct side *direct, struct side *recorded, const struct model_config *c,
                     const uint32_t *chunks, uint64_t *seed)
{
    int32_t ids[256];
    uint32_t at = 0, n = 0;
    for (uint32_t i = 0; i < 256; i++)
        ids[i] = (int32_t)test_range(seed, 0, c->vocab - 1);
    for (uint32_t i = 0; chunks[i]; i++)
        n += chunks[i];
    pages_open(&direct->pages, seed, BATON_F32, c->n_layers, c->kv_heads, c->head_dim, 64, n);
    pages_open(&recorded->pages, seed, BATON_F32, c->n_layers, c->kv_heads, c->head_dim, 16, n);
    for (; *chunks; at += *chunks++) {
        side_run(direct, c, ids, at, *chunks);
        side_run(recorded, c, ids, at, *chunks);
        assert_true(isfinite(direct->logits[0]));
        assert_memory_equal(direct->logits, recorded->logits, 2 * c->vocab * sizeof(float));
    }
    same_cache(direct, recorded, c, at);
    pages_check_poison(&recorded->pages, at); /* no padding row was stored */
    pages_close(&direct->pages);
    pages_close(&recorded->pages);
}

static void family(const char *path)
{
    uint64_t seed = test_seed();
    const uint32_t ways[][3] = {{5, 0}, {127, 1, 0}, {test_range(&seed, 2, 126), 128, 0}};
    struct side direct, recorded;
    struct model *m = NULL;
    struct device *d = NULL;
    test_ok(model_open(test_path(path), &m, &err), &err);
    const struct model_config *c = model_config_of(m);
    test_ok(device_open("cpu:ref", &d, &err), &err);
    test_ok(side_open(&direct, d, m), &err);
    test_ok(recorder_open((int32_t)test_range(&seed, 0, c->vocab - 1), &d, &err), &err);
    test_ok(side_open(&recorded, d, m), &err);
    assert_true(recorder_steps(recorded.program) > 10 * c->n_layers);
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        same_run(&direct, &recorded, c, ways[i], &seed);
    side_close(&direct);
    side_close(&recorded);
    model_close(m);
}

static void records_llama(void **state)
{
    family("models/koni-tiny");
    family("tests/golden/edge/llama-attention-bias");
}

static void records_qwen3(void **state)
{
    family("models/qwen3-tiny");
}

static void records_gemma3(void **state)
{
    family("models/gemma3-tiny");
    family("tests/golden/edge/gemma3-window8-headdim256");
}

static void refuses_wide_batches(void **state)
{
    struct device *d = NULL;
    test_ok(recorder_open(0, &d, &err), &err);
    assert_int_equal(device_caps(d)->max_rows, RECORDER_WIDTH);
    assert_int_equal(device_caps(d)->max_lanes, 1);
    assert_false(device_caps(d)->dynamic);
    device_close(d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refuses_wide_batches),
        cmocka_unit_test(records_llama),
        cmocka_unit_test(records_qwen3),
        cmocka_unit_test(records_gemma3),
    };
    return cmocka_run_group_tests_name("device recorder", tests, NULL, NULL);
}
