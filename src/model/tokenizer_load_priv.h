/* SPDX-License-Identifier: Apache-2.0 */
/* Between the two files that read tokenizer.json. */
#ifndef MODEL_TOKENIZER_LOAD_PRIV_H
#define MODEL_TOKENIZER_LOAD_PRIV_H

#include "model/tokenizer_priv.h"

struct json_t;
/* One reading: the tree, where it came from, and what is being filled. */
struct model_load {
    const char *what;
    struct json_t *root;
    struct model_tokenizer *t;
    bool decoder_ends; /* ByteLevel or Fuse came: nothing may follow */
    struct baton_error *e;
};

/* Normalizer, pre-tokenizer and decoder. Before the added tokens: they are normalized. */
int model_load_pipeline(struct model_load *l);
/* Post-processor. After the added tokens: it names them. */
int model_load_post(struct model_load *l);

#endif
