/* SPDX-License-Identifier: Apache-2.0 */
/* The server's life: opening with everything that can be refused, draining, closing from any
 * half-built state. */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <microhttpd.h>

#include "model/sampler.h"
#include "serve/http_priv.h"

enum { TLS_FILE_BYTES = 1 << 20, READ_SECONDS = 10 };

static int load_files(struct serve *s, const struct serve_options *o, struct baton_error *e)
{
    size_t n;
    int rc = 0;
    if (!!o->tls_cert != !!o->tls_key)
        return base_fail(e, BATON_ERR_USAGE, "--tls-cert and --tls-key go together");
    if (o->api_key_file)
        rc = serve_keys_load(s, o->api_key_file, e);
    if (rc == 0 && o->tls_cert)
        rc = base_stream_read(o->tls_cert, TLS_FILE_BYTES, &s->cert, &n, e);
    if (rc == 0 && o->tls_key)
        rc = base_stream_read(o->tls_key, TLS_FILE_BYTES, &s->key, &n, e);
    return rc;
}

static int open_bell(struct serve *s, struct baton_error *e)
{
    struct epoll_event ev = {.events = EPOLLIN, .data.u64 = 0};
    s->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    s->watch = epoll_create1(EPOLL_CLOEXEC);
    if (s->bell < 0 || s->watch < 0 || epoll_ctl(s->watch, EPOLL_CTL_ADD, s->bell, &ev))
        return base_fail_errno(e, BATON_ERR_IO, errno, "the server's bell");
    return 0;
}

/* It stands in metrics' labels, which quote. */
static int check_name(const char *name, struct baton_error *e)
{
    size_t n = strlen(name);
    bool plain = n > 0 && n <= 128 && !strpbrk(name, "\"\\");
    for (size_t i = 0; i < n; i++)
        plain &= (unsigned char)name[i] >= ' ';
    if (!plain)
        return base_fail(e, BATON_ERR_USAGE,
                         "--served-name: '%.60s' is empty, longer than 128 bytes, or holds quotes, "
                         "backslashes or control characters",
                         name);
    return 0;
}

/* HOST:PORT or [HOST]:PORT in its two parts, as kv_transfer_params have them. */
static int set_advertised(struct serve *s, const char *address, struct baton_error *e)
{
    const char *colon = strrchr(address, ':');
    char *end = NULL;
    unsigned long port = colon ? strtoul(colon + 1, &end, 10) : 0;
    size_t n = colon ? (size_t)(colon - address) : 0;
    bool brackets = n > 2 && address[0] == '[' && address[n - 1] == ']';
    bool plain = colon && colon[1] >= '0' && colon[1] <= '9' && !*end;
    if (!plain || port == 0 || port > UINT16_MAX || n == 0 || n >= sizeof s->kv_host ||
        (!brackets && memchr(address, ':', n)))
        return base_fail(e, BATON_ERR_USAGE, "--kv-advertise: '%.80s' is not HOST:PORT", address);
    memcpy(s->kv_host, address + brackets, n - 2u * brackets);
    s->kv_port = (uint16_t)port;
    return 0;
}

static int open_parts(struct serve *s, const struct serve_options *o, struct baton_error *e)
{
    uint8_t id[16];
    int rc = check_name(o->served_name, e);
    if (rc == 0)
        rc = base_random(id, sizeof id, e);
    if (rc == 0)
        base_hex(id, sizeof id, s->engine_id);
    if (rc == 0 && o->role == SERVE_DECODE)
        rc = serve_allow_open(o, &s->allow, e);
    if (rc == 0 && o->kv_advertise)
        rc = set_advertised(s, o->kv_advertise, e);
    if (rc == 0 && o->request_log)
        rc = serve_record_open(s, o->request_log, e);
    if (rc == 0 && (!(s->name = base_try_strdup(o->served_name, e)) ||
                    !(s->version = base_try_strdup(o->version, e))))
        rc = BATON_ERR_NOMEM;
    if (rc == 0)
        rc = load_files(s, o, e);
    if (rc == 0)
        rc = open_bell(s, e);
    return rc ? rc : serve_http_open(s, o, e);
}

int serve_open(const struct serve_options *o, struct serve **out, struct baton_error *e)
{
    struct serve *s = base_try_alloc(1, sizeof *s, e);
    if (!s)
        return BATON_ERR_NOMEM;
    s->role = o->role;
    s->lease_ns = o->lease_ns ? o->lease_ns : 30000000000u;
    s->local_prefill = o->local_prefill;
    s->record_fd = -1;
    s->max_queue = o->max_queue;
    s->started = (int64_t)time(NULL);
    s->bell = s->watch = s->listen_fd = -1;
    atomic_init(&s->next_number, 1); /* 0 is the bell */
    atomic_init(&s->next_request, 1);
    pthread_mutex_init(&s->lock, NULL);
    pthread_mutex_init(&s->metrics.lock, NULL);
    pthread_mutex_init(&s->page.lock, NULL);
    int rc = open_parts(s, o, e);
    if (rc) {
        serve_close(s);
        return rc;
    }
    *out = s;
    return 0;
}

uint16_t serve_port(const struct serve *s)
{
    return s->port;
}

int serve_attach(struct serve *s, struct baton_model *m, struct baton_engine *en,
                 struct baton_error *e)
{
    struct engine_load load;
    sigset_t all, before;
    int rc = engine_tokenizer(m, &s->tokenizer, e);
    if (rc == 0 && s->role == SERVE_PREFILL && !s->kv_host[0])
        rc = set_advertised(s, baton_engine_address(en), e);
    if (rc == 0)
        rc = model_sampler_open(baton_model_vocab(m), &s->sampler, e);
    if (rc)
        return rc;
    engine_fingerprint(m, s->fingerprint);
    engine_load(en, &load);
    s->model = m;
    s->engine = en;
    s->lanes = load.lanes;
    s->ctx = load.ctx;
    s->vocab = baton_model_vocab(m);
    sigfillset(&all); /* signals belong to the caller's threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int err = pthread_create(&s->pump, NULL, serve_pump_thread, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (err)
        return base_fail_errno(e, BATON_ERR_NOMEM, err, "the server's thread");
    s->pump_on = true;
    atomic_store(&s->attached, true);
    return 0;
}

/* A cache that is kept for its ticket: a decode server may be about to come for it. */
static bool has_tickets(struct serve *s)
{
    struct baton_ticket_stats t = {.struct_size = sizeof t};
    return s->role == SERVE_PREFILL && s->engine && baton_ticket_stats(s->engine, &t) == 0 &&
           t.open + t.claimed > 0;
}

void serve_drain(struct serve *s, bool (*hurry)(void *ctx), void *ctx)
{
    enum { LOOK_NS = 20000000 };
    uint64_t last = 0;
    atomic_store(&s->draining, true);
    if (s->listen_fd < 0)
        s->listen_fd = MHD_quiesce_daemon(s->daemon);
    if (s->listen_fd >= 0) /* who comes now is refused at once, and may ask another server */
        shutdown(s->listen_fd, SHUT_RDWR);
    /* What is answered may still be on its way to a client that reads; one that does not read is
     * not waited for. */
    for (;;) {
        bool kept = has_tickets(s), busy = atomic_load(&s->open_choices) > 0;
        if ((!kept && !busy && !atomic_load(&s->connections)) || hurry(ctx))
            return;
        if (kept || busy)
            last = 0;
        else if (last == 0)
            last = base_now_ns();
        else if (base_now_ns() - last > READ_SECONDS * 1000000000ull)
            return;
        base_sleep_ns(LOOK_NS);
    }
}

void serve_count(struct serve *s, struct serve_counts *out)
{
    pthread_mutex_lock(&s->metrics.lock);
    *out = (struct serve_counts){.finished = s->metrics.finished,
                                 .refused = s->metrics.refused,
                                 .cancelled = s->metrics.cancelled,
                                 .open = atomic_load(&s->connections)};
    pthread_mutex_unlock(&s->metrics.lock);
}

void serve_close(struct serve *s)
{
    if (!s)
        return;
    /* The pump ends every job and resumes its connection, as libmicrohttpd wants it. */
    atomic_store(&s->draining, true);
    atomic_store(&s->stopping, true);
    if (s->pump_on) {
        serve_ring(s);
        pthread_join(s->pump, NULL);
    }
    serve_http_close(s);
    if (s->listen_fd >= 0)
        close(s->listen_fd);
    if (s->bell >= 0)
        close(s->bell);
    if (s->watch >= 0)
        close(s->watch);
    model_sampler_close(s->sampler);
    serve_allow_close(s->allow);
    serve_record_close(s);
    free(s->cert);
    free(s->key);
    free(s->api_keys);
    free(s->name);
    free(s->version);
    serve_page_free(&s->page);
    pthread_mutex_destroy(&s->metrics.lock);
    pthread_mutex_destroy(&s->lock);
    free(s);
}
