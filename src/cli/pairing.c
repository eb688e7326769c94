/* SPDX-License-Identifier: Apache-2.0 */
/* Probes at pairing time. */
#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "cli/pairing_priv.h"
#include "device/device.h"

int cli_probe_policy(const char *value, enum cli_probe_policy *out, struct baton_error *e)
{
    static const char *const words[] = {"pairing", "always", "never", NULL};
    int word = 0;
    int rc = cli_parse_word("--probe", value, words, &word, e);
    *out = (enum cli_probe_policy)word;
    return rc;
}

/* What the process that probes leaves. */
struct outcome {
    int rc;
    struct verify_pairing verdict;
    struct baton_error error;
};

static int wait_for(pid_t pid, int *status)
{
    int rc;
    while ((rc = waitpid(pid, status, 0)) < 0 && errno == EINTR)
        ;
    return rc < 0 ? -1 : 0;
}

/* A vendor's library is opened in the process that computes, which this one may not be. */
static int run_apart(const struct baton_model *m, const char *device, uint32_t threads,
                     struct verify_pairing *out, struct baton_error *e)
{
    struct outcome *o = mmap(NULL, sizeof *o, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                             -1, 0);
    if (o == MAP_FAILED)
        return base_fail_errno(e, BATON_ERR_NOMEM, errno, "probing %.60s", device);
    int status = 0;
    pid_t pid = fork();
    if (pid == 0) {
        o->rc = verify_pairing_run(m, device, threads, &o->verdict, &o->error);
        _exit(0);
    }
    int rc = pid < 0 || wait_for(pid, &status)
                 ? base_fail_errno(e, BATON_ERR_NOMEM, errno, "a process that probes %.60s", device)
                 : 0;
    if (rc == 0 && !(WIFEXITED(status) && WEXITSTATUS(status) == 0))
        rc = base_fail(e, BATON_ERR_DEVICE, "%.100s: the process that probed it ended by signal %d",
                       device, WIFSIGNALED(status) ? WTERMSIG(status) : 0);
    else if (rc == 0 && o->rc) {
        rc = o->rc;
        *e = o->error;
    } else if (rc == 0)
        *out = o->verdict;
    munmap(o, sizeof *o);
    return rc;
}

static int probe(const struct baton_model *m, const char *device, uint32_t threads, bool apart,
                 const struct cli_common *common, struct verify_pairing *out, struct baton_error *e)
{
    if (common->verbosity >= 0)
        fprintf(stderr, "baton: probing %s with this model (--probe never leaves it out)\n",
                device);
    return apart ? run_apart(m, device, threads, out, e)
                 : verify_pairing_run(m, device, threads, out, e);
}

int cli_pairing(const struct baton_model *m, const char *device, enum cli_probe_policy policy,
                uint32_t threads, bool apart, const struct cli_common *common,
                struct cli_pairing *out, struct baton_error *e)
{
    struct verify_pairing *v = &out->verdict;
    *out = (struct cli_pairing){.asked = device && device_is_foreign(device)};
    if (!out->asked)
        return 0;
    int rc = policy == CLI_PROBE_ALWAYS ? 0 : verify_pairing_find(m, device, v, e);
    if (rc == 0 && policy != CLI_PROBE_NEVER && !v->known)
        rc = probe(m, device, threads, apart, common, v, e);
    if (rc)
        return rc;
    out->forced = policy == CLI_PROBE_NEVER && (!v->known || v->failed);
    if (v->failed && !out->forced)
        return base_fail(e, BATON_ERR_INTEGRITY,
                         "%.60s fails the probe of %s, so it is not used (--probe never uses it): "
                         "%.120s",
                         device, v->probe, v->why);
    return 0;
}

struct json_t *cli_pairing_json(const struct cli_pairing *p)
{
    const struct verify_pairing *v = &p->verdict;
    if (!p->asked)
        return json_null();
    return json_pack("{s:s,s:b,s:b,s:s*,s:s*}", "verdict",
                     !v->known   ? "not_run"
                     : v->failed ? "fail"
                                 : "pass",
                     "cached", v->cached, "forced", p->forced, "probe", v->failed ? v->probe : NULL,
                     "why", v->failed ? v->why : NULL);
}

const char *cli_pairing_text(const struct cli_pairing *p, char *buf, size_t size)
{
    const struct verify_pairing *v = &p->verdict;
    snprintf(buf, size, "%s%s%s%s",
             !v->known   ? "not run"
             : v->failed ? "failed "
                         : "passed",
             v->failed ? v->probe : "", v->cached ? ", before" : "", p->forced ? ", forced" : "");
    return buf;
}
