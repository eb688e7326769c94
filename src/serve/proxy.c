/* SPDX-License-Identifier: Apache-2.0 */
/* The proxy's life: opening with everything that can be refused, reloading, draining, closing from
 * any half-built state. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
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
    p->started = (int64_t)time(NULL);
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
