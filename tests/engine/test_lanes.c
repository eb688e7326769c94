/* SPDX-License-Identifier: Apache-2.0 */
/* Lanes: a request's logits are the same bits alone and beside any neighbours, in any lane, with
 * neighbours that come, go and are cancelled at any time. */
#include "rig.h"

#define CTX 320u
#define OUTPUT 24u
#define PROMPT 150u

/* A neighbour and how long it may live. */
struct neighbour {
    struct baton_request *r;
    uint32_t pulls;
    int32_t ids[PROMPT];
};

static void start_neighbour(struct baton_engine *en, uint32_t vocab, struct neighbour *n,
                            uint64_t *seed)
{
    uint32_t n_ids = test_range(seed, 1, PROMPT);
    rig_prompt(seed, vocab, n->ids, n_ids);
    const struct baton_request_options o = {
        .struct_size = sizeof o,
        .ids = n->ids,
        .n_ids = n_ids,
        .max_tokens = test_range(seed, 1, 40),
        .ignore_eos = true,
        .temperature = test_range(seed, 0, 1) ? 0.9f : 0,
        .want_logits = test_range(seed, 0, 3) == 0,
        .seed = test_random(seed),
    };
    n->r = rig_submit(en, &o);
    n->pulls = test_range(seed, 0, 20);
}

/* Between two pulls of the request under test: arrivals, a token taken here and there, ends. */
static void stir(struct baton_engine *en, uint32_t vocab, struct neighbour *n, uint32_t count,
                 uint64_t *seed)
{
    struct baton_error e;
    struct baton_token t;
    for (uint32_t i = 0; i < count; i++) {
        if (!n[i].r) {
            if (test_range(seed, 0, 2) == 0)
                start_neighbour(en, vocab, &n[i], seed);
            continue;
        }
        int rc = baton_next(n[i].r, &t, 0, &e);
        assert_true(rc >= 0 || rc == BATON_ERR_TIMEOUT);
        if (rc == 0 || n[i].pulls-- == 0) {
            if (test_range(seed, 0, 1))
                baton_cancel(n[i].r);
            baton_request_close(n[i].r);
            n[i].r = NULL;
        }
    }
}

static void one_round(struct baton_model *m, const char *device, uint32_t lanes, uint64_t *seed)
{
    uint32_t vocab = baton_model_vocab(m), n_ids = test_range(seed, 1, PROMPT);
    int32_t ids[PROMPT];
    struct rig_run alone, beside = {0};
    struct neighbour n[10] = {{0}};
    struct baton_error e;
    struct baton_token t;
    int rc;
    rig_prompt(seed, vocab, ids, n_ids);
    const struct baton_request_options o = {
        .struct_size = sizeof o,
        .ids = ids,
        .n_ids = n_ids,
        .max_tokens = OUTPUT,
        .ignore_eos = true,
        .temperature = test_range(seed, 0, 1) ? 1.2f : 0,
        .seed = test_random(seed),
        .want_logits = true,
    };
    rig_alone(m, device, CTX, 0, &o, &alone);
    struct baton_engine *en = rig_engine(m, BATON_BOTH, device, lanes, CTX, test_range(seed, 1, 64),
                                         -1);
    uint32_t count = lanes + 2;
    for (uint32_t i = test_range(seed, 0, 3); i > 0; i--)
        stir(en, vocab, n, count, seed);
    struct baton_request *r = rig_submit(en, &o);
    while ((rc = baton_next(r, &t, -1, &e)) == 1) {
        rig_take(&beside, &t, vocab);
        stir(en, vocab, n, count, seed);
    }
    assert_int_equal(rc, 0);
    rig_equal(&beside, &alone, vocab, "beside neighbours");
    struct baton_stats s = rig_stats(r);
    uint32_t steps = 0;
    for (uint32_t i = 1; i <= 8; i++)
        steps += s.steps_by_lanes[i];
    assert_int_equal(steps, OUTPUT - 1);
    print_message("%s: steps by lanes %u %u %u %u\n", device, s.steps_by_lanes[1],
                  s.steps_by_lanes[2], s.steps_by_lanes[3], s.steps_by_lanes[4]);
    baton_request_close(r);
    for (uint32_t i = 0; i < count; i++)
        baton_request_close(n[i].r);
    assert_int_equal(engine_blocks_used(en), 0);
    baton_engine_close(en);
    rig_run_free(&alone);
    rig_run_free(&beside);
}

static void test_neighbours(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    const char *device = rig_device();
    int rounds = RIG_SHORT || strcmp(device, "cpu") ? 1 : 4;
    for (int i = 0; i < RIG_MODELS; i++) {
        struct baton_model *m = rig_model(rig_models[i]);
        for (int k = 0; k < rounds; k++)
            for (uint32_t lanes = 1; lanes <= 4; lanes *= 2)
                one_round(m, device, lanes, &seed);
        baton_model_close(m);
    }
}

/* All lanes at once, the same prompt: every lane gives the same bits. */
static void test_every_lane(void **state)
{
    (void)state;
    uint64_t seed = test_seed();
    struct baton_model *m = rig_model("gemma3-tiny");
    uint32_t vocab = baton_model_vocab(m);
    int32_t ids[40];
    struct rig_run alone, run;
    struct baton_request *r[8];
    struct baton_error e;
    rig_prompt(&seed, vocab, ids, 40);
    const struct baton_request_options o = {.struct_size = sizeof o,
                                            .ids = ids,
                                            .n_ids = 40,
                                            .max_tokens = 8,
                                            .ignore_eos = true,
                                            .want_logits = true};
    rig_alone(m, rig_device(), 64, 0, &o, &alone);
    struct baton_engine *en = rig_engine(m, BATON_BOTH, rig_device(), 8, 64, 0, -1);
    for (int i = 0; i < 8; i++)
        r[i] = rig_submit(en, &o);
    for (int i = 0; i < 8; i++) {
        test_ok(rig_pull(r[i], &run, vocab, &e), &e);
        rig_equal(&run, &alone, vocab, "a lane");
        rig_run_free(&run);
        baton_request_close(r[i]);
    }
    baton_engine_close(en);
    rig_run_free(&alone);
    baton_model_close(m);
}

/* A cancelled lane is free at the next step: more requests than lanes, each cancelled early. */
static void test_cancel_frees_lane(void **state)
{
    (void)state;
    struct baton_model *m = rig_model("qwen3-tiny");
    struct baton_engine *en = rig_engine(m, BATON_BOTH, rig_device(), 2, 2048, 0, -1);
    const int32_t ids[] = {7, 8, 9};
    struct baton_error e;
    struct baton_token t;
    const struct baton_request_options o = {
        .struct_size = sizeof o, .ids = ids, .n_ids = 3, .ignore_eos = true};
    for (int i = 0; i < 6; i++) {
        struct baton_request *r = rig_submit(en, &o);
        assert_int_equal(baton_next(r, &t, -1, &e), 1);
        baton_cancel(r);
        int rc;
        uint32_t n = 0;
        while ((rc = baton_next(r, &t, -1, &e)) == 1)
            n++;
        assert_int_equal(rc, 0);
        assert_true(n < 2000);
        assert_int_equal(rig_stats(r).finish, BATON_CANCELLED);
        assert_int_equal(engine_blocks_used(en), 0);
        baton_request_close(r);
    }
    baton_engine_close(en);
    baton_model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cancel_frees_lane),
        cmocka_unit_test(test_every_lane),
        cmocka_unit_test(test_neighbours),
    };
    return cmocka_run_group_tests_name("engine: lanes", tests, NULL, NULL);
}
