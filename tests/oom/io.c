/* Reads, writes, opens, syncs and renames that fail: every public call with its n-th system call failing,
 * coming short, or interrupted. A failure is an error of the right family or an error finding, or changes
 * nothing; a short or interrupted call changes nothing at all; nothing is left open or allocated; and what
 * is written is whole or not there.
 *
 * usage: io [--all] [CASE...] */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>
#include <xxhash.h>

#include "alloc.h"
#include "both.h"
#include "ckpt.h"
#include "error.h"
#include "file_out.h"
#include "rows.h"
#include "str.h"

#define TRIES 60

/* ---- the calls (the linker sends those of the library here) ------------------------------------- */

enum fault { NONE, FAIL, SHORT, INTERRUPT };
static struct { enum fault how; bool sticky, on; unsigned long at, calls, hits; const char *name; int last_errno; } fault;

/* Counts a call; true when it is to be disturbed. */
static bool hit(const char *name, bool moves_bytes)
{
    if (!fault.on || (fault.how != FAIL && !moves_bytes)) {
        return false;
    }
    unsigned long n = __atomic_add_fetch(&fault.calls, 1, __ATOMIC_SEQ_CST);
    if (fault.how == NONE || (fault.sticky ? n < fault.at : n != fault.at)) {
        return false;
    }
    fault.name = name;
    fault.hits++;
    return true;
}

#define WRAP(type, name, params, args, moves, bytes, error)                      \
    type __real_##name params;                                                   \
    type __wrap_##name params;                                                   \
    type __wrap_##name params                                                    \
    {                                                                            \
        if (hit(#name, moves)) {                                                 \
            if (fault.how == SHORT) {                                            \
                bytes;                                                           \
                return __real_##name args;                                       \
            }                                                                    \
            errno = fault.how == INTERRUPT ? EINTR : (error);                    \
            return (type)-1;                                                     \
        }                                                                        \
        return __real_##name args;                                               \
    }
#define HALF(n) n = n > 1 ? n / 2 : n
WRAP(ssize_t, pread64, (int fd, void *p, size_t n, off_t off), (fd, p, n, off), true, HALF(n), EIO)
WRAP(ssize_t, pwrite64, (int fd, const void *p, size_t n, off_t off), (fd, p, n, off), true, HALF(n), ENOSPC)
WRAP(ssize_t, read, (int fd, void *p, size_t n), (fd, p, n), true, HALF(n), EIO)
WRAP(ssize_t, write, (int fd, const void *p, size_t n), (fd, p, n), true, HALF(n), ENOSPC)
WRAP(int, ftruncate64, (int fd, off_t n), (fd, n), false, , ENOSPC)
WRAP(int, rename, (const char *a, const char *b), (a, b), false, , EIO)
WRAP(void *, mmap64, (void *p, size_t n, int prot, int flags, int fd, off_t off), (p, n, prot, flags, fd, off), false, , ENODEV)

/* Syncs are counted and failed, but not done: what a power loss leaves is not tested here. */
static int sync_call(const char *name)
{
    if (hit(name, false)) {
        errno = EIO;
        return -1;
    }
    return 0;
}

int __wrap_fsync(int fd);
int __wrap_fsync(int fd)
{
    (void)fd;
    return sync_call("fsync");
}

int __wrap_fdatasync(int fd);
int __wrap_fdatasync(int fd)
{
    (void)fd;
    return sync_call("fdatasync");
}

int __real_open64(const char *path, int flags, mode_t mode);
int __wrap_open64(const char *path, int flags, ...);
int __wrap_open64(const char *path, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    mode_t mode = flags & O_CREAT ? (mode_t)va_arg(ap, int) : 0;
    va_end(ap);
    if (hit("open", false)) {
        errno = EMFILE;
        return -1;
    }
    return __real_open64(path, flags, mode);
}

int __real_openat64(int dir, const char *path, int flags, mode_t mode);
int __wrap_openat64(int dir, const char *path, int flags, ...);
int __wrap_openat64(int dir, const char *path, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    mode_t mode = flags & O_CREAT ? (mode_t)va_arg(ap, int) : 0;
    va_end(ap);
    if (hit("openat", false)) {
        errno = EMFILE;
        return -1;
    }
    return __real_openat64(dir, path, flags, mode);
}

/* ---- the cases --------------------------------------------------------------------------------- */

static struct {
    const char *data;
    char path[512], out[64];
    struct qx_ckpt *open;
} in;

/* What a run came to: a digest of its results, and how many error findings it made. */
struct outcome { uint64_t digest; size_t errors; bool target; /* something is at the target */ };

struct attempt {
    const char *name;
    int (*run)(struct outcome *o, struct qx_error *err);
    const char *layout;
    bool needs_open;
};

static void digest(struct outcome *o, const void *p, size_t n)
{
    o->digest = XXH3_64bits_withSeed(p, n, o->digest);
}

static void digest_findings(struct outcome *o, const struct qx_findings *fs)
{
    for (size_t i = 0; i < qx_findings_count(fs); i++) {
        const struct qx_finding *f = qx_findings_at(fs, i);
        digest(o, f->kind, strlen(f->kind));
        digest(o, &f->count, sizeof f->count);
        o->errors += f->severity == QX_ERROR;
    }
}

static int run_open(struct outcome *o, struct qx_error *err)
{
    struct qx_ckpt *ck;
    struct qx_open how = QX_OPEN_DEFAULT;
    how.n_threads = 1;
    int rc = qx_ckpt_open(&ck, in.path, &how, err);
    if (!rc) {
        size_t n = qx_ckpt_n_tensors(ck);
        digest(o, &n, sizeof n);
        digest_findings(o, qx_ckpt_findings(ck));
    }
    qx_ckpt_close(ck);
    return rc;
}

static int run_table(struct outcome *o, struct qx_error *err)
{
    struct qx_rows *r;
    uint64_t rows[] = {0, 5, 0, 1};
    static float out[4 * 1024];
    int rc = qx_rows_open_table(&r, in.open, err);
    if (!rc && qx_rows_width(r) <= 1024) {
        rc = qx_rows_read(r, rows, 4, QX_ROW_F32, out, err);
        digest(o, out, rc ? 0 : 4 * qx_rows_width(r) * sizeof *out);
    }
    qx_rows_close(r);
    return rc;
}

static int run_verify(struct outcome *o, struct qx_error *err)
{
    struct qx_verify *v;
    struct qx_verify_opts how = QX_VERIFY_DEFAULT;
    how.level = QX_VERIFY_FULL;
    how.sample_rows = 2;
    how.n_threads = 1;
    int rc = qx_verify_run(&v, in.open, &how, err);
    if (!rc) {
        digest_findings(o, qx_verify_findings(v));
    }
    qx_verify_free(v);
    return rc;
}

static int run_model(struct outcome *o, struct qx_error *err)
{
    uint32_t out[2];
    size_t n;
    int rc = model_round(in.open, out, &n, err);
    digest(o, out, n * sizeof *out);
    return rc;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(a, b);
}

/* Names and bytes of a directory without folders, in order of name. */
static void digest_dir(struct outcome *o, const char *path)
{
    static char names[256][256];
    size_t n = 0;
    DIR *d = opendir(path);
    for (const struct dirent *e; d && n < 256 && (e = readdir(d)) != NULL;) {
        if (e->d_name[0] != '.') {
            snprintf(names[n++], sizeof names[0], "%.255s", e->d_name);
        }
    }
    if (d) {
        closedir(d);
    }
    qsort(names, n, sizeof names[0], by_name);
    for (size_t i = 0; i < n; i++) {
        char name[600];
        static char bytes[8 << 20];
        snprintf(name, sizeof name, "%.300s/%.255s", path, names[i]);
        FILE *f = fopen(name, "rb");
        size_t k = f ? fread(bytes, 1, sizeof bytes, f) : 0;
        if (f) {
            fclose(f);
        }
        digest(o, names[i], strlen(names[i]));
        digest(o, bytes, k);
    }
}

/* What is at the target afterwards: whole, or nothing. It may be there after a failure when only the last
 * sync of its folder failed. */
static void look_at_target(const char *path, struct outcome *o)
{
    struct stat st;
    o->target = lstat(path, &st) == 0;
    o->digest = 0;
    if (o->target && S_ISDIR(st.st_mode)) {
        digest_dir(o, path);
    } else if (o->target) {
        char bytes[64];
        FILE *f = fopen(path, "rb");
        size_t n = f ? fread(bytes, 1, sizeof bytes, f) : 0;
        if (f) {
            fclose(f);
        }
        digest(o, bytes, n);
    }
}

static int run_repack(struct outcome *o, struct qx_error *err)
{
    struct qx_repack *r;
    struct qx_repack_opts how = QX_REPACK_DEFAULT;
    char target[128], part[160];
    how.table = QX_F_NVFP4;
    how.plain_scales = true;
    how.n_threads = 1;
    how.resume = false;
    snprintf(target, sizeof target, "%s/out", in.out);
    snprintf(part, sizeof part, "%s.part", target);
    int rc = qx_repack_plan(&r, in.open, target, &how, err);
    rc = rc ? rc : qx_repack_run(r, err);
    qx_repack_destroy(r);
    bool on = fault.on;
    fault.on = false;
    look_at_target(target, o);
    remove_tree(target);
    remove_tree(part);
    fault.on = on;
    return rc;
}

/* Creating an archive of the directory, or restoring one. */
static int archive(bool restore, struct outcome *o, struct qx_error *err)
{
    struct qx_archive_opts how = {.n_threads = 1};
    struct qx_archive_result result;
    char packed[128], target[128], part[160];
    snprintf(packed, sizeof packed, "%s/packed", in.out);
    snprintf(target, sizeof target, "%s/out", in.out);
    snprintf(part, sizeof part, "%s.part", target);
    int rc = restore ? qx_archive_restore(packed, target, &how, &result, err)
                     : qx_archive_create(in.path, target, &how, &result, err);
    bool on = fault.on;
    fault.on = false;
    look_at_target(target, o);
    if (!restore && o->target) { /* frames may be cut in other places: what counts is what comes back */
        char back[128];
        snprintf(back, sizeof back, "%s/back", in.out);
        if (qx_archive_restore(target, back, &how, &result, err)) {
            rc = rc ? rc : -(int)QX_E_FORMAT;
        }
        look_at_target(back, o);
        remove_tree(back);
    }
    remove_tree(target);
    remove_tree(part);
    fault.on = on;
    return rc;
}

static int run_archive(struct outcome *o, struct qx_error *err)
{
    return archive(false, o, err);
}

static int run_restore(struct outcome *o, struct qx_error *err)
{
    return archive(true, o, err);
}

static int run_small(struct outcome *o, struct qx_error *err)
{
    static const char text[] = "whole or not there";
    char target[128], part[160];
    struct stat st;
    snprintf(target, sizeof target, "%s/small", in.out);
    snprintf(part, sizeof part, "%s.part", target);
    int rc = qx_file_out_small(target, text, sizeof text - 1, err);
    bool on = fault.on;
    fault.on = false;
    look_at_target(target, o);
    if (lstat(part, &st) == 0) {
        rc = 2;
    }
    (void)unlink(target);
    (void)unlink(part);
    fault.on = on;
    return rc;
}

static const struct attempt attempts[] = {
    {"open", run_open, "nvfp4", false},
    {"open-mixed", run_open, "mixed", false},
    {"rows", run_table, "mixed", true},
    {"rows-nvfp4", run_table, "nvfp4-ple", true},
    {"verify", run_verify, "mixed", true},
    {"model", run_model, "mixed", true},
    {"repack", run_repack, "mixed", true},
    {"archive", run_archive, "nvfp4-ple", false},
    {"restore", run_restore, "nvfp4-ple", false},
    {"small-file", run_small, NULL, false},
};

static size_t open_files(void)
{
    size_t n = 0;
    DIR *d = opendir("/proc/self/fd");
    while (d && readdir(d)) {
        n++;
    }
    if (d) {
        closedir(d);
    }
    return n;
}

static bool try_once(const struct attempt *a, unsigned long n, enum fault how, bool sticky,
                     const struct outcome *good)
{
    static const char *const words[] = {"", "failing", "short", "interrupted"};
    struct qx_error err = {0};
    struct outcome o = {0};
    uint64_t live = qx_alloc_live();
    size_t files = open_files();
    fault.how = how;
    fault.sticky = sticky;
    fault.at = n;
    fault.calls = fault.hits = 0;
    fault.name = "no call";
    fault.on = true;
    int rc = a->run(&o, &err);
    fault.on = false;
    const char *why = NULL;
    int code = rc ? qx_error_exit_code(&err) : 0;
    if (qx_alloc_live() != live) {
        why = "blocks left behind";
    } else if (open_files() != files) {
        why = "files left open";
    } else if (rc > 0) {
        why = "a part is left behind";
    } else if (o.target && o.digest != good->digest) {
        why = "a target that is not whole";
    } else if (!rc && good->target && !o.target) {
        why = "success and no target";
    } else if (how == FAIL && rc && code != 3 && code != 4) {
        why = "an error of another family";
    } else if (how == FAIL && !rc && o.digest != good->digest && o.errors <= good->errors) {
        why = "another result and no error";
    } else if (how != FAIL && (rc || o.digest != good->digest)) {
        why = "another result";
    } else if (rc && (!err.kind || !err.msg[0])) {
        why = "an error without words";
    }
    if (why) {
        printf("%s: call %lu (%s) %s%s: %s (returned %d, code %d %s: %s)\n", a->name, n, fault.name, words[how],
               sticky ? " and all later" : "", why, rc, (int)err.code, err.kind ? err.kind : "", err.msg);
    }
    return !why;
}

static bool run_case(const struct attempt *a, bool all)
{
    struct qx_error err = {0};
    struct outcome good = {0};
    unsigned bad = 0, tries = 0;
    unsigned long totals[2];
    snprintf(in.path, sizeof in.path, "%s/micro/%s", in.data, a->layout ? a->layout : "");
    if (a->needs_open && qx_ckpt_open(&in.open, in.path, NULL, &err)) {
        printf("%s: %s: %s\n", a->name, in.path, err.msg);
        return false;
    }
    if (a->run == run_restore) {
        struct qx_archive_opts how = {.n_threads = 1};
        struct qx_archive_result result;
        char packed[128];
        snprintf(packed, sizeof packed, "%s/packed", in.out);
        if (qx_archive_create(in.path, packed, &how, &result, &err)) {
            printf("%s: %s: %s\n", a->name, in.path, err.msg);
            return false;
        }
    }
    for (int k = 0; k < 2; k++) { /* all calls; then those that move bytes */
        struct outcome again = {0};
        fault.how = NONE;
        fault.calls = 0;
        fault.on = true;
        fault.sticky = false;
        fault.how = k ? SHORT : FAIL;
        fault.at = 0; /* never */
        int rc = a->run(&again, &err);
        fault.on = false;
        totals[k] = fault.calls;
        if (rc || (k && again.digest != good.digest)) {
            printf("%s: without faults: %s %s\n", a->name, err.kind ? err.kind : "", err.msg);
            bad++;
        }
        good = again;
    }
    for (int how = FAIL; how <= INTERRUPT && bad < 5; how++) {
        unsigned long total = totals[how != FAIL], step = all || total < TRIES ? 1 : total / TRIES;
        for (unsigned long n = 1; n <= total && bad < 5; n += n < TRIES / 2 ? 1 : step) {
            bad += !try_once(a, n, (enum fault)how, false, &good);
            tries++;
            if (how == FAIL) {
                bad += !try_once(a, n, FAIL, true, &good);
                tries++;
            }
        }
    }
    printf("%-12s %6lu calls, %5u tries, %s\n", a->name, totals[0], tries, bad ? "BAD" : "ok");
    qx_ckpt_close(in.open);
    in.open = NULL;
    return bad == 0;
}

int main(int argc, char **argv)
{
    bool all = argc > 1 && strcmp(argv[1], "--all") == 0, ok = true;
    in.data = getenv("QX_TEST_DATA");
    if (!in.data) {
        printf("QX_TEST_DATA must name the test data\n");
        return 77;
    }
    snprintf(in.out, sizeof in.out, "/tmp/qx-io-XXXXXX");
    if (!mkdtemp(in.out)) {
        perror("mkdtemp");
        return 1;
    }
    for (size_t i = 0; i < QX_ARRAY_LEN(attempts); i++) {
        bool wanted = argc == 1 + all;
        for (int k = 1 + all; k < argc; k++) {
            wanted |= qx_glob_match(argv[k], attempts[i].name);
        }
        ok = (!wanted || run_case(&attempts[i], all)) && ok;
    }
    remove_tree(in.out);
    return ok ? 0 : 1;
}
