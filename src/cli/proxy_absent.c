/* SPDX-License-Identifier: Apache-2.0 */
/* baton proxy in a build without libmicrohttpd or libcurl's headers. */
#include "base/base.h"
#include "cli/cli.h"

int cli_proxy(int argc, char **argv)
{
    const struct cli_common common = {.json = cli_wants_json(argc, argv)};
    struct baton_error e;
    base_fail(&e, BATON_ERR_UNSUPPORTED,
              "this build has no proxy: install libmicrohttpd and libcurl's headers and configure "
              "with -Dserve=enabled");
    return cli_fail(&common, &e);
}
