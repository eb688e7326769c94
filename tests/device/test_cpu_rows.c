/* SPDX-License-Identifier: Apache-2.0 */
/* cpu: row invariance. A whole small model of random shape, one global and one local layer: the
 * logits of every row and every byte of the cache are equal bit by bit whether the rows come
 * alone, in chunks of 7, 64, 128 or whole, with 1 or 2 threads, beside other lanes or not, in
 * other pages. */
#include "cpu_pages.h"

#define VOCAB 83u
#define LAYERS 2u
#define MAX_ROWS 300u

static const char *isa; /* under test: the argument of the program */

struct shape {
    uint32_t hidden, inner, kv_heads, group, head_dim, window;
    enum device_act act;
};

struct layer {
    struct rig_weight n1, n2, nq, wq, wk, wv, wo, gate, up, down, bias;
};

/* One device with the model bound to it. */
struct model {
    struct rig t;
    struct shape s;
    struct rig_weight table, norm;
    struct layer layers[LAYERS];
    struct device_rope rope[LAYERS];
};

/* ---- the model ---------------------------------------------------------------------------- */

static struct shape random_shape(uint64_t *seed)
{
    static const uint32_t dims[] = {8, 16, 24, 64, 80};
    struct shape s = {.hidden = test_range(seed, 5, 130),
                      .inner = test_range(seed, 5, 600),
                      .kv_heads = test_range(seed, 1, 2),
                      .group = test_range(seed, 1, 3),
                      .head_dim = dims[test_range(seed, 0, 4)],
                      .window = test_range(seed, 1, 140),
                      .act = test_range(seed, 0, 1) ? DEVICE_SILU : DEVICE_GELU_TANH};
    return s;
}

static void bind_layer(struct model *m, struct layer *l)
{
    const struct shape *s = &m->s;
    uint32_t q = s->kv_heads * s->group * s->head_dim, kv = s->kv_heads * s->head_dim;
    l->n1 = rig_weight(&m->t, 0, s->hidden, DEVICE_VECTOR);
    l->n2 = rig_weight(&m->t, 0, s->hidden, DEVICE_VECTOR);
    l->nq = rig_weight(&m->t, 0, s->head_dim, DEVICE_VECTOR);
    l->bias = rig_weight(&m->t, 0, q, DEVICE_VECTOR);
    l->wq = rig_weight(&m->t, q, s->hidden, DEVICE_MATRIX);
    l->wk = rig_weight(&m->t, kv, s->hidden, DEVICE_MATRIX);
    l->wv = rig_weight(&m->t, kv, s->hidden, DEVICE_MATRIX);
    l->wo = rig_weight(&m->t, s->hidden, q, DEVICE_MATRIX);
    l->gate = rig_weight(&m->t, s->inner, s->hidden, DEVICE_MATRIX);
    l->up = rig_weight(&m->t, s->inner, s->hidden, DEVICE_MATRIX);
    l->down = rig_weight(&m->t, s->hidden, s->inner, DEVICE_MATRIX);
}

static void model_open(struct model *m, const char *device, uint64_t seed, struct shape s,
                       unsigned n_threads)
{
    memset(m, 0, sizeof *m);
    m->s = s;
    m->t.seed = seed;
    rig_open(&m->t, device, n_threads, LAYERS, VOCAB);
    m->table = rig_weight(&m->t, VOCAB, s.hidden, DEVICE_TABLE | DEVICE_MATRIX);
    m->norm = rig_weight(&m->t, 0, s.hidden, DEVICE_VECTOR);
    for (uint32_t i = 0; i < LAYERS; i++) {
        bind_layer(m, &m->layers[i]);
        m->rope[i].head_dim = s.head_dim;
        for (uint32_t n = 0; n < s.head_dim / 2; n++)
            m->rope[i].inv_freq[n] = powf(100.0f * (float)(i + 1), -(float)n / 8.0f);
    }
}

static void model_close(struct model *m)
{
    rig_weight_free(&m->t, &m->table);
    rig_weight_free(&m->t, &m->norm);
    for (uint32_t i = 0; i < LAYERS; i++) {
        struct rig_weight *w = &m->layers[i].n1;
        for (size_t n = 0; n < sizeof m->layers[i] / sizeof *w; n++)
            rig_weight_free(&m->t, &w[n]);
    }
    rig_close(&m->t);
}

static void forward(struct rig *t, const struct device_verbs *v, struct device_run *r)
{
    struct model *m = t->arg;
    const struct shape *s = &m->s;
    uint32_t heads = s->kv_heads * s->group, kv = s->kv_heads * s->head_dim;
    struct device_array x = v->array(r, s->hidden), n = v->array(r, s->hidden);
    struct device_array q = v->array(r, heads * s->head_dim), o = v->array(r, q.cols);
    struct device_array k = v->array(r, kv), val = v->array(r, kv), d = v->array(r, s->hidden);
    struct device_array g = v->array(r, s->inner), u = v->array(r, s->inner);
    v->embed(r, x, m->table.w, 1.25f);
    for (uint32_t i = 0; i < LAYERS; i++) {
        struct layer *l = &m->layers[i];
        struct device_attn a = {i, heads, s->kv_heads, s->head_dim, 0.3f, i ? s->window : 0};
        v->norm(r, n, x, l->n1.w, 1e-5f, 1.0f);
        v->linear(r, q, n, l->wq.w, l->bias.w);
        v->linear(r, k, n, l->wk.w, NULL);
        v->linear(r, val, n, l->wv.w, NULL);
        v->head_norm(r, q, heads, l->nq.w, 1e-5f, 0.0f);
        v->rope(r, q, heads, &m->rope[i]);
        v->rope(r, k, s->kv_heads, &m->rope[i]);
        v->kv_append(r, i, k, val);
        v->attend(r, o, q, &a);
        v->linear(r, d, o, l->wo.w, NULL);
        v->add(r, x, d);
        v->norm(r, n, x, l->n2.w, 1e-5f, 0.0f);
        v->linear(r, g, n, l->gate.w, NULL);
        v->linear(r, u, n, l->up.w, NULL);
        v->gate(r, g, g, u, s->act);
        v->linear(r, d, g, l->down.w, NULL);
        v->add(r, x, d);
        v->layer_done(r, i);
    }
    struct device_array y = v->select(r, x);
    v->norm(r, y, y, m->norm.w, 1e-5f, 0.0f);
    v->logits(r, y, m->table.w);
}

/* ---- sequences ---------------------------------------------------------------------------- */

/* Tokens, and what the device made of them. */
struct sequence {
    struct pages pages;
    int32_t ids[MAX_ROWS];
    uint32_t n, done;
    float *logits; /* [n, VOCAB] */
};

static void sequence_open(struct sequence *q, struct model *m, uint64_t *seed, const int32_t *ids,
                          uint32_t n)
{
    q->n = n;
    q->done = 0;
    memcpy(q->ids, ids, n * sizeof *ids);
    q->logits = malloc((size_t)n * VOCAB * sizeof(float));
    assert_non_null(q->logits);
    memset(q->logits, 0xFF, (size_t)n * VOCAB * sizeof(float));
    cpu_pages_open(&q->pages, seed, LAYERS, m->s.kv_heads, m->s.head_dim, n);
}

static void sequence_close(struct sequence *q)
{
    pages_close(&q->pages);
    free(q->logits);
}

static void count_layers(void *ctx, uint32_t layer)
{
    uint32_t *n = ctx;
    assert_int_equal(layer, *n);
    (*n)++;
}

/* The next rows[i] tokens of each sequence, in one batch. */
static void step(struct model *m, struct sequence **q, const uint32_t *rows, uint32_t n_spans)
{
    struct baton_span spans[8];
    int32_t ids[512];
    uint32_t logit_rows[512], n = 0, layers = 0;
    for (uint32_t i = 0; i < n_spans; i++) {
        pages_set_end(&q[i]->pages, q[i]->done);
        spans[i] = (struct baton_span){n, rows[i], q[i]->done, i, q[i]->pages.views};
        memcpy(ids + n, q[i]->ids + q[i]->done, rows[i] * sizeof *ids);
        n += rows[i];
    }
    float *logits = malloc((size_t)n * VOCAB * sizeof(float));
    assert_non_null(logits);
    for (uint32_t i = 0; i < n; i++)
        logit_rows[i] = i;
    struct baton_batch b = {0,          ids, n,      spans,        n_spans,
                            logit_rows, n,   logits, count_layers, &layers};
    test_ok(rig_run(&m->t, forward, m, &b), &m->t.error);
    assert_int_equal(layers, LAYERS);
    for (uint32_t i = 0; i < n_spans; i++) {
        memcpy(q[i]->logits + (size_t)q[i]->done * VOCAB, logits + (size_t)spans[i].row * VOCAB,
               (size_t)rows[i] * VOCAB * sizeof(float));
        q[i]->done += rows[i];
    }
    free(logits);
}

static void run_in_chunks(struct model *m, struct sequence *q, uint32_t chunk)
{
    while (q->done < q->n) {
        uint32_t rows = q->n - q->done < chunk ? q->n - q->done : chunk;
        step(m, &q, &rows, 1);
    }
}

static void same(const struct sequence *a, const struct sequence *b, const char *what, uint32_t arg)
{
    for (uint32_t i = 0; i < a->n; i++)
        if (memcmp(a->logits + (size_t)i * VOCAB, b->logits + (size_t)i * VOCAB, VOCAB * 4))
            fail_msg("logits of row %u of %u differ: %s %u", i, a->n, what, arg);
    const struct baton_kv_layout *l = &a->pages.layout;
    for (uint32_t p = 0; p < a->n; p++)
        for (uint32_t i = 0; i < 2 * LAYERS * l->kv_heads; i++) {
            uint32_t layer = i / 2 / l->kv_heads, head = i / 2 % l->kv_heads;
            if (memcmp(pages_at(&a->pages, layer, (int)(i & 1), p, head, 0),
                       pages_at(&b->pages, layer, (int)(i & 1), p, head, 0), 2u * l->head_dim))
                fail_msg("cache of layer %u, position %u differs: %s %u", layer, p, what, arg);
        }
    for (size_t i = 0; i < (size_t)a->n * VOCAB; i++)
        assert_true(isfinite(a->logits[i]));
}

/* Two or more sequences side by side, each at its own pace. */
static void run_mixed(struct model *m, struct sequence **q, uint32_t n, uint64_t *seed)
{
    for (;;) {
        struct sequence *now[8];
        uint32_t rows[8], spans = 0;
        for (uint32_t i = 0; i < n; i++)
            if (q[i]->done < q[i]->n && test_range(seed, 0, 3)) {
                uint32_t left = q[i]->n - q[i]->done, most = test_range(seed, 0, 1) ? 1 : 60;
                rows[spans] = test_range(seed, 1, left < most ? left : most);
                now[spans++] = q[i];
            }
        if (spans)
            step(m, now, rows, spans);
        uint32_t done = 0;
        for (uint32_t i = 0; i < n; i++)
            done += q[i]->done == q[i]->n;
        if (done == n)
            return;
    }
}

static void open_round(uint64_t *seed, const char *name, struct model m[2], int32_t *ids)
{
    struct shape s = random_shape(seed);
    uint64_t weights = test_random(seed) | 1;
    for (unsigned i = 0; i < 2; i++)
        model_open(&m[i], name, weights, s, i + 1);
    for (uint32_t i = 0; i < MAX_ROWS; i++)
        ids[i] = (int32_t)test_range(seed, 0, VOCAB - 1);
}

static void chunks_and_threads(void **state)
{
    static const uint32_t chunks[] = {1, 7, 64, 128, 512};
    const char *name = cpu_isa_device(isa);
    uint64_t seed = test_seed();
    if (!name)
        skip();
    for (int round = 0; round < 4; round++) {
        struct model m[2];
        int32_t ids[MAX_ROWS];
        struct sequence whole, other;
        open_round(&seed, name, m, ids);
        uint32_t n = test_range(&seed, 129, MAX_ROWS);
        sequence_open(&whole, &m[0], &seed, ids, n);
        run_in_chunks(&m[0], &whole, 512);
        for (unsigned t = 0; t < 2; t++)
            for (unsigned c = 0; c < sizeof chunks / sizeof *chunks; c++) {
                sequence_open(&other, &m[t], &seed, ids, n);
                run_in_chunks(&m[t], &other, chunks[c]);
                same(&whole, &other, t ? "2 threads, chunk" : "1 thread, chunk", chunks[c]);
                sequence_close(&other);
            }
        sequence_close(&whole);
        model_close(&m[0]);
        model_close(&m[1]);
    }
}

static void lanes_and_neighbours(void **state)
{
    const char *name = cpu_isa_device(isa);
    uint64_t seed = test_seed();
    if (!name)
        skip();
    for (int round = 0; round < 4; round++) {
        struct model m[2];
        int32_t ids[MAX_ROWS];
        struct sequence alone[5], beside[5], *list[5];
        uint32_t n = test_range(&seed, 2, 5);
        open_round(&seed, name, m, ids);
        for (uint32_t i = 0; i < n; i++) {
            uint32_t from = test_range(&seed, 0, 100), length = test_range(&seed, 1, 150);
            sequence_open(&alone[i], &m[0], &seed, ids + from, length);
            sequence_open(&beside[i], &m[1], &seed, ids + from, length);
            run_in_chunks(&m[0], &alone[i], 512);
            list[i] = &beside[i];
        }
        run_mixed(&m[1], list, n, &seed);
        for (uint32_t i = 0; i < n; i++) {
            same(&alone[i], &beside[i], "lane", i);
            sequence_close(&alone[i]);
            sequence_close(&beside[i]);
        }
        model_close(&m[0]);
        model_close(&m[1]);
    }
}

/* A long past: decode splits it into segments, prefill walks them. */
static void decode_equals_prefill_at_length(void **state)
{
    const char *name = cpu_isa_device(isa);
    uint64_t seed = test_seed();
    if (!name)
        skip();
    struct shape s = {24, 40, 1, 2, 16, 700, DEVICE_SILU};
    struct model m[2];
    struct sequence *q[2];
    const uint32_t n = 1400;
    uint64_t weights = test_random(&seed) | 1;
    int32_t ids[MAX_ROWS] = {0};
    for (unsigned i = 0; i < 2; i++) {
        model_open(&m[i], name, weights, s, i + 1);
        q[i] = calloc(1, sizeof *q[i]);
        assert_non_null(q[i]);
    }
    for (uint32_t i = 0; i < MAX_ROWS; i++)
        ids[i] = (int32_t)test_range(&seed, 0, VOCAB - 1);
    for (unsigned i = 0; i < 2; i++) { /* the same 300 tokens again and again */
        sequence_open(q[i], &m[i], &seed, ids, MAX_ROWS);
        pages_close(&q[i]->pages);
        cpu_pages_open(&q[i]->pages, &seed, LAYERS, 1, 16, n);
    }
    for (uint32_t at = 0; at + MAX_ROWS <= n; at += MAX_ROWS)
        for (unsigned i = 0; i < 2; i++) {
            uint32_t chunk = i ? (at + 2 * MAX_ROWS > n ? 1 : 100) : MAX_ROWS, done = 0;
            for (; done < MAX_ROWS; done += chunk) {
                struct baton_span span = {0, chunk, at + done, 0, q[i]->pages.views};
                uint32_t rows[MAX_ROWS];
                for (uint32_t r = 0; r < chunk; r++)
                    rows[r] = r;
                pages_set_end(&q[i]->pages, at + done);
                struct baton_batch b = {
                    0,    ids + done, chunk, &span,
                    1,    rows,       chunk, q[i]->logits + (size_t)done * VOCAB,
                    NULL, NULL};
                test_ok(rig_run(&m[i].t, forward, &m[i], &b), &m[i].t.error);
            }
        }
    same(q[0], q[1], "positions from", n / MAX_ROWS * MAX_ROWS - MAX_ROWS);
    for (unsigned i = 0; i < 2; i++) {
        sequence_close(q[i]);
        free(q[i]);
        model_close(&m[i]);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_and_threads),
        cmocka_unit_test(lanes_and_neighbours),
        cmocka_unit_test(decode_equals_prefill_at_length),
    };
    isa = argc > 1 ? argv[1] : "scalar";
    return cmocka_run_group_tests_name(isa, tests, NULL, NULL);
}
