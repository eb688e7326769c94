/* SPDX-License-Identifier: Apache-2.0 */
/* config.json: defaults and forms of both transformers generations, and every refusal by name. */
#include <jansson.h>

#include "folder.h"

#define I BATON_ERR_INPUT
#define U BATON_ERR_UNSUPPORTED

static const char llama[] =
    "{\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":64,\"intermediate_size\":96,"
    "\"num_hidden_layers\":4,\"num_attention_heads\":4,\"vocab_size\":100,"
    "\"max_position_embeddings\":4096,\"rope_theta\":500000.0}";
static const char qwen3[] =
    "{\"architectures\":[\"Qwen3ForCausalLM\"],\"hidden_size\":64,\"intermediate_size\":96,"
    "\"num_hidden_layers\":4,\"num_attention_heads\":4,\"num_key_value_heads\":2,\"head_dim\":32,"
    "\"vocab_size\":100,\"rms_norm_eps\":1e-6,\"rope_theta\":1000000,\"eos_token_id\":7}";
static const char gemma3[] =
    "{\"architectures\":[\"Gemma3ForCausalLM\"],\"hidden_size\":64,\"intermediate_size\":96,"
    "\"num_hidden_layers\":13,\"num_attention_heads\":4,\"num_key_value_heads\":1,\"head_dim\":32,"
    "\"vocab_size\":100,\"query_pre_attn_scalar\":16,\"sliding_window\":8}";
/* As google/gemma-3-4b-it has it: all else are the class's defaults. */
static const char gemma3_vision[] =
    "{\"architectures\":[\"Gemma3ForConditionalGeneration\"],\"eos_token_id\":[1,106],"
    "\"text_config\":{\"hidden_size\":2560,\"intermediate_size\":10240,"
    "\"model_type\":\"gemma3_text\",\"num_hidden_layers\":34,"
    "\"rope_scaling\":{\"factor\":8.0,\"rope_type\":\"linear\"},\"sliding_window\":1024},"
    "\"vision_config\":{\"hidden_size\":1152}}";

/* Parse `base` with the members of `change` (one object) set; a member "-key" removes key. */
static int with(const char *base, const char *change, struct model_config *c, struct baton_error *e)
{
    json_error_t err;
    json_t *root = json_loads(base, 0, &err), *add = json_loads(change, 0, &err), *v;
    const char *key;
    if (!root || !add)
        fail_msg("the test's own JSON: %s in %s", err.text, change);
    json_object_foreach(add, key, v)
    {
        if (key[0] == '-')
            json_object_del(root, key + 1);
        else
            json_object_set(root, key, v);
    }
    char *text = json_dumps(root, 0);
    memset(c, 0xA5, sizeof *c);
    int rc = model_config_parse(text, strlen(text), NULL, 0, c, e);
    free(text);
    json_decref(root);
    json_decref(add);
    return rc;
}

static int parse(const char *text, struct model_config *c, struct baton_error *e)
{
    return model_config_parse(text, strlen(text), NULL, 0, c, e);
}

static void defaults(void **state)
{
    struct model_config c;
    struct baton_error e;
    test_ok(parse(llama, &c, &e), &e);
    assert_int_equal(c.family, MODEL_LLAMA);
    assert_int_equal(c.kv_heads, 4);
    assert_int_equal(c.head_dim, 16);
    assert_false(c.tied);
    assert_false(c.attn_bias);
    assert_true(c.norm_eps == 1e-6 && c.attn_scale == 0.25 && c.embed_scale == 1);
    assert_int_equal(c.window, 0);
    assert_int_equal(c.bos, -1);
    assert_int_equal(c.n_eos, 0);
    assert_int_equal(c.act, DEVICE_SILU);
    test_ok(parse(qwen3, &c, &e), &e);
    assert_int_equal(c.head_dim, 32);
    assert_false(c.tied);
    assert_int_equal(c.eos[0], 7);
    test_ok(with(qwen3, "{\"-head_dim\":0,\"num_attention_heads\":16}", &c, &e), &e);
    assert_int_equal(c.head_dim, 128); /* the class's, not hidden / heads */
}

static void gemma(void **state)
{
    struct model_config c;
    struct baton_error e;
    test_ok(parse(gemma3, &c, &e), &e);
    assert_true(c.tied);
    assert_int_equal(c.act, DEVICE_GELU_TANH);
    assert_true(c.attn_scale == 0.25 && c.embed_scale == 8);
    assert_int_equal(c.window, 8);
    for (uint32_t l = 0; l < 13; l++)
        assert_int_equal(c.local[l], l != 5 && l != 11);
    assert_true(c.rope_global.inv_freq[1] == 1.0f / (float)pow(1e6, 0.0625));
    assert_true(c.rope_local.inv_freq[1] == 1.0f / (float)pow(1e4, 0.0625));
    test_ok(with(gemma3, "{\"sliding_window_pattern\":3}", &c, &e), &e);
    for (uint32_t l = 0; l < 13; l++)
        assert_int_equal(c.local[l], l % 3 != 2);
    test_ok(with(gemma3, "{\"sliding_window_pattern\":1,\"sliding_window\":null}", &c, &e), &e);
    assert_int_equal(c.window, 0); /* no local layer, so no window */
    test_ok(with(gemma3,
                 "{\"num_hidden_layers\":2,\"layer_types\":[\"full_attention\","
                 "\"sliding_attention\"],\"sliding_window_pattern\":1}",
                 &c, &e),
            &e);
    assert_true(c.local[0] == 0 && c.local[1] == 1);
    test_ok(with(gemma3, "{\"tie_word_embeddings\":false}", &c, &e), &e);
    assert_false(c.tied);
    test_ok(parse(gemma3_vision, &c, &e), &e);
    assert_string_equal(c.arch, "Gemma3ForConditionalGeneration");
    assert_int_equal(c.hidden, 2560);
    assert_int_equal(c.q_heads, 8);
    assert_int_equal(c.kv_heads, 4);
    assert_int_equal(c.head_dim, 256);
    assert_int_equal(c.vocab, 262208);
    assert_int_equal(c.max_positions, 131072);
    assert_int_equal(c.window, 1024);
    assert_int_equal(c.n_eos, 2);
    assert_true(c.rope_global.inv_freq[0] == 0.125f && c.rope_local.inv_freq[0] == 1);
}

/* Both generations of transformers spell the same rotation differently. */
static void rope_forms(void **state)
{
    struct model_config a, b;
    struct baton_error e;
    static const char *const pairs[][2] = {
        {"{\"rope_scaling\":{\"type\":\"linear\",\"factor\":4}}",
         "{\"-rope_theta\":0,\"rope_parameters\":{\"rope_type\":\"linear\",\"factor\":4.0,"
         "\"rope_theta\":500000}}"},
        {"{\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,"
         "\"high_freq_factor\":4.0,\"original_max_position_embeddings\":4096}}",
         "{\"-rope_theta\":0,\"rope_parameters\":{\"rope_type\":\"llama3\",\"factor\":8.0,"
         "\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,\"rope_theta\":500000.0}}"},
        {"{}", "{\"rope_scaling\":{\"rope_type\":\"default\"}}"},
        {"{\"rope_scaling\":null}", "{\"-rope_theta\":0,\"rope_parameters\":{\"rope_theta\":5e5}}"},
    };
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        test_ok(with(llama, pairs[i][0], &a, &e), &e);
        test_ok(with(llama, pairs[i][1], &b, &e), &e);
        assert_memory_equal(a.rope_global.inv_freq, b.rope_global.inv_freq, 32);
    }
    test_ok(with(gemma3,
                 "{\"rope_scaling\":{\"rope_type\":\"linear\",\"factor\":8},"
                 "\"rope_theta\":77777,\"rope_local_base_freq\":555}",
                 &a, &e),
            &e);
    test_ok(with(gemma3,
                 "{\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"linear\","
                 "\"factor\":8,\"rope_theta\":77777},\"sliding_attention\":"
                 "{\"rope_type\":\"default\",\"rope_theta\":555}}}",
                 &b, &e),
            &e);
    assert_memory_equal(&a.rope_global, &b.rope_global, sizeof a.rope_global);
    assert_memory_equal(&a.rope_local, &b.rope_local, sizeof a.rope_local);
    assert_true(a.rope_global.inv_freq[0] == 0.125f && a.rope_local.inv_freq[0] == 1);
}

/* Frequencies as torch computes them in float32 (theta 500000, 64 dims; factor 8, 1, 4, 8192):
 * of a short wavelength, a mixed one and a long one. */
static void rope_values(void **state)
{
    struct model_config c;
    struct baton_error e;
    test_ok(with(llama,
                 "{\"head_dim\":64,\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,"
                 "\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"
                 "\"original_max_position_embeddings\":8192}}",
                 &c, &e),
            &e);
    assert_true(c.rope_global.inv_freq[0] == 1.0f);
    assert_true(c.rope_global.inv_freq[1] == 0x1.53c38cp-1f);
    assert_true(c.rope_global.inv_freq[16] == 0x1.132ba4p-11f);
    assert_true(c.rope_global.inv_freq[17] == 0x1.765ba4p-13f);
    assert_true(c.rope_global.inv_freq[31] == 0x1.948360p-22f);
}

struct bad {
    const char *base, *change;
    int code;
    const char *word;
};

/* clang-format off */
static const struct bad bads[] = {
    {llama, "{\"architectures\":[\"MistralForCausalLM\"]}", U,
     "MistralForCausalLM is not supported; supported are LlamaForCausalLM, Qwen3ForCausalLM"},
    {llama, "{\"-architectures\":0}", U, "Gemma3ForConditionalGeneration"},
    {llama, "{\"architectures\":\"LlamaForCausalLM\"}", U, "none named"},
    {llama, "{\"architectures\":[]}", U, "none named"},
    {llama, "{\"architectures\":[\"a\\nb\"]}", U, "a?b"},
    {llama, "{\"-hidden_size\":0}", I, "\"hidden_size\" is missing"},
    {llama, "{\"-vocab_size\":0}", I, "vocab_size"},
    {llama, "{\"-intermediate_size\":0}", I, "intermediate_size"},
    {llama, "{\"-num_hidden_layers\":0}", I, "num_hidden_layers"},
    {llama, "{\"-num_attention_heads\":0}", I, "num_attention_heads"},
    {llama, "{\"hidden_size\":0}", I, "hidden_size"},
    {llama, "{\"hidden_size\":-64}", I, "hidden_size"},
    {llama, "{\"hidden_size\":\"64\"}", I, "hidden_size"},
    {llama, "{\"hidden_size\":64.5}", I, "hidden_size"},
    {llama, "{\"hidden_size\":1e300}", I, "hidden_size"},
    {llama, "{\"hidden_size\":4294967360}", I, "hidden_size"},
    {llama, "{\"num_hidden_layers\":513}", I, "[1, 512]"},
    {llama, "{\"num_hidden_layers\":0}", I, "num_hidden_layers"},
    {llama, "{\"vocab_size\":2147483648}", I, "vocab_size"},
    {llama, "{\"max_position_embeddings\":0}", I, "max_position_embeddings"},
    {llama, "{\"rms_norm_eps\":-1e-6}", I, "rms_norm_eps"},
    {llama, "{\"rms_norm_eps\":true}", I, "rms_norm_eps"},
    {llama, "{\"num_attention_heads\":6}", I, "no multiple of num_attention_heads 6"},
    {llama, "{\"num_key_value_heads\":3}", I, "num_key_value_heads 3"},
    {llama, "{\"num_key_value_heads\":8}", I, "num_key_value_heads 8"},
    {llama, "{\"num_key_value_heads\":0}", I, "num_key_value_heads"},
    {llama, "{\"head_dim\":258}", U, "head_dim 258"},
    {llama, "{\"head_dim\":15}", U, "head_dim 15"},
    {llama, "{\"head_dim\":0}", I, "head_dim"},
    {llama, "{\"hidden_act\":\"gelu\"}", U, "activation gelu"},
    {llama, "{\"hidden_act\":5}", I, "hidden_act"},
    {gemma3, "{\"hidden_activation\":\"gelu\"}", U, "activation gelu"},
    {gemma3, "{\"hidden_act\":\"silu\"}", U, "activation silu"},
    {llama, "{\"mlp_bias\":true}", U, "mlp_bias"},
    {llama, "{\"attention_bias\":\"yes\"}", I, "attention_bias"},
    {llama, "{\"tie_word_embeddings\":1}", I, "tie_word_embeddings"},
    {llama, "{\"quantization_config\":{\"quant_method\":\"fp8\"}}", U, "quantization_config"},
    {qwen3, "{\"use_sliding_window\":true}", U, "use_sliding_window"},
    {qwen3, "{\"sliding_window\":64,\"layer_types\":[\"full_attention\",\"full_attention\","
            "\"full_attention\",\"sliding_attention\"]}", U, "sliding_attention"},
    {gemma3, "{\"use_bidirectional_attention\":true}", U, "use_bidirectional_attention"},
    {gemma3, "{\"attn_logit_softcapping\":50.0}", U, "attn_logit_softcapping"},
    {gemma3, "{\"final_logit_softcapping\":30.0}", U, "final_logit_softcapping"},
    {gemma3, "{\"sliding_window\":0}", I, "sliding_window"},
    {gemma3, "{\"sliding_window\":null}", I, "sliding_window is null"},
    {gemma3, "{\"sliding_window_pattern\":0}", I, "sliding_window_pattern"},
    {gemma3, "{\"layer_types\":[\"full_attention\"]}", I, "list of 13"},
    {gemma3, "{\"layer_types\":\"full_attention\"}", I, "layer_types"},
    {gemma3, "{\"num_hidden_layers\":1,\"layer_types\":[\"chunked_attention\"]}", U,
     "layer_types[0] is chunked_attention"},
    {gemma3, "{\"num_hidden_layers\":1,\"layer_types\":[3]}", U, "layer_types[0]"},
    {gemma3, "{\"query_pre_attn_scalar\":0}", I, "query_pre_attn_scalar"},
    {gemma3, "{\"rope_local_base_freq\":-1}", I, "rope_local_base_freq"},
    {gemma3, "{\"rope_parameters\":{\"rope_type\":\"default\"}}", I, "must name full_attention"},
    {gemma3, "{\"rope_parameters\":{\"full_attention\":3}}", I, "full_attention is not an object"},
    {gemma3_vision, "{\"-text_config\":0}", I, "text_config"},
    {gemma3_vision, "{\"text_config\":[]}", I, "text_config"},
    {llama, "{\"rope_theta\":0}", I, "rope_theta"},
    {llama, "{\"rope_theta\":\"big\"}", I, "rope_theta"},
    {llama, "{\"rope_scaling\":3}", I, "rope_scaling is not an object"},
    {llama, "{\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":4}}", U,
     "rope type yarn; supported are default, linear, llama3"},
    {llama, "{\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":4}}", U, "dynamic"},
    {llama, "{\"rope_parameters\":{\"rope_type\":\"longrope\"}}", U, "rope_parameters"},
    {llama, "{\"rope_scaling\":{\"type\":\"linear\"}}", I, "factor"},
    {llama, "{\"rope_scaling\":{\"type\":\"linear\",\"factor\":0}}", I, "factor"},
    {llama, "{\"rope_scaling\":{\"type\":\"default\",\"partial_rotary_factor\":0.5}}", U,
     "partial_rotary_factor"},
    {llama, "{\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8}}", I, "low_freq_factor"},
    {llama, "{\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,"
            "\"high_freq_factor\":4}}", I, "not above"},
    {llama, "{\"eos_token_id\":100}", I, "eos_token_id"},
    {llama, "{\"eos_token_id\":[1,-1]}", I, "eos_token_id"},
    {llama, "{\"eos_token_id\":\"</s>\"}", I, "eos_token_id"},
    {llama, "{\"eos_token_id\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17]}", I, "end ids"},
    {llama, "{\"bos_token_id\":100}", I, "bos_token_id"},
};
/* clang-format on */

static void refusals(void **state)
{
    struct baton_error e;
    struct model_config c, poison;
    memset(&poison, 0xA5, sizeof poison);
    for (size_t i = 0; i < sizeof bads / sizeof *bads; i++) {
        test_fails(with(bads[i].base, bads[i].change, &c, &e), bads[i].code, bads[i].word, &e);
        assert_memory_equal(&c, &poison, sizeof c); /* outputs are set on success only */
        assert_null(strchr(e.text, '\n'));
    }
}

/* What is no JSON number must not become one. */
static void not_finite(void **state)
{
    static const char *const values[] = {"NaN", "Infinity", "-Infinity", "1e999", "nan", "null"};
    struct baton_error e;
    struct model_config c;
    char text[512];
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        snprintf(text, sizeof text, "{\"rms_norm_eps\":%s,%s", values[i], llama + 1);
        int rc = parse(text, &c, &e);
        assert_int_equal(rc, i == 5 ? 0 : I); /* null: as if it were not there */
        snprintf(text, sizeof text, "{\"hidden_size\":%s,%s", values[i], llama + 1);
        assert_int_equal(parse(text, &c, &e), I); /* null: a second value for one key */
    }
    assert_int_equal(parse("", &c, &e), I);
    assert_int_equal(parse("[]", &c, &e), I);
    assert_int_equal(parse("3", &c, &e), I);
}

static void end_ids(void **state)
{
    struct baton_error e;
    struct model_config c;
    const char *g = "{\"eos_token_id\":[7,9,3],\"bos_token_id\":50}";
    test_ok(model_config_parse(qwen3, strlen(qwen3), g, strlen(g), &c, &e), &e);
    assert_int_equal(c.n_eos, 3); /* 7 stands in both */
    assert_true(c.eos[0] == 7 && c.eos[1] == 9 && c.eos[2] == 3);
    g = "{\"eos_token_id\":4}";
    test_ok(model_config_parse(qwen3, strlen(qwen3), g, strlen(g), &c, &e), &e);
    assert_int_equal(c.n_eos, 2);
    g = "{\"eos_token_id\":400}";
    test_fails(model_config_parse(qwen3, strlen(qwen3), g, strlen(g), &c, &e), I,
               "generation_config.json", &e);
    g = "[]";
    test_fails(model_config_parse(qwen3, strlen(qwen3), g, strlen(g), &c, &e), I,
               "generation_config.json", &e);
}

/* The figures that benchmarks are measured against, in GFLOP a token and bytes. */
static void floors(void **state)
{
    static const struct {
        const char *name;
        uint32_t n;
        double flops; /* of the whole prefill, worked out by hand */
        double gflop; /* a token */
    } list[] = {
        /* 2 * 28 * (2*1024*2048 + 2*1024*1024 + 3*1024*3072) a token, 4 * 28 * 2048 a pair,
         * 2 * 151936 * 1024 once */
        {"shape:qwen3-0.6b", 512, 512 * 880803840.0 + 229376.0 * (512 * 513 / 2) + 311164928.0,
         0.940},
        {"shape:qwen3-0.6b", 2048,
         2048 * 880803840.0 + 229376.0 * (2048 * 2049.0 / 2) + 311164928.0, 1.116},
        {"shape:gemma-3-1b", 512, 512 * 1395523584.0 + 26 * 4096.0 * (512 * 513 / 2) + 603979776.0,
         1.424},
        {"shape:gemma-3-1b", 2048,
         2048 * 1395523584.0 + 4 * 4096.0 * (2048 * 2049.0 / 2) +
             22 * 4096.0 * (512 * 513 / 2 + 1536 * 512) + 603979776.0,
         1.453},
    };
    struct baton_error e;
    struct model *m;
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        test_ok(model_open(list[i].name, &m, &e), &e);
        double got = model_prefill_flops(model_config_of(m), list[i].n);
        print_message("%s at %u: %.4f GFLOP a token\n", list[i].name, list[i].n,
                      got / list[i].n / 1e9);
        assert_true(got == list[i].flops);
        assert_true(fabs(got / list[i].n / 1e9 - list[i].gflop) < 5e-4);
        /* Tied models read every parameter in a step. */
        double step = model_decode_bytes(model_config_of(m), 0, 2, 2);
        assert_true(step == (double)model_weight_bytes(m));
        model_close(m);
    }
    test_ok(model_open("shape:qwen3-0.6b", &m, &e), &e);
    assert_true(model_decode_bytes(model_config_of(m), 512, 2, 2) -
                    model_decode_bytes(model_config_of(m), 0, 2, 2) ==
                28 * 512 * 2.0 * 1024 * 2);
    model_close(m);
    test_ok(model_open("shape:gemma-3-1b", &m, &e), &e);
    assert_true(model_decode_bytes(model_config_of(m), 2048, 2, 2) -
                    model_decode_bytes(model_config_of(m), 0, 2, 2) ==
                (4 * 2048 + 22 * 512) * 2.0 * 256 * 2);
    model_close(m);
    test_ok(model_open("shape:llama-3.1-8b", &m, &e), &e);
    assert_int_equal(model_n_params(m), UINT64_C(8030261248)); /* the published 8.03 B */
    model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(defaults),    cmocka_unit_test(gemma),    cmocka_unit_test(rope_forms),
        cmocka_unit_test(rope_values), cmocka_unit_test(refusals), cmocka_unit_test(not_finite),
        cmocka_unit_test(end_ids),     cmocka_unit_test(floors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
