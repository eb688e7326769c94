/* SPDX-License-Identifier: Apache-2.0 */
/* The file that kv_save writes, read back by hand; failures that leave the old file alone. */
#include <jansson.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include "shapes.h"
#include "tests/temp.h"

static uint64_t seed;

/* A sequence of `length` random positions. */
static struct kv_seq *seq_open(struct kv_pool *p, uint32_t length)
{
    struct baton_error e;
    struct kv_seq *s;
    test_ok(kv_seq_open(p, &s, &e), &e);
    test_ok(kv_seq_reserve(s, length, &e), &e);
    const struct kv_geometry *g = kv_pool_geometry(p);
    size_t bytes = kv_piece_bytes(g->dtype, g->kv_heads, g->head_dim, length);
    uint8_t *data = malloc(bytes + 1);
    for (uint32_t l = 0; l < 2 * g->n_layers; l++) {
        struct baton_kv_layout layout;
        struct baton_kv_view v = kv_dense_view(&layout, g->dtype, g->kv_heads, g->head_dim, data,
                                               data, 0, length);
        for (size_t i = 0; i < bytes; i++)
            data[i] = (uint8_t)(test_random(&seed) >> 20);
        test_ok(kv_copy(&kv_seq_views(s)[l / 2], &v, (enum kv_which)(l % 2), 0, length, &e), &e);
    }
    kv_seq_advance(s, length);
    free(data);
    return s;
}

/* The bytes of one tensor; checks dtype and shape. */
static const char *tensor(json_t *root, const char *data, const char *what, uint32_t layer,
                          const char *dtype, uint32_t n_shape, const uint32_t *shape, size_t *end)
{
    char name[32];
    json_int_t at, to;
    const char *type;
    snprintf(name, sizeof name, "%s.%u", what, layer);
    json_t *t = json_object_get(root, name);
    assert_non_null(t);
    assert_int_equal(json_unpack(t, "{s:s, s:[I, I]}", "dtype", &type, "data_offsets", &at, &to),
                     0);
    assert_string_equal(type, dtype);
    size_t bytes = strcmp(dtype, "F32") == 0 || strcmp(dtype, "I32") == 0 ? 4 : 2;
    assert_int_equal(json_array_size(json_object_get(t, "shape")), n_shape);
    assert_int_equal(at % (json_int_t)bytes, 0); /* readers cast in place */
    for (uint32_t i = 0; i < n_shape; i++) {
        json_t *x = json_array_get(json_object_get(t, "shape"), i);
        assert_int_equal(json_integer_value(x), shape[i]);
        bytes *= shape[i];
    }
    assert_int_equal(to - at, bytes);
    *end = *end > (size_t)to ? *end : (size_t)to;
    return data + at;
}

static void expect_slot(struct kv_seq *s, const struct kv_geometry *g, uint32_t layer,
                        enum kv_which which, uint32_t first, uint32_t n, const char *saved)
{
    struct baton_error e;
    struct baton_kv_layout l;
    size_t bytes = kv_piece_bytes(g->dtype, g->kv_heads, g->head_dim, n);
    uint8_t *want = malloc(bytes + 1);
    struct baton_kv_view v = kv_dense_view(&l, g->dtype, g->kv_heads, g->head_dim, want, want,
                                           first, n);
    test_ok(kv_copy(&v, &kv_seq_views(s)[layer], which, first, n, &e), &e);
    assert_memory_equal(saved, want, bytes);
    free(want);
}

static void expect_file(struct kv_seq *s, const struct kv_geometry *g)
{
    struct baton_error e;
    char *file;
    size_t size, end = 0;
    uint64_t header;
    json_t *root;
    const char *names[] = {"", "F32", "F16", "BF16"};
    test_ok(base_file_read(path, 1u << 30, &file, &size, &e), &e);
    memcpy(&header, file, 8);
    assert_true(header < size && header % 8 == 0);
    test_ok(base_json_parse(file + 8, header, "header", &root, &e), &e);
    const char *data = file + 8 + header;
    for (uint32_t l = 0; l < g->n_layers; l++) {
        uint32_t length = kv_seq_length(s), first = 0;
        if (g->local[l] && length + 1 > g->window)
            first = length + 1 - g->window;
        uint32_t n = length - first, shape[3] = {g->kv_heads, n, g->head_dim};
        const char *p = tensor(root, data, "positions", l, "I32", 1, &n, &end);
        for (uint32_t i = 0; i < n; i++) {
            int32_t x;
            memcpy(&x, p + 4 * i, 4);
            assert_int_equal(x, first + i);
        }
        p = tensor(root, data, "k", l, names[g->dtype], 3, shape, &end);
        expect_slot(s, g, l, KV_K, first, n, p);
        p = tensor(root, data, "v", l, names[g->dtype], 3, shape, &end);
        expect_slot(s, g, l, KV_V, first, n, p);
    }
    assert_int_equal(size, 8 + header + end);
    json_t *meta = json_object_get(root, "__metadata__");
    assert_string_equal(json_string_value(json_object_get(meta, "route")), "a \"quoted\"\n name");
    json_decref(root);
    free(file);
    assert_int_equal(folder_count(), 1);
}

static const char *const metadata[] = {"route", "a \"quoted\"\n name", "n", "1", NULL};

static struct kv_geometry geometry(uint32_t window)
{
    struct kv_geometry g = {.n_layers = 5,
                            .kv_heads = test_range(&seed, 1, 3),
                            .window = window,
                            .head_dim = test_range(&seed, 1, 40),
                            .dtype = random_dtype(&seed)};
    for (uint32_t l = 0; l < g.n_layers; l++)
        g.local[l] = l % 2;
    return g;
}

static void saves_what_is_retained(void **state)
{
    struct baton_error e;
    struct kv_pool *p;
    for (int round = 0; round < 30; round++) {
        uint32_t window = test_range(&seed, 1, 200), length = test_range(&seed, 1, 500);
        if (round < 4)
            length = window + (uint32_t)round - 1 ? window + (uint32_t)round - 1 : 1;
        struct kv_geometry g = geometry(window);
        test_ok(kv_pool_open(&p, &g, length + 1, 1, length, &e), &e);
        struct kv_seq *s = seq_open(p, length);
        test_ok(kv_save(s, path, metadata, NULL, &e), &e);
        expect_file(s, &g);
        test_ok(kv_seq_reserve(s, 1, &e), &e); /* with blocks given back: the same */
        test_ok(kv_save(s, path, metadata, NULL, &e), &e);
        expect_file(s, &g);
        kv_seq_close(s);
        kv_pool_close(p);
    }
}

static void expect_old(const char *text)
{
    struct baton_error e;
    char *file;
    size_t size;
    test_ok(base_file_read(path, 1000, &file, &size, &e), &e);
    assert_string_equal(file, text);
    free(file);
    assert_int_equal(folder_count(), 1);
}

static void failures_keep_the_old_file(void **state)
{
    struct baton_error e;
    struct kv_pool *p;
    struct rlimit old, small = {100000, 100000};
    struct kv_geometry g = geometry(100);
    static const char *const not_text[] = {"key", "\xff\xfe", NULL};
    char nowhere[160];
    g.dtype = BATON_F32;
    g.head_dim = 40;
    test_ok(kv_pool_open(&p, &g, 1000, 1, 1000, &e), &e);
    struct kv_seq *s = seq_open(p, 1000);
    test_ok(base_file_write(path, "old", 3, &e), &e);
    signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes stands for a full disk */
    getrlimit(RLIMIT_FSIZE, &old);
    small.rlim_max = old.rlim_max;
    setrlimit(RLIMIT_FSIZE, &small);
    int rc = kv_save(s, path, NULL, NULL, &e);
    setrlimit(RLIMIT_FSIZE, &old);
    assert_int_equal(rc, BATON_ERR_IO);
    assert_non_null(strstr(e.text, path));
    expect_old("old");
    test_fails(kv_save(s, path, not_text, NULL, &e), BATON_ERR_USAGE, "UTF-8", &e);
    expect_old("old");
    snprintf(nowhere, sizeof nowhere, "%s/no/where", folder);
    test_fails(kv_save(s, nowhere, NULL, NULL, &e), BATON_ERR_IO, "no/where", &e);
    test_fails(kv_save(s, folder, NULL, NULL, &e), BATON_ERR_IO, "folder", &e);
    expect_old("old");
    kv_seq_close(s);
    kv_pool_close(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(saves_what_is_retained),
        cmocka_unit_test(failures_keep_the_old_file),
    };
    seed = test_seed();
    return cmocka_run_group_tests_name("kv save", tests, folder_open, folder_close);
}
