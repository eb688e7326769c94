/* SPDX-License-Identifier: Apache-2.0 */
/* What the machine can do at most, measured: the yardsticks of the benchmarks. All over the whole
 * pool at once, since cores share memory and clock. */
#ifndef BENCH_FLOOR_H
#define BENCH_FLOOR_H

#include "base/base.h"

/* Bytes a second read from a buffer that fits no cache; 0 with *e filled where memory is short. */
double bench_read_bandwidth(struct base_pool *pool, struct baton_error *e);
/* FLOP/s of independent float32 multiply-adds in registers, in the widest form this machine has. */
double bench_fma_peak(struct base_pool *pool);
/* FLOP/s of AVX-512 bf16 dot products in registers; 0 where there are none. */
double bench_dot_peak(struct base_pool *pool);

#endif
