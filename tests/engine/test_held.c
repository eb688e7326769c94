/* SPDX-License-Identifier: Apache-2.0 */
/* A consumer that has the first positions of a prompt in a file: only what it lacks travels, and
 * the result has the bits of a native run. */
#include "rig.h"

#define OUTPUT 5u

/* Bytes of the positions that a consumer with [0, held) lacks. */
static uint64_t lacking(const struct baton_model *m, uint32_t n, uint32_t held)
{
    struct kv_geometry g;
    uint64_t bytes = 0;
    engine_geometry(model_config_of(engine_model(m)), BATON_BF16, &g);
    if (strcmp(rig_device(), "cpu"))
        g.dtype = BATON_F32; /* of cpu:ref */
    for (uint32_t l = 0; l < g.n_layers; l++) {
        uint32_t first = kv_retained_first(&g, l, n);
        bytes += 2 *
                 kv_piece_bytes(g.dtype, g.kv_heads, g.head_dim, n - (first > held ? first : held));
    }
    return bytes;
}

struct scene {
    struct baton_model *model;
    const char *path;
    const int32_t *ids;
    uint32_t n, m; /* of the prompt; of the file */
    uint32_t chunk;
};

/* The cache of the first m tokens, and what the whole prompt gives. */
static void prepare(const struct scene *s, struct rig_run *native)
{
    struct rig_run run;
    struct baton_request_options o = {.struct_size = sizeof o,
                                      .ids = s->ids,
                                      .n_ids = s->m,
                                      .max_tokens = 1,
                                      .want_logits = true,
                                      .kv_save = s->path};
    rig_alone(s->model, rig_device(), s->n + OUTPUT, 0, &o, &run);
    rig_run_free(&run);
    o.kv_save = NULL;
    o.n_ids = s->n;
    o.max_tokens = OUTPUT;
    o.ignore_eos = true;
    rig_alone(s->model, rig_device(), s->n + OUTPUT, 0, &o, native);
}

/* Both ends or the consumer alone have the file; it may have to do without the producer. */
static void handover(const struct scene *s, const struct rig_run *native, bool both, bool dead,
                     enum baton_mode mode)
{
    struct rig_pair p;
    struct rig_run run;
    struct baton_error e;
    struct baton_token t;
    rig_pair_open(&p, s->model, rig_device(), 1, s->n + OUTPUT, s->chunk);
    struct baton_request_options o = {.struct_size = sizeof o,
                                      .ids = s->ids,
                                      .n_ids = s->n,
                                      .max_tokens = OUTPUT,
                                      .ignore_eos = true,
                                      .want_logits = true,
                                      .kv_load = s->path,
                                      .mode = mode},
                                 po = o;
    po.kv_load = both ? s->path : NULL;
    o.local_prefill = dead;
    struct baton_request *r = NULL;
    if (dead)
        baton_engine_close(p.producer);
    else
        r = rig_submit(p.producer, &po);
    struct baton_request *c = rig_submit(p.consumer, &o);
    test_ok(rig_pull(c, &run, p.vocab, &e), &e);
    rig_equal(&run, native, p.vocab, dead ? "held, and a dead producer" : "held");
    rig_run_free(&run);
    struct baton_stats st = rig_stats(c);
    if (dead) {
        p.producer = NULL;
        assert_string_equal(st.verdict, "local-prefill: peer");
        assert_int_equal(st.loaded_tokens, s->m);
    } else {
        uint32_t held = s->m < s->n ? s->m : s->n - 1;
        test_ok(baton_next(r, &t, -1, &e), &e);
        assert_string_equal(st.verdict, "verified");
        assert_int_equal(st.loaded_tokens, held);
        assert_int_equal(st.bytes, lacking(s->model, s->n, held));
    }
    baton_request_close(r);
    baton_request_close(c);
    rig_pair_close(&p);
}

static void one(const char *name, uint32_t n, uint32_t m, uint64_t *seed)
{
    char path[64];
    struct rig_run native;
    int32_t *ids = calloc(n, sizeof *ids);
    struct scene s = {.model = rig_model(name), .path = path, .ids = ids, .n = n, .m = m};
    s.chunk = test_range(seed, 1, 200);
    snprintf(path, sizeof path, "/tmp/baton-test-held-%d", (int)getpid());
    rig_prompt(seed, baton_model_vocab(s.model), ids, n);
    print_message("%s: %u of %u, chunks of %u\n", name, m, n, s.chunk);
    prepare(&s, &native);
    handover(&s, &native, true, false, BATON_STREAM);
    handover(&s, &native, false, false, BATON_WHOLE);
    handover(&s, &native, false, true, BATON_STREAM);
    unlink(path);
    rig_run_free(&native);
    free(ids);
    baton_model_close(s.model);
}

static void test_held(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    bool fast = !strcmp(rig_device(), "cpu") && !RIG_SHORT;
    one("qwen3-tiny", 40, 40, &seed);
    one("koni-tiny", 130, 64, &seed);
    for (int i = 0; i < 2; i++) {
        uint32_t n = test_range(&seed, 2, 200);
        one(rig_models[test_range(&seed, 0, 3)], n, test_range(&seed, 1, n), &seed);
    }
    /* Around Gemma's window of 512: the file's local layers begin before the prompt's. */
    for (int i = 0; fast && i < 3; i++) {
        uint32_t n = test_range(&seed, 513, 1200);
        one("gemma3-tiny", n, i ? test_range(&seed, 1, n) : n - 1, &seed);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_held)};
    return cmocka_run_group_tests_name("engine: held", tests, NULL, NULL);
}
