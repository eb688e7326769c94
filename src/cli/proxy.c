/* SPDX-License-Identifier: Apache-2.0 */
/* baton proxy: arguments, and the life of a proxy between signals. */
#include <getopt.h>
#include <jansson.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include "base/base.h"
#include "cli/cli.h"
#include "serve/proxy.h"

static const char help[] =
    "usage: baton proxy --prefill URL... --decode URL... [OPTIONS]\n"
    "\n"
    "One OpenAI API in front of prefill and decode servers that speak vLLM's kv_transfer_params,\n"
    "`baton serve --role prefill|decode` or others. A request goes to a prefill server and then,\n"
    "with the ticket that it answered, to a decode server. What fails before the client has got\n"
    "anything is tried on other servers; afterwards never. / is a page to look at.\n"
    "SIGTERM or Ctrl-C: takes nothing new, finishes what runs and ends; a second one cuts it\n"
    "off.\n"
    "\n"
    "servers\n"
    "  --prefill URL...      http://HOST:PORT or https://HOST:PORT; may be repeated\n"
    "  --decode URL...       the same; at least one\n"
    "  --config FILE         JSON: lists `prefill` and `decode`, `policy`,\n"
    "                        `min_remote_tokens`; read again at SIGHUP. The command line's "
    "servers\n"
    "                        are added to it, its other options come first\n"
    "  --policy POLICY       least-loaded (default): the server with the fewest of this proxy's\n"
    "                        requests; round-robin: each in turn\n"
    "  --min-remote-tokens N shorter prompts are computed on the decode server (default 0); of\n"
    "                        text, four bytes count as a token\n"
    "HTTP\n"
    "  --host ADDRESS        where to listen (default 127.0.0.1)\n"
    "  --port N              (default 8080; 0 = any free one, which is printed)\n"
    "output\n"
    "  --json                one JSON document on stdout when it has ended\n"
    "  -v, -q                more, or fewer, messages; -v shows servers that come and go\n"
    "\n"
    "example\n"
    "  baton serve -m models/gemma3-tiny --role prefill --port 8100 &\n"
    "  baton serve -m models/gemma3-tiny --role decode --port 8200 &\n"
    "  baton proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 &\n"
    "  curl localhost:8080/v1/completions -d '{\"prompt\": \"The capital of France\"}'\n";

enum { OPT_PREFILL = 256, OPT_DECODE, OPT_CONFIG, OPT_POLICY, OPT_LEAST, OPT_HOST, OPT_PORT };

static const struct option options[] = {
    {"prefill", required_argument, NULL, OPT_PREFILL},
    {"decode", required_argument, NULL, OPT_DECODE},
    {"config", required_argument, NULL, OPT_CONFIG},
    {"policy", required_argument, NULL, OPT_POLICY},
    {"min-remote-tokens", required_argument, NULL, OPT_LEAST},
    {"host", required_argument, NULL, OPT_HOST},
    {"port", required_argument, NULL, OPT_PORT},
    {"json", no_argument, NULL, 'j'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

struct args {
    struct cli_common common;
    uint32_t port;
    const char **prefill, **decode; /* room for all of argv */
    struct serve_proxy_options proxy;
};

static int parse_option(void *args, int opt, const char *v, struct baton_error *e)
{
    static const char *const policies[] = {"least-loaded", "round-robin", NULL};
    struct args *a = args;
    struct serve_proxy_options *o = &a->proxy;
    int word = 0, rc;
    switch (opt) {
    case OPT_PREFILL:
        a->prefill[o->n_prefill++] = v;
        return 0;
    case OPT_DECODE:
        a->decode[o->n_decode++] = v;
        return 0;
    case OPT_CONFIG:
        o->config = v;
        return 0;
    case OPT_POLICY:
        rc = cli_parse_word("--policy", v, policies, &word, e);
        o->policy = word ? SERVE_ROUND_ROBIN : SERVE_LEAST_LOADED;
        return rc;
    case OPT_LEAST:
        o->min_remote_said = true;
        return cli_parse_u32("--min-remote-tokens", v, 0, UINT32_MAX, &o->min_remote_tokens, e);
    case OPT_HOST:
        o->host = v;
        return 0;
    case OPT_PORT:
        return cli_parse_u32("--port", v, 0, UINT16_MAX, &a->port, e);
    default:
        return base_fail(e, BATON_ERR_USAGE, "unknown option; see `baton proxy --help`");
    }
}

/* `--prefill A B` becomes `--prefill A --prefill B`. out: room for 2 argc + 1. */
static int spread(int argc, char **argv, char **out)
{
    static char prefill[] = "--prefill", decode[] = "--decode";
    char *list = NULL;
    int n = 0;
    for (int i = 0; i < argc; i++) {
        bool own_value = i > 0 && list && !strcmp(argv[i - 1], list);
        if (argv[i][0] == '-')
            list = !strncmp(argv[i], prefill, sizeof prefill - 1) ? prefill
                   : !strncmp(argv[i], decode, sizeof decode - 1) ? decode
                                                                  : NULL;
        else if (list && !own_value)
            out[n++] = list;
        out[n++] = argv[i];
    }
    out[n] = NULL;
    return n;
}

/* ---- life --------------------------------------------------------------------------------- */

static void block_signals(sigset_t *ends, sigset_t *wanted)
{
    sigemptyset(ends);
    sigaddset(ends, SIGTERM);
    sigaddset(ends, SIGINT);
    *wanted = *ends;
    sigaddset(wanted, SIGHUP);
    pthread_sigmask(SIG_BLOCK, wanted, NULL);
}

static bool signalled_again(void *ends)
{
    const struct timespec now = {0, 0};
    return sigtimedwait(ends, NULL, &now) > 0;
}

/* A request takes a few descriptors, and what a shell allows is often 1024. */
static void raise_descriptors(void)
{
    struct rlimit lim;
    if (getrlimit(RLIMIT_NOFILE, &lim))
        return;
    lim.rlim_cur = lim.rlim_max < 65536 ? lim.rlim_max : 65536;
    setrlimit(RLIMIT_NOFILE, &lim);
}

static void announce(const struct args *a, const struct serve_proxy *p)
{
    const char *host = a->proxy.host ? a->proxy.host : "127.0.0.1";
    bool v6 = strchr(host, ':') != NULL;
    if (a->common.verbosity >= 0)
        fprintf(stderr, "baton: proxy serving on http://%s%s%s:%u\n", v6 ? "[" : "", host,
                v6 ? "]" : "", serve_proxy_port(p));
}

static void reload(const struct args *a, struct serve_proxy *p)
{
    struct baton_error e = {0};
    if (!a->proxy.config)
        fputs("baton: SIGHUP, and there is no --config to read again\n", stderr);
    else if (serve_proxy_reload(p, &e))
        fprintf(stderr, "baton: %s; the servers stay as they were\n", e.text);
    else if (a->common.verbosity >= 0)
        fprintf(stderr, "baton: read %s again\n", a->proxy.config);
}

static int live(const struct args *a, struct serve_proxy_counts *counts, struct baton_error *e)
{
    struct serve_proxy *p = NULL;
    sigset_t ends, wanted;
    int number = 0;
    block_signals(&ends, &wanted);
    raise_descriptors();
    int rc = serve_proxy_open(&a->proxy, &p, e);
    if (rc)
        return rc;
    announce(a, p);
    while (sigwait(&wanted, &number) == 0 && number == SIGHUP)
        reload(a, p);
    serve_proxy_drain(p, signalled_again, &ends);
    serve_proxy_count(p, counts);
    serve_proxy_close(p);
    return 0;
}

static int report(const struct serve_proxy_counts *c)
{
    return cli_print_json(
        json_pack("{s:i,s:{s:I,s:I,s:I,s:I},s:{s:I,s:I,s:I},s:I}", "schema", 1, "requests",
                  "finished", (json_int_t)c->finished, "refused", (json_int_t)c->refused, "failed",
                  (json_int_t)c->failed, "cancelled", (json_int_t)c->cancelled, "prompts", "remote",
                  (json_int_t)c->remote, "local", (json_int_t)c->local, "fallback",
                  (json_int_t)c->fallback, "retries", (json_int_t)c->retries),
        0);
}

static int parse(int argc, char **argv, struct args *a, bool *done, struct baton_error *e)
{
    static const struct cli_syntax syntax = {":vqh", help, options, parse_option, false};
    char **words = base_try_alloc(2 * (size_t)argc + 1, sizeof *words, e);
    a->prefill = base_try_alloc((size_t)argc, sizeof *a->prefill, e);
    a->decode = base_try_alloc((size_t)argc, sizeof *a->decode, e);
    int rc = BATON_ERR_NOMEM;
    if (words && a->prefill && a->decode)
        rc = cli_parse(spread(argc, argv, words), words, &syntax, &a->common, a, done, e);
    free(words);
    return rc;
}

int cli_proxy(int argc, char **argv)
{
    struct args a = {.port = 8080};
    struct serve_proxy_counts counts = {0};
    struct baton_error e = {0};
    bool done = false;
    int rc = parse(argc, argv, &a, &done, &e);
    if (rc == 0 && !done) {
        cli_set_verbosity(&a.common);
        a.proxy.version = BATON_VERSION;
        a.proxy.port = (uint16_t)a.port;
        a.proxy.prefill = a.prefill;
        a.proxy.decode = a.decode;
        rc = live(&a, &counts, &e);
    }
    free(a.prefill);
    free(a.decode);
    if (rc)
        return cli_fail(&a.common, &e);
    return !done && a.common.json ? report(&counts) : 0;
}
