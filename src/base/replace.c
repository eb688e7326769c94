/* SPDX-License-Identifier: Apache-2.0 */
/* Files that are replaced as a whole or not at all. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/replace_priv.h"

/* A new file beside r->path. Not mkstemp, whose mode 0600 ignores the umask. */
static int open_beside(struct base_replace *r, struct baton_error *e)
{
    uint64_t random;
    int rc = base_random(&random, sizeof random, e);
    if (rc)
        return rc;
    size_t bytes = strlen(r->path) + 32;
    char *temp = base_try_alloc(bytes, 1, e);
    if (!temp)
        return BATON_ERR_NOMEM;
    snprintf(temp, bytes, "%s.%016llx.tmp", r->path, (unsigned long long)random);
    r->fd = open(temp, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (r->fd < 0) {
        rc = base_fail_errno(e, BATON_ERR_IO, errno, "%s: cannot be created", r->path);
        free(temp);
        return rc;
    }
    r->temp = temp;
    return 0;
}

/* A pipe, terminal or /dev/null: renaming over it would replace the device. */
static int open_in_place(struct base_replace *r, struct baton_error *e)
{
    r->fd = open(r->path, O_WRONLY | O_CLOEXEC);
    return r->fd >= 0 ? 0 : base_fail_errno(e, BATON_ERR_IO, errno, "%s", r->path);
}

int base_replace_open(struct base_replace *r, const char *path, struct baton_error *e)
{
    struct stat st;
    char real[PATH_MAX];
    *r = (struct base_replace){.fd = -1};
    if (!*path)
        return base_fail(e, BATON_ERR_IO, "the name of a file to write is empty");
    bool exists = stat(path, &st) == 0;
    if (exists && S_ISDIR(st.st_mode))
        return base_fail(e, BATON_ERR_IO, "%s: is a folder", path);
    /* through a symbolic link the file behind it is replaced, not the link */
    bool regular = exists && S_ISREG(st.st_mode);
    r->path = base_try_strdup(regular && realpath(path, real) ? real : path, e);
    if (!r->path)
        return BATON_ERR_NOMEM;
    int rc = !exists || regular ? open_beside(r, e) : open_in_place(r, e);
    if (rc)
        base_replace_close(r);
    return rc;
}

int base_replace_write(struct base_replace *r, const void *data, size_t n, struct baton_error *e)
{
    for (const uint8_t *p = data; n > 0;) {
        ssize_t did = write(r->fd, p, n);
        if (did < 0 && errno == EINTR)
            continue;
        if (did < 0)
            return base_fail_errno(e, BATON_ERR_IO, errno, "%s: writing", r->path);
        p += did;
        n -= (size_t)did;
    }
    return 0;
}

/* The rename is durable only when its folder is; file systems that cannot sync one are fine. */
static void sync_folder(const char *path)
{
    char dir[PATH_MAX];
    const char *slash = strrchr(path, '/');
    size_t n = slash ? (size_t)(slash - path) : 0;
    if (n >= sizeof dir)
        return;
    memcpy(dir, slash ? path : ".", slash ? n : 1);
    dir[slash ? n : 1] = '\0';
    int fd = open(slash && n == 0 ? "/" : dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
}

int base_replace_commit(struct base_replace *r, struct baton_error *e)
{
    int err = r->temp && fsync(r->fd) != 0 ? errno : 0;
    if (close(r->fd) != 0 && !err)
        err = errno;
    r->fd = -1;
    if (!err && r->temp && rename(r->temp, r->path) != 0)
        err = errno;
    if (err)
        return base_fail_errno(e, BATON_ERR_IO, err, "%s: writing", r->path);
    if (r->temp)
        sync_folder(r->path);
    free(r->temp);
    r->temp = NULL;
    return 0;
}

void base_replace_close(struct base_replace *r)
{
    if (r->fd >= 0)
        close(r->fd);
    if (r->temp)
        unlink(r->temp);
    free(r->temp);
    free(r->path);
    *r = (struct base_replace){.fd = -1};
}

int base_file_write(const char *path, const void *data, size_t n, struct baton_error *e)
{
    struct base_replace r;
    int rc = base_replace_open(&r, path, e);
    if (rc)
        return rc;
    rc = base_replace_write(&r, data, n, e);
    if (rc == 0)
        rc = base_replace_commit(&r, e);
    base_replace_close(&r);
    return rc;
}

int base_file_try(const char *path, struct baton_error *e)
{
    struct stat st;
    struct base_replace r;
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode) && !S_ISDIR(st.st_mode))
        return 0; /* to open a pipe would wait for its reader, to close it end that */
    int rc = base_replace_open(&r, path, e);
    if (rc == 0)
        base_replace_close(&r);
    return rc;
}
