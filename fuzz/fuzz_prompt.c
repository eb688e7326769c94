/* SPDX-License-Identifier: Apache-2.0 */
/* Prompts: any bytes through a shipped tokenizer (the first byte chooses which). Well-formed
 * text must come back as it was (as NFC for Qwen, with spaces for U+2581 for Gemma), in pieces
 * too. Run in the source tree or with BATON_SOURCE_ROOT. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/tokenizer.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

enum { QWEN3, LLAMA3, GEMMA3, N_TOKENIZERS };
static struct model_tokenizer *tokenizers[N_TOKENIZERS];

static void must(bool holds)
{
    if (!holds)
        abort();
}

static struct model_tokenizer *tokenizer(unsigned which)
{
    static const char *const dirs[N_TOKENIZERS] = {"models/qwen3-tiny", "models/koni-tiny",
                                                   "models/gemma3-tiny"};
    const char *root = getenv("BATON_SOURCE_ROOT");
    char path[1024];
    struct baton_error e;
    if (!tokenizers[which]) {
        snprintf(path, sizeof path, "%s/%s", root ? root : ".", dirs[which]);
        must(model_tokenizer_open(path, &tokenizers[which], &e) == 0);
    }
    return tokenizers[which];
}

static void check_stream(const struct model_tokenizer *t, const int32_t *ids, size_t n,
                         const char *whole, size_t n_whole)
{
    struct model_detokenizer *d = NULL;
    const char *piece;
    size_t at = 0, n_piece;
    must(model_detokenizer_open(t, false, &d, NULL) == 0);
    for (size_t i = 0; i <= n; i++) {
        int rc = i < n ? model_detokenizer_push(d, ids[i], &piece, &n_piece, NULL)
                       : model_detokenizer_finish(d, &piece, &n_piece, NULL);
        must(rc == 0 && n_piece <= n_whole - at && memcmp(piece, whole + at, n_piece) == 0);
        at += n_piece;
    }
    must(at == n_whole);
    model_detokenizer_close(d);
}

/* Text to ids and back; *n_out is its length. NULL where the text was refused. */
static char *round_trip(const struct model_tokenizer *t, const char *s, size_t n, size_t *n_out)
{
    int32_t *ids = NULL;
    size_t n_ids;
    char *back = NULL;
    struct baton_error e;
    int rc = model_tokenizer_encode(t, s, n, false, &ids, &n_ids, &e);
    must(rc == 0 || rc == BATON_ERR_INPUT);
    if (rc)
        return NULL;
    must(model_tokenizer_decode(t, ids, n_ids, false, &back, n_out, &e) == 0);
    check_stream(t, ids, n_ids, back, *n_out);
    free(ids);
    return back;
}

/* U+2581 to a space in place, as Gemma's decoder does; the new length. */
static size_t spaces(char *s, size_t n)
{
    size_t to = 0;
    for (size_t i = 0; i < n; to++)
        if (n - i >= 3 && memcmp(s + i, "\xE2\x96\x81", 3) == 0) {
            s[to] = ' ';
            i += 3;
        } else {
            s[to] = s[i++];
        }
    return to;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n == 0)
        return 0;
    unsigned which = data[0] % N_TOKENIZERS;
    const struct model_tokenizer *t = tokenizer(which);
    size_t n_text = n - 1, n_back = 0, n_again = 0;
    char *text = malloc(n_text + 1); /* of its own, so that a byte too far is seen */
    memcpy(text, data + 1, n_text);
    char *back = round_trip(t, text, n_text, &n_back);
    if (back) {
        if (which == QWEN3) { /* NFC changes a text once */
            char *again = round_trip(t, back, n_back, &n_again);
            must(again && n_again == n_back && memcmp(again, back, n_back) == 0);
            free(again);
        } else {
            n_text = which == GEMMA3 ? spaces(text, n_text) : n_text;
            must(n_back == n_text && memcmp(back, text, n_text) == 0);
        }
        free(back);
    }
    free(text);
    return 0;
}
