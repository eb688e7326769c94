/* SPDX-License-Identifier: Apache-2.0 */
/* Chat formats: goldens, what each format refuses, where templates are found, unknown ones. The
 * comparison with Jinja on random conversations is in tokenizer_corpus.py. */
#include "folder.h"
#include "goldens.h"
#include "model/chat.h"

enum { MESSAGES_MAX = 16 };

static size_t take_messages(const json_t *list, struct model_message *m)
{
    size_t n = json_array_size(list);
    assert_true(n <= MESSAGES_MAX);
    for (size_t i = 0; i < n; i++) {
        const json_t *one = json_array_get(list, i);
        m[i].role = json_string_value(json_object_get(one, "role"));
        m[i].content = json_string_value(json_object_get(one, "content"));
    }
    return n;
}

static void check_rendered(const struct model_chat *c, const struct model_tokenizer *t,
                           const json_t *chat, const char *key, bool generate, bool think)
{
    const json_t *want = json_object_get(chat, key);
    struct model_message m[MESSAGES_MAX];
    size_t n = take_messages(json_object_get(chat, "messages"), m);
    char *text = NULL;
    struct baton_error e;
    if (!want)
        return;
    test_ok(model_chat_render(c, m, n, generate, think, &text, &e), &e);
    assert_string_equal(text, json_string_value(json_object_get(want, "text")));
    check_ids(t, text, strlen(text), false, json_object_get(want, "ids"));
    free(text);
}

static void goldens(void **state)
{
    static const char *const names[] = {"chatml", "llama3", "gemma"};
    size_t checked = 0;
    (void)state;
    for (size_t i = 0; i < N_GOLDEN_FILES; i++) {
        struct model_tokenizer *t = golden_tokenizer(i);
        struct model_chat *c = NULL;
        json_t *g = golden_load(i), *chat;
        struct baton_error e;
        size_t k;
        test_ok(model_chat_open(test_path(golden_files[i].model), &c, &e), &e);
        assert_string_equal(model_chat_name(c), names[i]);
        json_array_foreach(json_object_get(g, "chats"), k, chat)
        {
            check_rendered(c, t, chat, "prompt", true, true);
            check_rendered(c, t, chat, "full", false, true);
            check_rendered(c, t, chat, "prompt_no_think", true, false);
            checked++;
        }
        json_decref(g);
        model_chat_close(c);
        model_tokenizer_close(t);
    }
    assert_int_equal(checked, 30);
    model_chat_close(NULL);
}

static void refused(const char *dir, const char *role, const char *content, const char *word)
{
    struct model_chat *c = NULL;
    struct baton_error e;
    struct model_message m[] = {{"user", "x"}, {role, content}};
    char *text = (char *)&e;
    test_ok(model_chat_open(test_path(dir), &c, &e), &e);
    test_fails(model_chat_render(c, m, 2, true, true, &text, &e), BATON_ERR_INPUT, word, &e);
    test_fails(model_chat_render(c, m, 0, true, true, &text, &e), BATON_ERR_INPUT, "without", &e);
    assert_true(text == (char *)&e);
    model_chat_close(c);
}

static void bad_conversations_are_named(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_GOLDEN_FILES; i++) {
        const char *dir = golden_files[i].model;
        refused(dir, "tool", "x", "role \"tool\"");
        refused(dir, "", "x", "role \"\"");
        refused(dir, NULL, "x", "no role");
        refused(dir, "user", NULL, "no content");
        refused(dir, "assistant", "a\xC3", "UTF-8 at byte 1");
    }
    refused("models/gemma3-tiny", "user", "x", "in turn");
}

/* ---- where templates come from ------------------------------------------------------------- */

#define CHATML                                                                                     \
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + " \
    "'<|im_end|>' + '\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- "                      \
    "'<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false " \
    "%}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
#define LLAMA3                                                                                     \
    "{{- bos_token }}{%- for message in messages %}{{- '<|start_header_id|>' + message['role'] + " \
    "'<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{%- endfor %}{%- if "    \
    "add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif " \
    "%}"

static void put_config(const char *dir, json_t *template, json_t *bos)
{
    json_t *config = json_object();
    if (template)
        json_object_set_new(config, "chat_template", template);
    if (bos)
        json_object_set_new(config, "bos_token", bos);
    char *text = json_dumps(config, 0);
    put_text(dir, "tokenizer_config.json", text);
    free(text);
    json_decref(config);
}

static void opens_as(const char *dir, const char *name, const char *rendered)
{
    struct model_chat *c = NULL;
    struct model_message m = {"user", " x\x1C\xC2\xA0"};
    struct baton_error e;
    char *text = NULL;
    test_ok(model_chat_open(dir, &c, &e), &e);
    assert_string_equal(model_chat_name(c), name);
    test_ok(model_chat_render(c, &m, 1, false, true, &text, &e), &e);
    assert_string_equal(text, rendered);
    free(text);
    model_chat_close(c);
}

static void templates_are_found(void **state)
{
    char dir[256];
    json_t *named;
    (void)state;
    folder_make(dir);
    put_config(dir, json_string(CHATML), NULL);
    opens_as(dir, "chatml", "<|im_start|>user\n x\x1C\xC2\xA0<|im_end|>\n");
    put_config(dir, json_string(LLAMA3), json_pack("{s:s}", "content", "<B>"));
    opens_as(dir, "llama3", "<B><|start_header_id|>user<|end_header_id|>\n\nx<|eot_id|>");
    named = json_pack("[{s:s,s:s},{s:s,s:s}]", "name", "tool_use", "template", "{{ tools }}",
                      "name", "default", "template", LLAMA3);
    put_config(dir, named, json_string("<B>"));
    opens_as(dir, "llama3", "<B><|start_header_id|>user<|end_header_id|>\n\nx<|eot_id|>");
    put_text(dir, "chat_template.jinja", CHATML); /* goes before the configuration's */
    opens_as(dir, "chatml", "<|im_start|>user\n x\x1C\xC2\xA0<|im_end|>\n");
    folder_remove(dir);
}

static void unknown_templates_are_refused(void **state)
{
    static const struct {
        const char *template, *word;
    } unknown[] = {
        {"{{ messages }}", "none of ChatML"},
        {"", "none of ChatML"},
        /* Says more than the plain form: a default system message, a date, tools. */
        {CHATML "{%- if messages[0].role != 'system' %}You are a helpful assistant{% endif %}",
         "system"},
        {LLAMA3 "{{ \"Cutting Knowledge Date: December 2023\" }}", "Knowledge Date"},
        {LLAMA3 "{% if tools %}{{ tools }}{% endif %}", "tools"},
        {"{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role "
         "not "
         "supported') }}{% endif %}<start_of_turn>model <end_of_turn>",
         "none of ChatML"},
    };
    struct model_chat *c = NULL;
    struct baton_error e;
    char dir[256];
    (void)state;
    folder_make(dir);
    test_fails(model_chat_open(dir, &c, &e), BATON_ERR_IO, "tokenizer_config.json", &e);
    put_config(dir, NULL, NULL);
    test_fails(model_chat_open(dir, &c, &e), BATON_ERR_UNSUPPORTED, "no chat template", &e);
    put_config(dir, json_integer(7), NULL);
    test_fails(model_chat_open(dir, &c, &e), BATON_ERR_UNSUPPORTED, "no chat template", &e);
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        put_config(dir, json_string(unknown[i].template), NULL);
        test_fails(model_chat_open(dir, &c, &e), BATON_ERR_UNSUPPORTED, unknown[i].word, &e);
    }
    put_text(dir, "tokenizer_config.json", "{\"chat_template\": ");
    test_fails(model_chat_open(dir, &c, &e), BATON_ERR_INPUT, "tokenizer_config.json", &e);
    assert_null(c);
    folder_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(goldens),
        cmocka_unit_test(bad_conversations_are_named),
        cmocka_unit_test(templates_are_found),
        cmocka_unit_test(unknown_templates_are_refused),
    };
    return cmocka_run_group_tests_name("model-chat", tests, NULL, NULL);
}
