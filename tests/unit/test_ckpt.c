/* Checkpoints as directories: which files count, what is reported about them, reading, and that neither
 * the number of threads nor memory that runs out changes more than it must. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "alloc.h"
#include "ckpt.h"
#include "str.h"

static char dir[] = "/tmp/qx-ckpt-XXXXXX";

static const char *at(const char *name)
{
    static char path[4][512];
    static int turn;
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[turn], "%s/%s", dir, name);
    return path[turn];
}

static void put(const char *name, const void *p, size_t n)
{
    FILE *f = fopen(at(name), "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static void put_text(const char *name, const char *text)
{
    put(name, text, strlen(text));
}

/* A file of U8 [4] tensors with the given names (comma-separated); its bytes are all `fill`. */
static void shard(const char *name, const char *tensors, char fill)
{
    struct qx_buf b = {0}, file = {0};
    uint64_t off = 0;
    char list[512];
    snprintf(list, sizeof list, "%s", tensors);
    qx_buf_chr(&b, '{');
    for (char *save = NULL, *t = strtok_r(list, ",", &save); t; t = strtok_r(NULL, ",", &save)) {
        qx_buf_fmt(&b, "%s\"%s\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[%d,%d]}", off ? "," : "", t,
                   (int)off, (int)off + 4);
        off += 4;
    }
    qx_buf_chr(&b, '}');
    for (int i = 0; i < 8; i++) {
        qx_buf_chr(&file, (char)((uint64_t)b.n >> (8 * i)));
    }
    qx_buf_add(&file, b.p, b.n);
    for (uint64_t i = 0; i < off; i++) {
        qx_buf_chr(&file, fill);
    }
    put(name, file.p, file.n);
    qx_buf_fini(&b);
    qx_buf_fini(&file);
}

#define INDEX "model.safetensors.index.json"

static int clean(void **state)
{
    (void)state;
    DIR *d = opendir(dir);
    for (const struct dirent *e; d && (e = readdir(d)) != NULL;) {
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0) {
            const char *p = at(e->d_name);
            if (unlink(p) != 0) {
                (void)rmdir(p);
            }
        }
    }
    if (d) {
        closedir(d);
    }
    return 0;
}

static struct qx_ckpt *open_dir(uint32_t threads)
{
    struct qx_ckpt *ck;
    struct qx_error err = {0};
    struct qx_open how = QX_OPEN_DEFAULT;
    how.n_threads = threads;
    if (qx_ckpt_open(&ck, dir, &how, &err)) {
        fail_msg("%s: %s", err.kind, err.msg);
    }
    return ck;
}

/* All findings but those about the config, one a line: "severity kind file count". */
static const char *found(const struct qx_ckpt *ck)
{
    static char out[4096];
    static const char *const words[] = {"note", "warning", "error"};
    size_t n = 0;
    out[0] = '\0';
    for (size_t i = 0; i < qx_findings_count(qx_ckpt_findings(ck)); i++) {
        const struct qx_finding *f = qx_findings_at(qx_ckpt_findings(ck), i);
        if (strncmp(f->kind, "config", 6) != 0) {
            n += (size_t)snprintf(out + n, sizeof out - n, "%s%s %s %s %d", n ? "\n" : "", words[f->severity],
                                  f->kind, f->file ? f->file : "-", (int)f->count);
        }
    }
    return out;
}

static void expect(const char *findings, size_t tensors)
{
    struct qx_ckpt *ck = open_dir(3);
    assert_string_equal(found(ck), findings);
    assert_int_equal(qx_ckpt_n_tensors(ck), tensors);
    for (size_t i = 1; i < tensors; i++) {
        assert_true(strcmp(qx_ckpt_tensor(ck, i - 1)->name, qx_ckpt_tensor(ck, i)->name) < 0);
    }
    qx_ckpt_close(ck);
}

static int byte_of(const struct qx_ckpt *ck, const char *tensor)
{
    unsigned char b[4];
    const struct qx_tensor *t;
    if (qx_ckpt_need(ck, tensor, &t, NULL)) {
        return -1;
    }
    assert_int_equal(qx_ckpt_read(ck, t, 0, b, 4, NULL), 0);
    const unsigned char *m = qx_ckpt_map(ck, t, NULL);
    assert_non_null(m);
    assert_memory_equal(m, b, 4);
    return b[0];
}

static void without_index(void **state)
{
    (void)state;
    shard("model-00001-of-00003.safetensors", "c,a", 1);
    shard("model-00003-of-00003.safetensors", "b", 3);
    shard("side.safetensors", "d", 4);
    shard(".hidden.safetensors", "e", 5);
    put_text("notes.bin", "x");
    expect("error shard-missing model-00002-of-00003.safetensors 1", 4);
    shard("model-00002-of-00003.safetensors", "f", 2);
    expect("", 5);
    shard("side.safetensors", "d,a", 4);
    expect("error duplicate-tensor side.safetensors 1", 5);
    struct qx_ckpt *ck = open_dir(1);
    assert_int_equal(byte_of(ck, "d"), 4);
    struct qx_error err = {0};
    const struct qx_tensor *t;
    assert_int_equal(qx_ckpt_need(ck, "a", &t, &err), -(int)QX_E_FORMAT);
    assert_string_equal(err.kind, "duplicate-tensor");
    assert_null(t);
    assert_int_equal(qx_ckpt_need(ck, "zz", &t, &err), -(int)QX_E_MISSING);
    assert_string_equal(err.kind, "missing-tensor");
    qx_ckpt_close(ck);
}

static void numbering(void **state)
{
    (void)state;
    shard("m-00000-of-00002.safetensors", "a", 1);
    shard("m-00001-of-00002.safetensors", "b", 1);
    expect("", 2); /* counted from 0 */
    clean(NULL);
    shard("x-00002-of-00009.safetensors", "a", 1);
    shard("y-00001-of-00001.safetensors", "b", 1);
    shard("z-1-of-3.safetensors", "c", 1);
    expect("error shard-missing x-00001-of-00009.safetensors 8", 3);
    clean(NULL);
    shard("m-00001-of-99999.safetensors", "a", 1);
    expect("error shard-missing m-00002-of-99999.safetensors 99998", 1);
}

static void with_index(void **state)
{
    (void)state;
    shard("one.safetensors", "a,b", 1);
    shard("two.safetensors", "b,c,u", 2);
    put_text(INDEX, "{\"metadata\":{\"total_size\":12},\"weight_map\":{\"c\":\"two.safetensors\","
                    "\"b\":\"two.safetensors\",\"a\":\"one.safetensors\"}}");
    expect("warning superseded-copies one.safetensors 1\nwarning unindexed-tensor two.safetensors 1", 3);
    struct qx_ckpt *ck = open_dir(2);
    assert_true(qx_ckpt_has_index(ck));
    assert_int_equal(byte_of(ck, "a"), 1);
    assert_int_equal(byte_of(ck, "b"), 2);
    assert_int_equal(qx_ckpt_n_extras(ck), 2);
    assert_true(qx_ckpt_extra(ck, 0)->superseded && !qx_ckpt_extra(ck, 1)->superseded);
    struct qx_error err = {0};
    const struct qx_tensor *t;
    assert_int_equal(qx_ckpt_need(ck, "u", &t, &err), -(int)QX_E_MISSING);
    assert_non_null(strstr(err.msg, "two.safetensors"));
    assert_int_equal(qx_ckpt_lower_bound(ck, "b", 1), 1);
    assert_int_equal(qx_ckpt_lower_bound(ck, "zz", 2), 3);
    assert_null(qx_ckpt_find(ck, "bb"));
    assert_null(qx_ckpt_find(ck, ""));
    qx_ckpt_close(ck);
    put_text(INDEX, "{\"metadata\":{\"total_size\":13},\"weight_map\":{\"c\":\"two.safetensors\","
                    "\"b\":\"one.safetensors\",\"a\":\"one.safetensors\",\"u\":\"two.safetensors\"}}");
    shard("three.safetensors", "a", 3);
    expect("warning stray-file three.safetensors 1\nwarning superseded-copies two.safetensors 1\n"
           "warning total-size " INDEX " 1", 4);
    ck = open_dir(2);
    assert_int_equal(byte_of(ck, "b"), 1);
    qx_ckpt_close(ck);
}

static void absent(void **state)
{
    (void)state;
    shard("one.safetensors", "a", 1);
    shard("two.safetensors", "b,x", 2);
    assert_int_equal(symlink("nowhere", at("four.safetensors")), 0);
    assert_int_equal(symlink("five.safetensors", at("five.safetensors")), 0);
    put_text("six.safetensors", "GGUF\3\0\0\0xxxxxxxxxxxxxxxxx");
    put_text("three.safetensors.incomplete", "0123456789");
    put_text(INDEX, "{\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"one.safetensors\",\"c\":\"two.safetensors\","
                    "\"d\":\"three.safetensors\",\"e\":\"three.safetensors\",\"f\":\"four.safetensors\","
                    "\"g\":\"five.safetensors\",\"h\":\"six.safetensors\",\"i\":\"../out.safetensors\","
                    "\"x\":\"two.safetensors\",\"y\":\"/etc/passwd\"}}");
    expect("error index-tensor-absent one.safetensors 1\nerror index-tensor-absent two.safetensors 1\n"
           "error not-safetensors six.safetensors 1\nerror shard-missing five.safetensors 1\n"
           "error shard-missing four.safetensors 1\nerror shard-missing three.safetensors 2\n"
           "error unsafe-path " INDEX " 1\nerror unsafe-path " INDEX " 1", 2);
    struct qx_ckpt *ck = open_dir(2);
    static const struct { const char *name, *kind, *says; } rows[] = {
        {"b", "index-tensor-absent", "two.safetensors"}, {"c", "index-tensor-absent", "lacks"},
        {"d", "shard-missing", "three.safetensors.incomplete"}, {"f", "shard-missing", "dangling link -> nowhere"},
        {"g", "shard-missing", "link loop"}, {"h", "not-safetensors", "GGUF"}, {"i", "unsafe-path", "leaves"},
        {"y", "unsafe-path", "leaves"}};
    assert_int_equal(qx_ckpt_n_absent(ck), 9);
    for (size_t i = 0; i < QX_ARRAY_LEN(rows); i++) {
        struct qx_error err = {0};
        const struct qx_tensor *t;
        assert_true(qx_ckpt_need(ck, rows[i].name, &t, &err) < 0);
        assert_string_equal(err.kind, rows[i].kind);
        assert_non_null(strstr(err.msg, rows[i].says));
        assert_string_equal(err.tensor, rows[i].name);
    }
    qx_ckpt_close(ck);
}

/* As the hub lays a download out: a snapshot of links into a folder of blobs; one blob is not done. */
static void hub_cache(void **state)
{
    (void)state;
    static const char *const links[][2] = {{"../blobs/aaa", "snap/model-00001-of-00002.safetensors"},
                                           {"../blobs/bbb", "snap/model-00002-of-00002.safetensors"},
                                           {"../blobs/ccc", "snap/model.safetensors.index.json"}};
    assert_int_equal(mkdir(at("blobs"), 0700), 0);
    assert_int_equal(mkdir(at("snap"), 0700), 0);
    shard("blobs/aaa", "a", 1);
    shard("blobs/bbb", "b", 2);
    put_text("blobs/ccc", "{\"weight_map\":{\"a\":\"model-00001-of-00002.safetensors\","
                          "\"b\":\"model-00002-of-00002.safetensors\"}}");
    for (size_t i = 0; i < QX_ARRAY_LEN(links); i++) {
        assert_int_equal(symlink(links[i][0], at(links[i][1])), 0);
    }
    struct qx_ckpt *ck;
    assert_int_equal(qx_ckpt_open(&ck, at("snap"), NULL, NULL), 0);
    assert_string_equal(found(ck), "");
    assert_int_equal(byte_of(ck, "b"), 2);
    qx_ckpt_close(ck);
    assert_int_equal(rename(at("blobs/bbb"), at("blobs/bbb.incomplete")), 0);
    assert_int_equal(qx_ckpt_open(&ck, at("snap"), NULL, NULL), 0);
    assert_string_equal(found(ck), "error shard-missing model-00002-of-00002.safetensors 1");
    const struct qx_finding *f = qx_findings_at(qx_ckpt_findings(ck), 0);
    for (size_t i = 0; strcmp(f->kind, "shard-missing") != 0; i++) {
        f = qx_findings_at(qx_ckpt_findings(ck), i);
    }
    assert_non_null(strstr(f->text, "dangling link -> ../blobs/bbb"));
    assert_non_null(strstr(f->text, "bbb.incomplete"));
    qx_ckpt_close(ck);
    for (size_t i = 0; i < QX_ARRAY_LEN(links); i++) {
        assert_int_equal(unlink(at(links[i][1])), 0);
    }
    assert_int_equal(unlink(at("blobs/aaa")) + unlink(at("blobs/bbb.incomplete")) + unlink(at("blobs/ccc")), 0);
}

/* An index may be hostile in size, too: as many files as tensors, none there. Nothing may be quadratic. */
static void many_absent_files(void **state)
{
    (void)state;
    enum { N = 100000 };
    struct qx_buf index = {0};
    qx_buf_str(&index, "{\"weight_map\":{");
    for (int i = 0; i < N; i++) {
        qx_buf_fmt(&index, "%s\"t.%d\":\"f-%d.safetensors\"", i ? "," : "", i, i);
    }
    qx_buf_str(&index, "}}");
    put(INDEX, index.p, index.n);
    qx_buf_fini(&index);
    struct timespec begin, end;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
    struct qx_ckpt *ck = open_dir(2);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
    assert_int_equal(qx_ckpt_n_absent(ck), N);
    size_t n = 0;
    for (size_t i = 0; i < qx_findings_count(qx_ckpt_findings(ck)); i++) {
        n += strcmp(qx_findings_at(qx_ckpt_findings(ck), i)->kind, "shard-missing") == 0;
    }
    assert_int_equal(n, N);
    qx_ckpt_close(ck);
    assert_true(end.tv_sec - begin.tv_sec < 20); /* seconds of work; a quadratic way takes many minutes */
}

static void stale(void **state)
{
    (void)state;
    shard("b-00001-of-00002.safetensors", "a", 1);
    shard("b-00002-of-00002.safetensors", "b", 2);
    put_text(INDEX, "{\"weight_map\":{\"a\":\"a-00001-of-00001.safetensors\",\"b\":\"a-00001-of-00001.safetensors\"}}");
    expect("error index-stale " INDEX " 1", 0);
}

static void bad_index(void **state)
{
    (void)state;
    static const struct { const char *text, *found; } rows[] = {
        {"\xef\xbb\xbf{}", "error json-bom " INDEX " 1"},
        {"{\"weight_map\":{\"a\":", "error json-syntax " INDEX " 1"},
        {"{}", "error index-format " INDEX " 1"},
        {"[]", "error index-format " INDEX " 1"},
        {"{\"weight_map\":[]}", "error index-format " INDEX " 1"},
        {"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 33000000\n", "error lfs-pointer " INDEX " 1"},
    };
    shard("one.safetensors", "a,b", 1);
    for (size_t i = 0; i < QX_ARRAY_LEN(rows); i++) {
        put_text(INDEX, rows[i].text);
        expect(rows[i].found, 2);
    }
    put_text(INDEX, "{\"weight_map\":{\"a\":\"one.safetensors\",\"a\":\"one.safetensors\",\"b\":5}}");
    expect("error index-format " INDEX " 1\nwarning unindexed-tensor one.safetensors 1\n"
           "note json-duplicate-key " INDEX " 1", 1);
}

static void single_file(void **state)
{
    (void)state;
    struct qx_ckpt *ck;
    struct qx_error err = {0};
    shard("one of them.safetensors", "a", 7);
    assert_int_equal(qx_ckpt_open(&ck, at("one of them.safetensors"), NULL, &err), 0);
    assert_true(qx_ckpt_is_single_file(ck) && !qx_ckpt_has_index(ck));
    assert_string_equal(qx_ckpt_file(ck, 0)->name, "one of them.safetensors");
    assert_int_equal(qx_findings_count(qx_ckpt_findings(ck)), 0);
    assert_int_equal(byte_of(ck, "a"), 7);
    const struct qx_tensor *t = qx_ckpt_find(ck, "a");
    char b[8];
    assert_int_equal(qx_ckpt_read(ck, t, 2, b, 3, &err), -(int)QX_E_RANGE);
    assert_int_equal(qx_ckpt_read(ck, t, UINT64_MAX, b, 2, &err), -(int)QX_E_RANGE);
    assert_int_equal(truncate(at("one of them.safetensors"), 9), 0); /* cut after open: an error, no signal */
    assert_int_equal(qx_ckpt_read(ck, t, 0, b, 4, &err), -(int)QX_E_IO);
    assert_string_equal(err.kind, "file-changed");
    assert_null(qx_ckpt_map(ck, t, &err));
    assert_string_equal(err.kind, "file-changed");
    qx_ckpt_close(ck);
    assert_int_equal(qx_ckpt_open(&ck, at("absent"), NULL, &err), -(int)QX_E_NOT_FOUND);
    assert_null(ck);
    assert_int_equal(qx_ckpt_open(&ck, "/dev/null", NULL, &err), -(int)QX_E_IO);
    clean(NULL);
    put_text("notes.txt", "nothing here");
    assert_int_equal(qx_ckpt_open(&ck, dir, NULL, &err), -(int)QX_E_NOT_FOUND);
    assert_string_equal(err.kind, "not-a-checkpoint");
}

static void threads_do_not_matter(void **state)
{
    (void)state;
    struct qx_buf index = {0};
    qx_buf_str(&index, "{\"weight_map\":{");
    for (int i = 0; i < 40; i++) {
        char name[64], tensors[128];
        snprintf(name, sizeof name, "f%02d.safetensors", i);
        snprintf(tensors, sizeof tensors, "t%d,u%d,same", i, (i * 7) % 40);
        shard(name, tensors, (char)i);
        qx_buf_fmt(&index, "%s\"t%d\":\"%s\",\"u%d\":\"%s\"", i ? "," : "", i, name, i, name);
    }
    qx_buf_str(&index, "}}");
    put(INDEX, index.p, index.n);
    qx_buf_fini(&index);
    struct qx_ckpt *one = open_dir(1);
    char first[4096];
    snprintf(first, sizeof first, "%s", found(one));
    for (uint32_t threads = 2; threads < 6; threads++) {
        struct qx_ckpt *ck = open_dir(threads);
        assert_string_equal(found(ck), first);
        assert_int_equal(qx_ckpt_n_extras(ck), qx_ckpt_n_extras(one));
        qx_ckpt_close(ck);
    }
    qx_ckpt_close(one);
}

static int make_dir(void **state)
{
    (void)state;
    return mkdtemp(dir) ? 0 : -1;
}

static int remove_dir(void **state)
{
    clean(state);
    return rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(without_index, clean), cmocka_unit_test_teardown(numbering, clean),
        cmocka_unit_test_teardown(with_index, clean),    cmocka_unit_test_teardown(absent, clean),
        cmocka_unit_test_teardown(hub_cache, clean),     cmocka_unit_test_teardown(many_absent_files, clean),
        cmocka_unit_test_teardown(stale, clean),         cmocka_unit_test_teardown(bad_index, clean),
        cmocka_unit_test_teardown(single_file, clean),   cmocka_unit_test_teardown(threads_do_not_matter, clean)};
    return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
