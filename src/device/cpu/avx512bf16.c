/* SPDX-License-Identifier: Apache-2.0 */
/* AVX-512 F, BW, VL, DQ and BF16: the table. Linear maps are in gemm_avx512bf16.c, attention in
 * attn_avx512bf16.c. */
#include "device/cpu/avx512bf16_priv.h"
#include "device/cpu/rows_priv.h"

CPU_ROWS_DEFINE(avx512bf16)

const struct cpu_kernels device_cpu_kernels_avx512bf16 = {
    .isa = "avx512bf16",
    .numerics = "cpu-avx512bf16-1",
    .order = CPU_ORDER_PAIRS,
    .mr = AVX512_MR,
    .gemv_rows = AVX512_GEMV_ROWS,
    .k_unit = 2,
    .row_block = 32 * AVX512_MR, /* 256 rows x 256 k x 2 bytes = 128 KiB of L2 */
    CPU_KERNELS_FILL(avx512bf16),
};
