/* SPDX-License-Identifier: Apache-2.0 */
/* baton model compile: a program of an emulated device into a file. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/base.h"
#include "cli/model_priv.h"
#include "device/device.h"
#include "model/model.h"

#define DEFAULT_CTX 8192u /* positions; as a server has them */

static int check(const struct model_args *a, const struct model_config *c, uint32_t *ctx,
                 struct baton_error *e)
{
    uint32_t usual = c->max_positions < DEFAULT_CTX ? c->max_positions : DEFAULT_CTX;
    *ctx = a->ctx ? a->ctx : usual;
    if (*ctx > c->max_positions)
        return base_fail(e, BATON_ERR_INPUT, "--ctx %u: the model has %u positions", *ctx,
                         c->max_positions);
    return 0;
}

static int compile(const struct model_args *a, const struct model *m, uint32_t ctx, char **bytes,
                   size_t *n, struct baton_error *e)
{
    struct device *d = NULL;
    struct model_bound *b = NULL;
    struct device_program *p = NULL;
    struct model_identity id;
    int rc = device_open(a->device, &d, e);
    if (rc == 0)
        rc = model_hash(m, a->threads, a->no_cache, NULL, NULL, &id, e);
    if (rc == 0)
        rc = model_bind(m, d, NULL, NULL, &b, e);
    if (rc == 0)
        rc = device_program_open(d, model_graph(b), &p, e);
    if (rc == 0)
        rc = device_program_artifact(p, ctx, id.weights, bytes, n, e);
    device_program_close(p);
    model_unbind(b);
    device_close(d);
    return rc;
}

int cli_model_compile(const struct model_args *a, struct baton_error *e)
{
    struct model *m = NULL;
    char *bytes = NULL, hex[65];
    size_t n = 0;
    uint32_t ctx;
    uint8_t hash[32];
    if (!a->device || !a->out)
        return base_fail(e, BATON_ERR_USAGE, "compile needs --device DEV and --out FILE");
    int rc = base_file_try(a->out, e);
    if (rc == 0)
        rc = model_open(a->model, &m, e);
    if (rc == 0)
        rc = check(a, model_config_of(m), &ctx, e);
    if (rc == 0)
        rc = compile(a, m, ctx, &bytes, &n, e);
    if (rc == 0)
        rc = base_file_write(a->out, bytes, n, e);
    if (rc == 0) {
        base_sha256(bytes, n, hash);
        base_hex(hash, 32, hex);
    }
    free(bytes);
    model_close(m);
    if (rc)
        return rc;
    if (a->common.json)
        return cli_print_json(json_pack("{s:i,s:s,s:b,s:s,s:s,s:I}", "schema", 1, "device",
                                        a->device, "emulated", cli_emulated(a->device), "artifact",
                                        a->out, "sha256", hex, "bytes", (json_int_t)n),
                              0);
    printf("%s: a program of %s (emulated), %zu bytes without weights\nsha256 %s\n", a->out,
           a->device, n, hex);
    return 0;
}
