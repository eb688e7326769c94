/* SPDX-License-Identifier: Apache-2.0 */
/* Frames: header and small bodies, bytes <-> structs, and what a stranger may put there. */
#include <math.h>
#include <string.h>

#include <xxhash.h>

#include "handoff/handoff_priv.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payload travels as it lies in memory, and the wire is little-endian"
#endif

enum { FROM_PRODUCER = 1, FROM_CONSUMER = 2, EITHER = 3 };

/* Who sends what, and how large it may be. `unit`: control bytes beyond the least come in these. */
static const struct {
    const char *name;
    uint8_t from;
    bool of_request;
    uint32_t control, control_max, unit, payload_max;
} types[HANDOFF_N_TYPES] = {
    [HANDOFF_HELLO] = {"HELLO", EITHER, false, HANDOFF_HELLO_BYTES, HANDOFF_HELLO_BYTES, 1, 0},
    [HANDOFF_HEARTBEAT] = {"HEARTBEAT", EITHER, false, 0, 0, 1, 0},
    [HANDOFF_BYE] = {"BYE", EITHER, false, HANDOFF_REASON_BYTES, HANDOFF_REASON_BYTES, 1, 0},
    [HANDOFF_OFFER] = {"OFFER", FROM_PRODUCER, true, HANDOFF_OFFER_BYTES,
                       HANDOFF_OFFER_BYTES + HANDOFF_OFFER_LAYER_BYTES *KV_MAX_LAYERS +
                           4 * HANDOFF_MAX_IDS + HANDOFF_TICKET,
                       4, 0},
    [HANDOFF_RESERVE] = {"RESERVE", FROM_CONSUMER, true, HANDOFF_RESERVE_BYTES,
                         HANDOFF_RESERVE_BYTES, 1, 0},
    [HANDOFF_REFUSE] = {"REFUSE", FROM_CONSUMER, true, HANDOFF_REASON_BYTES, HANDOFF_REASON_BYTES,
                        1, 0},
    [HANDOFF_LAYER] = {"LAYER", FROM_PRODUCER, true, HANDOFF_LAYER_BYTES, HANDOFF_LAYER_BYTES, 1,
                       HANDOFF_MAX_PAYLOAD},
    [HANDOFF_COMMIT] = {"COMMIT", FROM_PRODUCER, true, HANDOFF_COMMIT_BYTES,
                        HANDOFF_COMMIT_BYTES + HANDOFF_COMMIT_SLOT_BYTES * 2 * KV_MAX_LAYERS,
                        HANDOFF_COMMIT_SLOT_BYTES, 0},
    [HANDOFF_LOGITS] = {"LOGITS", FROM_PRODUCER, true, HANDOFF_LOGITS_BYTES, HANDOFF_LOGITS_BYTES,
                        1, HANDOFF_MAX_LOGITS},
    [HANDOFF_ACK] = {"ACK", FROM_CONSUMER, true, HANDOFF_ACK_BYTES, HANDOFF_ACK_BYTES, 1, 0},
    [HANDOFF_NACK] = {"NACK", FROM_CONSUMER, true, HANDOFF_NACK_BYTES, HANDOFF_NACK_BYTES, 1, 0},
    [HANDOFF_ABORT] = {"ABORT", EITHER, true, HANDOFF_REASON_BYTES, HANDOFF_REASON_BYTES, 1, 0},
    [HANDOFF_CLOSE] = {"CLOSE", EITHER, true, 0, 0, 1, 0},
    [HANDOFF_CLAIM] = {"CLAIM", FROM_CONSUMER, true, HANDOFF_CLAIM_BYTES, HANDOFF_CLAIM_BYTES, 1,
                       0},
    [HANDOFF_LANDING] = {"LANDING", FROM_CONSUMER, false, HANDOFF_LANDING_BYTES,
                         HANDOFF_LANDING_BYTES, 1, 0},
    [HANDOFF_CREDIT] = {"CREDIT", FROM_CONSUMER, false, HANDOFF_CREDIT_BYTES, HANDOFF_CREDIT_BYTES,
                        1, 0},
    [HANDOFF_ASK] = {"ASK", FROM_CONSUMER, true, HANDOFF_ASK_BYTES + 4,
                     HANDOFF_ASK_BYTES + 4 * HANDOFF_MAX_IDS, 4, 0},
};

const char *handoff_type_name(unsigned type)
{
    return type > 0 && type < HANDOFF_N_TYPES ? types[type].name : "unknown";
}

void handoff_header_write(uint8_t raw[HANDOFF_HEADER], const struct handoff_header *h)
{
    handoff_put32(raw, HANDOFF_MAGIC);
    handoff_put16(raw + 4, h->version);
    raw[6] = h->type;
    raw[7] = h->flags;
    handoff_put32(raw + 8, h->control);
    handoff_put32(raw + 12, h->payload);
    handoff_put64(raw + 16, h->request);
    handoff_put64(raw + 24, h->sequence);
    handoff_put64(raw + 32, h->body_check);
    handoff_put64(raw + 40, XXH3_64bits(raw, 40));
}

static int header_bounds(const struct handoff_header *h, bool from_producer, struct baton_error *e)
{
    if (h->version != HANDOFF_VERSION)
        return base_fail(e, BATON_ERR_MISMATCH,
                         "frame %llu has wire version %u, this end speaks %u",
                         (unsigned long long)h->sequence, h->version, HANDOFF_VERSION);
    if (h->type == 0 || h->type >= HANDOFF_N_TYPES)
        return base_fail(e, BATON_ERR_PEER, "frame %llu has unknown type %u",
                         (unsigned long long)h->sequence, h->type);
    const char *name = types[h->type].name;
    if (!(types[h->type].from & (from_producer ? FROM_PRODUCER : FROM_CONSUMER)))
        return base_fail(e, BATON_ERR_PEER, "%s from a %s", name,
                         from_producer ? "producer" : "consumer");
    uint32_t least = types[h->type].control;
    if (h->control < least || h->control > types[h->type].control_max ||
        (h->control - least) % types[h->type].unit)
        return base_fail(e, BATON_ERR_PEER, "%s with a body of %u bytes", name, h->control);
    if (h->payload > types[h->type].payload_max ||
        (h->payload == 0 && types[h->type].payload_max && h->type != HANDOFF_LAYER))
        return base_fail(e, BATON_ERR_PEER, "%s with a payload of %u bytes", name, h->payload);
    if (!types[h->type].of_request && h->request)
        return base_fail(e, BATON_ERR_PEER, "%s for a request", name);
    if (h->flags & ~(HANDOFF_FLAG_PAYLOAD | HANDOFF_FLAG_TAG) ||
        (h->flags & HANDOFF_FLAG_PAYLOAD && !h->payload))
        return base_fail(e, BATON_ERR_PEER, "%s with flags 0x%02x", name, h->flags);
    return 0;
}

int handoff_header_read(const uint8_t raw[HANDOFF_HEADER], bool from_producer,
                        struct handoff_header *h, struct baton_error *e)
{
    if (handoff_get32(raw) != HANDOFF_MAGIC)
        return base_fail(e, BATON_ERR_PEER, "not a baton stream: 0x%08x where a frame starts",
                         handoff_get32(raw));
    if (handoff_get64(raw + 40) != XXH3_64bits(raw, 40))
        return base_fail(e, BATON_ERR_INTEGRITY, "a frame's header does not match its check");
    h->version = handoff_get16(raw + 4);
    h->type = raw[6];
    h->flags = raw[7];
    h->control = handoff_get32(raw + 8);
    h->payload = handoff_get32(raw + 12);
    h->request = handoff_get64(raw + 16);
    h->sequence = handoff_get64(raw + 24);
    h->body_check = handoff_get64(raw + 32);
    return header_bounds(h, from_producer, e);
}

uint64_t handoff_body_check(unsigned flags, const uint8_t *control, size_t control_n,
                            const uint8_t *payload, size_t payload_n)
{
    uint64_t x = XXH3_64bits(control, control_n);
    return flags & HANDOFF_FLAG_PAYLOAD ? XXH3_64bits_withSeed(payload, payload_n, x) : x;
}

static bool all_zero(const uint8_t *p, size_t n)
{
    uint8_t x = 0;
    for (size_t i = 0; i < n; i++)
        x |= p[i];
    return x == 0;
}

/* ---- HELLO ---------------------------------------------------------------------------------- */

void handoff_hello_write(uint8_t *p, const struct handoff_hello *h)
{
    memset(p, 0, HANDOFF_HELLO_BYTES);
    handoff_put16(p, h->min_version);
    handoff_put16(p + 2, h->max_version);
    handoff_put32(p + 4, h->role);
    handoff_put32(p + 8, h->auth);
    handoff_put64(p + 16, h->heartbeat_ns);
    handoff_put64(p + 24, h->dead_ns);
    memcpy(p + 32, h->nonce, 32);
    handoff_put32(p + 64, h->takes);
}

/* Bits of `takes` that this end does not know, and what lies behind them, may mean something to
 * later ends: they are not looked at. */
int handoff_hello_read(const uint8_t *p, struct handoff_hello *h, struct baton_error *e)
{
    h->min_version = handoff_get16(p);
    h->max_version = handoff_get16(p + 2);
    h->role = handoff_get32(p + 4);
    h->auth = handoff_get32(p + 8);
    h->heartbeat_ns = handoff_get64(p + 16);
    h->dead_ns = handoff_get64(p + 24);
    memcpy(h->nonce, p + 32, 32);
    h->takes = handoff_get32(p + 64);
    if (h->min_version > h->max_version)
        return base_fail(e, BATON_ERR_PEER, "HELLO with versions %u to %u", h->min_version,
                         h->max_version);
    return 0;
}

/* ---- reasons -------------------------------------------------------------------------------- */

void handoff_reason_write(uint8_t *p, const struct baton_error *why)
{
    memset(p, 0, HANDOFF_REASON_BYTES);
    handoff_put32(p, (uint32_t)why->code);
    memcpy(p + 4, why->text, strnlen(why->text, sizeof why->text - 1));
}

/* Length of the well-formed UTF-8 sequence at s (n bytes left), 0 where it is none. */
static size_t utf8_length(const uint8_t *s, size_t n)
{
    size_t len = s[0] < 0x80   ? 1
                 : s[0] < 0xC2 ? 0
                 : s[0] < 0xE0 ? 2
                 : s[0] < 0xF0 ? 3
                 : s[0] < 0xF5 ? 4
                               : 0;
    if (len == 0 || len > n)
        return 0;
    for (size_t i = 1; i < len; i++)
        if ((s[i] & 0xC0) != 0x80)
            return 0;
    if ((s[0] == 0xE0 && s[1] < 0xA0) || (s[0] == 0xED && s[1] > 0x9F) ||
        (s[0] == 0xF0 && s[1] < 0x90) || (s[0] == 0xF4 && s[1] > 0x8F))
        return 0;
    return len;
}

/* The text ends up in logs, terminals and JSON: no control characters, no broken UTF-8. */
void handoff_reason_read(const uint8_t *p, struct baton_error *why)
{
    const uint8_t *s = p + 4;
    size_t n = strnlen((const char *)s, sizeof why->text - 1);
    why->code = (int32_t)handoff_get32(p);
    if (why->code >= 0 || why->code < BATON_ERR_STALE)
        why->code = BATON_ERR_PEER;
    memset(why->text, 0, sizeof why->text);
    for (size_t i = 0; i < n;) {
        size_t len = utf8_length(s + i, n - i);
        bool bad = len == 0 || s[i] < 0x20 || s[i] == 0x7F;
        if (bad)
            why->text[i++] = '?';
        else
            for (; len; len--, i++)
                why->text[i] = (char)s[i];
    }
    if (n == 0)
        base_fail(why, why->code, "the peer gave no reason (%s)", base_code_name(why->code));
}

/* ---- RESERVE -------------------------------------------------------------------------------- */

/* Lease and ticket have their places and are zero in version 1. */
void handoff_reserve_write(uint8_t *p, const struct handoff_terms *x)
{
    memset(p, 0, HANDOFF_RESERVE_BYTES);
    handoff_put32(p, x->held);
    handoff_put32(p + 4, x->wants_logits);
    handoff_put32(p + 16, x->credits);
    handoff_put32(p + 20, x->landing);
}

int handoff_reserve_read(const uint8_t *p, struct handoff_terms *x, struct baton_error *e)
{
    uint32_t flags = handoff_get32(p + 4);
    if (flags > 1 || !all_zero(p + 8, 8) || !all_zero(p + 24, HANDOFF_RESERVE_BYTES - 24))
        return base_fail(e, BATON_ERR_PEER, "RESERVE with fields that version 1 does not have");
    x->held = handoff_get32(p);
    x->wants_logits = flags == 1;
    x->credits = handoff_get32(p + 16);
    x->landing = handoff_get32(p + 20);
    return 0;
}

/* ---- LANDING, CREDIT ------------------------------------------------------------------------ */

void handoff_lending_write(uint8_t *p, const struct handoff_lending *x)
{
    memset(p, 0, HANDOFF_LANDING_BYTES);
    handoff_put32(p, x->region);
    handoff_put32(p + 4, x->n_slots);
    handoff_put32(p + 8, x->slot_bytes);
}

int handoff_lending_read(const uint8_t *p, struct handoff_lending *x, struct baton_error *e)
{
    x->region = handoff_get32(p);
    x->n_slots = handoff_get32(p + 4);
    x->slot_bytes = handoff_get32(p + 8);
    if (!all_zero(p + 12, HANDOFF_LANDING_BYTES - 12))
        return base_fail(e, BATON_ERR_PEER, "LANDING with fields that version 1 does not have");
    if (x->region == 0 || x->n_slots == 0 || x->n_slots > HANDOFF_MAX_SLOTS || x->slot_bytes == 0 ||
        x->slot_bytes > HANDOFF_MAX_PAYLOAD || x->slot_bytes % HANDOFF_SLOT_UNIT)
        return base_fail(e, BATON_ERR_PEER, "LANDING of region %u with %u slots of %u bytes",
                         x->region, x->n_slots, x->slot_bytes);
    return 0;
}

void handoff_credit_write(uint8_t *p, uint32_t region, uint32_t slot)
{
    memset(p, 0, HANDOFF_CREDIT_BYTES);
    handoff_put32(p, region);
    handoff_put32(p + 4, slot);
}

int handoff_credit_read(const uint8_t *p, uint32_t *region, uint32_t *slot, struct baton_error *e)
{
    *region = handoff_get32(p);
    *slot = handoff_get32(p + 4);
    if (!all_zero(p + 8, HANDOFF_CREDIT_BYTES - 8))
        return base_fail(e, BATON_ERR_PEER, "CREDIT with fields that version 1 does not have");
    return 0;
}

/* ---- LAYER ---------------------------------------------------------------------------------- */

void handoff_piece_write(uint8_t *p, const struct handoff_piece *x)
{
    memset(p, 0, HANDOFF_LAYER_BYTES);
    handoff_put32(p, x->layer);
    handoff_put32(p + 4, x->which);
    handoff_put32(p + 8, x->first);
    handoff_put32(p + 12, x->count);
    handoff_put32(p + 16, x->dtype);
    handoff_put32(p + 20, x->placement);
    handoff_put64(p + 24, x->offset);
}

int handoff_piece_read(const uint8_t *p, struct handoff_piece *x, struct baton_error *e)
{
    x->layer = handoff_get32(p);
    x->which = handoff_get32(p + 4);
    x->first = handoff_get32(p + 8);
    x->count = handoff_get32(p + 12);
    x->dtype = handoff_get32(p + 16);
    x->placement = handoff_get32(p + 20);
    x->offset = handoff_get64(p + 24);
    if (!x->placement && x->offset)
        return base_fail(e, BATON_ERR_PEER, "LAYER with an offset in no landing region");
    return 0;
}

/* ---- COMMIT --------------------------------------------------------------------------------- */

void handoff_commit_write(uint8_t *p, const struct handoff_commit *m,
                          const struct handoff_totals *t)
{
    uint32_t margin;
    memcpy(&margin, &m->margin, 4);
    memset(p, 0, HANDOFF_COMMIT_BYTES);
    handoff_put32(p, t->slots);
    handoff_put32(p + 4, t->logits_follow);
    handoff_put32(p + 8, (uint32_t)m->argmax);
    handoff_put32(p + 12, margin);
    handoff_put64(p + 16, m->prefill_ns);
    handoff_put64(p + 24, m->compute_end_ns);
    handoff_put64(p + 32, t->bytes);
    handoff_put32(p + 40, t->pieces);
    handoff_put32(p + 44, t->logits_follow ? m->vocab : 0);
    memcpy(p + 48, t->digest, 32);
    memcpy(p + 80, t->logits_digest, 32);
}

int handoff_commit_read(const uint8_t *p, size_t n, struct handoff_commit *m,
                        struct handoff_totals *t, struct baton_error *e)
{
    uint32_t flags = handoff_get32(p + 4), margin = handoff_get32(p + 12);
    memset(m, 0, sizeof *m);
    t->slots = handoff_get32(p);
    t->logits_follow = flags == 1;
    m->argmax = (int32_t)handoff_get32(p + 8);
    memcpy(&m->margin, &margin, 4);
    m->prefill_ns = handoff_get64(p + 16);
    m->compute_end_ns = handoff_get64(p + 24);
    t->bytes = handoff_get64(p + 32);
    t->pieces = handoff_get32(p + 40);
    m->vocab = handoff_get32(p + 44);
    memcpy(t->digest, p + 48, 32);
    memcpy(t->logits_digest, p + 80, 32);
    if (flags > 1 || !all_zero(p + 112, HANDOFF_COMMIT_BYTES - 112) ||
        (t->logits_follow ? m->vocab == 0 || m->vocab > HANDOFF_MAX_VOCAB : m->vocab != 0))
        return base_fail(e, BATON_ERR_PEER, "COMMIT with fields out of range");
    if (t->slots != (n - HANDOFF_COMMIT_BYTES) / HANDOFF_COMMIT_SLOT_BYTES)
        return base_fail(e, BATON_ERR_PEER, "COMMIT of %u slots with a body of %zu bytes", t->slots,
                         n);
    if (m->argmax < 0 || (m->vocab && (uint32_t)m->argmax >= m->vocab) || !(m->margin >= 0))
        return base_fail(e, BATON_ERR_PEER, "COMMIT with argmax %d and margin %g", m->argmax,
                         (double)m->margin);
    return 0;
}
