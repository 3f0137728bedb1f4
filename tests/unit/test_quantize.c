/* The encoders: every set of loops writes the same bytes, the plain choice is that of nvfp4.c and fp8.c, the
 * search is never worse, and odd inputs (zeros, one value, extremes) stay exact and finite. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codes.h"
#include "fp8.h"
#include "nvfp4.h"
#include "quantize.h"

#define ROWS 61 /* no multiple of any vector */
#define COLS 160

static uint64_t state = 88172645463325252u;
static double uniform(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return ((double)(state >> 11) + 0.5) * 0x1p-53;
}

static void fill(float *x, size_t n, int kind)
{
    for (size_t i = 0; i < n; i++) {
        double g = sqrt(-2.0 * log(uniform())) * cos(6.283185307179586 * uniform());
        switch (kind) {
        case 0:
            x[i] = (float)(0.02 * g);
            break;
        case 1: /* heavy tails, blocks of zeros */
            x[i] = (i / 16) % 7 == 3 ? 0.0f : (float)(g * g * g * 1e-3);
            break;
        case 2: /* one value a block */
            x[i] = i % 16 == 5 ? (float)g : 0.0f;
            break;
        case 3: /* magnitudes over many octaves */
            x[i] = (float)ldexp(g, (int)(uniform() * 40) - 30);
            break;
        case 4:
            x[i] = 0.0f;
            break;
        default: /* exactly representable: the largest code is in every block */
            x[i] = i % 16 == 0 ? 3.0f : qx_e2m1_table[(size_t)(uniform() * 16)] * 0.5f;
            break;
        }
    }
}

static void nvfp4(void **unused)
{
    (void)unused;
    static float x[ROWS * COLS], y[ROWS * COLS];
    static uint8_t codes[3][ROWS * COLS / 2], scales[3][ROWS * COLS / 16];
    for (int kind = 0; kind < 6; kind++) {
        bool finite;
        fill(x, ROWS * COLS, kind);
        float global = qx_nvfp4_global(qx_amax(x, ROWS * COLS, &finite));
        assert_true(finite && global > 0.0f && isfinite(global));
        for (int search = 0; search < 2; search++) {
            struct qx_quant_stats st[3];
            memset(st, 0, sizeof st);
            for (int level = 0; level <= (int)qx_simd_level(); level++) {
                qx_nvfp4_quantize_level((enum qx_simd)level, x, ROWS, COLS, global, search != 0, codes[level],
                                        scales[level], &st[level]);
                assert_memory_equal(codes[level], codes[0], sizeof codes[0]);
                assert_memory_equal(scales[level], scales[0], sizeof scales[0]);
                assert_memory_equal(&st[level], &st[0], sizeof st[0]);
            }
            double err = 0.0, plain = 0.0, least = 0.0;
            for (size_t b = 0; b < ROWS * COLS / 16; b++) {
                uint8_t c[8], s = qx_nvfp4_amax_scale(x + 16 * b, global);
                double p = qx_nvfp4_encode_block(x + 16 * b, global, s, c), e;
                if (!search) {
                    assert_int_equal(scales[0][b], s);
                    assert_memory_equal(codes[0] + 8 * b, c, 8);
                }
                e = qx_nvfp4_encode_block(x + 16 * b, global, scales[0][b], c);
                assert_memory_equal(codes[0] + 8 * b, c, 8);
                assert_true(e <= p);
                assert_true(scales[0][b] < 0x7f);
                err += e;
                plain += p;
                for (int d = -2; d <= 6; d++) {
                    int k = s + d;
                    double q = s == 0 || k < 1 || k > 0x7e
                                   ? p
                                   : qx_nvfp4_encode_block(x + 16 * b, global, (uint8_t)k, c);
                    p = q < p ? q : p;
                }
                least += p;
            }
            /* Nearly what trying every candidate exactly gives: distances are rounded to 2^-12 of a
             * step, and a candidate that gains less than 1e-5 is passed over. */
            assert_true(!search || err <= least * 1.0002);
            /* f32 sums of 16 squares: each term within two ulps, the sum within 16 more. */
            assert_true(fabs(st[0].err_sq - err) <= 2e-6 * err);
            assert_true(fabs(st[0].plain_err_sq - plain) <= 2e-6 * plain);
            assert_int_equal(st[0].n_rows, ROWS);
            qx_nvfp4_decode(codes[0], scales[0], global, ROWS * COLS, y);
            for (size_t i = 0; i < ROWS * COLS; i++) {
                assert_true(isfinite(y[i]));
                assert_true(x[i] != 0.0f || y[i] == 0.0f);
                assert_true(fabs((double)y[i] - (double)x[i]) <= st[0].max_err);
            }
            if (kind == 0 && search) {
                assert_true(st[0].err_sq < 0.8 * st[0].plain_err_sq);
            }
            if (kind == 5) {
                /* Up to the rounding of 1/896 and of the product: 2^-24 each, squared. */
                assert_true(st[0].err_sq <= 0x1p-46 * st[0].sum_sq);
            }
        }
    }
}

/* E4M3 bytes under one scale need no decoding first: codes, scales and statistics are the same. */
static void nvfp4_of_e4m3(void **unused)
{
    (void)unused;
    static uint8_t x[ROWS * COLS], codes[2][ROWS * COLS / 2], scales[2][ROWS * COLS / 16];
    static float y[ROWS * COLS];
    static const float scale_of[] = {1.0f, 0.013f, 0x1p119f, 0x1p-126f, 0x1.5p-140f, 0.0f};
    for (int kind = 0; kind < 5; kind++) {
        for (size_t i = 0; i < ROWS * COLS; i++) {
            /* Any; narrow; one a block; small ones, many of them subnormal; zeros of both signs. */
            unsigned u = (unsigned)(uniform() * 256.0);
            u = kind == 1 ? (u & 0x9f) | 0x20 : kind == 2 && i % 16 != 3 ? 0 : kind == 3 ? u & 0x8f : u;
            x[i] = (uint8_t)(kind == 4 && i % 5 != 0 ? u & 0x80 : (u & 0x7f) == 0x7f ? u - 1 : u);
        }
        for (size_t k = 0; k < sizeof scale_of / sizeof *scale_of; k++) {
            float scale = scale_of[k];
            bool finite;
            qx_fp8_decode(x, scale, ROWS * COLS, y);
            float global = qx_nvfp4_global(qx_amax(y, ROWS * COLS, &finite));
            for (int search = 0; search < 2; search++) {
                struct qx_quant_stats want = {0};
                qx_nvfp4_quantize_level(QX_SIMD_C, y, ROWS, COLS, global, search != 0, codes[0], scales[0], &want);
                for (int level = 0; level <= (int)qx_simd_level(); level++) {
                    struct qx_quant_stats st = {0};
                    assert_true(qx_nvfp4_quantize_e4m3_level((enum qx_simd)level, x, scale, ROWS, COLS, global,
                                                             search != 0, codes[1], scales[1], &st));
                    assert_memory_equal(codes[1], codes[0], sizeof codes[0]);
                    assert_memory_equal(scales[1], scales[0], sizeof scales[0]);
                    assert_memory_equal(&st, &want, sizeof st);
                }
            }
        }
    }
    struct qx_quant_stats st = {0};
    assert_false(qx_nvfp4_quantize_e4m3(x, -1.0f, 1, 16, 1.0f, true, codes[0], scales[0], &st));
    assert_false(qx_nvfp4_quantize_e4m3(x, NAN, 1, 16, 1.0f, true, codes[0], scales[0], &st));
    assert_false(qx_nvfp4_quantize_e4m3(x, 0x1.8p119f, 1, 16, 1.0f, true, codes[0], scales[0], &st));
}

/* What the search chooses does not change unnoticed: FNV-1a over codes and scales of inputs that are the same
 * everywhere. A checkpoint that was repacked once is repacked to the same bytes. */
static void nvfp4_stays(void **unused)
{
    (void)unused;
    static float x[ROWS * COLS];
    static uint8_t out[ROWS * COLS / 2 + ROWS * COLS / 16];
    static const uint64_t want[] = {0x5ab92d717de9dca8u, 0xc9cd5eb372c85b18u, 0xe4aca4d50c79cfb8u, 0xf26c03b6d9b9f5a6u};
    for (int kind = 0; kind < 4; kind++) {
        uint64_t s = 1 + (uint64_t)kind, hash = 0xcbf29ce484222325u;
        bool finite;
        for (size_t i = 0; i < ROWS * COLS; i++) {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            /* Exponents over 4, 16, 64 octaves, and eight bits of mantissa over 4. */
            uint32_t octaves = kind == 3 ? 4 : 4u << 2 * kind;
            uint32_t u = (uint32_t)(s >> 40) & (kind == 3 ? 0x7f8000u : 0x7fffffu);
            x[i] = qx_f32_from_bits((uint32_t)(s >> 63) << 31 | (120 - (uint32_t)(s >> 20) % octaves) << 23 | u);
        }
        float global = qx_nvfp4_global(qx_amax(x, ROWS * COLS, &finite));
        struct qx_quant_stats st = {0};
        qx_nvfp4_quantize(x, ROWS, COLS, global, true, out, out + ROWS * COLS / 2, &st);
        for (size_t i = 0; i < sizeof out; i++) {
            hash = (hash ^ out[i]) * 0x100000001b3u;
        }
        assert_int_equal(hash, want[kind]);
    }
}

static void fp8(void **unused)
{
    (void)unused;
    static float x[ROWS * COLS];
    static uint8_t codes[ROWS * COLS], want[ROWS * COLS];
    for (int kind = 0; kind < 5; kind++) {
        bool finite;
        fill(x, ROWS * COLS, kind);
        float amax = qx_amax(x, ROWS * COLS, &finite), plain = qx_fp8_plain_scale(amax);
        struct qx_quant_stats st = {0};
        assert_true(plain > 0.0f && qx_bf16_to_f32(qx_f32_to_bf16(plain)) == plain);
        qx_fp8_quantize(x, ROWS, COLS, plain, plain, codes, &st);
        double err = qx_fp8_encode(x, plain, ROWS * COLS, want);
        assert_memory_equal(codes, want, sizeof codes);
        assert_true(fabs(st.err_sq - err) <= 2e-6 * err);
        for (size_t i = 0; i < ROWS * COLS; i++) {
            assert_true((codes[i] & 0x7f) != 0x7f);
        }
        /* A histogram of the values themselves: the scale found is never worse than the plain one. */
        float values[ROWS * COLS];
        uint64_t count[ROWS * COLS];
        for (size_t i = 0; i < ROWS * COLS; i++) {
            values[i] = fabsf(x[i]);
            count[i] = 1;
        }
        struct qx_histogram h = {values, count, ROWS * COLS};
        float best = qx_fp8_search(&h, amax);
        assert_true(qx_fp8_encode(x, best, ROWS * COLS, want) <= err);
    }
}

static void fp8_block(void **unused)
{
    (void)unused;
    enum { R = 200, C = 300 };
    static float x[R * C];
    static uint8_t codes[R * C];
    uint16_t scales[2 * 3];
    for (int kind = 0; kind < 5; kind++) {
        fill(x, R * C, kind);
        struct qx_quant_stats st = {0};
        assert_int_equal(qx_fp8_block_quantize(x, R, C, true, codes, scales, &st, NULL), 0);
        double err = 0.0;
        for (size_t r = 0; r < R; r++) {
            float row[3], y[C];
            for (size_t c = 0; c < 3; c++) {
                row[c] = qx_bf16_to_f32(scales[r / 128 * 3 + c]);
                assert_true(row[c] > 0.0f && isfinite(row[c]));
            }
            qx_fp8_block_decode(codes + r * C, row, C, y);
            for (size_t c = 0; c < C; c++) {
                double d = (double)y[c] - (double)x[r * C + c];
                err += d * d;
            }
        }
        assert_true(fabs(st.err_sq - err) <= 4e-6 * err);
        assert_true(st.err_sq <= st.plain_err_sq);
        assert_int_equal(st.n_values, R * C);
    }
}

static void amax(void **unused)
{
    (void)unused;
    float x[37] = {0};
    bool finite;
    uint16_t h[37] = {0};
    uint8_t b[37] = {0};
    x[35] = -3.5f;
    h[36] = 0xbf80;
    b[3] = 0xfe;
    assert_true(qx_amax(x, 37, &finite) == 3.5f && finite);
    assert_int_equal(qx_amax_half(h, 37), 0x3f80);
    assert_int_equal(qx_amax_e4m3(b, 37), 0x7e);
    x[0] = NAN;
    qx_amax(x, 37, &finite);
    assert_false(finite);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nvfp4),
        cmocka_unit_test(nvfp4_of_e4m3),
        cmocka_unit_test(nvfp4_stays),
        cmocka_unit_test(fp8),
        cmocka_unit_test(fp8_block),
        cmocka_unit_test(amax),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
