/* SPDX-License-Identifier: Apache-2.0 */
/* baton serve: arguments, and the life of a server between two signals. */
#include <getopt.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/base.h"
#include "cli/cli.h"
#include "engine/engine.h"
#include "cli/pairing_priv.h"
#include "cli/serve_priv.h"
#include "serve/serve.h"

static const char help[] =
    "usage: baton serve -m MODEL [OPTIONS]\n"
    "\n"
    "Answers over HTTP as the OpenAI API does: /v1/completions, /v1/chat/completions, /v1/models,\n"
    "/tokenize, /detokenize, /health, /version, /metrics; / is a page to look at, which reads\n"
    "/baton/v1/status. Many requests decode side by side, one a lane; those that find no lane "
    "wait\n"
    "and clients take turns. SIGTERM or Ctrl-C: takes nothing new, finishes what runs and ends;\n"
    "a second one cancels what runs.\n"
    "\n"
    "model and device\n"
    "  -m MODEL              Hugging Face folder\n"
    "  --pin sha256:HEX      refuse other files than these (see `baton model hash`)\n"
    "  --device DEV          cpu (default), cpu:ref; `baton devices` lists them\n"
    "  --lanes N             requests that decode at once, 1 to 8 (default 4)\n"
    "  --ctx N               positions that a request may have (default: the model's, at most\n"
    "                        8192)\n"
    "  --probe pairing|always|never   probe an emulated or plugin device when it first meets this\n"
    "                        model (default), each time, or not; one that fails is not used\n"
    "  --threads N           compute threads (default: one a core)\n"
    "  --cpus LIST           run on these CPUs only, e.g. 0,2-3\n"
    "  --kv-mem SIZE         of the KV cache, e.g. 512M, 2G (default: as much as all lanes need\n"
    "                        at --ctx). With less, requests wait for pages; more keeps prefixes\n"
    "  --prefix-cache on|off keep pages of requests that are over, while nobody needs the room,\n"
    "                        for prompts that begin alike (default on)\n"
    "  --role ROLE           both (default); prefill: answers with a ticket for the cache that it\n"
    "                        keeps; decode: pulls the cache of a request's ticket and goes on\n"
    "prefill and decode servers, behind a router that speaks vLLM's kv_transfer_params\n"
    "  --kv-host ADDRESS     prefill: where tickets are claimed (default 127.0.0.1)\n"
    "  --kv-port N           prefill: (default 0: any free one)\n"
    "  --kv-advertise HOST:PORT   prefill: what decode servers connect to instead\n"
    "  --kv-allow NET        decode: whom a request may name as its prefill server: 10.0.0.0/8, "
    "an\n"
    "                        address, a host name; may be repeated (default: this machine)\n"
    "  --kv-key-file FILE    a secret that both have; needed as soon as they are two machines\n"
    "  --lease SEC           how long a cache is kept for its ticket (default 30); the same at "
    "both\n"
    "  --on-handoff-failure fail|local-prefill   decode: an error (default), or compute the "
    "prompt\n"
    "  --digest on|off       slot digests (default on)\n"
    "HTTP\n"
    "  --host ADDRESS        where to listen (default 127.0.0.1)\n"
    "  --port N              (default 8000; 0 = any free one, which is printed)\n"
    "  --served-name NAME    the model's name in the API (default: its folder's)\n"
    "  --max-queue N         answers that may wait for a lane (default 256); then 429\n"
    "  --api-key-file FILE   ask for one of these keys, one a line\n"
    "  --tls-cert FILE --tls-key FILE   HTTPS with this certificate and key (PEM)\n"
    "output\n"
    "  --request-log FILE    append a line of JSON for each request; - is stderr\n"
    "  --json                one JSON document on stdout when it has ended\n"
    "  -v, -q                more, or fewer, messages; -v shows every request\n"
    "\n"
    "example\n"
    "  baton serve -m models/gemma3-tiny --lanes 4 --port 8000 &\n"
    "  curl localhost:8000/v1/chat/completions -d '{\"messages\": [{\"role\": \"user\",\n"
    "       \"content\": \"What is the capital of France?\"}], \"stream\": true}'\n"
    "  A pair, and what a router says to it: docs/serve.md.\n";

enum {
    OPT_ROLE = 256,
    OPT_DEVICE,
    OPT_LANES,
    OPT_CTX,
    OPT_THREADS,
    OPT_CPUS,
    OPT_PIN,
    OPT_HOST,
    OPT_PORT,
    OPT_NAME,
    OPT_MAX_QUEUE,
    OPT_KEYS,
    OPT_CERT,
    OPT_KEY,
    OPT_REQUEST_LOG,
    OPT_PREFIX_CACHE,
    OPT_KV_MEM,
    OPT_PROBE,
    OPT_UNBUILT,
};

static const struct option options[] = {
    {"model", required_argument, NULL, 'm'},
    {"role", required_argument, NULL, OPT_ROLE},
    {"device", required_argument, NULL, OPT_DEVICE},
    {"lanes", required_argument, NULL, OPT_LANES},
    {"ctx", required_argument, NULL, OPT_CTX},
    {"threads", required_argument, NULL, OPT_THREADS},
    {"cpus", required_argument, NULL, OPT_CPUS},
    {"pin", required_argument, NULL, OPT_PIN},
    {"host", required_argument, NULL, OPT_HOST},
    {"port", required_argument, NULL, OPT_PORT},
    {"served-name", required_argument, NULL, OPT_NAME},
    {"max-queue", required_argument, NULL, OPT_MAX_QUEUE},
    {"api-key-file", required_argument, NULL, OPT_KEYS},
    {"tls-cert", required_argument, NULL, OPT_CERT},
    {"tls-key", required_argument, NULL, OPT_KEY},
    {"kv-blocks", required_argument, NULL, OPT_UNBUILT},
    {"kv-mem", required_argument, NULL, OPT_KV_MEM},
    {"kv-host", required_argument, NULL, OPT_KV_HOST},
    {"kv-port", required_argument, NULL, OPT_KV_PORT},
    {"kv-advertise", required_argument, NULL, OPT_KV_ADVERTISE},
    {"kv-allow", required_argument, NULL, OPT_KV_ALLOW},
    {"kv-key-file", required_argument, NULL, OPT_KV_KEY},
    {"lease", required_argument, NULL, OPT_LEASE},
    {"on-handoff-failure", required_argument, NULL, OPT_ON_FAILURE},
    {"digest", required_argument, NULL, OPT_DIGEST},
    {"request-log", required_argument, NULL, OPT_REQUEST_LOG},
    {"prefix-cache", required_argument, NULL, OPT_PREFIX_CACHE},
    {"audit-sample", required_argument, NULL, OPT_UNBUILT},
    {"probe", required_argument, NULL, OPT_PROBE},
    {"json", no_argument, NULL, 'j'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

struct args {
    struct cli_common common;
    const char *model, *pin, *device, *cpus, *name;
    bool no_prefix_cache;
    uint64_t kv_bytes;
    uint32_t lanes, ctx, threads, port, max_queue;
    struct serve_options serve;
    struct serve_kv kv;
    enum cli_probe_policy probe;
};

static int parse_role(const char *value, enum serve_role *role, struct baton_error *e)
{
    static const char *const words[] = {"both", "prefill", "decode", NULL};
    int word = 0;
    int rc = cli_parse_word("--role", value, words, &word, e);
    *role = (enum serve_role)word;
    return rc;
}

static int parse_switch(const char *name, const char *value, bool *off, struct baton_error *e)
{
    static const char *const words[] = {"on", "off", NULL};
    int word = 0;
    int rc = cli_parse_word(name, value, words, &word, e);
    *off = word == 1;
    return rc;
}

static int parse_kv_mem(const char *value, uint64_t *bytes, struct baton_error *e)
{
    int rc = cli_parse_bytes("--kv-mem", value, bytes, e);
    return rc == 0 && *bytes == 0 ? base_fail(e, BATON_ERR_USAGE, "--kv-mem: 0 bytes") : rc;
}

/* Options of the HTTP side. Returns 1 where `opt` is none of them. */
static int parse_http(int opt, const char *v, struct args *a, struct baton_error *e)
{
    switch (opt) {
    case OPT_HOST:
        a->serve.host = v;
        return 0;
    case OPT_PORT:
        return cli_parse_u32("--port", v, 0, UINT16_MAX, &a->port, e);
    case OPT_NAME:
        a->name = v;
        return 0;
    case OPT_MAX_QUEUE:
        return cli_parse_u32("--max-queue", v, 0, 100000, &a->max_queue, e);
    case OPT_KEYS:
        a->serve.api_key_file = v;
        return 0;
    case OPT_CERT:
        a->serve.tls_cert = v;
        return 0;
    case OPT_KEY:
        a->serve.tls_key = v;
        return 0;
    case OPT_REQUEST_LOG:
        a->serve.request_log = v;
        return 0;
    case OPT_UNBUILT:
        return base_fail(e, BATON_ERR_UNSUPPORTED,
                         "--kv-blocks, or an option of audits, was given: "
                         "these are not built yet");
    default:
        return 1;
    }
}

static int parse_option(void *args, int opt, const char *v, struct baton_error *e)
{
    struct args *a = args;
    switch (opt) {
    case 'm':
        a->model = v;
        return 0;
    case OPT_ROLE:
        return parse_role(v, &a->kv.role, e);
    case OPT_DEVICE:
        a->device = v;
        return 0;
    case OPT_LANES:
        return cli_parse_u32("--lanes", v, 1, 8, &a->lanes, e);
    case OPT_CTX:
        return cli_parse_u32("--ctx", v, 2, 1u << 24, &a->ctx, e);
    case OPT_THREADS:
        return cli_parse_u32("--threads", v, 1, 1024, &a->threads, e);
    case OPT_CPUS:
        a->cpus = v;
        return 0;
    case OPT_PIN:
        a->pin = v;
        return 0;
    case OPT_PREFIX_CACHE:
        return parse_switch("--prefix-cache", v, &a->no_prefix_cache, e);
    case OPT_KV_MEM:
        return parse_kv_mem(v, &a->kv_bytes, e);
    case OPT_PROBE:
        return cli_probe_policy(v, &a->probe, e);
    default: {
        int rc = parse_http(opt, v, a, e);
        return rc == 1 ? cli_serve_kv_take(&a->kv, opt, v, e) : rc;
    }
    }
}

/* The folder's own name: what stands behind the last slash that is not at the end. */
static void default_name(const char *model, char *out, size_t size)
{
    size_t n = strlen(model);
    while (n > 1 && model[n - 1] == '/')
        n--;
    size_t first = n;
    while (first > 0 && model[first - 1] != '/')
        first--;
    snprintf(out, size, "%.*s", (int)(n - first), model + first);
}

/* ---- signals ------------------------------------------------------------------------------ */

static void block_signals(sigset_t *wanted)
{
    sigemptyset(wanted);
    sigaddset(wanted, SIGTERM);
    sigaddset(wanted, SIGINT);
    pthread_sigmask(SIG_BLOCK, wanted, NULL);
}

static bool signalled_again(void *wanted)
{
    const struct timespec now = {0, 0};
    return sigtimedwait(wanted, NULL, &now) > 0;
}

/* ---- life --------------------------------------------------------------------------------- */

struct parts {
    struct serve *serve;
    struct baton_model *model;
    struct baton_engine *engine;
    struct cli_pairing pairing;
};

static int open_engine(const struct args *a, struct parts *p, struct baton_error *e)
{
    const struct baton_model_options mo = {.struct_size = sizeof mo,
                                           .path = a->model,
                                           .pin = a->pin,
                                           .threads = a->threads,
                                           .content_identity = a->kv.role != SERVE_BOTH};
    struct baton_engine_options eo = {.struct_size = sizeof eo,
                                      .role = BATON_BOTH,
                                      .device = a->device,
                                      .lanes = a->lanes,
                                      .ctx = a->ctx,
                                      .threads = a->threads,
                                      .prefix_cache = !a->no_prefix_cache,
                                      .kv_bytes = a->kv_bytes};
    cli_serve_kv_engine(&a->kv, &eo);
    int rc = baton_model_open(&mo, &p->model, e);
    if (rc == 0)
        rc = cli_pairing(p->model, a->device, a->probe, a->threads, false, &a->common, &p->pairing,
                         e);
    if (rc == 0)
        rc = baton_engine_open(p->model, &eo, &p->engine, e);
    return rc ? rc : serve_attach(p->serve, p->model, p->engine, e);
}

static void announce(const struct args *a, const struct parts *p)
{
    const struct serve *s = p->serve;
    char text[80];
    const char *host = a->serve.host ? a->serve.host : "127.0.0.1";
    bool v6 = strchr(host, ':') != NULL;
    if (a->common.verbosity >= 0)
        fprintf(stderr, "baton: serving %s on %s://%s%s%s:%u\n", a->serve.served_name,
                a->serve.tls_cert ? "https" : "http", v6 ? "[" : "", host, v6 ? "]" : "",
                serve_port(s));
    if (a->common.verbosity >= 0 && a->kv.role == SERVE_PREFILL)
        fprintf(stderr, "baton: tickets are claimed at %s\n", baton_engine_address(p->engine));
    if (a->common.verbosity >= 0 && p->pairing.asked)
        fprintf(stderr, "baton: probes of %s: %s\n", a->device,
                cli_pairing_text(&p->pairing, text, sizeof text));
}

/* What was left when all was closed that can be counted before. */
struct outcome {
    struct serve_counts counts;
    struct engine_load load;
    struct baton_ticket_stats tickets;
};

static int live(const struct args *a, struct parts *p, sigset_t *wanted, struct outcome *o,
                struct baton_error *e)
{
    int signal_number, rc = serve_open(&a->serve, &p->serve, e);
    if (rc == 0)
        rc = open_engine(a, p, e);
    if (rc)
        return rc;
    announce(a, p);
    sigwait(wanted, &signal_number);
    serve_drain(p->serve, signalled_again, wanted);
    serve_count(p->serve, &o->counts);
    serve_close(p->serve);
    p->serve = NULL;
    engine_load(p->engine, &o->load);
    o->tickets.struct_size = sizeof o->tickets;
    baton_ticket_stats(p->engine, &o->tickets);
    return 0;
}

static int report(const struct outcome *o, const struct cli_pairing *pairing)
{
    const struct serve_counts *c = &o->counts;
    return cli_print_json(
        json_pack("{s:i,s:{s:I,s:I,s:I},s:{s:i,s:i,s:i},s:o}", "schema", 1, "requests", "finished",
                  (json_int_t)c->finished, "refused", (json_int_t)c->refused, "cancelled",
                  (json_int_t)c->cancelled, "cleanup", "lanes", (int)o->load.lanes_used, "blocks",
                  (int)o->load.blocks_used, "tickets", (int)(o->tickets.open + o->tickets.claimed),
                  "probes", cli_pairing_json(pairing)),
        0);
}

static int parse(int argc, char **argv, struct args *a, bool *done, struct baton_error *e)
{
    static const struct cli_syntax syntax = {":m:vqh", help, options, parse_option, false};
    int rc = cli_parse(argc, argv, &syntax, &a->common, a, done, e);
    if (rc == 0 && !*done && !a->model)
        rc = base_fail(e, BATON_ERR_USAGE, "serve needs -m MODEL; see `baton serve --help`");
    return rc;
}

int cli_serve(int argc, char **argv)
{
    struct args a = {.lanes = 4, .port = 8000, .max_queue = 256, .kv.lease = 30};
    struct parts p = {0};
    struct outcome o = {0};
    struct baton_error e = {0};
    char name[256];
    sigset_t wanted;
    bool done = false;
    int rc = parse(argc, argv, &a, &done, &e);
    if (rc == 0 && !done) {
        cli_set_verbosity(&a.common);
        default_name(a.model, name, sizeof name);
        a.serve.served_name = a.name ? a.name : name;
        a.serve.version = BATON_VERSION;
        a.serve.port = (uint16_t)a.port;
        a.serve.max_queue = a.max_queue;
        rc = cli_serve_kv_finish(&a.kv, &a.serve, &e);
        if (rc == 0 && a.cpus)
            rc = cli_set_cpus(a.cpus, &e);
        block_signals(&wanted);
        if (rc == 0)
            rc = live(&a, &p, &wanted, &o, &e);
    }
    serve_close(p.serve);
    baton_engine_close(p.engine);
    baton_model_close(p.model);
    base_forget(&a.kv.key, sizeof a.kv.key);
    if (rc)
        return cli_fail(&a.common, &e);
    return !done && a.common.json ? report(&o, &p.pairing) : 0;
}
