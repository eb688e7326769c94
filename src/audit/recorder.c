/* SPDX-License-Identifier: Apache-2.0 */
/* The runs of a check as a raw document: ids, digests, times, errors of slots and rows. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "audit/audit_priv.h"
#include "base/base.h"

static json_t *ids_json(const int32_t *ids, size_t n)
{
    json_t *a = json_array();
    for (size_t i = 0; i < n; i++)
        json_array_append_new(a, json_integer(ids[i]));
    return a;
}

int audit_recorder_init(struct audit_recorder *r, const struct baton_model *m,
                        const struct verify_prompt *p, uint32_t n, struct baton_error *e)
{
    const struct model_config *c = model_config_of(engine_model(m));
    json_t *local = json_array();
    for (uint32_t l = 0; l < c->n_layers; l++)
        json_array_append_new(local, json_integer(c->local[l] != 0));
    r->model = m;
    r->raw = json_pack("{s:i,s:s,s:o,s:i,s:i,s:o,s:[]}", "schema", AUDIT_SCHEMA, "kind", "check",
                       "prompt_ids", ids_json(p->ids, p->n_ids), "n", (int)n, "window",
                       (int)c->window, "local", local, "runs");
    return r->raw ? 0 : base_fail(e, BATON_ERR_NOMEM, "no memory for the evidence");
}

/* ---- caches ------------------------------------------------------------------------------- */

static size_t slot_bytes(const struct verify_cache *c, uint32_t slot, uint32_t dtype)
{
    return (size_t)c->slots[slot].n * c->kv_heads * c->head_dim * verify_width(dtype);
}

/* What the consumer must hold of this slot: the producer's elements after one rounding. */
static json_t *wanted(const struct verify_cache *sent, const struct verify_cache *have,
                      uint32_t slot)
{
    char hex[65];
    size_t bytes = slot_bytes(sent, slot, have->dtype);
    uint8_t *to = base_try_alloc(bytes ? bytes : 1, 1, NULL);
    if (!to)
        return NULL;
    verify_slot_rounded(sent, slot, have->dtype, to);
    audit_hash(to, bytes, hex);
    free(to);
    return json_string(hex);
}

static json_t *slot_json(const struct verify_run *r, const struct verify_run *against,
                         uint32_t slot)
{
    const struct verify_cache *c = r->cache;
    const struct verify_slot *s = &c->slots[slot];
    char hex[65];
    bool finite = true;
    audit_hash(s->data, slot_bytes(c, slot, c->dtype), hex);
    json_t *want = json_null(), *rms = json_null(), *native = json_null();
    if (r->sent) {
        want = wanted(r->sent, c, slot);
        rms = audit_real(verify_slot_error(c, r->sent, slot, &finite));
    }
    if (against && against->cache)
        native = audit_real(verify_slot_error(c, against->cache, slot, NULL));
    return json_pack("{s:i,s:i,s:s,s:o,s:b,s:o,s:o}", "first", (int)s->first, "n", (int)s->n,
                     "have", hex, "want", want, "finite", finite, "rel_rms", rms, "against_rel_rms",
                     native);
}

static bool comparable(const struct verify_cache *a, const struct verify_cache *b)
{
    return a->n_layers == b->n_layers && a->kv_heads == b->kv_heads && a->head_dim == b->head_dim &&
           a->n_tokens == b->n_tokens;
}

json_t *audit_slots_json(const struct verify_run *r, const struct verify_run *against)
{
    json_t *list = json_array();
    const struct verify_cache *c = r->cache;
    if (against && against->cache && c && !comparable(c, against->cache))
        against = NULL;
    for (uint32_t s = 0; c && s < 2 * c->n_layers; s++)
        json_array_append_new(list, slot_json(r, against, s));
    return list;
}

json_t *audit_holder_json(const struct verify_cache *c)
{
    if (!c)
        return json_null();
    return json_pack("{s:s,s:i,s:b,s:b}", "numerics", c->numerics, "dtype", (int)c->dtype,
                     "row_invariant", c->row_invariant, "positions_ok", c->positions_ok);
}

/* ---- tokens ------------------------------------------------------------------------------- */

static json_t *margins_json(const struct verify_run *r)
{
    json_t *a = json_array();
    for (uint32_t i = 0; i < r->n; i++)
        json_array_append_new(a, audit_real((double)r->margins[i]));
    return a;
}

/* From the first token on, in ns. */
static json_t *times_json(const struct verify_run *r)
{
    json_t *a = json_array();
    for (uint32_t i = 0; i < r->n; i++)
        json_array_append_new(a, json_integer((json_int_t)(r->time_ns[i] - r->time_ns[0])));
    return a;
}

static json_t *digests_json(const struct verify_run *r, uint32_t vocab)
{
    json_t *a = json_array();
    char hex[65];
    for (uint32_t i = 0; i < r->n; i++) {
        audit_hash(r->rows + (size_t)i * vocab, vocab * sizeof *r->rows, hex);
        json_array_append_new(a, json_string(hex));
    }
    return a;
}

static json_t *errors_json(const struct verify_run *r, const struct verify_run *against,
                           uint32_t vocab)
{
    json_t *a = json_array();
    for (uint32_t i = 0; against && i < r->n && i < against->n; i++)
        json_array_append_new(a, audit_real(verify_rel_rms(against->rows + (size_t)i * vocab,
                                                           r->rows + (size_t)i * vocab, vocab)));
    return a;
}

static json_t *text_json(const struct baton_model *m, const struct verify_run *r)
{
    char *text = NULL;
    if (baton_detokenize(m, r->ids, r->n, &text, NULL))
        return json_null();
    json_t *s = json_string(text);
    free(text);
    return s ? s : json_null();
}

json_t *audit_stats_json(const struct baton_stats *s)
{
    json_t *lanes = json_array();
    for (int i = 1; i < 9; i++)
        json_array_append_new(lanes, json_integer(s->steps_by_lanes[i]));
    return json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:i,s:s,s:s,s:o}", "prefill_ns",
                     (json_int_t)s->prefill_ns, "transfer_ns", (json_int_t)s->transfer_ns,
                     "exposed_ns", (json_int_t)s->exposed_ns, "import_ns", (json_int_t)s->import_ns,
                     "verify_ns", (json_int_t)s->verify_ns, "ttft_ns", (json_int_t)s->ttft_ns,
                     "first_step_ns", (json_int_t)s->first_step_ns, "decode_ns",
                     (json_int_t)s->decode_ns, "bytes", (json_int_t)s->bytes, "pieces",
                     (int)s->pieces, "digest", s->digest, "verdict", s->verdict, "steps_by_lanes",
                     lanes);
}

static json_t *error_json(const struct baton_error *e)
{
    return e ? json_pack("{s:s,s:s}", "code", base_code_name(e->code), "message", e->text)
             : json_null();
}

void audit_recorder_note(void *recorder, const struct verify_record *x)
{
    struct audit_recorder *r = recorder;
    const struct verify_run *run = x->run;
    json_t *o = json_pack("{s:s,s:i,s:o,s:o,s:o,s:o,s:o,s:o,s:o,s:o,s:o,s:o,s:o,s:o}", "run",
                          verify_run_names[x->kind], "repeat", (int)x->repeat, "holds",
                          audit_holder_json(run->cache), "sent", audit_holder_json(run->sent),
                          "ids", ids_json(run->ids, run->n), "argmax",
                          ids_json(run->argmax, run->n), "margins", margins_json(run), "text",
                          text_json(r->model, run), "rows_sha256", digests_json(run, x->vocab),
                          "rows_rel_rms", errors_json(run, x->against, x->vocab), "slots",
                          audit_slots_json(run, x->against), "token_ns", times_json(run), "stats",
                          audit_stats_json(&run->stats), "error", error_json(x->error));
    if (!r->raw || json_array_append_new(json_object_get(r->raw, "runs"), o)) {
        json_decref(r->raw); /* no memory: take says so */
        r->raw = NULL;
    }
}

struct json_t *audit_recorder_take(struct audit_recorder *r)
{
    json_t *raw = r->raw;
    r->raw = NULL;
    return raw;
}
