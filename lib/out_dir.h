/* out_dir.h: an output directory as a unit. It is built as TARGET.part with a journal in it and renamed
 * to TARGET when complete, so that TARGET is whole or not there, and a run that was killed goes on where
 * the journal ends. */
#ifndef QX_OUT_DIR_H
#define QX_OUT_DIR_H

#include "base.h"
#include "error.h"

#define QX_JOURNAL ".qx-journal"

struct qx_out_dir;

/* The list of members in a directory that is an archive (archive.c). */
#define QX_ARCHIVE_LIST "qx-archive.json.zst"

/* Which names below the output directory are written by what is built there: "a/b", or a folder. */
struct qx_out_names {
    bool (*ours)(const void *user, const char *name, bool is_dir);
    const void *user;
};

/* `plan` identifies what is being built (hex digits). An existing target without `force`, or a directory
 * that holds something else than a checkpoint or an archive, is QX_E_USAGE "exists". TARGET.part of the same plan is taken up when `resume`, of another plan it is QX_E_USAGE
 * "plan-differs"; without `resume` it is removed. Somebody else at work on it: QX_E_USAGE "busy". What is in TARGET.part and not ours:
 * QX_E_USAGE "foreign-file", here and before the rename; it is never put in place, nor removed. */
int qx_out_dir_begin(struct qx_out_dir **out, const char *target, const char *plan,
                     const struct qx_out_names *names, bool force, bool resume, struct qx_error *err);
const char *qx_out_dir_part(const struct qx_out_dir *d);  /* path of TARGET.part */
/* TARGET.part/name into a buffer owned by the caller, to be freed with qx_free; NULL without memory. */
char *qx_out_dir_join(const struct qx_out_dir *d, const char *name);
/* Notes of the run before, oldest first; none for a fresh start. */
size_t qx_out_dir_n_notes(const struct qx_out_dir *d);
const char *qx_out_dir_note_at(const struct qx_out_dir *d, size_t i);
/* Appends a note (one line) and syncs it. Whatever it says must be on disk before. */
int qx_out_dir_note(struct qx_out_dir *d, const char *line, struct qx_error *err);
/* Removes the journal, renames, syncs. Files must be synced already. Ends d in any case; on failure the
 * part stays. */
int qx_out_dir_commit(struct qx_out_dir *d, struct qx_error *err);
/* Ends d and leaves the part for the next run. NULL is accepted. */
void qx_out_dir_keep(struct qx_out_dir *d);
/* Ends d and removes the part. */
void qx_out_dir_discard(struct qx_out_dir *d);

/* QX_E_USAGE when the target is the input directory or lies in it; its parent must exist. */
int qx_out_dir_check(const char *input, const char *target, struct qx_error *err);
/* Free bytes where the target will be; UINT64_MAX when unknown. */
uint64_t qx_out_dir_free(const char *target);

/* Bytes from one descriptor to another, inside the kernel where possible; holes stay holes when the
 * destination is fresh there. */
int qx_copy_range(int src, uint64_t src_off, int dst, uint64_t dst_off, uint64_t n, const char *src_name,
                  const char *dst_name, struct qx_error *err);
/* The whole of a file by sharing its blocks; false where the file system cannot. */
bool qx_clone_file(int src, int dst);

#endif
