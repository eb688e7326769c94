/* SPDX-License-Identifier: Apache-2.0 */
/* Authentication: what is forged, changed, replayed, reflected or reordered is refused, and who has
 * no key, or another, gets nothing but HELLO and BYE. */
#include <sys/stat.h>
#include <unistd.h>

#include "scene.h"

/* ---- a peer with the key, written by hand --------------------------------------------------- */

struct party {
    struct scene s;
    struct wire theirs; /* keyed to verify what the end under test sends */
    uint8_t hello[96];  /* of the end under test */
};

static void hello_body(uint8_t b[96], uint32_t role, uint32_t auth)
{
    memset(b, 0, 96);
    w_u32(w_u32(w_u16(w_u16(b, 1), 1), role), auth);
    w_u64(w_u64(b + 16, 1000000000u), 10000000000u);
    for (int i = 32; i < 64; i++)
        b[i] = (uint8_t)(test_random(&seed) >> 32);
}

/* The end under test is a consumer of level `mine`, the peer one of level `theirs`. Stops before
 * the peer's proof. */
static void greet(struct party *p, int mine, uint32_t theirs, const void *secret)
{
    static uint8_t buf[4096];
    uint8_t b[96];
    memset(p, 0, sizeof *p);
    scene_auth = mine;
    scene_open(&p->s, false);
    for (int i = 0; i < RIG_IDS; i++)
        cache_import(&p->s.cache[i], N);
    end_step(&p->s.me);
    assert_int_equal(scene_read(&p->s, buf, sizeof buf), 144); /* HELLO alone */
    memcpy(p->hello, buf + 48, 96);
    assert_int_equal(p->hello[8], mine);
    hello_body(b, 1, theirs);
    wire_frame(&p->s.w, W_HELLO, 0, b, 96, NULL, 0, false);
    wire_session_key(secret, 32, true, b, p->hello, p->s.w.key);
    wire_session_key(secret, 32, false, b, p->hello, p->theirs.key);
    p->s.w.tagged = theirs != 0;
    p->s.w.tag_payload = p->theirs.tag_payload = theirs == 2 || mine == 2;
}

static void prove(struct party *p)
{
    static uint8_t buf[4096];
    uint8_t tag[16];
    wire_frame(&p->s.w, W_HEARTBEAT, 0, NULL, 0, NULL, 0, false);
    scene_send(&p->s);
    assert_int_equal(p->s.me.rc, 0);
    assert_int_equal(scene_read(&p->s, buf, sizeof buf), 64); /* its proof, and nothing else yet */
    assert_int_equal(buf[6], W_HEARTBEAT);
    assert_int_equal(buf[7], 2);
    wire_tag(&p->theirs, buf, 0, 0, tag);
    assert_memory_equal(buf + 48, tag, 16);
}

static void party_open(struct party *p, int mine, uint32_t theirs)
{
    greet(p, mine, theirs, rig_key);
    prove(p);
}

/* Up to the answer to OFFER. */
static void party_reserved(struct party *p, int mine, uint32_t theirs)
{
    party_open(p, mine, theirs);
    wire_offer(&p->s.w, 0, N, false);
    scene_send(&p->s);
    assert_int_equal(p->s.me.offers[0], 1);
    assert_true(scene_heard(&p->s, W_RESERVE));
}

static void test_second_implementation(void **state)
{
    static const int levels[][2] = {{1, 1}, {1, 2}, {2, 1}, {2, 2}};
    for (int i = 0; i < 4; i++) {
        struct party p;
        static uint8_t buf[4096];
        uint8_t tag[16];
        party_reserved(&p, levels[i][0], (uint32_t)levels[i][1]);
        honest(&p.s, 0);
        wire_commit(&p.s.w, 0, N);
        scene_send(&p.s);
        assert_int_equal(p.s.me.rc, 0);
        assert_int_equal(p.s.me.commits[0], 1);
        assert_int_equal(scene_read(&p.s, buf, sizeof buf), 48 + 32 + 16);
        assert_int_equal(buf[6], W_ACK);
        wire_tag(&p.theirs, buf, 32, 0, tag);
        assert_memory_equal(buf + 80, tag, 16);
        scene_close(&p.s);
    }
}

/* ---- without the key ------------------------------------------------------------------------ */

/* All that was sent is HELLO, perhaps a proof, and BYE. */
static void gave_away_nothing(struct scene *s)
{
    static uint8_t buf[1 << 16];
    size_t n = scene_read(s, buf, sizeof buf);
    for (size_t at = 0; at + 48 <= n;) {
        uint8_t type = buf[at + 6];
        if (type != W_HELLO && type != W_HEARTBEAT && type != W_BYE)
            fail_msg("frame of type %d to a stranger", type);
        at += 48 + (size_t)(buf[at + 8] | buf[at + 9] << 8) + (buf[at + 7] & 2 ? 16 : 0);
    }
}

static void stranger(int mine, uint32_t theirs, bool proof, int code, const char *word)
{
    for (int producer = 0; producer < 2; producer++) {
        struct scene s;
        struct handoff_offer o;
        struct baton_error e;
        uint8_t b[96];
        static const int32_t ids[N] = {1, 2, 3, 4, 5};
        scene_auth = mine;
        scene_open(&s, producer);
        offer_fill(&o, 0, &s.g, ids, N, true);
        if (producer)
            test_ok(handoff_offer(s.me.conn, &o, &e), &e);
        hello_body(b, producer ? 2 : 1, theirs);
        wire_frame(&s.w, W_HELLO, 0, b, 96, NULL, 0, false);
        s.w.tagged = proof; /* by a key of zeros */
        if (proof)
            wire_frame(&s.w, W_HEARTBEAT, 0, NULL, 0, NULL, 0, false);
        scene_send(&s);
        if (s.me.rc != code || !strstr(s.me.death.text, word))
            fail_msg("got %d '%s', wanted %d '%s'", s.me.rc, s.me.death.text, code, word);
        assert_int_equal(s.me.ends[0], producer);
        assert_int_equal(s.me.offers[0], 0);
        gave_away_nothing(&s);
        scene_close(&s);
    }
}

static void test_no_key_against_key(void **state)
{
    stranger(1, 0, false, BATON_ERR_MISMATCH, "has no key, this end wants one");
    stranger(2, 0, false, BATON_ERR_MISMATCH, "has no key, this end wants one");
    stranger(0, 1, false, BATON_ERR_MISMATCH, "wants a key, this end has none");
    stranger(0, 2, false, BATON_ERR_MISMATCH, "wants a key, this end has none");
    stranger(1, 3, false, BATON_ERR_UNSUPPORTED, "wants authentication 3");
    stranger(0, UINT32_MAX, false, BATON_ERR_UNSUPPORTED, "wants authentication 4294967295");
}

static void test_wrong_key(void **state)
{
    stranger(1, 1, true, BATON_ERR_INTEGRITY, "has another key than this end");
    stranger(2, 1, true, BATON_ERR_INTEGRITY, "has another key than this end");
    /* two real ends, one bit apart: neither learns of the other's request */
    for (int bit = 0; bit < 256; bit += 37) {
        struct baton_error e;
        struct handoff_conn *conn[2];
        struct transport *t[2];
        uint8_t key[32];
        memcpy(key, rig_key, 32);
        test_ok(transport_inproc_pair(1 << 16, &t[0], &t[1], &e), &e);
        for (int i = 0; i < 2; i++) {
            const struct handoff_options o = {.producer = i, .key = key, .key_bytes = 32};
            const struct handoff_callbacks cb = {0};
            test_ok(handoff_conn_open(t[i], &o, &cb, &conn[i], &e), &e);
            key[bit / 8] ^= (uint8_t)(1 << bit % 8);
        }
        for (int i = 0; i < 6; i++)
            for (int k = 0; k < 2; k++)
                handoff_conn_step(conn[k], NULL);
        for (int i = 0; i < 2; i++) {
            test_fails(handoff_conn_step(conn[i], &e), BATON_ERR_INTEGRITY, "another key", &e);
            handoff_conn_close(conn[i]);
        }
    }
}

/* A peer that greets and then proves nothing is not kept alive by its dripping bytes. */
static void test_no_proof(void **state)
{
    struct baton_error e;
    struct transport *t[2];
    struct end me;
    struct wire w = {.data = malloc(4096), .capacity = 4096};
    uint8_t b[96];
    size_t moved, at = 0;
    rig_auth = 1;
    test_ok(transport_inproc_pair(1 << 16, &t[0], &t[1], &e), &e);
    end_open(&me, t[0], false, 100000000u);
    hello_body(b, 1, 1);
    w_u64(b + 16, 10000000u);
    wire_frame(&w, W_HELLO, 0, b, 96, NULL, 0, false);
    w.tagged = true;
    wire_frame(&w, W_HEARTBEAT, 0, NULL, 0, NULL, 0, false);
    for (; !me.rc; at += moved) {
        struct iovec iov = {w.data + at, at < 144 ? 144 - at : 1};
        assert_true(at < w.n);
        test_ok(transport_send(t[1], &iov, 1, &moved, &e), &e);
        end_step(&me);
        base_sleep_ns(10000000u);
    }
    assert_int_equal(me.rc, BATON_ERR_PEER);
    assert_non_null(strstr(me.death.text, "did not prove within 0.1 s"));
    end_close(&me);
    transport_close(t[1]);
    free(w.data);
}

/* Types that a peer may not send before its proof, tagged or not. */
static void test_before_the_proof(void **state)
{
    struct party p;
    greet(&p, 1, 1, rig_key);
    wire_offer(&p.s.w, 0, N, false);
    dies(&p.s, BATON_ERR_PEER, "OFFER before the producer proved that it has the key");
    greet(&p, 1, 1, rig_key);
    p.s.w.tagged = false;
    wire_offer(&p.s.w, 0, N, false);
    dies(&p.s, BATON_ERR_INTEGRITY, "OFFER without a tag");
    greet(&p, 1, 1, rig_key);
    p.s.w.tagged = false;
    wire_frame(&p.s.w, W_HEARTBEAT, 0, NULL, 0, NULL, 0, false);
    dies(&p.s, BATON_ERR_INTEGRITY, "HEARTBEAT without a tag");
    greet(&p, 1, 1, rig_key);
    p.s.w.tagged = false; /* who refuses us has no tag for it */
    wire_reason(&p.s.w, W_BYE, 0, BATON_ERR_MISMATCH, "no such key");
    dies(&p.s, BATON_ERR_MISMATCH, "producer closed the connection: no such key");
    greet(&p, 1, 1, rig_key);
    uint8_t b[96];
    hello_body(b, 1, 1);
    wire_frame(&p.s.w, W_HELLO, 0, b, 96, NULL, 0, false);
    dies(&p.s, BATON_ERR_PEER, "HELLO with a tag");
}

/* ---- with the key, and somebody in the middle ----------------------------------------------- */

static void test_forged(void **state)
{
    struct party p;
    for (int i = 0; i < 16; i++) { /* each byte of a tag */
        party_reserved(&p, 1, 1);
        wire_layer(&p.s.w, 0, 0, 0, 0, 5, 1);
        p.s.w.data[p.s.w.n - 16 + (size_t)i] ^= (uint8_t)(1u << test_range(&seed, 0, 7));
        dies(&p.s, BATON_ERR_INTEGRITY, "frame 3 (LAYER) does not match its tag");
    }
    party_reserved(&p, 1, 1);
    p.s.w.tagged = false;
    wire_layer(&p.s.w, 0, 0, 0, 0, 5, 1);
    dies(&p.s, BATON_ERR_INTEGRITY, "LAYER without a tag");
    party_reserved(&p, 1, 1);
    p.s.w.tagged = false;
    wire_reason(&p.s.w, W_BYE, 0, BATON_ERR_CANCELLED, "forged");
    dies(&p.s, BATON_ERR_INTEGRITY, "BYE without a tag");
}

/* Write frame number `which` of an honest request, 0 = OFFER. */
static void write_frame(struct wire *w, int which)
{
    static const uint32_t pieces[4][3] = {{0, 0, 5}, {0, 1, 5}, {1, 0, 2}, {1, 1, 2}};
    if (which == 0)
        wire_offer(w, 0, N, false);
    else if (which == 5)
        wire_commit(w, 0, N);
    else
        wire_layer(w, 0, pieces[which - 1][0], pieces[which - 1][1], 5 - pieces[which - 1][2],
                   pieces[which - 1][2], (uint8_t)which);
}

/* Every byte of every frame changed by somebody who makes the unkeyed checks right again. */
static void test_tampered_in_every_byte(void **state)
{
    int total = 0;
    for (int which = 0; which < 6; which++)
        for (size_t at = 4, n = 5; at < n; at++) {
            struct party p;
            party_open(&p, 1, 1);
            for (int i = 0; i < which; i++)
                write_frame(&p.s.w, i);
            scene_send(&p.s);
            write_frame(&p.s.w, which);
            n = p.s.w.n - 16;
            p.s.w.data[at] ^= (uint8_t)(1u << test_range(&seed, 0, 7));
            bool sizes = at >= 8 && at < 16; /* the frame may have another end now: not resealed */
            if (sizes)
                wire_seal(p.s.w.data);
            else
                wire_reseal(p.s.w.data);
            scene_send(&p.s);
            if (sizes && !p.s.me.rc) { /* until it has come to its end */
                memset(p.s.w.data, 0, 5u << 20);
                p.s.w.n = 5u << 20;
                scene_send(&p.s);
            }
            bool checks = at >= 32 && at < 48; /* made right again: nothing has changed */
            if (checks ? p.s.me.rc != 0 : p.s.me.rc == 0 || p.s.me.commits[0])
                fail_msg("frame %d byte %d: %d '%s'", which, (int)at, p.s.me.rc, p.s.me.death.text);
            if (at >= 48 || (at >= 16 && at < 24)) {
                assert_int_equal(p.s.me.rc, BATON_ERR_INTEGRITY);
                assert_non_null(strstr(p.s.me.death.text, "does not match its tag"));
            }
            scene_close(&p.s);
            total++;
        }
    print_message("%d places\n", total);
    assert_true(total > 800);
}

/* Payload with the right XXH3 is what its tag is there for: the header is as it was. */
static void test_payload_tag(void **state)
{
    struct party p;
    for (int level = 1; level <= 2; level++) {
        party_reserved(&p, level, 1);
        uint8_t *h = wire_layer(&p.s.w, 0, 0, 0, 0, 5, 1);
        uint8_t old[48];
        memcpy(old, h, 48);
        /* A tag that covers the payload where it should not, or the other way round. */
        p.s.w.tag_payload = level == 1;
        wire_tag(&p.s.w, h, 32, 20, h + 100);
        dies(&p.s, BATON_ERR_INTEGRITY, "does not match its tag");
    }
}

static void test_replayed_frame(void **state)
{
    struct party p;
    for (int patch = 0; patch < 2; patch++) {
        party_reserved(&p, 1, 1);
        uint8_t *h = wire_layer(&p.s.w, 0, 0, 0, 0, 5, 1);
        size_t n = p.s.w.n;
        memcpy(h + n, h, n); /* the same frame again */
        p.s.w.n = 2 * n;
        if (patch)
            patched(h + n, 24, 8, 4);
        dies(&p.s, patch ? BATON_ERR_INTEGRITY : BATON_ERR_PEER,
             patch ? "frame 4 (LAYER) does not match its tag"
                   : "frame 3 (LAYER) where frame 4 was due");
    }
}

static void test_reordered(void **state)
{
    struct party p;
    uint8_t first[256], second[256];
    party_reserved(&p, 1, 1);
    wire_layer(&p.s.w, 0, 0, 0, 0, 5, 1);
    size_t n = p.s.w.n;
    wire_layer(&p.s.w, 0, 0, 1, 0, 5, 2);
    memcpy(first, p.s.w.data, n);
    memcpy(second, p.s.w.data + n, n);
    patched(second, 24, 8, 3);
    patched(first, 24, 8, 4);
    memcpy(p.s.w.data, second, n);
    memcpy(p.s.w.data + n, first, n);
    dies(&p.s, BATON_ERR_INTEGRITY, "frame 3 (LAYER) does not match its tag");
}

/* What an end sent comes back to it. */
static void test_reflected(void **state)
{
    struct party p;
    struct scene s;
    uint8_t own[512];
    scene_auth = 1;
    scene_open(&s, false);
    end_step(&s.me);
    s.w.n = scene_read(&s, s.w.data, s.w.capacity); /* HELLO as it is */
    dies(&s, BATON_ERR_MISMATCH, "the peer is a consumer too");
    scene_open(&s, false);
    end_step(&s.me);
    s.w.n = scene_read(&s, s.w.data, s.w.capacity); /* and with the role changed */
    s.w.data[48 + 4] = 1;
    wire_reseal(s.w.data);
    scene_send(&s);
    assert_int_equal(s.me.rc, 0);
    s.w.n = scene_read(&s, s.w.data, s.w.capacity); /* its own proof */
    assert_int_equal(s.w.n, 64);
    dies(&s, BATON_ERR_INTEGRITY, "another key");
    /* A frame of a proven connection: ABORT, which both roles may send. */
    party_reserved(&p, 1, 1);
    handoff_abort(p.s.me.conn, 0, NULL);
    end_step(&p.s.me);
    size_t n = scene_read(&p.s, own, sizeof own);
    assert_int_equal(n, 48 + 256 + 16);
    assert_int_equal(own[6], W_ABORT);
    assert_int_equal(own[24], 3); /* the very number that the peer's next frame has */
    memcpy(p.s.w.data, own, n);
    p.s.w.n = n;
    scene_send(&p.s);
    assert_int_equal(p.s.me.rc, BATON_ERR_INTEGRITY);
    assert_non_null(strstr(p.s.me.death.text, "frame 3 (ABORT) does not match its tag"));
    scene_close(&p.s);
}

/* ---- two real ends and somebody in the middle ----------------------------------------------- */

struct pair {
    struct cache from, into;
    struct truth truth;
    struct end p, c;
    struct transport *in[2]; /* in[0] faces the producer */
    uint8_t seen[1 << 14];   /* from the producer */
    size_t n_seen;
    size_t flip; /* bit of a HELLO body to flip, both checks made right; SIZE_MAX: none */
    int flip_way;
    int greeted[2];
};

static void pair_open(struct pair *x, const struct kv_geometry *g)
{
    struct baton_error e;
    struct handoff_offer o;
    struct transport *a, *b;
    static const int32_t ids[N] = {1, 2, 3, 4, 5};
    const struct handoff_commit m = {.argmax = 1, .margin = 2};
    truth_open(&x->truth, g, N, &seed);
    cache_open(&x->from, g, N, N);
    cache_prefill(&x->from, &x->truth);
    cache_open(&x->into, g, N, 1);
    cache_import(&x->into, N);
    test_ok(transport_inproc_pair(1 << 16, &a, &x->in[0], &e), &e);
    test_ok(transport_inproc_pair(1 << 16, &x->in[1], &b, &e), &e);
    rig_auth = 1;
    end_open(&x->p, a, true, 0);
    end_open(&x->c, b, false, 0);
    x->c.into[0] = &x->into;
    offer_fill(&o, 0, g, ids, N, true);
    test_ok(handoff_offer(x->p.conn, &o, &e), &e);
    queue_all(x->p.conn, 0, &x->from, N);
    test_ok(handoff_commit(x->p.conn, 0, &m, &e), &e);
}

static void pair_close(struct pair *x)
{
    end_close(&x->p);
    end_close(&x->c);
    transport_close(x->in[0]);
    transport_close(x->in[1]);
    truth_close(&x->truth);
    cache_close(&x->from);
    cache_close(&x->into);
}

static void carry(struct pair *x)
{
    for (int way = 0; way < 2; way++) {
        uint8_t buf[4096];
        size_t n = 0, sent = 0;
        if (transport_recv(x->in[way], buf, sizeof buf, &n, NULL) || n == 0)
            continue;
        if (!x->greeted[way] && way == x->flip_way && x->flip != SIZE_MAX) {
            assert_true(n >= 144);
            buf[48 + x->flip / 8] ^= (uint8_t)(1u << x->flip % 8);
            wire_reseal(buf);
        }
        x->greeted[way] = 1;
        if (way == 0 && x->n_seen + n <= sizeof x->seen) {
            memcpy(x->seen + x->n_seen, buf, n);
            x->n_seen += n;
        }
        struct iovec iov = {buf, n};
        transport_send(x->in[1 - way], &iov, 1, &sent, NULL);
    }
}

static void pair_run(struct pair *x)
{
    for (int i = 0; i < 40 && !(x->p.ends[0] && x->c.ends[0]); i++) {
        end_step(&x->p);
        carry(x);
        end_step(&x->c);
        carry(x);
    }
}

/* Somebody changes what HELLO says, in either direction: each end has read another one than was
 * sent, so their keys differ. All 768 bits of it. */
static void test_changed_hello(void **state)
{
    struct kv_geometry g;
    geometry_small(&g);
    for (int way = 0; way < 2; way++)
        for (size_t bit = 0; bit < 768; bit++) {
            static struct pair x;
            memset(&x, 0, sizeof x);
            x.flip = bit;
            x.flip_way = way;
            pair_open(&x, &g);
            pair_run(&x);
            if (x.c.offers[0] || (!x.p.rc && !x.c.rc))
                fail_msg("way %d bit %d: %d offers, '%s' '%s'", way, (int)bit, x.c.offers[0],
                         x.p.death.text, x.c.death.text);
            pair_close(&x);
        }
}

/* Everything that a producer sent once is sent to another consumer with the same key. */
static void test_replayed_connection(void **state)
{
    static struct pair x;
    struct kv_geometry g;
    struct scene s;
    geometry_small(&g);
    memset(&x, 0, sizeof x);
    x.flip = SIZE_MAX;
    pair_open(&x, &g);
    pair_run(&x);
    assert_int_equal(x.c.commits[0], 1);
    assert_int_equal(x.p.why[0].code, 0);
    scene_auth = 1;
    scene_open(&s, false);
    memcpy(s.w.data, x.seen, x.n_seen);
    s.w.n = x.n_seen;
    dies(&s, BATON_ERR_INTEGRITY, "another key");
    pair_close(&x);
}

static void test_keys(void **state)
{
    struct baton_error e;
    struct transport *t[2];
    struct handoff_conn *c = NULL;
    uint8_t key[HANDOFF_MAX_KEY + 1] = {1};
    const struct handoff_callbacks cb = {0};
    struct handoff_options o = {.key = key, .key_bytes = HANDOFF_MIN_KEY - 1};
    test_ok(transport_inproc_pair(1 << 16, &t[0], &t[1], &e), &e);
    test_fails(handoff_conn_open(t[0], &o, &cb, &c, &e), BATON_ERR_USAGE, "key of 15 bytes", &e);
    o.key_bytes = sizeof key;
    test_fails(handoff_conn_open(t[0], &o, &cb, &c, &e), BATON_ERR_USAGE, "key of 4097 bytes", &e);
    o = (struct handoff_options){.tag_payload = true};
    test_fails(handoff_conn_open(t[0], &o, &cb, &c, &e), BATON_ERR_USAGE, "without a key", &e);
    assert_null(c);
    transport_close(t[0]);
    transport_close(t[1]);
}

static void write_key(const char *path, const char *text, size_t n, unsigned mode)
{
    struct baton_error e;
    test_ok(base_file_write(path, text, n, &e), &e);
    assert_int_equal(chmod(path, mode), 0);
}

static void test_key_file(void **state)
{
    struct baton_error e;
    char folder[] = "/tmp/baton-test-XXXXXX", path[64];
    static char big[HANDOFF_MAX_KEY + 2];
    uint8_t key[HANDOFF_MAX_KEY];
    size_t n = 0;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/key", folder);
    test_fails(handoff_key_read(path, key, &n, &e), BATON_ERR_IO, path, &e);
    write_key(path, "0123456789abcdef\n", 17, 0600);
    test_ok(handoff_key_read(path, key, &n, &e), &e);
    assert_int_equal(n, 16);
    assert_memory_equal(key, "0123456789abcdef", 16);
    write_key(path, "0123456789abcde\n", 16, 0600);
    test_fails(handoff_key_read(path, key, &n, &e), BATON_ERR_INPUT, "15 bytes", &e);
    write_key(path, "0123456789\0bcdef", 16, 0640); /* bytes, not text; a group may share it */
    test_ok(handoff_key_read(path, key, &n, &e), &e);
    assert_memory_equal(key, "0123456789\0bcdef", 16);
    write_key(path, "0123456789abcdef", 16, 0644);
    test_fails(handoff_key_read(path, key, &n, &e), BATON_ERR_INPUT, "mode 644", &e);
    big[HANDOFF_MAX_KEY] = '\n';
    write_key(path, big, HANDOFF_MAX_KEY + 1, 0600);
    test_ok(handoff_key_read(path, key, &n, &e), &e);
    assert_int_equal(n, HANDOFF_MAX_KEY);
    big[HANDOFF_MAX_KEY] = 'x';
    write_key(path, big, HANDOFF_MAX_KEY + 1, 0600);
    test_fails(handoff_key_read(path, key, &n, &e), BATON_ERR_INPUT, "4097 bytes", &e);
    unlink(path);
    rmdir(folder);
}

/* Without a key nobody listens where other machines can reach. */
static void test_listen(void **state)
{
    static const char *const local[] = {"127.0.0.1:0", "127.9.8.7:0", "localhost:0", "[::1]:0"};
    static const char *const open[] = {"0.0.0.0:0", "[::]:0"};
    struct baton_error e;
    const struct handoff_options keyed = {.key = rig_key, .key_bytes = 32}, bare = {0};
    struct transport_listener *l;
    for (size_t i = 0; i < 4; i++) {
        int rc = handoff_listen(local[i], &bare, &l, &e);
        if (rc && local[i][0] == '[') /* a machine without IPv6 */
            continue;
        test_ok(rc, &e);
        assert_true(transport_listener_local(l));
        transport_listener_close(l);
    }
    for (size_t i = 0; i < 2; i++) {
        if (i && handoff_listen(open[i], &keyed, &l, NULL))
            continue;
        if (i)
            transport_listener_close(l);
        test_fails(handoff_listen(open[i], &bare, &l, &e), BATON_ERR_USAGE, "a key is needed", &e);
        test_ok(handoff_listen(open[i], &keyed, &l, &e), &e);
        assert_false(transport_listener_local(l));
        transport_listener_close(l);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_second_implementation),
        cmocka_unit_test(test_no_key_against_key),
        cmocka_unit_test(test_wrong_key),
        cmocka_unit_test(test_no_proof),
        cmocka_unit_test(test_before_the_proof),
        cmocka_unit_test(test_forged),
        cmocka_unit_test(test_tampered_in_every_byte),
        cmocka_unit_test(test_payload_tag),
        cmocka_unit_test(test_replayed_frame),
        cmocka_unit_test(test_reordered),
        cmocka_unit_test(test_reflected),
        cmocka_unit_test(test_changed_hello),
        cmocka_unit_test(test_replayed_connection),
        cmocka_unit_test(test_keys),
        cmocka_unit_test(test_key_file),
        cmocka_unit_test(test_listen),
    };
    seed = test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
