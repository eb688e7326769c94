/* SPDX-License-Identifier: Apache-2.0 */
/* AVX2, FMA, F16C: the table. Linear maps are in gemm_avx2.c, attention in attn_avx2.c. */
#include "device/cpu/avx2_priv.h"
#include "device/cpu/rows_priv.h"

CPU_ROWS_DEFINE(avx2)

const struct cpu_kernels device_cpu_kernels_avx2 = {
    .isa = "avx2",
    .numerics = "cpu-avx2-1",
    .order = CPU_ORDER_OUTPUTS,
    .mr = AVX2_MR,
    .gemv_rows = AVX2_GEMV_ROWS,
    .k_unit = 1,
    .row_block = 22 * AVX2_MR, /* 132 rows x 512 k x 4 bytes = half of a 512 KiB L2 */
    CPU_KERNELS_FILL(avx2),
};
