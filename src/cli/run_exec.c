/* SPDX-License-Identifier: Apache-2.0 */
/* run: load once, fork, pull tokens. */
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/base.h"
#include "cli/run_priv.h"
#include "engine/engine.h"
#include "handoff/handoff.h"
#include "model/tokenizer.h"

#define DEFAULT_TOKENS 256u

/* What both processes know of a run. */
struct run {
    const struct run_args *args;
    struct baton_model *model;
    struct run_result *result;
    struct baton_trace *trace; /* NULL = none */
    struct cli_progress progress;
    /* How far a prefill is that another engine makes: a word shared with its process, or its
     * request in this one. Only the side that prints the text draws the bar, so that neither wipes
     * the other out. NULL = made here, or nobody looks. */
    _Atomic uint32_t *prefilled;
    struct baton_request *producer;
    struct baton_error *failure; /* where a producer process leaves its error; NULL = nowhere */
    uint64_t request_id;
    /* Of the handoff: for this run alone, made before the fork; or of --kv-key-file. */
    uint8_t key[HANDOFF_MAX_KEY];
    size_t key_bytes; /* 0 = none */
    uint32_t ctx, max_tokens;
};

/* What the producer process writes and this one reads. */
struct shared {
    _Atomic uint32_t prefilled;
    struct baton_error failure; /* read after the process has ended; code 0 = none */
};

/* Ctrl-C has one target: the request being pulled. Written before the handler is installed. */
static struct baton_request *volatile interrupt_target;
static volatile sig_atomic_t interrupted;

static void on_interrupt(int sig)
{
    (void)sig;
    interrupted = 1;
    struct baton_request *r = interrupt_target;
    if (r)
        baton_cancel(r);
}

static void draw(void *ctx, const char *what, uint64_t done, uint64_t all)
{
    cli_progress_draw(ctx, what, done, all);
}

/* ---- sizes -------------------------------------------------------------------------------- */

/* Positions to keep room for: asked for, or just what this one request needs. */
static int size_context(struct run *x, struct baton_error *e)
{
    const struct run_args *a = x->args;
    const struct model_config *c = model_config_of(engine_model(x->model));
    uint64_t prompt = x->result->n_prompt;
    uint64_t want = a->n_force ? a->n_force : a->n ? a->n : DEFAULT_TOKENS;
    uint64_t room = a->ctx ? a->ctx : c->max_positions;
    if (room > c->max_positions)
        return base_fail(e, BATON_ERR_INPUT,
                         "a context of %u asked for, the model has %u positions", a->ctx,
                         c->max_positions);
    if (prompt + 1 > room)
        return base_fail(e, BATON_ERR_INPUT,
                         "the prompt has %llu tokens and leaves no room in a context of %llu",
                         (unsigned long long)prompt, (unsigned long long)room);
    if (prompt + want > room) {
        if (a->n || a->n_force)
            return base_fail(
                e, BATON_ERR_INPUT, "%llu prompt and %llu new tokens do not fit a context of %llu",
                (unsigned long long)prompt, (unsigned long long)want, (unsigned long long)room);
        want = room - prompt;
    }
    x->max_tokens = (uint32_t)want;
    x->ctx = a->ctx ? a->ctx : (uint32_t)(prompt + want);
    return 0;
}

/* What can't fit is refused before anything is allocated or forked. The least that a device can ask
 * for is counted: bf16, global layers, one pool a process. */
static int check_memory(const struct run *x, struct baton_error *e)
{
    struct kv_geometry g;
    uint64_t block, local_block, available = base_memory_available();
    uint32_t pools = x->args->mode == BATON_NATIVE ? 1 : 2;
    char need_text[16], have_text[16];
    engine_geometry(model_config_of(engine_model(x->model)), BATON_BF16, &g);
    kv_geometry_bytes(&g, &block, &local_block);
    uint64_t need = block * ((uint64_t)x->ctx / KV_BLOCK + 1) * pools;
    if (!available || need <= available)
        return 0;
    return base_fail(e, BATON_ERR_INPUT,
                     "a KV cache of %u positions in %u process(es) needs %s, and %s are available",
                     x->ctx, pools, cli_bytes(need, need_text), cli_bytes(available, have_text));
}

/* ---- engines and requests ----------------------------------------------------------------- */

/* The way to the other role: a socket between processes, a link inside this one or to another
 * machine, or the address of a producer that is asked. */
struct way {
    int fd;
    struct baton_link *link;
    const char *ask;
};

static int open_request(struct run *x, enum baton_role role, struct way way,
                        struct baton_engine **engine, struct baton_request **request,
                        struct baton_error *e)
{
    const struct run_args *a = x->args;
    struct baton_engine_options eo = {
        .struct_size = sizeof eo,
        .role = role,
        .device = role == BATON_PRODUCER ? a->prefill : a->decode,
        .lanes = 1,
        .ctx = x->ctx,
        .threads = a->threads,
        .peer_fd = way.fd,
        .link = way.link,
        .no_peer = way.ask != NULL,
        .key = x->key_bytes ? x->key : NULL,
        .key_bytes = x->key_bytes,
        .no_digest = a->no_digest,
        .trace = x->trace,
    };
    struct baton_request_options ro = {
        .struct_size = sizeof ro,
        .ids = x->result->prompt,
        .n_ids = x->result->n_prompt,
        .request_id = x->request_id,
        .mode = (enum baton_mode)a->mode,
        .max_tokens = x->max_tokens,
        .ignore_eos = a->ignore_eos,
        .temperature = a->temperature,
        .top_k = a->top_k,
        .top_p = a->top_p,
        .min_p = a->min_p,
        .seed = a->seed,
        .force = a->force,
        .n_force = a->n_force,
        .want_logits = a->logits != NULL,
        .kv_save = role == BATON_PRODUCER ? NULL : a->kv_save,
        .kv_load = a->kv_load,
        .local_prefill = role == BATON_CONSUMER && a->local_prefill,
        .ask = way.ask != NULL,
        .from = way.ask,
    };
    int rc = baton_engine_open(x->model, &eo, engine, e);
    return rc ? rc : baton_submit(*engine, &ro, request, e);
}

enum { LOOK_NS = 100000000 };
#define DIAL_NS 10000000000u

static uint32_t prefilled_tokens(struct baton_request *request)
{
    struct baton_stats s = {.struct_size = sizeof s};
    baton_request_stats(request, &s);
    return s.prefilled_tokens;
}

/* baton_next with a progress bar of the prefill until the first token comes. It moves by chunks. */
static int next_token(struct run *x, struct baton_request *request, struct baton_token *token,
                      struct baton_error *e)
{
    int rc;
    while ((rc = baton_next(request, token, LOOK_NS, e)) == BATON_ERR_TIMEOUT) {
        if (x->result->n_ids)
            continue;
        uint32_t done = x->prefilled ? atomic_load(x->prefilled)
                                     : prefilled_tokens(x->producer ? x->producer : request);
        if (done < x->result->n_prompt)
            cli_progress_draw(&x->progress, "prefill", done, x->result->n_prompt);
    }
    return rc;
}

/* The producer's whole life after fork; its return value is the exit code. It leaves without
 * closing the engine where it failed: the kernel takes everything back at once, and a prefill under
 * way would keep a close waiting. */
static int produce(void *ctx, int fd)
{
    struct run *x = ctx;
    struct baton_engine *engine = NULL;
    struct baton_request *request = NULL;
    struct baton_token token;
    struct baton_error e = {0};
    int rc = open_request(x, BATON_PRODUCER, (struct way){.fd = fd}, &engine, &request, &e);
    while (!rc && (rc = baton_next(request, &token, LOOK_NS, &e)) == BATON_ERR_TIMEOUT) {
        if (x->prefilled)
            atomic_store(x->prefilled, prefilled_tokens(request));
        rc = 0;
    }
    if (rc == 0) {
        baton_request_close(request);
        baton_engine_close(engine);
        return 0;
    }
    x->progress.shown = x->progress.on; /* the other process may have drawn */
    cli_progress_end(&x->progress);
    if (x->failure)
        *x->failure = e;
    /* The consumer tells it, once and with --json too, unless it may be the one that is gone. */
    if (!x->failure || rc == BATON_ERR_PEER)
        fprintf(stderr, "baton: producer: %s\n", e.text);
    return cli_exit_code(rc);
}

/* The stream of text on the terminal; silent where the model has no tokenizer or with --json. */
static int print_piece(struct model_detokenizer *d, const int32_t *id, struct baton_error *e)
{
    const char *piece;
    size_t n;
    int rc = id ? model_detokenizer_push(d, *id, &piece, &n, e)
                : model_detokenizer_finish(d, &piece, &n, e);
    if (rc || !n)
        return rc;
    if (fwrite(piece, 1, n, stdout) != n || fflush(stdout))
        return base_fail_errno(e, BATON_ERR_IO, errno, "stdout");
    return 0;
}

static int pull(struct run *x, struct baton_request *request, struct model_detokenizer *d,
                struct baton_error *e)
{
    uint32_t vocab = baton_model_vocab(x->model);
    struct baton_token token;
    int rc;
    while ((rc = next_token(x, request, &token, e)) == 1) {
        cli_progress_end(&x->progress);
        rc = cli_run_result_keep(x->result, &token, vocab, e);
        if (!rc && d)
            rc = print_piece(d, &token.id, e);
        if (rc)
            return rc;
    }
    if (rc == BATON_ERR_CANCELLED && interrupted)
        rc = 0;
    else if (rc == BATON_ERR_CANCELLED) /* nobody here asked for it: the producer gave up */
        rc = e->code = BATON_ERR_PEER;
    return !rc && d ? print_piece(d, NULL, e) : rc;
}

static int consume(struct run *x, struct way way, struct baton_error *e)
{
    struct baton_engine *engine = NULL;
    struct baton_request *request = NULL;
    struct model_detokenizer *d = NULL;
    const struct model_tokenizer *tokenizer = NULL;
    enum baton_role role = x->args->mode == BATON_NATIVE ? BATON_BOTH : BATON_CONSUMER;
    bool text = !model_is_shape(engine_model(x->model)) &&
                !engine_tokenizer(x->model, &tokenizer, NULL);
    int rc = 0;
    if (text && !x->args->common.json)
        rc = model_detokenizer_open(tokenizer, true, &d, e);
    if (rc)
        baton_link_close(way.link);
    else
        rc = open_request(x, role, way, &engine, &request, e);
    if (!rc) {
        interrupt_target = request;
        if (interrupted)
            baton_cancel(request);
        rc = pull(x, request, d, e);
        cli_progress_end(&x->progress);
        interrupt_target = NULL;
        x->result->stats.struct_size = sizeof x->result->stats;
        baton_request_stats(request, &x->result->stats);
        if (interrupted)
            x->result->stats.finish = BATON_CANCELLED;
    }
    if (d && x->result->n_ids)
        putchar('\n');
    if (!rc && text)
        rc = baton_detokenize(x->model, x->result->ids, x->result->n_ids, &x->result->text, e);
    model_detokenizer_close(d);
    baton_request_close(request);
    baton_engine_close(engine);
    return rc;
}

/* Both roles in this process. The producer's request has no tokens to pull: what goes wrong with it
 * reaches the consumer's by ABORT. */
static int consume_inproc(struct run *x, struct baton_error *e)
{
    struct baton_link *ends[2] = {NULL, NULL};
    struct baton_engine *engine = NULL;
    struct baton_request *request = NULL;
    int rc = baton_link_pair(&ends[0], &ends[1], e);
    if (rc)
        return rc;
    rc = open_request(x, BATON_PRODUCER, (struct way){.fd = -1, .link = ends[0]}, &engine, &request,
                      e);
    x->producer = request;
    if (rc)
        baton_link_close(ends[1]);
    else
        rc = consume(x, (struct way){.fd = -1, .link = ends[1]}, e);
    baton_request_close(request);
    baton_engine_close(engine);
    return rc;
}

/* ---- the whole of it ---------------------------------------------------------------------- */

/* The engines will load it: refuse it here, where one message tells why. */
static int check_file(struct run *x, struct baton_error *e)
{
    struct kv_file *f = NULL;
    int rc = engine_kv_open(x->model, x->args->kv_load, x->result->prompt, x->result->n_prompt, &f,
                            e);
    if (rc == 0)
        x->result->n_loaded = kv_file_info(f)->n_tokens;
    kv_file_close(f);
    return rc;
}

/* Before the weights are brought into order: the probes' process binds its own. */
static int pair_devices(struct run *x, struct baton_error *e)
{
    const struct run_args *a = x->args;
    struct run_result *r = x->result;
    int rc = cli_pairing(x->model, a->prefill, a->probe, a->threads, true, &a->common,
                         &r->prefill_pairing, e);
    if (rc == 0 && !strcmp(a->prefill, a->decode))
        r->decode_pairing = r->prefill_pairing;
    else if (rc == 0)
        rc = cli_pairing(x->model, a->decode, a->probe, a->threads, true, &a->common,
                         &r->decode_pairing, e);
    return rc;
}

static int load(struct run *x, struct baton_error *e)
{
    const struct run_args *a = x->args;
    struct baton_model_options mo = {
        .struct_size = sizeof mo,
        .path = a->model,
        .pin = a->pin,
        .threads = a->threads,
        .progress = draw,
        .ctx = &x->progress,
        .content_identity = a->kv_save || a->kv_load || cli_run_remote(a->prefill) ||
                            cli_run_remote(a->decode),
    };
    uint64_t start = base_now_ns();
    int rc = baton_model_open(&mo, &x->model, e);
    if (!rc)
        rc = cli_run_prompt(a, x->model, x->result, e);
    if (!rc && a->kv_load)
        rc = check_file(x, e);
    if (!rc)
        rc = size_context(x, e);
    if (!rc)
        rc = check_memory(x, e);
    if (!rc)
        rc = pair_devices(x, e);
    if (!rc && !cli_run_remote(a->decode))
        rc = baton_model_prepare(x->model, a->decode, e);
    if (!rc && !cli_run_remote(a->prefill) && strcmp(a->decode, a->prefill))
        rc = baton_model_prepare(x->model, a->prefill, e);
    cli_progress_end(&x->progress);
    if (rc == BATON_ERR_IO)
        rc = e->code = BATON_ERR_INPUT; /* a file that the user named and that can't be read */
    x->result->load_ns = base_now_ns() - start;
    return rc;
}

/* Two processes, and consume in this one. */
static int consume_forked(struct run *x, struct baton_error *e)
{
    struct run_pair pair = {.fd = -1};
    /* Without it there is no bar, and the producer tells its error itself. */
    struct shared *page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE,
                               MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (page != MAP_FAILED) {
        x->prefilled = x->progress.on ? &page->prefilled : NULL;
        x->failure = &page->failure;
        pair.failure = x->failure;
    }
    int rc = cli_run_pair_fork(x->args, produce, x, &pair, e);
    if (!rc)
        rc = consume(x, (struct way){.fd = pair.fd}, e);
    cli_run_pair_end(&pair, rc != 0, e);
    if (page != MAP_FAILED)
        munmap(page, sizeof *page);
    return rc;
}

/* The other end is at an address: a secret that both were given, or none on this machine. */
static int make_key(struct run *x, struct baton_error *e)
{
    const struct run_args *a = x->args;
    if (a->key_file)
        return handoff_key_read(a->key_file, x->key, &x->key_bytes, e);
    x->key_bytes = cli_run_remote(a->prefill) || cli_run_remote(a->decode) ? 0 : 32;
    return base_random(x->key, x->key_bytes, e);
}

/* This process prefills and hands the cache to a consumer at an address, which decodes: its tokens
 * come out there. */
static int hand_over(struct run *x, const char *address, struct baton_error *e)
{
    struct baton_engine *engine = NULL;
    struct baton_request *request = NULL;
    struct baton_link *link = NULL;
    struct baton_token token;
    int rc = baton_link_dial(address, DIAL_NS, &link, e);
    if (rc)
        return e->code = BATON_ERR_PEER;
    rc = open_request(x, BATON_PRODUCER, (struct way){.fd = -1, .link = link}, &engine, &request,
                      e);
    if (!rc) {
        interrupt_target = request;
        if (interrupted)
            baton_cancel(request);
        rc = next_token(x, request, &token, e);
        cli_progress_end(&x->progress);
        interrupt_target = NULL;
        x->result->stats.struct_size = sizeof x->result->stats;
        baton_request_stats(request, &x->result->stats);
    }
    if (rc == BATON_ERR_CANCELLED && interrupted)
        rc = 0;
    baton_request_close(request);
    baton_engine_close(engine);
    return rc;
}

static int route(struct run *x, struct baton_error *e)
{
    const struct run_args *a = x->args;
    const char *prefill = cli_run_remote(a->prefill), *decode = cli_run_remote(a->decode);
    if (a->mode == BATON_NATIVE)
        return consume(x, (struct way){.fd = -1}, e);
    if (prefill)
        return consume(x, (struct way){.fd = -1, .ask = prefill}, e);
    if (decode)
        return hand_over(x, decode, e);
    return a->transport == RUN_INPROC ? consume_inproc(x, e) : consume_forked(x, e);
}

/* Of a run that failed, too: that is when one wants to see it. The first error is told. */
static int save_trace(struct run *x, int rc, struct baton_error *e)
{
    int saved = x->trace ? baton_trace_save(x->trace, x->args->trace, rc ? NULL : e) : 0;
    baton_trace_close(x->trace);
    return rc ? rc : saved;
}

int cli_run_execute(const struct run_args *a, struct baton_model **model, struct run_result *r,
                    struct baton_error *e)
{
    struct run x = {.args = a, .result = r};
    cli_progress_init(&x.progress, &a->common);
    int rc = load(&x, e);
    *model = x.model;
    if (!rc)
        rc = base_random(&x.request_id, sizeof x.request_id, e);
    if (!rc)
        rc = make_key(&x, e);
    if (!rc && a->trace)
        rc = baton_trace_open(0, &x.trace, e);
    if (!rc) {
        struct sigaction sa = {.sa_handler = on_interrupt};
        sigaction(SIGINT, &sa, NULL);
        sigaction(SIGTERM, &sa, NULL);
    }
    if (!rc)
        rc = route(&x, e);
    return save_trace(&x, rc, e);
}
