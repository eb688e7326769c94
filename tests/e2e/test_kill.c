/* SPDX-License-Identifier: Apache-2.0 */
/* Killing either process, at many moments: the other ends by itself with a message, and nothing is
 * left. "Within 2 s" is a promise to users; here the survivor's own end is what is waited for. */
#include <dirent.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/e2e/e2e.h"

/* The child of `parent`, found in /proc; 0 where there is none (yet). */
static pid_t child_of(pid_t parent)
{
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", parent, parent);
    FILE *f = fopen(path, "r");
    if (!f)
        return 0;
    size_t n = fread(text, 1, sizeof text - 1, f);
    fclose(f);
    text[n] = '\0';
    return (pid_t)atoi(text);
}

static bool alive(pid_t pid)
{
    char path[64], state = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *f = fopen(path, "r");
    if (!f)
        return false;
    bool got = fscanf(f, "%*d (%*[^)]) %c", &state) == 1;
    fclose(f);
    return got && state != 'Z' && state != 'X';
}

static void pause_ms(unsigned ms)
{
    struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};
    nanosleep(&t, NULL);
}

/* Start a long run and wait until its producer exists. */
static pid_t start(struct e2e_child *c, const char *mode)
{
    const char *dir = e2e_model("gemma3-tiny");
    const char *prompt = test_path("docs/example-prompt.txt");
    const char *args[] = {"run",    "-m", dir,    "--prompt-file", prompt,        "--mode", mode,
                          "--json", "-n", "8000", "--ignore-eos",  "--transport", "tcp",    NULL};
    e2e_start(c, args);
    pid_t producer = 0;
    for (int i = 0; i < 120000 && !producer && alive(c->pid); i++) {
        producer = child_of(c->pid);
        pause_ms(1);
    }
    if (!producer)
        fail_msg("no producer process appeared");
    return producer;
}

static void wait_gone(pid_t pid, const char *who)
{
    for (int i = 0; i < 120000; i++) /* a hang; what ends late is no failure here */ {
        if (!alive(pid))
            return;
        pause_ms(1);
    }
    kill(pid, SIGKILL);
    fail_msg("the %s did not end", who);
}

/* Before its job is done a dead producer is an error that names it; afterwards it is not missed. */
static void test_kill_producer(void **state)
{
    (void)state;
    unsigned refused = 0;
    for (unsigned ms = 0; ms < 120; ms += 12) {
        struct e2e_child c;
        struct e2e r;
        pid_t producer = start(&c, ms % 24 ? "whole" : "stream");
        pause_ms(ms);
        bool was_there = alive(producer) && kill(producer, SIGKILL) == 0;
        if (!was_there || ms > 60) /* it decodes on without its producer: enough seen */
            pause_ms(20), kill(c.pid, SIGINT);
        e2e_finish(&c, &r);
        if (r.status == 3) {
            refused++;
            if (!strstr(r.err, "producer"))
                fail_msg("the message does not name the producer: %s", r.err);
            assert_non_null(r.json);
            assert_string_equal(json_string_value(e2e_get(r.json, "error.code")), "peer");
        } else if (r.status != 130) {
            fail_msg("exit %d: %s", r.status, r.err);
        }
        wait_gone(producer, "producer");
        e2e_free(&r);
    }
    print_message("%u of 10 kills came before COMMIT\n", refused);
    assert_true(refused > 0);
}

/* Where the child's messages stay when e2e_finish has removed its own files. */
static const char *keep_messages(const struct e2e_child *c)
{
    const char *kept = e2e_temp("kept.err");
    unlink(kept);
    assert_int_equal(link(c->err, kept), 0);
    return kept;
}

/* The producer is an orphan that this process inherits: it ends by itself, and one that could not
 * do its work says why. Returns its exit status. */
static int reap_producer(const char *messages, const char *when)
{
    char text[4096] = {0};
    int status = 0, waited = 0;
    while (waitpid(-1, &status, WNOHANG) == 0 && waited++ < 120000)
        pause_ms(1);
    if (waited >= 120000)
        fail_msg("%s: the producer did not end", when);
    assert_true(WIFEXITED(status));
    FILE *f = fopen(messages, "r");
    assert_non_null(f);
    text[fread(text, 1, sizeof text - 1, f)] = '\0';
    fclose(f);
    if (WEXITSTATUS(status) != 0 && !strstr(text, "baton: producer: "))
        fail_msg("%s: the producer ended with %d and said '%s'", when, WEXITSTATUS(status), text);
    return WEXITSTATUS(status);
}

static void test_kill_consumer(void **state)
{
    (void)state;
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
    for (unsigned i = 0; i < 20; i++) {
        struct e2e_child c;
        struct e2e r;
        char when[32];
        unsigned ms = i < 10 ? 0 : 12 * (i - 10);
        /* Before the producer has begun, right after that, and later. */
        if (i < 5)
            setenv("BATON_PROBE", "producer-forked=delay:300", 1);
        start(&c, i % 2 ? "whole" : "stream");
        unsetenv("BATON_PROBE");
        const char *messages = keep_messages(&c);
        pause_ms(ms);
        kill(c.pid, SIGKILL);
        e2e_finish(&c, &r);
        assert_int_equal(r.status, 128 + SIGKILL);
        snprintf(when, sizeof when, "killed after %u ms", ms);
        reap_producer(messages, when);
        e2e_free(&r);
    }
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 0), 0);
}

/* The consumer dies in a state that is chosen, not met by chance. */
static void test_kill_consumer_states(void **state)
{
    (void)state;
    static const char *const points[] = {"consumer-offered=kill", "consumer-reserved=kill",
                                         "consumer-piece=kill", "consumer-piece@31=kill",
                                         "consumer-committed=kill"};
    const char *dir = e2e_model("gemma3-tiny");
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
    for (size_t i = 0; i < 2 * (sizeof points / sizeof *points); i++) {
        const char *args[] = {"run", "-m", dir,  "-p",     "The quick brown fox",
                              "-n",  "9",  "-q", "--mode", i % 2 ? "whole" : "stream",
                              NULL};
        struct e2e_child c;
        struct e2e r;
        setenv("BATON_PROBE", points[i / 2], 1);
        e2e_start(&c, args);
        unsetenv("BATON_PROBE");
        const char *messages = keep_messages(&c);
        e2e_finish(&c, &r);
        assert_int_equal(r.status, 128 + SIGKILL);
        e2e_free(&r);
        assert_int_not_equal(reap_producer(messages, points[i / 2]), 0);
    }
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 0), 0);
}

/* Ctrl-C: the terminal sends it to both. */
static void test_interrupt(void **state)
{
    (void)state;
    for (unsigned ms = 0; ms < 200; ms += 40) {
        struct e2e_child c;
        struct e2e r;
        pid_t producer = start(&c, "stream");
        pause_ms(ms);
        kill(producer, SIGINT);
        kill(c.pid, SIGINT);
        e2e_finish(&c, &r);
        if (r.status != 130)
            fail_msg("exit %d: %s", r.status, r.err);
        assert_non_null(r.json);
        assert_string_equal(json_string_value(e2e_get(r.json, "finish")), "cancelled");
        wait_gone(producer, "producer");
        e2e_free(&r);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kill_producer), cmocka_unit_test(test_kill_consumer),
        cmocka_unit_test(test_kill_consumer_states), cmocka_unit_test(test_interrupt)};
    int rc = cmocka_run_group_tests_name("e2e kill", tests, NULL, NULL);
    e2e_temp_remove();
    return rc;
}
