/* pool.c: owns worker threads. One job at a time: workers and the caller take pieces of `grain`
 * iterations from a shared counter until none is left. */
#include "pool.h"

#include "alloc.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

struct job {
    void (*fn)(void *user, uint64_t i, uint32_t worker);
    void *user;
    uint64_t n, grain;
    _Atomic uint64_t next;
};

struct qx_pool {
    pthread_mutex_t lock;
    pthread_cond_t start, done;
    struct job job;
    uint64_t generation; /* counts jobs, so that a worker joins each once */
    uint32_t busy;
    bool stop;
    uint32_t n_workers; /* threads besides the caller */
    struct worker { struct qx_pool *pool; pthread_t thread; uint32_t index; } *workers;
};

static void work(struct job *job, uint32_t worker)
{
    for (;;) {
        uint64_t begin = atomic_fetch_add(&job->next, job->grain);
        if (begin >= job->n) {
            return;
        }
        uint64_t end = job->n - begin < job->grain ? job->n : begin + job->grain;
        for (uint64_t i = begin; i < end; i++) {
            job->fn(job->user, i, worker);
        }
    }
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    struct qx_pool *p = w->pool;
    uint64_t seen = 0;
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (!p->stop && p->generation == seen) {
            pthread_cond_wait(&p->start, &p->lock);
        }
        if (p->stop) {
            break;
        }
        seen = p->generation;
        pthread_mutex_unlock(&p->lock);
        work(&p->job, w->index);
        pthread_mutex_lock(&p->lock);
        if (--p->busy == 0) {
            pthread_cond_signal(&p->done);
        }
    }
    pthread_mutex_unlock(&p->lock);
    return NULL;
}

int qx_pool_create(struct qx_pool **out, uint32_t n_threads, struct qx_error *err)
{
    *out = NULL;
    if (n_threads == 0) {
        long n = sysconf(_SC_NPROCESSORS_ONLN);
        n_threads = n > 0 && n < 1024 ? (uint32_t)n : 1;
    }
    struct qx_pool *p = qx_calloc(1, sizeof *p);
    if (!p) {
        return qx_fail_nomem(err);
    }
    p->workers = qx_calloc(n_threads, sizeof *p->workers);
    if (!p->workers) {
        qx_free(p);
        return qx_fail_nomem(err);
    }
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->start, NULL);
    pthread_cond_init(&p->done, NULL);
    for (uint32_t i = 0; i + 1 < n_threads; i++) {
        struct worker *w = &p->workers[i];
        w->pool = p;
        w->index = i + 1;
        if (pthread_create(&w->thread, NULL, worker_main, w) != 0) {
            break; /* fewer threads do the same work */
        }
        p->n_workers++;
    }
    *out = p;
    return 0;
}

void qx_pool_destroy(struct qx_pool *p)
{
    if (!p) {
        return;
    }
    pthread_mutex_lock(&p->lock);
    p->stop = true;
    pthread_cond_broadcast(&p->start);
    pthread_mutex_unlock(&p->lock);
    for (uint32_t i = 0; i < p->n_workers; i++) {
        pthread_join(p->workers[i].thread, NULL);
    }
    pthread_cond_destroy(&p->done);
    pthread_cond_destroy(&p->start);
    pthread_mutex_destroy(&p->lock);
    qx_free(p->workers);
    qx_free(p);
}

uint32_t qx_pool_threads(const struct qx_pool *p)
{
    return p ? p->n_workers + 1 : 1;
}

void qx_pool_run(struct qx_pool *p, uint64_t n, uint64_t grain,
                 void (*fn)(void *user, uint64_t i, uint32_t worker), void *user)
{
    if (grain == 0) {
        grain = 1;
    }
    if (!p || p->n_workers == 0 || n <= grain) {
        for (uint64_t i = 0; i < n; i++) {
            fn(user, i, 0);
        }
        return;
    }
    pthread_mutex_lock(&p->lock);
    p->job.fn = fn;
    p->job.user = user;
    p->job.n = n;
    p->job.grain = grain;
    atomic_store(&p->job.next, 0);
    p->busy = p->n_workers;
    p->generation++;
    pthread_cond_broadcast(&p->start);
    pthread_mutex_unlock(&p->lock);
    work(&p->job, 0);
    pthread_mutex_lock(&p->lock);
    while (p->busy) {
        pthread_cond_wait(&p->done, &p->lock);
    }
    pthread_mutex_unlock(&p->lock);
}
