/* SPDX-License-Identifier: Apache-2.0 */
/* Random caches over every kind of stream: pages, digests, ids and logits arrive as they were. */
#include "rig.h"

static uint64_t seed;

/* UNIX: the payload through a landing region. INLINE: a Unix socket without one. */
enum stream_kind { INPROC, UNIX, INLINE, TCP, N_KINDS };

static void pair_open(enum stream_kind kind, struct transport *t[2])
{
    struct baton_error e;
    int fds[2];
    if (kind == INPROC) {
        size_t capacity = test_range(&seed, 0, 1) ? test_range(&seed, 1, 300) : 1u << 16;
        test_ok(transport_inproc_pair(capacity, &t[0], &t[1], &e), &e);
        return;
    }
    test_ok(kind == TCP ? transport_tcp_pair(fds, &e) : transport_socketpair(fds, &e), &e);
    test_ok(transport_fd_open(fds[0], &t[0], &e), &e);
    test_ok(transport_fd_open(fds[1], &t[1], &e), &e);
}

static void geometry_random(struct kv_geometry *g)
{
    static const uint32_t dims[] = {1, 2, 8, 17, 64, 128};
    static const uint32_t dtypes[] = {BATON_F32, BATON_F16, BATON_BF16};
    memset(g, 0, sizeof *g);
    g->n_layers = test_range(&seed, 1, 5);
    g->kv_heads = test_range(&seed, 1, 4);
    g->head_dim = dims[test_range(&seed, 0, 5)];
    g->dtype = dtypes[test_range(&seed, 0, 2)];
    uint32_t kinds = test_range(&seed, 0, 2); /* all global, all local, mixed */
    for (uint32_t l = 0; l < g->n_layers; l++)
        g->local[l] = kinds == 2 ? (uint8_t)test_range(&seed, 0, 1) : (uint8_t)kinds;
    g->window = kinds ? test_range(&seed, 2, 300) : 0;
}

static uint32_t length_random(void)
{
    static const uint32_t odd[] = {1, 2, 63, 64, 65, 127, 128, 129, 511, 512, 513};
    return test_range(&seed, 0, 1) ? odd[test_range(&seed, 0, 10)] : test_range(&seed, 1, 700);
}

/* One request of a case. */
struct job {
    struct truth truth;
    struct cache from, into;
    int32_t *ids;
    uint32_t n, held, chunk, done;
    float *logits;
    uint32_t vocab;
    bool committed, early, from_held;
};

static void job_open(struct job *j, const struct kv_geometry *g, uint32_t n)
{
    memset(j, 0, sizeof *j);
    j->n = n;
    j->held = test_range(&seed, 0, 2) ? 0 : test_range(&seed, 0, j->n - 1);
    j->chunk = test_range(&seed, 0, 2) ? test_range(&seed, 1, 200) : j->n;
    j->early = test_range(&seed, 0, 1); /* queue layers before RESERVE came */
    j->from_held = test_range(&seed, 0, 1);
    truth_open(&j->truth, g, j->n, &seed);
    cache_open(&j->from, g, j->n, j->chunk);
    cache_open(&j->into, g, j->n, 1);
    cache_import(&j->into, j->n);
    for (uint32_t l = 0; l < g->n_layers; l++) {
        uint32_t first = kv_retained_first(g, l, j->n);
        truth_put(&j->truth, &kv_seq_views(j->into.seq)[l], l, first, j->held);
    }
    j->ids = malloc(j->n * sizeof *j->ids);
    for (uint32_t i = 0; i < j->n; i++)
        j->ids[i] = (int32_t)test_range(&seed, 0, INT32_MAX);
    j->vocab = test_range(&seed, 0, 3) ? test_range(&seed, 1, 3000) : 600000;
    j->logits = malloc(j->vocab * sizeof *j->logits);
    for (uint32_t i = 0; i < j->vocab; i++)
        j->logits[i] = test_normal(&seed);
}

static void job_close(struct job *j)
{
    truth_close(&j->truth);
    cache_close(&j->from);
    cache_close(&j->into);
    free(j->ids);
    free(j->logits);
}

/* The next chunk is "computed", layer by layer, and queued. A chunk that the consumer holds may be
 * left out, once that is known. */
static void job_chunk(struct job *j, struct end *p, uint64_t id)
{
    struct baton_error e;
    uint32_t m = j->n - j->done < j->chunk ? j->n - j->done : j->chunk;
    test_ok(kv_seq_reserve(j->from.seq, m, &e), &e);
    for (uint32_t l = 0; l < j->truth.g.n_layers; l++) {
        const struct baton_kv_view *v = &kv_seq_views(j->from.seq)[l];
        uint32_t first = j->done, end = j->done + m;
        truth_put(&j->truth, v, l, first, end);
        if (j->from_held && p->reserves[id] && first < j->held && !j->early)
            first = j->held;
        if (first < end)
            test_ok(handoff_layer(p->conn, id, l, v, first, end - first, &e), &e);
    }
    kv_seq_advance(j->from.seq, m);
    j->done += m;
}

static struct handoff_commit job_commit(const struct job *j)
{
    return (struct handoff_commit){.argmax = 0,
                                   .margin = 0.5f,
                                   .logits = j->logits,
                                   .vocab = j->vocab,
                                   .prefill_ns = 11,
                                   .compute_end_ns = 22};
}

static void job_step(struct job *j, struct end *p, uint64_t id)
{
    struct baton_error e;
    if (j->committed || (!j->early && !p->reserves[id]))
        return;
    if (j->done < j->n) {
        job_chunk(j, p, id);
        return;
    }
    struct handoff_commit m = job_commit(j);
    test_ok(handoff_commit(p->conn, id, &m, &e), &e);
    j->committed = true;
}

static void job_check(const struct job *j, const struct end *p, const struct end *c, uint64_t id,
                      bool digest, bool landed)
{
    uint8_t want[32] = {0};
    const struct handoff_result *r = &c->result[id];
    assert_int_equal(p->ends[id], 1);
    assert_int_equal(c->ends[id], 1);
    if (p->why[id].code || c->why[id].code)
        fail_msg("ended with '%s' and '%s'", p->why[id].text, c->why[id].text);
    assert_int_equal(c->offers[id], 1);
    assert_int_equal(c->commits[id], 1);
    assert_int_equal(p->reserves[id], 1);
    assert_int_equal(p->held[id], j->held);
    assert_true(c->ids_sum[id] == ids_sum(j->ids, j->n));
    assert_int_equal(c->offer[id].max_new, 7);
    assert_int_equal(c->offer[id].digest, digest);
    assert_memory_equal(c->offer[id].geometry.local, j->truth.g.local, j->truth.g.n_layers);
    assert_true(cache_equals(&j->into, &j->truth));
    assert_int_equal(r->digested, digest);
    if (digest)
        cache_digest(&j->into, j->n, j->held, want);
    assert_memory_equal(r->digest, want, 32);
    assert_int_equal(r->slots, 2 * j->truth.g.n_layers);
    assert_true(r->commit.argmax == 0 && r->commit.margin == 0.5f && r->commit.prefill_ns == 11 &&
                r->commit.compute_end_ns == 22);
    assert_true(r->first_byte_ns > 0 && r->first_byte_ns <= r->last_byte_ns);
    uint64_t bytes = 0;
    for (uint32_t l = 0; l < j->truth.g.n_layers; l++)
        bytes += 2 * kv_piece_bytes(j->truth.g.dtype, j->truth.g.kv_heads, j->truth.g.head_dim,
                                    j->n - slot_first(&j->truth.g, l, j->n, j->held));
    assert_true(r->bytes == bytes);
    assert_true(r->landed_bytes == (landed ? bytes : 0));
    assert_true((c->logits[id] != NULL) == c->want_logits);
    if (c->want_logits)
        assert_memory_equal(c->logits[id], j->logits, j->vocab * sizeof(float));
}

/* Regions of every size: one slot, many, slots of one leaf, slots too small for one. */
struct landing {
    struct handoff_options p, c;
    bool used;
};

static struct landing landing_random(const struct kv_geometry *g, enum stream_kind kind)
{
    struct landing x = {{.producer = true}, {.producer = false}, kind == UNIX};
    size_t leaf = kv_piece_bytes(g->dtype, g->kv_heads, g->head_dim, KV_BLOCK);
    uint32_t least = (uint32_t)(leaf + 63) / 64 * 64;
    if (test_range(&seed, 0, 1))
        x.c.landing_slots = test_range(&seed, 1, test_range(&seed, 0, 1) ? 3 : 64);
    if (test_range(&seed, 0, 1))
        x.c.landing_slot_bytes = least + 64 * test_range(&seed, 0, test_range(&seed, 0, 999));
    if (least > 64 && test_range(&seed, 0, 9) == 0) {
        x.c.landing_slot_bytes = 64 * test_range(&seed, 1, least / 64 - 1);
        x.used = x.used && leaf <= x.c.landing_slot_bytes;
    }
    if (kind == INLINE)
        (test_range(&seed, 0, 1) ? &x.p : &x.c)->no_landing = true;
    return x;
}

static void one_case(enum stream_kind kind, bool faulty)
{
    struct transport *t[2];
    struct baton_error e;
    struct end p, c;
    struct job jobs[3];
    struct kv_geometry g;
    uint32_t n_jobs = test_range(&seed, 1, 3);
    bool answered[3] = {false};
    bool digest = test_range(&seed, 0, 3) != 0;
    pair_open(kind, t);
    for (int i = 0; faulty && i < 2; i++)
        test_ok(transport_faulty_open(t[i], TRANSPORT_FAULT_SHORT, test_range(&seed, 0, 200),
                                      test_random(&seed), &t[i], &e),
                &e);
    geometry_random(&g);
    const struct landing x = landing_random(&g, kind);
    end_open_with(&p, t[0], &x.p);
    end_open_with(&c, t[1], &x.c);
    c.answer = test_range(&seed, 0, 1) ? RIG_RESERVE : RIG_WAIT;
    c.want_logits = test_range(&seed, 0, 1);
    for (uint32_t i = 0; i < n_jobs; i++) {
        struct handoff_offer o;
        job_open(&jobs[i], &g, length_random());
        c.into[i] = &jobs[i].into;
        c.give_held[i] = jobs[i].held;
        offer_fill(&o, i, &g, jobs[i].ids, jobs[i].n, digest);
        o.stream = jobs[i].early;
        test_ok(handoff_offer(p.conn, &o, &e), &e);
    }
    for (uint32_t over = 0, spins = 0; over < n_jobs; spins++) {
        over = 0;
        both_step(&p, &c, (int)test_range(&seed, 1, 2));
        if (p.rc || c.rc)
            fail_msg("died: '%s' '%s'", p.death.text, c.death.text);
        for (uint32_t i = 0; i < n_jobs; i++) {
            if (c.answer == RIG_WAIT && c.offers[i] && !answered[i] && spins > 20) {
                end_reserve(&c, i);
                answered[i] = true;
            }
            if (!p.ends[i] && test_range(&seed, 0, 1))
                job_step(&jobs[i], &p, i);
            over += p.ends[i] && c.ends[i];
        }
    }
    for (uint32_t i = 0; i < n_jobs; i++) {
        job_check(&jobs[i], &p, &c, i, digest, x.used);
        job_close(&jobs[i]);
    }
    end_close(&p);
    end_close(&c);
}

static void run_kind(enum stream_kind kind, bool faulty, int n)
{
    for (int i = 0; i < n; i++)
        one_case(kind, faulty);
}

static void test_inproc(void **state)
{
    run_kind(INPROC, false, 60);
}

static void test_unix(void **state)
{
    run_kind(UNIX, false, 60);
}

static void test_inline(void **state)
{
    run_kind(INLINE, false, 30);
}

static void test_tcp(void **state)
{
    run_kind(TCP, false, 30);
}

static void test_short(void **state)
{
    run_kind(INPROC, true, 20);
    run_kind(UNIX, true, 20);
}

/* Rows so wide that one leaf is larger than the aim of a piece, and a slot of several pieces. */
static void test_large(void **state)
{
    struct kv_geometry g = {.n_layers = 2,
                            .kv_heads = 64,
                            .head_dim = 256,
                            .dtype = BATON_F32,
                            .window = 100,
                            .local = {0, 1}};
    struct transport *t[2];
    struct baton_error e;
    struct end p, c;
    struct job j;
    struct handoff_offer o;
    pair_open(UNIX, t);
    end_open(&p, t[0], true, 0);
    end_open(&c, t[1], false, 0);
    job_open(&j, &g, test_range(&seed, 200, 400));
    c.into[0] = &j.into;
    c.give_held[0] = j.held;
    offer_fill(&o, 0, &g, j.ids, j.n, true);
    test_ok(handoff_offer(p.conn, &o, &e), &e);
    while (!p.ends[0] || !c.ends[0]) {
        both_step(&p, &c, 1);
        job_step(&j, &p, 0);
    }
    job_check(&j, &p, &c, 0, true, true);
    assert_true(c.result[0].pieces >= 2 * ((j.n - j.held) / 64));
    job_close(&j);
    end_close(&p);
    end_close(&c);
}

/* The owner's loop: poll() until something is to be done, never longer than asked for. */
static void test_poll(void **state)
{
    struct transport *t[2];
    struct baton_error e;
    struct end p, c;
    struct job j;
    struct handoff_offer o;
    struct kv_geometry g;
    pair_open(UNIX, t);
    end_open(&p, t[0], true, 0);
    end_open(&c, t[1], false, 0);
    geometry_random(&g);
    job_open(&j, &g, length_random());
    j.early = true;
    c.into[0] = &j.into;
    c.give_held[0] = j.held;
    offer_fill(&o, 0, &g, j.ids, j.n, true);
    test_ok(handoff_offer(p.conn, &o, &e), &e);
    while (!j.committed)
        job_step(&j, &p, 0);
    assert_true(handoff_conn_busy(p.conn));
    int sleeps = 0;
    while (!p.ends[0] || !c.ends[0]) {
        struct pollfd fds[4];
        uint64_t a, b;
        int n = handoff_conn_poll(p.conn, fds, &a);
        n += handoff_conn_poll(c.conn, fds + n, &b);
        uint64_t wait = a < b ? a : b;
        assert_true(n >= 2 && wait <= 10000000000u);
        int ready = poll(fds, (nfds_t)n, (int)(wait / 1000000) + 1);
        sleeps += ready == 0;
        both_step(&p, &c, 1);
    }
    assert_int_equal(sleeps, 0);
    job_check(&j, &p, &c, 0, true, true);
    job_close(&j);
    end_close(&p);
    end_close(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_inproc), cmocka_unit_test(test_unix),  cmocka_unit_test(test_tcp),
        cmocka_unit_test(test_inline), cmocka_unit_test(test_short), cmocka_unit_test(test_large),
        cmocka_unit_test(test_poll),
    };
    seed = test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
