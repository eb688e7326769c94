/* SPDX-License-Identifier: Apache-2.0 */
/* Prefix reuse: a request's logits are the same bits with a hit and without, and every block comes
 * back. */
#include "rig.h"

#define CTX 1024u

static struct baton_engine *open_engine(struct baton_model *m, enum baton_role role,
                                        const char *device, uint32_t lanes, uint32_t ctx,
                                        uint32_t chunk, struct baton_link *link)
{
    struct baton_error e;
    struct baton_engine *en = NULL;
    const struct baton_engine_options o = {.struct_size = sizeof o,
                                           .role = role,
                                           .device = device,
                                           .lanes = lanes,
                                           .ctx = ctx,
                                           .threads = 2,
                                           .chunk = chunk,
                                           .link = link,
                                           .prefix_cache = true};
    test_ok(baton_engine_open(m, &o, &en, &e), &e);
    return en;
}

static struct engine_load load_of(const struct baton_engine *en)
{
    struct engine_load l;
    engine_load(en, &l);
    return l;
}

/* A prompt with its answer of an engine without reuse. */
struct known {
    int32_t ids[CTX];
    uint32_t n, hit; /* hit: at least so much of it has been computed before, on an idle engine */
    struct rig_run alone;
};

static struct baton_request_options ask(const struct known *k, uint32_t max_tokens)
{
    return (struct baton_request_options){.struct_size = sizeof(struct baton_request_options),
                                          .ids = k->ids,
                                          .n_ids = k->n,
                                          .max_tokens = max_tokens,
                                          .ignore_eos = true,
                                          .want_logits = true};
}

/* A prompt that parts from another's timeline (its answer included) at `same`. */
static void vary(struct known *k, const struct known *from, uint32_t same, uint32_t n,
                 uint32_t vocab, uint64_t *seed)
{
    uint32_t have = from->n < same ? from->n : same;
    rig_prompt(seed, vocab, k->ids, n);
    memcpy(k->ids, from->ids, have * sizeof *k->ids);
    if (same > have)
        memcpy(k->ids + have, from->alone.ids, (same - have) * sizeof *k->ids);
    if (same < n && same < from->n && k->ids[same] == from->ids[same])
        k->ids[same] = (k->ids[same] + 1) % (int32_t)vocab;
    k->n = n;
    k->hit = (same < n ? same : n - 1) / KV_BLOCK * KV_BLOCK;
}

enum { KNOWN = 5, OUTPUT = 5 };

/* Prompts at page borders and one beside, each with the first one's beginning. */
static void prepare(struct baton_model *m, const char *device, struct known *k, uint64_t *seed)
{
    uint32_t vocab = baton_model_vocab(m);
    struct baton_engine *en = rig_engine(m, BATON_BOTH, device, 1, CTX, 0, -1);
    struct baton_error e;
    uint32_t pages = test_range(seed, 2, RIG_SHORT ? 3 : 9);
    uint32_t first = pages * KV_BLOCK + test_range(seed, 0, 2) - 1;
    struct known nothing = {.n = 0};
    for (int i = 0; i < KNOWN; i++) {
        uint32_t same = test_range(seed, 1, first / KV_BLOCK) * KV_BLOCK + test_range(seed, 0, 2) -
                        1;
        uint32_t n = same + test_range(seed, 0, 2) * test_range(seed, 1, 70);
        if (i == 0)
            vary(&k[i], &nothing, 0, first, vocab, seed);
        else if (i == 1) /* the very same */
            vary(&k[i], &k[0], first, first, vocab, seed);
        else if (i == 2) /* the next turn of a chat: with the answer's tokens, but the last */
            vary(&k[i], &k[0], first + OUTPUT - 1, first + OUTPUT + 40, vocab, seed);
        else
            vary(&k[i], &k[0], same < first ? same : first, n ? n : 1, vocab, seed);
        const struct baton_request_options o = ask(&k[i], OUTPUT);
        struct baton_request *r = rig_submit(en, &o);
        test_ok(rig_pull(r, &k[i].alone, vocab, &e), &e);
        baton_request_close(r);
    }
    assert_int_equal(load_of(en).prefix_queries, 0);
    baton_engine_close(en);
}

static void pull_equal(struct baton_request *r, const struct known *k, uint32_t vocab,
                       const char *what)
{
    struct baton_error e;
    struct rig_run run;
    test_ok(rig_pull(r, &run, vocab, &e), &e);
    rig_equal(&run, &k->alone, vocab, what);
    rig_run_free(&run);
}

/* One after the other: each finds what it shares with the first one. */
static void in_turn(struct baton_model *m, const char *device, struct known *k, uint64_t *seed)
{
    struct baton_engine *en = open_engine(m, BATON_BOTH, device, 1, CTX, test_range(seed, 1, 300),
                                          NULL);
    uint64_t queries = 0, hits = 0;
    for (int i = 0; i < KNOWN; i++) {
        const struct baton_request_options o = ask(&k[i], OUTPUT);
        struct baton_request *r = rig_submit(en, &o);
        pull_equal(r, &k[i], baton_model_vocab(m), "in turn");
        struct baton_stats s = rig_stats(r);
        assert_int_equal(s.prefilled_tokens, k[i].n);
        assert_true(s.cached_tokens < k[i].n && s.cached_tokens % KV_BLOCK == 0);
        if (strcmp(baton_model_arch(m), "Gemma3ForCausalLM") != 0)
            assert_true(i == 0 ? s.cached_tokens == 0 : s.cached_tokens >= k[i].hit);
        queries += k[i].n;
        hits += s.cached_tokens;
        baton_request_close(r);
        assert_int_equal(engine_blocks_used(en), 0);
    }
    assert_true(hits > 0);
    assert_true(load_of(en).blocks_cached > 0);
    assert_int_equal(load_of(en).prefix_queries, queries);
    assert_int_equal(load_of(en).prefix_hits, hits);
    baton_engine_close(en);
}

/* Several lanes, in any order, some given up in the middle. */
static void side_by_side(struct baton_model *m, const char *device, struct known *k, uint64_t *seed)
{
    enum { MANY = 10 };
    struct baton_engine *en = open_engine(m, BATON_BOTH, device, test_range(seed, 2, 4), CTX,
                                          test_range(seed, 1, 300), NULL);
    struct baton_request *r[MANY];
    uint32_t which[MANY];
    for (int i = 0; i < MANY; i++) {
        which[i] = test_range(seed, 0, KNOWN - 1);
        const struct baton_request_options o = ask(&k[which[i]], OUTPUT);
        r[i] = rig_submit(en, &o);
        if (i % 5 == 4) { /* it may be anywhere: waiting, in its prefill, over */
            baton_cancel(r[i]);
            baton_request_close(r[i]);
            r[i] = NULL;
        }
    }
    for (int i = 0; i < MANY; i++)
        if (r[i])
            pull_equal(r[i], &k[which[i]], baton_model_vocab(m), "side by side");
    for (int i = 0; i < MANY; i++)
        baton_request_close(r[i]);
    assert_int_equal(engine_blocks_used(en), 0);
    baton_engine_close(en);
}

static void test_same_bits(void **state)
{
    (void)state;
    static struct known k[KNOWN];
    uint64_t seed = test_seed();
    const char *device = rig_device();
    for (int i = 0; i < RIG_MODELS; i += RIG_SHORT ? RIG_MODELS - 1 : 1) {
        struct baton_model *m = rig_model(rig_models[i]);
        prepare(m, device, k, &seed);
        in_turn(m, device, k, &seed);
        side_by_side(m, device, k, &seed);
        for (int j = 0; j < KNOWN; j++)
            rig_run_free(&k[j].alone);
        baton_model_close(m);
    }
}

/* A window that slid far past a prefix: its local pages are in the way of nothing, and a hit is
 * taken only where those that it needs are still there. */
static void test_window(void **state)
{
    (void)state;
    static struct known k[2];
    uint64_t seed = test_seed();
    const char *device = rig_device();
    struct baton_model *m = rig_model("gemma3-tiny");
    uint32_t vocab = baton_model_vocab(m);
    struct known nothing = {.n = 0};
    vary(&k[0], &nothing, 0, 960, vocab, &seed);
    vary(&k[1], &k[0], 600, 700, vocab, &seed);
    for (int i = 0; i < 2; i++) {
        const struct baton_request_options o = ask(&k[i], OUTPUT);
        rig_alone(m, device, CTX, 0, &o, &k[i].alone);
    }
    for (uint32_t chunk = 128; chunk <= 512; chunk *= 4) {
        struct baton_engine *en = open_engine(m, BATON_BOTH, device, 2, CTX, chunk, NULL);
        for (int i = 0; i < 3; i++) {
            const struct known *it = &k[i % 2];
            const struct baton_request_options o = ask(it, OUTPUT);
            struct baton_request *r = rig_submit(en, &o);
            pull_equal(r, it, vocab, "beyond the window");
            /* the pages of the first that the second needs, [65, 576), slid out and were kept */
            print_message("chunk %u, %u tokens: %u found\n", chunk, it->n,
                          rig_stats(r).cached_tokens);
            if (i == 1 && chunk == 512)
                assert_int_equal(rig_stats(r).cached_tokens, 576);
            baton_request_close(r);
        }
        assert_int_equal(engine_blocks_used(en), 0);
        baton_engine_close(en);
    }
    rig_run_free(&k[0].alone);
    rig_run_free(&k[1].alone);
    baton_model_close(m);
}

/* More prompts than there is room for: those unused for longest give way, and nothing fails. */
static void test_room(void **state)
{
    (void)state;
    static struct known k[12];
    uint64_t seed = test_seed();
    struct baton_model *m = rig_model("qwen3-tiny");
    uint32_t vocab = baton_model_vocab(m);
    struct baton_engine *en = open_engine(m, BATON_BOTH, rig_device(), 2, 256, 0, NULL);
    struct known nothing = {.n = 0};
    struct baton_error e;
    struct rig_run run;
    uint32_t last = 0;
    for (int i = 0; i < 36; i++) {
        if (i < 12)
            vary(&k[i], &nothing, 0, 200, vocab, &seed);
        const struct baton_request_options o = ask(&k[i < 12 ? i : (i - 12) / 2], 1);
        struct baton_request *r = rig_submit(en, &o);
        test_ok(rig_pull(r, &run, vocab, &e), &e);
        last = rig_stats(r).cached_tokens;
        if (i >= 12 && i % 2) /* again, at once */
            assert_int_equal(last, 192);
        else
            assert_int_equal(last, 0);
        rig_run_free(&run);
        baton_request_close(r);
        const struct engine_load l = load_of(en);
        assert_int_equal(l.blocks_used, 0);
        assert_true(l.blocks_cached <= l.blocks);
    }
    baton_engine_close(en);
    baton_model_close(m);
}

/* A producer begins with what it knows, whole and stream; what arrives is what a native run has. */
static void test_producer(void **state)
{
    (void)state;
    static struct known k[KNOWN];
    static const char *const models[] = {"qwen3-small", "gemma3-tiny"};
    uint64_t seed = test_seed();
    const char *device = rig_device();
    for (int i = RIG_SHORT; i < 2; i++) {
        struct baton_model *m = rig_model(models[i]);
        struct baton_link *a, *b;
        struct baton_error e;
        uint64_t hits = 0;
        prepare(m, device, k, &seed);
        test_ok(baton_link_pair(&a, &b, &e), &e);
        struct baton_engine *producer = open_engine(m, BATON_PRODUCER, device, 2, CTX, 0, a);
        struct baton_engine *consumer = open_engine(m, BATON_CONSUMER, device, 2, CTX, 0, b);
        for (int j = 0; j < 2 * KNOWN; j++) {
            struct baton_request_options o = ask(&k[j % KNOWN], OUTPUT);
            o.request_id = (uint64_t)j + 1;
            o.mode = j % 2 ? BATON_STREAM : BATON_WHOLE;
            struct baton_request *p = rig_submit(producer, &o), *c = rig_submit(consumer, &o);
            struct rig_run none;
            pull_equal(c, &k[j % KNOWN], baton_model_vocab(m), "from a producer");
            assert_string_equal(rig_stats(c).verdict, "verified");
            test_ok(rig_pull(p, &none, baton_model_vocab(m), &e), &e);
            hits += rig_stats(p).cached_tokens;
            baton_request_close(c);
            baton_request_close(p);
        }
        assert_true(hits > 0);
        assert_int_equal(engine_blocks_used(producer), 0);
        assert_int_equal(engine_blocks_used(consumer), 0);
        baton_engine_close(producer);
        baton_engine_close(consumer);
        for (int j = 0; j < KNOWN; j++)
            rig_run_free(&k[j].alone);
        baton_model_close(m);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_window),
        cmocka_unit_test(test_room),
        cmocka_unit_test(test_producer),
    };
    return cmocka_run_group_tests_name("engine: prefixes", tests, NULL, NULL);
}
