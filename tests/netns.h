/* SPDX-License-Identifier: Apache-2.0 */
/* Two network namespaces joined by a veth pair, and TCP connections between them that can be cut.
 *
 * A socket belongs to the namespace that its thread was in when it made it, so one process can
 * have an end in each: what travels between them goes over the pair and over nothing else.
 * Namespaces have no names: they and the pair go with the last descriptor of them. */
#ifndef TESTS_NETNS_H
#define TESTS_NETNS_H

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/test.h"

struct net {
    int home, side[2]; /* namespaces: where the test began; the ends of the pair */
};

static inline void net_enter(int ns)
{
    if (setns(ns, CLONE_NEWNET))
        fail_msg("cannot enter a network namespace: %s", strerror(errno));
}

/* A command in the namespace of this thread. */
static inline bool net_command(const char *fmt, ...)
{
    char text[200];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return system(text) == 0;
}

static inline int net_here(void)
{
    return open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
}

static inline bool net_join(struct net *x)
{
    bool ok = net_command("ip link set veth1 netns /proc/%d/fd/%d", (int)getpid(), x->side[1]);
    for (int i = 0; i < 2 && ok; i++) {
        net_enter(x->side[i]);
        ok = net_command("ip addr add 192.0.2.%d/24 dev veth%d", i + 1, i) &&
             net_command("ip link set veth%d up", i);
    }
    return ok;
}

static inline void net_close(struct net *x)
{
    if (x->side[1] >= 0) /* else it never left, and may not be allowed to enter */
        net_enter(x->home);
    for (int i = 0; i < 2; i++)
        if (x->side[i] >= 0)
            close(x->side[i]);
    close(x->home);
}

/* false: not on this machine, and why was printed. */
static inline bool net_open(struct net *x)
{
    *x = (struct net){net_here(), {-1, -1}};
    assert_true(x->home >= 0);
    for (int i = 1; i >= 0; i--) {
        if (unshare(CLONE_NEWNET)) {
            print_message("no network namespaces here: %s\n", strerror(errno));
            net_close(x);
            return false;
        }
        x->side[i] = net_here();
        assert_true(x->side[i] >= 0);
    }
    if (!net_command("ip link add name veth0 type veth peer name veth1 >/dev/null 2>&1")) {
        print_message("no veth pairs here (or no `ip`)\n");
        net_close(x);
        return false;
    }
    if (!net_join(x))
        fail_msg("the veth pair cannot be set up");
    net_enter(x->home);
    return true;
}

/* fds[i] is a socket of side i. */
static inline void net_connect(struct net *x, int fds[2])
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = inet_addr("192.0.2.1")};
    socklen_t n = sizeof a;
    net_enter(x->side[0]);
    int l = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(l, (struct sockaddr *)&a, sizeof a), 0);
    assert_int_equal(listen(l, 1), 0);
    assert_int_equal(getsockname(l, (struct sockaddr *)&a, &n), 0);
    net_enter(x->side[1]);
    fds[1] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fds[1], (struct sockaddr *)&a, sizeof a))
        fail_msg("no connection over the veth pair: %s", strerror(errno));
    fds[0] = accept4(l, NULL, NULL, SOCK_CLOEXEC);
    assert_true(fds[0] >= 0);
    close(l);
    net_enter(x->home);
}

/* One end of the pair down, which takes the carrier from the other; or up again. */
static inline void net_link(struct net *x, int side, bool up)
{
    net_enter(x->side[side]);
    if (!net_command("ip link set veth%d %s", side, up ? "up" : "down"))
        fail_msg("veth%d does not go %s", side, up ? "up" : "down");
    net_enter(x->home);
}

#endif
