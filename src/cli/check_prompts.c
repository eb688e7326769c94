/* SPDX-License-Identifier: Apache-2.0 */
/* check: default prompts by length, or the lines of a JSONL file. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "cli/check_priv.h"

#define FILE_LIMIT ((size_t)64 << 20)

static void name_prompt(struct verify_prompt *p, const char *id, uint32_t line)
{
    char shown[64];
    p->source = "file";
    if (id)
        snprintf(p->name, sizeof p->name, "%s", base_shown(shown, id));
    else
        snprintf(p->name, sizeof p->name, "line %u", line);
}

static int take_ids(const json_t *list, struct verify_prompt *p, const char *what,
                    struct baton_error *e)
{
    size_t n = json_array_size(list);
    p->ids = base_try_alloc(n ? n : 1, sizeof *p->ids, e);
    if (!p->ids)
        return BATON_ERR_NOMEM;
    for (p->n_ids = 0; p->n_ids < n; p->n_ids++) {
        const json_t *id = json_array_get(list, p->n_ids);
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) > INT32_MAX)
            return base_fail(e, BATON_ERR_INPUT, "%s: id %zu is no token id", what, p->n_ids);
        p->ids[p->n_ids] = (int32_t)json_integer_value(id);
    }
    return 0;
}

/* {"prompt": a user's message} or {"text": continued as it is} or {"ids": [...]}, "id" a name. */
static int take_object(const json_t *o, const struct baton_model *m, uint32_t line,
                       const char *what, struct verify_prompt *p, struct baton_error *e)
{
    const char *id = NULL, *prompt = NULL, *text = NULL;
    const json_t *ids = json_object_get(o, "ids");
    int rc = base_json_str(o, "id", false, &id, what, e);
    if (rc == 0)
        rc = base_json_str(o, "prompt", false, &prompt, what, e);
    if (rc == 0)
        rc = base_json_str(o, "text", false, &text, what, e);
    if (rc)
        return rc;
    name_prompt(p, id, line);
    if (!!prompt + !!text + json_is_array(ids) != 1)
        return base_fail(e, BATON_ERR_INPUT, "%s: needs one of \"prompt\", \"text\" and \"ids\"",
                         what);
    if (json_is_array(ids))
        return take_ids(ids, p, what, e);
    const char *given = prompt ? prompt : text;
    return baton_tokenize(m, given, strlen(given), prompt != NULL, &p->ids, &p->n_ids, e);
}

static int take_line(struct cli_check *c, const struct baton_model *m, const char *text, size_t n,
                     uint32_t line, struct baton_error *e)
{
    char what[96], shown[64];
    json_t *o = NULL;
    snprintf(what, sizeof what, "%s line %u", base_shown(shown, c->args->prompts), line);
    if (c->n_cases == CLI_CHECK_CASES)
        return base_fail(e, BATON_ERR_INPUT, "%s: more than %u prompts", what, CLI_CHECK_CASES);
    int rc = base_json_parse(text, n, what, &o, e);
    if (rc == 0 && !json_is_object(o))
        rc = base_fail(e, BATON_ERR_INPUT, "%s is no JSON object", what);
    if (rc == 0)
        rc = take_object(o, m, line, what, &c->cases[c->n_cases++].prompt, e);
    json_decref(o);
    return rc;
}

static int read_file(struct cli_check *c, const struct baton_model *m, struct baton_error *e)
{
    char *text = NULL;
    size_t n = 0;
    uint32_t line = 0;
    int rc = base_stream_read(c->args->prompts, FILE_LIMIT, &text, &n, e);
    if (rc == BATON_ERR_IO) /* a file that the user named */
        rc = e->code = BATON_ERR_INPUT;
    for (size_t at = 0; rc == 0 && at < n;) {
        const char *end = memchr(text + at, '\n', n - at);
        size_t length = end ? (size_t)(end - text) - at : n - at;
        line++;
        if (length) /* an empty line is none */
            rc = take_line(c, m, text + at, length, line, e);
        at += length + 1;
    }
    free(text);
    if (rc == 0 && c->n_cases == 0)
        rc = base_fail(e, BATON_ERR_INPUT, "%.120s holds no prompts", c->args->prompts);
    return rc;
}

static void make_default(const struct baton_model *m, uint32_t n_tokens, struct cli_check_case *c)
{
    struct verify_case *r = &c->result;
    if (verify_prompt_lookup(m, n_tokens, &c->prompt, &r->error) == 0)
        return;
    r->verdict = VERIFY_ERROR;
    r->tokens = n_tokens;
    snprintf(r->why, sizeof r->why, "%.230s", r->error.text);
    snprintf(c->prompt.name, sizeof c->prompt.name, "%u tokens", n_tokens);
    c->prompt.source = "lookup";
}

int cli_check_prompts(struct cli_check *c, const struct baton_model *m, struct baton_error *e)
{
    c->cases = base_try_alloc(CLI_CHECK_CASES, sizeof *c->cases, e);
    if (!c->cases)
        return BATON_ERR_NOMEM;
    if (c->args->prompts)
        return read_file(c, m, e);
    c->n_cases = c->args->n_tokens;
    for (uint32_t i = 0; i < c->n_cases; i++)
        make_default(m, c->args->tokens[i], &c->cases[i]);
    return 0;
}
