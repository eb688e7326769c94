/* SPDX-License-Identifier: Apache-2.0 */
/* From logits to a token.
 *
 * Order, as in transformers: banned ids, penalties (repetition, frequency, presence: vLLM's
 * formulas), temperature, top-k, top-p, min-p, choice. Weights are exp((l - max) / T) in double,
 * and only their sums are ever formed, so nothing is renormalised between the filters: top-p
 * compares with the sum over what top-k left, min-p with the largest weight.
 *
 * Candidates come in descending order from a heap of the row, because a sort of 262144 logits for
 * the few that top-k and top-p keep would cost more than a decode step of a small model.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "model/philox_priv.h"
#include "model/sampler.h"

struct model_sampler {
    uint32_t vocab;
    float *row;      /* [vocab] logits after bans and penalties */
    uint64_t *heap;  /* [vocab] order keys */
    uint32_t *count; /* [vocab] of the output; zero between calls */
    uint8_t *seen;   /* [vocab] in prompt or output; zero between calls */
    double *weights; /* [vocab] of what is kept */
};

struct model_sampling model_sampling_default(void)
{
    return (struct model_sampling){.top_p = 1, .repetition_penalty = 1};
}

static int check_field(const char *name, double v, double min, bool open, double max,
                       struct baton_error *e)
{
    /* Written so that NaN is out of range. */
    if ((open ? v > min : v >= min) && v <= max)
        return 0;
    return base_fail(e, BATON_ERR_USAGE, "%s is %g, not in %c%g, %g]", name, v, open ? '(' : '[',
                     min, max);
}

int model_sampling_check(const struct model_sampling *s, struct baton_error *e)
{
    const struct {
        const char *name;
        double v, min, max;
        bool open; /* min itself is out */
    } fields[] = {
        {"temperature", s->temperature, 0, 100, false},
        {"top_p", s->top_p, 0, 1, true},
        {"min_p", s->min_p, 0, 1, false},
        {"repetition_penalty", s->repetition_penalty, 0.01, 100, false},
        {"presence_penalty", s->presence_penalty, -2, 2, false},
        {"frequency_penalty", s->frequency_penalty, -2, 2, false},
    };
    for (unsigned i = 0; i < sizeof fields / sizeof *fields; i++) {
        int rc = check_field(fields[i].name, fields[i].v, fields[i].min, fields[i].open,
                             fields[i].max, e);
        if (rc)
            return rc;
    }
    return 0;
}

int model_sampler_open(uint32_t vocab, struct model_sampler **out, struct baton_error *e)
{
    if (vocab == 0 || vocab > INT32_MAX)
        return base_fail(e, BATON_ERR_USAGE, "a vocabulary of %u tokens", vocab);
    struct model_sampler *s = base_try_alloc(1, sizeof *s, e);
    if (!s)
        return BATON_ERR_NOMEM;
    s->vocab = vocab;
    if (!(s->row = base_try_alloc(vocab, sizeof *s->row, e)) ||
        !(s->heap = base_try_alloc(vocab, sizeof *s->heap, e)) ||
        !(s->count = base_try_alloc(vocab, sizeof *s->count, e)) ||
        !(s->seen = base_try_alloc(vocab, sizeof *s->seen, e)) ||
        !(s->weights = base_try_alloc(vocab, sizeof *s->weights, e))) {
        model_sampler_close(s);
        return BATON_ERR_NOMEM;
    }
    *out = s;
    return 0;
}

void model_sampler_close(struct model_sampler *s)
{
    if (!s)
        return;
    free(s->row);
    free(s->heap);
    free(s->count);
    free(s->seen);
    free(s->weights);
    free(s);
}

/* ---- rows ---------------------------------------------------------------------------------- */

/* Refuses what no forward pass may produce: NaN, +inf, nothing finite at all. *margin may be
 * NULL. */
static int check_row(const struct model_sampler *s, const float *logits, float *margin,
                     struct baton_error *e)
{
    float first = -INFINITY, second = -INFINITY;
    for (uint32_t i = 0; i < s->vocab; i++) {
        float l = logits[i];
        if (!(l < INFINITY))
            return base_fail(e, BATON_ERR_INTEGRITY, "logit %u is %g", i, (double)l);
        if (l > first) {
            second = first;
            first = l;
        } else if (l > second) {
            second = l;
        }
    }
    if (first == -INFINITY)
        return base_fail(e, BATON_ERR_INTEGRITY, "no logit is finite");
    if (margin)
        *margin = first - second;
    return 0;
}

static uint32_t argmax(const float *row, uint32_t n)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n; i++)
        if (row[i] > row[best])
            best = i;
    return best;
}

/* ---- bans and penalties -------------------------------------------------------------------- */

static int check_ids(const struct model_sampler *s, const int32_t *ids, size_t n, const char *what,
                     struct baton_error *e)
{
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= s->vocab)
            return base_fail(e, BATON_ERR_INPUT, "%s id %d is not in [0, %u)", what, ids[i],
                             s->vocab);
    return 0;
}

static void penalise(struct model_sampler *s, const struct model_sampling *p,
                     const int32_t *context, size_t n_context, size_t n_prompt)
{
    for (size_t i = n_prompt; i < n_context; i++)
        s->count[context[i]]++;
    for (size_t i = 0; i < n_context; i++) {
        int32_t id = context[i];
        if (s->seen[id])
            continue;
        s->seen[id] = 1;
        float l = s->row[id];
        l = l > 0 ? l / p->repetition_penalty : l * p->repetition_penalty;
        l -= p->frequency_penalty * (float)s->count[id];
        if (s->count[id] > 0)
            l -= p->presence_penalty;
        s->row[id] = fminf(l, FLT_MAX);
    }
    for (size_t i = 0; i < n_context; i++) {
        s->seen[context[i]] = 0;
        s->count[context[i]] = 0;
    }
}

static bool penalises(const struct model_sampling *p)
{
    return p->repetition_penalty != 1 || p->presence_penalty != 0 || p->frequency_penalty != 0;
}

/* ---- descending order ---------------------------------------------------------------------- */

/* Larger key = larger logit; of equal logits (0 and -0 are) the lower id. */
static uint64_t key_of(float logit, uint32_t id)
{
    uint32_t bits;
    logit += 0.0f;
    memcpy(&bits, &logit, sizeof bits);
    bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return ((uint64_t)bits << 32) | (uint32_t)~id;
}

static uint32_t id_of(uint64_t key)
{
    return ~(uint32_t)key;
}

static void sift_down(uint64_t *heap, uint32_t n, uint32_t i)
{
    uint64_t x = heap[i];
    for (uint64_t c; (c = 2 * (uint64_t)i + 1) < n; i = (uint32_t)c) {
        if (c + 1 < n && heap[c + 1] > heap[c])
            c++;
        if (x >= heap[c])
            break;
        heap[i] = heap[c];
    }
    heap[i] = x;
}

static void heap_build(struct model_sampler *s, const float *row)
{
    for (uint32_t i = 0; i < s->vocab; i++)
        s->heap[i] = key_of(row[i], i);
    for (uint32_t i = s->vocab / 2; i-- > 0;)
        sift_down(s->heap, s->vocab, i);
}

/* Move the largest of the first n to place n - 1: those taken stand at the end, the first one
 * last. */
static uint64_t heap_take(uint64_t *heap, uint32_t n)
{
    uint64_t top = heap[0];
    heap[0] = heap[n - 1];
    heap[n - 1] = top;
    sift_down(heap, n - 1, 0);
    return top;
}

/* ---- choice -------------------------------------------------------------------------------- */

/* Uniform in [0, 1), 53 bits. */
static double uniform(uint64_t seed, uint32_t choice, uint32_t index)
{
    const uint32_t counter[4] = {choice, index, 0, 0};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t r[4];
    model_philox(counter, key, r);
    return (double)((((uint64_t)r[0] << 32) | r[1]) >> 11) * 0x1p-53;
}

/* What the filters left, as a function of its number: ids[i] where ordered, else the id itself. */
struct kept {
    const struct model_sampler *s;
    double max, temperature, least; /* weights below `least` are out (min-p) */
    uint32_t n;
    bool ordered; /* n taken from the heap; else the whole row in the order of ids */
};

static uint32_t kept_id(const struct kept *k, uint32_t i)
{
    return k->ordered ? id_of(k->s->heap[k->s->vocab - 1 - i]) : i;
}

static double weight(const struct kept *k, uint32_t id)
{
    double w = exp(((double)k->s->row[id] - k->max) / k->temperature);
    return w >= k->least ? w : 0;
}

/* Fills the weights of what is kept; their sum. */
static double total(const struct kept *k)
{
    double sum = 0;
    for (uint32_t i = 0; i < k->n; i++)
        sum += k->s->weights[i] = weight(k, kept_id(k, i));
    return sum;
}

static uint32_t draw(const struct kept *k, double u)
{
    double target = u * total(k), sum = 0;
    uint32_t last = 0;
    for (uint32_t i = 0; i < k->n && sum <= target; i++) {
        sum += k->s->weights[i];
        if (k->s->weights[i] > 0)
            last = i; /* rounding may leave the target a little above the sum */
    }
    return kept_id(k, last);
}

/* top-k, then top-p: k->n becomes how many of the largest stay. A token stays while those before it
 * weigh less than top_p of all, so at least one does. */
static void keep_largest(struct model_sampler *s, const struct model_sampling *p, struct kept *k)
{
    uint32_t limit = p->top_k > 0 && p->top_k < s->vocab ? p->top_k : s->vocab;
    heap_build(s, s->row);
    uint32_t taken = 0;
    if (limit < s->vocab)
        for (; taken < limit; taken++)
            (void)heap_take(s->heap, s->vocab - taken);
    k->n = limit;
    k->ordered = limit < s->vocab;
    if (p->top_p < 1) {
        double enough = p->top_p * total(k), sum = 0;
        uint32_t n = 0;
        for (; n < limit && (n == 0 || sum < enough); n++) {
            if (n == taken)
                (void)heap_take(s->heap, s->vocab - taken++);
            sum += weight(k, id_of(s->heap[s->vocab - 1 - n]));
        }
        k->n = n;
        k->ordered = true;
    }
}

static uint32_t sample(struct model_sampler *s, const struct model_sampling *p, uint32_t choice,
                       uint32_t index)
{
    struct kept k = {.s = s,
                     .max = (double)s->row[argmax(s->row, s->vocab)],
                     .temperature = (double)p->temperature,
                     .n = s->vocab};
    if (p->top_p < 1 || (p->top_k > 0 && p->top_k < s->vocab))
        keep_largest(s, p, &k);
    k.least = (double)p->min_p; /* the largest weight is exp(0) = 1 */
    return draw(&k, uniform(p->seed, choice, index));
}

/* Bans and penalties into s->row; fails where nothing is left to choose. */
static int prepare(struct model_sampler *s, const float *logits, const struct model_sampling *p,
                   const int32_t *context, size_t n_context, size_t n_prompt, const int32_t *banned,
                   size_t n_banned, struct baton_error *e)
{
    memcpy(s->row, logits, s->vocab * sizeof *s->row);
    if (penalises(p)) {
        int rc = check_ids(s, context, n_context, "context", e);
        if (rc)
            return rc;
        penalise(s, p, context, n_context, n_prompt);
    }
    int rc = check_ids(s, banned, n_banned, "banned", e);
    if (rc)
        return rc;
    for (size_t i = 0; i < n_banned; i++)
        s->row[banned[i]] = -INFINITY;
    if (s->row[argmax(s->row, s->vocab)] == -INFINITY)
        return base_fail(e, BATON_ERR_INPUT, "every token is banned");
    return 0;
}

int model_sampler_pick(struct model_sampler *s, const float *logits,
                       const struct model_sampling *params, const int32_t *context,
                       size_t n_context, size_t n_prompt, uint32_t choice, uint32_t index,
                       const int32_t *banned, size_t n_banned, int32_t *token, float *margin,
                       struct baton_error *e)
{
    float gap = 0;
    if (n_prompt > n_context)
        return base_fail(e, BATON_ERR_USAGE, "%zu of %zu context ids are the prompt", n_prompt,
                         n_context);
    int rc = model_sampling_check(params, e);
    if (rc == 0)
        rc = check_row(s, logits, &gap, e);
    if (rc == 0)
        rc = prepare(s, logits, params, context, n_context, n_prompt, banned, n_banned, e);
    if (rc)
        return rc;
    *token = params->temperature == 0 ? (int32_t)argmax(s->row, s->vocab)
                                      : (int32_t)sample(s, params, choice, index);
    *margin = gap;
    return 0;
}

int model_sampler_logprobs(struct model_sampler *s, const float *logits, int32_t token,
                           uint32_t n_top, int32_t *top_ids, float *top_logprobs, float *logprob,
                           struct baton_error *e)
{
    if (n_top > s->vocab)
        return base_fail(e, BATON_ERR_USAGE, "top %u of %u tokens", n_top, s->vocab);
    int rc = check_ids(s, &token, 1, "token", e);
    if (rc == 0)
        rc = check_row(s, logits, NULL, e);
    if (rc)
        return rc;
    double max = (double)logits[argmax(logits, s->vocab)], sum = 0;
    for (uint32_t i = 0; i < s->vocab; i++)
        sum += exp((double)logits[i] - max);
    double all = max + log(sum);
    if (n_top > 0)
        heap_build(s, logits);
    for (uint32_t i = 0; i < n_top; i++) {
        uint32_t id = id_of(heap_take(s->heap, s->vocab - i));
        top_ids[i] = (int32_t)id;
        top_logprobs[i] = (float)((double)logits[id] - all);
    }
    *logprob = (float)((double)logits[token] - all);
    return 0;
}
