/* stream.cuh: what kernels share that bring weights into shared memory by copies. The copies need nothing that
 * an earlier op writes, so they start before the op before has ended. */
#ifndef QX_CUDA_STREAM_CUH
#define QX_CUDA_STREAM_CUH

#include "async.cuh"
#include "tile.cuh"

/* ---- launching -------------------------------------------------------------------------------- */

/* One block a multiprocessor, and beside it one of the next such kernel, which fetches its weights before
 * this one has ended. Blocks of one kernel must not share a multiprocessor, which the hardware prefers while
 * others are busy with an earlier kernel: so each takes more than half of the shared memory or of the registers
 * (blocks get idle warps for that, which stay until the op before has ended, since a warp that exits gives its
 * registers back). Two that follow one another differ; where the kernel launched right before is none of them, it is
 * as `registers` says. */
__host__ inline bool can_stream(const struct qx_queue *q)
{
    return q->capability >= 90 && q->capability < 120; /* bulk copies, and 227 KiB of shared memory */
}
#define ALONE_SHARED (116u << 10)
#define ALONE_SHARED_LEFT 111360u /* what a block by registers may have, beside the recurrence too */
#define ALONE_REGISTERS 32768u

template <class... P, class... A>
static int launch_alone(struct qx_queue *q, const char *name, bool registers, unsigned cluster, void (*kernel)(P...),
                        dim3 grid, unsigned threads, uint32_t smem, A... args)
{
    q->by_registers = q->alone_at && q->alone_at == q->n_launches ? !q->by_registers : registers;
    q->alone_at = q->n_launches + 1;
    if (smem > ALONE_SHARED_LEFT) {
        q->by_registers = false;
    }
    if (!q->by_registers) {
        smem = smem > ALONE_SHARED ? smem : ALONE_SHARED;
    } else {
        cudaFuncAttributes f;
        cudaError_t e = cudaFuncGetAttributes(&f, (const void *)kernel);
        if (e != cudaSuccess) {
            return qx_queue_fail(q, e, name);
        }
        const unsigned regs = (unsigned)(f.numRegs + 7) / 8 * 8;
        const unsigned need = (ALONE_REGISTERS / regs + 32) / 32 * 32;
        threads = need > threads && need <= (unsigned)f.maxThreadsPerBlock ? need : threads;
    }
    return launch_cluster(q, name, kernel, grid, dim3(threads), smem, cluster, args...);
}

/* ---- a matrix as it streams ------------------------------------------------------------------ */

struct stream_w {
    const uint8_t *codes, *scale;
    uint32_t row_bytes, scale_bytes; /* from row to row; scale_bytes only of what streams (MX, NV) */
    uint32_t bytes;                  /* code bytes of a row that are read */
    uint32_t seg, n_seg;             /* bytes of a segment, segments of a row; the last may be shorter */
    uint32_t seg_scale;              /* scale bytes of a segment */
    uint32_t pitch, pitch_scale;     /* of rows in shared memory */
    uint32_t rows, row0, scale_cols; /* scale_cols: of FP8_BLOCK */
    float factor;
    uint8_t tf, scale_bf16;
};

/* k a scale that streams beside the codes; 0: none does. */
__host__ inline uint32_t stream_per_scale(uint8_t f)
{
    return f == TF_MX ? 32 : f == TF_NV ? 16 : 0;
}
/* All of w but how it is cut into segments, where it has a format for streaming. */
__host__ inline stream_w stream_whole(const struct qx_weight &w)
{
    stream_w s = {};
    s.tf = tile_format(w, 0, w.cols);
    const uint32_t per = stream_per_scale(s.tf);
    s.codes = (const uint8_t *)w.codes;
    s.scale = (const uint8_t *)w.scale;
    s.row_bytes = s.bytes = (uint32_t)weight_row_bytes(w.fmt, w.cols);
    s.scale_bytes = per ? w.cols / per : 0;
    s.rows = w.rows;
    s.row0 = w.row0;
    s.scale_cols = (w.cols + 127) / 128;
    s.factor = s.tf == TF_NV ? w.global * 0x1p26f : s.tf == TF_FP8 ? w.global : 1.0f;
    s.scale_bf16 = w.scale_bf16;
    return s;
}

/* ---- activations ------------------------------------------------------------------------------ */

/* Eight values in order, or (nv) as E2M1 codes come out of a register. */
__device__ __forceinline__ uint4 stream_x_pack(const float4 &a, const float4 &b, bool nv)
{
    return nv ? make_uint4(pack_bf16(a.x, b.x), pack_bf16(a.y, b.y), pack_bf16(a.z, b.z), pack_bf16(a.w, b.w))
              : make_uint4(pack_bf16(a.x, a.y), pack_bf16(a.z, a.w), pack_bf16(b.x, b.y), pack_bf16(b.z, b.w));
}

#endif
