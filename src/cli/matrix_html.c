/* SPDX-License-Identifier: Apache-2.0 */
/* The matrix as one page: no script, nothing loaded, every text of a folder escaped. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "audit/ratio.h"
#include "base/base.h"
#include "cli/matrix_priv.h"

static const char style[] =
    ":root{color-scheme:light dark;--fg:#1c2430;--bg:#fff;--dim:#667085;--line:#d6dae1;"
    "--pass:#d5f0dc;--fail:#f6c9c4;--error:#fbe0b8;--none:#eceef1}"
    "@media(prefers-color-scheme:dark){:root{--fg:#e4e7ec;--bg:#14181f;--dim:#98a2b3;"
    "--line:#333b48;--pass:#1d4a2c;--fail:#6b231d;--error:#5f4415;--none:#262c36}}"
    "body{margin:0 auto;padding:1rem;max-width:76rem;color:var(--fg);background:var(--bg);"
    "font:15px/1.45 system-ui,sans-serif}"
    "h1{font-size:1.4rem}h2{font-size:1.05rem;margin:2rem 0 .3rem}p{margin:.3rem 0;max-width:48rem}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;font-size:.87rem}"
    "th,td{border:1px solid var(--line);padding:.25rem .5rem;text-align:left;vertical-align:top}"
    "th{font-weight:600}small,.dim{color:var(--dim)}td small,th small{display:block}"
    ".pass{background:var(--pass)}.fail{background:var(--fail)}.error{background:var(--error)}"
    ".not_run{background:var(--none)}.n{text-align:right;font-variant-numeric:tabular-nums}"
    "code{font-size:.9em;overflow-wrap:anywhere}svg{display:block}svg text{font:11px "
    "system-ui,sans-serif;fill:var(--fg)}.a{fill:#2f6fdb}.b{fill:#c9a227}.c{fill:#178a6a}"
    ".d{fill:#7a4fd0}.rule{stroke:var(--dim)}.mark{stroke:#2f6fdb;stroke-width:3}";

/* ---- pieces ------------------------------------------------------------------------------- */

/* The class of a verdict; what is none has the class of an error. */
static const char *class_of(const char *verdict)
{
    static const char *const known[] = {"pass", "fail", "not_run"};
    for (int i = 0; i < 3; i++)
        if (!strcmp(verdict, known[i]))
            return known[i];
    return strcmp(verdict, "n/a") ? "error" : "not_run";
}

void cli_put_cell(FILE *f, const char *s)
{
    bool verdict = *class_of(s) != 'e' || !strcmp(s, "error");
    fprintf(f, verdict ? "<td class=\"%s\">" : "<td>", class_of(s));
    cli_put(f, s);
    fputs("</td>", f);
}

void cli_put_number(FILE *f, const json_t *v)
{
    double x = json_number_value(v);
    if (json_is_integer(v))
        fprintf(f, "<td class=\"n\">%lld</td>", (long long)json_integer_value(v));
    else if (json_is_real(v))
        fprintf(f, "<td class=\"n\">%.*g</td>", fabs(x) < 1e-2 || fabs(x) >= 1e6 ? 3 : 5, x);
    else
        fputs("<td class=\"n\">–</td>", f);
}

void cli_put_table(FILE *f, const char *title, const char *note, const char *const *heads)
{
    fputs("<section><h2>", f);
    cli_put(f, title);
    fputs("</h2>\n", f);
    if (note) {
        fputs("<p class=\"dim\">", f);
        cli_put(f, note);
        fputs("</p>\n", f);
    }
    fputs("<div class=\"wide\"><table>\n<tr>", f);
    for (; *heads; heads++)
        fprintf(f, "<th>%s</th>", *heads);
    fputs("</tr>\n", f);
}

void cli_put_table_end(FILE *f)
{
    fputs("</table></div></section>\n", f);
}

static void put_code(FILE *f, const char *what, const char *s)
{
    if (!*s)
        return;
    fprintf(f, "%s <code>", what);
    cli_put(f, s);
    fputs("</code> ", f);
}

/* ---- the head ----------------------------------------------------------------------------- */

/* What an audit of a folder came to; nothing is shown of a folder without it. */
static void put_audit(FILE *f, const struct cli_folder *x)
{
    size_t n = json_array_size(x->audit.differences);
    fprintf(f, "<p class=\"%s\">Evidence <code>", n ? "fail" : "pass");
    cli_put(f, x->name);
    fprintf(f, "</code>: %u figures computed again from %u files: ", x->audit.figures,
            x->audit.files);
    if (!n) {
        fputs("all hold.</p>\n", f);
        return;
    }
    fprintf(f, "<b>%zu do not hold</b>, so that nothing below can be relied on.</p>\n<ul>", n);
    for (size_t i = 0; i < n && i < 20; i++) {
        const json_t *d = json_array_get(x->audit.differences, i);
        fputs("<li><code>", f);
        cli_put(f, cli_text(d, "file"));
        fputs("</code> ", f);
        cli_put(f, cli_text(d, "where"));
        fputs(": ", f);
        cli_put(f, cli_text(d, "why"));
        fputs("</li>\n", f);
    }
    fputs("</ul>\n", f);
}

static void put_head(FILE *f, const struct cli_matrix_report *r)
{
    fprintf(f,
            "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
            "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; "
            "style-src 'unsafe-inline'\">\n<title>baton matrix: %s</title>\n<style>%s</style>\n"
            "</head>\n<body>\n<h1>baton matrix: <span class=\"%s\">%s</span></h1>\n",
            r->verdict, style, class_of(r->verdict), r->verdict);
    fprintf(f,
            "<p>%d cells: %d pass, %d fail, %d error, %d not run. The verdict of a cell is that of "
            "its repeats among each other and of every cache that was read back after insertion "
            "(within route); tokens against the device alone and against cpu:ref stand beside it "
            "and are not merged into it.</p>\n",
            (int)json_array_size(r->cells), cli_count(r->cells, "pass"),
            cli_count(r->cells, "fail"), cli_count(r->cells, "error"),
            cli_count(r->cells, "not_run"));
    if (r->folder.lines)
        put_audit(f, &r->folder);
    else
        fputs("<p class=\"dim\">No evidence was kept: these figures can't be computed "
              "again.</p>\n",
              f);
    for (uint32_t i = 0; i < r->n_with; i++)
        if (r->with[i].lines)
            put_audit(f, &r->with[i]);
}

/* ---- the grid ----------------------------------------------------------------------------- */

/* A cell's name cut at its last '/': the row (model and route) and the column (consumer). */
static const char *split(const char *name, char row[256])
{
    const char *column = strrchr(name, '/');
    snprintf(row, 256, "%.*s", (int)(column ? column - name : 0), name);
    return column ? column + 1 : name;
}

static void put_grid_cell(FILE *f, const json_t *c)
{
    if (!c) {
        fputs("<td></td>", f);
        return;
    }
    fprintf(f, "<td class=\"%s\" title=\"", class_of(cli_text(c, "verdict")));
    cli_put(f, cli_text(c, "why"));
    fputs("\"><b>", f);
    cli_put(f, cli_text(c, "verdict"));
    fputs("</b>", f);
    if (strcmp(cli_text(c, "verdict"), "not_run")) {
        fputs("<small>native ", f);
        cli_put(f, cli_text(c, "vs_native"));
        fputs(", reference ", f);
        cli_put(f, cli_text(c, "vs_reference"));
        fputs("</small>", f);
    }
    fputs("</td>", f);
}

static void put_grid(FILE *f, const json_t *cells)
{
    char row[256];
    json_t *rows = json_object(), *columns = json_object(), *by;
    const char *key, *column;
    for (size_t i = 0; i < json_array_size(cells); i++) {
        json_t *c = json_array_get(cells, i);
        column = split(cli_text(c, "name"), row);
        if (!json_object_get(rows, row))
            json_object_set_new(rows, row, json_object());
        json_object_set(json_object_get(rows, row), column, c);
        json_object_set(columns, column, c);
    }
    fputs("<section><h2>Matrix</h2>\n<div class=\"wide\"><table>\n"
          "<tr><th>model and route</th>",
          f);
    json_object_foreach(columns, column, by)
    {
        fputs("<th>", f);
        cli_put(f, column);
        fputs("<small>", f);
        cli_put_device(f, cli_text(by, "consumer"));
        long long lanes = json_integer_value(json_object_get(by, "lanes"));
        fprintf(f, ", %lld lane%s</small></th>", lanes, lanes == 1 ? "" : "s");
    }
    fputs("</tr>\n", f);
    json_object_foreach(rows, key, by)
    {
        fputs("<tr><th>", f);
        cli_put(f, key);
        fputs("</th>", f);
        for (void *at = json_object_iter(columns); at; at = json_object_iter_next(columns, at))
            put_grid_cell(f, json_object_get(by, json_object_iter_key(at)));
        fputs("</tr>\n", f);
    }
    cli_put_table_end(f);
    json_decref(rows);
    json_decref(columns);
}

/* ---- tables of cells ---------------------------------------------------------------------- */

static void put_row(FILE *f, const json_t *c)
{
    static const char *const texts[] = {"verdict", "vs_native", "vs_reference"};
    static const char *const numbers[] = {"lanes", "lanes_active_max", "full_lane_steps",
                                          "repeats"};
    fputs("<tr><td>", f);
    cli_put(f, cli_text(c, "name"));
    fputs("</td><td>", f);
    cli_put_device(f, cli_text(c, "producer"));
    fputs("</td><td>", f);
    cli_put_device(f, cli_text(c, "consumer"));
    fputs("</td>", f);
    for (int i = 0; i < 3; i++)
        cli_put_cell(f, cli_text(c, texts[i]));
    for (int i = 0; i < 4; i++)
        cli_put_number(f, json_object_get(c, numbers[i]));
    fputs("</tr>\n", f);
}

static void put_cells(FILE *f, const json_t *cells)
{
    static const char *const heads[] = {"cell",           "producer",  "consumer", "verdict",
                                        "native",         "reference", "lanes",    "most active",
                                        "steps with all", "repeats",   NULL};
    cli_put_table(f, "All cells",
                  "native and reference: greedy tokens against the consumer's device alone and "
                  "against cpu:ref. Steps are decode steps.",
                  heads);
    for (size_t i = 0; i < json_array_size(cells); i++)
        put_row(f, json_array_get(cells, i));
    cli_put_table_end(f);
}

/* Cells that were not run (`skipped`), or else that failed, once for each reason. */
static void put_reasons(FILE *f, const json_t *cells, bool skipped)
{
    static const char *const heads[] = {"verdict", "waits for", "why", "cells", NULL};
    json_t *by = json_object(), *list;
    const char *key;
    for (size_t i = 0; i < json_array_size(cells); i++) {
        json_t *c = json_array_get(cells, i);
        const char *v = cli_text(c, "verdict");
        if (!strcmp(v, "pass") || !strcmp(v, "not_run") != skipped)
            continue;
        json_t *reason = json_sprintf("%s\n%s\n%s", v, cli_text(c, "depends_on"),
                                      cli_text(c, "why"));
        key = json_string_value(reason);
        if (key && !json_object_get(by, key))
            json_object_set_new(by, key, json_array());
        json_array_append(key ? json_object_get(by, key) : NULL, c);
        json_decref(reason);
    }
    if (json_object_size(by))
        cli_put_table(f, skipped ? "What was not run, and why" : "What does not hold", NULL, heads);
    json_object_foreach(by, key, list)
    {
        const json_t *c = json_array_get(list, 0);
        fputs("<tr>", f);
        cli_put_cell(f, cli_text(c, "verdict"));
        cli_put_cell(f, cli_text(c, "depends_on"));
        cli_put_cell(f, cli_text(c, "why"));
        fputs("<td>", f);
        for (size_t i = 0; i < json_array_size(list); i++) {
            fputs(i ? ", " : "", f);
            cli_put(f, cli_text(json_array_get(list, i), "name"));
        }
        fputs("</td></tr>\n", f);
    }
    if (json_object_size(by))
        cli_put_table_end(f);
    json_decref(by);
}

/* Attempts that a later one took the place of. */
static void put_superseded(FILE *f, const json_t *cases)
{
    static const char *const heads[] = {"attempt", "cell",           "verdict",
                                        "why",     "tried again in", NULL};
    bool any = false;
    for (size_t i = 0; i < json_array_size(cases); i++) {
        const json_t *by = json_array_get(cases, i), *old = json_object_get(by, "supersedes");
        size_t k = json_is_integer(old) ? (size_t)json_integer_value(old) : SIZE_MAX;
        const json_t *line = json_array_get(cases, k);
        if (!line)
            continue;
        if (!any)
            cli_put_table(f, "Earlier attempts", "They stay beside their retry.", heads);
        any = true;
        fputs("<tr>", f);
        cli_put_number(f, old);
        cli_put_cell(f, cli_text(line, "name"));
        cli_put_cell(f, cli_text(json_object_get(line, "result"), "verdict"));
        cli_put_cell(f, cli_text(json_object_get(line, "result"), "why"));
        cli_put_number(f, json_object_get(by, "attempt"));
        fputs("</tr>\n", f);
    }
    if (any)
        cli_put_table_end(f);
}

/* ---- handoff timings ---------------------------------------------------------------------- */

/* The first four follow one another on the way to the first token. */
static const char *const times[] = {"prefill_ns",  "exposed_ns", "import_ns",    "verify_ns",
                                    "transfer_ns", "ttft_ns",    "first_step_ns"};
enum { PARTS = 4, TIMES = sizeof times / sizeof *times };

struct timing {
    const json_t *result;
    double ms[TIMES]; /* NAN where there is none */
};

/* The median of a time over a cell's outputs that finished (the first 256 of them). */
static double median_ms(const json_t *raw, const char *key)
{
    double x[AUDIT_RATIO_MOST];
    const json_t *repeats = json_object_get(raw, "repeats");
    size_t n = 0;
    for (size_t r = 0; r < json_array_size(repeats); r++) {
        const json_t *outputs = json_object_get(json_array_get(repeats, r), "outputs");
        for (size_t i = 0; i < json_array_size(outputs) && n < AUDIT_RATIO_MOST; i++) {
            const json_t *o = json_array_get(outputs, i);
            const json_t *v = json_object_get(json_object_get(o, "stats"), key);
            if (json_is_null(json_object_get(o, "error")) && json_is_number(v))
                x[n++] = json_number_value(v) * 1e-6;
        }
    }
    return n ? audit_median(x, n) : NAN;
}

/* The parts of a cell's first token as bars one after another; `longest` fills the width. */
static void put_bars(FILE *f, const double *ms, double longest)
{
    double at = 0;
    fputs("<td><svg width=\"240\" height=\"14\">", f);
    for (int i = 0; i < PARTS; i++) {
        double w = ms[i] > 0 && longest > 0 ? 240 * ms[i] / longest : 0;
        fprintf(f, "<rect class=\"%c\" x=\"%.2f\" width=\"%.2f\" height=\"14\"/>", "abcd"[i], at,
                w);
        at += w;
    }
    fputs("</svg></td>", f);
}

static void put_timing(FILE *f, const struct timing *t, double longest)
{
    bool emulated = cli_emulated(cli_text(t->result, "producer")) ||
                    cli_emulated(cli_text(t->result, "consumer"));
    fputs("<tr><td>", f);
    cli_put(f, cli_text(t->result, "name"));
    fputs(emulated ? "<small>emulated: host time</small></td>" : "</td>", f);
    put_bars(f, t->ms, longest);
    for (int i = 0; i < TIMES; i++) {
        json_t *v = json_real(t->ms[i]); /* NULL where it is not finite */
        cli_put_number(f, v);
        json_decref(v);
    }
    fputs("</tr>\n", f);
}

/* Of each cell's last attempt that has a raw document; native cells hand nothing over. */
static size_t read_timings(const struct cli_folder *x, struct timing *out, double *longest)
{
    json_t *last = json_object();
    const char *name;
    json_t *line;
    size_t n = 0;
    for (size_t i = 0; i < json_array_size(x->cases); i++) {
        json_t *c = json_array_get(x->cases, i);
        json_object_set(last, cli_text(c, "name"), c);
    }
    json_object_foreach(last, name, line)
    {
        const json_t *result = json_object_get(line, "result");
        json_t *raw = NULL;
        struct timing *t = &out[n];
        if (!strcmp(cli_text(result, "route"), "native") ||
            audit_case_raw(x->path, line, &raw, NULL))
            continue;
        t->result = result;
        double sum = 0;
        for (int i = 0; i < TIMES; i++) {
            t->ms[i] = median_ms(raw, times[i]);
            sum += i < PARTS && t->ms[i] > 0 ? t->ms[i] : 0;
        }
        n += sum > 0;
        *longest = fmax(*longest, sum);
        json_decref(raw);
    }
    json_decref(last);
    return n;
}

static void put_timings(FILE *f, const struct cli_folder *x)
{
    static const char *const heads[] = {"cell",       "prefill, exposed, import, verify",
                                        "prefill",    "exposed transfer",
                                        "import",     "verify",
                                        "transfer",   "first token",
                                        "first step", NULL};
    double longest = 0;
    struct timing *all = base_try_alloc(json_array_size(x->cases), sizeof *all, NULL);
    size_t n = all ? read_timings(x, all, &longest) : 0;
    if (n)
        cli_put_table(f, "Handoff timings",
                      "Medians in ms over all requests of a cell that finished; they run at once "
                      "and share this machine, so these are no figures of a device. Exposed: what "
                      "the transfer adds after the last prefill step. First token: with the "
                      "time that a request waited for others.",
                      heads);
    for (size_t i = 0; i < n; i++)
        put_timing(f, &all[i], longest);
    if (n)
        cli_put_table_end(f);
    free(all);
}

/* ---- the run ------------------------------------------------------------------------------ */

static void put_devices(FILE *f, const json_t *begin)
{
    static const char *const heads[] = {"role", "device", "what it is", "numerics", NULL};
    const json_t *devices = json_object_get(begin, "devices");
    cli_put_table(f, "Devices", NULL, heads);
    for (size_t i = 0; i < json_array_size(devices); i++) {
        const json_t *d = json_array_get(devices, i);
        fputs("<tr>", f);
        cli_put_cell(f, cli_text(d, "role"));
        fputs("<td>", f);
        cli_put(f, cli_text(d, "name"));
        fputs(json_is_true(json_object_get(d, "emulated")) ? " (emulated)</td>" : "</td>", f);
        cli_put_cell(f, cli_text(d, "detail"));
        cli_put_cell(f, cli_text(d, "numerics"));
        fputs("</tr>\n", f);
    }
    cli_put_table_end(f);
}

static void put_run(FILE *f, const json_t *begin)
{
    const json_t *host = json_object_get(begin, "host"), *limits = json_object_get(begin, "limits");
    const json_t *argv = json_object_get(begin, "argv"), *cores = json_object_get(host, "cores");
    put_devices(f, begin);
    fputs("<section><h2>The run</h2>\n<p>", f);
    put_code(f, "started", cli_text(begin, "started"));
    put_code(f, "on", cli_text(host, "cpu"));
    fprintf(f, "(%lld cores) ", (long long)json_integer_value(cores));
    put_code(f, "kernel", cli_text(host, "kernel"));
    put_code(f, "baton", cli_text(json_object_get(begin, "versions"), "baton"));
    put_code(f, "source", cli_text(json_object_get(begin, "commits"), "source"));
    bool dirty = json_is_true(json_object_get(json_object_get(begin, "commits"), "dirty"));
    fputs(dirty ? "with changes</p>\n<p><code>" : "</p>\n<p><code>", f);
    for (size_t i = 0; i < json_array_size(argv); i++) {
        const char *word = json_string_value(json_array_get(argv, i));
        cli_put(f, word ? word : "");
        fputc(' ', f);
    }
    fputs("</code></p></section>\n<section><h2>Limits: what this does not show</h2>\n<ul>\n", f);
    for (size_t i = 0; i < json_array_size(limits); i++) {
        const char *limit = json_string_value(json_array_get(limits, i));
        fputs("<li>", f);
        cli_put(f, limit ? limit : "");
        fputs("</li>\n", f);
    }
    fputs("</ul></section>\n", f);
}

int cli_matrix_html(const char *path, const struct cli_matrix_report *r, struct baton_error *e)
{
    char *s = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&s, &n);
    if (!f)
        return base_fail(e, BATON_ERR_NOMEM, "no memory for %.160s", path);
    put_head(f, r);
    put_grid(f, r->cells);
    put_reasons(f, r->cells, false);
    put_reasons(f, r->cells, true);
    put_cells(f, r->cells);
    if (r->folder.lines) {
        put_superseded(f, r->folder.cases);
        put_timings(f, &r->folder);
    }
    cli_matrix_put_with(f, r);
    if (r->folder.lines)
        put_run(f, json_array_get(r->folder.lines, 0));
    fputs("</body>\n</html>\n", f);
    return cli_finish(f, path, &s, &n, e);
}
