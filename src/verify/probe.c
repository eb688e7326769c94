/* SPDX-License-Identifier: Apache-2.0 */
/* The probes. Each states what must hold, runs it on fixed token ids, and names the first place at
 * which it does not. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "verify/probe_priv.h"

/* Constants of docs/probes.md. */
#define LIMIT_LAYOUT 0.3
#define LIMIT_CHANGE 1e-3
#define LIMIT_PRECISION 5e-2
#define BLOCK 16u         /* positions over which a relative RMS is taken */
#define LONGEST 1200u     /* tokens of a probe's prompt at most */
#define SHORT_PROMPT 100u /* fits the narrowest programs */
#define BEYOND_WINDOW 40u

const char *const verify_probe_names[] = {"layout",  "causality", "lanes", "window",
                                          "padding", "precision", NULL};

struct probe {
    const struct baton_model *model;
    const struct model_config *config;
    const char *device;
    uint32_t threads;
    uint32_t most; /* tokens that a prompt may have */
    struct verify_finding *out;
};

static int not_applicable(struct probe *x, const char *why)
{
    x->out->verdict = VERIFY_PROBE_NA;
    snprintf(x->out->why, sizeof x->out->why, "%s", why);
    return 0;
}

static void found(struct probe *x, double value, uint32_t layer, uint32_t v, uint32_t position)
{
    x->out->value = value;
    x->out->layer = layer;
    x->out->position = position;
    snprintf(x->out->tensor, sizeof x->out->tensor, "%s", v ? "v" : "k");
}

static uint32_t prompt_length(const struct probe *x, uint32_t n)
{
    return n < x->most ? n : x->most;
}

/* First position of a layer that both have: a device may keep no more than local layers retain. */
static uint32_t held_from(const struct verify_yield *a, const struct verify_yield *b,
                          uint32_t layer)
{
    return a->first[layer] > b->first[layer] ? a->first[layer] : b->first[layer];
}

/* The first slot, in the order layer, K before V, of which a block of positions differs by more
 * than the limit; the largest difference where none does. */
static bool first_beyond(struct probe *x, const struct verify_yield *have,
                         const struct verify_yield *want, uint32_t end, double limit)
{
    double worst = -1;
    x->out->limit = limit;
    for (uint32_t i = 0; i < 2 * want->n_layers; i++) {
        double most = -1;
        uint32_t at = 0;
        for (uint32_t p = held_from(have, want, i / 2); p < end; p += BLOCK) {
            uint32_t n = end - p < BLOCK ? end - p : BLOCK;
            double d = verify_yield_differs(have, want, i / 2, i % 2, p, n);
            if (d > most) {
                most = d;
                at = p;
            }
        }
        if (most > worst) {
            worst = most;
            found(x, most, i / 2, i % 2, at);
        }
        if (!(most <= limit))
            return true;
    }
    return false;
}

/* Ids and what the reference makes of them. */
static int reference(struct probe *x, uint32_t n, int32_t **ids, struct verify_yield *want,
                     struct baton_error *e)
{
    int rc = verify_probe_ids(x->config, n, ids, e);
    return rc ? rc : verify_probe_once(x->model, "cpu:ref", x->threads, *ids, n, want, e);
}

static int against_reference(struct probe *x, uint32_t n, struct verify_yield *have,
                             struct verify_yield *want, struct baton_error *e)
{
    int32_t *ids = NULL;
    int rc = reference(x, n, &ids, want, e);
    if (rc == 0)
        rc = verify_probe_once(x->model, x->device, x->threads, ids, n, have, e);
    free(ids);
    return rc;
}

static double distance(const float *a, const float *b, uint32_t n)
{
    double d = 0, r = 0;
    for (uint32_t i = 0; i < n; i++) {
        d += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        r += (double)b[i] * b[i];
    }
    return r > 0 ? d / r : d;
}

/* The position of the reference's row that a row of layer 0 looks most like: K there depends on
 * token and position alone. */
static uint32_t looks_like(const struct verify_yield *have, const struct verify_yield *want,
                           uint32_t position)
{
    uint32_t best = position;
    const float *row = verify_yield_row(have, 0, 0, position);
    double least = distance(row, verify_yield_row(want, 0, 0, position), want->row);
    if (least < 0.01)
        return position;
    for (uint32_t p = 0; p < want->n; p++) {
        double d = distance(row, verify_yield_row(want, 0, 0, p), want->row);
        if (d < least / 16) {
            least = d;
            best = p;
        }
    }
    return best;
}

/* ---- layout -------------------------------------------------------------------------------- */

static int layout(struct probe *x, struct baton_error *e)
{
    struct verify_yield have = {0}, want = {0};
    int rc = against_reference(x, prompt_length(x, SHORT_PROMPT), &have, &want, e);
    x->out->metric = "rel_rms";
    if (rc == 0 && first_beyond(x, &have, &want, want.n, LIMIT_LAYOUT)) {
        uint32_t p = x->out->position, other = looks_like(&have, &want, p);
        x->out->verdict = VERIFY_PROBE_FAIL;
        if (x->out->layer == 0 && other != p)
            snprintf(x->out->why, sizeof x->out->why,
                     "position %u holds what belongs to position %u: K and V lie in another order",
                     p, other);
        else
            snprintf(x->out->why, sizeof x->out->why,
                     "layer %u's %s is not the reference's: a weight is read with other strides "
                     "than it was bound with, or is another one",
                     x->out->layer, x->out->tensor);
    }
    verify_yield_free(&have);
    verify_yield_free(&want);
    return rc;
}

/* ---- causality ----------------------------------------------------------------------------- */

static int change_one(struct probe *x, struct verify_bench *b, int32_t *ids, uint32_t n, uint32_t j,
                      const struct verify_yield *before, struct baton_error *e)
{
    struct verify_yield after;
    int32_t kept = ids[j];
    ids[j] = (int32_t)(((uint32_t)kept + 1) % x->config->vocab);
    int rc = verify_bench_prefill(b, ids, n, &after, e);
    ids[j] = kept;
    if (rc)
        return rc;
    if (first_beyond(x, &after, before, j, LIMIT_CHANGE)) {
        x->out->verdict = VERIFY_PROBE_FAIL;
        snprintf(x->out->why, sizeof x->out->why,
                 "changing token %u of %u changed layer %u's %s before it: attention of layer %u "
                 "sees later positions",
                 j, n, x->out->layer, x->out->tensor, x->out->layer ? x->out->layer - 1 : 0);
    }
    verify_yield_free(&after);
    return 0;
}

static int causality(struct probe *x, struct baton_error *e)
{
    static const struct {
        uint32_t n, j;
    } tries[] = {{SHORT_PROMPT, 50}, {SHORT_PROMPT, 99}, {300, 140}, {300, 257}};
    struct verify_bench b;
    int32_t *ids = NULL;
    if (x->config->max_positions < 302)
        return not_applicable(x, "the model's context is shorter than 302 positions");
    int rc = verify_bench_open(&b, x->model, x->device, x->threads, e);
    if (rc)
        return rc;
    x->out->metric = "rel_rms";
    rc = verify_probe_ids(x->config, 300, &ids, e);
    for (size_t i = 0; i < sizeof tries / sizeof *tries && rc == 0; i++) {
        struct verify_yield before;
        if (tries[i].n > x->most)
            continue;
        rc = verify_bench_prefill(&b, ids, tries[i].n, &before, e);
        if (rc)
            break;
        rc = change_one(x, &b, ids, tries[i].n, tries[i].j, &before, e);
        verify_yield_free(&before);
        if (x->out->verdict == VERIFY_PROBE_FAIL)
            break;
    }
    free(ids);
    verify_bench_close(&b);
    return rc;
}

/* ---- window -------------------------------------------------------------------------------- */

/* Rows of layer 0 that stand at another position than theirs. */
static int misplaced(struct probe *x, struct baton_error *e)
{
    struct verify_yield have = {0}, want = {0};
    int rc = against_reference(x, prompt_length(x, SHORT_PROMPT), &have, &want, e);
    for (uint32_t p = rc ? 0 : held_from(&have, &want, 0); p < want.n && rc == 0; p++) {
        uint32_t other = looks_like(&have, &want, p);
        if (other == p)
            continue;
        if (x->out->value++ == 0) {
            x->out->verdict = VERIFY_PROBE_FAIL;
            found(x, 1, 0, 0, p);
            snprintf(x->out->why, sizeof x->out->why,
                     "position %u holds the row of position %u: what is retained is shifted", p,
                     other);
        }
    }
    verify_yield_free(&have);
    verify_yield_free(&want);
    return rc;
}

/* Leading local layers: changing token 0 changes K of layer l at positions up to l * (W - 1), and
 * not behind. */
static void check_reach(struct probe *x, const struct verify_yield *before,
                        const struct verify_yield *after)
{
    uint64_t reach = 0;
    for (uint32_t l = 0; l + 1 < before->n_layers && x->config->local[l]; l++) {
        reach += x->config->window - 1;
        uint64_t behind = reach + 1, held = held_from(after, before, l + 1);
        for (uint64_t p64 = behind > held ? behind : held; p64 < before->n; p64++) {
            uint32_t p = (uint32_t)p64;
            if (verify_yield_differs(after, before, l + 1, 0, p, 1) > 0) {
                x->out->verdict = VERIFY_PROBE_FAIL;
                found(x, x->out->value + 1, l + 1, 0, p);
                snprintf(x->out->why, sizeof x->out->why,
                         "token 0 is seen at position %u of layer %u, and a window of %u ends at "
                         "%llu",
                         p, l, x->config->window, (unsigned long long)reach);
                return;
            }
        }
    }
}

static int reach(struct probe *x, struct baton_error *e)
{
    struct verify_yield before = {0}, after = {0};
    struct verify_bench b;
    int32_t *ids = NULL;
    uint32_t n = prompt_length(x, x->config->window + BEYOND_WINDOW);
    int rc = verify_bench_open(&b, x->model, x->device, x->threads, e);
    if (rc)
        return rc;
    rc = verify_probe_ids(x->config, n, &ids, e);
    if (rc == 0)
        rc = verify_bench_prefill(&b, ids, n, &before, e);
    if (rc == 0)
        ids[0] = (int32_t)(((uint32_t)ids[0] + 1) % x->config->vocab);
    if (rc == 0)
        rc = verify_bench_prefill(&b, ids, n, &after, e);
    if (rc == 0)
        check_reach(x, &before, &after);
    free(ids);
    verify_yield_free(&before);
    verify_yield_free(&after);
    verify_bench_close(&b);
    return rc;
}

static int window(struct probe *x, struct baton_error *e)
{
    x->out->metric = "rows";
    int rc = misplaced(x, e);
    if (rc || x->out->verdict == VERIFY_PROBE_FAIL || !x->config->window ||
        x->config->window + BEYOND_WINDOW > LONGEST)
        return rc;
    return reach(x, e);
}

/* ---- padding ------------------------------------------------------------------------------- */

static int padding(struct probe *x, struct baton_error *e)
{
    struct baton_caps caps;
    struct verify_yield narrow = {0}, wide = {0};
    char name[640];
    int32_t *ids = NULL;
    if (!device_static(x->device, &caps))
        return not_applicable(x, "the device computes as many rows as there are");
    if (!caps.widths[0] || !caps.widths[1])
        return not_applicable(x, "the device has one width");
    uint32_t n = prompt_length(x, caps.widths[0] - caps.widths[0] / 4);
    x->out->metric = "rel_rms";
    snprintf(name, sizeof name, "%s,width=%u", x->device, caps.widths[1]);
    int rc = verify_probe_ids(x->config, n, &ids, e);
    if (rc == 0)
        rc = verify_probe_once(x->model, x->device, x->threads, ids, n, &narrow, e);
    if (rc == 0)
        rc = verify_probe_once(x->model, name, x->threads, ids, n, &wide, e);
    if (rc == 0 && first_beyond(x, &wide, &narrow, n, LIMIT_CHANGE)) {
        x->out->verdict = VERIFY_PROBE_FAIL;
        snprintf(x->out->why, sizeof x->out->why,
                 "%u tokens give another %s of layer %u in the program of %u rows than in that of "
                 "%u: padding is attended to or exported",
                 n, x->out->tensor, x->out->layer, caps.widths[1], caps.widths[0]);
    }
    free(ids);
    verify_yield_free(&narrow);
    verify_yield_free(&wide);
    return rc;
}

/* ---- precision ----------------------------------------------------------------------------- */

static void say_drift(struct probe *x, const struct verify_yield *have,
                      const struct verify_yield *want)
{
    uint32_t from = held_from(have, want, x->out->layer), n = want->n - from;
    double k = verify_yield_differs(have, want, x->out->layer, 0, from, n);
    double v = verify_yield_differs(have, want, x->out->layer, 1, from, n);
    const char *why = x->out->layer ? "attention or MLP of the layer before computes something else"
                      : v <= LIMIT_PRECISION
                          ? "the rotation or the norm of keys computes something else"
                          : "the layer's first norm or its projections compute something else";
    x->out->verdict = VERIFY_PROBE_FAIL;
    snprintf(x->out->why, sizeof x->out->why,
             "layer %u is the first to leave the reference (K %.3f, V %.3f): %s", x->out->layer, k,
             v, why);
}

static int precision(struct probe *x, struct baton_error *e)
{
    struct verify_yield have = {0}, want = {0};
    uint32_t n = SHORT_PROMPT;
    if (x->config->window && x->config->window + BEYOND_WINDOW <= LONGEST)
        n = x->config->window + BEYOND_WINDOW > n ? x->config->window + BEYOND_WINDOW : n;
    n = prompt_length(x, n);
    int rc = against_reference(x, n, &have, &want, e);
    x->out->metric = "rel_rms";
    if (rc == 0 && first_beyond(x, &have, &want, want.n, LIMIT_PRECISION))
        say_drift(x, &have, &want);
    verify_yield_free(&have);
    verify_yield_free(&want);
    return rc;
}

/* The model's context, the widest program, or what was compiled in. */
static void set_longest(struct probe *x, const struct device *d)
{
    const struct baton_caps *caps = device_caps(d);
    uint32_t compiled = device_positions(d);
    x->most = x->config->max_positions - 1;
    if (caps->whole_prompt && caps->max_rows < x->most)
        x->most = caps->max_rows;
    if (compiled && compiled < x->most)
        x->most = compiled;
}

/* ---- all ----------------------------------------------------------------------------------- */

int verify_probe_run(const struct baton_model *m, const char *device, enum verify_probe which,
                     uint32_t threads, struct verify_finding *out, struct baton_error *e)
{
    struct probe x = {.model = m,
                      .config = model_config_of(engine_model(m)),
                      .device = device,
                      .threads = threads,
                      .out = out};
    static int (*const probes[])(struct probe *, struct baton_error *) = {
        [VERIFY_LAYOUT] = layout,   [VERIFY_CAUSALITY] = causality, [VERIFY_WINDOW] = window,
        [VERIFY_PADDING] = padding, [VERIFY_PRECISION] = precision,
    };
    struct device *d = NULL;
    *out = (struct verify_finding){.metric = "rel_rms", .lane = -1};
    if (which >= VERIFY_PROBES)
        return base_fail(e, BATON_ERR_USAGE, "no probe %d", (int)which);
    int rc = device_open(device, &d, e);
    if (rc)
        return rc;
    const struct baton_caps caps = *device_caps(d);
    set_longest(&x, d);
    device_close(d);
    if (!caps.prefill)
        return not_applicable(&x, "the device does not prefill");
    if (which == VERIFY_LANES && (!caps.decode || caps.max_lanes < 2))
        return not_applicable(&x, "the device has no lanes to decode in");
    if (which == VERIFY_LANES)
        return verify_probe_lanes(m, device, threads, out, e);
    return probes[which](&x, e);
}
