/* SPDX-License-Identifier: Apache-2.0 */
/* The one error idiom of baton, shared by both installed headers and by every room.
 *
 * A function that can fail returns int: 0, or one of the negative codes below. The first function
 * that knows the cause fills the caller's struct baton_error with the code and one sentence that
 * names the thing (file, tensor, slot, peer); those above pass it on and add nothing. Outputs are
 * set on success only. `e` may be NULL where the caller wants the code alone.
 */
#ifndef BATON_ERROR_H
#define BATON_ERROR_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Codes are part of the ABI: numbers are never reused or renumbered. */
enum baton_code {
    BATON_OK = 0,
    BATON_ERR_USAGE = -1,        /* an argument of the caller is wrong */
    BATON_ERR_INPUT = -2,        /* a file, text or message does not parse or does not fit */
    BATON_ERR_IO = -3,           /* the system refused to read, write, map or connect */
    BATON_ERR_NOMEM = -4,        /* no memory */
    BATON_ERR_UNSUPPORTED = -5,  /* understood, and not built or not possible on this device */
    BATON_ERR_MISMATCH = -6,     /* two things that must be equal differ (identity, geometry) */
    BATON_ERR_PEER = -7,         /* the other process ended, closed or broke the protocol */
    BATON_ERR_TIMEOUT = -8,      /* nothing happened for as long as the caller was ready to wait */
    BATON_ERR_CANCELLED = -9,    /* somebody asked for this to stop */
    BATON_ERR_BUSY = -10,        /* no lane, page or queue entry free now; may be tried again */
    BATON_ERR_DEVICE = -11,      /* the device is absent or refused the call */
    BATON_ERR_DEVICE_LOST = -12, /* the device is gone: every lane failed, it must be reopened */
    BATON_ERR_INTEGRITY = -13,   /* a digest, position proof or MAC does not match: data refused */
    BATON_ERR_INTERNAL = -14,    /* a broken invariant of baton itself */
    BATON_ERR_STALE = -15,       /* a ticket that is expired, used up or of pages that are gone */
};

struct baton_error {
    int32_t code;   /* enum baton_code */
    char text[252]; /* UTF-8, NUL-terminated, no newline */
};

#ifdef __cplusplus
}
#endif
#endif
