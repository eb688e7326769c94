/* SPDX-License-Identifier: Apache-2.0 */
/* run: what is shown at the end, for people and as JSON. */
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "cli/run_priv.h"
#include "engine/engine.h"

static double ms(uint64_t ns)
{
    return (double)ns / 1e6;
}

static const char *finish_name(enum baton_finish f)
{
    return f == BATON_STOP ? "stop" : f == BATON_LENGTH ? "length" : "cancelled";
}

static json_t *ids_json(const int32_t *ids, size_t n)
{
    json_t *a = json_array();
    for (size_t i = 0; a && i < n; i++)
        json_array_append_new(a, json_integer(ids[i]));
    return a;
}

static json_t *positions_json(int32_t first, int32_t last)
{
    return last < 0 ? json_null() : json_pack("[ii]", first, last);
}

static json_t *timing_json(const struct run_result *r)
{
    const struct baton_stats *s = &r->stats;
    return json_pack("{s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f}", "load", ms(r->load_ns),
                     "prefill", ms(s->prefill_ns), "transfer", ms(s->transfer_ns),
                     "exposed_transfer", ms(s->exposed_ns), "import", ms(s->import_ns), "verify",
                     ms(s->verify_ns), "ttft", ms(s->ttft_ns), "first_step", ms(s->first_step_ns),
                     "decode", ms(s->decode_ns), "itl_p50", ms(s->itl_p50_ns), "itl_p99",
                     ms(s->itl_p99_ns));
}

static json_t *handoff_json(const struct run_args *a, const struct baton_stats *s)
{
    if (a->mode == BATON_NATIVE)
        return json_null();
    return json_pack("{s:i,s:i,s:I,s:I,s:i,s:i,s:{s:o,s:o},s:s,s:s,s:s*}", "layers", (int)s->layers,
                     "slots", (int)s->slots, "bytes", (json_int_t)s->bytes, "landed_bytes",
                     (json_int_t)s->landed_bytes, "pieces", (int)s->pieces, "held",
                     (int)s->loaded_tokens, "positions", "global",
                     positions_json(s->global_first, s->global_last), "local",
                     positions_json(s->local_first, s->local_last), "digest", s->digest, "verdict",
                     s->verdict, "reason", s->reason[0] ? s->reason : NULL);
}

static json_t *memory_json(const struct baton_stats *s)
{
    uint64_t peak = 0, private_bytes = 0;
    base_memory_used(&peak, &private_bytes);
    return json_pack("{s:I,s:I,s:I,s:I}", "peak_rss_bytes", (json_int_t)peak, "private_bytes",
                     (json_int_t)private_bytes, "kv_bytes", (json_int_t)s->kv_bytes,
                     "weights_bytes", (json_int_t)s->weights_bytes);
}

/* Hashing a large checkpoint takes longer than answering: only what is cheap is hashed here. */
static json_t *fingerprint_json(const struct run_args *a, const struct model *m)
{
    enum { CHEAP_BYTES = 64 << 20 };
    struct model_identity id;
    char hex[65];
    if (!a->pin && model_weight_bytes(m) > CHEAP_BYTES)
        return json_null();
    if (model_hash(m, a->threads, false, NULL, NULL, &id, NULL))
        return json_null();
    base_hex(id.weights, 32, hex);
    return json_string(hex);
}

/* Rows of the program that the prefill ran; null where it is made for the prompt, or takes it in
 * chunks. */
static json_t *width_json(const struct run_args *a, const struct run_result *r)
{
    struct baton_caps caps;
    const char *name = a->mode == BATON_NATIVE ? a->decode : a->prefill;
    if (!name || !device_static(name, &caps) || !caps.whole_prompt)
        return json_null();
    return json_integer(device_width(&caps, (uint32_t)r->n_prompt));
}

int cli_run_report_json(const struct run_args *a, struct baton_model *bm,
                        const struct run_result *r)
{
    const struct model *m = engine_model(bm);
    const struct baton_stats *s = &r->stats;
    json_t *occupancy = json_array();
    for (int i = 1; i <= 8; i++)
        json_array_append_new(occupancy, json_integer(s->steps_by_lanes[i]));
    json_t *doc = json_pack(
        "{s:i,s:{s:s,s:s,s:o,s:i},s:{s:s,s:s,s:s,s:o,s:o,s:{s:b,s:b}},s:o,s:o,s:s,s:s,s:o,s:o,s:o,"
        "s:o,s:i,s:{s:o,s:o}}", //
        "schema", 1,            //
        "model", "path", a->model, "arch", baton_model_arch(bm), "fingerprint",
        fingerprint_json(a, m), "layers", (int)baton_model_layers(bm), //
        "route", "mode", cli_run_mode_names[a->mode], "prefill", a->prefill, "decode", a->decode,
        "transport",
        a->mode == BATON_NATIVE ? json_null() : json_string(cli_run_transport_names[a->transport]),
        "width", width_json(a, r), "emulated", "prefill", cli_emulated(a->prefill), "decode",
        cli_emulated(a->decode), //
        "prompt_ids", ids_json(r->prompt, r->n_prompt), "ids", ids_json(r->ids, r->n_ids), "text",
        r->text ? r->text : "", "finish", finish_name(s->finish), //
        "timing_ms", timing_json(r), "handoff", handoff_json(a, s), "occupancy", occupancy,
        "memory", memory_json(s), "loaded_tokens", (int)r->n_loaded, "probes", "prefill",
        cli_pairing_json(&r->prefill_pairing), "decode", cli_pairing_json(&r->decode_pairing));
    return cli_print_json(doc, 0);
}

/* Runs of layers of one kind: "0-4 local [195,705]  5 global [0,705] ...". */
static void print_layers(const struct model_config *c, const struct baton_stats *s)
{
    for (uint32_t i = 0; i < c->n_layers;) {
        uint32_t j = i;
        while (j + 1 < c->n_layers && c->local[j + 1] == c->local[i])
            j++;
        char range[24];
        snprintf(range, sizeof range, j > i ? "%u-%u" : "%u", i, j);
        bool local = c->local[i];
        fprintf(stderr, "  layers %-7s %-7s positions [%d, %d]\n", range,
                local ? "local" : "global", local ? s->local_first : s->global_first,
                local ? s->local_last : s->global_last);
        i = j + 1;
    }
}

static void print_handoff(const struct model_config *c, const struct baton_stats *s)
{
    char bytes[16];
    fprintf(stderr, "handoff  %u slots of %u layers, %s in %u pieces\n", s->slots, s->layers,
            cli_bytes(s->bytes, bytes), s->pieces);
    if (s->loaded_tokens)
        fprintf(stderr, "         positions below %u came from the file and did not travel\n",
                s->loaded_tokens);
    print_layers(c, s);
    fprintf(stderr, "digest   %.16s%s  %s\n", s->digest, s->digest[0] == 'o' ? "" : "...",
            s->verdict);
    fprintf(stderr,
            "         transfer %.2f ms (%.2f ms of it exposed), import %.2f ms, verify "
            "%.2f ms\n",
            ms(s->transfer_ns), ms(s->exposed_ns), ms(s->import_ns), ms(s->verify_ns));
}

static void print_times(const struct run_result *r, const struct baton_stats *s)
{
    fprintf(stderr, "time     load %.0f ms, ", ms(r->load_ns));
    if (s->prefill_ns) /* none where it was cancelled before, or the cache came from a file */
        fprintf(stderr, "prefill %.1f ms for %u tokens (%.0f tokens/s), ", ms(s->prefill_ns),
                s->prompt_tokens, s->prompt_tokens / (ms(s->prefill_ns) / 1e3));
    if (s->output_tokens)
        fprintf(stderr, "first token after %.1f ms\n", ms(s->ttft_ns));
    else
        fprintf(stderr, "no token\n");
    if (s->output_tokens > 1)
        fprintf(
            stderr, "         decode %u tokens, %.1f tokens/s, between tokens %.2f ms (median)\n",
            s->output_tokens, (s->output_tokens - 1) / (ms(s->decode_ns) / 1e3), ms(s->itl_p50_ns));
}

static void print_pairing(const char *role, const struct cli_pairing *p)
{
    char text[80];
    if (p->asked)
        fprintf(stderr, "probes   %s: %s\n", role, cli_pairing_text(p, text, sizeof text));
}

void cli_run_report_text(const struct run_args *a, struct baton_model *bm,
                         const struct run_result *r)
{
    const struct model_config *c = model_config_of(engine_model(bm));
    const struct baton_stats *s = &r->stats;
    if (a->common.verbosity < 0)
        return;
    if (!r->text) { /* random weights: there is no text to have been streamed */
        for (size_t i = 0; i < r->n_ids; i++)
            printf("%s%d", i ? "," : "", r->ids[i]);
        putchar('\n');
        fflush(stdout);
    }
    fprintf(stderr, "\nmodel    %s, %s, %u layers\n", a->model, baton_model_arch(bm), c->n_layers);
    if (a->mode == BATON_NATIVE)
        fprintf(stderr, "route    native on %s, one process\n", a->decode);
    else
        fprintf(stderr, "route    %s: prefill on %s%s, decode on %s%s, in %s, over %s\n",
                cli_run_mode_names[a->mode], a->prefill,
                cli_emulated(a->prefill) ? " (emulated)" : "", a->decode,
                cli_emulated(a->decode) ? " (emulated)" : "",
                a->transport == RUN_INPROC ? "one process" : "two processes",
                cli_run_transport_names[a->transport]);
    print_pairing("prefill", &r->prefill_pairing);
    print_pairing("decode", &r->decode_pairing);
    if (cli_run_remote(a->decode)) { /* what was landed and verified is known there */
        fprintf(stderr, "handoff  %u slots of %u layers, acknowledged; the tokens come out there\n",
                s->slots, s->layers);
        print_layers(c, s);
    } else if (a->mode != BATON_NATIVE && s->slots)
        print_handoff(c, s);
    else if (s->reason[0])
        fprintf(stderr, "handoff  %s: %s\n", s->verdict, s->reason);
    print_times(r, s);
    fprintf(stderr, "finish   %s\n", finish_name(s->finish));
}
