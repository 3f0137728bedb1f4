/* Seekable zstd files: content comes back by frame and by range, and damage anywhere is an error. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <zstd.h>

#include "zseek.h"

#define N (QX_ZSEEK_FRAME_BYTES + 300000)

static uint8_t *content(int kind)
{
    uint8_t *p = malloc(N);
    uint32_t s = 1;
    assert_non_null(p);
    for (size_t i = 0; i < N; i++) {
        s = s * 1664525u + 1013904223u;
        p[i] = (uint8_t)(kind == 0 ? s >> 24 : kind == 1 ? i / 1000 : (i % 2 ? s >> 24 : 0));
    }
    return p;
}

static size_t write_file(int fd, const uint8_t *p)
{
    struct qx_zseek_packer *k = qx_zseek_packer_create();
    struct qx_zseek_frame f[3] = {{0}};
    struct qx_buf b = {0};
    size_t n_frames = 0;
    assert_non_null(k);
    for (size_t at = 0; at < N; at += QX_ZSEEK_FRAME_BYTES / 2 + 17) {
        size_t n = N - at < QX_ZSEEK_FRAME_BYTES / 2 + 17 ? N - at : QX_ZSEEK_FRAME_BYTES / 2 + 17, size;
        uint8_t *out = malloc(qx_zseek_bound(n));
        uint32_t sum;
        assert_int_equal(qx_zseek_pack(k, p + at, n, out, &size, &sum, NULL), 0);
        assert_true(size <= qx_zseek_bound(n));
        f[n_frames++] = (struct qx_zseek_frame){.size = (uint32_t)size, .data_size = (uint32_t)n, .checksum = sum};
        qx_buf_add(&b, out, size);
        free(out);
    }
    qx_zseek_put_table(&b, f, n_frames);
    assert_false(b.failed);
    assert_int_equal(pwrite(fd, b.p, b.n, 0), (ssize_t)b.n);
    assert_int_equal(ftruncate(fd, (off_t)b.n), 0);
    size_t n = b.n;
    qx_buf_fini(&b);
    qx_zseek_packer_destroy(k);
    return n;
}

static void round_trip(void **unused)
{
    (void)unused;
    char name[] = "/tmp/qx-zseek-XXXXXX";
    int fd = mkstemp(name);
    unlink(name);
    for (int kind = 0; kind < 3; kind++) {
        uint8_t *p = content(kind), *q = malloc(N);
        size_t size = write_file(fd, p);
        struct qx_error err;
        struct qx_zseek *z;
        assert_int_equal(qx_zseek_open(&z, fd, size, "x.zst", &err), 0);
        assert_int_equal(qx_zseek_content_bytes(z), N);
        assert_int_equal(qx_zseek_read(z, 0, q, N, &err), 0);
        assert_memory_equal(p, q, N);
        static const size_t at[][2] = {{0, 1}, {N - 1, 1}, {QX_ZSEEK_FRAME_BYTES / 2, 40}, {N, 0}, {77, 1500000}};
        for (size_t i = 0; i < sizeof at / sizeof at[0]; i++) {
            assert_int_equal(qx_zseek_read(z, at[i][0], q, at[i][1], &err), 0);
            assert_memory_equal(p + at[i][0], q, at[i][1]);
        }
        assert_true(qx_zseek_read(z, N, q, 1, &err) < 0);
        /* A stock decoder reads the whole file, the table being a skippable frame. */
        uint8_t *raw = malloc(size);
        assert_int_equal(pread(fd, raw, size, 0), (ssize_t)size);
        ZSTD_DCtx *d = ZSTD_createDCtx();
        ZSTD_inBuffer in = {raw, size, 0};
        ZSTD_outBuffer out = {q, N, 0};
        size_t rc = 1;
        while (in.pos < in.size) {
            rc = ZSTD_decompressStream(d, &out, &in);
            assert_false(ZSTD_isError(rc));
        }
        assert_int_equal(rc, 0);
        assert_int_equal(out.pos, N);
        assert_memory_equal(p, q, N);
        ZSTD_freeDCtx(d);
        qx_zseek_close(z);
        if (kind == 1) {
            assert_true(size < N / 10);
        }
        /* Every byte of the table and a few of the frames: flipped, it is seen. */
        for (size_t i = 0; i < size; i += i < size - 60 ? size / 50 + 1 : 1) {
            uint8_t flipped = raw[i] ^ 0x10;
            assert_int_equal(pwrite(fd, &flipped, 1, (off_t)i), 1);
            bool seen = qx_zseek_open(&z, fd, size, "x.zst", &err) != 0;
            if (!seen) {
                seen = qx_zseek_content_bytes(z) != N || qx_zseek_read(z, 0, q, N, &err) != 0;
                qx_zseek_close(z);
            }
            assert_true(seen);
            assert_int_equal(pwrite(fd, &raw[i], 1, (off_t)i), 1);
        }
        for (size_t cut = 0; cut < size; cut += size / 40 + 1) {
            assert_int_equal(ftruncate(fd, (off_t)cut), 0);
            assert_true(qx_zseek_open(&z, fd, cut, "x.zst", &err) < 0);
            assert_null(z);
        }
        free(raw);
        free(p);
        free(q);
    }
    close(fd);
}

static void empty(void **unused)
{
    (void)unused;
    char name[] = "/tmp/qx-zseek-XXXXXX";
    int fd = mkstemp(name);
    unlink(name);
    struct qx_buf b = {0};
    struct qx_zseek *z;
    qx_zseek_put_table(&b, NULL, 0);
    assert_int_equal(pwrite(fd, b.p, b.n, 0), (ssize_t)b.n);
    assert_int_equal(qx_zseek_open(&z, fd, b.n, "x", NULL), 0);
    assert_int_equal(qx_zseek_content_bytes(z), 0);
    assert_int_equal(qx_zseek_n_frames(z), 0);
    qx_zseek_close(z);
    qx_buf_fini(&b);
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(round_trip),
        cmocka_unit_test(empty),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
