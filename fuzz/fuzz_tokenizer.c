/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer.json. What is accepted must encode and decode: any text, any id. */
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool holds)
{
    if (!holds)
        abort();
}

static void check_ids(const struct model_tokenizer *t, const int32_t *ids, size_t n)
{
    struct baton_error e;
    char *text = NULL;
    size_t n_text;
    for (size_t i = 0; i < n; i++)
        must(ids[i] >= 0 && (uint32_t)ids[i] < model_tokenizer_size(t));
    for (int skip = 0; skip < 2; skip++)
        if (model_tokenizer_decode(t, ids, n, skip, &text, &n_text, &e) == 0)
            free(text);
}

static void check(const struct model_tokenizer *t)
{
    static const char *const texts[] = {
        "", "a", "ab <s> c\n\n  it's 123  aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!",
        "\xED\x95\x9C\xEA\xB5\xAD\xEC\x96\xB4 e\xCC\x81 \xF0\x9F\x98\x80 \xE2\x96\x81 <0x41>"};
    struct baton_error e;
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        int32_t *ids = NULL;
        size_t n;
        if (model_tokenizer_encode(t, texts[i], strlen(texts[i]), i % 2, &ids, &n, &e) == 0)
            check_ids(t, ids, n);
        free(ids);
    }
    int32_t all[512];
    uint32_t size = model_tokenizer_size(t);
    must(size >= 1);
    for (uint32_t i = 0; i < 512; i++)
        all[i] = (int32_t)(i % size);
    check_ids(t, all, 512);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct baton_error e = {0};
    struct model_tokenizer *t = NULL;
    if (model_tokenizer_parse((const char *)data, n, "fuzz", &t, &e) == 0) {
        check(t);
        model_tokenizer_close(t);
    } else {
        must(!t && e.code < 0 && e.text[0]);
    }
    return 0;
}
