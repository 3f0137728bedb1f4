/* moe_one.cuh: what gate and up (moe_one_up.cu; of two rows moe_rows.cu) and down (moe_one.cu) of experts tell each
 * other where rows are one or two and widths the released ones: columns as words of two values and the number of the
 * launch (common.cuh), so that down begins when the last of them is there, not when gate and up have ended. Every block
 * keeps its own count of launches. */
#ifndef QX_CUDA_MOE_ONE_CUH
#define QX_CUDA_MOE_ONE_CUH

#include "moe_nv.cuh"

#define ONE_STEPS 5u /* of a part: 16 rows x 64 bytes of codes each */
#define ONE_ROWS 2u
#define ONE_ITEMS (ONE_ROWS * NV_MAX_K)
#define ONE_UNITS (NV_I / 8u) /* of eight values, four words */
#define ONE_COLUMNS (ONE_ITEMS + ONE_ROWS) /* of the items, then the shared expert's */
static_assert(ONE_COLUMNS * ONE_UNITS * 4 + ONE_ROWS <= QX_MOE_WORDS && ONE_ITEMS <= 32, "");

struct one_words {
    uint64_t *words;   /* [ONE_COLUMNS][ONE_UNITS][4], then the shared expert's gate [row] */
    unsigned *numbers; /* of launches: [QX_MOE_BLOCKS] of the blocks of gate and up, then of down's */

    __device__ __forceinline__ uint64_t *unit(uint32_t column, uint32_t u) const
    {
        return words + (column * ONE_UNITS + u) * 4;
    }
    __device__ __forceinline__ uint64_t *gate(uint32_t row) const
    {
        return words + ONE_COLUMNS * ONE_UNITS * 4 + row;
    }
};

/* ---- the shared expert ---- */

/* N steps of a part, PITCH bytes apart, of the lane's two rows, which begin at p0 and p1; scales of MXFP8: s0, s1; col:
 * the lane's column, `first` the first of them there. */
template <int TF, uint32_t PITCH, uint32_t N = ONE_STEPS>
__device__ __forceinline__ void one_shared(float (&acc)[4], uint32_t p0, uint32_t p1, uint32_t s0, uint32_t s1,
                                           uint32_t col, uint32_t first, uint32_t q)
{
#pragma unroll 1
    for (uint32_t s = first; s < first + N; ++s) {
        const uint4 a0 = lds128(p0), a1 = lds128(p1);
        const uint32_t lo[4] = {a0.x, a0.y, a0.z, a0.w}, hi[4] = {a1.x, a1.y, a1.z, a1.w};
        if (TF == TF_BF16) {
            mr_mma_bf16(acc, lo, hi, lds128(col + s * 64 + ((q ^ (s & 3)) << 4)));
        } else {
            mr_step_mx(acc, lo, hi, e8m0_f((uint8_t)lds8(s0)), e8m0_f((uint8_t)lds8(s1)), [&](int j) {
                return lds128(col + s * 128 + (((2 * q + j) ^ ((2 * s + (q >> 1)) & 3)) << 4));
            });
            s0 += 2;
            s1 += 2;
        }
        p0 += PITCH;
        p1 += PITCH;
    }
}

/* Down of an op whose gate and up are on their way: they let it start once the picks are known. */
int qx_moe_one_down(struct qx_queue *q, const struct qx_op_moe *o, const one_words &w);
/* The whole op of one row that it takes. */
int qx_moe_one(struct qx_queue *q, const struct qx_op_moe *o);
/* Whether down takes the op's one or two rows. */
bool qx_moe_one_takes(const struct qx_queue *q, const struct qx_op_moe *o);

#endif
