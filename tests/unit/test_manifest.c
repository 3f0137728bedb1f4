/* Checksum lists: what is written reads back; the forms of sha256sum and xxh128sum; what is no list. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "manifest.h"

#include <stdio.h>
#include <string.h>

#define HEX64 "00112233445566778899aabbccddeeff00112233445566778899AABBCCDDEEFF"
#define HEX32 "0123456789abcdef0123456789ABCDEF"

static struct qx_manifest *parse(const char *text)
{
    struct qx_manifest *m = NULL;
    struct qx_error err = {0};
    if (qx_manifest_parse(&m, text, strlen(text), "list", &err) != 0) {
        print_message("%s\n", err.msg);
    }
    return m;
}

static void refuse(const char *text, uint64_t off)
{
    struct qx_manifest *m = (struct qx_manifest *)1;
    struct qx_error err = {0};
    assert_true(qx_manifest_parse(&m, text, strlen(text), "list", &err) < 0);
    assert_null(m);
    assert_string_equal(err.kind, "manifest-syntax");
    if (off != QX_NO_OFF) {
        assert_int_equal(err.off, off);
    }
}

static void test_round_trip(void **state)
{
    uint8_t a[32], b[32];
    uint64_t shape[2] = {3, 5};
    struct qx_buf out = {0};
    struct qx_manifest *m;
    size_t i;
    (void)state;
    for (int k = 0; k < 32; ++k) {
        a[k] = (uint8_t)(k * 7);
        b[k] = (uint8_t)(255 - k);
    }
    qx_manifest_put_head(&out);
    qx_manifest_put_tensor(&out, a, 30, "BF16", shape, 2, 12, "odd name\n\\\x7f");
    qx_manifest_put_tensor(&out, b, 4, "F32", NULL, 0, 42, "scalar");
    qx_manifest_put_file(&out, QX_DIGEST_XXH3_128, b, 1234, "a file.safetensors");
    qx_manifest_put_file(&out, QX_DIGEST_SHA256, a, 1234, "a file.safetensors");
    qx_manifest_put_file(&out, QX_DIGEST_XXH3_128, a, 0, "config.json");
    qx_manifest_put_file(&out, QX_DIGEST_GIT, b, 7, "config.json");
    m = parse(qx_buf_cstr(&out));
    assert_non_null(m);
    assert_int_equal(qx_manifest_count(m), 6);
    assert_int_equal(qx_manifest_find(m, false, QX_DIGEST_GIT, "config.json"), 5);
    assert_memory_equal(qx_manifest_at(m, 5)->digest, b, 20);
    i = qx_manifest_find(m, true, QX_DIGEST_XXH3_128, "odd name\n\\\x7f");
    assert_int_equal(i, 0);
    assert_string_equal(qx_manifest_at(m, i)->shape, "[3,5]");
    assert_string_equal(qx_manifest_at(m, i)->dtype, "BF16");
    assert_int_equal(qx_manifest_at(m, i)->size_bytes, 30);
    assert_int_equal(qx_manifest_at(m, i)->off, 12);
    assert_memory_equal(qx_manifest_at(m, i)->digest, a, 16);
    assert_int_equal(qx_manifest_at(m, i)->file, 2);
    assert_int_equal(qx_manifest_at(m, 1)->file, 2);
    assert_string_equal(qx_manifest_at(m, 1)->shape, "[]");
    i = qx_manifest_find(m, false, QX_DIGEST_SHA256, "a file.safetensors");
    assert_int_equal(i, 3);
    assert_memory_equal(qx_manifest_at(m, i)->digest, a, 32);
    assert_int_equal(qx_manifest_find(m, false, QX_DIGEST_SHA256, "config.json"), SIZE_MAX);
    assert_int_equal(qx_manifest_find(m, false, QX_DIGEST_XXH3_128, "config.json"), 4);
    assert_true(qx_manifest_has(m, true, QX_DIGEST_XXH3_128));
    assert_false(qx_manifest_has(m, true, QX_DIGEST_SHA256));
    qx_manifest_destroy(m);
    qx_buf_fini(&out);
}

static void test_sums(void **state)
{
    struct qx_manifest *m = parse("# comment\r\n" HEX64 "  plain\n" HEX64 " *binary\r\n\n" HEX32 "  quick\n"
                                  "\\" HEX64 "  a\\nb\n" HEX64 "  ./here\nSHA256 (tag (1)) = " HEX64);
    (void)state;
    assert_non_null(m);
    assert_int_equal(qx_manifest_count(m), 6);
    assert_true(qx_manifest_find(m, false, QX_DIGEST_SHA256, "plain") != SIZE_MAX);
    assert_true(qx_manifest_find(m, false, QX_DIGEST_SHA256, "binary") != SIZE_MAX);
    assert_true(qx_manifest_find(m, false, QX_DIGEST_XXH3_128, "quick") != SIZE_MAX);
    assert_true(qx_manifest_find(m, false, QX_DIGEST_SHA256, "a\nb") != SIZE_MAX);
    assert_true(qx_manifest_find(m, false, QX_DIGEST_SHA256, "here") != SIZE_MAX);
    assert_true(qx_manifest_find(m, false, QX_DIGEST_SHA256, "tag (1)") != SIZE_MAX);
    assert_int_equal(qx_manifest_at(m, 0)->digest[31], 0xff);
    assert_false(qx_manifest_at(m, 0)->has_size);
    qx_manifest_destroy(m);
}

static void test_refused(void **state)
{
    (void)state;
    refuse("", QX_NO_OFF);
    refuse("# nothing\n", QX_NO_OFF);
    refuse("hello\n", 0);
    refuse(HEX64 "\n", 0);
    refuse(HEX64 " x\n", 0);
    refuse(HEX64 "  \n", 0);
    refuse(HEX64 "00  long\n", 0);
    refuse(HEX64 "  ok\nbad line\n", 64 + 5);
    refuse("qx-manifest 2\n", QX_NO_OFF);
    refuse("qx-manifest 1\n", QX_NO_OFF);
    refuse("qx-manifest 1\nfile xxh3-128 " HEX64 " 1 n\n", 14);
    refuse("qx-manifest 1\nfile md5 " HEX32 " 1 n\n", 14);
    refuse("qx-manifest 1\nfile xxh3-128 " HEX32 " -1 n\n", 14);
    refuse("qx-manifest 1\nfile xxh3-128 " HEX32 " 18446744073709551616 n\n", 14);
    refuse("qx-manifest 1\ntensor xxh3-128 " HEX32 " 1 BF16 1 0 n\n", 14);
    refuse("qx-manifest 1\ntensor xxh3-128 " HEX32 " 1 BF16 [1] 0 \n", 14);
    /* one name, two digests */
    refuse("qx-manifest 1\nfile xxh3-128 " HEX32 " 1 n\nfile xxh3-128 1123456789abcdef0123456789abcdef 1 n\n",
           QX_NO_OFF);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_sums),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
