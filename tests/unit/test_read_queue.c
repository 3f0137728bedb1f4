/* Reads in flight: the right bytes by both methods, ends of files, failures, more reads than depth. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <unistd.h>

#include "alloc.h"
#include "file_map.h"
#include "read_queue.h"

#define FILE_BYTES 1000003u

static unsigned char byte_at(uint64_t i)
{
    return (unsigned char)(i * 2654435761u >> 13);
}

static int make_file(char *path)
{
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    unsigned char *p = malloc(FILE_BYTES);
    for (uint64_t i = 0; i < FILE_BYTES; i++) {
        p[i] = byte_at(i);
    }
    assert_int_equal(write(fd, p, FILE_BYTES), FILE_BYTES);
    free(p);
    return fd;
}

static void reads(bool threads_only, uint32_t depth)
{
    char path[] = "/tmp/qx-test-XXXXXX";
    int fd = make_file(path);
    enum { N = 500 };
    struct qx_read r[N];
    unsigned char *buf = malloc(N * 4096);
    struct qx_read_queue *q;
    struct qx_error err = {0};
    assert_int_equal(qx_read_queue_create(&q, depth, threads_only, &err), 0);
    if (threads_only) {
        assert_string_equal(qx_read_queue_method(q), "threads");
    }
    for (uint64_t i = 0; i < N; i++) {
        r[i] = (struct qx_read){.fd = fd, .off = i * 1987, .dst = buf + i * 4096, .n = i * 37 % 4096};
    }
    assert_int_equal(qx_read_queue_all(q, r, N, &err), 0);
    for (uint64_t i = 0; i < N; i++) {
        assert_true(r[i].got == r[i].n && r[i].sys == 0);
        for (uint64_t k = 0; k < r[i].n; k++) {
            assert_int_equal(buf[i * 4096 + k], byte_at(i * 1987 + k));
        }
    }
    /* past the end: short, with what there is */
    r[0] = (struct qx_read){.fd = fd, .off = FILE_BYTES - 10, .dst = buf, .n = 100};
    r[1] = (struct qx_read){.fd = fd, .off = FILE_BYTES + 10, .dst = buf + 100, .n = 100};
    assert_int_equal(qx_read_queue_all(q, r, 2, &err), -(int)QX_E_IO);
    assert_string_equal(err.kind, "file-changed");
    assert_true(r[0].got == 10 && r[1].got == 0);
    /* a descriptor that cannot be read */
    int out = open("/dev/null", O_WRONLY);
    r[0] = (struct qx_read){.fd = out, .dst = buf, .n = 100};
    assert_int_equal(qx_read_queue_all(q, r, 1, &err), -(int)QX_E_IO);
    assert_string_equal(err.kind, "read-error");
    close(out);
    /* taken one by one; then dropped in flight */
    size_t taken = 0;
    for (uint64_t i = 0; i < N; i++) {
        r[i] = (struct qx_read){.fd = fd, .off = i, .dst = buf + i, .n = 1, .user = &r[i]};
        qx_read_queue_submit(q, &r[i]);
        struct qx_read *d = qx_read_queue_take(q, false);
        assert_true(!d || d->user == d);
        taken += d != NULL;
    }
    while (qx_read_queue_take(q, true)) {
        taken++;
    }
    assert_int_equal(taken, N);
    for (uint64_t i = 0; i < N; i++) {
        r[i] = (struct qx_read){.fd = fd, .off = i, .dst = buf + i, .n = 1};
        qx_read_queue_submit(q, &r[i]);
    }
    qx_read_queue_destroy(q);
    qx_read_queue_destroy(NULL);
    free(buf);
    close(fd);
    unlink(path);
}

static void by_ring(void **state)
{
    (void)state;
    reads(false, 64);
    reads(false, 1);
}

static void by_threads(void **state)
{
    (void)state;
    reads(true, 64);
    reads(true, 1);
}

static void small_files(void **state)
{
    (void)state;
    char path[] = "/tmp/qx-test-XXXXXX";
    int fd = make_file(path), other;
    struct qx_error err = {0};
    char *text;
    size_t n;
    uint64_t size;
    assert_int_equal(qx_file_read_all(path, FILE_BYTES, &text, &n, &err), 0);
    assert_int_equal(n, FILE_BYTES);
    assert_int_equal(text[n], '\0');
    qx_free(text);
    assert_int_equal(qx_file_read_all(path, FILE_BYTES - 1, &text, &n, &err), -(int)QX_E_FORMAT);
    assert_string_equal(err.kind, "too-large");
    assert_int_equal(qx_file_read_all("/tmp", 10, &text, &n, &err), -(int)QX_E_IO);
    assert_string_equal(err.kind, "not-a-file");
    assert_int_equal(qx_file_open("/dev/null", &other, &size, &err), -(int)QX_E_IO);
    assert_int_equal(qx_file_open("/nonexistent/x", &other, &size, &err), -(int)QX_E_NOT_FOUND);
    struct qx_map m;
    assert_int_equal(qx_map_open(&m, fd, FILE_BYTES, &err), 0);
    assert_int_equal(m.p[777], byte_at(777));
    assert_int_equal(ftruncate(fd, 100), 0); /* a map of a file that is cut is not handed out again */
    assert_int_equal(qx_file_check_size(fd, FILE_BYTES, &err), -(int)QX_E_IO);
    assert_string_equal(err.kind, "file-changed");
    qx_map_close(&m);
    assert_int_equal(qx_map_open(&m, fd, FILE_BYTES, &err), -(int)QX_E_IO);
    close(fd);
    unlink(path);
}

static void names_inside(void **state)
{
    (void)state;
    static const struct { const char *name; bool ok; } rows[] = {
        {"a.safetensors", true}, {"mtp/x.safetensors", true}, {"..a", true}, {"a..", true}, {"a/..b/c", true},
        {"", false}, {"/a", false}, {"..", false}, {"../a", false}, {"a/../b", false}, {"a/..", false}, {"a/", false}};
    for (size_t i = 0; i < QX_ARRAY_LEN(rows); i++) {
        assert_int_equal(qx_name_stays_inside(rows[i].name, strlen(rows[i].name)), rows[i].ok);
    }
    assert_false(qx_name_stays_inside("a\0b", 3));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(by_ring), cmocka_unit_test(by_threads),
                                       cmocka_unit_test(small_files), cmocka_unit_test(names_inside)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
