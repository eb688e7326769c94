/* SPDX-License-Identifier: Apache-2.0 */
/* base: what every room stands on, and nothing about language models.
 *
 * Errors, memory, JSON, logging, clocks, threads, hashes, files, probe points. The room owns no
 * state of its own besides the log level; every object belongs to whoever opened it. Unless a
 * function says otherwise it may be called from any thread, and objects are not shared between
 * threads without the caller's lock.
 */
#ifndef BASE_BASE_H
#define BASE_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <baton/error.h>

/* ---- errors ------------------------------------------------------------------------------- */

/* Fill *e (may be NULL) and return `code`, so that `return base_fail(e, ...)` is the idiom. The
 * text is cut at the field's end on a UTF-8 border; control characters and bytes that are no UTF-8
 * become '?', so that a message stays one line whatever it quotes. */
int base_fail(struct baton_error *e, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* As base_fail with strerror(err) appended ("...: No such file or directory"). BATON_ERR_IO becomes
 * BATON_ERR_NOMEM where err says that descriptors or memory ran out. */
int base_fail_errno(struct baton_error *e, int code, int err, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

#ifdef __clang_analyzer__
/* Tells the analyzer, which sees one file at a time, that these return their code and not 0. */
#define base_fail(e, code, ...) (base_fail(e, code, __VA_ARGS__), (code))
#define base_fail_errno(e, code, err, ...) (base_fail_errno(e, code, err, __VA_ARGS__), (code))
#endif

/* A short stable name for a code: "input", "peer", ... Never NULL. */
const char *base_code_name(int code);

/* A string of a stranger's file cut to fit a message, control characters shown as '?'. */
const char *base_shown(char buf[64], const char *s);

/* ---- memory ------------------------------------------------------------------------------- */

/* Zeroed array of n elements of `size` bytes, or NULL with *e filled (overflow counts as no
 * memory). The form for everything whose size a stranger controls. Freed with free(). */
void *base_try_alloc(size_t n, size_t size, struct baton_error *e);
#ifdef __clang_analyzer__
#include <stdlib.h>
#define base_try_alloc(n, size, e) ((void)(e), calloc(n, size)) /* zeroed, and to be freed */
#endif

/* Resize an array that came from base_try_alloc; the old one stays valid on failure. New bytes
 * are not zeroed. */
void *base_try_realloc(void *p, size_t n, size_t size, struct baton_error *e);

/* A copy of a string / of n bytes plus a NUL; NULL with *e filled on failure. */
char *base_try_strdup(const char *s, struct baton_error *e);
char *base_try_strndup(const char *s, size_t n, struct baton_error *e);

/* a*b and a+b into *out; false on overflow, *out untouched. */
bool base_mul(size_t a, size_t b, size_t *out);
bool base_add(size_t a, size_t b, size_t *out);

/* An arena: many small allocations with one end. Not thread-safe. */
struct base_arena;
int base_arena_open(struct base_arena **out, struct baton_error *e);
void base_arena_close(struct base_arena *a); /* NULL is fine */
/* 16-byte aligned, zeroed; NULL with *e filled on failure. */
void *base_arena_alloc(struct base_arena *a, size_t n, size_t size, struct baton_error *e);
char *base_arena_strdup(struct base_arena *a, const char *s, struct baton_error *e);
size_t base_arena_bytes(const struct base_arena *a);

/* Zeroed anonymous memory of at least `bytes`, aligned to 2 MiB and advised huge where bytes is
 * 2 MiB or more. Shared between processes after fork when `shared`. NULL with *e filled on
 * failure, which includes asking for more than the machine (or its cgroup) has. */
void *base_map_alloc(size_t bytes, bool shared, struct baton_error *e);
void base_map_free(void *p, size_t bytes);

/* Bytes that this process may still expect to get: the smaller of MemAvailable and what the
 * cgroup leaves. 0 = unknown. */
uint64_t base_memory_available(void);
/* Peak resident set and private (anonymous) bytes of this process. */
void base_memory_used(uint64_t *peak_rss, uint64_t *private_bytes);

/* ---- files -------------------------------------------------------------------------------- */

/* A file mapped read-only. An empty file maps to data == NULL, size == 0. */
struct base_file {
    const uint8_t *data;
    size_t size;
    int fd;
};
int base_file_open(struct base_file *f, const char *path, struct baton_error *e);
void base_file_close(struct base_file *f); /* accepts a zeroed struct */
/* Drop the page cache mapping of [offset, offset+n): whole pages inside it only. */
void base_file_drop(const struct base_file *f, size_t offset, size_t n);
/* The whole file as a NUL-terminated buffer (free()), refusing more than `limit` bytes. A named
 * pipe or a device is refused: a stranger's folder must not make us wait. */
int base_file_read(const char *path, size_t limit, char **out, size_t *size, struct baton_error *e);
/* The same of whatever `path` is: for what the user names, which may be a pipe. May block. */
int base_stream_read(const char *path, size_t limit, char **out, size_t *size,
                     struct baton_error *e);
/* Write atomically: a temporary name beside it, fsync, rename. A full disk leaves the old file. */
int base_file_write(const char *path, const void *data, size_t n, struct baton_error *e);
/* Could base_file_write begin there? BATON_ERR_IO that says why not, before hours of work instead
 * of after them. Nothing is left and no file changed; pipes and devices are not looked at. */
int base_file_try(const char *path, struct baton_error *e);
/* A file of this kind for this key below $XDG_CACHE_HOME/baton or ~/.cache/baton; false where there
 * is neither. `make`: its folder, as far as possible. */
bool base_cache_path(const char *kind, const char *key, bool make, char out[1024]);
/* dir + "/" + name, refusing names that leave the folder; free(). */
char *base_path_join(const char *dir, const char *name, struct baton_error *e);

/* ---- safetensors -------------------------------------------------------------------------- */

/* Reading: one file, mapped and checked: header length, JSON, offsets in range, no overlap, no
 * hole, shape products equal to byte counts. Tensors live as long as what was opened. */
struct base_tensors;
struct base_tensor {
    const char *name;
    const char *dtype; /* as the format spells it: "F32", "F16", "BF16", "I8", "I32", "I64" */
    uint32_t width;    /* bytes of an element */
    uint32_t n_dims;
    uint64_t shape[8]; /* a dimension may be 0, and another then of any size */
    const void *data;  /* aligned as the file happens to have it: maybe not for its elements */
    uint64_t bytes;
};
int base_tensors_open(const char *path, struct base_tensors **out, struct baton_error *e);
/* The same over memory that the caller keeps; `what` names it in errors. */
int base_tensors_parse(const void *data, size_t n, const char *what, struct base_tensors **out,
                       struct baton_error *e);
void base_tensors_close(struct base_tensors *t); /* NULL is fine */
size_t base_tensors_count(const struct base_tensors *t);
/* In the order of their names; NULL past the last one. */
const struct base_tensor *base_tensors_at(const struct base_tensors *t, size_t i);
const struct base_tensor *base_tensors_find(const struct base_tensors *t, const char *name);
/* Value of a key of __metadata__, or NULL. */
const char *base_tensors_metadata(const struct base_tensors *t, const char *key);
/* The mapping behind it; zeroed where the caller keeps the bytes. */
const struct base_file *base_tensors_file(const struct base_tensors *t);
/* Bytes of an element of a dtype as spelt above; 0 for any other text. */
uint32_t base_tensors_width(const char *dtype);

/* Writing, in pieces, with base_file_write's promise: whatever fails leaves an older file as it was
 * and nothing beside it. Metadata are pairs key, value, ..., NULL (may be NULL). All tensors are
 * declared before the first byte; their bytes follow in that order, in any pieces. Declare those of
 * wide elements first, so that each lies aligned. */
struct base_tensors_out;
int base_tensors_create(struct base_tensors_out **out, const char *path,
                        const char *const *metadata, struct baton_error *e);
int base_tensors_declare(struct base_tensors_out *o, const char *name, const char *dtype,
                         uint32_t n_dims, const uint64_t *shape, struct baton_error *e);
int base_tensors_write(struct base_tensors_out *o, const void *data, size_t n,
                       struct baton_error *e);
/* The file takes its name; refused while declared bytes are missing. */
int base_tensors_commit(struct base_tensors_out *o, struct baton_error *e);
/* Frees it, after commit too; what was not committed is removed. NULL is fine. */
void base_tensors_discard(struct base_tensors_out *o);

/* ---- JSON (jansson behind it) ------------------------------------------------------------- */

struct json_t; /* jansson's */
/* Parse text of n bytes; duplicate keys, NaN, trailing text and nesting over 256 are errors. `what`
 * names the source in the error. The value is the caller's (json_decref). */
int base_json_parse(const char *text, size_t n, const char *what, struct json_t **out,
                    struct baton_error *e);
int base_json_load(const char *path, size_t limit, struct json_t **out, struct baton_error *e);
/* Typed members of an object. A missing member leaves *out as it is and succeeds when `required`
 * is false; null counts as missing. A wrong type, a value out of [min, max] and a non-finite
 * number are BATON_ERR_INPUT that names `what` and the key. */
int base_json_u32(const struct json_t *obj, const char *key, bool required, uint32_t min,
                  uint32_t max, uint32_t *out, const char *what, struct baton_error *e);
int base_json_f64(const struct json_t *obj, const char *key, bool required, double min, double max,
                  double *out, const char *what, struct baton_error *e);
int base_json_bool(const struct json_t *obj, const char *key, bool required, bool *out,
                   const char *what, struct baton_error *e);
/* *out points into obj and lives as long as it. */
int base_json_str(const struct json_t *obj, const char *key, bool required, const char **out,
                  const char *what, struct baton_error *e);

/* ---- log ---------------------------------------------------------------------------------- */

enum base_log_level { BASE_LOG_ERROR, BASE_LOG_WARN, BASE_LOG_INFO, BASE_LOG_DEBUG };
void base_log_set_level(enum base_log_level level); /* default: warn */
/* One line on stderr with a monotonic time and the pid: written with one write(2). */
void base_log(enum base_log_level level, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

/* ---- clocks ------------------------------------------------------------------------------- */

uint64_t base_now_ns(void);      /* CLOCK_MONOTONIC: comparable between processes of one host */
uint64_t base_wall_ms(void);     /* since the epoch */
void base_sleep_ns(uint64_t ns); /* whole time, through EINTR */

/* ---- threads ------------------------------------------------------------------------------ */

/* The compute pool: n_threads workers, the caller being worker 0. A worker spins at most 20 us for
 * the next job and then sleeps, so that two processes may share two cores. */
struct base_pool;
int base_pool_open(struct base_pool **out, unsigned n_threads, struct baton_error *e);
void base_pool_close(struct base_pool *p); /* NULL is fine; joins the workers */
unsigned base_pool_threads(const struct base_pool *p);
/* Run fn(ctx, i) for i in [0, n), each exactly once, on any worker; returns when all are done.
 * Called from the owning thread only, not from inside fn. Item order is not defined: results may
 * not depend on it. */
void base_pool_run(struct base_pool *p, void (*fn)(void *ctx, unsigned i), void *ctx, unsigned n);

/* Bounded queue of fixed-size messages between two threads, with an eventfd that is readable
 * while the queue is not empty, so that poll() loops can wait for it. Any number of senders and
 * one receiver. */
struct base_queue;
int base_queue_open(struct base_queue **out, size_t message_bytes, size_t capacity,
                    struct baton_error *e);
void base_queue_close(struct base_queue *q); /* NULL is fine; messages left are dropped */
int base_queue_fd(const struct base_queue *q);
/* Copy a message in; false when full (never blocks). */
bool base_queue_push(struct base_queue *q, const void *message);
/* Copy a message in, waiting for room. */
void base_queue_push_wait(struct base_queue *q, const void *message);
/* Copy the oldest message out; false when empty or nothing came within timeout_ns (0: at once). */
bool base_queue_pop(struct base_queue *q, void *message, uint64_t timeout_ns);

/* ---- hashes ------------------------------------------------------------------------------- */

struct base_sha256 { /* streaming SHA-256; opaque storage, no heap */
    uint64_t opaque[16];
};
void base_sha256_init(struct base_sha256 *s);
void base_sha256_update(struct base_sha256 *s, const void *data, size_t n);
void base_sha256_final(struct base_sha256 *s, uint8_t out[32]);
void base_sha256(const void *data, size_t n, uint8_t out[32]);
/* HMAC-SHA-256. */
void base_hmac(const void *key, size_t key_n, const void *data, size_t n, uint8_t out[32]);
/* The same, streaming. One that was only initialised is a key made ready: copies of it authenticate
 * one message each. Holds secrets: base_forget it. */
struct base_hmac {
    struct base_sha256 inner, outer;
};
void base_hmac_init(struct base_hmac *h, const void *key, size_t key_n);
void base_hmac_update(struct base_hmac *h, const void *data, size_t n);
void base_hmac_final(struct base_hmac *h, uint8_t out[32]); /* forgets *h */
/* Overwrite a secret; never optimised away. */
void base_forget(void *p, size_t n);
/* Constant-time comparison; true = equal. */
bool base_equal_secret(const void *a, const void *b, size_t n);
/* n bytes from the kernel's generator. */
int base_random(void *out, size_t n, struct baton_error *e);
/* 2n lower-case hex digits and a NUL. */
void base_hex(const uint8_t *data, size_t n, char *out);
/* Exactly 2n hex digits into n bytes; false otherwise. */
bool base_unhex(const char *hex, uint8_t *out, size_t n);

/* ---- traces ------------------------------------------------------------------------------- */

/* What happened when, on which track of which process: a bounded record in memory that a fork
 * shares, written as Chrome's trace JSON (ui.perfetto.dev reads it). Adding never waits and never
 * fails; what no longer fits is counted. Any thread. Texts are string literals of the program, the
 * same in a fork, without quotes and backslashes. */
#define BASE_TRACE_ARGS 4
struct base_trace;
struct base_trace_event {
    const char *name, *category;
    int64_t number;                   /* follows the name where not negative: "layer 3" */
    uint32_t track;                   /* from 1 */
    uint64_t begin_ns, end_ns;        /* base_now_ns(); end 0: an instant */
    const char *key[BASE_TRACE_ARGS]; /* NULL ends them */
    uint64_t value[BASE_TRACE_ARGS];
};
/* Room for `capacity` events; memory is used as they come. */
int base_trace_open(uint32_t capacity, struct base_trace **out, struct baton_error *e);
void base_trace_close(struct base_trace *t); /* this process's mapping; NULL is fine */
void base_trace_add(struct base_trace *t, const struct base_trace_event *ev);
/* Name a track of this process, or the process itself (track 0). */
void base_trace_name(struct base_trace *t, uint32_t track, const char *name, int64_t number);
uint64_t base_trace_dropped(const struct base_trace *t);
/* All that was added, in order of time. With base_file_write's promise. */
int base_trace_save(struct base_trace *t, const char *path, struct baton_error *e);

/* ---- probe points ------------------------------------------------------------------------- */

/* Named points at which a test may stop, kill or delay the process. BATON_PROBE="NAME=kill",
 * "NAME=stop", "NAME=delay:MS" or "NAME=fail" in the environment; without it a point costs one
 * predictable branch. Returns true where "fail" was asked for: the caller then takes its error
 * path. `NAME@K` fires at the K-th visit (from 1) alone; several are separated by commas. Read once
 * per process, by the first call. */
bool base_probe(const char *name);

#endif
