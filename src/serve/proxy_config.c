/* SPDX-License-Identifier: Apache-2.0 */
/* Who the members are: the command line's and a config file's. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "serve/proxy_priv.h"

enum { CONFIG_BYTES = 1 << 20 };

/* HOST, HOST:PORT, [ADDRESS]:PORT, of n bytes. */
static bool is_address(const char *s, size_t n)
{
    const char *end = s + n, *bracket = memchr(s, ']', n);
    const char *colon = bracket ? bracket + 1 : memchr(s, ':', n);
    unsigned long port = 0;
    for (const char *c = s; c < end; c++)
        if (*c <= ' ' || *c > '~' || strchr("/?#@\"\\", *c))
            return false;
    if (n == 0 || (*s == '[') != (bracket != NULL))
        return false;
    if (!colon || colon == end)
        return true;
    for (const char *c = colon + 1; c < end && port <= UINT16_MAX; c++)
        port = *c >= '0' && *c <= '9' ? port * 10 + (unsigned long)(*c - '0') : UINT32_MAX;
    return colon > s && *colon == ':' && port > 0 && port <= UINT16_MAX;
}

/* http://HOST[:PORT] and nothing behind it: paths are ours. */
static int add(struct serve_proxy_config *c, enum serve_side side, const char *url,
               const char *what, struct baton_error *e)
{
    size_t n = strlen(url);
    const char *host = !strncmp(url, "http://", 7)    ? url + 7
                       : !strncmp(url, "https://", 8) ? url + 8
                                                      : NULL;
    while (n > 0 && url[n - 1] == '/')
        n--;
    if (!host || n >= SERVE_URL_BYTES || url + n <= host ||
        !is_address(host, (size_t)(url + n - host)))
        return base_fail(e, BATON_ERR_USAGE, "%s: '%.80s' is not http://HOST:PORT", what, url);
    for (size_t i = 0; i < c->n; i++)
        if (c->members[i].side == side && strlen(c->members[i].url) == n &&
            !strncmp(c->members[i].url, url, n))
            return 0;
    if (c->n == SERVE_MAX_MEMBERS)
        return base_fail(e, BATON_ERR_USAGE, "%s: more than %u members", what, SERVE_MAX_MEMBERS);
    c->members[c->n].side = side;
    snprintf(c->members[c->n++].url, SERVE_URL_BYTES, "%.*s", (int)n, url);
    return 0;
}

static int add_list(struct serve_proxy_config *c, enum serve_side side, const json_t *list,
                    const char *path, const char *key, struct baton_error *e)
{
    char what[128];
    snprintf(what, sizeof what, "%.90s: %s", path, key);
    if (!json_is_array(list))
        return base_fail(e, BATON_ERR_USAGE, "%s is no list of URLs", what);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *url = json_string_value(json_array_get(list, i));
        int rc = url ? add(c, side, url, what, e)
                     : base_fail(e, BATON_ERR_USAGE, "%s: item %zu is no string", what, i);
        if (rc)
            return rc;
    }
    return 0;
}

static int take_policy(struct serve_proxy_config *c, const json_t *v, const char *path,
                       struct baton_error *e)
{
    const char *word = json_is_string(v) ? json_string_value(v) : "";
    if (!strcmp(word, "least-loaded"))
        c->policy = SERVE_LEAST_LOADED;
    else if (!strcmp(word, "round-robin"))
        c->policy = SERVE_ROUND_ROBIN;
    else
        return base_fail(e, BATON_ERR_USAGE, "%.90s: policy is none of least-loaded, round-robin",
                         path);
    return 0;
}

static int take(struct serve_proxy_config *c, const char *key, const json_t *v, const json_t *doc,
                const char *path, struct baton_error *e)
{
    if (!strcmp(key, "prefill"))
        return add_list(c, SERVE_SIDE_PREFILL, v, path, key, e);
    if (!strcmp(key, "decode"))
        return add_list(c, SERVE_SIDE_DECODE, v, path, key, e);
    if (!strcmp(key, "policy"))
        return take_policy(c, v, path, e);
    if (!strcmp(key, "min_remote_tokens"))
        return base_json_u32(doc, key, true, 0, UINT32_MAX, &c->min_remote_tokens, path, e);
    return base_fail(e, BATON_ERR_USAGE,
                     "%.90s: no member '%.40s' (prefill, decode, policy, min_remote_tokens)", path,
                     key);
}

int serve_proxy_config_parse(struct serve_proxy_config *c, const char *text, size_t n,
                             const char *path, struct baton_error *e)
{
    json_t *doc = NULL, *v;
    const char *key;
    int rc = base_json_parse(text, n, path, &doc, e);
    if (rc)
        return rc;
    if (!json_is_object(doc))
        rc = base_fail(e, BATON_ERR_USAGE, "%.90s is no JSON object", path);
    json_object_foreach(doc, key, v)
    {
        if (rc == 0)
            rc = take(c, key, v, doc, path, e);
    }
    json_decref(doc);
    return rc;
}

static int load_file(struct serve_proxy_config *c, const char *path, struct baton_error *e)
{
    char *text;
    size_t n;
    int rc = base_stream_read(path, CONFIG_BYTES, &text, &n, e);
    if (rc)
        return rc;
    rc = serve_proxy_config_parse(c, text, n, path, e);
    free(text);
    return rc;
}

int serve_proxy_config_load(struct serve_proxy_config *c, const struct serve_proxy_options *o,
                            struct baton_error *e)
{
    size_t n_decode = 0;
    int rc = 0;
    *c = (struct serve_proxy_config){.policy = SERVE_LEAST_LOADED};
    for (size_t i = 0; rc == 0 && i < o->n_prefill; i++)
        rc = add(c, SERVE_SIDE_PREFILL, o->prefill[i], "--prefill", e);
    for (size_t i = 0; rc == 0 && i < o->n_decode; i++)
        rc = add(c, SERVE_SIDE_DECODE, o->decode[i], "--decode", e);
    if (rc == 0 && o->config)
        rc = load_file(c, o->config, e);
    if (rc)
        return rc;
    if (o->policy != SERVE_POLICY_UNSAID) /* the command line has the last word */
        c->policy = o->policy;
    if (o->min_remote_said)
        c->min_remote_tokens = o->min_remote_tokens;
    for (size_t i = 0; i < c->n; i++)
        n_decode += c->members[i].side == SERVE_SIDE_DECODE;
    if (n_decode == 0)
        return base_fail(e, BATON_ERR_USAGE,
                         "proxy needs a decode server: --decode URL, or `decode` in --config");
    return 0;
}
