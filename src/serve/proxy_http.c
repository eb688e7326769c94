/* SPDX-License-Identifier: Apache-2.0 */
/* The proxy's side towards its clients: libmicrohttpd with a thread for each connection, which
 * waits in here for what the members say. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include <microhttpd.h>

#include "serve/http_priv.h"
#include "serve/proxy_priv.h"

enum {
    BLOCK = 16384,
    IDLE_SECONDS = 120,
    MAX_CONNECTIONS = 2048,
    FDS_A_REQUEST = 5, /* client, member, and what libcurl waits with */
    STACK_BYTES = 1 << 20
};

enum route { GENERATE, PASS, HEALTH, LOOK };

static const struct {
    const char *path, *method;
    enum route route;
} routes[] = {
    /* clang-format off */
    {"/v1/completions", "POST", GENERATE},
    {"/v1/chat/completions", "POST", GENERATE},
    {"/v1/models", "GET", PASS},
    {"/tokenize", "POST", PASS},
    {"/detokenize", "POST", PASS},
    {"/health", "GET", HEALTH},
    {"/version", "GET", LOOK},
    {"/metrics", "GET", LOOK},
    {"/baton/v1/status", "GET", LOOK},
    {"/", "GET", LOOK},
    /* clang-format on */
};

/* One request of a connection. */
struct call {
    struct serve_proxy *proxy;
    struct MHD_Connection *connection;
    size_t route;
    struct serve_problem problem; /* known before the body is read */
    struct serve_text body;
    size_t n_body; /* bytes that came, kept or not */
    struct serve_relay relay;
    bool answered;
};

/* ---- replies ------------------------------------------------------------------------------ */

static enum MHD_Result queue(struct call *call, int status, const char *type,
                             struct MHD_Response *r)
{
    if (!r)
        return MHD_NO;
    call->answered = true;
    serve_http_describe(r, type);
    if (status == 429)
        MHD_add_response_header(r, "Retry-After", "1");
    if (status == 401)
        MHD_add_response_header(r, "WWW-Authenticate", "Bearer");
    enum MHD_Result done = MHD_queue_response(call->connection, (unsigned)status, r);
    MHD_destroy_response(r);
    return done;
}

/* Takes the text over. */
static enum MHD_Result reply(struct call *call, int status, const char *type,
                             struct serve_text *body)
{
    struct MHD_Response *r = MHD_create_response_from_buffer(body->n, body->data ? body->data : "",
                                                             body->data ? MHD_RESPMEM_MUST_FREE
                                                                        : MHD_RESPMEM_PERSISTENT);
    if (!r)
        serve_text_free(body);
    *body = (struct serve_text){0};
    return queue(call, status, type, r);
}

static enum MHD_Result reply_json(struct call *call, int status, json_t *doc)
{
    struct serve_text body = {0};
    return serve_text_json(&body, doc) ? MHD_NO : reply(call, status, "application/json", &body);
}

/* While a member is waited for, the connection's own limit does not run. */
static void limit_idle(struct MHD_Connection *c, bool on)
{
    MHD_set_connection_option(c, MHD_CONNECTION_OPTION_TIMEOUT, on ? (unsigned)IDLE_SECONDS : 0u);
}

static ssize_t read_stream(void *state, uint64_t at, char *buf, size_t max)
{
    struct call *call = state;
    (void)at;
    limit_idle(call->connection, false);
    ssize_t n = serve_relay_read(&call->relay, buf, max);
    limit_idle(call->connection, true);
    return n > 0    ? n
           : n == 0 ? MHD_CONTENT_READER_END_OF_STREAM
                    : MHD_CONTENT_READER_END_WITH_ERROR;
}

static enum MHD_Result reply_relayed(struct call *call)
{
    struct serve_fetch *f = &call->relay.fetch;
    const char *type = f->type[0] ? f->type : "application/json";
    if (!serve_relay_streams(&call->relay))
        return reply(call, (int)f->status, type, &f->in);
    struct MHD_Response *r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, BLOCK, read_stream,
                                                               call, NULL);
    if (r)
        MHD_add_response_header(r, "Cache-Control", "no-cache");
    return queue(call, 200, type, r);
}

/* ---- requests ----------------------------------------------------------------------------- */

static void begin_relay(struct call *call)
{
    struct serve_relay *r = &call->relay;
    struct MHD_Connection *c = call->connection;
    const char *id = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "X-Request-Id");
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(
        c, MHD_CONNECTION_INFO_CONNECTION_FD);
    size_t n = 0;
    r->proxy = call->proxy;
    r->path = routes[call->route].path;
    r->authorization = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Authorization");
    r->client_fd = info ? info->connect_fd : -1;
    for (; id && *id && n + 1 < sizeof r->request_id; id++)
        if (*id >= ' ' && *id <= '~')
            r->request_id[n++] = *id;
    uint8_t fresh[16];
    struct baton_error e;
    if (!n && !base_random(fresh, sizeof fresh, &e))
        base_hex(fresh, sizeof fresh, r->request_id);
}

static enum MHD_Result relay(struct call *call)
{
    bool post = routes[call->route].method[0] == 'P';
    const char *body = call->body.data ? call->body.data : "";
    begin_relay(call);
    for (const char *c = call->relay.authorization; c && *c; c++)
        if ((unsigned char)*c < ' ' && !call->problem.status)
            serve_refuse(&call->problem, 400, "invalid_header", NULL,
                         "Authorization has a control character");
    if (call->problem.status)
        return reply_json(call, call->problem.status, serve_problem_json(&call->problem));
    limit_idle(call->connection, false);
    int rc = routes[call->route].route == GENERATE
                 ? serve_relay_generate(&call->relay, body, call->body.n, &call->problem)
                 : serve_relay_pass(&call->relay, post ? body : NULL, call->body.n, &call->problem);
    limit_idle(call->connection, true);
    serve_text_free(&call->body);
    if (call->relay.gone)
        return MHD_NO;
    if (rc == 0)
        call->problem.status = 0; /* a member's, which another one made good */
    return rc ? reply_json(call, call->problem.status, serve_problem_json(&call->problem))
              : reply_relayed(call);
}

static int look(struct serve_proxy *p, const char *path, struct serve_reply *r,
                struct serve_problem *problem)
{
    int rc;
    if (!strcmp(path, "/"))
        return serve_page_html(r, problem);
    if (!strcmp(path, "/baton/v1/status")) {
        rc = serve_proxy_status(p, &r->body);
    } else if (!strcmp(path, "/version")) {
        rc = serve_text_json(&r->body, json_pack("{s:s}", "version", p->options.version));
    } else {
        r->type = "text/plain; version=0.0.4; charset=utf-8";
        rc = serve_proxy_metrics_text(p, &r->body);
    }
    return rc ? serve_refuse(problem, 503, "no_memory", NULL, "no memory for the answer") : 0;
}

static enum MHD_Result dispatch(struct call *call)
{
    struct serve_proxy *p = call->proxy;
    struct serve_problem *problem = &call->problem;
    struct serve_reply r = {.status = 200, .type = "application/json"};
    enum route route = routes[call->route].route;
    if (!problem->status && route <= PASS && atomic_load(&p->draining))
        serve_refuse(problem, 503, "draining", NULL, "the proxy is shutting down");
    if (!problem->status && route <= PASS)
        return relay(call);
    if (!problem->status && route == HEALTH && !serve_proxy_healthy(p))
        serve_refuse(problem, 503, "no_member", NULL, "no decode server is up");
    if (!problem->status && route == LOOK)
        look(p, routes[call->route].path, &r, problem);
    if (problem->status) {
        serve_text_free(&r.body);
        return reply_json(call, problem->status, serve_problem_json(problem));
    }
    if (route == HEALTH)
        return reply_json(call, 200, json_pack("{s:s}", "status", "ok"));
    return reply(call, r.status, r.type, &r.body);
}

static void find_route(struct call *call, const char *path, const char *method)
{
    size_t n = sizeof routes / sizeof *routes, i = 0;
    while (i < n && strcmp(path, routes[i].path) != 0)
        i++;
    call->route = i < n ? i : n - 1;
    bool head = !strcmp(method, "HEAD") && i < n && !strcmp(routes[i].method, "GET");
    if (i == n)
        serve_refuse(&call->problem, 404, "not_found", NULL, "there is no %.100s here", path);
    else if (strcmp(method, routes[i].method) != 0 && !head)
        serve_refuse(&call->problem, 405, "method_not_allowed", NULL, "%s takes %s, not %.20s",
                     routes[i].path, routes[i].method, method);
}

static enum MHD_Result begin_call(struct serve_proxy *p, struct MHD_Connection *c, const char *path,
                                  const char *method, void **state)
{
    struct call *call = base_try_alloc(1, sizeof *call, NULL);
    if (!call)
        return MHD_NO;
    call->proxy = p;
    call->connection = c;
    *state = call;
    atomic_fetch_add(&p->open, 1);
    find_route(call, path, method);
    const char *length = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Content-Length");
    return serve_http_fits(length, &call->problem)
               ? MHD_YES
               : reply_json(call, 413, serve_problem_json(&call->problem));
}

static enum MHD_Result handle(void *proxy, struct MHD_Connection *c, const char *url,
                              const char *method, const char *version, const char *data,
                              size_t *n_data, void **state)
{
    struct call *call = *state;
    (void)version;
    if (!call)
        return begin_call(proxy, c, url, method, state);
    if (*n_data) {
        bool go_on = serve_http_take(&call->body, &call->n_body, data, *n_data, &call->problem);
        *n_data = 0;
        return go_on ? MHD_YES : MHD_NO;
    }
    return dispatch(call);
}

static void count(struct call *call, enum MHD_RequestTerminationCode why)
{
    struct serve_proxy_counts *c = &call->proxy->counts;
    const struct serve_relay *r = &call->relay;
    int status = call->problem.status ? call->problem.status : (int)r->fetch.status;
    bool left = r->gone || !call->answered || why != MHD_REQUEST_TERMINATED_COMPLETED_OK;
    if (routes[call->route].route == GENERATE)
        serve_proxy_add(call->proxy, left && !r->broken           ? &c->cancelled
                                     : r->broken || status >= 500 ? &c->failed
                                     : status >= 400              ? &c->refused
                                                                  : &c->finished);
}

static void completed(void *proxy, struct MHD_Connection *c, void **state,
                      enum MHD_RequestTerminationCode why)
{
    struct call *call = *state;
    (void)proxy;
    (void)c;
    if (!call)
        return;
    *state = NULL;
    count(call, why);
    serve_relay_close(&call->relay);
    serve_text_free(&call->body);
    atomic_fetch_sub(&call->proxy->open, 1);
    free(call);
}

static void log_line(void *proxy, const char *fmt, va_list ap)
{
    char line[400];
    (void)proxy;
    vsnprintf(line, sizeof line, fmt, ap);
    line[strcspn(line, "\n")] = '\0';
    base_log(BASE_LOG_DEBUG, "http: %s", line);
}

/* ---- opening ------------------------------------------------------------------------------ */

static unsigned connection_limit(void)
{
    struct rlimit lim;
    if (getrlimit(RLIMIT_NOFILE, &lim) || lim.rlim_cur == RLIM_INFINITY ||
        lim.rlim_cur > MAX_CONNECTIONS * FDS_A_REQUEST)
        return MAX_CONNECTIONS;
    return lim.rlim_cur > 128 ? (unsigned)(lim.rlim_cur - 64) / FDS_A_REQUEST : 12;
}

int serve_proxy_http_open(struct serve_proxy *p, struct baton_error *e)
{
    int fd = serve_listen(p->options.host, p->options.port, &p->port, e);
    if (fd < 0)
        return fd;
    p->daemon = MHD_start_daemon(
        MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_THREAD_PER_CONNECTION | MHD_USE_POLL |
            MHD_USE_ITC | MHD_USE_ERROR_LOG,
        0, NULL, NULL, handle, p, MHD_OPTION_EXTERNAL_LOGGER, log_line, p, MHD_OPTION_LISTEN_SOCKET,
        fd, MHD_OPTION_NOTIFY_COMPLETED, completed, p, MHD_OPTION_CONNECTION_TIMEOUT,
        (unsigned)IDLE_SECONDS, MHD_OPTION_CONNECTION_LIMIT, connection_limit(),
        MHD_OPTION_THREAD_STACK_SIZE, (size_t)STACK_BYTES, MHD_OPTION_SIGPIPE_HANDLED_BY_APP, 1,
        MHD_OPTION_END);
    return p->daemon ? 0 : base_fail(e, BATON_ERR_IO, "libmicrohttpd can't start");
}
