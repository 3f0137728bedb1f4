/* bench_quantize: speed of the encoders on one core, after all sets of loops were found to write equal
 * bytes: GB/s of BF16 input (two bytes a value) by processor time, median and spread of ten rounds as CSV. */
#include "quantize.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ROUNDS 10
#define ROWS 16384
#define COLS 160

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void line(const char *what, const char *set, double *v)
{
    qsort(v, ROUNDS, sizeof *v, by_value);
    printf("%s,%s,GB/s in,%.3f,%.3f,%.3f\n", what, set, v[ROUNDS / 2], v[0], v[ROUNDS - 1]);
}

int main(void)
{
    static const char *const names[] = {"c", "avx2", "avx512"};
    size_t n = (size_t)ROWS * COLS;
    float *x = malloc(n * sizeof *x);
    uint8_t *codes[2] = {malloc(n), malloc(n)}, *scales[2] = {malloc(n / 16), malloc(n / 16)};
    uint64_t s = 88172645463325252u;
    bool finite;
    double v[ROUNDS];
    for (size_t i = 0; i < n; i++) {
        double u[2];
        for (int k = 0; k < 2; k++) {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            u[k] = ((double)(s >> 11) + 0.5) * 0x1p-53;
        }
        x[i] = (float)(0.02 * sqrt(-2.0 * log(u[0])) * cos(6.283185307179586 * u[1]));
    }
    float amax = qx_amax(x, n, &finite), global = qx_nvfp4_global(amax);
    printf("what,loops,unit,median,min,max\n");
    for (int level = 0; level <= (int)qx_simd_level(); level++) {
        for (int search = 1; search >= 0; search--) {
            for (int k = -1; k < ROUNDS; k++) {
                struct qx_quant_stats st = {0};
                double t = now();
                qx_nvfp4_quantize_level((enum qx_simd)level, x, ROWS, COLS, global, search != 0,
                                        codes[level > 0], scales[level > 0], &st);
                v[k < 0 ? 0 : k] = (double)(2 * n) / (now() - t) / 1e9;
            }
            if (search && level > 0 && (memcmp(codes[0], codes[1], n / 2) != 0 ||
                                        memcmp(scales[0], scales[1], n / 16) != 0)) {
                /* codes[0] holds the plain loops' search result only while that ran last */
                struct qx_quant_stats st = {0};
                qx_nvfp4_quantize_level(QX_SIMD_C, x, ROWS, COLS, global, true, codes[0], scales[0], &st);
                if (memcmp(codes[0], codes[1], n / 2) != 0 || memcmp(scales[0], scales[1], n / 16) != 0) {
                    fprintf(stderr, "bench_quantize: %s writes other bytes than c\n", names[level]);
                    return 1;
                }
            }
            line(search ? "nvfp4 with search" : "nvfp4 plain", names[level], v);
        }
    }
    float scale = qx_fp8_plain_scale(amax);
    /* The same table as FP8: bytes in, half as many as of BF16. */
    struct qx_quant_stats ignored = {0};
    uint8_t *bytes = malloc(n);
    qx_fp8_quantize(x, ROWS, COLS, scale, scale, bytes, &ignored);
    for (int level = 0; level <= (int)qx_simd_level(); level++) {
        for (int k = -1; k < ROUNDS; k++) {
            struct qx_quant_stats st = {0};
            double t = now();
            qx_nvfp4_quantize_e4m3_level((enum qx_simd)level, bytes, scale, ROWS, COLS, global, true, codes[0],
                                         scales[0], &st);
            v[k < 0 ? 0 : k] = (double)n / (now() - t) / 1e9;
        }
        line("nvfp4 of fp8 with search", names[level], v);
    }
    free(bytes);
    for (int k = -1; k < ROUNDS; k++) {
        struct qx_quant_stats st = {0};
        double t = now();
        qx_fp8_quantize(x, ROWS, COLS, scale, scale, codes[0], &st);
        v[k < 0 ? 0 : k] = (double)(2 * n) / (now() - t) / 1e9;
    }
    line("fp8", names[qx_simd_level()], v);
    uint16_t *blocks = malloc(n);
    for (int k = -1; k < ROUNDS; k++) {
        struct qx_quant_stats st = {0};
        double t = now();
        if (qx_fp8_block_quantize(x, ROWS / 16, COLS * 16, true, codes[0], blocks, &st, NULL) != 0) {
            return 1;
        }
        v[k < 0 ? 0 : k] = (double)(2 * n) / (now() - t) / 1e9;
    }
    line("fp8 block with search", names[qx_simd_level()], v);
    free(blocks);
    for (int i = 0; i < 2; i++) {
        free(codes[i]);
        free(scales[i]);
    }
    free(x);
    return 0;
}
