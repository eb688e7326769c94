/* SPDX-License-Identifier: Apache-2.0 */
/* Traces. The record lies in memory that a fork shares, so that several processes write one trace
 * and what a killed one wrote is still there. A slot is claimed by counting up and is valid once
 * its `ready` is set: whoever dies in between leaves a slot that is skipped. */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "base/replace_priv.h"

#define LINE_BYTES 1024u
#define EXACT ((uint64_t)1 << 53) /* readers whose numbers are doubles get larger ones as text */

struct slot {
    atomic_bool ready;
    bool name; /* of a track, or of the process where the track is 0 */
    uint32_t pid;
    struct base_trace_event event;
};

struct base_trace {
    size_t bytes;
    uint32_t capacity;
    _Atomic uint64_t claimed; /* may pass capacity: the rest was dropped */
    struct slot slots[];
};

int base_trace_open(uint32_t capacity, struct base_trace **out, struct baton_error *e)
{
    size_t bytes = sizeof(struct base_trace) + (size_t)capacity * sizeof(struct slot);
    struct base_trace *t = base_map_alloc(bytes, true, e);
    if (!t)
        return BATON_ERR_NOMEM;
    t->bytes = bytes;
    t->capacity = capacity;
    *out = t;
    return 0;
}

void base_trace_close(struct base_trace *t)
{
    if (t)
        base_map_free(t, t->bytes);
}

static void add(struct base_trace *t, const struct base_trace_event *ev, bool name)
{
    uint64_t i = atomic_fetch_add(&t->claimed, 1);
    if (i >= t->capacity)
        return;
    struct slot *s = &t->slots[i];
    s->name = name;
    s->pid = (uint32_t)getpid();
    s->event = *ev;
    atomic_store_explicit(&s->ready, true, memory_order_release);
}

void base_trace_add(struct base_trace *t, const struct base_trace_event *ev)
{
    add(t, ev, false);
}

void base_trace_name(struct base_trace *t, uint32_t track, const char *name, int64_t number)
{
    const struct base_trace_event ev = {.name = name, .number = number, .track = track};
    add(t, &ev, true);
}

uint64_t base_trace_dropped(const struct base_trace *t)
{
    uint64_t n = atomic_load(&t->claimed);
    return n > t->capacity ? n - t->capacity : 0;
}

/* ---- writing ------------------------------------------------------------------------------ */

/* Names first, then by time; of those that begin together the longest, which holds the others. */
static int compare(const void *a, const void *b)
{
    const struct slot *x = *(struct slot *const *)a, *y = *(struct slot *const *)b;
    if (x->name != y->name)
        return x->name ? -1 : 1;
    if (x->event.begin_ns != y->event.begin_ns)
        return x->event.begin_ns < y->event.begin_ns ? -1 : 1;
    if (x->event.end_ns != y->event.end_ns)
        return x->event.end_ns > y->event.end_ns ? -1 : 1;
    return x < y ? -1 : x > y;
}

/* snprintf at the end of what the line has; a line that is full stays full. */
static void put(char line[LINE_BYTES], size_t *n, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
static void put(char line[LINE_BYTES], size_t *n, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int k = vsnprintf(line + *n, LINE_BYTES - *n, fmt, ap);
    va_end(ap);
    *n += k < 0 ? 0 : (size_t)k;
    if (*n >= LINE_BYTES)
        *n = LINE_BYTES - 1;
}

static void put_name(char line[LINE_BYTES], size_t *n, const struct base_trace_event *ev)
{
    put(line, n, "\"name\":\"%s", ev->name);
    if (ev->number >= 0)
        put(line, n, " %" PRId64, ev->number);
    put(line, n, "\"");
}

/* Microseconds, with the nanoseconds behind the point. */
static void put_us(char line[LINE_BYTES], size_t *n, const char *key, uint64_t ns)
{
    put(line, n, ",\"%s\":%" PRIu64 ".%03u", key, ns / 1000, (unsigned)(ns % 1000));
}

static size_t format_name(const struct slot *s, char line[LINE_BYTES])
{
    size_t n = 0;
    put(line, &n,
        "{\"ph\":\"M\",\"pid\":%" PRIu32 ",\"tid\":%" PRIu32 ",\"name\":\"%s\",\"args\":{", s->pid,
        s->event.track, s->event.track ? "thread_name" : "process_name");
    put_name(line, &n, &s->event);
    put(line, &n, "}}");
    return n;
}

static size_t format_event(const struct slot *s, char line[LINE_BYTES])
{
    const struct base_trace_event *ev = &s->event;
    size_t n = 0;
    put(line, &n, "{\"ph\":\"%s\",\"pid\":%" PRIu32 ",\"tid\":%" PRIu32 ",\"cat\":\"%s\",",
        ev->end_ns ? "X" : "i", s->pid, ev->track, ev->category);
    put_name(line, &n, ev);
    put_us(line, &n, "ts", ev->begin_ns);
    if (ev->end_ns)
        put_us(line, &n, "dur", ev->end_ns > ev->begin_ns ? ev->end_ns - ev->begin_ns : 0);
    else
        put(line, &n, ",\"s\":\"t\"");
    put(line, &n, ",\"args\":{");
    for (int i = 0; i < BASE_TRACE_ARGS && ev->key[i]; i++) {
        const char *quote = ev->value[i] > EXACT ? "\"" : "";
        put(line, &n, "%s\"%s\":%s%" PRIu64 "%s", i ? "," : "", ev->key[i], quote, ev->value[i],
            quote);
    }
    put(line, &n, "}}");
    return n;
}

static int write_all(const struct base_trace *t, struct slot *const *slots, size_t n,
                     struct base_replace *r, struct baton_error *e)
{
    char line[LINE_BYTES];
    size_t k = 0;
    put(line, &k,
        "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"schema\":1,\"clock\":\"CLOCK_MONOTONIC\","
        "\"events\":%zu,\"dropped\":%" PRIu64 "},\"traceEvents\":[",
        n, base_trace_dropped(t));
    int rc = base_replace_write(r, line, k, e);
    for (size_t i = 0; rc == 0 && i < n; i++) {
        rc = base_replace_write(r, i ? ",\n" : "\n", i ? 2 : 1, e);
        k = slots[i]->name ? format_name(slots[i], line) : format_event(slots[i], line);
        if (rc == 0)
            rc = base_replace_write(r, line, k, e);
    }
    return rc ? rc : base_replace_write(r, "\n]}\n", 4, e);
}

int base_trace_save(struct base_trace *t, const char *path, struct baton_error *e)
{
    struct base_replace r;
    uint64_t claimed = atomic_load(&t->claimed);
    uint32_t most = claimed < t->capacity ? (uint32_t)claimed : t->capacity;
    struct slot **slots = base_try_alloc(most ? most : 1, sizeof *slots, e);
    if (!slots)
        return BATON_ERR_NOMEM;
    size_t n = 0;
    for (uint32_t i = 0; i < most; i++)
        if (atomic_load_explicit(&t->slots[i].ready, memory_order_acquire))
            slots[n++] = &t->slots[i];
    qsort(slots, n, sizeof *slots, compare);
    int rc = base_replace_open(&r, path, e);
    if (rc == 0)
        rc = write_all(t, slots, n, &r, e);
    if (rc == 0)
        rc = base_replace_commit(&r, e);
    base_replace_close(&r);
    free(slots);
    return rc;
}
