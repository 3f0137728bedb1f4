/* scan_read.c: one open file of the pass over all bytes. Owns two descriptors and a mapping that is only
 * asked which pages are in memory. */
#include "scan_read.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

void qx_scan_fd_close(struct qx_scan_fd *f)
{
    if (!f->open) {
        return;
    }
    close(f->buffered);
    if (f->map) {
        munmap(f->map, f->map_bytes);
        f->map = NULL;
    }
    if (f->direct >= 0) {
        close(f->direct);
    }
    f->open = false;
}

bool qx_scan_fd_open(struct qx_scan_fd *f, int dir, const char *name, uint64_t size_bytes, bool bulk)
{
    if (f->open) {
        return true;
    }
    f->buffered = openat(dir, name, O_RDONLY | O_CLOEXEC);
    if (f->buffered < 0) {
        return false;
    }
    if (!bulk) {
        /* Pieces far apart look like the start of a long read, and the kernel would read ahead what lies
         * between them: many times what is wanted. */
        (void)posix_fadvise(f->buffered, 0, 0, POSIX_FADV_RANDOM);
    }
    f->direct = bulk ? openat(dir, name, O_RDONLY | O_CLOEXEC | O_DIRECT) : -1;
    f->map_bytes = (size_t)size_bytes;
    f->map = f->map_bytes ? mmap(NULL, f->map_bytes, PROT_READ, MAP_SHARED, f->buffered, 0) : NULL;
    f->map = f->map == MAP_FAILED ? NULL : f->map;
    f->open = true;
    return true;
}

/* A read that must not wait would not do to find out: it makes the kernel read ahead. */
bool qx_scan_fd_cached(const struct qx_scan_fd *f, uint64_t off, uint64_t n)
{
    unsigned char page[256];
    uint64_t from = off / QX_SCAN_ALIGN * QX_SCAN_ALIGN, end = off + n;
    if (f->direct < 0 || !f->map || end > f->map_bytes ||
        sysconf(_SC_PAGESIZE) != (long)QX_SCAN_ALIGN) {
        return false;
    }
    while (from < end) {
        uint64_t take = end - from < sizeof page * QX_SCAN_ALIGN ? end - from : sizeof page * QX_SCAN_ALIGN;
        if (mincore((char *)f->map + from, (size_t)take, page) != 0) {
            return false;
        }
        for (uint64_t i = 0; i < (take + QX_SCAN_ALIGN - 1) / QX_SCAN_ALIGN; ++i) {
            if (!(page[i] & 1)) {
                return false;
            }
        }
        from += take;
    }
    return true;
}

bool qx_scan_fd_read(const struct qx_scan_fd *f, uint8_t *b, uint64_t n, uint64_t off)
{
    while (n > 0) {
        ssize_t r = pread(f->buffered, b, (size_t)n, (off_t)off);
        if (r < 0 && errno == EINTR) {
            continue;
        }
        if (r <= 0) {
            errno = r < 0 ? errno : EIO;
            return false;
        }
        b += r;
        off += (uint64_t)r;
        n -= (uint64_t)r;
    }
    return true;
}

bool qx_scan_fd_read_direct(const struct qx_scan_fd *f, uint8_t *b, uint64_t n, uint64_t off, uint8_t **at)
{
    uint64_t from = off / QX_SCAN_ALIGN * QX_SCAN_ALIGN, lead = off - from, got = 0, want = lead + n;
    uint64_t room = (want + QX_SCAN_ALIGN - 1) / QX_SCAN_ALIGN * QX_SCAN_ALIGN;
    if (f->direct < 0) {
        *at = b;
        return qx_scan_fd_read(f, b, n, off);
    }
    *at = b + lead;
    while (got < want) {
        ssize_t r = pread(f->direct, b + got, (size_t)(room - got), (off_t)(from + got));
        if (r < 0 && errno == EINTR) {
            continue;
        }
        if (r > 0 && got + (uint64_t)r >= want) {
            break;
        }
        if (r <= 0 || (uint64_t)r % QX_SCAN_ALIGN != 0) {
            /* Not supported here after all, or a file that ends oddly: the page cache serves any. */
            return qx_scan_fd_read(f, *at, n, off);
        }
        got += (uint64_t)r;
    }
    return true;
}
