/* moe_one.cuh: what gate and up (moe_rows.cu) and down (moe_one.cu) of experts tell each other where rows are one or two
 * and widths the released ones: columns as words of two values and the number of the launch (common.cuh), so that down
 * begins when the last of them is there, not when gate and up have ended. Every block keeps its own count of launches. */
#ifndef QX_CUDA_MOE_ONE_CUH
#define QX_CUDA_MOE_ONE_CUH

#include "moe_nv.cuh"

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

/* Down of an op whose gate and up are on their way: they let it start once the picks are known. */
int qx_moe_one_down(struct qx_queue *q, const struct qx_op_moe *o, const one_words &w);
/* Whether it takes the op. */
bool qx_moe_one_takes(const struct qx_queue *q, const struct qx_op_moe *o);

#endif
