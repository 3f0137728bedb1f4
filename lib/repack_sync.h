/* repack_sync.h: what is written becomes durable while the work goes on: a thread that syncs files and
 * then appends a note to the journal. What it did is known late, so errors come with a later call. */
#ifndef QX_REPACK_SYNC_H
#define QX_REPACK_SYNC_H

#include "error.h"
#include "out_dir.h"

struct rp_sync;
int rp_sync_create(struct rp_sync **out, struct qx_out_dir *dir, struct qx_error *err);
/* Takes fd over: synced and closed in time, before any note that is given from now on. The name must
 * live as long as s. */
int rp_sync_close(struct rp_sync *s, int fd, const char *name, struct qx_error *err);
/* Starts writing out a range of an open file: the end of the run waits for it anyway. Only a hint. */
void rp_sync_begin(struct rp_sync *s, int fd, uint64_t off, uint64_t n);
/* Notes `line` as soon as everything written so far to the files taken over and to fd [n] (-1: none) is
 * on disk. Those stay open until the next call of rp_sync_note or rp_sync_wait returns. Waits for the
 * note before. */
int rp_sync_note(struct rp_sync *s, const int *fd, size_t n, const char *line, struct qx_error *err);
bool rp_sync_idle(struct rp_sync *s); /* the last note is written */
/* Until all is synced, noted and closed. */
int rp_sync_wait(struct rp_sync *s, struct qx_error *err);
/* Closes what it took over; what is not synced yet stays so. NULL is accepted. */
void rp_sync_destroy(struct rp_sync *s);

#endif
