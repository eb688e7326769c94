/* SPDX-License-Identifier: Apache-2.0 */
/* Ids back to text, one at a time; decoding a whole list is the same code, fed in one go.
 *
 * Two decoders exist. The byte-level one is a stream of bytes: what may still become a character is
 * held back, and bytes that cannot become U+FFFD as in Rust's from_utf8_lossy (one per maximal
 * broken part). The chain of Gemma collects runs of <0xHH> tokens: a run that is UTF-8 as a whole
 * is that text, else every byte of it is one U+FFFD. So a run is held until it ends or is known to
 * be broken.
 */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "model/tokenizer_priv.h"

struct model_detokenizer {
    const struct model_tokenizer *t;
    bool skip_special;
    char held[4]; /* byte-level: the first bytes of a character */
    size_t n_held;
    struct model_text run; /* chain: bytes of the run, while they may be text */
    bool broken;           /* chain: the run is known to be none */
    struct model_text piece;
    struct model_text spare[2];
};

static const char replacement[] = "\xEF\xBF\xBD";

int model_detokenizer_open(const struct model_tokenizer *t, bool skip_special,
                           struct model_detokenizer **out, struct baton_error *e)
{
    struct model_detokenizer *d = base_try_alloc(1, sizeof *d, e);
    if (!d)
        return BATON_ERR_NOMEM;
    d->t = t;
    d->skip_special = skip_special;
    *out = d;
    return 0;
}

void model_detokenizer_close(struct model_detokenizer *d)
{
    if (!d)
        return;
    free(d->run.data);
    free(d->piece.data);
    free(d->spare[0].data);
    free(d->spare[1].data);
    free(d);
}

/* ---- byte-level ------------------------------------------------------------------------------ */

static int put_replacement(struct model_detokenizer *d, size_t times, struct baton_error *e)
{
    int rc = 0;
    for (size_t i = 0; i < times && rc == 0; i++)
        rc = model_text_add(&d->piece, replacement, 3, e);
    return rc;
}

/* Whether c continues what is held. */
static bool continues(const struct model_detokenizer *d, unsigned char c)
{
    return d->n_held == 1 ? model_utf8_second((unsigned char)d->held[0], c) : (c & 0xC0) == 0x80;
}

static int push_byte(struct model_detokenizer *d, unsigned char c, struct baton_error *e)
{
    int rc = 0;
    if (d->n_held > 0) {
        if (continues(d, c)) {
            d->held[d->n_held++] = (char)c;
            if (d->n_held == model_utf8_length((unsigned char)d->held[0])) {
                rc = model_text_add(&d->piece, d->held, d->n_held, e);
                d->n_held = 0;
            }
            return rc;
        }
        d->n_held = 0;
        rc = put_replacement(d, 1, e);
    }
    size_t len = model_utf8_length(c);
    if (rc || len == 0)
        return rc ? rc : put_replacement(d, 1, e);
    if (len == 1)
        return model_text_add(&d->piece, (const char *)&c, 1, e);
    d->held[0] = (char)c;
    d->n_held = 1;
    return 0;
}

/* A token that is not wholly in the byte alphabet stands for its own bytes. */
static bool all_byte_chars(const char *s, size_t n)
{
    for (size_t i = 0, len; i < n; i += len)
        if (model_char_byte(model_utf8_get(s + i, &len)) < 0)
            return false;
    return true;
}

static int push_byte_level(struct model_detokenizer *d, const char *s, size_t n,
                           struct baton_error *e)
{
    bool mapped = all_byte_chars(s, n);
    int rc = 0;
    for (size_t i = 0, len = 1; i < n && rc == 0; i += len)
        rc = push_byte(d,
                       mapped ? (unsigned char)model_char_byte(model_utf8_get(s + i, &len))
                              : (unsigned char)s[i],
                       e);
    return rc;
}

/* ---- chain --------------------------------------------------------------------------------- */

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                  : -1;
}

/* The byte of a token <0xHH>; -1 for any other. */
static int byte_of(const char *s, size_t n)
{
    if (n != 6 || memcmp(s, "<0x", 3) != 0 || s[5] != '>')
        return -1;
    int hi = s[3] == '+' ? 0 : hex_digit(s[3]), lo = hex_digit(s[4]); /* Rust reads "+f" as 15 */
    return hi < 0 || lo < 0 ? -1 : hi * 16 + lo;
}

/* True where some more bytes could still make the run UTF-8. */
static bool may_be_text(const char *s, size_t n)
{
    size_t bad = model_utf8_valid(s, n);
    if (bad == n)
        return true;
    size_t len = model_utf8_length((unsigned char)s[bad]);
    return len > n - bad &&
           (n - bad < 2 || model_utf8_second((unsigned char)s[bad], (unsigned char)s[bad + 1])) &&
           (n - bad < 3 || ((unsigned char)s[bad + 2] & 0xC0) == 0x80);
}

/* Checks the whole characters at the run's end only: what stands before the last four bytes was
 * checked when it came. */
static size_t tail_of(const struct model_text *run)
{
    size_t at = run->n > 4 ? run->n - 4 : 0;
    while (at < run->n && at > 0 && ((unsigned char)run->data[at] & 0xC0) == 0x80)
        at++;
    return at;
}

static int push_run_byte(struct model_detokenizer *d, char c, struct baton_error *e)
{
    if (d->broken)
        return put_replacement(d, 1, e);
    int rc = model_text_add(&d->run, &c, 1, e);
    if (rc)
        return rc;
    size_t tail = tail_of(&d->run);
    if (tail < d->run.n && may_be_text(d->run.data + tail, d->run.n - tail))
        return 0;
    d->broken = true;
    rc = put_replacement(d, d->run.n, e);
    d->run.n = 0;
    return rc;
}

static int end_run(struct model_detokenizer *d, struct baton_error *e)
{
    int rc = model_utf8_valid(d->run.data, d->run.n) == d->run.n
                 ? model_text_add(&d->piece, d->run.data, d->run.n, e)
                 : put_replacement(d, d->run.n, e);
    d->run.n = 0;
    d->broken = false;
    return rc;
}

static int push_chain(struct model_detokenizer *d, const char *s, size_t n, struct baton_error *e)
{
    int rc = model_normalize(d->t->decode_replace, d->t->n_decode_replace, d->spare, s, n, &s, &n,
                             e);
    if (rc)
        return rc;
    int byte = d->t->decode_bytes ? byte_of(s, n) : -1;
    if (byte >= 0)
        return push_run_byte(d, (char)byte, e);
    rc = end_run(d, e);
    return rc ? rc : model_text_add(&d->piece, s, n, e);
}

/* ---- both ---------------------------------------------------------------------------------- */

/* Appends to d->piece. An id that no token has is no text, as in the package: a gap, or a padding
 * row of an embedding that has more rows than the tokenizer ids. */
static int push(struct model_detokenizer *d, int32_t id, struct baton_error *e)
{
    const struct model_vocab *v = &d->t->vocab;
    if (id < 0)
        return base_fail(e, BATON_ERR_INPUT, "token id %d is negative", id);
    if ((uint32_t)id >= v->n_ids || v->flags[id] == 0 ||
        (d->skip_special && (v->flags[id] & MODEL_TOKEN_SPECIAL)))
        return 0;
    const char *s = v->text + v->start[id];
    return d->t->decoder == MODEL_DECODE_BYTES ? push_byte_level(d, s, v->length[id], e)
                                               : push_chain(d, s, v->length[id], e);
}

static int finish(struct model_detokenizer *d, struct baton_error *e)
{
    int rc = put_replacement(d, d->n_held > 0, e);
    d->n_held = 0;
    return rc ? rc : end_run(d, e);
}

static void show(const struct model_detokenizer *d, const char **piece, size_t *n)
{
    *piece = d->piece.n ? d->piece.data : "";
    *n = d->piece.n;
}

int model_detokenizer_push(struct model_detokenizer *d, int32_t id, const char **piece, size_t *n,
                           struct baton_error *e)
{
    d->piece.n = 0;
    int rc = push(d, id, e);
    if (rc == 0)
        show(d, piece, n);
    return rc;
}

int model_detokenizer_finish(struct model_detokenizer *d, const char **piece, size_t *n,
                             struct baton_error *e)
{
    d->piece.n = 0;
    int rc = finish(d, e);
    if (rc == 0)
        show(d, piece, n);
    return rc;
}

int model_tokenizer_decode(const struct model_tokenizer *t, const int32_t *ids, size_t n_ids,
                           bool skip_special, char **text, size_t *n, struct baton_error *e)
{
    struct model_detokenizer *d = NULL;
    int rc = model_detokenizer_open(t, skip_special, &d, e);
    for (size_t i = 0; i < n_ids && rc == 0; i++)
        rc = push(d, ids[i], e);
    if (rc == 0)
        rc = finish(d, e);
    if (rc == 0)
        rc = model_text_add(&d->piece, "", 1, e); /* the NUL */
    if (rc == 0) {
        *text = d->piece.data;
        *n = d->piece.n - 1;
        d->piece.data = NULL;
    }
    model_detokenizer_close(d);
    return rc;
}
