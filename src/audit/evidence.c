/* SPDX-License-Identifier: Apache-2.0 */
/* Writing an evidence folder: a line of the chain as each attempt ends, the rest at the end. */
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "audit/audit_priv.h"
#include "base/base.h"

/* A check of a long prompt on a deep model writes some hundred KiB. */
#define ROOM_BYTES ((uint64_t)16 << 20)

struct audit_evidence {
    char *path;
    int fd;         /* cases.jsonl */
    json_t *lines;  /* of the chain so far */
    char last[65];  /* hash of the last line */
    char next[128]; /* raw/... of the next attempt */
    unsigned attempts;
    int fds; /* that were open before */
};

void audit_evidence_drop(struct audit_evidence *ev)
{
    if (!ev)
        return;
    if (ev->fd >= 0)
        close(ev->fd);
    json_decref(ev->lines);
    free(ev->path);
    free(ev);
}

const char *audit_evidence_path(const struct audit_evidence *ev)
{
    return ev->path;
}

const char *audit_evidence_next(const struct audit_evidence *ev)
{
    return ev->next;
}

/* Open descriptors of this process, -1 where it can't be told. The one that looks is not counted.
 */
static int count_fds(void)
{
    int n = -1;
    DIR *d = opendir("/proc/self/fd");
    for (struct dirent *x; d && (x = readdir(d));)
        n += x->d_name[0] != '.';
    if (d)
        closedir(d);
    return d ? n : -1;
}

/* ---- the folder --------------------------------------------------------------------------- */

static int make_folder(const char *path, struct baton_error *e)
{
    struct stat st;
    if (mkdir(path, 0777) == 0 || (errno == EEXIST && stat(path, &st) == 0 && S_ISDIR(st.st_mode)))
        return 0;
    return base_fail_errno(e, BATON_ERR_IO, errno, "evidence folder %s", path);
}

static int check_room(const char *path, struct baton_error *e)
{
    struct statvfs v;
    if (statvfs(path, &v))
        return base_fail_errno(e, BATON_ERR_IO, errno, "evidence folder %s", path);
    uint64_t free_bytes = (uint64_t)v.f_bavail * v.f_frsize;
    if (free_bytes < ROOM_BYTES)
        return base_fail(e, BATON_ERR_IO, "evidence folder %s: %llu KiB are free, %llu are needed",
                         path, (unsigned long long)free_bytes >> 10,
                         (unsigned long long)ROOM_BYTES >> 10);
    return 0;
}

/* Where folders go: made where it is missing, found out before any work whether it can be used. */
static int prepare_parent(const char *dir, struct baton_error *e)
{
    int rc = make_folder(dir, e);
    if (rc == 0 && access(dir, W_OK | X_OK))
        rc = base_fail_errno(e, BATON_ERR_IO, errno, "evidence folder %s", dir);
    return rc ? rc : check_room(dir, e);
}

/* A folder of this run alone: UTC, command, and a few random digits for those of one second. */
static int open_folder(struct audit_evidence *ev, const char *dir, const char *command,
                       struct baton_error *e)
{
    uint8_t id[4];
    char now[32], stamp[32], hex[9], name[96];
    size_t n = 0;
    int rc = base_random(id, sizeof id, e);
    if (rc)
        return rc;
    audit_time(now);
    for (const char *p = now; *p; p++)
        if (*p != '-' && *p != ':')
            stamp[n++] = *p;
    stamp[n] = '\0';
    base_hex(id, sizeof id, hex);
    snprintf(name, sizeof name, "%s-%s-%s", stamp, command, hex);
    ev->path = base_path_join(dir, name, e);
    char *raw = ev->path ? base_path_join(ev->path, "raw", e) : NULL;
    rc = raw ? make_folder(ev->path, e) : BATON_ERR_NOMEM;
    if (rc == 0)
        rc = make_folder(raw, e);
    free(raw);
    return rc;
}

static int open_cases(struct audit_evidence *ev, int flags, struct baton_error *e)
{
    char *file = base_path_join(ev->path, "cases.jsonl", e);
    if (!file)
        return BATON_ERR_NOMEM;
    ev->fd = open(file, O_WRONLY | O_APPEND | O_CLOEXEC | flags, 0666);
    int rc = ev->fd >= 0 ? 0 : base_fail_errno(e, BATON_ERR_IO, errno, "%s", file);
    free(file);
    return rc;
}

/* ---- lines -------------------------------------------------------------------------------- */

static int write_all(int fd, const char *what, const char *text, size_t n, struct baton_error *e)
{
    while (n > 0) {
        ssize_t k = write(fd, text, n);
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0)
            return base_fail_errno(e, BATON_ERR_IO, errno, "%s: cases.jsonl", what);
        text += k;
        n -= (size_t)k;
    }
    return fsync(fd) ? base_fail_errno(e, BATON_ERR_IO, errno, "%s: cases.jsonl", what) : 0;
}

/* Takes `line` over and appends it, with the hash of the one before. */
static int append(struct audit_evidence *ev, json_t *line, struct baton_error *e)
{
    if (!line || json_object_set_new(line, "prev", json_string(ev->last))) {
        json_decref(line);
        return base_fail(e, BATON_ERR_NOMEM, "no memory for the evidence");
    }
    char *text = audit_text(line, JSON_COMPACT);
    size_t n = text ? strlen(text) : 0;
    int rc = text && json_array_append(ev->lines, line) == 0
                 ? 0
                 : base_fail(e, BATON_ERR_NOMEM, "no memory for the evidence");
    json_decref(line);
    if (rc == 0) {
        audit_hash(text, n, ev->last);
        text[n] = '\n'; /* in the NUL's place: written by length */
        rc = write_all(ev->fd, ev->path, text, n + 1, e);
    }
    free(text);
    return rc;
}

static int write_json(const struct audit_evidence *ev, const char *name, const json_t *v,
                      size_t flags, char hex[65], struct baton_error *e)
{
    char *text = audit_text(v, flags), *file = base_path_join(ev->path, name, e);
    int rc = text && file ? base_file_write(file, text, strlen(text), e)
                          : base_fail(e, BATON_ERR_NOMEM, "no memory for %s", name);
    if (rc == 0 && hex)
        audit_hash(text, strlen(text), hex);
    free(text);
    free(file);
    return rc;
}

static void name_next(struct audit_evidence *ev)
{
    snprintf(ev->next, sizeof ev->next, "raw/%04u.json", ev->attempts);
}

/* ---- opening ------------------------------------------------------------------------------ */

static struct audit_evidence *make(struct baton_error *e)
{
    struct audit_evidence *ev = base_try_alloc(1, sizeof *ev, e);
    if (!ev)
        return NULL;
    ev->fds = count_fds();
    ev->fd = -1;
    strcpy(ev->last, AUDIT_ZERO);
    ev->lines = json_array();
    name_next(ev);
    return ev;
}

int audit_evidence_open(const char *dir, const struct audit_about *about,
                        struct audit_evidence **out, struct baton_error *e)
{
    json_t *begin = NULL;
    struct audit_evidence *ev = make(e);
    int rc = ev ? prepare_parent(dir, e) : BATON_ERR_NOMEM;
    if (rc == 0 && !(begin = audit_begin(about, e)))
        rc = e->code;
    if (rc == 0)
        rc = open_folder(ev, dir, about->command, e);
    if (rc == 0)
        rc = open_cases(ev, O_CREAT | O_EXCL, e);
    if (rc == 0)
        rc = append(ev, json_incref(begin), e);
    json_decref(begin);
    if (rc) {
        audit_evidence_drop(ev);
        return rc;
    }
    *out = ev;
    return 0;
}

/* What must not change within one folder. */
static int check_same(const json_t *begin, const json_t *now, struct baton_error *e)
{
    static const char *const keys[] = {"schema",  "command", "config", "versions",
                                       "commits", "devices", "model",  "repeats"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!json_equal(json_object_get(begin, keys[i]), json_object_get(now, keys[i])))
            return base_fail(e, BATON_ERR_MISMATCH,
                             "--resume: the folder was begun with another \"%s\"", keys[i]);
    return 0;
}

int audit_evidence_resume(const char *path, const struct audit_about *about,
                          struct audit_evidence **out, struct json_t **lines, struct baton_error *e)
{
    json_t *so_far = NULL, *now = NULL;
    struct audit_evidence *ev = make(e);
    int rc = ev && (ev->path = base_try_strdup(path, e)) ? 0 : BATON_ERR_NOMEM;
    if (rc == 0)
        rc = audit_lines_read(path, &so_far, ev->last, e);
    if (rc == 0 && !(now = audit_begin(about, e)))
        rc = e->code;
    if (rc == 0)
        rc = check_same(json_array_get(so_far, 0), now, e);
    if (rc == 0)
        rc = open_cases(ev, 0, e);
    json_decref(now);
    if (rc) {
        json_decref(so_far);
        audit_evidence_drop(ev);
        return rc;
    }
    json_array_extend(ev->lines, so_far);
    for (size_t i = 0; i < json_array_size(so_far); i++)
        ev->attempts += !strcmp(audit_line_kind(json_array_get(so_far, i)), "case");
    name_next(ev);
    *lines = so_far;
    *out = ev;
    return 0;
}

/* ---- attempts ----------------------------------------------------------------------------- */

static json_t *raw_json(struct audit_evidence *ev, const json_t *raw, struct baton_error *e)
{
    char hex[65];
    if (!raw)
        return json_null();
    if (write_json(ev, ev->next, raw, JSON_COMPACT, hex, e))
        return NULL;
    return json_pack("{s:s,s:s}", "file", ev->next, "sha256", hex);
}

int audit_evidence_add(struct audit_evidence *ev, const struct audit_attempt *a,
                       struct baton_error *e)
{
    const char *command = json_string_value(
        json_object_get(json_array_get(ev->lines, 0), "command"));
    char ended[32];
    audit_time(ended);
    json_t *raw = a->result ? raw_json(ev, a->raw, e) : NULL;
    json_t *computed = NULL;
    int rc = raw ? 0 : a->result ? e->code : base_fail(e, BATON_ERR_NOMEM, "no memory: no result");
    if (rc == 0 && a->raw && !(computed = audit_recompute(command, a->raw, e)))
        rc = e->code;
    if (rc == 0) {
        json_t *line = json_pack("{s:s,s:i,s:s,s:s,s:o,s:O,s:O}", "kind", "case", "attempt",
                                 (int)ev->attempts, "name", a->name, "ended", ended, "supersedes",
                                 a->supersedes < 0 ? json_null() : json_integer(a->supersedes),
                                 "raw", raw, "result", a->result);
        if (line && computed)
            json_object_update_missing(line, json_object_get(computed, "line"));
        rc = append(ev, line, e);
    }
    json_decref(raw);
    json_decref(computed);
    json_decref(a->raw);
    json_decref(a->result);
    if (rc == 0)
        ev->attempts++;
    name_next(ev);
    return rc;
}

/* ---- the end ------------------------------------------------------------------------------ */

/* Children that were not waited for. */
static int count_children(void)
{
    siginfo_t info = {0};
    return waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0;
}

static json_t *end_json(const struct audit_evidence *ev, const struct audit_cleanup *c)
{
    char ended[32];
    int fds = count_fds();
    audit_time(ended);
    return json_pack("{s:s,s:s,s:{s:i,s:I,s:I,s:I,s:o,s:n}}", "kind", "end", "ended", ended,
                     "cleanup", "processes", count_children(), "lanes", (json_int_t)c->left.lanes,
                     "blocks", (json_int_t)c->left.blocks, "tickets", (json_int_t)c->left.tickets,
                     "fds", /* cases.jsonl is open */
                     fds < 0 || ev->fds < 0 ? json_null() : json_integer(fds - 1 - ev->fds),
                     "device_bytes");
}

/* "HEX  NAME\n" of a file of the folder at the end of *text. */
static int seal_file(const struct audit_evidence *ev, const char *name, char **text,
                     struct baton_error *e)
{
    struct base_file f = {0};
    char hex[65], *path = base_path_join(ev->path, name, e);
    int rc = path ? base_file_open(&f, path, e) : BATON_ERR_NOMEM;
    free(path);
    if (rc)
        return rc;
    audit_hash(f.data, f.size, hex);
    base_file_close(&f);
    size_t used = strlen(*text), n = strlen(name) + 68;
    char *grown = base_try_realloc(*text, used + n + 1, 1, e);
    if (!grown)
        return BATON_ERR_NOMEM;
    snprintf(grown + used, n + 1, "%s  %s\n", hex, name);
    *text = grown;
    return 0;
}

/* Over every other file, in the order of their names; last its own line: over those before. */
static int seal(const struct audit_evidence *ev, struct baton_error *e)
{
    char *text = base_try_alloc(1, 1, e);
    static const char *const first[] = {"cases.jsonl", "external.txt"};
    int rc = text ? 0 : BATON_ERR_NOMEM;
    for (size_t i = 0; i < 2 && rc == 0; i++)
        rc = seal_file(ev, first[i], &text, e);
    for (size_t i = 0; i < json_array_size(ev->lines) && rc == 0; i++) {
        const json_t *raw = json_object_get(json_array_get(ev->lines, i), "raw");
        const char *file = json_string_value(json_object_get(raw, "file"));
        if (file)
            rc = seal_file(ev, file, &text, e);
    }
    if (rc == 0)
        rc = seal_file(ev, "summary.json", &text, e);
    if (rc == 0) {
        char hex[65];
        audit_hash(text, strlen(text), hex);
        size_t used = strlen(text);
        char *grown = base_try_realloc(text, used + 80, 1, e);
        rc = grown ? 0 : BATON_ERR_NOMEM;
        text = grown ? grown : text;
        if (rc == 0)
            snprintf(text + used, 80, "%s  seal.txt\n", hex);
    }
    char *path = rc == 0 ? base_path_join(ev->path, "seal.txt", e) : NULL;
    if (rc == 0)
        rc = path ? base_file_write(path, text, strlen(text), e) : BATON_ERR_NOMEM;
    free(path);
    free(text);
    return rc;
}

int audit_evidence_finish(struct audit_evidence *ev, const struct audit_cleanup *c,
                          struct baton_error *e)
{
    int rc = append(ev, end_json(ev, c), e);
    json_t *summary = rc == 0 ? audit_summary(ev->lines, ev->last) : NULL;
    if (rc == 0 && !summary)
        rc = base_fail(e, BATON_ERR_NOMEM, "no memory for summary.json");
    if (rc == 0)
        rc = write_json(ev, "summary.json", summary, JSON_INDENT(1), NULL, e);
    json_decref(summary);
    char *external = rc == 0 ? base_path_join(ev->path, "external.txt", e) : NULL;
    if (external) /* this program keeps nothing elsewhere; whoever moves a file adds a line */
        rc = base_file_write(external, "", 0, e);
    free(external);
    return rc ? rc : seal(ev, e);
}
