/* SPDX-License-Identifier: Apache-2.0 */
/* verify: does a handoff do what it claims? The checker behind `baton check`.
 *
 * It believes nothing that the handoff says about itself. A cache is read element by element out of
 * the pages that a device holds, by the address formula of baton/device.h written down once more,
 * into a second buffer; conversion between dtypes and the positions that a layer must retain are
 * computed here again, not by the kv room. What the consumer holds after insertion is compared with
 * what the producer holds after its consumer acknowledged; tokens and logits with the consumer's
 * device doing both; that device with the scalar reference. Beside all of it runs a control: the
 * same comparison, native against native, with no transfer.
 *
 *     verify_prompt_lookup(model, 2048, &prompt, &e);
 *     verify_check(&options, &prompt, &result);      // never fails: the result says how it went
 *     verify_prompt_free(&prompt);
 *
 * Threads: any one at a time; the engines that a check opens have their own. Objects belong to the
 * caller. Producer and consumers are engines of this process with pages and weights of their own,
 * joined by a link in memory; the second consumer is joined by a socket.
 */
#ifndef VERIFY_VERIFY_H
#define VERIFY_VERIFY_H

#include "engine/engine.h"

/* ---- caches: a second buffer -------------------------------------------------------------- */

struct verify_slot {
    uint32_t first, n; /* positions [first, first + n) */
    uint8_t *data;     /* [kv_heads, n, head_dim] of the cache's dtype */
};

/* Everything that a device holds of one request. */
struct verify_cache {
    uint32_t n_layers, kv_heads, head_dim, n_tokens;
    uint32_t dtype;            /* enum baton_dtype as stored */
    uint8_t *local;            /* [n_layers] 1 = local */
    struct verify_slot *slots; /* [2 * n_layers]: K of layer l is slot 2 l, V slot 2 l + 1 */
    char numerics[64];         /* of the device that holds it */
    bool row_invariant;        /* that device promises equal bits */
    bool positions_ok;         /* every layer holds what it must, and an import nothing else */
    char positions_why[160];   /* the first layer that does not, "" where all do */
};
/* Read what `look` shows. A layer that does not hold its positions is no error: positions_ok is
 * false and its slots are empty. */
int verify_cache_read(const struct engine_look *look, struct verify_cache **out,
                      struct baton_error *e);
void verify_cache_free(struct verify_cache *c); /* NULL and half-built are fine */

/* An element of a cache. */
struct verify_place {
    uint32_t layer;
    enum kv_which which;
    uint32_t position, head, dim;
};

/* What one cache has against what another one wants. */
struct verify_diff {
    uint32_t slots_total, slots_exact;
    double k_rel_rms, v_rel_rms; /* of the worst slot, to the wanted values; infinite: not finite */
    bool finite;                 /* what it has */
    bool positions_ok;           /* as both were read, and the same in both */
    bool found;                  /* an element that is not what it should be: */
    struct verify_place first;   /* the first in the order layer, K before V, position, head, dim */
    uint64_t elements;           /* how many there are */
};
/* A slot is exact where every element of `have` is the wanted one after one rounding to nearest
 * even to have's dtype: the same bits where the dtypes are equal. BATON_ERR_MISMATCH where the two
 * are not caches of one model. */
int verify_cache_compare(const struct verify_cache *have, const struct verify_cache *want,
                         struct verify_diff *out, struct baton_error *e);
/* Largest relative error that conversion to a dtype may make in an element, so in the RMS too: half
 * a unit in the last place. 0 where the dtypes are equal or wider. */
double verify_conversion_budget(uint32_t from, uint32_t to);

/* Bytes of an element of a float dtype. */
uint32_t verify_width(uint32_t dtype);
/* Relative RMS of one slot of `have` to the wanted values; infinite where a number is not finite or
 * the two hold other positions. *finite: `have` is; may be NULL. */
double verify_slot_error(const struct verify_cache *have, const struct verify_cache *want,
                         uint32_t slot, bool *finite);
/* A slot's elements after one rounding to nearest even to `dtype`, in the slot's order, into `to`:
 * the bytes that a consumer of that dtype must hold. */
void verify_slot_rounded(const struct verify_cache *c, uint32_t slot, uint32_t dtype, uint8_t *to);

/* ---- prompts ------------------------------------------------------------------------------ */

struct verify_prompt {
    int32_t *ids;
    size_t n_ids;
    char name[64];
    const char *source; /* "lookup", "random ids", "file" */
};
/* A table of records and a question about its first one, as a chat turn where the model has a chat
 * format, with as much cut out of the table's middle as leaves exactly n_tokens. Random ids where
 * the model has no tokenizer. The same for the same model and n_tokens, always.
 * BATON_ERR_INPUT where the model's context is shorter. */
int verify_prompt_lookup(const struct baton_model *m, uint32_t n_tokens, struct verify_prompt *out,
                         struct baton_error *e);
void verify_prompt_free(struct verify_prompt *p);

/* ---- the check ---------------------------------------------------------------------------- */

/* What a device may differ by from the reference, and two devices from each other. Constants of
 * docs/architecture.md, not measured. */
struct verify_limits {
    double logits; /* relative RMS of a row */
    double kv;     /* of a slot */
    double margin; /* argmax must be equal where the reference's margin is larger */
};
extern const struct verify_limits verify_limits_reference; /* cpu:ref and its like */
extern const struct verify_limits verify_limits_bf16;      /* all other devices */

/* One run of a check, and what came out of it: all of it where it finished. */
struct verify_run {
    uint32_t n, cap;
    int32_t *ids, *argmax;             /* [n] */
    float *margins;                    /* [n] */
    float *rows;                       /* [n, vocab] */
    uint64_t *time_ns;                 /* [n] when each token was chosen, CLOCK_MONOTONIC */
    struct verify_cache *cache, *sent; /* the consumer's (or native's), the producer's */
    struct baton_stats stats;
};
enum verify_run_kind {
    VERIFY_RUN_REFERENCE, /* cpu:ref, greedy */
    VERIFY_RUN_NATIVE,    /* the decode device alone, greedy */
    VERIFY_RUN_CONTROL,   /* the same again */
    VERIFY_RUN_FORCED,    /* the same under the reference's tokens */
    VERIFY_RUN_HANDOFF,   /* the route, greedy */
    VERIFY_RUN_SECOND,    /* the route to a second consumer, under native's tokens */
};
extern const char *const verify_run_names[];
/* For who keeps evidence: a run, the one that it is compared with (NULL: the reference, and native)
 * and why it ended early (NULL: it did not). Valid inside the call alone. */
struct verify_record {
    enum verify_run_kind kind;
    uint32_t repeat; /* of a handoff, from 0 */
    uint32_t vocab;
    const struct verify_run *run, *against;
    const struct baton_error *error;
};
/* Relative RMS of b - a to a; infinite where a number is not finite. */
double verify_rel_rms(const float *a, const float *b, size_t n);

/* What engines still held when their last request was closed: all 0, or something leaks. */
struct verify_left {
    uint64_t lanes, blocks, tickets;
};
void verify_left_add(struct verify_left *left, struct baton_engine *en); /* NULL, NULL: nothing */

struct verify_options {
    struct baton_model *model;
    const char *prefill, *decode; /* device names */
    enum baton_mode mode;         /* BATON_WHOLE or BATON_STREAM */
    uint32_t n;                   /* tokens to generate, past end tokens */
    uint32_t repeats;             /* handoffs to the first consumer, at least 1 */
    uint32_t threads;             /* an engine; 0 = one a core */
    bool no_reference;            /* leave cpu:ref out: it is slow */
    bool plant_flip;              /* flip a bit of every imported cache of the first consumer, */
    uint64_t fault_seed;          /* drawn from here */
    /* Told how many of the check's runs are done; may be NULL. */
    void (*progress)(void *ctx, uint64_t done, uint64_t all);
    void *ctx;
    /* Shown every run; may be NULL. */
    void (*record)(void *ctx, const struct verify_record *r);
    void *record_ctx;
};

enum verify_verdict { VERIFY_PASS = 0, VERIFY_FAIL = 1, VERIFY_ERROR = 2 };

/* What layers of one kind retain. */
struct verify_group {
    uint32_t layers;
    int32_t first, last; /* as read back at the consumer; -1 where nothing is retained */
};

struct verify_case {
    enum verify_verdict verdict;
    char why[240];            /* the first thing that does not hold */
    struct baton_error error; /* of VERIFY_ERROR, and of a handoff that was refused */
    uint32_t tokens, n;       /* prompt, generated */
    uint32_t repeats;         /* that were made */
    bool same_numerics;       /* producer and consumer compute alike: bits are compared */
    /* consumer against producer, the worst of the repeats */
    struct verify_diff slots;
    uint32_t slots_repeat; /* in which repeat (from 0) slots.first was found */
    bool bit_exact_repeats;
    /* consumer against native */
    bool tokens_match;
    int text_match;         /* 1, 0; -1: no tokenizer, or ids that it has no text for */
    int32_t first_mismatch; /* output index; -1 = none */
    double logits_rel_rms;  /* worst row up to there */
    double native_k_rel_rms, native_v_rel_rms;
    /* native against native */
    uint32_t control_mismatch; /* tokens */
    bool control_exact;        /* cache, tokens and logits bit by bit */
    double control_kv_rel_rms, control_logits_rel_rms;
    /* native against cpu:ref under cpu:ref's tokens */
    bool reference; /* it was run */
    struct verify_limits ref_limits;
    uint32_t ref_argmax_mismatch, ref_steps, ref_below_margin;
    double ref_logits_rel_rms, ref_k_rel_rms, ref_v_rel_rms;
    /* second consumer under native's tokens */
    struct verify_diff second_slots;
    uint32_t second_argmax_differs, second_argmax_mismatch; /* at all; beyond the margin */
    double second_logits_rel_rms;
    /* the rest */
    struct verify_group local, global; /* local.layers 0 where the model has none */
    double prefill_export_ms[2];       /* min and max of the repeats after the first one */
    uint64_t steps_by_lanes[9];
    struct verify_left left;
    bool planted;
    struct engine_flip flip;
};
/* Check one prompt over one route. What goes wrong is part of the result. */
void verify_check(const struct verify_options *o, const struct verify_prompt *p,
                  struct verify_case *out);

#endif
