/* SPDX-License-Identifier: Apache-2.0 */
/* Log lines on stderr. */
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#include "base/base.h"

static _Atomic int log_level = BASE_LOG_WARN;

void base_log_set_level(enum base_log_level level)
{
    atomic_store_explicit(&log_level, (int)level, memory_order_relaxed);
}

void base_log(enum base_log_level level, const char *fmt, ...)
{
    static const char *const names[] = {"error", "warn", "info", "debug"};
    if ((int)level > atomic_load_explicit(&log_level, memory_order_relaxed))
        return;
    char line[1024];
    int saved = errno; /* a log line between a call and its errno must not change it */
    uint64_t us = base_now_ns() / 1000u;
    int n = snprintf(line, sizeof line,
                     "[%llu.%06llu] baton[%ld] %s: ", (unsigned long long)(us / 1000000u),
                     (unsigned long long)(us % 1000000u), (long)getpid(), names[level]);
    va_list ap;
    va_start(ap, fmt);
    int m = vsnprintf(line + n, sizeof line - (size_t)n, fmt, ap);
    va_end(ap);
    size_t len = (size_t)n + (m > 0 ? (size_t)m : 0);
    if (len > sizeof line - 1)
        len = sizeof line - 1; /* cut; its last byte becomes the newline */
    line[len] = '\n';
    /* one write, so that lines of several processes stay whole */
    ssize_t done = write(STDERR_FILENO, line, len + 1);
    (void)done;
    errno = saved;
}
