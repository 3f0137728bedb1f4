/* progress.h: one delayed line on stderr with amount, rate and time left.
 *
 * On a terminal it appears after a second, is redrawn at most ten times a second and is gone after
 * finish. With --progress=always off a terminal it is a few plain lines (no more than
 * PROGRESS_MAX_LINES in the life of a process). Otherwise it costs one atomic store an update. */
#ifndef QX_CMD_PROGRESS_H
#define QX_CMD_PROGRESS_H

#include "base.h"
#include "ui.h"

#include <pthread.h>
#include <stdatomic.h>

#define PROGRESS_MAX_LINES 12

enum progress_unit { PROGRESS_BYTES, PROGRESS_COUNT };

struct progress {
    const struct ui *ui;
    const char *what;       /* "loading" */
    enum progress_unit unit;
    uint64_t total;         /* 0: unknown */
    uint64_t begin_ns, line_done;
    _Atomic uint64_t done, next_ns;
    pthread_mutex_t lock;
    bool on;
};

void progress_start(struct progress *p, const struct ui *ui, const char *what, uint64_t total,
                    enum progress_unit unit);
/* Amount done so far, from any thread; it never goes back. */
void progress_update(struct progress *p, uint64_t done);
/* Adds to the amount, from any thread. */
void progress_add(struct progress *p, uint64_t n);
void progress_finish(struct progress *p);

uint64_t progress_now_ns(void); /* monotonic */

#endif
