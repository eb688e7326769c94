/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of the landing region share: its size, placed pieces by hand, open descriptors. */
#ifndef TESTS_HANDOFF_LANDING_H
#define TESTS_HANDOFF_LANDING_H

#include <dirent.h>

#include "scene.h"

#define SLOTS 2u
#define SLOT_BYTES 256u /* a leaf: 64 rows of 4 bytes */

static inline int n_fds(void)
{
    DIR *d = opendir("/proc/self/fd");
    int n = 0;
    assert_non_null(d);
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

static inline void wire_placed(struct wire *w, uint64_t request, uint32_t layer, uint32_t which,
                               uint32_t first, uint32_t count, uint32_t region, uint64_t offset)
{
    uint8_t b[32];
    wire_layer_body(b, layer, which, first, count);
    w_u64(w_u32(b + 20, region), offset);
    wire_frame(w, W_LAYER, request, b, 32, NULL, 0, false);
}

#endif
