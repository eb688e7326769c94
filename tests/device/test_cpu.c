/* SPDX-License-Identifier: Apache-2.0 */
/* cpu: every verb on every instruction set of this machine against double arithmetic, on random
 * shapes, odd ones among them. Outputs start as NaN between guard bytes; pages start as NaN. */
#include "cpu_pages.h"

#define VOCAB 301u
#define POSITION 77u

static const char *isa; /* under test: the argument of the program */

static const char *open_isa(struct rig *t)
{
    memset(t, 0, sizeof *t);
    t->seed = test_seed();
    const char *name = cpu_isa_device(isa);
    if (!name)
        skip();
    rig_open(t, name, test_range(&t->seed, 1, 2), 1, VOCAB);
    return name;
}

/* ---- a batch of plain rows ---------------------------------------------------------------- */

struct rows {
    struct pages pages;
    struct baton_span span;
    struct baton_batch batch;
    int32_t ids[512];
    uint32_t logit_rows[512];
};

static void rows_open(struct rig *t, struct rows *b, uint32_t n_rows)
{
    memset(b, 0, sizeof *b);
    cpu_pages_open(&b->pages, &t->seed, 1, 1, 8, POSITION + n_rows);
    pages_set_end(&b->pages, POSITION);
    b->span = (struct baton_span){0, n_rows, POSITION, 0, b->pages.views};
    for (uint32_t i = 0; i < n_rows; i++)
        b->ids[i] = (int32_t)test_range(&t->seed, 0, VOCAB - 1);
    b->batch = (struct baton_batch){.ids = b->ids,
                                    .n_rows = n_rows,
                                    .spans = &b->span,
                                    .n_spans = 1,
                                    .logit_rows = b->logit_rows};
}

/* Mostly small, sometimes past the border between gemv and gemm and past a row block. */
static uint32_t random_rows(struct rig *t)
{
    static const uint32_t most[] = {1, 2, 9, 40, 300};
    return test_range(&t->seed, 1, most[test_range(&t->seed, 0, 4)]);
}

/* ---- linear and logits -------------------------------------------------------------------- */

struct linear_case {
    struct rows rows;
    struct device_array x, y;
    struct rig_weight w, b;
    bool bias;
};

static double linear_want(const struct linear_case *c, uint32_t i, uint32_t j, double *size)
{
    double sum = 0;
    *size = 0;
    for (uint32_t k = 0; k < c->x.cols; k++) {
        float x = *rig_at(c->x, i, k), w = cpu_bf16(c->w.values[(size_t)j * c->x.cols + k]);
        double term = (double)(cpu_isa_narrow(isa) ? cpu_bf16(x) : x) * w;
        sum += term;
        *size += fabs(term);
    }
    return sum;
}

static void linear_body(struct rig *t, const struct device_verbs *v, struct device_run *r)
{
    struct linear_case *c = t->arg;
    v->linear(r, c->y, c->x, c->w.w, c->bias ? c->b.w : NULL);
}

static void linear_once(struct rig *t, uint32_t n_rows, uint32_t k, uint32_t n)
{
    struct linear_case c = {.bias = test_range(&t->seed, 0, 1)};
    rows_open(t, &c.rows, n_rows);
    c.x = rig_random(t, n_rows, k);
    c.y = rig_array(n_rows, n);
    c.w = rig_weight(t, n, k, DEVICE_MATRIX);
    c.b = rig_weight(t, 0, n, DEVICE_VECTOR);
    test_ok(rig_run(t, linear_body, &c, &c.rows.batch), &t->error);
    for (uint32_t i = 0; i < n_rows; i++)
        for (uint32_t j = 0; j < n; j++) {
            double size, want = linear_want(&c, i, j, &size) + (c.bias ? c.b.values[j] : 0);
            rig_near(*rig_at(c.y, i, j), want, 2e-6 * (size + 1));
        }
    rig_free(c.x);
    rig_free(c.y);
    rig_weight_free(t, &c.w);
    rig_weight_free(t, &c.b);
    pages_close(&c.rows.pages);
}

static void linear_is_a_product(void **state)
{
    struct rig t;
    open_isa(&t);
    linear_once(&t, 1, 1, 1);
    linear_once(&t, 1, 1024, 80);
    linear_once(&t, 7, 513, 33);
    linear_once(&t, 8, 256, 1003);
    linear_once(&t, 300, 300, 49);
    linear_once(&t, 27, 1300, 33); /* k in several blocks, and a last tile of few rows */
    for (int i = 0; i < 24; i++) {
        uint32_t k = test_range(&t.seed, 1, 700), n = test_range(&t.seed, 1, 150);
        linear_once(&t, random_rows(&t), k, n);
    }
    rig_close(&t);
}

/* All 1 to 8 rows: each has registers of its own in gemv. */
static void linear_of_few_rows(void **state)
{
    struct rig t;
    open_isa(&t);
    for (uint32_t rows = 1; rows <= 17; rows++)
        linear_once(&t, rows, test_range(&t.seed, 1, 99), test_range(&t.seed, 1, 230));
    rig_close(&t);
}

struct logits_case {
    struct linear_case l;
    struct device_array all, out;
};

static void logits_body(struct rig *t, const struct device_verbs *v, struct device_run *r)
{
    struct logits_case *c = t->arg;
    struct device_array e = v->array(r, c->all.cols);
    v->embed(r, e, c->l.w.w, 1.5f);
    memcpy(c->all.data, e.data, (size_t)e.rows * e.cols * sizeof(float));
    v->logits(r, v->select(r, e), c->l.w.w);
}

/* A tied table: embedded rows are read from it and multiplied with it. */
static void logits_of_selected_rows(void **state)
{
    struct rig t;
    open_isa(&t);
    for (int round = 0; round < 6; round++) {
        uint32_t k = test_range(&t.seed, 1, 150), n_rows = random_rows(&t), n = 0;
        struct logits_case c = {.l.bias = false};
        rows_open(&t, &c.l.rows, n_rows);
        for (uint32_t i = 0; i < n_rows; i++)
            if (test_range(&t.seed, 0, 2) == 0)
                c.l.rows.logit_rows[n++] = i;
        c.l.w = rig_weight(&t, VOCAB, k, DEVICE_MATRIX | DEVICE_TABLE);
        assert_true(device_weight_bytes(c.l.w.w) < 2ull * (VOCAB + 16) * (k + 2));
        c.all = rig_array(n_rows, k);
        c.out = rig_array(n, VOCAB);
        c.l.x = rig_array(n, k);
        c.l.rows.batch.n_logits = n;
        c.l.rows.batch.logits = c.out.data;
        test_ok(rig_run(&t, logits_body, &c, &c.l.rows.batch), &t.error);
        for (uint32_t i = 0; i < n_rows; i++)
            for (uint32_t j = 0; j < k; j++)
                assert_true(*rig_at(c.all, i, j) ==
                            cpu_bf16(c.l.w.values[c.l.rows.ids[i] * k + j]) * 1.5f);
        for (uint32_t i = 0; i < n; i++) {
            memcpy(rig_at(c.l.x, i, 0), rig_at(c.all, c.l.rows.logit_rows[i], 0), k * 4);
            for (uint32_t j = 0; j < VOCAB; j++) {
                double size, want = linear_want(&c.l, i, j, &size);
                rig_near(*rig_at(c.out, i, j), want, 2e-6 * (size + 1));
            }
        }
        rig_free(c.all);
        rig_free(c.out);
        rig_free(c.l.x);
        rig_weight_free(&t, &c.l.w);
        pages_close(&c.l.rows.pages);
    }
    rig_close(&t);
}

/* ---- row verbs ---------------------------------------------------------------------------- */

struct row_case {
    struct rows rows;
    struct device_array x, y, z, start;
    struct rig_weight w, table;
    uint32_t heads, head_dim;
    float eps, offset;
    enum device_act act;
    struct device_rope rope;
};

static void row_case_open(struct rig *t, struct row_case *c)
{
    memset(c, 0, sizeof *c);
    c->heads = test_range(&t->seed, 1, 5);
    c->head_dim = 2 * test_range(&t->seed, 1, 70);
    uint32_t n_rows = random_rows(t), cols = c->heads * c->head_dim;
    rows_open(t, &c->rows, n_rows);
    c->x = rig_random(t, n_rows, cols);
    c->z = rig_random(t, n_rows, cols);
    c->start = rig_array(n_rows, cols);
    c->y = rig_array(n_rows, cols);
    memcpy(c->start.data, c->x.data, (size_t)n_rows * cols * sizeof(float));
    c->eps = 1e-3f;
    c->offset = (float)test_range(&t->seed, 0, 1);
}

static void row_case_close(struct rig *t, struct row_case *c)
{
    rig_free(c->x);
    rig_free(c->y);
    rig_free(c->z);
    rig_free(c->start);
    pages_close(&c->rows.pages);
}

/* RMSNorm of columns [at, at + n) of row i in double. */
static void norm_near(const struct row_case *c, struct device_array got, uint32_t i, uint32_t at,
                      uint32_t n)
{
    double sum = 0;
    for (uint32_t j = 0; j < n; j++)
        sum += (double)*rig_at(c->start, i, at + j) * *rig_at(c->start, i, at + j);
    for (uint32_t j = 0; j < n; j++) {
        double want = *rig_at(c->start, i, at + j) / sqrt(sum / n + c->eps) *
                      ((double)c->offset + c->w.values[j]);
        rig_near(*rig_at(got, i, at + j), want, 1e-6 * (fabs(want) + 0.1));
    }
}

static void norm_body(struct rig *t, const struct device_verbs *v, struct device_run *r)
{
    struct row_case *c = t->arg;
    v->norm(r, c->y, c->x, c->w.w, c->eps, c->offset);
    v->head_norm(r, c->x, c->heads, c->table.w, c->eps, c->offset);
}

static void norms_match(void **state)
{
    struct rig t;
    open_isa(&t);
    for (int round = 0; round < 12; round++) {
        struct row_case c;
        row_case_open(&t, &c);
        c.w = rig_weight(&t, 0, c.x.cols, DEVICE_VECTOR);
        c.table = rig_weight(&t, 0, c.head_dim, DEVICE_VECTOR);
        test_ok(rig_run(&t, norm_body, &c, &c.rows.batch), &t.error);
        for (uint32_t i = 0; i < c.x.rows; i++)
            norm_near(&c, c.y, i, 0, c.x.cols);
        rig_weight_free(&t, &c.w);
        c.w = c.table;
        for (uint32_t i = 0; i < c.x.rows; i++)
            for (uint32_t h = 0; h < c.heads; h++)
                norm_near(&c, c.x, i, h * c.head_dim, c.head_dim);
        rig_weight_free(&t, &c.table);
        row_case_close(&t, &c);
    }
    rig_close(&t);
}

static void rope_body(struct rig *t, const struct device_verbs *v, struct device_run *r)
{
    struct row_case *c = t->arg;
    struct device_rope other = c->rope;
    v->rope(r, c->x, c->heads, &c->rope);
    for (int i = 0; i < 6; i++) { /* more kinds than there are tables */
        other.inv_freq[0] = 0.5f + (float)i;
        v->rope(r, c->z, c->heads, &other);
    }
    v->rope(r, c->y, c->heads, &c->rope); /* the first once more */
}

static void rope_matches(void **state)
{
    struct rig t;
    open_isa(&t);
    for (int round = 0; round < 8; round++) {
        struct row_case c;
        row_case_open(&t, &c);
        uint32_t half = c.head_dim / 2;
        c.rope.head_dim = c.head_dim;
        for (uint32_t i = 0; i < half; i++)
            c.rope.inv_freq[i] = (float)pow(10000.0, -(double)i / half);
        memcpy(c.y.data, c.x.data, (size_t)c.x.rows * c.x.cols * sizeof(float));
        test_ok(rig_run(&t, rope_body, &c, &c.rows.batch), &t.error);
        for (uint32_t i = 0; i < c.x.rows; i++)
            for (uint32_t j = 0; j < c.x.cols; j++) {
                uint32_t d = j % c.head_dim, n = d % half;
                float angle = (float)(POSITION + i) * c.rope.inv_freq[n];
                double a = *rig_at(c.start, i, j);
                double b = *rig_at(c.start, i, d < half ? j + half : j - half);
                double want = a * cos(angle) + (d < half ? -b : b) * sin(angle);
                rig_near(*rig_at(c.x, i, j), want, 1e-6 * (fabs(a) + fabs(b)));
                assert_true(*rig_at(c.x, i, j) == *rig_at(c.y, i, j));
            }
        row_case_close(&t, &c);
    }
    rig_close(&t);
}

static void gate_body(struct rig *t, const struct device_verbs *v, struct device_run *r)
{
    struct row_case *c = t->arg;
    v->gate(r, c->y, c->x, c->z, c->act);
    v->gate(r, c->x, c->x, c->z, c->act); /* in place */
    v->add(r, c->z, c->start);
}

static void gate_and_add_match(void **state)
{
    struct rig t;
    open_isa(&t);
    for (int round = 0; round < 12; round++) {
        struct row_case c;
        row_case_open(&t, &c);
        c.act = round & 1 ? DEVICE_SILU : DEVICE_GELU_TANH;
        float wide = round & 2 ? 40.0f : 1.0f; /* both ends of the exponential */
        for (size_t i = 0; i < (size_t)c.x.rows * c.x.cols; i++)
            ((float *)c.x.data)[i] *= wide, ((float *)c.start.data)[i] *= wide;
        struct device_array up = rig_array(c.x.rows, c.x.cols);
        memcpy(up.data, c.z.data, (size_t)c.x.rows * c.x.cols * sizeof(float));
        test_ok(rig_run(&t, gate_body, &c, &c.rows.batch), &t.error);
        for (uint32_t i = 0; i < c.x.rows; i++)
            for (uint32_t j = 0; j < c.x.cols; j++) {
                double x = *rig_at(c.start, i, j), u = *rig_at(up, i, j);
                double cubic = 0.79788456080286536 * (x + 0.044715 * x * x * x);
                double a = c.act == DEVICE_SILU ? x / (1 + exp(-x)) : x / (1 + exp(-2 * cubic));
                /* exp(e) loses |e| units of its argument's last place */
                double e = c.act == DEVICE_SILU ? x : 2 * cubic;
                rig_near(*rig_at(c.y, i, j), a * u, 5e-7 * (4 + fabs(e)) * fabs(a * u) + 1e-20);
                assert_true(*rig_at(c.x, i, j) == *rig_at(c.y, i, j));
                assert_true(*rig_at(c.z, i, j) == (float)u + (float)x);
            }
        rig_free(up);
        row_case_close(&t, &c);
    }
    rig_close(&t);
}

/* ---- the cache ---------------------------------------------------------------------------- */

#define SPANS 3u

struct scene {
    struct rig *t;
    struct device_attn attn;
    struct device_array q, k, v, o;
    struct pages pages[SPANS];
    struct baton_span spans[SPANS];
    struct baton_batch batch;
    int32_t ids[512];
    double tolerance;
};

static uint32_t first_seen(uint32_t position, uint32_t window)
{
    return window && position >= window ? position - window + 1 : 0;
}

/* Old entries of a span: those that its first row sees, and nothing else. */
static void put_past(struct scene *s, struct pages *p, uint32_t position)
{
    uint32_t first = first_seen(position, s->attn.window);
    p->views[0].first = first;
    pages_set_end(p, position);
    for (uint32_t i = first; i < position; i++)
        for (uint32_t n = 0; n < 2 * s->attn.kv_heads * s->attn.head_dim; n++) {
            uint16_t h = device_f32_to_bf16(test_normal(&s->t->seed));
            memcpy(pages_at(p, 0, (int)(n & 1), i, (n >> 1) / s->attn.head_dim,
                            (n >> 1) % s->attn.head_dim),
                   &h, 2);
        }
    for (uint32_t b = 0; b < first / 64; b++)
        p->table[b] = -1;
}

static void scene_open(struct rig *t, struct scene *s, uint32_t head_dim, uint32_t kv_heads,
                       uint32_t group, uint32_t window)
{
    memset(s, 0, sizeof *s);
    s->t = t;
    s->attn = (struct device_attn){0, kv_heads * group, kv_heads, head_dim, 0.11f, window};
    s->tolerance = cpu_isa_narrow(isa) ? 3e-2 : 1e-5;
}

static void scene_add(struct scene *s, uint32_t position, uint32_t n)
{
    uint32_t i = s->batch.n_spans++;
    cpu_pages_open(&s->pages[i], &s->t->seed, 1, s->attn.kv_heads, s->attn.head_dim, position + n);
    put_past(s, &s->pages[i], position);
    s->spans[i] = (struct baton_span){s->batch.n_rows, n, position, i, s->pages[i].views};
    s->batch.n_rows += n;
}

static void scene_body(struct rig *t, const struct device_verbs *v, struct device_run *r)
{
    struct scene *s = t->arg;
    v->kv_append(r, 0, s->k, s->v);
    v->attend(r, s->o, s->q, &s->attn);
}

/* One head of one row in double. */
static void attend_near(const struct scene *s, const struct baton_span *span, uint32_t i,
                        uint32_t head)
{
    const struct pages *p = &s->pages[span - s->spans];
    uint32_t position = span->position + i, first = first_seen(position, s->attn.window);
    uint32_t n = position - first + 1, dim = s->attn.head_dim;
    uint32_t kv_head = head / (s->attn.q_heads / s->attn.kv_heads);
    double *w = malloc(n * sizeof *w), top = -INFINITY, sum = 0;
    for (uint32_t j = 0; j < n; j++) {
        w[j] = 0;
        for (uint32_t d = 0; d < dim; d++)
            w[j] += (double)*rig_at(s->q, span->row + i, head * dim + d) *
                    pages_get(p, 0, 0, first + j, kv_head, d);
        w[j] *= s->attn.scale;
        top = w[j] > top ? w[j] : top;
    }
    for (uint32_t j = 0; j < n; j++)
        sum += w[j] = exp(w[j] - top);
    for (uint32_t d = 0; d < dim; d++) {
        double want = 0, size = 0;
        for (uint32_t j = 0; j < n; j++) {
            double term = w[j] / sum * pages_get(p, 0, 1, first + j, kv_head, d);
            want += term;
            size += fabs(term);
        }
        rig_near(*rig_at(s->o, span->row + i, head * dim + d), want, s->tolerance * (size + 0.01));
    }
    free(w);
}

static void scene_run(struct scene *s)
{
    uint32_t n = s->batch.n_rows, kv_cols = s->attn.kv_heads * s->attn.head_dim;
    s->batch.ids = s->ids;
    s->batch.spans = s->spans;
    s->q = rig_random(s->t, n, s->attn.q_heads * s->attn.head_dim);
    s->o = rig_array(n, s->attn.q_heads * s->attn.head_dim);
    s->k = rig_random(s->t, n, kv_cols);
    s->v = rig_random(s->t, n, kv_cols);
    test_ok(rig_run(s->t, scene_body, s, &s->batch), &s->t->error);
    for (uint32_t i = 0; i < s->batch.n_spans; i++)
        for (uint32_t r = 0; r < s->spans[i].n_rows; r++) {
            uint32_t row = s->spans[i].row + r;
            for (uint32_t c = 0; c < kv_cols; c++) {
                uint32_t head = c / s->attn.head_dim, d = c % s->attn.head_dim;
                uint32_t p = s->spans[i].position + r;
                assert_true(pages_get(&s->pages[i], 0, 0, p, head, d) ==
                            cpu_bf16(*rig_at(s->k, row, c)));
                assert_true(pages_get(&s->pages[i], 0, 1, p, head, d) ==
                            cpu_bf16(*rig_at(s->v, row, c)));
            }
            for (uint32_t h = 0; h < s->attn.q_heads; h++)
                attend_near(s, &s->spans[i], r, h);
        }
    for (uint32_t i = 0; i < s->batch.n_spans; i++)
        pages_close(&s->pages[i]);
    rig_free(s->q);
    rig_free(s->o);
    rig_free(s->k);
    rig_free(s->v);
}

static void attention_matches(void **state)
{
    static const uint32_t dims[] = {1, 8, 24, 64, 80, 128, 256};
    struct rig t;
    open_isa(&t);
    for (int round = 0; round < 14; round++) {
        struct scene s;
        uint32_t dim = dims[round % 7], group = test_range(&t.seed, 1, 5);
        uint32_t window = test_range(&t.seed, 0, 1) ? test_range(&t.seed, 1, 200) : 0;
        scene_open(&t, &s, dim, test_range(&t.seed, 1, 2), group, window);
        for (uint32_t n = test_range(&t.seed, 1, SPANS); n > 0; n--)
            scene_add(&s, test_range(&t.seed, 0, 300), test_range(&t.seed, 1, dim > 64 ? 30 : 90));
        scene_run(&s);
    }
    rig_close(&t);
}

/* Scores far apart, the largest in the first tile: sums must shrink towards it, never grow. Not
 * where queries are rounded to bf16, which moves such scores by more than one. */
static void wide_scores_match(void **state)
{
    struct rig t;
    open_isa(&t);
    for (int round = 0; round < 6 && !cpu_isa_narrow(isa); round++) {
        struct scene s;
        scene_open(&t, &s, 64, 1, 2, 0);
        s.attn.scale = 4.0f;
        s.tolerance = 1e-3;
        scene_add(&s, test_range(&t.seed, 200, 1200), test_range(&t.seed, 1, 20));
        scene_run(&s);
    }
    rig_close(&t);
}

/* Rows of one block whose windows begin in different segments: some see nothing of the first. */
static void windows_across_segments_match(void **state)
{
    struct rig t;
    open_isa(&t);
    for (int round = 0; round < 6; round++) {
        struct scene s;
        uint32_t window = test_range(&t.seed, 1, 300), rows = test_range(&t.seed, 20, 90);
        scene_open(&t, &s, 16, 1, test_range(&t.seed, 1, 3), window);
        scene_add(&s, 511 + window - test_range(&t.seed, 1, rows - 1), rows);
        scene_run(&s);
    }
    rig_close(&t);
}

/* A decode step at a long context: few items, so that segments are split. */
static void long_contexts_match(void **state)
{
    struct rig t;
    open_isa(&t);
    for (int round = 0; round < 4; round++) {
        struct scene s;
        scene_open(&t, &s, 16, 1, 3, round & 1 ? 600 : 0);
        scene_add(&s, test_range(&t.seed, 1000, 2600), 1);
        if (round & 2)
            scene_add(&s, test_range(&t.seed, 0, 700), 1);
        scene_run(&s);
    }
    rig_close(&t);
}

static void window_edges_match(void **state)
{
    struct rig t;
    open_isa(&t);
    for (uint32_t window = 63; window <= 129; window += 1 + 62 * (window == 65)) {
        for (int edge = -1; edge <= 1; edge++) {
            struct scene s;
            scene_open(&t, &s, 16, 1, 2, window);
            scene_add(&s, (uint32_t)((int)window + edge), 1);
            scene_add(&s, (uint32_t)((int)(2 * window) + edge), 3);
            scene_run(&s);
        }
    }
    rig_close(&t);
}

/* ---- what is refused ---------------------------------------------------------------------- */

static void append_body(struct rig *t, const struct device_verbs *v, struct device_run *r)
{
    struct scene *s = t->arg;
    v->kv_append(r, 0, s->k, s->v);
}

static void refuses_other_pages(void **state)
{
    struct rig t;
    open_isa(&t);
    struct scene s;
    scene_open(&t, &s, 8, 1, 1, 0);
    scene_add(&s, 3, 2);
    s.batch.ids = s.ids;
    s.batch.spans = s.spans;
    s.k = rig_random(&t, 2, 8);
    s.v = rig_random(&t, 2, 8);
    s.pages[0].layout.stride_position += 2;
    test_fails(rig_run(&t, append_body, &s, &s.batch), BATON_ERR_UNSUPPORTED, "pages of 64",
               &t.error);
    s.pages[0].layout.stride_position -= 2;
    test_ok(rig_run(&t, append_body, &s, &s.batch), &t.error);
    rig_free(s.k);
    rig_free(s.v);
    pages_close(&s.pages[0]);
    rig_close(&t);
}

static void refuses_arguments(void **state)
{
    struct device *d = NULL;
    struct baton_error e;
    test_fails(device_open("cpu,isa=sse9", &d, &e), BATON_ERR_USAGE, "avx512bf16", &e);
    test_fails(device_open("cpu,kv-dtype=f32", &d, &e), BATON_ERR_UNSUPPORTED, "cpu:ref", &e);
    test_fails(device_open("cpu,x=1", &d, &e), BATON_ERR_USAGE, "isa", &e);
    test_ok(device_open("cpu,kv-dtype=bf16,isa=scalar", &d, &e), &e);
    assert_true(device_caps(d)->row_invariant && device_caps(d)->kv_dtype == BATON_BF16);
    assert_non_null(strstr(device_caps(d)->detail, "scalar"));
    device_close(d);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linear_is_a_product),
        cmocka_unit_test(linear_of_few_rows),
        cmocka_unit_test(logits_of_selected_rows),
        cmocka_unit_test(norms_match),
        cmocka_unit_test(rope_matches),
        cmocka_unit_test(gate_and_add_match),
        cmocka_unit_test(attention_matches),
        cmocka_unit_test(wide_scores_match),
        cmocka_unit_test(windows_across_segments_match),
        cmocka_unit_test(long_contexts_match),
        cmocka_unit_test(window_edges_match),
        cmocka_unit_test(refuses_other_pages),
        cmocka_unit_test(refuses_arguments),
    };
    isa = argc > 1 ? argv[1] : "scalar";
    return cmocka_run_group_tests_name(isa, tests, NULL, NULL);
}
