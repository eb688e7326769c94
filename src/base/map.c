/* SPDX-License-Identifier: Apache-2.0 */
/* Large anonymous memory, and how much of it this process may still have. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/base.h"

#define HUGE_BYTES ((size_t)2 << 20)

/* Both calls round in the same way, so that the caller need not remember the rounded size. */
static bool rounded(size_t bytes, size_t *out)
{
    size_t unit = bytes >= HUGE_BYTES ? HUGE_BYTES : (size_t)sysconf(_SC_PAGESIZE), sum;
    if (!base_add(bytes ? bytes : 1, unit - 1, &sum) || sum > PTRDIFF_MAX)
        return false;
    *out = sum / unit * unit;
    return true;
}

/* mmap aligns to pages only: ask for 2 MiB more and give both ends back. */
static void *map_aligned(size_t size, int flags)
{
    uint8_t *p = mmap(NULL, size + HUGE_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    size_t head = (HUGE_BYTES - (uintptr_t)p % HUGE_BYTES) % HUGE_BYTES;
    if (head)
        munmap(p, head);
    if (HUGE_BYTES - head)
        munmap(p + head + size, HUGE_BYTES - head);
    return p + head;
}

void *base_map_alloc(size_t bytes, bool shared, struct baton_error *e)
{
    size_t size;
    uint64_t available = base_memory_available();
    if (!rounded(bytes, &size) || (available > 0 && size > available)) {
        base_fail(e, BATON_ERR_NOMEM, "no memory: %zu bytes asked, %" PRIu64 " available", bytes,
                  available);
        return NULL;
    }
    int flags = MAP_ANONYMOUS | MAP_NORESERVE | (shared ? MAP_SHARED : MAP_PRIVATE);
    void *p;
    if (size >= HUGE_BYTES) {
        p = map_aligned(size, flags);
    } else {
        p = mmap(NULL, size, PROT_READ | PROT_WRITE, flags, -1, 0);
        p = p == MAP_FAILED ? NULL : p;
    }
    if (!p) {
        int err = errno;
        base_fail_errno(e, BATON_ERR_NOMEM, err,
                        "no memory: %zu bytes asked, %" PRIu64 " available", bytes, available);
        return NULL;
    }
    if (size >= HUGE_BYTES)
        madvise(p, size, MADV_HUGEPAGE); /* advice: a kernel without huge pages is fine */
    return p;
}

void base_map_free(void *p, size_t bytes)
{
    size_t size;
    if (p && rounded(bytes, &size))
        munmap(p, size);
}

/* The number behind `key` at the start of a line, or `missing`. */
static uint64_t field(const char *text, const char *key, uint64_t missing)
{
    size_t n = strlen(key);
    for (const char *p = text; p && *p;) {
        if (strncmp(p, key, n) == 0 && (p[n] == ':' || p[n] == ' '))
            return strtoull(p + n + 1, NULL, 10);
        p = strchr(p, '\n');
        p = p ? p + 1 : NULL;
    }
    return missing;
}

static char *slurp(const char *dir, const char *name)
{
    char path[1024];
    char *text = NULL;
    int n = snprintf(path, sizeof path, "%s%s", dir, name);
    if (n < 0 || (size_t)n >= sizeof path)
        return NULL;
    return base_file_read(path, (size_t)1 << 20, &text, NULL, NULL) == 0 ? text : NULL;
}

static uint64_t number_in(const char *dir, const char *name, uint64_t missing)
{
    char *text = slurp(dir, name);
    /* v2 says "max" where there is no limit */
    uint64_t v = text && text[0] >= '0' && text[0] <= '9' ? strtoull(text, NULL, 10) : missing;
    free(text);
    return v;
}

/* What one control group leaves: limit - usage, where file pages count as free, since the kernel
 * takes them back before it refuses. */
static uint64_t group_leaves(const char *dir, bool v2)
{
    uint64_t limit = number_in(dir, v2 ? "/memory.max" : "/memory.limit_in_bytes", UINT64_MAX);
    uint64_t usage = number_in(dir, v2 ? "/memory.current" : "/memory.usage_in_bytes", 0);
    if (limit == UINT64_MAX)
        return UINT64_MAX;
    char *stat = slurp(dir, "/memory.stat");
    uint64_t files = field(stat, v2 ? "inactive_file" : "total_inactive_file", 0) +
                     field(stat, v2 ? "active_file" : "total_active_file", 0);
    free(stat);
    usage = usage > files ? usage - files : 0;
    return limit > usage ? limit - usage : 1; /* 0 would read as unknown */
}

/* Limits bind at every level, so walk from the own group up to the mount. Inside a container the
 * path may name a folder that is not mounted: missing levels are no limit. */
static uint64_t walk_groups(const char *mount, const char *path, bool v2)
{
    char dir[900];
    uint64_t least = UINT64_MAX;
    int n = snprintf(dir, sizeof dir, "%s%s", mount, path);
    if (n < 0 || (size_t)n >= sizeof dir)
        return least;
    for (;;) {
        uint64_t leaves = group_leaves(dir, v2);
        least = leaves < least ? leaves : least;
        char *slash = strrchr(dir, '/');
        if (strlen(dir) <= strlen(mount) || !slash)
            return least;
        *slash = '\0';
    }
}

/* /proc/self/cgroup: "0::/path" for v2, "5:memory:/path" or "5:cpu,memory:/path" for v1. */
static uint64_t cgroup_leaves(void)
{
    uint64_t least = UINT64_MAX;
    char *text = slurp("/proc/self/cgroup", ""), *save = NULL;
    for (char *line = text ? strtok_r(text, "\n", &save) : NULL; line;
         line = strtok_r(NULL, "\n", &save)) {
        char *names = strchr(line, ':'), *path = names ? strchr(names + 1, ':') : NULL;
        if (!path)
            continue;
        *path++ = '\0';
        bool v2 = names[1] == '\0';
        if (!v2 && !strstr(names + 1, "memory"))
            continue;
        uint64_t leaves = walk_groups(v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory", path, v2);
        least = leaves < least ? leaves : least;
    }
    free(text);
    return least;
}

uint64_t base_memory_available(void)
{
    char *text = slurp("/proc/meminfo", "");
    uint64_t kib = field(text, "MemAvailable", 0), group = cgroup_leaves();
    free(text);
    uint64_t machine = kib ? kib * 1024u : UINT64_MAX, least = machine < group ? machine : group;
    return least == UINT64_MAX ? 0 : least;
}

void base_memory_used(uint64_t *peak_rss, uint64_t *private_bytes)
{
    char *status = slurp("/proc/self/status", ""), *maps = slurp("/proc/self/smaps_rollup", "");
    if (peak_rss)
        *peak_rss = field(status, "VmHWM", 0) * 1024u;
    /* after a fork RssAnon counts pages that both processes share; Private_Dirty does not */
    if (private_bytes)
        *private_bytes = (maps ? field(maps, "Private_Dirty", 0) : field(status, "RssAnon", 0)) *
                         1024u;
    free(status);
    free(maps);
}
