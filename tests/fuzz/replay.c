/* replay.c: a plain main for a fuzz target: runs it over the given files and the files of the given
 * folders, then over every prefix and a fixed set of mutations of each. Used in ordinary test runs. */
#include "fuzz.h"

#include <dirent.h>
#include <sys/stat.h>

#define LARGEST ((size_t)1 << 20)
#define MUTATIONS 400

static unsigned long inputs;

static uint32_t next(uint32_t *seed)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 17;
    *seed ^= *seed << 5;
    return *seed;
}

static void run(const uint8_t *p, size_t n)
{
    (void)LLVMFuzzerTestOneInput(p, n);
    inputs++;
}

static void mutate(const uint8_t *p, size_t n)
{
    static const char bytes[] = "\0\xff{}[]\",:0-9e.\\u/* \n\x80\x1b";
    uint8_t *q = malloc(2 * n + 16);
    uint32_t seed = 1 + (uint32_t)n;
    CHECK(q);
    for (int i = 0; i < MUTATIONS && n; i++) {
        size_t m = n, at = next(&seed) % n, len = 1 + next(&seed) % 8;
        memcpy(q, p, n);
        switch (next(&seed) % 4) {
        case 0: /* a bit */
            q[at] ^= (uint8_t)(1u << next(&seed) % 8);
            break;
        case 1: /* a byte that means something */
            q[at] = (uint8_t)bytes[next(&seed) % (sizeof bytes - 1)];
            break;
        case 2: /* bytes taken out */
            len = len < n - at ? len : n - at;
            memmove(q + at, q + at + len, n - at - len);
            m = n - len;
            break;
        default: /* a piece doubled */
            len = len < n - at ? len : n - at;
            memmove(q + at + len, q + at, n - at);
            m = n + len;
        }
        run(q, m);
    }
    free(q);
}

static void replay_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    uint8_t *p = malloc(LARGEST);
    if (!f || !p) {
        perror(path);
        exit(1);
    }
    size_t n = fread(p, 1, LARGEST, f);
    fclose(f);
    run(p, n);
    for (size_t k = 0; k < n; k += n < 4096 ? 1 : n / 500) {
        run(p, k);
    }
    if (n < 65536) {
        mutate(p, n);
    }
    free(p);
}

static void replay(const char *path)
{
    struct stat st;
    if (stat(path, &st) != 0) {
        perror(path);
        exit(1);
    }
    if (!S_ISDIR(st.st_mode)) {
        replay_file(path);
        return;
    }
    DIR *d = opendir(path);
    for (const struct dirent *e; d && (e = readdir(d)) != NULL;) {
        char name[1024];
        snprintf(name, sizeof name, "%s/%s", path, e->d_name);
        if (e->d_name[0] != '.') {
            replay_file(name);
        }
    }
    if (d) {
        closedir(d);
    }
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        replay(argv[i]);
    }
    printf("%lu inputs\n", inputs);
    return inputs ? 0 : 1;
}
