/* SPDX-License-Identifier: Apache-2.0 */
/* Errors: fill the caller's struct once, where the cause is known. */
#include <stdio.h>
#include <string.h>

#include "base/base.h"

/* A cut text must not end inside a UTF-8 sequence: step back over continuation bytes. */
static void trim_utf8(char *text, size_t cap)
{
    size_t n = strnlen(text, cap);
    if (n + 1 < cap)
        return;
    size_t i = n;
    while (i > 0 && ((unsigned char)text[i - 1] & 0xC0) == 0x80)
        i--;
    if (i > 0 && ((unsigned char)text[i - 1] & 0xC0) == 0xC0)
        text[i - 1] = '\0';
}

static void fill(struct baton_error *e, int code, const char *fmt, va_list ap)
{
    e->code = code;
    vsnprintf(e->text, sizeof e->text, fmt, ap);
    trim_utf8(e->text, sizeof e->text);
}

/* The names are in parentheses because base.h makes macros of them for the analyzer. */
int(base_fail)(struct baton_error *e, int code, const char *fmt, ...)
{
    if (e) {
        va_list ap;
        va_start(ap, fmt);
        fill(e, code, fmt, ap);
        va_end(ap);
    }
    return code;
}

int(base_fail_errno)(struct baton_error *e, int code, int err, const char *fmt, ...)
{
    if (e) {
        va_list ap;
        va_start(ap, fmt);
        fill(e, code, fmt, ap);
        va_end(ap);
        size_t n = strlen(e->text);
        char buf[128];
        snprintf(e->text + n, sizeof e->text - n, ": %s", strerror_r(err, buf, sizeof buf));
    }
    return code;
}

const char *base_code_name(int code)
{
    static const char *const names[] = {"ok",          "usage",       "input",    "io",
                                        "nomem",       "unsupported", "mismatch", "peer",
                                        "timeout",     "cancelled",   "busy",     "device",
                                        "device-lost", "integrity",   "internal", "stale"};
    int i = -code;
    return i >= 0 && i < (int)(sizeof names / sizeof *names) ? names[i] : "unknown";
}

const char *base_shown(char buf[64], const char *s)
{
    size_t i = 0;
    for (; i < 60 && s[i]; i++)
        buf[i] = s[i] >= ' ' && s[i] < 0x7F ? s[i] : '?';
    strcpy(buf + i, s[i] ? "..." : "");
    return buf;
}
