/* bench_verify.c: how fast `verify --level full` reads, against what the disk and the page cache give.
 *
 *   bench_verify [DIR [GIB [RUNS [THREADS]]]]      defaults: /tmp, 2, 5, 2
 *
 * Makes a file of random numbers without NaN in DIR (removed at the end), then in turn, RUNS times each:
 * a plain sequential O_DIRECT read with one 4 MiB buffer; the pass with the page cache empty; the same plain
 * read into huge pages (what the disk gives at most). Then the pass with the file in the page cache, and
 * with hashing (a manifest is written). Prints median and spread in GB/s as CSV, and of the rate of each
 * cold pass by that of the plain read just before it. */
#include "qx.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MIB (UINT64_C(1) << 20)

static char path[4096];

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void die(const char *what)
{
    fprintf(stderr, "bench_verify: %s: %s\n", what, strerror(errno));
    unlink(path);
    exit(1);
}

/* Half BF16, half E4M3; a fixed generator, bits cleared that could make a NaN. */
static void make(uint64_t bytes)
{
    uint64_t half = bytes / 2, state = 1;
    uint8_t *b = malloc(4 * MIB);
    char json[512];
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    uint64_t n;
    if (fd < 0 || !b) {
        die("cannot make the file");
    }
    snprintf(json, sizeof json,
             "{\"a.weight\":{\"dtype\":\"BF16\",\"shape\":[%llu,4096],\"data_offsets\":[0,%llu]},"
             "\"b.weight\":{\"dtype\":\"F8_E4M3\",\"shape\":[%llu,4096],\"data_offsets\":[%llu,%llu]}}",
             (unsigned long long)(half / 8192), (unsigned long long)half, (unsigned long long)(half / 4096),
             (unsigned long long)half, (unsigned long long)(2 * half));
    n = strlen(json);
    if (write(fd, &n, 8) != 8 || write(fd, json, n) != (ssize_t)n) {
        die("cannot write");
    }
    for (uint64_t at = 0; at < 2 * half; at += 4 * MIB) {
        for (uint64_t i = 0; i < 4 * MIB; i += 8) {
            uint64_t x;
            state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            x = (state ^ state >> 29) & (at < half ? UINT64_C(0xbfffbfffbfffbfff)
                                                   : UINT64_C(0xf7f7f7f7f7f7f7f7));
            memcpy(b + i, &x, 8);
        }
        if (write(fd, b, 4 * MIB) != (ssize_t)(4 * MIB)) {
            die("cannot write");
        }
    }
    if (fsync(fd) != 0) {
        die("cannot sync");
    }
    close(fd);
    free(b);
}

static void drop(void)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0) {
        die("cannot drop the page cache");
    }
    close(fd);
}

static void warm(void)
{
    static char b[1 << 20];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    while (fd >= 0 && read(fd, b, sizeof b) > 0) {
    }
    close(fd);
}

static double plain(bool huge)
{
    void *b = NULL;
    int fd = open(path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    double t0 = now();
    uint64_t sum = 0;
    ssize_t r;
    if (fd < 0 || posix_memalign(&b, huge ? 2 * MIB : 4096, 4 * MIB) != 0) {
        die("cannot read with O_DIRECT");
    }
    if (huge) {
        (void)madvise(b, 4 * MIB, MADV_HUGEPAGE);
    }
    while ((r = read(fd, b, 4 * MIB)) > 0) {
        sum += (uint64_t)r;
    }
    if (r < 0) {
        die("cannot read");
    }
    close(fd);
    free(b);
    return (double)sum / (now() - t0) * 1e-9;
}

static int swallow(void *user, const char *text, uint64_t n)
{
    (void)user;
    (void)text;
    (void)n;
    return 0;
}

static double pass(bool hash, unsigned threads)
{
    struct qx_error err = {0};
    struct qx_ckpt *ck = NULL;
    struct qx_verify *v = NULL;
    struct qx_verify_opts o = QX_VERIFY_DEFAULT;
    struct qx_verify_stats st;
    o.level = QX_VERIFY_FULL;
    o.n_threads = threads;
    o.manifest_out = hash ? swallow : NULL;
    if (qx_ckpt_open(&ck, path, NULL, &err) != 0 || qx_verify_run(&v, ck, &o, &err) != 0) {
        fprintf(stderr, "bench_verify: %s\n", err.msg);
        unlink(path);
        exit(1);
    }
    qx_verify_stats(v, &st);
    if (qx_findings_count(qx_verify_findings(v)) != 0) {
        fprintf(stderr, "bench_verify: unexpected finding: %s\n",
                qx_findings_at(qx_verify_findings(v), 0)->text);
    }
    qx_verify_free(v);
    qx_ckpt_close(ck);
    return (double)st.read_bytes / (double)st.read_ns;
}

static int by_rate(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void report(const char *what, double *rate, int n)
{
    qsort(rate, (size_t)n, sizeof *rate, by_rate);
    printf("%s,%.2f,%.2f,%.2f\n", what, rate[n / 2], rate[0], rate[n - 1]);
}

int main(int argc, char **argv)
{
    const char *dir = argc > 1 ? argv[1] : "/tmp";
    double gib = argc > 2 ? atof(argv[2]) : 2;
    int runs = argc > 3 ? atoi(argv[3]) : 5;
    unsigned threads = argc > 4 ? (unsigned)atoi(argv[4]) : 2;
    double rate[6][100];
    uint64_t bytes = (uint64_t)(gib * 128) * 8 * MIB;
    if (runs < 1 || runs > 100 || bytes == 0) {
        fprintf(stderr, "usage: bench_verify [DIR [GIB [RUNS [THREADS]]]]\n");
        return 2;
    }
    snprintf(path, sizeof path, "%s/bench_verify.%ld.safetensors", dir, (long)getpid());
    make(bytes);
    for (int i = 0; i < runs; ++i) {
        drop();
        rate[0][i] = plain(false);
        drop();
        rate[1][i] = pass(false, threads);
        rate[2][i] = rate[1][i] / rate[0][i];
        drop();
        rate[3][i] = plain(true);
    }
    warm();
    for (int i = 0; i < runs; ++i) {
        rate[4][i] = pass(false, threads);
        rate[5][i] = pass(true, threads);
    }
    unlink(path);
    printf("what,median_GB_per_s,min,max\n");
    report("plain O_DIRECT read", rate[0], runs);
    report("full, cold", rate[1], runs);
    report("plain O_DIRECT read into huge pages", rate[3], runs);
    report("full, cached", rate[4], runs);
    report("full with hashes, cached", rate[5], runs);
    report("cold by plain", rate[2], runs);
    return 0;
}
