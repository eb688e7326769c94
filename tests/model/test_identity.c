/* SPDX-License-Identifier: Apache-2.0 */
/* Content hashes, their cache, and models made in memory. */
#include <dirent.h>
#include <fcntl.h>

#include "device/device.h"
#include "folder.h"
#include "model/model_priv.h"

#define QWEN3 "tests/golden/edge/qwen3-headdim128"
#define SHARDED "tests/golden/edge/qwen3-sharded3"

static void hash_of(const char *dir, bool no_cache, struct model_identity *id)
{
    struct baton_error e;
    struct model *m;
    test_ok(model_open(dir, &m, &e), &e);
    test_ok(model_hash(m, 2, no_cache, NULL, NULL, id, &e), &e);
    model_close(m);
}

/* What a shell says: the definition of a pin is a command line. */
static void shell_pin(const char *dir, char hex[65])
{
    char command[1024];
    snprintf(command, sizeof command,
             "cd '%s' && LC_ALL=C && export LC_ALL && sha256sum $(ls config.json tokenizer.json "
             "*.safetensors 2>/dev/null | grep -v golden | sort) | sha256sum",
             dir);
    FILE *p = popen(command, "r");
    assert_non_null(p);
    assert_int_equal(fread(hex, 1, 64, p), 64);
    hex[64] = '\0';
    pclose(p);
}

static void pins(void **state)
{
    static const char *const dirs[] = {"models/qwen3-tiny", "models/gemma3-tiny", QWEN3, SHARDED};
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++) {
        struct model_identity id;
        char want[65], got[65];
        uint8_t zeros[32] = {0};
        hash_of(test_path(dirs[i]), true, &id);
        shell_pin(test_path(dirs[i]), want);
        base_hex(id.pin, 32, got);
        assert_string_equal(got, want);
        assert_int_equal(memcmp(id.tokenizer, zeros, 32) != 0, i < 2);
    }
}

/* Tensors dealt at random over shards, and all in one file, are the same weights. */
static void shards_agree(void **state)
{
    uint64_t seed = test_seed();
    struct model_identity single, split;
    struct edit x;
    char dir[256], name[64], index[1 << 16];
    size_t len, n_config;
    hash_of(test_path(QWEN3), true, &single);
    folder_make(dir);
    char *config = get_text(test_path(QWEN3 "/config.json"), &n_config);
    put_file(dir, "config.json", config, n_config);
    edit_open(&x, test_path(QWEN3 "/model.safetensors"));
    unsigned n_shards = test_range(&seed, 2, 5);
    len = (size_t)sprintf(index, "{\"metadata\":{\"total_size\":1},\"weight_map\":{");
    struct model_tensor shard[5][600];
    size_t count[5] = {0};
    for (size_t i = 0; i < x.n; i++) {
        unsigned s = i < n_shards ? (unsigned)i : test_range(&seed, 0, n_shards - 1);
        shard[s][count[s]++] = x.list[i];
        len += (size_t)sprintf(index + len, "%s\"%s\":\"model-%u.safetensors\"", i ? "," : "",
                               x.list[i].name, s);
    }
    sprintf(index + len, "}}");
    put_text(dir, "model.safetensors.index.json", index);
    for (unsigned s = 0; s < n_shards; s++) {
        snprintf(name, sizeof name, "model-%u.safetensors", s);
        write_tensors(in(dir, name), shard[s], count[s], s % 3);
    }
    hash_of(dir, true, &split);
    assert_memory_equal(single.weights, split.weights, 32);
    assert_memory_equal(single.arch, split.arch, 32);
    assert_true(memcmp(single.pin, split.pin, 32) != 0); /* other files */

    /* One bit of one tensor. */
    size_t n;
    char *bytes = get_text(in(dir, "model-0.safetensors"), &n);
    bytes[n - 1] ^= 1;
    put_file(dir, "model-0.safetensors", bytes, n);
    hash_of(dir, true, &split);
    assert_true(memcmp(single.weights, split.weights, 32) != 0);
    assert_memory_equal(single.arch, split.arch, 32);
    free(bytes);

    /* Another number in the configuration. */
    put_file(dir, "model-0.safetensors", bytes = get_text(in(dir, "model-0.safetensors"), &n), n);
    free(bytes);
    memcpy(strstr(config, "1e-06"), "1e-05", 5);
    put_file(dir, "config.json", config, n_config);
    hash_of(dir, true, &split);
    assert_true(memcmp(single.arch, split.arch, 32) != 0);
    free(config);
    edit_close(&x);
    folder_remove(dir);
}

/* The weights' digest by its own definition, from the bytes in the file. */
static void weights_definition(void **state)
{
    struct baton_error e;
    struct model_identity id;
    struct model_tensors *t;
    struct base_sha256 s;
    uint8_t digest[32];
    hash_of(test_path(QWEN3), true, &id);
    test_ok(model_tensors_open(test_path(QWEN3 "/model.safetensors"), &t, &e), &e);
    base_sha256_init(&s);
    for (size_t i = 0; i < model_tensors_count(t); i++) {
        const struct model_tensor *x = model_tensors_at(t, i);
        char hex[65], line[256];
        base_sha256(x->data, x->bytes, digest);
        base_hex(digest, 32, hex);
        int n = x->n_dims == 1 ? sprintf(line, "%s BF16 [%d] %s\n", x->name, (int)x->shape[0], hex)
                               : sprintf(line, "%s BF16 [%d, %d] %s\n", x->name, (int)x->shape[0],
                                         (int)x->shape[1], hex);
        base_sha256_update(&s, line, (size_t)n);
    }
    base_sha256_final(&s, digest);
    assert_memory_equal(digest, id.weights, 32);
    model_tensors_close(t);
}

static void age(const char *path, int seconds)
{
    struct timespec t[2];
    clock_gettime(CLOCK_REALTIME, &t[0]);
    t[0].tv_sec -= seconds;
    t[1] = t[0];
    assert_int_equal(utimensat(AT_FDCWD, path, t, 0), 0);
}

/* The one file in a folder. */
static bool only_file(const char *dir, char name[256])
{
    unsigned n = 0;
    DIR *d = opendir(dir);
    for (struct dirent *x; d && (x = readdir(d));)
        if (x->d_name[0] != '.') {
            snprintf(name, 256, "%s", x->d_name);
            n++;
        }
    if (d)
        closedir(d);
    return n == 1;
}

static void cache(void **state)
{
    struct model_identity right, id;
    char dir[256], xdg[300], store[320], name[256];
    size_t n;
    folder_make(dir);
    snprintf(xdg, sizeof xdg, "%s/none/xdg", dir);
    snprintf(store, sizeof store, "%s/baton", xdg);
    setenv("XDG_CACHE_HOME", xdg, 1);
    char *text = get_text(test_path(QWEN3 "/config.json"), &n);
    put_file(dir, "config.json", text, n);
    free(text);
    text = get_text(test_path(QWEN3 "/model.safetensors"), &n);
    put_file(dir, "model.safetensors", text, n);
    free(text);
    const char *weights = in(dir, "model.safetensors");
    char path[512];
    snprintf(path, sizeof path, "%s", weights);

    hash_of(dir, false, &right); /* written just now: may still change within the clock's tick */
    assert_false(only_file(store, name));
    age(path, 100);
    hash_of(dir, true, &id);
    assert_false(only_file(store, name)); /* no_cache writes none either */
    hash_of(dir, false, &id);
    assert_memory_equal(&id, &right, sizeof id);
    assert_true(only_file(store, name));
    hash_of(dir, false, &id);
    assert_memory_equal(&id, &right, sizeof id);

    /* It is read: a forged digest of the file (third line) shows in the pin. */
    text = get_text(in(store, name), &n);
    char *third = strchr(strchr(text, '\n') + 1, '\n') + 1;
    *third = *third == '0' ? '1' : '0';
    put_file(store, name, text, n);
    hash_of(dir, false, &id);
    assert_true(memcmp(id.pin, right.pin, 32) != 0);
    assert_memory_equal(id.weights, right.weights, 32);
    hash_of(dir, true, &id);
    assert_memory_equal(&id, &right, sizeof id);

    /* Of another file, by its second line: not believed. */
    char *second = strchr(text, '\n') + 1;
    *second ^= 1;
    put_file(store, name, text, n);
    hash_of(dir, false, &id);
    assert_memory_equal(&id, &right, sizeof id);
    *second ^= 1;

    /* Damaged: made again. Cuts at every kind of place. */
    for (size_t cut = 0; cut < n; cut += 1 + n / 37) {
        put_file(store, name, text, cut);
        hash_of(dir, false, &id);
        assert_memory_equal(&id, &right, sizeof id);
    }
    /* Another state of the file: the forged digest is not asked for. */
    put_file(store, name, text, n);
    age(path, 50);
    hash_of(dir, false, &id);
    assert_memory_equal(&id, &right, sizeof id);
    free(text);

    /* No place for a cache is no error. */
    setenv("XDG_CACHE_HOME", "/proc/none", 1);
    hash_of(dir, false, &id);
    assert_memory_equal(&id, &right, sizeof id);
    folder_remove(dir);
}

struct told {
    uint64_t done, all;
};

static void tell(void *ctx, uint64_t done, uint64_t all)
{
    struct told *t = ctx;
    assert_true(done <= all);
    *t = (struct told){done, all};
}

static void threads_agree(void **state)
{
    struct baton_error e;
    struct model *m;
    struct model_identity one, many;
    test_ok(model_open(test_path("models/koni-tiny"), &m, &e), &e);
    test_ok(model_hash(m, 1, true, NULL, NULL, &one, &e), &e);
    for (unsigned t = 0; t < 8; t += 3) {
        struct told told = {0};
        test_ok(model_hash(m, t, true, tell, &told, &many, &e), &e);
        assert_memory_equal(&one, &many, sizeof one);
        assert_true(told.all > 0 && told.done == told.all);
    }
    model_close(m);
}

/* ---- shape: --------------------------------------------------------------------------------- */

static void shape_names(void **state)
{
    struct baton_error e;
    struct model *m = NULL;
    test_fails(model_open("shape:", &m, &e), BATON_ERR_USAGE, "known are qwen3-0.6b", &e);
    test_fails(model_open("shape:qwen3", &m, &e), BATON_ERR_USAGE, "qwen3-4b", &e);
    test_fails(model_open("shape:qwen3-0.6b:", &m, &e), BATON_ERR_USAGE, "seed", &e);
    test_fails(model_open("shape:qwen3-0.6b:1x", &m, &e), BATON_ERR_USAGE, "seed", &e);
    test_fails(model_open("shape:qwen3-0.6b:-1", &m, &e), BATON_ERR_USAGE, "seed", &e);
    assert_null(m);
    test_ok(model_open("shape:qwen3-4b:77", &m, &e), &e);
    assert_true(model_is_shape(m));
    assert_int_equal(model_n_params(m), UINT64_C(4022468096));
    model_close(m);
    test_ok(model_open("shape:gemma-3-1b", &m, &e), &e);
    assert_int_equal(model_n_params(m), 999885952);
    const struct model_config *c = model_config_of(m);
    assert_true(c->window == 512 && c->local[4] && !c->local[5] && c->local[24] && !c->local[23]);
    assert_true(c->rope_local.inv_freq[1] > c->rope_global.inv_freq[1]);
    model_close(m);
}

/* Any piece asked for again is the same; mean and deviation are as promised. */
static void shape_numbers(void **state)
{
    uint64_t seed = test_seed();
    struct baton_error e;
    struct model *m, *other;
    static uint16_t whole[100003], piece[100004];
    test_ok(model_open("shape:llama-3.1-8b:5", &m, &e), &e);
    test_ok(model_open("shape:llama-3.1-8b:6", &other, &e), &e);
    for (int turn = 0; turn < 20; turn++) {
        size_t x = (size_t)(test_random(&seed) % m->n_entries);
        uint64_t n = m->entries[x].n_elements < 100003 ? m->entries[x].n_elements : 100003;
        model_shape_fill(m, x, 0, n, whole);
        memset(piece, 0xFF, sizeof piece);
        for (uint64_t at = 0; at < n;) {
            uint64_t k = 4 * test_range(&seed, 1, 5000);
            k = at + k > n ? n - at : k;
            model_shape_fill(m, x, at, k, piece + at);
            at += k;
        }
        assert_memory_equal(whole, piece, n * sizeof *whole);
        assert_int_equal(piece[n], 0xFFFF); /* guard */
        double sum = 0, squares = 0, mean = m->entries[x].norm ? 1 : 0;
        for (uint64_t i = 0; i < n; i++) {
            uint32_t u = (uint32_t)whole[i] << 16;
            float f;
            memcpy(&f, &u, sizeof f);
            sum += f - mean;
            squares += (f - mean) * (f - mean);
        }
        /* six standard errors of both estimates */
        assert_true(fabs(sum / (double)n) < 6 * 0.02 / sqrt((double)n) + (mean > 0 ? 1e-3 : 0));
        assert_true(fabs(sqrt(squares / (double)n) / 0.02 - 1) < 6 / sqrt(2.0 * (double)n) + 0.01);
        model_shape_fill(other, x, 0, n, piece);
        assert_true(memcmp(whole, piece, n * sizeof *whole) != 0);
        size_t next = (x + 1) % m->n_entries;
        model_shape_fill(m, next, 0, 64, piece);
        assert_true(memcmp(whole, piece, 64 * sizeof *whole) != 0);
    }
    model_close(other);
    model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pins),          cmocka_unit_test(shards_agree),
        cmocka_unit_test(cache),         cmocka_unit_test(weights_definition),
        cmocka_unit_test(threads_agree), cmocka_unit_test(shape_names),
        cmocka_unit_test(shape_numbers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
