/* SPDX-License-Identifier: Apache-2.0 */
/* Files: mapped, read whole; path joining. Writing is in replace.c. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/base.h"

/* The descriptor or a negative code. O_NONBLOCK: a named pipe is to be refused, not waited for. */
static int open_path(const char *path, int flags, struct baton_error *e)
{
    if (!*path)
        return base_fail(e, BATON_ERR_IO, "the name of a file is empty");
    int fd = open(path, O_RDONLY | O_CLOEXEC | flags);
    return fd >= 0 ? fd : base_fail_errno(e, BATON_ERR_IO, errno, "%s", path);
}

int base_file_open(struct base_file *f, const char *path, struct baton_error *e)
{
    struct stat st;
    int fd = open_path(path, O_NONBLOCK, e), rc;
    if (fd < 0)
        return fd;
    if (fstat(fd, &st) != 0) {
        rc = base_fail_errno(e, BATON_ERR_IO, errno, "%s", path);
        close(fd);
        return rc;
    }
    if (!S_ISREG(st.st_mode)) {
        close(fd);
        return base_fail(e, BATON_ERR_IO, "%s: not a regular file", path);
    }
    void *data = NULL;
    if (st.st_size > 0) {
        data = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (data == MAP_FAILED) {
            rc = base_fail_errno(e, BATON_ERR_IO, errno, "%s: cannot be mapped", path);
            close(fd);
            return rc;
        }
    }
    *f = (struct base_file){.data = data, .size = (size_t)st.st_size, .fd = fd};
    return 0;
}

void base_file_close(struct base_file *f)
{
    /* A zeroed struct was never open: its fd 0 is not ours. An empty file has no mapping and a real
     * fd, which is 0 only where the process started without stdin; that one stays open. */
    if (f->data)
        munmap((void *)(uintptr_t)f->data, f->size);
    if (f->data || f->fd > 0)
        close(f->fd);
    *f = (struct base_file){0};
}

void base_file_drop(const struct base_file *f, size_t offset, size_t n)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    if (!f->data || offset >= f->size)
        return;
    size_t end = n > f->size - offset ? f->size : offset + n;
    size_t first = (offset + page - 1) / page * page;
    /* the file's last page belongs to it alone, up to the end */
    size_t last = end == f->size ? (end + page - 1) / page * page : end / page * page;
    if (first < last)
        madvise((void *)(uintptr_t)(f->data + first), last - first, MADV_DONTNEED);
}

/* Reads until the end or until `limit` is passed; the size is a hint only, since pipes and /proc
 * have none. */
static int read_all(int fd, const char *path, size_t limit, size_t hint, char **out, size_t *size,
                    struct baton_error *e)
{
    size_t cap = (hint < limit ? hint : limit) + 2, n = 0;
    char *buf = base_try_alloc(cap, 1, e);
    if (!buf)
        return BATON_ERR_NOMEM;
    int rc = 0;
    for (;;) {
        if (n + 1 == cap) {
            char *grown = base_try_realloc(buf, cap * 2, 1, e);
            if (!grown) {
                rc = BATON_ERR_NOMEM;
                break;
            }
            buf = grown;
            cap *= 2;
        }
        ssize_t got = read(fd, buf + n, cap - n - 1);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            rc = base_fail_errno(e, BATON_ERR_IO, errno, "%s", path);
        else if ((n += (size_t)got) > limit)
            rc = base_fail(e, BATON_ERR_INPUT, "%s: larger than the %zu bytes allowed", path,
                           limit);
        if (rc != 0 || got == 0)
            break;
    }
    if (rc != 0) {
        free(buf);
        return rc;
    }
    buf[n] = '\0';
    *out = buf;
    *size = n;
    return 0;
}

static int read_path(const char *path, bool any_kind, size_t limit, char **out, size_t *size,
                     struct baton_error *e)
{
    struct stat st;
    int fd = open_path(path, any_kind ? 0 : O_NONBLOCK, e);
    if (fd < 0)
        return fd;
    size_t hint = 4096, cap = limit < SIZE_MAX / 4 ? limit : SIZE_MAX / 4, n = 0;
    bool regular = fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
    bool sized = regular && st.st_size > 0;
    if (sized)
        hint = (size_t)st.st_size;
    int rc;
    if (!regular && !any_kind)
        rc = base_fail(e, BATON_ERR_IO, "%s: not a regular file", path);
    else if (sized && hint > cap) /* known before anything is allocated */
        rc = base_fail(e, BATON_ERR_INPUT, "%s: larger than the %zu bytes allowed", path, limit);
    else
        rc = read_all(fd, path, cap, hint, out, &n, e);
    close(fd);
    if (rc == 0 && size)
        *size = n;
    return rc;
}

int base_file_read(const char *path, size_t limit, char **out, size_t *size, struct baton_error *e)
{
    return read_path(path, false, limit, out, size, e);
}

int base_stream_read(const char *path, size_t limit, char **out, size_t *size,
                     struct baton_error *e)
{
    return read_path(path, true, limit, out, size, e);
}

static bool stays_inside(const char *name)
{
    if (name[0] == '\0' || name[0] == '/')
        return false;
    for (const char *p = name; *p;) {
        size_t n = strcspn(p, "/");
        if (n == 2 && p[0] == '.' && p[1] == '.')
            return false;
        p += n + (p[n] == '/');
    }
    return true;
}

char *base_path_join(const char *dir, const char *name, struct baton_error *e)
{
    if (!stays_inside(name)) {
        base_fail(e, BATON_ERR_INPUT, "'%s' is not a name inside %s", name, dir);
        return NULL;
    }
    size_t a = strlen(dir), b = strlen(name);
    char *p = base_try_alloc(a + b + 2, 1, e);
    if (!p)
        return NULL;
    bool slash = a > 0 && dir[a - 1] != '/';
    memcpy(p, dir, a);
    if (slash)
        p[a] = '/';
    memcpy(p + a + slash, name, b);
    return p;
}
