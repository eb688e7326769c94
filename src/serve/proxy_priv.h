/* SPDX-License-Identifier: Apache-2.0 */
/* Inside the proxy: members, exchanges with them, and a client's request on its way. */
#ifndef SERVE_PROXY_PRIV_H
#define SERVE_PROXY_PRIV_H

#include <curl/curl.h>

#include "serve/proxy.h"
#include "serve/serve_priv.h"

#define SERVE_URL_BYTES 256u
#define SERVE_MAX_MEMBERS 64u /* of both kinds */
#define SERVE_MAX_TRIES 4u    /* members of one kind that a request is tried on */

/* ---- proxy_curl.c --------------------------------------------------------------------------- */

/* libcurl, opened when a proxy starts: linked, it would cost every other command 3 ms. */
#define SERVE_CURL(X)                                                                              \
    X(global_init)                                                                                 \
    X(easy_init)                                                                                   \
    X(easy_setopt)                                                                                 \
    X(easy_getinfo)                                                                                \
    X(easy_strerror)                                                                               \
    X(easy_cleanup)                                                                                \
    X(multi_init)                                                                                  \
    X(multi_add_handle)                                                                            \
    X(multi_remove_handle)                                                                         \
    X(multi_perform)                                                                               \
    X(multi_info_read)                                                                             \
    X(multi_poll)                                                                                  \
    X(multi_cleanup)                                                                               \
    X(slist_append)                                                                                \
    X(slist_free_all)

struct serve_curl {
#define X(name) __typeof__(curl_##name) *name; /* NOLINT(bugprone-macro-parentheses): a name */
    SERVE_CURL(X)
#undef X
};
/* Before any thread of the process uses libcurl. It is never closed again: its own libraries keep
 * what they set up for the process. */
int serve_curl_open(struct serve_curl *c, struct baton_error *e);

/* ---- proxy_config.c ------------------------------------------------------------------------- */

enum serve_side { SERVE_SIDE_PREFILL, SERVE_SIDE_DECODE };

/* What a config file and the command line make together. */
struct serve_proxy_config {
    struct {
        enum serve_side side;
        char url[SERVE_URL_BYTES]; /* without a slash at its end */
    } members[SERVE_MAX_MEMBERS];
    size_t n;
    enum serve_policy policy;
    uint32_t min_remote_tokens;
};
int serve_proxy_config_load(struct serve_proxy_config *c, const struct serve_proxy_options *o,
                            struct baton_error *e);
/* Add a file's text to *c; `path` names it in errors. */
int serve_proxy_config_parse(struct serve_proxy_config *c, const char *text, size_t n,
                             const char *path, struct baton_error *e);

/* ---- proxy_members.c ------------------------------------------------------------------------ */

/* A server behind the proxy. `next` and what stands behind `number` are under the
 * proxy's lock. */
struct serve_member {
    struct serve_member *next; /* of the proxy's */
    enum serve_side side;
    char url[SERVE_URL_BYTES];
    uint64_t number; /* never used again */
    bool up, listed; /* listed: it is one of the configuration's */
    unsigned silent; /* health checks in a row without an answer */
    unsigned refs;   /* of health checks and requests: those of a member that left are kept */
    unsigned active; /* requests on it */
    uint64_t turn;   /* when it was last chosen; 0 = never */
    uint64_t requests, failures;
};

/* Members that a request was tried on. */
struct serve_tried {
    uint64_t number[SERVE_MAX_TRIES];
    unsigned n;
};

/* Make the members those of c; the others leave. */
int serve_members_set(struct serve_proxy *p, const struct serve_proxy_config *c,
                      struct baton_error *e);
void serve_members_free(struct serve_proxy *p);
/* The member for a request, counted in; NULL where no other is up, or enough were tried. */
struct serve_member *serve_member_get(struct serve_proxy *p, enum serve_side side,
                                      const struct serve_tried *t);
void serve_member_put(struct serve_proxy *p, struct serve_member *m, bool failed);
/* It answers none of several health checks: what waits for it waits in vain. A member that refuses
 * connections may still finish what it has. */
bool serve_member_silent(struct serve_proxy *p, const struct serve_member *m);
/* It can't be reached: nothing goes there until its health was asked again. */
void serve_member_down(struct serve_proxy *p, struct serve_member *m);
const char *serve_member_kind(const struct serve_member *m); /* "prefill" or "decode" */
/* Ask all members once, at the same time. */
void serve_members_check(struct serve_proxy *p);
void *serve_members_thread(void *proxy);

/* ---- proxy_fetch.c: one exchange with a member ---------------------------------------------- */

struct serve_fetch {
    const struct serve_curl *curl;
    CURL *easy;
    CURLM *multi;
    struct curl_slist *headers;
    struct serve_text in; /* what came and was not taken */
    size_t most;          /* bytes of it that are held */
    long status;          /* 0 = none yet */
    char type[96];        /* of the content; "" */
    bool over;            /* whole, or broken: */
    CURLcode result;      /* CURLE_OK where it is whole */
};
struct serve_fetch_ask {
    const struct serve_member *member;
    const char *path;
    const char *authorization, *request_id; /* either may be NULL */
    const char *body;                       /* borrowed until the end; NULL: GET */
    size_t n_body;
    size_t most; /* bytes of an answer that are held; 0: what a request may take */
};
int serve_fetch_open(struct serve_fetch *f, const struct serve_curl *c,
                     const struct serve_fetch_ask *a);
/* Take what is there, or wait for more. False where the client behind client_fd (-1: nobody is
 * watched) has gone. */
bool serve_fetch_step(struct serve_fetch *f, int *client_fd, int wait_ms);
void serve_fetch_close(struct serve_fetch *f); /* zeroed is fine */

/* ---- proxy_relay.c: one client's request ---------------------------------------------------- */

struct serve_relay {
    struct serve_proxy *proxy;
    const char *path, *authorization; /* borrowed */
    char request_id[96];
    int client_fd; /* -1 = not watched, or no longer */
    json_t *doc;   /* of a request to generate */
    bool stream;
    struct serve_tried tried[2];
    struct serve_member *member; /* whose answer `fetch` is */
    struct serve_text sent;      /* what it was asked */
    struct serve_fetch fetch;
    bool gone;   /* the client left, or the proxy ends */
    bool ended;  /* a stream said [DONE], or what went wrong */
    bool broken; /* a stream that did not come to its end */
};
/* Hand a request to generate over to the members. 0 where `fetch` has the answer, whole or (a
 * stream's) begun; -1 with *p, or with `gone`. */
int serve_relay_generate(struct serve_relay *r, const char *body, size_t n,
                         struct serve_problem *p);
/* Pass a request on to a decode server as it is, body NULL: a GET. As above. */
int serve_relay_pass(struct serve_relay *r, const char *body, size_t n, struct serve_problem *p);
bool serve_relay_streams(const struct serve_relay *r); /* the answer there is */
/* Whole events of a stream into buf; 0 = its end, -1 = the client is not to be answered further. */
ssize_t serve_relay_read(struct serve_relay *r, char *buf, size_t max);
void serve_relay_close(struct serve_relay *r); /* zeroed is fine */

/* ---- proxy_http.c, proxy_status.c, proxy.c -------------------------------------------------- */

struct serve_proxy {
    struct serve_proxy_options options;
    struct serve_curl curl;
    struct MHD_Daemon *daemon;
    int listen_fd; /* once draining began; else -1 */
    uint16_t port;
    int64_t started; /* UNIX seconds */
    atomic_bool draining, stopping;
    atomic_uint open; /* requests that are not answered */
    pthread_t health;
    bool health_on;
    pthread_mutex_t lock;         /* of all that follows */
    struct serve_member *members; /* at most SERVE_MAX_MEMBERS are listed */
    uint64_t next_member, next_turn;
    enum serve_policy policy;
    uint32_t min_remote_tokens;
    struct serve_proxy_counts counts;
};
int serve_proxy_http_open(struct serve_proxy *p, struct baton_error *e);
void serve_proxy_add(struct serve_proxy *p, uint64_t *counter); /* of p->counts */
/* Whether a request can be answered: a decode server is up. */
bool serve_proxy_healthy(struct serve_proxy *p);
int serve_proxy_metrics_text(struct serve_proxy *p, struct serve_text *out);
/* The document that the page reads. */
int serve_proxy_status(struct serve_proxy *p, struct serve_text *out);

#endif
