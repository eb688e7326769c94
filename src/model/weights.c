/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a checkpoint: configuration, weight files, and one tensor for each that is wanted. */
#include <errno.h>
#include <jansson.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "model/model_priv.h"

#define CONFIG_MAX ((size_t)16 << 20)
#define INDEX_MAX ((size_t)16 << 20)
#define MAX_FILES 1024u
#define SINGLE "model.safetensors"
#define INDEX "model.safetensors.index.json"

unsigned model_cpus(unsigned most)
{
    cpu_set_t set;
    unsigned n = sched_getaffinity(0, sizeof set, &set) == 0 ? (unsigned)CPU_COUNT(&set) : 1;
    return n < most ? n : most;
}

/* A link to nowhere, a loop of links or a folder that may not be read counts: what is there and
 * can't be opened is an error, not silently something else. */
static bool exists(const char *dir, const char *name)
{
    struct stat st;
    char *path = base_path_join(dir, name, NULL);
    bool yes = path && (lstat(path, &st) == 0 || errno != ENOENT);
    free(path);
    return yes;
}

/* ---- configuration ------------------------------------------------------------------------- */

static int read_text(const char *dir, const char *name, char **out, size_t *n,
                     struct baton_error *e)
{
    char *path = base_path_join(dir, name, e);
    if (!path)
        return e ? e->code : BATON_ERR_NOMEM;
    int rc = base_file_read(path, CONFIG_MAX, out, n, e);
    free(path);
    return rc;
}

/* *text is set where it was read, whatever follows. */
static int read_config(const char *dir, char **text, struct model_config *out,
                       struct baton_error *e)
{
    char *generation = NULL;
    size_t n = 0, generation_n = 0;
    int rc = read_text(dir, "config.json", text, &n, e);
    if (!rc && exists(dir, "generation_config.json"))
        rc = read_text(dir, "generation_config.json", &generation, &generation_n, e);
    if (!rc)
        rc = model_config_parse(*text, n, generation, generation_n, out, e);
    free(generation);
    return rc;
}

int model_config_read(const char *dir, struct model_config *out, struct baton_error *e)
{
    char *text = NULL;
    int rc = read_config(dir, &text, out, e);
    free(text);
    return rc;
}

/* ---- weight files -------------------------------------------------------------------------- */

static int by_text(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static int find_file(const struct model *m, const char *name)
{
    for (uint32_t i = 0; i < m->n_files; i++)
        if (m->file_names[i] && !strcmp(m->file_names[i], name))
            return (int)i;
    return -1;
}

static int add_file(struct model *m, const char *name, struct baton_error *e)
{
    char buf[64];
    if (find_file(m, name) >= 0)
        return 0;
    if (!exists(m->path, name))
        return base_fail(e, BATON_ERR_INPUT, "shard %s, named in " INDEX ", is missing",
                         base_shown(buf, name));
    if (m->n_files == MAX_FILES)
        return base_fail(e, BATON_ERR_INPUT, INDEX ": more than %u files", MAX_FILES);
    char *copy = base_try_strdup(name, e);
    if (!copy)
        return BATON_ERR_NOMEM;
    m->file_names[m->n_files++] = copy;
    return 0;
}

/* Shards lie beside their index. A name with a slash is not one that any tool writes. */
static int add_shards(struct model *m, const json_t *map, struct baton_error *e)
{
    const char *tensor;
    json_t *v;
    char buf[64];
    if (!json_is_object(map))
        return base_fail(e, BATON_ERR_INPUT, INDEX ": no weight_map");
    json_object_foreach((json_t *)(uintptr_t)map, tensor, v)
    {
        const char *name = json_string_value(v);
        if (!name || !*name || strchr(name, '/') || !strcmp(name, ".") || !strcmp(name, ".."))
            return base_fail(e, BATON_ERR_INPUT, INDEX ": '%s' is no file name in this folder",
                             name ? base_shown(buf, name) : "(no text)");
        int rc = add_file(m, name, e);
        if (rc)
            return rc;
    }
    return 0;
}

static int map_files(struct model *m, struct baton_error *e)
{
    qsort(m->file_names, m->n_files, sizeof *m->file_names, by_text);
    for (uint32_t i = 0; i < m->n_files; i++) {
        char *path = base_path_join(m->path, m->file_names[i], e);
        if (!path)
            return BATON_ERR_NOMEM;
        int rc = model_tensors_open(path, &m->files[i], e);
        free(path);
        if (rc)
            return rc;
    }
    return 0;
}

/* *map: the index's weight_map inside *index, or NULL for a single file. */
static int open_files(struct model *m, json_t **index, const json_t **map, struct baton_error *e)
{
    m->files = base_try_alloc(MAX_FILES, sizeof *m->files, e);
    m->file_names = m->files ? base_try_alloc(MAX_FILES, sizeof *m->file_names, e) : NULL;
    if (!m->file_names)
        return BATON_ERR_NOMEM;
    int rc;
    if (exists(m->path, SINGLE)) {
        rc = add_file(m, SINGLE, e);
    } else if (exists(m->path, INDEX)) {
        char *path = base_path_join(m->path, INDEX, e);
        rc = path ? base_json_load(path, INDEX_MAX, index, e) : BATON_ERR_NOMEM;
        free(path);
        *map = json_object_get(*index, "weight_map");
        if (!rc)
            rc = add_shards(m, *map, e);
    } else {
        rc = base_fail(e, BATON_ERR_INPUT, "%s: neither " SINGLE " nor " INDEX, m->path);
    }
    return rc ? rc : map_files(m, e);
}

/* ---- tensors ------------------------------------------------------------------------------- */

/* Where checkpoints put the text model. The canonical spelling is the first; Gemma 3 with a vision
 * tower was saved in the two others by transformers 4 and 5. */
static const struct {
    const char *model, *head;
} prefixes[] = {
    {"model.", ""},
    {"language_model.model.", "language_model."},
    {"model.language_model.", ""},
};
#define N_PREFIXES (sizeof prefixes / sizeof *prefixes)

static void stored_name(char out[160], const char *canonical, size_t prefix)
{
    if (!strncmp(canonical, "model.", 6))
        snprintf(out, 160, "%s%s", prefixes[prefix].model, canonical + 6);
    else
        snprintf(out, 160, "%s%s", prefixes[prefix].head, canonical);
}

static const struct model_tensor *lookup(const struct model *m, const json_t *map, const char *name,
                                         uint32_t *file)
{
    if (!map) {
        *file = 0;
        return model_tensors_find(m->files[0], name);
    }
    const char *in = json_string_value(json_object_get(map, name));
    int i = in ? find_file(m, in) : -1;
    *file = (uint32_t)i;
    return i >= 0 ? model_tensors_find(m->files[i], name) : NULL;
}

/* The prefix under which the embedding is; 0 where it is nowhere, for the error's sake. */
static size_t find_prefix(const struct model *m, const json_t *map)
{
    char name[160];
    uint32_t file;
    for (size_t i = 0; i < N_PREFIXES; i++) {
        stored_name(name, "model.embed_tokens.weight", i);
        if (lookup(m, map, name, &file))
            return i;
    }
    return 0;
}

static int check_tensor(const struct model_entry *x, const struct model_tensor *t, const char *file,
                        struct baton_error *e)
{
    char have[96], want[96];
    if (t->n_dims != x->n_dims || memcmp(t->shape, x->shape, x->n_dims * sizeof *x->shape) != 0)
        return base_fail(e, BATON_ERR_INPUT, "%s: tensor %s is %s, config.json makes it %s", file,
                         t->name, model_shape_text(have, t->shape, t->n_dims),
                         model_shape_text(want, x->shape, x->n_dims));
    if (t->dtype != BATON_F32 && t->dtype != BATON_F16 && t->dtype != BATON_BF16)
        return base_fail(
            e, BATON_ERR_INPUT, "%s: tensor %s %s has dtype %s, weights are F32, F16 or BF16", file,
            t->name, model_shape_text(have, t->shape, t->n_dims), model_dtype_name(t->dtype));
    return 0;
}

static int fill_entry(struct model *m, const json_t *map, size_t prefix, struct model_entry *x,
                      struct baton_error *e)
{
    char name[160], want[96], buf[64];
    stored_name(name, x->name, prefix);
    const struct model_tensor *t = lookup(m, map, name, &x->file);
    const char *in = map ? json_string_value(json_object_get(map, name)) : SINGLE;
    if (!t)
        return base_fail(e, BATON_ERR_INPUT, "%s: tensor %s %s is missing",
                         in ? base_shown(buf, in) : INDEX, name,
                         model_shape_text(want, x->shape, x->n_dims));
    int rc = check_tensor(x, t, m->file_names[x->file], e);
    x->dtype = t->dtype;
    x->data = t->data;
    x->bytes = t->bytes;
    return rc;
}

/* Vision towers, a second copy of a tied matrix: not read, and no error. Old checkpoints carry
 * rotation tables as buffers, which follow from the configuration. */
static void log_extra(const struct model *m)
{
    size_t held = 0, rotary = 0;
    for (uint32_t f = 0; f < m->n_files; f++) {
        held += model_tensors_count(m->files[f]);
        for (size_t i = 0; i < model_tensors_count(m->files[f]); i++) {
            const char *name = model_tensors_at(m->files[f], i)->name;
            rotary += strstr(name, "rotary_emb.inv_freq") != NULL;
        }
    }
    if (held > m->n_entries + rotary)
        base_log(BASE_LOG_INFO, "%zu of %zu tensors are no part of %s and are not read",
                 held - m->n_entries - rotary, held, m->config.arch);
}

static bool wanted(const struct model *m, const char *canonical)
{
    for (size_t i = 0; i < m->n_entries; i++)
        if (!strcmp(m->entries[i].name, canonical))
            return true;
    return false;
}

/* A layer's tensor for which config.json has no place means that the two disagree: fewer layers, or
 * a bias that the configuration denies. Computing on without it would give other tokens. */
static int check_layers(const struct model *m, const struct model_tensors *file,
                        const char *file_name, size_t prefix, struct baton_error *e)
{
    char start[64], canonical[512], have[96];
    snprintf(start, sizeof start, "%slayers.", prefixes[prefix].model);
    for (size_t i = 0; i < model_tensors_count(file); i++) {
        const struct model_tensor *t = model_tensors_at(file, i);
        if (strncmp(t->name, start, strlen(start)) != 0 || strstr(t->name, "rotary_emb.inv_freq"))
            continue;
        snprintf(canonical, sizeof canonical, "model.%s", t->name + strlen(prefixes[prefix].model));
        if (!wanted(m, canonical))
            return base_fail(
                e, BATON_ERR_INPUT,
                "%s: tensor %s %s has no place in the model that config.json describes", file_name,
                t->name, model_shape_text(have, t->shape, t->n_dims));
    }
    return 0;
}

static int open_folder(struct model *m, struct baton_error *e)
{
    json_t *index = NULL;
    const json_t *map = NULL;
    int rc = read_config(m->path, &m->config_text, &m->config, e);
    if (!rc)
        rc = open_files(m, &index, &map, e);
    if (!rc)
        rc = model_entries_make(&m->config, &m->entries, &m->n_entries, e);
    size_t prefix = rc ? 0 : find_prefix(m, map);
    for (size_t i = 0; i < m->n_entries && !rc; i++)
        rc = fill_entry(m, map, prefix, &m->entries[i], e);
    for (uint32_t f = 0; f < m->n_files && !rc; f++)
        rc = check_layers(m, m->files[f], m->file_names[f], prefix, e);
    if (!rc)
        log_extra(m);
    json_decref(index);
    return rc;
}

static bool ends_with(const char *s, const char *end)
{
    size_t n = strlen(s), k = strlen(end);
    return n >= k && !strcmp(s + n - k, end);
}

int model_open(const char *path, struct model **out, struct baton_error *e)
{
    if (ends_with(path, ".gguf"))
        return base_fail(e, BATON_ERR_UNSUPPORTED,
                         "%s: GGUF files are not supported; give a Hugging Face folder", path);
    struct model *m = base_try_alloc(1, sizeof *m, e);
    if (!m)
        return BATON_ERR_NOMEM;
    int rc = 0;
    m->path = base_try_strdup(path, e);
    if (!m->path)
        rc = BATON_ERR_NOMEM;
    else if (!strncmp(path, "shape:", 6))
        rc = model_shape_open(m, path + 6, e);
    else
        rc = open_folder(m, e);
    if (rc)
        model_close(m);
    else
        *out = m;
    return rc;
}

void model_close(struct model *m)
{
    if (!m)
        return;
    for (uint32_t i = 0; i < m->n_files; i++) {
        model_tensors_close(m->files[i]);
        free(m->file_names[i]);
    }
    free(m->files);
    free(m->file_names);
    free(m->entries);
    free(m->quantiles);
    free(m->config_text);
    free(m->path);
    free(m);
}

const struct model_config *model_config_of(const struct model *m)
{
    return &m->config;
}

const char *model_path(const struct model *m)
{
    return m->path;
}

bool model_is_shape(const struct model *m)
{
    return m->is_shape;
}

uint64_t model_weight_bytes(const struct model *m)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < m->n_entries; i++)
        sum += m->entries[i].bytes;
    return sum;
}

uint64_t model_n_params(const struct model *m)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < m->n_entries; i++)
        sum += m->entries[i].n_elements;
    return sum;
}
