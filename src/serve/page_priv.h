/* SPDX-License-Identifier: Apache-2.0 */
/* What page.py makes of page.html. */
#ifndef SERVE_PAGE_PRIV_H
#define SERVE_PAGE_PRIV_H

#include <stddef.h>

extern const char serve_page_policy[]; /* Content-Security-Policy: its own script and style alone */
extern const unsigned char serve_page_data[];
extern const size_t serve_page_size;

#endif
