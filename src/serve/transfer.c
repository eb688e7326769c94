/* SPDX-License-Identifier: Apache-2.0 */
/* kv_transfer_params: the object that routers carry from a prefill server's answer to a decode
 * server's request. It is vLLM's, member by member, so that a router needs to know nothing of us:
 * the ticket travels as remote_request_id, which every one of them keeps. */
#include <stdio.h>
#include <string.h>

#include "handoff/handoff.h"
#include "serve/serve_priv.h"

static const char name[] = "kv_transfer_params";

static const json_t *inner(const json_t *o, const char *key)
{
    const json_t *v = json_object_get(o, key);
    return json_is_null(v) ? NULL : v;
}

/* At the top, or where requests in tokens and extensions of the OpenAI API put it. */
static const json_t *find(const json_t *doc)
{
    const json_t *o = inner(doc, name);
    if (!o)
        o = inner(inner(inner(doc, "sampling_params"), "extra_args"), name);
    return o ? o : inner(inner(doc, "vllm_xargs"), name);
}

/* remote_block_ids, remote_engine_id and tp_size mean nothing to us, and a router may drop them. */
static int parse_source(struct serve_transfer *t, const json_t *o, struct serve_problem *p)
{
    int64_t port = 0;
    if (serve_field_str(o, "remote_request_id", &t->ticket, p) ||
        serve_field_str(o, "remote_host", &t->host, p) ||
        serve_field_int(o, "remote_port", 1, UINT16_MAX, &port, p))
        return -1;
    if (!t->ticket || !t->host || !port)
        return serve_refuse(p, 400, "invalid_value", name,
                            "%s: do_remote_prefill needs remote_request_id, remote_host and "
                            "remote_port",
                            name);
    t->port = (uint16_t)port;
    t->in = true;
    return 0;
}

int serve_transfer_parse(struct serve_transfer *t, const json_t *doc, struct serve_problem *p)
{
    const json_t *o = find(doc);
    bool in = false;
    if (!o)
        return 0;
    if (!json_is_object(o))
        return serve_refuse(p, 400, "invalid_type", name, "%s must be an object", name);
    if (serve_field_bool(o, "do_remote_decode", &t->out, p) ||
        serve_field_bool(o, "do_remote_prefill", &in, p))
        return -1;
    if (t->out && in)
        return serve_refuse(p, 400, "invalid_value", name,
                            "%s: both do_remote_decode and do_remote_prefill", name);
    return in ? parse_source(t, o, p) : 0;
}

/* ---- roles -------------------------------------------------------------------------------- */

/* One handoff is one sequence. */
static int check_single(const struct serve_ask *a, struct serve_problem *p)
{
    if (a->n > 1)
        return serve_refuse(p, 400, "unsupported_parameter", "n",
                            "n is %u: one cache that is handed over gives one choice", a->n);
    if (a->n_prompts > 1)
        return serve_refuse(p, 400, "unsupported_parameter", "prompt",
                            "%zu prompts: one is handed over at a time", a->n_prompts);
    return 0;
}

/* What is for the decode server, which gets the client's own request, is nothing here. */
static int check_prefill(struct serve_ask *a, struct serve_problem *p)
{
    if (a->transfer.in || !a->transfer.out)
        return serve_refuse(p, 400, "unsupported_parameter", name,
                            "%s: this server has the role prefill, and wants do_remote_decode "
                            "to be true",
                            name);
    if (a->stream)
        return serve_refuse(p, 400, "unsupported_parameter", "stream",
                            "stream: a prefill server's answer carries %s, which no stream does",
                            name);
    a->n_stops = a->n_stop_ids = 0;
    a->logprobs = false;
    a->max_said = true;
    a->max_tokens = 1;
    return check_single(a, p);
}

static int reach(const struct serve *s, struct serve_transfer *t, struct serve_problem *p)
{
    uint8_t ticket[HANDOFF_TICKET];
    struct baton_error e;
    if (handoff_ticket_parse(t->ticket, ticket, &e))
        return serve_refuse(p, 409, "stale", name, "%s.remote_request_id: %s", name, e.text);
    if (!serve_allowed(s->allow, t->host))
        return serve_refuse(p, 403, "kv_host_not_allowed", name,
                            "%s.remote_host: '%.120s' is not among what --kv-allow lists", name,
                            t->host);
    serve_address(t->host, t->port, t->from, sizeof t->from);
    return 0;
}

static int check_decode(const struct serve *s, struct serve_ask *a, bool if_available,
                        struct serve_problem *p)
{
    if (a->transfer.out)
        return serve_refuse(p, 400, "unsupported_parameter", name,
                            "%s.do_remote_decode: this server has the role decode", name);
    if (a->transfer.in)
        return reach(s, &a->transfer, p) || check_single(a, p) ? -1 : 0;
    if (if_available)
        return serve_refuse(p, 412, "kv_not_available", NULL,
                            "this prompt's cache is not here, and the request prefers an answer "
                            "only if it is");
    return 0;
}

int serve_transfer_check(const struct serve *s, struct serve_ask *a, bool if_available,
                         struct serve_problem *p)
{
    if (s->role == SERVE_PREFILL)
        return check_prefill(a, p);
    if (s->role == SERVE_DECODE)
        return check_decode(s, a, if_available, p);
    if (a->transfer.in || a->transfer.out)
        return serve_refuse(p, 400, "unsupported_parameter", name,
                            "%s: this server has the role both and hands nothing over", name);
    return 0;
}

void serve_transfer_release(struct serve *s, struct serve_transfer *t)
{
    struct serve_problem p;
    struct baton_error e;
    if (s->role != SERVE_DECODE || !t->in || (!t->from[0] && reach(s, t, &p)))
        return;
    if (baton_ticket_release(s->engine, t->from, t->ticket, &e))
        base_log(BASE_LOG_WARN, "a ticket is left to its lease: %s", e.text);
    else
        serve_metrics_add(&s->metrics, &s->metrics.released, 1);
}

/* ---- the answer --------------------------------------------------------------------------- */

static void hash_ids(const int32_t *ids, size_t n, char hex[65])
{
    struct base_sha256 h;
    uint8_t out[32];
    base_sha256_init(&h);
    for (size_t i = 0; i < n; i++) {
        uint32_t v = (uint32_t)ids[i];
        const uint8_t b[4] = {(uint8_t)v, (uint8_t)(v >> 8), (uint8_t)(v >> 16),
                              (uint8_t)(v >> 24)};
        base_sha256_update(&h, b, sizeof b);
    }
    base_sha256_final(&h, out);
    base_hex(out, 32, hex);
}

/* remote_block_ids is there because routers and vLLM look whether it is empty. Figures are strings:
 * some routers pass numbers through floating point. */
json_t *serve_transfer_json(const struct serve *s, const char *ticket, const int32_t *ids,
                            size_t n_ids)
{
    char hash[65], count[24];
    hash_ids(ids, n_ids, hash);
    snprintf(count, sizeof count, "%zu", n_ids);
    return json_pack("{s:b,s:b,s:s,s:s,s:s,s:i,s:[i],s:i,s:{s:s,s:s,s:s}}", "do_remote_prefill", 1,
                     "do_remote_decode", 0, "remote_engine_id", s->engine_id, "remote_request_id",
                     ticket, "remote_host", s->kv_host, "remote_port", (int)s->kv_port,
                     "remote_block_ids", 1, "tp_size", 1, "baton", "fingerprint", s->fingerprint,
                     "n_tokens", count, "ids_hash", hash);
}
