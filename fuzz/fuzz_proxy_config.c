/* SPDX-License-Identifier: Apache-2.0 */
/* The proxy's configuration: what is accepted are addresses that a URL can be made of. */
#include <stdlib.h>
#include <string.h>

#include "serve/proxy_priv.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool holds)
{
    if (!holds)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct serve_proxy_config c = {.policy = SERVE_LEAST_LOADED};
    struct baton_error e = {0};
    if (serve_proxy_config_parse(&c, (const char *)data, n, "fuzz", &e)) {
        must(e.text[0] != '\0');
        return 0;
    }
    must(c.n <= SERVE_MAX_MEMBERS && c.policy != SERVE_POLICY_UNSAID);
    for (size_t i = 0; i < c.n; i++) {
        const char *host = strstr(c.members[i].url, "://");
        must(host && host[3] && strlen(c.members[i].url) < SERVE_URL_BYTES);
        must(!strpbrk(host + 3, " /?#@\"\\\r\n"));
        for (size_t k = 0; k < i; k++)
            must(c.members[k].side != c.members[i].side ||
                 strcmp(c.members[k].url, c.members[i].url) != 0);
    }
    return 0;
}
