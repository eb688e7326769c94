/* SPDX-License-Identifier: Apache-2.0 */
/* Configurations of a matrix. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "audit/audit_priv.h"
#include "audit/matrix.h"
#include "base/base.h"

/* A member into a field, refusing what does not fit: a device that was cut is another device. */
static int take_text(const json_t *o, const char *key, const char *what, char *to, size_t size,
                     struct baton_error *e)
{
    const char *s = NULL;
    int rc = base_json_str(o, key, true, &s, what, e);
    if (rc == 0 && (!*s || strlen(s) >= size))
        rc = base_fail(e, BATON_ERR_INPUT, "%s: \"%s\" is empty or longer than %zu bytes", what,
                       key, size - 1);
    if (rc == 0)
        snprintf(to, size, "%s", s);
    return rc;
}

static int check_list(const json_t *o, const char *key, size_t most, const char *what,
                      struct baton_error *e)
{
    size_t n = json_array_size(json_object_get(o, key));
    return n >= 1 && n <= most
               ? 0
               : base_fail(e, BATON_ERR_INPUT, "%s: \"%s\" must be a list of 1 to %zu", what, key,
                           most);
}

static int take_models(const json_t *o, const char *path, struct audit_matrix *m,
                       struct baton_error *e)
{
    const json_t *list = json_object_get(o, "models");
    const char *slash = strrchr(path, '/');
    char given[512] = "";
    int rc = check_list(o, "models", AUDIT_MATRIX_MODELS, "matrix", e);
    for (size_t i = 0; rc == 0 && i < json_array_size(list); i++) {
        struct audit_matrix_model *x = &m->models[m->n_models++];
        const json_t *from = json_array_get(list, i);
        rc = take_text(from, "name", "matrix: a model", x->name, sizeof x->name, e);
        if (rc == 0)
            rc = take_text(from, "path", "matrix: a model", given, sizeof given, e);
        bool absolute = given[0] == '/' || !strncmp(given, "shape:", 6) || !slash;
        if (rc == 0 &&
            snprintf(x->path, sizeof x->path, "%.*s%s", absolute ? 0 : (int)(slash - path + 1),
                     path, given) >= (int)sizeof x->path)
            rc = base_fail(e, BATON_ERR_INPUT, "matrix: the path of %s is too long", x->name);
        for (uint32_t k = 0; rc == 0 && k + 1 < m->n_models; k++)
            if (!strcmp(m->models[k].name, x->name))
                rc = base_fail(e, BATON_ERR_INPUT, "matrix: two models are named %s", x->name);
    }
    return rc;
}

static int take_consumers(const json_t *o, struct audit_matrix *m, struct baton_error *e)
{
    const char *what = "matrix: a consumer";
    const json_t *list = json_object_get(o, "consumers");
    int rc = check_list(o, "consumers", AUDIT_MATRIX_CONSUMERS, "matrix", e);
    for (size_t i = 0; rc == 0 && i < json_array_size(list); i++) {
        struct audit_matrix_consumer *x = &m->consumers[m->n_consumers++];
        const json_t *from = json_array_get(list, i);
        rc = take_text(from, "name", what, x->name, sizeof x->name, e);
        if (rc == 0)
            rc = take_text(from, "device", what, x->device, sizeof x->device, e);
        if (rc == 0)
            rc = take_text(from, "producer", what, x->producer, sizeof x->producer, e);
        if (rc == 0)
            rc = base_json_u32(from, "lanes", true, 1, 8, &x->lanes, what, e);
        for (uint32_t k = 0; rc == 0 && k + 1 < m->n_consumers; k++)
            if (!strcmp(m->consumers[k].name, x->name))
                rc = base_fail(e, BATON_ERR_INPUT, "matrix: two consumers are named %s", x->name);
    }
    return rc;
}

static int take_routes(const json_t *o, struct audit_matrix *m, struct baton_error *e)
{
    static const char *const names[] = {"native", "whole", "stream"};
    const json_t *list = json_object_get(o, "routes");
    int rc = check_list(o, "routes", 3, "matrix", e);
    for (size_t i = 0; rc == 0 && i < json_array_size(list); i++) {
        const char *is = json_string_value(json_array_get(list, i));
        int k = 0;
        while (k < 3 && (!is || strcmp(is, names[k])))
            k++;
        if (k == 3 || m->routes[k])
            rc = base_fail(e, BATON_ERR_INPUT,
                           "matrix: \"routes\" are native, whole and stream, each once");
        else
            m->routes[k] = true;
    }
    return rc;
}

/* Lengths tell the caches of requests apart that ran at once, so no two may be equal. */
static int take_lengths(const json_t *o, struct audit_matrix *m, struct baton_error *e)
{
    const json_t *list = json_object_get(o, "lengths");
    int rc = check_list(o, "lengths", AUDIT_MATRIX_PROMPTS, "matrix", e);
    for (size_t i = 0; rc == 0 && i < json_array_size(list); i++) {
        const json_t *v = json_array_get(list, i);
        json_int_t n = json_is_integer(v) ? json_integer_value(v) : 0;
        bool good = n >= 1 && n <= 1 << 20;
        for (uint32_t k = 0; k < m->n_prompts; k++)
            good = good && m->lengths[k] != (uint32_t)n;
        if (!good)
            return base_fail(e, BATON_ERR_INPUT,
                             "matrix: \"lengths\" are numbers of tokens, each another one");
        m->lengths[m->n_prompts++] = (uint32_t)n;
    }
    return rc;
}

static int take_all(const json_t *o, const char *path, struct audit_matrix *m,
                    struct baton_error *e)
{
    uint32_t schema = 0;
    int rc = base_json_u32(o, "schema", true, 1, 1, &schema, "matrix", e);
    if (rc == 0)
        rc = take_models(o, path, m, e);
    if (rc == 0)
        rc = take_consumers(o, m, e);
    if (rc == 0)
        rc = take_routes(o, m, e);
    if (rc == 0)
        rc = take_lengths(o, m, e);
    if (rc == 0)
        rc = base_json_u32(o, "n", true, 16, 4096, &m->n, "matrix", e);
    if (rc == 0)
        rc = base_json_u32(o, "repeats", true, 2, 16, &m->repeats, "matrix", e);
    for (uint32_t i = 0; i < m->n_consumers && rc == 0; i++)
        if (m->consumers[i].lanes > m->n_prompts)
            rc = base_fail(e, BATON_ERR_INPUT,
                           "matrix: %s has %u lanes, and there are \"lengths\" of %u prompts",
                           m->consumers[i].name, m->consumers[i].lanes, m->n_prompts);
    return rc ? rc : base_json_bool(o, "reference", false, &m->reference, "matrix", e);
}

int audit_matrix_read(const char *path, struct audit_matrix *out, struct baton_error *e)
{
    char *text = NULL;
    size_t n = 0;
    json_t *o = NULL;
    memset(out, 0, sizeof *out);
    out->reference = true;
    int rc = base_file_read(path, 1 << 20, &text, &n, e);
    if (rc == BATON_ERR_IO) /* a file that the user named */
        rc = e->code = BATON_ERR_INPUT;
    if (rc == 0)
        rc = base_json_parse(text, n, path, &o, e);
    if (rc == 0) {
        audit_hash(text, n, out->sha256);
        rc = take_all(o, path, out, e);
    }
    json_decref(o);
    free(text);
    return rc;
}
