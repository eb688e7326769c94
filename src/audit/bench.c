/* SPDX-License-Identifier: Apache-2.0 */
/* Pairs of runs over two routes. */
#include <stdlib.h>
#include <string.h>

#include "audit/bench.h"
#include "base/base.h"

const char *const audit_bench_time_names[AUDIT_BENCH_TIMES] = {
    "ttft",     "decode",           "total",  "itl_p50", "itl_p99", "prefill",
    "transfer", "exposed_transfer", "import", "verify",  "wall",
};

struct bench {
    const struct audit_bench_options *o;
    struct audit_bench *out;
    struct audit_route route[2];
    struct audit_ask *asks; /* [lanes] */
    int32_t *ids;           /* [lanes, prompt] */
    int32_t *first;         /* [lanes, n] of the first run of all */
    bool have_first;
};

/* ---- one run ------------------------------------------------------------------------------ */

static void add_times(struct audit_sample *s, const struct baton_stats *t, double share)
{
    const uint64_t ns[AUDIT_WALL] = {
        [AUDIT_TTFT] = t->ttft_ns,
        [AUDIT_DECODE] = t->decode_ns,
        [AUDIT_TOTAL] = t->ttft_ns + t->decode_ns,
        [AUDIT_ITL_P50] = t->itl_p50_ns,
        [AUDIT_ITL_P99] = t->itl_p99_ns,
        [AUDIT_PREFILL] = t->prefill_ns,
        [AUDIT_TRANSFER] = t->transfer_ns,
        [AUDIT_EXPOSED] = t->exposed_ns,
        [AUDIT_IMPORT] = t->import_ns,
        [AUDIT_VERIFY] = t->verify_ns,
    };
    for (int i = 0; i < AUDIT_WALL; i++)
        s->ms[i] += (double)ns[i] * 1e-6 * share;
}

static void compare(struct bench *b, const struct audit_output *o, uint32_t lane)
{
    int32_t *first = b->first + (size_t)lane * b->o->n;
    if (!b->have_first)
        memcpy(first, o->ids, o->n * sizeof *first);
    else if (memcmp(first, o->ids, o->n * sizeof *first) != 0)
        b->out->same_tokens = false;
}

static int take(struct bench *b, const struct audit_output *outputs, struct audit_sample *s,
                struct baton_error *e)
{
    for (uint32_t i = 0; i < b->o->lanes; i++) {
        const struct audit_output *o = &outputs[i];
        if (o->why.code) {
            *e = o->why;
            return e->code;
        }
        if (o->n != b->o->n)
            return base_fail(e, BATON_ERR_INTERNAL, "a request gave %u tokens of %u", o->n,
                             b->o->n);
        compare(b, o, i);
        add_times(s, &o->stats, 1.0 / b->o->lanes);
    }
    b->have_first = true;
    return 0;
}

static int run_once(struct bench *b, uint32_t arm, struct audit_sample *s, struct baton_error *e)
{
    struct audit_output outputs[8];
    uint32_t lanes = b->o->lanes;
    memset(s, 0, sizeof *s);
    uint64_t start = base_now_ns();
    int rc = audit_route_run(&b->route[arm], b->asks, outputs, lanes, s->steps, e);
    s->ms[AUDIT_WALL] = (double)(base_now_ns() - start) * 1e-6;
    if (rc == 0)
        rc = take(b, outputs, s, e);
    for (uint32_t i = 0; i < lanes; i++)
        audit_output_free(&outputs[i]);
    return rc;
}

/* ---- all of them -------------------------------------------------------------------------- */

static int run_pairs(struct bench *b, struct baton_error *e)
{
    const struct audit_bench_options *o = b->o;
    uint32_t all = (o->pairs + 1) * o->arms;
    int rc = 0;
    for (uint32_t i = 0; i < all && rc == 0; i++) { /* the first of each arm is for warmth alone */
        uint32_t pair = i / o->arms, arm = i % o->arms;
        struct audit_sample cold;
        if (o->arms == 2 && pair % 2 == 0 && pair > 0)
            arm = 1 - arm;
        rc = run_once(b, arm, pair ? &b->out->sample[arm][pair - 1] : &cold, e);
        if (o->progress)
            o->progress(o->ctx, i + 1, all);
    }
    return rc;
}

static int make_prompts(struct bench *b, struct baton_error *e)
{
    const struct audit_bench_options *o = b->o;
    uint32_t vocab = baton_model_vocab(o->route[0].model);
    uint64_t s = o->seed;
    b->ids = base_try_alloc((size_t)o->lanes * o->prompt, sizeof *b->ids, e);
    b->asks = base_try_alloc(o->lanes, sizeof *b->asks, e);
    b->first = base_try_alloc((size_t)o->lanes * o->n, sizeof *b->first, e);
    if (!b->ids || !b->asks || !b->first)
        return BATON_ERR_NOMEM;
    for (size_t i = 0; i < (size_t)o->lanes * o->prompt; i++) {
        s = s * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX generator */
        b->ids[i] = (int32_t)((s >> 33) % vocab);
    }
    for (uint32_t i = 0; i < o->lanes; i++)
        b->asks[i] = (struct audit_ask){b->ids + (size_t)i * o->prompt, o->prompt, o->n, true};
    return 0;
}

int audit_bench_run(const struct audit_bench_options *o, struct audit_bench *out,
                    struct baton_error *e)
{
    struct bench b = {.o = o, .out = out};
    memset(out, 0, sizeof *out);
    out->same_tokens = true;
    int rc = make_prompts(&b, e);
    for (uint32_t i = 0; i < o->arms && rc == 0; i++) {
        struct audit_route_options route = o->route[i];
        route.lanes = o->lanes;
        route.ctx = o->prompt + o->n;
        rc = audit_route_open(&b.route[i], &route, e);
    }
    if (rc == 0)
        rc = run_pairs(&b, e);
    for (int i = 0; i < 2; i++)
        audit_route_close(&b.route[i], &out->left);
    free(b.ids);
    free(b.asks);
    free(b.first);
    return rc;
}

/* ---- what comes of it --------------------------------------------------------------------- */

static bool holds(const struct audit_route_options *r, const char *device)
{
    return !strcmp(r->decode, device) || (r->mode != BATON_NATIVE && !strcmp(r->prefill, device));
}

static bool within(const struct audit_route_options *a, const struct audit_route_options *b)
{
    return holds(b, a->decode) && (a->mode == BATON_NATIVE || holds(b, a->prefill));
}

bool audit_bench_alike(const struct audit_route_options *a, const struct audit_route_options *b)
{
    return a->threads == b->threads && within(a, b) && within(b, a);
}

bool audit_bench_ratio(const struct audit_bench *b, uint32_t pairs, enum audit_bench_time time,
                       struct audit_ratio *out)
{
    double x[AUDIT_RATIO_MOST], y[AUDIT_RATIO_MOST];
    for (uint32_t i = 0; i < pairs; i++) {
        x[i] = b->sample[0][i].ms[time];
        y[i] = b->sample[1][i].ms[time];
        if (!(x[i] > 0 && y[i] > 0))
            return false;
    }
    *out = audit_ratio(x, y, pairs, 1);
    return true;
}
