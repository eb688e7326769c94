/* SPDX-License-Identifier: Apache-2.0 */
/* Bodies of requests; the first byte chooses the path. What is accepted is inside the bounds that
 * the rest of the server relies on, what is refused says why in a document. */
#include <stdlib.h>
#include <string.h>

#include "serve/serve_priv.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool holds)
{
    if (!holds)
        abort();
}

static void check_prompts(const struct serve_ask *a)
{
    must(a->n_messages > 0 || a->n_prompts > 0);
    for (size_t i = 0; i < a->n_prompts; i++)
        must(a->prompts[i].text ? a->prompts[i].text[0] != '\0' : a->prompts[i].n_ids > 0);
    for (size_t i = 0; i < a->n_messages; i++)
        must(a->messages[i].role && a->messages[i].content);
}

static void check(const struct serve_ask *a)
{
    check_prompts(a);
    if (a->kind == SERVE_TOKENIZE)
        return;
    must(a->n >= 1 && (a->n_prompts ? a->n_prompts : 1) * a->n <= SERVE_MAX_CHOICES);
    must(a->max_tokens == 0 || a->min_tokens <= a->max_tokens);
    must(a->temperature >= 0 && a->temperature <= 2);
    must(a->top_p > 0 && a->top_p <= 1 && a->min_p >= 0 && a->min_p <= 1);
    must(a->repetition_penalty > 0 && a->repetition_penalty <= 100);
    must(a->n_top <= SERVE_MAX_TOP && a->n_stops <= SERVE_MAX_STOPS);
    for (size_t i = 0; i < a->n_stops; i++)
        must(a->stops[i][0] && strlen(a->stops[i]) <= SERVE_MAX_STOP_BYTES);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct serve_ask a;
    struct serve_problem p;
    if (n == 0)
        return 0;
    if (serve_ask_parse(&a, data[0] % 3, (const char *)data + 1, n - 1, &p) == 0) {
        check(&a);
    } else {
        json_t *doc = serve_problem_json(&p);
        must(doc && p.status >= 400 && p.message[0]);
        json_decref(doc);
    }
    serve_ask_free(&a);
    return 0;
}
