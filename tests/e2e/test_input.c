/* SPDX-License-Identifier: Apache-2.0 */
/* Bad usage and bad input: exit 2, one error that names the thing, nothing on stdout but, with
 * --json, an error document. */
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/e2e/e2e.h"

#define MAX_ARGS 16

static const char *tiny;

/* The command must fail with `status` and a message that holds `word`. */
static void refuse(int status, const char *word, const char *const *args)
{
    struct e2e r;
    e2e_expect(&r, status, args);
    if (!strstr(r.err, word))
        fail_msg("'%s' is not in: %s", word, r.err);
    if (strstr(r.err, "Sanitizer") || strstr(r.err, "runtime error"))
        fail_msg("sanitizer: %s", r.err);
    e2e_free(&r);
    /* The same as JSON. */
    const char *with[MAX_ARGS + 2] = {args[0], "--json"};
    for (size_t n = 1; args[n]; n++)
        with[n + 1] = args[n];
    e2e_expect(&r, status, with);
    assert_non_null(r.json);
    assert_non_null(strstr(json_string_value(e2e_get(r.json, "error.message")), word));
    e2e_free(&r);
}

#define REFUSE(status, word, ...) refuse(status, word, (const char *const[]){__VA_ARGS__, NULL})

static void test_usage(void **state)
{
    (void)state;
    REFUSE(2, "-m MODEL", "run");
    REFUSE(2, "--frobnicate", "run", "-m", tiny, "--frobnicate");
    REFUSE(2, "needs a value", "run", "-m");
    REFUSE(2, "--mode", "run", "-m", tiny, "-p", "x", "--mode", "fast");
    REFUSE(2, "not built", "run", "-m", tiny, "-p", "x", "--transport", "ucx");
    REFUSE(2, "not built", "run", "-m", tiny, "-p", "x", "--weights", "q4");
    REFUSE(2, "one of", "run", "-m", tiny, "-p", "x", "--chat", "y");
    REFUSE(2, "--temp", "run", "-m", tiny, "-p", "x", "--temp", "nan");
    REFUSE(2, "--cpus", "run", "-m", tiny, "-p", "x", "--cpus", "0,x");
    REFUSE(2, "token id", "run", "-m", tiny, "--ids", "1,,2");
    REFUSE(2, "verb", "model");
    REFUSE(2, "convert", "model", "convert", "-m", tiny);
    REFUSE(2, "nodevice", "run", "-m", tiny, "-p", "x", "--decode", "nodevice");
}

/* Numbers are digits alone, options are written out, and a message names what is wrong. */
static void test_exact(void **state)
{
    (void)state;
    static const char *const numbers[] = {"-n", "--ctx", "--seed", "--top-k", "--temp", "--force"};
    static const char *const wrong[] = {"\t3", " 3", "+3", "3 ", "0x3", ""};
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        for (size_t j = 0; j < sizeof wrong / sizeof *wrong; j++)
            REFUSE(2, numbers[i], "run", "-m", tiny, "--ids", "1", numbers[i], wrong[j]);
    REFUSE(2, "--seed", "run", "-m", tiny, "--ids", "1", "--seed", "\t-5");
    REFUSE(2, "--cpus", "run", "-m", tiny, "--ids", "1", "--cpus", "0- 1");
    REFUSE(2, "seed", "run", "-m", "shape:qwen3-0.6b:18446744073709551616", "--ids", "1");
    REFUSE(2, "'--see'", "run", "-m", tiny, "--ids", "1", "--see", "5");
    REFUSE(2, "'--see=5'", "run", "-m", tiny, "--ids", "1", "--see=5");
    REFUSE(2, "'-x'", "run", "-m", tiny, "--ids", "1", "-xv");
    REFUSE(2, "'-x'", "run", "-m", tiny, "--ids", "1", "-vx");
    REFUSE(2, "'--json=1'", "run", "-m", tiny, "--ids", "1", "--json=1");
    REFUSE(2, "'-m' needs", "kv", "inspect", "-m");
    REFUSE(2, "'-x'", "model", "info", "-x");
    REFUSE(2, "'--threa'", "check", "-m", tiny, "--threa", "2");
    REFUSE(2, "extra", "devices", "extra");
    REFUSE(2, "nosuch", "nosuch");
}

/* A message is one line of UTF-8 whatever it quotes: for JSON and for terminals. */
static void test_messages(void **state)
{
    (void)state;
    static const char *const quoted[] = {"\xff\xfe",
                                         "a\nb",
                                         "\033[31m",
                                         "\xc0\x80",
                                         "\xed\xa0\x80",
                                         "\xf4\x90\x80\x80",
                                         "\xc2\x9b"
                                         "1m",
                                         "\xe2\x82"};
    for (size_t i = 0; i < sizeof quoted / sizeof *quoted; i++) {
        REFUSE(2, "?", "run", "-m", quoted[i], "--ids", "1");
        REFUSE(2, "?", "run", "-m", tiny, "--ids", "1", "--mode", quoted[i]);
        REFUSE(2, "?", "run", "-m", tiny, quoted[i]);
        REFUSE(2, "?", quoted[i]);
        struct e2e r;
        e2e_expect(&r, 2, (const char *const[]){"run", "-m", quoted[i], "--ids", "1", NULL});
        for (const char *p = r.err; p[1]; p++)
            assert_true(*p != '\n' && *p != '\033');
        e2e_free(&r);
    }
    /* cut inside a character */
    char cut[200] = "a";
    for (size_t i = 0; i < 60; i++)
        strcat(cut, "\xc3\xa9");
    REFUSE(2, "--mode", "run", "-m", tiny, "--ids", "1", "--mode", cut);
    /* a value that looks like the option is none */
    struct e2e r;
    e2e_expect(&r, 0, (const char *const[]){"model", "tokenize", "-m", tiny, "-p", "--json", NULL});
    assert_null(strchr(r.out, '{'));
    e2e_free(&r);
}

static void test_prompt(void **state)
{
    (void)state;
    const char *bad = e2e_temp("bad.txt");
    FILE *f = fopen(bad, "w");
    assert_non_null(f);
    fputs("good \xC3\x28 bad", f);
    fclose(f);
    REFUSE(2, "empty", "run", "-m", tiny, "--chat", "");
    REFUSE(2, "empty", "run", "-m", tiny); /* stdin is empty */
    REFUSE(2, "UTF-8", "run", "-m", tiny, "--prompt-file", bad);
    REFUSE(2, "99999", "run", "-m", tiny, "--ids", "1,99999");
    REFUSE(2, "-5", "run", "-m", tiny, "--ids", "1,-5");
    REFUSE(2, "99999", "run", "-m", tiny, "--ids", "1", "--force", "99999");
    REFUSE(2, "4096", "run", "-m", tiny, "--ids", "1", "--force", "4095,4096");
    REFUSE(2, "4096", "model", "detokenize", "-m", tiny, "--ids", "4095,4096");
    REFUSE(2, "-1", "model", "detokenize", "-m", tiny, "--ids", "1,-1");
    REFUSE(2, "context", "run", "-m", tiny, "--ids", "1,2,3", "--ctx", "2");
    REFUSE(2, "context", "run", "-m", tiny, "--ids", "1,2,3", "--ctx", "64", "-n", "500");
    REFUSE(2, "nosuch.txt", "run", "-m", tiny, "--prompt-file", "nosuch.txt");
}

static void test_model(void **state)
{
    (void)state;
    REFUSE(2, "nosuch", "run", "-m", "nosuch", "-p", "x");
    REFUSE(2, "nosuch", "model", "info", "-m", "nosuch");
    REFUSE(2, "qwen3-0.6b", "run", "-m", "shape:nosuch", "--ids", "1");
    REFUSE(2, "pin", "run", "-m", tiny, "-p", "x", "--pin",
           "sha256:0000000000000000000000000000000000000000000000000000000000000000");
    REFUSE(2, "pin", "run", "-m", tiny, "-p", "x", "--pin", "md5:1");
}

/* A copy of a shipped model with one file cut short, emptied or unreadable. */
static void test_broken_files(void **state)
{
    (void)state;
    static const char *const files[] = {"config.json", "model.safetensors", "tokenizer.json"};
    char dir[200], cmd[2600], path[300];
    snprintf(dir, sizeof dir, "%s", e2e_temp("copy"));
    for (size_t i = 0; i < 3; i++)
        for (int cut = 0; cut < 2; cut++) {
            snprintf(cmd, sizeof cmd, "rm -rf '%s' && cp -r '%s' '%s' && chmod -R u+w '%s'", dir,
                     tiny, dir, dir);
            assert_int_equal(system(cmd), 0);
            snprintf(path, sizeof path, "%s/%s", dir, files[i]);
            struct stat st;
            assert_int_equal(stat(path, &st), 0);
            assert_int_equal(truncate(path, cut ? st.st_size / 2 : 0), 0);
            REFUSE(2, files[i], "run", "-m", dir, "-p", "x");
            assert_int_equal(unlink(path), 0);
            REFUSE(2, files[i], "run", "-m", dir, "-p", "x");
        }
}

/* A file of the folder that is something else: named and refused, never waited for, read without
 * end or taken for a missing one. */
static void test_odd_files(void **state)
{
    (void)state;
    static const char *const files[] = {"config.json", "generation_config.json",
                                        "model.safetensors", "tokenizer.json"};
    static const char *const kinds[] = {"mkdir %s",           "mkfifo %s",
                                        "ln -s %s %s",        "ln -s nowhere %s",
                                        "ln -s /dev/zero %s", "truncate -s 300G %s"};
    char dir[200], cmd[2600], make[300];
    snprintf(dir, sizeof dir, "%s", e2e_temp("odd"));
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
            snprintf(make, sizeof make, kinds[k], files[i], files[i]);
            snprintf(cmd, sizeof cmd,
                     "rm -rf '%s' && cp -r '%s' '%s' && chmod -R u+w '%s' && cd '%s' && rm %s && "
                     "%s",
                     dir, tiny, dir, dir, dir, files[i], make);
            assert_int_equal(system(cmd), 0);
            REFUSE(2, files[i], "run", "-m", dir, "-p", "x");
        }
    snprintf(cmd, sizeof cmd,
             "rm -rf '%s' && cp -r '%s' '%s' && chmod -R u+w '%s' && cd '%s' && rm -f %s && "
             "ln -s nowhere %s",
             dir, tiny, dir, dir, dir, "chat_template.jinja", "chat_template.jinja");
    assert_int_equal(system(cmd), 0);
    REFUSE(2, "chat_template.jinja", "run", "-m", dir, "--chat", "x");
    REFUSE(2, "empty", "run", "-m", tiny, "--prompt-file", "");
    REFUSE(2, "empty", "run", "-m", tiny, "--ids", "1", "--kv-load", "");
    REFUSE(2, "--logits needs", "run", "-m", tiny, "--ids", "1", "-n", "1", "--logits", "");
    REFUSE(2, "same file", "run", "-m", tiny, "--ids", "1", "--logits", "a", "--kv-save", "a");
    REFUSE(2, "same file", "run", "-m", tiny, "--ids", "1", "--trace", "a", "--logits", "a");
    /* but the user's own prompt may come through a pipe */
    snprintf(cmd, sizeof cmd,
             "rm -rf '%s' && mkfifo '%s' && { echo 1, 2, 3 >'%s' & '%s' run -m '%s' -n 1 -q "
             "--prompt-file '%s' >/dev/null && wait; }",
             dir, dir, dir, getenv("BATON_BINARY") ? getenv("BATON_BINARY") : "build/baton", tiny,
             dir);
    assert_int_equal(system(cmd), 0);
}

static void test_memory(void **state)
{
    (void)state;
    char dir[200], cmd[2600];
    REFUSE(2, "context", "run", "-m", tiny, "--ids", "1", "--ctx", "16000000");
    /* The same model with room in its configuration: 16 M positions of 4 KiB are 61 GiB. */
    snprintf(dir, sizeof dir, "%s", e2e_temp("roomy"));
    snprintf(cmd, sizeof cmd,
             "cp -r '%s' '%s' && chmod -R u+w '%s' && sed -i "
             "'s/\"max_position_embeddings\": [0-9]*/\"max_position_embeddings\": 100000000/' "
             "'%s/config.json'",
             tiny, dir, dir, dir);
    assert_int_equal(system(cmd), 0);
    REFUSE(2, "KV", "run", "-m", dir, "--ids", "1", "--ctx", "16000000");
    REFUSE(2, "KV", "run", "-m", dir, "--ids", "1", "--ctx", "16000000", "--mode", "native");
}

static void test_output(void **state)
{
    (void)state;
    REFUSE(3, "nosuchdir", "run", "-m", tiny, "--ids", "1", "-n", "1", "--mode", "native",
           "--logits", "/nosuchdir/x");
    REFUSE(3, "nosuchdir", "run", "-m", tiny, "--ids", "1", "-n", "1", "--mode", "stream",
           "--kv-save", "/nosuchdir/x");
}

/* What could not be printed was not done: stdout on a full disk is exit 3, with a message. */
static void test_stdout(void **state)
{
    (void)state;
    const char *const commands[] = {"--help",
                                    "devices",
                                    "model info -m '%s'",
                                    "model hash -m '%s' --json",
                                    "devices --json",
                                    "run --help",
                                    "model tokenize -m '%s' -p x",
                                    "run -m '%s' --ids 1 -n 1",
                                    "run -m '%s' --ids 1 -n 1 --json"};
    const char *binary = getenv("BATON_BINARY"), *err = e2e_temp("stdout.err");
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        char args[1400], cmd[1900], text[4000] = "";
        snprintf(args, sizeof args, commands[i], tiny);
        snprintf(cmd, sizeof cmd, "'%s' %s </dev/null >/dev/full 2>'%s'",
                 binary ? binary : "build/baton", args, err);
        int status = system(cmd);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 3)
            fail_msg("%s: status %d", cmd, status);
        FILE *f = fopen(err, "r");
        assert_non_null(f);
        size_t n = fread(text, 1, sizeof text - 1, f);
        fclose(f);
        if (!strstr(text, "stdout"))
            fail_msg("%s: %.*s", cmd, (int)n, text);
    }
}

/* Standard descriptors that the caller closed are not given to files and sockets: output to one is
 * an error, a missing stdin only where it was to be read. */
static void test_closed(void **state)
{
    (void)state;
    static const struct {
        const char *args;
        int status;
    } runs[] = {{"--ids 1 <&-", 0},         {"--ids 1 >&-", 3},        {"--ids 1 2>&-", 0},
                {"--ids 1 >&- 2>&-", 3},    {"--ids 1 --json >&-", 3}, {"<&-", 2},
                {"--ids 1 <&- >&- 2>&-", 3}};
    static const char *const modes[] = {"native", "whole", "stream"};
    const char *binary = getenv("BATON_BINARY");
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++)
        for (size_t m = 0; m < 3; m++) {
            char cmd[1900];
            snprintf(cmd, sizeof cmd,
                     "exec </dev/null >/dev/null 2>&1; '%s' run -m '%s' -n 2 "
                     "--mode %s %s",
                     binary ? binary : "build/baton", tiny, modes[m], runs[i].args);
            int status = system(cmd);
            if (!WIFEXITED(status) || WEXITSTATUS(status) != runs[i].status)
                fail_msg("%s: status %d", cmd, status);
        }
}

/* What must work: help of every command, info, hash against sha256sum, tokenize round trip. */
static void test_good(void **state)
{
    (void)state;
    struct e2e r;
    e2e_expect(&r, 0, (const char *const[]){"--help", NULL});
    e2e_free(&r);
    e2e_expect(&r, 0, (const char *const[]){"run", "--help", NULL});
    assert_non_null(strstr(r.out, "example"));
    e2e_free(&r);
    e2e_expect(&r, 0, (const char *const[]){"devices", "--json", NULL});
    assert_true(json_array_size(e2e_get(r.json, "devices")) >= 2);
    e2e_free(&r);
    e2e_expect(&r, 0, (const char *const[]){"model", "info", "-m", tiny, "--json", NULL});
    assert_int_equal(json_integer_value(e2e_get(r.json, "layers")), 8);
    e2e_free(&r);
    e2e_expect(
        &r, 0,
        (const char *const[]){"model", "tokenize", "-m", tiny, "-p", "1, 2, 3", "--json", NULL});
    json_t *ids = json_incref(e2e_get(r.json, "ids"));
    e2e_free(&r);
    int32_t list[64];
    size_t n = json_array_size(ids);
    assert_true(n > 0 && n < 64);
    for (size_t i = 0; i < n; i++)
        list[i] = (int32_t)json_integer_value(json_array_get(ids, i));
    json_decref(ids);
    char *text = e2e_ids(list, n);
    e2e_expect(
        &r, 0,
        (const char *const[]){"model", "detokenize", "-m", tiny, "--ids", text, "--json", NULL});
    assert_string_equal(json_string_value(e2e_get(r.json, "text")), "1, 2, 3");
    e2e_free(&r);
    free(text);
}

/* qwen3-tiny's embedding has 11 rows more than its tokenizer ids: such ids are generated like any
 * other and are no text, in every place that makes text. */
static void test_padding_ids(void **state)
{
    (void)state;
    struct e2e r;
    const char *run[] = {
        "run", "-m", tiny, "-p", "1, 2,", "--mode", "whole", "--force", "4085,20,4095,4090",
        NULL,  NULL};
    e2e_expect(&r, 0,
               (const char *const[]){"model", "detokenize", "-m", tiny, "--ids", "20", NULL});
    char *want = r.out; /* with its end of line */
    r.out = NULL;
    assert_true(strlen(want) > 1);
    e2e_free(&r);
    e2e_expect(&r, 0,
               (const char *const[]){"model", "detokenize", "-m", tiny, "--ids",
                                     "4085,20,4095,4090", NULL});
    assert_string_equal(r.out, want);
    e2e_free(&r);
    e2e_expect(&r, 0, run); /* streamed */
    assert_string_equal(r.out, want);
    e2e_free(&r);
    run[9] = "--json";
    e2e_expect(&r, 0, run);
    want[strlen(want) - 1] = '\0';
    assert_string_equal(json_string_value(e2e_get(r.json, "text")), want);
    assert_int_equal(json_integer_value(json_array_get(e2e_get(r.json, "ids"), 3)), 4090);
    e2e_free(&r);
    free(want);
}

static void test_pin(void **state)
{
    (void)state;
    char cmd[2400], line[128] = "", pin[160];
    snprintf(cmd, sizeof cmd,
             "cd '%s' && LC_ALL=C sha256sum config.json model.safetensors tokenizer.json | "
             "sha256sum",
             tiny);
    FILE *p = popen(cmd, "r");
    assert_non_null(p);
    assert_non_null(fgets(line, sizeof line, p));
    pclose(p);
    snprintf(pin, sizeof pin, "sha256:%.64s", line);
    struct e2e r;
    e2e_expect(&r, 0,
               (const char *const[]){"run", "-m", tiny, "--ids", "1", "-n", "1", "--pin", pin,
                                     "--json", NULL});
    e2e_free(&r);
}

int main(void)
{
    tiny = e2e_model("qwen3-tiny");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_usage),  cmocka_unit_test(test_prompt),
        cmocka_unit_test(test_exact),  cmocka_unit_test(test_messages),
        cmocka_unit_test(test_closed), cmocka_unit_test(test_odd_files),
        cmocka_unit_test(test_model),  cmocka_unit_test(test_broken_files),
        cmocka_unit_test(test_memory), cmocka_unit_test(test_output),
        cmocka_unit_test(test_stdout), cmocka_unit_test(test_good),
        cmocka_unit_test(test_pin),    cmocka_unit_test(test_padding_ids)};
    int rc = cmocka_run_group_tests_name("e2e input", tests, NULL, NULL);
    e2e_temp_remove();
    return rc;
}
