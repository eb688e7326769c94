/* SPDX-License-Identifier: Apache-2.0 */
/* Victims, survivors, replacements. */
#include <stdlib.h>
#include <string.h>

#include "audit/campaign.h"
#include "base/base.h"

enum { LANES = 8, LEAST = 20, MORE = 17 };

/* A prompt, and what it gives when nobody is beside it. */
struct prompt {
    int32_t ids[LEAST + LANES * MORE];
    uint32_t n_ids;
    struct audit_output alone;
};

struct campaign {
    const struct audit_campaign_options *o;
    struct audit_campaign *out;
    struct audit_route route;
    struct prompt prompts[LANES];
};

/* One request under way: both ends, and how far it is. */
struct ends {
    struct baton_request *producer, *consumer;
    uint32_t prompt, n, equal;
    bool over;
};

static void make_prompts(struct campaign *c)
{
    uint64_t s = c->o->seed;
    for (uint32_t i = 0; i < c->o->route.lanes; i++) {
        struct prompt *p = &c->prompts[i];
        p->n_ids = LEAST + i * MORE;
        for (uint32_t k = 0; k < p->n_ids; k++) {
            s = s * 6364136223846793005u + 1442695040888963407u; /* Knuth's MMIX generator */
            p->ids[k] = (int32_t)((s >> 33) % c->route.vocab);
        }
    }
}

static int run_alone(struct campaign *c, struct prompt *p, struct baton_error *e)
{
    const struct audit_ask ask = {
        .ids = p->ids, .n_ids = p->n_ids, .n = c->o->n, .past_end = true, .together = true};
    int rc = audit_route_run(&c->route, &ask, &p->alone, 1, NULL, e);
    if (rc == 0 && (p->alone.why.code || p->alone.n != c->o->n))
        rc = base_fail(e, p->alone.why.code ? p->alone.why.code : BATON_ERR_INTERNAL,
                       "alone: %.180s", p->alone.why.code ? p->alone.why.text : "too few tokens");
    return rc;
}

/* ---- requests ----------------------------------------------------------------------------- */

static int begin(struct campaign *c, struct ends *x, uint32_t prompt, struct baton_error *e)
{
    const struct prompt *p = &c->prompts[prompt];
    struct baton_request_options o = {
        .struct_size = sizeof o,
        .ids = p->ids,
        .n_ids = p->n_ids,
        .request_id = c->route.next_id++,
        .mode = c->route.mode,
        .max_tokens = c->o->n,
        .ignore_eos = true,
        .want_logits = true, /* it pauses when some of its rows were not pulled */
    };
    *x = (struct ends){.prompt = prompt};
    int rc = baton_submit(c->route.consumer, &o, &x->consumer, e);
    o.want_logits = false;
    return rc ? rc : baton_submit(c->route.producer, &o, &x->producer, e);
}

static void end(struct ends *x)
{
    baton_request_close(x->producer);
    baton_request_close(x->consumer);
    *x = (struct ends){.over = true};
}

/* The next token, held against what the prompt gives alone. */
static int pull(struct campaign *c, struct ends *x, struct baton_error *e)
{
    const struct audit_output *alone = &c->prompts[x->prompt].alone;
    struct baton_token t;
    uint8_t row[32];
    int rc = baton_next(x->consumer, &t, -1, e);
    x->over = rc != 1;
    if (rc != 1)
        return rc;
    base_sha256(t.logits, c->route.vocab * sizeof *t.logits, row);
    x->equal += x->n < alone->n && t.id == alone->ids[x->n] && !memcmp(row, alone->rows[x->n], 32);
    x->n++;
    return 0;
}

/* One token of each in turn, until all are over: so all lanes go on together. */
static int pull_all(struct campaign *c, struct ends *all, uint32_t n, struct baton_error *e)
{
    uint32_t left = n;
    int rc = 0;
    while (left && rc == 0) {
        left = 0;
        for (uint32_t i = 0; i < n && rc == 0; i++) {
            if (!all[i].over)
                rc = pull(c, &all[i], e);
            left += !all[i].over;
        }
    }
    return rc;
}

/* ---- a round ------------------------------------------------------------------------------ */

/* Cancel one that holds an imported cache and a lane. It gives no more than what it had. */
static int cancel(struct ends *x, struct baton_error *e)
{
    struct baton_stats s = {.struct_size = sizeof s};
    struct baton_token t;
    int rc = baton_request_stats(x->consumer, &s);
    if (rc || strcmp(s.verdict, "verified"))
        return base_fail(e, BATON_ERR_INTERNAL, "a victim's import was not verified: '%.40s'",
                         rc ? "" : s.verdict);
    baton_cancel(x->consumer);
    while ((rc = baton_next(x->consumer, &t, -1, e)) == 1)
        continue;
    return rc == BATON_ERR_CANCELLED ? 0 : rc;
}

static void count(struct campaign *c, const struct ends *all, uint32_t lanes, uint32_t victim)
{
    for (uint32_t i = 0; i < lanes; i++) {
        bool replaced = i == victim;
        *(replaced ? &c->out->replacements : &c->out->survivors) += 1;
        *(replaced ? &c->out->replacement_tokens : &c->out->survivor_tokens) += c->o->n;
        *(replaced ? &c->out->replacement_equal : &c->out->survivor_equal) += all[i].equal;
    }
}

/* The survivors pause before their last tokens for as long as nobody pulls, so the replacement's
 * first token can only come out of the victim's lane. */
static int replace(struct campaign *c, struct ends *all, uint32_t lanes, uint32_t victim,
                   struct baton_error *e)
{
    struct engine_load load;
    int rc = cancel(&all[victim], e);
    end(&all[victim]);
    c->out->victims += rc == 0;
    if (rc == 0)
        rc = begin(c, &all[victim], victim, e);
    if (rc == 0)
        rc = pull(c, &all[victim], e);
    engine_load(c->route.consumer, &load);
    c->out->reused += rc == 0 && load.lanes_used == lanes;
    return rc;
}

static int run_round(struct campaign *c, uint32_t round, struct baton_error *e)
{
    struct ends all[LANES] = {{0}};
    uint32_t lanes = c->o->route.lanes, victim = round % lanes;
    struct engine_load load;
    int rc = 0;
    for (uint32_t i = 0; i < lanes && rc == 0; i++)
        rc = begin(c, &all[i], i, e);
    for (uint32_t i = 0; i < lanes && rc == 0; i++)
        rc = pull(c, &all[i], e);
    if (rc == 0)
        rc = replace(c, all, lanes, victim, e);
    if (rc == 0)
        rc = pull_all(c, all, lanes, e);
    if (rc == 0)
        count(c, all, lanes, victim);
    for (uint32_t i = 0; i < lanes; i++)
        end(&all[i]);
    engine_load(c->route.consumer, &load);
    c->out->unclean += load.lanes_used || load.blocks_used || engine_blocks_used(c->route.producer);
    return rc;
}

int audit_campaign_run(const struct audit_campaign_options *o, struct audit_campaign *out,
                       struct baton_error *e)
{
    struct audit_route_options route = o->route;
    struct engine_load load;
    struct campaign *c = base_try_alloc(1, sizeof *c, e);
    if (!c)
        return BATON_ERR_NOMEM;
    memset(out, 0, sizeof *out);
    c->o = o;
    c->out = out;
    route.ctx = LEAST + LANES * MORE + o->n;
    int rc = audit_route_open(&c->route, &route, e);
    if (rc == 0)
        make_prompts(c);
    for (uint32_t i = 0; i < o->route.lanes && rc == 0; i++)
        rc = run_alone(c, &c->prompts[i], e);
    for (uint32_t i = 0; i < o->rounds && rc == 0; i++) {
        rc = run_round(c, i, e);
        if (o->progress)
            o->progress(o->ctx, i + 1, o->rounds);
    }
    if (rc == 0) {
        engine_load(c->route.consumer, &load);
        memcpy(out->steps, load.steps_by_lanes, sizeof out->steps);
    }
    audit_route_close(&c->route, &out->left);
    for (uint32_t i = 0; i < LANES; i++)
        audit_output_free(&c->prompts[i].alone);
    free(c);
    return rc;
}

bool audit_campaign_holds(const struct audit_campaign *c)
{
    return c->victims && c->replacements == c->victims && c->reused == c->victims && !c->unclean &&
           c->survivor_equal == c->survivor_tokens &&
           c->replacement_equal == c->replacement_tokens && !c->left.lanes && !c->left.blocks &&
           !c->left.tickets;
}
