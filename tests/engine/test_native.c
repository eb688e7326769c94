/* SPDX-License-Identifier: Apache-2.0 */
/* One engine, one device: generation and cache against the goldens, bad input, limits. */
#include <jansson.h>

#include "rig.h"

#define REF_MARGIN 0.001f
#define FAST_MARGIN 0.4f
#define CTX 2200u

struct golden {
    struct model_tensors *t;
    json_t *json;
};

static struct golden golden_open(const char *model)
{
    struct golden g;
    struct baton_error e;
    char path[96];
    snprintf(path, sizeof path, "tests/golden/%s/golden.safetensors", model);
    test_ok(model_tensors_open(test_path(path), &g.t, &e), &e);
    snprintf(path, sizeof path, "tests/golden/%s/golden.json", model);
    test_ok(base_json_load(test_path(path), 1 << 22, &g.json, &e), &e);
    return g;
}

static void golden_close(struct golden *g)
{
    model_tensors_close(g->t);
    json_decref(g->json);
}

static const struct model_tensor *golden_get(const struct golden *g, const char *name,
                                             const char *what)
{
    char full[64];
    snprintf(full, sizeof full, "%s.%s", name, what);
    const struct model_tensor *t = model_tensors_find(g->t, full);
    if (!t)
        fail_msg("no golden %s", full);
    return t;
}

static int eos_at(const struct golden *g, const char *name)
{
    json_t *c = json_object_get(json_object_get(g->json, "cases"), name);
    return (int)json_integer_value(json_object_get(c, "eos_at"));
}

/* Tokens equal up to the end token as long as the golden margin is above the device's. */
static void check_tokens(const struct golden *g, const char *name, const struct rig_run *run,
                         enum baton_finish finish, float margin)
{
    const int32_t *want = golden_get(g, name, "greedy_ids")->data;
    const float *margins = golden_get(g, name, "margins")->data;
    int end = eos_at(g, name);
    uint32_t n = end < 0 ? 32 : (uint32_t)end + 1;
    for (uint32_t i = 0; i < n; i++) {
        if (i < run->n && run->ids[i] == want[i])
            continue;
        if (margins[i] > margin)
            fail_msg("%s: token %u of %u is %d, golden %d with margin %g", name, i, run->n,
                     i < run->n ? run->ids[i] : -1, want[i], margins[i]);
        return; /* another continuation from here on */
    }
    assert_int_equal(run->n, n);
    assert_int_equal(finish, end < 0 ? BATON_LENGTH : BATON_STOP);
}

/* Saved slots against the golden's stored positions. */
static void check_saved(const struct golden *g, const char *name, const char *path,
                        const struct model_config *c, double limit)
{
    struct model_tensors *saved;
    struct baton_error e;
    double worst = 0;
    test_ok(model_tensors_open(path, &saved, &e), &e);
    for (uint32_t l = 0; l < c->n_layers; l++) {
        const char *kind = c->window && c->local[l] ? "positions.sliding_attention"
                                                    : "positions.full_attention";
        const struct model_tensor *at = golden_get(g, name, kind);
        char key[32];
        snprintf(key, sizeof key, "positions.%u", l);
        const struct model_tensor *have = model_tensors_find(saved, key);
        assert_non_null(have);
        for (int kv = 0; kv < 2; kv++) {
            snprintf(key, sizeof key, "%c.%u", kv ? 'v' : 'k', l);
            const struct model_tensor *ours = model_tensors_find(saved, key);
            const struct model_tensor *theirs = golden_get(g, name, key);
            size_t n = theirs->bytes / 4;
            float *mine = calloc(n, sizeof *mine);
            uint64_t stored = theirs->shape[1], dim = theirs->shape[2];
            for (uint64_t i = 0; i < n; i++) {
                uint64_t h = i / (stored * dim), p = i / dim % stored, d = i % dim;
                int64_t row = ((const int32_t *)at->data)[p] - ((const int32_t *)have->data)[0];
                assert_true(row >= 0 && (uint64_t)row < ours->shape[1]);
                size_t j = (h * ours->shape[1] + (uint64_t)row) * dim + d;
                if (ours->dtype == BATON_F32) {
                    mine[i] = ((const float *)ours->data)[j];
                } else {
                    uint32_t bits = (uint32_t)((const uint16_t *)ours->data)[j] << 16;
                    memcpy(&mine[i], &bits, 4);
                }
            }
            double rms = test_rel_rms(mine, theirs->data, n);
            if (!(rms < limit))
                fail_msg("%s %s: relative RMS %g", name, key, rms);
            worst = rms > worst ? rms : worst;
            free(mine);
        }
    }
    print_message("%s: worst slot %.2g\n", name, worst);
    model_tensors_close(saved);
}

static void run_case(struct baton_model *m, const char *device, const struct golden *g,
                     const char *name, struct baton_engine *en)
{
    bool ref = strcmp(device, "cpu:ref") == 0;
    const struct model_tensor *ids = golden_get(g, name, "input_ids");
    struct baton_error e;
    struct rig_run run;
    char path[64];
    snprintf(path, sizeof path, "/tmp/baton-test-engine-%d.safetensors", (int)getpid());
    const struct baton_request_options o = {
        .struct_size = sizeof o,
        .ids = ids->data,
        .n_ids = ids->bytes / 4,
        .max_tokens = 32,
        .kv_save = path,
        .want_logits = true,
    };
    struct baton_request *r = rig_submit(en, &o);
    test_ok(rig_pull(r, &run, baton_model_vocab(m), &e), &e);
    struct baton_stats s = rig_stats(r);
    check_tokens(g, name, &run, s.finish, ref ? REF_MARGIN : FAST_MARGIN);
    double rms = test_rel_rms(run.rows, golden_get(g, name, "logits")->data, baton_model_vocab(m));
    print_message("%s %s: logits %.2g\n", device, name, rms);
    assert_true(rms < (ref ? 3e-5 : 5e-2));
    check_saved(g, name, path, model_config_of(engine_model(m)), ref ? 6e-5 : 1.5e-2);
    unlink(path);
    assert_int_equal(s.prompt_tokens, o.n_ids);
    assert_int_equal(s.prefilled_tokens, o.n_ids);
    assert_int_equal(s.output_tokens, run.n);
    assert_int_equal(s.global_first, 0);
    assert_int_equal(s.global_last, (int)o.n_ids - 1);
    assert_true(s.prefill_ns > 0 && s.ttft_ns >= s.prefill_ns && s.itl_p99_ns >= s.itl_p50_ns);
    assert_int_equal(s.slots, 0);
    assert_string_equal(s.digest, "");
    rig_run_free(&run);
    baton_request_close(r);
    assert_int_equal(engine_blocks_used(en), 0);
}

static void goldens_on(const char *device, const char *const *cases)
{
    for (int i = 0; i < RIG_MODELS; i++) {
        struct baton_model *m = rig_model(rig_models[i]);
        struct golden g = golden_open(rig_models[i]);
        struct baton_engine *en = rig_engine(m, BATON_BOTH, device, 2, CTX, 0, -1);
        for (int k = 0; cases[k]; k++)
            run_case(m, device, &g, cases[k], en);
        baton_engine_close(en);
        golden_close(&g);
        baton_model_close(m);
    }
}

static void test_goldens_ref(void **state)
{
    static const char *const cases[] = {"p1", "p7", "count", "p128", NULL};
    (void)state;
    goldens_on("cpu:ref", RIG_SHORT ? (const char *const[]){"p7", NULL} : cases);
}

static void test_goldens_fast(void **state)
{
    static const char *const cases[] = {"p1", "p7", "count", "p128", "p700", "p2048", NULL};
    (void)state;
    if (strcmp(rig_device(), "cpu")) {
        print_message("skipped: no device cpu in this build\n");
        skip();
    }
    goldens_on("cpu", RIG_SHORT ? (const char *const[]){"p128", NULL} : cases);
}

/* ---- bad input ---------------------------------------------------------------------------- */

static void test_bad_requests(void **state)
{
    (void)state;
    struct baton_model *m = rig_model("qwen3-tiny");
    struct baton_engine *en = rig_engine(m, BATON_BOTH, "cpu:ref", 1, 64, 0, -1);
    struct baton_request *r = NULL;
    struct baton_error e;
    int32_t ids[80] = {1, 2, 3};
    struct baton_request_options o = {.struct_size = sizeof o, .ids = ids, .n_ids = 0};
    test_fails(baton_submit(en, &o, &r, &e), BATON_ERR_INPUT, "empty", &e);
    o.n_ids = 64;
    test_fails(baton_submit(en, &o, &r, &e), BATON_ERR_INPUT, "64 tokens", &e);
    o.n_ids = SIZE_MAX;
    test_fails(baton_submit(en, &o, &r, &e), BATON_ERR_INPUT, "no room", &e);
    o.n_ids = 60;
    o.max_tokens = 5;
    test_fails(baton_submit(en, &o, &r, &e), BATON_ERR_INPUT, "60 prompt and 5 new", &e);
    o.max_tokens = UINT32_MAX;
    test_fails(baton_submit(en, &o, &r, &e), BATON_ERR_INPUT, "do not fit", &e);
    o.max_tokens = 1;
    ids[2] = (int32_t)baton_model_vocab(m);
    test_fails(baton_submit(en, &o, &r, &e), BATON_ERR_INPUT, "prompt id 2", &e);
    ids[2] = -1;
    test_fails(baton_submit(en, &o, &r, &e), BATON_ERR_INPUT, "id 2 is -1", &e);
    ids[2] = 3;
    o.force = (const int32_t[]){5, -7};
    o.n_force = 2;
    test_fails(baton_submit(en, &o, &r, &e), BATON_ERR_INPUT, "forced id 1", &e);
    o.n_force = 0;
    o.temperature = -1;
    test_fails(baton_submit(en, &o, &r, &e), BATON_ERR_USAGE, "temperature", &e);
    o.temperature = 0;
    o.struct_size = 0;
    test_fails(baton_submit(en, &o, &r, &e), BATON_ERR_USAGE, "struct_size", &e);
    o.struct_size = sizeof o;
    o.kv_save = "/nonexistent/folder/x.safetensors";
    r = rig_submit(en, &o);
    struct baton_token t;
    assert_int_equal(baton_next(r, &t, -1, &e), BATON_ERR_IO);
    assert_int_equal(rig_stats(r).finish, BATON_FAILED);
    baton_request_close(r);
    assert_int_equal(engine_blocks_used(en), 0);
    baton_engine_close(en);
    baton_model_close(m);
}

static void test_bad_engines(void **state)
{
    (void)state;
    struct baton_model *m = rig_model("qwen3-tiny");
    struct baton_engine *en = NULL;
    struct baton_error e;
    struct baton_engine_options o = {.struct_size = sizeof o, .device = "cpu:ref", .lanes = 9};
    test_fails(baton_engine_open(m, &o, &en, &e), BATON_ERR_USAGE, "9 lanes", &e);
    o.lanes = 1;
    o.ctx = 1u << 30;
    test_fails(baton_engine_open(m, &o, &en, &e), BATON_ERR_USAGE, "context", &e);
    o.ctx = 64;
    o.chunk = 1u << 30;
    test_fails(baton_engine_open(m, &o, &en, &e), BATON_ERR_USAGE, "chunks", &e);
    o.chunk = 0;
    o.device = "abacus";
    test_fails(baton_engine_open(m, &o, &en, &e), BATON_ERR_USAGE, "abacus", &e);
    o.device = "cpu:ref";
    o.role = BATON_CONSUMER;
    o.peer_fd = 12345;
    test_fails(baton_engine_open(m, &o, &en, &e), BATON_ERR_USAGE, "peer_fd", &e);
    o.role = (enum baton_role)7;
    test_fails(baton_engine_open(m, &o, &en, &e), BATON_ERR_USAGE, "role", &e);
    struct baton_model *none = NULL;
    struct baton_model_options mo = {.struct_size = sizeof mo, .path = "/nonexistent"};
    assert_true(baton_model_open(&mo, &none, &e) < 0);
    mo.path = test_path("models/qwen3-tiny");
    mo.pin = "sha256:12";
    test_fails(baton_model_open(&mo, &none, &e), BATON_ERR_USAGE, "pin", &e);
    mo.pin = "sha256:0000000000000000000000000000000000000000000000000000000000000000";
    test_fails(baton_model_open(&mo, &none, &e), BATON_ERR_MISMATCH, "pin", &e);
    assert_null(none);
    baton_model_close(m);
}

static void test_queue_full(void **state)
{
    (void)state;
    struct baton_model *m = rig_model("qwen3-tiny");
    struct baton_engine *en = rig_engine(m, BATON_BOTH, "cpu:ref", 1, 2048, 0, -1);
    struct baton_request *r[65], *more = NULL;
    struct baton_error e;
    const int32_t ids[] = {1, 2, 3};
    const struct baton_request_options o = {
        .struct_size = sizeof o, .ids = ids, .n_ids = 3, .ignore_eos = true};
    for (int i = 0; i < 65; i++)
        r[i] = rig_submit(en, &o);
    test_fails(baton_submit(en, &o, &more, &e), BATON_ERR_BUSY, "64", &e);
    baton_request_close(r[64]);
    r[64] = rig_submit(en, &o);
    for (int i = 0; i < 65; i += 2)
        baton_request_close(r[i]);
    baton_engine_close(en); /* with requests still open */
    for (int i = 1; i < 65; i += 2) {
        struct baton_token t;
        int rc;
        while ((rc = baton_next(r[i], &t, -1, &e)) == 1)
            continue;
        assert_int_equal(rc, 0);
        assert_int_equal(rig_stats(r[i]).finish, BATON_CANCELLED);
        baton_request_close(r[i]);
    }
    baton_model_close(m);
}

/* ---- semantics ---------------------------------------------------------------------------- */

static void test_force_min_stop(void **state)
{
    (void)state;
    struct baton_model *m = rig_model("qwen3-tiny");
    const struct model_config *c = model_config_of(engine_model(m));
    struct golden g = golden_open("qwen3-tiny");
    struct baton_engine *en = rig_engine(m, BATON_BOTH, "cpu:ref", 1, 1024, 0, -1);
    const struct model_tensor *ids = golden_get(&g, "p128", "input_ids");
    const int32_t *greedy = golden_get(&g, "p128", "greedy_ids")->data;
    const float *margins = golden_get(&g, "p128", "margins")->data;
    struct baton_error e;
    struct rig_run run;
    struct baton_request_options o = {
        .struct_size = sizeof o,
        .ids = ids->data,
        .n_ids = ids->bytes / 4,
        .force = greedy,
        .n_force = 32,
        .want_logits = true,
    };
    struct baton_request *r = rig_submit(en, &o);
    struct baton_token t;
    uint32_t n = 0;
    while (baton_next(r, &t, -1, &e) == 1) {
        assert_int_equal(t.id, greedy[n]);
        assert_non_null(t.logits);
        if (margins[n] > REF_MARGIN)
            assert_int_equal(t.argmax, greedy[n]);
        assert_true(fabsf(t.margin - margins[n]) < 1e-2f);
        n++;
    }
    assert_int_equal(n, 32); /* past the end token too */
    assert_int_equal(rig_stats(r).finish, BATON_LENGTH);
    baton_request_close(r);

    /* min_tokens keeps the end away: one token longer than the golden answer, at least. */
    int end = eos_at(&g, "p128");
    assert_true(end > 0);
    o.n_force = 0;
    o.force = NULL;
    o.want_logits = false;
    o.min_tokens = (uint32_t)end + 3;
    o.max_tokens = (uint32_t)end + 40;
    r = rig_submit(en, &o);
    test_ok(rig_pull(r, &run, 0, &e), &e);
    assert_true(run.n > o.min_tokens);
    for (uint32_t i = 0; i < o.min_tokens; i++)
        for (uint32_t k = 0; k < c->n_eos; k++)
            assert_int_not_equal(run.ids[i], c->eos[k]);
    baton_request_close(r);

    o.min_tokens = 0;
    o.max_tokens = 32;
    o.ignore_eos = true;
    r = rig_submit(en, &o);
    test_ok(rig_pull(r, &run, 0, &e), &e);
    assert_int_equal(run.n, 32);
    assert_int_equal(run.ids[end], greedy[end]);
    baton_request_close(r);
    baton_engine_close(en);
    golden_close(&g);
    baton_model_close(m);
}

static void test_sampling_repeats(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    struct baton_model *m = rig_model("koni-tiny");
    int32_t ids[9];
    struct rig_run a, b, other;
    rig_prompt(&seed, baton_model_vocab(m), ids, 9);
    struct baton_request_options o = {
        .struct_size = sizeof o,
        .ids = ids,
        .n_ids = 9,
        .max_tokens = 24,
        .ignore_eos = true,
        .temperature = 1.5f,
        .seed = test_random(&seed),
    };
    rig_alone(m, "cpu:ref", 128, 4, &o, &a);
    rig_alone(m, "cpu:ref", 128, 9, &o, &b);
    rig_equal(&a, &b, 0, "same seed");
    o.seed++;
    rig_alone(m, "cpu:ref", 128, 9, &o, &other);
    assert_memory_not_equal(a.ids, other.ids, sizeof a.ids);
    baton_model_close(m);
}

static void test_timeout_and_pause(void **state)
{
    (void)state;
    struct baton_model *m = rig_model("qwen3-tiny");
    struct baton_engine *en = rig_engine(m, BATON_BOTH, "cpu:ref", 1, 256, 0, -1);
    const int32_t ids[] = {1, 2, 3};
    struct baton_error e;
    struct baton_token t;
    struct rig_run slow = {0}, quick;
    const struct baton_request_options o = {
        .struct_size = sizeof o,
        .ids = ids,
        .n_ids = 3,
        .max_tokens = 40,
        .ignore_eos = true,
        .want_logits = true,
    };
    struct baton_request *r = rig_submit(en, &o);
    /* A caller that is slow pauses the lane, and loses nothing. */
    while (rig_stats(r).output_tokens < 8)
        base_sleep_ns(1000000);
    base_sleep_ns(50000000);
    assert_int_equal(rig_stats(r).output_tokens, 8);
    while (baton_next(r, &t, -1, &e) == 1)
        rig_take(&slow, &t, baton_model_vocab(m));
    baton_request_close(r);
    rig_alone(m, "cpu:ref", 256, 0, &o, &quick);
    rig_equal(&slow, &quick, baton_model_vocab(m), "a slow caller");
    rig_run_free(&slow);
    rig_run_free(&quick);
    baton_engine_close(en);
    baton_model_close(m);
}

/* An id of the model that its tokenizer lacks is no text; one that the model lacks is an error. */
static void test_detokenize(void **state)
{
    (void)state;
    static const int32_t ids[] = {4085, 20, 4095, 4096};
    struct baton_error e;
    struct baton_model *m = rig_model("qwen3-tiny");
    char *alone = NULL, *text = NULL;
    assert_int_equal(baton_model_vocab(m), 4096);
    test_ok(baton_detokenize(m, ids + 1, 1, &alone, &e), &e);
    assert_true(alone[0] != '\0');
    test_ok(baton_detokenize(m, ids, 3, &text, &e), &e);
    assert_string_equal(text, alone);
    free(text);
    free(alone);
    text = NULL;
    test_fails(baton_detokenize(m, ids, 4, &text, &e), BATON_ERR_INPUT, "4096", &e);
    assert_null(text);
    baton_model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_requests),     cmocka_unit_test(test_bad_engines),
        cmocka_unit_test(test_queue_full),       cmocka_unit_test(test_force_min_stop),
        cmocka_unit_test(test_sampling_repeats), cmocka_unit_test(test_timeout_and_pause),
        cmocka_unit_test(test_detokenize),       cmocka_unit_test(test_goldens_ref),
        cmocka_unit_test(test_goldens_fast),
    };
    return cmocka_run_group_tests_name("engine: native", tests, NULL, NULL);
}
