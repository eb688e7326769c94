/* SPDX-License-Identifier: Apache-2.0 */
/* The pump thread: requests into the engine by turns, tokens out of it into answers.
 *
 * It sleeps in an epoll of the bell, which the engine's thread, new jobs and closing ring, and of
 * clients' sockets, of which it wants to know one thing: that the other end is gone.
 * libmicrohttpd does not look at a connection that is suspended.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "serve/serve_priv.h"

/* ---- one job ------------------------------------------------------------------------------ */

static void cancel_requests(struct serve_job *j)
{
    j->cancelled = true;
    for (uint32_t i = 0; i < j->n_choices; i++)
        if (j->choices[i].request)
            baton_cancel(j->choices[i].request);
}

static void choice_over(struct serve_choice *c)
{
    struct serve *s = c->job->serve;
    baton_request_close(c->request);
    c->request = NULL;
    if (c->begun)
        s->n_begun--;
    c->begun = true;
    c->job->n_open--;
    atomic_fetch_sub(&s->open_choices, 1);
}

/* The job can't be answered: its other choices end too. */
static void job_failed(struct serve_job *j, const struct baton_error *e)
{
    if (!j->problem.status) {
        if (j->ask.transfer.in && !j->first_ns)
            serve_refuse_handoff(&j->problem, e);
        else
            serve_refuse_error(&j->problem, j->ask.kind == SERVE_CHAT ? "messages" : "prompt", e);
        base_log(BASE_LOG_WARN, "request %s failed: %s", j->id, e->text);
    }
    cancel_requests(j);
}

/* The prompt was there: where from? */
static void note_prompt(struct serve_choice *c, uint64_t first_ns)
{
    struct serve_job *j = c->job;
    struct serve_metrics *m = &j->serve->metrics;
    struct baton_stats st = {.struct_size = sizeof st};
    if (c->request)
        baton_request_stats(c->request, &st);
    if (c->nth == 0) {
        serve_metrics_add(m, st.slots ? &m->pulled_tokens : &m->computed_tokens,
                          j->ask.prompts[c->prompt].n_ids - st.cached_tokens);
        serve_metrics_add(m, &m->cached_tokens, st.cached_tokens);
        j->cached_tokens += st.cached_tokens;
    }
    if (c->index == 0) {
        j->first_ns = first_ns;
        j->st = st;
    }
    if (j->ask.transfer.in)
        serve_metrics_pulled(m, &st);
}

static void note_token(struct serve_choice *c, const struct baton_token *t)
{
    struct serve_metrics *m = &c->job->serve->metrics;
    serve_metrics_add(m, &m->generation_tokens, 1);
    if (c->n_out == 0)
        note_prompt(c, t->time_ns);
    if (c->n_out == 0)
        serve_metrics_time(m, &m->ttft, t->time_ns - c->job->arrived_ns);
    else
        serve_metrics_time(m, &m->itl, t->time_ns - c->last_ns);
    c->last_ns = t->time_ns;
}

static void note_end(struct serve_choice *c)
{
    struct serve_metrics *m = &c->job->serve->metrics;
    uint64_t *counter = &m->abort;
    if (c->job->problem.status)
        counter = &m->error;
    else if (c->finish && !c->job->cancelled)
        counter = c->finish[0] == 's' ? &m->stop : &m->length;
    serve_metrics_add(m, counter, 1);
    if (c->request && c->index == 0) {
        c->job->st.struct_size = sizeof c->job->st;
        baton_request_stats(c->request, &c->job->st);
    }
}

/* The token is greedy's, for whoever must show one; the decode server chooses its own. */
static int give_ticket(struct serve_choice *c, const struct baton_ticket *t, struct baton_error *e)
{
    const struct baton_token token = {
        .id = t->argmax, .argmax = t->argmax, .margin = t->margin, .time_ns = base_now_ns()};
    memcpy(c->ticket, t->text, sizeof c->ticket);
    note_token(c, &token);
    int rc = serve_choice_take(c, &token, e);
    if (rc == 0)
        rc = serve_choice_finish(c, "length", e);
    c->finish = "length";
    return rc;
}

/* A prefill server's only token, and the cache left to its ticket. A job that is cancelled is
 * waited for: its pages are on their way back. */
static void pull_ticket(struct serve_choice *c)
{
    struct baton_ticket t = {.struct_size = sizeof t};
    struct baton_token none;
    struct baton_error e;
    bool cancelled = c->job->cancelled;
    int rc = cancelled ? baton_next(c->request, &none, 0, &e) : baton_ticket(c->request, &t, 0, &e);
    if (rc == BATON_ERR_TIMEOUT)
        return;
    if (rc == 0 && !cancelled)
        rc = give_ticket(c, &t, &e);
    if (rc && !cancelled)
        job_failed(c->job, &e);
    note_end(c);
    if (!rc && !cancelled) {
        baton_request_detach(c->request);
        c->request = NULL;
    }
    choice_over(c);
}

/* All tokens that are there. A choice that ended by a stop string is drained until the engine has
 * given its lane back. */
static void pull(struct serve_choice *c)
{
    struct baton_token t;
    struct baton_error e;
    int rc;
    while (c->request && (rc = baton_next(c->request, &t, 0, &e)) != BATON_ERR_TIMEOUT) {
        int bad = 0;
        if (rc == 1 && !c->finish && !c->job->cancelled) {
            note_token(c, &t);
            bad = serve_choice_take(c, &t, &e);
            if (c->finish)
                baton_cancel(c->request);
        } else if (rc == 0 && !c->finish && !c->job->cancelled) {
            struct baton_stats st = {.struct_size = sizeof st};
            baton_request_stats(c->request, &st);
            bad = serve_choice_finish(c, st.finish == BATON_LENGTH ? "length" : "stop", &e);
        } else if (rc < 0) {
            bad = rc;
        }
        if (bad && c->job->ask.transfer.in && !c->job->first_ns && !c->job->cancelled)
            serve_metrics_failed(&c->job->serve->metrics, &e);
        if (bad)
            job_failed(c->job, &e);
        if (rc != 1) {
            note_end(c);
            choice_over(c);
        }
    }
}

/* Give the connection what there is. Drops what a client that left can't read. */
static void deliver(struct serve_job *j, struct serve_text *news, bool over)
{
    pthread_mutex_lock(&j->lock);
    if (news->n && serve_text_put(&j->out, news->data, news->n))
        j->gone = true;
    if (news->n || over || j->gone)
        j->ready = true;
    j->over = over;
    if (j->suspended && (news->n || over || j->gone))
        serve_http_resume(j);
    pthread_mutex_unlock(&j->lock);
}

static bool job_gone(struct serve_job *j)
{
    pthread_mutex_lock(&j->lock);
    bool gone = j->gone;
    pthread_mutex_unlock(&j->lock);
    return gone;
}

static void write_news(struct serve_job *j, struct serve_text *news, bool last)
{
    struct baton_error e;
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && j->ask.stream && i < j->n_choices; i++)
        if (j->choices[i].begun && !j->problem.status)
            rc = serve_answer_chunk(&j->choices[i], news);
    if (rc == 0 && last && j->problem.status && j->ask.stream && j->ready)
        rc = serve_answer_error(&j->problem, news);
    else if (rc == 0 && last && !j->problem.status)
        rc = j->ask.stream ? serve_answer_end(j, news) : serve_answer_whole(j, news);
    if (rc) {
        base_fail(&e, BATON_ERR_NOMEM, "no memory for an answer");
        job_failed(j, &e);
    }
}

static void count_job(struct serve_job *j, bool gone)
{
    struct serve_metrics *m = &j->serve->metrics;
    serve_metrics_time(m, &m->e2e, base_now_ns() - j->arrived_ns);
    serve_metrics_add(m, gone ? &m->cancelled : j->problem.status ? &m->refused : &m->finished, 1);
    serve_record_write(j->serve, j, gone);
    base_log(BASE_LOG_INFO, "%s: %u of %u choices, %llu prompt tokens, %.1f ms%s", j->id,
             j->n_choices - j->n_open, j->n_choices, (unsigned long long)j->prompt_tokens,
             (double)(base_now_ns() - j->arrived_ns) / 1e6, gone ? ", client gone" : "");
}

/* True where nothing more is to be done for it. */
static bool step_job(struct serve_job *j)
{
    struct serve_text news = {0};
    bool gone = job_gone(j);
    if (gone && !j->cancelled)
        cancel_requests(j);
    for (uint32_t i = 0; i < j->n_choices; i++)
        if (!j->ask.transfer.out)
            pull(&j->choices[i]);
        else if (j->choices[i].request)
            pull_ticket(&j->choices[i]);
    bool last = j->n_open == 0;
    if (!gone)
        write_news(j, &news, last);
    deliver(j, &news, last);
    serve_text_free(&news);
    if (last)
        count_job(j, gone);
    return last;
}

/* ---- all jobs ----------------------------------------------------------------------------- */

/* Clients take turns, each in the order in which it asked: a turn is one behind the client's last
 * one that waits, or behind the one that began last, so that who has waited for nothing yet goes
 * before those who have had their turn, and nobody saves turns up. Of equal turns the older one
 * goes first. */
static void enqueue(struct serve *s, struct serve_choice *c)
{
    struct serve_choice **p;
    uint64_t last = s->turn;
    for (const struct serve_choice *q = s->queue; q; q = q->next)
        if (q->job->client == c->job->client)
            last = q->turn;
    c->turn = last + 1;
    for (p = &s->queue; *p && (*p)->turn <= c->turn; p = &(*p)->next)
        ;
    c->next = *p;
    *p = c;
}

static void take_incoming(struct serve *s)
{
    struct serve_job *in, *next, *ordered = NULL;
    pthread_mutex_lock(&s->lock);
    in = s->incoming;
    s->incoming = NULL;
    pthread_mutex_unlock(&s->lock);
    for (; in; in = next) {
        next = in->next;
        in->next = ordered;
        ordered = in;
    }
    for (; ordered; ordered = next) {
        next = ordered->next;
        for (uint32_t i = 0; i < ordered->n_choices; i++)
            enqueue(s, &ordered->choices[i]);
        serve_metrics_add(&s->metrics, &s->metrics.prompt_tokens, ordered->prompt_tokens);
        ordered->next = s->jobs;
        s->jobs = ordered;
    }
}

/* Twice as many as there are lanes: a lane that gets free finds work without us. A choice whose job
 * is over before its turn ends here. */
static void begin_choices(struct serve *s)
{
    struct serve_choice **p = &s->queue;
    while (*p) {
        struct serve_choice *c = *p;
        struct baton_error e;
        bool drop = c->job->cancelled;
        if (!drop && s->n_begun >= 2 * s->lanes) {
            p = &c->next;
            continue;
        }
        *p = c->next;
        c->next = NULL;
        if (!drop) {
            s->turn = c->turn;
            s->n_begun++;
            if (serve_choice_begin(c, &e) == 0)
                continue;
            job_failed(c->job, &e);
        }
        note_end(c);
        choice_over(c);
        serve_ring(s); /* its job may be over */
    }
}

/* A ticket lives as long as its lease, which its producer begins anew when told that the request
 * still waits. Milliseconds until the next time, -1: none. */
static int renew_queued(struct serve *s)
{
    uint64_t now = base_now_ns(), soonest = UINT64_MAX;
    struct baton_error e;
    for (struct serve_choice *c = s->queue; c; c = c->next) {
        struct serve_job *j = c->job;
        if (!j->ask.transfer.in || j->cancelled)
            continue;
        if (now >= j->renew_ns) {
            j->renew_ns = now + s->lease_ns / 6;
            if (baton_ticket_renew(s->engine, j->ask.transfer.from, j->ask.transfer.ticket, &e) ==
                0)
                serve_metrics_add(&s->metrics, &s->metrics.renewed, 1);
        }
        soonest = j->renew_ns < soonest ? j->renew_ns : soonest;
    }
    return soonest == UINT64_MAX ? -1 : (int)((soonest - now) / 1000000u) + 1;
}

static void mark_gone(struct serve *s, uint64_t number)
{
    for (struct serve_job *j = s->jobs; j; j = j->next)
        if (j->number == number) {
            pthread_mutex_lock(&j->lock);
            j->gone = true;
            pthread_mutex_unlock(&j->lock);
        }
}

/* Some jobs get out of the list when they are over: what was queued of them has ended too. */
static void step_jobs(struct serve *s)
{
    struct serve_job **p = &s->jobs;
    while (*p) {
        struct serve_job *j = *p;
        if (step_job(j)) {
            *p = j->next;
            serve_job_put(j);
        } else {
            p = &j->next;
        }
    }
}

static void cancel_all(struct serve *s)
{
    for (struct serve_job *j = s->jobs; j; j = j->next) {
        pthread_mutex_lock(&j->lock);
        j->gone = true;
        pthread_mutex_unlock(&j->lock);
    }
}

/* Nothing can come in after this; false where something did before. */
static bool shut(struct serve *s)
{
    pthread_mutex_lock(&s->lock);
    s->shut = !s->incoming;
    bool shut = s->shut;
    pthread_mutex_unlock(&s->lock);
    return shut;
}

void *serve_pump_thread(void *arg)
{
    enum { EVENTS = 64 };
    struct serve *s = arg;
    struct epoll_event events[EVENTS];
    int timeout_ms = -1;
    for (;;) {
        int n = epoll_wait(s->watch, events, EVENTS, timeout_ms);
        take_incoming(s);
        for (int i = 0; i < n; i++) {
            if (events[i].data.u64 != 0) {
                mark_gone(s, events[i].data.u64);
                continue;
            }
            uint64_t rings;
            ssize_t k = read(s->bell, &rings, sizeof rings);
            (void)k;
        }
        if (atomic_load(&s->stopping))
            cancel_all(s);
        step_jobs(s);
        begin_choices(s);
        serve_page_note(s);
        timeout_ms = renew_queued(s);
        if (atomic_load(&s->stopping) && !s->jobs && shut(s))
            return NULL;
    }
}

void serve_ring(void *serve)
{
    struct serve *s = serve;
    uint64_t one = 1;
    ssize_t n = write(s->bell, &one, sizeof one);
    (void)n; /* a full counter means that the pump has yet to wake */
}

/* Once is enough, and a socket stays gone: an event that came is not told again. */
int serve_watch(struct serve *s, struct serve_job *j, int fd)
{
    struct epoll_event ev = {.events = EPOLLRDHUP | EPOLLONESHOT, .data.u64 = j->number};
    return epoll_ctl(s->watch, EPOLL_CTL_ADD, fd, &ev);
}

void serve_unwatch(struct serve *s, int fd)
{
    epoll_ctl(s->watch, EPOLL_CTL_DEL, fd, NULL);
}
