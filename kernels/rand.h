/* rand.h: the counter-based generator of sampling, the same on every backend: a draw depends on seed and
 * position only (mix64 of model 7.1 applied twice). */
#ifndef QX_RAND_H
#define QX_RAND_H

#include "base.h"

#ifdef __CUDACC__
#define QX_RAND_FN static __host__ __device__ inline
#else
#define QX_RAND_FN static inline
#endif

QX_RAND_FN uint64_t qx_mix64(uint64_t v)
{
    v += 0x9E3779B97F4A7C15u;
    v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9u;
    v = (v ^ (v >> 27)) * 0x94D049BB133111EBu;
    return v ^ (v >> 31);
}

QX_RAND_FN uint64_t qx_rand_u64(uint64_t seed, int32_t pos)
{
    return qx_mix64(qx_mix64(seed) ^ ((uint64_t)(uint32_t)pos * 0xD1342543DE82EF95u));
}

#endif
