/* SPDX-License-Identifier: Apache-2.0 */
/* Requests as they come: defaults, every parameter with values of every wrong kind, prompts and
 * messages in each of their forms, and random documents, of which none may be accepted out of its
 * bounds. */
#include "tests/test.h"

#include "serve/serve_priv.h"

static uint64_t seed;

static int parse(struct serve_ask *a, enum serve_kind kind, const char *body,
                 struct serve_problem *p)
{
    memset(p, 0xa5, sizeof *p);
    return serve_ask_parse(a, kind, body, strlen(body), p);
}

static const char *base_of(enum serve_kind kind)
{
    return kind == SERVE_CHAT ? "\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]"
                              : "\"prompt\":\"a\"";
}

/* A good request with one more member: refused for `param`. */
static void refused(enum serve_kind kind, const char *param, const char *value, const char *more)
{
    struct serve_ask a;
    struct serve_problem p;
    char body[2048];
    snprintf(body, sizeof body, "{%s,\"%s\":%s%s}", base_of(kind), param, value, more);
    if (parse(&a, kind, body, &p) == 0)
        fail_msg("accepted: %s", body);
    if (p.status != 400 || strcmp(p.param, param) != 0 || !p.message[0] ||
        strcmp(p.type, "invalid_request_error") != 0)
        fail_msg("%s: status %d, param '%s', '%s'", body, p.status, p.param, p.message);
    serve_ask_free(&a);
}

static void accepted(enum serve_kind kind, const char *param, const char *value, const char *more,
                     struct serve_ask *a)
{
    struct serve_problem p;
    char body[2048];
    snprintf(body, sizeof body, "{%s,\"%s\":%s%s}", base_of(kind), param, value, more);
    if (parse(a, kind, body, &p))
        fail_msg("refused: %s: %s", body, p.message);
}

enum what { BOOL, WHOLE, NUMBER, STRING, OBJECT };

struct parameter {
    const char *name;
    enum what what;
    const char *good[2], *beyond[2]; /* at the borders, and just past them; NULL = none */
    const char *more;
};

static const struct parameter both[] = {
    {"model", STRING, {"\"x\"", "\"\""}, {NULL, NULL}, ""},
    {"n", WHOLE, {"1", "64"}, {"0", "65"}, ""},
    {"max_tokens", WHOLE, {"1", "2147483647"}, {"0", "2147483648"}, ""},
    {"min_tokens", WHOLE, {"0", "50"}, {"-1", "51"}, ",\"max_tokens\":50"},
    {"temperature", NUMBER, {"0", "2"}, {"-0.001", "2.001"}, ""},
    {"top_p", NUMBER, {"0.0001", "1"}, {"0", "1.001"}, ""},
    {"top_k", WHOLE, {"-1", "2147483647"}, {"-2", "2147483648"}, ""},
    {"min_p", NUMBER, {"0", "1"}, {"-0.01", "1.01"}, ""},
    {"repetition_penalty", NUMBER, {"0.01", "100"}, {"0.0099", "100.1"}, ""},
    {"presence_penalty", NUMBER, {"-2", "2"}, {"-2.01", "2.01"}, ""},
    {"frequency_penalty", NUMBER, {"-2", "2"}, {"-2.01", "2.01"}, ""},
    {"seed", WHOLE, {"-9223372036854775808", "9223372036854775807"}, {NULL, NULL}, ""},
    {"stream", BOOL, {"true", "false"}, {NULL, NULL}, ""},
    {"stream_options",
     OBJECT,
     {"{}", "{\"include_usage\":true}"},
     {NULL, NULL},
     ",\"stream\":true"},
    {"ignore_eos", BOOL, {"true", "false"}, {NULL, NULL}, ""},
    {"return_token_ids", BOOL, {"true", "false"}, {NULL, NULL}, ""},
    {"skip_special_tokens", BOOL, {"true", "false"}, {NULL, NULL}, ""},
    {"kv_transfer_params",
     OBJECT,
     {"{}", "{\"do_remote_decode\":false,\"x\":1}"},
     {NULL, NULL},
     ""},
};
static const struct parameter completions[] = {
    {"logprobs", WHOLE, {"0", "20"}, {"-1", "21"}, ""},
    {"best_of", WHOLE, {"1", "1"}, {"0", "2"}, ""},
};
static const struct parameter chats[] = {
    {"logprobs", BOOL, {"true", "false"}, {NULL, NULL}, ""},
    {"top_logprobs", WHOLE, {"0", "20"}, {"-1", "21"}, ",\"logprobs\":true"},
    {"max_completion_tokens", WHOLE, {"1", "2147483647"}, {"0", "2147483648"}, ""},
    {"chat_template_kwargs", OBJECT, {"{}", "{\"enable_thinking\":false}"}, {NULL, NULL}, ""},
};

static void check_parameter(enum serve_kind kind, const struct parameter *q)
{
    /* a value of each kind; numbers that are whole are numbers too */
    static const char *const values[] = {[BOOL] = "true",
                                         [WHOLE] = "1",
                                         [NUMBER] = "0.5",
                                         [STRING] = "\"1\"",
                                         [OBJECT] = "{\"a\":1}"};
    struct serve_ask a;
    for (enum what w = BOOL; w <= OBJECT; w++)
        if (w != q->what && !(q->what == NUMBER && w == WHOLE))
            refused(kind, q->name, values[w], q->more);
    refused(kind, q->name, "[]", q->more);
    refused(kind, q->name, "[[1]]", q->more);
    for (int i = 0; i < 2; i++) {
        accepted(kind, q->name, q->good[i], q->more, &a);
        serve_ask_free(&a);
        if (q->beyond[i])
            refused(kind, q->name, q->beyond[i], q->more);
    }
    accepted(kind, q->name, "null", q->more, &a);
    serve_ask_free(&a);
}

static void every_parameter_has_a_type_and_a_range(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof both / sizeof *both; i++) {
        check_parameter(SERVE_COMPLETION, &both[i]);
        check_parameter(SERVE_CHAT, &both[i]);
    }
    for (size_t i = 0; i < sizeof completions / sizeof *completions; i++)
        check_parameter(SERVE_COMPLETION, &completions[i]);
    for (size_t i = 0; i < sizeof chats / sizeof *chats; i++)
        check_parameter(SERVE_CHAT, &chats[i]);
}

static void what_is_not_built_is_refused(void **state)
{
    (void)state;
    static const char *const names[] = {"tools",  "functions",          "logit_bias",  "echo",
                                        "suffix", "structured_outputs", "guided_json", "audio"};
    struct serve_ask a;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        refused(SERVE_CHAT, names[i], "{\"a\":1}", "");
        refused(SERVE_COMPLETION, names[i], "true", "");
        accepted(SERVE_CHAT, names[i], "[]", "", &a);
        serve_ask_free(&a);
        accepted(SERVE_CHAT, names[i], "false", "", &a);
        serve_ask_free(&a);
    }
    refused(SERVE_CHAT, "response_format", "{\"type\":\"json_object\"}", "");
    refused(SERVE_CHAT, "response_format", "{\"type\":7}", "");
    accepted(SERVE_CHAT, "response_format", "{\"type\":\"text\"}", "", &a);
    serve_ask_free(&a);
}

static void the_halves_of_a_pair(void **state)
{
    (void)state;
    static const char in[] = "{\"do_remote_prefill\":true,\"remote_request_id\":\"bt1.x\","
                             "\"remote_host\":\"::1\",\"remote_port\":9,\"new\":[1]}";
    static const char *const places[] = {"kv_transfer_params", "vllm_xargs", "sampling_params"};
    char value[512];
    struct serve_ask a;
    for (int i = 0; i < 3; i++) {
        snprintf(value, sizeof value,
                 i == 0   ? "%s"
                 : i == 1 ? "{\"kv_transfer_params\":%s}"
                          : "{\"extra_args\":{\"kv_transfer_params\":%s}}",
                 in);
        accepted(SERVE_CHAT, places[i], value, i ? ",\"kv_transfer_params\":null" : "", &a);
        assert_true(a.transfer.in && !a.transfer.out && a.transfer.port == 9);
        assert_string_equal(a.transfer.ticket, "bt1.x");
        assert_string_equal(a.transfer.host, "::1");
        serve_ask_free(&a);
    }
    accepted(SERVE_CHAT, "kv_transfer_params", "{\"do_remote_decode\":true}",
             ",\"max_tokens\":1,\"min_tokens\":7,\"stream_options\":{}", &a);
    assert_true(a.transfer.out && !a.transfer.in && !a.stream);
    serve_ask_free(&a);
    refused(SERVE_COMPLETION, "kv_transfer_params", "{\"do_remote_prefill\":true}", "");
    refused(SERVE_COMPLETION, "kv_transfer_params",
            "{\"do_remote_prefill\":true,\"do_remote_decode\":true}", "");
}

static void allow(const char *net, const char *host, bool want)
{
    struct serve_allow *a = NULL;
    struct baton_error e;
    const struct serve_options o = {.kv_allow = &net, .n_kv_allow = net != NULL, .kv_keyed = true};
    test_ok(serve_allow_open(&o, &a, &e), &e);
    if (serve_allowed(a, host) != want)
        fail_msg("%s with --kv-allow %s", host, net ? net : "(none)");
    serve_allow_close(a);
}

static void networks_and_names(void **state)
{
    (void)state;
    allow(NULL, "127.3.2.1", true);
    allow(NULL, "::ffff:127.0.0.1", true);
    allow(NULL, "::1", true);
    allow(NULL, "LOCALHOST", true);
    allow(NULL, "128.0.0.1", false);
    allow(NULL, "::2", false);
    allow("10.1.2.0/23", "10.1.3.255", true);
    allow("10.1.2.0/23", "10.1.4.0", false);
    allow("10.1.2.0/23", "10.1.1.255", false);
    allow("10.1.2.3", "10.1.2.3", true);
    allow("10.1.2.3", "10.1.2.2", false);
    allow("0.0.0.0/0", "255.1.1.1", true);
    allow("0.0.0.0/0", "fd00::1", false);
    allow("::/0", "10.0.0.1", true); /* all there is, IPv4 as it is mapped */
    allow("fd00:8::/29", "fd00:f::1", true);
    allow("fd00:8::/29", "fd00:10::1", false);
    allow("p1.example", "P1.Example", true);
    allow("p1.example", "p1.example.org", false);
    assert_true(serve_host_local("127.0.0.1") && serve_host_local("::1"));
    assert_false(serve_host_local("0.0.0.0") || serve_host_local("::") || serve_host_local("a"));
}

static void defaults_are_those_of_the_api(void **state)
{
    (void)state;
    struct serve_ask a;
    accepted(SERVE_COMPLETION, "unknown", "{\"x\":[1]}", "", &a);
    assert_true(a.n == 1 && a.max_tokens == 16 && !a.max_said && a.min_tokens == 0);
    assert_true(a.temperature == 1 && a.top_p == 1 && a.min_p == 0 && a.top_k == 0);
    assert_true(a.repetition_penalty == 1 && a.presence_penalty == 0 && a.frequency_penalty == 0);
    assert_true(!a.stream && !a.logprobs && !a.seeded && !a.ignore_eos && !a.return_token_ids);
    assert_true(a.n_stops == 0 && a.n_prompts == 1 && !strcmp(a.prompts[0].text, "a"));
    serve_ask_free(&a);
    accepted(SERVE_CHAT, "max_tokens", "5", ",\"max_completion_tokens\":7", &a);
    assert_true(a.max_tokens == 7 && a.max_said && a.think); /* the newer name wins */
    serve_ask_free(&a);
    accepted(SERVE_CHAT, "x", "1", "", &a);
    assert_true(a.max_tokens == 0);
    serve_ask_free(&a);
}

static void stops_are_strings(void **state)
{
    (void)state;
    struct serve_ask a;
    static const char *const bad[] = {"5",    "true",   "{}",       "[1]", "[\"a\",null]",
                                      "\"\"", "[\"\"]", "[[\"a\"]]"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        refused(SERVE_COMPLETION, "stop", bad[i], "");
    refused(SERVE_COMPLETION, "stop",
            "[\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\","
            "\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\",\"1\"]",
            "");
    accepted(SERVE_CHAT, "stop", "[]", "", &a);
    assert_int_equal(a.n_stops, 0);
    serve_ask_free(&a);
    accepted(SERVE_CHAT, "stop", "[\"b\",\"\\u00e9\"]", "", &a);
    assert_true(a.n_stops == 2 && !strcmp(a.stops[1], "\xc3\xa9"));
    serve_ask_free(&a);
    refused(SERVE_CHAT, "stop_token_ids", "[1,-1]", "");
    refused(SERVE_CHAT, "stop_token_ids", "{}", "");
    accepted(SERVE_CHAT, "stop_token_ids", "[1,2147483647]", "", &a);
    assert_true(a.n_stop_ids == 2 && a.stop_ids[1] == INT32_MAX);
    serve_ask_free(&a);
}

/* Documents whose prompt or messages are wrong, and the member that is named. */
static void prompts_have_four_forms(void **state)
{
    (void)state;
    struct serve_ask a;
    struct serve_problem p;
    static const char *const bad[] = {"{}",
                                      "{\"prompt\":null}",
                                      "{\"prompt\":\"\"}",
                                      "{\"prompt\":[]}",
                                      "{\"prompt\":5}",
                                      "{\"prompt\":{}}",
                                      "{\"prompt\":[\"a\",5]}",
                                      "{\"prompt\":[5,\"a\"]}",
                                      "{\"prompt\":[[]]}",
                                      "{\"prompt\":[[1],[1.5]]}",
                                      "{\"prompt\":[2147483648]}",
                                      "{\"prompt\":[null]}"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        if (parse(&a, SERVE_COMPLETION, bad[i], &p) == 0)
            fail_msg("accepted: %s", bad[i]);
        assert_string_equal(p.param, "prompt");
        serve_ask_free(&a);
    }
    assert_int_equal(parse(&a, SERVE_COMPLETION, "{\"prompt\":[3,2147483647]}", &p), 0);
    assert_true(a.n_prompts == 1 && a.prompts[0].n_ids == 2 && a.prompts[0].ids[1] == INT32_MAX);
    serve_ask_free(&a);
    assert_int_equal(parse(&a, SERVE_COMPLETION, "{\"prompt\":[[3],[4,5]],\"n\":2}", &p), 0);
    assert_true(a.n_prompts == 2 && a.prompts[1].n_ids == 2 && a.prompts[1].ids[1] == 5);
    serve_ask_free(&a);
    assert_int_equal(parse(&a, SERVE_COMPLETION, "{\"prompt\":[\"x\",\"y\"]}", &p), 0);
    assert_true(a.n_prompts == 2 && !strcmp(a.prompts[1].text, "y"));
    serve_ask_free(&a);
    assert_int_not_equal(
        parse(&a, SERVE_COMPLETION, "{\"prompt\":[\"x\",\"y\",\"z\"],\"n\":64}", &p), 0);
    assert_string_equal(p.param, "n"); /* 192 choices */
    serve_ask_free(&a);
}

static void messages_have_roles_and_text(void **state)
{
    (void)state;
    struct serve_ask a;
    struct serve_problem p;
    static const char *const bad[] = {
        "null",
        "[]",
        "{}",
        "\"a\"",
        "[1]",
        "[{}]",
        "[{\"role\":\"user\"}]",
        "[{\"content\":\"a\"}]",
        "[{\"role\":1,\"content\":\"a\"}]",
        "[{\"role\":\"tool\",\"content\":\"a\"}]",
        "[{\"role\":\"user\",\"content\":5}]",
        "[{\"role\":\"user\",\"content\":[5]}]",
        "[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"text\":\"a\"}]}]",
        "[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]"};
    char body[512];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        snprintf(body, sizeof body, "{\"messages\":%s}", bad[i]);
        if (parse(&a, SERVE_CHAT, body, &p) == 0)
            fail_msg("accepted: %s", body);
        assert_string_equal(p.param, "messages");
        serve_ask_free(&a);
    }
    assert_int_equal(parse(&a, SERVE_CHAT,
                           "{\"messages\":[{\"role\":\"developer\",\"content\":\"s\"},"
                           "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"a\"},"
                           "{\"type\":\"text\",\"text\":\"b\"}]},"
                           "{\"role\":\"assistant\",\"content\":[]}]}",
                           &p),
                     0);
    assert_int_equal(a.n_messages, 3);
    assert_string_equal(a.messages[0].role, "system");
    assert_string_equal(a.messages[1].content, "ab");
    assert_string_equal(a.messages[2].content, "");
    serve_ask_free(&a);
}

/* Bytes of a good request changed at random: whatever is accepted is inside every bound. */
static void changed_requests_stay_in_bounds(void **state)
{
    (void)state;
    static const char good[] =
        "{\"prompt\":[1,2,3],\"n\":2,\"max_tokens\":9,\"min_tokens\":1,\"temperature\":0.5,"
        "\"top_k\":5,\"top_p\":0.9,\"seed\":12,\"stop\":[\"a\"],\"logprobs\":2,\"stream\":true}";
    struct serve_ask a;
    struct serve_problem p;
    unsigned n_good = 0;
    for (int i = 0; i < 20000; i++) {
        char body[sizeof good];
        memcpy(body, good, sizeof good);
        for (uint32_t k = test_range(&seed, 1, 3); k > 0; k--)
            body[test_range(&seed, 0, sizeof good - 2)] =
                "0123456789-.e\"[]{},:tfn "[test_range(&seed, 0, 23)];
        memset(&p, 0xa5, sizeof p);
        if (serve_ask_parse(&a, SERVE_COMPLETION, body, sizeof good - 1, &p) == 0) {
            n_good++;
            assert_in_range(a.n, 1, 64);
            assert_true(a.max_tokens >= 1 && a.min_tokens <= a.max_tokens);
            assert_true(a.temperature >= 0 && a.temperature <= 2 && a.top_p > 0 && a.top_p <= 1);
            assert_true(a.n_prompts * a.n <= SERVE_MAX_CHOICES && a.n_top <= SERVE_MAX_TOP);
            for (size_t k = 0; k < a.n_prompts; k++)
                assert_true(a.prompts[k].text || a.prompts[k].n_ids > 0);
        } else {
            assert_true(p.status == 400 && p.message[0]);
        }
        serve_ask_free(&a);
    }
    assert_true(n_good > 100 && n_good < 19000);
}

static void problems_are_written_as_the_api_does(void **state)
{
    (void)state;
    struct serve_problem p;
    struct serve_text t = {0};
    serve_refuse(&p, 429, "queue_full", NULL, "a \"b\" \n \xff %d", 5);
    assert_int_equal(serve_text_json(&t, serve_problem_json(&p)), 0);
    assert_string_equal(t.data, "{\"error\":{\"message\":\"a \\\"b\\\" ? ? 5\",\"type\":"
                                "\"rate_limit_error\",\"param\":null,\"code\":\"queue_full\"}}");
    serve_text_free(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_parameter_has_a_type_and_a_range),
        cmocka_unit_test(the_halves_of_a_pair),
        cmocka_unit_test(networks_and_names),
        cmocka_unit_test(what_is_not_built_is_refused),
        cmocka_unit_test(defaults_are_those_of_the_api),
        cmocka_unit_test(stops_are_strings),
        cmocka_unit_test(prompts_have_four_forms),
        cmocka_unit_test(messages_have_roles_and_text),
        cmocka_unit_test(changed_requests_stay_in_bounds),
        cmocka_unit_test(problems_are_written_as_the_api_does),
    };
    seed = test_seed();
    return cmocka_run_group_tests_name("serve-ask", tests, NULL, NULL);
}
