/* SPDX-License-Identifier: Apache-2.0 */
/* The second process of a run: connect, fork, end, and tell how it ended.
 *
 * Neither process outlives the other: the end of the socket tells the survivor. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "cli/run_priv.h"
#include "transport/transport.h"

int cli_run_pair_fork(const struct run_args *a, int (*child)(void *ctx, int fd), void *ctx,
                      struct run_pair *pair, struct baton_error *e)
{
    int fds[2];
    int rc = a->transport == RUN_SHM ? transport_socketpair(fds, e) : transport_tcp_pair(fds, e);
    if (rc)
        return rc;
    pid_t parent = getpid();
    fflush(NULL);
    pid_t pid = fork();
    if (pid < 0) {
        int err = errno;
        close(fds[0]);
        close(fds[1]);
        return base_fail_errno(e, BATON_ERR_NOMEM, err, "fork of the producer process");
    }
    if (pid == 0) {
        close(fds[0]);
        /* The terminal's Ctrl-C reaches both; the consumer decides and tells us by ABORT. */
        signal(SIGINT, SIG_IGN);
        signal(SIGTERM, SIG_DFL);
        prctl(PR_SET_NAME, "baton-prefill");
        (void)base_probe("producer-forked");
        if (getppid() != parent) {
            fprintf(stderr, "baton: producer: the consumer's process ended before the prefill\n");
            _exit(3);
        }
        int code = child(ctx, fds[1]);
        fflush(NULL);
        _exit(code);
    }
    close(fds[1]);
    pair->producer = pid;
    pair->fd = fds[0];
    return 0;
}

/* Wait up to `ms`; true when the process was reaped into *status. A stopped one is not waited for
 * (WIFSTOPPED). */
static bool reap(pid_t pid, unsigned ms, int *status)
{
    for (unsigned waited = 0;; waited += 10) {
        pid_t got = waitpid(pid, status, WNOHANG | WUNTRACED);
        if (got == pid && WIFSTOPPED(*status))
            return false;
        if (got == pid || (got < 0 && errno == ECHILD))
            return true;
        if (waited >= ms)
            return false;
        base_sleep_ns(10000000);
    }
}

static void tell_end(const struct run_pair *pair, int status, struct baton_error *e)
{
    if (WIFSIGNALED(status))
        base_fail(e, BATON_ERR_PEER,
                  "the producer process was killed by signal %d (%s) before "
                  "the handoff was complete",
                  WTERMSIG(status), strsignal(WTERMSIG(status)));
    else if (pair->failure && pair->failure->code)
        base_fail(e, pair->failure->code, "producer: %s", pair->failure->text);
    else if (WIFEXITED(status) && WEXITSTATUS(status))
        base_fail(e, BATON_ERR_PEER,
                  "the producer process failed (exit %d); its message stands "
                  "above",
                  WEXITSTATUS(status));
}

void cli_run_pair_end(struct run_pair *pair, bool failed, struct baton_error *e)
{
    enum { GRACE_MS = 1000, TERM_MS = 500 };
    if (!pair->producer)
        return;
    bool lost = failed && e->code == BATON_ERR_PEER;
    int status = 0;
    bool gone = reap(pair->producer, failed && !lost ? 0 : GRACE_MS, &status);
    bool by_itself = gone;
    if (!gone && !WIFSTOPPED(status)) {
        kill(pair->producer, SIGTERM);
        gone = reap(pair->producer, TERM_MS, &status);
    }
    if (!gone) {
        kill(pair->producer, SIGKILL);
        waitpid(pair->producer, &status, 0);
    }
    if (lost && by_itself)
        tell_end(pair, status, e);
    else if (!failed && pair->failure && pair->failure->code)
        base_log(BASE_LOG_WARN, "producer: %s", pair->failure->text);
    pair->producer = 0;
}
