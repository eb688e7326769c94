/* SPDX-License-Identifier: Apache-2.0 */
/* What a run of random handoffs is judged by: a table of prompts with what they give undisturbed, a
 * judge of one request's end, a book of what happened, a count of what the process holds. */
#ifndef TESTS_ENGINE_CHAOS_H
#define TESTS_ENGINE_CHAOS_H

#include <dirent.h>

#include "rig.h"

#define CHAOS_PROMPTS 16u
#define CHAOS_MOST 560u            /* ids of a prompt */
#define CHAOS_OUTPUT 6u            /* tokens of a native run; requests ask for so many or fewer */
#define CHAOS_CODES 32u            /* more than there are error codes */
#define CHAOS_PATIENCE 30000000000 /* ns, then it is said who is waited for; nothing ends */

/* ---- prompts -------------------------------------------------------------------------------- */

struct chaos_prompt {
    uint32_t n;
    int32_t ids[CHAOS_MOST];
    struct rig_run native;
};

/* A model and its table. Past a window's border a prompt has local layers that retain less. */
struct chaos_model {
    const char *name;
    uint32_t shortest, longest; /* prompts of odd numbers; the even ones are short */
    struct baton_model *model;
    struct chaos_prompt prompts[CHAOS_PROMPTS];
};

static inline struct baton_request_options chaos_ask(const struct chaos_prompt *p, uint32_t k,
                                                     uint64_t id)
{
    return (struct baton_request_options){.struct_size = sizeof(struct baton_request_options),
                                          .ids = p->ids,
                                          .n_ids = p->n,
                                          .max_tokens = CHAOS_OUTPUT,
                                          .ignore_eos = true,
                                          .temperature = k % 3 ? 0.0f : 1.5f,
                                          .seed = k,
                                          .request_id = id,
                                          .mode = BATON_WHOLE};
}

/* Every prompt's native run, each alone, on an engine that has never seen a handoff. */
static inline void chaos_model_open(struct chaos_model *c, uint32_t ctx, uint64_t *seed)
{
    struct baton_error e;
    c->model = rig_model(c->name);
    uint32_t vocab = baton_model_vocab(c->model);
    struct baton_engine *en = rig_engine(c->model, BATON_BOTH, rig_device(), 1, ctx, 0, -1);
    for (uint32_t k = 0; k < CHAOS_PROMPTS; k++) {
        struct chaos_prompt *p = &c->prompts[k];
        p->n = k % 2 ? test_range(seed, c->shortest, c->longest) : test_range(seed, 1, 50);
        rig_prompt(seed, vocab, p->ids, p->n);
        struct baton_request_options o = chaos_ask(p, k, 0);
        struct baton_request *r = rig_submit(en, &o);
        test_ok(rig_pull(r, &p->native, vocab, &e), &e);
        assert_int_equal(p->native.n, CHAOS_OUTPUT);
        baton_request_close(r);
    }
    baton_engine_close(en);
}

/* ---- the book ------------------------------------------------------------------------------- */

/* How handoffs ended. In memory that a fork shares where a child writes one. */
struct chaos_book {
    uint64_t verified, local, cancelled; /* finished; finished without the producer; stopped here */
    uint64_t failed[CHAOS_CODES];        /* by minus the code */
    uint64_t never;                      /* its producer went before there was a ticket to pull */
    uint64_t landed;                     /* of verified: through shared memory */
};

static inline uint64_t chaos_book_failed(const struct chaos_book *b)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < CHAOS_CODES; i++)
        n += b->failed[i];
    return n;
}

static inline void chaos_book_add(struct chaos_book *to, const struct chaos_book *b)
{
    to->verified += b->verified;
    to->local += b->local;
    to->cancelled += b->cancelled;
    to->never += b->never;
    to->landed += b->landed;
    for (uint32_t i = 0; i < CHAOS_CODES; i++)
        to->failed[i] += b->failed[i];
}

static inline uint64_t chaos_book_all(const struct chaos_book *b)
{
    return b->verified + b->local + b->cancelled + b->never + chaos_book_failed(b);
}

static inline void chaos_book_print(const struct chaos_book *b)
{
    print_message("%llu handed over (%llu through shared memory), %llu prefilled locally instead, "
                  "%llu cancelled at the end that looks, %llu never ticketed, %llu failed:",
                  (unsigned long long)b->verified, (unsigned long long)b->landed,
                  (unsigned long long)b->local, (unsigned long long)b->cancelled,
                  (unsigned long long)b->never, (unsigned long long)chaos_book_failed(b));
    for (uint32_t i = 0; i < CHAOS_CODES; i++)
        if (b->failed[i])
            print_message(" %s %llu", base_code_name(-(int)i), (unsigned long long)b->failed[i]);
    print_message("\n");
}

/* ---- the judge ------------------------------------------------------------------------------ */

/* Sets of permitted ends: of codes, and of an end that is no error. */
#define CHAOS_OK 1u
#define CHAOS_CODE(code) (1u << -(code))
#define CHAOS_ANY UINT32_MAX

/* What is said of an end that should not be. */
struct chaos_fault {
    char text[700];
};

#define chaos_wrong(f, ...) (snprintf((f)->text, sizeof(f)->text, __VA_ARGS__), false)

static inline int chaos_next(struct baton_request *r, struct baton_token *t, struct baton_error *e)
{
    int rc;
    while ((rc = baton_next(r, t, CHAOS_PATIENCE, e)) == BATON_ERR_TIMEOUT)
        fprintf(stderr, "chaos: still waiting: %s\n", e->text);
    return rc;
}

/* An error has a code, a text, and stands in the record. */
static inline bool chaos_reasoned(const struct baton_stats *s, int rc, const struct baton_error *e,
                                  uint32_t may, struct chaos_fault *f)
{
    char verdict[sizeof s->verdict];
    if (rc >= 0 || -rc >= (int)CHAOS_CODES || !(may & CHAOS_CODE(rc)))
        return chaos_wrong(f, "ends as %d '%s', of %x", rc, e->text, may);
    if (e->code != rc || !e->text[0])
        return chaos_wrong(f, "%d is told as %d '%s'", rc, e->code, e->text);
    snprintf(verdict, sizeof verdict, "failed: %s", base_code_name(rc));
    if (strcmp(s->verdict, verdict) || strcmp(s->reason, e->text))
        return chaos_wrong(f, "%d '%s' is recorded as '%s' '%s'", rc, e->text, s->verdict,
                           s->reason);
    if (s->finish != (rc == BATON_ERR_CANCELLED ? BATON_CANCELLED : BATON_FAILED))
        return chaos_wrong(f, "%d '%s' finishes as %d", rc, e->text, (int)s->finish);
    return true;
}

/* A consumer's request to its end: every token that comes is the native run's, and all `most` of
 * them come where it says that it is done. */
static inline bool chaos_judge_consumer(struct baton_request *r, const struct rig_run *native,
                                        uint32_t most, uint32_t may, struct chaos_book *b,
                                        struct chaos_fault *f)
{
    struct baton_error e = {0};
    struct baton_token t;
    uint32_t n = 0;
    int rc;
    for (; (rc = chaos_next(r, &t, &e)) == 1; n++)
        if (n >= most || t.index != n || t.id != native->ids[n] ||
            memcmp(&t.margin, &native->margins[n], sizeof t.margin))
            return chaos_wrong(f, "token %u of %u is %d, margin %g; native %d, %g", n, most, t.id,
                               t.margin, native->ids[n], native->margins[n]);
    struct baton_stats s = rig_stats(r);
    if (rc) {
        b->failed[-rc]++;
        return chaos_reasoned(&s, rc, &e, may, f);
    }
    bool local = !strncmp(s.verdict, "local-prefill: ", 15);
    if (local && !s.reason[0])
        return chaos_wrong(f, "no reason for a local prefill");
    if (s.finish == BATON_CANCELLED) {
        b->cancelled++;
        return may & CHAOS_CODE(BATON_ERR_CANCELLED) ? true : chaos_wrong(f, "was cancelled");
    }
    if (!(may & CHAOS_OK) || s.finish != BATON_LENGTH || n != most)
        return chaos_wrong(f, "done with %u of %u tokens, finish %d", n, most, (int)s.finish);
    if (!local && strcmp(s.verdict, "verified"))
        return chaos_wrong(f, "done with the verdict '%s'", s.verdict);
    b->landed += s.landed_bytes > 0;
    *(local ? &b->local : &b->verified) += 1;
    return true;
}

/* A producer's: acknowledged, or a reason why not. */
static inline bool chaos_judge_producer(struct baton_request *r, uint32_t may, struct chaos_book *b,
                                        struct chaos_fault *f)
{
    struct baton_error e = {0};
    struct baton_token t;
    int rc = chaos_next(r, &t, &e);
    struct baton_stats s = rig_stats(r);
    if (rc == 0) {
        b->verified++;
        return may & CHAOS_OK && s.finish == BATON_STOP
                   ? true
                   : chaos_wrong(f, "acknowledged, finish %d", (int)s.finish);
    }
    if (rc < 0 && -rc < (int)CHAOS_CODES)
        b->failed[-rc]++;
    return chaos_reasoned(&s, rc, &e, may, f);
}

/* ---- what the process holds ----------------------------------------------------------------- */

struct chaos_census {
    unsigned fds, threads, memfds; /* memfds: mappings of memory that has no name */
};

static inline unsigned chaos_entries(const char *path)
{
    DIR *d = opendir(path);
    unsigned n = 0;
    assert_non_null(d);
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

static inline struct chaos_census chaos_count(void)
{
    struct chaos_census c = {chaos_entries("/proc/self/fd"), chaos_entries("/proc/self/task"), 0};
    char line[1024];
    FILE *f = fopen("/proc/self/maps", "re");
    assert_non_null(f);
    while (fgets(line, sizeof line, f))
        c.memfds += strstr(line, "/memfd:") != NULL;
    fclose(f);
    return c;
}

/* As before. A joined thread may stay in the kernel's list for a moment. */
static inline void chaos_same(const struct chaos_census *before)
{
    struct chaos_census c = chaos_count();
    for (int i = 0; i < 5000 && c.threads > before->threads; i++) {
        base_sleep_ns(1000000);
        c = chaos_count();
    }
    print_message("left: %u descriptors, %u threads, %u mappings of shared memory (before: %u, %u, "
                  "%u; each list with its dots)\n",
                  c.fds, c.threads, c.memfds, before->fds, before->threads, before->memfds);
    assert_int_equal(c.fds, before->fds);
    assert_int_equal(c.threads, before->threads);
    assert_int_equal(c.memfds, before->memfds);
}

#endif
