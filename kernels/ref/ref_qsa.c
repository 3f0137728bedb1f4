/* ref_qsa.c: sparse attention (model 6.2): norms, rope and caches; pooled index keys; block selection;
 * attention over the selected blocks and the tail in causal order. */
#include "ref.h"

#include <string.h>

#define QSA_MAX_DIM 1024

/* n cached values from element `at`, in place when they are f32. */
static const float *kv_values(const void *p, size_t at, uint32_t n, bool bf16, float *buf)
{
    if (!bf16) {
        return (const float *)p + at;
    }
    uint32_t i = 0; /* n >= 1 */
    do {
        buf[i] = ref_kv_get(p, at + i, true);
    } while (++i < n);
    return buf;
}

static void prepare_row(const struct qx_queue *q, void *user, uint64_t r)
{
    const struct qx_op_qsa_prepare *a = user;
    int32_t pos = a->step->pos[r];
    if (pos < 0) {
        return;
    }
    const float *in = a->in + r * a->in_stride;
    uint32_t d = a->head_dim, id = a->i_dim;
    for (uint32_t h = 0; h < a->n_heads; ++h) {
        float *out = a->q + (r * a->n_heads + h) * d;
        ref_zrms(q, in + 2 * (size_t)h * d, a->q_norm, d, (double)a->eps, out);
        ref_rope(&a->rope, pos, out);
    }
    const float *k = in + 2 * (size_t)a->n_heads * d, *v = k + (size_t)a->n_kv_heads * d;
    const float *index = v + (size_t)a->n_kv_heads * d;
    size_t row = ref_kv_row(&a->kv, a->step->seq[r], pos);
    float tmp[QSA_MAX_DIM];
    for (uint32_t h = 0; h < a->n_kv_heads; ++h) {
        ref_zrms(q, k + (size_t)h * d, a->k_norm, d, (double)a->eps, tmp);
        ref_rope(&a->rope, pos, tmp);
        for (uint32_t i = 0; i < d; ++i) {
            size_t at = (row * a->n_kv_heads + h) * d + i;
            ref_kv_put(a->kv.k, at, a->kv.bf16, tmp[i]);
            ref_kv_put(a->kv.v, at, a->kv.bf16, v[(size_t)h * d + i]);
        }
    }
    for (uint32_t h = 0; h < a->i_heads; ++h) {
        float *out = a->iq + (r * a->i_heads + h) * id;
        ref_zrms(q, index + (size_t)h * id, a->iq_norm, id, (double)a->eps, out);
        ref_rope(&a->rope, pos, out);
    }
    for (uint32_t i = 0; i < id; ++i) {
        ref_kv_put(a->kv.raw, row * id + i, a->kv.bf16, index[(size_t)a->i_heads * id + i]);
    }
}

/* The block that this row completes, if any; all raw keys are in the cache by now. */
static void pool_row(const struct qx_queue *q, void *user, uint64_t r)
{
    const struct qx_op_qsa_prepare *a = user;
    int64_t pos = a->step->pos[r];
    if (pos < 0 || (pos + 1) % a->ratio) {
        return;
    }
    uint32_t id = a->i_dim;
    int64_t start = pos + 1 - a->ratio;
    float mean[QSA_MAX_DIM] = {0}, out[QSA_MAX_DIM];
    size_t row = ref_kv_row(&a->kv, a->step->seq[r], start);
    for (uint32_t i = 0; i < id; ++i) {
        double sum = 0.0;
        for (uint32_t j = 0; j < a->ratio; ++j) {
            sum += (double)ref_kv_get(a->kv.raw, (row + j) * id + i, a->kv.bf16);
        }
        mean[i] = (float)(sum / a->ratio);
    }
    ref_zrms(q, mean, a->ik_norm, id, (double)a->eps, out);
    ref_rope(&a->rope, start, out);
    for (uint32_t i = 0; i < id; ++i) {
        ref_kv_put(a->kv.pooled, row / a->ratio * id + i, a->kv.bf16, out[i]);
    }
}

int ref_qsa_prepare(struct qx_queue *q, const struct qx_op_qsa_prepare *a)
{
    void *user = (void *)(uintptr_t)a;
    if (a->head_dim > QSA_MAX_DIM || a->i_dim > QSA_MAX_DIM) {
        return -1;
    }
    uint64_t cost = (uint64_t)(a->n_heads + 2 * a->n_kv_heads) * a->head_dim * 4;
    ref_for(q, a->step->n_rows, cost, prepare_row, user);
    ref_for(q, a->step->n_rows, a->i_dim * 8ull, pool_row, user);
    return 0;
}

static uint32_t score_bits(float s)
{
    return qx_f32_bits(s); /* scores are >= 0 or NaN: their bits order them, NaN largest */
}

static void select_row(const struct qx_queue *q, void *user, uint64_t r)
{
    const struct qx_op_qsa_select *a = user;
    int64_t pos = a->step->pos[r];
    if (pos < 0) {
        a->n_block[r] = 0;
        return;
    }
    uint32_t nb = (uint32_t)((pos + 1) / a->ratio), id = a->i_dim;
    int32_t *block = a->block + r * a->budget_blocks;
    if (nb <= a->budget_blocks) {
        for (uint32_t b = 0; b < nb; ++b) {
            block[b] = (int32_t)b;
        }
        a->n_block[r] = (int32_t)nb;
        return;
    }
    float *score = a->scores + r * a->max_blocks;
    for (uint32_t b = 0; b < nb; ++b) {
        float buf[QSA_MAX_DIM];
        size_t row = ref_kv_row(&a->kv, a->step->seq[r], (int64_t)b * a->ratio) / a->ratio;
        const float *key = kv_values(a->kv.pooled, row * id, id, a->kv.bf16, buf);
        double sum = 0.0;
        for (uint32_t h = 0; h < a->i_heads; ++h) {
            double s = q->dot(a->iq + (r * a->i_heads + h) * id, key, id);
            sum += s > 0.0 || isnan(s) ? s : 0.0;
        }
        score[b] = (float)sum;
    }
    /* The largest cut with at least budget_blocks scores at or above it, bit by bit from the top. */
    uint32_t cut = 0;
    for (uint32_t bit = 1u << 31; bit; bit >>= 1) {
        uint32_t n = 0;
        for (uint32_t b = 0; b < nb; ++b) {
            n += score_bits(score[b]) >= (cut | bit);
        }
        if (n >= a->budget_blocks) {
            cut |= bit;
        }
    }
    uint32_t above = 0;
    for (uint32_t b = 0; b < nb; ++b) {
        above += score_bits(score[b]) > cut;
    }
    uint32_t equal = a->budget_blocks - above, n = 0;
    for (uint32_t b = 0; b < nb; ++b) {
        uint32_t bits = score_bits(score[b]);
        if (bits > cut || (bits == cut && equal)) {
            equal -= bits == cut;
            block[n++] = (int32_t)b;
        }
    }
    a->n_block[r] = (int32_t)n;
}

int ref_qsa_select(struct qx_queue *q, const struct qx_op_qsa_select *a)
{
    if (a->i_dim > QSA_MAX_DIM) {
        return -1;
    }
    ref_for(q, a->step->n_rows, (uint64_t)a->i_heads * a->i_dim * 64, select_row, (void *)(uintptr_t)a);
    return 0;
}

struct attend_head {
    const struct qx_op_qsa_attend *a;
    const float *q;
    uint32_t kv_head;
    int32_t seq;
    double max, sum, acc[QSA_MAX_DIM];
};

static void attend_pos(const struct qx_queue *q, struct attend_head *t, int64_t pos)
{
    const struct qx_op_qsa_attend *a = t->a;
    uint32_t d = a->head_dim;
    size_t at = (ref_kv_row(&a->kv, t->seq, pos) * a->n_kv_heads + t->kv_head) * d;
    float kbuf[QSA_MAX_DIM], vbuf[QSA_MAX_DIM];
    kbuf[0] = vbuf[0] = 0.0f;
    const float *k = kv_values(a->kv.k, at, d, a->kv.bf16, kbuf);
    const float *v = kv_values(a->kv.v, at, d, a->kv.bf16, vbuf);
    double s = q->dot(t->q, k, d) / sqrt((double)d);
    if (s > t->max || t->sum == 0.0) {
        double f = t->sum == 0.0 ? 0.0 : exp(t->max - s);
        t->sum *= f;
        for (uint32_t i = 0; i < d; ++i) {
            t->acc[i] *= f;
        }
        t->max = s;
    }
    double w = exp(s - t->max);
    t->sum += w;
    for (uint32_t i = 0; i < d; ++i) {
        t->acc[i] += w * (double)v[i];
    }
}

static void attend_one(const struct qx_queue *q, void *user, uint64_t i)
{
    const struct qx_op_qsa_attend *a = user;
    uint64_t r = i / a->n_heads;
    uint32_t h = (uint32_t)(i % a->n_heads), d = a->head_dim;
    int64_t pos = a->step->pos[r];
    if (pos < 0) {
        return;
    }
    struct attend_head t = {.a = a, .q = a->q + i * d, .kv_head = h / (a->n_heads / a->n_kv_heads),
                            .seq = a->step->seq[r]};
    const int32_t *block = a->block + r * a->budget_blocks;
    for (int32_t b = 0; b < a->n_block[r]; ++b) {
        for (uint32_t j = 0; j < a->ratio; ++j) {
            attend_pos(q, &t, (int64_t)block[b] * a->ratio + j);
        }
    }
    /* NOLINTNEXTLINE(clang-analyzer-core.DivideZero): the ratio is positive */
    for (int64_t p = (pos + 1) / a->ratio * a->ratio; p <= pos; ++p) {
        attend_pos(q, &t, p);
    }
    const float *gate = a->in + r * a->in_stride + (2 * (size_t)h + 1) * d;
    for (uint32_t j = 0; j < d; ++j) {
        a->o[i * d + j] = (float)(t.acc[j] / t.sum * ref_sigmoid((double)gate[j]));
    }
}

int ref_qsa_attend(struct qx_queue *q, const struct qx_op_qsa_attend *a)
{
    if (a->head_dim > QSA_MAX_DIM) {
        return -1;
    }
    ref_for(q, (uint64_t)a->step->n_rows * a->n_heads,
            (uint64_t)a->head_dim * a->ratio * (a->budget_blocks < 64 ? a->budget_blocks : 64), attend_one,
            (void *)(uintptr_t)a);
    return 0;
}
