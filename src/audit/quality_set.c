/* SPDX-License-Identifier: Apache-2.0 */
/* Frozen sets. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "audit/audit_priv.h"
#include "audit/quality.h"
#include "base/base.h"

enum { SET_LIMIT = 64 << 20, SET_PROMPTS = 4096 };

void audit_set_close(struct audit_set *s)
{
    json_decref(s->prompts);
    memset(s, 0, sizeof *s);
}

/* Is this text the set that was frozen? */
static int check_frozen(const char *path, const char *hex, struct baton_error *e)
{
    char file[4096], *text = NULL;
    size_t n = 0;
    if (snprintf(file, sizeof file, "%s.sha256", path) >= (int)sizeof file)
        return base_fail(e, BATON_ERR_INPUT, "--set: the name is too long");
    int rc = base_file_read(file, 4096, &text, &n, e);
    if (rc)
        return base_fail(e, BATON_ERR_INPUT,
                         "%.160s is not frozen: a file of that name and .sha256 must hold its "
                         "hash (sha256sum)",
                         path);
    if (n < 64 || strncmp(text, hex, 64))
        rc = base_fail(e, BATON_ERR_MISMATCH,
                       "%.120s was edited: its SHA-256 is %.16s..., frozen was %.16s...", path, hex,
                       text);
    free(text);
    return rc;
}

static int take_line(struct audit_set *s, const char *text, size_t n, size_t line,
                     struct baton_error *e)
{
    char what[96];
    const char *id = NULL, *prompt, *answer;
    json_t *o = NULL;
    snprintf(what, sizeof what, "%s line %zu", s->name, line);
    int rc = base_json_parse(text, n, what, &o, e);
    if (rc == 0)
        rc = base_json_str(o, "id", true, &id, what, e);
    if (rc == 0)
        rc = base_json_str(o, "prompt", true, &prompt, what, e);
    if (rc == 0)
        rc = base_json_str(o, "answer", true, &answer, what, e);
    for (size_t i = 0; rc == 0 && i < json_array_size(s->prompts); i++)
        if (!strcmp(id, json_string_value(json_object_get(json_array_get(s->prompts, i), "id"))))
            rc = base_fail(e, BATON_ERR_INPUT, "%s: a second prompt of its id", what);
    if (rc == 0 && json_array_size(s->prompts) == SET_PROMPTS)
        rc = base_fail(e, BATON_ERR_INPUT, "%s: more than %d prompts", what, SET_PROMPTS);
    if (rc == 0)
        json_array_append(s->prompts, o);
    json_decref(o);
    return rc;
}

static void name_set(struct audit_set *s, const char *path)
{
    const char *slash = strrchr(path, '/');
    char shown[64];
    snprintf(s->name, sizeof s->name, "%s", base_shown(shown, slash ? slash + 1 : path));
    char *dot = strrchr(s->name, '.');
    if (dot && dot != s->name)
        *dot = '\0';
}

int audit_set_open(const char *path, struct audit_set *out, struct baton_error *e)
{
    struct audit_set s = {.prompts = json_array()};
    char *text = NULL;
    size_t n = 0, line = 0;
    int rc = base_file_read(path, SET_LIMIT, &text, &n, e);
    if (rc == BATON_ERR_IO) /* a file that the user named */
        rc = e->code = BATON_ERR_INPUT;
    if (rc == 0) {
        name_set(&s, path);
        audit_hash(text, n, s.sha256);
        rc = check_frozen(path, s.sha256, e);
    }
    for (size_t at = 0; rc == 0 && at < n;) {
        const char *end = memchr(text + at, '\n', n - at);
        size_t length = end ? (size_t)(end - text) - at : n - at;
        line++;
        if (length)
            rc = take_line(&s, text + at, length, line, e);
        at += length + 1;
    }
    free(text);
    if (rc == 0 && json_array_size(s.prompts) == 0)
        rc = base_fail(e, BATON_ERR_INPUT, "%.120s holds no prompts", path);
    if (rc) {
        audit_set_close(&s);
        return rc;
    }
    *out = s;
    return 0;
}
