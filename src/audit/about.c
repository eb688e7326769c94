/* SPDX-License-Identifier: Apache-2.0 */
/* The first line of the chain: what is run, on what, from which source. */
#include <gnu/libc-version.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>

#include "audit/audit_priv.h"
#include "base/base.h"

/* ---- command line ------------------------------------------------------------------------- */

/* An argument as it may be published: known paths by their word, other absolute ones as PATH. */
static json_t *public_argument(const char *arg, const struct audit_word *words)
{
    for (; words && words->word; words++)
        if (words->path && !strcmp(arg, words->path))
            return json_string(words->word);
    const char *value = !strncmp(arg, "--", 2) ? strchr(arg, '=') : NULL;
    if (value && (value[1] == '/' || value[1] == '~'))
        return json_sprintf("%.*s=PATH", (int)(value - arg), arg);
    json_t *s = arg[0] == '/' || arg[0] == '~' ? NULL : json_string(arg);
    return s ? s : json_string("PATH");
}

static json_t *argv_json(const struct audit_about *a)
{
    json_t *list = json_array();
    for (int i = 0; i < a->argc; i++)
        json_array_append_new(list, public_argument(a->argv[i], a->words));
    return list;
}

/* ---- host --------------------------------------------------------------------------------- */

/* The value of "key : value" in /proc/cpuinfo and its like; "" where there is none. */
static void proc_value(const char *path, const char *key, char *out, size_t size)
{
    char *text = NULL;
    size_t n = 0;
    out[0] = '\0';
    if (base_file_read(path, 1 << 20, &text, &n, NULL))
        return;
    const char *at = strstr(text, key), *colon = at ? strchr(at, ':') : NULL;
    if (colon) {
        colon += 1 + strspn(colon + 1, " \t");
        snprintf(out, size, "%.*s", (int)strcspn(colon, "\n"), colon);
    }
    free(text);
}

/* The first line of a file of the system, or null. */
static json_t *first_line(const char *path)
{
    char *text = NULL;
    size_t n = 0;
    if (base_file_read(path, 4096, &text, &n, NULL))
        return json_null();
    text[strcspn(text, "\n")] = '\0';
    json_t *s = json_string(text);
    free(text);
    return s ? s : json_null();
}

static json_t *host_json(void)
{
    char cpu[128], memory[64];
    struct utsname u;
    cpu_set_t set;
    CPU_ZERO(&set);
    int cores = sched_getaffinity(0, sizeof set, &set) ? 0 : CPU_COUNT(&set);
    proc_value("/proc/cpuinfo", "model name", cpu, sizeof cpu);
    proc_value("/proc/meminfo", "MemTotal", memory, sizeof memory);
    if (uname(&u))
        memset(&u, 0, sizeof u);
    return json_pack("{s:s,s:i,s:s,s:s,s:s,s:{s:o,s:o},s:n}", "cpu", cpu, "cores", cores, "kernel",
                     u.release, "machine", u.machine, "memory", memory, "cgroup", "cpu",
                     first_line("/sys/fs/cgroup/cpu.max"), "memory",
                     first_line("/sys/fs/cgroup/memory.max"), "exclusive");
}

/* ---- source, binary, model, devices ------------------------------------------------------- */

static json_t *commits_json(const char *commit)
{
    const char dirty[] = "-dirty";
    size_t n = commit ? strlen(commit) : 0, k = strlen(dirty);
    bool is_dirty = n > k && !strcmp(commit + n - k, dirty);
    if (n == 0)
        return json_pack("{s:n,s:n,s:n}", "baseline", "source", "dirty");
    return json_pack("{s:n,s:o,s:b}", "baseline", "source",
                     json_stringn(commit, is_dirty ? n - k : n), "dirty", is_dirty);
}

static int files_json(json_t **out, struct baton_error *e)
{
    struct base_file f = {0};
    char hex[65];
    int rc = base_file_open(&f, "/proc/self/exe", e);
    if (rc)
        return rc;
    audit_hash(f.data, f.size, hex);
    *out = json_pack("[{s:s,s:s,s:I}]", "what", "binary", "sha256", hex, "bytes",
                     (json_int_t)f.size);
    base_file_close(&f);
    return 0;
}

static int model_json(const struct model *m, json_t **out, struct baton_error *e)
{
    struct model_identity id;
    char arch[65], weights[65], tokenizer[65], pin[65];
    const struct model_config *c = model_config_of(m);
    int rc = model_hash(m, 0, false, NULL, NULL, &id, e);
    if (rc)
        return rc;
    base_hex(id.arch, 32, arch);
    base_hex(id.weights, 32, weights);
    base_hex(id.tokenizer, 32, tokenizer);
    base_hex(id.pin, 32, pin);
    *out = json_pack("{s:i,s:i,s:i,s:i,s:{s:s,s:s,s:s},s:s}", "layers", (int)c->n_layers,
                     "kv_heads", (int)c->kv_heads, "head_dim", (int)c->head_dim, "window",
                     (int)c->window, "identity", "arch", arch, "weights", weights, "tokenizer",
                     tokenizer, "pin", pin);
    return 0;
}

static int device_json(const struct audit_device *x, json_t *list, struct baton_error *e)
{
    struct device *d = NULL;
    int rc = device_open(x->name, &d, e);
    if (rc)
        return rc;
    const struct baton_caps *c = device_caps(d);
    json_t *widths = json_array();
    for (int i = 0; i < BATON_MAX_WIDTHS && c->widths[i]; i++)
        json_array_append_new(widths, json_integer(c->widths[i]));
    json_t *o = json_pack("{s:s,s:s,s:s,s:s,s:b,s:b,s:i,s:i,s:o,s:n}", "role", x->role, "name",
                          x->name, "detail", c->detail, "numerics", c->numerics, "emulated",
                          c->emulated, "row_invariant", c->row_invariant, "kv_block",
                          (int)c->kv_block, "max_lanes", (int)c->max_lanes, "widths", widths,
                          "exclusive");
    device_close(d);
    if (json_array_append_new(list, o))
        return base_fail(e, BATON_ERR_NOMEM, "no memory for the evidence");
    return 0;
}

static json_t *limits_json(const char *const *limits)
{
    json_t *list = json_array();
    for (; limits && *limits; limits++)
        json_array_append_new(list, json_string(*limits));
    return list;
}

json_t *audit_begin(const struct audit_about *a, struct baton_error *e)
{
    json_t *files = NULL, *model = json_null(), *devices = json_array();
    char started[32];
    int rc = files_json(&files, e);
    if (rc == 0 && a->model)
        rc = model_json(a->model, &model, e);
    for (const struct audit_device *d = a->devices; d && d->role && rc == 0; d++)
        rc = device_json(d, devices, e);
    if (rc) {
        json_decref(files);
        json_decref(model);
        json_decref(devices);
        return NULL;
    }
    audit_time(started);
    json_t *o = json_pack("{s:s,s:i,s:s,s:o,s:s,s:o,s:{s:s,s:s,s:n,s:n},s:o,s:o,s:o,s:o,s:i,s:o,"
                          "s:n,s:[]}",
                          "kind", "begin", "schema", AUDIT_SCHEMA, "command", a->command, "argv",
                          argv_json(a), "started", started, "commits", commits_json(a->commit),
                          "versions", "baton", a->version, "libc", gnu_get_libc_version(), "sdk",
                          "driver", "host", host_json(), "devices", devices, "model", model,
                          "files", files, "repeats", (int)a->repeats, "limits",
                          limits_json(a->limits), "supersedes", "known_failures");
    if (o && a->more)
        json_object_update_missing(o, a->more);
    if (!o)
        base_fail(e, BATON_ERR_NOMEM, "no memory for the evidence");
    return o;
}
