/* SPDX-License-Identifier: Apache-2.0 */
/* The probe of lanes: a prompt of its own in each lane, one token on. A lane's row of logits must
 * be what the same prompt gives in lane 0 with nobody beside it: in every lane, beside all
 * neighbours and beside spare lanes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "verify/probe_priv.h"
#include "verify/verify.h"

#define LIMIT_LANES 1e-3 /* of docs/probes.md: below it only last bits differ */
#define SHORTEST 20u     /* the prompt of number i has i tokens more */
#define POSITIONS 128u

struct lanes {
    struct verify_lanes lanes;
    uint32_t n, vocab;
    bool exact;    /* the device says that its rows are row-invariant */
    int32_t *ids;  /* prompt i begins at ids[i] */
    float *alone;  /* [n, vocab] of each prompt in lane 0 */
    float *logits; /* [n, vocab] of a step */
    struct verify_finding *out;
};

static uint32_t length_of(uint32_t prompt)
{
    return SHORTEST + prompt;
}

static int fill(struct lanes *x, uint32_t lane, uint32_t prompt, struct baton_error *e)
{
    return verify_lane_prefill(&x->lanes, lane, x->ids + prompt, length_of(prompt), x->logits, e);
}

/* prompt[lane], or -1 for a spare lane: filled, one step, emptied. */
static int step(struct lanes *x, const int32_t *prompt, struct baton_error *e)
{
    int32_t next[VERIFY_LANES_MAX] = {0};
    int rc = 0;
    for (uint32_t i = 0; i < x->n && rc == 0; i++) {
        if (prompt[i] < 0)
            continue;
        rc = fill(x, i, (uint32_t)prompt[i], e);
        next[i] = x->ids[(uint32_t)prompt[i] + length_of((uint32_t)prompt[i])];
    }
    if (rc == 0)
        rc = verify_lanes_step(&x->lanes, next, x->logits, e);
    for (uint32_t i = 0; i < x->n; i++)
        verify_lane_free(&x->lanes, i);
    return rc;
}

static const float *row(const struct lanes *x, const float *rows, uint32_t i)
{
    return rows + (size_t)i * x->vocab;
}

/* Whose row is it, if it is not its own? -1: nobody's. */
static int32_t owner_of(const struct lanes *x, const float *logits)
{
    for (uint32_t i = 0; i < x->n; i++)
        if (verify_rel_rms(row(x, x->alone, i), logits, x->vocab) <= LIMIT_LANES)
            return (int32_t)i;
    return -1;
}

static void explain(struct lanes *x, uint32_t lane, const int32_t *prompt, bool wrong)
{
    uint32_t beside = 0;
    int32_t owner = owner_of(x, row(x, x->logits, lane));
    for (uint32_t i = 0; i < x->n; i++)
        beside += i != lane && prompt[i] >= 0;
    x->out->verdict = VERIFY_PROBE_FAIL;
    snprintf(x->out->why, sizeof x->out->why, "lane %u beside %u others %s", lane, beside,
             !wrong      ? "differs in the last bits from lane 0 alone"
             : owner < 0 ? "gives other logits than the same prompt in lane 0 alone"
                         : "gives another lane's logits");
}

/* The first lane that fails stays the finding; else the largest difference. */
static void compare(struct lanes *x, const int32_t *prompt)
{
    struct verify_finding *f = x->out;
    for (uint32_t i = 0; i < x->n && f->verdict != VERIFY_PROBE_FAIL; i++) {
        if (prompt[i] < 0)
            continue;
        const float *want = row(x, x->alone, (uint32_t)prompt[i]), *have = row(x, x->logits, i);
        double d = verify_rel_rms(want, have, x->vocab);
        bool wrong = !(d <= LIMIT_LANES);
        bool bits = x->exact && memcmp(want, have, x->vocab * sizeof *want) != 0;
        if (d > f->value || wrong || bits) {
            f->value = d;
            f->lane = (int32_t)i;
            f->position = length_of((uint32_t)prompt[i]);
        }
        if (wrong || bits)
            explain(x, i, prompt, wrong);
    }
}

static int run_alone(struct lanes *x, struct baton_error *e)
{
    int rc = 0;
    for (uint32_t p = 0; p < x->n && rc == 0; p++) {
        int32_t prompt[VERIFY_LANES_MAX] = {(int32_t)p, -1, -1, -1, -1, -1, -1, -1};
        rc = step(x, prompt, e);
        memcpy(x->alone + (size_t)p * x->vocab, x->logits, x->vocab * sizeof *x->alone);
    }
    return rc;
}

/* Every prompt in every lane beside all others, then one prompt in every lane beside none. */
static int run_all(struct lanes *x, struct baton_error *e)
{
    int32_t prompt[VERIFY_LANES_MAX] = {0};
    int rc = run_alone(x, e);
    for (uint32_t turn = 0; turn < 2 * x->n && rc == 0; turn++) {
        for (uint32_t i = 0; i < x->n; i++)
            prompt[i] = turn < x->n ? (int32_t)((i + turn) % x->n) : i == turn - x->n ? 0 : -1;
        rc = step(x, prompt, e);
        if (rc == 0)
            compare(x, prompt);
    }
    return rc;
}

int verify_probe_lanes(const struct baton_model *m, const char *device, uint32_t threads,
                       struct verify_finding *out, struct baton_error *e)
{
    struct verify_bench bench = {0};
    struct lanes x = {.out = out};
    int rc = verify_bench_open(&bench, m, device, threads, e);
    if (rc)
        return rc;
    const struct baton_caps *caps = device_caps(bench.device);
    x.n = caps->max_lanes < VERIFY_LANES_MAX ? caps->max_lanes : VERIFY_LANES_MAX;
    x.exact = caps->row_invariant;
    x.vocab = bench.config->vocab;
    out->limit = LIMIT_LANES;
    out->layer = bench.config->n_layers - 1;
    out->lane = 0;
    snprintf(out->tensor, sizeof out->tensor, "logits");
    x.alone = base_try_alloc((size_t)x.n * x.vocab, sizeof *x.alone, e);
    x.logits = base_try_alloc((size_t)x.n * x.vocab, sizeof *x.logits, e);
    rc = x.alone && x.logits
             ? verify_probe_ids(bench.config, 2 * VERIFY_LANES_MAX + SHORTEST, &x.ids, e)
             : BATON_ERR_NOMEM;
    if (rc == 0)
        rc = verify_lanes_open(&x.lanes, &bench, x.n, POSITIONS, e);
    if (rc == 0)
        rc = run_all(&x, e);
    if (x.lanes.bench)
        verify_lanes_close(&x.lanes);
    verify_bench_close(&bench);
    free(x.ids);
    free(x.alone);
    free(x.logits);
    return rc;
}
