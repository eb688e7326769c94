/* SPDX-License-Identifier: Apache-2.0 */
/* Request handles: where tokens pass from the engine thread to the caller that pulls them. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "engine/engine_priv.h"

/* ---- wake --------------------------------------------------------------------------------- */

int engine_wake_open(struct engine_wake **out, struct baton_error *e)
{
    struct engine_wake *w = base_try_alloc(1, sizeof *w, e);
    if (!w)
        return BATON_ERR_NOMEM;
    w->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (w->fd < 0) {
        int err = errno;
        free(w);
        return base_fail_errno(e, BATON_ERR_IO, err, "eventfd");
    }
    atomic_init(&w->refs, 1);
    *out = w;
    return 0;
}

void engine_wake_put(struct engine_wake *w)
{
    if (w && atomic_fetch_sub(&w->refs, 1) == 1) {
        close(w->fd);
        free(w);
    }
}

/* Runs in signal handlers: nothing but write(2), errno as it was. A full counter means that the
 * engine thread has yet to wake, so a failed write loses nothing. */
void engine_wake_ring(struct engine_wake *w)
{
    int err = errno;
    uint64_t one = 1;
    ssize_t n = write(w->fd, &one, sizeof one);
    (void)n;
    errno = err;
}

/* ---- life --------------------------------------------------------------------------------- */

static int copy_ids(const int32_t *ids, size_t n, int32_t **out, struct baton_error *e)
{
    if (n == 0)
        return 0;
    *out = base_try_alloc(n, sizeof **out, e);
    if (!*out)
        return BATON_ERR_NOMEM;
    memcpy(*out, ids, n * sizeof **out);
    return 0;
}

/* Counts were checked to fit 32 bits. */
static int copy_ask(struct engine_ask *a, const struct baton_request_options *o,
                    struct baton_error *e)
{
    a->id = o->request_id;
    a->n_ids = (uint32_t)o->n_ids;
    a->n_force = (uint32_t)o->n_force;
    a->max_tokens = o->n_force ? a->n_force : o->max_tokens;
    a->min_tokens = o->min_tokens;
    a->mode = o->mode;
    a->ignore_eos = o->ignore_eos;
    a->want_logits = o->want_logits;
    a->local_prefill = o->local_prefill;
    a->hold = o->hold;
    a->asks = o->ask;
    a->pull = o->ticket || o->ask;
    a->sampling = model_sampling_default();
    a->sampling.temperature = o->temperature;
    a->sampling.top_k = o->top_k;
    a->sampling.top_p = o->top_p == 0 ? 1 : o->top_p;
    a->sampling.min_p = o->min_p;
    a->sampling.seed = o->seed;
    if (o->repetition_penalty != 0)
        a->sampling.repetition_penalty = o->repetition_penalty;
    a->sampling.presence_penalty = o->presence_penalty;
    a->sampling.frequency_penalty = o->frequency_penalty;
    a->choice = o->choice;
    a->notify = o->notify;
    a->notify_ctx = o->notify_ctx;
    a->accepted_ns = base_now_ns();
    int rc = copy_ids(o->ids, o->n_ids, &a->ids, e);
    if (rc == 0)
        rc = copy_ids(o->force, o->n_force, &a->force, e);
    if (rc == 0 && o->kv_save && !(a->kv_save = base_try_strdup(o->kv_save, e)))
        rc = BATON_ERR_NOMEM;
    if (rc == 0 && o->ticket)
        rc = handoff_ticket_parse(o->ticket, a->ticket, e);
    if (rc == 0 && o->from && !(a->from = base_try_strdup(o->from, e)))
        rc = BATON_ERR_NOMEM;
    return rc;
}

static void cond_init(pthread_cond_t *c)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(c, &attr);
    pthread_condattr_destroy(&attr);
}

int engine_request_open(struct engine_wake *wake, const struct baton_request_options *o,
                        struct baton_request **out, struct baton_error *e)
{
    struct baton_request *r = base_try_alloc(1, sizeof *r, e);
    if (!r)
        return BATON_ERR_NOMEM;
    atomic_init(&r->refs, 1);
    atomic_init(&r->cancel, false);
    pthread_mutex_init(&r->lock, NULL);
    cond_init(&r->cond);
    r->wake = wake;
    atomic_fetch_add(&wake->refs, 1);
    int rc = copy_ask(&r->ask, o, e);
    if (rc) {
        engine_request_put(r);
        return rc;
    }
    *out = r;
    return 0;
}

void engine_request_put(struct baton_request *r)
{
    if (!r || atomic_fetch_sub(&r->refs, 1) != 1)
        return;
    for (uint32_t i = r->taken; i < r->n; i++)
        free(r->tokens[i].logits);
    free(r->tokens);
    free(r->current);
    free(r->ask.ids);
    free(r->ask.force);
    free(r->ask.kv_save);
    free(r->ask.from);
    kv_file_close(r->ask.kv_load);
    pthread_cond_destroy(&r->cond);
    pthread_mutex_destroy(&r->lock);
    engine_wake_put(r->wake);
    free(r);
}

/* ---- the engine thread's side ------------------------------------------------------------- */

/* With the lock held: there is something for the caller. */
static void tell(struct baton_request *r)
{
    pthread_cond_broadcast(&r->cond);
    if (r->ask.notify)
        r->ask.notify(r->ask.notify_ctx);
}

static int grow(struct baton_request *r, struct baton_error *e)
{
    if (r->n < r->cap)
        return 0;
    uint32_t cap = r->cap ? 2 * r->cap : 64;
    struct engine_token *t = base_try_realloc(r->tokens, cap, sizeof *t, e);
    if (!t)
        return BATON_ERR_NOMEM;
    r->tokens = t;
    r->cap = cap;
    return 0;
}

int engine_request_push(struct baton_request *r, const struct engine_token *t, const float *row,
                        uint32_t vocab, const struct baton_stats *stats, struct baton_error *e)
{
    float *copy = NULL;
    if (vocab) {
        copy = base_try_alloc(vocab, sizeof *copy, e);
        if (!copy)
            return BATON_ERR_NOMEM;
        memcpy(copy, row, vocab * sizeof *copy);
    }
    pthread_mutex_lock(&r->lock);
    int rc = grow(r, e);
    if (rc == 0) {
        r->tokens[r->n] = *t;
        r->tokens[r->n++].logits = copy;
        r->n_rows += copy != NULL;
        r->stats = *stats;
        tell(r);
    }
    pthread_mutex_unlock(&r->lock);
    if (rc)
        free(copy);
    return rc;
}

void engine_request_publish(struct baton_request *r, const struct baton_stats *stats)
{
    pthread_mutex_lock(&r->lock);
    r->stats = *stats;
    pthread_mutex_unlock(&r->lock);
}

void engine_request_finish(struct baton_request *r, const struct baton_stats *stats,
                           const struct baton_error *why)
{
    pthread_mutex_lock(&r->lock);
    r->stats = *stats;
    r->error = *why;
    r->over = true;
    tell(r);
    pthread_mutex_unlock(&r->lock);
}

void engine_request_hold(struct baton_request *r, const struct baton_ticket *t)
{
    pthread_mutex_lock(&r->lock);
    r->ticket = *t;
    r->held = true;
    tell(r);
    pthread_mutex_unlock(&r->lock);
}

bool engine_request_stalled(struct baton_request *r)
{
    if (!r->ask.want_logits)
        return false;
    pthread_mutex_lock(&r->lock);
    bool stalled = r->n_rows >= ENGINE_MAX_ROWS;
    pthread_mutex_unlock(&r->lock);
    return stalled;
}

/* ---- the caller's side -------------------------------------------------------------------- */

static struct timespec deadline(int64_t timeout_ns)
{
    uint64_t at = base_now_ns() + (uint64_t)timeout_ns;
    return (struct timespec){(time_t)(at / 1000000000u), (long)(at % 1000000000u)};
}

static bool has_token(const struct baton_request *r)
{
    return r->taken < r->n;
}

static bool has_ticket(const struct baton_request *r)
{
    return r->held;
}

/* With the lock held: until it has what is waited for, or nothing follows. */
static int wait_until(struct baton_request *r, bool (*has)(const struct baton_request *),
                      const char *what, int64_t timeout_ns, struct baton_error *e)
{
    struct timespec until = {0};
    if (timeout_ns >= 0)
        until = deadline(timeout_ns);
    while (!has(r) && !r->over) {
        int rc = timeout_ns < 0 ? pthread_cond_wait(&r->cond, &r->lock)
                                : pthread_cond_timedwait(&r->cond, &r->lock, &until);
        if (rc == ETIMEDOUT && !has(r) && !r->over)
            return base_fail(e, BATON_ERR_TIMEOUT, "no %s of request %llu within %lld ns", what,
                             (unsigned long long)r->ask.id, (long long)timeout_ns);
    }
    return 0;
}

static void take_token(struct baton_request *r, struct baton_token *out)
{
    struct engine_token *t = &r->tokens[r->taken];
    *out = (struct baton_token){
        .id = t->id,
        .argmax = t->argmax,
        .index = r->taken++,
        .margin = t->margin,
        .logits = t->logits,
        .time_ns = t->time_ns,
    };
    r->current = t->logits;
    t->logits = NULL;
    /* The lane paused at this many rows; it may go on. */
    if (r->current && r->n_rows-- == ENGINE_MAX_ROWS)
        engine_wake_ring(r->wake);
}

int engine_request_next(struct baton_request *r, struct baton_token *out, int64_t timeout_ns,
                        struct baton_error *e)
{
    pthread_mutex_lock(&r->lock);
    int rc = wait_until(r, has_token, "token", timeout_ns, e);
    if (rc == 0) {
        free(r->current);
        r->current = NULL;
        if (r->taken < r->n) {
            take_token(r, out);
            rc = 1;
        } else if (r->error.code) {
            rc = r->error.code;
            if (e)
                *e = r->error;
        }
    }
    pthread_mutex_unlock(&r->lock);
    return rc;
}

int engine_request_ticket(struct baton_request *r, struct baton_ticket *out, int64_t timeout_ns,
                          struct baton_error *e)
{
    size_t size = out->struct_size;
    if (size < sizeof size || size > 1u << 16)
        return base_fail(e, BATON_ERR_USAGE, "baton_ticket: struct_size is %zu", size);
    if (!r->ask.hold)
        return base_fail(e, BATON_ERR_USAGE, "request %llu is not held: it has no ticket",
                         (unsigned long long)r->ask.id);
    pthread_mutex_lock(&r->lock);
    int rc = wait_until(r, has_ticket, "ticket", timeout_ns, e);
    struct baton_ticket t = r->ticket;
    bool held = r->held;
    if (rc == 0 && !held) { /* over before */
        rc = r->error.code;
        if (e)
            *e = r->error;
    }
    pthread_mutex_unlock(&r->lock);
    if (rc)
        return rc;
    t.struct_size = size;
    memset(out, 0, size);
    memcpy(out, &t, size < sizeof t ? size : sizeof t);
    return 0;
}

void engine_request_cancel(struct baton_request *r)
{
    atomic_store(&r->cancel, true);
    engine_wake_ring(r->wake);
}

/* Nobody is told any more. */
void engine_request_detach(struct baton_request *r)
{
    if (!r)
        return;
    pthread_mutex_lock(&r->lock);
    r->ask.notify = NULL;
    pthread_mutex_unlock(&r->lock);
    engine_request_put(r);
}

void engine_request_close(struct baton_request *r)
{
    if (!r)
        return;
    engine_request_cancel(r);
    /* Until its pages and lane are back: what follows close may count on them. */
    pthread_mutex_lock(&r->lock);
    while (!r->over)
        pthread_cond_wait(&r->cond, &r->lock);
    pthread_mutex_unlock(&r->lock);
    engine_request_put(r);
}
