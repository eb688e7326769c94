/* SPDX-License-Identifier: Apache-2.0 */
/* One end under test and a peer written by hand, in one thread. */
#ifndef TESTS_HANDOFF_SCENE_H
#define TESTS_HANDOFF_SCENE_H

#include <sys/uio.h>

#include "rig.h"
#include "wire.h"

#define N 5u /* tokens of most requests here */

static uint64_t seed;
static int scene_auth = 0; /* as rig_auth, of the end under test */

struct scene {
    struct end me;
    struct transport *peer;
    struct wire w;
    struct kv_geometry g;
    struct cache cache[RIG_IDS]; /* a consumer's pages, or a producer's */
    uint64_t fresh;              /* noise: the next id */
};

static inline void scene_open_with(struct scene *s, bool producer, size_t capacity)
{
    struct baton_error e;
    struct transport *t;
    memset(s, 0, sizeof *s);
    s->w.capacity = 6u << 20;
    s->w.data = malloc(s->w.capacity);
    test_ok(transport_inproc_pair(capacity, &t, &s->peer, &e), &e);
    rig_auth = scene_auth;
    end_open(&s->me, t, producer, 0);
    geometry_small(&s->g);
    for (int i = 0; i < RIG_IDS; i++) {
        cache_open(&s->cache[i], &s->g, 256, 256);
        s->me.into[i] = &s->cache[i];
    }
}

static inline void scene_open(struct scene *s, bool producer)
{
    scene_open_with(s, producer, 8u << 20);
}

static inline void scene_close(struct scene *s)
{
    end_close(&s->me);
    transport_close(s->peer);
    for (int i = 0; i < RIG_IDS; i++)
        cache_close(&s->cache[i]);
    free(s->w.data);
}

/* Send what was written so far, in random cuts, and let the end work. */
static inline void scene_send(struct scene *s)
{
    for (size_t at = 0; at < s->w.n;) {
        size_t n = s->w.n - at, moved = 0;
        struct baton_error e;
        if (n > 1 && test_range(&seed, 0, 1))
            n = test_range(&seed, 1, (uint32_t)n);
        struct iovec iov = {s->w.data + at, n};
        if (transport_send(s->peer, &iov, 1, &moved, &e))
            break;
        at += moved;
        end_step(&s->me);
    }
    s->w.n = 0;
    for (int i = 0; i < 3; i++)
        end_step(&s->me);
}

/* All bytes that the end under test has sent since the last call. */
static inline size_t scene_read(struct scene *s, uint8_t *buf, size_t capacity)
{
    size_t n = 0, moved = 1;
    while (moved && n < capacity &&
           transport_recv(s->peer, buf + n, capacity - n, &moved, NULL) == 0)
        n += moved;
    return n;
}

/* Change a field of a frame's header and seal it again. */
static inline void patched(uint8_t *h, size_t at, size_t n, uint64_t value)
{
    for (size_t i = 0; i < n; i++)
        h[at + i] = (uint8_t)(value >> 8 * i);
    wire_seal(h);
}

/* Does the end say a frame of this type? */
static inline bool scene_heard(struct scene *s, uint8_t type)
{
    static uint8_t buf[1 << 20];
    size_t n = scene_read(s, buf, sizeof buf);
    for (size_t at = 0; at + 48 <= n;) {
        uint32_t control, payload;
        assert_memory_equal(buf + at, "BATN", 4);
        memcpy(&control, buf + at + 8, 4);
        memcpy(&payload, buf + at + 12, 4);
        if (buf[at + 6] == type)
            return true;
        at += 48 + (size_t)control + payload + (buf[at + 7] & 2 ? 16 : 0);
    }
    return false;
}

static inline void hello(struct scene *s)
{
    wire_hello(&s->w, 1, 1, 1, 1000000000u, 10000000000u);
}

static inline void consumer_open(struct scene *s)
{
    scene_open(s, false);
    for (int i = 0; i < RIG_IDS; i++)
        cache_import(&s->cache[i], N);
    hello(s);
    scene_send(s);
    assert_int_equal(s->me.rc, 0);
}

/* The connection must have died with this code and word, every open request with it. */
static inline void dies(struct scene *s, int code, const char *word)
{
    scene_send(s);
    if (s->me.rc != code || !strstr(s->me.death.text, word))
        fail_msg("got %d '%s', wanted %d '%s'", s->me.rc, s->me.death.text, code, word);
    for (int i = 0; i < RIG_IDS; i++)
        assert_int_equal(s->me.ends[i], s->me.offers[i]);
    assert_true(scene_heard(s, W_BYE));
    scene_close(s);
}

static inline void honest(struct scene *s, uint64_t id)
{
    wire_layer(&s->w, id, 0, 0, 0, 5, 1);
    wire_layer(&s->w, id, 0, 1, 0, 5, 2);
    wire_layer(&s->w, id, 1, 0, 3, 2, 3);
    wire_layer(&s->w, id, 1, 1, 3, 2, 4);
}

static inline void reserved(struct scene *s)
{
    consumer_open(s);
    wire_offer(&s->w, 0, N, false);
    scene_send(s);
    assert_int_equal(s->me.offers[0], 1);
}

#endif
