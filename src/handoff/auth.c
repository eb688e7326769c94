/* SPDX-License-Identifier: Apache-2.0 */
/* Session keys and the tags of frames (docs/wire.md, "Authentication").
 *
 * Keys come from the shared secret and both bodies of HELLO, nonces included: they differ between
 * connections (no replay) and directions (no reflection), and two ends that read different HELLOs,
 * because somebody changed one on its way, have different keys. */
#include <string.h>

#include "handoff/handoff_priv.h"

int handoff_auth_open(struct handoff_auth *a, const struct handoff_options *o,
                      struct baton_error *e)
{
    a->proven = !o->key;
    if (!o->key)
        return o->tag_payload
                   ? base_fail(e, BATON_ERR_USAGE, "payload can't be authenticated without a key")
                   : 0;
    if (o->key_bytes < HANDOFF_MIN_KEY || o->key_bytes > HANDOFF_MAX_KEY)
        return base_fail(e, BATON_ERR_USAGE, "a key of %zu bytes, %u to %u are possible",
                         o->key_bytes, HANDOFF_MIN_KEY, HANDOFF_MAX_KEY);
    base_hmac_init(&a->secret, o->key, o->key_bytes);
    a->wanted = o->tag_payload ? HANDOFF_AUTH_PAYLOAD : HANDOFF_AUTH_CONTROL;
    return 0;
}

void handoff_auth_close(struct handoff_auth *a)
{
    base_forget(a, sizeof *a);
}

/* HMAC(secret, label, 0, producer's HELLO, consumer's HELLO): the key of one direction. All inputs
 * have fixed lengths besides the label, which the zero ends. */
static void derive(struct base_hmac *key, const struct base_hmac *secret, const char *label,
                   const uint8_t producer[HANDOFF_HELLO_BYTES],
                   const uint8_t consumer[HANDOFF_HELLO_BYTES])
{
    struct base_hmac h = *secret;
    uint8_t k[32];
    base_hmac_update(&h, label, strlen(label) + 1);
    base_hmac_update(&h, producer, HANDOFF_HELLO_BYTES);
    base_hmac_update(&h, consumer, HANDOFF_HELLO_BYTES);
    base_hmac_final(&h, k);
    base_hmac_init(key, k, sizeof k);
    base_forget(k, sizeof k);
}

int handoff_auth_agree(struct handoff_auth *a, uint32_t theirs,
                       const uint8_t producer[HANDOFF_HELLO_BYTES],
                       const uint8_t consumer[HANDOFF_HELLO_BYTES], bool is_producer,
                       struct baton_error *e)
{
    const char *peer = is_producer ? "consumer" : "producer";
    if (theirs > HANDOFF_AUTH_PAYLOAD)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "the %s wants authentication %u", peer, theirs);
    if (a->wanted && !theirs)
        return base_fail(e, BATON_ERR_MISMATCH, "the %s has no key, this end wants one", peer);
    if (!a->wanted && theirs)
        return base_fail(e, BATON_ERR_MISMATCH, "the %s wants a key, this end has none", peer);
    if (!a->wanted)
        return 0;
    struct base_hmac *of_producer = is_producer ? &a->out : &a->in;
    struct base_hmac *of_consumer = is_producer ? &a->in : &a->out;
    derive(of_producer, &a->secret, "baton handoff 1 producer", producer, consumer);
    derive(of_consumer, &a->secret, "baton handoff 1 consumer", producer, consumer);
    base_forget(&a->secret, sizeof a->secret);
    a->level = theirs > a->wanted ? (enum handoff_auth_level)theirs : a->wanted;
    return 0;
}

void handoff_auth_tag(const struct handoff_auth *a, const struct base_hmac *key,
                      const uint8_t raw[HANDOFF_HEADER], const uint8_t *control, size_t control_n,
                      const uint8_t *payload, size_t payload_n, uint8_t tag[HANDOFF_TAG])
{
    struct base_hmac h = *key;
    uint8_t sum[32];
    base_hmac_update(&h, raw, HANDOFF_HEADER);
    base_hmac_update(&h, control, control_n);
    if (a->level == HANDOFF_AUTH_PAYLOAD)
        base_hmac_update(&h, payload, payload_n);
    base_hmac_final(&h, sum);
    memcpy(tag, sum, HANDOFF_TAG);
}
