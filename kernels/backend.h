/* backend.h: a device as verbs (memory, queues, graphs) plus a table of ops (ops.h).
 *
 * The reference backend is host memory as a device and runs everything at once when called; the CUDA
 * backend enqueues. Graph code in lib calls both the same way. Every buffer and queue belongs to one
 * device index. */
#ifndef QX_BACKEND_H
#define QX_BACKEND_H

#include "base.h"
#include "error.h"

#ifdef __cplusplus
extern "C" {
#endif

struct qx_ops;     /* ops.h */
struct qx_queue;   /* in-order work of one device; made by a backend */
struct qx_pool;    /* worker threads (lib/pool.h); used by the reference backend */

struct qx_device_info {
    char name[128];
    uint64_t memory_bytes, memory_free_bytes;
    uint32_t multiprocessors;
    uint32_t capability;       /* 90 for sm_90; 0 for the host */
    uint64_t bandwidth_bytes_s;/* peak of the device's memory by clock and bus width; 0 unknown */
    /* What a well tuned reader and large bf16 products have been seen to reach on a device of this name,
     * for the floors of `qx bench`; 0 unknown. */
    uint64_t reach_bytes_s, reach_flops_s;
    char variants[256];        /* kernel variants chosen, for run -v */
};

struct qx_backend {
    const char *name;          /* "cpu", "cuda" */
    int device;                /* index */
    bool host_memory;          /* device pointers are host pointers: weights may stay mapped */
    const struct qx_ops *ops;
    uint64_t queue_bytes;      /* device memory that each queue takes for itself */
    /* Since it was opened: times memory was taken from the device or pinned, times the host waited for a
     * queue. Decoding raises neither. */
    uint64_t n_allocs, n_waits;

    int (*info)(struct qx_backend *be, struct qx_device_info *out, struct qx_error *err);
    int (*mem_alloc)(struct qx_backend *be, void **out, size_t n, struct qx_error *err);
    void (*mem_free)(struct qx_backend *be, void *p);
    /* Host memory the device can read directly (pinned, mapped) and that copies fast. *dev gets the
     * device's address of it (may equal the host's). */
    int (*host_alloc)(struct qx_backend *be, void **out, void **dev, size_t n, struct qx_error *err);
    void (*host_free)(struct qx_backend *be, void *p);

    int (*queue_create)(struct qx_backend *be, struct qx_queue **out, struct qx_error *err);
    void (*queue_destroy)(struct qx_queue *q);
    /* Enqueue; memory must stay valid until the queue has been waited for. */
    int (*upload)(struct qx_queue *q, void *dst, const void *src, size_t n);
    /* The same from an address that host_alloc gave as the device's; for little, which is then sooner there. Counts of
     * four bytes. */
    int (*upload_mapped)(struct qx_queue *q, void *dst, const void *dev_src, size_t n);
    int (*download)(struct qx_queue *q, void *dst, const void *src, size_t n);
    int (*copy)(struct qx_queue *q, void *dst, const void *src, size_t n);
    int (*fill)(struct qx_queue *q, void *dst, int byte, size_t n);
    /* Waits until everything enqueued is done; reports late failures. */
    int (*wait)(struct qx_queue *q, struct qx_error *err);
    /* The first failure since the last wait, also of enqueueing: ops return int and record details
     * here. */
    int (*queue_error)(struct qx_queue *q, struct qx_error *err);

    /* Whole steps as graphs: everything enqueued between begin and end is recorded, not run. The
     * reference backend leaves these NULL and callers run eagerly. */
    int (*graph_begin)(struct qx_queue *q, struct qx_error *err);
    int (*graph_end)(struct qx_queue *q, void **graph, uint64_t *n_nodes, struct qx_error *err);
    int (*graph_launch)(struct qx_queue *q, void *graph);
    void (*graph_destroy)(struct qx_backend *be, void *graph);

    /* For tests: from now on the queue's ops choose their variants as on a device of that capability (90: one
     * that runs PTX, without the features of sm_90a alone). NULL where there are no variants. */
    void (*queue_limit)(struct qx_queue *q, uint32_t capability);

    void (*destroy)(struct qx_backend *be);
};

/* Device memory that a queue of the CUDA backend takes for its ops to work in, whatever the model: a part of
 * every plan for a GPU. */
#define QX_CUDA_WORKSPACE_BYTES ((uint64_t)320 << 20)

/* n_threads 0: all processors. Results do not depend on it. */
int qx_backend_cpu_create(struct qx_backend **out, uint32_t n_threads, struct qx_error *err);
/* QX_E_DEVICE when built without CUDA, without a driver, or there is no such device; the message says
 * which. Present in every build. */
int qx_backend_cuda_create(struct qx_backend **out, int device, struct qx_error *err);
int qx_backend_cuda_count(void); /* 0 without CUDA or driver */

#ifdef __cplusplus
}
#endif
#endif
