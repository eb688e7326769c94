/* SPDX-License-Identifier: Apache-2.0 */
/* What is claimed against what was recomputed, member by member. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "audit/audit_priv.h"
#include "base/base.h"

/* One cause can make a thousand differences; nobody reads more than this. */
#define DIFFERENCES 200

void audit_difference(json_t *differences, const char *file, const char *where, const char *fmt,
                      ...)
{
    struct baton_error e; /* its text is one line of UTF-8 whatever it quotes */
    char why[200];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(why, sizeof why, fmt, ap);
    va_end(ap);
    base_fail(&e, BATON_ERR_INTEGRITY, "%s", why);
    if (json_array_size(differences) >= DIFFERENCES)
        return;
    json_t *o = json_pack("{s:s,s:s,s:s}", "file", file, "where", where, "why", e.text);
    if (!o) /* a stranger's name that is no text */
        o = json_pack("{s:s,s:s,s:s}", "file", "?", "where", "?", "why", e.text);
    json_array_append_new(differences, o);
}

static bool same_leaf(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b))
        return json_is_integer(a) && json_is_integer(b)
                   ? json_integer_value(a) == json_integer_value(b)
                   : json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

static uint32_t compare_leaf(const json_t *want, const json_t *have, const char *file,
                             const char *where, json_t *differences)
{
    if (have && same_leaf(want, have))
        return 1;
    char *w = audit_text(want, JSON_ENCODE_ANY),
         *h = have ? audit_text(have, JSON_ENCODE_ANY) : NULL;
    audit_difference(differences, file, where, "claimed %.80s, recomputed %.80s", h ? h : "nothing",
                     w ? w : "?");
    free(w);
    free(h);
    return 1;
}

uint32_t audit_compare(const json_t *want, const json_t *have, bool exact, const char *file,
                       const char *where, json_t *differences)
{
    char at[160];
    uint32_t n = 0;
    const char *key;
    const json_t *value;
    if (json_is_object(want) && json_is_object(have)) {
        json_object_foreach((json_t *)(uintptr_t)want, key, value)
        {
            snprintf(at, sizeof at, "%s%s%.60s", where, *where ? "." : "", key);
            n += audit_compare(value, json_object_get(have, key), exact, file, at, differences);
        }
        json_object_foreach((json_t *)(uintptr_t)have, key, value)
        {
            if (!exact || json_object_get(want, key))
                continue;
            snprintf(at, sizeof at, "%s%s%.60s", where, *where ? "." : "", key);
            audit_difference(differences, file, at, "nothing stands behind this");
        }
        return n;
    }
    if (json_is_array(want) && json_is_array(have) &&
        json_array_size(want) == json_array_size(have)) {
        for (size_t i = 0; i < json_array_size(want); i++) {
            snprintf(at, sizeof at, "%.130s[%zu]", where, i);
            n += audit_compare(json_array_get(want, i), json_array_get(have, i), exact, file, at,
                               differences);
        }
        return n;
    }
    return compare_leaf(want, have, file, where, differences);
}
