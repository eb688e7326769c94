/* SPDX-License-Identifier: Apache-2.0 */
/* A request's body to what was asked for. Members that nobody knows are ignored; those that are
 * known have the right type and range, or are refused by name, as is what is understood and not
 * built. Defaults are those of the OpenAI API. */
#include <stdlib.h>
#include <string.h>

#include "serve/serve_priv.h"

enum { DEFAULT_COMPLETION_TOKENS = 16, MAX_N = 64 };

static int parse_stop_list(struct serve_ask *a, const json_t *stop, struct serve_problem *p)
{
    size_t n = json_array_size(stop);
    if (n > SERVE_MAX_STOPS)
        return serve_refuse(p, 400, "invalid_value", "stop", "stop has %zu strings, at most %u fit",
                            n, SERVE_MAX_STOPS);
    for (size_t i = 0; i < n; i++) {
        const json_t *s = json_array_get(stop, i);
        if (!json_is_string(s))
            return serve_refuse(p, 400, "invalid_type", "stop",
                                "stop must be a string or a list of strings");
        a->stops[a->n_stops++] = json_string_value(s);
    }
    return 0;
}

static int parse_stop(struct serve_ask *a, struct serve_problem *p)
{
    const json_t *stop = json_object_get(a->doc, "stop");
    if (!stop || json_is_null(stop))
        return 0;
    if (json_is_string(stop))
        a->stops[a->n_stops++] = json_string_value(stop);
    else if (!json_is_array(stop))
        return serve_refuse(p, 400, "invalid_type", "stop",
                            "stop must be a string or a list of strings");
    else if (parse_stop_list(a, stop, p))
        return -1;
    for (size_t i = 0; i < a->n_stops; i++) {
        size_t n = strlen(a->stops[i]);
        if (n == 0 || n > SERVE_MAX_STOP_BYTES)
            return serve_refuse(p, 400, "invalid_value", "stop",
                                "a stop string has %zu bytes, not 1..%u", n, SERVE_MAX_STOP_BYTES);
    }
    return 0;
}

static int parse_stop_ids(struct serve_ask *a, struct serve_problem *p)
{
    const json_t *ids = json_object_get(a->doc, "stop_token_ids");
    if (!ids || json_is_null(ids))
        return 0;
    if (!json_is_array(ids))
        return serve_refuse(p, 400, "invalid_type", "stop_token_ids",
                            "stop_token_ids must be a list of token ids");
    return serve_field_ids(ids, "stop_token_ids", &a->stop_ids, &a->n_stop_ids, p);
}

static int parse_sampling(struct serve_ask *a, struct serve_problem *p)
{
    const json_t *d = a->doc;
    int64_t top_k = 0, seed = 0;
    const json_t *has_seed = json_object_get(d, "seed");
    if (serve_field_f32(d, "temperature", 0, false, 2, &a->temperature, p) ||
        serve_field_f32(d, "top_p", 0, true, 1, &a->top_p, p) ||
        serve_field_f32(d, "min_p", 0, false, 1, &a->min_p, p) ||
        serve_field_f32(d, "repetition_penalty", 0.01, false, 100, &a->repetition_penalty, p) ||
        serve_field_f32(d, "presence_penalty", -2, false, 2, &a->presence_penalty, p) ||
        serve_field_f32(d, "frequency_penalty", -2, false, 2, &a->frequency_penalty, p) ||
        serve_field_int(d, "top_k", -1, INT32_MAX, &top_k, p) ||
        serve_field_int(d, "seed", INT64_MIN, INT64_MAX, &seed, p))
        return -1;
    a->top_k = top_k > 0 ? (uint32_t)top_k : 0; /* vLLM's -1 is "off" too */
    a->seeded = has_seed && !json_is_null(has_seed);
    a->seed = (uint64_t)seed;
    return 0;
}

static int parse_lengths(struct serve_ask *a, struct serve_problem *p)
{
    const json_t *d = a->doc;
    if (serve_field_u32(d, "max_tokens", 1, INT32_MAX, &a->max_tokens, p) ||
        (a->kind == SERVE_CHAT &&
         serve_field_u32(d, "max_completion_tokens", 1, INT32_MAX, &a->max_tokens, p)) ||
        serve_field_u32(d, "min_tokens", 0, INT32_MAX, &a->min_tokens, p) ||
        serve_field_u32(d, "n", 1, MAX_N, &a->n, p))
        return -1;
    a->max_said = a->max_tokens > 0;
    if (a->kind == SERVE_COMPLETION && !a->max_said)
        a->max_tokens = DEFAULT_COMPLETION_TOKENS;
    /* Some routers cut the budget of a prefill to 1 and leave the least as it was. */
    if (a->max_tokens && a->min_tokens > a->max_tokens && !a->transfer.out)
        return serve_refuse(p, 400, "invalid_value", "min_tokens",
                            "min_tokens is %u, above max_tokens, which is %u", a->min_tokens,
                            a->max_tokens);
    return 0;
}

static int parse_logprobs(struct serve_ask *a, struct serve_problem *p)
{
    const json_t *d = a->doc, *v = json_object_get(d, "logprobs");
    if (a->kind == SERVE_COMPLETION) {
        a->logprobs = v && !json_is_null(v);
        return serve_field_u32(d, "logprobs", 0, SERVE_MAX_TOP, &a->n_top, p);
    }
    if (serve_field_bool(d, "logprobs", &a->logprobs, p) ||
        serve_field_u32(d, "top_logprobs", 0, SERVE_MAX_TOP, &a->n_top, p))
        return -1;
    if (a->n_top && !a->logprobs)
        return serve_refuse(p, 400, "invalid_value", "top_logprobs",
                            "top_logprobs needs logprobs to be true");
    return 0;
}

static int parse_stream(struct serve_ask *a, struct serve_problem *p)
{
    const json_t *d = a->doc, *o = json_object_get(d, "stream_options");
    if (serve_field_bool(d, "stream", &a->stream, p))
        return -1;
    if (!o || json_is_null(o))
        return 0;
    if (!json_is_object(o))
        return serve_refuse(p, 400, "invalid_type", "stream_options",
                            "stream_options must be an object");
    if (!a->stream && a->transfer.out)
        return 0; /* a router that made no stream of it */
    if (!a->stream)
        return serve_refuse(p, 400, "invalid_value", "stream_options",
                            "stream_options needs stream to be true");
    return serve_field_bool(o, "include_usage", &a->include_usage, p);
}

static int parse_flags(struct serve_ask *a, struct serve_problem *p)
{
    const json_t *d = a->doc, *o = json_object_get(d, "chat_template_kwargs");
    bool skip_special = true;
    if (serve_field_str(d, "model", &a->model, p) ||
        serve_field_bool(d, "ignore_eos", &a->ignore_eos, p) ||
        serve_field_bool(d, "return_token_ids", &a->return_token_ids, p) ||
        serve_field_bool(d, "skip_special_tokens", &skip_special, p))
        return -1;
    a->keep_special = !skip_special;
    if (!o || json_is_null(o) || a->kind == SERVE_COMPLETION)
        return 0;
    if (!json_is_object(o))
        return serve_refuse(p, 400, "invalid_type", "chat_template_kwargs",
                            "chat_template_kwargs must be an object");
    return serve_field_bool(o, "enable_thinking", &a->think, p);
}

/* Whether a member asks for nothing. */
static bool is_idle(const json_t *v)
{
    return !v || json_is_null(v) || json_is_false(v) ||
           (json_is_array(v) && json_array_size(v) == 0) ||
           (json_is_object(v) && json_object_size(v) == 0) ||
           (json_is_string(v) && !*json_string_value(v));
}

/* What would change the answer and is not built is refused rather than ignored. */
static int refuse_unbuilt(const struct serve_ask *a, struct serve_problem *p)
{
    static const char *const names[] = {
        "tools",         "functions",       "logit_bias",         "echo",
        "suffix",        "use_beam_search", "guided_json",        "guided_regex",
        "guided_choice", "guided_grammar",  "structured_outputs", "prompt_logprobs",
        "audio"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!is_idle(json_object_get(a->doc, names[i])))
            return serve_refuse(p, 400, "unsupported_parameter", names[i],
                                "%s is not supported by this server", names[i]);
    const json_t *format = json_object_get(json_object_get(a->doc, "response_format"), "type");
    if (format && (!json_is_string(format) || strcmp(json_string_value(format), "text") != 0))
        return serve_refuse(p, 400, "unsupported_parameter", "response_format",
                            "response_format: only {\"type\": \"text\"} is supported");
    uint32_t best_of = a->n;
    if (serve_field_u32(a->doc, "best_of", 1, MAX_N, &best_of, p))
        return -1;
    if (best_of != a->n)
        return serve_refuse(p, 400, "unsupported_parameter", "best_of",
                            "best_of other than n is not supported by this server");
    return 0;
}

static int parse_generation(struct serve_ask *a, struct serve_problem *p)
{
    /* First: what is refused behind it has a ticket to give back. */
    if (serve_transfer_parse(&a->transfer, a->doc, p) || parse_flags(a, p) || parse_lengths(a, p) ||
        parse_sampling(a, p) || parse_stop(a, p) || parse_stop_ids(a, p) || parse_logprobs(a, p) ||
        parse_stream(a, p) || refuse_unbuilt(a, p))
        return -1;
    if ((a->kind == SERVE_CHAT ? serve_ask_messages(a, p) : serve_ask_prompts(a, p)))
        return -1;
    size_t prompts = a->kind == SERVE_CHAT ? 1 : a->n_prompts;
    if (prompts * a->n > SERVE_MAX_CHOICES)
        return serve_refuse(p, 400, "invalid_value", "n",
                            "%zu prompts with n %u are %zu choices, at most %u fit a request",
                            prompts, a->n, prompts * a->n, SERVE_MAX_CHOICES);
    return 0;
}

static int parse_tokenize(struct serve_ask *a, struct serve_problem *p)
{
    a->add_special = true;
    if (serve_field_str(a->doc, "model", &a->model, p))
        return -1;
    const json_t *messages = json_object_get(a->doc, "messages");
    if (messages && !json_is_null(messages))
        return serve_ask_messages(a, p);
    if (serve_field_bool(a->doc, "add_special_tokens", &a->add_special, p) ||
        serve_ask_prompts(a, p))
        return -1;
    if (a->n_prompts != 1 || !a->prompts[0].text)
        return serve_refuse(p, 400, "invalid_type", "prompt", "prompt must be a string");
    return 0;
}

int serve_ask_parse(struct serve_ask *a, enum serve_kind kind, const char *body, size_t n,
                    struct serve_problem *p)
{
    struct baton_error e;
    *a = (struct serve_ask){
        .kind = kind, .n = 1, .temperature = 1, .top_p = 1, .think = true, .repetition_penalty = 1};
    if (base_json_parse(body, n, "the request's body", &a->doc, &e))
        return serve_refuse_error(p, NULL, &e);
    if (!json_is_object(a->doc))
        return serve_refuse(p, 400, "invalid_type", NULL, "the request's body is no JSON object");
    return kind == SERVE_TOKENIZE ? parse_tokenize(a, p) : parse_generation(a, p);
}

void serve_ask_free(struct serve_ask *a)
{
    for (size_t i = 0; i < a->n_prompts; i++)
        free(a->prompts[i].ids);
    for (size_t i = 0; a->joined && i < a->n_messages; i++)
        free(a->joined[i]);
    free(a->joined);
    free(a->prompts);
    free(a->messages);
    free(a->stop_ids);
    json_decref(a->doc);
    *a = (struct serve_ask){0};
}
