/* SPDX-License-Identifier: Apache-2.0 */
/* KV files read back: round trips through every dtype and window, and files that lie. */
#include <unistd.h>

#include "kv/kv_priv.h"
#include "shapes.h"
#include "tests/temp.h"

static uint64_t seed;

/* ---- round trips -------------------------------------------------------------------------- */

static struct kv_geometry geometry(uint32_t window, uint32_t dtype)
{
    struct kv_geometry g = {.n_layers = 4,
                            .kv_heads = test_range(&seed, 1, 3),
                            .head_dim = test_range(&seed, 1, 40),
                            .window = window,
                            .dtype = dtype};
    for (uint32_t l = 0; l < g.n_layers; l++)
        g.local[l] = window && l % 2;
    return g;
}

static size_t slot_count(const struct kv_geometry *g, uint32_t n)
{
    return (size_t)g->kv_heads * n * g->head_dim;
}

/* Retained values of one slot as floats; free(). */
static float *slot_values(struct kv_seq *s, const struct kv_geometry *g, uint32_t layer,
                          enum kv_which which, uint32_t *n)
{
    struct baton_error e;
    struct baton_kv_layout l;
    uint32_t length = kv_seq_length(s), first = kv_retained_first(g, layer, length);
    *n = length - first;
    float *out = calloc(slot_count(g, *n) + 1, sizeof *out);
    struct baton_kv_view v = kv_dense_view(&l, BATON_F32, g->kv_heads, g->head_dim, out, out, first,
                                           *n);
    test_ok(kv_copy(&v, &kv_seq_views(s)[layer], which, first, *n, &e), &e);
    return out;
}

/* Values that every dtype holds exactly: eighths of small numbers. */
static struct kv_seq *seq_filled(struct kv_pool *p, uint32_t length)
{
    struct baton_error e;
    struct kv_seq *s;
    const struct kv_geometry *g = kv_pool_geometry(p);
    test_ok(kv_seq_open(p, &s, &e), &e);
    test_ok(kv_seq_reserve(s, length, &e), &e);
    float *data = malloc(slot_count(g, length) * sizeof *data);
    for (uint32_t slot = 0; slot < 2 * g->n_layers; slot++) {
        struct baton_kv_layout layout;
        struct baton_kv_view v = kv_dense_view(&layout, BATON_F32, g->kv_heads, g->head_dim, data,
                                               data, 0, length);
        for (size_t i = 0; i < slot_count(g, length); i++)
            data[i] = ((float)(test_random(&seed) % 255) - 127) / 8;
        test_ok(kv_copy(&kv_seq_views(s)[slot / 2], &v, (enum kv_which)(slot % 2), 0, length, &e),
                &e);
    }
    kv_seq_advance(s, length);
    free(data);
    return s;
}

static void expect_equal(struct kv_seq *a, struct kv_seq *b, const struct kv_geometry *g)
{
    assert_int_equal(kv_seq_length(a), kv_seq_length(b));
    for (uint32_t slot = 0; slot < 2 * g->n_layers; slot++) {
        uint32_t n, m;
        float *x = slot_values(a, g, slot / 2, (enum kv_which)(slot % 2), &n);
        float *y = slot_values(b, g, slot / 2, (enum kv_which)(slot % 2), &m);
        assert_int_equal(n, m);
        assert_memory_equal(x, y, slot_count(g, n) * sizeof *x);
        free(x);
        free(y);
    }
}

/* Tokens and logits, both sometimes left out. */
static void check_tokens(const struct kv_file *f, const struct kv_tokens *t, uint32_t length)
{
    const struct kv_file_info *i = kv_file_info(f);
    assert_int_equal(i->n_tokens, length);
    assert_int_equal(i->tokens.n_ids, t->ids ? length : 0);
    assert_int_equal(i->tokens.vocab, t->logits ? t->vocab : 0);
    if (t->ids)
        assert_memory_equal(i->tokens.ids, t->ids, length * sizeof *t->ids);
    if (t->logits)
        assert_memory_equal(i->tokens.logits, t->logits, t->vocab * sizeof *t->logits);
    assert_string_equal(kv_file_metadata(f, "weights"), "w\"1");
    assert_null(kv_file_metadata(f, "nothing"));
}

static void round_trips(void **state)
{
    static const char *const metadata[] = {"weights", "w\"1", NULL};
    static const uint32_t dtypes[] = {BATON_F32, BATON_F16, BATON_BF16};
    struct baton_error e;
    int32_t ids[400];
    float logits[33];
    for (int round = 0; round < 36; round++) {
        uint32_t window = round % 4 ? test_range(&seed, 1, 150) : 0;
        uint32_t length = test_range(&seed, 1, 400);
        if (window && round % 5 == 0) /* the window's edges */
            length = window - 1 + (uint32_t)round % 3 ? window - 1 + (uint32_t)round % 3 : 1;
        struct kv_geometry g = geometry(window, dtypes[round % 3]), to = g;
        to.dtype = dtypes[round / 3 % 3];
        for (int i = 0; i < 400; i++)
            ids[i] = (int32_t)test_range(&seed, 0, 99999);
        for (int i = 0; i < 33; i++)
            logits[i] = test_normal(&seed);
        const struct kv_tokens t = {round % 7 ? ids : NULL, length, round % 2 ? logits : NULL, 33};
        struct kv_pool *p, *q;
        struct kv_file *f;
        test_ok(kv_pool_open(&p, &g, length + 65, 1, length, &e), &e);
        test_ok(kv_pool_open(&q, &to, length + 65, 1, 64, &e), &e);
        kv_pool_poison(q);
        struct kv_seq *s = seq_filled(p, length), *r;
        test_ok(kv_save(s, path, metadata, &t, &e), &e);
        test_ok(kv_file_open(path, &f, &e), &e);
        check_tokens(f, &t, length);
        test_ok(kv_seq_open(q, &r, &e), &e);
        test_ok(kv_load(r, f, &e), &e);
        expect_equal(s, r, &g);
        test_ok(kv_seq_reserve(r, 64, &e), &e); /* it goes on like any other */
        test_fails(kv_load(r, f, &e), BATON_ERR_USAGE, "empty sequence", &e);
        kv_file_close(f);
        kv_seq_close(s);
        kv_seq_close(r);
        assert_int_equal(kv_pool_used(q), 0);
        kv_pool_close(p);
        kv_pool_close(q);
    }
}

/* ---- files that do not fit ---------------------------------------------------------------- */

static void refuse(const struct kv_geometry *g, const struct kv_file *f, const char *word)
{
    struct baton_error e;
    struct kv_pool *p;
    struct kv_seq *s;
    test_ok(kv_pool_open(&p, g, 300, 1, 64, &e), &e);
    test_ok(kv_seq_open(p, &s, &e), &e);
    test_fails(kv_load(s, f, &e), BATON_ERR_MISMATCH, word, &e);
    assert_int_equal(kv_pool_used(p), 0);
    kv_seq_close(s);
    kv_pool_close(p);
}

static void other_geometries(void **state)
{
    struct baton_error e;
    struct kv_geometry g = geometry(50, BATON_BF16), other = g;
    struct kv_pool *p;
    struct kv_file *f;
    test_ok(kv_pool_open(&p, &g, 200, 1, 200, &e), &e);
    struct kv_seq *s = seq_filled(p, 120);
    test_ok(kv_save(s, path, NULL, NULL, &e), &e);
    test_ok(kv_file_open(path, &f, &e), &e);
    other.n_layers = 5;
    refuse(&other, f, "4 layers");
    other = g;
    other.kv_heads++;
    refuse(&other, f, "the model has");
    other = g;
    other.head_dim++;
    refuse(&other, f, "the model has");
    other = g;
    other.window = 51;
    refuse(&other, f, "layer 1 holds the positions [71, 120); a local layer retains [70, 120)");
    other.window = 49;
    refuse(&other, f, "layer 1 holds the positions [71, 120); a local layer retains [72, 120)");
    other = g;
    other.local[0] = 1;
    refuse(&other, f, "layer 0 holds the positions [0, 120)");
    other = g;
    other.local[3] = 0;
    refuse(&other, f, "a global layer retains [0, 120)");
    kv_file_close(f);
    kv_seq_close(s);
    kv_pool_close(p);
}

/* ---- files that lie ----------------------------------------------------------------------- */

/* A file of two layers of one head of 2 and three positions, the second layer from position 1, with
 * one thing changed: `find` in the header becomes `put` of the same length. */
#define HEADER                                                                                     \
    "{\"__metadata__\":{\"format\":\"baton-kv-1\",\"n_tokens\":\"3\" },"                           \
    "\"ids\":{\"dtype\":\"I32\",\"shape\":[3],\"data_offsets\":[0,12]},"                           \
    "\"logits\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[12,20]},"                       \
    "\"positions.0\":{\"dtype\":\"I32\",\"shape\":[3],\"data_offsets\":[20,32]},"                  \
    "\"positions.1\":{\"dtype\":\"I32\",\"shape\":[2],\"data_offsets\":[32,40]},"                  \
    "\"k.0\":{\"dtype\":\"F32\",\"shape\":[1,3,2],\"data_offsets\":[40,64]},"                      \
    "\"v.0\":{\"dtype\":\"F32\",\"shape\":[1,3,2],\"data_offsets\":[64,88]},"                      \
    "\"k.1\":{\"dtype\":\"F32\",\"shape\":[1,2,2],\"data_offsets\":[88,104]},"                     \
    "\"v.1\":{\"dtype\":\"F32\",\"shape\":[1,2,2],\"data_offsets\":[104,120]}}"
#define DATA 120u

static uint8_t *lying(const char *find, const char *put, size_t *n)
{
    static const int32_t numbers[] = {5, 6, 7, 0, 0, 0, 1, 2, 1, 2};
    uint64_t len = strlen(HEADER);
    uint8_t *file = calloc(1, *n = 8 + len + DATA);
    memcpy(file, &len, 8);
    memcpy(file + 8, HEADER, len);
    memcpy(file + 8 + len, numbers, sizeof numbers);
    if (find) {
        assert_int_equal(strlen(find), strlen(put));
        const char *at = strstr(HEADER, find);
        assert_non_null(at);
        memcpy(file + 8 + (at - HEADER), put, strlen(put));
    }
    return file;
}

static void lie(const char *find, const char *put, int code, const char *word)
{
    struct baton_error e;
    struct kv_file *f = NULL;
    size_t n;
    uint8_t *file = lying(find, put, &n);
    test_fails(kv_file_parse(file, n, "x", &f, &e), code, word, &e);
    assert_null(f);
    free(file);
}

static void headers_that_lie(void **state)
{
    const int I = BATON_ERR_INPUT;
    lie("\"format\"", "\"formal\"", I, "no format");
    lie("baton-kv-1", "baton-kv-9", BATON_ERR_UNSUPPORTED, "baton-kv-9");
    lie("\"n_tokens\":\"3\"", "\"n_tokens\":\"4\"", I, "positions.0: position 0 at index 0");
    lie("\"n_tokens\":\"3\"", "\"n_tokens\":\"-\"", I, "n_tokens '-'");
    lie("\"n_tokens\":\"3\"", "\"n_tokens\":\"0\"", I, "n_tokens '0'");
    lie("\"n_tokens\":\"3\" ", "\"n_tokens\":\"3x\"", I, "n_tokens '3x'");
    lie("\"n_tokens\":\"3\"", "\"n_token_\":\"3\"", I, "n_tokens");
    lie("\"k.0\"", "\"q.0\"", I, "no tensor k.0");
    lie("\"v.1\"", "\"v.2\"", I, "no tensor v.1");
    lie("\"k.1\"", "\"k.7\"", I, "k.7: is no part");
    lie("\"positions.1\"", "\"positional1\"", I, "no tensor positions.1");
    lie("\"logits\"", "\"logitz\"", I, "logitz: is no part");
    lie("\"ids\"", "\"k.9\"", I, "k.9: is no part");
    lie("{\"dtype\":\"I32\",\"shape\":[3],\"data_offsets\":[20",
        "{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[20", I, "positions.0: is not a list");
    lie("\"F32\",\"shape\":[1,3,2],\"data_offsets\":[40",
        "\"I32\",\"shape\":[1,3,2],\"data_offsets\":[40", I, "k.0: is not F32");
    lie("\"F32\",\"shape\":[1,3,2],\"data_offsets\":[64",
        "\"I32\",\"shape\":[1,3,2],\"data_offsets\":[64", I, "v.0 is I32, k.0 is F32");
    lie("[1,3,2],\"data_offsets\":[40", "[1,2,3],\"data_offsets\":[40", I, "k.0 is not [1, 3, 3]");
    lie("[1,3,2],\"data_offsets\":[64", "[3,1,2],\"data_offsets\":[64", I, "v.0 is not [1, 3, 2]");
    lie("[1,2,2],\"data_offsets\":[88", "[2,2,1],\"data_offsets\":[88", I, "k.1 is not [1, 2, 2]");
    lie("[1,2,2],\"data_offsets\":[104", "[1,2,2],\"data_offsets\":[103", I, "v.1");
    lie("\"I32\",\"shape\":[3],\"data_offsets\":[0,", "\"F32\",\"shape\":[3],\"data_offsets\":[0,",
        I, "ids");
    lie("\"F32\",\"shape\":[2],\"data_offsets\":[12", "\"I32\",\"shape\":[2],\"data_offsets\":[12",
        I, "logits");
}

/* `value` at byte `at` of the tensors. */
static int parse_with(size_t at, uint32_t value, struct kv_file **f, uint8_t **file,
                      struct baton_error *e)
{
    size_t n;
    *file = lying(NULL, NULL, &n);
    memcpy(*file + n - DATA + at, &value, sizeof value);
    return kv_file_parse(*file, n, "x", f, e);
}

static void numbers_that_lie(void **state)
{
    static const struct {
        size_t at;
        uint32_t value;
        const char *word;
    } lies[] = {{20, 1, "positions.0: position 1"},
                {24, 5, "positions.0: position 5 at index 1"},
                {20, UINT32_MAX, "positions.0: position -1"},
                {20, INT32_MAX, "positions.0: position 2147483647"},
                {32, 2, "positions.1: position"},
                {12, 0x7fc00000, "logits: holds a number"}};
    struct baton_error e;
    struct kv_file *f = NULL;
    uint8_t *file;
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        test_fails(parse_with(lies[i].at, lies[i].value, &f, &file, &e), BATON_ERR_INPUT,
                   lies[i].word, &e);
        free(file);
    }
    /* The second layer ends elsewhere: both of its positions are moved. */
    size_t n;
    file = lying(NULL, NULL, &n);
    memcpy(file + n - DATA + 32, (const int32_t[]){2, 3}, 8);
    test_fails(kv_file_parse(file, n, "x", &f, &e), BATON_ERR_INPUT,
               "positions.1: position 2 at index 0", &e);
    free(file);
}

/* What is not finite is found at its place, in K and V, and nothing is kept of the file. */
static void not_finite(void **state)
{
    static const struct {
        size_t at;
        const char *word;
    } places[] = {{40 + 4 * 4, "k.0: not finite at position 2"},
                  {64 + 4, "v.0: not finite at position 0"},
                  {88 + 4 * 3, "k.1: not finite at position 2"},
                  {104, "v.1: not finite at position 1"}};
    const struct kv_geometry g = {.n_layers = 2,
                                  .kv_heads = 1,
                                  .head_dim = 2,
                                  .window = 3,
                                  .dtype = BATON_BF16,
                                  .local = {0, 1}};
    struct baton_error e;
    struct kv_file *f;
    struct kv_pool *p;
    struct kv_seq *s;
    uint8_t *file;
    test_ok(kv_pool_open(&p, &g, 64, 1, 16, &e), &e);
    for (size_t i = 0; i < 4; i++) {
        test_ok(parse_with(places[i].at, i % 2 ? 0xff800000u : 0x7fffffffu, &f, &file, &e), &e);
        test_ok(kv_seq_open(p, &s, &e), &e);
        test_fails(kv_load(s, f, &e), BATON_ERR_INPUT, places[i].word, &e);
        kv_seq_close(s);
        kv_file_close(f);
        free(file);
    }
    test_ok(parse_with(40, 0x7f7fffff, &f, &file, &e), &e); /* the largest number is one */
    test_ok(kv_seq_open(p, &s, &e), &e);
    test_ok(kv_load(s, f, &e), &e);
    kv_seq_close(s);
    kv_file_close(f);
    free(file);
    kv_pool_close(p);
}

/* Every pattern of the short dtypes, at every place in a tile, against what a float says. */
static void finite_patterns(void **state)
{
    uint16_t x[100];
    for (uint32_t u = 0; u < 0x10000; u++) {
        size_t at = u % 100;
        bool f16 = (u & 0x7c00) == 0x7c00, bf16 = (u & 0x7f80) == 0x7f80;
        memset(x, 0, sizeof x);
        x[at] = (uint16_t)u;
        assert_int_equal(kv_first_not_finite((uint8_t *)x, BATON_F16, 100), f16 ? at : 100);
        assert_int_equal(kv_first_not_finite((uint8_t *)x, BATON_BF16, 100), bf16 ? at : 100);
    }
}

/* Cut anywhere, flipped anywhere: an error or a file that can be read to its end. */
static void damage(void **state)
{
    struct baton_error e;
    size_t n;
    uint8_t *whole = lying(NULL, NULL, &n);
    for (size_t i = 0; i < 3 * n; i++) {
        struct kv_file *f = NULL;
        size_t keep = i < n ? i : n;
        uint8_t *file = malloc(keep + 1);
        memcpy(file, whole, keep);
        if (i >= n)
            file[i % n] ^= (uint8_t)test_range(&seed, 1, 255);
        int rc = kv_file_parse(file, keep, "x", &f, &e);
        assert_true(rc == 0 || (!f && (i < n ? rc == BATON_ERR_INPUT : rc < 0) && e.text[0]));
        for (uint32_t l = 0; rc == 0 && l < kv_file_info(f)->n_layers; l++) {
            struct baton_kv_layout layout, to;
            struct baton_kv_view v = kv_file_view(f, l, &layout);
            size_t bytes = kv_piece_bytes(layout.dtype, layout.kv_heads, layout.head_dim,
                                          v.end - v.first);
            uint8_t *copy = malloc(bytes);
            struct baton_kv_view d = kv_dense_view(&to, layout.dtype, layout.kv_heads,
                                                   layout.head_dim, copy, copy, v.first,
                                                   v.end - v.first);
            test_ok(kv_copy(&d, &v, KV_K, v.first, v.end - v.first, &e), &e);
            free(copy);
        }
        kv_file_close(f);
        free(file);
    }
    free(whole);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trips),      cmocka_unit_test(other_geometries),
        cmocka_unit_test(headers_that_lie), cmocka_unit_test(numbers_that_lie),
        cmocka_unit_test(not_finite),       cmocka_unit_test(finite_patterns),
        cmocka_unit_test(damage),
    };
    seed = test_seed();
    return cmocka_run_group_tests_name("kv load", tests, folder_open, folder_close);
}
