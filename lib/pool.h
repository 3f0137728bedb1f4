/* pool.h: worker threads for loops whose iterations are independent. Results never depend on the
 * number of threads: an iteration owns its outputs. */
#ifndef QX_POOL_H
#define QX_POOL_H

#include "base.h"
#include "error.h"

struct qx_pool;
/* n_threads 0: all processors. The caller's thread works too. */
int qx_pool_create(struct qx_pool **out, uint32_t n_threads, struct qx_error *err);
void qx_pool_destroy(struct qx_pool *p);
uint32_t qx_pool_threads(const struct qx_pool *p);
/* fn(user, i, worker) for i in [0, n), in pieces of `grain`; returns when all are done. worker <
 * qx_pool_threads. p NULL: in the caller's thread. Not re-entrant. */
void qx_pool_run(struct qx_pool *p, uint64_t n, uint64_t grain,
                 void (*fn)(void *user, uint64_t i, uint32_t worker), void *user);

#endif
