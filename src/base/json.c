/* SPDX-License-Identifier: Apache-2.0 */
/* JSON: jansson behind limits, and typed access to members. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/base.h"

enum { MAX_DEPTH = 256 };

/* What one pass over the text finds before jansson, which recurses, sees it. */
struct scan {
    const char *what;
    const char *text, *end;
    size_t depth;
    size_t n_wide; /* integers beyond 64 bits: Hugging Face writes 1e30 as one ("no limit") */
};

static int line_of(const struct scan *s, const char *at)
{
    int line = 1;
    for (const char *p = s->text; p < at; p++)
        line += *p == '\n';
    return line;
}

/* From behind the opening quote to behind the closing one (or the end). */
static const char *skip_string(const char *p, const char *end)
{
    while (p < end && *p != '"')
        p += *p == '\\' && end - p > 1 ? 2 : 1;
    return p < end ? p + 1 : end;
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* True for an integer that int64_t cannot hold; *after is set behind its digits. */
static bool wide_integer(const char *p, const char *end, const char **after)
{
    char buf[24];
    const char *q = p + (*p == '-');
    while (q < end && is_digit(*q))
        q++;
    *after = q > p ? q : p + 1;
    size_t n = (size_t)(q - p);
    if (n < 19 || (q < end && (*q == '.' || *q == 'e' || *q == 'E')))
        return false;
    if (n >= sizeof buf)
        return true;
    memcpy(buf, p, n);
    buf[n] = '\0';
    errno = 0;
    (void)strtoll(buf, NULL, 10);
    return errno == ERANGE;
}

static bool word_at(const char *p, const char *end, const char *word)
{
    size_t n = strlen(word);
    return (size_t)(end - p) >= n && memcmp(p, word, n) == 0;
}

/* Behind a number, whole: digits of a fraction or exponent are no integers of their own. */
static const char *skip_number(const char *p, const char *end)
{
    while (p < end && (is_digit(*p) || memchr(".eE+-", *p, 5)))
        p++;
    return p;
}

static int scan_text(struct scan *s, struct baton_error *e)
{
    for (const char *p = s->text; p < s->end;) {
        if (*p == '-' || is_digit(*p)) {
            const char *after;
            s->n_wide += wide_integer(p, s->end, &after);
            p = skip_number(after, s->end);
            continue;
        }
        switch (*p) {
        case '"':
            p = skip_string(p + 1, s->end);
            continue;
        case '[':
        case '{':
            if (++s->depth > MAX_DEPTH)
                return base_fail(e, BATON_ERR_INPUT, "%s: line %d: nested deeper than %d", s->what,
                                 line_of(s, p), MAX_DEPTH);
            break;
        case ']':
        case '}':
            s->depth -= s->depth > 0;
            break;
        case 'N':
        case 'I':
            if (word_at(p, s->end, "NaN") || word_at(p, s->end, "Infinity"))
                return base_fail(e, BATON_ERR_INPUT, "%s: line %d: %s is no JSON number", s->what,
                                 line_of(s, p), *p == 'N' ? "NaN" : "Infinity");
            break;
        default:
            break;
        }
        p++;
    }
    return 0;
}

/* The text with ".0" behind each wide integer, so that jansson reads it as a real. */
static char *widen(const struct scan *s, size_t *n, struct baton_error *e)
{
    size_t len = (size_t)(s->end - s->text), extra;
    if (!base_mul(s->n_wide, 2, &extra) || !base_add(len, extra, n)) {
        base_fail(e, BATON_ERR_NOMEM, "%s: too large", s->what);
        return NULL;
    }
    char *out = base_try_alloc(*n, 1, e), *w = out;
    for (const char *p = s->text; out && p < s->end;) {
        const char *after = p + 1;
        bool wide = false;
        if (*p == '"') {
            after = skip_string(p + 1, s->end);
        } else if (*p == '-' || is_digit(*p)) {
            wide = wide_integer(p, s->end, &after);
            after = skip_number(after, s->end);
        }
        memcpy(w, p, (size_t)(after - p));
        w += after - p;
        if (wide) {
            memcpy(w, ".0", 2);
            w += 2;
        }
        p = after;
    }
    return out;
}

static int parse_failed(const char *what, const json_error_t *err, struct baton_error *e)
{
    if (json_error_code(err) == json_error_out_of_memory)
        return base_fail(e, BATON_ERR_NOMEM, "%s: no memory for its JSON", what);
    return base_fail(e, BATON_ERR_INPUT, "%s: line %d column %d: %s", what, err->line, err->column,
                     err->text);
}

int base_json_parse(const char *text, size_t n, const char *what, struct json_t **out,
                    struct baton_error *e)
{
    struct scan s = {.what = what, .text = text, .end = text + n};
    int rc = scan_text(&s, e);
    if (rc != 0)
        return rc;
    char *wide = NULL;
    if (s.n_wide > 0 && !(wide = widen(&s, &n, e)))
        return BATON_ERR_NOMEM;
    json_error_t err;
    json_t *v = json_loadb(wide ? wide : text, n, JSON_REJECT_DUPLICATES, &err);
    free(wide);
    if (!v)
        return parse_failed(what, &err, e);
    *out = v;
    return 0;
}

int base_json_load(const char *path, size_t limit, struct json_t **out, struct baton_error *e)
{
    char *text;
    size_t n;
    int rc = base_file_read(path, limit, &text, &n, e);
    if (rc != 0)
        return rc;
    rc = base_json_parse(text, n, path, out, e);
    free(text);
    return rc;
}

/* *v is the member, or NULL where it is missing and need not be there. */
static int member(const json_t *obj, const char *key, bool required, const json_t **v,
                  const char *what, struct baton_error *e)
{
    if (!json_is_object(obj))
        return base_fail(e, BATON_ERR_INPUT, "%s: no object where \"%s\" was expected", what, key);
    const json_t *m = json_object_get(obj, key);
    if (json_is_null(m))
        m = NULL;
    if (!m && required)
        return base_fail(e, BATON_ERR_INPUT, "%s: \"%s\" is missing", what, key);
    *v = m;
    return 0;
}

static int wrong_type(const char *what, const char *key, const char *want, struct baton_error *e)
{
    return base_fail(e, BATON_ERR_INPUT, "%s: \"%s\" must be %s", what, key, want);
}

int base_json_u32(const struct json_t *obj, const char *key, bool required, uint32_t min,
                  uint32_t max, uint32_t *out, const char *what, struct baton_error *e)
{
    const json_t *v = NULL;
    int rc = member(obj, key, required, &v, what, e);
    if (rc != 0 || !v)
        return rc;
    if (json_is_real(v) && fabs(json_real_value(v)) >= 9223372036854775808.0)
        return base_fail(e, BATON_ERR_INPUT, "%s: \"%s\" is %g, must be in [%u, %u]", what, key,
                         json_real_value(v), min, max);
    if (!json_is_integer(v))
        return wrong_type(what, key, "an integer", e);
    json_int_t i = json_integer_value(v);
    if (i < (json_int_t)min || i > (json_int_t)max)
        return base_fail(e, BATON_ERR_INPUT, "%s: \"%s\" is %lld, must be in [%u, %u]", what, key,
                         (long long)i, min, max);
    *out = (uint32_t)i;
    return 0;
}

int base_json_f64(const struct json_t *obj, const char *key, bool required, double min, double max,
                  double *out, const char *what, struct baton_error *e)
{
    const json_t *v = NULL;
    int rc = member(obj, key, required, &v, what, e);
    if (rc != 0 || !v)
        return rc;
    if (!json_is_number(v))
        return wrong_type(what, key, "a number", e);
    double d = json_number_value(v);
    if (!isfinite(d) || d < min || d > max)
        return base_fail(e, BATON_ERR_INPUT, "%s: \"%s\" is %g, must be in [%g, %g]", what, key, d,
                         min, max);
    *out = d;
    return 0;
}

int base_json_bool(const struct json_t *obj, const char *key, bool required, bool *out,
                   const char *what, struct baton_error *e)
{
    const json_t *v = NULL;
    int rc = member(obj, key, required, &v, what, e);
    if (rc != 0 || !v)
        return rc;
    if (!json_is_boolean(v))
        return wrong_type(what, key, "true or false", e);
    *out = json_is_true(v);
    return 0;
}

int base_json_str(const struct json_t *obj, const char *key, bool required, const char **out,
                  const char *what, struct baton_error *e)
{
    const json_t *v = NULL;
    int rc = member(obj, key, required, &v, what, e);
    if (rc != 0 || !v)
        return rc;
    if (!json_is_string(v))
        return wrong_type(what, key, "a string", e);
    *out = json_string_value(v);
    return 0;
}
