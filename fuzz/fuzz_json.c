/* SPDX-License-Identifier: Apache-2.0 */
/* JSON from anywhere: an error or a value, never both, and a value survives being written and read
 * again. */
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void must(bool holds)
{
    if (!holds)
        abort();
}

static void members(const json_t *v)
{
    struct baton_error e;
    uint32_t u = 7;
    double d = 0.5;
    bool b = false;
    const char *s = "";
    if (base_json_u32(v, "a", true, 3, 9, &u, "fuzz", &e) == 0)
        must(u >= 3 && u <= 9);
    if (base_json_f64(v, "a", true, -1, 1, &d, "fuzz", &e) == 0)
        must(isfinite(d) && d >= -1 && d <= 1);
    if (base_json_str(v, "a", true, &s, "fuzz", &e) == 0)
        must(s != NULL);
    base_json_bool(v, "a", false, &b, "fuzz", &e);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct baton_error e = {0};
    json_t *v = NULL, *again = NULL;
    int rc = base_json_parse((const char *)data, n, "fuzz", &v, &e);
    must((rc == 0) == (v != NULL) && (rc == 0 || (e.code == rc && e.text[0])));
    if (rc != 0)
        return 0;
    members(v);
    char *text = json_dumps(v, JSON_ENCODE_ANY);
    must(text != NULL);
    must(base_json_parse(text, strlen(text), "again", &again, &e) == 0);
    must(json_equal(v, again));
    free(text);
    json_decref(again);
    json_decref(v);
    return 0;
}
