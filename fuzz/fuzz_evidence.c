/* SPDX-License-Identifier: Apache-2.0 */
/* A chain from anywhere: what holds has a summary. A raw document from anywhere: figures, or a
 * reason. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "audit/audit_priv.h"
#include "base/base.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool holds)
{
    if (!holds)
        abort();
}

static void chain(const char *text, size_t n)
{
    struct baton_error e = {0};
    json_t *lines = NULL;
    char last[65];
    if (audit_lines_parse(text, n, &lines, last, &e)) {
        must(!lines && e.text[0]);
        return;
    }
    json_t *summary = audit_summary(lines, last);
    must(json_is_object(summary) && json_is_string(json_object_get(summary, "verdict")));
    json_decref(summary);
    json_decref(lines);
}

static void raw(const char *text, size_t n)
{
    struct baton_error e = {0};
    static const char *const commands[] = {"check", "probe", "quality", "matrix"};
    json_t *doc = NULL, *empty = json_object(), *differences = json_array();
    if (base_json_parse(text, n, "fuzz", &doc, &e) == 0)
        for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
            json_t *o = audit_recompute(commands[i], doc, &e);
            must(o ? json_is_object(json_object_get(o, "result")) : e.text[0] != '\0');
            if (o) /* a claim of nothing, and a claim of the same */
                audit_compare(json_object_get(o, "result"), empty, true, "f", "", differences);
            must(!o || json_array_size(differences) > 0);
            json_array_clear(differences);
            if (o)
                audit_compare(o, o, true, "f", "", differences);
            must(json_array_size(differences) == 0);
            json_decref(o);
        }
    json_decref(doc);
    json_decref(empty);
    json_decref(differences);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    chain((const char *)data, n);
    raw((const char *)data, n);
    return 0;
}
