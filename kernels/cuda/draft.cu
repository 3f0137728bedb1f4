/* draft.cu: drafts that stay on the device: kept for the next round, and chained into the rows that
 * verify them. */
#include "common.cuh"

__global__ void draft_keep_rows(struct qx_step step, struct qx_op_draft_keep a)
{
    pdl_next();
    pdl_wait();
    const uint32_t d = blockIdx.x * blockDim.x + threadIdx.x, j = blockIdx.y;
    const uint32_t row = (uint32_t)__ldcg(a.row + j), s = (uint32_t)__ldcg(step.seq + row);
    if (d < a.width) {
        a.hold[(uint64_t)s * a.width + d] = __ldcg(a.wide + (uint64_t)row * a.width + d);
    }
    if (d == 0) {
        const int32_t id = __ldcg(a.id + j);
        a.next_id[s] = a.map ? __ldg(a.map + id) : id;
        a.next_prob[s] = __ldcg(a.prob + j);
    }
}

extern "C" int qx_cuda_draft_keep(struct qx_queue *q, const struct qx_op_draft_keep *o)
{
    return launch(q, "draft_keep", draft_keep_rows, dim3((o->width + 255) / 256, o->n), dim3(256), 0,
                  *o->step, *o);
}

__global__ void draft_next_lines(struct qx_step c, struct qx_step s, struct qx_op_draft_next a)
{
    pdl_next();
    pdl_wait();
    const int32_t nth = (int32_t)a.nth;
    for (uint32_t i = threadIdx.x; i < a.n; i += blockDim.x) {
        const int32_t pos = __ldcg(c.pos + i);
        if (pos < 0) {
            continue;
        }
        const int32_t at = a.by_seq ? __ldcg(c.seq + i) : (int32_t)i;
        const int32_t base = __ldcg(a.base + i), count = __ldcg(a.count + i);
        if (nth <= count && !(__ldcg(a.prob + at) < __ldcg(a.min_prob + i))) {
            int32_t id = __ldcg(a.id + at);
            id = a.map ? __ldg(a.map + id) : id;
            s.id[base + nth] = id;
            c.id[i] = id;
            c.pos[i] = nth == count ? -1 : pos + (nth > 1);
            continue;
        }
        c.pos[i] = -1;
        for (int32_t r = base + nth; r <= base + count; ++r) {
            s.pos[r] = -1;
            s.state_out[r] = -1;
            s.first[r] = r;
        }
    }
}

extern "C" int qx_cuda_draft_next(struct qx_queue *q, const struct qx_op_draft_next *o)
{
    return launch(q, "draft_next", draft_next_lines, dim3(1), dim3(o->n < 128 ? 32 : 128), 0, *o->chain,
                  *o->step, *o);
}
