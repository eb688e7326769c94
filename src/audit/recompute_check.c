/* SPDX-License-Identifier: Apache-2.0 */
/* The figures and the verdict of a check, from its runs. docs/evidence.md has the same rules in
 * words. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "audit/checked_priv.h"
#include "base/base.h"

/* Of errors, the largest; NAN where one is not finite. */
static double worst(double a, double b)
{
    return isnan(a) || isnan(b) ? NAN : a > b ? a : b;
}

/* ---- slots -------------------------------------------------------------------------------- */

/* A slot that holds what it must up to the prompt's end. */
static bool whole(const struct audit_checked *x, const json_t *s)
{
    return (size_t)json_integer_value(get(s, "first")) + (size_t)json_integer_value(get(s, "n")) ==
           x->tokens;
}

static bool exact(const struct audit_checked *x, const json_t *run, size_t i)
{
    const json_t *s = slot(run, i);
    return whole(x, s) && json_is_string(get(s, "have")) &&
           json_equal(get(s, "have"), get(s, "want"));
}

static size_t count_exact(const struct audit_checked *x, const json_t *run)
{
    size_t n = 0;
    for (size_t i = 0; i < 2 * x->layers; i++)
        n += exact(x, run, i);
    return n;
}

bool audit_positions_ok(const struct audit_checked *x, const json_t *run, bool handed)
{
    json_int_t window = json_integer_value(get(x->raw, "window"));
    json_int_t tokens = (json_int_t)x->tokens;
    if (!json_is_true(get(get(run, "holds"), "positions_ok")) ||
        (handed && !json_is_true(get(get(run, "sent"), "positions_ok"))))
        return false;
    for (size_t i = 0; i < 2 * x->layers; i++) {
        bool local = json_integer_value(json_array_get(get(x->raw, "local"), i / 2)) != 0;
        json_int_t first = local && window && tokens >= window ? tokens - window + 1 : 0;
        if (json_integer_value(get(slot(run, i), "first")) != first || !whole(x, slot(run, i)))
            return false;
    }
    return true;
}

/* The worst error of all K slots, or of all V slots. */
static double worst_slot(const struct audit_checked *x, const json_t *run, const char *key,
                         size_t which)
{
    double w = 0;
    for (size_t i = which; i < 2 * x->layers; i += 2)
        w = worst(w, number(get(slot(run, i), key)));
    return w;
}

static bool all_finite(const struct audit_checked *x, const json_t *run)
{
    for (size_t i = 0; i < 2 * x->layers; i++)
        if (!json_is_true(get(slot(run, i), "finite")))
            return false;
    return true;
}

/* ---- runs --------------------------------------------------------------------------------- */

/* First output index at which the ids differ; -1 = none. */
static json_int_t first_mismatch(const json_t *a, const json_t *b)
{
    const json_t *x = get(a, "ids"), *y = get(b, "ids");
    size_t n = json_array_size(x), m = json_array_size(y);
    for (size_t i = 0; i < n && i < m; i++)
        if (!json_equal(json_array_get(x, i), json_array_get(y, i)))
            return (json_int_t)i;
    return n == m ? -1 : (json_int_t)(n < m ? n : m);
}

static size_t count_differing(const json_t *a, const json_t *b, const char *key)
{
    const json_t *x = get(a, key), *y = get(b, key);
    size_t n = 0;
    for (size_t i = 0; i < json_array_size(x) && i < json_array_size(y); i++)
        n += !json_equal(json_array_get(x, i), json_array_get(y, i));
    return n;
}

/* The worst row up to and with the first token that differs: behind it the inputs do. */
static double worst_row(const json_t *run, const json_t *against)
{
    const json_t *rows = get(run, "rows_rel_rms");
    json_int_t end = first_mismatch(run, against);
    double w = 0;
    for (size_t i = 0; i < json_array_size(rows) && (end < 0 || (json_int_t)i <= end); i++)
        w = worst(w, number(json_array_get(rows, i)));
    return w;
}

/* Slots, tokens, margins and logits bit by bit. */
static bool same_bits(const struct audit_checked *x, const json_t *a, const json_t *b)
{
    for (size_t i = 0; i < 2 * x->layers; i++)
        if (!whole(x, slot(a, i)) || !json_equal(get(slot(a, i), "have"), get(slot(b, i), "have")))
            return false;
    return json_equal(get(a, "ids"), get(b, "ids")) &&
           json_equal(get(a, "margins"), get(b, "margins")) &&
           json_equal(get(a, "rows_sha256"), get(b, "rows_sha256"));
}

/* Steps at which `run` chose otherwise than `want` though that one's margin is above `margin`. */
static size_t beyond_margin(const json_t *run, const json_t *want, double margin, size_t *below)
{
    size_t n = 0;
    *below = 0;
    for (size_t i = 0; i < length(run, "ids") && i < length(want, "ids"); i++) {
        bool small = number(json_array_get(get(want, "margins"), i)) <= margin;
        *below += small;
        n += !small && !json_equal(json_array_get(get(run, "argmax"), i),
                                   json_array_get(get(want, "argmax"), i));
    }
    return n;
}

/* ---- figures ------------------------------------------------------------------------------ */

static void put(json_t *o, const char *key, json_t *v)
{
    json_object_set_new(o, key, v);
}

static json_t *count_json(size_t n)
{
    return json_integer((json_int_t)n);
}

static void put_slots(const struct audit_checked *x, json_t *o)
{
    size_t n = json_array_size(x->handoffs), least = 2 * x->layers;
    double k = 0, v = 0;
    bool finite = true, positions = true;
    for (size_t i = 0; i < n; i++) {
        const json_t *run = json_array_get(x->handoffs, i);
        size_t exact_here = count_exact(x, run);
        least = exact_here < least ? exact_here : least;
        k = worst(k, worst_slot(x, run, "rel_rms", 0));
        v = worst(v, worst_slot(x, run, "rel_rms", 1));
        finite = finite && all_finite(x, run);
        positions = positions && audit_positions_ok(x, run, true);
    }
    if (n == 0)
        return;
    put(o, "slots_total", count_json(2 * x->layers));
    put(o, "slots_exact", count_json(least));
    put(o, "positions_ok", json_boolean(positions));
    if (!x->second)
        return; /* a case that ended early says no more */
    put(o, "finite", json_boolean(finite));
    put(o, "k_rel_rms", audit_real(k));
    put(o, "v_rel_rms", audit_real(v));
}

static json_t *group_json(const struct audit_checked *x, bool local)
{
    size_t layers = 0;
    json_t *positions = json_null();
    for (size_t l = 0; l < x->layers; l++) {
        const json_t *s = slot(x->first, 2 * l);
        if ((json_integer_value(json_array_get(get(x->raw, "local"), l)) != 0) != local)
            continue;
        json_int_t first = json_integer_value(get(s, "first")), n = json_integer_value(get(s, "n"));
        layers++;
        if (n > 0) {
            json_decref(positions);
            positions = json_pack("[II]", first, first + n - 1);
        }
    }
    if (layers == 0) {
        json_decref(positions);
        return json_null();
    }
    return json_pack("{s:I,s:o}", "layers", (json_int_t)layers, "positions", positions);
}

static void put_repeats(const struct audit_checked *x, json_t *o)
{
    json_t *steps = json_array();
    json_int_t sums[8] = {0}, most = 0;
    bool same = true;
    for (size_t i = 0; i < json_array_size(x->handoffs); i++) {
        const json_t *run = json_array_get(x->handoffs, i);
        const json_t *by = get(get(run, "stats"), "steps_by_lanes");
        same = same && (i == 0 || same_bits(x, run, x->first));
        for (size_t k = 0; k < 8; k++) {
            sums[k] += json_integer_value(json_array_get(by, k));
            most = sums[k] && (json_int_t)k >= most ? (json_int_t)k + 1 : most;
        }
    }
    for (size_t k = 0; k < 8; k++)
        json_array_append_new(steps, json_integer(sums[k]));
    put(o, "bit_exact_repeats", json_boolean(same));
    put(o, "repeats", count_json(json_array_size(x->handoffs)));
    put(o, "steps_by_lanes", steps);
    put(o, "active_lanes_max", json_integer(most));
    put(o, "local", group_json(x, true));
    put(o, "global", group_json(x, false));
}

static void put_native(const struct audit_checked *x, json_t *o)
{
    json_int_t at = first_mismatch(x->first, x->native);
    const json_t *a = get(x->first, "text"), *b = get(x->native, "text");
    const json_t *holds = get(x->first, "holds"), *sent = get(x->first, "sent");
    bool texts = json_is_string(a) && json_is_string(b);
    put(o, "tokens_match", json_boolean(at < 0));
    put(o, "first_mismatch", at < 0 ? json_null() : json_integer(at));
    put(o, "text_match", texts ? json_boolean(json_equal(a, b)) : json_null());
    put(o, "logits_rel_rms", audit_real(worst_row(x->first, x->native)));
    put(o, "vs_native",
        json_pack("{s:o,s:o}", "k_rel_rms",
                  audit_real(worst_slot(x, x->first, "against_rel_rms", 0)), "v_rel_rms",
                  audit_real(worst_slot(x, x->first, "against_rel_rms", 1))));
    put(o, "same_numerics",
        json_boolean(json_equal(get(holds, "dtype"), get(sent, "dtype")) &&
                     json_equal(get(holds, "numerics"), get(sent, "numerics"))));
}

static void put_control(const struct audit_checked *x, json_t *o)
{
    double k = worst_slot(x, x->control, "against_rel_rms", 0);
    double v = worst_slot(x, x->control, "against_rel_rms", 1);
    put(o, "control",
        json_pack("{s:I,s:o,s:o,s:b}", "native_repeat_mismatch",
                  (json_int_t)count_differing(x->control, x->native, "ids"), "kv_rel_rms_max",
                  audit_real(worst(k, v)), "logits_rel_rms_max",
                  audit_real(worst_row(x->control, x->native)), "bit_exact",
                  same_bits(x, x->control, x->native)));
}

static void put_reference(const struct audit_checked *x, json_t *o)
{
    if (!x->reference || !x->forced) {
        put(o, "native_vs_ref", json_null());
        return;
    }
    bool like = json_equal(get(get(x->forced, "holds"), "numerics"),
                           get(get(x->reference, "holds"), "numerics"));
    const struct verify_limits *l = like ? &verify_limits_reference : &verify_limits_bf16;
    size_t below, beyond = beyond_margin(x->forced, x->reference, l->margin, &below);
    put(o, "native_vs_ref",
        json_pack("{s:I,s:o,s:o,s:o,s:I,s:I,s:{s:f,s:f,s:f}}", "argmax_mismatch",
                  (json_int_t)beyond, "logits_rel_rms",
                  audit_real(worst_row(x->forced, x->reference)), "k_rel_rms",
                  audit_real(worst_slot(x, x->forced, "against_rel_rms", 0)), "v_rel_rms",
                  audit_real(worst_slot(x, x->forced, "against_rel_rms", 1)), "steps",
                  (json_int_t)length(x->forced, "ids"), "below_margin", (json_int_t)below, "limits",
                  "margin", l->margin, "logits", l->logits, "kv", l->kv));
}

static void put_second(const struct audit_checked *x, json_t *o)
{
    size_t below, beyond = beyond_margin(x->second, x->native, verify_limits_bf16.margin, &below);
    put(o, "second_consumer",
        json_pack("{s:I,s:I,s:b,s:I,s:I,s:o}", "slots_exact", (json_int_t)count_exact(x, x->second),
                  "slots_total", (json_int_t)(2 * x->layers), "positions_ok",
                  audit_positions_ok(x, x->second, true), "argmax_differs",
                  (json_int_t)count_differing(x->second, x->native, "argmax"), "argmax_mismatch",
                  (json_int_t)beyond, "logits_rel_rms",
                  audit_real(worst_row(x->second, x->native))));
}

/* Prefill and what of the export it did not hide, without the first repeat, which warms up. */
static json_t *put_times(const struct audit_checked *x, json_t *o)
{
    size_t n = json_array_size(x->handoffs), first = n > 1 ? 1 : 0;
    double *ms = base_try_alloc(n ? n : 1, sizeof *ms, NULL);
    for (size_t i = first; ms && i < n; i++) {
        const json_t *s = get(json_array_get(x->handoffs, i), "stats");
        ms[i - first] = (double)(json_integer_value(get(s, "prefill_ns")) +
                                 json_integer_value(get(s, "exposed_ns"))) /
                        1e6;
    }
    json_t *spread = ms ? audit_spread(ms, n - first) : NULL;
    free(ms);
    if (o && spread)
        put(o, "prefill_export_ms",
            json_pack("[O,O]", json_object_get(spread, "min"), json_object_get(spread, "max")));
    return spread;
}

/* ---- verdict ------------------------------------------------------------------------------ */

static double member(const json_t *o, const char *object, const char *key)
{
    return number(get(object ? get(o, object) : o, key));
}

bool audit_slots_hold(const struct audit_checked *x, const json_t *run)
{
    const json_t *holds = get(run, "holds"), *sent = get(run, "sent");
    double budget = verify_conversion_budget((uint32_t)json_integer_value(get(sent, "dtype")),
                                             (uint32_t)json_integer_value(get(holds, "dtype")));
    return count_exact(x, run) == 2 * x->layers && all_finite(x, run) &&
           audit_positions_ok(x, run, true) && worst_slot(x, run, "rel_rms", 0) <= budget &&
           worst_slot(x, run, "rel_rms", 1) <= budget;
}

static bool tokens_hold(const json_t *o, bool bits)
{
    if (bits &&
        !(json_is_true(get(o, "tokens_match")) && member(o, NULL, "logits_rel_rms") == 0 &&
          member(o, "vs_native", "k_rel_rms") == 0 && member(o, "vs_native", "v_rel_rms") == 0 &&
          member(o, "second_consumer", "argmax_differs") == 0 &&
          member(o, "second_consumer", "logits_rel_rms") == 0))
        return false;
    return member(o, "second_consumer", "argmax_mismatch") == 0 &&
           member(o, "second_consumer", "logits_rel_rms") <= verify_limits_bf16.logits;
}

static bool reference_holds(const json_t *o)
{
    const json_t *r = get(o, "native_vs_ref");
    if (json_is_null(r))
        return true;
    double kv = member(r, "limits", "kv");
    return member(r, NULL, "argmax_mismatch") == 0 &&
           member(r, NULL, "logits_rel_rms") <= member(r, "limits", "logits") &&
           member(r, NULL, "k_rel_rms") <= kv && member(r, NULL, "v_rel_rms") <= kv;
}

static const char *judge(const struct audit_checked *x, const json_t *o)
{
    bool control = json_is_true(get(get(o, "control"), "bit_exact"));
    bool invariant = json_is_true(get(get(x->first, "holds"), "row_invariant"));
    bool good = reference_holds(o) &&
                tokens_hold(o, control && json_is_true(get(o, "same_numerics"))) &&
                (json_is_true(get(o, "bit_exact_repeats")) || !control) &&
                (control || !invariant) && audit_slots_hold(x, x->second);
    for (size_t i = 0; i < json_array_size(x->handoffs); i++)
        good = good && audit_slots_hold(x, json_array_get(x->handoffs, i));
    return good ? "pass" : "fail";
}

/* A handoff that its digests refused, or a slot that differs, is a fault. */
static const char *judge_early(const struct audit_checked *x)
{
    const json_t *runs = get(x->raw, "runs");
    for (size_t i = 0; i < json_array_size(runs); i++) {
        const char *code = json_string_value(get(get(json_array_get(runs, i), "error"), "code"));
        if (code && !strcmp(code, base_code_name(BATON_ERR_INTEGRITY)))
            return "fail";
    }
    for (size_t i = 0; i < json_array_size(x->handoffs); i++)
        for (size_t s = 0; s < 2 * x->layers; s++) {
            const json_t *run = json_array_get(x->handoffs, i);
            if (whole(x, slot(run, s)) && !exact(x, run, s))
                return "fail";
        }
    return "error";
}

/* ---- all ---------------------------------------------------------------------------------- */

static json_t *figures(const struct audit_checked *x)
{
    bool all = x->native && x->control && x->first && x->second;
    json_t *o = json_object(), *line = json_object(), *spread = NULL;
    put(o, "tokens", count_json(x->tokens));
    json_object_set(o, "n", get(x->raw, "n"));
    put_slots(x, o);
    if (all) {
        put_repeats(x, o);
        put_native(x, o);
        put_control(x, o);
        put_reference(x, o);
        put_second(x, o);
        spread = put_times(x, o);
        put(line, "tokens_compared", count_json(length(x->first, "ids")));
        put(line, "tokens_equal",
            count_json(length(x->first, "ids") - count_differing(x->first, x->native, "ids")));
    }
    put(line, "warm_ms", spread ? spread : json_null());
    put(o, "verdict", json_string(all ? judge(x, o) : judge_early(x)));
    return json_pack("{s:o,s:o}", "result", o, "line", line);
}

json_t *audit_recompute_check(const json_t *raw, struct baton_error *e)
{
    struct audit_checked x;
    json_t *o = audit_checked_open(&x, raw, e) ? NULL : figures(&x);
    json_decref(x.handoffs);
    return o;
}
