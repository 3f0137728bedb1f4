/* read_queue.h: many reads in flight into the caller's buffers, through io_uring where the kernel grants
 * it, else by threads that call pread. Both give the same bytes; only speed differs.
 *
 * A queue belongs to one thread. Descriptors opened with O_DIRECT are welcome; offsets, lengths and
 * buffers then need the file system's alignment, which is the caller's to keep. */
#ifndef QX_READ_QUEUE_H
#define QX_READ_QUEUE_H

#include "base.h"
#include "error.h"

/* One read. The first five are the caller's. From submit to take it belongs to the queue. */
struct qx_read {
    int fd;
    uint64_t off;
    void *dst;
    uint64_t n;
    void *user;
    uint64_t got;         /* filled: bytes read; less than n when the file ends earlier or sys is set */
    int sys;              /* filled: errno of a failure, else 0 */
    struct qx_read *next; /* the queue's own */
};

struct qx_read_queue;

/* At most `depth` reads in flight (1 to 4096). threads_only: never io_uring (tests). */
int qx_read_queue_create(struct qx_read_queue **out, uint32_t depth, bool threads_only,
                         struct qx_error *err);
/* Waits for what is in flight and drops the results. */
void qx_read_queue_destroy(struct qx_read_queue *q);
const char *qx_read_queue_method(const struct qx_read_queue *q); /* "io_uring" or "threads" */

/* Starts a read; when depth are in flight already it waits until one of them has finished. A failure of
 * the read itself shows in the read when it is taken. */
void qx_read_queue_submit(struct qx_read_queue *q, struct qx_read *r);
/* A finished read, in order of completion. NULL: none finished yet (wait false), or none left at all. */
struct qx_read *qx_read_queue_take(struct qx_read_queue *q, bool wait);

/* Submits all, waits for all. Fails with the first (in the order of r) that failed or came short:
 * read-error, or file-changed when the file ended. Nothing else may be in flight. */
int qx_read_queue_all(struct qx_read_queue *q, struct qx_read *r, size_t n, struct qx_error *err);

#endif
