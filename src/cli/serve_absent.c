/* SPDX-License-Identifier: Apache-2.0 */
/* baton serve in a build without libmicrohttpd. */
#include "base/base.h"
#include "cli/cli.h"

int cli_serve(int argc, char **argv)
{
    const struct cli_common common = {.json = cli_wants_json(argc, argv)};
    struct baton_error e;
    base_fail(&e, BATON_ERR_UNSUPPORTED,
              "this build has no server: install libmicrohttpd and configure with "
              "-Dserve=enabled");
    return cli_fail(&common, &e);
}
