/* SPDX-License-Identifier: Apache-2.0 */
/* Engines: opening with everything that can be refused, closing from any half-built state. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/engine_priv.h"

void engine_geometry(const struct model_config *c, uint32_t kv_dtype, struct kv_geometry *out)
{
    memset(out, 0, sizeof *out);
    out->n_layers = c->n_layers;
    out->kv_heads = c->kv_heads;
    out->head_dim = c->head_dim;
    out->dtype = kv_dtype;
    out->window = c->window;
    if (c->window)
        memcpy(out->local, c->local, c->n_layers);
}

uint32_t engine_blocks_used(const struct baton_engine *en)
{
    return atomic_load(&en->blocks_used);
}

void engine_load(const struct baton_engine *en, struct engine_load *out)
{
    const struct baton_caps *caps = device_caps(en->binding->device);
    *out = (struct engine_load){
        .lanes = en->lanes,
        .lanes_used = atomic_load(&en->lanes_used),
        .ctx = en->ctx,
        .blocks = kv_pool_capacity(en->pool),
        .blocks_used = atomic_load(&en->blocks_used),
        .blocks_cached = atomic_load(&en->blocks_cached),
        .prefix_queries = atomic_load(&en->prefix_queries),
        .prefix_hits = atomic_load(&en->prefix_hits),
        .block_positions = KV_BLOCK,
        .device = caps->name,
        .emulated = caps->emulated,
    };
    for (uint32_t i = 0; i <= ENGINE_MAX_LANES; i++)
        out->steps_by_lanes[i] = atomic_load(&en->steps_by_lanes[i]);
}

uint64_t engine_kv_bytes(const struct baton_engine *en)
{
    return kv_pool_bytes(en->pool);
}

void engine_peer_error(const struct baton_engine *en, const struct baton_error *why,
                       struct baton_error *out)
{
    struct baton_error inner = *why;
    if (inner.code != BATON_ERR_PEER)
        *out = inner;
    else
        base_fail(out, BATON_ERR_PEER, "the %s ended or broke the connection: %.180s",
                  en->role == BATON_PRODUCER ? "consumer" : "producer", inner.text);
}

void engine_post(struct baton_engine *en, enum engine_kind kind, struct engine_session *s,
                 const struct baton_error *why)
{
    struct engine_message m = {.kind = kind};
    if (s) {
        m.id = s->request->ask.id;
        m.serial = s->serial;
        m.session = s;
    }
    if (why)
        m.why = *why;
    base_queue_push_wait(en->outbox, &m);
}

/* ---- opening ------------------------------------------------------------------------------ */

static int set_role(struct baton_engine *en, const struct baton_engine_options *o,
                    struct baton_error *e)
{
    const struct model_config *c = model_config_of(en->model->model);
    if (o->role != BATON_BOTH && o->role != BATON_PRODUCER && o->role != BATON_CONSUMER)
        return base_fail(e, BATON_ERR_USAGE, "no engine role %d", (int)o->role);
    if (o->lanes > ENGINE_MAX_LANES)
        return base_fail(e, BATON_ERR_USAGE, "%u lanes asked for, at most %u are possible",
                         o->lanes, ENGINE_MAX_LANES);
    if (o->ctx > c->max_positions)
        return base_fail(e, BATON_ERR_USAGE, "a context of %u asked for, the model has %u", o->ctx,
                         c->max_positions);
    if (o->no_peer && (o->link || o->role == BATON_BOTH))
        return base_fail(e, BATON_ERR_USAGE, "no_peer is for a producer or consumer without link");
    if (o->listen && o->role != BATON_PRODUCER)
        return base_fail(e, BATON_ERR_USAGE, "a producer alone listens for those who have tickets");
    if (o->role != BATON_BOTH && !o->no_peer && !o->link && fcntl(o->peer_fd, F_GETFD) < 0)
        return base_fail(e, BATON_ERR_USAGE, "peer_fd %d is not an open descriptor", o->peer_fd);
    en->role = o->role;
    en->no_peer = o->no_peer;
    en->lease_ns = o->lease_ns ? o->lease_ns : 30000000000u;
    en->listens = o->listen != NULL;
    en->digest = !o->no_digest;
    en->lanes = o->lanes ? o->lanes : 1;
    en->vocab = c->vocab;
    en->ctx = o->ctx;
    if (!en->ctx)
        en->ctx = c->max_positions < ENGINE_DEFAULT_CTX ? c->max_positions : ENGINE_DEFAULT_CTX;
    return 0;
}

static int check_device(struct baton_engine *en, uint32_t chunk, struct baton_error *e)
{
    const struct baton_caps *caps = device_caps(en->binding->device);
    if (en->role != BATON_CONSUMER && !caps->prefill)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "device %s can't prefill", caps->name);
    if (en->role != BATON_PRODUCER && !caps->decode)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "device %s can't decode", caps->name);
    if (en->lanes > caps->max_lanes || en->lanes > caps->max_rows)
        return base_fail(e, BATON_ERR_USAGE, "%u lanes asked for, device %s has %u", en->lanes,
                         caps->name, caps->max_lanes);
    if (chunk > caps->max_rows)
        return base_fail(e, BATON_ERR_USAGE, "chunks of %u rows asked for, device %s takes %u",
                         chunk, caps->name, caps->max_rows);
    if (chunk && caps->whole_prompt)
        return base_fail(e, BATON_ERR_USAGE, "device %s takes whole prompts, not chunks of %u",
                         caps->name, chunk);
    if (chunk && caps->widths[0] && chunk != caps->widths[0] && chunk < en->ctx)
        return base_fail(e, BATON_ERR_USAGE, "device %s has a program for chunks of %u, not of %u",
                         caps->name, caps->widths[0], chunk);
    en->chunk = chunk ? chunk : caps->max_rows;
    return 0;
}

/* Make the pool as large as was asked for. What sequences may need of local layers stays, so fewer
 * bytes are fewer global pages; more bytes are more pages of both kinds. */
static int fit_pool(struct baton_engine *en, uint64_t kv_bytes, struct kv_pool_size *size,
                    struct baton_error *e)
{
    uint64_t global, local, pages = (en->ctx + KV_BLOCK - 1) / KV_BLOCK;
    kv_geometry_bytes(&en->geometry, &global, &local);
    uint64_t windows = size->local_blocks * local, full = windows + size->global_blocks * global;
    if (kv_bytes < windows + pages * global)
        return base_fail(
            e, BATON_ERR_USAGE,
            "a KV pool of %llu bytes does not hold one request: %u positions, with the "
            "windows of %u sequences, are %llu bytes",
            (unsigned long long)kv_bytes, en->ctx, local ? en->max_seqs : 0,
            (unsigned long long)(windows + pages * global));
    if (kv_bytes >= full) {
        uint64_t more = (kv_bytes - full) / (global + local);
        size->global_blocks += more;
        size->local_blocks += local ? more : 0;
    } else {
        size->global_blocks = (kv_bytes - windows) / global;
    }
    if (size->global_blocks <= INT32_MAX) /* else the pool can't be opened */
        en->max_blocks = (uint32_t)size->global_blocks;
    return 0;
}

/* Producer and consumer keep twice as many sequences as lanes, within the same pages, so that one
 * request travels while another computes; a producer that listens four times as many, since held
 * requests wait for their consumers. */
static int open_pool(struct baton_engine *en, uint64_t kv_bytes, struct baton_error *e)
{
    const struct baton_caps *caps = device_caps(en->binding->device);
    uint64_t positions = (uint64_t)en->lanes * en->ctx;
    struct device_kv_pool lent = {.positions = en->ctx, .lanes = en->lanes};
    uint32_t chunk = en->chunk < en->ctx ? en->chunk : en->ctx;
    if (positions > INT32_MAX)
        return base_fail(e, BATON_ERR_NOMEM, "a KV cache of %u lanes with %u positions", en->lanes,
                         en->ctx);
    en->max_seqs = en->role == BATON_BOTH ? en->lanes : en->listens ? 4 * en->lanes : 2 * en->lanes;
    en->max_blocks = en->lanes * ((en->ctx + KV_BLOCK - 1) / KV_BLOCK);
    struct kv_pool_size size;
    engine_geometry(model_config_of(en->model->model), caps->kv_dtype, &en->geometry);
    kv_pool_size(&en->geometry, (uint32_t)positions, en->max_seqs, chunk, &size);
    int rc = kv_bytes ? fit_pool(en, kv_bytes, &size, e) : 0;
    if (rc == 0)
        rc = kv_pool_open_sized(&en->pool, &en->geometry, &size, e);
    if (rc == 0) {
        lent.host = kv_pool_memory(en->pool);
        lent.bytes = (size_t)kv_pool_bytes(en->pool);
        rc = device_kv_open(en->binding->device, &lent, e);
    }
    if (rc == 0 && !(en->logits = base_try_alloc((size_t)en->lanes * en->vocab, sizeof(float), e)))
        rc = BATON_ERR_NOMEM;
    if (rc == 0)
        en->logits_pinned = device_pin(en->binding->device, en->logits,
                                       (size_t)en->lanes * en->vocab * sizeof(float));
    return rc;
}

static int open_tickets(struct baton_engine *en, const struct baton_engine_options *o,
                        struct baton_error *e)
{
    const struct handoff_tickets_options to = {
        .key = o->key, .key_bytes = o->key_bytes, .lease_ns = en->lease_ns};
    return en->role == BATON_PRODUCER ? handoff_tickets_open(&to, &en->tickets, e) : 0;
}

static int open_parts(struct baton_engine *en, const struct baton_engine_options *o,
                      struct baton_error *e)
{
    const char *device = o->device ? o->device : "cpu";
    int rc = engine_wake_open(&en->wake, e);
    if (rc == 0)
        rc = base_queue_open(&en->inbox, sizeof(struct engine_message), ENGINE_QUEUE, e);
    if (rc == 0)
        rc = base_queue_open(&en->outbox, sizeof(struct engine_message), ENGINE_QUEUE, e);
    if (rc == 0)
        rc = open_tickets(en, o, e);
    if (rc == 0)
        rc = model_sampler_open(en->vocab, &en->sampler, e);
    if (rc == 0)
        rc = engine_binding_get(en->model, device, o->threads, &en->binding, e);
    if (rc == 0)
        rc = device_program_open(en->binding->device, model_graph(en->binding->bound), &en->program,
                                 e);
    if (rc == 0)
        rc = check_device(en, o->chunk, e);
    if (rc == 0)
        rc = open_pool(en, o->kv_bytes, e);
    return rc || !o->prefix_cache ? rc : engine_reuse_open(en, e);
}

static int start_thread(pthread_t *t, void *(*fn)(void *), struct baton_engine *en,
                        struct baton_error *e)
{
    int err = pthread_create(t, NULL, fn, en);
    return err ? base_fail_errno(e, BATON_ERR_NOMEM, err, "a thread of the engine") : 0;
}

/* The connection gets a duplicate: the caller's own descriptor is closed when nothing can fail
 * any more. */
static int open_peer(struct baton_engine *en, const struct baton_engine_options *o,
                     struct baton_error *e)
{
    bool own = o->link || o->no_peer;
    int fd = own ? -1 : fcntl(o->peer_fd, F_DUPFD_CLOEXEC, 0);
    if (!own && fd < 0)
        return base_fail_errno(e, BATON_ERR_IO, errno, "peer_fd %d", o->peer_fd);
    int rc = engine_io_open(en, fd, o, e);
    if (rc) {
        if (fd >= 0)
            close(fd);
        return rc;
    }
    rc = start_thread(&en->io_thread, engine_io_thread, en, e);
    en->io_thread_on = rc == 0;
    return rc;
}

static int start(struct baton_engine *en, const struct baton_engine_options *o,
                 struct baton_error *e)
{
    engine_trace_start(en, !o->link);
    int rc = open_parts(en, o, e);
    if (rc == 0 && en->role != BATON_BOTH)
        rc = open_peer(en, o, e);
    if (rc == 0) {
        rc = start_thread(&en->thread, engine_thread, en, e);
        en->thread_on = rc == 0;
    }
    if (rc == 0 && en->role != BATON_BOTH && !o->link && !o->no_peer)
        close(o->peer_fd);
    return rc;
}

int engine_open(struct baton_model *m, const struct baton_engine_options *o,
                struct baton_engine **out, struct baton_error *e)
{
    sigset_t all, before;
    struct baton_engine *en = base_try_alloc(1, sizeof *en, e);
    if (!en) {
        handoff_link_close((struct transport *)o->link);
        return BATON_ERR_NOMEM;
    }
    en->trace = (struct base_trace *)o->trace;
    atomic_init(&en->stopping, false);
    atomic_init(&en->blocks_used, 0);
    atomic_init(&en->blocks_cached, 0);
    atomic_init(&en->prefix_queries, 0);
    atomic_init(&en->prefix_hits, 0);
    atomic_init(&en->lanes_used, 0);
    for (uint32_t i = 0; i <= ENGINE_MAX_LANES; i++)
        atomic_init(&en->steps_by_lanes[i], 0);
    pthread_mutex_init(&en->admit, NULL);
    en->model = m;
    int rc = set_role(en, o, e);
    if (rc == 0) {
        /* Signals belong to the caller's threads: a handler that cancels must not land here. */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        rc = start(en, o, e);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    if (rc) {
        if (!en->io.peers[0].conn) /* else the connection has it */
            handoff_link_close((struct transport *)o->link);
        engine_close(en);
        return rc;
    }
    *out = en;
    return 0;
}

/* ---- closing ------------------------------------------------------------------------------ */

void engine_close(struct baton_engine *en)
{
    if (!en)
        return;
    if (en->thread_on) {
        atomic_store(&en->stopping, true);
        engine_wake_ring(en->wake);
        pthread_join(en->thread, NULL);
    }
    if (en->io_thread_on) {
        engine_post(en, ENGINE_STOP, NULL, NULL);
        pthread_join(en->io_thread, NULL);
    }
    engine_io_close(en);
    handoff_tickets_close(en->tickets);
    device_program_close(en->program);
    if (en->logits_pinned)
        device_unpin(en->binding->device, en->logits);
    if (en->pool)
        device_kv_close(en->binding->device);
    kv_prefix_close(en->prefix);
    kv_pool_close(en->pool);
    free(en->logits);
    model_sampler_close(en->sampler);
    engine_binding_put(en->model, en->binding);
    base_queue_close(en->inbox);
    base_queue_close(en->outbox);
    engine_wake_put(en->wake);
    pthread_mutex_destroy(&en->admit);
    free(en);
}
