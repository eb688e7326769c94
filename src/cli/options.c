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

/* getopt_long's next option, -1 behind the last, or '?' with *e filled. */
static int next_option(int argc, char **argv, const struct cli_syntax *x, struct baton_error *e)
{
    int index = -1;
    opterr = 0;
    int opt = getopt_long(argc, argv, x->letters, x->options, &index);
    if (opt == -1)
        return -1;
    char letter[3] = {'-', (char)optopt, '\0'};
    const char *wrong = is_word(argv[optind - 1], opt) ? argv[optind - 1] : letter;
    if (opt == ':')
        base_fail(e, BATON_ERR_USAGE, "option '%s' needs a value", wrong);
    else if (opt == '?')
        base_fail(e, BATON_ERR_USAGE, "no option '%s'; see `baton %s --help`", wrong, argv[0]);
    else if (index >= 0 && strcspn(last_argument(argv) + 2, "=") != strlen(x->options[index].name))
        base_fail(e, BATON_ERR_USAGE, "no option '%s': '--%s' is not abbreviated",
                  last_argument(argv), x->options[index].name);
    else
        return opt;
    return '?';
}

static int take(const struct cli_syntax *x, int opt, struct cli_common *common, void *args,
                struct baton_error *e)
{
    switch (opt) {
    case '?':
        return e->code;
    case 'j':
        common->json = true;
        return 0;
    case 'v':
        common->verbosity++;
        return 0;
    case 'q':
        common->verbosity = -1;
        return 0;
    default:
        return x->take(args, opt, optarg, e);
    }
}

int cli_parse(int argc, char **argv, const struct cli_syntax *x, struct cli_common *common,
              void *args, bool *helped, struct baton_error *e)
{
    int opt, rc = 0;
    optind = 1;
    while (!rc && (opt = next_option(argc, argv, x, e)) != -1) {
        if (opt == 'h') {
            fputs(x->help, stdout);
            *helped = true;
            return 0;
        }
        rc = take(x, opt, common, args, e);
    }
    if (!rc && !x->words && optind < argc)
        rc = base_fail(e, BATON_ERR_USAGE, "unexpected argument '%.80s'", argv[optind]);
    if (rc)
        common->json = cli_wants_json(argc, argv);
    return rc;
}
