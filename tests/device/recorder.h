/* SPDX-License-Identifier: Apache-2.0 */
/* A static device for tests: it calls a forward function once, when the program is opened, and
 * keeps the verbs as npu's plan, of fixed width. A batch is padded to that width and the plan
 * replayed through the verbs of cpu:ref.
 *
 * It shows that a forward function may be recorded: that it looks into no array, calls the same
 * verbs whatever the batch, and keeps nothing from one run to the next. Padding rows are a sequence
 * of their own in memory of their own; the cache of the true rows never sees them. */
#ifndef TESTS_DEVICE_RECORDER_H
#define TESTS_DEVICE_RECORDER_H

#include "device/device.h"

#define RECORDER_WIDTH 128u

/* Padding rows hold the token `pad_id`. Weights, programs, batches as with any device; a batch is
 * one span of 1 to RECORDER_WIDTH rows at any position. */
int recorder_open(int32_t pad_id, struct device **out, struct baton_error *e);

/* Steps of the plan. */
uint32_t recorder_steps(const struct device_program *p);

#endif
