/* SPDX-License-Identifier: Apache-2.0 */
/* One check: the reference, native twice and under the reference's tokens, the handoffs, a second
 * consumer. At most two engines are open at a time. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "verify/verify_priv.h"

/* A check under way. */
struct check {
    const struct verify_options *options;
    struct verify_ask ask;
    uint32_t ctx, vocab;
    uint64_t done, all; /* runs */
    struct verify_run ref, native, first;
    struct verify_case *out;
};

const char *const verify_run_names[] = {"reference", "native",  "control",
                                        "forced",    "handoff", "second"};

/* A run to make: what it is, and the one that it is compared with. */
struct step {
    enum verify_run_kind kind;
    uint32_t repeat;
    const int32_t *force;
    const struct verify_run *against;
};

static int run(struct check *x, struct verify_route *r, const struct step *s,
               struct verify_run *out, struct baton_error *e)
{
    struct verify_ask a = x->ask;
    a.force = s->force;
    r->left = &x->out->left;
    int rc = verify_route_run(r, &a, out, e);
    const struct verify_record record = {.kind = s->kind,
                                         .repeat = s->repeat,
                                         .vocab = x->vocab,
                                         .run = out,
                                         .against = s->against,
                                         .error = rc ? e : NULL};
    if (x->options->record)
        x->options->record(x->options->record_ctx, &record);
    x->done++;
    if (x->options->progress)
        x->options->progress(x->options->ctx, x->done, x->all);
    return rc;
}

/* ---- native ------------------------------------------------------------------------------- */

static int run_reference(struct check *x, struct baton_error *e)
{
    struct verify_route r;
    int rc = verify_route_native(&r, x->options, "cpu:ref", x->ctx, e);
    if (rc == 0)
        rc = run(x, &r, &(struct step){.kind = VERIFY_RUN_REFERENCE}, &x->ref, e);
    verify_route_close(&r);
    return rc;
}

/* The figures of the control: a second native run against the first. */
static int compare_control(struct check *x, const struct verify_run *again, struct baton_error *e)
{
    struct verify_case *c = x->out;
    struct verify_diff d;
    int rc = verify_cache_compare(again->cache, x->native.cache, &d, e);
    if (rc)
        return rc;
    for (uint32_t i = 0; i < again->n; i++)
        c->control_mismatch += again->ids[i] != x->native.ids[i];
    c->control_exact = d.slots_exact == d.slots_total &&
                       verify_runs_equal(again, &x->native, x->vocab);
    c->control_kv_rel_rms = d.k_rel_rms > d.v_rel_rms ? d.k_rel_rms : d.v_rel_rms;
    c->control_logits_rel_rms = verify_worst_row(again, &x->native, x->vocab);
    return 0;
}

/* Do rows computed from the same tokens agree: argmax where the wanted margin is above the limit?
 */
struct agreement {
    uint32_t differs, mismatch, below;
    double logits;
};

static struct agreement agree(const struct verify_run *forced, const struct verify_run *want,
                              double margin, uint32_t vocab)
{
    struct agreement a = {0};
    for (uint32_t i = 0; i < forced->n && i < want->n; i++) {
        bool below = (double)want->margins[i] <= margin;
        bool differs = forced->argmax[i] != want->argmax[i];
        a.below += below;
        a.differs += differs;
        a.mismatch += differs && !below;
    }
    a.logits = verify_worst_row(forced, want, vocab);
    return a;
}

static int compare_reference(struct check *x, const struct verify_run *forced,
                             struct baton_error *e)
{
    struct verify_case *c = x->out;
    struct verify_diff d;
    bool like = !strcmp(forced->cache->numerics, x->ref.cache->numerics);
    const struct verify_limits *l = like ? &verify_limits_reference : &verify_limits_bf16;
    int rc = verify_cache_compare(forced->cache, x->ref.cache, &d, e);
    if (rc)
        return rc;
    struct agreement a = agree(forced, &x->ref, l->margin, x->vocab);
    c->reference = true;
    c->ref_limits = *l;
    c->ref_steps = forced->n;
    c->ref_below_margin = a.below;
    c->ref_argmax_mismatch = a.mismatch;
    c->ref_logits_rel_rms = a.logits;
    c->ref_k_rel_rms = d.k_rel_rms;
    c->ref_v_rel_rms = d.v_rel_rms;
    return 0;
}

static int run_native(struct check *x, struct baton_error *e)
{
    struct verify_route r;
    struct verify_run other = {0};
    const struct step native = {.kind = VERIFY_RUN_NATIVE},
                      control = {.kind = VERIFY_RUN_CONTROL, .against = &x->native},
                      forced = {.kind = VERIFY_RUN_FORCED, .force = x->ref.ids, .against = &x->ref};
    int rc = verify_route_native(&r, x->options, x->options->decode, x->ctx, e);
    if (rc == 0)
        rc = run(x, &r, &native, &x->native, e);
    if (rc == 0)
        rc = run(x, &r, &control, &other, e);
    if (rc == 0)
        rc = compare_control(x, &other, e);
    verify_run_free(&other);
    if (rc == 0 && x->ref.n)
        rc = run(x, &r, &forced, &other, e);
    if (rc == 0 && x->ref.n)
        rc = compare_reference(x, &other, e);
    verify_run_free(&other);
    verify_route_close(&r);
    return rc;
}

/* ---- handed over -------------------------------------------------------------------------- */

/* A place that the consumer holds, drawn from the seed. */
static void plant(struct check *x, struct verify_route *r)
{
    const struct verify_cache *c = x->native.cache; /* the same geometry and positions */
    uint64_t seed = x->options->fault_seed;
    uint32_t draw[6];
    for (int i = 0; i < 6; i++) { /* Knuth's 64-bit linear congruence, its upper half */
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        draw[i] = (uint32_t)(seed >> 33);
    }
    struct engine_flip f = {.layer = draw[0] % c->n_layers,
                            .which = draw[1] % 2 ? KV_V : KV_K,
                            .head = draw[3] % c->kv_heads,
                            .dim = draw[4] % c->head_dim,
                            .bit = draw[5] % (8 * verify_width(c->dtype))};
    const struct verify_slot *s = &c->slots[2 * f.layer];
    if (s->n == 0)
        return;
    f.position = s->first + draw[2] % s->n;
    engine_plant_flip(r->consumer, &f);
    x->out->planted = true;
    x->out->flip = f;
}

/* Keep the worst of all repeats; the place is the first repeat's that has one. */
static void merge(struct verify_case *c, const struct verify_diff *d, uint32_t repeat)
{
    struct verify_diff *w = &c->slots;
    if (repeat == 0) {
        *w = *d;
        return;
    }
    if (d->found && !w->found) {
        w->first = d->first;
        c->slots_repeat = repeat;
    }
    w->found = w->found || d->found;
    w->elements += d->elements;
    w->finite = w->finite && d->finite;
    w->positions_ok = w->positions_ok && d->positions_ok;
    w->slots_exact = d->slots_exact < w->slots_exact ? d->slots_exact : w->slots_exact;
    w->k_rel_rms = d->k_rel_rms > w->k_rel_rms ? d->k_rel_rms : w->k_rel_rms;
    w->v_rel_rms = d->v_rel_rms > w->v_rel_rms ? d->v_rel_rms : w->v_rel_rms;
}

/* Prefill and what of the export it did not hide. The first repeat warms up caches and pages, so
 * it counts only where it is the only one. */
static void note_times(struct verify_case *c, const struct baton_stats *s, uint32_t repeat)
{
    double ms = (double)(s->prefill_ns + s->exposed_ns) / 1e6;
    if (repeat <= 1)
        c->prefill_export_ms[0] = c->prefill_export_ms[1] = ms;
    if (ms < c->prefill_export_ms[0])
        c->prefill_export_ms[0] = ms;
    if (ms > c->prefill_export_ms[1])
        c->prefill_export_ms[1] = ms;
    for (int i = 0; i < 9; i++)
        c->steps_by_lanes[i] += s->steps_by_lanes[i];
}

static int take_repeat(struct check *x, const struct verify_run *r, uint32_t repeat,
                       struct baton_error *e)
{
    struct verify_case *c = x->out;
    struct verify_diff d, between;
    int rc = verify_cache_compare(r->cache, r->sent, &d, e);
    if (rc)
        return rc;
    merge(c, &d, repeat);
    note_times(c, &r->stats, repeat);
    c->repeats = repeat + 1;
    if (repeat == 0)
        return 0;
    rc = verify_cache_compare(r->cache, x->first.cache, &between, e);
    if (rc)
        return rc;
    c->bit_exact_repeats = c->bit_exact_repeats && between.slots_exact == between.slots_total &&
                           verify_runs_equal(r, &x->first, x->vocab);
    return 0;
}

/* A run that ended after its import: what stands in the cache may be why, and is still compared. */
static void take_broken(struct check *x, const struct verify_run *r, uint32_t repeat)
{
    struct baton_error e;
    struct verify_diff d;
    if (r->cache && r->sent && verify_cache_compare(r->cache, r->sent, &d, &e) == 0)
        merge(x->out, &d, repeat);
}

static int run_repeats(struct check *x, struct baton_error *e)
{
    struct verify_route r;
    struct verify_run again = {0};
    int rc = verify_route_pair(&r, x->options, false, x->ctx, e);
    if (rc == 0 && x->options->plant_flip)
        plant(x, &r);
    x->out->bit_exact_repeats = true;
    for (uint32_t i = 0; i < x->options->repeats && rc == 0; i++) {
        struct verify_run *to = i ? &again : &x->first;
        const struct step s = {.kind = VERIFY_RUN_HANDOFF, .repeat = i, .against = &x->native};
        rc = run(x, &r, &s, to, e);
        if (rc == 0)
            rc = take_repeat(x, to, i, e);
        else
            take_broken(x, to, i);
        verify_run_free(&again);
    }
    verify_route_close(&r);
    return rc;
}

/* The same prompt into a consumer with an engine, pages and a way of its own, under native's
 * tokens, so that each step is compared whatever the steps before it chose. */
static int run_second(struct check *x, struct baton_error *e)
{
    struct verify_case *c = x->out;
    struct verify_route r;
    struct verify_run forced = {0};
    const struct step s = {
        .kind = VERIFY_RUN_SECOND, .force = x->native.ids, .against = &x->native};
    int rc = verify_route_pair(&r, x->options, true, x->ctx, e);
    if (rc == 0)
        rc = run(x, &r, &s, &forced, e);
    if (rc == 0)
        rc = verify_cache_compare(forced.cache, forced.sent, &c->second_slots, e);
    if (rc == 0) {
        struct agreement a = agree(&forced, &x->native, verify_limits_bf16.margin, x->vocab);
        c->second_argmax_differs = a.differs;
        c->second_argmax_mismatch = a.mismatch;
        c->second_logits_rel_rms = a.logits;
    }
    verify_run_free(&forced);
    verify_route_close(&r);
    return rc;
}

/* ---- consumer against native -------------------------------------------------------------- */

static int compare_texts(struct check *x)
{
    const struct verify_run *a = &x->first, *b = &x->native;
    char *texts[2] = {NULL, NULL};
    int match = -1;
    if (!baton_detokenize(x->options->model, a->ids, a->n, &texts[0], NULL) &&
        !baton_detokenize(x->options->model, b->ids, b->n, &texts[1], NULL))
        match = strcmp(texts[0], texts[1]) == 0;
    free(texts[0]);
    free(texts[1]);
    return match;
}

static int compare_native(struct check *x, struct baton_error *e)
{
    struct verify_case *c = x->out;
    struct verify_diff d;
    int rc = verify_cache_compare(x->first.cache, x->native.cache, &d, e);
    if (rc)
        return rc;
    c->native_k_rel_rms = d.k_rel_rms;
    c->native_v_rel_rms = d.v_rel_rms;
    c->first_mismatch = verify_first_mismatch(&x->first, &x->native);
    c->tokens_match = c->first_mismatch < 0;
    c->text_match = compare_texts(x);
    c->logits_rel_rms = verify_worst_row(&x->first, &x->native, x->vocab);
    return 0;
}

/* What the layers of each kind hold at the consumer. */
static void note_groups(struct verify_case *c, const struct verify_cache *cache)
{
    struct verify_group *groups[2] = {&c->global, &c->local};
    c->global.first = c->global.last = c->local.first = c->local.last = -1;
    for (uint32_t l = 0; l < cache->n_layers; l++) {
        struct verify_group *g = groups[cache->local[l] != 0];
        const struct verify_slot *s = &cache->slots[2 * l];
        g->layers++;
        if (s->n) {
            g->first = (int32_t)s->first;
            g->last = (int32_t)(s->first + s->n - 1);
        }
    }
}

/* ---- the check ---------------------------------------------------------------------------- */

static int check_all(struct check *x, struct baton_error *e)
{
    const struct verify_options *o = x->options;
    int rc = o->no_reference ? 0 : run_reference(x, e);
    if (rc == 0)
        rc = run_native(x, e);
    if (rc == 0)
        rc = run_repeats(x, e);
    if (rc == 0)
        rc = run_second(x, e);
    if (rc == 0)
        rc = compare_native(x, e);
    if (rc)
        return rc;
    note_groups(x->out, x->first.cache);
    verify_judge(o, x->first.cache, x->first.sent, x->out);
    return 0;
}

static int check_options(const struct verify_options *o, const struct verify_prompt *p,
                         struct baton_error *e)
{
    if (o->mode != BATON_WHOLE && o->mode != BATON_STREAM)
        return base_fail(e, BATON_ERR_USAGE, "a check needs a handoff: mode whole or stream");
    if (o->n == 0 || o->repeats == 0)
        return base_fail(e, BATON_ERR_USAGE, "a check of %u tokens in %u repeats", o->n,
                         o->repeats);
    if (p->n_ids == 0 || (uint64_t)p->n_ids + o->n > UINT32_MAX)
        return base_fail(e, BATON_ERR_INPUT, "a prompt of %zu tokens", p->n_ids);
    return 0;
}

/* A handoff that its own digests refuse does not hold; everything else that goes wrong leaves open
 * whether it does. */
void verify_check(const struct verify_options *o, const struct verify_prompt *p,
                  struct verify_case *out)
{
    struct baton_error e = {0};
    struct check x = {
        .options = o,
        .ask = {.ids = p->ids, .n_ids = p->n_ids, .n = o->n, .mode = o->mode},
        .ctx = (uint32_t)(p->n_ids + o->n),
        .vocab = baton_model_vocab(o->model),
        .all = 3 + (uint64_t)o->repeats + (o->no_reference ? 0 : 2),
        .out = out,
    };
    memset(out, 0, sizeof *out);
    out->tokens = (uint32_t)p->n_ids;
    out->n = o->n;
    out->first_mismatch = -1;
    int rc = check_options(o, p, &e);
    if (rc == 0)
        rc = check_all(&x, &e);
    if (rc)
        verify_judge_error(out, &e);
    verify_run_free(&x.ref);
    verify_run_free(&x.native);
    verify_run_free(&x.first);
}
