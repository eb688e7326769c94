/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors: what is valid comes back as written, every kind of damage is a named error. */
#include "folder.h"

/* One case: header text, bytes of data behind it, what the error must say. */
struct bad {
    const char *header;
    size_t data;
    int code;
    const char *word;
};

/* Exactly n bytes on the heap, so that a read past the end is seen by the sanitizer. */
static uint8_t *build(const char *header, uint64_t claimed, size_t data, size_t *n)
{
    size_t len = strlen(header);
    *n = 8 + len + data;
    uint8_t *p = malloc(*n);
    for (unsigned i = 0; i < 8; i++)
        p[i] = (uint8_t)(claimed >> (8 * i));
    memcpy(p + 8, header, len);
    memset(p + 8 + len, 0x5A, data);
    return p;
}

static int parse_text(const char *header, uint64_t claimed, size_t data, struct baton_error *e)
{
    size_t n;
    struct model_tensors *t = NULL;
    uint8_t *p = build(header, claimed, data, &n);
    int rc = model_tensors_parse(p, n, "x", &t, e);
    assert_true(rc == 0 || t == NULL); /* outputs are set on success only */
    model_tensors_close(t);
    free(p);
    return rc;
}

#define A "{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":"
#define I BATON_ERR_INPUT

static const struct bad bads[] = {
    {"[]", 0, I, "not a JSON object"},
    {"{", 0, I, "x"},
    {"{}", 4, I, "4 bytes behind"},
    {"{\"a\":3}", 0, I, "'a'"},
    {"{\"\":" A "[0,8]}}", 8, I, "entry"},
    {"{\"a\\nb\":" A "[0,8]}}", 8, I, "a?b"},
    {"{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8, I, "tensor a has no dtype"},
    {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8, I, "no shape"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,2],\"data_offsets\":[0,8]}}", 8, I,
     "8 dimensions"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}}", 8, I, "dimension 0"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2.0],\"data_offsets\":[0,8]}}", 8, I, "dimension 0"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,8]}}", 8, I,
     "overflows"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387904],\"data_offsets\":[0,0]}}", 0, I,
     "overflows"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,8]}}", 8, I,
     "x"},
    {"{\"a\":" A "[0,12]}}", 12, I, "has 12 bytes, its shape and dtype need 8"},
    {"{\"a\":" A "[0,8]}}", 7, I, "truncated"},
    {"{\"a\":" A "[9223372036854775800,9223372036854775807]}}", 8, I, "tensor a ends at byte"},
    {"{\"a\":" A "[8,0]}}", 8, I, "data_offsets"},
    {"{\"a\":" A "[-8,0]}}", 8, I, "data_offsets"},
    {"{\"a\":" A "[0]}}", 8, I, "data_offsets"},
    {"{\"a\":" A "\"0,8\"}}", 8, I, "data_offsets"},
    {"{\"a\":" A "[0,8]},\"b\":" A "[4,12]}}", 12, I, "overlaps"},
    {"{\"a\":" A "[0,8]},\"b\":" A "[0,8]}}", 8, I, "overlaps"},
    {"{\"a\":" A "[0,8]},\"b\":" A "[12,20]}}", 20, I, "hole of 4 bytes before tensor b"},
    {"{\"a\":" A "[4,12]}}", 12, I, "hole of 4 bytes before tensor a"},
    {"{\"a\":" A "[0,8]}}", 9, I, "1 bytes behind"},
    {"{\"a\":" A "[0,8]},\"a\":" A "[8,16]}}", 16, I, "x"},
    {"{\"__metadata__\":[]}", 0, I, "__metadata__"},
    {"{\"__metadata__\":{\"k\":1}}", 0, I, "no text"},
    {"{\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2,
     BATON_ERR_UNSUPPORTED, "F8_E4M3"},
    {"{\"a\":{\"dtype\":\"f32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, BATON_ERR_UNSUPPORTED,
     "tensor a has dtype f32"},
    {"{\"a\":{\"dtype\":7,\"shape\":[2],\"data_offsets\":[0,8]}}", 8, I, "no dtype"},
};

static void damaged_headers(void **state)
{
    struct baton_error e;
    for (size_t i = 0; i < sizeof bads / sizeof *bads; i++)
        test_fails(parse_text(bads[i].header, strlen(bads[i].header), bads[i].data, &e),
                   bads[i].code, bads[i].word, &e);
}

static void lengths(void **state)
{
    struct baton_error e;
    struct model_tensors *t = NULL;
    test_fails(parse_text("{}", UINT64_C(1) << 63, 0, &e), I, "header of 9223372036854775808", &e);
    test_fails(parse_text("{}", UINT64_MAX, 0, &e), I, "limit", &e);
    test_fails(parse_text("{}", 100000001, 0, &e), I, "limit", &e);
    test_fails(parse_text("{}", 3, 0, &e), I, "truncated", &e);
    test_fails(parse_text("{}", 100000000, 0, &e), I, "truncated", &e);
    test_fails(parse_text("", 0, 0, &e), I, "x", &e);
    for (size_t n = 0; n < 8; n++) {
        uint8_t *p = calloc(1, n + 1);
        test_fails(model_tensors_parse(p, n, "x", &t, &e), I, "too few", &e);
        free(p);
    }
    test_ok(parse_text("{}", 2, 0, &e), &e);
    const char *scalar = "{\"a\":{\"dtype\":\"I8\",\"shape\":[],\"data_offsets\":[0,1]}}";
    test_ok(parse_text(scalar, strlen(scalar), 1, &e), &e);
    const char *none = "{\"a\":{\"dtype\":\"I8\",\"shape\":[3,0],\"data_offsets\":[0,0]}}";
    test_ok(parse_text(none, strlen(none), 0, &e), &e);
    /* Deep nesting must not use up the stack. */
    char *deep = malloc(200001);
    memset(deep, '[', 200000);
    deep[200000] = '\0';
    test_fails(parse_text(deep, 200000, 0, &e), I, "nested", &e);
    free(deep);
}

static void no_file(void **state)
{
    struct baton_error e;
    struct model_tensors *t = NULL;
    char dir[256];
    folder_make(dir);
    test_fails(model_tensors_open(in(dir, "none.safetensors"), &t, &e), BATON_ERR_IO, "none", &e);
    test_fails(model_tensors_open(dir, &t, &e), BATON_ERR_IO, "", &e);
    put_file(dir, "empty.safetensors", "", 0);
    test_fails(model_tensors_open(in(dir, "empty.safetensors"), &t, &e), I, "empty.safetensors",
               &e);
    folder_remove(dir);
}

/* Random tensors of all dtypes come back with their bytes, whatever the order in the file. */
static void round_trip(void **state)
{
    static const uint32_t dtypes[] = {BATON_F32, BATON_F16, BATON_BF16, MODEL_I32, MODEL_I64};
    static const unsigned width[] = {4, 2, 2, 4, 8};
    static uint8_t bytes[1 << 16];
    uint64_t seed = test_seed();
    struct baton_error e;
    char dir[256], names[40][32];
    folder_make(dir);
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)test_random(&seed);
    for (int turn = 0; turn < 20; turn++) {
        struct model_tensor list[40];
        size_t n = test_range(&seed, 1, 40);
        memset(list, 0, sizeof list);
        for (size_t i = 0; i < n; i++) {
            unsigned d = test_range(&seed, 0, 4);
            snprintf(names[i], sizeof names[i], "t%u.%zu", test_range(&seed, 0, 999999), i);
            list[i] = (struct model_tensor){
                .name = names[i], .dtype = dtypes[d], .bytes = width[d]};
            list[i].n_dims = test_range(&seed, 0, 4);
            for (uint32_t k = 0; k < list[i].n_dims; k++)
                list[i].bytes *= list[i].shape[k] = test_range(&seed, 0, 5);
            list[i].data = bytes + test_range(&seed, 0, 1000);
        }
        struct model_tensors *t = NULL;
        write_tensors(in(dir, "a.safetensors"), list, n, test_range(&seed, 0, 7));
        test_ok(model_tensors_open(in(dir, "a.safetensors"), &t, &e), &e);
        assert_int_equal(model_tensors_count(t), n);
        for (size_t i = 0; i < n; i++) {
            const struct model_tensor *x = model_tensors_find(t, list[i].name);
            assert_non_null(x);
            assert_int_equal(x->dtype, list[i].dtype);
            assert_int_equal(x->n_dims, list[i].n_dims);
            assert_memory_equal(x->shape, list[i].shape, sizeof x->shape);
            assert_int_equal(x->bytes, list[i].bytes);
            assert_memory_equal(x->data, list[i].data, x->bytes);
        }
        for (size_t i = 1; i < n; i++)
            assert_true(strcmp(model_tensors_at(t, i - 1)->name, model_tensors_at(t, i)->name) < 0);
        assert_null(model_tensors_find(t, "t"));
        assert_null(model_tensors_at(t, n));
        assert_string_equal(model_tensors_metadata(t, "format"), "pt");
        assert_null(model_tensors_metadata(t, "none"));
        model_tensors_close(t);
    }
    folder_remove(dir);
}

/* Flipped bytes and cuts of a real header: an error or a valid result, nothing else. */
static void flips(void **state)
{
    uint64_t seed = test_seed();
    struct baton_error e;
    size_t n, good = 0;
    char *text = get_text(test_path("tests/golden/edge/qwen3-headdim128/model.safetensors"), &n);
    for (int turn = 0; turn < 3000; turn++) {
        size_t keep = turn % 4 ? n : test_range(&seed, 0, (uint32_t)n);
        uint8_t *p = malloc(keep + 1);
        struct model_tensors *t = NULL;
        memcpy(p, text, keep);
        for (unsigned k = test_range(&seed, 0, 3); k > 0 && keep > 0; k--)
            p[test_random(&seed) % (keep < 4000 ? keep : 4000)] ^= (uint8_t)(1u << test_range(
                                                                                 &seed, 0, 7));
        int rc = model_tensors_parse(p, keep, "x", &t, &e);
        assert_true(rc == 0 || (e.code == rc && e.text[0]));
        uint64_t sum = 0;
        for (size_t i = 0; rc == 0 && i < model_tensors_count(t); i++) {
            const struct model_tensor *x = model_tensors_at(t, i);
            sum += x->bytes ? *((const uint8_t *)x->data + x->bytes - 1) : 0;
        }
        good += rc == 0 && sum + 1 > 0;
        model_tensors_close(t);
        free(p);
    }
    assert_true(good > 0 && good < 3000);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(damaged_headers), cmocka_unit_test(lengths), cmocka_unit_test(no_file),
        cmocka_unit_test(round_trip),      cmocka_unit_test(flips),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
