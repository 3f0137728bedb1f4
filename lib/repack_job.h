/* repack_job.h: doing the jobs of a plan. */
#ifndef QX_REPACK_JOB_H
#define QX_REPACK_JOB_H

#include "repack_impl.h"

#include <pthread.h>

/* One worker's buffers, grown as needed and kept from job to job. */
struct rp_scratch { void *p[6]; size_t cap[6]; };
void *rp_scratch_get(struct rp_scratch *s, unsigned i, size_t n);
void rp_scratch_fini(struct rp_scratch *s);

/* Where bytes go: written to the file, or compared with what is there. */
struct rp_sink {
    const int *fd;
    bool compare;
    pthread_mutex_t *copying; /* copies go one at a time: two at once are slower on one disk */
};

/* Fills (or compares) the byte ranges of job j. Statistics of what it converted go to *st. */
int rp_do_job(struct qx_repack *r, const struct rp_job *j, const struct rp_sink *sink,
              struct rp_scratch *s, struct qx_quant_stats *st, struct qx_error *err);

/* Everything that the table's scale depends on, in one pass over the table. */
struct qx_pool;
int rp_scan_table(struct qx_repack *r, struct qx_pool *pool, int (*tick)(void *user), void *user,
                  struct qx_error *err);

#endif
