/* SPDX-License-Identifier: Apache-2.0 */
/* One client's request: to a prefill server, to a decode server, and what comes of it back. */
#include <stdlib.h>
#include <string.h>

#include "serve/proxy_priv.h"

enum { STEP_MS = 250, BYTES_A_TOKEN = 4, EVENT_BYTES = 4 << 20 };

static const char transfer[] = "kv_transfer_params";

/* ---- what is asked -------------------------------------------------------------------------- */

/* Of a text, about: a token every four bytes. */
static size_t text_tokens(const json_t *text)
{
    return (json_string_length(text) + BYTES_A_TOKEN - 1) / BYTES_A_TOKEN;
}

static size_t message_tokens(const json_t *message)
{
    const json_t *content = json_object_get(message, "content"), *part;
    size_t i, n = text_tokens(content);
    json_array_foreach(content, i, part) n += text_tokens(json_object_get(part, "text"));
    return n;
}

/* Tokens of a request for one answer to one prompt; 0 where it is for more, or for none: one cache
 * that is handed over gives one answer. */
static size_t single_tokens(const json_t *doc)
{
    const json_t *prompt = json_object_get(doc, "prompt"), *n = json_object_get(doc, "n"), *v;
    const json_t *messages = json_object_get(doc, "messages");
    size_t i, tokens = 0;
    if (json_is_integer(n) && json_integer_value(n) > 1)
        return 0;
    json_array_foreach(messages, i, v) tokens += message_tokens(v);
    if (json_array_size(prompt) == 1 && !json_is_integer(json_array_get(prompt, 0)))
        prompt = json_array_get(prompt, 0);
    if (json_is_string(prompt))
        tokens += text_tokens(prompt);
    else if (json_is_integer(json_array_get(prompt, 0)))
        tokens += json_array_size(prompt);
    return tokens;
}

/* One token, of no stream, which nobody reads. max_completion_tokens only where it was said: older
 * servers do not know it. A prefill server that honours min_tokens would refuse more than that one
 * token; the decode server gets them as they were. */
static json_t *prefill_ask(const json_t *asked)
{
    json_t *doc = json_deep_copy(asked);
    json_t *kv = json_pack("{s:b,s:b,s:n,s:n,s:n,s:n}", "do_remote_decode", 1, "do_remote_prefill",
                           0, "remote_engine_id", "remote_block_ids", "remote_host", "remote_port");
    int bad = json_object_set_new(doc, transfer, kv);
    bad |= json_object_set_new(doc, "stream", json_false());
    bad |= json_object_set_new(doc, "max_tokens", json_integer(1));
    if (json_object_get(doc, "max_completion_tokens"))
        bad |= json_object_set_new(doc, "max_completion_tokens", json_integer(1));
    if (json_integer_value(json_object_get(doc, "min_tokens")) > 1)
        bad |= json_object_set_new(doc, "min_tokens", json_integer(1));
    json_object_del(doc, "stream_options");
    if (!bad)
        return doc;
    json_decref(doc);
    return NULL;
}

/* kv NULL: to be computed there. */
static json_t *decode_ask(const json_t *asked, json_t *kv)
{
    json_t *doc = json_deep_copy(asked);
    if (!kv || json_object_set(doc, transfer, kv) == 0)
        return doc;
    json_decref(doc);
    return NULL;
}

/* The request as it is sent. Drops the reference; NULL is no memory. */
static int compose(struct serve_relay *r, json_t *doc, struct serve_problem *p)
{
    char *text = doc ? json_dumps(doc, JSON_COMPACT) : NULL; /* numbers to their last bit */
    json_decref(doc);
    r->sent.n = 0;
    int rc = text ? serve_text_put(&r->sent, text, strlen(text)) : BATON_ERR_NOMEM;
    free(text);
    return rc ? serve_refuse(p, 503, "no_memory", NULL, "no memory for the request") : 0;
}

/* ---- one exchange --------------------------------------------------------------------------- */

/* Bytes of whole events: up to the last empty line. */
static size_t whole_events(const struct serve_text *t)
{
    for (size_t n = t->n; n >= 2; n--)
        if (t->data[n - 1] == '\n' &&
            (t->data[n - 2] == '\n' || (n >= 4 && !memcmp(t->data + n - 4, "\r\n\r", 3))))
            return n;
    return 0;
}

bool serve_relay_streams(const struct serve_relay *r)
{
    static const char stream[] = "text/event-stream";
    return r->stream && r->fetch.status == 200 &&
           !strncmp(r->fetch.type, stream, sizeof stream - 1);
}

static void put(struct serve_relay *r, bool failed)
{
    serve_member_put(r->proxy, r->member, failed);
    r->member = NULL;
}

/* Wait until `fetch` has something to say. */
static void step(struct serve_relay *r)
{
    struct serve_fetch *f = &r->fetch;
    if (!serve_fetch_step(f, &r->client_fd, STEP_MS) || atomic_load(&r->proxy->stopping)) {
        r->gone = true;
    } else if (!f->over && serve_relay_streams(r) && f->in.n > EVENT_BYTES &&
               !whole_events(&f->in)) {
        f->over = true;
        f->result = CURLE_FILESIZE_EXCEEDED;
    } else if (!f->over && serve_member_silent(r->proxy, r->member)) {
        f->over = true;
        f->result = CURLE_OPERATION_TIMEDOUT;
    }
}

/* What a member said that refused; its own words, shortened. */
static int refuse_as_told(struct serve_relay *r, struct serve_problem *p)
{
    struct baton_error e;
    json_t *doc = NULL;
    const char *why = NULL;
    if (r->fetch.in.n && !base_json_parse(r->fetch.in.data, r->fetch.in.n, "", &doc, &e))
        why = json_string_value(json_object_get(json_object_get(doc, "error"), "message"));
    serve_refuse(p, r->fetch.status >= 400 ? (int)r->fetch.status : 502, "upstream_failed", NULL,
                 "%s server %s answered %ld: %s", serve_member_kind(r->member), r->member->url,
                 r->fetch.status, why ? why : "");
    json_decref(doc);
    return -1;
}

/* Ask r->member, counted in, for r->sent. 0: the answer is there, whole or its first event, or it
 * is the request's own fault. What did not arrive whole, what may be asked of another member: -1
 * with *p. Check r->gone first. */
static int exchange(struct serve_relay *r, bool get, struct serve_problem *p)
{
    struct serve_fetch *f = &r->fetch;
    const struct serve_fetch_ask a = {.member = r->member,
                                      .path = r->path,
                                      .authorization = r->authorization,
                                      .request_id = r->request_id,
                                      .body = get ? NULL : r->sent.data,
                                      .n_body = r->sent.n};
    serve_fetch_close(f);
    if (serve_fetch_open(f, &r->proxy->curl, &a))
        return serve_refuse(p, 503, "no_memory", NULL, "no memory for the request");
    while (!r->gone && !f->over && !(serve_relay_streams(r) && whole_events(&f->in)))
        step(r);
    if (r->gone)
        return -1;
    if (f->over && f->result) {
        if (f->result == CURLE_COULDNT_CONNECT || f->result == CURLE_COULDNT_RESOLVE_HOST)
            serve_member_down(r->proxy, r->member);
        return serve_refuse(p, 502, "upstream_lost", NULL, "%s server %s: %s",
                            serve_member_kind(r->member), r->member->url,
                            r->proxy->curl.easy_strerror(f->result));
    }
    if (serve_relay_streams(r) && f->over && !whole_events(&f->in))
        return serve_refuse(p, 502, "upstream_lost", NULL, "%s server %s: a stream without events",
                            serve_member_kind(r->member), r->member->url);
    bool good = f->status == 200, own = f->status >= 400 && f->status < 500 && f->status != 429;
    return good || own ? 0 : refuse_as_told(r, p);
}

/* The next member of a side; false where there is none. */
static bool next(struct serve_relay *r, enum serve_side side)
{
    struct serve_tried *t = &r->tried[side];
    r->member = serve_member_get(r->proxy, side, t);
    if (r->member && t->n)
        serve_proxy_add(r->proxy, &r->proxy->counts.retries);
    if (r->member)
        t->number[t->n++] = r->member->number;
    return r->member != NULL;
}

/* ---- prefill, decode ------------------------------------------------------------------------ */

enum outcome { GO_ON, ANSWERED, REFUSED }; /* the last two are what the client gets */

/* The object for the decode server; NULL where a good answer holds none. */
static json_t *take_transfer(struct serve_relay *r)
{
    struct baton_error e;
    json_t *doc = NULL;
    if (r->fetch.in.n)
        base_json_parse(r->fetch.in.data, r->fetch.in.n, "", &doc, &e);
    json_t *kv = json_object_get(doc, transfer);
    kv = json_is_object(kv) ? json_incref(kv) : NULL;
    json_decref(doc);
    return kv;
}

/* *kv: what to give the decode server, or NULL where nobody computed the prompt. Prefill servers
 * that are full are a reason to wait, not to burden a decode server with their work. */
static enum outcome prefill(struct serve_relay *r, json_t **kv, struct serve_problem *p)
{
    struct serve_problem why = {0};
    while (next(r, SERVE_SIDE_PREFILL)) {
        int rc = compose(r, prefill_ask(r->doc), &why);
        if (rc == 0)
            rc = exchange(r, false, &why);
        if (r->gone)
            return REFUSED;
        if (rc == 0 && r->fetch.status != 200)
            return ANSWERED; /* the request's own fault */
        *kv = rc == 0 ? take_transfer(r) : NULL;
        put(r, !*kv);
        if (*kv)
            return GO_ON;
    }
    if (why.status != 429)
        return GO_ON;
    *p = why;
    return REFUSED;
}

/* GO_ON: it may be tried again. *kv is a cache that is still to be had then, or NULL: whether
 * another member could pull one that this member may have begun to pull is not known. */
static enum outcome decode(struct serve_relay *r, json_t **kv, struct serve_problem *p)
{
    int rc = compose(r, decode_ask(r->doc, *kv), p);
    if (rc == 0)
        rc = exchange(r, false, p);
    if (r->gone)
        return REFUSED;
    bool untouched = r->fetch.result == CURLE_COULDNT_CONNECT;
    bool no_cache = *kv && (r->fetch.status == 409 || r->fetch.status == 502);
    if (rc == 0 && !no_cache)
        return ANSWERED;
    if (rc == 0)
        refuse_as_told(r, p);
    put(r, !no_cache);
    if (untouched)
        return GO_ON;
    if (*kv) /* the side that is not to blame may be asked again */
        r->tried[no_cache ? SERVE_SIDE_DECODE : SERVE_SIDE_PREFILL].n--;
    json_decref(*kv);
    *kv = NULL;
    return GO_ON;
}

static void count_prompt(struct serve_relay *r, bool wanted, bool remote)
{
    struct serve_proxy_counts *c = &r->proxy->counts;
    serve_proxy_add(r->proxy, remote ? &c->remote : wanted ? &c->fallback : &c->local);
}

static bool wants_prefill(const struct serve_relay *r)
{
    struct serve_proxy *p = r->proxy;
    bool any = false;
    pthread_mutex_lock(&p->lock);
    for (struct serve_member *m = p->members; m; m = m->next)
        any |= m->listed && m->side == SERVE_SIDE_PREFILL;
    size_t least = p->min_remote_tokens > 1 ? p->min_remote_tokens : 1;
    pthread_mutex_unlock(&p->lock);
    return any && single_tokens(r->doc) >= least;
}

static enum outcome run(struct serve_relay *r, struct serve_problem *p)
{
    bool remote = wants_prefill(r), wanted = remote;
    enum outcome s = GO_ON;
    json_t *kv = NULL;
    while (s == GO_ON) {
        if (remote && !kv)
            s = prefill(r, &kv, p);
        remote = kv != NULL;
        if (s != GO_ON)
            break;
        if (!next(r, SERVE_SIDE_DECODE)) {
            if (!p->status) /* else the last one's words */
                serve_refuse(p, 503, "no_member", NULL, "no decode server is up");
            s = REFUSED;
        } else if ((s = decode(r, &kv, p)) == ANSWERED && r->fetch.status == 200) {
            count_prompt(r, wanted, remote);
        }
    }
    json_decref(kv);
    return s;
}

/* ---- the request ---------------------------------------------------------------------------- */

/* Who pulls what from whom is told by us: in none of the places where servers look for it. */
static void drop_transfers(json_t *doc)
{
    json_t *sampling = json_object_get(doc, "sampling_params");
    json_object_del(doc, transfer);
    json_object_del(json_object_get(doc, "vllm_xargs"), transfer);
    json_object_del(json_object_get(sampling, "extra_args"), transfer);
}

int serve_relay_generate(struct serve_relay *r, const char *body, size_t n, struct serve_problem *p)
{
    struct baton_error e;
    if (base_json_parse(body, n, "the request's body", &r->doc, &e))
        return serve_refuse_error(p, NULL, &e);
    if (!json_is_object(r->doc))
        return serve_refuse(p, 400, "invalid_type", NULL, "the request's body is no JSON object");
    drop_transfers(r->doc);
    r->stream = json_is_true(json_object_get(r->doc, "stream"));
    int rc = run(r, p) == ANSWERED ? 0 : -1;
    if (r->fetch.over && !serve_relay_streams(r)) /* the member is free before the client knows */
        put(r, false);
    return rc;
}

int serve_relay_pass(struct serve_relay *r, const char *body, size_t n, struct serve_problem *p)
{
    if (body && serve_text_put(&r->sent, body, n))
        return serve_refuse(p, 503, "no_memory", NULL, "no memory for the request");
    while (next(r, SERVE_SIDE_DECODE)) {
        int rc = exchange(r, !body, p);
        if (rc == 0 || r->gone)
            return rc;
        put(r, true);
    }
    return p->status ? -1 : serve_refuse(p, 503, "no_member", NULL, "no decode server is up");
}

/* The stream's last event is there: [DONE], or the member's own error. */
static bool says_end(const struct serve_text *t, size_t n)
{
    static const char *const ends[] = {"data: [DONE]", "data: {\"error\"", "data:[DONE]"};
    for (size_t i = 0; n && i < sizeof ends / sizeof *ends; i++) {
        const char *at = memmem(t->data, n, ends[i], strlen(ends[i]));
        if (at && (at == t->data || at[-1] == '\n'))
            return true;
    }
    return false;
}

/* The member died, fell silent or stopped in the middle of a stream. Its last event was whole. */
static void tell_broken(struct serve_relay *r)
{
    struct serve_problem p;
    struct serve_fetch *f = &r->fetch;
    serve_refuse(&p, 502, "upstream_lost", NULL, "decode server %s: %s", r->member->url,
                 f->result ? r->proxy->curl.easy_strerror(f->result)
                           : "its stream stopped before its end");
    f->in.n = 0;
    if (serve_answer_error(&p, &f->in))
        r->gone = true; /* then the connection is cut instead */
    f->result = CURLE_OK;
    r->broken = r->ended = true;
}

ssize_t serve_relay_read(struct serve_relay *r, char *buf, size_t max)
{
    struct serve_fetch *f = &r->fetch;
    while (!r->gone) {
        size_t n = whole_events(&f->in);
        r->ended |= says_end(&f->in, n);
        if (n == 0 && f->over && !r->broken && (f->result || f->in.n || !r->ended))
            tell_broken(r);
        if (n == 0 && f->over)
            n = f->in.n;
        if (n > max)
            n = max;
        if (f->over && !f->result && r->ended && n == f->in.n && r->member)
            put(r, r->broken);
        if (n) {
            memcpy(buf, f->in.data, n);
            serve_text_drop(&f->in, n);
        }
        if (n || f->over)
            return (ssize_t)n;
        step(r);
    }
    return -1;
}

void serve_relay_close(struct serve_relay *r)
{
    if (r->member)
        put(r, r->broken);
    serve_fetch_close(&r->fetch);
    serve_text_free(&r->sent);
    json_decref(r->doc);
    r->doc = NULL;
}
