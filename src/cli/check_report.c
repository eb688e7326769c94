/* SPDX-License-Identifier: Apache-2.0 */
/* check: the result as JSON and as a table. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "audit/audit.h"
#include "base/base.h"
#include "cli/check_priv.h"
#include "cli/run_priv.h"

static const char *const verdict_names[] = {"pass", "fail", "error"};

enum verify_verdict cli_check_verdict(const struct cli_check *c)
{
    enum verify_verdict all = VERIFY_PASS;
    for (uint32_t i = 0; i < c->n_cases; i++) {
        enum verify_verdict v = c->cases[i].result.verdict;
        if (v == VERIFY_FAIL || (v == VERIFY_ERROR && all == VERIFY_PASS))
            all = v;
    }
    return all;
}

bool cli_check_differs(const struct cli_check *c)
{
    for (uint32_t i = 0; i < c->n_cases; i++)
        if (json_is_string(c->cases[i].against))
            return true;
    return false;
}

/* ---- JSON --------------------------------------------------------------------------------- */

/* JSON has no infinity; it stands for "holds a number that is not finite". */
static json_t *real(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

static json_t *text_or_null(const char *s)
{
    return s[0] ? json_string(s) : json_null();
}

static json_t *group_json(const struct verify_group *g)
{
    if (g->layers == 0)
        return json_null();
    return json_pack("{s:i,s:o}", "layers", (int)g->layers, "positions",
                     g->last < 0 ? json_null() : json_pack("[ii]", g->first, g->last));
}

static json_t *place_json(uint32_t layer, enum kv_which which, uint32_t position, uint32_t head,
                          uint32_t dim)
{
    return json_pack("{s:i,s:s,s:i,s:i,s:i}", "layer", (int)layer, "tensor",
                     which == KV_K ? "k" : "v", "position", (int)position, "head", (int)head, "dim",
                     (int)dim);
}

static json_t *found_json(const struct verify_diff *d)
{
    const struct verify_place *p = &d->first;
    return d->found ? place_json(p->layer, p->which, p->position, p->head, p->dim) : json_null();
}

static json_t *fault_json(const struct cli_check_args *a, const struct verify_case *r)
{
    const struct engine_flip *f = &r->flip;
    if (!r->planted)
        return json_null();
    json_t *fault = place_json(f->layer, f->which, f->position, f->head, f->dim);
    json_object_set_new(fault, "name", json_string("import-flip"));
    json_object_set_new(fault, "planted", json_true());
    json_object_set_new(fault, "bit", json_integer(f->bit));
    json_object_set_new(fault, "seed", json_integer((json_int_t)a->options.fault_seed));
    return fault;
}

static json_t *reference_json(const struct verify_case *r)
{
    if (!r->reference)
        return json_null();
    return json_pack("{s:i,s:o,s:o,s:o,s:i,s:i,s:{s:f,s:f,s:f}}", "argmax_mismatch",
                     (int)r->ref_argmax_mismatch, "logits_rel_rms", real(r->ref_logits_rel_rms),
                     "k_rel_rms", real(r->ref_k_rel_rms), "v_rel_rms", real(r->ref_v_rel_rms),
                     "steps", (int)r->ref_steps, "below_margin", (int)r->ref_below_margin, "limits",
                     "margin", r->ref_limits.margin, "logits", r->ref_limits.logits, "kv",
                     r->ref_limits.kv);
}

static json_t *control_json(const struct verify_case *r)
{
    return json_pack("{s:i,s:o,s:o,s:b}", "native_repeat_mismatch", (int)r->control_mismatch,
                     "kv_rel_rms_max", real(r->control_kv_rel_rms), "logits_rel_rms_max",
                     real(r->control_logits_rel_rms), "bit_exact", r->control_exact);
}

static json_t *second_json(const struct verify_case *r)
{
    const struct verify_diff *d = &r->second_slots;
    return json_pack("{s:i,s:i,s:b,s:i,s:i,s:o,s:o}", "slots_exact", (int)d->slots_exact,
                     "slots_total", (int)d->slots_total, "positions_ok", d->positions_ok,
                     "argmax_differs", (int)r->second_argmax_differs, "argmax_mismatch",
                     (int)r->second_argmax_mismatch, "logits_rel_rms",
                     real(r->second_logits_rel_rms), "first_slot_mismatch", found_json(d));
}

/* What is known only where the case ran to its end. */
static void add_figures(json_t *o, const struct cli_check_args *a, const struct verify_case *r)
{
    const struct verify_diff *d = &r->slots;
    json_t *lanes = json_array();
    int most = 0;
    for (int i = 1; i < 9; i++) {
        json_array_append_new(lanes, json_integer((json_int_t)r->steps_by_lanes[i]));
        most = r->steps_by_lanes[i] ? i : most;
    }
    json_t *more = json_pack(
        "{s:b,s:b,s:b,s:o,s:o,s:i,s:i,s:o,s:o,s:o,s:b}", "finite", d->finite, "bit_exact_repeats",
        r->bit_exact_repeats, "tokens_match", r->tokens_match, "text_match",
        r->text_match < 0 ? json_null() : json_boolean(r->text_match), "first_mismatch",
        r->first_mismatch < 0 ? json_null() : json_integer(r->first_mismatch), "slots_exact",
        (int)d->slots_exact, "slots_total", (int)d->slots_total, "k_rel_rms", real(d->k_rel_rms),
        "v_rel_rms", real(d->v_rel_rms), "logits_rel_rms", real(r->logits_rel_rms), "positions_ok",
        d->positions_ok);
    json_object_update(o, more);
    json_decref(more);
    more = json_pack("{s:o,s:o,s:o,s:o,s:o,s:[ff],s:i,s:o,s:o,s:o,s:{s:o,s:o},s:b}", "control",
                     control_json(r), "native_vs_ref", reference_json(r), "second_consumer",
                     second_json(r), "local", group_json(&r->local), "global",
                     group_json(&r->global), "prefill_export_ms", r->prefill_export_ms[0],
                     r->prefill_export_ms[1], "active_lanes_max", most, "steps_by_lanes", lanes,
                     "first_slot_mismatch", found_json(d), "fault", fault_json(a, r), "vs_native",
                     "k_rel_rms", real(r->native_k_rel_rms), "v_rel_rms", real(r->native_v_rel_rms),
                     "same_numerics", r->same_numerics);
    json_object_update(o, more);
    json_decref(more);
}

/* A case that ended early, with what was compared until then. */
static void add_error(json_t *o, const struct cli_check_args *a, const struct verify_case *r)
{
    const struct verify_diff *d = &r->slots;
    json_t *more = json_pack("{s:{s:s,s:s},s:o}", "error", "code", base_code_name(r->error.code),
                             "message", r->error.text, "fault", fault_json(a, r));
    if (d->slots_total)
        json_object_update_new(more,
                               json_pack("{s:i,s:i,s:b,s:o}", "slots_exact", (int)d->slots_exact,
                                         "slots_total", (int)d->slots_total, "positions_ok",
                                         d->positions_ok, "first_slot_mismatch", found_json(d)));
    json_object_update_new(o, more);
}

struct json_t *cli_check_case_json(const struct cli_check_args *a, const struct cli_check_case *c)
{
    const struct verify_case *r = &c->result;
    json_t *o = json_pack("{s:s,s:s,s:i,s:i,s:i,s:s,s:o}", "name", c->prompt.name, "prompt",
                          c->prompt.source, "tokens", (int)r->tokens, "n", (int)r->n, "repeats",
                          (int)r->repeats, "verdict", verdict_names[r->verdict], "why",
                          text_or_null(r->why));
    if (o && r->error.code)
        add_error(o, a, r);
    else if (o)
        add_figures(o, a, r);
    if (o && c->evidence[0])
        json_object_set_new(o, "evidence", json_string(c->evidence));
    if (o && c->against)
        json_object_set_new(o, "against",
                            json_pack("{s:s,s:O}", "verdict",
                                      json_is_null(c->against) ? "equal" : "differs", "why",
                                      c->against));
    return o;
}

struct json_t *cli_check_json(const struct cli_check *c)
{
    const struct cli_check_args *a = c->args;
    json_t *cases = json_array();
    for (uint32_t i = 0; i < c->n_cases; i++)
        json_array_append_new(cases, cli_check_case_json(a, &c->cases[i]));
    return json_pack("{s:i,s:s,s:{s:s,s:s,s:s,s:s,s:s,s:i,s:{s:b,s:b}},s:o,s:s*,s:s}", "schema", 1,
                     "model", a->model, "route", "mode", cli_run_mode_names[a->mode], "prefill",
                     a->options.prefill, "decode", a->options.decode, "transport", "inproc",
                     "second_transport", "socketpair", "processes", 1, "emulated", "prefill",
                     cli_emulated(a->options.prefill), "decode", cli_emulated(a->options.decode),
                     "cases", cases, "evidence",
                     c->evidence ? audit_evidence_path(c->evidence) : NULL, "verdict",
                     verdict_names[cli_check_verdict(c)]);
}

/* ---- table -------------------------------------------------------------------------------- */

static void print_group(const char *name, const struct verify_group *g)
{
    if (g->layers && g->last >= 0)
        printf("  %-10s %u layers, positions [%d, %d]\n", name, g->layers, g->first, g->last);
    else if (g->layers)
        printf("  %-10s %u layers, no positions\n", name, g->layers);
}

static void print_figures(const struct verify_case *r)
{
    const struct verify_diff *d = &r->slots;
    printf("  %-10s %u of %u exact in %u repeats, %s; K %.3g, V %.3g relative RMS\n", "slots",
           d->slots_exact, d->slots_total, r->repeats,
           r->bit_exact_repeats ? "the same bits each time" : "repeats differ", d->k_rel_rms,
           d->v_rel_rms);
    print_group("global", &r->global);
    print_group("local", &r->local);
    printf("  %-10s %s%s, logits %.3g; control: %u differ, KV %.3g\n", "tokens",
           r->tokens_match ? "as native" : "not as native",
           r->text_match < 0 ? ""
           : r->text_match   ? ", text too"
                             : ", nor the text",
           r->logits_rel_rms, r->control_mismatch, r->control_kv_rel_rms);
    printf("  %-10s %u of %u slots exact, %u tokens differ\n", "second",
           r->second_slots.slots_exact, r->second_slots.slots_total, r->second_argmax_differs);
    if (r->reference)
        printf("  %-10s %u of %u tokens differ above margin %g; logits %.3g, K %.3g, V %.3g\n",
               "cpu:ref", r->ref_argmax_mismatch, r->ref_steps, r->ref_limits.margin,
               r->ref_logits_rel_rms, r->ref_k_rel_rms, r->ref_v_rel_rms);
    printf("  %-10s prefill and export %.1f to %.1f ms\n", "time", r->prefill_export_ms[0],
           r->prefill_export_ms[1]);
}

void cli_check_table(const struct cli_check *c)
{
    const struct cli_check_args *a = c->args;
    printf("%s: %s, prefill on %s%s, decode on %s%s, %u tokens each; one process\n", a->model,
           cli_run_mode_names[a->mode], a->options.prefill,
           cli_emulated(a->options.prefill) ? " (emulated)" : "", a->options.decode,
           cli_emulated(a->options.decode) ? " (emulated)" : "", a->options.n);
    for (uint32_t i = 0; i < c->n_cases; i++) {
        const struct cli_check_case *x = &c->cases[i];
        const struct verify_case *r = &x->result;
        const struct engine_flip *f = &r->flip;
        printf("%-5s %s (%s, %u tokens)\n", verdict_names[r->verdict], x->prompt.name,
               x->prompt.source, r->tokens);
        if (r->planted)
            printf("  fault planted: layer %u %c position %u head %u dim %u bit %u, seed %llu\n",
                   f->layer, f->which == KV_K ? 'K' : 'V', f->position, f->head, f->dim, f->bit,
                   (unsigned long long)a->options.fault_seed);
        if (r->why[0])
            printf("  %s\n", r->why);
        if (!r->error.code && a->common.verbosity >= 0)
            print_figures(r);
        if (x->against)
            printf("  %-10s %s\n", "against",
                   json_is_null(x->against) ? "the same tokens, slots and logits"
                                            : json_string_value(x->against));
    }
    if (c->evidence)
        printf("evidence in %s\n", audit_evidence_path(c->evidence));
    printf("%s\n", verdict_names[cli_check_verdict(c)]);
}
