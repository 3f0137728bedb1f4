/* cuda_backend.cu: a GPU as the verbs of backend.h. Owns the mapping of CUDA errors, the queues with
 * their workspaces, recorded graphs, and the table of ops. Nothing here touches the driver before
 * qx_backend_cuda_create or qx_backend_cuda_count is called, so programs start on machines without one. */
#include "common.cuh"

#include <new>
#include <stdio.h>
#include <string.h>

struct qx_cuda {
    struct qx_backend be; /* first: be == this */
    cudaDeviceProp prop;
    bool has_wgmma;       /* of its queues (common.cuh) */
};

/* Tells which code the device runs: the one of its own architecture with all features, or a plainer one. */
__global__ void probe_kernel(unsigned *features)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    *features = 1;
#else
    *features = 0;
#endif
}

extern "C" {
#define OP(name, bound) int qx_cuda_##name(struct qx_queue *q, const struct qx_op_##name *a);
#include "ops.def"
#undef OP
}

static const struct qx_ops cuda_ops = {
#define OP(name, bound) qx_cuda_##name,
#include "ops.def"
#undef OP
};

/* ---- errors --------------------------------------------------------------------------------- */

static int map_error(struct qx_error *err, cudaError_t e, const char *what, int device)
{
    if (e == cudaErrorMemoryAllocation) {
        return qx_fail(err, QX_E_NOMEM, "device-memory", "cuda:%d: %s: out of device memory", device, what);
    }
    int r = qx_fail(err, QX_E_DEVICE, "device", "cuda:%d: %s: %s (%s)", device, what, cudaGetErrorString(e),
                    cudaGetErrorName(e));
    if (err) {
        err->sys = (int)e;
    }
    return r;
}

int qx_queue_fail(struct qx_queue *q, cudaError_t e, const char *what)
{
    struct qx_error err;
    int r = map_error(&err, e, what, q->device);
    if (!q->failed) {
        q->failed = true;
        q->first = err;
    }
    return r;
}

int qx_queue_refuse(struct qx_queue *q, const char *op, const char *why)
{
    struct qx_error err;
    int r = qx_fail(&err, QX_E_UNSUPPORTED, "op-shape", "cuda:%d: %s: %s", q->device, op, why);
    if (!q->failed) {
        q->failed = true;
        q->first = err;
    }
    return r;
}

#define Q_TRY(q, call)                                  \
    do {                                                \
        cudaError_t e_ = (call);                        \
        if (e_ != cudaSuccess) {                        \
            return qx_queue_fail(q, e_, #call);         \
        }                                               \
    } while (0)

/* ---- memory --------------------------------------------------------------------------------- */

static int cu_info(struct qx_backend *be, struct qx_device_info *out, struct qx_error *err)
{
    struct qx_cuda *c = (struct qx_cuda *)be;
    memset(out, 0, sizeof *out);
    cudaSetDevice(be->device);
    size_t free_bytes, total;
    cudaError_t e = cudaMemGetInfo(&free_bytes, &total);
    if (e != cudaSuccess) {
        return map_error(err, e, "cudaMemGetInfo", be->device);
    }
    snprintf(out->name, sizeof out->name, "%.127s", c->prop.name);
    out->memory_bytes = total;
    out->memory_free_bytes = free_bytes;
    out->multiprocessors = (uint32_t)c->prop.multiProcessorCount;
    out->capability = (uint32_t)(c->prop.major * 10 + c->prop.minor);
    int khz = 0, bits = 0;
    if (cudaDeviceGetAttribute(&khz, cudaDevAttrMemoryClockRate, be->device) == cudaSuccess &&
        cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, be->device) == cudaSuccess &&
        khz > 0 && bits > 0) {
        out->bandwidth_bytes_s = 2 * (uint64_t)khz * 1000 * (uint64_t)bits / 8; /* two transfers a clock */
    }
    cudaGetLastError();
    if (strstr(out->name, "H200")) {
        out->reach_bytes_s = 4300000000000u;
        out->reach_flops_s = 790000000000000u;
    }
    snprintf(out->variants, sizeof out->variants,
             "few rows: mma.sync%s; prompts: %s; with --precise activations as three bf16 terms",
             out->capability >= 90 ? " fed by bulk copies" : "", c->has_wgmma ? "wgmma" : "mma.sync");
    return 0;
}

static int cu_mem_alloc(struct qx_backend *be, void **out, size_t n, struct qx_error *err)
{
    *out = NULL;
    ++be->n_allocs;
    cudaSetDevice(be->device);
    cudaError_t e = cudaMalloc(out, n ? n : 1);
    if (e != cudaSuccess) {
        cudaGetLastError();
        *out = NULL;
        return map_error(err, e, "cudaMalloc", be->device);
    }
    return 0;
}

static void cu_mem_free(struct qx_backend *be, void *p)
{
    if (p) {
        cudaSetDevice(be->device);
        cudaFree(p);
    }
}

static int cu_host_alloc(struct qx_backend *be, void **out, void **dev, size_t n, struct qx_error *err)
{
    *out = NULL;
    ++be->n_allocs;
    cudaSetDevice(be->device);
    cudaError_t e = cudaHostAlloc(out, n ? n : 1, cudaHostAllocMapped | cudaHostAllocPortable);
    if (e == cudaSuccess && dev) {
        e = cudaHostGetDevicePointer(dev, *out, 0);
    }
    if (e != cudaSuccess) {
        cudaGetLastError();
        if (*out) {
            cudaFreeHost(*out);
        }
        *out = NULL;
        if (e == cudaErrorMemoryAllocation) {
            return qx_fail(err, QX_E_NOMEM, "host-memory", "cannot pin %zu bytes of host memory", n);
        }
        return map_error(err, e, "cudaHostAlloc", be->device);
    }
    return 0;
}

static void cu_host_free(struct qx_backend *be, void *p)
{
    if (p) {
        cudaSetDevice(be->device);
        cudaFreeHost(p);
    }
}

/* ---- queues --------------------------------------------------------------------------------- */

static void cu_queue_destroy(struct qx_queue *q)
{
    if (!q) {
        return;
    }
    cudaSetDevice(q->device);
    if (q->stream) {
        cudaStreamSynchronize(q->stream);
        cudaStreamDestroy(q->stream);
    }
    cudaFree(q->ws);
    cudaFree(q->tickets);
    cudaFree(q->words);
    delete q;
}

static int cu_queue_create(struct qx_backend *be, struct qx_queue **out, struct qx_error *err)
{
    *out = NULL;
    struct qx_queue *q = new (std::nothrow) qx_queue();
    if (!q) {
        return qx_fail_nomem(err);
    }
    q->be = be;
    q->device = be->device;
    const cudaDeviceProp *prop = &((struct qx_cuda *)be)->prop;
    unsigned features = 0;
    q->n_sm = prop->multiProcessorCount;
    q->capability = prop->major * 10 + prop->minor;
    q->smem_max = (int)prop->sharedMemPerBlockOptin;
    cudaSetDevice(be->device);
    cudaError_t e = cudaStreamCreateWithFlags(&q->stream, cudaStreamNonBlocking);
    if (e == cudaSuccess) {
        e = cudaMalloc((void **)&q->ws, QX_WS_BYTES);
    }
    if (e == cudaSuccess) {
        e = cudaMalloc((void **)&q->tickets, QX_N_TICKETS * sizeof(unsigned));
    }
    if (e == cudaSuccess) {
        e = cudaMalloc((void **)&q->words, QX_N_WORDS * sizeof(uint64_t));
    }
    if (e == cudaSuccess) {
        q->route_words = q->words + QX_HC_WORDS;
        q->moe_words = q->route_words + QX_ROUTE_WORDS;
        q->numbers = (unsigned *)(q->moe_words + QX_MOE_WORDS);
        q->attend_words = q->moe_words + QX_MOE_WORDS + QX_N_NUMBERS;
        q->score_words = q->attend_words + QX_ATTEND_WORDS;
        q->pick_words = q->score_words + QX_SCORE_WORDS;
        q->late_done = (unsigned *)(q->pick_words + QX_PICK_WORDS);
        e = cudaMemsetAsync(q->words, 0, QX_N_WORDS * sizeof(uint64_t), q->stream);
    }
    if (e == cudaSuccess) {
        probe_kernel<<<1, 1, 0, q->stream>>>(q->tickets);
        e = cudaGetLastError();
    }
    if (e == cudaSuccess) {
        e = cudaMemcpyAsync(&features, q->tickets, sizeof features, cudaMemcpyDeviceToHost, q->stream);
    }
    if (e == cudaSuccess) {
        e = cudaStreamSynchronize(q->stream);
        q->has_wgmma = ((struct qx_cuda *)be)->has_wgmma = features == 1;
    }
    if (e == cudaSuccess) {
        e = cudaMemsetAsync(q->tickets, 0, QX_N_TICKETS * sizeof(unsigned), q->stream);
    }
    if (e != cudaSuccess) {
        cudaGetLastError();
        cu_queue_destroy(q);
        return map_error(err, e, "making a queue", be->device);
    }
    *out = q;
    return 0;
}

static void cu_queue_limit(struct qx_queue *q, uint32_t capability)
{
    const int most = capability >= 120 ? 99 * 1024 : 227 * 1024;
    q->capability = (int)capability;
    q->has_wgmma = false;
    q->smem_max = most < q->smem_max ? most : q->smem_max;
}

static int cu_upload(struct qx_queue *q, void *dst, const void *src, size_t n)
{
    cudaSetDevice(q->device);
    Q_TRY(q, cudaMemcpyAsync(dst, src, n, cudaMemcpyHostToDevice, q->stream));
    return 0;
}
__global__ void upload_words(uint32_t *dst, const uint32_t *src, size_t n)
{
    pdl_next();
    pdl_wait();
    for (size_t i = threadIdx.x; i < n; i += blockDim.x) {
        dst[i] = __ldcv(src + i);
    }
}
#define UPLOAD_WORDS 8192u /* by one block; more by copying */

static int cu_upload_mapped(struct qx_queue *q, void *dst, const void *dev_src, size_t n)
{
    return n / 4 > UPLOAD_WORDS ? cu_upload(q, dst, dev_src, n)
                                : launch(q, "upload", upload_words, dim3(1), dim3(1024), 0, (uint32_t *)dst,
                                         (const uint32_t *)dev_src, n / 4);
}
static int cu_download(struct qx_queue *q, void *dst, const void *src, size_t n)
{
    cudaSetDevice(q->device);
    Q_TRY(q, cudaMemcpyAsync(dst, src, n, cudaMemcpyDeviceToHost, q->stream));
    return 0;
}
static int cu_copy(struct qx_queue *q, void *dst, const void *src, size_t n)
{
    cudaSetDevice(q->device);
    Q_TRY(q, cudaMemcpyAsync(dst, src, n, cudaMemcpyDeviceToDevice, q->stream));
    return 0;
}
static int cu_fill(struct qx_queue *q, void *dst, int byte, size_t n)
{
    cudaSetDevice(q->device);
    Q_TRY(q, cudaMemsetAsync(dst, byte, n, q->stream));
    return 0;
}

static int cu_queue_error(struct qx_queue *q, struct qx_error *err)
{
    if (!q->failed) {
        return 0;
    }
    if (err) {
        *err = q->first;
    }
    return -(int)q->first.code;
}

static int cu_wait(struct qx_queue *q, struct qx_error *err)
{
    ++q->be->n_waits;
    cudaSetDevice(q->device);
    cudaError_t e = cudaStreamSynchronize(q->stream);
    if (e != cudaSuccess) {
        qx_queue_fail(q, e, "running what was enqueued");
    }
    int r = cu_queue_error(q, err);
    q->failed = false;
    return r;
}

/* ---- graphs --------------------------------------------------------------------------------- */

static int cu_graph_begin(struct qx_queue *q, struct qx_error *err)
{
    cudaSetDevice(q->device);
    cudaError_t e = cudaStreamBeginCapture(q->stream, cudaStreamCaptureModeThreadLocal);
    if (e != cudaSuccess) {
        return map_error(err, e, "cudaStreamBeginCapture", q->device);
    }
    q->capturing = true;
    return 0;
}

static int cu_graph_end(struct qx_queue *q, void **graph, uint64_t *n_nodes, struct qx_error *err)
{
    *graph = NULL;
    cudaSetDevice(q->device);
    cudaGraph_t g = NULL;
    q->capturing = false;
    cudaError_t e = cudaStreamEndCapture(q->stream, &g);
    if (e != cudaSuccess) {
        cudaGetLastError();
        return map_error(err, e, "cudaStreamEndCapture", q->device);
    }
    size_t n = 0;
    cudaGraphExec_t x = NULL;
    e = cudaGraphGetNodes(g, NULL, &n);
    if (e == cudaSuccess) {
        e = cudaGraphInstantiate(&x, g, 0);
    }
    cudaGraphDestroy(g);
    if (e == cudaSuccess) {
        e = cudaGraphUpload(x, q->stream);
    }
    if (e != cudaSuccess) {
        cudaGetLastError();
        return map_error(err, e, "cudaGraphInstantiate", q->device);
    }
    if (n_nodes) {
        *n_nodes = n;
    }
    *graph = x;
    return 0;
}

static int cu_graph_launch(struct qx_queue *q, void *graph)
{
    cudaSetDevice(q->device);
    Q_TRY(q, cudaGraphLaunch((cudaGraphExec_t)graph, q->stream));
    return 0;
}

static void cu_graph_destroy(struct qx_backend *be, void *graph)
{
    if (graph) {
        cudaSetDevice(be->device);
        cudaGraphExecDestroy((cudaGraphExec_t)graph);
    }
}

/* ---- open ----------------------------------------------------------------------------------- */

static void cu_destroy(struct qx_backend *be)
{
    delete (struct qx_cuda *)be;
}

extern "C" int qx_backend_cuda_count(void)
{
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return n;
}

extern "C" int qx_backend_cuda_create(struct qx_backend **out, int device, struct qx_error *err)
{
    *out = NULL;
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess) {
        cudaGetLastError();
        if (e == cudaErrorInsufficientDriver || e == cudaErrorNoDevice || e == cudaErrorStubLibrary) {
            int version = 0;
            cudaDriverGetVersion(&version);
            return version == 0
                       ? qx_fail(err, QX_E_DEVICE, "no-device", "no NVIDIA driver on this machine; use --device cpu")
                   : e == cudaErrorNoDevice
                       ? qx_fail(err, QX_E_DEVICE, "no-device", "no GPU on this machine; use --device cpu")
                       : qx_fail(err, QX_E_DEVICE, "no-device",
                                 "the NVIDIA driver supports CUDA %d.%d, this program needs %d.%d", version / 1000,
                                 version % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
        }
        return map_error(err, e, "cudaGetDeviceCount", device);
    }
    if (device < 0 || device >= n) {
        return qx_fail(err, QX_E_DEVICE, "no-device", "there is no device cuda:%d, %d found", device, n);
    }
    struct qx_cuda *c = new (std::nothrow) qx_cuda();
    if (!c) {
        return qx_fail_nomem(err);
    }
    e = cudaSetDevice(device);
    if (e == cudaSuccess) {
        e = cudaGetDeviceProperties(&c->prop, device);
    }
    cudaFuncAttributes fa;
    if (e == cudaSuccess) {
        e = cudaFuncGetAttributes(&fa, probe_kernel);
        if (e == cudaErrorNoKernelImageForDevice || e == cudaErrorInvalidDeviceFunction) {
            cudaGetLastError();
            qx_fail(err, QX_E_DEVICE, "no-kernels",
                    "cuda:%d is %s (sm_%d%d), for which this program has no kernels; build with -Dgpu_archs",
                    device, c->prop.name, c->prop.major, c->prop.minor);
            delete c;
            return -(int)QX_E_DEVICE;
        }
    }
    if (e != cudaSuccess) {
        cudaGetLastError();
        delete c;
        return map_error(err, e, "opening the device", device);
    }
    struct qx_backend *b = &c->be;
    b->name = "cuda";
    b->device = device;
    b->host_memory = false;
    b->queue_bytes = QX_CUDA_WORKSPACE_BYTES + QX_N_TICKETS * sizeof(unsigned) + QX_N_WORDS * sizeof(uint64_t);
    b->ops = &cuda_ops;
    b->info = cu_info;
    b->mem_alloc = cu_mem_alloc;
    b->mem_free = cu_mem_free;
    b->host_alloc = cu_host_alloc;
    b->host_free = cu_host_free;
    b->queue_create = cu_queue_create;
    b->queue_destroy = cu_queue_destroy;
    b->upload = cu_upload;
    b->upload_mapped = cu_upload_mapped;
    b->download = cu_download;
    b->copy = cu_copy;
    b->fill = cu_fill;
    b->wait = cu_wait;
    b->queue_error = cu_queue_error;
    b->graph_begin = cu_graph_begin;
    b->graph_end = cu_graph_end;
    b->graph_launch = cu_graph_launch;
    b->graph_destroy = cu_graph_destroy;
    b->queue_limit = cu_queue_limit;
    b->destroy = cu_destroy;
    *out = b;
    return 0;
}
