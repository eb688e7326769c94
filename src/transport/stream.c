/* SPDX-License-Identifier: Apache-2.0 */
/* A connected stream socket, Unix or TCP, never blocking. */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/transport_priv.h"

#define MAX_IOV 160            /* pieces a system call; more are sent by the next one */
#define DRAIN_BYTES (1u << 20) /* read and dropped at the close of a TCP socket */

struct stream {
    struct transport base;
    int fd;
    bool tcp, unix_domain;
    bool fds;        /* descriptors are taken */
    int came_fd;     /* -1 = none */
    bool send_ended; /* what has arrived stays readable */
    bool recv_ended;
};

/* 0: nothing moves now. Else the error that it is. */
static int failed(int err, bool *ended, const char *what, struct baton_error *e)
{
    if (err == EAGAIN || err == EWOULDBLOCK || err == EINTR)
        return 0;
    *ended = true;
    if (err == EPIPE || err == ECONNRESET)
        return transport_ended(e);
    return base_fail_errno(e, BATON_ERR_PEER, err, "the connection broke while %s", what);
}

static int send_message(struct stream *s, struct msghdr *m, size_t *moved, struct baton_error *e)
{
    if (s->send_ended)
        return transport_ended(e);
    ssize_t n = sendmsg(s->fd, m, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0)
        return failed(errno, &s->send_ended, "sending", e);
    *moved = (size_t)n;
    return 0;
}

static int stream_send(struct transport *t, const struct iovec *iov, int n_iov, size_t *moved,
                       struct baton_error *e)
{
    struct msghdr m = {.msg_iov = (struct iovec *)iov,
                       .msg_iovlen = (size_t)(n_iov < MAX_IOV ? n_iov : MAX_IOV)};
    return send_message((struct stream *)t, &m, moved, e);
}

/* ---- descriptors -------------------------------------------------------------------------- */

/* Room for one descriptor; the kernel may find room for a second in the padding. */
union fd_message {
    struct cmsghdr align;
    uint8_t bytes[CMSG_SPACE(sizeof(int))];
};

static bool stream_allow_fds(struct transport *t, bool receive)
{
    struct stream *s = (struct stream *)t;
    s->fds = s->fds || (receive && s->unix_domain);
    return s->unix_domain;
}

static int stream_send_fd(struct transport *t, const struct iovec *iov, int n_iov, int fd,
                          size_t *moved, struct baton_error *e)
{
    union fd_message control = {.bytes = {0}};
    struct msghdr m = {.msg_iov = (struct iovec *)iov,
                       .msg_iovlen = (size_t)(n_iov < MAX_IOV ? n_iov : MAX_IOV),
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    return send_message((struct stream *)t, &m, moved, e);
}

/* Keep the first, close all others: a stranger's descriptors may not pile up here. */
static bool keep_fds(struct stream *s, struct msghdr *m)
{
    bool fits = true;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (s->came_fd < 0) {
                s->came_fd = fd;
            } else {
                close(fd);
                fits = false;
            }
        }
    }
    return fits && !(m->msg_flags & MSG_CTRUNC);
}

static ssize_t recv_with_fds(struct stream *s, void *buf, size_t n, bool *fits)
{
    union fd_message control;
    struct iovec iov = {buf, n};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    ssize_t got = recvmsg(s->fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    *fits = got < 0 || keep_fds(s, &m);
    return got;
}

static int stream_take_fd(struct transport *t)
{
    struct stream *s = (struct stream *)t;
    int fd = s->came_fd;
    s->came_fd = -1;
    return fd;
}

/* ---- the rest ----------------------------------------------------------------------------- */

static int stream_recv(struct transport *t, void *buf, size_t n, size_t *moved,
                       struct baton_error *e)
{
    struct stream *s = (struct stream *)t;
    if (s->recv_ended)
        return transport_ended(e);
    bool fits = true;
    /* Without a place for them the kernel drops descriptors itself. */
    ssize_t got = s->fds ? recv_with_fds(s, buf, n, &fits) : recv(s->fd, buf, n, MSG_DONTWAIT);
    if (!fits) {
        s->recv_ended = true;
        return base_fail(e, BATON_ERR_INTEGRITY,
                         "the peer sent more descriptors than one at a time");
    }
    if (got < 0)
        return failed(errno, &s->recv_ended, "receiving", e);
    *moved = (size_t)got;
    s->recv_ended = got == 0;
    return s->recv_ended ? transport_ended(e) : 0;
}

static int stream_poll(struct transport *t, bool want_write, struct pollfd *fds)
{
    struct stream *s = (struct stream *)t;
    fds[0] = (struct pollfd){.fd = s->fd, .events = (short)(POLLIN | (want_write ? POLLOUT : 0))};
    return 1;
}

/* TCP answers a close with unread input by a reset, which can overtake our own last bytes. */
static void drain(int fd)
{
    uint8_t buf[4096];
    for (size_t left = DRAIN_BYTES; left >= sizeof buf; left -= sizeof buf)
        if (recv(fd, buf, sizeof buf, MSG_DONTWAIT) <= 0)
            return;
}

static void stream_close(struct transport *t)
{
    struct stream *s = (struct stream *)t;
    if (s->tcp)
        drain(s->fd);
    if (s->came_fd >= 0)
        close(s->came_fd);
    close(s->fd);
    free(s);
}

static const struct transport_ops stream_ops = {
    .close = stream_close,
    .send = stream_send,
    .recv = stream_recv,
    .poll = stream_poll,
    .allow_fds = stream_allow_fds,
    .send_fd = stream_send_fd,
    .take_fd = stream_take_fd,
};

int transport_fd_open(int fd, struct transport **out, struct baton_error *e)
{
    int type = 0, domain = 0, on = 1;
    socklen_t n = sizeof type;
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &n) != 0 || type != SOCK_STREAM)
        return base_fail(e, BATON_ERR_USAGE, "descriptor %d is no stream socket", fd);
    n = sizeof domain;
    getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &n);
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0 ||
        fcntl(fd, F_SETFD, FD_CLOEXEC) != 0)
        return base_fail_errno(e, BATON_ERR_IO, errno, "cannot set up descriptor %d", fd);
    struct stream *s = base_try_alloc(1, sizeof *s, e);
    if (!s)
        return BATON_ERR_NOMEM;
    s->tcp = domain == AF_INET || domain == AF_INET6;
    s->unix_domain = domain == AF_UNIX;
    s->came_fd = -1;
    /* Control frames are small and each waits for an answer: Nagle would delay every one. */
    if (s->tcp)
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    s->base.ops = &stream_ops;
    s->fd = fd;
    *out = &s->base;
    return 0;
}

int transport_socketpair(int fds[2], struct baton_error *e)
{
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) != 0)
        return base_fail_errno(e, BATON_ERR_IO, errno, "cannot make a pair of sockets");
    return 0;
}
