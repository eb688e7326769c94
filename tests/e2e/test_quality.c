/* SPDX-License-Identifier: Apache-2.0 */
/* The frozen prompts through a streamed handoff: the output of Hugging Face wherever its smallest
 * margin exceeds 0.4, and the strict score beside the reference's. */
#include "tests/e2e/e2e.h"

struct score {
    unsigned right, reference, counted, compared, same;
};

static json_t *load(const char *path)
{
    json_error_t je;
    json_t *j = json_load_file(path, 0, &je);
    if (!j)
        fail_msg("%s: %s", path, je.text);
    return j;
}

static void write_text(const char *path, const char *text)
{
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    assert_int_equal(fclose(f), 0);
}

static void check_prompt(const char *dir, json_t *prompt, json_t *ref, struct score *s)
{
    const char *id = json_string_value(e2e_get(prompt, "id"));
    assert_string_equal(id, json_string_value(e2e_get(ref, "id")));
    const char *file = e2e_temp("prompt.txt");
    write_text(file, json_string_value(e2e_get(prompt, "prompt")));
    const char *args[] = {"run",    "-m",     dir,  "--prompt-file", file, "--mode",
                          "stream", "--json", "-n", "256",           NULL};
    struct e2e r;
    e2e_expect(&r, 0, args);
    const char *text = json_string_value(e2e_get(r.json, "text"));
    const char *want = json_string_value(e2e_get(ref, "output"));
    bool stopped = !strcmp(json_string_value(e2e_get(r.json, "finish")), "stop");
    assert_int_equal(json_array_size(e2e_get(r.json, "prompt_ids")),
                     json_integer_value(e2e_get(ref, "prompt_tokens")));
    if (json_real_value(e2e_get(ref, "min_margin")) > 0.4) {
        s->compared++;
        if (strcmp(text, want))
            fail_msg("%s: '%s', reference '%s'", id, text, want);
        s->same++;
    }
    if (json_is_true(e2e_get(ref, "counted"))) {
        const char *answer = json_string_value(e2e_get(prompt, "answer"));
        s->counted++;
        s->right += stopped && !strcmp(text, answer);
        s->reference += json_is_true(e2e_get(ref, "right"));
    }
    e2e_free(&r);
}

static void check_set(const char *model, const char *set)
{
    struct score s = {0};
    const char *dir = e2e_model(model);
    char path[1200];
    snprintf(path, sizeof path, "%s/reference-%s.json", test_path("tests/quality"), model);
    json_t *reference = load(path);
    json_t *refs = json_object_get(e2e_get(reference, "sets"), set);
    snprintf(path, sizeof path, "%s/%s.jsonl", test_path("tests/quality"), set);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    char *line = NULL;
    size_t cap = 0, i = 0;
    while (getline(&line, &cap, f) > 0) {
        json_t *prompt = json_loads(line, 0, NULL);
        assert_non_null(prompt);
        check_prompt(dir, prompt, json_array_get(refs, i++), &s);
        json_decref(prompt);
    }
    assert_int_equal(i, json_array_size(refs));
    free(line);
    fclose(f);
    json_decref(reference);
    print_message("%s %s: right %u of %u (reference %u); same output %u of %u with margin > 0.4\n",
                  model, set, s.right, s.counted, s.reference, s.same, s.compared);
}

static void test_frozen36(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++)
        check_set(e2e_models[i], "frozen36");
}

static void test_long(void **state)
{
    (void)state;
    for (int i = 0; i < 4; i++)
        check_set(e2e_models[i], "long");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_frozen36),
                                       cmocka_unit_test(test_long)};
    int rc = cmocka_run_group_tests_name("e2e quality", tests, NULL, NULL);
    e2e_temp_remove();
    return rc;
}
