/* SPDX-License-Identifier: Apache-2.0 */
/* baton probe: does a device compute a model as it should? */
#include <getopt.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "cli/cli.h"
#include "cli/evidence_priv.h"
#include "verify/probe.h"

static const char help[] =
    "usage: baton probe layout|causality|lanes|window|padding|precision|all -m MODEL [OPTIONS]\n"
    "\n"
    "Runs fixed prompts on one device and compares its cache with cpu:ref's, or with its own of\n"
    "another prompt or width. Each probe names layer, tensor and position and says why.\n"
    "docs/probes.md has the limits. Exit 0: none fails; 1: one does.\n"
    "\n"
    "  -m MODEL         Hugging Face folder, or shape:NAME[:SEED]\n"
    "  --device DEV     cpu (default), npu:rngd (emulated), ...\n"
    "  --fault NAME     plant a fault; emulated devices only\n"
    "  --evidence DIR   keep what was measured in a folder below DIR (docs/evidence.md)\n"
    "  --threads N, --json, -v, -q\n"
    "\n"
    "example\n"
    "  baton probe all -m models/gemma3-tiny --device npu:rngd --fault noncausal\n";

enum { OPT_DEVICE = 256, OPT_FAULT, OPT_THREADS, OPT_EVIDENCE };

struct args {
    const char *model, *device, *fault, *evidence;
    uint32_t threads;
    int argc;
    char **argv;
};

static int take(void *args, int opt, const char *value, struct baton_error *e)
{
    struct args *a = args;
    if (opt == 'm')
        a->model = value;
    else if (opt == OPT_DEVICE)
        a->device = value;
    else if (opt == OPT_FAULT)
        a->fault = value;
    else if (opt == OPT_EVIDENCE)
        a->evidence = value;
    else
        return cli_parse_u32("--threads", value, 0, 1024, &a->threads, e);
    return 0;
}

static const char *const verdicts[] = {"pass", "fail", "n/a"};

static json_t *finding_json(const char *name, const struct verify_finding *f)
{
    bool ran = f->verdict != VERIFY_PROBE_NA;
    json_t *where = ran && f->tensor[0]
                        ? json_pack("{s:i,s:s,s:o,s:i}", "layer", (int)f->layer, "tensor",
                                    f->tensor, "lane",
                                    f->lane < 0 ? json_null() : json_integer(f->lane), "position",
                                    (int)f->position)
                        : json_null();
    return json_pack("{s:s,s:s,s:s,s:o,s:o,s:o,s:s}", "name", name, "verdict", verdicts[f->verdict],
                     "metric", f->metric, "value",
                     ran && isfinite(f->value) ? json_real(f->value) : json_null(), "limit",
                     ran ? json_real(f->limit) : json_null(), "where", where, "why", f->why);
}

static void print_finding(const char *name, const struct verify_finding *f)
{
    printf("%-10s %-5s", name, verdicts[f->verdict]);
    if (f->verdict != VERIFY_PROBE_NA)
        printf(" %s %.2e (limit %.0e)", f->metric, f->value, f->limit);
    if (f->verdict == VERIFY_PROBE_FAIL)
        printf(" at layer %u, %s, position %u", f->layer, f->tensor, f->position);
    printf("%s%s\n", f->why[0] ? ": " : "", f->why);
}

/* ---- evidence ----------------------------------------------------------------------------- */

static const char *const limits[] = {
    "Fixed prompts on one device, in this build: what a probe does not look at is not shown.",
    "What a probe measured is kept, not the caches that it was measured from.",
    "docs/probes.md says what the probes do not see.", NULL};

static int begin(const struct args *a, const char *device, const struct baton_model *m,
                 struct audit_evidence **out, struct baton_error *e)
{
    const struct audit_device devices[] = {{"probed", device}, {NULL, NULL}};
    const struct cli_evidence x = {.command = "probe",
                                   .argc = a->argc,
                                   .argv = a->argv,
                                   .dir = a->evidence,
                                   .model = a->model,
                                   .opened = m,
                                   .devices = devices,
                                   .limits = limits,
                                   .repeats = 1};
    return a->evidence ? cli_evidence_open(&x, out, e) : 0;
}

/* The finding itself is all that is kept. */
static int keep(struct audit_evidence *ev, const char *name, const struct verify_finding *f,
                struct baton_error *e)
{
    json_t *result = finding_json(name, f), *raw = json_deep_copy(result);
    json_object_del(raw, "verdict");
    json_object_set_new(raw, "ran", json_boolean(f->verdict != VERIFY_PROBE_NA));
    const struct audit_attempt a = {.name = name, .raw = raw, .result = result, .supersedes = -1};
    return audit_evidence_add(ev, &a, e);
}

/* The probes from `first` to `last`; *failed: one does. */
static int run_all(const struct args *a, const char *device, struct baton_model *m, int first,
                   int last, json_t *list, struct audit_evidence *ev, bool *failed,
                   struct baton_error *e)
{
    for (int i = first; i <= last; i++) {
        struct verify_finding f;
        int rc = verify_probe_run(m, device, (enum verify_probe)i, a->threads, &f, e);
        if (rc)
            return rc;
        *failed = *failed || f.verdict == VERIFY_PROBE_FAIL;
        if (list)
            json_array_append_new(list, finding_json(verify_probe_names[i], &f));
        else
            print_finding(verify_probe_names[i], &f);
        rc = ev ? keep(ev, verify_probe_names[i], &f, e) : 0;
        if (rc)
            return rc;
    }
    const struct audit_cleanup none = {0}; /* probes open no lanes, blocks or tickets */
    return ev ? audit_evidence_finish(ev, &none, e) : 0;
}

static int device_name(const struct args *a, char *out, size_t size, struct baton_error *e)
{
    struct baton_caps caps;
    if (a->fault && !device_static(a->device, &caps))
        return base_fail(e, BATON_ERR_USAGE, "--fault: %s is not an emulated device", a->device);
    int n = snprintf(out, size, "%s%s%s", a->device, a->fault ? ",fault=" : "",
                     a->fault ? a->fault : "");
    return n < 0 || (size_t)n >= size
               ? base_fail(e, BATON_ERR_USAGE, "device '%.40s' is too long", a->device)
               : 0;
}

static int probe(const struct args *a, const char *which, const struct cli_common *common,
                 struct baton_error *e)
{
    int first = 0, last = VERIFY_PROBES - 1;
    char device[640];
    bool failed = false;
    struct baton_model *m = NULL;
    struct audit_evidence *ev = NULL;
    if (!a->model)
        return cli_fail(common, (base_fail(e, BATON_ERR_USAGE, "no model: -m is missing"), e));
    int rc = device_name(a, device, sizeof device, e);
    if (rc == 0 && strcmp(which, "all")) {
        rc = cli_parse_word("probe", which, verify_probe_names, &first, e);
        last = first;
    }
    const struct baton_model_options mo = {.struct_size = sizeof mo, .path = a->model};
    if (rc == 0)
        rc = baton_model_open(&mo, &m, e);
    if (rc == 0)
        rc = begin(a, device, m, &ev, e);
    json_t *list = common->json ? json_array() : NULL;
    if (rc == 0 && !list && cli_emulated(a->device))
        printf("%s is emulated: it computes on this machine's cpu\n", a->device);
    if (rc == 0)
        rc = run_all(a, device, m, first, last, list, ev, &failed, e);
    if (rc == 0 && ev && !list)
        printf("evidence in %s\n", audit_evidence_path(ev));
    audit_evidence_drop(ev);
    baton_model_close(m);
    if (rc) {
        json_decref(list);
        return cli_fail(common, e);
    }
    if (!common->json)
        return failed;
    return cli_print_json(json_pack("{s:i,s:s,s:b,s:o,s:s}", "schema", 1, "device", device,
                                    "emulated", cli_emulated(a->device), "probes", list, "verdict",
                                    verdicts[failed]),
                          failed);
}

int cli_probe(int argc, char **argv)
{
    static const struct option options[] = {{"model", required_argument, NULL, 'm'},
                                            {"device", required_argument, NULL, OPT_DEVICE},
                                            {"fault", required_argument, NULL, OPT_FAULT},
                                            {"threads", required_argument, NULL, OPT_THREADS},
                                            {"evidence", required_argument, NULL, OPT_EVIDENCE},
                                            {"json", no_argument, NULL, 'j'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    static const struct cli_syntax syntax = {":m:hvq", help, options, take, true};
    struct cli_common common = {0};
    struct baton_error e = {0};
    struct args a = {.device = "cpu", .argc = argc, .argv = argv};
    bool helped = false;
    if (cli_parse(argc, argv, &syntax, &common, &a, &helped, &e))
        return cli_fail(&common, &e);
    if (helped)
        return 0;
    cli_set_verbosity(&common);
    if (optind + 1 != argc) {
        base_fail(&e, BATON_ERR_USAGE, "give one probe, or all; see `baton probe --help`");
        return cli_fail(&common, &e);
    }
    return probe(&a, argv[optind], &common, &e);
}
