/* SPDX-License-Identifier: Apache-2.0 */
/* A connected pair of TCP sockets over loopback, for two processes of one fork. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/base.h"
#include "transport/transport.h"

/* Accept until the connection is ours: anybody on this host may reach a listening port. */
static int accept_from(int listener, const struct sockaddr_in *wanted)
{
    for (;;) {
        struct sockaddr_in peer = {0};
        socklen_t n = sizeof peer;
        int fd = accept4(listener, (struct sockaddr *)&peer, &n, SOCK_CLOEXEC);
        if (fd < 0 && errno == EINTR)
            continue;
        if (fd < 0 || peer.sin_port == wanted->sin_port)
            return fd;
        close(fd);
    }
}

int transport_tcp_pair(int fds[2], struct baton_error *e)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in mine = {0};
    socklen_t n = sizeof at, mine_n = sizeof mine;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int a = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), b = -1;
    if (listener >= 0 && a >= 0 && !bind(listener, (struct sockaddr *)&at, sizeof at) &&
        !listen(listener, 8) && !getsockname(listener, (struct sockaddr *)&at, &n) &&
        !connect(a, (struct sockaddr *)&at, sizeof at) &&
        !getsockname(a, (struct sockaddr *)&mine, &mine_n))
        b = accept_from(listener, &mine);
    int err = errno;
    if (listener >= 0)
        close(listener);
    if (b < 0) {
        if (a >= 0)
            close(a);
        return base_fail_errno(e, BATON_ERR_IO, err, "connecting two TCP sockets over loopback");
    }
    fds[0] = a;
    fds[1] = b;
    return 0;
}
