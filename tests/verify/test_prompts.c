/* SPDX-License-Identifier: Apache-2.0 */
/* Default prompts: exactly as long as asked, always the same, a question at the end. */
#include "base/base.h"
#include "tests/test.h"
#include "verify/verify.h"

static struct baton_model *open_model(const char *path)
{
    struct baton_error e;
    struct baton_model *m = NULL;
    const struct baton_model_options o = {.struct_size = sizeof o, .path = path};
    test_ok(baton_model_open(&o, &m, &e), &e);
    return m;
}

static void check_text(const struct baton_model *m, const struct verify_prompt *p)
{
    struct baton_error e;
    char *text = NULL;
    test_ok(baton_detokenize(m, p->ids, p->n_ids, &text, &e), &e);
    if (!strstr(text, "A00 = ") || !strstr(text, "What is the value of \"A00\"?"))
        fail_msg("%zu tokens: %.200s ... %s", p->n_ids, text,
                 text + (strlen(text) > 100 ? strlen(text) - 100 : 0));
    free(text);
}

static void check_model(const char *path, const char *source, uint32_t longest)
{
    static const uint32_t lengths[] = {1, 2, 3, 63, 64, 65, 128, 129, 511, 2048, 4096, 8191};
    struct baton_error e;
    struct baton_model *m = open_model(path);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths && lengths[i] <= longest; i++) {
        struct verify_prompt p = {0}, again = {0};
        test_ok(verify_prompt_lookup(m, lengths[i], &p, &e), &e);
        test_ok(verify_prompt_lookup(m, lengths[i], &again, &e), &e);
        assert_int_equal(p.n_ids, lengths[i]);
        assert_string_equal(p.source, source);
        assert_memory_equal(p.ids, again.ids, lengths[i] * sizeof *p.ids);
        for (size_t k = 0; k < p.n_ids; k++)
            assert_in_range(p.ids[k], 0, baton_model_vocab(m) - 1);
        if (lengths[i] >= 128 && !strcmp(source, "lookup"))
            check_text(m, &p);
        verify_prompt_free(&p);
        verify_prompt_free(&again);
    }
    struct verify_prompt none = {0};
    test_fails(verify_prompt_lookup(m, 0, &none, &e), BATON_ERR_USAGE, "no tokens", &e);
    test_fails(verify_prompt_lookup(m, 4000000, &none, &e), BATON_ERR_INPUT, "context", &e);
    baton_model_close(m);
}

static void shipped(void **state)
{
    check_model(test_path("models/qwen3-tiny"), "lookup", 8191);
    check_model(test_path("models/qwen3-small"), "lookup", 8191);
    check_model(test_path("models/koni-tiny"), "lookup", 8191);
    check_model(test_path("models/gemma3-tiny"), "lookup", 8191);
}

/* No tokenizer in the folder. */
static void without_tokenizer(void **state)
{
    check_model(test_path("tests/golden/edge/llama-fp32-tied"), "random ids", 4096);
    check_model(test_path("tests/golden/edge/gemma3-window8-headdim256"), "random ids", 4096);
}

/* A folder that has one which can't be read is an error, not a prompt of random ids. */
static void broken_tokenizer(void **state)
{
    struct baton_error e;
    struct verify_prompt p = {0};
    char dir[] = "/tmp/baton-verify-XXXXXX", command[1200];
    assert_non_null(mkdtemp(dir));
    snprintf(command, sizeof command, "cp '%s'/* %s && echo '{' >%s/tokenizer.json",
             test_path("tests/golden/edge/llama-fp32-tied"), dir, dir);
    assert_int_equal(system(command), 0);
    struct baton_model *m = open_model(dir);
    test_fails(verify_prompt_lookup(m, 100, &p, &e), BATON_ERR_INPUT, "tokenizer", &e);
    assert_null(p.ids);
    baton_model_close(m);
    snprintf(command, sizeof command, "rm -r %s", dir);
    assert_int_equal(system(command), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(shipped),
                                       cmocka_unit_test(without_tokenizer),
                                       cmocka_unit_test(broken_tokenizer)};
    return cmocka_run_group_tests_name("verify prompts", tests, NULL, NULL);
}
