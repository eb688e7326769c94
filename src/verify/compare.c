/* SPDX-License-Identifier: Apache-2.0 */
/* Two caches, slot by slot. Numbers are widened and rounded here by arithmetic on their values, not
 * on their bits as the kv room does it: a fault in one is no fault in the other. */
#include <math.h>
#include <string.h>

#include "base/base.h"
#include "verify/verify_priv.h"

/* ---- numbers ------------------------------------------------------------------------------ */

static double f16_value(uint32_t h)
{
    int exponent = (int)(h >> 10 & 31), sign = h & 0x8000 ? -1 : 1;
    double fraction = h & 0x3ff;
    if (exponent == 31)
        return fraction != 0 ? NAN : sign * INFINITY;
    return sign * (exponent ? ldexp(1024 + fraction, exponent - 25) : ldexp(fraction, -24));
}

static double value(const uint8_t *p, uint32_t dtype)
{
    uint32_t word = 0;
    float f;
    memcpy(&word, p, verify_width(dtype));
    if (dtype == BATON_F16)
        return f16_value(word);
    word = dtype == BATON_BF16 ? word << 16 : word;
    memcpy(&f, &word, sizeof f);
    return (double)f;
}

/* One rounding to nearest even: the unit in the last place is 2^(e - bits), where e is the value's
 * exponent and at least the smallest normal one. */
static double rounded(double x, uint32_t dtype)
{
    const int bits = dtype == BATON_F16 ? 10 : dtype == BATON_BF16 ? 7 : 23;
    const int least = dtype == BATON_F16 ? -14 : -126, most = dtype == BATON_F16 ? 15 : 127;
    int e;
    if (!isfinite(x) || x == 0)
        return x;
    frexp(x, &e);
    e = e - 1 > least ? e - 1 : least;
    double y = ldexp(nearbyint(ldexp(x, bits - e)), e - bits);
    return fabs(y) >= ldexp(1, most + 1) ? copysign(INFINITY, x) : y;
}

double verify_conversion_budget(uint32_t from, uint32_t to)
{
    if (from == to || to == BATON_F32)
        return 0;
    return to == BATON_BF16 ? 0x1p-8 : 0x1p-11;
}

/* ---- slots -------------------------------------------------------------------------------- */

/* Sums of one slot. */
struct sums {
    double error, want; /* of squares */
    uint64_t wrong;
    bool finite;
    struct verify_place first; /* where wrong is not 0 */
};

static void add_element(struct sums *s, const uint8_t *have, uint32_t have_dtype,
                        const uint8_t *want, uint32_t want_dtype, struct verify_place at)
{
    double h = value(have, have_dtype), w = value(want, want_dtype);
    double due = rounded(w, have_dtype);
    bool same = have_dtype == want_dtype ? !memcmp(have, want, verify_width(have_dtype))
                                         : h == due && !signbit(h) == !signbit(due);
    if (!same && s->wrong++ == 0)
        s->first = at;
    s->finite = s->finite && isfinite(h);
    s->error += (h - w) * (h - w);
    s->want += w * w;
}

static void add_slot(struct sums *s, const struct verify_cache *have,
                     const struct verify_cache *want, uint32_t slot)
{
    const struct verify_slot *a = &have->slots[slot], *b = &want->slots[slot];
    size_t a_width = verify_width(have->dtype), b_width = verify_width(want->dtype);
    struct verify_place at = {.layer = slot / 2, .which = slot % 2 ? KV_V : KV_K};
    for (uint32_t i = 0; i < a->n; i++)
        for (at.head = 0; at.head < have->kv_heads; at.head++)
            for (at.dim = 0; at.dim < have->head_dim; at.dim++) {
                size_t k = ((size_t)at.head * a->n + i) * have->head_dim + at.dim;
                at.position = a->first + i;
                add_element(s, a->data + k * a_width, have->dtype, b->data + k * b_width,
                            want->dtype, at);
            }
}

static bool same_positions(const struct verify_cache *have, const struct verify_cache *want,
                           uint32_t slot)
{
    const struct verify_slot *a = &have->slots[slot], *b = &want->slots[slot];
    return a->first == b->first && a->n == b->n && a->first + a->n == have->n_tokens;
}

static double slot_error(const struct sums *s)
{
    double rel = s->error == 0 ? 0 : sqrt(s->error / s->want);
    return !s->finite || isnan(rel) ? INFINITY : rel;
}

double verify_slot_error(const struct verify_cache *have, const struct verify_cache *want,
                         uint32_t slot, bool *finite)
{
    struct sums s = {.finite = true};
    bool same = same_positions(have, want, slot);
    if (same)
        add_slot(&s, have, want, slot);
    if (finite)
        *finite = s.finite;
    return same ? slot_error(&s) : INFINITY;
}

/* A value that the dtype has, as its bits. What is no number becomes one pattern that no
 * conversion makes. */
static uint32_t encode(double x, uint32_t dtype)
{
    float f = isnan(x) ? NAN : (float)x;
    uint32_t word, sign = signbit(x) ? 0x8000 : 0;
    int e;
    memcpy(&word, &f, sizeof word);
    if (dtype == BATON_F32)
        return word;
    if (isnan(x))
        return 0x7fff;
    if (dtype == BATON_BF16)
        return word >> 16;
    if (isinf(x))
        return sign | 0x7c00;
    double m = frexp(fabs(x), &e); /* x = m 2^e, m in [1/2, 1) */
    if (m == 0 || e < -13)
        return sign | (uint32_t)ldexp(fabs(x), 24);
    return sign | ((uint32_t)(e + 14) << 10 | (uint32_t)ldexp(m - 0.5, 11));
}

void verify_slot_rounded(const struct verify_cache *c, uint32_t slot, uint32_t dtype, uint8_t *to)
{
    const struct verify_slot *s = &c->slots[slot];
    size_t n = (size_t)s->n * c->kv_heads * c->head_dim;
    uint32_t from = verify_width(c->dtype), width = verify_width(dtype);
    for (size_t i = 0; i < n; i++) {
        uint32_t word = 0;
        if (c->dtype == dtype)
            memcpy(&word, s->data + i * from, from);
        else
            word = encode(rounded(value(s->data + i * from, c->dtype), dtype), dtype);
        memcpy(to + i * width, &word, width);
    }
}

static void compare_slot(const struct verify_cache *have, const struct verify_cache *want,
                         uint32_t slot, struct verify_diff *d)
{
    struct sums s = {.finite = true};
    double *worst = slot % 2 ? &d->v_rel_rms : &d->k_rel_rms;
    d->slots_total++;
    if (!same_positions(have, want, slot)) {
        d->positions_ok = false; /* nothing to compare, and not exact */
        *worst = INFINITY;
        return;
    }
    add_slot(&s, have, want, slot);
    double rel = slot_error(&s);
    *worst = rel > *worst ? rel : *worst;
    d->finite = d->finite && s.finite;
    d->slots_exact += s.wrong == 0;
    if (s.wrong && !d->found)
        d->first = s.first;
    d->found = d->found || s.wrong;
    d->elements += s.wrong;
}

int verify_cache_compare(const struct verify_cache *have, const struct verify_cache *want,
                         struct verify_diff *out, struct baton_error *e)
{
    struct verify_diff d = {.finite = true};
    if (have->n_layers != want->n_layers || have->kv_heads != want->kv_heads ||
        have->head_dim != want->head_dim || have->n_tokens != want->n_tokens)
        return base_fail(e, BATON_ERR_MISMATCH,
                         "caches of %u layers, %u heads of %u, %u tokens and of %u, %u of %u, %u",
                         have->n_layers, have->kv_heads, have->head_dim, have->n_tokens,
                         want->n_layers, want->kv_heads, want->head_dim, want->n_tokens);
    d.positions_ok = have->positions_ok && want->positions_ok;
    for (uint32_t s = 0; s < 2 * have->n_layers; s++)
        compare_slot(have, want, s, &d);
    *out = d;
    return 0;
}
