/* ref_decode.c: stored codes to numbers, and the ops that only move rows: decode_rows, ple_gather,
 * embed, pick. Formats 6.1 and 6.2. */
#include "ref.h"

#include <string.h>

uint32_t ref_seg_len(const struct qx_weight *w)
{
    return w->fmt == QX_W_FP8_BLOCK ? 128 : REF_SEG;
}

static double block_scale(const struct qx_weight *w, uint32_t r, uint32_t c)
{
    size_t per_row = (size_t)qx_ceil_div(w->cols, 128);
    size_t i = ((size_t)w->row0 + r) / 128 * per_row + c / 128;
    const uint8_t *s = w->scale;
    return w->scale_bf16 ? (double)qx_bf16_to_f32(qx_load_u16(s + 2 * i)) : (double)qx_load_f32(s + 4 * i);
}

typedef uint16_t v8u16 __attribute__((vector_size(16)));
typedef uint32_t v8u32 __attribute__((vector_size(32)));

static void decode_bf16(const uint8_t *p, uint32_t n, float *out)
{
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        v8u16 b;
        memcpy(&b, p + 2 * (size_t)i, sizeof b);
        v8u32 w = __builtin_convertvector(b, v8u32) << 16;
        memcpy(out + i, &w, sizeof w);
    }
    for (; i < n; ++i) {
        out[i] = qx_bf16_to_f32(qx_load_u16(p + 2 * (size_t)i));
    }
}

/* Sixteen E2M1 codes times their scale; the sixteen possible products are made first. */
static void decode_e2m1_group(const uint8_t *c, float scale, float *out)
{
    float t[16];
    for (uint32_t i = 0; i < 16; ++i) {
        t[i] = qx_e2m1_table[i] * scale;
    }
    for (uint32_t i = 0; i < 8; ++i) {
        out[2 * i] = t[c[i] & 15];
        out[2 * i + 1] = t[c[i] >> 4];
    }
}

double ref_decode_seg(const struct qx_weight *w, uint32_t r, uint32_t c0, uint32_t n, float *out)
{
    const uint8_t *codes = w->codes;
    size_t at = (size_t)r * w->cols + c0;
    switch (w->fmt) {
    case QX_W_F32:
        memcpy(out, codes + 4 * at, 4 * (size_t)n);
        return 1.0;
    case QX_W_F16:
        for (uint32_t i = 0; i < n; ++i) {
            out[i] = qx_f16_to_f32(qx_load_u16(codes + 2 * (at + i)));
        }
        return 1.0;
    case QX_W_BF16:
        decode_bf16(codes + 2 * at, n, out);
        return 1.0;
    case QX_W_FP8:
        for (uint32_t i = 0; i < n; ++i) {
            out[i] = qx_e4m3_table[codes[at + i]];
        }
        return (double)w->global;
    case QX_W_FP8_BLOCK:
        for (uint32_t i = 0; i < n; ++i) {
            out[i] = qx_e4m3_table[codes[at + i]];
        }
        return block_scale(w, r, c0);
    case QX_W_MXFP8: {
        const uint8_t *s = (const uint8_t *)w->scale + (size_t)r * (w->cols / 32);
        for (uint32_t i = 0; i < n; i += 32) {
            float f = qx_e8m0_to_f32(s[(c0 + i) / 32]);
            uint32_t end = i + 32 < n ? i + 32 : n;
            for (uint32_t j = i; j < end; ++j) {
                out[j] = qx_e4m3_table[codes[at + j]] * f;
            }
        }
        return 1.0;
    }
    case QX_W_NVFP4: {
        const uint8_t *s = (const uint8_t *)w->scale + (size_t)r * (w->cols / 16);
        const uint8_t *c = codes + at / 2;
        for (uint32_t i = 0; i < n; i += 16) {
            float f = qx_e4m3_table[s[(c0 + i) / 16]];
            uint32_t end = i + 16 < n ? i + 16 : n;
            if (end == i + 16) {
                decode_e2m1_group(c + i / 2, f, out + i);
                continue;
            }
            for (uint32_t j = i; j + 1 < end; j += 2) {
                out[j] = qx_e2m1_table[c[j / 2] & 15] * f;
                out[j + 1] = qx_e2m1_table[c[j / 2] >> 4] * f;
            }
        }
        return (double)w->global;
    }
    default:
        memset(out, 0, 4 * (size_t)n);
        return 1.0;
    }
}

/* A whole row as the exact product rounded once. */
static void weight_row(const struct qx_weight *w, uint32_t r, float *out)
{
    uint32_t seg = ref_seg_len(w);
    for (uint32_t c = 0; c < w->cols; c += seg) {
        uint32_t n = w->cols - c < seg ? w->cols - c : seg;
        double f = ref_decode_seg(w, r, c, n, out + c);
        for (uint32_t i = 0; i < n; ++i) {
            out[c + i] = (float)((double)out[c + i] * f);
        }
    }
}

void ref_table_row(const struct qx_table_desc *t, int64_t row, float *out)
{
    uint64_t shard = row >= 0 ? (uint64_t)row / t->rows_per_shard : 0;
    if (row < 0 || (uint64_t)row >= t->n_rows || !t->codes[shard]) {
        memset(out, 0, 4 * (size_t)t->width);
        return;
    }
    uint64_t local = (uint64_t)row % t->rows_per_shard;
    const uint8_t *scale = t->scale ? t->scale[shard] : NULL;
    struct qx_weight w = {
        .codes = (const uint8_t *)t->codes[shard] + local * t->code_stride,
        .scale = scale ? scale + local * t->scale_stride : NULL,
        .global = t->global,
        .rows = 1,
        .cols = t->width,
        .fmt = t->fmt,
    };
    weight_row(&w, 0, out);
}

static void gather_one(const struct qx_queue *q, void *user, uint64_t i)
{
    const struct qx_op_ple_gather *a = user;
    (void)q;
    ref_table_row(&a->table, a->row[i], a->out + i * a->table.width);
}

int ref_ple_gather(struct qx_queue *q, const struct qx_op_ple_gather *a)
{
    ref_for(q, a->n, a->table.width, gather_one, (void *)(uintptr_t)a);
    return 0;
}

static void decode_one(const struct qx_queue *q, void *user, uint64_t i)
{
    const struct qx_op_decode_rows *a = user;
    bool is_weight = a->weight.fmt != QX_W_NONE;
    size_t width = is_weight ? a->weight.cols : a->table.width;
    int64_t row = a->row[i];
    (void)q;
    if (!a->bf16) {
        float *out = (float *)a->out + i * width;
        if (!is_weight) {
            ref_table_row(&a->table, row, out);
        } else if (row >= 0 && row < (int64_t)a->weight.rows) {
            weight_row(&a->weight, (uint32_t)row, out);
        } else {
            memset(out, 0, 4 * width);
        }
        return;
    }
    uint16_t *out = (uint16_t *)a->out + i * width;
    memset(out, 0, 2 * width);
    float buf[REF_SEG];
    for (size_t c = 0; c < width; c += REF_SEG) {
        uint32_t n = (uint32_t)(width - c < REF_SEG ? width - c : REF_SEG);
        struct qx_weight w = a->weight;
        uint32_t r = (uint32_t)row;
        if (is_weight) {
            if (row < 0 || row >= (int64_t)w.rows) {
                return;
            }
        } else {
            const struct qx_table_desc *t = &a->table;
            if (row < 0 || (uint64_t)row >= t->n_rows || !t->codes[(uint64_t)row / t->rows_per_shard]) {
                return;
            }
            uint64_t shard = (uint64_t)row / t->rows_per_shard, local = (uint64_t)row % t->rows_per_shard;
            const uint8_t *scale = t->scale ? t->scale[shard] : NULL;
            w = (struct qx_weight){.codes = (const uint8_t *)t->codes[shard] + local * t->code_stride,
                                   .scale = scale ? scale + local * t->scale_stride : NULL,
                                   .global = t->global, .rows = 1, .cols = t->width, .fmt = t->fmt};
            r = 0;
        }
        uint32_t seg = ref_seg_len(&w);
        for (uint32_t k = 0; k < n; k += seg) {
            uint32_t m = n - k < seg ? n - k : seg;
            double f = ref_decode_seg(&w, r, (uint32_t)c + k, m, buf);
            for (uint32_t j = 0; j < m; ++j) {
                out[c + k + j] = qx_f32_to_bf16((float)((double)buf[j] * f));
            }
        }
    }
}

int ref_decode_rows(struct qx_queue *q, const struct qx_op_decode_rows *a)
{
    ref_for(q, a->n, a->weight.fmt != QX_W_NONE ? a->weight.cols : a->table.width, decode_one,
            (void *)(uintptr_t)a);
    return 0;
}

int ref_embed(struct qx_queue *q, const struct qx_op_embed *a)
{
    (void)q;
    size_t h = a->table.cols;
    for (uint32_t r = 0; r < a->step->n_rows; ++r) {
        float *x = a->x + (size_t)r * a->n_streams * h;
        int32_t id = a->step->id[r];
        if (id >= 0 && (uint32_t)id < a->table.rows) {
            weight_row(&a->table, (uint32_t)id, x);
        } else {
            float bad = a->step->pos[r] < 0 ? 0.0f : NAN;
            for (size_t i = 0; i < h; ++i) {
                x[i] = bad;
            }
        }
        for (uint32_t c = 1; c < a->n_streams; ++c) {
            memcpy(x + c * h, x, 4 * h);
        }
    }
    return 0;
}

int ref_pick(struct qx_queue *q, const struct qx_op_pick *a)
{
    (void)q;
    for (uint32_t j = 0; j < a->n; ++j) {
        if (a->index[j] >= 0) {
            memcpy(a->out + (size_t)j * a->width, a->in + (size_t)a->index[j] * a->width,
                   4 * (size_t)a->width);
        }
    }
    return 0;
}
