/* SPDX-License-Identifier: Apache-2.0 */
/* baton/baton.h: every public symbol, and nothing but the way to what does the work. */
#include <string.h>

#include "engine/engine_priv.h"

/* Options structs grow at their end: a caller built against a shorter one leaves the rest zero. */
static int take_options(void *to, size_t size, const void *from, size_t given, const char *what,
                        struct baton_error *e)
{
    if (given < sizeof given || given > 1u << 16)
        return base_fail(e, BATON_ERR_USAGE, "%s: struct_size is %zu", what, given);
    memset(to, 0, size);
    memcpy(to, from, given < size ? given : size);
    return 0;
}

int baton_model_open(const struct baton_model_options *o, struct baton_model **out,
                     struct baton_error *e)
{
    struct baton_model_options mine;
    int rc = take_options(&mine, sizeof mine, o, o->struct_size, "baton_model_options", e);
    return rc ? rc : engine_model_open(&mine, out, e);
}

void baton_model_close(struct baton_model *m)
{
    engine_model_close(m);
}

int baton_model_prepare(struct baton_model *m, const char *device, struct baton_error *e)
{
    return engine_model_prepare(m, device, e);
}

uint32_t baton_model_vocab(const struct baton_model *m)
{
    return model_config_of(m->model)->vocab;
}

uint32_t baton_model_layers(const struct baton_model *m)
{
    return model_config_of(m->model)->n_layers;
}

const char *baton_model_arch(const struct baton_model *m)
{
    return model_config_of(m->model)->arch;
}

int baton_tokenize(const struct baton_model *m, const char *text, size_t n, bool chat,
                   int32_t **ids, size_t *n_ids, struct baton_error *e)
{
    return engine_tokenize(m, text, n, chat, ids, n_ids, e);
}

int baton_detokenize(const struct baton_model *m, const int32_t *ids, size_t n_ids, char **text,
                     struct baton_error *e)
{
    return engine_detokenize(m, ids, n_ids, text, e);
}

int baton_link_pair(struct baton_link **a, struct baton_link **b, struct baton_error *e)
{
    return handoff_link_pair((struct transport **)a, (struct transport **)b, e);
}

int baton_link_dial(const char *address, uint64_t timeout_ns, struct baton_link **out,
                    struct baton_error *e)
{
    return handoff_dial(address, timeout_ns, (struct transport **)out, e);
}

void baton_link_close(struct baton_link *l)
{
    handoff_link_close((struct transport *)l);
}

int baton_trace_open(uint32_t max_events, struct baton_trace **out, struct baton_error *e)
{
    return base_trace_open(max_events ? max_events : 1u << 18, (struct base_trace **)out, e);
}

int baton_trace_save(struct baton_trace *t, const char *path, struct baton_error *e)
{
    return base_trace_save((struct base_trace *)t, path, e);
}

void baton_trace_close(struct baton_trace *t)
{
    base_trace_close((struct base_trace *)t);
}

int baton_engine_open(struct baton_model *m, const struct baton_engine_options *o,
                      struct baton_engine **out, struct baton_error *e)
{
    struct baton_engine_options mine;
    int rc = take_options(&mine, sizeof mine, o, o->struct_size, "baton_engine_options", e);
    return rc ? rc : engine_open(m, &mine, out, e);
}

void baton_engine_close(struct baton_engine *en)
{
    engine_close(en);
}

int baton_submit(struct baton_engine *en, const struct baton_request_options *o,
                 struct baton_request **out, struct baton_error *e)
{
    struct baton_request_options mine;
    int rc = take_options(&mine, sizeof mine, o, o->struct_size, "baton_request_options", e);
    return rc ? rc : engine_submit(en, &mine, out, e);
}

int baton_next(struct baton_request *r, struct baton_token *out, int64_t timeout_ns,
               struct baton_error *e)
{
    return engine_request_next(r, out, timeout_ns, e);
}

void baton_cancel(struct baton_request *r)
{
    engine_request_cancel(r);
}

void baton_request_close(struct baton_request *r)
{
    engine_request_close(r);
}

int baton_request_stats(struct baton_request *r, struct baton_stats *out)
{
    return engine_request_stats(r, out);
}

const char *baton_engine_address(const struct baton_engine *en)
{
    return en->io.listener ? handoff_listener_address(en->io.listener) : NULL;
}

int baton_ticket_stats(struct baton_engine *en, struct baton_ticket_stats *out)
{
    return engine_ticket_stats(en, out);
}

int baton_ticket(struct baton_request *r, struct baton_ticket *out, int64_t timeout_ns,
                 struct baton_error *e)
{
    return engine_request_ticket(r, out, timeout_ns, e);
}

int baton_ticket_renew(struct baton_engine *en, const char *from, const char *ticket,
                       struct baton_error *e)
{
    return engine_ticket_tell(en, false, from, ticket, e);
}

int baton_ticket_release(struct baton_engine *en, const char *from, const char *ticket,
                         struct baton_error *e)
{
    return engine_ticket_tell(en, true, from, ticket, e);
}

void baton_request_detach(struct baton_request *r)
{
    engine_request_detach(r);
}
