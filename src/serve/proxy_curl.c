/* SPDX-License-Identifier: Apache-2.0 */
/* libcurl at run time. */
#include <dlfcn.h>
#include <string.h>

#include "serve/proxy_priv.h"

int serve_curl_open(struct serve_curl *c, struct baton_error *e)
{
    void *library = dlopen("libcurl.so.4", RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return base_fail(e, BATON_ERR_IO,
                         "the proxy needs libcurl (Debian: libcurl4), which can't be opened: "
                         "%.200s",
                         dlerror());
    const struct {
        const char *name;
        void *slot; /* a pointer to a function */
    } wanted[] = {
#define X(name) {"curl_" #name, &c->name},
        SERVE_CURL(X)
#undef X
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *found = dlsym(library, wanted[i].name);
        if (!found)
            return base_fail(e, BATON_ERR_IO, "libcurl.so.4 is too old: it has no %s",
                             wanted[i].name);
        memcpy(wanted[i].slot, &found, sizeof found);
    }
    if (c->global_init(CURL_GLOBAL_DEFAULT))
        return base_fail(e, BATON_ERR_IO, "libcurl can't start");
    return 0;
}
