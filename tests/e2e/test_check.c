/* SPDX-License-Identifier: Apache-2.0 */
/* `baton check` through the command line: what passes, with which figures, and that what is wrong
 * is found. */
#include <unistd.h>

#include "tests/e2e/e2e.h"
#include "tests/model/folder.h"

static int64_t integer(json_t *o, const char *path)
{
    json_t *x = e2e_get(o, path);
    if (!json_is_integer(x))
        fail_msg("%s is no integer", path);
    return json_integer_value(x);
}

static void expect_true(json_t *o, const char *path)
{
    if (!json_is_true(e2e_get(o, path)))
        fail_msg("%s is not true", path);
}

static void expect_zero(json_t *o, const char *path)
{
    json_t *x = e2e_get(o, path);
    if (!json_is_number(x) || json_number_value(x) != 0)
        fail_msg("%s is not 0", path);
}

static void expect_positions(json_t *c, const char *group, uint32_t layers, uint32_t first,
                             uint32_t last)
{
    json_t *g = e2e_get(c, group), *p = json_object_get(g, "positions");
    if (layers == 0) {
        assert_true(json_is_null(g));
        return;
    }
    assert_int_equal(integer(g, "layers"), layers);
    assert_int_equal(json_integer_value(json_array_get(p, 0)), first);
    assert_int_equal(json_integer_value(json_array_get(p, 1)), last);
}

/* All that must hold between two devices that compute alike. */
static void expect_exact(json_t *c, uint32_t tokens, uint32_t slots)
{
    assert_string_equal(json_string_value(e2e_get(c, "verdict")), "pass");
    assert_true(json_is_null(e2e_get(c, "why")));
    assert_int_equal(integer(c, "tokens"), tokens);
    assert_int_equal(integer(c, "slots_exact"), slots);
    assert_int_equal(integer(c, "slots_total"), slots);
    assert_int_equal(integer(c, "second_consumer.slots_exact"), slots);
    const char *const yes[] = {"finite",       "bit_exact_repeats", "tokens_match",
                               "positions_ok", "control.bit_exact", "second_consumer.positions_ok"};
    const char *const zero[] = {"k_rel_rms",
                                "v_rel_rms",
                                "logits_rel_rms",
                                "vs_native.k_rel_rms",
                                "vs_native.v_rel_rms",
                                "control.native_repeat_mismatch",
                                "control.kv_rel_rms_max",
                                "second_consumer.argmax_differs",
                                "second_consumer.logits_rel_rms"};
    for (size_t i = 0; i < sizeof yes / sizeof *yes; i++)
        expect_true(c, yes[i]);
    for (size_t i = 0; i < sizeof zero / sizeof *zero; i++)
        expect_zero(c, zero[i]);
    assert_true(json_is_null(e2e_get(c, "first_mismatch")));
    assert_true(json_is_null(e2e_get(c, "first_slot_mismatch")));
    assert_true(json_is_null(e2e_get(c, "fault")));
    assert_int_equal(integer(c, "active_lanes_max"), 1);
    double least = json_number_value(json_array_get(e2e_get(c, "prefill_export_ms"), 0));
    double most = json_number_value(json_array_get(e2e_get(c, "prefill_export_ms"), 1));
    assert_true(least > 0 && most >= least);
}

static json_t *nth_case(const struct e2e *r, size_t i)
{
    json_t *c = json_array_get(e2e_get(r->json, "cases"), i);
    assert_non_null(c);
    return c;
}

/* ---- what passes -------------------------------------------------------------------------- */

/* All shipped models, compared with the reference too. */
static void shipped(void **state)
{
    static const uint32_t slots[] = {16, 16, 16, 52}, local[] = {0, 0, 0, 22};
    for (int i = 0; i < 4; i++) {
        struct e2e r;
        const char *args[] = {
            "check",  "-m", e2e_model(e2e_models[i]), "--tokens", "128", "-n", "16",
            "--json", "-q", i % 2 ? "--mode" : NULL,  "stream",   NULL};
        e2e_expect(&r, 0, args);
        json_t *c = nth_case(&r, 0);
        expect_exact(c, 128, slots[i]);
        expect_true(c, "text_match");
        assert_int_equal(integer(c, "repeats"), 3);
        assert_string_equal(json_string_value(e2e_get(c, "prompt")), "lookup");
        expect_positions(c, "global", slots[i] / 2 - local[i], 0, 127);
        expect_positions(c, "local", local[i], 0, 127);
        expect_zero(c, "native_vs_ref.argmax_mismatch");
        double logits = json_number_value(e2e_get(c, "native_vs_ref.logits_rel_rms"));
        assert_true(logits > 0 && logits < 5e-2); /* bf16 is not f32: 0 would be no comparison */
        json_t *alone = json_array_get(e2e_get(c, "steps_by_lanes"), 0);
        assert_int_equal(json_integer_value(alone), 3 * 15); /* token 1 needs no step */
        e2e_free(&r);
    }
}

/* Past the window: local layers hold 511 positions of 2048, global ones all. */
static void gemma_window(void **state)
{
    struct e2e r;
    const char *args[] = {"check",       "-m",        e2e_model("gemma3-tiny"),
                          "--tokens",    "2048",      "-n",
                          "4",           "--repeats", "2",
                          "--reference", "off",       "--json",
                          NULL};
    e2e_expect(&r, 0, args);
    json_t *c = nth_case(&r, 0);
    expect_exact(c, 2048, 52);
    expect_positions(c, "local", 22, 1537, 2047);
    expect_positions(c, "global", 4, 0, 2047);
    assert_true(json_is_null(e2e_get(c, "native_vs_ref")));
    e2e_free(&r);
}

/* Around the shipped model's own window. */
static void gemma_borders(void **state)
{
    static const uint32_t n[] = {511, 512, 513, 1024};
    struct e2e r;
    const char *args[] = {"check",
                          "-m",
                          e2e_model("gemma3-tiny"),
                          "--tokens",
                          "511,512,513,1024",
                          "-n",
                          "2",
                          "--repeats",
                          "1",
                          "--mode",
                          "stream",
                          "--reference",
                          "off",
                          "--json",
                          NULL};
    e2e_expect(&r, 0, args);
    for (size_t i = 0; i < sizeof n / sizeof *n; i++) {
        expect_exact(nth_case(&r, i), n[i], 52);
        expect_positions(nth_case(&r, i), "local", 22, n[i] - 511, n[i] - 1);
    }
    e2e_free(&r);
}

/* Around a window of 8, pages and digest leaves of 64, cpu's chunks of 512. */
static void borders(void **state)
{
    static const uint32_t n[] = {1, 2, 7, 8, 9, 16, 63, 64, 65, 127, 128, 129, 511, 512, 513};
    struct e2e r;
    const char *args[] = {"check",
                          "-m",
                          test_path("tests/golden/edge/gemma3-window8-headdim256"),
                          "--tokens",
                          "1,2,7,8,9,16,63,64,65,127,128,129,511,512,513",
                          "-n",
                          "9",
                          "--repeats",
                          "2",
                          "--mode",
                          "stream",
                          "--reference",
                          "off",
                          "--json",
                          NULL};
    e2e_expect(&r, 0, args);
    for (size_t i = 0; i < sizeof n / sizeof *n; i++) {
        json_t *c = nth_case(&r, i);
        expect_exact(c, n[i], 8);
        expect_positions(c, "local", 3, n[i] > 7 ? n[i] - 7 : 0, n[i] - 1);
        expect_positions(c, "global", 1, 0, n[i] - 1);
        assert_string_equal(json_string_value(e2e_get(c, "prompt")), "random ids");
        assert_true(json_is_null(e2e_get(c, "text_match")));
    }
    e2e_free(&r);
}

/* ---- a model of many layers --------------------------------------------------------------- */

#define LAYERS 32u
static const char deep_config[] =
    "{\"architectures\":[\"LlamaForCausalLM\"],\"model_type\":\"llama\",\"hidden_size\":64,"
    "\"intermediate_size\":96,\"num_hidden_layers\":32,\"num_attention_heads\":4,"
    "\"num_key_value_heads\":2,\"vocab_size\":256,\"max_position_embeddings\":4096,"
    "\"rms_norm_eps\":1e-5,\"rope_theta\":10000,\"tie_word_embeddings\":true,"
    "\"hidden_act\":\"silu\",\"bos_token_id\":1,\"eos_token_id\":2,\"torch_dtype\":\"float32\"}";

static void add(struct model_tensor *t, size_t *n, uint64_t *seed, const char *name, uint64_t rows,
                uint64_t cols)
{
    size_t count = (size_t)(rows * (cols ? cols : 1));
    float *data = malloc(count * sizeof *data);
    for (size_t i = 0; i < count; i++) /* norms around one, matrices that keep a row's size */
        data[i] = cols ? test_normal(seed) / sqrtf((float)cols) : 1 + test_normal(seed) * 0.1f;
    t[(*n)++] = (struct model_tensor){.name = strdup(name),
                                      .dtype = BATON_F32,
                                      .n_dims = cols ? 2 : 1,
                                      .shape = {rows, cols},
                                      .data = data,
                                      .bytes = count * sizeof *data};
}

static void make_deep(const char *dir, uint64_t *seed)
{
    static const struct {
        const char *name;
        uint64_t rows, cols;
    } parts[] = {{"input_layernorm", 64, 0},   {"self_attn.q_proj", 64, 64},
                 {"self_attn.k_proj", 32, 64}, {"self_attn.v_proj", 32, 64},
                 {"self_attn.o_proj", 64, 64}, {"post_attention_layernorm", 64, 0},
                 {"mlp.gate_proj", 96, 64},    {"mlp.up_proj", 96, 64},
                 {"mlp.down_proj", 64, 96}};
    struct model_tensor t[2 + 9 * LAYERS];
    size_t n = 0;
    char name[96];
    put_text(dir, "config.json", deep_config);
    add(t, &n, seed, "model.embed_tokens.weight", 256, 64);
    add(t, &n, seed, "model.norm.weight", 64, 0);
    for (uint32_t l = 0; l < LAYERS; l++)
        for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
            snprintf(name, sizeof name, "model.layers.%u.%s.weight", l, parts[i].name);
            add(t, &n, seed, name, parts[i].rows, parts[i].cols);
        }
    write_tensors(in(dir, "model.safetensors"), t, n, 0);
    for (size_t i = 0; i < n; i++) {
        free((void *)t[i].name);
        free((void *)t[i].data);
    }
}

static void deep_llama(void **state)
{
    uint64_t seed = test_seed();
    struct e2e r;
    char dir[256];
    folder_make(dir);
    make_deep(dir, &seed);
    const char *args[] = {"check",  "-m",     dir,           "--tokens", "100,700", "-n", "8",
                          "--mode", "stream", "--reference", "off",      "--json",  NULL};
    e2e_expect(&r, 0, args);
    expect_exact(nth_case(&r, 0), 100, 64);
    expect_exact(nth_case(&r, 1), 700, 64);
    expect_positions(nth_case(&r, 1), "global", LAYERS, 0, 699);
    expect_positions(nth_case(&r, 1), "local", 0, 0, 0);
    e2e_free(&r);
    folder_remove(dir);
}

/* ---- other devices ------------------------------------------------------------------------ */

/* f32 pages become bf16 on import, and the other way; numbers hold, bits are not asked for. */
static void across_devices(void **state)
{
    static const char *const routes[2][2] = {{"cpu:ref", "cpu"}, {"cpu", "cpu:ref"}};
    for (int i = 0; i < 2; i++) {
        struct e2e r;
        const char *args[] = {"check",      "-m",         e2e_model("qwen3-tiny"),
                              "--prefill",  routes[i][0], "--decode",
                              routes[i][1], "--tokens",   "130",
                              "-n",         "8",          "--json",
                              NULL};
        e2e_expect(&r, 0, args);
        json_t *c = nth_case(&r, 0);
        assert_true(json_is_false(e2e_get(c, "same_numerics")));
        assert_int_equal(integer(c, "slots_exact"), 16);
        double k = json_number_value(e2e_get(c, "k_rel_rms"));
        double v = json_number_value(e2e_get(c, "v_rel_rms"));
        double logits = json_number_value(e2e_get(c, "logits_rel_rms"));
        if (i == 0)
            assert_true(k > 1e-4 && k < 0x1p-8 && v > 1e-4 && v < 0x1p-8);
        else
            assert_true(k == 0 && v == 0); /* widening loses nothing */
        assert_true(logits > 0 && logits < 5e-2);
        e2e_free(&r);
    }
}

/* ---- faults ------------------------------------------------------------------------------- */

static void expect_found(const struct e2e *r, uint64_t seed)
{
    static const char *const keys[] = {"layer", "tensor", "position", "head", "dim"};
    json_t *c = nth_case(r, 0);
    json_t *planted = e2e_get(c, "fault"), *found = e2e_get(c, "first_slot_mismatch");
    assert_string_equal(json_string_value(e2e_get(c, "verdict")), "fail");
    assert_string_equal(json_string_value(e2e_get(planted, "name")), "import-flip");
    expect_true(planted, "planted");
    assert_int_equal(integer(planted, "seed"), seed);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!json_equal(e2e_get(planted, keys[i]), e2e_get(found, keys[i])))
            fail_msg("seed %llu: %s planted and found differ", (unsigned long long)seed, keys[i]);
    assert_int_equal(integer(c, "slots_exact"), 51);
    assert_non_null(strstr(json_string_value(e2e_get(c, "why")), "51 of 52 slots"));
    if (json_object_get(c, "error")) /* the flipped bit made the next logits NaN */
        return;
    assert_int_equal(integer(c, "second_consumer.slots_exact"), 52);
    bool k = !strcmp(json_string_value(e2e_get(found, "tensor")), "k");
    double hit = json_number_value(e2e_get(c, k ? "k_rel_rms" : "v_rel_rms"));
    json_t *number = e2e_get(c, k ? "k_rel_rms" : "v_rel_rms"); /* null: a bit made it infinite */
    assert_true(json_is_null(number) || hit > 0);
    expect_zero(c, k ? "v_rel_rms" : "k_rel_rms");
}

static void import_flip(void **state)
{
    uint64_t random = test_seed();
    for (int i = 0; i < 8; i++) {
        struct e2e r;
        uint64_t seed = i ? test_random(&random) >> 8 : 44104931737625277; /* logits of NaN */
        char fault[64];
        snprintf(fault, sizeof fault, "import-flip:%llu", (unsigned long long)seed);
        const char *args[] = {"check",       "-m",        e2e_model("gemma3-tiny"),
                              "--tokens",    "70",        "-n",
                              "2",           "--repeats", "1",
                              "--reference", "off",       "--fault",
                              fault,         "--json",    NULL};
        e2e_expect(&r, 1, args);
        expect_found(&r, seed);
        e2e_free(&r);
    }
    struct e2e r;
    const char *args[] = {"check",       "-m", e2e_model("qwen3-tiny"), "--tokens", "70",
                          "-n",          "2",  "--reference",           "off",      "--fault",
                          "import-flip", NULL};
    e2e_expect(&r, 1, args);
    assert_non_null(strstr(r.out, "fault planted: layer "));
    assert_non_null(strstr(r.out, "15 of 16 slots are exact at the consumer: layer "));
    e2e_free(&r);
}

/* ---- input -------------------------------------------------------------------------------- */

static void put_lines(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

static void prompt_file(void **state)
{
    struct e2e r;
    const char *path = e2e_temp("prompts.jsonl");
    put_lines(path, "{\"id\": \"greeting\", \"prompt\": \"What is the capital of France?\"}\n\n"
                    "{\"text\": \"Once upon a time\"}\n{\"ids\": [5, 6, 7]}");
    const char *args[] = {
        "check",     "-m", e2e_model("koni-tiny"), "--prompts", path,     "-n", "4",
        "--repeats", "1",  "--reference",          "off",       "--json", NULL};
    e2e_expect(&r, 0, args);
    assert_int_equal(json_array_size(e2e_get(r.json, "cases")), 3);
    assert_string_equal(json_string_value(e2e_get(nth_case(&r, 0), "name")), "greeting");
    assert_string_equal(json_string_value(e2e_get(nth_case(&r, 1), "name")), "line 3");
    expect_exact(nth_case(&r, 2), 3, 16);
    e2e_free(&r);
}

static void expect_input_error(const char *const *more, int status, const char *word)
{
    struct e2e r;
    const char *args[24] = {"check",     "-m", e2e_model("qwen3-tiny"), "-n", "2",
                            "--repeats", "1",  "--reference",           "off"};
    for (size_t i = 0; more[i]; i++)
        args[9 + i] = more[i];
    e2e_expect(&r, status, args);
    if (!strstr(r.err, word) && !strstr(r.out, word))
        fail_msg("no '%s' in: %s%s", word, r.err, r.out);
    e2e_free(&r);
}

static void bad_input(void **state)
{
    char path[200]; /* e2e_temp's buffers are taken in turn by the runs */
    snprintf(path, sizeof path, "%s", e2e_temp("bad.jsonl"));
    const struct {
        const char *args[8];
        const char *word;
    } bad[] = {
        {{"--mode", "native"}, "whole or stream"},
        {{"--mode", "sideways"}, "sideways"},
        {{"--tokens", "0"}, "--tokens"},
        {{"--tokens", "12,x"}, "--tokens"},
        {{"--tokens", "9", "--prompts", "f"}, "one of"},
        {{"--prompts", "no-such-file"}, "no-such-file"},
        {{"--fault", "import-flop"}, "import-flop"},
        {{"--fault", "import-flip:x"}, "whole number"},
        {{"--against", "no-such-folder"}, "no-such-folder"},
        {{"--repeats", "0"}, "--repeats"},
        {{"--prefill", "abacus"}, "abacus"},
        {{"stray"}, "stray"},
        {{"--tokens", "50000"}, "context"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        expect_input_error(bad[i].args, 2, bad[i].word);
    static const char *const lines[][2] = {{"", "no prompts"},
                                           {"[1]", "no JSON object"},
                                           {"{\"prompt\":", "line 1"},
                                           {"{}", "one of"},
                                           {"{\"ids\":[1,-1]}", "id 1"},
                                           {"{\"prompt\":7}", "prompt"},
                                           {"{\"text\":\"a\",\"ids\":[1]}", "one of"}};
    const char *from_file[] = {"--prompts", path, NULL};
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        put_lines(path, lines[i][0]);
        expect_input_error(from_file, 2, lines[i][1]);
    }
    /* One length that can't be made: the other is checked all the same. */
    struct e2e r;
    const char *args[] = {
        "check",     "-m", e2e_model("qwen3-tiny"), "--tokens", "4000000,5", "-n", "2",
        "--repeats", "1",  "--reference",           "off",      "--json",    NULL};
    e2e_expect(&r, 2, args);
    assert_string_equal(json_string_value(e2e_get(r.json, "verdict")), "error");
    assert_string_equal(json_string_value(e2e_get(nth_case(&r, 0), "verdict")), "error");
    expect_exact(nth_case(&r, 1), 5, 16);
    e2e_free(&r);
    put_lines(path, "{\"ids\":[1,99999999]}"); /* a case that can't be run is one with an error */
    const char *with_json[] = {"--prompts", path, "--json", NULL};
    expect_input_error(with_json, 2, "\"verdict\": \"error\"");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shipped),       cmocka_unit_test(gemma_window),
        cmocka_unit_test(gemma_borders), cmocka_unit_test(borders),
        cmocka_unit_test(deep_llama),    cmocka_unit_test(across_devices),
        cmocka_unit_test(import_flip),   cmocka_unit_test(prompt_file),
        cmocka_unit_test(bad_input)};
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    int rc = cmocka_run_group_tests_name("e2e check", tests, NULL, NULL);
    e2e_temp_remove();
    return rc;
}
