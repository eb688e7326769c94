/* SPDX-License-Identifier: Apache-2.0 */
/* baton audit --sensitive: an evidence folder, what git tracks here, or what was added since a
 * commit. */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "audit/sensitive.h"
#include "base/base.h"
#include "cli/audit_priv.h"

extern char **environ;

enum { OUTPUT_MOST = 1 << 30 };

/* ---- git ---------------------------------------------------------------------------------- */

static int spawn(const char *const *argv, int to, pid_t *pid, struct baton_error *e)
{
    posix_spawn_file_actions_t actions;
    if (posix_spawn_file_actions_init(&actions))
        return base_fail(e, BATON_ERR_NOMEM, "no memory to run %s", argv[0]);
    int rc = posix_spawn_file_actions_adddup2(&actions, to, STDOUT_FILENO);
    if (rc == 0)
        rc = posix_spawnp(pid, argv[0], &actions, NULL, (char *const *)(uintptr_t)argv, environ);
    posix_spawn_file_actions_destroy(&actions);
    return rc ? base_fail_errno(e, BATON_ERR_IO, rc, "%s", argv[0]) : 0;
}

/* What git says of the folder that we are in; free(). */
static int git(const char *const *argv, char **text, size_t *n, struct baton_error *e)
{
    int ends[2], status = 0;
    pid_t pid = 0;
    if (pipe2(ends, O_CLOEXEC))
        return base_fail_errno(e, BATON_ERR_IO, errno, "no pipe from git");
    int rc = spawn(argv, ends[1], &pid, e);
    close(ends[1]);
    if (rc == 0) {
        if (cli_read_all(ends[0], OUTPUT_MOST, text, n, NULL))
            rc = base_fail(e, BATON_ERR_IO, "git %s says more than can be read", argv[1]);
        close(ends[0]); /* what still writes then ends */
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
            continue;
        if (rc == 0 && (!WIFEXITED(status) || WEXITSTATUS(status))) {
            free(*text);
            *text = NULL;
            rc = base_fail(e, BATON_ERR_INPUT, "git %s %s: it failed, and says why above", argv[1],
                           argv[2]);
        }
        return rc;
    }
    close(ends[0]);
    return rc;
}

/* Search all files of a list that git ended with NULs. */
static int search_listed(struct audit_search *s, const char *const *argv, struct baton_error *e)
{
    char *names = NULL;
    size_t n = 0;
    int rc = git(argv, &names, &n, e);
    for (size_t at = 0; rc == 0 && at < n; at += strlen(names + at) + 1)
        if (names[at] && faccessat(AT_FDCWD, names + at, F_OK, AT_SYMLINK_NOFOLLOW) ==
                             0) /* else it is deleted */
            audit_search_file(s, names + at, names + at);
    free(names);
    return rc;
}

static int search_tree(struct audit_search *s, struct baton_error *e)
{
    static const char *const argv[] = {"git",      "ls-files",           "-z", "--cached",
                                       "--others", "--exclude-standard", NULL};
    return search_listed(s, argv, e);
}

/* ---- what was added ----------------------------------------------------------------------- */

/* A hunk's head, "@@ -a,b +c,d @@": c, b and d. A number that is not there is 1. */
static bool hunk(const char *line, unsigned long *first, unsigned long *less, unsigned long *more)
{
    char *end;
    if (strncmp(line, "@@ -", 4))
        return false;
    strtoul(line + 4, &end, 10);
    *less = *end == ',' ? strtoul(end + 1, &end, 10) : 1;
    if (strncmp(end, " +", 2))
        return false;
    *first = strtoul(end + 2, &end, 10);
    *more = *end == ',' ? strtoul(end + 1, &end, 10) : 1;
    return true;
}

/* Lines that begin with '+', without it, one after another in place; returns their length. */
static size_t take_added(char *lines, size_t n)
{
    size_t kept = 0;
    for (size_t at = 0; at < n;) {
        const char *end = memchr(lines + at, '\n', n - at);
        size_t length = end ? (size_t)(end - lines) - at + 1 : n - at;
        if (lines[at] == '+') {
            memmove(lines + kept, lines + at + 1, length - 1);
            kept += length - 1;
        }
        at += length;
    }
    return kept;
}

/* The bytes of `count` lines at most; "\ No newline at end of file" is none of them. */
static size_t span_of(const char *lines, size_t n, unsigned long count)
{
    size_t at = 0;
    while (at < n && (count || lines[at] == '\\')) {
        count -= lines[at] != '\\';
        const char *end = memchr(lines + at, '\n', n - at);
        at = end ? (size_t)(end - lines) + 1 : n;
    }
    return at;
}

/* What git wrote for a name with quotes or control characters, as the name; in place. */
static void unquote(char *s)
{
    static const char letters[] = "abtnvfr", meant[] = "\a\b\t\n\v\f\r";
    char *to = s;
    for (s += *s == '"'; *s && *s != '"'; s++) {
        const char *letter = NULL;
        if (*s != '\\' || !s[1]) {
            *to++ = *s;
        } else if (*++s >= '0' && *s <= '3' && s[1] && s[2]) {
            *to++ = (char)((s[0] - '0') << 6 | (s[1] - '0') << 3 | (s[2] - '0'));
            s += 2;
        } else {
            letter = strchr(letters, *s);
            *to++ = letter ? meant[letter - letters] : *s;
        }
    }
    *to = '\0';
}

/* The file's name of a line "+++ b/NAME", where a tab follows a name with blanks. */
static void take_name(char *name, size_t size, char *line)
{
    if (*line == '"')
        unquote(line);
    else
        line[strcspn(line, "\t")] = '\0';
    snprintf(name, size, "%s", strncmp(line, "b/", 2) ? line : line + 2);
}

/* A diff without context. Inside a hunk its lines are counted, so that none of them can pass for a
 * file's name. Of a file nothing is searched after a hunk that has a NUL. */
static void search_diff(struct audit_search *s, char *diff, size_t n)
{
    char name[4096] = "";
    bool binary = false;
    for (size_t at = 0; at < n;) {
        char *line = diff + at, *end = memchr(line, '\n', n - at);
        size_t length = end ? (size_t)(end - line) : n - at;
        unsigned long first, less, more;
        line[length] = '\0'; /* of the newline, or of the text's end */
        at += length + (end != NULL);
        if (!strncmp(line, "+++ ", 4)) {
            take_name(name, sizeof name, line + 4);
            binary = false;
        } else if (hunk(line, &first, &less, &more)) {
            size_t bytes = span_of(diff + at, n - at, less + more);
            size_t added = take_added(diff + at, bytes);
            if (!binary)
                audit_search_text(s, name, diff + at, added, (uint32_t)first);
            binary = binary || (added && memchr(diff + at, '\0', added));
            at += bytes;
        }
    }
}

static int search_changed(struct audit_search *s, const char *base, struct baton_error *e)
{
    const char *const argv[] = {"git",
                                "-c",
                                "core.quotePath=false",
                                "diff",
                                "-U0",
                                "--text", /* whatever .gitattributes says */
                                "--no-color",
                                "--no-ext-diff",
                                "--no-textconv",
                                "--no-renames",
                                "--relative",
                                "--src-prefix=a/",
                                "--dst-prefix=b/",
                                base,
                                "--",
                                NULL};
    static const char *const others[] = {"git",      "ls-files",           "-z",
                                         "--others", "--exclude-standard", NULL};
    char *diff = NULL;
    size_t n = 0;
    int rc = *base == '-' ? base_fail(e, BATON_ERR_USAGE, "--changed: '%.60s' is no commit", base)
                          : git(argv, &diff, &n, e);
    if (rc == 0)
        search_diff(s, diff, n);
    free(diff);
    return rc ? rc : search_listed(s, others, e);
}

/* ---- all ---------------------------------------------------------------------------------- */

int cli_audit_sensitive(const struct cli_audit_args *a, struct json_t **out, struct baton_error *e)
{
    struct audit_search *s = NULL;
    int rc = audit_search_open(&s, e);
    if (rc == 0 && a->known)
        rc = audit_search_known(s, a->known, e);
    if (rc == 0)
        rc = a->dir       ? audit_search_folder(s, a->dir, e)
             : a->changed ? search_changed(s, a->changed, e)
                          : search_tree(s, e);
    if (rc == 0) {
        *out = audit_search_report(s);
        json_object_set_new(*out, "verdict", json_string(audit_search_clean(s) ? "pass" : "fail"));
    }
    audit_search_close(s);
    return rc;
}

static long long integer(const json_t *o, const char *key)
{
    return json_integer_value(json_object_get(o, key));
}

static const char *text(const json_t *o, const char *key)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : "";
}

void cli_audit_print_sensitive(const struct json_t *doc)
{
    const json_t *all = json_object_get(doc, "findings"), *unused = json_object_get(doc, "unused");
    const json_t *unsearched = json_object_get(doc, "unsearched");
    for (size_t i = 0; i < json_array_size(all); i++) {
        const json_t *f = json_array_get(all, i);
        if (!json_is_true(json_object_get(f, "known")))
            printf("%s:%lld: %s: %s\n", text(f, "file"), integer(f, "line"), text(f, "kind"),
                   text(f, "text"));
    }
    for (size_t i = 0; i < json_array_size(unsearched); i++)
        printf("%s: not searched: %s\n", text(json_array_get(unsearched, i), "file"),
               text(json_array_get(unsearched, i), "why"));
    for (size_t i = 0; i < json_array_size(unused); i++)
        printf("known, and not found any more: %s\n", json_string_value(json_array_get(unused, i)));
    printf("%lld files, %lld of them binary and not searched: %lld findings, %lld known ones\n",
           integer(doc, "files"), integer(doc, "binary"), integer(doc, "new"),
           integer(doc, "known"));
}
