/* SPDX-License-Identifier: Apache-2.0 */
/* Tokenizers: Hugging Face tokenizer.json of the three families, the same ids on every text.
 *
 * Byte-level BPE with the Qwen or Llama-3 splitting pattern (PCRE2), NFC (utf8proc), Gemma's BPE
 * over whole text with byte fallback, added and special tokens, template post-processing. Immutable
 * after opening and safe to use from any number of threads.
 */
#ifndef MODEL_TOKENIZER_H
#define MODEL_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <baton/error.h>

struct model_tokenizer;

/* Open DIR/tokenizer.json. Its JSON tree is freed before this returns. Cycles in merges, ids out of
 * range, unknown kinds of parts are BATON_ERR_INPUT naming the part. */
int model_tokenizer_open(const char *dir, struct model_tokenizer **out, struct baton_error *e);
/* The same over text (fuzzing). */
int model_tokenizer_parse(const char *json, size_t n, const char *what,
                          struct model_tokenizer **out, struct baton_error *e);
void model_tokenizer_close(struct model_tokenizer *t); /* NULL is fine */

uint32_t model_tokenizer_size(const struct model_tokenizer *t); /* one past the largest id */
/* Id of a token by its exact content, added tokens included; -1 where there is none. */
int32_t model_tokenizer_id(const struct model_tokenizer *t, const char *content);
bool model_tokenizer_is_special(const struct model_tokenizer *t, int32_t id);

/* Encode n bytes of UTF-8. Added tokens written in the text are recognised. with_special adds what
 * the post-processor adds. *ids is malloc'ed. Invalid UTF-8 is BATON_ERR_INPUT with the offset. */
int model_tokenizer_encode(const struct model_tokenizer *t, const char *text, size_t n,
                           bool with_special, int32_t **ids, size_t *n_ids, struct baton_error *e);

/* Decode ids as Hugging Face does (cleanup off). *text is malloc'ed, NUL-terminated; bytes that
 * form no character become U+FFFD. An id that no token has is no text, however large: a model may
 * have more ids than its tokenizer (model_ids_check knows a model's). A negative one is
 * BATON_ERR_INPUT. */
int model_tokenizer_decode(const struct model_tokenizer *t, const int32_t *ids, size_t n_ids,
                           bool skip_special, char **text, size_t *n, struct baton_error *e);

/* BATON_ERR_INPUT naming the first of ids that is not in [0, vocab). */
int model_ids_check(const int32_t *ids, size_t n_ids, uint32_t vocab, struct baton_error *e);

/* Streaming decode: the pieces put together are exactly model_tokenizer_decode of all ids, and no
 * piece ends inside a UTF-8 sequence. */
struct model_detokenizer;
int model_detokenizer_open(const struct model_tokenizer *t, bool skip_special,
                           struct model_detokenizer **out, struct baton_error *e);
void model_detokenizer_close(struct model_detokenizer *d); /* NULL is fine */
/* Feed one id; *piece points into d until the next call and may be empty. */
int model_detokenizer_push(struct model_detokenizer *d, int32_t id, const char **piece, size_t *n,
                           struct baton_error *e);
/* What was held back at the end of the text. */
int model_detokenizer_finish(struct model_detokenizer *d, const char **piece, size_t *n,
                             struct baton_error *e);

#endif
