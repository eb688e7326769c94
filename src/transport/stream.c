/* SPDX-License-Identifier: Apache-2.0 */
/* A connected stream socket, Unix or TCP, never blocking. */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport/transport_priv.h"

#define MAX_IOV 64             /* pieces a system call; more are sent by the next one */
#define DRAIN_BYTES (1u << 20) /* read and dropped at the close of a TCP socket */

struct stream {
    struct transport base;
    int fd;
    bool tcp;
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

static int stream_send(struct transport *t, const struct iovec *iov, int n_iov, size_t *moved,
                       struct baton_error *e)
{
    struct stream *s = (struct stream *)t;
    if (s->send_ended)
        return transport_ended(e);
    struct msghdr m = {.msg_iov = (struct iovec *)iov,
                       .msg_iovlen = (size_t)(n_iov < MAX_IOV ? n_iov : MAX_IOV)};
    ssize_t n = sendmsg(s->fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0)
        return failed(errno, &s->send_ended, "sending", e);
    *moved = (size_t)n;
    return 0;
}

static int stream_recv(struct transport *t, void *buf, size_t n, size_t *moved,
                       struct baton_error *e)
{
    struct stream *s = (struct stream *)t;
    if (s->recv_ended)
        return transport_ended(e);
    ssize_t got = recv(s->fd, buf, n, MSG_DONTWAIT);
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
    close(s->fd);
    free(s);
}

static const struct transport_ops stream_ops = {stream_close, stream_send, stream_recv,
                                                stream_poll};

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
