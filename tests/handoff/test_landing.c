/* SPDX-License-Identifier: Apache-2.0 */
/* The landing region: peers that lend, place and credit wrongly, and credits that run out. */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "landing.h"

/* The end under test over a Unix socket; the peer takes descriptors. */
static void landing_open(struct scene *s, bool producer)
{
    const struct handoff_options o = {.producer = producer,
                                      .landing_slots = producer ? 0 : SLOTS,
                                      .landing_slot_bytes = producer ? 0 : SLOT_BYTES};
    struct transport *t[2];
    memset(s, 0, sizeof *s);
    s->w.capacity = 1u << 20;
    s->w.data = malloc(s->w.capacity);
    unix_pair(t);
    s->peer = t[1];
    assert_true(transport_passes_fds(s->peer, true));
    rig_auth = 0;
    end_open_with(&s->me, t[0], &o);
    geometry_small(&s->g);
    for (int i = 0; i < RIG_IDS; i++) {
        cache_open(&s->cache[i], &s->g, 256, 256);
        s->me.into[i] = &s->cache[i];
    }
}

/* Frames of a type among what the end has sent; the last one's body in *body (may be NULL). */
static int heard(struct scene *s, uint8_t type, uint8_t *body)
{
    static uint8_t buf[1 << 20];
    size_t n = scene_read(s, buf, sizeof buf);
    int found = 0;
    for (size_t at = 0; at + 48 <= n;) {
        uint32_t control, payload;
        memcpy(&control, buf + at + 8, 4);
        memcpy(&payload, buf + at + 12, 4);
        if (buf[at + 6] == type) {
            found++;
            if (body)
                memcpy(body, buf + at + 48, control);
        }
        at += 48 + (size_t)control + payload;
    }
    return found;
}

/* ---- a producer written by hand ----------------------------------------------------------- */

/* Offered and reserved; the region that was lent, mapped. */
static struct transport_landing *lent(struct scene *s)
{
    struct baton_error e;
    struct transport_landing *l;
    uint8_t body[96];
    landing_open(s, false);
    for (int i = 0; i < RIG_IDS; i++)
        cache_import(&s->cache[i], N);
    hello(s);
    wire_offer(&s->w, 0, N, false);
    scene_send(s);
    assert_int_equal(s->me.offers[0], 1);
    assert_int_equal(heard(s, W_RESERVE, body), 1);
    uint32_t terms[2];
    memcpy(terms, body + 16, 8);
    assert_true(terms[0] == SLOTS && terms[1] == 1);
    int fd = transport_take_fd(s->peer);
    assert_true(fd >= 0);
    test_ok(transport_landing_map(fd, (size_t)SLOTS * SLOT_BYTES, &l, &e), &e);
    return l;
}

/* From docs/wire.md alone: placed and inline pieces of one request. */
static void test_second_implementation(void **state)
{
    struct scene s;
    struct transport_landing *l = lent(&s);
    uint8_t *data = transport_landing_data(l);
    memset(data, 1, 20);
    memset(data + SLOT_BYTES, 2, 20);
    wire_placed(&s.w, 0, 0, 0, 0, 5, 1, 0);
    wire_placed(&s.w, 0, 0, 1, 0, 5, 1, SLOT_BYTES);
    scene_send(&s);
    assert_int_equal(heard(&s, W_CREDIT, NULL), 2);
    memset(data, 4, 8);
    wire_layer(&s.w, 0, 1, 0, 3, 2, 3);
    wire_placed(&s.w, 0, 1, 1, 3, 2, 1, 0);
    wire_commit(&s.w, 0, N);
    scene_send(&s);
    assert_int_equal(s.me.rc, 0);
    assert_int_equal(s.me.commits[0], 1);
    assert_true(s.me.result[0].landed_bytes == 48 && s.me.result[0].bytes == 56);
    memset(data, 0xEE, SLOTS * SLOT_BYTES); /* too late to matter */
    const struct baton_kv_view *v = kv_seq_views(s.cache[0].seq);
    for (uint32_t slot = 0; slot < 4; slot++) {
        uint8_t got[20];
        uint32_t first = slot < 2 ? 0 : 3, n = N - first;
        struct baton_kv_layout layout;
        struct baton_error e;
        struct baton_kv_view d = kv_dense_view(&layout, BATON_BF16, 1, 2, got, got, first, n);
        test_ok(kv_copy(&d, &v[slot / 2], slot % 2, first, n, &e), &e);
        for (uint32_t i = 0; i < 4 * n; i++)
            assert_int_equal(got[i], slot + 1);
    }
    transport_landing_close(l);
    scene_close(&s);
}

/* Places that are none: that request fails by name, the connection goes on. */
static void test_hostile_offsets(void **state)
{
    const struct {
        uint32_t count, region;
        uint64_t offset;
        const char *word;
    } cases[] = {
        {5, 1, 1, "20 bytes at 1 of landing region 1"},
        {5, 1, SLOT_BYTES - 1, "bytes at 255"},
        {5, 1, SLOTS * SLOT_BYTES, "bytes at 512"},
        {5, 1, UINT64_MAX, "bytes at 18446744073709551615"},
        {5, 1, UINT64_MAX - SLOT_BYTES + 1, "bytes at 18446744073709551360"},
        {5, 1, (uint64_t)UINT32_MAX * SLOT_BYTES, "landing region 1"},
        {5, 2, 0, "landing region 2"},
        {5, UINT32_MAX, 0, "landing region 4294967295"},
        {6, 1, 0, "6 positions from 0"},
        {UINT32_MAX, 1, 0, "4294967295 positions from 0"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct scene s;
        struct transport_landing *l = lent(&s);
        wire_placed(&s.w, 0, 0, 0, 0, cases[i].count, cases[i].region, cases[i].offset);
        scene_send(&s);
        if (s.me.rc || s.me.ends[0] != 1 || s.me.why[0].code != BATON_ERR_INTEGRITY ||
            !strstr(s.me.why[0].text, cases[i].word))
            fail_msg("case %zu: %d '%s', '%s'", i, s.me.rc, s.me.death.text, s.me.why[0].text);
        assert_true(scene_heard(&s, W_NACK));
        wire_frame(&s.w, W_CLOSE, 0, NULL, 0, NULL, 0, false);
        wire_offer(&s.w, 1, N, false);
        honest(&s, 1);
        wire_commit(&s.w, 1, N);
        scene_send(&s);
        assert_int_equal(s.me.commits[1], 1);
        transport_landing_close(l);
        scene_close(&s);
    }
}

static void test_hostile_layers(void **state)
{
    struct scene s;
    uint8_t b[32], rows[20] = {0};
    struct transport_landing *l = lent(&s); /* placed, and with a payload */
    wire_layer_body(b, 0, 0, 0, 5);
    w_u32(b + 20, 1);
    wire_frame(&s.w, W_LAYER, 0, b, 32, rows, 20, true);
    scene_send(&s);
    assert_non_null(strstr(s.me.why[0].text, "20 bytes for 5 positions in the landing region"));
    transport_landing_close(l);
    scene_close(&s);
    l = lent(&s); /* neither */
    wire_placed(&s.w, 0, 0, 0, 0, 5, 0, 0);
    scene_send(&s);
    assert_non_null(strstr(s.me.why[0].text, "0 bytes for 5 positions"));
    transport_landing_close(l);
    scene_close(&s);
    l = lent(&s);
    wire_placed(&s.w, 0, 0, 0, 0, 5, 0, SLOT_BYTES);
    transport_landing_close(l);
    dies(&s, BATON_ERR_PEER, "an offset in no landing region");
    consumer_open(&s); /* a stream over which nothing is lent */
    wire_offer(&s.w, 0, N, false);
    wire_placed(&s.w, 0, 0, 0, 0, 5, 1, 0);
    scene_send(&s);
    assert_non_null(strstr(s.me.why[0].text, "lent is region 0"));
    scene_close(&s);
    l = lent(&s); /* a piece that is for a request that is over frees its slot all the same */
    handoff_abort(s.me.conn, 0, NULL);
    wire_placed(&s.w, 0, 0, 0, 0, 5, 1, SLOT_BYTES);
    scene_send(&s);
    assert_int_equal(s.me.rc, 0);
    assert_int_equal(heard(&s, W_CREDIT, b), 1);
    assert_int_equal(b[4], 1);
    transport_landing_close(l);
    scene_close(&s);
}

/* ---- a consumer written by hand ----------------------------------------------------------- */

/* The producer must have died with this code and word, and its request with it. */
static void gives_up(struct scene *s, int code, const char *word)
{
    scene_send(s);
    if (s->me.rc != code || !strstr(s->me.death.text, word))
        fail_msg("got %d '%s', wanted %d '%s'", s->me.rc, s->me.death.text, code, word);
    assert_int_equal(s->me.ends[0], 1);
    assert_int_equal(heard(s, W_BYE, NULL), 1);
    scene_close(s);
}

/* A producer under test that has offered a request with everything queued. */
static void offered(struct scene *s, uint32_t n)
{
    struct baton_error e;
    struct handoff_offer o;
    struct truth truth;
    int32_t ids[256] = {0};
    const struct handoff_commit m = {.argmax = 1, .margin = 1};
    landing_open(s, true);
    truth_open(&truth, &s->g, n, &seed);
    cache_prefill(&s->cache[0], &truth);
    truth_close(&truth);
    offer_fill(&o, 0, &s->g, ids, n, true);
    test_ok(handoff_offer(s->me.conn, &o, &e), &e);
    queue_all(s->me.conn, 0, &s->cache[0], n);
    test_ok(handoff_commit(s->me.conn, 0, &m, &e), &e);
    wire_hello(&s->w, 1, 1, 2, 1000000000u, 10000000000u);
    scene_send(s);
    assert_int_equal(heard(s, W_OFFER, NULL), 1);
}

static void wire_landing(struct wire *w, uint32_t region, uint32_t slots, uint32_t bytes)
{
    uint8_t b[32] = {0};
    w_u32(w_u32(w_u32(b, region), slots), bytes);
    wire_frame(w, W_LANDING, 0, b, 32, NULL, 0, false);
}

static void wire_terms(struct wire *w, uint32_t credits, uint32_t landing)
{
    uint8_t b[96] = {0};
    w_u32(w_u32(b + 16, credits), landing);
    wire_frame(w, W_RESERVE, 0, b, 96, NULL, 0, false);
}

static void wire_credit(struct wire *w, uint32_t region, uint32_t slot)
{
    uint8_t b[16] = {0};
    w_u32(w_u32(b, region), slot);
    wire_frame(w, W_CREDIT, 0, b, 16, NULL, 0, false);
}

/* What was written so far, with descriptors. */
static void send_with(struct scene *s, const int *fds, size_t n)
{
    uint8_t control[CMSG_SPACE(4 * sizeof(int))] = {0};
    struct iovec iov = {s->w.data, s->w.n};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control,
                       .msg_controllen = CMSG_SPACE(4 * n)};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    struct pollfd p[2];
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(n * sizeof *fds);
    memcpy(CMSG_DATA(c), fds, n * sizeof *fds);
    assert_int_equal(transport_poll(s->peer, false, p), 1);
    assert_int_equal(sendmsg(p[0].fd, &m, MSG_NOSIGNAL), (ssize_t)s->w.n);
    s->w.n = 0;
}

static int memory(size_t bytes, int seals)
{
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
    if (seals)
        assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
    return fd;
}

#define ALL_SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

/* Lend `fd` as the region of the test's size; the producer must refuse it with this word. */
static void lend_case(int fd, const char *word)
{
    struct scene s;
    offered(&s, N);
    wire_landing(&s.w, 1, SLOTS, SLOT_BYTES);
    if (fd >= 0)
        send_with(&s, &fd, 1);
    if (fd >= 0)
        close(fd);
    gives_up(&s, BATON_ERR_PEER, word);
}

static void fields_case(uint32_t region, uint32_t slots, uint32_t bytes)
{
    struct scene s;
    int fd = memory((size_t)SLOTS * SLOT_BYTES, ALL_SEALS);
    offered(&s, N);
    wire_landing(&s.w, region, slots, bytes);
    send_with(&s, &fd, 1);
    close(fd);
    gives_up(&s, BATON_ERR_PEER, "LANDING of region");
}

static void test_hostile_lending(void **state)
{
    const size_t bytes = (size_t)SLOTS * SLOT_BYTES;
    int fds[2], before = n_fds();
    struct scene s;
    lend_case(-1, "LANDING without a descriptor");
    lend_case(memory(bytes, 0), "something else than a sealed region");
    lend_case(memory(bytes, F_SEAL_GROW | F_SEAL_SEAL), "something else than a sealed region");
    lend_case(memory(bytes, F_SEAL_SHRINK | F_SEAL_GROW), "something else than a sealed region");
    lend_case(memory(bytes, ALL_SEALS | F_SEAL_WRITE), "something else than a sealed region");
    lend_case(memory(bytes - 1, ALL_SEALS), "lends 511 bytes and says 512");
    lend_case(memory(bytes + 1, ALL_SEALS), "lends 513 bytes and says 512");
    lend_case(memory(0, ALL_SEALS), "lends 0 bytes");
    lend_case(open("/dev/zero", O_RDWR | O_CLOEXEC), "something else than a sealed region");
    lend_case(open("/proc/self/exe", O_RDONLY | O_CLOEXEC), "something else");
    fields_case(0, SLOTS, SLOT_BYTES);
    fields_case(1, 0, SLOT_BYTES);
    fields_case(1, 65, SLOT_BYTES);
    fields_case(1, UINT32_MAX, UINT32_MAX);
    fields_case(1, SLOTS, 0);
    fields_case(1, SLOTS, 65);
    fields_case(1, SLOTS, (4u << 20) + 64);
    /* twice */
    offered(&s, N);
    for (int i = 0; i < 2; i++) {
        fds[0] = memory(bytes, ALL_SEALS);
        wire_landing(&s.w, 1, SLOTS, SLOT_BYTES);
        send_with(&s, fds, 1);
        close(fds[0]);
    }
    gives_up(&s, BATON_ERR_PEER, "a second LANDING");
    /* two at once; with another frame; with one that does not match its check */
    fds[0] = memory(bytes, ALL_SEALS);
    fds[1] = memory(bytes, ALL_SEALS);
    offered(&s, N);
    wire_landing(&s.w, 1, SLOTS, SLOT_BYTES);
    send_with(&s, fds, 2);
    gives_up(&s, BATON_ERR_INTEGRITY, "more descriptors than one");
    offered(&s, N);
    wire_terms(&s.w, 0, 0);
    send_with(&s, fds, 1);
    gives_up(&s, BATON_ERR_PEER, "RESERVE with a descriptor");
    offered(&s, N);
    wire_landing(&s.w, 1, SLOTS, SLOT_BYTES);
    s.w.data[s.w.n - 1] ^= 1;
    send_with(&s, fds, 1);
    gives_up(&s, BATON_ERR_INTEGRITY, "does not match its check");
    /* to an end that takes none */
    landing_open(&s, false);
    hello(&s);
    send_with(&s, fds, 2);
    scene_send(&s);
    assert_int_equal(s.me.rc, 0);
    scene_close(&s);
    close(fds[0]);
    close(fds[1]);
    assert_int_equal(n_fds(), before);
}

static void lend(struct scene *s, uint32_t n)
{
    int fd = memory((size_t)SLOTS * SLOT_BYTES, ALL_SEALS);
    offered(s, n);
    wire_landing(&s->w, 1, SLOTS, SLOT_BYTES);
    send_with(s, &fd, 1);
    close(fd);
}

static void test_hostile_credits(void **state)
{
    static const uint32_t terms[][2] = {{SLOTS, 2}, {SLOTS - 1, 1}, {SLOTS + 1, 1}, {0, 1}, {1, 0}};
    static const uint32_t credits[][2] = {{1, 0}, {0, 0}, {2, 0}, {1, SLOTS}, {1, UINT32_MAX}};
    struct scene s;
    for (size_t i = 0; i < sizeof terms / sizeof *terms; i++) {
        lend(&s, N);
        wire_terms(&s.w, terms[i][0], terms[i][1]);
        gives_up(&s, BATON_ERR_PEER, "RESERVE with");
    }
    for (size_t i = 0; i < sizeof credits / sizeof *credits; i++) {
        lend(&s, N);
        wire_credit(&s.w, credits[i][0], credits[i][1]);
        gives_up(&s, BATON_ERR_PEER, "not in use");
    }
    offered(&s, N); /* nothing lent at all */
    wire_terms(&s.w, SLOTS, 1);
    gives_up(&s, BATON_ERR_PEER, "lent is region 0");
    lend(&s, N); /* given back twice */
    wire_terms(&s.w, SLOTS, 1);
    scene_send(&s);
    assert_int_equal(heard(&s, W_LAYER, NULL), SLOTS);
    for (int i = 0; i < 4; i++) /* the slot is used for three of the four pieces at most */
        wire_credit(&s.w, 1, 0);
    gives_up(&s, BATON_ERR_PEER, "not in use");
}

/* Without credits the producer waits: not one piece more, no spinning, heartbeats all the while;
 * each credit lets one piece go, into the slot that it named. */
static void test_credits_run_out(void **state)
{
    struct scene s;
    uint8_t body[32];
    const uint32_t n = 200; /* 4 leaves of each global slot, 1 of each local one */
    const int pieces = 2 * 4 + 2;
    lend(&s, n);
    wire_terms(&s.w, SLOTS, 1);
    scene_send(&s);
    assert_int_equal(heard(&s, W_LAYER, NULL), SLOTS);
    for (int sent = SLOTS; sent < pieces; sent++) {
        uint64_t wait;
        struct pollfd p[2];
        uint32_t slot = test_range(&seed, 0, SLOTS - 1);
        for (int i = 0; i < 20; i++)
            end_step(&s.me);
        assert_int_equal(s.me.rc, 0);
        assert_int_equal(heard(&s, W_LAYER, NULL), 0);
        assert_false(handoff_conn_busy(s.me.conn));
        assert_int_equal(handoff_conn_poll(s.me.conn, p, &wait), 1);
        assert_true(wait > 0 && !(p[0].events & POLLOUT));
        wire_credit(&s.w, 1, slot);
        scene_send(&s);
        assert_int_equal(heard(&s, W_LAYER, body), 1);
        uint64_t offset;
        memcpy(&offset, body + 24, 8);
        assert_true(offset == (uint64_t)slot * SLOT_BYTES);
    }
    assert_int_equal(heard(&s, W_COMMIT, NULL), 0);
    wire_credit(&s.w, 1, 0);
    scene_send(&s);
    assert_int_equal(heard(&s, W_COMMIT, NULL), 1);
    scene_close(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_second_implementation), cmocka_unit_test(test_hostile_offsets),
        cmocka_unit_test(test_hostile_layers),        cmocka_unit_test(test_hostile_lending),
        cmocka_unit_test(test_hostile_credits),       cmocka_unit_test(test_credits_run_out),
    };
    seed = test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
