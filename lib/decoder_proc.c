/* decoder_proc.c: one run of an external decoder. Owns the child and two pipes; both are served by one
 * poll loop, so that neither side can block the other, and what the child may make us store is bounded by
 * the longest line that an answer can have. */
#include "decoder_proc.h"

#include "alloc.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct talk {
    pid_t child;
    int to, from;               /* -1 when closed */
    char *line;                 /* of the answer, being gathered */
    size_t line_n, line_cap;
    char question[32];
    size_t question_n, question_at;
    size_t asked, answered, n;
    uint64_t width;
    const uint64_t *rows;
    uint16_t *out;
    char *why;
    bool hung;                  /* no answer in time */
};

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* ---- the child ---------------------------------------------------------------------------- */

static int start(struct talk *t, const char *cmd, const char *path, const char *tensor,
                 struct qx_error *err)
{
    int in[2] = {-1, -1}, out[2] = {-1, -1}, rc;
    posix_spawn_file_actions_t fa;
    posix_spawnattr_t at;
    sigset_t none, defaults;
    size_t n = strlen(cmd) + 8;
    char *script = qx_malloc(n);
    char *argv[] = {(char *)"sh", (char *)"-c", script, (char *)"sh", (char *)path, (char *)tensor, NULL};
    if (!script) {
        return qx_fail_nomem(err);
    }
    snprintf(script, n, "%s \"$@\"", cmd);
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) {
        rc = qx_fail_errno(err, QX_E_NOMEM, errno, "decoder-failed", "cannot make a pipe");
        goto fail;
    }
    posix_spawn_file_actions_init(&fa);
    posix_spawn_file_actions_adddup2(&fa, in[0], 0);
    posix_spawn_file_actions_adddup2(&fa, out[1], 1);
    posix_spawnattr_init(&at);
    sigemptyset(&none);
    sigemptyset(&defaults);
    sigaddset(&defaults, SIGPIPE);
    sigaddset(&defaults, SIGINT);
    posix_spawnattr_setsigmask(&at, &none);
    posix_spawnattr_setsigdefault(&at, &defaults);
    posix_spawnattr_setpgroup(&at, 0);
    posix_spawnattr_setflags(&at, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
    rc = posix_spawn(&t->child, "/bin/sh", &fa, &at, argv, environ);
    posix_spawnattr_destroy(&at);
    posix_spawn_file_actions_destroy(&fa);
    if (rc != 0) {
        t->child = -1;
        rc = qx_fail_errno(err, QX_E_NOMEM, rc, "decoder-failed", "cannot start a process");
        goto fail;
    }
    qx_free(script);
    close(in[0]);
    close(out[1]);
    t->to = in[1];
    t->from = out[0];
    fcntl(t->to, F_SETFL, O_NONBLOCK);
    fcntl(t->from, F_SETFL, O_NONBLOCK);
    return 0;
fail:
    qx_free(script);
    for (int i = 0; i < 2; ++i) {
        if (in[i] >= 0) {
            close(in[i]);
        }
        if (out[i] >= 0) {
            close(out[i]);
        }
    }
    return rc;
}

static void close_fd(int *fd)
{
    if (*fd >= 0) {
        close(*fd);
        *fd = -1;
    }
}

/* Ends the child and reports how it ended: exit status, 128 + signal, -1 if it had to be killed. */
static int reap(struct talk *t, bool kill_it, int64_t deadline)
{
    int status = 0;
    if (!kill_it) {
        /* It has answered everything; leave it until the deadline to end by itself. */
        while (waitpid(t->child, &status, WNOHANG) == 0) {
            struct timespec nap = {0, 2000000};
            if (now_ms() > deadline) {
                kill_it = true;
                break;
            }
            nanosleep(&nap, NULL);
        }
    }
    if (kill_it) {
        kill(-t->child, SIGKILL);
        while (waitpid(t->child, &status, 0) < 0 && errno == EINTR) {
        }
    } else {
        kill(-t->child, SIGKILL); /* whatever it left behind */
    }
    t->child = -1;
    if (kill_it) {
        return -1;
    }
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* ---- the talk ----------------------------------------------------------------------------- */

static bool take_u64(const char **p, uint64_t *v)
{
    uint64_t x = 0;
    const char *s = *p;
    while (**p >= '0' && **p <= '9') {
        if (!qx_mul_u64(x, 10, &x) || !qx_add_u64(x, (uint64_t)(**p - '0'), &x)) {
            return false;
        }
        ++*p;
    }
    *v = x;
    return *p > s;
}

static bool take_word(const char **p, uint16_t *v)
{
    unsigned x = 0;
    const char *s = *p;
    for (int i = 0; i < 4; ++i, ++s) {
        unsigned d;
        if (*s >= '0' && *s <= '9') {
            d = (unsigned)(*s - '0');
        } else if (*s >= 'a' && *s <= 'f') {
            d = (unsigned)(*s - 'a') + 10;
        } else if (*s >= 'A' && *s <= 'F') {
            d = (unsigned)(*s - 'A') + 10;
        } else {
            return false;
        }
        x = x * 16 + d;
    }
    *p = s;
    *v = (uint16_t)x;
    return true;
}

/* A whole answer line, NUL-terminated; false with t->why set. */
static bool take_answer(struct talk *t)
{
    const char *p = t->line;
    uint64_t row;
    uint16_t *out = t->out + t->answered * t->width;
    if (t->answered == t->n) {
        snprintf(t->why, 256, "more than %zu lines were answered", t->n);
        return false;
    }
    if (!take_u64(&p, &row)) {
        snprintf(t->why, 256, "line %zu of the answer does not begin with a row number: '%.40s'",
                 t->answered + 1, t->line);
        return false;
    }
    if (row != t->rows[t->answered]) {
        snprintf(t->why, 256, "line %zu of the answer is for row %llu, asked was %llu", t->answered + 1,
                 (unsigned long long)row, (unsigned long long)t->rows[t->answered]);
        return false;
    }
    for (uint64_t c = 0; c < t->width; ++c) {
        if (*p != ' ' || (++p, !take_word(&p, &out[c]))) {
            snprintf(t->why, 256, "the answer for row %llu has no four hex digits at value %llu of %llu",
                     (unsigned long long)row, (unsigned long long)c, (unsigned long long)t->width);
            return false;
        }
    }
    if (*p == '\r') {
        ++p;
    }
    if (*p) {
        snprintf(t->why, 256, "the answer for row %llu has more than %llu values", (unsigned long long)row,
                 (unsigned long long)t->width);
        return false;
    }
    ++t->answered;
    return true;
}

/* Reads what there is; false with why on a protocol error. Sets from to -1 at the end. */
static bool hear(struct talk *t)
{
    char chunk[65536];
    for (;;) {
        ssize_t r = read(t->from, chunk, sizeof chunk);
        if (r < 0) {
            if (errno == EINTR) {
                continue;
            }
            if (errno == EAGAIN) {
                return true;
            }
        }
        if (r <= 0) {
            close_fd(&t->from);
            return true;
        }
        for (ssize_t i = 0; i < r; ++i) {
            if (chunk[i] == '\n') {
                t->line[t->line_n] = '\0';
                if (memchr(t->line, '\0', t->line_n)) {
                    snprintf(t->why, 256, "line %zu of the answer holds a zero byte", t->answered + 1);
                    return false;
                }
                t->line_n = 0;
                if (!take_answer(t)) {
                    return false;
                }
            } else if (t->line_n + 1 >= t->line_cap) {
                snprintf(t->why, 256, "line %zu of the answer is longer than any answer", t->answered + 1);
                return false;
            } else {
                t->line[t->line_n++] = chunk[i];
            }
        }
    }
}

/* Writes what fits. A closed pipe only ends the asking: the answers will show what is missing. */
static void ask(struct talk *t)
{
    while (t->to >= 0) {
        ssize_t r;
        if (t->question_at == t->question_n) {
            if (t->asked == t->n) {
                close_fd(&t->to);
                return;
            }
            t->question_n = (size_t)snprintf(t->question, sizeof t->question, "%llu\n",
                                             (unsigned long long)t->rows[t->asked++]);
            t->question_at = 0;
        }
        r = write(t->to, t->question + t->question_at, t->question_n - t->question_at);
        if (r > 0) {
            t->question_at += (size_t)r;
        } else if (r < 0 && errno == EAGAIN) {
            return;
        } else if (r < 0 && errno != EINTR) {
            close_fd(&t->to);
        }
    }
}

/* The whole conversation; false with why. */
static bool converse(struct talk *t, uint32_t timeout_ms)
{
    int64_t deadline = now_ms() + timeout_ms;
    while (t->from >= 0 && t->answered < t->n) {
        struct pollfd p[2] = {{t->from, POLLIN, 0}, {t->to, POLLOUT, 0}};
        int64_t left = deadline - now_ms();
        size_t before = t->answered;
        int r = left > 0 ? poll(p, t->to >= 0 ? 2 : 1, (int)(left < 1000 ? left : 1000)) : 0;
        if (left <= 0) {
            t->hung = true;
            snprintf(t->why, 256, "no answer within %u ms (%zu of %zu rows answered)", timeout_ms,
                     t->answered, t->n);
            return false;
        }
        if (r < 0 && errno != EINTR) {
            snprintf(t->why, 256, "poll: %s", strerror(errno));
            return false;
        }
        if (r <= 0) {
            continue;
        }
        if (p[0].revents && !hear(t)) {
            return false;
        }
        if (t->to >= 0 && p[1].revents) {
            ask(t);
        }
        if (t->answered > before) {
            deadline = now_ms() + timeout_ms;
        }
    }
    if (t->answered < t->n) {
        snprintf(t->why, 256, "it stopped after %zu of %zu rows", t->answered, t->n);
        return false;
    }
    return true;
}

int qx_decoder_proc(const char *cmd, const char *path, const char *tensor, const uint64_t *rows, size_t n,
                    uint64_t width, uint32_t timeout_ms, uint16_t *out, char why[256],
                    struct qx_error *err)
{
    struct talk t = {.child = -1, .to = -1, .from = -1, .n = n, .width = width, .rows = rows, .out = out,
                     .why = why};
    sigset_t pipe_only, before;
    struct timespec zero = {0, 0};
    uint64_t cap;
    bool ok;
    int rc, status;
    why[0] = '\0';
    if (!qx_mul_u64(width, 5, &cap) || cap > SIZE_MAX / 2) {
        return qx_fail_nomem(err);
    }
    t.line_cap = (size_t)cap + 32;
    t.line = qx_malloc(t.line_cap);
    if (!t.line) {
        return qx_fail_nomem(err);
    }
    /* A child that closes its stdin must not end this process: SIGPIPE is held back in this thread and
     * taken away again if it came. */
    sigemptyset(&pipe_only);
    sigaddset(&pipe_only, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_only, &before);
    rc = start(&t, cmd, path, tensor, err);
    if (rc == 0) {
        ok = converse(&t, timeout_ms);
        close_fd(&t.to);
        close_fd(&t.from);
        status = reap(&t, t.hung, now_ms() + 2000);
        if (ok && status > 0) {
            snprintf(why, 256, "it ended with status %d", status);
            ok = false;
        } else if (!ok && status > 0) {
            size_t at = strlen(why);
            snprintf(why + at, 256 - at, "; status %d", status);
        }
        rc = ok ? 0 : 1;
        if (!ok && t.answered == 0 && (status == 126 || status == 127)) {
            rc = qx_fail(err, QX_E_USAGE, "usage", "the decoder '%.200s' cannot be started (%s)", cmd,
                         status == 126 ? "no program" : "not found");
        }
    }
    if (!sigismember(&before, SIGPIPE)) {
        while (sigtimedwait(&pipe_only, NULL, &zero) == SIGPIPE) {
        }
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    qx_free(t.line);
    return rc;
}
