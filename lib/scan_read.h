/* scan_read.h: how scan.c reads a file: out of the page cache when the bytes are there, past it otherwise. */
#ifndef QX_SCAN_READ_H
#define QX_SCAN_READ_H

#include "base.h"

#define QX_SCAN_ALIGN UINT64_C(4096) /* of direct reads: address, offset, length */

struct qx_scan_fd {
    int buffered, direct; /* direct: -1 when not asked for or not possible */
    bool open;
    uint32_t chunks;      /* the user's: reads under way */
    void *map;            /* of the whole file, never touched: only asked what is in memory; NULL if none */
    size_t map_bytes;
};

/* bulk: with a descriptor for reads past the page cache. False with errno. */
bool qx_scan_fd_open(struct qx_scan_fd *f, int dir, const char *name, uint64_t size_bytes, bool bulk);
void qx_scan_fd_close(struct qx_scan_fd *f);
/* Are all these bytes in the page cache, and may they be elsewhere (bulk)? */
bool qx_scan_fd_cached(const struct qx_scan_fd *f, uint64_t off, uint64_t n);
/* All n bytes at off, through the page cache; false with errno, EIO for a short file. */
bool qx_scan_fd_read(const struct qx_scan_fd *f, uint8_t *b, uint64_t n, uint64_t off);
/* The same past the page cache where possible. b is aligned and has room for n + 2 x QX_SCAN_ALIGN; the
 * bytes begin at *at. */
bool qx_scan_fd_read_direct(const struct qx_scan_fd *f, uint8_t *b, uint64_t n, uint64_t off, uint8_t **at);

#endif
