/* SPDX-License-Identifier: Apache-2.0 */
/* The device ABI is frozen: where every member lies (64-bit, System V), and every number that a
 * plugin was compiled with. A line here is never changed; what is added to the header later is
 * added here behind it. */
#include <stddef.h>

#include <baton/device.h>

#include "tests/test.h"

struct place {
    const char *what;
    size_t is, must;
};

#define AT(s, m, o)                                                                                \
    {                                                                                              \
#s "." #m, offsetof(struct baton_##s, m), o                                                \
    }

static const struct place members[] = {
    /* clang-format off */
    AT(kv_layout, version, 0), AT(kv_layout, dtype, 2), AT(kv_layout, kind, 3),
    AT(kv_layout, joint, 4), AT(kv_layout, zero_fill, 5), AT(kv_layout, alignment, 6),
    AT(kv_layout, kv_heads, 8), AT(kv_layout, head_dim, 12), AT(kv_layout, head_dim_padded, 16),
    AT(kv_layout, block, 20), AT(kv_layout, rows, 24), AT(kv_layout, scale_block, 28),
    AT(kv_layout, stride_kv, 32), AT(kv_layout, stride_block, 40), AT(kv_layout, stride_head, 48),
    AT(kv_layout, stride_position, 56), AT(kv_layout, stride_dim, 64),
    AT(kv_view, layout, 0), AT(kv_view, k, 8), AT(kv_view, v, 16), AT(kv_view, blocks, 24),
    AT(kv_view, n_blocks, 32), AT(kv_view, first, 36), AT(kv_view, end, 40),
    AT(tensor, name, 0), AT(tensor, dtype, 8), AT(tensor, n_dims, 12), AT(tensor, shape, 16),
    AT(tensor, stride, 48), AT(tensor, data, 80),
    AT(span, row, 0), AT(span, n_rows, 4), AT(span, position, 8), AT(span, lane, 12),
    AT(span, kv, 16),
    AT(batch, struct_size, 0), AT(batch, ids, 8), AT(batch, n_rows, 16), AT(batch, spans, 24),
    AT(batch, n_spans, 32), AT(batch, logit_rows, 40), AT(batch, n_logits, 48),
    AT(batch, logits, 56), AT(batch, layer_done, 64), AT(batch, ctx, 72),
    AT(caps, struct_size, 0), AT(caps, name, 4), AT(caps, detail, 36), AT(caps, emulated, 164),
    AT(caps, dynamic, 165), AT(caps, prefill, 166), AT(caps, decode, 167),
    AT(caps, row_invariant, 168), AT(caps, host_kv, 169), AT(caps, layer_export, 170),
    AT(caps, kv_dtype, 172), AT(caps, kv_block, 176), AT(caps, max_rows, 180),
    AT(caps, max_lanes, 184), AT(caps, memory_bytes, 192), AT(caps, numerics, 200),
    AT(caps, whole_prompt, 264), AT(caps, widths, 268), AT(caps, lane_kv, 300),
    AT(caps, checks_strides, 301), AT(caps, kv_grain, 304),
    AT(device_key, key, 0), AT(device_key, value, 8),
    AT(step, verb, 0), AT(step, a, 4), AT(step, layer, 16), AT(step, heads, 20),
    AT(step, kv_heads, 24), AT(step, head_dim, 28), AT(step, window, 32), AT(step, act, 36),
    AT(step, scale, 40), AT(step, eps, 44), AT(step, offset, 48), AT(step, w, 56),
    AT(step, b, 64), AT(step, inv_freq, 72),
    AT(plan, struct_size, 0), AT(plan, n_layers, 4), AT(plan, vocab, 8), AT(plan, n_arrays, 12),
    AT(plan, n_steps, 16), AT(plan, cols, 24), AT(plan, steps, 32),
    AT(source, struct_size, 0), AT(source, plan, 8), AT(source, artifact, 16),
    AT(source, artifact_bytes, 24),
    AT(port, name, 0), AT(port, kind, 8), AT(port, dtype, 12), AT(port, n_dims, 16),
    AT(port, shape, 24), AT(port, compiled, 56), AT(port, bound, 88),
    AT(geometry, struct_size, 0), AT(geometry, phase, 4), AT(geometry, width, 8),
    AT(geometry, lanes, 12), AT(geometry, max_positions, 16), AT(geometry, first_layer, 20),
    AT(geometry, n_layers, 24), AT(geometry, export_layers, 28), AT(geometry, host_parts, 32),
    AT(geometry, alignment, 36), AT(geometry, n_inputs, 40), AT(geometry, n_outputs, 44),
    AT(geometry, inputs, 48), AT(geometry, outputs, 56), AT(geometry, global, 64),
    AT(geometry, local, 72), AT(geometry, artifact, 80), AT(geometry, model, 145),
    AT(geometry, compiler, 210),
    AT(kv_copy, lane, 0), AT(kv_copy, layer, 4), AT(kv_copy, which, 8), AT(kv_copy, first, 12),
    AT(kv_copy, count, 16), AT(kv_copy, host, 24), AT(kv_copy, layout, 32),
    AT(device_api, abi_version, 0), AT(device_api, struct_size, 4), AT(device_api, open, 8),
    AT(device_api, close, 16), AT(device_api, caps, 24), AT(device_api, start, 32),
    AT(device_api, weight_bind, 40), AT(device_api, weight_close, 48),
    AT(device_api, program_open, 56), AT(device_api, program_close, 64),
    AT(device_api, geometry, 72), AT(device_api, submit, 80), AT(device_api, wait, 88),
    AT(device_api, cancel, 96), AT(device_api, kv_open, 104), AT(device_api, kv_close, 112),
    AT(device_api, lane_bind, 120), AT(device_api, lane_clear, 128),
    AT(device_api, lane_release, 136), AT(device_api, kv_read, 144),
    AT(device_api, kv_write, 152), AT(device_api, kv_look, 160),
    AT(device_api, buffer_alloc, 168), AT(device_api, buffer_free, 176),
    AT(device_api, buffer_register, 184), AT(device_api, buffer_unregister, 192),
    /* clang-format on */
};

/* Structs that do not begin with struct_size are arrays or parts of others: no member follows. */
#define WHOLE(s, n)                                                                                \
    {                                                                                              \
        "size of " #s, sizeof(struct baton_##s), n                                                 \
    }
static const struct place sizes[] = {
    WHOLE(kv_layout, 72),  WHOLE(kv_view, 48), WHOLE(tensor, 88), WHOLE(span, 24),
    WHOLE(device_key, 16), WHOLE(step, 80),    WHOLE(port, 120),  WHOLE(kv_copy, 40),
};

#define NUMBER(k, n)                                                                               \
    {                                                                                              \
#k, (size_t)BATON_##k, n                                                                   \
    }
static const struct place numbers[] = {
    /* clang-format off */
    NUMBER(F32, 1), NUMBER(F16, 2), NUMBER(BF16, 3), NUMBER(I8, 4), NUMBER(KV_PAGED, 1),
    NUMBER(KV_RING, 2), NUMBER(KV_SLID, 3), NUMBER(WEIGHT_MATRIX, 1), NUMBER(WEIGHT_VECTOR, 2),
    NUMBER(WEIGHT_TABLE, 4), NUMBER(VERB_EMBED, 1), NUMBER(VERB_NORM, 2), NUMBER(VERB_LINEAR, 3),
    NUMBER(VERB_HEAD_NORM, 4), NUMBER(VERB_ROPE, 5), NUMBER(VERB_APPEND, 6),
    NUMBER(VERB_ATTEND, 7), NUMBER(VERB_ADD, 8), NUMBER(VERB_GATE, 9),
    NUMBER(VERB_LAYER_DONE, 10), NUMBER(VERB_SELECT, 11), NUMBER(VERB_LOGITS, 12),
    NUMBER(ACT_SILU, 1), NUMBER(ACT_GELU_TANH, 2), NUMBER(PORT_WEIGHT, 1),
    NUMBER(PORT_ACTIVATION, 2), NUMBER(PORT_TABLE, 3), NUMBER(PORT_MASK, 4), NUMBER(PORT_KV, 5),
    NUMBER(PHASE_PREFILL, 1), NUMBER(PHASE_DECODE, 2), NUMBER(HOST_EMBED, 1),
    NUMBER(HOST_NORM, 2), NUMBER(HOST_HEAD, 4),
    /* clang-format on */
};

static void hold(const struct place *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i].is != p[i].must)
            fail_msg("%s is %zu and was frozen as %zu", p[i].what, p[i].is, p[i].must);
}

static void members_stay_where_they_are(void **state)
{
    hold(members, sizeof members / sizeof *members);
}

static void whole_structs_do_not_grow(void **state)
{
    hold(sizes, sizeof sizes / sizeof *sizes);
}

static void numbers_stay(void **state)
{
    hold(numbers, sizeof numbers / sizeof *numbers);
    assert_int_equal(BATON_DEVICE_ABI, 1);
    assert_string_equal(BATON_DEVICE_SYMBOL, "baton_device_plugin");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(members_stay_where_they_are),
        cmocka_unit_test(whole_structs_do_not_grow),
        cmocka_unit_test(numbers_stay),
    };
    return cmocka_run_group_tests_name("device abi", tests, NULL, NULL);
}
