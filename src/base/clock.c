/* SPDX-License-Identifier: Apache-2.0 */
/* Clocks. */
#include <errno.h>
#include <time.h>

#include "base/base.h"

uint64_t base_now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

uint64_t base_wall_ms(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    return (uint64_t)ts.tv_sec * 1000u + (uint64_t)ts.tv_nsec / 1000000u;
}

void base_sleep_ns(uint64_t ns)
{
    /* an absolute deadline, so that interruptions do not add up */
    uint64_t end = base_now_ns() + ns;
    struct timespec ts = {.tv_sec = (time_t)(end / 1000000000u),
                          .tv_nsec = (long)(end % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &ts, NULL) == EINTR) {
    }
}
