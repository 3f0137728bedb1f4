/* common.cuh: what every CUDA file shares: the queue behind struct qx_queue, launching with programmatic
 * dependent launch, warp reductions, loads that bypass L1, and decoding of single codes.
 *
 * Invariant of every kernel here: each thread calls pdl_wait() before it reads or writes anything that
 * an earlier op may touch, so that "the op before is complete" carries along the whole chain. Only
 * constant data (weights, tables) may be read before it, and what a file's head names, with the reason why it is
 * complete by then. Warps that are idle from beginning to end need not call it where others of their block do. */
#ifndef QX_CUDA_COMMON_CUH
#define QX_CUDA_COMMON_CUH

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

extern "C" {
#include "error.h"
}
#include "backend.h"
#include "ops.h"

/* Tickets: counters that are zero between kernels (the last block of a kernel resets its own). */
#define QX_N_TICKETS 16384

/* Words of a value and, in the high half, the number of the launch that wrote it, so that readers can wait for
 * the data itself: those of the mixers, of the router, of the experts, of attention, and what counts their launches. */
#define QX_HC_WORDS 131072
#define QX_ROUTE_WORDS 65536
#define QX_MOE_WORDS 8192
#define QX_MOE_BLOCKS 256
#define QX_MOE_NUMBERS 64 /* the first of the experts' */
#define QX_N_NUMBERS (QX_MOE_NUMBERS + 2 * QX_MOE_BLOCKS + 16 /* attention's */)
#define QX_ATTEND_ROWS 8       /* the most rows a launch of attention and its selection */
#define QX_ATTEND_WORDS 2396160
#define QX_SCORE_WORDS (QX_ATTEND_ROWS * 33792)
#define QX_PICK_PLACES 64 /* selections whose words lie apart: more than can be under way at once */
#define QX_PICK_BLOCKS 512
#define QX_PICK_WORDS (QX_PICK_PLACES * QX_ATTEND_ROWS * (QX_PICK_BLOCKS + 1)) /* the last ones are numbers */
#define QX_N_WORDS                                                                                       \
    (QX_HC_WORDS + QX_ROUTE_WORDS + QX_MOE_WORDS + QX_N_NUMBERS + QX_ATTEND_WORDS + QX_SCORE_WORDS + QX_PICK_WORDS + \
     1 /* late_done */)

struct qx_cuda; /* the backend, cuda_backend.cu */

struct qx_queue {
    struct qx_backend *be;
    cudaStream_t stream;
    int device;
    int n_sm;
    int capability;         /* 10 x major + minor */
    int smem_max;           /* bytes of dynamic shared memory a block may ask for */
    bool has_wgmma;         /* the device runs code compiled for sm_90a: what __CUDA_ARCH_FEAT_SM90_ALL guards */
    bool failed;
    bool capturing;
    bool by_registers;      /* launch_alone: how the last such kernel keeps a multiprocessor to itself */
    uint64_t alone_at;      /* and n_launches right after it */
    struct qx_error first;  /* the first failure since the last wait */
    uint8_t *ws;            /* workspace of ops, WS_BYTES */
    unsigned *tickets;      /* QX_N_TICKETS zeros */
    /* what blocks tell each other */
    uint64_t *words, *route_words, *moe_words, *attend_words, *score_words, *pick_words;
    /* of launches: [0] mixers, [1 + row] routers, [QX_MOE_NUMBERS + block] experts, the last ten attention */
    unsigned *numbers;
    uint64_t mixer_at;      /* n_launches right after a mixer */
    uint64_t n_launches;
    struct {
        uint64_t at;        /* n_launches right after a router that lets others start only after its wait */
        const float *m;     /* its input, complete by then */
    } routed;
    unsigned *late_done;    /* [0] blocks of a linear whose results are there but for the late ones; [1] of its reader */
    struct {                /* the linear launched last, where the next op knows of its late results */
        const float *y;     /* NULL: none */
        uint64_t at;
        unsigned blocks;
    } late;
    struct {
        uint64_t at;        /* n_launches right after a selection that leaves its picks as words */
        uint32_t place;     /* of its words */
        uint32_t n_rows;
        const int32_t *block;
    } picked;
};
#define QX_WS_BYTES ((size_t)QX_CUDA_WORKSPACE_BYTES)

/* Records the first failure; returns -code. */
int qx_queue_fail(struct qx_queue *q, cudaError_t e, const char *what);
int qx_queue_refuse(struct qx_queue *q, const char *op, const char *why);

/* ---- launching ------------------------------------------------------------------------------ */

template <class... P, class... A>
static int launch_cluster(struct qx_queue *q, const char *name, void (*kernel)(P...), dim3 grid,
                          dim3 block, size_t smem, unsigned cluster, A... args)
{
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) {
        return 0;
    }
    cudaSetDevice(q->device);
    if (smem > (size_t)q->smem_max) {
        return qx_queue_refuse(q, name, "a block needs more shared memory than this device has");
    }
    if (smem > 24 * 1024) { /* with a kernel's static arrays it may pass the default of 48 KiB */
        cudaError_t e = cudaFuncSetAttribute((const void *)kernel,
                                             cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem);
        if (e != cudaSuccess) {
            return qx_queue_fail(q, e, name);
        }
    }
    cudaLaunchAttribute at[3];
    unsigned n = 0;
    /* A multiprocessor changes how much of its memory is shared memory only when it is idle: kernels that
     * are to overlap must ask for the same. */
    at[n].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    at[n++].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
    at[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    at[n++].val.programmaticStreamSerializationAllowed = 1;
    if (cluster > 1) {
        at[n].id = cudaLaunchAttributeClusterDimension;
        at[n].val.clusterDim.x = cluster;
        at[n].val.clusterDim.y = 1;
        at[n++].val.clusterDim.z = 1;
    }
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = block;
    c.dynamicSmemBytes = smem;
    c.stream = q->stream;
    c.attrs = at;
    c.numAttrs = n;
    ++q->n_launches;
    cudaError_t e = cudaLaunchKernelEx(&c, kernel, P(args)...);
    return e == cudaSuccess ? 0 : qx_queue_fail(q, e, name);
}

template <class... P, class... A>
static int launch(struct qx_queue *q, const char *name, void (*kernel)(P...), dim3 grid, dim3 block,
                  size_t smem, A... args)
{
    return launch_cluster(q, name, kernel, grid, block, smem, 1, args...);
}

__device__ __forceinline__ void pdl_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/* Lets the next op's blocks start (and prefetch weights); they still wait for this op's end. */
__device__ __forceinline__ void pdl_next()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* ---- loads and reductions ------------------------------------------------------------------- */

/* 16 bytes that are read once: past L1. */
__device__ __forceinline__ uint4 ld_stream(const void *p)
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}

/* A barrier of some of a block's warps, THREADS together; id: from 1 on, since 0 is that of all. */
template <uint32_t THREADS> __device__ __forceinline__ void bar_sync_some(uint32_t id)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}
/* Sum of the lanes up to this one. */
template <class T> __device__ __forceinline__ T warp_upto(T v, uint32_t lane)
{
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
        const T o = __shfl_up_sync(0xffffffffu, v, i);
        v += lane >= (uint32_t)i ? o : 0;
    }
    return v;
}
__device__ __forceinline__ float warp_sum(float v)
{
#pragma unroll
    for (int i = 16; i; i >>= 1) {
        v += __shfl_xor_sync(0xffffffffu, v, i);
    }
    return v;
}
__device__ __forceinline__ float warp_max(float v)
{
#pragma unroll
    for (int i = 16; i; i >>= 1) {
        v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, i));
    }
    return v;
}

__device__ __forceinline__ float sigmoid_f(float x)
{
    return 1.0f / (1.0f + expf(-x));
}
__device__ __forceinline__ float silu_f(float x)
{
    return x / (1.0f + expf(-x));
}

/* ---- words (QX_N_WORDS) ----------------------------------------------------------------------- */

__device__ __forceinline__ uint64_t word_read(const uint64_t *p)
{
    uint64_t v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
/* One more in a count that others read by count_acquire: what this thread has seen written comes before it. */
__device__ __forceinline__ void count_release(unsigned *p)
{
#if __CUDA_ARCH__ >= 700
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory");
#endif
}
__device__ __forceinline__ unsigned count_acquire(const unsigned *p)
{
    unsigned v = 0;
#if __CUDA_ARCH__ >= 700
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
#endif
    return v;
}
__device__ __forceinline__ void word_post(uint64_t *p, float v, uint32_t number)
{
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"((uint64_t)number << 32 | __float_as_uint(v))
                 : "memory");
}

/* ---- codes ---------------------------------------------------------------------------------- */

__device__ __forceinline__ float bf16_lo(uint32_t p)
{
    return __uint_as_float(p << 16);
}
__device__ __forceinline__ float bf16_hi(uint32_t p)
{
    return __uint_as_float(p & 0xffff0000u);
}
__device__ __forceinline__ float bf16_f(uint16_t b)
{
    return __uint_as_float((uint32_t)b << 16);
}
__device__ __forceinline__ uint32_t pack_bf16(float lo, float hi)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
__device__ __forceinline__ uint16_t to_bf16(float v)
{
    uint32_t u = __float_as_uint(v);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)((u >> 16) | 0x40u);
    }
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
/* Two E4M3 codes to two f32; NaN codes give NaN. */
__device__ __forceinline__ float2 e4m3x2_f(uint16_t c)
{
    uint32_t h;
    float2 r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"(c));
    asm("{.reg .b16 a, b;\n mov.b32 {a, b}, %2;\n cvt.f32.f16 %0, a;\n cvt.f32.f16 %1, b;}"
        : "=f"(r.x), "=f"(r.y)
        : "r"(h));
    return r;
}
__device__ __forceinline__ float e4m3_f(uint8_t c)
{
    return e4m3x2_f(c).x;
}
__device__ __forceinline__ float e8m0_f(uint8_t c)
{
    return c == 0xff ? __uint_as_float(0x7fc00000u)
                     : c == 0 ? __uint_as_float(0x00400000u) : __uint_as_float((uint32_t)c << 23);
}
__device__ __forceinline__ float f16_f(uint16_t h)
{
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
__device__ __forceinline__ float e2m1_f(unsigned c)
{
    /* exponent and mantissa of f32 hold the three low bits with a bias of 126 */
    float m = __uint_as_float((c & 7u) << 22) * 0x1p126f;
    return (c & 8u) ? -m : m;
}

/* One element of a stored matrix, the product rounded once (slow path and tests). */
__device__ inline float weight_at(const struct qx_weight &w, uint32_t r, uint32_t c)
{
    const uint64_t i = (uint64_t)r * w.cols + c;
    switch (w.fmt) {
    case QX_W_F32: return ((const float *)w.codes)[i];
    case QX_W_F16: return f16_f(((const uint16_t *)w.codes)[i]);
    case QX_W_BF16: return bf16_f(((const uint16_t *)w.codes)[i]);
    case QX_W_FP8: return e4m3_f(((const uint8_t *)w.codes)[i]) * w.global;
    case QX_W_FP8_BLOCK: {
        const uint64_t s = (uint64_t)((w.row0 + r) / 128) * ((w.cols + 127) / 128) + c / 128;
        const float f = w.scale_bf16 ? bf16_f(((const uint16_t *)w.scale)[s])
                                     : ((const float *)w.scale)[s];
        return e4m3_f(((const uint8_t *)w.codes)[i]) * f;
    }
    case QX_W_MXFP8:
        return e4m3_f(((const uint8_t *)w.codes)[i]) *
               e8m0_f(((const uint8_t *)w.scale)[(uint64_t)r * (w.cols / 32) + c / 32]);
    case QX_W_NVFP4: {
        const uint8_t b = ((const uint8_t *)w.codes)[i / 2];
        const float s = e4m3_f(((const uint8_t *)w.scale)[(uint64_t)r * (w.cols / 16) + c / 16]);
        return e2m1_f((c & 1) ? b >> 4 : b & 15) * s * w.global;
    }
    default: return __uint_as_float(0x7fc00000u);
    }
}

#endif
