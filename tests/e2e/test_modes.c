/* SPDX-License-Identifier: Apache-2.0 */
/* native = whole = stream: the same logit bits on cpu, from 1 to 8192 prompt tokens, all shipped
 * models. Files are compared byte by byte; positions and slot counts are checked beside them. */
#include <unistd.h>

#include "tests/e2e/e2e.h"

static const uint32_t lengths[] = {1, 2, 127, 128, 129, 511, 512, 513, 1025, 2048, 8192};

static int32_t *random_prompt(uint64_t *seed, uint32_t n, uint32_t vocab)
{
    int32_t *ids = malloc(n * sizeof *ids);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)test_range(seed, 0, vocab - 1);
    return ids;
}

static bool same_file(const char *a, const char *b)
{
    FILE *fa = fopen(a, "rb"), *fb = fopen(b, "rb");
    assert_non_null(fa);
    assert_non_null(fb);
    bool same = true;
    for (int ca = 0; same && ca != EOF;) {
        ca = getc(fa);
        same = ca == getc(fb);
    }
    fclose(fa);
    fclose(fb);
    return same;
}

static void check_positions(json_t *doc, const struct model_config *c, uint32_t n)
{
    uint32_t local = 0;
    for (uint32_t l = 0; l < c->n_layers; l++)
        local += c->local[l];
    assert_int_equal(json_integer_value(e2e_get(doc, "handoff.layers")), c->n_layers);
    assert_int_equal(json_integer_value(e2e_get(doc, "handoff.slots")), 2 * c->n_layers);
    json_t *g = e2e_get(doc, "handoff.positions.global");
    assert_int_equal(json_integer_value(json_array_get(g, 0)), 0);
    assert_int_equal(json_integer_value(json_array_get(g, 1)), n - 1);
    json_t *l = e2e_get(doc, "handoff.positions.local");
    if (!local) {
        assert_true(json_is_null(l));
        return;
    }
    uint32_t first = n + 1 > c->window ? n + 1 - c->window : 0;
    if (n == 1 && first > 0) /* a window of one keeps nothing */
        first = 0;
    assert_int_equal(json_integer_value(json_array_get(l, 0)), first);
    assert_int_equal(json_integer_value(json_array_get(l, 1)), n - 1);
}

static void run_mode(const char *dir, const char *mode, const char *transport, const char *ids,
                     const char *out, const struct model_config *c, uint32_t n)
{
    struct e2e r;
    const char *args[] = {"run",         "-m",       dir,     "--mode", mode,
                          "--transport", transport,  "--ids", ids,      "--force",
                          "1,2,3,4",     "--logits", out,     "--json", NULL};
    e2e_expect(&r, 0, args);
    assert_non_null(r.json);
    if (strcmp(mode, "native")) {
        check_positions(r.json, c, n);
        assert_string_equal(json_string_value(e2e_get(r.json, "handoff.verdict")), "verified");
    }
    e2e_free(&r);
}

static void check_model(const char *name)
{
    struct baton_error e;
    struct model *m = NULL;
    const char *dir = e2e_model(name);
    uint64_t seed = test_seed();
    test_ok(model_open(dir, &m, &e), &e);
    const struct model_config *c = model_config_of(m);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        int32_t *prompt = random_prompt(&seed, lengths[i], c->vocab);
        char *ids = e2e_ids(prompt, lengths[i]);
        const char *native = e2e_temp("native"), *other = e2e_temp("other");
        run_mode(dir, "native", "tcp", ids, native, c, lengths[i]);
        static const char *const routes[][2] = {{"whole", "shm"},     {"stream", "shm"},
                                                {"whole", "tcp"},     {"stream", "tcp"},
                                                {"stream", "inproc"}, {"whole", "inproc"}};
        for (size_t k = 0; k < (lengths[i] > 2048 ? 2 : 6); k++) {
            run_mode(dir, routes[k][0], routes[k][1], ids, other, c, lengths[i]);
            if (!same_file(native, other))
                fail_msg("%s: %s over %s differs from native at %u tokens", name, routes[k][0],
                         routes[k][1], lengths[i]);
            unlink(other);
        }
        free(ids);
        free(prompt);
    }
    model_close(m);
}

static void test_qwen3_tiny(void **s)
{
    (void)s;
    check_model("qwen3-tiny");
}

static void test_qwen3_small(void **s)
{
    (void)s;
    check_model("qwen3-small");
}

static void test_koni_tiny(void **s)
{
    (void)s;
    check_model("koni-tiny");
}

static void test_gemma3_tiny(void **s)
{
    (void)s;
    check_model("gemma3-tiny");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_qwen3_tiny), cmocka_unit_test(test_qwen3_small),
        cmocka_unit_test(test_koni_tiny), cmocka_unit_test(test_gemma3_tiny)};
    int rc = cmocka_run_group_tests_name("e2e modes", tests, NULL, NULL);
    e2e_temp_remove();
    return rc;
}
