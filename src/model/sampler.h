/* SPDX-License-Identifier: Apache-2.0 */
/* Sampler: one row of logits to one token. Stateless besides the counts it is given.
 *
 * Random numbers are philox4x32-10 keyed by the seed, counter (choice, output index), so the same
 * request gives the same tokens wherever and whenever it runs.
 */
#ifndef MODEL_SAMPLER_H
#define MODEL_SAMPLER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <baton/error.h>

struct model_sampling {
    float temperature;                                             /* 0 = greedy */
    uint32_t top_k;                                                /* 0 = off */
    float top_p;                                                   /* 1 = off */
    float min_p;                                                   /* 0 = off */
    float repetition_penalty, presence_penalty, frequency_penalty; /* 1, 0, 0 = off */
    uint64_t seed;
};
struct model_sampling model_sampling_default(void); /* greedy */
/* Every field in range, or BATON_ERR_USAGE naming the field. */
int model_sampling_check(const struct model_sampling *s, struct baton_error *e);

struct model_sampler; /* scratch for one vocabulary; one a thread */
int model_sampler_open(uint32_t vocab, struct model_sampler **out, struct baton_error *e);
void model_sampler_close(struct model_sampler *s); /* NULL is fine */

/* Choose a token. context holds prompt then output ids (penalties), `n_prompt` of them prompt.
 * index is the output index (0 for the first generated token), choice the `n` choice. banned ids
 * are never chosen (min_tokens: the end ids). *margin: largest minus second largest raw logit. A
 * row with a NaN is BATON_ERR_INTEGRITY. Ties go to the lower id. */
int model_sampler_pick(struct model_sampler *s, const float *logits,
                       const struct model_sampling *params, const int32_t *context,
                       size_t n_context, size_t n_prompt, uint32_t choice, uint32_t index,
                       const int32_t *banned, size_t n_banned, int32_t *token, float *margin,
                       struct baton_error *e);
/* Log-probability of `token` and the top n (ids and log-probabilities, descending) of a row. */
int model_sampler_logprobs(struct model_sampler *s, const float *logits, int32_t token,
                           uint32_t n_top, int32_t *top_ids, float *top_logprobs, float *logprob,
                           struct baton_error *e);

#endif
