/* SPDX-License-Identifier: Apache-2.0 */
#ifndef MODEL_PHILOX_PRIV_H
#define MODEL_PHILOX_PRIV_H

#include <stdint.h>

/* Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011): ten rounds
 * over a counter of 128 bits under a key of 64. A pure function, so a random number belongs to its
 * place in the output and not to the order of calls. */
void model_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

#endif
