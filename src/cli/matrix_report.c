/* SPDX-License-Identifier: Apache-2.0 */
/* The matrix as files: JUnit's XML and Markdown, and what all reports are written with. */
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "cli/matrix_priv.h"

/* ---- text --------------------------------------------------------------------------------- */

const char *cli_text(const json_t *o, const char *key)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : "";
}

void cli_put(FILE *f, const char *s)
{
    for (; *s; s++)
        if ((unsigned char)*s < ' ' || *s == 0x7f)
            fputc(' ', f);
        else if (strchr("&<>\"'|\\`*[]@", *s))
            fprintf(f, "&#%d;", *s);
        else if (!strncmp(s, "\xef\xbf\xbe", 3) || !strncmp(s, "\xef\xbf\xbf", 3))
            s += 2; /* U+FFFE and U+FFFF are no XML */
        else
            fputc(*s, f);
}

void cli_put_device(FILE *f, const char *name)
{
    cli_put(f, name);
    fputs(cli_emulated(name) ? " (emulated)" : "", f);
}

int cli_count(const json_t *cells, const char *verdict)
{
    bool other = !strcmp(verdict, "error");
    int n = 0;
    for (size_t i = 0; i < json_array_size(cells); i++) {
        const char *v = cli_text(json_array_get(cells, i), "verdict");
        n += other ? strcmp(v, "pass") && strcmp(v, "fail") && strcmp(v, "not_run")
                   : !strcmp(v, verdict);
    }
    return n;
}

int cli_finish(FILE *f, const char *path, char **s, const size_t *n, struct baton_error *e)
{
    int rc = fclose(f) ? base_fail(e, BATON_ERR_NOMEM, "no memory for %.160s", path)
                       : base_file_write(path, *s, *n, e);
    free(*s);
    return rc;
}

/* ---- JUnit -------------------------------------------------------------------------------- */

static void put_case(FILE *f, const json_t *c)
{
    const char *verdict = cli_text(c, "verdict");
    const char *element = !strcmp(verdict, "fail")      ? "failure"
                          : !strcmp(verdict, "not_run") ? "skipped"
                                                        : "error";
    fputs("  <testcase classname=\"baton.matrix\" name=\"", f);
    cli_put(f, cli_text(c, "name"));
    if (!strcmp(verdict, "pass")) {
        fputs("\"/>\n", f);
        return;
    }
    fprintf(f, "\"><%s message=\"", element);
    cli_put(f, cli_text(c, "why"));
    fputs("\"/></testcase>\n", f);
}

int cli_matrix_junit(const char *path, const struct cli_matrix_report *r, struct baton_error *e)
{
    char *s = NULL;
    size_t n = 0;
    int differs = cli_matrix_differs(r);
    FILE *f = open_memstream(&s, &n);
    if (!f)
        return base_fail(e, BATON_ERR_NOMEM, "no memory for %.160s", path);
    fprintf(f,
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
            "<testsuite name=\"baton matrix\" tests=\"%d\" failures=\"%d\" errors=\"%d\" "
            "skipped=\"%d\">\n",
            (int)json_array_size(r->cells) + differs, cli_count(r->cells, "fail") + differs,
            cli_count(r->cells, "error"), cli_count(r->cells, "not_run"));
    if (differs)
        fputs(
            "  <testcase classname=\"baton.matrix\" name=\"evidence\"><failure message=\"evidence "
            "that is shown does not hold: see baton audit\"/></testcase>\n",
            f);
    for (size_t i = 0; i < json_array_size(r->cells); i++)
        put_case(f, json_array_get(r->cells, i));
    fputs("</testsuite>\n", f);
    return cli_finish(f, path, &s, &n, e);
}

/* ---- Markdown ----------------------------------------------------------------------------- */

int cli_matrix_markdown(const char *path, const struct cli_matrix_report *r, struct baton_error *e)
{
    static const char *const columns[] = {"verdict", "vs_native", "vs_reference", "why"};
    char *s = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&s, &n);
    if (!f)
        return base_fail(e, BATON_ERR_NOMEM, "no memory for %.160s", path);
    fprintf(f, "**baton matrix: %s%s** (%d pass, %d fail, %d error, %d not run)\n\n",
            cli_matrix_differs(r) ? "evidence does not hold, see `baton audit`: " : "", r->verdict,
            cli_count(r->cells, "pass"), cli_count(r->cells, "fail"), cli_count(r->cells, "error"),
            cli_count(r->cells, "not_run"));
    fputs("| cell | producer | consumer | verdict | native | reference | why |\n"
          "| --- | --- | --- | --- | --- | --- | --- |\n",
          f);
    for (size_t i = 0; i < json_array_size(r->cells); i++) {
        const json_t *c = json_array_get(r->cells, i);
        fputs("| ", f);
        cli_put(f, cli_text(c, "name"));
        fputs(" | ", f);
        cli_put_device(f, cli_text(c, "producer"));
        fputs(" | ", f);
        cli_put_device(f, cli_text(c, "consumer"));
        for (size_t k = 0; k < sizeof columns / sizeof *columns; k++) {
            fputs(" | ", f);
            cli_put(f, cli_text(c, columns[k]));
        }
        fputs(" |\n", f);
    }
    return cli_finish(f, path, &s, &n, e);
}
