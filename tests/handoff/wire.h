/* SPDX-License-Identifier: Apache-2.0 */
/* The wire format written a second time, from docs/wire.md alone: what a hostile or mistaken peer
 * is made of. Nothing here uses the handoff room. */
#ifndef TESTS_HANDOFF_WIRE_H
#define TESTS_HANDOFF_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <xxhash.h>

enum {
    W_HELLO = 1,
    W_HEARTBEAT,
    W_BYE,
    W_OFFER,
    W_RESERVE,
    W_REFUSE,
    W_LAYER,
    W_COMMIT,
    W_LOGITS,
    W_ACK,
    W_NACK,
    W_ABORT,
    W_CLOSE,
    W_CLAIM,
    W_LANDING,
    W_CREDIT,
    W_ASK
};

/* The session key of one direction, from the secret and the bodies of both HELLOs. */
static inline void wire_session_key(const void *secret, int n, bool producer,
                                    const uint8_t *hello_p, const uint8_t *hello_c, uint8_t key[32])
{
    uint8_t text[25 + 192];
    memcpy(text, producer ? "baton handoff 1 producer" : "baton handoff 1 consumer", 25);
    memcpy(text + 25, hello_p, 96);
    memcpy(text + 121, hello_c, 96);
    HMAC(EVP_sha256(), secret, n, text, sizeof text, key, NULL);
}

struct wire { /* frames that one side has written so far */
    uint8_t *data;
    size_t n, capacity;
    uint64_t sequence;
    bool tagged; /* frames get a tag by `key`, over the payload too where tag_payload */
    bool tag_payload;
    uint8_t key[32];
};

static inline uint8_t *w_u16(uint8_t *p, uint32_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
    return p + 2;
}

static inline uint8_t *w_u32(uint8_t *p, uint32_t v)
{
    return w_u16(w_u16(p, v), v >> 16);
}

static inline uint8_t *w_u64(uint8_t *p, uint64_t v)
{
    return w_u32(w_u32(p, (uint32_t)v), (uint32_t)(v >> 32));
}

static inline void wire_seal(uint8_t *h)
{
    w_u64(h + 40, XXH3_64bits(h, 40));
}

/* The tag of a whole frame in memory. */
static inline void wire_tag(const struct wire *w, const uint8_t *h, size_t n_control,
                            size_t n_payload, uint8_t tag[16])
{
    uint8_t sum[32];
    HMAC(EVP_sha256(), w->key, 32, h, 48 + n_control + (w->tag_payload ? n_payload : 0), sum, NULL);
    memcpy(tag, sum, 16);
}

/* Append a frame that is right in form, whatever it says. Returns where it starts. */
static inline uint8_t *wire_frame(struct wire *w, uint8_t type, uint64_t request,
                                  const void *control, uint32_t n_control, const void *payload,
                                  uint32_t n_payload, bool check_payload)
{
    uint8_t *h = w->data + w->n, *p;
    if (w->n + 64 + n_control + n_payload > w->capacity)
        return NULL;
    uint64_t check = XXH3_64bits(n_control ? control : "", n_control);
    if (check_payload)
        check = XXH3_64bits_withSeed(payload, n_payload, check);
    memcpy(h, "BATN", 4);
    p = w_u16(h + 4, 1);
    *p++ = type;
    *p++ = (uint8_t)((check_payload ? 1 : 0) | (w->tagged ? 2 : 0));
    p = w_u32(w_u32(p, n_control), n_payload);
    p = w_u64(w_u64(w_u64(p, request), w->sequence++), check);
    wire_seal(h);
    if (n_control)
        memcpy(h + 48, control, n_control);
    if (payload)
        memcpy(h + 48 + n_control, payload, n_payload);
    w->n += 48 + (size_t)n_control + n_payload;
    if (w->tagged) {
        wire_tag(w, h, n_control, n_payload, w->data + w->n);
        w->n += 16;
    }
    return h;
}

/* Make the checks of a frame that was changed right again, as who knows no key can. */
static inline void wire_reseal(uint8_t *h)
{
    uint32_t control = h[8] | h[9] << 8 | h[10] << 16, payload = h[12] | h[13] << 8 | h[14] << 16;
    uint64_t check = XXH3_64bits(h + 48, control);
    if (h[7] & 1)
        check = XXH3_64bits_withSeed(h + 48 + control, payload, check);
    w_u64(h + 32, check);
    wire_seal(h);
}

static inline uint8_t *wire_hello(struct wire *w, uint32_t min, uint32_t max, uint32_t role,
                                  uint64_t heartbeat_ns, uint64_t dead_ns)
{
    uint8_t b[96] = {0};
    w_u32(w_u16(w_u16(b, min), max), role);
    w_u64(w_u64(b + 16, heartbeat_ns), dead_ns);
    return wire_frame(w, W_HELLO, 0, b, 96, NULL, 0, false);
}

static inline uint8_t *wire_reason(struct wire *w, uint8_t type, uint64_t request, int32_t code,
                                   const char *text)
{
    uint8_t b[256] = {0};
    w_u32(b, (uint32_t)code);
    memcpy(b + 4, text, strlen(text));
    return wire_frame(w, type, request, b, 256, NULL, 0, false);
}

/* 2 layers, 1 head of 2, bf16, window 3, the second layer local; token ids 1, 2, ... Body size:
 * 192 + 2 * 16 + 4 * n. */
static inline uint32_t wire_offer_body(uint8_t *b, uint32_t n, bool digest)
{
    uint32_t local = n > 2 ? n - 2 : 0;
    memset(b, 0, 192);
    w_u32(w_u32(w_u32(w_u32(b + 128, 2), 1), 2), 3);
    w_u32(w_u32(w_u32(w_u32(b + 144, 3), n), 7), digest ? 2 : 0);
    w_u32(w_u32(w_u32(w_u32(b + 192, 0), 0), n), 0);
    w_u32(w_u32(w_u32(w_u32(b + 208, 1), local), n - local), 0);
    for (uint32_t i = 0; i < n; i++)
        w_u32(b + 224 + 4 * i, i + 1);
    return 224 + 4 * n;
}

static inline uint8_t *wire_offer(struct wire *w, uint64_t request, uint32_t n, bool digest)
{
    uint8_t b[224 + 4 * 256];
    return wire_frame(w, W_OFFER, request, b, wire_offer_body(b, n, digest), NULL, 0, false);
}

static inline uint8_t *wire_reserve(struct wire *w, uint64_t request, uint32_t held, bool logits)
{
    uint8_t b[96] = {0};
    w_u32(w_u32(b, held), logits);
    return wire_frame(w, W_RESERVE, request, b, 96, NULL, 0, false);
}

static inline void wire_layer_body(uint8_t b[32], uint32_t layer, uint32_t which, uint32_t first,
                                   uint32_t count)
{
    memset(b, 0, 32);
    w_u32(w_u32(w_u32(w_u32(w_u32(b, layer), which), first), count), 3);
}

/* Rows of 4 bytes, all `fill`. */
static inline uint8_t *wire_layer(struct wire *w, uint64_t request, uint32_t layer, uint32_t which,
                                  uint32_t first, uint32_t count, uint8_t fill)
{
    uint8_t b[32], rows[4 * 256];
    wire_layer_body(b, layer, which, first, count);
    memset(rows, fill, 4 * count);
    return wire_frame(w, W_LAYER, request, b, 32, rows, 4 * count, true);
}

/* COMMIT of n tokens without digests, for wire_offer's geometry: body of 128 + 4 * 40 bytes. */
static inline void wire_commit_body(uint8_t b[288], uint32_t n)
{
    uint32_t local = n > 2 ? n - 2 : 0;
    memset(b, 0, 288);
    w_u32(w_u32(w_u32(b, 4), 0), 9);
    w_u64(b + 32, (uint64_t)8 * (n + n - local));
    w_u32(b + 40, 4);
    for (uint32_t s = 0; s < 4; s++)
        w_u32(w_u32(b + 128 + 40 * s, s < 2 ? 0 : local), n - 1);
}

static inline uint8_t *wire_commit(struct wire *w, uint64_t request, uint32_t n)
{
    uint8_t b[288];
    wire_commit_body(b, n);
    return wire_frame(w, W_COMMIT, request, b, 288, NULL, 0, false);
}

#endif
