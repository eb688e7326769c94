/* SPDX-License-Identifier: Apache-2.0 */
/* Answers in the OpenAI API's words: whole, or as server-sent events. */
#include <stdlib.h>
#include <string.h>

#include "serve/serve_priv.h"

static json_t *head(const struct serve_job *j, bool chunk)
{
    const char *object = "text_completion";
    if (j->ask.kind == SERVE_CHAT)
        object = chunk ? "chat.completion.chunk" : "chat.completion";
    return json_pack("{s:s,s:s,s:I,s:s}", "id", j->id, "object", object, "created",
                     (json_int_t)j->created, "model", j->serve->name);
}

/* Where a decode server's prompt was computed, and what became of the handoff if there was one. */
static json_t *source(const struct serve_job *j)
{
    return json_pack("{s:s,s:s?}", "prompt_source",
                     j->st.slots ? "external_kv_transfer" : "local_compute", "handoff",
                     j->st.verdict[0] ? j->st.verdict : NULL);
}

static json_t *usage(const struct serve_job *j)
{
    json_int_t out = 0, in = (json_int_t)j->prompt_tokens;
    for (uint32_t i = 0; i < j->n_choices; i++)
        out += j->choices[i].n_out;
    json_t *u = json_pack("{s:I,s:I,s:I,s:{s:I}}", "prompt_tokens", in, "completion_tokens", out,
                          "total_tokens", in + out, "prompt_tokens_details", "cached_tokens",
                          (json_int_t)j->cached_tokens);
    if (j->serve->role == SERVE_DECODE)
        json_object_set_new(u, "baton", source(j));
    return u;
}

static json_t *ids_of(const struct serve_prompt *q)
{
    json_t *a = json_array();
    for (size_t i = 0; i < q->n_ids; i++)
        json_array_append_new(a, json_integer(q->ids[i]));
    return a;
}

/* What may be told of the text, taken out of it. */
static json_t *take_text(struct serve_choice *c)
{
    size_t n = c->safe;
    json_t *s = json_stringn(n ? c->text.data : "", n);
    if (s) {
        serve_text_drop(&c->text, n);
        c->safe = 0;
    }
    return s;
}

static json_t *take_logprobs(struct serve_choice *c)
{
    json_t *l = c->logprobs;
    c->logprobs = NULL;
    if (!l)
        return json_null();
    return c->job->ask.kind == SERVE_CHAT ? json_pack("{s:o}", "content", l) : l;
}

static json_t *stop_reason(const struct serve_choice *c)
{
    return c->stopped_by ? json_string(c->stopped_by) : json_null();
}

/* Token ids of this part, and of the prompt where `first`. */
static int add_ids(struct serve_choice *c, json_t *o, bool first)
{
    if (!c->ids)
        return 0;
    int bad = json_object_set_new(o, "token_ids", c->ids);
    c->ids = json_array();
    if (first && c->job->ask.kind == SERVE_COMPLETION)
        bad |= json_object_set_new(o, "prompt_token_ids", ids_of(&c->job->ask.prompts[c->prompt]));
    return bad || !c->ids ? BATON_ERR_NOMEM : 0;
}

static json_t *choice_json(struct serve_choice *c, bool chunk)
{
    bool chat = c->job->ask.kind == SERVE_CHAT, first = !chunk || !c->role_told;
    json_t *o = json_pack("{s:i,s:o,s:s?,s:o}", "index", (int)c->index, "logprobs",
                          take_logprobs(c), "finish_reason", c->finish, "stop_reason",
                          stop_reason(c));
    json_t *text = take_text(c);
    int bad;
    if (!chat) {
        bad = json_object_set_new(o, "text", text);
    } else {
        json_t *message = json_pack("{s:o}", "content", text);
        if (first)
            json_object_set_new(message, "role", json_string("assistant"));
        bad = json_object_set_new(o, chunk ? "delta" : "message", message);
    }
    if (bad || add_ids(c, o, first)) {
        json_decref(o);
        return NULL;
    }
    return o;
}

static int put_event(struct serve_text *out, json_t *doc)
{
    if (serve_text_put(out, "data: ", 6) || serve_text_json(out, doc))
        return BATON_ERR_NOMEM;
    return serve_text_put(out, "\n\n", 2);
}

static bool has_news(const struct serve_choice *c)
{
    return c->safe > 0 || c->logprobs || (c->ids && json_array_size(c->ids) > 0) ||
           (c->finish && !c->finish_told);
}

int serve_answer_chunk(struct serve_choice *c, struct serve_text *out)
{
    if (c->finish_told || !has_news(c))
        return 0;
    struct serve_job *j = c->job;
    json_t *doc = head(j, true);
    bool first = !c->role_told;
    if (json_object_set_new(doc, "choices", json_pack("[o]", choice_json(c, true)))) {
        json_decref(doc);
        return BATON_ERR_NOMEM;
    }
    if (first && c->ids && j->ask.kind == SERVE_CHAT)
        json_object_set_new(doc, "prompt_token_ids", ids_of(&j->ask.prompts[0]));
    if (j->ask.include_usage)
        json_object_set_new(doc, "usage", json_null());
    c->role_told = true;
    c->finish_told = c->finish != NULL;
    return put_event(out, doc);
}

int serve_answer_end(struct serve_job *j, struct serve_text *out)
{
    if (j->ask.include_usage) {
        json_t *doc = head(j, true);
        json_object_set_new(doc, "choices", json_array());
        json_object_set_new(doc, "usage", usage(j));
        if (put_event(out, doc))
            return BATON_ERR_NOMEM;
    }
    return serve_text_put(out, "data: [DONE]\n\n", 14);
}

int serve_answer_error(const struct serve_problem *p, struct serve_text *out)
{
    return put_event(out, serve_problem_json(p));
}

int serve_answer_whole(struct serve_job *j, struct serve_text *out)
{
    json_t *doc = head(j, false), *choices = json_array();
    int bad = 0;
    for (uint32_t i = 0; i < j->n_choices; i++)
        bad |= json_array_append_new(choices, choice_json(&j->choices[i], false));
    bad |= json_object_set_new(doc, "choices", choices);
    bad |= json_object_set_new(doc, "usage", usage(j));
    if (j->ask.return_token_ids && j->ask.kind == SERVE_CHAT)
        bad |= json_object_set_new(doc, "prompt_token_ids", ids_of(&j->ask.prompts[0]));
    if (j->ask.transfer.out)
        bad |= json_object_set_new(doc, "kv_transfer_params",
                                   serve_transfer_json(j->serve, j->choices[0].ticket,
                                                       j->ask.prompts[0].ids,
                                                       j->ask.prompts[0].n_ids));
    if (bad) {
        json_decref(doc);
        return BATON_ERR_NOMEM;
    }
    return serve_text_json(out, doc);
}
