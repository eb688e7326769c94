/* SPDX-License-Identifier: Apache-2.0 */
/* A stream in memory that passes a descriptor, as a Unix socket does, and an observer of the
 * landing region that goes over it: who filled, drained, credited and got back each slot how often.
 * It reads frames and memory alone, and knows nothing of what the ends believe. */
#ifndef TESTS_HANDOFF_SHUTTLE_H
#define TESTS_HANDOFF_SHUTTLE_H

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "rig.h"
#include "transport/transport_priv.h"
#include "wire.h"

#define SHUTTLE_SLOTS 1u
#define SHUTTLE_SLOT_BYTES 256u /* a leaf: 64 rows of 4 bytes */
#define SHUTTLE_BYTES ((size_t)SHUTTLE_SLOTS * SHUTTLE_SLOT_BYTES)

/* The region between two ends. */
struct lending {
    int fd;        /* on its way to the producer; -1 = not, or taken */
    uint64_t at;   /* bytes of the consumer's that went before it */
    uint8_t *data; /* the observer's mapping; NULL before LANDING */
    uint8_t seen[SHUTTLE_BYTES];
    /* of each slot: contents that the producer put there; LAYERs that the consumer has read whole,
     * CREDITs that it wrote, and those that the producer has read whole */
    unsigned filled[SHUTTLE_SLOTS], drained[SHUTTLE_SLOTS], credited[SHUTTLE_SLOTS],
        returned[SHUTTLE_SLOTS];
    const char *fault; /* the first rule that was broken; NULL = none */
};

/* After anything happened. */
static inline void lending_look(struct lending *l)
{
    for (uint32_t i = 0; i < SHUTTLE_SLOTS && l->data && !l->fault; i++) {
        uint8_t *now = l->data + (size_t)i * SHUTTLE_SLOT_BYTES;
        uint8_t *before = l->seen + (size_t)i * SHUTTLE_SLOT_BYTES;
        if (memcmp(now, before, SHUTTLE_SLOT_BYTES)) {
            if (l->drained[i] < l->filled[i])
                l->fault = "a slot is filled again before it was drained";
            else if (l->returned[i] < l->filled[i])
                l->fault = "a slot is filled again before its credit came";
            l->filled[i]++;
            memcpy(before, now, SHUTTLE_SLOT_BYTES);
        }
        if (l->credited[i] > l->drained[i])
            l->fault = "a slot is credited before it was drained";
    }
}

/* Frames of one direction, as an end wrote or read them. */
struct tap {
    uint64_t bytes;
    size_t at, size;       /* in the frame; size 0: not known yet */
    uint8_t head[48 + 32]; /* header, and the body of the frames that matter */
};

struct shuttle {
    struct transport base;
    struct transport *inner;
    struct lending *lending;
    bool producer;
    struct tap in, out;
};

static inline unsigned *tap_counter(const struct shuttle *s, bool out, unsigned type)
{
    struct lending *l = s->lending;
    if (type == W_LAYER && !s->producer && !out)
        return l->drained;
    if (type == W_CREDIT && !s->producer && out)
        return l->credited;
    return type == W_CREDIT && s->producer && !out ? l->returned : NULL;
}

static inline void tap_frame(struct shuttle *s, struct tap *t, bool out)
{
    unsigned *counter = tap_counter(s, out, t->head[6]);
    uint32_t region, slot;
    uint64_t offset;
    memcpy(&region, t->head + 48 + (t->head[6] == W_LAYER ? 20 : 0), 4);
    memcpy(&slot, t->head + 52, 4);
    memcpy(&offset, t->head + 48 + 24, 8);
    if (t->head[6] == W_LAYER)
        slot = (uint32_t)(offset / SHUTTLE_SLOT_BYTES);
    if (counter && region && slot < SHUTTLE_SLOTS)
        counter[slot]++;
    if (s->producer && out) /* it may fill the next one right away */
        lending_look(s->lending);
}

static inline void tap_bytes(struct shuttle *s, struct tap *t, const uint8_t *p, size_t n, bool out)
{
    uint32_t control, payload;
    t->bytes += n;
    for (size_t i = 0; i < n; i++) {
        if (t->at < sizeof t->head)
            t->head[t->at] = p[i];
        if (++t->at == 48) {
            memcpy(&control, t->head + 8, 4);
            memcpy(&payload, t->head + 12, 4);
            t->size = 48 + (size_t)control + payload + (t->head[7] & 2 ? 16 : 0);
        }
        if (t->at == t->size) {
            tap_frame(s, t, out);
            t->at = t->size = 0;
        }
    }
}

static inline int shuttle_send(struct transport *t, const struct iovec *iov, int n, size_t *moved,
                               struct baton_error *e)
{
    struct shuttle *s = (struct shuttle *)t;
    int rc = transport_send(s->inner, iov, n, moved, e);
    size_t left = *moved;
    for (int i = 0; i < n && left > 0; i++) {
        size_t m = iov[i].iov_len < left ? iov[i].iov_len : left;
        tap_bytes(s, &s->out, iov[i].iov_base, m, true);
        left -= m;
    }
    return rc;
}

static inline int shuttle_recv(struct transport *t, void *buf, size_t n, size_t *moved,
                               struct baton_error *e)
{
    struct shuttle *s = (struct shuttle *)t;
    int rc = transport_recv(s->inner, buf, n, moved, e);
    tap_bytes(s, &s->in, buf, *moved, false);
    return rc;
}

static inline int shuttle_poll(struct transport *t, bool want_write, struct pollfd *fds)
{
    return transport_poll(((struct shuttle *)t)->inner, want_write, fds);
}

static inline void shuttle_close(struct transport *t)
{
    transport_close(((struct shuttle *)t)->inner);
    free(t);
}

static inline bool shuttle_allow_fds(struct transport *t, bool receive)
{
    return true;
}

static inline int shuttle_send_fd(struct transport *t, const struct iovec *iov, int n, int fd,
                                  size_t *moved, struct baton_error *e)
{
    struct shuttle *s = (struct shuttle *)t;
    struct lending *l = s->lending;
    uint64_t at = s->out.bytes;
    int rc = shuttle_send(t, iov, n, moved, e);
    if (rc || *moved == 0)
        return rc;
    assert_null(l->data);
    l->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    l->at = at;
    l->data = mmap(NULL, SHUTTLE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_true(l->fd >= 0 && l->data != MAP_FAILED);
    return 0;
}

static inline int shuttle_take_fd(struct transport *t)
{
    struct shuttle *s = (struct shuttle *)t;
    int fd = s->in.bytes > s->lending->at ? s->lending->fd : -1;
    if (fd >= 0)
        s->lending->fd = -1;
    return fd;
}

/* Around one end of a stream, which it owns. */
static inline struct transport *shuttle_open(struct transport *inner, bool producer,
                                             struct lending *l)
{
    static const struct transport_ops ops = {.close = shuttle_close,
                                             .send = shuttle_send,
                                             .recv = shuttle_recv,
                                             .poll = shuttle_poll,
                                             .allow_fds = shuttle_allow_fds,
                                             .send_fd = shuttle_send_fd,
                                             .take_fd = shuttle_take_fd};
    struct shuttle *s = calloc(1, sizeof *s);
    *s = (struct shuttle){.base.ops = &ops, .inner = inner, .lending = l, .producer = producer};
    return &s->base;
}

static inline void lending_open(struct lending *l)
{
    *l = (struct lending){.fd = -1};
}

static inline void lending_close(struct lending *l)
{
    if (l->data)
        munmap(l->data, SHUTTLE_BYTES);
    if (l->fd >= 0)
        close(l->fd);
}

/* Somebody who still has a mapping writes where nothing is his. */
static inline void lending_scribble(struct lending *l)
{
    memset(l->data, l->data[0] + 1, SHUTTLE_BYTES);
    memcpy(l->seen, l->data, SHUTTLE_BYTES);
}

#endif
