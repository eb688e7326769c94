/* SPDX-License-Identifier: Apache-2.0 */
/* With whom a request may make this server connect. */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "serve/serve_priv.h"

/* The first `bits` of an address, IPv4 as ::ffff:a.b.c.d, or a name. */
struct net {
    uint8_t address[16];
    unsigned bits;
    const char *name; /* NULL: a network */
};

struct serve_allow {
    char *text; /* what the names point into */
    size_t n;
    struct net nets[];
};

static const char *const local[] = {"127.0.0.0/8", "::1", "localhost"};

/* How many leading bits of `out` are no part of the address as it was written; -1: none. */
static int parse_address(const char *text, uint8_t out[16])
{
    static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};
    memcpy(out, mapped, sizeof mapped);
    if (inet_pton(AF_INET, text, out + 12) == 1)
        return 96;
    return inet_pton(AF_INET6, text, out) == 1 ? 0 : -1;
}

static bool inside(const uint8_t address[16], const struct net *n)
{
    unsigned whole = n->bits / 8, rest = n->bits % 8;
    uint8_t mask = (uint8_t)(0xff00 >> rest);
    return !memcmp(address, n->address, whole) &&
           (!rest || !((address[whole] ^ n->address[whole]) & mask));
}

static bool is_name(const char *text)
{
    size_t n = strlen(text);
    return n > 0 && n < 254 &&
           strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._") == n &&
           strspn(text, "0123456789.") < n;
}

/* Cuts `text` at its slash. */
static int parse(char *text, struct net *n, struct baton_error *e)
{
    char *slash = strchr(text, '/'), *end = NULL;
    unsigned long bits = 0;
    if (slash) {
        *slash = '\0';
        bits = strtoul(slash + 1, &end, 10);
    }
    int skipped = parse_address(text, n->address);
    bool plain = !slash || (slash[1] >= '0' && slash[1] <= '9' && !*end);
    if (skipped >= 0 && plain && bits <= 128u - (unsigned)skipped) {
        n->bits = slash ? (unsigned)bits + (unsigned)skipped : 128;
        return 0;
    }
    if (skipped >= 0 || slash || !is_name(text))
        return base_fail(e, BATON_ERR_USAGE,
                         "--kv-allow: '%.80s' is no network such as 10.0.0.0/8, no address and no "
                         "host name",
                         text);
    n->name = text;
    return 0;
}

static bool net_local(const struct net *n)
{
    uint8_t loop4[16], loop6[16];
    parse_address("127.0.0.0", loop4);
    parse_address("::1", loop6);
    if (n->name)
        return !strcasecmp(n->name, "localhost");
    return n->bits == 128 && !memcmp(n->address, loop6, 16)
               ? true
               : n->bits >= 104 && !memcmp(n->address, loop4, 13);
}

bool serve_host_local(const char *host)
{
    struct net n = {.bits = 128};
    if (parse_address(host, n.address) < 0)
        n.name = host;
    return net_local(&n);
}

static int parse_all(struct serve_allow *a, const char *const *list, size_t n,
                     struct baton_error *e)
{
    char *at = a->text;
    for (size_t i = 0; i < n; i++) {
        size_t size = strlen(list[i]) + 1;
        memcpy(at, list[i], size);
        int rc = parse(at, &a->nets[i], e);
        if (rc)
            return rc;
        at += size;
    }
    a->n = n;
    return 0;
}

int serve_allow_open(const struct serve_options *o, struct serve_allow **out, struct baton_error *e)
{
    const char *const *list = o->n_kv_allow ? o->kv_allow : local;
    size_t n = o->n_kv_allow ? o->n_kv_allow : sizeof local / sizeof *local, size = 0;
    for (size_t i = 0; i < n; i++)
        size += strlen(list[i]) + 1;
    struct serve_allow *a = base_try_alloc(1, sizeof *a + n * sizeof *a->nets, e);
    if (!a)
        return BATON_ERR_NOMEM;
    a->text = base_try_alloc(size, 1, e);
    int rc = a->text ? parse_all(a, list, n, e) : BATON_ERR_NOMEM;
    for (size_t i = 0; rc == 0 && i < n; i++)
        if (!o->kv_keyed && !net_local(&a->nets[i]))
            rc = base_fail(e, BATON_ERR_USAGE,
                           "--kv-allow: '%.80s' reaches other machines: --kv-key-file is needed",
                           list[i]);
    if (rc) {
        serve_allow_close(a);
        return rc;
    }
    *out = a;
    return 0;
}

void serve_allow_close(struct serve_allow *a)
{
    if (!a)
        return;
    free(a->text);
    free(a);
}

bool serve_allowed(const struct serve_allow *a, const char *host)
{
    uint8_t address[16];
    bool numeric = parse_address(host, address) >= 0;
    for (size_t i = 0; i < a->n; i++) {
        const struct net *n = &a->nets[i];
        if (numeric ? !n->name && inside(address, n) : n->name && !strcasecmp(n->name, host))
            return true;
    }
    return false;
}

void serve_address(const char *host, uint16_t port, char *out, size_t size)
{
    bool v6 = strchr(host, ':') != NULL;
    snprintf(out, size, "%s%s%s:%u", v6 ? "[" : "", host, v6 ? "]" : "", port);
}
