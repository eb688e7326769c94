/* SPDX-License-Identifier: Apache-2.0 */
/* Frames that end a connection: headers, HELLO, reasons, peers that do not read. */
#include "scene.h"

static void header_case(size_t at, size_t n, uint64_t value, int code, const char *word)
{
    struct scene s;
    reserved(&s);
    patched(wire_layer(&s.w, 0, 0, 0, 0, 5, 1), at, n, value);
    dies(&s, code, word);
}

static void test_hostile_headers(void **state)
{
    struct scene s;
    header_case(4, 2, 2, BATON_ERR_MISMATCH, "wire version 2");
    header_case(6, 1, 0, BATON_ERR_PEER, "unknown type 0");
    header_case(6, 1, 18, BATON_ERR_PEER, "unknown type 18");
    header_case(6, 1, W_ASK, BATON_ERR_PEER, "ASK from a producer");
    header_case(6, 1, W_CLAIM, BATON_ERR_PEER, "CLAIM from a producer");
    header_case(6, 1, W_LANDING, BATON_ERR_PEER, "LANDING from a producer");
    header_case(6, 1, W_CREDIT, BATON_ERR_PEER, "CREDIT from a producer");
    header_case(6, 1, 255, BATON_ERR_PEER, "unknown type 255");
    header_case(6, 1, W_RESERVE, BATON_ERR_PEER, "RESERVE from a producer");
    header_case(6, 1, W_COMMIT, BATON_ERR_PEER, "COMMIT with a body of 32");
    header_case(7, 1, 4, BATON_ERR_PEER, "flags 0x04");
    header_case(7, 1, 2, BATON_ERR_PEER, "LAYER with a tag where none was agreed on");
    header_case(8, 4, UINT32_MAX, BATON_ERR_PEER, "body of 4294967295 bytes");
    header_case(8, 4, 0, BATON_ERR_PEER, "body of 0 bytes");
    header_case(12, 4, UINT32_MAX, BATON_ERR_PEER, "payload of 4294967295 bytes");
    header_case(12, 4, (4u << 20) + 1, BATON_ERR_PEER, "payload of 4194305 bytes");
    header_case(12, 4, 0, BATON_ERR_PEER, "LAYER with flags 0x01");
    header_case(16, 8, 77, BATON_ERR_PEER, "unknown request 77");
    header_case(24, 8, 1, BATON_ERR_PEER, "frame 1 (LAYER) where frame 2 was due");
    header_case(24, 8, 3, BATON_ERR_PEER, "frame 3 (LAYER) where frame 2 was due");
    header_case(32, 8, 3, BATON_ERR_INTEGRITY, "frame 2 (LAYER) does not match its check");
    reserved(&s);
    wire_layer(&s.w, 0, 0, 0, 0, 5, 1)[40] ^= 1;
    dies(&s, BATON_ERR_INTEGRITY, "header does not match");
    reserved(&s);
    memcpy(wire_layer(&s.w, 0, 0, 0, 0, 5, 1), "GET ", 4);
    dies(&s, BATON_ERR_PEER, "not a baton stream");
    reserved(&s);
    patched(wire_frame(&s.w, W_HEARTBEAT, 0, NULL, 0, NULL, 0, false), 16, 8, 1);
    dies(&s, BATON_ERR_PEER, "HEARTBEAT for a request");
    reserved(&s);
    uint8_t *big = calloc(5, 1u << 20);
    wire_frame(&s.w, W_OFFER, 2, big, 192 + 16 * 512 + (4u << 20) + 68, NULL, 0, false);
    free(big);
    dies(&s, BATON_ERR_PEER, "OFFER with a body of 4202756 bytes");
}

static void hello_case(uint32_t min, uint32_t max, uint32_t role, uint64_t heartbeat, int code,
                       const char *word)
{
    struct scene s;
    scene_open(&s, false);
    wire_hello(&s.w, min, max, role, heartbeat, 10000000000u);
    dies(&s, code, word);
}

static void test_hello(void **state)
{
    struct scene s;
    uint8_t b[96] = {0};
    hello_case(2, 3, 1, 1000, BATON_ERR_MISMATCH, "this end speaks 1, the peer 2 to 3");
    hello_case(0, 0, 1, 1000, BATON_ERR_MISMATCH, "this end speaks 1, the peer 0 to 0");
    hello_case(3, 2, 1, 1000, BATON_ERR_PEER, "versions 3 to 2");
    hello_case(1, 1, 2, 1000, BATON_ERR_MISMATCH, "the peer is a consumer too");
    hello_case(1, 1, 9, 1000, BATON_ERR_MISMATCH, "the peer is neither");
    hello_case(1, 1, 1, 10000000000u, BATON_ERR_MISMATCH, "heartbeats every");
    scene_open(&s, false);
    w_u32(w_u32(w_u32(b, 1 | 1 << 16), 1), 7);
    wire_frame(&s.w, W_HELLO, 0, b, 96, NULL, 0, false);
    dies(&s, BATON_ERR_UNSUPPORTED, "authentication 7");
    scene_open(&s, false);
    wire_offer(&s.w, 0, N, false);
    dies(&s, BATON_ERR_PEER, "OFFER before HELLO");
    scene_open(&s, false);
    wire_reason(&s.w, W_BYE, 0, BATON_ERR_MISMATCH, "too old");
    dies(&s, BATON_ERR_MISMATCH, "producer closed the connection: too old");
    /* later versions may say more behind the fields that are fixed */
    scene_open(&s, false);
    w_u64(w_u64(b + 16, 1000000000u), 10000000000u);
    w_u32(w_u16(w_u16(b, 1), 9), 1);
    memset(b + 8, 0, 4);
    memset(b + 64, 0xEE, 32);
    wire_frame(&s.w, W_HELLO, 0, b, 96, NULL, 0, false);
    scene_send(&s);
    assert_int_equal(s.me.rc, 0);
    scene_close(&s);
}

/* Reasons come from a stranger and go to logs and JSON. */
static void test_reasons(void **state)
{
    struct scene s;
    reserved(&s);
    wire_reason(&s.w, W_ABORT, 0, 12345, "a\x1b[31m\xff\xc3\xa9\xe2\x82 \xed\xa0\x80\n");
    scene_send(&s);
    assert_int_equal(s.me.ends[0], 1);
    assert_int_equal(s.me.why[0].code, BATON_ERR_PEER);
    assert_string_equal(s.me.why[0].text, "a?[31m?\xc3\xa9?? ????");
    scene_close(&s);
    reserved(&s);
    uint8_t b[256];
    memset(b, 'x', sizeof b); /* no end */
    w_u32(b, (uint32_t)BATON_ERR_NOMEM);
    wire_frame(&s.w, W_ABORT, 0, b, 256, NULL, 0, false);
    scene_send(&s);
    assert_int_equal(s.me.why[0].code, BATON_ERR_NOMEM);
    assert_int_equal(strlen(s.me.why[0].text), 251);
    scene_close(&s);
}

/* A producer that never reads what it is told is not waited for without bound. */
static void test_deaf_producer(void **state)
{
    struct scene s;
    uint8_t b[1024];
    scene_open(&s, false);
    hello(&s);
    uint32_t n = wire_offer_body(b, N, false);
    w_u32(b + 196, 1);
    for (int i = 0; i < 60000 && !s.me.rc; i++) {
        wire_frame(&s.w, W_OFFER, 1, b, n, NULL, 0, false);
        wire_frame(&s.w, W_CLOSE, 1, NULL, 0, NULL, 0, false);
        scene_send(&s);
    }
    assert_int_equal(s.me.rc, BATON_ERR_PEER);
    assert_non_null(strstr(s.me.death.text, "does not read"));
    scene_close(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hostile_headers),
        cmocka_unit_test(test_hello),
        cmocka_unit_test(test_reasons),
        cmocka_unit_test(test_deaf_producer),
    };
    seed = test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
