/* SPDX-License-Identifier: Apache-2.0 */
/* Tokenizer goldens and the three shipped tokenizers they belong to. */
#ifndef TESTS_MODEL_GOLDENS_H
#define TESTS_MODEL_GOLDENS_H

#include <jansson.h>

#include "model/tokenizer.h"
#include "tests/test.h"

static const struct {
    const char *golden, *model;
} golden_files[] = {
    {"tests/golden/tokenizers/qwen3.json", "models/qwen3-tiny"},
    {"tests/golden/tokenizers/llama3.json", "models/koni-tiny"},
    {"tests/golden/tokenizers/gemma3.json", "models/gemma3-tiny"},
};
enum { N_GOLDEN_FILES = sizeof golden_files / sizeof *golden_files };

static inline json_t *golden_load(size_t i)
{
    json_error_t why;
    json_t *g = json_load_file(test_path(golden_files[i].golden), JSON_ALLOW_NUL, &why);
    if (!g)
        fail_msg("%s: %s", golden_files[i].golden, why.text);
    return g;
}

static inline struct model_tokenizer *golden_tokenizer(size_t i)
{
    struct baton_error e;
    struct model_tokenizer *t = NULL;
    test_ok(model_tokenizer_open(test_path(golden_files[i].model), &t, &e), &e);
    return t;
}

/* The text gives exactly these ids. */
static inline void check_ids(const struct model_tokenizer *t, const char *text, size_t n,
                             bool special, const json_t *want)
{
    struct baton_error e;
    int32_t *ids = NULL;
    size_t n_ids = 12345;
    test_ok(model_tokenizer_encode(t, text, n, special, &ids, &n_ids, &e), &e);
    assert_non_null(ids);
    if (n_ids != json_array_size(want))
        fail_msg("%zu ids, wanted %zu: %s", n_ids, json_array_size(want), text);
    for (size_t i = 0; i < n_ids; i++)
        if (ids[i] != json_integer_value(json_array_get(want, i)))
            fail_msg("id %zu is %d, wanted %lld: %s", i, ids[i],
                     (long long)json_integer_value(json_array_get(want, i)), text);
    free(ids);
}

#endif
