/* SPDX-License-Identifier: Apache-2.0 */
/* Dispatch to the kinds. */
#include "transport/transport_priv.h"

void transport_close(struct transport *t)
{
    if (t)
        t->ops->close(t);
}

int transport_send(struct transport *t, const struct iovec *iov, int n_iov, size_t *moved,
                   struct baton_error *e)
{
    *moved = 0;
    return t->ops->send(t, iov, n_iov, moved, e);
}

int transport_recv(struct transport *t, void *buf, size_t n, size_t *moved, struct baton_error *e)
{
    *moved = 0;
    return n ? t->ops->recv(t, buf, n, moved, e) : 0;
}

int transport_poll(struct transport *t, bool want_write, struct pollfd *fds)
{
    return t->ops->poll(t, want_write, fds);
}

bool transport_passes_fds(struct transport *t, bool receive)
{
    return t->ops->allow_fds && t->ops->allow_fds(t, receive);
}

int transport_send_fd(struct transport *t, const struct iovec *iov, int n_iov, int fd,
                      size_t *moved, struct baton_error *e)
{
    *moved = 0;
    if (!transport_passes_fds(t, false))
        return base_fail(e, BATON_ERR_USAGE, "this connection passes no descriptors");
    return t->ops->send_fd(t, iov, n_iov, fd, moved, e);
}

int transport_take_fd(struct transport *t)
{
    return t->ops->take_fd ? t->ops->take_fd(t) : -1;
}
