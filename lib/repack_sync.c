/* repack_sync.c: see repack_sync.h. One thread, which starts writing out ranges as they come; `busy` says that
 * it has more to do, and whoever waits for that to end waits on `change`. Files taken over wait in `closing`;
 * a round closes those that were there when it began. */
#include "repack_sync.h"

#include "alloc.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

/* Files that wait to be closed, at most: a checkpoint of many small files keeps few descriptors. */
#define MAX_CLOSING 32

/* Ranges that wait to be written out, at most. */
#define MAX_RANGES 64

struct range {
    int fd;
    uint64_t off, n;
};

struct closing {
    int fd;
    const char *name;
};

struct rp_sync {
    struct qx_out_dir *dir;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t change;
    bool busy, stop;
    struct range range[MAX_RANGES];
    size_t n_range;
    struct closing closing[MAX_CLOSING];
    size_t n_closing, n_round; /* all, and those of the round at work: the first ones */
    int *fd; /* open files of the note */
    size_t n_fd, cap_fd;
    char *line; /* NULL: only files to close */
    int rc;     /* the first failure */
    struct qx_error err;
};

static int sync_failed(const char *name, struct qx_error *err)
{
    int rc = qx_fail_errno(err, QX_E_WRITE, errno, "write", "cannot sync");
    qx_error_at(err, name, NULL, QX_NO_OFF);
    return rc;
}

/* One round, outside the lock. */
static int work(struct rp_sync *s, const struct closing *closing, size_t n_closing, struct qx_error *err)
{
    int rc = 0;
    for (size_t i = 0; i < n_closing; i++) {
        if (rc == 0 && fsync(closing[i].fd) != 0) {
            rc = sync_failed(closing[i].name, err);
        }
        close(closing[i].fd);
    }
    for (size_t i = 0; rc == 0 && i < s->n_fd; i++) {
        if (fdatasync(s->fd[i]) != 0) {
            rc = sync_failed(qx_out_dir_part(s->dir), err);
        }
    }
    return rc == 0 && s->line != NULL ? qx_out_dir_note(s->dir, s->line, err) : rc;
}

static void *loop(void *user)
{
    struct rp_sync *s = user;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->busy && !s->stop && s->n_range == 0) {
            pthread_cond_wait(&s->change, &s->lock);
        }
        if (s->n_range > 0) {
            struct range first = s->range[0];
            memmove(s->range, s->range + 1, --s->n_range * sizeof *s->range);
            pthread_mutex_unlock(&s->lock);
            (void)sync_file_range(first.fd, (off_t)first.off, (off_t)first.n, SYNC_FILE_RANGE_WRITE);
            pthread_mutex_lock(&s->lock);
            continue;
        }
        if (!s->busy) {
            break;
        }
        struct closing closing[MAX_CLOSING];
        struct qx_error err = {0};
        size_t n = s->n_round;
        memcpy(closing, s->closing, n * sizeof *closing);
        pthread_mutex_unlock(&s->lock);
        int rc = work(s, closing, n, &err);
        pthread_mutex_lock(&s->lock);
        if (rc != 0 && s->rc == 0) {
            s->rc = rc;
            s->err = err;
        }
        s->n_closing -= n;
        memmove(s->closing, s->closing + n, s->n_closing * sizeof *s->closing);
        qx_free(s->line);
        s->line = NULL;
        s->n_fd = 0;
        s->busy = false;
        pthread_cond_broadcast(&s->change);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

int rp_sync_create(struct rp_sync **out, struct qx_out_dir *dir, struct qx_error *err)
{
    struct rp_sync *s = qx_calloc(1, sizeof *s);
    *out = NULL;
    if (s == NULL) {
        return qx_fail_nomem(err);
    }
    s->dir = dir;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->change, NULL);
    int sys = pthread_create(&s->thread, NULL, loop, s);
    if (sys != 0) {
        pthread_cond_destroy(&s->change);
        pthread_mutex_destroy(&s->lock);
        qx_free(s);
        return qx_fail_errno(err, QX_E_NOMEM, sys, "thread", "cannot start a thread");
    }
    *out = s;
    return 0;
}

/* With the lock held: until the thread is idle; the failure so far. */
static int settle(struct rp_sync *s, struct qx_error *err)
{
    while (s->busy) {
        pthread_cond_wait(&s->change, &s->lock);
    }
    if (s->rc != 0 && err != NULL) {
        *err = s->err;
    }
    return s->rc;
}

/* Files taken over from now on wait for the round after: the note may name them as still open. */
static void start(struct rp_sync *s)
{
    s->n_round = s->n_closing;
    s->busy = true;
    pthread_cond_broadcast(&s->change);
}

void rp_sync_begin(struct rp_sync *s, int fd, uint64_t off, uint64_t n)
{
    pthread_mutex_lock(&s->lock);
    if (s->n_range < MAX_RANGES) {
        s->range[s->n_range++] = (struct range){fd, off, n};
        pthread_cond_broadcast(&s->change);
    }
    pthread_mutex_unlock(&s->lock);
}

int rp_sync_close(struct rp_sync *s, int fd, const char *name, struct qx_error *err)
{
    int rc = 0;
    pthread_mutex_lock(&s->lock);
    if (s->n_closing == MAX_CLOSING) {
        rc = settle(s, err);
        if (rc == 0 && s->n_closing == MAX_CLOSING) {
            start(s);
            rc = settle(s, err);
        }
    }
    if (rc == 0) {
        s->closing[s->n_closing++] = (struct closing){fd, name};
        if (!s->busy) {
            start(s);
        }
    }
    pthread_mutex_unlock(&s->lock);
    if (rc != 0) {
        close(fd);
    }
    return rc;
}

int rp_sync_note(struct rp_sync *s, const int *fd, size_t n, const char *line, struct qx_error *err)
{
    pthread_mutex_lock(&s->lock);
    int rc = settle(s, err);
    if (rc == 0) {
        size_t open = 0;
        s->line = qx_strdup(line);
        bool ok = s->line != NULL;
        for (size_t i = 0; i < n; i++) {
            open += fd[i] >= 0;
        }
        ok = ok && qx_grow((void **)&s->fd, &s->cap_fd, open + 1, sizeof *s->fd);
        for (size_t i = 0; ok && i < n; i++) {
            if (fd[i] >= 0) {
                s->fd[s->n_fd++] = fd[i];
            }
        }
        if (ok) {
            start(s);
        } else {
            qx_free(s->line);
            s->line = NULL;
            rc = qx_fail_nomem(err);
        }
    }
    pthread_mutex_unlock(&s->lock);
    return rc;
}

bool rp_sync_idle(struct rp_sync *s)
{
    pthread_mutex_lock(&s->lock);
    bool idle = !s->busy;
    pthread_mutex_unlock(&s->lock);
    return idle;
}

int rp_sync_wait(struct rp_sync *s, struct qx_error *err)
{
    pthread_mutex_lock(&s->lock);
    int rc = settle(s, err);
    if (rc == 0 && s->n_closing > 0) {
        start(s);
        rc = settle(s, err);
    }
    pthread_mutex_unlock(&s->lock);
    return rc;
}

void rp_sync_destroy(struct rp_sync *s)
{
    if (s == NULL) {
        return;
    }
    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_broadcast(&s->change);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    for (size_t i = 0; i < s->n_closing; i++) {
        close(s->closing[i].fd);
    }
    pthread_cond_destroy(&s->change);
    pthread_mutex_destroy(&s->lock);
    qx_free(s->fd);
    qx_free(s->line);
    qx_free(s);
}
