/* SPDX-License-Identifier: Apache-2.0 */
/* SHA-256 (FIPS 180-4 examples), HMAC (RFC 4231), hex, constant-time comparison, random bytes. */
#include "base/base.h"
#include "../test.h"

static void assert_hex(const uint8_t got[32], const char *want)
{
    char hex[65];
    base_hex(got, 32, hex);
    assert_string_equal(hex, want);
}

static void sha256_vectors(void **state)
{
    uint8_t d[32];
    base_sha256(NULL, 0, d);
    assert_hex(d, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    base_sha256("abc", 3, d);
    assert_hex(d, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    base_sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 56, d);
    assert_hex(d, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    char *million = malloc(1000000);
    memset(million, 'a', 1000000);
    base_sha256(million, 1000000, d);
    assert_hex(d, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    free(million);
}

static void streaming_equals_whole(void **state)
{
    uint64_t seed = test_seed();
    static uint8_t data[5000];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)test_random(&seed);
    for (int round = 0; round < 200; round++) {
        size_t n = test_range(&seed, 0, sizeof data), at = 0;
        uint8_t whole[32], pieces[32];
        struct base_sha256 s;
        memset(&s, 0xee, sizeof s);
        base_sha256(data, n, whole);
        base_sha256_init(&s);
        while (at < n) {
            size_t k = test_range(&seed, 0, 200);
            k = k < n - at ? k : n - at;
            base_sha256_update(&s, data + at, k);
            at += k;
        }
        base_sha256_final(&s, pieces);
        assert_memory_equal(whole, pieces, 32);
    }
}

static void hmac_vectors(void **state)
{
    uint8_t d[32], key[131];
    memset(key, 0x0b, 20);
    base_hmac(key, 20, "Hi There", 8, d);
    assert_hex(d, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    base_hmac("Jefe", 4, "what do ya want for nothing?", 28, d);
    assert_hex(d, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    memset(key, 0xaa, 131);
    base_hmac(key, 131, "Test Using Larger Than Block-Size Key - Hash Key First", 54, d);
    assert_hex(d, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    base_hmac(NULL, 0, NULL, 0, d);
    assert_hex(d, "b613679a0814d9ec772f95d778c35fc5ff1697c493715653c6c712144292c5ad");
}

/* In pieces, from copies of one key that was made ready. */
static void hmac_streams(void **state)
{
    uint8_t text[300], want[32], got[32];
    uint64_t seed = test_seed();
    struct base_hmac key;
    for (size_t i = 0; i < sizeof text; i++)
        text[i] = (uint8_t)(test_random(&seed) >> 32);
    base_hmac_init(&key, "Jefe", 4);
    for (size_t n = 0; n <= sizeof text; n += test_range(&seed, 1, 9)) {
        struct base_hmac h = key;
        size_t cut = test_range(&seed, 0, (uint32_t)n);
        base_hmac("Jefe", 4, text, n, want);
        base_hmac_update(&h, text, cut);
        base_hmac_update(&h, text + cut, n - cut);
        base_hmac_final(&h, got);
        assert_memory_equal(got, want, 32);
    }
}

static void secrets_compare(void **state)
{
    uint8_t a[40], b[40];
    uint64_t seed = test_seed();
    for (int i = 0; i < 40; i++)
        a[i] = b[i] = (uint8_t)test_random(&seed);
    assert_true(base_equal_secret(a, b, 40));
    assert_true(base_equal_secret(NULL, NULL, 0));
    for (int i = 0; i < 40; i++) {
        b[i] ^= 1;
        assert_false(base_equal_secret(a, b, 40));
        b[i] ^= 1;
    }
}

static void hex_both_ways(void **state)
{
    uint8_t in[9] = {0, 1, 0x7f, 0x80, 0xff, 0xab, 0xcd, 0x12, 0x90}, out[10];
    char hex[20];
    memset(hex, '#', sizeof hex);
    base_hex(in, 9, hex);
    assert_string_equal(hex, "00017f80ffabcd1290");
    assert_int_equal(hex[19], '#');
    memset(out, 0x77, sizeof out);
    assert_true(base_unhex(hex, out, 9));
    assert_memory_equal(in, out, 9);
    assert_int_equal(out[9], 0x77);
    assert_true(base_unhex("ABcd", out, 2));
    assert_int_equal(out[0], 0xab);
    assert_true(base_unhex("", out, 0));
    static const char *const bad[] = {"",     "a",    "abc",  "abcde",  "abcdef",
                                      "ag12", " bcd", "0x12", "ab\ncd", "a\xc3\xa9q"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        /* in a block of its own, so that reading past the NUL is seen by ASan */
        char *s = strdup(bad[i]);
        assert_false(base_unhex(s, out, 2));
        free(s);
    }
}

static void random_bytes_differ(void **state)
{
    uint8_t a[1000] = {0}, b[1000] = {0};
    struct baton_error e;
    test_ok(base_random(a, sizeof a, &e), &e);
    test_ok(base_random(b, sizeof b, &e), &e);
    assert_memory_not_equal(a, b, sizeof a);
    assert_memory_not_equal(a + 900, (uint8_t[100]){0}, 100);
    test_ok(base_random(NULL, 0, &e), &e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sha256_vectors),      cmocka_unit_test(streaming_equals_whole),
        cmocka_unit_test(hmac_vectors),        cmocka_unit_test(hmac_streams),
        cmocka_unit_test(secrets_compare),     cmocka_unit_test(hex_both_ways),
        cmocka_unit_test(random_bytes_differ),
    };
    return cmocka_run_group_tests_name("base-hash", tests, NULL, NULL);
}
