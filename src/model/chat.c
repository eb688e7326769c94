/* SPDX-License-Identifier: Apache-2.0 */
/* Chat formats. A template is Jinja; running strangers' Jinja is not what this does. The formats
 * below say in C what the known templates say, each template being told by fragments that it must
 * have and fragments that would make it say more than we do:
 *
 *   chatml  a plain form (turns as they are, the empty think block on demand) and Qwen3's own,
 * which
 *           also moves the thoughts of assistant turns (its tools need tool messages: never here)
 *   llama3  headers, contents trimmed. Llama 3.1's and 3.2's own template writes a knowledge and
 *           today's date into the system turn: refused, because the date is the caller's to know
 *   gemma   turns, contents trimmed, the system message before the first turn's text
 *
 * Texts are put together exactly as Jinja does it: trim is Python's str.strip().
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <jansson.h>

#include "base/base.h"
#include "model/chat.h"
#include "model/tokenizer_priv.h"

enum format { CHATML, CHATML_QWEN3, LLAMA3, GEMMA, N_FORMATS };

struct model_chat {
    enum format format;
    char *bos; /* text of the start token; "" where there is none */
};

/* ---- which format -------------------------------------------------------------------------- */

enum { FRAGMENTS = 8 };
static const struct {
    const char *name;
    const char *needs[FRAGMENTS];
    const char *refuses[FRAGMENTS];
} formats[N_FORMATS] = {
    [CHATML] = {"chatml",
                {"'<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n'",
                 "'<|im_start|>assistant\\n'", "enable_thinking is false",
                 "'<think>\\n\\n</think>\\n\\n'"},
                {"tools", "system", "reasoning_content", "trim", "strip", "bos_token"}},
    [CHATML_QWEN3] = {"chatml",
                      {"ns.last_query_index",
                       "'<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n'",
                       "content.lstrip('\\n')", "reasoning_content.strip('\\n')",
                       "loop.last or (not loop.last and reasoning_content)",
                       "enable_thinking is false", "'<think>\\n\\n</think>\\n\\n'"},
                      {"bos_token", "You are a helpful", "| trim"}},
    [LLAMA3] = {"llama3",
                {"bos_token", "<|start_header_id|>", "<|end_header_id|>",
                 "message['content'] | trim", "<|eot_id|>",
                 "<|start_header_id|>assistant<|end_header_id|>"},
                {"Knowledge Date", "date_string", "tools", "strftime", "raise_exception", "elif"}},
    [GEMMA] = {"gemma",
               {"bos_token", "<start_of_turn>", "<end_of_turn>", "<start_of_turn>model",
                "messages[0]['content'] + '", "message['content'] | trim",
                "Conversation roles must alternate"},
               {"System role not supported", "tools", "strftime"}},
};

static bool has_all(const char *text, const char *const *fragments)
{
    for (unsigned i = 0; i < FRAGMENTS && fragments[i]; i++)
        if (!strstr(text, fragments[i]))
            return false;
    return true;
}

static const char *first_of(const char *text, const char *const *fragments)
{
    for (unsigned i = 0; i < FRAGMENTS && fragments[i]; i++)
        if (strstr(text, fragments[i]))
            return fragments[i];
    return NULL;
}

static int recognise(const char *template, const char *what, enum format *out,
                     struct baton_error *e)
{
    const char *extra = NULL;
    for (int i = 0; i < N_FORMATS; i++) {
        if (!has_all(template, formats[i].needs))
            continue;
        const char *odd = first_of(template, formats[i].refuses);
        if (!odd) {
            *out = (enum format)i;
            return 0;
        }
        extra = odd;
    }
    if (strstr(template, "Cutting Knowledge Date"))
        extra = "Cutting Knowledge Date";
    return base_fail(e, BATON_ERR_UNSUPPORTED,
                     "%s: the chat template is none of ChatML (Qwen3), Llama 3, Gemma 3%s%s%s",
                     what, extra ? ": it has \"" : "", extra ? extra : "", extra ? "\"" : "");
}

/* ---- opening ------------------------------------------------------------------------------- */

enum { CONFIG_MAX = 64 << 20, TEMPLATE_MAX = 1 << 20 };

/* The template in the configuration: a string, or a list of named ones ("default" counts). */
static const char *template_in(const json_t *config)
{
    const json_t *t = json_object_get(config, "chat_template"), *one;
    size_t i;
    json_array_foreach(t, i, one)
    {
        const char *name = json_string_value(json_object_get(one, "name"));
        if (name && strcmp(name, "default") == 0)
            return json_string_value(json_object_get(one, "template"));
    }
    return json_string_value(t);
}

/* A token's text: a string, or an object with its content. */
static const char *token_text(const json_t *config, const char *key)
{
    const json_t *t = json_object_get(config, key);
    const char *s = json_string_value(json_is_object(t) ? json_object_get(t, "content") : t);
    return s ? s : "";
}

static int open_with(const char *template, const json_t *config, const char *what,
                     struct model_chat **out, struct baton_error *e)
{
    enum format format = CHATML;
    if (!template)
        return base_fail(e, BATON_ERR_UNSUPPORTED, "%s: there is no chat template", what);
    int rc = recognise(template, what, &format, e);
    if (rc)
        return rc;
    struct model_chat *c = base_try_alloc(1, sizeof *c, e);
    if (!c)
        return BATON_ERR_NOMEM;
    c->format = format;
    c->bos = base_try_strdup(token_text(config, "bos_token"), e);
    if (!c->bos) {
        model_chat_close(c);
        return BATON_ERR_NOMEM;
    }
    *out = c;
    return 0;
}

/* chat_template.jinja beside the configuration goes before what stands in it. No file: *out
 * NULL. */
static int read_jinja(const char *dir, char **out, struct baton_error *e)
{
    *out = NULL;
    char *path = base_path_join(dir, "chat_template.jinja", e);
    if (!path)
        return BATON_ERR_NOMEM;
    struct stat st;
    size_t n;
    int rc = 0;
    if (lstat(path, &st) == 0 || errno != ENOENT) /* there, readable or not */
        rc = base_file_read(path, TEMPLATE_MAX, out, &n, e);
    free(path);
    return rc;
}

int model_chat_open(const char *dir, struct model_chat **out, struct baton_error *e)
{
    json_t *config = NULL;
    char *jinja = NULL;
    char *path = base_path_join(dir, "tokenizer_config.json", e);
    int rc = path ? base_json_load(path, CONFIG_MAX, &config, e) : BATON_ERR_NOMEM;
    if (rc == 0)
        rc = read_jinja(dir, &jinja, e);
    if (rc == 0)
        rc = open_with(jinja ? jinja : template_in(config), config, path, out, e);
    json_decref(config);
    free(jinja);
    free(path);
    return rc;
}

void model_chat_close(struct model_chat *c)
{
    if (!c)
        return;
    free(c->bos);
    free(c);
}

const char *model_chat_name(const struct model_chat *c)
{
    return formats[c->format].name;
}

/* ---- rendering ----------------------------------------------------------------------------- */

struct slice {
    const char *s;
    size_t n;
};

/* The text being made; the first failure stays. */
struct render {
    struct model_text text;
    int rc;
    struct baton_error *e;
};

static void put_slice(struct render *r, struct slice s)
{
    if (r->rc == 0)
        r->rc = model_text_add(&r->text, s.s, s.n, r->e);
}

static struct slice slice_of(const char *s)
{
    return (struct slice){s, strlen(s)};
}

static void put(struct render *r, const char *s)
{
    put_slice(r, slice_of(s));
}

/* str.isspace(): White_Space and the four separators U+001C to U+001F. */
static bool is_strip_space(uint32_t cp)
{
    return model_unicode_is_space(cp) || (cp >= 0x1C && cp <= 0x1F);
}

static struct slice trim(struct slice t)
{
    size_t len;
    while (t.n > 0 && is_strip_space(model_utf8_get(t.s, &len))) {
        t.s += len;
        t.n -= len;
    }
    while (t.n > 0) {
        size_t at = t.n - 1;
        while (((unsigned char)t.s[at] & 0xC0) == 0x80)
            at--;
        if (!is_strip_space(model_utf8_get(t.s + at, &len)))
            break;
        t.n = at;
    }
    return t;
}

static struct slice left_newlines(struct slice t)
{
    for (; t.n > 0 && *t.s == '\n'; t.n--)
        t.s++;
    return t;
}

static struct slice right_newlines(struct slice t)
{
    while (t.n > 0 && t.s[t.n - 1] == '\n')
        t.n--;
    return t;
}

static bool is_role(const struct model_message *m, const char *role)
{
    return strcmp(m->role, role) == 0;
}

static void chatml_turn(struct render *r, const char *role, struct slice content)
{
    put(r, "<|im_start|>");
    put(r, role);
    put(r, "\n");
    put_slice(r, content);
    put(r, "<|im_end|>\n");
}

/* ---- Qwen3 --------------------------------------------------------------------------------- */

static bool begins(struct slice t, const char *with)
{
    size_t n = strlen(with);
    return t.n >= n && memcmp(t.s, with, n) == 0;
}

static bool ends(struct slice t, const char *with)
{
    size_t n = strlen(with);
    return t.n >= n && memcmp(t.s + t.n - n, with, n) == 0;
}

static const char *last_of(struct slice t, const char *what)
{
    size_t n = strlen(what);
    for (size_t i = t.n; i >= n; i--)
        if (memcmp(t.s + i - n, what, n) == 0)
            return t.s + i - n;
    return NULL;
}

/* Split what an assistant said into thoughts and answer, as the template does where the content
 * holds "</think>": the answer behind the last one, the thoughts before the first. */
static void split_thoughts(struct slice *content, struct slice *thoughts)
{
    static const char end[] = "</think>", begin[] = "<think>";
    struct slice all = *content;
    *thoughts = (struct slice){"", 0};
    const char *last = last_of(all, end);
    if (!last)
        return;
    const char *first = memmem(all.s, all.n, end, sizeof end - 1);
    content->s = last + sizeof end - 1;
    content->n = (size_t)(all.s + all.n - content->s);
    *content = left_newlines(*content);
    *thoughts = right_newlines((struct slice){all.s, (size_t)(first - all.s)});
    const char *opened = last_of(*thoughts, begin);
    if (opened) {
        opened += sizeof begin - 1;
        *thoughts = (struct slice){opened, (size_t)(thoughts->s + thoughts->n - opened)};
    }
    *thoughts = left_newlines(*thoughts);
}

static size_t last_query(const struct model_message *m, size_t n)
{
    for (size_t i = n; i > 0; i--) {
        struct slice content = slice_of(m[i - 1].content);
        bool tool = begins(content, "<tool_response>") && ends(content, "</tool_response>");
        if (is_role(&m[i - 1], "user") && !tool)
            return i - 1;
    }
    return n - 1;
}

static void qwen3_assistant(struct render *r, struct slice content, bool after_query, bool last)
{
    struct slice thoughts;
    split_thoughts(&content, &thoughts);
    put(r, "<|im_start|>assistant\n");
    if (after_query && (last || thoughts.n > 0)) {
        put(r, "<think>\n");
        put_slice(r, right_newlines(left_newlines(thoughts)));
        put(r, "\n</think>\n\n");
        content = left_newlines(content);
    }
    put_slice(r, content);
    put(r, "<|im_end|>\n");
}

static void render_qwen3(struct render *r, const struct model_message *m, size_t n)
{
    size_t query = last_query(m, n);
    for (size_t i = 0; i < n; i++) {
        struct slice content = slice_of(m[i].content);
        if (is_role(&m[i], "assistant"))
            qwen3_assistant(r, content, i > query, i + 1 == n);
        else
            chatml_turn(r, m[i].role, content);
    }
}

/* ---- the others ---------------------------------------------------------------------------- */

static void render_llama3(struct render *r, const char *bos, const struct model_message *m,
                          size_t n)
{
    put(r, bos);
    for (size_t i = 0; i < n; i++) {
        put(r, "<|start_header_id|>");
        put(r, m[i].role);
        put(r, "<|end_header_id|>\n\n");
        put_slice(r, trim(slice_of(m[i].content)));
        put(r, "<|eot_id|>");
    }
}

static void render_gemma(struct render *r, const char *bos, const struct model_message *m, size_t n)
{
    size_t first = is_role(&m[0], "system");
    put(r, bos);
    for (size_t i = first; i < n; i++) {
        if (is_role(&m[i], "user") != ((i - first) % 2 == 0)) {
            r->rc = base_fail(r->e, BATON_ERR_INPUT,
                              "message %zu is from %s: this model's chat format wants user and "
                              "assistant in turn",
                              i, m[i].role);
            return;
        }
        put(r, "<start_of_turn>");
        put(r, is_role(&m[i], "assistant") ? "model" : m[i].role);
        put(r, "\n");
        if (i == first && first == 1) {
            put(r, m[0].content);
            put(r, "\n\n");
        }
        put_slice(r, trim(slice_of(m[i].content)));
        put(r, "<end_of_turn>\n");
    }
}

static int check_messages(const struct model_message *m, size_t n, struct baton_error *e)
{
    if (n == 0)
        return base_fail(e, BATON_ERR_INPUT, "a conversation without messages");
    for (size_t i = 0; i < n; i++) {
        if (!m[i].role || !m[i].content)
            return base_fail(e, BATON_ERR_INPUT, "message %zu has no role or no content", i);
        if (!is_role(&m[i], "system") && !is_role(&m[i], "user") && !is_role(&m[i], "assistant"))
            return base_fail(e, BATON_ERR_INPUT,
                             "message %zu: role \"%.40s\" is none of system, user, assistant", i,
                             m[i].role);
        size_t len = strlen(m[i].content), valid = model_utf8_valid(m[i].content, len);
        if (valid < len)
            return base_fail(e, BATON_ERR_INPUT, "message %zu is not UTF-8 at byte %zu", i, valid);
    }
    return 0;
}

static void put_generation(struct render *r, enum format format, bool think)
{
    static const char *const headers[] = {
        [CHATML] = "<|im_start|>assistant\n",
        [CHATML_QWEN3] = "<|im_start|>assistant\n",
        [LLAMA3] = "<|start_header_id|>assistant<|end_header_id|>\n\n",
        [GEMMA] = "<start_of_turn>model\n",
    };
    put(r, headers[format]);
    if (!think && (format == CHATML || format == CHATML_QWEN3))
        put(r, "<think>\n\n</think>\n\n");
}

int model_chat_render(const struct model_chat *c, const struct model_message *messages, size_t n,
                      bool add_generation, bool think, char **text, struct baton_error *e)
{
    int rc = check_messages(messages, n, e);
    if (rc)
        return rc;
    struct render r = {.e = e};
    switch (c->format) {
    case CHATML:
        for (size_t i = 0; i < n; i++)
            chatml_turn(&r, messages[i].role, slice_of(messages[i].content));
        break;
    case CHATML_QWEN3:
        render_qwen3(&r, messages, n);
        break;
    case LLAMA3:
        render_llama3(&r, c->bos, messages, n);
        break;
    default:
        render_gemma(&r, c->bos, messages, n);
    }
    if (add_generation)
        put_generation(&r, c->format, think);
    put_slice(&r, (struct slice){"", 1}); /* the NUL */
    if (r.rc)
        free(r.text.data);
    else
        *text = r.text.data;
    return r.rc;
}
