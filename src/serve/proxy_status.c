/* SPDX-License-Identifier: Apache-2.0 */
/* What the proxy counts: for Prometheus, and for the page. */
#include <time.h>

#include "serve/proxy_priv.h"

void serve_proxy_add(struct serve_proxy *p, uint64_t *counter)
{
    pthread_mutex_lock(&p->lock);
    ++*counter;
    pthread_mutex_unlock(&p->lock);
}

void serve_proxy_count(struct serve_proxy *p, struct serve_proxy_counts *out)
{
    pthread_mutex_lock(&p->lock);
    *out = p->counts;
    pthread_mutex_unlock(&p->lock);
}

bool serve_proxy_healthy(struct serve_proxy *p)
{
    bool any = false;
    pthread_mutex_lock(&p->lock);
    for (struct serve_member *m = p->members; m; m = m->next)
        any |= m->listed && m->up && m->side == SERVE_SIDE_DECODE;
    pthread_mutex_unlock(&p->lock);
    return any;
}

/* ---- for Prometheus ------------------------------------------------------------------------- */

static int line(struct serve_text *out, const char *name, const char *key, const char *word,
                uint64_t n)
{
    return serve_text_printf(out, "%s{%s=\"%s\"} %llu\n", name, key, word, (unsigned long long)n);
}

static int member_lines(struct serve_text *out, const struct serve_member *m)
{
    const struct {
        const char *name;
        uint64_t n;
    } all[] = {{"up", m->up},
               {"active", m->active},
               {"requests_total", m->requests},
               {"failures_total", m->failures}};
    int rc = 0;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        rc |= serve_text_printf(out, "baton:proxy_member_%s{role=\"%s\",url=\"%s\"} %llu\n",
                                all[i].name, serve_member_kind(m), m->url,
                                (unsigned long long)all[i].n);
    return rc;
}

int serve_proxy_metrics_text(struct serve_proxy *p, struct serve_text *out)
{
    static const char requests[] = "baton:proxy_requests_total";
    static const char prompts[] = "baton:proxy_prompts_total";
    pthread_mutex_lock(&p->lock);
    const struct serve_proxy_counts c = p->counts;
    int rc = serve_text_printf(out, "# TYPE %s counter\n", requests);
    rc |= line(out, requests, "result", "finished", c.finished);
    rc |= line(out, requests, "result", "refused", c.refused);
    rc |= line(out, requests, "result", "failed", c.failed);
    rc |= line(out, requests, "result", "cancelled", c.cancelled);
    rc |= serve_text_printf(out, "# TYPE %s counter\n", prompts);
    rc |= line(out, prompts, "prefill", "remote", c.remote);
    rc |= line(out, prompts, "prefill", "local", c.local);
    rc |= line(out, prompts, "prefill", "fallback", c.fallback);
    rc |= serve_text_printf(out,
                            "# TYPE baton:proxy_retries_total counter\n"
                            "baton:proxy_retries_total %llu\n"
                            "# TYPE baton:proxy_requests_open gauge\n"
                            "baton:proxy_requests_open %u\n"
                            "# TYPE baton:proxy_member_up gauge\n"
                            "# TYPE baton:proxy_member_active gauge\n"
                            "# TYPE baton:proxy_member_requests_total counter\n"
                            "# TYPE baton:proxy_member_failures_total counter\n",
                            (unsigned long long)c.retries, atomic_load(&p->open));
    for (struct serve_member *m = p->members; m; m = m->next)
        rc |= member_lines(out, m);
    pthread_mutex_unlock(&p->lock);
    return rc ? BATON_ERR_NOMEM : 0;
}

/* ---- for the page --------------------------------------------------------------------------- */

static json_t *member_json(const struct serve_member *m)
{
    return json_pack("{s:s,s:s,s:b,s:b,s:i,s:I,s:I}", "role", serve_member_kind(m), "url", m->url,
                     "up", m->up, "leaving", !m->listed, "active", (int)m->active, "requests",
                     (json_int_t)m->requests, "failures", (json_int_t)m->failures);
}

static json_t *counts_json(const struct serve_proxy_counts *c, unsigned open)
{
    return json_pack("{s:{s:i,s:I,s:I,s:I,s:I},s:{s:I,s:I,s:I},s:I}", "requests", "open", (int)open,
                     "finished", (json_int_t)c->finished, "refused", (json_int_t)c->refused,
                     "failed", (json_int_t)c->failed, "cancelled", (json_int_t)c->cancelled,
                     "prompts", "remote", (json_int_t)c->remote, "local", (json_int_t)c->local,
                     "fallback", (json_int_t)c->fallback, "retries", (json_int_t)c->retries);
}

int serve_proxy_status(struct serve_proxy *p, struct serve_text *out)
{
    json_t *members = json_array();
    int rc = 0;
    pthread_mutex_lock(&p->lock);
    for (struct serve_member *m = p->members; m; m = m->next)
        rc |= json_array_append_new(members, member_json(m));
    json_t *doc = counts_json(&p->counts, atomic_load(&p->open));
    const char *policy = p->policy == SERVE_ROUND_ROBIN ? "round-robin" : "least-loaded";
    json_int_t least = p->min_remote_tokens;
    pthread_mutex_unlock(&p->lock);
    rc |= json_object_update_new(
        doc, json_pack("{s:i,s:s,s:s,s:I,s:b,s:s,s:I}", "schema", 1, "version", p->options.version,
                       "role", "proxy", "uptime_s", (json_int_t)time(NULL) - p->started, "draining",
                       atomic_load(&p->draining), "policy", policy, "min_remote_tokens", least));
    rc |= json_object_set_new(doc, "members", members);
    if (rc) {
        json_decref(doc);
        return BATON_ERR_NOMEM;
    }
    return serve_text_json(out, doc);
}
