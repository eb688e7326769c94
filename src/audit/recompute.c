/* SPDX-License-Identifier: Apache-2.0 */
/* What the raw document of an attempt comes to, by command. */
#include <string.h>

#include "audit/audit_priv.h"
#include "base/base.h"

/* A probe keeps what it measured; the verdict follows. A value that is no number is beyond any
 * limit. */
static json_t *recompute_probe(const json_t *raw)
{
    static const char *const same[] = {"name", "metric", "value", "limit", "where", "why"};
    const json_t *value = json_object_get(raw, "value"), *limit = json_object_get(raw, "limit");
    bool within = json_is_number(value) && json_number_value(value) <= json_number_value(limit);
    const char *verdict = !json_is_true(json_object_get(raw, "ran")) ? "n/a"
                          : within                                   ? "pass"
                                                                     : "fail";
    json_t *result = json_pack("{s:s}", "verdict", verdict);
    for (size_t i = 0; i < sizeof same / sizeof *same; i++)
        if (json_object_get(raw, same[i]))
            json_object_set(result, same[i], json_object_get(raw, same[i]));
    return json_pack("{s:o,s:{}}", "result", result, "line");
}

json_t *audit_recompute(const char *command, const json_t *raw, struct baton_error *e)
{
    json_t *o = NULL;
    if (!command)
        base_fail(e, BATON_ERR_INPUT, "the beginning names no command");
    else if (!strcmp(command, "check"))
        return audit_recompute_check(raw, e);
    else if (!strcmp(command, "matrix"))
        return audit_recompute_matrix(raw, e);
    else if (!strcmp(command, "quality"))
        return audit_recompute_quality(raw, e);
    else if (!strcmp(command, "probe"))
        o = recompute_probe(raw);
    else
        base_fail(e, BATON_ERR_UNSUPPORTED, "no rules for the command '%.40s'", command);
    return o;
}
