/* SPDX-License-Identifier: Apache-2.0 */
/* The proxy's configuration: what stands in a file, what on the command line, and everything that
 * is refused, with a sentence that names it. */
#include "tests/test.h"

#include "serve/proxy_priv.h"

static uint64_t seed;

static int parse(struct serve_proxy_config *c, const char *text, struct baton_error *e)
{
    *c = (struct serve_proxy_config){.policy = SERVE_LEAST_LOADED};
    memset(e, 0, sizeof *e);
    return serve_proxy_config_parse(c, text, strlen(text), "the file", e);
}

static void a_file_says_it_all(void **state)
{
    (void)state;
    struct serve_proxy_config c;
    struct baton_error e;
    assert_int_equal(parse(&c,
                           "{\"prefill\":[\"http://a:1\",\"https://[::1]:65535/\"],"
                           "\"decode\":[\"http://a:1\",\"http://b\",\"http://b//\"],"
                           "\"policy\":\"round-robin\",\"min_remote_tokens\":4294967295}",
                           &e),
                     0);
    assert_int_equal(c.n, 4); /* the same one twice is one; of two kinds it is two */
    assert_string_equal(c.members[1].url, "https://[::1]:65535");
    assert_int_equal(c.members[1].side, SERVE_SIDE_PREFILL);
    assert_string_equal(c.members[3].url, "http://b");
    assert_int_equal(c.members[3].side, SERVE_SIDE_DECODE);
    assert_int_equal(c.policy, SERVE_ROUND_ROBIN);
    assert_int_equal(c.min_remote_tokens, UINT32_MAX);
    assert_int_equal(parse(&c, "{}", &e), 0);
    assert_true(c.n == 0 && c.policy == SERVE_LEAST_LOADED && c.min_remote_tokens == 0);
}

static void what_is_wrong_is_named(void **state)
{
    (void)state;
    static const struct {
        const char *text, *named;
    } bad[] = {
        {"", "the file"},
        {"[]", "the file"},
        {"{\"decode\":{}}", "decode"},
        {"{\"decode\":\"http://a\"}", "decode"},
        {"{\"prefill\":[\"http://a\",7]}", "item 1"},
        {"{\"prefil\":[]}", "prefil"},
        {"{\"policy\":\"best\"}", "policy"},
        {"{\"policy\":null}", "policy"},
        {"{\"min_remote_tokens\":-1}", "min_remote_tokens"},
        {"{\"min_remote_tokens\":4294967296}", "min_remote_tokens"},
        {"{\"min_remote_tokens\":\"3\"}", "min_remote_tokens"},
        {"{\"decode\":[],\"decode\":[]}", "decode"},
    };
    static const char *const urls[] = {
        "",
        "a",
        "a:1",
        "http:",
        "http://",
        "https:///",
        "ftp://a",
        "HTTP://a",
        "http://a/b",
        "http://a?b",
        "http://u:p@a",
        "http://a#",
        "http:// a",
        "http://a\\n",
        "http://\\\"",
        "http://a:",
        "http://a:0",
        "http://a:65536",
        "http://a:b",
        "http://:1",
        "http://[::1",
        "http://::1",
        "http://[::1]8",
        "http://a]:1",
        "http://a:99999999999999999999",
    };
    struct serve_proxy_config c;
    struct baton_error e;
    char text[512];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (parse(&c, bad[i].text, &e) == 0 || !strstr(e.text, bad[i].named))
            fail_msg("%s: '%s'", bad[i].text, e.text);
    for (size_t i = 0; i < sizeof urls / sizeof *urls; i++) {
        snprintf(text, sizeof text, "{\"decode\":[\"%s\"]}", urls[i]);
        if (parse(&c, text, &e) == 0 || !strstr(e.text, "the file: decode"))
            fail_msg("%s: '%s'", urls[i], e.text);
    }
}

static void sizes_are_bounded(void **state)
{
    (void)state;
    struct serve_proxy_config c;
    struct baton_error e;
    struct serve_text t = {0};
    char url[300];
    for (unsigned n = SERVE_MAX_MEMBERS; n <= SERVE_MAX_MEMBERS + 1; n++) {
        t.n = 0;
        for (unsigned i = 0; i < n; i++)
            serve_text_printf(&t, "%s\"http://h%u\"", i ? "," : "{\"decode\":[", i);
        serve_text_put(&t, "]}", 2);
        assert_int_equal(parse(&c, t.data, &e), n > SERVE_MAX_MEMBERS ? BATON_ERR_USAGE : 0);
    }
    for (unsigned n = SERVE_URL_BYTES - 1; n <= SERVE_URL_BYTES; n++) {
        memset(url, 'a', sizeof url);
        memcpy(url, "http://", 7);
        url[n] = '\0';
        t.n = 0;
        serve_text_printf(&t, "{\"decode\":[\"%s\"]}", url);
        assert_int_equal(parse(&c, t.data, &e), n == SERVE_URL_BYTES ? BATON_ERR_USAGE : 0);
    }
    serve_text_free(&t);
}

static void the_command_line_comes_first(void **state)
{
    (void)state;
    static const char *const prefill[] = {"http://p"}, *const decode[] = {"http://d", "http://d/"};
    struct serve_proxy_options o = {.prefill = prefill, .n_prefill = 1};
    struct serve_proxy_config c;
    struct baton_error e;
    assert_int_equal(serve_proxy_config_load(&c, &o, &e), BATON_ERR_USAGE);
    assert_non_null(strstr(e.text, "--decode"));
    o.decode = decode;
    o.n_decode = 2;
    assert_int_equal(serve_proxy_config_load(&c, &o, &e), 0);
    assert_true(c.n == 2 && c.policy == SERVE_LEAST_LOADED);
    o.policy = SERVE_ROUND_ROBIN;
    o.min_remote_said = true;
    o.min_remote_tokens = 9;
    assert_int_equal(serve_proxy_config_load(&c, &o, &e), 0);
    assert_true(c.policy == SERVE_ROUND_ROBIN && c.min_remote_tokens == 9);
    o.config = "/no/such/file";
    assert_int_not_equal(serve_proxy_config_load(&c, &o, &e), 0);
    assert_non_null(strstr(e.text, "/no/such/file"));
}

/* A good file with some bytes changed: what is accepted are addresses. */
static void changed_files_stay_in_bounds(void **state)
{
    (void)state;
    static const char good[] = "{\"prefill\":[\"http://a:1\"],\"decode\":[\"https://[::1]:80\"],"
                               "\"policy\":\"round-robin\",\"min_remote_tokens\":12}";
    struct serve_proxy_config c;
    struct baton_error e;
    for (int i = 0; i < 20000; i++) {
        char text[sizeof good];
        memcpy(text, good, sizeof good);
        for (uint32_t k = test_range(&seed, 1, 3); k; k--)
            text[test_range(&seed, 0, sizeof good - 2)] = (char)test_range(&seed, ' ', '~');
        if (parse(&c, text, &e)) {
            assert_true(e.text[0] != '\0');
            continue;
        }
        for (size_t m = 0; m < c.n; m++)
            assert_true(!strncmp(c.members[m].url, "http", 4) &&
                        !strpbrk(c.members[m].url, "@?#\""));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_file_says_it_all),
        cmocka_unit_test(what_is_wrong_is_named),
        cmocka_unit_test(sizes_are_bounded),
        cmocka_unit_test(the_command_line_comes_first),
        cmocka_unit_test(changed_files_stay_in_bounds),
    };
    seed = test_seed();
    return cmocka_run_group_tests_name("serve-proxy-config", tests, NULL, NULL);
}
