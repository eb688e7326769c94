/* SPDX-License-Identifier: Apache-2.0 */
/* run: one role on another machine, as remote:HOST:PORT. Whoever speaks docs/wire.md listens there:
 * as a producer that takes ASK, or as a consumer that takes any offer. */
#include <string.h>

#include "base/base.h"
#include "cli/run_priv.h"

const char *cli_run_remote(const char *device)
{
    static const char prefix[] = "remote:";
    return device && !strncmp(device, prefix, sizeof prefix - 1) ? device + sizeof prefix - 1
                                                                 : NULL;
}

/* The name is looked at, not what it resolves to: a name can change its mind. */
static bool is_local(const char *address)
{
    return !strncmp(address, "127.", 4) || !strncmp(address, "localhost:", 10) ||
           !strncmp(address, "[::1]:", 6) || !strncmp(address, "unix:", 5);
}

static int check_decode(const struct run_args *a, struct baton_error *e)
{
    const char *not_here = a->temperature != 0 ? "--temp"
                           : a->n_force        ? "--force"
                           : a->logits         ? "--logits"
                           : a->kv_save        ? "--kv-save"
                           : a->local_prefill  ? "--on-handoff-failure local-prefill"
                           : a->top_k          ? "--top-k"
                           : a->top_p != 0     ? "--top-p"
                           : a->min_p != 0     ? "--min-p"
                                               : NULL;
    if (not_here)
        return base_fail(e, BATON_ERR_USAGE,
                         "%s is for whoever decodes, and --decode %.80s does that elsewhere",
                         not_here, a->decode);
    return 0;
}

int cli_run_remote_check(const struct run_args *a, struct baton_error *e)
{
    const char *prefill = cli_run_remote(a->prefill), *decode = cli_run_remote(a->decode);
    const char *address = prefill ? prefill : decode;
    if (!address)
        return a->key_file
                   ? base_fail(e, BATON_ERR_USAGE,
                               "--kv-key-file is for --prefill or --decode remote:HOST:PORT")
                   : 0;
    if (prefill && decode)
        return base_fail(e, BATON_ERR_USAGE,
                         "--prefill %.80s and --decode %.80s: nothing is left to run here",
                         a->prefill, a->decode);
    if (a->mode == BATON_NATIVE)
        return base_fail(e, BATON_ERR_USAGE, "mode native runs on one device here, not on %.80s",
                         prefill ? a->prefill : a->decode);
    if (!a->key_file && !is_local(address))
        return base_fail(
            e, BATON_ERR_USAGE,
            "'%.80s' is another machine: --kv-key-file is needed, with the same secret "
            "there",
            address);
    return decode ? check_decode(a, e) : 0;
}
