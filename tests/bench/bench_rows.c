/* bench_rows: speed of reading table rows, from the page cache, on one core.
 *
 *   bench_rows PATH...      checkpoints with a large table (tests/bench/tables.py makes some)
 *
 * Sequential: f32 output in chunks of 16 MiB, GB/s. Random: uniformly drawn rows in batches of
 * 65536, rows a second. Times are of the processor, so that what else runs on the machine counts
 * less. Ten rounds after one that warms up; median and spread as CSV. */
#include "decode.h"
#include "pool.h"
#include "rows.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define ROUNDS 10
#define CHUNK 26214
#define BATCH 65536

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double wall(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void draw(uint64_t *state, uint64_t ids[BATCH], uint64_t n)
{
    for (size_t i = 0; i < BATCH; i++) {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        ids[i] = *state % n;
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void line(const char *path, const char *format, const char *what, const char *unit,
                 double *v)
{
    qsort(v, ROUNDS, sizeof *v, by_value);
    printf("%s,%s,%s,%s,%.3f,%.3f,%.3f\n", path, format, what, unit, v[ROUNDS / 2], v[0],
           v[ROUNDS - 1]);
    fflush(stdout);
}

static int bench(const char *path, struct qx_pool *pool)
{
    struct qx_error err = {0};
    struct qx_ckpt *ck = NULL;
    struct qx_rows *r = NULL;
    if (qx_ckpt_open(&ck, path, &QX_OPEN_DEFAULT, &err) != 0 ||
        qx_rows_open_table(&r, ck, &err) != 0) {
        fprintf(stderr, "bench_rows: %s: %s\n", path, err.msg);
        qx_ckpt_close(ck);
        return 1;
    }
    uint64_t n = qx_rows_count(r), width = qx_rows_width(r);
    uint64_t *ids = malloc(BATCH * sizeof *ids);
    float *out = malloc(BATCH * width * sizeof *out);
    double seq[ROUNDS], rnd[ROUNDS], all[ROUNDS];
    uint64_t state = 88172645463325252u;
    int rc = ids == NULL || out == NULL;
    for (int k = -1; rc == 0 && k < ROUNDS; k++) {
        double t = now();
        for (uint64_t row = 0; rc == 0 && row < n; row += CHUNK) {
            uint64_t m = n - row < CHUNK ? n - row : CHUNK;
            for (uint64_t i = 0; i < m; i++) {
                ids[i] = row + i;
            }
            rc = qx_rows_read(r, ids, m, QX_ROW_F32, out, &err);
        }
        t = now() - t;
        seq[k < 0 ? 0 : k] = (double)(n * width * 4) / t / 1e9;
        uint64_t done = 0;
        double spent = 0.0;
        while (rc == 0 && done < 1000000) {
            draw(&state, ids, n);
            t = now();
            rc = qx_rows_read(r, ids, BATCH, QX_ROW_F32, out, &err);
            spent += now() - t;
            done += BATCH;
        }
        rnd[k < 0 ? 0 : k] = (double)done / spent / 1e6;
        done = 0;
        spent = 0.0;
        while (rc == 0 && done < 1000000) {
            draw(&state, ids, n);
            t = wall();
            rc = qx_rows_read_pool(r, pool, ids, BATCH, QX_ROW_F32, out, &err);
            spent += wall() - t;
            done += BATCH;
        }
        all[k < 0 ? 0 : k] = (double)done / spent / 1e6;
    }
    if (rc == 0) {
        line(path, qx_format_name(qx_rows_format(r)), "sequential", "GB/s f32", seq);
        line(path, qx_format_name(qx_rows_format(r)), "random", "million rows/s", rnd);
        line(path, qx_format_name(qx_rows_format(r)), "random, all threads, wall time",
             "million rows/s", all);
    } else {
        fprintf(stderr, "bench_rows: %s: %s\n", path, err.msg);
    }
    free(ids);
    free(out);
    qx_rows_close(r);
    qx_ckpt_close(ck);
    return rc != 0;
}

int main(int argc, char **argv)
{
    struct qx_pool *pool;
    int rc = qx_pool_create(&pool, 0, NULL);
    printf("path,format,what,unit,median,min,max\n");
    fprintf(stderr, "bench_rows: decoding loops: %s\n", qx_decode_ops()->name);
    for (int i = 1; i < argc; i++) {
        rc |= bench(argv[i], pool);
    }
    qx_pool_destroy(pool);
    return rc;
}
