/* SPDX-License-Identifier: Apache-2.0 */
/* Hugging Face goldens through the command line: `run --force --logits --kv-save`, four shipped and
 * all edge models, cpu:ref and cpu. The limits are docs/architecture.md's constants. */
#include <dirent.h>

#include "tests/e2e/e2e.h"

struct limits {
    const char *device;
    double logits_each, logits_median, kv, margin;
};

static const struct limits all_limits[] = {
    {"cpu:ref", 3e-5, 3e-5, 6e-5, 0.001},
    {"cpu", 5e-2, 1e-2, 1.5e-2, 0.4},
    {"cuda", 5e-2, 1e-2, 1.5e-2, 0.4},
};

/* Relative errors of one device's cases, for the median. */
struct tally {
    double logits[256];
    size_t n;
    double worst_kv;
    size_t steps, exempt;
};

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Element of a saved slot: f32 (cpu:ref) or bf16 (cpu). */
static float element(const struct model_tensor *t, size_t i)
{
    if (t->dtype == BATON_F32)
        return ((const float *)t->data)[i];
    union {
        uint32_t u;
        float f;
    } v = {(uint32_t)((const uint16_t *)t->data)[i] << 16};
    return v.f;
}

/* Rows of a saved slot that the golden holds, in its order: kv_heads x n x head_dim floats. */
static void gather(const struct model_tensor *slot, const struct model_tensor *held,
                   const int32_t *want, size_t n, float *out)
{
    size_t heads = slot->shape[0], rows = slot->shape[1], dim = slot->shape[2];
    assert_int_equal(held->shape[0], rows);
    for (size_t h = 0; h < heads; h++)
        for (size_t i = 0; i < n; i++) {
            size_t row = 0;
            while (row < rows && ((const int32_t *)held->data)[row] != want[i])
                row++;
            if (row == rows)
                fail_msg("position %d is not in the saved cache", want[i]);
            size_t at = (h * rows + row) * dim;
            for (size_t d = 0; d < dim; d++)
                out[(h * n + i) * dim + d] = element(slot, at + d);
        }
}

static void compare_slot(const struct model_tensors *golden, const struct model_tensors *saved,
                         const char *name, char which, unsigned layer, const int32_t *want,
                         size_t n, const struct limits *lim, struct tally *t)
{
    const struct model_tensor *g = e2e_tensor(golden, "%s.%c.%u", name, which, layer);
    const struct model_tensor *s = e2e_tensor(saved, "%c.%u", which, layer);
    const struct model_tensor *p = e2e_tensor(saved, "positions.%u", layer);
    size_t count = g->shape[0] * g->shape[1] * g->shape[2];
    assert_int_equal(g->shape[0], s->shape[0]);
    assert_int_equal(g->shape[1], n);
    assert_int_equal(g->shape[2], s->shape[2]);
    float *rows = malloc(count * sizeof *rows);
    gather(s, p, want, n, rows);
    double err = test_rel_rms(rows, g->data, count);
    if (!(err < lim->kv))
        fail_msg("%s %s %c.%u: relative RMS %g, limit %g", lim->device, name, which, layer, err,
                 lim->kv);
    if (err > t->worst_kv)
        t->worst_kv = err;
    free(rows);
}

/* All slots of a shipped model's case; positions by kind of layer. */
static void compare_cache(const struct model_tensors *golden, const struct model_tensors *saved,
                          const char *name, const struct model_config *c, const struct limits *lim,
                          struct tally *t)
{
    for (unsigned l = 0; l < c->n_layers; l++) {
        const struct model_tensor *p = e2e_tensor(
            golden, "%s.positions.%s", name, c->local[l] ? "sliding_attention" : "full_attention");
        compare_slot(golden, saved, name, 'k', l, p->data, p->shape[0], lim, t);
        compare_slot(golden, saved, name, 'v', l, p->data, p->shape[0], lim, t);
    }
}

/* Edge goldens hold the last two positions of the first and the last layer. */
static void compare_cache_edge(const struct model_tensors *golden,
                               const struct model_tensors *saved, const char *name,
                               uint32_t n_prompt, const struct model_config *c,
                               const struct limits *lim, struct tally *t)
{
    int32_t last[2] = {(int32_t)n_prompt - 2, (int32_t)n_prompt - 1};
    const unsigned layers[2] = {0, c->n_layers - 1};
    for (int i = 0; i < 2; i++) {
        compare_slot(golden, saved, name, 'k', layers[i], last, 2, lim, t);
        compare_slot(golden, saved, name, 'v', layers[i], last, 2, lim, t);
    }
}

static void compare_steps(const struct model_tensors *golden, const struct model_tensors *out,
                          const char *name, const struct limits *lim, struct tally *t)
{
    const struct model_tensor *want = e2e_tensor(golden, "%s.greedy_ids", name);
    const struct model_tensor *margin = e2e_tensor(golden, "%s.margins", name);
    const struct model_tensor *got = e2e_tensor(out, "argmax");
    const struct model_tensor *first = e2e_tensor(golden, "%s.logits", name);
    const struct model_tensor *rows = e2e_tensor(out, "logits");
    assert_int_equal(got->shape[0], want->shape[0]);
    assert_int_equal(rows->shape[1], first->shape[0]);
    double err = test_rel_rms(rows->data, first->data, first->shape[0]);
    if (!(err < lim->logits_each))
        fail_msg("%s %s: logits relative RMS %g, limit %g", lim->device, name, err,
                 lim->logits_each);
    t->logits[t->n++] = err;
    for (size_t i = 0; i < want->shape[0]; i++) {
        int32_t w = ((const int32_t *)want->data)[i], g = ((const int32_t *)got->data)[i];
        float m = ((const float *)margin->data)[i];
        t->steps++;
        if (m <= lim->margin)
            t->exempt++;
        else if (w != g)
            fail_msg("%s %s step %zu: token %d, golden %d (margin %g)", lim->device, name, i, g, w,
                     (double)m);
    }
}

/* One case through the command line. */
static void check_case(const char *dir, const struct model_tensors *golden, const char *name,
                       const struct model_config *c, bool edge, const struct limits *lim,
                       struct tally *t)
{
    struct baton_error e;
    const struct model_tensor *prompt = e2e_tensor(golden, "%s.input_ids", name);
    const struct model_tensor *greedy = e2e_tensor(golden, "%s.greedy_ids", name);
    char *ids = e2e_ids(prompt->data, prompt->shape[0]);
    char *force = e2e_ids(greedy->data, greedy->shape[0]);
    const char *logits = e2e_temp("logits.safetensors"), *kv = e2e_temp("kv.safetensors");
    const char *args[] = {"run",       "-m",        dir, "--mode",  "native", "--decode",
                          lim->device, "--ids",     ids, "--force", force,    "--logits",
                          logits,      "--kv-save", kv,  "--json",  NULL};
    struct e2e r;
    e2e_expect(&r, 0, args);
    e2e_free(&r);
    struct model_tensors *out = NULL, *saved = NULL;
    test_ok(model_tensors_open(logits, &out, &e), &e);
    test_ok(model_tensors_open(kv, &saved, &e), &e);
    compare_steps(golden, out, name, lim, t);
    if (edge)
        compare_cache_edge(golden, saved, name, (uint32_t)prompt->shape[0], c, lim, t);
    else
        compare_cache(golden, saved, name, c, lim, t);
    model_tensors_close(out);
    model_tensors_close(saved);
    free(ids);
    free(force);
}

static void check_model(const char *dir, const char *golden_dir, bool edge,
                        const struct limits *lim, struct tally *t)
{
    static const char *const shipped[] = {"p1", "p7", "count", "p128", "p700", "p2048", NULL};
    static const char *const edges[] = {"p5", "p33", "p100", NULL};
    struct baton_error e;
    struct model *m = NULL;
    struct model_tensors *golden = NULL;
    char path[1200];
    snprintf(path, sizeof path, "%s/golden.safetensors", golden_dir);
    test_ok(model_open(dir, &m, &e), &e);
    test_ok(model_tensors_open(path, &golden, &e), &e);
    for (const char *const *name = edge ? edges : shipped; *name; name++)
        check_case(dir, golden, *name, model_config_of(m), edge, lim, t);
    model_tensors_close(golden);
    model_close(m);
}

static void check_device(const struct limits *lim)
{
    struct tally t = {0};
    char dir[1024], golden[1100];
    for (int i = 0; i < 4; i++) {
        snprintf(golden, sizeof golden, "%s/%s", test_path("tests/golden"), e2e_models[i]);
        check_model(e2e_model(e2e_models[i]), golden, false, lim, &t);
    }
    DIR *d = opendir(test_path("tests/golden/edge"));
    assert_non_null(d);
    unsigned edges = 0;
    for (struct dirent *f; (f = readdir(d));) {
        if (f->d_name[0] == '.')
            continue;
        snprintf(dir, sizeof dir, "%s/%s", test_path("tests/golden/edge"), f->d_name);
        check_model(dir, dir, true, lim, &t);
        edges++;
    }
    closedir(d);
    assert_int_equal(edges, 7);
    qsort(t.logits, t.n, sizeof *t.logits, by_value);
    double median = t.logits[t.n / 2];
    print_message("%s: %zu cases, logits relative RMS median %.3g, worst %.3g; worst KV slot %.3g; "
                  "%zu steps, %zu below the margin\n",
                  lim->device, t.n, median, t.logits[t.n - 1], t.worst_kv, t.steps, t.exempt);
    if (!(median < lim->logits_median))
        fail_msg("median %g, limit %g", median, lim->logits_median);
}

static void test_cpu_ref(void **state)
{
    (void)state;
    check_device(&all_limits[0]);
}

static void test_cpu(void **state)
{
    (void)state;
    check_device(&all_limits[1]);
}

static void test_cuda(void **state)
{
    struct baton_error e = {0};
    struct device *d = NULL;
    (void)state;
    if (device_open("cuda", &d, &e)) {
        print_message("skipped: %s\n", e.text);
        skip();
    }
    device_close(d);
    check_device(&all_limits[2]);
}

/* An argument chooses among the tests, as in "test_cuda". */
int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_cpu_ref), cmocka_unit_test(test_cpu),
                                       cmocka_unit_test(test_cuda)};
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    int rc = cmocka_run_group_tests_name("e2e golden", tests, NULL, NULL);
    e2e_temp_remove();
    return rc;
}
