/* SPDX-License-Identifier: Apache-2.0 */
/* Inside transport: what every kind of end starts with, and helpers on iovec lists. */
#ifndef TRANSPORT_TRANSPORT_PRIV_H
#define TRANSPORT_TRANSPORT_PRIV_H

#include <poll.h>
#include <sys/uio.h>

#include "base/base.h"
#include "transport/transport.h"

struct transport_ops {
    void (*close)(struct transport *t);
    int (*send)(struct transport *t, const struct iovec *iov, int n_iov, size_t *moved,
                struct baton_error *e);
    int (*recv)(struct transport *t, void *buf, size_t n, size_t *moved, struct baton_error *e);
    int (*poll)(struct transport *t, bool want_write, struct pollfd *fds);
    /* Of ends that pass descriptors; NULL elsewhere. */
    bool (*allow_fds)(struct transport *t, bool receive);
    int (*send_fd)(struct transport *t, const struct iovec *iov, int n_iov, int fd, size_t *moved,
                   struct baton_error *e);
    int (*take_fd)(struct transport *t);
};

/* First member of every kind. */
struct transport {
    const struct transport_ops *ops;
};

static inline int transport_ended(struct baton_error *e)
{
    return base_fail(e, BATON_ERR_PEER, "the peer closed the connection");
}

#endif
