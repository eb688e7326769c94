/* SPDX-License-Identifier: Apache-2.0 */
/* --logits: every step's row as a safetensors file. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "cli/run_priv.h"

int cli_run_logits_save(const char *path, const struct run_result *r, uint32_t vocab,
                        struct baton_error *e)
{
    size_t rows = r->n_ids, logits_bytes = 0, total = 0;
    size_t ids_bytes = rows * sizeof *r->ids;
    char header[512];
    if (!base_mul(rows, (size_t)vocab * sizeof(float), &logits_bytes) ||
        !base_add(logits_bytes, 2 * ids_bytes + sizeof header + 8, &total))
        return base_fail(e, BATON_ERR_NOMEM, "%s: too many logits", path);
    size_t a = logits_bytes, b = a + ids_bytes, c = b + ids_bytes;
    int n = snprintf(header, sizeof header,
                     "{\"logits\":{\"dtype\":\"F32\",\"shape\":[%zu,%u],\"data_offsets\":[0,%zu]},"
                     "\"ids\":{\"dtype\":\"I32\",\"shape\":[%zu],\"data_offsets\":[%zu,%zu]},"
                     "\"argmax\":{\"dtype\":\"I32\",\"shape\":[%zu],\"data_offsets\":[%zu,%zu]}}",
                     rows, vocab, a, rows, a, b, rows, b, c);
    while (n % 8) /* the format wants the data aligned; spaces may follow the header */
        header[n++] = ' ';
    uint8_t *file = base_try_alloc(total, 1, e);
    if (!file)
        return BATON_ERR_NOMEM;
    for (int i = 0; i < 8; i++)
        file[i] = (uint8_t)((uint64_t)n >> (8 * i));
    uint8_t *p = file + 8;
    memcpy(p, header, (size_t)n);
    p += n;
    if (rows) {
        memcpy(p, r->logits, logits_bytes);
        memcpy(p + a, r->ids, ids_bytes);
        memcpy(p + b, r->argmax, ids_bytes);
    }
    int rc = base_file_write(path, file, 8 + (size_t)n + c, e);
    free(file);
    return rc;
}
