/* SPDX-License-Identifier: Apache-2.0 */
/* What the protocol costs: handoffs beside the same copies without it, in one run.
 *
 *     bench_handoff [ROUNDS]
 *
 * The cache of qwen3-0.6b after 2048 tokens (28 layers, 8 heads of 128, bf16: 224 MiB), from the
 * pages of one thread into the pages of another. The floor of shm is two memcpy (into a region of
 * four slots of 256 KiB, as handoff has it, out of it) by two threads that tell each other by a
 * byte through a socket; once more with the hash that both ends take, since no protocol with a
 * digest can do without. That of tcp is send and recv of the same bytes over loopback. All are
 * taken in turn, ROUNDS (default 7) times after one that does not count; medians of GB/s, and of
 * the ratio to the floor of the same round.
 */
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#ifdef KV_XXHASH_DISPATCH /* as kv/digest.c has it */
#include <xxh_x86dispatch.h>
#else
#include <xxhash.h>
#endif

#include "base/base.h"
#include "handoff/handoff.h"
#include "transport/transport.h"

enum { LAYERS = 28, HEADS = 8, DIM = 128, TOKENS = 2048, MAX_ROUNDS = 99 };
enum { SLOTS = 4, SLOT_BYTES = 256 << 10, PIECE = 1 << 20 };

struct cache {
    struct kv_pool *pool;
    struct kv_seq *seq;
};

struct bench {
    struct cache from, into;
    size_t bytes;
    int32_t ids[TOKENS];
};

static void check(int rc, const struct baton_error *e)
{
    if (rc) {
        fprintf(stderr, "bench_handoff: %s\n", e->text);
        exit(3);
    }
}

static const struct kv_geometry geometry = {
    .n_layers = LAYERS, .kv_heads = HEADS, .head_dim = DIM, .dtype = BATON_BF16};

/* Every page touched, with other bits in each. */
static void cache_open(struct cache *c)
{
    struct baton_error e;
    check(kv_pool_open(&c->pool, &geometry, TOKENS, 1, TOKENS, &e), &e);
    check(kv_seq_open(c->pool, &c->seq, &e), &e);
    check(kv_seq_reserve_import(c->seq, TOKENS, &e), &e);
    uint8_t *p = kv_pool_memory(c->pool);
    for (size_t i = 0; i < kv_pool_bytes(c->pool); i++)
        p[i] = (uint8_t)(i * 0x9E3779B97F4A7C15u >> 40 & 0x3F);
}

static void cache_close(struct cache *c)
{
    kv_seq_close(c->seq);
    kv_pool_close(c->pool);
}

/* ---- with the protocol -------------------------------------------------------------------- */

struct end {
    struct bench *b;
    struct handoff_conn *conn;
    bool over;
    uint64_t bytes, landed;
};

static void on_offer(void *ctx, const struct handoff_offer *o)
{
    struct end *x = ctx;
    struct baton_error e;
    check(handoff_reserve(x->conn, o->request, kv_seq_views(x->b->into.seq), 0, false, &e), &e);
}

static void on_commit(void *ctx, uint64_t request, const struct handoff_result *r)
{
    struct end *x = ctx;
    (void)request;
    x->bytes = r->bytes;
    x->landed = r->landed_bytes;
}

static void on_end(void *ctx, uint64_t request, const struct baton_error *why)
{
    (void)request;
    check(why->code, why);
    ((struct end *)ctx)->over = true;
}

static void *run_end(void *arg)
{
    struct end *x = arg;
    struct baton_error e;
    while (!x->over) {
        struct pollfd fds[2];
        uint64_t wait;
        int n = handoff_conn_poll(x->conn, fds, &wait);
        poll(fds, (nfds_t)n, (int)(wait / 1000000) + 1);
        check(handoff_conn_step(x->conn, &e), &e);
    }
    return NULL;
}

static void open_end(struct end *x, struct bench *b, int fd, bool producer)
{
    const struct handoff_options o = {.producer = producer};
    const struct handoff_callbacks cb = {
        .on_offer = on_offer, .on_commit = on_commit, .on_end = on_end, .ctx = x};
    struct baton_error e;
    *x = (struct end){.b = b};
    check(handoff_conn_open_fd(fd, &o, &cb, &x->conn, &e), &e);
}

static void queue(struct bench *b, struct end *p, bool digest)
{
    struct baton_error e;
    const struct handoff_commit m = {0};
    const struct handoff_offer o = {
        .geometry = geometry, .ids = b->ids, .n_ids = TOKENS, .digest = digest};
    check(handoff_offer(p->conn, &o, &e), &e);
    for (uint32_t l = 0; l < LAYERS; l++)
        check(handoff_layer(p->conn, 0, l, &kv_seq_views(b->from.seq)[l], 0, TOKENS, &e), &e);
    check(handoff_commit(p->conn, 0, &m, &e), &e);
}

static double handoff(struct bench *b, bool shm, bool digest)
{
    struct baton_error e;
    struct end p, c;
    pthread_t thread;
    int fds[2];
    check(shm ? transport_socketpair(fds, &e) : transport_tcp_pair(fds, &e), &e);
    open_end(&p, b, fds[0], true);
    open_end(&c, b, fds[1], false);
    queue(b, &p, digest);
    uint64_t begin = base_now_ns();
    pthread_create(&thread, NULL, run_end, &p);
    run_end(&c);
    pthread_join(thread, NULL);
    double ns = (double)(base_now_ns() - begin);
    b->bytes = c.bytes;
    if (c.landed != (shm ? c.bytes : 0))
        check(BATON_ERR_INTERNAL, &(struct baton_error){0, "another transport than was meant"});
    handoff_conn_close(p.conn);
    handoff_conn_close(c.conn);
    return (double)b->bytes / ns;
}

/* ---- without ------------------------------------------------------------------------------ */

struct floor {
    uint8_t *from, *into, *region; /* region NULL: through the socket */
    size_t bytes, piece;
    bool hash;
    int fd[2];
};

/* A copy, and where asked for the hash of what was copied, tile by tile in the nearest cache. */
static void floor_copy(const struct floor *f, uint8_t *to, const uint8_t *from)
{
    enum { TILE = 16384 };
    XXH3_state_t *state = f->hash ? XXH3_createState() : NULL;
    if (!state) {
        memcpy(to, from, f->piece);
        return;
    }
    XXH3_128bits_reset(state);
    for (size_t i = 0; i < f->piece; i += TILE) {
        memcpy(to + i, from + i, TILE);
        XXH3_128bits_update(state, to + i, TILE);
    }
    if (XXH3_128bits_digest(state).low64 == 0) /* used, or the compiler may leave it out */
        putchar('0');
    XXH3_freeState(state);
}

static void whole(ssize_t (*move)(int, void *, size_t, int), int fd, uint8_t *p, size_t n)
{
    while (n > 0) {
        ssize_t got = move(fd, p, n, 0);
        if (got <= 0)
            exit(3);
        p += got;
        n -= (size_t)got;
    }
}

static ssize_t send_some(int fd, void *p, size_t n, int flags)
{
    return send(fd, p, n, flags | MSG_NOSIGNAL);
}

static void *floor_producer(void *arg)
{
    struct floor *f = arg;
    uint8_t byte = 0;
    for (size_t at = 0, i = 0; at < f->bytes; at += f->piece, i++) {
        if (f->region && i >= SLOTS)
            whole(recv, f->fd[0], &byte, 1);
        if (f->region)
            floor_copy(f, f->region + i % SLOTS * f->piece, f->from + at);
        whole(send_some, f->fd[0], f->region ? &byte : f->from + at, f->region ? 1 : f->piece);
    }
    return NULL;
}

static double floor_of(struct bench *b, bool shm, bool hash)
{
    struct baton_error e;
    pthread_t thread;
    uint8_t byte = 0;
    struct floor f = {.from = kv_pool_memory(b->from.pool),
                      .into = kv_pool_memory(b->into.pool),
                      .bytes = b->bytes / PIECE * PIECE,
                      .piece = shm ? SLOT_BYTES : PIECE,
                      .hash = hash};
    check(shm ? transport_socketpair(f.fd, &e) : transport_tcp_pair(f.fd, &e), &e);
    f.region = shm ? base_map_alloc((size_t)SLOTS * SLOT_BYTES, true, &e) : NULL;
    uint64_t begin = base_now_ns();
    pthread_create(&thread, NULL, floor_producer, &f);
    for (size_t at = 0, i = 0; at < f.bytes; at += f.piece, i++) {
        whole(recv, f.fd[1], shm ? &byte : f.into + at, shm ? 1 : f.piece);
        if (shm)
            floor_copy(&f, f.into + at, f.region + i % SLOTS * f.piece);
        if (shm)
            whole(send_some, f.fd[1], &byte, 1);
    }
    pthread_join(thread, NULL);
    double ns = (double)(base_now_ns() - begin);
    close(f.fd[0]);
    close(f.fd[1]);
    if (shm)
        base_map_free(f.region, (size_t)SLOTS * SLOT_BYTES);
    return (double)f.bytes / ns;
}

/* ---- in turn ------------------------------------------------------------------------------ */

enum { SHM_FLOOR, SHM_HASHED, SHM, SHM_OFF, TCP_FLOOR, TCP, TCP_OFF, N_WHAT };
static const char *const names[N_WHAT] = {"two memcpy (floor)", "two memcpy, hashed", "shm",
                                          "shm, digest off",    "send, recv (floor)", "tcp",
                                          "tcp, digest off"};

static double measure(struct bench *b, int what)
{
    bool shm = what < TCP_FLOOR;
    if (what == SHM_FLOOR || what == SHM_HASHED || what == TCP_FLOOR)
        return floor_of(b, shm, what == SHM_HASHED);
    return handoff(b, shm, what == SHM || what == TCP);
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(const double *x, int n)
{
    double sorted[MAX_ROUNDS];
    memcpy(sorted, x, (size_t)n * sizeof *x);
    qsort(sorted, (size_t)n, sizeof *sorted, by_size);
    return sorted[n / 2];
}

int main(int argc, char **argv)
{
    static struct bench b;
    static double gbs[N_WHAT][MAX_ROUNDS], ratio[N_WHAT][MAX_ROUNDS];
    int rounds = argc > 1 ? atoi(argv[1]) : 7;
    rounds = rounds < 1 ? 1 : rounds > MAX_ROUNDS ? MAX_ROUNDS : rounds;
    cache_open(&b.from);
    cache_open(&b.into);
    handoff(&b, true, true);
    for (int r = 0; r < rounds; r++)
        for (int w = 0; w < N_WHAT; w++) {
            int floor = w < TCP_FLOOR ? SHM_FLOOR : TCP_FLOOR;
            gbs[w][r] = measure(&b, w);
            ratio[w][r] = gbs[w][r] / gbs[floor][r];
        }
    printf("%-20s %8s %8s   of %zu MiB, medians of %d\n", "", "GB/s", "floor", b.bytes >> 20,
           rounds);
    for (int w = 0; w < N_WHAT; w++)
        printf("%-20s %8.2f %7.0f%%\n", names[w], median(gbs[w], rounds),
               100 * median(ratio[w], rounds));
    cache_close(&b.from);
    cache_close(&b.into);
    return 0;
}
