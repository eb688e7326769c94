/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoint folders made by tests: temporary directories, a safetensors writer, edited copies. */
#ifndef TESTS_MODEL_FOLDER_H
#define TESTS_MODEL_FOLDER_H

#include <errno.h>
#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"
#include "model/model.h"
#include "tests/test.h"

/* A folder below the build's temporary place; removed by folder_remove. */
static inline void folder_make(char dir[256])
{
    const char *tmp = getenv("TMPDIR");
    snprintf(dir, 256, "%s/baton-test-XXXXXX", tmp ? tmp : "/tmp");
    assert_non_null(mkdtemp(dir));
}

static inline int folder_remove_one(const char *path, const struct stat *st, int kind,
                                    struct FTW *at)
{
    return remove(path);
}

static inline void folder_remove(const char *dir)
{
    nftw(dir, folder_remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

static inline const char *in(const char *dir, const char *name)
{
    static char buf[8][1024];
    static unsigned turn;
    char *p = buf[turn++ % 8];
    snprintf(p, sizeof *buf, "%s/%s", dir, name);
    return p;
}

static inline void put_file(const char *dir, const char *name, const void *data, size_t n)
{
    FILE *f = fopen(in(dir, name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static inline void put_text(const char *dir, const char *name, const char *text)
{
    put_file(dir, name, text, strlen(text));
}

/* The text of a file of the source tree or elsewhere; free(). */
static inline char *get_text(const char *path, size_t *n)
{
    struct stat st;
    FILE *f = fopen(path, "rb");
    if (!f || fstat(fileno(f), &st))
        fail_msg("%s: %s", path, strerror(errno));
    *n = (size_t)st.st_size;
    char *text = malloc(*n + 1);
    assert_non_null(text);
    assert_int_equal(fread(text, 1, *n, f), *n);
    text[*n] = '\0';
    fclose(f);
    return text;
}

static inline const char *dtype_text(uint32_t dtype)
{
    return dtype == BATON_F32    ? "F32"
           : dtype == BATON_F16  ? "F16"
           : dtype == BATON_BF16 ? "BF16"
           : dtype == MODEL_I32  ? "I32"
                                 : "I64";
}

/* Write tensors; `pad` bytes of blanks end the header (odd numbers misalign the data). */
static inline void write_tensors(const char *path, const struct model_tensor *t, size_t n,
                                 unsigned pad)
{
    size_t cap = 1024 + n * 512, len = 0;
    uint64_t at = 0;
    char *h = malloc(cap);
    if (!h) {
        fail_msg("no memory for a header of %zu bytes", cap);
        return;
    }
    len += (size_t)sprintf(h, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (size_t i = 0; i < n; i++) {
        len += (size_t)sprintf(h + len, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", t[i].name,
                               dtype_text(t[i].dtype));
        for (uint32_t d = 0; d < t[i].n_dims; d++)
            len += (size_t)sprintf(h + len, "%s%llu", d ? "," : "",
                                   (unsigned long long)t[i].shape[d]);
        len += (size_t)sprintf(h + len, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)at,
                               (unsigned long long)(at + t[i].bytes));
        at += t[i].bytes;
    }
    len += (size_t)sprintf(h + len, "}");
    while (len % 8)
        h[len++] = ' ';
    for (unsigned i = 0; i < pad; i++)
        h[len++] = ' ';
    uint64_t header = len;
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fwrite(&header, 8, 1, f);
    fwrite(h, 1, len, f);
    for (size_t i = 0; i < n; i++)
        fwrite(t[i].data, 1, (size_t)t[i].bytes, f);
    assert_int_equal(fclose(f), 0);
    free(h);
}

/* All tensors of a source checkpoint file in an array that a test may edit. */
struct edit {
    struct model_tensors *file;
    struct model_tensor list[600];
    size_t n;
};

static inline void edit_open(struct edit *x, const char *path)
{
    struct baton_error e;
    test_ok(model_tensors_open(path, &x->file, &e), &e);
    x->n = model_tensors_count(x->file);
    assert_true(x->n < 590);
    for (size_t i = 0; i < x->n; i++)
        x->list[i] = *model_tensors_at(x->file, i);
}

static inline void edit_close(struct edit *x)
{
    model_tensors_close(x->file);
}

static inline struct model_tensor *edit_find(struct edit *x, const char *name)
{
    for (size_t i = 0; i < x->n; i++)
        if (!strcmp(x->list[i].name, name))
            return &x->list[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

#endif
