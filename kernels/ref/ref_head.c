/* ref_head.c: the copy of a head, and the arg-max of its logits. */
#include "ref.h"

static void copy_row(const struct qx_queue *q, void *user, uint64_t r)
{
    const struct qx_op_head_copy *a = user;
    uint32_t cols = a->from.cols;
    const uint16_t *from = (const uint16_t *)a->from.codes + r * cols;
    double d2 = 0.0, w2 = 0.0;
    (void)q;
    for (uint32_t g = 0; g < cols / 32; ++g) {
        float v[32], most = 0.0f;
        bool finite = true;
        for (uint32_t i = 0; i < 32; ++i) {
            v[i] = qx_bf16_to_f32(from[32 * g + i]);
            finite = finite && isfinite(v[i]);
            most = fabsf(v[i]) > most ? fabsf(v[i]) : most;
        }
        int e = most > 0.0f ? ilogbf(most) - 8 : -127;
        e += most > ldexpf(448.0f, e);
        e = e < -127 ? -127 : e;
        a->scale[r * (cols / 32) + g] = finite ? (uint8_t)(e + 127) : 255;
        for (uint32_t i = 0; i < 32; ++i) {
            uint8_t c = finite ? qx_f32_to_e4m3(ldexpf(v[i], -e)) : 0;
            double d = (double)v[i] - ldexp((double)qx_e4m3_table[c], e);
            a->codes[r * cols + 32 * g + i] = c;
            d2 += d * d;
            w2 += (double)v[i] * v[i];
        }
    }
    a->off[r] = (float)(sqrt(d2) * (1.0 + 0x1p-10) + sqrt(w2) * 0x1p-13);
}

int ref_head_copy(struct qx_queue *q, const struct qx_op_head_copy *a)
{
    ref_for(q, a->from.rows, 16ull * a->from.cols, copy_row, (void *)(uintptr_t)a);
    return 0;
}

static void best_row(const struct qx_queue *q, void *user, uint64_t r)
{
    const struct qx_op_head_best *a = user;
    const float *near = a->near + r * a->head.rows;
    float best = 0.0f;
    uint32_t id = 0;
    for (uint32_t v = 0; v < a->head.rows; v += REF_BLOCK) {
        double acc[REF_BLOCK][REF_TILE];
        uint32_t n = a->head.rows - v < REF_BLOCK ? a->head.rows - v : REF_BLOCK;
        ref_block(q, &a->head, v, n, a->x + r * a->head.cols, a->head.cols, NULL, 1, 1, true, acc);
        for (uint32_t i = 0; i < n; ++i) {
            float l = (float)acc[i][0];
            if (v + i == 0 || l > best || (isnan(l) && !isnan(best))) {
                best = l;
                id = v + i;
            }
        }
    }
    double sum = 0.0;
    for (uint32_t v = 0; v < a->head.rows && a->prob; ++v) {
        sum += exp((double)near[v] - (double)best);
    }
    a->id[r] = a->finite && (isnan(best) || best == INFINITY) ? -1 : (int32_t)id;
    if (a->prob) {
        a->value[r] = best;
        a->prob[r] = (float)(1.0 / sum);
    }
    if (a->told) {
        a->told[r] = a->id[r];
    }
}

int ref_head_best(struct qx_queue *q, const struct qx_op_head_best *a)
{
    ref_for(q, a->n_rows, (uint64_t)a->head.rows * a->head.cols, best_row, (void *)(uintptr_t)a);
    return 0;
}
