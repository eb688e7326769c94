/* SPDX-License-Identifier: Apache-2.0 */
/* The files of an evidence folder: which there are, the seal, what is kept elsewhere. */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "audit/folder_priv.h"
#include "base/base.h"

/* ---- which files there are ---------------------------------------------------------------- */

static int list_folder(const char *path, const char *under, json_t *files, struct baton_error *e)
{
    char *full = *under ? base_path_join(path, under, e) : base_try_strdup(path, e);
    DIR *d = full ? opendir(full) : NULL;
    int rc = 0;
    if (!d) {
        rc = full ? base_fail_errno(e, BATON_ERR_INPUT, errno, "%s", full) : e->code;
        free(full);
        return rc;
    }
    for (struct dirent *x; rc == 0 && (x = readdir(d));) {
        char name[300];
        if (!strcmp(x->d_name, ".") || !strcmp(x->d_name, ".."))
            continue;
        snprintf(name, sizeof name, "%s%s%s", under, *under ? "/" : "", x->d_name);
        if (!*under && !strcmp(name, "raw"))
            rc = list_folder(path, name, files, e);
        else if (json_object_size(files) >= AUDIT_FILES_LIMIT)
            rc = base_fail(e, BATON_ERR_INPUT, "%s: more than %u files", path, AUDIT_FILES_LIMIT);
        else if (json_object_set_new(files, name, json_null()))
            rc = base_fail(e, BATON_ERR_INPUT, "%s: a file whose name is no text", path);
    }
    closedir(d);
    free(full);
    return rc;
}

int audit_files_list(const char *path, json_t **out, struct baton_error *e)
{
    json_t *files = json_object();
    int rc = list_folder(path, "", files, e);
    if (rc) {
        json_decref(files);
        return rc;
    }
    *out = files;
    return 0;
}

int audit_file_hash(const char *path, const char *name, char hex[65], struct baton_error *e)
{
    struct base_file f = {0};
    char *full = base_path_join(path, name, e);
    int rc = full ? base_file_open(&f, full, e) : e->code;
    free(full);
    if (rc)
        return rc;
    audit_hash(f.data, f.size, hex);
    base_file_close(&f);
    return 0;
}

/* ---- the seal ----------------------------------------------------------------------------- */

/* "HEX  NAME" of a line; false where it is something else. */
static bool split_line(const char *line, size_t n, char hex[65], char name[300])
{
    if (n < 67 || n - 66 >= 300 || line[64] != ' ' || line[65] != ' ')
        return false;
    memcpy(hex, line, 64);
    hex[64] = '\0';
    snprintf(name, 300, "%.*s", (int)(n - 66), line + 66);
    return strspn(hex, "0123456789abcdef") == 64;
}

static void check_sealed(struct audit_folder *f, const char *hex, const char *name)
{
    struct baton_error e;
    char now[65];
    if (json_is_string(json_object_get(f->files, name)))
        audit_difference(f->differences, "seal.txt", name, "sealed twice");
    else if (audit_file_hash(f->path, name, now, &e))
        audit_difference(f->differences, name, "", "sealed, and can't be read: %.150s", e.text);
    else if (strcmp(now, hex))
        audit_difference(f->differences, name, "", "is not what was sealed: its SHA-256 is %.16s…",
                         now);
    if (json_object_get(f->files, name))
        json_object_set_new(f->files, name, json_string(hex));
}

/* The last line is the hash of all before it. */
static void check_own(struct audit_folder *f, const char *text, size_t n, const char *hex,
                      const char *published)
{
    char now[65];
    audit_hash(text, n, now);
    if (strcmp(now, hex))
        audit_difference(f->differences, "seal.txt", "last line",
                         "is not the hash of the lines before it");
    if (published && strcasecmp(published, hex))
        audit_difference(f->differences, "seal.txt", "last line",
                         "is not the seal that was given: %.16s… is claimed", hex);
    json_object_set_new(f->files, "seal.txt", json_string(hex));
}

void audit_seal_check(struct audit_folder *f, const char *published)
{
    struct baton_error e = {0};
    char *text = NULL, *path = base_path_join(f->path, "seal.txt", &e);
    size_t n = 0;
    bool own = false;
    if (!path || base_file_read(path, 16 << 20, &text, &n, &e))
        audit_difference(f->differences, "seal.txt", "", "can't be read: %.150s", e.text);
    for (size_t at = 0; text && at < n;) {
        char hex[65], name[300];
        size_t length = strcspn(text + at, "\n");
        if (own || !split_line(text + at, length, hex, name) || text[at + length] != '\n') {
            audit_difference(f->differences, "seal.txt", "", "no line of a seal: '%.40s'",
                             text + at);
            break;
        }
        own = !strcmp(name, "seal.txt");
        if (own)
            check_own(f, text, at, hex, published);
        else
            check_sealed(f, hex, name);
        at += length + 1;
    }
    if (text && !own)
        audit_difference(f->differences, "seal.txt", "last line", "the seal's own line is missing");
    free(path);
    free(text);
    const char *name;
    json_t *state;
    json_object_foreach(f->files, name, state)
    {
        if (!json_is_string(state))
            audit_difference(f->differences, name, "", "is not sealed");
    }
}

/* ---- kept elsewhere ----------------------------------------------------------------------- */

/* "sha256 size where": where is up to the end of the line. */
void audit_external_read(struct audit_folder *f)
{
    struct baton_error e = {0};
    char *text = NULL, *path = base_path_join(f->path, "external.txt", &e), *rest = NULL;
    size_t n = 0;
    if (!path || base_file_read(path, 16 << 20, &text, &n, &e))
        audit_difference(f->differences, "external.txt", "", "can't be read: %.150s", e.text);
    for (char *line = text ? strtok_r(text, "\n", &rest) : NULL; line;
         line = strtok_r(NULL, "\n", &rest)) {
        size_t size = strcspn(line + (strlen(line) > 65 ? 65 : 0), " ");
        if (strspn(line, "0123456789abcdef") != 64 || line[64] != ' ' || line[65 + size] != ' ' ||
            !line[66 + size] || json_array_append_new(f->elsewhere, json_string(line)))
            audit_difference(f->differences, "external.txt", "", "not 'sha256 size where': %.60s",
                             line);
    }
    free(path);
    free(text);
}
