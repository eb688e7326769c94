/* SPDX-License-Identifier: Apache-2.0 */
/* Verdicts of probes, kept from run to run. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "verify/pairing.h"
#include "verify/probe_priv.h"

#define HEAD "baton pairing 1"
#define MOST 4096u /* bytes of a kept verdict */

/* ---- the key -------------------------------------------------------------------------------- */

struct text {
    char *at;
    size_t left;
};

static void put(struct text *t, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void put(struct text *t, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(t->at, t->left, fmt, ap);
    va_end(ap);
    size_t used = n < 0 ? 0 : (size_t)n < t->left ? (size_t)n : t->left - 1;
    t->at += used;
    t->left -= used;
}

/* A file that was written anew is another one. */
static void put_file(struct text *t, const char *path)
{
    struct stat st;
    if (stat(path, &st) == 0 && S_ISREG(st.st_mode))
        put(t, " file %ju %ju %ju %jd.%09ld", (uintmax_t)st.st_dev, (uintmax_t)st.st_ino,
            (uintmax_t)st.st_size, (intmax_t)st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
}

/* What stands behind the ':' of the name and the '=' of a key may be a file. */
static void put_device(struct text *t, const char *device)
{
    char part[600];
    put(t, " device %s", device);
    for (const char *s = device; *s;) {
        size_t n = strcspn(s, ","), skip = strcspn(s, s == device ? ":" : "=");
        if (skip < n && n - skip < sizeof part) {
            memcpy(part, s + skip + 1, n - skip - 1);
            part[n - skip - 1] = '\0';
            put_file(t, part);
        }
        s += n + (s[n] == ',');
    }
}

/* Weights made in memory are what their name says. */
static int put_model(struct text *t, const struct baton_model *bm, struct baton_error *e)
{
    const struct model *m = engine_model(bm);
    struct model_identity id;
    char weights[65], arch[65];
    if (model_is_shape(m)) {
        put(t, " model %s", model_path(m));
        return 0;
    }
    int rc = model_hash(m, 0, false, NULL, NULL, &id, e);
    if (rc)
        return rc;
    base_hex(id.weights, 32, weights);
    base_hex(id.arch, 32, arch);
    put(t, " model %s %s", arch, weights);
    return 0;
}

/* One line. The cpu's instruction set is what emulated devices compute with. */
static int make_key(const struct baton_model *m, const char *device, char key[2048],
                    struct baton_error *e)
{
    struct text t = {key, 2048};
    struct device *cpu = NULL;
    put(&t, "build");
    put_file(&t, "/proc/self/exe");
    put_device(&t, device);
    int rc = device_open("cpu", &cpu, e);
    if (rc)
        return rc;
    put(&t, " numerics %s", device_caps(cpu)->numerics);
    device_close(cpu);
    return put_model(&t, m, e);
}

/* ---- the cache ------------------------------------------------------------------------------ */

/* head, key, verdict, probe, why: a line each. */
static bool read_verdict(char *text, const char *key, struct verify_pairing *out)
{
    char *line[5], *rest = text;
    for (size_t i = 0; i < 5; i++) {
        line[i] = rest;
        rest += strcspn(rest, "\n");
        if (*rest != '\n')
            return false;
        *rest++ = '\0';
    }
    bool failed = !strcmp(line[2], "fail");
    if (strcmp(line[0], HEAD) || strcmp(line[1], key) || (!failed && strcmp(line[2], "pass")))
        return false;
    *out = (struct verify_pairing){.known = true, .cached = true, .failed = failed};
    snprintf(out->probe, sizeof out->probe, "%s", line[3]);
    snprintf(out->why, sizeof out->why, "%s", line[4]);
    return true;
}

static void keep(const char *key, const struct verify_pairing *p)
{
    char path[1024], text[MOST];
    if (!base_cache_path("pairing", key, true, path))
        return;
    int n = snprintf(text, sizeof text, HEAD "\n%s\n%s\n%s\n%s\n", key, p->failed ? "fail" : "pass",
                     p->probe, p->why);
    if (n > 0 && (size_t)n < sizeof text)
        (void)base_file_write(path, text, (size_t)n, NULL); /* what is not kept is run again */
}

int verify_pairing_find(const struct baton_model *m, const char *device, struct verify_pairing *out,
                        struct baton_error *e)
{
    char key[2048], path[1024], *text = NULL;
    *out = (struct verify_pairing){0};
    int rc = make_key(m, device, key, e);
    if (rc)
        return rc;
    if (base_cache_path("pairing", key, false, path) &&
        base_file_read(path, MOST, &text, NULL, NULL) == 0)
        (void)read_verdict(text, key, out);
    free(text);
    return 0;
}

/* The first that fails is told: those with one cause first, those that see everything last. */
static const enum verify_probe order[VERIFY_PROBES] = {
    VERIFY_LANES, VERIFY_PADDING, VERIFY_WINDOW, VERIFY_CAUSALITY, VERIFY_LAYOUT, VERIFY_PRECISION};

int verify_pairing_run(const struct baton_model *m, const char *device, uint32_t threads,
                       struct verify_pairing *out, struct baton_error *e)
{
    char key[2048];
    struct verify_pairing p = {.known = true};
    int rc = make_key(m, device, key, e);
    for (int i = 0; i < VERIFY_PROBES && rc == 0 && !p.failed; i++) {
        struct verify_finding f;
        rc = verify_probe_run(m, device, order[i], threads, &f, e);
        if (rc || f.verdict != VERIFY_PROBE_FAIL)
            continue;
        p.failed = true;
        snprintf(p.probe, sizeof p.probe, "%s", verify_probe_names[order[i]]);
        snprintf(p.why, sizeof p.why, "%s", f.why);
    }
    if (rc)
        return rc;
    keep(key, &p);
    *out = p;
    return 0;
}
