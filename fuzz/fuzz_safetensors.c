/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors from anywhere: whatever parses must be readable to its last byte. */
#include <stdlib.h>
#include <string.h>

#include "model/model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct baton_error e;
    struct model_tensors *t = NULL;
    volatile uint64_t sum = 0;
    if (model_tensors_parse(data, n, "fuzz", &t, &e) != 0)
        return 0;
    for (size_t i = 0; i < model_tensors_count(t); i++) {
        const struct model_tensor *x = model_tensors_at(t, i);
        const uint8_t *p = x->data;
        for (uint64_t b = 0; b < x->bytes; b++)
            sum += p[b];
        if (model_tensors_find(t, x->name) != x)
            abort();
        if (x->bytes && (p < data || p + x->bytes > data + n))
            abort();
    }
    (void)model_tensors_metadata(t, "format");
    model_tensors_close(t);
    return 0;
}
