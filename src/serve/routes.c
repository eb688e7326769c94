/* SPDX-License-Identifier: Apache-2.0 */
/* Answers that need no engine: models, health, version, tokens. */
#include <stdlib.h>
#include <string.h>

#include "serve/serve_priv.h"

static int put(struct serve_reply *r, json_t *doc, struct serve_problem *p)
{
    if (serve_text_json(&r->body, doc))
        return serve_refuse(p, 503, "no_memory", NULL, "no memory for the answer");
    return 0;
}

static json_t *models(const struct serve *s)
{
    return json_pack("{s:s,s:[{s:s,s:s,s:I,s:s,s:s,s:i}]}", "object", "list", "data", "id", s->name,
                     "object", "model", "created", (json_int_t)s->started, "owned_by", "baton",
                     "root", s->name, "max_model_len", (int)s->ctx);
}

int serve_route_get(struct serve *s, const char *path, struct serve_reply *r,
                    struct serve_problem *p)
{
    if (!strcmp(path, "/"))
        return serve_page_html(r, p);
    if (!strcmp(path, "/baton/v1/status"))
        return serve_page_status(s, r, p);
    if (!strcmp(path, "/v1/models"))
        return put(r, models(s), p);
    if (!strcmp(path, "/health"))
        return put(r, json_pack("{s:s}", "status", "ok"), p);
    if (!strcmp(path, "/version"))
        return put(r, json_pack("{s:s}", "version", s->version), p);
    r->type = "text/plain; version=0.0.4; charset=utf-8";
    if (serve_metrics_text(s, &r->body))
        return serve_refuse(p, 503, "no_memory", NULL, "no memory for the answer");
    return 0;
}

static int tokenize(struct serve *s, const char *body, size_t n, struct serve_reply *r,
                    struct serve_problem *p)
{
    struct serve_ask a;
    int32_t *ids = NULL;
    size_t n_ids = 0;
    int rc = serve_ask_parse(&a, SERVE_TOKENIZE, body, n, p);
    if (rc == 0)
        rc = serve_prompt_ids(s, &a, 0, &ids, &n_ids, p);
    if (rc == 0) {
        json_t *list = json_array();
        for (size_t i = 0; i < n_ids; i++)
            json_array_append_new(list, json_integer(ids[i]));
        rc = put(r,
                 json_pack("{s:I,s:i,s:o}", "count", (json_int_t)n_ids, "max_model_len",
                           (int)s->ctx, "tokens", list),
                 p);
    }
    free(ids);
    serve_ask_free(&a);
    return rc;
}

static int detokenize(struct serve *s, const char *body, size_t n, struct serve_reply *r,
                      struct serve_problem *p)
{
    json_t *doc = NULL;
    struct baton_error e;
    int32_t *ids = NULL;
    size_t n_ids = 0, n_text = 0;
    char *text = NULL;
    if (base_json_parse(body, n, "the request's body", &doc, &e))
        return serve_refuse_error(p, NULL, &e);
    const json_t *tokens = json_object_get(doc, "tokens");
    int rc = json_is_array(tokens)
                 ? serve_field_ids(tokens, "tokens", &ids, &n_ids, p)
                 : serve_refuse(p, 400, "invalid_type", "tokens", "tokens must be a list of ids");
    if (rc == 0 && (model_ids_check(ids, n_ids, s->vocab, &e) ||
                    model_tokenizer_decode(s->tokenizer, ids, n_ids, false, &text, &n_text, &e)))
        rc = serve_refuse_error(p, "tokens", &e);
    if (rc == 0)
        rc = put(r, json_pack("{s:o}", "prompt", json_stringn(text, n_text)), p);
    free(text);
    free(ids);
    json_decref(doc);
    return rc;
}

int serve_route_tokens(struct serve *s, const char *path, const char *body, size_t n,
                       struct serve_reply *r, struct serve_problem *p)
{
    return !strcmp(path, "/tokenize") ? tokenize(s, body, n, r, p) : detokenize(s, body, n, r, p);
}
