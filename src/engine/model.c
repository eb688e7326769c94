/* SPDX-License-Identifier: Apache-2.0 */
/* An opened model: its parts, opened when first needed, and the devices that hold its weights. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/engine_priv.h"
#include "model/chat.h"
#include "model/tokenizer.h"

int engine_model_open(const struct baton_model_options *o, struct baton_model **out,
                      struct baton_error *e)
{
    if (!o->path || !*o->path)
        return base_fail(e, BATON_ERR_USAGE, "no model path given");
    struct baton_model *m = base_try_alloc(1, sizeof *m, e);
    if (!m)
        return BATON_ERR_NOMEM;
    pthread_mutex_init(&m->lock, NULL);
    m->options = *o;
    int rc = model_open(o->path, &m->model, e);
    if (rc == 0)
        rc = engine_identity_fill(m, e);
    if (rc) {
        engine_model_close(m);
        return rc;
    }
    *out = m;
    return 0;
}

static void binding_close(struct engine_binding *b)
{
    if (!b)
        return;
    model_unbind(b->bound);
    device_close(b->device);
    free(b->name);
    free(b);
}

void engine_model_close(struct baton_model *m)
{
    if (!m)
        return;
    for (struct engine_binding *b = m->bindings, *next; b; b = next) {
        next = b->next;
        binding_close(b);
    }
    model_chat_close(m->chat);
    model_tokenizer_close(m->tokenizer);
    model_close(m->model);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

const struct model *engine_model(const struct baton_model *m)
{
    return m->model;
}

/* ---- tokenizer and chat format ------------------------------------------------------------ */

static int no_tokenizer(const struct baton_model *m, struct baton_error *e)
{
    return base_fail(e, BATON_ERR_UNSUPPORTED, "%s has random weights and no tokenizer: give ids",
                     model_path(m->model));
}

/* Opening on first use changes an object that callers see as const; the lock makes it safe, and
 * every model object was allocated as a changeable one. */
int engine_tokenizer(const struct baton_model *cm, const struct model_tokenizer **out,
                     struct baton_error *e)
{
    struct baton_model *m = (struct baton_model *)cm;
    int rc = 0;
    if (model_is_shape(m->model))
        return no_tokenizer(m, e);
    pthread_mutex_lock(&m->lock);
    if (!m->tokenizer)
        rc = model_tokenizer_open(model_path(m->model), &m->tokenizer, e);
    if (rc == 0)
        *out = m->tokenizer;
    pthread_mutex_unlock(&m->lock);
    return rc;
}

int engine_chat(const struct baton_model *cm, const struct model_chat **out, struct baton_error *e)
{
    struct baton_model *m = (struct baton_model *)cm;
    int rc = 0;
    if (model_is_shape(m->model))
        return no_tokenizer(m, e);
    pthread_mutex_lock(&m->lock);
    if (!m->chat)
        rc = model_chat_open(model_path(m->model), &m->chat, e);
    if (rc == 0)
        *out = m->chat;
    pthread_mutex_unlock(&m->lock);
    return rc;
}

static int tokenize_chat(const struct baton_model *m, const struct model_tokenizer *t,
                         const char *text, size_t n, int32_t **ids, size_t *n_ids,
                         struct baton_error *e)
{
    const struct model_chat *chat;
    char *prompt = NULL;
    int rc = engine_chat(m, &chat, e);
    if (rc)
        return rc;
    if (memchr(text, 0, n))
        return base_fail(e, BATON_ERR_INPUT, "a chat message may not hold a NUL byte");
    char *content = base_try_strndup(text, n, e);
    if (!content)
        return BATON_ERR_NOMEM;
    struct model_message turn = {"user", content};
    /* `think` leaves the assistant's turn as the template leaves it when nothing is said. */
    rc = model_chat_render(chat, &turn, 1, true, true, &prompt, e);
    if (rc == 0)
        rc = model_tokenizer_encode(t, prompt, strlen(prompt), false, ids, n_ids, e);
    free(prompt);
    free(content);
    return rc;
}

int engine_tokenize(const struct baton_model *m, const char *text, size_t n, bool chat,
                    int32_t **ids, size_t *n_ids, struct baton_error *e)
{
    const struct model_tokenizer *t;
    int rc = engine_tokenizer(m, &t, e);
    if (rc)
        return rc;
    return chat ? tokenize_chat(m, t, text, n, ids, n_ids, e)
                : model_tokenizer_encode(t, text, n, true, ids, n_ids, e);
}

int engine_detokenize(const struct baton_model *m, const int32_t *ids, size_t n_ids, char **text,
                      struct baton_error *e)
{
    const struct model_tokenizer *t;
    size_t n;
    int rc = engine_tokenizer(m, &t, e);
    if (rc == 0)
        rc = model_ids_check(ids, n_ids, model_config_of(m->model)->vocab, e);
    return rc ? rc : model_tokenizer_decode(t, ids, n_ids, true, text, &n, e);
}

/* ---- bindings ----------------------------------------------------------------------------- */

static void tell_progress(void *ctx, uint64_t done, uint64_t all)
{
    const struct baton_model_options *o = ctx;
    o->progress(o->ctx, "weights", done, all);
}

static int binding_open(struct baton_model *m, const char *device, struct engine_binding **out,
                        struct baton_error *e)
{
    struct engine_binding *b = base_try_alloc(1, sizeof *b, e);
    if (!b)
        return BATON_ERR_NOMEM;
    b->name = base_try_strdup(device, e);
    int rc = b->name ? device_open(device, &b->device, e) : BATON_ERR_NOMEM;
    if (rc == 0)
        rc = model_bind(m->model, b->device, m->options.progress ? tell_progress : NULL,
                        &m->options, &b->bound, e);
    if (rc) {
        binding_close(b);
        return rc;
    }
    *out = b;
    return 0;
}

int engine_model_prepare(struct baton_model *m, const char *device, struct baton_error *e)
{
    struct engine_binding *b;
    if (!device_survives_fork(device ? device : "cpu"))
        return 0; /* bound where its engine opens */
    int rc = binding_open(m, device ? device : "cpu", &b, e);
    if (rc)
        return rc;
    b->prepared = true;
    pthread_mutex_lock(&m->lock);
    b->next = m->bindings;
    m->bindings = b;
    pthread_mutex_unlock(&m->lock);
    return 0;
}

/* One engine at a time uses a device, and workers started before a fork or in another number are
 * of no use here. */
static bool usable(const struct engine_binding *b, const char *device, uint32_t threads)
{
    return !b->in_use && !strcmp(b->name, device) &&
           (b->started == 0 || (b->started == getpid() && b->threads == threads));
}

int engine_binding_get(struct baton_model *m, const char *device, uint32_t threads,
                       struct engine_binding **out, struct baton_error *e)
{
    int rc = 0;
    pthread_mutex_lock(&m->lock);
    struct engine_binding *b = m->bindings;
    while (b && !usable(b, device, threads))
        b = b->next;
    if (b)
        b->in_use = true;
    pthread_mutex_unlock(&m->lock);
    if (!b)
        rc = binding_open(m, device, &b, e);
    if (rc)
        return rc;
    if (b->started == 0)
        rc = device_start(b->device, threads, e);
    if (rc) {
        engine_binding_put(m, b);
        return rc;
    }
    b->started = getpid();
    b->threads = threads;
    *out = b;
    return 0;
}

void engine_binding_put(struct baton_model *m, struct engine_binding *b)
{
    if (!b)
        return;
    if (!b->prepared) {
        binding_close(b);
        return;
    }
    pthread_mutex_lock(&m->lock);
    b->in_use = false;
    pthread_mutex_unlock(&m->lock);
}
