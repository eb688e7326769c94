/* SPDX-License-Identifier: Apache-2.0 */
/* Tokenizers: goldens, streaming, invalid text, long text, hostile files. The comparison with
 * Hugging Face's package on random text is tokenizer_corpus.py. */
#include "folder.h"
#include "goldens.h"

static uint64_t seed;

/* ---- goldens ------------------------------------------------------------------------------- */

static void check_decoded(const struct model_tokenizer *t, const json_t *ids, bool skip,
                          const json_t *want)
{
    int32_t list[4096];
    size_t n = json_array_size(ids), n_text = 0;
    char *text = NULL;
    struct baton_error e;
    assert_true(n < 4096);
    for (size_t i = 0; i < n; i++)
        list[i] = (int32_t)json_integer_value(json_array_get(ids, i));
    test_ok(model_tokenizer_decode(t, list, n, skip, &text, &n_text, &e), &e);
    assert_int_equal(n_text, json_string_length(want));
    assert_memory_equal(text, json_string_value(want), n_text);
    assert_int_equal(text[n_text], '\0');
    free(text);
}

static void goldens(void **state)
{
    size_t checked = 0;
    (void)state;
    for (size_t i = 0; i < N_GOLDEN_FILES; i++) {
        struct model_tokenizer *t = golden_tokenizer(i);
        json_t *g = golden_load(i), *c;
        size_t k;
        json_array_foreach(json_object_get(g, "strings"), k, c)
        {
            const json_t *text = json_object_get(c, "text");
            const char *s = json_string_value(text);
            size_t n = json_string_length(text);
            check_ids(t, s, n, false, json_object_get(c, "ids"));
            check_ids(t, s, n, true, json_object_get(c, "ids_with_special"));
            check_decoded(t, json_object_get(c, "ids"), false, json_object_get(c, "decoded"));
            check_decoded(t, json_object_get(c, "ids"), true,
                          json_object_get(c, "decoded_skip_special"));
            checked++;
        }
        json_decref(g);
        model_tokenizer_close(t);
    }
    print_message("%zu strings\n", checked);
    assert_int_equal(checked, 3 * 240);
}

static void lookups(void **state)
{
    struct model_tokenizer *t = golden_tokenizer(0);
    (void)state;
    assert_int_equal(model_tokenizer_size(t), 4085);
    assert_int_equal(model_tokenizer_id(t, "<|im_end|>"), 4082);
    assert_int_equal(model_tokenizer_id(t, "<|no such token|>"), -1);
    assert_true(model_tokenizer_is_special(t, 4082));
    assert_false(model_tokenizer_is_special(t, 4084)); /* </think> */
    assert_false(model_tokenizer_is_special(t, 0));
    assert_false(model_tokenizer_is_special(t, -1));
    assert_false(model_tokenizer_is_special(t, 4085));
    model_tokenizer_close(t);
    model_tokenizer_close(NULL);
    model_detokenizer_close(NULL);
}

/* ---- streaming ----------------------------------------------------------------------------- */

/* True where the piece is whole characters. */
static bool is_utf8(const char *s, size_t n)
{
    json_t *j = json_stringn(s, n); /* NULL for anything else */
    json_decref(j);
    return j != NULL;
}

static void check_stream(const struct model_tokenizer *t, const int32_t *ids, size_t n, bool skip)
{
    struct baton_error e;
    struct model_detokenizer *d = NULL;
    char *whole = NULL;
    size_t n_whole = 0, at = 0, n_piece;
    const char *piece;
    test_ok(model_tokenizer_decode(t, ids, n, skip, &whole, &n_whole, &e), &e);
    test_ok(model_detokenizer_open(t, skip, &d, &e), &e);
    for (size_t i = 0; i <= n; i++) {
        if (i < n)
            test_ok(model_detokenizer_push(d, ids[i], &piece, &n_piece, &e), &e);
        else
            test_ok(model_detokenizer_finish(d, &piece, &n_piece, &e), &e);
        assert_true(is_utf8(piece, n_piece));
        assert_true(n_piece <= n_whole - at);
        assert_memory_equal(piece, whole + at, n_piece);
        at += n_piece;
    }
    assert_int_equal(at, n_whole);
    assert_true(is_utf8(whole, n_whole));
    model_detokenizer_close(d);
    free(whole);
}

/* GPT-2's alphabet, from its definition: printable bytes stand for themselves, the others get the
 * code points from U+0100 on, in order. */
static void byte_letter(unsigned byte, char out[3])
{
    unsigned cp = byte, next = 0x100;
    for (unsigned b = 0; b <= byte; b++) {
        bool printable = (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || b >= 0xAE;
        cp = printable ? b : next;
        next += !printable;
    }
    if (cp < 0x80)
        snprintf(out, 3, "%c", (int)cp);
    else
        snprintf(out, 3, "%c%c", (int)(0xC0 | cp >> 6), (int)(0x80 | (cp & 63)));
}

/* Ids of the tokens that are one byte each. */
static size_t byte_tokens(const struct model_tokenizer *t, int32_t out[256])
{
    size_t n = 0;
    for (unsigned b = 0; b < 256; b++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", b);
        int32_t id = model_tokenizer_id(t, name);
        if (id < 0) {
            byte_letter(b, name);
            id = model_tokenizer_id(t, name);
        }
        if (id >= 0)
            out[n++] = id;
    }
    return n;
}

static void streaming_equals_whole(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_GOLDEN_FILES; i++) {
        struct model_tokenizer *t = golden_tokenizer(i);
        int32_t bytes[256], ids[200];
        size_t n_bytes = byte_tokens(t, bytes);
        assert_int_equal(n_bytes, 256);
        for (int round = 0; round < 3000; round++) {
            size_t n = test_range(&seed, 0, 199);
            uint32_t mix = test_range(&seed, 0, 4); /* 0: any ids; 4: bytes alone */
            for (size_t k = 0; k < n; k++)
                ids[k] = test_range(&seed, 0, 3) < mix
                             ? bytes[test_range(&seed, round % 2 ? 128 : 0, 255)]
                             : (int32_t)test_range(&seed, 0, model_tokenizer_size(t) - 1);
            check_stream(t, ids, n, round % 3 == 0);
        }
        model_tokenizer_close(t);
    }
}

/* Texts whose characters are all cut into bytes: each token one byte, emoji held until it is
 * whole. */
static void no_piece_ends_in_a_character(void **state)
{
    static const char text[] = "a\xF0\x9F\x98\x80\xED\x95\x9C\xC3\xA9z\xE2\x82";
    (void)state;
    for (size_t i = 0; i < N_GOLDEN_FILES; i++) {
        struct model_tokenizer *t = golden_tokenizer(i);
        int32_t bytes[256], ids[sizeof text - 1];
        byte_tokens(t, bytes);
        for (size_t k = 0; k < sizeof text - 1; k++)
            ids[k] = bytes[(unsigned char)text[k]];
        check_stream(t, ids, sizeof text - 1, false);
        check_stream(t, ids, sizeof text - 3, false);
        char *whole = NULL;
        size_t n = 0;
        struct baton_error e;
        test_ok(model_tokenizer_decode(t, ids, sizeof text - 3, false, &whole, &n, &e), &e);
        assert_int_equal(n, sizeof text - 3);
        assert_memory_equal(whole, text, n);
        free(whole);
        model_tokenizer_close(t);
    }
}

/* How bytes that form no character come out: one U+FFFD per broken part in byte-level text, one per
 * byte of the whole run in Gemma's. */
static void broken_bytes(void **state)
{
#define R "\xEF\xBF\xBD"
    static const struct {
        const char *bytes, *byte_level, *chain;
    } cases[] = {
        {"\xED\x95\x9C\xFF", "\xED\x95\x9C" R, R R R R},
        {"\xFF\x41\x42", R "AB", R R R},
        {"\xF0\x9F\x98", R, R R R},
        {"\xF0\x9F\x41", R "A", R R R},
        {"\xE0\x80\x41", R R "A", R R R},
        {"\xC3\xA9\x41\xC3", "\xC3\xA9\x41" R, R R R R},
        {"\xC3\xA9\x41\xC3\xA9", "\xC3\xA9\x41\xC3\xA9", "\xC3\xA9\x41\xC3\xA9"},
    };
#undef R
    (void)state;
    for (size_t i = 0; i < N_GOLDEN_FILES; i++) {
        struct model_tokenizer *t = golden_tokenizer(i);
        int32_t bytes[256], ids[8];
        byte_tokens(t, bytes);
        for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
            size_t n = strlen(cases[k].bytes), n_text;
            char *text = NULL;
            struct baton_error e;
            for (size_t b = 0; b < n; b++)
                ids[b] = bytes[(unsigned char)cases[k].bytes[b]];
            test_ok(model_tokenizer_decode(t, ids, n, false, &text, &n_text, &e), &e);
            assert_string_equal(text, i == 2 ? cases[k].chain : cases[k].byte_level);
            free(text);
            check_stream(t, ids, n, false);
        }
        model_tokenizer_close(t);
    }
}

static void bad_ids_are_refused(void **state)
{
    static const int32_t bad[] = {-1, -4085, INT32_MIN + 1, INT32_MIN};
    struct model_tokenizer *t = golden_tokenizer(0);
    struct model_detokenizer *d = NULL;
    struct baton_error e;
    (void)state;
    test_ok(model_detokenizer_open(t, false, &d, &e), &e);
    for (int i = 0; i < 4; i++) {
        int32_t ids[2] = {5, bad[i]};
        char *text = (char *)&e;
        const char *piece;
        size_t n = 7;
        test_fails(model_tokenizer_decode(t, ids, 2, false, &text, &n, &e), BATON_ERR_INPUT,
                   "token id", &e);
        assert_true(text == (char *)&e && n == 7); /* set on success only */
        test_fails(model_detokenizer_push(d, bad[i], &piece, &n, &e), BATON_ERR_INPUT, "token id",
                   &e);
    }
    model_detokenizer_close(d);
    model_tokenizer_close(t);
}

/* The models' embeddings have more rows than their tokenizers ids: such an id is no text, also
 * between the bytes of one character, and ends nothing. */
static void ids_of_no_token_are_no_text(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_GOLDEN_FILES; i++) {
        struct model_tokenizer *t = golden_tokenizer(i);
        int32_t bytes[256], size = (int32_t)model_tokenizer_size(t);
        byte_tokens(t, bytes);
        int32_t ids[] = {size, bytes[0xED], size + 5, bytes[0x95], INT32_MAX, bytes[0x9C], size};
        char *text = NULL;
        size_t n = 0;
        struct baton_error e;
        test_ok(model_tokenizer_decode(t, ids, 7, false, &text, &n, &e), &e);
        assert_string_equal(text, "\xED\x95\x9C");
        free(text);
        check_stream(t, ids, 7, false);
        check_stream(t, ids, 1, true);
        model_tokenizer_close(t);
    }
}

static void ids_are_checked_against_a_vocabulary(void **state)
{
    static const int32_t ids[] = {0, 4095, 7, 4096, -3};
    struct baton_error e;
    (void)state;
    test_ok(model_ids_check(ids, 3, 4096, &e), &e);
    test_ok(model_ids_check(NULL, 0, 0, &e), &e);
    test_fails(model_ids_check(ids, 5, 4096, &e), BATON_ERR_INPUT, "token id 4096", &e);
    test_fails(model_ids_check(ids + 4, 1, 4096, &e), BATON_ERR_INPUT, "token id -3", &e);
}

/* ---- text ---------------------------------------------------------------------------------- */

static void invalid_utf8_is_named(void **state)
{
    static const struct {
        const char *text;
        size_t n, at;
    } bad[] = {
        {"\x80", 1, 0},
        {"ab\xC3", 3, 2},
        {"ab\xC3(", 4, 2},
        {"\xC0\xAF", 2, 0},
        {"\xE0\x80\xAF", 3, 0},
        {"x\xED\xA0\x80", 4, 1},
        {"xy\xF4\x90\x80\x80", 6, 2},
        {"\xF0\x9F\x98", 3, 0},
        {"\xED\x95\x9C\xFF", 4, 3},
    };
    struct model_tokenizer *t = golden_tokenizer(0);
    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct baton_error e;
        int32_t *ids = NULL;
        size_t n;
        char where[32];
        snprintf(where, sizeof where, "UTF-8 at byte %zu", bad[i].at);
        test_fails(model_tokenizer_encode(t, bad[i].text, bad[i].n, true, &ids, &n, &e),
                   BATON_ERR_INPUT, where, &e);
        assert_null(ids);
    }
    model_tokenizer_close(t);
}

/* A megabyte of everything that could be slow, and the text comes back. Times are printed.
 * Sanitizers make it ten times slower, so they get less of it. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { LONG_TEXT = 1 << 17 };
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
enum { LONG_TEXT = 1 << 17 };
#else
enum { LONG_TEXT = 1 << 20 };
#endif
#else
enum { LONG_TEXT = 1 << 20 };
#endif

static void long_texts(void **state)
{
    static const char *const units[] = {
        "the quick brown fox jumps over it. ",
        " ",
        "\n",
        "a",
        "ab",
        "\xEA\xB0\x80",
        "\xED\x95\x9C\xEA\xB5\xAD ",
        "\xE2\x96\x81",
        "=-",
        "1",
        "<|im_",
        "<",
        "\xF0\x9F\x98\x80",
        " \n",
    };
    (void)state;
    for (size_t i = 0; i < N_GOLDEN_FILES; i++) {
        struct model_tokenizer *t = golden_tokenizer(i);
        double worst = 0;
        for (size_t u = 0; u < sizeof units / sizeof *units; u++) {
            size_t step = strlen(units[u]), n = LONG_TEXT / step * step, n_ids, n_text;
            char *text = malloc(n), *back = NULL;
            int32_t *ids = NULL;
            struct baton_error e;
            for (size_t k = 0; k < n; k += step)
                memcpy(text + k, units[u], step);
            uint64_t begin = base_now_ns();
            test_ok(model_tokenizer_encode(t, text, n, false, &ids, &n_ids, &e), &e);
            double s = (double)(base_now_ns() - begin) * 1e-9;
            worst = s > worst ? s : worst;
            test_ok(model_tokenizer_decode(t, ids, n_ids, false, &back, &n_text, &e), &e);
            if (strcmp(units[u], "\xE2\x96\x81") || i < 2) { /* Gemma's spaces are this sign */
                assert_int_equal(n_text, n);
                assert_memory_equal(back, text, n);
            }
            free(text);
            free(back);
            free(ids);
        }
        print_message("%s: %d KiB in %.2f s at most\n", golden_files[i].model, LONG_TEXT >> 10,
                      worst);
        model_tokenizer_close(t);
    }
}

/* Marks in reverse order are the worst case of canonical ordering; only NFC sees them. */
static void long_runs_of_marks(void **state)
{
    struct model_tokenizer *t = golden_tokenizer(0);
    enum { N = 200000 };
    char *text = malloc(4 * N);
    int32_t *ids = NULL, *again = NULL;
    size_t n_ids = 0, n_again = 0, half = N * 2;
    struct baton_error e;
    (void)state;
    for (size_t i = 0; i < N; i++) { /* classes 230 first, 220 behind: the order must turn round */
        memcpy(text + 2 * i, "\xCC\x81", 2);
        memcpy(text + half + 2 * i, "\xCC\xA3", 2);
    }
    test_ok(model_tokenizer_encode(t, text, 4 * N, false, &ids, &n_ids, &e), &e);
    for (size_t i = 0; i < N; i++) {
        memcpy(text + 2 * i, "\xCC\xA3", 2);
        memcpy(text + half + 2 * i, "\xCC\x81", 2);
    }
    test_ok(model_tokenizer_encode(t, text, 4 * N, false, &again, &n_again, &e), &e);
    assert_int_equal(n_ids, n_again);
    assert_memory_equal(ids, again, n_ids * sizeof *ids);
    free(text);
    free(ids);
    free(again);
    model_tokenizer_close(t);
}

/* ---- hostile files ------------------------------------------------------------------------- */

/* A small valid file whose parts a case replaces. */
struct parts {
    const char *added, *norm, *pre, *post, *decoder, *vocab, *merges, *options;
};
static const struct parts valid = {
    .added = "[{\"id\":4,\"content\":\"<s>\",\"special\":true}]",
    .norm = "null",
    .pre = "null",
    .post = "null",
    .decoder = "{\"type\":\"ByteLevel\"}",
    .vocab = "{\"a\":0,\"b\":1,\"ab\":2,\"c\":3}",
    .merges = "[[\"a\",\"b\"]]",
    .options = "\"type\":\"BPE\"",
};

static int parse(const struct parts *p, struct model_tokenizer **t, struct baton_error *e)
{
    size_t cap = 1024 + strlen(p->vocab) + strlen(p->merges) + strlen(p->added) + strlen(p->pre);
    char *json = malloc(cap);
    int n = snprintf(
        json, cap,
        "{\"added_tokens\":%s,\"normalizer\":%s,\"pre_tokenizer\":%s,"
        "\"post_processor\":%s,\"decoder\":%s,\"model\":{%s,\"vocab\":%s,\"merges\":%s}}",
        p->added, p->norm, p->pre, p->post, p->decoder, p->options, p->vocab, p->merges);
    assert_true(n > 0 && (size_t)n < cap);
    char *exact = malloc((size_t)n); /* no NUL behind it */
    memcpy(exact, json, (size_t)n);
    int rc = model_tokenizer_parse(exact, (size_t)n, "case", t, e);
    free(exact);
    free(json);
    return rc;
}

static void valid_parts_work(void **state)
{
    struct model_tokenizer *t = NULL;
    struct baton_error e;
    int32_t *ids = NULL;
    size_t n = 0;
    static const int32_t want[] = {2, 4, 3};
    (void)state;
    test_ok(parse(&valid, &t, &e), &e);
    test_ok(model_tokenizer_encode(t, "ab<s>cz", 7, false, &ids, &n, &e), &e);
    assert_int_equal(n, 3); /* z is in no vocabulary: gone */
    assert_memory_equal(ids, want, sizeof want);
    free(ids);
    model_tokenizer_close(t);
}

/* Every escape of JSON in the parts that the cursor reads. */
static void escaped_tokens(void **state)
{
    static const char text[] = "\xF0\x9F\x98\x80\xEA\xB0\x80\n\t\"\\/";
    struct parts p = valid;
    struct model_tokenizer *t = NULL;
    struct baton_error e;
    int32_t *ids = NULL;
    size_t n;
    (void)state;
    p.vocab = "{\"\\ud83D\\uDe00\":0,\"\\uac00\":1,\"\\n\":2,\"\\t\":3,\"\\\"\":5,\"\\\\\":6,"
              "\"\\/\":7,\"\\uac00\\n\":8}";
    p.merges = "[\"\\uAC00 \\u000a\"]";
    test_ok(parse(&p, &t, &e), &e);
    test_ok(model_tokenizer_encode(t, text, sizeof text - 1, false, &ids, &n, &e), &e);
    static const int32_t want[] = {0, 8, 3, 5, 6, 7};
    assert_int_equal(n, 6);
    assert_memory_equal(ids, want, sizeof want);
    free(ids);
    model_tokenizer_close(t);
}

/* Unknown characters: gone, one token each, or one for a run of them; as bytes where all the
 * bytes have tokens. */
static void unknown_characters(void **state)
{
#define VOCAB "{\"a\":0,\"b\":1,\"ab\":2,\"?\":3,\"<0x79>\":5,\"<0xC3>\":6}"
    static const struct {
        const char *options;
        int32_t want[8];
        size_t n;
    } cases[] = {
        {"\"type\":\"BPE\"", {0, 2}, 2},
        {"\"type\":\"BPE\",\"unk_token\":\"?\"", {3, 3, 0, 3, 3, 2, 3}, 7},
        {"\"type\":\"BPE\",\"unk_token\":\"?\",\"fuse_unk\":true", {3, 0, 3, 2, 3}, 5},
        {"\"type\":\"BPE\",\"unk_token\":\"?\",\"byte_fallback\":true", {3, 0, 3, 3, 2, 5}, 6},
    };
    static const char text[] = "xxaxzaby", with_bytes[] = "xaxzaby";
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct parts p = valid;
        struct model_tokenizer *t = NULL;
        struct baton_error e;
        int32_t *ids = NULL;
        size_t n;
        p.vocab = VOCAB;
        p.options = cases[i].options;
        test_ok(parse(&p, &t, &e), &e);
        const char *s = i == 3 ? with_bytes : text;
        test_ok(model_tokenizer_encode(t, s, strlen(s), false, &ids, &n, &e), &e);
        assert_int_equal(n, cases[i].n);
        assert_memory_equal(ids, cases[i].want, n * sizeof *ids);
        free(ids);
        model_tokenizer_close(t);
    }
#undef VOCAB
}

#define REGEX(r) "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" r "\"},\"behavior\":\"Isolated\"}"
#define STEP8(s) s "," s "," s "," s "," s "," s "," s "," s

static const struct {
    struct parts p;
    const char *word; /* of the error */
} hostile[] = {
    {{.vocab = "[]"}, "vocab"},
    {{.vocab = "{}", .added = "[]"}, "empty"},
    {{.vocab = "{\"a\":-1}"}, "id of token \"a\""},
    {{.vocab = "{\"a\":4194304}"}, "id of token \"a\""},
    {{.vocab = "{\"a\":99999999999999999999}"}, "id of token \"a\""},
    {{.vocab = "{\"a\":1.5}"}, "id of token \"a\""},
    {{.vocab = "{\"a\":1e3}"}, "id of token \"a\""},
    {{.vocab = "{\"a\":01}"}, "id of token \"a\""},
    {{.vocab = "{\"a\":\"0\"}"}, "id of token \"a\""},
    {{.vocab = "{\"a\":0,\"b\":0}"}, "two tokens have the id 0"},
    {{.vocab = "{\"a\":0,\"a\":1}"}, "two ids"},
    {{.vocab = "{\"a\":0,}"}, "comma"},
    {{.vocab = "{\"a\":0 \"b\":1}"}, "id of token \"a\""},
    {{.vocab = "{\"a\\u0000\":0}"}, "NUL"},
    {{.vocab = "{\"\\ud800\":0}"}, "escape"},
    {{.vocab = "{\"\\q\":0}"}, "escape"},
    {{.vocab = "{\"\n\":0}"}, "string"},
    {{.vocab = "{\"\\uZZZZ\":0}"}, "hex"},
    {{.merges = "{}"}, "merges"},
    {{.merges = "[[\"a\",\"b\",\"c\"]]"}, "expected"},
    {{.merges = "[[\"a\"]]"}, "expected"},
    {{.merges = "[[1,2]]"}, "expected"},
    {{.merges = "[7]"}, "expected"},
    {{.merges = "[\"ab\"]"}, "pair"},
    {{.merges = "[\"a b c\"]"}, "pair"},
    {{.merges = "[\"a \"]"}, "cycle"},
    {{.merges = "[[\"\",\"b\"]]"}, "cycle"},
    {{.merges = "[[\"a\",\"\"]]"}, "cycle"},
    {{.merges = "[[\"a\",\"z\"]]"}, "\"z\" is not in the vocabulary"},
    {{.merges = "[[\"ab\",\"ab\"]]"}, "\"abab\" is not in the vocabulary"},
    {{.options = "\"type\":\"Unigram\""}, "Unigram"},
    {{.options = "\"x\":1"}, "type"},
    {{.options = "\"type\":\"BPE\",\"dropout\":0.1"}, "dropout"},
    {{.options = "\"type\":\"BPE\",\"end_of_word_suffix\":\"</w>\""}, "end_of_word_suffix"},
    {{.options = "\"type\":\"BPE\",\"continuing_subword_prefix\":\"##\""}, "continuing_subword"},
    {{.options = "\"type\":\"BPE\",\"unk_token\":\"?\""}, "unk_token"},
    {{.options = "\"type\":\"BPE\",\"byte_fallback\":1"}, "byte_fallback"},
    {{.options = "\"type\":\"BPE\",\"vocab\":{}"}, "case"},
    {{.added = "{}"}, "added_tokens"},
    {{.added = "[7]"}, "content"},
    {{.added = "[{\"content\":\"x\"}]"}, "id of token \"x\""},
    {{.added = "[{\"id\":9,\"content\":\"\"}]"}, "bytes"},
    {{.added = "[{\"id\":4194304,\"content\":\"x\"}]"}, "id of token \"x\""},
    {{.added = "[{\"id\":0,\"content\":\"x\"}]"}, "two tokens have the id 0"},
    {{.added = "[{\"id\":9,\"content\":\"a\"}]"}, "two ids"},
    {{.added = "[{\"id\":9,\"content\":\"x\"},{\"id\":9,\"content\":\"x\"}]"}, "two ids"},
    {{.added = "[{\"id\":9,\"content\":\"x\",\"special\":\"yes\"}]"}, "special"},
    {{.norm = "7"}, "type"},
    {{.norm = "{\"type\":\"NFKC\"}"}, "NFKC"},
    {{.norm = "{\"type\":\"Sequence\"}"}, "normalizers"},
    {{.norm = "{\"type\":\"Replace\",\"pattern\":{\"Regex\":\"a\"},\"content\":\"b\"}"}, "String"},
    {{.norm = "{\"type\":\"Replace\",\"pattern\":{\"String\":\"\"},\"content\":\"b\"}"},
     "empty pattern"},
    {{.norm = "{\"type\":\"Sequence\",\"normalizers\":[" STEP8(
          "{\"type\":\"NFC\"}") ",{\"type\":\"NFC\"}]}"},
     "more than 8"},
    {{.pre = "{\"type\":\"Metaspace\"}"}, "Metaspace"},
    {{.pre = REGEX("(")}, "does not compile"},
    {{.pre = REGEX("a*")}, "matches the empty"},
    {{.pre = REGEX("a|")}, "matches the empty"},
    {{.pre = REGEX("\\\\d+")}, "escape"},
    {{.pre = REGEX("\\\\p{Lu}")}, "property"},
    {{.pre = REGEX("[a[b]]")}, "class inside a class"},
    {{.pre = REGEX("[a&&b]")}, "&&"},
    {{.pre = REGEX("(?<=a)b")}, "group"},
    {{.pre = REGEX("(*MARK)b")}, "(*"},
    {{.pre = REGEX("a{,3}")}, "{"},
    {{.pre = REGEX("a.b")}, "^, $ or ."},
    {{.pre = REGEX("a\\\\")}, "lone"},
    {{.pre = "{\"type\":\"Split\",\"pattern\":{\"String\":\"a\"},\"behavior\":\"Odd\"}"}, "Odd"},
    {{.pre = "{\"type\":\"ByteLevel\"}"}, "add_prefix_space"},
    {{.decoder = "null"}, "decoder"},
    {{.decoder = "{\"type\":\"WordPiece\"}"}, "WordPiece"},
    {{.decoder =
          "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Fuse\"},{\"type\":\"ByteFallback\"}]}"},
     "in this place"},
    {{.decoder = "{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"ByteFallback\"}]}"}, "Fuse"},
    {{.post = "{\"type\":\"BertProcessing\"}"}, "BertProcessing"},
    {{.post = "{\"type\":\"TemplateProcessing\",\"single\":[]}"}, "single"},
    {{.post = "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"s\"}}]}"},
     "no ids"},
    {{.post = "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"s\"}},{"
              "\"Sequence\":"
              "{\"id\":\"A\"}}],\"special_tokens\":{\"s\":{\"ids\":[17]}}}"},
     "17"},
};

static void hostile_files_are_named(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof hostile / sizeof *hostile; i++) {
        struct parts p = valid;
        const struct parts *h = &hostile[i].p;
#define TAKE(field) p.field = h->field ? h->field : p.field
        TAKE(added);
        TAKE(norm);
        TAKE(pre);
        TAKE(post);
        TAKE(decoder);
        TAKE(vocab);
        TAKE(merges);
        TAKE(options);
#undef TAKE
        struct baton_error e;
        struct model_tokenizer *t = NULL;
        memset(&e, 0, sizeof e);
        int rc = parse(&p, &t, &e);
        if (rc != BATON_ERR_INPUT || t || !strstr(e.text, hostile[i].word) || strchr(e.text, '\n'))
            fail_msg("case %zu: %d '%s', wanted '%s'", i, rc, e.text, hostile[i].word);
    }
}

/* Every prefix of a valid file is refused, whatever it ends in; so is every byte changed, or it
 * still loads: in both cases nothing else happens. */
static void cut_and_changed_files(void **state)
{
    static const char json[] =
        "{\"added_tokens\":[{\"id\":4,\"content\":\"<s>\",\"special\":true,\"lstrip\":true}],"
        "\"normalizer\":"
        "{\"type\":\"NFC\"},\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[" REGEX(
            "\\\\s+|\\\\p{L}") ",{\"type\":\"ByteLevel\",\"add_prefix_space\":false}]},\"post_"
                               "processor\":null,\"decoder\":{\"type\":"
                               "\"ByteLevel\"},\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,"
                               "\"b\":1,\"\\u0061b\":2},\"merges\":[\"a b\"]}}";
    struct baton_error e;
    struct model_tokenizer *t = NULL;
    (void)state;
    test_ok(model_tokenizer_parse(json, sizeof json - 1, "whole", &t, &e), &e);
    model_tokenizer_close(t);
    for (size_t n = 0; n < sizeof json - 1; n++) {
        char *exact = malloc(n ? n : 1);
        memcpy(exact, json, n);
        t = NULL;
        assert_int_equal(model_tokenizer_parse(exact, n, "cut", &t, &e), BATON_ERR_INPUT);
        assert_null(t);
        free(exact);
    }
    for (int round = 0; round < 3000; round++) {
        char copy[sizeof json];
        memcpy(copy, json, sizeof json);
        for (uint32_t k = test_range(&seed, 1, 3); k > 0; k--)
            copy[test_range(&seed, 0, sizeof json - 2)] = (char)test_range(&seed, 0, 255);
        t = NULL;
        if (model_tokenizer_parse(copy, sizeof json - 1, "changed", &t, &e) == 0) {
            int32_t *ids = NULL;
            size_t n;
            if (model_tokenizer_encode(t, "ab <s> b\n", 9, true, &ids, &n, &e) == 0)
                free(ids);
            model_tokenizer_close(t);
        }
    }
}

/* A million merges: refused by count, before memory is spent on them. */
static void too_many_merges(void **state)
{
    enum { N = 1000000 };
    char *merges = malloc(N * 10 + 3), *at = merges;
    struct parts p = valid;
    struct model_tokenizer *t = NULL;
    struct baton_error e;
    (void)state;
    *at++ = '[';
    for (int i = 0; i < N; i++)
        at += sprintf(at, "%s\"a b\"", i ? "," : "");
    strcpy(at, "]");
    p.merges = merges;
    test_fails(parse(&p, &t, &e), BATON_ERR_INPUT, "more than 786432 merges", &e);
    assert_null(t);
    free(merges);
}

static void missing_files(void **state)
{
    struct baton_error e;
    struct model_tokenizer *t = NULL;
    char dir[256];
    (void)state;
    folder_make(dir);
    test_fails(model_tokenizer_open(dir, &t, &e), BATON_ERR_IO, "tokenizer.json", &e);
    put_text(dir, "tokenizer.json", "");
    test_fails(model_tokenizer_open(dir, &t, &e), BATON_ERR_INPUT, "tokenizer.json", &e);
    put_text(dir, "tokenizer.json", "{\"model\":{\"vocab\":{\"\xFF\":0}}}");
    test_fails(model_tokenizer_open(dir, &t, &e), BATON_ERR_INPUT, "UTF-8 at byte 20", &e);
    folder_remove(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(goldens),
        cmocka_unit_test(lookups),
        cmocka_unit_test(streaming_equals_whole),
        cmocka_unit_test(no_piece_ends_in_a_character),
        cmocka_unit_test(broken_bytes),
        cmocka_unit_test(bad_ids_are_refused),
        cmocka_unit_test(ids_of_no_token_are_no_text),
        cmocka_unit_test(ids_are_checked_against_a_vocabulary),
        cmocka_unit_test(invalid_utf8_is_named),
        cmocka_unit_test(long_texts),
        cmocka_unit_test(long_runs_of_marks),
        cmocka_unit_test(valid_parts_work),
        cmocka_unit_test(escaped_tokens),
        cmocka_unit_test(unknown_characters),
        cmocka_unit_test(hostile_files_are_named),
        cmocka_unit_test(cut_and_changed_files),
        cmocka_unit_test(too_many_merges),
        cmocka_unit_test(missing_files),
    };
    seed = test_seed();
    return cmocka_run_group_tests_name("model-tokenizer", tests, NULL, NULL);
}
