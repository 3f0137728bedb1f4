/* read_queue.c: owns the ring or the threads, and the list of finished reads. A read that comes back
 * partly done is continued until it is whole, at the end of its file, or failed. */
#include "read_queue.h"

#include "alloc.h"
#include "qx_build.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#if QX_HAVE_URING
#include <liburing.h>
#endif

#define MAX_DEPTH 4096
#define MAX_THREADS 32
#define MAX_PIECE ((uint64_t)1 << 30) /* one system call reads a little less than 2 GiB at most */

struct list { struct qx_read *head, **tail; };

struct qx_read_queue {
    uint32_t depth, in_flight; /* submitted and not yet on the done list (threads: under lock) */
    struct list done;
#if QX_HAVE_URING
    bool use_ring;
    struct io_uring ring;
#endif
    pthread_mutex_t lock;
    pthread_cond_t work, finished;
    struct list pending;
    bool stop;
    uint32_t n_threads;
    pthread_t threads[MAX_THREADS];
};

static void list_init(struct list *l)
{
    l->head = NULL;
    l->tail = &l->head;
}

static void list_put(struct list *l, struct qx_read *r)
{
    r->next = NULL;
    *l->tail = r;
    l->tail = &r->next;
}

static struct qx_read *list_get(struct list *l)
{
    struct qx_read *r = l->head;
    if (r) {
        l->head = r->next;
        if (!l->head) {
            l->tail = &l->head;
        }
        r->next = NULL;
    }
    return r;
}

/* ---- threads ----------------------------------------------------------------------------------- */

static void read_whole(struct qx_read *r)
{
    while (r->got < r->n) {
        uint64_t left = r->n - r->got;
        size_t piece = left < MAX_PIECE ? (size_t)left : (size_t)MAX_PIECE;
        ssize_t k = pread(r->fd, (char *)r->dst + r->got, piece, (off_t)(r->off + r->got));
        if (k < 0 && errno == EINTR) {
            continue;
        }
        if (k <= 0) {
            r->sys = k < 0 ? errno : 0;
            return;
        }
        r->got += (uint64_t)k;
    }
}

static void *thread_main(void *arg)
{
    struct qx_read_queue *q = arg;
    pthread_mutex_lock(&q->lock);
    for (;;) {
        struct qx_read *r = list_get(&q->pending);
        if (r) {
            pthread_mutex_unlock(&q->lock);
            read_whole(r);
            pthread_mutex_lock(&q->lock);
            list_put(&q->done, r);
            q->in_flight--;
            pthread_cond_signal(&q->finished);
        } else if (q->stop) {
            break;
        } else {
            pthread_cond_wait(&q->work, &q->lock);
        }
    }
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

static int start_threads(struct qx_read_queue *q, struct qx_error *err)
{
    uint32_t want = q->depth < MAX_THREADS ? q->depth : MAX_THREADS;
    int sys = 0;
    while (q->n_threads < want) {
        sys = pthread_create(&q->threads[q->n_threads], NULL, thread_main, q);
        if (sys) {
            break; /* fewer threads read the same bytes */
        }
        q->n_threads++;
    }
    return q->n_threads ? 0 : qx_fail_errno(err, QX_E_NOMEM, sys, "threads", "cannot start a reader");
}

/* ---- io_uring ---------------------------------------------------------------------------------- */

#if QX_HAVE_URING
static void ring_start(struct qx_read_queue *q, struct qx_read *r)
{
    uint64_t left = r->n - r->got;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&q->ring); /* in_flight <= depth: there is room */
    io_uring_prep_read(sqe, r->fd, (char *)r->dst + r->got,
                       (unsigned)(left < MAX_PIECE ? left : MAX_PIECE), r->off + r->got);
    io_uring_sqe_set_data(sqe, r);
    int rc;
    do {
        rc = io_uring_submit(&q->ring);
    } while (rc == -EINTR || rc == -EAGAIN || rc == -EBUSY);
}

/* Takes one completion; false when none is there and `wait` is not set. */
static bool ring_reap(struct qx_read_queue *q, bool wait)
{
    struct io_uring_cqe *cqe;
    int rc;
    do {
        rc = wait ? io_uring_wait_cqe(&q->ring, &cqe) : io_uring_peek_cqe(&q->ring, &cqe);
    } while (rc == -EINTR);
    if (rc < 0) {
        return false;
    }
    struct qx_read *r = io_uring_cqe_get_data(cqe);
    int res = cqe->res;
    io_uring_cqe_seen(&q->ring, cqe);
    if (res > 0) {
        r->got += (uint64_t)res;
    } else if (res < 0 && res != -EINTR && res != -EAGAIN) {
        r->sys = -res;
    }
    if ((res > 0 || res == -EINTR || res == -EAGAIN) && r->got < r->n) {
        ring_start(q, r);
        return true;
    }
    list_put(&q->done, r);
    q->in_flight--;
    return true;
}
#endif

static bool on_ring(const struct qx_read_queue *q)
{
#if QX_HAVE_URING
    return q->use_ring;
#else
    (void)q;
    return false;
#endif
}

/* ---- the queue --------------------------------------------------------------------------------- */

int qx_read_queue_create(struct qx_read_queue **out, uint32_t depth, bool threads_only,
                         struct qx_error *err)
{
    *out = NULL;
    struct qx_read_queue *q = qx_calloc(1, sizeof *q);
    if (!q) {
        return qx_fail_nomem(err);
    }
    q->depth = depth < 1 ? 1 : depth > MAX_DEPTH ? MAX_DEPTH : depth;
    list_init(&q->done);
    list_init(&q->pending);
    pthread_mutex_init(&q->lock, NULL);
    pthread_cond_init(&q->work, NULL);
    pthread_cond_init(&q->finished, NULL);
#if QX_HAVE_URING
    /* Containers often forbid io_uring; the threads do the same work. */
    q->use_ring = !threads_only && io_uring_queue_init(q->depth, &q->ring, 0) == 0;
#else
    (void)threads_only;
#endif
    int rc = on_ring(q) ? 0 : start_threads(q, err);
    if (rc) {
        qx_read_queue_destroy(q);
        return rc;
    }
    *out = q;
    return 0;
}

void qx_read_queue_destroy(struct qx_read_queue *q)
{
    if (!q) {
        return;
    }
#if QX_HAVE_URING
    if (q->use_ring) {
        while (q->in_flight && ring_reap(q, true)) {
        }
        io_uring_queue_exit(&q->ring);
    }
#endif
    pthread_mutex_lock(&q->lock);
    q->stop = true;
    pthread_cond_broadcast(&q->work);
    pthread_mutex_unlock(&q->lock);
    for (uint32_t i = 0; i < q->n_threads; i++) {
        pthread_join(q->threads[i], NULL);
    }
    pthread_cond_destroy(&q->finished);
    pthread_cond_destroy(&q->work);
    pthread_mutex_destroy(&q->lock);
    qx_free(q);
}

const char *qx_read_queue_method(const struct qx_read_queue *q)
{
    return on_ring(q) ? "io_uring" : "threads";
}

void qx_read_queue_submit(struct qx_read_queue *q, struct qx_read *r)
{
    r->got = 0;
    r->sys = 0;
#if QX_HAVE_URING
    if (q->use_ring) {
        while (q->in_flight >= q->depth) {
            (void)ring_reap(q, true);
        }
        if (r->n == 0) { /* nothing to ask the kernel for */
            list_put(&q->done, r);
            return;
        }
        q->in_flight++;
        ring_start(q, r);
        return;
    }
#endif
    pthread_mutex_lock(&q->lock);
    while (q->in_flight >= q->depth) {
        pthread_cond_wait(&q->finished, &q->lock);
    }
    q->in_flight++;
    list_put(&q->pending, r);
    pthread_cond_signal(&q->work);
    pthread_mutex_unlock(&q->lock);
}

struct qx_read *qx_read_queue_take(struct qx_read_queue *q, bool wait)
{
#if QX_HAVE_URING
    if (q->use_ring) {
        while (ring_reap(q, false)) {
        }
        while (wait && !q->done.head && q->in_flight) {
            (void)ring_reap(q, true);
        }
        return list_get(&q->done);
    }
#endif
    pthread_mutex_lock(&q->lock);
    while (wait && !q->done.head && q->in_flight) {
        pthread_cond_wait(&q->finished, &q->lock);
    }
    struct qx_read *r = list_get(&q->done);
    pthread_mutex_unlock(&q->lock);
    return r;
}

int qx_read_queue_all(struct qx_read_queue *q, struct qx_read *r, size_t n, struct qx_error *err)
{
    for (size_t i = 0; i < n; i++) {
        qx_read_queue_submit(q, &r[i]);
    }
    while (qx_read_queue_take(q, true)) {
    }
    for (size_t i = 0; i < n; i++) {
        int rc = 0;
        if (r[i].sys) {
            rc = qx_fail_errno(err, QX_E_IO, r[i].sys, "read-error", "cannot read %" PRIu64 " bytes", r[i].n);
        } else if (r[i].got < r[i].n) {
            rc = qx_fail(err, QX_E_IO, "file-changed", "file ends at %" PRIu64 ", %" PRIu64
                         " bytes short: it was cut while in use", r[i].off + r[i].got, r[i].n - r[i].got);
        }
        if (rc) {
            qx_error_at(err, NULL, NULL, r[i].off + r[i].got);
            return rc;
        }
    }
    return 0;
}
