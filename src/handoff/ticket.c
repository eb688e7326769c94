/* SPDX-License-Identifier: Apache-2.0 */
/* Tickets: who may claim what until when. The book is the truth; a ticket only names an entry of it
 * in a form that nobody else can make.
 *
 * A ticket as bytes, which mean something to its issuer alone:
 *   0 request, 8 epoch, 16 serial, 24 expires_ns, 32 generations (u64, little-endian each),
 *   40 the first 24 bytes of HMAC-SHA-256 over bytes 0 to 39 */
#include <stdlib.h>
#include <string.h>

#include "handoff/handoff_priv.h"

enum { MAC_AT = 40, MAC_BYTES = 24 };

_Static_assert(MAC_AT + MAC_BYTES == HANDOFF_TICKET, "a ticket is full");

struct entry {
    uint64_t request, serial, generations, lease_end_ns;
    bool claimed;
};

struct handoff_tickets {
    struct base_hmac key;
    uint64_t epoch, lease_ns, serial; /* serial: of the ticket issued last */
    struct entry *entries;            /* [n] issued and not over */
    uint32_t n;
};

int handoff_tickets_open(const struct handoff_tickets_options *o, struct handoff_tickets **out,
                         struct baton_error *e)
{
    uint8_t key[32];
    struct handoff_tickets *b = base_try_alloc(1, sizeof *b, e);
    if (!b)
        return BATON_ERR_NOMEM;
    b->entries = base_try_alloc(HANDOFF_MAX_TICKETS, sizeof *b->entries, e);
    b->epoch = o->epoch;
    b->lease_ns = o->lease_ns ? o->lease_ns : 30000000000u;
    int rc = b->entries ? 0 : BATON_ERR_NOMEM;
    if (rc == 0 && !b->epoch)
        rc = base_random(&b->epoch, sizeof b->epoch, e);
    if (rc == 0 && !o->key)
        rc = base_random(key, sizeof key, e);
    if (rc) {
        handoff_tickets_close(b);
        return rc;
    }
    /* Not the connection's secret itself: what is shown as a ticket's MAC says nothing of a tag. */
    if (o->key)
        base_hmac(o->key, o->key_bytes, "baton ticket 1", 14, key);
    base_hmac_init(&b->key, key, sizeof key);
    base_forget(key, sizeof key);
    *out = b;
    return 0;
}

void handoff_tickets_close(struct handoff_tickets *b)
{
    if (!b)
        return;
    free(b->entries);
    base_forget(b, sizeof *b);
    free(b);
}

static void seal(const struct handoff_tickets *b, const uint8_t *p, uint8_t mac[MAC_BYTES])
{
    struct base_hmac h = b->key;
    uint8_t sum[32];
    base_hmac_update(&h, p, MAC_AT);
    base_hmac_final(&h, sum);
    memcpy(mac, sum, MAC_BYTES);
}

static struct entry *find(struct handoff_tickets *b, uint64_t request)
{
    for (uint32_t i = 0; i < b->n; i++)
        if (b->entries[i].request == request)
            return &b->entries[i];
    return NULL;
}

static void drop(struct handoff_tickets *b, struct entry *x)
{
    *x = b->entries[--b->n];
}

int handoff_ticket_issue(struct handoff_tickets *b, uint64_t request, uint64_t generations,
                         uint64_t now_ns, uint8_t ticket[HANDOFF_TICKET], struct baton_error *e)
{
    if (find(b, request))
        return base_fail(e, BATON_ERR_USAGE, "request %llu has a ticket already",
                         (unsigned long long)request);
    if (b->n == HANDOFF_MAX_TICKETS)
        return base_fail(e, BATON_ERR_BUSY, "%u tickets are out", b->n);
    struct entry *x = &b->entries[b->n++];
    *x = (struct entry){request, ++b->serial, generations, now_ns + b->lease_ns, false};
    handoff_put64(ticket, request);
    handoff_put64(ticket + 8, b->epoch);
    handoff_put64(ticket + 16, x->serial);
    handoff_put64(ticket + 24, x->lease_end_ns);
    handoff_put64(ticket + 32, generations);
    seal(b, ticket, ticket + MAC_AT);
    return 0;
}

static int stale(struct baton_error *e, const char *why)
{
    return base_fail(e, BATON_ERR_STALE, "ticket: %s", why);
}

/* The entry that a ticket names, if it is one of ours and still of worth. */
static int look_up(struct handoff_tickets *b, const uint8_t ticket[HANDOFF_TICKET], uint64_t now_ns,
                   struct entry **out, struct baton_error *e)
{
    uint8_t mac[MAC_BYTES];
    seal(b, ticket, mac);
    if (!base_equal_secret(mac, ticket + MAC_AT, MAC_BYTES))
        return base_fail(e, BATON_ERR_INTEGRITY, "ticket: not issued here, or changed");
    if (handoff_get64(ticket + 8) != b->epoch)
        return stale(e, "of an earlier start of its issuer");
    struct entry *x = find(b, handoff_get64(ticket));
    bool known = x && x->serial == handoff_get64(ticket + 16);
    /* A lease that was renewed outlives the date on the ticket, never the other way round. */
    if (known ? !x->claimed && now_ns >= x->lease_end_ns : now_ns >= handoff_get64(ticket + 24))
        return stale(e, "expired");
    if (!known)
        return stale(e, "used up, or withdrawn");
    *out = x;
    return 0;
}

int handoff_ticket_request(struct handoff_tickets *b, const uint8_t ticket[HANDOFF_TICKET],
                           uint64_t now_ns, uint64_t *request, struct baton_error *e)
{
    struct entry *x;
    int rc = look_up(b, ticket, now_ns, &x, e);
    if (rc == 0)
        *request = x->request;
    return rc;
}

int handoff_ticket_claim(struct handoff_tickets *b, const uint8_t ticket[HANDOFF_TICKET],
                         uint64_t generations, uint64_t now_ns, struct baton_error *e)
{
    struct entry *x;
    int rc = look_up(b, ticket, now_ns, &x, e);
    if (rc)
        return rc;
    if (x->generations != generations)
        return stale(e, "its pages were given back and used for something else");
    if (x->claimed)
        return base_fail(e, BATON_ERR_BUSY, "ticket: claimed by another connection");
    x->claimed = true;
    return 0;
}

int handoff_ticket_renew(struct handoff_tickets *b, const uint8_t ticket[HANDOFF_TICKET],
                         uint64_t now_ns, struct baton_error *e)
{
    struct entry *x;
    int rc = look_up(b, ticket, now_ns, &x, e);
    if (rc == 0 && x->lease_end_ns < now_ns + b->lease_ns)
        x->lease_end_ns = now_ns + b->lease_ns;
    return rc;
}

void handoff_ticket_release(struct handoff_tickets *b, uint64_t request, uint64_t heard_ns)
{
    struct entry *x = find(b, request);
    if (!x || !x->claimed)
        return;
    x->claimed = false;
    if (x->lease_end_ns < heard_ns + b->lease_ns)
        x->lease_end_ns = heard_ns + b->lease_ns;
}

void handoff_ticket_burn(struct handoff_tickets *b, uint64_t request)
{
    struct entry *x = find(b, request);
    if (x)
        drop(b, x);
}

bool handoff_ticket_expire(struct handoff_tickets *b, uint64_t now_ns, uint64_t *request)
{
    for (struct entry *x = b->entries; x < b->entries + b->n; x++)
        if (!x->claimed && now_ns >= x->lease_end_ns) {
            *request = x->request;
            drop(b, x);
            return true;
        }
    return false;
}

uint64_t handoff_ticket_due(const struct handoff_tickets *b)
{
    uint64_t due = UINT64_MAX;
    for (uint32_t i = 0; i < b->n; i++)
        if (!b->entries[i].claimed && b->entries[i].lease_end_ns < due)
            due = b->entries[i].lease_end_ns;
    return due;
}

uint32_t handoff_tickets_open_n(const struct handoff_tickets *b)
{
    return b->n;
}

/* ---- text ----------------------------------------------------------------------------------- */

/* RFC 4648, section 5, without padding. */
static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

void handoff_ticket_text(const uint8_t ticket[HANDOFF_TICKET], char out[HANDOFF_TICKET_TEXT])
{
    memcpy(out, "bt1.", 4);
    char *p = out + 4;
    for (uint32_t bit = 0; bit < 8 * HANDOFF_TICKET; bit += 6) {
        uint32_t two = (uint32_t)ticket[bit / 8] << 8;
        if (bit / 8 + 1 < HANDOFF_TICKET)
            two |= ticket[bit / 8 + 1];
        *p++ = digits[two >> (10 - bit % 8) & 63];
    }
    *p = '\0';
}

int handoff_ticket_parse(const char *text, uint8_t ticket[HANDOFF_TICKET], struct baton_error *e)
{
    uint8_t mine[HANDOFF_TICKET] = {0};
    char back[HANDOFF_TICKET_TEXT];
    bool good = strnlen(text, HANDOFF_TICKET_TEXT) == HANDOFF_TICKET_TEXT - 1 &&
                memcmp(text, "bt1.", 4) == 0;
    for (uint32_t bit = 0; good && bit < 8 * HANDOFF_TICKET; bit += 6) {
        const char *d = strchr(digits, text[4 + bit / 6]);
        uint32_t two = d && *d ? (uint32_t)(d - digits) << (10 - bit % 8) : 0;
        good = d && *d;
        mine[bit / 8] |= (uint8_t)(two >> 8);
        if (bit / 8 + 1 < HANDOFF_TICKET)
            mine[bit / 8 + 1] |= (uint8_t)two;
    }
    /* One text a ticket: bits behind the last byte are zero. */
    if (good)
        handoff_ticket_text(mine, back);
    if (!good || strcmp(back, text) != 0)
        return base_fail(e, BATON_ERR_INPUT, "not a ticket: 'bt1.' and %u base64url digits wanted",
                         HANDOFF_TICKET_TEXT - 5);
    memcpy(ticket, mine, sizeof mine);
    return 0;
}
