/* SPDX-License-Identifier: Apache-2.0 */
/* The sockets' side: libmicrohttpd's callbacks, all in its own thread.
 *
 * A request that the engine must answer suspends its connection until the pump has a status for it,
 * and again whenever a stream has nothing to say. A suspended connection is resumed by the pump
 * alone, with the job's lock held, so that it is resumed once for each time.
 */
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <microhttpd.h>

#include "serve/http_priv.h"
#include "serve/page_priv.h"

enum { BLOCK = 16384, IDLE_SECONDS = 120, MAX_CONNECTIONS = 4096 };

/* ---- replies ------------------------------------------------------------------------------ */

static enum MHD_Result queue(struct MHD_Connection *c, int status, struct MHD_Response *r)
{
    if (!r)
        return MHD_NO;
    if (status == 429)
        MHD_add_response_header(r, "Retry-After", "1");
    if (status == 401)
        MHD_add_response_header(r, "WWW-Authenticate", "Bearer");
    enum MHD_Result done = MHD_queue_response(c, (unsigned)status, r);
    MHD_destroy_response(r);
    return done;
}

void serve_http_describe(struct MHD_Response *r, const char *type)
{
    MHD_add_response_header(r, "Content-Type", type);
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    if (strncmp(type, "text/html", 9) != 0)
        return;
    MHD_add_response_header(r, "Content-Security-Policy", serve_page_policy);
    MHD_add_response_header(r, "Referrer-Policy", "no-referrer");
    MHD_add_response_header(r, "Cache-Control", "no-cache");
}

bool serve_http_fits(const char *length, struct serve_problem *p)
{
    if (!length || strtoull(length, NULL, 10) <= SERVE_MAX_BODY)
        return true;
    serve_refuse(p, 413, "request_too_large", NULL,
                 "the request's body has %.20s bytes, at most %u are read", length, SERVE_MAX_BODY);
    return false;
}

bool serve_http_take(struct serve_text *body, size_t *came, const char *data, size_t n,
                     struct serve_problem *p)
{
    *came += n;
    if (*came > SERVE_MAX_BODY && !p->status)
        serve_refuse(p, 413, "request_too_large", NULL,
                     "the request's body is larger than %u bytes", SERVE_MAX_BODY);
    if (!p->status)
        return serve_text_put(body, data, n) == 0;
    serve_text_free(body);
    return *came <= 2 * (size_t)SERVE_MAX_BODY;
}

/* Takes the text over. */
static enum MHD_Result reply(struct MHD_Connection *c, int status, const char *type,
                             struct serve_text *body)
{
    if (!body->data)
        return MHD_NO;
    struct MHD_Response *r = MHD_create_response_from_buffer(body->n, body->data,
                                                             MHD_RESPMEM_MUST_FREE);
    if (!r)
        serve_text_free(body);
    else
        serve_http_describe(r, type);
    *body = (struct serve_text){0};
    return queue(c, status, r);
}

static enum MHD_Result reply_problem(struct MHD_Connection *c, const struct serve_problem *p)
{
    struct serve_text body = {0};
    if (serve_text_json(&body, serve_problem_json(p)))
        return MHD_NO;
    return reply(c, p->status, "application/json", &body);
}

/* ---- jobs --------------------------------------------------------------------------------- */

static void suspend(struct serve_job *j)
{
    j->suspended = true;
    MHD_suspend_connection(j->connection);
}

void serve_http_resume(struct serve_job *j)
{
    j->suspended = false;
    MHD_resume_connection(j->connection);
}

static ssize_t read_stream(void *job, uint64_t at, char *buf, size_t max)
{
    struct serve_job *j = job;
    ssize_t n = 0;
    (void)at;
    pthread_mutex_lock(&j->lock);
    if (j->gone) {
        n = MHD_CONTENT_READER_END_WITH_ERROR;
    } else if (j->out.n) {
        n = (ssize_t)(j->out.n < max ? j->out.n : max);
        memcpy(buf, j->out.data, (size_t)n);
        serve_text_drop(&j->out, (size_t)n);
    } else if (j->over) {
        n = MHD_CONTENT_READER_END_OF_STREAM;
    } else {
        suspend(j);
    }
    pthread_mutex_unlock(&j->lock);
    return n;
}

static void stream_done(void *job)
{
    serve_job_put(job);
}

static enum MHD_Result reply_stream(struct MHD_Connection *c, struct serve_job *j)
{
    atomic_fetch_add(&j->refs, 1); /* the response's own, which outlives the request's */
    struct MHD_Response *r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, BLOCK, read_stream,
                                                               j, stream_done);
    if (!r) {
        serve_job_put(j);
        return MHD_NO;
    }
    MHD_add_response_header(r, "Content-Type", "text/event-stream; charset=utf-8");
    MHD_add_response_header(r, "Cache-Control", "no-cache");
    return queue(c, 200, r);
}

static enum MHD_Result answer_job(struct MHD_Connection *c, struct serve_job *j)
{
    struct serve_problem problem = {0};
    struct serve_text body = {0};
    bool wait = false, gone;
    pthread_mutex_lock(&j->lock);
    gone = j->gone;
    if (!gone && !j->ready) {
        wait = true;
        suspend(j);
    } else if (j->over && j->problem.status && j->out.n == 0) {
        problem = j->problem;
    } else if (!j->ask.stream) {
        body = j->out;
        j->out = (struct serve_text){0};
    }
    pthread_mutex_unlock(&j->lock);
    if (gone)
        return MHD_NO;
    if (wait)
        return MHD_YES;
    if (problem.status)
        return reply_problem(c, &problem);
    return j->ask.stream ? reply_stream(c, j) : reply(c, 200, "application/json", &body);
}

/* On failure what the ticket stands for is given back. */
static int parse_ask(struct serve_call *call, struct serve_ask *a, struct serve_problem *p)
{
    struct serve *s = call->serve;
    int rc = serve_ask_parse(a, call->kind, call->body.data ? call->body.data : "", call->body.n,
                             p);
    serve_text_free(&call->body);
    if (rc == 0 && a->model && strcmp(a->model, s->name) != 0)
        rc = serve_refuse(p, 404, "model_not_found", "model", "the model '%.80s' does not exist",
                          a->model);
    if (rc == 0 && atomic_load(&s->draining))
        rc = serve_refuse(p, 503, "draining", NULL, "the server is shutting down");
    if (rc == 0)
        rc = serve_transfer_check(s, a, call->if_available, p);
    if (rc) {
        serve_transfer_release(s, &a->transfer);
        serve_ask_free(a);
    }
    return rc;
}

static int start_job(struct serve_call *call, struct MHD_Connection *c, struct serve_problem *p)
{
    struct serve *s = call->serve;
    struct serve_ask ask;
    if (parse_ask(call, &ask, p))
        return -1;
    struct serve_job *j;
    if (serve_job_open(s, &ask, &j, p))
        return -1;
    j->connection = c;
    j->client = call->client;
    memcpy(j->request_id, call->request_id, sizeof j->request_id);
    call->job = j;
    if (serve_job_submit(j, p)) {
        call->job = NULL;
        serve_job_put(j);
        return -1;
    }
    const union MHD_ConnectionInfo *info = MHD_get_connection_info(
        c, MHD_CONNECTION_INFO_CONNECTION_FD);
    call->fd = info ? info->connect_fd : -1;
    if (call->fd >= 0)
        serve_watch(s, j, call->fd);
    return 0;
}

/* ---- requests ----------------------------------------------------------------------------- */

static enum MHD_Result dispatch(struct serve_call *call, struct MHD_Connection *c)
{
    struct serve *s = call->serve;
    struct serve_problem *p = &call->problem;
    struct serve_reply r = {.status = 200, .type = "application/json"};
    int rc = -1;
    if (!p->status && call->route == SERVE_GENERATE)
        rc = start_job(call, c, p);
    else if (!p->status && call->route == SERVE_TOKENS)
        rc = serve_route_tokens(s, call->path, call->body.data ? call->body.data : "", call->body.n,
                                &r, p);
    else if (!p->status)
        rc = serve_route_get(s, call->path, &r, p);
    if (call->job)
        return answer_job(c, call->job);
    if (rc) {
        serve_text_free(&r.body);
        serve_metrics_add(&s->metrics, &s->metrics.refused, 1);
        if (call->route == SERVE_GENERATE)
            serve_record_refused(s, call->request_id, p);
        return reply_problem(c, p);
    }
    return reply(c, r.status, r.type, &r.body);
}

static enum MHD_Result begin_call(struct serve *s, struct MHD_Connection *c, const char *path,
                                  const char *method, void **state)
{
    struct serve_call *call = base_try_alloc(1, sizeof *call, NULL);
    if (!call)
        return MHD_NO;
    call->serve = s;
    call->fd = -1;
    *state = call;
    atomic_fetch_add(&s->connections, 1);
    serve_call_route(call, path, method,
                     MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Authorization"));
    const union MHD_ConnectionInfo *peer = MHD_get_connection_info(
        c, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
    serve_call_client(call, peer ? peer->client_addr : NULL);
    serve_call_headers(call, MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Prefer"),
                       MHD_lookup_connection_value(c, MHD_HEADER_KIND, "X-Request-Id"));
    const char *length = MHD_lookup_connection_value(c, MHD_HEADER_KIND, "Content-Length");
    return serve_http_fits(length, &call->problem) ? MHD_YES : reply_problem(c, &call->problem);
}

static enum MHD_Result handle(void *serve, struct MHD_Connection *c, const char *url,
                              const char *method, const char *version, const char *data,
                              size_t *n_data, void **state)
{
    struct serve_call *call = *state;
    (void)version;
    if (!call)
        return begin_call(serve, c, url, method, state);
    if (*n_data) {
        bool go_on = serve_http_take(&call->body, &call->n_body, data, *n_data, &call->problem);
        *n_data = 0;
        return go_on ? MHD_YES : MHD_NO;
    }
    return call->job ? answer_job(c, call->job) : dispatch(call, c);
}

static void completed(void *serve, struct MHD_Connection *c, void **state,
                      enum MHD_RequestTerminationCode why)
{
    struct serve *s = serve;
    struct serve_call *call = *state;
    (void)c;
    (void)why;
    if (!call)
        return;
    *state = NULL;
    if (call->job) {
        pthread_mutex_lock(&call->job->lock);
        call->job->connection = NULL;
        call->job->suspended = false;
        call->job->gone = call->job->gone || !call->job->over;
        pthread_mutex_unlock(&call->job->lock);
        if (call->fd >= 0)
            serve_unwatch(s, call->fd);
        serve_ring(s);
        serve_job_put(call->job);
    }
    serve_text_free(&call->body);
    free(call);
    atomic_fetch_sub(&s->connections, 1);
}

static void log_line(void *serve, const char *fmt, va_list ap)
{
    char line[400];
    (void)serve;
    vsnprintf(line, sizeof line, fmt, ap);
    line[strcspn(line, "\n")] = '\0';
    base_log(BASE_LOG_DEBUG, "http: %s", line);
}

/* ---- opening and closing ------------------------------------------------------------------ */

static unsigned connection_limit(void)
{
    struct rlimit lim;
    if (getrlimit(RLIMIT_NOFILE, &lim) || lim.rlim_cur == RLIM_INFINITY ||
        lim.rlim_cur > MAX_CONNECTIONS + 64)
        return MAX_CONNECTIONS;
    return lim.rlim_cur > 128 ? (unsigned)lim.rlim_cur - 64 : 64;
}

int serve_http_open(struct serve *s, const struct serve_options *o, struct baton_error *e)
{
    unsigned flags = MHD_USE_EPOLL_INTERNAL_THREAD | MHD_ALLOW_SUSPEND_RESUME | MHD_USE_ERROR_LOG;
    int fd = serve_listen(o->host, o->port, &s->port, e);
    if (fd < 0)
        return fd;
    struct MHD_OptionItem tls[] = {{MHD_OPTION_HTTPS_MEM_CERT, 0, s->cert},
                                   {MHD_OPTION_HTTPS_MEM_KEY, 0, s->key},
                                   {MHD_OPTION_END, 0, NULL}};
    if (s->cert)
        flags |= MHD_USE_TLS;
    s->daemon = MHD_start_daemon(
        flags, 0, NULL, NULL, handle, s, MHD_OPTION_EXTERNAL_LOGGER, log_line, s,
        MHD_OPTION_LISTEN_SOCKET, fd, MHD_OPTION_NOTIFY_COMPLETED, completed, s,
        MHD_OPTION_CONNECTION_TIMEOUT, (unsigned)IDLE_SECONDS, MHD_OPTION_CONNECTION_LIMIT,
        connection_limit(), MHD_OPTION_SIGPIPE_HANDLED_BY_APP, 1, MHD_OPTION_ARRAY,
        s->cert ? tls : tls + 2, MHD_OPTION_END);
    if (s->daemon)
        return 0;
    if (s->cert)
        return base_fail(e, BATON_ERR_INPUT,
                         "HTTPS can't start: --tls-cert and --tls-key are no PEM pair, or "
                         "libmicrohttpd has no TLS");
    return base_fail(e, BATON_ERR_IO, "libmicrohttpd can't start");
}

void serve_http_close(struct serve *s)
{
    if (s->daemon)
        MHD_stop_daemon(s->daemon);
    s->daemon = NULL;
}
