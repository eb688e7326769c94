/* SPDX-License-Identifier: Apache-2.0 */
/* The page at / and the document that it polls.
 *
 * What is under way belongs to the pump, which leaves a short copy here after each round; the
 * document is made of that copy, so that nobody who looks reads the pump's jobs.
 */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "serve/page_priv.h"
#include "serve/serve_priv.h"

/* ---- what the pump and the request log leave ---------------------------------------------- */

/* How far it is. `admitted`: the engine has it and has computed nothing of it yet. */
static const char *state_of(const struct serve_choice *c, struct serve_page_row *row)
{
    struct baton_stats st = {.struct_size = sizeof st};
    if (c->job->cancelled)
        return "cancelled";
    if (!c->request)
        return "queued";
    if (c->n_out)
        return "decode";
    if (baton_request_stats(c->request, &st) == 0)
        row->prefilled = st.prefilled_tokens;
    if (c->job->ask.transfer.in && !row->prefilled)
        return "pull";
    return row->prefilled ? "prefill" : "admitted";
}

static void note_choice(struct serve_page *g, const struct serve_choice *c)
{
    const struct serve_job *j = c->job;
    if (c->begun && !c->request)
        return; /* over */
    if (g->n_rows == SERVE_PAGE_ROWS) {
        g->n_left_off++;
        return;
    }
    struct serve_page_row *row = &g->rows[g->n_rows++];
    memcpy(row->id, j->id, sizeof row->id);
    memcpy(row->request_id, j->request_id, sizeof row->request_id);
    row->index = c->index;
    row->prompt_tokens = (uint32_t)j->ask.prompts[c->prompt].n_ids;
    row->prefilled = 0;
    row->out = c->n_out;
    row->arrived_ns = j->arrived_ns;
    row->state = state_of(c, row);
}

/* What the engine has comes first: it matters most where not all find room. */
void serve_page_note(struct serve *s)
{
    struct serve_page *g = &s->page;
    pthread_mutex_lock(&g->lock);
    g->n_rows = g->n_left_off = 0;
    for (int waiting = 0; waiting < 2; waiting++)
        for (const struct serve_job *j = s->jobs; j; j = j->next)
            for (uint32_t i = 0; i < j->n_choices; i++)
                if (!j->choices[i].begun == waiting)
                    note_choice(g, &j->choices[i]);
    pthread_mutex_unlock(&g->lock);
}

void serve_page_over(struct serve *s, const struct serve_text *line)
{
    struct serve_page *g = &s->page;
    char *copy = base_try_strdup(line->data, NULL);
    if (!copy)
        return;
    pthread_mutex_lock(&g->lock);
    char **slot = &g->last[g->n_last++ % SERVE_PAGE_LAST];
    char *old = *slot;
    *slot = copy;
    pthread_mutex_unlock(&g->lock);
    free(old);
}

void serve_page_free(struct serve_page *g)
{
    for (uint32_t i = 0; i < SERVE_PAGE_LAST; i++)
        free(g->last[i]);
    pthread_mutex_destroy(&g->lock);
}

/* ---- the document ------------------------------------------------------------------------- */

static json_t *histogram(const struct serve_histogram *h)
{
    json_t *bounds = json_array(), *counts = json_array();
    for (unsigned i = 0; i <= SERVE_BUCKETS; i++) {
        json_array_append_new(counts, json_integer((json_int_t)h->count[i]));
        if (i < SERVE_BUCKETS)
            json_array_append_new(bounds, json_real(serve_metrics_bound(i)));
    }
    return json_pack("{s:o,s:o,s:f}", "le_s", bounds, "counts", counts, "sum_s", h->sum);
}

static json_t *load_json(const struct serve *s, const struct engine_load *l)
{
    uint32_t open = atomic_load(&s->open_choices);
    json_t *steps = json_array();
    for (uint32_t i = 1; i <= l->lanes; i++)
        json_array_append_new(steps, json_integer((json_int_t)l->steps_by_lanes[i]));
    return json_pack("{s:{s:i,s:i,s:o},s:{s:i,s:i},s:{s:i,s:i,s:i,s:i}}", "lanes", "n",
                     (int)l->lanes, "used", (int)l->lanes_used, "steps_by_lanes", steps, "queue",
                     "waiting", open > l->lanes_used ? (int)(open - l->lanes_used) : 0, "max",
                     (int)s->max_queue, "kv", "blocks", (int)l->blocks, "used", (int)l->blocks_used,
                     "cached", (int)l->blocks_cached, "block_positions", (int)l->block_positions);
}

static json_t *counts_json(struct serve *s)
{
    struct serve_metrics m;
    pthread_mutex_lock(&s->metrics.lock);
    m = s->metrics;
    pthread_mutex_unlock(&s->metrics.lock);
    return json_pack("{s:{s:I,s:I,s:I,s:I,s:I},s:o,s:o,s:{s:I,s:I,s:I,s:I}}", "totals", "finished",
                     (json_int_t)m.finished, "refused", (json_int_t)m.refused, "cancelled",
                     (json_int_t)m.cancelled, "prompt_tokens", (json_int_t)m.prompt_tokens,
                     "generation_tokens", (json_int_t)m.generation_tokens, "ttft",
                     histogram(&m.ttft), "itl", histogram(&m.itl), "handoffs", "verified",
                     (json_int_t)m.verified, "off", (json_int_t)m.unverified, "local_prefill",
                     (json_int_t)m.local, "failed", (json_int_t)m.failed);
}

static json_t *tickets_json(struct serve *s)
{
    struct baton_ticket_stats t = {.struct_size = sizeof t};
    if (s->role != SERVE_PREFILL || baton_ticket_stats(s->engine, &t))
        return json_null();
    return json_pack("{s:I,s:I}", "open", (json_int_t)t.open, "claimed", (json_int_t)t.claimed);
}

static json_t *row_json(const struct serve_page_row *r, uint64_t now)
{
    return json_pack("{s:s,s:s?,s:i,s:s,s:i,s:i,s:i,s:f}", "id", r->id, "request_id",
                     r->request_id[0] ? r->request_id : NULL, "choice", (int)r->index, "state",
                     r->state, "prompt_tokens", (int)r->prompt_tokens, "prefilled_tokens",
                     (int)r->prefilled, "output_tokens", (int)r->out, "age_ms",
                     now > r->arrived_ns ? (double)(now - r->arrived_ns) / 1e6 : 0.0);
}

/* Copies what others change: `running`, and the log's lines, newest first, as they are. */
static int look(struct serve_page *g, json_t *running, uint32_t *left_off, struct serve_text *lines)
{
    uint64_t now = base_now_ns();
    int rc = 0;
    pthread_mutex_lock(&g->lock);
    for (uint32_t i = 0; i < g->n_rows; i++)
        rc |= json_array_append_new(running, row_json(&g->rows[i], now));
    *left_off = g->n_left_off;
    uint64_t n = g->n_last < SERVE_PAGE_LAST ? g->n_last : SERVE_PAGE_LAST;
    for (uint64_t i = 0; i < n; i++) {
        const char *line = g->last[(g->n_last - 1 - i) % SERVE_PAGE_LAST];
        rc |= serve_text_put(lines, ",", i > 0);
        rc |= serve_text_put(lines, line, strlen(line));
    }
    pthread_mutex_unlock(&g->lock);
    return rc;
}

static json_t *head(struct serve *s, const struct engine_load *l)
{
    static const char *const roles[] = {"both", "prefill", "decode"};
    return json_pack("{s:i,s:s,s:s,s:s,s:s,s:b,s:i,s:I,s:b}", "schema", 1, "version", s->version,
                     "model", s->name, "role", roles[s->role], "device", l->device, "emulated",
                     l->emulated, "ctx", (int)s->ctx, "uptime_s",
                     (json_int_t)time(NULL) - s->started, "draining", atomic_load(&s->draining));
}

int serve_page_status(struct serve *s, struct serve_reply *r, struct serve_problem *p)
{
    struct serve_text lines = {0};
    struct engine_load load;
    uint32_t left_off = 0;
    engine_load(s->engine, &load);
    json_t *doc = head(s, &load), *running = json_array();
    int rc = json_object_update_new(doc, load_json(s, &load));
    rc |= json_object_update_new(doc, counts_json(s));
    rc |= look(&s->page, running, &left_off, &lines);
    rc |= json_object_set_new(doc, "tickets", tickets_json(s));
    rc |= json_object_set_new(doc, "running", running);
    rc |= json_object_set_new(doc, "running_left_off", json_integer(left_off));
    rc |= serve_text_json(&r->body, doc);
    if (rc == 0) { /* the lines are JSON already: they go in before the last brace */
        r->body.n--;
        static const char key[] = ",\"requests\":[";
        rc = serve_text_put(&r->body, key, sizeof key - 1);
        rc |= serve_text_put(&r->body, lines.data, lines.n);
        rc |= serve_text_put(&r->body, "]}", 2);
    }
    serve_text_free(&lines);
    return rc ? serve_refuse(p, 503, "no_memory", NULL, "no memory for the answer") : 0;
}

int serve_page_html(struct serve_reply *r, struct serve_problem *p)
{
    r->type = "text/html; charset=utf-8";
    if (serve_text_put(&r->body, serve_page_data, serve_page_size))
        return serve_refuse(p, 503, "no_memory", NULL, "no memory for the answer");
    return 0;
}
