/* SPDX-License-Identifier: Apache-2.0 */
/* baton inside another program: one device prefills, another decodes, both in this process, each
 * an engine of its own; between them a link in memory, over which the KV cache goes layer by layer
 * and is verified. Prints the text, then what became of the handoff.
 *
 * usage: embed MODEL PROMPT [PREFILL-DEVICE [DECODE-DEVICE]] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <baton/baton.h>

#define MOST_TOKENS 32

/* One role; `link` belongs to the engine from here on. */
static int open_role(struct baton_model *m, enum baton_role role, const char *device,
                     struct baton_link *link, struct baton_engine **out, struct baton_error *e)
{
    struct baton_engine_options o = {
        .struct_size = sizeof o, .role = role, .device = device, .link = link};
    return baton_engine_open(m, &o, out, e);
}

static int generate(const struct baton_model *m, struct baton_request *r, struct baton_error *e)
{
    int32_t ids[MOST_TOKENS];
    size_t n = 0;
    struct baton_token t;
    char *text;
    int rc;
    while ((rc = baton_next(r, &t, -1, e)) == 1)
        ids[n++] = t.id; /* max_tokens bounds them */
    if (rc == 0)
        rc = baton_detokenize(m, ids, n, &text, e);
    if (rc)
        return rc;
    puts(text);
    free(text);
    return 0;
}

static void report(struct baton_request *r)
{
    struct baton_stats s = {.struct_size = sizeof s};
    if (baton_request_stats(r, &s) == 0)
        printf("%u tokens, %u layers handed over, %s\n", s.output_tokens, s.layers, s.verdict);
}

static int run(struct baton_model *m, struct baton_engine *producer, struct baton_engine *consumer,
               const char *prompt, struct baton_error *e)
{
    struct baton_request *sent = NULL, *got = NULL;
    struct baton_request_options o = {
        .struct_size = sizeof o, .request_id = 1, .mode = BATON_STREAM, .max_tokens = MOST_TOKENS};
    int32_t *ids = NULL;
    int rc = baton_tokenize(m, prompt, strlen(prompt), false, &ids, &o.n_ids, e);
    o.ids = ids;
    if (rc == 0)
        rc = baton_submit(producer, &o, &sent, e);
    if (rc == 0)
        rc = baton_submit(consumer, &o, &got, e);
    if (rc == 0)
        rc = generate(m, got, e);
    if (rc == 0)
        report(got);
    baton_request_close(got);
    baton_request_close(sent);
    free(ids);
    return rc;
}

int main(int argc, char **argv)
{
    struct baton_error e = {0};
    struct baton_model *model = NULL;
    struct baton_engine *producer = NULL, *consumer = NULL;
    struct baton_link *a, *b;
    if (argc < 3) {
        fprintf(stderr, "usage: embed MODEL PROMPT [PREFILL-DEVICE [DECODE-DEVICE]]\n");
        return 2;
    }
    const char *from = argc > 3 ? argv[3] : "cpu", *to = argc > 4 ? argv[4] : "cpu";
    struct baton_model_options o = {.struct_size = sizeof o, .path = argv[1]};
    int rc = baton_model_open(&o, &model, &e);
    if (rc == 0 && (rc = baton_link_pair(&a, &b, &e)) == 0) {
        rc = open_role(model, BATON_PRODUCER, from, a, &producer, &e);
        if (rc)
            baton_link_close(b);
        else
            rc = open_role(model, BATON_CONSUMER, to, b, &consumer, &e);
    }
    if (rc == 0)
        rc = run(model, producer, consumer, argv[2], &e);
    if (rc)
        fprintf(stderr, "embed: %s\n", e.text);
    baton_engine_close(consumer);
    baton_engine_close(producer);
    baton_model_close(model);
    return rc ? 1 : 0;
}
