/* SPDX-License-Identifier: Apache-2.0 */
/* Helpers of the engine tests: models, engines, runs with their logits, pairs over a socket. */
#ifndef TESTS_ENGINE_RIG_H
#define TESTS_ENGINE_RIG_H

#include <sys/socket.h>
#include <unistd.h>

#include "base/base.h"
#include "engine/engine.h"
#include "tests/test.h"

/* Under a sanitizer compute is many times slower and the threads are what is looked at: fewer and
 * shorter cases. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define RIG_SHORT 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define RIG_SHORT 1
#endif
#endif
#ifndef RIG_SHORT
#define RIG_SHORT 0
#endif

#define RIG_MODELS 4
static const char *const rig_models[RIG_MODELS] = {"qwen3-tiny", "qwen3-small", "koni-tiny",
                                                   "gemma3-tiny"};

static inline struct baton_model *rig_model(const char *name)
{
    struct baton_error e;
    struct baton_model *m = NULL;
    char path[64];
    snprintf(path, sizeof path, "models/%s", name);
    const struct baton_model_options o = {.struct_size = sizeof o, .path = test_path(path)};
    test_ok(baton_model_open(&o, &m, &e), &e);
    return m;
}

/* The fast device where this machine has it; cpu:ref is slow and always there. */
static inline const char *rig_device(void)
{
    struct device *d;
    if (device_open("cpu", &d, NULL))
        return "cpu:ref";
    device_close(d);
    return "cpu";
}

static inline struct baton_engine *rig_engine(struct baton_model *m, enum baton_role role,
                                              const char *device, uint32_t lanes, uint32_t ctx,
                                              uint32_t chunk, int fd)
{
    struct baton_error e;
    struct baton_engine *en = NULL;
    const struct baton_engine_options o = {
        .struct_size = sizeof o,
        .role = role,
        .device = device,
        .lanes = lanes,
        .ctx = ctx,
        .threads = 2,
        .chunk = chunk,
        .peer_fd = fd,
        .key = "a key that both roles were given",
        .key_bytes = 32,
    };
    test_ok(baton_engine_open(m, &o, &en, &e), &e);
    return en;
}

static inline struct baton_request *rig_submit(struct baton_engine *en,
                                               const struct baton_request_options *o)
{
    struct baton_error e;
    struct baton_request *r = NULL;
    test_ok(baton_submit(en, o, &r, &e), &e);
    return r;
}

static inline struct baton_stats rig_stats(struct baton_request *r)
{
    struct baton_stats s;
    memset(&s, 0xEE, sizeof s);
    s.struct_size = sizeof s;
    assert_int_equal(baton_request_stats(r, &s), 0);
    return s;
}

/* What a run gave: ids, and its rows of logits where it wanted them. */
struct rig_run {
    uint32_t n;
    int32_t ids[256];
    float margins[256];
    float *rows; /* [256, vocab] or NULL */
};

static inline void rig_take(struct rig_run *run, const struct baton_token *t, uint32_t vocab)
{
    assert_int_equal(t->index, run->n);
    assert_true(run->n < 256);
    if (t->logits) {
        if (!run->rows)
            run->rows = calloc((size_t)256 * vocab, sizeof *run->rows);
        memcpy(run->rows + (size_t)run->n * vocab, t->logits, vocab * sizeof *run->rows);
    }
    run->margins[run->n] = t->margin;
    run->ids[run->n++] = t->id;
}

/* Pull to the end; the last result. */
static inline int rig_pull(struct baton_request *r, struct rig_run *run, uint32_t vocab,
                           struct baton_error *e)
{
    struct baton_token t;
    int rc;
    memset(run, 0, sizeof *run);
    memset(e, 0, sizeof *e);
    while ((rc = baton_next(r, &t, -1, e)) == 1)
        rig_take(run, &t, vocab);
    return rc;
}

static inline void rig_run_free(struct rig_run *run)
{
    free(run->rows);
    run->rows = NULL;
}

/* Alone on an engine of its own with one lane. */
static inline void rig_alone(struct baton_model *m, const char *device, uint32_t ctx,
                             uint32_t chunk, const struct baton_request_options *o,
                             struct rig_run *run)
{
    struct baton_error e;
    struct baton_engine *en = rig_engine(m, BATON_BOTH, device, 1, ctx, chunk, -1);
    struct baton_request *r = rig_submit(en, o);
    test_ok(rig_pull(r, run, baton_model_vocab(m), &e), &e);
    baton_request_close(r);
    assert_int_equal(engine_blocks_used(en), 0);
    baton_engine_close(en);
}

/* The same tokens and, where both have them, the same logit bits. */
static inline void rig_equal(const struct rig_run *a, const struct rig_run *b, uint32_t vocab,
                             const char *what)
{
    if (a->n != b->n)
        fail_msg("%s: %u tokens, %u were due", what, a->n, b->n);
    for (uint32_t i = 0; i < a->n; i++) {
        if (a->ids[i] != b->ids[i])
            fail_msg("%s: token %u is %d, %d was due", what, i, a->ids[i], b->ids[i]);
        if (memcmp(&a->margins[i], &b->margins[i], sizeof a->margins[i]))
            fail_msg("%s: margin %u is %g, %g was due", what, i, a->margins[i], b->margins[i]);
        if (a->rows && b->rows &&
            memcmp(a->rows + (size_t)i * vocab, b->rows + (size_t)i * vocab,
                   vocab * sizeof *a->rows))
            fail_msg("%s: logit bits of token %u differ", what, i);
    }
}

static inline void rig_prompt(uint64_t *seed, uint32_t vocab, int32_t *ids, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)test_range(seed, 0, vocab - 1);
}

/* ---- a producer and a consumer in one process ---------------------------------------------- */

struct rig_pair {
    struct baton_model *model;
    struct baton_engine *producer, *consumer;
    uint32_t vocab;
};

static inline void rig_pair_open(struct rig_pair *p, struct baton_model *m, const char *device,
                                 uint32_t lanes, uint32_t ctx, uint32_t chunk)
{
    int fds[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    p->model = m;
    p->vocab = baton_model_vocab(m);
    p->producer = rig_engine(m, BATON_PRODUCER, device, lanes, ctx, chunk, fds[0]);
    p->consumer = rig_engine(m, BATON_CONSUMER, device, lanes, ctx, chunk, fds[1]);
}

/* Nothing is left of any request at either end. */
static inline void rig_pair_close(struct rig_pair *p)
{
    if (p->producer)
        assert_int_equal(engine_blocks_used(p->producer), 0);
    if (p->consumer)
        assert_int_equal(engine_blocks_used(p->consumer), 0);
    baton_engine_close(p->producer);
    baton_engine_close(p->consumer);
}

#endif
