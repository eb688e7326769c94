/* SPDX-License-Identifier: Apache-2.0 */
/* Producers written by hand that lie, forget and repeat: each request, or the connection, ends with
 * an error that says so. */
#include "scene.h"

/* The hand-written producer is a good one where it wants to: the format is as documented. */
static void test_second_implementation(void **state)
{
    struct scene s;
    struct kv_digest *d;
    struct baton_error e;
    uint8_t rows[20], b[288], sum[32 * 4] = {0};
    consumer_open(&s);
    wire_offer(&s.w, 0, N, false);
    scene_send(&s);
    assert_true(scene_heard(&s, W_RESERVE));
    honest(&s, 0);
    wire_commit(&s.w, 0, N);
    scene_send(&s);
    assert_int_equal(s.me.commits[0], 1);
    assert_int_equal(s.me.ends[0], 1);
    assert_int_equal(s.me.why[0].code, 0);
    assert_int_equal(s.me.result[0].commit.argmax, 9);
    assert_true(scene_heard(&s, W_ACK));
    wire_frame(&s.w, W_CLOSE, 0, NULL, 0, NULL, 0, false);
    /* with digests: those of kv over the same rows */
    wire_offer(&s.w, 1, N, true);
    honest(&s, 1);
    wire_commit_body(b, N);
    for (uint32_t slot = 0; slot < 4; slot++) {
        struct baton_kv_layout layout;
        uint32_t first = slot < 2 ? 0 : 3;
        memset(rows, (int)slot + 1, sizeof rows);
        struct baton_kv_view v = kv_dense_view(&layout, BATON_BF16, 1, 2, rows, rows, first,
                                               N - first);
        test_ok(kv_digest_open(&d, slot / 2, slot % 2, BATON_BF16, 1, 2, first, N - first, &e), &e);
        test_ok(kv_digest_update(d, &v, first, N - first, &e), &e);
        test_ok(kv_digest_final(d, sum + 32 * slot, &e), &e);
        memcpy(b + 128 + 40 * slot + 8, sum + 32 * slot, 32);
        kv_digest_close(d);
    }
    base_sha256(sum, sizeof sum, b + 48);
    wire_frame(&s.w, W_COMMIT, 1, b, 288, NULL, 0, false);
    scene_send(&s);
    assert_int_equal(s.me.commits[1], 1);
    assert_int_equal(s.me.why[1].code, 0);
    assert_memory_equal(s.me.result[1].digest, b + 48, 32);
    scene_close(&s);
}

/* One request that goes wrong in the middle; a second on the same connection is undisturbed. */
static void nacked(struct scene *s, const char *word)
{
    scene_send(s);
    if (s->me.rc || s->me.ends[0] != 1 || s->me.commits[0] ||
        s->me.why[0].code != BATON_ERR_INTEGRITY || !strstr(s->me.why[0].text, word))
        fail_msg("dead %d '%s', ended %d with '%s', wanted '%s'", s->me.rc, s->me.death.text,
                 s->me.ends[0], s->me.why[0].text, word);
    assert_true(scene_heard(s, W_NACK));
    /* in flight when the NACK left: ignored */
    wire_layer(&s->w, 0, 1, 1, 3, 2, 9);
    wire_commit(&s->w, 0, N);
    wire_frame(&s->w, W_CLOSE, 0, NULL, 0, NULL, 0, false);
    wire_offer(&s->w, 1, N, false);
    honest(s, 1);
    wire_commit(&s->w, 1, N);
    scene_send(s);
    assert_int_equal(s->me.rc, 0);
    assert_int_equal(s->me.ends[0], 1);
    assert_int_equal(s->me.commits[1], 1);
    scene_close(s);
}

static void test_wrong_pieces(void **state)
{
    struct scene s;
    uint8_t b[32], rows[1024] = {0};
    reserved(&s);
    wire_layer(&s.w, 0, 2, 0, 0, 5, 1);
    nacked(&s, "layer 2");
    reserved(&s);
    wire_layer(&s.w, 0, UINT32_MAX, 0, 0, 5, 1);
    nacked(&s, "layer 4294967295");
    reserved(&s);
    wire_layer(&s.w, 0, 0, 2, 0, 5, 1);
    nacked(&s, "slot kind 2");
    reserved(&s);
    wire_layer(&s.w, 0, 0, 0, 0, 4, 1);
    nacked(&s, "layer 0 K: piece ends inside");
    reserved(&s);
    wire_layer(&s.w, 0, 0, 0, 0, 6, 1);
    nacked(&s, "layer 0 K: 6 positions from 0");
    reserved(&s);
    wire_layer(&s.w, 0, 0, 1, 1, 4, 1);
    nacked(&s, "layer 0 V: 4 positions from 1");
    reserved(&s);
    wire_layer(&s.w, 0, 1, 0, 2, 3, 1);
    nacked(&s, "layer 1 K: 3 positions from 2");
    reserved(&s);
    wire_layer(&s.w, 0, 1, 0, 0, 5, 1);
    nacked(&s, "layer 1 K: 5 positions from 0");
    reserved(&s);
    wire_layer(&s.w, 0, 0, 0, 0, 5, 1);
    wire_layer(&s.w, 0, 0, 0, 0, 5, 1);
    nacked(&s, "5 positions from 0 where [5, 5) is due");
    reserved(&s);
    wire_layer(&s.w, 0, 0, 0, UINT32_MAX, 1, 1);
    nacked(&s, "positions from 42949");
    reserved(&s);
    wire_layer_body(b, 0, 0, 0, UINT32_MAX);
    wire_frame(&s.w, W_LAYER, 0, b, 32, rows, 20, true);
    nacked(&s, "4294967295 positions from 0");
    reserved(&s);
    wire_layer_body(b, 0, 0, 0, 0);
    wire_frame(&s.w, W_LAYER, 0, b, 32, rows, 20, true);
    nacked(&s, "0 positions from 0");
    reserved(&s);
    wire_layer_body(b, 0, 0, 0, 5);
    wire_frame(&s.w, W_LAYER, 0, b, 32, rows, 21, true);
    nacked(&s, "21 bytes for 5 positions");
    reserved(&s);
    wire_frame(&s.w, W_LAYER, 0, b, 32, rows, 20, false);
    nacked(&s, "neither digest nor check");
    reserved(&s);
    w_u32(b + 16, BATON_F32);
    wire_frame(&s.w, W_LAYER, 0, b, 32, rows, 20, true);
    nacked(&s, "dtype 1");
}

static void bad_commit(size_t at, uint32_t value, const char *word)
{
    struct scene s;
    uint8_t b[288];
    reserved(&s);
    honest(&s, 0);
    wire_commit_body(b, N);
    w_u32(b + at, value);
    wire_frame(&s.w, W_COMMIT, 0, b, 288, NULL, 0, false);
    nacked(&s, word);
}

static void test_wrong_commits(void **state)
{
    struct scene s;
    uint8_t b[288];
    reserved(&s);
    wire_commit(&s.w, 0, N);
    nacked(&s, "layer 0 K: positions [0, 5) are missing");
    reserved(&s);
    wire_layer(&s.w, 0, 0, 0, 0, 5, 1);
    wire_layer(&s.w, 0, 0, 1, 0, 5, 2);
    wire_layer(&s.w, 0, 1, 1, 3, 2, 4);
    wire_commit(&s.w, 0, N);
    nacked(&s, "layer 1 K: positions [3, 5) are missing");
    bad_commit(128, 1, "layer 0 K: committed are positions 1 to 4, 0 to 4 were due");
    bad_commit(128 + 4 + 40, 3, "layer 0 V: committed are positions 0 to 3");
    bad_commit(128 + 80, 2, "layer 1 K: committed are positions 2 to 4, 3 to 4 were due");
    bad_commit(128 + 8, 1, "layer 0 K: digest differs");
    bad_commit(40, 5, "COMMIT of 5 pieces");
    bad_commit(32, 1, "1 bytes");
    bad_commit(48, 1, "digest over all slots");
    reserved(&s);
    honest(&s, 0);
    wire_commit_body(b, N);
    w_u32(b, 3);
    wire_frame(&s.w, W_COMMIT, 0, b, 248, NULL, 0, false);
    nacked(&s, "COMMIT of 3 slots");
    reserved(&s);
    honest(&s, 0);
    wire_commit_body(b, N);
    w_u32(b + 4, 1);
    w_u32(b + 44, 100);
    wire_frame(&s.w, W_COMMIT, 0, b, 288, NULL, 0, false);
    nacked(&s, "COMMIT with a logits row, which was not wanted");
}

static void commit_dies(size_t at, uint32_t value)
{
    struct scene s;
    uint8_t b[288];
    reserved(&s);
    honest(&s, 0);
    wire_commit_body(b, N);
    w_u32(b + at, value);
    wire_frame(&s.w, W_COMMIT, 0, b, 288, NULL, 0, false);
    dies(&s, BATON_ERR_PEER, "COMMIT");
}

static void test_malformed_commits(void **state)
{
    commit_dies(0, 3);            /* slots against size */
    commit_dies(4, 2);            /* flags */
    commit_dies(8, (uint32_t)-1); /* argmax */
    commit_dies(12, 0x7fc00000u); /* margin: NaN */
    commit_dies(12, 0xbf800000u); /* margin: -1 */
    commit_dies(44, 10);          /* vocab without logits */
    commit_dies(112, 1);          /* reserved */
}

static void logits_case(uint32_t first, uint32_t count, uint32_t bytes, bool check,
                        const char *word)
{
    struct scene s;
    uint8_t b[288], l[16] = {0}, row[400] = {0};
    consumer_open(&s);
    s.me.want_logits = true;
    wire_offer(&s.w, 0, N, false);
    scene_send(&s);
    honest(&s, 0);
    wire_commit_body(b, N);
    w_u32(b + 4, 1);
    w_u32(b + 44, 20);
    wire_frame(&s.w, W_COMMIT, 0, b, 288, NULL, 0, false);
    scene_send(&s);
    assert_int_equal(s.me.commits[0], 0); /* not before the row is there */
    assert_int_equal(s.me.rc, 0);
    w_u32(w_u32(l, first), count);
    wire_frame(&s.w, W_LOGITS, 0, l, 16, row, bytes, check);
    if (word) {
        s.me.want_logits = false; /* for the second request of nacked() */
        nacked(&s, word);
        return;
    }
    scene_send(&s);
    assert_int_equal(s.me.commits[0], 1);
    scene_close(&s);
}

static void test_logits(void **state)
{
    logits_case(0, 20, 80, true, NULL);
    logits_case(0, 20, 80, false, "logits row");
    logits_case(0, 21, 84, true, "logits row: 21 from 0");
    logits_case(1, 19, 76, true, "logits row: 19 from 1");
    logits_case(0, 20, 76, true, "in 76 bytes");
    logits_case(0, 0, 80, true, "logits row: 0 from 0");
    logits_case(0, UINT32_MAX, 80, true, "logits row");
}

static void offer_case(size_t at, uint32_t value, const char *word)
{
    struct scene s;
    uint8_t b[1024];
    consumer_open(&s);
    uint32_t n = wire_offer_body(b, N, false);
    w_u32(b + at, value);
    wire_frame(&s.w, W_OFFER, 0, b, n, NULL, 0, false);
    dies(&s, BATON_ERR_PEER, word);
}

static void test_hostile_offers(void **state)
{
    offer_case(128, 0, "OFFER of 0 layers");
    offer_case(128, 513, "OFFER of 513 layers");
    offer_case(128, 3, "OFFER of 3 layers");
    offer_case(128, UINT32_MAX, "OFFER of 4294967295 layers");
    offer_case(132, 0, "0 KV heads");
    offer_case(132, UINT32_MAX, "4294967295 KV heads");
    offer_case(132, 16385, "16385 KV heads");
    offer_case(136, 0, "of 0 elements");
    offer_case(136, UINT32_MAX, "of 4294967295 elements");
    offer_case(140, 0, "KV dtype 0");
    offer_case(140, BATON_I8, "KV dtype 4");
    offer_case(144, 1, "window 1");
    offer_case(144, 0, "window 0");
    offer_case(148, 0, "0 ids");
    offer_case(148, 4, "4 ids");
    offer_case(148, UINT32_MAX, "4294967295 ids");
    offer_case(156, 8, "fields that version 1 does not have");
    offer_case(156, 4, "OFFER of 2 layers and 5 ids in 244 bytes"); /* where is the ticket? */
    offer_case(160, 1, "fields that version 1 does not have");
    offer_case(188, 1, "fields that version 1 does not have");
    offer_case(192, 2, "layer 0 of kind 2");
    offer_case(192 + 12, 1, "layer 0 of kind");
    offer_case(224, 0x80000000u, "token id -2147483648");
}

/* A layer table that disagrees with the window: refused, and the owner never hears of it. */
static void test_offer_table(void **state)
{
    const struct {
        size_t at;
        uint32_t value;
    } cases[] = {{196, 1}, {200, 4}, {212, 2}, {212, 4}, {216, 3}, {216, UINT32_MAX}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct scene s;
        uint8_t b[1024];
        consumer_open(&s);
        uint32_t n = wire_offer_body(b, N, false);
        w_u32(b + cases[i].at, cases[i].value);
        wire_frame(&s.w, W_OFFER, 0, b, n, NULL, 0, false);
        scene_send(&s);
        assert_int_equal(s.me.rc, 0);
        assert_int_equal(s.me.offers[0] + s.me.ends[0], 0);
        assert_true(scene_heard(&s, W_REFUSE));
        wire_frame(&s.w, W_CLOSE, 0, NULL, 0, NULL, 0, false);
        wire_offer(&s.w, 0, N, false);
        scene_send(&s);
        assert_int_equal(s.me.offers[0], 1);
        scene_close(&s);
    }
}

static void test_out_of_turn(void **state)
{
    struct scene s;
    consumer_open(&s);
    s.me.answer = RIG_WAIT;
    wire_offer(&s.w, 0, N, false);
    honest(&s, 0);
    dies(&s, BATON_ERR_PEER, "LAYER for request 0, which is not answered yet");
    consumer_open(&s);
    s.me.answer = RIG_WAIT;
    wire_offer(&s.w, 0, N, false);
    wire_commit(&s.w, 0, N);
    dies(&s, BATON_ERR_PEER, "COMMIT for request 0, which is not answered yet");
    reserved(&s);
    wire_offer(&s.w, 0, N, false);
    dies(&s, BATON_ERR_PEER, "OFFER of request 0, which is open");
    reserved(&s);
    wire_frame(&s.w, W_CLOSE, 0, NULL, 0, NULL, 0, false);
    dies(&s, BATON_ERR_PEER, "CLOSE for request 0, which is open");
    reserved(&s);
    uint8_t l[16] = {0}, row[4] = {0};
    w_u32(l + 4, 1);
    wire_frame(&s.w, W_LOGITS, 0, l, 16, row, 4, true);
    dies(&s, BATON_ERR_PEER, "LOGITS for request 0, which is not committed yet");
    reserved(&s);
    hello(&s);
    dies(&s, BATON_ERR_PEER, "second HELLO");
    consumer_open(&s);
    wire_layer(&s.w, 3, 0, 0, 0, 5, 1);
    dies(&s, BATON_ERR_PEER, "LAYER for unknown request 3");
    /* after both final frames the id means nothing any more */
    reserved(&s);
    honest(&s, 0);
    wire_commit(&s.w, 0, N);
    wire_frame(&s.w, W_CLOSE, 0, NULL, 0, NULL, 0, false);
    scene_send(&s);
    assert_int_equal(s.me.commits[0], 1);
    wire_layer(&s.w, 0, 0, 0, 0, 5, 1);
    dies(&s, BATON_ERR_PEER, "LAYER for unknown request 0");
    /* requests without end */
    scene_open(&s, false);
    s.me.answer = RIG_WAIT;
    hello(&s);
    uint8_t b[1024];
    uint32_t n = wire_offer_body(b, N, false);
    w_u32(b + 196, 1); /* refused for its table, and never closed */
    for (uint32_t i = 0; i <= HANDOFF_MAX_REQUESTS; i++)
        wire_frame(&s.w, W_OFFER, 100 + i, b, n, NULL, 0, false);
    dies(&s, BATON_ERR_PEER, "more than 1024 requests");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_second_implementation),
        cmocka_unit_test(test_wrong_pieces),
        cmocka_unit_test(test_wrong_commits),
        cmocka_unit_test(test_malformed_commits),
        cmocka_unit_test(test_logits),
        cmocka_unit_test(test_hostile_offers),
        cmocka_unit_test(test_offer_table),
        cmocka_unit_test(test_out_of_turn),
    };
    seed = test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
