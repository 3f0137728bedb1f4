/* Memory that runs out: every public call with its n-th allocation failing, once alone and once with all
 * later ones. It must fail with QX_E_NOMEM, hand out nothing, and leave no block behind.
 *
 * usage: oom [--all] [CASE...]      short form: at most TRIES values of n a case, spread over all */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "alloc.h"
#include "both.h"
#include "ckpt.h"
#include "rows.h"
#include "str.h"

#define TRIES 120

/* The linker sends syncs here: a disk's pace has no part in this. */
int __wrap_fsync(int fd);
int __wrap_fsync(int fd)
{
    (void)fd;
    return 0;
}

int __wrap_fdatasync(int fd);
int __wrap_fdatasync(int fd)
{
    (void)fd;
    return 0;
}

/* What a case works on: made before memory is short. */
static struct {
    const char *data, *sample;
    char path[512];   /* of the checkpoint of the case */
    char broken[64];  /* a directory with a fault of every kind */
    char hub[80];     /* one that was downloaded, with the hub's records and no defaults for generation */
    char *tok_text;   /* tokenizer.json of the sample */
    size_t tok_n;
    struct qx_ckpt *open;
    struct qx_tok *tok;
} in;

/* Stands for the layout of in.hub. */
#define DOWNLOADED "downloaded"

struct attempt { const char *name; int (*run)(struct qx_error *err); const char *layout; enum needs { NOTHING, OPEN, TOK, ARCHIVE } needs; };

static int run_open(struct qx_error *err)
{
    struct qx_ckpt *ck;
    struct qx_open how = QX_OPEN_DEFAULT;
    how.n_threads = 1;
    int rc = qx_ckpt_open(&ck, in.path, &how, err);
    if (rc && ck) {
        return 1; /* an object was handed out on failure */
    }
    qx_ckpt_close(ck);
    return rc;
}

static int run_open_parallel(struct qx_error *err)
{
    struct qx_ckpt *ck;
    struct qx_open how = QX_OPEN_DEFAULT;
    how.n_threads = 3;
    int rc = qx_ckpt_open(&ck, in.path, &how, err);
    qx_ckpt_close(ck);
    return rc;
}

static int run_table(struct qx_error *err)
{
    struct qx_rows *r;
    uint64_t rows[] = {0, 5, 0, 1};
    float out[4 * 1024];
    int rc = qx_rows_open_table(&r, in.open, err);
    if (!rc && qx_rows_width(r) <= 1024) {
        rc = qx_rows_read(r, rows, 4, QX_ROW_F32, out, err);
    }
    qx_rows_close(r);
    return rc;
}

static int run_tensor(struct qx_error *err)
{
    struct qx_rows *r;
    uint64_t rows[] = {0, 1, 2, 1};
    float out[4 * 1024];
    int rc = qx_rows_open_tensor(&r, in.open, "model.language_model.layers.0.mlp.experts.1.down_proj.weight", err);
    if (!rc && qx_rows_width(r) <= 1024) {
        rc = qx_rows_read(r, rows, 4, QX_ROW_F32, out, err);
    }
    qx_rows_close(r);
    return rc;
}

static int verify(enum qx_verify_level level, struct qx_error *err)
{
    struct qx_verify *v;
    struct qx_verify_opts o = QX_VERIFY_DEFAULT;
    o.level = level;
    o.sample_rows = 2;
    o.n_threads = 1;
    int rc = qx_verify_run(&v, in.open, &o, err);
    qx_verify_free(v);
    return rc;
}

static int run_verify_headers(struct qx_error *err)
{
    return verify(QX_VERIFY_HEADERS, err);
}

static int run_verify_scales(struct qx_error *err)
{
    return verify(QX_VERIFY_SCALES, err);
}

static int run_verify_full(struct qx_error *err)
{
    return verify(QX_VERIFY_FULL, err);
}

static int ignore(void *user, const char *text, uint64_t n)
{
    (void)user;
    (void)text;
    (void)n;
    return 0;
}

/* Compares one list while it writes another. */
static int run_verify_hub(struct qx_error *err)
{
    struct qx_verify *v;
    struct qx_verify_opts o = QX_VERIFY_DEFAULT;
    o.level = QX_VERIFY_HEADERS;
    o.n_threads = 1;
    o.hub = true;
    o.manifest_out = ignore;
    int rc = qx_verify_run(&v, in.open, &o, err);
    qx_verify_free(v);
    return rc;
}

static int run_defaults(struct qx_error *err)
{
    struct qx_gen_defaults d;
    return qx_gen_defaults_read(in.open, &d, err);
}

static int run_tok_parse(struct qx_error *err)
{
    struct qx_tok *t;
    int rc = qx_tok_parse(&t, in.tok_text, in.tok_n, "tokenizer.json", NULL, 0, err);
    qx_tok_close(t);
    return rc;
}

static int run_tok_encode(struct qx_error *err)
{
    static const char text[] = "In the beginning God created the heaven and the earth. A\xcc\x8a 12345";
    struct qx_ids ids = {0};
    int rc = qx_tok_encode(in.tok, text, sizeof text - 1, &ids, err);
    qx_ids_fini(&ids);
    return rc;
}

static int run_chat(struct qx_error *err)
{
    struct qx_message m[2] = {{.role = "system", .content = "You are concise."}, {.role = "user", .content = "Hi"}};
    struct qx_chat_opts o = {0};
    char *out;
    size_t n;
    int rc = qx_chat_render(m, 2, &o, &out, &n, err);
    qx_text_free(out);
    return rc;
}

static int run_model(struct qx_error *err)
{
    uint32_t out[2];
    size_t n;
    return model_round(in.open, out, &n, err);
}

static const char *target(void)
{
    static char path[128];
    snprintf(path, sizeof path, "%s-out", in.broken);
    return path;
}

/* Removes what a writing call left; 1 when a target is there although it failed. */
static int clear_target(int rc)
{
    char part[160];
    struct stat st;
    bool there = lstat(target(), &st) == 0;
    snprintf(part, sizeof part, "%s.part", target());
    remove_tree(target());
    remove_tree(part);
    return rc && there ? 1 : rc;
}

static int run_repack(struct qx_error *err)
{
    struct qx_repack *r;
    struct qx_repack_opts how = QX_REPACK_DEFAULT;
    how.table = QX_F_NVFP4;
    how.plain_scales = true;
    how.n_threads = 1;
    int rc = qx_repack_plan(&r, in.open, target(), &how, err);
    rc = rc ? rc : qx_repack_run(r, err);
    qx_repack_destroy(r);
    return clear_target(rc);
}

static int run_archive(struct qx_error *err)
{
    struct qx_archive_opts how = {.n_threads = 1};
    struct qx_archive_result result;
    return clear_target(qx_archive_create(in.path, target(), &how, &result, err));
}

static int run_restore(struct qx_error *err)
{
    struct qx_archive_opts how = {.n_threads = 1};
    struct qx_archive_result result;
    char archive[128];
    snprintf(archive, sizeof archive, "%s-archive", in.broken);
    return clear_target(qx_archive_restore(archive, target(), &how, &result, err));
}

static const struct attempt attempts[] = {
    {"open-bf16", run_open, "bf16", NOTHING},
    {"open-fp8", run_open, "fp8", NOTHING},
    {"open-mixed", run_open, "mixed", NOTHING},
    {"open-nvfp4", run_open, "nvfp4", NOTHING},
    {"open-nvfp4-ple", run_open, "nvfp4-ple", NOTHING},
    {"open-parallel", run_open_parallel, "nvfp4", NOTHING},
    {"open-broken", run_open, NULL, NOTHING},
    {"rows-table", run_table, "mixed", OPEN},
    {"rows-table-nvfp4", run_table, "nvfp4-ple", OPEN},
    {"rows-tensor", run_tensor, "mixed", OPEN},
    {"verify-headers", run_verify_headers, "mixed", OPEN},
    {"verify-headers-nvfp4-ple", run_verify_headers, "nvfp4-ple", OPEN},
    {"verify-scales", run_verify_scales, "mixed", OPEN},
    {"verify-full", run_verify_full, "nvfp4-ple", OPEN},
    {"verify-hub", run_verify_hub, DOWNLOADED, OPEN},
    {"defaults", run_defaults, "mixed", OPEN},
    {"defaults-elsewhere", run_defaults, DOWNLOADED, OPEN},
    {"chat", run_chat, NULL, NOTHING},
    {"tokenizer", run_tok_parse, NULL, TOK},
    {"encode", run_tok_encode, NULL, TOK},
    {"model", run_model, "mixed", OPEN},
    {"repack", run_repack, "mixed", OPEN},
    {"archive", run_archive, "nvfp4-ple", NOTHING},
    {"restore", run_restore, "nvfp4-ple", ARCHIVE},
};

/* True when the call behaved. */
static bool try_once(const struct attempt *a, uint64_t n, bool sticky)
{
    struct qx_error err = {0};
    uint64_t live = qx_alloc_live();
    qx_alloc_fail_at(n, sticky);
    int rc = a->run(&err);
    uint64_t failed = qx_alloc_failed();
    qx_alloc_fail_at(0, false);
    uint64_t left = qx_alloc_live() - live;
    const char *why = left                                             ? "blocks left behind"
                      : failed && rc == 0                              ? "success although an allocation failed"
                      : failed && (rc != -(int)QX_E_NOMEM || err.code != QX_E_NOMEM) ? "another code"
                      : !failed && rc != 0                             ? "failed with all memory it wanted"
                                                                       : NULL;
    if (why) {
        printf("%s: allocation %llu%s: %s (returned %d, code %d %s: %s; %lld blocks)\n", a->name,
               (unsigned long long)n, sticky ? " and all later" : "", why, rc, (int)err.code,
               err.kind ? err.kind : "", err.msg, (long long)left);
    }
    return !why;
}

static char *read_text(const char *path, size_t *n)
{
    FILE *f = fopen(path, "rb");
    char *p = NULL;
    *n = 0;
    if (f && fseek(f, 0, SEEK_END) == 0) {
        long size = ftell(f);
        rewind(f);
        p = size > 0 ? malloc((size_t)size) : NULL;
        *n = p ? fread(p, 1, (size_t)size, f) : 0;
    }
    if (f) {
        fclose(f);
    }
    return p;
}

static void put(const char *name, const void *p, size_t n)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", in.broken, name);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(p, 1, n, f) != n || fclose(f) != 0) {
        perror(path);
        exit(1);
    }
}

static void put_text(const char *name, const char *text)
{
    put(name, text, strlen(text));
}

static void put_header(const char *name, const char *json, size_t data)
{
    char bytes[4096] = {0};
    size_t n = strlen(json);
    bytes[0] = (char)(n & 0xff);
    bytes[1] = (char)(n >> 8);
    memcpy(bytes + 8, json, n);
    put(name, bytes, 8 + n + data);
}

/* Faults of every kind, so that the paths that report them run out of memory too. */
static void make_broken(void)
{
    snprintf(in.broken, sizeof in.broken, "/tmp/qx-oom-XXXXXX");
    if (!mkdtemp(in.broken)) {
        perror("mkdtemp");
        exit(1);
    }
    put_header("a.safetensors",
               "{\"__metadata__\":{\"n\":0,\"k\":\"v\",\"k\":\"w\"},"
               "\"t\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
               "\"t\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]},"
               "\"u\":{\"dtype\":\"F9\",\"shape\":[4],\"data_offsets\":[8,12]},"
               "\"v\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[12,16]},"
               "\"w\":{\"dtype\":\"U8\",\"shape\":[9],\"data_offsets\":[16,20]},"
               "\"\\u0078\\n\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[20,24]}}", 22);
    put_header("b.safetensors", "{\"t\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]},"
                                "\"y\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[9,4]}}", 4);
    put_header("c.safetensors", "{\"t\":}", 0);
    put_text("d.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0011\nsize 400001920\n");
    put("e.safetensors", "GGUF\1\1\1\1\1\1\1\1\1", 13);
    put("f.safetensors.incomplete", "123", 3);
    put("stray.safetensors", "123", 3);
    char path[512];
    snprintf(path, sizeof path, "%s/g.safetensors", in.broken);
    if (symlink("nowhere", path) != 0) {
        perror(path);
    }
    static const char index[] =
        "{\"metadata\":{\"total_size\":\"x\"},\"weight_map\":{\"t\":\"a.safetensors\",\"s\":\"a.safetensors\","
        "\"y\":\"b.safetensors\",\"q\":\"c.safetensors\",\"r\":\"d.safetensors\",\"p\":\"e.safetensors\","
        "\"o\":\"f.safetensors\",\"n\":\"g.safetensors\",\"m\":\"../x\",\"m\":\"a.safetensors\",\"l\":7}}";
    put("model.safetensors.index.json", index, sizeof index - 1);
    put_text("config.json", "{\"model_type\":\"qwen4_exp\",\"a\":NaN,\"a\":1,\"text_config\":{\"hidden_size\":\"x\"}}");
}

static bool prepare(const struct attempt *a)
{
    struct qx_error err = {0};
    if (a->layout && strcmp(a->layout, DOWNLOADED) == 0) {
        snprintf(in.path, sizeof in.path, "%s", in.hub);
    } else if (a->layout) {
        snprintf(in.path, sizeof in.path, "%s/micro/%s", in.data, a->layout);
    } else {
        snprintf(in.path, sizeof in.path, "%s", in.broken);
    }
    if (a->needs == OPEN && qx_ckpt_open(&in.open, in.path, NULL, &err)) {
        printf("%s: %s: %s\n", a->name, in.path, err.msg);
        return false;
    }
    if (a->needs == ARCHIVE) {
        char archive[128];
        struct qx_archive_opts how = {.n_threads = 1};
        struct qx_archive_result result;
        snprintf(archive, sizeof archive, "%s-archive", in.broken);
        if (qx_archive_create(in.path, archive, &how, &result, &err)) {
            printf("%s: %s: %s\n", a->name, in.path, err.msg);
            return false;
        }
    }
    if (a->needs == TOK) {
        char path[512];
        snprintf(path, sizeof path, "%s/tokenizer.json", in.sample);
        in.tok_text = read_text(path, &in.tok_n);
        if (!in.tok_text || qx_tok_parse(&in.tok, in.tok_text, in.tok_n, path, NULL, 0, &err)) {
            printf("%s: %s: %s\n", a->name, path, err.msg);
            return false;
        }
    }
    return true;
}

static void clean(void)
{
    char archive[128];
    snprintf(archive, sizeof archive, "%s-archive", in.broken);
    remove_tree(archive);
    qx_ckpt_close(in.open);
    qx_tok_close(in.tok);
    free(in.tok_text);
    in.open = NULL;
    in.tok = NULL;
    in.tok_text = NULL;
}

static bool run_case(const struct attempt *a, bool all)
{
    if (!prepare(a)) {
        clean();
        return false;
    }
    struct qx_error err = {0};
    (void)a->run(&err); /* what is made once and kept does not count below */
    uint64_t total = qx_alloc_total();
    (void)a->run(&err);
    total = qx_alloc_total() - total;
    uint64_t step = all || total < TRIES ? 1 : total / TRIES;
    unsigned bad = 0, tries = 0;
    for (uint64_t n = 1; n <= total && bad < 5; n += n < TRIES / 2 ? 1 : step) {
        bad += !try_once(a, n, false);
        bad += !try_once(a, n, true);
        tries += 2;
    }
    bad += !try_once(a, total + 1000000, false);
    printf("%-26s %8llu allocations, %5u tries, %s\n", a->name, (unsigned long long)total, tries,
           bad ? "BAD" : "ok");
    clean();
    return bad == 0;
}

/* micro/bf16 as a download leaves it. The checksums are wrong: that is reported, too. */
static void make_downloaded(void)
{
    static const char sha[] = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    static const struct { const char *name; int digits; } files[] = {
        {"config.json", 40}, {"model.safetensors.index.json", 40}, {"model-00001-of-00001.safetensors", 64}};
    char from[600], to[256], command[400];
    snprintf(in.hub, sizeof in.hub, "%s-hub", in.broken);
    snprintf(command, sizeof command, "mkdir -p %s/.cache/huggingface/download", in.hub);
    bool ok = system(command) == 0;
    for (size_t i = 0; ok && i < QX_ARRAY_LEN(files); i++) {
        snprintf(from, sizeof from, "%s/micro/bf16/%s", in.data, files[i].name);
        snprintf(to, sizeof to, "%s/%s", in.hub, files[i].name);
        ok = symlink(from, to) == 0;
        snprintf(to, sizeof to, "%s/.cache/huggingface/download/%s.metadata", in.hub, files[i].name);
        FILE *f = ok ? fopen(to, "w") : NULL;
        ok = f && fprintf(f, "%.40s\n%.*s\n1.5\n", sha, files[i].digits, sha) > 0;
        ok = f && fclose(f) == 0 && ok;
    }
    snprintf(to, sizeof to, "%s/tokenizer_config.json", in.hub);
    FILE *f = ok ? fopen(to, "w") : NULL;
    ok = f && fputs("{\"eos_token\": \"<end>\", \"added_tokens_decoder\": {\"7\": {\"content\": \"<end>\", "
                    "\"special\": true}}}\n", f) >= 0;
    if (!f || fclose(f) != 0 || !ok) {
        perror(in.hub);
        exit(1);
    }
}

int main(int argc, char **argv)
{
    bool all = argc > 1 && strcmp(argv[1], "--all") == 0, ok = true;
    in.data = getenv("QX_TEST_DATA");
    in.sample = getenv("QX_SAMPLE");
    if (!in.data || !in.sample) {
        printf("QX_TEST_DATA and QX_SAMPLE must name the test data\n");
        return 77;
    }
    make_broken();
    make_downloaded();
    for (size_t i = 0; i < QX_ARRAY_LEN(attempts); i++) {
        bool wanted = argc == 1 + all;
        for (int k = 1 + all; k < argc; k++) {
            wanted |= qx_glob_match(argv[k], attempts[i].name);
        }
        ok = (!wanted || run_case(&attempts[i], all)) && ok;
    }
    remove_tree(in.broken);
    remove_tree(in.hub);
    return ok ? 0 : 1;
}
