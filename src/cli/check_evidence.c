/* SPDX-License-Identifier: Apache-2.0 */
/* check: evidence of each case, and comparison with an earlier folder's. */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "cli/check_priv.h"
#include "cli/evidence_priv.h"

static const char *const limits[] = {
    "The prompts and lengths that were run, on this machine, in this build: a test, not a proof.",
    "Where producer and consumer make the same mistake, slots and tokens agree.",
    "One process, one lane: nothing is shown of several lanes, cancelled requests or lost peers.",
    "Slots and logits are kept as hashes; relative errors are kept as they were measured.", NULL};

/* An earlier folder that can't be read is found out before the work. */
static int look_at_earlier(const char *against, struct baton_error *e)
{
    json_t *none = NULL;
    int rc = against ? audit_find_raw(against, "", &none, e) : 0;
    json_decref(none);
    return rc;
}

int cli_check_begin(struct cli_check *c, const struct baton_model *m, struct baton_error *e)
{
    const struct cli_check_args *a = c->args;
    int rc = look_at_earlier(a->against, e);
    const struct audit_device devices[] = {
        {"prefill", a->options.prefill}, {"decode", a->options.decode}, {NULL, NULL}};
    const struct cli_evidence x = {.command = "check",
                                   .argc = a->argc,
                                   .argv = a->argv,
                                   .dir = a->evidence,
                                   .model = a->model,
                                   .against = a->against,
                                   .input = a->prompts,
                                   .opened = m,
                                   .devices = devices,
                                   .limits = limits,
                                   .repeats = a->options.repeats};
    return rc || !a->evidence ? rc : cli_evidence_open(&x, &c->evidence, e);
}

static int compare(const struct cli_check *c, struct cli_check_case *x, const json_t *raw,
                   struct baton_error *e)
{
    json_t *earlier = NULL;
    int rc = audit_find_raw(c->args->against, x->prompt.name, &earlier, e);
    if (rc)
        return rc;
    x->against = earlier ? audit_against(raw, earlier) : json_string("it has no such prompt");
    json_decref(earlier);
    return x->against ? 0 : base_fail(e, BATON_ERR_NOMEM, "no memory to compare with --against");
}

/* Takes `raw` over; NULL where nothing was run. */
static int keep(struct cli_check *c, struct cli_check_case *x, json_t *raw, struct baton_error *e)
{
    if (raw)
        snprintf(x->evidence, sizeof x->evidence, "%s", audit_evidence_next(c->evidence));
    const struct audit_attempt a = {.name = x->prompt.name,
                                    .raw = raw,
                                    .result = cli_check_case_json(c->args, x),
                                    .supersedes = -1};
    return audit_evidence_add(c->evidence, &a, e);
}

int cli_check_one(struct cli_check *c, const struct verify_options *o, struct cli_check_case *x,
                  struct baton_error *e)
{
    struct verify_options with = *o;
    struct audit_recorder recorder = {0};
    json_t *raw = NULL;
    int rc = 0;
    if (x->result.verdict == VERIFY_ERROR) /* there is no prompt */
        return c->evidence ? keep(c, x, NULL, e) : 0;
    bool record = c->evidence || c->args->against;
    if (record)
        rc = audit_recorder_init(&recorder, o->model, &x->prompt, o->n, e);
    if (rc)
        return rc;
    with.record = record ? audit_recorder_note : NULL;
    with.record_ctx = &recorder;
    verify_check(&with, &x->prompt, &x->result);
    raw = audit_recorder_take(&recorder);
    if (record && !raw)
        return base_fail(e, BATON_ERR_NOMEM, "no memory for the evidence");
    if (c->args->against)
        rc = compare(c, x, raw, e);
    if (rc == 0 && c->evidence)
        rc = keep(c, x, json_incref(raw), e);
    json_decref(raw);
    return rc;
}

int cli_check_end(struct cli_check *c, struct baton_error *e)
{
    struct audit_cleanup cleanup = {0};
    for (uint32_t i = 0; i < c->n_cases; i++) {
        const struct verify_left *left = &c->cases[i].result.left;
        cleanup.left.lanes += left->lanes;
        cleanup.left.blocks += left->blocks;
        cleanup.left.tickets += left->tickets;
    }
    return c->evidence ? audit_evidence_finish(c->evidence, &cleanup, e) : 0;
}
