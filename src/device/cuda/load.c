/* SPDX-License-Identifier: Apache-2.0 */
/* The main binary's side of the cuda device: finds its library and forwards to it.
 *
 * The library is looked for only when the device is asked for, never before a fork that computes:
 * a process that has spoken to the driver cannot share that with a child. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "device/device_priv.h"

#define NAME "libbaton_cuda.so"

/* Candidates in order; false after the last. `beside` is the executable's folder. */
static bool candidate(unsigned i, const char *beside, char *path, size_t size)
{
    static const char *const folders[] = {
        "", "src/device/", "../src/device/", "../../src/device/", "../lib/", "../lib/baton/"};
    if (i < sizeof folders / sizeof *folders)
        return snprintf(path, size, "%s/%s" NAME, beside, folders[i]) < (int)size;
    return i == sizeof folders / sizeof *folders && snprintf(path, size, NAME) < (int)size;
}

static void find_folder(char *out, size_t size)
{
    ssize_t n = readlink("/proc/self/exe", out, size - 1);
    out[n > 0 ? n : 0] = '\0';
    char *slash = strrchr(out, '/');
    if (slash)
        *slash = '\0';
    else
        snprintf(out, size, ".");
}

/* The first file that is there decides: a broken library is told, not passed over. */
static void *open_library(char why[128])
{
    char beside[1024], path[1200];
    const char *given = getenv("BATON_CUDA_LIBRARY");
    find_folder(beside, sizeof beside);
    if (given && *given) {
        void *h = dlopen(given, RTLD_NOW | RTLD_LOCAL);
        if (!h)
            snprintf(why, 128, "$BATON_CUDA_LIBRARY: %.100s", dlerror());
        return h;
    }
    for (unsigned i = 0; candidate(i, beside, path, sizeof path); i++) {
        if (strchr(path, '/') && access(path, F_OK))
            continue;
        void *h = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (h || strchr(path, '/')) {
            if (!h)
                snprintf(why, 128, "%.120s", dlerror());
            return h;
        }
    }
    snprintf(why, 128,
             "no " NAME " beside the executable, in $BATON_CUDA_LIBRARY or the system's "
             "path");
    return NULL;
}

const struct device_library *device_cuda_library(char why[128])
{
    const struct device_library *(*entry)(void);
    void *h = open_library(why);
    if (!h)
        return NULL;
    void *symbol = dlsym(h, DEVICE_LIBRARY_SYMBOL);
    memcpy(&entry, &symbol, sizeof entry);
    const struct device_library *l = symbol ? entry() : NULL;
    if (l && l->version == DEVICE_LIBRARY_VERSION && l->struct_size == sizeof *l &&
        l->impl_size == sizeof *l->impl)
        return l; /* stays open: its code may run until the process ends */
    snprintf(why, 128, NAME " is of version %u, this program wants %u", l ? l->version : 0,
             DEVICE_LIBRARY_VERSION);
    dlclose(h);
    return NULL;
}

static void load_probe(struct baton_caps *caps, char why[128])
{
    *caps = (struct baton_caps){.struct_size = sizeof *caps, .name = "cuda"};
    const struct device_library *l = device_cuda_library(why);
    if (l)
        l->impl->probe(caps, why);
}

static int load_open(const struct device_arg *args, unsigned n_args, struct device **out,
                     struct baton_error *e)
{
    static const char *const keys[] = {"card", "kv-dtype", NULL};
    char why[128] = "";
    int rc = device_arg_check("cuda", args, n_args, keys, e);
    for (unsigned i = 0; rc == 0 && i < n_args; i++)
        if (!strcmp(args[i].key, "kv-dtype") && strcmp(args[i].value, "bf16"))
            rc = base_fail(e, BATON_ERR_UNSUPPORTED,
                           "device cuda keeps its KV cache in bf16, not %s", args[i].value);
    if (rc)
        return rc;
    const struct device_library *l = device_cuda_library(why);
    if (!l)
        return base_fail(e, BATON_ERR_DEVICE, "device cuda is absent: %s", why);
    return l->impl->open(args, n_args, out, e);
}

/* Everything else is called through the opened device's own table. */
const struct device_impl device_cuda = {
    .name = "cuda",
    .probe = load_probe,
    .open = load_open,
    .after_fork = true,
    .numbered = true,
};
