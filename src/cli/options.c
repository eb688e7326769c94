/* SPDX-License-Identifier: Apache-2.0 */
/* getopt_long with errors that name the option, and without abbreviations: a script that writes
 * --temp as --te would change its meaning with the next option that begins so. */
#include <getopt.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "cli/cli.h"

/* The argument that getopt_long took last: its value may be an argument of its own behind it. */
static const char *last_argument(char **argv)
{
    bool apart = optarg && optarg == argv[optind - 1];
    return argv[optind - 1 - apart];
}

/* Whether the refused option is the word behind getopt_long's place. A letter need not be: the
 * place moves behind "-xv" with the v. */
static bool is_word(const char *before, int opt)
{
    return !strncmp(before, "--", 2) && (opt == ':' || !optopt || strchr(before, '='));
}

int cli_option(int argc, char **argv, const char *letters, const struct option *longs,
               struct baton_error *e)
{
    int index = -1;
    opterr = 0;
    int opt = getopt_long(argc, argv, letters, longs, &index);
    if (opt == -1)
        return -1;
    char letter[3] = {'-', (char)optopt, '\0'};
    const char *wrong = is_word(argv[optind - 1], opt) ? argv[optind - 1] : letter;
    if (opt == ':')
        base_fail(e, BATON_ERR_USAGE, "option '%s' needs a value", wrong);
    else if (opt == '?')
        base_fail(e, BATON_ERR_USAGE, "no option '%s'; see `baton %s --help`", wrong, argv[0]);
    else if (index >= 0 && strcspn(last_argument(argv) + 2, "=") != strlen(longs[index].name))
        base_fail(e, BATON_ERR_USAGE, "no option '%s': '--%s' is not abbreviated",
                  last_argument(argv), longs[index].name);
    else
        return opt;
    return '?';
}
