/* Headers: each rule of the format by a header that breaks it, and headers that look odd but are sound. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "dtype.h"
#include "st_header.h"

#define T(name, dtype, shape, a, b) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #a "," #b "]}"

/* The kinds found, each once, in order of kind, separated by spaces. */
static const char *kinds(struct qx_findings *fs, char *out, size_t cap)
{
    qx_findings_sort(fs);
    out[0] = '\0';
    for (size_t i = 0; i < qx_findings_count(fs); i++) {
        const struct qx_finding *f = qx_findings_at(fs, i);
        size_t n = strlen(out);
        snprintf(out + n, cap - n, "%s%s", n ? " " : "", f->kind);
    }
    return out;
}

static void rules(void **state)
{
    (void)state;
    static const struct {
        const char *name, *json;
        uint64_t data;
        const char *kinds;
        size_t tensors, readable;
        enum qx_file_state state;
    } rows[] = {
        {"one", "{" T("a", "F32", "[4]", 0, 16) "}", 16, "", 1, 1, QX_FILE_OK},
        {"none", "{}", 0, "", 0, 0, QX_FILE_OK},
        {"padding", "{}     \n", 0, "", 0, 0, QX_FILE_OK},
        {"scalar", "{" T("a", "F32", "[]", 0, 4) "}", 4, "", 1, 1, QX_FILE_OK},
        {"zero dimension", "{" T("a", "F32", "[4]", 0, 16) "," T("z", "F32", "[0,4]", 16, 16) "}", 16, "", 2, 2,
         QX_FILE_OK},
        {"zero dimension in the middle", "{" T("a", "F32", "[4]", 0, 16) "," T("z", "F32", "[0]", 8, 8) "}", 16, "",
         2, 2, QX_FILE_OK},
        {"zero times huge", "{" T("z", "F32", "[18446744073709551615,18446744073709551615,0]", 0, 0) "}", 0, "", 1,
         1, QX_FILE_OK},
        {"reversed", "{" T("b", "F32", "[1]", 4, 8) "," T("a", "F32", "[1]", 0, 4) "}", 8, "", 2, 2, QX_FILE_OK},
        {"unknown key", "{\"a\":{\"x\":{},\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "", 1, 1,
         QX_FILE_OK},
        {"empty metadata", "{\"__metadata__\":{}," T("a", "U8", "[1]", 0, 1) "}", 1, "", 1, 1, QX_FILE_OK},
        {"overlap", "{" T("a", "F32", "[4]", 0, 16) "," T("b", "F32", "[4]", 8, 24) "}", 24, "overlap", 2, 2,
         QX_FILE_OK},
        {"same bytes", "{" T("a", "F32", "[4]", 0, 16) "," T("b", "F32", "[4]", 0, 16) "}", 16, "overlap", 2, 2,
         QX_FILE_OK},
        {"overlap past a small one",
         "{" T("a", "U8", "[16]", 0, 16) "," T("b", "U8", "[2]", 2, 4) "," T("c", "U8", "[6]", 10, 16) "}", 16,
         "overlap", 3, 3, QX_FILE_OK},
        {"hole", "{" T("a", "F32", "[4]", 0, 16) "," T("b", "F32", "[4]", 24, 40) "}", 40, "hole", 2, 2, QX_FILE_OK},
        {"hole at the start", "{" T("a", "F32", "[4]", 8, 24) "}", 24, "hole", 1, 1, QX_FILE_OK},
        {"trailing", "{" T("a", "F32", "[4]", 0, 16) "}", 20, "trailing-bytes", 1, 1, QX_FILE_OK},
        {"trailing without tensors", "{}", 1, "trailing-bytes", 0, 0, QX_FILE_OK},
        {"truncated", "{" T("a", "F32", "[4]", 0, 16) "," T("b", "F32", "[4]", 16, 32) "}", 30, "truncated", 2, 1,
         QX_FILE_SHORT},
        {"no data", "{" T("a", "F32", "[4]", 0, 16) "}", 0, "truncated", 1, 0, QX_FILE_SHORT},
        {"end before begin", "{" T("a", "F32", "[4]", 16, 0) "}", 16, "bad-offsets", 1, 0, QX_FILE_OK},
        {"end past the data", "{" T("a", "F32", "[4]", 0, 9223372036854775808) "}", 16, "bad-offsets", 1, 0,
         QX_FILE_OK},
        {"end at 2^64-1", "{" T("a", "U8", "[18446744073709551615]", 0, 18446744073709551615) "}", 16,
         "bad-offsets", 1, 0, QX_FILE_OK},
        {"zero bytes past the data", "{" T("a", "U8", "[0]", 99, 99) "}", 0, "bad-offsets", 1, 0, QX_FILE_OK},
        {"three offsets", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4,8]}}", 4, "bad-offsets", 1, 0,
         QX_FILE_OK},
        {"one offset", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0]}}", 4, "bad-offsets", 1, 0,
         QX_FILE_OK},
        {"offsets as text", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[\"0\",\"4\"]}}", 4, "bad-offsets",
         1, 0, QX_FILE_OK},
        {"nested offsets", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,[4]]}}", 4, "bad-offsets", 1, 0,
         QX_FILE_OK},
        {"no offsets", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4]}}", 4, "bad-offsets", 1, 0, QX_FILE_OK},
        {"shape too large", "{" T("a", "F32", "[1000,1000]", 0, 4) "}", 4, "size-mismatch", 1, 0, QX_FILE_OK},
        {"shape too small", "{" T("a", "F32", "[1]", 0, 8) "}", 8, "size-mismatch", 1, 0, QX_FILE_OK},
        {"shape overflows", "{" T("a", "F32", "[4294967296,4294967296]", 0, 4) "}", 4, "size-mismatch", 1, 0,
         QX_FILE_OK},
        {"bytes overflow", "{" T("a", "F32", "[9223372036854775807]", 0, 4) "}", 4, "size-mismatch", 1, 0, QX_FILE_OK},
        {"negative", "{" T("a", "F32", "[-1]", 0, 4) "}", 4, "bad-shape", 1, 0, QX_FILE_OK},
        {"fraction", "{" T("a", "F32", "[1.5]", 0, 4) "}", 4, "bad-shape", 1, 0, QX_FILE_OK},
        {"exponent", "{" T("a", "F32", "[1e0]", 0, 4) "}", 4, "bad-shape", 1, 0, QX_FILE_OK},
        {"truth", "{" T("a", "F32", "[true]", 0, 4) "}", 4, "bad-shape", 1, 0, QX_FILE_OK},
        {"object", "{" T("a", "F32", "{}", 0, 4) "}", 4, "bad-shape", 1, 0, QX_FILE_OK},
        {"huge dimension", "{" T("a", "F32", "[18446744073709551616]", 0, 4) "}", 4, "bad-shape", 1, 0, QX_FILE_OK},
        {"unknown dtype", "{" T("a", "F9_X", "[4]", 0, 16) "}", 16, "unknown-dtype", 1, 0, QX_FILE_OK},
        {"lower case dtype", "{" T("a", "f32", "[4]", 0, 16) "}", 16, "unknown-dtype", 1, 0, QX_FILE_OK},
        {"unknown dtype outside", "{" T("a", "F9_X", "[4]", 0, 64) "}", 16, "bad-offsets unknown-dtype", 1, 0,
         QX_FILE_OK},
        {"dtype is a number", "{\"a\":{\"dtype\":1,\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "unknown-dtype", 1, 0,
         QX_FILE_OK},
        {"twice", "{" T("a", "U8", "[1]", 0, 1) "," T("a", "U8", "[1]", 1, 2) "}", 2, "duplicate-tensor", 1, 0,
         QX_FILE_OK},
        {"twice by escape", "{" T("a", "U8", "[1]", 0, 1) "," T("\\u0061", "U8", "[1]", 1, 2) "}", 2,
         "duplicate-tensor", 1, 0, QX_FILE_OK},
        {"field twice", "{\"a\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
         "json-duplicate-key", 1, 0, QX_FILE_OK},
        {"metadata number", "{\"__metadata__\":{\"n\":0}," T("a", "U8", "[1]", 0, 1) "}", 1, "metadata-type", 1, 1,
         QX_FILE_OK},
        {"metadata array", "{\"__metadata__\":[]," T("a", "U8", "[1]", 0, 1) "}", 1, "metadata-type", 1, 1, QX_FILE_OK},
        {"metadata key twice", "{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", 0, "json-duplicate-key", 0, 0, QX_FILE_OK},
        {"metadata twice", "{\"__metadata__\":{},\"__metadata__\":{}}", 0, "json-duplicate-key", 0, 0, QX_FILE_OK},
        {"entry is a number", "{\"a\":5}", 0, "header-json", 0, 0, QX_FILE_OK},
        {"array", "[]", 0, "header-json", 0, 0, QX_FILE_BAD},
        {"cut", "{\"a\":", 0, "header-json", 0, 0, QX_FILE_BAD},
        {"rest after", "{} x", 0, "header-json", 0, 0, QX_FILE_BAD},
        {"mark", "\xef\xbb\xbf{}", 0, "header-json", 0, 0, QX_FILE_BAD},
        {"not UTF-8", "{" T("a\xff", "U8", "[1]", 0, 1) "}", 1, "header-utf8", 0, 0, QX_FILE_BAD},
    };
    for (size_t i = 0; i < QX_ARRAY_LEN(rows); i++) {
        struct qx_findings *fs = qx_findings_create();
        struct qx_st_header h;
        struct qx_error err = {0};
        char got[256];
        size_t n = strlen(rows[i].json), readable = 0;
        char *copy = malloc(n); /* exact size for the sanitizer */
        memcpy(copy, rows[i].json, n);
        assert_int_equal(qx_st_header_parse(&h, copy, n, 8 + n + rows[i].data, "f", fs, &err), 0);
        free(copy);
        if (strcmp(kinds(fs, got, sizeof got), rows[i].kinds) != 0) {
            fail_msg("%s: found '%s', expected '%s'", rows[i].name, got, rows[i].kinds);
        }
        for (size_t k = 0; k < h.n_tensors; k++) {
            readable += h.tensors[k].readable;
            if (h.tensors[k].readable) {
                assert_true(h.tensors[k].off + h.tensors[k].size_bytes <= 8 + n + rows[i].data);
            }
        }
        if (h.n_tensors != rows[i].tensors || readable != rows[i].readable || h.state != rows[i].state) {
            fail_msg("%s: %zu tensors, %zu readable, state %d", rows[i].name, h.n_tensors, readable, (int)h.state);
        }
        qx_st_header_fini(&h);
        qx_findings_destroy(fs);
    }
}

static void values(void **state)
{
    (void)state;
    static const char json[] = "{\"__metadata__\":{\"format\":\"pt\",\"e\":\"1\"}," T("b", "BF16", "[2,3]", 4, 16) ","
                               T("a\\u0000x", "F32", "[]", 0, 4) "}";
    struct qx_findings *fs = qx_findings_create();
    struct qx_st_header h;
    assert_int_equal(qx_st_header_parse(&h, json, sizeof json - 1, 8 + sizeof json - 1 + 16, "f", fs, NULL), 0);
    assert_int_equal(qx_findings_count(fs), 0);
    assert_true(h.has_metadata && h.n_meta == 2);
    assert_string_equal(h.meta[0].key, "format");
    assert_string_equal(h.meta[0].value, "pt");
    assert_int_equal(h.n_tensors, 2);
    const struct qx_tensor *a = &h.tensors[0], *b = &h.tensors[1];
    assert_int_equal(a->name_len, 3);
    assert_memory_equal(a->name, "a\0x", 4);
    assert_true(a->n_dims == 0 && a->n_elems == 1 && a->size_bytes == 4 && a->dtype == QX_DT_F32);
    assert_true(b->n_dims == 2 && b->shape[0] == 2 && b->shape[1] == 3 && b->n_elems == 6 && b->size_bytes == 12);
    assert_true(b->off == 8 + sizeof json - 1 + 4);
    qx_st_header_fini(&h);
    qx_findings_destroy(fs);
}

static void files(void **state)
{
    (void)state;
    static const struct { const char *bytes; size_t n; const char *kind, *says; } rows[] = {
        {"", 0, "file-too-short", "0 bytes"},
        {"\0\0\0\0\0\0\0", 7, "file-too-short", "7 bytes"},
        {"\0\0\0\0\0\0\0\0", 8, "header-length", "0 bytes"},
        {"\1\0\0\0\0\0\0\0x", 9, "header-json", ""},
        {"\2\0\0\0\0\0\0\0{}", 10, NULL, NULL},
        {"\3\0\0\0\0\0\0\0{}", 10, "header-length", "3 bytes"},
        {"\0\0\0\0\0\1\0\0{}", 10, "header-length", "1099511627776"},
        {"\0\0\0\0\0\0\0\x80{}", 10, "header-length", "9223372036854775808"},
        {"\xff\xff\xff\xff\xff\xff\xff\xff{}", 10, "header-length", "18446744073709551615"},
        {"PK\3\4\1\1\1\1\1\1\1\1", 12, "not-safetensors", "zip"},
        {"\x80\2\1\1\1\1\1\1\1\1\1", 11, "not-safetensors", "pickle"},
        {"\x1f\x8b\1\1\1\1\1\1\1\1\1", 11, "not-safetensors", "gzip"},
        {"GGUF\3\0\0\0\1\1\1", 11, "not-safetensors", "GGUF"},
        {"<!DOCTYPE html>\n<html>", 22, "not-safetensors", "HTML"},
        {"not found, sorry\n", 17, "not-safetensors", "text"},
        {"version https://git-lfs.github.com/spec/v1\noid sha256:00112233445566778899aabbccddeeff"
         "00112233445566778899aabbccddeeff\nsize 400001920\n", 133, "lfs-pointer", "400001920"},
    };
    for (size_t i = 0; i < QX_ARRAY_LEN(rows); i++) {
        char path[] = "/tmp/qx-test-XXXXXX";
        int fd = mkstemp(path);
        assert_int_equal(write(fd, rows[i].bytes, rows[i].n), (ssize_t)rows[i].n);
        struct qx_findings *fs = qx_findings_create();
        struct qx_st_header h;
        assert_int_equal(qx_st_header_read(&h, fd, rows[i].n, "f", 1000, fs, NULL), 0);
        assert_int_equal(qx_findings_count(fs), rows[i].kind != NULL);
        if (rows[i].kind) {
            assert_string_equal(qx_findings_at(fs, 0)->kind, rows[i].kind);
            assert_non_null(strstr(qx_findings_at(fs, 0)->text, rows[i].says));
            assert_int_equal(h.state, QX_FILE_BAD);
        }
        qx_st_header_fini(&h);
        qx_findings_destroy(fs);
        close(fd);
        unlink(path);
    }
}

static void limit(void **state)
{
    (void)state;
    char path[] = "/tmp/qx-test-XXXXXX", head[8] = {0};
    int fd = mkstemp(path);
    head[0] = 100;
    assert_int_equal(write(fd, head, 8), 8);
    assert_int_equal(ftruncate(fd, (off_t)1 << 40), 0); /* sparse: the size is honest, the limit decides */
    struct qx_findings *fs = qx_findings_create();
    struct qx_st_header h;
    assert_int_equal(qx_st_header_read(&h, fd, (uint64_t)1 << 40, "f", 99, fs, NULL), 0);
    assert_string_equal(qx_findings_at(fs, 0)->kind, "header-too-large");
    assert_non_null(strstr(qx_findings_at(fs, 0)->text, "--max-header"));
    qx_st_header_fini(&h);
    qx_findings_destroy(fs);
    close(fd);
    unlink(path);
}

static void dtypes(void **state)
{
    (void)state;
    static const struct { const char *name; uint32_t size; } rows[] = {
        {"F8_E8M0", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"I8", 1}, {"U8", 1}, {"BOOL", 1}, {"BF16", 2},
        {"F16", 2}, {"I16", 2}, {"U16", 2}, {"F32", 4}, {"I32", 4}, {"U32", 4}, {"F64", 8}, {"I64", 8},
        {"U64", 8}, {"C64", 8}};
    assert_int_equal(QX_ARRAY_LEN(rows), QX_DT_COUNT - 1);
    for (size_t i = 0; i < QX_ARRAY_LEN(rows); i++) {
        enum qx_dtype t = qx_dtype_from_text(rows[i].name, strlen(rows[i].name));
        assert_int_not_equal(t, QX_DT_UNKNOWN);
        assert_string_equal(qx_dtype_name(t), rows[i].name);
        assert_int_equal(qx_dtype_size(t), rows[i].size);
    }
    assert_int_equal(qx_dtype_from_text("unknown", 7), QX_DT_UNKNOWN);
    assert_int_equal(qx_dtype_from_text("BF1", 3), QX_DT_UNKNOWN);
    for (int f = 0; f < QX_F_COUNT; f++) {
        assert_non_null(qx_format_name((enum qx_format)f));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(rules), cmocka_unit_test(values), cmocka_unit_test(files),
                                       cmocka_unit_test(limit), cmocka_unit_test(dtypes)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
