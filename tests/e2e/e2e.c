/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/e2e/e2e.h"

extern char **environ;

const char *const e2e_models[4] = {"qwen3-tiny", "qwen3-small", "koni-tiny", "gemma3-tiny"};

static char temp_dir[64];

const char *e2e_temp(const char *name)
{
    static char buf[16][160];
    static unsigned turn;
    if (!temp_dir[0]) {
        snprintf(temp_dir, sizeof temp_dir, "/tmp/baton-e2e-XXXXXX");
        if (!mkdtemp(temp_dir))
            fail_msg("mkdtemp: %s", strerror(errno));
    }
    char *p = buf[turn++ % 16];
    snprintf(p, sizeof *buf, "%s/%s", temp_dir, name);
    return p;
}

void e2e_temp_remove(void)
{
    char cmd[96];
    if (!temp_dir[0])
        return;
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", temp_dir);
    if (system(cmd))
        print_error("could not remove %s\n", temp_dir);
    temp_dir[0] = '\0';
}

static char *slurp(const char *path)
{
    FILE *f = fopen(path, "rb");
    if (!f)
        return strdup("");
    fseek(f, 0, SEEK_END);
    long n = ftell(f);
    rewind(f);
    char *text = malloc((size_t)n + 1);
    assert_int_equal(fread(text, 1, (size_t)n, f), (size_t)n);
    text[n] = '\0';
    fclose(f);
    return text;
}

void e2e_start(struct e2e_child *c, const char *const *args)
{
    static unsigned count;
    const char *binary = getenv("BATON_BINARY");
    char *argv[64] = {(char *)(binary ? binary : "build/baton")};
    size_t n = 1;
    for (; args[n - 1]; n++) {
        assert_true(n < 63);
        argv[n] = (char *)args[n - 1];
    }
    char name[32];
    snprintf(name, sizeof name, "run%u.out", count);
    snprintf(c->out, sizeof c->out, "%s", e2e_temp(name));
    snprintf(name, sizeof name, "run%u.err", count++);
    snprintf(c->err, sizeof c->err, "%s", e2e_temp(name));
    posix_spawn_file_actions_t fa;
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_addopen(&fa, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&fa, 1, c->out, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_addopen(&fa, 2, c->err, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    int rc = posix_spawn(&c->pid, argv[0], &fa, NULL, argv, environ);
    posix_spawn_file_actions_destroy(&fa);
    if (rc)
        fail_msg("%s: %s", argv[0], strerror(rc));
}

void e2e_finish(struct e2e_child *c, struct e2e *r)
{
    int status = 0;
    struct timespec tick = {0, 2000000};
    /* A hang is a failure of its own kind; everything that ends is judged by what it said. */
    for (unsigned i = 0; waitpid(c->pid, &status, WNOHANG) == 0; i++) {
        if (i > 600u * 500u) {
            kill(c->pid, SIGKILL);
            waitpid(c->pid, &status, 0);
            fail_msg("the command did not end");
        }
        nanosleep(&tick, NULL);
    }
    r->status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    r->out = slurp(c->out);
    r->err = slurp(c->err);
    r->json = json_loads(r->out, 0, NULL);
    unlink(c->out);
    unlink(c->err);
}

void e2e_run(struct e2e *r, const char *const *args)
{
    struct e2e_child c;
    e2e_start(&c, args);
    e2e_finish(&c, r);
}

void e2e_free(struct e2e *r)
{
    free(r->out);
    free(r->err);
    json_decref(r->json);
    memset(r, 0, sizeof *r);
}

void e2e_expect(struct e2e *r, int status, const char *const *args)
{
    e2e_run(r, args);
    if (r->status == status)
        return;
    for (size_t i = 0; args[i]; i++)
        print_error("%.100s ", args[i]);
    fail_msg("exit %d instead of %d\nstdout: %.500s\nstderr: %.500s", r->status, status, r->out,
             r->err);
}

char *e2e_ids(const int32_t *ids, size_t n)
{
    char *text = malloc(n * 12 + 1), *p = text;
    *p = '\0';
    for (size_t i = 0; i < n; i++)
        p += sprintf(p, "%s%d", i ? "," : "", ids[i]);
    return text;
}

char *e2e_random_ids(uint64_t *seed, size_t n)
{
    int32_t *ids = malloc(n * sizeof *ids);
    for (size_t i = 0; i < n; i++)
        ids[i] = (int32_t)test_range(seed, 10, 200);
    char *text = e2e_ids(ids, n);
    free(ids);
    return text;
}

const char *e2e_model(const char *name)
{
    static char dir[4][1100];
    static unsigned turn;
    char *p = dir[turn++ % 4];
    snprintf(p, sizeof *dir, "%s/%s", test_path("models"), name);
    return p;
}

json_t *e2e_get(json_t *doc, const char *path)
{
    char key[64];
    json_t *at = doc;
    for (const char *p = path; at && *p;) {
        size_t n = strcspn(p, ".");
        snprintf(key, sizeof key, "%.*s", (int)n, p);
        at = json_object_get(at, key);
        p += n + (p[n] == '.');
    }
    if (!at)
        fail_msg("no %s in the document", path);
    return at;
}

const struct model_tensor *e2e_tensor(const struct model_tensors *t, const char *fmt, ...)
{
    char name[96];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(name, sizeof name, fmt, ap);
    va_end(ap);
    const struct model_tensor *x = model_tensors_find(t, name);
    if (!x)
        fail_msg("no tensor %s", name);
    return x;
}
