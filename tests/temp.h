/* SPDX-License-Identifier: Apache-2.0 */
/* One file in a temporary folder of its own: cmocka's setup and teardown around each test. */
#ifndef TESTS_TEMP_H
#define TESTS_TEMP_H

#include <dirent.h>
#include <unistd.h>

#include "tests/test.h"

static char folder[64];
static char path[128]; /* in it; need not exist */

static inline int folder_open(void **state)
{
    snprintf(folder, sizeof folder, "/tmp/baton-test-XXXXXX");
    if (!mkdtemp(folder))
        return -1;
    snprintf(path, sizeof path, "%s/file.safetensors", folder);
    return 0;
}

/* Fails where a test left anything but the file. */
static inline int folder_close(void **state)
{
    unlink(path);
    return rmdir(folder);
}

static inline int folder_count(void)
{
    int n = 0;
    DIR *d = opendir(folder);
    for (struct dirent *x; (x = readdir(d));)
        n += x->d_name[0] != '.';
    closedir(d);
    return n;
}

#endif
