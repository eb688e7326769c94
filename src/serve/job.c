/* SPDX-License-Identifier: Apache-2.0 */
/* Jobs: a request with its choices, from being counted in to the engine's hands. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "serve/serve_priv.h"

static int chat_ids(struct serve *s, const struct serve_ask *a, int32_t **ids, size_t *n,
                    struct baton_error *e)
{
    const struct model_chat *chat;
    char *text = NULL;
    int rc = engine_chat(s->model, &chat, e);
    if (rc == 0)
        rc = model_chat_render(chat, a->messages, a->n_messages, true, a->think, &text, e);
    if (rc == 0 && text)
        rc = model_tokenizer_encode(s->tokenizer, text, strlen(text), false, ids, n, e);
    free(text);
    return rc;
}

int serve_prompt_ids(struct serve *s, const struct serve_ask *a, size_t i, int32_t **ids, size_t *n,
                     struct serve_problem *p)
{
    struct baton_error e;
    const char *text = a->n_messages ? NULL : a->prompts[i].text;
    int rc;
    if (!text) /* without text and without ids it is a chat */
        rc = chat_ids(s, a, ids, n, &e);
    else
        rc = model_tokenizer_encode(s->tokenizer, text, strlen(text),
                                    a->kind == SERVE_TOKENIZE ? a->add_special : true, ids, n, &e);
    return rc ? serve_refuse_error(p, a->n_messages ? "messages" : "prompt", &e) : 0;
}

static int check_prompt(const struct serve *s, const struct serve_ask *a, size_t i,
                        struct serve_problem *p)
{
    const char *param = a->kind == SERVE_CHAT ? "messages" : "prompt";
    struct baton_error e;
    size_t n = a->prompts[i].n_ids;
    if (n == 0)
        return serve_refuse(p, 400, "invalid_value", param, "%s has no tokens", param);
    if (model_ids_check(a->prompts[i].ids, n, s->vocab, &e))
        return serve_refuse_error(p, param, &e);
    if (n >= s->ctx)
        return serve_refuse(p, 400, "context_length_exceeded", param,
                            "the prompt has %zu tokens and leaves no room in a context of %u", n,
                            s->ctx);
    if (a->max_said && n + a->max_tokens > s->ctx)
        return serve_refuse(p, 400, "context_length_exceeded", "max_tokens",
                            "%zu prompt tokens and max_tokens %u do not fit a context of %u", n,
                            a->max_tokens, s->ctx);
    return 0;
}

static int find_ids(struct serve *s, struct serve_ask *a, struct serve_problem *p)
{
    if (a->kind == SERVE_CHAT) {
        if (!(a->prompts = base_try_alloc(1, sizeof *a->prompts, NULL)))
            return serve_refuse(p, 503, "no_memory", NULL, "no memory for the request");
        a->n_prompts = 1;
    }
    for (size_t i = 0; i < a->n_prompts; i++) {
        struct serve_prompt *q = &a->prompts[i];
        if (!q->ids && serve_prompt_ids(s, a, i, &q->ids, &q->n_ids, p))
            return -1;
        if (check_prompt(s, a, i, p))
            return -1;
    }
    return 0;
}

static void init_choices(struct serve_job *j)
{
    for (uint32_t i = 0; i < j->n_choices; i++) {
        struct serve_choice *c = &j->choices[i];
        c->job = j;
        c->index = i;
        c->prompt = i / j->ask.n;
        c->nth = i % j->ask.n;
    }
    for (size_t i = 0; i < j->ask.n_prompts; i++)
        j->prompt_tokens += j->ask.prompts[i].n_ids;
}

static int name_job(struct serve_job *j, struct serve_problem *p)
{
    uint8_t bytes[20];
    char hex[25];
    struct baton_error e;
    if (base_random(bytes, sizeof bytes, &e))
        return serve_refuse_error(p, NULL, &e);
    base_hex(bytes, 12, hex);
    snprintf(j->id, sizeof j->id, "%s-%s", j->ask.kind == SERVE_CHAT ? "chatcmpl" : "cmpl", hex);
    if (!j->ask.seeded)
        memcpy(&j->ask.seed, bytes + 12, sizeof j->ask.seed);
    return 0;
}

int serve_job_open(struct serve *s, struct serve_ask *a, struct serve_job **out,
                   struct serve_problem *p)
{
    struct serve_job *j = base_try_alloc(1, sizeof *j, NULL);
    if (!j) {
        serve_ask_free(a);
        return serve_refuse(p, 503, "no_memory", NULL, "no memory for the request");
    }
    atomic_init(&j->refs, 1);
    pthread_mutex_init(&j->lock, NULL);
    j->serve = s;
    j->ask = *a;
    j->created = (int64_t)time(NULL);
    j->arrived_ns = base_now_ns();
    j->number = atomic_fetch_add(&s->next_number, 1);
    int rc = name_job(j, p);
    if (rc == 0)
        rc = find_ids(s, &j->ask, p);
    if (rc == 0) {
        j->n_choices = j->n_open = (uint32_t)j->ask.n_prompts * j->ask.n;
        j->choices = base_try_alloc(j->n_choices, sizeof *j->choices, NULL);
        if (!j->choices)
            rc = serve_refuse(p, 503, "no_memory", NULL, "no memory for the request");
    }
    if (rc) {
        serve_job_put(j);
        return rc;
    }
    init_choices(j);
    *out = j;
    return 0;
}

void serve_job_put(struct serve_job *j)
{
    if (!j || atomic_fetch_sub(&j->refs, 1) != 1)
        return;
    if (!j->claimed)
        serve_transfer_release(j->serve, &j->ask.transfer);
    for (uint32_t i = 0; j->choices && i < j->n_choices; i++)
        serve_choice_free(&j->choices[i]);
    free(j->choices);
    serve_text_free(&j->out);
    serve_ask_free(&j->ask);
    pthread_mutex_destroy(&j->lock);
    free(j);
}

int serve_job_submit(struct serve_job *j, struct serve_problem *p)
{
    struct serve *s = j->serve;
    uint32_t room = s->lanes + s->max_queue;
    uint32_t open = atomic_load(&s->open_choices);
    do {
        if (j->n_choices > room)
            return serve_refuse(p, 400, "invalid_value", "n",
                                "%u choices of one request, this server has room for %u",
                                j->n_choices, room);
        if (open + j->n_choices > room)
            return serve_refuse(p, 429, "queue_full", NULL,
                                "the queue is full: %u choices run or wait, at most %u may", open,
                                room);
    } while (!atomic_compare_exchange_weak(&s->open_choices, &open, open + j->n_choices));
    atomic_fetch_add(&j->refs, 1);
    pthread_mutex_lock(&s->lock);
    bool shut = s->shut;
    if (!shut) {
        j->next = s->incoming;
        s->incoming = j;
    }
    pthread_mutex_unlock(&s->lock);
    if (shut) {
        atomic_fetch_sub(&s->open_choices, j->n_choices);
        serve_job_put(j);
        return serve_refuse(p, 503, "draining", NULL, "the server is shutting down");
    }
    serve_ring(s);
    return 0;
}

int serve_choice_begin(struct serve_choice *c, struct baton_error *e)
{
    struct serve_job *j = c->job;
    struct serve *s = j->serve;
    const struct serve_ask *a = &j->ask;
    const struct serve_prompt *q = &a->prompts[c->prompt];
    uint32_t room = s->ctx - (uint32_t)q->n_ids;
    const struct baton_request_options o = {
        .struct_size = sizeof o,
        .ids = q->ids,
        .n_ids = q->n_ids,
        .request_id = atomic_fetch_add(&s->next_request, 1),
        .max_tokens = a->max_tokens && a->max_tokens < room ? a->max_tokens : room,
        .min_tokens = a->min_tokens,
        .ignore_eos = a->ignore_eos,
        .temperature = a->temperature,
        .top_k = a->top_k,
        .top_p = a->top_p,
        .min_p = a->min_p,
        .seed = a->seed,
        .want_logits = a->logprobs,
        .repetition_penalty = a->repetition_penalty,
        .presence_penalty = a->presence_penalty,
        .frequency_penalty = a->frequency_penalty,
        .choice = c->nth,
        .hold = a->transfer.out,
        .ticket = a->transfer.in ? a->transfer.ticket : NULL,
        .from = a->transfer.in ? a->transfer.from : NULL,
        .local_prefill = s->role == SERVE_DECODE && (s->local_prefill || !a->transfer.in),
        .notify = serve_ring,
        .notify_ctx = s,
    };
    c->begun = true;
    if (!j->begun_ns)
        j->begun_ns = base_now_ns();
    int rc = model_detokenizer_open(s->tokenizer, !a->keep_special, &c->detokenizer, e);
    if (rc == 0 && a->return_token_ids && !(c->ids = json_array()))
        rc = base_fail(e, BATON_ERR_NOMEM, "no memory for token ids");
    if (rc == 0)
        rc = baton_submit(s->engine, &o, &c->request, e);
    if (rc == 0)
        j->claimed = true; /* the engine releases it where the request fails */
    return rc;
}
