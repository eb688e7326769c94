/* SPDX-License-Identifier: Apache-2.0 */
/* serve: the OpenAI API over HTTP, in front of one engine.
 *
 * Three kinds of threads. libmicrohttpd's own thread owns the sockets: it parses requests, checks
 * them, counts them in, and copies out what is ready. The *pump* thread owns all that is generated:
 * it gives requests to the engine, clients by turns, takes tokens as soon as there are some,
 * makes text and JSON of them, and sees that a client has gone. The engine's thread only rings a
 * bell. A client that reads slowly fills its own buffer, which its most tokens bound, and never
 * holds a lane.
 *
 *     serve_open(&so, &server, &e);                  // listens; all but /version is 503
 *     serve_attach(server, model, engine, &e);       // ready
 *     ... wait for a signal ...
 *     serve_drain(server); serve_close(server); baton_engine_close(engine);
 *
 * In the role prefill it answers requests whose kv_transfer_params say do_remote_decode, each with
 * a ticket for the cache that it keeps; in the role decode it pulls the cache that a request's
 * ticket stands for, and computes prompts that come without one. Routers in front of vLLM speak
 * this (docs/serve.md).
 */
#ifndef SERVE_SERVE_H
#define SERVE_SERVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <baton/baton.h>

struct serve;

enum serve_role { SERVE_BOTH = 0, SERVE_PREFILL = 1, SERVE_DECODE = 2 };

struct serve_options {
    enum serve_role role;
    const char *host;               /* an address, not a name; NULL = 127.0.0.1 */
    uint16_t port;                  /* 0 = any free one */
    const char *served_name;        /* the model's id in the API */
    const char *version;            /* of the program */
    uint32_t max_queue;             /* choices that may wait for a lane; beyond them: 429 */
    const char *api_key_file;       /* one key a line; NULL = no key is asked for */
    const char *tls_cert, *tls_key; /* PEM files, both or none */
    const char *request_log;        /* a line of JSON each request is appended here; "-" = stderr */
    /* prefill: what decode servers are told to connect to, HOST:PORT; NULL = where it listens */
    const char *kv_advertise;
    /* decode: with whom requests may make it connect: networks (10.0.0.0/8, fd00::/8), addresses,
     * host names; none = this machine */
    const char *const *kv_allow;
    size_t n_kv_allow;
    bool kv_keyed;      /* the engine has a key; without one nothing off this machine is allowed */
    uint64_t lease_ns;  /* of tickets: renewed six times in it while a request waits here */
    bool local_prefill; /* decode: where the cache does not arrive whole, compute the prompt */
};

/* Bind the port and answer 503 until serve_attach. BATON_ERR_IO where the port is taken. */
int serve_open(const struct serve_options *o, struct serve **out, struct baton_error *e);
uint16_t serve_port(const struct serve *s);
/* Whether only this machine can reach a host that is so named. */
bool serve_host_local(const char *host);
/* Begin to serve. Model and engine outlive the server. The engine's role is the server's: both,
 * producer (opened with `listen`) or consumer, these without a peer. Once. */
int serve_attach(struct serve *s, struct baton_model *m, struct baton_engine *en,
                 struct baton_error *e);
/* Take nothing new and return when all that was accepted is answered and read, and every ticket
 * fetched or its lease over. `hurry` is looked at
 * now and then: once true, what still runs is cancelled. */
void serve_drain(struct serve *s, bool (*hurry)(void *ctx), void *ctx);
/* Requests answered so far, by result: finished, refused or failed, cancelled by their clients. */
struct serve_counts {
    uint64_t finished, refused, cancelled;
    uint32_t open; /* connections with a request that is not answered */
};
void serve_count(struct serve *s, struct serve_counts *out);
/* Cancels what runs, ends the threads, closes every socket. NULL and half-built are fine. */
void serve_close(struct serve *s);

#endif
