/* SPDX-License-Identifier: Apache-2.0 */
/* Where what can be computed again is kept from run to run. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/base.h"

static void make_folder(const char *path)
{
    char part[1024];
    for (size_t i = 1; i < sizeof part && path[i - 1]; i++) {
        if (path[i] && path[i] != '/')
            continue;
        memcpy(part, path, i);
        part[i] = '\0';
        (void)mkdir(part, 0700); /* what cannot be made is noticed by whoever writes into it */
    }
}

bool base_cache_path(const char *kind, const char *key, bool make, char out[1024])
{
    char folder[900], name[33];
    uint8_t digest[32];
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    int n = -1;
    if (xdg && xdg[0] == '/')
        n = snprintf(folder, sizeof folder, "%s/baton", xdg);
    else if (home && home[0] == '/')
        n = snprintf(folder, sizeof folder, "%s/.cache/baton", home);
    if (n < 0 || (size_t)n >= sizeof folder)
        return false;
    if (make)
        make_folder(folder);
    base_sha256(key, strlen(key), digest);
    base_hex(digest, 16, name);
    snprintf(out, 1024, "%s/%s-%s", folder, kind, name);
    return true;
}
