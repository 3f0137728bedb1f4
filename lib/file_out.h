/* file_out.h: files and directories that are either whole or not there. A file is built as PATH.part,
 * synced and renamed. */
#ifndef QX_FILE_OUT_H
#define QX_FILE_OUT_H

#include "base.h"
#include "error.h"

struct qx_file_out;

/* Starts PATH.part (an old one is replaced). An existing PATH without `force` is QX_E_USAGE "exists". */
int qx_file_out_create(struct qx_file_out **out, const char *path, bool force, struct qx_error *err);
/* The same, with `force`, but the first `keep` bytes of an old PATH.part stay. When it has fewer, none do:
 * qx_file_out_size tells. */
int qx_file_out_resume(struct qx_file_out **out, const char *path, uint64_t keep, struct qx_error *err);
/* Appends; buffered. A failure is remembered: later calls and the commit fail too. */
int qx_file_out_write(struct qx_file_out *f, const void *p, size_t n, struct qx_error *err);
/* Overwrites bytes written before. */
int qx_file_out_rewrite(struct qx_file_out *f, uint64_t off, const void *p, size_t n,
                        struct qx_error *err);
/* Everything appended so far is on disk. */
int qx_file_out_sync(struct qx_file_out *f, struct qx_error *err);
/* Reads bytes that were kept or synced. */
int qx_file_out_read(const struct qx_file_out *f, uint64_t off, void *dst, size_t n, struct qx_error *err);
uint64_t qx_file_out_size(const struct qx_file_out *f); /* bytes appended so far */
/* Syncs, renames, syncs the directory. Frees f in any case; on failure nothing is left behind. */
int qx_file_out_commit(struct qx_file_out *f, struct qx_error *err);
/* Ends f and leaves PATH.part for qx_file_out_resume. NULL is accepted. */
void qx_file_out_leave(struct qx_file_out *f);
/* Removes what was written. NULL is accepted. */
void qx_file_out_abort(struct qx_file_out *f);

/* Writes a whole small file at once, as above. */
int qx_file_out_small(const char *path, const void *p, size_t n, struct qx_error *err);

/* All of n bytes at an offset of a descriptor; QX_E_NOSPACE, QX_E_WRITE. */
int qx_pwrite_all(int fd, const void *p, size_t n, uint64_t off, const char *path, struct qx_error *err);
/* Syncs the directory that holds path, so that a rename in it survives a power loss. */
int qx_sync_parent(const char *path, struct qx_error *err);

#endif
