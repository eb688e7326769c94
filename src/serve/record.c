/* SPDX-License-Identifier: Apache-2.0 */
/* The request log: a line of JSON for every request, with where the time to its first token went.
 *
 * A line is one write to a file that is appended to, so that lines of several servers stay whole.
 * Time to first token = queue + wait + transfer + import + verify of a pull, and queue + prefill of
 * what was computed here (with what it waited for a lane in it). What a producer computed happened
 * before the request came, and is told apart. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "serve/serve_priv.h"

int serve_record_open(struct serve *s, const char *path, struct baton_error *e)
{
    s->record_fd = !strcmp(path, "-") ? dup(STDERR_FILENO)
                                      : open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (s->record_fd < 0)
        return base_fail_errno(e, BATON_ERR_IO, errno, "--request-log %.180s", path);
    return 0;
}

void serve_record_close(struct serve *s)
{
    if (s->record_fd >= 0)
        close(s->record_fd);
    s->record_fd = -1;
}

uint64_t serve_wait_ns(const struct baton_stats *st)
{
    uint64_t known = st->transfer_ns + st->import_ns + st->verify_ns;
    return st->ttft_ns > known ? st->ttft_ns - known : 0;
}

static json_t *ms(uint64_t ns)
{
    return json_real((double)ns / 1e6);
}

static json_t *between(uint64_t from, uint64_t to)
{
    return from && to ? ms(to - from) : json_null();
}

static json_t *times(const struct serve_job *j)
{
    const struct baton_stats *st = &j->st;
    bool pulled = st->slots > 0;
    json_t *t = json_pack("{s:o,s:o,s:o}", "queue", between(j->arrived_ns, j->begun_ns), "ttft",
                          between(j->arrived_ns, j->first_ns), "e2e",
                          ms(base_now_ns() - j->arrived_ns));
    json_object_set_new(t, pulled ? "remote_prefill" : "prefill", ms(st->prefill_ns));
    if (pulled && j->first_ns) {
        json_object_set_new(t, "wait", ms(serve_wait_ns(st)));
        json_object_set_new(t, "transfer", ms(st->transfer_ns));
        json_object_set_new(t, "import", ms(st->import_ns));
        json_object_set_new(t, "verify", ms(st->verify_ns));
    }
    if (st->first_step_ns) {
        json_object_set_new(t, "first_step", ms(st->first_step_ns));
        json_object_set_new(t, "decode", ms(st->decode_ns));
    }
    return t;
}

static json_t *handoff(const struct serve_job *j)
{
    const struct baton_stats *st = &j->st;
    if (!st->verdict[0])
        return json_null();
    return json_pack("{s:s,s:s,s:I,s:i,s:i,s:s,s:s}", "verdict", st->verdict, "reason", st->reason,
                     "bytes", (json_int_t)st->bytes, "pieces", (int)st->pieces, "slots",
                     (int)st->slots, "digest", st->digest, "from", j->ask.transfer.from);
}

static json_t *head(const struct serve *s, const char *id, const char *request_id, int status)
{
    static const char *const roles[] = {"both", "prefill", "decode"};
    char when[32];
    time_t now = time(NULL);
    struct tm tm;
    strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &tm));
    return json_pack("{s:i,s:s,s:s,s:s,s:s?,s:s?,s:i}", "schema", 1, "time", when, "role",
                     roles[s->role], "model", s->name, "id", id, "request_id",
                     request_id[0] ? request_id : NULL, "status", status);
}

static void put(struct serve *s, json_t *doc)
{
    struct serve_text line = {0};
    if (serve_text_json(&line, doc))
        return;
    serve_page_over(s, &line);
    if (s->record_fd >= 0 && serve_text_put(&line, "\n", 1) == 0) {
        ssize_t n = write(s->record_fd, line.data, line.n);
        (void)n; /* a full disk must not stop the server */
    }
    serve_text_free(&line);
}

static json_t *error_json(const struct serve_problem *p)
{
    return p->status ? json_pack("{s:s?,s:s}", "code", p->code, "message", p->message)
                     : json_null();
}

void serve_record_write(struct serve *s, const struct serve_job *j, bool gone)
{
    json_int_t out = 0;
    for (uint32_t i = 0; i < j->n_choices; i++)
        out += j->choices[i].n_out;
    int status = j->first_ns ? 200 : j->problem.status ? j->problem.status : 0; /* 0: none sent */
    json_t *doc = head(s, j->id, j->request_id, status);
    json_object_set_new(doc, "client_gone", json_boolean(gone));
    json_object_set_new(doc, "choices", json_integer(j->n_choices));
    json_object_set_new(doc, "prompt_tokens", json_integer((json_int_t)j->prompt_tokens));
    json_object_set_new(doc, "cached_tokens", json_integer((json_int_t)j->cached_tokens));
    json_object_set_new(doc, "output_tokens", json_integer(out));
    const char *finish = j->choices[0].finish;
    json_object_set_new(doc, "finish", finish ? json_string(finish) : json_null());
    json_object_set_new(doc, "ms", times(j));
    json_object_set_new(doc, "handoff", handoff(j));
    json_object_set_new(doc, "error", error_json(&j->problem));
    put(s, doc);
}

void serve_record_refused(struct serve *s, const char *request_id, const struct serve_problem *p)
{
    json_t *doc = head(s, NULL, request_id, p->status);
    json_object_set_new(doc, "error", error_json(p));
    put(s, doc);
}
