/* SPDX-License-Identifier: Apache-2.0 */
/* serve's proxy: one OpenAI API in front of prefill and decode servers that speak vLLM's
 * kv_transfer_params, ours or others'.
 *
 * A request goes to a prefill server, with one token asked for, and then, with what that answered,
 * to a decode server, whose answer is passed on as it comes. Nothing has been sent to the client
 * until the decode server's first event or whole answer is there, and until then the request may be
 * tried again on other members; afterwards never, so that no output is ever said twice.
 *
 * Each connection has a thread of its own, which waits for its client and its member alike; one
 * more thread asks the members for their health. Members are shared, under one lock.
 *
 *     serve_proxy_open(&po, &proxy, &e);      // listens; members were asked once
 *     ... serve_proxy_reload(proxy, &e) at each SIGHUP, until a signal ends it ...
 *     serve_proxy_drain(proxy, hurry, ctx); serve_proxy_close(proxy);
 */
#ifndef SERVE_PROXY_H
#define SERVE_PROXY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <baton/error.h>

struct serve_proxy;

enum serve_policy { SERVE_POLICY_UNSAID = 0, SERVE_LEAST_LOADED, SERVE_ROUND_ROBIN };

struct serve_proxy_options {
    const char *host; /* an address; NULL = 127.0.0.1 */
    uint16_t port;    /* 0 = any free one */
    const char *version;
    const char *const *prefill, *const *decode; /* http://HOST:PORT, https://... */
    size_t n_prefill, n_decode;
    const char *config; /* JSON, more members and what is not said here; NULL = none */
    enum serve_policy policy;
    bool min_remote_said;
    uint32_t min_remote_tokens; /* shorter prompts are computed on the decode server */
};

/* Borrows *o's strings until serve_proxy_close. BATON_ERR_USAGE and _INPUT name what is wrong;
 * BATON_ERR_IO: the port is taken, or this machine has no libcurl. */
int serve_proxy_open(const struct serve_proxy_options *o, struct serve_proxy **out,
                     struct baton_error *e);
uint16_t serve_proxy_port(const struct serve_proxy *p);
/* Read the config file again. Members that are no longer listed finish what they have and get
 * nothing new; on failure all stays as it was. */
int serve_proxy_reload(struct serve_proxy *p, struct baton_error *e);
/* Take nothing new; returns when every request is answered. `hurry` is looked at now and then: once
 * true, what still runs is cut off. */
void serve_proxy_drain(struct serve_proxy *p, bool (*hurry)(void *ctx), void *ctx);
/* Generation requests so far: answered whole; refused (4xx); failed (5xx, or cut off in the
 * middle); left by their clients. */
struct serve_proxy_counts {
    uint64_t finished, refused, failed, cancelled;
    uint64_t retries;                 /* exchanges that were made again with another member */
    uint64_t remote, local, fallback; /* prompts: prefilled remotely; short, or not to be handed
                                       * over; no prefill server gave a cache */
};
void serve_proxy_count(struct serve_proxy *p, struct serve_proxy_counts *out);
/* Cuts off what still runs. NULL and half-built are fine. */
void serve_proxy_close(struct serve_proxy *p);

#endif
