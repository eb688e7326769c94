/* SPDX-License-Identifier: Apache-2.0 */
/* What is read once per process: probe points and the log, each case in a child of its own. */
#include <fcntl.h>
#include <signal.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/base.h"
#include "../test.h"

/* Run `body` in a child with BATON_PROBE=probe (NULL: unset) and give its wait status. */
static int in_child(const char *probe, int (*body)(void))
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        if (probe)
            setenv("BATON_PROBE", probe, 1);
        else
            unsetenv("BATON_PROBE");
        _exit(body());
    }
    int status = 0;
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
    if (WIFSTOPPED(status)) {
        int stopped = status;
        kill(pid, SIGKILL);
        waitpid(pid, &status, 0);
        return stopped;
    }
    return status;
}

/* A bit for each of three visits of "here", and one for a point nobody named. */
static int visits(void)
{
    int bits = 0;
    for (int i = 0; i < 3; i++)
        bits |= base_probe("here") << i;
    return bits | base_probe("elsewhere") << 3;
}

static int timed(void)
{
    uint64_t before = base_now_ns();
    bool fail = base_probe("here");
    return !fail && base_now_ns() - before >= 30000000u ? 0 : 1;
}

static int quiet_visits(void)
{
    close(STDERR_FILENO);
    return visits();
}

static void probes_fail_where_asked(void **state)
{
    assert_int_equal(WEXITSTATUS(in_child(NULL, visits)), 0);
    assert_int_equal(WEXITSTATUS(in_child("", visits)), 0);
    assert_int_equal(WEXITSTATUS(in_child("here=fail", visits)), 7);
    assert_int_equal(WEXITSTATUS(in_child("here@2=fail", visits)), 2);
    assert_int_equal(WEXITSTATUS(in_child("here@4=fail", visits)), 0);
    assert_int_equal(WEXITSTATUS(in_child("her=fail", visits)), 0);
    assert_int_equal(WEXITSTATUS(in_child("elsewhere=fail,here@3=fail", visits)), 12);
    static const char *const bad[] = {"here",        "here=",       "=fail",         "here@0=fail",
                                      "here@x=fail", "here=delay:", "here=delay:1x", "here=die"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        assert_int_equal(WEXITSTATUS(in_child(bad[i], quiet_visits)), 0);
}

static void probes_kill_stop_and_delay(void **state)
{
    int s = in_child("here=kill", visits);
    assert_true(WIFSIGNALED(s) && WTERMSIG(s) == SIGKILL);
    s = in_child("here@2=stop", visits);
    assert_true(WIFSTOPPED(s) && WSTOPSIG(s) == SIGSTOP);
    s = in_child("here=delay:30", timed);
    assert_true(WIFEXITED(s) && WEXITSTATUS(s) == 0);
    s = in_child("there=delay:30", timed);
    assert_true(WIFEXITED(s) && WEXITSTATUS(s) == 1);
}

static int log_pipe[2];

static int write_logs(void)
{
    char big[3000];
    dup2(log_pipe[1], STDERR_FILENO);
    memset(big, 'y', sizeof big - 1);
    big[sizeof big - 1] = '\0';
    base_log(BASE_LOG_INFO, "hidden");
    base_log(BASE_LOG_WARN, "shown %d", 5);
    base_log_set_level(BASE_LOG_DEBUG);
    base_log(BASE_LOG_DEBUG, "%s", big);
    base_log_set_level(BASE_LOG_ERROR);
    base_log(BASE_LOG_WARN, "hidden too");
    return 0;
}

static void log_lines(void **state)
{
    char text[8192];
    assert_int_equal(pipe(log_pipe), 0);
    assert_int_equal(in_child(NULL, write_logs), 0);
    close(log_pipe[1]);
    ssize_t n = read(log_pipe[0], text, sizeof text - 1);
    close(log_pipe[0]);
    assert_true(n > 0);
    text[n] = '\0';
    assert_non_null(strstr(text, "warn: shown 5\n"));
    assert_null(strstr(text, "hidden"));
    char *second = strchr(text, '\n') + 1;
    assert_non_null(strstr(second, "debug: yyy"));
    size_t len = strlen(second); /* cut to one line of 1024 bytes that still ends */
    assert_int_equal(len, 1024);
    assert_true(strchr(second, '\n') == second + len - 1);
}

static volatile sig_atomic_t alarms;

static void on_alarm(int sig)
{
    alarms++;
}

static void sleep_goes_through_signals(void **state)
{
    struct sigaction act = {.sa_handler = on_alarm}, old;
    sigaction(SIGALRM, &act, &old);
    struct itimerval every = {.it_interval = {0, 5000}, .it_value = {0, 5000}}, off = {0};
    setitimer(ITIMER_REAL, &every, NULL);
    uint64_t before = base_now_ns();
    base_sleep_ns(60000000);
    uint64_t took = base_now_ns() - before;
    setitimer(ITIMER_REAL, &off, NULL);
    sigaction(SIGALRM, &old, NULL);
    assert_true(alarms > 0);
    assert_true(took >= 60000000);
    assert_true(base_wall_ms() > 1700000000000u);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(probes_fail_where_asked),
        cmocka_unit_test(probes_kill_stop_and_delay),
        cmocka_unit_test(log_lines),
        cmocka_unit_test(sleep_goes_through_signals),
    };
    return cmocka_run_group_tests_name("base-process", tests, NULL, NULL);
}
