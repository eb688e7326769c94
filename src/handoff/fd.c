/* SPDX-License-Identifier: Apache-2.0 */
/* Connections over descriptors, links and addresses: what engine opens, which may not include
 * transport. */
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include "base/base.h"
#include "handoff/handoff.h"
#include "transport/transport.h"

/* A transport closes its descriptor, also when the connection does not come about; a duplicate is
 * handed over, so that a failure leaves the caller's own open. */
int handoff_conn_open_fd(int fd, const struct handoff_options *o,
                         const struct handoff_callbacks *cb, struct handoff_conn **out,
                         struct baton_error *e)
{
    struct transport *t;
    int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy < 0)
        return base_fail_errno(e, BATON_ERR_IO, errno, "peer socket %d", fd);
    int rc = transport_fd_open(copy, &t, e);
    if (rc) {
        close(copy);
        return rc;
    }
    rc = handoff_conn_open(t, o, cb, out, e);
    if (rc) {
        transport_close(t);
        return rc;
    }
    close(fd);
    return 0;
}

int handoff_link_pair(struct transport **a, struct transport **b, struct baton_error *e)
{
    enum { CAPACITY = 4 << 20 }; /* a few pieces each way: the writer seldom waits for the reader */
    return transport_inproc_pair(CAPACITY, a, b, e);
}

void handoff_link_close(struct transport *t)
{
    transport_close(t);
}

int handoff_listener_fd(const struct transport_listener *l)
{
    return transport_listener_fd(l);
}

const char *handoff_listener_address(const struct transport_listener *l)
{
    return transport_listener_address(l);
}

void handoff_listener_close(struct transport_listener *l)
{
    transport_listener_close(l);
}

int handoff_accept(struct transport_listener *l, const struct handoff_options *o,
                   const struct handoff_callbacks *cb, struct handoff_conn **out,
                   struct baton_error *e)
{
    struct transport *t;
    int rc = transport_accept(l, &t, e);
    if (rc)
        return rc;
    rc = handoff_conn_open(t, o, cb, out, e);
    if (rc)
        transport_close(t);
    return rc;
}

int handoff_dial(const char *address, uint64_t timeout_ns, struct transport **out,
                 struct baton_error *e)
{
    return transport_connect(address, timeout_ns, out, e);
}
