/* SPDX-License-Identifier: Apache-2.0 */
/* Other evidence beside a matrix: folders of check, probe and quality, documents of bench. */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "audit/quality.h"
#include "base/base.h"
#include "cli/matrix_priv.h"

/* ---- folders ------------------------------------------------------------------------------ */

static void name_of(const char *path, char out[128])
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    size_t at = n;
    while (at > 0 && path[at - 1] != '/')
        at--;
    snprintf(out, 128, "%.*s", (int)(n - at), path + at);
}

int cli_folder_open(struct cli_folder *f, const char *path, struct baton_error *e)
{
    f->path = path;
    name_of(path, f->name);
    int rc = audit_folder(path, NULL, &f->audit, e);
    if (rc == 0)
        rc = audit_cases(path, &f->lines, e);
    if (rc)
        return rc;
    f->cases = json_array();
    for (size_t i = 0; i < json_array_size(f->lines); i++) {
        json_t *line = json_array_get(f->lines, i);
        if (!strcmp(cli_text(line, "kind"), "case"))
            json_array_append(f->cases, line);
    }
    return 0;
}

void cli_folder_close(struct cli_folder *f)
{
    json_decref(f->lines);
    json_decref(f->cases);
    audit_report_free(&f->audit);
    memset(f, 0, sizeof *f);
}

static const char *command_of(const struct cli_folder *f)
{
    return cli_text(json_array_get(f->lines, 0), "command");
}

static int open_bench(json_t **out, const char *path, struct baton_error *e)
{
    int rc = base_json_load(path, 64 << 20, out, e);
    if (rc == 0 &&
        (!json_is_object(json_object_get(*out, "a")) || !json_object_get(*out, "ratio_b_to_a")))
        rc = base_fail(e, BATON_ERR_INPUT, "%.160s is no document of baton bench --json", path);
    return rc;
}

int cli_matrix_with(struct cli_matrix_report *r, const char *path, struct baton_error *e)
{
    struct stat st;
    if (r->n_with == CLI_WITH_MOST)
        return base_fail(e, BATON_ERR_USAGE, "--with: at most %d", CLI_WITH_MOST);
    struct cli_folder *f = &r->with[r->n_with];
    json_t **bench = &r->bench[r->n_with++];
    name_of(path, f->name);
    if (stat(path, &st) || !S_ISDIR(st.st_mode))
        return open_bench(bench, path, e);
    int rc = cli_folder_open(f, path, e);
    if (rc == 0 && strcmp(command_of(f), "check") && strcmp(command_of(f), "probe") &&
        strcmp(command_of(f), "quality"))
        rc = base_fail(e, BATON_ERR_INPUT,
                       "--with: %.160s is evidence of neither check, probe nor "
                       "quality",
                       path);
    return rc;
}

void cli_matrix_report_close(struct cli_matrix_report *r)
{
    cli_folder_close(&r->folder);
    for (uint32_t i = 0; i < r->n_with; i++) {
        cli_folder_close(&r->with[i]);
        json_decref(r->bench[i]);
    }
}

bool cli_matrix_differs(const struct cli_matrix_report *r)
{
    size_t n = json_array_size(r->folder.audit.differences);
    for (uint32_t i = 0; i < r->n_with; i++)
        n += json_array_size(r->with[i].audit.differences);
    return n != 0;
}

/* ---- check, probe, quality ---------------------------------------------------------------- */

/* What a folder is called and which devices it is of, with planted faults in their names. */
static void note_of(const struct cli_folder *x, char out[512])
{
    const json_t *devices = json_object_get(json_array_get(x->lines, 0), "devices");
    size_t n = (size_t)snprintf(out, 512, "%s", x->name);
    for (size_t i = 0; i < json_array_size(devices) && n < 512; i++) {
        const json_t *d = json_array_get(devices, i);
        n += (size_t)snprintf(out + n, 512 - n, "%s %.20s %.100s%s", i ? "," : ":",
                              cli_text(d, "role"), cli_text(d, "name"),
                              cli_emulated(cli_text(d, "name")) ? " (emulated)" : "");
    }
}

/* One row an attempt: name, verdict, numbers, reason. */
static void put_attempts(FILE *f, const struct cli_folder *x, const char *title,
                         const char *const *heads, const char *const *numbers)
{
    char note[512];
    note_of(x, note);
    cli_put_table(f, title, note, heads);
    for (size_t i = 0; i < json_array_size(x->cases); i++) {
        const json_t *line = json_array_get(x->cases, i), *o = json_object_get(line, "result");
        fputs("<tr>", f);
        cli_put_cell(f, cli_text(line, "name"));
        cli_put_cell(f, cli_text(o, "verdict"));
        for (const char *const *key = numbers; *key; key++)
            cli_put_number(f, json_object_get(o, *key));
        cli_put_cell(f, cli_text(o, "why"));
        fputs("</tr>\n", f);
    }
    cli_put_table_end(f);
}

static void put_check(FILE *f, const struct cli_folder *x)
{
    static const char *const heads[] = {"case",    "verdict",      "slots exact", "of", "K error",
                                        "V error", "logits error", "why",         NULL};
    static const char *const numbers[] = {"slots_exact", "slots_total",    "k_rel_rms",
                                          "v_rel_rms",   "logits_rel_rms", NULL};
    put_attempts(f, x, "Check: caches read back", heads, numbers);
}

static void put_probe(FILE *f, const struct cli_folder *x)
{
    static const char *const heads[] = {"probe", "verdict", "value", "limit", "why", NULL};
    static const char *const numbers[] = {"value", "limit", NULL};
    put_attempts(f, x, "Probes", heads, numbers);
}

static void put_quality(FILE *f, const struct cli_folder *x)
{
    static const char *const heads[] = {"verdict",
                                        "mode",
                                        "prefill",
                                        "decode",
                                        "lanes",
                                        "counted",
                                        "right",
                                        "right, concurrent",
                                        "steps with all lanes",
                                        NULL};
    static const char *const numbers[] = {"counted", "right", "right_concurrent",
                                          "full_lane_steps"};
    const json_t *route = json_object_get(json_array_get(x->lines, 0), "route");
    json_t *results = json_array();
    for (size_t i = 0; i < json_array_size(x->cases); i++)
        json_array_append(results, json_object_get(json_array_get(x->cases, i), "result"));
    json_t *score = audit_quality_score(results);
    cli_put_table(f, "Quality: a frozen set, answers to the letter", x->name, heads);
    fputs("<tr>", f);
    cli_put_cell(f, cli_text(score, "verdict"));
    cli_put_cell(f, cli_text(route, "mode"));
    fputs("<td>", f);
    cli_put_device(f, cli_text(route, "prefill"));
    fputs("</td><td>", f);
    cli_put_device(f, cli_text(route, "decode"));
    fputs("</td>", f);
    cli_put_number(f, json_object_get(route, "lanes"));
    for (int i = 0; i < 4; i++)
        cli_put_number(f, json_object_get(score, numbers[i]));
    fputs("</tr>\n", f);
    cli_put_table_end(f);
    json_decref(score);
    json_decref(results);
}

/* ---- bench -------------------------------------------------------------------------------- */

static double number(const json_t *v)
{
    return json_is_number(v) ? json_number_value(v) : NAN;
}

/* An interval on a scale of 0.5 to 2, logarithmic, with 1 in its middle. */
static void put_interval(FILE *f, const json_t *r)
{
    const json_t *interval = json_object_get(r, "interval");
    double x[3] = {number(json_object_get(r, "estimate")), number(json_array_get(interval, 0)),
                   number(json_array_get(interval, 1))};
    for (int i = 0; i < 3; i++)
        x[i] = fmin(fmax(150 + 150 * log2(x[i]), 0), 300);
    fputs("<td><svg width=\"300\" height=\"16\"><line class=\"rule\" x1=\"150\" x2=\"150\" "
          "y2=\"16\"/>",
          f);
    if (isfinite(number(json_array_get(interval, 0))) &&
        isfinite(number(json_array_get(interval, 1))))
        fprintf(f, "<line class=\"mark\" x1=\"%.1f\" x2=\"%.1f\" y1=\"8\" y2=\"8\"/>", x[1],
                fmax(x[2], x[1] + 1));
    if (isfinite(number(json_object_get(r, "estimate"))))
        fprintf(f, "<circle class=\"a\" cx=\"%.1f\" cy=\"8\" r=\"4\"/>", x[0]);
    fputs("</svg></td>", f);
}

static void put_arm(FILE *f, const char *name, const json_t *arm)
{
    fprintf(f, "<p>%s: ", name);
    cli_put(f, cli_text(arm, "mode"));
    fputs(", prefill on ", f);
    cli_put_device(f, cli_text(arm, "prefill"));
    fputs(", decode on ", f);
    cli_put_device(f, cli_text(arm, "decode"));
    const json_t *ms = json_object_get(arm, "median_ms");
    fprintf(f, "; medians: first token %.4g ms, decode %.4g ms, %.4g tokens/s</p>\n",
            number(json_object_get(ms, "ttft")), number(json_object_get(ms, "decode")),
            number(json_object_get(arm, "tokens_per_s")));
}

static void put_bench(FILE *f, const char *name, const json_t *d)
{
    static const char *const heads[] = {"time", "B over A", "from", "to", "0.5 … 1 … 2", NULL};
    const json_t *o = json_object_get(d, "ratio_b_to_a"), *r;
    char note[200];
    void *at = json_object_iter((json_t *)(uintptr_t)o);
    snprintf(note, sizeof note, "%.100s: %lld tokens in, %lld out, %lld at once, %lld pairs%s",
             name, (long long)json_integer_value(json_object_get(d, "prompt_tokens")),
             (long long)json_integer_value(json_object_get(d, "n")),
             (long long)json_integer_value(json_object_get(d, "lanes")),
             (long long)json_integer_value(json_object_get(d, "pairs")),
             json_is_true(json_object_get(d, "exploratory")) ? " (exploratory)" : "");
    cli_put_table(f, "Bench: times in pairs, 95 % interval", note, heads);
    for (; at; at = json_object_iter_next((json_t *)(uintptr_t)o, at)) {
        r = json_object_iter_value(at);
        const json_t *interval = json_object_get(r, "interval");
        fputs("<tr>", f);
        cli_put_cell(f, json_object_iter_key(at));
        cli_put_number(f, json_object_get(r, "estimate"));
        cli_put_number(f, json_array_get(interval, 0));
        cli_put_number(f, json_array_get(interval, 1));
        put_interval(f, r);
        fputs("</tr>\n", f);
    }
    cli_put_table_end(f);
    if (json_is_string(json_object_get(d, "why"))) {
        fputs("<p>No ratio: ", f);
        cli_put(f, cli_text(d, "why"));
        fputs("</p>\n", f);
    }
    put_arm(f, "A", json_object_get(d, "a"));
    if (json_object_get(d, "b"))
        put_arm(f, "B", json_object_get(d, "b"));
}

void cli_matrix_put_with(FILE *f, const struct cli_matrix_report *r)
{
    for (uint32_t i = 0; i < r->n_with; i++) {
        const struct cli_folder *x = &r->with[i];
        if (r->bench[i])
            put_bench(f, x->name, r->bench[i]);
        else if (!strcmp(command_of(x), "check"))
            put_check(f, x);
        else if (!strcmp(command_of(x), "probe"))
            put_probe(f, x);
        else
            put_quality(f, x);
    }
}
