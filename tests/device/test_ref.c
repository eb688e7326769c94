/* SPDX-License-Identifier: Apache-2.0 */
/* cpu:ref verb by verb against formulas written here a second time, in long double and in another
 * order, on odd shapes. */
#include "rig.h"

#define VOCAB 37u

/* A batch of n rows in one span at position 0 with pages of one layer: enough for verbs that do not
 * touch the cache. */
struct rows {
    struct rig rig;
    struct pages pages;
    struct baton_span span;
    struct baton_batch batch;
    int32_t ids[64];
    uint32_t logit_rows[64];
    uint32_t n;
};

static void rows_open(struct rows *s)
{
    memset(s, 0, sizeof *s);
    s->rig.seed = test_seed();
    s->n = test_range(&s->rig.seed, 1, 33);
    rig_open(&s->rig, "cpu:ref", test_range(&s->rig.seed, 1, 3), 1, VOCAB);
    pages_open(&s->pages, &s->rig.seed, BATON_F32, 1, 1, 2, 8, s->n);
    for (uint32_t i = 0; i < s->n; i++)
        s->ids[i] = (int32_t)test_range(&s->rig.seed, 0, VOCAB - 1);
    s->span = (struct baton_span){0, s->n, 0, 0, s->pages.views};
    s->batch = (struct baton_batch){.ids = s->ids, .n_rows = s->n, .spans = &s->span, .n_spans = 1};
}

static void rows_close(struct rows *s)
{
    rig_close(&s->rig);
    pages_close(&s->pages);
}

static void rows_run(struct rows *s, rig_body body, void *arg)
{
    test_ok(rig_run(&s->rig, body, arg, &s->batch), &s->rig.error);
}

/* Arguments of the verb under test: bodies pick what they need. */
struct operands {
    struct device_array x, y, z;
    struct device_weight *w, *b;
    struct device_rope rope;
    uint32_t heads;
    float scale, eps, offset;
    enum device_act act;
};

/* ---- embed, select, arrays ---------------------------------------------------------------- */

static void body_embed(struct rig *t, const struct device_verbs *v, struct device_run *r)
{
    struct operands *a = t->arg;
    v->embed(r, a->y, a->w, a->scale);
}

static void embeds(void **state)
{
    struct rows s;
    rows_open(&s);
    uint32_t cols = test_range(&s.rig.seed, 1, 70);
    struct rig_weight w = rig_weight(&s.rig, VOCAB, cols, DEVICE_TABLE);
    struct operands a = {.y = rig_array(s.n, cols), .w = w.w, .scale = 11.313708f};
    rows_run(&s, body_embed, &a);
    for (uint32_t i = 0; i < s.n; i++)
        for (uint32_t j = 0; j < cols; j++)
            assert_true(*rig_at(a.y, i, j) == w.values[(uint32_t)s.ids[i] * cols + j] * 11.313708f);
    rig_free(a.y);
    rig_weight_free(&s.rig, &w);
    rows_close(&s);
}

static void body_select(struct rig *t, const struct device_verbs *v, struct device_run *r)
{
    struct operands *a = t->arg;
    struct device_array fresh = v->array(r, 5);
    assert_int_equal(fresh.rows, r->batch->n_rows);
    assert_int_equal(fresh.cols, 5);
    assert_true(isnan(*rig_at(fresh, fresh.rows - 1, 4)));
    struct device_array y = v->select(r, a->x);
    assert_int_equal(y.rows, r->batch->n_logits);
    assert_int_equal(y.cols, a->x.cols);
    for (uint32_t i = 0; i < y.rows; i++)
        assert_memory_equal(rig_at(y, i, 0), rig_at(a->x, r->batch->logit_rows[i], 0),
                            y.cols * sizeof(float));
    if (a->w)
        v->logits(r, y, a->w);
}

static void selects_and_writes_logits(void **state)
{
    struct rows s;
    rows_open(&s);
    uint32_t cols = test_range(&s.rig.seed, 1, 70);
    struct rig_weight w = rig_weight(&s.rig, VOCAB, cols, DEVICE_MATRIX | DEVICE_TABLE);
    struct operands a = {.x = rig_random(&s.rig, s.n, cols)};
    rows_run(&s, body_select, &a); /* no row's logits wanted */
    a.w = w.w;
    rows_run(&s, body_select, &a);
    for (uint32_t i = 0; i < s.n; i++)
        if (test_range(&s.rig.seed, 0, 1))
            s.logit_rows[s.batch.n_logits++] = i;
    struct device_array logits = rig_array(s.batch.n_logits, VOCAB);
    s.batch.logit_rows = s.logit_rows;
    s.batch.logits = logits.data;
    rows_run(&s, body_select, &a);
    for (uint32_t i = 0; i < logits.rows; i++)
        for (uint32_t j = 0; j < VOCAB; j++) {
            long double want = 0, size = 0;
            for (uint32_t k = cols; k-- > 0;) {
                long double p = (long double)*rig_at(a.x, s.logit_rows[i], k) *
                                w.values[j * cols + k];
                want += p;
                size += fabsl(p);
            }
            rig_near(*rig_at(logits, i, j), (double)want,
                     6e-8 * fabs((double)want) + 1e-14 * (double)size);
        }
    rig_free(logits);
    rig_free(a.x);
    rig_weight_free(&s.rig, &w);
    rows_close(&s);
}

/* ---- norms -------------------------------------------------------------------------------- */

static void body_norm(struct rig *t, const struct device_verbs *v, struct device_run *r)
{
    struct operands *a = t->arg;
    if (a->heads)
        v->head_norm(r, a->y, a->heads, a->w, a->eps, a->offset);
    else
        v->norm(r, a->y, a->x, a->w, a->eps, a->offset);
}

/* y holds the norm of each group of `n` columns of x. */
static void check_norm(struct device_array y, struct device_array x, uint32_t n,
                       const struct rig_weight *w, double eps, double offset)
{
    for (uint32_t i = 0; i < x.rows; i++)
        for (uint32_t first = 0; first < x.cols; first += n) {
            long double square = 0;
            for (uint32_t j = n; j-- > 0;)
                square += powl(*rig_at(x, i, first + j), 2);
            for (uint32_t j = 0; j < n; j++) {
                long double want = *rig_at(x, i, first + j) / sqrtl(square / n + eps) *
                                   (offset + w->values[j]);
                rig_near(*rig_at(y, i, first + j), (double)want,
                         6.1e-8 * fabs((double)want) + 1e-30);
            }
        }
}

static void normalises(void **state)
{
    struct rows s;
    rows_open(&s);
    uint32_t cols = test_range(&s.rig.seed, 1, 90);
    struct rig_weight w = rig_weight(&s.rig, 0, cols, DEVICE_VECTOR);
    struct operands a = {.w = w.w, .eps = 1e-6f, .offset = 1.0f};
    a.x = rig_random(&s.rig, s.n, cols);
    a.y = rig_array(s.n, cols);
    rows_run(&s, body_norm, &a);
    check_norm(a.y, a.x, cols, &w, a.eps, 1);
    a.offset = 0; /* and in place, and with an eps that matters */
    a.eps = 0.5f;
    memcpy(a.y.data, a.x.data, (size_t)s.n * cols * sizeof(float));
    struct device_array x = a.x;
    a.x = a.y;
    rows_run(&s, body_norm, &a);
    check_norm(a.y, x, cols, &w, 0.5, 0);
    rig_free(x);
    rig_free(a.y);
    rig_weight_free(&s.rig, &w);
    rows_close(&s);
}

static void normalises_heads(void **state)
{
    struct rows s;
    rows_open(&s);
    uint32_t dim = test_range(&s.rig.seed, 1, 40);
    struct operands a = {.eps = 1e-5f, .offset = 1.0f, .heads = test_range(&s.rig.seed, 1, 5)};
    struct rig_weight w = rig_weight(&s.rig, 0, dim, DEVICE_VECTOR);
    struct device_array x = rig_random(&s.rig, s.n, dim * a.heads);
    a.w = w.w;
    a.y = rig_array(s.n, dim * a.heads);
    memcpy(a.y.data, x.data, (size_t)s.n * x.cols * sizeof(float));
    rows_run(&s, body_norm, &a);
    check_norm(a.y, x, dim, &w, a.eps, 1);
    rig_free(x);
    rig_free(a.y);
    rig_weight_free(&s.rig, &w);
    rows_close(&s);
}

/* ---- linear ------------------------------------------------------------------------------- */

static void body_linear(struct rig *t, const struct device_verbs *v, struct device_run *r)
{
    struct operands *a = t->arg;
    v->linear(r, a->y, a->x, a->w, a->b);
}

static void multiplies(void **state)
{
    struct rows s;
    rows_open(&s);
    for (int round = 0; round < 8; round++) {
        uint32_t k = test_range(&s.rig.seed, 1, 300), m = test_range(&s.rig.seed, 1, 70);
        struct rig_weight w = rig_weight(&s.rig, m, k, DEVICE_MATRIX);
        struct rig_weight b = rig_weight(&s.rig, 0, m, DEVICE_VECTOR);
        struct operands a = {.x = rig_random(&s.rig, s.n, k), .y = rig_array(s.n, m), .w = w.w};
        a.b = round % 2 ? b.w : NULL;
        rows_run(&s, body_linear, &a);
        for (uint32_t i = 0; i < s.n; i++)
            for (uint32_t j = 0; j < m; j++) {
                long double want = round % 2 ? b.values[j] : 0, size = fabsl(want);
                for (uint32_t c = k; c-- > 0;) {
                    long double p = (long double)*rig_at(a.x, i, c) * w.values[j * k + c];
                    want += p;
                    size += fabsl(p);
                }
                rig_near(*rig_at(a.y, i, j), (double)want,
                         6.1e-8 * fabs((double)want) + 1e-14 * (double)size);
            }
        rig_free(a.x);
        rig_free(a.y);
        rig_weight_free(&s.rig, &w);
        rig_weight_free(&s.rig, &b);
    }
    rows_close(&s);
}

/* ---- rope, add, gate ---------------------------------------------------------------------- */

static void body_rope(struct rig *t, const struct device_verbs *v, struct device_run *r)
{
    struct operands *a = t->arg;
    v->rope(r, a->y, a->heads, &a->rope);
}

/* Rotation as multiplication of complex numbers; rows of two spans at far positions. */
static void rotates(void **state)
{
    struct rows s;
    rows_open(&s);
    uint32_t half = test_range(&s.rig.seed, 1, 40);
    uint32_t first = test_range(&s.rig.seed, 0, 100000);
    struct operands a = {.heads = test_range(&s.rig.seed, 1, 4)};
    struct pages far;
    a.rope.head_dim = 2 * half;
    for (uint32_t i = 0; i < half; i++)
        a.rope.inv_freq[i] = (float)pow(10000.0, -(double)i / half);
    pages_open(&far, &s.rig.seed, BATON_F32, 1, 1, 2, 4096, first + s.n);
    pages_set_end(&far, first);
    s.span = (struct baton_span){0, s.n, first, 0, far.views};
    struct device_array x = rig_random(&s.rig, s.n, 2 * half * a.heads);
    a.y = rig_array(s.n, x.cols);
    memcpy(a.y.data, x.data, (size_t)s.n * x.cols * sizeof(float));
    rows_run(&s, body_rope, &a);
    for (uint32_t i = 0; i < s.n; i++)
        for (uint32_t j = 0; j < half * a.heads; j++) {
            uint32_t at = j / half * 2 * half + j % half;
            float angle = (float)(first + i) * a.rope.inv_freq[j % half];
            double re = *rig_at(x, i, at), im = *rig_at(x, i, at + half);
            double length = hypot(re, im), turn = atan2(im, re) + angle;
            rig_near(*rig_at(a.y, i, at), length * cos(turn), 3e-7 * length);
            rig_near(*rig_at(a.y, i, at + half), length * sin(turn), 3e-7 * length);
        }
    rig_free(x);
    rig_free(a.y);
    pages_close(&far);
    rows_close(&s);
}

static void body_add_gate(struct rig *t, const struct device_verbs *v, struct device_run *r)
{
    struct operands *a = t->arg;
    if (a->act)
        v->gate(r, a->y, a->x, a->z, a->act);
    else
        v->add(r, a->x, a->z);
}

/* silu(x) = x (1 + tanh(x/2)) / 2; the tanh form of GELU is x sigmoid(2 sqrt(2/pi) (...)). */
static long double activation(long double x, enum device_act act)
{
    if (act == DEVICE_SILU)
        return x * (1 + tanhl(x / 2)) / 2;
    return x / (1 + expl(-2 * sqrtl(2 / acosl(-1)) * (x + 0.044715L * x * x * x)));
}

static void gates_and_adds(void **state)
{
    struct rows s;
    rows_open(&s);
    uint32_t cols = test_range(&s.rig.seed, 1, 90);
    struct operands a = {.x = rig_random(&s.rig, s.n, cols), .y = rig_array(s.n, cols)};
    a.z = rig_random(&s.rig, s.n, cols);
    for (size_t i = 0; i < (size_t)s.n * cols; i++)
        ((float *)a.x.data)[i] *= 4;
    for (a.act = DEVICE_SILU; a.act <= DEVICE_GELU_TANH; a.act++) {
        rows_run(&s, body_add_gate, &a);
        for (size_t i = 0; i < (size_t)s.n * cols; i++) {
            double x = ((float *)a.x.data)[i], up = ((float *)a.z.data)[i];
            double want = (double)(activation(x, a.act) * up);
            /* 1 + tanh cancels where x is far below zero */
            rig_near(((float *)a.y.data)[i], want, 6.1e-8 * fabs(want) + 1e-14 * fabs(x * up));
        }
    }
    a.act = 0;
    memcpy(a.y.data, a.x.data, (size_t)s.n * cols * sizeof(float));
    rows_run(&s, body_add_gate, &a);
    for (size_t i = 0; i < (size_t)s.n * cols; i++)
        assert_true(((float *)a.x.data)[i] == ((float *)a.y.data)[i] + ((float *)a.z.data)[i]);
    a.act = DEVICE_SILU; /* y may be gate */
    struct device_array x = a.y;
    a.y = a.x;
    memcpy(x.data, a.x.data, (size_t)s.n * cols * sizeof(float));
    rows_run(&s, body_add_gate, &a);
    rig_near(*rig_at(a.y, 0, 0),
             (double)(activation(*rig_at(x, 0, 0), DEVICE_SILU) * *rig_at(a.z, 0, 0)), 1e-6);
    rig_free(x);
    rig_free(a.x);
    rig_free(a.z);
    rows_close(&s);
}

/* ---- errors ------------------------------------------------------------------------------- */

static void body_errors(struct rig *t, const struct device_verbs *v, struct device_run *r)
{
    struct operands *a = t->arg;
    v->linear(r, a->y, a->x, a->w, NULL);      /* y has a column too many */
    v->add(r, (struct device_array){0}, a->y); /* another error: the first one stays */
    v->add(r, a->y, a->y);                     /* right by itself, and not done any more */
    v->layer_done(r, 0);
}

static void must_not_be_called(void *ctx, uint32_t layer)
{
    fail_msg("layer %u done after an error", layer);
}

static void keeps_the_first_error(void **state)
{
    struct rows s;
    rows_open(&s);
    struct rig_weight w = rig_weight(&s.rig, 4, 3, DEVICE_MATRIX);
    struct operands a = {.x = rig_random(&s.rig, s.n, 3), .y = rig_array(s.n, 5), .w = w.w};
    s.batch.layer_done = must_not_be_called;
    for (size_t i = 0; i < (size_t)s.n * 5; i++)
        ((float *)a.y.data)[i] = 1;
    test_fails(rig_run(&s.rig, body_errors, &a, &s.batch), BATON_ERR_INTERNAL,
               "test.weight is [4, 3]", &s.rig.error);
    for (size_t i = 0; i < (size_t)s.n * 5; i++)
        assert_true(((float *)a.y.data)[i] == 1);
    rig_free(a.x);
    rig_free(a.y);
    rig_weight_free(&s.rig, &w);
    rows_close(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(embeds),         cmocka_unit_test(selects_and_writes_logits),
        cmocka_unit_test(normalises),     cmocka_unit_test(normalises_heads),
        cmocka_unit_test(multiplies),     cmocka_unit_test(rotates),
        cmocka_unit_test(gates_and_adds), cmocka_unit_test(keeps_the_first_error),
    };
    return cmocka_run_group_tests_name("device ref", tests, NULL, NULL);
}
