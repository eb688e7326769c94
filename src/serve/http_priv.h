/* SPDX-License-Identifier: Apache-2.0 */
/* Between http.c, which knows libmicrohttpd, and call.c, which knows paths, keys and addresses. */
#ifndef SERVE_HTTP_PRIV_H
#define SERVE_HTTP_PRIV_H

#include <sys/socket.h>

#include "serve/serve_priv.h"

enum serve_route { SERVE_LOOK, SERVE_TOKENS, SERVE_GENERATE };

/* One request of a connection. libmicrohttpd's thread alone. */
struct serve_call {
    struct serve *serve;
    enum serve_route route;
    enum serve_kind kind;
    char path[64];
    struct serve_problem problem; /* known before the body is read */
    struct serve_text body;
    size_t n_body;         /* bytes that came, kept or not */
    struct serve_job *job; /* NULL: answered without one */
    int fd;                /* watched; -1 = no */
    bool if_available;     /* Prefer: if-available */
    uint64_t client;       /* of a key or an address */
    char request_id[96];   /* X-Request-Id, cut; only printable ASCII of it */
};

struct MHD_Response;
/* The headers that belong to a content type: the page's say what it may load. */
void serve_http_describe(struct MHD_Response *r, const char *type);
/* Whether a body of this Content-Length (NULL: not said) is read; else p says why not. */
bool serve_http_fits(const char *length, struct serve_problem *p);
/* Take n more bytes of a body, of which *came came before. One that was refused (p->status) is read
 * to its end, so that the client gets to read why. False: cut the connection off, since it has no
 * end or there is no memory. */
bool serve_http_take(struct serve_text *body, size_t *came, const char *data, size_t n,
                     struct serve_problem *p);
/* Which route; problem is set where there is none, where the method or the key is wrong, and while
 * nothing can be answered. authorization may be NULL. */
void serve_call_route(struct serve_call *c, const char *path, const char *method,
                      const char *authorization);
/* Tell clients apart: by the key, where the server asks for one, else by this address, of IPv6 its
 * network of 64 bits; NULL: not known. After serve_call_route. */
void serve_call_client(struct serve_call *c, const struct sockaddr *address);
/* Take what matters of two headers, either of which may be NULL. */
void serve_call_headers(struct serve_call *c, const char *prefer, const char *request_id);
/* Read keys, one a line, into s. */
int serve_keys_load(struct serve *s, const char *path, struct baton_error *e);
/* A listening socket or a negative code. host is an IPv4 or IPv6 address; NULL = 127.0.0.1. */
int serve_listen(const char *host, uint16_t port, uint16_t *bound, struct baton_error *e);

#endif
