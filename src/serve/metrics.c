/* SPDX-License-Identifier: Apache-2.0 */
/* What Prometheus reads, under vLLM's names where it has one. */
#include <dirent.h>
#include <stdio.h>
#include <string.h>

#include "serve/serve_priv.h"

/* vLLM's buckets of time to first token, seconds; the others use them too. */
static const double bounds[SERVE_BUCKETS] = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08,
                                             0.1,   0.25,  0.5,  0.75, 1,    2.5,  5,
                                             7.5,   10,    20,   40,   80,   160};

double serve_metrics_bound(unsigned i)
{
    return bounds[i];
}

void serve_metrics_time(struct serve_metrics *m, struct serve_histogram *h, uint64_t ns)
{
    double seconds = (double)ns / 1e9;
    unsigned i = 0;
    while (i < SERVE_BUCKETS && seconds > bounds[i])
        i++;
    pthread_mutex_lock(&m->lock);
    h->count[i]++;
    h->sum += seconds;
    pthread_mutex_unlock(&m->lock);
}

void serve_metrics_add(struct serve_metrics *m, uint64_t *counter, uint64_t n)
{
    pthread_mutex_lock(&m->lock);
    *counter += n;
    pthread_mutex_unlock(&m->lock);
}

/* One text under way. */
struct page {
    struct serve_text *out;
    const char *model;
    int rc;
};

static void type(struct page *g, const char *name, const char *kind)
{
    if (!g->rc)
        g->rc = serve_text_printf(g->out, "# TYPE %s %s\n", name, kind);
}

/* label is "" or ",key=\"value\"". */
static void value(struct page *g, const char *name, const char *label, double v)
{
    if (!g->rc)
        g->rc = serve_text_printf(g->out, "%s{model_name=\"%s\"%s} %.17g\n", name, g->model, label,
                                  v);
}

static void single(struct page *g, const char *name, const char *kind, double v)
{
    type(g, name, kind);
    value(g, name, "", v);
}

static void histogram(struct page *g, const char *name, const struct serve_histogram *h)
{
    char series[96], label[48];
    uint64_t sum = 0;
    type(g, name, "histogram");
    snprintf(series, sizeof series, "%s_bucket", name);
    for (unsigned i = 0; i <= SERVE_BUCKETS; i++) {
        sum += h->count[i];
        if (i < SERVE_BUCKETS)
            snprintf(label, sizeof label, ",le=\"%g\"", bounds[i]);
        value(g, series, i < SERVE_BUCKETS ? label : ",le=\"+Inf\"", (double)sum);
    }
    snprintf(series, sizeof series, "%s_sum", name);
    value(g, series, "", h->sum);
    snprintf(series, sizeof series, "%s_count", name);
    value(g, series, "", (double)sum);
}

static void ends(struct page *g, const struct serve_metrics *m)
{
    static const char name[] = "vllm:request_success_total";
    type(g, name, "counter");
    value(g, name, ",finished_reason=\"stop\"", (double)m->stop);
    value(g, name, ",finished_reason=\"length\"", (double)m->length);
    value(g, name, ",finished_reason=\"abort\"", (double)m->abort);
    value(g, name, ",finished_reason=\"error\"", (double)m->error);
}

static void sources(struct page *g, const struct serve_metrics *m)
{
    static const char name[] = "vllm:prompt_tokens_by_source_total";
    type(g, name, "counter");
    value(g, name, ",source=\"local_compute\"", (double)m->computed_tokens);
    value(g, name, ",source=\"local_cache_hit\"", (double)m->cached_tokens);
    value(g, name, ",source=\"external_kv_transfer\"", (double)m->pulled_tokens);
}

/* ---- handoffs ----------------------------------------------------------------------------- */

static const struct {
    int code;
    const char *name;
} causes[SERVE_CAUSES] = {
    {BATON_ERR_STALE, "stale"},         {BATON_ERR_PEER, "peer"},
    {BATON_ERR_MISMATCH, "mismatch"},   {BATON_ERR_INTEGRITY, "integrity"},
    {BATON_ERR_CANCELLED, "cancelled"}, {0, "other"},
};

static void count_cause(struct serve_metrics *m, const char *name)
{
    unsigned i = 0;
    while (i + 1 < SERVE_CAUSES && strcmp(name, causes[i].name) != 0)
        i++;
    serve_metrics_add(m, &m->causes[i], 1);
}

void serve_metrics_pulled(struct serve_metrics *m, const struct baton_stats *st)
{
    static const char local[] = "local-prefill: ";
    if (!strncmp(st->verdict, local, sizeof local - 1)) {
        serve_metrics_add(m, &m->local, 1);
        count_cause(m, st->verdict + sizeof local - 1);
        return;
    }
    serve_metrics_add(m, !strcmp(st->verdict, "verified") ? &m->verified : &m->unverified, 1);
    serve_metrics_add(m, &m->handoff_bytes, st->bytes);
    serve_metrics_time(m, &m->wait, serve_wait_ns(st));
    serve_metrics_time(m, &m->transfer, st->transfer_ns);
    serve_metrics_time(m, &m->import, st->import_ns);
    serve_metrics_time(m, &m->verify, st->verify_ns);
}

void serve_metrics_failed(struct serve_metrics *m, const struct baton_error *e)
{
    serve_metrics_add(m, &m->failed, 1);
    count_cause(m, base_code_name(e->code));
}

static void pulls(struct page *g, const struct serve_metrics *m)
{
    static const char all[] = "baton:handoffs_total", why[] = "baton:handoff_failures_total";
    char label[48];
    type(g, all, "counter");
    value(g, all, ",verdict=\"verified\"", (double)m->verified);
    value(g, all, ",verdict=\"off\"", (double)m->unverified);
    value(g, all, ",verdict=\"local-prefill\"", (double)m->local);
    value(g, all, ",verdict=\"failed\"", (double)m->failed);
    type(g, why, "counter");
    for (unsigned i = 0; i < SERVE_CAUSES; i++) {
        snprintf(label, sizeof label, ",code=\"%s\"", causes[i].name);
        value(g, why, label, (double)m->causes[i]);
    }
    single(g, "baton:handoff_bytes_total", "counter", (double)m->handoff_bytes);
    histogram(g, "baton:handoff_wait_seconds", &m->wait);
    histogram(g, "baton:handoff_transfer_seconds", &m->transfer);
    histogram(g, "baton:handoff_import_seconds", &m->import);
    histogram(g, "baton:handoff_verify_seconds", &m->verify);
    single(g, "baton:tickets_renewed_total", "counter", (double)m->renewed);
    single(g, "baton:tickets_released_total", "counter", (double)m->released);
}

static void tickets(struct page *g, struct baton_engine *en)
{
    struct baton_ticket_stats t = {.struct_size = sizeof t};
    baton_ticket_stats(en, &t);
    single(g, "baton:tickets_open", "gauge", t.open);
    single(g, "baton:tickets_claimed", "gauge", t.claimed);
    single(g, "baton:tickets_issued_total", "counter", (double)t.issued);
    single(g, "baton:tickets_fetched_total", "counter", (double)t.fetched);
    single(g, "baton:tickets_given_up_total", "counter", (double)t.given_up);
    single(g, "baton:tickets_refused_total", "counter", (double)t.refused);
    single(g, "baton:leases_expired_total", "counter", (double)t.expired);
}

/* ---- the engine --------------------------------------------------------------------------- */

static void lanes(struct page *g, const struct engine_load *l)
{
    static const char steps[] = "baton:decode_steps_total";
    char label[32];
    single(g, "baton:lanes", "gauge", l->lanes);
    single(g, "baton:lanes_active", "gauge", l->lanes_used);
    single(g, "baton:kv_blocks_used", "gauge", l->blocks_used);
    single(g, "baton:kv_blocks_cached", "gauge", l->blocks_cached);
    type(g, steps, "counter");
    for (uint32_t i = 1; i <= l->lanes; i++) {
        snprintf(label, sizeof label, ",lanes=\"%u\"", i);
        value(g, steps, label, (double)l->steps_by_lanes[i]);
    }
}

/* Tokens. Names as older and newer dashboards have them, with what Python's client appends. */
static void prefixes(struct page *g, const struct engine_load *l)
{
    static const char *const names[] = {"vllm:prefix_cache", "vllm:gpu_prefix_cache"};
    static const char *const ends[] = {"", "_total"};
    char name[64];
    for (unsigned i = 0; i < 4; i++) {
        snprintf(name, sizeof name, "%s_queries%s", names[i / 2], ends[i % 2]);
        single(g, name, "counter", (double)l->prefix_queries);
        snprintf(name, sizeof name, "%s_hits%s", names[i / 2], ends[i % 2]);
        single(g, name, "counter", (double)l->prefix_hits);
    }
}

static void cache(struct page *g, const struct engine_load *l)
{
    char label[96];
    double used = l->blocks ? (double)l->blocks_used / l->blocks : 0;
    single(g, "vllm:kv_cache_usage_perc", "gauge", used);
    single(g, "vllm:gpu_cache_usage_perc", "gauge", used);
    type(g, "vllm:cache_config_info", "gauge");
    snprintf(label, sizeof label, ",block_size=\"%u\",num_gpu_blocks=\"%u\"", l->block_positions,
             l->blocks);
    value(g, "vllm:cache_config_info", label, 1);
    prefixes(g, l);
}

/* Without the folder's own. */
static double open_descriptors(void)
{
    DIR *d = opendir("/proc/self/fd");
    double n = -3; /* ".", ".." and d */
    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return d ? n : 0;
}

int serve_metrics_text(struct serve *s, struct serve_text *out)
{
    struct page g = {out, s->name, 0};
    struct engine_load load;
    struct serve_metrics m;
    engine_load(s->engine, &load);
    pthread_mutex_lock(&s->metrics.lock);
    m = s->metrics;
    pthread_mutex_unlock(&s->metrics.lock);
    uint32_t open = atomic_load(&s->open_choices);
    single(&g, "vllm:num_requests_running", "gauge", load.lanes_used);
    single(&g, "vllm:num_requests_waiting", "gauge",
           open > load.lanes_used ? open - load.lanes_used : 0);
    cache(&g, &load);
    lanes(&g, &load);
    single(&g, "vllm:prompt_tokens_total", "counter", (double)m.prompt_tokens);
    single(&g, "vllm:generation_tokens_total", "counter", (double)m.generation_tokens);
    sources(&g, &m);
    ends(&g, &m);
    histogram(&g, "vllm:time_to_first_token_seconds", &m.ttft);
    histogram(&g, "vllm:inter_token_latency_seconds", &m.itl);
    histogram(&g, "vllm:e2e_request_latency_seconds", &m.e2e);
    if (s->role == SERVE_DECODE)
        pulls(&g, &m);
    if (s->role == SERVE_PREFILL)
        tickets(&g, s->engine);
    single(&g, "baton:requests_refused_total", "counter", (double)m.refused);
    single(&g, "baton:requests_cancelled_total", "counter", (double)m.cancelled);
    single(&g, "baton:http_requests_open", "gauge", atomic_load(&s->connections));
    type(&g, "process_open_fds", "gauge");
    value(&g, "process_open_fds", "", open_descriptors());
    return g.rc;
}
