/* SPDX-License-Identifier: Apache-2.0 */
/* Folders: what opens, and each way in which config and tensors can disagree. */
#include "device/device.h"
#include "folder.h"

#define I BATON_ERR_INPUT
#define QWEN3 "tests/golden/edge/qwen3-headdim128"
#define SHARDED "tests/golden/edge/qwen3-sharded3"
#define Q_PROJ "model.layers.1.self_attn.q_proj.weight"

/* A copy of an edge model's configuration; the test writes the weights. */
static void copy_config(const char *dir, const char *source)
{
    size_t n;
    char path[256];
    snprintf(path, sizeof path, "%s/config.json", source);
    char *text = get_text(test_path(path), &n);
    put_file(dir, "config.json", text, n);
    free(text);
}

static void open_source(struct edit *x, const char *source)
{
    char path[256];
    snprintf(path, sizeof path, "%s/model.safetensors", source);
    edit_open(x, test_path(path));
}

static int open_folder(const char *dir, struct model **m, struct baton_error *e)
{
    *m = NULL;
    int rc = model_open(dir, m, e);
    assert_true((rc == 0) == (*m != NULL));
    return rc;
}

static void opens(const char *dir, uint64_t params)
{
    struct baton_error e;
    struct model *m;
    test_ok(open_folder(dir, &m, &e), &e);
    assert_string_equal(model_path(m), dir);
    assert_false(model_is_shape(m));
    if (params)
        assert_int_equal(model_n_params(m), params);
    model_close(m);
}

static void everything_opens(void **state)
{
    static const char *const edge[] = {
        "qwen3-headdim128",    "qwen3-sharded3",       "llama-headdim80-vocab1003",
        "llama-fp32-tied",     "llama-attention-bias", "gemma3-window8-headdim256",
        "gemma3-rope-linear8",
    };
    for (size_t i = 0; i < sizeof edge / sizeof *edge; i++) {
        char path[256];
        snprintf(path, sizeof path, "tests/golden/edge/%s", edge[i]);
        opens(test_path(path), 0);
    }
    opens(test_path("models/qwen3-tiny"), 4329664);
    opens(test_path("models/qwen3-small"), 6821120);
    opens(test_path("models/koni-tiny"), 5311680);
    opens(test_path("models/gemma3-tiny"), 5655552);
}

static void missing_files(void **state)
{
    struct baton_error e;
    struct model *m;
    char dir[256];
    folder_make(dir);
    test_fails(open_folder(in(dir, "none"), &m, &e), BATON_ERR_IO, "none/config.json", &e);
    test_fails(open_folder(dir, &m, &e), BATON_ERR_IO, "config.json", &e);
    copy_config(dir, QWEN3);
    test_fails(open_folder(dir, &m, &e), I, "neither model.safetensors nor", &e);
    put_text(dir, "config.json", "{");
    test_fails(open_folder(dir, &m, &e), I, "config.json", &e);
    test_fails(open_folder("model.gguf", &m, &e), BATON_ERR_UNSUPPORTED, "GGUF", &e);
    copy_config(dir, QWEN3);
    put_text(dir, "generation_config.json", "{\"eos_token_id\":[2,");
    test_fails(open_folder(dir, &m, &e), I, "generation_config.json", &e);
    folder_remove(dir);
}

/* One tensor of a good checkpoint spoilt at a time. */
static void mismatches(void **state)
{
    struct baton_error e;
    struct model *m;
    struct edit x;
    char dir[256];
    static uint8_t zeros[1 << 20];
    folder_make(dir);
    copy_config(dir, QWEN3);
    open_source(&x, QWEN3);
    const char *file = in(dir, "model.safetensors");
    char path[512];
    snprintf(path, sizeof path, "%s", file);

    struct model_tensor *q = edit_find(&x, Q_PROJ), good = *q;
    write_tensors(path, x.list, x.n, 0);
    opens(dir, 0);

    q->shape[0] = good.shape[1]; /* [256, 64] -> [64, 256]: the same bytes, and wrong */
    q->shape[1] = good.shape[0];
    write_tensors(path, x.list, x.n, 0);
    test_fails(open_folder(dir, &m, &e), I, Q_PROJ " is [64, 256], config.json makes it [256, 64]",
               &e);
    *q = good;
    q->n_dims = 1;
    q->shape[0] = good.shape[0] * good.shape[1];
    write_tensors(path, x.list, x.n, 0);
    test_fails(open_folder(dir, &m, &e), I, Q_PROJ " is [16384]", &e);
    *q = good;
    q->n_dims = 3;
    q->shape[2] = 1;
    write_tensors(path, x.list, x.n, 0);
    test_fails(open_folder(dir, &m, &e), I, "[256, 64, 1]", &e);
    *q = good;
    q->dtype = MODEL_I32;
    q->data = zeros;
    q->bytes *= 2;
    write_tensors(path, x.list, x.n, 0);
    test_fails(open_folder(dir, &m, &e), I, Q_PROJ " [256, 64] has dtype I32", &e);
    *q = good;
    q->name = "model.layers.1.self_attn.query.weight";
    write_tensors(path, x.list, x.n, 0);
    test_fails(open_folder(dir, &m, &e), I, Q_PROJ " [256, 64] is missing", &e);
    *q = good;

    /* F32 and F16 of the right shape are weights too; the rest of the file stays bf16. */
    q->dtype = BATON_F32;
    q->data = zeros;
    q->bytes *= 2;
    write_tensors(path, x.list, x.n, 0);
    opens(dir, 0);
    *q = good;
    q->dtype = BATON_F16;
    write_tensors(path, x.list, x.n, 0);
    opens(dir, 0);
    *q = good;

    /* What the model does not read is left alone. */
    x.list[x.n++] = (struct model_tensor){.name = "lm_head.weight",
                                          .dtype = BATON_BF16,
                                          .n_dims = 1,
                                          .shape = {4},
                                          .data = zeros,
                                          .bytes = 8};
    x.list[x.n++] = (struct model_tensor){.name = "model.layers.0.self_attn.rotary_emb.inv_freq",
                                          .dtype = BATON_F32,
                                          .n_dims = 1,
                                          .shape = {2},
                                          .data = zeros,
                                          .bytes = 8};
    write_tensors(path, x.list, x.n, 0);
    opens(dir, 0);

    /* A bit cut off the end. */
    size_t n;
    char *text = get_text(path, &n);
    put_file(dir, "model.safetensors", text, n - 1);
    free(text);
    test_fails(open_folder(dir, &m, &e), I, "truncated", &e);
    edit_close(&x);
    folder_remove(dir);
}

/* config.json asks for what the file does not have, or denies what it has. */
static void config_disagrees(void **state)
{
    static const struct {
        const char *from, *to, *word;
    } list[] = {
        {"\"num_hidden_layers\": 3", "\"num_hidden_layers\": 4",
         "model.layers.3.input_layernorm.weight [64] is missing"},
        {"\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2",
         "model.layers.2.input_layernorm.weight [64] has no place"},
        {"\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false",
         "lm_head.weight [512, 64] is missing"},
        {"\"attention_bias\": false", "\"attention_bias\": true",
         "self_attn.k_proj.bias [128] is missing"},
        {"\"vocab_size\": 512", "\"vocab_size\": 513",
         "model.embed_tokens.weight is [512, 64], config.json makes it [513, 64]"},
        {"\"intermediate_size\": 160", "\"intermediate_size\": 161",
         "down_proj.weight is [64, 160]"},
        {"\"head_dim\": 128", "\"head_dim\": 64", "is [128]"},
    };
    struct baton_error e;
    struct model *m;
    struct edit x;
    char dir[256];
    size_t n;
    folder_make(dir);
    open_source(&x, QWEN3);
    write_tensors(in(dir, "model.safetensors"), x.list, x.n, 0);
    char *text = get_text(test_path(QWEN3 "/config.json"), &n);
    for (size_t i = 0; i < sizeof list / sizeof *list; i++) {
        char *at = strstr(text, list[i].from), edited[4096];
        assert_non_null(at);
        snprintf(edited, sizeof edited, "%.*s%s%s", (int)(at - text), text, list[i].to,
                 at + strlen(list[i].from));
        put_text(dir, "config.json", edited);
        test_fails(open_folder(dir, &m, &e), I, list[i].word, &e);
    }
    free(text);
    edit_close(&x);
    folder_remove(dir);
}

static void shards(void **state)
{
    static const char *const outside[] = {"../x.safetensors", "/etc/passwd", "a/b", "..", ""};
    struct baton_error e;
    struct model *m;
    char dir[256], path[512], text[8192];
    size_t n;
    folder_make(dir);
    copy_config(dir, SHARDED);
    char *index = get_text(test_path(SHARDED "/model.safetensors.index.json"), &n);
    put_file(dir, "model.safetensors.index.json", index, n);
    test_fails(open_folder(dir, &m, &e), I, "shard model-0000", &e);
    for (int i = 1; i <= 3; i++) {
        snprintf(path, sizeof path, SHARDED "/model-%05d-of-00003.safetensors", i);
        char *bytes = get_text(test_path(path), &n);
        put_file(dir, strrchr(path, '/') + 1, bytes, n);
        free(bytes);
    }
    opens(dir, 0);
    unlink(in(dir, "model-00002-of-00003.safetensors"));
    test_fails(open_folder(dir, &m, &e), I, "shard model-00002-of-00003.safetensors", &e);
    for (size_t i = 0; i < sizeof outside / sizeof *outside; i++) {
        snprintf(text, sizeof text, "{\"weight_map\":{\"a\":\"%s\"}}", outside[i]);
        put_text(dir, "model.safetensors.index.json", text);
        test_fails(open_folder(dir, &m, &e), I, "no file name in this folder", &e);
    }
    put_text(dir, "model.safetensors.index.json", "{\"weight_map\":{\"a\":3}}");
    test_fails(open_folder(dir, &m, &e), I, "(no text)", &e);
    put_text(dir, "model.safetensors.index.json", "{\"weight_map\":[]}");
    test_fails(open_folder(dir, &m, &e), I, "no weight_map", &e);
    put_text(dir, "model.safetensors.index.json", "{\"weight_map\":");
    test_fails(open_folder(dir, &m, &e), I, "index.json", &e);
    put_text(dir, "model.safetensors.index.json", "{\"weight_map\":{}}");
    test_fails(open_folder(dir, &m, &e), I, "is missing", &e);
    /* The index is right about the files, and wrong about what is in them. */
    char *at = strstr(index, "model-00001");
    assert_non_null(at);
    memcpy(at, "model-00003", 11);
    put_text(dir, "model.safetensors.index.json", index);
    snprintf(path, sizeof path, SHARDED "/model-00002-of-00003.safetensors");
    char *bytes = get_text(test_path(path), &n);
    put_file(dir, "model-00002-of-00003.safetensors", bytes, n);
    test_fails(open_folder(dir, &m, &e), I, "model-00003-of-00003.safetensors: tensor model.", &e);
    free(bytes);
    free(index);
    folder_remove(dir);
}

/* ---- Gemma 3 with a vision tower ------------------------------------------------------------ */

/* Logits of one token through cpu:ref, with zeroed pages of 64 positions for each layer. */
static void run_token(struct model *m, int32_t id, float *logits)
{
    struct baton_error e;
    const struct model_config *c = model_config_of(m);
    struct device *d;
    struct device_program *p;
    struct model_bound *b;
    static float k[64 * 1024], v[64 * 1024];
    static struct baton_kv_view views[MODEL_MAX_LAYERS];
    int32_t block = 0;
    uint32_t row = 0;
    struct baton_kv_layout layout = {.version = 1,
                                     .dtype = BATON_F32,
                                     .kind = BATON_KV_PAGED,
                                     .alignment = 4,
                                     .kv_heads = c->kv_heads,
                                     .head_dim = c->head_dim,
                                     .head_dim_padded = c->head_dim,
                                     .block = 64,
                                     .stride_head = (int64_t)(64 * c->head_dim * 4),
                                     .stride_position = (int64_t)(c->head_dim * 4),
                                     .stride_dim = 4};
    layout.stride_block = layout.stride_head * c->kv_heads;
    assert_true(layout.stride_block <= (int64_t)sizeof k);
    for (uint32_t l = 0; l < c->n_layers; l++) /* layers share: each appends before it reads */
        views[l] = (struct baton_kv_view){&layout, (uint8_t *)k, (uint8_t *)v, &block, 1, 0, 0};
    struct baton_span span = {.n_rows = 1, .kv = views};
    struct baton_batch batch = {.ids = &id,
                                .n_rows = 1,
                                .spans = &span,
                                .n_spans = 1,
                                .logit_rows = &row,
                                .n_logits = 1,
                                .logits = logits};
    test_ok(device_open("cpu:ref", &d, &e), &e);
    test_ok(device_start(d, 1, &e), &e);
    test_ok(model_bind(m, d, NULL, NULL, &b, &e), &e);
    assert_true(model_bound_bytes(b) >= model_n_params(m) * 4);
    test_ok(device_program_open(d, model_graph(b), &p, &e), &e);
    test_ok(device_submit(p, &batch, NULL, &e), &e);
    device_program_close(p);
    model_unbind(b);
    device_close(d);
}

/* The text model of a conditional checkpoint computes what the plain one does. */
static void conditional(void **state)
{
    static const char *const prefixes[][2] = {{"language_model.model.", "language_model."},
                                              {"model.language_model.", ""}};
    struct baton_error e;
    struct model *plain, *m;
    struct model_identity a, b;
    static float want[512], got[512];
    static char names[600][128];
    static uint8_t zeros[64];
    char dir[256], config[4096];
    size_t n;
    const char *source = "tests/golden/edge/gemma3-rope-linear8";
    test_ok(model_open(test_path(source), &plain, &e), &e);
    run_token(plain, 17, want);
    test_ok(model_hash(plain, 1, true, NULL, NULL, &a, &e), &e);
    folder_make(dir);
    char *text = get_text(test_path("tests/golden/edge/gemma3-rope-linear8/config.json"), &n);
    snprintf(config, sizeof config,
             "{\"architectures\":[\"Gemma3ForConditionalGeneration\"],\"text_config\":%s}", text);
    put_text(dir, "config.json", config);
    for (size_t i = 0; i < 2; i++) {
        struct edit x;
        open_source(&x, source);
        for (size_t t = 0; t < x.n; t++) {
            assert_int_equal(strncmp(x.list[t].name, "model.", 6), 0);
            snprintf(names[t], sizeof names[t], "%s%s", prefixes[i][0], x.list[t].name + 6);
            x.list[t].name = names[t];
        }
        x.list[x.n++] = (struct model_tensor){.name = "vision_tower.x",
                                              .dtype = BATON_F32,
                                              .n_dims = 1,
                                              .shape = {16},
                                              .data = zeros,
                                              .bytes = 64};
        write_tensors(in(dir, "model.safetensors"), x.list, x.n, 0);
        test_ok(open_folder(dir, &m, &e), &e);
        run_token(m, 17, got);
        assert_memory_equal(got, want, sizeof want);
        test_ok(model_hash(m, 2, true, NULL, NULL, &b, &e), &e);
        assert_memory_equal(a.weights, b.weights, 32);
        assert_memory_equal(a.arch, b.arch, 32);
        assert_true(memcmp(a.pin, b.pin, 32) != 0);
        model_close(m);
        edit_find(&x, names[3])->name = "model.elsewhere";
        write_tensors(in(dir, "model.safetensors"), x.list, x.n, 0);
        test_fails(open_folder(dir, &m, &e), I, prefixes[i][0], &e);
        edit_close(&x);
    }
    free(text);
    model_close(plain);
    folder_remove(dir);
}

/* A header of odd length puts every tensor at an odd address; nothing may change. */
static void misaligned(void **state)
{
    struct baton_error e;
    struct model *plain, *m;
    struct edit x;
    static float want[512], got[512];
    char dir[256];
    test_ok(model_open(test_path(QWEN3), &plain, &e), &e);
    run_token(plain, 3, want);
    folder_make(dir);
    copy_config(dir, QWEN3);
    open_source(&x, QWEN3);
    for (unsigned pad = 1; pad < 4; pad += 2) {
        write_tensors(in(dir, "model.safetensors"), x.list, x.n, pad);
        test_ok(open_folder(dir, &m, &e), &e);
        run_token(m, 3, got);
        assert_memory_equal(got, want, sizeof want);
        model_close(m);
    }
    edit_close(&x);
    model_close(plain);
    folder_remove(dir);
}

/* ---- binding -------------------------------------------------------------------------------- */

struct told {
    uint64_t done, all;
    unsigned calls;
};

static void tell(void *ctx, uint64_t done, uint64_t all)
{
    struct told *t = ctx;
    assert_true(done >= t->done && done <= all);
    *t = (struct told){done, all, t->calls + 1};
}

static void graph(void **state)
{
    struct baton_error e;
    struct model *m;
    struct model_bound *b;
    struct device *d;
    struct told told = {0};
    test_ok(model_open(test_path("models/gemma3-tiny"), &m, &e), &e);
    test_ok(device_open("cpu:ref", &d, &e), &e);
    test_ok(model_bind(m, d, tell, &told, &b, &e), &e);
    assert_true(told.done == told.all && told.all == model_weight_bytes(m) && told.calls == 340);
    const struct device_graph *g = model_graph(b);
    assert_int_equal(g->n_layers, 26);
    assert_int_equal(g->vocab, 4091);
    assert_int_equal(g->max_cols, 256);
    /* x, h, y, selected: 128; q, o: 256; k, v: 128; gate, up: 256 */
    assert_int_equal(g->scratch_cols, 4 * 128 + 2 * 256 + 2 * 128 + 2 * 256);
    model_unbind(b);
    device_close(d);
    model_close(m);
    model_unbind(NULL);
    model_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(everything_opens), cmocka_unit_test(missing_files),
        cmocka_unit_test(mismatches),       cmocka_unit_test(config_disagrees),
        cmocka_unit_test(shards),           cmocka_unit_test(conditional),
        cmocka_unit_test(misaligned),       cmocka_unit_test(graph),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
