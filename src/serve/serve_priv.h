/* SPDX-License-Identifier: Apache-2.0 */
/* Inside serve: requests as they were asked for, jobs, and who owns which of their fields. */
#ifndef SERVE_SERVE_PRIV_H
#define SERVE_SERVE_PRIV_H

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

#include <jansson.h>

#include "base/base.h"
#include "model/chat.h"
#include "engine/engine.h"
#include "model/tokenizer.h"
#include "serve/serve.h"

#define SERVE_MAX_BODY (8u << 20)
#define SERVE_MAX_CHOICES 128u /* of one request: prompts times n */
#define SERVE_MAX_STOPS 16u
#define SERVE_MAX_STOP_BYTES 1024u
#define SERVE_MAX_TOP 20u /* alternatives beside a token */

/* ---- problem.c: what a client is told when it is refused ------------------------------------ */

struct serve_problem {
    int status; /* HTTP; 0 = none */
    const char *type, *code;
    char param[64]; /* "" = null */
    char message[400];
};
/* Fill *p and return -1. param may be NULL. The type follows from the status; code may be NULL. */
int serve_refuse(struct serve_problem *p, int status, const char *code, const char *param,
                 const char *fmt, ...) __attribute__((format(printf, 5, 6)));
/* The same from an error of another room, as the fault of `param` where the client's. */
int serve_refuse_error(struct serve_problem *p, const char *param, const struct baton_error *e);
/* The same of a handoff that failed before the first token: the ticket's fault, a dead peer's, or a
 * mismatch. */
int serve_refuse_handoff(struct serve_problem *p, const struct baton_error *e);
#ifdef __clang_analyzer__
/* Tells the analyzer, which sees one file at a time, that these never return 0. */
#define serve_refuse(...) (serve_refuse(__VA_ARGS__), -1)
#define serve_refuse_error(...) (serve_refuse_error(__VA_ARGS__), -1)
#define serve_refuse_handoff(...) (serve_refuse_handoff(__VA_ARGS__), -1)
#endif
/* {"error":{...}}; NULL where there is no memory. */
json_t *serve_problem_json(const struct serve_problem *p);

/* ---- text.c: bytes that grow ---------------------------------------------------------------- */

struct serve_text {
    char *data; /* NUL-terminated where not NULL */
    size_t n, cap;
};
int serve_text_put(struct serve_text *t, const void *data, size_t n);
int serve_text_printf(struct serve_text *t, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));
/* A document without blanks. Drops the reference; NULL counts as no memory. */
int serve_text_json(struct serve_text *t, json_t *doc);
void serve_text_drop(struct serve_text *t, size_t n); /* the first n bytes */
void serve_text_free(struct serve_text *t);

/* ---- fields.c: typed members; null counts as missing, and leaves *out as it is -------------- */

int serve_field_bool(const json_t *o, const char *key, bool *out, struct serve_problem *p);
int serve_field_int(const json_t *o, const char *key, int64_t min, int64_t max, int64_t *out,
                    struct serve_problem *p);
int serve_field_u32(const json_t *o, const char *key, uint32_t min, uint32_t max, uint32_t *out,
                    struct serve_problem *p);
/* In [min, max], or (min, max] where `open`. */
int serve_field_f32(const json_t *o, const char *key, double min, bool open, double max, float *out,
                    struct serve_problem *p);
int serve_field_str(const json_t *o, const char *key, const char **out, struct serve_problem *p);
/* An array of whole numbers in [0, INT32_MAX]; *ids: free(). */
int serve_field_ids(const json_t *array, const char *param, int32_t **ids, size_t *n,
                    struct serve_problem *p);

/* ---- transfer.c, allow.c: the halves of a pair ---------------------------------------------- */

struct serve;
struct serve_ask;

/* What a request's kv_transfer_params ask for. */
struct serve_transfer {
    bool out;            /* do_remote_decode: prefill, and keep the cache for its ticket */
    bool in;             /* do_remote_prefill: the next three are there */
    const char *ticket;  /* of the document */
    const char *host;    /* of the document */
    uint16_t port;       //
    char from[256 + 16]; /* the same as an address for the engine, once it was allowed; or "" */
};
/* Find and read them in a request's document; all zero where there are none. */
int serve_transfer_parse(struct serve_transfer *t, const json_t *doc, struct serve_problem *p);
/* Whether a request suits this server's role, and its ticket's host is allowed. What a prefill
 * server has no use for is dropped from it. if_available: the client wants it only where the cache
 * need not be computed here. */
int serve_transfer_check(const struct serve *s, struct serve_ask *a, bool if_available,
                         struct serve_problem *p);
/* Nobody will pull what this ticket stands for: tell its producer, where it may be told. */
void serve_transfer_release(struct serve *s, struct serve_transfer *t);
/* kv_transfer_params for the decode server, of a prompt that is kept for `ticket`; NULL where there
 * is no memory. */
json_t *serve_transfer_json(const struct serve *s, const char *ticket, const int32_t *ids,
                            size_t n_ids);

struct serve_allow;
int serve_allow_open(const struct serve_options *o, struct serve_allow **out,
                     struct baton_error *e);
void serve_allow_close(struct serve_allow *a); /* NULL is fine */
/* Names are compared as they are and not resolved: who lists one trusts who answers for it. */
bool serve_allowed(const struct serve_allow *a, const char *host);
/* host and port as an address: brackets around IPv6. */
void serve_address(const char *host, uint16_t port, char *out, size_t size);

/* ---- ask.c: a request as it was asked for --------------------------------------------------- */

enum serve_kind { SERVE_COMPLETION, SERVE_CHAT, SERVE_TOKENIZE };

struct serve_prompt {
    const char *text; /* of the document; NULL where ids were given */
    int32_t *ids;
    size_t n_ids;
};

struct serve_ask {
    enum serve_kind kind;
    json_t *doc; /* strings point into it */
    const char *model;
    struct serve_prompt *prompts; /* [n_prompts] completion, tokenize */
    size_t n_prompts;
    struct model_message *messages; /* [n_messages] chat */
    char **joined;                  /* [n_messages] contents that were put together; NULL */
    size_t n_messages;
    bool think;                         /* leave thoughts to the model */
    uint32_t n, max_tokens, min_tokens; /* max_tokens 0 = not said */
    bool max_said;                      /* else max_tokens gives way to the context */
    bool stream, include_usage, ignore_eos, return_token_ids, keep_special;
    bool logprobs;
    uint32_t n_top;
    float temperature, top_p, min_p;
    float repetition_penalty, presence_penalty, frequency_penalty;
    uint32_t top_k;
    bool seeded;
    uint64_t seed;
    const char *stops[SERVE_MAX_STOPS];
    size_t n_stops;
    int32_t *stop_ids;
    size_t n_stop_ids;
    bool add_special; /* tokenize */
    struct serve_transfer transfer;
};
/* Parse a body. On success and on failure serve_ask_free what is there. */
int serve_ask_parse(struct serve_ask *a, enum serve_kind kind, const char *body, size_t n,
                    struct serve_problem *p);
void serve_ask_free(struct serve_ask *a);
/* ask_prompt.c: prompts and messages of a parsed document. */
int serve_ask_prompts(struct serve_ask *a, struct serve_problem *p);
int serve_ask_messages(struct serve_ask *a, struct serve_problem *p);

/* ---- jobs ----------------------------------------------------------------------------------- */

struct serve_job;

/* One of a job's answers. Owned by the pump. */
struct serve_choice {
    struct serve_job *job;
    uint32_t index, prompt, nth;   /* nth of its prompt */
    struct serve_choice *next;     /* in the queue of those that wait */
    uint64_t turn;                 /* its place there */
    struct baton_request *request; /* NULL: not begun, or over */
    bool begun;
    struct model_detokenizer *detokenizer;
    struct serve_text text; /* not yet told */
    size_t safe;            /* of it, what no stop string can begin in */
    json_t *ids, *logprobs; /* not yet told; NULL where not wanted */
    size_t n_text;          /* bytes of text so far, told or not */
    uint32_t n_out;
    uint64_t last_ns;       /* when its last token was chosen */
    const char *finish;     /* NULL = goes on */
    const char *stopped_by; /* the stop string, or NULL */
    bool role_told, finish_told;
    char ticket[96]; /* prefill server: what stands for its cache */
};

struct serve_job {
    atomic_uint refs; /* the connection's and the pump's */
    struct serve *serve;
    uint64_t number;
    uint64_t client; /* whom it is from, as far as fairness goes */
    char id[48];
    int64_t created; /* UNIX seconds */
    uint64_t arrived_ns;
    struct serve_ask ask;
    /* pump */
    struct serve_job *next;
    struct serve_choice *choices;          /* [n_choices] */
    uint32_t n_choices, n_open;            /* not over */
    uint64_t prompt_tokens, cached_tokens; /* cached: of them, neither computed nor pulled */
    bool cancelled;                        /* its requests were told */
    bool claimed;          /* its ticket is the engine's affair; else it is released with the job */
    uint64_t renew_ns;     /* when its ticket is to be renewed while it waits */
    uint64_t begun_ns;     /* when its first choice went to the engine */
    uint64_t first_ns;     /* and had its first token, or its ticket */
    struct baton_stats st; /* of that choice, so far */
    char request_id[96];   /* X-Request-Id, cut; plain text */
    /* both, under lock */
    pthread_mutex_t lock;
    void *connection; /* libmicrohttpd's; NULL once it is gone */
    bool suspended;
    bool gone;             /* the client left, or the server ends */
    bool ready;            /* a status can be sent */
    bool over;             /* nothing follows */
    struct serve_text out; /* what waits to be read */
    struct serve_problem problem;
};

/* job.c */
int serve_job_open(struct serve *s, struct serve_ask *a, struct serve_job **out,
                   struct serve_problem *p); /* takes *a over, whatever it returns */
void serve_job_put(struct serve_job *j);     /* NULL is fine */
/* Count it in and give it to the pump; refused where the queue is full. */
int serve_job_submit(struct serve_job *j, struct serve_problem *p);
/* Pump: give a choice to the engine. */
int serve_choice_begin(struct serve_choice *c, struct baton_error *e);

/* choice.c: tokens to text. Pump. */
int serve_choice_take(struct serve_choice *c, const struct baton_token *t, struct baton_error *e);
/* Nothing follows: what was held back belongs to the text, unless a stop string ends it. */
int serve_choice_finish(struct serve_choice *c, const char *finish, struct baton_error *e);
void serve_choice_free(struct serve_choice *c);

/* answer.c: what a client reads. Pump. Each returns BATON_ERR_NOMEM or 0. */
int serve_answer_chunk(struct serve_choice *c, struct serve_text *out); /* of a stream */
int serve_answer_end(struct serve_job *j, struct serve_text *out);      /* of a stream */
int serve_answer_error(const struct serve_problem *p, struct serve_text *out);
int serve_answer_whole(struct serve_job *j, struct serve_text *out);

/* ---- record.c: a line of JSON each request -------------------------------------------------- */

int serve_record_open(struct serve *s, const char *path, struct baton_error *e);
void serve_record_close(struct serve *s);
/* A job that is over, or whose client left. */
void serve_record_write(struct serve *s, const struct serve_job *j, bool gone);
/* One that was refused before it was counted in. */
void serve_record_refused(struct serve *s, const char *request_id, const struct serve_problem *p);
/* ns of a pull that neither moved nor proved bytes: connecting, the claim, waiting for pages and a
 * lane. */
uint64_t serve_wait_ns(const struct baton_stats *st);

/* ---- metrics.c ------------------------------------------------------------------------------ */

#define SERVE_BUCKETS 20u
#define SERVE_CAUSES 6u /* why a handoff failed, see metrics.c */
struct serve_histogram {
    uint64_t count[SERVE_BUCKETS + 1];
    double sum;
};
struct serve_metrics {
    pthread_mutex_t lock;
    struct serve_histogram ttft, itl, e2e;
    uint64_t prompt_tokens, generation_tokens;
    uint64_t computed_tokens, cached_tokens, pulled_tokens; /* of the prompts, by their source */
    struct serve_histogram wait, transfer, import, verify;  /* of pulls, to the first token */
    uint64_t handoff_bytes;
    uint64_t verified, unverified, local, failed; /* pulls, by what became of them */
    uint64_t causes[SERVE_CAUSES];                /* of local and failed */
    uint64_t renewed, released;                   /* tickets that others were told of */
    uint64_t stop, length, abort, error;          /* choices, by how they ended */
    uint64_t refused, finished, cancelled;        /* requests */
};
double serve_metrics_bound(unsigned i); /* seconds; upper end of bucket i < SERVE_BUCKETS */
void serve_metrics_time(struct serve_metrics *m, struct serve_histogram *h, uint64_t ns);
void serve_metrics_add(struct serve_metrics *m, uint64_t *counter, uint64_t n);
/* A pull that gave its first token, or was computed here instead; one that failed before. */
void serve_metrics_pulled(struct serve_metrics *m, const struct baton_stats *st);
void serve_metrics_failed(struct serve_metrics *m, const struct baton_error *e);
/* Prometheus text. */
int serve_metrics_text(struct serve *s, struct serve_text *out);

/* ---- page.c: what the page at / shows ------------------------------------------------------- */

#define SERVE_PAGE_ROWS 64u /* choices under way that it lists */
#define SERVE_PAGE_LAST 24u /* requests that are over */
/* A choice under way. */
struct serve_page_row {
    char id[48], request_id[96];
    uint32_t index, prompt_tokens, prefilled, out;
    uint64_t arrived_ns;
    const char *state; /* a literal */
};
struct serve_page {
    pthread_mutex_t lock;
    struct serve_page_row rows[SERVE_PAGE_ROWS];
    uint32_t n_rows, n_left_off;
    char *last[SERVE_PAGE_LAST]; /* lines of the request log, without the end of line; a ring */
    uint64_t n_last;             /* so far */
};
/* Pump: what is under way, as it stands. */
void serve_page_note(struct serve *s);
/* A request is over: a line of the request log, copied. Any thread. */
void serve_page_over(struct serve *s, const struct serve_text *line);
void serve_page_free(struct serve_page *g);
struct serve_reply;
int serve_page_html(struct serve_reply *r, struct serve_problem *p);
int serve_page_status(struct serve *s, struct serve_reply *r, struct serve_problem *p);

/* ---- server --------------------------------------------------------------------------------- */

struct MHD_Daemon;

struct serve {
    enum serve_role role;
    char *name, *version;
    char engine_id[33]; /* of this start */
    char kv_host[256];  /* prefill: where tickets are claimed, as decode servers are told */
    uint16_t kv_port;   //
    char fingerprint[65];
    struct serve_allow *allow; /* decode */
    uint64_t lease_ns;
    bool local_prefill;
    int record_fd; /* -1 = no record is kept */
    uint32_t max_queue;
    int64_t started; /* UNIX seconds */
    char *cert, *key;
    uint8_t (*api_keys)[32]; /* [n_api_keys] their SHA-256 */
    size_t n_api_keys;
    struct MHD_Daemon *daemon;
    int listen_fd; /* after draining began, until the daemon has stopped; else -1 */
    uint16_t port;
    /* set by attach, before `attached` */
    struct baton_model *model;
    struct baton_engine *engine;
    const struct model_tokenizer *tokenizer;
    struct model_sampler *sampler; /* pump */
    uint32_t lanes, ctx, vocab;
    atomic_bool attached, draining, stopping;
    atomic_uint connections;  /* with a request that is not answered */
    atomic_uint open_choices; /* counted in and not over */
    atomic_ullong next_number, next_request;
    /* pump */
    pthread_t pump;
    bool pump_on;
    int bell, watch; /* eventfd; epoll of the bell and of clients' sockets */
    struct serve_job *jobs;
    struct serve_choice *queue; /* not begun, in the order of their turns */
    uint64_t turn;              /* of the one that began last */
    uint32_t n_begun;
    /* under lock */
    pthread_mutex_t lock;
    struct serve_job *incoming; /* newest first */
    bool shut;                  /* the pump takes no more */
    struct serve_metrics metrics;
    struct serve_page page;
};

void serve_ring(void *serve); /* wakes the pump */
void *serve_pump_thread(void *serve);
/* Tell the pump to look whether this job's client leaves. */
int serve_watch(struct serve *s, struct serve_job *j, int fd);
void serve_unwatch(struct serve *s, int fd);

/* http.c */
int serve_http_open(struct serve *s, const struct serve_options *o, struct baton_error *e);
void serve_http_close(struct serve *s);
/* Go on with a job's connection; its lock is held. */
void serve_http_resume(struct serve_job *j);

/* routes.c: answers that need no engine. */
struct serve_reply {
    int status;
    const char *type; /* of the content */
    struct serve_text body;
};
int serve_route_get(struct serve *s, const char *path, struct serve_reply *r,
                    struct serve_problem *p);
/* /tokenize and /detokenize. */
int serve_route_tokens(struct serve *s, const char *path, const char *body, size_t n,
                       struct serve_reply *r, struct serve_problem *p);
/* The ids of prompt i, or of the chat; *ids: free(). */
int serve_prompt_ids(struct serve *s, const struct serve_ask *a, size_t i, int32_t **ids, size_t *n,
                     struct serve_problem *p);

#endif
