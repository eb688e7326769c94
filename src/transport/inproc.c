/* SPDX-License-Identifier: Apache-2.0 */
/* Two ends in one process: a ring of bytes each way, under one lock.
 *
 * Each ring has two eventfds that say its state to poll(): `data` is readable while there is
 * something to read, `room` while there is room to write; both while an end is closed. They are
 * set and cleared under the lock, at the transitions only, so that no wakeup is lost and a
 * transfer costs no system call while the ring is neither empty nor full.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "transport/transport_priv.h"

struct signal {
    int fd;
    bool set;
};

struct ring {
    uint8_t *bytes; /* [capacity] */
    size_t begin, used;
    struct signal data, room;
};

struct inproc {
    struct transport base;
    struct inproc_pair *pair;
    int side; /* writes ring[side], reads ring[1 - side] */
};

struct inproc_pair {
    pthread_mutex_t lock;
    size_t capacity;
    struct ring ring[2];
    struct inproc end[2];
    bool closed[2];
};

static void signal_put(struct signal *s, bool on)
{
    uint64_t x = 1;
    if (s->set == on)
        return;
    /* Neither can block or fail: the counter is 0 before the write and 1 before the read. */
    ssize_t n = on ? write(s->fd, &x, sizeof x) : read(s->fd, &x, sizeof x);
    s->set = n == sizeof x ? on : s->set;
}

static void ring_signal(struct inproc_pair *p, struct ring *r)
{
    bool ended = p->closed[0] || p->closed[1];
    signal_put(&r->data, r->used > 0 || ended);
    signal_put(&r->room, r->used < p->capacity || ended);
}

static size_t ring_put(struct inproc_pair *p, struct ring *r, const uint8_t *from, size_t n)
{
    size_t left = p->capacity - r->used, at = (r->begin + r->used) % p->capacity;
    n = n < left ? n : left;
    size_t head = n < p->capacity - at ? n : p->capacity - at;
    if (n > 0) {
        memcpy(r->bytes + at, from, head);
        memcpy(r->bytes, from + head, n - head);
    }
    r->used += n;
    return n;
}

static size_t ring_get(struct inproc_pair *p, struct ring *r, uint8_t *to, size_t n)
{
    n = n < r->used ? n : r->used;
    size_t head = n < p->capacity - r->begin ? n : p->capacity - r->begin;
    memcpy(to, r->bytes + r->begin, head);
    memcpy(to + head, r->bytes, n - head);
    r->begin = (r->begin + n) % p->capacity;
    r->used -= n;
    return n;
}

static int inproc_send(struct transport *t, const struct iovec *iov, int n_iov, size_t *moved,
                       struct baton_error *e)
{
    struct inproc *end = (struct inproc *)t;
    struct inproc_pair *p = end->pair;
    struct ring *r = &p->ring[end->side];
    pthread_mutex_lock(&p->lock);
    bool ended = p->closed[1 - end->side];
    for (int i = 0; i < n_iov && !ended; i++)
        *moved += ring_put(p, r, iov[i].iov_base, iov[i].iov_len);
    ring_signal(p, r);
    pthread_mutex_unlock(&p->lock);
    return ended ? transport_ended(e) : 0;
}

static int inproc_recv(struct transport *t, void *buf, size_t n, size_t *moved,
                       struct baton_error *e)
{
    struct inproc *end = (struct inproc *)t;
    struct inproc_pair *p = end->pair;
    struct ring *r = &p->ring[1 - end->side];
    pthread_mutex_lock(&p->lock);
    bool ended = r->used == 0 && p->closed[1 - end->side];
    *moved = ring_get(p, r, buf, n);
    ring_signal(p, r);
    pthread_mutex_unlock(&p->lock);
    return ended ? transport_ended(e) : 0;
}

static int inproc_poll(struct transport *t, bool want_write, struct pollfd *fds)
{
    struct inproc *end = (struct inproc *)t;
    struct inproc_pair *p = end->pair;
    fds[0] = (struct pollfd){.fd = p->ring[1 - end->side].data.fd, .events = POLLIN};
    if (want_write)
        fds[1] = (struct pollfd){.fd = p->ring[end->side].room.fd, .events = POLLIN};
    return want_write ? 2 : 1;
}

static void pair_free(struct inproc_pair *p)
{
    for (int i = 0; i < 2; i++) {
        if (p->ring[i].data.fd >= 0)
            close(p->ring[i].data.fd);
        if (p->ring[i].room.fd >= 0)
            close(p->ring[i].room.fd);
        free(p->ring[i].bytes);
    }
    pthread_mutex_destroy(&p->lock);
    free(p);
}

/* The second end to close frees the pair. */
static void inproc_close(struct transport *t)
{
    struct inproc *end = (struct inproc *)t;
    struct inproc_pair *p = end->pair;
    pthread_mutex_lock(&p->lock);
    p->closed[end->side] = true;
    bool last = p->closed[1 - end->side];
    ring_signal(p, &p->ring[0]);
    ring_signal(p, &p->ring[1]);
    pthread_mutex_unlock(&p->lock);
    if (last)
        pair_free(p);
}

static const struct transport_ops inproc_ops = {
    .close = inproc_close,
    .send = inproc_send,
    .recv = inproc_recv,
    .poll = inproc_poll,
};

static int ring_init(struct inproc_pair *p, struct ring *r, struct baton_error *e)
{
    r->bytes = base_try_alloc(p->capacity, 1, e);
    if (!r->bytes)
        return BATON_ERR_NOMEM;
    r->data.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    r->room.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (r->data.fd < 0 || r->room.fd < 0)
        return base_fail_errno(e, BATON_ERR_IO, errno, "cannot make an eventfd");
    ring_signal(p, r);
    return 0;
}

int transport_inproc_pair(size_t capacity, struct transport **a, struct transport **b,
                          struct baton_error *e)
{
    if (capacity == 0)
        return base_fail(e, BATON_ERR_USAGE, "an in-process pair without capacity");
    struct inproc_pair *p = base_try_alloc(1, sizeof *p, e);
    if (!p)
        return BATON_ERR_NOMEM;
    pthread_mutex_init(&p->lock, NULL);
    p->capacity = capacity;
    int rc = 0;
    for (int i = 0; i < 2; i++) {
        p->ring[i].data.fd = p->ring[i].room.fd = -1;
        p->end[i] = (struct inproc){{&inproc_ops}, p, i};
    }
    for (int i = 0; i < 2 && rc == 0; i++)
        rc = ring_init(p, &p->ring[i], e);
    if (rc) {
        pair_free(p);
        return rc;
    }
    *a = &p->end[0].base;
    *b = &p->end[1].base;
    return 0;
}
