/* SPDX-License-Identifier: Apache-2.0 */
/* Is it the raw document of a check? Everything is looked at before anything is computed. */
#include <string.h>

#include "audit/checked_priv.h"
#include "base/base.h"

static int bad(const char *what, struct baton_error *e)
{
    return base_fail(e, BATON_ERR_INPUT, "malformed: %s", what);
}

static bool is_real(const json_t *v)
{
    return json_is_number(v) || json_is_null(v);
}

static bool is_text(const json_t *v)
{
    return json_is_string(v);
}

static bool is_integer(const json_t *v)
{
    return json_is_integer(v);
}

/* A list of n things of one kind. */
static bool all(const json_t *list, size_t n, bool (*is)(const json_t *v))
{
    for (size_t i = 0; i < json_array_size(list); i++)
        if (!is(json_array_get(list, i)))
            return false;
    return json_is_array(list) && json_array_size(list) == n;
}

bool audit_all_integers(const json_t *list)
{
    return all(list, json_array_size(list), is_integer);
}

static bool good_slot(const json_t *s)
{
    return json_is_integer(get(s, "first")) && json_is_integer(get(s, "n")) &&
           json_is_string(get(s, "have")) && is_real(get(s, "rel_rms")) &&
           is_real(get(s, "against_rel_rms"));
}

/* Whose cache it was; null where nobody's. */
static bool good_holder(const json_t *h)
{
    return json_is_null(h) ||
           (json_is_integer(get(h, "dtype")) && json_is_string(get(h, "numerics")));
}

static bool good_stats(const json_t *s)
{
    return json_is_integer(get(s, "prefill_ns")) && json_is_integer(get(s, "exposed_ns")) &&
           all(get(s, "steps_by_lanes"), 8, is_integer);
}

bool audit_checked_caches(const struct audit_checked *x, const json_t *run)
{
    size_t slots = length(run, "slots");
    return all(get(run, "slots"), slots, good_slot) && (slots == 0 || slots == 2 * x->layers) &&
           good_holder(get(run, "holds")) && good_holder(get(run, "sent"));
}

static int check_run(const struct audit_checked *x, const json_t *run, struct baton_error *e)
{
    size_t n = length(run, "ids"), slots = length(run, "slots"), rows = length(run, "rows_rel_rms");
    const json_t *error = get(run, "error"), *name = get(run, "run");
    if (!json_is_string(name) || !(json_is_null(error) || json_is_object(error)))
        return bad("a run without a name, or without \"error\"", e);
    if (!all(get(run, "ids"), n, is_integer) || !all(get(run, "argmax"), n, is_integer) ||
        !all(get(run, "margins"), n, is_real) || !all(get(run, "rows_sha256"), n, is_text) ||
        !all(get(run, "token_ns"), n, is_integer) || rows > n ||
        !all(get(run, "rows_rel_rms"), rows, is_real))
        return bad("a run's lists of tokens", e);
    if (!audit_checked_caches(x, run))
        return bad("a run's slots", e);
    if (!good_stats(get(run, "stats")))
        return bad("a run's stats", e);
    bool handed = !strcmp(json_string_value(name), "handoff") ||
                  !strcmp(json_string_value(name), "second");
    if (finished(run) && (slots == 0 || !json_is_object(get(run, "holds")) ||
                          (handed && !json_is_object(get(run, "sent")))))
        return bad("a finished run without caches", e);
    if (json_is_object(get(run, "sent")) && slots == 0)
        return bad("a producer's cache, and no consumer's", e);
    return 0;
}

static int sort_run(struct audit_checked *x, const json_t *run, struct baton_error *e)
{
    const struct {
        const char *name;
        const json_t **at;
    } names[] = {{"reference", &x->reference},
                 {"native", &x->native},
                 {"control", &x->control},
                 {"forced", &x->forced},
                 {"second", &x->second}};
    const char *name = json_string_value(get(run, "run"));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(name, names[i].name)) {
            if (*names[i].at)
                return bad("two runs of one name", e);
            *names[i].at = finished(run) ? run : NULL;
            return 0;
        }
    if (strcmp(name, "handoff"))
        return bad("a run of an unknown name", e);
    if (finished(run) || json_is_object(get(run, "sent")))
        json_array_append(x->handoffs, (json_t *)(uintptr_t)run);
    return 0;
}

int audit_checked_open(struct audit_checked *x, const json_t *raw, struct baton_error *e)
{
    const json_t *runs = get(raw, "runs");
    *x = (struct audit_checked){.raw = raw,
                                .handoffs = json_array(),
                                .tokens = length(raw, "prompt_ids"),
                                .layers = length(raw, "local")};
    if (!json_is_array(runs) || !audit_all_integers(get(raw, "prompt_ids")) ||
        !audit_all_integers(get(raw, "local")) || !json_is_integer(get(raw, "n")) ||
        !json_is_integer(get(raw, "window")))
        return bad("no document of a check", e);
    for (size_t i = 0; i < json_array_size(runs); i++) {
        int rc = check_run(x, json_array_get(runs, i), e);
        if (rc == 0)
            rc = sort_run(x, json_array_get(runs, i), e);
        if (rc)
            return rc;
    }
    x->first = json_array_get(x->handoffs, 0);
    x->first = finished(x->first) ? x->first : NULL;
    return 0;
}
