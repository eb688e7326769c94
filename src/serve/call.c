/* SPDX-License-Identifier: Apache-2.0 */
/* Which path is what, who may ask, and where the server listens. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "serve/http_priv.h"

union address {
    struct sockaddr any;
    struct sockaddr_in v4;
    struct sockaddr_in6 v6;
};

/* ---- routes ------------------------------------------------------------------------------- */

static const struct {
    const char *path, *method;
    enum serve_route route;
    enum serve_kind kind;
    bool open;   /* needs no key */
    bool always; /* answered before the model is there */
} routes[] = {
    {"/v1/completions", "POST", SERVE_GENERATE, SERVE_COMPLETION, false, false},
    {"/v1/chat/completions", "POST", SERVE_GENERATE, SERVE_CHAT, false, false},
    {"/v1/models", "GET", SERVE_LOOK, SERVE_COMPLETION, false, false},
    {"/tokenize", "POST", SERVE_TOKENS, SERVE_TOKENIZE, false, false},
    {"/detokenize", "POST", SERVE_TOKENS, SERVE_TOKENIZE, false, false},
    {"/", "GET", SERVE_LOOK, SERVE_COMPLETION, true, true},
    {"/baton/v1/status", "GET", SERVE_LOOK, SERVE_COMPLETION, false, false},
    {"/health", "GET", SERVE_LOOK, SERVE_COMPLETION, true, false},
    {"/version", "GET", SERVE_LOOK, SERVE_COMPLETION, true, true},
    {"/metrics", "GET", SERVE_LOOK, SERVE_COMPLETION, true, false},
};

/* Every key is compared, in constant time: what is wrong is not told by how long it takes. */
static bool key_fits(const struct serve *s, const char *authorization, uint64_t *client)
{
    static const char scheme[] = "Bearer ";
    uint8_t hash[32];
    bool fits = false;
    if (!authorization || strncasecmp(authorization, scheme, sizeof scheme - 1) != 0)
        return false;
    const char *key = authorization + sizeof scheme - 1;
    base_sha256(key, strlen(key), hash);
    memcpy(client, hash, sizeof *client);
    for (size_t i = 0; i < s->n_api_keys; i++)
        fits |= base_equal_secret(hash, s->api_keys[i], sizeof hash);
    return fits;
}

static void allow(struct serve_call *c, size_t i, const char *authorization)
{
    struct serve *s = c->serve;
    if (s->n_api_keys && !routes[i].open && !key_fits(s, authorization, &c->client))
        serve_refuse(&c->problem, 401, "invalid_api_key", NULL,
                     "this server wants one of its API keys as Authorization: Bearer KEY");
    else if (!routes[i].always && !atomic_load(&s->attached))
        serve_refuse(&c->problem, 503, "loading", NULL, "the model is being loaded");
}

void serve_call_route(struct serve_call *c, const char *path, const char *method,
                      const char *authorization)
{
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++) {
        if (strcmp(path, routes[i].path) != 0)
            continue;
        c->route = routes[i].route;
        c->kind = routes[i].kind;
        strcpy(c->path, routes[i].path);
        bool head = !strcmp(method, "HEAD") && !strcmp(routes[i].method, "GET");
        if (strcmp(method, routes[i].method) != 0 && !head)
            serve_refuse(&c->problem, 405, "method_not_allowed", NULL, "%s takes %s, not %.20s",
                         routes[i].path, routes[i].method, method);
        else
            allow(c, i, authorization);
        return;
    }
    serve_refuse(&c->problem, 404, "not_found", NULL, "there is no %.100s here", path);
}

void serve_call_client(struct serve_call *c, const struct sockaddr *address)
{
    const union address *a = (const void *)address;
    uint8_t hash[32];
    if (c->serve->n_api_keys || !address)
        return;
    if (address->sa_family == AF_INET6)
        base_sha256(&a->v6.sin6_addr, 8, hash);
    else
        base_sha256(&a->v4.sin_addr, sizeof a->v4.sin_addr, hash);
    memcpy(&c->client, hash, sizeof c->client);
}

/* "Prefer: if-available; x, wait=10": one of a list, parameters aside. */
static bool prefers(const char *list, const char *token)
{
    size_t n = strlen(token);
    while (list && *list) {
        list += strspn(list, " \t,");
        if (!strncasecmp(list, token, n) && strchr(" \t,;", list[n]))
            return true;
        list += strcspn(list, ",");
    }
    return false;
}

void serve_call_headers(struct serve_call *c, const char *prefer, const char *request_id)
{
    size_t n = 0;
    c->if_available = prefers(prefer, "if-available");
    for (; request_id && *request_id && n + 1 < sizeof c->request_id; request_id++)
        if (*request_id >= ' ' && *request_id <= '~')
            c->request_id[n++] = *request_id;
}

/* ---- keys --------------------------------------------------------------------------------- */

int serve_keys_load(struct serve *s, const char *path, struct baton_error *e)
{
    char *text;
    size_t size, lines = 1;
    int rc = base_stream_read(path, 1u << 20, &text, &size, e);
    if (rc)
        return rc;
    for (size_t i = 0; i < size; i++)
        lines += text[i] == '\n';
    s->api_keys = base_try_alloc(lines, sizeof *s->api_keys, e);
    char *rest = text, *line;
    while (s->api_keys && (line = strsep(&rest, "\r\n")))
        if (*line)
            base_sha256(line, strlen(line), s->api_keys[s->n_api_keys++]);
    base_forget(text, size);
    free(text);
    if (!s->api_keys)
        return BATON_ERR_NOMEM;
    return s->n_api_keys ? 0 : base_fail(e, BATON_ERR_INPUT, "%s holds no key", path);
}

/* ---- the socket --------------------------------------------------------------------------- */

static socklen_t parse_address(const char *host, uint16_t port, union address *a)
{
    memset(a, 0, sizeof *a);
    if (inet_pton(AF_INET, host, &a->v4.sin_addr) == 1) {
        a->v4.sin_family = AF_INET;
        a->v4.sin_port = htons(port);
        return sizeof a->v4;
    }
    if (inet_pton(AF_INET6, host, &a->v6.sin6_addr) == 1) {
        a->v6.sin6_family = AF_INET6;
        a->v6.sin6_port = htons(port);
        return sizeof a->v6;
    }
    return 0;
}

int serve_listen(const char *host, uint16_t port, uint16_t *bound, struct baton_error *e)
{
    union address a;
    int on = 1;
    if (!host)
        host = "127.0.0.1";
    socklen_t n = parse_address(host, port, &a);
    if (!n)
        return base_fail(e, BATON_ERR_USAGE, "--host: '%.60s' is no IPv4 or IPv6 address", host);
    int fd = socket(a.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return base_fail_errno(e, BATON_ERR_IO, errno, "a socket for %.60s", host);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, &a.any, n) || listen(fd, SOMAXCONN) || getsockname(fd, &a.any, &n)) {
        int err = errno;
        close(fd);
        return base_fail_errno(e, BATON_ERR_IO, err, "%.60s port %u", host, port);
    }
    *bound = ntohs(a.any.sa_family == AF_INET ? a.v4.sin_port : a.v6.sin6_port);
    return fd;
}
