/* SPDX-License-Identifier: Apache-2.0 */
/* Output: errors, JSON documents, progress. */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "cli/cli.h"
#include "device/device.h"

int cli_exit_code(int code)
{
    switch (code) {
    case BATON_OK:
        return 0;
    case BATON_ERR_USAGE:
    case BATON_ERR_INPUT:
    case BATON_ERR_UNSUPPORTED:
    case BATON_ERR_MISMATCH:
        return 2;
    case BATON_ERR_INTEGRITY:
        return 1; /* the handoff was made and did not hold */
    case BATON_ERR_CANCELLED:
        return 130;
    default:
        return 3;
    }
}

int cli_fail(const struct cli_common *c, const struct baton_error *e)
{
    bool color = isatty(STDERR_FILENO) && !getenv("NO_COLOR");
    fprintf(stderr, "%sbaton: %s%s\n", color ? "\033[31m" : "", e->text, color ? "\033[0m" : "");
    int rc = cli_exit_code(e->code);
    if (c->json)
        cli_print_json(json_pack("{s:i,s:{s:s,s:s}}", "schema", 1, "error", "code",
                                 base_code_name(e->code), "message", e->text),
                       rc);
    return rc;
}

int cli_print_json(struct json_t *doc, int rc)
{
    if (!doc) { /* jansson had no memory, or was given text that is not UTF-8 */
        fputs("baton: the result can't be written as JSON\n", stderr);
        return 3;
    }
    int bad = json_dumpf(doc, stdout, JSON_INDENT(1) | JSON_REAL_PRECISION(9));
    json_decref(doc);
    if (bad || putchar('\n') == EOF || fflush(stdout)) {
        perror("baton: stdout");
        return 3;
    }
    return rc;
}

void cli_progress_init(struct cli_progress *p, const struct cli_common *c)
{
    memset(p, 0, sizeof *p);
    p->on = isatty(STDERR_FILENO) && c->verbosity >= 0;
    p->last_ns = base_now_ns();
}

void cli_progress_draw(struct cli_progress *p, const char *what, uint64_t done, uint64_t all)
{
    enum { WIDTH = 30, QUIET_MS = 200, EVERY_MS = 50 };
    uint64_t now = base_now_ns();
    if (!p->on || !all || (now - p->last_ns) / 1000000 < (p->shown ? EVERY_MS : QUIET_MS))
        return;
    p->last_ns = now;
    p->shown = true;
    int full = (int)((double)done / (double)all * WIDTH);
    fprintf(stderr, "\r%-8s [%.*s%*s] %3d %%", what, full, "##############################",
            WIDTH - full, "", (int)((double)done / (double)all * 100));
    fflush(stderr);
}

void cli_progress_end(struct cli_progress *p)
{
    if (p->shown)
        fprintf(stderr, "\r%60s\r", "");
    p->shown = false;
    p->last_ns = base_now_ns();
}

bool cli_emulated(const char *device)
{
    struct baton_caps caps;
    return device && device_static(device, &caps) && caps.emulated;
}

const char *cli_bytes(uint64_t n, char *buf)
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double v = (double)n;
    int u = 0;
    while (v >= 1024 && u < 4) {
        v /= 1024;
        u++;
    }
    snprintf(buf, 16, u ? "%.1f %s" : "%.0f %s", v, unit[u]);
    return buf;
}
