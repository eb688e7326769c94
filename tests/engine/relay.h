/* SPDX-License-Identifier: Apache-2.0 */
/* A stream between a producer and a consumer with somebody in the middle, who knows frames and
 * flips a bit of a payload, or cuts the stream inside one. TCP: the payload is in the stream. */
#ifndef TESTS_ENGINE_RELAY_H
#define TESTS_ENGINE_RELAY_H

#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/test.h"
#include "transport/transport.h"

enum relay_fault { RELAY_CLEAN, RELAY_FLIP, RELAY_CUT };

struct relay {
    pthread_t thread;
    int producer, consumer;       /* what the engines are given */
    int to_producer, to_consumer; /* this side of both */
    enum relay_fault fault;       /* done to the `at`th LAYER frame, from 1, once */
    unsigned at, seen;
    _Atomic uint64_t request; /* whose it was; read while the thread runs */
    uint64_t seed;
};

/* All of n bytes; false at the end of the stream. */
static inline bool relay_move(int fd, uint8_t *p, size_t n, bool out)
{
    while (n > 0) {
        ssize_t k = out ? send(fd, p, n, MSG_NOSIGNAL) : recv(fd, p, n, 0);
        if (k <= 0)
            return false;
        p += k;
        n -= (size_t)k;
    }
    return true;
}

static inline uint32_t relay_u32(const uint8_t *p)
{
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* One frame of the producer; false at the end of the stream, also where this is the end. */
static inline bool relay_frame(struct relay *r)
{
    enum { HEADER = 48, LAYER = 7, TAGGED = 2, TAG = 16 };
    uint8_t header[HEADER];
    if (!relay_move(r->to_producer, header, HEADER, false))
        return false;
    uint32_t control = relay_u32(header + 8), payload = relay_u32(header + 12);
    size_t n = (size_t)control + payload + (header[7] & TAGGED ? TAG : 0);
    uint8_t *body = malloc(n + 1);
    bool whole = relay_move(r->to_producer, body, n, false), cut = false;
    if (whole && header[6] == LAYER && ++r->seen == r->at) {
        r->request = relay_u32(header + 16) | (uint64_t)relay_u32(header + 20) << 32;
        if (r->fault == RELAY_FLIP)
            body[control + test_random(&r->seed) % payload] ^= (uint8_t)(1u << r->seed % 8);
        cut = r->fault == RELAY_CUT;
    }
    bool on = whole && relay_move(r->to_consumer, header, HEADER, true) &&
              relay_move(r->to_consumer, body, cut ? n / 2 : n, true) && !cut;
    free(body);
    return on;
}

static inline void *relay_thread(void *arg)
{
    struct relay *r = arg;
    uint8_t back[4096];
    bool on = true;
    while (on) {
        struct pollfd fds[2] = {{r->to_producer, POLLIN, 0}, {r->to_consumer, POLLIN, 0}};
        poll(fds, 2, -1);
        if (fds[0].revents)
            on = relay_frame(r);
        if (on && fds[1].revents) {
            ssize_t n = recv(r->to_consumer, back, sizeof back, 0);
            on = n > 0 && relay_move(r->to_producer, back, (size_t)n, true);
        }
    }
    shutdown(r->to_producer, SHUT_RDWR);
    shutdown(r->to_consumer, SHUT_RDWR);
    return NULL;
}

/* The engines take over `producer` and `consumer`. */
static inline void relay_open(struct relay *r, enum relay_fault fault, unsigned at, uint64_t seed)
{
    int a[2], b[2];
    struct baton_error e;
    test_ok(transport_tcp_pair(a, &e), &e);
    test_ok(transport_tcp_pair(b, &e), &e);
    *r = (struct relay){.producer = a[0],
                        .to_producer = a[1],
                        .consumer = b[0],
                        .to_consumer = b[1],
                        .fault = fault,
                        .at = at,
                        .seed = seed};
    assert_int_equal(pthread_create(&r->thread, NULL, relay_thread, r), 0);
}

/* After one of the engines was closed. */
static inline void relay_close(struct relay *r)
{
    pthread_join(r->thread, NULL);
    close(r->to_producer);
    close(r->to_consumer);
}

#endif
