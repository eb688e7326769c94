/* SPDX-License-Identifier: Apache-2.0 */
/* Opening devices by name, listing them, and the checks that stand before every device. */
#include "device/device_priv.h"

#include "pages.h"

static struct baton_error err;

/* ---- names -------------------------------------------------------------------------------- */

static void count_ref(void *ctx, const struct baton_caps *caps, const char *why)
{
    unsigned *n = ctx;
    if (!strcmp(caps->name, "cpu:ref")) {
        assert_null(why);
        assert_int_equal(caps->struct_size, sizeof *caps);
        assert_true(caps->detail[0] && caps->numerics[0]);
        (*n)++;
    }
}

static void lists_the_reference_once(void **state)
{
    unsigned n = 0;
    device_list(count_ref, &n);
    assert_int_equal(n, 1);
}

static void opens_by_name(void **state)
{
    struct device *d = NULL;
    test_ok(device_open("cpu:ref", &d, &err), &err);
    const struct baton_caps *c = device_caps(d);
    assert_true(c->dynamic && c->prefill && c->decode && c->row_invariant && c->host_kv);
    assert_true(c->layer_export && !c->emulated);
    assert_int_equal(c->kv_dtype, BATON_F32);
    assert_int_equal(c->kv_block, 64);
    assert_string_equal(c->numerics, "ref-1");
    device_close(d);
    test_ok(device_open("cpu:ref,kv-dtype=bf16", &d, &err), &err);
    assert_int_equal(device_caps(d)->kv_dtype, BATON_BF16);
    assert_string_not_equal(device_caps(d)->numerics, "ref-1");
    device_close(d);
    device_close(NULL);
}

static void refuses_names(void **state)
{
    struct device *d = NULL;
    char many[400] = "cpu:ref", big[300] = "cpu:ref,";
    test_fails(device_open("", &d, &err), BATON_ERR_USAGE, "cpu:ref", &err);
    test_fails(device_open("cpu:re", &d, &err), BATON_ERR_USAGE, "cpu:ref", &err);
    test_fails(device_open("cpu:reference,isa=x", &d, &err), BATON_ERR_USAGE, "cpu:ref", &err);
    test_fails(device_open("npu:nothing", &d, &err), BATON_ERR_USAGE, "'npu:nothing'", &err);
    test_fails(device_open("cpu:ref,colour=red", &d, &err), BATON_ERR_USAGE, "kv-dtype", &err);
    test_fails(device_open("cpu:ref,colour=red", &d, &err), BATON_ERR_USAGE, "'colour'", &err);
    test_fails(device_open("cpu:ref,kv-dtype=q9", &d, &err), BATON_ERR_USAGE, "f32, bf16", &err);
    test_fails(device_open("cpu:ref,", &d, &err), BATON_ERR_USAGE, "key=value", &err);
    test_fails(device_open("cpu:ref,kv-dtype", &d, &err), BATON_ERR_USAGE, "key=value", &err);
    test_fails(device_open("cpu:ref,kv-dtype=", &d, &err), BATON_ERR_USAGE, "key=value", &err);
    test_fails(device_open("cpu:ref,=f32", &d, &err), BATON_ERR_USAGE, "key=value", &err);
    test_fails(device_open("cpu:ref,kv-dtype=f32,kv-dtype=f32", &d, &err), BATON_ERR_USAGE, "twice",
               &err);
    for (int i = 0; i < 17; i++)
        snprintf(many + strlen(many), sizeof many - strlen(many), ",k%d=1", i);
    test_fails(device_open(many, &d, &err), BATON_ERR_USAGE, "more than", &err);
    memset(big + 8, 'k', 100);
    strcat(big, "=1");
    test_fails(device_open(big, &d, &err), BATON_ERR_USAGE, "too long", &err);
    memset(big, 'x', sizeof big - 1);
    test_fails(device_open(big, &d, &err), BATON_ERR_USAGE, "no device", &err);
    assert_null(d);
}

/* ---- tensors ------------------------------------------------------------------------------ */

static int bind(struct device *d, const struct baton_tensor *t, unsigned kind)
{
    struct device_weight *w = NULL;
    int rc = device_weight_bind(d, t, kind, &w, &err);
    if (rc == 0)
        assert_true(device_weight_bytes(w) >= t->shape[0]);
    device_weight_close(d, w);
    return rc;
}

static void checks_tensors(void **state)
{
    float data[6] = {1, 2, 3, 4, 5, 6};
    struct baton_tensor m = {"the.matrix", BATON_F32, 2, {2, 3}, {12, 4}, data}, t = m;
    struct baton_tensor v = {"the.vector", BATON_F32, 1, {6}, {4}, data};
    struct device *d = NULL;
    test_ok(device_open("cpu:ref", &d, &err), &err);
    test_ok(bind(d, &m, DEVICE_MATRIX), &err);
    test_ok(bind(d, &m, DEVICE_MATRIX | DEVICE_TABLE), &err);
    test_ok(bind(d, &v, DEVICE_VECTOR), &err);
    test_fails(bind(d, &m, 0), BATON_ERR_USAGE, "the.matrix", &err);
    test_fails(bind(d, &m, 8), BATON_ERR_USAGE, "kind", &err);
    test_fails(bind(d, &m, DEVICE_VECTOR), BATON_ERR_USAGE, "dimensions", &err);
    test_fails(bind(d, &v, DEVICE_MATRIX), BATON_ERR_USAGE, "the.vector", &err);
    test_fails(bind(d, &v, DEVICE_VECTOR | DEVICE_TABLE), BATON_ERR_USAGE, "kind", &err);
    t.dtype = BATON_I8;
    test_fails(bind(d, &t, DEVICE_MATRIX), BATON_ERR_UNSUPPORTED, "dtype", &err);
    t = m;
    t.shape[1] = 0;
    test_fails(bind(d, &t, DEVICE_MATRIX), BATON_ERR_USAGE, "dimension 1", &err);
    t.shape[1] = 1ull << 40;
    test_fails(bind(d, &t, DEVICE_MATRIX), BATON_ERR_USAGE, "dimension 1", &err);
    t = m;
    t.data = NULL;
    test_fails(bind(d, &t, DEVICE_MATRIX), BATON_ERR_USAGE, "no data", &err);
    device_close(d);
}

/* ---- batches ------------------------------------------------------------------------------ */

static int forward_nothing(const void *ctx, struct device_run *r, struct baton_error *e)
{
    ++*(unsigned *)(uintptr_t)ctx;
    assert_non_null(device_run_verbs(r));
    return device_run_end(r, e);
}

/* A right batch of two spans that every case breaks in one place. */
struct fixture {
    struct device *device;
    struct device_program *program;
    struct pages pages[2];
    int32_t ids[5];
    uint32_t logit_rows[2];
    float logits[2 * 10];
    struct baton_span spans[2];
    struct baton_batch batch;
    unsigned n_runs;
};

static void fixture_open(struct fixture *f, uint64_t *seed)
{
    memset(f, 0, sizeof *f);
    test_ok(device_open("cpu:ref", &f->device, &err), &err);
    test_ok(device_start(f->device, 1, &err), &err);
    struct device_graph g = {forward_nothing, &f->n_runs, 2, 10, 0, 0};
    test_ok(device_program_open(f->device, &g, &f->program, &err), &err);
    for (int s = 0; s < 2; s++) {
        pages_open(&f->pages[s], seed, BATON_F32, 2, 1, 4, 8, 32);
        pages_set_end(&f->pages[s], s ? 6 : 0);
    }
    f->spans[0] = (struct baton_span){0, 3, 0, 0, f->pages[0].views};
    f->spans[1] = (struct baton_span){3, 2, 6, 1, f->pages[1].views};
    f->logit_rows[0] = 2;
    f->logit_rows[1] = 4;
    f->batch = (struct baton_batch){0, f->ids, 5, f->spans, 2, f->logit_rows, 2, f->logits};
}

static void fixture_close(struct fixture *f)
{
    device_program_close(f->program);
    device_program_close(NULL);
    device_close(f->device);
    pages_close(&f->pages[0]);
    pages_close(&f->pages[1]);
}

static int submit(struct fixture *f)
{
    uint64_t id = 77;
    int rc = device_submit(f->program, &f->batch, &id, &err);
    return rc ? rc : device_wait(f->program, id, 0, &err);
}

/* Break `lvalue`, see the error, mend it. */
#define broken(f, lvalue, value, code, word)                                                       \
    do {                                                                                           \
        __typeof__(lvalue) kept_ = (lvalue);                                                       \
        (lvalue) = (value);                                                                        \
        test_fails(submit(f), code, word, &err);                                                   \
        (lvalue) = kept_;                                                                          \
    } while (0)

static void checks_rows(void **state)
{
    uint64_t seed = test_seed();
    struct fixture f;
    fixture_open(&f, &seed);
    test_ok(submit(&f), &err);
    broken(&f, f.ids[3], 10, BATON_ERR_INPUT, "row 3");
    broken(&f, f.ids[4], -1, BATON_ERR_INPUT, "-1");
    broken(&f, f.batch.n_rows, 0u, BATON_ERR_USAGE, "0 rows");
    broken(&f, f.batch.n_rows, 513u, BATON_ERR_USAGE, "513 rows");
    broken(&f, f.batch.n_rows, 4u, BATON_ERR_USAGE, "row 4");
    broken(&f, f.batch.n_spans, 0u, BATON_ERR_USAGE, "0 spans");
    broken(&f, f.batch.n_spans, 9u, BATON_ERR_USAGE, "9 spans");
    broken(&f, f.batch.n_spans, 1u, BATON_ERR_USAGE, "3 of 5");
    broken(&f, f.batch.ids, NULL, BATON_ERR_USAGE, "ids");
    broken(&f, f.batch.spans, NULL, BATON_ERR_USAGE, "spans");
    broken(&f, f.spans[1].row, 2u, BATON_ERR_USAGE, "span 1");
    broken(&f, f.spans[1].row, 4u, BATON_ERR_USAGE, "span 1");
    broken(&f, f.spans[0].n_rows, 0u, BATON_ERR_USAGE, "span 0");
    broken(&f, f.spans[1].n_rows, 3u, BATON_ERR_USAGE, "span 1");
    broken(&f, f.spans[1].n_rows, UINT32_MAX, BATON_ERR_USAGE, "span 1");
    broken(&f, f.logit_rows[0], 4u, BATON_ERR_USAGE, "ascending");
    broken(&f, f.logit_rows[0], 5u, BATON_ERR_USAGE, "row 5");
    broken(&f, f.logit_rows[1], 5u, BATON_ERR_USAGE, "row 5");
    broken(&f, f.batch.logits, NULL, BATON_ERR_USAGE, "no place");
    broken(&f, f.batch.logit_rows, NULL, BATON_ERR_USAGE, "no place");
    assert_int_equal(f.n_runs, 1);
    test_ok(submit(&f), &err);
    fixture_close(&f);
}

static void checks_views(void **state)
{
    uint64_t seed = test_seed();
    struct fixture f;
    fixture_open(&f, &seed);
    struct baton_kv_view *v = &f.pages[1].views[1]; /* span 1, layer 1: positions 6 and 7 */
    struct baton_kv_layout *l = &f.pages[1].layout;
    broken(&f, f.spans[1].kv, NULL, BATON_ERR_USAGE, "span 1");
    broken(&f, v->layout, NULL, BATON_ERR_USAGE, "span 1, layer 1");
    broken(&f, l->version, 2, BATON_ERR_USAGE, "span 1, layer 0");
    broken(&f, l->kind, BATON_KV_RING, BATON_ERR_USAGE, "paged");
    broken(&f, l->dtype, BATON_BF16, BATON_ERR_USAGE, "dtype");
    broken(&f, l->kv_heads, 0u, BATON_ERR_USAGE, "heads");
    broken(&f, l->head_dim_padded, 3u, BATON_ERR_USAGE, "elements");
    broken(&f, v->k, NULL, BATON_ERR_USAGE, "memory");
    broken(&f, v->v, NULL, BATON_ERR_USAGE, "memory");
    broken(&f, v->blocks, NULL, BATON_ERR_USAGE, "memory");
    broken(&f, v->end, 5u, BATON_ERR_USAGE, "position 6");
    broken(&f, v->first, 7u, BATON_ERR_USAGE, "position 6");
    broken(&f, v->n_blocks, 0u, BATON_ERR_USAGE, "0 blocks");
    broken(&f, f.pages[1].table[0], -1, BATON_ERR_USAGE, "no block");
    broken(&f, f.spans[1].position, INT32_MAX, BATON_ERR_USAGE, "out of range");
    /* Rows 7 and 8 need the second block too. */
    pages_set_end(&f.pages[1], 7);
    f.spans[1].position = 7;
    broken(&f, v->n_blocks, 1u, BATON_ERR_USAGE, "position 8");
    broken(&f, f.pages[1].table[1], -1, BATON_ERR_USAGE, "no block for position 8");
    assert_int_equal(f.n_runs, 0);
    test_ok(submit(&f), &err);
    fixture_close(&f);
}

static void checks_graphs_and_start(void **state)
{
    uint64_t seed = test_seed();
    struct fixture f;
    struct device *d = NULL;
    struct device_program *p = NULL;
    fixture_open(&f, &seed);
    struct device_graph g = {NULL, &f.n_runs, 2, 10, 0, 0};
    test_fails(device_program_open(f.device, &g, &p, &err), BATON_ERR_USAGE, "forward", &err);
    g.forward = forward_nothing;
    g.vocab = 0;
    test_fails(device_program_open(f.device, &g, &p, &err), BATON_ERR_USAGE, "graph", &err);
    assert_null(p);
    test_fails(device_start(f.device, 1, &err), BATON_ERR_USAGE, "started", &err);
    /* A device that was not started refuses work. */
    test_ok(device_open("cpu:ref", &d, &err), &err);
    g.vocab = 10;
    test_ok(device_program_open(d, &g, &p, &err), &err);
    test_fails(device_submit(p, &f.batch, NULL, &err), BATON_ERR_USAGE, "not started", &err);
    test_ok(device_start(d, 0, &err), &err);
    test_ok(device_submit(p, &f.batch, NULL, &err), &err);
    device_program_close(p);
    device_close(d);
    fixture_close(&f);
}

/* Every f16 number against its definition. */
static void widens_f16(void **state)
{
    for (uint32_t h = 0; h < 65536; h++) {
        int exponent = (h >> 10) & 31, m = h & 1023;
        float got = device_f16_to_f32((uint16_t)h);
        double want = exponent ? ldexp(1024 + m, exponent - 25) : ldexp(m, -24);
        assert_int_equal(signbit(got) != 0, h >> 15);
        if (exponent == 31 && m)
            assert_true(isnan(got));
        else if (exponent == 31)
            assert_true(isinf(got));
        else
            assert_true(fabsf(got) == want);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lists_the_reference_once),
        cmocka_unit_test(opens_by_name),
        cmocka_unit_test(refuses_names),
        cmocka_unit_test(checks_tensors),
        cmocka_unit_test(checks_rows),
        cmocka_unit_test(checks_views),
        cmocka_unit_test(checks_graphs_and_start),
        cmocka_unit_test(widens_f16),
    };
    return cmocka_run_group_tests_name("device registry", tests, NULL, NULL);
}
