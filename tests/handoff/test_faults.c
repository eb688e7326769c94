/* SPDX-License-Identifier: Apache-2.0 */
/* Streams that flip, cut, drop, repeat, reorder or stall: nothing wrong is ever delivered, every
 * request ends at both ends, and nobody waits for ever.
 *
 * A man in the middle carries the bytes between two in-process pairs and damages one place. */
#include <sys/uio.h>

#include "rig.h"

static uint64_t seed;

#define N_TOKENS 5u
#define VOCAB 4u
#define SLOTS 4u
#define SLOT_BYTES 256u /* a leaf: 64 rows of 4 bytes */

enum damage { NONE, FLIP, CUT, DROP, REPEAT, SWAP, FLIP_LANDED };

struct middle {
    struct transport *in[2]; /* the middle's ends: in[0] faces the producer */
    enum damage damage;
    int way;          /* 0: on its way from the producer; 1: from the consumer */
    uint64_t at;      /* byte of that way */
    uint64_t n;       /* bytes concerned */
    uint8_t mask;     /* FLIP */
    uint64_t seen[2]; /* bytes carried each way */
    uint8_t last[64];
    struct transport_landing *region; /* as the middle sees it, once it was lent */
};

/* What becomes of one byte: written to out, returns how many. Damage is by bytes, so any cut of
 * frames is met. */
static size_t byte_pass(struct middle *m, int way, uint8_t x, uint8_t out[128])
{
    uint64_t at = m->seen[way]++;
    bool here = way == m->way && at >= m->at && at < m->at + m->n;
    out[0] = x;
    if (!here || m->damage == NONE || m->damage == CUT)
        return 1;
    if (m->damage == FLIP)
        out[0] = x ^ m->mask;
    if (m->damage == DROP)
        return 0;
    m->last[at - m->at] = x;
    if (at + 1 < m->at + m->n) /* the stretch comes together, at its end */
        return m->damage == REPEAT || m->damage == SWAP ? 0 : 1;
    if (m->damage == REPEAT) {
        memcpy(out, m->last, m->n);
        memcpy(out + m->n, m->last, m->n);
        return 2 * m->n;
    }
    for (uint64_t i = 0; m->damage == SWAP && i < m->n; i++)
        out[i] = m->last[m->n - 1 - i];
    return m->damage == SWAP ? m->n : 1;
}

static void close_both(struct middle *m)
{
    transport_landing_close(m->region);
    m->region = NULL;
    for (int i = 0; i < 2; i++) {
        transport_close(m->in[i]);
        m->in[i] = NULL;
    }
}

/* Send with the descriptor that came along, where one did; the middle keeps a mapping. */
static int pass_on(struct middle *m, int way, const struct iovec *iov, size_t *sent)
{
    struct baton_error e;
    int fd = transport_take_fd(m->in[way]);
    if (fd < 0)
        return transport_send(m->in[1 - way], iov, 1, sent, &e);
    int rc = transport_send_fd(m->in[1 - way], iov, 1, fd, sent, &e);
    test_ok(transport_landing_map(fd, SLOTS * SLOT_BYTES, &m->region, &e), &e);
    return rc;
}

/* All pieces of the request are in place when the first LAYER comes by: there is a slot for each
 * and the producer sends while it can. */
static void flip_landed(struct middle *m)
{
    transport_landing_data(m->region)[m->at] ^= m->mask;
    m->damage = NONE;
}

/* Carry what has come; the end of either side ends the other. */
static void middle_step(struct middle *m)
{
    for (int way = 0; way < 2 && m->in[0]; way++) {
        uint8_t buf[1024], out[1024 * 3];
        size_t n = 0, used = 0, sent = 0;
        struct baton_error e;
        int rc = transport_recv(m->in[way], buf, sizeof buf, &n, &e);
        bool cut = false;
        for (size_t i = 0; i < n && !cut; i++) {
            cut = m->damage == CUT && way == m->way && m->seen[way] >= m->at;
            if (!cut)
                used += byte_pass(m, way, buf[i], out + used);
        }
        if (m->damage == FLIP_LANDED && way == 0 && n && m->region)
            flip_landed(m);
        struct iovec iov = {out, used};
        if (used)
            rc |= pass_on(m, way, &iov, &sent);
        if (rc || cut)
            close_both(m);
        else
            assert_int_equal(sent, used);
    }
}

struct scene {
    struct truth truth;
    struct cache from, into;
    struct end p, c;
    struct middle m;
    bool digest, landing;
};

static const int32_t ids[N_TOKENS] = {5, 4, 3, 2, 1};
static const float logits[VOCAB] = {1, 2, 3, 4};

static void caches_open(struct scene *s)
{
    struct kv_geometry g;
    geometry_small(&g);
    truth_open(&s->truth, &g, N_TOKENS, &seed);
    cache_open(&s->from, &g, N_TOKENS, N_TOKENS);
    cache_prefill(&s->from, &s->truth);
    cache_open(&s->into, &g, N_TOKENS, 1);
    cache_import(&s->into, N_TOKENS);
}

static void caches_close(struct scene *s)
{
    truth_close(&s->truth);
    cache_close(&s->from);
    cache_close(&s->into);
}

static void queue_request(struct scene *s)
{
    struct baton_error e;
    struct handoff_offer o;
    const struct handoff_commit m = {.argmax = 3, .margin = 1, .logits = logits, .vocab = VOCAB};
    s->c.into[0] = &s->into;
    s->c.want_logits = true;
    offer_fill(&o, 0, &s->truth.g, ids, N_TOKENS, s->digest);
    test_ok(handoff_offer(s->p.conn, &o, &e), &e);
    queue_all(s->p.conn, 0, &s->from, N_TOKENS);
    test_ok(handoff_commit(s->p.conn, 0, &m, &e), &e);
}

static void scene_open(struct scene *s)
{
    struct baton_error e;
    struct transport *p[2], *c[2];
    const struct handoff_options po = {.producer = true};
    const struct handoff_options co = {.landing_slots = SLOTS, .landing_slot_bytes = SLOT_BYTES};
    if (s->landing) {
        unix_pair(p);
        unix_pair(c);
        transport_passes_fds(c[0], true);
    } else {
        test_ok(transport_inproc_pair(1 << 16, &p[0], &p[1], &e), &e);
        test_ok(transport_inproc_pair(1 << 16, &c[0], &c[1], &e), &e);
    }
    s->m.in[0] = p[1];
    s->m.in[1] = c[0];
    end_open_with(&s->p, p[0], &po);
    end_open_with(&s->c, c[1], &co);
    kv_pool_poison(s->into.pool);
    queue_request(s);
}

static void scene_close(struct scene *s)
{
    end_close(&s->p);
    end_close(&s->c);
    close_both(&s->m);
}

/* Until both ends are over, or until nothing moves any more. */
static void scene_run(struct scene *s)
{
    for (int i = 0; i < 60 && !(s->p.ends[0] && s->c.ends[0]); i++) {
        end_step(&s->p);
        middle_step(&s->m);
        end_step(&s->c);
        middle_step(&s->m);
    }
}

/* What must hold whatever happened on the way. `stuck`: the damage may leave an end waiting, which
 * its clock then ends; here it is closed. */
static void scene_check(struct scene *s)
{
    if (s->c.commits[0]) {
        assert_true(cache_equals(&s->into, &s->truth));
        assert_memory_equal(s->c.logits[0], logits, sizeof logits);
        assert_true(s->c.result[0].commit.argmax == 3 && s->c.result[0].commit.margin == 1);
    }
    if (s->p.ends[0] && s->p.why[0].code == 0)
        assert_int_equal(s->c.commits[0], 1);
    if (s->c.ends[0] && s->c.why[0].code == 0)
        assert_int_equal(s->c.commits[0], 1);
    assert_true(s->p.ends[0] <= 1 && s->c.ends[0] <= 1 && s->c.commits[0] <= 1);
}

static void clean_run(struct scene *s, uint64_t bytes[2])
{
    s->m = (struct middle){.damage = NONE};
    scene_open(s);
    scene_run(s);
    assert_int_equal(s->p.ends[0], 1);
    assert_int_equal(s->c.ends[0], 1);
    assert_int_equal(s->p.why[0].code, 0);
    assert_int_equal(s->c.commits[0], 1);
    assert_true(s->c.result[0].landed_bytes == (s->landing ? s->c.result[0].bytes : 0));
    /* let CLOSE go over too */
    for (int i = 0; i < 4; i++) {
        both_step(&s->p, &s->c, 1);
        middle_step(&s->m);
    }
    bytes[0] = s->m.seen[0];
    bytes[1] = s->m.seen[1];
    scene_check(s);
    scene_close(s);
}

/* Every bit of every byte that travels either way. The end that gets the flipped bit must notice,
 * and both ends of the request must be over without anybody's clock. */
static void flips(bool digest, bool landing)
{
    struct scene s = {.digest = digest, .landing = landing};
    uint64_t bytes[2];
    caches_open(&s);
    clean_run(&s, bytes);
    print_message("%d bytes from the producer, %d from the consumer\n", (int)bytes[0],
                  (int)bytes[1]);
    for (int way = 0; way < 2; way++)
        for (uint64_t at = 0; at < bytes[way]; at++)
            for (int bit = 0; bit < 8; bit++) {
                s.m = (struct middle){
                    .damage = FLIP, .way = way, .at = at, .n = 1, .mask = (uint8_t)(1u << bit)};
                scene_open(&s);
                scene_run(&s);
                for (int i = 0; i < 4; i++) {
                    both_step(&s.p, &s.c, 1);
                    middle_step(&s.m);
                }
                scene_check(&s);
                struct end *receiver = way == 0 ? &s.c : &s.p;
                bool noticed = receiver->rc || receiver->why[0].code;
                if (!noticed || s.p.ends[0] != 1 || s.c.ends[0] + !s.c.offers[0] != 1)
                    fail_msg("way %d byte %d bit %d: noticed %d, ends %d %d", way, (int)at, bit,
                             noticed, s.p.ends[0], s.c.ends[0]);
                scene_close(&s);
            }
    caches_close(&s);
}

static void test_flip(void **state)
{
    flips(true, false);
}

static void test_flip_undigested(void **state)
{
    flips(false, false);
}

static void test_flip_landing(void **state)
{
    flips(true, true);
}

/* Every bit of the region, after the producer wrote and before the consumer reads: what carries
 * entries is refused, the rest harms nobody. */
static void test_flip_landed(void **state)
{
    static const uint32_t live[SLOTS] = {20, 20, 8, 8}; /* K, V of 5 positions; of 2 */
    struct scene s = {.digest = true, .landing = true};
    caches_open(&s);
    for (uint32_t at = 0; at < SLOTS * SLOT_BYTES; at++)
        for (int bit = 0; bit < 8; bit += at % SLOT_BYTES < 32 ? 1 : 7) {
            s.m = (struct middle){
                .damage = FLIP_LANDED, .at = at, .n = 1, .mask = (uint8_t)(1u << bit)};
            scene_open(&s);
            scene_run(&s);
            scene_check(&s);
            bool refused = at % SLOT_BYTES < live[at / SLOT_BYTES];
            int want = refused ? BATON_ERR_INTEGRITY : 0;
            if (s.m.damage != NONE || s.c.why[0].code != want || s.p.why[0].code != want ||
                s.c.commits[0] != !refused)
                fail_msg("byte %d bit %d: '%s', '%s'", (int)at, bit, s.c.why[0].text,
                         s.p.why[0].text);
            scene_close(&s);
        }
    caches_close(&s);
}

static void flips_as(int auth, bool digest)
{
    int before = rig_auth;
    rig_auth = auth;
    flips(digest, false);
    rig_auth = before;
}

static void test_flip_without_key(void **state)
{
    flips_as(0, true);
    flips_as(0, false);
}

static void test_flip_payload_tagged(void **state)
{
    flips_as(2, true);
}

/* The stream ends after any byte of either way: both ends are told, and what was not complete is
 * not delivered. */
static void cuts(bool landing)
{
    struct scene s = {.digest = true, .landing = landing};
    uint64_t bytes[2];
    caches_open(&s);
    clean_run(&s, bytes);
    for (int way = 0; way < 2; way++)
        for (uint64_t at = 0; at < bytes[way]; at++) {
            s.m = (struct middle){.damage = CUT, .way = way, .at = at};
            scene_open(&s);
            scene_run(&s);
            both_step(&s.p, &s.c, 2);
            scene_check(&s);
            if (s.p.ends[0] != 1 || s.c.ends[0] + !s.c.offers[0] != 1 || !s.p.rc || !s.c.rc)
                fail_msg("way %d byte %d: ends %d %d", way, (int)at, s.p.ends[0], s.c.ends[0]);
            assert_non_null(strstr(s.c.death.text, "producer process ended"));
            assert_non_null(strstr(s.p.death.text, "consumer process ended"));
            scene_close(&s);
        }
    caches_close(&s);
}

static void test_cut(void **state)
{
    cuts(false);
}

static void test_cut_landing(void **state)
{
    cuts(true);
}

/* Through the room's own faulty transport, over a socket pair: the cut closes it under way. */
static void test_cut_socket(void **state)
{
    struct scene s = {.digest = true, .landing = true};
    uint64_t bytes[2];
    caches_open(&s);
    clean_run(&s, bytes);
    for (uint64_t at = 0; at < bytes[0]; at += test_range(&seed, 1, 13)) {
        struct baton_error e;
        struct transport *t[2];
        unix_pair(t);
        test_ok(transport_faulty_open(t[0], TRANSPORT_FAULT_CUT, at, 1, &t[0], &e), &e);
        end_open(&s.p, t[0], true, 0);
        end_open(&s.c, t[1], false, 0);
        queue_request(&s);
        both_step(&s.p, &s.c, 40);
        scene_check(&s);
        assert_true(s.p.rc == BATON_ERR_PEER && s.p.ends[0] == 1);
        if (at + 48 < bytes[0]) { /* else all that matters went over */
            assert_true(s.c.rc == BATON_ERR_PEER && s.c.ends[0] == s.c.offers[0]);
        }
        end_close(&s.p);
        end_close(&s.c);
    }
    caches_close(&s);
}

/* Bytes that get lost, come twice or out of order. The receiver may be left waiting for bytes; what
 * it has by then is never delivered wrong. */
static void mangled(bool landing)
{
    struct scene s = {.digest = true, .landing = landing};
    uint64_t bytes[2];
    caches_open(&s);
    clean_run(&s, bytes);
    for (int damage = DROP; damage <= SWAP; damage++)
        for (int way = 0; way < 2; way++)
            for (uint64_t at = 0; at < bytes[way]; at++) {
                s.m = (struct middle){.damage = (enum damage)damage,
                                      .way = way,
                                      .at = at,
                                      .n = test_range(&seed, 2, 64)};
                scene_open(&s);
                scene_run(&s);
                scene_check(&s);
                scene_close(&s);
                assert_int_equal(s.p.ends[0], 1);
                assert_int_equal(s.c.ends[0], s.c.offers[0]);
            }
    caches_close(&s);
}

static void test_mangled(void **state)
{
    mangled(false);
}

static void test_mangled_landing(void **state)
{
    mangled(true);
}

/* A peer that keeps its stream open and says nothing more is dead after dead_ns. */
static void test_stall(void **state)
{
    struct scene s = {.digest = true};
    uint64_t bytes[2];
    caches_open(&s);
    clean_run(&s, bytes);
    for (int i = 0; i < 6; i++) {
        struct baton_error e;
        struct transport *t[2];
        int side = i % 2;
        const uint64_t dead = 200000000u;
        test_ok(transport_inproc_pair(1 << 16, &t[0], &t[1], &e), &e);
        uint64_t at = test_range(&seed, 0, (uint32_t)bytes[side] - 1);
        test_ok(transport_faulty_open(t[side], TRANSPORT_FAULT_STALL, at, 1, &t[side], &e), &e);
        end_open(&s.p, t[0], true, dead);
        end_open(&s.c, t[1], false, dead);
        queue_request(&s);
        uint64_t t0 = base_now_ns();
        struct end *other = side ? &s.p : &s.c;
        both_step(&s.p, &s.c, 30); /* then the stalled end is never heard of again */
        while (!other->rc) {
            struct pollfd fds[2];
            uint64_t wait;
            int n = handoff_conn_poll(other->conn, fds, &wait);
            assert_true(wait <= dead);
            poll(fds, (nfds_t)n, (int)(wait / 1000000) + 1);
            end_step(other);
        }
        assert_true(base_now_ns() - t0 >= dead);
        assert_int_equal(other->rc, BATON_ERR_PEER);
        assert_non_null(strstr(other->death.text, side ? "consumer " : "producer "));
        assert_true(strstr(other->death.text, "silent for 0.2 s") ||
                    strstr(other->death.text, "did not prove within 0.2 s"));
        scene_check(&s);
        assert_int_equal(other->ends[0], side ? 1 : s.c.offers[0]);
        end_close(&s.p);
        end_close(&s.c);
    }
    caches_close(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_flip),
        cmocka_unit_test(test_flip_undigested),
        cmocka_unit_test(test_flip_without_key),
        cmocka_unit_test(test_flip_payload_tagged),
        cmocka_unit_test(test_flip_landing),
        cmocka_unit_test(test_flip_landed),
        cmocka_unit_test(test_cut),
        cmocka_unit_test(test_cut_landing),
        cmocka_unit_test(test_cut_socket),
        cmocka_unit_test(test_mangled),
        cmocka_unit_test(test_mangled_landing),
        cmocka_unit_test(test_stall),
    };
    seed = test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
