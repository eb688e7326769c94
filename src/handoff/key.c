/* SPDX-License-Identifier: Apache-2.0 */
/* Keys from files, and where a listener may do without one. */
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/base.h"
#include "handoff/handoff.h"
#include "transport/transport.h"

/* Readable by others: then it is no secret of those who run the two ends. */
static int check_mode(const char *path, struct baton_error *e)
{
    struct stat st;
    if (stat(path, &st) == 0 && S_ISREG(st.st_mode) && st.st_mode & S_IRWXO)
        return base_fail(e, BATON_ERR_INPUT, "key file %.180s: everybody may use it (mode %03o)",
                         path, (unsigned)(st.st_mode & 0777));
    return 0;
}

int handoff_key_read(const char *path, uint8_t key[HANDOFF_MAX_KEY], size_t *n,
                     struct baton_error *e)
{
    char *text = NULL;
    size_t size = 0;
    int rc = check_mode(path, e);
    if (rc == 0)
        rc = base_stream_read(path, HANDOFF_MAX_KEY + 1, &text, &size, e);
    if (rc)
        return rc;
    size_t used = size && text[size - 1] == '\n' ? size - 1 : size; /* as an editor leaves it */
    if (used < HANDOFF_MIN_KEY || used > HANDOFF_MAX_KEY)
        rc = base_fail(e, BATON_ERR_INPUT, "key file %.180s: %zu bytes, %u to %u are possible",
                       path, used, HANDOFF_MIN_KEY, HANDOFF_MAX_KEY);
    else
        memcpy(key, text, *n = used);
    base_forget(text, size);
    free(text);
    return rc;
}

int handoff_listen(const char *address, const struct handoff_options *o,
                   struct transport_listener **out, struct baton_error *e)
{
    struct transport_listener *l;
    int rc = transport_listen(address, &l, e);
    if (rc)
        return rc;
    /* The address that was bound is asked, not its name. Nobody was accepted yet. */
    if (!o->key && !transport_listener_local(l)) {
        transport_listener_close(l);
        return base_fail(e, BATON_ERR_USAGE,
                         "'%.160s' can be reached from other machines: a key is needed", address);
    }
    *out = l;
    return 0;
}
