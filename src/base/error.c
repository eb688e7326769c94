/* SPDX-License-Identifier: Apache-2.0 */
/* Errors: fill the caller's struct once, where the cause is known. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"

/* Bytes of the well-formed UTF-8 sequence at s, 0 where there is none (Unicode 15, table 3-7). */
static size_t sequence(const unsigned char *s)
{
    unsigned char a = s[0];
    size_t n = a < 0x80 ? 1 : a >= 0xC2 && a < 0xE0 ? 2 : (a & 0xF0) == 0xE0 ? 3 : 4;
    if ((a >= 0x80 && a < 0xC2) || a > 0xF4)
        return 0;
    for (size_t i = 1; i < n; i++)
        if ((s[i] & 0xC0) != 0x80)
            return 0;
    bool overlong = (a == 0xE0 && s[1] < 0xA0) || (a == 0xF0 && s[1] < 0x90);
    bool beyond = (a == 0xED && s[1] > 0x9F) || (a == 0xF4 && s[1] > 0x8F);
    return overlong || beyond ? 0 : n;
}

/* Messages quote arguments, paths and files: whatever those hold, a message is one line of UTF-8
 * that does nothing to a terminal and that JSON can carry. */
static void clean(char *text)
{
    for (unsigned char *s = (unsigned char *)text; *s;) {
        size_t n = sequence(s);
        bool control = *s < 0x20 || *s == 0x7F || (*s == 0xC2 && s[1] < 0xA0);
        if (n == 0 || control) {
            *s = '?';
            n = 1;
        }
        s += n;
    }
}

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
    clean(e->text);
}

/* Where the process or the host has run out of something, no file is to blame. */
static int errno_code(int code, int err)
{
    bool out = err == EMFILE || err == ENFILE || err == ENOMEM;
    return code == BATON_ERR_IO && out ? BATON_ERR_NOMEM : code;
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
    code = errno_code(code, err);
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
