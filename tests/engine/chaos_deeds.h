/* SPDX-License-Identifier: Apache-2.0 */
/* What is drawn at random for pushes and pulls alike: models, engines, streams and their faults. */
#ifndef TESTS_ENGINE_CHAOS_DEEDS_H
#define TESTS_ENGINE_CHAOS_DEEDS_H

#include "chaos.h"
#include "transport/transport.h"

#define CTX 576u /* of engines: the longest prompt and its output */
#define WAVE 16u /* at most so many requests of a pair */

struct chaos {
    uint64_t n, seed;           /* as asked for */
    uint64_t random, unit;      /* unit: ns of a handoff here, as measured so far */
    struct chaos_model *models; /* [2] */
    struct chaos_book book;
    uint64_t next_id;
    uint32_t pairs[8], processes[8]; /* by enum fault, enum blow */
};

/* A random moment of the next `handoffs` handoffs. */
static inline void pause_somewhere(struct chaos *c, uint64_t handoffs)
{
    base_sleep_ns(test_random(&c->random) % (c->unit * handoffs + 1));
}

static inline struct chaos_model *any_model(struct chaos *c)
{
    return &c->models[test_range(&c->random, 0, 15) == 0];
}

/* To the stream between two engines of this process, or to them. */
enum fault { CALM, SHORT, FLIP, CUT, STALL, CLOSE_PRODUCER, CLOSE_CONSUMER, N_FAULTS };
static const char *const fault_names[N_FAULTS] = {
    "undisturbed", "short moves",     "a bit flipped",  "cut",
    "stalled",     "producer closed", "consumer closed"};

/* Both ends of a stream of any kind, one of them faulty where a fault is due. */
static inline void open_link(struct chaos *c, enum fault fault, struct transport *ends[2])
{
    static const enum transport_fault faults[] = {[SHORT] = TRANSPORT_FAULT_SHORT,
                                                  [FLIP] = TRANSPORT_FAULT_FLIP,
                                                  [CUT] = TRANSPORT_FAULT_CUT,
                                                  [STALL] = TRANSPORT_FAULT_STALL};
    struct transport *faulty;
    struct baton_error e;
    uint32_t kind = test_range(&c->random, 0, 2);
    int fds[2];
    if (kind == 0) {
        test_ok(transport_inproc_pair(test_range(&c->random, 64, 1u << 18), &ends[0], &ends[1], &e),
                &e);
    } else {
        test_ok(kind == 1 ? transport_socketpair(fds, &e) : transport_tcp_pair(fds, &e), &e);
        for (int i = 0; i < 2; i++)
            test_ok(transport_fd_open(fds[i], &ends[i], &e), &e);
    }
    if (fault < SHORT || fault > STALL)
        return;
    /* Log-uniform: HELLO is as likely to be hit as a layer. A consumer sends little. */
    uint32_t end = test_range(&c->random, 0, 1);
    uint64_t at = test_random(&c->random) %
                  (1ull << (end ? test_range(&c->random, 1, 12) : test_range(&c->random, 4, 21)));
    test_ok(
        transport_faulty_open(ends[end], faults[fault], at, test_random(&c->random), &faulty, &e),
        &e);
    ends[end] = faulty;
}

static inline struct baton_engine_options any_engine(struct chaos *c, enum baton_role role,
                                                     bool key)
{
    static const char secret[] = "a key that both roles were given";
    return (struct baton_engine_options){
        .struct_size = sizeof(struct baton_engine_options),
        .role = role,
        .device = rig_device(),
        .lanes = test_range(&c->random, 1, 4),
        .ctx = CTX,
        .threads = test_range(&c->random, 1, 2),
        .chunk = test_range(&c->random, 0, 2) ? test_range(&c->random, 16, 128) : 0,
        .peer_fd = -1,
        .key = key ? secret : NULL,
        .key_bytes = key ? sizeof secret : 0,
    };
}

/* To one of two processes. */
enum blow { LEAVE, STOP, STOP_CLOSE, STOP_KILL, KILL, N_BLOWS };
static const char *const blow_names[N_BLOWS] = {"left alone", "stopped for a while",
                                                "stopped, and continued after this end closed",
                                                "stopped, then killed", "killed"};

/* chaos_pull.c: the same over ticketed pulls. */
void chaos_pull_processes(struct chaos *c, uint64_t n);
void chaos_pull_engines(struct chaos *c, uint64_t n);

#endif
