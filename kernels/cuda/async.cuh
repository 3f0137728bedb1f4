/* async.cuh: what goes on beside a kernel's threads: barriers in shared memory, copies from global memory, and shared
 * memory by its 32-bit addresses. */
#ifndef QX_CUDA_ASYNC_CUH
#define QX_CUDA_ASYNC_CUH

#include "common.cuh"

/* ---- barriers ------------------------------------------------------------------------------- */

/* By the address in shared memory, which takes half the registers of a pointer, or by pointer. On devices before
 * sm_90 nothing happens: the host does not choose kernels with barriers there. */
__device__ __forceinline__ uint32_t smem_addr(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void bar_init(uint32_t bar, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
/* By those who made barriers, before others of the cluster arrive on them. */
__device__ __forceinline__ void bar_init_done()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
/* What generic accesses did to shared memory comes before what the matrix units and bulk copies do. */
__device__ __forceinline__ void fence_async()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void bar_arrive(uint32_t bar)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
#endif
}
__device__ __forceinline__ void bar_expect(uint32_t bar, uint32_t n)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(n) : "memory");
#endif
}
__device__ __forceinline__ void bar_wait(uint32_t bar, uint32_t parity)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nWAIT_%=:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(bar), "r"(parity)
                 : "memory");
#endif
}
__device__ __forceinline__ void bar_init(uint64_t *bar, uint32_t count) { bar_init(smem_addr(bar), count); }
__device__ __forceinline__ void bar_arrive(uint64_t *bar) { bar_arrive(smem_addr(bar)); }
__device__ __forceinline__ void bar_expect(uint64_t *bar, uint32_t n) { bar_expect(smem_addr(bar), n); }
__device__ __forceinline__ void bar_wait(uint64_t *bar, uint32_t parity) { bar_wait(smem_addr(bar), parity); }

/* ---- copies from global memory -------------------------------------------------------------- */

/* n 0: zeros instead of what lies at src. */
__device__ __forceinline__ void copy16(uint32_t dst, const void *src, uint32_t n)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(n) : "memory");
}
__device__ __forceinline__ void copy16(void *dst, const void *src)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(smem_addr(dst)), "l"(src) : "memory");
}
__device__ __forceinline__ void copy8(uint32_t dst, const void *src)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void copy4(uint32_t dst, const void *src, uint32_t n)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(n) : "memory");
}
__device__ __forceinline__ void copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> __device__ __forceinline__ void copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
/* An arrival once this thread's copies so far have landed. */
__device__ __forceinline__ void copy_arrive(uint32_t bar)
{
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

/* For bytes that are read once: first to leave L2. */
__device__ __forceinline__ uint64_t l2_read_once()
{
    uint64_t p = 0;
#if __CUDA_ARCH__ >= 900
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
#endif
    return p;
}
/* For bytes that others read soon. */
__device__ __forceinline__ uint64_t l2_as_usual()
{
    uint64_t p = 0;
#if __CUDA_ARCH__ >= 900
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(p));
#endif
    return p;
}
__device__ __forceinline__ void copy16_once(uint32_t dst, const void *src, uint64_t policy)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                 "l"(policy)
                 : "memory");
#endif
}
/* n bytes; n and both addresses are multiples of 16; their arrival counts against what bar_expect announced. */
__device__ __forceinline__ void bulk_load(uint32_t dst, const void *src, uint32_t n, uint32_t bar)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(n), "r"(bar)
                 : "memory");
#endif
}
__device__ __forceinline__ void bulk_load(uint32_t dst, const void *src, uint32_t n, uint32_t bar, uint64_t policy)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1], %2, [%3], %4;" ::"r"(dst),
                 "l"(src), "r"(n), "r"(bar), "l"(policy)
                 : "memory");
#endif
}
__device__ __forceinline__ void bulk_load(void *dst, const void *src, uint32_t n, uint64_t *bar)
{
    bulk_load(smem_addr(dst), src, n, smem_addr(bar));
}
__device__ __forceinline__ void bulk_load(void *dst, const void *src, uint32_t n, uint64_t *bar, uint64_t policy)
{
    bulk_load(smem_addr(dst), src, n, smem_addr(bar), policy);
}

/* A line to the L2. */
__device__ __forceinline__ void prefetch_l2(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

/* ---- blocks of a cluster -------------------------------------------------------------------- */

/* The two halves of a cluster's barrier, by whole warps; relaxed: nothing is published by it. */
__device__ __forceinline__ void cluster_arrive()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_arrive_relaxed()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
/* Where what lies at an address, or at p, lies in block `rank`. */
__device__ __forceinline__ uint32_t cluster_addr(uint32_t at, uint32_t rank)
{
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
#endif
    return at;
}
__device__ __forceinline__ uint32_t cluster_addr(const void *p, uint32_t rank)
{
    return cluster_addr(smem_addr(p), rank);
}
__device__ __forceinline__ uint32_t cluster_rank()
{
    uint32_t r = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
#endif
    return r;
}
/* For what another block sends. */
__device__ __forceinline__ void bar_wait_sent(uint32_t bar, uint32_t parity)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nWAIT_%=:\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra DONE_%=;\nbra WAIT_%=;\nDONE_%=:\n}" ::"r"(bar), "r"(parity)
                 : "memory");
#endif
}
__device__ __forceinline__ void cluster_sync()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}
/* To an address of cluster_addr; its bytes count against what bar_expect announced at a barrier there. */
__device__ __forceinline__ void send128(uint32_t p, const uint4 &v, uint32_t bar)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(p),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(bar)
                 : "memory");
#endif
}
__device__ __forceinline__ void send64(uint32_t p, const uint2 &v, uint32_t bar)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%0], {%1, %2}, [%3];" ::"r"(p),
                 "r"(v.x), "r"(v.y), "r"(bar)
                 : "memory");
#endif
}
__device__ __forceinline__ void send32(uint32_t p, uint32_t v, uint32_t bar)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(p), "r"(v), "r"(bar)
                 : "memory");
#endif
}
/* What lies at the same place in block `rank`. */
__device__ __forceinline__ float lds_f32_at(const void *p, uint32_t rank)
{
    float v = 0.0f;
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(cluster_addr(p, rank)) : "memory");
#endif
    return v;
}
__device__ __forceinline__ float4 lds_f128_at(const void *p, uint32_t rank)
{
    float4 v = {};
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(cluster_addr(p, rank))
                 : "memory");
#endif
    return v;
}
__device__ __forceinline__ uint2 lds64_at(uint32_t p, uint32_t rank)
{
    uint2 v = {};
#if __CUDA_ARCH__ >= 900
    asm volatile("ld.shared::cluster.v2.u32 {%0,%1}, [%2];"
                 : "=r"(v.x), "=r"(v.y)
                 : "r"(cluster_addr(p, rank))
                 : "memory");
#endif
    return v;
}

/* ---- shared memory -------------------------------------------------------------------------- */

__device__ __forceinline__ uint4 lds128(uint32_t p)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p));
    return v;
}
__device__ __forceinline__ uint2 lds64(uint32_t p)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(p));
    return v;
}
__device__ __forceinline__ uint32_t lds32(uint32_t p)
{
    uint32_t v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(p));
    return v;
}
__device__ __forceinline__ uint32_t lds16(uint32_t p)
{
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(p));
    return v;
}
__device__ __forceinline__ uint32_t lds8(uint32_t p)
{
    uint32_t v;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(p));
    return v;
}
__device__ __forceinline__ float lds_f32(uint32_t p)
{
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(p));
    return v;
}
__device__ __forceinline__ void sts128(uint32_t p, const uint4 &v)
{
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ void sts_f32(uint32_t p, float v)
{
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(p), "f"(v) : "memory");
}

#endif
