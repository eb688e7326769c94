/* SPDX-License-Identifier: Apache-2.0 */
/* JSON: what is refused, what is read, and typed members. */
#include <jansson.h>
#include <unistd.h>

#include "base/base.h"
#include "../test.h"

static int parse(const char *text, json_t **out, struct baton_error *e)
{
    /* a copy without NUL in its own block: reads past the end are seen by ASan */
    size_t n = strlen(text);
    char *exact = malloc(n ? n : 1);
    memcpy(exact, text, n);
    int rc = base_json_parse(exact, n, "source", out, e);
    free(exact);
    return rc;
}

static void refused(void **state)
{
    static const char *const cases[][2] = {
        {"", "source"},
        {"{", "source"},
        {"{}x", "source"},
        {"{\"a\":1}{}", "source"},
        {"{\"a\":1,\"a\":2}", "duplicate"},
        {"{\"a\":{\"b\":1,\"b\":1}}", "duplicate"},
        {"{\"a\":NaN}", "NaN"},
        {"{\n\"a\":\n-Infinity}", "line 3: Infinity"},
        {"[Infinity]", "Infinity"},
        {"[1e999]", "overflow"},
        {"[-1e999]", "overflow"},
        {"[1,]", "source"},
        {"[01]", "source"},
        {"[\"\xff\"]", "decode byte"},
        {"[\"\\ud800\"]", "source"},
        {"[\"a", "source"},
        {"[\"a\\", "source"},
        {"[\"\\u0000\"]", "source"},
        {"[-]", "source"},
        {"[nul]", "source"},
        {"Not JSON", "source"},
    };
    struct baton_error e;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        json_t *v = (json_t *)(uintptr_t)0x51;
        test_fails(parse(cases[i][0], &v, &e), BATON_ERR_INPUT, cases[i][1], &e);
        assert_non_null(strstr(e.text, "source"));
        assert_true((uintptr_t)v == 0x51);
    }
}

static void nesting(void **state)
{
    static char text[1 << 20];
    struct baton_error e;
    json_t *v = NULL;
    for (int depth = 255; depth <= 257; depth++) {
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        text[2 * depth] = '\0';
        if (depth <= 256) {
            test_ok(parse(text, &v, &e), &e);
            json_decref(v);
        } else {
            test_fails(parse(text, &v, &e), BATON_ERR_INPUT, "deeper than 256", &e);
        }
    }
    memset(text, '[', sizeof text - 1); /* would overflow the stack of a recursive parser */
    test_fails(parse(text, &v, &e), BATON_ERR_INPUT, "deeper", &e);
    for (size_t i = 0; i + 6 < sizeof text; i += 5)
        memcpy(text + i, "{\"a\":", 6);
    test_fails(parse(text, &v, &e), BATON_ERR_INPUT, "deeper", &e);
    /* brackets in strings are no nesting */
    size_t n = 0;
    n += (size_t)sprintf(text + n, "[\"\\\"");
    memset(text + n, '[', 1000);
    sprintf(text + n + 1000, "\\\\\",\"NaN Infinity\"]");
    test_ok(parse(text, &v, &e), &e);
    json_decref(v);
}

static void wide_integers(void **state)
{
    struct baton_error e;
    json_t *v = NULL;
    test_ok(parse("{\"a\":1000000000000000019884624838656,\"b\":[-9223372036854775808,"
                  "9223372036854775807,9223372036854775808,-99999999999999999999],"
                  "\"c\":\"99999999999999999999\",\"d\":0.12345678901234567890123,"
                  "\"f\":123456789012345678901234.5e-3,\"g\":18446744073709551615}",
                  &v, &e),
            &e);
    assert_true(json_real_value(json_object_get(v, "a")) == 1e30);
    json_t *b = json_object_get(v, "b");
    assert_true(json_integer_value(json_array_get(b, 0)) == INT64_MIN);
    assert_true(json_integer_value(json_array_get(b, 1)) == INT64_MAX);
    assert_true(json_real_value(json_array_get(b, 2)) == 9223372036854775808.0);
    assert_true(json_real_value(json_array_get(b, 3)) == -1e20);
    assert_string_equal(json_string_value(json_object_get(v, "c")), "99999999999999999999");
    assert_true(json_real_value(json_object_get(v, "d")) == 0.12345678901234567890123);
    assert_true(json_real_value(json_object_get(v, "f")) == 123456789012345678901.2345);
    assert_true(json_real_value(json_object_get(v, "g")) == 18446744073709551616.0);
    json_decref(v);
}

static void members(void **state)
{
    struct baton_error e;
    json_t *v = NULL;
    test_ok(parse("{\"i\":42,\"r\":1.5,\"t\":true,\"s\":\"x\",\"z\":null,\"neg\":-1,"
                  "\"big\":4294967296,\"huge\":1000000000000000000000000,\"max\":4294967295,"
                  "\"int_real\":3}",
                  &v, &e),
            &e);
    uint32_t u = 7;
    double d = 7;
    bool t = false;
    const char *s = "old";
    test_ok(base_json_u32(v, "i", true, 0, 100, &u, "cfg", &e), &e);
    assert_int_equal(u, 42);
    test_ok(base_json_u32(v, "max", true, 0, UINT32_MAX, &u, "cfg", &e), &e);
    assert_true(u == UINT32_MAX);
    test_ok(base_json_u32(v, "none", false, 0, 1, &u, "cfg", &e), &e);
    test_ok(base_json_u32(v, "z", false, 0, 1, &u, "cfg", &e), &e);
    assert_true(u == UINT32_MAX);
    test_fails(base_json_u32(v, "none", true, 0, 1, &u, "cfg", &e), BATON_ERR_INPUT,
               "cfg: \"none\" is missing", &e);
    test_fails(base_json_u32(v, "z", true, 0, 1, &u, "cfg", &e), BATON_ERR_INPUT, "missing", &e);
    test_fails(base_json_u32(v, "i", true, 43, 100, &u, "cfg", &e), BATON_ERR_INPUT, "is 42", &e);
    test_fails(base_json_u32(v, "i", true, 0, 41, &u, "cfg", &e), BATON_ERR_INPUT, "[0, 41]", &e);
    test_fails(base_json_u32(v, "neg", true, 0, 9, &u, "cfg", &e), BATON_ERR_INPUT, "is -1", &e);
    test_fails(base_json_u32(v, "big", true, 0, UINT32_MAX, &u, "cfg", &e), BATON_ERR_INPUT,
               "4294967296", &e);
    test_fails(base_json_u32(v, "huge", true, 0, 9, &u, "cfg", &e), BATON_ERR_INPUT, "1e+24", &e);
    test_fails(base_json_u32(v, "r", true, 0, 9, &u, "cfg", &e), BATON_ERR_INPUT, "integer", &e);
    test_fails(base_json_u32(v, "t", true, 0, 9, &u, "cfg", &e), BATON_ERR_INPUT, "integer", &e);
    test_fails(base_json_u32(v, "s", false, 0, 9, &u, "cfg", &e), BATON_ERR_INPUT, "\"s\"", &e);
    assert_true(u == UINT32_MAX);
    test_ok(base_json_f64(v, "r", true, 0, 2, &d, "cfg", &e), &e);
    assert_true(d == 1.5);
    test_ok(base_json_f64(v, "int_real", true, 3, 3, &d, "cfg", &e), &e);
    assert_true(d == 3.0);
    test_fails(base_json_f64(v, "r", true, 1.6, 2, &d, "cfg", &e), BATON_ERR_INPUT, "1.5", &e);
    test_fails(base_json_f64(v, "t", true, 0, 2, &d, "cfg", &e), BATON_ERR_INPUT, "a number", &e);
    assert_true(d == 3.0);
    test_ok(base_json_bool(v, "t", true, &t, "cfg", &e), &e);
    assert_true(t);
    test_fails(base_json_bool(v, "i", true, &t, "cfg", &e), BATON_ERR_INPUT, "true or false", &e);
    test_ok(base_json_str(v, "s", true, &s, "cfg", &e), &e);
    assert_string_equal(s, "x");
    test_fails(base_json_str(v, "i", true, &s, "cfg", &e), BATON_ERR_INPUT, "a string", &e);
    test_fails(base_json_str(json_object_get(v, "i"), "s", true, &s, "cfg", &e), BATON_ERR_INPUT,
               "object", &e);
    test_fails(base_json_str(NULL, "s", true, &s, "cfg", &e), BATON_ERR_INPUT, "object", &e);
    json_decref(v);
}

/* Random edits of a valid text never crash, and never leave a value beside an error. */
static void mutated(void **state)
{
    static const char seed_text[] = "{\"a\":[1,2.5e3,-7,\"x\\n\\u00e9\",null,true],\"b\":{\"c\":"
                                    "123456789012345678901},\"d\":\"\\\"[{\"}";
    static const char bytes[] = "\"\\[]{},:0123456789-+.eENIntf \xff\xc3";
    uint64_t seed = test_seed();
    unsigned good = 0;
    for (int i = 0; i < 20000; i++) {
        char text[sizeof seed_text];
        struct baton_error e = {0};
        json_t *v = NULL;
        memcpy(text, seed_text, sizeof text);
        for (uint32_t k = test_range(&seed, 0, 3); k > 0; k--)
            text[test_range(&seed, 0, sizeof text - 2)] =
                bytes[test_range(&seed, 0, sizeof bytes - 2)];
        text[test_range(&seed, sizeof text / 2, sizeof text - 1)] = '\0';
        text[sizeof text - 1] = '\0';
        int rc = parse(i % 4 == 0 ? seed_text : text, &v, &e);
        assert_int_equal(rc == 0, v != NULL);
        assert_int_equal(rc, e.code);
        good += rc == 0;
        json_decref(v);
    }
    assert_true(good >= 5000);
}

static void load_names_the_file(void **state)
{
    struct baton_error e;
    json_t *v = NULL;
    test_ok(base_json_load(test_path("models/qwen3-tiny/config.json"), 1 << 20, &v, &e), &e);
    assert_true(json_is_object(v));
    json_decref(v);
    test_fails(base_json_load(test_path("models/qwen3-tiny/config.json"), 10, &v, &e),
               BATON_ERR_INPUT, "config.json: larger than the 10 bytes", &e);
    test_fails(base_json_load(test_path("models/none.json"), 10, &v, &e), BATON_ERR_IO, "none.json",
               &e);
    test_fails(base_json_load(test_path("LICENSE"), 1 << 20, &v, &e), BATON_ERR_INPUT, "LICENSE",
               &e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refused), cmocka_unit_test(nesting), cmocka_unit_test(wide_integers),
        cmocka_unit_test(members), cmocka_unit_test(mutated), cmocka_unit_test(load_names_the_file),
    };
    return cmocka_run_group_tests_name("base-json", tests, NULL, NULL);
}
