/* SPDX-License-Identifier: Apache-2.0 */
/* The members: who there is, whose turn it is, who is well. */
#include <stdlib.h>
#include <string.h>

#include "serve/proxy_priv.h"

enum {
    CHECK_NS = 1000000000,    /* between two rounds of health checks */
    ANSWER_NS = 2000000000,   /* for one answer */
    LOOK_NS = CHECK_NS / 100, /* how often a round looks for answers */
    HEALTH_BYTES = 65536,     /* of one answer */
    SILENT_CHECKS = 3         /* without an answer: nobody waits for it any longer */
};

const char *serve_member_kind(const struct serve_member *m)
{
    return m->side == SERVE_SIDE_PREFILL ? "prefill" : "decode";
}

/* ---- who there is -------------------------------------------------------------------------- */

/* All of these under the lock. */

/* Who has left goes when nobody is about to use it. */
static void sweep(struct serve_proxy *p)
{
    struct serve_member **at = &p->members, *m;
    while ((m = *at)) {
        if (m->listed || m->refs) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        free(m);
    }
}

static struct serve_member *find(struct serve_proxy *p, enum serve_side side, const char *url)
{
    struct serve_member *m = p->members;
    while (m && (m->side != side || strcmp(m->url, url) != 0))
        m = m->next;
    return m;
}

static int add(struct serve_proxy *p, enum serve_side side, const char *url, struct baton_error *e)
{
    struct serve_member *m = base_try_alloc(1, sizeof *m, e);
    if (!m)
        return BATON_ERR_NOMEM;
    m->side = side;
    m->number = ++p->next_member;
    m->listed = true;
    memcpy(m->url, url, strlen(url) + 1);
    struct serve_member **end = &p->members;
    while (*end)
        end = &(*end)->next;
    *end = m;
    return 0;
}

static int add_new(struct serve_proxy *p, const struct serve_proxy_config *c, struct baton_error *e)
{
    int rc = 0;
    pthread_mutex_lock(&p->lock);
    for (size_t i = 0; rc == 0 && i < c->n; i++) {
        struct serve_member *m = find(p, c->members[i].side, c->members[i].url);
        if (m)
            m->listed = true;
        else
            rc = add(p, c->members[i].side, c->members[i].url, e);
    }
    pthread_mutex_unlock(&p->lock);
    return rc;
}

/* Those that are there already keep what is known of them; those that leave serve until the new
 * ones have been asked how they are. */
int serve_members_set(struct serve_proxy *p, const struct serve_proxy_config *c,
                      struct baton_error *e)
{
    int rc = add_new(p, c, e);
    if (rc == 0 && p->health_on)
        serve_members_check(p);
    pthread_mutex_lock(&p->lock);
    for (struct serve_member *m = p->members; rc == 0 && m; m = m->next) {
        m->listed = false;
        for (size_t i = 0; i < c->n; i++)
            m->listed |= m->side == c->members[i].side && !strcmp(m->url, c->members[i].url);
    }
    if (rc == 0) {
        p->policy = c->policy;
        p->min_remote_tokens = c->min_remote_tokens;
    }
    sweep(p);
    pthread_mutex_unlock(&p->lock);
    return rc;
}

void serve_members_free(struct serve_proxy *p)
{
    struct serve_member *m;
    while ((m = p->members)) {
        p->members = m->next;
        free(m);
    }
}

/* ---- whose turn it is ----------------------------------------------------------------------- */

static bool may(const struct serve_member *m, enum serve_side side, const struct serve_tried *t)
{
    bool fresh = m->listed && m->up && m->side == side;
    for (unsigned i = 0; i < t->n; i++)
        fresh &= t->number[i] != m->number;
    return fresh;
}

/* Among equals the one that was not chosen for longest. */
static bool before(const struct serve_proxy *p, const struct serve_member *a,
                   const struct serve_member *b)
{
    if (p->policy == SERVE_LEAST_LOADED && a->active != b->active)
        return a->active < b->active;
    return a->turn < b->turn;
}

struct serve_member *serve_member_get(struct serve_proxy *p, enum serve_side side,
                                      const struct serve_tried *t)
{
    struct serve_member *best = NULL;
    if (t->n == SERVE_MAX_TRIES)
        return NULL;
    pthread_mutex_lock(&p->lock);
    for (struct serve_member *m = p->members; m; m = m->next)
        if (may(m, side, t) && (!best || before(p, m, best)))
            best = m;
    if (best) {
        best->turn = ++p->next_turn;
        best->refs++;
        best->active++;
        best->requests++;
    }
    pthread_mutex_unlock(&p->lock);
    return best;
}

void serve_member_put(struct serve_proxy *p, struct serve_member *m, bool failed)
{
    if (!m)
        return;
    pthread_mutex_lock(&p->lock);
    m->active--;
    m->refs--;
    m->failures += failed;
    sweep(p);
    pthread_mutex_unlock(&p->lock);
}

bool serve_member_silent(struct serve_proxy *p, const struct serve_member *m)
{
    pthread_mutex_lock(&p->lock);
    bool silent = m->silent >= SILENT_CHECKS;
    pthread_mutex_unlock(&p->lock);
    return silent;
}

void serve_member_down(struct serve_proxy *p, struct serve_member *m)
{
    pthread_mutex_lock(&p->lock);
    m->up = false;
    pthread_mutex_unlock(&p->lock);
}

/* ---- who is well ---------------------------------------------------------------------------- */

/* One that is slow once or twice is only busy. */
static void judge(struct serve_proxy *p, struct serve_member *m, const struct serve_fetch *f)
{
    bool silent = !f->over || f->result == CURLE_OPERATION_TIMEDOUT;
    pthread_mutex_lock(&p->lock);
    m->silent = silent ? m->silent + 1 : 0;
    bool up = silent ? m->up && m->silent < SILENT_CHECKS
                     : f->result == CURLE_OK && f->status == 200;
    if (up != m->up)
        base_log(BASE_LOG_INFO, "%s server %s is %s", serve_member_kind(m), m->url,
                 up ? "up" : "down");
    m->up = up;
    pthread_mutex_unlock(&p->lock);
}

/* Until each has answered, or had its time. */
static void listen_to(struct serve_proxy *p, struct serve_fetch *f, size_t n)
{
    uint64_t end = base_now_ns() + ANSWER_NS;
    size_t waiting = n;
    while (waiting && base_now_ns() < end && !atomic_load(&p->stopping)) {
        int nobody = -1;
        waiting = 0;
        for (size_t i = 0; i < n; i++) {
            if (f[i].easy && !f[i].over)
                serve_fetch_step(&f[i], &nobody, 0);
            waiting += f[i].easy && !f[i].over;
        }
        if (waiting)
            base_sleep_ns(LOOK_NS);
    }
}

void serve_members_check(struct serve_proxy *p)
{
    struct serve_member *m[SERVE_MAX_MEMBERS];
    struct serve_fetch asked[SERVE_MAX_MEMBERS] = {0};
    size_t n = 0;
    pthread_mutex_lock(&p->lock);
    for (struct serve_member *x = p->members; x; x = x->next)
        if (x->listed) {
            x->refs++;
            m[n++] = x;
        }
    pthread_mutex_unlock(&p->lock);
    for (size_t i = 0; i < n; i++) {
        const struct serve_fetch_ask a = {.member = m[i], .path = "/health", .most = HEALTH_BYTES};
        serve_fetch_open(&asked[i], &p->curl, &a); /* without memory it is not judged */
    }
    listen_to(p, asked, n);
    for (size_t i = 0; i < n; i++) {
        if (asked[i].easy && !atomic_load(&p->stopping))
            judge(p, m[i], &asked[i]);
        serve_fetch_close(&asked[i]);
    }
    pthread_mutex_lock(&p->lock);
    for (size_t i = 0; i < n; i++)
        m[i]->refs--;
    sweep(p);
    pthread_mutex_unlock(&p->lock);
}

void *serve_members_thread(void *proxy)
{
    struct serve_proxy *p = proxy;
    while (!atomic_load(&p->stopping)) {
        for (int i = 0; i < 20 && !atomic_load(&p->stopping); i++)
            base_sleep_ns(CHECK_NS / 20);
        serve_members_check(p);
    }
    return NULL;
}
