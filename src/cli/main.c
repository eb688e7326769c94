/* SPDX-License-Identifier: Apache-2.0 */
/* main: find the command. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "cli/cli.h"

static const struct {
    const char *name, *summary;
    int (*run)(int argc, char **argv);
} commands[] = {
    {"run", "answer one prompt: prefill in one process, decode in another", cli_run},
    {"serve", "answer over HTTP as the OpenAI API does, many requests at once", cli_serve},
    {"proxy", "one OpenAI API in front of prefill and decode servers", cli_proxy},
    {"check", "read a handed-over cache back and compare it, its tokens and its logits", cli_check},
    {"probe", "find where a device computes a model's cache wrongly, and why", cli_probe},
    {"matrix", "models x routes x consumers: what passes, what fails, what was not run",
     cli_matrix},
    {"campaign", "cancel requests and kill producers, compare who was not touched", cli_campaign},
    {"quality", "ask a frozen set of prompts over a route, count right answers", cli_quality},
    {"bench", "time a route, or two in pairs with an interval of their ratio", cli_bench},
    {"audit", "compute an evidence folder's figures again from its raw files", cli_audit},
    {"replay", "run a recorded request again, name the first output that differs", cli_replay},
    {"kv", "export, import, inspect, diff: KV caches as safetensors files", cli_kv},
    {"model", "info, hash, tokenize, detokenize", cli_model},
    {"devices", "list devices, what each can do, and why an absent one is absent", cli_devices},
};

static void usage(FILE *f)
{
    fputs("usage: baton COMMAND [OPTIONS]\n\ncommands:\n", f);
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        fprintf(f, "  %-9s %s\n", commands[i].name, commands[i].summary);
    fputs("\n`baton COMMAND --help` shows a command's options and an example.\n", f);
}

static int command(int argc, char **argv)
{
    if (argc < 2) {
        usage(stderr);
        return 2;
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-h") || !strcmp(argv[1], "help")) {
        usage(stdout);
        return 0;
    }
    if (!strcmp(argv[1], "--version")) {
        puts("baton " BATON_VERSION);
        return 0;
    }
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
        if (!strcmp(argv[1], commands[i].name))
            return commands[i].run(argc - 1, argv + 1);
    const struct cli_common common = {.json = cli_wants_json(argc, argv)};
    struct baton_error e = {0};
    base_fail(&e, BATON_ERR_USAGE, "no command '%.40s'; see `baton --help`", argv[1]);
    return cli_fail(&common, &e);
}

/* A descriptor below 3 that the caller closed would be given to the next socket or file, and what
 * is printed would go into that. This stands in its place, and reading or writing it fails. */
static void hold_standard_fds(void)
{
    for (int fd = 0; fd < 3; fd++)
        if (fcntl(fd, F_GETFD) < 0)
            (void)open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY);
}

int main(int argc, char **argv)
{
    hold_standard_fds();
    signal(SIGPIPE, SIG_IGN); /* a closed stdout or peer is an error value, not a death */
    int rc = command(argc, argv);
    /* A result that was not written is no success, whoever printed it. */
    if (rc == 0 && (fflush(stdout) || ferror(stdout))) {
        perror("baton: stdout");
        rc = 3;
    }
    return rc;
}
