/* SPDX-License-Identifier: Apache-2.0 */
/* Pre-tokenizers: a text goes through the steps one piece at a time, depth first, so no list of
 * pieces is ever built. */
#include <string.h>

#include "base/base.h"
#include "model/tokenizer_priv.h"

/* GPT-2's alphabet: printable bytes stand for themselves, the others follow U+0100 in order. */
static bool is_printable(unsigned b)
{
    return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
}

uint32_t model_byte_char(uint8_t byte)
{
    if (is_printable(byte))
        return byte;
    /* 00..20, 7F..A0 and AD are the 68 others. */
    return 0x100u + (byte <= 0x20 ? byte : byte <= 0xA0 ? byte - 0x7Fu + 33 : 67);
}

int model_char_byte(uint32_t cp)
{
    if (cp < 0x100)
        return is_printable(cp) ? (int)cp : -1;
    if (cp > 0x143)
        return -1;
    cp -= 0x100;
    return (int)(cp <= 0x20 ? cp : cp < 67 ? cp - 33 + 0x7F : 0xAD);
}

/* One split at work: spans come in, pieces go on to the next step. `held` is the span that a later
 * one may still join. */
struct splitter {
    struct model_encoding *en;
    unsigned step;
    const char *s;
    enum model_split_behavior behavior;
    bool invert;
    bool holds, held_match;
    size_t held_from, held_to;
};

static int pass_on(struct splitter *sp, size_t from, size_t to)
{
    return from < to ? model_pretokenize(sp->en, sp->step + 1, sp->s + from, to - from) : 0;
}

static int release(struct splitter *sp)
{
    bool held = sp->holds;
    sp->holds = false;
    return held ? pass_on(sp, sp->held_from, sp->held_to) : 0;
}

/* Whether this span joins the one before it. */
static bool joins(const struct splitter *sp, bool match)
{
    if (!sp->holds)
        return false;
    switch (sp->behavior) {
    case MODEL_WITH_PREVIOUS:
        return match && !sp->held_match;
    case MODEL_WITH_NEXT:
        return !match && sp->held_match;
    case MODEL_CONTIGUOUS:
        return match == sp->held_match;
    default:
        return false;
    }
}

static int span(struct splitter *sp, size_t from, size_t to, bool match)
{
    if (from == to)
        return 0;
    match = match != sp->invert;
    if (sp->behavior == MODEL_ISOLATED)
        return pass_on(sp, from, to);
    if (sp->behavior == MODEL_REMOVED)
        return match ? 0 : pass_on(sp, from, to);
    if (joins(sp, match)) {
        sp->held_to = to;
        sp->held_match = match;
        return 0;
    }
    int rc = release(sp);
    sp->holds = true;
    sp->held_match = match;
    sp->held_from = from;
    sp->held_to = to;
    return rc;
}

static int find(struct splitter *sp, const struct model_split *st, size_t n, size_t from,
                size_t *start, size_t *end)
{
    if (st->kind == MODEL_SPLIT_REGEX)
        return model_pattern_find(st->regex, sp->en->match[sp->step], sp->s, n, from, start, end,
                                  sp->en->e);
    const char *hit = memmem(sp->s + from, n - from, st->text, st->n_text);
    if (!hit)
        return 0;
    *start = (size_t)(hit - sp->s);
    *end = *start + st->n_text;
    return 1;
}

static int split(struct model_encoding *en, unsigned step, const char *s, size_t n)
{
    const struct model_split *st = &en->t->split[step];
    struct splitter sp = {en, step, s, st->behavior, st->invert, false, false, 0, 0};
    size_t at = 0;
    for (;;) {
        size_t start, end;
        int found = find(&sp, st, n, at, &start, &end);
        if (found < 0)
            return found;
        if (found == 0)
            break;
        int rc = span(&sp, at, start, false);
        if (rc == 0)
            rc = span(&sp, start, end, true);
        if (rc)
            return rc;
        at = end;
    }
    int rc = span(&sp, at, n, false);
    return rc ? rc : release(&sp);
}

static int as_bytes(struct model_encoding *en, unsigned step, const char *s, size_t n)
{
    struct model_text *b = &en->step[step];
    b->n = 0;
    int rc = model_text_reserve(b, 2 * n, en->e);
    if (rc)
        return rc;
    for (size_t i = 0; i < n; i++)
        b->n += model_utf8_put(model_byte_char((uint8_t)s[i]), b->data + b->n);
    return model_pretokenize(en, step + 1, b->data, b->n);
}

static int with_space(struct model_encoding *en, unsigned step, const char *s, size_t n)
{
    if (s[0] == ' ')
        return model_pretokenize(en, step + 1, s, n);
    struct model_text *b = &en->step[step];
    b->n = 0;
    int rc = model_text_add(b, " ", 1, en->e);
    if (rc == 0)
        rc = model_text_add(b, s, n, en->e);
    return rc ? rc : model_pretokenize(en, step + 1, b->data, b->n);
}

int model_pretokenize(struct model_encoding *en, unsigned step, const char *s, size_t n)
{
    const struct model_tokenizer *t = en->t;
    if (step == t->n_split)
        return model_bpe_encode(&t->bpe, &t->vocab, &en->bpe, s, n, &en->ids, en->e);
    switch (t->split[step].kind) {
    case MODEL_SPLIT_SPACE:
        return with_space(en, step, s, n);
    case MODEL_SPLIT_BYTES:
        return as_bytes(en, step, s, n);
    default:
        return split(en, step, s, n);
    }
}
