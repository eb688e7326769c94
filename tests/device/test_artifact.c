/* SPDX-License-Identifier: Apache-2.0 */
/* Artifacts of the emulated devices: what was compiled and loaded computes the same bits; what is
 * not of this device, model, checkpoint or build is refused by the name of what differs, and so is
 * every file that is not whole. */
#include <unistd.h>

#include "device/npu/artifact_priv.h"
#include "model/model.h"

#include "cpu_pages.h"
#include "side.h"

#define WINDOW8 "tests/golden/edge/gemma3-window8-headdim256"

static char path[64];
static const uint8_t no_checkpoint[32];

static struct model *load(const char *name)
{
    struct model *m = NULL;
    test_ok(model_open(test_path(name), &m, &err), &err);
    return m;
}

static void put(const char *bytes, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    fclose(f);
}

/* The bytes of a device's program for the model; free(). */
static char *compiled(const char *device, const struct model *m, size_t *n)
{
    struct model_identity id;
    struct device *d = NULL;
    struct side s;
    char *bytes = NULL;
    test_ok(device_open(device, &d, &err), &err);
    test_ok(side_open(&s, d, m), &err);
    test_ok(model_hash(m, 2, false, NULL, NULL, &id, &err), &err);
    test_ok(device_program_artifact(s.program, 1000, id.weights, &bytes, n, &err), &err);
    side_close(&s);
    return bytes;
}

/* What opening a device, binding a model and opening its program come to. */
static int try_open(const char *device, const struct model *m)
{
    struct device *d = NULL;
    struct side s = {0};
    char name[128];
    snprintf(name, sizeof name, "%s,artifact=%s", device, path);
    int rc = device_open(name, &d, &err);
    if (rc)
        return rc;
    rc = device_start(d, 1, &err);
    if (rc == 0)
        rc = model_bind(m, d, NULL, NULL, &s.bound, &err);
    if (rc == 0)
        rc = device_program_open(d, model_graph(s.bound), &s.program, &err);
    device_program_close(s.program);
    model_unbind(s.bound);
    device_close(d);
    return rc;
}

/* ---- what passes ---------------------------------------------------------------------------- */

static void prefill(struct side *s, const struct model *m, const int32_t *ids, uint32_t n)
{
    const struct model_config *c = model_config_of(m);
    uint64_t seed = 1, id = 0;
    uint32_t row = n - 1;
    cpu_pages_open(&s->pages, &seed, c->n_layers, c->kv_heads, c->head_dim, n);
    const struct baton_span span = {0, n, 0, 0, s->pages.views};
    const struct baton_batch b = {0, ids, n, &span, 1, &row, 1, s->logits, NULL, NULL};
    pages_set_end(&s->pages, 0);
    test_ok(device_submit(s->program, &b, &id, &err), &err);
}

static void same_bits(void **state)
{
    struct model *m = load(WINDOW8);
    struct device *d = NULL;
    struct side plain, loaded;
    char name[128];
    int32_t ids[100];
    uint64_t seed = test_seed();
    size_t n = 0;
    char *bytes = compiled("npu:rngd,parts=3", m, &n);
    put(bytes, n);
    for (int i = 0; i < 100; i++)
        ids[i] = (int32_t)test_range(&seed, 0, model_config_of(m)->vocab - 1);
    test_ok(device_open("npu:rngd,parts=3", &d, &err), &err);
    test_ok(side_open(&plain, d, m), &err);
    snprintf(name, sizeof name, "npu:rngd,artifact=%s", path);
    test_ok(device_open(name, &d, &err), &err);
    test_ok(side_open(&loaded, d, m), &err);
    prefill(&plain, m, ids, 100);
    prefill(&loaded, m, ids, 100);
    assert_memory_equal(plain.logits, loaded.logits, model_config_of(m)->vocab * sizeof(float));
    pages_close(&plain.pages);
    pages_close(&loaded.pages);
    side_close(&plain);
    side_close(&loaded);
    free(bytes);
    model_close(m);
}

/* A program from a file says the same of itself; the same program is always the same bytes. */
static void same_bytes(void **state)
{
    static const char *const devices[] = {"npu:rngd", "npu:atom-b1", "npu:atom-b4"};
    struct model *m = load("models/koni-tiny");
    for (size_t i = 0; i < 3; i++) {
        size_t n = 0, again = 0;
        char name[128], *bytes = compiled(devices[i], m, &n);
        put(bytes, n);
        snprintf(name, sizeof name, "%s,artifact=%s", devices[i], path);
        char *second = compiled(name, m, &again);
        assert_int_equal(n, again);
        assert_memory_equal(bytes, second, n);
        free(bytes);
        free(second);
    }
    model_close(m);
}

/* The transposed sample: refused by name; silent, and read with the sample's strides, where that
 * fault is asked for. */
static void strides_of_the_sample(void **state)
{
    struct model *m = load(WINDOW8);
    size_t n = 0;
    char *bytes = compiled("npu:rngd,fault=weight-stride", m, &n);
    put(bytes, n);
    test_fails(try_open("npu:rngd", m), BATON_ERR_MISMATCH, "compiled with stride", &err);
    test_ok(try_open("npu:rngd,fault=weight-stride", m), &err);
    free(bytes);
    bytes = compiled("npu:rngd", m, &n);
    put(bytes, n);
    test_fails(try_open("npu:rngd,fault=weight-stride", m), BATON_ERR_UNSUPPORTED,
               "strides that the model has", &err);
    free(bytes);
    model_close(m);
}

/* ---- what is refused ------------------------------------------------------------------------ */

static void not_whole(void **state)
{
    struct model *m = load(WINDOW8);
    uint64_t seed = test_seed();
    size_t n = 0;
    char *bytes = compiled("npu:rngd", m, &n);
    for (int i = 0; i < 50; i++) {
        put(bytes, test_range(&seed, 0, (uint32_t)n - 1));
        int rc = try_open("npu:rngd", m);
        if (rc != BATON_ERR_INPUT)
            fail_msg("a cut file: %d, %s", rc, err.text);
    }
    put(bytes, n - 1);
    test_fails(try_open("npu:rngd", m), BATON_ERR_INPUT, "truncated", &err);
    for (int i = 0; i < 50; i++) {
        size_t at = test_range(&seed, 0, (uint32_t)n - 1);
        bytes[at] ^= (char)(1u << test_range(&seed, 0, 6));
        put(bytes, n);
        int rc = try_open("npu:rngd", m);
        if (rc != BATON_ERR_INPUT && rc != BATON_ERR_UNSUPPORTED) /* the version's digit */
            fail_msg("a flipped bit: %d, %s", rc, err.text);
        free(bytes);
        bytes = compiled("npu:rngd", m, &n);
    }
    free(bytes);
    model_close(m);
}

/* The file with `from` replaced, as long as it, and the hash put right. */
static void doctor(const char *bytes, size_t n, const char *from, const char *to)
{
    char *copy = malloc(n + 1), hex[65];
    memcpy(copy, bytes, n + 1);
    char *body = strchr(copy, '\n') + 1, *at = strstr(body, from);
    uint8_t hash[32];
    assert_non_null(at);
    assert_int_equal(strlen(from), strlen(to));
    memcpy(at, to, strlen(to));
    base_sha256(body, n - (size_t)(body - copy), hash);
    base_hex(hash, 32, hex);
    memcpy(body - 65, hex, 64);
    put(copy, n);
    free(copy);
}

/* Each says what differs. */
static void of_something_else(void **state)
{
    static const struct {
        const char *from, *to;
        int code;
        const char *word;
    } cases[] = {
        {"\"layers\":4,", "\"layers\":3,", BATON_ERR_MISMATCH, "layers 3"},
        {"\"window\":8,", "\"window\":9,", BATON_ERR_MISMATCH, "window 9"},
        {"\"source\":\"", "\"source\":\"", BATON_ERR_MISMATCH, "forward function"},
        {"\"checkpoint\":\"", "\"checkpoint\":\"", BATON_ERR_MISMATCH, "checkpoint"},
        {"\"parts\":[0]", "\"parts\":[1]", BATON_ERR_INPUT, "parts"},
        {"[128,1024,", "[128,1023,", BATON_ERR_MISMATCH, "1023"},
        {"\"host\":true", "\"host\":1234", BATON_ERR_INPUT, "host"},
        {"\"device\":\"npu:rngd\"", "\"device\":\"npu:atom\"", BATON_ERR_MISMATCH, "npu:atom"},
        {"input_layernorm", "output_layernor", BATON_ERR_MISMATCH, "no weight"},
    };
    struct model *m = load(WINDOW8), *other = load("models/qwen3-tiny");
    size_t n = 0;
    char *bytes = compiled("npu:rngd", m, &n);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char from[40], to[40];
        snprintf(from, sizeof from, "%s", cases[i].from);
        snprintf(to, sizeof to, "%s", cases[i].to);
        if (!strcmp(from, to)) { /* the first digit of a hash */
            const char *digit = strstr(bytes, from) + strlen(from);
            size_t k = strlen(from);
            from[k] = *digit;
            to[k] = *digit == '0' ? '1' : '0';
            from[k + 1] = to[k + 1] = '\0';
        }
        doctor(bytes, n, from, to);
        test_fails(try_open("npu:rngd", m), cases[i].code, cases[i].word, &err);
    }
    put(bytes, n);
    test_fails(try_open("npu:rngd", other), BATON_ERR_MISMATCH, "was compiled with [", &err);
    test_fails(try_open("npu:atom-b4", m), BATON_ERR_MISMATCH, "not for npu:atom-b4", &err);
    test_fails(try_open("npu:rngd,parts=2", m), BATON_ERR_USAGE, "leave it out", &err);
    test_ok(try_open("npu:rngd,width=1024", m), &err);
    bytes[strlen(NPU_ARTIFACT_MAGIC) + 1] = '2';
    put(bytes, n);
    test_fails(try_open("npu:rngd", m), BATON_ERR_UNSUPPORTED, "version 2", &err);
    unlink(path);
    test_fails(try_open("npu:rngd", m), BATON_ERR_INPUT, path, &err);
    free(bytes);
    model_close(other);
    model_close(m);
}

/* A consumer's length is compiled in. */
static void too_many_positions(void **state)
{
    struct model *m = load(WINDOW8);
    struct device *d = NULL;
    struct side s;
    char name[128];
    size_t n = 0;
    char *bytes = compiled("npu:atom-b4,partition=256", m, &n);
    put(bytes, n);
    snprintf(name, sizeof name, "npu:atom-b4,artifact=%s", path);
    test_ok(device_open(name, &d, &err), &err);
    test_ok(side_open(&s, d, m), &err);
    struct device_kv_pool pool = {.host = name, .positions = 1025, .lanes = 4};
    test_fails(device_kv_open(d, &pool, &err), BATON_ERR_MISMATCH, "1024 positions", &err);
    pool.positions = 30;
    test_ok(device_kv_open(d, &pool, &err), &err);
    device_kv_close(d);
    side_close(&s);
    free(bytes);
    model_close(m);
    struct device_program *cpu = NULL;
    test_ok(device_open("cpu", &d, &err), &err);
    m = load(WINDOW8);
    test_ok(side_open(&s, d, m), &err);
    cpu = s.program;
    test_fails(device_program_artifact(cpu, 1, no_checkpoint, &bytes, &n, &err),
               BATON_ERR_UNSUPPORTED, "cpu", &err);
    side_close(&s);
    model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bits),         cmocka_unit_test(same_bytes),
        cmocka_unit_test(not_whole),         cmocka_unit_test(strides_of_the_sample),
        cmocka_unit_test(of_something_else), cmocka_unit_test(too_many_positions),
    };
    snprintf(path, sizeof path, "/tmp/baton-artifact-%d", (int)getpid());
    int rc = cmocka_run_group_tests_name("device artifact", tests, NULL, NULL);
    unlink(path);
    return rc;
}
