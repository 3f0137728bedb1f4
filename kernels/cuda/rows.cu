/* rows.cu: ops that move rows: embed, pick, decode_rows, ple_gather. */
#include "common.cuh"

__global__ void embed_rows(struct qx_step step, struct qx_weight t, uint32_t C, float *x)
{
    /* A step's first op waits before it lets the next begin: every op of a step may thus read before its own wait
     * what earlier steps and the host wrote (the step's numbers, states, pages). */
    pdl_wait();
    pdl_next();
    const uint32_t r = blockIdx.y, d = blockIdx.x * blockDim.x + threadIdx.x;
    if (d >= t.cols) {
        return;
    }
    const int32_t id = __ldcg(step.id + r);
    const float v = id >= 0 && (uint32_t)id < t.rows ? weight_at(t, (uint32_t)id, d)
                                                     : __uint_as_float(0x7fc00000u);
    for (uint32_t c = 0; c < C; ++c) {
        x[((uint64_t)r * C + c) * t.cols + d] = v;
    }
}

extern "C" int qx_cuda_embed(struct qx_queue *q, const struct qx_op_embed *o)
{
    return launch(q, "embed", embed_rows, dim3((o->table.cols + 255) / 256, o->step->n_rows), dim3(256), 0,
                  *o->step, o->table, o->n_streams, o->x);
}

__global__ void pick_rows(const float *in, const int32_t *index, uint32_t width, float *out)
{
    pdl_next();
    pdl_wait();
    const uint32_t d = blockIdx.x * blockDim.x + threadIdx.x, j = blockIdx.y;
    const int32_t i = __ldcg(index + j);
    if (d < width && i >= 0) {
        out[(uint64_t)j * width + d] = __ldcg(in + (uint64_t)i * width + d);
    }
}

extern "C" int qx_cuda_pick(struct qx_queue *q, const struct qx_op_pick *o)
{
    return launch(q, "pick", pick_rows, dim3((o->width + 255) / 256, o->n), dim3(256), 0, o->in, o->index,
                  o->width, o->out);
}

/* Element c of a table row. */
__device__ __forceinline__ float table_at(const struct qx_table_desc &t, const uint8_t *code,
                                          const uint8_t *scale, uint32_t c)
{
    switch (t.fmt) {
    case QX_W_BF16: return bf16_f((uint16_t)(code[2 * c] | code[2 * c + 1] << 8));
    case QX_W_F16: return f16_f((uint16_t)(code[2 * c] | code[2 * c + 1] << 8));
    case QX_W_F32:
        return __uint_as_float((uint32_t)code[4 * c] | (uint32_t)code[4 * c + 1] << 8 |
                               (uint32_t)code[4 * c + 2] << 16 | (uint32_t)code[4 * c + 3] << 24);
    case QX_W_FP8: return e4m3_f(code[c]) * t.global;
    case QX_W_NVFP4: {
        const uint8_t b = code[c / 2];
        return e2m1_f((c & 1) ? b >> 4 : b & 15) * e4m3_f(scale[c / 16]) * t.global;
    }
    default: return __uint_as_float(0x7fc00000u);
    }
}

__device__ __forceinline__ bool table_row(const struct qx_table_desc &t, int64_t row, const uint8_t *&code,
                                          const uint8_t *&scale)
{
    if (row < 0 || (uint64_t)row >= t.n_rows) {
        return false;
    }
    const uint64_t s = (uint64_t)row / t.rows_per_shard, l = (uint64_t)row - s * t.rows_per_shard;
    code = (const uint8_t *)t.codes[s] + l * t.code_stride;
    scale = t.scale ? (const uint8_t *)t.scale[s] + l * t.scale_stride : nullptr;
    return true;
}

/* A warp a row. */
__global__ void __launch_bounds__(256) gather_rows(struct qx_table_desc t, const int64_t *row, uint32_t n,
                                                   float *out)
{
    pdl_next();
    pdl_wait();
    const uint32_t j = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x & 31;
    if (j >= n) {
        return;
    }
    const uint8_t *code = nullptr, *scale = nullptr;
    const bool in = table_row(t, __ldcg(row + j), code, scale);
#pragma unroll 5
    for (uint32_t c = lane; c < t.width; c += 32) {
        out[(uint64_t)j * t.width + c] = in ? table_at(t, code, scale, c) : 0.0f;
    }
}

extern "C" int qx_cuda_ple_gather(struct qx_queue *q, const struct qx_op_ple_gather *o)
{
    return launch(q, "ple_gather", gather_rows, dim3((o->n + 7) / 8), dim3(256), 0, o->table, o->row, o->n,
                  o->out);
}

__global__ void __launch_bounds__(256) decode_rows(struct qx_table_desc t, struct qx_weight w,
                                                   const int64_t *row, bool bf16, void *out)
{
    pdl_next();
    pdl_wait();
    const uint32_t j = blockIdx.y;
    const bool table = w.fmt == QX_W_NONE;
    const uint32_t width = table ? t.width : w.cols;
    const int64_t r = __ldcg(row + j);
    const uint8_t *code = nullptr, *scale = nullptr;
    const bool in = table ? table_row(t, r, code, scale) : r >= 0 && r < (int64_t)w.rows;
    const uint32_t c = blockIdx.x * 256 + threadIdx.x;
    if (c < width) {
        const float v = !in ? 0.0f : table ? table_at(t, code, scale, c) : weight_at(w, (uint32_t)r, c);
        if (bf16) {
            ((uint16_t *)out)[(uint64_t)j * width + c] = to_bf16(v);
        } else {
            ((float *)out)[(uint64_t)j * width + c] = v;
        }
    }
}

extern "C" int qx_cuda_decode_rows(struct qx_queue *q, const struct qx_op_decode_rows *o)
{
    const uint32_t width = o->weight.fmt == QX_W_NONE ? o->table.width : o->weight.cols;
    for (uint32_t j = 0; j < o->n; j += 65535) {
        const uint32_t n = o->n - j < 65535 ? o->n - j : 65535;
        uint8_t *out = (uint8_t *)o->out + (uint64_t)j * width * (o->bf16 ? 2 : 4);
        int r = launch(q, "decode_rows", decode_rows, dim3((width + 255) / 256, n), dim3(256), 0, o->table,
                       o->weight, o->row + j, o->bf16, (void *)out);
        if (r) {
            return r;
        }
    }
    return 0;
}
