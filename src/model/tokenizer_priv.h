/* SPDX-License-Identifier: Apache-2.0 */
/* The parts of a tokenizer and what they do to a text, in the order of an encoding:
 *
 *     added.c        cut the raw text at added tokens; each piece between them then goes through
 *     normalize.c    NFC, replacements, a prefix
 *     added.c        again, with the added tokens that want to see normalized text
 *     pretokenize.c  splits by pattern (pattern.c), bytes as characters
 *     bpe.c          merges into ids
 *     tokenizer.c    the special tokens of the post-processor around all of it
 *
 * and detokenize.c for the way back. tokenizer_load.c fills all of this from JSON once; nothing
 * here changes afterwards, so threads share it. The semantics are those of Hugging Face's
 * tokenizers package; comments name it where a choice is only explained by that.
 */
#ifndef MODEL_TOKENIZER_PRIV_H
#define MODEL_TOKENIZER_PRIV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "model/tokenizer.h"

/* Bounds on what a file may ask for. The largest real one (Gemma 3) has 262145 ids and 514906
 * merges. */
enum {
    MODEL_TOK_FILE_MAX = 256 << 20,
    MODEL_TOK_IDS_MAX = 1 << 22,
    MODEL_TOK_MERGES_MAX = 786432,
    MODEL_TOK_ADDED_MAX = 512,  /* bytes of an added token: bounds a walk in the trie */
    MODEL_TOK_AFFIX_MAX = 64,   /* bytes of a replacement's pattern and content, of a prefix */
    MODEL_TOK_STEPS_MAX = 8,    /* normalizers, splits, decoder replacements */
    MODEL_TOK_SPECIALS_MAX = 16 /* ids that the post-processor puts on one side */
};
#define MODEL_TOK_TEXT_MAX ((size_t)1 << 30) /* bytes of a text, normalized or not */

/* ---- growing arrays ----------------------------------------------------------------------- */

struct model_text {
    char *data;
    size_t n, cap;
};
int model_text_reserve(struct model_text *t, size_t more, struct baton_error *e);
int model_text_add(struct model_text *t, const char *s, size_t n, struct baton_error *e);

struct model_ids {
    int32_t *data;
    size_t n, cap;
};
int model_ids_add(struct model_ids *ids, int32_t id, struct baton_error *e);

/* A token for an error's text: cut between characters, nothing that would break the line. */
struct model_quoted {
    char text[64];
};
struct model_quoted model_quote(const char *s, size_t n);

/* ---- unicode.c ---------------------------------------------------------------------------- */

/* Offset of the first byte that is not part of well-formed UTF-8; n where all is well. */
size_t model_utf8_valid(const char *s, size_t n);
/* Code point at s, *len its bytes. Well-formed text only. */
uint32_t model_utf8_get(const char *s, size_t *len);
/* Bytes of the code point written to out[4]. */
size_t model_utf8_put(uint32_t cp, char *out);
/* Bytes of the sequence that a first byte announces; 0 where it can begin none. */
size_t model_utf8_length(unsigned char first);
/* The second byte of a sequence is narrower than 80..BF after some first bytes. */
bool model_utf8_second(unsigned char first, unsigned char second);
bool model_unicode_is_space(uint32_t cp); /* property White_Space */
bool model_unicode_is_word(uint32_t cp);  /* \w of Rust's regex */
/* True for what Unicode 9 does not know and later versions give a part in normalization. */
bool model_unicode_is_new_mark(uint32_t cp);
/* Body of a PCRE2 class: White_Space; letters and numbers of Unicode 16 that \p{L} and \p{N} of
 * an older PCRE2 lack. */
extern const char *const model_unicode_class_space;
extern const char *const model_unicode_class_letter;
extern const char *const model_unicode_class_number;

/* ---- vocab.c: strings and their ids ------------------------------------------------------- */

enum {
    MODEL_TOKEN_MODEL = 1, /* BPE may produce it */
    MODEL_TOKEN_ADDED = 2,
    MODEL_TOKEN_SPECIAL = 4,
    MODEL_TOKEN_LSTRIP = 8, /* as an added token it takes the spaces on its left with it */
    MODEL_TOKEN_RSTRIP = 16,
    MODEL_TOKEN_WORD = 32,      /* matches between word borders only */
    MODEL_TOKEN_NORMALIZED = 64 /* is looked for in normalized text */
};

struct model_vocab {
    char *text; /* all tokens, back to back */
    size_t n_text, text_cap;
    uint32_t *start;  /* [n_ids] into text */
    uint32_t *length; /* [n_ids] */
    uint8_t *flags;   /* [n_ids] 0 = a hole */
    uint32_t n_ids;
    uint32_t *slots; /* [mask + 1] id + 1, open addressing */
    uint32_t mask;
    uint64_t seed; /* of the hash: random, so that no file can choose its collisions */
};
int model_vocab_init(struct model_vocab *v, uint32_t n_ids, uint32_t n_tokens, size_t text_bytes,
                     struct baton_error *e);
void model_vocab_fini(struct model_vocab *v);
/* Add a token; its string and its id must be new. The caller checked the room given to init. */
int model_vocab_add(struct model_vocab *v, const char *s, size_t n, uint32_t id, uint8_t flags,
                    const char *what, struct baton_error *e);
int32_t model_vocab_find(const struct model_vocab *v, const char *s, size_t n); /* -1 = none */

/* ---- bpe.c -------------------------------------------------------------------------------- */

struct model_merge {
    uint32_t left, right; /* left == UINT32_MAX: an empty slot */
    uint32_t rank, id;    /* lower ranks merge first */
};

struct model_bpe {
    struct model_merge *merges; /* [mask + 1] open addressing */
    uint32_t mask;
    bool ignore_merges; /* a whole piece that is a token stays one */
    bool byte_fallback; /* an unknown character becomes its bytes' tokens */
    bool fuse_unk;      /* unknown neighbours share one token */
    int32_t unk;        /* -1 = none: unknown characters vanish */
    int32_t bytes[256]; /* ids of <0x00> to <0xFF>; -1 = none */
    int32_t chars[512]; /* ids of the first code points, all that byte-level text has */
};

struct model_symbol {
    uint32_t id;
    int32_t prev, next; /* -1 = none */
    uint32_t rank;      /* merge_short: of the pair with the next symbol */
    uint32_t merged;    /* what that pair becomes; merge_long: 1 = swallowed by its left */
};
struct model_candidate {
    uint64_t order; /* rank << 32 | position */
    uint32_t id;
};
/* Scratch of one encoding. */
struct model_bpe_work {
    struct model_symbol *symbols;
    size_t n, cap;
    struct model_candidate *heap;
    size_t n_heap, heap_cap;
};
void model_bpe_work_fini(struct model_bpe_work *w);
int model_bpe_init(struct model_bpe *b, uint32_t n_merges, struct baton_error *e);
/* Ids of single characters and bytes, once the vocabulary stands. */
void model_bpe_index(struct model_bpe *b, const struct model_vocab *v);
/* A pair that is there already gets the new rank. */
void model_bpe_add(struct model_bpe *b, uint64_t seed, uint32_t left, uint32_t right, uint32_t rank,
                   uint32_t id);
int model_bpe_encode(const struct model_bpe *b, const struct model_vocab *v,
                     struct model_bpe_work *w, const char *s, size_t n, struct model_ids *out,
                     struct baton_error *e);

/* ---- added.c ------------------------------------------------------------------------------ */

struct model_trie_node {
    uint32_t child, sibling; /* 0 = none */
    int32_t id;              /* token that ends here; -1 = none */
    uint8_t byte;
};
struct model_trie {
    struct model_trie_node *nodes; /* [n], 0 is unused */
    uint32_t n, cap;
    uint32_t root[256]; /* first byte to node */
};
int model_trie_add(struct model_trie *t, const char *s, size_t n, int32_t id,
                   struct baton_error *e);

/* Walks a text from left to right; each step yields a piece of text or an added token. */
struct model_added_walk {
    const struct model_trie *trie;
    const struct model_vocab *vocab;
    const char *s;
    size_t n;
    size_t done, search; /* text handed out up to here; the next search starts here */
    int32_t pending;     /* token found behind the text just handed out */
};
/* False at the end; else [*from, *to) and *id, -1 for text. */
bool model_added_next(struct model_added_walk *w, size_t *from, size_t *to, int32_t *id);

/* ---- normalize.c -------------------------------------------------------------------------- */

enum model_norm_kind { MODEL_NORM_NFC, MODEL_NORM_REPLACE, MODEL_NORM_PREPEND };
struct model_norm {
    enum model_norm_kind kind;
    char pattern[MODEL_TOK_AFFIX_MAX], content[MODEL_TOK_AFFIX_MAX];
    size_t n_pattern, n_content;
};
/* All steps over s; *out points to s itself or into one of the buffers. */
int model_normalize(const struct model_norm *steps, unsigned n_steps, struct model_text buf[2],
                    const char *s, size_t n, const char **out, size_t *n_out,
                    struct baton_error *e);
/* s with every `pattern` replaced, appended to out. */
int model_replace(const struct model_norm *r, const char *s, size_t n, struct model_text *out,
                  struct baton_error *e);

/* ---- pattern.c: regular expressions ------------------------------------------------------- */

struct model_pattern; /* compiled, shared by threads */
int model_pattern_compile(const char *text, size_t n, const char *what, struct model_pattern **out,
                          struct baton_error *e);
void model_pattern_free(struct model_pattern *p); /* NULL is fine */
/* Scratch for matching, one a thread; free with model_pattern_work_free. */
int model_pattern_work(const struct model_pattern *p, void **work, struct baton_error *e);
void model_pattern_work_free(void *work); /* NULL is fine */
/* First match in s at or after `from`: 1 and [*start, *end), never empty; 0 where there is none. */
int model_pattern_find(const struct model_pattern *p, void *work, const char *s, size_t n,
                       size_t from, size_t *start, size_t *end, struct baton_error *e);

/* ---- pretokenize.c ------------------------------------------------------------------------ */

enum model_split_kind {
    MODEL_SPLIT_REGEX,
    MODEL_SPLIT_TEXT,
    MODEL_SPLIT_SPACE, /* no split: a space before a piece that has none */
    MODEL_SPLIT_BYTES  /* no split: bytes become the characters that stand for them */
};
enum model_split_behavior {
    MODEL_ISOLATED,
    MODEL_REMOVED,
    MODEL_WITH_PREVIOUS,
    MODEL_WITH_NEXT,
    MODEL_CONTIGUOUS
};
struct model_split {
    enum model_split_kind kind;
    enum model_split_behavior behavior;
    bool invert;
    struct model_pattern *regex;
    char text[MODEL_TOK_AFFIX_MAX];
    size_t n_text;
};
/* The characters of the byte-level alphabet: code point of a byte, byte of a code point (-1). */
uint32_t model_byte_char(uint8_t byte);
int model_char_byte(uint32_t cp);

/* ---- the whole ---------------------------------------------------------------------------- */

enum model_decoder_kind {
    MODEL_DECODE_BYTES, /* byte-level alphabet back to bytes */
    MODEL_DECODE_CHAIN  /* replacements, byte fallback, then together */
};

struct model_tokenizer {
    struct model_vocab vocab;
    struct model_bpe bpe;
    struct model_trie raw, normalized; /* added tokens, by the text they are looked for in */
    struct model_norm norm[MODEL_TOK_STEPS_MAX];
    unsigned n_norm;
    struct model_split split[MODEL_TOK_STEPS_MAX];
    unsigned n_split;
    int32_t before[MODEL_TOK_SPECIALS_MAX], after[MODEL_TOK_SPECIALS_MAX];
    unsigned n_before, n_after;
    enum model_decoder_kind decoder;
    struct model_norm decode_replace[MODEL_TOK_STEPS_MAX];
    unsigned n_decode_replace;
    bool decode_bytes; /* <0xHH> tokens are bytes */
};

/* One encoding. Buffers of a step live while the later steps run, so each step has its own. */
struct model_encoding {
    const struct model_tokenizer *t;
    struct model_ids ids;
    struct model_text norm[2];
    struct model_text step[MODEL_TOK_STEPS_MAX];
    void *match[MODEL_TOK_STEPS_MAX];
    struct model_bpe_work bpe;
    struct baton_error *e;
};
/* Split a normalized piece and append its ids. */
int model_pretokenize(struct model_encoding *en, unsigned step, const char *s, size_t n);

#endif
