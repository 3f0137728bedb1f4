/* prompt_moe.cuh: what the kernels of experts for prompts share. */
#ifndef QX_CUDA_PROMPT_MOE_CUH
#define QX_CUDA_PROMPT_MOE_CUH

#include "gemm.cuh"

/* Tokens of one expert: rows start .. start + n of the sorted order, in which every expert begins at a multiple of
 * 8, with the expert's matrices. */
struct __align__(16) pmoe_ent {
    const uint8_t *code[3], *scale[3]; /* gate, up, down */
    float factor[3];
    uint32_t row0[3], scale_bf16; /* a bit a matrix */
    uint32_t start, n, out;       /* out: row of the results of the first */
    uint32_t done;                /* warps that have written their part of the rows' values, thin only */
};
__device__ __forceinline__ pmoe_ent pmoe_get(const pmoe_ent *p)
{
    union { pmoe_ent e; uint4 v[sizeof(pmoe_ent) / 16]; } u;
#pragma unroll
    for (uint32_t j = 0; j < sizeof(pmoe_ent) / 16; ++j) {
        u.v[j] = __ldcg((const uint4 *)p + j);
    }
    return u.e;
}

/* prompt_moe_thin.cu: NVFP4 experts with at most PMOE_THIN rows an entry. Rows of m in GM_ORD_NV2. */
#define PMOE_THIN 64u
struct pmoe_thin_args {
    pmoe_ent *list;
    const uint32_t *n_list, *row; /* row of m of each sorted pair */
    const uint8_t *m;             /* token buffer of m_rows rows */
    uint32_t *taken;              /* rounds that blocks have taken beyond their first; zero */
    uint8_t *h;                   /* for values of the experts' rows, h_rows of them */
    uint32_t m_rows, h_rows, hidden, inter;
    float *out;                   /* [pairs, hidden] */
};
/* The shapes it takes. */
bool pmoe_thin_takes(uint32_t hidden, uint32_t inter);
int pmoe_thin(struct qx_queue *q, const pmoe_thin_args &a);

#endif
