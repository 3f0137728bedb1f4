/* The row layout's header and geometry, npy headers, safetensors headers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>

#include "npy_write.h"
#include "pack.h"
#include "st_write.h"

static void layout(void **unused)
{
    (void)unused;
    static const struct { enum qx_format f; uint32_t codes, scales, per_block; } want[] = {
        {QX_F_BF16, 320, 0, 12}, {QX_F_FP8, 160, 0, 25}, {QX_F_NVFP4, 80, 10, 45}, {QX_F_F32, 640, 0, 6},
    };
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++) {
        struct qx_pack_info p = {.format = want[i].f, .width = 160, .n_rows = 320001536}, q;
        assert_true(qx_pack_layout(&p));
        assert_int_equal(p.code_bytes, want[i].codes);
        assert_int_equal(p.scale_bytes, want[i].scales);
        assert_int_equal(p.rows_per_block, want[i].per_block);
        /* No row crosses a block. */
        for (uint64_t row = 0; row < 1000; row++) {
            uint64_t off = qx_pack_row_off(&p, row);
            assert_int_equal(off / 4096, (off + p.code_bytes + p.scale_bytes - 1) / 4096);
        }
        assert_true(qx_pack_row_off(&p, p.n_rows - 1) + p.code_bytes + p.scale_bytes <= p.n_blocks * 4096);
        p.has_global = want[i].f == QX_F_FP8 || want[i].f == QX_F_NVFP4;
        p.global_bits = 0x380b6db7;
        p.row_base = 7;
        p.has_hash = true;
        memset(p.xxh3, 0xab, 16);
        char text[320];
        qx_pack_print(&p, text);
        assert_int_equal(qx_pack_parse(&q, text, NULL), 0);
        p.global_bits = p.has_global ? p.global_bits : 0;
        assert_memory_equal(&p, &q, sizeof p);
        /* Every text that was changed in one place is refused or reads as something else. */
        for (size_t k = 0; text[k] != 0; k++) {
            char changed[320];
            memcpy(changed, text, sizeof changed);
            changed[k] = changed[k] == ' ' ? '_' : ' ';
            assert_true(qx_pack_parse(&q, changed, NULL) < 0);
        }
    }
    struct qx_pack_info wide = {.format = QX_F_F32, .width = 2000, .n_rows = 1};
    assert_false(qx_pack_layout(&wide));
    struct qx_pack_info odd = {.format = QX_F_NVFP4, .width = 40, .n_rows = 1};
    assert_false(qx_pack_layout(&odd));
}

static void npy(void **unused)
{
    (void)unused;
    char h[QX_NPY_HEADER_BYTES];
    uint64_t shape[2] = {3, UINT64_MAX};
    qx_npy_header(h, "<f4", shape, 2);
    assert_memory_equal(h, "\x93NUMPY\x01\x00\x76\x00", 10);
    assert_int_equal(h[127], '\n');
    assert_non_null(memmem(h, 128, "'shape': (3, 18446744073709551615), }", 36));
    qx_npy_header(h, "|u1", shape, 1);
    assert_non_null(memmem(h, 128, "'shape': (3,), }", 16));
}

static void safetensors(void **unused)
{
    (void)unused;
    uint64_t shape[2] = {2, 3}, bytes;
    struct qx_st_tensor t[2] = {{.name = "a", .dtype = "BF16", .shape = shape, .n_dims = 2, .size_bytes = 12},
                                {.name = "b\"", .dtype = "F32", .shape = shape, .n_dims = 0, .size_bytes = 4}};
    struct qx_st_pair meta = {"format", "pt"};
    for (uint64_t align = 8; align <= 4096; align *= 8) {
        struct qx_buf b = {0};
        assert_int_equal(qx_st_header(&b, t, 2, &meta, 1, align, &bytes, NULL), 0);
        assert_int_equal(t[0].off % align, 0);
        assert_int_equal(t[1].off, t[0].off + 12);
        assert_int_equal(bytes, t[1].off + 4);
        assert_int_equal(b.n, t[0].off);
        assert_int_equal((uint8_t)b.p[0] | (uint8_t)b.p[1] << 8, b.n - 8);
        assert_non_null(memmem(b.p, b.n, "\"data_offsets\"", 14));
        qx_buf_fini(&b);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layout),
        cmocka_unit_test(npy),
        cmocka_unit_test(safetensors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
