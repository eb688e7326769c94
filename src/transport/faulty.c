/* SPDX-License-Identifier: Apache-2.0 */
/* A transport that misbehaves in one chosen way, for tests. */
#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "transport/transport_priv.h"

#define MAX_IOV 16

struct faulty {
    struct transport base;
    struct transport *inner; /* NULL once cut */
    enum transport_fault kind;
    uint64_t at, sent; /* bytes */
    uint64_t random;
    int ready_fd; /* always readable: what poll gets once there is no inner end */
};

/* Uniform in [1, n]: xorshift64*. */
static size_t random_size(struct faulty *f, size_t n)
{
    f->random ^= f->random >> 12;
    f->random ^= f->random << 25;
    f->random ^= f->random >> 27;
    return n ? 1 + (f->random * 0x2545F4914F6CDD1DULL >> 1) % n : 0;
}

/* The first `limit` bytes of a list; returns how many pieces. */
static int iov_head(struct iovec *to, const struct iovec *from, int n, uint64_t limit)
{
    int used = 0;
    for (int i = 0; i < n && used < MAX_IOV && limit > 0; i++) {
        to[used] = from[i];
        if (to[used].iov_len > limit)
            to[used].iov_len = (size_t)limit;
        limit -= to[used++].iov_len;
    }
    return used;
}

static int pass_on(struct faulty *f, const struct iovec *iov, int n_iov, int fd, size_t *moved,
                   struct baton_error *e)
{
    return fd < 0 ? transport_send(f->inner, iov, n_iov, moved, e)
                  : transport_send_fd(f->inner, iov, n_iov, fd, moved, e);
}

/* The byte at which the fault sits, with one bit changed. */
static int send_flipped(struct faulty *f, const struct iovec *iov, int n_iov, int fd, size_t *moved,
                        struct baton_error *e)
{
    int i = 0;
    while (i < n_iov && iov[i].iov_len == 0)
        i++;
    if (i == n_iov)
        return 0;
    uint8_t byte = *(const uint8_t *)iov[i].iov_base ^ (uint8_t)(1u << f->random % 8);
    struct iovec one = {&byte, 1};
    return pass_on(f, &one, 1, fd, moved, e);
}

static bool stalled(const struct faulty *f)
{
    return f->kind == TRANSPORT_FAULT_STALL && f->sent >= f->at;
}

/* Pass on at most `limit` bytes. */
static int send_head(struct faulty *f, const struct iovec *iov, int n_iov, uint64_t limit, int fd,
                     size_t *moved, struct baton_error *e)
{
    struct iovec head[MAX_IOV];
    return pass_on(f, head, iov_head(head, iov, n_iov, limit), fd, moved, e);
}

/* `fd`: -1 = none. */
static int faulty_send_fd(struct transport *t, const struct iovec *iov, int n_iov, int fd,
                          size_t *moved, struct baton_error *e)
{
    struct faulty *f = (struct faulty *)t;
    size_t all = 0;
    int rc = 0;
    for (int i = 0; i < n_iov; i++)
        all += iov[i].iov_len;
    if (f->kind == TRANSPORT_FAULT_CUT && f->sent >= f->at) {
        transport_close(f->inner);
        f->inner = NULL;
    }
    if (!f->inner)
        return transport_ended(e);
    if (f->sent < f->at)
        rc = send_head(f, iov, n_iov, f->at - f->sent, fd, moved, e);
    else if (f->kind == TRANSPORT_FAULT_SHORT)
        rc = send_head(f, iov, n_iov, random_size(f, all), fd, moved, e);
    else if (f->kind == TRANSPORT_FAULT_FLIP && f->sent == f->at)
        rc = send_flipped(f, iov, n_iov, fd, moved, e);
    else if (f->kind == TRANSPORT_FAULT_FLIP)
        rc = pass_on(f, iov, n_iov, fd, moved, e);
    f->sent += *moved;
    return rc;
}

static int faulty_send(struct transport *t, const struct iovec *iov, int n_iov, size_t *moved,
                       struct baton_error *e)
{
    return faulty_send_fd(t, iov, n_iov, -1, moved, e);
}

static bool faulty_allow_fds(struct transport *t, bool receive)
{
    struct faulty *f = (struct faulty *)t;
    return f->inner && transport_passes_fds(f->inner, receive);
}

static int faulty_take_fd(struct transport *t)
{
    struct faulty *f = (struct faulty *)t;
    return f->inner ? transport_take_fd(f->inner) : -1;
}

static int faulty_recv(struct transport *t, void *buf, size_t n, size_t *moved,
                       struct baton_error *e)
{
    struct faulty *f = (struct faulty *)t;
    if (!f->inner)
        return transport_ended(e);
    if (stalled(f))
        return 0;
    if (f->kind == TRANSPORT_FAULT_SHORT)
        n = random_size(f, n);
    return transport_recv(f->inner, buf, n, moved, e);
}

/* Once stalled there is nothing to wait for: a level-triggered descriptor would only make the
 * owner spin. */
static int faulty_poll(struct transport *t, bool want_write, struct pollfd *fds)
{
    struct faulty *f = (struct faulty *)t;
    if (stalled(f))
        return 0;
    if (f->inner)
        return transport_poll(f->inner, want_write, fds);
    fds[0] = (struct pollfd){.fd = f->ready_fd, .events = POLLIN};
    return 1;
}

static void faulty_close(struct transport *t)
{
    struct faulty *f = (struct faulty *)t;
    transport_close(f->inner);
    if (f->ready_fd >= 0)
        close(f->ready_fd);
    free(f);
}

static const struct transport_ops faulty_ops = {
    .close = faulty_close,
    .send = faulty_send,
    .recv = faulty_recv,
    .poll = faulty_poll,
    .allow_fds = faulty_allow_fds,
    .send_fd = faulty_send_fd,
    .take_fd = faulty_take_fd,
};

int transport_faulty_open(struct transport *inner, enum transport_fault kind, uint64_t at_byte,
                          uint64_t seed, struct transport **out, struct baton_error *e)
{
    if (kind < TRANSPORT_FAULT_SHORT || kind > TRANSPORT_FAULT_STALL)
        return base_fail(e, BATON_ERR_USAGE, "transport fault %d", (int)kind);
    int fd = eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fd < 0)
        return base_fail_errno(e, BATON_ERR_IO, errno, "cannot make an eventfd");
    struct faulty *f = base_try_alloc(1, sizeof *f, e);
    if (!f) {
        close(fd);
        return BATON_ERR_NOMEM;
    }
    *f = (struct faulty){{&faulty_ops}, inner, kind, at_byte, 0, seed | 1, fd};
    *out = &f->base;
    return 0;
}
