/* SPDX-License-Identifier: Apache-2.0 */
/* Bounded queue: a ring under a mutex, with an eventfd that says "not empty" to poll(). */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "base/base.h"

struct base_queue {
    pthread_mutex_t lock;
    pthread_cond_t not_full;
    pthread_cond_t not_empty; /* on CLOCK_MONOTONIC */
    size_t message_bytes, capacity;
    size_t head, count; /* oldest message; messages held */
    int fd;             /* readable exactly while count > 0 */
    uint8_t *ring;      /* [capacity, message_bytes] */
};

int base_queue_open(struct base_queue **out, size_t message_bytes, size_t capacity,
                    struct baton_error *e)
{
    if (message_bytes == 0 || capacity == 0)
        return base_fail(e, BATON_ERR_USAGE, "a queue needs messages and room for them");
    struct base_queue *q = base_try_alloc(1, sizeof *q, e);
    if (!q)
        return BATON_ERR_NOMEM;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->not_full, NULL);
    pthread_cond_init(&q->not_empty, &monotonic);
    pthread_condattr_destroy(&monotonic);
    q->message_bytes = message_bytes;
    q->capacity = capacity;
    q->fd = -1;
    int rc = 0;
    q->ring = base_try_alloc(capacity, message_bytes, e);
    if (!q->ring)
        rc = BATON_ERR_NOMEM;
    else if ((q->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) < 0)
        rc = base_fail_errno(e, BATON_ERR_IO, errno, "eventfd");
    if (rc != 0) {
        base_queue_close(q);
        return rc;
    }
    *out = q;
    return 0;
}

void base_queue_close(struct base_queue *q)
{
    if (!q)
        return;
    if (q->fd >= 0)
        close(q->fd);
    pthread_cond_destroy(&q->not_empty);
    pthread_cond_destroy(&q->not_full);
    pthread_mutex_destroy(&q->lock);
    free(q->ring);
    free(q);
}

int base_queue_fd(const struct base_queue *q)
{
    return q->fd;
}

/* Called with the lock held, so that fd and count never disagree for others. An eventfd counter of
 * 0 or 1 can neither block nor overflow. */
static void set_readable(struct base_queue *q, bool readable)
{
    uint64_t one = 1;
    ssize_t done = readable ? write(q->fd, &one, sizeof one) : read(q->fd, &one, sizeof one);
    (void)done;
}

static void put(struct base_queue *q, const void *message)
{
    size_t at = (q->head + q->count) % q->capacity;
    memcpy(q->ring + at * q->message_bytes, message, q->message_bytes);
    if (q->count++ == 0) {
        set_readable(q, true);
        pthread_cond_signal(&q->not_empty);
    }
}

bool base_queue_push(struct base_queue *q, const void *message)
{
    pthread_mutex_lock(&q->lock);
    bool room = q->count < q->capacity;
    if (room)
        put(q, message);
    pthread_mutex_unlock(&q->lock);
    return room;
}

void base_queue_push_wait(struct base_queue *q, const void *message)
{
    pthread_mutex_lock(&q->lock);
    while (q->count == q->capacity)
        pthread_cond_wait(&q->not_full, &q->lock);
    put(q, message);
    pthread_mutex_unlock(&q->lock);
}

/* Lock held. A deadline past the clock's range is no deadline. */
static void wait_not_empty(struct base_queue *q, uint64_t timeout_ns)
{
    uint64_t end;
    bool forever = __builtin_add_overflow(base_now_ns(), timeout_ns, &end) || end > INT64_MAX;
    struct timespec ts = {.tv_sec = (time_t)(end / 1000000000u),
                          .tv_nsec = (long)(end % 1000000000u)};
    int rc = 0;
    while (q->count == 0 && rc != ETIMEDOUT)
        rc = forever ? pthread_cond_wait(&q->not_empty, &q->lock)
                     : pthread_cond_timedwait(&q->not_empty, &q->lock, &ts);
}

bool base_queue_pop(struct base_queue *q, void *message, uint64_t timeout_ns)
{
    pthread_mutex_lock(&q->lock);
    if (q->count == 0 && timeout_ns > 0)
        wait_not_empty(q, timeout_ns);
    bool got = q->count > 0;
    if (got) {
        memcpy(message, q->ring + q->head * q->message_bytes, q->message_bytes);
        q->head = (q->head + 1) % q->capacity;
        if (--q->count == 0)
            set_readable(q, false);
        pthread_cond_signal(&q->not_full);
    }
    pthread_mutex_unlock(&q->lock);
    return got;
}
