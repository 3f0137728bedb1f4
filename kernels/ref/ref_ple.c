/* ref_ple.c: row ids of the n-gram table and the PLE block on the wide state (model 7). */
#include "ref.h"

#include <string.h>

#define PLE_MAX_NGRAM 16

int ref_ple_ids(struct qx_queue *q, const struct qx_op_ple_ids *a)
{
    const struct qx_step *s = a->step;
    uint32_t n_prev = a->ngram_size - 1;
    (void)q;
    if (a->ngram_size > PLE_MAX_NGRAM || a->ngram_size == 0) {
        return -1;
    }
    for (uint32_t r = 0; r < s->n_rows; ++r) {
        int64_t *row = a->row + (size_t)r * a->n_heads;
        if (s->pos[r] < 0 || s->id[r] < 0) {
            for (uint32_t h = 0; h < a->n_heads; ++h) {
                row[h] = -1;
            }
            if (s->pos[r] < 0) {
                continue;
            }
        }
        /* window[i]: the id i tokens back, as given. */
        int32_t window[PLE_MAX_NGRAM];
        uint32_t first = (uint32_t)s->first[r], since = r - first;
        const int32_t *prev = s->state_in[first] < 0
                                  ? NULL
                                  : a->prev + (uint64_t)s->state_in[first] * a->prev_slot_stride;
        for (uint32_t i = 0; i <= n_prev; ++i) {
            window[i] = i <= since ? s->id[r - i] : prev ? prev[i - since - 1] : (int32_t)a->eos;
        }
        if (s->id[r] >= 0) {
            uint64_t hash = (uint64_t)(uint32_t)window[0] * a->multiplier[0];
            bool hidden = false;
            for (uint32_t i = 1; i <= n_prev; ++i) {
                uint32_t c = hidden ? a->eos : (uint32_t)window[i];
                hidden = hidden || c == a->eos;
                hash ^= (uint64_t)c * a->multiplier[i];
                for (uint32_t j = 0; j < a->heads_per_ngram; ++j) {
                    uint32_t h = (i - 1) * a->heads_per_ngram + j;
                    row[h] = (int64_t)(hash % a->size[h] + a->offset[h]);
                }
            }
        }
        if (s->state_out[r] >= 0) {
            /* NOLINTNEXTLINE(clang-analyzer-core.NonNullParamChecker): a step that keeps states has slots */
            memcpy(a->prev + (uint64_t)s->state_out[r] * a->prev_slot_stride, window,
                   sizeof *window * n_prev);
        }
    }
    return 0;
}

struct ple_job {
    const struct qx_op_ple *a;
    float *g, *f; /* [n_rows, C * hidden] */
};

static void gate_row(const struct qx_queue *q, void *user, uint64_t r)
{
    const struct ple_job *job = user;
    const struct qx_op_ple *a = job->a;
    uint32_t h = a->hidden;
    if (a->step->pos[r] < 0) {
        return;
    }
    for (uint32_t c = 0; c < a->n_streams; ++c) {
        size_t at = (r * a->n_streams + c) * h;
        const float *key = a->key + at, *x = a->x + at, *value = a->value + r * h;
        const float *nk = a->norm_key + (size_t)c * h, *nq = a->norm_query + (size_t)c * h;
        double rk = 1.0 / sqrt(q->dot(key, key, h) / h + (double)a->eps);
        double rq = 1.0 / sqrt(q->dot(x, x, h) / h + (double)a->eps);
        double d = 0.0;
        for (uint32_t i = 0; i < h; ++i) {
            d += (double)key[i] * rk * (1.0 + (double)nk[i]) * ((double)x[i] * rq * (1.0 + (double)nq[i]));
        }
        d /= sqrt((double)h);
        double root = sqrt(fabs(d) > 1e-6 ? fabs(d) : 1e-6);
        double t = d > 0.0 ? root : d < 0.0 ? -root : isnan(d) ? d : 0.0;
        double gate = ref_sigmoid(t);
        float *g = job->g + at;
        for (uint32_t i = 0; i < h; ++i) {
            g[i] = (float)(gate * (double)value[i]);
        }
        ref_zrms(q, g, a->norm_conv + (size_t)c * h, h, (double)a->eps, job->f + at);
    }
}

/* Conv input t rows after the run's first; NULL where there is none (zero). */
static const float *ple_tap(const struct ple_job *job, uint32_t first, int64_t t)
{
    const struct qx_op_ple *a = job->a;
    size_t wide = (size_t)a->n_streams * a->hidden;
    int32_t slot = a->step->state_in[first];
    if (t >= 0) {
        return job->f + (first + (size_t)t) * wide;
    }
    if (slot < 0) {
        return NULL;
    }
    int64_t history = (int64_t)(a->conv_kernel - 1) * a->dilation;
    return a->conv_state + (uint64_t)slot * a->conv_slot_stride + (size_t)(history + t) * wide;
}

static void conv_row(const struct qx_queue *q, void *user, uint64_t r)
{
    const struct ple_job *job = user;
    const struct qx_op_ple *a = job->a;
    size_t wide = (size_t)a->n_streams * a->hidden;
    (void)q;
    if (a->step->pos[r] < 0) {
        return;
    }
    uint32_t first = (uint32_t)a->step->first[r];
    for (size_t i = 0; i < wide; ++i) {
        double sum = 0.0;
        for (uint32_t j = 0; j < a->conv_kernel; ++j) {
            const float *f = ple_tap(job, first,
                                     (int64_t)r - first - (int64_t)(a->conv_kernel - 1 - j) * a->dilation);
            if (f) {
                sum += (double)a->conv_w[i * a->conv_kernel + j] * (double)f[i];
            }
        }
        float *x = a->x + r * wide + i;
        *x = (float)((double)*x + ((double)job->g[r * wide + i] + ref_silu(sum)));
    }
}

int ref_ple(struct qx_queue *q, const struct qx_op_ple *a)
{
    const struct qx_step *s = a->step;
    size_t wide = (size_t)a->n_streams * a->hidden;
    struct ple_job job = {a, a->scratch, a->scratch + s->n_rows * wide};
    ref_for(q, s->n_rows, wide * 8, gate_row, &job);
    ref_for(q, s->n_rows, wide * 16, conv_row, &job);
    int64_t history = (int64_t)(a->conv_kernel - 1) * a->dilation;
    for (uint32_t r = 0; r < s->n_rows; ++r) {
        if (s->pos[r] < 0 || s->state_out[r] < 0) {
            continue;
        }
        float *dst = a->conv_state + (uint64_t)s->state_out[r] * a->conv_slot_stride;
        /* Rows move towards the front, so ascending order is right also in place. */
        for (int64_t i = 0; i < history; ++i, dst += wide) {
            const float *f = ple_tap(&job, (uint32_t)s->first[r], (int64_t)r - s->first[r] - (history - 1) + i);
            if (f) {
                memmove(dst, f, 4 * wide);
            } else {
                memset(dst, 0, 4 * wide);
            }
        }
    }
    return 0;
}
