/* SPDX-License-Identifier: Apache-2.0 */
/* transport_inproc_pair without descriptors, for ends that nobody waits for: no system call, which
 * is most of the time of a search that opens a hundred thousand pairs. */
#ifndef TESTS_HANDOFF_PIPE_H
#define TESTS_HANDOFF_PIPE_H

#include "tests/test.h"
#include "transport/transport_priv.h"

#define PIPE 300u /* bytes each way: frames are cut */

struct pipe_end {
    struct transport base;
    struct pipe_pair *pair;
    int side; /* writes bytes[side], reads bytes[1 - side] */
};

struct pipe_pair {
    struct pipe_end end[2];
    uint8_t bytes[2][PIPE];
    size_t n[2];
    bool closed[2];
};

static inline int pipe_send(struct transport *t, const struct iovec *iov, int n_iov, size_t *moved,
                            struct baton_error *e)
{
    struct pipe_end *end = (struct pipe_end *)t;
    size_t *n = &end->pair->n[end->side];
    if (end->pair->closed[1 - end->side])
        return transport_ended(e);
    for (int i = 0; i < n_iov; i++) {
        size_t k = iov[i].iov_len < PIPE - *n ? iov[i].iov_len : PIPE - *n;
        memcpy(end->pair->bytes[end->side] + *n, iov[i].iov_base, k);
        *n += k;
        *moved += k;
    }
    return 0;
}

static inline int pipe_recv(struct transport *t, void *buf, size_t n, size_t *moved,
                            struct baton_error *e)
{
    struct pipe_end *end = (struct pipe_end *)t;
    int from = 1 - end->side;
    uint8_t *bytes = end->pair->bytes[from];
    *moved = n < end->pair->n[from] ? n : end->pair->n[from];
    if (*moved == 0 && end->pair->closed[from])
        return transport_ended(e);
    memcpy(buf, bytes, *moved);
    end->pair->n[from] -= *moved;
    memmove(bytes, bytes + *moved, end->pair->n[from]);
    return 0;
}

static inline int pipe_poll(struct transport *t, bool want_write, struct pollfd *fds)
{
    return 0;
}

/* The second end to close frees the pair. */
static inline void pipe_close(struct transport *t)
{
    struct pipe_end *end = (struct pipe_end *)t;
    end->pair->closed[end->side] = true;
    if (end->pair->closed[1 - end->side])
        free(end->pair);
}

static inline void pipe_open(struct transport **a, struct transport **b)
{
    static const struct transport_ops ops = {
        .close = pipe_close, .send = pipe_send, .recv = pipe_recv, .poll = pipe_poll};
    struct pipe_pair *p = calloc(1, sizeof *p);
    assert_non_null(p);
    for (int i = 0; i < 2; i++)
        p->end[i] = (struct pipe_end){{&ops}, p, i};
    *a = &p->end[0].base;
    *b = &p->end[1].base;
}

#endif
