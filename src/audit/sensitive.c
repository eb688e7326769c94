/* SPDX-License-Identifier: Apache-2.0 */
/* Paths, users, hosts and keys in text. */
#include <arpa/inet.h>
#include <errno.h>
#include <fnmatch.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "audit/folder_priv.h"
#include "audit/sensitive.h"
#include "base/base.h"

enum { SHOWN_MOST = 10000, NAMES_MOST = 8, NAME_BYTES = 256, TEXT_BYTES = 160 };

/* A match is a finding where `sure` (may be NULL) says so of its text. */
struct kind {
    const char *name, *pattern;
    bool (*sure)(const char *text);
};

/* No name has more labels, and PCRE2 gives up on a line of thousands. */
#define LABELS "{1,126}"
#define WORD_BEGINS "(?<![A-Za-z0-9_.$}/\\\\-])"

static bool tells_v4(const char *text);
static bool tells_v6(const char *text);

static const struct kind kinds[] = {
    {"path",
     WORD_BEGINS "/(?:home|root|work|Users|mnt|opt|data|media|scratch|srv|tmp|var/tmp|private|"
                 "workspace)/[A-Za-z0-9_.~@+-][^\\s\"'<>|`,;:)\\]}\\\\]*",
     NULL},
    {"path", "(?<![A-Za-z0-9])[A-Za-z]:\\\\{1,2}Users\\\\{1,2}[^\\s\"'\\\\]+", NULL},
    {"user",
     "(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]+@(?!users\\.noreply\\.)(?:[A-Za-z0-9-]++\\.)" LABELS
     "(?!example\\b|invalid\\b|test\\b)[A-Za-z]{2,}(?![A-Za-z0-9-])"
     "(?<!@example\\.com)(?<!@example\\.org)(?<!@example\\.net)",
     NULL},
    {"host", "(?<![0-9A-Za-z_.-])(?:[0-9]{1,3}\\.){3}[0-9]{1,3}(?![0-9A-Za-z_-]|\\.[0-9])",
     tells_v4},
    {"host", "(?<![0-9A-Za-z_:.])[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:.]{0,44}[0-9A-Fa-f](?![\\w:])",
     tells_v6},
    {"host", "(?<![0-9A-Za-z_:])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![0-9A-Za-z_:])", NULL},
    {"host", "(?<![\\w.@-])(?:[a-z0-9-]++\\.)" LABELS "(?:internal|corp|lan|intranet)(?![\\w.(-])",
     NULL},
    {"key", "-----BEGIN [A-Z ]*PRIVATE KEY-----", NULL},
    {"key",
     "(?<![A-Za-z0-9])(?:AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\\w{30,}|"
     "glpat-[\\w-]{20,}|hf_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{20,}|xox[abprs]-[A-Za-z0-9-]{20,}|"
     "AIza[\\w-]{35}|eyJ[\\w-]{10,}\\.eyJ[\\w-]{10,}|bt1\\.[\\w-]{40,})",
     NULL},
    {"key",
     "(?i)\\bauthorization[\"']?\\s*[:=]\\s*[\"']?(?:bearer|basic)\\s+[A-Za-z0-9._~+/=-]{12,}",
     NULL},
    {"key",
     "(?i)(?:api[_-]?key|secret|token|passw(?:or)?d)[\"']?\\s*[:=]\\s*[\"']"
     "(?=[^\"'\\s]*[0-9])(?=[^\"'\\s]*[A-Za-z])[A-Za-z0-9._~+/=-]{16,}[\"']",
     NULL},
};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* A pattern ready to be used: the table's, then one for each name. */
struct pattern {
    const char *kind;
    pcre2_code *code;
    bool (*sure)(const char *text);
};

struct audit_search {
    struct pattern patterns[KINDS + NAMES_MOST];
    uint32_t n_patterns;
    pcre2_match_data *match;
    json_t *known;                 /* [{"kind", "file", "text", "used"}] */
    json_t *findings, *unsearched; /* as reported */
    uint64_t files, binary, news, old;
};

/* ---- addresses ---------------------------------------------------------------------------- */

/* Loopback, "any", broadcast and the blocks for documentation say nothing of a host. */
static bool tells_v4(const char *text)
{
    struct in_addr a;
    if (inet_pton(AF_INET, text, &a) != 1)
        return false;
    uint32_t v = ntohl(a.s_addr);
    return v >> 24 != 127 && v >> 24 != 0 && v != UINT32_MAX && v >> 8 != 0xc00002 &&
           v >> 8 != 0xc63364 && v >> 8 != 0xcb0071;
}

/* Shorter ones are slices of a list more often than addresses. */
static bool tells_v6(const char *text)
{
    struct in6_addr a;
    if (strlen(text) < 6 || !strpbrk(text, "0123456789") || inet_pton(AF_INET6, text, &a) != 1)
        return false;
    const uint8_t documentation[] = {0x20, 0x01, 0x0d, 0xb8};
    return !IN6_IS_ADDR_LOOPBACK(&a) && !IN6_IS_ADDR_UNSPECIFIED(&a) &&
           memcmp(&a, documentation, sizeof documentation) != 0;
}

/* ---- patterns ----------------------------------------------------------------------------- */

static int add_pattern(struct audit_search *s, const char *kind, const char *pattern,
                       bool (*sure)(const char *), struct baton_error *e)
{
    int code = 0;
    size_t at = 0;
    pcre2_code *c = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, 0, &code, &at, NULL);
    if (!c)
        return base_fail(e, BATON_ERR_NOMEM, "pattern '%.100s': PCRE2 error %d", pattern, code);
    (void)pcre2_jit_compile(c, PCRE2_JIT_COMPLETE); /* faster where there is a JIT; else as well */
    s->patterns[s->n_patterns++] = (struct pattern){kind, c, sure};
    return 0;
}

static bool says_something(const char *name)
{
    static const char *const nothing[] = {"root",   "user",   "users", "admin",     "runner",
                                          "ubuntu", "debian", "guest", "localhost", "nobody",
                                          "baton",  "test",   "build"};
    for (size_t i = 0; i < sizeof nothing / sizeof *nothing; i++)
        if (!strcmp(name, nothing[i]))
            return false;
    return strlen(name) >= 4 && strlen(name) < NAME_BYTES && !strstr(name, "\\E");
}

static int add_name(struct audit_search *s, const char *name, struct baton_error *e)
{
    char pattern[NAME_BYTES + 64];
    if (!name || !says_something(name) || s->n_patterns == KINDS + NAMES_MOST)
        return 0;
    snprintf(pattern, sizeof pattern, "(?<![A-Za-z0-9_])\\Q%s\\E(?![A-Za-z0-9_])", name);
    return add_pattern(s, "name", pattern, NULL, e);
}

/* Of this user and this host. They may be words as well, so theirs is a kind of its own. */
static int add_names(struct audit_search *s, struct baton_error *e)
{
    char buf[4096], host[NAME_BYTES] = "";
    struct passwd p, *found = NULL;
    int rc = 0;
    if (getpwuid_r(getuid(), &p, buf, sizeof buf, &found) == 0 && found)
        rc = add_name(s, p.pw_name, e);
    if (rc == 0)
        rc = add_name(s, getenv("USER"), e);
    if (rc == 0)
        rc = add_name(s, getenv("SUDO_USER"), e);
    if (rc == 0 && gethostname(host, sizeof host - 1) == 0)
        rc = add_name(s, host, e);
    return rc;
}

int audit_search_open(struct audit_search **out, struct baton_error *e)
{
    struct audit_search *s = base_try_alloc(1, sizeof *s, e);
    if (!s)
        return BATON_ERR_NOMEM;
    s->known = json_array();
    s->findings = json_array();
    s->unsearched = json_array();
    s->match = pcre2_match_data_create(1, NULL);
    int rc = s->match ? 0 : base_fail(e, BATON_ERR_NOMEM, "no memory for patterns");
    for (size_t i = 0; i < KINDS && rc == 0; i++)
        rc = add_pattern(s, kinds[i].name, kinds[i].pattern, kinds[i].sure, e);
    if (rc == 0)
        rc = add_names(s, e);
    if (rc)
        audit_search_close(s);
    else
        *out = s;
    return rc;
}

void audit_search_close(struct audit_search *s)
{
    if (!s)
        return;
    for (uint32_t i = 0; i < s->n_patterns; i++)
        pcre2_code_free(s->patterns[i].code);
    pcre2_match_data_free(s->match);
    json_decref(s->known);
    json_decref(s->findings);
    json_decref(s->unsearched);
    free(s);
}

/* ---- known findings ----------------------------------------------------------------------- */

static int take_known(struct audit_search *s, char *line, const char *path, uint32_t number,
                      struct baton_error *e)
{
    char *file = strchr(line, '\t'), *text = file ? strchr(file + 1, '\t') : NULL;
    if (!*line || *line == '#')
        return 0;
    if (!text)
        return base_fail(e, BATON_ERR_INPUT, "%.160s line %u: not 'KIND<tab>FILE<tab>TEXT'", path,
                         number);
    *file = *text = '\0';
    json_t *o = json_pack("{s:s,s:s,s:s,s:b}", "kind", line, "file", file + 1, "text", text + 1,
                          "used", false);
    if (!o || json_array_append_new(s->known, o))
        return base_fail(e, BATON_ERR_INPUT, "%.160s line %u: no text", path, number);
    return 0;
}

int audit_search_known(struct audit_search *s, const char *path, struct baton_error *e)
{
    char *text = NULL, *at;
    size_t n = 0;
    uint32_t number = 0;
    struct baton_error why;
    int rc = base_file_read(path, 16 << 20, &text, &n, &why);
    if (rc) /* a file that the user named */
        return base_fail(e, rc == BATON_ERR_IO ? BATON_ERR_INPUT : rc, "%s", why.text);
    at = text;
    for (char *line = strsep(&at, "\n"); line && rc == 0; line = strsep(&at, "\n"))
        rc = take_known(s, line, path, ++number, e);
    free(text);
    return rc;
}

static const char *member(const json_t *o, const char *key)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : "";
}

static bool is_known(struct audit_search *s, const char *kind, const char *file, const char *text)
{
    for (size_t i = 0; i < json_array_size(s->known); i++) {
        json_t *k = json_array_get(s->known, i);
        if (!strcmp(member(k, "kind"), kind) && !fnmatch(member(k, "file"), file, 0) &&
            !fnmatch(member(k, "text"), text, 0)) {
            json_object_set_new(k, "used", json_true());
            return true;
        }
    }
    return false;
}

/* ---- searching ---------------------------------------------------------------------------- */

/* A finding's text for a report: cut, one line, and of a key no more than tells which it is. */
static void show(char out[TEXT_BYTES], const char *kind, const char *text, size_t n)
{
    struct baton_error clean; /* its text is UTF-8 on one line */
    bool key = !strcmp(kind, "key");
    size_t most = key ? (n < 24 ? n / 2 : 12) : TEXT_BYTES - 4;
    base_fail(&clean, 0, "%.*s%s", (int)(n < most ? n : most), text, n > most ? "…" : "");
    snprintf(out, TEXT_BYTES, "%.*s", TEXT_BYTES - 1, clean.text);
}

static void add_finding(struct audit_search *s, const char *kind, const char *file, uint32_t line,
                        const char *text, size_t n)
{
    char shown[TEXT_BYTES];
    show(shown, kind, text, n);
    bool known = is_known(s, kind, file, shown);
    *(known ? &s->old : &s->news) += 1;
    if (json_array_size(s->findings) < SHOWN_MOST)
        json_array_append_new(s->findings,
                              json_pack("{s:s,s:i,s:s,s:s,s:b}", "file", file, "line", (int)line,
                                        "kind", kind, "text", shown, "known", known));
}

static bool believed(const struct pattern *p, const char *text, size_t n)
{
    char copy[64];
    if (!p->sure)
        return true;
    if (n >= sizeof copy)
        return false;
    memcpy(copy, text, n);
    copy[n] = '\0';
    return p->sure(copy);
}

/* One file that can't be searched ends no search of others. Named once, for what failed first. */
static void add_unsearched(struct audit_search *s, const char *name, const char *why)
{
    const json_t *last = json_array_get(s->unsearched, json_array_size(s->unsearched) - 1);
    struct baton_error shown; /* names may be no UTF-8 */
    base_fail(&shown, 0, "%.240s", name);
    if (!last || strcmp(member(last, "file"), shown.text))
        json_array_append_new(s->unsearched,
                              json_pack("{s:s,s:s}", "file", shown.text, "why", why));
}

static void search_one(struct audit_search *s, const struct pattern *p, const char *name,
                       const char *text, size_t n, uint32_t line)
{
    size_t at = 0, counted = 0;
    for (;;) {
        int rc = pcre2_match(p->code, (PCRE2_SPTR)text, n, at, 0, s->match, NULL);
        if (rc == PCRE2_ERROR_NOMATCH)
            return;
        if (rc < 0) {
            char why[64];
            snprintf(why, sizeof why, "PCRE2 error %d looking for a %s", rc, p->kind);
            add_unsearched(s, name, why);
            return;
        }
        const size_t *span = pcre2_get_ovector_pointer(s->match);
        for (; counted < span[0]; counted++)
            line += text[counted] == '\n';
        if (believed(p, text + span[0], span[1] - span[0]))
            add_finding(s, p->kind, name, line, text + span[0], span[1] - span[0]);
        at = span[1]; /* no pattern matches nothing */
    }
}

void audit_search_text(struct audit_search *s, const char *name, const char *text, size_t n,
                       uint32_t line)
{
    struct baton_error shown; /* names may be no UTF-8, and findings are JSON */
    base_fail(&shown, 0, "%.240s", name);
    if (n && memchr(text, '\0', n)) {
        s->binary++;
        return;
    }
    for (uint32_t i = 0; i < s->n_patterns && n; i++)
        search_one(s, &s->patterns[i], shown.text, text, n, line);
}

static void search_link(struct audit_search *s, const char *path, const char *name)
{
    char to[4096];
    ssize_t n = readlink(path, to, sizeof to);
    if (n < 0)
        add_unsearched(s, name, strerror(errno));
    else
        audit_search_text(s, name, to, (size_t)n, 1);
}

void audit_search_file(struct audit_search *s, const char *path, const char *name)
{
    struct stat st;
    struct base_file f;
    struct baton_error why;
    s->files++;
    if (lstat(path, &st))
        add_unsearched(s, name, strerror(errno));
    else if (S_ISLNK(st.st_mode))
        search_link(s, path, name);
    else if (!S_ISREG(st.st_mode)) /* a submodule's folder, a pipe: no text */
        return;
    else if (base_file_open(&f, path, &why))
        add_unsearched(s, name, why.text);
    else {
        audit_search_text(s, name, (const char *)f.data, f.size, 1);
        base_file_close(&f);
    }
}

int audit_search_folder(struct audit_search *s, const char *path, struct baton_error *e)
{
    json_t *files = NULL, *ignored;
    const char *name;
    int rc = audit_files_list(path, &files, e);
    json_object_foreach(files, name, ignored)
    {
        char *full = rc == 0 ? base_path_join(path, name, e) : NULL;
        if (full)
            audit_search_file(s, full, name);
        else
            rc = BATON_ERR_NOMEM;
        free(full);
    }
    json_decref(files);
    return rc;
}

bool audit_search_clean(const struct audit_search *s)
{
    return !s->news && !json_array_size(s->unsearched);
}

struct json_t *audit_search_report(const struct audit_search *s)
{
    json_t *unused = json_array();
    for (size_t i = 0; i < json_array_size(s->known); i++) {
        const json_t *k = json_array_get(s->known, i);
        if (!json_is_true(json_object_get(k, "used")))
            json_array_append_new(unused, json_sprintf("%s\t%s\t%s", member(k, "kind"),
                                                       member(k, "file"), member(k, "text")));
    }
    return json_pack("{s:O,s:O,s:I,s:I,s:I,s:I,s:o}", "findings", s->findings, "unsearched",
                     s->unsearched, "files", (json_int_t)s->files, "binary", (json_int_t)s->binary,
                     "new", (json_int_t)s->news, "known", (json_int_t)s->old, "unused", unused);
}
