/* SPDX-License-Identifier: Apache-2.0 */
/* baton serve: what prefill and decode servers are told about the way between them. */
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "cli/cli.h"
#include "cli/serve_priv.h"

static int add_allowed(struct serve_kv *kv, const char *value, struct baton_error *e)
{
    if (kv->n_allow == SERVE_MAX_ALLOW)
        return base_fail(e, BATON_ERR_USAGE, "--kv-allow: at most %d can be given",
                         SERVE_MAX_ALLOW);
    kv->allow[kv->n_allow++] = value;
    return 0;
}

static int take_switch(const char *name, const char *value, const char *const *words, bool *second,
                       struct baton_error *e)
{
    int word = 0;
    int rc = cli_parse_word(name, value, words, &word, e);
    *second = word == 1;
    return rc;
}

int cli_serve_kv_take(struct serve_kv *kv, int opt, const char *v, struct baton_error *e)
{
    static const char *const failure[] = {"fail", "local-prefill", NULL};
    static const char *const digest[] = {"on", "off", NULL};
    switch (opt) {
    case OPT_KV_HOST:
        kv->host = v;
        return 0;
    case OPT_KV_PORT:
        kv->port_said = true;
        return cli_parse_u32("--kv-port", v, 0, UINT16_MAX, &kv->port, e);
    case OPT_KV_ADVERTISE:
        kv->advertise = v;
        return 0;
    case OPT_KV_ALLOW:
        return add_allowed(kv, v, e);
    case OPT_KV_KEY:
        kv->key_file = v;
        return 0;
    case OPT_LEASE:
        kv->lease_said = true;
        return cli_parse_u32("--lease", v, 1, 3600, &kv->lease, e);
    case OPT_ON_FAILURE:
        kv->failure_said = true;
        return take_switch("--on-handoff-failure", v, failure, &kv->local_prefill, e);
    case OPT_DIGEST:
        return take_switch("--digest", v, digest, &kv->no_digest, e);
    default:
        return base_fail(e, BATON_ERR_USAGE, "unknown option; see `baton serve --help`");
    }
}

static int check_role(const struct serve_kv *kv, struct baton_error *e)
{
    const struct {
        bool said;
        const char *name;
        bool prefill, decode;
    } flags[] = {
        {kv->host != NULL, "--kv-host", true, false},
        {kv->port_said, "--kv-port", true, false},
        {kv->advertise != NULL, "--kv-advertise", true, false},
        {kv->n_allow > 0, "--kv-allow", false, true},
        {kv->failure_said, "--on-handoff-failure", false, true},
        {kv->key_file != NULL, "--kv-key-file", true, true},
        {kv->lease_said, "--lease", true, true},
        {kv->no_digest, "--digest", true, true},
    };
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
        bool fits = kv->role == SERVE_PREFILL ? flags[i].prefill
                                              : kv->role == SERVE_DECODE && flags[i].decode;
        if (flags[i].said && !fits)
            return base_fail(e, BATON_ERR_USAGE, "%s is for --role %s%s%s", flags[i].name,
                             flags[i].prefill ? "prefill" : "",
                             flags[i].prefill && flags[i].decode ? " and " : "",
                             flags[i].decode ? "decode" : "");
    }
    return 0;
}

/* An address of all interfaces is none that a decode server could connect to. */
static int check_prefill(const struct serve_kv *kv, const char *host, struct baton_error *e)
{
    if (!serve_host_local(host) && !kv->key_file)
        return base_fail(e, BATON_ERR_USAGE,
                         "--kv-host '%.80s' can be reached from other machines: --kv-key-file is "
                         "needed",
                         host);
    if ((!strcmp(host, "0.0.0.0") || !strcmp(host, "::")) && !kv->advertise)
        return base_fail(e, BATON_ERR_USAGE,
                         "--kv-host %s needs --kv-advertise HOST:PORT: which of this machine's "
                         "addresses are decode servers to connect to?",
                         host);
    return 0;
}

static int listen_address(struct serve_kv *kv, struct baton_error *e)
{
    const char *host = kv->host ? kv->host : "127.0.0.1";
    bool v6 = strchr(host, ':') != NULL;
    int n = snprintf(kv->listen, sizeof kv->listen, "%s%s%s:%u", v6 ? "[" : "", host, v6 ? "]" : "",
                     kv->port);
    if (n < 0 || (size_t)n >= sizeof kv->listen)
        return base_fail(e, BATON_ERR_USAGE, "--kv-host: the name is too long");
    return check_prefill(kv, host, e);
}

int cli_serve_kv_finish(struct serve_kv *kv, struct serve_options *so, struct baton_error *e)
{
    int rc = check_role(kv, e);
    if (rc == 0 && kv->role == SERVE_PREFILL)
        rc = listen_address(kv, e);
    if (rc == 0 && kv->key_file)
        rc = handoff_key_read(kv->key_file, kv->key, &kv->key_bytes, e);
    so->role = kv->role;
    so->kv_advertise = kv->advertise;
    so->kv_allow = kv->allow;
    so->n_kv_allow = kv->n_allow;
    so->kv_keyed = kv->key_bytes > 0;
    so->lease_ns = kv->lease * 1000000000ull;
    so->local_prefill = kv->local_prefill;
    return rc;
}

void cli_serve_kv_engine(const struct serve_kv *kv, struct baton_engine_options *eo)
{
    if (kv->role == SERVE_BOTH)
        return;
    eo->role = kv->role == SERVE_PREFILL ? BATON_PRODUCER : BATON_CONSUMER;
    eo->no_peer = true;
    eo->listen = kv->listen[0] ? kv->listen : NULL;
    eo->key = kv->key_bytes ? kv->key : NULL;
    eo->key_bytes = kv->key_bytes;
    eo->lease_ns = kv->lease * 1000000000ull;
    eo->no_digest = kv->no_digest;
}
