/* SPDX-License-Identifier: Apache-2.0 */
/* One exchange with a member, in the thread of the client's connection: what it does not read, the
 * member does not get to send. A new connection each time, since one that was kept may be closed
 * by the member just as a request goes out, and nobody could tell whether that was taken. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "serve/proxy_priv.h"

enum { CONNECT_SECONDS = 5, WHOLE_BYTES = 256 << 20 };

static size_t take(char *data, size_t size, size_t n, void *fetch)
{
    struct serve_fetch *f = fetch;
    if (f->in.n + size * n > f->most || serve_text_put(&f->in, data, size * n))
        return 0;
    return size * n;
}

/* An empty value: curl sends none of its own. */
static bool add_header(struct serve_fetch *f, const char *name, const char *value)
{
    struct serve_text line = {0};
    struct curl_slist *more = NULL;
    if (!serve_text_put(&line, name, strlen(name)) && !serve_text_put(&line, value, strlen(value)))
        more = f->curl->slist_append(f->headers, line.data);
    serve_text_free(&line);
    if (more)
        f->headers = more;
    return more != NULL;
}

static bool describe(struct serve_fetch *f, const struct serve_fetch_ask *a)
{
    const struct serve_curl *c = f->curl;
    char url[SERVE_URL_BYTES + 64];
    snprintf(url, sizeof url, "%s%s", a->member->url, a->path);
    c->easy_setopt(f->easy, CURLOPT_URL, url);
    c->easy_setopt(f->easy, CURLOPT_NOSIGNAL, 1L);
    c->easy_setopt(f->easy, CURLOPT_NOPROXY, "*");
    c->easy_setopt(f->easy, CURLOPT_CONNECTTIMEOUT, (long)CONNECT_SECONDS);
    c->easy_setopt(f->easy, CURLOPT_TCP_KEEPALIVE, 1L);
    c->easy_setopt(f->easy, CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
    c->easy_setopt(f->easy, CURLOPT_WRITEFUNCTION, take);
    c->easy_setopt(f->easy, CURLOPT_WRITEDATA, f);
    if (a->authorization && !add_header(f, "Authorization: ", a->authorization))
        return false;
    if (a->request_id && !add_header(f, "X-Request-Id: ", a->request_id))
        return false;
    if (a->body) {
        if (!add_header(f, "Content-Type: ", "application/json") || !add_header(f, "Expect:", ""))
            return false;
        c->easy_setopt(f->easy, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t)a->n_body);
        c->easy_setopt(f->easy, CURLOPT_POSTFIELDS, a->body);
    }
    c->easy_setopt(f->easy, CURLOPT_HTTPHEADER, f->headers);
    return true;
}

int serve_fetch_open(struct serve_fetch *f, const struct serve_curl *c,
                     const struct serve_fetch_ask *a)
{
    *f = (struct serve_fetch){.curl = c, .most = a->most ? a->most : WHOLE_BYTES};
    f->easy = c->easy_init();
    f->multi = c->multi_init();
    if (f->easy && f->multi && describe(f, a) && !c->multi_add_handle(f->multi, f->easy))
        return 0;
    serve_fetch_close(f);
    return BATON_ERR_NOMEM;
}

/* A client that sends more (its next request) is not looked at any further. */
static bool still_there(int *fd)
{
    char byte;
    ssize_t n = recv(*fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (n > 0)
        *fd = -1;
    return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
}

static void note(struct serve_fetch *f)
{
    const CURLMsg *msg;
    const char *type = NULL;
    int left;
    f->curl->easy_getinfo(f->easy, CURLINFO_RESPONSE_CODE, &f->status);
    if (f->status && !f->type[0] && !f->curl->easy_getinfo(f->easy, CURLINFO_CONTENT_TYPE, &type) &&
        type)
        snprintf(f->type, sizeof f->type, "%s", type);
    while ((msg = f->curl->multi_info_read(f->multi, &left)))
        if (msg->msg == CURLMSG_DONE) {
            f->over = true;
            f->result = msg->data.result;
        }
}

bool serve_fetch_step(struct serve_fetch *f, int *client_fd, int wait_ms)
{
    struct curl_waitfd client = {.fd = *client_fd, .events = CURL_WAIT_POLLIN};
    int running = 0;
    size_t before = f->in.n;
    if (f->curl->multi_perform(f->multi, &running)) {
        f->over = true;
        f->result = CURLE_RECV_ERROR;
    }
    note(f);
    if (f->over || f->in.n > before) /* a member that never stops must not hide that he left */
        return *client_fd < 0 || still_there(client_fd);
    f->curl->multi_poll(f->multi, *client_fd >= 0 ? &client : NULL, *client_fd >= 0, wait_ms, NULL);
    return *client_fd < 0 || still_there(client_fd);
}

void serve_fetch_close(struct serve_fetch *f)
{
    if (f->easy && f->multi)
        f->curl->multi_remove_handle(f->multi, f->easy);
    if (f->easy)
        f->curl->easy_cleanup(f->easy);
    if (f->multi)
        f->curl->multi_cleanup(f->multi);
    if (f->headers)
        f->curl->slist_free_all(f->headers);
    serve_text_free(&f->in);
    *f = (struct serve_fetch){0};
}
