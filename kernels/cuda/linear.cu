/* linear.cu: y = W x for up to six matrices that share their input, eight rows of
 * input a block (tile.cuh): more rows are more blocks beside each other, which share the weights in L2. */
#include "tile.cuh"

struct lin_args {
    const float *x;
    float *y;
    uint64_t x_stride, y_stride;
    uint32_t n_rows, n_weights, n_groups;
    bool acc;
    tile_w w[QX_LINEAR_MAX];
    uint32_t off[QX_LINEAR_MAX];
    uint32_t block0[QX_LINEAR_MAX + 1];
};

/* FMT: the format of all matrices, or -1 when they differ. */
template <int NB, int FMT>
__global__ void __launch_bounds__(256, NB == 1 ? 3 : 2) linear_tiles(const __grid_constant__ lin_args a)
{
    extern __shared__ uint4 sm[];
    __shared__ float red[8 * 16 * NB * 8];
    pdl_next();
    const uint32_t b = blockIdx.x / a.n_groups, grp = blockIdx.x - b * a.n_groups;
    uint32_t j = 0;
    while (j + 1 < a.n_weights && b >= a.block0[j + 1]) {
        ++j;
    }
    const tile_w &w = a.w[j];
    const tile_split sp = tile_divide(w.tf, w.k, 8);
    const uint32_t warp = threadIdx.x / 32, tiles = 8 / sp.parts;
    const uint32_t row = ((b - a.block0[j]) * tiles + warp / sp.parts) * 16;
    const uint32_t m0 = grp * 8;
    const uint32_t m_rows = a.n_rows - m0 < 8 ? a.n_rows - m0 : 8;
    const src_rows src = {a.x + m0 * a.x_stride, a.x_stride, w.k};
    if constexpr (FMT >= 0) {
        tile_run<FMT, NB>(red + warp * (16 * NB * 8), w, sp, row, warp % sp.parts, src, m_rows, sm, threadIdx.x,
                          256, tile_no_ready());
    } else {
        QX_TILE_SWITCH(F, w.tf,
                       tile_run<F, NB>(red + warp * (16 * NB * 8), w, sp, row, warp % sp.parts, src, m_rows, sm,
                                       threadIdx.x, 256, tile_no_ready()))
    }
    __syncthreads();
    const float f = tile_factor(w);
    for (uint32_t i = threadIdx.x; i < tiles * 16 * m_rows; i += 256) {
        const uint32_t m = i / (tiles * 16), r = i - m * (tiles * 16);
        const uint32_t tile = r / 16;
        const uint32_t out = (b - a.block0[j]) * tiles * 16 + r;
        if (out < w.w.rows) {
            const float v =
                f * tile_result<NB>(red + tile * sp.parts * (16 * NB * 8), sp.parts, r & 15, m);
            float *y = a.y + (m0 + m) * a.y_stride + a.off[j] + out;
            *y = a.acc ? __ldcg(y) + v : v;
        }
    }
}

static int linear_few(struct qx_queue *q, const struct qx_op_linear *o)
{
    lin_args a = {};
    a.x = o->x;
    a.y = o->y;
    a.x_stride = o->x_stride;
    a.y_stride = o->y_stride;
    a.n_rows = o->n_rows;
    a.n_weights = o->n_weights;
    a.acc = o->acc;
    a.n_groups = (o->n_rows + 7) / 8;
    const uint32_t m = o->n_rows < 8 ? o->n_rows : 8;
    const int nb = tile_nb(m);
    uint32_t off = 0, blocks = 0, smem = 0;
    for (uint32_t j = 0; j < o->n_weights; ++j) {
        a.w[j] = make_tile_w(o->w[j], 0, o->w[j].cols);
        a.off[j] = off;
        a.block0[j] = blocks;
        const tile_split sp = tile_divide(a.w[j].tf, a.w[j].k, 8);
        const uint32_t rows = 8 / sp.parts * 16;
        blocks += (o->w[j].rows + rows - 1) / rows;
        off += o->w[j].rows;
        const uint32_t x = tile_x_bytes(a.w[j].tf, nb, sp, m);
        smem = x > smem ? x : smem;
    }
    a.block0[o->n_weights] = blocks;
    const dim3 grid(blocks * a.n_groups);
    int same = a.w[0].tf;
    for (uint32_t j = 1; j < o->n_weights; ++j) {
        same = a.w[j].tf == same ? same : -1;
    }
    switch (same == TF_BF16 || same == TF_MX ? nb * 8 + same : nb * 8) {
    case 8 + TF_BF16: return launch(q, "linear", linear_tiles<1, TF_BF16>, grid, dim3(256), smem, a);
    case 16 + TF_BF16: return launch(q, "linear", linear_tiles<2, TF_BF16>, grid, dim3(256), smem, a);
    case 24 + TF_BF16: return launch(q, "linear", linear_tiles<3, TF_BF16>, grid, dim3(256), smem, a);
    case 8 + TF_MX: return launch(q, "linear", linear_tiles<1, TF_MX>, grid, dim3(256), smem, a);
    case 16 + TF_MX: return launch(q, "linear", linear_tiles<2, TF_MX>, grid, dim3(256), smem, a);
    case 24 + TF_MX: return launch(q, "linear", linear_tiles<3, TF_MX>, grid, dim3(256), smem, a);
    case 8: return launch(q, "linear", linear_tiles<1, -1>, grid, dim3(256), smem, a);
    case 16: return launch(q, "linear", linear_tiles<2, -1>, grid, dim3(256), smem, a);
    default: return launch(q, "linear", linear_tiles<3, -1>, grid, dim3(256), smem, a);
    }
}

extern "C" int qx_cuda_linear(struct qx_queue *q, const struct qx_op_linear *o)
{
    if (o->n_rows == 0 || o->n_weights == 0) {
        return 0;
    }
    return linear_few(q, o);
}
