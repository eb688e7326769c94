/* SPDX-License-Identifier: Apache-2.0 */
/* cpu:ref's cache verbs on shuffled pages of random layout, window edges, several spans, and row
 * invariance of a whole small model. Everything that a query may not see is NaN. */
#include "rig.h"

#define LAYERS 2u
#define MAX_SPANS 4u
#define VOCAB 29u

/* Some sequences, each with pages of its own, and one batch that appends to all of them. */
struct scene {
    struct rig rig;
    uint32_t kv_heads, q_heads, head_dim, n_rows, n_spans;
    struct pages pages[MAX_SPANS];
    struct baton_span spans[MAX_SPANS];
    struct baton_batch batch;
    int32_t ids[256];
    struct device_array q, k, v, o;
    struct device_attn attn;
};

static uint32_t first_seen(uint32_t position, uint32_t window)
{
    return window == 0 || position + 1 < window ? 0 : position + 1 - window;
}

/* Store a random old entry, through the device's rounding where pages are bf16. */
static void put_old(struct scene *s, const struct pages *p, int which, uint32_t position,
                    uint32_t head, uint32_t d)
{
    float x = test_normal(&s->rig.seed);
    uint16_t half = device_f32_to_bf16(x);
    uint8_t *at = pages_at(p, 1, which, position, head, d);
    if (p->layout.dtype == BATON_F32)
        memcpy(at, &x, 4);
    else
        memcpy(at, &half, 2);
}

/* Add a span of n rows from `position` on, with its visible past in layer 1. */
static void add_span(struct scene *s, uint32_t dtype, uint32_t position, uint32_t n)
{
    struct pages *p = &s->pages[s->n_spans];
    uint32_t block = test_range(&s->rig.seed, 1, 9);
    uint32_t first = first_seen(position, s->attn.window);
    pages_open(p, &s->rig.seed, dtype, LAYERS, s->kv_heads, s->head_dim, block, position + n);
    pages_set_end(p, position);
    for (uint32_t i = first; i < position; i++)
        for (uint32_t j = 0; j < 2 * s->kv_heads * s->head_dim; j++)
            put_old(s, p, (int)(j & 1), i, (j >> 1) / s->head_dim, (j >> 1) % s->head_dim);
    p->views[1].first = first;
    for (uint32_t b = 0; b < first / block; b++)
        p->table[b] = -1; /* blocks wholly out of the window are not held */
    s->spans[s->n_spans] = (struct baton_span){s->n_rows, n, position, s->n_spans, p->views};
    s->n_rows += n;
    s->n_spans++;
}

static void scene_open(struct scene *s, const char *device, uint32_t window)
{
    memset(s, 0, sizeof *s);
    s->rig.seed = test_seed();
    s->kv_heads = test_range(&s->rig.seed, 1, 3);
    s->q_heads = s->kv_heads * test_range(&s->rig.seed, 1, 3);
    s->head_dim = test_range(&s->rig.seed, 1, 19);
    s->attn = (struct device_attn){1, s->q_heads, s->kv_heads, s->head_dim, 0.7f, window};
    rig_open(&s->rig, device, test_range(&s->rig.seed, 1, 3), LAYERS, VOCAB);
}

static void scene_close(struct scene *s)
{
    for (uint32_t i = 0; i < s->n_spans; i++)
        pages_close(&s->pages[i]);
    rig_close(&s->rig);
}

static void body_append_attend(struct rig *t, const struct device_verbs *v, struct device_run *r)
{
    struct scene *s = t->arg;
    v->kv_append(r, 1, s->k, s->v);
    v->attend(r, s->o, s->q, &s->attn);
}

static int scene_run(struct scene *s)
{
    s->q = rig_random(&s->rig, s->n_rows, s->q_heads * s->head_dim);
    s->k = rig_random(&s->rig, s->n_rows, s->kv_heads * s->head_dim);
    s->v = rig_random(&s->rig, s->n_rows, s->kv_heads * s->head_dim);
    s->o = rig_array(s->n_rows, s->q_heads * s->head_dim);
    s->batch = (struct baton_batch){
        .ids = s->ids, .n_rows = s->n_rows, .spans = s->spans, .n_spans = s->n_spans};
    return rig_run(&s->rig, body_append_attend, s, &s->batch);
}

static void scene_free_arrays(struct scene *s)
{
    rig_free(s->q);
    rig_free(s->k);
    rig_free(s->v);
    rig_free(s->o);
}

/* Nearest bf16, by its definition: eight significant bits. */
static float nearest_bf16(float x)
{
    int exponent;
    float m = frexpf(x, &exponent);
    return ldexpf(rintf(ldexpf(m, 8)), exponent - 8);
}

static void check_appended(const struct scene *s)
{
    for (uint32_t n = 0; n < s->n_spans; n++) {
        const struct baton_span *span = &s->spans[n];
        for (uint32_t i = 0; i < span->n_rows; i++)
            for (uint32_t j = 0; j < s->kv_heads * s->head_dim; j++)
                for (int which = 0; which < 2; which++) {
                    float x = *rig_at(which ? s->v : s->k, span->row + i, j);
                    float got = pages_get(&s->pages[n], 1, which, span->position + i,
                                          j / s->head_dim, j % s->head_dim);
                    assert_true(got ==
                                (s->pages[n].layout.dtype == BATON_F32 ? x : nearest_bf16(x)));
                }
    }
}

/* One head of one row, newest position first, with a running maximum. */
static void attend_again(const struct scene *s, uint32_t n, uint32_t position, uint32_t head,
                         const float *q, long double *o)
{
    uint32_t kv_head = head * s->kv_heads / s->q_heads;
    long double max = -INFINITY, total = 0;
    memset(o, 0, s->head_dim * sizeof *o);
    for (uint32_t p = position + 1; p-- > first_seen(position, s->attn.window);) {
        long double score = 0;
        for (uint32_t d = s->head_dim; d-- > 0;)
            score += (long double)q[d] * pages_get(&s->pages[n], 1, 0, p, kv_head, d);
        score *= s->attn.scale;
        long double next = fmaxl(max, score), old = expl(max - next), w = expl(score - next);
        total = total * old + w;
        for (uint32_t d = 0; d < s->head_dim; d++)
            o[d] = o[d] * old + w * pages_get(&s->pages[n], 1, 1, p, kv_head, d);
        max = next;
    }
    for (uint32_t d = 0; d < s->head_dim; d++)
        o[d] /= total;
}

static void check_attended(const struct scene *s)
{
    long double want[64];
    for (uint32_t n = 0; n < s->n_spans; n++)
        for (uint32_t i = 0; i < s->spans[n].n_rows; i++)
            for (uint32_t h = 0; h < s->q_heads; h++) {
                uint32_t row = s->spans[n].row + i, at = h * s->head_dim;
                attend_again(s, n, s->spans[n].position + i, h, rig_at(s->q, row, at), want);
                for (uint32_t d = 0; d < s->head_dim; d++)
                    rig_near(*rig_at(s->o, row, at + d), (double)want[d],
                             6.1e-8 * fabs((double)want[d]) + 1e-12);
            }
}

/* Layer 0 and everything outside the stored positions of layer 1 keep their poison. */
static void check_untouched(struct scene *s)
{
    for (uint32_t n = 0; n < s->n_spans; n++) {
        struct pages *p = &s->pages[n];
        uint32_t first = p->views[1].first;
        size_t element = p->layout.dtype == BATON_F32 ? 4 : 2;
        for (uint32_t i = first; i < s->spans[n].position + s->spans[n].n_rows; i++)
            for (uint32_t j = 0; j < 2 * s->kv_heads * s->head_dim; j++)
                memset(
                    pages_at(p, 1, (int)(j & 1), i, (j >> 1) / s->head_dim, (j >> 1) % s->head_dim),
                    0xFF, element);
        for (size_t i = 0; i < p->bytes; i++)
            assert_int_equal(p->memory[i], 0xFF);
    }
}

static void scene_check(struct scene *s)
{
    test_ok(scene_run(s), &s->rig.error);
    check_appended(s);
    check_attended(s);
    check_untouched(s);
    scene_free_arrays(s);
}

static void several_spans(uint32_t dtype, const char *device, uint32_t window)
{
    struct scene s;
    scene_open(&s, device, window);
    for (uint32_t i = test_range(&s.rig.seed, 2, MAX_SPANS); i > 0; i--)
        add_span(&s, dtype, test_range(&s.rig.seed, 0, 40), test_range(&s.rig.seed, 1, 12));
    scene_check(&s);
    scene_close(&s);
}

static void attends_globally(void **state)
{
    several_spans(BATON_F32, "cpu:ref", 0);
}

static void attends_in_a_window(void **state)
{
    for (uint32_t window = 1; window < 20; window += 3)
        several_spans(BATON_F32, "cpu:ref", window);
}

static void attends_over_bf16_pages(void **state)
{
    several_spans(BATON_BF16, "cpu:ref,kv-dtype=bf16", 0);
    several_spans(BATON_BF16, "cpu:ref,kv-dtype=bf16", 7);
}

/* One row at W-2 ... W+1 after a prompt, and a chunk that ends there: n = W-1, W, W+1, W+2. */
static void attends_at_window_edges(void **state)
{
    for (uint32_t window = 1; window <= 9; window += 4)
        for (uint32_t position = window < 2 ? 0 : window - 2; position <= window + 1; position++)
            for (uint32_t n = 1; n <= position + 1; n += window) {
                struct scene s;
                scene_open(&s, "cpu:ref", window);
                add_span(&s, BATON_F32, position + 1 - n, n);
                scene_check(&s);
                scene_close(&s);
            }
}

static void refuses_missing_positions(void **state)
{
    struct scene s;
    scene_open(&s, "cpu:ref", 5);
    add_span(&s, BATON_F32, 20, 2);
    s.pages[0].views[1].first = 17; /* the query at 20 sees 16 ... 20 */
    test_fails(scene_run(&s), BATON_ERR_USAGE, "position 16", &s.rig.error);
    scene_free_arrays(&s);
    s.pages[0].views[1].first = 16;
    s.pages[0].table[16 / s.pages[0].layout.block] = -1;
    if (16 / s.pages[0].layout.block != 20 / s.pages[0].layout.block) {
        test_fails(scene_run(&s), BATON_ERR_USAGE, "position 16", &s.rig.error);
        scene_free_arrays(&s);
    }
    scene_close(&s);
}

static void refuses_other_geometry(void **state)
{
    struct scene s;
    scene_open(&s, "cpu:ref", 0);
    add_span(&s, BATON_F32, 0, 3);
    s.kv_heads++;
    test_fails(scene_run(&s), BATON_ERR_MISMATCH, "kv_append: layer 1", &s.rig.error);
    scene_free_arrays(&s);
    s.kv_heads--;
    s.attn.layer = LAYERS;
    test_fails(scene_run(&s), BATON_ERR_INTERNAL, "attend: layer 2", &s.rig.error);
    scene_free_arrays(&s);
    s.attn = (struct device_attn){1, s.q_heads, 0, s.head_dim, 1, 0};
    test_fails(scene_run(&s), BATON_ERR_INTERNAL, "key heads", &s.rig.error);
    scene_free_arrays(&s);
    scene_close(&s);
}

/* ---- row invariance ----------------------------------------------------------------------- */

#define HIDDEN 23u
#define DIM 6u
#define Q_HEADS 4u
#define KV_HEADS 2u

/* A small model with every verb in it; layer 1 is local. */
struct toy {
    struct rig_weight embed, norm, q, k, v, o, head, gate, up, down, bias;
    struct device_rope rope;
    uint32_t next_layer; /* layer_done comes in order */
};

static void toy_layer(struct toy *m, uint32_t layer, const struct device_verbs *v,
                      struct device_run *r, struct device_array x)
{
    struct device_array h = v->array(r, HIDDEN), q = v->array(r, Q_HEADS * DIM);
    struct device_array k = v->array(r, KV_HEADS * DIM), w = v->array(r, KV_HEADS * DIM);
    struct device_array o = v->array(r, Q_HEADS * DIM), g = v->array(r, 31), u = v->array(r, 31);
    struct device_attn a = {layer, Q_HEADS, KV_HEADS, DIM, 0.4f, layer ? 7 : 0};
    v->norm(r, h, x, m->norm.w, 1e-6f, 1);
    v->linear(r, q, h, m->q.w, NULL);
    v->linear(r, k, h, m->k.w, m->bias.w);
    v->linear(r, w, h, m->v.w, NULL);
    v->head_norm(r, q, Q_HEADS, m->head.w, 1e-6f, 1);
    v->rope(r, q, Q_HEADS, &m->rope);
    v->rope(r, k, KV_HEADS, &m->rope);
    v->kv_append(r, layer, k, w);
    v->layer_done(r, layer);
    v->attend(r, o, q, &a);
    v->linear(r, h, o, m->o.w, NULL);
    v->add(r, x, h);
    v->linear(r, g, x, m->gate.w, NULL);
    v->linear(r, u, x, m->up.w, NULL);
    v->gate(r, g, g, u, layer ? DEVICE_SILU : DEVICE_GELU_TANH);
    v->linear(r, h, g, m->down.w, NULL);
    v->add(r, x, h);
}

static void body_toy(struct rig *t, const struct device_verbs *v, struct device_run *r)
{
    struct toy *m = t->arg;
    struct device_array x = v->array(r, HIDDEN);
    v->embed(r, x, m->embed.w, 2.0f);
    for (uint32_t l = 0; l < LAYERS; l++)
        toy_layer(m, l, v, r, x);
    v->logits(r, v->select(r, x), m->embed.w);
}

static void toy_open(struct toy *m, struct rig *t)
{
    memset(m, 0, sizeof *m);
    m->embed = rig_weight(t, VOCAB, HIDDEN, DEVICE_MATRIX | DEVICE_TABLE);
    m->norm = rig_weight(t, 0, HIDDEN, DEVICE_VECTOR);
    m->head = rig_weight(t, 0, DIM, DEVICE_VECTOR);
    m->bias = rig_weight(t, 0, KV_HEADS * DIM, DEVICE_VECTOR);
    m->q = rig_weight(t, Q_HEADS * DIM, HIDDEN, DEVICE_MATRIX);
    m->k = rig_weight(t, KV_HEADS * DIM, HIDDEN, DEVICE_MATRIX);
    m->v = rig_weight(t, KV_HEADS * DIM, HIDDEN, DEVICE_MATRIX);
    m->o = rig_weight(t, HIDDEN, Q_HEADS * DIM, DEVICE_MATRIX);
    m->gate = rig_weight(t, 31, HIDDEN, DEVICE_MATRIX);
    m->up = rig_weight(t, 31, HIDDEN, DEVICE_MATRIX);
    m->down = rig_weight(t, HIDDEN, 31, DEVICE_MATRIX);
    m->rope.head_dim = DIM;
    for (uint32_t i = 0; i < DIM / 2; i++)
        m->rope.inv_freq[i] = (float)pow(100, -(double)i / 3);
}

static void toy_close(struct toy *m, struct rig *t)
{
    struct rig_weight *all[] = {&m->embed, &m->norm, &m->q,  &m->k,    &m->v,   &m->o,
                                &m->head,  &m->gate, &m->up, &m->down, &m->bias};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        rig_weight_free(t, all[i]);
}

static void toy_layer_done(void *ctx, uint32_t layer)
{
    struct toy *m = ctx;
    assert_int_equal(layer, m->next_layer);
    m->next_layer = (layer + 1) % LAYERS;
}

static void toy_batch(struct rig *t, struct toy *m, struct baton_batch *b)
{
    b->layer_done = toy_layer_done;
    b->ctx = m;
    m->next_layer = 0;
    test_ok(rig_run(t, body_toy, m, b), &t->error);
    assert_int_equal(m->next_layer, 0);
}

/* A sequence in pages of its own, run in chunks of at most `most` rows; logits of all rows. Beside
 * it in every batch runs another sequence when `neighbour` is set. */
static struct device_array toy_run(struct rig *t, struct toy *m, const int32_t *ids, uint32_t n,
                                   uint32_t most, bool neighbour, struct pages *pages)
{
    struct device_array logits = rig_array(n, VOCAB);
    struct pages beside;
    uint32_t rows[256];
    pages_open(pages, &t->seed, BATON_F32, LAYERS, KV_HEADS, DIM, 8, n);
    for (uint32_t at = 0; at < n;) {
        uint32_t count = test_range(&t->seed, 1, most), skip = neighbour ? 3 : 0;
        count = most >= n ? n : count > n - at ? n - at : count;
        int32_t batch_ids[256] = {1, 2, 3};
        memcpy(batch_ids + skip, ids + at, count * sizeof *ids);
        pages_open(&beside, &t->seed, BATON_F32, LAYERS, KV_HEADS, DIM, 5, 3);
        pages_set_end(pages, at);
        struct baton_span spans[2] = {{0, 3, 0, 5, beside.views},
                                      {skip, count, at, 2, pages->views}};
        for (uint32_t i = 0; i < count; i++)
            rows[i] = skip + i;
        struct baton_batch b = {
            0,    batch_ids, skip + count,         spans + !neighbour, 1 + neighbour,
            rows, count,     rig_at(logits, at, 0)};
        toy_batch(t, m, &b);
        pages_close(&beside);
        at += count;
    }
    pages_set_end(pages, n);
    return logits;
}

static void assert_same_pages(const struct pages *a, const struct pages *b, uint32_t n)
{
    for (uint32_t l = 0; l < LAYERS; l++)
        for (uint32_t i = 0; i < n * KV_HEADS * DIM * 2; i++) {
            uint32_t j = i >> 1, p = j / (KV_HEADS * DIM), h = j / DIM % KV_HEADS, d = j % DIM;
            float x = pages_get(a, l, (int)(i & 1), p, h, d);
            assert_true(x == pages_get(b, l, (int)(i & 1), p, h, d)); /* false for NaN */
        }
}

static void rows_do_not_depend_on_company(void **state)
{
    uint64_t seed = test_seed();
    uint32_t n = test_range(&seed, 17, 80);
    int32_t ids[80];
    struct device_array want = {0};
    struct pages want_pages = {0};
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)test_range(&seed, 0, VOCAB - 1);
    for (unsigned threads = 1; threads <= 3; threads++) {
        struct rig t = {.seed = 12345}; /* the same weights each time */
        struct toy m;
        rig_open(&t, "cpu:ref", threads, LAYERS, VOCAB);
        toy_open(&m, &t);
        t.seed = seed;
        for (unsigned way = 0; way < 6; way++) {
            struct pages pages;
            struct device_array got = toy_run(&t, &m, ids, n,
                                              way / 2 == 0   ? n
                                              : way / 2 == 1 ? 1
                                                             : 9,
                                              way % 2, &pages);
            pages_check_poison(&pages, n);
            if (want.data) {
                assert_memory_equal(got.data, want.data, (size_t)n * VOCAB * sizeof(float));
                assert_same_pages(&pages, &want_pages, n);
                rig_free(got);
                pages_close(&pages);
            } else {
                want = got;
                want_pages = pages;
            }
        }
        toy_close(&m, &t);
        rig_close(&t);
    }
    for (size_t i = 0; i < (size_t)n * VOCAB; i++)
        assert_true(isfinite(((float *)want.data)[i]));
    rig_free(want);
    pages_close(&want_pages);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attends_globally),
        cmocka_unit_test(attends_in_a_window),
        cmocka_unit_test(attends_over_bf16_pages),
        cmocka_unit_test(attends_at_window_edges),
        cmocka_unit_test(refuses_missing_positions),
        cmocka_unit_test(refuses_other_geometry),
        cmocka_unit_test(rows_do_not_depend_on_company),
    };
    return cmocka_run_group_tests_name("device ref kv", tests, NULL, NULL);
}
