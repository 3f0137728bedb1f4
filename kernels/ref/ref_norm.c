/* ref_norm.c: zero-centred RMS norm, rotary embedding, and the hyper-connection (model 2, 4). */
#include "ref.h"

#include <string.h>

void ref_zrms(const struct qx_queue *q, const float *x, const float *w, uint32_t n, double eps, float *y)
{
    double r = 1.0 / sqrt(q->dot(x, x, n) / n + eps);
    for (uint32_t i = 0; i < n; ++i) {
        y[i] = (float)((double)x[i] * r * (1.0 + (double)w[i]));
    }
}

void ref_rope(const struct qx_rope *rope, int64_t pos, float *x)
{
    uint32_t half = rope->rotary_dim / 2;
    for (uint32_t i = 0; i < half; ++i) {
        float angle = (float)pos * rope->freq[i]; /* one f32 product: model 2 */
        double c = cos((double)angle) * (double)rope->scale, s = sin((double)angle) * (double)rope->scale;
        double a = (double)x[i], b = (double)x[i + half];
        x[i] = (float)(a * c - b * s);
        x[i + half] = (float)(b * c + a * s);
    }
}

/* ---- hyper-connection --------------------------------------------------------------------- */

struct hc_job {
    const struct qx_op_hc *a;
    float *n, *lo; /* [n_rows, C * hidden], [n_rows, rank] */
};

static void hc_write_back(const struct qx_queue *q, void *user, uint64_t r)
{
    const struct hc_job *job = user;
    const struct qx_op_hc *a = job->a;
    uint32_t h = a->hidden;
    for (uint32_t c = 0; c < a->n_streams; ++c) {
        float *x = a->x + (r * a->n_streams + c) * h;
        if (a->y) {
            double inj = a->inj_in ? (double)a->inj_in[r * a->n_streams + c] : 1.0;
            const float *y = a->y + r * h;
            for (uint32_t d = 0; d < h; ++d) {
                x[d] = (float)((double)x[d] + inj * (double)y[d]);
            }
        }
        if (a->m) {
            ref_zrms(q, x, a->norm + (size_t)c * h, h, (double)a->eps, job->n + (r * a->n_streams + c) * h);
        }
    }
}

static void hc_mix(const struct qx_queue *q, void *user, uint64_t block)
{
    const struct hc_job *job = user;
    const struct qx_op_hc *a = job->a;
    uint32_t d0 = (uint32_t)block * REF_BLOCK, h = a->hidden, cs = a->n_streams;
    uint32_t nd = h - d0 < REF_BLOCK ? h - d0 : REF_BLOCK;
    double acc[REF_BLOCK][REF_TILE], sum[REF_BLOCK][REF_TILE];
    for (uint32_t i0 = 0; i0 < a->n_rows; i0 += REF_TILE) {
        uint32_t nx = a->n_rows - i0 < REF_TILE ? a->n_rows - i0 : REF_TILE;
        memset(sum, 0, sizeof sum);
        for (uint32_t c = 0; c < cs; ++c) {
            ref_block(q, &a->up, c * h + d0, nd, job->lo + (size_t)i0 * a->rank, a->rank, NULL, 1, nx,
                      a->act_bf16, acc);
            for (uint32_t j = 0; j < nd; ++j) {
                for (uint32_t i = 0; i < nx; ++i) {
                    double n = (double)job->n[((size_t)(i0 + i) * cs + c) * h + d0 + j];
                    sum[j][i] += ref_sigmoid(acc[j][i]) * n;
                }
            }
        }
        for (uint32_t i = 0; i < nx; ++i) {
            for (uint32_t j = 0; j < nd; ++j) {
                a->m[(size_t)(i0 + i) * h + d0 + j] = (float)(sum[j][i] / cs);
            }
        }
    }
}

int ref_hc(struct qx_queue *q, const struct qx_op_hc *a)
{
    uint64_t wide = (uint64_t)a->n_streams * a->hidden;
    struct hc_job job = {a, a->scratch, a->scratch + a->n_rows * wide};
    ref_for(q, a->n_rows, wide * 4, hc_write_back, &job);
    if (!a->m) {
        return 0;
    }
    ref_matmul(q, &a->down, job.n, wide, a->n_rows, job.lo, a->rank, false, a->act_bf16);
    for (size_t i = 0; i < (size_t)a->n_rows * a->rank; ++i) {
        job.lo[i] = (float)ref_silu((double)job.lo[i] / a->n_streams);
    }
    ref_for(q, qx_ceil_div(a->hidden, REF_BLOCK),
            (uint64_t)REF_BLOCK * a->n_streams * (a->rank + 16) * a->n_rows, hc_mix, &job);
    if (a->inject.fmt != QX_W_NONE) {
        ref_matmul(q, &a->inject, job.n, wide, a->n_rows, a->inj_out, a->n_streams, false,
                   a->act_bf16);
        for (size_t i = 0; i < (size_t)a->n_rows * a->n_streams; ++i) {
            a->inj_out[i] = (float)(2.0 * ref_sigmoid((double)a->inj_out[i] / a->n_streams));
        }
    }
    return 0;
}
