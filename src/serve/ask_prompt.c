/* SPDX-License-Identifier: Apache-2.0 */
/* What a request wants continued: prompts as text or ids, or the messages of a chat. */
#include <stdlib.h>
#include <string.h>

#include "serve/serve_priv.h"

static int no_memory(struct serve_problem *p)
{
    return serve_refuse(p, 503, "no_memory", NULL, "no memory for the request");
}

static int wrong_prompt(struct serve_problem *p)
{
    return serve_refuse(p, 400, "invalid_type", "prompt",
                        "prompt must be a string, a list of token ids, or a list of these");
}

static int one_prompt(const json_t *v, struct serve_prompt *out, struct serve_problem *p)
{
    if (json_is_string(v)) {
        out->text = json_string_value(v);
        return 0;
    }
    if (!json_is_array(v))
        return wrong_prompt(p);
    return serve_field_ids(v, "prompt", &out->ids, &out->n_ids, p);
}

int serve_ask_prompts(struct serve_ask *a, struct serve_problem *p)
{
    const json_t *v = json_object_get(a->doc, "prompt");
    if (!v || json_is_null(v))
        return serve_refuse(p, 400, "missing_required_parameter", "prompt", "prompt is missing");
    const json_t *first = json_array_get(v, 0);
    bool many = json_is_array(v) && (json_is_string(first) || json_is_array(first));
    size_t n = many ? json_array_size(v) : 1;
    if (n > SERVE_MAX_CHOICES)
        return serve_refuse(p, 400, "invalid_value", "prompt", "%zu prompts, at most %u fit", n,
                            SERVE_MAX_CHOICES);
    if (!(a->prompts = base_try_alloc(n, sizeof *a->prompts, NULL)))
        return no_memory(p);
    a->n_prompts = n;
    for (size_t i = 0; i < n; i++) {
        if (one_prompt(many ? json_array_get(v, i) : v, &a->prompts[i], p))
            return -1;
        if (a->prompts[i].text ? !*a->prompts[i].text : a->prompts[i].n_ids == 0)
            return serve_refuse(p, 400, "invalid_value", "prompt", "prompt is empty");
    }
    return 0;
}

/* A list of parts of type text, put together. */
static int join_parts(const json_t *parts, char **out, struct serve_problem *p)
{
    struct serve_text text = {0};
    size_t i;
    json_t *part;
    json_array_foreach(parts, i, part)
    {
        const char *type = json_string_value(json_object_get(part, "type"));
        const json_t *t = json_object_get(part, "text");
        int bad = 0;
        if (!type || strcmp(type, "text") != 0 || !json_is_string(t))
            bad = serve_refuse(p, 400, "unsupported_content", "messages",
                               "messages: a part of a content is no text");
        else if (serve_text_put(&text, json_string_value(t), json_string_length(t)))
            bad = no_memory(p);
        if (bad) {
            serve_text_free(&text);
            return -1;
        }
    }
    if (!text.data && serve_text_put(&text, "", 0))
        return no_memory(p);
    *out = text.data;
    return 0;
}

static int one_message(struct serve_ask *a, size_t i, const json_t *m, struct serve_problem *p)
{
    const json_t *content = json_object_get(m, "content");
    const char *role = json_string_value(json_object_get(m, "role"));
    if (!json_is_object(m) || !role)
        return serve_refuse(p, 400, "invalid_type", "messages", "messages[%zu] has no role", i);
    if (!strcmp(role, "developer"))
        role = "system";
    if (strcmp(role, "system") != 0 && strcmp(role, "user") != 0 && strcmp(role, "assistant") != 0)
        return serve_refuse(p, 400, "invalid_value", "messages",
                            "messages[%zu]: role '%.40s' is none of system, developer, user, "
                            "assistant",
                            i, role);
    a->messages[i].role = role;
    if (json_is_array(content)) {
        if (join_parts(content, &a->joined[i], p))
            return -1;
        a->messages[i].content = a->joined[i];
        return 0;
    }
    if (!json_is_string(content))
        return serve_refuse(p, 400, "invalid_type", "messages",
                            "messages[%zu]: content must be a string or a list of parts", i);
    a->messages[i].content = json_string_value(content);
    return 0;
}

int serve_ask_messages(struct serve_ask *a, struct serve_problem *p)
{
    const json_t *v = json_object_get(a->doc, "messages");
    size_t n = json_array_size(v);
    if (!v || json_is_null(v))
        return serve_refuse(p, 400, "missing_required_parameter", "messages",
                            "messages is missing");
    if (!json_is_array(v) || n == 0)
        return serve_refuse(p, 400, "invalid_type", "messages",
                            "messages must be a list with at least one message");
    a->messages = base_try_alloc(n, sizeof *a->messages, NULL);
    a->joined = base_try_alloc(n, sizeof *a->joined, NULL);
    if (!a->messages || !a->joined)
        return no_memory(p);
    a->n_messages = n;
    for (size_t i = 0; i < n; i++)
        if (one_message(a, i, json_array_get(v, i), p))
            return -1;
    return 0;
}
