/* fuzz.h: what every fuzz target shares. A target asserts more than survival: what it accepts is in
 * bounds, prints and parses back to the same, and leaves no block behind. */
#ifndef QX_FUZZ_H
#define QX_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "alloc.h"

#define CHECK(cond)                                                                   \
    do {                                                                              \
        if (!(cond)) {                                                                \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #cond);        \
            abort();                                                                  \
        }                                                                             \
    } while (0)

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* An exact copy on the heap, so that a sanitizer sees any read past the end. */
static inline char *fuzz_copy(const uint8_t *data, size_t size)
{
    char *p = malloc(size ? size : 1);
    CHECK(p);
    if (size) {
        memcpy(p, data, size);
    }
    return p;
}

/* A file that holds the bytes; the same descriptor every time. */
static inline int fuzz_file(const uint8_t *data, size_t size)
{
    static int fd = -1;
    if (fd < 0) {
        fd = memfd_create("fuzz", 0);
    }
    CHECK(fd >= 0 && ftruncate(fd, 0) == 0 && pwrite(fd, data, size, 0) == (ssize_t)size);
    return fd;
}

#endif
