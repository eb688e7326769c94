/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments: text to values, refusing what is not exactly one. */
#include <errno.h>
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "cli/cli.h"

/* strtoull and strtol skip blanks and take signs; a number here starts with its first digit. */
static bool starts_number(const char *s)
{
    return *s >= '0' && *s <= '9';
}

int cli_parse_u64(const char *name, const char *value, uint64_t *out, struct baton_error *e)
{
    char *end;
    errno = 0;
    unsigned long long v = strtoull(value, &end, 10);
    if (errno || !starts_number(value) || *end)
        return base_fail(e, BATON_ERR_USAGE, "%s: '%.60s' is not a whole number", name, value);
    *out = v;
    return 0;
}

int cli_parse_u32(const char *name, const char *value, uint32_t min, uint32_t max, uint32_t *out,
                  struct baton_error *e)
{
    uint64_t v = 0;
    int rc = cli_parse_u64(name, value, &v, e);
    if (rc)
        return rc;
    if (v < min || v > max)
        return base_fail(e, BATON_ERR_USAGE, "%s: %.60s is not in %u..%u", name, value, min, max);
    *out = (uint32_t)v;
    return 0;
}

int cli_parse_bytes(const char *name, const char *value, uint64_t *out, struct baton_error *e)
{
    static const char units[] = "KMGT";
    char *end;
    errno = 0;
    unsigned long long n = strtoull(value, &end, 10);
    bool good = value[0] >= '0' && value[0] <= '9' && errno == 0;
    const char *unit = *end ? strchr(units, *end) : NULL;
    unsigned shift = unit ? 10 * (unsigned)(unit - units + 1) : 0;
    const char *rest = unit ? end + 1 : end;
    good &= !*rest || !strcmp(rest, "B") || (unit && !strcmp(rest, "iB"));
    if (!good || n > UINT64_MAX >> shift)
        return base_fail(e, BATON_ERR_USAGE, "%s: '%.40s' is no size such as 512M or 2G", name,
                         value);
    *out = (uint64_t)n << shift;
    return 0;
}

int cli_parse_f32(const char *name, const char *value, float min, float max, float *out,
                  struct baton_error *e)
{
    char *end;
    float v = strtof(value, &end);
    /* strtof takes blanks, hexadecimal and words as well */
    bool plain = strspn(value, "0123456789.eE+-") == strlen(value) && *value != '+';
    if (!plain || end == value || *end || !isfinite(v))
        return base_fail(e, BATON_ERR_USAGE, "%s: '%.60s' is not a number", name, value);
    if (v < min || v > max)
        return base_fail(e, BATON_ERR_USAGE, "%s: %.60s is not in %g..%g", name, value, (double)min,
                         (double)max);
    *out = v;
    return 0;
}

int cli_parse_ids(const char *name, const char *value, int32_t **ids, size_t *n,
                  struct baton_error *e)
{
    size_t cap = 1;
    for (const char *p = value; *p; p++)
        cap += *p == ',';
    int32_t *v = base_try_alloc(cap, sizeof *v, e);
    if (!v)
        return BATON_ERR_NOMEM;
    size_t k = 0;
    for (const char *p = value;; p++) {
        char *end;
        errno = 0;
        long x = strtol(p, &end, 10);
        if (errno || !starts_number(p + (*p == '-')) || x < INT32_MIN || x > INT32_MAX ||
            (*end && *end != ',')) {
            free(v);
            return base_fail(e, BATON_ERR_USAGE, "%s: item %zu, '%.20s', is not a token id", name,
                             k + 1, p);
        }
        v[k++] = (int32_t)x;
        p = end;
        if (!*p)
            break;
    }
    *ids = v;
    *n = k;
    return 0;
}

int cli_parse_word(const char *name, const char *value, const char *const *words, int *out,
                   struct baton_error *e)
{
    char all[160] = "";
    for (int i = 0; words[i]; i++) {
        if (!strcmp(value, words[i])) {
            *out = i;
            return 0;
        }
        size_t used = strlen(all);
        snprintf(all + used, sizeof all - used, "%s%s", i ? ", " : "", words[i]);
    }
    return base_fail(e, BATON_ERR_USAGE, "%s: '%.60s' is none of %s", name, value, all);
}

int cli_set_cpus(const char *list, struct baton_error *e)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    const char *p = list;
    do {
        char *end;
        unsigned long a = strtoul(p, &end, 10), b = a;
        if (!starts_number(p))
            return base_fail(e, BATON_ERR_USAGE, "--cpus: '%.60s' is not a list such as 0,2-3",
                             list);
        p = end;
        if (*p == '-') {
            b = strtoul(p + 1, &end, 10);
            if (!starts_number(p + 1))
                return base_fail(e, BATON_ERR_USAGE, "--cpus: '%.60s' has no number behind a dash",
                                 list);
            p = end;
        }
        if (b < a || b >= CPU_SETSIZE)
            return base_fail(e, BATON_ERR_USAGE, "--cpus: %lu-%lu is not a range of CPUs", a, b);
        for (unsigned long c = a; c <= b; c++)
            CPU_SET(c, &set);
    } while (*p++ == ',');
    if (p[-1])
        return base_fail(e, BATON_ERR_USAGE, "--cpus: '%.60s' is not a list such as 0,2-3", list);
    if (sched_setaffinity(0, sizeof set, &set))
        return base_fail_errno(e, BATON_ERR_USAGE, errno, "--cpus %.60s", list);
    return 0;
}

int cli_read_all(int fd, size_t limit, char **text, size_t *n, struct baton_error *e)
{
    char *buf = NULL;
    size_t used = 0, cap = 0;
    for (;;) {
        if (used + 1 >= cap) {
            cap = cap ? cap * 2 : 4096;
            char *grown = base_try_realloc(buf, cap, 1, e);
            if (!grown) {
                free(buf);
                return BATON_ERR_NOMEM;
            }
            buf = grown;
        }
        ssize_t k = read(fd, buf + used, cap - used - 1);
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0 || used + (size_t)k > limit) {
            int err = errno;
            free(buf);
            return k < 0 ? base_fail_errno(e, BATON_ERR_IO, err, "reading the prompt")
                         : base_fail(e, BATON_ERR_INPUT, "the prompt is longer than %zu bytes",
                                     limit);
        }
        if (k == 0)
            break;
        used += (size_t)k;
    }
    buf[used] = '\0';
    *text = buf;
    *n = used;
    return 0;
}

bool cli_wants_json(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (!strcmp(argv[i], "--json"))
            return true;
    return false;
}

void cli_set_verbosity(const struct cli_common *c)
{
    base_log_set_level(c->verbosity < 0    ? BASE_LOG_ERROR
                       : c->verbosity == 0 ? BASE_LOG_WARN
                       : c->verbosity == 1 ? BASE_LOG_INFO
                                           : BASE_LOG_DEBUG);
}
