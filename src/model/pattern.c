/* SPDX-License-Identifier: Apache-2.0 */
/* Regular expressions of pre-tokenizers, through PCRE2.
 *
 * The patterns are written for Oniguruma with Unicode 16. The part of its syntax that means the
 * same in PCRE2 is passed on; \s, \p{L} and \p{N} are spelled out, because PCRE2's own sets differ
 * (its \s holds U+180E, its letters and numbers are those of its Unicode version); everything else
 * is refused by name, since a pattern that splits a little differently gives wrong ids silently.
 */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/base.h"
#include "model/tokenizer_priv.h"

enum {
    PATTERN_MAX = 4096,
    /* Steps of one match. No sane pattern needs more than its text's length; a catastrophic one
     * ends here instead of never. */
    STEPS_MAX = 10000000
};

struct model_pattern {
    pcre2_code *code;
    pcre2_match_context *limits;
};

/* ---- translation ---------------------------------------------------------------------------- */

struct translation {
    const char *s, *end;
    bool in_class;
    struct model_text out;
    const char *what;
    struct baton_error *e;
};

static int put(struct translation *t, const char *s)
{
    return model_text_add(&t->out, s, strlen(s), t->e);
}

static int put_n(struct translation *t, const char *s, size_t n)
{
    t->s = s + n;
    return model_text_add(&t->out, s, n, t->e);
}

static int refuse(struct translation *t, const char *part)
{
    return base_fail(t->e, BATON_ERR_INPUT, "%s: the pattern uses %s, which is not supported",
                     t->what, part);
}

/* A set as its members: bare inside a class, a class of its own outside. */
static int put_set(struct translation *t, const char *property, const char *members, bool negated)
{
    if (t->in_class && negated)
        return refuse(t, "a negated set inside a class");
    int rc = t->in_class ? 0 : put(t, negated ? "[^" : "[");
    if (rc == 0)
        rc = put(t, property);
    if (rc == 0)
        rc = put(t, members);
    return rc || t->in_class ? rc : put(t, "]");
}

static int property(struct translation *t)
{
    bool negated = t->s[1] == 'P';
    if (t->end - t->s < 5 || t->s[2] != '{' || t->s[4] != '}' || (t->s[3] != 'L' && t->s[3] != 'N'))
        return refuse(t, "a property other than \\p{L} and \\p{N}");
    bool letter = t->s[3] == 'L';
    t->s += 5;
    return put_set(t, letter ? "\\p{L}" : "\\p{N}",
                   letter ? model_unicode_class_letter : model_unicode_class_number, negated);
}

static int escape(struct translation *t)
{
    if (t->end - t->s < 2)
        return refuse(t, "a lone \\ at its end");
    char c = t->s[1];
    if (c == 's' || c == 'S') {
        t->s += 2;
        return put_set(t, "", model_unicode_class_space, c == 'S');
    }
    if (c == 'p' || c == 'P')
        return property(t);
    if (c == 'r' || c == 'n' || c == 't' || ispunct((unsigned char)c))
        return put_n(t, t->s, 2);
    return refuse(t, "an escape other than \\s \\S \\p \\P \\r \\n \\t");
}

static int group(struct translation *t)
{
    static const char *const known[] = {"(?:", "(?i:", "(?=", "(?!"};
    size_t left = (size_t)(t->end - t->s);
    if (left < 2 || t->s[1] != '?')
        return t->s[1] == '*' ? refuse(t, "(*") : put_n(t, t->s, 1);
    for (unsigned i = 0; i < 4; i++) {
        size_t n = strlen(known[i]);
        if (left >= n && memcmp(t->s, known[i], n) == 0)
            return put_n(t, t->s, n);
    }
    return refuse(t, "a group other than (?: (?i: (?= (?!");
}

/* {m}, {m,} or {m,n}, not possessive (Oniguruma reads {m,n}+ as a repeated repeat). */
static int counted(struct translation *t)
{
    const char *p = t->s + 1;
    size_t digits = strspn(p, "0123456789");
    p += digits;
    if (*p == ',')
        p += 1 + strspn(p + 1, "0123456789");
    if (digits == 0 || p >= t->end || *p != '}' || p[1] == '+')
        return refuse(t, "a { that counts nothing");
    return put_n(t, t->s, (size_t)(p + 1 - t->s));
}

static int class_begin(struct translation *t)
{
    size_t n = t->end - t->s > 1 && t->s[1] == '^' ? 2 : 1;
    t->in_class = true;
    if (t->s + n < t->end && t->s[n] == ']')
        return refuse(t, "a class that begins with ]");
    return put_n(t, t->s, n);
}

static int in_class(struct translation *t)
{
    if (*t->s == '[')
        return refuse(t, "a class inside a class");
    if (*t->s == '&' && t->end - t->s > 1 && t->s[1] == '&')
        return refuse(t, "&& inside a class");
    if (*t->s == ']')
        t->in_class = false;
    return put_n(t, t->s, 1);
}

static int translate(struct translation *t)
{
    int rc = 0;
    while (rc == 0 && t->s < t->end) {
        switch (*t->s) {
        case '\\':
            rc = escape(t);
            break;
        case '[':
            rc = t->in_class ? in_class(t) : class_begin(t);
            break;
        case '(':
            rc = t->in_class ? put_n(t, t->s, 1) : group(t);
            break;
        case '{':
            rc = t->in_class ? put_n(t, t->s, 1) : counted(t);
            break;
        case '^':
        case '$':
        case '.':
            rc = t->in_class ? put_n(t, t->s, 1) : refuse(t, "^, $ or .");
            break;
        default:
            rc = t->in_class ? in_class(t) : put_n(t, t->s, 1);
        }
    }
    return rc;
}

/* ---- compilation and matching -------------------------------------------------------------- */

static int compile(struct model_pattern *p, const struct translation *t)
{
    int code;
    PCRE2_SIZE at;
    p->code = pcre2_compile((PCRE2_SPTR)t->out.data, t->out.n, PCRE2_UTF | PCRE2_UCP, &code, &at,
                            NULL);
    if (!p->code) {
        PCRE2_UCHAR text[128];
        pcre2_get_error_message(code, text, sizeof text);
        return base_fail(t->e, BATON_ERR_INPUT, "%s: the pattern does not compile: %s", t->what,
                         (const char *)text);
    }
    uint32_t empty = 1;
    pcre2_pattern_info(p->code, PCRE2_INFO_MATCHEMPTY, &empty);
    if (empty)
        return base_fail(t->e, BATON_ERR_INPUT, "%s: the pattern matches the empty text", t->what);
    p->limits = pcre2_match_context_create(NULL);
    if (!p->limits)
        return base_fail(t->e, BATON_ERR_NOMEM, "no memory for a pattern");
    pcre2_set_match_limit(p->limits, STEPS_MAX);
    (void)pcre2_jit_compile(p->code, PCRE2_JIT_COMPLETE); /* without it the interpreter serves */
    return 0;
}

int model_pattern_compile(const char *text, size_t n, const char *what, struct model_pattern **out,
                          struct baton_error *e)
{
    struct translation t = {.s = text, .end = text + n, .what = what, .e = e};
    if (n == 0 || n > PATTERN_MAX)
        return base_fail(e, BATON_ERR_INPUT, "%s: the pattern has %zu bytes, not 1 to %d", what, n,
                         PATTERN_MAX);
    struct model_pattern *p = base_try_alloc(1, sizeof *p, e);
    if (!p)
        return BATON_ERR_NOMEM;
    int rc = translate(&t);
    if (rc == 0)
        rc = compile(p, &t);
    free(t.out.data);
    if (rc)
        model_pattern_free(p);
    else
        *out = p;
    return rc;
}

void model_pattern_free(struct model_pattern *p)
{
    if (!p)
        return;
    pcre2_match_context_free(p->limits);
    pcre2_code_free(p->code);
    free(p);
}

int model_pattern_work(const struct model_pattern *p, void **work, struct baton_error *e)
{
    *work = pcre2_match_data_create_from_pattern(p->code, NULL);
    return *work ? 0 : base_fail(e, BATON_ERR_NOMEM, "no memory for a match");
}

void model_pattern_work_free(void *work)
{
    pcre2_match_data_free(work);
}

int model_pattern_find(const struct model_pattern *p, void *work, const char *s, size_t n,
                       size_t from, size_t *start, size_t *end, struct baton_error *e)
{
    PCRE2_SPTR text = (PCRE2_SPTR)s;
    int rc = pcre2_match(p->code, text, n, from, PCRE2_NO_UTF_CHECK, work, p->limits);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
        rc = pcre2_match(p->code, text, n, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, work,
                         p->limits);
    if (rc == PCRE2_ERROR_NOMATCH)
        return 0;
    if (rc < 0) {
        PCRE2_UCHAR why[128];
        pcre2_get_error_message(rc, why, sizeof why);
        return base_fail(e, BATON_ERR_INPUT, "the pre-tokenizer gave up at byte %zu: %s", from,
                         (const char *)why);
    }
    const PCRE2_SIZE *v = pcre2_get_ovector_pointer(work);
    *start = v[0];
    *end = v[1];
    return 1;
}
