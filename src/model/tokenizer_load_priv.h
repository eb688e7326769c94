/* SPDX-License-Identifier: Apache-2.0 */
/* Between the files that read tokenizer.json. */
#ifndef MODEL_TOKENIZER_LOAD_PRIV_H
#define MODEL_TOKENIZER_LOAD_PRIV_H

#include "model/tokenizer_priv.h"

/* ---- tokenizer_json.c: the large parts, without a tree ------------------------------------- */

struct model_span {
    const char *from, *to;
};
/* Where model.vocab (an object) and model.merges (a list) stand in the text. */
int model_json_spans(const char *json, size_t n, const char *what, struct model_span *vocab,
                     struct model_span *merges, struct baton_error *e);
/* The text with both emptied. */
int model_json_rest(const char *json, size_t n, struct model_span vocab, struct model_span merges,
                    struct model_text *out, struct baton_error *e);

/* A place in well-formed UTF-8 that should be JSON. */
struct model_cursor {
    const char *begin, *p, *end;
    const char *what;
    struct baton_error *e;
};
char model_cursor_peek(
    struct model_cursor *c); /* next character that is no space; NUL at the end */
int model_cursor_expect(struct model_cursor *c, char what);
/* In a list or object whose opening was read: 1 = an element follows, 0 = `close` was read. *first
 * is true before the first element. */
int model_cursor_next(struct model_cursor *c, char close, bool *first);
/* The string here, appended to out without escapes. */
int model_cursor_string(struct model_cursor *c, struct model_text *out);
/* The integer here, a member of an object; false where it is none of at most nine digits. */
bool model_cursor_u32(struct model_cursor *c, uint32_t *out);

struct json_t;
/* One reading: the tree, where it came from, and what is being filled. */
struct model_load {
    const char *what;
    struct json_t *root;
    struct model_span vocab, merges;
    struct model_tokenizer *t;
    unsigned templates; /* of the post-processor */
    bool decoder_ends;  /* ByteLevel or Fuse came: nothing may follow */
    struct baton_error *e;
};

/* ---- tokenizer_parts.c: the pipeline --------------------------------------------------------- */

/* Normalizer, pre-tokenizer and decoder. Before the added tokens: they are normalized. */
int model_load_pipeline(struct model_load *l);
/* Post-processor. After the added tokens: it names them. */
int model_load_post(struct model_load *l);

#endif
