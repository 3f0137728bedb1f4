/* ref_matmul.c: dot products of stored rows with activations, and the linear op. A row of codes is
 * decoded once for up to REF_TILE inputs; each product is summed on its own, so that a value does not
 * depend on which other rows are computed with it. */
#include "ref.h"

#include <string.h>

typedef double v4d __attribute__((vector_size(32)));
typedef float v4f __attribute__((vector_size(16)));

/* One text for both instruction sets: lanes are the partial sums, so the bits agree. */
#define REF_DOT_BODY                                                                    \
    v4d s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};                                         \
    uint32_t i = 0;                                                                     \
    for (; i + 16 <= n; i += 16) {                                                      \
        v4f x[4], y[4];                                                                 \
        memcpy(x, a + i, sizeof x);                                                     \
        memcpy(y, b + i, sizeof y);                                                     \
        s0 += __builtin_convertvector(x[0], v4d) * __builtin_convertvector(y[0], v4d);  \
        s1 += __builtin_convertvector(x[1], v4d) * __builtin_convertvector(y[1], v4d);  \
        s2 += __builtin_convertvector(x[2], v4d) * __builtin_convertvector(y[2], v4d);  \
        s3 += __builtin_convertvector(x[3], v4d) * __builtin_convertvector(y[3], v4d);  \
    }                                                                                   \
    double s[16];                                                                       \
    memcpy(s, &s0, 32);                                                                 \
    memcpy(s + 4, &s1, 32);                                                             \
    memcpy(s + 8, &s2, 32);                                                             \
    memcpy(s + 12, &s3, 32);                                                            \
    for (; i < n; ++i) {                                                                \
        s[i % 16] += (double)a[i] * (double)b[i];                                       \
    }                                                                                   \
    for (uint32_t w = 8; w; w /= 2) {                                                   \
        for (uint32_t j = 0; j < w; ++j) {                                              \
            s[j] += s[j + w];                                                           \
        }                                                                               \
    }                                                                                   \
    return s[0];

double ref_dot_plain(const float *a, const float *b, uint32_t n)
{
    REF_DOT_BODY
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) double ref_dot_avx2(const float *a, const float *b, uint32_t n)
{
    REF_DOT_BODY
}
#else
double ref_dot_avx2(const float *a, const float *b, uint32_t n)
{
    return ref_dot_plain(a, b, n);
}
#endif

void ref_block(const struct qx_queue *q, const struct qx_weight *w, uint32_t r0, uint32_t nr,
               const float *x, uint64_t stride, const int32_t *idx, uint32_t div, uint32_t nx, bool bf16,
               double acc[REF_BLOCK][REF_TILE])
{
    float row[REF_BLOCK][REF_SEG], rounded[REF_SEG];
    double factor[REF_BLOCK];
    uint32_t seg = ref_seg_len(w);
    for (uint32_t j = 0; j < nr; ++j) {
        for (uint32_t i = 0; i < nx; ++i) {
            acc[j][i] = 0.0;
        }
    }
    for (uint32_t c = 0; c < w->cols; c += seg) {
        uint32_t n = w->cols - c < seg ? w->cols - c : seg;
        for (uint32_t j = 0; j < nr; ++j) {
            factor[j] = ref_decode_seg(w, r0 + j, c, n, row[j]);
        }
        for (uint32_t i = 0; i < nx; ++i) {
            uint64_t at = idx ? (uint64_t)((uint32_t)idx[i] / div) : i;
            const float *xi = x + at * stride + c;
            if (bf16) {
                for (uint32_t k = 0; k < n; ++k) {
                    rounded[k] = qx_bf16_to_f32(qx_f32_to_bf16(xi[k]));
                }
                xi = rounded;
            }
            for (uint32_t j = 0; j < nr; ++j) {
                acc[j][i] += factor[j] * q->dot(row[j], xi, n);
            }
        }
    }
}

struct matmul_job {
    const struct qx_weight *w;
    const float *x;
    uint64_t x_stride, y_stride;
    uint32_t n_rows;
    float *y;
    bool acc, bf16;
};

static void matmul_block(const struct qx_queue *q, void *user, uint64_t b)
{
    const struct matmul_job *m = user;
    uint32_t r0 = (uint32_t)b * REF_BLOCK;
    uint32_t nr = m->w->rows - r0 < REF_BLOCK ? m->w->rows - r0 : REF_BLOCK;
    double acc[REF_BLOCK][REF_TILE];
    for (uint32_t i0 = 0; i0 < m->n_rows; i0 += REF_TILE) {
        uint32_t nx = m->n_rows - i0 < REF_TILE ? m->n_rows - i0 : REF_TILE;
        ref_block(q, m->w, r0, nr, m->x + i0 * m->x_stride, m->x_stride, NULL, 1, nx,
                  m->bf16, acc);
        for (uint32_t i = 0; i < nx; ++i) {
            float *y = m->y + (i0 + i) * m->y_stride + r0;
            for (uint32_t j = 0; j < nr; ++j) {
                y[j] = (float)(m->acc ? (double)y[j] + acc[j][i] : acc[j][i]);
            }
        }
    }
}

void ref_matmul(const struct qx_queue *q, const struct qx_weight *w, const float *x, uint64_t x_stride,
                uint32_t n_rows, float *y, uint64_t y_stride, bool acc, bool bf16)
{
    struct matmul_job m = {w, x, x_stride, y_stride, n_rows, y, acc, bf16};
    ref_for(q, qx_ceil_div(w->rows, REF_BLOCK), (uint64_t)REF_BLOCK * w->cols * n_rows, matmul_block, &m);
}

int ref_linear(struct qx_queue *q, const struct qx_op_linear *a)
{
    uint64_t off = 0;
    for (uint32_t j = 0; j < a->n_weights; ++j) {
        ref_matmul(q, &a->w[j], a->x, a->x_stride, a->n_rows, a->y + off, a->y_stride, a->acc,
                   a->act_bf16);
        off += a->w[j].rows;
    }
    return 0;
}
