/* SPDX-License-Identifier: Apache-2.0 */
/* run: the prompt's ids, from whichever option gives it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "cli/run_priv.h"

#define PROMPT_LIMIT ((size_t)64 << 20)

static int read_prompt_text(const struct run_args *a, char **text, size_t *n, struct baton_error *e)
{
    if (a->prompt_file)
        return base_stream_read(a->prompt_file, PROMPT_LIMIT, text, n, e);
    if (!a->chat && !a->text) {
        if (isatty(STDIN_FILENO))
            fputs("baton: reading the prompt from the terminal; end it with Ctrl-D\n", stderr);
        return cli_read_all(STDIN_FILENO, PROMPT_LIMIT, text, n, e);
    }
    const char *given = a->chat ? a->chat : a->text;
    *n = strlen(given);
    *text = base_try_strdup(given, e);
    return *text ? 0 : BATON_ERR_NOMEM;
}

int cli_run_prompt(const struct run_args *a, const struct baton_model *m, struct run_result *r,
                   struct baton_error *e)
{
    if (a->ids) {
        r->prompt = base_try_alloc(a->n_ids, sizeof *r->prompt, e);
        if (!r->prompt)
            return BATON_ERR_NOMEM;
        memcpy(r->prompt, a->ids, a->n_ids * sizeof *r->prompt);
        r->n_prompt = a->n_ids;
        return 0;
    }
    if (a->ids_text)
        return cli_parse_ids("--ids", a->ids_text, &r->prompt, &r->n_prompt, e);
    char *text = NULL;
    size_t n = 0;
    int rc = read_prompt_text(a, &text, &n, e);
    /* A file's or pipe's last newline belongs to the line, not to the question. */
    while (!rc && !a->text && !a->chat && n && (text[n - 1] == '\n' || text[n - 1] == '\r'))
        n--;
    if (!rc && n == 0)
        rc = base_fail(e, BATON_ERR_INPUT, "the prompt is empty");
    if (!rc)
        rc = baton_tokenize(m, text, n, !a->text, &r->prompt, &r->n_prompt, e);
    free(text);
    return rc;
}
