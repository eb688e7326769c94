/* SPDX-License-Identifier: Apache-2.0 */
/* The compute pool.
 *
 * A job is (fn, ctx, n) and two counters: `left`, items nobody has taken, and `todo`, items not
 * finished. A worker that takes an item (left: k -> k-1) owns item n-k and may read fn, ctx and n:
 * they cannot change before todo reaches 0, which needs this item. So no worker has to check in or
 * out, and one that the kernel put to sleep never holds up a job that others finished without it.
 */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "base/base.h"
#include "base/futex_priv.h"

enum { SPIN_NS = 20000, MAX_THREADS = 1024 };

struct base_pool {
    _Alignas(64) _Atomic uint32_t left; /* written by everybody: a cache line of its own each */
    _Alignas(64) _Atomic uint32_t todo; /* futex word of the owner */
    _Alignas(64) _Atomic uint32_t job;  /* futex word of the workers: changes with every job */
    _Atomic uint32_t sleepers;          /* workers that sleep, or are about to */
    _Atomic uint32_t owner_sleeps;
    _Atomic bool stop;
    void (*fn)(void *ctx, unsigned i);
    void *ctx;
    uint32_t n;
    unsigned n_threads; /* the owner included */
    unsigned n_started;
    pthread_t threads[]; /* [n_threads - 1] */
};

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

/* Spin until (*word == value) is `equal`; false after SPIN_NS. The clock is read seldom. */
static bool spin(_Atomic uint32_t *word, uint32_t value, bool equal)
{
    uint64_t end = base_now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < 32; i++) {
            if ((atomic_load_explicit(word, memory_order_acquire) == value) == equal)
                return true;
            relax();
        }
    } while (base_now_ns() < end);
    return false;
}

static void work(struct base_pool *p)
{
    uint32_t left = atomic_load_explicit(&p->left, memory_order_acquire);
    while (left > 0) {
        /* acquire pairs with the owner's release of `left`: fn, ctx, n and the job's data */
        if (!atomic_compare_exchange_weak_explicit(&p->left, &left, left - 1, memory_order_acquire,
                                                   memory_order_acquire))
            continue;
        p->fn(p->ctx, p->n - left);
        /* seq_cst with the owner's flag: either it sees 0, or this sees the flag */
        if (atomic_fetch_sub(&p->todo, 1) == 1 && atomic_load(&p->owner_sleeps))
            base_futex_wake(&p->todo, 1);
        left = atomic_load_explicit(&p->left, memory_order_acquire);
    }
}

static void *worker(void *arg)
{
    struct base_pool *p = arg;
    for (;;) {
        uint32_t seen = atomic_load(&p->job); /* before work(): a later job changes it */
        if (atomic_load(&p->stop))
            return NULL;
        work(p);
        if (spin(&p->job, seen, false))
            continue;
        atomic_fetch_add(&p->sleepers, 1);
        base_futex_wait(&p->job, seen); /* returns at once when the job changed meanwhile */
        atomic_fetch_sub(&p->sleepers, 1);
    }
}

/* A worker that misses `sleepers` here has not entered the futex yet and will see the new job. */
static void announce(struct base_pool *p, uint32_t most)
{
    atomic_fetch_add(&p->job, 1);
    uint32_t sleepers = atomic_load(&p->sleepers);
    if (sleepers > 0)
        base_futex_wake(&p->job, sleepers < most ? sleepers : most);
}

int base_pool_open(struct base_pool **out, unsigned n_threads, struct baton_error *e)
{
    if (n_threads == 0 || n_threads > MAX_THREADS)
        return base_fail(e, BATON_ERR_USAGE, "a pool has 1 to %d threads, not %u", MAX_THREADS,
                         n_threads);
    size_t bytes = sizeof(struct base_pool) + (n_threads - 1) * sizeof(pthread_t);
    struct base_pool *p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!p)
        return base_fail(e, BATON_ERR_NOMEM, "no memory for a pool of %u threads", n_threads);
    *p = (struct base_pool){.n_threads = n_threads};
    sigset_t all, old;
    sigfillset(&all); /* signals are for the threads that wait for them */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int err = 0;
    while (err == 0 && p->n_started < n_threads - 1) {
        err = pthread_create(&p->threads[p->n_started], NULL, worker, p);
        p->n_started += err == 0;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (err) {
        base_pool_close(p);
        return base_fail_errno(e, BATON_ERR_NOMEM, err, "no thread for a pool of %u", n_threads);
    }
    *out = p;
    return 0;
}

void base_pool_close(struct base_pool *p)
{
    if (!p)
        return;
    atomic_store(&p->stop, true);
    announce(p, MAX_THREADS);
    for (unsigned i = 0; i < p->n_started; i++)
        pthread_join(p->threads[i], NULL);
    free(p);
}

unsigned base_pool_threads(const struct base_pool *p)
{
    return p->n_threads;
}

static void wait_done(struct base_pool *p)
{
    if (spin(&p->todo, 0, true))
        return;
    atomic_store(&p->owner_sleeps, 1);
    for (uint32_t todo; (todo = atomic_load(&p->todo)) != 0;)
        base_futex_wait(&p->todo, todo); /* other items change the word: looks again */
    atomic_store(&p->owner_sleeps, 0);
}

void base_pool_run(struct base_pool *p, void (*fn)(void *ctx, unsigned i), void *ctx, unsigned n)
{
    if (p->n_threads == 1 || n < 2) {
        for (unsigned i = 0; i < n; i++)
            fn(ctx, i);
        return;
    }
    p->fn = fn;
    p->ctx = ctx;
    p->n = n;
    atomic_store_explicit(&p->todo, n, memory_order_relaxed);
    atomic_store_explicit(&p->left, n, memory_order_release);
    announce(p, n - 1); /* the owner takes one itself */
    work(p);
    wait_done(p);
}
