/* SPDX-License-Identifier: Apache-2.0 */
/* Sampler: known answers of philox, exact greedy, filters against a slow one written from their
 * definitions, the distribution of many draws, refusals. */
#include "tests/test.h"

#include "base/base.h"
#include "model/philox_priv.h"
#include "model/sampler.h"

static uint64_t seed;

/* ---- philox: Random123's known answers ----------------------------------------------------- */

static void philox_known_answers(void **state)
{
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } kat[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    (void)state;
    for (size_t i = 0; i < sizeof kat / sizeof *kat; i++) {
        uint32_t out[4];
        model_philox(kat[i].counter, kat[i].key, out);
        assert_memory_equal(out, kat[i].out, sizeof out);
    }
}

/* ---- helpers ------------------------------------------------------------------------------- */

static int32_t pick(struct model_sampler *s, const float *logits, const struct model_sampling *p,
                    uint32_t choice, uint32_t index)
{
    struct baton_error e;
    int32_t token = -77;
    float margin = NAN;
    test_ok(
        model_sampler_pick(s, logits, p, NULL, 0, 0, choice, index, NULL, 0, &token, &margin, &e),
        &e);
    assert_false(isnan(margin));
    return token;
}

static struct model_sampler *open_sampler(uint32_t vocab)
{
    struct baton_error e;
    struct model_sampler *s = NULL;
    test_ok(model_sampler_open(vocab, &s, &e), &e);
    return s;
}

/* ---- greedy -------------------------------------------------------------------------------- */

static void greedy_is_exact(void **state)
{
    struct model_sampling p = model_sampling_default();
    (void)state;
    for (int round = 0; round < 300; round++) {
        uint32_t n = test_range(&seed, 2, 3000);
        float *l = malloc(n * sizeof *l);
        /* Few distinct values, so that ties are common. */
        for (uint32_t i = 0; i < n; i++)
            l[i] = round % 2 ? (float)test_range(&seed, 0, 9) - 5 : test_normal(&seed);
        uint32_t best = 0, second = n;
        for (uint32_t i = 1; i < n; i++)
            if (l[i] > l[best])
                best = i;
        for (uint32_t i = 0; i < n; i++)
            if (i != best && (second == n || l[i] > l[second]))
                second = i;
        struct model_sampler *s = open_sampler(n);
        struct baton_error e;
        int32_t token;
        float margin;
        test_ok(model_sampler_pick(s, l, &p, NULL, 0, 0, 0, 0, NULL, 0, &token, &margin, &e), &e);
        assert_int_equal(token, best);
        assert_true(margin == l[best] - l[second]);
        /* One kept candidate is greedy at any temperature; the tie goes to the lower id too. */
        struct model_sampling one = p;
        one.temperature = 7;
        one.top_k = 1;
        assert_int_equal(pick(s, l, &one, 0, (uint32_t)round), best);
        one.top_k = 0;
        one.top_p = 1e-9f;
        assert_int_equal(pick(s, l, &one, 0, (uint32_t)round), best);
        /* min-p 1 keeps all that are as likely as the first. */
        one.top_p = 1;
        one.min_p = 1;
        assert_true(l[pick(s, l, &one, 0, (uint32_t)round)] == l[best]);
        model_sampler_close(s);
        free(l);
    }
}

/* ---- filters against their definitions ----------------------------------------------------- */

struct slow {
    uint32_t id;
    double w;
};

static int descending(const void *a, const void *b)
{
    const struct slow *x = a, *y = b;
    if (x->w != y->w)
        return x->w < y->w ? 1 : -1;
    return x->id < y->id ? -1 : 1;
}

/* Probability of each token, from the definitions: [n] into prob. */
static void slow_distribution(const float *l, uint32_t n, const struct model_sampling *p,
                              double *prob)
{
    struct slow *c = malloc(n * sizeof *c);
    double max = -INFINITY;
    for (uint32_t i = 0; i < n; i++)
        max = fmax(max, l[i]);
    for (uint32_t i = 0; i < n; i++)
        c[i] = (struct slow){i, exp((l[i] - max) / p->temperature)};
    qsort(c, n, sizeof *c, descending);
    uint32_t k = p->top_k > 0 && p->top_k < n ? p->top_k : n;
    double sum = 0, before = 0, kept = 0;
    for (uint32_t i = 0; i < k; i++)
        sum += c[i].w;
    uint32_t m = 0;
    for (; m < k && (m == 0 || p->top_p >= 1 || before / sum < p->top_p); m++)
        before += c[m].w;
    memset(prob, 0, n * sizeof *prob);
    for (uint32_t i = 0; i < m; i++)
        if (c[i].w >= p->min_p * c[0].w)
            kept += prob[c[i].id] = c[i].w;
    for (uint32_t i = 0; i < n; i++)
        prob[i] /= kept;
    free(c);
}

/* Draws follow the distribution: Pearson's chi-square, with the bound at six standard deviations
 * of its normal approximation; a fixed seed a case, so that a failure stays one. */
static void check_distribution(const float *l, uint32_t n, struct model_sampling *p)
{
    enum { DRAWS = 20000 };
    double *prob = calloc(n, sizeof *prob), chi = 0;
    uint32_t *hits = calloc(n, sizeof *hits), cells = 0;
    struct model_sampler *s = open_sampler(n);
    slow_distribution(l, n, p, prob);
    for (uint32_t i = 0; i < DRAWS; i++) {
        int32_t t = pick(s, l, p, i & 3, i >> 2);
        assert_in_range(t, 0, n - 1);
        hits[t]++;
    }
    double rest_want = 0, rest_got = 0;
    for (uint32_t i = 0; i < n; i++) {
        double want = prob[i] * DRAWS;
        if (want == 0)
            assert_int_equal(hits[i], 0); /* what a filter removed is never drawn */
        if (want < 5) {
            rest_want += want;
            rest_got += hits[i];
            continue;
        }
        chi += (hits[i] - want) * (hits[i] - want) / want;
        cells++;
    }
    if (rest_want >= 5) {
        chi += (rest_got - rest_want) * (rest_got - rest_want) / rest_want;
        cells++;
    }
    double dof = cells > 1 ? cells - 1 : 1;
    if (chi > dof + 6 * sqrt(2 * dof) + 6)
        fail_msg("chi-square %g of %g degrees: T %g k %u p %g min-p %g n %u", chi, dof,
                 (double)p->temperature, p->top_k, (double)p->top_p, (double)p->min_p, n);
    model_sampler_close(s);
    free(prob);
    free(hits);
}

static void draws_follow_the_distribution(void **state)
{
    static const float temperatures[] = {0.3f, 0.7f, 1, 1.5f};
    static const uint32_t ks[] = {0, 0, 1, 3, 20, 5000};
    static const float ps[] = {1, 1, 0.95f, 0.5f, 0.1f};
    static const float mins[] = {0, 0, 0.05f, 0.3f};
    uint64_t fixed = 12345;
    (void)state;
    for (int i = 0; i < 60; i++) {
        uint32_t n = test_range(&fixed, 1, i % 3 ? 40 : 700);
        float *l = malloc(n * sizeof *l);
        for (uint32_t k = 0; k < n; k++)
            l[k] = 2 * test_normal(&fixed) + (i % 5 == 0 ? 30 : 0);
        if (n > 4)
            l[test_range(&fixed, 0, n - 1)] = -INFINITY;
        struct model_sampling p = model_sampling_default();
        p.temperature = temperatures[test_range(&fixed, 0, 3)];
        p.top_k = ks[test_range(&fixed, 0, 5)];
        p.top_p = ps[test_range(&fixed, 0, 4)];
        p.min_p = mins[test_range(&fixed, 0, 3)];
        p.seed = test_random(&fixed);
        check_distribution(l, n, &p);
        free(l);
    }
}

/* ---- penalties, bans ----------------------------------------------------------------------- */

static void penalties_are_those_of_vllm(void **state)
{
    (void)state;
    for (int round = 0; round < 200; round++) {
        enum { N = 50 };
        float l[N], want[N];
        int32_t context[40], banned[3], token;
        size_t n_context = test_range(&seed, 0, 40),
               n_prompt = test_range(&seed, 0, (uint32_t)n_context);
        size_t n_banned = test_range(&seed, 0, 3);
        struct model_sampling p = model_sampling_default();
        p.repetition_penalty = (float)test_range(&seed, 5, 20) / 10;
        p.presence_penalty = (float)test_range(&seed, 0, 40) / 10 - 2;
        p.frequency_penalty = (float)test_range(&seed, 0, 40) / 10 - 2;
        for (int i = 0; i < N; i++)
            l[i] = test_normal(&seed);
        for (size_t i = 0; i < n_context; i++)
            context[i] = (int32_t)test_range(&seed, 0, N - 1);
        for (size_t i = 0; i < n_banned; i++)
            banned[i] = (int32_t)test_range(&seed, 0, N - 1);
        for (int i = 0; i < N; i++) {
            unsigned out = 0, in = 0;
            for (size_t k = 0; k < n_context; k++) {
                in += context[k] == i;
                out += context[k] == i && k >= n_prompt;
            }
            want[i] = !in        ? l[i]
                      : l[i] > 0 ? l[i] / p.repetition_penalty
                                 : l[i] * p.repetition_penalty;
            want[i] -= p.frequency_penalty * (float)out;
            want[i] -= out ? p.presence_penalty : 0;
        }
        for (size_t i = 0; i < n_banned; i++)
            want[banned[i]] = -INFINITY;
        int best = 0;
        for (int i = 1; i < N; i++)
            if (want[i] > want[best])
                best = i;
        struct model_sampler *s = open_sampler(N);
        struct baton_error e;
        float margin;
        for (int twice = 0; twice < 2; twice++) { /* the scratch is clean afterwards */
            test_ok(model_sampler_pick(s, l, &p, context, n_context, n_prompt, 0, 0, banned,
                                       n_banned, &token, &margin, &e),
                    &e);
            assert_int_equal(token, best);
        }
        model_sampler_close(s);
    }
}

/* ---- the same place, the same number ------------------------------------------------------- */

static void draws_belong_to_their_place(void **state)
{
    enum { N = 100 };
    float l[N];
    int32_t first[8][8];
    struct model_sampling p = model_sampling_default();
    struct model_sampler *a = open_sampler(N), *b = open_sampler(N);
    int same_index = 0, same_choice = 0, same_seed = 0;
    (void)state;
    for (int i = 0; i < N; i++)
        l[i] = 0.1f * test_normal(&seed);
    p.temperature = 1;
    p.seed = test_random(&seed);
    for (uint32_t c = 0; c < 8; c++)
        for (uint32_t i = 0; i < 8; i++)
            first[c][i] = pick(a, l, &p, c, i);
    struct model_sampling other = p;
    other.seed ^= 1ULL << 40; /* the upper half of the seed counts too */
    for (uint32_t c = 8; c-- > 0;)
        for (uint32_t i = 8; i-- > 0;) {
            assert_int_equal(pick(b, l, &p, c, i), first[c][i]);
            same_seed += pick(b, l, &other, c, i) == first[c][i];
            same_index += i > 0 && first[c][i] == first[c][i - 1];
            same_choice += c > 0 && first[c][i] == first[c - 1][i];
        }
    assert_true(same_index < 12 && same_choice < 12 && same_seed < 12);
    model_sampler_close(a);
    model_sampler_close(b);
}

/* ---- log-probabilities --------------------------------------------------------------------- */

static void logprobs_are_a_log_softmax(void **state)
{
    (void)state;
    for (int round = 0; round < 50; round++) {
        uint32_t n = test_range(&seed, 1, 500), top = test_range(&seed, 0, n < 20 ? n : 20);
        float *l = malloc(n * sizeof *l), *lp = malloc((top + 2) * sizeof *lp), one = NAN;
        int32_t *ids = malloc((top + 2) * sizeof *ids);
        int32_t token = (int32_t)test_range(&seed, 0, n - 1);
        double sum = 0;
        for (uint32_t i = 0; i < n; i++) {
            l[i] = round % 2 ? (float)test_range(&seed, 0, 5) : 3 * test_normal(&seed);
            sum += exp(l[i]);
        }
        lp[top] = 1234;
        ids[top] = 1234;
        struct model_sampler *s = open_sampler(n);
        struct baton_error e;
        test_ok(model_sampler_logprobs(s, l, token, top, ids, lp, &one, &e), &e);
        assert_true(fabs(one - (l[token] - log(sum))) < 1e-5);
        assert_true(lp[top] == 1234 && ids[top] == 1234);
        for (uint32_t i = 0; i < top; i++) {
            assert_true(fabs(lp[i] - (l[ids[i]] - log(sum))) < 1e-5);
            uint32_t better = 0; /* tokens that must come before it */
            for (uint32_t k = 0; k < n; k++)
                better += l[k] > l[ids[i]] || (l[k] == l[ids[i]] && (int32_t)k < ids[i]);
            assert_int_equal(better, i);
        }
        model_sampler_close(s);
        free(l);
        free(lp);
        free(ids);
    }
}

/* ---- refusals ------------------------------------------------------------------------------ */

static void bad_values_are_named(void **state)
{
    struct baton_error e;
    (void)state;
    struct model_sampling p = model_sampling_default();
    test_ok(model_sampling_check(&p, &e), &e);
#define BAD(field, value)                                                                          \
    p = model_sampling_default();                                                                  \
    p.field = value;                                                                               \
    test_fails(model_sampling_check(&p, &e), BATON_ERR_USAGE, #field, &e)
    BAD(temperature, -0.1f);
    BAD(temperature, NAN);
    BAD(temperature, INFINITY);
    BAD(top_p, 0);
    BAD(top_p, 1.01f);
    BAD(top_p, NAN);
    BAD(min_p, -0.01f);
    BAD(min_p, 1.5f);
    BAD(repetition_penalty, 0);
    BAD(repetition_penalty, NAN);
    BAD(presence_penalty, 2.5f);
    BAD(frequency_penalty, -2.5f);
#undef BAD
}

static void bad_rows_are_refused(void **state)
{
    float l[4] = {1, 2, 3, 4}, margin, lp;
    int32_t token, bad = 4, all[] = {0, 1, 2, 3};
    struct baton_error e;
    struct model_sampling p = model_sampling_default();
    struct model_sampler *s = open_sampler(4);
    (void)state;
#define PICK(ctx, n_ctx, n_prompt, ban, n_ban)                                                     \
    model_sampler_pick(s, l, &p, ctx, n_ctx, n_prompt, 0, 0, ban, n_ban, &token, &margin, &e)
    test_fails(PICK(NULL, 0, 0, all, 4), BATON_ERR_INPUT, "banned", &e);
    test_fails(PICK(NULL, 0, 0, &bad, 1), BATON_ERR_INPUT, "banned id 4", &e);
    test_fails(PICK(all, 1, 2, NULL, 0), BATON_ERR_USAGE, "prompt", &e);
    p.repetition_penalty = 1.1f;
    test_fails(PICK(&bad, 1, 1, NULL, 0), BATON_ERR_INPUT, "context id 4", &e);
    for (int i = 0; i < 4; i++) {
        float keep = l[i];
        l[i] = NAN;
        test_fails(PICK(NULL, 0, 0, NULL, 0), BATON_ERR_INTEGRITY, "logit", &e);
        test_fails(model_sampler_logprobs(s, l, 0, 0, NULL, NULL, &lp, &e), BATON_ERR_INTEGRITY,
                   "logit", &e);
        l[i] = INFINITY;
        test_fails(PICK(NULL, 0, 0, NULL, 0), BATON_ERR_INTEGRITY, "logit", &e);
        l[i] = keep;
    }
    l[0] = l[1] = l[2] = l[3] = -INFINITY;
    test_fails(PICK(NULL, 0, 0, NULL, 0), BATON_ERR_INTEGRITY, "finite", &e);
    l[0] = 1;
    test_fails(model_sampler_logprobs(s, l, 4, 0, NULL, NULL, &lp, &e), BATON_ERR_INPUT, "token",
               &e);
    test_fails(model_sampler_logprobs(s, l, 0, 5, NULL, NULL, &lp, &e), BATON_ERR_USAGE, "top 5",
               &e);
#undef PICK
    model_sampler_close(s);
    model_sampler_close(NULL);
    s = NULL;
    test_fails(model_sampler_open(0, &s, &e), BATON_ERR_USAGE, "vocabulary", &e);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_known_answers),
        cmocka_unit_test(greedy_is_exact),
        cmocka_unit_test(draws_follow_the_distribution),
        cmocka_unit_test(penalties_are_those_of_vllm),
        cmocka_unit_test(draws_belong_to_their_place),
        cmocka_unit_test(logprobs_are_a_log_softmax),
        cmocka_unit_test(bad_values_are_named),
        cmocka_unit_test(bad_rows_are_refused),
    };
    seed = test_seed();
    return cmocka_run_group_tests_name("model-sampler", tests, NULL, NULL);
}
