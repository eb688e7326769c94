/* SPDX-License-Identifier: Apache-2.0 */
/* The equations: every model's forward function on cpu:ref against what transformers computed in
 * float32. Prefill logits and KV, then the greedy continuation under forced ids. */
#include <jansson.h>

#include "base/base.h"
#include "kv/kv.h"
#include "model/model.h"
#include "tests/test.h"

/* The project's numbers for cpu:ref: two float32 implementations differ by 6e-6 and 3e-5. */
#define LOGITS_LIMIT 3e-5
#define KV_LIMIT 6e-5
#define MARGIN 0.001f

struct rig {
    struct model *m;
    struct device *d;
    struct model_bound *bound;
    struct device_program *program;
    struct model_tensors *golden;
    struct kv_pool *pool;
    double worst_logits, worst_kv;
};

static void rig_open(struct rig *r, const char *model, const char *golden)
{
    struct baton_error e;
    struct kv_geometry g = {0};
    char path[256];
    memset(r, 0, sizeof *r);
    snprintf(path, sizeof path, "%s/golden.safetensors", golden);
    test_ok(model_open(test_path(model), &r->m, &e), &e);
    test_ok(model_tensors_open(test_path(path), &r->golden, &e), &e);
    test_ok(device_open("cpu:ref", &r->d, &e), &e);
    test_ok(device_start(r->d, 0, &e), &e);
    test_ok(model_bind(r->m, r->d, NULL, NULL, &r->bound, &e), &e);
    test_ok(device_program_open(r->d, model_graph(r->bound), &r->program, &e), &e);
    const struct model_config *c = model_config_of(r->m);
    g.n_layers = c->n_layers;
    g.kv_heads = c->kv_heads;
    g.head_dim = c->head_dim;
    g.dtype = BATON_F32;
    g.window = c->window;
    memcpy(g.local, c->local, c->n_layers);
    test_ok(kv_pool_open(&r->pool, &g, 2304, 1, 512, &e), &e);
    kv_pool_poison(r->pool);
}

static void rig_close(struct rig *r)
{
    print_message("worst relative RMS: logits %.2g, KV %.2g\n", r->worst_logits, r->worst_kv);
    assert_int_equal(kv_pool_used(r->pool), 0);
    kv_pool_close(r->pool);
    device_program_close(r->program);
    model_unbind(r->bound);
    device_close(r->d);
    model_tensors_close(r->golden);
    model_close(r->m);
}

static const struct model_tensor *want(const struct rig *r, const char *name, const char *part)
{
    char full[96];
    snprintf(full, sizeof full, "%s.%s", name, part);
    return model_tensors_find(r->golden, full);
}

/* n ids from the sequence's end on; logits of the last row, or of all rows. */
static void step(struct rig *r, struct kv_seq *s, const int32_t *ids, uint32_t n, bool all,
                 float *logits)
{
    struct baton_error e;
    uint32_t rows[512];
    for (uint32_t i = 0; i < n; i++)
        rows[i] = i;
    test_ok(kv_seq_reserve(s, n, &e), &e);
    struct baton_span span = {
        .row = 0, .n_rows = n, .position = kv_seq_length(s), .kv = kv_seq_views(s)};
    struct baton_batch b = {.ids = ids, .n_rows = n, .spans = &span, .n_spans = 1};
    b.logit_rows = all ? rows : rows + n - 1;
    b.n_logits = logits ? (all ? n : 1) : 0;
    b.logits = logits;
    uint64_t id;
    test_ok(device_submit(r->program, &b, &id, &e), &e);
    test_ok(device_wait(r->program, id, 0, &e), &e);
    kv_seq_advance(s, n);
}

static void check_logits(struct rig *r, const char *name, const float *got,
                         const struct model_tensor *t)
{
    double d = test_rel_rms(got, t->data, t->bytes / sizeof(float));
    r->worst_logits = d > r->worst_logits ? d : r->worst_logits;
    if (!(d < LOGITS_LIMIT))
        fail_msg("%s: logits differ by %g", name, d);
}

/* Positions that the golden file stores of one layer; the edge models store the last two. */
static uint32_t positions(const struct rig *r, const char *name, uint32_t layer, uint32_t n,
                          int32_t *out)
{
    const struct model_config *c = model_config_of(r->m);
    char part[64];
    snprintf(part, sizeof part, "positions.%s",
             c->local[layer] ? "sliding_attention" : "full_attention");
    const struct model_tensor *t = want(r, name, part);
    if (t) {
        memcpy(out, t->data, t->bytes);
        return (uint32_t)t->shape[0];
    }
    out[0] = (int32_t)n - 2;
    out[1] = (int32_t)n - 1;
    return 2;
}

static void check_slot(struct rig *r, const char *name, struct kv_seq *s, uint32_t layer,
                       enum kv_which which)
{
    struct baton_error e;
    const struct model_config *c = model_config_of(r->m);
    static float got[1 << 20];
    int32_t at[4096];
    char part[32];
    snprintf(part, sizeof part, "%c.%u", which == KV_K ? 'k' : 'v', layer);
    const struct model_tensor *t = want(r, name, part);
    if (!t)
        return;
    uint32_t n = positions(r, name, layer, kv_seq_length(s), at);
    assert_int_equal(t->shape[0], c->kv_heads);
    assert_int_equal(t->shape[1], n);
    assert_int_equal(t->shape[2], c->head_dim);
    for (uint32_t i = 0; i < n; i++) {
        float k[1 << 14], v[1 << 14];
        struct baton_kv_layout layout;
        struct baton_kv_view one = kv_dense_view(&layout, BATON_F32, c->kv_heads, c->head_dim, k, v,
                                                 (uint32_t)at[i], 1);
        test_ok(kv_copy(&one, &kv_seq_views(s)[layer], which, (uint32_t)at[i], 1, &e), &e);
        for (uint32_t h = 0; h < c->kv_heads; h++)
            memcpy(got + ((size_t)h * n + i) * c->head_dim,
                   (which == KV_K ? k : v) + (size_t)h * c->head_dim, c->head_dim * sizeof(float));
    }
    double d = test_rel_rms(got, t->data, t->bytes / sizeof(float));
    r->worst_kv = d > r->worst_kv ? d : r->worst_kv;
    if (!(d < KV_LIMIT))
        fail_msg("%s: %s differs by %g", name, part, d);
}

/* Forced: the golden ids go in, whatever we would have chosen. */
static void check_greedy(struct rig *r, const char *name, struct kv_seq *s, float *logits)
{
    const struct model_tensor *ids = want(r, name, "greedy_ids"),
                              *margins = want(r, name, "margins");
    uint32_t vocab = model_config_of(r->m)->vocab, compared = 0;
    for (uint32_t i = 0; i < ids->shape[0]; i++) {
        const int32_t *id = (const int32_t *)ids->data + i;
        uint32_t best = 0;
        for (uint32_t j = 1; j < vocab; j++)
            best = logits[j] > logits[best] ? j : best;
        if (((const float *)margins->data)[i] > MARGIN) {
            if (best != (uint32_t)*id)
                fail_msg("%s: step %u chose %u, transformers %d", name, i, best, *id);
            compared++;
        }
        step(r, s, id, 1, false, logits);
    }
    assert_true(compared > 0);
}

static void check_case(struct rig *r, const char *name)
{
    struct baton_error e;
    struct kv_seq *s;
    const struct model_tensor *ids = want(r, name, "input_ids"), *all = want(r, name, "all_logits");
    assert_non_null(ids);
    assert_int_equal(ids->dtype, MODEL_I32);
    uint32_t n = (uint32_t)ids->shape[0], vocab = model_config_of(r->m)->vocab;
    float *logits = test_malloc((size_t)(all ? n : 1) * vocab * sizeof *logits);
    memset(logits, 0xFF, (size_t)(all ? n : 1) * vocab * sizeof *logits);
    test_ok(kv_seq_open(r->pool, &s, &e), &e);
    for (uint32_t done = 0; done < n; done += 512)
        step(r, s, (const int32_t *)ids->data + done, n - done < 512 ? n - done : 512, all != NULL,
             n - done > 512 ? NULL : logits);
    if (all)
        check_logits(r, name, logits, all);
    float *last = logits + (size_t)(all ? n - 1 : 0) * vocab;
    check_logits(r, name, last, want(r, name, "logits"));
    for (uint32_t l = 0; l < model_config_of(r->m)->n_layers; l++) {
        check_slot(r, name, s, l, KV_K);
        check_slot(r, name, s, l, KV_V);
    }
    check_greedy(r, name, s, last);
    kv_seq_close(s);
    test_free(logits);
}

static void check_model(const char *model, const char *golden, const char *const *cases)
{
    struct rig r;
    rig_open(&r, model, golden);
    for (; *cases; cases++)
        check_case(&r, *cases);
    rig_close(&r);
}

static void check_shipped(const char *name, const char *const *cases)
{
    char model[96], golden[96];
    snprintf(model, sizeof model, "models/%s", name);
    snprintf(golden, sizeof golden, "tests/golden/%s", name);
    check_model(model, golden, cases);
}

static void check_edge(const char *name)
{
    static const char *const cases[] = {"p5", "p33", "p100", NULL};
    char dir[96];
    snprintf(dir, sizeof dir, "tests/golden/edge/%s", name);
    check_model(dir, dir, cases);
}

static const char *const short_cases[] = {"p1", "p7", "p128", NULL};
/* 700 tokens: past the trained window of 512, in two chunks. */
static const char *const window_cases[] = {"p1", "p7", "p128", "p700", NULL};

static void qwen3_tiny(void **state)
{
    check_shipped("qwen3-tiny", short_cases);
}

static void qwen3_small(void **state)
{
    check_shipped("qwen3-small", short_cases);
}

static void koni_tiny(void **state)
{
    check_shipped("koni-tiny", short_cases);
}

static void gemma3_tiny(void **state)
{
    check_shipped("gemma3-tiny", window_cases);
}

static void qwen3_headdim128(void **state)
{
    check_edge("qwen3-headdim128");
}

static void qwen3_sharded3(void **state)
{
    check_edge("qwen3-sharded3");
}

static void llama_headdim80_vocab1003(void **state)
{
    check_edge("llama-headdim80-vocab1003");
}

static void llama_fp32_tied(void **state)
{
    check_edge("llama-fp32-tied");
}

static void llama_attention_bias(void **state)
{
    check_edge("llama-attention-bias");
}

static void gemma3_window8_headdim256(void **state)
{
    check_edge("gemma3-window8-headdim256");
}

static void gemma3_rope_linear8(void **state)
{
    check_edge("gemma3-rope-linear8");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(qwen3_headdim128),
        cmocka_unit_test(qwen3_sharded3),
        cmocka_unit_test(llama_headdim80_vocab1003),
        cmocka_unit_test(llama_fp32_tied),
        cmocka_unit_test(llama_attention_bias),
        cmocka_unit_test(gemma3_window8_headdim256),
        cmocka_unit_test(gemma3_rope_linear8),
        cmocka_unit_test(qwen3_tiny),
        cmocka_unit_test(qwen3_small),
        cmocka_unit_test(koni_tiny),
        cmocka_unit_test(gemma3_tiny),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
