/* SPDX-License-Identifier: Apache-2.0 */
/* A choice's tokens to text, with stop strings and log-probabilities. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model/sampler.h"
#include "serve/serve_priv.h"

static int no_memory(struct baton_error *e)
{
    return base_fail(e, BATON_ERR_NOMEM, "no memory for an answer");
}

/* ---- stop strings ------------------------------------------------------------------------- */

/* Bytes at the end of the text that a stop string may begin with. */
static size_t held_back(const char *text, size_t n, const char *stop)
{
    size_t len = strlen(stop), most = len - 1 < n ? len - 1 : n;
    for (size_t k = most; k > 0; k--)
        if (memcmp(text + n - k, stop, k) == 0)
            return k;
    return 0;
}

/* Cut the text at the first stop string in it, or find how much of it may be told. What was told
 * before can't be part of one: it would have been held back. */
static void look_for_stops(struct serve_choice *c, bool more_comes)
{
    const struct serve_ask *a = &c->job->ask;
    struct serve_text *t = &c->text;
    size_t at = SIZE_MAX, held = 0;
    for (size_t i = 0; i < a->n_stops && t->n > 0; i++) {
        const char *found = memmem(t->data + c->safe, t->n - c->safe, a->stops[i],
                                   strlen(a->stops[i]));
        if (found && (size_t)(found - t->data) < at) {
            at = (size_t)(found - t->data);
            c->stopped_by = a->stops[i];
        }
    }
    if (at != SIZE_MAX) {
        t->data[at] = '\0';
        t->n = c->safe = at;
        c->finish = "stop";
        return;
    }
    for (size_t i = 0; more_comes && i < a->n_stops && t->n > 0; i++) {
        size_t k = held_back(t->data + c->safe, t->n - c->safe, a->stops[i]);
        held = k > held ? k : held;
    }
    c->safe = t->n - held;
}

static bool is_stop_id(const struct serve_ask *a, int32_t id)
{
    for (size_t i = 0; i < a->n_stop_ids; i++)
        if (a->stop_ids[i] == id)
            return true;
    return false;
}

static int add_piece(struct serve_choice *c, const char *piece, size_t n, bool more_comes,
                     struct baton_error *e)
{
    if (serve_text_put(&c->text, piece, n))
        return no_memory(e);
    c->n_text += n;
    if (more_comes && c->n_out <= c->job->ask.min_tokens)
        c->safe = c->text.n; /* too early for a stop */
    else
        look_for_stops(c, more_comes);
    return 0;
}

/* ---- log-probabilities -------------------------------------------------------------------- */

/* A token as it is shown: its text, special ones too; what is no character alone is U+FFFD. */
static char *shown(const struct serve *s, int32_t id, struct baton_error *e)
{
    char *text;
    size_t n;
    return model_tokenizer_decode(s->tokenizer, &id, 1, false, &text, &n, e) ? NULL : text;
}

static json_t *bytes_of(const char *text)
{
    json_t *a = json_array();
    for (const char *p = text; *p; p++)
        json_array_append_new(a, json_integer((unsigned char)*p));
    return a;
}

/* JSON has no -inf; the API's own stand-in. */
static double told(float logprob)
{
    return logprob < -9999.0f || isnan(logprob) ? -9999.0 : (double)logprob;
}

static json_t *chat_entry(const struct serve *s, int32_t id, float logprob, struct baton_error *e)
{
    char *text = shown(s, id, e);
    json_t *o = text ? json_pack("{s:s,s:f,s:o}", "token", text, "logprob", told(logprob), "bytes",
                                 bytes_of(text))
                     : NULL;
    free(text);
    return o;
}

static int add_chat(struct serve_choice *c, int32_t id, float logprob, const int32_t *top_ids,
                    const float *top, uint32_t n_top, struct baton_error *e)
{
    const struct serve *s = c->job->serve;
    json_t *o = chat_entry(s, id, logprob, e), *tops = json_array();
    for (uint32_t i = 0; i < n_top; i++)
        json_array_append_new(tops, chat_entry(s, top_ids[i], top[i], e));
    if (!c->logprobs)
        c->logprobs = json_array();
    if (json_object_set_new(o, "top_logprobs", tops) || json_array_append_new(c->logprobs, o))
        return no_memory(e);
    return 0;
}

static int add_completion(struct serve_choice *c, int32_t id, float logprob, const int32_t *top_ids,
                          const float *top, uint32_t n_top, struct baton_error *e)
{
    const struct serve *s = c->job->serve;
    json_t *tops = json_object();
    char *text = shown(s, id, e);
    for (uint32_t i = 0; i < n_top; i++) {
        char *other = shown(s, top_ids[i], e);
        /* two tokens may look alike: the likelier one stays */
        if (other && !json_object_get(tops, other))
            json_object_set_new(tops, other, json_real(told(top[i])));
        free(other);
    }
    if (text && !json_object_get(tops, text))
        json_object_set_new(tops, text, json_real(told(logprob)));
    if (!c->logprobs)
        c->logprobs = json_pack("{s:[],s:[],s:[],s:[]}", "tokens", "token_logprobs", "top_logprobs",
                                "text_offset");
    int bad = json_array_append_new(json_object_get(c->logprobs, "tokens"), json_string(text));
    bad |= json_array_append_new(json_object_get(c->logprobs, "token_logprobs"),
                                 json_real(told(logprob)));
    bad |= json_array_append_new(json_object_get(c->logprobs, "top_logprobs"), tops);
    bad |= json_array_append_new(json_object_get(c->logprobs, "text_offset"),
                                 json_integer((json_int_t)c->n_text));
    free(text);
    return bad ? no_memory(e) : 0;
}

static int add_logprobs(struct serve_choice *c, const struct baton_token *t, struct baton_error *e)
{
    const struct serve_ask *a = &c->job->ask;
    const struct serve *s = c->job->serve;
    int32_t ids[SERVE_MAX_TOP];
    float top[SERVE_MAX_TOP], logprob;
    uint32_t n = a->n_top < s->vocab ? a->n_top : s->vocab;
    int rc = model_sampler_logprobs(s->sampler, t->logits, t->id, n, ids, top, &logprob, e);
    if (rc)
        return rc;
    return a->kind == SERVE_CHAT ? add_chat(c, t->id, logprob, ids, top, n, e)
                                 : add_completion(c, t->id, logprob, ids, top, n, e);
}

/* ---- tokens ------------------------------------------------------------------------------- */

int serve_choice_take(struct serve_choice *c, const struct baton_token *t, struct baton_error *e)
{
    const struct serve_ask *a = &c->job->ask;
    const char *piece;
    size_t n;
    c->n_out++;
    if (c->ids && json_array_append_new(c->ids, json_integer(t->id)))
        return no_memory(e);
    int rc = a->logprobs ? add_logprobs(c, t, e) : 0;
    if (rc == 0)
        rc = model_detokenizer_push(c->detokenizer, t->id, &piece, &n, e);
    if (rc == 0)
        rc = add_piece(c, piece, n, true, e);
    if (rc == 0 && !c->finish && c->n_out > a->min_tokens && is_stop_id(a, t->id))
        rc = serve_choice_finish(c, "stop", e);
    return rc;
}

int serve_choice_finish(struct serve_choice *c, const char *finish, struct baton_error *e)
{
    const char *piece;
    size_t n;
    int rc = model_detokenizer_finish(c->detokenizer, &piece, &n, e);
    if (rc == 0)
        rc = add_piece(c, piece, n, false, e);
    if (rc == 0 && !c->finish)
        c->finish = finish;
    return rc;
}

void serve_choice_free(struct serve_choice *c)
{
    baton_request_close(c->request);
    model_detokenizer_close(c->detokenizer);
    serve_text_free(&c->text);
    json_decref(c->ids);
    json_decref(c->logprobs);
}
