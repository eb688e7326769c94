/* SPDX-License-Identifier: Apache-2.0 */
/* Pages as the cpu device wants them, shuffled and poisoned like those of pages.h, and what the
 * instruction set under test is like. */
#ifndef TESTS_DEVICE_CPU_PAGES_H
#define TESTS_DEVICE_CPU_PAGES_H

#include "device/device.h"

#include "rig.h"

static inline void cpu_pages_open(struct pages *p, uint64_t *seed, uint32_t n_layers,
                                  uint32_t kv_heads, uint32_t head_dim, uint32_t n_positions)
{
    uint32_t n_blocks = (n_positions + 63) / 64, n_slots = n_blocks + 3;
    struct baton_kv_layout *l = &p->layout;
    memset(p, 0, sizeof *p);
    *l = (struct baton_kv_layout){.version = 1,
                                  .dtype = BATON_BF16,
                                  .kind = BATON_KV_PAGED,
                                  .joint = (uint8_t)test_range(seed, 0, 1),
                                  .alignment = 2,
                                  .kv_heads = kv_heads,
                                  .head_dim = head_dim,
                                  .head_dim_padded = head_dim,
                                  .block = 64,
                                  .stride_dim = 2};
    l->stride_position = 2 * (int64_t)head_dim;
    l->stride_head = 64 * l->stride_position + 2 * test_range(seed, 0, 3);
    int64_t one = l->stride_head * kv_heads;
    l->stride_kv = l->joint ? one : 0;
    l->stride_block = (l->joint ? 2 : 1) * one + 2 * test_range(seed, 0, 3);
    pages_table(p, seed, n_blocks, n_slots);
    size_t region = (size_t)l->stride_block * n_slots;
    p->n_layers = n_layers;
    p->bytes = 2 * region * n_layers;
    p->memory = malloc(p->bytes);
    p->views = calloc(n_layers, sizeof *p->views);
    assert_true(p->memory && p->views);
    memset(p->memory, 0xFF, p->bytes);
    for (uint32_t i = 0; i < n_layers; i++) {
        uint8_t *k = p->memory + 2 * region * i;
        uint8_t *v = l->joint ? k + l->stride_kv : k + region;
        p->views[i] = (struct baton_kv_view){l, k, v, p->table, n_blocks, 0, 0};
    }
}

/* "cpu,isa=NAME", or NULL with a printed reason where this machine cannot run it. */
static inline const char *cpu_isa_device(const char *isa)
{
    static char name[64];
    struct device *d = NULL;
    struct baton_error e = {0};
    snprintf(name, sizeof name, "cpu,isa=%s", isa);
    if (device_open(name, &d, &e)) {
        print_message("isa %s is skipped: %s\n", isa, e.text);
        assert_int_equal(e.code, BATON_ERR_DEVICE);
        return NULL;
    }
    device_close(d);
    return name;
}

/* Activations of linear maps and attention are rounded to bf16 by this instruction set. */
static inline bool cpu_isa_narrow(const char *isa)
{
    return strcmp(isa, "avx512bf16") == 0;
}

static inline float cpu_bf16(float x)
{
    return device_bf16_to_f32(device_f32_to_bf16(x));
}

#endif
