/* SPDX-License-Identifier: Apache-2.0 */
/* Consumers written by hand that lie, and random frames and bytes in every state. */
#include "scene.h"

/* ---- hostile consumers ---------------------------------------------------------------------- */

static void producer_open_with(struct scene *s, size_t capacity)
{
    struct baton_error e;
    struct handoff_offer o;
    static const int32_t ids[N] = {1, 2, 3, 4, 5};
    struct truth t;
    scene_open_with(s, true, capacity);
    truth_open(&t, &s->g, N, &seed);
    cache_prefill(&s->cache[0], &t);
    truth_close(&t);
    offer_fill(&o, 0, &s->g, ids, N, true);
    test_ok(handoff_offer(s->me.conn, &o, &e), &e);
    s->me.offers[0] = 1; /* for dies() */
    queue_all(s->me.conn, 0, &s->cache[0], N);
    wire_hello(&s->w, 1, 1, 2, 1000000000u, 10000000000u);
    scene_send(s);
    assert_true(scene_heard(s, W_OFFER));
}

static void producer_open(struct scene *s)
{
    producer_open_with(s, 8u << 20);
}

static void committed(struct scene *s)
{
    struct baton_error e;
    const struct handoff_commit m = {.argmax = 1, .margin = 2};
    producer_open(s);
    wire_reserve(&s->w, 0, 0, false);
    test_ok(handoff_commit(s->me.conn, 0, &m, &e), &e);
    scene_send(s);
    assert_true(scene_heard(s, W_COMMIT));
}

static void test_hostile_consumers(void **state)
{
    struct scene s;
    uint8_t b[96] = {0}, nack[264] = {0};
    producer_open(&s);
    wire_reserve(&s.w, 0, N, false);
    dies(&s, BATON_ERR_PEER, "5 positions held of 5");
    producer_open(&s);
    wire_reserve(&s.w, 0, UINT32_MAX, false);
    dies(&s, BATON_ERR_PEER, "RESERVE");
    producer_open(&s);
    wire_reserve(&s.w, 1, 0, false);
    dies(&s, BATON_ERR_PEER, "unknown request 1");
    producer_open(&s);
    wire_reserve(&s.w, 0, 0, false);
    wire_reserve(&s.w, 0, 0, false);
    dies(&s, BATON_ERR_PEER, "RESERVE of request 0");
    producer_open(&s);
    b[95] = 1;
    wire_frame(&s.w, W_RESERVE, 0, b, 96, NULL, 0, false);
    dies(&s, BATON_ERR_PEER, "fields that version 1 does not have");
    producer_open(&s);
    wire_frame(&s.w, W_ACK, 0, b, 32, NULL, 0, false);
    dies(&s, BATON_ERR_PEER, "ACK of request 0 before all was sent");
    producer_open(&s);
    wire_frame(&s.w, W_NACK, 0, nack, 264, NULL, 0, false);
    dies(&s, BATON_ERR_PEER, "NACK of request 0 before RESERVE");
    producer_open(&s);
    wire_reserve(&s.w, 0, 0, false);
    wire_reason(&s.w, W_REFUSE, 0, -10, "no");
    dies(&s, BATON_ERR_PEER, "REFUSE of request 0 after RESERVE");
    producer_open(&s);
    wire_offer(&s.w, 0, N, false);
    dies(&s, BATON_ERR_PEER, "OFFER from a consumer");
    committed(&s); /* an ACK for something else than what was sent */
    wire_frame(&s.w, W_ACK, 0, b, 32, NULL, 0, false);
    scene_send(&s);
    assert_int_equal(s.me.rc, 0);
    assert_int_equal(s.me.ends[0], 1);
    assert_int_equal(s.me.why[0].code, BATON_ERR_INTEGRITY);
    scene_close(&s);
    committed(&s);
    w_u32(nack, 3);
    w_u32(nack + 8, (uint32_t)BATON_ERR_INTEGRITY);
    memcpy(nack + 12, "layer 1 V: digest differs", 25);
    wire_frame(&s.w, W_NACK, 0, nack, 264, NULL, 0, false);
    scene_send(&s);
    assert_int_equal(s.me.ends[0], 1);
    assert_int_equal(s.me.why[0].code, BATON_ERR_INTEGRITY);
    assert_string_equal(s.me.why[0].text, "layer 1 V: digest differs");
    assert_true(scene_heard(&s, W_CLOSE));
    scene_close(&s);
}

/* COMMIT was read, but not yet the row of logits that it announces: too early for an ACK. */
static void test_early_ack(void **state)
{
    struct scene s;
    struct baton_error e;
    const uint8_t digest[32] = {0};
    float *row = calloc(2000, sizeof *row);
    const struct handoff_commit m = {.argmax = 1, .margin = 2, .logits = row, .vocab = 2000};
    producer_open_with(&s, 4096);
    wire_reserve(&s.w, 0, 0, true);
    test_ok(handoff_commit(s.me.conn, 0, &m, &e), &e);
    scene_send(&s);
    wire_frame(&s.w, W_ACK, 0, digest, 32, NULL, 0, false);
    scene_send(&s);
    assert_int_equal(s.me.rc, BATON_ERR_PEER);
    assert_non_null(strstr(s.me.death.text, "ACK of request 0 before all was sent"));
    assert_int_equal(s.me.ends[0], 1);
    scene_close(&s);
    free(row);
}

/* ---- noise ---------------------------------------------------------------------------------- */

/* Random frames, right in form, with bodies that are near the truth: in any order, in any state. */
static void noise_frame(struct scene *s, bool to_consumer)
{
    static const uint8_t from_p[] = {W_OFFER, W_LAYER, W_COMMIT,   W_LOGITS,
                                     W_ABORT, W_CLOSE, W_HEARTBEAT};
    static const uint8_t from_c[] = {W_RESERVE, W_REFUSE, W_ACK, W_NACK, W_ABORT, W_CLOSE};
    uint8_t type = to_consumer ? from_p[test_range(&seed, 0, 6)] : from_c[test_range(&seed, 0, 5)];
    uint64_t id = s->fresh - test_range(&seed, 0, 20) / 10; /* the newest, most often */
    uint8_t b[400] = {0}, rows[64] = {0};
    static const uint32_t sizes[] = {0, 96, 0, 256, 0, 96, 256, 32, 288, 16, 32, 264, 256, 0};
    uint32_t n = type == W_OFFER ? wire_offer_body(b, N, false) : sizes[type];
    uint32_t payload = type == W_LAYER ? 20 : type == W_LOGITS ? 4 : 0;
    if (type == W_LAYER) {
        uint32_t layer = test_range(&seed, 0, 1);
        wire_layer_body(b, layer, test_range(&seed, 0, 1), layer ? 3 : 0, layer ? 2 : 5);
        payload = layer ? 8 : 20;
    }
    if (type == W_COMMIT)
        wire_commit_body(b, N);
    if (type == W_RESERVE)
        w_u32(w_u32(b, test_range(&seed, 0, 5)), test_range(&seed, 0, 1));
    if (n && !test_range(&seed, 0, 5))
        b[test_range(&seed, 0, n - 1)] ^= (uint8_t)(1u << test_range(&seed, 0, 7));
    uint8_t *h = wire_frame(&s->w, type, type == W_HEARTBEAT ? 0 : id, b, n, rows, payload,
                            payload && test_range(&seed, 0, 3));
    if (!test_range(&seed, 0, 60))
        patched(h, test_range(&seed, 4, 39), 1, test_random(&seed));
}

/* The start of an honest request now and then, so that late states are met. */
static void noise_request(struct scene *s)
{
    uint64_t id = ++s->fresh;
    uint32_t n = test_range(&seed, 0, 4);
    wire_offer(&s->w, id, N, false);
    if (n > 1)
        honest(s, id);
    if (n > 2)
        wire_commit(&s->w, id, N);
}

static void owner_noise(struct scene *s)
{
    struct baton_error e;
    uint64_t id = s->fresh - test_range(&seed, 0, 1);
    const struct baton_kv_view *v = kv_seq_views(s->cache[id % RIG_IDS].seq);
    switch (test_range(&seed, 0, 5)) {
    case 0:
        handoff_abort(s->me.conn, id, NULL);
        break;
    case 1:
        handoff_reserve(s->me.conn, id, v, 0, test_range(&seed, 0, 1), &e);
        break;
    case 2:
        base_fail(&e, BATON_ERR_BUSY, "no");
        handoff_refuse(s->me.conn, id, &e, NULL);
        break;
    case 3: {
        const struct handoff_commit m = {.argmax = 1, .margin = 2};
        handoff_commit(s->me.conn, id, &m, &e);
        break;
    }
    case 4:
        handoff_layer(s->me.conn, id, test_range(&seed, 0, 1), v, 0, N, &e);
        break;
    default: {
        struct handoff_offer o;
        static const int32_t ids[N] = {1, 2, 3, 4, 5};
        offer_fill(&o, ++s->fresh, &s->g, ids, N, test_range(&seed, 0, 1));
        handoff_offer(s->me.conn, &o, &e);
    }
    }
}

static void test_noise(void **state)
{
    uint64_t frames = 0;
    for (int round = 0; round < 300; round++) {
        struct scene s;
        bool producer = round % 2;
        scene_open(&s, producer);
        for (int i = 0; i < RIG_IDS; i++) {
            struct baton_error e;
            if (producer) {
                test_ok(kv_seq_reserve(s.cache[i].seq, N, &e), &e);
                kv_seq_advance(s.cache[i].seq, N);
            } else {
                cache_import(&s.cache[i], N);
            }
        }
        s.me.answer = test_range(&seed, 0, 5) ? RIG_RESERVE
                                              : test_range(&seed, RIG_WAIT, RIG_REFUSE);
        s.fresh = 1;
        wire_hello(&s.w, 1, 1, producer ? 2 : 1, 1000000000u, 10000000000u);
        scene_send(&s);
        for (int i = 0; i < 40 && !s.me.rc; i++) {
            uint8_t sink[4096];
            if (!producer && test_range(&seed, 0, 1))
                noise_request(&s);
            else
                noise_frame(&s, !producer);
            for (uint32_t k = test_range(&seed, 0, producer ? 4 : 1); k; k--)
                owner_noise(&s);
            memset(s.me.ends, 0, sizeof s.me.ends); /* ids come again: counts mean nothing here */
            scene_send(&s);
            frames += s.me.rc == 0;
            while (scene_read(&s, sink, sizeof sink))
                ;
        }
        scene_close(&s);
    }
    print_message("%d frames survived\n", (int)frames);
}

/* Bytes without any form, from the first on and after HELLO. */
static void test_garbage(void **state)
{
    for (int round = 0; round < 400; round++) {
        struct scene s;
        scene_open(&s, round % 2);
        if (round % 4 > 1) {
            wire_hello(&s.w, 1, 1, round % 2 ? 2 : 1, 1000000000u, 10000000000u);
            scene_send(&s);
        }
        for (size_t i = 0; i < 200; i++)
            s.w.data[i] = (uint8_t)(test_random(&seed) >> 40);
        if (round % 3)
            memcpy(s.w.data, "BATN", 4);
        s.w.n = 200;
        scene_send(&s);
        assert_true(s.me.rc == BATON_ERR_PEER || s.me.rc == BATON_ERR_INTEGRITY);
        scene_close(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hostile_consumers),
        cmocka_unit_test(test_early_ack),
        cmocka_unit_test(test_noise),
        cmocka_unit_test(test_garbage),
    };
    seed = test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
