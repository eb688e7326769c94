/* SPDX-License-Identifier: Apache-2.0 */
/* handoff: the protocol that moves a KV cache from a producer to a consumer (docs/wire.md).
 *
 * A connection (struct handoff_conn) speaks over one transport and carries any number of requests.
 * It has no thread: its owner, the I/O thread, waits for handoff_conn_poll's descriptors and calls
 * handoff_conn_step, which reads, writes, verifies, lands payload in the consumer's pages and calls
 * back. Per request:
 *
 *     producer: offer -> (on_reserve) -> layer ... commit -> (on_ack)
 *     consumer: (on_offer) -> reserve -> pieces land, digests and positions verified -> (on_commit)
 *
 *     a pull:   consumer: claim -> producer: (on_claim) -> offer, and on as above
 *
 * A request ends exactly once on each end, by ack, refuse, nack, abort or death; on_end tells, and
 * views given to reserve or layer are not touched after it. Every frame is bounded before it is
 * believed; anything that does not fit the protocol ends the connection with a named error. A slot
 * that arrives wrong (digest, position, count) ends its request alone, with BATON_ERR_INTEGRITY.
 * BATON_ERR_PEER after silence of `dead_ns`.
 *
 * With a key (handoff_options) both ends prove that they have it before either says anything else,
 * and every frame carries a tag: who has not the key can't forge, change, replay, reflect or
 * reorder anything. Nothing is encrypted.
 *
 * Threads: one thread at a time. Callbacks run inside step, abort, refuse and close, and may call
 * any function of this header but step and close.
 */
#ifndef HANDOFF_HANDOFF_H
#define HANDOFF_HANDOFF_H

#include <baton/device.h>

#include "kv/kv.h"

struct pollfd;
struct transport;
struct transport_listener;
struct handoff_conn;

#define HANDOFF_MAX_IDS (1u << 20)
#define HANDOFF_MAX_VOCAB (1u << 20)
/* Requests that a connection carries at a time, those included that the peer has yet to close. */
#define HANDOFF_MAX_REQUESTS 1024u

#define HANDOFF_TICKET 64u /* bytes; what they mean is their issuer's affair */

/* Identity, each part compared by name; all zero = not known, which equals nothing but itself. */
struct handoff_identity {
    uint8_t arch[32], weights[32], numerics[32], tokenizer[32];
};

/* Compare every part; BATON_ERR_MISMATCH names the first that differs. Numerics names what the
 * entries mean (rope, window, KV dtype), not the arithmetic that computed them: it must match. */
int handoff_identity_check(const struct handoff_identity *mine,
                           const struct handoff_identity *theirs, struct baton_error *e);
/* The same for the cache's shape: counts, dtype, window and the kind of each layer. */
int handoff_geometry_check(const struct kv_geometry *mine, const struct kv_geometry *theirs,
                           struct baton_error *e);

/* What a producer offers. Arrays are copied by handoff_offer; in on_offer they live until it
 * returns. */
struct handoff_offer {
    uint64_t request;
    struct handoff_identity identity;
    struct kv_geometry geometry; /* dtype: of the producer's pages, which is the wire's */
    const int32_t *ids;          /* [n_ids] the whole prompt */
    uint32_t n_ids;
    uint32_t max_new;      /* most tokens to come */
    const uint8_t *ticket; /* [HANDOFF_TICKET] of the consumer, for a place it keeps; or NULL */
    bool stream;           /* layers travel while later ones are computed */
    bool digest;           /* slot digests follow in COMMIT */
};

/* What the producer says at the end. */
struct handoff_commit {
    int32_t argmax; /* of the last prompt position */
    float margin;
    const float *logits;     /* [vocab] where RESERVE asked for it, else NULL; copied */
    uint32_t vocab;          /* 0 without logits */
    uint64_t prefill_ns;     /* compute time */
    uint64_t compute_end_ns; /* CLOCK_MONOTONIC at the end of the last compute; same host only */
};

/* What the consumer knows after it verified everything. */
struct handoff_result {
    struct handoff_commit commit; /* logits owned by the connection, valid during the callback */
    uint32_t slots, pieces;
    uint64_t bytes;
    uint64_t landed_bytes;                /* of these, put into the landing region */
    uint64_t first_byte_ns, last_byte_ns; /* CLOCK_MONOTONIC of LAYER frames as they arrived */
    uint64_t import_ns, verify_ns;        /* after the last byte: the last piece's one pass, which
                                             copies, digests and converts; the checks of COMMIT */
    uint8_t digest[32];                   /* SHA-256 over all slot digests, zero where off */
    bool digested;
};

/* A piece of a slot that left or arrived, with the CLOCK_MONOTONIC of its stations. */
struct handoff_moved {
    uint64_t request;
    uint32_t layer, which; /* enum kv_which */
    uint32_t first, count; /* positions */
    uint64_t bytes;
    uint64_t begin_ns;    /* producer: packing begins. consumer: its first byte came */
    uint64_t digested_ns; /* producer: packed and digested. consumer: as placed_ns, in one pass */
    uint64_t moved_ns;    /* producer: its last byte was written. consumer: its last byte came */
    uint64_t placed_ns;   /* consumer: in the lent pages. producer: 0 */
};

struct handoff_callbacks {
    /* consumer */
    void (*on_offer)(void *ctx, const struct handoff_offer *o);
    void (*on_commit)(void *ctx, uint64_t request, const struct handoff_result *result);
    /* producer: pages are reserved, [0, held) need not be sent, the logits row is (not) wanted */
    void (*on_reserve)(void *ctx, uint64_t request, uint32_t held, bool wants_logits);
    /* both: the request is over on this end. code 0 = acknowledged. */
    void (*on_end)(void *ctx, uint64_t request, const struct baton_error *why);
    void *ctx; /* a callback may be NULL where its role never calls it */
    /* both, may be NULL: a piece was sent whole, or is in its place */
    void (*on_piece)(void *ctx, const struct handoff_moved *m);
    /* producer: the consumer asks for what this ticket [HANDOFF_TICKET] stands for. The answer is
     * handoff_offer under this id or handoff_abort, now or later. NULL: all claims are refused. */
    void (*on_claim)(void *ctx, uint64_t request, const uint8_t *ticket);
};

struct handoff_options {
    bool producer;
    uint64_t heartbeat_ns; /* 0 = 1 s, or a quarter of dead_ns where that is less */
    uint64_t dead_ns;      /* 0 = HANDOFF_DEAD_NS; at least twice this end's heartbeat_ns, and
                              more than the peer's. Counted from the first step on, while this
                              end is stepped */
    /* Over Unix sockets a consumer lends memory for the producer to put pieces in (docs/wire.md,
     * Landing). Elsewhere, and where either end has no_landing, pieces travel in the stream. */
    bool no_landing;
    uint32_t landing_slots;      /* consumer: pieces under way; 0 = 4, at most 64 */
    uint32_t landing_slot_bytes; /* consumer: 0 = 256 KiB, or one leaf where that is more; else a
                                    multiple of 64; requests with larger leaves are not placed */
    /* A secret of both ends, copied; NULL = none. HANDOFF_MIN_KEY to HANDOFF_MAX_KEY bytes. A peer
     * with another, or without, is refused; so is one with a key where this end has none. */
    const void *key;
    size_t key_bytes;
    /* The tag of a frame covers its payload too, not the digests and checks over it alone: against
     * one who can change the stream on its way and looks for collisions of XXH3. Costs a SHA-256
     * over every payload byte at both ends; on as soon as one end asks for it. Needs a key. */
    bool tag_payload;
};

#define HANDOFF_DEAD_NS 10000000000u /* a peer silent for so long is dead */
#define HANDOFF_MIN_KEY 16u
#define HANDOFF_MAX_KEY 4096u

/* Read a key from a file: all of it but a newline at the end. BATON_ERR_INPUT where its size is not
 * possible or everybody may read or write it. The caller forgets it (base_forget). */
int handoff_key_read(const char *path, uint8_t key[HANDOFF_MAX_KEY], size_t *n,
                     struct baton_error *e);
/* Listen for peers (transport.h has the addresses and the rest of a listener). BATON_ERR_USAGE
 * where the address can be reached from other machines and the options have no key. */
int handoff_listen(const char *address, const struct handoff_options *o,
                   struct transport_listener **out, struct baton_error *e);
/* The listener for rooms that know no transports: what to poll for, the bound address, the end. */
int handoff_listener_fd(const struct transport_listener *l);
const char *handoff_listener_address(const struct transport_listener *l);
void handoff_listener_close(struct transport_listener *l); /* NULL is fine */
/* A connection with somebody who waits there; BATON_ERR_BUSY where nobody does. */
int handoff_accept(struct transport_listener *l, const struct handoff_options *o,
                   const struct handoff_callbacks *cb, struct handoff_conn **out,
                   struct baton_error *e);
/* A stream to an address, for handoff_conn_open. Waits, at most timeout_ns: BATON_ERR_TIMEOUT;
 * BATON_ERR_IO: nobody listens there; BATON_ERR_USAGE: no address, or a name that nobody knows. */
int handoff_dial(const char *address, uint64_t timeout_ns, struct transport **out,
                 struct baton_error *e);

/* Takes the transport over (closed with the connection). HELLO is exchanged by the first steps. */
int handoff_conn_open(struct transport *t, const struct handoff_options *o,
                      const struct handoff_callbacks *cb, struct handoff_conn **out,
                      struct baton_error *e);
/* The same over a connected stream socket, for rooms that know no transports. The descriptor is
 * the connection's on success and stays the caller's on failure. */
int handoff_conn_open_fd(int fd, const struct handoff_options *o,
                         const struct handoff_callbacks *cb, struct handoff_conn **out,
                         struct baton_error *e);
/* Two ends of an in-memory stream, one for each of two connections of one process. */
int handoff_link_pair(struct transport **a, struct transport **b, struct baton_error *e);
void handoff_link_close(struct transport *t); /* an end that no connection took; NULL is fine */
/* Ends every request (on_end, BATON_ERR_CANCELLED) after trying to tell the peer; NULL is fine. */
void handoff_conn_close(struct handoff_conn *c);
/* At most 2 descriptors; *timeout_ns: after how long step must be called at the latest. Returns how
 * many; 0 once the connection is dead. */
int handoff_conn_poll(struct handoff_conn *c, struct pollfd *fds, uint64_t *timeout_ns);
/* Do what can be done now, in bounded time. A negative code: the connection is dead (its stream is
 * closed, all requests were ended, every later call says the same). */
int handoff_conn_step(struct handoff_conn *c, struct baton_error *e);
/* Whether it is dead: also inside the on_end of its requests, which tells death from a refusal. */
bool handoff_conn_dead(const struct handoff_conn *c);
/* true once the peer's HELLO was read, and while the connection lives. */
bool handoff_conn_ready(const struct handoff_conn *c);
/* true while frames wait to be written. */
bool handoff_conn_busy(const struct handoff_conn *c);

/* ---- producer ----------------------------------------------------------------------------- */

/* BATON_ERR_BUSY while HANDOFF_MAX_REQUESTS are open or too much waits to be written. An id may be
 * used again once its request ended on both ends; BATON_ERR_BUSY before. */
int handoff_offer(struct handoff_conn *c, const struct handoff_offer *o, struct baton_error *e);
/* Queue positions [first, first+n) of K and V of one layer, any time after offer: nothing leaves
 * before on_reserve. The view is copied with its part of the block table, the pages are not: they
 * must stay untouched until on_end. Splits into pieces of about 512 KiB,
 * or of a slot where they are placed; digests as it sends. A
 * request's calls for one layer come in ascending order of positions, each position of the slot
 * exactly once. Positions that the consumer does not retain or already holds are left out here, so
 * a caller may pass whole chunks; only pages of retained positions are ever read. */
int handoff_layer(struct handoff_conn *c, uint64_t request, uint32_t layer,
                  const struct baton_kv_view *view, uint32_t first, uint32_t n,
                  struct baton_error *e);
/* All layers were queued: COMMIT follows the last of them. May come before on_reserve. A request
 * that has ended meanwhile is BATON_ERR_CANCELLED, here and in handoff_layer. */
int handoff_commit(struct handoff_conn *c, uint64_t request, const struct handoff_commit *commit,
                   struct baton_error *e);

/* ---- consumer ----------------------------------------------------------------------------- */

/* Answer an offer, in on_offer or later: views [n_layers] of the pages lent to it, copied with
 * their block tables. `held` < n_ids positions are in place already and will not travel. */
int handoff_reserve(struct handoff_conn *c, uint64_t request, const struct baton_kv_view *views,
                    uint32_t held, bool wants_logits, struct baton_error *e);
int handoff_refuse(struct handoff_conn *c, uint64_t request, const struct baton_error *why,
                   struct baton_error *e);

/* Ask for what a ticket of the peer's stands for, as a request whose id the caller chooses; it must
 * not be open on this connection. on_offer follows, or on_end with the refusal: see
 * handoff_ticket_claim. An abort gives the claim back, with a new lease; where its reason is
 * BATON_ERR_CANCELLED nobody here wants the request any more, and the issuer gives it up. */
int handoff_claim(struct handoff_conn *c, uint64_t request, const uint8_t ticket[HANDOFF_TICKET],
                  struct baton_error *e);

/* The same without a ticket: ask for the prefill of these ids, of which at most max_new tokens will
 * follow. Once handoff_conn_ready; BATON_ERR_UNSUPPORTED where the producer's HELLO does not say
 * that it takes this. on_offer follows, or on_end. */
int handoff_ask(struct handoff_conn *c, uint64_t request, const int32_t *ids, uint32_t n_ids,
                uint32_t max_new, struct baton_error *e);

/* ---- both --------------------------------------------------------------------------------- */

/* End a request from this side; on_end follows at once. Unknown requests are ignored. */
void handoff_abort(struct handoff_conn *c, uint64_t request, const struct baton_error *why);

/* When anything was last heard of the peer (CLOCK_MONOTONIC); 0 = nothing yet. */
uint64_t handoff_conn_heard(const struct handoff_conn *c);

/* ---- tickets ------------------------------------------------------------------------------ */

/* The book of an engine's tickets. Each stands for one request and is open, claimed or over:
 *
 *     issue -> open -> claim -> claimed -> burn (after ACK), and nobody can use it again
 *               ^                  |
 *               +---- release -----+       the claimant's connection ended before ACK
 *
 * An open ticket lives as long as its lease; a claimed one as long as its connection, whose
 * heartbeats renew the lease. No clock and no thread of its own: callers say what time it is
 * (CLOCK_MONOTONIC), one thread at a time. */
struct handoff_tickets;

#define HANDOFF_MAX_TICKETS 1024u

struct handoff_tickets_options {
    const void
        *key; /* the handoff key: a ticket of an earlier start is then told from a forged one;
                        NULL = a random one */
    size_t key_bytes;
    uint64_t epoch;    /* differs between two starts of an engine; 0 = random */
    uint64_t lease_ns; /* 0 = 30 s */
};

int handoff_tickets_open(const struct handoff_tickets_options *o, struct handoff_tickets **out,
                         struct baton_error *e);
void handoff_tickets_close(struct handoff_tickets *b); /* NULL is fine */
/* A ticket for a request, which has none yet. `generations` is a number that changes when the pages
 * that it stands for are given back (kv_seq_generations). BATON_ERR_BUSY: too many are out. */
int handoff_ticket_issue(struct handoff_tickets *b, uint64_t request, uint64_t generations,
                         uint64_t now_ns, uint8_t ticket[HANDOFF_TICKET], struct baton_error *e);
/* Whose ticket it is. BATON_ERR_INTEGRITY: forged or changed; BATON_ERR_STALE: expired, used up,
 * withdrawn, of another epoch. */
int handoff_ticket_request(struct handoff_tickets *b, const uint8_t ticket[HANDOFF_TICKET],
                           uint64_t now_ns, uint64_t *request, struct baton_error *e);
/* Claim it, `generations` being those of now. Fails as above, with BATON_ERR_STALE where they
 * differ, and with BATON_ERR_BUSY where it is claimed. */
int handoff_ticket_claim(struct handoff_tickets *b, const uint8_t ticket[HANDOFF_TICKET],
                         uint64_t generations, uint64_t now_ns, struct baton_error *e);
/* Its request still waits somewhere: a lease from now on. Fails as handoff_ticket_request. */
int handoff_ticket_renew(struct handoff_tickets *b, const uint8_t ticket[HANDOFF_TICKET],
                         uint64_t now_ns, struct baton_error *e);
/* The claimant is gone without ACK, last heard of at heard_ns: open again, a lease from then on. */
void handoff_ticket_release(struct handoff_tickets *b, uint64_t request, uint64_t heard_ns);
/* It is over: acknowledged, or its owner gave the request up. Unknown requests are ignored. */
void handoff_ticket_burn(struct handoff_tickets *b, uint64_t request);
/* Take out one request whose lease ended; false: none. The caller gives its pages back. */
bool handoff_ticket_expire(struct handoff_tickets *b, uint64_t now_ns, uint64_t *request);
/* When the next lease ends; UINT64_MAX: none will. */
uint64_t handoff_ticket_due(const struct handoff_tickets *b);
uint32_t handoff_tickets_open_n(const struct handoff_tickets *b); /* open or claimed */

/* As text: "bt1." and 86 digits of base64url. Parsing takes that form alone: BATON_ERR_INPUT. */
#define HANDOFF_TICKET_TEXT 91u
void handoff_ticket_text(const uint8_t ticket[HANDOFF_TICKET], char out[HANDOFF_TICKET_TEXT]);
int handoff_ticket_parse(const char *text, uint8_t ticket[HANDOFF_TICKET], struct baton_error *e);

#endif
