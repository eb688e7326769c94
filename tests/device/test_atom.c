/* SPDX-License-Identifier: Apache-2.0 */
/* The emulated device that decodes in lanes: against cpu and against itself in every lane; where
 * its rows lie after prefill, steps and import; what is stale, what it refuses, how it is lost. */
#include <math.h>

#include "device/device.h"
#include "model/model.h"

#include "cpu_pages.h"
#include "side.h"

#define POSITIONS 640u
#define STEPS 3u

static uint64_t seed;

struct atom {
    struct side s;
    const struct model_config *c;
    uint32_t lanes;
};

static void atom_open(struct atom *a, const char *device, const struct model *m)
{
    struct device *d = NULL;
    test_ok(device_open(device, &d, &err), &err);
    test_ok(side_open(&a->s, d, m), &err);
    a->c = model_config_of(m);
    a->lanes = device_caps(d)->max_lanes;
    const struct device_kv_pool pool = {NULL, 0, POSITIONS, a->lanes};
    test_ok(device_kv_open(d, &pool, &err), &err);
}

static void atom_close(struct atom *a)
{
    device_kv_close(a->s.device);
    side_close(&a->s);
}

static int submit(struct atom *a, const int32_t *ids, uint32_t n, uint32_t at, uint32_t lane,
                  float *logits)
{
    const struct baton_span span = {0, n, at, lane, NULL};
    const uint32_t last = n - 1;
    const struct baton_batch b = {0, ids, n, &span, 1, &last, 1, logits, NULL, NULL};
    return device_submit(a->s.program, &b, NULL, &err);
}

/* Bound, and filled with n ids. */
static void prefill(struct atom *a, uint32_t lane, const int32_t *ids, uint32_t n, float *logits)
{
    uint32_t chunk = device_caps(a->s.device)->max_rows;
    test_ok(device_lane_bind(a->s.device, lane, &err), &err);
    for (uint32_t at = 0; at < n; at += chunk)
        test_ok(submit(a, ids + at, n - at < chunk ? n - at : chunk, at, lane, logits), &err);
}

/* A token in each of the lanes, whose order is that of `lane`; logits [n, vocab]. */
static void step(struct atom *a, const uint32_t *lane, const uint32_t *position, uint32_t n,
                 const int32_t *ids, float *logits)
{
    struct baton_span spans[4];
    static const uint32_t rows[] = {0, 1, 2, 3};
    for (uint32_t i = 0; i < n; i++)
        spans[i] = (struct baton_span){i, 1, position[i], lane[i], NULL};
    const struct baton_batch b = {0, ids, n, spans, n, rows, n, logits, NULL, NULL};
    test_ok(device_submit(a->s.program, &b, NULL, &err), &err);
}

static int32_t *random_ids(uint32_t n, uint32_t vocab)
{
    int32_t *ids = malloc(n * sizeof *ids);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)test_range(&seed, 0, vocab - 1);
    return ids;
}

static struct model *open_model(const char *path)
{
    struct model *m = NULL;
    test_ok(model_open(test_path(path), &m, &err), &err);
    return m;
}

/* ---- results ------------------------------------------------------------------------------- */

/* Prefill of n and steps, alone in a lane. */
static void alone(struct atom *a, uint32_t lane, const int32_t *ids, uint32_t n, float *logits)
{
    uint32_t vocab = a->c->vocab;
    prefill(a, lane, ids, n, logits);
    for (uint32_t i = 0; i < STEPS; i++) {
        uint32_t at = n + i;
        step(a, &lane, &at, 1, ids + at, logits + (i + 1) * (size_t)vocab);
    }
    device_lane_release(a->s.device, lane);
}

/* The same beside three others, whose lanes and positions are others. */
static void together(struct atom *a, uint32_t lane, const int32_t *ids, uint32_t n, float *logits)
{
    uint32_t vocab = a->c->vocab, lanes[4], at[4];
    int32_t *other = random_ids(POSITIONS, vocab), tokens[4];
    float *rows = malloc(4 * (size_t)vocab * sizeof *rows);
    for (uint32_t i = 0; i < 4; i++) {
        lanes[i] = (i + 1) % 4; /* rows need not be in the order of lanes */
        at[i] = lanes[i] == lane ? n : test_range(&seed, 1, 300);
        prefill(a, lanes[i], lanes[i] == lane ? ids : other, at[i],
                lanes[i] == lane ? logits : rows);
    }
    for (uint32_t k = 0; k < STEPS; k++) {
        for (uint32_t i = 0; i < 4; i++)
            tokens[i] = lanes[i] == lane ? ids[n + k] : other[at[i]];
        step(a, lanes, at, 4, tokens, rows);
        for (uint32_t i = 0; i < 4; i++, at[i - 1]++)
            if (lanes[i] == lane)
                memcpy(logits + (k + 1) * (size_t)vocab, rows + i * (size_t)vocab,
                       vocab * sizeof *rows);
    }
    for (uint32_t i = 0; i < 4; i++)
        device_lane_release(a->s.device, i);
    free(rows);
    free(other);
}

/* What cpu makes of all n + STEPS ids: rows n - 1 on. */
static void on_cpu(const struct model *m, const int32_t *ids, uint32_t n, float *logits)
{
    struct device *d = NULL;
    struct side s;
    const struct model_config *c = model_config_of(m);
    test_ok(device_open("cpu", &d, &err), &err);
    test_ok(side_open(&s, d, m), &err);
    cpu_pages_open(&s.pages, &seed, c->n_layers, c->kv_heads, c->head_dim, n + STEPS);
    for (uint32_t at = 0, k; at < n + STEPS; at += k) {
        k = at < n ? n - at < 512 ? n - at : 512 : 1;
        const uint32_t last = k - 1;
        const struct baton_span span = {0, k, at, 0, s.pages.views};
        const struct baton_batch b = {
            0,    ids + at, k, &span,
            1,    &last,    1, logits + (at < n ? 0 : at - n + 1) * (size_t)c->vocab,
            NULL, NULL};
        pages_set_end(&s.pages, at);
        test_ok(device_submit(s.program, &b, NULL, &err), &err);
    }
    pages_close(&s.pages);
    side_close(&s);
}

static double compare(const char *path, uint32_t n)
{
    struct model *m = open_model(path);
    struct atom one, four, parts;
    size_t vocab = model_config_of(m)->vocab, bytes = (STEPS + 1) * vocab * sizeof(float);
    float *want = malloc(bytes), *have = malloc(bytes), *cpu = malloc(bytes);
    int32_t *ids = random_ids(n + STEPS, (uint32_t)vocab);
    atom_open(&one, "npu:atom-b1", m);
    atom_open(&four, "npu:atom-b4", m);
    atom_open(&parts, "npu:atom-b4,partition=256", m);
    alone(&one, 0, ids, n, want);
    alone(&four, test_range(&seed, 0, 3), ids, n, have);
    assert_memory_equal(have, want, bytes);
    together(&four, test_range(&seed, 0, 3), ids, n, have);
    assert_memory_equal(have, want, bytes);
    together(&parts, test_range(&seed, 0, 3), ids, n, have);
    assert_memory_equal(have, want, bytes);
    on_cpu(m, ids, n, cpu);
    double d = test_rel_rms(want, cpu, (STEPS + 1) * vocab);
    print_message("%s, %u tokens: logits %.2e\n", path, n, d);
    assert_true(isfinite(d));
    atom_close(&one);
    atom_close(&four);
    atom_close(&parts);
    free(want);
    free(have);
    free(cpu);
    free(ids);
    model_close(m);
    return d;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Bits are the same in every lane; cpu's are near, in the median. */
static void equals_cpu(void **state)
{
    static const char *const models[] = {
        "models/qwen3-tiny", "models/koni-tiny", "models/gemma3-tiny",
        "tests/golden/edge/gemma3-window8-headdim256", "tests/golden/edge/llama-attention-bias"};
    enum { MODELS = sizeof models / sizeof *models };
    double d[MODELS + 2];
    for (size_t i = 0; i < MODELS; i++)
        d[i] = compare(models[i], test_range(&seed, 1, 300));
    d[MODELS] = compare(models[3], 256);
    d[MODELS + 1] = compare(models[4], 1);
    qsort(d, MODELS + 2, sizeof *d, by_size);
    assert_true(d[(MODELS + 2) / 2] < 2e-2);
}

/* ---- rows ---------------------------------------------------------------------------------- */

/* Rows of a lane, read back, and how they lie in the device. */
struct rows {
    struct pages pages;
    struct baton_kv_view views[64];
    uint32_t first[64];
};

static uint32_t oldest(const struct atom *a, uint32_t layer, uint32_t n)
{
    uint32_t w = a->c->window;
    return w && a->c->local[layer] && n > w ? n - w : 0;
}

static void read_rows(struct atom *a, uint32_t lane, uint32_t n, struct rows *r)
{
    const struct model_config *c = a->c;
    cpu_pages_open(&r->pages, &seed, c->n_layers, c->kv_heads, c->head_dim, n);
    for (uint32_t l = 0; l < c->n_layers; l++)
        r->first[l] = oldest(a, l, n);
    test_ok(device_kv_read(a->s.device, lane, r->pages.views, c->n_layers, r->first, n, &err),
            &err);
    test_ok(device_kv_look(a->s.device, lane, r->views, c->n_layers, &err), &err);
}

/* Element of a row of the device, by the layout's strides; slot of a slid window or position. */
static uint16_t element(const struct baton_kv_view *v, int which, uint32_t row, uint32_t h,
                        uint32_t d)
{
    const struct baton_kv_layout *l = v->layout;
    uint32_t block = l->block ? row / l->block : 0, in = l->block ? row % l->block : row;
    uint16_t x;
    memcpy(&x,
           (which ? v->v : v->k) + (l->block ? v->blocks[block] * l->stride_block : 0) +
               in * l->stride_position + h * l->stride_head + d * l->stride_dim,
           sizeof x);
    return x;
}

static bool row_is_zero(const struct baton_kv_view *v, int which, uint32_t row)
{
    for (uint32_t h = 0; h < v->layout->kv_heads; h++)
        for (uint32_t d = 0; d < v->layout->head_dim; d++)
            if (element(v, which, row, h, d))
                return false;
    return true;
}

/* Slot s of a slid window holds position max(0, n - W) + s; what is read back is what lies there;
 * nothing lies behind. Global layers: a position is a row. */
static void check_rows(struct atom *a, const struct rows *r, uint32_t n)
{
    for (uint32_t l = 0; l < a->c->n_layers; l++) {
        const struct baton_kv_view *v = &r->views[l];
        bool slid = v->layout->kind == BATON_KV_SLID;
        uint32_t w = slid ? v->layout->rows : 0;
        assert_int_equal(slid, a->c->window && a->c->local[l]);
        assert_int_equal(v->end, n);
        assert_int_equal(v->first, r->first[l]);
        for (uint32_t p = r->first[l]; p < n; p++)
            for (uint32_t i = 0; i < 2 * a->c->kv_heads * a->c->head_dim; i++) {
                uint32_t d = i / 2 % a->c->head_dim, h = i / 2 / a->c->head_dim;
                uint16_t want = element(v, (int)(i % 2), slid ? p - r->first[l] : p, h, d);
                uint16_t have;
                memcpy(&have, pages_at(&r->pages, l, (int)(i % 2), p, h, d), 2);
                assert_int_equal(have, want);
            }
        for (uint32_t s = n - r->first[l]; s < w; s++)
            assert_true(row_is_zero(v, 0, s) && row_is_zero(v, 1, s));
    }
}

/* Around the window's length, behind it, and over chunks; and one position further each step. */
static void windows_slide(void **state)
{
    static const uint32_t lengths[] = {1, 7, 8, 9, 16, 17, 255, 256, 300};
    struct model *m = open_model("tests/golden/edge/gemma3-window8-headdim256");
    struct atom a;
    atom_open(&a, "npu:atom-b4", m);
    int32_t *ids = random_ids(310, a.c->vocab);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        uint32_t lane = test_range(&seed, 0, 3), n = lengths[i];
        struct rows before, after;
        prefill(&a, lane, ids, n, a.s.logits);
        read_rows(&a, lane, n, &before);
        check_rows(&a, &before, n);
        for (uint32_t k = 0; k < 2; k++, n++)
            step(&a, &lane, &n, 1, ids + n, a.s.logits);
        read_rows(&a, lane, n, &after);
        check_rows(&a, &after, n);
        for (uint32_t l = 0; l < a.c->n_layers; l++)
            for (uint32_t p = after.first[l]; p < lengths[i]; p++)
                assert_memory_equal(pages_at(&after.pages, l, 0, p, 0, 0),
                                    pages_at(&before.pages, l, 0, p, 0, 0), 2 * a.c->head_dim);
        pages_close(&before.pages);
        pages_close(&after.pages);
        device_lane_release(a.s.device, lane);
    }
    free(ids);
    atom_close(&a);
    model_close(m);
}

/* The padding of the last chunk is in global layers, behind the prompt, until it is overwritten. */
static void garbage_behind(void **state)
{
    struct model *m = open_model("models/qwen3-tiny");
    struct atom a;
    struct baton_kv_view views[64];
    uint32_t lane = 2, n = test_range(&seed, 1, 126);
    int32_t *ids = random_ids(129, 512);
    atom_open(&a, "npu:atom-b4", m);
    prefill(&a, lane, ids, n, a.s.logits);
    test_ok(device_kv_look(a.s.device, lane, views, a.c->n_layers, &err), &err);
    uint16_t garbage = element(&views[3], 0, n, 0, 1);
    for (uint32_t p = n; p < 128; p++)
        assert_false(row_is_zero(&views[3], 0, p));
    assert_true(row_is_zero(&views[3], 0, 128));
    step(&a, &lane, &n, 1, ids + n, a.s.logits);
    assert_int_not_equal(element(&views[3], 0, n, 0, 1), garbage);
    device_lane_release(a.s.device, lane);
    prefill(&a, lane, ids, 128, a.s.logits); /* none */
    test_ok(device_kv_look(a.s.device, lane, views, a.c->n_layers, &err), &err);
    assert_true(row_is_zero(&views[3], 0, 128));
    free(ids);
    atom_close(&a);
    model_close(m);
}

/* ---- imports ------------------------------------------------------------------------------- */

/* What the layers retain of n positions, W - 1 in local ones. */
static void import(struct atom *a, uint32_t lane, const struct rows *from, uint32_t n, bool clear)
{
    uint32_t first[64], w = a->c->window;
    for (uint32_t l = 0; l < a->c->n_layers; l++)
        first[l] = w && a->c->local[l] && n >= w ? n - w + 1 : 0;
    test_ok(device_lane_bind(a->s.device, lane, &err), &err);
    if (clear)
        test_ok(device_lane_clear(a->s.device, lane, &err), &err);
    test_ok(device_kv_write(a->s.device, lane, from->pages.views, a->c->n_layers, first, n, &err),
            &err);
}

/* A lane goes on from an import as from its own prefill, whoever had it before. */
static void imports_continue(void **state)
{
    static const uint32_t lengths[] = {1, 7, 8, 9, 20, 300};
    struct model *m = open_model("tests/golden/edge/gemma3-window8-headdim256");
    struct atom a;
    atom_open(&a, "npu:atom-b4", m);
    int32_t *ids = random_ids(303, a.c->vocab);
    size_t bytes = a.c->vocab * sizeof(float);
    float *want = malloc(bytes);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        uint32_t n = lengths[i], from = test_range(&seed, 0, 3), to = (from + 1) % 4;
        struct rows r;
        prefill(&a, from, ids, n, want);
        read_rows(&a, from, n, &r);
        import(&a, to, &r, n, true);
        test_ok(device_kv_look(a.s.device, to, r.views, a.c->n_layers, &err), &err);
        for (uint32_t l = 0; l < a.c->n_layers && n >= 8; l++)
            if (a.c->local[l]) {
                assert_int_equal(r.views[l].first, n - 7);
                assert_true(row_is_zero(&r.views[l], 0, 0) && row_is_zero(&r.views[l], 1, 0));
                assert_false(row_is_zero(&r.views[l], 0, 1));
            }
        for (uint32_t k = 0, at = n; k < STEPS; k++, at++) {
            step(&a, &from, &at, 1, ids + at, want);
            step(&a, &to, &at, 1, ids + at, a.s.logits);
            assert_memory_equal(a.s.logits, want, bytes);
        }
        device_lane_release(a.s.device, from);
        device_lane_release(a.s.device, to);
        pages_close(&r.pages);
    }
    free(want);
    free(ids);
    atom_close(&a);
    model_close(m);
}

/* Nobody clears a lane for an importer: a row that is no number there spoils what masks it. */
static void stale_rows(void **state)
{
    struct model *m = open_model("tests/golden/edge/gemma3-window8-headdim256");
    struct atom a;
    struct rows r, poison = {0};
    uint32_t lane = 1, n = 3;
    int32_t ids[4] = {5, 6, 7, 8};
    atom_open(&a, "npu:atom-b4", m);
    prefill(&a, lane, ids, n, a.s.logits);
    read_rows(&a, lane, n, &r);
    device_lane_release(a.s.device, lane);
    cpu_pages_open(&poison.pages, &seed, a.c->n_layers, a.c->kv_heads, a.c->head_dim, 20);
    import(&a, lane, &poison, 20, true);
    device_lane_release(a.s.device, lane);
    import(&a, lane, &r, n, false);
    step(&a, &lane, &n, 1, ids + n, a.s.logits);
    assert_true(isnan(a.s.logits[0]));
    device_lane_release(a.s.device, lane);
    import(&a, lane, &r, n, true);
    step(&a, &lane, &n, 1, ids + n, a.s.logits);
    assert_true(isfinite(a.s.logits[0]));
    pages_close(&poison.pages);
    pages_close(&r.pages);
    atom_close(&a);
    model_close(m);
}

/* ---- refusals ------------------------------------------------------------------------------ */

static void refuses(void **state)
{
    struct device *d = NULL;
    struct model *m = open_model("models/qwen3-tiny");
    struct atom a;
    int32_t ids[130] = {0};
    test_fails(device_open("npu:atom-b2", &d, &err), BATON_ERR_USAGE, "npu:atom-b4", &err);
    test_fails(device_open("npu:atom-b4,partition=100", &d, &err), BATON_ERR_USAGE, "256", &err);
    test_fails(device_open("npu:atom-b4,devices=3", &d, &err), BATON_ERR_USAGE, "1, 2, 4", &err);
    test_fails(device_open("npu:atom-b4,fault=smoke", &d, &err), BATON_ERR_USAGE, "lane-swap",
               &err);
    atom_open(&a, "npu:atom-b4", m);
    test_ok(device_lane_bind(a.s.device, 0, &err), &err);
    test_fails(device_lane_bind(a.s.device, 0, &err), BATON_ERR_USAGE, "is bound", &err);
    test_fails(device_lane_bind(a.s.device, 4, &err), BATON_ERR_USAGE, "no lane 4", &err);
    test_fails(submit(&a, ids, 2, 5, 0, a.s.logits), BATON_ERR_UNSUPPORTED, "multiples of 128",
               &err);
    test_fails(submit(&a, ids, 1, 5, 0, a.s.logits), BATON_ERR_USAGE, "holds 0", &err);
    test_fails(submit(&a, ids, 129, 0, 0, a.s.logits), BATON_ERR_USAGE, "1 to 128", &err);
    test_fails(submit(&a, ids, 128, 640, 0, a.s.logits), BATON_ERR_USAGE, "holds 0", &err);
    for (uint32_t at = 0; at < 640; at += 128)
        test_ok(submit(&a, ids, 128, at, 0, a.s.logits), &err);
    test_fails(submit(&a, ids, 1, 640, 0, a.s.logits), BATON_ERR_USAGE, "compiled for 640", &err);
    atom_close(&a);
    test_ok(device_open("npu:atom-b1,partition=4096", &d, &err), &err);
    test_ok(side_open(&a.s, d, m), &err);
    const struct device_kv_pool small = {NULL, 0, 4096, 1};
    test_fails(device_kv_open(d, &small, &err), BATON_ERR_UNSUPPORTED, "two or more", &err);
    const struct device_kv_pool large = {NULL, 0, 40000000, 1};
    test_fails(device_kv_open(d, &large, &err), BATON_ERR_NOMEM, "do not fit 14230", &err);
    side_close(&a.s);
    model_close(m);
}

/* A lane without blocks takes the device down, and only opening it again helps. */
static void lost(void **state)
{
    struct model *m = open_model("models/qwen3-tiny");
    struct atom a;
    int32_t id = 1;
    atom_open(&a, "npu:atom-b4", m);
    prefill(&a, 0, &id, 1, a.s.logits);
    test_fails(submit(&a, &id, 1, 0, 1, a.s.logits), BATON_ERR_DEVICE_LOST, "block -1", &err);
    test_fails(submit(&a, &id, 1, 1, 0, a.s.logits), BATON_ERR_DEVICE_LOST, "opened again", &err);
    test_fails(device_lane_bind(a.s.device, 2, &err), BATON_ERR_DEVICE_LOST, "opened again", &err);
    device_lane_release(a.s.device, 0);
    atom_close(&a);
    atom_open(&a, "npu:atom-b4", m);
    prefill(&a, 1, &id, 1, a.s.logits);
    atom_close(&a);
    model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_cpu),     cmocka_unit_test(windows_slide),
        cmocka_unit_test(garbage_behind), cmocka_unit_test(imports_continue),
        cmocka_unit_test(stale_rows),     cmocka_unit_test(refuses),
        cmocka_unit_test(lost),
    };
    seed = test_seed();
    return cmocka_run_group_tests_name("device atom", tests, NULL, NULL);
}
