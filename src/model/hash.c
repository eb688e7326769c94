/* SPDX-License-Identifier: Apache-2.0 */
/* Content identity of a model: four SHA-256 values.
 *
 * arch:      over canonical text, one "name=value" a line (put_config below).
 * weights:   over one line a tensor, sorted by canonical name in C order:
 *                NAME DTYPE [ROWS, COLS] SHA256-OF-ITS-BYTES
 *            Only tensors that the model reads count, so one file, shards and other containers of
 *            the same numbers agree.
 * tokenizer: over tokenizer.json.
 * pin:       what this prints, run in the folder, names in C order and without a path:
 *                LC_ALL=C sha256sum config.json WEIGHT-FILES tokenizer.json | sha256sum
 *            WEIGHT-FILES being model.safetensors or the shards; tokenizer.json where it exists.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "model/model_priv.h"

#define CHUNK ((uint64_t)1 << 20)
#define SMALL_MAX ((size_t)256 << 20) /* of files hashed whole: as the tokenizer's reader */
#define CACHE_MAX ((size_t)16 << 20)
#define CACHE_HEAD "baton-hash 1"

/* One digest to make: a whole weight file (entry == NO_ENTRY) or a tensor. */
struct job {
    size_t entry;
    uint32_t file;
    uint64_t bytes;
};
#define NO_ENTRY SIZE_MAX

struct hasher {
    const struct model *m;
    struct job *jobs;
    unsigned n_jobs;
    uint8_t (*file_digest)[32];  /* [n_files] */
    uint8_t (*entry_digest)[32]; /* [n_entries] */
    bool *cached;                /* [n_files] */
    void (*progress)(void *ctx, uint64_t done, uint64_t all);
    void *ctx;
    _Atomic uint64_t done;
    uint64_t all;
    pthread_t owner; /* the only thread that may call progress */
};

/* ---- cache --------------------------------------------------------------------------------- */

/* The text that stands for one state of one file: a rewritten file has another mtime. */
static bool cache_key(const struct base_file *f, char key[128])
{
    struct stat st;
    if (fstat(f->fd, &st) != 0)
        return false;
    snprintf(key, 128, "%ju %ju %ju %jd.%09ld", (uintmax_t)st.st_dev, (uintmax_t)st.st_ino,
             (uintmax_t)st.st_size, (intmax_t)st.st_mtim.tv_sec, st.st_mtim.tv_nsec);
    /* A file that is being written may change again within one tick of its clock. */
    return base_wall_ms() > (uint64_t)st.st_mtim.tv_sec * 1000 + 2000;
}

/* One line into *line, *at behind it; false at the end. */
static bool next_line(char **at, char **line)
{
    char *end = strchr(*at, '\n');
    if (!end)
        return false;
    *end = '\0';
    *line = *at;
    *at = end + 1;
    return true;
}

static int by_name(const void *a, const void *b)
{
    const struct model_entry *x = a, *y = b;
    return strcmp(x->name, y->name);
}

static struct model_entry *find_entry(const struct model *m, const char *name)
{
    struct model_entry key;
    if (strlen(name) >= sizeof key.name)
        return NULL;
    strcpy(key.name, name);
    return bsearch(&key, m->entries, m->n_entries, sizeof key, by_name);
}

/* Digests of file f from the cache's text; true when all that are needed were there. */
static bool cache_parse(struct hasher *h, uint32_t f, const char *key, char *text)
{
    char *line;
    size_t found = 0, needed = 0;
    if (!next_line(&text, &line) || strcmp(line, CACHE_HEAD) != 0)
        return false;
    if (!next_line(&text, &line) || strcmp(line, key) != 0)
        return false;
    if (!next_line(&text, &line) || !base_unhex(line, h->file_digest[f], 32))
        return false;
    while (next_line(&text, &line)) {
        if (strlen(line) < 66 || line[64] != ' ')
            return false;
        line[64] = '\0';
        struct model_entry *x = find_entry(h->m, line + 65);
        if (!x || x->file != f)
            continue;
        if (!base_unhex(line, h->entry_digest[x - h->m->entries], 32))
            return false;
        found++;
    }
    for (size_t i = 0; i < h->m->n_entries; i++)
        needed += h->m->entries[i].file == f;
    return found == needed;
}

static bool cache_load(struct hasher *h, uint32_t f)
{
    char key[128], path[1024], *text = NULL;
    bool ok = cache_key(model_tensors_file(h->m->files[f]), key) &&
              base_cache_path("hash", key, false, path) &&
              base_file_read(path, CACHE_MAX, &text, NULL, NULL) == 0 &&
              cache_parse(h, f, key, text);
    free(text);
    return ok;
}

static void cache_store(const struct hasher *h, uint32_t f)
{
    char key[128], path[1024], hex[65];
    size_t cap = 512 + h->m->n_entries * (sizeof h->m->entries->name + 66);
    char *text = base_try_alloc(cap, 1, NULL);
    if (text && cache_key(model_tensors_file(h->m->files[f]), key) &&
        base_cache_path("hash", key, true, path)) {
        base_hex(h->file_digest[f], 32, hex);
        size_t n = (size_t)snprintf(text, cap, CACHE_HEAD "\n%s\n%s\n", key, hex);
        for (size_t i = 0; i < h->m->n_entries; i++) {
            if (h->m->entries[i].file != f)
                continue;
            base_hex(h->entry_digest[i], 32, hex);
            n += (size_t)snprintf(text + n, cap - n, "%s %s\n", hex, h->m->entries[i].name);
        }
        (void)base_file_write(path, text, n, NULL); /* a cache that cannot be written is no error */
    }
    free(text);
}

/* ---- work ---------------------------------------------------------------------------------- */

static void note(struct hasher *h, uint64_t bytes)
{
    uint64_t done = atomic_fetch_add(&h->done, bytes) + bytes;
    if (h->progress && pthread_equal(pthread_self(), h->owner))
        h->progress(h->ctx, done, h->all);
}

static void hash_memory(struct hasher *h, const uint8_t *data, uint64_t bytes, uint8_t out[32])
{
    struct base_sha256 s;
    base_sha256_init(&s);
    for (uint64_t at = 0; at < bytes; at += CHUNK) {
        uint64_t n = bytes - at < CHUNK ? bytes - at : CHUNK;
        base_sha256_update(&s, data + at, (size_t)n);
        note(h, n);
    }
    base_sha256_final(&s, out);
}

static void hash_shape(struct hasher *h, size_t entry, uint8_t out[32])
{
    uint16_t block[8192];
    struct base_sha256 s;
    uint64_t all = h->m->entries[entry].n_elements;
    base_sha256_init(&s);
    for (uint64_t at = 0; at < all; at += 8192) {
        uint64_t n = all - at < 8192 ? all - at : 8192;
        model_shape_fill(h->m, entry, at, n, block);
        base_sha256_update(&s, block, (size_t)(2 * n));
        note(h, 2 * n);
    }
    base_sha256_final(&s, out);
}

static void hash_job(void *ctx, unsigned i)
{
    struct hasher *h = ctx;
    const struct job *j = &h->jobs[i];
    if (h->m->is_shape) {
        hash_shape(h, j->entry, h->entry_digest[j->entry]);
        return;
    }
    const struct base_file *f = model_tensors_file(h->m->files[j->file]);
    const uint8_t *data = f->data;
    uint8_t *out = h->file_digest[j->file];
    if (j->entry != NO_ENTRY) {
        data = h->m->entries[j->entry].data;
        out = h->entry_digest[j->entry];
    }
    hash_memory(h, data, j->bytes, out);
    base_file_drop(f, (size_t)(data - f->data), (size_t)j->bytes);
}

static int by_size(const void *a, const void *b)
{
    const struct job *x = a, *y = b;
    return x->bytes > y->bytes ? -1 : x->bytes < y->bytes;
}

static void add_job(struct hasher *h, size_t entry, uint32_t file, uint64_t bytes)
{
    h->jobs[h->n_jobs++] = (struct job){.entry = entry, .file = file, .bytes = bytes};
    h->all += bytes;
}

/* Largest first: the last jobs to end are then small, and no thread waits long for another. */
static void make_jobs(struct hasher *h)
{
    const struct model *m = h->m;
    for (uint32_t f = 0; f < m->n_files; f++)
        if (!h->cached[f])
            add_job(h, NO_ENTRY, f, model_tensors_file(m->files[f])->size);
    for (size_t i = 0; i < m->n_entries; i++)
        if (m->is_shape || !h->cached[m->entries[i].file])
            add_job(h, i, m->entries[i].file, m->entries[i].bytes);
    qsort(h->jobs, h->n_jobs, sizeof *h->jobs, by_size);
}

static int run_jobs(struct hasher *h, unsigned n_threads, struct baton_error *e)
{
    struct base_pool *pool = NULL;
    if (h->n_jobs == 0)
        return 0;
    int rc = base_pool_open(&pool, n_threads ? n_threads : 1, e);
    if (rc)
        return rc;
    base_pool_run(pool, hash_job, h, h->n_jobs);
    base_pool_close(pool);
    return 0;
}

static int hash_weights(struct hasher *h, unsigned n_threads, bool no_cache, struct baton_error *e)
{
    const struct model *m = h->m;
    h->jobs = base_try_alloc(m->n_entries + m->n_files, sizeof *h->jobs, e);
    h->file_digest = h->jobs ? base_try_alloc(m->n_files + 1, 32, e) : NULL;
    h->entry_digest = h->file_digest ? base_try_alloc(m->n_entries, 32, e) : NULL;
    h->cached = h->entry_digest ? base_try_alloc(m->n_files + 1, 1, e) : NULL;
    if (!h->cached)
        return BATON_ERR_NOMEM;
    for (uint32_t f = 0; f < m->n_files; f++)
        h->cached[f] = !no_cache && cache_load(h, f);
    make_jobs(h);
    int rc = run_jobs(h, n_threads, e);
    for (uint32_t f = 0; f < m->n_files && !rc; f++)
        if (!no_cache && !h->cached[f])
            cache_store(h, f);
    if (!rc && h->progress)
        h->progress(h->ctx, h->all, h->all);
    return rc;
}

/* ---- the four values ----------------------------------------------------------------------- */

static void put(struct base_sha256 *s, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void put(struct base_sha256 *s, const char *fmt, ...)
{
    char line[512];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    base_sha256_update(s, line, n < 0 ? 0 : (size_t)n < sizeof line ? (size_t)n : sizeof line - 1);
}

static void put_rope(struct base_sha256 *s, const char *name, const struct device_rope *rope)
{
    for (uint32_t i = 0; i < rope->head_dim / 2; i++)
        put(s, "%s.%u=%.9g\n", name, i, (double)rope->inv_freq[i]);
}

/* What decides how numbers are computed from weights and ids. Neither where generation ends nor how
 * many positions are allowed is part of it, nor the class name: two of them hold the same model. */
static void put_config(struct base_sha256 *s, const struct model_config *c)
{
    static const char *const families[] = {"?", "llama", "qwen3", "gemma3"};
    put(s, "family=%s\nlayers=%u\nhidden=%u\ninner=%u\nvocab=%u\n", families[c->family],
        c->n_layers, c->hidden, c->inner, c->vocab);
    put(s, "q_heads=%u\nkv_heads=%u\nhead_dim=%u\n", c->q_heads, c->kv_heads, c->head_dim);
    put(s, "norm_eps=%.17g\ntied=%d\nattn_bias=%d\nact=%d\n", c->norm_eps, c->tied, c->attn_bias,
        (int)c->act);
    put(s, "attn_scale=%.17g\nembed_scale=%.17g\nwindow=%u\n", c->attn_scale, c->embed_scale,
        c->window);
    for (uint32_t l = 0; l < c->n_layers; l++)
        put(s, "local.%u=%u\n", l, c->local[l]);
    put_rope(s, "rope_global", &c->rope_global);
    put_rope(s, "rope_local", &c->rope_local);
}

static void finish_weights(const struct hasher *h, uint8_t out[32])
{
    struct base_sha256 s;
    char hex[65], shape[96];
    base_sha256_init(&s);
    for (size_t i = 0; i < h->m->n_entries; i++) {
        const struct model_entry *x = &h->m->entries[i];
        base_hex(h->entry_digest[i], 32, hex);
        put(&s, "%s %s %s %s\n", x->name, model_dtype_name(x->dtype),
            model_shape_text(shape, x->shape, x->n_dims), hex);
    }
    base_sha256_final(&s, out);
}

/* Hash a small file of the folder; *found false where there is none. */
static int hash_file(const struct model *m, const char *name, bool *found, uint8_t out[32],
                     struct baton_error *e)
{
    struct base_file f = {0};
    struct stat st;
    char *path = base_path_join(m->path, name, e);
    if (!path)
        return BATON_ERR_NOMEM;
    *found = lstat(path, &st) == 0 || errno != ENOENT;
    int rc = *found ? base_file_open(&f, path, e) : 0;
    if (!rc && f.size > SMALL_MAX)
        rc = base_fail(e, BATON_ERR_INPUT, "%s: larger than the %zu bytes allowed", path,
                       SMALL_MAX);
    free(path);
    if (!rc && *found)
        base_sha256(f.data, f.size, out);
    base_file_close(&f);
    return rc;
}

/* A line as sha256sum prints it, in text mode. */
static void put_sum(struct base_sha256 *s, const uint8_t digest[32], const char *name)
{
    char hex[65];
    base_hex(digest, 32, hex);
    base_sha256_update(s, hex, 64);
    base_sha256_update(s, "  ", 2);
    base_sha256_update(s, name, strlen(name));
    base_sha256_update(s, "\n", 1);
}

/* Weight files are sorted already; the two others go where C order puts them. */
static int finish_pin(const struct hasher *h, struct model_identity *id, struct baton_error *e)
{
    struct {
        const char *name;
        uint8_t digest[32];
        bool there;
    } extra[2] = {{.name = "config.json"}, {.name = "tokenizer.json"}};
    struct base_sha256 s;
    unsigned x = 0;
    for (unsigned i = 0; i < 2; i++) {
        int rc = hash_file(h->m, extra[i].name, &extra[i].there, extra[i].digest, e);
        if (rc)
            return rc;
    }
    base_sha256_init(&s);
    for (uint32_t f = 0; f <= h->m->n_files; f++) {
        const char *name = f < h->m->n_files ? h->m->file_names[f] : NULL;
        for (; x < 2 && (!name || strcmp(extra[x].name, name) < 0); x++)
            if (extra[x].there)
                put_sum(&s, extra[x].digest, extra[x].name);
        if (name)
            put_sum(&s, h->file_digest[f], name);
    }
    base_sha256_final(&s, id->pin);
    if (extra[1].there)
        memcpy(id->tokenizer, extra[1].digest, 32);
    return 0;
}

int model_hash(const struct model *m, unsigned n_threads, bool no_cache,
               void (*progress)(void *ctx, uint64_t done, uint64_t all), void *ctx,
               struct model_identity *out, struct baton_error *e)
{
    struct hasher h = {.m = m, .progress = progress, .ctx = ctx, .owner = pthread_self()};
    struct model_identity id = {0};
    struct base_sha256 s;
    int rc = hash_weights(&h, n_threads, no_cache, e);
    if (!rc) {
        base_sha256_init(&s);
        put_config(&s, &m->config);
        base_sha256_final(&s, id.arch);
        finish_weights(&h, id.weights);
        /* Weights made in memory have no files: no pin, no tokenizer. */
        rc = m->is_shape ? 0 : finish_pin(&h, &id, e);
    }
    free(h.jobs);
    free(h.file_digest);
    free(h.entry_digest);
    free(h.cached);
    if (!rc)
        *out = id;
    return rc;
}
