/* SPDX-License-Identifier: Apache-2.0 */
/* Members of a request's document: the right type in the right range, or a refusal that names the
 * member. */
#include <math.h>
#include <stdlib.h>

#include "serve/serve_priv.h"

/* NULL where it is missing or null. */
static const json_t *member(const json_t *o, const char *key)
{
    const json_t *v = json_object_get(o, key);
    return json_is_null(v) ? NULL : v;
}

int serve_field_bool(const json_t *o, const char *key, bool *out, struct serve_problem *p)
{
    const json_t *v = member(o, key);
    if (!v)
        return 0;
    if (!json_is_boolean(v))
        return serve_refuse(p, 400, "invalid_type", key, "%s must be true or false", key);
    *out = json_is_true(v);
    return 0;
}

int serve_field_int(const json_t *o, const char *key, int64_t min, int64_t max, int64_t *out,
                    struct serve_problem *p)
{
    const json_t *v = member(o, key);
    if (!v)
        return 0;
    if (!json_is_integer(v))
        return serve_refuse(p, 400, "invalid_type", key, "%s must be a whole number", key);
    int64_t i = json_integer_value(v);
    if (i < min || i > max)
        return serve_refuse(p, 400, "invalid_value", key, "%s is %lld, not in %lld..%lld", key,
                            (long long)i, (long long)min, (long long)max);
    *out = i;
    return 0;
}

int serve_field_u32(const json_t *o, const char *key, uint32_t min, uint32_t max, uint32_t *out,
                    struct serve_problem *p)
{
    int64_t v = *out;
    int rc = serve_field_int(o, key, min, max, &v, p);
    *out = (uint32_t)v;
    return rc;
}

int serve_field_f32(const json_t *o, const char *key, double min, bool open, double max, float *out,
                    struct serve_problem *p)
{
    const json_t *v = member(o, key);
    if (!v)
        return 0;
    if (!json_is_number(v))
        return serve_refuse(p, 400, "invalid_type", key, "%s must be a number", key);
    double d = json_number_value(v);
    /* Written so that NaN is out of range. */
    if (!((open ? d > min : d >= min) && d <= max))
        return serve_refuse(p, 400, "invalid_value", key, "%s is %g, not in %c%g, %g]", key, d,
                            open ? '(' : '[', min, max);
    *out = (float)d;
    return 0;
}

int serve_field_str(const json_t *o, const char *key, const char **out, struct serve_problem *p)
{
    const json_t *v = member(o, key);
    if (!v)
        return 0;
    if (!json_is_string(v))
        return serve_refuse(p, 400, "invalid_type", key, "%s must be a string", key);
    *out = json_string_value(v);
    return 0;
}

int serve_field_ids(const json_t *array, const char *param, int32_t **ids, size_t *n,
                    struct serve_problem *p)
{
    size_t count = json_array_size(array);
    int32_t *out = base_try_alloc(count ? count : 1, sizeof *out, NULL);
    if (!out)
        return serve_refuse(p, 503, "no_memory", NULL, "no memory for %zu ids", count);
    for (size_t i = 0; i < count; i++) {
        const json_t *v = json_array_get(array, i);
        int64_t id = json_is_integer(v) ? json_integer_value(v) : -1;
        if (id < 0 || id > INT32_MAX) {
            free(out);
            return serve_refuse(p, 400, "invalid_value", param, "%s: item %zu is no token id",
                                param, i);
        }
        out[i] = (int32_t)id;
    }
    *ids = out;
    *n = count;
    return 0;
}
