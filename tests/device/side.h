/* SPDX-License-Identifier: Apache-2.0 */
/* A device with a model bound to it, its program, and one sequence. */
#ifndef TESTS_DEVICE_SIDE_H
#define TESTS_DEVICE_SIDE_H

#include "device/device.h"
#include "model/model.h"
#include "pages.h"

static struct baton_error err;

struct side {
    struct device *device;
    struct model_bound *bound;
    struct device_program *program;
    struct pages pages;
    float *logits; /* [2, vocab] */
    uint32_t layers_done;
};

static inline void count_layer(void *ctx, uint32_t layer)
{
    struct side *s = ctx;
    assert_int_equal(layer, s->layers_done);
    s->layers_done++;
}

/* Takes the device over; what opening its program says. */
static inline int side_open(struct side *s, struct device *d, const struct model *m)
{
    memset(s, 0, sizeof *s);
    s->device = d;
    test_ok(device_start(d, 2, &err), &err);
    test_ok(model_bind(m, d, NULL, NULL, &s->bound, &err), &err);
    s->logits = malloc(2 * model_config_of(m)->vocab * sizeof(float));
    assert_non_null(s->logits);
    return device_program_open(d, model_graph(s->bound), &s->program, &err);
}

static inline void side_close(struct side *s)
{
    device_program_close(s->program);
    model_unbind(s->bound);
    device_close(s->device);
    free(s->logits);
}

#endif
