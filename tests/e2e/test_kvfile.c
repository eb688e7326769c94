/* SPDX-License-Identifier: Apache-2.0 */
/* KV files through the command line: saved, inspected, compared, continued; and what must not be
 * continued. A cache that was loaded gives the very logits that computing it gives. */
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "tests/e2e/e2e.h"

#define STEPS "6"

static uint64_t seed;

/* A path that stays: e2e_temp's are reused. */
static const char *temp(const char *name)
{
    static char buf[24][160];
    static unsigned n;
    snprintf(buf[n % 24], sizeof *buf, "%s", e2e_temp(name));
    return buf[n++ % 24];
}

/* Run to an exit status; no answer is looked at. */
static void run_to(int status, const char *const *args)
{
    struct e2e r;
    e2e_expect(&r, status, args);
    e2e_free(&r);
}
#define RUN(status, ...) run_to(status, (const char *const[]){__VA_ARGS__, NULL})

/* The command must fail with exit 2 and a message that holds `word`. */
static void refuse(const char *word, const char *const *args)
{
    struct e2e r;
    e2e_expect(&r, 2, args);
    if (!strstr(r.err, word) || strstr(r.err, "Sanitizer") || strstr(r.err, "runtime error"))
        fail_msg("'%s' is not in: %s", word, r.err);
    e2e_free(&r);
}
#define REFUSE(word, ...) refuse(word, (const char *const[]){__VA_ARGS__, NULL})

/* Random ids that every tokenizer has; the text of the first n of them. */
static int32_t ids[700];
static char *some_ids(size_t n)
{
    return e2e_ids(ids, n);
}

static void new_ids(void)
{
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
        ids[i] = (int32_t)test_range(&seed, 300, 3000);
}

static void expect_same_rows(const char *a, const char *b, const char *what)
{
    struct baton_error e;
    struct base_tensors *x, *y;
    test_ok(base_tensors_open(a, &x, &e), &e);
    test_ok(base_tensors_open(b, &y, &e), &e);
    const struct base_tensor *p = base_tensors_find(x, "logits"),
                             *q = base_tensors_find(y, "logits");
    assert_int_equal(p->bytes, q->bytes);
    if (memcmp(p->data, q->data, p->bytes))
        fail_msg("%s: other logits than without the file", what);
    base_tensors_close(x);
    base_tensors_close(y);
}

/* ---- continuing --------------------------------------------------------------------------- */

/* The cache of the first m of n tokens, in every mode, gives the logits of computing all n. */
static void check_continues(const char *name, size_t m, size_t n)
{
    static const char *const modes[] = {"native", "whole", "stream"};
    char what[96], *head = some_ids(m), *all = some_ids(n);
    const char *m_path = e2e_model(name), *kv = temp("head.safetensors");
    const char *plain = temp("plain.safetensors"), *loaded = temp("loaded.safetensors");
    struct e2e r;
    RUN(0, "kv", "export", "-m", m_path, "--ids", head, kv);
    RUN(0, "run", "-m", m_path, "--ids", all, "-n", STEPS, "--ignore-eos", "--mode", "native",
        "--logits", plain, "--json");
    for (size_t i = 0; i < 3; i++) {
        snprintf(what, sizeof what, "%s, %zu of %zu tokens, %s", name, m, n, modes[i]);
        e2e_expect(&r, 0,
                   (const char *const[]){"run", "-m", m_path, "--ids", all, "-n", STEPS,
                                         "--ignore-eos", "--mode", modes[i], "--kv-load", kv,
                                         "--logits", loaded, "--json", NULL});
        assert_int_equal(json_integer_value(e2e_get(r.json, "loaded_tokens")), m);
        if (i > 0) /* the last position always travels */
            assert_int_equal(json_integer_value(e2e_get(r.json, "handoff.held")),
                             m < n ? m : n - 1);
        expect_same_rows(plain, loaded, what);
        e2e_free(&r);
    }
    free(head);
    free(all);
}

static void test_continues(void **state)
{
    (void)state;
    new_ids();
    check_continues("qwen3-tiny", 1, 2);
    check_continues("koni-tiny", 65, 130);
    check_continues("qwen3-small", 64, 64);
    check_continues("gemma3-tiny", 63, 65);
}

/* Borders of the window (512) and of a page; the last one has nothing left to compute. */
static void test_window(void **state)
{
    (void)state;
    static const size_t cases[][2] = {{511, 512}, {512, 513}, {513, 600}, {600, 600}};
    new_ids();
    for (size_t i = 0; i < 4; i++)
        check_continues("gemma3-tiny", cases[i][0], cases[i][1]);
}

/* Export is run --kv-save, whatever the route; import continues as run does. */
static void test_export(void **state)
{
    (void)state;
    const char *m = e2e_model("gemma3-tiny"), *a = temp("a.safetensors");
    const char *b = temp("b.safetensors");
    struct e2e r, s;
    new_ids();
    char *text = some_ids(530);
    RUN(0, "kv", "export", "-m", m, "--ids", text, a);
    RUN(0, "run", "-m", m, "--ids", text, "-n", "2", "--mode", "stream", "--kv-save", b, "--json");
    e2e_expect(&r, 0, (const char *const[]){"kv", "diff", a, b, "--json", NULL});
    assert_int_equal(json_integer_value(e2e_get(r.json, "slots_exact")), 52);
    assert_string_equal(json_string_value(e2e_get(r.json, "ids")), "equal");
    assert_int_equal(json_array_size(e2e_get(r.json, "metadata_differs")), 0);
    assert_true(json_number_value(e2e_get(r.json, "logits_rel_rms")) == 0);
    e2e_free(&r);
    e2e_expect(&r, 0, (const char *const[]){"kv", "import", "-m", m, a, "-n", "5", "--json", NULL});
    e2e_expect(&s, 0,
               (const char *const[]){"run", "-m", m, "--ids", text, "-n", "5", "--ignore-eos",
                                     "--json", NULL});
    assert_true(json_equal(e2e_get(r.json, "ids"), e2e_get(s.json, "ids")));
    e2e_free(&r);
    e2e_free(&s);
    e2e_expect(&r, 0,
               (const char *const[]){"kv", "import", "-m", m, b, "--force", "7,8", "--json", NULL});
    assert_int_equal(json_array_size(e2e_get(r.json, "argmax")), 2);
    e2e_free(&r);
    free(text);
}

static void test_inspect(void **state)
{
    (void)state;
    const char *kv = temp("i.safetensors");
    struct e2e r;
    RUN(0, "kv", "export", "-m", e2e_model("gemma3-tiny"), "-p", "1, 2, 3", kv, "-q");
    e2e_expect(&r, 0, (const char *const[]){"kv", "inspect", kv, "--json", NULL});
    size_t n = (size_t)json_integer_value(e2e_get(r.json, "n_tokens"));
    assert_int_equal(json_integer_value(e2e_get(r.json, "slots")), 52);
    assert_int_equal(json_array_size(e2e_get(r.json, "ids")), n);
    json_t *layers = e2e_get(r.json, "layers");
    assert_int_equal(json_array_size(layers), 26);
    json_t *p = json_object_get(json_array_get(layers, 25), "positions");
    assert_int_equal(json_integer_value(json_array_get(p, 0)), 0);
    assert_int_equal(json_integer_value(json_array_get(p, 1)), n - 1);
    assert_string_equal(json_string_value(e2e_get(r.json, "metadata.format")), "baton-kv-1");
    assert_int_equal(strlen(json_string_value(e2e_get(r.json, "metadata.weights"))), 64);
    e2e_free(&r);
    e2e_expect(&r, 0, (const char *const[]){"kv", "inspect", kv, NULL});
    assert_non_null(strstr(r.out, "52 slots of 1 heads of 128, BF16, ids, logits"));
    e2e_free(&r);
    e2e_expect(&r, 0, (const char *const[]){"kv", "--help", NULL});
    assert_non_null(strstr(r.out, "example"));
    e2e_free(&r);
}

/* ---- differences -------------------------------------------------------------------------- */

static void flip(const char *path, long from_end)
{
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, -from_end, SEEK_END), 0);
    int c = fgetc(f);
    assert_int_equal(fseek(f, -from_end, SEEK_END), 0);
    fputc(c ^ 1, f);
    fclose(f);
}

static void test_diff(void **state)
{
    (void)state;
    const char *m = e2e_model("qwen3-tiny"), *a = temp("d.safetensors");
    const char *b = temp("e.safetensors"), *ref = temp("ref.safetensors");
    struct e2e r;
    new_ids();
    char *text = some_ids(70);
    RUN(0, "kv", "export", "-m", m, "--ids", text, a);
    RUN(0, "kv", "export", "-m", m, "--ids", text, b);
    RUN(0, "kv", "export", "-m", m, "--ids", text, "--device", "cpu:ref", ref);
    RUN(0, "kv", "diff", a, b);
    flip(b, 2); /* the lowest bit of the last number of v.7 */
    e2e_expect(&r, 1, (const char *const[]){"kv", "diff", a, b, "--json", NULL});
    assert_int_equal(json_integer_value(e2e_get(r.json, "slots_exact")), 15);
    assert_false(
        json_is_true(json_object_get(json_array_get(e2e_get(r.json, "slots"), 15), "exact")));
    assert_string_equal(json_string_value(e2e_get(r.json, "verdict")), "differs");
    e2e_free(&r);
    e2e_expect(&r, 1, (const char *const[]){"kv", "diff", a, b, NULL});
    assert_non_null(strstr(r.out, "v.7"));
    e2e_free(&r);
    /* float32 and bfloat16: never exact, close all the same. */
    e2e_expect(&r, 1, (const char *const[]){"kv", "diff", a, ref, "--json", NULL});
    assert_int_equal(json_integer_value(e2e_get(r.json, "slots_exact")), 0);
    assert_true(json_number_value(e2e_get(r.json, "k_rel_rms")) < 1.5e-2);
    e2e_free(&r);
    RUN(0, "kv", "diff", a, ref, "--limit", "1.5e-2");
    /* One token more: the common positions agree, and that is no equality. */
    free(text);
    text = some_ids(71);
    RUN(0, "kv", "export", "-m", m, "--ids", text, b);
    e2e_expect(&r, 1, (const char *const[]){"kv", "diff", a, b, "--limit", "1", "--json", NULL});
    assert_true(json_is_false(e2e_get(r.json, "positions_ok")));
    assert_true(json_number_value(e2e_get(r.json, "k_rel_rms")) == 0);
    e2e_free(&r);
    free(text);
}

/* ---- what must not be continued ----------------------------------------------------------- */

/* A copy of a KV file less one tensor or metadata value; `changed` replaces a value. */
static void copy_without(const char *from, const char *to, const char *without, const char *changed)
{
    static const char *const keys[] = {"format",   "architecture", "weights", "tokenizer",
                                       "numerics", "n_tokens",     "ids_hash"};
    struct baton_error e;
    struct base_tensors *in;
    struct base_tensors_out *out;
    const char *metadata[16] = {NULL};
    size_t n = 0;
    test_ok(base_tensors_open(from, &in, &e), &e);
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (strcmp(keys[i], without) || changed) {
            metadata[n++] = keys[i];
            metadata[n++] = strcmp(keys[i], without) ? base_tensors_metadata(in, keys[i]) : changed;
        }
    test_ok(base_tensors_create(&out, to, metadata, &e), &e);
    for (int pass = 0; pass < 2; pass++)
        for (size_t i = 0; i < base_tensors_count(in); i++) {
            const struct base_tensor *t = base_tensors_at(in, i);
            if (!strcmp(t->name, without))
                continue;
            if (pass == 0)
                test_ok(base_tensors_declare(out, t->name, t->dtype, t->n_dims, t->shape, &e), &e);
            else
                test_ok(base_tensors_write(out, t->data, t->bytes, &e), &e);
        }
    test_ok(base_tensors_commit(out, &e), &e);
    base_tensors_discard(out);
    base_tensors_close(in);
}

static void test_other_origin(void **state)
{
    (void)state;
    const char *m = e2e_model("qwen3-tiny"), *kv = temp("o.safetensors");
    const char *x = temp("x.safetensors");
    static const char zeros[] = "00000000000000000000000000000000000000000000000000000000000000000";
    new_ids();
    char *text = some_ids(20), *more = some_ids(21), *less = some_ids(19);
    ids[7]++;
    char *other = some_ids(21);
    RUN(0, "kv", "export", "-m", m, "--ids", text, kv);
    REFUSE("8 layers of 2 heads", "kv", "import", "-m", e2e_model("gemma3-tiny"), kv);
    REFUSE("another model", "kv", "import", "-m", e2e_model("koni-tiny"), kv);
    REFUSE("another model", "kv", "import", "-m", e2e_model("qwen3-small"), kv);
    REFUSE("20 positions, the prompt has 19", "run", "-m", m, "--ids", less, "--kv-load", kv);
    REFUSE("token 7", "run", "-m", m, "--ids", other, "--kv-load", kv);
    REFUSE("token 7", "run", "-m", m, "--ids", other, "--kv-load", kv, "--mode", "native");
    static const char *const parts[] = {"architecture", "weights", "tokenizer", "numerics"};
    for (size_t i = 0; i < 4; i++) {
        copy_without(kv, x, parts[i], zeros);
        REFUSE(parts[i], "run", "-m", m, "--ids", more, "--kv-load", x);
        copy_without(kv, x, parts[i], NULL);
        if (i < 2)
            REFUSE(parts[i], "kv", "import", "-m", m, x);
        else
            RUN(0, "kv", "import", "-m", m, x, "-n", "1");
    }
    copy_without(kv, x, "ids_hash", zeros);
    REFUSE("hash", "kv", "inspect", x);
    copy_without(kv, x, "logits", NULL);
    REFUSE("no logits", "kv", "import", "-m", m, x);
    RUN(0, "run", "-m", m, "--ids", more, "--kv-load", x, "-n", "1", "--json");
    copy_without(kv, x, "ids", NULL); /* the hash alone says as much, but not which */
    REFUSE("no ids", "kv", "import", "-m", m, x);
    REFUSE("ids_hash", "run", "-m", m, "--ids", other, "--kv-load", x);
    RUN(0, "run", "-m", m, "--ids", more, "--kv-load", x, "-n", "1", "--json");
    free(text);
    free(more);
    free(less);
    free(other);
}

static void test_bad_files(void **state)
{
    (void)state;
    const char *m = e2e_model("qwen3-tiny"), *kv = temp("b1.safetensors");
    char weights[1200];
    struct stat st;
    RUN(0, "kv", "export", "-m", m, "--ids", "5,6,7", kv);
    assert_int_equal(stat(kv, &st), 0);
    assert_int_equal(truncate(kv, st.st_size - 1), 0);
    REFUSE("truncated", "kv", "inspect", kv);
    REFUSE("truncated", "run", "-m", m, "--ids", "5,6,7", "--kv-load", kv);
    assert_int_equal(truncate(kv, 3), 0);
    REFUSE("too few", "kv", "inspect", kv, "--json");
    snprintf(weights, sizeof weights, "%s/model.safetensors", m);
    REFUSE("format 'pt'", "kv", "inspect", weights);
    REFUSE("format 'pt'", "kv", "diff", weights, weights);
    REFUSE("No such file", "kv", "inspect", "nosuch");
    REFUSE("No such file", "run", "-m", m, "--ids", "5", "--kv-load", "nosuch");
    REFUSE("No such file", "run", "-m", m, "--ids", "5", "--kv-load", "nosuch", "--mode", "native");
    RUN(3, "kv", "export", "-m", m, "--ids", "5", "/nosuchdir/x");
}

static void test_usage(void **state)
{
    (void)state;
    const char *m = e2e_model("qwen3-tiny"), *kv = temp("u.safetensors");
    const char *gemma = temp("u2.safetensors");
    RUN(0, "kv", "export", "-m", m, "--ids", "5,6", kv);
    RUN(0, "kv", "export", "-m", e2e_model("gemma3-tiny"), "--ids", "5,6", gemma);
    REFUSE("verb", "kv");
    REFUSE("frob", "kv", "frob", kv);
    REFUSE("--frob", "kv", "inspect", "--frob", kv);
    REFUSE("needs a value", "kv", "inspect", kv, "--limit");
    REFUSE("takes 1 file", "kv", "inspect");
    REFUSE("takes 2 files", "kv", "diff", kv);
    REFUSE("-m MODEL", "kv", "import", kv);
    REFUSE("-m MODEL", "kv", "export", kv);
    REFUSE("one of -p", "kv", "export", "-m", m, kv);
    REFUSE("one of -p", "kv", "export", "-m", m, "-p", "x", "--ids", "1", kv);
    REFUSE("nodevice", "kv", "import", "-m", m, "--device", "nodevice", kv);
    REFUSE("99999", "kv", "import", "-m", m, "--force", "99999", kv);
    REFUSE("cannot be compared", "kv", "diff", kv, gemma);
}

int main(void)
{
    seed = test_seed();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_continues), cmocka_unit_test(test_window),
        cmocka_unit_test(test_export),    cmocka_unit_test(test_inspect),
        cmocka_unit_test(test_diff),      cmocka_unit_test(test_other_origin),
        cmocka_unit_test(test_bad_files), cmocka_unit_test(test_usage),
    };
    int rc = cmocka_run_group_tests_name("e2e kvfile", tests, NULL, NULL);
    e2e_temp_remove();
    return rc;
}
