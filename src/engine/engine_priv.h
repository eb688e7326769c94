/* SPDX-License-Identifier: Apache-2.0 */
/* Inside engine: the objects, who owns which of their fields, and the messages between threads.
 *
 * Three kinds of threads meet here. A caller's thread knows a request handle, under its lock. The
 * engine thread owns sessions, lanes, pages and the device; no lock. The I/O thread owns the
 * connection; it reads and writes a session's pages only between the message that lends them
 * (LAYER, RESERVE) and the ENDED that it sends back, exactly one for each OFFER sent or received.
 */
#ifndef ENGINE_ENGINE_PRIV_H
#define ENGINE_ENGINE_PRIV_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "base/base.h"
#include "engine/engine.h"
#include "handoff/handoff.h"
#include "model/sampler.h"

#define ENGINE_MAX_LANES 8u
#define ENGINE_MAX_WAITING 64u
#define ENGINE_MAX_OPEN (ENGINE_MAX_LANES + ENGINE_MAX_WAITING)
#define ENGINE_MAX_OFFERS (ENGINE_MAX_OPEN + 64u) /* of one peer, answered or not */
#define ENGINE_MAX_OFFERED_IDS (4u << 20)         /* in all offers together: 16 MiB */
#define ENGINE_MAX_PEERS 64u                      /* connections of an engine */
#define ENGINE_MAX_TOLD 64u                       /* renewals and releases of callers under way */
#define ENGINE_MAX_ROWS 8u /* rows of logits that wait for a slow caller; then its lane pauses */
#define ENGINE_DEFAULT_CTX 8192u
#define ENGINE_CONTENT_BYTES (64u << 20) /* checkpoints up to here are always hashed */

/* ---- model -------------------------------------------------------------------------------- */

/* A device with the weights in its order. */
struct engine_binding {
    struct engine_binding *next;
    char *name;
    struct device *device;
    struct model_bound *bound;
    bool prepared; /* stays with the model; else it goes with the engine that opened it */
    bool in_use;
    pid_t started; /* the process that holds its workers; 0 = not started */
    uint32_t threads;
};

struct baton_model {
    struct model *model;
    struct baton_model_options options; /* path and pin are not used after opening */
    struct handoff_identity identity;
    bool content;         /* it is of the content, not of a lineage */
    pthread_mutex_t lock; /* bindings, tokenizer, chat */
    struct engine_binding *bindings;
    struct model_tokenizer *tokenizer;
    struct model_chat *chat;
};

int engine_model_open(const struct baton_model_options *o, struct baton_model **out,
                      struct baton_error *e);
void engine_model_close(struct baton_model *m);
int engine_model_prepare(struct baton_model *m, const char *device, struct baton_error *e);
int engine_tokenize(const struct baton_model *m, const char *text, size_t n, bool chat,
                    int32_t **ids, size_t *n_ids, struct baton_error *e);
int engine_detokenize(const struct baton_model *m, const int32_t *ids, size_t n_ids, char **text,
                      struct baton_error *e);
/* A started binding for one engine: a prepared one where it is free, else a new one. */
int engine_binding_get(struct baton_model *m, const char *device, uint32_t threads,
                       struct engine_binding **out, struct baton_error *e);
void engine_binding_put(struct baton_model *m, struct engine_binding *b); /* NULL is fine */
/* Fill m->identity: content or lineage, see identity.c. */
int engine_identity_fill(struct baton_model *m, struct baton_error *e);

/* ---- requests ----------------------------------------------------------------------------- */

/* What wakes the engine thread from a signal handler; outlives the engine for late cancels. */
struct engine_wake {
    atomic_uint refs;
    int fd; /* eventfd */
};
int engine_wake_open(struct engine_wake **out, struct baton_error *e);
void engine_wake_put(struct engine_wake *w); /* NULL is fine */
void engine_wake_ring(struct engine_wake *w);

/* What was asked for; immutable after submit. */
struct engine_ask {
    uint64_t id;
    int32_t *ids;   /* [n_ids] */
    int32_t *force; /* [n_force] */
    uint32_t n_ids, n_force;
    uint32_t max_tokens, min_tokens;
    enum baton_mode mode;
    bool ignore_eos, want_logits, local_prefill;
    bool hold; /* producer: keep it for a ticket */
    bool pull; /* consumer: by `ticket`, or by its ids (`asks`) */
    bool asks;
    uint8_t ticket[HANDOFF_TICKET]; /* of whom listens at `from` */
    char *from;                     /* NULL = the fixed peer */
    struct model_sampling sampling;
    uint32_t choice;
    void (*notify)(void *ctx); /* NULL = nobody */
    void *notify_ctx;
    char *kv_save;           /* NULL = no */
    struct kv_file *kv_load; /* checked against model and ids; NULL = no */
    uint64_t accepted_ns;
};

struct engine_token {
    int32_t id, argmax;
    float margin;
    float *logits; /* owned until taken; NULL where not wanted */
    uint64_t time_ns;
};

struct baton_request {
    atomic_uint refs; /* the caller's and the session's */
    atomic_bool cancel;
    struct engine_wake *wake;
    struct engine_ask ask;
    pthread_mutex_t lock; /* all that follows */
    pthread_cond_t cond;
    struct engine_token *tokens; /* all that were generated; [taken, n) wait for the caller */
    uint32_t n, cap, taken;
    uint32_t n_rows; /* rows of logits among those that wait */
    float *current;  /* the row that the caller looks at */
    bool held;       /* `ticket` is filled in */
    struct baton_ticket ticket;
    bool over;
    struct baton_error error; /* code 0 = ended well */
    struct baton_stats stats;
};

int engine_request_open(struct engine_wake *wake, const struct baton_request_options *o,
                        struct baton_request **out, struct baton_error *e);
void engine_request_put(struct baton_request *r); /* NULL is fine */
/* Engine thread: hand a token over, with a copy of its row where `vocab` is not 0. */
int engine_request_push(struct baton_request *r, const struct engine_token *t, const float *row,
                        uint32_t vocab, const struct baton_stats *stats, struct baton_error *e);
void engine_request_publish(struct baton_request *r, const struct baton_stats *stats);
/* Nothing follows. why->code 0 = ended well. */
void engine_request_finish(struct baton_request *r, const struct baton_stats *stats,
                           const struct baton_error *why);
/* Too many rows of logits wait for the caller. */
bool engine_request_stalled(struct baton_request *r);
int engine_request_next(struct baton_request *r, struct baton_token *out, int64_t timeout_ns,
                        struct baton_error *e);
void engine_request_cancel(struct baton_request *r);
void engine_request_close(struct baton_request *r);
void engine_request_detach(struct baton_request *r);
int engine_request_stats(struct baton_request *r, struct baton_stats *out);
/* Engine thread: its prefill is over, this stands for it. */
void engine_request_hold(struct baton_request *r, const struct baton_ticket *t);
int engine_request_ticket(struct baton_request *r, struct baton_ticket *out, int64_t timeout_ns,
                          struct baton_error *e);

/* ---- sessions ----------------------------------------------------------------------------- */

enum engine_state {
    ENGINE_WAITING,   /* to prefill here: for pages and a lane */
    ENGINE_PREFILL,   /* chunks run */
    ENGINE_PREFILLED, /* producer: pages lent until the peer acknowledged */
    ENGINE_HELD,      /* producer: prefilled, its ticket waits for a claim */
    ENGINE_UNPAIRED,  /* consumer: no offer yet; its claim is out where it pulls */
    ENGINE_PAIRED,    /* consumer: offer accepted, waits for pages */
    ENGINE_IMPORT,    /* consumer: pages lent to the I/O thread */
    ENGINE_IMPORTED,  /* consumer: verified, waits for a lane */
    ENGINE_DECODE,    /* both, consumer: one row a step */
    ENGINE_CLOSING,   /* given up here, waits for ENDED */
};

/* Requests of which one half will come later, if at all; the oldest is forgotten first. */
struct engine_ids {
    uint64_t id[ENGINE_MAX_OPEN];
    uint32_t n;
};

/* An offer that arrived, as a message and while it waits for its submit. */
struct engine_offer {
    struct engine_offer *next;
    uint64_t id, serial;
    bool claimed; /* the answer to a claim: `serial` is the session's */
    struct handoff_identity identity;
    struct kv_geometry geometry;
    uint32_t n_ids;
    int32_t ids[]; /* [n_ids] */
};

struct engine_session {
    struct engine_session *next; /* in order of submission */
    struct baton_request *request;
    enum engine_state state;
    uint64_t serial; /* of its offer or claim */
    bool ticketed;   /* producer: the book has an entry for it */
    bool lent;       /* the I/O thread knows it and will send ENDED */
    int lane;        /* -1 = none */
    struct kv_seq *seq;
    uint32_t blocks;  /* of the pool's budget, committed to it */
    uint32_t done;    /* prompt positions computed */
    int32_t *context; /* [n_ids + max_tokens] prompt, then output */
    uint32_t n_out;
    struct baton_stats stats;
    struct baton_error why; /* CLOSING: what to report; code 0 = cancelled here */
    /* producer */
    uint32_t *sent;       /* [n_layers] the I/O thread was given the positions below */
    atomic_bool reserved; /* set by the I/O thread: the peer's pages are there */
    bool commit_sent;
    uint32_t held; /* consumer: positions [0, held) came from kv_load and do not travel */
    /* with a trace */
    uint32_t track; /* 0 = not seen yet */
    enum engine_state traced;
    uint64_t traced_ns; /* since when it is in that state */
    /* producer: the last row, read by the I/O thread until ENDED. consumer: written by it between
     * RESERVE and ENDED, as are result and committed. */
    float *row; /* [vocab] */
    struct handoff_commit commit;
    struct handoff_result result;
    bool committed;
};

int engine_submit(struct baton_engine *en, const struct baton_request_options *o,
                  struct baton_request **out, struct baton_error *e);
void engine_session_free(struct engine_session *s); /* no pages, no lane; NULL is fine */
/* Take pages for a sequence that will reach n_tokens positions; BATON_ERR_BUSY: not now. */
int engine_session_take_pages(struct baton_engine *en, struct engine_session *s, uint32_t n_tokens,
                              struct baton_error *e);
void engine_session_drop_pages(struct baton_engine *en, struct engine_session *s);
/* Where the device keeps KV of its own: bring what the layers retain of the sequence to the host's
 * pages, or from there to the device. Nothing to do elsewhere. Where KV lies in the lane, a
 * sequence without one has all of it in the host's pages; it is delivered when it has one. */
int engine_session_fetch(struct baton_engine *en, struct engine_session *s, struct baton_error *e);
int engine_session_deliver(struct baton_engine *en, struct engine_session *s,
                           struct baton_error *e);
/* The lowest free lane; BATON_ERR_BUSY: not now. */
int engine_session_take_lane(struct baton_engine *en, struct engine_session *s,
                             struct baton_error *e);
void engine_session_drop_lane(struct baton_engine *en, struct engine_session *s);
/* Into the stats: positions that the layers of each kind hold after the prompt. */
void engine_session_note_positions(const struct baton_engine *en, struct engine_session *s);
/* Show the cache to who observes this engine; 0 where nobody does. */
int engine_session_observe(struct baton_engine *en, struct engine_session *s,
                           struct baton_error *e);
/* Make the pool's figure known to other threads. */
void engine_count_pages(struct baton_engine *en);
/* The cache stands: save it where asked, choose token 1 from `row` (or from the commit where NULL)
 * and go on decoding. */
void engine_session_begin(struct baton_engine *en, struct engine_session *s, const float *row);
/* Into the stats: what became of the handoff and why. */
void engine_session_judge(struct engine_session *s, const char *verdict,
                          const struct baton_error *why);
/* Whether the choice is the largest logit, where no end token is banned. */
bool engine_takes_argmax(const struct engine_ask *a);
/* Choose the next token from a row of logits and hand it over. */
void engine_session_choose(struct baton_engine *en, struct engine_session *s, const float *row);
/* Give it up with a reason (code 0: cancelled here); the peer is told where there is one. */
void engine_session_fail(struct baton_engine *en, struct engine_session *s,
                         const struct baton_error *why);
/* It is over: give everything back, tell the caller, free. finish FAILED becomes CANCELLED where
 * `why` says so (code 0: here). */
void engine_session_over(struct baton_engine *en, struct engine_session *s,
                         enum baton_finish finish, const struct baton_error *why);

/* kv_file.c. The request's file into the session's empty sequence; `done` is set. */
int engine_kv_load(struct engine_session *s, struct baton_error *e);
/* The sequence as it stands; row may be NULL. */
int engine_kv_save(struct baton_engine *en, struct engine_session *s, const float *row,
                   struct baton_error *e);

/* ---- messages ----------------------------------------------------------------------------- */

enum engine_kind {
    /* to the engine thread */
    ENGINE_SUBMIT,   /* session */
    ENGINE_OFFERED,  /* offer, owned by the receiver */
    ENGINE_RESERVED, /* id: the peer has pages */
    ENGINE_ENDED,    /* id, why: the request is over at the connection */
    ENGINE_DEAD,     /* why: the fixed peer is; all its requests were ended before */
    ENGINE_CLAIMED,  /* ticket: answered with exactly one OFFER or ABORT of this serial */
    /* to the I/O thread */
    ENGINE_OFFER,   /* session */
    ENGINE_LAYER,   /* id, view, layer, first, n */
    ENGINE_COMMIT,  /* session */
    ENGINE_RESERVE, /* session */
    ENGINE_REFUSE,  /* id, why */
    ENGINE_ABORT,   /* id, why */
    ENGINE_CLAIM,   /* session */
    ENGINE_DIALED,  /* nothing: a peer has answered, or does not */
    ENGINE_STOP,
    /* callers, to the engine thread of a producer or the I/O thread of a consumer: ticket, from
     * (owned by the receiver) */
    ENGINE_RENEW,
    ENGINE_RELEASE,
};

struct engine_message {
    enum engine_kind kind;
    uint64_t id, serial; /* serial tells a request from all others of the engine */
    struct engine_session *session;
    struct engine_offer *offer;
    struct baton_kv_view view;
    uint32_t layer, first, n;
    uint64_t heard_ns; /* ENDED: when anything was last heard of the peer */
    uint8_t ticket[HANDOFF_TICKET];
    char *from;
    struct baton_error why;
};

/* Serials that the I/O thread gave, to offers and claims of others, have this bit. */
#define ENGINE_IO_SERIAL (1ull << 63)

/* Both ways have room for all that can be under way, besides LAYER: the I/O thread never waits for
 * the engine thread, the engine thread may wait for the I/O thread. */
#define ENGINE_QUEUE (4u * (ENGINE_MAX_OPEN + ENGINE_MAX_OFFERS))

/* ---- I/O thread --------------------------------------------------------------------------- */

/* A connection. The first one is the fixed peer of the engine's options; others were accepted, or
 * dialed for a pull. Waiting for an answer to a dial is a thread's of its own. */
struct engine_peer {
    struct baton_engine *engine; /* callbacks are given the peer */
    bool used;
    struct handoff_conn *conn; /* NULL: being dialed; the fixed peer: none, or dead */
    char *address;             /* dialed: where to; else NULL */
    uint64_t claims;           /* made here so far */
    bool greeted;              /* what waited for its HELLO was sent */
    uint64_t idle_ns;          /* dialed: since when nothing is under way; 0 = something is */
    struct baton_error why;    /* fixed: why there is no connection. dialed: why it failed */
    bool dialing;
    pthread_t dialer;
    atomic_bool answered; /* by the dialer: transport and why are there */
    struct transport *transport;
};

/* A request at a connection. */
struct engine_io_entry {
    bool used;
    struct engine_peer *peer;
    uint64_t id, serial; /* id: at this connection */
    uint32_t n_ids;
    struct engine_session *session; /* NULL: an offer that waits, or nothing to do with one */
    bool wants_logits;
    bool claim; /* begun by CLAIM, of this end or the other */
    /* producer: a claim that ended before the engine thread's answer to it came. It is kept until
     * then, so that those who claim and abort without end can't fill the queues. */
    bool answered, over;
    /* consumer: it waits for a dial, and is sent then; `tell` not 0: to be claimed and given back
     * at once, with this code */
    bool waits;
    int tell;
    const struct engine_ask *asks; /* consumer: ASK for its ids instead of CLAIM; else NULL */
    uint8_t ticket[HANDOFF_TICKET];
};

struct engine_io {
    struct handoff_options options;
    uint8_t key[HANDOFF_MAX_KEY];
    struct transport_listener *listener; /* NULL = none */
    uint64_t accept_after_ns;            /* accepting failed: not before */
    struct engine_peer peers[ENGINE_MAX_PEERS];
    struct engine_io_entry entries[ENGINE_MAX_OFFERS];
    uint64_t serial; /* of the last offer or claim that came */
    bool stop;
};

/* As the options say: the fixed peer over `fd`, which is its own on success, or over their link
 * where that is not NULL; the listener. */
int engine_io_open(struct baton_engine *en, int fd, const struct baton_engine_options *o,
                   struct baton_error *e);
void engine_io_close(struct baton_engine *en); /* after its thread ended; half-built is fine */
void *engine_io_thread(void *engine);
/* Tell the engine thread of a request. */
void engine_io_tell(struct baton_engine *en, enum engine_kind kind,
                    const struct engine_io_entry *entry, const struct baton_error *why);
/* An entry that its connection is done with. */
void engine_io_end(struct baton_engine *en, struct engine_io_entry *entry,
                   const struct baton_error *why);
/* Send what waited for this peer's connection: to come about, or, of ASK, for its HELLO. */
void engine_io_dialed(struct engine_peer *p);

/* peers.c. The peer at an address, dialed where there is none yet; NULL = the fixed one. */
int engine_peer_get(struct baton_engine *en, const char *from, struct engine_peer **out,
                    struct baton_error *e);
/* Take the answers of dials, accept who waits, let go of what is idle. */
void engine_peers_turn(struct baton_engine *en);
/* Let every connection do what it can; those that died are taken care of. */
void engine_peers_step(struct baton_engine *en);
bool engine_peers_busy(const struct baton_engine *en);
/* What to wait for, and how long at most; `fds` has room for 2 * ENGINE_MAX_PEERS + 1. */
int engine_peers_poll(struct baton_engine *en, struct pollfd *fds, uint64_t *timeout_ns);
void engine_peers_close(struct baton_engine *en);

/* callbacks.c */
extern const struct handoff_callbacks engine_callbacks; /* ctx: a peer */
struct engine_io_entry *engine_io_find(struct engine_peer *p, uint64_t id);
struct engine_io_entry *engine_io_add(struct engine_peer *p, uint64_t id, uint64_t serial);
/* A point at which tests stop or kill this process, or give the request up ("fail"). */
void engine_io_point(struct engine_peer *p, uint64_t id, const char *name);

/* ---- engine ------------------------------------------------------------------------------- */

struct baton_engine {
    /* set at opening */
    struct baton_model *model;
    struct engine_binding *binding;
    struct device_program *program;
    enum baton_role role;
    uint32_t lanes, ctx, chunk, vocab;
    bool no_peer, listens;         /* no_peer: there is no fixed one */
    uint64_t lease_ns;             /* of tickets */
    uint32_t max_blocks, max_seqs; /* budget: pages of lanes * ctx positions, open sequences */
    bool digest;
    struct kv_geometry geometry;
    struct kv_pool *pool;
    struct kv_prefix *prefix;  /* NULL = none */
    uint8_t prefix_origin[32]; /* of pages that are computed here */
    uint32_t prefix_grain;     /* hits of these are multiples of it; 0: there are none */
    bool prefix_steps;         /* what steps append is the same as what a prefill would */
    struct model_sampler *sampler;
    engine_observe_fn observe; /* these four: while no request is open */
    void *observe_ctx;
    struct engine_flip flip;
    bool flip_on;
    struct base_trace *trace; /* NULL = none */
    struct engine_wake *wake;
    struct base_queue *inbox, *outbox; /* to the engine thread, to the I/O thread */
    pthread_t thread, io_thread;
    bool thread_on, io_thread_on;
    /* any thread */
    atomic_bool stopping;
    atomic_uint blocks_used, blocks_cached, lanes_used;
    atomic_ullong prefix_queries, prefix_hits;
    atomic_ullong steps_by_lanes[ENGINE_MAX_LANES + 1];
    atomic_uint n_told, n_peers; /* renewals and releases under way; connections */
    atomic_uint tickets_open, tickets_claimed;
    atomic_ullong issued, fetched, expired, given_up, refused; /* tickets */
    pthread_mutex_t admit;                                     /* open_ids, n_open */
    uint64_t open_ids[ENGINE_MAX_OPEN];
    uint32_t n_open;
    /* engine thread */
    struct engine_session *sessions;
    struct handoff_tickets *tickets; /* producer */
    struct engine_session *lane[ENGINE_MAX_LANES];
    struct engine_offer *offers;
    uint32_t n_blocks, n_seqs; /* committed */
    uint64_t serial;
    float *logits;               /* [lanes, vocab] */
    bool logits_pinned;          /* known to the device as a place that results go to */
    bool chunk_last;             /* the last turn was a prefill chunk: decode goes first */
    struct engine_ids cancelled; /* consumer: given up before their offer came */
    struct engine_ids withdrawn; /* consumer: whose offer went before their submit came */
    uint32_t n_tracks;           /* requests that the trace has seen */
    bool dead;                   /* the fixed peer; `dead_why` says why */
    struct baton_error dead_why;
    /* I/O thread */
    struct engine_io io;
};

int engine_open(struct baton_model *m, const struct baton_engine_options *o,
                struct baton_engine **out, struct baton_error *e);
void engine_close(struct baton_engine *en);
void *engine_thread(void *engine);
/* Tell the I/O thread about a session's request. */
void engine_post(struct baton_engine *en, enum engine_kind kind, struct engine_session *s,
                 const struct baton_error *why);
/* The text of an error that names which role ended, where the peer did. */
void engine_peer_error(const struct baton_engine *en, const struct baton_error *why,
                       struct baton_error *out);

/* ---- trace.c: nothing happens where the engine has no trace --------------------------------- */

void engine_trace_start(const struct baton_engine *en, bool alone_in_process);
/* The state of each session, where it changed since the last call. */
void engine_trace_states(struct baton_engine *en);
void engine_trace_over(struct baton_engine *en, const struct engine_session *s);
/* Compute of positions [first, first + n) in one layer. Call it with a trace only. */
void engine_trace_layer(const struct baton_engine *en, uint32_t layer, uint64_t begin_ns,
                        uint64_t end_ns, uint32_t first, uint32_t n);
/* A chunk, of which the layers were done at layers_ns (0: not known). */
void engine_trace_chunk(const struct baton_engine *en, uint32_t first, uint32_t n,
                        uint64_t begin_ns, uint64_t layers_ns, uint64_t end_ns);
/* The same chunk as the device's own timestamps have it, where it tells. */
void engine_trace_device(const struct baton_engine *en, uint32_t first, uint32_t n);
void engine_trace_step(const struct baton_engine *en, uint32_t lanes, uint64_t begin_ns);
/* Positions of a layer were given to the I/O thread. */
void engine_trace_queued(const struct baton_engine *en, uint32_t layer, uint32_t first, uint32_t n);
void engine_trace_piece(const struct baton_engine *en, const struct handoff_moved *m);

/* ---- reuse.c: prompts that begin alike; nothing happens without an index --------------------- */

int engine_reuse_open(struct baton_engine *en, struct baton_error *e); /* after the pool */
/* Before the first chunk of a prompt: begin with what is there of it. */
void engine_reuse_take(struct baton_engine *en, struct engine_session *s);
/* Positions were computed here: index the pages that are whole now. */
void engine_reuse_put(struct baton_engine *en, struct engine_session *s);
/* The prompt is there: count how much of it was found. */
void engine_reuse_count(struct baton_engine *en, const struct engine_session *s);

/* ---- roles -------------------------------------------------------------------------------- */

/* Pages, a lane and the first chunk's turn; BATON_ERR_BUSY: not now. */
int engine_start_prefill(struct baton_engine *en, struct engine_session *s, uint32_t n_tokens,
                         struct baton_error *e);
/* producer.c */
void engine_producer_start(struct baton_engine *en, struct engine_session *s);
/* As before anything was sent of it. */
void engine_producer_reset(const struct baton_engine *en, struct engine_session *s);
void engine_producer_admit(struct baton_engine *en);
/* Give the I/O thread every position of `layer` that can be sent when `computed` are there. */
void engine_producer_layer(struct baton_engine *en, struct engine_session *s, uint32_t layer,
                           uint32_t computed);
/* After the last chunk, with its row in s->row. */
void engine_producer_prefilled(struct baton_engine *en, struct engine_session *s);
void engine_producer_reserved(struct baton_engine *en, struct engine_session *s);

/* held.c: requests that wait for whoever has their ticket; producer, engine thread */
void engine_held_ready(struct baton_engine *en, struct engine_session *s);
void engine_held_claimed(struct baton_engine *en, const struct engine_message *m);
/* Its claimant is gone, or gave it back. */
void engine_held_returned(struct baton_engine *en, struct engine_session *s,
                          const struct baton_error *why, uint64_t heard_ns);
void engine_held_told(struct baton_engine *en, const struct engine_message *m);
/* Give up those whose lease ended. */
void engine_held_expire(struct baton_engine *en);
/* Nanoseconds until the next lease ends, UINT64_MAX = none will. */
uint64_t engine_held_due(const struct baton_engine *en);
/* The session is over. */
void engine_held_over(struct baton_engine *en, struct engine_session *s, enum baton_finish finish,
                      const struct baton_error *why);
/* Callers */
int engine_ticket_tell(struct baton_engine *en, bool release, const char *from, const char *ticket,
                       struct baton_error *e);
int engine_ticket_stats(struct baton_engine *en, struct baton_ticket_stats *out);

/* consumer.c */
void engine_consumer_start(struct baton_engine *en, struct engine_session *s);
void engine_consumer_offered(struct baton_engine *en, struct engine_offer *offer);
void engine_consumer_admit(struct baton_engine *en);
void engine_consumer_ended(struct baton_engine *en, struct engine_session *s,
                           const struct baton_error *why);
/* No KV will come for it: over, or a prefill here where it was asked for (code 0: cancelled). */
void engine_consumer_failed(struct baton_engine *en, struct engine_session *s,
                            const struct baton_error *why);
/* An offer that waited is gone: its submit, when it comes, fails. */
void engine_consumer_withdrawn(struct baton_engine *en, uint64_t serial);
/* A request was given up before its offer came: refuse that one when it comes. */
void engine_consumer_forget(struct baton_engine *en, uint64_t id);

#endif
