/* SPDX-License-Identifier: Apache-2.0 */
/* Not a test by itself: encodes and decodes for one. Reads lines of JSON from stdin:
 *     {"text": "...", "special": true}  ->  {"ids": [...], "keep": "...", "skip": "..."}
 *     {"ids": [...]}                    ->  {"keep": "...", "skip": "..."}
 *     {"messages": [...], "generate": true, "think": true}  ->  {"text": "..."}
 *     {"about": true}  ->  {"seconds": ..., "private": bytes, "peak": bytes} of the loading
 * and answers line by line; a refusal is {"error": "...", "code": ...}. `tokdump DIR` opens DIR's
 * tokenizer and, where there is one, its chat format. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "base/base.h"
#include "model/chat.h"
#include "model/tokenizer.h"

struct about {
    double seconds;
    uint64_t private_bytes, peak;
};

static json_t *refused(const struct baton_error *e)
{
    return json_pack("{s:s, s:i}", "error", e->text, "code", (int)e->code);
}

static int put_decoded(const struct model_tokenizer *t, const int32_t *ids, size_t n, json_t *out,
                       struct baton_error *e)
{
    static const char *const keys[] = {"keep", "skip"};
    int rc = 0;
    for (int skip = 0; skip < 2 && rc == 0; skip++) {
        char *text = NULL;
        size_t n_text = 0;
        rc = model_tokenizer_decode(t, ids, n, skip, &text, &n_text, e);
        if (rc == 0)
            json_object_set_new(out, keys[skip], json_stringn(text, n_text));
        free(text);
    }
    return rc;
}

static int answer_text(const struct model_tokenizer *t, const json_t *in, json_t *out,
                       struct baton_error *e)
{
    const json_t *text = json_object_get(in, "text");
    int32_t *ids = NULL;
    size_t n = 0;
    int rc = model_tokenizer_encode(t, json_string_value(text), json_string_length(text),
                                    json_is_true(json_object_get(in, "special")), &ids, &n, e);
    if (rc == 0) {
        json_t *list = json_array();
        for (size_t i = 0; i < n; i++)
            json_array_append_new(list, json_integer(ids[i]));
        json_object_set_new(out, "ids", list);
        rc = put_decoded(t, ids, n, out, e);
    }
    free(ids);
    return rc;
}

static int answer_ids(const struct model_tokenizer *t, const json_t *in, json_t *out,
                      struct baton_error *e)
{
    const json_t *list = json_object_get(in, "ids");
    size_t n = json_array_size(list);
    int32_t *ids = calloc(n + 1, sizeof *ids);
    for (size_t i = 0; i < n; i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(list, i));
    int rc = put_decoded(t, ids, n, out, e);
    free(ids);
    return rc;
}

static int answer_chat(const struct model_chat *c, const json_t *in, json_t *out,
                       struct baton_error *e)
{
    const json_t *list = json_object_get(in, "messages");
    size_t n = json_array_size(list);
    struct model_message *m = calloc(n + 1, sizeof *m);
    for (size_t i = 0; i < n; i++) {
        const json_t *one = json_array_get(list, i);
        m[i].role = json_string_value(json_object_get(one, "role"));
        m[i].content = json_string_value(json_object_get(one, "content"));
    }
    char *text = NULL;
    int rc = c ? model_chat_render(c, m, n, json_is_true(json_object_get(in, "generate")),
                                   json_is_true(json_object_get(in, "think")), &text, e)
               : base_fail(e, BATON_ERR_UNSUPPORTED, "no chat format");
    if (rc == 0)
        json_object_set_new(out, "text", json_string(text));
    free(text);
    free(m);
    return rc;
}

static void put_about(const struct about *a, json_t *out)
{
    json_object_set_new(out, "seconds", json_real(a->seconds));
    json_object_set_new(out, "private", json_integer((json_int_t)a->private_bytes));
    json_object_set_new(out, "peak", json_integer((json_int_t)a->peak));
}

static void answer(const struct model_tokenizer *t, const struct model_chat *c,
                   const struct about *about, const char *line, size_t n)
{
    struct baton_error e = {0};
    json_error_t why;
    json_t *in = json_loadb(line, n, JSON_ALLOW_NUL, &why), *out = json_object();
    int rc = 0;
    if (json_object_get(in, "about"))
        put_about(about, out);
    else if (json_object_get(in, "messages"))
        rc = answer_chat(c, in, out, &e);
    else if (json_object_get(in, "text"))
        rc = answer_text(t, in, out, &e);
    else
        rc = answer_ids(t, in, out, &e);
    if (rc) {
        json_decref(out);
        out = refused(&e);
    }
    json_dumpf(out, stdout, JSON_ENSURE_ASCII | JSON_COMPACT);
    putchar('\n');
    fflush(stdout);
    json_decref(out);
    json_decref(in);
}

int main(int argc, char **argv)
{
    struct baton_error e = {0};
    struct model_tokenizer *t = NULL;
    struct model_chat *c = NULL;
    struct about about;
    if (argc != 2)
        return 2;
    uint64_t begin = base_now_ns();
    if (model_tokenizer_open(argv[1], &t, &e)) {
        fprintf(stderr, "%s\n", e.text);
        return 1;
    }
    about.seconds = (double)(base_now_ns() - begin) * 1e-9;
    base_memory_used(&about.peak, &about.private_bytes);
    (void)model_chat_open(argv[1], &c, NULL); /* without one, messages are refused */
    char *line = NULL;
    size_t cap = 0;
    for (ssize_t n; (n = getline(&line, &cap, stdin)) > 0;)
        answer(t, c, &about, line, (size_t)n);
    free(line);
    model_chat_close(c);
    model_tokenizer_close(t);
    return 0;
}
