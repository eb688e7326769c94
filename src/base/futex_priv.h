/* SPDX-License-Identifier: Apache-2.0 */
/* The two futex calls that the pool needs. Private to this process. */
#ifndef BASE_FUTEX_PRIV_H
#define BASE_FUTEX_PRIV_H

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Sleep while *word == seen. May return early: callers loop. */
static inline void base_futex_wait(_Atomic uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static inline void base_futex_wake(_Atomic uint32_t *word, unsigned n)
{
    syscall(SYS_futex, (uint32_t *)word, FUTEX_WAKE_PRIVATE, n > INT_MAX ? INT_MAX : (int)n, NULL,
            NULL, 0);
}

#endif
