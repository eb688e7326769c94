/* SPDX-License-Identifier: Apache-2.0 */
/* Inside baton serve: the options of prefill and decode servers. */
#ifndef CLI_SERVE_PRIV_H
#define CLI_SERVE_PRIV_H

#include "handoff/handoff.h"
#include "serve/serve.h"

enum { SERVE_OPT_KV = 512, SERVE_MAX_ALLOW = 64 };

/* Long options from SERVE_OPT_KV on, to be given to cli_serve_kv_take. */
enum {
    OPT_KV_HOST = SERVE_OPT_KV,
    OPT_KV_PORT,
    OPT_KV_ADVERTISE,
    OPT_KV_ALLOW,
    OPT_KV_KEY,
    OPT_LEASE,
    OPT_ON_FAILURE,
    OPT_DIGEST,
};

struct serve_kv {
    enum serve_role role;
    const char *host, *advertise, *key_file;
    uint32_t port, lease; /* seconds */
    bool port_said, lease_said, failure_said, local_prefill, no_digest;
    const char *allow[SERVE_MAX_ALLOW];
    size_t n_allow;
    uint8_t key[HANDOFF_MAX_KEY];
    size_t key_bytes;
    char listen[300]; /* of a prefill server's engine; "" */
};

int cli_serve_kv_take(struct serve_kv *kv, int opt, const char *value, struct baton_error *e);
/* Refuse what the role has no use for, read the key, and fill the two rooms' options. */
int cli_serve_kv_finish(struct serve_kv *kv, struct serve_options *so, struct baton_error *e);
void cli_serve_kv_engine(const struct serve_kv *kv, struct baton_engine_options *eo);

#endif
