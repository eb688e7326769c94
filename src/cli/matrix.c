/* SPDX-License-Identifier: Apache-2.0 */
/* baton matrix: models x routes x consumers, each cell passed, failed, or not run and why. */
#include <dirent.h>
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "audit/matrix.h"
#include "base/base.h"
#include "cli/evidence_priv.h"
#include "cli/matrix_priv.h"

static const char help[] =
    "usage: baton matrix --config FILE [OPTIONS]\n"
    "       baton matrix --from FOLDER [OPTIONS]\n"
    "\n"
    "Runs every model over every route into every consumer, several prompts at once over its "
    "lanes,\n"
    "reads all caches back and compares: repeats and slots within the route, which decides the\n"
    "verdict; tokens with the consumer's device alone and with cpu:ref, which are reported beside\n"
    "it. A cell whose device is absent is not_run. Requests go through the engine, not over HTTP.\n"
    "docs/matrix.md explains. Exit 0: no cell fails; 1: one does, or evidence that is shown does\n"
    "not hold; 3: one could not be run.\n"
    "\n"
    "  --config FILE    bench/matrix.json: 4 models x 3 routes x 3 consumers\n"
    "  --evidence DIR   keep all of it in a folder below DIR (docs/evidence.md)\n"
    "  --resume         go on in the newest folder below DIR: cells that passed stay, others are\n"
    "                   tried again beside their earlier attempt\n"
    "  --fault import-flip   one bit of every imported cache: whole and stream must fail\n"
    "  --from FOLDER    run nothing: report the cells of an evidence folder, after an audit of it\n"
    "  --html FILE      one page that loads nothing: cells, reasons, what was not run, timings\n"
    "  --with THING     show it on the page too: a folder of check, probe or quality, or a "
    "document\n"
    "                   of bench --json; up to 16 times\n"
    "  --junit FILE     all cells for a job that is gated on them: fail is a failure, not_run is\n"
    "                   skipped\n"
    "  --md FILE        the same as a table for a pull request\n"
    "  --threads N, --json, -v, -q\n"
    "\n"
    "example\n"
    "  baton matrix --config bench/matrix.json --evidence evidence --html matrix.html\n";

enum {
    OPT_CONFIG = 256,
    OPT_EVIDENCE,
    OPT_RESUME,
    OPT_FAULT,
    OPT_THREADS,
    OPT_FROM,
    OPT_WITH,
    OPT_HTML,
    OPT_JUNIT,
    OPT_MD,
    OPT_AGAINST,
};

static const struct option long_options[] = {
    {"config", required_argument, NULL, OPT_CONFIG},
    {"evidence", required_argument, NULL, OPT_EVIDENCE},
    {"resume", no_argument, NULL, OPT_RESUME},
    {"fault", required_argument, NULL, OPT_FAULT},
    {"threads", required_argument, NULL, OPT_THREADS},
    {"from", required_argument, NULL, OPT_FROM},
    {"with", required_argument, NULL, OPT_WITH},
    {"junit", required_argument, NULL, OPT_JUNIT},
    {"md", required_argument, NULL, OPT_MD},
    {"html", required_argument, NULL, OPT_HTML},
    {"against", required_argument, NULL, OPT_AGAINST},
    {"json", no_argument, NULL, 'j'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

struct args {
    struct cli_common common;
    const char *config, *evidence, *from, *html, *junit, *md;
    const char *with[CLI_WITH_MOST];
    uint32_t n_with;
    bool resume;
    int argc;
    char **argv;
    struct audit_matrix_options options;
};

/* ---- arguments ---------------------------------------------------------------------------- */

static int take(void *args, int opt, const char *v, struct baton_error *e)
{
    struct args *a = args;
    switch (opt) {
    case OPT_CONFIG:
        a->config = v;
        return 0;
    case OPT_EVIDENCE:
        a->evidence = v;
        return 0;
    case OPT_RESUME:
        a->resume = true;
        return 0;
    case OPT_FAULT:
        a->options.plant_flip = true;
        return strcmp(v, "import-flip")
                   ? base_fail(e, BATON_ERR_USAGE,
                               "--fault: '%.40s' is not import-flip; faults of a device are "
                               "planted in its name (npu:rngd,fault=NAME) and found by probe",
                               v)
                   : 0;
    case OPT_FROM:
        a->from = v;
        return 0;
    case OPT_WITH:
        if (a->n_with == CLI_WITH_MOST)
            return base_fail(e, BATON_ERR_USAGE, "--with: at most %d times", CLI_WITH_MOST);
        a->with[a->n_with++] = v;
        return 0;
    case OPT_HTML:
        a->html = v;
        return 0;
    case OPT_JUNIT:
        a->junit = v;
        return 0;
    case OPT_MD:
        a->md = v;
        return 0;
    case OPT_THREADS:
        return cli_parse_u32("--threads", v, 1, 1024, &a->options.threads, e);
    default:
        return base_fail(e, BATON_ERR_UNSUPPORTED, "--against is not built in matrix");
    }
}

static int check_args(const struct args *a, struct baton_error *e)
{
    const char *const files[] = {a->html, a->junit, a->md};
    bool runs = a->config || a->evidence || a->resume || a->options.plant_flip;
    int rc = 0;
    if (a->from ? runs : !a->config)
        return base_fail(e, BATON_ERR_USAGE,
                         a->from ? "--from runs nothing: no --config, --evidence, --resume, --fault"
                                 : "no matrix: --config is missing");
    if (a->resume && !a->evidence)
        return base_fail(e, BATON_ERR_USAGE, "--resume needs the --evidence that it goes on in");
    if (a->n_with && !a->html)
        return base_fail(e, BATON_ERR_USAGE, "--with is for the page: --html is missing");
    for (int i = 0; i < 3 && rc == 0; i++)
        rc = files[i] ? base_file_try(files[i], e) : 0;
    return rc;
}

/* ---- evidence ----------------------------------------------------------------------------- */

static const char *const limits[] = {
    "The prompts and lengths of the configuration, on this machine, in this build.",
    "Requests went through the engine in one process: nothing is shown of HTTP, or of sockets.",
    "Emulated devices compute on this machine's cpu.",
    "vs_native and vs_reference compare greedy tokens: below a margin of 0.4 they may differ.",
    NULL};

static bool opens(const char *name)
{
    struct device *d = NULL;
    bool good = device_open(name, &d, NULL) == 0;
    device_close(d);
    return good;
}

/* Each device that is there, once; `list` ends with a role of NULL. */
static void list_devices(const struct audit_matrix *m, struct audit_device *list)
{
    size_t n = 0;
    for (uint32_t i = 0; i < 2 * m->n_consumers; i++) {
        const struct audit_matrix_consumer *c = &m->consumers[i / 2];
        const char *name = i % 2 ? c->producer : c->device;
        size_t k = 0;
        while (k < n && strcmp(list[k].name, name))
            k++;
        if (k == n && opens(name))
            list[n++] = (struct audit_device){i % 2 ? "producer" : "consumer", name};
    }
    list[n] = (struct audit_device){NULL, NULL};
}

/* The newest folder of a matrix below DIR: names begin with the time. free(). */
static char *newest(const char *dir, struct baton_error *e)
{
    struct dirent **names = NULL;
    char *found = NULL;
    int n = scandir(dir, &names, NULL, alphasort);
    for (int i = n - 1; i >= 0; i--) {
        if (!found && strstr(names[i]->d_name, "-matrix-"))
            found = base_path_join(dir, names[i]->d_name, e);
        free(names[i]);
    }
    free(names);
    if (!found)
        base_fail(e, BATON_ERR_INPUT, "--resume: there is no folder of a matrix below %.160s", dir);
    return found;
}

static int begin(struct args *a, const struct audit_matrix *m, json_t **earlier,
                 struct baton_error *e)
{
    struct audit_device devices[2 * AUDIT_MATRIX_CONSUMERS + 1];
    list_devices(m, devices);
    json_t *more = json_pack("{s:s,s:s,s:b}", "config", m->sha256, "path", "engine", "planted",
                             a->options.plant_flip);
    struct cli_evidence x = {.command = "matrix",
                             .argc = a->argc,
                             .argv = a->argv,
                             .dir = a->evidence,
                             .input = a->config,
                             .devices = devices,
                             .limits = limits,
                             .repeats = m->repeats,
                             .more = more};
    char *folder = a->resume ? newest(a->evidence, e) : NULL;
    int rc = a->resume && !folder ? e->code : 0;
    x.resume = folder;
    x.earlier = earlier;
    if (rc == 0)
        rc = cli_evidence_open(&x, &a->options.evidence, e);
    free(folder);
    json_decref(more);
    return rc;
}

/* ---- output ------------------------------------------------------------------------------- */

static void print_cells(const json_t *cells)
{
    printf("%-34s %-8s %-8s %-9s %6s %11s\n", "cell", "verdict", "native", "reference", "lanes",
           "full steps");
    for (size_t i = 0; i < json_array_size(cells); i++) {
        const json_t *c = json_array_get(cells, i);
        printf("%-34s %-8s %-8s %-9s %6lld %11lld", cli_text(c, "name"), cli_text(c, "verdict"),
               cli_text(c, "vs_native"), cli_text(c, "vs_reference"),
               (long long)json_integer_value(json_object_get(c, "lanes")),
               (long long)json_integer_value(json_object_get(c, "full_lane_steps")));
        printf("%s%.150s\n", *cli_text(c, "why") ? "  " : "", cli_text(c, "why"));
    }
}

static int print_report(const struct args *a, const struct cli_matrix_report *r)
{
    const char *where = a->options.evidence ? audit_evidence_path(a->options.evidence) : a->from;
    bool differs = cli_matrix_differs(r);
    int rc = !strcmp(r->verdict, "fail") ? 1 : !strcmp(r->verdict, "pass") ? 0 : 3;
    if (a->common.json)
        return cli_print_json(json_pack("{s:i,s:s,s:O,s:s*,s:b,s:s}", "schema", 1, "path", "engine",
                                        "cells", r->cells, "evidence", where, "holds", !differs,
                                        "verdict", r->verdict),
                              rc);
    print_cells(r->cells);
    if (where)
        printf("evidence in %s\n", where);
    if (differs)
        printf("evidence that is shown does not hold: see `baton audit`\n");
    printf("%s\n", r->verdict);
    return rc;
}

/* Other evidence is looked at before the work, not after it. */
static int open_with(const struct args *a, struct cli_matrix_report *r, struct baton_error *e)
{
    int rc = 0;
    for (uint32_t i = 0; i < a->n_with && rc == 0; i++)
        rc = cli_matrix_with(r, a->with[i], e);
    return rc;
}

static int write_files(const struct args *a, struct cli_matrix_report *r, struct baton_error *e)
{
    int rc = 0;
    if (a->html && a->options.evidence)
        rc = cli_folder_open(&r->folder, audit_evidence_path(a->options.evidence), e);
    r->verdict = cli_matrix_differs(r) ? "fail" : audit_matrix_verdict(r->cells);
    if (rc == 0 && a->junit)
        rc = cli_matrix_junit(a->junit, r, e);
    if (rc == 0 && a->md)
        rc = cli_matrix_markdown(a->md, r, e);
    return rc == 0 && a->html ? cli_matrix_html(a->html, r, e) : rc;
}

static void draw(void *ctx, uint64_t done, uint64_t all)
{
    cli_progress_draw(ctx, "cells", done, all);
}

static int run(struct args *a, json_t **cells, struct baton_error *e)
{
    struct audit_matrix *m = base_try_alloc(1, sizeof *m, e);
    struct cli_progress progress;
    json_t *earlier = NULL;
    int rc = m ? audit_matrix_read(a->config, m, e) : BATON_ERR_NOMEM;
    if (rc == 0 && a->evidence)
        rc = begin(a, m, &earlier, e);
    cli_progress_init(&progress, &a->common);
    a->options.progress = draw;
    a->options.ctx = &progress;
    a->options.earlier = earlier;
    if (rc == 0)
        rc = audit_matrix_run(m, &a->options, cells, e);
    cli_progress_end(&progress);
    a->options.ctx = NULL; /* it ends here */
    json_decref(earlier);
    free(m);
    return rc;
}

/* The cells of a folder: of each the last attempt. */
static int read_cells(const struct args *a, struct cli_folder *f, json_t **cells,
                      struct baton_error *e)
{
    int rc = cli_folder_open(f, a->from, e);
    if (rc)
        return rc;
    if (strcmp(cli_text(json_array_get(f->lines, 0), "command"), "matrix"))
        return base_fail(e, BATON_ERR_INPUT, "--from: %.160s is no evidence of a matrix", a->from);
    json_t *by = json_object(), *o;
    const char *name;
    for (size_t i = 0; i < json_array_size(f->cases); i++) {
        const json_t *line = json_array_get(f->cases, i);
        json_t *result = json_object_get(line, "result");
        o = json_is_object(result) ? json_copy(result) : json_object();
        json_object_set_new(o, "name", json_string(cli_text(line, "name")));
        json_object_set_new(by, cli_text(line, "name"), o);
    }
    *cells = json_array();
    json_object_foreach(by, name, o) json_array_append(*cells, o);
    json_decref(by);
    return 0;
}

static int matrix(struct args *a, struct baton_error *e)
{
    struct cli_matrix_report r = {0};
    json_t *cells = NULL;
    int rc = check_args(a, e);
    if (rc == 0)
        rc = open_with(a, &r, e);
    if (rc == 0)
        rc = a->from ? read_cells(a, &r.folder, &cells, e) : run(a, &cells, e);
    r.cells = cells;
    if (rc == 0)
        rc = write_files(a, &r, e);
    if (rc == 0)
        rc = print_report(a, &r);
    cli_matrix_report_close(&r);
    json_decref(cells);
    audit_evidence_drop(a->options.evidence);
    return rc;
}

int cli_matrix(int argc, char **argv)
{
    static const struct cli_syntax syntax = {":vqh", help, long_options, take, false};
    struct args a = {.argc = argc, .argv = argv};
    struct baton_error e = {0};
    bool helped = false;
    if (cli_parse(argc, argv, &syntax, &a.common, &a, &helped, &e))
        return cli_fail(&a.common, &e);
    if (helped)
        return 0;
    cli_set_verbosity(&a.common);
    int rc = matrix(&a, &e);
    return rc < 0 ? cli_fail(&a.common, &e) : rc;
}
