/* SPDX-License-Identifier: Apache-2.0 */
/* Refusals, as the OpenAI API words them. */
#include <stdio.h>
#include <string.h>

#include "serve/serve_priv.h"

#undef serve_refuse
#undef serve_refuse_error
#undef serve_refuse_handoff

static const char *type_of(int status)
{
    switch (status) {
    case 401:
        return "authentication_error";
    case 429:
        return "rate_limit_error";
    case 404:
        return "not_found_error";
    default:
        return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

int serve_refuse(struct serve_problem *p, int status, const char *code, const char *param,
                 const char *fmt, ...)
{
    /* base_fail keeps control characters and broken UTF-8 of what a message quotes out of it. */
    struct baton_error e;
    char text[sizeof e.text];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    base_fail(&e, BATON_ERR_INPUT, "%s", text);
    *p = (struct serve_problem){.status = status, .type = type_of(status), .code = code};
    snprintf(p->param, sizeof p->param, "%s", param ? param : "");
    snprintf(p->message, sizeof p->message, "%s", e.text);
    return -1;
}

int serve_refuse_error(struct serve_problem *p, const char *param, const struct baton_error *e)
{
    switch (e->code) {
    case BATON_ERR_INPUT:
    case BATON_ERR_USAGE:
    case BATON_ERR_UNSUPPORTED:
        return serve_refuse(p, 400, NULL, param, "%s", e->text);
    case BATON_ERR_BUSY:
        return serve_refuse(p, 429, "queue_full", NULL, "%s", e->text);
    case BATON_ERR_NOMEM:
        return serve_refuse(p, 503, "no_memory", NULL, "%s", e->text);
    default:
        return serve_refuse(p, 500, base_code_name(e->code), NULL, "%s", e->text);
    }
}

int serve_refuse_handoff(struct serve_problem *p, const struct baton_error *e)
{
    const char *code = base_code_name(e->code);
    switch (e->code) {
    case BATON_ERR_STALE:
    case BATON_ERR_CANCELLED: /* withdrawn by its producer */
        return serve_refuse(p, 409, code, "kv_transfer_params", "%s", e->text);
    case BATON_ERR_MISMATCH:
        return serve_refuse(p, 422, code, "kv_transfer_params", "%s", e->text);
    case BATON_ERR_PEER:
    case BATON_ERR_IO:
    case BATON_ERR_TIMEOUT:
    case BATON_ERR_INTEGRITY:
    case BATON_ERR_USAGE: /* a name that nobody knows */
        return serve_refuse(p, 502, code, "kv_transfer_params", "%s", e->text);
    default:
        return serve_refuse_error(p, NULL, e);
    }
}

json_t *serve_problem_json(const struct serve_problem *p)
{
    return json_pack("{s:{s:s,s:s,s:s?,s:s?}}", "error", "message", p->message, "type", p->type,
                     "param", p->param[0] ? p->param : NULL, "code", p->code);
}
