/* SPDX-License-Identifier: Apache-2.0 */
/* baton: embed the engine.
 *
 * Three objects. A *model* is a checkpoint, opened once and immutable; it may be opened before a
 * fork and then serves both processes from one copy. An *engine* runs it on one device in one role;
 * it owns threads, lanes and the KV pool. A *request* is one timeline of tokens that its owner
 * pulls.
 *
 *     baton_model_open(&mo, &model, &e);
 *     baton_engine_open(model, &eo, &engine, &e);           // role BATON_BOTH: native
 *     baton_submit(engine, &ro, &request, &e);
 *     while (baton_next(request, &token, -1, &e) == 1) use(token.id);
 *     baton_request_close(request); baton_engine_close(engine); baton_model_close(model);
 *
 * Two roles in two processes: connect them by a stream socket, open one engine as BATON_PRODUCER
 * and one as BATON_CONSUMER with `peer_fd`, and submit the same request (same `request_id`, same
 * ids) to both. The producer's request yields no tokens: baton_next returns 0 when the consumer has
 * acknowledged the cache. Sampling happens at the consumer alone.
 *
 * Servers that know nothing of each other beforehand pull: a producer engine listens (`listen`),
 * a request that is submitted with `hold` is prefilled and kept, and baton_ticket gives the text
 * that stands for it. Whoever submits the same ids with that `ticket` and the producer's address
 * (`from`) to a consumer engine gets the cache pushed over a connection of the consumer's:
 *
 *     producer: baton_submit(hold) -> baton_ticket -> baton_request_detach, or baton_next == 0
 *     consumer: baton_submit(from, ticket) -> baton_next ...
 *
 * A ticket is good once and for as long as its lease. One engine serves many consumers, and pulls
 * from many producers; the death of one touches its own requests alone.
 *
 * Every options struct starts with struct_size = sizeof it and is otherwise zero by default.
 * Functions return 0 or a negative enum baton_code, and fill `e` (may be NULL). Requests of one
 * engine may be pulled from different threads, one thread at a time each. The library never exits
 * and writes nothing to stdout.
 */
#ifndef BATON_BATON_H
#define BATON_BATON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <baton/error.h>

#ifdef __cplusplus
extern "C" {
#endif

struct baton_model;
struct baton_engine;
struct baton_request;

/* ---- model -------------------------------------------------------------------------------- */

struct baton_model_options {
    size_t struct_size;
    const char *path; /* Hugging Face folder or shape:NAME[:SEED] */
    const char *pin;  /* "sha256:HEX" that the files must have, or NULL */
    uint32_t threads; /* for hashing and binding; 0 = one a core */
    /* Told what is read and how far it is; may be NULL. Called by the thread that is in
     * baton_model_open, baton_model_prepare or baton_engine_open: valid as long as the model. */
    void (*progress)(void *ctx, const char *what, uint64_t done, uint64_t all);
    void *ctx;
    bool content_identity; /* hash the weights, so that a peer that opened its own copy of a large
                              model recognises it; small ones and pinned ones always are */
};
int baton_model_open(const struct baton_model_options *o, struct baton_model **out,
                     struct baton_error *e);
/* Closes what was opened in this process; engines that use it are closed before. NULL is fine. */
void baton_model_close(struct baton_model *m);
/* Bring the weights into the order of a device (as named on the command line) now, so that engines
 * opened later, after a fork too, share the one copy. Starts no thread that outlives the call. */
int baton_model_prepare(struct baton_model *m, const char *device, struct baton_error *e);

uint32_t baton_model_vocab(const struct baton_model *m);
uint32_t baton_model_layers(const struct baton_model *m);
const char *baton_model_arch(const struct baton_model *m);
/* Text to ids; `chat` wraps it as one user turn in the model's own chat format (and then adds no
 * further special tokens), else the post-processor's special tokens are added. *ids: free(). */
int baton_tokenize(const struct baton_model *m, const char *text, size_t n, bool chat,
                   int32_t **ids, size_t *n_ids, struct baton_error *e);
/* Ids to text, special tokens left out. An id of the model that no token has (a padding row of its
 * embedding) is no text; one outside the model's vocabulary is BATON_ERR_INPUT. *text: free(). */
int baton_detokenize(const struct baton_model *m, const int32_t *ids, size_t n_ids, char **text,
                     struct baton_error *e);

/* ---- engine ------------------------------------------------------------------------------- */

enum baton_role { BATON_BOTH = 0, BATON_PRODUCER = 1, BATON_CONSUMER = 2 };
enum baton_mode { BATON_NATIVE = 0, BATON_WHOLE = 1, BATON_STREAM = 2 };

/* Two ends of a stream in memory, for both roles in one process. Each goes to one engine
 * (baton_engine_options.link), whose baton_engine_open takes it over whatever it returns; one that
 * went to no engine is freed by baton_link_close. */
struct baton_link;
int baton_link_pair(struct baton_link **a, struct baton_link **b, struct baton_error *e);
/* One end of a stream to whoever listens at "HOST:PORT" or "unix:PATH", for one engine. Waits at
 * most timeout_ns: BATON_ERR_TIMEOUT. BATON_ERR_IO: nobody listens there; BATON_ERR_USAGE: no
 * address. The caller has checked that it may connect there. */
int baton_link_dial(const char *address, uint64_t timeout_ns, struct baton_link **out,
                    struct baton_error *e);
void baton_link_close(struct baton_link *l); /* NULL is fine */

/* A trace: what engines do when, in memory that a fork shares, for both roles in one file. Open it
 * before a fork, give it to the engines, save it when they are closed: Chrome trace JSON, see
 * docs/trace.md. At most max_events (0 = 262144) are kept; the file says how many were dropped. */
struct baton_trace;
int baton_trace_open(uint32_t max_events, struct baton_trace **out, struct baton_error *e);
int baton_trace_save(struct baton_trace *t, const char *path, struct baton_error *e);
void baton_trace_close(struct baton_trace *t); /* after the engines; NULL is fine */

struct baton_engine_options {
    size_t struct_size;
    enum baton_role role;
    const char *device; /* NULL = "cpu" */
    uint32_t lanes;     /* 0 = 1; at most 8 */
    uint32_t ctx;       /* positions a request may have; 0 = what the model says, at most 8192 */
    uint32_t threads;   /* compute workers; 0 = one a core */
    uint32_t chunk;     /* prefill rows a submission; 0 = the device's choice */
    int peer_fd;        /* connected stream socket to the other role; owned by the engine from a
                           successful open on. Ignored for BATON_BOTH. Over a Unix socket the KV
                           goes through shared memory that the consumer lends, else inline */
    bool no_digest;     /* skip slot digests; the record then says "off" */
    struct baton_link *link; /* the other role is in this process: instead of peer_fd */
    const void *key; /* shared with the other role, 16 to 4096 bytes, copied: neither talks to
                                a peer that does not prove that it has it. NULL = none */
    size_t key_bytes;
    struct baton_trace *trace; /* NULL = none. Outlives the engine */
    bool no_peer; /* neither peer_fd nor link: a producer of held requests alone, or a consumer that
                     pulls alone */
    const char *listen; /* producer: where consumers may connect and claim tickets: "HOST:PORT"
                           (port 0 picks one) or "unix:PATH"; NULL = nowhere. Off loopback it takes
                           a key: BATON_ERR_USAGE. BATON_ERR_IO where the address is taken */
    uint64_t lease_ns;  /* of tickets; 0 = 30 s */
    uint64_t dead_ns;   /* a peer that is silent for so long is dead; 0 = 10 s. Heartbeats go each
                           second, or four times in it where that is more often; ends whose
                           heartbeats are too rare for the other do not connect */
    bool tag_payload;   /* authenticate payload too, not its digests alone (docs/wire.md,
                           Authentication). As soon as one end asks; needs a key */
    bool prefix_cache;  /* keep the pages of requests that are over, as long as nobody needs the
                           room, and do not compute again what a later prompt begins with. Logits
                           are the same bits with and without */
    uint64_t kv_bytes;  /* of the KV pool; 0 = for `lanes` requests of `ctx` positions. With less,
                           requests wait for one another's pages; more is for prefix_cache.
                           BATON_ERR_USAGE where it does not hold one request of `ctx` */
};
int baton_engine_open(struct baton_model *m, const struct baton_engine_options *o,
                      struct baton_engine **out, struct baton_error *e);
/* Cancels what still runs, waits for the threads, gives everything back. NULL is fine. */
void baton_engine_close(struct baton_engine *en);
/* Where it listens, with the port that was bound; NULL where it does not. Lives with the engine. */
const char *baton_engine_address(const struct baton_engine *en);

/* What an engine's tickets came to since it was opened. Any thread. */
struct baton_ticket_stats {
    size_t struct_size;
    uint32_t open, claimed; /* now */
    uint32_t peers;         /* connections now */
    uint64_t issued;        /* = open + claimed + fetched + expired + given_up */
    uint64_t fetched;       /* acknowledged by a consumer */
    uint64_t expired;       /* leases that ended */
    uint64_t given_up;      /* cancelled here, or released by their consumer */
    uint64_t refused;       /* claims: forged, expired, used, claimed by another */
};
int baton_ticket_stats(struct baton_engine *en, struct baton_ticket_stats *out);

/* ---- requests ----------------------------------------------------------------------------- */

enum baton_finish {
    BATON_RUNNING = 0,
    BATON_STOP = 1,      /* an end token; at a producer: the consumer acknowledged */
    BATON_LENGTH = 2,    /* max_tokens or the context is full */
    BATON_CANCELLED = 3, /* baton_cancel, here (baton_next then returns 0, and at a producer
                            BATON_ERR_CANCELLED) or at the peer (BATON_ERR_CANCELLED) */
    BATON_FAILED = 4,    /* baton_next returned an error */
};

struct baton_request_options {
    size_t struct_size;
    const int32_t *ids; /* [n_ids] the prompt; copied */
    size_t n_ids;
    uint64_t request_id;  /* pairs the two roles; 0 is a valid id */
    enum baton_mode mode; /* producer: WHOLE or STREAM. Elsewhere ignored */
    uint32_t max_tokens;  /* 0 = until the context is full */
    uint32_t min_tokens;  /* end tokens are not chosen before */
    bool ignore_eos;
    float temperature; /* 0 = greedy */
    uint32_t top_k;    /* 0 = off */
    float top_p;       /* 0 or 1 = off */
    float min_p;       /* 0 = off */
    uint64_t seed;
    const int32_t *force; /* [n_force] teacher forcing: token i is force[i] whatever was chosen */
    size_t n_force;       /* then max_tokens = n_force and end tokens do not stop */
    bool want_logits;     /* each token carries its row of logits; a request of which 8 rows wait to
                             be pulled pauses, unless others wait for its lane */
    const char *kv_save;  /* consumer or both: write the cache as it stands after prefill (import),
                             before the first step, to this safetensors file (docs/kv-file.md).
                             Only a model with content_identity can load it again */
    const char *kv_load;  /* start from this KV file. It must be of this model, opened with
                             content_identity (small ones always are), and of the first tokens of
                             this prompt: BATON_ERR_MISMATCH or _INPUT. The positions that it holds
                             are not computed again, and do not travel where the consumer was given
                             it. It must stay as it is until the request is closed */
    bool local_prefill;   /* consumer: where the handoff fails before COMMIT (refused, torn, a
                             digest that differs, a producer that died or gave up), compute the
                             prompt here, in fresh pages, and go on; the stats say so. Without it:
                             an error. Needs a device that can prefill. Without a ticket, at a
                             consumer that has no peer: computed here from the start */
    bool hold; /* producer: prefill, then keep the cache for whoever comes with the ticket. Pages
                  are held until it is fetched, released, cancelled, or its lease ends
                  (BATON_ERR_STALE of baton_next). `mode` is ignored */
    const char *ticket; /* consumer: pull what this stands for ("bt1." ...). BATON_ERR_INPUT where
                           it is no ticket. The claim goes out at once and keeps the ticket while
                           the request waits for pages. Then, from baton_next:
                           BATON_ERR_STALE: the producer refused it: expired, forged, used,
                               withdrawn, claimed by another, of an earlier start;
                           BATON_ERR_PEER: the producer can't be reached, died, or fell silent;
                           BATON_ERR_MISMATCH: another model or other token ids;
                           BATON_ERR_INTEGRITY: what came is not what was sent;
                           all before the first token, and subject to local_prefill */
    const char *from;   /* with ticket: the producer's address, "HOST:PORT" or "unix:PATH"; NULL =
                           the engine's own peer. The caller has checked that it may connect there.
                           Connections are made and kept by the engine; no call waits for them */
    float repetition_penalty;                  /* over prompt and output; 0 or 1 = off */
    float presence_penalty, frequency_penalty; /* over the output; 0 = off */
    uint32_t choice; /* the random numbers of another choice of the same seed */
    /* Told that baton_next has something: a token, or the end; or that baton_ticket has. NULL =
     * nobody. Called by the engine thread with the request locked, so it may not block nor call
     * back; it has returned for good when baton_request_close returns. */
    void (*notify)(void *ctx);
    void *notify_ctx;
    bool ask; /* consumer: have these ids prefilled by the producer at `from` (NULL: the engine's
                 own peer), which is told no more than the ids. Errors as with `ticket`, and
                 BATON_ERR_UNSUPPORTED where that producer takes no such request */
};

struct baton_token {
    int32_t id;          /* the token (the forced one where forced) */
    int32_t argmax;      /* what greedy would have taken */
    uint32_t index;      /* 0 for the first generated token */
    float margin;        /* largest minus second largest logit */
    const float *logits; /* [vocab] where want_logits, valid until the next call; else NULL */
    uint64_t time_ns;    /* CLOCK_MONOTONIC when it was chosen */
};

/* Errors of the caller are told here: BATON_ERR_USAGE, BATON_ERR_INPUT, and BATON_ERR_BUSY when 64
 * requests wait already. Everything later is told by baton_next. The prompt and max_tokens must fit
 * the engine's ctx together (at a producer: the prompt alone). */
int baton_submit(struct baton_engine *en, const struct baton_request_options *o,
                 struct baton_request **out, struct baton_error *e);
/* Pull the next token: 1 = *out is one, 0 = the request is over (see baton_stats.finish),
 * negative = it failed. Waits at most timeout_ns (negative: for ever); BATON_ERR_TIMEOUT changes
 * nothing. */
int baton_next(struct baton_request *r, struct baton_token *out, int64_t timeout_ns,
               struct baton_error *e);
/* Ask it to stop, here and at the peer, within one step; any thread, async-signal-safe. */
void baton_cancel(struct baton_request *r);
/* Cancels if needed, waits until lane and pages are given back, and frees. NULL is fine; fine after
 * baton_engine_close too. */
void baton_request_close(struct baton_request *r);

/* At a producer, of a request with `hold`: wait at most timeout_ns (negative: for ever) until its
 * prefill is over, and fill in what stands for it. Errors as baton_next, and BATON_ERR_USAGE where
 * it was submitted without hold. Does not replace baton_next, which tells what became of it. */
struct baton_ticket {
    size_t struct_size;
    char text[96];  /* "bt1." and 86 digits */
    int32_t argmax; /* greedy's first token, for who must answer with one */
    float margin;
    uint64_t prefill_ns; /* compute */
    uint64_t lease_ns;   /* from now on, unless renewed */
};
int baton_ticket(struct baton_request *r, struct baton_ticket *out, int64_t timeout_ns,
                 struct baton_error *e);
/* Tell the producer at `from` (NULL: the engine's own peer, and at a producer the engine itself)
 * that the request of this ticket still waits here: its lease begins anew; or that nobody will
 * fetch it: its pages go back at once. Both return before anything is sent, and what becomes of
 * them is not told: a ticket that is gone is found out by the submit. BATON_ERR_INPUT: no ticket;
 * BATON_ERR_BUSY: too many calls under way. Once submitted a request needs neither: its claim keeps
 * the ticket, and baton_cancel releases it. */
int baton_ticket_renew(struct baton_engine *en, const char *from, const char *ticket,
                       struct baton_error *e);
int baton_ticket_release(struct baton_engine *en, const char *from, const char *ticket,
                         struct baton_error *e);
/* Free the handle and let the request go on: one with `hold` waits on for its consumer, any other
 * runs to its end. notify is not called any more. NULL is fine. */
void baton_request_detach(struct baton_request *r);

/* Timings of one request, ns, from acceptance by submit(); what did not happen is 0. */
struct baton_stats {
    size_t struct_size;
    enum baton_finish finish;
    uint32_t prompt_tokens, output_tokens;
    uint64_t prefill_ns;    /* compute of the prefill (as the producer reports it in COMMIT) */
    uint64_t transfer_ns;   /* first LAYER sent to last byte landed */
    uint64_t exposed_ns;    /* last byte landed minus end of the last prefill compute; of a pull, as
                               transfer_ns: nothing was computed meanwhile */
    uint64_t import_ns;     /* copy, digest and conversion into pages (one pass), after the last
                               byte */
    uint64_t verify_ns;     /* slot digests and position proofs, after the last byte */
    uint64_t ttft_ns;       /* accepted to first token that could be sent */
    uint64_t first_step_ns; /* token 1 to token 2 */
    uint64_t decode_ns;     /* token 1 to the last */
    uint64_t itl_p50_ns, itl_p99_ns;
    uint32_t layers, slots, pieces; /* of the handoff; 0 where native */
    uint64_t bytes;
    int32_t global_first, global_last; /* positions that the slots hold; -1 = no such layers */
    int32_t local_first, local_last;
    char digest[65];  /* SHA-256 over all slot digests, hex; "off"; "" where native */
    char verdict[32]; /* "verified", "off", "failed: CODE", "local-prefill: CODE" where the prompt
                         was computed at the consumer instead, "" where native */
    uint64_t kv_bytes, weights_bytes;
    uint32_t steps_by_lanes[9]; /* decode steps of this request by active lanes */
    uint32_t prefilled_tokens;  /* of the prompt, so far: a progress bar's figure */
    uint32_t loaded_tokens;     /* of these, taken from kv_load; at a consumer: positions below this
                                   did not travel */
    char reason[252];           /* why, where the verdict is "failed" or "local-prefill"; else "" */
    uint64_t landed_bytes;      /* of bytes, what came through shared memory */
    uint32_t cached_tokens;     /* of prefilled_tokens, found in the prefix cache */
};
int baton_request_stats(struct baton_request *r, struct baton_stats *out);

#ifdef __cplusplus
}
#endif
#endif
