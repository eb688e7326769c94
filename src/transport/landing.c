/* SPDX-License-Identifier: Apache-2.0 */
/* Landing regions: memory files without a name, sealed, mapped by two processes. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "transport/transport_priv.h"

/* Nobody shortens it (a touch beyond the end is SIGBUS), and nobody may forbid the writing. */
#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

struct transport_landing {
    uint8_t *data;
    size_t bytes;
    int fd; /* -1 = let go */
};

/* A process forked later has no business with it. */
static int map(struct transport_landing *l, struct baton_error *e)
{
    void *p = mmap(NULL, l->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, l->fd, 0);
    if (p == MAP_FAILED)
        return base_fail_errno(e, BATON_ERR_NOMEM, errno,
                               "cannot map a landing region of %zu bytes", l->bytes);
    madvise(p, l->bytes, MADV_DONTFORK);
    l->data = p;
    return 0;
}

static int make(struct transport_landing *l, struct baton_error *e)
{
    l->fd = memfd_create("baton-landing", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (l->fd < 0)
        return base_fail_errno(e, BATON_ERR_IO, errno, "cannot make a landing region");
    int err = ftruncate(l->fd, (off_t)l->bytes) ? errno
                                                : posix_fallocate(l->fd, 0, (off_t)l->bytes);
    if (err)
        return base_fail_errno(e, BATON_ERR_NOMEM, err,
                               "no memory for a landing region of %zu bytes", l->bytes);
    if (fcntl(l->fd, F_ADD_SEALS, SEALS) != 0)
        return base_fail_errno(e, BATON_ERR_IO, errno, "cannot seal a landing region");
    return map(l, e);
}

int transport_landing_create(size_t bytes, struct transport_landing **out, struct baton_error *e)
{
    if (bytes == 0 || bytes > SIZE_MAX / 4)
        return base_fail(e, BATON_ERR_USAGE, "a landing region of %zu bytes", bytes);
    struct transport_landing *l = base_try_alloc(1, sizeof *l, e);
    if (!l)
        return BATON_ERR_NOMEM;
    l->bytes = bytes;
    int rc = make(l, e);
    if (rc) {
        transport_landing_close(l);
        return rc;
    }
    *out = l;
    return 0;
}

/* A file of another kind knows no seals, so this tells them apart too. */
static int check(int fd, size_t bytes, struct baton_error *e)
{
    struct stat st = {0};
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & SEALS) != SEALS || seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE))
        return base_fail(e, BATON_ERR_PEER, "the peer lends something else than a sealed region");
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size < 0 ||
        (uint64_t)st.st_size != bytes)
        return base_fail(e, BATON_ERR_PEER, "the peer lends %lld bytes and says %zu",
                         (long long)st.st_size, bytes);
    return 0;
}

int transport_landing_map(int fd, size_t bytes, struct transport_landing **out,
                          struct baton_error *e)
{
    int rc = check(fd, bytes, e);
    struct transport_landing *l = rc ? NULL : base_try_alloc(1, sizeof *l, e);
    if (!l) {
        close(fd);
        return rc ? rc : BATON_ERR_NOMEM;
    }
    l->bytes = bytes;
    l->fd = fd;
    rc = map(l, e);
    transport_landing_sent(l);
    if (rc) {
        transport_landing_close(l);
        return rc;
    }
    *out = l;
    return 0;
}

void transport_landing_close(struct transport_landing *l)
{
    if (!l)
        return;
    if (l->data)
        munmap(l->data, l->bytes);
    if (l->fd >= 0)
        close(l->fd);
    free(l);
}

uint8_t *transport_landing_data(const struct transport_landing *l)
{
    return l->data;
}

int transport_landing_fd(const struct transport_landing *l)
{
    return l->fd;
}

void transport_landing_sent(struct transport_landing *l)
{
    if (l->fd >= 0)
        close(l->fd);
    l->fd = -1;
}
