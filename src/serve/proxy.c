/* SPDX-License-Identifier: Apache-2.0 */
/* The proxy's life: opening with everything that can be refused, reloading, draining, closing from
 * any half-built state; and what it counts. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <microhttpd.h>

#include "serve/proxy_priv.h"

int serve_proxy_reload(struct serve_proxy *p, struct baton_error *e)
{
    struct serve_proxy_config *c = base_try_alloc(1, sizeof *c, e);
    if (!c)
        return BATON_ERR_NOMEM;
    int rc = serve_proxy_config_load(c, &p->options, e);
    if (rc == 0)
        rc = serve_members_set(p, c, e);
    free(c);
    return rc;
}

static int start_checks(struct serve_proxy *p, struct baton_error *e)
{
    sigset_t all, before;
    serve_members_check(p);
    sigfillset(&all); /* signals belong to the caller's threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int err = pthread_create(&p->health, NULL, serve_members_thread, p);
    int rc = err ? base_fail_errno(e, BATON_ERR_NOMEM, err, "the proxy's thread")
                 : serve_proxy_http_open(p, e);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    p->health_on = !err;
    return rc;
}

int serve_proxy_open(const struct serve_proxy_options *o, struct serve_proxy **out,
                     struct baton_error *e)
{
    struct serve_proxy *p = base_try_alloc(1, sizeof *p, e);
    if (!p)
        return BATON_ERR_NOMEM;
    p->options = *o;
    p->listen_fd = -1;
    pthread_mutex_init(&p->lock, NULL);
    int rc = serve_proxy_reload(p, e);
    if (rc == 0)
        rc = serve_curl_open(&p->curl, e);
    if (rc == 0)
        rc = start_checks(p, e);
    if (rc) {
        serve_proxy_close(p);
        return rc;
    }
    *out = p;
    return 0;
}

uint16_t serve_proxy_port(const struct serve_proxy *p)
{
    return p->port;
}

void serve_proxy_drain(struct serve_proxy *p, bool (*hurry)(void *ctx), void *ctx)
{
    enum { LOOK_NS = 20000000, CUT_LOOKS = 50 };
    atomic_store(&p->draining, true);
    if (p->listen_fd < 0)
        p->listen_fd = MHD_quiesce_daemon(p->daemon);
    if (p->listen_fd >= 0) /* who comes now is refused, and does not wait in the backlog */
        shutdown(p->listen_fd, SHUT_RDWR);
    while (atomic_load(&p->open) && !hurry(ctx))
        base_sleep_ns(LOOK_NS);
    if (!atomic_load(&p->open))
        return;
    atomic_store(&p->stopping, true);
    for (int i = 0; i < CUT_LOOKS && atomic_load(&p->open); i++)
        base_sleep_ns(LOOK_NS);
}

void serve_proxy_close(struct serve_proxy *p)
{
    if (!p)
        return;
    atomic_store(&p->draining, true);
    atomic_store(&p->stopping, true); /* every thread that waits for a member looks at it */
    if (p->daemon)
        MHD_stop_daemon(p->daemon);
    if (p->health_on)
        pthread_join(p->health, NULL);
    if (p->listen_fd >= 0)
        close(p->listen_fd);
    serve_members_free(p);
    pthread_mutex_destroy(&p->lock);
    free(p);
}

/* ---- counts --------------------------------------------------------------------------------- */

void serve_proxy_add(struct serve_proxy *p, uint64_t *counter)
{
    pthread_mutex_lock(&p->lock);
    ++*counter;
    pthread_mutex_unlock(&p->lock);
}

void serve_proxy_count(struct serve_proxy *p, struct serve_proxy_counts *out)
{
    pthread_mutex_lock(&p->lock);
    *out = p->counts;
    pthread_mutex_unlock(&p->lock);
}

bool serve_proxy_healthy(struct serve_proxy *p)
{
    bool any = false;
    pthread_mutex_lock(&p->lock);
    for (struct serve_member *m = p->members; m; m = m->next)
        any |= m->listed && m->up && m->side == SERVE_SIDE_DECODE;
    pthread_mutex_unlock(&p->lock);
    return any;
}

static int line(struct serve_text *out, const char *name, const char *key, const char *word,
                uint64_t n)
{
    return serve_text_printf(out, "%s{%s=\"%s\"} %llu\n", name, key, word, (unsigned long long)n);
}

static int member_lines(struct serve_text *out, const struct serve_member *m)
{
    const struct {
        const char *name;
        uint64_t n;
    } all[] = {{"up", m->up},
               {"active", m->active},
               {"requests_total", m->requests},
               {"failures_total", m->failures}};
    int rc = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        rc |= serve_text_printf(out, "baton:proxy_member_%s{role=\"%s\",url=\"%s\"} %llu\n",
                                all[i].name, serve_member_kind(m), m->url,
                                (unsigned long long)all[i].n);
    return rc;
}

int serve_proxy_metrics_text(struct serve_proxy *p, struct serve_text *out)
{
    static const char requests[] = "baton:proxy_requests_total";
    static const char prompts[] = "baton:proxy_prompts_total";
    pthread_mutex_lock(&p->lock);
    const struct serve_proxy_counts c = p->counts;
    int rc = serve_text_printf(out, "# TYPE %s counter\n", requests);
    rc |= line(out, requests, "result", "finished", c.finished);
    rc |= line(out, requests, "result", "refused", c.refused);
    rc |= line(out, requests, "result", "failed", c.failed);
    rc |= line(out, requests, "result", "cancelled", c.cancelled);
    rc |= serve_text_printf(out, "# TYPE %s counter\n", prompts);
    rc |= line(out, prompts, "prefill", "remote", c.remote);
    rc |= line(out, prompts, "prefill", "local", c.local);
    rc |= line(out, prompts, "prefill", "fallback", c.fallback);
    rc |= serve_text_printf(out,
                            "# TYPE baton:proxy_retries_total counter\n"
                            "baton:proxy_retries_total %llu\n"
                            "# TYPE baton:proxy_requests_open gauge\n"
                            "baton:proxy_requests_open %u\n"
                            "# TYPE baton:proxy_member_up gauge\n"
                            "# TYPE baton:proxy_member_active gauge\n"
                            "# TYPE baton:proxy_member_requests_total counter\n"
                            "# TYPE baton:proxy_member_failures_total counter\n",
                            (unsigned long long)c.retries, atomic_load(&p->open));
    for (struct serve_member *m = p->members; m; m = m->next)
        rc |= member_lines(out, m);
    pthread_mutex_unlock(&p->lock);
    return rc ? BATON_ERR_NOMEM : 0;
}
