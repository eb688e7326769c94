/* SPDX-License-Identifier: Apache-2.0 */
/* What an engine writes into a trace: compute of chunks, layers and steps, pieces of a handoff on
 * their way, states of requests. Each on a track of its own; spans of one track lie apart or inside
 * each other. docs/trace.md is the reader's version. */
#include "engine/engine_priv.h"

/* Both roles may be in one process: each has its own hundred of tracks. */
enum track {
    TRACK_COMPUTE = 1,
    TRACK_TRANSFER = 2,
    TRACK_DEVICE = 3,
    TRACK_DEVICE_COPY = 4,
    TRACK_REQUESTS = 10,
    TRACK_ROLE = 1000
};

static uint32_t track(const struct baton_engine *en, uint32_t n)
{
    return n + (en->role == BATON_CONSUMER ? TRACK_ROLE : 0);
}

static const char *role_name(const struct baton_engine *en)
{
    return en->role == BATON_PRODUCER   ? "baton producer"
           : en->role == BATON_CONSUMER ? "baton consumer"
                                        : "baton native";
}

static void span(const struct baton_engine *en, uint32_t on, const char *name, int64_t number,
                 uint64_t begin_ns, uint64_t end_ns, const struct base_trace_event *more)
{
    struct base_trace_event ev = *more;
    ev.name = name;
    ev.number = number;
    ev.track = track(en, on);
    ev.begin_ns = begin_ns;
    ev.end_ns = end_ns;
    base_trace_add(en->trace, &ev);
}

void engine_trace_start(const struct baton_engine *en, bool alone_in_process)
{
    if (!en->trace)
        return;
    base_trace_name(en->trace, 0, alone_in_process ? role_name(en) : "baton, both roles", -1);
    base_trace_name(en->trace, track(en, TRACK_COMPUTE),
                    en->role == BATON_PRODUCER   ? "producer compute"
                    : en->role == BATON_CONSUMER ? "consumer compute"
                                                 : "compute",
                    -1);
    if (en->role != BATON_BOTH)
        base_trace_name(en->trace, track(en, TRACK_TRANSFER),
                        en->role == BATON_PRODUCER ? "producer transfer" : "consumer transfer", -1);
}

/* ---- requests ----------------------------------------------------------------------------- */

static const char *const state_names[] = {
    [ENGINE_WAITING] = "waiting", [ENGINE_PREFILL] = "prefill",   [ENGINE_PREFILLED] = "prefilled",
    [ENGINE_HELD] = "held",       [ENGINE_UNPAIRED] = "unpaired", [ENGINE_PAIRED] = "paired",
    [ENGINE_IMPORT] = "import",   [ENGINE_IMPORTED] = "imported", [ENGINE_DECODE] = "decode",
    [ENGINE_CLOSING] = "closing",
};

static void end_state(const struct baton_engine *en, const struct engine_session *s, uint64_t now)
{
    const struct base_trace_event more = {
        .category = "request", .key = {"request"}, .value = {s->request->ask.id}};
    span(en, s->track, state_names[s->traced], -1, s->traced_ns, now, &more);
}

void engine_trace_states(struct baton_engine *en)
{
    for (struct engine_session *s = en->trace ? en->sessions : NULL; s; s = s->next) {
        uint64_t now = base_now_ns();
        if (s->track && s->traced == s->state)
            continue;
        if (s->track) {
            end_state(en, s, now);
        } else {
            s->track = TRACK_REQUESTS + en->n_tracks++ % (TRACK_ROLE - TRACK_REQUESTS);
            base_trace_name(en->trace, track(en, s->track), "request", s->track - TRACK_REQUESTS);
        }
        s->traced = s->state;
        s->traced_ns = now;
    }
}

void engine_trace_over(struct baton_engine *en, const struct engine_session *s)
{
    static const char *const names[] = {"running", "stop", "length", "cancelled", "failed"};
    const struct base_trace_event more = {
        .category = "request", .key = {"request"}, .value = {s->request->ask.id}};
    uint64_t now = en->trace ? base_now_ns() : 0;
    if (!now)
        return;
    if (!s->track)
        engine_trace_states(en);
    end_state(en, s, now);
    span(en, s->track, names[s->stats.finish], -1, now, 0, &more);
}

/* ---- compute ------------------------------------------------------------------------------ */

static struct base_trace_event rows(uint32_t first, uint32_t n)
{
    return (struct base_trace_event){
        .category = "compute", .key = {"first", "positions"}, .value = {first, n}};
}

void engine_trace_layer(const struct baton_engine *en, uint32_t layer, uint64_t begin_ns,
                        uint64_t end_ns, uint32_t first, uint32_t n)
{
    struct base_trace_event more = rows(first, n);
    more.key[2] = "layer";
    more.value[2] = layer;
    span(en, TRACK_COMPUTE, "layer", layer, begin_ns, end_ns, &more);
}

void engine_trace_chunk(const struct baton_engine *en, uint32_t first, uint32_t n,
                        uint64_t begin_ns, uint64_t layers_ns, uint64_t end_ns)
{
    struct base_trace_event more = rows(first, n);
    if (!en->trace)
        return;
    span(en, TRACK_COMPUTE, "chunk at", first, begin_ns, end_ns, &more);
    if (layers_ns)
        span(en, TRACK_COMPUTE, "after the layers", -1, layers_ns, end_ns, &more);
}

static void device_layer(const struct baton_engine *en, uint32_t layer,
                         const struct device_layer_time *t, uint32_t first, uint32_t n)
{
    struct base_trace_event more = rows(first, n);
    more.category = "device";
    more.key[2] = "layer";
    more.value[2] = layer;
    span(en, TRACK_DEVICE, "layer", layer, t->begin_ns, t->computed_ns, &more);
    span(en, TRACK_DEVICE_COPY, "copy layer", layer, t->copy_ns, t->copied_ns, &more);
}

void engine_trace_device(const struct baton_engine *en, uint32_t first, uint32_t n)
{
    struct device_layer_time t[KV_MAX_LAYERS];
    struct base_trace_event more = rows(first, n);
    uint64_t end_ns = 0;
    uint32_t layers = en->trace ? device_layer_times(en->program, t, KV_MAX_LAYERS, &end_ns) : 0;
    if (layers == 0 || layers > KV_MAX_LAYERS)
        return;
    base_trace_name(en->trace, track(en, TRACK_DEVICE), "device compute", -1);
    base_trace_name(en->trace, track(en, TRACK_DEVICE_COPY), "device copy", -1);
    for (uint32_t i = 0; i < layers; i++)
        device_layer(en, i, &t[i], first, n);
    more.category = "device";
    span(en, TRACK_DEVICE, "after the layers", -1, t[layers - 1].computed_ns, end_ns, &more);
}

void engine_trace_step(const struct baton_engine *en, uint32_t lanes, uint64_t begin_ns)
{
    const struct base_trace_event more = {
        .category = "compute", .key = {"lanes"}, .value = {lanes}};
    if (en->trace)
        span(en, TRACK_COMPUTE, "decode step", -1, begin_ns, base_now_ns(), &more);
}

/* ---- transfer ----------------------------------------------------------------------------- */

void engine_trace_queued(const struct baton_engine *en, uint32_t layer, uint32_t first, uint32_t n)
{
    struct base_trace_event more = rows(first, n);
    if (!en->trace)
        return;
    more.category = "transfer";
    more.key[2] = "layer";
    more.value[2] = layer;
    span(en, TRACK_COMPUTE, "queued layer", layer, base_now_ns(), 0, &more);
}

void engine_trace_piece(const struct baton_engine *en, const struct handoff_moved *m)
{
    const struct base_trace_event more = {.category = "transfer",
                                          .key = {"layer", "first", "positions", "bytes"},
                                          .value = {m->layer, m->first, m->count, m->bytes}};
    bool k = m->which == KV_K;
    if (!en->trace)
        return;
    if (en->role == BATON_PRODUCER) {
        span(en, TRACK_TRANSFER, k ? "pack K" : "pack V", m->layer, m->begin_ns, m->digested_ns,
             &more);
        span(en, TRACK_TRANSFER, k ? "send K" : "send V", m->layer, m->digested_ns, m->moved_ns,
             &more);
        return;
    }
    span(en, TRACK_TRANSFER, k ? "land K" : "land V", m->layer, m->begin_ns, m->moved_ns, &more);
    span(en, TRACK_TRANSFER, k ? "verify K" : "verify V", m->layer, m->moved_ns, m->digested_ns,
         &more);
    span(en, TRACK_TRANSFER, k ? "import K" : "import V", m->layer, m->digested_ns, m->placed_ns,
         &more);
}
