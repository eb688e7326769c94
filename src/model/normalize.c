/* SPDX-License-Identifier: Apache-2.0 */
/* Normalizers: NFC, literal replacements, a prefix.
 *
 * NFC is done here around utf8proc's decomposition and composition for two reasons. Its canonical
 * ordering is quadratic in a run of marks, and texts come from strangers; and it knows a younger
 * Unicode than the tokenizers package (see unicode.c), so texts are cut at the marks that only it
 * would reorder or compose.
 */
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "base/base.h"
#include "model/tokenizer_priv.h"

int model_replace(const struct model_norm *r, const char *s, size_t n, struct model_text *out,
                  struct baton_error *e)
{
    int rc = 0;
    size_t i = 0;
    while (rc == 0 && i < n) {
        const char *hit = memmem(s + i, n - i, r->pattern, r->n_pattern);
        size_t to = hit ? (size_t)(hit - s) : n;
        rc = model_text_add(out, s + i, to - i, e);
        if (rc == 0 && hit)
            rc = model_text_add(out, r->content, r->n_content, e);
        i = hit ? to + r->n_pattern : n;
    }
    return rc;
}

/* Everything below U+0300 is in NFC whatever stands beside it. */
static bool surely_nfc(const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)s[i] >= 0xCC)
            return false;
    return true;
}

static uint8_t class_of(int32_t cp)
{
    return (uint8_t)utf8proc_get_property(cp)->combining_class;
}

/* Stable counting sort of one run of marks by combining class. */
static void sort_marks(int32_t *cp, int32_t *spare, size_t n)
{
    size_t at[256] = {0}, sum = 0;
    for (size_t i = 0; i < n; i++)
        at[class_of(cp[i])]++;
    for (unsigned k = 0; k < 256; k++) {
        size_t count = at[k];
        at[k] = sum;
        sum += count;
    }
    for (size_t i = 0; i < n; i++)
        spare[at[class_of(cp[i])]++] = cp[i];
    memcpy(cp, spare, n * sizeof *cp);
}

static void order_marks(int32_t *cp, int32_t *spare, size_t n)
{
    for (size_t i = 0; i < n;) {
        size_t end = i;
        while (end < n && class_of(cp[end]) != 0)
            end++;
        if (end - i > 1)
            sort_marks(cp + i, spare, end - i);
        i = end + (end == i);
    }
}

static int compose(int32_t *cp, int32_t *spare, size_t n, struct model_text *out,
                   struct baton_error *e)
{
    order_marks(cp, spare, n);
    utf8proc_ssize_t m = utf8proc_normalize_utf32(
        cp, (utf8proc_ssize_t)n, (utf8proc_option_t)(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
    if (m < 0)
        return base_fail(e, BATON_ERR_INTERNAL, "NFC: %s", utf8proc_errmsg(m));
    int rc = model_text_reserve(out, (size_t)m * 4, e);
    for (utf8proc_ssize_t i = 0; rc == 0 && i < m; i++)
        out->n += model_utf8_put((uint32_t)cp[i], out->data + out->n);
    return rc;
}

/* cp holds `cap` code points, more than any canonical decomposition of s needs. */
static int nfc_pieces(const char *s, size_t n, int32_t *cp, int32_t *spare, size_t cap,
                      struct model_text *out, struct baton_error *e)
{
    size_t m = 0;
    int rc = 0;
    for (size_t i = 0, len; i < n && rc == 0; i += len) {
        uint32_t c = model_utf8_get(s + i, &len);
        if (model_unicode_is_new_mark(c)) {
            rc = compose(cp, spare, m, out, e);
            m = 0;
            if (rc == 0)
                rc = model_text_add(out, s + i, len, e);
            continue;
        }
        int last = 0;
        utf8proc_ssize_t k = utf8proc_decompose_char(
            (int32_t)c, cp + m, (utf8proc_ssize_t)(cap - m),
            (utf8proc_option_t)(UTF8PROC_STABLE | UTF8PROC_COMPOSE), &last);
        if (k < 0 || (size_t)k > cap - m)
            return base_fail(e, BATON_ERR_INTERNAL, "NFC: a decomposition of U+%04X is too long",
                             c);
        m += (size_t)k;
    }
    return rc ? rc : compose(cp, spare, m, out, e);
}

static int nfc(const char *s, size_t n, struct model_text *out, struct baton_error *e)
{
    size_t cap = 2 * n + 8; /* no decomposition has more code points than twice its bytes */
    int32_t *cp = base_try_alloc(cap, sizeof *cp, e);
    int32_t *spare = base_try_alloc(cap, sizeof *spare, e);
    int rc = cp && spare ? nfc_pieces(s, n, cp, spare, cap, out, e) : BATON_ERR_NOMEM;
    free(cp);
    free(spare);
    return rc;
}

int model_normalize(const struct model_norm *steps, unsigned n_steps, struct model_text buf[2],
                    const char *s, size_t n, const char **out, size_t *n_out, struct baton_error *e)
{
    int rc = 0;
    unsigned turn = 0;
    for (unsigned i = 0; i < n_steps && n > 0 && rc == 0; i++) {
        const struct model_norm *step = &steps[i];
        if (step->kind == MODEL_NORM_NFC && surely_nfc(s, n))
            continue;
        struct model_text *b = &buf[turn++ % 2];
        b->n = 0;
        if (step->kind == MODEL_NORM_NFC) {
            rc = nfc(s, n, b, e);
        } else if (step->kind == MODEL_NORM_REPLACE) {
            rc = model_replace(step, s, n, b, e);
        } else {
            rc = model_text_add(b, step->content, step->n_content, e);
            if (rc == 0)
                rc = model_text_add(b, s, n, e);
        }
        s = b->data;
        n = b->n;
    }
    *out = s;
    *n_out = n;
    return rc;
}
