/* mma.cuh: tensor core fragments and shared-memory matrices, for the kernels that take many rows at a time. f32
 * operands become two bf16 terms (hi + lo, 16 bits and the sign of lo); a product of two such operands is
 * hi hi + hi lo + lo hi, with an error of about 2^-17 of each term. */
#ifndef QX_CUDA_MMA_CUH
#define QX_CUDA_MMA_CUH

#include "async.cuh"

/* c += a b for 16 x 8 x 16; not volatile, so that the compiler may order products of different sums. */
__device__ __forceinline__ void mma16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void ldsm4(uint32_t (&r)[4], uint32_t addr)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}
__device__ __forceinline__ void ldsm4t(uint32_t (&r)[4], uint32_t addr)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(addr)
                 : "memory");
}

/* Two f32 as bf16 pairs hi and lo; an infinity has no remainder. */
__device__ __forceinline__ void split2(float x, float y, uint32_t &hi, uint32_t &lo)
{
    hi = pack_bf16(x, y);
    lo = pack_bf16(x - bf16_lo(hi), y - bf16_hi(hi));
}

__host__ inline bool has_bulk(const struct qx_queue *q)
{
    return q->capability >= 90;
}

#endif
