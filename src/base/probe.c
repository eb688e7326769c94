/* SPDX-License-Identifier: Apache-2.0 */
/* Probe points. BATON_PROBE holds up to MAX_PROBES entries, separated by commas:
 *     NAME[@K]=kill | stop | fail | delay:MS
 * The table is the process's own and is inherited, visits included, by a fork. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"

enum { MAX_PROBES = 8, NAME_BYTES = 64 };
enum action { ACT_KILL, ACT_STOP, ACT_FAIL, ACT_DELAY };

struct probe {
    char name[NAME_BYTES];
    unsigned long at; /* fires at this visit alone; 0 = at each */
    enum action action;
    unsigned long delay_ms;
    _Atomic unsigned long visits;
};

static struct probe probes[MAX_PROBES];
static unsigned n_probes;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Atomic int armed = -1; /* -1 not read yet, 0 nothing asked for, 1 look it up */

static bool parse_action(const char *s, struct probe *p)
{
    static const char *const names[] = {"kill", "stop", "fail"};
    for (int i = 0; i < 3; i++) {
        if (strcmp(s, names[i]) == 0) {
            p->action = (enum action)i;
            return true;
        }
    }
    char *end;
    if (strncmp(s, "delay:", 6) != 0 || s[6] < '0' || s[6] > '9')
        return false;
    p->action = ACT_DELAY;
    p->delay_ms = strtoul(s + 6, &end, 10);
    return *end == '\0';
}

/* `entry` is cut up in place. */
static bool parse_entry(char *entry, struct probe *p)
{
    char *value = strchr(entry, '='), *end = "";
    if (!value)
        return false;
    *value++ = '\0';
    char *at = strchr(entry, '@');
    if (at) {
        *at++ = '\0';
        p->at = strtoul(at, &end, 10);
        if (p->at == 0 || *end != '\0')
            return false;
    }
    size_t n = strlen(entry);
    if (n == 0 || n >= sizeof p->name)
        return false;
    memcpy(p->name, entry, n + 1);
    return parse_action(value, p);
}

static void read_environment(void)
{
    const char *env = getenv("BATON_PROBE");
    char *text = env && *env ? base_try_strdup(env, NULL) : NULL, *save = NULL;
    for (char *entry = text ? strtok_r(text, ",", &save) : NULL; entry;
         entry = strtok_r(NULL, ",", &save)) {
        struct probe p = {0};
        if (n_probes == MAX_PROBES || !parse_entry(entry, &p)) {
            base_log(BASE_LOG_ERROR, "BATON_PROBE=%s is not NAME[@K]=kill|stop|fail|delay:MS", env);
            break;
        }
        probes[n_probes++] = p;
    }
    free(text);
    atomic_store(&armed, n_probes > 0);
}

static bool fire(const struct probe *p)
{
    switch (p->action) {
    case ACT_KILL:
        kill(getpid(), SIGKILL);
        return false;
    case ACT_STOP:
        raise(SIGSTOP); /* to this thread, which does not go on; kill() may choose another first */
        return false;
    case ACT_DELAY:
        base_sleep_ns((uint64_t)p->delay_ms * 1000000u);
        return false;
    case ACT_FAIL:
        break;
    }
    return true;
}

static bool look_up(const char *name)
{
    bool fail = false;
    pthread_once(&once, read_environment);
    for (unsigned i = 0; i < n_probes; i++) {
        struct probe *p = &probes[i];
        if (strcmp(p->name, name) != 0)
            continue;
        unsigned long visit = atomic_fetch_add(&p->visits, 1) + 1;
        if (p->at == 0 || p->at == visit)
            fail |= fire(p);
    }
    return fail;
}

bool base_probe(const char *name)
{
    if (__builtin_expect(atomic_load_explicit(&armed, memory_order_relaxed) == 0, 1))
        return false;
    return look_up(name);
}
