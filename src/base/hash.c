/* SPDX-License-Identifier: Apache-2.0 */
/* SHA-256, HMAC, hex, random bytes. libcrypto's low-level SHA-256 is used because it needs no heap
 * and cannot fail; it is the same assembly (SHA extensions where present) as behind EVP. */
#define OPENSSL_SUPPRESS_DEPRECATED
#include <errno.h>
#include <string.h>
#include <sys/random.h>

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include "base/base.h"

enum { BLOCK = 64 }; /* SHA-256's block, RFC 6234 */

_Static_assert(sizeof(SHA256_CTX) <= sizeof(struct base_sha256), "opaque storage too small");
_Static_assert(_Alignof(SHA256_CTX) <= _Alignof(struct base_sha256), "opaque storage misaligned");

static SHA256_CTX *ctx_of(struct base_sha256 *s)
{
    return (SHA256_CTX *)(void *)s->opaque;
}

void base_sha256_init(struct base_sha256 *s)
{
    SHA256_Init(ctx_of(s));
}

void base_sha256_update(struct base_sha256 *s, const void *data, size_t n)
{
    if (n) /* data may be NULL where n is 0 */
        SHA256_Update(ctx_of(s), data, n);
}

void base_sha256_final(struct base_sha256 *s, uint8_t out[32])
{
    SHA256_Final(out, ctx_of(s));
}

void base_sha256(const void *data, size_t n, uint8_t out[32])
{
    struct base_sha256 s;
    base_sha256_init(&s);
    base_sha256_update(&s, data, n);
    base_sha256_final(&s, out);
}

/* RFC 2104: H(K ^ opad, H(K ^ ipad, text)), K hashed first where it is longer than a block. */
void base_hmac_init(struct base_hmac *h, const void *key, size_t key_n)
{
    uint8_t k[BLOCK] = {0}, pad[BLOCK];
    if (key_n > BLOCK)
        base_sha256(key, key_n, k);
    else if (key_n)
        memcpy(k, key, key_n);
    for (int i = 0; i < BLOCK; i++)
        pad[i] = k[i] ^ 0x36;
    base_sha256_init(&h->inner);
    base_sha256_update(&h->inner, pad, BLOCK);
    for (int i = 0; i < BLOCK; i++)
        pad[i] = k[i] ^ 0x5c;
    base_sha256_init(&h->outer);
    base_sha256_update(&h->outer, pad, BLOCK);
    OPENSSL_cleanse(k, sizeof k);
    OPENSSL_cleanse(pad, sizeof pad);
}

void base_hmac_update(struct base_hmac *h, const void *data, size_t n)
{
    base_sha256_update(&h->inner, data, n);
}

void base_hmac_final(struct base_hmac *h, uint8_t out[32])
{
    uint8_t inner[32];
    base_sha256_final(&h->inner, inner);
    base_sha256_update(&h->outer, inner, sizeof inner);
    base_sha256_final(&h->outer, out);
    OPENSSL_cleanse(h, sizeof *h);
}

void base_hmac(const void *key, size_t key_n, const void *data, size_t n, uint8_t out[32])
{
    struct base_hmac h;
    base_hmac_init(&h, key, key_n);
    base_hmac_update(&h, data, n);
    base_hmac_final(&h, out);
}

void base_forget(void *p, size_t n)
{
    OPENSSL_cleanse(p, n);
}

bool base_equal_secret(const void *a, const void *b, size_t n)
{
    return n == 0 || CRYPTO_memcmp(a, b, n) == 0;
}

int base_random(void *out, size_t n, struct baton_error *e)
{
    uint8_t *p = out;
    while (n > 0) {
        ssize_t got = getrandom(p, n, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return base_fail_errno(e, BATON_ERR_IO, errno, "the kernel gives no random bytes");
        p += got;
        n -= (size_t)got;
    }
    return 0;
}

void base_hex(const uint8_t *data, size_t n, char *out)
{
    static const char digits[] = "0123456789abcdef";
    for (size_t i = 0; i < n; i++) {
        out[2 * i] = digits[data[i] >> 4];
        out[2 * i + 1] = digits[data[i] & 15];
    }
    out[2 * n] = '\0';
}

static int digit_value(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

bool base_unhex(const char *hex, uint8_t *out, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        int hi = digit_value(hex[2 * i]); /* a NUL is no digit: never reads past the end */
        int lo = hi < 0 ? -1 : digit_value(hex[2 * i + 1]);
        if (lo < 0)
            return false;
        out[i] = (uint8_t)(hi << 4 | lo);
    }
    return hex[2 * n] == '\0';
}
