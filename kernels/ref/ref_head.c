/* ref_head.c: the copy of a head, and the arg-max of its logits, which needs no copy here. */
#include "ref.h"

#include <string.h>

/* Eight rows; cuda/head.cu says how they lie. */
static void copy_tile(const struct qx_queue *q, void *user, uint64_t tile)
{
    const struct qx_op_head_copy *a = user;
    uint32_t rows = a->from.rows, cols = a->from.cols, n_chunks = (cols + 127) / 128;
    uint8_t *to = a->codes + tile * n_chunks * 784;
    const uint16_t *from = a->from.codes;
    double d2[8] = {0}, w2[8] = {0};
    (void)q;
    for (uint32_t c = 0; c < n_chunks; ++c, to += 784) {
        uint32_t word[32][6] = {{0}};
        for (uint32_t g = 0; g < 8; ++g) {
            for (uint32_t j = 0; j < 2; ++j) {
                float v[64], most = 0.0f;
                bool finite = true;
                for (uint32_t i = 0; i < 64; ++i) {
                    uint64_t row = tile * 8 + g, col = c * 128 + j * 64 + i;
                    v[i] = row < rows && col < cols ? qx_bf16_to_f32(from[row * cols + col]) : 0.0f;
                    finite = finite && isfinite(v[i]);
                    most = fabsf(v[i]) > most ? fabsf(v[i]) : most;
                }
                uint32_t bits = qx_f32_bits(most * 64.0f / (31.0f * 256.0f)) + 0xfffffu;
                uint32_t code = !finite || bits >= 0x40000000u ? 255 : bits < 0x30000000u ? 0
                                : (bits - 0x30000000u) >> 20;
                float scale = qx_f32_from_bits(code << 20 | 0x30000000u) * 256.0f;
                to[768 + g * 2 + j] = (uint8_t)code;
                for (uint32_t i = 0; i < 64; ++i) {
                    float r = finite ? rintf(v[i] * 64.0f / scale) : 0.0f;
                    r = r < -31.0f ? -31.0f : r > 31.0f ? 31.0f : r;
                    double d = (double)v[i] - (double)r * scale / 64.0;
                    d2[g] += d * d;
                    w2[g] += (double)v[i] * v[i];
                    uint32_t *w = word[4 * g + i % 32 / 8], pair = 8 * j + i / 32 * 4 + i % 8 / 2, at = i % 2 * 16;
                    uint32_t u = (uint32_t)((int)r + 32);
                    if (pair < 12) {
                        w[pair / 2] |= u << (at + pair % 2 * 6);
                    } else {
                        w[pair - 12] |= (u & 15) << (at + 12);
                        w[4 + (pair - 12) / 2] |= (u >> 4) << (at + 12 + pair % 2 * 2);
                    }
                }
            }
        }
        for (uint32_t l = 0; l < 32; ++l) {
            memcpy(to + l * 16, word[l], 16);
            memcpy(to + 512 + l * 8, word[l] + 4, 8);
        }
    }
    for (uint32_t g = 0; g < 8 && tile * 8 + g < rows; ++g) {
        a->off[tile * 8 + g] = (float)(sqrt(d2[g]) * (1.0 + 0x1p-10) + sqrt(w2[g]) * 0x1p-13 + 0x1p-30);
    }
}

int ref_head_copy(struct qx_queue *q, const struct qx_op_head_copy *a)
{
    ref_for(q, (a->from.rows + 7) / 8, 128ull * a->from.cols, copy_tile, (void *)(uintptr_t)a);
    return 0;
}

static void best_row(const struct qx_queue *q, void *user, uint64_t r)
{
    const struct qx_op_head_best *a = user;
    float *logit = a->near + r * a->head.rows, best = 0.0f;
    uint32_t id = 0;
    for (uint32_t v = 0; v < a->head.rows; v += REF_BLOCK) {
        double acc[REF_BLOCK][REF_TILE];
        uint32_t n = a->head.rows - v < REF_BLOCK ? a->head.rows - v : REF_BLOCK;
        ref_block(q, &a->head, v, n, a->x + r * a->head.cols, a->head.cols, NULL, 1, 1, true, acc);
        for (uint32_t i = 0; i < n; ++i) {
            float l = logit[v + i] = (float)acc[i][0];
            if (v + i == 0 || l > best || (isnan(l) && !isnan(best))) {
                best = l;
                id = v + i;
            }
        }
    }
    a->id[r] = a->finite && (isnan(best) || best == INFINITY) ? -1 : (int32_t)id;
    if (a->prob) {
        double sum = 0.0;
        for (uint32_t v = 0; v < a->head.rows; ++v) {
            sum += exp((double)logit[v] - (double)best);
        }
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
