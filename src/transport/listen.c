/* SPDX-License-Identifier: Apache-2.0 */
/* Addresses, listening and connecting. */
#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "transport/transport_priv.h"

#define BACKLOG 64
#define MAX_HOST 255
#define RETRY_NS 5000000ull /* a Unix listener whose queue is full cannot be polled for */

struct transport_listener {
    int fd;
    char address[MAX_HOST + 16];
    char path[sizeof(((struct sockaddr_un *)0)->sun_path)]; /* "" where TCP */
    dev_t dev; /* of the socket file: another one at the same path is not ours to unlink */
    ino_t ino;
};

struct host_port {
    char host[MAX_HOST + 1];
    char port[6];
    bool brackets;
};

static int bad_address(const char *address, const char *why, struct baton_error *e)
{
    return base_fail(e, BATON_ERR_USAGE, "address '%.160s': %s", address, why);
}

static int parse_port(const char *text, const char *address, char port[6], struct baton_error *e)
{
    size_t n = strlen(text);
    if (n == 0 || n > 5 || strspn(text, "0123456789") != n || strtoul(text, NULL, 10) > 65535)
        return bad_address(address, "the port is no number from 0 to 65535", e);
    memcpy(port, text, n + 1);
    return 0;
}

/* HOST:PORT or [HOST]:PORT. */
static int parse_tcp(const char *address, struct host_port *out, struct baton_error *e)
{
    const char *host = address, *end, *port;
    out->brackets = address[0] == '[';
    if (out->brackets) {
        host++;
        end = strchr(address, ']');
        if (!end || end[1] != ':')
            return bad_address(address, "wanted [HOST]:PORT", e);
        port = end + 2;
    } else {
        end = strrchr(address, ':');
        if (!end)
            return bad_address(address, "wanted HOST:PORT or unix:PATH", e);
        if (strchr(address, ':') != end)
            return bad_address(address, "an IPv6 host goes in brackets", e);
        port = end + 1;
    }
    size_t n = (size_t)(end - host);
    if (n == 0 || n > MAX_HOST)
        return bad_address(address, "no host", e);
    memcpy(out->host, host, n);
    out->host[n] = 0;
    return parse_port(port, address, out->port, e);
}

static int resolve(const char *address, const struct host_port *hp, bool passive,
                   struct addrinfo **out, struct baton_error *e)
{
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0)};
    int rc = getaddrinfo(hp->host, hp->port, &hints, out);
    return rc ? bad_address(address, gai_strerror(rc), e) : 0;
}

static int unix_address(const char *address, const char *path, struct sockaddr_un *out,
                        struct baton_error *e)
{
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    size_t n = strlen(path);
    if (n == 0 || n >= sizeof out->sun_path)
        return bad_address(address, "the path is empty or too long for a Unix socket", e);
    memcpy(out->sun_path, path, n + 1);
    return 0;
}

/* The path after "unix:", or NULL. */
static const char *unix_path(const char *address)
{
    return strncmp(address, "unix:", 5) == 0 ? address + 5 : NULL;
}

/* ---- listening ---------------------------------------------------------------------------- */

static int bind_listen(int family, const struct sockaddr *sa, socklen_t n)
{
    int on = 1, fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    if (family != AF_UNIX)
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, sa, n) == 0 && listen(fd, BACKLOG) == 0)
        return fd;
    int err = errno;
    close(fd);
    errno = err;
    return -1;
}

/* A socket file at which nobody listens any more was left by a process that died: remove it. */
static void remove_stale(const struct sockaddr_un *sa)
{
    struct stat st;
    if (lstat(sa->sun_path, &st) != 0 || !S_ISSOCK(st.st_mode))
        return;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return;
    if (connect(fd, (const struct sockaddr *)sa, sizeof *sa) != 0 && errno == ECONNREFUSED)
        unlink(sa->sun_path);
    close(fd);
}

static int listen_unix(struct transport_listener *l, const char *address, const char *path,
                       struct baton_error *e)
{
    struct sockaddr_un sa;
    struct stat st;
    int rc = unix_address(address, path, &sa, e);
    if (rc)
        return rc;
    remove_stale(&sa);
    l->fd = bind_listen(AF_UNIX, (struct sockaddr *)&sa, sizeof sa);
    if (l->fd < 0)
        return base_fail_errno(e, BATON_ERR_IO, errno, "cannot listen at '%s'", address);
    if (stat(path, &st) == 0) {
        l->dev = st.st_dev;
        l->ino = st.st_ino;
    }
    memcpy(l->path, sa.sun_path, sizeof l->path);
    snprintf(l->address, sizeof l->address, "%s", address);
    return 0;
}

static unsigned bound_port(int fd)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } sa = {.v6 = {0}};
    socklen_t n = sizeof sa;
    if (getsockname(fd, &sa.any, &n) != 0)
        return 0;
    return ntohs(sa.any.sa_family == AF_INET6 ? sa.v6.sin6_port : sa.v4.sin_port);
}

static int listen_tcp(struct transport_listener *l, const char *address, struct baton_error *e)
{
    struct host_port hp;
    struct addrinfo *all;
    int rc = parse_tcp(address, &hp, e);
    if (rc || (rc = resolve(address, &hp, true, &all, e)))
        return rc;
    for (struct addrinfo *a = all; a && l->fd < 0; a = a->ai_next)
        l->fd = bind_listen(a->ai_family, a->ai_addr, a->ai_addrlen);
    int err = errno;
    freeaddrinfo(all);
    if (l->fd < 0)
        return base_fail_errno(e, BATON_ERR_IO, err, "cannot listen at '%s'", address);
    snprintf(l->address, sizeof l->address, hp.brackets ? "[%s]:%u" : "%s:%u", hp.host,
             bound_port(l->fd));
    return 0;
}

int transport_listen(const char *address, struct transport_listener **out, struct baton_error *e)
{
    const char *path = unix_path(address);
    struct transport_listener *l = base_try_alloc(1, sizeof *l, e);
    if (!l)
        return BATON_ERR_NOMEM;
    l->fd = -1;
    int rc = path ? listen_unix(l, address, path, e) : listen_tcp(l, address, e);
    if (rc) {
        transport_listener_close(l);
        return rc;
    }
    *out = l;
    return 0;
}

void transport_listener_close(struct transport_listener *l)
{
    struct stat st;
    if (!l)
        return;
    if (l->path[0] && lstat(l->path, &st) == 0 && st.st_dev == l->dev && st.st_ino == l->ino)
        unlink(l->path);
    if (l->fd >= 0)
        close(l->fd);
    free(l);
}

int transport_listener_fd(const struct transport_listener *l)
{
    return l->fd;
}

bool transport_listener_local(const struct transport_listener *l)
{
    struct sockaddr_storage sa = {0};
    socklen_t n = sizeof sa;
    if (getsockname(l->fd, (struct sockaddr *)&sa, &n) != 0)
        return false;
    const struct sockaddr_in *v4 = (const struct sockaddr_in *)&sa;
    const struct sockaddr_in6 *v6 = (const struct sockaddr_in6 *)&sa;
    if (sa.ss_family == AF_INET)
        return ntohl(v4->sin_addr.s_addr) >> 24 == 127;
    if (sa.ss_family == AF_INET6)
        return IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr) ||
               (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr) && v6->sin6_addr.s6_addr[12] == 127);
    return sa.ss_family == AF_UNIX;
}

const char *transport_listener_address(const struct transport_listener *l)
{
    return l->address;
}

static int wrap(int fd, struct transport **out, struct baton_error *e)
{
    int rc = transport_fd_open(fd, out, e);
    if (rc)
        close(fd);
    return rc;
}

int transport_accept(struct transport_listener *l, struct transport **out, struct baton_error *e)
{
    int fd = accept4(l->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0)
        return wrap(fd, out, e);
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ECONNABORTED)
        return base_fail(e, BATON_ERR_BUSY, "nobody waits at '%s'", l->address);
    return base_fail_errno(e, BATON_ERR_IO, errno, "cannot accept at '%s'", l->address);
}

/* ---- connecting --------------------------------------------------------------------------- */

/* Wait until the connection under way is made: 0 or an errno; ETIMEDOUT at the deadline. */
static int wait_connected(int fd, uint64_t deadline)
{
    for (;;) {
        uint64_t now = base_now_ns();
        uint64_t left_ms = now < deadline ? (deadline - now + 999999) / 1000000 : 0;
        struct pollfd p = {.fd = fd, .events = POLLOUT};
        int n = poll(&p, 1, left_ms > 60000 ? 60000 : (int)left_ms);
        if (n > 0) {
            int err = 0;
            socklen_t size = sizeof err;
            return getsockopt(fd, SOL_SOCKET, SO_ERROR, &err, &size) == 0 ? err : errno;
        }
        if (n < 0 && errno != EINTR)
            return errno;
        if (n == 0 && base_now_ns() >= deadline)
            return ETIMEDOUT;
    }
}

/* 0 with *out a connected descriptor, or an errno. */
static int connect_one(int family, const struct sockaddr *sa, socklen_t n, uint64_t deadline,
                       int *out)
{
    int err, fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return errno;
    while ((err = connect(fd, sa, n) == 0 ? 0 : errno) == EAGAIN && base_now_ns() < deadline)
        base_sleep_ns(RETRY_NS);
    if (err == EINPROGRESS || err == EINTR)
        err = wait_connected(fd, deadline);
    if (err == 0)
        *out = fd;
    else
        close(fd);
    return err == EAGAIN ? ETIMEDOUT : err;
}

static int connect_tcp(const char *address, uint64_t deadline, int *fd, int *err,
                       struct baton_error *e)
{
    struct host_port hp;
    struct addrinfo *all;
    int rc = parse_tcp(address, &hp, e);
    if (rc || (rc = resolve(address, &hp, false, &all, e)))
        return rc;
    for (struct addrinfo *a = all; a && *fd < 0; a = a->ai_next)
        *err = connect_one(a->ai_family, a->ai_addr, a->ai_addrlen, deadline, fd);
    freeaddrinfo(all);
    return 0;
}

int transport_connect(const char *address, uint64_t timeout_ns, struct transport **out,
                      struct baton_error *e)
{
    uint64_t now = base_now_ns();
    uint64_t deadline = timeout_ns < UINT64_MAX - now ? now + timeout_ns : UINT64_MAX;
    const char *path = unix_path(address);
    struct sockaddr_un sa;
    int fd = -1, err = 0;
    int rc = path ? unix_address(address, path, &sa, e)
                  : connect_tcp(address, deadline, &fd, &err, e);
    if (rc)
        return rc;
    if (path)
        err = connect_one(AF_UNIX, (struct sockaddr *)&sa, sizeof sa, deadline, &fd);
    if (err == ETIMEDOUT)
        return base_fail(e, BATON_ERR_TIMEOUT, "no answer from '%s'", address);
    if (fd < 0)
        return base_fail_errno(e, BATON_ERR_IO, err, "cannot connect to '%s'", address);
    return wrap(fd, out, e);
}
