/* SPDX-License-Identifier: Apache-2.0 */
/* From figures to a verdict. docs/check.md says the same in words. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "verify/verify_priv.h"

const struct verify_limits verify_limits_reference = {.logits = 3e-5, .kv = 6e-5, .margin = 0.001};
const struct verify_limits verify_limits_bf16 = {.logits = 5e-2, .kv = 1.5e-2, .margin = 0.4};

/* Each of these puts the first thing that does not hold into `why`, or leaves it. */

static void judge_slots(struct verify_case *c, const struct verify_diff *d, const char *who,
                        double budget)
{
    const struct verify_place *p = &d->first;
    if (!d->positions_ok)
        return;
    if (d->found)
        snprintf(c->why, sizeof c->why,
                 "%u of %u slots are exact at the %s: layer %u %c position %u head %u dim %u is "
                 "not what the producer holds",
                 d->slots_exact, d->slots_total, who, p->layer, p->which == KV_K ? 'K' : 'V',
                 p->position, p->head, p->dim);
    else if (!d->finite)
        snprintf(c->why, sizeof c->why, "the %s's cache holds a number that is not finite", who);
    else if (d->k_rel_rms > budget || d->v_rel_rms > budget)
        snprintf(c->why, sizeof c->why,
                 "conversion at the %s made errors of %.3g in K, %.3g in V; %.3g is the budget",
                 who, d->k_rel_rms, d->v_rel_rms, budget);
}

void verify_judge_error(struct verify_case *c, const struct baton_error *e)
{
    c->error = *e;
    c->verdict = e->code == BATON_ERR_INTEGRITY || c->slots.found ? VERIFY_FAIL : VERIFY_ERROR;
    snprintf(c->why, sizeof c->why, "%.230s", e->text);
    judge_slots(c, &c->slots, "consumer", INFINITY);
}

static void judge_positions(struct verify_case *c, const struct verify_cache *consumer,
                            const struct verify_cache *producer)
{
    if (c->slots.positions_ok && c->second_slots.positions_ok)
        return;
    const struct verify_cache *bad = consumer->positions_ok ? producer : consumer;
    snprintf(c->why, sizeof c->why, "positions at the %s: %s",
             !consumer->positions_ok   ? "consumer"
             : !producer->positions_ok ? "producer"
             : !c->slots.positions_ok  ? "consumer, in a later repeat"
                                       : "second consumer",
             bad->positions_ok ? "not those that the layers must hold" : bad->positions_why);
}

/* Between devices that compute alike, bits; else what rounding to bf16 may do. */
static void judge_tokens(struct verify_case *c)
{
    const struct verify_limits *l = &verify_limits_bf16;
    bool exact = c->same_numerics && c->control_exact;
    if (exact && !c->tokens_match)
        snprintf(c->why, sizeof c->why, "token %d is not native's", c->first_mismatch);
    else if (exact && (c->logits_rel_rms > 0 || c->native_k_rel_rms > 0 || c->native_v_rel_rms > 0))
        snprintf(c->why, sizeof c->why,
                 "not native's bits: relative RMS of logits %.3g, K %.3g, V %.3g",
                 c->logits_rel_rms, c->native_k_rel_rms, c->native_v_rel_rms);
    else if (exact && (c->second_argmax_differs || c->second_logits_rel_rms > 0))
        snprintf(c->why, sizeof c->why,
                 "the second consumer chose %u tokens otherwise than native, logits relative RMS "
                 "%.3g",
                 c->second_argmax_differs, c->second_logits_rel_rms);
    else if (c->second_argmax_mismatch)
        snprintf(c->why, sizeof c->why,
                 "%u of %u tokens differ from native's where its margin is above %g",
                 c->second_argmax_mismatch, c->n, l->margin);
    else if (c->second_logits_rel_rms > l->logits)
        snprintf(c->why, sizeof c->why, "logits relative RMS %.3g to native's, limit %g",
                 c->second_logits_rel_rms, l->logits);
}

static void judge_reference(struct verify_case *c)
{
    const struct verify_limits *l = &c->ref_limits;
    if (!c->reference)
        return;
    if (c->ref_argmax_mismatch)
        snprintf(c->why, sizeof c->why,
                 "native against cpu:ref: %u of %u tokens differ where the margin is above %g",
                 c->ref_argmax_mismatch, c->ref_steps, l->margin);
    else if (c->ref_logits_rel_rms > l->logits)
        snprintf(c->why, sizeof c->why,
                 "native against cpu:ref: logits relative RMS %.3g, limit %g",
                 c->ref_logits_rel_rms, l->logits);
    else if (c->ref_k_rel_rms > l->kv || c->ref_v_rel_rms > l->kv)
        snprintf(c->why, sizeof c->why,
                 "native against cpu:ref: relative RMS of K %.3g, V %.3g, limit %g",
                 c->ref_k_rel_rms, c->ref_v_rel_rms, l->kv);
}

/* The later a judge, the more it matters: what is wrong first explains what follows from it. */
void verify_judge(const struct verify_options *o, const struct verify_cache *consumer,
                  const struct verify_cache *producer, struct verify_case *c)
{
    double budget = verify_conversion_budget(producer->dtype, consumer->dtype);
    c->same_numerics = producer->dtype == consumer->dtype &&
                       !strcmp(producer->numerics, consumer->numerics);
    judge_reference(c);
    judge_tokens(c);
    if (!c->bit_exact_repeats && c->control_exact)
        snprintf(c->why, sizeof c->why, "repeats differ, and native runs do not");
    judge_slots(c, &c->second_slots, "second consumer", budget);
    judge_slots(c, &c->slots, "consumer", budget);
    judge_positions(c, consumer, producer);
    if (!c->control_exact && consumer->row_invariant)
        snprintf(c->why, sizeof c->why,
                 "two native runs differ on %s, which promises equal bits: nothing can be said",
                 o->decode);
    c->verdict = c->why[0] ? VERIFY_FAIL : VERIFY_PASS;
}
