/* SPDX-License-Identifier: Apache-2.0 */
/* The two large parts of tokenizer.json, read without a tree.
 *
 * Vocabulary and merges are 98 % of the file (33 MB for Gemma 3); as a tree they would take 200
 * MB and most of the loading time. So their spans are found first, the rest goes to the JSON
 * parser with both emptied, and a cursor walks them: strings, integers and lists, nothing else.
 * The text was checked to be UTF-8 before.
 */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "model/tokenizer_load_priv.h"

static int bad(const struct model_cursor *c, const char *wanted)
{
    return base_fail(c->e, BATON_ERR_INPUT, "%s: byte %zu: expected %s", c->what,
                     (size_t)(c->p - c->begin), wanted);
}

char model_cursor_peek(struct model_cursor *c)
{
    while (c->p < c->end && (*c->p == ' ' || *c->p == '\n' || *c->p == '\r' || *c->p == '\t'))
        c->p++;
    return c->p < c->end ? *c->p : '\0';
}

int model_cursor_expect(struct model_cursor *c, char what)
{
    if (model_cursor_peek(c) != what) {
        const char text[] = {'"', what, '"', '\0'};
        return bad(c, text);
    }
    c->p++;
    return 0;
}

int model_cursor_next(struct model_cursor *c, char close, bool *first)
{
    char at = model_cursor_peek(c);
    bool was_first = *first;
    *first = false;
    if (at == close) {
        c->p++;
        return 0;
    }
    if (was_first)
        return 1;
    int rc = model_cursor_expect(c, ',');
    if (rc)
        return rc;
    return model_cursor_peek(c) == close ? bad(c, "a value after the comma") : 1;
}

/* Four hex digits at c->p. */
static int unit(struct model_cursor *c, uint32_t *out)
{
    uint8_t bytes[2];
    if (c->end - c->p < 4 ||
        !base_unhex((const char[]){c->p[0], c->p[1], c->p[2], c->p[3], 0}, bytes, 2))
        return bad(c, "four hex digits");
    c->p += 4;
    *out = (uint32_t)bytes[0] << 8 | bytes[1];
    return 0;
}

/* Behind "\u". */
static int unicode_escape(struct model_cursor *c, struct model_text *out)
{
    uint32_t cp, low = 0;
    int rc = unit(c, &cp);
    if (rc == 0 && cp >= 0xD800 && cp < 0xDC00 && c->end - c->p > 2 && c->p[0] == '\\' &&
        c->p[1] == 'u') {
        c->p += 2;
        rc = unit(c, &low);
        if (rc == 0 && low >= 0xDC00 && low < 0xE000)
            cp = 0x10000 + ((cp - 0xD800) << 10) + (low - 0xDC00);
    }
    if (rc)
        return rc;
    if (cp == 0 || (cp >= 0xD800 && cp < 0xE000))
        return bad(c, "an escape that is a character other than NUL");
    char text[4];
    return model_text_add(out, text, model_utf8_put(cp, text), c->e);
}

static int escape(struct model_cursor *c, struct model_text *out)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    char kind = c->end - c->p > 1 ? c->p[1] : '\0';
    if (kind == 'u') {
        c->p += 2;
        return unicode_escape(c, out);
    }
    const char *at = kind ? strchr(from, kind) : NULL;
    if (!at)
        return bad(c, "an escape");
    c->p += 2;
    return model_text_add(out, to + (at - from), 1, c->e);
}

int model_cursor_string(struct model_cursor *c, struct model_text *out)
{
    int rc = model_cursor_expect(c, '"');
    while (rc == 0) {
        const char *run = c->p;
        while (c->p < c->end && *c->p != '"' && *c->p != '\\' && (unsigned char)*c->p >= 0x20)
            c->p++;
        rc = model_text_add(out, run, (size_t)(c->p - run), c->e);
        if (rc)
            break;
        if (c->p == c->end || (unsigned char)*c->p < 0x20)
            return bad(c, "the end of a string");
        if (*c->p == '"') {
            c->p++;
            break;
        }
        rc = escape(c, out);
    }
    return rc;
}

bool model_cursor_u32(struct model_cursor *c, uint32_t *out)
{
    uint32_t v = 0;
    char at = model_cursor_peek(c);
    const char *begin = c->p;
    for (; c->p < c->end && *c->p >= '0' && *c->p <= '9' && c->p - begin < 9; c->p++)
        v = v * 10 + (uint32_t)(*c->p - '0');
    bool leading_zero = at == '0' && c->p - begin > 1;
    char after = model_cursor_peek(c);
    *out = v;
    return c->p > begin && !leading_zero && (after == ',' || after == '}');
}

/* ---- spans --------------------------------------------------------------------------------- */

static void skip_string(struct model_cursor *c)
{
    for (c->p++; c->p < c->end && *c->p != '"'; c->p++)
        if (*c->p == '\\')
            c->p++;
    c->p = c->p < c->end ? c->p + 1 : c->end;
}

/* Past one value, without looking at what it is: the JSON parser or the cursor does that later. */
static void skip_value(struct model_cursor *c)
{
    size_t depth = 0;
    (void)model_cursor_peek(c);
    while (c->p < c->end) {
        char at = *c->p;
        if (depth == 0 && (at == ',' || at == '}' || at == ']'))
            return;
        if (at == '"') {
            skip_string(c);
            continue;
        }
        depth += at == '{' || at == '[';
        depth -= at == '}' || at == ']';
        c->p++;
    }
}

/* Walk the members of the object at the cursor and record those asked for. The cursor stands
 * behind the object then. */
static int members(struct model_cursor *c, const char *const *keys, struct model_span *spans,
                   unsigned n)
{
    struct model_text key = {0};
    bool first = true;
    int rc = model_cursor_expect(c, '{');
    while (rc == 0) {
        rc = model_cursor_next(c, '}', &first);
        if (rc <= 0)
            break;
        key.n = 0;
        rc = model_cursor_string(c, &key);
        if (rc == 0)
            rc = model_cursor_expect(c, ':');
        if (rc)
            break;
        (void)model_cursor_peek(c);
        const char *begin = c->p;
        skip_value(c);
        for (unsigned i = 0; i < n; i++)
            if (key.n == strlen(keys[i]) && memcmp(key.data, keys[i], key.n) == 0)
                spans[i] = (struct model_span){begin, c->p};
    }
    free(key.data);
    return rc;
}

int model_json_spans(const char *json, size_t n, const char *what, struct model_span *vocab,
                     struct model_span *merges, struct baton_error *e)
{
    static const char *const top[] = {"model"}, *const inner[] = {"vocab", "merges"};
    struct model_span model = {NULL, NULL}, parts[2] = {{NULL, NULL}, {NULL, NULL}};
    struct model_cursor c = {json, json, json + n, what, e};
    int rc = members(&c, top, &model, 1);
    if (rc == 0 && !model.from)
        rc = base_fail(e, BATON_ERR_INPUT, "%s: there is no model", what);
    if (rc)
        return rc;
    c.p = model.from;
    rc = members(&c, inner, parts, 2);
    if (rc == 0 && (!parts[0].from || *parts[0].from != '{'))
        rc = base_fail(e, BATON_ERR_INPUT, "%s: model.vocab is no object", what);
    if (rc == 0 && (!parts[1].from || *parts[1].from != '['))
        rc = base_fail(e, BATON_ERR_INPUT, "%s: model.merges is no list", what);
    if (rc)
        return rc;
    *vocab = parts[0];
    *merges = parts[1];
    return 0;
}

int model_json_rest(const char *json, size_t n, struct model_span vocab, struct model_span merges,
                    struct model_text *out, struct baton_error *e)
{
    bool swap = merges.from < vocab.from;
    struct model_span first = swap ? merges : vocab, second = swap ? vocab : merges;
    int rc = model_text_add(out, json, (size_t)(first.from - json), e);
    if (rc == 0)
        rc = model_text_add(out, swap ? "[]" : "{}", 2, e);
    if (rc == 0)
        rc = model_text_add(out, first.to, (size_t)(second.from - first.to), e);
    if (rc == 0)
        rc = model_text_add(out, swap ? "{}" : "[]", 2, e);
    return rc ? rc : model_text_add(out, second.to, (size_t)(json + n - second.to), e);
}
