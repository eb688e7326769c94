/* SPDX-License-Identifier: Apache-2.0 */
/* Inside handoff: frames as they lie on the wire, requests, and the parts of a connection.
 *
 * frame.c    header and bodies, bytes <-> structs; every bound is checked there
 * offer.c    the body of OFFER, geometry and identity
 * request.c  the table of requests and how one ends
 * producer.c consumer.c  the two halves of the protocol
 * claim.c    requests that the consumer opens, by a ticket or by the prompt
 * ticket.c   the book of tickets of an issuer
 * landing.c  memory lent for pieces, and its credits
 * gather.c   pieces that are sent from the pages themselves
 * conn.c     HELLO, heartbeats, life and death of a connection
 * in.c out.c its frames, from bytes and to bytes
 * auth.c     session keys and the tags of frames
 * key.c fd.c keys from files; listeners, descriptors and links for rooms that know no transports
 */
#ifndef HANDOFF_HANDOFF_PRIV_H
#define HANDOFF_HANDOFF_PRIV_H

#include "base/base.h"
#include "handoff/handoff.h"

/* ---- the wire (docs/wire.md) ---------------------------------------------------------------- */

#define HANDOFF_MAGIC 0x4E544142u /* "BATN" */
#define HANDOFF_VERSION 1u
#define HANDOFF_HEADER 48u
#define HANDOFF_MAX_PAYLOAD (4u << 20) /* of one frame: one leaf of the widest row */
#define HANDOFF_MAX_LOGITS (1u << 20)  /* bytes of one frame of a row */
#define HANDOFF_PIECE (512u << 10)     /* what a sender aims at: it stays in a core's cache */
#define HANDOFF_MAX_ROW 65536u         /* bytes of one position of one slot */
#define HANDOFF_NO_SLOT UINT32_MAX

enum handoff_type {
    HANDOFF_HELLO = 1,
    HANDOFF_HEARTBEAT = 2,
    HANDOFF_BYE = 3,
    HANDOFF_OFFER = 4,
    HANDOFF_RESERVE = 5,
    HANDOFF_REFUSE = 6,
    HANDOFF_LAYER = 7,
    HANDOFF_COMMIT = 8,
    HANDOFF_LOGITS = 9,
    HANDOFF_ACK = 10,
    HANDOFF_NACK = 11,
    HANDOFF_ABORT = 12,
    HANDOFF_CLOSE = 13,
    HANDOFF_CLAIM = 14,
    HANDOFF_LANDING = 15,
    HANDOFF_CREDIT = 16,
    HANDOFF_ASK = 17,
    HANDOFF_N_TYPES
};

#define HANDOFF_FLAG_PAYLOAD 1u /* body_check covers the payload too */
#define HANDOFF_FLAG_TAG 2u     /* a tag follows the payload */
#define HANDOFF_TAG 16u         /* bytes of it */

struct handoff_header {
    uint16_t version;
    uint8_t type, flags;
    uint32_t control, payload; /* bytes of each that follow the header, in this order */
    uint64_t request, sequence;
    uint64_t body_check;
};

/* Bytes of bodies; those with a table say how much one entry adds. */
#define HANDOFF_HELLO_BYTES 96u
#define HANDOFF_REASON_BYTES 256u
#define HANDOFF_OFFER_BYTES 192u
#define HANDOFF_OFFER_LAYER_BYTES 16u
#define HANDOFF_RESERVE_BYTES 96u
#define HANDOFF_LAYER_BYTES 32u
#define HANDOFF_COMMIT_BYTES 128u
#define HANDOFF_COMMIT_SLOT_BYTES 40u
#define HANDOFF_LOGITS_BYTES 16u
#define HANDOFF_ACK_BYTES 32u
#define HANDOFF_NACK_BYTES (8u + HANDOFF_REASON_BYTES)
#define HANDOFF_CLAIM_BYTES 96u
#define HANDOFF_LANDING_BYTES 32u
#define HANDOFF_CREDIT_BYTES 16u
#define HANDOFF_ASK_BYTES 16u
#define HANDOFF_TAKES_ASK 1u /* bit of HELLO's `takes` */

static inline void handoff_put16(uint8_t *p, uint16_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}

static inline void handoff_put32(uint8_t *p, uint32_t v)
{
    handoff_put16(p, (uint16_t)v);
    handoff_put16(p + 2, (uint16_t)(v >> 16));
}

static inline void handoff_put64(uint8_t *p, uint64_t v)
{
    handoff_put32(p, (uint32_t)v);
    handoff_put32(p + 4, (uint32_t)(v >> 32));
}

static inline uint16_t handoff_get16(const uint8_t *p)
{
    return (uint16_t)(p[0] | p[1] << 8);
}

static inline uint32_t handoff_get32(const uint8_t *p)
{
    return handoff_get16(p) | (uint32_t)handoff_get16(p + 2) << 16;
}

static inline uint64_t handoff_get64(const uint8_t *p)
{
    return handoff_get32(p) | (uint64_t)handoff_get32(p + 4) << 32;
}

static inline size_t handoff_tag_bytes(const struct handoff_header *h)
{
    return h->flags & HANDOFF_FLAG_TAG ? HANDOFF_TAG : 0;
}

const char *handoff_type_name(unsigned type);
/* Write the header, its check included; body_check must be set. */
void handoff_header_write(uint8_t raw[HANDOFF_HEADER], const struct handoff_header *h);
/* Read a header and believe it: magic, check, version, type, who may send it, sizes in bounds. */
int handoff_header_read(const uint8_t raw[HANDOFF_HEADER], bool from_producer,
                        struct handoff_header *h, struct baton_error *e);
/* The check over a body: payload is hashed where `flags` says so. */
uint64_t handoff_body_check(unsigned flags, const uint8_t *control, size_t control_n,
                            const uint8_t *payload, size_t payload_n);

struct handoff_hello {
    uint16_t min_version, max_version;
    uint32_t role; /* 1 producer, 2 consumer */
    uint32_t auth; /* enum handoff_auth_level */
    uint64_t heartbeat_ns, dead_ns;
    uint8_t nonce[32];
    uint32_t takes; /* bits: what this end takes beyond what every version 1 does */
};
void handoff_hello_write(uint8_t *p, const struct handoff_hello *h);
int handoff_hello_read(const uint8_t *p, struct handoff_hello *h, struct baton_error *e);

void handoff_reason_write(uint8_t *p, const struct baton_error *why);
/* A stranger's reason made harmless: a known code, printable UTF-8. */
void handoff_reason_read(const uint8_t *p, struct baton_error *why);

struct handoff_terms { /* body of RESERVE */
    uint32_t held, credits, landing;
    bool wants_logits;
};
void handoff_reserve_write(uint8_t *p, const struct handoff_terms *x);
int handoff_reserve_read(const uint8_t *p, struct handoff_terms *x, struct baton_error *e);

struct handoff_piece { /* body of LAYER */
    uint32_t layer, which, first, count, dtype;
    uint32_t placement; /* landing region; 0 = the payload follows */
    uint64_t offset;    /* there */
};
void handoff_piece_write(uint8_t *p, const struct handoff_piece *x);
int handoff_piece_read(const uint8_t *p, struct handoff_piece *x, struct baton_error *e);

struct handoff_lending { /* body of LANDING */
    uint32_t region, n_slots, slot_bytes;
};
void handoff_lending_write(uint8_t *p, const struct handoff_lending *x);
int handoff_lending_read(const uint8_t *p, struct handoff_lending *x, struct baton_error *e);
void handoff_credit_write(uint8_t *p, uint32_t region, uint32_t slot);
int handoff_credit_read(const uint8_t *p, uint32_t *region, uint32_t *slot, struct baton_error *e);

struct handoff_totals { /* fixed part of COMMIT besides struct handoff_commit */
    uint32_t slots, pieces;
    uint64_t bytes;
    bool logits_follow;
    uint8_t digest[32], logits_digest[32];
};
void handoff_commit_write(uint8_t *p, const struct handoff_commit *m,
                          const struct handoff_totals *t);
/* `n`: bytes of the control body, which must be exactly those of t->slots entries. */
int handoff_commit_read(const uint8_t *p, size_t n, struct handoff_commit *m,
                        struct handoff_totals *t, struct baton_error *e);

/* Bytes of a whole digest leaf as it travels. */
static inline size_t handoff_leaf_bytes(const struct kv_geometry *g)
{
    return kv_piece_bytes(g->dtype, g->kv_heads, g->head_dim, KV_BLOCK);
}

size_t handoff_offer_bytes(const struct handoff_offer *o);
void handoff_offer_write(uint8_t *p, const struct handoff_offer *o);
/* ids point into p, which is rewritten in the host's order. *table: the layer table in p. */
int handoff_offer_read(uint8_t *p, size_t n, struct handoff_offer *o, const uint8_t **table,
                       struct baton_error *e);
/* The layer table against the retention rule; BATON_ERR_MISMATCH names the layer. */
int handoff_offer_check_table(const struct handoff_offer *o, const uint8_t *table,
                              struct baton_error *e);
/* Limits that hold for both ends; `code` is what a breach is to the caller. */
int handoff_geometry_limits(const struct kv_geometry *g, int code, struct baton_error *e);

/* ---- requests ------------------------------------------------------------------------------- */

enum handoff_state {
    HANDOFF_CLAIMED,   /* CLAIM or ASK sent or taken, no OFFER yet: nothing but the id is known */
    HANDOFF_OFFERED,   /* OFFER sent or taken, no answer yet */
    HANDOFF_RESERVED,  /* pieces travel */
    HANDOFF_COMMITTED, /* COMMIT sent or taken: the logits row, then the answer */
    HANDOFF_ENDED,     /* over on this end; kept until both ends sent their final frame */
};

/* One slot under way, at either end. */
struct handoff_slot {
    uint32_t first, next;  /* positions [first, next) were sent or have landed */
    struct kv_digest *sum; /* from the first piece to the last */
    uint8_t digest[32];    /* once next == n_ids; zero where digests are off */
};

/* A view with its own layout and block table, so that nobody's later growth moves it. */
struct handoff_view {
    struct baton_kv_view view;
    struct baton_kv_layout layout;
    int32_t *blocks;
};
/* Copies what [first, end) needs of the table. */
int handoff_view_copy(struct handoff_view *dst, const struct baton_kv_view *src, uint32_t first,
                      uint32_t end, struct baton_error *e);
void handoff_view_free(struct handoff_view *v); /* accepts a zeroed one */

/* A range that the producer queued, and where its pages are. */
struct handoff_job {
    struct handoff_job *next;
    uint32_t first, end;
    struct handoff_view view;
};

struct handoff_feed { /* producer, one layer */
    struct handoff_job *jobs, **tail;
    uint32_t queued; /* positions below are queued or need not travel */
    bool waiting;    /* is in the request's `turn` */
};

struct handoff_request {
    struct handoff_request *next;
    uint64_t id;
    enum handoff_state state;
    bool claimed; /* opened by CLAIM or ASK */
    bool digest, wants_logits;
    bool placed; /* producer: pieces go to the landing region */
    uint32_t n_ids, held;
    struct kv_geometry geometry;
    struct handoff_slot *slots; /* [2 * n_layers], K and V of layer 0, of layer 1, ... */
    uint32_t slots_done;
    uint32_t pieces;
    uint64_t bytes;
    struct handoff_commit commit; /* commit.logits is `logits` */
    struct handoff_totals totals; /* consumer: as COMMIT says */
    float *logits;
    uint32_t logits_done;
    /* producer */
    struct handoff_feed *feeds; /* [n_layers] */
    uint32_t *turn;             /* ring of layers that have something to send */
    uint32_t turn_first, turn_n;
    bool commit_queued;
    /* consumer */
    struct handoff_view *views; /* [n_layers] */
    uint64_t first_byte_ns, last_byte_ns, import_ns, verify_ns, landed;
};

struct handoff_request *handoff_request_find(struct handoff_conn *c, uint64_t id);
/* A new entry that is claimed. */
int handoff_request_open(struct handoff_conn *c, uint64_t id, struct handoff_request **out,
                         struct baton_error *e);
/* What OFFER says, into a new entry or one that is claimed. */
int handoff_request_add(struct handoff_conn *c, const struct handoff_offer *o,
                        struct handoff_request **out, struct baton_error *e);
/* The offer did not come about: forget the entry, or go back to where it was claimed. */
void handoff_request_withdraw(struct handoff_conn *c, struct handoff_request *r);
/* Forget an entry: its id means nothing from here on. */
void handoff_request_remove(struct handoff_conn *c, struct handoff_request *r);
/* Log a transition. */
void handoff_request_note(const struct handoff_conn *c, const struct handoff_request *r,
                          const char *what);
/* RESERVE fixes `held`: every slot starts at the first position that is retained and not held. */
void handoff_request_start(struct handoff_request *r, uint32_t held, bool wants_logits);
/* SHA-256 over the slot digests in slot order; zero where digests are off. */
void handoff_request_digest(const struct handoff_request *r, uint8_t out[32]);
/* Copy a piece and take it into its slot's digest in one pass; the last one closes the slot. Where
 * dst is NULL it lies in src already, and is digested alone. */
int handoff_request_move(struct handoff_request *r, uint32_t slot, enum kv_digest_side side,
                         const struct baton_kv_view *dst, const struct baton_kv_view *src,
                         uint32_t first, uint32_t n, struct baton_error *e);
/* Over on this end: everything is freed but the id, then on_end is called. */
void handoff_request_end(struct handoff_conn *c, struct handoff_request *r,
                         const struct baton_error *why);
/* Send this end's final frame (ABORT, REFUSE, NACK with a reason; ACK, CLOSE without), then end. */
void handoff_request_final(struct handoff_conn *c, struct handoff_request *r, unsigned type,
                           uint32_t slot, const struct baton_error *why);
/* The peer's final frame came: answer it with CLOSE unless ours went before; end; forget the id. */
void handoff_request_finished(struct handoff_conn *c, struct handoff_request *r,
                              const struct baton_error *why);
/* End all, free all. */
void handoff_request_end_all(struct handoff_conn *c, const struct baton_error *why);

/* ---- authentication ------------------------------------------------------------------------- */

enum handoff_auth_level {
    HANDOFF_AUTH_NONE = 0,
    HANDOFF_AUTH_CONTROL = 1, /* tags over header and control body */
    HANDOFF_AUTH_PAYLOAD = 2, /* and payload */
};

struct handoff_auth {
    enum handoff_auth_level wanted; /* by this end */
    enum handoff_auth_level level;  /* of the connection; NONE before both HELLOs are known */
    bool proven;                    /* a frame of the peer had the right tag; or none is needed */
    struct base_hmac secret;        /* keyed by the shared key, until HELLO */
    struct base_hmac in, out;       /* keyed by the session key of each direction */
};

/* The options' key; BATON_ERR_USAGE where it is too short, too long or missing. */
int handoff_auth_open(struct handoff_auth *a, const struct handoff_options *o,
                      struct baton_error *e);
void handoff_auth_close(struct handoff_auth *a);
/* Both bodies of HELLO are known: agree on a level, derive the keys. The error says who lacks what.
 */
int handoff_auth_agree(struct handoff_auth *a, uint32_t theirs,
                       const uint8_t producer[HANDOFF_HELLO_BYTES],
                       const uint8_t consumer[HANDOFF_HELLO_BYTES], bool is_producer,
                       struct baton_error *e);
/* The tag of a frame, `key` being a's in or out. */
void handoff_auth_tag(const struct handoff_auth *a, const struct base_hmac *key,
                      const uint8_t raw[HANDOFF_HEADER], const uint8_t *control, size_t control_n,
                      const uint8_t *payload, size_t payload_n, uint8_t tag[HANDOFF_TAG]);

/* ---- connection ----------------------------------------------------------------------------- */

/* A frame that waits to be written. Its sequence number is given when its turn comes. */
struct handoff_out {
    struct handoff_out *next;
    struct handoff_header header;
    const uint8_t *payload; /* in the connection's stage; NULL: none, or its runs */
    uint32_t landed;        /* bytes that were put into the landing region for it */
    uint8_t raw[HANDOFF_HEADER];
    uint8_t tag[HANDOFF_TAG];
    uint8_t control[];
};

/* Its payload lies in the pages: the connection's runs say where. */
static inline bool handoff_gathered(const struct handoff_out *f)
{
    return f->header.payload && !f->payload;
}

/* Bytes of a piece that lie together in the pages. */
struct handoff_run {
    const uint8_t *data;
    size_t bytes;
};
#define HANDOFF_MAX_RUNS 128u /* of a piece that is sent from there */

struct handoff_buffer {
    uint8_t *data;
    size_t capacity;
};
/* Room for n bytes; contents are not kept. */
int handoff_buffer_fit(struct handoff_buffer *b, size_t n, struct baton_error *e);

#define HANDOFF_MAX_SLOTS 64u
#define HANDOFF_SLOT_UNIT 64u /* slots begin at multiples */

/* The connection's landing region, at either end. */
struct handoff_landing {
    bool on;                         /* this end lends, or uses what is lent */
    uint32_t want_slots, want_bytes; /* consumer: as configured; 0 = the usual */
    struct handoff_lending lent;     /* lent.region 0: none yet */
    struct transport_landing *memory;
    uint64_t used; /* producer: slots without credit, a bit each */
    bool owes;     /* consumer: credits wait to be written */
};

enum handoff_part {
    HANDOFF_IN_HEADER,
    HANDOFF_IN_CONTROL,
    HANDOFF_IN_PAYLOAD,
    HANDOFF_IN_TAG,
};

struct handoff_conn {
    struct transport *t; /* NULL once dead */
    struct handoff_callbacks cb;
    bool producer;
    bool hello_seen;
    uint32_t peer_takes; /* of its HELLO */
    struct handoff_auth auth;
    uint8_t hello[HANDOFF_HELLO_BYTES]; /* this end's */
    uint64_t heartbeat_ns, dead_ns;
    uint64_t last_in_ns, last_out_ns, last_step_ns; /* 0 = not yet */
    uint64_t proof_due_ns; /* the peer must have proven itself by then; 0 = before the first step */
    struct baton_error death; /* code != 0: dead, or will be at the end of this step */
    /* input: the frame under way */
    enum handoff_part in_part;
    size_t in_got; /* bytes of the part */
    uint64_t in_began_ns;
    uint8_t in_raw[HANDOFF_HEADER];
    uint8_t in_tag[HANDOFF_TAG];
    struct handoff_header in;
    struct handoff_buffer in_control, in_payload;
    uint64_t in_sequence;
    /* output */
    struct handoff_out *out_first, **out_tail; /* not begun yet */
    size_t out_bytes;
    struct handoff_out *writing;
    size_t written;
    struct handoff_buffer stage; /* payload of the frame under way, or room for it */
    struct handoff_run runs[HANDOFF_MAX_RUNS];
    uint32_t n_runs;
    uint64_t stage_began_ns, staged_ns;
    uint64_t out_sequence;
    struct handoff_landing landing;
    /* requests */
    struct handoff_request *requests;
    uint32_t n_requests;
};

/* Moved in one direction by one step. */
#define HANDOFF_STEP_BYTES (16u << 20)

/* "consumer" or "producer": what the other end is. */
const char *handoff_peer_role(const struct handoff_conn *c);
int handoff_hello_take(struct handoff_conn *c, const uint8_t *control, struct baton_error *e);
/* Always the connection's end. */
int handoff_bye_take(struct handoff_conn *c, const uint8_t *control, struct baton_error *e);
/* Read and take what has come, at most HANDOFF_STEP_BYTES. */
int handoff_in_read(struct handoff_conn *c, struct baton_error *e);

/* A control frame to be filled and then pushed; NULL without memory. */
struct handoff_out *handoff_out_new(unsigned type, uint64_t request, size_t control,
                                    struct baton_error *e);
void handoff_out_push(struct handoff_conn *c, struct handoff_out *f);
/* A frame that carries a reason, or (NULL) no body, for the connection itself. */
int handoff_out_reason(struct handoff_conn *c, unsigned type, const struct baton_error *why);
/* Write what can be written now, at most HANDOFF_STEP_BYTES. */
int handoff_out_write(struct handoff_conn *c, struct baton_error *e);
/* true while handoff_out_write would try to write something. */
bool handoff_out_ready(const struct handoff_conn *c);
/* true where a frame that is pushed now may leave: HELLO was read, and the peer has the key. */
bool handoff_out_may_send(const struct handoff_conn *c);
void handoff_out_drop(struct handoff_conn *c);
/* All but HELLO and the frame under way. */
void handoff_out_drop_waiting(struct handoff_conn *c);
/* true while a frame of this request is not wholly written. */
bool handoff_out_pending(const struct handoff_conn *c, uint64_t request);
/* Nothing can be told to the peer any more: the connection dies at the end of this step. */
void handoff_conn_doom(struct handoff_conn *c, const struct baton_error *why);

/* Frames of the other role, as they came; `r` is the frame's request, never an ended one. A
 * negative code ends the connection. */
int handoff_producer_take(struct handoff_conn *c, struct handoff_request *r, const uint8_t *control,
                          struct baton_error *e);
int handoff_claim_take(struct handoff_conn *c, const uint8_t *control, struct baton_error *e);
int handoff_consumer_offer(struct handoff_conn *c, uint8_t *control, struct baton_error *e);
int handoff_consumer_take(struct handoff_conn *c, struct handoff_request *r, const uint8_t *control,
                          uint8_t *payload, struct baton_error *e);
/* ---- landing.c ------------------------------------------------------------------------------- */

/* As the options say, where the transport can. */
int handoff_landing_open(struct handoff_conn *c, struct transport *t,
                         const struct handoff_options *o, struct baton_error *e);
/* Consumer: lend the region if this is the first time, sized for leaves of `leaf` bytes, and fill
 * in what RESERVE says about it. */
int handoff_landing_lend(struct handoff_conn *c, size_t leaf, struct handoff_terms *x,
                         struct baton_error *e);
/* Consumer: where a placed piece of `bytes` lies; BATON_ERR_INTEGRITY where it cannot. */
int handoff_landing_find(const struct handoff_conn *c, const struct handoff_piece *p, size_t bytes,
                         uint8_t **data, struct baton_error *e);
/* Consumer: a placed piece was read, or will not be: its slot is free again. */
void handoff_landing_credit(struct handoff_conn *c, const struct handoff_piece *p);
/* Producer: LANDING with the descriptor that came with it (owned; -1 = none), CREDIT, and what
 * RESERVE says. */
int handoff_landing_take(struct handoff_conn *c, const uint8_t *control, int fd,
                         struct baton_error *e);
int handoff_landing_take_credit(struct handoff_conn *c, const uint8_t *control,
                                struct baton_error *e);
int handoff_landing_take_terms(const struct handoff_conn *c, const struct handoff_terms *x,
                               size_t leaf, bool *placed, struct baton_error *e);
/* Producer: false while every slot is in use. */
bool handoff_landing_free(const struct handoff_conn *c);
/* Producer: a free slot, to be sent or put back. */
uint8_t *handoff_landing_claim(struct handoff_conn *c, struct handoff_piece *p);
void handoff_landing_unclaim(struct handoff_conn *c, const struct handoff_piece *p);
/* The descriptor that goes with this frame; -1 = none. */
int handoff_landing_fd(const struct handoff_conn *c, const struct handoff_out *f);
/* It went. */
void handoff_landing_sent(struct handoff_conn *c);
/* The mapping goes; nothing that the peer still writes is read. */
void handoff_landing_drop(struct handoff_conn *c);

/* Where a piece lies in the pages, in the order of the wire, into c's runs. false: in too many
 * places, or not as it travels. */
bool handoff_gather(struct handoff_conn *c, const struct baton_kv_view *v, enum kv_which which,
                    uint32_t first, uint32_t end);
/* The request's pages are about to go: what is left of a piece that is under way becomes zeros. */
void handoff_gather_drop(struct handoff_conn *c, const struct handoff_request *r);

/* The next frame with a payload that some request has ready, staged, or NULL. */
struct handoff_out *handoff_producer_next(struct handoff_conn *c);
/* true while handoff_producer_next would find something. */
bool handoff_producer_ready(const struct handoff_conn *c);

/* piece.c: tell the owner who asked to know (on_piece). A frame was written whole; `c` does not
 * hold it any more, and its request may end here. */
void handoff_piece_sent(struct handoff_conn *c, const struct handoff_out *f);
/* A piece of the frame just read is in its place; `r` may end here. */
void handoff_piece_placed(struct handoff_conn *c, const struct handoff_request *r,
                          const struct handoff_piece *p, uint64_t digested_ns);

#endif
