/* file_map.h: reading one file: whole ranges by pread, or a read-only map.
 *
 * A map of a file that is cut while in use faults (SIGBUS) on access, and lib installs no handlers.
 * So everything reads by pread, where a cut file is an error, except what is explicitly mapped; a map
 * is checked against the file's present size each time that bytes of it are handed out. A program that
 * computes from mapped weights owns the signal and turns it into a message. */
#ifndef QX_FILE_MAP_H
#define QX_FILE_MAP_H

#include "base.h"
#include "error.h"

/* Opens a regular file for reading; anything else (directory, pipe) is QX_E_IO "not-a-file" and is not
 * opened, so nothing here blocks. Errors: not-found, unreadable-file. */
int qx_file_open(const char *path, int *fd, uint64_t *size_bytes, struct qx_error *err);
void qx_file_close(int fd); /* -1 is nothing */
/* Reads exactly n bytes at off; a file that ends earlier is QX_E_IO "file-changed" (callers check
 * ranges against the size found at open first). */
int qx_file_read(int fd, void *dst, uint64_t n, uint64_t off, struct qx_error *err);
/* Reads a whole file of at most max_bytes into *text (n bytes and a NUL; qx_free). Larger is QX_E_FORMAT
 * "too-large". */
int qx_file_read_all(const char *path, uint64_t max_bytes, char **text, size_t *n, struct qx_error *err);

struct qx_map { const unsigned char *p; uint64_t size_bytes; };
/* Maps size_bytes (> 0) of the file, which must have at least this size now. */
int qx_map_open(struct qx_map *m, int fd, uint64_t size_bytes, struct qx_error *err);
void qx_map_close(struct qx_map *m);
/* 0 while the file still has at least size_bytes; "file-changed" otherwise. */
int qx_file_check_size(int fd, uint64_t size_bytes, struct qx_error *err);

/* True when a name from an index, manifest or archive stays in its directory: relative, not empty, no
 * component "..", no NUL among its n bytes. Links on the way are not looked at. */
bool qx_name_stays_inside(const char *name, size_t n);

#endif
