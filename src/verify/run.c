/* SPDX-License-Identifier: Apache-2.0 */
/* Runs: engines on a route, one request through them, everything that came out of it. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/base.h"
#include "verify/verify_priv.h"

/* ---- what a run gave ---------------------------------------------------------------------- */

void verify_run_free(struct verify_run *r)
{
    free(r->ids);
    free(r->argmax);
    free(r->margins);
    free(r->rows);
    free(r->time_ns);
    verify_cache_free(r->cache);
    verify_cache_free(r->sent);
    memset(r, 0, sizeof *r);
}

static int run_init(struct verify_run *r, uint32_t n, uint32_t vocab, struct baton_error *e)
{
    memset(r, 0, sizeof *r);
    r->cap = n;
    r->ids = base_try_alloc(n, sizeof *r->ids, e);
    r->argmax = base_try_alloc(n, sizeof *r->argmax, e);
    r->margins = base_try_alloc(n, sizeof *r->margins, e);
    r->rows = base_try_alloc(n, vocab * sizeof *r->rows, e);
    r->time_ns = base_try_alloc(n, sizeof *r->time_ns, e);
    return r->ids && r->argmax && r->margins && r->rows && r->time_ns ? 0 : BATON_ERR_NOMEM;
}

static int run_take(struct verify_run *r, const struct baton_token *t, uint32_t vocab,
                    struct baton_error *e)
{
    if (r->n == r->cap || !t->logits)
        return base_fail(e, BATON_ERR_INTERNAL, "token %u without logits, or one too many",
                         t->index);
    r->ids[r->n] = t->id;
    r->argmax[r->n] = t->argmax;
    r->margins[r->n] = t->margin;
    r->time_ns[r->n] = t->time_ns;
    memcpy(r->rows + (size_t)r->n * vocab, t->logits, vocab * sizeof *r->rows);
    r->n++;
    return 0;
}

double verify_rel_rms(const float *a, const float *b, size_t n)
{
    double error = 0, all = 0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)b[i] - (double)a[i];
        error += d * d;
        all += (double)a[i] * (double)a[i];
    }
    double rel = error == 0 ? 0 : sqrt(error / all);
    return isfinite(rel) ? rel : INFINITY;
}

int32_t verify_first_mismatch(const struct verify_run *a, const struct verify_run *b)
{
    uint32_t n = a->n < b->n ? a->n : b->n;
    for (uint32_t i = 0; i < n; i++)
        if (a->ids[i] != b->ids[i])
            return (int32_t)i;
    return a->n == b->n ? -1 : (int32_t)n;
}

bool verify_runs_equal(const struct verify_run *a, const struct verify_run *b, uint32_t vocab)
{
    return verify_first_mismatch(a, b) < 0 &&
           !memcmp(a->margins, b->margins, a->n * sizeof *a->margins) &&
           !memcmp(a->rows, b->rows, (size_t)a->n * vocab * sizeof *a->rows);
}

double verify_worst_row(const struct verify_run *have, const struct verify_run *want,
                        uint32_t vocab)
{
    uint32_t n = have->n < want->n ? have->n : want->n;
    double worst = 0;
    for (uint32_t i = 0; i < n; i++) {
        double rel = verify_rel_rms(want->rows + (size_t)i * vocab, have->rows + (size_t)i * vocab,
                                    vocab);
        worst = rel > worst ? rel : worst;
        if (have->ids[i] != want->ids[i])
            break;
    }
    return worst;
}

/* ---- routes ------------------------------------------------------------------------------- */

/* In an engine's thread; the caller looks after the request ended, which orders the two. */
static int see(void *ctx, const struct engine_look *look, struct baton_error *e)
{
    struct verify_cache **to = ctx;
    verify_cache_free(*to);
    *to = NULL;
    return verify_cache_read(look, to, e);
}

int verify_route_native(struct verify_route *r, const struct verify_options *o, const char *device,
                        uint32_t ctx, struct baton_error *e)
{
    const struct baton_engine_options eo = {
        .struct_size = sizeof eo, .device = device, .ctx = ctx, .threads = o->threads};
    memset(r, 0, sizeof *r);
    r->vocab = baton_model_vocab(o->model);
    int rc = baton_engine_open(o->model, &eo, &r->consumer, e);
    if (rc == 0)
        engine_observe(r->consumer, see, &r->seen);
    return rc;
}

/* The two ends of a way between engines: of a link, or of a socket. */
struct way {
    struct baton_link *link[2];
    int fd[2];
};

static int open_way(struct way *w, bool socket, struct baton_error *e)
{
    *w = (struct way){.fd = {-1, -1}};
    if (!socket)
        return baton_link_pair(&w->link[0], &w->link[1], e);
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, w->fd))
        return base_fail_errno(e, BATON_ERR_IO, errno, "a pair of sockets");
    return 0;
}

static int open_end(const struct verify_options *o, enum baton_role role, struct way *w,
                    uint32_t ctx, struct baton_engine **out, struct baton_error *e)
{
    int i = role == BATON_CONSUMER;
    const struct baton_engine_options eo = {
        .struct_size = sizeof eo,
        .role = role,
        .device = role == BATON_PRODUCER ? o->prefill : o->decode,
        .ctx = ctx,
        .threads = o->threads,
        .peer_fd = w->fd[i],
        .link = w->link[i],
    };
    int rc = baton_engine_open(o->model, &eo, out, e);
    w->link[i] = NULL; /* taken over whatever it returned */
    if (rc == 0)
        w->fd[i] = -1;
    return rc;
}

static void close_way(struct way *w)
{
    for (int i = 0; i < 2; i++) {
        baton_link_close(w->link[i]);
        if (w->fd[i] >= 0)
            close(w->fd[i]);
    }
}

int verify_route_pair(struct verify_route *r, const struct verify_options *o, bool socket,
                      uint32_t ctx, struct baton_error *e)
{
    struct way w;
    memset(r, 0, sizeof *r);
    r->vocab = baton_model_vocab(o->model);
    int rc = open_way(&w, socket, e);
    if (rc == 0)
        rc = open_end(o, BATON_PRODUCER, &w, ctx, &r->producer, e);
    if (rc == 0)
        rc = open_end(o, BATON_CONSUMER, &w, ctx, &r->consumer, e);
    close_way(&w);
    if (rc) {
        verify_route_close(r);
        return rc;
    }
    engine_observe(r->producer, see, &r->sent);
    engine_observe(r->consumer, see, &r->seen);
    return 0;
}

void verify_left_add(struct verify_left *left, struct baton_engine *en)
{
    struct engine_load load;
    struct baton_ticket_stats tickets = {.struct_size = sizeof tickets};
    if (!left || !en)
        return;
    engine_load(en, &load);
    left->lanes += load.lanes_used;
    left->blocks += load.blocks_used;
    if (baton_ticket_stats(en, &tickets) == 0)
        left->tickets += (uint64_t)tickets.open + tickets.claimed;
}

void verify_route_close(struct verify_route *r)
{
    verify_left_add(r->left, r->producer);
    verify_left_add(r->left, r->consumer);
    baton_engine_close(r->producer);
    baton_engine_close(r->consumer);
    verify_cache_free(r->seen);
    verify_cache_free(r->sent);
    memset(r, 0, sizeof *r);
}

/* ---- one request -------------------------------------------------------------------------- */

static int pull(struct baton_request *request, struct verify_run *r, uint32_t vocab,
                struct baton_error *e)
{
    struct baton_token t;
    int rc;
    while ((rc = baton_next(request, &t, -1, e)) == 1)
        if ((rc = run_take(r, &t, vocab, e)))
            return rc;
    return rc;
}

/* Of two ends that failed, the one that knows the cause: the other only lost its peer. */
static bool knows_less(const struct baton_error *e)
{
    return e->code == BATON_ERR_PEER || e->code == BATON_ERR_CANCELLED;
}

static int finish(struct baton_request *consumer, struct baton_request *producer,
                  struct verify_route *r, struct verify_run *out, struct baton_error *e)
{
    struct baton_error theirs = {0};
    struct baton_token t;
    int rc = pull(consumer, out, r->vocab, e);
    if (rc && producer && !r->seen) /* else it was acknowledged, and has yet to show its own */
        baton_cancel(producer);
    int their_rc = producer ? baton_next(producer, &t, -1, &theirs) : 0;
    if (their_rc < 0 && (rc == 0 || (knows_less(e) && !knows_less(&theirs)))) {
        *e = theirs;
        rc = their_rc;
    }
    out->stats.struct_size = sizeof out->stats;
    baton_request_stats(consumer, &out->stats);
    return rc;
}

static int submit(struct verify_route *r, const struct verify_ask *a, struct baton_request **of,
                  struct baton_error *e)
{
    struct baton_request_options o = {
        .struct_size = sizeof o,
        .ids = a->ids,
        .n_ids = a->n_ids,
        .request_id = r->next_id++,
        .max_tokens = a->n,
        .ignore_eos = true,
        .want_logits = true,
        .force = a->force,
        .n_force = a->force ? a->n : 0,
    };
    int rc = baton_submit(r->consumer, &o, &of[0], e);
    if (rc || !r->producer)
        return rc;
    o.mode = a->mode;
    o.want_logits = false;
    return baton_submit(r->producer, &o, &of[1], e);
}

int verify_route_run(struct verify_route *r, const struct verify_ask *a, struct verify_run *out,
                     struct baton_error *e)
{
    struct baton_request *request[2] = {NULL, NULL};
    int rc = run_init(out, a->n, r->vocab, e);
    if (rc == 0)
        rc = submit(r, a, request, e);
    if (rc == 0)
        rc = finish(request[0], request[1], r, out, e);
    baton_request_close(request[1]);
    baton_request_close(request[0]);
    out->cache = r->seen;
    out->sent = r->sent;
    r->seen = r->sent = NULL;
    if (rc == 0 && (!out->cache || (r->producer && !out->sent)))
        rc = base_fail(e, BATON_ERR_INTERNAL, "a cache was not shown");
    return rc;
}
