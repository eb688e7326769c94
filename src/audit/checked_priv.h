/* SPDX-License-Identifier: Apache-2.0 */
/* The raw document of a check, once its shape was found good: then it is read without further
 * checks. */
#ifndef AUDIT_CHECKED_PRIV_H
#define AUDIT_CHECKED_PRIV_H

#include <math.h>

#include "audit/audit_priv.h"

/* The raw document of a check, its shape checked. Runs of which there are none are NULL. */
struct audit_checked {
    const json_t *raw;
    const json_t *reference, *native, *control, *forced, *second;
    json_t *handoffs; /* all that have both caches, or finished */
    const json_t *first;
    size_t tokens, layers;
};
/* x->handoffs is the caller's to drop whatever it returns. `raw` outlives x. */
int audit_checked_open(struct audit_checked *x, const json_t *raw, struct baton_error *e);
/* Are a run's "slots", "holds" and "sent" of the right shape? Asked before the next two. Of x they
 * look at raw's window and local, tokens and layers. */
bool audit_checked_caches(const struct audit_checked *x, const json_t *run);
/* Every layer holds what it must; `handed`: at the producer too. */
bool audit_positions_ok(const struct audit_checked *x, const json_t *run, bool handed);
/* A handed-over cache: positions, every slot exact and finite, errors within the conversion's. */
bool audit_slots_hold(const struct audit_checked *x, const json_t *run);
bool audit_all_integers(const json_t *list);

/* ---- access ------------------------------------------------------------------------------- */

static inline json_t *get(const json_t *o, const char *key)
{
    return json_object_get(o, key);
}

static inline size_t length(const json_t *run, const char *key)
{
    return json_array_size(get(run, key));
}

/* A number, NAN where it is null: not finite. */
static inline double number(const json_t *v)
{
    return json_is_number(v) ? json_number_value(v) : NAN;
}

static inline const json_t *slot(const json_t *run, size_t i)
{
    return json_array_get(get(run, "slots"), i);
}

static inline bool finished(const json_t *run)
{
    return run && json_is_null(get(run, "error"));
}

#endif
