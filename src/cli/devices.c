/* SPDX-License-Identifier: Apache-2.0 */
/* baton devices: what can be used here, and why the rest can't. */
#include <getopt.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "cli/cli.h"
#include "device/device.h"

static const char help[] = "usage: baton devices [--json]\n"
                           "\n"
                           "Lists the devices of this build: what each can do, and why an absent "
                           "one is absent.\n"
                           "\n"
                           "example\n"
                           "  baton devices --json\n";

static void print_device(void *ctx, const struct baton_caps *c, const char *why)
{
    (void)ctx;
    char roles[32];
    snprintf(roles, sizeof roles, "%s%s%s", c->prefill ? "prefill" : "",
             c->prefill && c->decode ? "+" : "", c->decode ? "decode" : "");
    printf("%-10s %-8s %-15s %s%s%s\n", c->name, why ? "absent" : "ready", roles,
           c->emulated ? "(emulated) " : "", why ? why : c->detail,
           !why && c->row_invariant ? "; row-invariant" : "");
}

static void add_device(void *ctx, const struct baton_caps *c, const char *why)
{
    json_array_append_new(ctx, json_pack("{s:s,s:b,s:s?,s:b,s:b,s:b,s:b,s:b,s:i,s:i,s:s,s:s}",
                                         "device", c->name, "available", why == NULL, "why_absent",
                                         why, "emulated", c->emulated, "prefill", c->prefill,
                                         "decode", c->decode, "row_invariant", c->row_invariant,
                                         "layer_export", c->layer_export, "max_rows",
                                         (int)c->max_rows, "max_lanes", (int)c->max_lanes,
                                         "numerics", c->numerics, "detail", c->detail));
}

int cli_devices(int argc, char **argv)
{
    static const struct option options[] = {
        {"json", no_argument, NULL, 'j'}, {"help", no_argument, NULL, 'h'}, {NULL, 0, NULL, 0}};
    struct cli_common common = {0};
    struct baton_error e = {0};
    static const struct cli_syntax syntax = {":hvq", help, options, NULL, false};
    bool helped = false;
    if (cli_parse(argc, argv, &syntax, &common, NULL, &helped, &e))
        return cli_fail(&common, &e);
    if (helped)
        return 0;
    if (!common.json) {
        device_list(print_device, NULL);
        return 0;
    }
    json_t *list = json_array();
    device_list(add_device, list);
    return cli_print_json(json_pack("{s:i,s:o}", "schema", 1, "devices", list), 0);
}
