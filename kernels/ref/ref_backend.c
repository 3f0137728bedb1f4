/* ref_backend.c: host memory as a device. Everything runs when called, so a queue holds nothing and
 * waiting returns at once; graphs are left out. Owns the worker threads. */
#include "ref.h"

#include "alloc.h"
#include "error.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct ref_backend {
    struct qx_backend be;
    struct qx_pool *pool;
};

struct ref_job {
    const struct qx_queue *q;
    ref_fn fn;
    void *user;
};

static void ref_trampoline(void *user, uint64_t i, uint32_t worker)
{
    const struct ref_job *j = user;
    (void)worker;
    j->fn(j->q, j->user, i);
}

void ref_for(const struct qx_queue *q, uint64_t n, uint64_t cost, ref_fn fn, void *user)
{
    const uint64_t worth = 16384; /* multiply-adds, about the price of waking the workers */
    if (cost == 0) {
        cost = 1;
    }
    if (n < 2 || n * cost < 2 * worth || qx_pool_threads(q->pool) < 2) {
        for (uint64_t i = 0; i < n; ++i) {
            fn(q, user, i);
        }
        return;
    }
    struct ref_job job = {q, fn, user};
    uint64_t grain = worth / cost;
    uint64_t even = n / (4ull * qx_pool_threads(q->pool));
    grain = grain > even ? grain : even;
    qx_pool_run(q->pool, n, grain ? grain : 1, ref_trampoline, &job);
}

static int ref_info(struct qx_backend *be, struct qx_device_info *out, struct qx_error *err)
{
    const struct ref_backend *r = (const struct ref_backend *)be;
    (void)err;
    memset(out, 0, sizeof *out);
    uint32_t n = qx_pool_threads(r->pool);
    snprintf(out->name, sizeof out->name, "cpu, %u thread%s", n, n == 1 ? "" : "s");
    long avail = sysconf(_SC_AVPHYS_PAGES), size = sysconf(_SC_PAGESIZE);
    out->memory_bytes = qx_host_memory_bytes();
    out->memory_free_bytes = avail > 0 && size > 0 ? (uint64_t)avail * (uint64_t)size : 0;
    return 0;
}

static int ref_mem_alloc(struct qx_backend *be, void **out, size_t n, struct qx_error *err)
{
    ++be->n_allocs;
    *out = qx_calloc(n ? n : 1, 1);
    return *out ? 0 : qx_fail(err, QX_E_NOMEM, "out-of-memory", "cannot allocate %zu bytes", n);
}

static void ref_mem_free(struct qx_backend *be, void *p)
{
    (void)be;
    qx_free(p);
}

static int ref_host_alloc(struct qx_backend *be, void **out, void **dev, size_t n, struct qx_error *err)
{
    int rc = ref_mem_alloc(be, out, n, err);
    if (dev) {
        *dev = *out;
    }
    return rc;
}

static int ref_queue_create(struct qx_backend *be, struct qx_queue **out, struct qx_error *err)
{
    struct qx_queue *q = qx_calloc(1, sizeof *q);
    *out = q;
    if (!q) {
        return qx_fail_nomem(err);
    }
    q->be = be;
    q->pool = ((struct ref_backend *)be)->pool;
    q->dot = ref_dot_plain;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        q->dot = ref_dot_avx2;
    }
#endif
    return 0;
}

static void ref_queue_destroy(struct qx_queue *q)
{
    qx_free(q);
}

static int ref_move(struct qx_queue *q, void *dst, const void *src, size_t n)
{
    (void)q;
    if (n) {
        memmove(dst, src, n);
    }
    return 0;
}

static int ref_fill(struct qx_queue *q, void *dst, int byte, size_t n)
{
    (void)q;
    if (n) {
        memset(dst, byte, n);
    }
    return 0;
}

static int ref_wait(struct qx_queue *q, struct qx_error *err)
{
    ++q->be->n_waits;
    (void)err;
    return 0;
}

static int ref_queue_error(struct qx_queue *q, struct qx_error *err)
{
    (void)q;
    (void)err;
    return 0;
}

static void ref_destroy(struct qx_backend *be)
{
    if (be) {
        qx_pool_destroy(((struct ref_backend *)be)->pool);
        qx_free(be);
    }
}

static const struct qx_ops ref_ops = {
#define OP(name, bound) .name = ref_##name,
#include "ops.def"
#undef OP
};

int qx_backend_cpu_create(struct qx_backend **out, uint32_t n_threads, struct qx_error *err)
{
    *out = NULL;
    struct ref_backend *r = qx_calloc(1, sizeof *r);
    if (!r) {
        return qx_fail_nomem(err);
    }
    int rc = qx_pool_create(&r->pool, n_threads, err);
    if (rc) {
        qx_free(r);
        return rc;
    }
    r->be = (struct qx_backend){
        .name = "cpu",
        .host_memory = true,
        .ops = &ref_ops,
        .info = ref_info,
        .mem_alloc = ref_mem_alloc,
        .mem_free = ref_mem_free,
        .host_alloc = ref_host_alloc,
        .host_free = ref_mem_free,
        .queue_create = ref_queue_create,
        .queue_destroy = ref_queue_destroy,
        .upload = ref_move,
        .upload_mapped = ref_move,
        .download = ref_move,
        .copy = ref_move,
        .fill = ref_fill,
        .wait = ref_wait,
        .queue_error = ref_queue_error,
        .destroy = ref_destroy,
    };
    *out = &r->be;
    return 0;
}
