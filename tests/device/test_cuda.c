/* SPDX-License-Identifier: Apache-2.0 */
/* cuda against cpu:ref: every verb, in the usual order (joined steps) and in an unusual one (steps
 * by themselves), odd sizes, random weights and tokens, prefill in chunks and decode in lanes.
 * Arrays and pages of the device start as NaN, so that reading what nobody wrote shows.
 *
 * Skipped where there is no card. */
#include "kv/kv.h"
#include "rig.h"

enum { LANES = 4, MAX_LAYERS = 2, MAX_WEIGHTS = 64 };

/* A small model: sizes, and which order its verbs come in. */
struct net {
    uint32_t layers, d, heads, kv_heads, head_dim, inner, vocab, window;
    bool gemma, bias, head_norm, odd;
    enum device_act act;
    struct device_rope rope;
    uint16_t *values[MAX_WEIGHTS]; /* bf16, the same for both devices */
    uint64_t shape[MAX_WEIGHTS][2];
    unsigned kind[MAX_WEIGHTS], n_weights;
};

/* A net on a device, with a cache. */
struct side {
    struct net *net;
    struct device *device;
    struct device_weight *w[MAX_WEIGHTS];
    struct device_program *program;
    struct kv_pool *pool;
    struct kv_seq *seq[LANES];
    float *logits;
};

/* ---- the net ------------------------------------------------------------------------------ */

/* Weights of a layer, in this order from 4 on. */
enum { NORM1, Q, K, V, O, NORM2, GATE, UP, DOWN, QN, KN, BQ, BK, POST1, POST2, PER_LAYER };
enum { EMBED, FINAL, HEAD, SPARE, FIRST };

static unsigned add_weight(struct net *n, uint64_t *seed, uint64_t rows, uint64_t cols,
                           unsigned kind, float mean, float spread)
{
    unsigned i = n->n_weights++;
    assert_true(i < MAX_WEIGHTS);
    n->values[i] = malloc(rows * cols * 2);
    n->shape[i][0] = rows;
    n->shape[i][1] = cols;
    n->kind[i] = kind;
    for (uint64_t k = 0; k < rows * cols; k++)
        n->values[i][k] = device_f32_to_bf16(mean + spread * test_normal(seed));
    return i;
}

static void add_layer(struct net *n, uint64_t *seed)
{
    uint32_t q = n->heads * n->head_dim, kv = n->kv_heads * n->head_dim;
    float one = n->gemma ? 0 : 1, by_d = 1 / sqrtf((float)n->d);
    add_weight(n, seed, 1, n->d, DEVICE_VECTOR, one, 0.1f);
    add_weight(n, seed, q, n->d, DEVICE_MATRIX, 0, by_d);
    add_weight(n, seed, kv, n->d, DEVICE_MATRIX, 0, by_d);
    add_weight(n, seed, kv, n->d, DEVICE_MATRIX, 0, by_d);
    add_weight(n, seed, n->d, q, DEVICE_MATRIX, 0, 1 / sqrtf((float)q));
    add_weight(n, seed, 1, n->d, DEVICE_VECTOR, one, 0.1f);
    add_weight(n, seed, n->inner, n->d, DEVICE_MATRIX, 0, by_d);
    add_weight(n, seed, n->inner, n->d, DEVICE_MATRIX, 0, by_d);
    add_weight(n, seed, n->d, n->inner, DEVICE_MATRIX, 0, 1 / sqrtf((float)n->inner));
    add_weight(n, seed, 1, n->head_dim, DEVICE_VECTOR, one, 0.1f);
    add_weight(n, seed, 1, n->head_dim, DEVICE_VECTOR, one, 0.1f);
    add_weight(n, seed, 1, q, DEVICE_VECTOR, 0, 0.3f);
    add_weight(n, seed, 1, kv, DEVICE_VECTOR, 0, 0.3f);
    add_weight(n, seed, 1, n->d, DEVICE_VECTOR, one, 0.1f);
    add_weight(n, seed, 1, n->d, DEVICE_VECTOR, one, 0.1f);
}

static void net_open(struct net *n, uint64_t *seed, uint32_t head_dim, bool gemma, bool odd)
{
    memset(n, 0, sizeof *n);
    n->layers = MAX_LAYERS;
    n->d = 8 * test_range(seed, 5, 40);
    n->kv_heads = test_range(seed, 1, 3);
    n->heads = n->kv_heads * test_range(seed, 1, 9);
    n->head_dim = head_dim;
    n->inner = 8 * test_range(seed, 5, 60);
    n->vocab = test_range(seed, 300, 1100);
    n->window = test_range(seed, 0, 1) ? test_range(seed, 5, 200) : 0;
    n->gemma = gemma;
    n->bias = test_range(seed, 0, 1);
    n->head_norm = gemma || test_range(seed, 0, 1);
    n->odd = odd;
    n->act = gemma ? DEVICE_GELU_TANH : DEVICE_SILU;
    n->rope.head_dim = head_dim;
    for (uint32_t i = 0; i < head_dim / 2; i++)
        n->rope.inv_freq[i] = powf(10000, -2 * (float)i / (float)head_dim);
    add_weight(n, seed, n->vocab, n->d, DEVICE_TABLE | DEVICE_MATRIX, 0, 1);
    add_weight(n, seed, 1, n->d, DEVICE_VECTOR, gemma ? 0 : 1, 0.1f);
    add_weight(n, seed, n->vocab, n->d, DEVICE_MATRIX, 0, 0.2f);
    add_weight(n, seed, 1, n->d, DEVICE_VECTOR, 1, 0.1f);
    for (uint32_t l = 0; l < n->layers; l++)
        add_layer(n, seed);
    print_message("net: d %u, heads %u/%u of %u, inner %u, vocab %u, window %u,%s%s%s%s\n", n->d,
                  n->heads, n->kv_heads, n->head_dim, n->inner, n->vocab, n->window,
                  gemma ? " four norms" : "", n->bias ? " bias" : "",
                  n->head_norm ? " head norms" : "", odd ? " odd order" : "");
}

static void net_close(struct net *n)
{
    for (unsigned i = 0; i < n->n_weights; i++)
        free(n->values[i]);
}

static int forward(const void *ctx, struct device_run *r, struct baton_error *e)
{
    const struct side *s = ctx;
    const struct net *n = s->net;
    const struct device_verbs *v = device_run_verbs(r);
    uint32_t nq = n->heads * n->head_dim, nkv = n->kv_heads * n->head_dim;
    float eps = 1e-6f, off = n->gemma ? 1 : 0;
    struct device_array x = v->array(r, n->d), h = v->array(r, n->d), y = v->array(r, n->d);
    struct device_array q = v->array(r, nq), k = v->array(r, nkv), val = v->array(r, nkv);
    struct device_array o = v->array(r, nq), gate = v->array(r, n->inner),
                        up = v->array(r, n->inner);
    v->embed(r, x, s->w[EMBED], 0.7f);
    for (uint32_t l = 0; l < n->layers; l++) {
        struct device_weight *const *w = s->w + FIRST + PER_LAYER * l;
        struct device_attn a = {.layer = l,
                                .q_heads = n->heads,
                                .kv_heads = n->kv_heads,
                                .head_dim = n->head_dim,
                                .scale = 1 / sqrtf((float)n->head_dim),
                                .window = l == 0 ? n->window : 0};
        v->norm(r, h, x, w[NORM1], eps, off);
        if (n->odd) { /* keys first, queries from another product, no neighbours to join */
            v->linear(r, k, h, w[K], n->bias ? w[BK] : NULL);
            v->norm(r, h, x, w[NORM1], eps, off);
            v->linear(r, q, h, w[Q], n->bias ? w[BQ] : NULL);
            v->norm(r, h, x, w[NORM1], eps, off);
            v->linear(r, val, h, w[V], NULL);
        } else {
            v->linear(r, q, h, w[Q], n->bias ? w[BQ] : NULL);
            v->linear(r, k, h, w[K], n->bias ? w[BK] : NULL);
            v->linear(r, val, h, w[V], NULL);
        }
        if (n->head_norm) {
            v->head_norm(r, q, n->heads, w[QN], eps, off);
            v->head_norm(r, k, n->kv_heads, w[KN], eps, off);
        }
        v->rope(r, q, n->heads, &n->rope);
        v->rope(r, k, n->kv_heads, &n->rope);
        v->kv_append(r, l, k, val);
        v->layer_done(r, l);
        v->attend(r, o, q, &a);
        v->linear(r, y, o, w[O], NULL);
        if (n->gemma)
            v->norm(r, y, y, w[POST1], eps, off);
        v->add(r, x, y);
        if (n->odd) /* a product straight from the sums */
            v->linear(r, gate, x, w[GATE], NULL);
        v->norm(r, h, x, w[NORM2], eps, off);
        if (!n->odd)
            v->linear(r, gate, h, w[GATE], NULL);
        v->linear(r, up, h, w[UP], NULL);
        v->gate(r, gate, gate, up, n->act);
        v->linear(r, y, gate, w[DOWN], NULL);
        if (n->gemma)
            v->norm(r, y, y, w[POST2], eps, off);
        v->add(r, x, y);
    }
    v->norm(r, h, x, s->w[FINAL], eps, off);
    v->logits(r, v->select(r, h), s->w[HEAD]);
    return device_run_end(r, e);
}

/* ---- sides -------------------------------------------------------------------------------- */

static void side_open(struct side *s, struct net *n, const char *device, uint32_t dtype)
{
    struct baton_error e = {0};
    memset(s, 0, sizeof *s);
    s->net = n;
    test_ok(device_open(device, &s->device, &e), &e);
    test_ok(device_start(s->device, 1, &e), &e);
    for (unsigned i = 0; i < n->n_weights; i++) {
        bool vector = n->kind[i] == DEVICE_VECTOR;
        struct baton_tensor t = {
            .name = "test", .dtype = BATON_BF16, .n_dims = vector ? 1 : 2, .data = n->values[i]};
        t.shape[0] = vector ? n->shape[i][1] : n->shape[i][0];
        t.shape[1] = vector ? 0 : n->shape[i][1];
        t.stride[0] = vector ? 2 : 2 * (int64_t)n->shape[i][1];
        t.stride[1] = vector ? 0 : 2;
        test_ok(device_weight_bind(s->device, &t, n->kind[i], &s->w[i], &e), &e);
    }
    struct device_graph g = {forward, s, n->layers, n->vocab, 1, 1};
    g.scratch_cols = 4 * n->d + (2 * n->heads + 2 * n->kv_heads) * n->head_dim + 2 * n->inner;
    g.max_cols = g.scratch_cols;
    test_ok(device_program_open(s->device, &g, &s->program, &e), &e);
    struct kv_geometry geometry = {n->layers, n->kv_heads, n->head_dim, dtype, n->window, {0}};
    geometry.local[0] = n->window != 0;
    test_ok(kv_pool_open(&s->pool, &geometry, LANES * 1024, LANES, 512, &e), &e);
    memset(kv_pool_memory(s->pool), 0xFF, kv_pool_bytes(s->pool));
    const struct device_kv_pool pool = {kv_pool_memory(s->pool), kv_pool_bytes(s->pool), 1024,
                                        LANES};
    test_ok(device_kv_open(s->device, &pool, &e), &e);
    for (int i = 0; i < LANES; i++)
        test_ok(kv_seq_open(s->pool, &s->seq[i], &e), &e);
    s->logits = malloc((size_t)64 * n->vocab * sizeof(float));
}

static void side_close(struct side *s)
{
    for (int i = 0; i < LANES; i++)
        kv_seq_close(s->seq[i]);
    device_program_close(s->program);
    device_kv_close(s->device);
    kv_pool_close(s->pool);
    for (unsigned i = 0; i < s->net->n_weights; i++)
        device_weight_close(s->device, s->w[i]);
    device_close(s->device);
    free(s->logits);
}

static void count_layer(void *ctx, uint32_t layer)
{
    assert_int_equal(layer, (*(unsigned *)ctx)++);
}

/* n rows of one sequence, or with n = 0 one row of each of `lanes` sequences; logits of the last
 * `wanted` rows. */
static void side_run(struct side *s, const int32_t *ids, uint32_t n, uint32_t first, uint32_t lanes,
                     uint32_t wanted, bool exports)
{
    struct baton_error e = {0};
    struct baton_span spans[LANES];
    uint32_t rows[64], total = n ? n : lanes;
    unsigned layers = 0;
    for (uint32_t i = 0; i < lanes; i++) {
        test_ok(kv_seq_reserve(s->seq[first + i], n ? n : 1, &e), &e);
        spans[i] = (struct baton_span){.row = i,
                                       .n_rows = n ? n : 1,
                                       .lane = i,
                                       .position = kv_seq_length(s->seq[first + i]),
                                       .kv = kv_seq_views(s->seq[first + i])};
    }
    for (uint32_t i = 0; i < wanted; i++)
        rows[i] = total - wanted + i;
    struct baton_batch b = {.ids = ids,
                            .n_rows = total,
                            .spans = spans,
                            .n_spans = lanes,
                            .logit_rows = rows,
                            .n_logits = wanted,
                            .logits = s->logits,
                            .layer_done = exports ? count_layer : NULL,
                            .ctx = &layers};
    uint64_t id;
    memset(s->logits, 0xFF, (size_t)wanted * s->net->vocab * sizeof(float));
    test_ok(device_submit(s->program, &b, &id, &e), &e);
    test_ok(device_wait(s->program, id, UINT64_MAX, &e), &e);
    for (uint32_t i = 0; i < lanes; i++)
        kv_seq_advance(s->seq[first + i], n ? n : 1);
    if (exports)
        assert_int_equal(layers, s->net->layers);
}

static void compare_logits(const struct side *a, const struct side *b, uint32_t rows,
                           const char *what)
{
    for (uint32_t i = 0; i < rows; i++) {
        size_t at = (size_t)i * a->net->vocab;
        double err = test_rel_rms(b->logits + at, a->logits + at, a->net->vocab);
        if (!(err < 2.5e-2))
            fail_msg("%s: logits of row %u: relative RMS %g", what, i, err);
    }
}

static void compare_cache(struct side *ref, struct side *s, uint32_t lane)
{
    const struct net *n = ref->net;
    struct baton_error e = {0};
    uint32_t end = kv_seq_length(s->seq[lane]), first[MAX_LAYERS];
    for (uint32_t l = 0; l < n->layers; l++)
        first[l] = kv_retained_first(kv_pool_geometry(s->pool), l, end);
    memset(kv_pool_memory(s->pool), 0xFF, kv_pool_bytes(s->pool));
    test_ok(device_kv_read(s->device, 0, kv_seq_views(s->seq[lane]), n->layers, first, end, &e),
            &e);
    for (uint32_t l = 0; l < n->layers; l++)
        for (int which = 0; which < 2; which++) {
            uint32_t rows = end - first[l];
            size_t count = (size_t)rows * n->kv_heads * n->head_dim;
            float *a = malloc(count * sizeof *a), *b = malloc(count * sizeof *b);
            struct baton_kv_layout la, lb;
            struct baton_kv_view va = kv_dense_view(&la, BATON_F32, n->kv_heads, n->head_dim, a, a,
                                                    first[l], rows);
            struct baton_kv_view vb = kv_dense_view(&lb, BATON_F32, n->kv_heads, n->head_dim, b, b,
                                                    first[l], rows);
            test_ok(kv_copy(&va, &kv_seq_views(ref->seq[lane])[l], which, first[l], rows, &e), &e);
            test_ok(kv_copy(&vb, &kv_seq_views(s->seq[lane])[l], which, first[l], rows, &e), &e);
            double err = test_rel_rms(b, a, count);
            if (!(err < 2e-2))
                fail_msg("layer %u %c: relative RMS %g", l, which ? 'v' : 'k', err);
            free(a);
            free(b);
        }
}

/* ---- tests -------------------------------------------------------------------------------- */

static bool have_card(void)
{
    struct device *d = NULL;
    struct baton_error e = {0};
    if (device_open("cuda", &d, &e)) {
        print_message("skipped: %s\n", e.text);
        return false;
    }
    device_close(d);
    return true;
}

static int32_t *random_ids(uint64_t *seed, uint32_t n, uint32_t vocab)
{
    int32_t *ids = malloc(n * sizeof *ids);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)test_range(seed, 0, vocab - 1);
    return ids;
}

/* Both sides through the same prompts and steps. */
static void play(struct side *ref, struct side *s, uint64_t *seed)
{
    uint32_t vocab = ref->net->vocab;
    for (uint32_t lane = 0; lane < LANES; lane++)
        for (int chunk = 0; chunk < 2; chunk++) {
            static const uint32_t most[] = {1, 8, 70, 400};
            uint32_t n = test_range(seed, 1, most[test_range(seed, 0, 3)]);
            uint32_t wanted = test_range(seed, 0, n < 20 ? n : 20);
            bool exports = test_range(seed, 0, 1);
            int32_t *ids = random_ids(seed, n, vocab);
            side_run(ref, ids, n, lane, 1, wanted, false);
            side_run(s, ids, n, lane, 1, wanted, exports);
            compare_logits(ref, s, wanted, "prefill");
            free(ids);
        }
    for (int step = 0; step < 6; step++) {
        uint32_t lanes = test_range(seed, 1, LANES), first = test_range(seed, 0, LANES - lanes);
        int32_t *ids = random_ids(seed, lanes, vocab);
        side_run(ref, ids, 0, first, lanes, lanes, false);
        side_run(s, ids, 0, first, lanes, lanes, false);
        compare_logits(ref, s, lanes, "decode");
        free(ids);
    }
    for (uint32_t lane = 0; lane < LANES; lane++)
        compare_cache(ref, s, lane);
}

static void verbs_equal_reference(void **state)
{
    static const uint32_t dims[] = {32, 64, 80, 96, 128, 256};
    uint64_t seed = test_seed();
    (void)state;
    if (!have_card())
        skip();
    for (unsigned i = 0; i < 18; i++) {
        struct net n;
        struct side ref, s;
        net_open(&n, &seed, dims[i % 6], i / 6 == 1, i / 6 == 2);
        side_open(&ref, &n, "cpu:ref", BATON_F32);
        side_open(&s, &n, "cuda", BATON_BF16);
        play(&ref, &s, &seed);
        side_close(&s);
        side_close(&ref);
        net_close(&n);
    }
}

/* The same request alone, and beside others in every lane: the same bits. */
static void lanes_have_the_same_bits(void **state)
{
    uint64_t seed = test_seed();
    struct net n;
    struct side s;
    (void)state;
    if (!have_card())
        skip();
    net_open(&n, &seed, 128, false, false);
    side_open(&s, &n, "cuda", BATON_BF16);
    uint32_t length = test_range(&seed, 100, 480);
    int32_t *ids = random_ids(&seed, length, n.vocab);
    for (uint32_t lane = 0; lane < LANES; lane++)
        side_run(&s, ids, length, lane, 1, 0, false);
    float *alone = malloc(n.vocab * sizeof *alone);
    int32_t same[LANES] = {7, 7, 7, 7};
    side_run(&s, same, 0, 0, 1, 1, false);
    memcpy(alone, s.logits, n.vocab * sizeof *alone);
    side_run(&s, same, 0, 1, 3, 3, false);
    for (int i = 0; i < 3; i++)
        assert_memory_equal(s.logits + (size_t)i * n.vocab, alone, n.vocab * sizeof *alone);
    free(alone);
    free(ids);
    side_close(&s);
    net_close(&n);
}

static void refuses_what_it_cannot(void **state)
{
    struct device *d = NULL;
    struct baton_error e = {0};
    (void)state;
    assert_int_equal(device_open("cuda,isa=avx2", &d, &e), BATON_ERR_USAGE);
    assert_int_equal(device_open("cuda:x", &d, &e), BATON_ERR_USAGE);
    assert_int_equal(device_open("cuda:999", &d, &e), BATON_ERR_DEVICE);
    print_message("%s\n", e.text);
    assert_false(device_survives_fork("cuda:1"));
    assert_true(device_survives_fork("cpu"));
}

/* More memory than any card has: a named error, and the device works on. */
static void out_of_memory_is_an_error(void **state)
{
    uint64_t seed = test_seed();
    struct baton_error e = {0};
    struct net n;
    struct side s;
    struct device *d;
    uint8_t host = 0;
    const struct device_kv_pool pool = {.host = &host, .bytes = (size_t)1 << 42};
    (void)state;
    if (!have_card())
        skip();
    test_ok(device_open("cuda", &d, &e), &e);
    assert_int_equal(device_kv_open(d, &pool, &e), BATON_ERR_NOMEM);
    assert_non_null(strstr(e.text, "out of device memory"));
    print_message("%s\n", e.text);
    net_open(&n, &seed, 64, false, false);
    side_open(&s, &n, "cuda", BATON_BF16);
    int32_t *ids = random_ids(&seed, 40, n.vocab);
    side_run(&s, ids, 40, 0, 1, 1, false);
    assert_true(isfinite(s.logits[0]));
    free(ids);
    side_close(&s);
    net_close(&n);
    device_close(d);
}

/* An argument chooses among the tests: the checkers of memory and races are slow. */
int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refuses_what_it_cannot),
        cmocka_unit_test(verbs_equal_reference),
        cmocka_unit_test(lanes_have_the_same_bits),
        cmocka_unit_test(out_of_memory_is_an_error),
    };
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests_name("cuda", tests, NULL, NULL);
}
