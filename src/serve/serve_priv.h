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
#ifdef __clang_analyzer__
/* Tells the analyzer, which sees one file at a time, that these never return 0. */
#define serve_refuse(...) (serve_refuse(__VA_ARGS__), -1)
#define serve_refuse_error(...) (serve_refuse_error(__VA_ARGS__), -1)
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
};

struct serve_job {
    atomic_uint refs; /* the connection's and the pump's */
    struct serve *serve;
    uint64_t number;
    char id[48];
    int64_t created; /* UNIX seconds */
    uint64_t arrived_ns;
    struct serve_ask ask;
    /* pump */
    struct serve_job *next;
    struct serve_choice *choices; /* [n_choices] */
    uint32_t n_choices, n_open;   /* not over */
    uint64_t prompt_tokens;
    bool cancelled; /* its requests were told */
    bool counted;   /* in the metrics */
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

/* ---- metrics.c ------------------------------------------------------------------------------ */

#define SERVE_BUCKETS 20u
struct serve_histogram {
    uint64_t count[SERVE_BUCKETS + 1];
    double sum;
};
struct serve_metrics {
    pthread_mutex_t lock;
    struct serve_histogram ttft, itl, e2e;
    uint64_t prompt_tokens, generation_tokens;
    uint64_t stop, length, abort, error;   /* choices, by how they ended */
    uint64_t refused, finished, cancelled; /* requests */
};
void serve_metrics_time(struct serve_metrics *m, struct serve_histogram *h, uint64_t ns);
void serve_metrics_add(struct serve_metrics *m, uint64_t *counter, uint64_t n);
/* Prometheus text. */
int serve_metrics_text(struct serve *s, struct serve_text *out);

/* ---- server --------------------------------------------------------------------------------- */

struct MHD_Daemon;

struct serve {
    char *name, *version;
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
    atomic_ullong next_number;
    /* pump */
    pthread_t pump;
    bool pump_on;
    int bell, watch; /* eventfd; epoll of the bell and of clients' sockets */
    struct serve_job *jobs;
    struct serve_choice *queue, **queue_end; /* not begun */
    uint32_t n_begun;
    /* under lock */
    pthread_mutex_t lock;
    struct serve_job *incoming; /* newest first */
    bool shut;                  /* the pump takes no more */
    struct serve_metrics metrics;
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
